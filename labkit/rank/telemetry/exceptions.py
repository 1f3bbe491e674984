"""Formats the exception that ended a cell, and frees what its traceback holds."""

import contextlib
import gc
import linecache
import runpy
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from labkit.checks import UserError
from labkit.checks import is_raised_by_labkit
from labkit.compat.c10d import local_part
from labkit.compat.ipython import keep_no_errors
from labkit.compat.ipython import wrap_send_error
from labkit.compat.torch import storage_key
from labkit.records import FUNCTION_NAME

SHOWN_FRAMES = 15
"""Of each end of a traceback: IPython takes a millisecond for a frame of a library, and
more for one of the notebook."""
_SCRIPTS = "labkit.rank.scripts."
"""What runs a script, between the cell and the script's own lines."""
LIBRARIES = {"labkit", "torch", "deepspeed"}
"""Which call us: a refusal comes out of their hooks."""
CALLED = {
    *("IPython", "PIL", "cloudpickle", "ipykernel", "ipyparallel", "matplotlib"),
    *("numpy", "pandas", "psutil", "pyarrow", "safetensors", "zmq"),
}
"""Which we call: what fails there may be a fault of ours. So does Python's own."""

FIT = "Session.fit"
CALLS_OF_FIT = ("Scores.__call__", "Prepared.train_batch")
"""Where it calls what is the user's."""
PASS_ON = ("__getattr__", "__torch_dispatch__", "__torch_function__")
"""Methods that see an operation, and have it done, or ask what they stand for."""


class TextOnlyError(Exception):
    """Stands in for an exception that cannot be shown or kept: only its text."""


def safe_str(error: BaseException) -> str:
    """`str(error)`, also of an exception whose `__str__` raises."""
    try:
        return str(error)
    except BaseException as problem:
        return f"(its str() raised {type(problem).__name__})"


