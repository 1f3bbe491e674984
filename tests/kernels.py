"""A real Jupyter kernel for tests, driven as a front end drives it."""

import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from labkit.host import watchdog


@dataclass
class Reply:
    """What a front end got for one cell."""

    status: str
    streams: dict[str, str] = field(default_factory=dict)
    displays: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    alternatives: list[str] = field(default_factory=list)
    """What pictures say in words."""

    @property
    def stdout(self) -> str:
        return self.streams.get("stdout", "")

    @property
    def stderr(self) -> str:
        return self.streams.get("stderr", "")


class LocalKernelManager(KernelManager):
    """Reaches its kernel by sockets in a folder of their own instead of TCP ports.

    A free port is picked before the kernel starts, and bound by the kernel a second
    later: beside labs that start, another process may have taken it by then.
    """

    def __init__(self, **kwargs: Any) -> None:
        folder = tempfile.TemporaryDirectory(prefix="labkit-kernel-")
        self.folder = folder  # removed with the manager
        path = str(Path(folder.name, "kernel.json"))
        super().__init__(transport="ipc", connection_file=path, **kwargs)


class Kernel:
    """One kernel and a client of it."""

    def __init__(self) -> None:
        self.manager = LocalKernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.last_request = ""
        """The message id of the last cell."""

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def run(
        self,
        code: str,
        timeout: float = 60,
        on_message: Callable[[dict[str, Any]], None] = lambda message: None,
        on_input: Callable[[str], str] | None = None,
    ) -> Reply:
        """Run a cell and gather what it gave; `on_message` sees each iopub message,
        `on_input` what the cell asks, and gives what is typed."""
        reply = Reply("")

        def take(message: dict[str, Any]) -> None:
            content, kind = message["content"], message["header"]["msg_type"]
            told = content.get("metadata", {}).get("image/png", {})
            reply.alternatives += [told["alt"]] if "alt" in told else []
            if kind == "stream":
                name = content["name"]
                reply.streams[name] = reply.streams.get(name, "") + content["text"]
            elif kind == "display_data":
                reply.displays.append(content["data"])
            elif kind == "update_display_data":
                reply.updates.append(content["data"])
            elif kind == "execute_result":
                reply.result = content["data"]
            elif kind == "error":
                reply.error = content
            on_message(message)

        def type_in(message: dict[str, Any]) -> None:
            assert on_input is not None
            self.client.input(on_input(message["content"]["prompt"]))

        answer = self.client.execute_interactive(
            code,
            timeout=timeout,
            output_hook=take,
            allow_stdin=on_input is not None,
            stdin_hook=type_in,
        )
        reply.status = answer["content"]["status"]
        self.last_request = answer["parent_header"]["msg_id"]
        return reply

    def take_waiting(self, on_message: Callable[[dict[str, Any]], None]) -> None:
        """Take what cells that have ended have published since."""
        while self.client.iopub_channel.msg_ready():
            on_message(self.client.get_iopub_msg(timeout=1))

    def lab_tokens(self) -> set[str]:
        """The tokens of the labs that this kernel has started."""
        found = set()
        for child in self.process.children():
            token = child.environ().get(watchdog.TOKEN_VARIABLE)
            if token is not None:
                found.add(token)
        return found

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)


@contextmanager
def running_kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        yield kernel
    finally:
        kernel.close()


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Return once `condition` holds; AssertionError with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)


def write_notebook(path: Path, cells: list[str]) -> None:
    """Write a notebook of these code cells, as JupyterLab would."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
        metadata={
            "kernelspec": {
                "display_name": "Python 3 (ipykernel)",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
    )
    nbformat.write(notebook, path)
