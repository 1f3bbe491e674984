"""What a rank held when it ran out of memory, and what would fit instead."""

import contextlib
import signal
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import nn

from labkit import timeouts
from labkit.compat.torch import tree_leaves
from labkit.control_groups import memory_available
from labkit.estimate import forecast
from labkit.estimate.trace import fake_copy
from labkit.rank.measuring.memory import memory_reader
from labkit.rank.measuring.memory import memory_total
from labkit.rank.measuring.step_profiler import StepProbe
from labkit.rank.telemetry.exceptions import chain
from labkit.rank.telemetry.exceptions import live_storages
from labkit.rank.telemetry.exceptions import safe_str
from labkit.records import COMPONENTS
from labkit.records import format_bytes
from labkit.strategies.prepared import Prepared
from labkit.train_options import TrainOptions

NUM_VARIABLES = 5
WORTH_A_LINE_BYTES = 2**20

Row = tuple[str, float]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up, on the device or on the host."""
    return any(
        isinstance(each, torch.OutOfMemoryError | MemoryError)
        or (
            isinstance(each, RuntimeError) and "can't allocate memory" in safe_str(each)
        )
        for each in chain(error)
    )


@dataclass
class Forecastable:
    """What a forecast needs to know of a prepared model: nothing real."""

    plain: nn.Module | None
    """The model as it was given to `prepare`, on the meta device."""
    optimizer: torch.optim.Optimizer
    """Its class and defaults, without parameters."""
    batch_size: int
    """The global batch."""
    options: TrainOptions
    inputs: tuple[torch.Tensor, ...] = ()
    """What the model was called with last, on the meta device."""
    shapes: list[Any] = field(default_factory=list)
    """Of that; None for what is no tensor."""

    def note_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A forward pre-hook."""
        if torch.jit.is_tracing():  # which would warn of what looks at a shape
            return
        shapes: list[Any] = []
        for x in args:
            if isinstance(x, torch.Tensor) and x.is_nested:
                return  # it has no shape in numbers
            shapes.append(getattr(x, "shape", None))
        if shapes != self.shapes:
            self.shapes = shapes
            self.inputs = tuple(
                torch.empty(x.shape, dtype=x.dtype, device="meta")
                for x in args
                if isinstance(x, torch.Tensor)
            )


def plain_copy(model: nn.Module) -> nn.Module | None:
    """The model on the meta device; None where it cannot be copied."""
    with contextlib.suppress(Exception):
        return fake_copy(model, "meta")
    return None


def bare_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer without parameters and state."""
    # Not by its own methods: a wrapper's may need what it never had.
    kind: Any = type(optimizer)
    bare: torch.optim.Optimizer = object.__new__(kind)
    vars(bare).update(vars(optimizer), param_groups=[], state=defaultdict(dict))
    return bare


def memory_held(
    error: BaseException,
    prepared: Sequence[Prepared],
    device: torch.device,
    variables: Mapping[str, Any],
) -> str:
    """Where `error` says that there is too little, a table of what this rank holds.

    By component where models were prepared, else the largest of the user's variables;
    and what is left of the device.
    """
    with contextlib.suppress(Exception):  # it is not to hide the error
        if is_out_of_memory(error):
            return table_of_memory(prepared, device, variables)
    return ""


def table_of_memory(
    prepared: Sequence[Prepared], device: torch.device, variables: Mapping[str, Any]
) -> str:
    rows: list[Row] = []
    if prepared:
        probe = StepProbe(prepared, device, sees_operators=False)
        probe.start()
        probe.look(is_after_backward=True)
        measured = probe.measurement()
        assert measured is not None
        rows = [(name, measured.memory[name]) for name in COMPONENTS[:5]]
    rows += rows_of_device(device, sum(size for _, size in rows))
    text = in_columns([(name.replace("_", " "), size) for name, size in rows if size])
    if not prepared and (largest := largest_variables(variables)):
        text += f"\nIts largest variables (del NAME frees one):\n{in_columns(largest)}"
    return text


def rows_of_device(device: torch.device, states: float) -> Sequence[Row]:
    """Of `device`: what is neither model state nor free, and what is free."""
    free: float
    total = memory_total(device)
    if device.type != "cuda":
        free = memory_available()
        return [
            ("this process in total", memory_reader(device)()),
            (f"free in the machine, of {format_bytes(total)}", free),
        ]
    allocated = torch.cuda.memory_allocated(device)
    reserved = torch.cuda.memory_reserved(device)
    free, _ = torch.cuda.mem_get_info(device)
    return [
        ("activations and other tensors", allocated - states),
        ("cached by PyTorch's allocator", reserved - allocated),
        ("in use otherwise (context, NCCL, other processes)", total - reserved - free),
        (f"free on the device, of {format_bytes(total)}", free),
    ]


def largest_variables(variables: Mapping[str, Any]) -> Sequence[Row]:
    """The user's variables that hold most bytes of tensors, the largest first."""
    rows = []
    for name, value in variables.items():
        if name.startswith("_"):
            continue
        if isinstance(value, nn.Module):
            value = [*value.parameters(), *value.buffers()]
        storages = dict(live_storages(tree_leaves(value)))
        size = sum(num_bytes for _, num_bytes in storages.values())
        if size >= WORTH_A_LINE_BYTES:
            rows.append((name, size))
    return sorted(rows, key=lambda row: -row[1])[:NUM_VARIABLES]


def in_columns(rows: Sequence[Row]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        f"  {name:{width}}  {size / 2**20:10,.2f} MiB" for name, size in rows
    )


def forecast_sentence(
    step: Forecastable, device: torch.device, world_size: int, num_local: int
) -> list[str]:
    """The forecast's sentence on a step like this one, by `world_size` ranks, of which
    `num_local` share the memory of this host; nothing where there is none.

    To be called in the main thread.
    """
    if step.plain is None or not step.inputs:
        return []
    shares = num_local if device.type == "cpu" else 1
    options = step.options
    with contextlib.suppress(Exception), at_most(timeouts.FORECAST_S):
        _, sentence = forecast(
            step.plain,
            step.inputs,
            world_sizes=[world_size],
            device_bytes=memory_total(device) / shares,
            batch_size=step.batch_size,
            optimizer=step.optimizer,
            accumulate=options.accumulate,
            precision=options.precision,
            activation_checkpointing=options.activation_checkpointing,
            device=device.type,
        )
        return [f"Forecast for batches of {step.batch_size}: {sentence}"]
    return []


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TimeoutError where the block takes longer; in the main thread."""

    def give_up(signum: int, frame: Any) -> None:
        raise TimeoutError

    former: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former or signal.SIG_DFL)
