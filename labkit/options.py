"""Options, each declared once: default, help and check.

A field of an options class says all there is to know about its option. The arguments
of the magics, their help, the parameters in docstrings and the checks are made from it.
"""

import inspect
import re
import textwrap
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import MISSING
from dataclasses import Field
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from typing import Any
from typing import TypeVar

from labkit.checks import check_flag

_F = TypeVar("_F", bound=Callable[..., Any])
_O = TypeVar("_O")


@dataclass(frozen=True)
class Option:
    """What the field of an option says about it, besides its name and default."""

    help: str
    check: Callable[[str, Any], None]
    """Raises ValueError, given the option's name, for a value that cannot be; not
    called for a None that is the default."""
    metavar: str | None = None
    choices: Sequence[str] | None = None
    default_text: str = ""
    """The default in words, where the value itself does not say it."""
    short: str = ""
    """As "-n", beside the long one."""
    bare: str = ""
    """What the option means where no value follows it; "" where one has to."""


def option(
    default: Any,
    help: str,
    check: Callable[[str, Any], None] = check_flag,
    *,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    default_text: str = "",
    short: str = "",
    bare: str = "",
) -> Any:
    """A field of an options class; a callable default makes the value."""
    said = Option(help, check, metavar, choices, default_text, short, bare)
    metadata = {"option": said}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(kind: type[_O], given: Mapping[str, Any]) -> _O:
    """Options of this class, as a function was `given` them among its arguments."""
    return kind(**{each.name: given[each.name] for each in fields(kind)})  # type: ignore[arg-type]


def option_of(each: "Field[Any]") -> Option:
    """What the field of an options class says about its option."""
    found: Option = each.metadata["option"]
    return found


def documented(options: type[Any]) -> Callable[[_F], _F]:
    """Write each option's help in place of its "{name}" in the docstring, and that of
    all of `options` in place of "{options}"."""
    texts = {each.name: _documentation(each) for each in fields(options)}
    texts["options"] = "\n".join(texts.values())

    def write(function: _F) -> _F:
        if function.__doc__:  # which is not there under -OO
            doc = inspect.cleandoc(function.__doc__)
            for name, text in texts.items():
                doc = doc.replace(f"{{{name}}}", text)
            function.__doc__ = doc
        return function

    return write


def _documentation(each: "Field[Any]") -> str:
    """An option as a numpy-style parameter."""
    found = option_of(each)
    kind = re.sub(r"(\w+\.)+", "", inspect.formatannotation(each.type))
    default = found.default_text or each.default
    has_default = default is not None and default is not MISSING
    kind = kind.removesuffix(" | None")
    kind += f", default {default}" if has_default else ", optional"
    said = found.help[0].upper() + found.help[1:] + "."
    if found.choices:
        said += f" One of: {', '.join(found.choices)}."
    indent = " " * 4
    text = textwrap.fill(said, 80, initial_indent=indent, subsequent_indent=indent)
    return f"{each.name} : {kind}\n{text}"


def flag_of(name: str) -> str:
    """The option on a magic line: "--sync-batchnorm"."""
    return "--" + name.replace("_", "-")


def check_values(options: Any) -> None:
    """ValueError for the first option whose value cannot be."""
    for each in fields(options):
        value = getattr(options, each.name)
        if not (value is None and each.default is None):
            option_of(each).check(each.name, value)
