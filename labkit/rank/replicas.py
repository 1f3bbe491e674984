"""Notes what the ranks are to have in common, for the notebook to compare."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from labkit.records import Draw
from labkit.records import ReplicaNotes

MAX_CHECKS = 64


class ReplicaWatch:
    """One rank's fingerprints of its parameters, and of the samples it drew.

    At most `MAX_CHECKS` steps are kept: when there are more, every other one is
    dropped and checks come half as often, so that they cost a long run nothing.
    """

    def __init__(self) -> None:
        self.group = 0
        """Ranks of the same group hold replicas of each other."""
        self._names: list[str] = []
        self._checks: dict[int, torch.Tensor] = {}
        self._interval = 1
        self._draws: list[Draw] = []

    def is_due(self, step: int) -> bool:
        """Whether `step` is one to check at."""
        return step % self._interval == 0

    def check(self, step: int, replicas: dict[str, torch.Tensor]) -> None:
        """Take the fingerprint of `replicas` at `step`."""
        if not replicas:
            return
        if list(replicas) != self._names:
            self._names, self._checks = list(replicas), {}
        self._checks[step] = torch.stack([fingerprint(t) for t in replicas.values()])
        if len(self._checks) > MAX_CHECKS:
            self._interval *= 2
            self._checks = {
                step: check
                for step, check in self._checks.items()
                if step % self._interval == 0
            }

    def note_draw(
        self, indices: Iterable[int], dealt: Sequence[int], epoch: int
    ) -> None:
        """Note the samples that this rank drew in one epoch, of those that all ranks
        were to draw."""
        drawn = np.fromiter(indices, dtype=np.int64)
        whole = mixed(np.asarray(dealt))
        self._draws.append(Draw(epoch, len(dealt), len(drawn), mixed(drawn), whole))

    @contextlib.contextmanager
    def watching_loaders(self, num_backwards: Callable[[], int]) -> Iterator[None]:
        """Note what every DataLoader draws, in a cell that does all by hand.

        A pass in which `num_backwards` has not grown was no training: on a test set
        every rank may draw all samples.
        """
        kind: Any = _BaseDataLoaderIter
        next_index, next_batch = kind._next_index, kind.__next__
        passes: list[tuple[Any, list[int], int]] = []

        def noted(loader: Any) -> Any:
            found = next_index(loader)
            if not any(known is loader for known, *_ in passes):
                passes.append((loader, [], num_backwards()))
            drawn = next(drawn for known, drawn, _ in passes if known is loader)
            with contextlib.suppress(TypeError):  # keys of another kind
                drawn.extend(map(int, found if np.iterable(found) else [found]))
            return found

        def ended(loader: Any) -> Any:
            try:
                return next_batch(loader)
            except StopIteration:
                for known, drawn, before in passes:
                    if known is loader and drawn and num_backwards() > before:
                        dealt = range(len(loader._dataset))
                        self.note_draw(drawn, dealt, len(self._draws))
                passes[:] = [each for each in passes if each[0] is not loader]
                raise

        kind._next_index, kind.__next__ = noted, ended
        try:
            yield
        finally:
            kind._next_index, kind.__next__ = next_index, next_batch

    def notes(self) -> ReplicaNotes:
        """All of it, for the notebook."""
        values = [check.cpu().numpy() for check in self._checks.values()]
        return ReplicaNotes(
            self.group,
            list(self._checks),
            self._names,
            np.array(values).reshape(len(values), len(self._names)),
            self._draws,
            torch.initial_seed(),
        )


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A whole number that changes with any bit of a tensor."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(kinds[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def mixed(indices: np.ndarray) -> int:
    """The sum of scrambled indices: equal for equal sets of them, in any order.

    Source: the finalizer of Steele et al., "SplitMix64", OOPSLA 2014.
    """
    z = indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))
