"""Ends torch.distributed.rpc after a cell that failed, so that it can begin again."""

import sys

from labkit.compat.c10d import has_rpc_agent


def end_rpc() -> bool:
    """Shut this rank's agent down, without the others; whether there was one."""
    if not has_rpc_agent():
        return False
    sys.modules["torch.distributed.rpc"].shutdown(graceful=False)
    return True
