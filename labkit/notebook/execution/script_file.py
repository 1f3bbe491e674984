"""Reads a script for `torchrun` that ranks are to run, and checks it before they do."""

import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from labkit.checks import absolute
from labkit.checks import check_flag
from labkit.checks import is_int
from labkit.checks import is_number
from labkit.checks import short_repr
from labkit.notebook.kernel.output import working_directory
from labkit.records import ScriptSpec

_LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "python", "python3"}


def read_script(
    script: str | os.PathLike[str], arguments: Sequence[object], *, module: bool
) -> ScriptSpec:
    """The script as it is now; ValueError, in words, for one that cannot run.

    With `module` it is named as `python -m` takes it. Nothing is imported.
    """
    check_flag("module", module)
    if not isinstance(script, str | os.PathLike) or not str(script):
        raise ValueError(f"script is {short_repr(script)}; it must name a file")
    words = _words(arguments)
    directory = working_directory()
    if str(script) in _LAUNCHERS:
        raise ValueError(
            f"{script} starts processes, and here the lab's ranks run the script: "
            "leave it out, with its options, and begin with the script's file"
        )
    if module:
        file = _file_of_module(str(script), directory)
        import_folder = directory or str(file.parent)
        argv = [str(file), *words]
    else:
        file = _checked_file(script)
        # Of a symbolic link Python takes the folder of what it leads to.
        import_folder, argv = str(file.resolve().parent), [str(script), *words]
    return ScriptSpec(
        str(file),
        _source(file),
        argv,
        import_folder,
        directory,
        module=str(script) if module else "",
    )


def _words(arguments: Sequence[object]) -> list[str]:
    """Arguments as a process gets them."""
    is_list = isinstance(arguments, Sequence) and not isinstance(arguments, str | bytes)
    if not is_list:
        raise ValueError(
            f"arguments is {short_repr(arguments)}; give a list, for example "
            '["--epochs", "2"]'
        )
    for each in arguments:
        is_text = isinstance(each, str | os.PathLike)
        if not (is_text or is_int(each) or is_number(each)) or "\0" in str(each):
            raise ValueError(
                f"{short_repr(each)} cannot be an argument of a script; give text or "
                "numbers"
            )
    return [str(each) for each in arguments]


def _checked_file(script: str | os.PathLike[str]) -> Path:
    file = absolute(script)
    if file.is_dir():
        raise ValueError(f"{file} is a folder; name the script in it, such as train.py")
    if not file.is_file():
        raise ValueError(
            f"there is no file {file}; give its path from the notebook's folder, and "
            "labkit's options before it"
        )
    if file.suffix == ".ipynb":
        raise ValueError(
            f"{file.name} is a notebook: open it, and run its cells with %%dist_train"
        )
    return file


def _file_of_module(name: str, directory: str | None) -> Path:
    """Where a module would be imported from, found without importing its packages."""
    path = None if directory is None else [directory, *sys.path]
    found: importlib.machinery.ModuleSpec | None = None
    whole = ""
    for part in name.split("."):
        whole = f"{whole}.{part}" if whole else part
        # Not by the whole name: folders without __init__.py are then to be imported.
        found = importlib.machinery.PathFinder.find_spec(part, path)
        if found is None and part == "__main__" and whole != part:
            raise ValueError(
                f"{whole.removesuffix('.__main__')} is a package without a "
                "__main__.py: name a module in it, such as package.train"
            )
        if found is None:
            raise ValueError(
                f"there is no module {whole!r}; as for python -m, it is looked for in "
                f"the notebook's folder, {directory}, and where packages are installed"
            )
        if (
            found.origin is None
        ):  # a package without __init__.py: any folder of its name
            folders = [Path(each, part) for each in path or sys.path]
            path = [str(each) for each in folders if each.is_dir()]
        else:
            path = list(found.submodule_search_locations or [])
    assert found is not None
    if found.submodule_search_locations is not None:
        return _file_of_module(f"{name}.__main__", directory)
    if found.origin is None or not Path(found.origin).suffix == ".py":
        raise ValueError(f"{name} is not written in Python, and cannot run as a script")
    return Path(found.origin)


def _source(file: Path) -> str:
    try:
        source = importlib.util.decode_source(file.read_bytes())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(file), "exec", dont_inherit=True)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        shown = f": {error.text.strip()}" if error.text else ""
        raise ValueError(f"{file}{line}: {error.msg}{shown}") from None
    except (UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{file} is not Python: {error}") from None
    return source
