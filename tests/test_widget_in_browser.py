"""The widget in a browser: what a user sees, points at and drags."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from kernels import wait_until

from labkit.notebook.history.collector import Collector
from labkit.notebook.live.widget_frames import Frame
from labkit.notebook.live.widget_frames import FrameEncoder
from labkit.notebook.live.widget_view import read_static
from labkit.notebook.plots.style import RANK_COLOURS
from labkit.records import RECORD
from labkit.records import Batch

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing")

pytestmark = pytest.mark.timeout(240)

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SOON_MS = 20_000
START_MS = 90_000
"""For what imports torch, twice, on a machine that may be busy."""

TOKEN = "widget"
CELLS = [
    "%load_ext labkit\n%dist_start -n 2",
    """%%dist_train ddp --live widget
import time
from pathlib import Path
import torch.nn.functional as F
from labkit.data import digits
from labkit.models import mlp
model = mlp()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model, sgd, loader = prepare(model, sgd, digits(), batch_size=64)
is_enough = torch.zeros(1)
while not is_enough:
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        time.sleep(0.005)
    is_enough += Path("enough").exists()
    dist.all_reduce(is_enough)
""",
    "_.history.to_csv('history.csv')",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A page on which no script fails; how it looked at the end is in `tmp_path`."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(SOON_MS)
    errors: list[Any] = []
    page.on("pageerror", lambda error: errors.append(error))
    yield page
    page.screenshot(path=tmp_path / "page.png")
    page.close()
    assert errors == []


# ---- in JupyterLab ----


@pytest.fixture
def lab_url(tmp_path: Path) -> Iterator[str]:
    """JupyterLab on a folder with the notebook of `CELLS`."""
    cells = [
        {
            "cell_type": "code",
            "id": f"cell-{number}",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": source,
        }
        for number, source in enumerate(CELLS)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (tmp_path / "run.ipynb").write_text(json.dumps(notebook))
    own = tmp_path / "jupyter"
    folders = {
        "JUPYTER_CONFIG_DIR": own / "config",
        "JUPYTER_RUNTIME_DIR": own / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": own / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": own / "workspaces",
    }
    environment = {**os.environ, **{name: str(path) for name, path in folders.items()}}
    options = [
        "--no-browser",
        "--allow-root",
        "--port=0",
        f"--IdentityProvider.token={TOKEN}",
        f"--ServerApp.root_dir={tmp_path}",
    ]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        runtime = folders["JUPYTER_RUNTIME_DIR"]
        # The page beside it is written when the server listens.
        wait_until(
            lambda: bool([*runtime.glob("jpserver-*-open.html")]),
            START_MS / 1000,
            "no JupyterLab",
        )
        [info] = runtime.glob("jpserver-*.json")
        url = json.loads(info.read_text())["url"]
        yield f"{url}lab/tree/run.ipynb?token={TOKEN}&reset"
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            for process in psutil.Process(server.pid).children(recursive=True):
                process.kill()
            server.kill()


class Widget:
    """A run's widget on a page, by what a user sees of it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.root = page.locator(".labkit-run")
        self.ranks = page.locator(".labkit-rank")

    def wait_for_epoch(self) -> None:
        """Return when more steps have been drawn, an epoch of them."""
        title = self.page.locator(".labkit-title")
        found = re.search(r"epoch (\d+)", title.inner_text())
        number = int(found[1]) if found else 0
        wanted = re.compile(f"epoch (?!{number}\\b)")
        sync_api.expect(title).to_have_text(wanted, timeout=SOON_MS)

    def wait_for_frame(self) -> None:
        """Return when what is to be drawn has been drawn."""
        self.page.evaluate(
            "new Promise((done) =>"
            " requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def point(self, x: float, y: float = 0.5) -> tuple[float, float]:
        """Where a place in the loss chart, in parts of its size, is on the page."""
        box = self.page.locator(".labkit-run .u-over").first.bounding_box()
        return box["x"] + x * box["width"], box["y"] + y * box["height"]

    def step_at(self, x: float) -> int:
        """The step that the legend tells when the mouse is there."""
        self.page.mouse.move(*self.point(x))
        self.wait_for_frame()
        return int(self.page.inner_text(".labkit-step").removeprefix("step "))

    def told_at(self, x: float) -> tuple[int, list[list[str]]]:
        """A step, and the legend's loss and memory of each rank at it."""
        while True:  # new steps move what is under the mouse
            step = self.step_at(x)
            values = self.values()
            if self.step_at(x) == step:
                return step, values

    def values(self) -> list[list[str]]:
        """The legend: loss and memory of each rank."""
        return self.page.eval_on_selector_all(
            ".labkit-legend tbody tr",
            "rows => rows.map(row => [...row.cells].slice(1).map(c => c.textContent))",
        )

    def num_pixels(self, colour: str) -> int:
        """Pixels of the loss chart that have just this colour."""
        channels = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        return self.page.eval_on_selector(
            ".labkit-run canvas",
            """(canvas, [red, green, blue]) => {
                const { width, height } = canvas;
                const at = canvas.getContext("2d").getImageData(0, 0, width, height);
                const { data } = at;
                let count = 0;
                for (let i = 0; i < data.length; i += 4)
                    count += data[i] == red && data[i+1] == green && data[i+2] == blue;
                return count;
            }""",
            channels,
        )


@pytest.mark.long
def test_a_run_can_be_looked_into_while_it_runs(
    lab_url: str, page: Any, tmp_path: Path
) -> None:
    page.goto(lab_url)
    page.wait_for_selector("text=/ipykernel.*Idle/", timeout=START_MS)
    page.click(".lm-MenuBar-itemLabel:text-is('Run')")
    page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")
    error = "[data-mime-type='application/vnd.jupyter.stderr']"
    page.wait_for_selector(f".labkit-run canvas, {error}", timeout=START_MS)
    assert page.locator(error).all_inner_texts() == []
    widget = Widget(page)
    widget.root.scroll_into_view_if_needed()
    widget.wait_for_epoch()
    widget.wait_for_epoch()  # the first may be the first of all, just begun

    # The mouse tells the values at a step.
    step, told = widget.told_at(0.3)
    assert step > 1

    # A click switches a rank off, and on again.
    orange = RANK_COLOURS[1]
    for is_shown in ("true", "false", "true"):
        assert widget.ranks.nth(1).get_attribute("aria-pressed") == is_shown
        assert (widget.num_pixels(orange) > 0) == (is_shown == "true")
        widget.ranks.nth(1).click()
        widget.wait_for_frame()
    widget.ranks.nth(1).click()

    # A drag zooms, and new steps do not move what is in sight.
    page.mouse.move(*widget.point(0.2))
    page.mouse.down()
    page.mouse.move(*widget.point(0.6), steps=5)
    page.mouse.up()
    first, last = widget.step_at(0.01), widget.step_at(0.99)
    assert 1 < first < last
    widget.wait_for_epoch()
    assert widget.step_at(0.01) == first
    assert widget.step_at(0.99) == last
    page.mouse.dblclick(*widget.point(0.5))
    widget.wait_for_frame()
    assert widget.step_at(0.01) < first
    assert widget.step_at(0.99) > last

    log_scale = page.locator(".labkit-log").first
    log_scale.click()
    widget.wait_for_frame()
    assert log_scale.get_attribute("aria-pressed") == "true"
    assert widget.num_pixels(orange) > 0

    # The picture takes the widget's place.
    (tmp_path / "enough").touch()
    page.wait_for_selector(".jp-OutputArea-output img")
    assert widget.root.count() == 0
    wait_until((tmp_path / "history.csv").exists, 20, "the last cell did not run")

    page.keyboard.press("Control+s")
    wait_until(lambda: "image/png" in str(saved(tmp_path)), 20, "it was not saved")
    notebook = saved(tmp_path)
    outputs = [output for cell in notebook["cells"] for output in cell["outputs"]]
    kinds = [set(output["data"]) for output in outputs if "data" in output]
    assert kinds == [{"image/png", "text/plain"}, {"text/plain"}]
    assert "widgets" not in notebook["metadata"]

    history = pd.read_csv(tmp_path / "history.csv")
    rows = history[history["step"] == step].sort_values("rank")
    losses, memory = zip(*told, strict=True)
    assert [float(x) for x in losses] == pytest.approx(list(rows["loss"]), rel=1e-3)
    kib = list(rows["memory_bytes"] / 2**10)
    assert [float(x) for x in memory] == pytest.approx(kib, rel=1e-2)


def saved(folder: Path) -> dict[str, Any]:
    """The notebook as it was saved; empty while it is written."""
    try:
        return json.loads((folder / "run.ipynb").read_text())
    except json.JSONDecodeError:
        return {}


# ---- by itself ----

BARE_PAGE = """
async ([source, keyframe]) => {
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    const { default: widget } = await import(url);
    const decode = (frame) => {
        const bytes = Uint8Array.from(atob(frame.values), (c) => c.charCodeAt(0));
        return { ...frame, values: new DataView(bytes.buffer) };
    };
    const style = { color: "#0072B2", ls: "-" };
    const state = {
        ranks: [0, 1],
        styles: [style, style],
        log_scale: false,
        keyframe: decode(keyframe),
    };
    const heard = {};
    window.asked = [];
    window.model = {
        get: (name) => state[name],
        on: (event, listener) => (heard[event] = listener),
        off: (event) => delete heard[event],
        send: (message) => window.asked.push(message),
    };
    window.takeDelta = (frame) =>
        heard["msg:custom"](frame, [decode(frame).values]);
    window.takeKeyframe = (frame) => {
        state.keyframe = decode(frame);
        heard["change:keyframe"]();
    };
    window.remove = widget.render({ model, el: document.body });
}
"""


def test_the_front_end_asks_for_a_keyframe_when_it_sees_a_gap(page: Any) -> None:
    collector = Collector([0, 1])
    encoder = FrameEncoder(collector)

    def log(step: int, loss: float, memory: int = 2**20) -> Frame:
        records = np.array([(0, step, 0.0, memory, loss)], dtype=RECORD)
        collector.add(0, Batch(step - 1, ["loss"], records))
        delta = encoder.delta()
        assert delta is not None
        return delta

    def shows(loss: str) -> None:
        page.wait_for_selector(f".labkit-legend td:nth-child(2):text-is('{loss}')")

    log(1, 4.0)
    source = read_static("uplot/uPlot.iife.min.js", "run_view.js")
    page.evaluate(BARE_PAGE, [source, in_text(encoder.keyframe())])
    shows("4")
    page.evaluate(f"takeDelta({in_json(log(2, 3.0))})")
    shows("3")
    log(3, 2.0)  # lost
    page.evaluate(f"takeDelta({in_json(log(4, 1.0))})")
    page.evaluate(f"takeDelta({in_json(log(5, 0.5))})")
    assert page.evaluate("asked") == [{"missed": 4}]
    page.evaluate(f"takeKeyframe({in_json(encoder.keyframe())})")
    shows("0.5")
    page.evaluate(f"takeDelta({in_json(log(6, 0.25))})")
    shows("0.25")

    def shows_memory(value: str, unit: str) -> None:
        page.wait_for_selector(f".labkit-panel-head :text-is('{unit}')")
        page.wait_for_selector(f".labkit-legend th:text-is('{unit}')")
        page.wait_for_selector(f".labkit-legend td:nth-child(3):text-is('{value}')")

    # As the picture at the end has it.
    shows_memory("1024", "memory of tensors (KiB)")
    page.evaluate(f"takeDelta({in_json(log(7, 0.1, memory=3 * 2**30))})")
    shows_memory("3", "memory of tensors (GiB)")
    assert len(page.evaluate("asked")) == 1
    page.evaluate("remove()")
    assert page.locator(".labkit-run").count() == 0


def in_text(frame: Frame) -> dict[str, Any]:
    header, values = frame
    text = base64.b64encode(values).decode()
    status = {"title": "a run", "remarks": "", "num_steps": None}
    return {**header, **status, "values": text}


def in_json(frame: Frame) -> str:
    return json.dumps(in_text(frame))
