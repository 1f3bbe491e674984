"""Has a profile's controller and engines for as long as its input is open.

`python -m labkit.notebook.hosts.profiles.holder` reads what to start from a line of
JSON, and writes lines of JSON about how far it is. It outlives no notebook: where that
is killed, the input ends, and what the profile's launcher has submitted is deleted.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ipyparallel
from ipyparallel.cluster.launcher import BatchSystemLauncher
from ipyparallel.cluster.launcher import LocalControllerLauncher
from ipyparallel.cluster.launcher import SSHEngineSetLauncher

from labkit import timeouts
from labkit.call_by_name import call_by_name
from labkit.checks import UserError
from labkit.compat import ipyparallel as compat
from labkit.notebook.hosts.launcher import last_line
from labkit.notebook.hosts.launcher import last_lines

_PROGRAMS = "labkit.notebook.hosts.profiles.programs"
_CONTROLLER = "labkit.notebook.hosts.profiles.controller"
_LINE_BYTES = 2**24
"""At most, of what a program is given."""
_ALL = 4096
"""More than a profile for SSH names: it says itself how many engines each host has."""
_FORMER = {
    *("engine_launcher_class", "controller_launcher_class", "controller_ip"),
    *("controller_location", "delay", "n"),
}
"""What profiles of ipyparallel 6 have in sections of `ipcluster`'s, which alone still
reads it there: `init_deprecated_config`."""

_notebook = sys.stdout


def tell(**what: Any) -> None:
    """Say something to the notebook."""
    print(json.dumps(what), file=_notebook, flush=True)


class Holder:
    """A profile's cluster, and the programs that its engines run."""

    def __init__(
        self, profile_dir: str, name: str, num_engines: int | None, address: str
    ) -> None:
        """`name` is the cluster's own; the controller listens at `address`, or where
        the profile says, or at all addresses. UserError for a profile that is not as
        ipyparallel's `Cluster` reads it."""
        self._profile, self._name = Path(profile_dir), name
        # Where a job starts, and its script is written: on a folder that the hosts
        # share, if any is.
        self._folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=profile_dir))
        self._cluster = cluster = ipyparallel.Cluster(
            profile_dir=profile_dir,
            cluster_id=name,
            shutdown_atexit=False,
            log_level=logging.CRITICAL,
            # Where the lab's own is; the lab would not work either if engines did not
            # reach it there.
            controller_launcher_class=LocalControllerLauncher,
        )
        former = [
            f"c.{section}.{name} as c.Cluster.{name}"
            for section in ("IPClusterEngines", "IPClusterStart")
            for name in sorted(_FORMER & set(cluster.config[section]))
        ]
        if former:
            raise UserError(f"it is for ipyparallel 6; write {', '.join(former)}")
        if address:
            cluster.controller_ip = address
        # Of an array, PBS deletes "12[]" and knows no job 12.
        cluster.config.PBSLauncher.setdefault("job_id_regexp", r"\d+(\[\])?")
        launcher = cluster.engine_launcher_class
        names_all = issubclass(launcher, SSHEngineSetLauncher)
        self._num_engines = num_engines or cluster.n or (_ALL if names_all else 1)
        self._settings: dict[str, Any] = {}
        if issubclass(launcher, BatchSystemLauncher):
            self._settings = self._settings_of(launcher)
        self._engine_of: dict[str, int] = {}
        self._client: Any = None
        self._state = ""
        """What the notebook was told last of how far it is."""
        os.chdir(self._folder)

    def _settings_of(self, launcher: Any) -> dict[str, Any]:
        """Of a job's launcher: engines find the controller by a file that this user
        alone can read. What a job has in its environment others may see, and not every
        batch system passes it on."""
        self._cluster.send_engines_connection_env = False
        # Without a folder it makes one for its log in the working directory.
        configured = launcher(
            work_dir=".", profile_dir=str(self._profile), parent=self._cluster
        )
        which = [f"--profile-dir={self._profile}", f"--cluster-id={self._name}"]
        settings: dict[str, Any] = {"engine_args": [*configured.engine_args, *which]}
        if template := configured.batch_template_file:
            settings["batch_template_file"] = str(Path(template).absolute())
        return settings

    async def start(self) -> list[tuple[str, str, int]]:
        """Start the engines, and wait for them for as long as it takes; the name and
        the address of each host that they are on, and how many are there."""
        cluster = self._cluster
        await cluster.start_controller(
            controller_cmd=[sys.executable, "-P", "-m", _CONTROLLER]
        )
        has_ended = asyncio.Event()
        cluster.controller.on_stop(lambda data: has_ended.set())
        try:
            self._client = await cluster.connect_client()
        except Exception as error:
            said = [f"its controller: {error}", *_last_of(cluster.controller)]
            raise UserError("; ".join(said)) from error
        tell(progress="starting engines")
        await cluster.start_engines(self._num_engines, **self._settings)
        engines = cluster.engine_set
        if not engines.n:
            raise UserError("it names no engines: c.SSHEngineSetLauncher.engines")
        engines.on_stop(lambda data: has_ended.set())
        began = time.monotonic()
        while (there := len(self._client.ids)) < engines.n:
            self._say_how_many(there, engines, time.monotonic() - began)
            # Of a set of processes one that ends is missed for good.
            if has_ended.is_set() or getattr(engines, "stop_data", None):
                has_no_controller = cluster.controller.state == "after"
                ended = cluster.controller if has_no_controller else engines
                what = "its controller" if has_no_controller else "an engine"
                words = f"{what} ended before all engines were there"
                raise UserError(": ".join([words, *_last_of(ended)]))
            await asyncio.sleep(timeouts.LOOK_S)
            compat.ask_for_engines(self._client)
        self._say_how_many(there, engines, 0)
        cluster.controller.on_stop(
            lambda data: tell(are_gone="its controller has ended")
        )
        return await self._find_hosts()

    def _say_how_many(self, there: int, engines: Any, waited_s: float) -> None:
        job = f"job {engines.job_id}: " if getattr(engines, "job_id", "") else ""
        state = f"{job}{there} of {engines.n} engines are there"
        if minutes := int(waited_s / 60):
            state += f" after {minutes} min"
        if there < engines.n and (printed := self._printed()):
            state += f" ({printed})"
        if state != self._state:
            self._state = state
            tell(progress=state)

    def _printed(self) -> str:
        """The last line that an engine's job has printed, to the file that ipyparallel
        names, or to one where the job starts."""
        logs = self._profile.glob(f"log/ipengine*{self._name}*.log")
        files = [*self._folder.glob("*.[oe]*"), *logs]
        said: list[tuple[float, str]] = []
        for file in files:
            with contextlib.suppress(OSError):  # it has just been removed
                said.append((file.stat().st_mtime, file.read_text(errors="replace")))
        return last_line("\n".join(text for _, text in sorted(said)))

    async def _find_hosts(self) -> list[tuple[str, str, int]]:
        connection = await self._cluster.controller.get_connection_info()
        at = [connection["engine"][each] for each in ("interface", "location")]
        found: dict[str, tuple[str, list[int]]] = {}
        for engine in self._client.ids:
            name, address = await self._call(engine, "whereabouts", *at)
            found.setdefault(address, (name, []))[1].append(engine)
        names = [name for name, _ in found.values()]
        hosts = []
        for address, (name, engines) in found.items():
            known = name if names.count(name) == 1 else address
            self._engine_of[known] = engines[0]
            hosts.append((known, address, len(engines)))
        return hosts

    async def _call(self, engine: int, function: str, *args: Any) -> Any:
        call = self._client[engine].apply_async(
            call_by_name, f"{_PROGRAMS}:{function}", args
        )
        answer = await asyncio.to_thread(call.get, timeouts.CALL_S)
        self._client.purge_local_results(call)
        self._client.history.clear()  # which would grow for days
        return answer

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Run a program for a command line, until one of them has ended."""

        async def say(**what: Any) -> None:
            writer.write(json.dumps(what).encode() + b"\n")
            await writer.drain()

        with contextlib.suppress(OSError):  # the command line has ended
            try:
                asked = json.loads(await reader.readline())
                engine = self._engine_of[asked["host"]]
                number = await self._call(
                    engine, "begin", asked["words"], asked["given"]
                )
                pause_s, code = timeouts.POLL_S, None
                while not reader.at_eof():
                    out, err, code = await self._call(engine, "read", number)
                    if out or err:
                        await say(out=out, err=err)
                        pause_s = timeouts.POLL_S
                        continue
                    if code is not None:
                        await say(code=code)
                        break
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(1), pause_s)
                    pause_s = min(2 * pause_s, timeouts.SELDOM_S)
                if code is None:  # the command line has ended before it
                    await self._call(engine, "end", number)
            except (IndexError, TimeoutError, ipyparallel.error.IPythonError) as error:
                await say(err=f"the profile's engine there failed: {error}\n", code=255)
            writer.close()

    async def watch(self) -> None:
        """Say so when no engine is left, as when their job is over."""
        while self._client.ids:
            await asyncio.sleep(timeouts.ASK_S)
        tell(are_gone=self._printed() or "it printed nothing")

    async def stop(self) -> None:
        """Delete the job, or end the engines; then the controller."""
        cluster = self._cluster
        is_over = bool(self._engine_of and not self._client.ids)
        if self._client is not None:
            self._client.close()
        for name, engines in [*cluster.engines.items()]:
            job = getattr(engines, "job_id", None)
            if job == "":  # none was submitted: nothing is to be deleted
                continue
            try:
                await cluster.stop_engines(name)
            except Exception as error:
                if not is_over:  # one that is over cannot be deleted
                    what = f"job {job}" if job else "its engines"
                    tell(left=f"{what} may be there still ({error})")
        cluster.engines.clear()
        if cluster.controller is not None:
            await cluster.stop_controller()
        for file in self._profile.glob(f"*/*{self._name}*"):  # logs, and the hub's
            file.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def _last_of(launcher: Any) -> list[str]:
    """The last line that what it has started has printed, if there is one."""
    return last_lines(launcher.get_output())[-1:]


async def hold(
    profile_dir: str, name: str, num_engines: int | None, address: str
) -> None:
    """As the module says, until more is read or the input ends."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(0)
        over.set()

    loop.add_reader(0, end)
    holder = Holder(profile_dir, name, num_engines, address)
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        path = str(Path(folder, "programs"))
        try:
            await asyncio.start_unix_server(holder.serve, path, limit=_LINE_BYTES)
            ending = asyncio.create_task(over.wait())
            starting = asyncio.create_task(holder.start())
            await asyncio.wait((ending, starting), return_when="FIRST_COMPLETED")
            if not starting.done():
                starting.cancel()
                await asyncio.wait((starting,))
                return
            if error := starting.exception():  # whatever a launcher raises
                tell(error=f"{error}" or type(error).__name__)
                return
            tell(hosts=starting.result(), socket=path)
            watching = asyncio.create_task(holder.watch())
            await asyncio.wait((ending, watching), return_when="FIRST_COMPLETED")
            await ending
        finally:
            await holder.stop()


def main() -> None:
    """Hold what the first line says."""
    global _notebook
    # What the profile's files print is not for the notebook.
    _notebook = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        asyncio.run(hold(**json.loads(sys.stdin.readline())))
    except Exception as error:  # whatever a profile's files may raise
        tell(error=f"{error}" or type(error).__name__)


if __name__ == "__main__":
    main()
