"""Which states a loop loads into its models: on all ranks those of the same step."""

import contextlib
import functools
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from torch import nn

from labkit.compat.torch import about_modules

TAKEN_AT = "labkit_step"
"""In what a state dict says of its model beside the tensors; copies and files keep it,
and a dict that the loop makes of its items does not."""


class LoadedStates:
    """What a rank has loaded into the models that its run trains."""

    def __init__(
        self, is_trained: Callable[[nn.Module], bool], num_steps: Callable[[], int]
    ) -> None:
        self._is_trained = is_trained
        self._num_steps = num_steps
        self._loads: list[tuple[int, int | None]] = []
        """For each the steps so far, and those when the state was taken."""

    @property
    def number(self) -> int:
        """The same on ranks that have loaded the same."""
        return zlib.crc32(repr(self._loads).encode())

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note in each state dict when it is taken, and what is loaded."""
        take, load = nn.Module.state_dict, nn.Module.load_state_dict

        @functools.wraps(take)
        def noted_take(self_: nn.Module, *args: Any, **options: Any) -> Any:
            found = take(self_, *args, **options)
            is_outermost = not args and options.get("destination") is None
            about = about_modules(found) if is_outermost else None
            if about is not None and options.get("prefix", "") in about:
                about[options.get("prefix", "")][TAKEN_AT] = self._num_steps()
            return found

        @functools.wraps(load)
        def noted_load(
            self_: nn.Module, state_dict: Any, *args: Any, **options: Any
        ) -> Any:
            if self._is_trained(self_):
                about = about_modules(state_dict) or {}
                taken_at = dict(about.get("") or {}).get(TAKEN_AT)
                self._loads.append((self._num_steps(), taken_at))
            return load(self_, state_dict, *args, **options)

        nn.Module.state_dict = noted_take  # type: ignore
        nn.Module.load_state_dict = noted_load  # type: ignore
        try:
            yield
        finally:
            nn.Module.state_dict = take  # type: ignore[method-assign]
            nn.Module.load_state_dict = load  # type: ignore[method-assign]
