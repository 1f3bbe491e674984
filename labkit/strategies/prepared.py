"""What every strategy makes of a model and its optimizer; on its own, `single`."""

import contextlib
import inspect
import zlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.torch import Overflows
from labkit.compat.torch import Unscale
from labkit.compat.torch import forget_unscaling
from labkit.compat.torch import tree_leaves
from labkit.compat.torch import tree_map_only
from labkit.compat.torch import without_modes
from labkit.records import Averages
from labkit.records import ModelFacts
from labkit.strategies import Strategy
from labkit.strategies.autograd.agreement import OTHER_COPIES
from labkit.strategies.autograd.agreement import OTHER_LAYERS
from labkit.strategies.autograd.agreement import OTHER_PASSES
from labkit.strategies.autograd.agreement import OTHER_PENALTY
from labkit.strategies.autograd.agreement import OTHER_SETTINGS
from labkit.strategies.autograd.agreement import SKIPPED
from labkit.strategies.autograd.agreement import STEP_SKIPPED
from labkit.strategies.autograd.agreement import Course
from labkit.strategies.autograd.agreement import Event
from labkit.strategies.autograd.agreement import Route
from labkit.strategies.autograd.agreement import Settings
from labkit.strategies.autograd.agreement import begin_agree
from labkit.strategies.autograd.backward import Accumulators
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.backward import follow
from labkit.strategies.autograd.backward import unfollow
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward
from labkit.strategies.mesh import worlds
from labkit.strategies.mesh.device_mesh import part_of_model
from labkit.strategies.mesh.peers import Pending
from labkit.strategies.mesh.peers import peers_on
from labkit.strategies.mesh.peers import team_on
from labkit.strategies.mesh.roles import Roles
from labkit.strategies.model import states
from labkit.strategies.model.materialize import give_values
from labkit.strategies.model.shards import norm_of_parts
from labkit.strategies.model.shards import unscale_parts
from labkit.strategies.model.states import Named
from labkit.strategies.model.states import Restore
from labkit.strategies.model.states import Source
from labkit.train_options import TrainOptions

Closure = Callable[[], Any]
Norm = float | torch.Tensor
Tensors = Iterable[torch.Tensor | int | None]
"""Tensors that there are, and bytes of some that are out of reach."""

Score = Callable[[nn.Module, Any], dict[str, torch.Tensor]]
"""Computes a model's scores of a batch, by name: "loss", and metrics."""


class Division(Protocol):
    """Of a model's layers along an axis other than those of data parallelism."""

    options: TrainOptions
    """What it leaves of the options for the strategy of the parts."""

    @property
    def whole(self) -> frozenset[str]:
        """The names of parameters that are the same on all ranks along that axis."""

    def attach(self, prepared: "Prepared") -> list[Callable[[], None]]:
        """See to the parts as `prepared` trains them; returns what ends that."""

    def begin_backward(self, roots: Roots) -> None:
        """A backward pass begins that gives gradients to the model. Collective."""

    def begin_step(self) -> None:
        """The optimizer is to step. Collective."""

    def facts(self, facts: ModelFacts) -> ModelFacts:
        """Those of a rank's part, with what they send along that axis."""


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

OWN_STEP = (
    "the loop steps {kind}, which {outer} has, without the step() of the optimizer "
    "that prepare returned. That works only under single and ddp, and without "
    "--accumulate, --clip, --average-every and --precision fp16, of which {kind} knows "
    "nothing"
)
UNWEIGHTED = (
    "the run in which this model was prepared is over, and with it the weighting of "
    "losses, which this backward pass needs: ranks' parts of the batch that was drawn "
    'last are unequal, or microbatches, or prepare was given weigh or reduction="sum". '
    "Prepare the model with an optimizer again in a %%dist_train cell, or make all "
    "parts equal: drop_last=True, a batch size that is a multiple of the number of "
    "ranks, and no --accumulate"
)
DROPPED = (
    "a backward pass failed half-way, with the gradients of some parameters averaged "
    "over the ranks and others not, so all gradients of that step are dropped. Call "
    "optimizer.zero_grad() where the loop catches the exception, as other strategies "
    "need it, too"
)


