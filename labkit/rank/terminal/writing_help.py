"""What Tab and Shift-Tab show in a cell for this rank, by its variables."""

from typing import Any

from labkit.compat.ipython import completer_of


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
            return str(self._shell.object_inspect_mime(name, with_source)["text/plain"])
        except KeyError:
            return ""
