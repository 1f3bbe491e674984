"""One training step on fake tensors: the bytes that are alive at every moment of it."""

import copy
import inspect
import itertools
import logging
import math
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import contextmanager
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit.compat.torch import FakeTensorMode
from labkit.compat.torch import TorchDispatchMode
from labkit.compat.torch import storage_key
from labkit.compat.torch import tree_leaves
from labkit.compat.torch import tree_map_only
from labkit.records import shorten
from labkit.strategies.checkpointing import checkpoint_activations
from labkit.strategies.prepared import blocks
from labkit.strategies.prepared import cast_floats
from labkit.strategies.prepared import optimizer_tensors

Loss = Callable[[Any], torch.Tensor]
Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer]
Shapes = Sequence[Sequence[int]]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with: by place, and by name."""


class UntraceableError(ValueError):
    """The model cannot be run without data, or not on this input."""


@dataclass(frozen=True)
class Moment:
    """What is alive after one operator of a step."""

    unit: int
    """The block that is computed, from 1; 0 outside of all blocks."""
    others: int
    """Bytes besides parameters, accumulated gradients and optimizer state."""
    num_finished: int
    """Parameters whose gradient of this backward pass is complete."""
    is_backward: bool


@dataclass
class Trace:
    """One forward and backward pass of the plain model."""

    moments: list[Moment] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    """Indices of parameters, in the order in which their gradients are complete."""
    entered: list[int] = field(default_factory=list)
    """The blocks in the order of the forward pass."""
    activations: float = 0
    received: float = 0
    """Bytes of what layers of this stage get from the stage before it."""
    returned: float = 0
    """Bytes of the model's output."""
    in_loss: float = 0
    """The most bytes that the loss function adds to them."""

    def peak(self, extra: Callable[[Moment], float] = lambda moment: 0.0) -> float:
        """The greatest sum of what is alive and what `extra` adds to it."""
        return max(moment.others + extra(moment) for moment in self.moments)


NOTHING = Trace([Moment(0, 0, 0, is_backward=False)], activations=math.nan)
"""In the place of a step whose input is not known."""


class Watch(TorchDispatchMode):
    """Counts the bytes of live storages that operators returned, as StepProbe does, by
    the stage that computes them.

    Source: `torch.distributed._tools.mem_tracker` does likewise by category.
    """

    def __init__(
        self,
        known: Iterable[torch.Tensor],
        note: Callable[[int], None],
        num_stages: int = 1,
        stage_now: Callable[[], int | None] = lambda: 0,
    ) -> None:
        """`stage_now` tells which one computes; None for the last of those whose
        tensors an operator takes, and for the first where there are none."""
        super().__init__()
        self._known = {storage_key(tensor.untyped_storage()) for tensor in known}
        self._alive: dict[int, tuple[int, int, Any]] = {}
        self._note = note
        self._stage_now = stage_now
        self.totals = [0] * num_stages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        stage = self._stage_now()
        if stage is None:
            stage = max(map(self.stage_of, tree_leaves(args)), default=0)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage(), stage)
        self._note(stage)
        return out

    def stage_of(self, leaf: Any) -> int:
        """The stage that has computed a tensor; the first for what is none."""
        if not isinstance(leaf, torch.Tensor):
            return 0
        return self._alive.get(storage_key(leaf.untyped_storage()), (0, 0))[1]

    def _see(self, storage: torch.UntypedStorage, stage: int) -> None:
        key = storage_key(storage)
        if key not in self._known and key not in self._alive:
            self.totals[stage] += storage.nbytes()
            reference = weakref.ref(storage, partial(self._forget, key))
            self._alive[key] = storage.nbytes(), stage, reference

    def _forget(self, key: int, reference: Any) -> None:
        num_bytes, stage, _ = self._alive.pop(key)
        self.totals[stage] -= num_bytes


