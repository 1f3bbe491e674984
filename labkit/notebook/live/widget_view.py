"""Shows a run while it runs as an interactive widget, and then as a picture."""

import functools
import time
from importlib import resources
from typing import TYPE_CHECKING
from typing import Any

from labkit.checks import UserError
from labkit.checks import short_repr
from labkit.notebook.live import VIEWS
from labkit.notebook.live.live_view import LiveView
from labkit.notebook.runs.progress import planned_steps
from labkit.notebook.runs.progress import progress_line
from labkit.notebook.runs.progress import remarks
from labkit.notebook.runs.run import Run

if TYPE_CHECKING:
    from labkit.notebook.live.widget_frames import FrameEncoder

EAGER_S = 3.0
"""For so long each update has a keyframe: the front end may still be loading."""
KEYFRAME_S = 5.0
"""The time between keyframes then. A busy kernel does not process requests for one."""
STATUS_S = 1.0
"""The time between status lines, each of which takes a look at all steps."""


class WidgetView(LiveView):
    """A live view with values under the mouse, zoom, and ranks switched on and off.

    The widget gives its place to the picture when the run ends: a saved notebook
    cannot show a widget whose kernel is gone.
    """

    refresh_s = 0.25

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._frames: FrameEncoder | None = None
        self._widget: Any = None
        self._displayed_at = 0.0
        self._next_keyframe = 0.0
        self._status: dict[str, Any] = {}
        self._next_status = 0.0

    def close(self) -> None:
        """Put the picture of the last state in the widget's place."""
        super().close()
        if self._widget is not None:
            if self._has_failed:
                self._show({})
            # nbclient and papermill save the last state even of a closed widget.
            with self._widget.hold_sync():
                self._widget._esm = "export default {}"
                self._widget._css = ""
                self._widget.keyframe = {"values": b""}
            self._widget.close()
            self._widget.layout.close()  # ipywidgets keeps it as a model of its own

    def _draw(self) -> None:
        if self.run.state == "running":
            self._send()
        else:
            super()._draw()

    def _send(self) -> None:
        """Send what is new; the first time, display the widget."""
        if self._frames is None:
            from labkit.notebook.live.widget_frames import FrameEncoder

            self._frames = FrameEncoder(self.run.collector)
        now = time.monotonic()
        if now >= self._next_status:
            self._next_status = now + STATUS_S
            self._status = {
                "title": progress_line(self.run),
                "remarks": "; ".join(
                    [*remarks(self.run), *map(str, self.run.restarts)]
                ),
                "num_steps": planned_steps(self.run),
            }
        delta = self._frames.delta()
        if delta is not None and self._widget is not None:
            header, values = delta
            self._widget.send({**header, **self._status}, buffers=[values])
        if delta is None or now >= self._next_keyframe:
            header, values = self._frames.keyframe()
            keyframe = {**header, **self._status, "values": values}
            if self._widget is None:
                self._display(keyframe)
            else:
                self._widget.keyframe = keyframe
            is_loading = now < self._displayed_at + EAGER_S
            self._next_keyframe = now if is_loading else now + KEYFRAME_S

    def _display(self, keyframe: dict[str, Any]) -> None:
        from labkit.notebook.plots.style import style_of

        ranks = self.run.collector.ranks
        self._displayed_at = time.monotonic()
        self._widget = widget_class()(
            ranks=ranks,
            styles=[style_of(place) for place in range(len(ranks))],
            log_scale=self.run.log_scale,
            keyframe=keyframe,
        )
        self._widget.on_msg(self._hear)
        data, _ = self._widget._repr_mimebundle_()
        self._show(data)

    def _hear(self, widget: Any, content: Any, buffers: Any) -> None:
        """Take the front end's only message: it missed something."""
        self._next_keyframe = 0.0


def find_view(live: bool | str) -> type[LiveView] | None:
    """The view that `live` names; None for False.

    Raises ValueError for what is no view, RuntimeError where it is not installed.
    """
    if live is False:
        return None
    if live is True or live == "image":
        return LiveView
    if live != "widget":
        raise ValueError(
            f"live is {short_repr(live)}; choose one of: {', '.join(VIEWS)}; or False "
            "for none"
        )
    try:
        import anywidget  # noqa: F401
    except ImportError:
        raise UserError(
            "the widget needs anywidget, which is not installed; install it with "
            'pip install "labkit[widget]" and restart the kernel and JupyterLab, or '
            "leave out --live widget"
        ) from None
    return WidgetView


@functools.cache
def widget_class() -> Any:
    """The class of the widget; its front end is in `static`."""
    import anywidget
    import traitlets

    class RunWidget(anywidget.AnyWidget):
        # uPlot's build defines a global name, which the module behind it uses.
        _esm = read_static("uplot/uPlot.iife.min.js", "run_view.js")
        _css = read_static("uplot/uPlot.min.css", "run_view.css")
        ranks: Any = traitlets.List().tag(sync=True)
        styles: Any = traitlets.List().tag(sync=True)
        log_scale: Any = traitlets.Bool().tag(sync=True)
        # A message comes too early for a front end that still loads; a trait waits.
        keyframe: Any = traitlets.Dict().tag(sync=True)

    return RunWidget


def read_static(*names: str) -> str:
    """Files of the front end, one after the other."""
    folder = resources.files("labkit.notebook.live") / "static"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)
