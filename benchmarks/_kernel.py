"""A real IPython kernel, as a front end has it."""

import ast
import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jupyter_client.manager import start_new_kernel

TIMEOUT_S = 300.0


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


class Kernel:
    """A kernel in a process of its own, and a client for it."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(
            kernel_name="python3",
            stderr=subprocess.DEVNULL,  # what ipykernel says when it is ended busy
        )

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def begin(self, code: str) -> str:
        """Send a cell; its request's id, for `end`."""
        return self.client.execute(code)

    def end(self, request: str) -> Reply:
        """Wait for the end of a cell."""
        content = self._reply_to(request)
        came_at = time.time()
        text, num_pictures = self._outputs_of(request)
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
        found = self._reply_to(request)["user_expressions"]["value"]
        if found["status"] != "ok":
            raise RuntimeError(f"{expression}: {found['evalue']}")
        return json.loads(ast.literal_eval(found["data"]["text/plain"]))

    def close(self) -> None:
        """End the client and, where it still runs, the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def _reply_to(self, request: str) -> dict[str, Any]:
        while True:
            message = self.client.get_shell_msg(timeout=TIMEOUT_S)
            if message["parent_header"].get("msg_id") == request:
                return message["content"]

    def _outputs_of(self, request: str) -> tuple[str, int]:
        """What the cell printed, and how many pictures it showed."""
        text, num_pictures = "", 0
        while True:
            message = self.client.get_iopub_msg(timeout=TIMEOUT_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text += content["text"]
            elif kind in ("display_data", "update_display_data"):
                num_pictures += "image/png" in content["data"]
            elif kind == "status" and content["execution_state"] == "idle":
                return text, num_pictures


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
