"""The optimizer that a training loop sees: it steps when its step is complete."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from labkit.strategies.prepared import Prepared


class PreparedOptimizer(torch.optim.Optimizer):
    """Stands for the user's optimizer: the same groups and state.

    With `--accumulate K` a `step()` or `zero_grad()` between the microbatches of one
    step does nothing. Clipping, loss scaling and the strategy's own step are in
    `Prepared.step`, which `take_step` runs.
    """

    def __init__(
        self, prepared: Prepared, take_step: Callable[[Prepared], Any]
    ) -> None:
        # Not the base's __init__: groups and state are the inner optimizer's.
        self.prepared = prepared
        self.held_back = False
        """Whether the last `step()` waits for further microbatches."""
        self.take_step = take_step
        self._is_last = True
        self._num_held = 0
        self.begin_microbatch()

    def begin_microbatch(self, is_last: bool | None = None) -> None:
        """Whether the step is complete after the next backward pass; a loop over data
        of its own has `--accumulate` backward passes a step."""
        if is_last is None:
            is_last = self._num_held >= self.prepared.options.accumulate - 1
        self._is_last = is_last
        self.prepared.begin_microbatch(is_last=is_last)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError(
                "optimizer.step(closure) evaluates the loss itself, which prepare "
                "cannot divide among ranks; use %%dist_train raw"
            )
        self.held_back = not self._is_last
        if self.held_back:
            self._num_held += 1
        else:
            self._num_held = 0
            self.take_step(self.prepared)
        self.begin_microbatch()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self._num_held:
            self.prepared.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.prepared.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.prepared.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.prepared.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("add parameter groups to the optimizer before prepare")

    def state_dict(self) -> dict[str, Any]:
        return self.prepared.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.prepared.optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return repr(self.prepared.optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


@contextlib.contextmanager
def schedulers_in_step(optimizers: list[PreparedOptimizer]) -> Iterator[None]:
    """A learning-rate scheduler waits with its optimizer for the last microbatch.

    Schedulers of the user's own optimizer, made before `prepare`, do too.
    """
    patched: dict[type, Callable[..., Any]] = {}

    def patch(kind: Any) -> None:
        if "step" in kind.__dict__:
            patched[kind] = step = kind.__dict__["step"]

            def step_if_complete(self: Any, *args: Any, **kwargs: Any) -> Any:
                for known in optimizers:
                    ours = (known, known.prepared.optimizer)
                    if known.held_back and any(self.optimizer is o for o in ours):
                        return None
                return step(self, *args, **kwargs)

            kind.step = step_if_complete
        for child in kind.__subclasses__():
            patch(child)

    patch(LRScheduler)
    try:
        yield
    finally:
        for kind, step in patched.items():
            kind.step = step  # type: ignore[attr-defined]
