"""Blocks whose parameters are gathered together, around their forward passes."""

import operator
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.data_parallel import choose_reducing
from labkit.compat.data_parallel import memory_of
from labkit.compat.data_parallel import replaced_of
from labkit.compat.data_parallel import shard_of
from labkit.compat.data_parallel import take_moved
from labkit.compat.data_parallel import whole_of_each
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import base_of
from labkit.compat.torch import held_by
from labkit.compat.torch import storage_key
from labkit.compat.torch import tree_leaves
from labkit.strategies.autograd.agreement import Route
from labkit.strategies.autograd.rewritten import Substitute
from labkit.strategies.autograd.rewritten import origin
from labkit.strategies.autograd.rewritten import tensors_in
from labkit.strategies.autograd.structures import Given
from labkit.strategies.autograd.structures import add_attributes
from labkit.strategies.autograd.structures import flatten
from labkit.strategies.autograd.structures import hand_back
from labkit.strategies.autograd.structures import holders_of
from labkit.strategies.autograd.structures import may_hold
from labkit.strategies.autograd.structures import replaced
from labkit.strategies.model.gradients import mark_kept
from labkit.strategies.model.writes import Writes

CHANGES_INPUT = (
    "a {name} changes a list, a dict or an object that it is given, and fully_shard "
    "gathers and frees a block's parameters by what the block returns: have it return "
    "what it has computed, or use ddp"
)


