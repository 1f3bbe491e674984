"""The files that describe the environment, and the links between files."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from lower_bounds import lower_bounds
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import labkit

ROOT = Path(__file__).parents[1]
# Written in two parts: this file is searched as well.
ELSEWHERE = ["/" + "work/", "/" + "tmp/bash", "/" + "root/"]
LOCK = [
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]
LINK = re.compile(r"""\]\(\s*<?([^)\s>]+)|(?:src|href)=["']([^"']+)""")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def conda() -> list[Any]:
    """The dependencies in environment.yml."""
    return yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]


def requirements(project: dict[str, Any]) -> list[Requirement]:
    extras = project["project"]["optional-dependencies"].values()
    lines = [
        *project["project"]["dependencies"],
        *(x for extra in extras for x in extra),
    ]
    return [Requirement(line) for line in lines]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions() -> list[tuple[str, str]]:
    return [(name, version) for name, _, version in (x.partition("==") for x in LOCK)]


def config_files() -> list[Path]:
    """What could name a version: all but code, prose and what is built."""
    patterns = ("*", ".ci/*", ".github/**/*", "benchmarks/*")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return [path for path in paths if path.is_file() and path.suffix != ".md"]


# ---- the environment ----


def test_conda_installs_the_project_itself_with_an_extra_that_exists(
    project: dict[str, Any], conda: list[Any]
) -> None:
    [pip] = [each["pip"] for each in conda if isinstance(each, dict)]
    locked, installed = pip
    assert locked == "-c constraints.txt"
    match = re.fullmatch(r"-e \.\[([\w,]+)\]", installed)
    assert match, f"{installed!r} is not this project with extras"
    assert set(match[1].split(",")) <= set(project["project"]["optional-dependencies"])


def test_conda_adds_nothing_but_python_and_pip(conda: list[Any]) -> None:
    names = [re.split(r"[<>=! ]", each)[0] for each in conda if isinstance(each, str)]
    assert sorted(names) == ["pip", "python"], "versions live elsewhere"


def test_python_versions_agree(project: dict[str, Any], conda: list[Any]) -> None:
    [python] = [x for x in conda if isinstance(x, str) and x.startswith("python")]
    required = SpecifierSet(project["project"]["requires-python"])
    assert SpecifierSet(python.removeprefix("python")) == required
    [lowest] = [Version(each.version) for each in required if each.operator == ">="]
    short = f"{lowest.major}.{lowest.minor}"
    tools = project["tool"]
    assert tools["ruff"]["target-version"] == f"py{lowest.major}{lowest.minor}"
    assert tools["mypy"]["python_version"] == short
    assert f"({lowest.major}, {lowest.minor})" in (ROOT / "Makefile").read_text()


def test_torch_has_one_version_in_one_place() -> None:
    pins = [
        f"{path.name}: {line.strip()}"
        for path in config_files()
        for line in path.read_text().splitlines()
        if re.search(r"\btorch\s*==", line)
    ]
    assert len(pins) == 1, pins
    assert re.fullmatch(r"constraints\.txt: torch==\d+\.\d+\.\d+", pins[0])


def test_the_lock_has_plain_versions_only() -> None:
    """No paths, registries or local versions, which other machines have not."""
    assert [line for line in LOCK if not re.fullmatch(r"[\w.-]+==[\w.!]+", line)] == []


def test_the_lock_is_within_the_ranges(project: dict[str, Any]) -> None:
    locked = {canonical(name): version for name, version in locked_versions()}
    extras = project["project"]["optional-dependencies"]
    lines = [*project["project"]["dependencies"]]
    lines += [
        x
        for name in ("tensorboard", "tune", "widget", "test", "docs")
        for x in extras[name]
    ]
    ranges = [each for each in map(Requirement, lines) if each.name != "labkit"]
    wrong = [
        f"{each} with {locked.get(canonical(each.name), 'nothing')} in the lock"
        for each in ranges
        if not each.specifier.contains(locked.get(canonical(each.name), "0"))
    ]
    assert wrong == [], "run make lock"


