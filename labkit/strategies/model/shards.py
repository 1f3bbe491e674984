"""Parts of parameters: whose they are, in the place of the whole ones in an optimizer,
and the norm of what is in parts."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import distribute_tensor

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.torch import Unscale

EACH_ITS_OWN = (
    "Save a file on every rank and load each rank's own, or use "
    "save_checkpoint(folder) and load_checkpoint(folder), which work across strategies "
    "and numbers of ranks"
)


PART_OF_OPTIMIZER = (
    "the state dict holds rank {rank} of {of}'s part of the optimizer's state under "
    "{strategy}, and an optimizer that is not prepared for that keeps whole states. "
    "Call prepare first, and load it into the optimizer that prepare returns; or use "
    "save_checkpoint(folder) and load_checkpoint(folder), which work across strategies "
    "and numbers of ranks"
)


@contextlib.contextmanager
def checking_loads() -> Iterator[None]:
    """Have `load_state_dict` of models and optimizers refuse what is a part of one.

    Of a model torch copies another rank's without a word: a DTensor that was pickled
    has the shape and mesh that this rank's has, and the values of the rank that saved
    it. Nor does an optimizer look at the shapes of the states that it is given.
    """
    load = nn.Module.load_state_dict
    load_optimizer = torch.optim.Optimizer.load_state_dict

    @functools.wraps(load)
    def checked_load(
        self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **options: Any
    ) -> Any:
        is_to_check = isinstance(state_dict, Mapping) and dist.is_initialized()
        for name, value in state_dict.items() if is_to_check else ():
            if isinstance(value, DTensor) and is_of_another_rank(value):
                raise UnsupportedLoopError(
                    f"the state dict holds another rank's part of {name!r}, and not "
                    f"that of rank {dist.get_rank()}. {EACH_ITS_OWN}"
                )
        return load(self, state_dict, *args, **options)

    @functools.wraps(load_optimizer)
    def checked_load_optimizer(
        self: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> None:
        if isinstance(state_dict, Mapping) and "part" in state_dict:
            rank, of, strategy = state_dict["part"]
            raise UnsupportedLoopError(
                PART_OF_OPTIMIZER.format(rank=rank, of=of, strategy=strategy)
            )
        load_optimizer(self, state_dict)

    nn.Module.load_state_dict = checked_load  # type: ignore[method-assign]
    torch.optim.Optimizer.load_state_dict = checked_load_optimizer  # type: ignore
    try:
        yield
    finally:
        nn.Module.load_state_dict = load  # type: ignore[method-assign]
        torch.optim.Optimizer.load_state_dict = load_optimizer  # type: ignore


def is_of_another_rank(tensor: DTensor) -> bool:
    """Whether it is a part that another rank has pickled, and this one has not.

    A mesh that was pickled still has the coordinates of the rank that did so.
    """
    mesh = tensor.device_mesh
    theirs = mesh.get_coordinate()
    try:
        here = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    except RuntimeError:  # of another number of ranks, which torch refuses itself
        return False
    if theirs is None or not here:
        return False
    parts = zip(theirs, here[0], tensor.placements, strict=True)
    return any(a != b and not placement.is_replicate() for a, b, placement in parts)


def hand_to_optimizer(
    optimizer: torch.optim.Optimizer,
    whole: Mapping[nn.Parameter, str],
    shards: Mapping[str, Any],
) -> None:
    """Put `shards` in the place of the parameters `whole`, both by name, and shard
    their state. May be collective."""
    state = optimizer.state
    for group in optimizer.param_groups:
        group["params"] = [
            shards[whole[p]] if p in whole else p for p in group["params"]
        ]
    for parameter, name in whole.items():
        if parameter in state and shards[name] is not parameter:
            state[shards[name]] = {
                key: shard_like(value, shards[name])
                for key, value in state.pop(parameter).items()
            }


def shard_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A state tensor sharded as its parameter is; a step count stays as it is."""
    assert isinstance(parameter, DTensor)
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def unscale_parts(parameters: Sequence[torch.Tensor], take: Unscale) -> bool:
    """Unscale this rank's parts of gradients; whether any overflows here.

    torch does it for gradients of one mesh, all sharded alike.
    """
    parts = []
    for parameter in parameters:
        if parameter.grad is not None:
            part = local_part(parameter).detach()
            part.grad = local_part(parameter.grad)
            parts.append(part)
    found = take(SimpleNamespace(param_groups=[{"params": parts}]))
    return any(bool(each) for each in found.values())


