"""Every strategy on a real cluster gives what one process gives on the same batches.

The reference is a plain loop in this process, which has nothing of labkit's but the
models.
"""

import contextlib
import functools
import os
import shutil
import textwrap
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from marks import in_suites
from marks import release_but
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit.notebook.runs.run import Run

pytestmark = pytest.mark.timeout(90)

Captured = pytest.CaptureFixture[str]

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]
WITH_SINGLE = ["single", *STRATEGIES]

# 19 samples in batches of 9 are 9, 9 and 1: no batch divides evenly, and of the last
# one all ranks but one have no part. BatchNorm is to have a sample on every rank, with
# 4 ranks and 2 microbatches as well: batches of 10 and 9.
SETUPS = {
    "mlp": """
        from labkit.models import mlp
        random = torch.Generator().manual_seed(1)
        images = torch.rand(39, 1, 8, 8, generator=random)
        labels = torch.randint(0, 10, (39,), generator=random)
        data = torch.utils.data.TensorDataset(images[:19], labels[:19])
        unseen = torch.utils.data.TensorDataset(images[20:], labels[20:])
        model = mlp(num_hidden=16)
        loss_fn = torch.nn.functional.cross_entropy
        batch_size, epochs = 9, 2
        """,
    "resnet": """
        from labkit.models import ResNet
        random = torch.Generator().manual_seed(1)
        images = torch.rand(39, 1, 8, 8, generator=random)
        labels = torch.randint(0, 10, (39,), generator=random)
        data = torch.utils.data.TensorDataset(images[:19], labels[:19])
        unseen = torch.utils.data.TensorDataset(images[20:], labels[20:])
        model = ResNet(width=8)
        loss_fn = torch.nn.functional.cross_entropy
        batch_size, epochs = 10, 1
        """,
    "gpt": """
        from labkit.models import GPT, next_token_loss
        random = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 32, (38, 9), generator=random)
        data = torch.utils.data.TensorDataset(ids[:19, :-1], ids[:19, 1:])
        unseen = torch.utils.data.TensorDataset(ids[19:, :-1], ids[19:, 1:])
        model = GPT(32, context=8, dim=16, num_heads=2, num_layers=2)
        loss_fn = next_token_loss
        batch_size, epochs = 9, 2
        """,
    # Blocks with code of their own (torch leaves nn.Linear as it is), one graph.
    "waves": """
        class Wave(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(8, 8)
            def forward(self, x):
                return x + torch.sin(self.linear(x))
        random = torch.Generator().manual_seed(1)
        points = torch.randn(16, 8, generator=random)
        data = torch.utils.data.TensorDataset(points, points.cos())
        unseen = data
        model = torch.nn.Sequential(Wave(), Wave())
        loss_fn = torch.nn.functional.mse_loss
        batch_size, epochs = 8, 2
        """,
}
# With 2 ranks and 2 microbatches the last batch, of 2 samples, leaves one rank without
# a sample in each of its microbatches.
SETUPS["resnet, few samples"] = (
    SETUPS["resnet"].replace("[:19]", "[:20]").replace("= 10", "= 9")
)
# The last batch, of 1 sample, leaves one microbatch without any.
SETUPS["resnet, one sample"] = SETUPS["resnet"].replace("= 10", "= 9")
SETUPS["gpt, partly frozen"] = (
    textwrap.dedent(SETUPS["gpt"]) + "model.blocks[0].requires_grad_(False)"
)
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "no momentum": "torch.optim.SGD(model.parameters(), lr=0.1)",
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
    """The plain loop. Microbatch m of K of a batch of n begins at its sample n*m/K,
    rounded up."""
    names: dict[str, Any] = {"torch": torch}
    torch.manual_seed(0)
    exec(textwrap.dedent(SETUPS[setup]), names)
    model, data, loss_fn = names["model"], names["data"], names["loss_fn"]
    names["optimizer"] = steps = eval(OPTIMIZERS[optimizer], names)
    every_step = eval(EVERY_STEP, names) if scheduled else None
    every_epoch = eval(EVERY_EPOCH, names) if scheduled else None
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    losses, norms, val_losses = [], [], []
    for _ in range(names["epochs"]):
        for first in range(0, len(data), names["batch_size"]):
            size = min(names["batch_size"], len(data) - first)
            batch_loss = 0.0
            for micro in range(accumulate):
                start = first - (-size * micro // accumulate)
                stop = first - (-size * (micro + 1) // accumulate)
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
            "for epoch in range(epochs):",
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
        lab.run("weights = model.state_dict()", ranks=0)
        return lab.pull("weights")
    return lab.pull("model", full=True)


def global_losses(run: Run) -> np.ndarray:
    """The loss of every global batch, from the ranks' losses and samples."""
    rows = run.history.dropna(subset=["loss"])
    weighted = (rows["loss"] * rows["samples"]).groupby(rows["step"]).sum()
    return (weighted / rows["samples"].groupby(rows["step"]).sum()).to_numpy()


def assert_equals_reference(
    lab: Lab, run: Run, expected: Reference, *, rtol: float = 1e-5, atol: float = 1e-6
) -> dict[str, torch.Tensor]:
    """The whole weights, when losses and weights are the reference's.

    `atol` is for the weights, which are of the size of 0.1.
    """
    np.testing.assert_allclose(global_losses(run), expected.losses, rtol=rtol)
    weights = pull_weights(lab, run.strategy)
    torch.testing.assert_close(weights, expected.weights, rtol=rtol, atol=atol)
    return weights


def plain_model(setup: str) -> nn.Module:
    names: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(SETUPS[setup]), names)
    return names["model"]


def norm_of_all(tensors: Iterable[torch.Tensor]) -> float:
    return sum(tensor.square().sum().item() for tensor in tensors) ** 0.5


@pytest.fixture(
    scope="module", params=in_suites([1, 2, 4], test=[2]), ids="{} ranks".format
)
def lab_of_any_size(request: pytest.FixtureRequest, shared_lab: Lab) -> Iterator[Lab]:
    if request.param == shared_lab.world_size:
        yield shared_lab
        return
    with Lab(num_ranks=request.param, group_timeout_s=30) as lab:
        yield lab


# ---- the same as one process ----

BOTH: dict[str, Any] = {"accumulate": 2, "clip": 0.5}

# All four, on every number of ranks.
COMBINATIONS = {
    "mlp": [{"accumulate": 2}, {"clip": 0.5}],
    "resnet": [BOTH],
    "gpt": [{}],
}


@pytest.mark.parametrize(
    "strategy",
    in_suites(WITH_SINGLE, test=["ddp", "zero3", "fsdp"]),
)
@pytest.mark.parametrize("setup", COMBINATIONS)
def test_losses_and_weights_equal_one_process(
    lab_of_any_size: Lab, setup: str, strategy: str
) -> None:
    lab = lab_of_any_size
    lab.restart()  # what died in a test before
    for options in COMBINATIONS[setup]:
        run = train(
            lab, strategy, cell(setup), sync_batchnorm=setup == "resnet", **options
        )
        expected = reference(setup, **options)
        weights = assert_equals_reference(lab, run, expected)
        if "clip" in options:
            norms = run.history.query("rank == 0")["gradient_norm"].dropna()
            np.testing.assert_allclose(norms, expected.gradient_norms, rtol=1e-5)
            assert norms.max() > options["clip"]
    plain_model(setup).load_state_dict(weights, strict=True)


@pytest.mark.parametrize("strategy", in_suites(WITH_SINGLE, test=["zero3"]))
def test_adamw_with_parameter_groups_equals_one_process(
    lab: Lab, strategy: str
) -> None:
    run = train(lab, strategy, cell("gpt", "adamw"), clip=0.5)
    expected = reference("gpt", "adamw", clip=0.5)
    np.testing.assert_allclose(global_losses(run), expected.losses, rtol=1e-5)
    weights = pull_weights(lab, strategy)
    assert weights.keys() == expected.weights.keys()
    for name, found in weights.items():
        # AdamW divides a gradient by its own size plus eps, 1e-8: what differs by a
        # rounding error, 1e-9 or so, moves the weight by up to lr / 10 where there is
        # no real gradient. That is so for the biases of the keys, of which softmax
        # takes no notice; elsewhere a hundredth of it is enough.
        atol = 0.1 * 0.01 if name.endswith(".k.bias") else 0.001 * 0.01
        torch.testing.assert_close(
            found, expected.weights[name], rtol=1e-5, atol=atol, msg=name
        )


STEPS_ALONE = """
torch.manual_seed(rank)
for _ in range(5):
    loss = (model(torch.randn(4, 8)) - torch.randn(4, 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BROUGHT = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
model = Scaled()
used = [model.scale, *model.first.parameters(), *model.last.parameters()]
groups = [{"params": used}, {"params": model.unused.parameters()}]
optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
"""
BROUGHT += STEPS_ALONE
LOOP_AFTER_IT = """
for x, y in loader:
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PREPARED = (
    "model, optimizer, loader = prepare(\n"
    "    model, optimizer, data, batch_size=8, shuffle=False\n"
    ")\n"
)


def assert_trained_on_as_in_one_process(
    lab: Lab, strategy: str, brought: str, loop: str
) -> None:
    """Where the cell `brought` has trained with plain PyTorch, as rank 0 has."""
    here: dict[str, Any] = {"rank": 0}
    exec(brought, here)
    here["loader"] = torch.utils.data.DataLoader(here["data"], 8)
    exec(loop, here)
    lab.run(brought)
    train(lab, strategy, PREPARED + loop)
    found = lab.pull("model", full=True)
    for name, expected in here["model"].state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy", in_suites(STRATEGIES, test=["ddp", "zero1", "zero3", "fsdp"])
)
def test_an_optimizer_brings_its_state_of_rank_0(lab: Lab, strategy: str) -> None:
    assert_trained_on_as_in_one_process(lab, strategy, BROUGHT, LOOP_AFTER_IT)


def test_a_stage_saves_no_states_that_another_trains(lab: Lab, tmp_path: Path) -> None:
    """Each rank has brought all of them, and trains its own layers'; all have those of
    rank 0, as of the model."""
    made = """
import torch
from torch import nn

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
    brought = made + STEPS_ALONE
    here: dict[str, Any] = {"rank": 0}
    exec(brought, here)
    here["loader"] = torch.utils.data.DataLoader(here["data"], 8)
    exec(LOOP_AFTER_IT, here)
    lab.run(brought)
    save = f"save_checkpoint({str(tmp_path / 'saved')!r})"
    train(lab, "pipeline", PREPARED + LOOP_AFTER_IT + save)
    load = f"load_checkpoint({str(tmp_path / 'saved')!r})\n"
    keep = "states = [optimizer.state[p]['exp_avg'] for p in model.parameters()]"
    train(lab, "single", brought + PREPARED + load + keep)
    found = lab.pull("states", 0)
    wanted = [here["optimizer"].state[p]["exp_avg"] for p in here["model"].parameters()]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    in_suites([*STRATEGIES, "pipeline"], test=["zero1", "fsdp", "pipeline"]),
)
@pytest.mark.parametrize(
    "states",
    [
        "optimizer.state.values()",
        "optimizer.state_dict()['state'].values()",
        "[each for _, each in optimizer.state_dict()['state'].items()]",
        "[s[key] for s in [optimizer.state_dict()['state']] for key in s]",
    ],
)
def test_a_norm_of_the_states_is_of_all_or_noted(
    lab: Lab, strategy: str, states: str
) -> None:
    if strategy.startswith("zero") and "state_dict" in states:
        pytest.skip("refused, in words: see test_later_cells")
    norm = (
        f"squares = [each['exp_avg'].pow(2).sum() for each in {states}]\n"
        "norm = float(sum(squares)) ** 0.5"
    )
    here: dict[str, Any] = {"rank": 0}
    exec(BROUGHT, here)
    here["loader"] = torch.utils.data.DataLoader(here["data"], 8)
    exec(LOOP_AFTER_IT + norm, here)
    is_of_all = strategy in ("ddp", "fsdp", "hsdp")
    as_before = "optimizer.load_state_dict(optimizer.state_dict())\n"
    as_before += "import copy\nkept = copy.deepcopy(optimizer.state)\nassert kept"
    for more, is_noted in (as_before, False), (norm, not is_of_all):
        lab.run(BROUGHT)
        run = train(lab, strategy, PREPARED + LOOP_AFTER_IT + more)
        assert ("the loop goes over optimizer" in str(run.notes)) == is_noted
    found = lab.pull("norm", "all")
    assert (found == pytest.approx([here["norm"]] * 2, rel=1e-4)) == is_of_all
    lab.run(norm)  # the run is over, and so are its notes


