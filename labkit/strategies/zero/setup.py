"""Brings a model to its device for DeepSpeed, a parameter at a time.

DeepSpeed itself would move all of it in fp32, and make the fp32 copy that it updates of
values that it has rounded to bf16.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import wrap_torch_function

from labkit.compat import deepspeed as deepspeed_compat
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.model.materialize import move
from labkit.strategies.model.materialize import parts
from labkit.strategies.prepared import units
from labkit.strategies.zero.states import own_part

Digits = dict[torch.Tensor, torch.Tensor]
"""The fp32 values, on the CPU, of trained parameters that were rounded: whole, or of
this rank's partition in stage 3."""


def place(
    module: nn.Module, dtype: torch.dtype, peers: Peers, partitioner: Any = None
) -> Digits:
    """Bring a model to the device of `peers` with the values of their first rank, its
    parameters in `dtype`; in stage 3 partition each with `partitioner`, before the next
    one comes. Collective."""
    digits: Digits = {}
    for _, tensors in parts(module, units(module)):
        for tensor in tensors:
            if not isinstance(tensor, nn.Parameter):
                bring(tensor, peers)
            elif dtype is torch.float32 or not tensor.is_floating_point():
                bring(tensor, peers)
                partition(tensor, partitioner)
            elif not tensor.requires_grad:
                tensor.data = tensor.detach().to(dtype)
                bring(tensor, peers)
                partition(tensor, partitioner)
            else:
                digits[tensor] = round_trained(tensor, dtype, peers, partitioner)
    return digits


def bring(tensor: torch.Tensor, peers: Peers) -> None:
    """Move it to the device, and give it the first rank's values. Collective."""
    move(tensor, peers.device)
    peers.broadcast(tensor.detach())


def partition(parameter: nn.Parameter, partitioner: Any) -> None:
    if partitioner is not None:
        deepspeed_compat.partition(partitioner, parameter)


def round_trained(
    parameter: Any, dtype: torch.dtype, peers: Peers, partitioner: Any
) -> torch.Tensor:
    """Bring and partition it in `dtype`; what it was in fp32, as `Digits` has it."""
    bring(parameter, peers)
    values = parameter.detach()
    parameter.data = values.to(dtype)
    partition(parameter, partitioner)
    part = values
    if partitioner is not None:
        part = own_part(parameter.ds_tensor, values, peers.rank)
    return part.float().cpu()


def build_partitioner(deepspeed: Any, config: dict[str, Any], sharing: Any) -> Any:
    """What partitions parameters for stage 3, as DeepSpeed does it by itself; `sharing`
    is the group of `second_copies`."""
    deepspeed.init_distributed(verbose=False)
    partitioner = deepspeed.zero.Init(
        module=nn.Module(),
        config_dict_or_path=config,
        zero_param_parallel_group=sharing,
    )
    linear: Any = nn.functional.linear
    if not hasattr(linear, "__wrapped__"):
        # DeepSpeed's own does not ask a parameter first, which is to be gathered for a
        # loop that computes with it.
        nn.functional.linear = wrap_torch_function(tensors_of_linear)(linear)
    return partitioner


def tensors_of_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    return input, weight, bias


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
