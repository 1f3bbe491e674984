"""What a module does to a tensor that it is given, where it gets another of the same
memory: `fully_shard` and DeepSpeed put functions of autograd around its inputs."""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import Hooks
from labkit.compat.torch import base_of_view
from labkit.compat.torch import hooks_of
from labkit.compat.torch import is_plain
from labkit.compat.torch import num_changes
from labkit.compat.torch import share_hooks
from labkit.compat.torch import uncounted_changes

CHANGED = (
    "{name} {what} a tensor that it is given, and under this strategy it gets another "
    "one with the same memory: the rest of the model would not see that. Do it before "
    "the call, or to a copy (x = x.clone()), or use ddp"
)

OVERLAP = (
    "{name} writes to a tensor, or a view of it, that it is given twice, and under "
    "this strategy it gets tensors without a common history. Give it a copy of one "
    "(x.clone()), or use ddp"
)


class Rewritten(torch.autograd.Function):
    """Forward: `own`, which has been written to through `written`, of its memory.
    Backward: its gradient is that of `written`, from which what it was before has its
    own."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        ctx.is_view = base_of_view(own) is not None
        ctx.mark_dirty(own)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # Without one for a part of another tensor autograd drops that of the rest.
        return torch.zeros_like(gradient) if ctx.is_view else None, gradient


class Substitute:
    """What a module gets in the place of a tensor that it is given.

    Parameters
    ----------
    own : Tensor
        The caller's.
    given : Tensor
        Another one of the same memory. What is written to either counts as a change of
        both.
    """

    def __init__(self, own: torch.Tensor, given: torch.Tensor) -> None:
        self.own, self.given = own, given
        self._hooks: Hooks = OrderedDict()
        if given.grad_fn is not None:
            self._hooks = hooks_of(own) if given is own else share_hooks(given, own)
        """For its gradient, until something is written to it."""
        self._known = set(self._hooks)
        self._version = num_changes(own)
        self._address = given.data_ptr() if is_plain(given) else 0

    @property
    def is_written(self) -> bool:
        return num_changes(self.own) != self._version

    def check(self, name: str, *, takes_hooks: bool) -> None:
        """UnsupportedLoopError where a module, as `name` has it, has changed what the
        caller's does not get: its hooks, too, if it does not take them."""
        what = ""
        if self.given.retains_grad:
            what = "calls retain_grad() of"
        elif self._address and self.given.data_ptr() != self._address:
            what = "sets .data of"
        elif self._hooks.keys() - self._known and not takes_hooks:
            what = "registers a hook on"
        if what:
            raise UnsupportedLoopError(CHANGED.format(name=name, what=what))


class Inputs:
    """The tensors that a module is given, also in lists and dicts, with what it gets in
    their place: `other` of each, once where one is given twice."""

    def __init__(self, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._other = other
        self._found: dict[int, Substitute] = {}

    def replace(self, own: torch.Tensor) -> torch.Tensor:
        key = id(own)
        if key not in self._found:
            self._found[key] = Substitute(own, self._other(own))
        return self._found[key].given

    def replaced(self, value: Any) -> Any:
        """What was put in the place of one of them; all else as it is."""
        return self._found[id(value)].given if id(value) in self._found else value

    def own_of(self, value: torch.Tensor) -> torch.Tensor:
        """The caller's, in place of which the module got this; another as it is."""
        for each in self._found.values():
            if each.given is value:
                return each.own
        return value

    @property
    def ids(self) -> list[int]:
        """Of the caller's."""
        return [*self._found]

    def hand_back(
        self, name: str, returned: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Have the caller's tensors the history of those that the module, as `name` has
        it, ran with, where it has written to them: so they are `returned` of it."""
        written: list[Substitute] = []
        for each in self._found.values():
            is_written = each.is_written
            each.check(name, takes_hooks=not is_written)
            if is_written:
                written.append(each)
        if not written or not any(each.given.requires_grad for each in written):
            return
        if overlap([each.own for each in written]):
            raise UnsupportedLoopError(OVERLAP.format(name=name))
        for each in written:
            if each.given.requires_grad and not isinstance(each.own, nn.Parameter):
                rewrite(each.own, returned(each.given))


def overlap(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of these are views of one tensor, or it, with elements in common."""
    of_base: dict[int, list[torch.Tensor]] = {}
    for each in filter(is_plain, tensors):
        of_base.setdefault(id(origin(each)), []).append(each)
    return any(len(views) > 1 and have_common(views) for views in of_base.values())


def have_common(views: list[torch.Tensor]) -> bool:
    if len({each.dtype for each in views}) > 1:
        return True  # perhaps: their elements are not of one size
    storage = views[0].untyped_storage()
    taken = torch.zeros(storage.nbytes() // views[0].element_size(), dtype=torch.bool)
    for each in views:
        # An element once, which an expanded one has many times.
        steps = zip(each.shape, each.stride(), strict=True)
        size = [n if step else min(n, 1) for n, step in steps]
        place = taken.as_strided(size, each.stride(), each.storage_offset())
        if place.any():
            return True
        place.fill_(True)
    return False


def origin(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, or itself."""
    base = base_of_view(tensor)
    return tensor if base is None else base


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
