"""An ipyparallel engine that is no rank: it does on another host what `Host` does here.

`python -m labkit.host.agent` is started there by a launcher, as over ssh, and reads its
variables from its standard input: its folder is its profile, and `AGENT_VARIABLE` has
the rest of its settings. Questions are answered in its control thread; what takes time
is called, as any function on an engine.
"""

import contextlib
import importlib
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit import timeouts
from labkit.answers import answer_questions
from labkit.host.exit_cause import EngineProcess
from labkit.host.processes import Host
from labkit.host.processes import free_port
from labkit.records import AGENT_VARIABLE
from labkit.records import HOST_VARIABLE
from labkit.records import SAFE_PATH

_OF_THE_LAUNCHER = ("SLURM_", "OMPI_", "PMI", "PRTE_", "MPI_LOCAL")
"""Prefixes of variables that say that this process is the only one of its program:
libraries on a rank would take that for the rank's place."""
_OF_THE_JOB = ("SLURM_JOB_", "SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_SUBMIT_")
NEEDED_BYTES = 2**20
"""Of the disk for temporary files: the logs and stacks of some ranks."""
_MISSES = "--IPEngine.max_heartbeat_misses"

_agent: "Agent | None" = None


class Agent:
    """A lab's processes on this host, for the notebook on another."""

    def __init__(self, folder: Path, told: dict[str, Any]) -> None:
        for each in told["former"]:  # of agents that have died with their host
            shutil.rmtree(each, ignore_errors=True)
        self.host = Host(folder, told["environment"])
        self.host.start_fork_server()
        self._engines: dict[int, EngineProcess] = {}
        self.unclaimed = _leave_after(2 * timeouts.START_S)
        """Where a start is interrupted before the notebook has called it, nobody else
        would end it for as long as the controller lives."""
        self.answers: dict[str, Callable[..., Any]] = {
            "look": self.look,
            **about_engines(lambda pid: self._engines[pid]),
            "fork_log": self.host.fork_log,
            "free_port": free_port,
            "end_sessions": self.host.end_sessions,
            "has": lambda path: Path(path).exists(),
            "exit": lambda: os._exit(0),
        }

    def look(self) -> dict[int, Any]:
        """How those engines have ended that have: a `Death` by process id."""
        return {
            pid: asdict(each.death())
            for pid, each in list(self._engines.items())
            if not each.is_alive
        }

    def fork(self, names: Sequence[str]) -> list[tuple[int, str]]:
        """An engine for each of `names`; its process id, and its file for its stack."""
        self.host.prepare_to_fork()
        environment = {**os.environ, **self.host.environment}
        environment.pop(AGENT_VARIABLE, None)
        if not os.environ.get("PYTHONSAFEPATH"):
            environment.update(SAFE_PATH)
        forked: list[tuple[int, str]] = []
        try:
            for name in names:
                forked.append(self._fork(name, environment))
        except BaseException:
            for pid, _ in forked:
                self.answers["kill"]("another engine could not be started", pid=pid)
            raise
        return forked

    def _fork(self, name: str, environment: dict[str, str]) -> tuple[int, str]:
        log_file = str(self.host.folder / f"engine-{name}.log")
        # That the controller is silent is for the agent to notice, which ends all.
        arguments = ["--IPEngine.enable_nanny=False", f"{_MISSES}=0"]
        process = self.host.fork(arguments, environment, log_file)
        waiter = threading.Thread(
            target=process.wait, name=f"labkit-{process.pid}", daemon=True
        )
        waiter.start()
        engine = EngineProcess(process, waiter, log_file)
        self._engines[engine.pid] = engine
        self.host.watch(engine)
        return engine.pid, engine.stack_file


