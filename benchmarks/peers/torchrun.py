"""torchrun: each cell is a script, run from the shell with labkit's own torch."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from peers import cells
from peers.session import START_LIMIT_S
from peers.session import Ended
from peers.session import NotThereError
from peers.session import Session


@dataclass(frozen=True)
class Script:
    """One that runs."""

    process: subprocess.Popen[bytes]
    output: Path


class Torchrun(Session):
    """What a script does, for comparison; nothing is kept."""

    name = "torchrun"
    package = "torch"
    keeps_state = False
    has_strategies = True
    no_transfer = "a script has its data by itself"
    backend = "gloo"

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.num_scripts = 0
        self.last: Script | None = None

    @classmethod
    def python(cls) -> str:
        return sys.executable

    def open(self) -> None:
        """Nothing."""

    def start(self) -> float:
        self.forget()
        began = time.time()
        code = cells.NOTE.format(folder=str(self.folder)) + cells.CHECK
        script = self.begin(code + 'note("ready")\n')
        seconds = max(self.noted("ready", START_LIMIT_S)) - began
        self.end(script, START_LIMIT_S)
        return seconds

    def begin(self, code: str, *, strategy: str | None = None) -> Script:
        self.num_scripts += 1
        path = self.folder / f"script{self.num_scripts}.py"
        path.write_text(
            f"{cells.join(backend=self.backend)}\n{code}\ndist.destroy_process_group()\n"
        )
        options = ["--standalone", "--nproc-per-node", str(self.num_ranks)]
        output = path.with_suffix(".txt")
        with output.open("wb") as file:
            process = subprocess.Popen(
                [self.python(), "-m", "torch.distributed.run", *options, str(path)],
                env=os.environ | dict(self.environment()),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.last = Script(process, output)
        return self.last

    def end(self, request: Script, limit_s: float) -> Ended:
        try:
            status = request.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError("the script did not end") from None
        return Ended(status != 0, time.time(), request.output.read_text())

    def interrupt(self) -> None:
        assert self.last is not None
        os.killpg(self.last.process.pid, signal.SIGINT)

    def push(self, megabytes: int, limit_s: float) -> float:
        raise NotThereError(self.no_transfer)

    def pull(self, megabytes: int, limit_s: float) -> float:
        raise NotThereError(self.no_transfer)

    def kill(self) -> None:
        super().kill()
        if self.last is not None:
            self.last.process.wait(5)
