"""ZeRO: what every replica would hold twice is partitioned over the ranks."""

import contextlib
import copy
import logging
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.strategies.autograd.agreement import InOrder
from labkit.strategies.autograd.agreement import Route
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.backward import follow
from labkit.strategies.autograd.backward import unfollow
from labkit.strategies.model.gradients import CellGradients
from labkit.strategies.model.gradients import is_absent
from labkit.strategies.model.gradients import is_empty
from labkit.strategies.model.spectral import in_one_precision
from labkit.strategies.model.states import Named
from labkit.strategies.model.states import Restore
from labkit.strategies.model.states import Source
from labkit.strategies.model.states import check_hyperparameters
from labkit.strategies.model.states import plain_shape
from labkit.strategies.model.states import set_hyperparameters
from labkit.strategies.prepared import Closure
from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import cast_floats
from labkit.strategies.prepared import check_elementwise
from labkit.strategies.prepared import check_keys
from labkit.strategies.prepared import optimizer_tensors
from labkit.strategies.zero.setup import build_partitioner
from labkit.strategies.zero.setup import place
from labkit.strategies.zero.setup import restore_digits
from labkit.strategies.zero.states import Partitions
from labkit.strategies.zero.states import ZeROStates
from labkit.strategies.zero.states import own_part

BUCKET_ELEMENTS = 2_000_000
"""DeepSpeed's own 5e8 would take 2 GB for a bucket of fp32."""

SET_BY_OPTION = {
    "bf16": "--precision",
    "fp16": "--precision",
    "gradient_accumulation_steps": "--accumulate",
    "gradient_clipping": "--clip",
    "train_batch_size": "prepare(..., batch_size=B)",
    "train_micro_batch_size_per_gpu": "prepare(..., batch_size=B)",
    "optimizer": "the optimizer given to prepare",
    "scheduler": "a torch.optim.lr_scheduler in the cell",
}
KNOWN_KEYS = (
    "activation_checkpointing",
    "communication_data_type",
    "comms_logger",
    "data_types",
    "dump_state",
    "flops_profiler",
    "gradient_predivide_factor",
    "memory_breakdown",
    "prescale_gradients",
    "sparse_gradients",
    "steps_per_print",
    "torch_autocast",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_optimization",
)


_linear = nn.functional.linear
_known_world: list[Any] = []
"""The default process group that DeepSpeed has cloned."""
_former: list[Any] = []
"""Engines of runs that have ended. Their models may be used on, until DeepSpeed, which
holds on to every engine that is not destroyed, has to make the next."""
_preparers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""What has prepared the model of an engine, by that one's id, while a cell has it."""


