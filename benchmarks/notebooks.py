"""Seconds of each notebook, from its kernel's start to its last cell, and its size.

`--write` puts the seconds into the table of notebooks/README.md, and makes links of
the numbers of notebooks in the tables of all READMEs; where pyproject.toml names the
repository under [project.urls], to nbviewer and Colab too. `--no-run` writes links.
"""

import argparse
import os
import re
import tempfile
import time
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
from _measure import print_table
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
TABLES = [ROOT / "README.md", ROOT / "README.zh-CN.md", FOLDER / "README.md"]
NUMBER = r"(?:\[(\d\d)\]\([^)]*\.ipynb\)|\b(\d\d)\b)"
ROW = re.compile(rf"^\| {NUMBER} \|(.*)\|$", re.MULTILINE)
ANSWER = re.compile(rf"(?<=[|dn] ){NUMBER}(?=[ ,])")
"""Of a question: "04, then 06 and 07" in the last column."""
VIEWERS = {
    "nbviewer": "https://nbviewer.org/github",
    "Colab": "https://colab.research.google.com/github",
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("numbers", nargs="*", help="as 00 14; all by default")
    arguments.add_argument("--write", action="store_true")
    arguments.add_argument("--no-run", action="store_true")
    args = arguments.parse_args()
    found = {path.name[:2]: path for path in sorted(FOLDER.glob("*.ipynb"))}
    seconds: dict[str, float] = {}
    if not args.no_run:
        chosen = args.numbers or list(found)
        with tempfile.TemporaryDirectory() as runs:
            os.environ["LABKIT_RUNS"] = runs  # of the kernels, which inherit it
            seconds = {number: run(found[number]) for number in chosen}
        print_table(
            "Notebooks, two ranks: seconds and kB",
            ["notebook", "s", "kB"],
            [
                [found[number].stem, f"{s:.0f}", f"{size_of(found[number]):.0f}"]
                for number, s in seconds.items()
            ],
        )
    if args.write or args.no_run:
        for page in TABLES:
            page.write_text(filled(page, found, seconds))


def run(path: Path) -> float:
    """Run a notebook, without saving it."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}
    )
    began = time.perf_counter()
    client.execute()
    return time.perf_counter() - began


def size_of(path: Path) -> float:
    return path.stat().st_size / 1000


def filled(page: Path, found: dict[str, Path], seconds: dict[str, float]) -> str:
    """The page with a link in each row of a notebook, and its run time."""

    def link(match: re.Match[str]) -> str:
        number = match[1] or match[2]
        if number not in found:
            return match[0]
        return f"[{number}]({found[number].relative_to(page.parent).as_posix()})"

    def row(match: re.Match[str]) -> str:
        number, rest = match[1] or match[2], match[3]
        if number not in found:
            return match[0]
        name = found[number].relative_to(page.parent).as_posix()
        if page.parent == FOLDER:
            *columns, last = rest.split("|")
            measured = re.match(r" *\d+ s", last)
            said = f"{seconds[number]:.0f} s" if number in seconds else ""
            said = said or (measured[0].strip() if measured else "")
            last = " · ".join(each for each in (said, *viewers(found[number])) if each)
            rest = "|".join([*columns, f" {last} " if last else " "])
        return f"| [{number}]({name}) |{rest}|"

    text = page.read_text()
    if page.parent == FOLDER:
        lines = text.split("\n")
        text = "\n".join(
            ANSWER.sub(link, line) if re.match(r"\| [^\d\[]", line) else line
            for line in lines
        )
    return ROW.sub(row, text)


def viewers(path: Path) -> list[str]:
    """Links to a notebook where it can be read or run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = urlsplit(project.get("urls", {}).get("Repository", "")).path.strip("/")
    if not repository:
        return []
    name = path.relative_to(ROOT).as_posix()
    return [
        f"[{viewer}]({address}/{repository}/blob/main/{name})"
        for viewer, address in VIEWERS.items()
    ]


if __name__ == "__main__":
    main()
