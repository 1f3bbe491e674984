"""What the notebook sends to an engine in place of a function of its own.

An engine loads the module of whatever it is sent: this one, and none of the notebook's.
"""

import importlib
from typing import Any


def call_by_name(function: str, args: tuple[Any, ...]) -> Any:
    """Call the function at "module:name"."""
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)(*args)
