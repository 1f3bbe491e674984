"""An optimizer of `prepare` after its run."""

import sys
import weakref
from typing import Any

import torch

from labkit.checks import UnsupportedLoopError
from labkit.rank.loop.loop_checks import of_former_runs
from labkit.rank.steps.optimizer import PreparedOptimizer
from labkit.strategies.autograd.agreement import settings_of
from labkit.strategies.prepared import Closure

IN_FP32 = (
    "labkit: this optimizer was prepared in a run that is over, and so is its "
    "--precision bf16: the model computes in fp32 from now on. To train on in bf16, "
    "prepare model and optimizer again in a %%dist_train cell, or call the model "
    "within torch.autocast(device.type, torch.bfloat16)"
)


settings_left: "weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]" = (
    weakref.WeakKeyDictionary()
)
"""What the groups of optimizers of former runs had when these ended."""


def leave_run(optimizer: PreparedOptimizer) -> None:
    """From now on its steps are plain ones."""
    prepared = optimizer.prepared
    optimizer.take_step = take_plain_step
    optimizer.num_ranks = 1  # there are no others to compare with
    prepared.course.end()
    prepared.is_over = True
    of_former_runs.add(prepared.optimizer)
    settings_left[prepared.optimizer] = settings_of(prepared.optimizer)
    if prepared.strategy.has_own_gradients:
        prepared.optimizer.register_step_pre_hook(refuse_own_step)


def take_plain_step(optimizer: PreparedOptimizer, closure: Closure | None) -> None:
    """After the run, in which steps are counted, losses weighted and scaled."""
    prepared = optimizer.prepared
    if prepared.options.accumulate > 1 or prepared.options.precision == "fp16":
        raise UnsupportedLoopError(
            "this optimizer was prepared in a run that is over, so --accumulate and "
            "the loss scaling of --precision fp16 no longer work; prepare model and "
            "optimizer again in a %%dist_train cell"
        )
    if (prepared.options.average_every or 1) > 1:
        raise UnsupportedLoopError(
            "this optimizer was prepared in a run that is over, so no mean over the "
            "ranks is taken any longer, as --average-every says; prepare model and "
            "optimizer again in a %%dist_train cell"
        )
    prepared.check_layout()
    if prepared.in_autocast:
        prepared.in_autocast = False  # it is said once
        if prepared.peers.rank == 0:
            print(IN_FP32, file=sys.stderr)
    inner = prepared.optimizer
    _stepping.add(inner)
    try:
        prepared.step(closure)
    finally:
        _stepping.discard(inner)
    if not prepared.strategy.is_single:
        steps_of_cell.append(id(inner))


steps_of_cell: list[int] = []
"""The id of an optimizer of a former run for each of its steps in this cell; all ranks
are to take as many."""
_stepping: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Of former runs, in the step of what `prepare` has returned."""


def refuse_own_step(optimizer: torch.optim.Optimizer, *called: Any) -> None:
    """UnsupportedLoopError where a cell after the run steps the optimizer that it gave
    to `prepare` or `fit`, in which there are no gradients."""
    if optimizer not in _stepping:
        kind = type(optimizer).__name__
        raise UnsupportedLoopError(
            f"this {kind} was given to prepare or fit in a run that is over, and has "
            "partitions without gradients in place of the model's parameters, so its "
            "step changes nothing. Call step() on the optimizer that prepare returned, "
            "or make a new one and prepare it with the model in a %%dist_train cell"
        )