class ZeRO(Prepared):
    """Partition optimizer state (1), gradients too (2), and parameters too (3).

    Stage 1 and 2: reduce the gradients to the rank that owns their part, update that
    part in fp32, all-gather the parameters. Stage 3: all-gather a layer's parameters
    for its forward and its backward pass, and free them after each.

    `--config` takes DeepSpeed's own configuration.

    Source: Rajbhandari et al., "ZeRO", SC 2020; `deepspeed.initialize`.
    """

    is_partitioned = has_own_gradients = True
    stage: int

    def place(self) -> None:
        """A parameter at a time, in `wrap`."""

    def wrap(self) -> None:
        config = self._config()
        self._given_groups = [
            {**group, "params": list(group["params"])}
            for group in self.optimizer.param_groups
        ]
        destroy_former_engines()
        self.num_shards = torch.distributed.get_world_size()
        deepspeed = import_deepspeed(self.device)
        fields = deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields
        check_keys(
            self.options.config.get("zero_optimization", {}),
            [field.alias or name for name, field in fields.items()],
            "DeepSpeed's zero_optimization",
        )
        partitioner = None
        with quiet():
            if self.stage == 3:
                agree_on_ids(self.device)
                partitioner = build_partitioner(deepspeed, config)
            digits = place(self.module, self.device, self.dtype, partitioner)
            self.engine, self._zero, _, _ = deepspeed.initialize(
                model=self.module,
                optimizer=self.optimizer,
                config=config,
                dist_init_required=False,
            )
        restore_digits(digits, [p for _, group in self.partitions() for p in group])
        # The step reduces what is left to reduce, whatever number of backward passes
        # there were; until then each of them adds to what the ranks have in parts.
        self.engine.set_gradient_accumulation_boundary(False)
        self._casts: list[Any] = []
        self._has_gradients = False
        """Whether there was a backward pass since the last step."""
        self._has_stepped = False
        self._is_zeroed = True
        """Whether the loop has zeroed gradients since its last step."""
        self._is_broken = ""
        """Why the model cannot be trained on."""
        self.hides_gradients = False
        """Whether they are partial sums, which no loop is to see."""
        self._is_reduced = False
        """Whether the gradients so far are averaged over the ranks."""
        self._used: set[int] = set()
        self._ever_used: set[int] = set()
        """Ids of parameters that have had gradients, in this step and before."""
        trained = [p for p in self._owned() if p.requires_grad]
        self._trained_ids = {id(parameter) for parameter in trained}
        of_cell = self.given_parameters if self.is_sharded else trained
        self._gradients = CellGradients(self, of_cell)
        vars(self.module)["__deepcopy__"] = partial(plain_copy, self.module)
        self._lay_out()
        self._zero._backward_hook_state._grad_acc_post_hooks.insert(
            0, partial(call, weakref.WeakMethod(self._fill_up))
        )
        self._in_order: InOrder | None = None
        if not self.keeps_gradients:  # but reduces them in the backward pass
            zero = self._zero
            reduce = zero.reduce_ready_partitions_and_remove_grads
            self._in_order = InOrder(reduce, trained, self.device)
            zero.reduce_ready_partitions_and_remove_grads = self._in_order.add
        self._trained = trained
        self._anywhere: list[nn.Parameter] = []
        """What any rank uses in this backward pass."""
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

    def _config(self) -> dict[str, Any]:
        """DeepSpeed's configuration: ours, under what `--config` says."""
        given = self.options.config
        check_elementwise(self.optimizer)
        for key, option in SET_BY_OPTION.items():
            if key in given:
                raise ValueError(f"--config: {key!r} is set by {option}; leave it out")
        check_keys(given, KNOWN_KEYS, "DeepSpeed")
        if not isinstance(given.get("zero_optimization", {}), Mapping):
            raise ValueError(
                '--config: "zero_optimization" is a section: give a dict, as '
                '{"zero_optimization": {"reduce_bucket_size": 1000000}}'
            )
        bucket = bucket_elements(self._num_parameters)
        ours = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # the loop says which is the last
            "gradient_clipping": self.options.clip or 0.0,
            "bf16": {"enabled": self.options.precision == "bf16"},
            "fp16": {"enabled": self.options.precision == "fp16"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": BUCKET_ELEMENTS,
                "stage3_prefetch_bucket_size": bucket,
                "stage3_max_live_parameters": bucket,
                "stage3_max_reuse_distance": 0,
                "stage3_param_persistence_threshold": 1_000,
            },
        }
        merged = merge(ours, given)
        if merged["zero_optimization"]["stage"] != self.stage:
            raise ValueError(
                f'--config: "stage" is {merged["zero_optimization"]["stage"]}; '
                f"the magic line says zero{self.stage}; leave it out"
            )
        return merged

    # ---- backward passes ----

    def scale(self, seed: torch.Tensor) -> torch.Tensor:
        return seed * self._loss_scale if self._loss_scale != 1.0 else seed

    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        self._check_whole()
        self._check_trained(only_new=True)
        if not self._gradients.hand_back():
            self.zero_grad()
        elif self._is_reduced:
            self._carry()
        self._agree_on_used(used)
        self._has_gradients = True
        self.hides_gradients = not self.is_last
        # What else the engine's `forward` would do, which need not be called once for
        # every backward pass.
        self._zero.clear_backward_seen_flag()
        self.engine._manual_backward_expected = True
        self.engine._backward_prologue()
        self._gradients.begin_pass()

    def _agree_on_used(self, used: Sequence[nn.Parameter]) -> None:
        """Of which parameters any rank has gradients in this pass. Collective."""
        ours = set(map(id, used))
        flags = [id(parameter) in ours for parameter in self._trained]
        some = self.agree(flags, alike=flags if self.is_sharded else ())
        self._anywhere = [
            p for p, is_used in zip(self._trained, some, strict=True) if is_used
        ]
        self._used.update(map(id, self._anywhere))
        if self._in_order is not None:
            self._in_order.begin(self._anywhere)

    def _fill_up(self) -> None:
        """All gradients of a pass are there: those which only other ranks have are 0
        here, and as many have to be reduced on every rank."""
        if self._in_order is not None:
            late = self._in_order.late()
        else:
            late = [p for p in self._anywhere if p.grad is None]
        for parameter in late:
            self._process_gradient(parameter)

    def _process_gradient(self, parameter: nn.Parameter) -> None:
        """What DeepSpeed does with a gradient that has come."""
        raise NotImplementedError

    def end_backward(self, *, has_failed: bool) -> None:
        self._gradients.end_ours()
        if not has_failed and self._in_order is not None:
            self._in_order.agree()
        if has_failed:
            self._is_broken = (
                "a backward pass failed half-way, with the gradients of some "
                "parameters averaged; make model and optimizer again, and prepare them"
            )

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient of all ranks, whole; None if there is none. Collective."""
        if not self._has_gradients or id(parameter) not in self._trained_ids:
            return None
        self._reduce()
        return self._gather_gradient(parameter) / self._loss_scale

    def set_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Put `value`, which is whole and equal on all ranks, in its place."""
        if id(parameter) not in self._trained_ids:
            return
        self._has_gradients = True
        self._reduce()
        self._partition_gradient(parameter, value * self._loss_scale)

    @property
    def name(self) -> str:
        return f"zero{self.stage}"

    @property
    def _loss_scale(self) -> float:
        return float(self._zero.loss_scale) if self.options.precision == "fp16" else 1.0

    def _reduce(self) -> None:
        """Average the gradients so far over the ranks, in parts. Collective."""
        if not self._is_reduced:
            with self._gradients.ours():
                self._reduce_gradients()
            self._is_reduced = True

    def _owned(self) -> list[nn.Parameter]:
        """The parameters that the user's optimizer has."""
        return [p for group in self._given_groups for p in group["params"]]

    def _check_whole(self) -> None:
        if self._is_broken:
            raise UnsupportedLoopError(f"under {self.name} {self._is_broken}")

    def _check_trained(self, *, only_new: bool = False) -> None:
        now = {id(p): p for p in self._owned() if p.requires_grad}
        if now.keys() == self._trained_ids or (
            only_new and now.keys() < self._trained_ids
        ):
            return
        changed = now.keys() ^ self._trained_ids
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

    def step(self, closure: Closure | None = None) -> float | None:
        self._check_whole()
        self._check_trained()
        if self._has_stepped and not self._is_zeroed and self._has_gradients:
            raise UnsupportedLoopError(
                "the loop calls no zero_grad() between two steps. In one process "
                "gradients then add up, unless the loop zeroes them itself; under "
                f"{self.name} the step clears them and p.grad is None after it, so "
                "there is nothing to add to or to zero. Call optimizer.zero_grad() "
                "once a step, or use ddp"
            )
        if not self._gradients.hand_back():
            self.zero_grad()
        if not self._has_gradients:
            return None  # as an optimizer that finds no gradient
        self.note_step()
        self._note_unused()
        with self._gradients.ours():
            self._reduce()
            self._take_weights()
            self.engine.set_gradient_accumulation_boundary(True)
            try:
                self.engine.step()  # clips, and clears the gradients
            finally:
                self.engine.set_gradient_accumulation_boundary(False)
        self._clear()
        self._has_stepped, self._is_zeroed = True, False
        norm = self.engine.get_global_grad_norm()
        return None if self.options.clip is None or norm is None else float(norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._is_zeroed = True
        self._clear()

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients.given()

    def note_zeroed(self) -> None:
        """The loop has taken a gradient away by hand."""
        self._is_zeroed = True

    def _clear(self) -> None:
        self._gradients.forget()
        self._has_gradients = self._is_reduced = self.hides_gradients = False
        with self._gradients.ours():
            self._zero.zero_grad(set_to_none=True)
            self._discard()

    def _note_unused(self) -> None:
        """DeepSpeed steps a parameter without a gradient as if that were 0."""
        unused: list[str] = []
        for group, names in zip(self._given_groups, self._names, strict=True):
            if not has_memory(self.optimizer, group):
                continue
            decays = bool(group.get("weight_decay"))
            for parameter, name in zip(group["params"], names, strict=True):
                number = id(parameter)
                if number in self._used or not parameter.requires_grad:
                    continue
                if decays or number in self._ever_used:
                    unused.append(name)
        if unused and not self._has_noted_unused:
            self._has_noted_unused = True
            others = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
            self.note(
                f"{unused[0]}{others} gets no gradient in some steps; {self.name} then "
                "updates it with a gradient of 0, so weight decay and momentum change "
                "it, where one process leaves it unchanged"
            )
        self._ever_used |= self._used
        self._used.clear()

    _has_noted_unused = False

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
        with self._gradients.ours():
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

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        if self.options.precision == "fp16":
            found["scaler"] = {"scale": float(self._zero.loss_scale)}
        return found

    def restore_scaler(self, values: Mapping[str, Any]) -> None:
        if self.options.precision == "fp16" and values.get("scaler"):
            self._zero.loss_scale = values["scaler"]["scale"]

    def _states(self) -> ZeROStates:
        with self._gradients.ours():
            self._take_weights()
        land_parameters(self.engine)
        return ZeROStates(self.module, self._zero, self.partitions())

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
        self._gradients.close()
        for handle in self._casts:
            handle.remove()
        self._is_broken = (
            "DeepSpeed has released this model, because a later run prepared one; "
            "prepare model and optimizer again"
        )
        _former[:] = [each for each in _former if each is not self.engine]
        destroy(self.engine)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(Exception):  # of a run that failed half-way
            self._take_weights()
        vars(self.module).pop("__deepcopy__", None)
        _former.append(self.engine)
        _preparers[id(self.engine)] = self
        masters = [master for master, _ in self.partitions()]
        free = weakref.finalize(self, free_training_states, self.engine, masters)
        free.atexit = False
        restore_linear()

    def replicas(self) -> dict[str, torch.Tensor]:
        whole = {} if self.is_sharded else dict(self.module.named_parameters())
        return self.counted() | whole


class ZeRO1(ZeRO):
    stage = 1
    keeps_gradients = True  # until the backward pass ends, in which they are reduced

    def _lay_out(self) -> None:
        self._views = [
            (parameter, parameter.data)
            for group in self._zero.bit16_groups
            for parameter in group
        ]
        self._zero.process_gradients = partial(
            process_filled, self._zero.process_gradients
        )
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(self._zero.bit16_groups)
            for parameter in group
        }
        self._carried: dict[int, list[torch.Tensor]] = {}
        """Gradients that were reduced before another backward pass, by group."""

    def _reduce_gradients(self) -> None:
        zero = self._zero
        zero.set_gradient_accumulation_boundary(True)
        zero.setup_buckets()
        if self.stage == 1:
            zero.reduce_gradients()
        else:
            if any(zero.all_grad_tensors.get(i) is None for i in self._groups()):
                zero.set_gradient_accumulation_boundary(False)
                zero.independent_gradient_partition_epilogue()  # there were none: zeros
            zero.finalize_gradient_accumulation_boundary()
        zero.set_gradient_accumulation_boundary(False)
        for number, carried in self._carried.items():
            for tensor, more in zip(
                zero.averaged_gradients[number], carried, strict=True
            ):
                tensor.add_(more)
        self._carried.clear()

    def _process_gradient(self, parameter: nn.Parameter) -> None:
        self._zero.process_gradients(parameter, self._group_of[id(parameter)])

    def _groups(self) -> range:
        return range(len(self._zero.bit16_groups))

    def _carry(self) -> None:
        super()._carry()
        for number in self._groups():
            self._carried[number] = self._zero.averaged_gradients[number]
            self._zero.averaged_gradients[number] = None

    def _discard(self) -> None:
        self._carried.clear()
        for number in self._groups():
            self._zero.averaged_gradients[number] = None
            self._zero.all_grad_tensors[number] = None

    def _gather_gradient(self, parameter: Any) -> torch.Tensor:
        whole: torch.Tensor = parameter.get_full_hp_grad()
        return whole.to(parameter.dtype) if self.dtype == torch.float32 else whole

    def _partition_gradient(self, parameter: Any, value: torch.Tensor) -> None:
        parameter.set_full_hp_grad(value)

    @torch.no_grad()
    def _take_weights(self) -> None:
        for parameter, view in self._views:
            if parameter.data_ptr() != view.data_ptr():  # it was given another tensor
                view.copy_(parameter.data)
                parameter.data = view
        rank = torch.distributed.get_rank()
        for parts, master in zip(
            self._zero.parallel_partitioned_bit16_groups,
            self._zero.single_partition_of_fp32_groups,
            strict=True,
        ):
            take(parts[rank], master.data)

    def tensors(self) -> dict[str, Tensors]:
        zero = self._zero
        masters = zero.single_partition_of_fp32_groups
        whole = [p.grad for p in self.module.parameters() if has_own_storage(p.grad)]
        partition = [
            *flat(zero.averaged_gradients.values()),
            *flat(zero.all_grad_tensors.values()),
            *flat(master.grad for master in masters),
        ]
        is_whole = self.keeps_gradients and whole
        return {
            # First, for a gradient may be a view of a bucket.
            "communication_buffers": buckets(zero),
            "parameters": [*self.module.parameters(), *self.module.buffers()],
            "gradients": whole if is_whole else [*partition, *whole],
            "optimizer_state": optimizer_tensors(self.optimizer),
            "master_parameters": masters,
        }


