"""What a cell sees as `parameter.grad` where a strategy has gradients in parts."""

import contextlib
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import Protocol

import torch
from torch import nn

_grad: Any = torch.Tensor.grad


class Owner(Protocol):
    """Has the gradients of its parameters in parts."""

    @property
    def hides_gradients(self) -> bool:
        """Whether they are partial sums, which no loop is to see."""

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient of all ranks, whole; None if there is none. Collective."""

    def set_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Put `value`, which is whole and equal on all ranks, in its place."""


class CellGradients:
    """Gathers the gradients that a cell looks at, and hands back what it makes of them.

    A loop that clips, scales, adds noise to or only reads `parameter.grad` between a
    backward pass and the step thereby does what it does in one process. What it costs,
    memory for the whole of a gradient, it costs only a loop that looks.
    """

    def __init__(
        self,
        owner: Owner,
        parameters: Iterable[nn.Parameter],
        on_look: Callable[[], None],
    ) -> None:
        """`on_look()` is called when a gradient is gathered."""
        self._owner = owner
        self._parameters = list(parameters)
        self._on_look = on_look
        self._given: dict[int, tuple[nn.Parameter, torch.Tensor | None, int]] = {}
        """By the parameter's id: what the cell was given, and its version then; -1 for
        what the cell has put in its place."""
        self._depth = 0
        for parameter in self._parameters:
            parameter.__class__ = PartitionedParameter
            _of[id(parameter)] = self

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """Within it `parameter.grad` is torch's own: it is not the cell that looks."""
        self.begin_ours()
        try:
            yield
        finally:
            self.end_ours()

    def begin_ours(self) -> None:
        self._depth += 1

    def end_ours(self) -> None:
        self._depth -= 1

    @property
    def is_ours(self) -> bool:
        return self._depth > 0

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if self._owner.hides_gradients:
            return None
        if id(parameter) not in self._given:
            with self.ours():
                whole = self._owner.full_gradient(parameter)
            if whole is None:
                return None
            self._on_look()
            self._given[id(parameter)] = parameter, whole, whole._version
        return self._given[id(parameter)][1]

    def set(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        if not self._owner.hides_gradients:
            self._given[id(parameter)] = parameter, value, -1

    def hand_back(self) -> bool:
        """Put what the cell has changed where the strategy steps from. Collective.

        False where it has taken all of them away, and there is nothing to step with.
        """
        given, self._given = [*self._given.values()], {}
        changed = [
            (parameter, value)
            for parameter, value, version in given
            if value is None or value._version != version
        ]
        if len(changed) == len(self._parameters) and all(v is None for _, v in changed):
            return False
        with self.ours():
            for parameter, value in changed:
                self._owner.set_gradient(
                    parameter, torch.zeros_like(parameter) if value is None else value
                )
        return True

    def forget(self) -> None:
        """They are zeroed, or stepped with."""
        self._given.clear()

    def close(self) -> None:
        """The strategy has let go of the parameters: they are plain ones again."""
        for parameter in self._parameters:
            if _of.get(id(parameter)) is self:
                del _of[id(parameter)]
                parameter.__class__ = nn.Parameter


_of: weakref.WeakValueDictionary[int, CellGradients] = weakref.WeakValueDictionary()
"""By the parameter's id, which lives as long as they do."""


class PartitionedParameter(nn.Parameter):
    """A parameter whose gradient is in parts, on several ranks.

    Its `grad` is gathered when a cell reads it. Copies of it are plain parameters.
    """

    @property
    def grad(self) -> torch.Tensor | None:
        gradients = _of.get(id(self))
        if gradients is None or gradients.is_ours:
            found: torch.Tensor | None = _grad.__get__(self)
            return found
        return gradients.get(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        gradients = _of.get(id(self))
        if gradients is None or gradients.is_ours:
            _grad.__set__(self, value)
        else:
            gradients.set(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copy = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(copy, self.requires_grad)
        return memo[id(self)]
