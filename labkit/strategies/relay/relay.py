"""Runs a model's own `forward` on ranks that have its layers in stages.

Every rank runs all of `forward`. A layer of its own stage computes; what others compute
is `Elsewhere`: it has a shape. Where a layer needs a tensor that another rank has, that
rank sends it. What the model returns is broadcast, so that every rank goes on with the
same values. Backward the same, the other way round.
"""

import contextlib
import gc
import operator
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import is_tensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import ranks_of
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import eagerly
from labkit.compat.torch import held_by
from labkit.compat.torch import is_checkpointed
from labkit.compat.torch import is_functorch_wrapped
from labkit.compat.torch import is_within_backward
from labkit.compat.torch import tree_flatten
from labkit.compat.torch import tree_map_only
from labkit.compat.torch import tree_unflatten
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward
from labkit.strategies.autograd.rewritten import Substitute
from labkit.strategies.autograd.structures import Given
from labkit.strategies.autograd.structures import Places
from labkit.strategies.autograd.structures import flatten
from labkit.strategies.autograd.structures import hand_back
from labkit.strategies.autograd.structures import holders_in
from labkit.strategies.autograd.structures import holders_of
from labkit.strategies.autograd.structures import may_hold
from labkit.strategies.autograd.structures import unflatten
from labkit.strategies.mesh.channel import Channel
from labkit.strategies.mesh.collectives import NoCollectives
from labkit.strategies.mesh.device_mesh import another_group
from labkit.strategies.model.writes import watch_unseen
from labkit.strategies.relay.agreements import Agreements
from labkit.strategies.relay.agreements import Known
from labkit.strategies.relay.agreements import stage_of
from labkit.strategies.relay.elsewhere import COLLECTIVE
from labkit.strategies.relay.elsewhere import Elsewhere
from labkit.strategies.relay.elsewhere import alias_of
from labkit.strategies.relay.elsewhere import as_elsewhere
from labkit.strategies.relay.elsewhere import as_meta
from labkit.strategies.relay.elsewhere import check_read
from labkit.strategies.relay.elsewhere import compute
from labkit.strategies.relay.elsewhere import current
from labkit.strategies.relay.elsewhere import elsewhere
from labkit.strategies.relay.elsewhere import is_elsewhere
from labkit.strategies.relay.elsewhere import is_view
from labkit.strategies.relay.elsewhere import leaves_of
from labkit.strategies.relay.elsewhere import of_all
from labkit.strategies.relay.elsewhere import of_stage
from labkit.strategies.relay.elsewhere import plain
from labkit.strategies.relay.elsewhere import written_in
from labkit.strategies.relay.flags import flags_of
from labkit.strategies.relay.functions import Enter
from labkit.strategies.relay.functions import Everywhere
from labkit.strategies.relay.functions import Leave
from labkit.strategies.relay.functions import Receive
from labkit.strategies.relay.functions import Received
from labkit.strategies.relay.functions import Send
from labkit.strategies.relay.functions import Shapes
from labkit.strategies.relay.functions import edge_of
from labkit.strategies.relay.functions import edges_used
from labkit.strategies.relay.memory import Common
from labkit.strategies.relay.memory import Memory
from labkit.strategies.relay.memory import are_in_common
from labkit.strategies.relay.memory import in_common
from labkit.strategies.relay.memory import memory_of
from labkit.strategies.relay.parameters import StagedParameter
from labkit.strategies.relay.stages import Stages

