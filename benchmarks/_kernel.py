"""A real IPython kernel, as a front end has it."""

import ast
import contextlib
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

TIMEOUT_S = 300.0
READY_S = 60.0
OUTPUTS_S = 5.0
"""What a cell has shown is here so soon after its reply."""


@dataclass(frozen=True)
class Reply:
    """How a cell ended, as the front end learns it."""

    status: str
    """"ok", "error" or "aborted"."""
    error: str
    came_at: float
    """When the prompt was back, by `time.time`: comparable with the ranks' clock."""
    text: str
    num_pictures: int
    """PNGs that were displayed or updated."""


class OneSpec(KernelSpecManager):
    """Knows one kind of kernel, by whatever name."""

    spec: KernelSpec

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return self.spec


class Kernel:
    """A kernel in a process of its own, and a client for it.

    Parameters
    ----------
    command : sequence of str, optional
        What starts the kernel, before its connection file; this Python's by default.
    interrupt_mode : {"signal", "message"}
        How the front end interrupts it.
    env : mapping, optional
        Environment variables besides those of this process.
    """

    def __init__(
        self,
        command: Sequence[str] = (sys.executable, "-m", "ipykernel_launcher"),
        interrupt_mode: str = "signal",
        env: Mapping[str, str] | None = None,
    ) -> None:
        specs = OneSpec()
        specs.spec = KernelSpec(
            argv=[*command, "-f", "{connection_file}"],
            display_name="Python 3",
            language="python",
            interrupt_mode=interrupt_mode,
        )
        self.manager = KernelManager(kernel_name="python3", kernel_spec_manager=specs)
        self.manager.start_kernel(
            env={**os.environ, **(env or {})},
            stderr=subprocess.DEVNULL,  # what ipykernel says when it is ended busy
        )
        self.client = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=READY_S)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def begin(self, code: str) -> str:
        """Send a cell; its request's id, for `end`."""
        return self.client.execute(code)

    def end(self, request: str, timeout_s: float = TIMEOUT_S) -> Reply:
        """Wait for the end of a cell; TimeoutError where it does not come."""
        deadline = time.monotonic() + timeout_s
        content = self._reply_to(request, deadline)
        came_at = time.time()
        text, num_pictures = self._outputs_of(request, deadline + OUTPUTS_S)
        error = f"{content.get('ename', '')}: {content.get('evalue', '')}"
        return Reply(content["status"], error, came_at, text, num_pictures)

    def run(self, code: str) -> Reply:
        """Run a cell that is to succeed; RuntimeError if it does not."""
        reply = self.end(self.begin(code))
        if reply.status != "ok":
            raise RuntimeError(f"this cell failed: {code}\n{reply.text}{reply.error}")
        return reply

    def value(self, expression: str) -> Any:
        """What a Python expression has for a value in the kernel, by way of JSON."""
        as_json = f"__import__('json').dumps({expression})"
        request = self.client.execute("", user_expressions={"value": as_json})
        content = self._reply_to(request, time.monotonic() + TIMEOUT_S)
        found = content["user_expressions"]["value"]
        if found["status"] != "ok":
            raise RuntimeError(f"{expression}: {found['evalue']}")
        return json.loads(ast.literal_eval(found["data"]["text/plain"]))

    def close(self) -> None:
        """End the client and, where it still runs, the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def _reply_to(self, request: str, deadline: float) -> dict[str, Any]:
        while True:
            message = received(self.client.get_shell_msg, deadline)
            if message["parent_header"].get("msg_id") == request:
                return message["content"]

    def _outputs_of(self, request: str, deadline: float) -> tuple[str, int]:
        """What the cell printed, and how many pictures it showed."""
        text, num_pictures = "", 0
        while True:
            message = received(self.client.get_iopub_msg, deadline)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text += content["text"]
            elif kind in ("display_data", "update_display_data"):
                num_pictures += "image/png" in content["data"]
            elif kind == "status" and content["execution_state"] == "idle":
                return text, num_pictures


def received(get: Callable[..., dict[str, Any]], deadline: float) -> dict[str, Any]:
    """The next message of a channel; TimeoutError at `deadline` (monotonic)."""
    try:
        return get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeoutError("the kernel did not answer") from None


@contextlib.contextmanager
def lab_kernel(start: str = "%dist_start -n 2") -> Iterator[Kernel]:
    """A kernel with a running lab; both are gone afterwards."""
    kernel = Kernel()
    try:
        kernel.run("%load_ext labkit")
        kernel.run(start)
        yield kernel
        kernel.run("%dist_stop")
    finally:
        kernel.close()
