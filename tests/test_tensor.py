"""The strategy `tensor`: layers split among ranks, with and without replicas."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from marks import RELEASE
from marks import release_but
from test_pipeline import ask
from test_strategies import BOTH
from test_strategies import assert_equals_reference
from test_strategies import cell
from test_strategies import global_losses
from test_strategies import norm_of_all
from test_strategies import plain_model
from test_strategies import pull_weights
from test_strategies import reference
from test_strategies import train

from labkit import Lab
from labkit import RankError

pytestmark = pytest.mark.timeout(90)

PLANS = {
    "the model's": {},
    "sequence": {"sequence": True},
    "loss": {"loss_parallel": True},
    "both": {"sequence": True, "loss_parallel": True},
}


@pytest.fixture(scope="module")
def lab_of_4() -> Iterator[Lab]:
    with Lab(num_ranks=4, group_timeout_s=30) as lab:
        yield lab


# ---- the same as one process ----


@pytest.mark.parametrize("plan", release_but(PLANS, "the model's", "both"))
@pytest.mark.parametrize(
    "options", release_but([BOTH, {}], BOTH), ids=["both", "plain"]
)
def test_split_layers_equal_one_process(
    lab: Lab, plan: str, options: dict[str, Any]
) -> None:
    run = train(lab, "tensor", cell("gpt", "adamw"), config=PLANS[plan], **options)
    expected = reference("gpt", "adamw", **options)
    np.testing.assert_allclose(global_losses(run), expected.losses, rtol=1e-5)
    weights = pull_weights(lab, "tensor")
    # AdamW divides by gradients that are 0 but for rounding.
    torch.testing.assert_close(weights, expected.weights, rtol=1e-3, atol=2e-3)
    model = plain_model("gpt")
    model.load_state_dict(weights, strict=True)
    assert model.head.weight is model.tokens.weight
    num_parameters = len(list(model.parameters()))
    assert ask(lab, "len(list(model.parameters()))") == [num_parameters] * 2


@pytest.mark.parametrize(
    "options", release_but([BOTH, {}], BOTH), ids=["both", "plain"]
)
def test_linear_layers_of_a_sequential_are_split_in_pairs(
    lab: Lab, options: dict[str, Any]
) -> None:
    run = train(lab, "tensor", cell("mlp"), **options)
    assert_equals_reference(lab, run, reference("mlp", **options))
    parts = "[tuple(p.to_local().shape) for p in model.parameters()]"
    assert ask(lab, parts) == [[(8, 64), (8,), (10, 8), (10,)]] * 2


@pytest.mark.parametrize(
    ("mesh", "config"),
    [
        pytest.param("dp=2,tp=2", {}, marks=pytest.mark.release),
        pytest.param("dp=2,tp=2", PLANS["both"], marks=pytest.mark.release),
        pytest.param("dp_replicate=2,tp=2", {}, marks=RELEASE),
        pytest.param("tp=4", {}, marks=pytest.mark.release),
        pytest.param("dp=2", {"reshard_after_forward": False}, marks=RELEASE),
    ],
)
def test_a_grid_of_ranks_equals_one_process(
    lab_of_4: Lab, mesh: str, config: dict[str, Any]
) -> None:
    lab_of_4.restart()
    code = cell("gpt").replace("num_heads=2", "num_heads=4")
    run = train(lab_of_4, "single", code, **BOTH)
    losses, weights = global_losses(run), pull_weights(lab_of_4, "single")
    run = train(lab_of_4, "tensor", code, mesh=mesh, config=config, **BOTH)
    np.testing.assert_allclose(global_losses(run), losses, rtol=1e-5)
    found = pull_weights(lab_of_4, "tensor")
    torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)
    assert run.notes == []
    norms = run.history["gradient_norm"].dropna().groupby(run.history["step"])
    assert (norms.nunique() == 1).all()


@pytest.mark.release
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp_replicate=2,tp=2"])
def test_a_penalty_on_layers_of_several_meshes_may_be_added_to_the_loss(
    lab_of_4: Lab, mesh: str
) -> None:
    # Those that are split come first: torch refuses what is on fewer axes after them.
    order = "key=lambda p: -getattr(p, 'device_mesh', p).ndim"
    penalty = f"sum(p.pow(2).sum() for p in sorted(model.parameters(), {order}))"
    loss = "loss_fn(model(x), y)"
    code = cell("gpt").replace("num_heads=2", "num_heads=4")
    assert loss in code
    code = code.replace(loss, f"(1e-3 * {penalty} + {loss})")
    train(lab_of_4, "single", code, **BOTH)
    weights = pull_weights(lab_of_4, "single")
    train(lab_of_4, "tensor", code, mesh=mesh, **BOTH)
    found = pull_weights(lab_of_4, "tensor")
    torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.release
def test_split_layers_in_bf16(lab: Lab) -> None:
    run = train(lab, "single", cell("gpt"), precision="bf16", **BOTH)
    losses, expected = global_losses(run), pull_weights(lab, "single")
    run = train(lab, "tensor", cell("gpt"), precision="bf16", **BOTH)
    np.testing.assert_allclose(global_losses(run), losses, rtol=1e-3)
    weights, initial = pull_weights(lab, "tensor"), reference("gpt", **BOTH).initial
    error = norm_of_all(weights[k] - expected[k] for k in expected)
    assert error < 0.03 * norm_of_all(expected[k] - initial[k] for k in expected)


def test_split_layers_within_a_loops_own_autocast(lab: Lab) -> None:
    code = cell("mlp").replace(
        "model(x)", "torch.autocast(device.type, torch.bfloat16)(model)(x).float()"
    )
    train(lab, "single", code)
    expected = pull_weights(lab, "single")
    run = train(lab, "tensor", code)
    weights, initial = pull_weights(lab, "tensor"), reference("mlp").initial
    error = norm_of_all(weights[k] - expected[k] for k in expected)
    assert error < 0.06 * norm_of_all(expected[k] - initial[k] for k in expected)
    assert run.notes == []


# ---- what is measured ----


@pytest.mark.parametrize(
    "options",
    release_but(
        [
            *({}, {"precision": "bf16"}),
            *({"activation_checkpointing": True}, {"accumulate": 2}),
        ],
        {"accumulate": 2},
    ),
    ids=str,
)
@pytest.mark.long
def test_memory_and_bytes_are_those_of_theory(
    lab: Lab, options: dict[str, Any]
) -> None:
    code = """
