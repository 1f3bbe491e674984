"""The torch.distributed process group of a rank: join, leave, release, re-form."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from labkit import timeouts
from labkit.checkpoint import abandon_saves
from labkit.checkpoint import connect
from labkit.compat.c10d import forget_aborted_groups
from labkit.compat.c10d import has_rpc_agent
from labkit.compat.c10d import names_of_groups
from labkit.compat.c10d import num_groups_made
from labkit.compat.c10d import number_ranks
from labkit.compat.c10d import rendezvous_of
from labkit.compat.c10d import replace_rendezvous
from labkit.compat.c10d import reset_group_count
from labkit.compat.c10d import reset_rpc_counts
from labkit.compat.c10d import set_default_group
from labkit.compat.deepspeed import forget_world_group
from labkit.key_server import Meeting
from labkit.rank.group.aborts import Aborts
from labkit.rank.group.connections import close_connections
from labkit.rank.group.connections import close_listeners
from labkit.rank.group.connections import listening_ports
from labkit.rank.group.recovery import FormerGroups
from labkit.rank.group.recovery import bind_to_new_groups
from labkit.rank.group.settings import set_variables
from labkit.rank.group.store import LabStore
from labkit.rank.telemetry.stack_trace import recorded_call
from labkit.rank.telemetry.stack_trace import started_collectives
from labkit.records import HOST_VARIABLE
from labkit.records import Placement
from labkit.strategies.mesh.channel import Channel
from labkit.strategies.mesh.device_mesh import forget_groups
from labkit.strategies.mesh.links import are_whole
from labkit.strategies.mesh.links import num_links
from labkit.strategies.mesh.roles import Roles
from labkit.strategies.mesh.worlds import begin_world

_torch_init_process_group = dist.init_process_group
_torch_rendezvous = rendezvous_of("env")

_LAUNCHERS = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "PMIX_")
"""Prefixes of the variables by which torchrun and MPI pass a process its rank."""


def forget_launchers() -> None:
    """Remove what another launcher, which started the notebook, says of itself:
    DeepSpeed reads MPI's."""
    for variable in list(os.environ):
        if variable.startswith(_LAUNCHERS):
            del os.environ[variable]


