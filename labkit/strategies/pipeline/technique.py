"""The strategy `pipeline`: consecutive layers on consecutive ranks."""

import zlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import Overflows
from labkit.compat.torch import Unscale
from labkit.compat.torch import buffers_of
from labkit.compat.torch import no_dispatch
from labkit.compat.torch import tree_flatten
from labkit.compat.torch import tree_unflatten
from labkit.compat.torch import without_modes
from labkit.records import ModelFacts
from labkit.records import Pass
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.backward import follow
from labkit.strategies.autograd.backward import keeping_seeds
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.structures import flatten
from labkit.strategies.autograd.structures import unflatten
from labkit.strategies.autograd.trial import WithoutGradients
from labkit.strategies.mesh.device_mesh import broadcast
from labkit.strategies.mesh.device_mesh import data_parallel_axes
from labkit.strategies.mesh.peers import team_on
from labkit.strategies.model import states
from labkit.strategies.model.alike import check_inputs
from labkit.strategies.model.alike import check_roots
from labkit.strategies.model.alike import take_values
from labkit.strategies.model.gradients import CellGradients
from labkit.strategies.model.materialize import move
from labkit.strategies.model.materialize import parts
from labkit.strategies.model.states import Named
from labkit.strategies.model.states import Restore
from labkit.strategies.model.states import Source
from labkit.strategies.own_state import is_other
from labkit.strategies.own_state import unchanged
from labkit.strategies.pipeline.late_changes import LateChanges
from labkit.strategies.pipeline.losses import Means
from labkit.strategies.pipeline.microbatches import MICROBATCHES_A_STAGE
from labkit.strategies.pipeline.microbatches import are_other
from labkit.strategies.pipeline.microbatches import are_packed
from labkit.strategies.pipeline.microbatches import copied
from labkit.strategies.pipeline.microbatches import is_batch
from labkit.strategies.pipeline.microbatches import joined
from labkit.strategies.pipeline.microbatches import kind_of
from labkit.strategies.pipeline.microbatches import split
from labkit.strategies.pipeline.microbatches import without_dropout
from labkit.strategies.pipeline.placement import Placement
from labkit.strategies.pipeline.placement import add_up
from labkit.strategies.pipeline.placement import leave
from labkit.strategies.pipeline.schedules import STAGES_A_RANK
from labkit.strategies.pipeline.schedules import Compute
from labkit.strategies.pipeline.schedules import Schedule
from labkit.strategies.pipeline.shared_state import SHARED_GENERATOR
from labkit.strategies.pipeline.shared_state import SharedState
from labkit.strategies.prepared import Closure
from labkit.strategies.prepared import Norm
from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import Score
from labkit.strategies.prepared import check_keys
from labkit.strategies.relay.elsewhere import Elsewhere
from labkit.strategies.relay.elsewhere import Here
from labkit.strategies.relay.elsewhere import current
from labkit.strategies.relay.elsewhere import plain
from labkit.strategies.relay.flags import flags_of
from labkit.strategies.relay.parameters import StagedParameter
from labkit.strategies.relay.parameters import is_absent
from labkit.strategies.relay.relay import FAILURES
from labkit.strategies.relay.relay import Relay
from labkit.strategies.relay.stages import CUTS
from labkit.strategies.relay.stages import Stages
from labkit.strategies.relay.stages import cut
from labkit.theory import ring

