"""What each strategy should hold and send, by the formulas of the papers."""

import math

from labkit.records import ModelFacts
from labkit.train_options import TrainOptions

STATES = ("parameters", "gradients", "optimizer_state", "master_parameters")

_ZERO = {"zero1": 1, "zero2": 2, "zero3": 3}
_SHARDED = {"fsdp", "hsdp"}


def model_states(
    strategy: str, model: ModelFacts, options: TrainOptions
) -> dict[str, float]:
    """Bytes of the model states on one rank's device, by component; empty for `raw`."""
    states = states_of_rank(strategy, model, options)
    return states | {each: 0.0 for each in model.offloaded if each in states}


def states_of_rank(
    strategy: str, model: ModelFacts, options: TrainOptions
) -> dict[str, float]:
    """Bytes of the model states of one rank, wherever they are.

    With `P` parameters, `s` bytes of optimizer state for each, `N` shards: a replica
    has 4P + 4P + sP bytes in fp32 (autocast keeps it so in bf16). ZeRO partitions the
    last term, then the gradients, then the parameters; DeepSpeed keeps a partition of
    fp32 parameters to update, and the others in bf16. FSDP divides all by N.

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 5.
    """
    parameters = float(model.num_parameters)
    trainable, shards = float(model.num_trainable), model.num_shards
    state = model.state_bytes * trainable
    if strategy in _ZERO:
        stage = _ZERO[strategy]
        width = 4 if options.precision == "fp32" else 2
        return {
            "parameters": width * parameters / (shards if stage == 3 else 1),
            "gradients": width * trainable / (shards if stage > 1 else 1),
            "optimizer_state": state / shards,
            "master_parameters": 4 * trainable / shards,
        }
    if strategy == "raw":
        return {}
    if strategy not in _SHARDED:
        shards = 1
    # Between the microbatches of a step FSDP keeps its gradients whole.
    gradient_shards = 1 if options.accumulate > 1 else shards
    return {
        "parameters": 4 * parameters / shards,
        "gradients": 4 * trainable / gradient_shards,
        "optimizer_state": state / shards,
        "master_parameters": 0.0,
    }


def wire_bytes(
    strategy: str,
    model: ModelFacts,
    options: TrainOptions,
    *,
    world_size: int,
) -> float:
    """Bytes that a rank sends in one optimizer step; NaN for `raw`.

    With collectives as rings a gather or a reduce-scatter of `P` elements among N
    ranks sends (N-1)/N of them, an all-reduce twice as much. Data parallelism
    all-reduces the gradients: 2P. ZeRO-1 and 2 reduce them to their owners and gather
    the parameters: 2P as well. Sharded parameters are gathered for the forward and for
    the backward pass, and gradients reduced: 3P; less for those that FSDP does not
    free in between.

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 7.
    """
    trainable = float(model.num_trainable)
    parameters = float(model.num_parameters)
    shards, replicas = model.num_shards, world_size // model.num_shards

    def ring(elements: float, num_ranks: int, width: int) -> float:
        return elements * width * (num_ranks - 1) / num_ranks

    accumulate = options.accumulate
    low = 4 if options.precision == "fp32" else 2
    if strategy == "single":
        return 0.0
    if strategy == "ddp":
        return 2 * ring(trainable, world_size, 4)
    if strategy in ("zero1", "zero2"):
        # Stage 2 has no place for whole gradients, so every microbatch reduces.
        times = accumulate if strategy == "zero2" else 1
        return ring(trainable, shards, low) * (times + 1)
    if strategy == "zero3":
        return accumulate * (
            2 * ring(parameters, shards, low) + ring(trainable, shards, low)
        )
    if strategy in _SHARDED:
        again = parameters if model.num_regathered is None else model.num_regathered
        gathered = accumulate * ring(parameters + again, shards, low)
        reduced = ring(trainable, shards, 4)
        return gathered + reduced + 2 * ring(trainable / shards, replicas, 4)
    return math.nan
