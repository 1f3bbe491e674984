"""Has a profile's controller and engines for as long as its input is open.

`python -m labkit.notebook.hosts.profiles.holder` is told what to start by a line of
JSON, and says by lines of JSON how far it is. It outlives no notebook: where that is
killed, the input ends, and what the profile's launcher has submitted is deleted.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import ipyparallel
from ipyparallel.cluster.launcher import SSHEngineSetLauncher

from labkit import timeouts
from labkit.call_by_name import call_by_name

_PROGRAMS = "labkit.notebook.hosts.profiles.programs"
_LINE_BYTES = 2**24
"""At most, of what a program is given."""
_ALL = 4096
"""More than a profile for SSH names: it says itself how many engines each host has."""


def tell(**what: Any) -> None:
    """Say something to the notebook."""
    print(json.dumps(what), flush=True)


class Holder:
    """A profile's cluster, and the programs that its engines run."""

    def __init__(
        self, profile_dir: str, name: str, num_engines: int | None, address: str
    ) -> None:
        """`name` is the cluster's own; the controller listens at `address`, or where
        the profile says, or at all addresses."""
        # Where an engine's job starts, and its script is written: on a folder that the
        # hosts share, if any is.
        self._profile, self._name = Path(profile_dir), name
        self._folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=profile_dir))
        os.chdir(self._folder)
        os.environ.setdefault("IPP_ENABLE_CURVE", "1")  # unless the profile says so
        self._cluster = ipyparallel.Cluster(
            profile_dir=profile_dir,
            cluster_id=name,
            shutdown_atexit=False,
            log_level=logging.CRITICAL,
        )
        self._cluster.controller_args = [
            *self._cluster.controller_args,
            *("--IPController.use_threads=True", "--nodb"),  # one process, and small
            # After ten of them without an answer an engine counts as gone.
            f"--HeartMonitor.period={timeouts.ASK_S * 1000:.0f}",
        ]
        if address or not self._cluster.controller_ip:
            self._cluster.controller_ip = address or "*"
        names_all = issubclass(
            self._cluster.engine_launcher_class, SSHEngineSetLauncher
        )
        self._num_engines = num_engines or self._cluster.n or (_ALL if names_all else 1)
        self._engine_of: dict[str, int] = {}
        self._client: Any = None

    async def start(self) -> list[tuple[str, str, int]]:
        """Start the engines, and wait for them for as long as it takes; the name and
        the address of each host that they are on, and how many are there."""
        cluster = self._cluster
        await cluster.start_controller()
        tell(progress="starting engines")
        await cluster.start_engines(self._num_engines)
        engines = cluster.engine_set
        has_stopped = asyncio.Event()
        engines.on_stop(lambda data: has_stopped.set())
        self._client = await cluster.connect_client()
        job = f"job {engines.job_id}: " if getattr(engines, "job_id", "") else ""
        said = ""
        while True:
            there, printed = len(self._client.ids), self._printed()
            state = f"{job}{there} of {engines.n} engines are there"
            if printed and there < engines.n:
                state += f" ({printed})"
            if state != said:
                tell(progress=(said := state))
            if there >= engines.n:
                return await self._find_hosts()
            if has_stopped.is_set():
                raise RuntimeError(f"an engine has ended at once: {printed}")
            await asyncio.sleep(timeouts.LOOK_S)

    def _printed(self) -> str:
        """The last line that an engine's job has printed, to the file that ipyparallel
        names, or to one where the job starts."""
        logs = self._profile.glob(f"log/ipengine*{self._name}*.log")
        files = [*self._folder.glob("*.[oe]*"), *logs]
        files.sort(key=lambda file: file.stat().st_mtime)
        lines = "".join(file.read_text(errors="replace") for file in files).splitlines()
        return "".join([line.strip() for line in lines if line.strip()][-1:])

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
                pause_s = timeouts.POLL_S
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
                    pause_s = min(2 * pause_s, timeouts.ANSWER_S)
            except (IndexError, TimeoutError, ipyparallel.error.IPythonError) as error:
                await say(err=f"the profile's engine there failed: {error}\n", code=255)
            writer.close()

    async def watch(self) -> None:
        """Say so when no engine is left, as when their job is over."""
        while self._client.ids:
            await asyncio.sleep(timeouts.ASK_S)
        tell(are_gone=self._printed())

    async def stop(self) -> None:
        """Delete the job, or end the engines; then the controller."""
        if self._client is not None:
            self._client.close()
        # Where there is no job any more, or none yet, what deletes it fails.
        with contextlib.suppress(Exception):
            await self._cluster.stop_engines()
        self._cluster.engines.clear()
        if self._cluster.controller is not None:
            await self._cluster.stop_controller()
        for file in self._profile.glob(f"*/*{self._name}*"):  # logs, and the hub's
            file.unlink()
        shutil.rmtree(self._folder, ignore_errors=True)


async def hold(
    profile_dir: str, name: str, num_engines: int | None, address: str
) -> None:
    """As the module says, until more is read or the input ends."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(0, over.set)
    holder = Holder(profile_dir, name, num_engines, address)
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        try:
            ending = asyncio.create_task(over.wait())
            starting = asyncio.create_task(holder.start())
            await asyncio.wait((ending, starting), return_when="FIRST_COMPLETED")
            if not starting.done():
                starting.cancel()
                await asyncio.wait((starting,))
                return
            if error := starting.exception():  # whatever a profile's launcher raises
                tell(error=f"{error}" or type(error).__name__)
                return
            path = str(Path(folder, "programs"))
            await asyncio.start_unix_server(holder.serve, path, limit=_LINE_BYTES)
            tell(hosts=starting.result(), socket=path)
            await asyncio.wait(
                (ending, asyncio.create_task(holder.watch())),
                return_when="FIRST_COMPLETED",
            )
            await ending
        finally:
            await holder.stop()


def main() -> None:
    """Hold what the first line says."""
    asyncio.run(hold(**json.loads(sys.stdin.readline())))


if __name__ == "__main__":
    main()
