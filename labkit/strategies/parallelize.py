"""Makes of a model what a strategy trains: its transforms, in the order of applying."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.strategies import Strategy
from labkit.strategies import load
from labkit.strategies.checkpointing import checkpoint_activations
from labkit.strategies.mesh.peers import team_on
from labkit.strategies.mesh.roles import Roles
from labkit.strategies.model.alike import check_states
from labkit.strategies.model.states import move_states
from labkit.strategies.options import BatchNorm
from labkit.strategies.options import Undo
from labkit.strategies.options import compile_blocks
from labkit.strategies.options import replace_batchnorm
from labkit.strategies.prepared import Prepared
from labkit.strategies.relay.stages import layers_of
from labkit.train_options import TrainOptions


def change_layers(
    model: nn.Module,
    strategy: Strategy,
    options: TrainOptions,
    *,
    note: Callable[[str], None],
    undo: list[Undo],
) -> None:
    """The transforms of single layers, before `parallelize`; nothing has changed where
    one is refused. `note` and `undo` are as there."""
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
        is_in_stages = "pp" in strategy.axes
        layers = layers_of(model).values() if is_in_stages else ()
        undo += checkpoint_activations(model, layers)
    # Before sharding, so that no graph holds what gathers parameters.
    if options.compile:
        undo += compile_blocks(model)


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
    roles: Roles | None = None,
) -> Prepared:
    """`model` and `optimizer` under `strategy`, changed in place. May be collective.
    A strategy that they were under before has released them.

    With `roles` some ranks serve the others, of which this is one.
    Every collective is taken along the axis of `mesh` that it belongs to; without a
    mesh there is none.

    What a run that ends takes back is added to `undo`, also where this fails half-way.

    Source: the order is that of `torchtitan/models/llama3/infra/parallelize.py`: split
    into stages, tensor parallel, activation checkpointing, compile, shard.
    """
    team = team_on(mesh, device) if roles is None else roles.peers
    check_states(optimizer, team)
    division = None
    if strategy.divide is not None:
        division = load(strategy.divide)(model, optimizer, mesh, device, options)
        options = division.options
    technique = strategy.load(None if mesh is None else mesh.mesh_dim_names)
    prepared = technique(
        strategy, model, optimizer, mesh, device, options, roles, note=note
    )
    if strategy.server is None:  # its optimizers have their states on the servers
        move_states(optimizer)  # those that it has brought, after the model
    undo.append(prepared.close)
    if division is not None:
        undo += division.attach(prepared)
    BatchNorm.peers = prepared.peers
    return prepared
