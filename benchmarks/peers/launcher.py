"""accelerate's `notebook_launcher`: each cell forks ranks of its own."""

import textwrap

from peers import cells
from peers.session import Notebook


class NotebookLauncher(Notebook):
    """As its documentation has it; a launch ends with its ranks."""

    name = "accelerate"
    package = "accelerate"
    keeps_state = False
    no_pull = "what the function returns is dropped"

    def opening(self) -> list[str]:
        return ["from accelerate import notebook_launcher"]

    def cell(self, code: str) -> str:
        join = cells.join()
        return self.launch(f"{join}\n{code}")

    @property
    def pushing(self) -> str:  # type: ignore[override]
        return self.launch("assert data.nbytes")

    def launch(self, code: str) -> str:
        body = textwrap.indent(code, "    ")
        call = f"notebook_launcher(on_every_rank, num_processes={self.num_ranks})"
        return f"def on_every_rank():\n{body}\n{call}"
