"""Predicts a rank's memory under every strategy before anything runs.

One training step of the plain model runs on fake tensors, which have shapes and no
data: that gives the bytes of activations, temporaries and gradients at every moment.
What each strategy keeps and gathers is added by arithmetic.
"""

import itertools
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import nn

from labkit.checks import check_count
from labkit.estimate.advice import LEFT_OUT
from labkit.estimate.advice import SETUP_PEAK
from labkit.estimate.advice import needed
from labkit.estimate.advice import refusal
from labkit.estimate.advice import what_can_fit
from labkit.estimate.advice import what_is_left_out
from labkit.estimate.advice import what_would_fit
from labkit.estimate.arguments import batch_of
from labkit.estimate.arguments import check
from labkit.estimate.arguments import check_input
from labkit.estimate.arguments import check_model
from labkit.estimate.arguments import cross_entropy
from labkit.estimate.arguments import guessed_input
from labkit.estimate.arguments import inputs_of
from labkit.estimate.arguments import optimizer_class
from labkit.estimate.plans import Plan
from labkit.estimate.rows import STRATEGIES
from labkit.estimate.rows import is_grid
from labkit.estimate.rows import rows_of
from labkit.estimate.trace import Loss
from labkit.estimate.trace import Optimizer
from labkit.estimate.trace import UntraceableError
from labkit.options import documented
from labkit.records import COMPONENTS
from labkit.train_options import TrainOptions

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["STRATEGIES", "estimate", "forecast"]


Batch = torch.Tensor | tuple[torch.Tensor, ...] | Mapping[str, Any]


@documented(TrainOptions)
def estimate(
    model: nn.Module,
    x: Batch | None,
    loss_fn: Loss | None = None,
    *,
    optimizer: Optimizer | None = None,
    world_sizes: Sequence[int],
    batch_size: int = 1,
    accumulate: int = 1,
    precision: str = "fp32",
    activation_checkpointing: bool = False,
    device: str = "cpu",
    device_bytes: float | None = None,
    strategies: Collection[str] | None = None,
) -> "pd.DataFrame":
    """Predict the memory of the fullest rank under every strategy.

    A strategy with a grid of ranks has a row for each by which `model` can be divided,
    called as a magic line has it: "tensor --mesh dp=2,tp=4". `pipeline` is as `fit`
    runs it, with the default schedule and microbatches.

    Workspaces inside of kernels, and what the device and its communication libraries
    keep for themselves, are not in it.

    Parameters
    ----------
    model : nn.Module
        The plain module, also on the meta device. It is not changed.
    x : Tensor, or tuple or dict of Tensor, or None
        A batch of the input, of which shapes and dtypes count; its first dimension is
        replaced by a rank's share of `batch_size`. With None the activations are NaN,
        and the total is what there is without them.
    loss_fn : callable, optional
        `loss_fn(output)`, a scalar; by default the cross-entropy of the output's last
        dimension.
    optimizer : Optimizer or type, default AdamW
        One whose class and defaults are taken, or a class.
    world_sizes : sequence of int
        Numbers of ranks.
    batch_size : int, default 1
        Samples of a global batch; `single` has all of them on one rank.
    {accumulate}
    {precision}
    {activation_checkpointing}
    device : str, default "cpu"
        The kind of the ranks' devices: "cpu" or "cuda".
    device_bytes : float, optional
        Memory of a rank's device, in bytes, to compare with.
    strategies : collection of str, optional
        Those to predict, as a magic line has them; by default all.

    Returns
    -------
    DataFrame
        Bytes by (world_size, strategy). The columns are `labkit.records.COMPONENTS`,
        each at its greatest within a step, as in `Run.memory`; "setup_peak", the most
        that `prepare` needs; and with `device_bytes` "fits": True, False, or None for
        what is not known without `x`. Its `attrs["left_out"]` has the rows by which
        `model` cannot be divided, with the reason.

    Raises
    ------
    ValueError
        For what cannot be estimated.
    UntraceableError
        A ValueError: the model does not run without data, or `device` is "cuda" and
        no GPU is visible.
    """
    import pandas as pd

    step = accumulate, precision, activation_checkpointing
    check(model, x, world_sizes, batch_size, *step, optimizer, device, device_bytes)
    inputs = None if x is None else inputs_of(model, x)
    plan = Plan(model, inputs, loss_fn or cross_entropy, optimizer, *step, device)
    rows: dict[tuple[int, str], dict[str, float]] = {}
    left_out: dict[tuple[int, str], str] = {}
    for row in itertools.chain.from_iterable(map(rows_of, world_sizes)):
        place = row.world_size, row.words
        if strategies is not None and row.words not in strategies:
            continue
        try:
            rows[place] = plan.memory(row, batch_size) | {SETUP_PEAK: plan.setup(row)}
        except ValueError as error:
            if not is_grid(row.strategy):
                raise
            left_out[place] = str(error)
    if not rows:
        unknown = f"none of {', '.join(strategies or ())} is a row of this table"
        raise ValueError(next(iter(left_out.values()), unknown))
    columns = [*COMPONENTS, SETUP_PEAK]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    table.index = pd.MultiIndex.from_tuples(rows, names=["world_size", "strategy"])
    table.attrs[LEFT_OUT] = left_out
    known = [name for name in COMPONENTS if table[name].notna().all()]
    table = table.round().astype(dict.fromkeys(known, "int64"))
    if device_bytes is not None:
        table["fits"] = needed(table) <= device_bytes
        if x is None:
            table["fits"] = [None if fits else False for fits in table["fits"]]
    return table


