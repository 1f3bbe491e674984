"""Notes under a cell in which nothing happens where every rank stands."""

import html
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

from labkit import timeouts
from labkit.checks import UserError
from labkit.notebook.cluster.reach import Engines
from labkit.notebook.diagnostics.stacks import StackRequest
from labkit.notebook.diagnostics.stacks import Stacks
from labkit.notebook.diagnostics.stacks import deadlocks
from labkit.notebook.diagnostics.stacks import waits_for
from labkit.notebook.kernel.output import is_notebook
from labkit.notebook.kernel.place import Place

DEADLOCK = (
    "Every rank must call the same collectives in the same order. A backward pass, a "
    "step under ZeRO, save_checkpoint and stop_early call some, so they cannot be "
    "under `if rank == 0:`, nor under a condition on the rank's own loss. Under zero3, "
    "fsdp and hsdp each layer that runs gathers its parameters from all ranks: if the "
    "samples decide which layers run, or how often (an adaptive solver, a mixture of "
    "experts), make that decision the same on all ranks with dist.all_reduce, or use "
    "ddp, zero1 or zero2"
)

LEFT_CELL = (
    "has left the cell",
    "Every rank must take part in each collective. If a loop ends early, or skips a "
    "batch by `continue`, on a value that differs between ranks, such as the loss, "
    "make all ranks decide together: if stop_early(loss): break, or dist.all_reduce "
    "the value first",
)
NOT_IN_CELL = (
    "does not run the cell",
    "Every rank must take part in each collective; a model under zero3, fsdp, hsdp, "
    "tensor or pipeline calls some. Run the cell on all ranks: %%dist without numbers",
)
"""Where the rank is, and what to do."""


class HangDetector:
    """Watches one cell; says where its ranks are once nothing happens any more.

    What ranks send is a sign of life, and costs nothing. When nothing arrives for a
    while they are asked every few seconds how many steps and collectives they have
    done. It ends nothing, but raises UserError where that cannot come right any more:
    where ranks wait in a collective for one that is not in the cell, where two wait for
    each other in different groups, and where one has outlasted the timeout of its group
    and the backend does not end that.
    """

    def __init__(
        self,
        cluster: Engines,
        *,
        ranks: Collection[int],
        after_s: float,
        in_cell: int,
        before_output: Callable[[], None],
        label: str = "",
    ) -> None:
        """`ranks` run the cell, of number `in_cell`; `after_s` is how long nothing
        may happen, 0 for ever; `before_output` is called before anything is written;
        `label` tells the cell from another at the same time."""
        self._label = f"{label}: " if label else ""
        self._cluster = cluster
        self._ranks = frozenset(ranks)
        self._after_s = after_s
        self._in_cell = in_cell
        self._before_output = before_output
        self._interval_s = min(timeouts.PROGRESS_S, after_s / 4)
        self._last_sign = time.monotonic()
        self._next_question = self._last_sign + self._interval_s
        self._answers: dict[int, Future[Any]] = {}
        self._progress: dict[int, Any] = {}
        self._request: StackRequest | None = None
        self._left: list[str] = []
        self._dead: list[str] = []
        self._is_noted = False
        self._place = Place()

    def saw_life(self) -> None:
        """A rank has sent something."""
        self._last_sign_at(time.monotonic())

    def tick(self, running: Collection[int]) -> None:
        """Ask the ranks that run the cell still, or note what they said, if it is
        time to; does not wait."""
        if not self._after_s:
            return
        now = time.monotonic()
        self._take_progress(now)
        if self._request is not None:
            if self._request.is_complete():
                request, self._request = self._request, None
                # Of several cells at a time, each has ranks of its own.
                all_ranks = self._ranks if self._label else self._cluster.ranks
                ended = frozenset(all_ranks).difference(running)
                self._take_stacks(request.result(), ended, now - self._last_sign)
        elif now >= max(self._next_question, self._last_sign + self._interval_s):
            self._next_question = now + self._interval_s
            for rank in running:
                if rank not in self._answers:
                    self._answers[rank] = self._cluster.ask(rank, "progress")
            has_any_left = len(running) < len(self._ranks)
            quiet_s = now - self._last_sign
            if has_any_left or quiet_s >= min(2 * self._interval_s, self._after_s):
                # Also those at the end: it shows what the others wait for.
                self._request = StackRequest(self._cluster, self._cluster.pids)

    def _take_progress(self, now: float) -> None:
        for rank, answer in list(self._answers.items()):
            if not answer.done():
                continue
            del self._answers[rank]
            if answer.cancelled() or answer.exception() is not None:
                continue  # it is dead, or cannot say
            if overdue := answer.result()["overdue"]:
                raise UserError(f"rank {rank}: {overdue}")
            found, before = answer.result()["done"], self._progress.get(rank)
            self._progress[rank] = found
            if before is not None and found != before:
                self._last_sign_at(now)

    def _last_sign_at(self, now: float) -> None:
        if self._is_noted:
            self._is_noted = False
            quiet_s = now - self._last_sign
            self._show(f"{self._label}The ranks continue, after {quiet_s:.0f} s.")
        self._last_sign = now
        self._request = None
        self._left, self._dead = [], []

    def _take_stacks(
        self, stacks: Stacks, ended: Collection[int], quiet_s: float
    ) -> None:
        left = waits_for(stacks.positions, ended)
        # Ranks are not asked at the same instant: what is so still is so.
        if left and left == self._left:
            lines = "\n".join(stacks.lines(self._in_cell))
            was_there = waits_for(stacks.positions, self._ranks.intersection(ended))
            where, advice = LEFT_CELL if was_there else NOT_IN_CELL
            raise UserError(f"ranks wait for a rank that {where}:\n{lines}\n{advice}")
        self._left = left
        dead = deadlocks(stacks.positions)
        if dead and dead == self._dead:
            lines = "\n".join(stacks.lines(self._in_cell))
            raise UserError(f"ranks wait for each other:\n{lines}\n{DEADLOCK}")
        self._dead = dead
        if quiet_s >= self._after_s:
            self._note(stacks, quiet_s)

    def _note(self, stacks: Stacks, quiet_s: float) -> None:
        lines = stacks.lines(self._in_cell)
        if self._is_noted and not self._place.is_filled:
            return  # what a terminal shows stays there
        self._is_noted = True
        # One of several cells at a time has a thread, and the notebook waits for all.
        is_background = (
            not self._label
            and threading.current_thread() is not threading.main_thread()
        )
        stop = (
            "stop() of the Run"
            if is_background
            else "The stop button (Ctrl-C in a terminal)"
        )
        look = " %dist_stack shows whole stacks." if is_background else ""
        self._show(
            "\n".join(
                [
                    f"{self._label}No step and no collective has finished for "
                    f"{quiet_s:.0f} s, and no rank has printed anything.",
                    *lines,
                    f"{stop} ends this on every rank, with variables kept; --timeout "
                    f"SECONDS does so automatically.{look}",
                ]
            )
        )

    def _show(self, text: str) -> None:
        if not is_notebook():
            self._before_output()
            print(f"labkit: {text}", file=sys.stderr, flush=True)
            return
        if not self._place.is_filled:
            self._before_output()
        self._place.show(
            {
                "text/plain": text,
                "text/html": (
                    f"<pre style='margin:0;word-break:normal'>{html.escape(text)}</pre>"
                ),
            }
        )
