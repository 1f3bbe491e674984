"""Notices the loss given to `backward()` and the optimizer's steps in any loop."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

Loss = float | torch.Tensor
Result = TypeVar("Result")


class Noticer:
    """Watches one run: `on_step(loss)` is called after every optimizer step.

    `loss` is the weighted mean of those given to `backward()` since the last step, one
    a microbatch; None if there was none, or none that counts.
    """

    def __init__(self, on_step: Callable[[Loss | None], None]) -> None:
        self.weight = 1.0
        """What a backward pass is scaled by: see `labkit.rank.loader.Share`."""
        self.scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss
        """Makes of a loss what the backward pass begins with: see `Prepared.scale`."""
        self.on_backward: Callable[[bool], None] = lambda begins: None
        """Called before (True) and after a backward pass."""
        self._on_step = on_step
        self._losses: list[tuple[Loss, float]] = []
        self._is_inside_step = False

    def step(self, take: Callable[[], Result]) -> Result:
        """Take one step, however often `take` calls the `step` of optimizers."""
        self._is_inside_step = True
        try:
            result = take()
        finally:
            self._is_inside_step = False
        self._report()
        return result

    def _report(self) -> None:
        losses, self._losses = self._losses, []
        total = sum(weight for _, weight in losses)
        mean = None
        if total:
            mean = sum(loss * (weight / total) for loss, weight in losses if weight)
        self._on_step(mean)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch `Tensor.backward`, `GradScaler.scale` and every optimizer's step."""
        backward = torch.Tensor.backward
        scale = torch.amp.GradScaler.scale
        noticer = self

        def noticed_backward(
            self: torch.Tensor, gradient: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            if self.numel() == 1:
                loss = snapshot(getattr(self, "_unscaled_loss", self))
                noticer._losses.append((loss, noticer.weight))
                if noticer.weight != 1.0:
                    ones = torch.ones_like(self) if gradient is None else gradient
                    gradient = noticer.weight * ones
                self = noticer.scale(self)
            noticer.on_backward(True)
            backward(self, gradient, *args, **kwargs)
            noticer.on_backward(False)

        def noticed_scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
            scaled = scale(self, outputs)
            if isinstance(outputs, torch.Tensor):
                scaled._unscaled_loss = outputs.detach()
            return scaled

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kw: Any) -> None:
            if not self._is_inside_step:
                self._report()

        torch.Tensor.backward = noticed_backward  # type: ignore[method-assign]
        torch.amp.GradScaler.scale = noticed_scale  # type: ignore[method-assign]
        handle = register_optimizer_step_post_hook(after_step)
        try:
            yield
        finally:
            handle.remove()
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


def snapshot(value: Any) -> Loss:
    """A scalar that later changes of `value` do not reach.

    A tensor on a GPU is copied there and read later: reading it now would make the
    training loop wait for the device.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.clone() if value.is_cuda else value.item()
    return float(value)
