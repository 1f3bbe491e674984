"""Which tensors of a forward pass are in one memory, here or in one process.

Layers on other ranks have copies of what they are given. What one process would see by
two names of one memory, ranks do not, so where forward writes to the one and uses the
other the loop is refused.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import is_tensor

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import is_functorch_wrapped
from labkit.compat.torch import storage_key
from labkit.strategies.autograd.rewritten import have_common
from labkit.strategies.relay.agreements import NOT_HERE
from labkit.strategies.relay.elsewhere import WRITTEN
from labkit.strategies.relay.elsewhere import Runner
from labkit.strategies.relay.elsewhere import current
from labkit.strategies.relay.elsewhere import lose
from labkit.strategies.relay.elsewhere import replace

WRITTEN_TWIN = (
    "a layer returns a tensor that it is given, or a view of it, and forward writes in "
    "place to one of the two and uses the other. Under pipeline the layer has a copy "
    "from another rank, so the write would be missing. Have the layer return a copy "
    "(x.clone()), or write to none of them (x = x * 2 in place of x.mul_(2)); or use "
    "ddp"
)
Common = list[tuple[int, int]]
"""Of some outputs, which have the memory of which inputs."""


class Memory:
    """What the pass under way has written to, and what it has copies of."""

    def __init__(self, runner: Runner) -> None:
        """`runner` runs what is computed with tensors that are no more of use."""
        self._runner = runner
        self._replaced: list[torch.Tensor] = []
        """Tensors of which others have taken the place."""
        self._stale: dict[int, list[tuple[torch.Tensor, str]]] = {}
        """The same, by storage: in each of these one is, here, as it was before. With
        what to say where it is used."""
        self._twins: dict[int, list[torch.Tensor]] = {}
        """By storage, tensors that one process would have in that one, and that are in
        another here: one is a copy on the rank of a layer, which has returned it, or a
        view of it."""

    def clear(self) -> None:
        """The pass is over: what it has replaced is of no use any more."""
        for tensor in self._replaced:  # or they would keep each other alive
            lose(tensor, NOT_HERE, self._runner)
        self._replaced.clear()
        self._stale.clear()
        self._twins.clear()

    def replace(self, tensor: torch.Tensor, now: torch.Tensor, stage: int) -> None:
        """Have `now`, of this stage, take the place of a tensor."""
        replace(tensor, now, stage, self._runner)
        if tensor is not now:
            self._replaced.append(tensor)
            if (key := memory_of(tensor)) != memory_of(now):
                self._stale.setdefault(key, []).append((tensor, WRITTEN))

    def pair(self, own: torch.Tensor, other: torch.Tensor) -> None:
        """One process would have these two in one memory, and here the rank that has
        computed `other` had a copy of `own`."""
        keys = memory_of(own), memory_of(other)
        if keys[0] != keys[1]:
            self._twins.setdefault(keys[0], []).append(other)
            self._twins.setdefault(keys[1], []).append(own)

    def lose_twins(self, written: torch.Tensor) -> None:
        """Have those of a tensor that has been written to be of no use any more: they
        are what it was."""
        if not self._twins:
            return
        seen, coming = {memory_of(written)}, [*self._twins.get(memory_of(written), [])]
        while coming:
            twin = coming.pop()
            if (key := memory_of(twin)) not in seen:
                seen.add(key)
                self._stale.setdefault(key, []).append((twin, WRITTEN_TWIN))
                coming += self._twins.get(key, [])

    def current(self, leaf: Any) -> Any:
        """What has taken the place of a tensor, if something has; all else as it is.

        Raises UnsupportedLoopError for one that shares memory with a tensor that only
        another rank has written to: a view of it, or what detach() gave; or would in
        one process, as what a layer returns of what it is given.
        """
        leaf = current(leaf)
        if self._stale and is_tensor(leaf):
            for each, why in self._stale.get(memory_of(leaf), []):
                if are_in_common(leaf, each):
                    raise UnsupportedLoopError(why)
        return leaf


def memory_of(tensor: torch.Tensor) -> int:
    """What tells its storage from others."""
    with DisableTorchFunctionSubclass():
        return storage_key(tensor.untyped_storage())


def are_in_common(leaf: Any, tensor: torch.Tensor) -> bool:
    """Whether something is a tensor that has elements of another one's memory."""
    if leaf is tensor:
        return True
    if not is_tensor(leaf) or memory_of(leaf) != memory_of(tensor):
        return False
    with DisableTorchFunctionSubclass():
        return have_common([leaf, tensor])


def in_common(outputs: Sequence[Any], inputs: Sequence[Any]) -> Common:
    """Which of some outputs have the memory of which inputs."""
    with DisableTorchFunctionSubclass():
        places = {memory_of(x): n for n, x in enumerate(inputs) if has_memory(x)}
        keys = [memory_of(x) if has_memory(x) else 0 for x in outputs]
    return [(n, places[key]) for n, key in enumerate(keys) if key in places]


def has_memory(leaf: Any) -> bool:
    """Whether it is a tensor with a storage of its own."""
    is_dense = is_tensor(leaf) and leaf.layout is torch.strided
    return is_dense and not is_functorch_wrapped(leaf)
