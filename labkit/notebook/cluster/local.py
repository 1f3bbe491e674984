"""Starts a lab's engines on this host, by ipyparallel's local launcher."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.compat import ipyparallel as compat
from labkit.host.exit_cause import EngineProcess
from labkit.host.processes import Host
from labkit.host.processes import free_port
from labkit.notebook.cluster.placement import LOADING_TORCH


class LocalEngines:
    """Starts engines on the notebook's own host."""

    def __init__(self, host: Host, environment: dict[str, str]) -> None:
        """Begins to start what forks them; they have `environment` besides the
        notebook's."""
        self._host = host
        self._environment = environment
        host.start_fork_server()

    def prepare(self, cluster: Any, on_progress: Callable[[str], None]) -> None:
        """Wait until engines can be forked."""
        on_progress(LOADING_TORCH)
        self._host.prepare_to_fork()

    @contextlib.contextmanager
    def starting(self, cluster: Any, ranks: Sequence[int]) -> Iterator[list[Any]]:
        """An `EngineProcess` for each of `ranks`, of ipyparallel's `cluster`; they are
        ended where what is done with them fails."""
        with compat.starting_set(
            cluster, len(ranks), lambda each: each.kill(), environment=self._environment
        ) as launchers:
            yield [watched(self._host, each) for each in launchers]

    def move(self, hosts: Any, placements: Any) -> Callable[[], None]:
        """Nothing: all places are on this host."""
        return lambda: None

    def leave_unused(self) -> None:
        """Nothing: there is no other host."""

    def log(self) -> str:
        """What was printed by what forks engines."""
        return self._host.fork_log()

    def look(self) -> None:
        """Nothing: the host looks at its own."""

    def end_sessions(self, engines: Sequence[Any]) -> None:
        """End what is left of what engines have started."""
        self._host.end_sessions({each.pid for each in engines})

    def free_port(self, rank: int) -> int:
        """A port on which nobody listens."""
        return free_port()

    def hosts_without(self, folder: Path) -> list[str]:
        """The hosts that do not share a folder of this one: there is no other."""
        return []

    ends_at = None
    """This host is not taken back."""

    def end(self) -> None:
        """Nothing: the host ends all of its own."""


def watched(host: Host, launcher: Any) -> EngineProcess:
    """What one of ipyparallel's launchers has started here, looked at by `host`."""
    process = EngineProcess(
        launcher.process, compat.waiter_of(launcher), launcher.output_file
    )
    host.watch(process)
    return process
