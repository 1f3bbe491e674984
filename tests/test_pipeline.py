"""The strategy `pipeline`: consecutive layers on consecutive ranks."""

from pathlib import Path
from textwrap import dedent
from textwrap import indent
from typing import Any

import numpy as np
import pytest
import torch
from marks import in_suites
from marks import release_but
from test_strategies import BOTH
from test_strategies import assert_equals_reference
from test_strategies import cell
from test_strategies import global_losses
from test_strategies import norm_of_all
from test_strategies import plain_model
from test_strategies import pull_weights
from test_strategies import reference
from test_strategies import train
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit.notebook.runs.run import Run
from labkit.strategies.relay.stages import cut
from labkit.strategies.relay.stages import equal_cuts
from labkit.theory import bubble

pytestmark = pytest.mark.timeout(120)

FIT = """
fit(model, data, loss_fn, optimizer=optimizer, batch_size=batch_size, epochs=epochs,
    shuffle=False)
"""


def by_fit(setup: str, optimizer: str = "sgd", before: str = "") -> str:
    code = cell(setup, optimizer, before=before)
    return code[: code.index("model, optimizer, loader")] + FIT


def ask(lab: Lab, expression: str) -> Any:
    """Its value on every rank."""
    lab.run(f"asked = {expression}")
    return lab.pull("asked", "all")


# ---- the same as one process ----


def test_gradients_pass_in_one_order_on_all_ranks(lab: Lab) -> None:
    """On a GPU autograd has a thread for its nodes, and one for those of other ranks'
    layers: in which order the two send and receive would be chance."""
    noted = """
threads = []
model[-1].bias.register_hook(
    lambda gradient: threads.append(torch.autograd.is_multithreading_enabled())
)
"""
    run = train(lab, "pipeline", cell("mlp").replace("for epoch", noted + "for epoch"))
    assert run.state == "finished"
    threads = ask(lab, "threads, torch.autograd.is_multithreading_enabled()")
    assert any(within for within, _ in threads)
    for within, after in threads:
        assert not any(within)
        assert after


MAKE_DATA = """
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
torch.manual_seed(0)
x, y = torch.randn(16, 6), torch.randn(16, 2)
"""
TRAIN_AND_EVALUATE = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)
for inputs, targets in loader:
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    result = model(x.to(device)).cpu()
"""


def assert_as_one_process(lab: Lab, make_model: str) -> None:
    """Trained with the same loop, the model computes the same under `pipeline`."""
    results = []
    for strategy in ("single", "pipeline"):
        lab.train(strategy, MAKE_DATA + make_model + TRAIN_AND_EVALUATE, live=False)
        results.append(lab.pull("result"))
    torch.testing.assert_close(*results)


def test_a_layer_may_give_its_buffers_a_shape_with_the_first_batch(lab: Lab) -> None:
    """As an observer of ranges does, in training that is aware of quantization."""
    code = """
    from torch.ao.nn import qat
    from torch.ao.quantization import get_default_qat_qconfig
    config = get_default_qat_qconfig("x86")
    first, last = qat.Linear(6, 8, qconfig=config), qat.Linear(8, 2, qconfig=config)
    model = nn.Sequential(first, nn.ReLU(), last)
    """
    assert_as_one_process(lab, dedent(code))
    first, last = ask(lab, "[tuple(each.shape) for each in model.buffers()]")
    assert first == last


@pytest.mark.parametrize(
    "ask_for", ["h.retain_grad()", "h.register_hook(lambda gradient: gradient / 2)"]
)
def test_forward_may_ask_for_gradients_of_what_a_layer_returns(
    lab: Lab, ask_for: str
) -> None:
    """Where the pass is a comparison, there are none."""
    code = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        def forward(self, x):
            h = self.first(x).relu()
            if self.training:
                {ask_for}
            return self.last(h)
    model = Net()
    """
    assert_as_one_process(lab, dedent(code))


@pytest.mark.parametrize(
    "options", release_but([BOTH, {}], BOTH), ids=["both", "plain"]
)
@pytest.mark.parametrize("setup", ["mlp", "gpt", "resnet", "waves"])
def test_a_loop_equals_one_process(
    lab: Lab, setup: str, options: dict[str, Any]
) -> None:
    lab.restart()
    run = train(lab, "pipeline", cell(setup), **options)
    expected = reference(setup, **options)
    weights = assert_equals_reference(lab, run, expected)
    plain_model(setup).load_state_dict(weights, strict=True)
    if "clip" in options:
        norms = run.history["gradient_norm"].dropna().groupby(run.history["step"])
        np.testing.assert_allclose(norms.max(), expected.gradient_norms, rtol=1e-5)
        assert (norms.nunique() == 1).all()
    passes_whole = [note for note in run.notes if "as one microbatch" in note]
    assert bool(passes_whole) == (setup == "resnet"), run.notes


@pytest.mark.release
def test_parameter_groups_and_frozen_stages(lab: Lab) -> None:
    run = train(lab, "pipeline", cell("gpt, partly frozen"), **BOTH)
    expected = reference("gpt, partly frozen", **BOTH)
    weights = assert_equals_reference(lab, run, expected)
    name = "blocks.0.up.weight"
    assert torch.equal(weights[name], expected.initial[name])
    run = train(lab, "pipeline", cell("gpt", "adamw"), clip=0.5)
    expected = reference("gpt", "adamw", clip=0.5)
    np.testing.assert_allclose(global_losses(run), expected.losses, rtol=1e-5)


@pytest.mark.parametrize(
    "schedule", release_but(["gpipe", "1f1b", "interleaved"], "1f1b")
)
def test_fit_equals_one_process_in_every_order(lab: Lab, schedule: str) -> None:
    code = by_fit("gpt").replace("num_layers=2", "num_layers=4")
    code = code.replace("batch_size, epochs = 9, 2", "batch_size, epochs = 8, 3")
    run = train(lab, "single", code, clip=0.5)
    losses, weights = global_losses(run), pull_weights(lab, "single")
    run = train(lab, "pipeline", code, clip=0.5, schedule=schedule, microbatches=4)
    np.testing.assert_allclose(global_losses(run), losses, rtol=1e-5)
    torch.testing.assert_close(
        pull_weights(lab, "pipeline"), weights, rtol=1e-5, atol=1e-6
    )
    assert run.notes == []
    # Every rank has the last stage's loss.
    per_step = run.history.dropna(subset=["loss"]).groupby("step")["loss"]
    assert (per_step.count() == 2).all()
    np.testing.assert_allclose(per_step.min(), per_step.max())


@pytest.mark.parametrize(
    "mesh", in_suites(["pp=4", "dp=2,pp=2", "dp=4,pp=1"], test=["dp=2,pp=2"])
)
@pytest.mark.parametrize("make", release_but([cell, by_fit], cell), ids=["loop", "fit"])
def test_a_grid_of_ranks_equals_one_process(
    lab_of_4: Lab, mesh: str, make: Any
) -> None:
    code = make("gpt").replace("num_layers=2", "num_layers=4")
    run = train(lab_of_4, "single", code, **BOTH)
    losses, weights = global_losses(run), pull_weights(lab_of_4, "single")
    run = train(lab_of_4, "pipeline", code, mesh=mesh, **BOTH)
    np.testing.assert_allclose(global_losses(run), losses, rtol=1e-5)
    found = pull_weights(lab_of_4, "pipeline")
    torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)
    assert run.mismatches == []


