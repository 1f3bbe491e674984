"""DeepSpeed's configuration: labkit's own, under what `--config` says."""

from collections.abc import Mapping
from typing import Any

import torch

from labkit.checks import UnsupportedLoopError
from labkit.strategies.prepared import check_keys
from labkit.train_options import TrainOptions

BUCKET_ELEMENTS = {"cpu": 2_000_000, "cuda": 50_000_000}
"""By the kind of device. DeepSpeed's own 5e8 would take 2 GB for a bucket of fp32. A
collective of 2e6 elements, which gloo needs a millisecond for, takes NCCL no longer
than to begin one."""

LEAST_BUCKET_ELEMENTS = 262_144
"""Of gradients, under stages 1 and 2: a smaller message takes longer to begin than to
send."""

SET_BY_OPTION = {
    "bf16": "--precision",
    "fp16": "--precision",
    "gradient_accumulation_steps": "--accumulate",
    "gradient_clipping": "--clip",
    "train_batch_size": "prepare(..., batch_size=B)",
    "train_micro_batch_size_per_gpu": "prepare(..., batch_size=B)",
    "optimizer": "the optimizer given to prepare",
    "scheduler": "a torch.optim.lr_scheduler in the cell",
}

KNOWN_KEYS = (
    "activation_checkpointing",
    "communication_data_type",
    "comms_logger",
    "data_types",
    "dump_state",
    "flops_profiler",
    "gradient_predivide_factor",
    "memory_breakdown",
    "prescale_gradients",
    "sparse_gradients",
    "steps_per_print",
    "torch_autocast",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_optimization",
)


def deepspeed_config(
    options: TrainOptions, stage: int, num_parameters: int, device: str
) -> dict[str, Any]:
    """What `deepspeed.initialize` takes on this kind of device; ValueError for what
    `--config` cannot set."""
    given = options.config
    for key, option in SET_BY_OPTION.items():
        if key in given:
            raise ValueError(f"--config: {key!r} is set by {option}; leave it out")
    check_keys(given, KNOWN_KEYS, "DeepSpeed")
    if not isinstance(given.get("zero_optimization", {}), Mapping):
        raise ValueError(
            '--config: "zero_optimization" is a section: give a dict, for example '
            '{"zero_optimization": {"reduce_bucket_size": 1000000}}'
        )
    bucket = bucket_elements(num_parameters, device, stage)
    ours = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the loop says which is the last
        "gradient_clipping": options.clip or 0.0,
        "bf16": {"enabled": options.precision == "bf16"},
        "fp16": {"enabled": options.precision == "fp16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": BUCKET_ELEMENTS[device],
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": bucket,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 1_000,
        },
    }
    merged = merge(ours, given)
    if merged["zero_optimization"]["stage"] != stage:
        raise ValueError(
            f'--config: "stage" is {merged["zero_optimization"]["stage"]}; '
            f"the magic line says zero{stage}; leave it out"
        )
    return merged


def check_ratio(config: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """UnsupportedLoopError for a part of the update on the CPU, which DeepSpeed can
    have with new states and its own optimizer alone."""
    offload = config["zero_optimization"].get("offload_optimizer")
    ratio = offload.get("ratio", 1.0) if isinstance(offload, Mapping) else 1.0
    if ratio != 1.0 and (
        type(optimizer).__name__ != "DeepSpeedCPUAdam" or len(optimizer.state)
    ):
        raise UnsupportedLoopError(
            f'--config: the ratio of "offload_optimizer" is {ratio!r:.40}; DeepSpeed '
            "updates a part on the CPU only with a DeepSpeedCPUAdam that has no states "
            "yet; leave ratio out, which offloads all"
        )


def ranks_of_second_copies(config: Mapping[str, Any], world_size: int) -> int:
    """How many ranks share a second copy of the parameters (hpZeRO); 1 for no copies.
    ValueError for as many as `world_size` is not a multiple of."""
    given = config["zero_optimization"].get("zero_hpz_partition_size", 1)
    if not isinstance(given, int) or given <= 1:
        return 1  # what DeepSpeed cannot take it says itself
    num_ranks = min(given, world_size)
    if world_size % num_ranks:
        raise ValueError(
            f'--config: "zero_hpz_partition_size" is {given}; world_size is '
            f"{world_size}, of which it has to be a divisor"
        )
    return num_ranks


def bucket_elements(num_parameters: int, device: str, stage: int = 3) -> int:
    """Elements of the buckets that gradients are reduced and parameters gathered in.

    Of a small model an eighth, or its buckets would hold more than all the rest.
    """
    part = num_parameters // 8 + 1
    if stage < 3:
        part = max(part, min(LEAST_BUCKET_ELEMENTS, num_parameters))
    return min(BUCKET_ELEMENTS[device], part)


def merge(ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `ours`, section by section."""
    merged = dict(ours)
    for key, value in given.items():
        inner = merged.get(key)
        merged[key] = (
            merge(inner, value)
            if isinstance(inner, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged
