"""Every strategy on a real cluster gives what one process gives on the same batches.

The reference is a plain loop in this process, which knows nothing of labkit but its
models and datasets.
"""

import functools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from labkit import Lab
from labkit.notebook.runs import Run

pytestmark = pytest.mark.timeout(90)

Captured = pytest.CaptureFixture[str]

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]
SHARDED = ["zero3", "fsdp", "hsdp"]

# 19 samples in batches of 9 are 9, 9 and 1: no batch divides evenly, and of the last
# one all ranks but one have no part. BatchNorm is to have a sample on every rank, with
# 4 ranks and 2 microbatches as well: batches of 10 and 9.
SETUPS = {
    "mlp": """
        from labkit.data import digits
        from labkit.models import mlp
        images, labels = digits().tensors
        data = torch.utils.data.TensorDataset(images[:19], labels[:19])
        unseen = torch.utils.data.TensorDataset(images[50:69], labels[50:69])
        model = mlp(num_hidden=16)
        loss_fn = torch.nn.functional.cross_entropy
        batch_size = 9
        """,
    "resnet": """
        from labkit.data import digits
        from labkit.models import ResNet
        images, labels = digits().tensors
        data = torch.utils.data.TensorDataset(images[:19], labels[:19])
        unseen = torch.utils.data.TensorDataset(images[50:69], labels[50:69])
        model = ResNet(width=4)
        loss_fn = torch.nn.functional.cross_entropy
        batch_size = 10
        """,
    "gpt": """
        from labkit.models import GPT, next_token_loss
        ids = torch.randint(0, 32, (38, 9), generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(ids[:19, :-1], ids[:19, 1:])
        unseen = torch.utils.data.TensorDataset(ids[19:, :-1], ids[19:, 1:])
        model = GPT(32, context=8, dim=16, num_heads=2, num_layers=2)
        loss_fn = next_token_loss
        batch_size = 9
        """,
}
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    # Two groups, as one leaves biases and norms out of the decay.
    "adamw": """torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {
                "params": [p for p in model.parameters() if p.dim() < 2],
                "weight_decay": 0.0,
            },
        ],
        lr=0.01,
        weight_decay=0.1,
    )""",
}
EPOCHS = 2

# One scheduler steps with every batch, the other with every epoch.
EVERY_STEP = "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)"
EVERY_EPOCH = "torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)"


@dataclass(frozen=True)
class Reference:
    """What one process found."""

    losses: list[float]  # of every optimizer step
    gradient_norms: list[float]  # of every optimizer step, before clipping
    val_losses: list[float]  # of every epoch
    learning_rate: float  # at the end
    initial: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@functools.cache
def reference(
    setup: str,
    optimizer: str = "sgd",
    *,
    accumulate: int = 1,
    clip: float | None = None,
    scheduled: bool = False,
) -> Reference:
    """The plain loop. Microbatch m of K of a batch of n begins at its sample n*m//K."""
    names: dict[str, Any] = {"torch": torch}
    torch.manual_seed(0)
    exec(textwrap.dedent(SETUPS[setup]), names)
    model, data, loss_fn = names["model"], names["data"], names["loss_fn"]
    names["optimizer"] = steps = eval(OPTIMIZERS[optimizer], names)
    every_step = eval(EVERY_STEP, names) if scheduled else None
    every_epoch = eval(EVERY_EPOCH, names) if scheduled else None
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    losses, norms, val_losses = [], [], []
    for _ in range(EPOCHS):
        for first in range(0, len(data), names["batch_size"]):
            size = min(names["batch_size"], len(data) - first)
            batch_loss = 0.0
            for micro in range(accumulate):
                start = first + size * micro // accumulate
                stop = first + size * (micro + 1) // accumulate
                if stop > start:
                    x, y = data[start:stop]
                    loss = loss_fn(model(x), y) * (stop - start) / size
                    loss.backward()
                    batch_loss += loss.item()
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
            steps.step()
            steps.zero_grad()
            losses.append(batch_loss)
            norms.append(norm.item())
            if every_step:
                every_step.step()
        if every_epoch:
            every_epoch.step()
        model.eval()
        with torch.no_grad():
            x, y = names["unseen"][:]
            val_losses.append(loss_fn(model(x), y).item())
        model.train()
    rate = steps.param_groups[0]["lr"]
    return Reference(losses, norms, val_losses, rate, initial, model.state_dict())


def cell(
    setup: str,
    optimizer: str = "sgd",
    *,
    before: str = "",
    after: str = "",
    every_step: str = "",
    every_epoch: str = "",
) -> str:
    """The code of a training cell, with more of it at some places."""
    return "\n".join(
        [
            textwrap.dedent(SETUPS[setup]),
            f"optimizer = {OPTIMIZERS[optimizer]}",
            textwrap.dedent(before),
            "model, optimizer, loader = prepare(",
            "    model, optimizer, data, batch_size=batch_size, shuffle=False",
            ")",
            textwrap.dedent(after),
            f"for epoch in range({EPOCHS}):",
            "    for x, y in loader:",
            "        loss = loss_fn(model(x), y)",
            "        loss.backward()",
            "        optimizer.step()",
            textwrap.indent(textwrap.dedent(every_step), " " * 8),
            "        optimizer.zero_grad()",
            textwrap.indent(textwrap.dedent(every_epoch), " " * 4),
        ]
    )


def train(lab: Lab, strategy: str, code: str, **options: Any) -> Run:
    return lab.train(strategy, code, live=False, timeout=60, **options)


def pull_weights(lab: Lab, strategy: str) -> dict[str, torch.Tensor]:
    """The whole weights, as a plain model loads them."""
    if strategy == "single":  # rank 0 alone has this run's model
        return lab.pull("model").state_dict()
    return lab.pull("model", full=True)


def global_losses(run: Run) -> np.ndarray:
    """The loss of every global batch, from the ranks' losses and samples."""
    rows = run.history.dropna(subset=["loss"])
    weighted = (rows["loss"] * rows["samples"]).groupby(rows["step"]).sum()
    return (weighted / rows["samples"].groupby(rows["step"]).sum()).to_numpy()


def assert_equals_reference(
    lab: Lab, run: Run, expected: Reference, *, rtol: float = 1e-5, atol: float = 2e-6
) -> None:
    """Losses and weights are the reference's; `atol` is for the weights."""
    np.testing.assert_allclose(global_losses(run), expected.losses, rtol=rtol)
    weights = pull_weights(lab, run.strategy)
    torch.testing.assert_close(weights, expected.weights, rtol=rtol, atol=atol)


@pytest.fixture(scope="module", params=[1, 2, 4], ids="{} ranks".format)
def lab_of_any_size(request: pytest.FixtureRequest, shared_lab: Lab) -> Iterator[Lab]:
    if request.param == shared_lab.world_size:
        shared_lab.restart()
        yield shared_lab
        return
    with Lab(num_ranks=request.param, group_timeout_s=30) as lab:
        yield lab


# ---- the same as one process ----


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
@pytest.mark.parametrize("setup", SETUPS)
def test_losses_and_weights_equal_one_process(
    lab_of_any_size: Lab, setup: str, strategy: str
) -> None:
    lab = lab_of_any_size
    options: list[dict[str, Any]] = [{}, {"accumulate": 2, "clip": 0.5}]
    if setup == "mlp":
        options += [{"accumulate": 2}, {"clip": 0.5}]
    for chosen in options:
        run = train(
            lab, strategy, cell(setup), sync_batchnorm=setup == "resnet", **chosen
        )
        expected = reference(setup, **chosen)
        assert_equals_reference(lab, run, expected)
        if "clip" in chosen:
            norms = run.history.query("rank == 0")["gradient_norm"].dropna()
            np.testing.assert_allclose(norms, expected.gradient_norms, rtol=1e-5)
            assert norms.max() > chosen["clip"]
    names: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(SETUPS[setup]), names)
    names["model"].load_state_dict(pull_weights(lab, strategy), strict=True)
