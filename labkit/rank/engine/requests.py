"""What the notebook can ask of a rank at any time, also while it runs a cell."""

import dataclasses
import os
import socket
from collections.abc import Callable
from typing import Any

from labkit.answers import answer_questions
from labkit.compat.ipython import cell_numbers
from labkit.rank.engine.interrupts import CellInterrupts
from labkit.rank.group.process_group import RankProcessGroup
from labkit.rank.measuring.devices import describe
from labkit.rank.measuring.memory import memory_reader
from labkit.rank.measuring.memory import memory_total
from labkit.rank.steps.stop_point import StopPoint
from labkit.rank.telemetry.stack_trace import finished_collectives
from labkit.rank.telemetry.stack_trace import position
from labkit.rank.terminal.console import Console
from labkit.rank.terminal.keyboard import Keyboard
from labkit.rank.terminal.writing_help import WritingHelp
from labkit.records import CellEnd


class ControlRequests:
    """Answers requests of the notebook, in the engine's control thread."""

    def __init__(
        self,
        shell: Any,
        group: RankProcessGroup,
        interrupts: CellInterrupts,
        console: Console,
        keyboard: Keyboard,
        stop_point: Callable[[], StopPoint],
    ) -> None:
        """`stop_point` gives that of the run of today."""
        self._shell = shell
        self._group = group
        self._interrupts = interrupts
        self.ended: CellEnd | None = None
        """How the last cell has ended, until a kernel has received it."""
        writing = WritingHelp(shell)
        self._answers: dict[str, Callable[..., Any]] = {
            "interrupt": interrupts.request,
            "hold": lambda: stop_point().hold(),
            "stop_after": lambda num_steps: stop_point().stop_after(num_steps),
            "describe": self._describe,
            "received": self._received,
            "progress": lambda: {
                "done": [stop_point().num_steps, finished_collectives()],
                "overdue": group.overdue(),
            },
            "stack": self._stack,
            "type": keyboard.take,
            "has_variable": lambda name: name in shell.user_ns,
            "complete": writing.complete,
            "help_of": writing.help_of,
            "release": group.release,
        }
        answer_questions(shell.kernel, self._answers, console.listen)

    def _describe(self) -> dict[str, Any]:
        """Host, process, device and memory of this rank, for `%dist_status`; and how
        its last cell has ended, if no kernel knows that."""
        device, ended = self._group.device, self.ended
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(device),
            "state": "busy" if self._interrupts.is_running else "idle",
            "cell": self._interrupts.number,
            **describe(device),
            "memory_used": memory_reader(device)(),
            "memory_total": memory_total(device),
            "ended": None if ended is None else dataclasses.asdict(ended),
        }

    def _received(self, number: int) -> None:
        """A kernel knows how the cell of this number has ended."""
        if self.ended is not None and self.ended.number == number:
            self.ended = None

    def _stack(self) -> dict[str, Any]:
        """Where the main thread is: a `records.Position`, as a dict."""
        found = position(
            self._group.rank,
            cell_numbers(self._shell),
            is_running=self._interrupts.is_running,
            since_ns=self._group.formed_at_ns,
            waits_on_device=self._group.backend == "nccl",
        )
        return dataclasses.asdict(found)