def shapes_of_parts(parameters: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Of what this rank has of each parameter, by name."""
    return {name: local_part(each).shape for name, each in parameters.items()}


def check_parts(
    parameters: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> None:
    """UnsupportedLoopError if the loop has put a tensor of another shape in the place
    of this rank's part of a parameter."""
    for name, parameter in parameters.items():
        if local_part(parameter).shape != shapes[name]:
            raise UnsupportedLoopError(
                f"the loop replaced this rank's shard of {name} by a tensor of shape "
                f"{tuple(local_part(parameter).shape)}: some in-place functions, such "
                "as torch.nn.init.eye_, do not work on sharded parameters. Call them "
                "before prepare, or use ddp"
            )


def norm_of_parts(tensors: Sequence[Any], device: torch.device) -> torch.Tensor:
    """The norm of tensors that may be DTensors, of several meshes: what is in parts is
    summed over the ranks that have them. Collective where there are any.

    NCCL sums what is on `device` alone, also where the parts lie on the CPU.
    """
    if not any(isinstance(each, DTensor) for each in tensors):
        return nn.utils.get_total_norm(list(tensors))
    of_axes: dict[Any, list[torch.Tensor]] = {}
    for each in tensors:
        axes: Any = None
        if isinstance(each, DTensor):
            placements = enumerate(each.placements)
            axes = (
                each.device_mesh,
                tuple(n for n, p in placements if not p.is_replicate()),
            )
        of_axes.setdefault(axes, []).append(local_part(each))
    # In float64: the square of a norm that float32 holds is beyond it.
    square = torch.zeros((), dtype=torch.float64, device=device)
    for axes, parts in of_axes.items():
        norm = nn.utils.get_total_norm(parts)
        here = norm.to(device).double().square()
        if axes is not None:
            mesh, dims = axes
            for dim in dims:
                dist.all_reduce(here, group=mesh.get_group(dim))
        square += here
    return square.sqrt().to(norm.dtype)


class Averaged(torch.autograd.Function):
    """A scalar that ranks have in parts, in a loss that each has of its own: the
    gradient is that of the mean of their losses, as for the model's output."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = DTensor.from_local(
            gradient / ctx.mesh.size(), ctx.mesh, [Partial()] * ctx.mesh.ndim
        )
        return parts.full_tensor(), None


_watches: list[Callable[[], None]] = []


def watch_sums(begin: Callable[[], None]) -> Callable[[], None]:
    """Call `begin` before what ranks have in parts is added up for the loop; returns
    what ends that."""
    _watches.append(begin)
    return lambda: _watches.remove(begin)


def begin_sum() -> None:
    """Collective, for the one model that there is: of several it is not known which."""
    if len(_watches) == 1:
        _watches[0]()


def takes_whole(one: DTensor, other: Any, *, adds: bool) -> bool:
    """Whether the sum, or the product, of a number that is in parts and another one
    takes more than each rank's part of both."""
    both = [one, other] if isinstance(other, DTensor) else [one]
    placements = [place for each in both for place in each.placements]
    are_sums = all(each == Partial() for each in placements)  # and no norms
    if are_sums and adds == (len(both) > 1):  # 2 * x, x + y
        return False
    return any(each.is_partial() for each in placements)


def averaged(scalar: DTensor) -> torch.Tensor:
    """The whole of it. Collective."""
    found: torch.Tensor = Averaged.apply(scalar.full_tensor(), scalar.device_mesh)
    return found


def patch_dtensor() -> None:
    """Have `item()`, `numpy()` and the like of a DTensor be of the whole: torch's own
    takes this rank's part of a sum or a norm, without a word, or raises. And have
    `parameter.data = value` set its values, which torch's own drops, `deepcopy`
    copy this rank's part, and a scalar that is the sum of parts, as a penalty is, meet
    a plain tensor as a whole: after torch's own `loss + penalty` backward() raises."""

    def of_whole(method: Callable[..., Any]) -> Callable[..., Any]:
        def take(self: DTensor, **kwargs: Any) -> Any:
            return method(self.full_tensor(), **kwargs)

        return take

    def meeting_plain(method: Callable[..., Any], *, adds: bool) -> Callable[..., Any]:
        def take(self: DTensor, other: Any) -> Any:
            if self.dim() > 0:
                return method(self, other)
            is_tensor = isinstance(other, torch.Tensor)
            is_whole = is_tensor and not isinstance(other, DTensor)
            if is_whole or takes_whole(self, other, adds=adds):
                begin_sum()
            if is_whole:
                return method(averaged(self), other)
            if not isinstance(other, DTensor):
                return method(self, other)
            # On a mesh, layers that are split are on more of its axes than others.
            if other.dim() == 0 and other.device_mesh != self.device_mesh:
                return method(averaged(self), averaged(other))
            return method(self, other)

        return take

    plain: Any = torch.Tensor.data
    plain_deepcopy: Any = torch.Tensor.__deepcopy__

    def set_data(tensor: DTensor, value: torch.Tensor) -> None:
        is_alike = value.shape == tensor.shape and value.dtype == tensor.dtype
        if not is_alike or value.device != tensor.device:
            plain.__set__(tensor, value)
            return
        mesh, placements = tensor.device_mesh, tensor.placements
        if isinstance(value, DTensor):
            value = value.redistribute(mesh, placements)
        else:
            value = distribute_tensor(value.detach(), mesh, placements)
        with torch.no_grad():
            local_part(tensor).copy_(local_part(value))

    def formatted(self: DTensor, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            return plain_deepcopy(self, memo)  # which raises
        if id(self) not in memo:
            copied = self.detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied)
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    if "item" not in vars(DTensor):
        names = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__")
        own = {name: of_whole(getattr(torch.Tensor, name)) for name in names}
        own |= {"__format__": formatted, "__deepcopy__": deepcopy}
        # A subclass's reflected operator goes before the operator of the left operand.
        for operator in ("add", "sub", "mul", "truediv"):
            for name in (f"__{operator}__", f"__r{operator}__"):
                adds = operator in ("add", "sub")
                own[name] = meeting_plain(getattr(torch.Tensor, name), adds=adds)
        for name, method in own.items():
            setattr(DTensor, name, method)
        setattr(DTensor, "data", property(plain.__get__, set_data))  # noqa: B010
