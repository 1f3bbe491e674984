"""Runs one cell on this rank: names, hooks, interrupts, and how it ended."""

import asyncio
import builtins
import contextlib
import dataclasses
import functools
import gc
import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from labkit.compat.ipython import cell_numbers
from labkit.compat.ipython import no_running_loop
from labkit.rank.engine.console import Console
from labkit.rank.engine.hints import add_hint
from labkit.rank.engine.hints import notes_of
from labkit.rank.engine.launchers import Launchers
from labkit.rank.engine.spawned import send_definitions
from labkit.rank.group.process_group import RankProcessGroup
from labkit.rank.telemetry.emitter import Emitter
from labkit.rank.telemetry.exceptions import TextOnlyError
from labkit.rank.telemetry.exceptions import clear_frames
from labkit.rank.telemetry.exceptions import drop_partial_imports
from labkit.rank.telemetry.exceptions import freed_by
from labkit.rank.telemetry.exceptions import raise_from_scripts
from labkit.rank.telemetry.exceptions import safe_str
from labkit.rank.telemetry.exceptions import show_in_short
from labkit.rank.telemetry.exceptions import where_in_cell
from labkit.rank.telemetry.journal import Journal
from labkit.rank.telemetry.memory import memory_reader
from labkit.rank.telemetry.memory import memory_total
from labkit.rank.telemetry.oom_report import memory_held
from labkit.rank.telemetry.oom_report import what_would_fit
from labkit.rank.telemetry.stack_trace import finished_collectives
from labkit.rank.telemetry.stack_trace import position
from labkit.rank.training.cell_checkpoints import Checkpoints
from labkit.rank.training.compiling import announce
from labkit.rank.training.session import Session
from labkit.rank.training.stop_point import Stopped
from labkit.rank.training.stop_point import StopPoint
from labkit.records import FUNCTION_NAME
from labkit.records import KEY
from labkit.records import CellSpec
from labkit.records import CheckpointPlan
from labkit.records import Outcome
from labkit.records import Placement
from labkit.records import message
from labkit.strategies import find_strategy
from labkit.train_options import TrainOptions

_TRAINING_NAMES = ("prepare", "fit", "log")

_SECOND_SIGNAL_AFTER_S = 3.0
"""When a cell that saw an interrupt and goes on is interrupted again."""


_PATIENCE_S = 5.0
"""How long an interrupt waits for an import to end."""


