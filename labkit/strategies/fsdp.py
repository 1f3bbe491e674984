"""Fully sharded data parallelism: every rank keeps a shard of everything."""

import functools
import inspect
import itertools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.data_parallel import drop_whole_gradient
from labkit.compat.data_parallel import groups_of
from labkit.compat.data_parallel import init_root
from labkit.compat.data_parallel import reset_step
from labkit.compat.data_parallel import set_reduction
from labkit.compat.data_parallel import shard_of
from labkit.compat.data_parallel import whole_of
from labkit.compat.data_parallel import whole_size
from labkit.compat.torch import has_gradient_hooks
from labkit.compat.torch import num_changes
from labkit.compat.torch import tree_leaves
from labkit.records import ModelFacts
from labkit.strategies.autograd.agreement import Route
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.backward import follow
from labkit.strategies.autograd.backward import unfollow
from labkit.strategies.elementwise import check_elementwise
from labkit.strategies.mesh.device_mesh import broadcast
from labkit.strategies.mesh.device_mesh import data_parallel_axes
from labkit.strategies.model.materialize import move
from labkit.strategies.model.materialize import parts
from labkit.strategies.model.materialize import release
from labkit.strategies.model.shards import check_parts
from labkit.strategies.model.shards import hand_to_optimizer
from labkit.strategies.model.shards import shapes_of_parts
from labkit.strategies.model.spectral import in_one_precision
from labkit.strategies.model.writes import Writes
from labkit.strategies.model.writes import refuse
from labkit.strategies.prepared import DROPPED
from labkit.strategies.prepared import Closure
from labkit.strategies.prepared import Norm
from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import check_keys
from labkit.strategies.prepared import check_masks
from labkit.strategies.prepared import optimizer_tensors
from labkit.strategies.prepared import units

HOOKED = (
    "{name} has a hook for its gradient, which fully_shard never calls: it sets "
    "gradients by itself. Change parameter.grad between backward and step instead, "
    "which is that of the whole batch"
)


SET_WHILE_WHOLE = (
    "the loop has set {name} after a forward pass with gradients that had no backward "
    "pass yet: until then fully_shard has it gathered, and what is set there is lost. "
    "Set it after optimizer.step(), or call the model under torch.no_grad()"
)


