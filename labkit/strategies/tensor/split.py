"""Splits the layers of a model along the mesh's axis `tp`."""

import contextlib
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import as_plain_output
from labkit.compat.c10d import local_part
from labkit.compat.c10d import quiet_redistribution
from labkit.compat.torch import num_hooks
from labkit.records import ModelFacts
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.model.alike import check_roots
from labkit.strategies.model.materialize import move
from labkit.strategies.model.materialize import parts
from labkit.strategies.model.materialize import release
from labkit.strategies.model.shards import hand_to_optimizer
from labkit.strategies.optimizers.kept import IDS
from labkit.strategies.optimizers.kept import PARAMETERS
from labkit.strategies.optimizers.kept import check_kept
from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import check_masks
from labkit.strategies.prepared import units
from labkit.strategies.tensor.alone import give_whole_outputs
from labkit.strategies.tensor.comparison import Comparison
from labkit.strategies.tensor.comparison import check_gradients
from labkit.strategies.tensor.exchanges import Traffic
from labkit.strategies.tensor.loss import loss_of_split_logits
from labkit.strategies.tensor.plan import Styles
from labkit.strategies.tensor.plan import check_even
from labkit.strategies.tensor.plan import experts_left_whole
from labkit.strategies.tensor.plan import find_plan
from labkit.strategies.tensor.plan import split_dim
from labkit.strategies.tensor.technique import TensorParallel
from labkit.train_options import TrainOptions

NUM_COMPARED = 3
"""Backward passes, the first ones: to compare is to wait for a GPU."""
HOOK = (
    "{name} has a hook, which would see the part of its output that this rank "
    "computes. Put the hook on the module around it, or leave its layers out of the "
    "plan"
)
UNCOMPARED = (
    "the loop never calls the model itself, only parts of it, so what it computes when "
    "split was not compared with what the whole model does. Call model(x) once, and it "
    "is compared there"
)
NOT_COMPARED = (
    "what the model computes when split was not compared with what the whole model "
    "does: {because}"
)
WHOLE_EXPERTS = (
    "the model's own plan splits the experts of its layers ({name}), which are "
    "parameters of one layer and not layers: they are whole on every rank, and only "
    "the other layers of the plan are split. The result is the same; to divide the "
    "experts too, use fsdp or zero3"
)
OTHER_LOSS = (
    "ranks that share the layers of one model have different losses, and each would "
    "train its part of the layers for its own loss. Either the loop computes the loss "
    "by rank, or from random numbers of its own: make it the same on all ranks. Or it "
    "computes outside of the model's forward with parameters of a layer that is split, "
    "such as {name}, of which a rank has only a part. Have forward compute that and "
    "return it, leave that layer out of the plan, or use ddp"
)
KEYS = ("plan", "sequence", "loss_parallel")
"""Of `--config`: the rest is for `fully_shard`, where the mesh has an axis for it."""


def checked_plan(
    model: nn.Module, num_parts: int, config: Mapping[str, Any]
) -> dict[str, Styles]:
    """The plan for so many ranks; UnsupportedLoopError for one that cannot be."""
    plan = find_plan(model, config)
    check_even(model, plan, num_parts)
    check_tied(model, plan)
    return plan


def split_layers(
    model: nn.Module,
    plan: Mapping[str, Styles],
    mesh: DeviceMesh,
    device: torch.device,
) -> None:
    """Split those of a plan, which has been checked, with the values of the mesh's
    first rank. Collective.

    A block at a time comes to `device`, from the meta device too, and is split before
    the next. What the plan does not name is whole on every rank. Parameters that layers
    share stay shared.

    Source: Shoeybi et al., "Megatron-LM", 2019;
    `torch.distributed.tensor.parallel.parallelize_module`.
    """
    styles = {model.get_submodule(name): each for name, each in plan.items()}
    tied = owners_of_tied(model)
    for part, tensors in parts(model, units(model)):
        for tensor in tensors:
            move(tensor, device)
        for module in part.modules():
            if module in styles:
                for style in styles.pop(module):
                    parallelize_module(module, mesh, style)
                module.register_forward_hook(with_plain_output)
        release(tensors, part)
    give_whole_outputs(model, plan, mesh)
    for owners in tied:
        tie(owners)
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor.detach(), group=mesh.get_group(), group_src=0)


