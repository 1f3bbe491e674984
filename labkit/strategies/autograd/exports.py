"""Refuses what would export a model as a run has it: traced, exported or scripted."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError

IN_PARTS = (
    "torch.jit.trace, torch.export and torch.onnx.export record what one process "
    "computes, and under {strategy} a rank has only a part of the model, and "
    "exchanges with the others. Export a plain model with the weights of this one: "
    "%dist_pull model --full has them in the notebook, for "
    "plain.load_state_dict(model)"
)
SCRIPTED = (
    "torch.jit.script compiles a model with its hooks, and labkit has some in this one "
    "for as long as the run lasts. Script a plain model with the weights of this one: "
    "%dist_pull model --full has them in the notebook, for plain.load_state_dict(model)"
)


def refuse_exports(
    module: nn.Module, strategy: str, *, is_in_parts: bool
) -> list[Callable[[], None]]:
    """UnsupportedLoopError where a loop exports `module`; returns what ends that."""
    vars(module)["__prepare_scriptable__"] = partial(refuse, SCRIPTED)
    undo: list[Callable[[], None]] = [
        lambda: vars(module).pop("__prepare_scriptable__", None)
    ]
    if is_in_parts:
        words = IN_PARTS.format(strategy=strategy)
        hook = partial(refuse_recording, words, weakref.ref(module))
        undo.append(module.register_forward_pre_hook(hook, prepend=True).remove)
    return undo


def refuse(words: str) -> None:
    raise UnsupportedLoopError(words)


def refuse_recording(
    words: str, prepared: weakref.ref[nn.Module], module: nn.Module, args: Any
) -> None:
    """A forward pre-hook, which a copy of the model has, too."""
    if module is not prepared():
        return
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise UnsupportedLoopError(words)
