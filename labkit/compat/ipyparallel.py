"""The private parts of ipyparallel that labkit uses: messages to one engine, launchers.

Its public views run functions; labkit sends a cell with metadata, listens to one
request's output, and asks an engine over the control channel while it runs a cell.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import zmq
from ipyparallel.cluster.launcher import LocalEngineLauncher
from ipyparallel.cluster.launcher import LocalEngineSetLauncher

from labkit import timeouts
from labkit.compat.gate import Gate

GATE = Gate("ipyparallel")
_logger = logging.getLogger("labkit")
_CLIENT = "ipyparallel.client.client:Client"
_NO_NANNY = "--IPEngine.enable_nanny=False"
_LAUNCHER = "ipyparallel.cluster.launcher:LocalProcessLauncher"

OnOutput = Callable[[dict[str, Any]], None]
"""Takes each message that a request leads to on the iopub channel."""

StartEngine = Callable[[list[str], dict[str, str], str], psutil.Process]
"""Starts an engine with these arguments, this environment and this output file."""

OnReply = Callable[[str, dict[str, Any]], None]
"""Takes the id of a request, and the content of the reply to it."""


@GATE.needs(f"{_CLIENT}._mux_stream", "ipyparallel.client.client:ExecuteReply._content")
def send_cell(
    client: Any,
    ident: bytes,
    code: str,
    metadata: dict[str, Any],
    on_output: OnOutput,
    on_reply: OnReply,
) -> Any:
    """Execute code on one engine, with metadata of our own; the future of its reply.

    `DirectView.execute` takes no metadata, and shows output by itself. `on_reply` is
    called in the client's thread, with no content where the code has failed.
    """

    def reply(done: Any) -> None:
        on_reply(done.msg_id, getattr(done.result(), "_content", {}))

    def listen(future: Any) -> None:
        future.iopub_callbacks.append(on_output)
        future.add_done_callback(reply)

    return client.send_execute_request(
        client._mux_stream,
        code,
        silent=False,
        ident=ident,
        metadata=metadata,
        message_future_hook=listen,
    )


@GATE.needs(f"{_CLIENT}._output_futures")
def end_output(client: Any, msg_id: str) -> None:
    """Let the client forget a request whose output is all here, once it is answered.

    By itself it waits for the idle status, which a rank does not publish. To be called
    in the client's thread.
    """
    output = client._output_futures.get(msg_id)
    if output is not None and not output.done():
        output.set_result(None)


@GATE.needs(f"{_CLIENT}._send", f"{_CLIENT}._control_stream")
def send_request(
    client: Any,
    ident: bytes,
    kind: str,
    content: dict[str, Any],
    on_output: OnOutput | None = None,
) -> Any:
    """Send a control message, which an engine answers while it runs a cell; the future
    of its reply.

    Of control messages the client has public methods for `abort` and `shutdown` alone.
    """

    def listen(future: Any) -> None:
        if on_output is not None:
            future.iopub_callbacks.append(on_output)

    return client._send(
        client._control_stream,
        kind,
        content=content,
        ident=ident,
        message_future_hook=listen,
    )


@GATE.needs(
    f"{_CLIENT}._iopub_stream", f"{_CLIENT}._dispatch_iopub", f"{_CLIENT}._io_loop"
)
def keep_listening(client: Any) -> None:
    """Keep receiving what engines publish, even after what cannot be unpickled.

    A cell may publish an object of a class that this process does not have. The client
    unpickles it; after an exception pyzmq does not check for further messages.
    """

    def take(parts: Any) -> None:
        try:
            client._dispatch_iopub(parts)
        except Exception as error:
            if isinstance(error, AttributeError) and error.name == "kernel":
                return  # a widget's, and IPython in a terminal shows none
            _logger.warning("passed over what an engine published: %r", error)

    client._io_loop.add_callback(client._iopub_stream.on_recv, take, copy=False)


@GATE.needs(f"{_CLIENT}._iopub_socket", f"{_CLIENT}._io_loop")
def stop_listening(client: Any) -> None:
    """Receive nothing of what engines publish: it is for another client."""
    socket = client._iopub_socket
    client._io_loop.add_callback(socket.setsockopt, zmq.UNSUBSCRIBE, b"")


@GATE.needs(
    f"{_CLIENT}._send", f"{_CLIENT}._query_stream", f"{_CLIENT}._update_engines"
)
def ask_for_engines(client: Any) -> None:
    """Ask the controller for all its engines; the client learns of them by the reply.

    It gets a list when it connects, and hears of each one that comes later; but only
    after it has subscribed to that, and so not of what comes between the two.
    """

    def take(future: Any) -> None:
        client._update_engines(future.result()["content"]["engines"])

    asked = client._send(client._query_stream, "connection_request")
    asked.add_done_callback(take)


@GATE.needs(f"{_CLIENT}._send", f"{_CLIENT}._query_stream", f"{_CLIENT}._futures")
def unregister(client: Any, engine_id: int) -> None:
    """Have the controller forget an engine that has ended, as its nanny would."""
    asked = client._send(
        client._query_stream, "unregistration_request", content={"id": engine_id}
    )
    client._futures.pop(asked.msg_id, None)  # it is not answered


@GATE.needs(
    "ipyparallel.controller.app:Process",
    "ipyparallel.controller.hub:Hub.monitor_iopub_message",
    "ipyparallel.controller.hub:Hub.save_queue_request",
    "ipyparallel.controller.hub:Hub.save_queue_result",
    "ipyparallel.controller.hub:Hub.incoming_registrations",
    "ipyparallel.controller.hub:Hub.register_engine",
    "ipyparallel.controller.heartmonitor:HeartMonitor.caller",
)
def spare_controller() -> None:
    """In a controller: be one process, pass messages on unread, and beat slowly while
    no engine registers.

    Its hub unpacks a copy of each one, to keep it, to count those that wait, and to
    hear of engines that shut down; nothing is kept here (`--nodb`), labkit knows what
    it waits for, and `unregister` says which have ended.
    A beat of two engines takes 3 ms of CPU time, and ten in a second 1.5% of two cores
    that they fill.
    Traitlets makes a record of each debug message, which no handler takes.
    """
    from ipyparallel.controller import app
    from ipyparallel.controller.heartmonitor import HeartMonitor
    from ipyparallel.controller.hub import Hub

    start, beat, register = HeartMonitor.start, HeartMonitor.beat, Hub.register_engine
    monitors: list[tuple[Any, Any]] = []
    awaited: dict[Any, Any] = {}

    def start_and_note(self: Any) -> None:
        start(self)
        monitors.append((self, self.loop))  # that of this thread

    def beat_and_slow_down(self: Any) -> None:
        beat(self)
        if not awaited:
            self.caller.callback_time = max(self.period, 1000 * timeouts.BEAT_S)

    def register_soon(self: Any, *request: Any) -> Any:
        nonlocal awaited
        registered = register(self, *request)
        awaited = self.incoming_registrations
        for monitor, loop in monitors:
            loop.add_callback(hasten, monitor)
        return registered

    def hasten(monitor: Any) -> None:
        if monitor.caller.callback_time > monitor.period:
            monitor.caller.stop()
            monitor.caller.callback_time = monitor.period
            monitor.caller.start()

    class Part(Thread):
        """Its heart monitor, which is needed while engines register."""

        def terminate(self) -> None:
            """It ends with this process."""

    app.Process = Part
    for name in "monitor_iopub_message", "save_queue_request", "save_queue_result":
        setattr(Hub, name, lambda *_: None)
    Hub.register_engine = register_soon
    HeartMonitor.start, HeartMonitor.beat = start_and_note, beat_and_slow_down
    logging.disable(logging.WARNING)


@GATE.needs(f"{_CLIENT}._build_targets")
def ident_of(client: Any, engine_id: int) -> bytes:
    """The identity that routes messages to an engine; IndexError or
    NoEnginesRegistered where the controller does not know it any more."""
    ident: bytes = client._build_targets(engine_id)[0][0]
    return ident


@GATE.needs(f"{_LAUNCHER}._wait_thread")
def waiter_of(launcher: Any) -> Thread:
    """The thread that waits for a launcher's process, and then has its exit code.

    `launcher.state` is changed by a callback in the event loop, which may be busy.
    """
    thread: Thread = launcher._wait_thread
    return thread


@GATE.needs("ipyparallel._async:AsyncFirst._async_thread")
def end_loop(cluster: Any) -> None:
    """End the thread in which a Cluster's coroutines run where its caller has a running
    loop, as a notebook's kernel has. ipyparallel never does."""
    if cluster._async_thread is not None:
        loop = cluster._thread_loop
        loop.add_callback(loop.stop)
        cluster._async_thread.join()
        loop.close()
        cluster._async_thread = None


