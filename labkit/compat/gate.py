"""Says in one line which private names a version of a library lacks."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable
from collections.abc import Iterator
from importlib import metadata
from types import CodeType
from typing import Any
from typing import TypeVar

from labkit.checks import UserError

F = TypeVar("F", bound=Callable[..., Any])


class Gate:
    """The private names of one library, each with the function that relies on it."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.names: dict[str, str] = {}
        """As "module:Class.attribute" -> what it is for."""

    def needs(self, *names: str) -> Callable[[F], F]:
        """Note what a function of a compat module relies on, as "module:Class.name"."""

        def note(function: F) -> F:
            purpose = inspect.cleandoc(function.__doc__ or "").split("\n")[0]
            self.names |= dict.fromkeys(names, purpose.rstrip("."))
            return function

        return note

    def missing(self, *, load: bool = False) -> list[str]:
        """What the installed version lacks, of modules that are loaded or with `load`
        of all, with what each is for."""
        return [
            f"{name.replace(':', '.')} ({purpose})"
            for name, purpose in self.names.items()
            if (load or name.split(":")[0] in sys.modules) and not exists(name)
        ]

    def check(self) -> None:
        """UserError, in one line, if the installed version lacks anything."""
        if missing := self.missing():
            raise UserError(self.complaint("; ".join(missing)))

    @contextlib.contextmanager
    def imports(self) -> Iterator[None]:
        """Turn an ImportError in this block into the line that `check` raises."""
        try:
            yield
        except ImportError as error:
            if error.name is None or error.name.split(".")[0].lower() != self.library:
                raise
            raise UserError(self.complaint(str(error))) from error

    def complaint(self, lacking: str) -> str:
        """The line that says so, and which versions to install."""
        text = f"{self.library} {version_of(self.library)} lacks {lacking}"
        with contextlib.suppress(metadata.PackageNotFoundError, StopIteration):
            wanted = next(
                line.split(";")[0].strip()
                for line in metadata.requires("labkit") or ()
                if line.lower().startswith(self.library.lower())
            )
            text += f'; labkit works with: pip install "{wanted}"'
        return text


def version_of(library: str) -> str:
    """The installed version; "" where there is none."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


def exists(name: str) -> bool:
    """Whether "module:Class.attribute" is there.

    The attribute of an instance counts where a method of its class names it.
    """
    module, _, path = name.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return False
    for part in path.split(".") if path else ():
        if not hasattr(owner, part):
            return isinstance(owner, type) and is_named_in(owner, part)
        owner = getattr(owner, part)
    return True


def is_named_in(kind: type, attribute: str) -> bool:
    """Whether a method or an annotation of a class, or of its bases, has this name."""
    for base in kind.__mro__:
        if attribute in getattr(base, "__annotations__", {}):
            return True
        for each in vars(base).values():
            method = inspect.unwrap(getattr(each, "fget", None) or each)
            code = getattr(method, "__code__", None)
            if code is not None and attribute in names_in(code):
                return True
    return False


def names_in(code: CodeType) -> Iterator[str]:
    """The names of attributes and globals in a function and those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
