"""Cuts batches into microbatches, and tells where that would change a result."""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from labkit.strategies.relay.elsewhere import Elsewhere

MICROBATCHES_A_STAGE = 4
"""Of a batch, where the magic line does not say: a bubble of (p-1) in (5p-1)."""


def split(leaves: Sequence[Any], num_parts: int) -> list[list[Any]]:
    """The leaves of a batch in that many parts, or as many as there are samples: those
    tensors are cut that have the batch's size in their first dimension. The model's
    forward may write to each: that it does to one is no change of another."""
    sizes = [len(each) for each in leaves if is_batch(each)]
    size = sizes[0] if sizes else 1
    count = max(1, min(num_parts, size))
    if count == 1:
        return [list(leaves)]
    pieces = [
        [part if part.requires_grad else part.data for part in each.tensor_split(count)]
        if is_batch(each) and len(each) == size
        else (each,) * count
        for each in leaves
    ]
    return [list(part) for part in zip(*pieces, strict=True)]


def copied(leaves: Sequence[Any]) -> list[Any]:
    """A batch to which a model may write that is only tried."""
    return [each.clone() if is_batch(each) else each for each in leaves]


def is_batch(leaf: Any) -> bool:
    """Whether it can be cut: a sparse tensor cannot."""
    is_dense = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    return is_dense and leaf.dim() > 0


def kind_of(leaf: Any) -> Any:
    """What may have a model do something else, as a flag; of a number its type alone,
    for it may be another in each batch."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dim(), leaf.dtype
    return leaf if leaf is None or isinstance(leaf, bool | str) else type(leaf)


def are_packed(leaves: Sequence[Any]) -> bool:
    """Whether some tell where the samples of others begin, as an EmbeddingBag's
    offsets do: whole numbers in rows of several lengths."""
    rows = [each for each in leaves if isinstance(each, torch.Tensor)]
    rows = [each for each in rows if each.dim() == 1 and not each.is_floating_point()]
    return len({len(each) for each in rows}) > 1


def joined(parts: Sequence[Any]) -> Any:
    """The outputs of microbatches as that of the batch."""
    if not is_batch(parts[0]):
        return parts[0]
    return torch.cat(list(parts))


def are_other(one: Any, other: Any) -> bool:
    """Whether the output of a whole batch is not that of its microbatches."""
    if not isinstance(one, torch.Tensor):
        return isinstance(one, int | float | str) and one != other
    if one.shape != other.shape or not one.dim():
        return True
    if isinstance(one, Elsewhere) or not one.numel():
        return False
    if not (one.is_floating_point() or one.is_complex()):
        # A few by chance: the places of the greatest, where two are almost equal.
        return bool((one != other).float().mean() > 1e-2)
    is_there = one.isfinite()
    if not torch.equal(is_there, other.isfinite()):
        return True
    one, other = one.where(is_there, 0), other.where(is_there, 0)
    return bool((one - other).abs().max() > 1e-3 * one.abs().max())


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Run `model` within it: nothing is dropped."""
    kernels = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    modes = [each.training for each in kernels]  # of those that drop within one
    for each in kernels:
        each.training = False
    try:
        with _WithoutDropout():
            yield
    finally:
        for each, mode in zip(kernels, modes, strict=True):
            each.training = mode


class _WithoutDropout(TorchFunctionMode):
    """Within it functions of torch drop nothing, whoever calls them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            kwargs["training"] = False
        elif func is nn.functional.scaled_dot_product_attention:
            args = args[:4] + (0.0,) * len(args[4:5]) + args[5:]
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)


_DROPOUTS = {
    nn.functional.dropout,
    nn.functional.dropout1d,
    nn.functional.dropout2d,
    nn.functional.dropout3d,
    nn.functional.alpha_dropout,
    nn.functional.feature_alpha_dropout,
    nn.functional.multi_head_attention_forward,
}
"""Those that take a flag for training, by name where a mode gets to see them."""
