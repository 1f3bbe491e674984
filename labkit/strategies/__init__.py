"""The strategies of `%%dist_train`: each a value, with what the others ask of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from importlib import import_module
from typing import TYPE_CHECKING
from typing import Any

from labkit import theory as formulas
from labkit.checks import check_choice
from labkit.theory import Theory

if TYPE_CHECKING:
    from labkit.strategies.prepared import Prepared


@dataclass(frozen=True)
class Strategy:
    """How a training cell's ranks share the work."""

    name: str
    description: str
    technique: str | None = None
    """Module and class, in this package, of what it makes of a model; None where the
    cell does all of it, and `prepare` and `fit` are not for it."""
    variant: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What distinguishes it from others of the same technique."""
    axes: tuple[str, ...] = ()
    """Of its device mesh, as `labkit.strategies.mesh` names them; none where a rank
    trains alone, or the cell makes its own."""
    takes_mesh: bool = False
    """`--config` may have the sizes of the mesh."""
    theory: Theory = formulas.UNKNOWN
    """What it should hold and send."""
    forecast: str | None = None
    """Module of `labkit.estimate` that predicts its memory, if any does."""
    is_single: bool = False
    """Runs on rank 0 alone, as if it were the whole world."""
    is_partitioned: bool = False
    """A rank updates a part of the parameters."""
    is_sharded: bool = False
    """A rank has only a part of them, but where a pass needs the whole."""
    has_own_gradients: bool = False
    """The optimizer steps from gradients that are not `parameter.grad`."""
    differentiates_twice: bool = True
    """A gradient may be differentiated again, as that of a gradient penalty."""
    takes_complex: bool = True
    """Parameters may be complex, in fp32."""
    takes_compiled: bool = True
    """The model may come from torch.compile."""

    @property
    def is_by_hand(self) -> bool:
        """The cell does all of it."""
        return self.technique is None

    def load(self) -> "type[Prepared]":
        """The class that prepares a model for this strategy."""
        assert self.technique is not None
        # Loaded here, on a rank: the notebook reads the table without torch.
        module, name = self.technique.split(":")
        technique: type[Prepared]
        technique = getattr(import_module(f"labkit.strategies.{module}"), name)
        return technique


def _zero(stage: int, description: str, technique: str) -> Strategy:
    return Strategy(
        f"zero{stage}",
        description,
        technique,
        variant={"stage": stage},
        axes=("dp_shard",),
        theory=formulas.zero(stage),
        forecast="zero",
        is_partitioned=True,
        is_sharded=stage == 3,
        has_own_gradients=True,
        takes_complex=False,
        takes_compiled=stage < 3,
    )


def _fully_sharded(name: str, description: str, *axes: str) -> Strategy:
    return Strategy(
        name,
        description,
        "fsdp:FSDP",
        axes=axes,
        takes_mesh=True,
        theory=formulas.FULLY_SHARDED,
        forecast="fully_sharded",
        is_partitioned=True,
        is_sharded=True,
        differentiates_twice=False,
    )


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "single",
            "one process on the whole batch: the reference for all the others",
            "prepared:Prepared",
            theory=formulas.SINGLE,
            forecast="replicated",
            is_single=True,
        ),
        Strategy(
            "ddp",
            "a replica on every rank, gradients averaged (DistributedDataParallel)",
            "ddp:DDP",
            axes=("dp_replicate",),
            theory=formulas.REPLICATED,
            forecast="replicated",
        ),
        _zero(
            1,
            "replicas, but each rank has the optimizer state of a part (DeepSpeed)",
            "zero.stages_1_and_2:ZeRO1And2",
        ),
        _zero(
            2,
            "as zero1, and the gradients of that part (DeepSpeed)",
            "zero.stages_1_and_2:ZeRO1And2",
        ),
        _zero(
            3,
            "as zero2, and the parameters of that part (DeepSpeed)",
            "zero.stage_3:ZeRO3",
        ),
        _fully_sharded(
            "fsdp",
            "a shard of everything on every rank, gathered by blocks (fully_shard)",
            "dp_shard",
        ),
        _fully_sharded(
            "hsdp",
            "sharded within groups of ranks, replicated across them (fully_shard)",
            *("dp_replicate", "dp_shard"),
        ),
        Strategy("raw", "nothing is done for you: the cell wraps the model itself"),
    )
}


def find_strategy(name: str) -> Strategy:
    """The strategy called `name`; ValueError with those that exist otherwise."""
    check_choice("strategy", name, STRATEGIES)
    return STRATEGIES[name]


def recorded_strategy(name: str) -> Strategy:
    """The strategy of a run on disk; of a name that this version has not, one of which
    nothing is known."""
    return STRATEGIES.get(name) or Strategy(name, "")
