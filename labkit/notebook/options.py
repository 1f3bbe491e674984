"""Checks what a magic line says about the training step, before anything runs."""

from collections.abc import Mapping
from typing import Any

from labkit.checks import check_choice
from labkit.checks import check_count
from labkit.checks import check_flag
from labkit.checks import is_number
from labkit.checks import shown
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
