"""The self-test that a user runs once on their own machine."""

import sys
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.checks import check_choice

if TYPE_CHECKING:
    from labkit.selftest.machine import Machine
    from labkit.selftest.report import Report

OUTPUT = "labkit-check.md"
ONLY_HELP = "run only these checks, for example ddp,timeout; all of them by default"
OUTPUT_HELP = (
    "a file for what was found, to paste into an issue; without names of users, hosts "
    "or home folders"
)


def check(
    num_ranks: int | None = None,
    *,
    backend: str = "auto",
    device: str = "auto",
    only: str | Sequence[str] | None = None,
    output: str | Path | None = OUTPUT,
) -> "Report":
    """Check that labkit works on this machine; some 20 s on two CPU ranks.

    Starts a lab of its own, trains under every strategy, causes failures for real, and
    stops what it has started; a lab that runs already stays as it is, and so do its
    runs.

    Parameters
    ----------
    num_ranks : int, optional
        How many ranks; by default one per visible GPU, or 2 on the CPU.
    backend : str, default auto
        As for `Lab`: with "gloo" several ranks share a GPU.
    device : str, default auto
        As for `Lab`: with "cpu" GPUs are left alone.
    only : str or sequence of str, optional
        Run only these checks, for example "ddp,timeout"; a name that does not exist
        gets the list of those that do.
    output : str or path, default labkit-check.md
        A file for what was found, to paste into an issue. It has no names of users,
        hosts or home folders. None for no file.

    Returns
    -------
    Report
        A table that displays itself; `is_right` says whether nothing has failed.

    Raises
    ------
    ValueError
        For arguments that are not valid; nothing has started.
    Interrupted
        On KeyboardInterrupt, after what was found until then was shown.

    Examples
    --------
    >>> report = labkit.check(2, only="all-reduce,ddp")
    >>> report.is_right
    """
    from labkit.notebook.cluster.placement import StartOptions
    from labkit.notebook.cluster.placement import place_ranks
    from labkit.notebook.execution.errors import Interrupted
    from labkit.selftest.machine import read_machine
    from labkit.selftest.session import run_checks
    from labkit.selftest.table import CHECKS

    names = only.split(",") if isinstance(only, str) else only
    for name in names or ():
        check_choice("check", name, CHECKS)
    checks = [each for each in CHECKS.values() if not names or each.name in names]
    placements = place_ranks(StartOptions(num_ranks, backend, device))
    kind = placements[0].device.split(":")[0]
    machine = read_machine()
    say_what_runs(len(placements), kind, machine)
    with _progress(len(checks) + 1) as (on_check, on_stage):
        report = run_checks(
            checks,
            machine,
            {"num_ranks": num_ranks, "backend": backend, "device": device},
            num_ranks=len(placements),
            device=kind,
            backend=placements[0].backend,
            on_check=on_check,
            on_stage=on_stage,
        )
    if output is not None:
        try:
            report.write(Path(output).expanduser())
        except OSError as error:
            print(f"labkit: what was found is not written: {error}", file=sys.stderr)
    if not report.is_whole:
        _show(report)
        raise Interrupted([], "Interrupted; nothing is left running.")
    return report


def say_what_runs(num_ranks: int, device: str, machine: "Machine") -> None:
    """Say what is about to be used, and whose it is already."""
    from labkit.lab import running_labs
    from labkit.selftest.machine import in_use

    for lab in running_labs():
        print(f"A lab of {lab.describe()} is running here: it stays as it is.")
    for finding in in_use(machine) if device == "cuda" else ():
        print(f"{finding}. The checks may find too little memory.")
    where = "the CPU" if device == "cpu" else "GPUs"
    ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
    print(f"Checking labkit with {ranks} on {where}; the stop button ends it.")


def _show(report: "Report") -> None:
    from labkit.notebook.kernel.output import is_notebook

    if is_notebook():
        from IPython.display import display

        display(report)
    else:
        print(report)


@contextmanager
def _progress(
    total: int,
) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """A bar, and what is called with the next check and with a stage of the start."""
    from tqdm import tqdm

    from labkit.notebook.kernel.output import is_notebook

    with tqdm(
        total=total,
        leave=False,
        bar_format="{bar:20} {n_fmt}/{total_fmt} {desc}",
        # A notebook shows stderr in red, also what the bar leaves there: a blank line.
        file=sys.stdout if is_notebook() else sys.stderr,
    ) as bar:
        count = -1

        def on_check(what: str) -> None:
            nonlocal count
            count += 1
            bar.n = min(count, total)
            bar.set_description_str(what)

        def on_stage(text: str) -> None:
            bar.set_description_str(text)

        yield on_check, on_stage
