"""Tensors that a stage computes: on its rank, and as shapes on the others."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import torch

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import BOOKKEEPING
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import base_of_view
from labkit.compat.torch import is_within_backward
from labkit.compat.torch import tree_map_only
from labkit.strategies.mesh.collectives import is_collective

READ = (
    "the values of a tensor of shape {shape} are read ({name}), and under pipeline "
    "another rank computes it: each has a part of the model's layers. What the model "
    "returns is on every rank; have forward return what is to be read, or use ddp"
)
WRITTEN = (
    "a layer writes to a view of a tensor that is used afterwards, to one of which a "
    "view or x.detach() is, or in place to a tensor that is used after the model's "
    "forward. Under pipeline the write is missing on ranks that do not have this "
    "layer. Give the layer a copy (x.clone()), or use ddp"
)
CHECKED = (
    ". A distribution of torch.distributions reads its arguments to check them, unless "
    "it has validate_args=False"
)
COLLECTIVE = (
    "the model's forward calls a collective of torch.distributed, and under pipeline "
    "each layer runs on the one rank that has it, with the whole batch: the other "
    "ranks have no samples to send, and would not join it. Leave the collective out of "
    "forward under pipeline, or use ddp"
)


class Runner(Protocol):
    """Runs a model in stages: a `Relay`."""

    is_inside: bool
    """Whether the model's forward is under way."""

    @property
    def is_between_layers(self) -> bool:
        """Whether the model's forward is under way, and in none of its layers."""

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A function of torch between layers, of what stages have computed."""


class Here(torch.Tensor):
    """A tensor that this rank has, for it has a layer that it comes from.

    Only between layers: in them, and outside of the model, it is as any other.
    """

    stage: int
    runner: Runner
    now: torch.Tensor | None = None
    """What has taken its place: a layer or a function of another rank has written to
    it."""
    lost = False
    """Whether one has written to it or to a view: some ranks have it as it was."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


