"""Programs on hosts by mpiexec: Open MPI's, MPICH's or Intel's."""

import re
import shlex
import shutil
from collections.abc import Sequence

from labkit.checks import UserError
from labkit.notebook.hosts.launcher import HostLauncher
from labkit.notebook.hosts.launcher import HostSpec

_LINES = 30
"""So many of mpiexec's are shown."""


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

    def cannot_reach(self, host: str, code: int, errors: str) -> str:
        # Its exit code does not say whether the program was started, and of what it
        # prints the first lines explain, not the last ones.
        lines = [line for line in errors.splitlines() if re.search(r"\w", line)]
        said = "".join(f"\n    {line}" for line in lines[:_LINES])
        tried = shlex.join(self.command(host, ["true"]))
        return (
            f"mpiexec ended with exit code {code}{said and ' and said:' + said}\n"
            f"Try it in a terminal: {tried}"
        )
