"""What Shift-Tab shows of a name that ranks have and the notebook does not."""

import functools
import html
from typing import Any

from labkit.magics.current import running_lab


def add_help_of_ranks(shell: Any) -> None:
    """Have the shell show what rank 0 says of a name that it does not find itself."""
    of_notebook = shell.object_inspect_mime
    if hasattr(of_notebook, "__wrapped__"):
        return  # by an earlier %load_ext

    @functools.wraps(of_notebook)
    def inspect(name: str, detail_level: int = 0, **more: Any) -> dict[str, str]:
        try:
            found: dict[str, str] = of_notebook(name, detail_level, **more)
            return found
        except KeyError:
            lab = running_lab()
            if lab is None or not name:
                raise
            text = lab.help_of(name, with_source=detail_level > 0)
            if not text:
                raise
            text = f"On rank 0:\n{text}"
            # ipykernel takes a bundle without HTML for a name that was not found.
            return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}

    shell.object_inspect_mime = inspect
