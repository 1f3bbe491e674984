"""nbdistributed: `%%distributed`."""

import os
import time
from collections.abc import Mapping

import psutil

from peers.session import START_LIMIT_S
from peers.session import Notebook
from peers.session import wait_until


class NbDistributed(Notebook):
    """As its README has it."""

    name = "nbdistributed"
    package = "nbdistributed"
    no_transfer = "no magic copies a variable"

    def environment(self) -> Mapping[str, str]:
        """Its clean-up runs `pkill -f python.*worker`, which ends what others have
        started as well: here it finds a pkill that does nothing."""
        found = dict(super().environment())
        pkill = self.folder / "bin" / "pkill"
        if not pkill.exists():
            pkill.parent.mkdir()
            pkill.write_text("#!/bin/sh\nexit 1\n")
            pkill.chmod(0o755)
        return found | {"PATH": os.pathsep.join([str(pkill.parent), found["PATH"]])}

    def start(self) -> float:
        began = time.time()
        for opening in self.opening():
            self.succeed(opening, START_LIMIT_S)
        # It says that it has started before it has; a cell sent now is lost, for 30 s.
        wait_until(self._is_connected, START_LIMIT_S, "connection of every worker")
        self.first_cells()
        return time.time() - began

    def _is_connected(self) -> bool:
        """Whether every worker has found the kernel."""
        time.sleep(0.05)  # asking takes time from the workers
        assert self.driver_pid is not None
        kernel = psutil.Process(self.driver_pid)
        connections = kernel.net_connections("tcp")
        ports = {each.laddr.port for each in connections if each.status == "LISTEN"}
        workers = [each for each in kernel.children() if each.is_running()]
        connected = [
            any(each.raddr and each.raddr.port in ports for each in found)
            for found in (worker.net_connections("tcp") for worker in workers)
        ]
        return sum(connected) == self.num_ranks

    def opening(self) -> list[str]:
        return ["%load_ext nbdistributed", f"%dist_init -n {self.num_ranks}"]

    def cell(self, code: str) -> str:
        return f"%%distributed\n{code}"
