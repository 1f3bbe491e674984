"""Programs on the hosts that an ipyparallel profile starts engines on."""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import psutil

from labkit import timeouts
from labkit.checks import UserError
from labkit.checks import short_repr
from labkit.notebook.hosts.launcher import HostLauncher
from labkit.notebook.hosts.launcher import HostSpec
from labkit.notebook.hosts.launcher import check_spread
from labkit.notebook.hosts.launcher import fewer
from labkit.notebook.hosts.launcher import has_let_go
from labkit.notebook.hosts.launcher import last_lines
from labkit.notebook.hosts.launcher import spread
from labkit.notebook.hosts.launcher import written
from labkit.notebook.kernel import interrupts

_HOLD = (
    '"$1" -P -m labkit.notebook.hosts.profiles.holder; cd "$2"; '
    'if [ -e "security/cluster-$3.json" ]; then '
    '"$1" -m ipyparallel.cluster stop --profile-dir="$2" --cluster-id="$3"; fi; '
    'rm -rf */*"$3"* "$3"-*'
)
"""The holder; where it was killed, what it has started is deleted all the same."""
_RELAY = "labkit.notebook.hosts.profiles.relay"


def profile_folder(name: str) -> str:
    """The folder of an IPython profile; ValueError where there is none."""
    # Here: ranks import this module, also where no IPython is.
    from IPython.core.profileapp import list_profiles_in
    from IPython.core.profiledir import ProfileDir
    from IPython.core.profiledir import ProfileDirError
    from IPython.paths import get_ipython_dir

    folder = get_ipython_dir()
    try:
        found = ProfileDir.find_profile_dir_by_name(folder, name)
    except (ProfileDirError, TypeError):
        there = ", ".join(sorted(list_profiles_in(folder))) or "none"
        raise ValueError(
            f"--profile {short_repr(name)}: there is no such profile in {folder}; "
            f"there are: {there}. `ipython profile create --parallel --profile=NAME` "
            "makes one"
        ) from None
    return str(found.location)


def check_profile(what: str, value: Any) -> None:
    """ValueError unless there is such a profile."""
    profile_folder(value)


class Profile(HostLauncher):
    """One engine of the profile's on each host starts programs there: those engines
    are started as its `ipcluster_config.py` says, and are no ranks."""

    def __init__(
        self,
        name: str,
        *,
        num_ranks: int | None,
        num_engines: int | None,
        address: str,
        on_progress: Callable[[str], None],
    ) -> None:
        """It waits until the engines are there: where the profile submits a job, for as
        long as that waits. The controller listens at `address`, or where the profile
        says."""
        super().__init__([])
        if num_ranks is not None and num_engines is not None:
            check_spread(num_ranks, num_engines)
        self._name = name
        self._folder = profile_folder(name)
        self._said, self._errors = (
            tempfile.TemporaryFile("w+")  # noqa: SIM115
            for _ in range(2)
        )
        self._cluster = f"labkit-{os.getpid()}-{time.time_ns()}"
        self._holder: subprocess.Popen[str] | None = subprocess.Popen(
            ["sh", "-c", _HOLD, "sh", sys.executable, self._folder, self._cluster],
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # the user's Ctrl-C is the notebook's
        )
        try:
            told = {
                "profile_dir": self._folder,
                "name": self._cluster,
                "num_engines": num_engines,
                "address": address,
            }
            assert self._holder.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it says why
                self._holder.stdin.write(json.dumps(told) + "\n")
                self._holder.stdin.flush()
            found = self._wait(on_progress)
            self._socket: str = found["socket"]
            self._addresses = {name: address for name, address, _ in found["hosts"]}
            self._engines = {name: number for name, _, number in found["hosts"]}
            self.specs = self._place(num_ranks, [*self._engines])
        except BaseException:
            self.close()
            raise

    def _wait(self, on_progress: Callable[[str], None]) -> dict[str, Any]:
        """What the holder says when its engines are there."""
        assert self._holder is not None
        state = ""
        while True:
            interrupts.check()
            has_ended = self._holder.poll() is not None
            told = self._told()
            if "hosts" in told:
                return told
            if "error" in told or has_ended:
                words = [told.get("error", ""), *last_lines(written(self._errors))]
                raise UserError(
                    f"profile {self._name} starts no engines: "
                    + "; ".join(filter(None, words))
                    + ". Its settings are in ipcluster_config.py and "
                    f"ipcontroller_config.py of {self._folder}; to see it without "
                    f"labkit: `ipcluster start --profile={self._name} "
                    "-n 1 --debug`, and Ctrl-C ends it"
                )
            if state != (state := told.get("progress", "starting a controller")):
                on_progress(f"profile {self._name}: {state}")
            time.sleep(timeouts.POLL_S)

    def _told(self) -> dict[str, Any]:
        """What the holder has said: the last of each kind."""
        told: dict[str, Any] = {}
        for line in written(self._said).splitlines(keepends=True):
            if line.endswith("\n"):
                told.update(json.loads(line))
        return told

    def _place(self, num_ranks: int | None, names: Sequence[str]) -> list[HostSpec]:
        """The ranks of each host: as many as it has engines where that is more than
        one somewhere, or `num_ranks` spread evenly."""
        if num_ranks is None:
            is_one_each = max(self._engines.values()) == 1
            return [
                HostSpec(name, None if is_one_each else self._engines[name])
                for name in names
            ]
        if num_ranks < len(names):
            raise ValueError(
                f"-n {num_ranks}: fewer ranks than the {len(names)} hosts of profile "
                f"{self._name}; start fewer with --nodes {num_ranks}, or "
                "name fewer in the profile"
            )
        return spread(num_ranks, names)

    def on_hosts(self, specs: Sequence[HostSpec]) -> "Profile":
        raise ValueError(
            f"--hosts: profile {self._name} says which hosts there are "
            f"({', '.join(self._engines)}), and they stay; %dist_restart -n N changes "
            "the number of ranks on them"
        )

    def for_ranks(self, num_ranks: int, now: Mapping[str, int]) -> "Profile":
        """Fewer ranks leave the last hosts first; more are spread over all hosts."""
        other = copy.copy(self)
        if num_ranks > sum(now.values()):
            other.specs = self._place(num_ranks, [*self._engines][:num_ranks])
        else:
            other.specs = fewer(num_ranks, now)
        return other

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-P", "-m", _RELAY, self._socket, host, *words]

    def address(self, host: str) -> str:
        return self._addresses[host]

    def cannot_reach(self, host: str, code: int, errors: str) -> str:
        return ""

    def why_gone(self, said: str = "") -> str:
        if self._holder is None or self._holder.poll() is not None:
            return f"the controller of profile {self._name} has ended"
        if "are_gone" in (told := self._told()):
            return (
                f"the engines of profile {self._name} have all ended "
                f"({told['are_gone']})"
            )
        return ""

    def close(self) -> None:
        holder, self._holder = self._holder, None
        if holder is None:
            return
        if not has_let_go(holder):
            for child in psutil.Process(holder.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                holder.wait(timeouts.END_JOB_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(holder.pid, signal.SIGKILL)
            holder.wait()
        if left := self._told().get("left"):
            print(f"labkit: profile {self._name}: {left}", file=sys.stderr)