@pytest.mark.parametrize("strategy", in_suites(STRATEGIES, test=["zero1", "zero3"]))
def test_adagrad_has_the_rates_that_the_loop_sets(lab: Lab, strategy: str) -> None:
    brought = BROUGHT.replace("AdamW(", "Adagrad(").replace("lr=0.01, ", "lr=0.1, ")
    rates = "for group in optimizer.param_groups: group['lr'] = 0.02\n"
    assert_trained_on_as_in_one_process(lab, strategy, brought, rates + LOOP_AFTER_IT)


def test_zero_refuses_an_optimizer_with_other_counts_in_one_group(lab: Lab) -> None:
    lab.run(BROUGHT.replace("AdamW(groups", "AdamW(model.parameters()"))
    with pytest.raises(RankError, match=r"group 0 have taken different numbers of st"):
        train(lab, "zero2", PREPARED + LOOP_AFTER_IT)


def test_a_config_that_is_refused_leaves_an_optimizer_its_states(lab: Lab) -> None:
    lab.run(f"{BROUGHT}before = len(optimizer.state)")
    config = {"zero_optimization": {"typo": 1}}
    with pytest.raises(RankError, match="zero_optimization has no 'typo'"):
        train(lab, "zero2", PREPARED + LOOP_AFTER_IT, config=config)
    lab.run("assert len(optimizer.state) == before > 0")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_optimizer_with_states_on_some_ranks_is_refused(
    lab: Lab, strategy: str
) -> None:
    lab.run(BROUGHT.replace("range(5)", "range(5 * rank)"))
    weights = lab.pull("model", 0).state_dict()
    message = "states.* of 5 parameters on one rank and of 0 on another.*--resume"
    with pytest.raises(RankError, match=message):
        train(lab, strategy, PREPARED + LOOP_AFTER_IT)
    torch.testing.assert_close(lab.pull("model", 0).state_dict(), weights)


