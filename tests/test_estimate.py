"""What is predicted before a run is what the run then measures."""

import functools
import textwrap
from collections import UserDict
from collections.abc import Iterator
from typing import Any
from typing import ClassVar

import pandas as pd
import pytest
import torch
from marks import in_suites
from marks import release_but
from torch import nn

from labkit import Lab
from labkit.estimate import STRATEGIES
from labkit.estimate import estimate
from labkit.estimate import forecast
from labkit.estimate.techniques.tensor import split
from labkit.estimate.trace import UntraceableError
from labkit.models import GPT
from labkit.models import ResNet
from labkit.models import mlp
from labkit.notebook.plots.estimate_plot import Forecast
from labkit.notebook.plots.figure import RunFigure
from labkit.strategies import find_strategy
from labkit.strategies.tensor.split import checked_plan

STATES = ["parameters", "gradients", "optimizer_state", "master_parameters"]

# Each as code for the ranks, and here: a model, one sample's shape, the global batch.
SETUPS = {
    "mlp": """
        from labkit.data import digits
        from labkit.models import mlp
        images, labels = digits().tensors
        data = torch.utils.data.TensorDataset(images[:192], labels[:192])
        model = mlp(num_hidden=16384)
        loss_fn = torch.nn.functional.cross_entropy
        batch_size = 64
        """,
    "resnet": """
        from labkit.data import digits
        from labkit.models import ResNet
        images, labels = digits().tensors
        data = torch.utils.data.TensorDataset(images[:192], labels[:192])
        model = ResNet(width=32)
        loss_fn = torch.nn.functional.cross_entropy
        batch_size = 64
        """,
    "gpt": """
        from labkit.models import GPT, next_token_loss
        ids = torch.randint(0, 256, (48, 65))
        data = torch.utils.data.TensorDataset(ids[:, :-1], ids[:, 1:])
        model = GPT(256, context=64, dim=192, num_heads=4, num_layers=4)
        loss_fn = next_token_loss
        batch_size = 16
        """,
}
TRAINING = """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fit(model, data, loss_fn, optimizer=optimizer, batch_size=batch_size, shuffle=False)
    """
WHOLE_LAYERS = [name for name in STRATEGIES if find_strategy(name).divide is None]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "checkpointed": {"activation_checkpointing": True},
    "bf16": {"precision": "bf16"},
    "both": {"precision": "bf16", "activation_checkpointing": True},
}


@pytest.fixture(scope="module")
def lab_of_4() -> Iterator[Lab]:
    with Lab(num_ranks=4, group_timeout_s=30) as lab:
        yield lab


@functools.cache
def predicted(setup: str, options: str, world_size: int) -> pd.DataFrame:
    names: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(SETUPS[setup]), names)
    sample, _ = names["data"][0]
    table = estimate(
        names["model"],
        sample[None],
        world_sizes=[world_size],
        batch_size=names["batch_size"],
        **OPTIONS[options],
    )
    return table.loc[world_size]


def run_and_compare(
    lab: Lab, setup: str, strategy: str, options: str, mesh: str | None = None
) -> None:
    row = f"{strategy} --mesh {mesh}" if mesh else strategy
    found = predicted(setup, options, lab.world_size).loc[row]
    code = textwrap.dedent(SETUPS[setup]) + textwrap.dedent(TRAINING)
    run = lab.train(strategy, code, live=False, mesh=mesh, **OPTIONS[options])
    measured = run.memory.max()
    for component in STATES:
        assert found[component] == pytest.approx(measured[component], rel=0.05, abs=99)
        if strategy == "tensor":
            assert run.theory[component] == pytest.approx(found[component], rel=0.05)
    assert found["total_peak"] == pytest.approx(measured["total_peak"], rel=0.15)


@pytest.mark.parametrize("strategy", in_suites(WHOLE_LAYERS, test=["fsdp"]))
@pytest.mark.parametrize("setup", release_but(SETUPS, "resnet"))
def test_memory_is_as_predicted(lab: Lab, setup: str, strategy: str) -> None:
    run_and_compare(lab, setup, strategy, "plain")


@pytest.mark.parametrize(
    "strategy",
    in_suites(["ddp", "zero2", "fsdp", "pipeline"], long=["fsdp"]),
)
@pytest.mark.parametrize(
    "options", release_but(["accumulated", "checkpointed"], "checkpointed")
)
def test_memory_with_options_is_as_predicted(
    lab: Lab, options: str, strategy: str
) -> None:
    run_and_compare(lab, "gpt", strategy, options)


@pytest.mark.parametrize("options", in_suites(OPTIONS, long=["plain"]))
@pytest.mark.parametrize("setup", in_suites(["mlp", "gpt"], long=["gpt"]))
def test_memory_of_split_layers_is_as_predicted(
    lab: Lab, setup: str, options: str
) -> None:
    run_and_compare(lab, setup, "tensor", options)


