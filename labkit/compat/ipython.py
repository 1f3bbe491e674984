"""The private parts of IPython and ipykernel that labkit uses."""

import argparse
import asyncio
import contextlib
import pdb
import sys
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

from labkit.compat.gate import Gate

GATE = Gate("ipython")
KERNEL_GATE = Gate("ipykernel")
_SHELL = "IPython.core.interactiveshell:InteractiveShell"


@GATE.needs("IPython.core.compilerop:CachingCompiler._filename_map")
def cell_numbers(shell: Any) -> dict[str, int]:
    """The number of each cell by the file name of its code, as tracebacks have it.

    It can be added to: a cell of the notebook keeps its number on a rank.
    """
    numbers: dict[str, int] = shell.compile._filename_map
    return numbers


@GATE.needs(f"{_SHELL}._showtraceback")
def wrap_send_error(
    shell: Any, wrap: Callable[[Callable[..., None]], Callable[..., None]]
) -> None:
    """Replace what sends a rendered traceback, (type, error, lines), by `wrap` of it.

    IPython says that subclasses may override it; labkit did not make the shell.
    """
    shell._showtraceback = wrap(shell._showtraceback)


EVENTS = "IPython.core.events"
"""The module that calls hooks, around a cell, and has their errors shown."""


def refuse_cells(shell: Any, reason: Callable[[], BaseException | None]) -> None:
    """Have the shell show `reason()` instead of running a cell's code, if it gives one.

    An event before the cell cannot keep it from running, and a transformer of its
    syntax tree can.
    """
    from IPython.core.error import InputRejected

    class Refusing:
        def visit(self, node: Any) -> Any:
            if error := reason():
                raise InputRejected("so the cell did not run") from error
            return node

    shell.ast_transformers.append(Refusing())


def refuse_extension(name: str, reason: str) -> None:
    """Have `%load_ext name`, of a module that is there, be an error with the reason."""
    from IPython.core.error import UsageError

    def refuse(shell: Any) -> None:
        raise UsageError(reason)

    vars(sys.modules[name])["load_ipython_extension"] = refuse


def keep_no_errors(shell: Any) -> None:
    """Have no traceback kept in the history, for which IPython renders it again.

    It does so since 9.1; before, nobody calls this.
    """
    shell._format_exception_for_storage = lambda *args, **more: {}


def display_pages(shell: Any) -> None:
    """Display what goes to a pager, as `print?` does: that of a notebook shows what
    comes with a reply, which an engine's does not."""
    from IPython.core import page

    shell.set_hook("show_in_pager", page.as_hook(page.display_page), 0)


def help_on(shell: Any, value: Any, name: str, *, with_source: bool) -> str:
    """What IPython shows of a function or a class, without colours."""
    found = shell.inspector.info(value, name, detail_level=int(with_source))
    return "\n".join(
        f"{title}:{separator}{found[field]}"
        for title, field, separator in (
            ("Signature", "definition", " "),
            ("Init signature", "init_definition", " "),
            ("Docstring", "docstring", "\n"),
            ("Source", "source", "\n"),
            ("File", "file", " "),
            ("Type", "type_name", " "),
        )
        if found[field]
    )


MOST_COMPLETIONS = 1000
"""More than anyone reads."""


@GATE.needs("IPython.core.completer:IPCompleter._complete")
def completer_of(shell: Any) -> Callable[[str], tuple[int, list[tuple[str, str]]]]:
    """What completes code by the shell's variables: where what it completes begins, and
    what may stand there, each with its type.

    Without jedi, which reads source files, at first for seconds. What is public of this
    warns that it is provisional, and to silence that would put back the filters of
    warnings that another thread sets meanwhile.
    """
    from IPython.core import completer

    own = completer.IPCompleter(
        shell=shell,
        namespace=shell.user_ns,
        global_namespace=shell.user_global_ns,
        use_jedi=False,
    )

    def completed(code: str) -> tuple[int, list[tuple[str, str]]]:
        _, _, line = code.rpartition("\n")
        results = own._complete(
            full_text=code,
            cursor_line=code.count("\n"),
            cursor_pos=len(line),
        ).values()
        found = [
            (len(code) - len(result["matched_fragment"]), each)
            for result in results
            for each in result["completions"]
        ]
        start = min((place for place, _ in found), default=len(code))
        words = {code[start:at] + each.text: each.type or "" for at, each in found}
        return start, [*words.items()][:MOST_COMPLETIONS]

    return completed


