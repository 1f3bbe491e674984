"""Runs a script on this rank as the `__main__` of a process of its own."""

import builtins
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from types import TracebackType
from typing import Any

from labkit.checks import UserError
from labkit.compat.accelerate import forget_state
from labkit.compat.deepspeed import live_engines
from labkit.compat.torch import ThreadSettings
from labkit.rank.group.process_group import RankProcessGroup
from labkit.rank.group.recovery import list_frozen
from labkit.rank.scripts.left_behind import forget_values
from labkit.rank.scripts.left_behind import write_files
from labkit.rank.scripts.left_running import Started
from labkit.rank.scripts.modules import OwnModules
from labkit.rank.scripts.own_process import AtOnceExit
from labkit.rank.scripts.own_process import end_fork
from labkit.rank.scripts.own_process import own_process
from labkit.rank.scripts.torch_settings import TorchSettings
from labkit.rank.scripts.torch_settings import interop_threads_again
from labkit.rank.training.resume import seed_everything
from labkit.records import ScriptSpec
from labkit.strategies.zero.engines import destroy_others


class ScriptExitError(UserError):
    """A script has ended its process with a code that says that it failed."""


class ScriptProgram:
    """A script that this rank is to run: called without arguments."""

    def __init__(
        self,
        script: ScriptSpec,
        group: RankProcessGroup,
        fresh_torch: TorchSettings,
        loaded_before: frozenset[str],
    ) -> None:
        """`fresh_torch` and `loaded_before` are settings and modules of an engine in
        which nothing of the user's has run yet."""
        self.script = script
        self._group = group
        self._fresh_torch = fresh_torch
        folders = [script.import_folder, str(Path(script.file).parent)]
        if script.directory is not None:
            folders.append(script.directory)
        self._modules = OwnModules(folders, loaded_before)

    def __call__(self) -> None:
        """Run it to its end; what it raises is raised."""
        script = self.script
        settings, of_thread = TorchSettings(), ThreadSettings()
        self._group.step_out()
        main_module = sys.modules["__main__"]
        started = Started(self._modules)
        list_frozen()
        engines = set(map(id, live_engines()))
        try:
            with (
                started.noting(),
                interop_threads_again(),
                own_process(
                    script.arguments,
                    script.import_folder,
                    script.directory,
                    self._group.launch_environment(),
                    self._modules,
                ),
            ):
                self._fresh_torch.restore()
                forget_state()
                # Without a seed of its own every process draws something else.
                seed_everything(script.seed + self._group.rank)
                names = self.run(started)
            forget_values([names, *self._modules.ended])
        finally:
            sys.modules["__main__"] = main_module
            settings.restore()
            of_thread.restore()
            forget_state()
            list_frozen()
            destroy_others(engines)
            write_files()

    def run(self, started: Started) -> dict[str, Any]:
        """Run the source itself, with all around it as a new process has it: its
        names."""
        script = self.script
        main = ModuleType("__main__")
        names = vars(main)
        names.update(__file__=script.file, __builtins__=builtins, __cached__=None)
        if script.module:
            found = importlib.util.find_spec(script.module)
            if found and found.submodule_search_locations is not None:  # a package
                found = importlib.util.find_spec(f"{script.module}.__main__")
            assert found is not None  # by `read_script`
            names.update(
                __spec__=found, __package__=found.parent, __loader__=found.loader
            )
        sys.modules["__main__"] = main
        code = compile(script.source, script.file, "exec", dont_inherit=True)
        pid = os.getpid()
        try:
            exec(code, names)
        except SystemExit as ended:
            end_fork(pid, ended)
            if not ended.code and not isinstance(ended, AtOnceExit):
                started.wait_for_threads()
            if ended.code:
                error = ScriptExitError(self._why(ended))
                # From the line of the script that led to it.
                raise error.with_traceback(self._users_frames(ended)) from None
        except BaseException as error:
            end_fork(pid, error)
            raise
        else:
            end_fork(pid, None)
            started.wait_for_threads()
        return names

    def _why(self, ended: SystemExit) -> str:
        """Why the script has failed, in words."""
        script, code = self.script, ended.code
        name = Path(script.file).name
        given = " ".join(script.arguments[1:])
        if not isinstance(code, int):
            return f"{name} ended with the message: {code}"
        if code == 2 and "argparse" in self._modules_of(ended):
            found = f"the arguments {given}" if given else "no arguments"
            return (
                f"{name} was given {found}, which it does not take (what it takes is "
                "printed above, and goes after the file's name); it ended with exit "
                "code 2"
            )
        return (
            f"{name} reports a failure, and may have printed why; it ended with exit "
            f"code {code}"
        )

    def _modules_of(self, error: BaseException) -> set[Any]:
        return {each.tb_frame.f_globals.get("__name__") for each in frames_of(error)}

    def _users_frames(self, error: BaseException) -> TracebackType | None:
        """Of a traceback the part that is the script's own."""
        own = [
            each
            for each in frames_of(error)
            if self._modules.has_file(each.tb_frame.f_code.co_filename)
        ]
        if not own:
            return None
        own[-1].tb_next = None
        return own[0]


def frames_of(error: BaseException) -> list[TracebackType]:
    """The frames of its traceback, the innermost last."""
    found = []
    frame = error.__traceback__
    while frame is not None:
        found.append(frame)
        frame = frame.tb_next
    return found
