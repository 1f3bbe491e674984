"""Programs on hosts by mpiexec: Open MPI's, MPICH's or Intel's."""

import shutil
from collections.abc import Sequence

from labkit.checks import UserError
from labkit.notebook.hosts.launcher import HostLauncher
from labkit.notebook.hosts.launcher import HostSpec


class Mpi(HostLauncher):
    """`mpiexec` starts one process on each host; nothing there calls MPI."""

    def __init__(self, specs: Sequence[HostSpec], options: Sequence[str]) -> None:
        """`options` are mpiexec's own."""
        super().__init__(specs)
        self._options = list(options)
        if shutil.which("mpiexec") is None:
            raise UserError("there is no mpiexec here; load or install an MPI")

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        # By itself it binds one process to one core, and all that this starts.
        place = ["-n", "1", "--host", host, "--bind-to", "none"]
        return ["mpiexec", *place, *self._options, *words]

    def address(self, host: str) -> str:
        return host

    def cannot_reach(self, host: str, code: int, last: str) -> str:
        # Its exit code does not say whether the program was started.
        said = last or f"mpiexec ended with exit code {code}"
        return f"{said}; try: mpiexec -n 1 --host {host} true"
