"""The samples of every global batch, in the same order on every rank."""

import contextlib
import itertools
import random
import zlib
from collections import deque
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sized
from pathlib import Path
from typing import Any
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler
from torch.utils.data import ConcatDataset
from torch.utils.data import RandomSampler
from torch.utils.data import Subset
from torch.utils.data import TensorDataset

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import tree_leaves
from labkit.strategies.mesh.peers import Peers

BLOCK = 100
"""Global batches that are drawn at once where a pass is not drawn as a whole."""
MOST_SKIPPED = 10_000_000
"""Global batches of a pass that is drawn only to be skipped."""
MOST = 10_000
"""Global batches that are drawn at once from a sampler of the user's own."""
OTHER_LENGTH = (
    "the dataset has {now} samples, and had {before} before, and another rank has got "
    "others: prepare deals one dataset out to all of them. Add the same samples on all "
    "ranks, in the same order: gather what a rank has found for itself, with "
    "dist.all_gather_object, or use %%dist_train raw"
)


class Order(Protocol):
    """Where the samples of global batches come from."""

    def __len__(self) -> int:
        """Global batches of a pass: optimizer steps. TypeError where nobody knows."""

    @property
    def batch_size(self) -> int:
        """Samples of a global batch, the largest; 0 where not known yet."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the order depends on, besides the seed."""

    def batches(self, epoch: int) -> Iterator[tuple[Any, int]]:
        """The indices of each global batch of a pass, and a fingerprint of all up to
        there: 0 where the facts and the seed say it all."""

    def skip(self, epoch: int) -> None:
        """Leave out a pass that an earlier run has had."""