class ZeRO2(ZeRO1):
    stage = 2
    keeps_gradients = False


class ZeRO3(ZeRO):
    stage = 3
    is_sharded = True

    def _lay_out(self) -> None:
        zero, numbers = self._zero, {}
        for number, module in enumerate(self.module.modules()):
            numbers[id(module)] = number
        offload = zero.parameter_offload
        offload.pre_sub_module_forward_function = partial(
            run_on_route, self.route, numbers, offload.pre_sub_module_forward_function
        )
        zero.reduce_ready_partitions_and_remove_grads = partial(
            process_filled, zero.reduce_ready_partitions_and_remove_grads
        )

    def _reduce_gradients(self) -> None:
        self._zero.finalize_gradient_accumulation_boundary()

    def _process_gradient(self, parameter: nn.Parameter) -> None:
        self._zero.reduce_ready_partitions_and_remove_grads(parameter)

    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have these whole on every rank, and keep them so. Collective."""
        # DeepSpeed gathers these again after every step, and frees none in between.
        kept = self._zero.persistent_parameters
        known = {id(parameter) for parameter in kept}
        touched: list[Any] = list(parameters)
        kept += [parameter for parameter in touched if id(parameter) not in known]
        for parameter in kept:
            parameter.ds_persist = parameter.is_external_param = True
        if any(parameter.ds_status.name == "INFLIGHT" for parameter in touched):
            self._take_weights()
            land_parameters(self.engine)
        absent = [parameter for parameter in kept if is_absent(parameter)]
        if absent:
            absent[0].all_gather(absent)
        if not self._has_said_so and torch.distributed.get_rank() == 0:
            self._has_said_so = True
            print(
                "labkit: the loop uses parameters outside the model's forward pass. "
                "zero3 shards them, so those are gathered now and stay whole on every "
                "rank, which takes memory",
                file=sys.stderr,
            )

    _has_said_so = False

    @torch.no_grad()
    def _take_weights(self) -> None:
        from deepspeed.utils import safe_get_local_fp32_param

        for parameter in self._zero.persistent_parameters:
            if is_absent(parameter):
                continue
            ours = own_part(parameter, parameter.data)
            parameter.ds_tensor.data.copy_(ours.view_as(parameter.ds_tensor))
            if id(parameter) in self._trained_ids:
                master = safe_get_local_fp32_param(parameter)
                take(ours[: master.numel()].view_as(master), master)

    def _find_accumulators(self) -> list[tuple[nn.Parameter, Any]]:
        # A node of autograd remembers the shape that its parameter has.
        empty: list[Any] = [p for p in self.given_parameters if is_empty(p)]
        with self._gradients.ours():
            for parameter in empty:
                blank = torch.empty((), dtype=parameter.dtype, device=parameter.device)
                parameter.data = blank.expand(plain_shape(parameter))
            try:
                return super()._find_accumulators()
            finally:
                for parameter in empty:
                    parameter.data = parameter.data.new_empty(0)

    @contextlib.contextmanager
    def stepping_groups(self) -> Iterator[None]:
        # Where DeepSpeed puts them in a step, a sub-group after the other.
        groups = self.optimizer.param_groups
        before = [group["params"] for group in groups]
        for number, group in enumerate(groups):
            group["params"] = [
                partition
                for sub, partition in enumerate(self._zero.fp32_partitioned_groups_flat)
                if self._zero.sub_group_to_group_id[sub] == number
            ]
        try:
            yield
        finally:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters

    def _discard(self) -> None:
        # Or a parameter that the next step does not use would have those of this one.
        if self._zero.grad_partitions_flat_buffer is not None:
            self._zero.grad_partitions_flat_buffer.zero_()

    def _gather_gradient(self, parameter: Any) -> torch.Tensor:
        whole: torch.Tensor = self._zero.get_fp32_grad_for_param(parameter)
        return whole.clone()  # for it may be a view of what it was gathered in

    def _partition_gradient(self, parameter: Any, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_local_grad

        safe_set_local_grad(parameter, own_part(parameter, value))

    def updated(self) -> Iterable[torch.Tensor]:
        partitions: list[torch.Tensor] = self._zero.fp32_partitioned_groups_flat
        return partitions

    def partitions(self) -> Partitions:
        zero = self._zero
        return list(
            zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        )

    def tensors(self) -> dict[str, Tensors]:
        zero = self._zero
        parameters: list[Any] = list(self.module.parameters())
        return {
            "communication_buffers": [
                *(p.data for p in parameters if p.numel()),  # gathered at the moment
                *buckets(zero),
            ],
            "parameters": [*(p.ds_tensor for p in parameters), *self.module.buffers()],
            "gradients": [
                zero.grad_partitions_flat_buffer,
                *(parameter.grad for parameter in parameters),
            ],
            "optimizer_state": optimizer_tensors(self.optimizer),
            "master_parameters": zero.fp32_partitioned_groups_flat,
        }


def run_on_route(
    route: Route, numbers: Mapping[int, int], run: Callable[..., None], module: Any
) -> None:
    """What stage 3 does before a layer runs, which is noted."""
    route.add(numbers.get(id(module), -1))
    run(module)


def process_filled(process: Callable[..., None], parameter: Any, *rest: Any) -> None:
    """What DeepSpeed does with a gradient that has come. Where autograd gives none, it
    is 0: as many have to be reduced on every rank."""
    if parameter.grad is None:
        parameter.grad = torch.zeros(
            plain_shape(parameter), dtype=parameter.dtype, device=parameter.device
        )
    process(parameter, *rest)


def call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call the method of what DeepSpeed is not to keep alive."""
    if (living := method()) is not None:
        living()


