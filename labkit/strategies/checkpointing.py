"""Activation checkpointing: blocks compute again in the backward pass."""

import contextlib
import operator
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.checks import UnsupportedLoopError
from labkit.compat.deepspeed import is_of_deepspeed
from labkit.compat.torch import is_fake
from labkit.compat.torch import is_transformed
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward
from labkit.strategies.autograd.structures import flatten
from labkit.strategies.autograd.structures import hand_back
from labkit.strategies.autograd.structures import holders_of
from labkit.strategies.autograd.structures import unflatten
from labkit.strategies.options import has_running_statistics
from labkit.strategies.options import without_running_statistics
from labkit.strategies.own_state import OwnState
from labkit.strategies.prepared import blocks

NUM_PASSES = 3
"""In which a block is looked at: whether its forward pass changes what it has."""
UNCHANGED = torch.Tensor | int | float | str | None
"""What a block cannot put anything into; what it writes into a tensor autograd sees."""

OTHERS = (
    "torch.func.functional_call gives the model other parameters for a forward pass, "
    "and --activation-checkpointing computes that again in the backward pass, when the "
    "model has its own. Leave it out for this loop"
)


def checkpoint_activations(model: nn.Module) -> list[Callable[[], None]]:
    """Keep only the inputs of the model's blocks; compute the rest again in backward.

    The second pass finds what the block keeps, and what it is given, as the first did,
    and leaves it as it is then: a count of passes, a running mean, a list to append to.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost";
    `torch.utils.checkpoint`.
    """
    return [wrap_forward(block, _checkpointed) for block in blocks(model) or [model]]


class Watch:
    """Whether a block keeps anything: it is looked at in its first passes."""

    def __init__(self) -> None:
        self.is_over = self.keeps = False
        self._num_passes = 0

    def note(self, *, has_changed: bool) -> None:
        self.keeps |= has_changed
        self._num_passes += 1
        self.is_over = self._num_passes >= NUM_PASSES and not self.keeps


def _checkpointed(plain: Forward) -> Forward:
    watch = Watch()
    carefully = torch.compiler.disable(_checkpointed_carefully, recursive=False)

    def forward(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if not torch.is_grad_enabled():
            return plain(block, *args, **kwargs)
        if not watch.is_over or any(not isinstance(x, UNCHANGED) for x in given):
            return carefully(watch, plain, block, args, kwargs)
        is_eager = not torch.compiler.is_compiling()
        if is_eager and (are_shapes(given) or is_transformed()):
            return plain(block, *args, **kwargs)

        used = [*block.parameters()] if is_eager else []

        def compute(*args: Any) -> Any:  # no `partial`: dynamo skips them
            if is_eager:
                check_parameters(block, used)
            return plain(block, *args, **kwargs)

        options: dict[str, Any] = {"use_reentrant": False}
        if any(map(has_running_statistics, block.modules())):
            # Only there, for dynamo compiles no checkpoint that has it.
            options["context_fn"] = partial(_contexts, block)
        return checkpoint(compute, *args, **options)

    return forward


def check_parameters(block: nn.Module, used: list[nn.Parameter]) -> None:
    """UnsupportedLoopError where a block has others than in its first pass."""
    if not all(map(operator.is_, used, block.parameters())):
        raise UnsupportedLoopError(OTHERS)


def are_shapes(values: Iterable[Any]) -> bool:
    """Whether it is for their shapes that a block runs: then nothing is kept."""
    return any(isinstance(each, torch.Tensor) and each.is_meta for each in values)


class Again(AbstractContextManager[None]):
    """A context of second passes, of which there may be several: with create_graph."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _contexts(block: nn.Module) -> tuple[Any, Any]:
    """Contexts of a block's forward pass, and of its second one."""
    second = partial(without_running_statistics, block)
    return contextlib.nullcontext(), Again(second)


def _checkpointed_carefully(
    watch: Watch, plain: Forward, block: nn.Module, args: Any, kwargs: Any
) -> Any:
    leaves, spec = flatten((args, kwargs))
    if are_shapes(leaves) or is_transformed():
        return plain(block, *args, **kwargs)

    used = [*block.parameters()]

    def compute(*leaves: Any) -> Any:
        check_parameters(block, used)
        args, kwargs = unflatten([*leaves], spec)
        copies = holders_of(args, kwargs)
        return plain(block, *args, **kwargs), copies

    def contexts() -> tuple[Any, Any]:
        if watch.is_over or any(map(is_fake, leaves)):
            return _contexts(block)
        before = state_of(block)
        return _first(watch, block, before), Again(partial(_second, block, before))

    output, copies = checkpoint(
        compute, *leaves, use_reentrant=False, context_fn=contexts
    )
    return hand_back(zip(holders_of(args, kwargs), copies, strict=True), output)


def state_of(block: nn.Module) -> OwnState:
    """Without parameters, and what BatchNorm counts, which its output does not need."""
    counted = [
        buffer
        for module in block.modules()
        if has_running_statistics(module)
        for buffer in module.buffers()
    ]
    return OwnState(block, [*block.parameters(), *counted], is_of_library)


def is_of_library(attribute: Any) -> bool:
    """Whether an attribute of a module is no state of the loop's."""
    is_hooks = str(attribute).endswith("_hooks")
    return is_hooks or attribute == "forward" or is_of_deepspeed(attribute)


@contextlib.contextmanager
def _first(watch: Watch, block: nn.Module, before: OwnState) -> Iterator[None]:
    yield
    if block.training:
        watch.note(has_changed=before.has_changed())


@contextlib.contextmanager
def _second(block: nn.Module, before: OwnState) -> Iterator[None]:
    now = state_of(block)
    before.set_back()
    try:
        with without_running_statistics(block):
            yield
    finally:
        now.set_back()
