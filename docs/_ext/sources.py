"""What pages take from elsewhere in the repository: notebooks, files, help texts.

A page says `{{ [FILE](PATH) }}` for a file of the repository, which is a link where the
page is read as it is, `<!-- {{ magics }} -->` for the magics with their arguments, and
`{{ cell functions }}` for the functions of a cell. A link that leads somewhere in the
repository does so here.
"""

import inspect
import json
import os
import re
import shutil
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import NumpyDocstring

from labkit.compat.ipython import options_of
from labkit.magics.lab_magics import LabMagics
from labkit.rank.training.cell_checkpoints import Checkpoints
from labkit.rank.training.session import TRAINING_NAMES
from labkit.rank.training.session import Session

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
NOTEBOOKS = DOCS / "notebooks"
PAGES = {  # of files outside of this folder
    ROOT / "README.md": DOCS / "index.md",
    ROOT / "README.zh-CN.md": DOCS / "index.md",
    ROOT / "CHANGELOG.md": DOCS / "about/changelog.md",
    ROOT / "CONTRIBUTING.md": DOCS / "about/architecture.md",
    ROOT / "SECURITY.md": DOCS / "about/security.md",
    ROOT / "benchmarks/README.md": DOCS / "about/benchmarks.md",
    ROOT / "notebooks/README.md": NOTEBOOKS / "index.md",
}
LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
PLACE = re.compile(
    r"^(?:<!-- )?\{\{ (?:\[(.+)\]\(.+\)|(.+)) \}\}(?: -->)?$", re.MULTILINE
)


def repository() -> str | None:
    """The address of the repository, where pyproject.toml has one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address = project.get("urls", {}).get("Repository")
    return address and address.rstrip("/")


REPOSITORY = repository()


def copy_notebooks() -> None:
    """Have the notebooks, their page and their pictures in this folder."""
    found = [path for path in (ROOT / "notebooks").glob("*.*") if path.is_file()]
    copies = {PAGES.get(path, NOTEBOOKS / path.name): path for path in found}
    NOTEBOOKS.mkdir(exist_ok=True)
    for stale in set(NOTEBOOKS.iterdir()) - copies.keys():
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    for copy, path in copies.items():
        content = path.read_bytes()
        if path.suffix == ".ipynb":
            content = with_alternatives(json.loads(content))
        if not copy.exists() or copy.read_bytes() != content:
            copy.write_bytes(content)


def with_alternatives(notebook: dict[str, Any]) -> bytes:
    """The notebook with words for every picture: myst-nb takes them from its cell."""
    for cell in notebook["cells"]:
        outputs = cell.get("outputs", [])
        for output in (each for each in outputs if "image/png" in each.get("data", {})):
            words = "".join(output["data"].get("text/plain", ""))
            if re.match(r"<\w*Figure ", words):  # which says its size alone
                words = "what is drawn by " + "".join(cell["source"]).splitlines()[-1]
            told = output["metadata"].get("image/png", {})
            alt = told.get("alt", words.strip("<>"))
            cell["metadata"].setdefault("mystnb", {"image": {"alt": alt}})
    return json.dumps(notebook).encode()


def relinked(text: str, origin: Path, page: Path) -> str:
    """A file's text with links that lead from `page` where they led from the file."""

    def link(match: re.Match[str]) -> str:
        words, path, anchor = match[1], match[2], match[3] or ""
        target = Path(os.path.normpath(origin.parent / path))
        if ":" in path:
            return match[0]
        if not target.exists():
            return words if target.suffix == ".ipynb" else match[0]
        if target not in PAGES and not target.is_relative_to(DOCS):
            if target.parent != ROOT / "notebooks":
                return outside(words, target)
            target = NOTEBOOKS / target.name
        found = os.path.relpath(PAGES.get(target, target), page.parent)
        return f"[{words}]({found}{anchor})"

    return LINK.sub(link, text)


def outside(words: str, target: Path) -> str:
    """A link to a file that is no page."""
    if REPOSITORY is None:
        return words
    return f"[{words}]({REPOSITORY}/blob/main/{target.relative_to(ROOT).as_posix()})"