class PlainOrder:
    """All samples by their number, or shuffled: another order in every epoch, which
    the seed decides. A dataset may have got more of them, or fewer, when a pass begins,
    as in active learning."""

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        shuffle: bool,
        team: Peers,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.num_samples = self._num_known = len(dataset)
        self.team = team
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed

    def __len__(self) -> int:
        num_samples = len(self.dataset)
        if self.drop_last:
            return num_samples // self.batch_size
        return -(-num_samples // self.batch_size)

    @property
    def facts(self) -> dict[str, Any]:
        names = ("num_samples", "batch_size", "shuffle", "drop_last")
        return {name: getattr(self, name) for name in names}

    def batches(self, epoch: int) -> Iterator[tuple[np.ndarray, int]]:
        num_samples = len(self.dataset)
        self._check_alike(num_samples)
        if self.shuffle:
            # The same order on every rank and for every number of ranks.
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(num_samples, generator=generator).numpy()
        else:
            order = np.arange(num_samples, dtype=np.int64)
        for number in range(len(self)):
            first = number * self.batch_size
            yield order[first : first + self.batch_size], 0

    def skip(self, epoch: int) -> None:
        pass

    def _check_alike(self, num_samples: int) -> None:
        """UnsupportedLoopError unless all ranks have got the same. Collective: each
        tells how many it has, also where it has got none, and need not wait then."""
        has_changed = num_samples != self._num_known
        if not has_changed and type(self.dataset) is TensorDataset:
            return  # which hardly ever changes, and may have passes of one step
        told = self.team.begin_gather(np.array([num_samples]), apart=True)
        if not has_changed:
            return
        are_as_many = bool((told.wait() == num_samples).all())
        new = zlib.crc32(as_bytes([*new_in(self.dataset, self._num_known)]))
        if not are_as_many or not self.team.agree_on(new, apart=True):
            raise UnsupportedLoopError(
                OTHER_LENGTH.format(now=num_samples, before=self._num_known)
            )
        self._num_known = num_samples


class DrawnOrder:
    """What a sampler of the user's own draws, on every rank for itself.

    Its random numbers are its generator's, if it has one, and else the same on all
    ranks. A pass is drawn when it begins, and compared over the ranks; that of torch's
    RandomSampler, which may have any length, is drawn as it goes on, as torch does.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        team: Peers,
        *,
        num_samples: int | None,
        seed: int,
        generator: torch.Generator | None = None,
    ) -> None:
        """`generator` is that of the DataLoader."""
        self.batch_sampler = batch_sampler
        self.team = team
        self.num_samples = num_samples
        self.seed = seed
        self.generator = generator
        self.batch_size = getattr(batch_sampler, "batch_size", None) or 0

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """The class of the sampler that decides the order."""
        return type(getattr(self.batch_sampler, "sampler", self.batch_sampler)).__name__

    @property
    def facts(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "sampler": self.name}

    def batches(self, epoch: int) -> Iterator[tuple[list[Any], int]]:
        generator = generator_of_shuffle(self.batch_sampler)
        if generator is not None:
            yield from self._batches_of_shuffle(generator)
            return
        fingerprint = 0
        for block in self._blocks(epoch):
            fingerprints = []
            for batch in block:
                fingerprint = zlib.crc32(as_bytes(batch), fingerprint)
                fingerprints.append(fingerprint)
                self.batch_size = max(self.batch_size, len(batch))
            self._check_alike(fingerprint)
            yield from zip(block, fingerprints, strict=True)

    def _batches_of_shuffle(
        self, generator: torch.Generator
    ) -> Iterator[tuple[list[Any], int]]:
        """Those of a pass, drawn as the DataLoader does: at the end of a pass torch
        draws once more, and not where the loop leaves it before."""
        self._begin()
        self._check_alike(zlib.crc32(as_bytes(generator.get_state())))
        fingerprint = 0
        for batch in self.batch_sampler:
            fingerprint = zlib.crc32(as_bytes(batch), fingerprint)
            yield batch, fingerprint

    def _check_alike(self, fingerprint: int) -> None:
        """UnsupportedLoopError unless all ranks draw the same. Collective."""
        if not self.team.agree_on(fingerprint, apart=True):
            raise UnsupportedLoopError(
                f"the DataLoader's {self.name} does not draw the same samples on "
                "every rank, and prepare deals one order out to all of them; leave "
                "rank and world_size out of it and seed it alike on all ranks. Where "
                "it draws by what the loop has found, such as weights from losses, "
                "these are of a rank's own samples: sum them over the ranks first, "
                "with dist.all_reduce. Or use %%dist_train raw"
            )

    def _begin(self) -> None:
        if self.generator is not None:  # as the DataLoader does when a pass begins
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def _size_of_block(self) -> int:
        """Batches that are drawn at once: all that there are, where the sampler knows
        how many; it may also go on without end."""
        sampler = random_sampler_of(self.batch_sampler)
        if sampler is not None:
            # Others may draw from its generator, too.
            return BLOCK if sampler.generator is None else 1
        try:  # one more: that there is none ends the pass
            return min(len(self) + 1, MOST)
        except TypeError:
            return BLOCK

    def _blocks(self, epoch: int) -> Iterator[list[list[Any]]]:
        size = self._size_of_block()
        self._begin()
        numbers = RandomNumbers(self.seed + epoch)
        with numbers:
            drawing = iter(self.batch_sampler)
        block = None
        while block is None or len(block) == size:
            with numbers:
                block = [list(each) for each in itertools.islice(drawing, size)]
            yield block

    def skip(self, epoch: int) -> None:
        # Its generator, and whatever else it keeps, continues from pass to pass.
        sampler = random_sampler_of(self.batch_sampler)
        if sampler is not None and sampler.generator is None:
            return  # each pass has a seed of its own
        with contextlib.suppress(TypeError):
            if sampler is not None and len(self) > MOST_SKIPPED:
                raise UnsupportedLoopError(
                    f"--resume: the DataLoader's RandomSampler has {len(self)} batches "
                    "in a pass, so an earlier pass was left before its end, and how "
                    "much it drew from the sampler's generator is not known. Leave out "
                    "generator=, with which each pass has random numbers of its own"
                )
            for _ in self._blocks(epoch):
                pass


def generator_of_shuffle(batch_sampler: Any) -> torch.Generator | None:
    """That of a shuffle of all samples, which it draws when a pass begins."""
    sampler = random_sampler_of(batch_sampler)
    if sampler is None or sampler.replacement:
        return None
    is_whole = sampler.num_samples == len(sampler.data_source)
    return sampler.generator if is_whole else None


def random_sampler_of(batch_sampler: Any) -> RandomSampler | None:
    """The sampler of its batches, where both are torch's own."""
    sampler = getattr(batch_sampler, "sampler", None)
    is_own = type(batch_sampler) is BatchSampler and type(sampler) is RandomSampler
    return sampler if is_own else None


class RandomNumbers:
    """Random numbers apart from this rank's: within `with` torch, numpy and random
    draw from a seed of their own; afterwards they continue where they were."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._state: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        outer = self._states()
        if self._seed is None:
            self._set(self._state)
        else:
            torch.default_generator.manual_seed(self._seed)
            np.random.seed(self._seed % 2**32)
            random.seed(self._seed)
            self._seed = None
        self._state = outer

    def __exit__(self, *error: object) -> None:
        inner = self._states()
        self._set(self._state)
        self._state = inner

    def _states(self) -> tuple[Any, ...]:
        return torch.get_rng_state(), np.random.get_state(), random.getstate()

    def _set(self, states: tuple[Any, ...]) -> None:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def as_bytes(value: Any) -> bytes:
    """Bytes that are equal where the tensors and numbers in a structure are, on
    whatever rank."""
    return b"".join(map(_leaf_as_bytes, tree_leaves(value)))


def _leaf_as_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        leaf = leaf.detach().cpu().flatten()
        leaf = leaf.clone(memory_format=torch.contiguous_format)
        leaf = leaf.view(torch.uint8).numpy()
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        return leaf.tobytes()
    if isinstance(leaf, int | float | complex | str | bytes):
        return repr(leaf).encode()
    return type(leaf).__name__.encode()


def fingerprint_of(dataset: Any) -> int:
    """A whole number that differs, as a rule, where ranks have different datasets."""
    return zlib.crc32(as_bytes([*facts_of(dataset)]))


def facts_of(dataset: Any) -> Iterator[Any]:
    """The length of a dataset, which of another one it has, the ends of tensors and
    lists, and the first and last file of its lists of files.

    No sample is loaded, which may take long or be random; nothing is read that may be
    a cache, of which each rank has other samples.
    """
    length = _length_of(dataset)
    yield length
    if isinstance(dataset, Subset):
        yield np.asarray(dataset.indices)
        yield from facts_of(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for each in dataset.datasets:
            yield from facts_of(each)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield [tensor[:1], tensor[-1:]]
    elif type(dataset) in (list, tuple) and dataset:
        yield [dataset[0], dataset[-1]]
    else:
        for _, each in sorted(getattr(dataset, "__dict__", {}).items()):
            if type(each) in (list, tuple) and len(each) == length > 0:
                paths = [path for path in map(_path_of, each) if path is not None]
                if len(paths) == length:  # hosts may have them in other folders
                    yield Path(paths[0]).name, Path(paths[-1]).name


def new_in(dataset: Any, num_known: int) -> Iterator[Any]:
    """What tells a dataset that has got other samples: besides the facts of it, what
    its lists and tensors have got, of as many entries as it has samples. What a cache
    has for these is not there yet."""
    yield from facts_of(dataset)
    length = _length_of(dataset)
    first = num_known if num_known < length else 0
    held = [dataset, *getattr(dataset, "__dict__", {}).values()]
    for each in (*held, *getattr(dataset, "tensors", ())):
        if isinstance(each, deque) and len(each) == length:
            yield list(itertools.islice(each, first, None))
        kinds = (list, tuple, np.ndarray, torch.Tensor)
        if isinstance(each, kinds) and _length_of(each) == length:
            yield each[first:]


def _length_of(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return -1


def _path_of(entry: Any) -> str | Path | None:
    """A path, alone or before its label; None for anything else."""
    if type(entry) in (tuple, list) and entry:
        entry = entry[0]
    return entry if isinstance(entry, str | Path) else None