class CellRunner:
    """What labkit adds to one engine's IPython shell.

    The shell runs the cell, so all of IPython's syntax works; its `pre_run_cell`
    and `post_run_cell` events tell when. Interrupts arrive on the engine's control
    thread, which is free while the main thread sits in a collective.
    """

    def __init__(self, shell: Any, placement: Placement) -> None:
        self.shell = shell
        self.placement = placement
        self.group = RankProcessGroup(placement, shell.user_ns)
        self.function: Any = None
        self.config: Mapping[str, Any] = {}
        self._injected: dict[str, Any] = {}
        self._spec: CellSpec | None = None
        self._contexts = contextlib.ExitStack()
        self._emitter: Emitter | None = None
        self._session: Session | None = None
        self._stop_point = StopPoint()
        self._depth = 0
        # Guards `_is_running`: an interrupt is only ever raised inside a cell.
        self._lock = threading.Lock()
        self._is_running = False
        self._is_closing = False
        self._begin_error: Exception | None = None
        self._shown_error: BaseException | None = None
        """Whose traceback IPython has shown while the cell ran, last."""
        self._stop_when_idle = signal.getsignal(signal.SIGTERM)
        self._signal_seen = threading.Event()
        """Set once this cell was interrupted."""
        self._signal_handled = threading.Event()
        """Set once Python code has run since the last signal."""
        self._signalled_at = 0.0
        self._stopping_since = 0.0
        self._requests: dict[str, Callable[..., Any]] = {
            "interrupt": self.request_interrupt,
            "hold": lambda: self._stop_point.hold(),
            "stop_after": lambda num_steps: self._stop_point.stop_after(num_steps),
            "describe": self.describe,
            "progress": lambda: [self._stop_point.num_steps, finished_collectives()],
            "stack": self.stack,
            "release": self.group.release,
        }
        """What the notebook can ask of this rank also while it runs a cell."""
        self._loop = asyncio.new_event_loop()
        shell.loop_runner = self._run_coroutine
        self._compile_cell = shell.compile.cache
        shell.compile.cache = self._number_as_in_notebook
        # Nobody types on a rank; Lightning takes a prompt for a sign of it.
        vars(sys).pop("ps1", None)
        # What would end the engine, and not only the cell.
        shell.ask_exit = sys.exit
        raise_from_scripts(shell)
        show_in_short(shell, self._note_shown)
        self._console = Console(shell)
        announce()
        launchers = Launchers(self.group, self._note)
        shell.system = launchers.noting_commands(shell.system)
        send_definitions()
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)
        shell.kernel.control_handlers[f"{KEY}_request"] = self._on_control_request

    # ---- around a cell, in the main thread ----

    def _before_cell(self, info: Any) -> None:
        try:
            self._begin_cell(getattr(info, "raw_cell", ""))
        except Exception as error:  # IPython would say so, and run the cell
            self._begin_error = error

    def _begin_cell(self, code: str) -> None:
        self._depth += 1
        self._begin_error = self._shown_error = None
        metadata = self.shell.kernel.get_parent("shell").get("metadata", {})
        if self._depth > 1 or KEY not in metadata:
            return
        self._spec = spec = CellSpec(**metadata[KEY])
        namespace: dict[str, Any] = self.shell.user_ns
        if "_oh" not in namespace:  # a cell has cleared it of what IPython needs
            self.shell.init_user_ns()
        namespace.update(
            __name__="__main__",
            __builtins__=builtins,
            rank=self.placement.rank,
            local_rank=self.placement.local_rank,
            world_size=self.placement.world_size,
            device=self.group.device,
            torch=torch,
            dist=dist,
        )
        self._console.move_to(spec.directory)
        self._inject(self._start_session(spec))
        if self._session is not None:
            self._session.code = self.shell.transform_cell(code)
        self._signal_seen.clear()
        with self._lock:
            self._is_running = True
        signal.signal(signal.SIGINT, self._on_sigint)
        if signal.getsignal(signal.SIGTERM) == self._stop_when_idle:
            # Which waits for the end of the cell; in one it is to end the process.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _number_as_in_notebook(self, code: str, number: int = 0, **more: Any) -> str:
        """Tracebacks name the notebook's cell, not the engine's own count."""
        if self._spec is not None and self._depth == 1:
            number = self._spec.execution_count
        return self._compile_cell(code, number, **more)

    def _after_cell(self, result: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth > 0 or self._spec is None:
            return
        error = (
            self._begin_error
            or result.error_before_exec
            or result.error_in_exec
            or self._shown_error
        )
        session, self._session = self._session, None
        if session is not None and error is None:
            try:
                session.finish(is_interrupted=self._signal_seen.is_set)
            except (Exception, KeyboardInterrupt) as problem:
                error = problem
        with self._lock:
            self._is_running = False
            self._is_closing = True
        self._spec = None
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._stop_when_idle)
        emitter, self._emitter = self._emitter, None
        device = self.group.device
        memory = ""
        if error is not None:
            # Here, for the others need not wait until all that follows is done.
            self._publish("failing", self._status(error))
            prepared = session.prepared() if session is not None else []
            memory = memory_held(error, prepared, device, self.shell.user_ns)
            del prepared
        error = self._take_down(error, emitter)
        with self._lock:
            self._is_closing = False
        outcome = self._outcome(error, emitter)
        if error is not None:
            self._begin_error = error = None
            with contextlib.suppress(Exception):
                drop_partial_imports()
                freed = freed_by(lambda: self._free_frames(result), device)
                outcome = replace(outcome, freed_bytes=freed)
        if memory and session is not None and session.forecastable is not None:
            num_ranks = self.placement.world_size
            fits = what_would_fit(session.forecastable, device, num_ranks)
            memory = "\n".join([memory, *fits])
        self._publish("outcome", replace(outcome, memory=memory))
        if emitter is not None and outcome.status == "ok":
            # What an earlier run left in cycles may be gigabytes. Now, while the
            # user reads, for it takes a tenth of a second.
            gc.collect()

    def _take_down(
        self, error: BaseException | None, emitter: Emitter | None
    ) -> BaseException | None:
        """Take back what the cell was given; all of it, whatever part fails: the
        notebook waits for the outcome. The first error there was."""
        steps: list[Callable[[], Any]] = [
            lambda: self.shell.user_ns.pop(FUNCTION_NAME, None),
            self.group.restore_environment,
            self._console.restore,
            *([self.group.end_rpc] if error is not None else []),
            self._contexts.close,
            *([emitter.close] if emitter is not None else []),
            self._console.end_cell,
        ]
        for step in steps:
            try:
                step()
            except BaseException as problem:
                error = error or problem
        return error

    def _status(self, error: BaseException) -> str:
        stopped = isinstance(error, KeyboardInterrupt) or self._signal_seen.is_set()
        return "interrupted" if stopped else "error"

    def _outcome(self, error: BaseException | None, emitter: Emitter | None) -> Outcome:
        ended: dict[str, Any] = {"status": "ok"}
        if error is not None:
            ended = {
                "status": self._status(error),
                "ename": type(error).__name__,
                "evalue": "\n".join([safe_str(error), *notes_of(error)]),
                "where": where_in_cell(error, cell_numbers(self.shell)),
            }
        if emitter is not None:
            journal = emitter.journal
            ended["num_records"] = journal.num_records
            if journal.error:
                ended["num_not_on_disk"] = journal.num_not_on_disk
                ended["disk_error"] = journal.error
        return Outcome(
            rank=self.placement.rank,
            group_in_place=self.group.in_place,
            **ended,
        )

    def _note_shown(self, error: BaseException) -> None:
        """A traceback that IPython shows is a failure, also where the cell goes on."""
        if self._is_running:
            self._shown_error = error
            add_hint(error, self.group.device)

    def _free_frames(self, result: Any) -> None:
        """Of what a failed cell's exception holds; the reply has its words alone."""
        if self._shown_error is not None:
            clear_frames(self._shown_error, self.shell)
            self._shown_error = None
        for name in ("error_before_exec", "error_in_exec"):
            if (error := getattr(result, name)) is not None:
                clear_frames(error, self.shell)
                setattr(result, name, TextOnlyError(safe_str(error)))

    def _start_session(self, spec: CellSpec) -> dict[str, Any]:
        """Names for a training cell; in a plain one they say where they belong."""
        if spec.strategy is None:
            return {
                **dict.fromkeys(_TRAINING_NAMES, only_in_training_cells),
                **checkpoint_names(Checkpoints()),
            }
        strategy = find_strategy(spec.strategy)
        rank, world_size = self.placement.rank, self.placement.world_size
        if strategy.is_single:
            self._contexts.enter_context(self.group.alone())
            world_size = 1
            self.shell.user_ns["world_size"] = world_size
        self._emitter = Emitter(
            lambda batch: self._publish("batch", batch),
            journal=Journal(spec.folder, rank),
        )
        self._stop_point = StopPoint()
        plan = CheckpointPlan(**spec.checkpoints) if spec.checkpoints else None
        session = Session(
            strategy,
            self._emitter,
            rank=rank,
            world_size=world_size,
            device=self.group.device,
            seed=spec.seed,
            options=TrainOptions(**spec.options, config=self.config),
            checkpoints=plan,
            report=lambda report: self._publish("report", report),
            after_step=self._stop_point.passed,
        )
        self._session = session
        self._contexts.enter_context(session.running())
        names = {name: getattr(session, name) for name in _TRAINING_NAMES}
        names |= checkpoint_names(Checkpoints(session.prepared))
        if self.function is not None:
            self.shell.user_ns[FUNCTION_NAME] = self._take_function(names)
        return names

    def _note(self, text: str) -> None:
        """Say a sentence to the user, once: under the run, where there is one."""
        (self._session.note if self._session else self.group.note_once)(text)

    def _inject(self, names: dict[str, Any]) -> None:
        """Put labkit's functions into the namespace, but never over a user's own."""
        namespace = self.shell.user_ns
        for name, value in names.items():
            if name not in namespace or namespace[name] is self._injected.get(name):
                namespace[name] = self._injected[name] = value

    def _take_function(self, names: dict[str, Any]) -> Any:
        """The function sent by `receive_function`, as a call without arguments.

        Names that the notebook does not have are looked up on this rank.
        """
        function, with_rank = self.function
        self.function = None
        inner = inspect.unwrap(getattr(function, "func", function))
        if inner.__module__ == "__main__" and inspect.isfunction(inner):
            for name, value in {**self.shell.user_ns, **names}.items():
                inner.__globals__.setdefault(name, value)
        if not with_rank:
            return function
        rank = self.placement.rank
        return functools.partial(function, rank, self.shell.user_ns["world_size"])

    def _run_coroutine(self, coroutine: Any) -> Any:
        """Run a cell that awaits to its end, as if it were plain code.

        On a loop of our own: an interrupt reaches a cell that awaits like any other.
        """
        task = self._loop.create_task(coroutine)
        with no_running_loop():
            while True:
                try:
                    return self._loop.run_until_complete(task)
                except KeyboardInterrupt:
                    task.cancel()

    def _publish(self, name: str, value: Any) -> None:
        self.shell.data_pub.publish_data(message(name, value))

    # ---- requests, in the control thread ----

    def _on_control_request(self, stream: Any, ident: Any, parent: Any) -> None:
        content = parent["content"]
        if content["request"] == "listen":  # for good
            self._console.listen(parent)
            return
        try:
            answer = self._requests[content["request"]](**content["arguments"])
            reply = {"status": "ok", "answer": answer}
        except Exception as error:  # the notebook waits for an answer
            reply = {"status": "error", "why": f"{type(error).__name__}: {error}"}
        self.shell.kernel.session.send(
            stream, f"{KEY}_reply", reply, parent=parent, ident=ident
        )

    def describe(self) -> dict[str, Any]:
        """Host, process, device and memory of this rank, for `%dist_status`."""
        device = self.group.device
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(device),
            "state": "busy" if self._is_running else "idle",
            "memory_used": memory_reader(device)(),
            "memory_total": memory_total(device),
        }

    def stack(self) -> dict[str, Any]:
        """Where the main thread is: a `records.Position`, as a dict."""
        found = position(
            self.placement.rank,
            cell_numbers(self.shell),
            is_running=self._is_running,
            since_ns=self.group.formed_at_ns,
            waits_on_device=self.placement.backend == "nccl",
        )
        return dataclasses.asdict(found)

    def request_interrupt(self, release_after_s: float) -> None:
        """Interrupt the cell; does not keep the control thread waiting."""
        threading.Thread(
            target=self.interrupt, args=(release_after_s,), daemon=True
        ).start()

    # ---- interrupts ----

    def _on_sigint(self, signum: int, frame: Any) -> None:
        self._signal_handled.set()
        refusal = None if self._session is None else self._session.refusal
        if refusal is None:
            self._signal_seen.set()
        if not self._is_running:
            return
        is_in_cell = False
        patient = time.monotonic() - self._stopping_since < _PATIENCE_S
        while frame is not None:
            # A cell that has raised already is not to raise again while it is shown.
            if frame.f_code.co_name == "showtraceback":
                return
            # A module that is imported in part would stay broken: the next signal
            # will do, unless it takes too long.
            if patient and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
                self._signalled_at = 0.0
                return
            is_in_cell |= frame.f_code.co_name in ("run_code", "_run_coroutine")
            frame = frame.f_back
        if is_in_cell:  # and not in what IPython does before and after it
            raise refusal or Stopped

    def interrupt(self, release_after_s: float) -> None:
        """Stop the running cell; if it sits in a collective, free it from that.

        Python code sees the signal at its next instruction, and so does a blocking
        system call. A main thread that has not seen it after `release_after_s` is
        in C++, waiting for ranks that will not come.
        """
        with self._lock:
            if self._is_closing and self.placement.backend == "nccl":
                # The code has ended; what it left on the GPU may wait for other ranks.
                self.group.release()
                return
            now = time.monotonic()
            waits_s = now - self._signalled_at
            if not self._is_running or (
                self._signal_seen.is_set() and waits_s < _SECOND_SIGNAL_AFTER_S
            ):
                return
            if not self._signal_seen.is_set():
                self._stopping_since = now
            self._signalled_at = now
            self._signal_handled.clear()
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            signal.pthread_kill(main_thread, signal.SIGINT)
        if not self._signal_handled.wait(release_after_s) and self._is_running:
            self.group.release()


def checkpoint_names(checkpoints: Checkpoints) -> dict[str, Any]:
    """The names that every cell has for checkpoints."""
    return {
        "save_checkpoint": checkpoints.save_checkpoint,
        "load_checkpoint": checkpoints.load_checkpoint,
    }


def only_in_training_cells(*args: Any, **kwargs: Any) -> Any:
    """Stands for prepare, fit and log in a plain `%%dist` cell."""
    raise RuntimeError(
        "prepare, fit and log belong to a training run; begin the cell with "
        "%%dist_train STRATEGY, as %%dist_train ddp"
    )
