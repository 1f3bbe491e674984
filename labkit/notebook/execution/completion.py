"""Sees a cell to its end on every rank, mends the group, and says how it ended."""

from collections.abc import Callable
from collections.abc import Sequence

from labkit.notebook.cluster.rank_group import RankGroup
from labkit.notebook.execution.cell_execution import Dispatch
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.execution.errors import Interrupted
from labkit.notebook.execution.errors import RankError
from labkit.notebook.execution.errors import first_failure
from labkit.notebook.kernel.output import say
from labkit.notebook.runs import persistence
from labkit.notebook.runs.run import Run
from labkit.rank_spec import format_ranks
from labkit.records import Outcome

Wait = Callable[[float | None], list[Outcome]]
"""`Dispatch.wait`, or something of its kind."""


def see_to_its_end(
    dispatch: Dispatch,
    group: RankGroup,
    timeout_s: float | None,
    *,
    run: Run | None = None,
    wait: Wait | None = None,
) -> None:
    """Run a cell to its end, which is that of `run` too; return if it ended well.

    Raises RankError, Interrupted and CellTimeoutError, as `Lab.run` says. The ranks
    are in a group that works by then, or the next cell forms it.
    """
    state = "interrupted"
    # Also those that come while the run is written and the group mended.
    with dispatch.noting_interrupts():
        try:
            outcomes = (wait or dispatch.wait)(timeout_s)
            state, first = judge(dispatch, outcomes)
        except RuntimeError:
            state = "interrupted" if group.is_stopped else "failed"
            raise
        finally:
            if run is not None:
                persistence.end(run, state, dispatch.outcomes)
        lost = [each.rank for each in outcomes if each.status == "restarted"]
        try:
            if not group.is_stopped:
                settle(group, outcomes, lost)
        except RuntimeError as error:
            # The next cell re-creates the group, or says why that cannot be.
            if dispatch.problem is not None:
                raise dispatch.problem from error
            if first is not None:
                raise RankError(first, outcomes) from error
            raise
    if dispatch.problem is not None:
        raise dispatch.problem
    if first is not None:
        raise RankError(first, outcomes)
    if dispatch.timed_out:
        assert timeout_s is not None
        raise CellTimeoutError(outcomes, timeout_s)
    if dispatch.was_interrupted and not dispatch.is_stopping:
        but = f" but {format_ranks(lost)}" if lost else ""
        raise Interrupted(
            outcomes, f"Interrupted; every rank{but} keeps its variables."
        )


def judge(
    dispatch: Dispatch, outcomes: Sequence[Outcome]
) -> tuple[str, Outcome | None]:
    """The state of a run that ended so, and the failure that is to be told of."""
    first = first_failure(dispatch.outcomes)
    if dispatch.problem is not None:
        return "failed", None
    if dispatch.was_interrupted or dispatch.timed_out:
        return "interrupted", first if first and first.status == "died" else None
    if first is not None:
        return "failed", first
    if dispatch.is_stopping:
        stopped = any(o.status in ("interrupted", "restarted") for o in outcomes)
        return "interrupted" if stopped else "finished", None
    for outcome in dispatch.outcomes:
        if outcome.status != "ok":  # by a KeyboardInterrupt of its own
            return "interrupted", outcome
    return "finished", None


def settle(group: RankGroup, outcomes: Sequence[Outcome], lost: Sequence[int]) -> None:
    """Mend the group; bring back the ranks that were `lost` for not stopping."""
    if lost:
        say(f"{format_ranks(lost)} did not stop: restarting")
    group.settle(outcomes)
