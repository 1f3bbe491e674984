"""The widget's messages, as a front end takes them, and what it leaves behind."""

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels import Kernel

from labkit import Lab
from labkit.notebook.history.collector import Collector
from labkit.notebook.history.curves import MEMORY
from labkit.notebook.history.thinning import MAX_POINTS
from labkit.notebook.live.live_view import LiveView
from labkit.notebook.live.widget_frames import Frame
from labkit.notebook.live.widget_frames import FrameEncoder
from labkit.notebook.live.widget_view import WidgetView
from labkit.notebook.live.widget_view import find_view
from labkit.notebook.live.widget_view import read_static
from labkit.records import NOTICED_LOSS
from labkit.records import RECORD
from labkit.records import Batch

pytestmark = pytest.mark.timeout(120)

WIDGET = "application/vnd.jupyter.widget-view+json"
Points = list[tuple[float, float]]


class FrontEnd:
    """What run_view.js does with frames: the points of each rank and series."""

    def __init__(self) -> None:
        self.sequence: int | None = None
        self.points: dict[tuple[int, str], Points] = {}

    def take_keyframe(self, header: dict[str, Any], values: Any) -> None:
        if header["sequence"] != self.sequence:
            self.points = {}
            self._append(header, values)

    def take_delta(self, header: dict[str, Any], values: Any) -> bool:
        """False where a frame before it is missing."""
        if self.sequence is None or header["sequence"] > self.sequence + 1:
            return False
        if header["sequence"] == self.sequence + 1:
            self._append(header, values)
        return True

    def _append(self, header: dict[str, Any], values: Any) -> None:
        numbers = np.frombuffer(values, "<f8")
        assert len(numbers) == 2 * sum(count for _, _, count in header["series"])
        for rank, name, count in header["series"]:
            steps, column = numbers[: 2 * count].reshape(2, count).tolist()
            numbers = numbers[2 * count :]
            points = self.points.setdefault((rank, name), [])
            points += zip(steps, column, strict=True)
        self.sequence = header["sequence"]


class Rank:
    """Sends batches of (metric, step, value) to a collector."""

    def __init__(self, collector: Collector, rank: int) -> None:
        self.collector = collector
        self.rank = rank
        self.names: list[str] = []
        self.num_sent = 0

    def send(self, *logged: tuple[str, int, float]) -> None:
        self.names = list(dict.fromkeys([*self.names, *(name for name, *_ in logged)]))
        rows = [
            (self.names.index(name), step, float(step), step * 2**20, value)
            for name, step, value in logged
        ]
        records = np.array(rows, dtype=RECORD)
        self.collector.add(self.rank, Batch(self.num_sent, self.names, records))
        self.num_sent += len(records)


@pytest.fixture
def collector() -> Collector:
    return Collector([0, 1])


@pytest.fixture
def ranks(collector: Collector) -> list[Rank]:
    return [Rank(collector, rank) for rank in collector.ranks]


def points_of(collector: Collector) -> dict[tuple[int, str], Points]:
    """What a front end should have, by the collector's own reading."""
    found = {}
    for rank in collector.ranks:
        records = collector.records(rank)
        if len(records):
            mib = records["memory_bytes"] / 2**20
            found[rank, MEMORY] = pairs(records["step"], mib)
        for name in {"loss", *collector.metrics(rank)} - {NOTICED_LOSS, "samples"}:
            series = collector.series(rank, name)
            if len(series):
                found[rank, name] = pairs(series["step"], series["value"])
    return found


def pairs(steps: Sequence[float], values: Sequence[float]) -> Points:
    return list(zip(map(float, steps), map(float, values), strict=True))


def delta_of(encoder: FrameEncoder) -> Frame:
    delta = encoder.delta()
    assert delta is not None
    return delta


# ---- frames ----


def test_a_keyframe_and_deltas_rebuild_what_the_collector_has(
    collector: Collector, ranks: list[Rank]
) -> None:
    encoder, front_end = FrameEncoder(collector), FrontEnd()
    ranks[0].send(("loss", 1, 2.5), ("loss", 2, 1 / 3))
    encoder.delta()
    front_end.take_keyframe(*encoder.keyframe())
    assert front_end.points == points_of(collector)
    for step in range(3, 9):
        ranks[step % 2].send(("loss", step, 1 / step), ("accuracy", step, 0.1 * step))
        if step == 5:
            ranks[1].send(("samples", step, 64.0), ("loss", step, -np.inf))
        assert front_end.take_delta(*delta_of(encoder))
        assert front_end.points == points_of(collector)
    assert {name for _, name in front_end.points} == {"loss", "accuracy", MEMORY}


