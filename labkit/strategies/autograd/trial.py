"""What a model's forward pass may ask of gradients where it runs for a comparison."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

_OF_GRADIENTS = frozenset({torch.Tensor.register_hook, torch.Tensor.retain_grad})


class WithoutGradients(TorchFunctionMode):
    """Within it no gradients are recorded, and what asks for those of a layer's output
    asks for nothing: in the pass that a loop calls for, torch has them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_GRADIENTS and not args[0].requires_grad:
            if func is torch.Tensor.retain_grad:
                return None
            return RemovableHandle(OrderedDict())
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_grad_enabled(self._before)
