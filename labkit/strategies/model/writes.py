"""Sees what forward passes change of parameters that are whole for a pass alone."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import is_plain
from labkit.compat.torch import no_dispatch
from labkit.compat.torch import num_changes
from labkit.compat.torch import storage_key
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward
from labkit.strategies.model.fingerprints import fingerprints

NUM_PASSES = 3
"""Of each kind are looked at, the first ones: to look is to wait for a GPU."""
LOST = (
    "the model's forward changes its parameter {name}, which under {strategy} is "
    "gathered for that pass and freed after it, so the change would be lost. Make it "
    "before prepare, or in the loop after optimizer.step(), under torch.no_grad(); or "
    "use ddp, zero1 or zero2, where every rank has to write the same"
)

Tensors = Callable[[], Mapping[str, torch.Tensor]]
"""Whole parameters by name, as they are when it is called."""


class Writes:
    """Compares parameters before and after forward passes of parts of a model.

    Passes of another kind are counted by themselves: for training and for evaluation,
    with and without gradients.
    """

    def __init__(
        self, found: Callable[[str], None], *, with_places: bool = False
    ) -> None:
        """`found(name)` is called with the first parameter that has changed; or that
        was given another tensor, with `with_places`."""
        self._found = found
        self._with_places = with_places
        self._num_seen: dict[Any, int] = {}
        self.done: set[tuple[int, bool, bool]] = set()
        """The kinds of passes, by part, that are looked at no more."""
        self.before: dict[int, tuple[list[int], torch.Tensor]] = {}
        """By part, what its parameters were when the pass under way began."""

    def begin(self, part: int, is_training: bool, tensors: Tensors) -> None:
        """A forward pass of a part begins; parts have numbers."""
        self.before.pop(part, None)  # of a pass that has failed
        key = part, is_training, torch.is_grad_enabled()
        if key in self.done:
            return
        self._num_seen[key] = seen = self._num_seen.get(key, 0) + 1
        if seen == NUM_PASSES:
            self.done.add(key)
        if found := values(tensors()):
            self.before[part] = found

    def end(self, part: int, tensors: Tensors) -> None:
        if part not in self.before:
            return
        places, sums = self.before.pop(part)
        now = tensors()
        if (found := values(now)) is None or found[1].shape != sums.shape:
            return
        are_other = (found[1] != sums).tolist()
        if self._with_places:
            moves = zip(places, found[0], are_other, strict=True)
            are_other = [was != is_now or is_other for was, is_now, is_other in moves]
        if any(are_other):
            self._found(list(now)[are_other.index(True)])


def refuse(strategy: str) -> Callable[[str], None]:
    """What raises UnsupportedLoopError for a change that `strategy` would lose."""

    def found(name: str) -> None:
        raise UnsupportedLoopError(LOST.format(name=name, strategy=strategy))

    return found


def watch_forward(model: nn.Module, found: Callable[[str], None]) -> Callable[[], None]:
    """Have `found(name)` called where the first passes of a model change a parameter;
    returns what ends that."""
    writes = Writes(found)

    def watched(plain: Forward) -> Forward:
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # What records a pass would record this; a copy is not what is trained.
            is_recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
            if is_recorded or module is not model:
                return plain(module, *args, **kwargs)
            writes.begin(0, module.training, tensors)
            output = plain(module, *args, **kwargs)
            writes.end(0, tensors)
            return output

        return forward

    def tensors() -> dict[str, torch.Tensor]:
        with DisableTorchFunctionSubclass():
            named = {name: p.data for name, p in model.named_parameters()}
        return {name: each for name, each in named.items() if has_values(each)}

    return wrap_forward(model, watched)


def watch_unseen(tensors: Iterable[torch.Tensor]) -> Callable[[], bool]:
    """What tells whether any of these has changed since, and autograd has not counted
    it: as by `x.data.mul_(2)`."""
    with no_dispatch():
        found = [t.detach() for t in tensors if is_plain(t) and has_values(t)]
        before = fingerprints(found) if found else None
    counts = [*map(num_changes, found)]

    def have_changed() -> bool:
        same = [n for n, t in enumerate(found) if num_changes(t) == counts[n]]
        if before is None or not same:
            return False
        with no_dispatch():
            now = fingerprints([found[n] for n in same])
        return not torch.equal(now, before[same])

    return have_changed


def values(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[list[int], torch.Tensor] | None:
    """Their storages and fingerprints; None where there is nothing to see."""
    with no_dispatch():
        parts = [local_part(each).detach() for each in tensors.values()]
        if not parts or not all(is_plain(each) and has_values(each) for each in parts):
            return None
        places = [storage_key(each.untyped_storage()) for each in parts]
        return places, fingerprints(parts)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory: of a parameter that is not gathered it is freed, and
    within a transform of torch.func it is out of reach."""
    try:
        num_bytes = tensor.untyped_storage().nbytes()
    except NotImplementedError:
        return False
    return not tensor.is_meta and num_bytes >= tensor.nbytes
