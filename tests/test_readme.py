"""The READMEs, in both languages, and the page of the notebooks say the same."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
PAGES = {
    path: ROOT / path
    for path in ("README.md", "README.zh-CN.md", "notebooks/README.md")
}
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def headings(text: str) -> list[str]:
    """The depth of each heading, in order."""
    return re.findall(r"^#+(?= )", BLOCK.sub("", text), re.MULTILINE)


def tables(text: str) -> list[int]:
    """The number of columns of each row of a table, in order."""
    rows = [line for line in BLOCK.sub("", text).splitlines() if line.startswith("|")]
    return [len(re.findall(r"(?<!\\)\|", row)) for row in rows]


def figures(text: str) -> list[list[str]]:
    """The numbers in each row of a table, in order."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [re.findall(r"\d+(?:\.\d+)*(?= m?s\b)", row) for row in rows]


def links(text: str) -> list[str]:
    found = [each for each in LINK.findall(text) if not each.startswith("README")]
    return sorted(found)


@pytest.mark.parametrize("part", [headings, BLOCK.findall, tables, figures, links])
def test_the_readmes_have_the_same(part: Callable[[str], object]) -> None:
    assert part(ENGLISH)
    assert part(ENGLISH) == part(CHINESE)


def test_the_readmes_link_to_each_other() -> None:
    assert "README.zh-CN.md" in LINK.findall(ENGLISH)
    assert "README.md" in LINK.findall(CHINESE)


@pytest.mark.parametrize("name", PAGES)
def test_every_notebook_is_in_the_table(name: str) -> None:
    page = PAGES[name]
    found = {Path(link).name for link in LINK.findall(page.read_text())}
    missing = [each for each in NOTEBOOKS if each not in found]
    assert missing == [], "run benchmarks/notebooks.py --no-run"


@pytest.mark.parametrize("name", PAGES)
def test_every_row_of_a_table_of_notebooks_has_one(name: str) -> None:
    rows = re.findall(r"^\| \d\d \|.*", PAGES[name].read_text(), re.MULTILINE)
    assert rows == [], "no such notebook, or run benchmarks/notebooks.py --no-run"


MEASURED = {  # rows of the README's table, and those of the page that they are from
    "start, to a cell that all-reduces": "start to a cell that all-reduces, 2 ranks",
    "a trivial cell on all ranks": "a trivial cell, 2 ranks",
    "one rank raises, the other is in `all_reduce`": (
        "one rank raises, others in all_reduce: to the prompt"
    ),
    "`kill -9` while the other is in `all_reduce`": (
        "`kill -9` of a rank, others in all_reduce: to the prompt"
    ),
    "interrupt inside a collective": "interrupt inside collectives: to the prompt",
}


def columns(text: str, row: str) -> list[str]:
    """The cells of the first row of a table that begins so, without marks."""
    lines = (
        line.strip("|").split("|") for line in text.splitlines() if line[:1] == "|"
    )
    [_, *cells] = next(each for each in lines if each[0].strip() == row)
    return [cell.replace("*", "").strip() for cell in cells]


@pytest.mark.parametrize("row", MEASURED)
def test_the_figures_beside_the_peers_are_those_of_their_page(row: str) -> None:
    page = (ROOT / "docs/about/peers.md").read_text()
    names = columns(page, "")
    measured = dict(zip(names, columns(page, MEASURED[row]), strict=True))
    heads = [each.split()[0].lower() for each in columns(ENGLISH, "")]
    for name, told in zip(heads, columns(ENGLISH, row), strict=True):
        figure = measured[name].split(" (")[0]
        assert told.startswith(figure), name
