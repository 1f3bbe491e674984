"""The process that draws live pictures, through a real kernel."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from kernels import Kernel
from kernels import running_kernel
from kernels import wait_until
from test_runs import make_run

from labkit.notebook.live import live_view
from labkit.notebook.live.live_view import NO_RECORDS
from labkit.notebook.live.live_view import LiveView
from labkit.notebook.live.live_view import show
from labkit.notebook.live.render_process import NICENESS
from labkit.notebook.live.render_process import SESSION_NICENESS
from labkit.notebook.live.render_process import Painter
from labkit.notebook.live.render_process import Picture
from labkit.notebook.live.render_process import PictureRequest
from labkit.notebook.live.render_process import paint
from labkit.notebook.plots.run_plot import RunPlot
from labkit.notebook.runs.run import Run
from labkit.records import NO_STEPS
from labkit.records import RECORD
from labkit.records import Batch
from labkit.records import Note
from labkit.timeouts import EMPTY_AFTER_S
from labkit.timeouts import LAST_PICTURE_S

LOOP = """%%dist_train raw
import os, signal, time
layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.001)
for step in range(300):
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    if step == 100 and rank == 0:
        {at_step_100}
"""
LOADED = "import sys; print('matplotlib.figure' in sys.modules)"
PID = (
    "from labkit.notebook.live.render_process import painter; "
    "print(painter()._process.pid)"
)


def loop_until(seen: str) -> str:
    """The loop; it ends once there is this file."""
    loop = LOOP.replace("range(300)", "range(10_000)").format(at_step_100="pass")
    return f"{loop}\n    if os.path.exists({seen!r}): break"


class Painted:
    """A painter in this process."""

    def draw(self, request: PictureRequest, **_: bool) -> Future[Picture]:
        found: Future[Picture] = Future()
        found.set_result(Picture(paint(request, {}) or b"", cpu_s=0.0))
        return found


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        assert kernel.run("%load_ext labkit\n%dist_start -n 2").status == "ok"
        yield kernel


@pytest.mark.release
def test_of_a_run_that_has_ended_no_picture_is_kept(kernel: Kernel) -> None:
    """A session has thousands of them, and the lab keeps each run."""
    loop = LOOP.format(at_step_100="pass")
    assert kernel.run(loop).status == "ok"
    left = kernel.run(
        "import gc\n"
        "from labkit.notebook.execution.cell_execution import CellExecution\n"
        "from labkit.notebook.live.live_view import LiveView\n"
        "from labkit.notebook.live.render_process import Picture\n"
        "gc.collect()\n"
        "kinds = CellExecution, LiveView, Picture\n"
        "print([type(o).__name__ for o in gc.get_objects() if type(o) in kinds])"
    )
    assert left.stdout.strip() == "[]"


@pytest.mark.release
def test_pictures_are_drawn_elsewhere_and_give_way(
    kernel: Kernel, tmp_path: Path
) -> None:
    before = kernel.run(LOADED).stdout  # another file's test may have had it loaded
    # On a busy machine they take their time: the loop ends when three were shown.
    kernel.run(
        "from labkit.notebook.live.live_view import LiveView\n"
        "show, shown = LiveView._show, []\n"
        "def note(view, data):\n"
        "    show(view, data)\n"
        "    shown.append(data)\n"
        f"    if len(shown) == 3: open({str(tmp_path / 'seen')!r}, 'w').close()\n"
        "LiveView._show = note"
    )
    reply = kernel.run(loop_until(str(tmp_path / "seen")))
    kernel.run("LiveView._show = show")
    assert reply.status == "ok"
    pictures = [each["image/png"] for each in [*reply.displays, *reply.updates]]
    assert len(set(pictures)) >= 3
    painter = int(kernel.run(PID).stdout)
    if sys.platform == "linux":
        threads = [each.id for each in psutil.Process(painter).threads()]
        assert os.SCHED_IDLE in map(os.sched_getscheduler, threads)
        # The last picture's, for which the prompt waits.
        assert os.sched_getscheduler(painter) == os.SCHED_OTHER
        group = Path(f"/proc/{painter}/autogroup")  # where the kernel has them
        if group.exists() and os.getsid(painter) == painter:
            assert group.read_text().endswith(f"nice {SESSION_NICENESS}\n")
    else:
        assert psutil.Process(painter).nice() == NICENESS
    assert kernel.run(LOADED).stdout == before


@pytest.mark.parametrize(
    ("since_s", "num_cores", "wait_s"),
    [(1, 2, 5.0), (20, 2, 10.0), (200, 2, 50.0), (200, 64, 5.0)],
)
def test_a_long_run_is_drawn_less_often_where_cores_are_few(
    monkeypatch: pytest.MonkeyPatch, since_s: float, num_cores: int, wait_s: float
) -> None:
    monkeypatch.setattr(live_view, "num_cores", lambda: num_cores)
    monkeypatch.setattr(LiveView, "_show", lambda *_: None)
    view = LiveView(make_run({0: [3.0], 1: [3.0]}))
    view._asked_at = view._began + since_s
    view._picture = Future()
    view._picture.set_result(Picture(b"", cpu_s=1.0))
    view._take_picture()
    assert view._next_draw == pytest.approx(view._asked_at + wait_s)


def test_a_run_that_has_taken_no_step_is_seen_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[bytes] = []
    monkeypatch.setattr(live_view, "painter", Painted)
    monkeypatch.setattr(live_view, "is_notebook", lambda: True)
    monkeypatch.setattr(LiveView, "_show", lambda view, data: shown.append(data))
    view = LiveView(run := make_run({0: [], 1: []}))
    view._next_draw = 0.0
    view.tick()
    assert view._picture is None  # it has just begun
    view._began -= EMPTY_AFTER_S
    view.tick()
    view.tick()
    view.tick()
    assert len(shown) == 1
    assert view._picture is None  # nothing new
    run.state = "finished"
    view.close()
    assert NO_RECORDS in capsys.readouterr().err


def test_a_run_without_steps_has_one_note_that_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = LiveView(run := make_run({0: [], 1: []}))
    run.state = "finished"
    run.collector.add_report(0, Note(NO_STEPS))
    view.close()
    assert not capsys.readouterr().err


def test_a_run_without_records_is_not_shown_and_it_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run({0: [], 1: []})
    run.state = "lost"
    show(run)
    assert "is lost and has no records: there is nothing to plot" in (
        capsys.readouterr().err
    )


def test_a_run_that_has_a_profile_is_not_said_to_show_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Run, "has_profile", True)
    view = LiveView(run := make_run({0: [], 1: []}))
    run.state = "finished"
    view.close()
    assert NO_RECORDS not in capsys.readouterr().err


@pytest.mark.long
def test_a_painter_that_dies_is_replaced(kernel: Kernel) -> None:
    pid = int(kernel.run(PID).stdout)
    reply = kernel.run(LOOP.format(at_step_100=f"os.kill({pid}, 9)"))
    assert (reply.status, reply.stderr) == ("ok", "")
    assert int(kernel.run(PID).stdout) != pid
    kernel.run("import labkit, base64; figure = labkit.current_lab().runs[-1].plot()")
    drawn_here = kernel.run("print(base64.b64encode(figure._repr_png_()).decode())")
    last = [*reply.displays, *reply.updates][-1]
    assert last["image/png"].strip() == drawn_here.stdout.strip()


def test_it_keeps_no_figure_of_a_run_that_has_ended() -> None:
    plots: dict[int, RunPlot] = {}
    for _ in range(3):
        run = make_run({0: [3.0, 2.0], 1: [3.0, 2.0]})
        view = LiveView(run)
        paint(view._request(), plots)
        run.collector.restart(1, 0.5)  # which another figure is made for
        paint(view._request(), plots)
        assert len(plots) == 1
        view._restart_painting()  # as for the last picture
        assert paint(replace(view._request(), is_final=True), plots)
        assert not plots


@pytest.mark.release
def test_it_keeps_no_records_of_a_run_that_has_ended() -> None:
    painter = Painter()
    process = psutil.Process(painter._process.pid)

    def draw_last(num_steps: int) -> None:
        run = make_run({0: [1.0], 1: [1.0]})
        records = np.ones(num_steps, RECORD)
        records["metric"], records["step"] = 0, np.arange(num_steps)
        for rank in (0, 1):
            run.collector.add(rank, Batch(1, ["loss"], records))
        request = replace(LiveView(run)._request(), is_final=True)
        assert painter.draw(request, is_last=True).result(60).png

    try:
        draw_last(10)
        before = process.memory_info().rss
        draw_last(10**6)  # 65 MiB of records
        wait_until(
            lambda: process.memory_info().rss < before + 50 * 2**20,
            60,
            "it keeps records",
        )
    finally:
        painter.close()


@pytest.mark.long
def test_a_picture_that_failed_does_not_take_the_last_one_away(
    kernel: Kernel, tmp_path: Path
) -> None:
    seen = str(tmp_path / "seen")
    kernel.run(
        "from labkit.notebook.live.live_view import LiveView\n"
        "take = LiveView._take_picture\n"
        "def fail(view):\n"
        f"    open({seen!r}, 'w').close()\n"
        "    raise OSError('no way')\n"
        "LiveView._take_picture = fail"
    )
    reply = kernel.run(loop_until(seen))
    kernel.run("LiveView._take_picture = take")
    assert reply.stderr == "labkit: the live picture stopped: OSError('no way')\n"
    assert [set(each) for each in reply.displays] == [{"image/png", "text/plain"}]


@pytest.mark.release
def test_the_last_picture_does_not_wait_for_a_painter_without_a_core(
    kernel: Kernel,
) -> None:
    pid = int(kernel.run(PID).stdout)
    began = time.monotonic()
    reply = kernel.run(LOOP.format(at_step_100=f"os.kill({pid}, signal.SIGSTOP)"))
    seconds = time.monotonic() - began
    os.kill(pid, signal.SIGCONT)
    assert reply.status == "ok"
    assert reply.displays
    assert seconds < 30.0 + LAST_PICTURE_S  # of 3 s, on a machine that is not busy