@pytest.mark.parametrize(
    "strategy", release_but(["ddp", "zero2", "zero3", "fsdp"], "zero2")
)
def test_frozen_parameters_stay_as_they_are(lab: Lab, strategy: str) -> None:
    run = train(lab, strategy, cell("gpt, partly frozen"), **BOTH)
    expected = reference("gpt, partly frozen", **BOTH)
    weights = assert_equals_reference(lab, run, expected)
    name = "blocks.0.up.weight"
    assert torch.equal(weights[name], expected.initial[name])


@pytest.mark.parametrize(
    ("setup", "strategy"),
    [
        ("resnet, few samples", "fsdp"),
        ("resnet, one sample", "fsdp"),
        ("resnet, one sample", "single"),
    ],
)
@pytest.mark.long
def test_batchnorm_counts_no_sample_that_is_not_there(
    lab: Lab, setup: str, strategy: str
) -> None:
    run = train(lab, strategy, cell(setup), sync_batchnorm=True, accumulate=2)
    assert_equals_reference(lab, run, reference(setup, accumulate=2))


@pytest.mark.parametrize("strategy", in_suites(STRATEGIES, test=["fsdp"]))
def test_fit_equals_one_process_with_validation(lab: Lab, strategy: str) -> None:
    code = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
fit(
    model, data, loss_fn, optimizer=optimizer, batch_size=batch_size,
    epochs=epochs, shuffle=False, validate=unseen,
)
"""
    run = train(lab, strategy, textwrap.dedent(SETUPS["gpt"]) + code, **BOTH)
    expected = reference("gpt", **BOTH)
    assert_equals_reference(lab, run, expected)
    for _, rows in run.history.groupby("rank"):
        found = rows["val_loss"].dropna()
        np.testing.assert_allclose(found, expected.val_losses, rtol=1e-5)


# ---- what the magic line can ask for ----


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("strategy", in_suites(WITH_SINGLE, test=["zero2"]))
def test_schedulers_made_before_or_after_prepare_step_with_the_optimizer(
    lab: Lab, strategy: str, made: str, capsys: Captured
) -> None:
    schedulers = f"every_step = {EVERY_STEP}\nevery_epoch = {EVERY_EPOCH}"
    code = cell(
        "mlp",
        every_step="every_step.step()",
        every_epoch="every_epoch.step()",
        **{made: schedulers},
    )
    run = train(
        lab, strategy, code + "\nrate = optimizer.param_groups[0]['lr']", accumulate=2
    )
    expected = reference("mlp", accumulate=2, scheduled=True)
    assert_equals_reference(lab, run, expected)
    assert lab.pull("rate") == pytest.approx(expected.learning_rate)
    assert capsys.readouterr().err == ""  # torch warns of a wrong order


NOTE_DTYPE = """
dtypes = set()
model.blocks[0].up.register_forward_hook(lambda m, x, y: dtypes.add(y.dtype))
"""


@dataclass(frozen=True)
class InBf16:
    losses: np.ndarray
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def in_bf16(shared_lab: Lab) -> InBf16:
    """What one process finds in bf16."""
    shared_lab.restart()
    run = train(shared_lab, "single", cell("gpt"), precision="bf16", **BOTH)
    return InBf16(global_losses(run), pull_weights(shared_lab, "single"))


@pytest.mark.parametrize("strategy", in_suites(STRATEGIES, long=["ddp"]))
def test_bf16_is_as_close_to_bf16_in_one_process_as_its_digits_allow(
    lab: Lab, strategy: str, in_bf16: InBf16
) -> None:
    # bf16 has 8 bits: a rounding error is up to 0.4 %. `single` and ddp compute matrix
    # products in it (autocast), fsdp everything within the blocks, and DeepSpeed's
    # model has its parameters in it, of which fp32 masters are rounded. So: the loss,
    # a mean, to 0.1 %, and the change of the weights as a whole to 3 %. Gradients that
    # are summed where they should be averaged would change it by 100 %.
    code = cell("gpt", before=NOTE_DTYPE)
    run = train(lab, strategy, code, precision="bf16", **BOTH)
    assert lab.pull("dtypes") == {torch.bfloat16}
    np.testing.assert_allclose(global_losses(run), in_bf16.losses, rtol=1e-3)
    weights, expected = pull_weights(lab, strategy), in_bf16.weights
    assert weights.keys() == expected.keys()
    initial = reference("gpt", **BOTH).initial
    error = norm_of_all(weights[k].float() - expected[k] for k in expected)
    change = norm_of_all(expected[k] - initial[k] for k in expected)
    assert 0 < error < 0.03 * change
    plain_model("gpt").load_state_dict(weights, strict=True)


@pytest.mark.parametrize("strategy", in_suites(WITH_SINGLE, long=["fsdp"]))
def test_activation_checkpointing_computes_twice_and_gives_the_same(
    lab: Lab, strategy: str
) -> None:
    count = """
        num_calls = 0
        def note(module, inputs, output):
            global num_calls
            num_calls += 1
        model.blocks[0].norm1.register_forward_hook(note)
        """
    run = train(lab, strategy, cell("gpt", before=count), activation_checkpointing=True)
    assert_equals_reference(lab, run, reference("gpt"))
    assert lab.pull("num_calls") == 2 * len(reference("gpt").losses)


APPENDING = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, features, *, kept):
        features.append(torch.tanh(self.linear(features[-1])))
        kept["h"] = kept["h"] * features[-1]
        return features, kept

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        features, kept = [x], {"h": x}
        for block in self.blocks:
            block(features, kept=kept)
        return sum(features) + kept["h"]

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(model, optimizer, torch.randn(8, 4), batch_size=4)
for x in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
with torch.no_grad():
    found = model(torch.ones(1, 4))
"""


