"""The ranks of a lab in one process group: created, proved, and re-created."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial

from labkit import timeouts
from labkit.checks import UserError
from labkit.checks import absolute
from labkit.notebook.cluster.engines import Cluster
from labkit.notebook.cluster.engines import LabEngines
from labkit.notebook.cluster.engines import Part
from labkit.notebook.cluster.engines import start_cluster
from labkit.notebook.cluster.reach import CallError
from labkit.notebook.cluster.reach import Engines
from labkit.notebook.cluster.reach import RankDiedError
from labkit.notebook.cluster.reach import SilentRankError
from labkit.notebook.hosts.hosts import Hosts
from labkit.notebook.kernel import interrupts
from labkit.rank_spec import format_ranks
from labkit.records import Outcome
from labkit.records import Placement

NUM_RELEASES = 30
TO_START_AGAIN = (
    "no rank runs: all were ended, to start again; %dist_restart (lab.restart()) "
    "starts them"
)

_CALLS = "labkit.rank.engine.rpc"


class Life:
    """Whether a lab goes on, and the lock under which its processes start and end."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._starts_or_ends = threading.Lock()

    @contextlib.contextmanager
    def starting(
        self, on_progress: Callable[[str], None] = lambda text: None
    ) -> Iterator[Callable[[str], None]]:
        """To start processes in; a stop in another thread waits for the end of it, and
        the `on_progress` that it gives ends it at the next stage."""

        def on_stage(text: str) -> None:
            self.check()
            on_progress(text)

        with self._starts_or_ends:
            self.check()
            yield on_stage

    def ending(self) -> threading.Lock:
        """To end processes in: all that another thread has started."""
        return self._starts_or_ends

    def check(self) -> None:
        """UserError where the lab was stopped."""
        if self.is_stopped:
            raise UserError("the lab was stopped while its ranks started")


