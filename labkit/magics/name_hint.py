"""What to say of a name that a cell of the notebook does not find, and ranks have."""

from types import TracebackType
from typing import Any

from labkit.magics.current import running_lab
from labkit.notebook.kernel.output import notebook_variables
from labkit.notebook.kernel.output import say


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
    if error.name and lab is not None and lab.has_variable(error.name):
        say(
            f"the ranks have {error.name}, and the notebook has variables of its own: "
            "%%dist at the top of the cell runs it on the ranks, and %dist_pull "
            f"{error.name} copies a value to the notebook"
        )


def _is_of_notebook(traceback: TracebackType | None) -> bool:
    """Whether it ends in a cell, or in a function that one has defined: a library's
    own name may by chance be one of the ranks'."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return (
        traceback is not None and traceback.tb_frame.f_globals is notebook_variables()
    )
