"""Evaluates a model on all ranks' shares of a dataset."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

from labkit.rank.loader import RankLoader
from labkit.rank.loader import Share
from labkit.rank.loader import deal_out

LossFunction = Callable[[Any, Any], torch.Tensor]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    source: Dataset[Any] | DataLoader[Any],
    functions: Mapping[str, LossFunction],
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> dict[str, float]:
    """Means over the whole of `source`, as `val_<name>`. Collective: each rank
    evaluates its share."""
    loader, batches = deal_out(
        source,
        batch_size=None if isinstance(source, DataLoader) else batch_size,
        shuffle=False,
        rank=rank,
        world_size=world_size,
        seed=0,
    )
    batches.drop_last = False
    shares: list[Share] = []
    was_training = model.training
    model.eval()
    sums = torch.zeros(len(functions) + 1, dtype=torch.float64, device=device)
    for x, y in RankLoader(
        loader,
        batches,
        device,
        on_epoch=lambda epoch: None,
        on_batch=shares.append,
        on_end=lambda: None,
    ):
        num_samples = shares[-1].num_samples
        output = model(x)
        values = [float(function(output, y)) for function in functions.values()]
        if num_samples:
            sums += num_samples * torch.tensor([*values, 1.0], device=device)
    model.train(was_training)
    dist.all_reduce(sums)
    *totals, count = sums.tolist()
    return {
        f"val_{name}": total / count
        for name, total in zip(functions, totals, strict=True)
    }