def with_plain_output(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of a split layer."""
    is_local = isinstance(output, torch.Tensor) and not isinstance(output, DTensor)
    return as_plain_output(output) if is_local else output


Owner = tuple[nn.Module, str]


def owners_of_tied(model: nn.Module) -> list[list[Owner]]:
    """The modules that share a parameter, each with its name for it."""
    found: dict[int, list[Owner]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(
            recurse=False, remove_duplicate=False
        ):
            found.setdefault(id(parameter), []).append((module, name))
    return [owners for owners in found.values() if len(owners) > 1]


def tie(owners: list[Owner]) -> None:
    """Have modules share a parameter again, of which each has split its own."""
    (first, name), *others = owners
    for module, other in others:
        module.register_parameter(other, getattr(first, name))


def check_tied(model: nn.Module, plan: Mapping[str, Styles]) -> None:
    """UnsupportedLoopError for a parameter that modules share and the plan would split
    in different ways."""
    names = {module: name for name, module in model.named_modules()}
    for (first, name), *others in owners_of_tied(model):
        dim = split_dim(first, plan.get(names[first], ()))
        for module, other in others:
            if split_dim(module, plan.get(names[module], ())) != dim:
                raise UnsupportedLoopError(
                    f"{names[first]}.{name} and {names[module]}.{other} are one "
                    "parameter, and the plan splits them in different ways; have it "
                    "split both by the same dimension, for example an embedding by "
                    "rows and the output layer by columns"
                )


def check_backend(device: torch.device) -> None:
    """UnsupportedLoopError where what ranks with parts of layers exchange would end
    them: `all_gather_tensor` of tensors on a GPU crashes over gloo (torch 2.11)."""
    if device.type == "cuda" and dist.get_backend() == "gloo":
        raise UnsupportedLoopError(
            "layers are split here over gloo between ranks on GPUs, where torch "
            "crashes (all_gather_tensor); use NCCL, with a GPU for each rank, or the "
            f"CPU: %dist_stop, then %dist_start -n {dist.get_world_size()} --device cpu"
        )


class Split:
    """The division of a model's layers along `tp`, for the strategy of the parts.

    See `labkit.strategies.prepared.Division`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        device: torch.device,
        options: TrainOptions,
    ) -> None:
        """Split `model`, and hand its parts to `optimizer`. Collective."""
        mine = {key: options.config[key] for key in KEYS if key in options.config}
        rest = {key: options.config[key] for key in options.config if key not in KEYS}
        self.options = replace(options, config=rest)
        self._mesh = mesh["tp"]
        check_backend(device)
        check_fused(optimizer)
        check_masks(optimizer)
        check_kept(optimizer, "tensor", [PARAMETERS, IDS])
        quiet_redistribution()
        plan = checked_plan(model, self._mesh.size(), mine)
        self._experts = experts_left_whole(model, mine)
        self._other_loss = OTHER_LOSS.format(name=next(iter(plan), "one of the plan"))
        self._num_hooks = {n: num_hooks(m) for n, m in model.named_modules()}
        self._traffic = Traffic(model, plan)
        self._comparison = Comparison(model)
        before = {parameter: name for name, parameter in model.named_parameters()}
        split_layers(model, plan, self._mesh, device)
        parameters: dict[str, Any] = dict(model.named_parameters())
        hand_to_optimizer(optimizer, before, parameters)
        for group in optimizer.param_groups:
            if "foreach" in group:
                # It takes parts on one mesh alone, and no whole tensors among them.
                group["foreach"] = False
        self.whole = frozenset(
            name
            for name, parameter in parameters.items()
            if local_part(parameter).shape == parameter.shape
        )
        self._num_passes = 0
        self._uncompared: dict[str, nn.Parameter] = {}
        """What is whole on all ranks, until its first gradients are compared."""
        self._has_split_loss = bool(mine.get("loss_parallel"))

    def attach(self, prepared: Prepared) -> list[Callable[[], None]]:
        """Compare its first forward pass with that of the whole model, and its first
        gradients over the ranks."""
        prepared.division = self
        if self._experts:
            prepared.note(WHOLE_EXPERTS.format(name=self._experts[0]))
        self._has_autocast = isinstance(prepared, TensorParallel)
        prepared.replica_group = prepared.peers.rank
        self._comparison.attach(prepared.module, self._mesh, self.options.precision)
        watching = self._traffic.watch(prepared.module)
        modules = dict(prepared.module.named_modules())
        ours = {name: num_hooks(module) for name, module in modules.items()}
        parameters = dict(prepared.module.named_parameters())
        self._uncompared = {name: parameters[name] for name in sorted(self.whole)}

        def before_forward(model: nn.Module, args: Any, kwargs: Any) -> None:
            prepared.check_layout()
            self._comparison.run_once(args, kwargs)
            for name in self._comparison.in_parts:
                if self._num_hooks[name] or num_hooks(modules[name]) > ours[name]:
                    raise UnsupportedLoopError(HOOK.format(name=name))

        # Before what gathers the parameters of the outermost module.
        forward = prepared.module.register_forward_pre_hook(
            before_forward, prepend=True, with_kwargs=True
        )

        def note_uncompared() -> None:
            if self._num_passes and not self._comparison.has_run:
                prepared.note(UNCOMPARED)
            if because := self._comparison.hindrance:
                prepared.note(NOT_COMPARED.format(because=because))

        loss = contextlib.ExitStack()
        if self._has_split_loss:
            loss.enter_context(loss_of_split_logits())
        return [*watching, note_uncompared, forward.remove, loss.close]

    def begin_backward(self, roots: Roots) -> None:
        """In the first passes, compare what ranks with the same samples begin with."""
        if self._num_passes < NUM_COMPARED:
            self._num_passes += 1
            check_roots(map(local_part, roots), self._mesh, self._other_loss)

    def begin_step(self) -> None:
        """Before the first one, compare the gradients of what all ranks have whole."""
        compared, self._uncompared = self._uncompared, {}
        if compared:
            check_gradients(compared, self._mesh)

    def facts(self, facts: ModelFacts) -> ModelFacts:
        """With the bytes of activations that a rank sends in a step."""
        options, num_parts = self.options, self._mesh.size()
        sent = self._traffic.num_bytes(
            num_parts,
            4 if options.precision == "fp32" else 2,
            has_autocast=self._has_autocast,
            recomputes=options.activation_checkpointing,
        )
        return replace(
            facts, num_parts=num_parts, activation_bytes=sent * options.accumulate
        )


def check_fused(optimizer: torch.optim.Optimizer) -> None:
    """UnsupportedLoopError for an update in one kernel, which takes no parts of
    several meshes."""
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UnsupportedLoopError(
            f"{type(optimizer).__name__} has fused=True, which takes no split "
            "parameters beside whole ones; leave it out"
        )
