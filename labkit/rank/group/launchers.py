"""What starts a script's processes: on a rank those are there already."""

import functools
import inspect
import itertools
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from types import FunctionType
from typing import Any

import torch
from torch.distributed.launcher import api as torchrun
from torch.multiprocessing import ProcessContext

from labkit.checks import UnsupportedLoopError
from labkit.checks import is_int
from labkit.compat.accelerate import forget_state
from labkit.rank.group.process_group import RankProcessGroup

_NUMBER_OF_RANKS = re.compile(
    r"world_?size|size|n|(n|num)_?(procs?|processes|ranks|gpus?|devices)(_per_node)?"
)
"""Names under which scripts hand the number of their processes to each."""

_LAUNCHER = re.compile(
    r"\s*(\w+=\S*\s+)*"
    r"(?P<it>torchrun|python\S* -m torch\.distributed\.run|accelerate launch"
    r"|deepspeed)\b"
)


class Launchers:
    """Has `torch.multiprocessing.spawn`, and what torchrun and Accelerate's
    `notebook_launcher` are made of, call their function on this rank, once."""

    def __init__(self, group: RankProcessGroup, note: Callable[[str], None]) -> None:
        """`note` shows the user a sentence."""
        self._group = group
        self._note = note
        # `spawn` looks it up in its module, which goes by the same name.
        for module in (torch.multiprocessing, sys.modules[ProcessContext.__module__]):
            module.start_processes = self._start_processes  # type: ignore[attr-defined]
        torchrun.launch_agent = self._launch_agent
        BaseProcess.__init__ = self._checking_target(BaseProcess.__init__)  # type: ignore[method-assign]
        # A script sets it first of all, and this process has run others before.
        for module in (multiprocessing, torch.multiprocessing):
            module.set_start_method = functools.partial(  # type: ignore[attr-defined]
                multiprocessing.set_start_method, force=True
            )

    def _start_processes(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> ProcessContext | None:
        """`torch.multiprocessing.start_processes`: what `spawn` calls."""
        name = name_of(fn)
        call = f"torch.multiprocessing.spawn({name}, nprocs={nprocs})"
        if not join:
            raise UnsupportedLoopError(
                f"{call} with join=False: the processes are this lab's "
                f"{self._ranks()}, which cannot run {name} beside the code that "
                "follows; leave join out. A library has to use the ranks that exist: "
                'Lightning by Trainer(strategy="ddp", devices=world_size)'
            )
        world_size = self._group.world_size
        args, changed = with_world_size(fn, args, nprocs, world_size, call)
        said = "".join(f", {each}={world_size}" for each in changed)
        self._note(
            f"{call}: the processes are this lab's {self._ranks()}; each calls "
            f"{name}(rank{said}, ...), once"
        )
        fn(self._group.placement.rank, *args)
        return None

    def _launch_agent(
        self, config: Any, entrypoint: Any, args: Sequence[Any], *more: Any, **kw: Any
    ) -> dict[int, Any]:
        """`torch.distributed.launcher.api.launch_agent`: what torchrun calls, with a
        command, and `notebook_launcher`, with a function."""
        if not callable(entrypoint):
            command = [str(each) for each in [entrypoint, *args]]
            script = [each for each in command if each not in (sys.executable, "-u")]
            raise UnsupportedLoopError(
                "torchrun starts processes of its own, and this lab's "
                f"{self._ranks()} exist already; run the script on them with "
                f"%run {' '.join(script)}"
            )
        name = name_of(entrypoint)
        nprocs = config.max_nodes * config.nproc_per_node
        self._note(
            f"{name} was to be launched in {nprocs} processes; those are this lab's "
            f"{self._ranks()}, and each calls it, once"
        )
        # The launcher may have set another number.
        os.environ["WORLD_SIZE"] = str(self._group.world_size)
        try:
            return {self._group.placement.rank: entrypoint(*args)}
        finally:
            forget_state()

    def _checking_target(self, make: Callable[..., None]) -> Callable[..., None]:
        """`Process.__init__`, which refuses a `target` that would join a group."""

        @functools.wraps(make)
        def checked(
            process: Any, group: Any = None, target: Any = None, *more: Any, **kw: Any
        ) -> None:
            given = [target, *more, *kw.values()]
            args = [each for each in given if isinstance(each, tuple)]
            if any(forms_group(each) for each in itertools.chain(given, *args)):
                raise UnsupportedLoopError(
                    f"Process(target={name_of(target)}): it calls init_process_group, "
                    f"and the processes of a group are this lab's {self._ranks()} "
                    f"already; call it on them, once: {name_of(target)}(rank, "
                    "world_size)"
                )
            make(process, group, target, *more, **kw)

        return checked

    def _ranks(self) -> str:
        world_size = self._group.world_size
        return f"{world_size} ranks" if world_size > 1 else "one rank"

    def noting_commands(self, system: Callable[[str], Any]) -> Callable[[str], Any]:
        """`system`, which runs a shell command, with a note where the command launches
        processes that are no ranks."""

        def noted(command: str) -> Any:
            if found := _LAUNCHER.match(command):
                self._note(
                    f"{found['it']} starts processes of its own, on each rank that "
                    "runs this line, and the lab sees nothing of them; to run a script "
                    "on the ranks themselves: %run SCRIPT.py ARGUMENTS"
                )
            return system(command)

        return noted


def with_world_size(
    fn: Callable[..., Any],
    args: Sequence[Any],
    nprocs: int,
    world_size: int,
    call: str,
) -> tuple[list[Any], list[str]]:
    """`args` with the number of ranks where they hold another, `nprocs`, as the number
    of processes; and the names of those arguments.

    `nprocs=torch.cuda.device_count()`, for one, is 0 on a machine without a GPU.
    """
    if nprocs == world_size:
        return list(args), []
    try:
        names = list(inspect.signature(fn).bind(0, *args).arguments)[1:]
    except (TypeError, ValueError):  # it has none, or the call will say what is wrong
        names = []
    names += [""] * (len(args) - len(names))
    same = [
        i for i, each in enumerate(args) if is_int(each) and int(each) == int(nprocs)
    ]
    known = [i for i in same if _NUMBER_OF_RANKS.fullmatch(names[i].lower())]
    if same and not known:
        raise UnsupportedLoopError(
            f"{call}: this lab has world_size={world_size}, and args[{same[0]}] is "
            f"{nprocs} too; write nprocs=world_size, and world_size in args where the "
            "number of processes is meant"
        )
    return (
        [world_size if i in known else each for i, each in enumerate(args)],
        [names[i] for i in known],
    )


def forms_group(function: Any, looked_at: frozenset[Any] = frozenset()) -> bool:
    """Whether a function of the cell names `init_process_group`, or one that does."""
    if not isinstance(function, FunctionType) or function.__module__ != "__main__":
        return False
    names = function.__code__.co_names
    return "init_process_group" in names or any(
        forms_group(function.__globals__.get(name), looked_at | {function})
        for name in names
        if function not in looked_at
    )


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
