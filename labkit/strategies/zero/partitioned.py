"""What all stages of ZeRO share: DeepSpeed's engine under a plain loop."""

import contextlib
import itertools
import weakref
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from labkit.checks import UnsupportedLoopError
from labkit.checks import several
from labkit.compat.deepspeed import call_before_reduction
from labkit.compat.deepspeed import compare_within
from labkit.compat.deepspeed import forget_backward
from labkit.compat.deepspeed import keep_optimizer
from labkit.compat.deepspeed import prepare_backward
from labkit.compat.deepspeed import second_copies
from labkit.compat.deepspeed import set_boundary
from labkit.compat.torch import call_step_hooks
from labkit.compat.torch import has_step_hooks
from labkit.compat.torch import in_place_conversion
from labkit.compat.torch import without_step_hooks
from labkit.records import GRADIENTS
from labkit.records import WEIGHTS
from labkit.strategies.autograd.agreement import InOrder
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.backward import follow
from labkit.strategies.autograd.backward import unfollow
from labkit.strategies.mesh.peers import Pending
from labkit.strategies.model.gradients import CellGradients
from labkit.strategies.model.spectral import in_one_precision
from labkit.strategies.model.states import Held
from labkit.strategies.model.states import Named
from labkit.strategies.model.states import Restore
from labkit.strategies.model.states import Source
from labkit.strategies.model.states import check_hyperparameters
from labkit.strategies.model.states import named_states
from labkit.strategies.model.states import optimizer_states
from labkit.strategies.model.states import plain_shape
from labkit.strategies.model.states import set_hyperparameters
from labkit.strategies.optimizers.elementwise import check_elementwise
from labkit.strategies.optimizers.elementwise import check_zero_grad
from labkit.strategies.optimizers.kept import IDS
from labkit.strategies.optimizers.kept import MODULES
from labkit.strategies.optimizers.kept import PARAMETERS
from labkit.strategies.optimizers.kept import check_kept
from labkit.strategies.prepared import DROPPED
from labkit.strategies.prepared import Closure
from labkit.strategies.prepared import Norm
from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import cast_floats
from labkit.strategies.prepared import check_keys
from labkit.strategies.prepared import read_if_here
from labkit.strategies.zero.config import check_ratio
from labkit.strategies.zero.config import deepspeed_config
from labkit.strategies.zero.config import ranks_of_second_copies
from labkit.strategies.zero.engines import agree_on_ids
from labkit.strategies.zero.engines import destroy_former_engines
from labkit.strategies.zero.engines import forget
from labkit.strategies.zero.engines import free_training_states
from labkit.strategies.zero.engines import import_deepspeed
from labkit.strategies.zero.engines import land_parameters
from labkit.strategies.zero.engines import name_strategy
from labkit.strategies.zero.engines import numbered_as
from labkit.strategies.zero.engines import plain_copy
from labkit.strategies.zero.engines import quiet
from labkit.strategies.zero.engines import restore_linear
from labkit.strategies.zero.engines import retire
from labkit.strategies.zero.setup import build_partitioner
from labkit.strategies.zero.setup import place
from labkit.strategies.zero.setup import restore_digits
from labkit.strategies.zero.states import Partitions
from labkit.strategies.zero.states import ZeROStates


