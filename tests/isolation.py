"""Programs that a test starts: with settings of their own, and found again by them."""

import os
from pathlib import Path

import psutil

MARK = "LABKIT_TEST"


def own_environment(folder: Path) -> dict[str, str]:
    """An environment in which settings, histories and runs are kept in `folder`.

    Every process started in it, by whomever, is found by `processes_of(folder)`.
    """
    return os.environ | {
        MARK: str(folder),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "LABKIT_RUNS": str(folder / "runs"),
    }


def processes_of(folder: Path) -> list[psutil.Process]:
    """What runs in the environment of this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(MARK) == str(folder)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone, or another user's
    return found
