"""Fingerprints what ranks should have in common, for the notebook to compare."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from labkit.compat.torch import dataset_of
from labkit.compat.torch import watching_loaders
from labkit.records import Draw
from labkit.records import ReplicaNotes

MAX_CHECKS = 64
COLUMNS = 251
"""A prime: rows of a matrix that change places are no multiple of it apart."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        self._checks[step] = fingerprints(replicas.values())
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
        passes: list[tuple[Any, list[int], int]] = []

        def noted(loader: Any, found: Any) -> None:
            if not any(known is loader for known, *_ in passes):
                passes.append((loader, [], num_backwards()))
            drawn = next(drawn for known, drawn, _ in passes if known is loader)
            with contextlib.suppress(TypeError):  # keys of another kind
                drawn.extend(map(int, found if np.iterable(found) else [found]))

        def ended(loader: Any) -> None:
            for known, drawn, before in passes:
                if known is loader and drawn and num_backwards() > before:
                    dealt = range(len(dataset_of(loader)))
                    self.note_draw(drawn, dealt, len(self._draws))
            passes[:] = [each for each in passes if each[0] is not loader]

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
            torch.initial_seed(),
            num_steps,
        )


def fingerprints(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """For each tensor an integer that changes with any bit of it.

    It also changes where values swap places, unless these are a multiple of `COLUMNS`
    words of 8 bytes apart: several changes there can cancel out.

    The tensors are summed as words of the sum's own size, for which nothing is copied:
    with words of 4 bytes it would take 20 to 100 times as long.
    """
    sums = torch.stack([column_sums(tensor) for tensor in tensors])
    places = torch.arange(COLUMNS, device=sums.device)
    return scrambled(sums + scrambled(places)).sum(1)


def column_sums(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as words in rows of `COLUMNS`, summed over the rows."""
    values = tensor.detach().resolve_conj().resolve_neg().flatten()
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    values = values.contiguous()
    num_in_word = 8 // values.element_size()
    if values.storage_offset() % num_in_word:
        values = values.clone()
    if not len(values):
        return torch.zeros(COLUMNS, dtype=torch.int64, device=values.device)
    if rest := len(values) % num_in_word:
        values = F.pad(
            values.view(_BITS[values.element_size()]), (0, num_in_word - rest)
        )
    words = values.view(torch.int64)
    num_last = len(words) % COLUMNS
    last = F.pad(words[len(words) - num_last :], (0, COLUMNS - num_last))
    if num_last == len(words):
        return last
    return words[: len(words) - num_last].view(-1, COLUMNS).sum(0) + last


def mixed(indices: np.ndarray) -> int:
    """The sum of scrambled indices: equal for equal sets of them, in any order."""
    return int(scrambled(torch.from_numpy(indices)).sum()) % 2**64


def scrambled(words: torch.Tensor) -> torch.Tensor:
    """Each word of 8 bytes as another one, with no likeness to it.

    Source: the finalizer of Steele et al., "SplitMix64", OOPSLA 2014.
    """
    z = words - 0x61C8864680B583EB  # modulo 2**64 plus 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return z ^ (z >> 31 & (1 << 33) - 1)
