"""The optimizer that a training loop sees: it steps when its step is complete."""

import contextlib
import functools
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

    def is_of(self, scheduler: LRScheduler) -> bool:
        """Whether a scheduler sets the rates of this optimizer, or of the user's own,
        for which it was made before `prepare`."""
        return any(scheduler.optimizer is o for o in (self, self.prepared.optimizer))

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
def watching_schedulers(
    note: Callable[[LRScheduler, bool], None], may_step: Callable[[LRScheduler], bool]
) -> Iterator[None]:
    """Tell `note` of every learning-rate scheduler that is made (True) or takes a step
    (False). A step that `may_step` does not allow does nothing, but for the one with
    which it is made."""
    patched: list[tuple[type, str, Callable[..., Any]]] = []
    making: list[Any] = []

    def patch(kind: type, name: str, watched: Callable[..., Any]) -> None:
        if name in kind.__dict__:
            patched.append((kind, name, kind.__dict__[name]))
            setattr(kind, name, watched(kind.__dict__[name]))

    def watched_init(init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def make(self: Any, *args: Any, **kwargs: Any) -> None:
            is_base = any(self is each for each in making)  # of one that is patched too
            making.append(self)
            try:
                init(self, *args, **kwargs)
            finally:
                making.pop()
            if not is_base:
                note(self, True)

        return make

    def watched_step(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def step_if_allowed(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_initial:
                note(self, False)
                if not may_step(self):
                    return None
            return step(self, *args, **kwargs)

        return step_if_allowed

    def patch_all(kind: Any) -> None:
        patch(kind, "__init__", watched_init)
        patch(kind, "step", watched_step)
        for child in kind.__subclasses__():
            patch_all(child)

    patch_all(LRScheduler)
    try:
        yield
    finally:
        for kind, name, original in reversed(patched):
            setattr(kind, name, original)
