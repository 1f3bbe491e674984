"""An interactive lab for distributed training in JupyterLab."""

from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from labkit.lab import Lab as Lab
    from labkit.magics.current import current_lab as current_lab
    from labkit.magics.current import tune as tune
    from labkit.notebook.execution.errors import RankError as RankError
    from labkit.notebook.runs.catalog import delete_runs as delete_runs
    from labkit.notebook.runs.catalog import list_runs as list_runs
    from labkit.notebook.runs.catalog import load_run as load_run
    from labkit.notebook.runs.run import Run as Run
    from labkit.notebook.tuning.study import Study as Study
    from labkit.notebook.tuning.study import load_study as load_study
    from labkit.selftest import check as check

__version__ = "0.1.0"

# Names are loaded when first used, so that `import labkit` stays cheap.
_HOMES = {
    "Lab": "labkit.lab",
    "check": "labkit.selftest",
    "current_lab": "labkit.magics.current",
    "RankError": "labkit.notebook.execution.errors",
    "Run": "labkit.notebook.runs.run",
    "Study": "labkit.notebook.tuning.study",
    "delete_runs": "labkit.notebook.runs.catalog",
    "list_runs": "labkit.notebook.runs.catalog",
    "load_run": "labkit.notebook.runs.catalog",
    "load_study": "labkit.notebook.tuning.study",
    "tune": "labkit.magics.current",
}
__all__ = [*_HOMES, "__version__", "load_ipython_extension"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Register the magics; IPython calls this on `%load_ext labkit`.

    Parameters
    ----------
    shell : InteractiveShell
        IPython's own.
    """
    from labkit.magics.completion import complete
    from labkit.magics.help_of_ranks import add_help_of_ranks
    from labkit.magics.lab_magics import LabMagics
    from labkit.magics.line import magic_below
    from labkit.magics.name_hint import hint_at_ranks

    shell.register_magics(LabMagics)
    for name in LabMagics.magics["cell"]:
        # What IPython makes of "%%dist" where that is not the first line.
        shell.register_magic_function(magic_below(name), "line", f"%{name}")
    if complete not in shell.Completer.custom_matchers:  # by an earlier %load_ext
        shell.Completer.custom_matchers.append(complete)
    add_help_of_ranks(shell)
    shell.events.register("post_run_cell", hint_at_ranks)
