"""What torch sees of this machine's GPUs, as JSON on stdout.

Run as a process of its own, by its path: `python -P seen_by_torch.py`. The notebook's
process makes no CUDA context, and a driver that hangs ends with this one.
"""

import json
import warnings
from typing import Any


def look() -> dict[str, Any]:
    """Versions, warnings, GPUs, and pairs of them without access to each other."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch

        found: dict[str, Any] = {
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "gpus": [],
            "no_peer_access": [],
        }
        # A device count may come from NVML where CUDA itself does not start.
        if torch.cuda.is_available():
            found["gpus"] = [describe(i) for i in range(torch.cuda.device_count())]
            numbers = range(len(found["gpus"]))
            found["no_peer_access"] = [
                [one, other]
                for one in numbers
                for other in numbers
                if one < other and not torch.cuda.can_device_access_peer(one, other)
            ]
            from torch.cuda import nccl

            found["nccl"] = ".".join(map(str, nccl.version()))
    found["warnings"] = [" ".join(str(each.message).split()) for each in caught]
    return found


def describe(number: int) -> dict[str, Any]:
    """One GPU: what it is, and its memory in bytes."""
    import torch

    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return {
        "name": properties.name,
        "memory": total,
        "free": free,
    }


if __name__ == "__main__":
    print(json.dumps(look()))