from labkit.models import GPT, next_token_loss
ids = torch.randint(0, 256, (24, 65), generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(ids[:, :-1], ids[:, 1:])
model = GPT(context=64, dim=64, num_layers=2)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
for x, y in loader:
    next_token_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    run = train(lab, "tensor", code, **options)
    theory = run.theory
    for part in ("parameters", "gradients", "optimizer_state"):
        measured = run.memory[part].unique()
        np.testing.assert_allclose(measured, theory[part], rtol=0.05)
    sent = run.comm["wire_bytes"].groupby("rank").sum()
    np.testing.assert_allclose(sent, theory["wire_bytes"], rtol=0.05)
    steps, samples = re.findall(r"([\d.,]+) (?:steps|samples)/s", run.status_line())
    # A sample counts once, though both ranks have it.
    assert float(samples.replace(",", "")) == pytest.approx(8 * float(steps), rel=0.01)


# ---- refused ----

FUSED = """
def whole(p):
    return getattr(p, "full_tensor", p.detach)().clone()

from labkit.models import GPT, next_token_loss

class Fused(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x):
        normed = self.block.norm1(x)
        q, k, v = (
            part.unflatten(-1, (-1, 8)).transpose(1, 2)
            for part in self.qkv(normed).chunk(3, dim=-1)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.block.out(attended.transpose(1, 2).flatten(2))
"""


CENTERED = """
import torch.distributed as dist
from torch import nn
class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("center", torch.zeros(4))
    def forward(self, x):
        z = self.second(torch.tanh(self.first(x)))
        with torch.no_grad():
            mean = z.detach().mean(0)
            self.center = 0.5 * self.center + mean
            self.first.bias.mul_(1.1)
        return z - self.center
torch.manual_seed(0)
x = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(x, x.sin()[:, :4])
model = Centered()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
SUMS = """
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8, shuffle=False)
for x, y in loader:
    size = torch.tensor(len(x))
    dist.all_reduce(size, group=loader.group)
    optimizer.param_groups[0]["lr"] = 0.8 / int(size)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SPLIT = {"plan": {"first": "colwise", "second": "rowwise"}}


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_a_sum_over_the_ranks_that_share_a_batch_has_each_sample_once(
    lab: Lab, strategy: str
) -> None:
    """Also a forward pass that changes the model's state: what is compared before the
    first step begins with the same, and leaves it."""
    code = CENTERED.replace("            self.first.bias.mul_(1.1)\n", "") + SUMS
    if strategy == "tensor":
        code = CENTERED + SUMS
    train(lab, "single", code)
    expected = pull_weights(lab, "single")
    options = {"config": SPLIT} if strategy == "tensor" else {}
    run = train(lab, strategy, code, **options)
    torch.testing.assert_close(
        pull_weights(lab, strategy), expected, rtol=1e-5, atol=1e-6
    )
    assert not any("have the same samples" in note for note in run.notes)
    run = train(lab, strategy, code.replace(", group=loader.group", ""), **options)
    assert any(f"under {strategy} 2 ranks have the same" in n for n in run.notes)


