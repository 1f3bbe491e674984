"""DeepSpeed's engines in a process that outlives them: made, retired, destroyed."""

import contextlib
import copy
import logging
import os
import sys
import weakref
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from labkit.compat.deepspeed import GATE as DEEPSPEED
from labkit.compat.deepspeed import OF_ENGINE
from labkit.compat.deepspeed import drop_trace
from labkit.compat.deepspeed import forget_passes
from labkit.compat.deepspeed import gather_none_read
from labkit.compat.deepspeed import live_engines
from labkit.compat.deepspeed import load
from labkit.compat.deepspeed import look_at_numa_once
from labkit.compat.deepspeed import look_into_objects
from labkit.compat.deepspeed import module_count
from labkit.compat.deepspeed import use_new_names
from labkit.compat.torch import drop_hooks_of
from labkit.compat.torch import is_transformed
from labkit.strategies.autograd.structures import has_tensors
from labkit.strategies.autograd.structures import map_attributes
from labkit.strategies.mesh.peers import Peers

_linear = nn.functional.linear

_STRATEGY = "labkit_strategy"
"""The attribute of a part of parameters which says the strategy that made it."""

_former: list[Any] = []
"""Engines of runs that have ended. Their models may be used on, until DeepSpeed, which
holds on to every engine that is not destroyed, has to make the next."""

_preparers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""What has prepared the model of an engine, by that one's id, while a cell has it."""


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, on the process group of today."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed = load()
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    if device.type == "cpu":
        # It would compile an op for 36 s, which is for inference.
        deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
    DEEPSPEED.check()
    look_at_numa_once()
    use_new_names()
    gather_none_read(is_transformed)  # there it would end the process
    look_into_objects(has_tensors, map_attributes)
    # It was made for a default group that may have been re-created since.
    deepspeed.comm.comm.cdb = None
    return deepspeed


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


@contextlib.contextmanager
def numbered_as(device: torch.device) -> Iterator[None]:
    """With the number of this rank's GPU in LOCAL_RANK, by which DeepSpeed chooses it:
    where ranks share one, there are fewer GPUs than local ranks."""
    before = os.environ["LOCAL_RANK"]
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = before


def drop_gathers(offload: Any) -> None:
    """Have all parameters of stage 3 in parts, as before a forward pass, after one or
    its backward pass has failed half-way. Local."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    FWD_MODULE_STACK.clear()
    coordinator = offload.get_param_coordinator()
    coordinator.release_backward_leftovers()
    # Not to be waited for: the other ranks may never begin it. What this rank was
    # waiting for as it failed is not listed any more.
    offload.module.ds_inflight_param_registry.clear()
    for parameter in offload.module.parameters():
        if parameter.ds_status.name == "INFLIGHT":
            parameter.ds_status = type(parameter.ds_status).NOT_AVAILABLE
            parameter.data = parameter.data.new_empty(0)
    offload.partition_all_parameters()
    if coordinator.is_record_trace():
        drop_trace(coordinator)


def agree_on_ids(peers: Peers) -> None:
    """Number the next parameters and modules alike on all ranks, as stage 3 checks.
    Collective.

    DeepSpeed counts them as long as a process lives, and one may have begun later.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    modules = module_count()
    Init.param_id, modules[0] = peers.greatest([Init.param_id, *modules])


def destroy(engine: Any) -> None:
    # Its process group may be gone, and one that a script failed to make has no module.
    with contextlib.suppress(Exception):
        for each in engine.module.modules():
            vars(each).pop("__deepcopy__", None)
        land_parameters(engine)
        engine.destroy()


def retire(engine: Any, preparer: Any) -> None:
    """The run of `engine` has ended; its model may be used on."""
    _former.append(engine)
    _preparers[id(engine)] = preparer


def forget(engine: Any) -> None:
    """Destroy `engine`, whose model is prepared again."""
    _former[:] = [each for each in _former if each is not engine]
    destroy(engine)


def destroy_former_engines() -> None:
    """Let go of what earlier runs left in DeepSpeed; does nothing the first time."""
    for engine in list(_former):
        if (prepared := _preparers.get(id(engine))) is not None:
            prepared.release()
        else:
            destroy(engine)
    _former.clear()
    forget_models()


def destroy_others(known: Collection[int]) -> None:
    """Let go of what a script has left in DeepSpeed: its engines are those whose ids
    are not among `known`."""
    engines = [each for each in live_engines() if id(each) not in known]
    for engine in engines:
        destroy(engine)
    if engines:
        forget_models()


def forget_models() -> None:
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload is not None:
        offload.FWD_MODULE_STACK.clear()  # every model of stage 3 stays in it
        forget_passes()


def free_training_states(engine: Any, masters: Sequence[torch.Tensor]) -> None:
    """Free what only training needs, once the cell has dropped its optimizer, which
    DeepSpeed has not. The model stays as it is."""
    if not any(engine is each for each in _former):
        return
    zero = engine.optimizer
    zero.optimizer.state.clear()
    if engine.zero_optimization_stage() < 3:  # of which the model needs nothing more
        destroy(engine)
        zero.averaged_gradients.clear()
        zero.all_grad_tensors.clear()
    gradients = [getattr(zero, "grad_partitions_flat_buffer", None)]
    gradients += [master.grad for master in masters]
    for tensor in flat([masters, gradients, buckets(zero)]):
        tensor.untyped_storage().resize_(0)


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


def plain_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` of a model or a part of it, as for an average of weights: without
    what DeepSpeed has hooked to it."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for each in module.modules():
        own = vars(each)
        kept.append((own, dict(own)))
        for name in OF_ENGINE:
            own.pop(name, None)
        own.pop("__deepcopy__", None)
        drop_hooks_of("deepspeed", each)
    try:
        return copy.deepcopy(module, memo)
    finally:
        for own, before in kept:
            own.update(before)


def is_zero(model: nn.Module) -> bool:
    """Whether this is a DeepSpeed engine, or a module that ZeRO-3 has partitioned."""
    return hasattr(model, "zero_optimization") or any(
        hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def name_strategy(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Have `strategy_of` know what a user's optimizer is under from now on."""
    setattr(optimizer, _STRATEGY, strategy)


def strategy_of(optimizer: torch.optim.Optimizer) -> str:
    """The strategy that has put partitions in place of the parameters that a user's
    optimizer was made for; "" where none has."""
    return str(getattr(optimizer, _STRATEGY, ""))


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
