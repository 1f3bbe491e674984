"""The site is built without a warning, is whole, and says what labkit has."""

import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from urllib.parse import urlsplit

import pytest

from labkit.compat.ipython import options_of
from labkit.magics.lab_magics import LabMagics
from labkit.records import TRAINING_NAMES
from labkit.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]  # a program of its own


class Links(HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.alternatives: list[str] = []
        """Of the pictures."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [found[name] or "" for name in ("href", "src") if name in found]
        if found.get("id"):
            self.ids.add(found["id"] or "")
        if tag == "img":
            self.alternatives.append(found.get("alt") or "")


@cache
def links_of(page: Path) -> Links:
    found = Links()
    found.feed(page.read_text())
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("myst_nb")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"]
    done = subprocess.run(
        [*command, "-d", folder / "doctrees", ROOT / "docs", folder / "html"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


@pytest.mark.long
def test_no_link_inside_the_site_is_broken(site: Path) -> None:
    broken = []
    for page in set(site.rglob("*.html")) - set(site.rglob("_static/**/*.html")):
        for link in links_of(page).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            if parts.path.startswith("runs/"):  # a trace, on the machine of the run
                continue
            path = page.parent / unquote(parts.path) if parts.path else page
            is_there = path.exists()
            if is_there and parts.fragment and path.suffix == ".html":
                is_there = unquote(parts.fragment) in links_of(path.resolve()).ids
            if not is_there:
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


@pytest.mark.long
def test_every_notebook_is_a_page(site: Path) -> None:
    for name in NOTEBOOKS:
        assert (site / "notebooks" / name).with_suffix(".html").exists()


@pytest.mark.long
def test_every_picture_is_told_in_words(site: Path) -> None:
    pages = map(links_of, site.glob("*/*.html"))  # not Sphinx's own
    found = [each for page in pages for each in page.alternatives]
    assert len(found) > 100
    assert [each for each in found if len(each) < 10 or each.endswith(".png")] == []


@pytest.mark.long
def test_every_option_of_every_magic_is_on_the_page(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "reference/magics.html").read_text())
    names = {*LabMagics.magics["line"], *LabMagics.magics["cell"]}
    for name in names:
        assert f"%{name}" in text
        for action in options_of(getattr(LabMagics, name).parser):
            for option in action.option_strings:
                assert option in text, (name, option)


def test_every_magic_and_strategy_is_in_the_table_of_its_page() -> None:
    """These pages are read on GitHub too, where nothing is filled in."""
    page = (ROOT / "docs/reference/magics.md").read_text()
    for kind, sign in (("line", "%"), ("cell", "%%")):
        for name in LabMagics.magics[kind]:
            assert re.search(rf"`{sign}{name}\b", page), f"{sign}{name}"
    page = (ROOT / "docs/reference/strategies.md").read_text().replace("`", "")
    for each in STRATEGIES.values():
        assert f"| {each.name} | {each.description} |" in page


@pytest.mark.long
def test_the_functions_of_a_cell_are_in_the_api(site: Path) -> None:
    ids = links_of(site / "reference/api.html").ids
    assert {*TRAINING_NAMES, "save_checkpoint", "labkit.Lab.train"} <= ids
