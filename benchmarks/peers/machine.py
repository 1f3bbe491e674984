"""The machine: what it is, and what no tool on it can be faster than."""

import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from peers import cells
from peers.session import SURROUNDINGS
from peers.session import NotThereError
from peers.session import Session

LIMITS = {
    "loopback": "one byte sent and returned over TCP on the loopback interface",
    "memcpy_1": "1 MB copied in memory",
    "memcpy_100": "100 MB copied in memory",
    "import_torch": "a Python that imports torch",
    "pss_torch": "a Python that has imported torch",
    "matmul_2": "the matrix products of the 2 ms loop at the rate of a large one",
    "matmul_10": "the same for the 10 ms loop",
}
VERSION = "from importlib.metadata import version; print(version({package!r}))"
IMPORT = "import torch, psutil; print(psutil.Process().memory_full_info().pss)"
MULTIPLY = """
import time, torch
a = torch.randn(1024, 1024)
def seconds():
    began = time.perf_counter()
    a @ a
    return time.perf_counter() - began
print(min(seconds() for _ in range(20)))
"""


def described(sessions: list[type[Session]]) -> dict[str, Any]:
    """What the figures were taken on."""
    gib = psutil.virtual_memory().total / 2**30
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(gib, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "load_before": load(),
        "versions": {each.name: version(each) for each in sessions},
    }


def cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    found = path.exists() and re.search(r"model name\s*: (.*)", path.read_text())
    return found[1] if found else platform.processor()


def load() -> list[float]:
    """The load average over 1, 5 and 15 minutes."""
    return [round(each, 2) for each in os.getloadavg()]


def version(session: type[Session]) -> str:
    """A peer's version, or why it is not there."""
    try:
        code = VERSION.format(package=session.package)
        return f"{session.package} {printed(session.python(), code)}"
    except (NotThereError, OSError, subprocess.SubprocessError) as error:
        return str(error)


def printed(python: str, code: str) -> str:
    done = subprocess.run(
        [python, "-c", code],
        env=os.environ | SURROUNDINGS,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def limits() -> dict[str, float]:
    """The physical limits, in seconds, MB or steps/s, by their name in LIMITS."""
    pss, imports = 0.0, []
    for _ in range(3):
        began = time.perf_counter()
        pss = float(printed(sys.executable, IMPORT)) / 1e6
        imports.append(time.perf_counter() - began)
    rate = 2 * 1024**3 / float(printed(sys.executable, MULTIPLY))
    return {
        "loopback": loopback(),
        "memcpy_1": memcpy(1),
        "memcpy_100": memcpy(100),
        "import_torch": min(imports),
        "pss_torch": pss,
        **{f"matmul_{size}": rate / flops(w) for size, w in cells.SIZES.items()},
    }


def flops(width: int) -> float:
    """Of a step of `cells.TRAINING`: forward, and twice that backward, without the
    gradient of its input."""
    rows = 64
    first, others = 256 * width, width * width + 10 * width
    return 2 * rows * (2 * first + 3 * others)


def memcpy(megabytes: int) -> float:
    source = np.ones(megabytes * 10**6, dtype=np.uint8)
    target = np.zeros_like(source)
    taken = []
    for _ in range(7):
        began = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - began)
    return median(taken)


ECHO = """
import socket, sys
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while byte := end.recv(1):
    end.sendall(byte)
"""


def loopback() -> float:
    """Seconds for a byte to another process and back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        port = str(server.getsockname()[1])
        echo = subprocess.Popen([sys.executable, "-c", ECHO, port])
        killer = threading.Timer(20, echo.kill)
        killer.start()
        try:
            end, _ = server.accept()
            with end:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                taken = []
                for _ in range(2000):
                    began = time.perf_counter()
                    end.sendall(b"x")
                    end.recv(1)
                    taken.append(time.perf_counter() - began)
        finally:
            killer.cancel()
            echo.kill()
            echo.wait()
    return median(taken)
