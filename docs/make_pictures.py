"""Makes docs/live.gif and docs/live.png of a real run, in JupyterLab: `make pictures`.

Rank 1 is killed in mid-run. What is shown is what the browser showed, at the speed at
which it was, but for the line that says what the script has done, and the last frame.
"""

import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from PIL import Image
from PIL import ImageDraw
from PIL import ImageFont
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browsers import LabServer  # noqa: E402
from browsers import NotebookPage  # noqa: E402
from browsers import find_browser  # noqa: E402

TRAIN = """\
import torch.nn.functional as F
from labkit.data import digits
from labkit.models import mlp

model = mlp()
sgd = torch.optim.SGD(model.parameters(), lr=0.02)
fit(model, digits(), F.cross_entropy, optimizer=sgd, batch_size=64, epochs=100)"""
CELLS = [
    "%load_ext labkit\n%dist_start -n 2",
    f"%%dist_train ddp --name undisturbed\n{TRAIN}",
    "import labkit\n"
    "pids = labkit.current_lab().status()['pid']\n"
    "_ = open('pids', 'w').write(' '.join(map(str, pids)))",
    f"%%dist_train ddp --name killed --checkpoint kept --every 200 --elastic\n{TRAIN}",
    "undisturbed, killed = (r.mean_loss()['loss'] for r in labkit.current_lab().runs)\n"
    "print('the same loss at every step:', (undisturbed == killed).all())",
]
TRAINING, COMPARING = 3, 4
KILL_AT_PICTURE = 3
"""After so many pictures of the run."""
FRAME_S = 0.4
LAST_FRAME_S = 5.0
STRIP = 34
"""Pixels below a frame, for the line that says what was done."""
COLOURS = 96


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, jupyterlab(Path(folder)) as page:
        page.watch_pictures()
        for index in range(TRAINING):
            page.run(index)
            page.wait_until_idle()
        frames = film(page)
        frames[0].save(
            ROOT / "docs" / "live.gif",
            save_all=True,
            append_images=frames[1:],
            duration=[int(1000 * FRAME_S)] * (len(frames) - 1)
            + [int(1000 * LAST_FRAME_S)],
            loop=0,
            optimize=True,
        )
        (ROOT / "docs" / "live.png").write_bytes(page.picture(TRAINING))


@contextmanager
def jupyterlab(folder: Path) -> Iterator[NotebookPage]:
    """A page of JupyterLab with the notebook open, none of its cells run."""
    (folder / "source").mkdir()
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(notebook, folder / "source" / "live.ipynb")
    server = LabServer(folder, folder / "source")
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_browser())
            page = NotebookPage(browser, server, "live.ipynb")
            yield page
            page.save()
            page.close()
            server.end_kernels()
            browser.close()
    finally:
        server.close()


def film(page: NotebookPage) -> list[Image.Image]:
    """The run from its first picture to its end, rank 1 killed meanwhile."""
    cell = page.cell(TRAINING)
    page.run(TRAINING)
    page.wait_for_pictures(TRAINING, 1)
    cell.evaluate("cell => cell.scrollIntoView({block: 'start'})")
    frames, words = [], ""
    while page.is_busy():
        began = time.monotonic()
        seen = len(page.pictures_seen(TRAINING))
        frames.append(frame(page, words))
        if not words and seen >= KILL_AT_PICTURE:
            pid = int((page.path.parent / "pids").read_text().split()[1])
            os.kill(pid, signal.SIGKILL)
            words = f"$ kill -9 {pid}    # rank 1"
        time.sleep(max(0.0, FRAME_S - (time.monotonic() - began)))
    frames.append(frame(page, words))
    page.run(COMPARING)
    page.wait_until_idle()
    cell.evaluate("cell => cell.scrollIntoView({block: 'start'})")
    said = page.output(COMPARING).inner_text().strip()
    assert said == "the same loss at every step: True", said
    frames += [frames[-1], frame(page, f"compared with a run without a kill: {said}")]
    return frames


def frame(page: NotebookPage, words: str) -> Image.Image:
    """What the browser shows of the cell, and a line below it."""
    shot = Image.open(io.BytesIO(page.picture_of_page(TRAINING))).convert("RGB")
    whole = Image.new("RGB", (shot.width, shot.height + STRIP), "white")
    whole.paste(shot)
    font = ImageFont.truetype("DejaVuSansMono.ttf", 16)
    ImageDraw.Draw(whole).text((16, shot.height + 6), words, "#B03A00", font)
    return whole.quantize(COLOURS, dither=Image.Dither.NONE)


if __name__ == "__main__":
    main()
