"""A model that only fits sharded is set up in parts, and begins as in one process."""

import functools
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from marks import release_but
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit import checkpoint
from labkit.estimate import estimate
from labkit.estimate import forecast
from labkit.models import GPT
from labkit.notebook.plots.estimate_plot import Forecast
from labkit.strategies.model.materialize import parts
from labkit.strategies.prepared import units

STRATEGIES = ["single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]
SHARDED = ["zero3", "fsdp", "hsdp"]

# Constructors that do no more than reset_parameters: attention has its own name for it.
MODEL = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(8, 12)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.norm = torch.nn.BatchNorm1d(12)
        self.head = torch.nn.Linear(12, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=1)))

random = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(
    torch.randn(20, 4, 8, generator=random), torch.randn(20, 3, generator=random)
)
with torch.device(built_on):
    model = Net()
model.blocks[0].linear1.requires_grad_(False)
"""
# The first block's weight is the last one's, too.
TIED = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))

random = torch.Generator().manual_seed(1)
points = torch.randn(20, 8, generator=random)
data = torch.utils.data.TensorDataset(points, points.cos())
with torch.device(built_on):
    model = torch.nn.Sequential(Layer(), Layer(), Layer())
model[2].linear.weight = model[0].linear.weight
"""
PREPARE = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8, shuffle=False)
"""
LOOP = """
for epoch in range(2):
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
# Its bytes are in the blocks; one of them is a quarter.
LARGE = """
from labkit.models import GPT
with torch.device(built_on):
    model = GPT(32, context=8, dim=128, num_heads=2, num_layers=4)
"""
# The most bytes that tensors hold at a time, those of the model included.
PEAK = """
import weakref
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

class Peak(TorchDispatchMode):
    def __init__(self, model):
        super().__init__()
        self.alive, self.peak = {}, 0
        self.see([*model.parameters(), *model.buffers()])

    def see(self, tensors):
        for tensor in tensors:
            if isinstance(tensor, DTensor):  # its local tensor is what holds memory
                continue
            storage = tensor.untyped_storage()
            if storage.device.type != "meta" and storage._cdata not in self.alive:
                key = storage._cdata
                gone = weakref.ref(storage, lambda _, key=key: self.alive.pop(key))
                self.alive[key] = gone, storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.see(t for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out
"""


def cell(setup: str, *more: str, built_on: str = "meta") -> str:
    return "\n".join([f"built_on = {built_on!r}", setup, *map(textwrap.dedent, more)])


def train(lab: Lab, strategy: str, code: str, **options: Any) -> Any:
    return lab.train(strategy, code, live=False, timeout=60, **options)


def weights(lab: Lab, strategy: str) -> dict[str, torch.Tensor]:
    if strategy == "single":
        lab.run("found = model.state_dict()", ranks=0)
        return lab.pull("found")
    return lab.pull("model", full=True)


