"""The strategies of `%%dist_train`: each a value, with what the others ask of it."""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from importlib import import_module
from typing import TYPE_CHECKING
from typing import Any

from labkit import theory as formulas
from labkit.checks import check_choice
from labkit.strategies.mesh.sizes import DATA_PARALLEL
from labkit.strategies.mesh.sizes import mesh_on_hosts
from labkit.strategies.mesh.sizes import sizes_of_axes
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
    """Of its device mesh, as `labkit.strategies.mesh.sizes` names them; none where a
    rank trains alone, ranks serve others, or the cell makes its own."""
    outer_axes: tuple[str, ...] = ()
    """Axes that its mesh has as well where `--mesh` names them."""
    divide: str | None = None
    """Module and class of what divides the model before that, along another axis than
    those of data parallelism: a `labkit.strategies.prepared.Division`."""
    across: str | None = None
    """As `technique`, in its place where the mesh has axes of data parallelism."""
    options: tuple[str, ...] = ()
    """Those of `labkit.train_options.TrainOptions` that are not for every strategy."""
    theory: Theory = formulas.UNKNOWN
    """What it should hold and send."""
    forecast: str | None = None
    """Module of `labkit.estimate` that predicts its memory, if any does."""
    is_single: bool = False
    """Runs on rank 0 alone, as if it were the whole world."""
    is_partitioned: bool = False
    """A rank updates a part of the parameters."""
    has_whole_parameters: bool = False
    """Where a rank has a parameter, it has the whole of it."""
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

    server: str | None = None
    """Module and class of what its last ranks run in place of the cell, if they serve
    the others."""

    @property
    def is_by_hand(self) -> bool:
        """The cell does all of it."""
        return self.technique is None

    def mesh_sizes(self, mesh: str | None, world_size: int) -> dict[str, int]:
        """The axes of a run's mesh and their sizes, outermost first, of what `--mesh`
        says; none where a rank trains alone. ValueError for one that cannot be."""
        return sizes_of_axes(self.name, self.axes, self.outer_axes, mesh, world_size)

    def mesh_on_hosts(self, ranks_per_host: Sequence[int]) -> str | None:
        """What `--mesh` is on several hosts where it is not given; None for the same as
        on one."""
        return mesh_on_hosts(self.axes, self.outer_axes, ranks_per_host)

    def server_ranks(self, num_servers: int, world_size: int) -> range:
        """The ranks that serve the others, if any do. ValueError where none is left to
        train."""
        if self.server is None:
            return range(0)
        if num_servers >= world_size:
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            raise ValueError(
                f"{self.name} with --servers {num_servers} on {ranks} has no worker "
                "left: start more ranks, for example with %dist_start -n "
                f"{num_servers + 1}, or give fewer servers"
            )
        return range(world_size - num_servers, world_size)

    def load_server(self) -> Any:
        """The class of which `server` is the name."""
        assert self.server is not None
        return load(self.server)

    def load(self, mesh_axes: Sequence[str] | None = ()) -> "type[Prepared]":
        """The class that prepares a model for it, on a mesh of these axes."""
        assert self.technique is not None
        has_data_parallelism = any(axis in DATA_PARALLEL for axis in mesh_axes or ())
        technique: type[Prepared]
        technique = load(
            self.across
            if self.across is not None and has_data_parallelism
            else self.technique
        )
        return technique


def load(place: str) -> Any:
    """What a technique's "module:name" stands for. It is loaded on a rank, when it is
    needed: the notebook reads the table without torch."""
    module, name = place.split(":")
    return getattr(import_module(f"labkit.strategies.{module}"), name)


def _zero(stage: int, description: str, technique: str) -> Strategy:
    return Strategy(
        f"zero{stage}",
        description,
        technique,
        variant={"stage": stage},
        axes=("dp_shard",),
        options=("mesh",),
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
        "fsdp.technique:FSDP",
        axes=axes,
        options=("mesh",),
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
            options=("mesh", "comm", "average_every", "average_after"),
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
            "hybrid sharding (HSDP): sharded within groups of ranks, replicated across "
            "them (fully_shard)",
            *("dp_replicate", "dp_shard"),
        ),
        Strategy(
            "tensor",
            "a part of every layer on every rank, which have the same samples; with dp "
            "fully sharded across them (parallelize_module)",
            "tensor.technique:TensorParallel",
            axes=("tp",),
            outer_axes=("dp_replicate", "dp_shard"),
            divide="tensor.split:Split",
            across="fsdp.technique:FSDP",
            options=("mesh",),
            theory=formulas.SPLIT,
            forecast="tensor",
            is_partitioned=True,
            is_sharded=True,
            differentiates_twice=False,
            takes_complex=False,
            takes_compiled=False,
        ),
        Strategy(
            "pipeline",
            "consecutive layers on consecutive ranks, through which batches pass in "
            "microbatches; with dp replicas of that (torch.distributed.pipelining)",
            "pipeline.technique:Pipeline",
            axes=("pp",),
            outer_axes=("dp_replicate",),
            options=("mesh", "microbatches", "schedule"),
            theory=formulas.STAGES,
            forecast="pipeline",
            is_partitioned=True,
            has_whole_parameters=True,
            is_sharded=True,
            differentiates_twice=False,
            takes_compiled=False,
        ),
        Strategy(
            "parameter_server",
            "some ranks keep the parameters and step, the others push gradients",
            "parameter_server.worker:Worker",
            options=("servers", "asynchronous", "staleness"),
            theory=formulas.PARAMETER_SERVER,
            forecast="parameter_server",
            server="parameter_server.server:Server",
        ),
        Strategy("raw", "nothing is done for you: the cell wraps the model itself"),
    )
}


SPECIAL_OPTIONS = {name for each in STRATEGIES.values() for name in each.options}
"""Those that only some strategies take."""


def find_strategy(name: str) -> Strategy:
    """The strategy called `name`; ValueError with those that exist otherwise."""
    check_choice("strategy", name, STRATEGIES)
    return STRATEGIES[name]


def recorded_strategy(name: str) -> Strategy:
    """The strategy of a run on disk; of a name that this version has not, one of which
    nothing is known."""
    return STRATEGIES.get(name) or Strategy(name, "")
