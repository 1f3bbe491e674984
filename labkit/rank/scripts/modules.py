"""A script's own modules: read again for it, and forgotten with it."""

import contextlib
import importlib
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_LIBRARIES = [
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
]
_NEVER = {"__main__", "__mp_main__", "labkit"}


class OwnModules:
    """The modules in a script's folder, in the notebook's, or in one that the script
    has added to `sys.path`.

    Others are libraries, which stay loaded: that is what makes a rank warm.
    """

    def __init__(self, folders: list[str], loaded_before: frozenset[str]) -> None:
        """What an engine itself has loaded is not the user's, wherever it lies."""
        self._folders = [Path(each) for each in folders]
        self._loaded_before = loaded_before
        self._hidden = _names_in(self._folders[0])
        self.ended: list[dict[str, Any]] = []
        """The names in those that were imported for the script, once it has ended."""

    def has_file(self, file: Any) -> bool:
        """Whether a file is in one of the folders, and of no library there."""
        if not isinstance(file, str):
            return False
        path = Path(file)
        return any(path.is_relative_to(each) for each in self._folders) and not any(
            path.is_relative_to(each) for each in _LIBRARIES
        )

    def hides(self, name: str) -> bool:
        """Whether the script's folder has a module of this name, whatever is loaded."""
        return name in self._hidden

    def loaded(self) -> dict[str, ModuleType]:
        """Those that are loaded now; and others by a name that the first folder has."""
        found = {}
        for name, module in list(sys.modules.items()):
            top = name.partition(".")[0]
            if top in _NEVER or name in self._loaded_before or module is None:
                continue
            files = [getattr(module, "__file__", None)]
            with contextlib.suppress(Exception):
                files += list(getattr(module, "__path__", []))
            if any(map(self.has_file, files)) or (
                self.hides(top) and top not in self._loaded_before
            ):
                found[name] = module
        return found

    @contextlib.contextmanager
    def read_again(self) -> Iterator[None]:
        """In this block they are imported from their files, as they are now; after it
        those that were loaded before are back."""
        before = self.loaded()
        self._forget(before)
        path, kept = sys.path[:], dict(sys.modules)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            # Where else a script looks is its own too: another one may look elsewhere
            # for modules of the same names.
            with contextlib.suppress(OSError):  # the working directory was deleted
                added = [each for each in sys.path if each not in path]
                self._folders += [Path(each).absolute() for each in added]
            loaded = self.loaded().items()
            own = {k: each for k, each in loaded if kept.get(k) is not each}
            self.ended = [vars(m) for m in own.values() if hasattr(m, "__dict__")]
            self._forget(own)
            sys.modules.update(before)

    def _forget(self, modules: dict[str, ModuleType]) -> None:
        for name in modules:
            sys.modules.pop(name, None)


def _names_in(folder: Path) -> set[str]:
    """The modules and packages that it has."""
    with contextlib.suppress(OSError):
        return {
            each.stem
            for each in folder.iterdir()
            if each.suffix == ".py" or (each / "__init__.py").is_file()
        }
    return set()
