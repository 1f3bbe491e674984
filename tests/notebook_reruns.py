"""How nbval runs a notebook's cells here.

A cell that fails runs again after the cells before it: pytest-rerunfailures sets a
test's file up again, which for a notebook is a new kernel, and without this the cell
would find nothing there, as would all cells after it.
"""

from collections.abc import Iterator
from copy import deepcopy

import nbval.plugin
import pytest
from nbval.plugin import IPyNbCell
from nbval.plugin import IPyNbFile

from labkit import timeouts

START_S = 60
"""For a kernel to import labkit, on cores that are busy."""


def pytest_configure(config: pytest.Config) -> None:
    # nbval merges a cell's saved streams in place: when the cell runs again, what it
    # is compared with would be another text.
    merge = nbval.plugin.coalesce_streams
    nbval.plugin.coalesce_streams = lambda outputs: merge(deepcopy(outputs))
    config.add_cleanup(lambda: setattr(nbval.plugin, "coalesce_streams", merge))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    if not isinstance(item, IPyNbCell):
        return (yield)
    notebook = item.parent
    again = getattr(item, "execution_count", 1) > 1
    if again:
        notebook.teardown()  # the kernel that it leaves would keep its ranks
        notebook.timed_out = False
    former = notebook.kernel
    yield
    if notebook.kernel is not former:
        _wait_for_all_ranks(notebook)
    if again:
        cells = [each for each in item.session.items if each.parent is notebook]
        for cell in cells[: cells.index(item)]:
            if not cell.options["skip"]:
                cell.runtest()


def _wait_for_all_ranks(notebook: IPyNbFile) -> None:
    """Let ranks be as far apart as busy cores make them: the saved outputs have all
    ranks' in order."""
    kernel = notebook.kernel
    asked = kernel.kc.execute(
        f"import labkit.timeouts\nlabkit.timeouts.FOLD_S = {timeouts.FOLD_S}",
        silent=True,
    )
    kernel.await_reply(asked, timeout=START_S)
    kernel.await_idle(asked, timeout=START_S)
