"""Notices the losses of backward passes and the optimizers' steps in any loop."""

import contextlib
import gc
import itertools
import sys
from collections.abc import Callable
from collections.abc import Iterator
from types import FrameType
from typing import Any
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from labkit.compat.c10d import is_in_parts
from labkit.compat.torch import Overflows
from labkit.compat.torch import Unscale
from labkit.compat.torch import storage_key
from labkit.compat.torch import unscaling_by
from labkit.rank.telemetry.stack_trace import is_called_from
from labkit.strategies.autograd import backward
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.backward import Seeds

Loss = float | torch.Tensor
Result = TypeVar("Result")

_STEP = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
"""What torch wraps the `step` of every optimizer in."""


class LossHooks:
    """Watches one run: `on_step(loss, number)` is called after every optimizer step,
    with the number of the optimizer, counted from 0 as they come.

    `loss` is what the step descends: the sum of what was given to backward passes since
    the last step, each times the gradient that it began with; where the loop has its
    batches from labkit's loader, microbatches count with their weights. None if there
    was no loss, or none that counts.
    """

    def __init__(self) -> None:
        self.on_step: Callable[[Loss | None, int], None] = lambda loss, number: None
        self.weight = 1.0
        """What a backward pass is scaled by: see `labkit.rank.data.dealing.Share`."""
        self.weight_in_parts = 1.0
        """The same for a loss that all ranks compute together, of parameters that they
        have in parts, as a penalty on DTensors: it has no part of the batch, and its
        gradients are of each rank's own part."""
        self.is_sum = False
        """Whether losses are sums over the samples, no means."""
        self.batch = 0
        """The number of the global batch that the loop has."""
        self.microbatch = 0
        """The number of the part of it."""
        self.num_backwards = 0
        self._num_before_microbatch = 0
        """Backward passes before the microbatch at hand."""
        self.scale: Callable[[torch.Tensor], torch.Tensor] = lambda seed: seed
        """Makes of the gradient of a loss what the backward pass begins with: see
        `Prepared.scale`."""
        self.on_backward_begins: Callable[[], None] = lambda: None
        """Called before a backward pass."""
        self.on_backward_ends: Callable[[bool], None] = lambda has_failed: None
        """Called after it."""
        self.check_loss: Callable[[torch.Tensor, torch.Tensor | None], None]
        self.check_loss = lambda loss, seed: None
        """Called with what a backward pass begins with, and its gradient."""
        self.check_gradients_of: Callable[[Roots, bool], None]
        self.check_gradients_of = lambda inputs, create_graph: None
        """Called with what `torch.autograd.grad` is asked for, and whether its result
        is to be differentiated, too."""
        self.check_gradients_within: Callable[[Roots], None] = lambda inputs: None
        """The same within a backward pass."""
        self.check_scaler: Callable[[], None] = lambda: None
        """Called before a loop scales its loss itself."""
        self.unscale: Callable[[Any, Unscale], Overflows]
        self.unscale = lambda optimizer, take: take(optimizer)
        """Called for a GradScaler that unscales the gradients of an optimizer."""
        self.check_inputs: Callable[[Roots], None] = lambda inputs: None
        """Called before a backward pass that is for some tensors alone."""
        self.check_graph: Callable[[], None] = lambda: None
        """Called before a backward pass with create_graph=True."""
        self.check_optimizer: Callable[[torch.optim.Optimizer], None] = lambda o: None
        """Called before the step of an optimizer that is none of `prepare`'s."""
        self.on_step_begins: Callable[[], None] = lambda: None
        """Called after it."""
        self._losses: list[tuple[Loss, float, int, int]] = []
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._is_inside_step = False
        self._num_before_step = 0
        """Losses that there were when the step began that is under way."""

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """How many optimizers that live came before this one: a new one takes the place
        of one that is gone."""
        number = self._numbers.get(optimizer)
        if number is None:
            taken = set(self._numbers.values())
            free = (number for number in itertools.count() if number not in taken)
            number = self._numbers[optimizer] = next(free)
        return number

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have taken a step, and those of `prepare`."""
        return list(self._numbers)

    def step(
        self, optimizer: torch.optim.Optimizer, take: Callable[[], Result]
    ) -> Result:
        """Take one step, however often `take` calls the `step` of optimizers."""
        self._is_inside_step = True
        self._num_before_step = len(self._losses)
        try:
            result = take()
        finally:
            self._is_inside_step = False
        self._report(optimizer)
        return result

    def begin_microbatch(self, *, is_first: bool) -> None:
        """The loop has another microbatch: of the same global batch, or the first of
        the next."""
        self.batch += is_first
        self.microbatch += 1
        self._num_before_microbatch = self.num_backwards

    def set_loss(self, loss: torch.Tensor) -> None:
        """Count this in place of what the backward passes of the microbatch at hand
        have begun with."""
        place = self.batch, self.microbatch
        self._losses = [each for each in self._losses if each[2:] != place]
        self._losses.append((snapshot(loss), self.weight, *place))

    def _report(self, optimizer: torch.optim.Optimizer) -> None:
        losses, self._losses = self._losses, []
        if len(losses) == 1 and not self.is_sum:  # as of most loops
            loss, weight, _, _ = losses[0]
            self.on_step(loss if weight else None, self.number_of(optimizer))
            return
        total: Loss | None = None
        for batch in dict.fromkeys(number for _, _, number, _ in losses):
            ours = [each for each in losses if each[2] == batch]
            weights = {microbatch: weight for _, weight, _, microbatch in ours}
            if whole := 1.0 if self.is_sum else sum(weights.values()):
                # A loss that counts for nothing may be NaN.
                parts = (loss * (w / whole) for loss, w, _, _ in ours if w)
                total = sum(parts, 0.0 if total is None else total)
        self.on_step(total, self.number_of(optimizer))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch backward passes, every GradScaler and every optimizer's step."""
        scale = torch.amp.GradScaler.scale

        def noticed_scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            if scaler.is_enabled():
                self.check_scaler()
            scaled = scale(scaler, outputs)
            if isinstance(outputs, torch.Tensor):
                scaled.labkit_loss = outputs.detach()
            return scaled

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kw: Any) -> None:
            if not self._is_inside_step and num_steps_under_way() == 1:
                self._num_before_step = len(self._losses)
                self.check_optimizer(optimizer)
                self.on_step_begins()

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kw: Any) -> None:
            if self._is_inside_step or num_steps_under_way() > 1:
                return
            if self._losses or not is_deepspeeds_step():
                self._report(optimizer)

        torch.amp.GradScaler.scale = noticed_scale  # type: ignore[method-assign,assignment]
        handles = [
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        ]
        try:
            with backward.watching(self), unscaling_by(self._unscale):
                yield
        finally:
            for handle in handles:
                handle.remove()
            torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]

    def _unscale(self, optimizer: Any, take: Unscale) -> Overflows:
        return self.unscale(optimizer, take)

    # ---- called by `labkit.strategies.autograd.backward` ----

    def begin(
        self, roots: Roots, seeds: Seeds, create_graph: bool, inputs: Roots
    ) -> Seeds:
        if inputs:
            self.check_inputs(inputs)
        self.num_backwards += 1
        if create_graph:
            self.check_graph()
        total: Loss | None = None
        for root, seed in zip(roots, seeds, strict=True):
            value = value_of(root, seed)
            if value is not None:
                total = value if total is None else total + value
        # Of a step that evaluates its loss several times the first one counts.
        is_again = len(self._losses) > self._num_before_step and (
            self._is_inside_step or num_steps_under_way()
        )
        if total is not None and not is_again:
            self._losses.append((total, self.weight, self.batch, self.microbatch))
        if not backward.is_part():
            seeds = tuple(map(self._scaled, roots, seeds))
        self.on_backward_begins()
        return seeds

    def end(self, *, has_failed: bool) -> None:
        self.on_backward_ends(has_failed)

    def differentiating(
        self, inputs: Roots, create_graph: bool, *, is_within: bool
    ) -> None:
        if is_within:
            self.check_gradients_within(inputs)
        else:
            self.check_gradients_of(inputs, create_graph)

    def _scaled(self, root: Any, seed: torch.Tensor | None) -> torch.Tensor | None:
        if isinstance(root, torch.Tensor):
            self.check_loss(root, seed)
        if seed is None:
            return None
        weight = self.weight_in_parts if is_in_parts(seed) else self.weight
        scaled = self.scale(seed if weight == 1.0 else weight * seed)
        is_first = self.num_backwards - self._num_before_microbatch == 1
        if is_first or scaled is seed or not is_of_earlier_pass(root, seed):
            return scaled
        return seed


