"""A notebook's cell that fails runs again after the cells before it.

pytest-rerunfailures sets a test's file up again, which for a notebook is a new kernel:
without this, the cell would find nothing there, and so would all cells after it.
"""

from collections.abc import Iterator

import pytest
from nbval.plugin import IPyNbCell


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    again = isinstance(item, IPyNbCell) and getattr(item, "execution_count", 1) > 1
    if again:
        notebook = item.parent
        notebook.teardown()  # the kernel that it leaves would keep its ranks
        notebook.timed_out = False
    yield
    if again:
        cells = [each for each in item.session.items if each.parent is notebook]
        for cell in cells[: cells.index(item)]:
            if not cell.options["skip"]:
                cell.runtest()
