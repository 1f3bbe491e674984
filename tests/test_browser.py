"""labkit in JupyterLab and a real browser, as a newcomer meets it."""

import base64
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from browsers import LabServer
from browsers import NotebookPage
from browsers import find_browser
from kernels import write_notebook
from playwright.sync_api import Browser
from playwright.sync_api import expect
from playwright.sync_api import sync_playwright

pytestmark = pytest.mark.timeout(300)

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NOTEBOOK = "02_train_with_data_parallelism.ipynb"
ALL_CELLS_MS = 240_000
CELLS = nbformat.read(NOTEBOOKS / NOTEBOOK, as_version=4).cells
RUNS = [i for i, cell in enumerate(CELLS) if cell.source.startswith("%%dist_train")]
"""The cells of the notebook that train."""
FIRST_LOOK = RUNS[0]
MEANT_TO_FAIL = [
    i
    for i, cell in enumerate(CELLS)
    if "raises-exception" in cell.metadata.get("tags", [])
]


def verdict() -> tuple[int, str]:
    """A cell that says that weights agree, and how."""
    for index, cell in enumerate(CELLS):
        for output in cell.get("outputs", []):
            if "agree" in output.get("text", ""):
                return index, output.text.splitlines()[-1]
    raise AssertionError("the notebook has no verdict")


AGREE, AGREEMENT = verdict()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no chromium here; `make browser` installs it where apt-get can")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LabServer]:
    server = LabServer(tmp_path_factory.mktemp("server"), NOTEBOOKS)
    try:
        yield server
    finally:
        server.close()


# ---- the first notebook that trains ----


@pytest.fixture(scope="module")
def first_notebook(browser: Browser, server: LabServer) -> Iterator[NotebookPage]:
    """Notebook 02 after Run All Cells."""
    page = NotebookPage(browser, server, NOTEBOOK)
    page.watch_pictures()
    page.run_all()
    try:
        page.wait_for_pictures(FIRST_LOOK, 1)
        page.screenshot("notebook-02-running", FIRST_LOOK)
        page.wait_until_idle(ALL_CELLS_MS)
    finally:
        page.screenshot("notebook-02-ran", FIRST_LOOK)
    yield page
    page.close()


@pytest.mark.release
def test_the_last_picture_of_every_run_stays(first_notebook: NotebookPage) -> None:
    for index in RUNS:
        shown = first_notebook.picture(index)
        assert shown == first_notebook.pictures_seen(index)[-1]


@pytest.mark.release
def test_a_saved_notebook_reads_the_same_when_it_is_opened_again(
    first_notebook: NotebookPage, browser: Browser, server: LabServer
) -> None:
    pictures = {index: first_notebook.picture(index) for index in RUNS}
    saved = first_notebook.save()
    failed = [
        index
        for index, cell in enumerate(saved.cells)
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    ]
    assert failed == MEANT_TO_FAIL
    for index, picture in pictures.items():
        [output] = [
            output
            for output in saved.cells[index].outputs
            if output.output_type == "display_data"
        ]
        assert base64.b64decode(output.data["image/png"]) == picture

    server.end_kernels()
    again = NotebookPage(browser, server, NOTEBOOK)
    assert {index: again.picture(index) for index in RUNS} == pictures
    expect(again.output(AGREE)).to_contain_text(AGREEMENT)
    again.screenshot("notebook-02-opened-again", FIRST_LOOK)
    again.close()


# ---- stopping and reloading ----

ENDLESS = """%%dist_train raw --name endless
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.001)
while True:
    weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()"""


def training_until(file: Path, options: str) -> str:
    """A cell that trains until `file` exists."""
    return f"""%%dist_train raw {options}
from pathlib import Path
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.001)
while not Path({str(file)!r}).exists():
    weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that ends the third run of `own_notebook`."""
    return tmp_path_factory.mktemp("runs") / "told"


@pytest.fixture(scope="module")
def own_notebook(
    browser: Browser, server: LabServer, told: Path
) -> Iterator[NotebookPage]:
    """A notebook with a lab, none of whose other cells has run."""
    cells = [
        "%load_ext labkit\n%dist_start -n 2",
        ENDLESS,
        "%%dist\ndist.barrier()\nprint('all', world_size, 'are here')",
        training_until(told, "--name long"),
        "import labkit\nrun = labkit.current_lab().runs[-1]\ndisplay(run)\nrun.plot()",
    ]
    write_notebook(server.notebooks / "own.ipynb", cells)
    page = NotebookPage(browser, server, "own.ipynb")
    page.watch_pictures()
    page.run(0)
    page.wait_until_idle()
    yield page
    page.close()
    server.end_kernels()


