"""What an estimate is asked with: checked, and what is left out, filled in."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from labkit.checks import check_choice
from labkit.checks import check_count
from labkit.checks import check_flag
from labkit.checks import is_number
from labkit.checks import shown
from labkit.records import PRECISIONS
from labkit.strategies.zero import is_zero


def check(
    model: Any,
    x: Any,
    world_sizes: Sequence[int],
    batch_size: Any,
    accumulate: Any,
    precision: str,
    activation_checkpointing: Any,
    optimizer: Any,
    device: str,
    device_bytes: Any,
) -> None:
    """ValueError with what to do, unless `estimate` can use these arguments."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is {type(model).__name__}; an estimate needs a torch.nn.Module"
        )
    if is_zero(model) or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            "the model is sharded already, by a run or by hand; make it anew and "
            "estimate the plain model"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient")
    check_input(x)
    if isinstance(world_sizes, str) or not isinstance(world_sizes, Sequence):
        raise ValueError(
            f"world sizes are {shown(world_sizes)}; give them as a list, as [8, 64]"
        )
    if not world_sizes:
        raise ValueError("there are no world sizes; give some, as [8, 64]")
    for world_size in world_sizes:
        check_count("a world size", world_size, most=2**20)
    check_count("batch size", batch_size, "the samples of all ranks together")
    check_count("accumulate", accumulate, "the microbatches of one optimizer step")
    check_choice("precision", precision, PRECISIONS)
    check_flag("activation_checkpointing", activation_checkpointing)
    check_optimizer(optimizer)
    if device_bytes is not None and not (is_number(device_bytes) and device_bytes > 0):
        raise ValueError(
            f"a device's memory is {shown(device_bytes)} bytes; it must be more than 0"
        )
    if device.startswith("cuda") and not torch.backends.cuda.is_built():
        # Torch would end the whole process.
        raise ValueError(f"device is {device!r}; this build of torch is for the CPU")


def check_input(x: Any) -> None:
    """ValueError unless `x` is a batch: a tensor, or a tuple of them."""
    inputs = x if isinstance(x, tuple) else (x,)
    if not inputs or not all(
        isinstance(each, torch.Tensor) and each.dim() for each in inputs
    ):
        raise ValueError(
            f"the input is {type(x).__name__}; it must be a tensor, or a tuple of "
            "tensors, whose first dimension is the batch"
        )


def check_optimizer(optimizer: Any) -> None:
    """ValueError unless it is an optimizer, a class of them, or None."""
    if not (
        optimizer is None
        or isinstance(optimizer, torch.optim.Optimizer)
        or (
            isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
        )
    ):
        raise ValueError(
            f"optimizer is {shown(optimizer)}; give an optimizer, or a class of "
            "torch.optim"
        )


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of torch.optim called `name`; ValueError with those that exist."""
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        known = [
            key
            for key, value in vars(torch.optim).items()
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        ]
        raise ValueError(
            f"--optimizer {name}: neither a variable nor a class of torch.optim, which "
            f"has: {', '.join(sorted(known))}"
        )
    return found


def ids_for(model: nn.Module, sequence: int | None) -> torch.Tensor:
    """Token ids (1, T) for a model that begins with an Embedding, on the meta device.

    ValueError where it does not, or where T is not given.
    """
    first = next((m for m in model.modules() if not any(m.children())), None)
    if not isinstance(first, nn.Embedding):
        raise ValueError(
            f"the model begins with {type(first).__name__}, so that its input cannot "
            "be guessed; give --input NAME, a variable with a batch"
        )
    if sequence is None:
        raise ValueError(
            "the model begins with an Embedding, so it takes token ids of shape "
            "(batch, T); give --sequence T, or --input NAME, a variable with a batch"
        )
    check_count("sequence", sequence, "the tokens of a sample")
    return torch.empty(1, sequence, dtype=torch.int64, device="meta")


def cross_entropy(output: Any) -> torch.Tensor:
    """The loss that is assumed: cross-entropy of logits (..., classes), fp32."""
    logits = next(t for t in tree_leaves(output) if isinstance(t, torch.Tensor))
    if logits.dim() < 2:
        return logits.float().mean()
    logits = logits.flatten(0, -2)
    targets = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits, targets)
