"""Backward passes as autograd runs them, whatever a loop calls them by.

`Tensor.backward`, `torch.autograd.backward` and what calls these all come through one
function of torch. Here it is reported to a watcher, and to every strategy whose
parameters the pass will give gradients to. So a strategy needs no forward pass of its
own: the model that a cell has is the user's.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import will_execute
from labkit.compat.torch import without_compiled_autograd
from labkit.compat.torch import wrap_backward
from labkit.strategies.autograd.agreement import Course

Roots = Sequence[Any]
"""The tensors, or graph edges, that a backward pass begins with."""
Seeds = tuple[torch.Tensor | None, ...]
"""Their gradients."""

Accumulators = Sequence[tuple[nn.Parameter, Any]]
"""Parameters, each with the node of autograd that adds to its gradient."""


class Follower(Protocol):
    """What wants to know of backward passes that reach its parameters."""

    is_reached: bool
    """Set to True by every one of them."""

    course: Course
    """Hears of each of them before anything is sent."""

    in_one_thread: bool
    """Whether the nodes of a pass have to run in one order on all ranks: autograd has a
    thread for those of a GPU beside that for those of the CPU and of meta tensors."""

    @property
    def given_parameters(self) -> Sequence[nn.Parameter]:
        """Those that the user's model has."""

    def release(self) -> None:
        """Let go of them, and follow no more."""

    def accumulators(self) -> Accumulators:
        """The parameters that may be given gradients, each with the node of autograd
        that adds to its gradient."""

    def have_moved(self, used: Accumulators, unused: Accumulators) -> bool:
        """Whether autograd has other nodes for some by now, which `accumulators` then
        gives: the pass under way has reached those of `used`, and not of `unused`."""

    def check_ranks(self) -> None:
        """UnsupportedLoopError where those that it was prepared for are no more, or the
        run that weights losses is over."""

    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        """It has begun, and gives gradients to `used`, at least one. It is called
        within the pass, before any gradient is there."""

    def end_backward(self, *, has_failed: bool) -> None:
        """It has ended, with all gradients there, or failed."""


class Watcher(Protocol):
    """What sees every backward pass of a run."""

    def begin(
        self, roots: Roots, seeds: Seeds, create_graph: bool, inputs: Roots
    ) -> Seeds:
        """The gradients to begin with. Only `inputs` get gradients; if there are none,
        all leaves do."""

    def end(self, *, has_failed: bool) -> None:
        """It has ended, or failed half-way."""

    def differentiating(
        self, inputs: Roots, create_graph: bool, *, is_within: bool
    ) -> None:
        """`torch.autograd.grad` is called for `inputs`, maybe within a pass."""


_followers: list[weakref.ref[Any]] = []
"""In an order that is the same on all ranks, as what they do is collective."""
_watchers: list[Watcher] = []
_is_inside = False
_keeps_seeds = False


def follow(follower: Follower) -> None:
    """Tell `follower` of backward passes as long as it lives."""
    install()
    if not is_followed(follower):  # or it would begin every pass twice
        _followers.append(weakref.ref(follower, _followers.remove))


def unfollow(follower: Follower) -> None:
    """Tell it no more."""
    _followers[:] = [each for each in _followers if each() is not follower]


def is_followed(follower: Any) -> bool:
    """Whether `follower` sees backward passes."""
    return any(each is follower for each in living())


def living() -> list[Follower]:
    return [follower for each in _followers if (follower := each()) is not None]


def release_former(parameters: Iterable[nn.Parameter]) -> None:
    """Release what follows any of `parameters`, as they are prepared again."""
    ids = {id(parameter) for parameter in parameters}
    for follower in living():
        if any(id(parameter) in ids for parameter in follower.given_parameters):
            follower.release()


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of every backward pass."""
    install()
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextlib.contextmanager
def keeping_seeds() -> Iterator[None]:
    """Within it backward passes begin with the gradients that they are given: they are
    parts of one pass, and the loss that this begins with is weighed already."""
    global _keeps_seeds
    _keeps_seeds = True
    try:
        yield
    finally:
        _keeps_seeds = False


def is_part() -> bool:
    """Whether a backward pass is a part of one: its roots are no losses of a loop's."""
    return _keeps_seeds


