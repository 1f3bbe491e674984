"""Where checkpoints of steps are kept: read by the notebook, too, and without torch."""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
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


@contextlib.contextmanager
def alone_in(directory: Path | None) -> Iterator[None]:
    """For as long as a run keeps checkpoints there: ValueError where another one does,
    of this kernel's or of another's on this host.

    The folder itself is locked, so that the end of a kernel, however it went, frees it.
    """
    is_new = directory is not None and not directory.exists()
    folder = None if directory is None else _locked(directory)
    try:
        yield
    finally:
        if directory is not None and folder is not None:
            if is_new:
                with contextlib.suppress(OSError):  # it is not empty, or gone
                    directory.rmdir()
            fcntl.flock(folder, fcntl.LOCK_UN)  # a child of the kernel's may have it
            os.close(folder)


def _locked(directory: Path) -> int | None:
    """The folder, open and locked; None where that cannot be, as on a file system
    without locks. Why it cannot be made the ranks say, when they save."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        folder = os.open(directory, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(folder)
        if not isinstance(error, BlockingIOError):
            return None
        raise ValueError(
            f"--checkpoint {directory}: another run is writing its checkpoints there "
            "now; wait for its end, stop it, or name another folder"
        ) from None
    return folder
