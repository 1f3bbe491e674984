"""What `fit` does with a batch, and evaluation on all ranks' shares of a dataset."""

import inspect
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

from labkit.rank.data.dealing import Dealer
from labkit.rank.data.dealing import Share
from labkit.rank.data.dealing import shard_dataset
from labkit.rank.data.loader import RankLoader
from labkit.rank.data.sharing import as_given
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.prepared import Prepared

LossFunction = Callable[..., torch.Tensor]
"""`f(output, y)`, or `f(output)`: a batch's mean."""


class Scores:
    """A batch's loss and metrics, by name.

    Of a list or tuple the last element is `y`, and the others are the model's
    arguments; a mapping holds its keyword arguments, and is `y`, and so is a batch of
    another kind. Where all functions take the output alone the model gets it all.
    """

    def __init__(self, functions: Mapping[str, LossFunction]) -> None:
        self.functions = functions
        self._alone = {name for name in functions if takes_one(functions[name])}

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        has_target = len(self._alone) < len(self.functions)
        if isinstance(batch, Mapping):
            output, y = model(**batch), batch
        elif not isinstance(batch, list | tuple):
            output, y = model(batch), batch
        elif has_target and len(batch) > 1:
            *inputs, y = batch
            output = model(*inputs)
        else:
            output, y = model(*batch), batch[-1]
        found = {
            name: function(output) if name in self._alone else function(output, y)
            for name, function in self.functions.items()
        }
        if torch.is_grad_enabled():
            check_loss(found["loss"])
        return found


def check_loss(loss: Any) -> None:
    """ValueError for what no backward pass can begin with."""
    if not isinstance(loss, torch.Tensor):
        raise ValueError(
            f"loss_fn returned a {type(loss).__name__}; it must return a tensor, from "
            "which the backward pass begins: leave out .item() or float(), if it has "
            "them"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}; it must return "
            'one number, the mean over the batch: leave out reduction="none", or write '
            ".mean()"
        )


def takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function has one argument, and no second."""
    if isinstance(function, nn.Module):
        function = function.forward
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one that is not written in Python
        return False
    kinds = [p.kind for p in parameters]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return False
    by_place = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return sum(kind in by_place for kind in kinds) == 1


@torch.no_grad()
def evaluate(
    prepared: Prepared,
    source: Dataset[Any] | DataLoader[Any],
    functions: Mapping[str, LossFunction],
    *,
    batch_size: int,
    peers: Peers,
) -> dict[str, float]:
    """Means over the whole of `source`, as `val_<name>`. Collective: each rank
    evaluates its share."""
    source = as_given(source)
    loader, batches = shard_dataset(
        source,
        Dealer(peers, own_team=prepared.team),
        batch_size=None if isinstance(source, DataLoader) else batch_size,
        shuffle=False,
        seed=0,
        keep_last=True,
    )
    shares: list[Share] = []
    scores = Scores(functions)
    model = prepared.module
    was_training = model.training
    model.eval()
    sums = torch.zeros(len(functions) + 1, dtype=torch.float64, device=peers.device)
    for batch in RankLoader(
        loader,
        batches,
        peers.device,
        on_epoch=lambda epoch: None,
        on_batch=lambda share, loader: shares.append(share),
        on_end=lambda: None,
    ):
        num_samples = shares[-1].num_samples
        values = [float(each) for each in prepared.eval_batch(scores, batch).values()]
        if num_samples:
            sums += num_samples * torch.tensor([*values, 1.0], device=peers.device)
    model.train(was_training)
    *totals, count = peers.all_reduce(sums).tolist()
    return {
        f"val_{name}": total / count
        for name, total in zip(functions, totals, strict=True)
    }
