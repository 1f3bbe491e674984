"""The optimizer that a training loop sees: it steps when its step is complete."""

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import ItemsView
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import MutableMapping
from collections.abc import Sequence
from collections.abc import ValuesView
from dataclasses import dataclass
from typing import Any
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from labkit.checks import UnsupportedLoopError
from labkit.checks import short_repr
from labkit.compat.torch import register_pytree_node
from labkit.compat.torch import unscaled_before_step
from labkit.rank.steps.forward_state import ForwardState
from labkit.rank.steps.forward_state import differing
from labkit.rank.steps.forward_state import digest
from labkit.strategies.autograd.backward import is_followed
from labkit.strategies.model.gradients import PartitionedParameter
from labkit.strategies.model.shards import EACH_ITS_OWN
from labkit.strategies.prepared import Closure
from labkit.strategies.prepared import Prepared
from labkit.strategies.relay.parameters import StagedParameter

STATE_IN_PARTS = (
    "the loop looks for a parameter in optimizer.state, and under {strategy} the "
    "states of all parameters of a group are in one flat tensor, of which this rank "
    "has a part. optimizer.state.clear() resets all states, and a loop over "
    "optimizer.state.values() changes those of every parameter alike; for one "
    "parameter's use ddp"
)
STATES_OF_PART = (
    "the loop reads one parameter's state from optimizer.state_dict(), and under "
    "{strategy} {what}. To save and load the states, keep the whole dict, or call "
    "save_checkpoint(folder); to read one parameter's use ddp"
)
IN_ONE_TENSOR = (
    "the states of all parameters of a group are in one flat tensor, of which this "
    "rank has a part, under the group's number"
)
ON_ANOTHER_RANK = "a rank has the states of its own stage's parameters alone"
STATE_OF_STAGE = (
    "the loop looks for a parameter in optimizer.state that another rank's stage has, "
    "with its state. optimizer.state.clear() resets all states, and a loop over "
    "optimizer.state.values() changes those that this rank has; to read one use ddp"
)
STATES_OF_RANK = (
    "the loop goes over {what}, which under {strategy} holds this rank's part of the "
    "states. Changing every one of them in the same way works; a sum, a norm, a "
    "maximum or a count is of this part only. For that of all, use ddp"
)
OWN_OF_PARTS = (
    "{name} expects whole parameters, and under {strategy} a rank has only a part of "
    "them; write what it does into the loop, or use ddp"
)
OWN_OF_STAGE = (
    "{name} expects all parameters, and under {strategy} a rank updates those of its "
    "own stage alone; write what it does into the loop, or use ddp"
)
OWN_OF_SERVER = (
    "{name} is the optimizer's own, and under {strategy} the optimizer that steps is "
    "the servers': what it counts or keeps is not here, and what is set here does not "
    "reach it. Set it before prepare, keep what changes in optimizer.param_groups, or "
    "use ddp"
)
STEP_OF_OTHERS = (
    "the loop gives {kind}.step {names}, and under {strategy} {who} the step, without "
    "it. Have the class read it from optimizer.param_groups, where the loop sets it "
    "before the step, or use ddp"
)
IN_INFERENCE = (
    "optimizer.step() is called under torch.inference_mode(), of which no later step "
    "could take a tensor. Call it outside of that: it needs no mode, and none is faster"
)
UNNAMED = (
    "the loop calls {kind}.step with {found}, which is not a closure; give it by name, "
    "as in optimizer.step(scale=0.5)"
)

COPIED = (
    "the loop copies the optimizer after prepare, by copy.deepcopy, and the copy would "
    "step parameters of its own, which belong to no model. Keep its state instead: "
    "kept = copy.deepcopy(optimizer.state_dict()), and later "
    "optimizer.load_state_dict(kept)"
)

STEPS_EAGERLY = (
    "all ranks step together, and a compiled function leaves that to Python; compile "
    "without fullgraph=True what calls it"
)

TakeStep = Callable[["PreparedOptimizer", Closure | None], Any]


