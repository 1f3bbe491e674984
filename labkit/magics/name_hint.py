"""What to say of a name that a cell of the notebook does not find, and ranks have."""

from types import TracebackType
from typing import Any

from labkit.magics.current import running_lab
from labkit.notebook.kernel.output import notebook_variables
from labkit.notebook.kernel.output import say
from labkit.records import TRAINING_NAMES

OF_RANKS = (
    *("rank", "local_rank", "world_size", "device", "torch", "dist"),
    *("save_checkpoint", "load_checkpoint"),
)
"""What labkit gives to every cell on a rank; a copy of it is of no use elsewhere."""


def hint_at_ranks(result: Any) -> None:
    """After a cell has run: `%%dist` may be missing at its top.

    Parameters
    ----------
    result : IPython.core.interactiveshell.ExecutionResult
        How the cell has ended.
    """
    error = result.error_in_exec
    if type(error) is not NameError or not _is_of_notebook(error.__traceback__):
        return
    lab = running_lab()
    if not error.name or lab is None:
        return
    # Ranks have their names from their first cell on; they are asked for before, too.
    if error.name in (*OF_RANKS, *TRAINING_NAMES) or lab.has_variable(error.name):
        say(hint_of(error.name))


def hint_of(name: str) -> str:
    """What to do about a name that the ranks have and the notebook does not."""
    if name in (*TRAINING_NAMES, "profile"):
        return (
            f"{name} belongs to a training cell: %%dist_train STRATEGY at the top of "
            "the cell, for example %%dist_train ddp, trains with it on the ranks"
        )
    has = f"the ranks have {name}, and the notebook has variables of its own: "
    runs = "%%dist at the top of the cell runs it on the ranks"
    if name in OF_RANKS:
        return has + runs
    return f"{has}{runs}, and %dist_pull {name} copies a value to the notebook"


def _is_of_notebook(traceback: TracebackType | None) -> bool:
    """Whether it ends in a cell, or in a function that one has defined: a library's
    own name may by chance be one of the ranks'."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return (
        traceback is not None and traceback.tb_frame.f_globals is notebook_variables()
    )
