"""A wheel of labkit is whole, and works where the tree is not."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.engine  # pip, and a Python of its own
USE = """
import sys
import labkit
assert labkit.__file__.startswith(sys.prefix), labkit.__file__
assert "torch" not in sys.modules
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "labkit")
magics = shell.magics_manager.magics
assert "dist_start" in magics["line"] and "dist_train" in magics["cell"]
shell.run_line_magic("dist_runs", "")
print("works")
"""


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: setuptools leaves its own files in the tree that it builds.
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "labkit", tree / "labkit", ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", folder]
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", tree, folder=folder)
    [found] = folder.glob("*.whl")
    return found


def test_a_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    files = [path for path in (ROOT / "labkit").rglob("*") if path.is_file()]
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if "__pycache__" not in path.parts
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected


@pytest.mark.long
def test_a_wheel_works_in_an_environment_of_its_own(
    wheel: Path, tmp_path: Path
) -> None:
    """Its dependencies are those installed here: to install them takes minutes."""
    run(sys.executable, "-m", "venv", "--without-pip", "env", folder=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    [site] = (tmp_path / "env" / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", site]
    run(*pip, "--no-deps", "--no-index", wheel, folder=tmp_path)
    # A path file in a folder that one names is not read: labkit's own is not found.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    assert run(python, "-I", "-c", USE, folder=tmp_path).endswith("works\n")
