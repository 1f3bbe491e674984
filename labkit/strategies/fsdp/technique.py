"""Fully sharded data parallelism: every rank keeps a shard of everything."""

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
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.data_parallel import choose_cast
from labkit.compat.data_parallel import choose_hooked
from labkit.compat.data_parallel import drop_whole_gradients
from labkit.compat.data_parallel import groups_of
from labkit.compat.data_parallel import init_root
from labkit.compat.data_parallel import is_in_place
from labkit.compat.data_parallel import name_for_profilers
from labkit.compat.data_parallel import reduce_at_end
from labkit.compat.data_parallel import reset_step
from labkit.compat.data_parallel import set_reduction
from labkit.compat.data_parallel import shard_of
from labkit.compat.data_parallel import whole_of_each
from labkit.compat.data_parallel import whole_size
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import has_gradient_hooks
from labkit.records import ModelFacts
from labkit.strategies.autograd.agreement import Event
from labkit.strategies.autograd.backward import Accumulators
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.backward import follow
from labkit.strategies.autograd.structures import replaced
from labkit.strategies.fsdp.blocks import Block
from labkit.strategies.fsdp.blocks import computed_in
from labkit.strategies.fsdp.blocks import reduce_filled
from labkit.strategies.fsdp.copies import check_between_passes
from labkit.strategies.fsdp.copies import let_copy
from labkit.strategies.fsdp.parts import Parts
from labkit.strategies.fsdp.parts import version_of
from labkit.strategies.fsdp.sharding import apply_fsdp
from labkit.strategies.fsdp.sharding import called_ones
from labkit.strategies.fsdp.sharding import check_calls
from labkit.strategies.fsdp.sharding import check_classes
from labkit.strategies.mesh.device_mesh import data_parallel_axes
from labkit.strategies.model.shards import check_parts
from labkit.strategies.model.shards import hand_to_optimizer
from labkit.strategies.model.shards import patch_dtensor
from labkit.strategies.model.shards import shapes_of_parts
from labkit.strategies.model.shards import watch_sums
from labkit.strategies.model.spectral import in_one_precision
from labkit.strategies.model.writes import Writes
from labkit.strategies.model.writes import refuse
from labkit.strategies.optimizers.elementwise import check_elementwise
from labkit.strategies.optimizers.kept import IDS
from labkit.strategies.optimizers.kept import PARAMETERS
from labkit.strategies.optimizers.kept import check_kept
from labkit.strategies.prepared import DROPPED
from labkit.strategies.prepared import Closure
from labkit.strategies.prepared import Norm
from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import check_keys
from labkit.strategies.prepared import check_masks
from labkit.strategies.prepared import optimizer_tensors

HOOKED = (
    "{name} has a hook for its gradient, which fully_shard never calls: it sets "
    "gradients by itself. Change parameter.grad between backward and step instead, "
    "which is that of the whole batch"
)