def read_source(app: Sphinx, docname: str, content: list[str]) -> None:
    """Fill in a page's places, and mend its links."""
    page = Path(app.env.doc2path(docname))
    origin = ROOT / page.relative_to(DOCS) if page.parent == NOTEBOOKS else page
    if page.name == "index.md" and page.parent == NOTEBOOKS:
        origin = ROOT / "notebooks/README.md"

    def fill(match: re.Match[str]) -> str:
        if match[2] == "magics":
            return "\n".join(magics())
        if match[2] == "cell functions":
            return "\n".join(cell_functions(app))
        path = ROOT / match[1]
        app.env.note_dependency(str(path))
        return relinked(path.read_text(), path, page)

    if page.suffix != ".rst":
        content[0] = relinked(content[0], origin, page)
    if docname == "notebooks/index":
        content[0] += "\n```{toctree}\n:hidden:\n:glob:\n[0-9]*\n```\n"
    if page.suffix != ".ipynb":
        content[0] = PLACE.sub(fill, content[0])


def generated(app: Sphinx, *_: Any) -> list[str]:
    """Pages that are made from labkit itself, which may have changed."""
    return ["reference/magics", "reference/api"]


# ---- magics ----


def magics() -> Iterator[str]:
    """Every magic, from its docstring and the help of its arguments."""
    kinds = LabMagics.magics
    for name in dict.fromkeys(each for each in vars(LabMagics)):
        signs = [
            sign
            for sign, kind in (("%", "line"), ("%%", "cell"))
            if name in kinds[kind]
        ]
        if signs:
            yield from magic(name, [sign + name for sign in signs])


def magic(name: str, called: list[str]) -> Iterator[str]:
    """A magic's section."""
    parser = getattr(LabMagics, name).parser
    yield f"({name})="
    yield "## " + " and ".join(f"`{each}`" for each in reversed(called))
    description = parser.description.removeprefix(name)
    yield f"\n{code_words(' '.join(description.split()))}\n"
    usage = " ".join(parser.format_usage().removeprefix("::").split())
    first = usage.split()[0]
    yield "```text"
    for each in reversed(called):
        line = usage.replace(first, each, 1)
        yield textwrap.fill(line, 76, subsequent_indent="    ", break_on_hyphens=False)
    yield "```\n"
    if actions := options_of(parser):
        yield "| | |\n|---|---|"
        for action in actions:
            yield f"| {words_of(action)} | {code_words(action.help % vars(action))} |"
        yield ""


def words_of(action: Any) -> str:
    """How an argument is written: `-n, --num-ranks N`."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest.upper()}`"
    value = "" if action.nargs == 0 else " " + (action.metavar or choices_of(action))
    if action.nargs == "+":
        value += " ..."
    return ", ".join(f"`{each}{value}`" for each in action.option_strings)


def choices_of(action: Any) -> str:
    return "\\|".join(action.choices or [action.dest.upper()])


def code_words(text: str) -> str:
    """A help text in which magics, options and calls are code."""
    marked = re.sub(r"(?<![\w`%-])(%%?dist\w*|--[a-z][\w-]+|\w+\(.*?\))", r"`\1`", text)
    return marked.replace("|", "\\|")


# ---- the functions of a cell ----


def cell_functions(app: Sphinx) -> Iterator[str]:
    """`prepare` and the others, as a cell calls them."""
    functions = {name: getattr(Session, name) for name in TRAINING_NAMES}
    functions |= dict.fromkeys(Checkpoints().names)
    for name, found in functions.items():
        function = found or getattr(Checkpoints, name)
        signature = inspect.signature(function)
        parameters = [
            each.replace(annotation=inspect.Parameter.empty)
            for each in signature.parameters.values()
            if each.name not in ("self", "unnamed")
        ]
        plain = inspect.Signature(parameters)
        yield f".. py:function:: {name}{plain}\n"
        doc = inspect.getdoc(function) or ""
        for line in NumpyDocstring(doc, app.config, app, "function").lines():
            yield f"   {line}".rstrip()
        yield ""


def setup(app: Sphinx) -> dict[str, bool]:
    copy_notebooks()
    app.connect("source-read", read_source)
    app.connect("env-get-outdated", generated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
