"""Waits for a cell's end on every rank, restores the group, raises what went wrong."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from labkit.notebook.cluster.rank_group import RankGroup
from labkit.notebook.cluster.rank_group import lost_line
from labkit.notebook.execution.cell_execution import CellExecution
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.execution.errors import Interrupted
from labkit.notebook.execution.errors import RankError
from labkit.notebook.execution.errors import first_failure
from labkit.notebook.history.consistency import step_mismatches
from labkit.notebook.kernel.output import say
from labkit.notebook.runs import persistence
from labkit.notebook.runs.run import Run
from labkit.notebook.runs.run_files import INFO_FILE
from labkit.rank_spec import format_ranks
from labkit.records import CellEnd
from labkit.records import Outcome
from labkit.records import StepsTaken

ENDED_ALONE = (
    "no kernel was attached when this run ended: losses and metrics are complete; "
    "memory, notes and comparisons of ranks from that time are missing"
)
Wait = Callable[[float | None], list[Outcome]]
"""`CellExecution.wait`, or something like it."""


def run_to_completion(
    execution: CellExecution,
    group: RankGroup,
    timeout_s: float | None,
    *,
    run: Run | None = None,
    wait: Wait | None = None,
) -> None:
    """Run a cell to its end, which is that of `run` too; return if it ended well.

    Raises RankError, Interrupted and CellTimeoutError, as `Lab.run` says. The ranks
    are then in a working group, or the next cell re-creates it.
    """
    state = "interrupted"
    # Also those that come while the run is written and the group restored.
    with execution.noting_interrupts():
        try:
            outcomes = (wait or execution.wait)(timeout_s)
            state, first = classify_outcomes(execution, outcomes)
        except RuntimeError:
            state = "interrupted" if group.is_stopped else "failed"
            raise
        finally:
            if run is not None:
                persistence.end(run, state, execution.outcomes)
        lost = [each.rank for each in outcomes if each.is_to_restart]
        for sentence in uneven_steps(outcomes, group.everyone):
            say(sentence)
        try:
            if not group.is_stopped:
                restore_group(group, outcomes)
        except RuntimeError as error:
            # The next cell re-creates the group, or says why that cannot be.
            if execution.problem is not None:
                raise execution.problem from error
            if first is not None:
                raise RankError(first, outcomes) from error
            raise
    if execution.problem is not None:
        raise execution.problem
    if first is not None:
        raise RankError(first, outcomes)
    if execution.timed_out:
        assert timeout_s is not None
        raise CellTimeoutError(outcomes, timeout_s)
    if execution.was_interrupted and not execution.is_stopping:
        but = f" but {format_ranks(lost)}" if lost else ""
        who = f"every rank{but}" if len(lost) < len(outcomes) else "no rank"
        raise Interrupted(outcomes, f"Interrupted; {who} keeps its variables.")


def uneven_steps(outcomes: Sequence[Outcome], everyone: Sequence[int]) -> list[str]:
    """What to say where some ranks have taken more steps than others with what former
    runs have prepared."""
    taken = dict.fromkeys(everyone, 0)
    for each in outcomes:
        if each.status == "died" or each.is_to_restart:
            taken.pop(each.rank, None)  # it has no model any more
        else:
            taken[each.rank] = each.num_later_steps
    steps = {rank: StepsTaken(0, number, True) for rank, number in taken.items()}
    return list(step_mismatches(steps).values())


def classify_outcomes(
    execution: CellExecution, outcomes: Sequence[Outcome]
) -> tuple[str, Outcome | None]:
    """The state of a run that ended so, and the failure to report."""
    first = first_failure(execution.outcomes)
    if execution.problem is not None:
        return "failed", None
    if execution.was_interrupted or execution.timed_out:
        return "interrupted", first if first and first.status == "died" else None
    if first is not None:
        return "failed", first
    if execution.is_stopping:
        stopped = any(o.status in ("interrupted", "restarted") for o in outcomes)
        return "interrupted" if stopped else "finished", None
    for outcome in execution.outcomes:
        if outcome.status != "ok":  # by a KeyboardInterrupt of its own
            return "interrupted", outcome
    return "finished", None


def restore_group(group: RankGroup, outcomes: Sequence[Outcome]) -> None:
    """Restore the group, and restart the ranks that did not stop, or have lost their
    device."""
    if stuck := [each.rank for each in outcomes if each.status == "restarted"]:
        say(f"{format_ranks(stuck)} did not stop: restarting")
    for each in outcomes:
        if each.lost_device:
            say(lost_line(each.rank, each.lost_device))
    group.restore_group(outcomes)


def end_lost_runs(ends: Mapping[int, CellEnd]) -> None:
    """Write how runs have ended of whose end no kernel has heard, with all of their
    records; `ends` are by rank of the lab.

    A run stays lost where not all of its ranks say how it has ended. Of one that was
    deleted nothing is said.
    """
    of_runs: dict[str, list[CellEnd]] = {}
    for _, end in sorted(ends.items()):
        if end.folder is not None:
            of_runs.setdefault(end.folder, []).append(end)
    for name, found in of_runs.items():
        # Since ranks were restarted their journals are in a folder within the run's.
        for folder in (Path(name), Path(name).parent):
            if not (folder / INFO_FILE).exists():
                continue
            try:
                _end_lost_run(folder, found)
            except ValueError as error:
                what = "passed over a run that has ended"
                persistence.warn_once(folder, f"{what}: {error}")


def _end_lost_run(folder: Path, ends: Sequence[CellEnd]) -> None:
    run = persistence.open_run(folder)
    ranks = sorted([*run.collector.ranks, *run.collector.servers])
    if run.state != "lost" or len(ranks) != len(ends):
        return
    # By rank of the run, which may have had a part of the lab.
    by_rank = dict(zip(ranks, ends, strict=True))
    outcomes = [replace(end.outcome, rank=rank) for rank, end in by_rank.items()]
    if any(each.status == "error" for each in outcomes):
        state = "failed"
    else:
        is_whole = all(each.status == "ok" for each in outcomes)
        state = "finished" if is_whole else "interrupted"
    steps = {rank: end.steps for rank, end in by_rank.items() if end.steps}
    run.collector.notes.append(ENDED_ALONE)
    run.catch_up(
        run.state,
        seconds=run.seconds,
        info=run.info,
        mismatches=[*run.mismatches, *step_mismatches(steps).values()],
    )
    persistence.end(run, state, outcomes, seconds=run.seconds)