@pytest.mark.long
def test_the_stop_button_ends_a_run_and_the_next_cell_works(
    own_notebook: NotebookPage,
) -> None:
    page = own_notebook
    page.run(1)
    page.wait_for_pictures(1, 3)
    expect(page.cell(1)).to_contain_text("[*]")
    page.screenshot("stop-running")
    page.press_stop()
    page.wait_until_idle()
    expect(page.output(1)).to_contain_text("Interrupted; every rank keeps its")
    assert page.picture(1) == page.pictures_seen(1)[-1]
    page.run(2)
    expect(page.output(2)).to_contain_text("all 2 are here")
    page.wait_until_idle()
    page.screenshot("stop-stopped")


@pytest.mark.release
def test_a_run_continues_while_the_page_is_reloaded(
    own_notebook: NotebookPage, server: LabServer, told: Path
) -> None:
    page = own_notebook
    page.run(3)
    page.wait_for_pictures(3, 1)
    page.reload()
    page.screenshot("reload-running")
    states = [each["execution_state"] for each in server.ask("GET", "api/kernels")]
    assert states.count("busy") == 1
    told.touch()
    page.wait_until_idle()
    page.run(4)
    expect(page.output(4)).to_contain_text("<Run 'long': raw on 2 ranks, finished")
    assert page.picture(4)
    page.screenshot("reload-found-again", 4)


@pytest.mark.release
def test_a_run_in_the_background_is_found_again_after_a_reload(
    browser: Browser, server: LabServer, tmp_path: Path
) -> None:
    cells = [
        "%load_ext labkit\n%dist_start -n 2",
        training_until(tmp_path / "told", "--name long --background"),
        "%dist_show long",
    ]
    write_notebook(server.notebooks / "background.ipynb", cells)
    page = NotebookPage(browser, server, "background.ipynb")
    page.watch_pictures()
    page.run(0)
    page.wait_until_idle()
    page.run(1)
    page.wait_for_pictures(1, 2)
    page.wait_until_idle()
    page.screenshot("background-running")
    page.reload()
    page.wait_until_idle()
    page.watch_pictures()
    page.run(2)
    page.wait_for_pictures(2, 3)
    page.screenshot("background-found-again")
    (tmp_path / "told").touch()
    page.wait_until_idle()
    assert page.picture(2) == page.pictures_seen(2)[-1]
    page.screenshot("background-finished")
    page.close()
    server.end_kernels()


# ---- a profile ----

PERFETTO = """<script>
addEventListener("message", event => {
  if (event.data === "PING") event.source.postMessage("PONG", "*");
  else window.trace = [...new Uint8Array(event.data.perfetto.buffer)];
});
</script>"""
"""What Perfetto's page does, as it documents: there is no network here."""
PROFILED = """%%dist_train raw --profile 2-4
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.001)
for _ in range(6):
    weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()"""


@pytest.mark.release
def test_a_profile_opens_in_perfetto_by_a_button(
    browser: Browser, server: LabServer
) -> None:
    runs = "import os\nos.environ['LABKIT_RUNS'] = 'runs'  # where JupyterLab serves it"
    cells = [f"{runs}\n%load_ext labkit\n%dist_start -n 2", PROFILED]
    write_notebook(server.notebooks / "profile.ipynb", cells)
    page = NotebookPage(browser, server, "profile.ipynb")
    for index in range(len(cells)):
        page.run(index)
    page.wait_until_idle(ALL_CELLS_MS)
    expect(page.output(1)).to_contain_text("(raw): steps 2-4")
    page.screenshot("profile", 1)
    trace = page.open_from(1, "Open in Perfetto", "https://ui.perfetto.dev/", PERFETTO)
    *_, path = sorted(server.notebooks.glob("runs/*/profile/all-ranks.trace.json.gz"))
    assert trace == path.read_bytes()
    page.close()
    server.end_kernels()