def run_all(steps: Iterable[Callable[[], Any]]) -> BaseException | None:
    """Run every step, whichever of them fails; the first error there was."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            first = error if first is None else first
    return first


def where_in_cell(
    error: BaseException, cell_files: dict[str, Any], script: str = ""
) -> str:
    """The innermost line of the notebook, or of the file of a script, in an error's
    traceback, or ""."""
    found = ""
    for frame, line_number in traceback.walk_tb(error.__traceback__):
        filename = frame.f_code.co_filename
        if filename in cell_files or filename == script:
            line = linecache.getline(filename, line_number).strip()
            if FUNCTION_NAME in line:  # the call is labkit's
                continue
            place = f"{Path(script).name}, " if filename == script else ""
            found = f"{place}line {line_number}: {line}"
    return found


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it came of (`__cause__`, `__context__`), a group's members."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]
            if isinstance(each, BaseExceptionGroup):
                waiting += each.exceptions


def raise_from_scripts(shell: Any) -> None:
    """Have `%run` raise what its script raises, which IPython only shows."""
    execfile = shell.safe_execfile

    def safe_execfile(
        file: str,
        where: dict[str, Any],
        *args: Any,
        exit_ignore: bool = False,
        **more: Any,
    ) -> None:
        try:
            with contextlib.suppress(SystemExit) if exit_ignore else nullcontext():
                execfile(file, where, *args, **{**more, "raise_exceptions": True})
        finally:
            if where is shell.user_ns:
                # Of `%run -i`, which leaves it: processes that later cells spawn would
                # run the script again.
                where.pop("__file__", None)

    def safe_run_module(name: str, where: dict[str, Any]) -> None:
        try:
            where |= runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:
                raise

    shell.safe_execfile = safe_execfile
    shell.safe_run_module = safe_run_module


def show_in_short(shell: Any, on_shown: Callable[[BaseException], None]) -> None:
    """Have IPython's `shell` show any exception, and soon, and call `on_shown` with it.

    One may raise when it is formatted, or come with a thousand frames
    (RecursionError), for which IPython would take half a minute.
    SystemExit is shown like any other.
    """
    show = shell.showtraceback
    render = shell.InteractiveTB.structured_traceback

    def showtraceback(
        exc_tuple: Any = None, *args: Any, exception_only: bool = False, **more: Any
    ) -> None:
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if error is not None:
            on_shown(error)
        show(exc_tuple, *args, **more)

    def structured_traceback(
        kind: Any, error: Any, frames: Any = None, *args: Any, **more: Any
    ) -> list[str]:
        for each in chain(error):
            end_at_users_line(each)
        num_frames = len(of_users(frames))
        for each in chain(error):
            each.__traceback__ = shortened(each.__traceback__)
        frames = shortened(frames)
        if error is not None and not has_str(error):
            error = TextOnlyError(safe_str(error))
        lines: list[str] = render(kind, error, frames, *args, **more)
        num_shown = len(list(traceback.walk_tb(frames)))
        if num_shown < num_frames:
            lines.append(f"({num_shown} of {num_frames} frames)")
        return lines

    def telling(send: Callable[..., None]) -> Callable[..., None]:
        def send_lines(kind: Any, error: Any, lines: list[str]) -> None:
            send(kind, TextOnlyError(safe_str(error)), lines)

        return send_lines

    shell.showtraceback = showtraceback
    wrap_send_error(shell, telling)
    shell.InteractiveTB.structured_traceback = structured_traceback
    keep_no_errors(shell)
    # Said after a SystemExit, which has ended no more than the cell.
    warnings.filterwarnings("ignore", "To exit: use")


def has_str(error: BaseException) -> bool:
    try:
        str(error)
    except BaseException:
        return False
    return True


def of_users(frames: TracebackType | None) -> list[TracebackType]:
    """A traceback without the frames of IPython between a cell and the script that it
    runs, and those of labkit that only pass on."""
    every: list[TracebackType] = []
    while frames is not None:
        every.append(frames)
        frames = frames.tb_next
    begins = next((at for at, each in enumerate(every) if is_of_scripts(each)), 0)
    every = every[begins:]  # and not the cell's one line, which is ours too
    every = without_fit([each for each in every if not passes_on(each)])
    every = without_ours(every)
    inner = [not is_machinery(each) for each in every]
    return [
        each
        for place, each in enumerate(every)
        if inner[place] or (place == 0 and not begins) or not any(inner[place:])
    ]


def shortened(frames: TracebackType | None) -> TracebackType | None:
    """A traceback's first and last frames; of a recursion the first two rounds."""
    every = of_users(frames)
    frames = None
    if len(every) > 2 * SHOWN_FRAMES:
        rounds: Counter[Any] = Counter()
        kept = []
        for each in every:
            # By identity: the code that a compiler has made may have no hash.
            place = id(each.tb_frame.f_code), each.tb_lineno
            rounds[place] += 1
            if rounds[place] <= 2:
                kept.append(each)
        every = kept
    if len(every) > 2 * SHOWN_FRAMES:
        every = every[:SHOWN_FRAMES] + every[-SHOWN_FRAMES:]
    for each in reversed(every):
        frames = TracebackType(frames, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return frames


def end_at_users_line(error: BaseException) -> None:
    """Cut off the frames that lead from the user's line to where labkit refuses it: the
    message says all there is to know, and our source would show it a second time."""
    is_refusal = isinstance(error, ValueError | UserError)
    if not is_refusal or not error.__traceback__ or not is_raised_by_labkit(error):
        return
    frames: TracebackType | None = error.__traceback__
    users: TracebackType | None = None
    while frames is not None:
        if is_users(frames):
            users = frames
        frames = frames.tb_next
    if users is not None:
        users.tb_next = None


def package_of(frame: TracebackType) -> str:
    return str(frame.tb_frame.f_globals.get("__name__")).split(".")[0]


def is_users(frame: TracebackType) -> bool:
    """Whether it is of the notebook, or of a module or a library that it uses."""
    package = package_of(frame)
    is_ours = package in LIBRARIES or package in CALLED or is_machinery(frame)
    return not is_ours and package not in sys.stdlib_module_names


def is_of_scripts(frame: TracebackType) -> bool:
    """Whether it is what runs a script, called by the cell."""
    return str(frame.tb_frame.f_globals.get("__name__")).startswith(_SCRIPTS)


def is_machinery(frame: TracebackType) -> bool:
    """Whether it is IPython's, or ours, and not of what runs by it."""
    module = str(frame.tb_frame.f_globals.get("__name__"))
    return module.startswith("IPython.") or module == __name__ or is_of_scripts(frame)


def passes_on(frame: TracebackType) -> bool:
    """Whether it is of a mode of ours, or a kind of tensor."""
    return frame.tb_frame.f_code.co_name in PASS_ON and package_of(frame) == "labkit"


def without_fit(every: list[TracebackType]) -> list[TracebackType]:
    """Frames without those by which `fit` calls the model and the functions that it was
    given, or begins the backward pass: what fails there is no fault of its own."""
    names = [
        each.tb_frame.f_code.co_qualname if package_of(each) == "labkit" else ""
        for each in every
    ]
    if FIT not in names:
        return every
    begin = names.index(FIT)
    ends = [at for at, name in enumerate(names) if name.startswith(CALLS_OF_FIT)]
    end = max(ends, default=begin) + 1
    if end < len(every) and package_of(every[end]) != "labkit":
        return every[:begin] + every[end:]
    return every


def without_ours(every: list[TracebackType]) -> list[TracebackType]:
    """Frames without those of labkit that have led on to a line of the user's: what
    fails there is no fault of ours. What that line calls of labkit stays."""
    last = max((at for at, each in enumerate(every) if is_users(each)), default=-1)
    return [e for at, e in enumerate(every) if at > last or package_of(e) != "labkit"]


def clear_frames(error: BaseException, shell: Any) -> None:
    """Clear the frames that `error` went through, and IPython's references to it.

    A traceback holds all local variables of what failed: gigabytes of activations, as
    long as nothing else fails. Source: https://github.com/pytorch/pytorch/issues/36874
    """
    cleared: set[FrameType] = set()
    for each in chain(error):
        for frame, _ in traceback.walk_tb(each.__traceback__):
            clear_with_callers(frame, cleared)
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        with contextlib.suppress(AttributeError):
            delattr(sys, name)
    shell.InteractiveTB.tb = None


def clear_with_callers(frame: FrameType | None, cleared: set[FrameType]) -> None:
    """Clear a frame, and those that have called it, which a traceback that is shown in
    short may lack, up to the one that still runs or those that are `cleared`.

    What shows a traceback has looked at their variables, and with that Python (before
    3.13) has made copies, which go as they are looked at again. What these hold would
    be left to the garbage collector, by which the workers of a DataLoader end no sooner
    than 5 s later, each. One that the code has kept, by `locals()`, stays as it is.
    """
    with contextlib.suppress(RuntimeError):  # of one that runs
        while frame is not None and frame not in cleared:
            frame.clear()
            cleared.add(frame)
            copies = [each for each in gc.get_referents(frame) if type(each) is dict]
            # Of the frame, of the list, and two of the call that asks.
            if all(sys.getrefcount(each) <= 4 for each in copies):
                _ = frame.f_locals
            del copies
            frame = frame.f_back


def drop_partial_imports() -> None:
    """Forget the modules of packages that an exception kept from being imported.

    Python forgets the package itself, which would be imported again, without them.
    """
    for name in sorted(sys.modules):
        package = name.rpartition(".")[0]
        if package and package not in sys.modules:
            del sys.modules[name]


def freed_by(free: Callable[[], None], device: torch.device) -> int:
    """Bytes of tensors that `free`, and a collection of garbage, did away with.

    On a GPU by its allocator. On the CPU those of tensors that Python can see: what
    autograd alone had kept is not among them.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        free()
        gc.collect()
        return max(0, before - torch.cuda.memory_allocated(device))
    storages = dict(live_storages(gc.get_objects()))
    free()
    gc.collect()
    return sum(size for held, size in storages.values() if held.expired())


def live_storages(
    objects: Iterable[Any],
) -> Iterator[tuple[int, tuple[StorageWeakRef, int]]]:
    """By storage, of all tensors among `objects`: a weak reference to it, its bytes."""
    is_tensor: dict[type, bool] = {}
    for each in objects:
        kind = type(each)
        if kind not in is_tensor:
            is_tensor[kind] = issubclass(kind, torch.Tensor)
        if not is_tensor[kind]:
            continue
        # Some have no storage: fake, sparse and half-made ones.
        with contextlib.suppress(Exception):
            tensor = local_part(each)
            if tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                yield storage_key(storage), (StorageWeakRef(storage), storage.nbytes())