@unscaled_before_step
class PreparedOptimizer(torch.optim.Optimizer):
    """Stands for the user's optimizer: the same groups and state.

    With `--accumulate K` a `step()` or `zero_grad()` between the microbatches of one
    step does nothing, and the loop sees no gradients there: `parameter.grad` is None
    until they are whole. Clipping, loss scaling and the strategy's own step are in
    `Prepared.step`, which `take_step` runs.
    """

    def __init__(self, prepared: Prepared, take_step: TakeStep) -> None:
        # Not the base's __init__: groups and state are the inner optimizer's.
        self.prepared = prepared
        self.take_step = take_step
        self.mean_loss: Callable[[Any], Any] = lambda loss: loss
        """The mean over all ranks of a loss that a closure returns."""
        self.on_zero_grad: Callable[[], None] = lambda: None
        """Called where the loop sets all gradients to zero."""
        self.on_note: Callable[[str], None] = lambda text: None
        """Called with a sentence to show under the run."""
        self.num_ranks = 1
        """That train this model together."""
        self.forward_state = ForwardState(prepared)
        self._progress = StepProgress()
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters whose gradients the loop does not see yet, and the gradients."""
        self._is_made = True
        """Whether what the loop sets is the user's optimizer's."""
        self.begin_microbatch()

    @classmethod
    def named_as(cls, kind: type) -> "type[PreparedOptimizer]":
        """For a loop that asks for `type(optimizer).__name__`.

        A function that the loop compiles may step: ranks do so together, and what they
        compare and exchange is no part of a compiled graph.
        """
        eager = functools.partial(torch.compiler.disable, reason=STEPS_EAGERLY)
        methods = {name: eager(getattr(cls, name)) for name in ("step", "zero_grad")}
        return type(kind.__name__, (cls,), methods)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of the user's optimizer, for `isinstance`."""
        return type(self.prepared.optimizer)

    @property
    def held_back(self) -> bool:
        """Whether the last `step()` waits for further microbatches."""
        return self._progress.is_held_back

    def is_of(self, scheduler: LRScheduler) -> bool:
        """Whether a scheduler sets the rates of this optimizer, or of the user's own,
        for which it was made before `prepare`."""
        return any(scheduler.optimizer is o for o in (self, self.prepared.optimizer))

    def begin_microbatch(self, is_last: bool | None = None) -> None:
        """Whether the step is complete after the next backward pass; a loop over data
        of its own has `--accumulate` backward passes a step."""
        if is_last is None:
            is_last = self._progress.num_held >= self.prepared.options.accumulate - 1
        self.prepared.begin_microbatch(is_last=is_last)

    # ---- around every backward pass, of this or another model ----

    def begin_backward(self) -> None:
        self.prepared.check_layout()
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        self.prepared.scale_gradients()

    def end_backward(self, *, has_failed: bool) -> None:
        self._progress.has_passed = True
        if self.prepared.is_last:
            if not has_failed:  # or ranks would wait for one that has an error to raise
                self.prepared.unscale_gradients()
            return
        for parameter in self.prepared.updated():
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def drop_held(self) -> None:
        """Forget the microbatches of a step that the loop has broken off."""
        if self.is_held:
            self._progress.num_held = 0
            self._progress.has_passed = False
            self._hidden.clear()
            self.prepared.zero_grad()

    # ---- the step ----

    def step(
        self, closure: Closure | None = None, *unnamed: Any, **arguments: Any
    ) -> Any:
        if torch.is_inference_mode_enabled():
            raise UnsupportedLoopError(IN_INFERENCE)
        self.prepared.check_ranks()
        self._check_arguments(closure, unnamed, arguments)
        self.prepared.step_arguments = arguments
        loss = None
        if closure is not None and not steps_once(self.prepared.optimizer):
            return self._step_with(closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.prepared.course.step()
        self._check_gradients()
        self.prepared.is_reached = False
        progress, is_last = self._progress, self.prepared.is_last
        progress.has_passed = progress.is_fresh = False
        self.forward_state.look(num_ranks=self.num_ranks, is_last=is_last)
        progress.is_held_back = not is_last
        if progress.is_held_back:
            progress.num_held += 1
        else:
            progress.num_held = 0
            self.take_step(self, None)
        self.begin_microbatch()
        return self._take_returned() if closure is None else loss

    def _check_arguments(
        self, closure: Any, unnamed: Sequence[Any], arguments: Mapping[str, Any]
    ) -> None:
        """UnsupportedLoopError for what would not reach a step of the user's own."""
        kind, strategy = type(self.prepared.optimizer).__name__, self.prepared.strategy
        if closure is not None and not callable(closure):
            unnamed = (closure, *unnamed)
        if unnamed:
            found = short_repr(unnamed[0])
            raise UnsupportedLoopError(UNNAMED.format(kind=kind, found=found))
        if not arguments or not (strategy.has_own_gradients or strategy.server):
            return
        who = "the servers take" if strategy.server else "DeepSpeed takes"
        names = ", ".join(arguments)
        raise UnsupportedLoopError(
            STEP_OF_OTHERS.format(
                kind=kind, names=names, strategy=strategy.name, who=who
            )
        )

    def _check_gradients(self) -> None:
        """UnsupportedLoopError for gradients that no backward pass through the model
        has given, where several ranks or microbatches share a step. Collective."""
        prepared = self.prepared
        has_microbatches = prepared.options.accumulate > 1
        is_alone = self.num_ranks == 1 and not has_microbatches
        if prepared.is_reached or is_alone or not is_followed(prepared):
            return
        found = prepared.gradients()
        if prepared.strategy.is_sharded:
            is_own = self._progress.is_fresh and bool(found)
        elif has_microbatches:
            is_own = any(bool(each.count_nonzero()) for each in found)
        else:  # they may be made equal, or be those of the last step
            number = digest(found, prepared.device)
            is_own = any(differing([number], prepared.peers))
        if is_own:
            raise UnsupportedLoopError(
                "the loop steps with gradients that no backward pass through the "
                "prepared model has computed, such as those of torch.func.grad or of a "
                "copy of the model. They are of this rank's samples and microbatch "
                "alone. Compute a loss with the model and call loss.backward(), which "
                "averages them, or use %%dist_train single without --accumulate"
            )

    def _step_with(self, closure: Closure) -> Any:
        """For an optimizer that evaluates the loss as often as it likes."""
        kind, options = type(self.prepared.optimizer).__name__, self.prepared.options
        if self.prepared.strategy.is_partitioned:
            raise UnsupportedLoopError(
                f"{kind}.step(closure) computes with all parameters and gradients at "
                "once, and this strategy has them in parts; use ddp, or an optimizer "
                "that evaluates the loss once a step"
            )
        for name, is_given in {
            "--accumulate": options.accumulate > 1,
            "--clip": options.clip is not None,
            "--precision fp16": self.prepared.scaler is not None,
        }.items():
            if is_given:
                raise UnsupportedLoopError(
                    f"{kind}.step(closure) evaluates the loss several times per step, "
                    f"and {name} does not work with that; leave it out, or do the same "
                    "within the closure"
                )

        def mean_loss() -> Any:
            loss = closure()
            self.prepared.course.step()
            return self.mean_loss(loss)

        self.take_step(self, mean_loss)
        return self._take_returned()

    def _take_returned(self) -> Any:
        returned, self.prepared.returned = self.prepared.returned, None
        return returned

    @property
    def is_held(self) -> bool:
        """Whether some microbatches of a step have been, and not the last."""
        return self._progress.num_held > 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        is_held = self.is_held
        if is_held and self._progress.has_passed:
            raise UnsupportedLoopError(
                "the loop calls zero_grad() between a backward pass and its step; with "
                "--accumulate this would discard the gradients of the step's earlier "
                "microbatches, too. Leave out --accumulate for this loop"
            )
        if not is_held:
            self._hidden.clear()
            self._progress.is_fresh |= set_to_none
            self.prepared.zero_grad(set_to_none)
            self.on_zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.prepared.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        inner = self.prepared.optimizer
        before, after = (
            [[id(parameter) for parameter in group["params"]] for group in each]
            for each in (inner.param_groups, groups)
        )
        if before != after:
            raise UnsupportedLoopError(
                "the loop sets optimizer.param_groups to groups of other parameters "
                "after prepare, and this strategy needs all groups in prepare; make "
                "them before it, and change lr and other settings in place: "
                "optimizer.param_groups[0]['lr'] = 0.1"
            )
        inner.param_groups = groups

    @property
    def state(self) -> Any:
        state, given = self.prepared.optimizer.state, self.prepared.given_parameters
        has_parts = any(isinstance(each, PartitionedParameter) for each in given)
        if not has_parts:
            return state
        return StateInParts(state, self.prepared.strategy.name, self.on_note)

    @state.setter
    def state(self, state: Any) -> None:
        if isinstance(state, StateInParts):
            state = state.found
        if self.prepared.strategy.is_partitioned:
            ours = set(
                map(id, (*self.prepared.updated(), *self.prepared.optimizer.state))
            )
            if any(id(parameter) not in ours for parameter in state):
                raise UnsupportedLoopError(
                    "the loop sets optimizer.state to the state of parameters that "
                    "this rank does not update; to reset the state, set it to "
                    "collections.defaultdict(dict); to load one, call "
                    "load_checkpoint(folder), which works across strategies"
                )
        self.prepared.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.prepared.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UnsupportedLoopError(
            "the loop calls add_param_group after prepare, and the strategy needs all "
            "parameter groups in prepare; add them to the optimizer before it"
        )

    def __getattr__(self, name: str) -> Any:
        """What the user's optimizer has besides, as `optimizer.train()`."""
        if name in ("prepared", "__setstate__"):
            raise AttributeError(name)
        found = getattr(self.prepared.optimizer, name)
        self._check_own(name, is_method=callable(found))
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """What is not of this class, as `optimizer.scale = 0.5`, goes to the user's
        optimizer; a scheduler's wrapper of `step` stays here."""
        if "_is_made" not in vars(self) or self._has(name):
            super().__setattr__(name, value)
        else:
            self._check_own(name)
            setattr(self.prepared.optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if self._has(name):
            super().__delattr__(name)
        else:
            delattr(self.prepared.optimizer, name)

    def _has(self, name: str) -> bool:
        return name in vars(self) or hasattr(PreparedOptimizer, name)

    def _check_own(self, name: str, *, is_method: bool = False) -> None:
        """UnsupportedMethodError for what the user's optimizer has besides, where it
        is not here as in one process. What begins with _ is torch's."""
        strategy = self.prepared.strategy
        if strategy.server is not None:
            why = OWN_OF_SERVER
        elif is_method and strategy.is_partitioned:
            why = OWN_OF_STAGE if strategy.has_whole_parameters else OWN_OF_PARTS
        else:
            return
        if not name.startswith("_"):
            name = f"{type(self.prepared.optimizer).__name__}.{name}"
            raise UnsupportedMethodError(why.format(name=name, strategy=strategy.name))

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's; of this rank's part of the states alone where a
        strategy has them in parts: `part` is [rank, number of ranks, strategy]."""
        prepared = self.prepared
        strategy = prepared.strategy
        with prepared.stepping_groups():
            found = prepared.optimizer.state_dict()
        if not strategy.is_partitioned:
            return found
        if strategy.has_own_gradients or self._has_stages:
            what = ON_ANOTHER_RANK if self._has_stages else IN_ONE_TENSOR
            why = STATES_OF_PART.format(strategy=strategy.name, what=what)
            what = 'optimizer.state_dict()["state"]'
            of_rank = STATES_OF_RANK.format(what=what, strategy=strategy.name)
            states = StatesOfPart(found["state"], why)
            states.on_walk = lambda: self.on_note(of_rank)
            found = {**found, "state": states}
            if strategy.has_own_gradients:
                for number, each in dict.items(states):
                    states[number] = FlatState(each, why)
        return {**found, "part": self._part()}

    @property
    def _has_stages(self) -> bool:
        given = self.prepared.given_parameters
        return any(isinstance(each, StagedParameter) for each in given)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        part = state_dict.get("part")
        if self.prepared.strategy.is_partitioned and part not in (None, self._part()):
            (rank, of, strategy), (our_rank, our_of, ours) = part, self._part()
            raise UnsupportedLoopError(
                f"the state dict holds rank {rank} of {of}'s part of the optimizer's "
                f"state under {strategy}; this is rank {our_rank} of {our_of} under "
                f"{ours}. {EACH_ITS_OWN}"
            )
        if self.prepared.strategy.is_partitioned and part is None:
            self.prepared.load_optimizer(state_dict)  # of a plain optimizer
            return
        if self.prepared.strategy.is_partitioned:
            state_dict = {key: state_dict[key] for key in state_dict if key != "part"}
            state_dict["state"] = dict(dict.items(state_dict["state"]))
        with self.prepared.stepping_groups():
            self.prepared.optimizer.load_state_dict(state_dict)

    def _part(self) -> list[Any]:
        # Of all ranks: those that share the layers of a model have parts of their own.
        return [dist.get_rank(), dist.get_world_size(), self.prepared.strategy.name]

    def __repr__(self) -> str:
        return repr(self.prepared.optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedLoopError(COPIED)


@dataclass(slots=True)
class StepProgress:
    """How far the loop is with a step; each step sets this, so it is no attribute of
    the optimizer itself, which asks whose an attribute is."""

    num_held: int = 0
    """Calls of `step()` that wait for the step's last microbatch."""
    is_held_back: bool = False
    """Whether the last one does."""
    has_passed: bool = False
    """Whether there was a backward pass since then."""
    is_fresh: bool = True
    """Whether there can be no gradients of the step before."""


class StatesOfPart(dict[Any, Any]):
    """In a state dict, of parameters of which this rank has not all. A file has it as a
    plain one, and so has what a loop or a library makes of it."""

    def __init__(self, found: Mapping[Any, Any], why: str = "") -> None:
        """Without `why`, as where Accelerate makes one of the same type, all is read as
        from a plain one."""
        super().__init__(found)
        self._why = why
        self.on_walk: Callable[[], None] = lambda: None
        """Called where a loop goes over them, and not where they are saved or copied
        as a whole."""

    def __iter__(self) -> Iterator[Any]:
        self.on_walk()
        return super().__iter__()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self.on_walk()
        return super().values()

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        self.on_walk()
        return super().items()

    def __missing__(self, key: Any) -> Any:
        raise UnsupportedLoopError(self._why) if self._why else KeyError(key)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Of the kinds of dicts that torch.load takes without weights_only=False.
        return OrderedDict, (), None, None, iter(super().items())


class FlatState(StatesOfPart):
    """The state of all parameters of a group, of which each tensor is a part."""

    # So that `dict` copies one as it is, and does not read it.
    __iter__ = dict.__iter__

    def __missing__(self, key: Any) -> Any:
        raise KeyError(key)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if self._why and isinstance(found, torch.Tensor) and found.dim():
            raise UnsupportedLoopError(self._why)
        return found


for kind in (StatesOfPart, FlatState):
    # Else tree_map takes one for a leaf, and a snapshot has the tensors themselves.
    register_pytree_node(
        kind,
        lambda states: ([*dict.values(states)], [*dict.keys(states)]),
        lambda values, keys: dict(zip(keys, values, strict=True)),
    )


class StateInParts(MutableMapping[Any, Any]):
    """The state of an optimizer, of which this rank has not that of every parameter."""

    def __init__(self, found: Any, strategy: str, note: Callable[[str], None]) -> None:
        self.found = found
        self._strategy = strategy
        self._note = note

    def _check(self, key: Any, *, is_dropped: bool = False) -> None:
        """UnsupportedLoopError for a parameter whose state is not under its own name,
        or on another rank, which drops it, too."""
        if isinstance(key, StagedParameter):
            if key.is_absent and not is_dropped:
                raise UnsupportedLoopError(STATE_OF_STAGE)
        elif isinstance(key, PartitionedParameter):
            raise UnsupportedLoopError(STATE_IN_PARTS.format(strategy=self._strategy))

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return self.found[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        self.found[key] = value

    def __delitem__(self, key: Any) -> None:
        self._check(key)
        del self.found[key]

    def __contains__(self, key: Any) -> bool:
        self._check(key)
        return key in self.found

    def __iter__(self) -> Iterator[Any]:
        if any(self.found.values()):
            what = "optimizer.state"
            self._note(STATES_OF_RANK.format(what=what, strategy=self._strategy))
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __repr__(self) -> str:
        return repr(self.found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A parameter of a stage stays: all ranks would gather it, and each has others.
        own = {id(key): key for key in self.found if isinstance(key, StagedParameter)}
        # Otherwise a model that is copied with it has the same parameters.
        return copy.deepcopy(self.found, own | memo if own else memo)

    def copy(self) -> Any:
        return self.found.copy()

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return self.found.get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key, is_dropped=bool(default))
        return self.found.pop(key, *default)

    def clear(self) -> None:
        self.found.clear()


class UnsupportedMethodError(UnsupportedLoopError, AttributeError):
    """For `hasattr` there is no such method."""


def steps_once(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step(closure)` of this optimizer evaluates the closure, and then does
    what `step()` does, as all of torch.optim but LBFGS."""
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.optim")
    return is_torchs and not isinstance(optimizer, torch.optim.LBFGS)


@contextlib.contextmanager
def watching_zero_grad(optimizers: list[PreparedOptimizer]) -> Iterator[None]:
    """Have the `zero_grad()` of a prepared model do what its optimizer's does.

    After a forward pass under FSDP the model has other tensors than those that are
    updated, and ZeRO has gradients beside those of the parameters.
    """
    zero_grad = nn.Module.zero_grad

    @functools.wraps(zero_grad)
    def of_prepared(self: nn.Module, set_to_none: bool = True) -> None:
        ours = [each for each in optimizers if each.prepared.module is self]
        if not any(each.is_held for each in ours):
            zero_grad(self, set_to_none)  # of what the optimizer does not update too
        for each in ours:
            each.zero_grad(set_to_none)

    nn.Module.zero_grad = of_prepared  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]


@contextlib.contextmanager
def watching_schedulers(
    note: Callable[[LRScheduler, bool], None], may_step: Callable[[LRScheduler], bool]
) -> Iterator[None]:
    """Call `note` with each learning-rate scheduler that is made (True) or takes a step
    (False). A step that `may_step` does not allow does nothing, except the first one,
    which its constructor takes."""
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
