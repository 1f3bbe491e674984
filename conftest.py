"""Runs of tests, and of notebooks under nbval, go to a folder of their own."""

import os
import shutil
import tempfile

import nbval.kernel
import pytest
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With `--reruns`: what failed and was run again, and how it failed."""
    again = terminalreporter.getreports("rerun")
    if again:
        terminalreporter.section("failed, and run again")
    for report in again:
        terminalreporter.write_line(f"{report.nodeid} ({report.when})", bold=True)
        terminalreporter.write_line(report.longreprtext)
