"""Where checkpoints of steps are kept: read by the notebook, too, and without torch."""

import re
from pathlib import Path

MANIFEST = "checkpoint.json"
"""In a checkpoint's folder: what there is. It is written last."""

_STEP = re.compile(r"step-(\d{8,})")


def step_folder(directory: Path, step: int) -> Path:
    """Name the folder of a step's checkpoint.

    Parameters
    ----------
    directory : Path
        Where the checkpoints of a run are.
    step : int
        The number of optimizer steps taken.

    Returns
    -------
    Path
        As `directory / "step-00000100"`.
    """
    return Path(directory) / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The optimizer step of a checkpoint that `step_folder` named."""
    match = _STEP.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def all_in(directory: Path) -> list[Path]:
    """Find the checkpoints of steps.

    Parameters
    ----------
    directory : Path
        Where they are, as `step_folder` names them.

    Returns
    -------
    list of Path
        Newest last.
    """
    if not Path(directory).is_dir():
        return []
    found = [
        folder
        for folder in Path(directory).iterdir()
        if _STEP.fullmatch(folder.name) and (folder / MANIFEST).is_file()
    ]
    return sorted(found, key=step_of)


def last_in(directory: Path) -> Path | None:
    """Find the newest checkpoint of a step.

    Parameters
    ----------
    directory : Path
        Where they are, as `step_folder` names them.

    Returns
    -------
    Path or None
        None where there is none.
    """
    found = all_in(directory)
    return found[-1] if found else None