@KERNEL_GATE.needs(
    "ipykernel.iostream:OutStream._parent_header_global",
    "ipykernel.zmqshell:ZMQDisplayPublisher._parent_header_global",
)
def leave_to_threads(outputs: Iterable[Any], header: dict[str, Any]) -> None:
    """Make output of other threads than the main one a part of the request `header`.

    `set_parent` would do so for the main thread too.
    """
    for each in outputs:
        each._parent_header_global = header


@KERNEL_GATE.needs(
    "ipykernel.kernelbase:Kernel._publish_status",
    "ipykernel.kernelbase:Kernel._publish_execute_input",
)
def answer_in_short(
    kernel: Any,
    of: Callable[[dict[str, Any]], bool],
    adding: Callable[[], dict[str, Any]],
) -> None:
    """Answer a request with one message, not with four, if `of(its message)`.

    Neither its code nor its status is published, and the reply does not say when it
    began, a date that takes long to parse: the sender knows. The reply's content has
    also what `adding` returns, which is JSON.
    """
    publish_status = kernel._publish_status
    publish_input = kernel._publish_execute_input
    init_metadata = kernel.init_metadata
    finish_metadata = kernel.finish_metadata

    def status(state: str, channel: str, parent: Any = None) -> None:
        if not of(parent or kernel.get_parent(channel)):
            publish_status(state, channel, parent)

    def execute_input(code: str, parent: dict[str, Any], number: int) -> None:
        if not of(parent):
            publish_input(code, parent, number)

    def metadata(parent: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = init_metadata(parent)
        if of(parent):
            found.pop("started", None)
        return found

    def finished(
        parent: dict[str, Any], found: dict[str, Any], content: dict[str, Any]
    ) -> Any:
        if of(parent):
            content.update(adding())
        return finish_metadata(parent, found, content)

    kernel._publish_status, kernel._publish_execute_input = status, execute_input
    kernel.init_metadata, kernel.finish_metadata = metadata, finished


def count_published(kernel: Any) -> Callable[[], int]:
    """Have it counted how many messages a kernel publishes from now on, from whatever
    thread; what says how many."""
    socket = kernel.iopub_socket
    thread = getattr(socket, "io_thread", socket)  # ipyparallel gives that itself
    send = thread.send_multipart
    num_sent = 0

    def send_and_count(*args: Any, **more: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        send(*args, **more)

    thread.send_multipart = send_and_count
    return lambda: num_sent


Taking = Callable[[], Iterator[tuple[dict[str, Any], str]]]
"""Takes from a stream what it holds: each text, with the request that it belongs to."""


@KERNEL_GATE.needs("ipykernel.iostream:OutStream._flush_buffers")
def wrap_taking(stream: Any, wrap: Callable[[Taking], Taking]) -> None:
    """Put `wrap(take)` in the place of what takes texts from `stream` to send them, one
    after the other: the next is asked for when one is sent."""
    stream._flush_buffers = wrap(stream._flush_buffers)


@KERNEL_GATE.needs(
    "ipykernel.iostream:OutStream._original_stdstream_fd",
    "ipykernel.iostream:OutStream._original_stdstream_copy",
)
def captured(stream: Any) -> tuple[int, int] | None:
    """The file descriptor that ipykernel captures for a stream, and where it went
    before, the log; None where it captures none."""
    if getattr(stream, "watch_fd_thread", None) is None:
        return None
    return stream._original_stdstream_fd, stream._original_stdstream_copy


@KERNEL_GATE.needs("ipykernel.iostream:OutStream._original_stdstream_copy")
def stderr_fd() -> int:
    """Where the process's own stderr goes, which ipykernel captures: the log."""
    found = getattr(sys.stderr, "_original_stdstream_copy", None)
    return 2 if found is None else found


@KERNEL_GATE.needs("ipykernel.kernelbase:Kernel._allow_stdin")
def allows_input() -> bool | None:
    """Whether this kernel's front end lets the running cell ask the user; None outside
    a kernel."""
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return None if kernel is None else bool(kernel._allow_stdin)


def drop_debuggers(shell: Any) -> None:
    """Drop the debuggers that IPython keeps for the next error, and Python, since
    3.13, for the next `set_trace`."""
    shell.InteractiveTB.pdb = None
    if hasattr(pdb.Pdb, "_last_pdb_instance"):
        pdb.Pdb._last_pdb_instance = None


@contextlib.contextmanager
def no_running_loop() -> Iterator[None]:
    """In this block asyncio lets another loop run within the kernel's.

    The kernel runs a cell that awaits on its own loop, which ipyparallel 9.2 with
    ipykernel 7.4 cannot: the reply never comes.
    """
    kernel_loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(kernel_loop)


def options_of(parser: argparse.ArgumentParser) -> list[Any]:
    """The arguments that a magic takes, which argparse lists in its help alone."""
    return parser._actions
