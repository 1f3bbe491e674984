"""This rank's device: what it is, and whether this process can use it still."""

from typing import Any

import torch


def describe(device: torch.device) -> dict[str, str]:
    """The model of a GPU, and its place on the bus as nvidia-smi writes it."""
    if device.type != "cuda":
        return {}
    found: Any = torch.cuda.get_device_properties(device)
    bus = f"{found.pci_domain_id:08X}:{found.pci_bus_id:02X}:{found.pci_device_id:02X}"
    return {"model": found.name, "bus": f"{bus}.0"}


def why_lost(device: torch.device) -> str:
    """Why nothing will work on `device` in this process any more; "" where it will.

    After a kernel has failed, as by an assertion, every call of CUDA fails in this
    process. Not to be waited for: what runs there may be a collective that never ends.
    """
    if device.type == "cuda" and torch.cuda.is_initialized():
        try:
            torch.cuda.current_stream(device).query()
        except RuntimeError as error:
            return str(error).strip().split("\n")[0]
    return ""
