"""Runs of tests, and of notebooks under nbval, go to a folder of their own. A test
that is run again has a limit again, and how it failed is shown."""

import os
import shutil
import tempfile

import nbval.kernel
import pytest
import pytest_timeout
from kernels import LocalKernelManager

from labkit import timeouts


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.mkdtemp(prefix="labkit-runs-")
    os.environ["LABKIT_RUNS"] = folder
    # Ranks that print the same do so at the same time only where cores are free for
    # them; a rank that has trained alone also collects garbage first.
    timeouts.FOLD_S = 5.0
    nbval.kernel.KernelManager = LocalKernelManager
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """With `--reruns`: a test that is run again has its limit again. The plugin sets it
    once, and a hang that was ended by it would be waited for without an end."""
    if getattr(item, "execution_count", 1) > 1:
        settings = pytest_timeout._get_item_settings(item)
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With `--reruns`: what failed and was run again, and how it failed."""
    again = terminalreporter.getreports("rerun")
    if again:
        terminalreporter.section("failed, and run again")
    for report in again:
        terminalreporter.write_line(f"{report.nodeid} ({report.when})", bold=True)
        terminalreporter.write_line(report.longreprtext)
