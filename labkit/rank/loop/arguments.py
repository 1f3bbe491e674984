"""What `prepare` and `fit` can be called with."""

import itertools
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from labkit.checks import check_choice
from labkit.checks import short_repr
from labkit.rank.data.evaluation import LossFunction
from labkit.strategies.model.states import parameters_of
from labkit.strategies.zero.engines import is_zero
from labkit.strategies.zero.engines import strategy_of

WITH_ITS_WEIGHTS = (
    "from torch.distributed.checkpoint.state_dict import StateDictOptions, "
    "get_model_state_dict; weights = get_model_state_dict(model, options="
    "StateDictOptions(full_state_dict=True)); model = Net(); "
    "model.load_state_dict(weights)"
)
"""How a model is built again, whatever strategy has prepared it."""


def check_prepared(model: Any, optimizer: Any) -> None:
    """ValueError unless `prepare` can use this model and optimizer together."""
    if not isinstance(model, nn.Module):
        hint = ", such as what it returns" if callable(model) else ""
        raise ValueError(
            f"model is {type_and_value(model)}; prepare takes a torch.nn.Module{hint}"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "model is wrapped in DistributedDataParallel already; give prepare the "
            "plain model, or use %%dist_train raw"
        )
    if is_zero(model) or is_fully_sharded(model):
        raise ValueError(
            "model is sharded already, by an earlier run or by the cell; build it "
            "again in this cell, or use %%dist_train raw. To go on with its weights, "
            f"on all ranks: {WITH_ITS_WEIGHTS}"
        )
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        raise ValueError(
            "the model has lazy modules that have not seen any input, so their "
            "parameters have no shape; call model(x) once before prepare, and make the "
            "optimizer after that"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer is {type_and_value(optimizer)}; make one from the model's "
            "parameters, for example torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    ours = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in ours for parameter in parameters_of(optimizer)):
        if strategy := strategy_of(optimizer):
            raise ValueError(
                f"the optimizer is prepared under {strategy} already, by an earlier "
                "run or by the cell, and holds partitions in place of the model's "
                "parameters; make a new one in this cell, from model.parameters(). It "
                "starts without the old one's state, which --checkpoint and --resume "
                "carry over"
            )
        raise ValueError(
            "the optimizer holds no parameter of this model; make it after the model, "
            "from model.parameters()"
        )


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether it has DTensors, or is under `fully_shard`, where the parameters of the
    root are whole after a forward pass that no backward pass follows."""
    parts = itertools.chain(model.modules(), model.parameters())
    return any(isinstance(part, FSDPModule | DTensor) for part in parts)


def check_reduction(reduction: Any, weigh: Any) -> None:
    """ValueError unless `prepare` can weigh losses so."""
    check_choice("reduction", reduction, ["mean", "sum"])
    if weigh is not None and not callable(weigh):
        raise ValueError(
            f"weigh is {short_repr(weigh)}; give a function of a batch, for example "
            "weigh=lambda batch: (batch[1] != -100).sum()"
        )
    if weigh is not None and reduction == "sum":
        raise ValueError(
            'weigh is for losses that are means, and reduction is "sum"; leave out '
            "one of the two"
        )


def functions_of_fit(
    loss_fn: Any, metrics: Any, *, validates: bool
) -> dict[str, LossFunction]:
    """What `fit` computes of a batch, by name; ValueError for what it cannot."""
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, Mapping) or "loss" in metrics:
        raise ValueError(
            f"metrics are {short_repr(metrics)}; give a dict of functions by name, "
            "without the name 'loss', which is loss_fn's"
        )
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn is {type_and_value(loss_fn)}; give a function of (output, y), "
            "for example torch.nn.functional.cross_entropy"
        )
    for name, function in metrics.items():
        if not isinstance(name, str) or not callable(function):
            raise ValueError(
                f"metrics[{short_repr(name)}] is {short_repr(function)}; give a "
                "function of (output, y), under a name that is a string"
            )
    if metrics and not validates:
        raise ValueError("metrics need data: pass validate=dataset as well")
    return {"loss": loss_fn, **metrics}


def type_and_value(value: Any) -> str:
    """A value in few words, for an error message: the same ones on every rank."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    text = short_repr(value)
    if " at 0x" in text:
        return f"an object of type {type(value).__name__}"
    return f"{type(value).__name__} {text}"
