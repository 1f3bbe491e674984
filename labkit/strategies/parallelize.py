"""Makes of a model what a strategy trains: its transforms, in the order of applying."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.strategies import Strategy
from labkit.strategies.autograd.backward import release_former
from labkit.strategies.options import BatchNorm
from labkit.strategies.options import Undo
from labkit.strategies.options import checkpoint_activations
from labkit.strategies.options import compile_blocks
from labkit.strategies.options import replace_batchnorm
from labkit.strategies.prepared import Prepared
from labkit.train_options import TrainOptions


def parallelize(
    strategy: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh | None,
    device: torch.device,
    options: TrainOptions,
    *,
    note: Callable[[str], None],
    undo: list[Undo],
) -> Prepared:
    """`model` and `optimizer` under `strategy`, changed in place. May be collective.

    Every collective is taken along the axis of `mesh` that it belongs to; without a
    mesh there is none.

    What a run that ends takes back is added to `undo`, also where this fails half-way.

    Source: the order is that of `torchtitan/models/llama3/infra/parallelize.py`: split
    into stages, tensor parallel, activation checkpointing, compile, shard.
    """
    # Before all others: what they wrap is what runs.
    for name in replace_batchnorm(
        model,
        synchronize=options.sync_batchnorm,
        is_fp32=options.precision == "fp32",
    ):
        note(
            f"{name} has a forward of its own, so labkit leaves it as it is: under "
            f"--precision {options.precision} its statistics are not in fp32, as "
            "those of torch's BatchNorm would be"
        )
    # Before compile, which compiles the block with its checkpoint.
    if options.activation_checkpointing:
        undo += checkpoint_activations(model)
    # Before sharding, so that no graph holds what gathers parameters.
    if options.compile:
        undo += compile_blocks(model)
    release_former(model.parameters())
    prepared = strategy.load()(strategy, model, optimizer, mesh, device, options)
    prepared.note = note
    undo.append(prepared.close)
    BatchNorm.group = prepared.peers.own_group
    return prepared