@pytest.mark.release
@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", in_suites(OPTIONS, test=[]))
@pytest.mark.parametrize("setup", in_suites(["mlp", "gpt"], test=["gpt"]))
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_memory_of_a_grid_is_as_predicted(
    lab_of_4: Lab, setup: str, options: str, axis: str
) -> None:
    strategy = {"tp": "tensor", "pp": "pipeline"}[axis]
    run_and_compare(lab_of_4, setup, strategy, options, mesh=f"dp=2,{axis}=2")


@pytest.mark.parametrize("num_parts", in_suites([1, 2, 4], test=[2]))
@pytest.mark.parametrize("plan", ["layers", "sequence"])
@pytest.mark.long
def test_activations_of_split_layers_are_as_in_the_paper(
    plan: str, num_parts: int
) -> None:
    """In elements, for batch x sequence x dim: 5 inputs of layers that are whole in the
    residual stream (two of norms, two that norms give, which with the mask of dropout
    are the paper's 10 bytes in bf16), and 12 in split layers (its 24 bytes / t). There
    is no dropout here, and no matrix of attention is kept. Under sequence parallelism
    PyTorch keeps what norms give as it was gathered.

    Source: Korthikanti et al. 2022, sections 4.1 to 4.2.2.
    """
    dim, batch, sequence = 64, 2, 32

    def activations(num_layers: int) -> float:
        with torch.device("meta"):
            model = GPT(64, context=32, dim=dim, num_heads=4, num_layers=num_layers)
        config = {"sequence": plan == "sequence"}
        part = split(model, checked_plan(model, num_parts, config), num_parts)
        table = estimate(
            part,
            torch.empty(batch, sequence, dtype=torch.int64, device="meta"),
            world_sizes=[1],
            batch_size=batch,
        )
        return float(table.loc[(1, "single"), "activations_peak"])

    found = (activations(3) - activations(2)) / (4 * batch * sequence * dim)
    whole, split_up = (2, 14) if plan == "sequence" else (4, 12)
    assert found == pytest.approx(whole + split_up / num_parts, rel=0.05)


@pytest.mark.release
def test_a_grid_has_a_row_where_layers_can_be_split_so() -> None:
    model = GPT(256, context=64, dim=192, num_heads=4, num_layers=2)
    options = {"world_sizes": [2, 8], "batch_size": 16, "sequence": 64}
    table, says = forecast(model, device_bytes=2**30, **options)  # type: ignore[arg-type]
    rows = [name for name in table.loc[8].index if name.startswith("tensor")]
    assert rows == ["tensor --mesh dp=4,tp=2", "tensor --mesh dp=2,tp=4"]
    assert "tensor" in table.loc[2].index
    reason = "layer blocks.0.q has 4 heads of 48, which 8 ranks cannot share evenly"
    assert f"tensor is left out on 8 ranks: {reason}. " in says
    assert says.endswith(
        "pipeline is left out on 8 ranks: pipeline has 8 stages, and this model can be "
        "cut into 6 layers at most (tokens, positions, blocks.0, blocks.1, ...)."
    )
    assert {"pipeline", "pipeline --mesh dp=2,pp=4"} <= {
        *table.loc[8].index,
        *table.loc[2].index,
    }
    states = table[STATES].sum(axis=1)
    assert states[(8, rows[0])] == pytest.approx(states[(2, "tensor")] / 4, rel=0.01)
    # On 2 ranks the whole batch, on the grid a quarter of it.
    activations = table["activations_peak"]
    assert activations[(8, rows[0])] == pytest.approx(
        activations[(2, "tensor")] / 4, rel=0.01
    )
    enough = float(table.loc[(8, rows[1])]["total_peak"])
    options["world_sizes"] = [8]
    says = forecast(model, device_bytes=enough, **options)[1]  # type: ignore[arg-type]
    assert "tensor --mesh dp=4,tp=2 or dp=2,tp=4 fit. " in says
    _, says = forecast(ResNet(), torch.zeros(4, 1, 8, 8), **limits(2))
    assert "ResNet has no plan for how to split its layers." in says


def limits(*world_sizes: int) -> dict[str, Any]:
    return {"world_sizes": world_sizes, "device_bytes": 2**30}