def test_a_state_that_begins_with_none_is_compared_from_there(lab: Lab) -> None:
    first = "0.5 * (0.0 if self.center is None else self.center)"
    code = CENTERED.replace("torch.zeros(4)", "None") + SUMS
    code = code.replace("0.5 * self.center", first).replace(
        "return z - self.center",
        "self.calls = getattr(self, 'calls', 0) + 1\n"
        "        return (z - self.center) / self.calls",
    )
    train(lab, "single", code)
    expected = pull_weights(lab, "single")
    train(lab, "tensor", code, config=SPLIT)
    torch.testing.assert_close(
        pull_weights(lab, "tensor"), expected, rtol=1e-5, atol=1e-6
    )


def test_a_model_that_the_loop_compiles_is_compared(lab: Lab) -> None:
    code = """
from labkit.data import digits
from labkit.models import mlp

model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, digits(), batch_size=64)
compiled = torch.compile(model, backend="eager")
for x, y in loader:
    torch.nn.functional.cross_entropy(compiled(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert train(lab, "tensor", code).notes == []


def test_a_collective_in_forward_is_refused(lab: Lab) -> None:
    code = CENTERED.replace(
        "self.center =", "dist.all_reduce(mean)\n            self.center ="
    )
    with pytest.raises(RankError, match=r"collective.*under tensor the ranks"):
        train(lab, "tensor", code + SUMS, config=SPLIT)


def test_a_layer_that_is_called_by_itself_gives_the_whole(lab: Lab) -> None:
    """To its loop, which may have it compute its block by itself, too; a block that
    is checkpointed computes again what it has computed."""
    one = "nn.functional.mse_loss(model(x), y)"
    alone = "hidden = torch.tanh(model.first(x)); (hidden.std() + "
    loops = {
        "its output": f"({one} + model.first(x)[:, 4:9].var())",
        "its block": one.replace("model(x)", "model.second(hidden)") + ")",
        "in a checkpoint": one.replace("model(x)", "checkpoint(model, x)"),
    }
    imports = "from functools import partial\nimport torch.utils.checkpoint\n"
    imports += "checkpoint = partial(torch.utils.checkpoint.checkpoint, "
    imports += "use_reentrant=False)\n"
    for name, loss in loops.items():
        if "hidden" in loss:
            loss = alone + loss
        code = imports + CENTERED.replace("self.first.bias.mul_(1.1)", "pass")
        code += SUMS.replace(one, loss) + "features = model.first(x).detach()\n"
        train(lab, "single", code)
        expected = pull_weights(lab, "single")
        features = lab.pull("features")
        run = train(lab, "tensor", code, config=SPLIT)
        weights = pull_weights(lab, "tensor")
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6, msg=name)
        for each in lab.pull("features", "all"):
            torch.testing.assert_close(each, features, rtol=1e-5, atol=1e-6)
        assert not any("has only a part" in note for note in run.notes)


@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt"])
def test_a_layer_gives_the_whole_after_a_pass_that_was_left(
    lab: Lab, error: str
) -> None:
    """By an error before it began, or by an interrupt in its midst."""
    code = CENTERED.replace("self.first.bias.mul_(1.1)", "pass") + SUMS
    where = "model" if error == "ValueError" else "model.second"
    code += f"""
