"""What the notebook calls on an engine, between cells, to make it a rank."""

import faulthandler
import gc
import importlib
import linecache
import os
import sys
from pathlib import Path
from typing import Any

from labkit import serialization
from labkit.compat import c10d
from labkit.compat import data_parallel
from labkit.compat import ipython
from labkit.compat import torch
from labkit.key_server import Meeting
from labkit.rank.engine.cell_runner import CellRunner
from labkit.rank.group.process_group import own_key
from labkit.rank.group.recovery import freeze_libraries
from labkit.rank.group.recovery import recover_models
from labkit.rank.measuring.devices import why_lost
from labkit.rank.telemetry.stack_trace import dump_on_signal
from labkit.rank.telemetry.stack_trace import recorded_call
from labkit.records import SAFE_PATH
from labkit.records import Placement
from labkit.records import ScriptSpec

_runner: CellRunner | None = None

TORCH_GATES = (torch.GATE, c10d.GATE, data_parallel.GATE)


def load() -> tuple[str, int]:
    """Nothing but the import of this module, and with it of torch; the process."""
    return own_key()


def import_for_first_cells() -> None:
    """Import what the first cells would have to wait for.

    An optimizer imports torch._dynamo when the first one is made (1.6 s), a checkpoint
    its planner (0.3 s), the first traceback what formats it, and what was bound to a
    former group is rebound by way of DTensor's debug module. Not in a thread: two
    threads that import the same modules can leave one half made.
    """
    from IPython.core.ultratb import AutoFormattedTB

    torch.load_compiler()
    importlib.import_module("torch.distributed.checkpoint")
    importlib.import_module("torch.distributed.tensor.debug")
    _format_an_error(AutoFormattedTB(mode="Context"))


def _format_an_error(formatter: Any) -> None:
    try:
        raise RuntimeError
    except RuntimeError:
        formatter.structured_traceback(*sys.exc_info())


def warm_up() -> None:
    """Prepare for the first cells while the user reads."""
    import_for_first_cells()
    _format_an_error(runner().shell.InteractiveTB)
    gc.collect()
    freeze_libraries()


def use_working_directory() -> None:
    """Import from the working directory from now on, as a notebook's kernel does: what
    an engine itself needs has been imported, whatever lies there."""
    for variable, value in SAFE_PATH.items():
        if os.environ.get(variable) == value:
            del os.environ[variable]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path.cwd()))


def install(places: dict[tuple[str, int], tuple[Placement, str]]) -> list[str]:
    """Make this engine a rank: which one, and where it writes its stack, if it cannot
    answer when it is asked for it, by host and process id. What the user is to know of
    it; where it is one already, for another kernel, it stays as it is."""
    global _runner
    if _runner is not None:
        _runner.function, _runner.config = None, {}  # of a cell that has not come
        return []
    placement, stack_file = places[own_key()]
    from IPython import get_ipython

    for gate in (ipython.GATE, ipython.KERNEL_GATE, *TORCH_GATES):
        gate.check()

    _runner = CellRunner(get_ipython(), placement)
    use_working_directory()
    dump_on_signal(stack_file)
    torch.keep_sockets_of_workers_in(str(Path(stack_file).parent))
    # A crash in native code writes its stack to the engine's log.
    faulthandler.enable(ipython.stderr_fd())
    return _runner.notes


def runner() -> CellRunner:
    """This engine's runner; `install` made it."""
    assert _runner is not None, "install() comes first"
    return _runner


def own_names() -> set[str]:
    """Names of labkit's functions that the user's cells have for something else."""
    return runner().own_names()


def lost_device() -> str:
    """Why this rank can be in no group any more; "" where it can."""
    return why_lost(runner().group.device)


def join_group(
    store: Meeting,
    port: int,
    places: dict[tuple[str, int], Placement],
    is_part: bool,
) -> float:
    """Enter the next group, of ranks in these places by host and process id, which may
    be a part of the lab; the sum of all, all-reduced over it."""
    runner().group.leave()
    return runner().group.join(store, port, places, is_part=is_part)


def group_sequences() -> dict[str, int]:
    """How many collectives this rank has started in each of its groups."""
    return runner().group.sequences()


def prove_group(timeout_s: float, after_failure: bool) -> float | None:
    """The sum of all ranks over labkit's group as it is; None if it does not work, or
    is not the one of this rank: a cell has left it, or made one of its own.

    Models are made fit for a next step where the last one may have failed half-way.
    """
    group = runner().group
    if not group.in_place:
        return None
    try:
        found = group.prove(timeout_s)
    except RuntimeError:
        return None
    if group.can_abort and recorded_call(group.formed_at_ns) is not None:
        return None  # the GPU is in a collective still, of whatever group
    if after_failure:
        recover_models()
    return found


def receive_function(
    payload: bytes, with_rank: bool, sources: dict[str, tuple[Any, list[str]]]
) -> None:
    """Keep a pickled function for the next cell, and its source for tracebacks."""
    runner().function = (serialization.loads(payload), with_rank)
    receive_sources(sources)


def receive_sources(sources: dict[str, tuple[Any, list[str]]]) -> None:
    """Keep the notebook's cells, for tracebacks through its functions."""
    for name, (number, lines) in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        ipython.cell_numbers(runner().shell)[name] = number


def receive_script(fields: dict[str, Any]) -> None:
    """Keep a script for the next cell."""
    runner().function = (runner().program(ScriptSpec(**fields)), False)


def receive_config(payload: bytes) -> None:
    """Keep the next training cell's `--config`, pickled."""
    runner().config = serialization.loads(payload)