class WholeHeads(nn.Module):
    """Its plan is not of what its forward does."""

    tp_plan: ClassVar[dict[str, str]] = {"up": "colwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).reshape(-1, 8)


def test_a_part_that_cannot_run_is_left_out() -> None:
    table, says = forecast(WholeHeads(), torch.zeros(3, 8), **limits(2))
    assert (table["activations_peak"] > 0).all()
    assert "tensor is left out on 2 ranks: a step without data, on input of" in says


@pytest.mark.release
def test_nothing_is_allocated_and_the_model_is_not_changed() -> None:
    with torch.device("meta"):
        model = GPT(50257, context=64, dim=4096, num_heads=32, num_layers=2)
    before = {name: id(p) for name, p in model.named_parameters()}
    ids = torch.empty(1, 64, dtype=torch.int64, device="meta")
    table = estimate(model, ids, world_sizes=[8, 512], batch_size=512)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    fsdp = table.xs("fsdp", level="strategy")
    assert fsdp.loc[512, "optimizer_state"] == pytest.approx(
        fsdp.loc[8, "optimizer_state"] / 64, rel=0.01
    )


class StandsFor(torch.optim.Optimizer):
    """An optimizer as `prepare` returns it, of a class that makes no other."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self.defaults = inner.defaults

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._inner)


def test_optimizers_class_and_defaults_count() -> None:
    model = mlp(num_hidden=4096)
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.zeros(8, 64)
    states = {}
    for name, optimizer in {
        "plain": torch.optim.SGD,
        "momentum": momentum,
        "prepared": StandsFor(momentum),
        "adam": None,
    }.items():
        table = estimate(model, x, optimizer=optimizer, world_sizes=[2], batch_size=8)
        states[name] = table.loc[(2, "ddp"), "optimizer_state"]
    weights = sum(4 * p.numel() for p in model.parameters())
    assert states["plain"] == 0
    assert states["momentum"] == states["prepared"] == weights
    assert states["adam"] == pytest.approx(2 * weights, abs=99)


@pytest.mark.release
def test_the_sentence_says_what_fits_and_what_would() -> None:
    model = GPT(256, context=64, dim=192, num_heads=8, num_layers=4)

    def said(mib: float, **options: object) -> str:
        return forecast(
            model,
            world_sizes=[2, 8],
            device_bytes=mib * 2**20,
            batch_size=16,
            sequence=64,
            **options,  # type: ignore[arg-type]
        )[1]

    assert said(100) == "On 2 ranks of 100 MiB every strategy fits."
    some = said(48)
    fitting = "zero1, zero2, zero3, fsdp, tensor and pipeline"
    assert some.startswith(f"On 2 ranks of 48 MiB {fitting} fit. ")
    assert (
        "With --activation-checkpointing ddp, hsdp and parameter_server would" in some
    )
    none = said(1)
    assert "nothing fits: " in none
    left = "more ranks (--ranks), a smaller batch and --precision bf16"
    assert none.endswith(f"Left to try: {left}.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "the model is of type int; an estimate needs a torch.nn.Module"),
        ({"model": mlp}, r"torch.nn.Module: give what mlp makes, as in model = mlp"),
        ({"batch_size": 0}, "batch size is 0"),
        ({"model": nn.LazyLinear(3)}, "lazy layers"),
        ({"x": torch.tensor(1.0)}, "first dimension is the batch"),
        (
            {"sequence": 8, "world_sizes": [0]},
            "a world size is 0; it must be a whole number, 1 or more",
        ),
        ({"sequence": 8, "precision": "fp8"}, "choose one of: fp32, bf16, fp16"),
        ({"sequence": 8, "optimizer": "Foo"}, "--optimizer Foo: .*AdamW"),
        ({"model": nn.Flatten(), "x": torch.zeros(2, 2)}, "requires a gradient"),
        (
            {"sequence": 8, "device": "xpu"},  # torch would end the process
            "unknown device 'xpu'; choose one of: cpu, cuda",
        ),
    ],
)
def test_what_cannot_be_estimated_says_what_to_do(
    arguments: dict[str, object], message: str
) -> None:
    given = {
        "model": GPT(64, context=8, dim=16, num_heads=2, num_layers=1),
        "world_sizes": [2],
        "device_bytes": 2**30,
        "batch_size": 4,
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        forecast(given.pop("model"), given.pop("x", None), **given)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU here")
def test_a_step_for_a_gpu_is_refused_where_none_is_visible() -> None:
    model, x = nn.Linear(4, 4), torch.zeros(8, 4)
    refused = "device is 'cuda', but torch .* sees no GPU here.*pass device=\"cpu\""
    with pytest.raises(UntraceableError, match=refused) as error:
        estimate(model, x, world_sizes=[2], device="cuda")
    assert "--input" not in str(error.value)
    table, says = forecast(model, x, world_sizes=[2], device="cuda", device_bytes=2**30)
    assert f"Activations are not included: {error.value}." in says
    assert table["activations_peak"].isna().all()
    assert table.loc[(2, "ddp"), "parameters"] == 4 * 4 * 4 + 4 * 4


class TwoTowers(nn.Module):
    """As CLIP is: two inputs, and a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(16, 8)
        self.text = nn.Embedding(100, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.logit_scale.exp() * self.image(pixels) @ self.text(ids).mean(1).T


class Picky(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[x.sum(1) > 0])


GPT_64 = functools.partial(GPT, 64, context=8, dim=16, num_heads=2, num_layers=1)


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        (
            GPT_64(),
            {},
            "give --batch-size B and --sequence T, because the model begins",
        ),
        (GPT_64(), {"batch_size": 4}, "give --sequence T, because the model begins"),
        (mlp(), {}, "give --batch-size B, the samples of all ranks"),
        (ResNet(), {"batch_size": 4}, "begins with Conv2d, and its input cannot be"),
        (
            nn.Transformer(8, 2, 1, 1, batch_first=True),
            {"batch_size": 4},
            "tuple or dict of src, tgt",
        ),
        (TwoTowers(), {"batch_size": 4}, "tuple or dict of pixels, ids"),
        (Picky(8, 8), {"batch_size": 4}, "a step without data, on input of shape"),
        (mlp(), {"x": torch.zeros(4, 5)}, "(4, 5), ends in RuntimeError"),
    ],
)
def test_without_input_there_are_the_model_states(
    model: nn.Module, options: dict[str, object], sentence: str
) -> None:
    total = sum(4 * p.numel() for p in model.parameters())
    given = {"world_sizes": [2], "device_bytes": 2**30, **options}
    table, says = forecast(model, **given)  # type: ignore[arg-type]
    assert sentence in says
    assert "On 2 ranks of 1 GiB the model states fit under every strategy." in says
    states = table.loc[2][STATES].sum(axis=1)
    # Parameters, gradients and Adam's two numbers for each, and ResNet's statistics.
    assert states["ddp"] == pytest.approx(4 * total, rel=0.02)
    assert states["fsdp"] == pytest.approx(2 * total, rel=0.05)
    assert table["activations_peak"].isna().all()
    assert (table.loc[2]["total_peak"] >= states).all()
    shown = Forecast(table, says, 2**30)
    assert set(shown.formatted()["fits"]) == {"?"}
    figure = shown.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert "activations" not in str(labels_of(figure))
    _, says = forecast(model, **{**given, "device_bytes": 3 * total})  # type: ignore[arg-type]
    assert "single, ddp" in says
    assert "cannot fit" in says


