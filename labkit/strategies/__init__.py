"""The strategies of `%%dist_train`: a name, what it does, and where it is written."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from labkit.checks import check_choice

if TYPE_CHECKING:
    from labkit.strategies.prepared import Prepared


@dataclass(frozen=True)
class Strategy:
    """How a training cell's ranks share the work."""

    name: str
    description: str
    technique: str | None
    """Module and class, in this package, of what it makes of a model; None where the
    cell does all of it, and `prepare` and `fit` are not for it."""
    is_single: bool = False
    """Runs on rank 0 alone, as if it were the whole world."""

    def load(self) -> "type[Prepared]":
        """The class that prepares a model for this strategy."""
        assert self.technique is not None
        # Loaded here, on a rank: the notebook reads the table without torch.
        module, name = self.technique.split(":")
        technique: type[Prepared]
        technique = getattr(import_module(f"labkit.strategies.{module}"), name)
        return technique


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "single",
            "one process on the whole batch: the reference for all the others",
            "prepared:Prepared",
            is_single=True,
        ),
        Strategy(
            "ddp",
            "a replica on every rank, gradients averaged (DistributedDataParallel)",
            "ddp:DDP",
        ),
        Strategy(
            "zero1",
            "replicas, but each rank has the optimizer state of a part (DeepSpeed)",
            "zero.stages_1_and_2:ZeRO1",
        ),
        Strategy(
            "zero2",
            "as zero1, and the gradients of that part (DeepSpeed)",
            "zero.stages_1_and_2:ZeRO2",
        ),
        Strategy(
            "zero3",
            "as zero2, and the parameters of that part (DeepSpeed)",
            "zero.stage_3:ZeRO3",
        ),
        Strategy(
            "fsdp",
            "a shard of everything on every rank, gathered by blocks (fully_shard)",
            "fsdp:FSDP",
        ),
        Strategy(
            "hsdp",
            "sharded within groups of ranks, replicated across them (fully_shard)",
            "fsdp:HSDP",
        ),
        Strategy(
            "raw", "nothing is done for you: the cell wraps the model itself", None
        ),
    )
}


def find_strategy(name: str) -> Strategy:
    """The strategy called `name`; ValueError with those that exist otherwise."""
    check_choice("strategy", name, STRATEGIES)
    return STRATEGIES[name]
