"""Work in a thread, beside the notebook's cells."""

import contextvars
import sys
import threading
import traceback
from collections.abc import Callable


class Job:
    """Work in a thread, whose output appears under the cell that began it."""

    def __init__(self, work: Callable[[], None], *, name: str) -> None:
        self._error: BaseException | None = None
        # Python, before 3.13, takes a thread for ended whose `join` was interrupted.
        self._has_ended = threading.Event()
        # The kernel keeps in the context which cell it is that prints.
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(self._run, work), name=name, daemon=True
        ).start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            show_error(error)
        finally:
            self._has_ended.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether the work has ended, within `timeout_s`."""
        return self._has_ended.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Like `join`, but raises what the work raised."""
        has_ended = self.join(timeout_s)
        if has_ended and self._error is not None:
            raise self._error
        return has_ended


def show_error(error: BaseException) -> None:
    """Write an error as IPython would show it under a cell."""
    render = getattr(error, "_render_traceback_", None)
    lines = render() if render else traceback.format_exception(error)
    print("\n".join(line.rstrip("\n") for line in lines), file=sys.stderr)
    sys.stderr.flush()
