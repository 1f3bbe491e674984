"""labkit: `%%dist` and `%%dist_train`, with the picture."""

import sys

from peers.session import Notebook


class Labkit(Notebook):
    """As README.md has it."""

    name = "labkit"
    package = "labkit"
    has_strategies = True
    pushing = "%dist_push data"
    pulling = "%dist_pull data"
    repairing = "%dist_restart"
    closing = "%dist_stop"
    device = "cpu"

    @classmethod
    def python(cls) -> str:
        return sys.executable

    def opening(self) -> list[str]:
        options = f"-n {self.num_ranks} --device {self.device} --threads 1"
        return ["%load_ext labkit", f"%dist_start {options}"]

    def cell(self, code: str) -> str:
        return f"%%dist\n{code}"

    def training_cell(self, code: str, strategy: str) -> str:
        return f"%%dist_train {strategy or 'raw'}\n{code}"
