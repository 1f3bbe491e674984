"""Modules that a loop calls by themselves, as `model.decode(z)` does, though their
parameters are gathered for calls of the whole model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from labkit.compat.c10d import local_part
from labkit.compat.data_parallel import replaced_of
from labkit.compat.data_parallel import shard_of
from labkit.compat.data_parallel import whole_of
from labkit.compat.torch import num_changes
from labkit.compat.torch import storage_key
from labkit.strategies.autograd.agreement import Route


class Parts:
    """Gathers a root's own parameters for calls of the modules that hold them.

    `fully_shard` gathers those outside of all blocks when the root is called: an
    embedding or a decoder that the loop calls by itself would find shards.
    """

    def __init__(
        self,
        root: nn.Module,
        group: Any,
        number: int,
        *,
        route: Route,
        on_trained: Callable[[], None],
        on_written: Callable[[Any], None],
        on_replaced: Callable[[Any], None],
    ) -> None:
        """`group` is the root's, and has this number on the route. `on_trained()` is
        called after a call with gradients, for whose backward pass the parameters stay
        gathered; `on_written(part)` where a call without has changed one of them;
        `on_replaced(part)` where another parameter is in the place of one.
        """
        self._root = root
        self._group = group
        self._number = number
        self._route = route
        self._on_trained = on_trained
        self._on_written = on_written
        self._on_replaced = on_replaced
        self._is_over = False
        self._open: list[bool] = []
        """Of each call under way, whether they were gathered for it; none within a call
        of the root."""
        self._before: list[tuple[int, int]] = []
        own = {id(shard_of(part)) for part in group.fsdp_params}
        for module in root.modules():
            # A class may have a parameters() of its own, as in MAML.
            held = (id(each) for _, each in module.named_parameters(recurse=False))
            if not isinstance(module, FSDPModule) and own.intersection(held):
                module.register_forward_pre_hook(self._begin, prepend=True)
                module.register_forward_hook(self._end, always_call=True)

    def end_run(self) -> None:
        """In later cells nothing reduces the gradients of such a call: it finds shards,
        and is refused, unless it is without gradients. So what is gathered for a call
        of the root without gradients does not stay."""
        self._is_over = True
        self._root.register_forward_hook(self._end_root, always_call=True)

    def _end_root(self, root: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._group.reshard()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._open:
            self._open.append(False)
            return
        has_gradients = torch.is_grad_enabled()
        if not self._group.is_sharded or (has_gradients and self._is_over):
            return
        if (part := replaced_of(self._group)) is not None:
            self._on_replaced(part)
        if has_gradients:
            self._route.add(self._number)
        # What is gathered in inference mode could be part of no backward pass.
        with torch.inference_mode(False), torch.set_grad_enabled(has_gradients):
            self._group.unshard()
            self._group.wait_for_unshard()
        self._open.append(True)
        self._before = self._versions()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._open or not self._open.pop():
            return
        if torch.is_grad_enabled():
            self._on_trained()
            return
        changes = zip(self._before, self._versions(), strict=True)
        are_other = [before != now for before, now in changes]
        self._group.reshard()
        if any(are_other):
            self._on_written(self._group.fsdp_params[are_other.index(True)])

    def _versions(self) -> list[tuple[int, int]]:
        return [version_of(whole_of(part)) for part in self._group.fsdp_params]


def version_of(whole: torch.Tensor) -> tuple[int, int]:
    """What is another one once a tensor is changed in place, or is given other memory,
    as by `model.head.double()`: the parts would not have that."""
    return num_changes(whole), storage_key(local_part(whole).untyped_storage())