def text_of(log_file: str) -> str:
    """What a process has printed; "" where nothing was written.

    ipyparallel fails where that is no UTF-8, and in a notebook's loop it removes the
    file at once, before anyone has read there why the process died: it goes with the
    lab.
    """
    try:
        return Path(log_file).read_text(errors="replace")
    except OSError:
        return ""


@GATE.needs(f"{_LAUNCHER}._start_waiting")
def launcher_of_engines(start: StartEngine) -> type[LocalEngineSetLauncher]:
    """A launcher of engines that `start` starts.

    In ipyparallel's own, one method calls Popen and does all the rest. Without nannies:
    each is a second process beside its engine, through which questions to that go.
    """

    class Launcher(LocalEngineLauncher):
        def start(self) -> None:
            arguments = [*self.cluster_args, *self.engine_args, _NO_NANNY]
            environment = {**os.environ, **self.get_env()}
            self.process = start(arguments, environment, self.output_file)
            self.pid = self.process.pid
            self.notify_start(self.pid)
            self._start_waiting()

        def get_output(self, remove: bool = False) -> str:
            return text_of(self.output_file)

    class SetLauncher(LocalEngineSetLauncher):
        launcher_class = Launcher

    return SetLauncher


@contextlib.contextmanager
def starting_programs(
    cluster: Any,
    folders: Mapping[str, str],
    *,
    command_of: Callable[[str], list[str]],
    environments: Mapping[str, Mapping[str, str]],
) -> Iterator[list[LocalEngineLauncher]]:
    """Have ipyparallel start one engine on each host by the command line that
    `command_of` gives for it, which runs here until the engine ends: what started them,
    in order. They are ended where what is done with them fails.

    An engine reads its variables, those in `environments` and ipyparallel's, as JSON
    from its standard input: mpiexec passes variables on to other hosts by its command
    line alone, which every user of a host sees.
    """
    hosts = [*folders]

    class Launcher(LocalEngineLauncher):
        def find_args(self) -> list[str]:
            host = hosts[int(self.identifier)]
            told = {
                **super().get_env(),
                **environments[host],
                "IPP_PROFILE_DIR": folders[host],
            }
            path = Path(self.output_file).with_suffix(".environment")
            path.touch(0o600)
            path.write_text(json.dumps(told))
            return ["sh", "-c", 'exec "$@" < "$0"', str(path), *command_of(host)]

        def get_env(self) -> dict[str, str]:
            return {}

        def get_output(self, remove: bool = False) -> str:
            return text_of(self.output_file)

    class SetLauncher(LocalEngineSetLauncher):
        launcher_class = Launcher

    cluster.engine_launcher_class = SetLauncher
    with starting_set(cluster, len(hosts), lambda each: each.terminate()) as launchers:
        yield launchers


@contextlib.contextmanager
def starting_set(
    cluster: Any, num_engines: int, end: Callable[[Any], None], **settings: Any
) -> Iterator[list[LocalEngineLauncher]]:
    """Have ipyparallel start engines: what started them, in order. `end` is called with
    the process of each where what is done with them fails."""
    sets = set(cluster.engines)
    try:
        name = cluster.start_engines_sync(num_engines, delay=0, **settings)
        launchers = cluster.engines[name].launchers
        yield [launchers[str(number)] for number in range(num_engines)]
    except BaseException:
        for name in set(cluster.engines) - sets:
            for launcher in [*cluster.engines[name].launchers.values()]:
                if launcher.process is not None:  # it was started
                    with contextlib.suppress(psutil.NoSuchProcess):
                        end(launcher.process)
        raise
