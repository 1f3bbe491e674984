"""Cuts a model into stages: which of its layers each rank has."""

import functools
import itertools
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from labkit.checks import UnsupportedLoopError
from labkit.checks import short_repr

CUTS = "cuts"
"""Of `--config`: the names of the modules with which the second, third, ... stage
begins."""


@dataclass(frozen=True)
class Stages:
    """The modules that a model is cut between, each with the stage that has it."""

    names: list[str]
    modules: list[nn.Module]
    stage_of: list[int]
    num_stages: int

    def owners(self) -> dict[int, set[int]]:
        """By the id of each parameter, the stages that have it: several where modules
        of several stages share it, all of them where it is in none of the modules."""
        found: dict[int, set[int]] = {}
        for module, stage in zip(self.modules, self.stage_of, strict=True):
            for parameter in module.parameters():
                found.setdefault(id(parameter), set()).add(stage)
        return found

    def of_copy(self, model: nn.Module) -> "Stages":
        """Those of a copy of the model."""
        found = dict(model.named_modules())
        own = zip(self.names, self.modules, strict=True)
        modules = [found.get(name, module) for name, module in own]
        return replace(self, modules=modules)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules between which a model can be cut, by name, in the order in which they
    were registered: those in a ModuleList or Sequential, and else the outermost that
    have parameters of their own."""
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str, is_list: bool) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}".lstrip(".")
            if not any(True for _ in child.parameters()):
                continue
            if isinstance(child, nn.ModuleList | nn.Sequential):
                visit(child, path, True)
            elif is_list or has_own(child):
                if child not in found.values():
                    found[path] = child
            else:
                visit(child, path, False)

    visit(model, "", isinstance(model, nn.ModuleList | nn.Sequential))
    return found


def has_own(module: nn.Module) -> bool:
    return is_parametrized(module) or any(
        True for _ in module.named_parameters(recurse=False)
    )


def cut(model: nn.Module, num_stages: int, config: Mapping[str, Any]) -> Stages:
    """The stages of `model`, of about equal cost unless `config` names the cuts.

    Raises UnsupportedLoopError, and ValueError for cuts that cannot be.
    """
    layers = layers_of(model)
    names = list(layers)
    if len(names) < num_stages:
        shown = [*names[:4], *(["..."] if len(names) > 4 else [])]
        what = f"into {len(names)} layers at most ({', '.join(shown)})"
        raise UnsupportedLoopError(
            f"pipeline has {num_stages} stages, and this model can be cut "
            f"{what if len(names) > 1 else 'nowhere'}: each stage needs a layer. Put "
            "the model's layers into a torch.nn.Sequential or ModuleList, or have "
            "fewer stages: fewer ranks along pp, for example with --mesh dp=2,pp=2 on "
            "four, and no --schedule interleaved; or use ddp or fsdp"
        )
    cuts = config.get(CUTS)
    if cuts is not None:
        begins = begins_of(cuts, names, num_stages)
    else:
        begins = equal_cuts([cost_of(each) for each in layers.values()], num_stages)
    stage_of = [
        sum(place >= begin for begin in begins[1:]) for place in range(len(names))
    ]
    return Stages(names, list(layers.values()), stage_of, num_stages)


def begins_of(cuts: Any, names: Sequence[str], num_stages: int) -> list[int]:
    """The places of `names` at which stages begin; ValueError for what cannot be."""
    is_names = isinstance(cuts, list | tuple) and all(isinstance(c, str) for c in cuts)
    if not is_names or len(cuts) != num_stages - 1:
        raise ValueError(
            f'--config: "{CUTS}" is {short_repr(cuts)}; {num_stages} stages need a '
            f"list of {num_stages - 1}: the names of the modules with which the stages "
            f'after the first begin, for example ["{names[len(names) // 2]}"]'
        )
    for name in cuts:
        if name not in names:
            raise ValueError(
                f'--config: "{CUTS}" has {short_repr(name)}; a stage begins with one '
                f"of: {', '.join(names)}"
            )
    places = [0, *(names.index(name) for name in cuts)]
    if any(one >= other for one, other in itertools.pairwise(places)):
        raise ValueError(
            f'--config: "{CUTS}" is {short_repr(cuts)}; name each module once, in the '
            "order of the model, and not its first: that begins the first stage"
        )
    return places


def cost_of(module: nn.Module) -> int:
    """What a layer costs beside others: its multiplications for a sample, as far as
    its parameters tell. An embedding is looked up."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 1
    return 1 + sum(
        parameter.numel()
        for each in module.modules()
        if not isinstance(each, nn.Embedding | nn.EmbeddingBag)
        for _, parameter in each.named_parameters(recurse=False)
    )


def equal_cuts(costs: Sequence[int], num_stages: int) -> list[int]:
    """The places at which stages begin so that the costliest costs least."""

    @functools.cache
    def cheapest(first: int, num: int) -> tuple[int, tuple[int, ...]]:
        """Of `num` stages from the layer `first` on: what the costliest costs, and
        where they begin."""
        if num == 1:
            return sum(costs[first:]), (first,)
        found = []
        for then in range(first + 1, len(costs) - num + 2):
            rest, begins = cheapest(then, num - 1)
            found.append((max(sum(costs[first:then]), rest), (first, *begins)))
        return min(found)

    return list(cheapest(0, num_stages)[1])
