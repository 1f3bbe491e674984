"""Runs the checks one after the other, each within its time."""

import contextlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit import timeouts
from labkit.notebook.execution.errors import in_one_line
from labkit.notebook.kernel.background import Job
from labkit.notebook.runs.persistence import FOLDER_VARIABLE
from labkit.selftest.bench import Bench
from labkit.selftest.bench import CheckFailedError
from labkit.selftest.machine import Machine
from labkit.selftest.machine import find
from labkit.selftest.report import FAILED
from labkit.selftest.report import LOOK
from labkit.selftest.report import NOT_APPLICABLE
from labkit.selftest.report import NOT_RUN
from labkit.selftest.report import OK
from labkit.selftest.report import Line
from labkit.selftest.report import Report
from labkit.selftest.table import Check

LOOK_S = 0.1
"""How often it is seen whether a check is over."""
ENDS_S = 20.0
"""A check ends, once its lab was stopped."""


def run_checks(
    checks: Sequence[Check],
    machine: Machine,
    start_options: Mapping[str, Any],
    *,
    num_ranks: int,
    device: str,
    backend: str,
    on_check: Callable[[str], None] = lambda what: None,
    on_stage: Callable[[str], None] = lambda text: None,
) -> Report:
    """Run `checks` on a lab of their own.

    An interrupt ends them all: the report then has what was found until it came.
    """
    report = Report(machine, find(machine, num_ranks=num_ranks, device=device))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix="labkit-check-",
        ignore_cleanup_errors=True,  # a check that did not end may write there
    ) as folder:
        bench = Bench(Path(folder), machine, start_options, on_stage)
        with _runs_in(bench.folder / "runs"):
            name, what = "start", "start"
            try:
                on_check(what)
                report.lines.append(start(bench))
                is_started = report.lines[0].state == OK
                for check in checks:
                    name, what = check.name, check.what
                    on_check(what)
                    reason = check.not_applicable(
                        num_ranks=num_ranks, device=device, backend=backend
                    )
                    if reason:
                        line = Line(name, what, NOT_APPLICABLE, reason)
                    elif not is_started:
                        line = Line(name, what, NOT_RUN, "no lab started")
                    else:
                        line = examine(check, bench)
                    report.lines.append(line)
                report.is_whole = True
            except KeyboardInterrupt:
                on_check("interrupted: stopping what was started")
                report.lines.append(Line(name, what, NOT_RUN, "interrupted"))
            finally:
                bench.end()
                report.seconds = time.monotonic() - began
    return report


def start(bench: Bench) -> Line:
    """Start the lab, whose stages have time limits of their own."""
    began = time.monotonic()
    ended: list[Line] = []

    def work() -> None:
        try:
            what = f"{bench.lab.describe()}; every rank answered"
            state = OK
        except Exception as error:
            what, state = str(error) or type(error).__name__, FAILED
        first, *more = what.splitlines()
        ended.append(
            Line(
                *("start", "start", state, first),
                details="\n".join(more),
                seconds=time.monotonic() - began,
            )
        )

    _run(work, bench, 3 * timeouts.START_S)
    if ended:
        return ended[0]
    return Line("start", "start", FAILED, "ranks did not start, and did not say why")


def examine(check: Check, bench: Bench) -> Line:
    """Run one check. After one that failed, or took too long, the lab is another."""
    ended: list[Line] = []
    began = time.monotonic()

    def end(state: str, text: str, advice: str = "", details: str = "") -> None:
        seconds = time.monotonic() - began
        ended.append(
            Line(check.name, check.what, state, text, advice, details, seconds)
        )

    def work() -> None:
        try:
            bench.ensure_lab()
        except Exception as error:
            end(NOT_RUN, f"the lab did not start again: {in_one_line(error)}")
            return
        try:
            found = check.run(bench)
        except CheckFailedError as error:
            first, *more = str(error).splitlines()
            end(FAILED, first, details="\n".join(more))
        except BaseException as error:
            said = str(error).splitlines()
            details = said if len(said) > 1 else traceback.format_exception(error)
            text = f"{type(error).__name__}: {in_one_line(error)}"
            end(FAILED, text, details="\n".join(map(str.rstrip, details)))
        else:
            end(LOOK if found.advice else OK, found.text, found.advice)

    limit_s = check.limit_s if bench.has_lab else check.limit_s + timeouts.START_S
    where = _run(work, bench, limit_s)
    if where is not None:
        end_text = f"not over after {limit_s:g} s; the next check has another lab"
        line = Line(
            *(check.name, check.what, FAILED, end_text),
            details=where,
            seconds=time.monotonic() - began,
        )
        return line
    if ended[0].state == FAILED:
        bench.stop_labs()  # nobody knows what state it is in
    return ended[0]


def _run(work: Callable[[], None], bench: Bench, limit_s: float) -> str | None:
    """Run `work` in a thread; where its ranks are if it takes longer, and None if not.

    An interrupt reaches this thread, at once, whatever the other waits for.
    """
    job = Job(work, name="labkit check")
    deadline = time.monotonic() + limit_s
    try:
        while not job.join(LOOK_S):
            if time.monotonic() > deadline:
                where = bench.where()
                bench.stop_labs()
                job.join(ENDS_S)
                return where
    except KeyboardInterrupt:
        bench.end()
        job.join(ENDS_S)
        raise
    return None


@contextlib.contextmanager
def _runs_in(folder: Path) -> Iterator[None]:
    """Keep the runs of the checks apart from those of the user."""
    former = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if former is None:
            del os.environ[FOLDER_VARIABLE]
        else:
            os.environ[FOLDER_VARIABLE] = former