def test_a_delta_without_news_is_empty(collector: Collector, ranks: list[Rank]) -> None:
    encoder = FrameEncoder(collector)
    ranks[0].send(("loss", 1, 2.5))
    assert delta_of(encoder)[0]["series"]
    header, values = delta_of(encoder)
    assert header["series"] == []
    assert values == b""


def test_a_gap_is_seen_and_mended_by_the_next_keyframe(
    collector: Collector, ranks: list[Rank]
) -> None:
    encoder, front_end = FrameEncoder(collector), FrontEnd()
    ranks[0].send(("loss", 1, 1.0))
    assert not front_end.take_delta(*delta_of(encoder))  # before any keyframe
    front_end.take_keyframe(*encoder.keyframe())
    ranks[0].send(("loss", 2, 2.0))
    encoder.delta()  # lost
    for step in (3, 4):
        ranks[0].send(("loss", step, 3.0))
        assert not front_end.take_delta(*delta_of(encoder))
    front_end.take_keyframe(*encoder.keyframe())
    assert front_end.points == points_of(collector)
    ranks[1].send(("loss", 5, 5.0))
    assert front_end.take_delta(*delta_of(encoder))
    assert front_end.points == points_of(collector)


def test_a_keyframe_holds_what_the_deltas_sent_and_no_more(
    collector: Collector, ranks: list[Rank]
) -> None:
    """Else the next delta would tell it again."""
    encoder, front_end = FrameEncoder(collector), FrontEnd()
    ranks[0].send(("loss", 1, 1.0))
    encoder.delta()
    ranks[0].send(("loss", 2, 2.0))
    front_end.take_keyframe(*encoder.keyframe())
    assert front_end.points[0, "loss"] == [(1.0, 1.0)]
    assert front_end.take_delta(*delta_of(encoder))
    assert front_end.points == points_of(collector)


def test_a_long_series_is_thinned_in_keyframes_and_keeps_its_peak(
    collector: Collector, ranks: list[Rank]
) -> None:
    encoder, front_end = FrameEncoder(collector), FrontEnd()
    num_steps = 20 * MAX_POINTS
    ranks[0].send(
        *(("loss", step, 9.0 if step == 777 else 1.0) for step in range(num_steps))
    )
    encoder.delta()
    front_end.take_keyframe(*encoder.keyframe())
    points = front_end.points[0, "loss"]
    assert len(points) <= MAX_POINTS
    assert (777.0, 9.0) in points
    assert points[-1] == (num_steps - 1.0, 1.0)


def test_a_loss_that_the_cell_logs_late_replaces_the_noticed_one(
    collector: Collector, ranks: list[Rank]
) -> None:
    encoder, front_end = FrameEncoder(collector), FrontEnd()
    ranks[0].send((NOTICED_LOSS, 1, 1.0))
    encoder.delta()
    front_end.take_keyframe(*encoder.keyframe())
    assert front_end.points[0, "loss"] == [(1.0, 1.0)]
    ranks[0].send((NOTICED_LOSS, 2, 1.0), ("loss", 2, 7.0))
    assert encoder.delta() is None
    front_end.take_keyframe(*encoder.keyframe())
    assert front_end.points[0, "loss"] == [(2.0, 7.0)]
    assert front_end.points == points_of(collector)


# ---- which view ----


def test_live_names_the_view() -> None:
    assert find_view(True) is LiveView
    assert find_view("image") is LiveView
    assert find_view("widget") is WidgetView
    assert find_view(False) is None


def test_an_unknown_view_is_explained_and_nothing_runs(lab: Lab) -> None:
    num_runs = len(lab.runs)
    message = "live is 'movie'; choose one of: image, widget; or False for none"
    with pytest.raises(ValueError, match=message):
        lab.train("raw", "1", live="movie")
    assert len(lab.runs) == num_runs


def test_without_the_extra_the_option_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "anywidget":
            raise ImportError(name + " is not installed here")

sys.meta_path.insert(0, Blocker())
from labkit.notebook.live.widget_view import find_view

assert find_view("image")
try:
    find_view("widget")
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert 'install it with pip install "labkit[widget]"' in done.stdout, done.stderr


# ---- in a kernel ----


