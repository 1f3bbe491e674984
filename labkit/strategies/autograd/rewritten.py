"""What a module writes to a tensor that it is given, where it gets another of the same
memory: `fully_shard` and DeepSpeed put functions of autograd around its inputs."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from labkit.compat.torch import num_changes
from labkit.compat.torch import uncounted_changes


class Alias(torch.autograd.Function):
    """Forward and backward: identity. What it gives may be written to, as a view that
    a function returns may not, and that counts as a change of both."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


class Rewritten(torch.autograd.Function):
    """Forward: `own`, which has been written to through `written`, of its memory.
    Backward: its gradient is that of `written`, from which what it was before has its
    own."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(own)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient


class Inputs:
    """The tensors that a module is given, also in lists and dicts, with what it gets in
    their place: `other` of each, once where one is given twice."""

    def __init__(self, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._other = other
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def replace(self, own: torch.Tensor) -> torch.Tensor:
        key = id(own)
        if key not in self._found:
            self._found[key] = own, self._other(own), num_changes(own)
        return self._found[key][1]

    def replaced(self, value: Any) -> Any:
        """What was put in the place of one of them; all else as it is."""
        return self._found[id(value)][1] if id(value) in self._found else value

    def hand_back(
        self, output: Any, returned: Callable[[torch.Tensor], torch.Tensor]
    ) -> Any:
        """Have the caller's tensors the history of those that the module ran with,
        where it has written to them: so they are `returned` of it. The one of them that
        is its output, if it is one, which the caller may go on to write to."""
        result = None
        for own, found, before in self._found.values():
            is_written = own is not found and num_changes(own) != before
            if is_written and found.requires_grad and not isinstance(own, nn.Parameter):
                if is_next(output, found):
                    result = own
                rewrite(own, returned(found))
        return result


def is_next(output: Any, found: torch.Tensor) -> bool:
    """Whether an output is one tensor, by a function of autograd that changes none."""
    if not isinstance(output, torch.Tensor) or output.grad_fn is None:
        return False
    is_all = output.shape == found.shape and output.data_ptr() == found.data_ptr()
    former = [function for function, _ in output.grad_fn.next_functions]
    return is_all and former == [found.grad_fn]


def rewrite(own: torch.Tensor, written: torch.Tensor) -> None:
    """Have a tensor the history of one of its memory, which has been written to."""
    if own.is_leaf and own.requires_grad:
        return  # under no_grad, or autograd would have refused it
    with uncounted_changes(own):  # for its values are there already
        Rewritten.apply(own, written)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, and in tuples there: lists and dicts are the
    caller's own."""
    for each in values:
        if isinstance(each, tuple):
            yield from tensors_in(each)
        elif isinstance(each, torch.Tensor):
            yield each