def install() -> None:
    """Put ourselves between `torch.autograd` and its engine, once in a process."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        # A function that the loop compiles may call it: what the ranks then compare
        # and exchange would be compiled, too.
        eager: Callable[..., Any] = torch.compiler.disable(_run)
        return functools.partial(eager, original)

    wrap_backward(wrap)


def _run(
    run: Callable[..., Any], roots: Roots, seeds: Any, *args: Any, **kwargs: Any
) -> Any:
    global _is_inside
    followers = living()
    for follower in followers:
        if follower.in_one_thread:
            run = functools.partial(_run_in_one_thread, run)
            break
    is_backward = kwargs.get("accumulate_grad", True)
    if _is_inside and is_backward:
        return _run_inside(run, roots, seeds, *args, **kwargs)
    if not is_backward:
        for watcher in _watchers:
            watcher.differentiating(args[2], args[1], is_within=_is_inside)
    if not (is_backward and (followers or _watchers)):
        return run(roots, seeds, *args, **kwargs)
    _is_inside = has_failed = True
    begun: list[Watcher] = []
    reached: list[Follower] = []
    hooks: list[Any] = []
    try:
        for watcher in _watchers:
            seeds = watcher.begin(roots, seeds, args[1], args[2])
            begun.append(watcher)
        if followers:
            reach = _Reach(followers, roots, reached)
            for node in {*map(_node_of, roots)} - {None}:
                hooks.append(node.register_prehook(reach))
        with without_compiled_autograd():
            result = run(roots, seeds, *args, **kwargs)
        has_failed = False
        return result
    finally:
        _is_inside = False
        _end(reached, hooks, begun, has_failed=has_failed)


def _run_in_one_thread(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.set_multithreading_enabled(False):
        return run(*args, **kwargs)


def _end(
    reached: list[Follower],
    hooks: list[Any],
    begun: list[Watcher],
    *,
    has_failed: bool,
) -> None:
    """Tell them that the pass has ended; each, whatever the one before it raises."""
    try:
        while reached:
            reached.pop(0).end_backward(has_failed=has_failed)
        while hooks:
            hooks.pop().remove()
        while begun:
            begun.pop(0).end(has_failed=has_failed)
    finally:
        if reached or hooks or begun:
            _end(reached, hooks, begun, has_failed=has_failed)


def _run_inside(
    run: Callable[..., Any], roots: Roots, seeds: Any, *args: Any, **kwargs: Any
) -> Any:
    """A pass within a pass, as of a block that is checkpointed with
    `use_reentrant=True`: its parameters are out of sight of the pass around it."""

    def refuse(gradients: Any) -> None:
        for follower in living():
            if any(will_execute(node) for _, node in follower.accumulators()):
                raise UnsupportedLoopError(
                    "a backward pass runs another one within it, as a block does that "
                    "is checkpointed with use_reentrant=True, or a "
                    "torch.autograd.Function that calls backward(): the gradients of "
                    "the inner one would not be averaged. Write checkpoint(..., "
                    "use_reentrant=False), as PyTorch recommends, or give "
                    "--activation-checkpointing; a Function has to return gradients, "
                    "from torch.autograd.grad(), and get the parameters as inputs"
                )

    hooks = [n.register_prehook(refuse) for n in {*map(_node_of, roots)} - {None}]
    try:
        return run(roots, seeds, *args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()


class _Reach:
    """Finds, as a pass begins, which parameters it will give gradients to."""

    def __init__(
        self, followers: Sequence[Follower], roots: Roots, reached: list[Follower]
    ) -> None:
        self._followers = followers
        self._roots = roots
        self._reached = reached
        self._is_done = False

    def __call__(self, gradients: Any) -> None:
        if self._is_done:  # for another root
            return
        self._is_done = True
        for follower in self._followers:
            used = _used_of(follower)
            if used:
                follower.check_ranks()
                follower.is_reached = True
                if not _keeps_seeds:
                    follower.course.backward()
                follower.begin_backward(self._roots, used)
                self._reached.append(follower)


def _used_of(follower: Follower) -> list[nn.Parameter]:
    """Those of its parameters that the pass under way gives gradients to."""
    accumulators = follower.accumulators()
    used = [each for each in accumulators if will_execute(each[1])]
    if len(used) < len(accumulators):
        unused = [each for each in accumulators if not will_execute(each[1])]
        if follower.have_moved(used, unused):
            return _used_of(follower)
    return [parameter for parameter, _ in used]


def _node_of(root: Any) -> Any:
    return root.grad_fn if isinstance(root, torch.Tensor) else root.node