LOOP = """%%dist_train raw --live widget {options}
import time
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step in range({num_steps}):
    model(torch.ones(1, 1)).sum().square().backward()
    optimizer.step()
    log(accuracy=step / 1000 + rank)
    time.sleep(0.01)
{then}
"""


class Listener:
    """Takes what a kernel sends to a widget's front end."""

    def __init__(self) -> None:
        self.front_end = FrontEnd()
        self.num_deltas = 0
        self.num_missed = 0
        self.titles: list[str] = []
        self.open: set[str] = set()
        self.num_bytes: dict[str, int] = {}
        """Of the last value of each of the widget's traits."""

    def __call__(self, message: dict[str, Any]) -> None:
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "comm_open":
            self.open.add(content["comm_id"])
        elif kind == "comm_close":
            self.open.discard(content["comm_id"])
        if kind not in ("comm_open", "comm_msg"):
            return
        data, buffers = content["data"], message["buffers"]
        state = data.get("state", {})
        if "keyframe" in state:
            values = {name: len(json.dumps(value)) for name, value in state.items()}
            self.num_bytes |= values | {"buffer": len(buffers[0])}
        if "series" in state.get("keyframe", {}):
            assert data["buffer_paths"] == [["keyframe", "values"]]
            header = state["keyframe"]
            self.front_end.take_keyframe(header, buffers[0])
        elif data.get("method") == "custom":
            header = data["content"]
            self.num_deltas += 1
            self.num_missed += not self.front_end.take_delta(header, buffers[0])
        else:
            return
        self.titles.append(header["title"])


def test_a_run_is_a_widget_and_then_a_picture(kernel: Kernel) -> None:
    listener = Listener()
    code = LOOP.format(options="--name seen", num_steps=400, then="")
    reply = kernel.run(code, on_message=listener)
    assert reply.status == "ok"
    assert reply.stderr == ""
    [shown] = reply.displays
    assert set(shown) == {WIDGET, "text/plain"}
    [picture] = reply.updates
    assert set(picture) == {"image/png", "text/plain"}
    assert shown["text/plain"] == picture["text/plain"]
    assert listener.open == set()
    assert sum(listener.num_bytes.values()) < 2000  # some save this as well
    assert listener.num_deltas >= 3
    assert listener.num_missed == 0
    assert all(title.startswith("seen: raw on 2 ranks") for title in listener.titles)
    kernel.run("import labkit\nhistory = labkit.current_lab().runs[-1].history")
    by_rank = "history.groupby('rank')['loss'].agg(list).to_dict()"
    losses = ast.literal_eval(kernel.run(by_rank).result["text/plain"])
    for rank in (0, 1):
        points = listener.front_end.points[rank, "loss"]
        assert [step for step, _ in points] == [*range(1, len(points) + 1)]
        assert [value for _, value in points] == losses[rank][: len(points)]
        assert len(points) > 50


@pytest.mark.parametrize("ending", ["1 / 0", "raise KeyboardInterrupt"])
def test_a_run_that_fails_leaves_a_picture_as_well(kernel: Kernel, ending: str) -> None:
    listener = Listener()
    code = LOOP.format(options="", num_steps=100, then=ending)
    reply = kernel.run(code, on_message=listener)
    assert reply.status == "error"
    assert [set(data) for data in reply.displays] == [{WIDGET, "text/plain"}]
    assert set(reply.updates[-1]) == {"image/png", "text/plain"}
    assert listener.open == set()


def test_a_widget_that_cannot_be_sent_to_does_not_end_the_run(kernel: Kernel) -> None:
    kernel.run(
        "from labkit.notebook.live.widget_frames import FrameEncoder\n"
        "whole = FrameEncoder.delta\n"
        "def delta(encoder):\n"
        "    if encoder._sequence:\n"
        "        raise OSError('no way')\n"
        "    return whole(encoder)\n"
        "FrameEncoder.delta = delta"
    )
    reply = kernel.run(LOOP.format(options="", num_steps=200, then=""))
    kernel.run("FrameEncoder.delta = whole")
    assert reply.status == "ok"
    assert reply.stderr == "labkit: the live picture stopped: OSError('no way')\n"
    assert set(reply.updates[-1]) == {"image/png", "text/plain"}


def test_what_is_shown_is_text_and_no_html() -> None:
    source = read_static("run_view.js")
    assert "textContent" in source
    assert not [word for word in ("innerHTML", "insertAdjacentHTML") if word in source]
