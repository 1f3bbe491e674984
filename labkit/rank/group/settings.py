"""The environment variables by which torch's backends are set."""

import os
from collections.abc import MutableMapping

import psutil
import torch.distributed as dist

NCCL = {
    # Torch's watchdog ends the process for a communicator that was aborted, or for a
    # collective that outlasts the group's timeout: with 0 it does neither.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Which sets the former, where it is 0, to what ends the process.
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    # It would end a process that was stopped, or aborts slowly, after some 8 minutes.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # It would hide the user's CUDA error behind its own, and end the process.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""What torch's NCCL backend must have here: with other values it ends engines."""


def loopback_interface() -> str:
    """Name of the interface that never leaves this host."""
    return next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address == "127.0.0.1" for address in addresses)
    )


def set_variables(
    backend: str, environment: MutableMapping[str, str] = os.environ
) -> list[str]:
    """Set what torch's backends read once, before the first group.

    Returns a sentence for each setting of the user's that could not be kept.
    """
    interface = loopback_interface()
    defaults = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        # Gloo gets the addresses of all ranks at once: one question to the store of
        # each rank in place of two for each pair of ranks.
        "GLOO_ENABLE_STORE_V2_API": "1",
        # Torch's record of collectives is read while a cell hangs; all 2000 that it
        # keeps by itself would take 0.2 s.
        "TORCH_FR_BUFFER_SIZE": "256",
        # The pipeline's messages go one after the other in each direction.
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
        # A thread of torch's would ask the store each second whether to dump.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    for variable, value in defaults.items():
        environment.setdefault(variable, value)
    notes = [
        f"{variable}={environment[variable]} is set here, and ranks run with {value}: "
        "otherwise torch would end a rank's process where labkit ends only the cell"
        for variable, value in NCCL.items()
        if environment.get(variable, value) != value
    ]
    environment.update(NCCL)
    if backend != "nccl":
        notes.clear()
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
        environment["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
        notes.append(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL is set here, and ranks run with INFO: "
            "torch crashes in DistributedDataParallel with DETAIL, under torchrun too. "
            "labkit itself says which collective a rank waits in"
        )
    return notes
