"""One real cluster of two ranks, shared by the tests that need no other."""

import gc
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import notebook_reruns
import pytest
from kernels import Kernel
from kernels import running_kernel

from labkit import Lab
from labkit import timeouts

ENGINE_FIXTURES = {
    *("lab", "shared_lab", "own_lab", "lab_of_3", "lab_of_4"),
    *("kernel", "second", "other", "server", "browser", "terminal"),
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
TOGETHER = {
    **dict.fromkeys(["test_widget.py", "test_background.py"], "test_magics.py"),
    "test_parallel_trials.py": "test_pipeline.py",
}
"""Files for the worker that has another one, as they use its kernel or its 4 ranks."""
NOTEBOOKS = ("00",)
"""In `make test`."""
LONG_NOTEBOOKS = ("02", "14")
"""In `make test-long`; the others are run before a release."""
ON_HOSTS = "17"
"""The notebook that tests/hosts/test_notebook.py runs."""
NOTEBOOK_S = 600
"""For a cell, and where it runs again for all before it; nbval ends a cell sooner."""
FREEZE = """
import gc
from labkit.rank.group.recovery import freeze_libraries
if len(gc.get_objects()) > 20_000: freeze_libraries()
"""
"""A rank collects garbage after every run, and would look at all that libraries have
made which were imported since, as torch's compiler: most of the time that so short a
run takes."""
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
    gc.freeze()  # thousands of tests, which no collection need look at


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, files that belong together as if they were one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder, slash, name = super()._split_scope(nodeid).rpartition("/")
            return folder + slash + TOGETHER.get(name, name)

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def shared_lab() -> Iterator[Lab]:
    with Lab(num_ranks=2, group_timeout_s=30) as lab:
        lab.run("from labkit.compat.deepspeed import load\nload();")
        yield lab


_uses = count()


@pytest.fixture
def lab(shared_lab: Lab) -> Lab:
    """A lab whose ranks are alive and whose group works, whatever ran before."""
    try:
        shared_lab.restart()
    except RuntimeError:  # one test's failure is not to be that of all after it
        shared_lab.restart(everyone=True)
    if next(_uses) % 4 == 0:
        shared_lab.run(FREEZE)
    return shared_lab


@pytest.fixture(scope="session")
def shared_lab_of_4() -> Iterator[Lab]:
    with Lab(num_ranks=4, group_timeout_s=30) as lab:
        yield lab


@pytest.fixture
def lab_of_4(shared_lab_of_4: Lab) -> Lab:
    """It works, as `lab` does. A file that uses it belongs in `TOGETHER`."""
    shared_lab_of_4.restart()
    return shared_lab_of_4


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