NUM_CHECKED = 3
"""Forward passes of which ranks compare what they give the model: to compare is to
wait for a GPU."""
MAX_DIMENSIONS = 16
"""Of a buffer."""
NUM_KINDS = 16
"""Of calls of the model that are compared; others pass as a whole."""
NUM_SCHEDULES = 4
"""Shapes of batches for which there are buffers at a time: each has a batch's."""
WHOLE_BATCHES = (
    "{why}, so every batch passes through the stages as one microbatch, and only one "
    "stage computes at a time (naive model parallelism)"
)
ONLY_GPIPE = (
    "{why}, so all forward passes of a batch come before its backward passes, as in a "
    "loop of your own (gpipe)"
)
NO_CHAIN = (
    "a stage needs inputs other than the previous stage's output, or the loss needs "
    "more than the model's output"
)
PACKED = (
    "one input tells where the samples of another begin, like the offsets of an "
    "EmbeddingBag"
)
KEEPS_STATE = (
    "a forward pass changes the model's state, such as BatchNorm's statistics, a count "
    "of passes, or its parameters"
)
ITERATES = (
    "the model, or a function that it calls, has an iterator, of which a trial of "
    "forward would use up values"
)
OTHER_OUTPUT = (
    "the model's output for a sample depends on the other samples of its batch, or is "
    "no output per sample, like a loss"
)
ANOMALIES = (
    "torch.autograd.set_detect_anomaly(True) looks at the values of each gradient, and "
    "under pipeline a rank has those of its own stage alone. It stays on in later "
    "cells until it is set to False; to look for NaN, use ddp or single"
)
NO_MEAN = "the loss of a batch is not the mean of those of its microbatches"
NUM_PASSES = "num_passes"
"""The name by which a checkpoint has that of the relay."""
FRESH_STATE = (
    "the model was in stages, and so was its optimizer's state; now that they are "
    "prepared again, that state is empty. To keep it, save_checkpoint(folder) "
    "before and load_checkpoint(folder) after"
)


@dataclass(frozen=True)
class Traffic:
    """What the passes of a batch send: bytes."""

    sent: list[int]
    """Of activations and their gradients, by rank along `pp`."""
    returned: int
    """Of the model's outputs, which are broadcast."""