@pytest.mark.release
def test_stages_in_bf16(lab: Lab) -> None:
    run = train(lab, "single", cell("gpt"), precision="bf16", **BOTH)
    losses, expected = global_losses(run), pull_weights(lab, "single")
    initial = reference("gpt", **BOTH).initial
    for code in (cell("gpt"), by_fit("gpt")):
        run = train(lab, "pipeline", code, precision="bf16", **BOTH)
        np.testing.assert_allclose(global_losses(run), losses, rtol=2e-3)
        weights = pull_weights(lab, "pipeline")
        error = norm_of_all(weights[k] - expected[k] for k in expected)
        moved = norm_of_all(expected[k] - initial[k] for k in expected)
        assert error < 0.03 * moved


@pytest.mark.parametrize("make", release_but([cell, by_fit], cell), ids=["loop", "fit"])
@pytest.mark.long
def test_activations_may_be_computed_again(lab: Lab, make: Any) -> None:
    run = train(lab, "pipeline", make("gpt"), activation_checkpointing=True, **BOTH)
    assert_equals_reference(lab, run, reference("gpt", **BOTH))


BRANCHES = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.down = torch.nn.Linear(6, 8)
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        self.up = torch.nn.Linear(16, 4)

    def forward(self, x):
        kept = self.down(x).relu()
        inner = kept + self.scale * self.inner(kept)
        return self.up(torch.cat([inner, kept], 1)), kept.square().mean(1)

x = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(x, x.sin()[:, :4])
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
losses = []
for inputs, y in loader:
    outputs, kept = model(inputs)
    loss = torch.nn.functional.mse_loss(outputs, y) + 0.1 * kept.mean()
    loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_skips_penalties_and_clipping_of_the_loops_own(lab: Lab) -> None:
    # What a stage makes is used two stages later, and returned; the loop looks at
    # parameters and gradients, which are on either rank.
    train(lab, "single", BRANCHES)
    expected, weights = lab.pull("losses"), pull_weights(lab, "single")
    run = train(lab, "pipeline", BRANCHES)
    assert run.notes == []
    for losses in lab.pull("losses", "all"):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    torch.testing.assert_close(pull_weights(lab, "pipeline"), weights)


COPIED = """
net = torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
model = torch.nn.Sequential(*net)
x = torch.rand(24, 6, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8, shuffle=False)
before = copy.deepcopy(dict(model.named_parameters()))
penalties = []
for x, y in loader:
    optimizer.zero_grad()
    penalty = sum((p - before[n]).square().sum() for n, p in model.named_parameters())
    (torch.nn.functional.cross_entropy(model(x), y) + penalty).backward()
    optimizer.step()
    penalties.append(penalty.item())
"""


def test_a_copy_of_parameters_has_those_of_all_stages(lab: Lab) -> None:
    train(lab, "single", "import copy" + COPIED)
    expected = lab.pull("penalties")
    train(lab, "pipeline", "import copy" + COPIED)
    for penalties in lab.pull("penalties", "all"):
        np.testing.assert_allclose(penalties, expected, rtol=1e-4, atol=1e-8)


def test_a_sparse_input_is_not_cut(lab: Lab) -> None:
    code = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)
    def forward(self, x, adjacent):
        return self.second(self.first(torch.sparse.mm(adjacent, x)).tanh())
x = torch.rand(24, 6, generator=torch.Generator().manual_seed(2))
adjacent = (torch.eye(24) + torch.eye(24).roll(1, 0)).to_sparse()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, _ = prepare(model, optimizer, range(1), batch_size=1)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x, adjacent), x[:, :3].argmax(1))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
    train(lab, "single", code)
    expected = lab.pull("losses")
    train(lab, "pipeline", code)
    for losses in lab.pull("losses", "all"):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


OTHER_WAYS = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(6, 8)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x, depth, scale=None):
        x = self.stem(x)
        for block in self.blocks[:depth]:
            x = x + block(x).tanh()
        return self.head(x if scale is None else x * scale)

x = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(x, x.sin()[:, :4])
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
losses = []
for epoch in range(4):
    for inputs, y in loader:
        outputs = model(inputs, epoch, scale=y[:, :1] if epoch == 2 else None)
        loss = torch.nn.functional.mse_loss(outputs, y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_forward_may_take_another_way_later(lab: Lab) -> None:
    # Layers are left out, so that others get their inputs from another stage.
    train(lab, "single", OTHER_WAYS)
    expected, weights = lab.pull("losses"), pull_weights(lab, "single")
    train(lab, "pipeline", OTHER_WAYS)
    for losses in lab.pull("losses", "all"):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    torch.testing.assert_close(
        pull_weights(lab, "pipeline"), weights, rtol=1e-4, atol=1e-6
    )


@pytest.mark.release
def test_a_way_that_changes_in_fit_is_refused(lab: Lab) -> None:
    code = OTHER_WAYS[: OTHER_WAYS.index("model, optimizer, loader")]
    code = code.replace("blocks[:depth]", "blocks[:self.depth]").replace(
        "def forward(self, x, depth,", "depth = 0\n    def forward(self, x,"
    )
    code += """
def deepen(*_):
    model.depth += 1
optimizer.register_step_post_hook(deepen)
fit(model, data, torch.nn.functional.mse_loss, optimizer=optimizer, batch_size=8)
"""
    with pytest.raises(RankError, match="with prepare in place of fit"):
        train(lab, "pipeline", code, microbatches=2)
    assert_equals_reference(lab, train(lab, "pipeline", cell("gpt")), reference("gpt"))


def test_state_that_forward_begins_to_change_in_fit_is_refused(lab: Lab) -> None:
    code = """
x = torch.randn(32, 6, generator=torch.Generator().manual_seed(2))
x[16:, 0] = 9.0  # from the third batch on

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.register_buffer("largest", torch.tensor(5.0))

    def forward(self, x):
        if x.max() > 8:
            self.largest.mul_(0.9).add_(0.1 * x.max())
        return self.second(self.first(x / self.largest.clone()).tanh())

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(x, x.sin())
fit(model, data, torch.nn.functional.mse_loss, optimizer=optimizer, batch_size=8,
    shuffle=False)
"""
    with pytest.raises(RankError, match="forward changes the model's largest in this"):
        train(lab, "pipeline", code, microbatches=2)
    assert lab.runs[-1].collector.steps == {0: 2, 1: 2}


OF_SIZES = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.register_buffer("mask", torch.ones(8, 8).tril())
        self.length, self.shape, self.scales = 8, [8, 6], {8: 8**-0.5}

    def forward(self, x):
        length = x.size(1)
        self.shape[:] = x.shape[1:]
        if self.length != length:
            self.length, self.mask = length, x.new_ones(length, length).tril()
        if length not in self.scales:
            self.scales[length] = length**-0.5
        return self.second((self.mask @ self.first(x) * self.scales[length]).tanh())

x = torch.randn(24, 8, 6, generator=torch.Generator().manual_seed(2))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(x, x.sin())
"""


def test_a_table_of_sizes_that_forward_makes_again_is_no_state(lab: Lab) -> None:
    """As after an evaluation with shorter sequences."""
    loop = (
        OF_SIZES
        + """
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8, shuffle=False)
for epoch in range(2):
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.eval(), model(torch.ones(8, 5, 6, device=device)), model.train()
"""
    )
    by_fit = (
        OF_SIZES
        + """