@pytest.mark.parametrize("strategy", [*WITH_SINGLE, "pipeline"])
def test_activation_checkpointing_takes_blocks_that_append_to_what_they_are_given(
    lab: Lab, strategy: str
) -> None:
    train(lab, "single", APPENDING)
    expected = lab.pull("found")
    train(lab, strategy, APPENDING, activation_checkpointing=True)
    torch.testing.assert_close(lab.pull("found"), expected)


KEEPING = """
import random

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.num_calls = 0
        self.register_buffer("mean", torch.zeros(4))
        self.draws = random.Random(0)
    def forward(self, x):
        if self.training:
            self.num_calls += 1
            self.mean = 0.5 * self.mean + 0.5 * torch.arange(4.0) * self.num_calls
        scale = 2.0 + self.draws.random()
        return x + scale * torch.tanh(self.linear(x - self.mean) / self.num_calls)

torch.manual_seed(0)
model = torch.nn.Sequential(*(Block() for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(model, optimizer, torch.randn(20, 4), batch_size=4)
for x in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
with torch.no_grad():
    found = model(torch.ones(1, 4))
calls = [block.num_calls for block in model]
"""


@pytest.mark.parametrize("strategy", WITH_SINGLE)
def test_activation_checkpointing_takes_blocks_that_count_and_draw(
    lab: Lab, strategy: str
) -> None:
    train(lab, "single", KEEPING)
    expected = lab.pull("found")
    train(lab, strategy, KEEPING, activation_checkpointing=True)
    # Five large steps amplify rounding, on some processors more than on others.
    torch.testing.assert_close(lab.pull("found"), expected, rtol=1e-4, atol=1e-4)
    assert lab.pull("calls") == [6, 6, 6]


