"""Runs one cell on this rank: gives it its names, and reports how it ended."""

import asyncio
import bdb
import builtins
import contextlib
import functools
import gc
import inspect
import logging
import sys
import time
import traceback
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.checks import steps_to_profile
from labkit.compat.c10d import is_batch_cut
from labkit.compat.ipython import EVENTS
from labkit.compat.ipython import answer_in_short
from labkit.compat.ipython import cell_numbers
from labkit.compat.ipython import count_published
from labkit.compat.ipython import refuse_cells
from labkit.compat.ipython import refuse_extension
from labkit.compat.torch import ThreadSettings
from labkit.messages import message
from labkit.rank.engine.hints import NO_MAGICS
from labkit.rank.engine.hints import add_hint
from labkit.rank.engine.hints import notes_of
from labkit.rank.engine.interrupts import CellInterrupts
from labkit.rank.engine.replays import REPLAY_NAME
from labkit.rank.engine.replays import Replay
from labkit.rank.engine.replays import explain
from labkit.rank.engine.replays import replay_of
from labkit.rank.engine.requests import ControlRequests
from labkit.rank.group.launchers import Launchers
from labkit.rank.group.process_group import RankProcessGroup
from labkit.rank.group.spawned import send_definitions
from labkit.rank.measuring.devices import why_lost
from labkit.rank.measuring.oom_report import forecast_sentence
from labkit.rank.measuring.oom_report import memory_held
from labkit.rank.measuring.serving import server_of
from labkit.rank.profiling.block import BlockProfile
from labkit.rank.profiling.recorder import Recorder
from labkit.rank.profiling.recorder import quiet_profilers
from labkit.rank.profiling.step_recorder import StepRecorder
from labkit.rank.scripts.program import ScriptProgram
from labkit.rank.scripts.torch_settings import TorchSettings
from labkit.rank.steps.former_runs import steps_of_cell
from labkit.rank.steps.observers import Observer
from labkit.rank.steps.observers import slowing_of
from labkit.rank.steps.stop_point import StopPoint
from labkit.rank.telemetry.emitter import Emitter
from labkit.rank.telemetry.exceptions import TextOnlyError
from labkit.rank.telemetry.exceptions import chain
from labkit.rank.telemetry.exceptions import clear_frames
from labkit.rank.telemetry.exceptions import drop_partial_imports
from labkit.rank.telemetry.exceptions import freed_by
from labkit.rank.telemetry.exceptions import raise_from_scripts
from labkit.rank.telemetry.exceptions import run_all
from labkit.rank.telemetry.exceptions import safe_str
from labkit.rank.telemetry.exceptions import show_in_short
from labkit.rank.telemetry.exceptions import where_in_cell
from labkit.rank.telemetry.journal import Journal
from labkit.rank.telemetry.stack_trace import is_called_from
from labkit.rank.terminal.console import Console
from labkit.rank.terminal.keyboard import Keyboard
from labkit.rank.training.cell_checkpoints import Checkpoints
from labkit.rank.training.compiling import announce
from labkit.rank.training.session import Session
from labkit.rank.training.whole_text import is_own_file
from labkit.rank.training.whole_text import with_functions
from labkit.records import BLOCK_NOTE
from labkit.records import FUNCTION_NAME
from labkit.records import KEY
from labkit.records import PROFILE_NOTE
from labkit.records import SERVE_NAME
from labkit.records import TRAINING_NAMES
from labkit.records import CellEnd
from labkit.records import CellSpec
from labkit.records import CheckpointPlan
from labkit.records import Outcome
from labkit.records import Placement
from labkit.records import ReplicaNotes
from labkit.records import ScriptSpec
from labkit.records import StepsTaken
from labkit.step_folders import step_of
from labkit.strategies import Strategy
from labkit.strategies import find_strategy
from labkit.strategies.mesh.roles import Roles
from labkit.train_options import TrainOptions

KEPT_CHARACTERS = 4096
"""Of each text about how a cell has ended, for a kernel that comes later."""
BATCH_CUT = (
    "it was stopped within a batch of messages or collectives, after which NCCL forms "
    "no group in its process"
)
"""Why a process can be in no group of NCCL any more."""


