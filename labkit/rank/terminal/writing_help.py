"""What Tab and Shift-Tab show in a cell for this rank, by its variables."""

import builtins
import inspect
from collections.abc import Mapping
from types import FunctionType
from types import MethodType
from typing import Any

from labkit.compat.ipython import completer_of
from labkit.compat.ipython import help_on
from labkit.compat.torch import OF_MODULES


class WritingHelp:
    """Answers the notebook's questions for a cell that is being written."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._completed = completer_of(shell)

    def complete(self, code: str) -> dict[str, Any]:
        """What may stand from "start" to the end: "words", each with its type."""
        start, words = self._completed(code)
        return {"start": start, "words": words}

    def help_of(self, name: str, with_source: bool) -> str:
        """What IPython shows of a function or a class, and of all else its type; "" of
        a name that stands for nothing."""
        try:
            value = value_of(name, self._shell.user_ns)
        except KeyError:
            return ""
        if isinstance(value, MethodType):  # its text would have its object's
            value = MethodType(value.__func__, type(value.__self__))
        if inspect.isroutine(value) or isinstance(value, type):
            return help_on(self._shell, value, name, with_source=with_source)
        kind = type(value)
        return f"Type: {kind.__module__}.{kind.__qualname__}"


def value_of(name: str, names: Mapping[str, Any]) -> Any:
    """What a name such as "model.forward" stands for; KeyError where that is nothing.

    No code of the value's runs, not even for its text: under zero3 a parameter that is
    read in a forward pass is gathered, a collective that no other rank takes part in,
    and what a module says of itself reads parameters.
    """
    head, *rest = name.split(".")
    value = names[head] if head in names else vars(builtins)[head]
    for part in rest:
        kept = [inspect.getattr_static(value, each, None) for each in OF_MODULES]
        registered = [each for each in kept if isinstance(each, dict) and part in each]
        if registered:
            value = dict.get(registered[0], part)  # not as stage 3 gets it
            continue
        try:
            found = inspect.getattr_static(value, part)
        except AttributeError:
            raise KeyError(name) from None
        kind = value if isinstance(value, type) else type(value)
        is_of_class = inspect.getattr_static(kind, part, None) is found
        if isinstance(found, staticmethod):
            found = found.__func__
        elif isinstance(found, classmethod):
            found = MethodType(found.__func__, kind)
        elif is_of_class and kind is not value and isinstance(found, FunctionType):
            found = MethodType(found, value)
        value = found
    return value