def forecast(
    model: nn.Module,
    x: Batch | None = None,
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
    """Predict as `estimate`, and say in sentences what fits and what would.

    Where no step can be traced, the table is without activations, and the sentences say
    what they need.

    Parameters
    ----------
    model : nn.Module
        As for `estimate`.
    x : Tensor, or tuple or dict of Tensor, optional
        As for `estimate`; by default it is guessed from how the model begins.
    world_sizes, accumulate, activation_checkpointing
        As for `estimate`.
    device_bytes : float
        Memory of a rank's device.
    batch_size : int, optional
        Samples of a global batch; by default those of `x`.
    sequence : int, optional
        Tokens of a sample, where the input is guessed.
    optimizer : Optimizer, type or str, default AdamW
        As for `estimate`, or the name of a class of torch.optim.
    **options : object
        The rest of `estimate`'s.

    Returns
    -------
    table : DataFrame
        As from `estimate`.
    sentences : str
        What fits, and which option would make more fit.

    Raises
    ------
    ValueError
        For what cannot be estimated.
    """
    check_model(model)
    if x is not None:
        check_input(x)
        batch_size = batch_of(x) if batch_size is None else batch_size
    if batch_size is not None:
        check_count("batch size", batch_size, "the samples of all ranks together")
    if isinstance(optimizer, str):
        optimizer = optimizer_class(optimizer)
    changes: dict[str, Any] = {
        "accumulate": accumulate,
        "activation_checkpointing": activation_checkpointing,
    }
    says = ""
    if x is None:
        x, says = guessed_input(model, batch_size, sequence)
    find: Any = partial(estimate, model, optimizer=optimizer, **options)
    limits = {"world_sizes": world_sizes, "device_bytes": device_bytes}
    if x is not None:
        find = partial(find, batch_size=batch_size)
        try:
            table = find(x, **limits, **changes)
        except UntraceableError as error:
            x, says = None, str(error)
    if x is None:
        table = find(None, **limits, **changes)
        missing = f"Activations are not included: {says}."
        sentences = [what_can_fit(table, device_bytes), missing]
    else:
        advice = what_would_fit(
            lambda **change: find(
                x, world_sizes=[min(world_sizes)], **{**changes, **change}
            ),
            table,
            device_bytes,
            batch_size=batch_size or 1,
            precision=options.get("precision", "fp32"),
            **changes,
        )
        sentences = [advice, says]
    sentences += [refusal(model), what_is_left_out(table)]
    return table, " ".join(filter(None, sentences))