def leave(module, args):
    raise {error}
hook = {where}.register_forward_pre_hook(leave, prepend=True)
try:
    model(x)
except {error}:
    hook.remove()
features = model.first(x).detach()
"""
    train(lab, "single", code)
    features = lab.pull("features")
    train(lab, "tensor", code, config=SPLIT)
    for each in lab.pull("features", "all"):
        torch.testing.assert_close(each, features, rtol=1e-5, atol=1e-6)


def test_a_fused_layer_that_is_cut_afterwards_is_refused(lab: Lab) -> None:
    # With 2 ranks of 24 columns each, the first rank's thirds are q and a half of k:
    # no error of PyTorch's.
    fused = f"{FUSED}\nmodel.blocks[0] = Fused(model.blocks[0])\noptimizer = torch"
    code = cell("gpt").replace("optimizer = torch", fused)
    plan = {"blocks.0.qkv": "colwise", "blocks.0.block.out": "rowwise"}
    first = "weights = [whole(p) for p in model.parameters()]"
    code = code.replace("for epoch", f"{first}\nfor epoch")
    with pytest.raises(RankError, match="computes something else: its outputs differ"):
        train(lab, "tensor", code, config={"plan": plan})
    # Refused before anything has been trained.
    same = "zip(weights, (whole(p) for p in model.parameters()))"
    assert ask(lab, f"all(bool((a == b).all()) for a, b in {same})") == [True, True]


@pytest.mark.parametrize(
    ("before", "config", "message"),
    [
        (
            "",
            {"plan": {"nothing": "colwise"}},
            "called so; it has tokens, positions",
        ),
        ("", {"plan": {"head": "diagonal"}}, "one of: colwise, rowwise"),
        ("", {"plan": 3}, '"plan" is 3; it must be a dict'),
        (
            "model.blocks[0].head_dim = 16",
            {},
            r"blocks.0.q has 1 head of 16, which 2 ranks cannot share evenly",
        ),
        ("", {"plan": {"norm": "colwise"}}, "splits a LayerNorm, but PyTorch can"),
        ("", {"plans": {}}, "tensor has no 'plans'"),
        ("", {"sequence": 1}, '"sequence" is 1; it must be True or False'),
        (
            "model = GPT(33, context=8, dim=16, num_heads=2, num_layers=2)",
            {},
            "tokens has 33 rows of its table, which 2 ranks cannot share evenly",
        ),
        (
            "model = GPT(32, context=8, dim=24, num_heads=3, num_layers=2)",
            {},
            r"blocks.0.q has 3 heads of 8, which 2 ranks cannot share evenly",
        ),
        (
            "",
            {"plan": {"tokens": "colwise", "head": "colwise_rep"}},
            "are one parameter, and the plan splits them in different ways",
        ),
        (
            "model.blocks[0].up.weight.register_hook(lambda g: g / 2)",
            {},
            "has a hook for its gradient",
        ),
        (
            "model.blocks[0].up.register_forward_hook(lambda m, x, y: None)",
            {},
            "blocks.0.up has a hook, which would see the part",
        ),
        (
            "torch.nn.utils.parametrizations.weight_norm(model.blocks[0].up)",
            {},
            "whose weight is made of others",
        ),
        (
            "model = torch.nn.Sequential(torch.nn.Linear(4, 4))",
            {},
            "Sequential has no plan for how",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(
    lab: Lab, before: str, config: dict[str, Any], message: str
) -> None:
    code = cell("gpt").replace("optimizer = torch", f"{before}\noptimizer = torch", 1)
    with pytest.raises(RankError, match=message):
        train(lab, "tensor", code, config=config)


READ_NOT_CALLED = """
from torch import nn
from torch.nn import functional as F

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.project = nn.Linear(8, 8)

    def forward(self, ids):
        hidden, _ = self.lstm(self.words(ids))
        hidden = self.encoder(hidden, src_key_padding_mask=ids == 0)
        hidden = self.project(hidden).view(*ids.shape, {heads}, 4).flatten(2)
        return F.linear(hidden, self.words.weight)

