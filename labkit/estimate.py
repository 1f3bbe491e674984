"""Predicts a rank's memory under every strategy before anything runs.

One training step of the plain model runs on fake tensors, which have shapes and no
data: it tells the bytes of activations, temporaries and gradients at every moment. What
each strategy keeps and gathers is added to that by arithmetic.
"""

import copy
import inspect
import itertools
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field
from functools import partial
from math import prod
from typing import TYPE_CHECKING
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.records import COMPONENTS
from labkit.records import PRECISIONS
from labkit.strategies.model_options import checkpoint_activations
from labkit.strategies.prepared import DTYPES
from labkit.strategies.prepared import blocks
from labkit.strategies.prepared import cast_floats
from labkit.strategies.zero import BUCKET_ELEMENTS

if TYPE_CHECKING:
    import pandas as pd

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")

Loss = Callable[[Any], torch.Tensor]
Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer]
Shapes = Sequence[Sequence[int]]
Memory = dict[str, float]


def estimate(
    model: nn.Module,
    x: torch.Tensor | tuple[torch.Tensor, ...],
    loss_fn: Loss | None = None,
    *,
    optimizer: Optimizer | None = None,
    world_sizes: Sequence[int],
    batch_size: int,
    accumulate: int = 1,
    precision: str = "fp32",
    activation_checkpointing: bool = False,
    device: str = "cpu",
    device_bytes: float | None = None,
) -> "pd.DataFrame":
    """Bytes of the fullest rank by (world_size, strategy), one column a component.

    The columns are `labkit.records.COMPONENTS`, each at its greatest within a step, as
    `Run.memory` has them. `model` is not changed, and may be on the meta device; of `x`
    only shapes and dtypes count, its first dimension gives way to the share of
    `batch_size`, the global batch, that a rank has. `loss_fn(output)` is a scalar; by
    default the cross-entropy of the output's last dimension. `optimizer` is one whose
    class and defaults are taken, or a class (AdamW without it). `single` has the whole
    batch on one rank. With `device_bytes` a column "fits" compares.

    Workspaces inside of kernels, and what the device and its communication libraries
    keep for themselves, are not in it.

    Raises ValueError for what cannot be estimated.
    """
    import pandas as pd

    check(model, x, world_sizes, batch_size, accumulate, precision)
    inputs = x if isinstance(x, tuple) else (x,)
    plan = _Plan(
        model,
        inputs,
        loss_fn or cross_entropy,
        optimizer,
        accumulate,
        precision,
        activation_checkpointing,
        device,
    )
    rows = {
        (world_size, strategy): plan.memory(strategy, world_size, batch_size)
        for world_size in world_sizes
        for strategy in STRATEGIES
    }
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(COMPONENTS))
    table.index = pd.MultiIndex.from_tuples(rows, names=["world_size", "strategy"])
    table = table.round().astype("int64")
    if device_bytes is not None:
        table["fits"] = table["total_peak"] <= device_bytes
    return table


def forecast(
    model: nn.Module,
    x: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    *,
    world_sizes: Sequence[int],
    device_bytes: float,
    batch_size: int | None = None,
    sequence: int | None = None,
    optimizer: Optimizer | str | None = None,
    accumulate: int = 1,
    activation_checkpointing: bool = False,
    **options: Any,
) -> tuple["pd.DataFrame", str]:
    """`estimate`, and a sentence that says what fits and what would.

    Without `x` the model takes token ids of shape (batch, `sequence`). `batch_size` is
    by default that of `x`. `optimizer` may be the name of a class of torch.optim.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}, no torch.nn.Module")
    if batch_size is None and x is not None:
        batch_size = len(x[0] if isinstance(x, tuple) else x)
    if batch_size is None:
        raise ValueError("give --batch-size B, the samples of all ranks together")
    if isinstance(optimizer, str):
        optimizer = optimizer_class(optimizer)
    find = partial(
        estimate,
        model,
        ids_for(model, sequence) if x is None else x,
        optimizer=optimizer,
        batch_size=batch_size,
        **options,
    )
    changes: dict[str, Any] = {
        "accumulate": accumulate,
        "activation_checkpointing": activation_checkpointing,
    }
    table = find(world_sizes=world_sizes, device_bytes=device_bytes, **changes)
    sentence = what_would_fit(
        lambda **change: find(world_sizes=[min(world_sizes)], **{**changes, **change}),
        table,
        device_bytes,
        batch_size=batch_size,
        **changes,
    )
    return table, sentence


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of torch.optim called `name`; ValueError with those that exist."""
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        known = [
            key
            for key, value in vars(torch.optim).items()
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        ]
        raise ValueError(
            f"--optimizer {name}: neither a variable nor a class of torch.optim, which "
            f"has: {', '.join(sorted(known))}"
        )
    return found


