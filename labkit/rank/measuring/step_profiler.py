"""Measures one training step: memory by component, and what went over the wire."""

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
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
from labkit.compat.torch import is_traceable_wrapper_subclass
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
from labkit.records import COMPONENTS
from labkit.records import Collective
from labkit.records import Measurement
from labkit.records import ModelFacts
from labkit.records import Moments
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import optimizer_tensors

LOOK_EVERY_OPS = 16
"""How often all storages are looked at, which takes some 0.2 ms: FSDP and DeepSpeed
change the size of some without an operator."""

FEW_PARAMETERS = 64
"""Of so few the gradients are looked at before every operator of a backward pass."""


class Trained(Protocol):
    """What holds model states: what `prepare` has made of a model, or `Noticed`."""

    keeps_gradients: bool

    def memory(self) -> dict[str, Tensors]: ...
    def facts(self) -> ModelFacts | None: ...


class Noticed:
    """What is known of a model that the cell trains by itself: the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.keeps_gradients = len(self._parameters()) <= FEW_PARAMETERS

    def memory(self) -> dict[str, Tensors]:
        """The tensors that hold its states right now, by component."""
        parameters = self._parameters()
        return {
            "parameters": parameters,
            "gradients": [parameter.grad for parameter in parameters],
            "optimizer_state": optimizer_tensors(self.optimizer),
        }

    def facts(self) -> None:
        """Theory needs more: how the cell divides what among the ranks."""

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


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
    ) -> None:
        """Without `sees_operators` only what is looked at between them: model states,
        and on a GPU the peak. `began` is when the step did, by `time.perf_counter`, if
        not now."""
        super().__init__()
        self._began = time.perf_counter() if began is None else began
        self._sees_operators = sees_operators
        self._prepared = list(prepared)
        self._waits = not any(isinstance(each, Noticed) for each in self._prepared)
        self._device = device
        self._step = step
        self._log = MomentLog()
        self._numbers: dict[int, int] = {}
        """By storage, how the log knows it."""
        self._peak: PeakOfStep | None = None
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._total = 0
        """The bytes of all live storages, as far as they were looked at."""
        self._held = dict.fromkeys(COMPONENTS, 0)
        self._collectives: dict[str, Collective] = {}
        self._num_ops = 0
        self._is_backward = False
        self._keeps_gradients = any(p.keeps_gradients for p in self._prepared)
        self._is_active = False
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
            self.__enter__()

    def begin_forward(self) -> None:
        self._log.enter("forward")

    def begin_backward(self) -> None:
        self._log.enter("backward")
        states = {
            storage_key(storage)
            for held in self._components().values()
            for storage in self._storages_of(held)
        }
        others = sum(
            storage.nbytes()
            for key, storage in self._alive()
            if key not in states and key not in self._older
        )
        self._held["activations_peak"] = max(self._held["activations_peak"], others)
        self.look()
        self._is_backward = True

    def end_backward(self) -> None:
        self._is_backward = False
        self.look(is_after_backward=True)
        self._log.enter("step")

    def stop(self) -> Measurement | None:
        """End the watch; None where a mode of the user's own was entered meanwhile, or
        compiled code is running, which has to end first."""
        self._is_active = False
        self._synchronize()
        seconds = time.perf_counter() - self._began
        if self._sees_operators:
            if current_dispatch_mode() is not self or is_called_by_compiled():
                return None
            self.__exit__(None, None, None)
        self.look()
        if self._peak is not None:
            peak = self._peak.read()
            self._held["total_peak"] = max(self._held["total_peak"], peak)
        models = [
            replace(facts, offloaded=self._offloaded(prepared))
            for prepared in self._prepared
            if (facts := prepared.facts()) is not None
        ]
        moments = self._log.moments() if self._sees_operators else Moments()
        if self._device.type == "cpu" and moments.seconds:
            peak = max(map(sum, zip(*moments.held.values(), strict=True)))
            self._held["total_peak"] = max(self._held["total_peak"], peak)
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
        schema = schema_of(func)
        name = schema and schema.name
        if self._keeps_gradients and self._is_backward and self._is_active:
            self._look_at_gradients()  # before this operator takes the first away
        if self._is_active and name in KINDS:
            # What was computed before is the rank's own time, not the collective's.
            self._synchronize()
        kwargs = kwargs or {}
        if self._is_active:
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
        self._num_ops += 1
        if name in KINDS or self._num_ops % LOOK_EVERY_OPS == 0:
            self.look()
        else:
            self._note_total()
        self._log.tick()
        return out

    def look(self, *, is_after_backward: bool = False) -> None:
        """Note the bytes of every component, where they are more than before.

        Those of gradients as a rule after a backward pass only: on their way from one
        place to another some are in both.
        """
        seen: set[int] = set()
        for component, held in self._components().items():
            total = sum(each for each in held if isinstance(each, int))
            for storage in self._storages_of(held):
                if (key := storage_key(storage)) not in seen:
                    seen.add(key)
                    total += storage.nbytes()
                    self._see(storage)
                    self._log.is_part(self._numbers[key], component)
            if is_after_backward or component != "gradients":
                self._held[component] = max(self._held[component], total)
        self._weigh()
        self._note_total()

    def _weigh(self) -> None:
        alive = self._alive()  # kept to the end, so that none is forgotten meanwhile
        sizes = {key: storage.nbytes() for key, storage in alive}
        for key, size in sizes.items():
            if change := size - self._sizes[key]:
                self._log.change(self._numbers[key], change, is_seen_late=True)
        self._sizes = sizes
        self._total = sum(sizes.values())

    def _look_at_gradients(self) -> None:
        gradients = itertools.chain.from_iterable(
            prepared.memory()["gradients"] for prepared in self._prepared
        )
        sizes = {}
        for storage in self._storages_of(gradients):
            self._see(storage)
            key = storage_key(storage)
            self._log.is_part(self._numbers[key], "gradients")
            sizes[key] = storage.nbytes()
        self._held["gradients"] = max(self._held["gradients"], sum(sizes.values()))

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
        for value in values:
            for part in parts(value):
                # Operators are also run on fake tensors, to learn a result's shape.
                if part.device.type == self._device.type and not is_fake(part):
                    yield part.untyped_storage()

    def _see(self, storage: torch.UntypedStorage) -> bool:
        """Whether it was not known before."""
        key = storage_key(storage)
        if key in self._storages:
            return False
        self._storages[key] = weakref.ref(storage, partial(self._forget, key))
        self._sizes[key] = size = storage.nbytes()
        self._numbers[key] = self._log.add(size)
        self._total += size
        return True

    def _forget(self, key: int, reference: Any) -> None:
        self._storages.pop(key, None)
        size = self._sizes.pop(key, 0)
        self._total -= size
        self._log.change(self._numbers.pop(key), -size)
        self._older.discard(key)

    def _alive(self) -> list[tuple[int, torch.UntypedStorage]]:
        pairs = [(key, reference()) for key, reference in [*self._storages.items()]]
        return [(key, storage) for key, storage in pairs if storage is not None]

    def _note_total(self) -> None:
        if self._total > self._held["total_peak"]:
            self._weigh()  # some may hold less than when they were looked at
        self._held["total_peak"] = max(self._held["total_peak"], self._total)

    def _note_collective(self, name: str, args: Any, out: Any, began: float) -> None:
        kind, place = KINDS[name]
        if self._waits and kind not in BETWEEN_TWO:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.ScriptObject):
                    dist.Work.unbox(leaf).wait()
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

    def _synchronize(self) -> None:
        """Wait for the device, which computes what the CPU has only asked for."""
        if self._device.type == "cuda" and self._waits:
            torch.cuda.synchronize(self._device)


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


def may_enter_mode() -> bool:
    """Whether a dispatch mode may be entered here, and left in the next step: not in a
    thread, nor within a mode or compiled code, which would end before it does."""
    return (
        threading.current_thread() is threading.main_thread()
        and current_dispatch_mode() is None
        and not is_called_by_compiled()
    )


def is_called_by_compiled() -> bool:
    """Whether code that torch.compile has made is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch._dynamo"):
            return True
        frame = frame.f_back
    return False
