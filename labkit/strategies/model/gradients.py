"""What a cell sees of parameters and gradients where a strategy has them in parts."""

import sys
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import BOOKKEEPING
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import is_plain
from labkit.compat.torch import storage_key
from labkit.compat.torch import tree_leaves
from labkit.strategies.model.states import plain_shape

FREED = (
    "the loop reads {name} as it was gathered for a forward pass, and kept in a module "
    "or returned by forward, and fully_shard has freed that since. Keep or return a "
    "copy, {name}.clone(), or read the model's own; or use ddp, zero1 or zero2"
)

_grad: Any = torch.Tensor.grad


class Owner(Protocol):
    """Has the gradients of its parameters in parts."""

    @property
    def hides_gradients(self) -> bool:
        """Whether they are partial sums, which a loop must not see."""

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient of all ranks, whole; None if there is none. Collective."""

    def set_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Put `value`, which is whole and equal on all ranks, in its place."""

    def drop_gradient(self, parameter: nn.Parameter) -> None:
        """The loop has taken this gradient away, and left others."""

    def drop_gradients(self) -> None:
        """It has taken all of them away: there is nothing to step with."""

    def note_zeroed(self) -> None:
        """The loop has taken a gradient away by hand."""

    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have these whole on every rank, and keep them so. Collective."""


class CellGradients:
    """Gathers the gradients that a cell looks at, and hands back what it makes of them.

    A loop that clips, scales, adds noise to or only reads `parameter.grad` between a
    backward pass and the step thereby does what it does in one process. What it costs,
    memory for the whole of a gradient, it costs only a loop that looks.

    Within `with` these it is not the cell that looks: `parameter.grad` is torch's own.
    """

    def __init__(
        self,
        owner: Owner,
        parameters: Iterable[nn.Parameter],
        kind: "type[PartitionedParameter] | None" = None,
    ) -> None:
        """`kind` of parameters they become; by default as DeepSpeed has them."""
        self.owner = owner
        self._parameters = list(parameters)
        self._given: dict[int, tuple[nn.Parameter, torch.Tensor | None]] = {}
        """By the parameter's id: what the cell was given, or has put in its place."""
        self.depth = 0
        """Above 0 it is not the cell that looks."""
        living = weakref.ref(self, forget)
        for parameter in self._parameters:
            is_sharded = hasattr(parameter, "ds_tensor")
            usual = ShardedParameter if is_sharded else PartitionedParameter
            parameter.__class__ = kind or usual
            _of[id(parameter)] = living

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1

    def begin_pass(self) -> None:
        """A backward pass begins, within which it is not the cell that looks."""
        self.depth = 1  # whatever an interrupt has left

    def end_pass(self) -> None:
        self.depth -= 1

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if self.owner.hides_gradients:
            return None
        if id(parameter) not in self._given:
            with self:
                whole = self.owner.full_gradient(parameter)
            if whole is None:
                return None
            self._given[id(parameter)] = parameter, whole
        return self._given[id(parameter)][1]

    def set(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        if value is None:
            self.owner.note_zeroed()
        if not self.owner.hides_gradients:
            self._given[id(parameter)] = parameter, value

    def given(self) -> list[torch.Tensor]:
        """The gradients that the cell has, or has put in place, since the last step."""
        return [value for _, value in self._given.values() if value is not None]

    def hand_back(self) -> None:
        """Put what the cell has seen, and may have changed, where the strategy steps
        from. Collective. (A tensor's version does not show it: some in-place operators
        under a dispatch mode leave it as it is.)
        """
        if not self._given:
            return
        given, self._given = [*self._given.values()], {}
        taken = {id(parameter) for parameter, value in given if value is None}
        if all(id(p) in taken for p in self._parameters if p.requires_grad):
            self.owner.drop_gradients()
            return
        with self:
            for parameter, value in given:
                if value is None:
                    self.owner.drop_gradient(parameter)
                else:
                    self.owner.set_gradient(parameter, value)

    def forget(self) -> None:
        """They are zeroed, or stepped with."""
        self._given.clear()

    def close(self) -> None:
        """The strategy has released the parameters: they are plain ones again."""
        for parameter in self._parameters:
            if _of.get(id(parameter), no_one)() is self:
                del _of[id(parameter)]
                parameter.__class__ = nn.Parameter


_of: dict[int, Callable[[], CellGradients | None]] = {}
"""Weakly, by the parameter's id, which lives as long as they do. Not a dictionary of
weakref's, which takes twice as long: DeepSpeed reads gradients forty times a step."""


def no_one() -> None:
    """What has the gradient of a plain parameter in parts."""


def forget(gone: Callable[[], CellGradients | None]) -> None:
    """These gradients are no more."""
    for key in [*_of]:  # a copy, for others may go meanwhile
        if _of.get(key) is gone:
            _of.pop(key, None)


def owner_of(parameter: Any) -> Owner | None:
    """What has the gradient of a parameter in parts, if anything has."""
    gradients = _of.get(id(parameter), no_one)()
    return None if gradients is None else gradients.owner


class PartitionedParameter(nn.Parameter):
    """A parameter whose gradient is in parts, on several ranks.

    Its `grad` is gathered when a cell reads it. Copies of it are plain parameters.
    """

    @property
    def grad(self) -> torch.Tensor | None:
        gradients = _of.get(id(self), no_one)()
        if gradients is None or gradients.depth > 0 or is_of_compiler(sys._getframe(1)):
            found: torch.Tensor | None = _grad.__get__(self)
            return found
        return gradients.get(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        gradients = _of.get(id(self), no_one)()
        if gradients is None or gradients.depth > 0:
            _grad.__set__(self, value)
        else:
            gradients.set(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            gradients = _of.get(id(self), no_one)()
            if gradients is not None and is_absent(self):
                gradients.owner.gather([self])
            copy = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(copy, self.requires_grad)
        return memo[id(self)]


class ShardedParameter(PartitionedParameter):
    """A parameter of ZeRO-3, empty but where a pass needs it.

    A cell that computes with it, as for a penalty or an average of weights, would get
    nothing, without a word. So it is gathered, and stays whole. Its shape is known.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            # A step has a hundred of these, most of them DeepSpeed's.
            if func in _HARMLESS or not is_of_cell(sys._getframe(1)):
                return func(*args, **kwargs)
            fleeting = [
                leaf
                for leaf in leaves_of((*args, *kwargs.values()))
                if type(leaf) is cls and is_fleeting(leaf)
            ]
            if fleeting:
                if func in SHAPES:
                    shape = torch.empty(plain_shape(args[0]), device="meta")
                    return func(shape, *args[1:], **kwargs)
                gradients = _of.get(id(fleeting[0]), no_one)()
                if gradients is not None:
                    gradients.owner.gather(fleeting)
            return func(*args, **kwargs)


class Freed(torch.Tensor):
    """A tensor in the memory of a parameter that is gathered for passes alone. To read
    it when that is freed would be the end of the process."""

    of: str
    """The parameter's name."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            kept: dict[int, str] = {}
            for leaf in leaves_of((*args, *kwargs.values())):
                if type(leaf) in _KEPT.values():
                    memory = leaf.untyped_storage()
                    if memory.nbytes() == 0 and func not in _WITHOUT_VALUES:
                        raise UnsupportedLoopError(FREED.format(name=leaf.of))
                    kept[storage_key(memory)] = leaf.of
            found = func(*args, **kwargs)
            mark_kept(tree_leaves(found), kept)
            return found


class FreedParameter(nn.Parameter):
    """`Freed`, of a parameter itself."""

    of: str
    __torch_function__ = Freed.__torch_function__


_KEPT: dict[type, Any] = {torch.Tensor: Freed, nn.Parameter: FreedParameter}


def mark_kept(values: Iterable[Any], names: Mapping[int, str]) -> bool:
    """Have those tensors that are in the memory of a parameter, by its storage, say so
    in words where they are read without it. Whether there are any."""
    is_any = False
    for value in values:
        if is_plain(value):
            name = names.get(storage_key(value.untyped_storage()))
            if name is not None:
                is_any = True
                value.__class__ = _KEPT[type(value)]
                value.of = name
    return is_any


_tensor: Any = torch.Tensor
_HARMLESS = {
    _tensor.requires_grad_,
    _tensor.register_hook,
    _tensor.register_post_accumulate_grad_hook,
    _tensor.requires_grad.__set__,
    _grad.__get__,
    _grad.__set__,
    *(
        getattr(_tensor, name).__get__
        for name in (
            *("device", "dtype", "grad_fn", "is_cuda", "is_leaf", "layout"),
            *("requires_grad", *BOOKKEEPING),
        )
    ),
}
SHAPES = {
    _tensor.dim,
    _tensor.nelement,
    _tensor.numel,
    _tensor.size,
    _tensor.__len__,
    _tensor.ndim.__get__,
    _tensor.shape.__get__,
}
_WITHOUT_VALUES = {
    *_HARMLESS,
    *SHAPES,
    _tensor.nbytes.__get__,
    _tensor.element_size,
    _tensor.stride,
    _tensor.untyped_storage,
}


def is_absent(parameter: Any) -> bool:
    """Whether stage 3 has it in parts, or has yet to gather it."""
    status = getattr(parameter, "ds_status", None)
    return status is not None and status.name != "AVAILABLE"


def is_empty(parameter: Any) -> bool:
    """Whether stage 3 has it in parts."""
    status = getattr(parameter, "ds_status", None)
    return status is not None and status.name == "NOT_AVAILABLE"


def is_fleeting(parameter: Any) -> bool:
    """Whether it is empty, or may be before what a cell computes with it is over:
    within a module's forward pass it is there."""
    return is_absent(parameter) or not (
        getattr(parameter, "ds_active_sub_modules", True)
        or getattr(parameter, "is_external_param", True)
    )


def gather(parameter: Any) -> None:
    """Have it whole on every rank, where stage 3 has it in parts. Collective."""
    gradients = _of.get(id(parameter), no_one)()
    if gradients is not None and is_fleeting(parameter):
        gradients.owner.gather([parameter])


def leaves_of(values: Iterable[Any]) -> Iterator[Any]:
    """What arguments are made of. Most are tensors, which need not be searched."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif value is not None:
            yield from tree_leaves(value)


def is_of_compiler(frame: Any) -> bool:
    """Whether this is code that looks at tensors to trace what computes with them:
    on each rank for itself, for one may compile again where others do not."""
    module: str = frame.f_globals.get("__name__", "")
    return module.startswith(("torch._dynamo.", "torch._subclasses."))


WATCHES = ("checked_load", "noted_load", "noted_take")
"""Functions of labkit's around torch's own, which see what a cell loads."""


def is_of_cell(frame: Any) -> bool:
    """Whether this is not code of DeepSpeed or labkit, if by way of torch, or of the
    check of what a cell loads."""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "torch" and frame.f_code.co_name not in WATCHES:
            return package not in ("deepspeed", "labkit")
        frame = frame.f_back
    return False
