"""Says that a C++ extension is being compiled, as DeepSpeed and torch do on demand."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit.compat.torch import wrap_build

_MODULE = "torch.utils.cpp_extension"


class Announcer:
    """Waits, in `sys.meta_path`, until torch's module for extensions is imported.

    To import it now would take half a second, and few cells ever need it.
    """

    def find_spec(self, name: str, *args: Any) -> ModuleSpec | None:
        """The module's own spec, which announces what it builds."""
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            announce_builds(module)

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


def announce_builds(module: Any) -> None:
    """Have `torch.utils.cpp_extension` say what it compiles."""

    def announcing(build: Callable[..., None]) -> Callable[..., None]:
        def announced(*, name: str, build_directory: str, **more: Any) -> None:
            if not Path(build_directory, name + module.LIB_EXT).exists():
                print(
                    f"labkit: compiling the C++ extension {name}, which may take a "
                    f"minute; the next time it is found in {build_directory}",
                    file=sys.stderr,
                    flush=True,
                )
            build(name=name, build_directory=build_directory, **more)

        return announced

    wrap_build(module, announcing)


def announce() -> None:
    """Have this process say when it compiles a C++ extension."""
    if _MODULE in sys.modules:
        announce_builds(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, Announcer())