def fake_copy(
    model: nn.Module, device: str, dtype: torch.dtype | None = None
) -> nn.Module:
    """The model with fake parameters and buffers, in `dtype` where that is given.

    To be called in a FakeTensorMode; real memory is not copied.
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        fake = torch.empty(tensor.shape, dtype=kind, device=device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
    return copy.deepcopy(model, memo)


def trace_step(
    model: nn.Module,
    inputs: Inputs,
    loss_fn: Loss,
    *,
    batch_size: int,
    dtype: torch.dtype,
    casts_model: bool,
    activation_checkpointing: bool,
    device: str,
    stage_of: Mapping[str, int] | None = None,
) -> list[Trace]:
    """A forward and backward pass on `batch_size` samples, without data, as each stage
    sees it: `stage_of` has the stages of layers, by name. By default there is one.

    Below fp32 either the model is cast, or its operators (autocast).

    Raises UntraceableError where the model, or the loss, raises anything.
    """
    is_low = dtype is not torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = fake_copy(model, device, dtype if is_low and casts_model else None)
        fake.train(model.training)
        if activation_checkpointing:
            checkpoint_activations(fake)
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda x: torch.empty(
                (batch_size, *x.shape[1:]) if x.dim() else (),
                dtype=x.dtype,
                device=device,
            ),
            inputs,
        )
        step = _Step(fake, stage_of or {})
        autocast = torch.autocast(device, dtype) if is_low else nullcontext()
        with running(inputs), step.watch:
            if is_low and casts_model:
                args, kwargs = cast_floats((args, kwargs), dtype)
            with nullcontext() if casts_model else autocast:
                output = fake(*args, **kwargs)
            if is_low:
                output = cast_floats(output, torch.float32)
            loss = step.loss(output, loss_fn)
            del output
            step.backward(loss)
    return step.traces


class _Step:
    """What each stage of a model has alive at every moment of a step."""

    def __init__(self, model: nn.Module, stage_of: Mapping[str, int]) -> None:
        """`model` is on fake tensors; `stage_of` has the stages of layers, by name."""
        finished: list[int] = []
        entered: list[int] = []
        num_stages = 1 + max(stage_of.values(), default=0)
        self.traces = [
            Trace(finished=finished, entered=entered) for _ in range(num_stages)
        ]
        known = [*model.parameters(), *model.buffers()]
        self.watch = Watch(known, self._note, num_stages, self._stage_now)
        self._now: dict[str, Any] = {"unit": 0, "stage": None, "backward": False}
        self._left = num_stages - 1
        """The stage whose layer was computed last, in a backward pass."""
        self._hook(model, stage_of)

    def loss(self, output: Any, loss_fn: Loss) -> torch.Tensor:
        """That of what the model returns, which the last stage computes."""
        trace = self.traces[-1]
        before, begin = self.watch.totals[-1], len(trace.moments)
        loss = loss_fn(output)
        since = [moment.others for moment in trace.moments[begin:]]
        trace.in_loss = max(since, default=before) - before
        trace.returned = sum(
            leaf.numel() * leaf.element_size()
            for leaf in tree_leaves(output)
            if isinstance(leaf, torch.Tensor)
        )
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self._now["backward"] = True
        for trace, total in zip(self.traces, self.watch.totals, strict=True):
            trace.activations = total
        loss.backward()
        for stage in range(len(self.traces)):
            self._note(stage)

    def _hook(self, model: nn.Module, stage_of: Mapping[str, int]) -> None:
        for index, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                finish = partial(_finish, self.traces[0].finished, index)
                parameter.register_post_accumulate_grad_hook(finish)
        for unit, block in enumerate(blocks(model), 1):
            _follow(block, self._now, "unit", unit, 0)
            enter = partial(_enter, self.traces[0].entered, unit)
            block.register_forward_pre_hook(enter)
        for name, stage in stage_of.items():
            layer = model.get_submodule(name)
            layer.register_forward_pre_hook(partial(self._receive, stage))
            _follow(layer, self._now, "stage", stage, None)

    def _stage_now(self) -> int | None:
        found: int | None = self._now["stage"]
        if not self._now["backward"]:
            return found
        # What is between layers there is of the one that it goes on from.
        self._left = self._left if found is None else found
        return self._left

    def _note(self, stage: int) -> None:
        trace, now = self.traces[stage], self._now
        total, num_finished = self.watch.totals[stage], len(trace.finished)
        trace.moments.append(Moment(now["unit"], total, num_finished, now["backward"]))

    def _receive(self, stage: int, layer: nn.Module, args: Any) -> None:
        for leaf in tree_leaves(args):
            if isinstance(leaf, torch.Tensor) and self.watch.stage_of(leaf) < stage:
                self.traces[stage].received += leaf.numel() * leaf.element_size()


@contextmanager
def running(inputs: Inputs) -> Iterator[None]:
    """Whatever a model raises in it says that it cannot be traced, and on what."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs what it raises
    try:
        yield
    except Exception as error:
        shapes = [
            f"{tuple(x.shape)}" for x in tree_leaves(inputs) if hasattr(x, "shape")
        ]
        first = next(iter(str(error).strip().splitlines()), "")
        raise UntraceableError(
            f"a step without data, on input of shape {', '.join(shapes)}, ends in "
            f"{type(error).__name__}: {shorten(first.removesuffix('.'), 160)}; "
            "give real samples by --input NAME, a variable with a batch"
        ) from error
    finally:
        logger.setLevel(level)


