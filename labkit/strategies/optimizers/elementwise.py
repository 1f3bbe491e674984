"""Whether an optimizer updates each element by itself, found out by trying."""

import contextlib
import copy
import io
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import HOOKS_OF_STEP
from labkit.compat.torch import global_hooks
from labkit.strategies.mesh.collectives import NoCollectives
from labkit.strategies.model.states import plain_shape
from labkit.strategies.own_state import OwnState

WHOLE_PARAMETER_OPTIMIZERS = {
    *("ADAFACTOR", "LAMB", "LARS", "MUON", "SHAMPOO", "SOAP"),
    *("ADAMP", "SGDP", "SWATS"),  # in some steps, which a trial need not have
}
UNTRIED = (
    "{kind} cannot be tried before the run, with small parameters in parts. Under "
    "{strategy} a rank updates parts of the parameters: if {kind} computes a norm, a "
    "mean or a sum of a parameter, or looks at its shape, the result is not that of "
    "one process. In that case use ddp; if it updates each element by itself, all is "
    "well"
)

SCALES = (1.0, 3.0, 100.0, 1.0)
"""Of the gradients of the steps that are tried: some optimizers clip those which are
large, or larger than before, and others look where the momentum is another way."""
NUM_GROUPS, NUM_PARAMETERS = 8, 4
"""That are tried of an optimizer, and of a group."""
SHAPES: Mapping[int, tuple[int, ...]] = {
    1: (24,),
    2: (6, 4),
    3: (2, 3, 4),
    4: (2, 3, 2, 2),
}
"""Of the small parameters in the place of those with as many dimensions."""
LEAST = 0.01
"""To which learning rates and weight decays are raised, so that they can be seen."""

_LEFT_OUT = ("step", "state", "param_groups", *HOOKS_OF_STEP)
"""Of an optimizer: a scheduler's wrapper, what is new, and what the user has called."""

Groups = list[list[torch.Tensor]]
"""Tensors by the optimizer's groups."""
Update = tuple[Groups, list[float]]
"""What a step makes of the parameters, and of the numbers in the groups."""


def check_elementwise(
    optimizer: torch.optim.Optimizer,
    device: torch.device | None = None,
    *,
    is_by_group: bool = True,
) -> str | None:
    """UnsupportedLoopError for an optimizer that looks at a parameter as a whole, or at
    several: of parts of them, it would make something else. UNTRIED where it cannot be
    known.

    With a `device` it is tried there, on parts as ZeRO makes them: a rank's part of a
    group is one flat parameter, and each group is stepped by itself. Without
    `is_by_group` they are parts of the single parameters.
    """
    kind = type(optimizer)
    if kind.__name__.upper() in WHOLE_PARAMETER_OPTIMIZERS:
        raise UnsupportedLoopError(
            f"{kind.__name__} computes its update from a whole parameter, but under "
            "this strategy a rank has only a part of it; use ddp, or an element-wise "
            "optimizer such as AdamW"
        )
    if device is not None and not takes_groups(optimizer):
        raise UnsupportedLoopError(
            f"{kind.__name__} cannot be given the parts of parameters that a rank "
            "updates under this strategy: it wraps another optimizer, whose "
            "param_groups it has, or does not call torch.optim.Optimizer.__init__. "
            "Give prepare the optimizer within and do the rest in the loop, or use ddp"
        )
    if device is None:
        return None
    found = is_elementwise(optimizer, device, is_by_group)
    if found is False:
        raise UnsupportedLoopError(
            f"{kind.__name__} computes an update from more than one element of a "
            "parameter: in a trial, parameters split in two got different updates from "
            "whole ones. The cause may be a norm, a mean or a sum, a dependence on "
            "shapes, one step count for all groups, or random numbers. Under this "
            "strategy a rank has only a part of the parameters; use ddp, or an "
            "element-wise optimizer such as AdamW (to clip gradients, with --clip NORM)"
        )
    return None if found else UNTRIED


