"""Runs a cell with `--elastic`: restarts dead ranks, and resumes the run."""

import time
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import replace
from pathlib import Path

from labkit.checks import UserError
from labkit.notebook.cluster.rank_group import RankGroup
from labkit.notebook.execution.cell_execution import CellExecution
from labkit.notebook.execution.errors import first_failure
from labkit.notebook.kernel.output import say
from labkit.notebook.runs import persistence
from labkit.notebook.runs.record import Restart
from labkit.notebook.runs.run import Run
from labkit.rank_spec import format_ranks
from labkit.records import CellSpec
from labkit.records import CheckpointPlan
from labkit.records import Outcome
from labkit.step_folders import last_in
from labkit.step_folders import step_of

MAX_RESTARTS = 3
"""How often a run resumes from the same checkpoint: it may die there each time."""


class Elastic:
    """Runs a cell again, from the last checkpoint on, when a rank died in it."""

    def __init__(
        self,
        run: Run,
        ranks: RankGroup,
        spec: CellSpec,
        plan: CheckpointPlan,
        send_work: Callable[[], None],
    ) -> None:
        """`send_work` gives the ranks what the cell takes besides its code."""
        self._run = run
        self._ranks = ranks
        self._spec = spec
        self._plan = plan
        self._send_work = send_work
        self._restarted: set[int] = set()
        self._last_step: int | None = None
        self._num_in_vain = 0

    def wait(self, execution: CellExecution, timeout_s: float | None) -> list[Outcome]:
        """As `CellExecution.wait`, for as many times as it takes."""
        with execution.noting_interrupts():
            outcomes = execution.wait(timeout_s)
            while (died := self._death(execution)) is not None:
                checkpoint = last_in(Path(self._plan.directory))
                step = step_of(checkpoint) if checkpoint else 0
                if self._is_in_vain(step):
                    return self._give_up(execution, died)
                say(f"rank {died.rank}: {cause_of(died)}; bringing it back")
                try:
                    dead = self._bring_back()
                except RuntimeError as error:
                    return self._add(execution, {died.rank}, f"; {error}")
                restart = self._note(died, dead, step, outcomes)
                if execution.should_end:
                    return self._stop(execution)
                say(str(restart))
                execution.start_over(self._next_spec(checkpoint))
                outcomes = execution.wait(timeout_s)
        return self._explained(execution, outcomes)

    def _death(self, execution: CellExecution) -> Outcome | None:
        """The first death, if the run can continue after it."""
        first = first_failure(execution.outcomes)
        if first is None or first.status != "died" or execution.should_end:
            return None
        return first

    def _is_in_vain(self, step: int) -> bool:
        self._num_in_vain = self._num_in_vain + 1 if step == self._last_step else 1
        self._last_step = step
        return self._num_in_vain > MAX_RESTARTS

    def _bring_back(self) -> list[int]:
        """Restart the dead ranks, also those that die meanwhile, and give all ranks
        what the cell takes."""
        brought: set[int] = set()
        for _ in range(MAX_RESTARTS):
            brought.update(dead := self._ranks.dead())
            try:
                self._ranks.bring_back(dead)
                self._send_work()
            except RuntimeError:
                if not self._ranks.dead():
                    raise
            else:
                break
        else:
            raise UserError(f"{format_ranks(dead)} died again while it started")
        self._restarted |= brought
        return sorted(brought)

    def _note(
        self, died: Outcome, dead: list[int], step: int, outcomes: list[Outcome]
    ) -> Restart:
        run = self._run
        restart = Restart(
            step, run.num_steps, dead, cause_of(died), run.elapsed(), time.time()
        )
        persistence.restart(run, outcomes, restart)
        return restart

    def _next_spec(self, checkpoint: Path | None) -> CellSpec:
        run = self._run
        plan = replace(self._plan, resume_from=str(checkpoint) if checkpoint else None)
        return replace(
            self._spec,
            folder=self._spec.folder and str(persistence.journals_of(run)),
            checkpoints=asdict(plan),
        )

    # ---- ends ----

    def _stop(self, execution: CellExecution) -> list[Outcome]:
        """Stopped while ranks restarted; every rank has ended the run."""
        execution.outcomes = [
            Outcome(rank, "interrupted", group_in_place=True)
            for rank in self._run.collector.ranks
        ]
        return execution.outcomes

    def _give_up(self, execution: CellExecution, died: Outcome) -> list[Outcome]:
        times = f"{MAX_RESTARTS} time{'s' * (MAX_RESTARTS > 1)}"
        why = (
            f"; --elastic resumed {times} from step {self._last_step} and a rank died "
            "before the next checkpoint each time; look for the cause in between"
        )
        return self._add(execution, {died.rank}, why)

    def _explained(
        self, execution: CellExecution, outcomes: list[Outcome]
    ) -> list[Outcome]:
        """Say of a rank that was restarted why it may lack a name."""
        lacking = {
            outcome.rank
            for outcome in outcomes
            if outcome.ename == "NameError" and outcome.rank in self._restarted
        }
        why = (
            f"; {format_ranks(lacking)} died and was restarted with nothing but "
            "this cell: --elastic needs a cell that makes or imports all that it uses"
        )
        return self._add(execution, lacking, why) if lacking else outcomes

    def _add(
        self, execution: CellExecution, ranks: set[int], why: str
    ) -> list[Outcome]:
        """The outcomes, with `why` at the end of what is said of `ranks`, and below the
        traceback, which a notebook shows in place of that."""
        line = [why.removeprefix("; ")]
        execution.outcomes = [
            replace(
                each,
                evalue=each.evalue + why,
                traceback=each.traceback and [*each.traceback, *line],
            )
            if each.rank in ranks
            else each
            for each in execution.outcomes
        ]
        return sorted(execution.outcomes, key=lambda outcome: outcome.rank)


def cause_of(died: Outcome) -> str:
    return died.evalue.split("; ")[0]