def is_of_earlier_pass(root: Any, seed: torch.Tensor) -> bool:
    """Whether `root.backward(seed)` goes on with the gradient that an earlier backward
    pass, weighted and scaled, gave to a tensor: to one at which the loop has cut the
    model in two, `d = h.detach().requires_grad_()`, and `h.backward(d.grad)`."""
    if not isinstance(root, torch.Tensor) or not root.dim():
        return False
    memory = memory_of(seed)
    return memory is not None and any(
        memory_of(each.grad) == memory
        # Most of a process's objects are frozen: these are some thousands.
        for each in gc.get_objects()
        if (type(each) is torch.Tensor or type(each) is torch.nn.Parameter)
        and (each.is_leaf or each.retains_grad)
    )


def memory_of(tensor: torch.Tensor | None) -> int | None:
    """The identity of what a plain tensor has its values in; None for others."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return None
    return storage_key(tensor.untyped_storage())


def num_steps_under_way() -> int:
    """How many optimizers' `step` are on the stack, one calling the other."""
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None:
        found += frame.f_code is _STEP
        frame = frame.f_back
    return found


def is_deepspeeds_step() -> bool:
    """Whether DeepSpeed takes the step under way: one so that the optimizer makes its
    state, and in training one for each group of parameters."""
    return is_called_from("deepspeed.")


def value_of(root: Any, seed: torch.Tensor | None) -> Loss | None:
    """What a loss adds to what a step descends; None for what is no loss: the gradient
    of a tensor of several elements is that of a mean or a sum only where it is the same
    for all of them."""
    if not isinstance(root, torch.Tensor) or seed is None:
        return None
    root = getattr(root, "labkit_loss", root)
    # On a GPU the values are not looked at, for the loop would wait for them.
    is_here = seed.is_cpu
    if is_here and root.numel() == 1 and seed.item() == 1.0:
        return snapshot(root)
    root = root.detach()
    if root.numel() == 1:
        return snapshot(root * seed)
    if is_here and root.numel() and bool((seed == seed.flatten()[0]).all()):
        return snapshot((root * seed).sum())
    return None


def snapshot(value: Any) -> Loss:
    """A scalar that later changes of `value` do not reach.

    A tensor on a GPU is copied there and read later: reading it now would make the
    training loop wait for the device.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.is_cuda else value.item()
    return float(value)