SETTING = """
import collections

calls = [0]

class Log:
    def __init__(self):
        self.num, self.more = 0, []
        self.scale = 0.5

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.linear.register_forward_hook(lambda *call: calls.append(len(calls)))
        self.is_counting, self.num, self.power = False, 0, 1.0
    def forward(self, x, log, *, table):
        if self.is_counting:
            self.num += 1
        log.num += 1
        log.more.append(x)
        table["more"].append(x)
        if hasattr(log, "scale"):
            x = x * log.scale
            del log.scale
        x = x * (self.power if self.training else -self.power)
        x = x + torch.tanh(self.linear(x * (1 + self.num) / log.num))
        return x * (1 + len(calls) % 5)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.log = Log()
    def forward(self, x):
        self.log.scale = 0.5
        self.log.more.clear()
        table = collections.defaultdict(list)
        for block in self.blocks:
            x = block(x, self.log, table=table)
        return x + sum(self.log.more) + sum(table["more"])

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, torch.randn(32, 4), batch_size=4)
for number, x in enumerate(loader):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    model.eval()
    for block in model.blocks:
        block.power = 0.9**number
        block.is_counting = number > 4
    loss.backward()
    model.train()
    optimizer.step()
with torch.no_grad():
    found = model(torch.ones(1, 4))
"""


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_activation_checkpointing_finds_what_the_loop_has_set_meanwhile_as_it_was(
    lab: Lab, strategy: str
) -> None:
    train(lab, "single", SETTING)
    expected = lab.pull("found"), len(lab.pull("calls"))
    train(lab, strategy, SETTING, activation_checkpointing=True)
    found = lab.pull("found"), len(lab.pull("calls"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("start", "change", "given", "words"),
    [
        ("iter([1.0] * 9)", "x = x * next(given)", "given", "given an iterator"),
        ("[]", "pass", "[given, given.append(given)]", "contains itself"),
    ],
)
def test_activation_checkpointing_refuses_what_it_cannot_give_again(
    lab: Lab, start: str, change: str, given: str, words: str
) -> None:
    code = f"""
class Block(torch.nn.Linear):
    def forward(self, x, given):
        {change}
        return super().forward(x)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(4, 4) for _ in range(2))
    def forward(self, x):
        given = {start}
        for block in self.blocks:
            x = block(x, {given})
        return x

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, torch.randn(8, 4), batch_size=4)
for x in loader:
    model(x).mean().backward()
"""
    with pytest.raises(RankError, match=words):
        train(lab, "single", code, activation_checkpointing=True)


def test_activation_checkpointing_refuses_parameters_of_a_call(lab: Lab) -> None:
    code = """
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = prepare(
            model, optimizer, torch.ones(8, 4), batch_size=2
        )
        for x in loader:
            others = {n: 2 * p for n, p in model.named_parameters()}
            found = torch.func.functional_call(model, others, x)
            found.mean().backward()
            optimizer.step()
        """
    with pytest.raises(RankError, match="functional_call gives the model other"):
        train(lab, "single", code, activation_checkpointing=True)


@pytest.mark.parametrize(
    ("write", "what"),
    [
        ("torch.nn.functional.relu_(x)", "a tensor that it is"),
        ("x.data.mul_(2)", "a tensor that it is"),
        ("self.weight.data.mul_(0.5)", "its parameters in its forward pass"),
        ("self.weight.data.clamp_(-0.1, 0.1)", ""),
    ],
)
def test_activation_checkpointing_refuses_blocks_that_write_to_what_they_have(
    lab: Lab, write: str, what: str
) -> None:
    code = """
        class Block(torch.nn.Linear):
            def forward(self, x):
                WRITE
                return super().forward(x)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Block(4, 4), Block(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = prepare(
            model, optimizer, torch.ones(8, 4), batch_size=2
        )
        for x in loader:
            model(x).mean().backward()
            optimizer.step()
        """.replace("WRITE", write)
    refused: Any = contextlib.nullcontext()
    if what:
        refused = pytest.raises(RankError, match=f"a Block writes to {what}")
    with refused:
        train(lab, "single", code, activation_checkpointing=True)


@pytest.mark.parametrize("strategy", release_but(["zero3", "fsdp"], "fsdp"))
def test_activation_checkpointing_takes_blocks_of_a_single_layer(
    lab: Lab, strategy: str
) -> None:
    run = train(lab, strategy, cell("mlp"), activation_checkpointing=True, **BOTH)
    assert_equals_reference(lab, run, reference("mlp", **BOTH))


ENCODER = """
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(16, 5, 8)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=4)
for x in loader:
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()
with torch.no_grad():
    found = model(torch.ones(2, 5, 8))
"""


@pytest.mark.parametrize("strategy", release_but([*WITH_SINGLE], "zero3"))
def test_activation_checkpointing_takes_torchs_own_attention(
    lab: Lab, strategy: str
) -> None:
    """It reads the weight of a layer that it does not call."""
    train(lab, "single", ENCODER)
    expected = lab.pull("found")
    train(lab, strategy, ENCODER, activation_checkpointing=True)
    torch.testing.assert_close(lab.pull("found"), expected, rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_leaves_batchnorm_alone(lab: Lab) -> None:
    run = train(lab, "single", cell("resnet"), activation_checkpointing=True)
    assert_equals_reference(lab, run, reference("resnet"))


@pytest.mark.timeout(200)  # 12 s, where nothing else runs
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)
@pytest.mark.parametrize("checkpointing", release_but([False, True], True))
def test_compile_compiles_the_blocks_and_gives_the_same(
    lab: Lab, checkpointing: bool
) -> None:
    count = "graphs = torch._dynamo.utils.counters['stats']['unique_graphs']"
    forget = "torch._dynamo.reset()\ntorch._dynamo.utils.counters.clear()"
    code = f"import torch._dynamo.utils\n{forget}\n{cell('waves')}\n{count}"
    run = lab.train(
        "ddp",
        code,
        compile=True,
        activation_checkpointing=checkpointing,
        live=False,
        timeout=180,
    )
    assert_equals_reference(lab, run, reference("waves"))
    assert lab.pull("graphs") > 0


# ---- --config ----

# Between the forward and the backward pass.
NOTE_KIND = """
plain_loss_fn = loss_fn
def loss_fn(output, y):
    global kind
    kind = type(model[1].weight).__name__
    return plain_loss_fn(output, y)
"""


@pytest.mark.parametrize(
    ("strategy", "config", "found", "expected"),
    [
        (
            "ddp",
            {"bucket_cap_mb": 1},
            "optimizer.prepared._ddp.bucket_bytes_cap",
            2**20,
        ),
        ("fsdp", {}, "kind", "DTensor"),
        ("fsdp", {"reshard_after_forward": False}, "kind", "Parameter"),
        ("hsdp", {}, "tuple(model[1].weight.device_mesh.shape)", (2, 1)),
        (  # the largest parameter has 1024 elements
            "zero2",
            {"zero_optimization": {"reduce_bucket_size": 1000}},
            "optimizer.prepared.engine.zero_reduce_bucket_size()",
            1000,
        ),
        pytest.param(
            "zero3",
            {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
            "optimizer.prepared.engine.zero_param_persistence_threshold()",
            0,
        ),
    ],
)
def test_config_reaches_the_library(
    lab: Lab, strategy: str, config: dict[str, Any], found: str, expected: Any
) -> None:
    code = cell("mlp", before=NOTE_KIND if found == "kind" else "")
    code += f"\nfound = {found}"
    run = train(lab, strategy, code, config=config, **BOTH)
    assert lab.pull("found") == expected
    assert_equals_reference(lab, run, reference("mlp", **BOTH))


@pytest.mark.parametrize(
    ("strategy", "config", "message"),
    [
        ("single", {"a": 1}, "single has no 'a'; leave it out"),
        ("ddp", {"bucket": 1}, "no 'bucket'; it knows: .*bucket_cap_mb"),
        ("fsdp", {"reshard": 1}, "no 'reshard'; it knows: .*reshard_after_forward"),
        ("hsdp", {"reshard": 1}, "no 'reshard'; it knows: .*reshard_after_forward"),
        ("hsdp", {"mesh": (2, 2)}, "no 'mesh'; it knows: .*reshard_after_forward"),
        ("zero1", {"zero": 2}, "has no 'zero'; it knows:.*zero_optimization"),
        (
            "zero3",
            {"zero_optimization": {"bucket": 1}},
            "zero_optimization has no 'bucket'; it knows:.*reduce_bucket_size",
        ),
        ("zero2", {"zero_optimization": {"stage": 3}}, "the magic line says zero2"),
        ("zero1", {"gradient_clipping": 1.0}, "is set by --clip; leave"),
        ("zero1", {"gradient_accumulation_steps": 2}, "is set by --accumulate; leave"),
        ("zero2", {"train_batch_size": 8}, r"set by prepare\(..., batch_size=B\)"),
        ("zero2", {"train_micro_batch_size_per_gpu": 8}, "batch_size=B"),
        ("zero3", {"optimizer": {"type": "Adam"}}, "the optimizer given to prepare"),
        ("zero3", {"scheduler": {}}, "a torch.optim.lr_scheduler in the cell"),
        pytest.param(
            "zero2", {"bf16": {"enabled": True}}, "is set by --precision; leave"
        ),
        pytest.param("zero2", {"zero_optimization": 2}, "--config.*zero_optimization"),
    ],
)
def test_a_config_that_cannot_be_is_explained(
    lab: Lab, strategy: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankError, match=message):
        train(lab, strategy, cell("mlp"), config=config)


def test_a_static_graph_of_ddp_cannot_be_accumulated(lab: Lab) -> None:
    config = {"static_graph": True}
    message = '"static_graph" does not work with --accumulate 2'
    with pytest.raises(RankError, match=message):
        train(lab, "ddp", cell("mlp"), config=config, accumulate=2)
    run = train(lab, "ddp", cell("mlp"), config=config)
    assert_equals_reference(lab, run, reference("mlp"))


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("ddp", {"precision": "fp16"}, "fp16 needs a GPU.*choose bf16"),
        ("ddp", {"precision": "fp8"}, "choose one of: fp32, bf16, fp16"),
        ("ddp", {"accumulate": 0}, "accumulate is 0; it must be a whole number"),
        ("ddp", {"accumulate": True}, "accumulate is True"),
        ("ddp", {"clip": 0}, "clip is 0; it must be a positive number"),
        ("ddp", {"clip": float("nan")}, "clip is nan"),
        ("ddp", {"config": [1]}, r"config is \[1\]; give a dict"),
        ("ddp", {"config": {1: 2}}, "a dict whose keys are names"),
        ("raw", {"accumulate": 2}, "--accumulate is for the cell to do"),
        ("raw", {"clip": 1.0}, "--clip is for the cell to do"),
        ("raw", {"precision": "bf16"}, "--precision is for the cell to do"),
        ("raw", {"activation_checkpointing": True}, "--activation-checkpointing is"),
        ("raw", {"sync_batchnorm": True}, "--sync-batchnorm is for the cell to do"),
        ("raw", {"compile": True}, "--compile is for the cell to do"),
        ("raw", {"config": {"a": 1}}, "raw has nothing that --config could set"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_runs(
    lab: Lab, strategy: str, options: dict[str, Any], message: str
) -> None:
    before = list(lab.runs)
    with pytest.raises(ValueError, match=message):
        train(lab, strategy, "1", **options)
    assert lab.runs == before


def test_more_microbatches_than_samples_are_refused(lab: Lab) -> None:
    with pytest.raises(RankError, match="a batch of 9 cannot be split into "):
        train(lab, "ddp", cell("mlp"), accumulate=10)


# ---- by hand ----

BY_HAND = """
import contextlib
import copy
from torch.distributed.device_mesh import init_device_mesh
from labkit.models import mlp
from labkit.strategies.ddp import apply_ddp
from labkit.strategies.fsdp.sharding import apply_fsdp

torch.manual_seed(rank)
given = mlp()
plain = copy.deepcopy(given)
for parameter in plain.parameters():
    dist.broadcast(parameter.data, 0)
x, y = torch.ones(4, 64) * (rank + 1), torch.arange(4)
shapes = {"dp_replicate": {"dp_replicate": 2}, "dp_shard": {"dp_shard": 2},
          "both": {"dp_replicate": 1, "dp_shard": 2},
          "replicas": {"dp_replicate": 2, "dp_shard": 1}}

def gradients(model):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each
            for each in found]

expected = gradients(plain)
for each in expected:
    dist.all_reduce(each)
    each /= world_size
differences = {}
for name, sizes in shapes.items():
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    apply = apply_ddp if name == "dp_replicate" else apply_fsdp
    found = gradients(apply(copy.deepcopy(given), mesh))
    differences[name] = max(
        float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)
    )
"""


def test_techniques_are_functions_of_a_model_and_a_mesh(lab: Lab) -> None:
    lab.run(BY_HAND)
    for differences in lab.pull("differences", "all"):
        assert list(differences) == ["dp_replicate", "dp_shard", "both", "replicas"]
        assert max(differences.values()) < 1e-6


# ---- one run after another ----


@pytest.mark.parametrize("strategy", release_but(["zero3", "fsdp", "hsdp"], "fsdp"))
def test_a_sharded_model_of_an_earlier_run_is_refused_in_words(
    lab: Lab, strategy: str
) -> None:
    train(lab, strategy, cell("mlp", before="epochs = 0"))
    again = "prepare(model, torch.optim.SGD(model.parameters()), data, batch_size=9)"
    message = "model is sharded already, by an earlier run.*build it again in this cell"
    with pytest.raises(RankError, match=message):
        train(lab, strategy, again)


@pytest.mark.parametrize("strategy", release_but(WITH_SINGLE, "zero1", "fsdp"))
def test_a_second_phase_begins_with_the_weights_of_the_first(
    lab: Lab, strategy: str
) -> None:
    phase = cell("mlp", "no momentum").replace("epochs = 9, 2", "epochs = 9, 1")
    again = "prepare(model, optimizer, data, batch_size=9)"
    with pytest.raises(RankError, match=r"For another phase.*build the model again"):
        train(lab, strategy, phase + again)
    weights = """
from torch.distributed.checkpoint.state_dict import *
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
"""
    begin, end = phase.split("optimizer = ", 1)
    second = f"{weights}{begin}\nmodel.load_state_dict(weights)\noptimizer = {end}"
    expected = reference("mlp", "no momentum").weights
    for cells in [phase + second], [phase, second]:
        for code in cells:
            train(lab, strategy, code)
        torch.testing.assert_close(pull_weights(lab, strategy), expected)


@pytest.mark.parametrize("strategy", ["zero3", "fsdp", "tensor", "pipeline"])
def test_a_model_may_have_parameters_of_its_own(lab: Lab, strategy: str) -> None:
    code = cell("mlp", "no momentum").replace(
        "model = mlp(num_hidden=16)",
        """model = mlp(num_hidden=16)
class Layer(torch.nn.Linear):
    def parameters(self):
        return torch.nn.ParameterList(super().parameters())
for layer in model:
    if isinstance(layer, torch.nn.Linear):
        layer.__class__ = Layer""",
    )
    assert "class Layer" in code
    run = train(lab, strategy, code)
    assert_equals_reference(lab, run, reference("mlp", "no momentum"))


@pytest.mark.parametrize("then", release_but(["ddp", "zero1", "zero2"], "ddp"))
@pytest.mark.parametrize("strategy", release_but(["ddp", "zero1", "zero2"], "zero1"))
def test_a_whole_model_of_an_earlier_run_is_trained_on(
    lab: Lab, strategy: str, then: str
) -> None:
    train(
        lab,
        strategy,
        cell("mlp", "no momentum").replace("epochs = 9, 2", "epochs = 9, 1"),
    )
    if strategy != "ddp":
        again = "prepare(model, optimizer, data, batch_size=9)"
        held = f"optimizer is prepared under {strategy} already.*make a new one"
        with pytest.raises(RankError, match=held):
            train(lab, then, again)
    code = cell("mlp", "no momentum").replace("model = mlp(num_hidden=16)\n", "")
    run = train(lab, then, code)
    assert run.num_steps == 6
    assert run.mismatches == []


@pytest.mark.parametrize("strategy", release_but(["zero2", "zero3", "fsdp"], "zero3"))
@pytest.mark.long
def test_the_run_after_a_rank_has_failed_is_as_good_as_any(
    lab: Lab, strategy: str
) -> None:
    fail = "if rank == 1 and epoch == 1: raise ValueError('on purpose')"
    with pytest.raises(RankError, match=r"rank 1: failed .*ValueError: on purpose"):
        train(lab, strategy, cell("mlp", every_step=fail), **BOTH)
    run = train(lab, strategy, cell("mlp"), **BOTH)
    assert_equals_reference(lab, run, reference("mlp", **BOTH))


@pytest.mark.parametrize(
    "strategy", release_but(["single", "ddp", "zero1", "zero2"], "zero1")
)
def test_fit_continues_with_the_model_of_an_earlier_fit(
    lab: Lab, strategy: str
) -> None:
    fit = f"""
fit(
    model, data, loss_fn, optimizer={OPTIMIZERS["no momentum"]},
    batch_size=batch_size, shuffle=False,
)
"""
    losses = [
        *global_losses(train(lab, strategy, textwrap.dedent(SETUPS["mlp"]) + fit)),
        *global_losses(train(lab, strategy, fit)),
    ]
    expected = reference("mlp", "no momentum")
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)


def test_a_model_with_synchronized_batchnorm_can_be_pulled(
    lab: Lab, capsys: Captured
) -> None:
    train(lab, "single", cell("resnet"), sync_batchnorm=True)
    assert capsys.readouterr().err == ""  # torch says that its all_reduce is old
    pulled = lab.pull("model")
    torch.testing.assert_close(
        pulled.state_dict(), reference("resnet").weights, rtol=1e-5, atol=1e-6
    )


def test_pulling_a_model_that_other_ranks_have_of_another_run_waits_for_nobody(
    lab: Lab,
) -> None:
    train(lab, "fsdp", cell("mlp"))
    train(lab, "single", cell("mlp"))  # rank 1 still has the other model
    weights = lab.pull("model", full=True)
    torch.testing.assert_close(weights, reference("mlp").weights, rtol=1e-5, atol=1e-6)


def test_pulling_a_part_whose_other_parts_are_gone_is_refused(lab: Lab) -> None:
    train(lab, "fsdp", cell("mlp"))
    train(lab, "single", cell("mlp"))
    with pytest.raises(RuntimeError, match="rank 0"):
        lab.pull("model", 1, full=True)


@pytest.mark.long
def test_a_rank_that_was_restarted_is_as_good_as_the_others(lab: Lab) -> None:
    train(lab, "zero3", cell("mlp"))
    with pytest.raises(RankError, match="rank 1: the process died"):
        lab.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert lab.restart() == [1]
    run = train(lab, "zero3", cell("mlp"))
    assert_equals_reference(lab, run, reference("mlp"))


def test_a_model_of_zero3_can_be_pulled_after_the_next_run(lab: Lab) -> None:
    validate = "with torch.no_grad():\n    model(images)\nearlier = model"
    train(lab, "zero3", cell("mlp") + validate)
    train(lab, "zero2", cell("mlp"))
    weights = lab.pull("earlier", full=True)
    torch.testing.assert_close(weights, reference("mlp").weights, rtol=1e-5, atol=1e-6)


ACCUMULATED = {
    "an expert of one rank in the first microbatch alone": """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.body = torch.nn.Linear(4, 4)
                self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in "ab")

            def forward(self, x, kind):
                hidden, out = self.body(x), torch.zeros(len(x), 1)
                for number, expert in enumerate(self.experts):
                    (where,) = (kind == number).nonzero(as_tuple=True)
                    if len(where):
                        out = out.index_put((where,), expert(hidden[where]))
                return out

        kind = torch.zeros(32, dtype=torch.long)
        kind[[0, 24]] = 1
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
        """,
    "a layer that the optimizer does not have": """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.body = torch.nn.Linear(4, 1)
                self.other = torch.nn.Linear(4, 1)

            def forward(self, x, kind):
                out = self.body(x)
                return out + self.other(x) if kind.any() else out

        kind = torch.arange(32) // 8 == 1
        model = Net()
        optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
        """,
}


@pytest.mark.parametrize("name", ACCUMULATED)
def test_with_accumulation_what_some_batches_use_is_as_without(
    lab: Lab, name: str
) -> None:
    begin = "torch.manual_seed(0)\n" + textwrap.dedent(ACCUMULATED[name])
    loop = """
        x = torch.randn(32, 4)
        data = torch.utils.data.TensorDataset(x, kind, x.sum(1, keepdim=True))
        model, optimizer, loader = prepare(
            model, optimizer, data, batch_size=8, shuffle=False
        )
        for inputs, kinds, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs, kinds), targets)
            loss.backward()
            optimizer.step()
        found = [p.detach().clone() for p in model.parameters()]
        found += [p.grad for p in model.parameters() if p.grad is not None]
        """
    code = begin + textwrap.dedent(loop)
    lab.train("single", code, live=False)
    [*expected] = lab.pull("found")
    lab.train("ddp", code, live=False, accumulate=2)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, expected)