torch.manual_seed(1)
ids = torch.randint(1, 12, (16, 5))
model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(ids)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8, shuffle=False)
for (x,) in loader:
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    {clip}
    optimizer.step()
    optimizer.zero_grad()
found = model(ids).detach()
"""
FEED_FORWARD = {
    "encoder.layers.*.linear1": "colwise",
    "encoder.layers.*.linear2": "rowwise",
}


def test_a_whole_layer_may_be_read_without_being_called(lab: Lab) -> None:
    """As torch's attention, a tied output layer and an LSTM do."""
    code = READ_NOT_CALLED.format(heads=-1, clip="")
    train(lab, "single", code)
    expected = lab.pull("found")
    run = train(lab, "tensor", code, config={"plan": FEED_FORWARD})
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, expected)
    assert run.notes == []


OF_TRANSFORMERS = """
import torch.nn.functional as F
from types import SimpleNamespace
from torch import nn

class ScaledEmbedding(nn.Embedding):  # Gemma's
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids):
        return super().forward(ids) * self.scale

class Experts(nn.Module):  # Mixtral's: a parameter for all of them
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 8, 12) / 3)
        self.down = nn.Parameter(torch.randn(2, 12, 8) / 3)

    def forward(self, x):
        return (F.relu(x.unsqueeze(-3) @ self.up) @ self.down).mean(-3)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = 4
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.RMSNorm(4)  # Qwen3's, over each head
        self.experts = Experts()
        self.gate, self.out = nn.Linear(8, 8), nn.Linear(8, 8)  # Phi3's

    def forward(self, x):
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, 4) for layer in (self.q, self.k, self.v)
        )
        q, k = self.norm(q).transpose(1, 2), self.norm(k).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v.transpose(1, 2))
        x = x + self.o(a.transpose(1, 2).flatten(2))
        a, b = self.gate(x).chunk(2, -1)
        return x + self.experts(x) + self.out(torch.cat([a * b, b], -1))

class Model(nn.Module):
    config = SimpleNamespace(base_model_tp_plan={"q": "colwise"})
    tp_plan = {
        "tokens": "embedding_rowwise",
        "block.q": "colwise", "block.k": "colwise", "block.v": "colwise",
        "block.norm": "replicated_with_grad_allreduce", "block.o": "rowwise",
        "block.experts.up": "packed_colwise", "block.experts.down": "rowwise",
        "block.experts": "moe_tp_experts",
        "block.mlp.up": "colwise",
        "block.gate": "colwise_gather_output", "block.out": "rowwise_split_input",
    }

    def __init__(self):
        super().__init__()
        self.tokens, self.block = ScaledEmbedding(12, 8), Block()
        self.out = nn.Linear(8, 12)
        self.temperature = nn.Parameter(torch.tensor(1.5))  # CLIP's

    def forward(self, ids):
        return self.out(self.block(self.tokens(ids))) * self.temperature

torch.manual_seed(1)
ids = torch.randint(1, 12, (16, 5))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(ids)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8, shuffle=False)
for (x,) in loader:
    F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
found = model(ids).detach()
"""


def test_plans_of_transformers_are_understood(lab: Lab) -> None:
    train(lab, "single", OF_TRANSFORMERS)
    expected = lab.pull("found")
    run = train(lab, "tensor", OF_TRANSFORMERS)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, expected)
    [note] = run.notes
    assert "splits the experts of its layers (block.experts.up)" in note
    # A plan of the user's own has to name layers.
    plan = {"plan": {"block.experts.up": "colwise"}}
    with pytest.raises(RankError, match="no layer of Model is called so"):
        train(lab, "tensor", OF_TRANSFORMERS, config=plan)