class Block:
    """What a group of parameters does before and after the forward pass of its block,
    besides gathering and freeing them: it sees what the block changes.

    Of lists, dicts and dataclasses that the block is given it gets copies, so that a
    backward pass reaches each tensor in them.
    """

    def __init__(
        self,
        number: int,
        block: nn.Module,
        group: Any,
        parts: Mapping[str, Any],
        *,
        route: Route,
        writes: Writes,
        on_replaced: Callable[[Any], None],
        model: nn.Module,
    ) -> None:
        """`parts` are the group's parameters, by name. `on_replaced(part)` is called
        where the model has another parameter in the place of one of them."""
        self._number = number
        self._group = group
        self._tensors = partial(whole_ones, parts)
        self._writes = writes
        self._on_replaced = on_replaced
        self._kept = Kept(model, self._tensors)
        self._given: Given | None = None
        """Of the pass under way, if it is looked at."""
        self._called_with: Any = None
        """What the caller has given."""
        self._own: list[Any] = []
        """The lists, dicts and objects in that."""
        self._is_first = False
        """Whether this pass is one of the first of its kind, which are looked at."""
        self._gather = partial(run_on_route, route, number, group, group.pre_forward)
        self._free = group.post_forward
        self._memory = memory_of(group)
        """Of the parameters, as the group has last gathered them."""
        self._inputs: list[Substitute] = []
        """Of tensors that the caller has given, of which it gets views."""
        self._untrained: list[torch.Tensor] = []
        """Others, of which it gets themselves."""
        self._use_own_hooks = choose_reducing(group, replaced, self._note_inputs)

        # No methods, which a copy of the model would have, too.
        @torch.compiler.disable
        def note(block: nn.Module, *called_with: Any) -> None:
            self._called_with = called_with

        @torch.compiler.disable
        def forget(*_: Any) -> None:
            self._forget()

        self._hooks = (
            block.register_forward_pre_hook(note, prepend=True, with_kwargs=True),
            block.register_forward_hook(forget, always_call=True),
        )
        group.pre_forward, group.post_forward = self._begin, self._end

    def restore(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._use_own_hooks()
        del self._group.pre_forward, self._group.post_forward

    def _forget(self) -> None:
        """The call is over, or has failed: then it would keep its inputs alive."""
        self._called_with = self._given = None
        self._own, self._inputs, self._untrained = [], [], []
        self._writes.before.pop(self._number, None)

    def _note_inputs(
        self, own: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> None:
        self._inputs = [*map(Substitute, own, given)]

    def computed(self, output: Any) -> list[torch.Tensor]:
        """The tensors with a history within the block, which has parameters gathered
        before their gradients come: in what it returns, and those that it was given and
        has written to. What it hands on as it was has none: its gradient comes when
        those of the block are there."""
        changed = [each for each in self._untrained if each.requires_grad]
        as_given: set[int] = set()
        for each in self._inputs:
            if each.is_written:
                changed.append(each.own)
            else:
                as_given.add(id(origin(each.given)))
        found = computed_in(output)
        if as_given:
            found = [each for each in found if id(origin(each)) not in as_given]
        if changed:
            found += [x for x in map(base_of, changed) if x.grad_fn is not None]
        return found

    def _begin(self, block: nn.Module, *args: Any) -> Any:
        take_moved(self._group, self._memory)
        self._check_places()
        called_with, self._called_with = self._called_with, None
        holds = may_hold(*args)
        self._own = holders_of(*called_with) if holds else []
        self._inputs = []
        if torch.is_grad_enabled():
            given = tensors_in((*args[0], *args[1].values()))
            self._untrained = [each for each in given if not each.requires_grad]
        found = self._gather(block, *args)
        kind = self._number, block.training, torch.is_grad_enabled()
        self._is_first = bool(self._writes.before) or kind not in self._writes.done
        self._given = None
        if holds:
            self._given = Given(found[0], found[1], self._own)
        if self._is_first:
            self._writes.begin(self._number, block.training, self._tensors)
        return found

    def _check_places(self) -> None:
        if (part := replaced_of(self._group)) is not None:
            self._on_replaced(part)

    def _end(self, block: nn.Module, inputs: Any, output: Any) -> Any:
        self._check_places()
        if self._writes.before:
            self._writes.end(self._number, self._tensors)
        given, self._given = self._given, None
        own, self._own = self._own, []
        name = type(block).__name__.removeprefix("FSDP")
        for each in self._inputs:
            each.check(f"a {name}", takes_hooks=True)
        if given is not None:
            if given.has_changed(output):
                raise UnsupportedLoopError(CHANGES_INPUT.format(name=name))
            for mine, copied in zip(own, given.holders, strict=True):
                add_attributes(mine, copied)
            places = given.returned_in(output)
            output = hand_back([(own[n], given.holders[n]) for n, _ in places], output)
        self._kept.look(block, output, is_first=self._is_first)
        return self._free(block, inputs, output)


def run_on_route(
    route: Route, number: int, group: Any, pre_forward: Callable[..., Any], *args: Any
) -> Any:
    """What a group of parameters does before its block runs, which is noted where it
    gathers them, or will reduce gradients for this call: the root's parameters, once
    gathered, stay until the backward pass is over."""
    if not group.is_unsharded or (
        torch.is_grad_enabled()
        and any(
            isinstance(each, torch.Tensor) and each.requires_grad
            for each in tree_leaves(args)
        )
    ):
        route.add(number)
    return gather_plainly(pre_forward, *args)


def gather_plainly(pre_forward: Callable[..., Any], *args: Any) -> Any:
    """What a group of parameters does before its block runs, in any mode."""
    if torch.is_inference_mode_enabled():
        # Or what it gathers into could never be part of a backward pass.
        with torch.inference_mode(False), torch.no_grad():
            return pre_forward(*args)
    return pre_forward(*args)


class Kept:
    """Finds what a forward pass leaves that is in the memory of a group's parameters:
    in the first passes in modules, and later where there was something."""

    def __init__(
        self, model: nn.Module, tensors: Callable[[], dict[str, torch.Tensor]]
    ) -> None:
        self._tensors = tensors
        self._whole: list[torch.Tensor] = []
        self._names: dict[int, str] = {}
        """Of these, by storage, which stays theirs while it is freed and filled."""
        self._known = {
            (id(module), name)
            for module in model.modules()
            for name, _ in module.named_parameters(recurse=False)
        }
        self._is_any = False

    def look(self, module: nn.Module, output: Any, *, is_first: bool) -> None:
        tensors = self._tensors()
        if not all(map(operator.is_, tensors.values(), self._whole)) or is_first:
            self._whole = list(tensors.values())
            self._names = {
                storage_key(local_part(whole).untyped_storage()): name
                for name, whole in tensors.items()
            }
        mark_kept(leaves_of(output), self._names)
        if is_first or self._is_any:
            self._is_any |= mark_kept(self._held(module), self._names)

    def _held(self, module: nn.Module) -> Iterator[Any]:
        for each in module.modules():
            yield from held_by(each)
            for name, parameter in each.named_parameters(recurse=False):
                if (id(each), name) not in self._known:
                    yield parameter


def computed_in(output: Any) -> list[torch.Tensor]:
    """The tensors in what a module returns, in objects too, as a distribution; no
    parameters in parts, of which it has computed nothing. For a view, what it is a view
    of: one that is changed in place, as by `logits += bias`, gets another history,
    without the hooks that it had."""
    with DisableTorchFunctionSubclass():
        return [
            base_of(each)
            for each in leaves_of(output)
            if isinstance(each, torch.Tensor)
            and not (isinstance(each, DTensor) and each.is_leaf)
        ]


def leaves_of(output: Any) -> list[Any]:
    """What is in what a module returns: mostly one tensor, which is not searched."""
    return [output] if isinstance(output, torch.Tensor) else flatten(output)[0]


def whole_ones(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters as they are gathered for a forward pass, by name."""
    return dict(zip(parts, whole_of_each(parts.values()), strict=True))


def reduce_filled(
    used: set[int], group: Any, reduce: Callable[..., Any], *args: Any
) -> Any:
    """What a group does once its gradients are there. Where autograd gives none, it is
    0: as many have to be reduced on every rank."""
    parts = group.fsdp_params
    for part, whole in zip(parts, whole_of_each(parts), strict=True):
        lay_out_gradient(shard_of(part))
        is_late = id(whole) in used and part.unsharded_accumulated_grad is None
        if is_late and whole.grad is None:
            whole.grad = torch.zeros_like(whole)
    return reduce(*args)


def lay_out_gradient(shard: DTensor) -> None:
    """Have the gradient of a parameter in parts, as of a penalty, be in the same parts:
    after `torch.cat` of several it is whole, and `fully_shard` would add to that."""
    gradient: Any = shard.grad
    if gradient is not None and gradient.placements != shard.placements:
        shard.grad = gradient.redistribute(placements=shard.placements)
