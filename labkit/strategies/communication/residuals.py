"""Error feedback: what a rank has not sent of its gradients, until it does."""

from collections.abc import Iterator
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

Parts = dict[tuple[int, ...], torch.Tensor]
"""By the ids of the parameters of a bucket, in order: flat, all of them."""


class Residuals:
    """What one rank has not sent of the gradients of each parameter.

    Kept by parameter and not by bucket: DDP changes its buckets after the first step,
    and when parameters are frozen or a step has failed. A pass that fails changes
    nothing. They are those of the loss as it is, however its gradients are scaled.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Stich
    et al., "Sparsified SGD with Memory", NeurIPS 2018.
    """

    def __init__(self) -> None:
        self._kept: Parts = {}
        self._new: Parts = {}
        """Of the backward pass that is under way."""
        self._unused: frozenset[int] = frozenset()
        self._scale: torch.Tensor | None = None

    def begin(
        self, unused: frozenset[int] = frozenset(), scale: torch.Tensor | None = None
    ) -> None:
        """A backward pass begins. On no rank it gives gradients to the parameters with
        the ids `unused`: DDP drops what is sent of these. It scales the others by
        `scale`."""
        self._new, self._unused, self._scale = {}, unused, scale

    def of(self, bucket: dist.GradBucket) -> torch.Tensor | None:
        """What is to be added to the gradients of `bucket`, flat; None for nothing."""
        ids = ids_of(bucket)
        if self._kept and (ids not in self._kept or self._unused):
            kept = {
                n: part for n, part in self._by_parameter() if n not in self._unused
            }
            parts = [
                kept[id(p)] if id(p) in kept else torch.zeros_like(p).flatten()
                for p in bucket.parameters()
            ]
            found: torch.Tensor | None = torch.cat(parts)
        else:
            found = self._kept.get(ids)
        if found is None or self._scale is None:
            return found
        return found * self._scale.to(found.dtype)

    def put(self, ids: tuple[int, ...], left: torch.Tensor) -> None:
        """Note what was not sent of a bucket, whose parameters have these ids."""
        if self._scale is not None:
            left /= self._scale.to(left.dtype)
        # What is not finite would stay so for ever.
        self._new[ids] = left.nan_to_num_(0.0, 0.0, 0.0)

    def end(self) -> None:
        """The pass has ended well."""
        former = dict(self._by_parameter())
        same = self._new.keys() == self._kept.keys() and not self._unused
        self._kept, self._new = self._new, {}
        if not same:
            sent = {n: p for n, p in self._by_parameter() if n not in self._unused}
            self._kept = {(n,): part for n, part in {**former, **sent}.items()}

    def _by_parameter(self) -> Iterator[tuple[int, torch.Tensor]]:
        for ids, flat in self._kept.items():
            yield from zip(ids, flat.split(self._sizes(ids)), strict=True)

    def _sizes(self, ids: tuple[int, ...]) -> list[int]:
        return [self._numels[each] for each in ids]

    # ---- of a model, by name ----

    def follow(self, model: nn.Module) -> None:
        """Keep them for the parameters of `model`."""
        named = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._numels = {id(each): each.numel() for each in named.values()}

    def named(self) -> dict[str, torch.Tensor]:
        """By the name of the parameter, flat."""
        return {self._names[id_]: part for id_, part in self._by_parameter()}

    def check(self, named: Mapping[str, torch.Tensor]) -> None:
        """ValueError unless these are as `named` gives them."""
        sizes = {name: self._numels[id_] for id_, name in self._names.items()}
        for name, part in named.items():
            if tuple(part.shape) != (sizes.get(name),):
                raise ValueError(
                    f"the checkpoint has gradients of {name} that were not sent, of "
                    f"shape {tuple(part.shape)}, and the model has no such parameter"
                )

    def set(self, named: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `named` gave."""
        ids = {name: id_ for id_, name in self._names.items()}
        self._kept = {(ids[name],): part for name, part in named.items()}

    def tensors(self) -> list[torch.Tensor]:
        return list(self._kept.values())


def ids_of(bucket: dist.GradBucket) -> tuple[int, ...]:
    return tuple(map(id, bucket.parameters()))