ends = [8] * 8 + [5] * 8 + [8] * 8
data = [(x[n, :end], x[n, :end].sin()) for n, end in enumerate(ends)]
fit(model, data, torch.nn.functional.mse_loss, optimizer=optimizer, batch_size=8,
    shuffle=False)
"""
    )
    for code in (loop, by_fit):
        lab.train("pipeline", code, live=False, microbatches=2)
        assert not lab.runs[-1].notes


RECURRENT = """
class Layer(torch.nn.Module):
    def __init__(self, num_inputs):
        super().__init__()
        self.lstm = torch.nn.LSTM(num_inputs, 8)

    def forward(self, x):
        return self.lstm(x.transpose(0, 1))[0].transpose(0, 1)

x = torch.randn(24, 5, 6, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(x, x.sin().mean(2, keepdim=True) * torch.ones(8))
model = torch.nn.Sequential(Layer(6), Layer(8), Layer(8), Layer(8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
fit(model, data, torch.nn.functional.mse_loss, optimizer=optimizer, batch_size=8)
"""


@pytest.mark.parametrize(
    "schedule", release_but(["1f1b", "interleaved"], "interleaved")
)
@pytest.mark.long
def test_stages_in_a_schedule_may_return_views(lab: Lab, schedule: str) -> None:
    train(lab, "single", RECURRENT)
    weights = pull_weights(lab, "single")
    run = train(lab, "pipeline", RECURRENT, schedule=schedule, microbatches=4)
    assert run.notes == []
    torch.testing.assert_close(
        pull_weights(lab, "pipeline"), weights, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "options",
    release_but([{}, {"accumulate": 2}], {"accumulate": 2}),
    ids=["plain", "parts"],
)
@pytest.mark.long
def test_gradients_of_what_stages_share_add_up_over_passes(
    lab: Lab, options: dict[str, Any]
) -> None:
    # The embedding is tied to the last layer. Gradients are zeroed every second batch.
    code = (
        cell("gpt")
        .replace("        optimizer.zero_grad()", "")
        .replace(
            "    for x, y in loader:",
            "    for count, (x, y) in enumerate(loader):\n"
            "        if count % 4 < 2: optimizer.zero_grad()",
        )
    )
    if not options:
        code = code.replace(
            "loss.backward()",
            "loss.backward(); (0.5 * loss_fn(model(x), y)).backward()",
        )
    train(lab, "single", code, **options)
    expected = pull_weights(lab, "single")
    train(lab, "pipeline", code, **options)
    torch.testing.assert_close(
        pull_weights(lab, "pipeline"), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.release
def test_a_loss_that_is_no_mean_of_microbatches_is_exact_all_the_same(
    lab: Lab,
) -> None:
    ignoring = """
def loss_fn(logits, targets):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=3)
"""
    code = by_fit("gpt").replace("loss_fn = next_token_loss", ignoring)
    code = code.replace("batch_size, epochs = 9, 2", "batch_size, epochs = 8, 2")
    run = train(lab, "single", code)
    losses, weights = global_losses(run), pull_weights(lab, "single")
    run = train(lab, "pipeline", code)
    np.testing.assert_allclose(global_losses(run), losses, rtol=1e-5)
    torch.testing.assert_close(
        pull_weights(lab, "pipeline"), weights, rtol=1e-5, atol=1e-6
    )
    assert any("is not the mean of those of its microbatches" in n for n in run.notes)


@pytest.mark.parametrize(
    "loss", release_but(["weighted", "of_pairs", "sum"], "of_pairs")
)
def test_what_makes_a_loss_no_mean_is_found(lab: Lab, loss: str) -> None:
    losses = {
        # By class, of which the first half of a batch has others than the second.
        "weighted": "F.cross_entropy(out, y, weight=torch.tensor([1.0, 2, 3, 4]))",
        "of_pairs": "(out @ out.T).logsumexp(1).mean()",
        "sum": "F.cross_entropy(out, y, reduction='sum')",
    }
    code = f"""
from torch.nn import functional as F
torch.manual_seed(0)
x, y = torch.randn(32, 6), torch.arange(32) % 16 // 4
model = torch.nn.Sequential(
    torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(x, y)
fit(model, data, lambda out, y: {losses[loss]}, optimizer=optimizer, batch_size=16,
    shuffle=False, reduction={"sum" if loss == "sum" else "mean"!r})
"""
    weights = {}
    for strategy in ("single", "pipeline"):
        run = train(lab, strategy, code)
        weights[strategy] = pull_weights(lab, strategy)
    torch.testing.assert_close(
        weights["pipeline"], weights["single"], rtol=1e-5, atol=1e-6
    )
    assert any("is not the mean of those of its microbatches" in n for n in run.notes)


@pytest.mark.long
def test_no_rank_keeps_the_outputs_of_a_whole_batch(lab: Lab) -> None:
    code = """
x, y = torch.randn(512, 8), torch.randint(4096, (512,))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4096))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(x, y)
fit(model, data, torch.nn.functional.cross_entropy, optimizer=optimizer,
    batch_size=256)
"""
    run = train(lab, "pipeline", code, microbatches=32)
    assert run.notes == []
    assert run.memory["total_peak"].max() < 256 * 4096 * 4 / 2


def test_replicas_run_a_batch_again_together(lab_of_4: Lab) -> None:
    # Only the first replica's half of a batch has targets that are ignored.
    code = by_fit("gpt").replace(
        "loss_fn = next_token_loss",
        """
ids[:, 1:][(torch.arange(38) % 8 >= 4)] %= 3
def loss_fn(logits, targets):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=3)
""",
    )
    code = code.replace("batch_size, epochs = 9, 2", "batch_size, epochs = 8, 2")
    code = code.replace("[:19", "[:16")
    run = train(lab_of_4, "pipeline", code, mesh="dp=2,pp=2", microbatches=2)
    assert any("is not the mean of those of its microbatches" in n for n in run.notes)
    per_step = run.history.dropna(subset=["loss"]).groupby("step")["loss"]
    assert (per_step.count() == 4).all()
    assert run.mismatches == []


NET = """
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return x + torch.tanh(self.linear(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

x = torch.randn(32, 6, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(x, x.sin()[:, :4])
model = Net()
loss_fn = mse = nn.functional.mse_loss
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
FIT_NET = """
fit(model, data, loss_fn, optimizer=optimizer, batch_size=8, epochs=2, shuffle=False)
"""
LOOP_NET = """
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8, shuffle=False)
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def assert_equals_single(lab: Lab, code: str, **options: Any) -> Run:
    run = train(lab, "single", code)
    losses, weights = global_losses(run), pull_weights(lab, "single")
    run = train(lab, "pipeline", code, **options)
    np.testing.assert_allclose(global_losses(run), losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        pull_weights(lab, "pipeline"), weights, rtol=1e-5, atol=1e-5
    )
    return run


LOSSES = {
    "a penalty of one stage": "mse(o, y) + 0.1 * model.head.weight.square().sum()",
    "a penalty of all": "mse(o, y) + sum(p.square().sum() for p in model.parameters())",
    "the model again": "mse(o, y) + model(y.repeat(1, 2)[:, :6]).square().mean()",
    "a layer again": "mse(o, y) + model.head(o.repeat(1, 2)).square().mean()",
    "chosen samples": "mse(o[y[:, 0] > -9], y[y[:, 0] > -9])",
    "a value": "mse(o, y) if mse(o, y).item() > 0 else None",
    # Whose value is the mean of those of microbatches, and whose gradient is not.
    "always 1": "(found := mse(o, y)) / found.detach()",
    "whitened": "(((a := o.detach()[:, 0] + y[:, 0]) - a.mean()) / a.std() * ("
    "o[:, 1] - o[:, 1].detach()).exp()).mean()",
}


@pytest.mark.parametrize("loss", release_but(LOSSES, *list(LOSSES)[::3]))
def test_losses_of_any_kind_equal_one_process(lab: Lab, loss: str) -> None:
    code = f"{NET}loss_fn = lambda o, y: {LOSSES[loss]}\n{FIT_NET}"
    run = assert_equals_single(lab, code, microbatches=4)
    in_schedule = loss in ("a penalty of one stage", "a layer again")
    assert bool(run.notes) != in_schedule, run.notes


def test_a_loss_that_keeps_what_it_computes_is_refused(lab: Lab) -> None:
    keeping = """
center = [torch.zeros(4)]
def loss_fn(o, y):
    center[0] = 0.9 * center[0] + 0.1 * o.detach().mean(0)
    return mse(o - center[0], y)
"""
    with pytest.raises(RankError, match="loss_fn keeps a tensor that it has computed"):
        train(lab, "pipeline", NET + keeping + FIT_NET)
    assert_equals_single(lab, NET + keeping + LOOP_NET)


WHOLE = {
    "a count": ("self.head(x), len(x)", "((o[0] - y) ** 2).sum() / o[1] / 99"),
    "places": (
        "self.head(x), torch.arange(len(x)) % 4",
        "nn.functional.cross_entropy(*o)",
    ),
    "infinities": (
        "(self.head(x) - self.head(x).mean(0)).masked_fill("
        "torch.arange(4) == 3, -torch.inf)",
        "o.exp().mean()",
    ),
}


@pytest.mark.parametrize("outputs", WHOLE)
def test_outputs_that_are_of_a_whole_batch_stay_so(lab: Lab, outputs: str) -> None:
    returned, loss = WHOLE[outputs]
    code = NET.replace("self.head(x)", returned) + f"loss_fn = lambda o, y: {loss}\n"
    run = assert_equals_single(lab, code + LOOP_NET, microbatches=4)
    assert any("as one microbatch" in note for note in run.notes)


EVALUATED = """
class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def forward(self, x, y=None):
        o = self.net(x)
        return o if y is None else (o, mse(o, y))
def evaluate():
    model.eval()
    with torch.{mode}():
        found = [model(a, b)[1].item() for a, b in zip(x.split(8), data[:][1].split(8))]
    model.train()
    return found
torch.manual_seed(0)
model = Scored()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8, shuffle=False)
found = evaluate()
for a, b in loader:
    {loss}.backward()
    optimizer.step()
    optimizer.zero_grad()
found += evaluate()
"""


@pytest.mark.parametrize(
    ("loss", "mode"),
    [("model(a, b)[1]", "no_grad"), ("mse(model(a), b)", "inference_mode")],
    ids=["the same call", "another call"],
)
def test_an_evaluation_returns_the_loss_of_its_whole_batch(
    lab: Lab, loss: str, mode: str
) -> None:
    """Before a step, and where training has called the model in another way."""
    code = NET + EVALUATED.format(loss=loss, mode=mode)
    train(lab, "single", code)
    expected = lab.pull("found", "0")
    run = train(lab, "pipeline", code, microbatches=4)
    for found in lab.pull("found", "all"):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    is_scored = loss.endswith("[1]")
    assert any("as one microbatch" in note for note in run.notes) == is_scored


COLLECTIVES = {
    "between layers": (
        "return self.head(x)",
        "torch.distributed.all_reduce(c := x.detach().mean(0))\n"
        "        return self.head(x - c)",
    ),
    "a list": (
        "return self.head(x)",
        "torch.distributed.all_gather([torch.ones_like(x) for _ in '12'], x.detach())\n"
        "        return self.head(x)",
    ),
    "within a layer": (
        "torch.tanh(self.linear(x))",
        "torch.distributed.nn.functional.all_reduce(self.linear(x)) / 2",
    ),
}


@pytest.mark.parametrize("where", COLLECTIVES)
def test_a_collective_in_forward_is_refused_before_it_is_begun(
    lab: Lab, where: str
) -> None:
    pids = ask(lab, "__import__('os').getpid()")
    code = NET.replace(*COLLECTIVES[where]) + LOOP_NET
    assert code != NET + LOOP_NET
    with pytest.raises(RankError, match="calls a collective of"):
        train(lab, "pipeline", code)
    assert ask(lab, "__import__('os').getpid()") == pids


def test_samples_that_refer_to_each_other_stay_together(lab: Lab) -> None:
    # In a microbatch a place is too great: where the values are, and nowhere else.
    code = NET.replace("tanh(self.linear(x))", "tanh(self.linear(x))[self.edges]")
    code = code.replace(
        "self.linear =", "self.edges = torch.arange(32) ^ 16\n        self.linear ="
    )
    code += LOOP_NET.replace("batch_size=8", "batch_size=32")
    run = assert_equals_single(lab, code)
    assert any("as one microbatch" in note for note in run.notes)


BAGS = """
from torch.utils.data import DataLoader
class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(20, 12), nn.Linear(12, 3)
    def forward(self, words, first):
        return self.head(self.bags(words, first))
def packed(items):
    sizes = torch.tensor([0] + [len(words) for words, _ in items[:-1]])
    return torch.cat([words for words, _ in items]), sizes.cumsum(0)
texts = [(torch.arange(i, i + 1 + i % 5) % 20, i) for i in range(32)]
model = Bags()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(texts, batch_size=8, collate_fn=packed)
model, optimizer, loader = prepare(model, optimizer, loader)
for words, first in loader:
    optimizer.zero_grad()
    model(words, first).square().mean().backward()
    optimizer.step()
"""


def test_an_input_that_tells_where_samples_begin_stays_whole(lab: Lab) -> None:
    run = assert_equals_single(lab, BAGS)
    assert any("as one microbatch" in note for note in run.notes)


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param("self.linear(x.relu_())", marks=pytest.mark.long),
        "x.view(-1, 2, 4).add_(self.linear(x * 1).view(-1, 2, 4)).view(-1, 8)",
    ],
)
def test_a_layer_may_write_to_what_it_gets(lab: Lab, layer: str) -> None:
    code = NET.replace("x + torch.tanh(self.linear(x))", layer)
    assert code != NET
    assert assert_equals_single(lab, code + FIT_NET).notes == []


WRITTEN = {
    "by a slice": "out = torch.zeros(len(x), 4)\n"
    "out[:, :2] = x[:, :2]\n"
    "return self.head(x) + out",
    "by rows": "out = torch.empty(len(x), 8)\n"
    "for i in range(len(x)):\n"
    "    out[i] = x[i]\n"
    "return self.head(out)",
    "of an earlier stage": "out = self.head(x)\nout += h[:, :4]\nreturn out",
    "to an earlier stage": "h = self.first(i)\nh += self.head(x).repeat(1, 2)\n"
    "return self.head(h)",
    "by add": "out = torch.zeros(len(x), 8)\nout += x\nreturn self.head(out)",
}


@pytest.mark.parametrize("made", release_but([LOOP_NET, FIT_NET], LOOP_NET))
@pytest.mark.parametrize("written", WRITTEN)
def test_forward_writes_what_a_stage_computes(
    lab: Lab, written: str, made: str
) -> None:
    """To a tensor that it has made, which every rank has, or to one of its own."""
    body = indent(WRITTEN[written], 8 * " ").strip()
    code = NET.replace("return self.head(x)", body)
    code = code.replace("x = self.first(x)", "i, x = x, self.first(x); h = x")
    assert_equals_single(lab, code + made)


def test_a_layer_writes_to_a_part_and_forward_goes_on_with_the_rest(lab: Lab) -> None:
    layer = "torch.tanh(self.linear(torch.cat([x.mul_(0.5)] * 2, 1)))"
    code = NET.replace("x + torch.tanh(self.linear(x))", layer)
    two = "a, b = x[:, :4], x[:, 4:]; x = block(a) + torch.cat([b, b], 1)"
    code = code.replace("x = block(x)", two)
    assert code.count("a, b") == 1
    assert_equals_single(lab, code + LOOP_NET)


def test_what_is_written_to_while_it_is_sent_arrives_as_it_was(lab: Lab) -> None:
    """The rank that gets it is late."""
    late = "h = x; time.sleep(0.2 * globals().get('rank', 0)); x = self.blocks[1](x)"
    code = NET.replace("x + torch.tanh(self.linear(x))", "self.linear(x + 0)")
    code = code.replace("for block in self.blocks:", "if True:")
    code = code.replace("x = block(x)", f"{late}; h.mul_(-3)")
    code = code.replace("return self.head(x)", "return self.head(x + h)")
    assert_equals_single(lab, "import time\n" + code + LOOP_NET)


@pytest.mark.parametrize(
    ("returned", "then"),
    [
        ("x", "h = x; x = self.blocks[1](x); x.mul_(2); x = x + h"),
        ("x", "h = x; x = self.blocks[1](x); h.mul_(2); x = x + h"),
        ("x.view(-1, 8)", "h = x; x = self.blocks[1](x); x = self.blocks[2](x) + h"),
        ("x * 2", "h = x; z = self.blocks[1](x); w = h.view_as(z); w.mul_(3); x = h"),
    ],
    ids=["what it returns", "what it is given", "by a layer", "as another is"],
)
def test_what_a_layer_returns_of_its_input_may_not_be_written_to(
    lab: Lab, returned: str, then: str
) -> None:
    """Where it is on another rank than what it is given. Nor may what a function of two
    stages returns of one; without the write all of it is right."""
    code = NET.replace("x + torch.tanh(self.linear(x))", returned, 1).replace(
        "class Net(",
        """class Writes(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(0.5) * 1)
class Net(""",
    )
    blocks = "[nn.Linear(8, 8), Block(), Writes(8, 8)]"
    code = code.replace("[Block(), Block()]", blocks)
    code = code.replace("for block in self.blocks:", "if True:")
    code = code.replace("x = block(x)", f"x = self.blocks[0](x); {then}") + LOOP_NET
    options = {"config": {"cuts": ["blocks.1"]}}
    with pytest.raises(RankError, match="a layer returns a tensor that it is given"):
        train(lab, "pipeline", code, **options)
    for write in ("x.mul_(2)", "h.mul_(2)", "w.mul_(3)"):
        code = code.replace(write, "pass")
    code = code.replace("self.blocks[2](x) + h", "self.blocks[2](x * 1) + h")
    assert_equals_single(lab, code, **options)


def test_what_layers_write_to_is_not_kept(lab: Lab) -> None:
    code = NET.replace("x + torch.tanh(self.linear(x))", "self.linear(x.relu_())")
    counting = LOOP_NET.replace(
        "    optimizer.zero_grad()\n",
        "    optimizer.zero_grad()\n"
        "    kinds = [type(each).__name__ for each in gc.get_objects()]\n"
        "    counts.append(kinds.count('Here') + kinds.count('Elsewhere'))\n",
    )
    train(lab, "pipeline", f"import gc\ncounts = []\n{code}{counting}")
    for counts in lab.pull("counts", "all"):
        assert counts[-1] <= counts[0]


def test_what_forward_writes_to_a_buffer_is_on_every_rank(lab: Lab) -> None:
    code = NET.replace(
        "self.head = nn",
        "self.register_buffer('queue', torch.zeros(3, 8))\n        self.head = nn",
    ).replace(
        "return self.head(x)",
        "found = self.head(x) + self.queue.mean()\n"
        "        self.queue[:2] = x.detach()[:2]\n"
        "        return found",
    )
    assert_equals_single(lab, code + LOOP_NET)
    one, other = ask(lab, "(model.queue, model.state_dict()['queue'])")
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert one[0].abs().sum() > 0


@pytest.mark.release
def test_places_in_a_table_pass_from_stage_to_stage(lab: Lab) -> None:
    code = """
class First(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x), (x[:, 0] > 0).long()
class Then(torch.nn.Linear):
    def forward(self, x):
        h, place = x
        return super().forward(h) + self.weight[place]
model = torch.nn.Sequential(First(6, 4), Then(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    for _ in range(3):
        assert_equals_single(lab, NET + code + FIT_NET)


@pytest.mark.release
def test_dropout_in_functions_leaves_samples_independent(lab: Lab) -> None:
    code = NET.replace("x + torch", "x + nn.functional.dropout(torch").replace(
        "(self.linear(x))", "(self.linear(x)), 0.5, self.training)"
    )
    attention = "nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)"
    code = code.replace("[Block(), Block()]", f"[Block(), {attention}]")
    code = code.replace("x = self.first(x)", "x = self.first(x)[:, None]")
    code = code.replace("self.head(x)", "self.head(x)[:, 0]")
    assert train(lab, "pipeline", code + FIT_NET).notes == []


@pytest.mark.long
def test_stages_and_replicas_drop_other_activations(lab_of_4: Lab) -> None:
    code = NET.replace(
        "x + torch.tanh(self.linear(x))",
        "self.kept(nn.functional.dropout(self.linear(x) * 0 + 1, 0.5, self.training))",
    ).replace(
        "    def forward(self, x):",
        """    def kept(self, mask):
        if torch.is_grad_enabled() and not mask.is_meta:
            masks.append(mask.detach().clone())
        return mask
    def forward(self, x):""",
        1,
    )
    code = "masks = []\n" + code.replace("(8, 8)", "(64, 64)").replace("8)", "64)", 1)
    code = code.replace("nn.Linear(8, 4)", "nn.Linear(64, 4)")
    train(lab_of_4, "pipeline", code + FIT_NET, mesh="dp=2,pp=2", microbatches=2)
    # The first pass of each is for shapes alone.
    masks = [mask for found in lab_of_4.pull("masks", "all") for mask in found[1:]]
    distinct = {mask.numpy().tobytes() for mask in masks}
    assert len(masks) >= 4 * 2 * 8
    assert len(distinct) == len(masks)


COPIES = {
    "a teacher": """
teacher = torch.optim.swa_utils.AveragedModel(model).requires_grad_(False)
for x, y in loader:
    output = model(x)
    (loss_fn(output, y) + loss_fn(output, teacher(x))).backward()
    optimizer.step()
    optimizer.zero_grad()
found = teacher(data.tensors[0].to(device)).detach()
""",
    "another mode": """
average = torch.optim.swa_utils.AveragedModel(model)
model.eval()
found = model(data.tensors[0].to(device)).detach()
torch.optim.swa_utils.update_bn(data.tensors[0].split(8), average, device)
found = average.eval()(data.tensors[0].to(device)).detach()
""",
}


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_is_called_as_it_is_and_not_as_its_model(lab: Lab, copied: str) -> None:
    """One without gradients, and one that gathers BatchNorm's statistics."""
    code = NET.replace("x + torch.tanh(self.linear(x))", "self.norm(self.linear(x))")
    norm = "self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)"
    code = code.replace("self.linear = nn.Linear(8, 8)", norm)
    code += LOOP_NET.split("for x, y", 1)[0] + COPIES[copied]
    train(lab, "single", code)
    found = lab.pull("found")
    train(lab, "pipeline", code)
    for each in lab.pull("found", "all"):
        torch.testing.assert_close(each, found, rtol=1e-5, atol=1e-6)


def test_what_is_drawn_between_layers_is_the_same_on_all_ranks(lab: Lab) -> None:
    code = """
drawn = []
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5))
            for _ in range(4))
        self.head = torch.nn.Linear(6, 6)
    def forward(self, x):
        for block in self.blocks:
            if self.training and torch.rand(()) < 0.3:
                continue
            keep = (torch.rand(len(x), 1, device=x.device) < 0.8) / 0.8
            drawn.append(keep.tolist())
            x = x + torch.nn.functional.dropout(block(x), 0.5) * keep
        return self.head(x)
x = torch.randn(24, 6)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(x)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
for _ in range(4):
    for [x] in loader:
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()
"""
    train(lab, "pipeline", code)
    first, second = lab.pull("drawn", "all")
    assert first == second
    assert len({str(each) for each in first}) > 10


def test_parts_of_a_batch_are_not_judged_as_its_loss(lab: Lab) -> None:
    # Of a batch of 9, in two parts, the second one passes in two microbatches.
    code = NET + FIT_NET.replace("batch_size=8", "batch_size=9")
    assert train(lab, "pipeline", code, accumulate=2, microbatches=2).notes == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_layers_may_be_compiled_by_the_user(lab: Lab) -> None:
    """What ranks send each other there is not for the compiler."""
    compiled = "for block in model.blocks:\n    block.compile(backend='eager')\n"
    assert_equals_single(lab, NET + compiled + LOOP_NET)


def test_what_the_loop_compiles_as_one_graph_runs_eagerly(lab: Lab) -> None:
    """Between layers it cannot be traced; in one, to trace it is to read gradients."""
    compiled = '@torch.compile(fullgraph=True, backend="eager")\n'
    twice = f"{compiled}def twice(x):\n    return 2 * x\n\nclass Net("
    mix = f"return self.mix(x)\n    {compiled}    def mix(self, x):\n        return x +"
    code = (
        NET.replace("class Net(", twice)
        .replace("self.head(x)", "self.head(twice(x))")
        .replace("return x +", mix)
    )
    assert_equals_single(lab, code + LOOP_NET)


def test_a_checkpoint_in_forward_is_refused(lab: Lab) -> None:
    """By all ranks at the same layer, so that none waits for another."""
    code = NET.replace(
        "block(x)", "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
    )
    for loop in (FIT_NET, LOOP_NET):
        noting = f"try:\n{indent(loop, '    ')}\nexcept Exception as error:\n"
        noting += "    refusal = str(error)\n    raise"
        with pytest.raises(RankError, match="give --activation-checkpointing"):
            train(lab, "pipeline", code + noting)
        first, second = lab.pull("refusal", "all")
        assert "wraps blocks.0 in" in first
        assert first == second
        lab.run("del refusal")


ADJOINT = """
class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.x, ctx.block = x, block
        with torch.no_grad():
            return block(x)
    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            return torch.autograd.grad(ctx.block(x), x, gradient)[0], None
"""
GRADIENTS = """
norms = {}
def note(module, inputs, outputs):
    norms[module] = torch.eye(4) + outputs[0].T @ outputs[0]
model.head.register_full_backward_hook(note)
"""
OF_COPY = """
import copy
other = copy.deepcopy(model)
for x, y in loader:
    other.zero_grad()
    loss_fn(other(x), y).backward()
    noise = [0.1 * p.grad for p in other.parameters()]
"""
PLACES = {
    "a backward pass of one's own": (
        NET.replace("block(x)", "Adjoint.apply(x, block)") + ADJOINT + LOOP_NET,
        r"backward pass calls blocks\.1, for example in your own torch\.autograd",
    ),
    "a hook for gradients": (
        NET + GRADIENTS + LOOP_NET,
        "What a hook of a module gets",
    ),
    "an attribute of a layer": (
        NET.replace("return x + torch", "self.kept = torch")
        .replace(
            "(self.linear(x))\n", "(self.linear(x))\n        return x + self.kept\n"
        )
        .replace("self.head(x)", "self.head(self.blocks[1].kept)")
        + LOOP_NET,
        "head gets what a layer has computed and not returned",
    ),
    "what a hook takes of a layer": (
        NET.replace(
            "x = self.first(x)",
            "x = self.first(x); seen = []; [b.linear.register_forward_hook("
            "lambda m, i, o: seen.append(o)) for b in self.blocks]",
        ).replace("self.head(x)", "self.head(x) + sum(s.square().mean() for s in seen)")
        + LOOP_NET,
        "model's output gets what a layer has computed and not returned",
    ),
    "a view that a layer writes to": (
        NET.replace(
            "x + torch.tanh(self.linear(x))", "self.linear(x.mul_(0.5))"
        ).replace("x = block(x)", "x = x + block(x.view(-1, 8))")
        + LOOP_NET,
        "a layer writes to a view of a tensor that is used afterwards",
    ),
    "one tensor given twice": (
        NET.replace("def forward(self, x):", "def forward(self, x, *others):", 1)
        .replace("x + torch.tanh(self.linear(x))", "self.linear(x.mul_(0.5))")
        .replace("block(x)", "block(x, x)")
        + LOOP_NET,
        "is given one tensor twice, and writes to it",
    ),
    "one tensor given twice, once without gradients": (
        NET.replace("def forward(self, x):", "def forward(self, x, other):", 1)
        .replace("x + torch.tanh(self.linear(x))", "self.linear(x + other.mul_(0.5))")
        .replace("block(x)", "block(x, x.detach())")
        + LOOP_NET,
        "is given one tensor twice, and writes to it",
    ),
    "what detach() gives, that a layer writes to": (
        NET.replace(
            "x + torch.tanh(self.linear(x))", "self.linear(x.mul_(0.5))"
        ).replace("x = block(x)", "x = x + block(x.detach())")
        + LOOP_NET,
        "a layer writes to a view of a tensor that is used afterwards",
    ),
    "a view of what a layer writes to": (
        NET.replace(
            "x + torch.tanh(self.linear(x))", "self.linear(x.mul_(0.5))"
        ).replace("x = block(x)", "same = x.view(-1, 8); x = same + block(x)")
        + LOOP_NET,
        "to one of which a view or x.detach\\(\\) is",
    ),
    "what a layer writes by .data": (
        NET.replace(
            "return x + torch.tanh(self.linear(x))",
            "x.data.mul_(0.5); return x + torch.tanh(self.linear(x))",
        )
        + LOOP_NET,
        "in a way that autograd does not count",
    ),
    "a view": (
        NET.replace(
            "x = self.first(x)",
            "o = x.clone(); x = self.first(x); o[:, :2].copy_(x[:, :2])",
        )
        + LOOP_NET,
        "through a view of another tensor",
    ),
    "anomalies": (
        NET + "with torch.autograd.detect_anomaly():\n" + indent(LOOP_NET, "    "),
        "looks at the values of each gradient",
    ),
    "gradients of a copy": (
        NET + LOOP_NET + OF_COPY,
        "Under pipeline a copy of the model",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_other_ranks_lack_is_said_as_it_is(lab: Lab, place: str) -> None:
    code, message = PLACES[place]
    with pytest.raises(RankError, match=message) as caught:
        train(lab, "pipeline", code)
    assert "--accumulate" not in str(caught.value)


def test_buffers_and_messages_are_not_kept(lab: Lab) -> None:
    batches = """
class Batches(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.ones(1 + i // 8, 6), torch.ones(1, 4)
data = Batches()
"""
    watching = """
from labkit.strategies.relay.parameters import pipeline_of
shapes = []
def loss_fn(o, y):
    shapes.append(len(pipeline_of(model)._schedules))
    return mse(o, y)
"""
    train(lab, "pipeline", NET + batches + watching + FIT_NET, microbatches=2)
    assert max(lab.pull("shapes", 1)) <= 4
    lab.run("""
found = pipeline_of(model)
with torch.no_grad():
    for _ in range(3):
        model(x)
kept = len(found._schedules), len(found.relay.channel._sending)
""")
    assert lab.pull("kept", "all") == [(0, 0), (0, 0)]


# ---- what is measured ----


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("precision", release_but(["fp32", "bf16"], "bf16"))
@pytest.mark.long
def test_what_stages_send_is_counted_as_it_is_sent(
    lab: Lab, schedule: str, precision: str
) -> None:
    wide = NET.replace("8, 8", "64, 64").replace("6, 8", "6, 64")
    wide = wide.replace("8, 4", "64, 4")
    run = train(lab, "pipeline", wide + FIT_NET, schedule=schedule, precision=precision)
    sent = run.comm["wire_bytes"].groupby("rank").sum()
    np.testing.assert_allclose(sent.max(), run.theory["wire_bytes"], rtol=0.05)


@pytest.mark.parametrize("make", release_but([cell, by_fit], cell), ids=["loop", "fit"])
@pytest.mark.long
def test_memory_and_bytes_are_those_of_theory(lab: Lab, make: Any) -> None:
    code = make("gpt", "adamw").replace("[:19", "[:32")
    code = code.replace("38, 9", "64, 65").replace(
        "context=8, dim=16", "context=64, dim=64"
    )
    code = code.replace("batch_size, epochs = 9, 2", "batch_size, epochs = 8, 3")
    run = train(lab, "pipeline", code)
    theory = run.theory
    for part in ("parameters", "gradients", "optimizer_state"):
        np.testing.assert_allclose(run.memory[part].max(), theory[part], rtol=0.05)
    sent = run.comm["wire_bytes"].groupby("rank").sum()
    np.testing.assert_allclose(sent.max(), theory["wire_bytes"], rtol=0.05)


@pytest.mark.release
def test_a_run_has_the_schedule_of_its_passes(lab: Lab) -> None:
    code = by_fit("gpt").replace(
        "batch_size, epochs = 9, 2", "batch_size, epochs = 8, 6"
    )
    code = code.replace("[:19", "[:16")
    run = train(lab, "pipeline", code, microbatches=4)
    table = run.schedule
    assert len(table) == 2 * 2 * 4
    forward = table[table["kind"] == "forward"].set_index(["stage", "microbatch"])
    for microbatch in range(4):
        first, second = forward.loc[(0, microbatch)], forward.loc[(1, microbatch)]
        assert first["ended"] <= second["began"] + 1e-3
        assert (first["rank"], second["rank"]) == (0, 1)
    assert "ranks wait" in run.plot_schedule().axes[0].get_title(loc="left")
    run = train(lab, "ddp", cell("mlp"))
    with pytest.raises(
        ValueError, match="has no schedule: a run of fit under pipeline"
    ):
        run.plot_schedule()


def test_a_bubble_by_formula() -> None:
    assert bubble(4, 1) == 3 / 4
    assert bubble(4, 8) == 3 / 11
    assert bubble(4, 8, chunks=2) == 3 / 19


# ---- cuts ----


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([5, 5], 2, [0, 1]),
        ([1, 1, 1, 1, 9], 2, [0, 4]),
        ([3, 3, 3], 3, [0, 1, 2]),
        ([1, 1, 10, 10, 10, 10, 1, 5], 2, [0, 4]),
    ],
)
def test_cuts_make_stages_of_about_equal_cost(
    costs: list[int], num_stages: int, expected: list[int]
) -> None:
    assert equal_cuts(costs, num_stages) == expected


def test_a_model_is_cut_between_its_layers() -> None:
    stages = cut(plain_model("gpt"), 2, {})
    begins = [stages.names[stages.stage_of.index(stage)] for stage in (0, 1)]
    assert begins == ["tokens", "blocks.1"]
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert cut(model, 2, {"cuts": ["2"]}).stage_of == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"cuts": ["blocks.9"]}}, "'blocks.9'; a stage begins with one of"),
        ({"config": {"cuts": []}}, "2 stages need a list of 1"),
        (
            {"config": {"cuts": ["tokens"]}},
            "not its first: that begins the first stage",
        ),
        ({"config": {"stages": 2}}, "pipeline has no 'stages'; it knows: cuts"),
    ],
)
def test_cuts_that_cannot_be_are_refused(
    lab: Lab, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankError, match=message):
        train(lab, "pipeline", cell("gpt"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "microbatches is 0"),
        ({"schedule": "zero"}, "schedule"),
        ({"mesh": "tp=2"}, "no axis 'tp' under pipeline, which has: pp, dp_replicate"),
    ],
)
def test_options_that_cannot_be_are_refused(
    lab: Lab, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(lab, "pipeline", cell("gpt"), **options)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            cell("mlp").replace(
                "model = mlp(num_hidden=16)", "model = torch.nn.Linear(64, 10)"
            ),
            "2 stages, and this model can be cut nowhere",
        ),
        (
            cell("gpt").replace("model(x)", "model((x + rank) % 32)"),
            "give it different inputs",
        ),
        (
            cell("gpt").replace("model(x), y)", "model(x), (y + rank) % 32)"),
            "have different losses",
        ),
    ],
    ids=["one layer", "other inputs", "another loss"],
)
def test_loops_that_cannot_be_right_are_refused(
    lab: Lab, code: str, message: str
) -> None:
    with pytest.raises(RankError, match=message):
        train(lab, "pipeline", code)


