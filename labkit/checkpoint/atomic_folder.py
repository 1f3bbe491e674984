"""Checkpoint folders: written in a staging folder, then published by one rename."""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from pathlib import Path
from uuid import uuid4

from labkit.step_folders import MANIFEST
from labkit.step_folders import all_in

FILE_OF_RANK = re.compile(r"rank-\d{5}\.safetensors")
_LOCK = re.compile(r"\..+\.labkit-[0-9a-f]{32}\.lock")
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def prune(directory: Path, keep: int) -> None:
    """Remove all checkpoints of steps but the newest.

    Parameters
    ----------
    directory : Path
        Where they are, as `step_folder` names them.
    keep : int
        How many stay.
    """
    for folder in all_in(directory)[: -keep or None]:
        if not others_in(folder):
            with StagingFolder(folder) as staging:
                # Out of sight at once: a half of it is no checkpoint.
                folder.rename(staging.path / folder.name)


def others_in(folder: Path) -> list[str]:
    """Names of files in `folder` that are not a checkpoint's."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name != MANIFEST and not FILE_OF_RANK.fullmatch(path.name)
    )


class StagingFolder:
    """A hidden folder beside `folder`, in which its next contents are made.

    The process that makes one locks a file beside it, so that others can tell what was
    left behind by one that is gone. A file, open for writing, since NFS keeps the lock
    of a folder from other hosts; and beside, since it is no part of a checkpoint, and
    NFS removes no folder with an open file. Raises ValueError if something else is at
    `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.exists():
            if not folder.is_dir():
                raise ValueError(f"{folder} is a file; choose another name")
            if others := others_in(folder):
                raise ValueError(
                    f"{folder} is there and has other files than a checkpoint's, for "
                    f"example {others[0]}; choose another name"
                )
        self.path = folder.parent / f".{folder.name}.labkit-{uuid4().hex}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent)
        self._lock = -1
        self._make()

    def _make(self) -> None:
        """Make the folder, after its lock, which has its name only when it is locked:
        whoever looks for leftovers would take it for one."""
        lock = _lock_of(self.path)
        unlocked = lock.with_suffix(".new")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._lock = os.open(unlocked, flags, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            except OSError as error:
                # Where nobody can lock a file, nobody takes one for a leftover.
                if error.errno not in _NO_LOCKS:
                    raise
            unlocked.rename(lock)
            self.path.mkdir()
        except BaseException:
            unlocked.unlink(missing_ok=True)
            self.discard()
            raise

    def __enter__(self) -> "StagingFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def publish(self) -> None:
        """Put it in the place of `folder`, which may be there already."""
        _sync(self.path)
        if self.folder.exists():
            exchange(self.path, self.folder)
        else:
            self.path.rename(self.folder)
        _sync(self.folder.parent)
        self.discard()  # what was there before

    def discard(self) -> None:
        """Remove what was not published."""
        _remove(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def exchange(new: Path, old: Path) -> None:
    """Let two folders swap names, at once where the file system can do that."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(new), os.fsencode(old)
    if renameat2 is None or renameat2(
        _AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE
    ):
        # It has no lock, and so nobody takes it for a leftover.
        kept = old.parent / f".{old.name}.labkit-{uuid4().hex}"
        old.rename(kept)
        new.rename(old)
        kept.rename(new)


def remove_leftovers(directory: Path) -> None:
    """Remove staging folders whose processes are gone."""
    for path in directory.iterdir():
        if _LOCK.fullmatch(path.name):
            with contextlib.suppress(OSError):
                lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path.with_suffix(""))
                finally:
                    os.close(lock)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _remove(path: Path) -> None:
    """Remove a staging folder, and then its lock: one that is still there is found
    again."""
    shutil.rmtree(path, ignore_errors=True)
    if not path.exists():
        with contextlib.suppress(OSError):
            _lock_of(path).unlink()


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    os.fsync(opened)
    os.close(opened)