def what_would_fit(
    estimate_with: Callable[..., "pd.DataFrame"],
    table: "pd.DataFrame",
    device_bytes: float,
    *,
    batch_size: int,
    accumulate: int = 1,
    activation_checkpointing: bool = False,
) -> str:
    """One sentence or two: what fits at the least world size, and what would.

    `estimate_with(accumulate=K)` and `estimate_with(activation_checkpointing=True)`
    give the table with that option changed.
    """
    world_size = min(table.index.get_level_values("world_size"))

    def fitting(found: "pd.DataFrame") -> list[str]:
        peaks = found.loc[world_size]["total_peak"]
        return [name for name in STRATEGIES if peaks[name] <= device_bytes]

    here = f"{world_size} rank{'s' * (world_size > 1)} of {in_words(device_bytes)}"
    fits = fitting(table)
    if len(fits) == len(STRATEGIES):
        return f"On {here} every strategy fits."
    # Nobody asks on several ranks how one of them could do all the work.
    sought = set(STRATEGIES) - ({"single"} if world_size > 1 else set())
    least = table.loc[world_size]["total_peak"].astype(float)
    says = [
        f"On {here} {listed(fits)} fit{'s' * (len(fits) == 1)}."
        if fits
        else f"On {here} nothing fits: {least.idxmin()} needs least, "
        f"{in_words(least.min())}."
    ]
    ways = []
    known = set(fits) & sought
    if not activation_checkpointing and known < sought:
        found = fitting(estimate_with(activation_checkpointing=True))
        if gained := [name for name in found if name in sought - known]:
            ways.append(f"with --activation-checkpointing {listed(gained)} would")
            known |= set(gained)
    times = 2 * accumulate
    while times <= batch_size // world_size and known < sought:
        found = fitting(estimate_with(accumulate=times))
        if gained := [name for name in found if name in sought - known]:
            ways.append(f"with --accumulate {times} {listed(gained)} would")
            known |= set(gained)
        times *= 2
    for more in sorted(set(table.index.get_level_values("world_size")) - {world_size}):
        peaks = table.loc[more]["total_peak"]
        there = [
            n for n in STRATEGIES if n in sought - known and peaks[n] <= device_bytes
        ]
        if there:
            ways.append(f"on {more} ranks {listed(there)} would")
            known |= set(there)
    if ways:
        says.append(f"{'; '.join(ways)}.".capitalize())
    elif not known:
        says.append(
            "More ranks (--ranks), a smaller batch or --precision bf16 are left to try."
        )
    return " ".join(says)


def ids_for(model: nn.Module, sequence: int | None) -> torch.Tensor:
    """Token ids (1, T) for a model that begins with an Embedding, on the meta device.

    ValueError where it does not, or where T is not given.
    """
    first = next((m for m in model.modules() if not any(m.children())), None)
    if not isinstance(first, nn.Embedding):
        raise ValueError(
            f"the model begins with {type(first).__name__}, so that its input cannot "
            "be guessed; give --input NAME, a variable with a batch"
        )
    if sequence is None:
        raise ValueError(
            "the model begins with an Embedding, so it takes token ids of shape "
            "(batch, T); give --sequence T, or --input NAME, a variable with a batch"
        )
    return torch.empty(1, sequence, dtype=torch.int64, device="meta")