def takes_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can have other groups than its own, and be stepped as torch
    steps those that it has made."""
    groups = getattr(type(optimizer), "param_groups", None)
    is_anothers = isinstance(groups, property) and groups.fset is None
    return not is_anothers and all(hasattr(optimizer, name) for name in HOOKS_OF_STEP)


def check_zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """UnsupportedLoopError for a class whose zero_grad() keeps gradients, or changes
    parameters: where the step has taken the gradients, in parts, there is nothing to
    keep, and the parameters are not those of the loop."""
    kind = type(optimizer)
    if kind.zero_grad is torch.optim.Optimizer.zero_grad:
        return
    chosen = [group["params"][:1] for group in optimizer.param_groups]
    made = [[nn.Parameter(torch.ones(2)) for _ in each] for each in chosen]
    parameters = [each for group in made for each in group]
    device = torch.device("cpu")
    does = ""
    with set_aside(kind, device), no_collectives():
        try:
            twin = twin_of(optimizer, chosen, made, is_by_group=True)
            for _ in range(3):  # it may do so at each second call
                for each in parameters:
                    each.grad = torch.ones(2)
                twin.zero_grad()
                if any(
                    each.grad is not None and each.grad.any() for each in parameters
                ):
                    does = "keeps gradients"
        except Exception:  # of its own: it is not known what it does
            return
    if any(bool((each != 1).any()) for each in parameters):
        does = "changes parameters"
    if does:
        raise UnsupportedLoopError(
            f"{kind.__name__}.zero_grad() {does}, and under this strategy a rank has "
            "only parts of them, in the optimizer's own step. Do it in the loop, or "
            "use ddp or fsdp"
        )


def is_elementwise(
    optimizer: torch.optim.Optimizer, device: torch.device, is_by_group: bool
) -> bool | None:
    """Whether some steps with small parameters, whole and in two parts, are the same;
    None where it cannot be known, as of an optimizer that cannot be made again."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):
        return True
    if hasattr(kind, "__del__"):
        return None  # it may free what the user's has
    chosen = [
        [p for p in choose(group["params"]) if p.requires_grad]
        for group in optimizer.param_groups[:NUM_GROUPS]
    ]
    source = torch.Generator().manual_seed(0)
    start, *gradients = [
        [
            [scale * torch.randn(shape_of(p), generator=source) for p in group]
            for group in chosen
        ]
        for scale in (0.1, *SCALES)
    ]

    def tried(start: Groups, gradients: list[Groups], **how: bool) -> list[Update]:
        with set_aside(kind, device):
            return updates(optimizer, chosen, start, gradients, device, **how)

    try:
        whole = tried(start, gradients)
    except Exception:
        return None
    for number in range(2):

        def part(groups: Groups, number: int = number) -> Groups:
            return part_of(groups, number, is_by_group)

        try:
            gradients_of_part = [*map(part, gradients)]
            found = tried(part(start), gradients_of_part, is_by_group=is_by_group)
        except Exception:
            return False
        expected = [(part(groups), settings) for groups, settings in whole]
        if not all(map(are_same, found, expected)):
            return False
    return True


