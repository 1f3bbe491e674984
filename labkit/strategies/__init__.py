"""The strategies of `%%dist_train`: a name, what it does, and where it is written."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Strategy:
    """How a training cell's ranks share the work."""

    name: str
    description: str
    module: str | None = None
    """The module of this package whose `apply_<module>(model, device)` wraps a model;
    None where nothing is to be wrapped."""
    is_single: bool = False
    """Runs on rank 0 alone, as if it were the whole world."""
    is_by_hand: bool = False
    """The cell does all of it; `prepare` and `fit` are not for it."""

    def apply(self, model: "nn.Module", device: "torch.device") -> "nn.Module":
        """`model`, which is on `device`, wrapped for this strategy."""
        if self.module is None:
            return model
        # Loaded here, on a rank: the notebook reads the table without torch.
        module = import_module(f"labkit.strategies.{self.module}")
        return getattr(module, f"apply_{self.module}")(model, device)


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "single",
            "one process on the whole batch: the reference for all the others",
            is_single=True,
        ),
        Strategy(
            "ddp",
            "a replica on every rank, gradients averaged (DistributedDataParallel)",
            module="ddp",
        ),
        Strategy(
            "raw",
            "nothing is done for you: the cell wraps the model itself",
            is_by_hand=True,
        ),
    )
}


def find_strategy(name: str) -> Strategy:
    """The strategy called `name`; ValueError with those that exist otherwise."""
    if name not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise ValueError(f"unknown strategy {name!r}; choose one of: {known}")
    return STRATEGIES[name]
