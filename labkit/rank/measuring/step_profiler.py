"""Measures one training step: memory by component, and what went over the wire."""

import functools
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from labkit.compat.c10d import FUNCTIONAL
from labkit.compat.c10d import local_part
from labkit.compat.c10d import wait_for
from labkit.compat.torch import TorchDispatchMode
from labkit.compat.torch import current_dispatch_mode
from labkit.compat.torch import get_unwrapped
from labkit.compat.torch import is_fake
from labkit.compat.torch import is_functorch_wrapped
from labkit.compat.torch import is_plain
from labkit.compat.torch import is_profiled
from labkit.compat.torch import is_traceable_wrapper_subclass
from labkit.compat.torch import is_within_backward
from labkit.compat.torch import schema_of
from labkit.compat.torch import sparse_parts
from labkit.compat.torch import storage_key
from labkit.compat.torch import tree_leaves
from labkit.rank.measuring.collectives import BETWEEN_TWO
from labkit.rank.measuring.collectives import KINDS
from labkit.rank.measuring.collectives import PART
from labkit.rank.measuring.collectives import bytes_on_the_wire
from labkit.rank.measuring.collectives import group_size
from labkit.rank.measuring.memory import PeakOfStep
from labkit.rank.measuring.moments import MomentLog
from labkit.rank.telemetry.stack_trace import is_called_from
from labkit.records import COMPONENTS
from labkit.records import Collective
from labkit.records import Measurement
from labkit.records import ModelFacts
from labkit.records import Moments
from labkit.strategies.model.states import parameters_of
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import optimizer_tensors

LOOK_EVERY_OPS = 16
"""How often communication buffers are looked at, which come and go within a pass; also
at each collective. In forward and backward passes all model states are looked at more
rarely, where there are many: a look takes 5 us for each. An optimizer's step has some
for a moment only, as ZeRO's partition of the gradients: there it is each collective,
and more often."""

BUFFERS = "communication_buffers"

FEW_PARAMETERS = 64
"""Of so few the gradients are looked at before every operator of a backward pass."""


class Trained(Protocol):
    """What holds model states: what `prepare` has made of a model, or `Noticed`."""

    @property
    def seconds_waited(self) -> float: ...
    def memory(self) -> dict[str, Tensors]: ...
    def communication_buffers(self) -> Tensors: ...
    def facts(self) -> ModelFacts | None: ...


class Noticed:
    """What is known of models that the cell trains by itself: the optimizers."""

    def __init__(
        self, optimizers: Callable[[], Iterable[torch.optim.Optimizer]]
    ) -> None:
        """`optimizers()` there are right now: none is kept alive."""
        self._optimizers = optimizers
        self.seconds_waited = 0.0
        self.has_few_parameters = len(self._parameters()) <= FEW_PARAMETERS

    def memory(self) -> dict[str, Tensors]:
        """The tensors that hold their states right now, by component."""
        parameters = self._parameters()
        state = map(optimizer_tensors, self._optimizers())
        return {
            "parameters": parameters,
            "gradients": [parameter.grad for parameter in parameters],
            "optimizer_state": itertools.chain.from_iterable(state),
        }

    def communication_buffers(self) -> Tensors:
        """None is known."""
        return ()

    def facts(self) -> None:
        """Theory needs more: how the cell divides what among the ranks."""

    def _parameters(self) -> list[torch.Tensor]:
        return [p for each in self._optimizers() for p in parameters_of(each)]