def test_libraries_with_private_names_end_below_their_next_major(
    project: dict[str, Any],
) -> None:
    ends = {
        each.name: [x.version for x in each.specifier if x.operator == "<"]
        for each in map(Requirement, project["project"]["dependencies"])
    }
    for name in ("deepspeed", "ipykernel", "ipyparallel", "ipython", "torch"):
        assert ends[name], f"{name} has no upper bound"


def test_every_lower_bound_is_tested(project: dict[str, Any]) -> None:
    bounds = lower_bounds()
    for each in map(Requirement, project["project"]["dependencies"]):
        assert each.specifier.contains(bounds[each.name]), (
            f"{each} has no lowest version"
        )


@pytest.mark.skipif(
    Path(sys.prefix).name != ".venv", reason="make test has the lock, others need not"
)
def test_what_is_installed_here_is_the_lock(project: dict[str, Any]) -> None:
    names = [Requirement(line).name for line in project["project"]["dependencies"]]
    locked = {canonical(name): version for name, version in locked_versions()}
    # The local part, as +cpu, tells builds of one version apart.
    found = {name: Version(metadata.version(name)).public for name in names}
    assert found == {name: locked[canonical(name)] for name in names}


def test_every_third_party_import_of_the_package_is_a_dependency(
    project: dict[str, Any],
) -> None:
    imported = set()
    for path in (ROOT / "labkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).split(".")[0])
    package_of = {
        "PIL": "pillow",
        "sklearn": "scikit-learn",
        "IPython": "ipython",
        "zmq": "pyzmq",
    }
    extras = project["project"]["optional-dependencies"]
    lines = [
        *project["project"]["dependencies"],
        *extras["tensorboard"],
        *extras["tune"],
        *extras["widget"],
    ]
    declared = {Requirement(line).name.lower() for line in lines}
    needed = {
        package_of.get(name, name).lower()
        for name in imported - set(sys.stdlib_module_names) - {"labkit"}
    }
    assert needed <= declared, f"not declared: {sorted(needed - declared)}"


# ---- the version ----


def test_the_version_is_a_version() -> None:
    assert str(Version(labkit.__version__)) == labkit.__version__


def test_the_version_is_written_in_one_place(project: dict[str, Any]) -> None:
    assert "version" not in project["project"]
    attribute = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "labkit.__version__"


# ---- files that name files ----


@pytest.mark.parametrize(
    "name",
    ["README.md", "README.zh-CN.md", "CHANGELOG.md", "notebooks/README.md"]
    + [
        path.relative_to(ROOT).as_posix()
        for folder in ("", "howto/", "reference/", "about/")
        for path in ROOT.glob(f"docs/{folder}*.md")
    ],
)
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    links = [a or b for a, b in LINK.findall(page.read_text())]
    relative = [each for each in links if not re.match(r"[a-z]+:|#|//", each)]
    paths = [page.parent / each.split("#")[0] for each in relative]
    assert [path for path in paths if not path.exists()] == []


def test_make_lab_serves_all_that_the_notebooks_link_to() -> None:
    """JupyterLab has nothing from outside of the folder that it serves."""
    # Within `make test` it would say at the end which folder it leaves.
    recipe = ["make", "--no-print-directory", "-n", "-o", ".venv/installed", "lab"]
    done = subprocess.run(recipe, cwd=ROOT, capture_output=True, text=True, check=True)
    served = (ROOT / done.stdout.split()[-1]).resolve()
    for page in [*(ROOT / "notebooks").glob("*.ipynb"), ROOT / "notebooks/README.md"]:
        for link, _ in LINK.findall(page.read_text()):
            path = (page.parent / link.split("#")[0]).resolve()
            assert "://" in link or path.is_relative_to(served), f"{page.name}: {link}"


@pytest.mark.parametrize("folder", ["labkit", "tests", "notebooks"])
def test_no_file_names_a_path_of_the_machine_it_was_written_on(folder: str) -> None:
    wrong = []
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in {".py", ".ipynb", ".md", ".txt", ".toml", ".csv"}:
            text = path.read_text()
            wrong += [f"{path.name}: {each}" for each in ELSEWHERE if each in text]
    assert wrong == []