def _finish(finished: list[int], index: int, parameter: torch.Tensor) -> None:
    finished.append(index)
    parameter.grad = None  # how it is kept is for the strategy to say


def _enter(entered: list[int], unit: int, block: nn.Module, args: Any) -> None:
    entered.append(unit)


def _follow(
    block: nn.Module, now: dict[str, Any], key: str, number: int, outside: int | None
) -> None:
    """Have `now[key]` be `number` while `block` is computed, in both directions."""

    def begin(gradient: Any = None) -> None:
        now[key] = number

    def end(gradient: Any = None) -> None:
        # This block's input is another's output, whose hook may have run before.
        if now[key] == number:
            now[key] = outside

    def on_gradient(tensors: Any, hook: Callable[[Any], None]) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(hook)

    def enter(module: nn.Module, args: Any) -> None:
        begin()
        on_gradient(args, end)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        end()
        on_gradient(output, begin)

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave)


def trace_update(
    shapes: Shapes, optimizer: Optimizer | None, device: str, *, together: bool = True
) -> tuple[int, int]:
    """Bytes of the optimizer's state for fp32 parameters, and of its temporaries.

    Without `together` one parameter is updated after the other, also on a GPU.
    """
    kind: Any = optimizer or torch.optim.AdamW
    given: dict[str, Any] = {}
    if isinstance(kind, torch.optim.Optimizer):
        # Not its type: what `prepare` returns stands for the user's optimizer.
        given, kind = kind.defaults, kind.__class__
    taken = inspect.signature(kind).parameters
    given = {key: value for key, value in given.items() if key in taken}
    if not together and "foreach" in taken:
        given["foreach"] = False
    elif device == "cuda" and "foreach" in taken and not given.get("fused"):
        # What it is there by default: all tensors at once, with their temporaries.
        given["foreach"] = given.get("foreach") is not False
    if "foreach" not in taken or given.get("foreach"):
        return _trace_update(shapes, kind, given)
    # One by one, so that a large model's blocks need not be updated each: the
    # temporaries of one are freed in the update of the next.
    shapes = [tuple(shape) for shape in shapes]
    alone = {shape: _trace_update([shape], kind, given) for shape in set(shapes)}
    pairs = set(itertools.pairwise(shapes))
    temporaries = [_trace_update(pair, kind, given)[1] for pair in pairs]
    state = sum(alone[shape][0] for shape in shapes)
    return state, max([*temporaries, *(most for _, most in alone.values())])


def _trace_update(
    shapes: Shapes, kind: Callable[..., torch.optim.Optimizer], given: dict[str, Any]
) -> tuple[int, int]:
    temporaries: list[int] = [0]
    parameters = [nn.Parameter(torch.empty(tuple(s), device="meta")) for s in shapes]
    updates = kind(parameters, **given)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    updates.step()  # makes the state
    states = list(optimizer_tensors(updates))
    gradients = [p.grad for p in parameters if p.grad is not None]
    watch = Watch(
        [*parameters, *gradients, *states],
        lambda stage: temporaries.append(watch.totals[stage]),
    )
    with watch:
        updates.step()
    unique = {storage_key(s.untyped_storage()): s.untyped_storage() for s in states}
    return sum(s.nbytes() for s in unique.values()), max(temporaries)