class StepProbe(TorchDispatchMode):
    """Sees every operator of one training step on this rank.

    Memory: the bytes of all live storages that the step's operators took or returned,
    or that hold model states; the greatest sum is the peak. Activations: what the step
    has made that is alive when a backward pass begins, and is no model state.
    Collectives: each is waited for where it begins, so its seconds hold the wait for
    the slowest rank, and no overlap. In a loop that does all by itself none is waited
    for, as another rank may start its own in another order, and no time is known. Of
    compiled code it sees what still calls operators.
    """

    def __init__(
        self,
        prepared: Iterable[Trained],
        device: torch.device,
        *,
        step: int = 0,
        sees_operators: bool = True,
        began: float | None = None,
        give_up_s: float = math.inf,
    ) -> None:
        """Without `sees_operators` only what is looked at between them: model states,
        and on a GPU the peak. `began` is when the step did, by `time.perf_counter`, if
        not now. After `give_up_s` it looks at nothing any more: the loop has ended, and
        what the cell goes on with would take many times as long."""
        super().__init__()
        now = time.perf_counter()
        self._began = now if began is None else began
        self._gives_up_at = now + give_up_s
        self._sees_operators = sees_operators
        self._prepared = list(prepared)
        noticed = [each for each in self._prepared if isinstance(each, Noticed)]
        self._waits = not noticed
        self._may_step_within = any(each.has_few_parameters for each in noticed)
        """Whether gradients may be gone before a backward pass has ended."""
        self._device = device
        self._step = step
        self._log = MomentLog()
        self._numbers: dict[int, int] = {}
        """By storage, how the log knows it."""
        self._waited = -self._seconds_waited()
        self._peak: PeakOfStep | None = None
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._total = 0
        """The bytes of all live storages, as far as they were looked at."""
        self._held = dict.fromkeys(COMPONENTS, 0)
        self._collectives: dict[str, Collective] = {}
        self._ops_until_look = LOOK_EVERY_OPS
        self._states: set[int] = set()
        """The storages of all components but communication buffers."""
        self._is_backward = self._had_backward = self._is_in_step = False
        self._num_gradients = self._gradient_bytes = 0
        """Of the backward pass that is under way, at their most."""
        self._is_active = self._is_entered = False
        self._older: set[int] = set()
        """Storages from before the step that hold no model states: a teacher's weights,
        the batch."""

    # ---- one step ----

    def start(self) -> None:
        """Begin to watch; all that holds model states is known from here on."""
        if self._device.type == "cuda":
            self._peak = PeakOfStep(self._device)
        self.look()
        self._is_active = True
        self._log.start()
        if self._sees_operators:
            see_resizes(self)
            self._is_entered = True
            self.__enter__()

    def begin_forward(self) -> None:
        self._is_in_step = False
        self._log.enter("forward")

    def begin_backward(self) -> None:
        if not self._is_active:
            return
        self._log.enter("backward")
        self._is_in_step = False
        states = self.look()
        others = sum(
            storage.nbytes()
            for key, storage in self._alive()
            if key not in states and key not in self._older
        )
        self._held["activations_peak"] = max(self._held["activations_peak"], others)
        self._is_backward = self._had_backward = True

    def end_backward(self) -> None:
        self._is_backward, self._is_in_step = False, True
        if self._is_active:
            if len(self._gradients()) < self._num_gradients:
                # The pass itself has taken some away, as where each is stepped with.
                found = max(self._held["gradients"], self._gradient_bytes)
                self._held["gradients"] = found
            self._num_gradients = self._gradient_bytes = 0
            self.look(is_after_backward=True)
            self._log.enter("step")

    def begin_step(self) -> None:
        """An optimizer's step begins."""
        self._log.enter("step")

    def end_step(self) -> None:
        """It has ended, and is not to be the last."""
        if self._is_active:
            self.look()  # the optimizer may be new, and gone before the step is over
        self._log.end_step()

    @property
    def has_given_up(self) -> bool:
        """Whether there is nothing to be measured any more."""
        return not self._is_active

    def stop(self) -> bool:
        """End the watch; False where it cannot end here: in another thread, or where a
        mode of the user's own was entered meanwhile, or compiled code is running."""
        if self._is_entered:
            if current_dispatch_mode() is not self or is_called_by_compiled():
                self._is_active = False
                return False
            self.__exit__(None, None, None)
            self._is_entered = False
            see_no_resizes(self)
        return True

    def measurement(self) -> Measurement | None:
        """What the step took, which ends here; None where it was not seen whole."""
        if not self._is_active:
            return None
        self._synchronize()
        seconds = time.perf_counter() - self._began
        self.look(is_after_backward=not self._had_backward)
        if self._peak is not None:
            peak = self._peak.read()
            self._held["total_peak"] = max(self._held["total_peak"], peak)
        models = [
            replace(facts, offloaded=self._offloaded(prepared))
            for prepared in self._prepared
            if (facts := prepared.facts()) is not None
        ]
        self._add_waits()
        moments = self._log.moments() if self._sees_operators else Moments()
        if self._device.type == "cpu" and moments.seconds:
            peak = max(map(sum, zip(*moments.held.values(), strict=True)))
            self._held["total_peak"] = max(self._held["total_peak"], peak)
        if not self._had_backward and moments.seconds:  # as with torch.func.grad
            self._held["activations_peak"] = max(moments.held["activations"])
        self._give_up()
        return Measurement(
            self._held,
            list(self._collectives.values()),
            models,
            seconds,
            step=self._step,
            moments=moments,
        )

    # ---- operators and collectives ----

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo would not compile, ever, a frame that it first sees under a mode that
        wants to see all of its operators."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it comes again as what it is made of
        kwargs = kwargs or {}
        if self._is_active and time.perf_counter() > self._gives_up_at:
            self._give_up()
        if not self._is_active or is_without_values(args):
            return func(*args, **kwargs)
        schema = schema_of(func)
        name = schema and schema.name
        if self._may_step_within and self._is_backward:
            self._look_at_gradients()  # before this operator takes the first away
        if name in KINDS:
            # What was computed before is the rank's own time, not the collective's.
            self._synchronize()
        # But what it writes to: what compiled code has made is seen here first.
        taken = [value for key, value in kwargs.items() if key != "out"]
        for storage in self._storages_of(tree_leaves((args, taken))):
            if self._see(storage):
                key = storage_key(storage)
                self._older.add(key)
                self._log.is_taken(self._numbers[key])
        began = time.perf_counter()
        out = func(*args, **kwargs)
        if not self._is_active:
            return out
        if name in KINDS:
            self._note_collective(name, args, out, began)
        for storage in self._storages_of(tree_leaves(out)):
            self._see(storage)
        if name == "inductor::resize_storage_bytes_":  # gives nothing back
            self._weigh()
        self._ops_until_look -= 1
        if self._ops_until_look <= 0 or (self._is_in_step and name in KINDS):
            self.look()
        else:
            if name in KINDS or self._ops_until_look % LOOK_EVERY_OPS == 0:
                self._look_at_buffers()
            self._note_total()
        self._log.tick()
        return out

    def look(self, *, is_after_backward: bool = False) -> set[int]:
        """Note the bytes of every component, where they are more than before; their
        storages.

        Those of gradients as a rule after a backward pass only: on their way from one
        place to another some are in both.
        """
        seen: set[int] = set()
        self._states.clear()
        num_states = 0
        for component, held in self._components().items():
            counts = is_after_backward or component != "gradients"
            found = self._look_at(component, held, seen, counts=counts)
            seen |= found
            if component != BUFFERS:
                self._states |= found
            num_states += len(held)
        number = len(seen) if self._is_in_step else num_states
        self._ops_until_look = max(LOOK_EVERY_OPS, number // 4)
        self._weigh()
        self._note_total()
        return seen

    def _look_at(
        self,
        component: str,
        held: Sequence[torch.Tensor | int | None],
        others: set[int],
        *,
        counts: bool = True,
    ) -> set[int]:
        """The storages of a component that are none of `others`. If it `counts`, its
        bytes are noted where they are more than before."""
        found: set[int] = set()
        total = sum(each for each in held if isinstance(each, int))
        for storage in self._storages_of(held):
            key = storage_key(storage)
            if key not in others and key not in found:
                found.add(key)
                total += storage.nbytes()
                self._see(storage)
                self._log.is_part(self._numbers[key], component)
        if counts:
            self._held[component] = max(self._held[component], total)
        return found

    def _look_at_buffers(self) -> None:
        buffers = [p.communication_buffers() for p in self._prepared]
        self._look_at(BUFFERS, list(itertools.chain(*buffers)), self._states)

    def _weigh(self) -> None:
        alive = self._alive()  # kept to the end, so that none is forgotten meanwhile
        sizes = {key: storage.nbytes() for key, storage in alive}
        for key, size in sizes.items():
            if change := size - self._sizes[key]:
                self._log.change(self._numbers[key], change, is_seen_late=True)
        self._sizes = sizes
        self._total = sum(sizes.values())

    def _look_at_gradients(self) -> None:
        gradients = self._gradients()
        sizes = {}
        for storage in self._storages_of(gradients):
            self._see(storage)
            key = storage_key(storage)
            self._log.is_part(self._numbers[key], "gradients")
            sizes[key] = storage.nbytes()
        self._num_gradients = max(self._num_gradients, len(gradients))
        self._gradient_bytes = max(self._gradient_bytes, sum(sizes.values()))

    def _gradients(self) -> list[Any]:
        """Those that there are."""
        held = (prepared.memory()["gradients"] for prepared in self._prepared)
        return [each for each in itertools.chain(*held) if each is not None]

    def _components(self) -> dict[str, list[torch.Tensor | int | None]]:
        found: dict[str, list[torch.Tensor | int | None]] = {}
        for prepared in self._prepared:
            for component, held in prepared.memory().items():
                found.setdefault(component, []).extend(held)
        return found

    def _offloaded(self, prepared: Trained) -> list[str]:
        """The components of which nothing but counts of steps is on this device."""
        found = []
        for component, held in prepared.memory().items():
            tensors = [each for each in held if isinstance(each, torch.Tensor)]
            kinds = {tensor.device.type for tensor in tensors if tensor.dim()}
            if kinds and self._device.type not in kinds:
                found.append(component)
        return found

    def _storages_of(self, values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
        """What on this device holds the tensors among `values`."""
        kind = self._device.type
        for value in values:
            if is_plain(value):
                if value.device.type == kind:
                    yield value.untyped_storage()
                continue
            for part in parts(value):
                # Operators are also run on fake tensors, to learn a result's shape.
                if part.device.type == kind and not is_fake(part):
                    yield part.untyped_storage()

    def _see(self, storage: torch.UntypedStorage) -> bool:
        """Whether it was not known before."""
        key = storage_key(storage)
        size = storage.nbytes()
        if key in self._storages:
            self._change(key, size, is_seen_late=True)
            return False
        self._sizes[key] = size
        self._numbers[key] = self._log.add(size)
        self._total += size
        # Last: an interrupt may come at any line before.
        self._storages[key] = weakref.ref(storage, partial(self._forget, key))
        return True

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size, without an operator."""
        if self._is_active and storage_key(storage) in self._storages:
            self._change(storage_key(storage), storage.nbytes(), is_seen_late=False)

    def _change(self, key: int, size: int, *, is_seen_late: bool) -> None:
        # Another thread may have given up meanwhile.
        before, number = self._sizes.get(key), self._numbers.get(key)
        if before is None or number is None or size == before:
            return
        self._sizes[key] = size
        self._total += size - before
        self._log.change(number, size - before, is_seen_late=is_seen_late)

    def _forget(self, key: int, reference: Any) -> None:
        self._storages.pop(key, None)
        size = self._sizes.pop(key, 0)
        self._total -= size
        self._log.change(self._numbers.pop(key), -size)
        self._older.discard(key)
        self._states.discard(key)

    def _give_up(self) -> None:
        """Look at nothing any more, and refer to nothing of the user's."""
        self._is_active = False
        self._prepared, self._log = [], MomentLog()
        for held in (self._storages, self._sizes, self._numbers):
            held.clear()

    def _alive(self) -> list[tuple[int, torch.UntypedStorage]]:
        pairs = [(key, reference()) for key, reference in [*self._storages.items()]]
        return [(key, storage) for key, storage in pairs if storage is not None]

    def _note_total(self) -> None:
        self._held["total_peak"] = max(self._held["total_peak"], self._total)

    def _note_collective(self, name: str, args: Any, out: Any, began: float) -> None:
        kind, place = KINDS[name]
        if self._waits and kind not in BETWEEN_TWO:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.ScriptObject):
                    # NCCL gives none of a collective that the caller does not wait for.
                    if (work := dist.Work.unbox(leaf)) is not None:
                        work.wait()
                elif name.startswith(FUNCTIONAL):
                    wait_for(leaf)
            self._synchronize()
        seconds = time.perf_counter() - began if self._waits else None
        payload = sum(
            part.nbytes for leaf in tree_leaves(args[place]) for part in parts(leaf)
        )
        num_ranks = group_size(args)
        if name in PART:
            payload *= num_ranks
        if kind == "barrier":  # whose tensor is but there to say on which device
            payload = 0
        noted = self._collectives.get(kind, Collective(kind))
        self._collectives[kind] = noted.plus(
            payload, bytes_on_the_wire(kind, payload, num_ranks), seconds
        )

    def _add_waits(self) -> None:
        """Between two ranks a message is waited for after it has begun."""
        waited = self._waited + self._seconds_waited()
        received = self._collectives.get("recv")
        if waited > 0 and received is not None and received.seconds is not None:
            seconds = received.seconds + waited
            self._collectives["recv"] = replace(received, seconds=seconds)

    def _seconds_waited(self) -> float:
        """For messages, so far; models of one run have the same channel."""
        return max((each.seconds_waited for each in self._prepared), default=0.0)

    def _synchronize(self) -> None:
        """Wait for the device, which computes what the CPU has only asked for."""
        if self._device.type == "cuda" and self._waits:
            torch.cuda.synchronize(self._device)


_seeing: tuple[weakref.ref[StepProbe], ...] = ()
"""Replaced as a whole: any thread may be going through it."""
_resize: Any = None


def see_resizes(probe: StepProbe) -> None:
    """Tell `probe`, as long as it watches, of each change of a storage's size that is
    no operator's, as FSDP frees what it has gathered."""
    global _seeing, _resize
    _seeing = (*(each for each in _seeing if each() is not None), weakref.ref(probe))
    storages: Any = torch.UntypedStorage
    before = storages.resize_
    if before is _resize:
        return  # it stays, for who has put something on top of it may put it back

    @functools.wraps(before)
    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        resized = before(storage, size)
        for reference in _seeing:
            if (each := reference()) is not None:
                each.note_resize(storage)
        return resized

    storages.resize_ = _resize = resize


def see_no_resizes(probe: StepProbe) -> None:
    """Tell `probe` no more. FSDP changes sizes several times a layer: where nobody is
    told, nothing is in their way."""
    global _seeing
    _seeing = tuple(each for each in _seeing if each() not in (None, probe))
    storages: Any = torch.UntypedStorage
    if not _seeing and storages.resize_ is _resize:
        storages.resize_ = _resize.__wrapped__


def parts(value: Any) -> Iterator[torch.Tensor]:
    """The dense tensors that a tensor is made of: as a rule itself."""
    while isinstance(value, torch.Tensor) and is_functorch_wrapped(value):
        value = get_unwrapped(value)  # as within torch.func.grad and vmap
    if isinstance(value, DTensor):
        yield local_part(value)
    elif not isinstance(value, torch.Tensor):
        return
    elif value.layout is torch.sparse_coo:
        yield from sparse_parts(value)
    elif is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from parts(getattr(value, name))
    elif value.layout is torch.strided:
        yield value


def is_without_values(args: Any) -> bool:
    """Whether an operator is run for the shape of its result alone."""
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta


def is_sampled(step: int) -> bool:
    """Whether a run's optimizer step `step`, counted from 1, is measured.

    The first, in which state is made; the third, because DDP rebuilds its buckets in
    the second; then the 10th, 30th, 100th, 300th, ...: ever fewer, for each takes long.
    """
    return str(step).rstrip("0") in ("1", "3")


def hindrance() -> str:
    """Why a step that begins here cannot be measured, in words; "" if it can be.

    A dispatch mode is entered here and left where the step ends: what is around it has
    to end before or after both.
    """
    if is_profiled():
        return "a profiler is active and would record labkit's own measurement"
    if threading.current_thread() is not threading.main_thread():
        return "they are taken in a thread"
    if current_dispatch_mode() is not None:
        return "a TorchDispatchMode of the cell's own is active"
    if is_called_by_compiled():
        return "they are taken in compiled code"
    if is_within_backward():
        return "they are taken within backward passes"
    return ""


def is_called_by_compiled() -> bool:
    """Whether code that torch.compile has made is on the stack.

    What is kept from it, as labkit's own step is, has a frame there in any case.
    """
    kept_out = torch.compiler.disable(is_called_by_compiled).__code__
    return is_called_from("torch._dynamo", but=kept_out)
