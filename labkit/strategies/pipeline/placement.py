"""Which rank has which parameters, where layers are on several."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.compat.torch import no_dispatch
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.relay.parameters import is_absent


class Placement:
    """The parameters of a model in stages, of which a rank has some."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        owners: Mapping[int, AbstractSet[int]],
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        """`owners` has the stages of parameters, by id; others are on every rank of
        `mesh`, which has one axis."""
        self.parameters = parameters
        self._mesh = mesh
        self._device = device
        self._rank_of: dict[int, int] = {}
        """By the id of each parameter that one rank has alone, that rank."""
        for parameter in parameters:
            stages = owners.get(id(parameter), set())
            ranks = {stage % mesh.size() for stage in stages}
            if len(ranks) == 1:
                self._rank_of[id(parameter)] = min(ranks)
                vars(parameter)["stage"] = min(stages)
            else:
                vars(parameter)["stage"] = None
        rank = mesh.get_local_rank()
        self.own = [p for p in parameters if self._rank_of.get(id(p), rank) == rank]
        """What this rank has."""
        self.shared = [p for p in parameters if id(p) not in self._rank_of]
        """What several ranks have."""
        self.gathered: dict[int, nn.Parameter] = {}
        """By id, those that the cell has asked for, which every rank has after each
        step."""
        ids = self.own_ids
        for parameter in parameters:
            vars(parameter)["is_absent"] = id(parameter) not in ids

    @property
    def own_ids(self) -> set[int]:
        return set(map(id, self.own))

    @property
    def along_pp(self) -> Peers:
        """The ranks that have stages, as of now: a restart makes another group."""
        mesh = self._mesh
        return Peers(mesh.get_local_rank(), mesh.size(), self._device, mesh.get_group())

    def rank_of(self, parameter: torch.Tensor) -> int | None:
        """The rank that has it alone; None where several have it."""
        return self._rank_of.get(id(parameter))

    def count(self, *, trained: bool) -> list[int]:
        """By rank, the elements of what it has, or of what is trained of that."""
        found = [0] * self._mesh.size()
        for parameter in self.parameters:
            rank = self.rank_of(parameter)
            if parameter.requires_grad or not trained:
                for each in range(len(found)) if rank is None else [rank]:
                    found[each] += parameter.numel()
        return found

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give `tensor` the values that the rank `source` has. Collective."""
        dist.broadcast(tensor, group=self._mesh.get_group(), group_src=source)

    def forget(self) -> None:
        """Leave the parameters as they came."""
        for parameter in self.parameters:
            for name in ("is_absent", "stage"):
                vars(parameter).pop(name, None)

    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have these whole on every rank, and keep them so. Collective."""
        new = [
            p
            for p in parameters
            if id(p) in self._rank_of and id(p) not in self.gathered
        ]
        for parameter in new:
            if is_absent(parameter):
                parameter.data = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device=self._device
                )
            self.gathered[id(parameter)] = parameter
        self._refresh(new)

    def refresh(self) -> None:
        """Have what the cell has asked for as its ranks have it now. Collective."""
        self._refresh(self.gathered.values())

    def _refresh(self, parameters: Iterable[nn.Parameter]) -> None:
        with torch.no_grad(), no_dispatch():
            for parameter in parameters:
                self.broadcast(parameter.detach(), self._rank_of[id(parameter)])

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient that the rank of `parameter` has; None if there is none.
        Collective."""
        source, gradient = self.rank_of(parameter), parameter.grad
        if source is None:
            return gradient
        is_there = torch.tensor([int(gradient is not None)], device=self._device)
        with no_dispatch():
            self.broadcast(is_there, source)
            if not int(is_there):
                return None
            if is_absent(parameter):
                shape, dtype = parameter.shape, parameter.dtype
                gradient = torch.empty(shape, dtype=dtype, device=self._device)
            assert gradient is not None
            gradient = gradient.contiguous()
            self.broadcast(gradient, source)
        return gradient


def leave(tensor: torch.Tensor, device: torch.device) -> None:
    """Keep of a tensor its shape alone."""
    empty = torch.zeros((), dtype=tensor.dtype, device=device)
    tensor.data = empty.expand(tensor.shape)


def add_up(parameters: Sequence[nn.Parameter], peers: Peers) -> list[nn.Parameter]:
    """Sum the gradients of `parameters` over `peers`; those that any of them has a
    gradient of. Collective."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return []
    there = peers.greatest([parameter.grad is not None for parameter in trained])
    found = [p for p, is_there in zip(trained, there, strict=True) if is_there]
    for parameter in found:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter.detach())
        parameter.grad = peers.all_reduce(parameter.grad.contiguous())
    return found
