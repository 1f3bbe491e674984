"""The options of a training step."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields
from functools import partial
from typing import Any

from labkit.checks import PROFILED
from labkit.checks import check_choice
from labkit.checks import check_config
from labkit.checks import check_count
from labkit.checks import check_mesh
from labkit.checks import check_positive
from labkit.checks import check_profile
from labkit.checks import check_slow
from labkit.checks import check_staleness
from labkit.options import option

PRECISIONS = ("fp32", "bf16", "fp16")
SCHEDULES = ("gpipe", "1f1b", "interleaved")
COMPRESSIONS = ("fp16", "bf16", "powersgd", "topk")


@dataclass(frozen=True)
class TrainOptions:
    """What the magic line says about the training step."""

    accumulate: int = option(
        1,
        "compute each batch in this many microbatches, communicate after the last",
        partial(check_count, meaning="the microbatches of one optimizer step"),
        metavar="K",
    )
    clip: float | None = option(
        None,
        "clip the norm of the whole gradient to this",
        partial(check_positive, meaning="the norm that the gradients are clipped to"),
        metavar="NORM",
    )
    precision: str = option(
        "fp32",
        "the dtype that the model computes in; fp16 needs a GPU",
        partial(check_choice, choices=PRECISIONS),
        choices=PRECISIONS,
    )
    activation_checkpointing: bool = option(
        False,
        "keep only the inputs of the model's blocks; compute the rest again in the "
        "backward pass",
    )
    sync_batchnorm: bool = option(
        False, "take BatchNorm's statistics over the samples of all ranks"
    )
    compile: bool = option(False, "compile the model's blocks with torch.compile")
    mesh: str | None = option(
        None,
        "sizes of the mesh's axes, for example dp=2,tp=2: pp, dp_replicate, dp_shard "
        "(or dp) and tp, as far as the strategy has them; their product is the number "
        "of ranks",
        check_mesh,
        metavar="AXIS=SIZE,...",
    )
    microbatches: int | None = option(
        None,
        "under pipeline, pass each batch through the stages in this many parts",
        partial(check_count, meaning="the microbatches that pass through the stages"),
        metavar="M",
        default_text="four for each stage",
    )
    schedule: str = option(
        "1f1b",
        "under pipeline, the order of passes in fit: all forward passes first (gpipe), "
        "forward and backward in turn (1f1b), or that with two stages a rank "
        "(interleaved); in a loop of your own always gpipe",
        partial(check_choice, choices=SCHEDULES),
        choices=SCHEDULES,
    )
    comm: str | None = option(
        None,
        "under ddp, send gradients in fewer bytes: rounded to fp16 or bf16, as factors "
        "of a low rank (powersgd), or the largest entries alone (topk); the last two "
        "keep what was not sent for the next step",
        partial(check_choice, choices=COMPRESSIONS),
        choices=COMPRESSIONS,
    )
    average_every: int | None = option(
        None,
        "under ddp, let every rank step with the gradients of its own samples, and "
        "average parameters every K steps (local SGD)",
        partial(check_count, meaning="the steps from one average to the next"),
        metavar="K",
    )
    average_after: int | None = option(
        None,
        "with --average-every: average gradients in the first steps, and parameters "
        "after this many (post-local SGD)",
        partial(check_count, meaning="the steps in which gradients are averaged"),
        metavar="STEP",
    )
    servers: int = option(
        1,
        "under parameter_server, how many ranks keep the parameters, each an equal "
        "part, and do not train",
        partial(check_count, meaning="the ranks that serve the others"),
        metavar="N",
    )
    asynchronous: bool = option(
        False,
        "under parameter_server, every push of a worker's gradients is a step of its "
        "own, and no worker waits for the others",
    )
    staleness: int | None = option(
        None,
        "with --asynchronous: a worker that is more than this many steps ahead of the "
        "slowest one waits for it; by default none waits",
        check_staleness,
        metavar="K",
    )
    slow: str | None = option(
        None,
        "for teaching: rank RANK sleeps after each backward pass, so that its forward "
        "and backward pass take FACTOR times as long",
        check_slow,
        metavar="RANK=FACTOR",
    )
    profile: bool | int | str | None = option(
        None,
        "record some steps of every rank with torch.profiler, and say why they are "
        "slow: STEPS is a number of steps after the first ten (3 by default), or a "
        "range such as 20-24",
        check_profile,
        metavar="STEPS",
        bare=str(PROFILED),
    )
    config: Mapping[str, Any] = option(
        dict,
        "a dict of the notebook with settings of the strategy's own: DeepSpeed's "
        "configuration, arguments of fully_shard or of DistributedDataParallel, the "
        "plan of tensor or the cuts of pipeline",
        check_config,
        metavar="NAME",
    )

    def for_message(self) -> dict[str, Any]:
        """The step's options but the config, which JSON could not hold."""
        names = [each.name for each in fields(TrainOptions) if each.name != "config"]
        return {name: getattr(self, name) for name in names}