def about_engines(find: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """What one process asks another of an engine, which `find` finds by the arguments
    that say which: as the methods of `EngineProcess`."""

    def kill(why: str, **which: Any) -> None:
        """End it at once; `why` is then the cause of its death."""
        engine = find(**which)
        engine.expected_cause = why
        engine.kill()

    return {
        "kill": kill,
        "signal": lambda signum, **which: find(**which).send(signum),
        "log": lambda **which: find(**which).log(),
        "ask_for_dump": lambda **which: find(**which).ask_for_dump(),
        "dumped_stack": lambda **which: find(**which).dumped_stack(),
        "stall_reason": lambda **which: find(**which).stall_reason(),
    }


# ---- what the notebook calls ----


def load() -> tuple[str, int]:
    """Which host this is, by the name that the notebook has for it, and the process
    id."""
    agent().unclaimed.cancel()
    return os.environ[HOST_VARIABLE], os.getpid()


def fork(names: Sequence[str]) -> list[tuple[int, str]]:
    """As `Agent.fork`."""
    return agent().fork(names)


def end() -> None:
    """End every process of the lab's on this host, and wait until they have ended;
    this one a moment after it has said so."""
    agent().host.end()
    _leave_after(timeouts.LEAVE_HOST_S)


def _leave_after(seconds: float) -> threading.Timer:
    """End this process, and with it what is left of its own, unless cancelled."""
    timer = threading.Timer(seconds, os._exit, [0])
    timer.daemon = True
    timer.start()
    return timer


def agent() -> Agent:
    """This process's."""
    assert _agent is not None, "serve() comes first"
    return _agent


def serve() -> None:
    """Be an agent from now on, in an engine."""
    global _agent
    from IPython import get_ipython

    told = json.loads(os.environ[AGENT_VARIABLE])
    folder = Path(os.environ["IPP_PROFILE_DIR"])
    print_to(folder / "agent.log")
    _agent = Agent(folder, told)
    kernel: Any = get_ipython().kernel
    answer_questions(kernel, _agent.answers)


def make_folder(folder: Path) -> None:
    """Make it, or end with the reason: where the disk is full, no log could say later
    why all else fails."""
    try:
        folder.mkdir(mode=0o700)  # nobody else has made it
        (folder / "space").write_bytes(bytes(NEEDED_BYTES))
        (folder / "space").unlink()
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(f"{error}: {folder}")


def print_to(file: Path) -> None:
    """Print to a file from now on: what has started this may end, as ssh does with its
    connection."""
    with file.open("ab") as log, Path(os.devnull).open("rb") as none:
        os.dup2(none.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def main() -> None:
    """Run an engine that serves until the controller or the notebook is gone."""
    os.environ.update(json.load(sys.stdin))
    make_folder(Path(os.environ["IPP_PROFILE_DIR"]))
    for name in list(os.environ):
        if name.startswith(_OF_THE_LAUNCHER) and not name.startswith(_OF_THE_JOB):
            del os.environ[name]
    told = json.loads(os.environ[AGENT_VARIABLE])
    with contextlib.suppress(OSError):  # this host has no such folder
        os.chdir(told["directory"])
    misses = max(told["patience_s"], timeouts.UNHEARD_S) / timeouts.HEARTBEAT_S
    sys.argv += [
        "--IPEngine.enable_nanny=False",
        f"{_MISSES}={math.ceil(misses)}",
        f"--IPEngine.timeout={timeouts.REGISTER_S:g}",
        f"--IPEngine.startup_command=import {__spec__.name} as it; it.serve()",
    ]
    try:
        app = importlib.import_module("ipyparallel.engine.app")
        app.IPEngine.launch_instance()
    finally:
        # Slurm ends what a step leaves, the watchdog too. IPEngine has imported this
        # module under its name.
        served = importlib.import_module(__spec__.name)._agent
        if served is not None:
            served.host.end()
        else:
            shutil.rmtree(os.environ["IPP_PROFILE_DIR"], ignore_errors=True)
        os._exit(0)  # whatever threads are left


if __name__ == "__main__":
    main()