@functools.cache
def reference(setup: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the plain loop on a model that was built on the CPU."""
    names: dict[str, Any] = {"torch": torch, "built_on": "cpu"}
    torch.manual_seed(0)
    exec(setup, names)
    model, data, losses = names["model"], names["data"], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for first in range(0, 20, 8):
            x, y = data[first : min(first + 8, 20)]
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model.state_dict()


def assert_equals_reference(lab: Lab, run: Any, setup: str) -> None:
    losses, expected = reference(setup)
    rows = run.history.dropna(subset=["loss"])
    total = (rows["loss"] * rows["samples"]).groupby(rows["step"]).sum()
    found = total / rows["samples"].groupby(rows["step"]).sum()
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    found = weights(lab, run.strategy)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---- the same as one process ----


@pytest.mark.parametrize("strategy", release_but(STRATEGIES, "zero3", "fsdp"))
@pytest.mark.long
def test_a_model_from_meta_trains_as_one_built_on_the_cpu(
    lab: Lab, strategy: str
) -> None:
    code = cell(MODEL, PREPARE, LOOP)
    run = train(lab, strategy, code, sync_batchnorm=True)
    assert_equals_reference(lab, run, MODEL)
    assert [note for note in run.notes if "is built on the meta device" in note]


@pytest.mark.parametrize("strategy", release_but(SHARDED, "fsdp"))
@pytest.mark.parametrize("built_on", ["cpu", "meta"])
def test_blocks_that_share_a_parameter_are_sharded_together(
    lab: Lab, strategy: str, built_on: str
) -> None:
    if built_on == "meta":  # the last of the two that share it gives it its values
        run = train(lab, "single", cell(TIED, PREPARE, LOOP))
        expected = weights(lab, "single")
        run = train(lab, strategy, cell(TIED, PREPARE, LOOP))
        torch.testing.assert_close(weights(lab, strategy), expected)
    else:
        run = train(lab, strategy, cell(TIED, PREPARE, LOOP, built_on="cpu"))
        assert_equals_reference(lab, run, TIED)


@pytest.mark.parametrize("strategy", release_but(["zero2", *SHARDED], "zero2", "fsdp"))
def test_the_values_of_rank_0_count(lab: Lab, strategy: str) -> None:
    before = """
    with torch.no_grad():
        for tensor in [*model.parameters(), model.norm.running_mean]:
            tensor += rank
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    """
    train(lab, strategy, cell(MODEL, before, PREPARE, built_on="cpu"))
    torch.testing.assert_close(lab.pull("model", full=True), lab.pull("first", ranks=0))
    lab.run("mean = model.norm.running_mean")
    torch.testing.assert_close(*lab.pull("mean", ranks="0,1"))


@pytest.mark.parametrize(
    "strategy", release_but(["zero1", "zero2", "zero3", "fsdp"], "zero1")
)
def test_the_copy_that_is_updated_has_all_digits_of_the_model(
    lab: Lab, strategy: str, tmp_path: Path
) -> None:
    code = cell(MODEL, PREPARE, f"save_checkpoint({str(tmp_path / 'first')!r})")
    train(lab, strategy, code, precision="bf16")
    names: dict[str, Any] = {"torch": torch, "built_on": "cpu"}
    torch.manual_seed(0)
    exec(MODEL, names)
    expected = dict(names["model"].named_parameters())
    saved = checkpoint.Checkpoint(tmp_path / "first")
    found = {name: torch.empty_like(p) for name, p in expected.items()}
    saved.fill({f"model.{name}": tensor for name, tensor in found.items()})
    for name, parameter in expected.items():
        if parameter.requires_grad:
            assert torch.equal(found[name], parameter), name


def test_two_models_from_meta_begin_with_other_values(lab: Lab) -> None:
    code = """
    models = []
    for _ in range(2):
        with torch.device("meta"):
            model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.zeros(4, 4))
        model, _, _ = prepare(model, optimizer, data, batch_size=4)
        models.append(model.weight.detach())
    is_same = torch.equal(*models)
    """
    train(lab, "single", textwrap.dedent(code))
    assert lab.pull("is_same", ranks=0) is False


def test_a_module_that_sets_what_is_in_a_block_has_its_way() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.blocks[0].weight)

    with torch.device("meta"):
        model = Model()
    found = [part for part, _ in parts(model, units(model))]
    assert found == [model.blocks[1], model.blocks[0], model]
    assert model.blocks[0].weight.eq(1).all()


def test_a_unit_comes_after_those_in_it_and_has_none_of_their_tensors() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.network[0].weight)

    with torch.device("meta"):
        model = Model()
    network = model.network
    found = [
        (part, [tuple(tensor.shape) for tensor in tensors])
        for part, tensors in parts(model, [*network, network])
    ]
    assert found == [
        (network[1], [(3, 2), (3,)]),
        (network[0], [(2, 2), (2,)]),
        (network, []),
        (model, []),
    ]


def test_what_is_on_the_cpu_already_keeps_its_values() -> None:
    trained = nn.Linear(2, 2)
    before = trained.weight.detach().clone()
    model = nn.Sequential(trained, nn.Linear(2, 2, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    *_, (whole, _) = parts(model)
    assert torch.equal(trained.weight, before)
    assert not any(p.isnan().any() for p in whole.parameters())
    assert [*map(id, optimizer.param_groups[0]["params"])] == [
        *map(id, model.parameters())
    ]


# ---- no rank holds the whole ----


@pytest.mark.parametrize("strategy", release_but(["fsdp", "zero3"], "fsdp"))
def test_a_rank_holds_its_shards_and_one_block(lab: Lab, strategy: str) -> None:
    # In DeepSpeed the partitions are copied afterwards, for the optimizer.
    placing = """
    from labkit.strategies.zero import engines, setup
    from labkit.strategies.mesh.peers import Peers
    peers = Peers(rank, world_size, device)
    deepspeed = engines.import_deepspeed(device)
    with engines.quiet():
        engines.agree_on_ids(peers)
        config = {"train_batch_size": world_size, "zero_optimization": {"stage": 3}}
        partitioner = setup.build_partitioner(deepspeed, config, None)
        with Peak(model) as measured:
            setup.place(model, torch.float32, peers, partitioner)
    """
    preparing = """
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.zeros(4, 8, dtype=torch.int64))
    with Peak(model) as measured:
        prepare(model, optimizer, data, batch_size=4)
    """
    found = {}
    for built_on in ("cpu", "meta"):
        then = "peak = measured.peak"
        if strategy == "zero3":
            lab.run(cell(LARGE, PEAK, placing, then, built_on=built_on))
        else:
            code = cell(LARGE, PEAK, preparing, then, built_on=built_on)
            train(lab, strategy, code)
        found[built_on] = lab.pull("peak", ranks=0)
    with torch.device("meta"):
        model = GPT(32, context=8, dim=128, num_heads=2, num_layers=4)
    whole = sum(p.nbytes for p in model.parameters())
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    rest = whole - 4 * block
    # Host and device are the same here. What is on the CPU goes as its shards come...
    assert found["cpu"] < whole + 0.6 * block + rest
    # ... and of what is on the meta device no more than a block is ever there.
    assert found["meta"] < whole / 2 + block + rest
    table = estimate(
        model,
        torch.zeros(4, 8, dtype=torch.int64),
        world_sizes=[2],
        batch_size=4,
    )
    predicted = table.loc[(2, strategy), "setup_peak"]
    if strategy == "fsdp":
        assert found["meta"] == pytest.approx(predicted, rel=0.05)


# ---- what has no values ----

NO_RESET = """
class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.factor