OF_PEFT = """
import torch.nn.functional as F
from torch import nn

class Adapted(nn.Module):  # lora.Linear
    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        low = nn.Linear(layer.in_features, 2, bias=False)
        self.lora_A = nn.ModuleDict({"default": low})
        high = nn.Linear(2, layer.out_features, bias=False)
        self.lora_B = nn.ModuleDict({"default": high})

    def forward(self, x):
        low = self.lora_A["default"](x)
        return self.base_layer(x) + 2 * self.lora_B["default"](low)

class Block(nn.Module):
    tp_plan = {"*.up": "colwise", "*.down": "rowwise", "head": "colwise_rep"}

    def __init__(self):
        super().__init__()
        self.first = nn.Module()
        self.first.up, self.first.down = Adapted(nn.Linear(4, 8)), nn.Linear(8, 4)
        self.second = nn.Module()
        self.second.up, self.second.down = nn.Linear(4, 8), Adapted(nn.Linear(8, 4))
        self.head = Adapted(nn.Linear(4, 6))

    def forward(self, x):
        x = x + self.first.down(self.first.up(x).relu())
        return self.head(x + self.second.down(self.second.up(x).relu()))

class Peft(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = Block()
        self.tp_plan = Block.tp_plan  # its attributes are those of the model within it

    def forward(self, x):
        return self.base_model.model(x)

torch.manual_seed(1)
x, y = torch.randn(16, 4), torch.randint(6, (16,))
model = Peft()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(x, y)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8, shuffle=False)
parts = {n for n, p in model.named_parameters() if hasattr(p, "placements")}
for a, b in loader:
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
    optimizer.zero_grad()
found = model(x).detach()
"""


def test_the_plan_of_a_model_within_adapters_is_found(lab: Lab) -> None:
    train(lab, "single", OF_PEFT)
    expected = lab.pull("found")
    train(lab, "tensor", OF_PEFT)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, expected)
    parts = {name.removeprefix("base_model.model.") for name in lab.pull("parts")}
    assert parts >= {
        *("first.up.base_layer.weight", "first.up.lora_B.default.weight"),
        *("second.down.base_layer.weight", "second.down.lora_A.default.weight"),
        *("first.down.weight", "second.up.weight", "head.base_layer.weight"),
    }
    assert not parts & {"first.up.lora_A.default.weight", "head.lora_B.default.weight"}


@pytest.mark.parametrize(
    ("heads", "clip", "plan", "message"),
    [
        (2, "", {"project": "colwise"}, "invalid for input.* Let view infer the num"),
        (-1, "", {"encoder.layers.0.linear2": "rowwise"}, "fails, and the whole one"),
        (
            -1,
            "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            FEED_FORWARD,
            "write --clip NORM on the magic line",
        ),
    ],
)
@pytest.mark.long
def test_what_a_loop_does_with_parts_is_refused(
    lab: Lab, heads: int, clip: str, plan: dict[str, str], message: str
) -> None:
    code = READ_NOT_CALLED.format(heads=heads, clip=clip)
    with pytest.raises(RankError, match=message):
        train(lab, "tensor", code, config={"plan": plan})


def test_a_split_layer_that_the_loop_replaces_is_refused(lab: Lab) -> None:
    """Also once the split model has been compared with the whole one."""
    code = """
import torch
from labkit.models import mlp
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(32, 64)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
for number, x in enumerate(loader):
    if number == 2:
        model[-1] = torch.nn.Linear(model[-1].in_features, 10)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    with pytest.raises(RankError, match=r"3\.weight was replaced since prepare"):
        train(lab, "tensor", code)


def test_ranks_with_parts_of_a_model_have_the_same_inputs(lab: Lab) -> None:
    code = cell("gpt").replace("model(x)", "model((x + rank) % 32)")
    with pytest.raises(RankError, match="give it different inputs"):
        train(lab, "tensor", code)


def test_a_parameter_with_a_part_of_its_gradient_is_refused(lab: Lab) -> None:
    code = """
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.down(self.scale * self.up(x))

data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 8))
model = Scaled()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
before = model.down.weight.full_tensor()
for x, y in loader:
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""
    plan = {"up": "colwise", "down": "rowwise"}
    with pytest.raises(RankError, match="scale is whole on every rank, and its grad"):
        train(lab, "tensor", code, config={"plan": plan})
    same = "bool((before == model.down.weight.full_tensor()).all())"
    assert ask(lab, same) == [True, True]


