"""The notebooks have what a notebook of the course has, and run on four ranks too."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from kernels import LocalKernelManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell
from nbformat.v4 import new_notebook
from nbformat.v4 import new_output

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
START = re.compile(r"%dist_start (-n [23]\b|--launcher ssh --hosts \S+)")
TAKES_S = 600

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path: Path, kind: str) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text())["cells"]
    return [
        {**cell, "source": "".join(cell["source"])}
        for cell in cells
        if cell["cell_type"] == kind
    ]


@each_notebook
def test_it_has_the_frame_of_the_course(path: Path) -> None:
    texts = [cell["source"] for cell in cells_of(path, "markdown")]
    code = cells_of(path, "code")
    for heading in ("What you'll do.", "What you'll learn.", "What you'll need."):
        assert f"**{heading}**" in texts[0]
    assert START.search(code[0]["source"])
    assert code[-1]["source"] == "%dist_stop"
    everything = "\n".join(texts)
    assert "arxiv.org/abs/" in everything, "papers"
    assert "```diff" in everything, "what a script needs more"
    lines = "\n".join(cell["source"] for cell in code)
    assert re.search(r'\bcheck\("\w+"', lines), "an exercise"
    assert re.search(r"\bassert\b|assert_close\(", lines), "what is shown is checked"
    following = re.findall(r"\]\((\d\d_\w+\.ipynb|README.md)\)", texts[-1])
    assert following, "the next notebook"


@each_notebook
def test_its_links_to_other_notebooks_lead_somewhere(path: Path) -> None:
    for cell in cells_of(path, "markdown"):
        for name in re.findall(r"\]\((\d\d_\w+\.ipynb)[^)]*\)", cell["source"]):
            assert (path.parent / name).exists(), name


@each_notebook
def test_it_is_saved_as_it_ran(path: Path) -> None:
    assert path.stat().st_size < 500_000
    counts = [cell["execution_count"] for cell in cells_of(path, "code")]
    assert counts == list(range(1, len(counts) + 1))
    for cell in cells_of(path, "code"):
        has_failed = any(output["output_type"] == "error" for output in cell["outputs"])
        may_fail = "raises-exception" in cell["metadata"].get("tags", [])
        assert has_failed == may_fail, cell["source"]
        words = json.dumps(cell["outputs"])
        assert "slowest" not in words, "run it again on a quiet machine"
        assert "\\r" not in words, "a line that another has overwritten"
        assert not re.search(r"/(home|root|work|Users)/", words), "a machine's path"


@pytest.mark.engine
@pytest.mark.release
@pytest.mark.timeout(TAKES_S + 30)
@each_notebook
def test_it_runs_on_four_ranks(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    start = next(cell for cell in notebook.cells if cell.cell_type == "code")
    start.source = START.sub("%dist_start -n 4", start.source)
    NotebookClient(
        notebook,
        km=LocalKernelManager(kernel_name="python3"),
        timeout=TAKES_S,
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    assert "Ready: 4 ranks" in "".join(output.text for output in start.outputs)


@pytest.mark.long
def test_a_cell_that_fails_runs_again_after_those_before_it(tmp_path: Path) -> None:
    displayed = "print('one')\ndisplay({'a/b': ''}, raw=True)\nprint('two')\n"
    outputs = [
        new_output("stream", name="stdout", text="one\n"),
        new_output("display_data", {"a/b": ""}),
        new_output("stream", name="stdout", text="two\n"),
    ]
    notebook = new_notebook(
        cells=[
            new_code_cell(
                f"ready = True\n{displayed}", outputs=outputs, execution_count=1
            ),
            new_code_cell(
                f"{displayed}with open('tries', 'a') as tries:\n"
                "    tries.write('.')\n"
                "    if tries.tell() < 3:\n"
                "        print('not yet')\n"
                "assert ready",
                outputs=outputs,
                execution_count=2,
            ),
            new_code_cell("assert ready"),
        ]
    )
    nbformat.write(notebook, tmp_path / "once.ipynb")
    tested = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "notebook_reruns", "--nbval"),
            *("--reruns", "2", "-q", "-p", "no:cacheprovider", "once.ipynb"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=TAKES_S,
    )
    assert "3 passed, 2 rerun" in tested.stdout
