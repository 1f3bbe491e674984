"""The ranks of a lab in one process group: created, proved, and re-created."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import CancelledError

from labkit import timeouts
from labkit.checks import UserError
from labkit.notebook.cluster.engines import CallError
from labkit.notebook.cluster.engines import Cluster
from labkit.notebook.cluster.engines import RankDiedError
from labkit.notebook.cluster.engines import SilentRankError
from labkit.notebook.cluster.engines import start_cluster
from labkit.notebook.kernel import interrupts
from labkit.records import Outcome
from labkit.records import Placement

NUM_RELEASES = 30

_CALLS = "labkit.rank.engine.rpc"


class RankGroup:
    """A cluster whose engines are ranks of one process group; ready when it exists.

    One cell at a time runs on it: see `working`. What a cell left broken is mended
    right after it, or before the next.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        *,
        what_is_running: Callable[[], str],
        on_progress: Callable[[str], None],
    ) -> None:
        """`what_is_running` says in words what keeps the ranks busy.

        Raises RuntimeError if the ranks do not start.
        """
        self.placements = placements
        self._what_is_running = what_is_running
        self._busy = threading.Lock()
        self._is_whole = False
        self.is_stopped = False
        self._starts_or_ends = threading.Lock()
        """Held meanwhile, so that a stop ends all that another thread has started."""
        self._begin(on_progress)

    def _begin(self, on_progress: Callable[[str], None]) -> None:
        """Start a cluster and make its engines ranks of one group."""
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(self.placements[0].num_threads)
        with self._starting(on_progress) as on_stage:
            self.cluster = start_cluster(
                len(self.placements), environment=environment, on_progress=on_stage
            )
        try:
            on_progress("creating the process group")
            self._install(self.everyone)
            self._form()
            self.cluster.begin(f"{_CALLS}:warm_up", ranks=self.everyone)
        except BaseException as error:
            self._end_cluster()
            if isinstance(error, Exception):
                self._check_not_stopped()
            if isinstance(error, CallError):
                raise UserError(f"the lab did not start: {error}") from error
            raise

    @contextlib.contextmanager
    def _starting(
        self, on_progress: Callable[[str], None] = lambda text: None
    ) -> Iterator[Callable[[str], None]]:
        """To start processes in; a stop in another thread waits for the end of it, and
        the `on_progress` that it gives ends it at the next stage."""

        def on_stage(text: str) -> None:
            self._check_not_stopped()
            on_progress(text)

        with self._starts_or_ends:
            self._check_not_stopped()
            yield on_stage

    def _check_not_stopped(self) -> None:
        if self.is_stopped:
            raise UserError("the lab was stopped while its ranks started")

    def _end_cluster(self) -> None:
        with self._starts_or_ends:
            self.cluster.stop()

    @property
    def everyone(self) -> range:
        """All ranks."""
        return range(len(self.placements))

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
    def working(self) -> Iterator[Cluster]:
        """The cluster, all of its ranks alive and in one group, for one cell.

        Raises RuntimeError where that cannot be, or another cell runs.
        """
        with self._exclusive():
            if reason := self.cluster.unreachable_reason():
                raise UserError(reason)
            if dead := self.dead():
                raise UserError(
                    "; ".join(f"rank {rank}: {self.state(rank)[1]}" for rank in dead)
                    + "; %dist_restart (lab.restart()) brings back what is dead, "
                    "%dist_restart --all every rank"
                )
            if not self._is_whole:
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

    def restart(self, *, everyone: bool) -> list[int]:
        """Bring dead ranks back, or all of them; the ranks that were started."""
        with self._exclusive(), interrupts.held():
            if everyone:
                self._is_whole = False
                self._end_cluster()
                self._begin(lambda text: None)
                return list(self.everyone)
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

    def stop(self) -> None:
        """End the cluster, for good."""
        self.is_stopped = True
        self._end_cluster()

    def check(self) -> None:
        """RuntimeError unless every rank answers and an all-reduce is right.

        A group that is broken is re-created.
        """
        with self.working():
            if not self._works():
                self._form()

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
        with self._starting() as on_stage:
            self.cluster.end_engines(ranks)
            self.cluster.start_engines(ranks, on_progress=on_stage)
        self._install(ranks)

    def _install(self, ranks: Sequence[int]) -> None:
        pids = self.cluster.pids
        places = {
            pids[rank]: (self.placements[rank], self.cluster.stack_file(rank))
            for rank in ranks
        }
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
        store = str(self.cluster.open_store())
        pids = [self.cluster.pids[rank] for rank in self.everyone]
        sums = self.cluster.call(
            f"{_CALLS}:join_group",
            *(store, free_port(), pids),
            ranks=self.everyone,
            is_collective=True,
        )
        if not self._are_right(sums):
            raise UserError(
                f"the process group does not work: an all-reduce of the ranks' numbers "
                f"gave {sums}; %dist_restart --all restarts every rank"
            )
        self._is_whole = True

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


def free_port() -> int:
    """A port of the loopback address on which nobody listens."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port: int = own.getsockname()[1]
    return port


def lost_line(rank: int, why: str) -> str:
    """What is said of a rank that has lost its device."""
    return (
        f"rank {rank} cannot use its device any more: {why}. Restarting it: its "
        "variables are gone"
    )


def are_alike(counts: Sequence[Mapping[str, int]]) -> bool:
    """Whether ranks have started as many collectives in each group that they share.

    One that some have started, and others not, waits for them for ever.
    """
    names = {name for each in counts for name in each}
    return all(
        len({each[name] for each in counts if name in each}) == 1 for name in names
    )