def test_a_refused_plan_leaves_the_model_as_it_was(lab: Lab) -> None:
    plan = {"tokens": "colwise", "head": "colwise_rep"}
    # Each rank has made its model, or the refusal of the other may end its cell before.
    made = "dist.barrier()\nmodel, optimizer, loader = prepare("
    code = cell("gpt").replace("model, optimizer, loader = prepare(", made)
    with pytest.raises(RankError, match="in different ways"):
        train(lab, "tensor", code, config={"plan": plan})
    assert ask(lab, "{type(p).__name__ for p in model.parameters()}") == [
        {"Parameter"},
        {"Parameter"},
    ]


SPLIT_LOGITS = {"plan": {"tokens": "embedding_rowwise", "head": "colwise_rep"}}


def test_a_loss_whose_gradient_loss_parallel_has_not_is_refused(lab: Lab) -> None:
    """Without a word torch would take the gradient of the penalty for that of the
    logits."""
    code = cell("gpt").replace(
        "loss_fn(model(x), y)", "loss_fn(model(x), y) + penalty(model(x))"
    )
    penalty = """
def penalty(logits):
    logs = torch.nn.functional.log_softmax(logits, -1)
    return (logs.exp() * logs).sum(-1).mean()
"""
    config = {**SPLIT_LOGITS, "loss_parallel": True}
    with pytest.raises(RankError, match="loss_parallel has no gradient for that"):
        train(lab, "tensor", penalty + code, config=config)


def test_several_models_have_split_logits(lab: Lab) -> None:
    code = f"for _ in range(2):\n{textwrap.indent(cell('gpt'), '    ')}"
    config = {**SPLIT_LOGITS, "loss_parallel": True}
    assert train(lab, "tensor", code, config=config).state == "finished"


def test_a_refused_model_leaves_no_loss_behind(lab: Lab) -> None:
    code = cell("gpt").replace(
        "torch.optim.SGD", "type('Lamb', (torch.optim.SGD,), {})"
    )
    with pytest.raises(RankError, match="Lamb computes its update from a whole"):
        train(lab, "tensor", code, config={**SPLIT_LOGITS, "loss_parallel": True})
    lab.run("""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
mesh = init_device_mesh(device.type, (world_size,))
whole = distribute_tensor(torch.ones(2, 4), mesh, [Replicate()])
torch.nn.functional.log_softmax(whole, -1)
""")


def test_a_model_that_is_called_by_parts_is_noted(lab: Lab) -> None:
    code = cell("mlp").replace("model(x)", "model.forward(x)")
    run = train(lab, "tensor", code)
    assert_equals_reference(lab, run, reference("mlp"))
    assert [n for n in run.notes if "was not compared with what the whole model" in n]


# ---- a checkpoint across grids ----


@pytest.mark.release
@pytest.mark.timeout(180)
def test_checkpoints_load_across_grids(lab: Lab, lab_of_4: Lab, tmp_path: Path) -> None:
    lab_of_4.restart()
    code = cell("gpt", "adamw").replace("range(epochs)", "range(EPOCHS)")
    save = "\nsave_checkpoint({!r})"
    load = "load_checkpoint({!r})"

    def more(here: Lab, strategy: str, source: str, target: str, **options: Any) -> Any:
        """The losses of one more epoch, from one checkpoint to another."""
        text = code.replace("EPOCHS", "1").replace(
            "for epoch",
            (load.format(str(tmp_path / source)) if source else "") + "\nfor epoch",
            1,
        )
        text += save.format(str(tmp_path / target))
        return global_losses(train(here, strategy, text, **options))

    both = code.replace("EPOCHS", "5")
    expected = global_losses(train(lab, "single", both)).reshape(5, -1)
    found = [
        more(lab_of_4, "fsdp", "", "a"),
        more(lab_of_4, "tensor", "a", "b", mesh="dp=2,tp=2"),
        more(lab, "tensor", "b", "c"),
        more(lab, "single", "c", "d"),
        more(lab_of_4, "tensor", "d", "e", mesh="dp_replicate=2,tp=2"),
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