KEPT = (
    "loss_fn keeps a tensor that it has computed, such as a running mean or a list of "
    "losses, and under pipeline fit calls it for parts of a batch, on the rank of the "
    "last stage alone. Write the loop yourself, with prepare, or give --microbatches 1"
)
CHECKPOINTED = (
    "the model's forward wraps {name} in torch.utils.checkpoint, and under pipeline "
    "the ranks that have no part of it would not compute it again. Call it without "
    "checkpoint, and give --activation-checkpointing, which does the same"
)
IN_BACKWARD = (
    "a backward pass calls {name}, for example in your own torch.autograd.Function or "
    "in torch.utils.checkpoint. Under pipeline the ranks without this layer would not "
    "take part. Call the layer in forward, and let autograd do its backward pass; in "
    "place of checkpoint give --activation-checkpointing, which does the same. Or use "
    "ddp"
)
FAILURES = (IndexError, RuntimeError, ValueError)
"""What a part of a batch may raise that is none by itself."""
DRAW = {
    *("dropout", "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "rrelu"),
    *("dropout1d", "dropout2d", "dropout3d", "gumbel_softmax", "rrelu_"),
    *("scaled_dot_product_attention", "multi_head_attention_forward"),
    *("rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "poisson"),
    *("normal", "bernoulli_", "normal_", "uniform_", "exponential_", "random_"),
    *("cauchy_", "geometric_", "log_normal_"),
}
"""Functions of tensors that draw random numbers."""
DRY = -1
"""In the place of a stage: none is run, but for shapes."""
WRITES_BY_MASK = (
    "forward writes by a mask to what a stage has computed (x[mask] = value), and "
    "under pipeline other ranks do not have those values. Write torch.where(mask, "
    "value, x), or use ddp"
)
WRITES_PART = (
    "forward writes what a layer has computed through a view of another tensor "
    "({name}), and under pipeline ranks that do not have this layer would keep that "
    "tensor as it was. Write to the tensor itself, as in out[:, :4] = value, or make a "
    "new one, for example by torch.cat or a sum; or use ddp"
)
WRITES_TO_ONE = (
    "{name} is given one tensor twice, and writes to it, and under pipeline a layer "
    "may get a copy of each, also of x and x.detach(). Give it a copy in one place, "
    "x.clone(), or use ddp"
)
WRITES_UNSEEN = (
    "{name} writes to a tensor that it is given in a way that autograd does not count, "
    "like x.data.mul_(2), and under pipeline other ranks would keep it as it was. Have "
    "it write to a copy, x = x.clone(), or return what it computes; or use ddp"
)
CHANGES_INPUT = (
    "{name} changes a list, a dict or an object that it is given, and under pipeline "
    "a layer gets a copy: what forward does with its own would go on without the "
    "change. Have the layer return what it has computed, or use ddp"
)
OTHER_WAY = (
    "{name} gets what another stage computes, and did not in the first batch: in fit "
    "the stages agree once on what they hand on. Write the loop yourself, with prepare "
    "in place of fit: there forward may take another way in each batch"
)
Watch = Callable[[str], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Called:
    """What has come of a call of a layer."""

    output: Any
    places: Places
    """Where in that it hands back what it is given."""
    rewritten: dict[int, torch.Tensor]
    """By leaf, the tensors that it has written to."""
    shared: list[tuple[int, torch.Tensor]]
    """By leaf, what it returns that has its memory."""


class Relay:
    """A model whose layers are on several ranks, as one of them runs it."""

    is_inside = False
    """Whether this rank runs the model, or a layer of it."""
    returned = 0
    """Bytes of the model's outputs, which are broadcast."""
    has_failed = False
    """Whether something has that was to go on with zeros, and did."""
    num_passes = 0
    """Of the loop so far: its random numbers go on from here, also in a run that is
    resumed."""
    _channel: Channel | None = None
    _in_layer = False
    _stage: int | None = None
    """The only one that is run here, in a schedule."""
    _is_chain = True
    _is_loss = False
    """Whether the model has returned in a dry run: what follows is the loss."""
    _survives = False
    """Whether what fails here is to go on with zeros."""
    _num_mixed = _num_drawn = _seed = 0
    _entry = -1
    """The layer that a loop has called by itself; -1 for the model."""

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        """Along the axis `pp` of `mesh` ranks have stages."""
        self.stages = stages
        self._whole_mesh, self._mesh = mesh, mesh["pp"]
        self.rank, self.size = self._mesh.get_local_rank(), self._mesh.size()
        self.device = device
        self._model = model
        self._agreements = Agreements(self._mesh, device)
        self.anchor = nn.Parameter(torch.zeros((), device=device))
        """In every graph on every rank, also where a rank trains nothing of it."""
        self._called = model
        """It, or a copy of it, which is called."""
        self.run_whole: Callable[..., Any] = lambda model, *call: self.run(*call)
        """What a call of the model, or of a copy of it, does: see `Pipeline`."""
        self.watch_layer: Watch = lambda name: contextlib.nullcontext()
        """Entered where a layer of this name runs for the first time."""
        self.sent = [0] * self.size
        """Bytes of activations, and of their gradients, that each rank along `pp` sends
        for the passes since this was reset; all ranks know."""
        self.sent_by_stage: dict[int, int] = {}
        """Bytes of activations, and of gradients of those that it has received, that a
        stage of this rank sends for a microbatch in a schedule."""
        self._received: list[torch.Tensor] = []
        self._sent: list[torch.Tensor] = []
        self._outputs: list[Any] = []
        """Of the last stage."""
        self._crossings: dict[int, list[tuple[int, int, int]]] = {}
        """By stage, what it gets from the one before it: layer, the number of the call
        of that, and the place among its inputs."""
        self._kept: list[weakref.ref[torch.Tensor]] = []
        """What the loss has computed in a dry run."""
        self._calls: dict[int, int] = {}
        """By layer, how often the pass under way has called it."""
        self._watched: set[Any] = set()
        """The layers, by number and mode, that have run: none called a collective."""
        self._written: list[torch.Tensor] = []
        """Tensors of no stage that the pass under way has written to."""
        self.memory = Memory(self)
        """What the pass under way has written to, and has copies of."""
        self._in_flight: set[int] = set()
        """Storages of tensors that may not have arrived yet where they are sent."""
        self._flags = [flags_of(module) for module in stages.modules]
        """Attributes of layers that tell what these do."""
        self._shapes: dict[Any, Any] = {}
        """What layers of other ranks return, by what they get."""
        self._undo: list[Callable[[], None]] = []
        for number, layer in enumerate(stages.modules):
            if layer is not model:
                self._wrap(layer, number)
        self._undo.append(wrap_forward(model, self._outermost))

    def close(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    # ---- the model ----

    def _outermost(self, whole: Forward) -> Forward:
        def forward(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self.is_inside:
                output = whole(model, *args, **kwargs)
                self._is_loss = self._stage == DRY
                if self._stage == self.stages.num_stages - 1:
                    self._outputs.append(tree_map_only(torch.Tensor, current, output))
                return output
            self._called = model
            try:
                return self.run_whole(
                    model, lambda *a, **kw: whole(model, *a, **kw), args, kwargs
                )
            finally:
                self._called = self._model

        # What ranks send each other is not for a compiler of one of them.
        disabled: Forward = torch.compiler.disable(forward)
        return disabled

    def run(self, function: Forward, args: Any, kwargs: Any) -> Any:
        """What `function`, of the model, returns, on all ranks. Collective."""
        leaves, spec = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([self.enter(leaf) for leaf in leaves], spec)
        with self.passing():
            outputs, spec = flatten(function(*args, **kwargs))
            outputs = [self.memory.current(output) for output in outputs]
            self._share_written()
        return unflatten(self.leave(outputs), spec)

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A forward pass, or of a part of a batch. Random numbers between its layers
        are the same on all ranks along `pp`, which decide alike by them; after it they
        go on as if it had taken none."""
        self.num_passes += 1
        self._num_mixed = self._num_drawn = 0
        self._calls.clear()
        self._written.clear()
        is_first = not self.is_inside
        self.is_inside = True
        try:
            if is_first:
                # Of nothing that another pass or replica may add up to.
                self._seed = hash((torch.initial_seed(), self.num_passes))
                # Dynamo cannot trace what is on other ranks.
                with self._seeded(self._seed), eagerly():
                    yield
            else:
                yield
        finally:
            if is_first:
                self.is_inside = False
                self.memory.clear()

    @contextlib.contextmanager
    def _own_numbers(self, *key: int) -> Iterator[None]:
        """Random numbers within it are this stage's own, as of a layer's dropout: other
        ranks do not draw them. `key` tells what draws them in the pass."""
        place = self.rank if self._stage is None else self._stage
        with self._seeded(hash((self._seed, place, *key))):
            yield

    @contextlib.contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices):
            # `torch.manual_seed` would format its stack, for each kind of accelerator
            # that there may be: a quarter of a small model's step.
            torch.default_generator.manual_seed(seed % 2**63)
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed % 2**63)
            yield

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Passes within it are none of the loop's: the next one has the random numbers
        that it had without them."""
        before = self.num_passes
        try:
            yield
        finally:
            self.num_passes = before

    # ---- between its layers ----

    @property
    def is_between_layers(self) -> bool:
        return self.is_inside and not self._in_layer

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A function of what stages have computed: the last of them computes it, and
        gets what it lacks from the others."""
        given, spec = tree_flatten((args, kwargs))
        leaves = [self.memory.current(leaf) for leaf in given]
        if any(map(operator.is_not, leaves, given)):
            args, kwargs = tree_unflatten(leaves, spec)
        staged = [leaf for leaf in leaves if stage_of(leaf) is not None]
        if not staged:  # of what every rank has
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        check_read(func, name, staged)
        stages = {found for leaf in staged if (found := stage_of(leaf)) is not None}
        stage = max(stages)
        if name == "__setitem__" and any(is_mask(each) for each in leaves_of(args[1])):
            raise UnsupportedLoopError(WRITES_BY_MASK)
        written = written_in(name, args, kwargs)
        if is_tensor(written) and stage_of(written) is None:
            if is_view(written):
                raise UnsupportedLoopError(WRITES_PART.format(name=name.strip("_")))
            self._written.append(written)
        if is_tensor(written):
            self._let_arrive([written])
        own, own_written = [*leaves], written
        if len(stages) > 1 and self._stage is not None:
            self._is_chain = False  # that is for layers alone, in a schedule
        were_sent: list[int] = []
        if len({each % self.size for each in stages}) > 1 and self._stage is None:
            if stage_of(written) not in (None, stage) and is_view(written):
                raise UnsupportedLoopError(WRITES_PART.format(name=name.strip("_")))
            owner = stage % self.size
            self._num_mixed += 1
            key = ("op", self._num_mixed, name, *self._mode())
            known = self._agreements.find(key, leaves, owner=owner, name=f"{name}()")
            self._pass_on(known, leaves, owner)
            were_sent = [transfer.leaf for transfer in known.transfers]
            args, kwargs = tree_unflatten(leaves, spec)
            if is_tensor(written):
                now = written_in(name, args, kwargs)
                self.memory.replace(written, now, stage)
                written = now
        result = self._run_function(func, name, args, kwargs, leaves)
        of_all_ranks = [
            leaf
            for leaf in leaves
            if is_tensor(leaf) and leaf is not written and stage_of(leaf) is None
        ]

        def as_result(each: torch.Tensor) -> torch.Tensor:
            if any(each is leaf for leaf in of_all_ranks):  # mask.type_as(hidden)
                with DisableTorchFunctionSubclass():
                    each = each.view_as(each)
            return of_stage(each, stage, self)

        result = tree_map_only(torch.Tensor, as_result, result)
        results = leaves_of(result)
        for number, place in in_common(results, leaves) if were_sent else ():
            if place in were_sent and leaves[place] is not written:
                self.memory.pair(own[place], results[number])
        if is_tensor(written):  # also by `__setitem__`, which returns None
            self.memory.lose_twins(own_written)
            for each in (written, current(written)):
                of_stage(each, stage, self)
        if self._is_loss and isinstance(result, torch.Tensor):
            self._kept.append(weakref.ref(result))
        return result

    def _run_function(
        self, func: Any, name: str, args: Any, kwargs: Any, leaves: Sequence[Any]
    ) -> Any:
        """Run it with the values of `leaves`; for shapes where one is elsewhere."""
        draws: Any = contextlib.nullcontext()
        if name in DRAW:
            self._num_drawn += 1
            draws = self._own_numbers(self._num_drawn)
        with draws, DisableTorchFunctionSubclass():
            if any(is_elsewhere(leaf) for leaf in leaves):
                self._agreements.has_unreturned |= any(map(is_of_no_stage, leaves))
                return compute(func, args, kwargs)
            return self._surviving(
                lambda: func(*args, **kwargs),
                lambda: compute(
                    func, *tree_map_only(torch.Tensor, as_elsewhere, (args, kwargs))
                ),
            )

    def _share_written(self) -> None:
        """Have every rank have what this pass has written to tensors that the model
        keeps, as to a buffer. Collective where there are such."""
        written, self._written = self._written, []
        if not written:
            return
        kept = {id(t) for module in self._called.modules() for t in held_by(module)}
        for tensor in written:
            stage = stage_of(tensor)
            if id(tensor) not in kept or stage is None or plain(tensor).requires_grad:
                continue
            values, owner = of_all(tensor), stage % self.size
            dist.broadcast(values, group=self.group, group_src=owner)

    def _pass_on(self, known: Known, leaves: list[Any], owner: int) -> None:
        """Have rank `owner` get those of `leaves` that it lacks."""
        for transfer in known.transfers:
            leaf = plain(leaves[transfer.leaf])
            size = leaf.numel() * transfer.dtype.itemsize
            self.sent[transfer.source] += size
            self.sent[owner] += size * leaf.requires_grad
            if self.rank == transfer.source:
                sent = elsewhere(Send.apply(leaf, self, owner), self.device)
                leaves[transfer.leaf] = sent
            elif self.rank == owner:
                source, dtype = transfer.source, transfer.dtype
                leaves[transfer.leaf] = Receive.apply(leaf, self, source, dtype)

    # ---- one stage at a time, for a schedule ----

    def find_crossings(self, compute: Callable[[], Any]) -> bool:
        """What each stage has to hand to the next, found by running `compute` of the
        model for its shapes alone. False where stages need more than the stage before
        them has, or what is computed of the model's outputs is not the last one's, or
        needs values or more of the model.

        Raises UnsupportedLoopError where it keeps what it computes.
        """
        self._crossings = {}
        self._stage = DRY
        last = self.stages.num_stages - 1
        try:
            with self.uncounted(), self.passing(), torch.enable_grad():
                loss = current(compute())
            is_last = isinstance(loss, Elsewhere) and loss.stage == last
            del loss
        except Exception:  # whatever a loss may raise that gets shapes alone
            if not self._is_loss:
                raise
            is_last = False
        finally:
            self._stage = None
            self._is_loss = False
            kept, self._kept = self._kept, []
        if any(each() is not None for each in kept):
            gc.collect()  # of an error, the frames
            if any(each() is not None for each in kept):
                raise UnsupportedLoopError(KEPT)
        found, self._is_chain = self._is_chain, True
        return found and is_last and len(self._crossings) == last

    def take_outputs(self) -> list[Any]:
        """What the model has returned since this was asked, where the last stage is run
        alone; without its graph."""
        found, self._outputs = self._outputs, []
        return tree_map_only(torch.Tensor, lambda t: plain(t).detach(), found)

    def run_stage(
        self, stage: int, received: Sequence[torch.Tensor], compute: Callable[[], Any]
    ) -> Any:
        """Run `compute` of the model as this stage alone: what the next stage needs, or
        of the last one what `compute` returns."""
        self._stage = stage
        self._received, self._sent = list(received), []
        self.sent_by_stage[stage] = sum(t.nbytes for t in received if t.requires_grad)
        try:
            with self.passing():
                return plain(compute())
        except _StageIsDone:
            self.sent_by_stage[stage] += sum(each.nbytes for each in self._sent)
            # Torch sends these as they are.
            return tuple(each.contiguous() for each in self._sent)
        finally:
            self._stage = None
            self._received, self._sent = [], []

    def _layer_of_stage(
        self, number: int, layer: nn.Module, call: Forward, leaves: list[Any], spec: Any
    ) -> Called:
        """Run a layer where one stage alone is run, or none."""
        stage, count = self.stages.stage_of[number], self._calls[number]
        crossing = self._crossings.get(stage, [])
        places = [p for n, c, p in crossing if (n, c) == (number, count)]
        if self._stage == DRY:
            for place, leaf in enumerate(leaves):
                former = leaf.stage if isinstance(leaf, Elsewhere) else stage
                if former == stage:
                    continue
                self._is_chain &= former == stage - 1
                self._crossings.setdefault(stage, []).append((number, count, place))
        elif stage == self._stage:
            for place in places:
                leaves[place] = Received.apply(self._received.pop(0))
            self._check_way(number, leaves, but=[])
        elif stage - 1 == self._stage:
            self._check_way(number, leaves, but=places)
            self._sent += [plain(leaves[place]) for place in places]
            if len(self._sent) == len(crossing):
                raise _StageIsDone
        is_here = stage == self._stage
        return self._call(number, layer, call, leaves, spec, is_here=is_here)

    def _check_way(
        self, number: int, leaves: Sequence[Any], *, but: Sequence[int]
    ) -> None:
        """UnsupportedLoopError where a layer has inputs of other stages than its own,
        besides those at the places `but`."""
        own = (None, self.stages.stage_of[number])
        for place, leaf in enumerate(leaves):
            if place not in but and stage_of(leaf) not in own:
                name = self.stages.names[number]
                raise UnsupportedLoopError(OTHER_WAY.format(name=name))

    def enter(self, leaf: Any) -> Any:
        """An input of the model: what stages add to its gradient is summed."""
        if isinstance(leaf, torch.Tensor) and is_functorch_wrapped(leaf):
            raise UnsupportedLoopError(
                "torch.func (functional_call, grad, vmap, jacrev) calls the model, and "
                "under pipeline ranks send each other what its stages compute, which "
                "torch.func cannot transform. Use loss.backward(), or ddp"
            )
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return Enter.apply(leaf, self)
        return leaf

    def shared_out(self, parameter: Any) -> Any:
        """A parameter that all ranks have, for what they all compute of it outside of
        the model: each adds its share of that gradient."""
        if parameter.stage is None and parameter.requires_grad:
            return Everywhere.apply(parameter, self.size)
        return parameter

    def _as_computed(self, leaf: Any) -> Any:
        """A parameter that forward gives to another layer, or returns, as something
        that its stage computes; all else as it is."""
        if not isinstance(leaf, StagedParameter) or leaf.stage is None:
            return leaf
        with DisableTorchFunctionSubclass():
            if leaf.is_absent:
                found = elsewhere(as_meta(leaf), self.device)
            else:
                found = leaf.view_as(leaf).as_subclass(torch.Tensor)
        return of_stage(found, leaf.stage, self)

    def leave(self, leaves: Sequence[Any]) -> list[Any]:
        """Outputs of the model, with their values on every rank. Collective."""
        key = ("output", *self._mode())
        leaves = [self._as_computed(current(leaf)) for leaf in leaves]
        known = self._agreements.find(
            key, leaves, owner=None, name="the model's output"
        )
        leaves = [plain(leaf) for leaf in leaves]
        found = list(leaves)
        for transfer in known.transfers:
            self.returned += leaves[transfer.leaf].numel() * transfer.dtype.itemsize
            found[transfer.leaf] = Leave.apply(
                leaves[transfer.leaf],
                self.anchor,
                self,
                transfer.source,
                transfer.dtype,
            )
        for leaf in known.everywhere:
            if found[leaf].requires_grad:
                # A loop may write to it, which it may not to a view of a Function.
                found[leaf] = Everywhere.apply(found[leaf], self.size).clone()
        self.flush()  # it has arrived by now
        return found

    # ---- its layers ----

    def _wrap(self, layer: nn.Module, number: int) -> None:
        owner = self.stages.stage_of[number] % self.size

        def wrap(whole: Forward) -> Forward:
            def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
                def call(*a: Any, **kw: Any) -> Any:
                    return whole(module, *a, **kw)

                if self._in_layer:
                    return call(*args, **kwargs)
                # In forward all ranks raise it, at the same layer; later one alone
                # would, and leave others waiting.
                name = self.stages.names[number]
                if is_checkpointed():
                    raise UnsupportedLoopError(CHECKPOINTED.format(name=name))
                if is_within_backward():
                    raise UnsupportedLoopError(IN_BACKWARD.format(name=name))
                if not self.is_inside:  # a loop calls a part of the model
                    self._entry = number
                    try:
                        return self.run(
                            lambda *a, **kw: self._layer(
                                number, owner, module, call, a, kw
                            ),
                            args,
                            kwargs,
                        )
                    finally:
                        self._entry = -1
                return self._layer(number, owner, module, call, args, kwargs)

            # As below `_outermost`, where the loop has compiled a layer.
            disabled: Forward = torch.compiler.disable(forward)
            return disabled

        self._undo.append(wrap_forward(layer, wrap))

    def _layer(
        self,
        number: int,
        owner: int,
        layer: nn.Module,
        call: Forward,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a layer that rank `owner` has: there, or for the shapes of its output.
        It is the model's, or that of a copy."""
        leaves, spec = flatten((args, kwargs))
        given = leaves = [
            self._as_computed(self.memory.current(leaf)) for leaf in leaves
        ]
        own = holders_of(args, kwargs) if may_hold(args, kwargs) else []
        name = self.stages.names[number]
        count = self._calls[number] = self._calls.get(number, 0) + 1
        if self._stage is not None:
            run = self._layer_of_stage(number, layer, call, [*leaves], spec)
        else:
            key = (number, count, *self._mode())
            known = self._agreements.find(key, leaves, owner=owner, name=name)
            leaves = [*leaves]
            self._pass_on(known, leaves, owner)
            is_here = self.rank == owner
            run = self._call(number, layer, call, leaves, spec, is_here=is_here)
        for place, now in run.rewritten.items():
            if sum(are_in_common(each, given[place]) for each in given) > 1:
                raise UnsupportedLoopError(WRITES_TO_ONE.format(name=name))
            self.memory.replace(given[place], now, self.stages.stage_of[number])
            self.memory.lose_twins(given[place])
        for place, other in run.shared:
            if place not in run.rewritten and self._is_apart(given[place], number):
                self.memory.pair(given[place], other)
        if not run.places:
            return run.output
        copies = holders_in(run.output)
        return hand_back([(own[n], copies[k]) for n, k in run.places], run.output)

    def _is_apart(self, leaf: Any, number: int) -> bool:
        """Whether a layer is where it gets a copy of this."""
        found, stage = stage_of(leaf), self.stages.stage_of[number]
        if found is None or self._stage is not None:
            return found not in (None, stage)
        return found % self.size != stage % self.size

    def _call(
        self,
        number: int,
        layer: nn.Module,
        call: Forward,
        leaves: list[Any],
        spec: Any,
        *,
        is_here: bool,
    ) -> Called:
        """Run a layer: with values if it is to run here, else for its shapes."""
        leaves = [plain(leaf) for leaf in leaves]

        def run_for_shapes() -> Any:
            as_shapes = [as_elsewhere(t) if is_float(t) else t for t in leaves]
            return self._shapes_of(number, layer, call, as_shapes, spec)

        if is_here:
            self._let_arrive(leaves)
            found, (out_spec, places, written, common) = self._surviving(
                lambda: self._run_layer(number, call, leaves, spec), run_for_shapes
            )
        else:
            found, (out_spec, places, written, common) = run_for_shapes()
        stage = self.stages.stage_of[number]
        found = [
            of_stage(leaf, stage, self) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in found
        ]
        count = len(found) - len(written)
        return Called(
            unflatten(found[:count], out_spec),
            places,
            rewritten=dict(zip(written, found[count:], strict=True)),
            shared=[(place, found[n]) for n, place in common],
        )

    @contextlib.contextmanager
    def surviving(self) -> Iterator[None]:
        """Within it what fails with values, and not with shapes, gives zeros, and
        `has_failed` tells: ranks that have shapes alone would wait for this one."""
        self._survives, self.has_failed = True, False
        try:
            yield
        finally:
            self._survives = False

    def _surviving(self, run: Callable[[], Any], for_shapes: Callable[[], Any]) -> Any:
        """What `run` gives; zeros of the shapes where it fails and is to survive."""
        try:
            return run()
        except FAILURES as error:
            if not self._survives or isinstance(error, UnsupportedLoopError):
                raise
            shapes = for_shapes()
            self.has_failed = True

        def zeros(tensor: torch.Tensor) -> torch.Tensor:
            with DisableTorchFunctionSubclass():
                return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)

        return tree_map_only(Elsewhere, zeros, shapes)

    def _run_layer(
        self, number: int, call: Forward, leaves: list[Any], spec: Any
    ) -> tuple[list[Any], tuple[Any, Places, list[int], Common]]:
        """What a layer returns and, after that, those of its leaves that it has written
        to."""
        args, kwargs = unflatten(leaves, spec)
        name = self.stages.names[number]
        inputs = {n: Substitute(x, x) for n, x in enumerate(leaves) if is_tensor(x)}
        are_changed: Callable[[], bool] | None = None
        # To see every operator takes its time, so the first time alone.
        key = number, *self._mode()
        watch = contextlib.ExitStack()
        is_first = key not in self._watched
        given = Given(args, kwargs) if may_hold(args, kwargs) else None
        if is_first:
            others = set(ranks_of(self.group)) - {dist.get_rank()}
            watch.enter_context(self.watch_layer(name))
            watch.enter_context(NoCollectives(others, COLLECTIVE))
            are_changed = watch_unseen(filter(is_tensor, leaves))
        self._in_layer = True
        try:
            with self._own_numbers(number, self._calls.get(number, 0)), watch:
                found = call(*args, **kwargs)
        finally:
            self._in_layer = False
        self._watched.add(key)
        places: Places = []
        if given is not None:
            if given.has_changed(found):
                raise UnsupportedLoopError(CHANGES_INPUT.format(name=name))
            places = given.returned_in(found)
        output, out_spec = flatten(found)
        for each in inputs.values():
            each.check(name, takes_hooks=False)
        if are_changed is not None and are_changed():
            raise UnsupportedLoopError(WRITES_UNSEEN.format(name=name))
        written = [place for place, each in inputs.items() if each.is_written]
        common = in_common(output, leaves)
        output += [leaves[place] for place in written]
        return output, (out_spec, places, written, common)

    def _shapes_of(
        self, number: int, layer: nn.Module, call: Forward, leaves: list[Any], spec: Any
    ) -> Any:
        """What another rank's layer returns, as shapes. It is run for them once: an
        operator on the meta device takes longer than a small one on the CPU."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        whole = [each for each in tensors if not is_float(each)]
        if whole and not isinstance(layer, nn.Embedding):
            # Whose values may decide on shapes.
            found, out_spec = self._run_layer(number, call, leaves, spec)
            return [as_elsewhere(t) if is_tensor(t) else t for t in found], out_spec
        kinds = tuple(
            (tuple(t.shape), t.dtype, t.requires_grad) if is_tensor(t) else repr(t)
            for t in leaves
        )
        trained = tuple(p.requires_grad for p in layer.parameters())
        is_own = layer is self.stages.modules[number]
        flags = (self._flags[number] if is_own else flags_of(layer))()
        key = (number, kinds, trained, flags, *self._mode())
        known = self._shapes.get(key)
        if known is None or known[0] != spec[0]:
            # One input may be computed from another, on other ranks.
            own = [alias_of(t) if is_elsewhere(t) else t for t in leaves]
            # Before the layer writes to them, which gives them another history.
            inputs = [edge_of(t) for t in own if is_tensor(t)]
            found, out_spec = self._run_layer(number, call, own, spec)
            found = [as_elsewhere(t) if is_tensor(t) else t for t in found]
            outputs = {id(t): t for t in found if is_tensor(t)}.values()
            # Of each by itself: where the loss needs one alone, no rank is to wait for
            # gradients of the others.
            self._in_layer = True  # also what a checkpoint within it runs again
            try:
                used = [edges_used(each, inputs) for each in outputs]
            finally:
                self._in_layer = False
            with DisableTorchFunctionSubclass():
                once = {id(t): t.detach() for t in outputs}
            kept = [once[id(t)] if is_tensor(t) else t for t in found]
            self._shapes[key] = spec[0], Shapes.of([*outputs], used), kept, out_spec
            return found, out_spec
        _, shapes, found, out_spec = known
        once = {id(t): t for t in found if is_tensor(t)}
        made = dict(zip(once, shapes.made(tensors, self.device), strict=True))
        return [made[id(t)] if is_tensor(t) else t for t in found], out_spec

    def _mode(self) -> tuple[Any, ...]:
        """What may make other patterns of the same calls."""
        autocast = torch.is_autocast_enabled(self.device.type)
        training, has_grad = self._called.training, torch.is_grad_enabled()
        return self._entry, training, has_grad, autocast

    # ---- messages ----

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks along `pp`, as of now: it is another one after a restart."""
        return self._mesh.get_group()

    @property
    def channel(self) -> Channel:
        group = self.group
        if self._channel is None or self._channel.group is not group:
            control: Any = group if dist.get_backend(group) == "gloo" else None
            downward = another_group(group, self._whole_mesh, "pp")
            self._channel = Channel(group, control, self.device, downward)
        return self._channel

    def send(self, tensor: torch.Tensor, to: int) -> None:
        tensor = tensor.detach().contiguous()
        self._in_flight.add(memory_of(tensor))
        self.channel.send(to, [tensor])

    def receive(self, shape: Any, dtype: torch.dtype, source: int) -> torch.Tensor:
        found = torch.empty(shape, dtype=dtype, device=self.device)
        self.channel.receive(source, [found])
        return found

    def flush(self) -> None:
        """Wait until what this rank has sent has arrived."""
        self._in_flight.clear()
        self.channel.flush()

    def _let_arrive(self, leaves: Sequence[Any]) -> None:
        """Wait for that where any of these may be written to, and is being sent."""
        if self._in_flight and not self._in_flight.isdisjoint(
            memory_of(leaf) for leaf in leaves if is_tensor(leaf)
        ):
            self.flush()


def is_of_no_stage(leaf: Any) -> bool:
    """Whether it is what a layer of another rank has left, but not returned."""
    return isinstance(leaf, Elsewhere) and leaf.stage is None


def is_mask(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool


def is_float(leaf: Any) -> bool:
    """Whether a layer that is run for its shapes does without the values of this: it
    may decide by those of whole numbers, as lengths."""
    return isinstance(leaf, torch.Tensor) and (
        leaf.is_floating_point() or leaf.is_complex()
    )


class _StageIsDone(BaseException):
    """What the next stage needs is there: the rest of the model's forward is not this
    stage's."""
