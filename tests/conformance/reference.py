"""What a loop gives in one process of plain PyTorch, with nothing of labkit's."""

import contextlib
import io
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader


def run_plainly(
    code: str,
    *,
    clip: float | None = None,
    gradient_scale: float = 1.0,
    num_shares: int = 1,
) -> Any:
    """The `result` of a loop's text; one process, the global batches.

    Only to see what a wrong loop would give: with a `gradient_scale` every gradient is
    multiplied by it, with `num_shares` the loop has one share of each batch alone.
    """

    def prepare(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        weigh: Any = None,
        reduction: str = "mean",
    ) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        assert not shuffle
        loader: Any = dataset
        if not isinstance(dataset, DataLoader):
            loader = DataLoader(dataset, batch_size=batch_size)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if clip is not None:
            clip_before_step(optimizer, clip)
        if gradient_scale != 1.0:
            for parameter in {*parameters, *model.parameters()}:
                if parameter.requires_grad:
                    parameter.register_hook(lambda grad: gradient_scale * grad)
        if gradient_scale == 0.0:  # those too that no backward pass has set
            optimizer.register_step_pre_hook(lambda *_: optimizer.zero_grad())
        if num_shares > 1:
            loader = FirstShares(loader, num_shares)
        return model, optimizer, loader

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    names = {
        "torch": torch,
        "rank": 0,
        "world_size": 1,
        "device": torch.device("cpu"),
        "prepare": prepare,
        "print": lambda *values: None,
    }
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        exec(compile(code, "<loop>", "exec"), names)
    return names["result"]


def clip_before_step(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """What `--clip` is to do: the norm of an optimizer's gradients, just before it
    steps."""
    # A fused optimizer would unscale them in its kernel, which is too late.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    def clip() -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_norm)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            clip()
            return None

        def clipped_closure() -> Any:
            loss = closure()
            clip()
            return loss

        return (optimizer, clipped_closure), {}

    optimizer.register_step_pre_hook(before_step)


class FirstShares:
    """A loader of which a loop gets the first part of each batch."""

    def __init__(self, loader: DataLoader[Any], num_shares: int) -> None:
        self.loader = loader
        self.num_shares = num_shares

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield cut(batch, self.num_shares)


def cut(batch: Any, num_shares: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[: -(-len(batch) // num_shares)]
    if isinstance(batch, list | tuple):
        return [cut(each, num_shares) for each in batch]
    return type(batch)({key: cut(each, num_shares) for key, each in batch.items()})
