"""Fingerprints what ranks should have in common, for the notebook to compare."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from labkit.compat.torch import dataset_of
from labkit.compat.torch import sampler_of
from labkit.compat.torch import watching_loaders
from labkit.rank.telemetry.own_passes import OwnPass
from labkit.rank.telemetry.own_passes import mixed
from labkit.records import Draw
from labkit.records import ReplicaNotes
from labkit.strategies.model.fingerprints import fingerprints

MAX_CHECKS = 64
TENSORS_A_STEP = 16
"""Of more tensors a check comes less often: each of them takes some 50 us of a CPU, or
ten kernels of a GPU."""


class ReplicaWatch:
    """One rank's fingerprints of its parameters, and of the samples it drew.

    At most `MAX_CHECKS` steps are kept: when there are more, every other one is
    dropped and checks come half as often, so that they cost a long run nothing.
    """

    def __init__(self) -> None:
        self.group = 0
        """Ranks of the same group hold replicas of each other."""
        self.place: int | None = None
        """Ranks of the same one have the same samples; None where no two have."""
        self.loaded: int | None = None
        self.num_copies: int | None = None
        """As in `ReplicaNotes`."""
        self.is_dealt = False
        """Whether the loop takes batches from the loader that `prepare` returned; one
        of its own beside that may give every rank whole batches."""
        self._names: list[str] = []
        self._checks: dict[int, torch.Tensor] = {}
        self._interval = 1
        self._draws: list[Draw] = []
        self._own_draws: list[Draw] = []

    def is_due(self, step: int) -> bool:
        """Whether `step` is one to check at."""
        return step % self._interval == 0

    def check(self, step: int, replicas: dict[str, torch.Tensor]) -> None:
        """Take the fingerprint of `replicas` at `step`."""
        if not replicas:
            return
        if list(replicas) != self._names:
            self._names, self._checks = list(replicas), {}
            while self._interval * TENSORS_A_STEP < len(replicas):
                self._interval *= 2
        self._checks[step] = fingerprints(replicas.values())
        if len(self._checks) > MAX_CHECKS:
            self._interval *= 2
            self._checks = {
                step: check
                for step, check in self._checks.items()
                if step % self._interval == 0
            }

    def note_draw(
        self,
        drawn: Sequence[int] | np.ndarray,
        dealt: Sequence[int] | np.ndarray,
        epoch: int,
    ) -> None:
        """Note the samples that this rank drew in one epoch, of those that all ranks
        were to draw."""
        ours, whole = (mixed(np.asarray(each, np.int64)) for each in (drawn, dealt))
        self._draws.append(Draw(epoch, len(dealt), len(drawn), ours, whole))

    @contextlib.contextmanager
    def watching_loaders(self, num_backwards: Callable[[], int]) -> Iterator[None]:
        """Note what DataLoaders of the loop's own draw.

        A pass in which `num_backwards` has not grown was no training: on a test set
        every rank may draw all samples.
        """
        # Weakly: those that the loop leaves after a batch end, with their workers.
        passes: WeakKeyDictionary[Any, OwnPass] = WeakKeyDictionary()

        def noted(loader: Any, found: Any) -> None:
            if self.is_dealt or is_ours(sampler_of(loader)):
                return
            if loader not in passes:
                passes[loader] = OwnPass(num_backwards())
            passes[loader].add(found)

        def ended(loader: Any) -> None:
            own = passes.pop(loader, None)
            if own is None or num_backwards() == own.num_backwards:
                return
            draw = own.draw(dataset_of(loader), epoch=len(self._own_draws))
            if draw is not None:
                self._own_draws.append(draw)

        with watching_loaders(noted, ended):
            yield

    def notes(self, num_steps: int) -> ReplicaNotes:
        """All of it, for the notebook, after so many optimizer steps."""
        values = [check.cpu().numpy() for check in self._checks.values()]
        return ReplicaNotes(
            self.group,
            list(self._checks),
            self._names,
            np.array(values).reshape(len(values), len(self._names)),
            self._draws,
            [] if self.is_dealt else self._own_draws,
            torch.initial_seed(),
            num_steps,
            self.place,
            self.loaded,
            self.num_copies,
        )


def is_ours(sampler: Any) -> bool:
    """Whether it gives this rank its share of a batch, as those of labkit do."""
    return type(sampler).__module__.startswith("labkit.")
