"""Checks what a magic line says about the training step, before anything runs."""

import math
from collections.abc import Mapping
from typing import Any

from labkit.records import PRECISIONS
from labkit.records import TrainOptions
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
    if not is_count(options.accumulate):
        raise ValueError(
            f"accumulate is {options.accumulate!r}; it must be a whole number from 1: "
            "the microbatches of one optimizer step"
        )
    clip = options.clip
    if clip is not None and not (is_number(clip) and 0 < clip < math.inf):
        raise ValueError(
            f"clip is {clip!r}; it must be a positive number: the norm that the "
            "gradients are clipped to"
        )
    if options.precision not in PRECISIONS:
        raise ValueError(
            f"precision is {options.precision!r}; choose one of: "
            + ", ".join(PRECISIONS)
        )
    if options.precision == "fp16" and device == "cpu":
        raise ValueError(
            "fp16 needs a GPU, for the CPU has no fast arithmetic in it; choose bf16, "
            "which has fp32's range and needs no loss scaling"
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
            raise ValueError(f"{strategy.name} has nothing that --config could set")


def is_count(value: Any) -> bool:
    """Whether `value` is a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
