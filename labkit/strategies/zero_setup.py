"""Brings a model to its device for DeepSpeed, a parameter at a time.

DeepSpeed itself would move all of it in fp32, and make the fp32 copy that it updates of
values that it has rounded to bf16.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.strategies.materialize import move
from labkit.strategies.materialize import parts
from labkit.strategies.prepared import units
from labkit.strategies.zero_states import own_part

Digits = dict[torch.Tensor, torch.Tensor]
"""The fp32 values, on the CPU, of trained parameters that were rounded: whole, or of
this rank's partition in stage 3."""


def place(
    module: nn.Module, device: torch.device, dtype: torch.dtype, partitioner: Any = None
) -> Digits:
    """Bring a model to the device with rank 0's values, its parameters in `dtype`; in
    stage 3 partition each with `partitioner`, before the next one comes. Collective."""
    digits: Digits = {}
    for _, tensors in parts(module, units(module)):
        for tensor in tensors:
            is_parameter = isinstance(tensor, nn.Parameter)
            rounds = (
                is_parameter
                and tensor.is_floating_point()
                and dtype is not torch.float32
            )
            if rounds and not tensor.requires_grad:
                tensor.data = tensor.detach().to(dtype)
            move(tensor, device)
            dist.broadcast(tensor.detach(), src=0)
            if rounds and tensor.requires_grad:
                values = tensor.detach()
                part = values if partitioner is None else own_part(values)
                digits[tensor] = part.float().cpu()
                tensor.data = values.to(dtype)
            if is_parameter and partitioner is not None:
                partitioner._convert_to_zero_parameters([tensor])
    return digits


def build_partitioner(deepspeed: Any, config: dict[str, Any]) -> Any:
    """What partitions parameters for stage 3, as DeepSpeed does it by itself."""
    deepspeed.init_distributed(verbose=False)
    return deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=config)


def restore_digits(digits: Digits, trained: Sequence[torch.Tensor]) -> None:
    """Let the fp32 copy of what is trained have all digits that the model had."""
    from deepspeed import utils

    for parameter in trained:
        values = digits.pop(parameter, None)
        if values is None:
            continue
        if hasattr(parameter, "ds_id"):
            utils.safe_set_local_fp32_param(parameter, values)
        else:
            utils.safe_set_full_fp32_param(parameter, values)
