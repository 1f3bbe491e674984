"""What each strategy should hold and send, by the formulas of the papers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from labkit.records import ModelFacts
from labkit.train_options import TrainOptions

Bytes = dict[str, float]
"""Of the model states of one rank, by component."""


@dataclass(frozen=True)
class Theory:
    """What one strategy should hold and send."""

    states_of_rank: Callable[[ModelFacts, TrainOptions], Bytes]
    """Bytes of the model states of one rank, wherever they are."""
    wire_bytes: Callable[[ModelFacts, TrainOptions, int], float]
    """Bytes that a rank sends in one optimizer step, by the world size; NaN if unknown.

    With collectives as rings a gather or a reduce-scatter of `P` elements among N
    ranks sends (N-1)/N of them, an all-reduce twice as much.
    """

    def model_states(self, model: ModelFacts, options: TrainOptions) -> Bytes:
        """Bytes of the model states on one rank's device, by component."""
        states = self.states_of_rank(model, options)
        return states | {each: 0.0 for each in model.offloaded if each in states}


# ---- held ----


def replica_states(
    model: ModelFacts, options: TrainOptions, *, num_shards: int = 1
) -> Bytes:
    """With `P` parameters and `s` bytes of optimizer state for each, a replica has
    4P + 4P + sP bytes in fp32 (autocast keeps it so in bf16)."""
    trainable = float(model.num_trainable)
    # Between the microbatches of a step FSDP keeps its gradients whole.
    gradient_shards = 1 if options.accumulate > 1 else num_shards
    return {
        "parameters": 4.0 * model.num_parameters / num_shards,
        "gradients": 4 * trainable / gradient_shards,
        "optimizer_state": model.state_bytes * trainable / num_shards,
        "master_parameters": 0.0,
    }


def shard_states(model: ModelFacts, options: TrainOptions) -> Bytes:
    """FSDP divides all that a replica has by the number of shards."""
    return replica_states(model, options, num_shards=model.num_shards)


def zero_states(model: ModelFacts, options: TrainOptions, *, stage: int) -> Bytes:
    """ZeRO partitions the optimizer state of a replica, then the gradients, then the
    parameters; DeepSpeed keeps a partition of fp32 parameters to update, and the others
    in bf16.

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 5.
    """
    trainable, shards = float(model.num_trainable), model.num_shards
    width = 4 if options.precision == "fp32" else 2
    return {
        "parameters": width * model.num_parameters / (shards if stage == 3 else 1),
        "gradients": width * trainable / (shards if stage > 1 else 1),
        "optimizer_state": model.state_bytes * trainable / shards,
        "master_parameters": 4 * trainable / shards,
    }


# ---- sent ----


def ring(elements: float, num_ranks: int, width: int) -> float:
    """Bytes that each of `num_ranks` sends of `elements` in a gather."""
    return elements * width * (num_ranks - 1) / num_ranks


def all_reduced_gradients(
    model: ModelFacts, options: TrainOptions, world_size: int
) -> float:
    """Data parallelism all-reduces the gradients: 2P."""
    return 2 * ring(float(model.num_trainable), world_size, 4)


def sent_by_shards(model: ModelFacts, options: TrainOptions, world_size: int) -> float:
    """Sharded parameters are gathered for the forward and for the backward pass, and
    gradients reduced: 3P; less for those that FSDP does not free in between. Replicas
    of shards all-reduce theirs."""
    parameters, trainable = float(model.num_parameters), float(model.num_trainable)
    shards, replicas = model.num_shards, world_size // model.num_shards
    low = 4 if options.precision == "fp32" else 2
    again = parameters if model.num_regathered is None else model.num_regathered
    gathered = options.accumulate * ring(parameters + again, shards, low)
    reduced = ring(trainable, shards, 4)
    return gathered + reduced + 2 * ring(trainable / shards, replicas, 4)


def sent_by_zero(
    model: ModelFacts, options: TrainOptions, world_size: int, *, stage: int
) -> float:
    """ZeRO-1 and 2 reduce the gradients to their owners and gather the parameters: 2P.
    Stage 3 gathers these for both passes: 3P.

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 7.
    """
    trainable, shards = float(model.num_trainable), model.num_shards
    low = 4 if options.precision == "fp32" else 2
    reduced = ring(trainable, shards, low)
    if stage == 3:
        gathered = 2 * ring(float(model.num_parameters), shards, low)
        return options.accumulate * (gathered + reduced)
    # Stage 2 has no place for whole gradients, so every microbatch reduces.
    times = options.accumulate if stage == 2 else 1
    return times * reduced + ring(trainable, shards, low)


# ---- by strategy ----

UNKNOWN = Theory(lambda model, options: {}, lambda *_: math.nan)
SINGLE = Theory(replica_states, lambda *_: 0.0)
REPLICATED = Theory(replica_states, all_reduced_gradients)
FULLY_SHARDED = Theory(shard_states, sent_by_shards)


def zero(stage: int) -> Theory:
    return Theory(partial(zero_states, stage=stage), partial(sent_by_zero, stage=stage))