class Elsewhere(torch.Tensor):
    """A tensor on the meta device that stands for one on another rank.

    What is computed with it is elsewhere, too. So a rank runs the whole of a model's
    `forward`, also those parts of which it has no layers, and knows the shapes.
    """

    place: torch.device
    """Where the values would be, if they were here."""
    stage: int | None = None
    """The one that computes it; None within a layer."""
    runner: Runner | None = None
    now: torch.Tensor | None = None
    """As of `Here`; and of a tensor that was here until something was written to it
    that is not: it, on the meta device."""
    lost = False
    """As of `Here`."""

    __torch_function__ = Here.__torch_function__

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            return f"<a tensor of shape {tuple(self.shape)} on another rank>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse(self, "pickle")


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a function of torch gives, where an argument is `Here` or `Elsewhere`."""
    with DisableTorchFunctionSubclass():
        leaves = leaves_of(args, kwargs)
        if any(current(leaf) is not leaf for leaf in leaves):
            args, kwargs = tree_map_only(torch.Tensor, current, (args, kwargs))
            leaves = leaves_of(args, kwargs)
        runner = next(
            (r for leaf in leaves if (r := runner_of(leaf)) is not None), None
        )
        if is_collective(func):
            if runner is None or runner.is_inside:
                raise UnsupportedLoopError(COLLECTIVE)
            if remote := [leaf for leaf in leaves if is_elsewhere(leaf)]:
                refuse(remote[0], func.__name__)
        if runner is not None and runner.is_between_layers and func not in FACTS:
            return runner.compute(func, args, kwargs)
        if any(map(is_elsewhere, leaves)):
            return compute(func, args, kwargs)
        return func(*args, **kwargs)


def runner_of(leaf: Any) -> Runner | None:
    """What runs the model that a tensor is of, if it is of one."""
    return leaf.runner if isinstance(leaf, Here | Elsewhere) else None


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a function of torch gives where an argument is elsewhere: a shape."""
    with DisableTorchFunctionSubclass():
        name = getattr(func, "__name__", str(func))
        leaves = leaves_of(args, kwargs)
        remote = next(leaf for leaf in leaves if is_elsewhere(leaf))
        check_read(func, name, [remote])
        # A getter is another object each time. Torch's own kernels of the meta device
        # ask as well, of gradients, and mean that.
        if func == _tensor.device.__get__ and not is_within_backward():
            return place_of(remote)
        if func == _tensor.get_device:  # as in a checkpointed block
            index = place_of(remote).index
            return -1 if index is None else index
        if func in _MOVES:
            args, kwargs = without_devices(args), without_devices(kwargs)
            func = _tensor.to if args[1:] or kwargs else _tensor.clone
            kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
        if func in FACTS:
            return func(*map(plain, args), **kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        if name in _TAKE_SIZES and any(map(is_size, leaves)):
            args, kwargs = tree_map_only(torch.Tensor, as_size, (args, kwargs))
        place = place_of(remote)
        changed = written_in(name, args, kwargs)
        metas = tree_map_only(torch.Tensor, as_meta, (args, kwargs))
        if changed is None:  # what is written to keeps its own
            metas = in_one_precision(metas)
        try:
            result = SHAPES.get(name.strip("_"), func)(*metas[0], **metas[1])
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            raise UnsupportedLoopError(
                READ.format(shape=tuple(remote.shape), name=name)
            ) from error
        if isinstance(changed, torch.Tensor) and not changed.is_meta:
            if not isinstance(changed, Elsewhere):
                # The rank that computes the value has put it into its own tensor.
                changed.__class__ = Elsewhere
                changed.place = place  # type: ignore[attr-defined]
                changed.now = elsewhere(metas[0][0], place)  # type: ignore[attr-defined]
            return current(changed)
        return tree_map_only(torch.Tensor, lambda t: elsewhere(t, place), result)


def shape_of_ctc_loss(
    log_probs: torch.Tensor, *_: Any, reduction: str = "mean", **__: Any
) -> torch.Tensor:
    """One for each sequence, or of all of them."""
    each = log_probs.sum((0, -1))
    return each if reduction == "none" else each.sum()


def shape_of_grouped_mm(
    rows: torch.Tensor,
    experts: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **others: Any,
) -> torch.Tensor:
    """Each row times the matrix of one of the experts; rows may be a matrix of each."""
    if rows.dim() == experts.dim() == 2:  # a product for each part of what is summed
        products = rows @ experts
        count = others["offs"].numel()
        result = products.expand(count, *products.shape)
    elif rows.dim() == 3 and experts.dim() == 2:
        result = rows[0] @ experts
    else:
        result = rows @ (experts[0] if rows.dim() == 2 else experts)
    if bias is not None:
        result = result + bias.sum()
    return result.to(out_dtype or rows.dtype)


def is_size(leaf: Any) -> bool:
    """Whether it is a whole number in a tensor, which is here."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() or is_elsewhere(leaf):
        return False
    return not (leaf.is_floating_point() or leaf.is_complex())


def as_size(tensor: torch.Tensor) -> Any:
    return int(tensor) if is_size(tensor) else tensor


def leaves_of(*structures: Any) -> list[Any]:
    """What is in lists, tuples and dicts: pytree takes ten times as long."""
    found: list[Any] = []
    for each in structures:
        if isinstance(each, list | tuple):
            found += leaves_of(*each)
        elif isinstance(each, dict):
            found += leaves_of(*each.values())
        else:
            found.append(each)
    return found


def is_elsewhere(value: Any) -> bool:
    """Whether another rank has the values of this."""
    return isinstance(value, Elsewhere) or getattr(value, "is_absent", False) is True


def place_of(tensor: Any) -> torch.device:
    found: torch.device = vars(tensor).get("place") or tensor.device
    return found


def check_read(func: Any, name: str, staged: Sequence[Any]) -> None:
    """UnsupportedLoopError for a function that reads values."""
    if func in _READS or name in _READS_BY_NAME:
        refuse(staged[0], name)


def elsewhere(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """`tensor`, of the meta device, as one that stands for another rank's."""
    if tensor.is_meta and not isinstance(tensor, Elsewhere):
        tensor.__class__ = Elsewhere
        tensor.place = place  # type: ignore[attr-defined]
    return tensor


def is_view(tensor: torch.Tensor) -> bool:
    """Whether it is a view of another, whose place it has not taken."""
    base = base_of_view(tensor)
    is_lost = isinstance(base, Here | Elsewhere) and base.lost
    return base is not None and (is_lost or current(base) is not tensor)


def of_stage(tensor: torch.Tensor, stage: int, runner: Runner) -> torch.Tensor:
    """`tensor` as what this stage computes, seen between layers."""
    if not isinstance(tensor, Elsewhere):
        with DisableTorchFunctionSubclass():
            tensor = (
                tensor
                if type(tensor) in (torch.Tensor, Here)
                else tensor.view_as(tensor)
            )
        tensor.__class__ = Here
    tensor.stage, tensor.runner = stage, runner  # type: ignore[attr-defined]
    return tensor


def of_all(tensor: torch.Tensor) -> torch.Tensor:
    """Take `of_stage` back: the values, which every rank is to have. On those that do
    not compute them they are as before."""
    tensor.__class__ = torch.Tensor
    for name in ("stage", "runner", "place", "now"):
        vars(tensor).pop(name, None)
    return tensor.data


def current(tensor: Any) -> Any:
    """What has taken the place of a tensor, if something has; all else as it is.

    Raises UnsupportedLoopError where that is not known, or no more.
    """
    while isinstance(tensor, Here | Elsewhere):
        if tensor.lost:
            raise UnsupportedLoopError(WRITTEN)
        if tensor.now is None:
            break
        tensor = tensor.now
    return tensor


def replace(
    tensor: torch.Tensor, now: torch.Tensor, stage: int, runner: Runner
) -> None:
    """Have `now`, of this stage, take the place of a tensor wherever the model's
    forward has it."""
    if tensor is now:
        return
    if is_view(tensor):  # something else takes its place, and not that of the other
        lose(base_of_view(tensor), stage, runner)
    if not isinstance(tensor, Here | Elsewhere):
        tensor.__class__ = Here
    tensor.stage, tensor.runner = stage, runner  # type: ignore[attr-defined]
    tensor.now = now  # type: ignore[attr-defined]


def lose(tensor: Any, stage: int, runner: Runner) -> None:
    """Have a tensor be of no use any more: it is on some ranks what it was."""
    if not isinstance(tensor, Here | Elsewhere):
        tensor.__class__ = Here
        tensor.stage, tensor.runner = stage, runner
    tensor.lost, tensor.now = True, None


def plain(tensor: Any) -> Any:
    """A tensor that is `Here`, or what has taken its place, as any other; all else as
    it is."""
    tensor = current(tensor)
    if type(tensor) is not Here:
        return tensor
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def as_elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for a tensor on a rank that does not compute with it."""
    if is_elsewhere(tensor):
        return tensor
    with DisableTorchFunctionSubclass():
        return elsewhere(as_meta(tensor), tensor.device)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for one that is elsewhere, and is no view, to which a layer may
    write: its gradient goes on to that."""
    with DisableTorchFunctionSubclass():
        return elsewhere(_Alias.apply(tensor), place_of(tensor))


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as the meta device has it; one that is there already as it is."""
    tensor = current(tensor)
    if tensor.is_meta:
        return tensor
    if not tensor.requires_grad:
        return torch.empty_like(tensor.detach(), device="meta")
    if is_elsewhere(tensor):  # an absent parameter: it gets no gradient here
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return empty.requires_grad_()
    found: torch.Tensor = _Leave.apply(tensor)
    return found


class _Alias(torch.autograd.Function):
    """Forward and backward: identity, in memory of its own."""

    @staticmethod
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """As torch.func asks for."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Leave(torch.autograd.Function):
    """Forward: a value that is here is used where no values are. Backward: that use
    adds nothing to the gradient here; the rank that computes with it has it."""

    @staticmethod
    def forward(ctx: Any, here: torch.Tensor) -> torch.Tensor:
        ctx.like = here.new_zeros(())
        ctx.shape = here.shape
        return torch.empty_like(here, device="meta")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ctx.like.expand(ctx.shape)
        return found


def in_one_precision(metas: Any) -> Any:
    """Autocast leaves the meta device alone: there the halves are made whole, for it is
    shapes alone that are computed."""
    floats = {
        leaf.dtype
        for leaf in leaves_of(metas)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    }
    if len(floats) < 2 or not floats & {torch.bfloat16, torch.float16}:
        return metas
    return tree_map_only(
        torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, metas
    )


def written_in(name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a function of this name writes to; None if it only returns something."""
    is_in_place = name in _CHANGES if name.endswith("__") else name.endswith("_")
    return args[0] if args and is_in_place else kwargs.get("out")


def without_devices(value: Any) -> Any:
    """Arguments of `Tensor.to` and its like without the devices in them."""
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if k not in ("device", "non_blocking")}
    return tuple(
        each
        for number, each in enumerate(value)
        if not number or not isinstance(each, torch.device | str | bool | int)
    )


def refuse(tensor: Any, name: str) -> Any:
    with DisableTorchFunctionSubclass():
        shape = tuple(tensor.shape)
    what = name.strip("_")
    also = CHECKED if what == "bool" else ""
    raise UnsupportedLoopError(READ.format(shape=shape, name=what) + also)


_tensor: Any = torch.Tensor
_READS = {
    _tensor.item,
    _tensor.tolist,
    _tensor.numpy,
    _tensor.nonzero,
    torch.nonzero,
    torch.equal,
    torch.allclose,
    _tensor.equal,
    _tensor.allclose,
    _tensor.data_ptr,
}
_READS_BY_NAME = frozenset(
    {"__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__"}
    | {"__contains__", "__format__", "unique", "masked_select", "__reduce_ex__"}
    | {"backward"}
)
_CHANGES = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
    | {"__ifloordiv__", "__imod__", "__iand__", "__ior__", "__ixor__"}
)
_TAKE_SIZES = frozenset(
    {"view", "reshape", "expand", "repeat", "tile", "unflatten", "narrow"}
    | {"as_strided", "new_zeros", "new_ones", "new_empty", "new_full", "split", "chunk"}
)
SHAPES: dict[str, Any] = {
    "ctc_loss": shape_of_ctc_loss,
    "grouped_mm": shape_of_grouped_mm,
}
"""For functions that the meta device has not, or not in every dtype: other functions of
the same arguments, with results of the same shapes and gradients for the same ones."""
_MOVES = {_tensor.to, _tensor.cpu, _tensor.cuda}
FACTS = {
    _tensor.dim,
    _tensor.nelement,
    _tensor.numel,
    _tensor.size,
    _tensor.stride,
    _tensor.__len__,
    _tensor.element_size,
    _tensor.is_contiguous,
    _tensor.is_floating_point,
    _tensor.requires_grad.__set__,
    _tensor.is_leaf.__get__,
    *(
        getattr(_tensor, name).__get__
        for name in (
            *("dtype", "grad_fn", "layout", "ndim", "requires_grad", "shape"),
            *BOOKKEEPING,
        )
    ),
}
