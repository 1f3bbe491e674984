"""Tells to what a model's modules are set: what they do depends on it."""

from collections.abc import Callable
from collections.abc import Sequence

from torch import nn


def flags_of(
    model: nn.Module, apart: Sequence[nn.Module] = ()
) -> Callable[[], tuple[bool, ...]]:
    """What gives the flags of a model and of all modules in it: whether they train and,
    of the user's own classes, other attributes that are True or False. Of modules
    `apart` only the first, as a layer may set others on the rank alone that has it."""
    within = [*model.modules()]
    plain = {id(each) for layer in apart for each in layer.modules()}
    plain |= {id(each) for each in within if is_of_torch(each)}
    own = [vars(each) for each in within if id(each) not in plain]
    others = [each for each in within if id(each) in plain]

    def flags() -> tuple[bool, ...]:
        found = [x for names in own for x in names.values() if isinstance(x, bool)]
        return (*found, *(each.training for each in others))

    return flags


def is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")
