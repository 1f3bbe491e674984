"""Programs on hosts by ssh."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from labkit import timeouts
from labkit.checks import UserError
from labkit.notebook.hosts.launcher import HostLauncher
from labkit.notebook.hosts.launcher import HostSpec
from labkit.notebook.hosts.launcher import last_line

OPTIONS = [
    *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={timeouts.CONNECT_S:.0f}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
]
"""It asks for no password and for no word on a key: nobody could answer. It ends where
the host does not answer any more."""
_FAILED = 255
"""How ssh ends where it is itself that failed."""


class Ssh(HostLauncher):
    """OpenSSH's client."""

    ends_with_program = False  # but with the connection too, which others outlive

    def __init__(self, specs: Sequence[HostSpec]) -> None:
        super().__init__(specs)
        if shutil.which("ssh") is None:
            raise UserError("there is no ssh here; install OpenSSH's client")

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        return ["ssh", *OPTIONS, host, "--", shlex.join(words)]

    def address(self, host: str) -> str:
        told = subprocess.run(
            ["ssh", "-G", host], capture_output=True, text=True, check=False
        )
        names = re.findall(r"(?m)^hostname (.*)$", told.stdout)
        return names[0] if names else host

    def cannot_reach(self, host: str, code: int, errors: str) -> str:
        if code != _FAILED:
            return ""
        said = last_line(errors) or f"exit code {code}"
        return (
            f"ssh failed ({said}); run `ssh {host} true` in a terminal: it has to "
            "succeed without a password or a question"
        )
