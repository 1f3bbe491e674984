"""What Tab and Shift-Tab show in a cell for this rank, by its variables."""

from typing import Any

from labkit.compat.ipython import completer_of
from labkit.compat.ipython import value_of


class WritingHelp:
    """Answers the notebook's questions for a cell that is being written."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._completed = completer_of(shell)

    def complete(self, code: str) -> dict[str, Any]:
        """What may stand from "start" to the end: "words", each with its type."""
        start, words = self._completed(code)
        return {"start": start, "words": words}

    def help_of(self, name: str, with_source: bool) -> str:
        """What IPython shows of a variable; "" where there is none."""
        try:
            value = value_of(self._shell, name)
        except KeyError:
            return ""
        if not callable(value):
            # IPython shows the values, for which a tensor that is sharded may need the
            # other ranks, and one on a GPU waits for what is under way there.
            kind = type(value)
            return f"Type: {kind.__module__}.{kind.__qualname__}"
        return str(self._shell.object_inspect_mime(name, with_source)["text/plain"])