class Prepared:
    """A model and its optimizer under a strategy.

    `module` is the user's own model, which the loop keeps calling: a strategy works in
    the model's hooks, in backward passes and in the step, so that the model's other
    methods and attributes stay available. `optimizer` is the user's own, over
    those parameters that this rank updates. This class is the strategy `single`; the
    others override methods.
    """

    in_one_thread = False
    refuses_writes = False
    """Whether it says itself what a forward pass changes of parameters, which it has
    gathered for that pass."""
    scaler: torch.amp.GradScaler | None = None
    """Scales an fp16 loss, so that small gradients do not vanish."""
    _is_unscaled = False
    """Whether the gradients are those of the loss as it is."""
    num_shards = 1
    """Ranks that share one copy of what this strategy shards."""
    division: Division | None = None
    """Of the model along other axes, before this strategy got it."""
    in_autocast = False
    """Whether the model computes in `--precision` only as long as the run lasts."""
    is_reached = False
    """Whether a backward pass has given gradients to this model since its last
    step; only of what follows them."""
    returned: Any = None
    """By the optimizer's last step, of a class of the loop's own as well."""
    loss_weight = 1.0
    """What the loss of the batch at hand is multiplied by, before its backward
    pass: see `labkit.rank.data.dealing.Share`."""
    is_over = False
    """Whether the run is, and other cells may use the model."""
    _num_steps = _stepped_with = 0
    is_last = True
    """Whether the next backward pass is of its step's last microbatch."""

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh | None,
        device: torch.device,
        options: TrainOptions,
        roles: Roles | None = None,
        *,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Without a mesh the model is this rank's alone. With `roles` some ranks
        serve it. `note` has a sentence shown under the run."""
        self.strategy = strategy
        self.module = module
        self.optimizer = optimizer
        self.mesh = mesh
        self.peers = peers_on(mesh, device) if roles is None else roles.peers
        """The ranks whose samples give a step of this model."""
        self.team = team_on(mesh, device) if roles is None else roles.peers
        """The ranks that must do alike: these, and those with other parts of it."""
        self.device = device
        self.options = options
        self.roles = roles
        self.dtype = DTYPES[options.precision]
        self.replica_group = part_of_model(mesh)
        """Ranks of the same group hold replicas of each other."""
        self.step_arguments: dict[str, Any] = {}
        """Of the step at hand, which an optimizer of the user's own takes besides."""
        self.steps_to_measure: list[int] = []
        """Steps of the run that send another number of bytes than those before."""
        self.note = note
        self._optimizer_settings = Settings(optimizer)
        self._zero_takes_setting = takes(optimizer.zero_grad, "set_to_none")
        """That of a class of the loop's own may take nothing."""
        self.course = Course(self.team)
        """Of the loop, where it may be another on each rank."""
        self.route = Route(self.course.forward)
        """Of the layers that run, where they gather their parameters."""
        self._undo: list[Callable[[], None]] = []
        self.given_parameters = list(module.parameters())
        self._pattern: list[bool] = []
        self._accumulators: list[tuple[nn.Parameter, Any]] = []
        self._last_used: tuple[tuple[int, ...], Accumulators] = (0,), []
        """How many the pass before has reached, and the first and the last of them,
        where it has not reached all."""
        # Of layers that are split those of this rank's parts.
        self._sizes = {n: local_part(p).numel() for n, p in module.named_parameters()}
        self._num_parameters = sum(self._sizes.values())
        self._trainable = {n for n, p in module.named_parameters() if p.requires_grad}
        # Now, for the strategy may put others in the place of the parameters.
        self._names = states.parameter_names(module, optimizer)
        self.place()
        self.wrap()

    def place(self) -> None:
        """Bring `module` to the device, with values if it is on the meta device."""
        give_values(self.module)
        self.module.to(self.device)

    def wrap(self) -> None:
        """Change `module` and `optimizer` as the strategy needs. May be collective."""
        check_keys(self.options.config, [], "single")
        if self.options.accumulate > 1:
            follow(self)
        self.autocast()

    def see_calls(self, on_end: Callable[[], None] = lambda: None) -> None:
        """Have ranks compare each call of the model where its layers gather their
        parameters, and not each layer. `on_end()` is called after it. Collective."""
        course = self.course
        course.begin_looking()

        def end_call(module: nn.Module, args: Any, output: Any) -> None:
            if course.end_call():
                on_end()

        begin = self.module.register_forward_pre_hook(
            lambda module, args: course.begin_call(), prepend=True
        )
        end = self.module.register_forward_hook(end_call, always_call=True)
        self._undo += [begin.remove, end.remove]

    @property
    def acts_alone(self) -> bool:
        """Whether backward passes and steps are each rank's own at the moment."""
        return self.roles is not None

    def begin_microbatch(self, *, is_last: bool) -> None:
        """The next backward passes are, or are not, of their step's last microbatch."""
        self.is_last = is_last

    # ---- called by `strategies.autograd.backward`, where a strategy follows it ----

    def accumulators(self) -> list[tuple[nn.Parameter, Any]]:
        """The parameters that may be given gradients, each with the node of autograd
        that adds to its gradient."""
        pattern = [parameter.requires_grad for parameter in self.given_parameters]
        if pattern != self._pattern:
            self._pattern = pattern
            self._accumulators = self._find_accumulators()
        return self._accumulators

    def have_moved(self, used: Accumulators, unused: Accumulators) -> bool:
        """Whether autograd has other nodes for some of `unused` by now: it makes new
        ones for what has moved to another device or dtype, also if it has come back.

        To ask takes time, and most often another model is trained, or a part of this
        one: all are asked where other ones were used in the pass before.
        """
        ends = [*used[:1], *used[-1:]]
        key = len(used), *(id(node) for _, node in ends)
        some = [unused[0], unused[-1]]
        if not used:
            some += self._last_used[1]
        elif self._last_used[0] != key:
            some = [*unused]
        with without_modes():  # to ask takes a view, which is no part of the loop
            found = self._with_nodes([parameter for parameter, _ in some])
        if all(new[1] is old[1] for new, old in zip(found, some, strict=True)):
            if used:
                self._last_used = key, ends
            return False
        self._accumulators = self._find_accumulators()
        self._last_used = (0,), []
        return True

    def _find_accumulators(self) -> list[tuple[nn.Parameter, Any]]:
        return self._with_nodes([p for p in self.given_parameters if p.requires_grad])

    def _with_nodes(
        self, parameters: Sequence[nn.Parameter]
    ) -> list[tuple[nn.Parameter, Any]]:
        return [(each, node_of(each)) for each in parameters]

    def check_ranks(self) -> None:
        """UnsupportedLoopError where those that it was prepared for are no more, or the
        run that weights losses is over."""
        self.team.check(worlds.MODEL)
        if self.is_over and self.loss_weight != 1:
            raise UnsupportedLoopError(UNWEIGHTED)

    @property
    def has_parts(self) -> bool:
        """Whether the model is here in parts, so that no forward pass does without the
        other ranks."""
        axes = (self.mesh and self.mesh.mesh_dim_names) or ()
        return self.strategy.is_sharded or bool({"tp", "pp"}.intersection(axes))

    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        """It gives gradients to `used`, some of this model's parameters."""

    def end_backward(self, *, has_failed: bool) -> None:
        """It has ended, or failed half-way."""

    # ---- what `fit` asks for ----

    def train_batch(self, score: Score, batch: Any) -> torch.Tensor | None:
        """The forward and backward pass of a batch, or of a microbatch of it. Its loss,
        where it is not what one backward pass has begun with."""
        score(self.module, batch)["loss"].backward()
        return None

    def eval_batch(self, score: Score, batch: Any) -> dict[str, torch.Tensor]:
        """The scores of a batch, by name."""
        return score(self.module, batch)

    # ---- the step ----

    def scale(self, seed: torch.Tensor) -> torch.Tensor:
        """The gradient that a backward pass begins with, as this strategy wants it."""
        return seed if self.scaler is None else self.scaler.scale(seed)

    def gives_part_of_gradient(self, parameter: nn.Parameter) -> bool:
        """Whether the loop's backward passes give a hook for the parameter's gradient
        a part of what is the gradient at the step."""
        return self.peers.size * self.options.accumulate > 1

    def check_hook(self, name: str) -> None:
        """UnsupportedLoopError for a hook for a parameter's gradient, if it would never
        be called."""

    def check_layout(self) -> None:
        """UnsupportedLoopError if the loop has put other tensors in the place of this
        rank's parts, or its steps need others' that have gone with the run."""

    def agree(
        self, used: Sequence[bool] = (), alike: Sequence[bool] = ()
    ) -> list[bool]:
        """Which of `used`, facts of a backward pass that begins, hold on any rank.

        UnsupportedLoopError where what ranks have in parts would not be parts of one
        model, as where the facts in `alike` differ. What a loop does between the
        backward pass and the step is compared in the next pass. Collective.
        """
        return self.begin_agree(used, alike).wait()

    def begin_agree(
        self,
        used: Sequence[bool] = (),
        alike: Sequence[bool] = (),
        event: Event = Event.BACKWARD,
    ) -> Pending[list[bool]]:
        """As `agree`, which may be waited for, and raises, later. Collective."""
        facts = [
            event,
            self.course.num_batches,
            self.course.num_passes,
            self._num_steps,
            self.course.num_copies,
            self._optimizer_settings.number,
            self._stepped_with,
            self.route.take(),
            zlib.crc32(bytes(alike)),
        ]
        return begin_agree(used, facts, self.team).then(self._check_alike)

    def _check_alike(self, found: tuple[list[bool], list[bool]]) -> list[bool]:
        some, same = found
        is_same_event, is_same_batch, is_same_pass, is_same_step, *more = same
        has_same_copies, *more = more
        has_same_settings, had_same_settings, is_same_route, is_alike = more
        if not (is_same_batch or is_same_pass):
            which = (
                f"backward pass {self.course.num_passes} of a step begins on this one"
            )
            raise UnsupportedLoopError(OTHER_PASSES.format(found=which))
        if not is_same_batch:
            raise UnsupportedLoopError(SKIPPED)
        if not is_same_event:
            raise UnsupportedLoopError(OTHER_PENALTY)
        if not is_same_step:
            raise UnsupportedLoopError(STEP_SKIPPED)
        if not has_same_copies:
            raise UnsupportedLoopError(OTHER_COPIES)
        if not (has_same_settings and had_same_settings):
            rates = self._optimizer_settings.rates
            raise UnsupportedLoopError(OTHER_SETTINGS.format(rates=rates))
        if not (is_same_route and is_alike):
            raise UnsupportedLoopError(OTHER_LAYERS)
        return some

    def note_untried(self, text: str | None) -> None:
        """What a trial of the optimizer does not know."""
        if text is not None:
            kind = type(self.optimizer).__name__
            self.note(text.format(kind=kind, strategy=self.strategy.name))

    def note_step(self) -> None:
        """A step of parts is taken, to be one step on all ranks."""
        self._num_steps += 1
        self._stepped_with = self._optimizer_settings.number

    def unscale_gradients(self) -> None:
        """Let the loop see gradients as they are, and not as an fp16 loss scales them.
        They are whole."""
        if self.scaler is not None and any(p.grad is not None for p in self.updated()):
            self.scaler.unscale_(self.optimizer)
            self._is_unscaled = True

    def unscale(self, take: Unscale) -> Overflows:
        """Let a GradScaler, the loop's own or this one's, unscale the gradients: where
        the model is in parts, an overflow in one is one on all ranks. Then collective.
        """
        if not self.has_parts:
            return take(self.optimizer)
        has_overflow = unscale_parts(list(self.updated()), take)
        (value,) = self.team.greatest([has_overflow])
        return {self.device: torch.full((), float(value), device=self.device)}

    def has_gradients_alike(self) -> bool:
        """Whether all ranks are as far with the gradients of a step: a cell may have
        failed on one of them before it had reduced its own. Collective."""
        return True

    def scale_gradients(self) -> None:
        """Another backward pass will add to them."""
        if self.scaler is not None and self._is_unscaled:
            for parameter in self.updated():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.scaler.get_scale())
            self._forget_unscaling()

    def _forget_unscaling(self) -> None:
        if self.scaler is not None:
            self._is_unscaled = False
            forget_unscaling(self.scaler, self.optimizer)

    def step(self, closure: Closure | None = None) -> Norm | None:
        """Clip the gradients and update the parameters; the norm before clipping.

        `closure` is for an optimizer that evaluates the loss several times in a step.
        """
        if self.division is not None:
            self.division.begin_step()
        if closure is not None:
            self.returned = self.optimizer.step(closure, **self.step_arguments)
            return None
        norm = None
        if self.options.clip is not None:
            norm = self.clip(self.options.clip)
        if self.scaler is None:
            self.returned = self.optimizer.step(**self.step_arguments)
        elif self._is_unscaled:
            self.returned = self.scaler.step(self.optimizer, **self.step_arguments)
            self.scaler.update()
            self._is_unscaled = False
        return norm

    def begin_own_step(self, kind: str) -> None:
        """The user's optimizer is to step one of this `kind` that it has, in a method
        of its own, as second_step() of SAM. UnsupportedLoopError where that would not
        be the step of one process. Collective."""
        outer = type(self.optimizer).__name__
        raise UnsupportedLoopError(OWN_STEP.format(outer=outer, kind=kind))

    def clip(self, max_norm: float) -> Norm:
        """Scale all gradients so that their norm is `max_norm` at most.

        The norm is that of the whole gradient, also where a rank has only a shard.
        """
        parameters = list(self.updated())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = self.norm_of(gradients)
        if self.division is None:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            return read_if_here(norm)
        # Their meshes differ: a kernel for several takes parts of one alone.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in map(local_part, gradients):
            gradient.mul_(scale.to(gradient.device))
        return read_if_here(norm)

    def norm_of(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm of whole gradients, of which these are this rank's. Collective."""
        return norm_of_parts(gradients, self.device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._forget_unscaling()
        if self._zero_takes_setting:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        else:
            self.optimizer.zero_grad()

    def drop_gradients(self) -> None:
        """As zero_grad, without what a class of the loop's own may do there besides:
        for what the loop has zeroed already, or labkit does by itself."""
        self._forget_unscaling()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def stepping_groups(self) -> contextlib.AbstractContextManager[None]:
        """Within it the optimizer's groups hold what it has state of."""
        return contextlib.nullcontext()

    @property
    def is_one_model(self) -> bool:
        """Whether ranks have one model, and not each its own for some steps."""
        return True

    def unite(self, *, with_optimizer: bool = False) -> None:
        """Make one model of those of the ranks, where each has its own. Collective."""

    def averages(self) -> Averages | None:
        """What was sent to make one model of them."""
        return None

    def memory(self) -> dict[str, Tensors]:
        """The tensors that hold this rank's model states right now, by component."""
        return {
            "parameters": [*self.module.parameters(), *self.module.buffers()],
            "gradients": [parameter.grad for parameter in self.module.parameters()],
            "optimizer_state": optimizer_tensors(self.optimizer),
            "communication_buffers": self.communication_buffers(),
        }

    def communication_buffers(self) -> Tensors:
        """What is sent and received, and parameters that are gathered at the moment."""
        return ()

    @property
    def seconds_waited(self) -> float:
        """For messages of single ranks, so far."""
        return 0.0 if self.roles is None else self.roles.channel.seconds_waited

    def facts(self) -> ModelFacts:
        """What theory computes the model states from."""
        state = sum(
            t.numel() * t.element_size() for t in optimizer_tensors(self.optimizer)
        )
        kept = self.optimizer.state
        # Of parameters that were always frozen an optimizer keeps nothing.
        trained = [t for t in self.updated() if t.requires_grad or t in kept]
        found = ModelFacts(
            self._num_parameters,
            self.num_trainable(),
            state / max(1, sum(tensor.numel() for tensor in trained)),
            self.num_shards,
        )
        return found if self.division is None else self.division.facts(found)

    def num_trainable(self) -> int:
        """Elements of parameters that are trained: also of those that the loop has
        unfrozen, or freezes for a while, as a critic's in the actor's step."""
        named = self.module.named_parameters()
        self._trainable |= {name for name, p in named if p.requires_grad}
        return sum(self._sizes.get(name, 0) for name in self._trainable)

    def updated(self) -> Iterable[torch.Tensor]:
        """What the optimizer updates on this rank."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def gradients(self) -> list[torch.Tensor]:
        """Those that a step would be taken with, as far as the loop has had hands on
        them."""
        return [p.grad for p in self.updated() if p.grad is not None]

    def copies(self) -> dict[str, Sequence[torch.Tensor]]:
        """By name, what this rank has whole before a step, which takes parts of it from
        each rank."""
        return {}

    def metrics(self) -> dict[str, float]:
        """What else there is to plot of the last step, by name."""
        return {}

    def replicas(self) -> dict[str, torch.Tensor]:
        """By name, what must be equal on all ranks of this rank's replica group."""
        return {}

    def counted(self) -> dict[str, torch.Tensor]:
        """By name, facts that are equal where all ranks train one model."""
        settings = self._stepped_with or self._optimizer_settings.number
        return {
            name: torch.full((1,), number, device=self.device)  # it waits for no GPU
            for name, number in (
                ("the optimizer's settings", settings),
                ("the number of batches", self.course.num_batches),
            )
        }

    def checkpoint(
        self, *, with_optimizer: bool = True
    ) -> tuple[Named, dict[str, Any]]:
        """This rank's part of the states, as `strategies.model.states` names them, and
        the settings besides. May be collective."""
        tensors = states.model_tensors(self.module)
        if not with_optimizer:
            return tensors, {}
        values = self.settings()
        return tensors | states.optimizer_states(self.optimizer, self._names), values

    def restore(self, source: Source, values: Mapping[str, Any]) -> None:
        """Set the states to what `checkpoint` gave, of any strategy. May be collective.

        Raises ValueError, and changes nothing, where they do not fit.
        """
        self.restoring(source, values)()

    def restoring(
        self,
        source: Source,
        values: Mapping[str, Any],
        *,
        with_optimizer: bool = True,
    ) -> Restore:
        """What `restore` does once all has been found to fit."""
        optimizer = self.optimizer if with_optimizer else None
        restore = states.restoring(source, values, self.module, optimizer, self._names)

        def restore_all() -> None:
            restore()
            if with_optimizer:
                self.restore_scaler(values)

        return restore_all

    def load_optimizer(self, state_dict: Mapping[str, Any]) -> None:
        """Set the optimizer's states to those that a plain one has given, whole. May be
        collective."""
        found = states.named_states(state_dict, self.optimizer, self._names)
        self.restoring(*found)()

    def settings(self) -> dict[str, Any]:
        """The states that are not tensors."""
        found = states.hyperparameters(self.optimizer, self._names)
        if self.scaler is not None:
            found["scaler"] = self.scaler.state_dict()
        return found

    def resume(self, values: Mapping[str, Any]) -> None:
        """The loop is where it was when `settings` gave `values`: set what is no state
        of model or optimizer, as what random numbers begin with."""

    def restore_scaler(self, values: Mapping[str, Any]) -> None:
        """Set the loss scaler, if there is one, to what was saved of one."""
        if self.scaler is not None and values.get("scaler"):
            saved = {**self.scaler.state_dict(), **values["scaler"]}
            self.scaler.load_state_dict(saved)

    def release(self) -> None:
        """Let go of the model, which is prepared again."""
        unfollow(self)

    def finish(self) -> None:
        """The run ends well, on all ranks. Collective."""

    def close(self) -> None:
        """Take back what only this run needed of the model."""
        for undo in self._undo:
            undo()

    def autocast(self) -> None:
        """Compute the forward pass in `--precision`; parameters stay in fp32.

        Source: `torch.autocast`; Micikevicius et al., "Mixed Precision Training".
        """
        if self.options.precision == "fp32":
            return
        self.in_autocast = True
        if self.options.precision == "fp16":
            self.scaler = torch.amp.GradScaler(self.device.type)
        device_type, dtype = self.device.type, self.dtype

        def in_autocast(plain: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                with torch.autocast(device_type, dtype=dtype):
                    output = plain(*args, **kwargs)
                return cast_floats(output, torch.float32)

            return forward

        self._undo.append(wrap_forward(self.module, in_autocast))


def node_of(parameter: nn.Parameter) -> Any:
    """The node of autograd that adds to a parameter's gradient."""
    if not parameter.is_inference():
        return get_gradient_edge(parameter).node
    # The loop has put a tensor of inference mode in its place, and the view of it that
    # torch would ask has no node.
    with torch.enable_grad():
        product: Any = parameter * 1
    return product.grad_fn.next_functions[0][0]


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """A structure with its floating-point tensors in `dtype`."""
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state; also those in lists, as LBFGS has."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, list | tuple | dict):
                yield from (x for x in tree_leaves(value) if torch.is_tensor(x))


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether it has an argument of this name."""
    found = inspect.signature(function).parameters
    return name in found or any(p.kind is p.VAR_KEYWORD for p in found.values())


def check_keys(config: Mapping[str, Any], known: Iterable[str], taker: str) -> None:
    """ValueError that lists the keys `taker` knows, if `config` has others."""
    known = list(known)
    if unknown := [key for key in config if key not in known]:
        says = f"it knows: {', '.join(sorted(known))}" if known else "leave it out"
        raise ValueError(f"--config: {taker} has no {unknown[0]!r}; {says}")


def check_masks(optimizer: torch.optim.Optimizer) -> None:
    """UnsupportedLoopError for an optimizer that sets elements by a mask, which torch
    does not have for parts of parameters (DTensors)."""
    if isinstance(optimizer, torch.optim.Rprop):
        raise UnsupportedLoopError(
            "Rprop sets elements of a gradient by a mask, which torch does not have "
            "for parameters in parts (DTensors); use ddp or ZeRO, or another optimizer"
        )


def blocks(model: nn.Module) -> list[nn.Module]:
    """The parts that a model is a sequence of: the children of its outermost
    ModuleLists and Sequentials, as a transformer's blocks. The units in which
    parameters are gathered, and activations computed again.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.Sequential):
                visit(child)
            elif isinstance(module, nn.ModuleList | nn.Sequential):
                if any(True for _ in child.parameters()):
                    found.append(child)
            else:
                visit(child)

    visit(model)
    return found


def units(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model that are sharded one by one: those which share no
    parameter with what is outside of them."""
    holders: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for _, parameter in module.named_parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(module)
    return [
        block
        for block in blocks(model)
        if all(holders[id(p)] <= set(block.modules()) for p in block.parameters())
    ]


def read_if_here(norm: Norm) -> Norm:
    """A norm as a number; as it is on a GPU, which the loop is not to wait for."""
    is_there = isinstance(norm, torch.Tensor) and norm.is_cuda
    return norm if is_there else float(norm)
