"""A file that takes the place of another at once."""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write what is to be in the file `target`: beside it, so that other
    processes read the file of before, or the new one, and never a part of one.

    It is `target` itself where that is no regular file, has another name as well, or
    may not be replaced. A link stays a link, and a file keeps its mode. A mount that
    replaces no files, or sets no modes, has it written over.
    """
    path = Path(os.path.realpath(target))
    mode = path.stat().st_mode if path.exists() else None
    if not _may_be_replaced(path, mode):
        yield Path(target)
        return
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        written = Path(folder) / Path(target).name  # which torch.save writes into it
        yield written
        try:
            if mode is not None:
                written.chmod(stat.S_IMODE(mode))
            written.replace(path)
        except OSError:
            shutil.copyfile(written, path)


def _may_be_replaced(path: Path, mode: int | None) -> bool:
    is_file = mode is None or (
        stat.S_ISREG(mode) and path.stat().st_nlink < 2 and os.access(path, os.W_OK)
    )
    return is_file and os.access(path.parent, os.W_OK)