class RankProcessGroup:
    """This process's place in the lab's process group.

    Every store of a group is fresh: nothing that an earlier group left in one can
    be read by the next.
    """

    def __init__(self, placement: Placement, variables: dict[str, Any]) -> None:
        """In `variables`, the user's, groups are put in place of former ones."""
        self.placement = placement
        self._key = own_key()
        self._variables = variables
        self.device = torch.device(placement.device)
        self.peers: list[int] = []
        """Process ids of the ranks on this host."""
        self._others: list[str] = []
        """The addresses of the other hosts."""
        self.formed_at_ns = 0
        """When the group was, by `time.time_ns`."""
        self._store: LabStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._solo: dist.ProcessGroup | None = None
        self._divided: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        """By the number of servers: the workers' group, and that of words."""
        self._former: dict[int, FormerGroups] = {}
        """By the size of the world: a rank is now in the group of all, now in a part's.
        """
        self._formation = ""
        """By which the ranks tell this formation of the group from all others."""
        self._num_in_lab = 0
        """Ranks of the lab, in groups of some of them too; 0 before the first."""
        self._listening: set[int] = set()
        """The ports on which this process listened before the group was formed."""
        self._is_broken = False
        self._num_within: int | None = None
        """Ranks of the world that the cell sees, where these are not all."""
        self._releasing = threading.Lock()
        self._aborts = Aborts()
        self._num_own_groups = 0
        self._num_meetings = 0
        """How often `env://` has led to the group's store."""
        # Gloo's destructor waits, with the GIL held, for a worker thread that may want
        # the GIL to drop a tensor: a deadlock where a cell's last reference goes right
        # after its last collective. These go later, when the workers are idle.
        self._users_groups: list[dist.ProcessGroup] = []
        self._notes: set[str] = set()
        self._environment = environment_of(placement, placement)

    def install(self) -> list[str]:
        """Make this process a rank: its settings, its environment, torch's own ways
        into a group. Once, before the first `join`; what there is to say of it."""
        notes = set_variables(self.backend)
        self._choose_device()
        forget_launchers()
        self.restore_environment()
        self._replace_init_process_group()
        return notes

    def _choose_device(self) -> None:
        if self.device.type == "cuda":
            # Before the first CUDA call, so that no context lands on cuda:0.
            torch.cuda.set_device(self.device)
        torch.set_num_threads(self.placement.num_threads)

    def _replace_init_process_group(self) -> None:
        # A function from the notebook may hold it under either name.
        dist.init_process_group = self._init_process_group_as_user  # type: ignore[assignment]
        c10d.init_process_group = self._init_process_group_as_user  # type: ignore[assignment]
        replace_rendezvous("env", self._rendezvous_as_user)

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def backend(self) -> str:
        return self.placement.backend

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.placement.group_timeout_s)

    @property
    def world_size(self) -> int:
        """As the cell sees it: 1 under `single`."""
        return self._num_within or self.placement.world_size

    @property
    def in_place(self) -> bool:
        """Whether labkit's own group is complete and the default one."""
        return (
            self._group is not None
            and not self._is_broken
            and self._store is not None
            and not self._store.is_broken
            and are_whole()
            and dist.is_initialized()
            and dist.group.WORLD is self._group
        )

    @property
    def can_abort(self) -> bool:
        """Whether the backend frees ranks from a collective by itself."""
        return self.backend == "nccl"

    def sequences(self) -> dict[str, int]:
        """How many collectives this rank has started in each group, by its name, and
        how many meetings."""
        if not self.in_place:
            return {}
        own = {"meetings": self._num_meetings, "links": num_links()}
        return {**started_collectives(), **own}

    def overdue(self) -> str:
        """The collective that has outlasted the group's timeout, in words; "" for none.

        Gloo ends it by itself. NCCL's watchdog would end the process, and does not run.
        """
        call = recorded_call(self.formed_at_ns) if self.can_abort else None
        if (
            call is None
            or time.time_ns() - call.began_ns < self.timeout.total_seconds() * 1e9
        ):
            return ""
        return (
            f"{call.name} has waited for longer than the timeout of the process group, "
            f"{self.timeout.total_seconds():g} s"
        )

    def join(
        self,
        store: Meeting,
        port: int,
        places: dict[tuple[str, int], Placement],
        *,
        is_part: bool = False,
    ) -> float:
        """Enter the group that meets at `store`; the sum of ranks over it.

        Collective: every rank calls it. The sum is one all-reduce over the new
        group, so that the caller can see that it works. `port` is free on
        rank 0's host, for scripts that host a store of their own; `places` are the
        ranks' by host and process id, in order. Unless `is_part`, they are all of the
        lab's, which may be more or fewer than before.
        """
        before, self.placement = self.placement, places[self._key]
        placement = self.placement
        if placement.num_threads != before.num_threads:
            torch.set_num_threads(placement.num_threads)
        if not is_part:
            self._size_lab(len(places))
        self._set_aside_others()
        self._store = LabStore(store, self.timeout)
        self.peers = [pid for host, pid in places if host == placement.host]
        others = {p.address for p in places.values() if p.host != placement.host}
        self._others = sorted(others)
        self._listening = listening_ports() if self.can_abort else set()
        self.formed_at_ns = time.time_ns()
        self._formation = str(store)
        self._num_own_groups = self._num_meetings = 0
        self._notes.clear()
        self._is_broken = False
        self._environment = environment_of(placement, next(iter(places.values())))
        self._environment["MASTER_PORT"] = str(port)
        self.restore_environment()
        reset_group_count()
        reset_rpc_counts()
        _torch_init_process_group(
            placement.backend,
            store=dist.PrefixStore("labkit", self._store),
            rank=placement.rank,
            world_size=placement.world_size,
            timeout=self.timeout,
            device_id=self.device if placement.backend == "nccl" else None,
        )
        self._group = dist.group.WORLD
        assert self._group is not None
        if placement.backend == "nccl":
            number_ranks(self._group, self.device)
        forget_world_group()
        former = self._former.pop(placement.world_size, None)
        bind_to_new_groups(
            former, self._group, self._variables, self._store, self.timeout
        )
        # What was made in a part is of no use any more, when all ranks are together.
        self._former = {
            size: each
            for size, each in self._former.items()
            if size > placement.world_size
        }
        self._users_groups.clear()
        connect(self._group)
        return self.prove(self.placement.group_timeout_s)

    def _size_lab(self, num_ranks: int) -> None:
        """Let nothing use groups of a lab that had another number of ranks: none of
        them is formed again."""
        former, self._num_in_lab = self._num_in_lab, num_ranks
        if former in (0, num_ranks):
            return
        ranks = f"{former} rank{'s' * (former > 1)}"
        lab = f"a lab of {ranks}, and the lab now has {num_ranks}"
        begin_world(lab)
        for each in self._former.values():
            each.let_go(lab)
        self._former.clear()
        close_connections(self.peers, self._others)

    def _set_aside_others(self) -> None:
        """Let nothing use groups that were left for a world of another size.

        A model may hold one: torch has forgotten it, and gloo would work on with it.
        """
        for size, each in self._former.items():
            if size != self.placement.world_size and not each.mark:
                each.set_aside()
                close_connections(self.peers, self._others)

    def adopt(self) -> None:
        """Take the default group of this process, which a launcher's environment has
        led to, as the one that it is a rank of. Once, in place of `install` and `join`:
        torch's own ways into a group stay as they are."""
        self._group = dist.group.WORLD
        assert self._group is not None
        self._num_within = None
        connect(self._group)

    def forget(self) -> None:
        """Hold the group no longer: its threads end with the last one who does."""
        self._group = self._solo = None
        self._divided.clear()

    def prove(self, timeout_s: float) -> float:
        """The sum of all ranks, by one all-reduce. Collective."""
        ranks = torch.tensor([float(self.placement.rank)], device=self.device)
        work = dist.all_reduce(ranks, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=timeout_s))
        return ranks.item()

    def restore_environment(self) -> None:
        """Set what a launcher gives again, whatever a cell has made of it.

        Scripts set MASTER_PORT; Lightning deletes WORLD_SIZE when it is done.
        """
        os.environ.update(self._environment)

    def launch_environment(self) -> dict[str, str]:
        """What torchrun tells a process, as to a script that it had started here."""
        here = self.placement
        return {
            **self._environment,
            "GROUP_RANK": str(here.host_rank),
            "GROUP_WORLD_SIZE": str(here.num_hosts),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(here.rank),
            "ROLE_WORLD_SIZE": str(here.world_size),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }

    def step_out(self) -> None:
        """Leave the lab's own group for one of the user's, and be in none until then.

        What is bound to it gets the next one in its place.
        """
        if self._group is None:
            return
        self._note_groups()
        if dist.is_initialized():
            self._destroy()
        forget_groups()
        self.forget()

    def _note_groups(self) -> None:
        """Keep in mind the groups that are about to be left."""
        assert self._group is not None
        former = FormerGroups(self._group, formation=self._formation)
        self._former[self.placement.world_size] = former

    def leave(self) -> None:
        """Destroy every group of this process; does nothing where there is none."""
        abandon_saves()
        end_rpc()
        with self._releasing:  # not while another thread still aborts them
            if self._group is not None:
                self._note_groups()
            if dist.is_initialized():
                self._destroy()
        forget_groups()
        if self._store is not None:
            self._store.close()
        self._store = None
        self.forget()

    def _destroy(self) -> None:
        if not self.can_abort:
            dist.destroy_process_group()
            return
        self._aborts.start(names_of_groups())
        if not self._aborts.wait(timeouts.LEAVE_S):
            raise RuntimeError(
                f"a collective on {self.device} cannot be aborted: NCCL has not done "
                f"so in {timeouts.LEAVE_S:g} s"
            )
        forget_aborted_groups()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Make a group of rank 0 alone the default one, for the strategy `single`."""
        assert self._group is not None
        if self._solo is None:
            self._solo = group_of_one(self._group, self.timeout)
        with self._within(self._solo, 1):
            yield

    @contextlib.contextmanager
    def divided(self, servers: range) -> Iterator[Roles]:
        """Make the ranks before `servers` the default group on each of them.
        Collective, for all ranks."""
        assert self._group is not None
        workers = range(servers.start)
        if len(servers) not in self._divided:
            own: Any = dist.new_group(list(workers), timeout=self.timeout)
            words: Any = self._group
            if self.can_abort:
                words = dist.new_group(backend="gloo", timeout=self.timeout)
            self._divided[len(servers)] = own, words
        own, words = self._divided[len(servers)]
        roles = Roles(workers, servers, Channel(self._group, words, self.device))
        if self.placement.rank in servers:
            yield roles
            return
        with self._within(own, len(workers)):
            yield roles

    @contextlib.contextmanager
    def _within(self, group: dist.ProcessGroup, num_ranks: int) -> Iterator[None]:
        """Have the cell see `group` as the whole world."""
        self._num_within = num_ranks
        here = self.placement
        first = max(here.rank - here.local_rank, 0)  # of the ranks on this host
        num_local = min(here.num_local, max(num_ranks - first, 1))
        os.environ.update(WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_local))
        set_default_group(group)
        count = num_groups_made()
        try:
            yield
        finally:
            self._num_within = None
            # Groups are named by a count. One that only some ranks have made leaves the
            # counts unequal: all groups have to be re-created.
            self._is_broken |= num_groups_made() != count
            if dist.is_initialized() and dist.group.WORLD is group:
                set_default_group(self._group)

    def release(self) -> None:
        """Free this rank from a collective that will not complete.

        Called from another thread than the one that is stuck. The group is of no
        use afterwards: leave it and join another.

        NCCL offers `abort` for this. Gloo offers nothing: abort, shutdown and
        destroy_process_group of another thread all leave it waiting. Closing its
        connections to the other ranks makes it raise at once.

        Torch knows the groups until they are left: what is bound to them is found then.
        """
        with self._releasing:
            self._is_broken = True
            if self._store is not None:
                self._store.close()
            if self.can_abort and dist.is_initialized():
                self._aborts.start(names_of_groups())
                self._aborts.wait(timeouts.ABORT_S)
            elif self.can_abort:
                # Within ncclCommInit, which waits for the others to connect.
                close_listeners(self._listening)
            close_connections(self.peers, self._others)

    def _init_process_group_as_user(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: dist.Store | None = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: torch.device | int | None = None,
        **more: Any,
    ) -> None:
        """`init_process_group` for code that was written as a script.

        labkit's own group is replaced by the user's, and re-created after the
        cell. The ranks are connected already, so `init_method` and
        MASTER_PORT are not needed: no port is taken and two labs cannot clash.
        """
        here = self.placement
        for name, found, ours in (
            ("rank", rank, here.rank),
            ("world_size", world_size, self.world_size),
        ):
            if store is None and found not in (-1, ours):
                raise ValueError(
                    f"init_process_group({name}={found}): this rank has {name}={ours}; "
                    f"leave {name} out, or start another lab with %dist_start -n N"
                )
        if here.backend == "gloo":
            if backend is not None and "nccl" in backend:
                self.note_once(
                    f'init_process_group("{backend}"): NCCL needs a GPU for each rank, '
                    "which these ranks do not have; gloo is used instead"
                )
                backend = "gloo"
            device_id = None
        if self.in_place:
            self.step_out()
        elif self._num_within == 1 and dist.is_initialized():
            dist.destroy_process_group()
        if store is None:
            assert self._store is not None
            self._num_own_groups += 1
            whose = "alone" if self._num_within == 1 else "user"
            store = dist.PrefixStore(f"{whose}/{self._num_own_groups}", self._store)
            rank, world_size = here.rank, self.world_size
        _torch_init_process_group(
            backend or here.backend,
            timeout=timeout or self.timeout,
            world_size=world_size,
            rank=rank,
            store=store,
            group_name=group_name,
            pg_options=pg_options,
            device_id=device_id,
            **more,
        )
        assert dist.group.WORLD is not None
        if "nccl" in (backend or here.backend):
            number_ranks(dist.group.WORLD, self.device)
        self._users_groups.append(dist.group.WORLD)
        forget_world_group()

    def _rendezvous_as_user(
        self, url: str, timeout: timedelta = c10d.default_pg_timeout, **more: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        """The rendezvous `env://`, which `init_rpc` uses: at the group's own store.

        A process that is not one of the ranks, as one that a cell has started, uses
        the address in the environment.
        """
        here = self.placement
        query = dict(parse_qsl(urlparse(url).query))
        found = int(query.get("rank", -1)), int(query.get("world_size", -1))
        if own_key() != self._key or found != (here.rank, here.world_size):
            yield from _torch_rendezvous(url, timeout=timeout, **more)
            return
        assert self._store is not None
        self._num_meetings += 1
        # A clone, because its user sets a timeout on it.
        own = self._store.clone()
        yield dist.PrefixStore(f"meeting/{self._num_meetings}", own), *found

    def end_rpc(self) -> None:
        """After a cell that failed: let the next one call `init_rpc` again."""
        # The ranks' counts in its store may differ.
        self._is_broken |= end_rpc()

    def note_once(self, text: str) -> None:
        """Say it on stderr, once for each group."""
        if text not in self._notes:
            self._notes.add(text)
            print(f"labkit: {text}", file=sys.stderr)


def own_key() -> tuple[str, int]:
    """By which the notebook tells this process from all others of the lab: the name of
    its host, "" on the notebook's own, and the process id."""
    return os.environ.get(HOST_VARIABLE, ""), os.getpid()


def environment_of(placement: Placement, first: Placement) -> dict[str, str]:
    """The environment variables of torchrun, for code that reads them; `first` is the
    place of rank 0."""
    return {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.num_local),
        "GROUP_RANK": str(placement.host_rank),
        "GROUP_WORLD_SIZE": str(placement.num_hosts),
        "MASTER_ADDR": first.address,
        # By which Lightning knows that its processes are there.
        "TORCHELASTIC_RUN_ID": "labkit",
    }


def end_rpc() -> bool:
    """Shut this rank's agent of torch.distributed.rpc down, without the others;
    whether there was one."""
    if not has_rpc_agent():
        return False
    sys.modules["torch.distributed.rpc"].shutdown(graceful=False)
    return True


def group_of_one(default: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """A group of rank 0 alone, which no other rank takes part in making."""
    # Bound to a device, torch would split the communicator of all ranks for it.
    device, default.bound_device_id = default.bound_device_id, None
    try:
        return dist.new_group([0], timeout=timeout, use_local_synchronization=True)
    finally:
        default.bound_device_id = device
