"""The ranks of a kept lab: started, or found as the former kernel has left them."""

import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
from concurrent.futures import CancelledError
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

from labkit import timeouts
from labkit.checks import UserError
from labkit.json_files import parse
from labkit.notebook.cluster.engines import LabEngines
from labkit.notebook.cluster.rank_group import LabRanks
from labkit.notebook.hosts.hosts import Hosts
from labkit.notebook.keeper.attachment import Attachment
from labkit.notebook.keeper.kept_cluster import KeptCluster
from labkit.notebook.keeper.kept_cluster import surroundings
from labkit.notebook.kernel import interrupts
from labkit.rank_spec import format_ranks
from labkit.records import CellEnd
from labkit.records import Placement

BUSY = "busy"
_LOAD = "labkit.rank.engine.rpc:load"


class KeptRanks(LabRanks):
    """As those of any lab, by way of its keeper."""

    cluster: KeptCluster

    def __init__(
        self,
        attachment: Attachment,
        *,
        what_is_running: Callable[[], str],
        on_progress: Callable[[str], None],
    ) -> None:
        """Starts them, unless they are there already."""
        self._attachment = attachment
        self._calls: dict[int, Any] = {}
        """Of engines that answer no question: they may not be ranks yet."""
        self.ended: dict[int, CellEnd] = {}
        """How the former kernel's cell has ended, where that did not hear of it."""
        super().__init__(
            attachment.placements,
            None,
            what_is_running=what_is_running,
            on_progress=on_progress,
        )

    def _begin(self, on_progress: Callable[[str], None]) -> None:
        found, self._attachment.found = self._attachment.found, None
        if found:
            self.cluster = KeptCluster(self._attachment, found)
            try:
                with self._exclusive():
                    self._take_over(on_progress)
            except BaseException:
                self.cluster.leave()
                raise
        else:
            super()._begin(on_progress)

    def _start_cluster(
        self, environment: dict[str, str], on_progress: Callable[[str], None]
    ) -> LabEngines:
        told = self._attachment.call(
            "start",
            environment=environment,
            **surroundings(),
            on_progress=on_progress,
        )
        self._attachment.begin_anew()
        cluster = KeptCluster(self._attachment, told)
        try:
            cluster.wait_for_client()
        except BaseException:
            cluster.leave()
            raise
        return cluster

    def change(
        self, place: Callable[[], tuple[Sequence[Placement], Hosts | None]]
    ) -> list[int]:
        """UserError: they stay where they are."""
        raise UserError(
            "a kept lab has the ranks that it was started with; for others %dist_stop "
            "it, then %dist_start --keep"
        )

    def _take_over(self, on_progress: Callable[[str], None]) -> None:
        """Have them in one group that works, once the former kernel's cell has ended;
        without the dead, if there are any."""
        if self.cluster.unreachable_reason():
            return
        self.cluster.wait_for_client()
        self._wait_until_idle(on_progress)
        dead = self.dead()
        alive = [rank for rank in self.everyone if rank not in dead]
        self._install(alive, self.placements)  # after the end of all cells
        self.ended = ends_of(self._states())
        if dead:
            return
        on_progress("checking the process group")
        if self._works(after_failure=True):
            self._is_whole = True
        else:
            self._form()

    def _wait_until_idle(self, on_progress: Callable[[str], None]) -> None:
        """An interrupt goes to the cell that runs; a second one ends the wait."""
        asked_at: float | None = None
        said = ""
        while True:
            states = self._states()
            busy = {r: int(s["cell"]) for r, s in states.items() if s["state"] == BUSY}
            if not busy:
                return
            what = f"{format_ranks(busy)}: the previous kernel's cell is running"
            if failed := failures(ends_of(states), in_cells={*busy.values()}):
                what += f", and may wait for a rank that has failed in it ({failed})"
            if asked_at is None:
                what += "; an interrupt ends it, and keeps the variables"
            if said != (said := what):
                on_progress(what)
            try:
                interrupts.check()
            except KeyboardInterrupt:
                if asked_at is not None:
                    raise
                asked_at = 0.0
            if asked_at is not None and time.monotonic() > asked_at:
                for rank, cell in busy.items():
                    self.cluster.interrupt(rank, cell, timeouts.GRACE_S)
                asked_at = time.monotonic() + timeouts.ASK_AGAIN_S
            time.sleep(timeouts.LOOK_S)

    def _states(self) -> dict[int, dict[str, Any]]:
        """What each rank says of itself; of one that does not answer, that it runs a
        cell, whose number is 0."""
        alive = [rank for rank in self.everyone if self.cluster.is_alive(rank)]
        asked = {rank: self.cluster.ask(rank, "describe") for rank in alive}
        wait(asked.values(), timeouts.ANSWER_S)
        found: dict[int, dict[str, Any]] = {}
        for rank, answer in asked.items():
            try:
                found[rank] = answer.result(0)
            except TimeoutError:  # it is deep in native code, or no rank yet
                if rank not in self._calls:
                    self._calls[rank] = self.cluster.begin(_LOAD, ranks=[rank])
                if not self._calls[rank].ready():
                    found[rank] = {"state": BUSY, "cell": 0, "ended": None}
            except (CancelledError, RuntimeError):
                continue  # it has just died
        return found

    def received(self) -> None:
        """The user knows what is in `ended`: no later kernel is to say it again."""
        for rank, end in self.ended.items():
            self.cluster.ask(rank, "received", number=end.number)
        self.ended = {}


def ends_of(states: Mapping[int, Mapping[str, Any]]) -> dict[int, CellEnd]:
    """How cells have ended that no kernel has heard of, by rank of the lab."""
    found = {}
    for rank, state in states.items():
        if state["ended"] is not None:
            end = parse(CellEnd, state["ended"])
            found[rank] = replace(end, outcome=replace(end.outcome, rank=rank))
    return found


def failures(ends: Mapping[int, CellEnd], in_cells: Set[int]) -> str:
    """Those in the cells of these numbers, in short; in any where one is 0, which is
    not known."""
    alike: dict[str, list[int]] = {}
    for rank, end in ends.items():
        if end.outcome.status == "error" and in_cells & {0, end.number}:
            words = end.outcome.summary().removeprefix(f"rank {rank}: ")
            alike.setdefault(words, []).append(rank)
    return "; ".join(
        f"{format_ranks(ranks)}: {words}" for words, ranks in alike.items()
    )


def ranks_of(
    home: Attachment | Hosts | None, placements: Sequence[Placement], **settings: Any
) -> LabRanks:
    """The ranks of a lab that a keeper has, or this process: on these hosts or on this
    one. `settings` are the other arguments of either."""
    if isinstance(home, Attachment):
        return KeptRanks(home, **settings)
    return LabRanks(placements, home, **settings)