points = torch.linspace(-1, 1, 20 * 8).view(20, 8)
data = torch.utils.data.TensorDataset(points, points.cos())
with torch.device(built_on):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Scale())
"""


@pytest.mark.parametrize("strategy", release_but(["single", "zero2", *SHARDED], "fsdp"))
def test_what_nothing_sets_is_refused_or_loaded(
    lab: Lab, strategy: str, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=r"nothing gives 1\.factor its values.*") as e:
        train(lab, strategy, cell(NO_RESET, PREPARE, LOOP))
    assert "give Scale a method reset_parameters() that sets factor" in str(e.value)
    assert "load_checkpoint(folder) before the first batch" in str(e.value)
    folder = repr(str(tmp_path / "saved"))
    save = f"save_checkpoint({folder})"
    train(lab, "ddp", cell(NO_RESET, PREPARE, LOOP, save, built_on="cpu"))
    expected = weights(lab, "ddp")
    load = f"load_checkpoint({folder})"
    train(lab, strategy, cell(NO_RESET, PREPARE, load, "model(points[:4])"))
    torch.testing.assert_close(weights(lab, strategy), expected)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "model[1].register_buffer('scale', torch.ones(8, device='meta'), False)",
            r"nothing gives 1\.scale its values; give Linear a method reset_parameters",
        ),
        (
            "model[1].register_buffer('mask', torch.ones(8, device='meta') > 0)",
            r"nothing gives 1\.mask its values",
        ),
        (
            "optimizer = torch.optim.Adagrad(model.parameters())",
            "Adagrad made its state from parameters on the meta device",
        ),
    ],
)
def test_what_nothing_can_set_is_refused_before_anything_has_changed(
    lab: Lab, code: str, message: str
) -> None:
    setup = """
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    data = torch.utils.data.TensorDataset(torch.zeros(4, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    """
    prepare = "prepare(model, optimizer, data, batch_size=4)"
    with pytest.raises(RankError, match=message) as error:
        train(lab, "fsdp", "\n".join([textwrap.dedent(setup), code, prepare]))
    assert "UnsupportedLoopError" in str(error.value)
    lab.run("is_meta = all(p.is_meta for p in model.parameters())")
    assert lab.pull("is_meta", ranks=0)


# ---- the forecast ----


@pytest.mark.release
def test_the_forecast_says_when_set_up_is_what_does_not_fit() -> None:
    class Model(nn.Module):
        """A large table that is not trained, and a small block."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50_000, 64).requires_grad_(False)
            self.blocks = nn.ModuleList([nn.Linear(64, 4)])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](self.table(ids))

    with torch.device("meta"):
        model = Model()

    def found(mib: float) -> tuple[Any, str]:
        return forecast(
            model,
            world_sizes=[8],
            device_bytes=mib * 2**20,
            batch_size=8,
            sequence=4,
            precision="bf16",
            optimizer="SGD",
        )

    table, _ = found(1000)
    step, setup = table.loc[(8, "fsdp"), ["total_peak", "setup_peak"]] / 2**20
    whole = 4 * 50_000 * 64 / 2**20
    assert setup == pytest.approx(whole * 9 / 8, rel=0.01)
    assert step < setup
    table, sentence = found((step + setup) / 2)
    assert not table.loc[(8, "fsdp"), "fits"]
    assert "A step under" in sentence
    assert "fsdp and hsdp would fit, but prepare needs up to" in sentence
    shown = Forecast(table, sentence, 2**30).formatted()
    assert "in prepare" in shown
    with torch.device("meta"):
        ordinary = GPT(64, context=8, dim=16, num_heads=2, num_layers=2)
    table, sentence = forecast(
        ordinary, world_sizes=[2], device_bytes=2**30, batch_size=4, sequence=8
    )
    assert "in prepare" not in Forecast(table, sentence, 2**30).formatted()
