"""What an estimate is asked with: checked, and what is left out, filled in."""

import inspect
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from labkit.checks import check_choice
from labkit.checks import check_count
from labkit.checks import check_flag
from labkit.checks import is_number
from labkit.checks import short_repr
from labkit.compat.torch import tree_leaves
from labkit.estimate.trace import Inputs
from labkit.estimate.trace import UntraceableError
from labkit.strategies.zero.engines import is_zero
from labkit.train_options import PRECISIONS

DEVICES = ("cpu", "cuda")


def check_model(model: Any) -> None:
    """ValueError unless it is a module."""
    if isinstance(model, nn.Module):
        return
    text = f"the model is of type {type(model).__name__}; an estimate needs a "
    text += "torch.nn.Module"
    if name := getattr(model, "__name__", None):
        text += f": give what {name} makes, as in model = {name}()"
    raise ValueError(text)


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
    """ValueError with what to do, unless `estimate` can use these arguments;
    UntraceableError where it can without `x`."""
    check_model(model)
    if is_zero(model) or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            "the model is sharded already, by a run or by the cell; build it again and "
            "estimate the plain model"
        )
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        raise ValueError(
            "the model has lazy layers, whose sizes come from its first input; call "
            "it with one batch first"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "no parameter of the model requires a gradient; call requires_grad_(True) "
            "on those to train"
        )
    if x is not None:
        check_input(x)
    if isinstance(world_sizes, str) or not isinstance(world_sizes, Sequence):
        raise ValueError(
            f"world sizes are {short_repr(world_sizes)}; give them as a list, for "
            "example [8, 64]"
        )
    if not world_sizes:
        raise ValueError("there are no world sizes; give some, for example [8, 64]")
    for world_size in world_sizes:
        check_count("a world size", world_size, most=2**20)
    if x is not None:
        check_count("batch size", batch_size, "the samples of all ranks together")
    check_count("accumulate", accumulate, "the microbatches of one optimizer step")
    check_choice("precision", precision, PRECISIONS)
    check_flag("activation_checkpointing", activation_checkpointing)
    check_optimizer(optimizer)
    if device_bytes is not None and not (is_number(device_bytes) and device_bytes > 0):
        raise ValueError(
            f"a device's memory is {short_repr(device_bytes)} bytes; it must be more "
            "than 0"
        )
    check_choice("device", device, DEVICES)
    if device == "cuda" and x is not None and not torch.cuda.device_count():
        # Torch fails in words of its own there, or ends the whole process.
        raise UntraceableError(
            f"device is 'cuda', but torch {torch.__version__} sees no GPU here, and "
            'tracing a step needs one; pass device="cpu", or estimate on a lab\'s '
            "GPUs: make the model in a %%dist cell, then %dist_estimate NAME"
        )


def check_input(x: Any) -> None:
    """ValueError unless `x` is a batch: a tensor, or a tuple or dict of them."""
    inputs: Any = x if isinstance(x, tuple) else (x,)
    if isinstance(x, Mapping):
        inputs = [each for each in x.values() if isinstance(each, torch.Tensor)]
    if not inputs or not all(
        isinstance(each, torch.Tensor) and each.dim() for each in inputs
    ):
        raise ValueError(
            f"the input is {type(x).__name__}; it must be a tensor, or a tuple or dict "
            "of tensors, whose first dimension is the batch"
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
            f"optimizer is {short_repr(optimizer)}; give an optimizer, or a class of "
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


def inputs_of(model: nn.Module, x: Any) -> Inputs:
    """What `model` is called with, of a batch as `check_input` allows it.

    A dict is what a loader gives: arguments by name, where the model has those names.
    """
    if isinstance(x, tuple):
        return x, {}
    if not isinstance(x, Mapping):
        return (x,), {}
    taken = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    if any(key in taken for key in x) or takes_any:
        return (), {key: x[key] for key in x if key in taken or takes_any}
    return (x,), {}


def batch_of(x: Any) -> int:
    """The samples in a batch."""
    first = next(t for t in tree_leaves(plain(x)) if isinstance(t, torch.Tensor))
    return len(first)


def plain(x: Any) -> Any:
    """A batch with a dict for any other mapping, as tokenizers give them."""
    return dict(x) if isinstance(x, Mapping) else x


def guessed_input(
    model: nn.Module, batch_size: int | None, sequence: int | None
) -> tuple[torch.Tensor | None, str]:
    """A batch for `model` on the meta device, and a sentence that says what was assumed
    of it; or None, and what to give, to be read after a colon.

    Token ids (batch, `sequence`) for a model that begins with an Embedding, and rows of
    numbers for one that begins with a Linear layer.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    by_place = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    names = [p.name for p in parameters if p.kind in by_place and p.default is p.empty]
    if len(names) > 1:
        return None, (
            "give --input NAME, a variable with a batch: a tuple or dict of "
            f"{', '.join(names)}"
        )
    first = next((m for m in model.modules() if not any(m.children())), None)
    if isinstance(first, nn.Embedding):
        if sequence is None or batch_size is None:
            batch = "--batch-size B and " * (batch_size is None)
            return None, (
                f"give {batch}--sequence T, because the model begins with an "
                "Embedding and so takes token ids (batch, T), or --input NAME, a "
                "variable with a batch"
            )
        check_count("sequence", sequence, "the tokens of a sample")
        return torch.empty(1, sequence, dtype=torch.int64, device="meta"), ""
    layer = first_layer(model)
    if not isinstance(layer, nn.Linear):
        return None, (
            "give --input NAME, a variable with a batch, because the model begins "
            f"with {type(layer or first).__name__}, and its input cannot be guessed"
        )
    if batch_size is None:
        return None, (
            "give --batch-size B, the samples of all ranks together, or "
            "--input NAME, a variable with a batch"
        )
    size = layer.in_features
    return torch.empty(1, size, device="meta"), (
        f"Input of shape ({batch_size}, {size}) is assumed, because the model begins "
        "with Linear; give other input with --input NAME."
    )


def first_layer(model: nn.Module) -> nn.Module | None:
    """The first part of a model that has parameters of its own, where it is plain which
    one that is."""
    for child in model.children():
        if any(True for _ in child.parameters()):
            is_list = isinstance(child, nn.Sequential | nn.ModuleList)
            return first_layer(child) if is_list else child
    return model if any(True for _ in model.parameters()) else None


def cross_entropy(output: Any) -> torch.Tensor:
    """The loss that is assumed: cross-entropy of logits (..., classes), fp32."""
    logits = next(t for t in tree_leaves(output) if isinstance(t, torch.Tensor))
    if logits.dim() < 2:
        return logits.float().mean()
    logits = logits.flatten(0, -2)
    targets = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits, targets)
