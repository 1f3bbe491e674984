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
    """Data parallelism all-reduces the gradients: 2P. With `--comm` it sends fewer
    bytes of each, with `--average-every K` parameters every K steps: 2P / K."""
    if options.comm == "topk":
        return sent_by_topk(model, world_size)
    elements = float(model.num_trainable)
    if options.average_every is not None:
        # Parameters in place of gradients, seldom.
        return 2 * ring(elements, world_size, 4) / options.average_every
    if options.comm == "powersgd":
        elements = elements_of_factors(model)
    width = 2 if options.comm in ("fp16", "bf16") else 4
    return 2 * ring(elements, world_size, width)


def sent_by_topk(model: ModelFacts, world_size: int) -> float:
    """Of the greatest k gradients of every parameter, all ranks gather value and place:
    4 + 4 bytes, to each of the other ranks.

    Source: Lin et al., "Deep Gradient Compression", ICLR 2018.
    """
    share = model.comm.get("topk", math.nan)
    num_sent = sum(num_sent_of(math.prod(each), share) for each in model.matrices)
    return 8.0 * num_sent * (world_size - 1)


def num_sent_of(num_elements: int, share: float) -> int:
    """How many top-k sends of a gradient: one at least."""
    return min(num_elements, max(1, int(share * num_elements)))


def elements_of_factors(model: ModelFacts) -> float:
    """A matrix of n x m as factors of rank r has r (n + m) elements; what would not be
    smaller by `min_compression_rate` is sent whole.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, section 3.
    """
    rank = model.comm.get("rank", math.nan)
    least = model.comm.get("min_compression_rate", math.nan)
    total = 0.0
    for rows, columns in model.matrices:
        factors = min(rows, columns, rank) * (rows + columns)
        whole = float(rows * columns)
        total += factors if factors * least < whole else whole
    return total


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


def sent_by_split_layers(
    model: ModelFacts, options: TrainOptions, world_size: int
) -> float:
    """The activations of split layers, along `tp`; across it what shards send.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
    """
    num_replicas = world_size // model.num_parts
    return model.activation_bytes + sent_by_shards(model, options, num_replicas)


def sent_by_stages(model: ModelFacts, options: TrainOptions, world_size: int) -> float:
    """A stage sends the activations of a batch to the next one, and their gradients to
    the one before; replicas of a stage all-reduce its gradients.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters", SC 2021, section 2.
    """
    num_replicas = world_size // model.num_parts
    gradients = 2 * ring(float(model.num_trainable), num_replicas, 4)
    return model.activation_bytes * options.accumulate + gradients


def bubble(num_stages: int, num_microbatches: int, chunks: int = 1) -> float:
    """The share of a batch's time in which a rank of a pipeline waits: (p-1)/(m+p-1);
    with `chunks` stages a rank (p-1)/(vm+p-1).

    Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., SC 2021, section 2.2.
    """
    return (num_stages - 1) / (chunks * num_microbatches + num_stages - 1)


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


def worker_states(model: ModelFacts, options: TrainOptions) -> Bytes:
    """A worker has parameters and gradients, 4P + 4P; the optimizer's state is on the
    servers, each of which has 1/S of it, of the parameters and of a gradient."""
    return {**replica_states(model, options), "optimizer_state": 0.0}


def sent_by_busiest(model: ModelFacts, options: TrainOptions, world_size: int) -> float:
    """Of N ranks and S servers each of the N - S workers pushes P gradients and pulls
    as many parameters: a server sends (N-S) 4P/S bytes and receives as many, a worker
    4P each. All-reduce has every rank send and receive 2 (N-1)/N 4P, however many there
    are.

    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server",
    OSDI 2014; Sergeev and Del Balso, "Horovod", 2018.
    """
    num_workers, whole = world_size - options.servers, 4.0 * model.num_trainable
    if options.asynchronous:  # a step of the server is a push of one worker
        num_workers = min(1, num_workers)
    return whole * max(1.0, num_workers / options.servers)


# ---- by strategy ----

UNKNOWN = Theory(lambda model, options: {}, lambda *_: math.nan)
SINGLE = Theory(replica_states, lambda *_: 0.0)
REPLICATED = Theory(replica_states, all_reduced_gradients)
PARAMETER_SERVER = Theory(worker_states, sent_by_busiest)
FULLY_SHARDED = Theory(shard_states, sent_by_shards)
SPLIT = Theory(shard_states, sent_by_split_layers)
STAGES = Theory(replica_states, sent_by_stages)


def zero(stage: int) -> Theory:
    return Theory(partial(zero_states, stage=stage), partial(sent_by_zero, stage=stage))