def choose(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """The first of them, and the first of other numbers of dimensions."""
    found = parameters[:NUM_PARAMETERS]
    for parameter in parameters[NUM_PARAMETERS:]:
        if all(shape_of(parameter) != shape_of(each) for each in found):
            found.append(parameter)
    return found


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of the small one in its place."""
    return SHAPES[min(max(len(plain_shape(parameter)), 1), 4)]


def part_of(groups: Groups, number: int, is_by_group: bool) -> Groups:
    """One of the two halves of each group as one flat tensor, or of each tensor."""
    rows = [[tensor.flatten() for tensor in group] for group in groups]
    if is_by_group:
        rows = [[torch.cat(group)] if group else [] for group in rows]
    return [[row.chunk(2)[number] for row in group] for group in rows]


def are_same(found: Update, expected: Update) -> bool:
    """Whether they are, but for rounding."""
    pairs = [
        (one, other)
        for ours, theirs in zip(found[0], expected[0], strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    pairs.append((torch.tensor(found[1]), torch.tensor(expected[1])))
    return all(
        one.shape == other.shape
        and torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
        for one, other in pairs
    )


def updates(
    optimizer: torch.optim.Optimizer,
    chosen: list[list[nn.Parameter]],
    start: Groups,
    gradients: list[Groups],
    device: torch.device,
    *,
    is_by_group: bool = False,
) -> list[Update]:
    """What each step of another optimizer like this one makes of parameters that begin
    as `start`, which it has in the place of the `chosen` ones."""
    seed(device)
    parameters = [
        [nn.Parameter(each.to(device, copy=True)) for each in group] for group in start
    ]
    twin = twin_of(optimizer, chosen, parameters, is_by_group=is_by_group)
    if callable(train := getattr(twin, "train", None)):  # as of schedule-free ones
        train()
    groups = twin.param_groups
    found: list[Update] = []
    for given in gradients:
        for ours, theirs in zip(parameters, given, strict=True):
            for parameter, gradient in zip(ours, theirs, strict=True):
                parameter.grad = gradient.to(device, copy=True)
        with nullcontext() if found or is_by_group else no_collectives():
            for some in [[group] for group in groups] if is_by_group else [groups]:
                twin.param_groups = some
                twin.step()
        twin.param_groups = groups
        after = [[p.detach().to("cpu", copy=True) for p in ours] for ours in parameters]
        numbers = [
            float(value)
            for group in groups
            for value in group.values()
            if isinstance(value, int | float)
            or (isinstance(value, torch.Tensor) and value.numel() == 1)
        ]
        found.append((after, numbers))
    return found


def twin_of(
    optimizer: torch.optim.Optimizer,
    chosen: list[list[nn.Parameter]],
    parameters: list[list[nn.Parameter]],
    *,
    is_by_group: bool,
) -> torch.optim.Optimizer:
    """Another optimizer of this kind and these settings, with `parameters` in the place
    of the `chosen` ones of its groups; TypeError where it cannot be made."""
    kind = type(optimizer)
    twin: torch.optim.Optimizer = kind.__new__(kind)
    state: Any = defaultdict(dict)
    known: dict[int, Any] = {id(optimizer): twin, id(optimizer.state): state}
    for group in optimizer.param_groups:
        for each in group["params"]:
            known[id(each)] = nn.Parameter(torch.zeros(1))  # without a gradient
    groups: list[dict[str, Any]] = []
    for group, old, new in zip(
        optimizer.param_groups, chosen, parameters, strict=False
    ):
        if not is_by_group:  # or it finds only the parts, in its groups
            known.update((id(a), b) for a, b in zip(old, new, strict=True))
        ids = {id(each): n for n, each in enumerate(group["params"])}
        places = [ids[id(each)] for each in old]
        settings = {
            key: [value[n] for n in places]
            if isinstance(value, list) and len(value) == len(ids)
            else value
            for key, value in group.items()
            if key != "params"
        }
        check_small(settings, known, set())
        made: dict[str, Any] = {"params": new, **copy.deepcopy(settings, known)}
        for key in made.keys() & {"lr", "weight_decay"}:
            if 0 < made[key] < LEAST or (key == "lr" and made[key] == 0):
                made[key] = made[key] * 0 + LEAST
        known[id(group)] = made
        groups.append(made)
    known[id(optimizer.param_groups)] = groups
    attributes = {k: v for k, v in vars(optimizer).items() if k not in _LEFT_OUT}
    check_small(attributes, known, set())
    vars(twin).update(copy.deepcopy(attributes, known))
    twin.state, twin.param_groups = state, groups
    twin.__setstate__({})
    return twin


def check_small(value: Any, known: dict[int, Any], seen: set[int]) -> None:
    """TypeError for what holds a module, or a large tensor, and is not to be copied."""
    if id(value) in known or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Generator):
        known[id(value)] = value.clone_state()
    elif isinstance(value, nn.Module) or hasattr(type(value), "__del__"):
        raise TypeError(f"{type(value).__name__} cannot be copied")
    elif isinstance(value, torch.Tensor):
        if value.numel() > 1024:
            raise TypeError("a large tensor")
    elif isinstance(value, dict):
        for each in (*value.keys(), *value.values()):
            check_small(each, known, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            check_small(each, known, seen)
    elif not isinstance(value, type) and not callable(value):
        check_small(getattr(value, "__dict__", None), known, seen)


def seed(device: torch.device) -> None:
    """Seed all that draws random numbers here."""
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.manual_seed(0)
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


def no_collectives() -> contextlib.AbstractContextManager[Any]:
    """Within it an optimizer that sends fails, before it has sent anything."""
    if not dist.is_initialized():
        return nullcontext()
    return NoCollectives(range(dist.get_world_size()), "it sends, and is not tried")


@contextlib.contextmanager
def set_aside(kind: type[Any], device: torch.device) -> Iterator[None]:
    """Leave as they are: random numbers, hooks of all optimizers, what is printed, and
    what a step counts or keeps in its module or its class."""
    state = OwnState(kind)
    hooks = [(each, dict(each)) for each in global_hooks()]
    devices = [device] if device.type == "cuda" else []
    try:
        for each, _ in hooks:
            each.clear()
        with (
            torch.random.fork_rng(devices),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, before in hooks:
            each.update(before)
        state.set_back()
