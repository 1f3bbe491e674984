"""Predicts a rank's memory under every strategy before anything runs.

One training step of the plain model runs on fake tensors, which have shapes and no
data: it tells the bytes of activations, temporaries and gradients at every moment. What
each strategy keeps and gathers is added to that by arithmetic.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import nn

from labkit.estimate.advice import SETUP_PEAK
from labkit.estimate.advice import needed
from labkit.estimate.advice import what_would_fit
from labkit.estimate.arguments import check
from labkit.estimate.arguments import check_input
from labkit.estimate.arguments import cross_entropy
from labkit.estimate.arguments import ids_for
from labkit.estimate.arguments import optimizer_class
from labkit.estimate.plans import STRATEGIES
from labkit.estimate.plans import Plan
from labkit.estimate.trace import Loss
from labkit.estimate.trace import Optimizer
from labkit.records import COMPONENTS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["STRATEGIES", "estimate", "forecast"]


def estimate(
    model: nn.Module,
    x: torch.Tensor | tuple[torch.Tensor, ...],
    loss_fn: Loss | None = None,
    *,
    optimizer: Optimizer | None = None,
    world_sizes: Sequence[int],
    batch_size: int,
    accumulate: int = 1,
    precision: str = "fp32",
    activation_checkpointing: bool = False,
    device: str = "cpu",
    device_bytes: float | None = None,
) -> "pd.DataFrame":
    """Bytes of the fullest rank by (world_size, strategy), one column a component.

    The columns are `labkit.records.COMPONENTS`, each at its greatest within a step, as
    `Run.memory` has them, and "setup_peak", the most that `prepare` needs. `model` is
    not changed, and may be on the meta device; of `x` only shapes and dtypes count, its
    first dimension gives way to the share of `batch_size`, the global batch, that a
    rank has. `loss_fn(output)` is a scalar; by default the cross-entropy of the
    output's last dimension. `optimizer` is one whose class and defaults are taken, or a
    class (AdamW without it). `single` has the whole batch on one rank. With
    `device_bytes` a column "fits" compares.

    Workspaces inside of kernels, and what the device and its communication libraries
    keep for themselves, are not in it.

    Raises ValueError for what cannot be estimated.
    """
    import pandas as pd

    check(
        model,
        x,
        world_sizes,
        batch_size,
        accumulate,
        precision,
        activation_checkpointing,
        optimizer,
        device,
        device_bytes,
    )
    inputs = x if isinstance(x, tuple) else (x,)
    plan = Plan(
        model,
        inputs,
        loss_fn or cross_entropy,
        optimizer,
        accumulate,
        precision,
        activation_checkpointing,
        device,
    )
    rows = {
        (world_size, strategy): {
            **plan.memory(strategy, world_size, batch_size),
            SETUP_PEAK: plan.setup(strategy, world_size),
        }
        for world_size in world_sizes
        for strategy in STRATEGIES
    }
    columns = [*COMPONENTS, SETUP_PEAK]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    table.index = pd.MultiIndex.from_tuples(rows, names=["world_size", "strategy"])
    table = table.round().astype("int64")
    if device_bytes is not None:
        table["fits"] = needed(table) <= device_bytes
    return table


def forecast(
    model: nn.Module,
    x: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    *,
    world_sizes: Sequence[int],
    device_bytes: float,
    batch_size: int | None = None,
    sequence: int | None = None,
    optimizer: Optimizer | str | None = None,
    accumulate: int = 1,
    activation_checkpointing: bool = False,
    **options: Any,
) -> tuple["pd.DataFrame", str]:
    """`estimate`, and a sentence that says what fits and what would.

    Without `x` the model takes token ids of shape (batch, `sequence`). `batch_size` is
    by default that of `x`. `optimizer` may be the name of a class of torch.optim.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}, no torch.nn.Module")
    if x is not None:
        check_input(x)
    if batch_size is None and x is not None:
        batch_size = len(x[0] if isinstance(x, tuple) else x)
    if batch_size is None:
        raise ValueError("give --batch-size B, the samples of all ranks together")
    if isinstance(optimizer, str):
        optimizer = optimizer_class(optimizer)
    find = partial(
        estimate,
        model,
        ids_for(model, sequence) if x is None else x,
        optimizer=optimizer,
        batch_size=batch_size,
        **options,
    )
    changes: dict[str, Any] = {
        "accumulate": accumulate,
        "activation_checkpointing": activation_checkpointing,
    }
    table = find(world_sizes=world_sizes, device_bytes=device_bytes, **changes)
    sentence = what_would_fit(
        lambda **change: find(world_sizes=[min(world_sizes)], **{**changes, **change}),
        table,
        device_bytes,
        batch_size=batch_size,
        **changes,
    )
    return table, sentence
