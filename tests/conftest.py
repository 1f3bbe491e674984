"""One real cluster of two ranks, shared by the tests that need no other."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import notebook_reruns
import pytest
from kernels import Kernel
from kernels import running_kernel

from labkit import Lab
from labkit import timeouts

ENGINE_FIXTURES = {
    *("lab", "shared_lab", "own_lab", "lab_of_3", "lab_of_4"),
    *("kernel", "other", "server", "browser", "terminal"),
}
# Few tests, and long ones: a worker that took one of these last would end alone.
FIRST = [
    "test_browser.py",
    "test_front_ends.py",
    "test_endings.py",
    "test_fork_server.py",
    "test_widget_in_browser.py",
    "test_painter.py",
]
NOTEBOOKS = ("00", "02")
"""In `make test`."""
LONG_NOTEBOOKS = ("14",)
"""In `make test-long`; the others are run before a release."""
ON_HOSTS = "17"
"""The notebook that tests/hosts/test_notebook.py runs."""
NOTEBOOK_S = 600
"""For a cell, and where it runs again for all before it; nbval ends a cell sooner."""
STARTERS = {"Lab", "Popen", "run_python", "running_kernel", "subprocess", "throw_all"}


def pytest_configure(config: pytest.Config) -> None:
    # By itself a hook of this file is called for tests of this folder alone.
    config.pluginmanager.register(notebook_reruns)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts engines, kernels or other programs: `make check` runs the rest;
    and the notebooks that are not in `make test`.

    They are known by the fixtures that a test uses, and by the names in it.
    """
    import torch  # which the process that deals tests out to workers does without

    # Workers and ranks share the cores: threads of each would wait for those of others.
    torch.set_num_threads(1)
    for item in items:
        code = getattr(getattr(item, "function", None), "__code__", None)
        fixtures = set(getattr(item, "fixturenames", ()))
        if code is None or fixtures & ENGINE_FIXTURES or STARTERS & {*code.co_names}:
            item.add_marker("engine")
        number = item.path.name[:2]
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.timeout(NOTEBOOK_S))
            if number == ON_HOSTS:
                item.add_marker("hosts")
                continue
            if number not in NOTEBOOKS:
                item.add_marker("long" if number in LONG_NOTEBOOKS else "release")
    # `--no-loadscope-reorder` leaves this order: the costly files first.
    engine_tests = Counter(item.path for item in items if "engine" in item.keywords)
    items.sort(key=lambda item: (item.path.name not in FIRST, -engine_tests[item.path]))


@pytest.fixture(scope="session")
def shared_lab() -> Iterator[Lab]:
    with Lab(num_ranks=2, group_timeout_s=30) as lab:
        # A rank collects garbage after every run, and would look at all that the
        # libraries have made: most of the time that so short a run takes.
        lab.run(
            "from labkit.compat.deepspeed import load\n"
            "load()\n"
            "from labkit.rank.group.recovery import freeze_libraries\n"
            "freeze_libraries()"
        )
        yield lab


@pytest.fixture
def lab(shared_lab: Lab) -> Lab:
    """A lab whose ranks are alive and whose group works, whatever ran before."""
    try:
        shared_lab.restart()
    except RuntimeError:  # one test's failure is not to be that of all after it
        shared_lab.restart(everyone=True)
    return shared_lab


@pytest.fixture(scope="session")
def shared_kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit")
        module = f"__import__('sys').modules['{timeouts.__name__}']"
        kernel.run(f"{module}.FOLD_S = {timeouts.FOLD_S}")
        yield kernel


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Kernel:
    """A kernel with a lab of two ranks, whatever ran before."""
    if shared_kernel.run("%dist_start -n 2").status != "ok":  # as a run goes on
        shared_kernel.run("%dist_stop")
        assert shared_kernel.run("%dist_start -n 2").status == "ok"
    return shared_kernel


@pytest.fixture
def runs_folder(kernel: Kernel, tmp_path: Path) -> Iterator[Path]:
    """Where the kernel keeps its runs, until the test is over."""
    kernel.run("import os\nbefore = os.environ.pop('LABKIT_RUNS', None)")
    kernel.run(f"os.environ['LABKIT_RUNS'] = {str(tmp_path)!r}")
    yield tmp_path
    kernel.run("del os.environ['LABKIT_RUNS']")
    kernel.run("if before is not None: os.environ['LABKIT_RUNS'] = before")


@pytest.fixture
def shared_data() -> Path:
    """The folder with real data beside the project; skips where there is none."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no shared/data folder beside this checkout")
    return folder
