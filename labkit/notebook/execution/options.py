"""Checks what a magic line says about the training step, before anything runs."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.checks import check_choice
from labkit.checks import check_count
from labkit.checks import check_flag
from labkit.checks import is_number
from labkit.checks import shown
from labkit.records import PRECISIONS
from labkit.records import CheckpointPlan
from labkit.records import TrainOptions
from labkit.step_folders import last_in
from labkit.step_folders import step_of
from labkit.strategies import Strategy


def check_options(
    strategy: Strategy,
    options: TrainOptions,
    *,
    device: str,
    config: Mapping[str, Any] | None,
) -> None:
    """ValueError unless `options` and `config` can be with this strategy and device.

    `device` is "cpu" or "cuda".
    """
    check_count(
        "accumulate", options.accumulate, "the microbatches of one optimizer step"
    )
    clip = options.clip
    if clip is not None and not (is_number(clip) and clip > 0):
        raise ValueError(
            f"clip is {shown(clip)}; it must be a positive number: the norm that the "
            "gradients are clipped to"
        )
    check_choice("precision", options.precision, PRECISIONS)
    for flag in ("activation_checkpointing", "sync_batchnorm", "compile"):
        check_flag(flag, getattr(options, flag))
    if options.precision == "fp16" and device == "cpu":
        raise ValueError(
            "fp16 needs a GPU: CPUs have no fast arithmetic in it; choose bf16, which "
            "has fp32's range and needs no loss scaling"
        )
    if config is not None and (
        not isinstance(config, Mapping) or not all(isinstance(k, str) for k in config)
    ):
        raise ValueError(
            f"config is a {type(config).__name__}; give a dict with names for keys, "
            "in the words of the strategy's own library"
        )
    if strategy.technique is None:
        plain = TrainOptions()
        for name in (
            "accumulate",
            "clip",
            "precision",
            "activation_checkpointing",
            "sync_batchnorm",
            "compile",
        ):
            if getattr(options, name) != getattr(plain, name):
                raise ValueError(
                    f"{strategy.name} leaves everything to the cell, so "
                    f"--{name.replace('_', '-')} is for the cell to do"
                )
        if config:
            raise ValueError(
                f"{strategy.name} has nothing that --config could set; leave it out"
            )


def plan_checkpoints(
    strategy: Strategy,
    directory: str | os.PathLike[str] | None,
    *,
    every: int | None,
    keep: int | None,
    resume: bool,
    elastic: bool,
) -> CheckpointPlan | None:
    """What is asked for about checkpoints, but for the one to resume from.

    Raises ValueError for what cannot be.
    """
    if directory is None:
        given = {"every": every, "keep": keep, "resume": resume, "elastic": elastic}
        for name, value in given.items():
            if value:
                raise ValueError(
                    f"--{name} goes with --checkpoint DIR, the folder in which the "
                    "run's state is kept"
                )
        return None
    if not isinstance(directory, str | os.PathLike) or not str(directory):
        raise ValueError(f"checkpoint is {shown(directory)}; it must name a folder")
    if strategy.technique is None:
        raise ValueError(
            f"{strategy.name} leaves everything to the cell, so --checkpoint is for "
            "the cell to do: call save_checkpoint and load_checkpoint in it"
        )
    for name, value in (("every", every), ("keep", keep)):
        if value is not None:
            check_count(name, value)
    check_flag("resume", resume)
    check_flag("elastic", elastic)
    path = Path(directory).expanduser().absolute()
    plan = CheckpointPlan(str(path))
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"--checkpoint {path}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--checkpoint {path}: {there} cannot be written to")
    last = last_in(path)
    if last is not None and not resume:
        raise ValueError(
            f"{path} holds checkpoints, the last of step {step_of(last)}; add --resume "
            "to go on from there, or name another folder"
        )
    return replace(
        plan,
        every=every or plan.every,
        keep=keep or plan.keep,
        resume_from=None if last is None else str(last),
    )


def first_step_of(plan: CheckpointPlan | None) -> int | None:
    """The step of the checkpoint that a run is to go on from, if it is."""
    if plan is None or plan.resume_from is None:
        return None
    return step_of(Path(plan.resume_from))