def labels_of(figure: RunFigure) -> list[str]:
    """The words of a figure's legend."""
    legends = [legend for axes in figure.axes if (legend := axes.get_legend())]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def test_input_is_guessed_where_the_model_begins_with_numbers() -> None:
    options = {"world_sizes": [2], "device_bytes": 2**30}
    table, says = forecast(mlp(), batch_size=64, **options)
    expected, _ = forecast(mlp(), torch.zeros(64, 64), **options)
    pd.testing.assert_frame_equal(table, expected)
    assert "Input of shape (64, 64) is assumed" in says


@pytest.mark.parametrize(
    "x",
    [
        (torch.zeros(4, 16), torch.zeros(4, 5, dtype=torch.int64)),
        UserDict(
            pixels=torch.zeros(4, 16),
            ids=torch.zeros(4, 5, dtype=torch.int64),
            labels=torch.zeros(4),
        ),
    ],
    ids=["tuple", "dict"],
)
def test_a_model_of_several_inputs_is_estimated(x: object) -> None:
    options = {"world_sizes": [2], "device_bytes": 2**30}
    table, says = forecast(TwoTowers(), x, **options)  # type: ignore[arg-type]
    assert (table["activations_peak"] > 0).all()
    # Neither fully_shard nor DeepSpeed takes a parameter without a dimension.
    refused = "zero1, zero2, zero3, fsdp and hsdp"
    assert f"As it is, {refused} cannot train it: logit" in says


def test_the_forecast_is_a_table_and_a_picture() -> None:
    table, sentence = forecast(
        mlp(), torch.zeros(8, 64), world_sizes=[2, 8], device_bytes=2**20
    )
    shown = Forecast(table, sentence, 2**20)
    assert sentence in repr(shown)
    assert set(shown.formatted()["fits"]) <= {"yes", "no"}
    # 19 KiB of parameters on each of two ranks would be 0.0 MiB.
    assert shown.formatted().columns.name == "KiB"
    assert shown.formatted().loc[2, "ddp"]["parameters"] == "18.8"
    figure = shown.plot()
    assert "activations" in str(labels_of(figure))
    assert [axes.get_title() for axes in figure.axes] == ["2 ranks", "8 ranks"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    for axes in figure.axes:
        for label in axes.get_xticklabels():
            assert label.get_window_extent().y0 >= 0, label.get_text()
