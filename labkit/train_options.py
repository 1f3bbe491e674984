"""The options of a training step."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields
from functools import partial
from typing import Any

from labkit.checks import check_choice
from labkit.checks import check_config
from labkit.checks import check_count
from labkit.checks import check_positive
from labkit.options import option

PRECISIONS = ("fp32", "bf16", "fp16")


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
    config: Mapping[str, Any] = option(
        dict,
        "a dict of the notebook, for the strategy in its own words: DeepSpeed's "
        "configuration, arguments of fully_shard or of DistributedDataParallel",
        check_config,
        metavar="NAME",
    )

    def for_message(self) -> dict[str, Any]:
        """The step's options but the config, which JSON could not hold."""
        names = [each.name for each in fields(TrainOptions) if each.name != "config"]
        return {name: getattr(self, name) for name in names}