@pytest.mark.parametrize("option", [{"compile": True}], ids=str)
def test_options_that_stages_cannot_have_are_refused(
    lab: Lab, option: dict[str, Any]
) -> None:
    with pytest.raises(RankError, match="leave it out, or use ddp"):
        train(lab, "pipeline", cell("waves"), **option)


# ---- failures, checkpoints, other strategies ----


@pytest.mark.parametrize(
    "make", release_but([cell, by_fit], by_fit), ids=["loop", "fit"]
)
def test_a_stage_that_raises_frees_the_others(lab: Lab, make: Any) -> None:
    raising = """
def fail(module, args):
    if rank == 1 and module.training:
        raise ArithmeticError("stage 1 fails")
model.blocks[1].register_forward_pre_hook(fail)
optimizer = torch
"""
    code = make("gpt").replace("optimizer = torch", raising.strip(), 1)
    lab.run("kept = 5")
    with pytest.raises(RankError, match=r"rank 1: failed .*ArithmeticError: stage 1"):
        train(lab, "pipeline", code)
    assert ask(lab, "kept") == [5, 5]
    assert_equals_reference(lab, train(lab, "pipeline", cell("gpt")), reference("gpt"))


@pytest.mark.parametrize(
    "schedule", release_but(["gpipe", "1f1b", "interleaved"], "1f1b")
)
@pytest.mark.long
def test_an_interrupt_in_a_schedule_ends_it(lab: Lab, schedule: str) -> None:
    waiting = """
import time
count = []
def wait(module, args):
    count.append(1)
    if rank == 1 and len(count) == 40:
        log(waits=1)
        time.sleep(600)
model.blocks[1].register_forward_pre_hook(wait)
"""
    lab.run("kept = 5")
    endless = FIT_NET.replace("epochs=2", "epochs=10_000")
    run = lab.train(
        "pipeline",
        NET + waiting + endless,
        live=False,
        background=True,
        schedule=schedule,
    )
    while "waits" not in run.history:
        assert not run.has_ended.wait(0.05), run.info
    run.interrupt(timeout=30)
    assert run.state == "interrupted"
    assert {each["status"] for each in run.info["outcomes"]} == {"interrupted"}
    assert ask(lab, "kept") == [5, 5]
    assert_equals_single(lab, NET + FIT_NET, schedule=schedule)