class Pipeline(Prepared):
    """Put consecutive layers on consecutive ranks, and pass a batch on in microbatches.

    Forward: a stage receives the activations of the one before it, and sends its own
    on. Backward: gradients go the other way. What a parameter outside of the layers, or
    one that layers of several stages share, gets on each rank is summed. With replicas
    (`--mesh dp=2,pp=2`) gradients are averaged over them with an all-reduce.

    In a loop of one's own all forward passes come before the first backward pass
    (GPipe), for the loss is computed of the whole batch; `fit` has other schedules.

    `--config` takes `cuts`, the names of the modules with which stages begin.

    Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters", SC 2021;
    `torch.distributed.pipelining`.
    """

    hides_gradients = False
    in_one_thread = True  # ranks send each other gradients in that order
    _num_checked = 0
    _num_shaped = 0
    """Steps after which the shapes of buffers were compared."""
    _num_compared = 0
    """Batches of which the loss's gradient has been compared with its parts'."""
    _is_trying = False
    _is_chain: bool | None = None
    """Whether each stage takes what the one before it gives, and no more, and a
    backward pass may begin with the loss of a microbatch; None until tried."""
    _is_scheduled = False
    """Whether a schedule runs backward passes, of microbatches."""
    _compute: Compute
    _are_summed = False
    """Whether gradients of shared parameters are those of all stages."""

    def place(self) -> None:
        """A layer at a time, in `wrap`."""

    def wrap(self) -> None:
        check_keys(self.options.config, [CUTS], self.strategy.name)
        if self.options.precision == "fp16":
            raise UnsupportedLoopError(
                "--precision fp16 skips the steps in which any gradient overflows, and "
                "a rank knows those of its own stage alone; use --precision bf16"
            )
        if self.options.compile:
            raise UnsupportedLoopError(
                "--compile compiles a layer as one rank runs it, and under pipeline "
                "ranks run each other's layers for the shapes of their outputs; leave "
                "it out, or use ddp or fsdp"
            )
        assert self.mesh is not None
        mesh = self._pp = self.mesh["pp"]
        num_stages = mesh.size() * STAGES_A_RANK[self.options.schedule]
        self._stages = cut(self.module, num_stages, self.options.config)
        self._dp = data_parallel_axes(self.mesh)
        self.replica_group = mesh.get_local_rank()
        self._placement = Placement(
            self.given_parameters, self._stages.owners(), mesh, self.device
        )
        take_values(self.module, team_on(self.mesh, self.device))
        self._place_stages()
        if type(self.optimizer).__module__.startswith("torch.optim"):
            # A step of any other class reads, and updates, all parameters on each rank.
            for parameter in self.given_parameters:
                if id(parameter) not in self._placement.own_ids:
                    self.optimizer.state.pop(parameter, None)  # its owner has it
        self._num_parameters = sum(p.numel() for p in self._placement.own)
        self._gradients = CellGradients(self, self.given_parameters, StagedParameter)
        self.autocast()  # within what follows: outputs are broadcast as fp32
        self.relay = Relay(self.module, self._stages, self.mesh, self.device)
        self.relay.run_whole = self._run_in_microbatches
        self.relay.watch_layer = SharedState(self.module, self._stages).watching
        _ = self.relay.channel  # all ranks make its groups, and here all come along
        self._num_microbatches = (
            self.options.microbatches or MICROBATCHES_A_STAGE * mesh.size()
        )
        self._flags = flags_of(self.module, apart=self._stages.modules)
        self._late_changes = LateChanges(self.module)
        self._is_whole: dict[Any, bool] = {}
        """By kind of call of the model, whether its batches pass as a whole: each has
        been compared with its microbatches."""
        self._schedules: dict[str, Schedule] = {}
        self._passes: list[Pass] = []
        """Of the last batch, if it was in a schedule."""
        self._former_passes: list[Pass] = []
        """Of the one before it: a step that is measured takes much longer."""
        self._traffic = Traffic([0] * mesh.size(), 0)
        self._summed: list[torch.Tensor | None] = []
        """Those of earlier backward passes, while one is under way: what it adds is
        this stage's alone."""
        follow(self)

    def _place_stages(self) -> None:
        """Bring this rank's layers to the device; of the others, shapes alone."""
        placement = self._placement
        own = placement.own_ids
        assert self.mesh is not None
        for _, tensors in parts(self.module, self._stages.modules):
            for tensor in tensors:
                if isinstance(tensor, nn.Parameter) and id(tensor) not in own:
                    leave(tensor, self.device)
                    continue
                move(tensor, self.device)
                # Those of one stage along dp; others, and buffers, from rank 0.
                mesh = self.mesh if placement.rank_of(tensor) is None else self._dp
                if mesh is not None:
                    broadcast(tensor.detach(), mesh)

    # ---- forward passes ----

    def _run_in_microbatches(
        self, model: nn.Module, function: Forward, args: Any, kwargs: Any
    ) -> Any:
        """What `function`, of the model or a copy of it, returns for a batch, in
        microbatches where its samples are independent of each other. Collective."""
        looks_for_nan = torch.is_anomaly_check_nan_enabled()
        if torch.is_anomaly_enabled() and looks_for_nan and torch.is_grad_enabled():
            raise UnsupportedLoopError(ANOMALIES)
        relay = self.relay
        leaves, spec = tree_flatten((args, kwargs))
        if self._num_checked < NUM_CHECKED:
            self._num_checked += 1
            check_inputs(leaves, self._pp)
        is_whole = len(split(leaves, self._num_microbatches)) < 2
        if not is_whole:
            is_whole = self._compare_once(model, function, leaves, spec)
            if self._is_trying:
                raise _Compared
        relay.sent, relay.returned = [0] * relay.size, 0
        if is_whole:
            found = relay.run(function, args, kwargs)
        else:
            entered = [relay.enter(leaf) for leaf in leaves]
            is_own = model is self.module
            changes = self._late_changes if is_own else LateChanges(model)
            with changes.refused(self._num_microbatches) as first_is_done:
                outputs, out_spec = self._run_chunks(
                    function, entered, spec, first_is_done
                )
            found = unflatten(relay.leave(outputs), out_spec)
        if torch.is_grad_enabled():
            self._traffic = Traffic(relay.sent, relay.returned)
        return found

    def _run_chunks(
        self,
        function: Forward,
        leaves: Sequence[Any],
        spec: Any,
        first_is_done: Callable[[], None] | None = None,
    ) -> tuple[list[Any], Any]:
        """The outputs of all microbatches, put together, as this rank has them."""
        found: list[list[Any]] = []
        out_spec = None
        for chunk in split(leaves, self._num_microbatches):
            args, kwargs = tree_unflatten(chunk, spec)
            with self.relay.passing():
                output, out_spec = flatten(function(*args, **kwargs))
                found.append([*map(self.relay.memory.current, output)])
            if len(found) == 1 and first_is_done is not None:
                first_is_done()
        return [joined(each) for each in zip(*found, strict=True)], out_spec

    def _compare_once(
        self, model: nn.Module, function: Forward, leaves: list[Any], spec: Any
    ) -> bool:
        """Run the first batch of a kind in microbatches and as a whole: where the
        outputs differ its samples are not independent, and such batches pass as a
        whole. Whether they do. Collective."""
        is_own = model is self.module
        stages = self._stages if is_own else self._stages.of_copy(model)
        flags = self._flags if is_own else flags_of(model, apart=stages.modules)
        is_training = is_own and model.training
        kind = flags(), str(spec), *map(kind_of, leaves)
        if kind in self._is_whole:
            return self._is_whole[kind]
        if len(self._is_whole) >= NUM_KINDS:
            return True
        watch = self.relay.watch_layer
        why = self._why_whole(model, stages, function, leaves, spec)
        if not is_own:
            self.relay.watch_layer = watch
        self._is_whole[kind] = bool(why)
        if why and is_training:  # what an evaluation returns is no matter of training
            self._num_microbatches = 1
            self.note(WHOLE_BATCHES.format(why=why))
        return bool(why)

    def _why_whole(
        self,
        model: nn.Module,
        stages: Stages,
        function: Forward,
        leaves: list[Any],
        spec: Any,
    ) -> str:
        """Why a batch is to pass as a whole, in words; "" where it need not.
        Collective."""
        if are_packed(leaves):  # a layer may fail of a part, on the rank that has it
            return PACKED
        with (
            without_modes(),
            WithoutGradients(),
            self.relay.uncounted(),
            without_dropout(model),
        ):
            args, kwargs = tree_unflatten(copied(leaves), spec)
            shared = SharedState(model, stages)
            self.relay.watch_layer = shared.watching  # also what is new since prepare
            drawn = shared.contents_of_generators()
            with unchanged(model) as state:
                if state.has_iterators:
                    return ITERATES
                with self.relay.passing():
                    whole, whole_spec = flatten(function(*args, **kwargs))
                    whole = [*map(current, whole)]
                keeps_state = state.has_changed()
                draws = is_other(drawn, shared.contents_of_generators())
            try:
                with unchanged(model), self.relay.surviving():
                    given = copied(leaves)
                    outputs, out_spec = self._run_chunks(function, given, spec)
            except UnsupportedLoopError:
                raise
            except FAILURES:  # they are no batch's parts
                differs = True
            else:
                differs = (
                    self.relay.has_failed
                    or out_spec[0] != whole_spec[0]
                    or any(map(are_other, whole, outputs))
                )
            flags = torch.tensor([keeps_state, differs, draws], dtype=torch.int64)
            flags = flags.to(self.device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.relay.group)
            self.relay.flush()
        keeps_state, differs, draws = flags.tolist()
        if draws:
            raise UnsupportedLoopError(SHARED_GENERATOR)
        if keeps_state:
            return KEEPS_STATE
        return OTHER_OUTPUT if differs else ""

    # ---- `fit`, in an order of torch's ----

    def train_batch(self, score: Score, batch: Any) -> torch.Tensor | None:
        leaves, spec = tree_flatten(batch)
        chunks = split(leaves, self._num_microbatches)
        if self._is_chain is None and len(chunks) > 1:
            self._try(score, batch)
            chunks = split(leaves, self._num_microbatches)
        # On all replicas or on none: they wait for each other at the same places.
        if self.peers.greatest([not self._can_schedule(chunks)]) != [0]:
            super().train_batch(score, batch)
            return None
        own = self._placement.own
        before = [None if p.grad is None else p.grad.clone() for p in own]
        num_passes = self.relay.num_passes
        loss = self._run_schedule(score, chunks, spec)
        if loss is None:
            self.relay.num_passes = num_passes
            # Backward passes have begun with other losses than the batch's.
            for parameter, gradient in zip(own, before, strict=True):
                parameter.grad = gradient
            self._is_chain = False
            self.note(ONLY_GPIPE.format(why=NO_MEAN))
            again = score(self.module, batch)["loss"]
            again.backward()
            return again.detach()
        return loss

    def _try(self, score: Score, batch: Any) -> None:
        """Find whether batches can be in a schedule, on the first one and before it is
        trained with: all its microbatches together may need more memory than there is.
        Collective."""
        is_compared, self._is_trying = False, True
        try:
            score(self.module, batch)
        except _Compared:
            is_compared = True
        finally:
            self._is_trying = False
        if is_compared and self._num_microbatches > 1:
            leaves, spec = tree_flatten(batch)
            chunk = split(leaves, self._num_microbatches)[0]
            first = tree_unflatten(chunk, spec)
            self._is_chain = self.relay.find_crossings(
                lambda: score(self.module, first)["loss"]
            )
            if not self._is_chain:
                self.note(ONLY_GPIPE.format(why=NO_CHAIN))

    def _can_schedule(self, chunks: Sequence[Sequence[Any]]) -> bool:
        """Whether torch has an order for these microbatches: of equal size, and not
        fewer than there are stages."""
        sizes = {len(each) for chunk in chunks for each in chunk if is_batch(each)}
        number = len(chunks)
        rounds = max(1, number // self.relay.size)
        return (
            bool(self._is_chain)
            and len(sizes) == 1
            and number >= self._stages.num_stages
            and (self.options.schedule != "interleaved" or number % rounds == 0)
        )

    def _run_schedule(
        self, score: Score, chunks: list[list[Any]], spec: Any
    ) -> torch.Tensor | None:
        """All passes of a batch in the order asked for. Its loss; None where that is
        not the mean of those of its microbatches. Collective."""
        relay, count = self.relay, len(chunks)
        shapes = [(tuple(t.shape), t.dtype) for t in chunks[0] if is_batch(t)]
        key = f"{count} {shapes}"
        schedule = self._schedules.pop(key, None)
        if schedule is None:
            schedule = Schedule(
                self.options.schedule, relay, lambda n: self._compute(n), count
            )
            while len(self._schedules) >= NUM_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
        self._schedules[key] = schedule  # the last one used is the last

        weight = self.loss_weight
        means = Means(score, spec, with_gradients=self._num_compared < NUM_CHECKED)
        self._num_compared += 1

        def compute(number: int) -> Any:
            part = tree_unflatten(chunks[number], spec)
            try:
                loss = score(self.module, part)["loss"]
            finally:  # a stage that is not the last leaves it half-way
                if not number:
                    first_is_done()
            outputs, value = relay.take_outputs(), plain(loss).detach()
            means.add(number, chunks[number], outputs, value)
            return loss * (weight / count)

        self._compute = compute
        self.begin_backward([], [])
        self._is_scheduled = True
        try:
            with keeping_seeds(), self._late_changes.refused(count) as first_is_done:
                loss = schedule.run()
        finally:
            self._is_scheduled = False
        if not schedule.sent:
            schedule.sent = self._sent_in_schedule(count)
        self._traffic = Traffic(schedule.sent, 0)
        found = torch.zeros(2, device=self.device)
        if loss is not None:
            found = torch.stack([loss.float(), means.are_right.to(loss.device).float()])
        last = (self._stages.num_stages - 1) % relay.size
        dist.broadcast(found, group=relay.group, group_src=last)
        # Replicas run a batch again together, as what follows is collective.
        if not self.peers.all_reduce(found[1].clone(), dist.ReduceOp.MIN):
            self.end_backward(has_failed=True)
            return None
        self.end_backward(has_failed=False)
        self.is_reached = True
        self._former_passes = self._passes
        self._passes = list(schedule.passes)
        return found[0] / weight if weight else found[0]

    def _sent_in_schedule(self, num_microbatches: int) -> list[int]:
        """Bytes of a batch by rank, all of which know their own. Collective."""
        own = torch.zeros(self.relay.size, dtype=torch.int64, device=self.device)
        own[self.relay.rank] = sum(self.relay.sent_by_stage.values()) * num_microbatches
        with no_dispatch():
            found: list[int] = self._placement.along_pp.all_reduce(own).tolist()
        return found

    # ---- backward passes and steps ----

    def gives_part_of_gradient(self, parameter: nn.Parameter) -> bool:
        is_shared = any(parameter is each for each in self._placement.shared)
        return is_shared or super().gives_part_of_gradient(parameter)

    def _find_accumulators(self) -> list[tuple[nn.Parameter, Any]]:
        trained = [
            p for p in (*self._placement.own, self.relay.anchor) if p.requires_grad
        ]
        return self._with_nodes(trained)

    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        if self._is_scheduled:
            return
        if self._num_checked < NUM_CHECKED and roots:
            check_roots(roots, self._pp)
        self._gradients.hand_back()
        if self._are_summed:
            self._are_summed = False
            self._summed = [p.grad for p in self._placement.shared]
            for parameter in self._placement.shared:
                parameter.grad = None
        self.agree()

    def end_backward(self, *, has_failed: bool) -> None:
        if self._is_scheduled:
            return
        self.relay.anchor.grad = None
        if has_failed:
            self._are_summed = bool(self._summed)
            self._put_back_summed()
            return
        self.relay.flush()
        for parameter in self._placement.gathered.values():
            if is_absent(parameter):
                parameter.grad = None
        if self.is_last:
            self._reduce_gradients()
            self._put_back_summed()
            self._are_summed = True

    def _put_back_summed(self) -> None:
        """Add the gradients of earlier backward passes to those of this one."""
        for parameter, before in zip(
            self._placement.shared, self._summed, strict=False
        ):
            if before is not None:
                added = parameter.grad
                parameter.grad = before if added is None else before + added
        self._summed = []

    def _reduce_gradients(self) -> None:
        """Sum what stages have of the parameters that they share, and average over the
        replicas. Collective."""
        add_up(self._placement.shared, self._placement.along_pp)
        if self.peers.size > 1:
            for parameter in add_up(self._placement.own, self.peers):
                assert parameter.grad is not None
                parameter.grad /= self.peers.size

    def unscale(self, take: Unscale) -> Overflows:
        self._gradients.hand_back()  # what the loop has made of them counts
        return super().unscale(take)

    def step(self, closure: Closure | None = None) -> Norm | None:
        self._gradients.hand_back()
        self.note_step()
        norm = super().step(closure)
        self._gradients.forget()
        self._share_buffers()
        self._placement.refresh()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._gradients.forget()
        self._summed = []
        super().zero_grad(set_to_none)

    def drop_gradients(self) -> None:
        self._gradients.forget()
        self._summed = []
        super().drop_gradients()

    def updated(self) -> Iterable[torch.Tensor]:
        own = self._placement.own_ids
        return [p for p in super().updated() if id(p) in own]

    def norm_of(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Those of parameters that several stages have count once."""
        shared = [p.grad for p in self._placement.shared if p.grad is not None]
        ids = set(map(id, shared))
        if self.relay.rank:
            gradients = [each for each in gradients if id(each) not in ids]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if gradients:
            norm = nn.utils.get_total_norm(gradients)
            square += norm.to(self.device).double().square()
        dist.all_reduce(square, group=self.relay.group)
        return square.sqrt().float()

    def _share_buffers(self) -> None:
        """Give every rank what a layer's stage has in its buffers, as BatchNorm's
        statistics, and what a stage has written to others. Collective."""
        seen: set[int] = set()
        for module in self.module.modules():
            for name, buffer in buffers_of(module).items():
                if not isinstance(buffer, Here | Elsewhere):
                    continue
                stage = buffer.stage  # None within a layer, whose buffers come below
                buffers_of(module)[name] = found = self._as_plain(buffer)
                if stage is not None:
                    source = stage % self.relay.size
                    dist.broadcast(found, group=self.relay.group, group_src=source)
        found_in: list[tuple[torch.Tensor, int]] = []
        for layer, stage_of_layer in zip(
            self._stages.modules, self._stages.stage_of, strict=True
        ):
            for buffer in layer.buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    found_in.append((buffer, stage_of_layer % self.relay.size))
        self._share_shapes(found_in)
        for buffer, source in found_in:
            if self._dp is not None:
                broadcast(buffer, self._dp)
            dist.broadcast(buffer, group=self.relay.group, group_src=source)

    def _share_shapes(self, found_in: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Give buffers the shapes that they have in their stage: an observer of ranges
        has none before its first batch. Collective, in the first steps."""
        if not found_in or self._num_shaped >= NUM_CHECKED:
            return
        self._num_shaped += 1
        shapes = [tuple(buffer.shape) for buffer, _ in found_in]
        if self.team.agree_on(zlib.crc32(repr(shapes).encode())):
            return
        for source in range(self.relay.size):
            given = shapes_as_numbers(shapes).to(self.device)
            dist.broadcast(given, group=self.relay.group, group_src=source)
            for (buffer, stage), (size, *shape) in zip(
                found_in, given.tolist(), strict=True
            ):
                if stage == source and [*buffer.shape] != shape[:size]:
                    buffer.resize_(shape[:size])

    def _as_plain(self, buffer: Any) -> torch.Tensor:
        """A tensor that is of no stage, with the values that this rank has."""
        is_new = buffer.is_meta
        buffer.__class__ = torch.Tensor
        vars(buffer).clear()
        found: torch.Tensor = buffer.detach()
        return torch.empty_like(found, device=self.device) if is_new else found

    # ---- what a cell sees of parameters and gradients: an `Owner` of them ----

    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        self._placement.gather(parameters)

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return self._placement.full_gradient(parameter)

    def set_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        if not is_absent(parameter):
            parameter.grad = value

    def drop_gradient(self, parameter: nn.Parameter) -> None:
        if not is_absent(parameter):
            parameter.grad = None

    def note_zeroed(self) -> None:
        """Nothing is kept beside the gradients."""

    # ---- states ----

    def whole_state(self) -> Named:
        """The model's state dict, whole on every rank. Collective."""
        found = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            found[name] = whole = value.detach().clone()
            source = self._placement.rank_of(value)
            if source is not None:
                self._placement.broadcast(whole, source)
        return found

    def facts(self) -> ModelFacts:
        """Of the rank with most parameters; every one knows their shapes."""
        size, placement = self.relay.size, self._placement
        shared = sum(p.numel() for p in placement.shared if p.requires_grad)
        sent = max(self._traffic.sent) + ring(self._traffic.returned, size, 1)
        return replace(
            super().facts(),
            num_parameters=max(placement.count(trained=False)),
            num_trainable=max(placement.count(trained=True)),
            num_parts=size,
            activation_bytes=sent + 2 * ring(shared, size, 4),
            passes=self._former_passes,
        )

    def replicas(self) -> dict[str, torch.Tensor]:
        if self.peers.size == 1:
            return self.counted()
        own = self._placement.own_ids
        named = self.module.named_parameters()
        return self.counted() | {
            name: parameter.detach()
            for name, parameter in named
            if id(parameter) in own
        }

    @property
    def _absent_names(self) -> set[str]:
        return {
            name
            for name, parameter in self.module.named_parameters()
            if is_absent(parameter)
        }

    def checkpoint(
        self, *, with_optimizer: bool = True
    ) -> tuple[Named, dict[str, Any]]:
        tensors, values = super().checkpoint(with_optimizer=with_optimizer)
        absent = {f"model.{name}" for name in self._absent_names}
        return {n: t for n, t in tensors.items() if n not in absent}, values

    def restoring(
        self,
        source: Source,
        values: Mapping[str, Any],
        *,
        with_optimizer: bool = True,
    ) -> Restore:
        restore = states.restoring(
            source,
            values,
            self.module,
            self.optimizer if with_optimizer else None,
            self._names,
            self._absent_names,
        )

        def restore_stage() -> None:
            restore()
            self._placement.refresh()

        return restore_stage

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), NUM_PASSES: self.relay.num_passes}

    def resume(self, values: Mapping[str, Any]) -> None:
        found = values.get(NUM_PASSES)
        if isinstance(found, int):  # of a run under pipeline
            self.relay.num_passes = found

    def close(self) -> None:
        super().close()
        self._schedules.clear()

    def release(self) -> None:
        """Have the whole model on every rank. Collective."""
        super().release()
        self.gather(self.given_parameters)
        self._gradients.close()
        self.relay.close()
        self._placement.forget()
        if self.optimizer.state:
            self.optimizer.state.clear()
            self.note(FRESH_STATE)


class _Compared(BaseException):
    """A batch has been compared with its microbatches, and need not pass now."""


def shapes_as_numbers(shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """A row for each shape, (num_shapes, 1 + MAX_DIMENSIONS): their number, and then
    the dimensions."""
    found = torch.zeros(len(shapes), 1 + MAX_DIMENSIONS, dtype=torch.int64)
    for row, shape in zip(found, shapes, strict=True):
        row[: 1 + len(shape)] = torch.tensor([len(shape), *shape])
    return found
