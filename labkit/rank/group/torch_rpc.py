"""Ends torch.distributed.rpc after a cell that failed, so that it can begin again."""

import sys
from typing import Any


def _loaded() -> Any:
    return sys.modules.get("torch.distributed.rpc")


def end_rpc() -> bool:
    """Shut this rank's agent down, without the others; whether there was one."""
    rpc = _loaded()
    if rpc is None or not rpc.api._is_current_rpc_agent_set():
        return False
    rpc.shutdown(graceful=False)
    return True


def forget_rpc() -> None:
    """Count from 0 again, as the other ranks do, what ranks are to have counted alike.

    A rank that failed, or that was brought back, has called less of it than others.
    """
    if (rpc := _loaded()) is not None:
        rpc._init_counter = 0
        rpc.api._all_gather_sequence_id.clear()
        rpc.api._all_gather_sequence_id_to_states.clear()
