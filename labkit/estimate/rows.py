"""The rows of a forecast: what a magic line can ask for at a number of ranks."""

from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from labkit.strategies import STRATEGIES as TABLE
from labkit.strategies import Strategy
from labkit.strategies.mesh.sizes import DATA_PARALLEL

STRATEGIES = [name for name, each in TABLE.items() if each.forecast]

WITH_MESH = " --mesh "
Sizes = Mapping[str, int]
"""Of the axes of a mesh, by name."""


@dataclass(frozen=True)
class Row:
    """A strategy on a number of ranks, laid out in a mesh."""

    strategy: Strategy
    world_size: int
    mesh: str | None = None
    """As `--mesh` has it; by default the strategy's own."""

    @property
    def words(self) -> str:
        """What follows `%%dist_train`."""
        return self.strategy.name + (WITH_MESH + self.mesh if self.mesh else "")

    @property
    def num_trainers(self) -> int:
        """The ranks that have samples."""
        num_servers = len(self.strategy.server_ranks(1, self.world_size))
        return 1 if self.strategy.is_single else self.world_size - num_servers

    @property
    def sizes(self) -> Sizes:
        return self.strategy.mesh_sizes(self.mesh, self.num_trainers)

    @property
    def num_shares(self) -> int:
        """Into which a batch is divided: ranks along other axes have the same one."""
        others = [
            size for axis, size in self.sizes.items() if axis not in DATA_PARALLEL
        ]
        return self.num_trainers // prod(others)


def rows_of(world_size: int) -> Iterator[Row]:
    """Every strategy, and each grid of one that can have data parallelism besides."""
    for name in STRATEGIES:
        strategy = TABLE[name]
        if world_size == 1 and strategy.server:
            continue
        yield Row(strategy, world_size)
        if is_grid(strategy):
            (axis,) = strategy.axes
            for size in range(2, world_size // 2 + 1):
                if world_size % size == 0:
                    mesh = f"dp={world_size // size},{axis}={size}"
                    yield Row(strategy, world_size, mesh)


def is_grid(strategy: Strategy) -> bool:
    """Whether it divides a model along an axis of its own, beside data parallelism."""
    return not set(DATA_PARALLEL).isdisjoint(strategy.outer_axes)


def strategy_of(words: str) -> Strategy:
    """That of a row, by its words."""
    return TABLE[words.partition(WITH_MESH)[0]]
