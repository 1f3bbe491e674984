"""ZeRO: what every replica would hold twice is partitioned over the ranks."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import cast_floats
from labkit.strategies.prepared import check_keys
from labkit.strategies.prepared import optimizer_tensors
from labkit.strategies.states import Named
from labkit.strategies.states import Restore
from labkit.strategies.states import Source
from labkit.strategies.states import check_hyperparameters
from labkit.strategies.states import set_hyperparameters
from labkit.strategies.zero_states import Partitions
from labkit.strategies.zero_states import ZeROStates

BUCKET_ELEMENTS = 2_000_000
"""DeepSpeed's own 5e8 would take 2 GB for a bucket of fp32."""

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


_linear = nn.functional.linear
_former: list[Any] = []
"""Engines of runs that have ended. Their models may be used on, until DeepSpeed, which
holds on to every engine that is not destroyed, has to make the next."""


class ZeRO(Prepared):
    """Partition optimizer state (1), gradients too (2), and parameters too (3).

    Stage 1 and 2: reduce the gradients to the rank that owns their part, update that
    part in fp32, all-gather the parameters. Stage 3: all-gather a layer's parameters
    for its forward and its backward pass, and free them after each.

    `--config` takes DeepSpeed's own configuration.

    Source: Rajbhandari et al., "ZeRO", SC 2020; `deepspeed.initialize`.
    """

    stage: int

    def wrap(self) -> None:
        config = self._config()
        destroy_former_engines()
        self.num_shards = torch.distributed.get_world_size()
        deepspeed = import_deepspeed(self.device)
        fields = deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields
        check_keys(
            self.options.config.get("zero_optimization", {}),
            [field.alias or name for name, field in fields.items()],
            "DeepSpeed's zero_optimization",
        )
        if self.stage == 3:
            agree_on_ids(self.device)
        with quiet():
            self.model, self._zero, _, _ = deepspeed.initialize(
                model=self.module,
                optimizer=self.optimizer,
                config=config,
                dist_init_required=False,
            )
        if self.options.precision != "fp32":
            # DeepSpeed keeps the model itself in this precision, not its inputs.
            dtype = self.dtype
            self._handles += [
                self.model.register_forward_pre_hook(
                    lambda model, args: cast_floats(args, dtype)
                ),
                self.model.register_forward_hook(
                    lambda model, args, output: cast_floats(output, torch.float32)
                ),
            ]

    def _config(self) -> dict[str, Any]:
        """DeepSpeed's configuration: ours, under what `--config` says."""
        given = self.options.config
        for key, option in SET_BY_OPTION.items():
            if key in given:
                raise ValueError(f"--config: {key!r} is for {option} to say")
        check_keys(given, KNOWN_KEYS, "DeepSpeed")
        if not isinstance(given.get("zero_optimization", {}), Mapping):
            raise ValueError(
                '--config: "zero_optimization" is a section: give a dict, as '
                '{"zero_optimization": {"reduce_bucket_size": 1000000}}'
            )
        bucket = bucket_elements(self._num_parameters)
        ours = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # the loop says which is the last
            "gradient_clipping": self.options.clip or 0.0,
            "bf16": {"enabled": self.options.precision == "bf16"},
            "fp16": {"enabled": self.options.precision == "fp16"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": BUCKET_ELEMENTS,
                "stage3_prefetch_bucket_size": bucket,
                "stage3_max_live_parameters": bucket,
                "stage3_max_reuse_distance": 0,
                "stage3_param_persistence_threshold": 1_000,
            },
        }
        merged = merge(ours, given)
        if merged["zero_optimization"]["stage"] != self.stage:
            raise ValueError(
                f'--config: "stage" is {merged["zero_optimization"]["stage"]}; '
                f"the magic line says zero{self.stage}"
            )
        return merged

    def begin_microbatch(self, *, is_last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(is_last)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self.model.scale(loss) if self.options.precision == "fp16" else loss

    def step(self) -> float | None:
        self.model.step()  # clips, and clears the gradients
        norm = self.model.get_global_grad_norm()
        return None if self.options.clip is None or norm is None else float(norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._zero.zero_grad(set_to_none)

    def checkpoint(
        self, *, with_optimizer: bool = True
    ) -> tuple[Named, dict[str, Any]]:
        tensors = self._states().gather(with_optimizer=with_optimizer)
        return tensors, self.settings() if with_optimizer else {}

    def restoring(
        self,
        source: Source,
        values: Mapping[str, Any],
        *,
        with_optimizer: bool = True,
    ) -> Restore:
        held = self._states()
        held.check(source, with_optimizer=with_optimizer)
        if with_optimizer:
            check_hyperparameters(self.optimizer, self._names, values)

        def restore() -> None:
            held.restore(source, with_optimizer=with_optimizer)
            if with_optimizer:
                set_hyperparameters(self._zero.optimizer, values)
                self.restore_scaler(values)

        return restore

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        if self.options.precision == "fp16":
            found["scaler"] = {"scale": float(self._zero.loss_scale)}
        return found

    def restore_scaler(self, values: Mapping[str, Any]) -> None:
        if self.options.precision == "fp16" and values.get("scaler"):
            self._zero.loss_scale = values["scaler"]["scale"]

    def _states(self) -> ZeROStates:
        land_parameters(self.model)
        return ZeROStates(self.module, self._zero, self.partitions())

    def partitions(self) -> Partitions:
        """This rank's fp32 partition of every group, with the group's parameters."""
        zero = self._zero
        return list(
            zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)
        )

    def close(self) -> None:
        super().close()
        _former.append(self.model)
        restore_linear()

    def replicas(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_parameters()) if self.stage < 3 else {}


class ZeRO1(ZeRO):
    stage = 1
    keeps_gradients = True  # until the backward pass ends, in which they are reduced

    def memory(self) -> dict[str, Tensors]:
        zero = self._zero
        masters = zero.single_partition_of_fp32_groups
        whole = [p.grad for p in self.module.parameters() if has_own_storage(p.grad)]
        partition = [
            *flat(zero.averaged_gradients.values()),
            *flat(zero.all_grad_tensors.values()),
            *flat(master.grad for master in masters),
        ]
        is_whole = self.keeps_gradients and whole
        return {
            # First, for a gradient may be a view of a bucket.
            "communication_buffers": buckets(zero),
            "parameters": [*self.module.parameters(), *self.module.buffers()],
            "gradients": whole if is_whole else [*partition, *whole],
            "optimizer_state": optimizer_tensors(self.optimizer),
            "master_parameters": masters,
        }


class ZeRO2(ZeRO1):
    stage = 2
    keeps_gradients = False


class ZeRO3(ZeRO):
    stage = 3

    def updated(self) -> Iterable[torch.Tensor]:
        partitions: list[torch.Tensor] = self._zero.fp32_partitioned_groups_flat
        return partitions

    def partitions(self) -> Partitions:
        zero = self._zero
        return list(
            zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        )

    def memory(self) -> dict[str, Tensors]:
        zero = self._zero
        parameters: list[Any] = list(self.module.parameters())
        return {
            "communication_buffers": [
                *(p.data for p in parameters if p.numel()),  # gathered at the moment
                *buckets(zero),
            ],
            "parameters": [*(p.ds_tensor for p in parameters), *self.module.buffers()],
            "gradients": [
                zero.grad_partitions_flat_buffer,
                *(parameter.grad for parameter in parameters),
            ],
            "optimizer_state": optimizer_tensors(self.optimizer),
            "master_parameters": zero.fp32_partitioned_groups_flat,
        }


def bucket_elements(num_parameters: int) -> int:
    """Elements of the buckets that gradients are reduced and parameters gathered in.

    Of a small model an eighth, or its buckets would hold more than all the rest.
    """
    return min(BUCKET_ELEMENTS, num_parameters // 8 + 1)


def has_own_storage(gradient: torch.Tensor | None) -> bool:
    """Whether this is a gradient that is no view of a bucket or a partition."""
    return (
        gradient is not None and gradient.untyped_storage().nbytes() == gradient.nbytes
    )


def buckets(zero: Any) -> Iterator[torch.Tensor]:
    """What DeepSpeed collects gradients in, to reduce many of them at once."""
    return flat(bucket.buffer for bucket in zero.ipg_buckets.values())


def flat(tensors: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, which may hold None."""
    for value in tensors:
        if isinstance(value, torch.Tensor):
            yield value
        elif value is not None:
            yield from flat(value)


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


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, on the process group of today."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    if device.type == "cpu":
        # It would compile an op for 36 s, which is for inference.
        deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
    # It keeps groups from one initialize to the next, and ours may have been
    # formed anew in between.
    deepspeed.comm.comm.cdb = None
    deepspeed.utils.groups._WORLD_GROUP = None
    return deepspeed


def destroy_former_engines() -> None:
    """Let go of what earlier runs left in DeepSpeed; does nothing the first time."""
    while _former:
        engine = _former.pop()
        with contextlib.suppress(Exception):  # its process group may be gone
            land_parameters(engine)
            engine.destroy()
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload is not None:
        offload.FWD_MODULE_STACK.clear()  # every model of stage 3 stays in it


def restore_linear() -> None:
    """Take back the function that stage 3 puts in place of torch's for good.

    It makes a layer's gradients in another order, which a rank that was restarted
    since would not share, and stage 2 reduces them in that order.
    """
    nn.functional.linear = _linear


def land_parameters(engine: Any) -> None:
    """Let go of what stage 3 fetched ahead in a forward pass that no backward pass
    followed: DeepSpeed refuses to gather what is in flight."""
    if engine.zero_optimization_stage() == 3:
        # Not the engine's own, which collects garbage for half a second, too.
        engine.optimizer.empty_partition_cache()


def agree_on_ids(device: torch.device) -> None:
    """Number the next parameters and modules alike on all ranks, as stage 3 checks.
    Collective.

    DeepSpeed counts them as long as a process lives, and one may have begun later.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    [module_count] = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    counts = torch.tensor([Init.param_id, *module_count], device=device)
    torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)
    Init.param_id, module_count[0] = counts.tolist()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without DeepSpeed's many lines about itself."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_zero(model: nn.Module) -> bool:
    """Whether this is a DeepSpeed engine, or a module that ZeRO-3 has partitioned."""
    return hasattr(model, "zero_optimization") or any(
        hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole weights of a model under ZeRO, on every rank. Collective."""
    import deepspeed

    if isinstance(model, deepspeed.DeepSpeedEngine):
        model = model.module
    for engine in _former:
        if engine.module is model:
            land_parameters(engine)
    partitioned = [p for p in model.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned):
        return {key: value.clone() for key, value in model.state_dict().items()}