def check(
    model: Any,
    x: Any,
    world_sizes: Sequence[int],
    batch_size: Any,
    accumulate: Any,
    precision: str,
) -> None:
    """ValueError with what to do, unless `estimate` can use these arguments."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is {type(model).__name__}; an estimate needs a torch.nn.Module"
        )
    if any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters()):
        raise ValueError(
            "the model is sharded already, by a run or by hand; make it anew and "
            "estimate the plain model"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient")
    inputs = x if isinstance(x, tuple) else (x,)
    if not all(isinstance(each, torch.Tensor) and each.dim() for each in inputs):
        raise ValueError(
            f"the input is {type(x).__name__}; it must be a tensor, or a tuple of "
            "tensors, whose first dimension is the batch"
        )
    numbers = [*world_sizes, batch_size, accumulate]
    if not world_sizes or any(type(n) is not int or n < 1 for n in numbers):
        raise ValueError(
            f"ranks {list(world_sizes)}, batch size {batch_size!r}, accumulate "
            f"{accumulate!r}: all must be whole numbers from 1"
        )
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision is {precision!r}; choose one of: {', '.join(PRECISIONS)}"
        )


def cross_entropy(output: Any) -> torch.Tensor:
    """The loss that is assumed: cross-entropy of logits (..., classes), fp32."""
    logits = next(t for t in tree_leaves(output) if isinstance(t, torch.Tensor))
    if logits.dim() < 2:
        return logits.float().mean()
    logits = logits.flatten(0, -2)
    targets = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits, targets)


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def in_words(num_bytes: float) -> str:
    """Bytes in GiB or MiB, to three digits."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.3g} GiB"
    return f"{num_bytes / 2**20:.3g} MiB"


# ---- one step on fake tensors ----


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
    activations: int = 0

    def peak(self, extra: Callable[[Moment], float] = lambda moment: 0.0) -> float:
        """The greatest sum of what is alive and what `extra` adds to it."""
        return max(moment.others + extra(moment) for moment in self.moments)


class _Watch(TorchDispatchMode):
    """Counts the bytes of live storages that operators returned, as StepProbe does.

    Source: `torch.distributed._tools.mem_tracker` does likewise by category.
    """

    def __init__(self, known: Iterable[torch.Tensor], note: Callable[[int], None]):
        super().__init__()
        self._known = {storage_of(tensor)._cdata for tensor in known}
        self._alive: dict[int, tuple[int, Any]] = {}
        self._note = note
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(storage_of(leaf))
        self._note(self.total)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and key not in self._alive:
            self.total += storage.nbytes()
            reference = weakref.ref(storage, partial(self._forget, key))
            self._alive[key] = storage.nbytes(), reference

    def _forget(self, key: int, reference: Any) -> None:
        num_bytes, _ = self._alive.pop(key)
        self.total -= num_bytes


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


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
    inputs: tuple[torch.Tensor, ...],
    loss_fn: Loss,
    *,
    batch_size: int,
    dtype: torch.dtype,
    casts_model: bool,
    activation_checkpointing: bool,
    device: str,
) -> Trace:
    """A forward and backward pass on `batch_size` samples, without data.

    Below fp32 either the model is cast, or its operators (autocast).
    """
    trace = Trace()
    is_low = dtype is not torch.float32
    now = {"unit": 0, "backward": 0}

    def note(total: int) -> None:
        trace.moments.append(
            Moment(now["unit"], total, len(trace.finished), bool(now["backward"]))
        )

    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = fake_copy(model, device, dtype if is_low and casts_model else None)
        fake.train(model.training)
        if activation_checkpointing:
            checkpoint_activations(fake)
        batch = tuple(
            torch.empty((batch_size, *x.shape[1:]), dtype=x.dtype, device=device)
            for x in inputs
        )
        parameters = list(fake.parameters())
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    partial(_finish, trace.finished, index)
                )
        for unit, block in enumerate(blocks(fake), 1):
            _follow(block, unit, now, trace.entered)
        watch = _Watch([*parameters, *fake.buffers()], note)
        autocast = torch.autocast(device, dtype) if is_low else nullcontext()
        with watch:
            if is_low and casts_model:
                batch = cast_floats(batch, dtype)
            with nullcontext() if casts_model else autocast:
                output = fake(*batch)
            if is_low:
                output = cast_floats(output, torch.float32)
            loss = loss_fn(output)
            del output
            now["backward"] = 1
            trace.activations = watch.total
            loss.backward()
            note(watch.total)
    return trace


def _finish(finished: list[int], index: int, parameter: torch.Tensor) -> None:
    finished.append(index)
    parameter.grad = None  # how it is kept is for the strategy to say


def _follow(
    block: nn.Module, unit: int, now: dict[str, int], entered: list[int]
) -> None:
    """Keep the number of the block that is computed, in both directions."""

    def begin(gradient: Any = None) -> None:
        now["unit"] = unit

    def end(gradient: Any = None) -> None:
        # What this block takes, another gave: that one's hook may have come before.
        if now["unit"] == unit:
            now["unit"] = 0

    def on_gradient(tensors: Any, hook: Callable[[Any], None]) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(hook)

    def enter(module: nn.Module, args: Any) -> None:
        begin()
        entered.append(unit)
        on_gradient(args, end)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        end()
        on_gradient(output, begin)

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave)


def trace_update(
    shapes: Shapes, optimizer: Optimizer | None, device: str
) -> tuple[int, int]:
    """Bytes of the optimizer's state for fp32 parameters, and of its temporaries."""
    temporaries: list[int] = [0]
    parameters = [nn.Parameter(torch.empty(*s, device="meta")) for s in shapes]
    kind: Any = optimizer or torch.optim.AdamW
    given: dict[str, Any] = {}
    if isinstance(kind, torch.optim.Optimizer):
        given, kind = kind.defaults, type(kind)
    taken = inspect.signature(kind).parameters
    given = {key: value for key, value in given.items() if key in taken}
    if device == "cuda" and "foreach" in taken and not given.get("fused"):
        # What it is there by default: all tensors at once, with their temporaries.
        given["foreach"] = given.get("foreach") is not False
    updates = kind(parameters, **given)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    updates.step()  # makes the state
    states = [
        value
        for state in updates.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    gradients = [p.grad for p in parameters if p.grad is not None]
    with _Watch([*parameters, *gradients, *states], temporaries.append):
        updates.step()
    unique = {storage_of(state)._cdata: storage_of(state) for state in states}
    return sum(s.nbytes() for s in unique.values()), max(temporaries)


# ---- what each strategy adds ----


class _Plan:
    """The memory of one model by strategy; steps that are alike are traced once."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        loss_fn: Loss,
        optimizer: Optimizer | None,
        accumulate: int,
        precision: str,
        activation_checkpointing: bool,
        device: str,
    ) -> None:
        self.accumulate = accumulate
        self.width = DTYPES[precision].itemsize
        """Bytes of an element in what is computed."""
        self.is_cpu = device == "cpu"
        self._optimizer = optimizer
        self._device = device
        self._trace = partial(
            trace_step,
            model,
            inputs,
            loss_fn,
            dtype=DTYPES[precision],
            activation_checkpointing=activation_checkpointing,
            device=device,
        )
        self._traces: dict[tuple[int, bool], Trace] = {}
        self._updates: dict[tuple[Any, ...], tuple[int, int]] = {}
        parameters = list(model.parameters())
        self.shapes = [tuple(p.shape) for p in parameters]
        self.sizes = [p.numel() for p in parameters]
        self.trainable = [p.numel() if p.requires_grad else 0 for p in parameters]
        self.buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        units = {
            id(parameter): unit
            for unit, block in enumerate(blocks(model), 1)
            for parameter in block.parameters()
        }
        self.units = [units.get(id(parameter), 0) for parameter in parameters]
        self.num_units = 1 + len(blocks(model))
        self.largest_module = max(
            sum(p.numel() for p in module.parameters(recurse=False))
            for module in model.modules()
        )
        """Elements of the module that has most parameters of its own."""

    def memory(self, strategy: str, world_size: int, batch_size: int) -> Memory:
        ranks = 1 if strategy == "single" else world_size
        samples = -(-batch_size // (ranks * self.accumulate))
        casts = strategy not in ("single", "ddp")
        key = (samples, casts and self.width < 4)
        if key not in self._traces:
            self._traces[key] = self._trace(batch_size=samples, casts_model=key[1])
        trace = self._traces[key]
        if strategy in ("single", "ddp"):
            return self.replicated(trace, in_place=strategy == "ddp")
        if strategy in ("zero1", "zero2"):
            return self.zero(trace, ranks, stage=int(strategy[-1]))
        if strategy == "zero3":
            return self.zero3(trace, ranks)
        replicas = 2 if strategy == "hsdp" and ranks % 2 == 0 else 1
        return self.fsdp(trace, ranks // replicas)

    def update(self, shapes: Shapes) -> tuple[int, int]:
        key = tuple(map(tuple, shapes))
        if key not in self._updates:
            self._updates[key] = trace_update(shapes, self._optimizer, self._device)
        return self._updates[key]

    def trainable_of(self, shapes: Shapes) -> Shapes:
        pairs = zip(shapes, self.trainable, strict=True)
        return [shape for shape, is_trainable in pairs if is_trainable]

    def replicated(self, trace: Trace, *, in_place: bool) -> Memory:
        """One process, or DDP, whose gradients stay in its buckets."""
        whole = 4.0 * sum(self.trainable)
        state, temporaries = self.update(self.trainable_of(self.shapes))
        kept = 4.0 * sum(self.sizes) + self.buffers
        so_far = self.finished_bytes(trace, 4)
        is_whole = in_place or self.accumulate > 1

        def gradients(moment: Moment) -> float:
            return whole if is_whole else so_far[moment.num_finished]

        return self.components(
            trace,
            parameters=kept,
            gradients=whole,
            optimizer_state=state,
            total_peak=kept + state + max(trace.peak(gradients), whole + temporaries),
        )

    def fsdp(self, trace: Trace, num_shards: int) -> Memory:
        """Shards, and the whole of the block at work and of the root.

        Forward: a block is gathered in one buffer and copied out of it; the buffer
        stays until the next block's. Backward: the next block is gathered meanwhile;
        the gradients are copied to a buffer that stays until the next one's.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group`.
        """
        shards = [(-(-s[0] // num_shards), *s[1:]) for s in self.shapes]
        state, temporaries = self.update(self.trainable_of(shards))
        kept = 4.0 * sum(map(prod, shards)) + self.buffers
        is_sharded = num_shards > 1
        padded = [0.0] * self.num_units  # elements, with the shards' padding
        reduced = [0.0] * self.num_units
        for shard, unit, size in zip(shards, self.units, self.trainable, strict=True):
            padded[unit] += prod(shard) * num_shards
            reduced[unit] += prod(shard) * num_shards if size else 0
        gathered = [self.width * elements for elements in padded]
        buffer = [is_sharded * each for each in gathered]
        # gloo reduces in a copy of its own.
        copies = 1 + (self.is_cpu and is_sharded)
        whole = 4.0 * sum(self.trainable)
        kept_whole = whole if self.accumulate > 1 else 0.0
        before = self.neighbours(trace)
        after = {there: here for here, there in before.items()}
        by_unit = self.finished_by_unit(trace)

        def gathering(moment: Moment) -> float:
            unit = moment.unit
            if not moment.is_backward:
                entered = unit or max(trace.entered, default=0)
                total = gathered[0] + buffer[entered]
                return total + (gathered[unit] if unit else 0) + kept_whole
            done = by_unit[moment.num_finished]
            total = gathered[0] + self.width * done[0]
            # Of blocks that are through there are shards, of this one the whole.
            for other in range(1, self.num_units):
                if other == unit:
                    total += self.width * done[other]
                elif done[other]:
                    total += 4 * reduced[other] / num_shards
                    if kept_whole:
                        total -= 4 * done[other]
            if unit:
                prefetched = before.get(unit, 0)
                reducing = after.get(unit, 0)
                total += gathered[unit] + buffer[prefetched] * bool(prefetched)
                total += 4 * reduced[reducing] * bool(reducing)
            return total + kept_whole

        peak = trace.peak(gathering)
        # When a block's gradients are copied, to be reduced.
        sharded = 0.0
        for unit in [*reversed(trace.entered), 0]:
            ends = next(
                moment.others
                for moment in trace.moments
                if by_unit[moment.num_finished][unit] == by_unit[-1][unit]
            )
            gradient = kept_whole - 4 * sharded
            if not kept_whole:
                gradient = self.width * reduced[unit]
            buffers = 4 * reduced[unit]
            prefetched = before.get(unit, 0)
            peak = max(
                peak,
                ends
                + gathered[0]
                + buffer[prefetched] * bool(prefetched)
                + max(gradient + buffers, buffers * (copies + 1 / num_shards))
                + 4 * sharded / num_shards,
            )
            sharded += reduced[unit]
        own = 4.0 * sum(reduced) / num_shards
        return self.components(
            trace,
            parameters=kept,
            gradients=kept_whole or own,
            optimizer_state=state,
            communication_buffers=gathered[0] + max([0.0, *gathered[1:]]),
            total_peak=kept + state + max(peak, own + temporaries),
        )

    def zero(self, trace: Trace, ranks: int, *, stage: int) -> Memory:
        """Whole parameters, a part of what updates them, and a bucket of gradients.

        Gradients are copied to the bucket, to be reduced; those of the parameters that
        a rank's part touches go on to a buffer, and in the step become a flat part in
        fp32. Stage 2 does so within the backward pass, stage 1 after it.

        Source: `deepspeed.runtime.zero.stage_1_and_2`.
        """
        width = self.width
        total = sum(self.trainable)
        part = -(-total // (2 * ranks)) * 2
        state, temporaries = self.update([(part,)])
        bucket = self.bucket()
        own = width * self.touched(part, ranks)
        kept = width * sum(self.sizes) + self.buffers + state + 4.0 * part
        sizes = [0, *(self.trainable[index] for index in trace.finished)]
        so_far = list(itertools.accumulate(sizes))
        # What earlier microbatches of the step have left.
        earlier = 0.0
        if self.accumulate > 1:
            earlier = width * total if stage == 1 else own

        def gradients(moment: Moment) -> float:
            if not moment.is_backward:
                return earlier
            number = moment.num_finished
            if stage == 1:
                return width * bucket + (earlier or width * so_far[number])
            held = width * bucket + earlier
            if sizes[number] > bucket:
                # It is reduced by itself, sliced by the ranks it is for.
                held += width * sizes[number]
                sliced = width * min(part, sizes[number])
                is_first = so_far[number - 1] <= bucket
                return held + (max(own, sliced) if is_first else own + sliced)
            return held + own * (so_far[number] > bucket)

        peak = max(
            trace.peak(gradients),
            width * bucket + own + (width * total if stage == 1 else earlier),
            4 * part + max(temporaries, own),
        )
        return self.components(
            trace,
            parameters=width * sum(self.sizes) + self.buffers,
            gradients=width * total if stage == 1 else own,
            optimizer_state=state,
            master_parameters=4.0 * part,
            communication_buffers=width * bucket,
            total_peak=kept + peak,
        )

    def bucket(self) -> int:
        """Elements of DeepSpeed's buckets, as `labkit.strategies.zero` sets them."""
        return min(BUCKET_ELEMENTS, sum(self.sizes) // 8 + 1)

    def zero3(self, trace: Trace, ranks: int) -> Memory:
        """A part of everything, and what is gathered of the parameters.

        A module's parameters are gathered for its forward and its backward pass, and
        as many as a bucket holds ahead of it. The bucket of gradients is always there;
        to be reduced, they are copied.

        Source: `deepspeed.runtime.zero.partitioned_param_coordinator` and `stage3`.
        """
        width = self.width
        own = sum(-(-size // ranks) for size in self.sizes)
        part = sum(-(-size // ranks) for size in self.trainable)
        state, temporaries = self.update([(part,)])
        bucket = self.bucket()
        alive = min(sum(self.sizes), self.largest_module + bucket)
        kept = width * (own + part + bucket) + self.buffers + state + 4.0 * part
        sizes = [0, *(self.trainable[index] for index in trace.finished)]
        copies = 1 + self.is_cpu  # gloo reduces in a copy of its own

        def gathering(moment: Moment) -> float:
            size = sizes[moment.num_finished]
            return width * (alive + copies * size * (size > bucket))

        reduce = width * (copies * bucket + alive) + trace.moments[-1].others
        return self.components(
            trace,
            parameters=width * own + self.buffers,
            gradients=width * part,
            optimizer_state=state,
            master_parameters=4.0 * part,
            communication_buffers=width * (bucket + alive),
            total_peak=kept
            + max(trace.peak(gathering), reduce, 4 * part + temporaries),
        )

    def components(self, trace: Trace, **found: float) -> Memory:
        zeros = dict.fromkeys(COMPONENTS, 0.0)
        return {**zeros, "activations_peak": trace.activations, **found}

    def touched(self, part: int, ranks: int) -> int:
        """Elements of all parameters that a rank's part of the flat whole touches, on
        the rank where they are most."""
        ends = list(itertools.accumulate(self.trainable))
        return max(
            sum(
                size
                for end, size in zip(ends, self.trainable, strict=True)
                if end > rank * part and end - size < (rank + 1) * part
            )
            for rank in range(ranks)
        )

    def finished_bytes(self, trace: Trace, width: int) -> list[float]:
        """Bytes of complete gradients, by how many there are."""
        totals = [0.0]
        for index in trace.finished:
            totals.append(totals[-1] + width * self.trainable[index])
        return totals

    def finished_by_unit(self, trace: Trace) -> list[list[float]]:
        """Elements of complete gradients, by how many there are and by block."""
        totals = [[0.0] * self.num_units]
        for index in trace.finished:
            row = list(totals[-1])
            row[self.units[index]] += self.trainable[index]
            totals.append(row)
        return totals

    def neighbours(self, trace: Trace) -> dict[int, int]:
        """For each block the one before it in the forward pass."""
        return {here: there for there, here in itertools.pairwise(trace.entered)}