class CellRunner:
    """What labkit adds to one engine's IPython shell.

    The shell runs the cell, so all of IPython's syntax works; its `pre_run_cell`
    and `post_run_cell` events tell when.
    """

    def __init__(self, shell: Any, placement: Placement) -> None:
        self.shell = shell
        self.group = RankProcessGroup(placement, shell.user_ns)
        self.function: Any = None
        self._fresh_torch = TorchSettings()
        self._loaded_first = frozenset(sys.modules)
        self.config: Mapping[str, Any] = {}
        self._injected: dict[str, Any] = {}
        self._names: set[str] = set()
        """Those of labkit's functions in cells so far."""
        self._has_prepared = False
        """Whether a strategy has prepared models here: a later cell may use them."""
        self._is_serving = False
        """Whether this rank serves others in the place of the cell."""
        self._script_file = ""
        """Of the script that runs in the place of the cell."""
        self._depth = 0
        """Of cells: one may run another, by `get_ipython().run_cell`."""
        # What belongs to the cell that runs, or to its training run.
        self._spec: CellSpec | None = None
        self._torch_settings = ThreadSettings()
        """As a cell finds them: one that fails leaves none behind."""
        self._contexts = contextlib.ExitStack()
        self._emitter: Emitter | None = None
        self._session: Session | None = None
        self._replay: Replay | None = None
        """Of a run that resumes."""
        self._stop_point = StopPoint()
        self._steps: StepsTaken | None = None
        self._begin_error: Exception | None = None
        self._num_published = 0
        """Of messages, before the cell."""
        self._reply: dict[str, Any] = {}
        """What the reply to the cell is to have besides IPython's own."""
        self._shown_error: BaseException | None = None
        """Whose traceback IPython has shown while the cell ran, last; not of a hook."""
        self._interrupts = CellInterrupts(self.group, refusal=self._refusal)
        self._console = Console(shell, placement.world_size)
        self._keyboard = Keyboard(
            shell,
            lambda question: self._publish("question", question),
            self._interrupts.was_interrupted,
            self._console.flush,
        )
        self._requests = ControlRequests(
            shell,
            self.group,
            self._interrupts,
            self._console,
            self._keyboard,
            stop_point=lambda: self._stop_point,
        )
        self.notes = self.group.install()
        """What the user is to know of how this engine became a rank."""
        self._adapt_shell()
        self._adapt_libraries()

    @property
    def placement(self) -> Placement:
        """The place of this rank in the group of today."""
        return self.group.placement

    def _adapt_shell(self) -> None:
        """Have IPython's shell run cells as ranks need it."""
        shell = self.shell
        loop = asyncio.new_event_loop()
        shell.loop_runner = functools.partial(self._interrupts.run_coroutine, loop)
        self._compile_cell = shell.compile.cache
        shell.compile.cache = self._number_as_in_notebook
        # A record of every message, most of them for no handler.
        shell.kernel.log.setLevel(logging.WARNING)
        answer_in_short(
            shell.kernel,
            lambda parent: KEY in parent.get("metadata", {}),
            adding=self._pop_reply,
        )
        self._count_published = count_published(shell.kernel)
        # What would end the engine, and not only the cell.
        shell.ask_exit = sys.exit
        # Of a hook that fails its error is shown, and not all that it was called with.
        shell.events.print_on_error = False
        raise_from_scripts(shell)
        show_in_short(shell, self._note_shown)
        refuse_cells(shell, lambda: self._begin_error)
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)

    def _adapt_libraries(self) -> None:
        """Have what cells call find ranks that are there already."""
        announce()
        quiet_profilers()
        launchers = Launchers(self.group, self._note)
        self.shell.system = launchers.noting_commands(self.shell.system)
        send_definitions()
        refuse_extension("labkit", NO_MAGICS)

    # ---- a cell begins ----

    def _before_cell(self, info: Any) -> None:
        try:
            self._begin_cell(getattr(info, "raw_cell", ""))
        except Exception as error:  # in place of the cell: see `refuse_cells`
            self._begin_error = error

    def _begin_cell(self, code: str) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._begin_error = self._shown_error = None
        self._is_serving = False
        self._script_file = ""
        metadata = self.shell.kernel.get_parent("shell").get("metadata", {})
        if KEY not in metadata:
            return
        self._spec = spec = CellSpec(**metadata[KEY])
        self._requests.ended = self._steps = None
        steps_of_cell.clear()
        self._num_published, self._reply = self._count_published(), {}
        # Behind those of the user's own, such as one that prints how long a cell took.
        self.shell.events.unregister("post_run_cell", self._after_cell)
        self.shell.events.register("post_run_cell", self._after_cell)
        self._interrupts.begin(spec.number)
        self._keyboard.begin_cell(can_type=spec.can_type)
        self._torch_settings = ThreadSettings()
        self._set_names()
        self._console.move_to(spec.directory)
        self._inject(self._start_session(spec))
        if self._session is not None:
            cells = cell_numbers(self.shell)
            self._session.read_code = functools.partial(
                with_functions,
                self.shell.transform_cell(code),
                self.shell.user_ns,
                lambda file: file in cells or is_own_file(file),
            )
        self._interrupts.begin_code()

    def _set_names(self) -> None:
        """The names that every cell has, whatever the one before has made of them."""
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

    def _number_as_in_notebook(self, code: str, number: int = 0, **more: Any) -> str:
        """Tracebacks name the notebook's cell, not the engine's own count."""
        if self._spec is not None and self._depth == 1:
            number = self._spec.execution_count
        return self._compile_cell(code, number, **more)

    # ---- a cell ends ----

    def _after_cell(self, result: Any) -> None:
        if not result.info.raw_cell.strip():  # IPython says of its end alone
            return
        self._depth = max(0, self._depth - 1)
        if self._depth > 0 or self._spec is None:
            return
        self._keyboard.end_code()
        error = (
            self._begin_error
            or result.error_before_exec
            or result.error_in_exec
            or self._shown_error
        )
        session, self._session = self._session, None
        emitter, self._emitter = self._emitter, None
        # 1. Keep what the run is to keep; an interrupt can still end that.
        if session is not None and error is None:
            error = self._finish_run(session)
        self._interrupts.end_code()
        folder, self._spec = self._spec.folder, None
        # 2. A failure is known at once: other ranks need not wait for what follows.
        memory = ""
        if session is not None:
            session.has_failed = error is not None
        if error is not None:
            self._publish("failing", self._status(error))
            prepared = [] if session is None else session.prepared()
            memory = memory_held(error, prepared, self.group.device, self.shell.user_ns)
        # 3. Take back what the cell was given, and free what its exception holds.
        error = self._take_down(error, emitter)
        self._interrupts.end()
        outcome = self._outcome(error, emitter)
        if error is not None:
            self._begin_error = error = None
            outcome = replace(outcome, freed_bytes=self._free(result))
        # 4. The outcome: with it the notebook has all there is of this cell.
        if memory and session is not None and session.forecastable is not None:
            num_ranks = self.placement.world_size, self.placement.num_local
            step, device = session.forecastable, self.group.device
            fits = forecast_sentence(step, device, *num_ranks)
            memory = "\n".join([memory, *fits])
        outcome = replace(outcome, memory=memory)
        short, number = outcome.in_short(KEPT_CHARACTERS), self._interrupts.number
        self._requests.ended = CellEnd(number, time.time(), short, self._steps, folder)
        if emitter is None and self._count_published() == self._num_published:
            # Nothing it has to come behind: one message, not two.
            self._reply = {KEY: vars(outcome)}
        else:
            self._publish("outcome", outcome)
        if emitter is not None and outcome.status == "ok":
            # What an earlier run left in cycles may be gigabytes. Now, while the
            # user reads: it takes a tenth of a second.
            gc.collect()

    def _finish_run(self, session: Session) -> BaseException | None:
        """Write the last checkpoint, if the run keeps any; what that raised."""
        try:
            session.finish(is_interrupted=self._interrupts.was_interrupted)
        except (Exception, KeyboardInterrupt) as problem:
            return problem
        return None

    def _take_down(
        self, error: BaseException | None, emitter: Emitter | None
    ) -> BaseException | None:
        """Take back what the cell was given; all of it, whatever part fails: the
        notebook waits for the outcome. The first error there was."""
        steps: list[Callable[[], Any]] = [
            lambda: self.shell.user_ns.pop(FUNCTION_NAME, None),
            lambda: self.shell.user_ns.pop(SERVE_NAME, None),
            self._end_replay,
            self.group.restore_environment,
            self._console.restore,
            self._keyboard.end_cell,
            *([self.group.end_rpc] if error is not None else []),
            self._contexts.close,
            *([self._torch_settings.restore] if error is not None else []),
            *([emitter.close] if emitter is not None else []),
            self._console.end_cell,
        ]
        first = run_all(steps)
        return error or first

    def _status(self, error: BaseException) -> str:
        stopped = (
            isinstance(error, KeyboardInterrupt | bdb.BdbQuit)
            or self._interrupts.was_interrupted()
        )
        return "interrupted" if stopped else "error"

    def _outcome(self, error: BaseException | None, emitter: Emitter | None) -> Outcome:
        ended: dict[str, Any] = {"status": "ok"}
        if error is not None:
            ended = {
                "status": self._status(error),
                "ename": type(error).__name__,
                "evalue": "\n".join([safe_str(error), *notes_of(error)]),
                "where": self._where(error),
            }
        lost = why_lost(self.group.device)
        if not lost and error is not None and self.group.can_abort:
            # An interrupt may have come on top of what NCCL has raised.
            lost = BATCH_CUT if any(map(is_batch_cut, chain(error))) else ""
        if lost and error is None:  # what a kernel did was not waited for in the cell
            ended = {"status": "error", "ename": "AcceleratorError", "evalue": lost}
        if emitter is not None:
            journal = emitter.journal
            ended["num_records"] = journal.num_records
            if journal.error:
                ended["num_not_on_disk"] = journal.num_not_on_disk
                ended["disk_error"] = journal.error
        return Outcome(
            rank=self.placement.rank,
            group_in_place=self.group.in_place and not lost,
            lost_device=lost,
            num_later_steps=len(steps_of_cell),
            **ended,
        )

    def _where(self, error: BaseException) -> str:
        """The line of the cell that failed; "" on a rank that does not run it."""
        if self._is_serving:
            return ""
        return where_in_cell(error, cell_numbers(self.shell), self._script_file)

    def _note_shown(self, error: BaseException) -> None:
        """A traceback that IPython shows is a failure, also if the cell continues."""
        if is_called_from(EVENTS):
            # What IPython shows of a hook of the user's, around the cell, fails none.
            if self._begin_error is None:  # which is reported
                traceback.print_exception(error)
        elif self._interrupts.is_running and self._begin_error is None:
            self._shown_error = error
            session = self._session
            wraps_itself = session is not None and session.strategy.technique is None
            if self._replay is not None and not self._replay.has_batches:
                explain(error)
            add_hint(
                error,
                self.group.device,
                is_prepared=self._has_prepared and not wraps_itself,
                accumulates=session is not None and session.options.accumulate > 1,
                own_names=self.own_names(),
                ours=self._injected,
            )

    def _free(self, result: Any) -> int:
        """Free what a failed cell's exceptions hold: the reply has their text alone.
        Bytes of tensors that were freed; 0 where that failed."""
        with contextlib.suppress(Exception):
            drop_partial_imports()
            return freed_by(lambda: self._clear_errors(result), self.group.device)
        return 0

    def _clear_errors(self, result: Any) -> None:
        if self._shown_error is not None:
            clear_frames(self._shown_error, self.shell)
            self._shown_error = None
        for name in ("error_before_exec", "error_in_exec"):
            if (error := getattr(result, name)) is not None:
                clear_frames(error, self.shell)
                setattr(result, name, TextOnlyError(safe_str(error)))

    # ---- names of a cell ----

    def _start_session(self, spec: CellSpec) -> dict[str, Any]:
        """Names for a training cell; in a plain one they say where they belong."""
        if spec.strategy is None:
            return {
                **ONLY_IN_TRAINING_CELLS,
                **Checkpoints().names,
            }
        strategy = find_strategy(spec.strategy)
        self._has_prepared |= strategy.technique is not None
        rank, world_size = self.placement.rank, self.placement.world_size
        if strategy.is_single:
            self._contexts.enter_context(self.group.alone())
            world_size = 1
        config = self.config if spec.has_config else {}
        options = TrainOptions(**spec.options, config=config)
        roles: Roles | None = None
        if servers := strategy.server_ranks(options.servers, world_size):
            roles = self._contexts.enter_context(self.group.divided(servers))
            if rank in servers:
                self._serve(strategy, roles, options)
                return {}
            world_size = len(roles.workers)
        self.shell.user_ns["world_size"] = world_size
        self._emitter = Emitter(
            lambda batch: self._publish("batch", batch),
            journal=Journal(spec.folder, rank),
        )
        self._stop_point = StopPoint()
        plan = CheckpointPlan(**spec.checkpoints) if spec.checkpoints else None
        slowing = slowing_of(options.slow, rank, self.group.device)
        recorder = Recorder(
            None if spec.profiles is None else Path(spec.profiles),
            rank=rank,
            device=self.group.device,
            sees_modules=not options.compile,
            note=lambda text: session.note(
                (PROFILE_NOTE if options.profile else BLOCK_NOTE) + text
            ),
        )
        profiling: list[Observer] = []
        if options.profile:
            resumed = plan and plan.resume_from
            taken = step_of(Path(resumed)) if resumed else 0
            steps = steps_to_profile(options.profile, taken)
            profiling = [StepRecorder(steps, recorder, lambda: session.has_failed)]
        self._session = session = Session(
            strategy,
            self._emitter,
            rank=rank,
            world_size=world_size,
            device=self.group.device,
            seed=spec.seed,
            options=options,
            folder=spec.folder,
            checkpoints=plan,
            roles=roles,
            report=self._take_report,
            observers=[self._stop_point, *slowing, *profiling],
            profiled=recorder,
        )
        if slowing:
            session.note(
                f"--slow {options.slow}: rank {rank} sleeps after each backward pass"
            )
        self._contexts.enter_context(session.running())
        block = BlockProfile(
            recorder,
            num_steps=lambda: session.num_steps,
            meet=session.meet,
        )
        self._contexts.callback(block.end)
        if plan is not None and plan.resume_from is not None:
            self._begin_replay(session)
        names = {**session.names, "profile": block}
        if self.function is not None:
            self.shell.user_ns[FUNCTION_NAME] = self._take_function(names)
        return names

    def _begin_replay(self, session: Session) -> None:
        """The run resumes: have the cell come to where it was."""
        self._replay = replay_of(session)
        self.shell.user_ns[REPLAY_NAME] = self._replay
        self.shell.ast_transformers.append(self._replay)

    def _end_replay(self) -> None:
        self.shell.user_ns.pop(REPLAY_NAME, None)
        replay, self._replay = self._replay, None
        if replay in self.shell.ast_transformers:  # a cell may empty the list
            self.shell.ast_transformers.remove(replay)

    def _take_report(self, report: Any) -> None:
        if isinstance(report, ReplicaNotes):
            self._steps = report.taken
        self._publish("report", report)

    def _serve(self, strategy: Strategy, roles: Roles, options: TrainOptions) -> None:
        """Serve the others in the place of the cell."""
        self.function = None
        self._is_serving = True
        self.shell.user_ns[SERVE_NAME] = server_of(
            strategy,
            roles,
            self.group.device,
            options,
            lambda report: self._publish("report", report),
        )

    def program(self, script: ScriptSpec) -> ScriptProgram:
        """The script, to be the next cell's function."""
        return ScriptProgram(script, self.group, self._fresh_torch, self._loaded_first)

    def _refusal(self) -> BaseException | None:
        """Raised in the cell by the next signal; None where that is an interrupt."""
        return None if self._session is None else self._session.refusal

    def _note(self, text: str) -> None:
        """Say a sentence to the user, once: under the run, where there is one."""
        (self._session.note if self._session else self.group.note_once)(text)

    def _inject(self, names: dict[str, Any]) -> None:
        """Put labkit's functions into the namespace, but never over a user's own."""
        self._names.update(names)
        for name in names.keys() - self.own_names():
            self.shell.user_ns[name] = self._injected[name] = names[name]

    def own_names(self) -> set[str]:
        """Names of labkit's functions that the user's cells have for something else."""
        namespace, ours = self.shell.user_ns, self._injected
        found = {name for name in self._names if name in namespace}
        return {name for name in found if namespace[name] is not ours.get(name)}

    def _take_function(self, names: dict[str, Any]) -> Any:
        """The function sent by `receive_function`, as a call without arguments.

        Names that the notebook does not have are looked up on this rank.
        """
        function, with_rank = self.function
        self.function = None
        if isinstance(function, ScriptProgram):
            self._script_file = function.script.file
            return function
        inner = inspect.unwrap(getattr(function, "func", function))
        if inner.__module__ == "__main__" and inspect.isfunction(inner):
            for name, value in {**self.shell.user_ns, **names}.items():
                inner.__globals__.setdefault(name, value)
        if self._replay is not None:
            whole = self._replay.of_function(function)
            function = self._contexts.enter_context(whole)
        if not with_rank:
            return function
        rank = self.placement.rank
        return functools.partial(function, rank, self.shell.user_ns["world_size"])

    def _pop_reply(self) -> dict[str, Any]:
        reply, self._reply = self._reply, {}
        return reply

    def _publish(self, name: str, value: Any) -> None:
        self.shell.data_pub.publish_data(message(name, value))


def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    """What a plain `%%dist` cell has of a training cell's: its help, and no call."""

    @functools.wraps(method)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "prepare, fit, log, stop_early and profile belong to a training run; begin "
            "the cell with %%dist_train STRATEGY, for example %%dist_train ddp"
        )

    signature = inspect.signature(method)
    _, *parameters = signature.parameters.values()  # without self
    refuse.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return refuse


ONLY_IN_TRAINING_CELLS = {
    **{name: refusing(getattr(Session, name)) for name in TRAINING_NAMES},
    "profile": refusing(BlockProfile.__call__),
}
