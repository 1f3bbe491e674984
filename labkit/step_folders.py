"""Where checkpoints of steps are kept: read by the notebook, too, and without torch."""

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "checkpoint.json"
"""In a checkpoint's folder: what there is. It is written last."""

_TRIED_BYTES = 4096
"""So many are written to see whether a folder can be written to."""
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
    of this kernel's or of another's on this host, or where nothing can be written.

    The folder itself is locked, so that the end of a kernel, however it went, frees it.
    """
    if directory is None:
        yield
        return
    with contextlib.ExitStack() as held:
        with refused(directory):
            is_new = not directory.exists()
            directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(_lock(directory))
            if is_new:
                held.callback(_remove_empty, directory)
            # Only a file shows that a disk is full, or a quota used up.
            with tempfile.NamedTemporaryFile(
                dir=directory, prefix=".labkit-", buffering=0
            ) as file:
                file.write(bytes(_TRIED_BYTES))
                os.fsync(file.fileno())
        yield


@contextlib.contextmanager
def refused(directory: Path) -> Iterator[None]:
    """What cannot be done where checkpoints are to be is a ValueError that says why."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--checkpoint {directory}: nothing can be written there: "
            f"{error.strerror or error}; change that, or name another folder"
        ) from None


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # it is not empty, or gone
        directory.rmdir()


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """The folder is locked, except on a file system without locks."""
    folder = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise ValueError(
            f"--checkpoint {directory}: another run is writing its checkpoints there "
            "now; wait for its end, stop it, or name another folder"
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # there are no locks
            fcntl.flock(folder, fcntl.LOCK_UN)  # a child of the kernel's may have it
        os.close(folder)
