"""The ranks that share the samples of a batch."""

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import Generic
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from labkit.compat.c10d import adopt_timeout
from labkit.compat.c10d import flattened
from labkit.strategies.mesh.device_mesh import data_parallel_axes
from labkit.strategies.mesh.device_mesh import group_of_one
from labkit.strategies.mesh.links import Exchange
from labkit.strategies.mesh.worlds import ALONE
from labkit.strategies.mesh.worlds import check_world
from labkit.strategies.mesh.worlds import current_world

S = TypeVar("S")
T = TypeVar("T")


class Pending(Generic[T]):
    """What ranks have begun to exchange, and go on meanwhile."""

    def __init__(self, read: Callable[[], Any], *then: Callable[[Any], Any]) -> None:
        self._read = read
        self._then = then
        """What makes of it what is asked for, one after the other."""
        self._found: list[T] = []

    def wait(self) -> T:
        """What has come of it: the same, however often it is asked for."""
        if not self._found:
            found = self._read()
            for function in self._then:
                found = function(found)
            self._found.append(found)
        return self._found[0]

    def then(self, function: Callable[[T], S]) -> "Pending[S]":
        """What `function` makes of it, once that is waited for; this is not, then."""
        return Pending(self._read, *self._then, function)


@dataclass(frozen=True)
class Peers:
    """This rank among those that share the samples of a batch, `size` in number."""

    rank: int
    size: int
    device: torch.device
    """Where tensors are when ranks exchange them."""
    own_group: dist.ProcessGroup | None = None
    """None for all ranks of the lab: their group is another one after a restart."""
    world: int = field(default_factory=current_world, compare=False)
    """The number of the world that they are ranks of."""

    def check(self, why: str) -> None:
        """UnsupportedLoopError, with a text of `worlds`, where the lab has another
        number of ranks by now."""
        check_world(self.world, why)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, as of now."""
        return self.own_group or dist.group.WORLD

    @property
    def exact_group(self) -> dist.ProcessGroup | None:
        """The process group of these ranks and no others, as of now: of this one alone
        where each has the samples of all."""
        if self.size == 1 and dist.get_world_size() > 1:
            found: dist.ProcessGroup = group_of_one(dist.group.WORLD)
            return found
        return self.group

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """`tensor`, reduced over these ranks in place. Collective."""
        if self.size > 1:
            dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give `tensor` the values of the first of these ranks. Collective."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def begin_exchange(
        self, payload: bytes, *, apart: bool = False
    ) -> "Pending[list[bytes]]":
        """The bytes of each of these ranks. Collective, and no part of what is measured
        of a step: it is no part of the strategy. What is sent `apart` meets nothing
        else, where ranks do not do the same."""
        if self.size == 1:
            return Pending(lambda: [payload])
        if self.group is None:
            raise RuntimeError("the ranks have no process group any more")
        return Pending(Exchange(self.group, payload, apart=apart).wait)

    def begin_gather(self, numbers: Any, *, apart: bool = False) -> "Pending[Any]":
        """The numbers of each of these ranks, of shape (size, number of them).
        Collective, as `begin_exchange`.

        RuntimeError where another rank has sent more numbers, or fewer."""
        exchanged = self.begin_exchange(numbers.tobytes(), apart=apart)
        return exchanged.then(lambda found: in_rows(found, numbers.dtype))

    def greatest(self, numbers: Sequence[int], *, apart: bool = False) -> list[int]:
        """The greatest of each number. Collective, as `begin_gather`."""
        sent = np.array(numbers, np.int64)
        found: list[int] = self.begin_gather(sent, apart=apart).wait().max(0).tolist()
        return found

    def agree_on(self, value: int, *, apart: bool = False) -> bool:
        """Whether `value` is the same on all of these ranks. Collective."""
        sent = np.array([value], np.int64)
        found = self.begin_gather(sent, apart=apart).wait()
        return bool((found == value).all())

    def sum_apart(self, number: float) -> float:
        """The sum of these ranks' numbers. Collective, as `begin_gather`."""
        sent = np.array([number], np.float64)
        return float(self.begin_gather(sent, apart=True).wait().sum())


def in_rows(found: Sequence[bytes], kind: Any) -> Any:
    """The numbers of each rank in a row of its own."""
    if len({*map(len, found)}) > 1:
        raise RuntimeError("the ranks compare different things, at different places")
    return np.frombuffer(b"".join(found), kind).reshape(len(found), -1)


def peers_on(mesh: DeviceMesh | None, device: torch.device) -> Peers:
    """The ranks of `mesh` that share this rank's batches; this one alone without a
    mesh, or along other axes. May be collective."""
    dp = None if mesh is None else data_parallel_axes(mesh)
    if dp is None:
        return Peers(0, 1, device, world=ALONE if mesh is None else current_world())
    if dp.size() == dist.get_world_size():
        return Peers(dist.get_rank(), dp.size(), device)
    group = flattened(dp).get_group()
    adopt_timeout(group, dist.group.WORLD)
    return Peers(dist.get_rank(group), dp.size(), device, group)


def team_on(mesh: DeviceMesh | None, device: torch.device) -> Peers:
    """The ranks of `mesh` that train one model: those that share this rank's batches,
    and those that have other parts of it. May be collective."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is None or not {"tp", "pp"}.intersection(names):
        return peers_on(mesh, device)
    return Peers(dist.get_rank(), mesh.size(), device)
