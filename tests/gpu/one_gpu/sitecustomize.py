"""Lets several ranks form a group of NCCL on one GPU: for NCCL, each is a host.

NCCL refuses two ranks of a host on one device, and believes in the host that
NCCL_HOSTID names. They then communicate through sockets.
"""

import os


def name_host() -> None:
    # Python's os.environ does not know it, and so an engine that clears that, when it
    # has been forked, keeps it.
    os.putenv("NCCL_HOSTID", f"rank-{os.getpid()}")


name_host()
os.register_at_fork(after_in_child=name_host)