class FSDP(Prepared):
    """Shard parameters, gradients and optimizer state over all ranks.

    Forward: all-gather the parameters of one block, compute, free them. Backward:
    the same, then reduce-scatter the block's gradients.

    Where the mesh has an axis of replicas, too (`hsdp`), gradients are also all-reduced
    along it: the all-gathers stay on the fast links of one host.

    `--config` takes the arguments of `fully_shard`; with replicas
    `--mesh dp_replicate=2,dp_shard=4` stands for 2 of 4 shards each. Without it half of
    the ranks make one, and on several hosts the ranks of a host.

    Source: Zhao et al., "PyTorch FSDP", VLDB 2023;
    `torch.distributed.fsdp.fully_shard`.
    """

    refuses_writes = True

    def place(self) -> None:
        """A block at a time, in `wrap`."""

    def wrap(self) -> None:
        check_elementwise(self.optimizer)
        check_fused(self.optimizer)
        check_masks(self.optimizer)
        check_calls(self.module)
        self._check_hooks(self.module.named_parameters())
        patch_dtensor()
        known = set(inspect.signature(fully_shard).parameters) - {"module", "mesh"}
        check_keys(self.options.config, known, "fully_shard")
        assert self.mesh is not None
        mesh = data_parallel_axes(self.mesh)
        assert mesh is not None
        self._mesh = mesh
        self.num_shards = mesh.size(-1)
        if mesh.ndim > 1:
            self.replica_group *= self.num_shards
            self.replica_group += mesh.get_local_rank(-1)
        if self.options.precision == "fp16":
            self.scaler = torch.amp.GradScaler(self.device.type)
        whole = {parameter: name for name, parameter in self.module.named_parameters()}
        self._root: Any = apply_fsdp(
            self.module,
            mesh,
            device=self.device,
            dtype=self.dtype,
            **self.options.config,
        )
        # In a forward pass the module has the gathered ones in their place.
        self._shards: dict[str, Any] = dict(self.module.named_parameters())
        self._shapes = shapes_of_parts(self._shards)
        hand_to_optimizer(self.optimizer, whole, self._shards)
        init_root(self._root)
        self._groups = list(groups(self.module))
        self._parts = [part for group in self._groups for part in group.fsdp_params]
        self._edges: dict[int, Any] = {}
        self._used: set[int] = set()
        """Ids of the whole parameters that this backward pass reaches on any rank."""
        names = {id(shard): name for name, shard in self._shards.items()}
        self._names_of_parts = {id(p): names[id(shard_of(p))] for p in self._parts}
        writes = Writes(refuse(self.strategy.name), with_places=True)
        for number, group in enumerate(self._groups):
            named = {names[id(shard_of(part))]: part for part in group.fsdp_params}
            group.pre_forward = partial(
                run_watched,
                partial(run_on_route, self.route, number, group, group.pre_forward),
                *(writes, number, partial(whole_ones, named)),
            )
            group.post_forward = partial(
                end_watched,
                group.post_forward,
                *(writes, number, partial(whole_ones, named)),
            )
            group.post_backward = partial(
                reduce_filled, self._used, group, group.post_backward
            )
            self._undo.append(partial(delattr, group, "pre_forward"))
            self._undo.append(partial(delattr, group, "post_forward"))
            self._undo.append(partial(delattr, group, "post_backward"))
        self._whole: list[tuple[str, torch.Tensor, int]] = []
        """What is gathered since a forward pass, with its version then."""
        self._waiting: RemovableHandle | None = None
        """Recovers from a backward pass that has failed, once the model is used."""
        self._has_dropped = False
        """Whether one has failed, and no zero_grad() followed."""
        self._undo.append(self._stop_waiting)
        self.see_calls(self._end_call)
        follow(self)
        self._undo.append(partial(unfollow, self))
        self._undo += in_one_precision(self.module)

    def begin_microbatch(self, *, is_last: bool) -> None:
        super().begin_microbatch(is_last=is_last)
        set_reduction(self._groups, is_on=is_last)

    def _end_call(self) -> None:
        """The root's parameters stay gathered until the backward pass, in which they
        are needed first. Where there will be none the loop may set parameters, and
        would set the gathered ones, which are thrown away."""
        self._check_whole()
        if not torch.is_grad_enabled():
            self._reshard()
            return
        self._whole = [
            (self._names_of_parts[id(part)], whole, num_changes(whole))
            for group in self._groups
            if group.is_unsharded
            for part in group.fsdp_params
            if (whole := whole_of(part)) is not None
        ]

    def _reshard(self) -> None:
        self._whole.clear()
        for group in self._groups:
            if not group.is_sharded:
                group.reshard()

    def _check_whole(self) -> None:
        """UnsupportedLoopError if the loop has set what is gathered."""
        for name, whole, version in self._whole:
            if num_changes(whole) != version:
                raise UnsupportedLoopError(SET_WHILE_WHOLE.format(name=name))

    def check_hook(self, name: str) -> None:
        raise UnsupportedLoopError(HOOKED.format(name=name))

    def _check_hooks(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in named:
            if has_gradient_hooks(parameter):
                self.check_hook(name)

    def check_layout(self) -> None:
        self._check_hooks(self._shards.items())
        check_parts(self._shards, self._shapes)

    def replicas(self) -> dict[str, torch.Tensor]:
        if self.division is not None:
            whole = {n: self._shards[n] for n in sorted(self.division.whole)}
            return self.counted() | {n: local_part(t) for n, t in whole.items()}
        if self.num_shards == self.peers.size:
            return self.counted()
        shards = {name: local_part(shard) for name, shard in self._shards.items()}
        return self.counted() | shards

    def accumulators(self) -> list[tuple[nn.Parameter, Any]]:
        # In the graph are the whole parameters, which may be made in any forward pass.
        found = []
        for part in self._parts:
            whole = whole_of(part)
            if whole is not None and whole.requires_grad:
                if id(whole) not in self._edges:
                    self._edges[id(whole)] = whole, get_gradient_edge(whole).node
                found.append(self._edges[id(whole)])
        return found

    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        self._recover()
        self._check_whole()
        self._whole.clear()
        if self._has_dropped:
            self._has_dropped = False
            self.note(DROPPED)
        if self.division is not None:
            self.division.begin_backward(roots)
        ours = set(map(id, used))
        whole = [id(whole_of(part)) for part in self._parts]
        flags = [each in ours for each in whole]
        # A group is reduced where any of its parameters is reached.
        of_group = iter(flags)
        reached = [any([next(of_group) for _ in g.fsdp_params]) for g in self._groups]
        some = self.agree(flags, alike=reached)
        self._used.clear()
        self._used.update(itertools.compress(whole, some))

    def end_backward(self, *, has_failed: bool) -> None:
        if not has_failed:
            return
        self._has_dropped = True
        if self._waiting is None:
            # Not now: the other ranks may be gone, and what they sent with them.
            self._waiting = register_module_forward_pre_hook(
                lambda module, args: self._recover()
            )

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None

    def _recover(self) -> None:
        """Drop what a backward pass that has failed half-way has left, if one has:
        without it `fully_shard` reduces no gradients any more."""
        if self._waiting is None:
            return
        self._stop_waiting()
        reset_step(self._root, drops_gathers=False)
        self.optimizer.zero_grad()
        self._drop_whole_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._has_dropped = False
        super().zero_grad(set_to_none)
        self._drop_whole_gradients()

    def _drop_whole_gradients(self) -> None:
        for part in self._parts:
            drop_whole_gradient(part)

    def finish(self) -> None:
        self._recover()

    def step(self, closure: Closure | None = None) -> Norm | None:
        self._check_whole()
        self._reshard()  # or the next forward pass would be with what is gathered
        self.note_step()
        return super().step(closure)

    def memory(self) -> dict[str, Tensors]:
        shards = list(self._shards.values())
        whole = self.communication_buffers()
        return {
            "parameters": [*map(local_part, shards), *self.module.buffers()],
            "gradients": [
                *(local_part(shard.grad) for shard in shards),
                # Between the microbatches of a step gradients are not sharded.
                *(parameter.grad for parameter in whole),
                # Where they are summed in another precision than they are computed in.
                *(part.unsharded_accumulated_grad for part in self._parts),
            ],
            "optimizer_state": map(local_part, optimizer_tensors(self.optimizer)),
            "communication_buffers": whole,
        }

    def communication_buffers(self) -> list[torch.Tensor]:
        """The whole parameters of the blocks in use; the others' hold no memory."""
        found = map(whole_of, self._parts)
        return [whole for whole in found if whole is not None]

    def facts(self) -> ModelFacts:
        regathered = sum(map(num_regathered, self._groups))
        return replace(super().facts(), num_regathered=round(regathered))


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> FSDPModule:
    """Shard `model` in place along the last axis of `mesh`, with the values of its
    first rank; along an axis before it there are replicas. Collective.

    A block at a time comes to `device`, from the meta device too, and is sharded before
    the next: no rank ever has the whole model on it. The blocks are gathered and
    computed in `dtype`; parameters and reduced gradients are fp32, as is the output.
    `settings` are arguments of `fully_shard`. Make the optimizer after it.
    """
    device = device or torch.device(mesh.device_type)
    at_root = {}
    if dtype is not torch.float32 and "mp_policy" not in settings:
        # Gradients are summed over the ranks in fp32, and the loss computed in it.
        policy = MixedPrecisionPolicy(dtype, torch.float32)
        settings["mp_policy"] = policy
        at_root["mp_policy"] = replace(policy, output_dtype=torch.float32)
    outermost = called_ones(model)
    inner = [each for unit in units(model) for each in called_ones(unit)]
    units_of_all = list(dict.fromkeys([*inner, *outermost]))
    root: Any = model
    # The whole comes last.
    for part, tensors in parts(model, [u for u in units_of_all if u is not model]):
        for tensor in tensors:
            move(tensor, device)
            broadcast(local_part(tensor.detach()), mesh)  # as DDP and DeepSpeed do
        special = at_root if part in outermost else {}
        root = fully_shard(takeable(part), mesh=mesh, **{**settings, **special})
        release(tensors, part)
    sharded: FSDPModule = root
    return sharded


def called_ones(module: nn.Module) -> list[nn.Module]:
    """This module, or the ones in it that a loop calls, where it has no forward, as a
    ModuleList: nothing would gather its parameters."""
    if has_forward(module):
        return [module]
    with_parameters = (
        child for child in module.children() if any(True for _ in child.parameters())
    )
    return [each for child in with_parameters for each in called_ones(child)]


def check_calls(model: nn.Module) -> None:
    """UnsupportedLoopError where modules that a loop calls share a parameter: each
    gathers its own."""
    first: dict[int, nn.Module] = {}
    for module in called_ones(model):
        for name, parameter in module.named_parameters():
            if first.setdefault(id(parameter), module) is not module:
                kind = type(model).__name__
                raise UnsupportedLoopError(
                    f"the model, a {kind}, has no forward, so fully_shard gathers the "
                    f"parameters of each module in it by itself, and {name} is in two "
                    "of them; write a torch.nn.Module around them, with a forward that "
                    "calls them, or use ddp"
                )


def has_forward(module: nn.Module) -> bool:
    forward: Any = type(module).forward
    return forward is not nn.Module.forward


def takeable(module: nn.Module) -> nn.Module:
    """A module as `fully_shard` takes it: of containers, those with a forward."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and not has_forward(module):
        kind: Any = type(module)
        module.__class__ = with_forward(kind)
    return module


@functools.cache
def with_forward(kind: Any) -> Any:
    def forward(self: nn.Module, *args: Any) -> None:
        nn.Module.forward(self, *args)  # which raises NotImplementedError

    return type(kind.__name__, (kind,), {"forward": forward})


def run_on_route(
    route: Route, number: int, group: Any, pre_forward: Callable[..., Any], *args: Any
) -> Any:
    """What a group of parameters does before its block runs, which is noted where it
    gathers them, or will reduce gradients for this call: the root's parameters, once
    gathered, stay until the backward pass is over."""
    if not group.is_unsharded or (
        torch.is_grad_enabled()
        and any(
            isinstance(each, torch.Tensor) and each.requires_grad
            for each in tree_leaves(args)
        )
    ):
        route.add(number)
    if torch.is_inference_mode_enabled():
        # Or what it gathers into could never be part of a backward pass.
        with torch.inference_mode(False), torch.no_grad():
            return pre_forward(*args)
    return pre_forward(*args)


def run_watched(
    pre_forward: Callable[..., Any],
    writes: Writes,
    number: int,
    tensors: Callable[[], dict[str, torch.Tensor]],
    module: nn.Module,
    *args: Any,
) -> Any:
    """What a group of parameters does before its block runs, which may change them."""
    found = pre_forward(module, *args)
    kind = number, module.training, torch.is_grad_enabled()
    if writes.before or kind not in writes.done:
        writes.begin(number, module.training, tensors)
    return found


def end_watched(
    post_forward: Callable[..., Any],
    writes: Writes,
    number: int,
    tensors: Callable[[], dict[str, torch.Tensor]],
    *args: Any,
) -> Any:
    """What a group does after its block has run: it frees them, changed or not."""
    if writes.before:
        writes.end(number, tensors)
    return post_forward(*args)


def whole_ones(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters as they are gathered for a forward pass, by name."""
    return {name: whole_of(part) for name, part in parts.items()}


def reduce_filled(
    used: set[int], group: Any, reduce: Callable[..., Any], *args: Any
) -> Any:
    """What a group does once its gradients are there. Where autograd gives none, it is
    0: as many have to be reduced on every rank."""
    for part in group.fsdp_params:
        whole = whole_of(part)
        is_late = id(whole) in used and part.unsharded_accumulated_grad is None
        if is_late and whole.grad is None:
            whole.grad = torch.zeros_like(whole)
    return reduce(*args)


def check_fused(optimizer: torch.optim.Optimizer) -> None:
    """UnsupportedLoopError for an update in one kernel that torch does not have for
    shards: it has those of Adam and AdamW."""
    has_kernel = isinstance(optimizer, torch.optim.Adam)  # as AdamW is
    if not has_kernel and any(g.get("fused") for g in optimizer.param_groups):
        raise UnsupportedLoopError(
            f"{type(optimizer).__name__} has fused=True, which torch has for shards "
            "of parameters in Adam and AdamW alone; leave it out"
        )


def patch_dtensor() -> None:
    """Have `item()` and the like of a DTensor be of the whole: torch's own takes this
    rank's part of a sum or a norm, without a word. And have `parameter.data = value`
    set its values, which torch's own drops."""

    def of_whole(method: Callable[..., Any]) -> Callable[..., Any]:
        def take(self: DTensor) -> Any:
            return method(self.full_tensor())

        return take

    plain: Any = torch.Tensor.data

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

    if "item" not in vars(DTensor):
        for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
            setattr(DTensor, name, of_whole(getattr(torch.Tensor, name)))
        setattr(DTensor, "data", property(plain.__get__, set_data))  # noqa: B010


def groups(model: nn.Module) -> Iterator[Any]:
    """The groups of parameters that are gathered together."""
    for module in model.modules():
        yield from groups_of(module)


def num_regathered(group: Any) -> float:
    """Elements that are gathered for the backward pass, from all shards: none where
    they stay after the forward pass, as those of the outermost module do; fewer where
    they are gathered from some of the ranks.
    """
    if group.post_forward_mesh_info is None:
        return 0.0
    num_shards = group.mesh_info.shard_mesh_size
    from_ranks = group.post_forward_mesh_info.shard_mesh_size
    share = (1 - 1 / from_ranks) / (1 - 1 / num_shards) if num_shards > 1 else 1.0
    return share * sum(map(whole_size, group.fsdp_params))
