"""Marks the forward pass of every module in a profile, by its name in the model."""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import record_function

from labkit.records import MODULE_MARK


class ModuleMarks:
    """A range for each module's forward pass; a module that is called by none is the
    root that the others are named by."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._open: list[tuple[nn.Module, Any]] = []
        self._handles: list[Any] = []

    def install(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        while self._open:  # a forward pass that did not come back
            self._open.pop()[1].__exit__(None, None, None)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if module not in self._names:
            for name, each in module.named_modules():
                self._names[each] = f"{name or 'model'} ({type(each).__name__})"
        mark = record_function(MODULE_MARK + self._names[module])
        mark.__enter__()
        self._open.append((module, mark))

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # Of those within it that raised, where no hook is called at the end.
        while any(each is module for each, _ in self._open):
            each, mark = self._open.pop()
            mark.__exit__(None, None, None)
            if each is module:
                break
