"""The file of a script: written whole, and over no other unless that is asked for."""

import os
from pathlib import Path

from labkit.checks import absolute
from labkit.checks import check_flag


def check_script_file(path: str | os.PathLike[str], *, force: bool) -> Path:
    """The file of a script; ValueError where it cannot be written."""
    check_flag("force", force)
    file = absolute(path)
    if file.is_dir() or not file.parent.is_dir():
        what = "it is a folder" if file.is_dir() else f"there is no {file.parent}"
        raise ValueError(f"{file}: {what}; name a file, as train.py")
    if file.exists() and not force:
        raise ValueError(
            f"{file} is there already; name another file, or add --force (force=True) "
            "to replace it"
        )
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{file.parent} cannot be written to; name another folder")
    return file


def write_script(file: Path, text: str) -> None:
    """Write it whole, or not at all."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