def plain_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` of a model, as for an average of weights: without what DeepSpeed
    has hooked to it."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for each in module.modules():
        own = vars(each)
        kept.append((own, dict(own)))
        own.pop("__deepcopy__", None)
        own["_parameters"] = dict(own["_parameters"])
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            own[name] = OrderedDict(
                (key, hook)
                for key, hook in own[name].items()
                if not str(getattr(hook, "__module__", "")).startswith("deepspeed")
            )
    try:
        return copy.deepcopy(module, memo)
    finally:
        for own, before in kept:
            own.update(before)


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


def bucket_elements(num_parameters: int) -> int:
    """Elements of the buckets that gradients are reduced and parameters gathered in.

    Of a small model an eighth, or its buckets would hold more than all the rest.
    """
    return min(BUCKET_ELEMENTS, num_parameters // 8 + 1)


def has_own_storage(gradient: torch.Tensor | None) -> bool:
    """Whether this is a gradient that is no view of a bucket or a partition."""
    return (
        gradient is not None and gradient.untyped_storage().nbytes() == gradient.nbytes
    )


def buckets(zero: Any) -> Iterator[torch.Tensor]:
    """What DeepSpeed collects gradients in, to reduce many of them at once."""
    return flat(bucket.buffer for bucket in zero.ipg_buckets.values())


def flat(tensors: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, which may hold None."""
    for value in tensors:
        if isinstance(value, torch.Tensor):
            yield value
        elif value is not None:
            yield from flat(value)


def merge(ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `ours`, section by section."""
    merged = dict(ours)
    for key, value in given.items():
        inner = merged.get(key)
        merged[key] = (
            merge(inner, value)
            if isinstance(inner, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, on the process group of today."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    if device.type == "cpu":
        # It would compile an op for 36 s, which is for inference.
        deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
    # It keeps groups from one initialize to the next, and ours may have been
    # re-created in between. A clone for every run would leave threads and files.
    world = torch.distributed.group.WORLD
    if _known_world != [world]:
        _known_world[:] = [world]
        deepspeed.comm.comm.cdb = None
        deepspeed.utils.groups._WORLD_GROUP = None
    return deepspeed


def destroy(engine: Any) -> None:
    with contextlib.suppress(Exception):  # its process group may be gone
        land_parameters(engine)
        engine.destroy()


def destroy_former_engines() -> None:
    """Let go of what earlier runs left in DeepSpeed; does nothing the first time."""
    for engine in list(_former):
        if (prepared := _preparers.get(id(engine))) is not None:
            prepared.release()
        else:
            destroy(engine)
    _former.clear()
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload is not None:
        offload.FWD_MODULE_STACK.clear()  # every model of stage 3 stays in it


def free_training_states(engine: Any, masters: Sequence[torch.Tensor]) -> None:
    """Free what only training needs, once the cell has let go of its optimizer, which
    DeepSpeed has not. The model goes on as it is."""
    if not any(engine is each for each in _former):
        return
    zero = engine.optimizer
    zero.optimizer.state.clear()
    if engine.zero_optimization_stage() < 3:  # of which the model needs nothing more
        with contextlib.suppress(Exception):  # its process group may be gone
            engine.destroy()
        zero.averaged_gradients.clear()
        zero.all_grad_tensors.clear()
    gradients = [getattr(zero, "grad_partitions_flat_buffer", None)]
    gradients += [master.grad for master in masters]
    for tensor in flat([masters, gradients, buckets(zero)]):
        tensor.untyped_storage().resize_(0)


def restore_linear() -> None:
    """Take back the function that stage 3 puts in place of torch's for good.

    It makes a layer's gradients in another order, which a rank that was restarted
    since would not share, and stage 2 reduces them in that order.
    """
    nn.functional.linear = _linear


def land_parameters(engine: Any) -> None:
    """Let go of what stage 3 fetched ahead in a forward pass that no backward pass
    followed: DeepSpeed refuses to gather what is in flight."""
    if engine.zero_optimization_stage() == 3:
        # Not the engine's own, which collects garbage for half a second, too.
        engine.optimizer.empty_partition_cache()


def agree_on_ids(device: torch.device) -> None:
    """Number the next parameters and modules alike on all ranks, as stage 3 checks.
    Collective.

    DeepSpeed counts them as long as a process lives, and one may have begun later.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    [module_count] = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    counts = torch.tensor([Init.param_id, *module_count], device=device)
    torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)
    Init.param_id, module_count[0] = counts.tolist()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without DeepSpeed's many lines about itself."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_zero(model: nn.Module) -> bool:
    """Whether this is a DeepSpeed engine, or a module that ZeRO-3 has partitioned."""
    return hasattr(model, "zero_optimization") or any(
        hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole weights of a model under ZeRO, on every rank. Collective."""
    import deepspeed

    if isinstance(model, deepspeed.DeepSpeedEngine):
        model = model.module
    for engine in _former:
        if engine.module is model:
            land_parameters(engine)
    partitioned = [p for p in model.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned):
        return {key: value.clone() for key, value in model.state_dict().items()}