class RankGroup:
    """Engines that are the ranks of one process group.

    One cell at a time runs on it: see `working`. What a cell left broken is mended
    right after it, or before the next.
    """

    is_part = False
    """Whether there are other ranks in the lab."""

    def __init__(
        self,
        placements: Sequence[Placement],
        cluster: Engines | None,
        *,
        what_is_running: Callable[[], str],
        life: Life,
    ) -> None:
        """There is no group before the first cell; `cluster` may come later.
        `what_is_running` says in words what keeps the ranks busy."""
        self.placements = placements
        if cluster is not None:
            self.cluster = cluster
        self._what_is_running = what_is_running
        self._life = life
        self._busy = threading.Lock()
        self._is_whole = False
        self._has_new_ranks = False

    @property
    def is_stopped(self) -> bool:
        """Whether the lab is, for good."""
        return self._life.is_stopped

    @property
    def everyone(self) -> range:
        """All ranks."""
        return range(len(self.placements))

    @property
    def in_lab(self) -> tuple[int, ...]:
        """Their numbers in the lab."""
        return tuple(self.everyone)

    def dead(self) -> list[int]:
        """The ranks whose process is gone."""
        return [rank for rank in self.everyone if not self.cluster.is_alive(rank)]

    def state(self, rank: int) -> tuple[str, str]:
        """What is known of a rank that does not answer: in a word, and why."""
        if reason := self.cluster.unreachable_reason():
            return "unreachable", reason
        if not self.cluster.is_alive(rank):
            death = self.cluster.death(rank)
            return "dead", f"dead since {death.clock}: {death}"
        return "does not answer", ""

    @contextlib.contextmanager
    def working(self, alone: Sequence[int] | None = None) -> Iterator[Engines]:
        """The cluster, all of its ranks alive and in one group, for one cell; or for
        what ranks `alone` do without a group: others may be dead.

        Raises RuntimeError where that cannot be, or another cell runs.
        """
        with self._exclusive():
            if reason := self.cluster.unreachable_reason():
                raise UserError(reason)
            dead = self.dead()
            if needed := [r for r in dead if alone is None or r in alone]:
                raise UserError(
                    "; ".join(f"rank {rank}: {self.state(rank)[1]}" for rank in needed)
                    + "; %dist_restart (lab.restart()) brings dead ranks back, "
                    "%dist_restart --all restarts every rank"
                )
            if not (dead or self._is_whole):
                self._form()
            yield self.cluster

    @contextlib.contextmanager
    def risking_the_group(self) -> Iterator[None]:
        """For a collective of labkit's own: where one rank fails in it the others may
        wait, so they are released, and the next cell re-creates the group."""
        self._is_whole = False
        try:
            yield
        except BaseException:
            self._release()
            raise
        self._is_whole = True

    def restart(self) -> list[int]:
        """Bring dead ranks back; the ranks that were started."""
        with self._exclusive(), interrupts.held():
            if reason := self.cluster.unreachable_reason():
                raise UserError(reason)
            return self.bring_back(self.dead())

    def bring_back(self, ranks: Sequence[int]) -> list[int]:
        """Restart these ranks, and re-create the group where it is not whole; `ranks`.

        For whoever is `working`: other cells have to wait.
        """
        if ranks:
            self._start_again(ranks)
        if not self._is_whole:
            self._form()
        if ranks:
            self.cluster.begin(f"{_CALLS}:warm_up", ranks=ranks)
        return list(ranks)

    def restore_group(self, outcomes: Sequence[Outcome]) -> None:
        """Re-create the group where a cell left it broken, and restart the
        ranks that had to be ended to end it, or have lost their device.

        After a failure on which the ranks agree it is as good as before, and what
        was wrapped in it stays usable.
        """
        if ended := [each.rank for each in outcomes if each.is_to_restart]:
            self._start_again(ended)
        failed = any(outcome.status != "ok" for outcome in outcomes)
        in_place = all(outcome.group_in_place for outcome in outcomes)
        if in_place and not failed:
            return
        self._is_whole = False
        if self.cluster.unreachable_reason() or self.dead():
            return
        if in_place and self._works(after_failure=True):
            self._is_whole = True
        else:
            self._form()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise UserError(self._what_is_running())
        try:
            yield
        except RankDiedError as error:
            if reason := self.cluster.unreachable_reason():
                raise UserError(reason) from error
            raise UserError(
                f"{error}; %dist_restart (lab.restart()) brings it back"
            ) from error
        except SilentRankError as error:
            raise UserError(str(error)) from error
        except CallError as error:
            raise UserError(
                f"{error}; %dist_restart --all (lab.restart(everyone=True)) restarts "
                "every rank"
            ) from error
        finally:
            self._busy.release()

    def _start_again(self, ranks: Sequence[int]) -> None:
        self._is_whole = False
        with self._life.starting() as on_stage:
            self.cluster.end_engines(ranks)
            self.cluster.start_engines(ranks, on_progress=on_stage)
        self._install(ranks, self.placements)

    def _install(self, ranks: Sequence[int], placements: Sequence[Placement]) -> None:
        """Make engines that were just started ranks, in these places."""
        engines = {rank: self.cluster.engine(rank) for rank in ranks}
        places = {
            each.key: (placements[rank], each.stack_file)
            for rank, each in engines.items()
        }
        self._has_new_ranks |= len(ranks) < len(placements)
        notes = self.cluster.call(f"{_CALLS}:install", places, ranks=ranks)
        for rank in ranks:
            self.cluster.listen(rank)
        for note in notes[0] if 0 in ranks else ():  # the others are set alike
            print(f"labkit: {note}", file=sys.stderr)

    def _form(self) -> None:
        """Re-create the process group on all ranks, and see that it works."""
        self._is_whole = False
        lost = {rank: why for rank, why in enumerate(self._free()) if why}
        if lost:
            for rank, why in lost.items():
                print(f"labkit: {lost_line(rank, why)}", file=sys.stderr)
            self._start_again(list(lost))
        store = self.cluster.open_store()
        sums = self.cluster.call(
            f"{_CALLS}:join_group",
            *(store, self.cluster.free_port(0), self._places(), self.is_part),
            ranks=self.everyone,
            is_collective=True,
        )
        if not self._are_right(sums):
            raise UserError(
                f"the process group does not work: an all-reduce of the ranks' numbers "
                f"gave {sums}; %dist_restart --all restarts every rank"
            )
        self._is_whole = True
        if self._has_new_ranks:
            self._has_new_ranks = False
            self._compare_names()

    def _compare_names(self) -> None:
        """Say where a cell would find labkit's function on a new rank, and the user's
        of the same name on others."""
        by_rank = self.cluster.call(f"{_CALLS}:own_names", ranks=self.everyone)
        for name in sorted(set().union(*by_rank)):
            each = zip(self.in_lab, by_rank, strict=True)
            own = [rank for rank, names in each if name in names]
            if new := set(self.in_lab).difference(own):
                print(
                    f"labkit: {name} is your own on {format_ranks(own)}, and labkit's "
                    f"on {format_ranks(new)}: the cell that imports or defines it has "
                    "to run again",
                    file=sys.stderr,
                )

    def _places(self) -> dict[tuple[str, int], Placement]:
        """The place of each rank by host and process id, in order of rank."""
        return {self.cluster.engine(each.rank).key: each for each in self.placements}

    def _free(self) -> list[str]:
        """Release ranks that wait for a group to form: one of them has died. By rank,
        why it has lost its device, or "", once all have answered."""
        for _ in range(NUM_RELEASES):
            try:
                return self.cluster.call(
                    f"{_CALLS}:lost_device",
                    ranks=self.everyone,
                    timeout_s=timeouts.RELEASE_S,
                )
            except RankDiedError:
                raise
            except CallError:
                self._release()
        return []

    def _release(self) -> None:
        """Have every rank leave the collective that it sits in, if any."""
        asked = [self.cluster.ask(rank, "release") for rank in self.everyone]
        for answer in asked:  # one that came late would break the next group
            with contextlib.suppress(CancelledError, TimeoutError, CallError):
                answer.result(timeouts.ANSWER_S)

    def _works(self, *, after_failure: bool = False) -> bool:
        """Whether the group, as it is, gives a right all-reduce on every rank."""
        counts = self.cluster.call(f"{_CALLS}:group_sequences", ranks=self.everyone)
        if not are_alike(counts):
            return False
        sums = self.cluster.call(
            f"{_CALLS}:prove_group",
            timeouts.PROOF_S,
            after_failure,
            ranks=self.everyone,
        )
        return self._are_right(sums)

    def _are_right(self, sums: Sequence[float | None]) -> bool:
        """Whether every rank got the sum of all ranks."""
        return all(found == float(sum(self.everyone)) for found in sums)


