"""Saves a checkpoint from all ranks of a group, in the background if asked to."""

import json
import os
import threading
import weakref
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from labkit import timeouts
from labkit.checkpoint.atomic_folder import StagingFolder
from labkit.checkpoint.exchange import all_gather_plans
from labkit.checkpoint.json_values import encode
from labkit.checkpoint.manifest import DTYPES
from labkit.checkpoint.manifest import Entry
from labkit.checkpoint.manifest import Part
from labkit.checkpoint.manifest import file_of_rank
from labkit.checkpoint.manifest import write_manifest
from labkit.checks import UserError
from labkit.compat.c10d import store_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

_ABANDONED = "the process group was released before all ranks had written"

_connection: tuple[dist.ProcessGroup, dist.Store] | None = None
"""The last group that `connect` was asked for, and its connection."""
_in_flight: "weakref.WeakSet[_Save]" = weakref.WeakSet()

Pending = Future[None]
"""A save in flight: `result()` waits for its end and raises what went wrong, `done()`
is whether it has ended."""


class SaveError(UserError):
    """A checkpoint was not saved. What was there before still is."""


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a checkpoint; it is whole or not there. Collective.

    Parameters
    ----------
    folder, tensors, values, group
        As for `begin_save`.

    Raises
    ------
    ValueError, OSError, SaveError
        As `begin_save`, and SaveError for what goes wrong later, on any rank.
    """
    begun = _Save(Path(folder), tensors, values, group)
    try:
        error = begun.pending.exception()
    finally:  # an interrupt too
        begun.abandon()
    if error is not None:
        raise error


def begin_save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
) -> Pending:
    """Begin to save a checkpoint. Collective.

    Everything is copied before this returns; a thread writes it.

    Parameters
    ----------
    folder : Path
        Where it is saved. A checkpoint that is there is replaced once the new one is
        whole.
    tensors : mapping of str to Tensor
        What this rank has, by name. A DTensor is saved by parts, a tensor that several
        ranks have by one of them.
    values : mapping of str to object
        Numbers, strings, tensors, and lists, tuples and dicts of them. Those of the
        group's first rank are saved.
    group : ProcessGroup, optional
        The ranks that save; by default all.

    Returns
    -------
    Pending
        A future: `result()` waits for the end, and raises SaveError on all ranks for
        what went wrong on any.

    Raises
    ------
    ValueError
        For what cannot be saved.
    OSError
        Where there is no room for a folder.
    SaveError
        Where one of these happened on another rank.
    """
    return _Save(Path(folder), tensors, values, group).pending


def connect(group: dist.ProcessGroup) -> dist.Store:
    """The connection to a group's store that its saves share.

    Another than the group's own, with which another thread may be waiting. Call it when
    the group is made: to a host that has died since then, torch would try to connect,
    and not hear an interrupt, until the store's timeout.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The group that is going to save.

    Returns
    -------
    torch.distributed.Store
        The same one for the same group, until `abandon_saves`.
    """
    global _connection
    if _connection is None or _connection[0] is not group:
        store: Any = store_of(group)
        _connection = group, store.clone()
    return _connection[1]


def abandon_saves() -> None:
    """End the saves in flight with an error, as their group is being released."""
    global _connection
    _connection = None
    for each in list(_in_flight):
        each.abandon()


class _Save:
    """One rank's side of one save.

    All ranks plan together, once, in the thread that trains and in order with its
    collectives. The thread that writes uses none: what ranks then have to tell each
    other goes through the group's store, so that none can be held by another's death.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.pending: Pending = Future()
        self.pending.set_running_or_notify_cancel()
        self._folder = folder.resolve()
        self._abandoned = threading.Event()
        self._rank, self._world_size = 0, 1
        if dist.is_initialized():
            self._rank = dist.get_rank(group)
            self._world_size = dist.get_world_size(group)
        if self._rank < 0:
            raise ValueError(
                "this rank is not in the group that saves; call it on its ranks alone"
            )
        self._store: dist.Store | None = None
        self._staging: StagingFolder | None = None
        try:
            self._plan(dict(tensors), values, group)
            if self._world_size > 1:
                pg = group or dist.group.WORLD
                assert pg is not None
                self._store = connect(pg)
        except BaseException:
            if self._staging:
                self._staging.discard()
            raise
        _in_flight.add(self)
        threading.Thread(target=self._run, name="labkit-save", daemon=True).start()

    def abandon(self) -> None:
        """Let it end with an error, unless it has ended."""
        self._abandoned.set()

    # ---- in the thread that trains ----

    def _plan(
        self,
        tensors: dict[str, torch.Tensor],
        values: Mapping[str, Any],
        group: dist.ProcessGroup | None,
    ) -> None:
        # Not with this module: it is a quarter of a second of every engine's start.
        from torch.distributed.checkpoint import DefaultSavePlanner
        from torch.distributed.checkpoint.planner import SavePlan

        planner = DefaultSavePlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False
        )
        error: Exception | None = None
        plan, path = SavePlan([]), ""
        try:
            in_values: dict[str, torch.Tensor] = {}
            self._values = encode(dict(values), "values", in_values)
            check(tensors)
            for name, tensor in in_values.items():
                if self._rank == 0 or isinstance(tensor, DTensor):
                    tensors[name] = tensor
            planner.set_up_planner(tensors, is_coordinator=self._rank == 0)
            plan = planner.create_local_plan()
            if self._rank == 0:
                self._staging = StagingFolder(self._folder)
                path = str(self._staging.path)
        except (ValueError, OSError, RecursionError) as problem:
            error = problem
        said = str(error or "")
        offers = [(plan, path, said)]
        if self._world_size > 1:
            offers = all_gather_plans(plan, path, said, group)
        if error:
            raise error
        if reason := first_of([each for _, _, each in offers]):
            raise SaveError(f"{self._folder} was not saved: {reason}")
        plans, _ = planner.create_global_plan([plan for plan, _, _ in offers])
        self._entries = entries_of(plans)
        self._path = Path(offers[0][1])
        self._staged: dict[str, torch.Tensor] = {}
        self._offsets: dict[str, list[int]] = {}
        with torch.no_grad():
            for item in plans[self._rank].items:
                part = planner.resolve_data(item)
                assert isinstance(part, torch.Tensor)
                assert item.tensor_data is not None
                self._staged[item.index.fqn] = copied(part)
                self._offsets[item.index.fqn] = list(item.tensor_data.chunk.offsets)

    # ---- in the thread that writes ----

    def _run(self) -> None:
        problem = ""
        try:
            self._write()
        except (OSError, SafetensorError) as error:
            problem = str(error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self._staged.clear()
        try:
            problem = self._conclude(problem)
        except Exception:  # this save was abandoned, or the store is gone
            problem = _ABANDONED
        if self._staging:
            self._staging.discard()
        _in_flight.discard(self)
        if problem:
            text = f"{self._folder} was not saved: {problem}"
            self.pending.set_exception(SaveError(text))
        else:
            self.pending.set_result(None)

    def _write(self) -> None:
        """Write this rank's file, which PyTorch's `HuggingFaceStorageReader` can read
        as well."""
        path = self._path / file_of_rank(self._rank)
        parts = {name: {"saved_offsets": o} for name, o in self._offsets.items()}
        note = {"DCP_SHARDING_INFO": json.dumps(parts), "DCP_VERSION": "1.0"}
        if parts:
            path.touch()
            mode = path.stat().st_mode  # by the umask; safetensors takes 0600
            save_file(self._staged, path, metadata={**note, "format": "pt"})
            path.chmod(mode)
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _conclude(self, problem: str) -> str:
        """Report to the first rank, and wait for its report on all of them."""
        reports = [f"{self._path.name}/{rank}" for rank in range(self._world_size)]
        concluded = f"{self._path.name}/concluded"
        if self._rank > 0:
            self._post(reports[self._rank], problem)
            return self._read(concluded)
        try:
            problem = first_of([problem, *(self._read(key) for key in reports[1:])])
            if not problem:
                self._publish()
        except (OSError, ValueError) as error:
            problem = str(error)
        except RuntimeError:
            problem = _ABANDONED
        self._post(concluded, problem)
        return problem

    def _publish(self) -> None:
        assert self._staging is not None
        write_manifest(self._path, self._entries, self._values)
        if self._abandoned.is_set():
            raise RuntimeError(_ABANDONED)
        self._staging.publish()

    def _post(self, key: str, text: str) -> None:
        if self._store is not None:
            self._store.set(key, text)

    def _read(self, key: str) -> str:
        assert self._store is not None
        while not self._store.check([key]):
            if self._abandoned.wait(timeouts.QUICK_POLL_S):
                raise RuntimeError(_ABANDONED)
        return self._store.get(key).decode()


def check(tensors: Mapping[str, Any]) -> None:
    """ValueError unless all of these can be in a checkpoint."""
    some_dtypes = ", ".join(str(dtype) for dtype in DTYPES.values())
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"tensors[{name!r}] is {type(tensor).__name__}; give names and tensors"
            )
        if name.startswith("values."):
            raise ValueError(
                f"{name}: names that begin with 'values.' are those of tensors in "
                "values; choose another name"
            )
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"{name} is a tensor of {tensor.dtype} and {tensor.layout}; a "
                f"checkpoint holds strided ones of {some_dtypes}"
            )


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU, which holds no more memory than it has to."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor)


def first_of(problems: Sequence[str]) -> str:
    """The first rank's problem, if any has one."""
    return next(
        (f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), ""
    )


def entries_of(plans: "list[SavePlan]") -> dict[str, Entry]:
    """What all ranks write, by tensor."""
    found: dict[str, Entry] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            before = found.get(item.index.fqn)
            part = Part(
                file_of_rank(rank), tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            )
            found[item.index.fqn] = Entry(
                tuple(data.size),
                data.properties.dtype,
                (*(before.parts if before else ()), part),
            )
    return found
