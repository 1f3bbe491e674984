"""jupyter-distributed: a kernel whose every cell runs on all ranks.

Its server extension replaces the kernel's command by the one here.
"""

from collections.abc import Mapping

from peers import cells
from peers.session import Notebook


class JupyterDistributed(Notebook):
    """As its README has it, and as its server extension starts it."""

    name = "jupyter-distributed"
    package = "jupyter-distributed"
    command = ("-m", "jupyter_distributed.kernel")
    interrupt_mode = "message"
    no_transfer = "the notebook has no variables of its own"

    def environment(self) -> Mapping[str, str]:
        return {
            **super().environment(),
            "JUPYTER_DISTRIBUTED_BASE_KERNEL": "python3",
            "JUPYTER_DISTRIBUTED_WORLD_SIZE": str(self.num_ranks),
        }

    def opening(self) -> list[str]:
        return [cells.join()]

    def cell(self, code: str) -> str:
        return code