@pytest.mark.long
def test_a_stage_that_dies_ends_the_run(lab: Lab) -> None:
    dying = "    for x, y in loader:\n        if rank == 1: os.kill(os.getpid(), 9)"
    code = "import os\n" + cell("gpt").replace("    for x, y in loader:", dying)
    with pytest.raises(RankError, match="rank 1: the process died"):
        train(lab, "pipeline", code)
    lab.restart()
    assert_equals_reference(lab, train(lab, "pipeline", cell("gpt")), reference("gpt"))


@pytest.mark.release
def test_checkpoints_load_across_strategies(lab: Lab, tmp_path: Path) -> None:
    code = cell("gpt", "adamw")
    save, load = "\nsave_checkpoint({!r})", "load_checkpoint({!r})"

    def more(strategy: str, source: str, target: str) -> Any:
        """The losses of one more epoch, from one checkpoint to another."""
        text = code.replace("range(epochs)", "1 * [0]").replace(
            "for epoch",
            (load.format(str(tmp_path / source)) if source else "") + "\nfor epoch",
            1,
        )
        return global_losses(
            train(lab, strategy, text + save.format(str(tmp_path / target)))
        )

    text = code.replace("range(epochs)", "range(4)")
    expected = global_losses(train(lab, "single", text)).reshape(4, -1)
    found = [
        more("fsdp", "", "a"),
        more("pipeline", "a", "b"),
        more("pipeline", "b", "c"),
        more("single", "c", "d"),
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.release
def test_a_run_is_resumed(lab: Lab, tmp_path: Path) -> None:
    code = by_fit("gpt", "adamw")
    whole = global_losses(train(lab, "pipeline", code))
    begun = code.replace("epochs=epochs", "epochs=1")
    folder = tmp_path / "kept"
    train(lab, "pipeline", begun, checkpoint=folder, every=2)
    run = train(lab, "pipeline", code, checkpoint=folder, resume=True)
    np.testing.assert_allclose(
        global_losses(run), whole[-len(global_losses(run)) :], rtol=1e-4
    )


@pytest.mark.parametrize(
    "strategy", release_but(["ddp", "pipeline", "fsdp"], "pipeline")
)
@pytest.mark.long
def test_a_model_in_stages_is_prepared_again(lab: Lab, strategy: str) -> None:
    train(lab, "pipeline", cell("gpt", "no momentum"))
    again = """
model, optimizer, loader = prepare(
    model, optimizer, data, batch_size=batch_size, shuffle=False
)
for epoch in range(epochs):
    for x, y in loader:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    run = train(lab, strategy, again)
    single = cell("gpt", "no momentum").replace("range(epochs)", "range(2 * epochs)")
    expected = global_losses(train(lab, "single", single))
    found = global_losses(run)
    np.testing.assert_allclose(found, expected[-len(found) :], rtol=1e-4)


@pytest.mark.release
def test_a_model_in_stages_goes_on_after_the_run(lab: Lab) -> None:
    train(lab, "pipeline", cell("gpt"))
    lab.run("model.eval()\nwith torch.no_grad(): found = model(x)")
    weights = lab.pull("model", full=True)
    model = plain_model("gpt")
    model.load_state_dict(weights)
    with torch.no_grad():
        expected = model(lab.pull("x", 0))
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, expected)
