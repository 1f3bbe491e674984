"""The ranks of a kept lab: started, or found as the former kernel has left them."""

import time
from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import CancelledError
from concurrent.futures import wait
from typing import Any

from labkit import timeouts
from labkit.checks import UserError
from labkit.notebook.cluster.engines import LabEngines
from labkit.notebook.cluster.rank_group import LabRanks
from labkit.notebook.hosts.hosts import Hosts
from labkit.notebook.keeper.attachment import Attachment
from labkit.notebook.keeper.kept_cluster import KeptCluster
from labkit.notebook.keeper.kept_cluster import surroundings
from labkit.notebook.kernel import interrupts
from labkit.rank_spec import format_ranks
from labkit.records import Placement

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
        self._install(alive, self.placements)
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
        while busy := self._busy_cells():
            what = f"{format_ranks(busy)}: the former kernel's cell is running"
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

    def _busy_cells(self) -> dict[int, int]:
        """The number of the cell that runs, by rank; 0 where it does not answer."""
        alive = [rank for rank in self.everyone if self.cluster.is_alive(rank)]
        asked = {rank: self.cluster.ask(rank, "describe") for rank in alive}
        wait(asked.values(), timeouts.ANSWER_S)
        found = {}
        for rank, answer in asked.items():
            try:
                told = answer.result(0)
            except TimeoutError:  # it is deep in native code, or no rank yet
                if rank not in self._calls:
                    self._calls[rank] = self.cluster.begin(_LOAD, ranks=[rank])
                if not self._calls[rank].ready():
                    found[rank] = 0
            except (CancelledError, RuntimeError):
                continue  # it has just died
            else:
                if told["state"] == "busy":
                    found[rank] = int(told["cell"])
        return found


def ranks_of(
    home: Attachment | Hosts | None, placements: Sequence[Placement], **settings: Any
) -> LabRanks:
    """The ranks of a lab that a keeper has, or this process: on these hosts or on this
    one. `settings` are the other arguments of either."""
    if isinstance(home, Attachment):
        return KeptRanks(home, **settings)
    return LabRanks(placements, home, **settings)