SET_WHILE_WHOLE = (
    "the loop has set or moved {name} after a forward pass with gradients that had no "
    "backward pass yet: until then fully_shard has it gathered, and what is set there "
    "is lost. Set it after optimizer.step(), or call the model under torch.no_grad()"
)
REPLACED = (
    "{name} was replaced in its layer since prepare, or removed, and fully_shard puts "
    "its own there for each pass: the change would be lost. Give the parameter that is "
    "there other values, after optimizer.step() and under torch.no_grad(), or replace "
    "it before prepare; or use zero1 or zero2"
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
    _waiting: RemovableHandle | None = None
    """Recovers from a backward pass that has failed, once the model is used."""
    _has_dropped = False
    """Whether one has failed, and no zero_grad() followed."""
    _adds_up = False
    """Whether all ranks are known to add up parameters before the next one."""

    def place(self) -> None:
        """A block at a time, in `wrap`."""

    def wrap(self) -> None:
        check_elementwise(self.optimizer)
        check_kept(self.optimizer, self.strategy.name, [PARAMETERS, IDS])
        check_fused(self.optimizer)
        check_masks(self.optimizer)
        check_calls(self.module)
        check_classes(self.module)
        self._check_hooks(self.module.named_parameters())
        patch_dtensor()
        known = set(inspect.signature(fully_shard).parameters) - {"module", "mesh"}
        check_keys(self.options.config, known, "fully_shard")
        assert self.mesh is not None
        mesh = data_parallel_axes(self.mesh)
        assert mesh is not None
        self.num_shards = mesh.size(-1)
        if mesh.ndim > 1:
            self.replica_group *= self.num_shards
            self.replica_group += mesh.get_local_rank(-1)
        if self.options.precision == "fp16":
            self.scaler = torch.amp.GradScaler(self.device.type)
        whole = {parameter: name for name, parameter in self.module.named_parameters()}
        roots = called_ones(self.module)
        shard: Callable[..., Any] = partial(
            apply_fsdp,
            mesh=mesh,
            device=self.device,
            dtype=self.dtype,
            **self.options.config,
        )
        self._root: Any = shard(self.module)
        # In a forward pass the module has the gathered ones in their place.
        self._shards: dict[str, Any] = dict(self.module.named_parameters())
        self._shapes = shapes_of_parts(self._shards)
        hand_to_optimizer(self.optimizer, whole, self._shards)
        init_root(self._root)
        self._groups = [group for _, group in groups(self.module)]
        self._roots: list[Any] = [
            (root, [group for _, group in groups(root)]) for root in roots
        ]
        self._parts = [part for group in self._groups for part in group.fsdp_params]
        names = {id(shard): name for name, shard in self._shards.items()}
        self._names_of_parts = {id(p): names[id(shard_of(p))] for p in self._parts}
        self._edges: dict[int, Any] = {}
        self._used: set[int] = set()
        """Ids of the whole parameters that this backward pass reaches on any rank."""
        self._whole: list[tuple[Any, torch.Tensor, tuple[int, int]]] = []
        """What is gathered since a forward pass, with its version then."""
        self._freed: list[Any] = []
        """Groups that were gathered, as the graph of that pass may need them."""
        self._undo.append(name_for_profilers())
        self._watch_blocks()
        self._watch_parts()
        self._undo.append(self._stop_waiting)
        self.see_calls(self._end_call)
        follow(self)
        self._undo.append(watch_sums(self._begin_sum))
        self._undo += in_one_precision(self.module)
        shard_alike: Callable[[nn.Module], Any] = partial(shard, is_alike=True)
        let_copy(self.module, shard_alike, self._begin_copy, self.course.copy)
        self._undo.append(
            partial(let_copy, self.module, shard_alike, *[lambda: None] * 2)
        )

    def _watch_blocks(self) -> None:
        """See what blocks are given and return, and reduce what other ranks reach."""
        writes = Writes(refuse(self.strategy.name), with_places=True)
        computed: dict[int, Any] = {}
        for number, (module, group) in enumerate(groups(self.module)):
            block = Block(
                *(number, module, group),
                {self._names_of_parts[id(part)]: part for part in group.fsdp_params},
                route=self.route,
                writes=writes,
                on_replaced=self._refuse_replaced,
                model=self.module,
            )
            self._undo.append(block.restore)
            computed[id(module)] = block.computed
            group.post_backward = partial(
                reduce_filled, self._used, group, group.post_backward
            )
            self._undo.append(partial(delattr, group, "post_backward"))
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                found = computed.get(id(module), computed_in)
                self._undo.append(choose_hooked(module, found))
                self._undo.append(choose_cast(module, replaced))

    def _watch_parts(self) -> None:
        """See modules that the loop calls by themselves."""
        numbers = {id(group): number for number, group in enumerate(self._groups)}

        written = refuse(self.strategy.name)
        for root, _ in self._roots:
            for group in groups_of(root):
                parts = Parts(
                    *(root, group, numbers[id(group)]),
                    route=self.route,
                    on_trained=self._note_whole,
                    on_written=lambda part: written(self._names_of_parts[id(part)]),
                    on_replaced=self._refuse_replaced,
                )
                self._undo.append(parts.end_run)

    def _refuse_replaced(self, part: Any) -> None:
        raise UnsupportedLoopError(REPLACED.format(name=self._names_of_parts[id(part)]))

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
        self._note_whole()

    def _note_whole(self) -> None:
        """What is gathered for a backward pass; the loop is not to set it."""
        gathered = [group for group in self._groups if group.is_unsharded]
        parts = [part for group in gathered for part in group.fsdp_params]
        self._whole = [
            (part, whole, version_of(whole))
            for part, whole in zip(parts, whole_of_each(parts), strict=True)
            if whole is not None
        ]

    def _reshard(self) -> None:
        gathered = [group for group in self._groups if not group.is_sharded]
        if self._whole:
            self._freed = gathered
            self._whole.clear()
        for group in gathered:
            group.reshard()

    def _begin_copy(self) -> None:
        """What is gathered is no part of a copy."""
        check_between_passes(self._groups)
        self._check_whole()
        self._reshard()

    def _check_whole(self) -> None:
        """UnsupportedLoopError if the loop has set what is gathered."""
        for part, whole, version in self._whole:
            if version_of(whole) != version or not is_in_place(part):
                name = self._names_of_parts[id(part)]
                raise UnsupportedLoopError(SET_WHILE_WHOLE.format(name=name))

    def _begin_sum(self) -> None:
        """The loop adds up what ranks have in parts. Collective."""
        if self._adds_up:
            return
        self._adds_up = True
        self.course.penalty()
        self.begin_agree([False] * len(self._parts), event=Event.PENALTY).wait()

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
        alike: Mapping[str, Any] = {}
        if self.division is not None:
            alike = {name: self._shards[name] for name in sorted(self.division.whole)}
        elif self.num_shards < self.peers.size:
            alike = self._shards
        parts = {name: local_part(shard) for name, shard in alike.items()}
        return self.counted() | parts | self._added()

    def _added(self) -> dict[str, torch.Tensor]:
        """Parameters of layers that the loop has put into the model since prepare, by
        name: no strategy knows of them, and each rank has its own."""
        known = {*map(id, (*self._shards.values(), *whole_of_each(self._parts)))}
        return {n: p for n, p in self.module.named_parameters() if id(p) not in known}

    def accumulators(self) -> list[tuple[nn.Parameter, Any]]:
        # In the graph are the whole parameters, which may be made in any forward pass.
        found = []
        for whole in whole_of_each(self._parts):
            if whole is not None and whole.requires_grad:
                if id(whole) not in self._edges:
                    with DisableTorchFunctionSubclass():  # it takes a view
                        node = get_gradient_edge(whole).node
                    self._edges[id(whole)] = whole, node
                found.append(self._edges[id(whole)])
        return found

    def have_moved(self, used: Accumulators, unused: Accumulators) -> bool:
        return False  # they are found where they are gathered

    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        self._adds_up = False
        if self.is_over:
            return
        self._recover()
        self._check_whole()
        self._whole.clear()
        if self._has_dropped:
            self._has_dropped = False
            self.note(DROPPED)
        if self.division is not None:
            self.division.begin_backward(roots)
        ours = set(map(id, used))
        whole = [*map(id, whole_of_each(self._parts))]
        flags = [each in ours for each in whole]
        # A group is reduced where any of its parameters is reached.
        of_group = iter(flags)
        reached = [any([next(of_group) for _ in g.fsdp_params]) for g in self._groups]
        some = self.agree(flags, alike=reached)
        used_groups = {id(g) for g in itertools.compress(self._groups, reached)}
        self._used.clear()
        self._used.update(itertools.compress(whole, some))
        for root, own in self._roots:  # also where the loss is of no output of a root's
            if any(id(each) in used_groups for each in own):
                reduce_at_end(root)
        # A pass need not begin at the model's output, where they would be gathered.
        for group in self._freed:
            group.unshard()
            group.wait_for_unshard()
        self._freed.clear()

    def end_backward(self, *, has_failed: bool) -> None:
        if not has_failed or self.is_over:
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
        self.drop_gradients()
        drop_whole_gradients(self._parts)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._has_dropped = False
        super().zero_grad(set_to_none)
        drop_whole_gradients(self._parts)

    def finish(self) -> None:
        self._recover()

    def step(self, closure: Closure | None = None) -> Norm | None:
        self._check_whole()
        self._reshard()  # or the next forward pass would be with what is gathered
        self.note_step()
        norm = super().step(closure)
        if self.scaler is None:  # or it may have left the step out
            # The shards have changed, and autograd knows the whole parameters.
            changed = [p for p in self._parts if shard_of(p).grad is not None]
            increment_version([w for w in whole_of_each(changed) if w is not None])
        return norm

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
        found = whole_of_each(self._parts)
        return [whole for whole in found if whole is not None]

    def facts(self) -> ModelFacts:
        regathered = sum(map(num_regathered, self._groups))
        return replace(super().facts(), num_regathered=round(regathered))


def check_fused(optimizer: torch.optim.Optimizer) -> None:
    """UnsupportedLoopError for an update in one kernel that torch does not have for
    shards: it has those of Adam and AdamW."""
    has_kernel = isinstance(optimizer, torch.optim.Adam)  # as AdamW is
    if not has_kernel and any(g.get("fused") for g in optimizer.param_groups):
        raise UnsupportedLoopError(
            f"{type(optimizer).__name__} has fused=True, which torch supports for "
            "sharded parameters only in Adam and AdamW; leave it out"
        )


def groups(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """The groups of parameters that are gathered together, with their modules."""
    for module in model.modules():
        for group in groups_of(module):
            yield module, group


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