class PartOfLab(RankGroup):
    """Some ranks of a lab in a process group of their own."""

    cluster: Part
    is_part = True

    @property
    def in_lab(self) -> tuple[int, ...]:
        return tuple(self.cluster.there)


class LabRanks(RankGroup):
    """A lab's cluster, whose engines are ranks of one process group; ready when it
    exists."""

    cluster: LabEngines

    def __init__(
        self,
        placements: Sequence[Placement],
        hosts: Hosts | None,
        *,
        what_is_running: Callable[[], str],
        on_progress: Callable[[str], None],
    ) -> None:
        """Raises RuntimeError if the ranks do not start."""
        self.hosts = hosts
        super().__init__(placements, None, what_is_running=what_is_running, life=Life())
        self._begin(on_progress)

    def _begin(self, on_progress: Callable[[str], None]) -> None:
        """Start a cluster and make its engines ranks of one group."""
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(self.placements[0].num_threads)
        with self._life.starting(on_progress) as on_stage:
            self.cluster = self._start_cluster(environment, on_stage)
        try:
            on_progress("creating the process group")
            self._install(self.everyone, self.placements)
            self._form()
            self.cluster.begin(f"{_CALLS}:warm_up", ranks=self.everyone)
        except BaseException as error:
            self._end_cluster()
            if isinstance(error, Exception):
                self._life.check()
            if isinstance(error, CallError):
                raise UserError(f"the lab did not start: {error}") from error
            raise

    def _start_cluster(
        self, environment: dict[str, str], on_progress: Callable[[str], None]
    ) -> LabEngines:
        return start_cluster(
            self.placements,
            hosts=self.hosts,
            environment=environment,
            on_progress=on_progress,
        )

    def _end_cluster(self) -> None:
        if not self._life.is_stopped:  # an interrupt may come before others run
            self.cluster.why_ended = TO_START_AGAIN
        with self._life.ending():
            self.cluster.stop()

    def change(
        self, place: Callable[[], tuple[Sequence[Placement], Hosts | None]]
    ) -> list[int]:
        """Have ranks in the places that `place` gives, and in no others; the ranks that
        were started.

        Those whose place is as before keep their process, and with it their variables,
        unless they are dead. Where one cannot be started nothing has changed.
        """
        with self._exclusive(), interrupts.held():
            if reason := self.cluster.unreachable_reason():
                raise UserError(reason)
            places, hosts = place()
            dead = self.dead()
            moved = [e.rank for e in places if not stays(e, self.placements)]
            if len(places) == len(self.placements) and not moved:
                return self.bring_back(dead)
            started = [e.rank for e in places if e.rank in {*dead, *moved}]
            assert isinstance(self.cluster, Cluster)
            changing = partial(self.cluster.changing, started, places, hosts)
            try:
                with self._life.starting() as on_stage, changing(on_progress=on_stage):
                    if started:
                        self._install(started, places)
                    self.placements, self.hosts = places, hosts
                    self._is_whole = False
            except UserError as error:
                if self.placements is places:
                    raise
                raise UserError(f"nothing has changed: {error}") from error
            self._form()
            if started:
                self.cluster.begin(f"{_CALLS}:warm_up", ranks=started)
            return started

    def restart_all(self) -> list[int]:
        """End all ranks and start them again, with the controller; the ranks."""
        with self._exclusive(), interrupts.held():
            absolute(".")  # none could start: what runs is to stay
            self._is_whole = False
            self._end_cluster()
            self._begin(lambda text: None)
            return list(self.everyone)

    def stop(self) -> None:
        """End the cluster, for good."""
        self._life.is_stopped = True
        self._end_cluster()

    def check(self) -> None:
        """RuntimeError unless every rank answers and an all-reduce is right.

        A group that is broken is re-created.
        """
        with self.working():
            if not self._works():
                self._form()

    @contextlib.contextmanager
    def divided(self, num_ranks: int) -> Iterator[list[RankGroup]]:
        """Groups of `num_ranks` ranks in a row, in place of that of all, for as long as
        this lasts: no other cell runs meanwhile. All are back at its end.

        In its group each is a rank from 0, in a world of that size.
        """
        with self.working():
            self._is_whole = False
            parts = [
                self.cluster.part(range(first, first + num_ranks))
                for first in range(0, len(self.placements), num_ranks)
            ]
            try:
                yield [self._group_of(part) for part in parts]
            finally:
                for part in parts:
                    part.close()
                if not (self.is_stopped or self.cluster.unreachable_reason()):
                    with interrupts.held():
                        self.bring_back(self.dead())

    def _group_of(self, part: Part) -> RankGroup:
        places = places_in_part([self.placements[there] for there in part.there])
        return PartOfLab(
            places, part, what_is_running=self._what_is_running, life=self._life
        )