class ZeRO(Prepared):
    """Partition optimizer state (1), gradients too (2), and parameters too (3).

    Stage 1 and 2: reduce the gradients to the rank that owns their part, update that
    part in fp32, all-gather the parameters. Stage 3: all-gather a layer's parameters
    for its forward and its backward pass, and free them after each.

    `--config` takes DeepSpeed's own configuration.

    Source: Rajbhandari et al., "ZeRO", SC 2020; `deepspeed.initialize`.
    """

    _has_gradients = False
    """Whether there was a backward pass since the last step."""
    _has_stepped = False
    _is_zeroed = True
    """Whether the loop has zeroed gradients since its last step."""
    _is_released = False
    """Whether DeepSpeed has released the model."""
    _has_dropped = False
    """Whether a backward pass has failed half-way, and no zero_grad() followed."""
    _is_half_way = False
    """Whether DeepSpeed is where that pass has left it."""
    _has_leftovers = False
    """Whether gradients of that pass are yet to be freed."""
    _stop_waiting: Callable[[], Any] | None = None
    """Remove the hook that frees them before a forward pass."""
    hides_gradients = False
    """Whether they are partial sums, which a loop must not see."""
    _is_reduced = False
    """Whether the gradients so far are averaged over the ranks."""
    _is_clear = False
    """Whether DeepSpeed has had no gradients since they were cleared."""
    _has_noted_unused = False
    _in_order: InOrder | None = None
    """From stage 2 on, which reduces gradients in the backward pass."""
    _casts: Sequence[RemovableHandle] = ()

    @property
    def name(self) -> str:
        return self.strategy.name

    @property
    def stage(self) -> int:
        stage: int = self.strategy.variant["stage"]
        return stage

    def place(self) -> None:
        """A parameter at a time, in `wrap`."""

    def wrap(self) -> None:
        check_kept(self.optimizer, self.name, [PARAMETERS, IDS, MODULES])
        self.note_untried(check_elementwise(self.optimizer, self.device))
        check_zero_grad(self.optimizer)
        config = deepspeed_config(
            self.options, self.stage, self._num_parameters, self.device.type
        )
        check_ratio(config, self.optimizer)
        num_sharing = ranks_of_second_copies(config, self.peers.size)
        self._given_groups = [
            {**group, "params": list(group["params"])}
            for group in self.optimizer.param_groups
        ]
        check_counts(self._given_groups, self.optimizer.state)
        # DeepSpeed makes other parameters of these, and looks for no state of theirs.
        brought = Held(optimizer_states(self.optimizer, self._names))
        destroy_former_engines()
        self.num_shards = self.peers.size
        deepspeed = import_deepspeed(self.device)
        fields = deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields
        check_keys(
            self.options.config.get("zero_optimization", {}),
            [field.alias or name for name, field in fields.items()],
            "DeepSpeed's zero_optimization",
        )
        partitioner = None
        with (
            quiet(),
            numbered_as(self.device),
            in_place_conversion(),
            second_copies(num_sharing) as sharing,
        ):
            if self.stage == 3:
                agree_on_ids(self.peers)
                partitioner = build_partitioner(deepspeed, config, sharing)
            digits = place(self.module, self.dtype, self.peers, partitioner)
            self.engine, self._zero, _, _ = deepspeed.initialize(
                model=self.module,
                optimizer=self.optimizer,
                config=config,
                dist_init_required=False,
            )
        if self.stage == 3:
            compare_within(numbered_as(self.device))
        keep_optimizer(self._zero, self.optimizer)
        partitions = self.partitions()
        restore_digits(digits, [p for _, group in partitions for p in group])
        if brought.tensors:
            self.optimizer.state.clear()
            held = ZeROStates(self.module, self._zero, partitions, self.peers)
            held.restore_optimizer(brought)
        name_strategy(self.optimizer, self.name)
        # The step reduces what is left to reduce, whatever number of backward passes
        # there were; until then each of them adds to what the ranks have in parts.
        set_boundary(self.engine, self._zero, is_on=False)
        self._watch()

    def _watch(self) -> None:
        """See what the loop does with the parameters, and its backward passes."""
        self._used: set[int] = set()
        self._ever_used: set[int] = set()
        """Ids of parameters that have had gradients, in this step and before."""
        self._owned = [p for group in self._given_groups for p in group["params"]]
        """The parameters that the user's optimizer has."""
        self._requires_grad = [p.requires_grad for p in self._owned]
        self._trained = [p for p in self._owned if p.requires_grad]
        self._trained_ids = set(map(id, self._trained))
        self._anywhere: Pending[list[nn.Parameter]] = Pending(list)
        """What any rank uses in the newest backward pass."""
        of_cell = self.given_parameters if self.strategy.is_sharded else self._trained
        self._gradients = CellGradients(self, of_cell)
        vars(self.module)["__deepcopy__"] = partial(plain_copy, self.module)
        self._lay_out()
        zero = self._zero
        call_before_reduction(zero, partial(call, weakref.WeakMethod(self._fill_up)))
        if self.stage > 1:
            reduce = zero.reduce_ready_partitions_and_remove_grads
            held = 0 if self.strategy.is_sharded else zero.reduce_bucket_size
            self._in_order = InOrder(reduce, self._trained, self.peers, held)
            zero.reduce_ready_partitions_and_remove_grads = self._in_order.add
        follow(self)
        self._undo += in_one_precision(self.module)
        if self.options.precision != "fp32":
            # DeepSpeed keeps the model itself in this precision, not its inputs.
            dtype = self.dtype
            self._casts = [
                self.module.register_forward_pre_hook(
                    lambda module, args, kwargs: cast_floats((args, kwargs), dtype),
                    with_kwargs=True,
                    prepend=True,
                ),
                self.module.register_forward_hook(
                    lambda module, args, output: cast_floats(output, torch.float32)
                ),
            ]

    # ---- backward passes ----

    def scale(self, seed: torch.Tensor) -> torch.Tensor:
        return seed * self._loss_scale if self._loss_scale != 1.0 else seed

    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        self._check_held()
        self._recover()
        if self._has_dropped:
            self._has_dropped = False
            self.note(DROPPED)
        self._check_trained(only_new=True)
        self._gradients.hand_back()
        if self._is_reduced:
            self._carry()
        self._agree_on_used(used)
        self._has_gradients, self._is_clear = True, False
        self.hides_gradients = not self.is_last
        prepare_backward(self.engine, self._zero)
        self._gradients.begin_pass()

    def _agree_on_used(self, used: Sequence[nn.Parameter]) -> None:
        """Of which parameters any rank has gradients in this pass. Collective."""
        ours = set(map(id, used))
        flags = [id(parameter) in ours for parameter in self._trained]
        is_sharded = self.strategy.is_sharded
        agreeing = self.begin_agree(flags, alike=flags if is_sharded else ())
        self._anywhere = agreeing.then(self._note_used)
        if is_sharded:  # the pass itself gathers, on all ranks at once
            self._anywhere.wait()
        if self._in_order is not None:
            self._in_order.begin(self._anywhere)

    def _note_used(self, flags: Sequence[bool]) -> list[nn.Parameter]:
        found = [*itertools.compress(self._trained, flags)]
        self._used.update(map(id, found))
        return found

    def _fill_up(self) -> None:
        """All gradients of a pass are there: those which only other ranks have are 0
        here, and as many have to be reduced on every rank."""
        if self._in_order is not None:
            late = self._in_order.late()
        else:
            late = [p for p in self._anywhere.wait() if p.grad is None]
        for parameter in late:
            self._process_gradient(parameter)

    def _process_gradient(self, parameter: nn.Parameter) -> None:
        """What DeepSpeed does with a gradient once it is there."""
        raise NotImplementedError

    def end_backward(self, *, has_failed: bool) -> None:
        self._gradients.end_pass()
        if has_failed:
            self._break_off()
            return
        self._anywhere.wait()  # where no gradient has come
        if self._in_order is not None:
            self._in_order.agree()

    def _break_off(self) -> None:
        """Count those of this step as gone, of which some are averaged over the ranks
        and others not. They are freed when the model is next used: what a rank held as
        it ran out of memory is reported before that."""
        self._is_half_way = self._has_leftovers = self._has_dropped = True
        self._has_gradients = self._is_reduced = self.hides_gradients = False
        self._gradients.forget()
        self._used.clear()
        if self._stop_waiting is None:
            recover = partial(call, weakref.WeakMethod(self._recover))
            # Of all modules, so that there is none in a step that does not fail.
            hook = register_module_forward_pre_hook(lambda module, args: recover())
            self._stop_waiting = weakref.finalize(self, hook.remove)
        self._end_pass()

    def _end_pass(self) -> None:
        """End DeepSpeed's part in a pass that has failed half-way. Not to be put off:
        what the cell then writes to a weight would be lost. Local: the other ranks may
        be gone."""
        if not self._is_half_way:
            return
        forget_backward(self._zero)
        with self._gradients:
            self._reset_parameters()
        self._is_half_way = False  # last: where this fails, the next use fails, too

    def _recover(self) -> None:
        """Put DeepSpeed where it is before the first backward pass of a step, if a pass
        has failed half-way. Local: the other ranks may be gone."""
        if not self._has_leftovers:
            return
        self._end_pass()
        with self._gradients:
            self._reset_reduction()
            self._zero.zero_grad(set_to_none=True)
            self._discard()
        self._has_leftovers = False  # last, as above
        self._drop_hook()

    def _drop_hook(self) -> None:
        if self._stop_waiting is not None:
            self._stop_waiting()
            self._stop_waiting = None

    def _reset_parameters(self) -> None:
        """Put them where they are before a forward pass."""

    def _reset_reduction(self) -> None:
        """Empty the buckets, and what else is in flight."""
        raise NotImplementedError

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient of all ranks, whole; None if there is none. Collective."""
        if not self._has_gradients or id(parameter) not in self._trained_ids:
            return None
        self._reduce()
        return self._gather_gradient(parameter) / self._loss_scale

    def has_gradients_alike(self) -> bool:
        state = self._has_gradients, self._is_reduced, self.hides_gradients
        return self.peers.agree_on(sum(2**n * each for n, each in enumerate(state)))

    def set_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Put `value`, which is whole and equal on all ranks, in its place."""
        if id(parameter) not in self._trained_ids:
            return
        self._has_gradients, self._is_clear = True, False
        self._reduce()
        self._partition_gradient(parameter, value * self._loss_scale)

    def drop_gradient(self, parameter: nn.Parameter) -> None:
        zeros = torch.zeros(plain_shape(parameter), device=parameter.device)
        self.set_gradient(parameter, zeros)
        self._used.discard(id(parameter))

    @property
    def _loss_scale(self) -> float:
        return float(self._zero.loss_scale) if self.options.precision == "fp16" else 1.0

    def _reduce(self) -> None:
        """Average the gradients so far over the ranks, in parts. Collective."""
        if self._is_reduced:
            return
        self._recover()
        try:
            with self._gradients:
                self._reduce_gradients()
        except BaseException:
            self._break_off()
            raise
        self._is_reduced = True

    def _check_held(self) -> None:
        if self._is_released:
            raise UnsupportedLoopError(
                f"under {self.name} DeepSpeed has released this model, because a later "
                "run prepared one; prepare model and optimizer again"
            )

    def _check_trained(self, *, only_new: bool = False) -> None:
        flags = [p.requires_grad for p in self._owned]
        if flags == self._requires_grad:
            return
        now = {id(p) for p in itertools.compress(self._owned, flags)}
        if only_new and now < self._trained_ids:
            return
        changed = now ^ self._trained_ids
        name, is_trained = next(
            (name, parameter.requires_grad)
            for name, parameter in self.module.named_parameters()
            if id(parameter) in changed
        )
        raise UnsupportedLoopError(
            f"{name}.requires_grad was {not is_trained} in prepare and is "
            f"{is_trained} now; {self.name} partitions the trainable parameters in "
            "prepare. Freeze or unfreeze before prepare, in a %%dist_train cell of "
            "its own for each phase (under zero3, build the model again in that "
            "cell), or use ddp, fsdp or hsdp"
        )

    # ---- the step ----

    def step(self, closure: Closure | None = None) -> Norm | None:
        self._check_held()
        self._check_trained()
        if self._has_stepped and not self._is_zeroed and self._has_gradients:
            raise UnsupportedLoopError(
                "the loop calls no zero_grad() between two steps. In one process "
                "gradients then add up, unless the loop zeroes them itself; under "
                f"{self.name} the step clears them and p.grad is None after it, so "
                "there is nothing to add to or to zero. Call optimizer.zero_grad() "
                "once a step, or use ddp"
            )
        if not has_step_hooks(self.optimizer):
            return self._step()
        # Not around DeepSpeed's own: it steps each group by itself, from parts, and the
        # parameters are as before until the last is done.
        call_step_hooks(self.optimizer, is_before=True)
        with without_step_hooks(self.optimizer):
            norm = self._step()
        if not self._zero.overflow:  # in fp16 such a step is left out
            call_step_hooks(self.optimizer, is_before=False)
        return norm

    def _step(self) -> Norm | None:
        self._gradients.hand_back()
        if not self._has_gradients:
            return None  # as an optimizer that finds no gradient
        self._reduce()
        self.note_step()
        changed = [p for p in self.given_parameters if id(p) in self._used]
        self._note_unused()
        with self._gradients:
            self._take_weights()
            set_boundary(self.engine, self._zero, is_on=True)
            try:
                self.engine.step()  # clips, and takes away parameters' gradients
            finally:
                set_boundary(self.engine, self._zero, is_on=False)
        if self.stage < 3 and not self._zero.overflow:
            # DeepSpeed writes past autograd, which would take a graph of before the
            # step for one of these values. Under stage 3 such a graph has no values.
            increment_version(changed)
        self._discard()
        self._is_clear = True
        self._clear()
        self._has_stepped, self._is_zeroed = True, False
        norm = self.engine.get_global_grad_norm()
        if self.options.clip is None or norm is None:
            return None
        return read_if_here(norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.drop_gradients()
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            super().zero_grad(set_to_none)  # which may do more

    def drop_gradients(self) -> None:
        self.note_zeroed()
        self._clear()

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients.given()

    def copies(self) -> dict[str, Sequence[torch.Tensor]]:
        return {WEIGHTS: self._whole_parameters(), GRADIENTS: self.gradients()}

    def _whole_parameters(self) -> list[torch.Tensor]:
        return list(self.module.parameters())

    def note_zeroed(self) -> None:
        """The loop has taken gradients away."""
        self._is_zeroed, self._has_dropped = True, False

    def _clear(self) -> None:
        self._recover()
        self._gradients.forget()
        self._has_gradients = self._is_reduced = self.hides_gradients = False
        if self._is_clear:  # as after a step
            return
        with self._gradients:
            self._zero.zero_grad(set_to_none=True)
            self._discard()
        self._is_clear = True

    def _note_unused(self) -> None:
        """DeepSpeed steps a parameter without a gradient as if that were 0."""
        unused: list[str] = []
        is_late = self._has_stepped and counts_steps(self.optimizer)
        for group, names in zip(self._given_groups, self._names, strict=True):
            if not has_memory(self.optimizer, group):
                continue
            decays = bool(group.get("weight_decay"))
            for parameter, name in zip(group["params"], names, strict=True):
                number = id(parameter)
                if not parameter.requires_grad:
                    continue
                was_used = number in self._ever_used
                if number in self._used:
                    if is_late and not was_used:
                        unused.append(name)  # in the steps before
                elif decays or was_used:
                    unused.append(name)
        if unused and not self._has_noted_unused:
            self._has_noted_unused = True
            self.note(
                f"{several(unused)} gets no gradient in some steps; {self.name} then "
                "updates it with a gradient of 0, so weight decay, momentum and the "
                "count of its steps go on, where one process leaves it unchanged"
            )
        self._ever_used |= self._used
        self._used.clear()

    def _take_weights(self) -> None:
        """Step from the weights that the model has, which the loop may have changed:
        DeepSpeed steps from a copy of its own. Nothing is lost of a copy in fp32 whose
        rounded value the model still has."""

    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have these whole on every rank, and keep them so. Collective."""

    def _reduce_gradients(self) -> None:
        raise NotImplementedError

    def _gather_gradient(self, parameter: Any) -> torch.Tensor:
        raise NotImplementedError

    def _partition_gradient(self, parameter: Any, value: torch.Tensor) -> None:
        raise NotImplementedError

    def _carry(self) -> None:
        """Another backward pass adds to gradients that are reduced already."""
        self._is_reduced = False

    def _discard(self) -> None:
        """Forget the gradients that are in parts."""

    def memory(self) -> dict[str, Tensors]:
        with self._gradients:
            return {name: list(held) for name, held in self.tensors().items()}

    def tensors(self) -> dict[str, Tensors]:
        """What `memory` gives."""
        raise NotImplementedError

    def checkpoint(
        self, *, with_optimizer: bool = True
    ) -> tuple[Named, dict[str, Any]]:
        tensors = self._states().gather(with_optimizer=with_optimizer)
        return tensors, self.settings() if with_optimizer else {}

    def restoring(
        self,
        source: Source,
        values: Mapping[str, Any],
        *,
        with_optimizer: bool = True,
    ) -> Restore:
        held = self._states()
        held.check(source, with_optimizer=with_optimizer)
        if with_optimizer:
            check_hyperparameters(self.optimizer, self._names, values)

        def restore() -> None:
            held.restore(source, with_optimizer=with_optimizer)
            if with_optimizer:
                set_hyperparameters(self._zero.optimizer, values)
                self.restore_scaler(values)

        return restore

    def load_optimizer(self, state_dict: Mapping[str, Any]) -> None:
        source, values = named_states(state_dict, self.optimizer, self._names)
        check_hyperparameters(self.optimizer, self._names, values)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        by_number = state_dict["state"]
        states = {
            parameter: by_number.get(number, {})
            for parameter, number in zip(self._owned, numbers, strict=True)
        }
        check_counts(self._given_groups, states)
        held = self._states()
        held.check(source, with_optimizer=True)
        held.restore_optimizer(source)
        set_hyperparameters(self._zero.optimizer, values)

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        if self.options.precision == "fp16":
            found["scaler"] = {"scale": float(self._zero.loss_scale)}
        return found

    def restore_scaler(self, values: Mapping[str, Any]) -> None:
        if self.options.precision == "fp16" and values.get("scaler"):
            self._zero.loss_scale = values["scaler"]["scale"]

    def _states(self) -> ZeROStates:
        self._recover()
        with self._gradients:
            self._take_weights()
        land_parameters(self.engine)
        return ZeROStates(self.module, self._zero, self.partitions(), self.peers)

    def partitions(self) -> Partitions:
        """This rank's fp32 partition of every group, with the group's parameters."""
        zero = self._zero
        return list(
            zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)
        )

    def _lay_out(self) -> None:
        """Note what is where, once DeepSpeed has put it there."""

    def release(self) -> None:
        unfollow(self)
        self._drop_hook()
        self._gradients.close()
        for handle in self._casts:
            handle.remove()
        self._is_released = True
        forget(self.engine)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(Exception):  # of a run that failed half-way
            self._recover()
            self._take_weights()
        self._drop_hook()
        retire(self.engine, self)
        masters = [master for master, _ in self.partitions()]
        free = weakref.finalize(self, free_training_states, self.engine, masters)
        free.atexit = False
        restore_linear()

    def replicas(self) -> dict[str, torch.Tensor]:
        whole = {} if self.strategy.is_sharded else dict(self.module.named_parameters())
        return self.counted() | whole


def process_filled(process: Callable[..., None], parameter: Any, *rest: Any) -> None:
    """What DeepSpeed does with a gradient. Where autograd gives none, it is 0:
    as many have to be reduced on every rank."""
    if parameter.grad is None:
        parameter.grad = torch.zeros(
            plain_shape(parameter), dtype=parameter.dtype, device=parameter.device
        )
    process(parameter, *rest)


def call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call the method of what DeepSpeed is not to keep alive."""
    if (living := method()) is not None:
        living()


def take(weights: torch.Tensor, master: torch.Tensor) -> None:
    """Set the copy in fp32 to weights, but where these are what it is rounded to."""
    if weights.dtype != master.dtype:
        is_same = weights == master.to(weights.dtype)
        weights = torch.where(is_same, master, weights.to(master.dtype))
    master.copy_(weights)


def has_memory(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a gradient of 0 changes a parameter: by momentum or weight decay."""
    is_sgd = type(optimizer) is torch.optim.SGD
    return not is_sgd or bool(group["momentum"] or group["weight_decay"])


def counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update depends on how many there were before."""
    uncounted = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adadelta)
    return type(optimizer) not in uncounted


def check_counts(
    groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]
) -> None:
    """UnsupportedLoopError where trained parameters of one group, which are to be one
    partition with one count of its steps, have taken different numbers of steps."""
    for number, group in enumerate(groups):
        # Without a state there are no counts, and no other values either.
        counts = {
            tuple(
                (key, float(value) if is_count(value) else None)
                for key, value in states.get(parameter, {}).items()
                if value is not None
            )
            for parameter in group["params"]
            if parameter.requires_grad
        }
        if len(counts) > 1:
            raise UnsupportedLoopError(
                f"parameters of the optimizer's group {number} have taken different "
                "numbers of steps, for example because some were frozen, and ZeRO "
                "counts the steps of a group. Make an optimizer with groups of their "
                "own for these, or a new one, or use ddp or fsdp"
            )


def is_count(value: Any) -> bool:
    """Whether this is one number, as the number of steps is."""
    is_number = isinstance(value, int | float)
    return is_number or (isinstance(value, torch.Tensor) and not value.dim())