def stays(place: Placement, former: Sequence[Placement]) -> bool:
    """Whether the process that had this place is in it still: of this number, on this
    host and with this device."""
    if place.rank >= len(former):
        return False
    names = ("host", "local_rank", "device")
    before = former[place.rank]
    return all(getattr(place, name) == getattr(before, name) for name in names)


def places_in_part(places: Sequence[Placement]) -> list[Placement]:
    """The places of ranks in a group of these. On a GPU one keeps its local rank, which
    code takes for the number of its GPU."""
    hosts = [*dict.fromkeys(each.host for each in places)]
    found: list[Placement] = []
    for rank, each in enumerate(places):
        before = sum(other.host == each.host for other in found)
        here = sum(other.host == each.host for other in places)
        found.append(
            replace(
                each,
                rank=rank,
                local_rank=before if each.device == "cpu" else each.local_rank,
                world_size=len(places),
                local_world_size=here if each.local_world_size else 0,
                host_rank=hosts.index(each.host),
                num_hosts=len(hosts),
            )
        )
    return found


def lost_line(rank: int, why: str) -> str:
    """What is said of a rank whose process cannot go on."""
    return f"rank {rank} has to be restarted: {why}. Its variables are gone"


def are_alike(counts: Sequence[Mapping[str, int]]) -> bool:
    """Whether ranks have started as many collectives in each group that they share.

    One that some have started, and others not, waits for them for ever.
    """
    names = {name for each in counts for name in each}
    return all(
        len({each[name] for each in counts if name in each}) == 1 for name in names
    )
