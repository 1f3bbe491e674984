"""What is predicted before a run is what the run then measures."""

import functools
import textwrap
from collections import UserDict

import pandas as pd
import pytest
import torch
from marks import long_but
from torch import nn

from labkit import Lab
from labkit.estimate import STRATEGIES
from labkit.estimate import estimate
from labkit.estimate import forecast
from labkit.models import GPT
from labkit.models import ResNet
from labkit.models import mlp
from labkit.notebook.plots.estimate_plot import Forecast

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
        model = ResNet(width=64)
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
OPTIONS = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "checkpointed": {"activation_checkpointing": True},
}


@functools.cache
def predicted(setup: str, options: str) -> pd.DataFrame:
    names = {"torch": torch}
    exec(textwrap.dedent(SETUPS[setup]), names)
    sample, _ = names["data"][0]  # type: ignore[index]
    table = estimate(
        names["model"],  # type: ignore[arg-type]
        sample[None],
        world_sizes=[2],
        batch_size=names["batch_size"],  # type: ignore[arg-type]
        **OPTIONS[options],  # type: ignore[arg-type]
    )
    return table.loc[2]


def run_and_compare(lab: Lab, setup: str, strategy: str, options: str) -> None:
    code = textwrap.dedent(SETUPS[setup]) + textwrap.dedent(TRAINING)
    run = lab.train(strategy, code, live=False, **OPTIONS[options])  # type: ignore[arg-type]
    measured = run.memory.max()
    found = predicted(setup, options).loc[strategy]
    for component in STATES:
        assert found[component] == pytest.approx(measured[component], rel=0.05, abs=99)
    assert found["total_peak"] == pytest.approx(measured["total_peak"], rel=0.15)


@pytest.mark.parametrize("strategy", long_but(STRATEGIES, "zero2", "fsdp"))
@pytest.mark.parametrize("setup", SETUPS)
def test_memory_is_as_predicted(lab: Lab, setup: str, strategy: str) -> None:
    run_and_compare(lab, setup, strategy, "plain")


@pytest.mark.parametrize("strategy", long_but(["ddp", "zero2", "fsdp"], "fsdp"))
@pytest.mark.parametrize("options", ["accumulated", "checkpointed"])
def test_memory_with_options_is_as_predicted(
    lab: Lab, options: str, strategy: str
) -> None:
    run_and_compare(lab, "gpt", strategy, options)


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


def test_optimizers_class_and_defaults_count() -> None:
    model = mlp(num_hidden=4096)
    x = torch.zeros(8, 64)
    states = {}
    for name, optimizer in {
        "plain": torch.optim.SGD,
        "momentum": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adam": None,
    }.items():
        table = estimate(model, x, optimizer=optimizer, world_sizes=[2], batch_size=8)
        states[name] = table.loc[(2, "ddp"), "optimizer_state"]
    weights = sum(4 * p.numel() for p in model.parameters())
    assert states["plain"] == 0
    assert states["momentum"] == weights
    assert states["adam"] == pytest.approx(2 * weights, abs=99)


def test_the_sentence_says_what_fits_and_what_would() -> None:
    model = GPT(256, context=64, dim=192, num_heads=4, num_layers=4)

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
    assert some.startswith("On 2 ranks of 48 MiB zero1, zero2, zero3 and fsdp fit. ")
    assert "With --activation-checkpointing ddp and hsdp would" in some
    none = said(1)
    assert "nothing fits: " in none
    left = "more ranks (--ranks), a smaller batch and --precision bf16"
    assert none.endswith(f"Left to try: {left}.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model is int; an estimate needs a torch.nn.Module"),
        ({"batch_size": 0}, "batch size is 0"),
        ({"model": nn.LazyLinear(3)}, "lazy layers"),
        ({"x": torch.tensor(1.0)}, "first dimension is the batch"),
        (
            {"sequence": 8, "world_sizes": [0]},
            "a world size is 0; it must be a whole number from 1",
        ),
        ({"sequence": 8, "precision": "fp8"}, "choose one of: fp32, bf16, fp16"),
        ({"sequence": 8, "optimizer": "Foo"}, "--optimizer Foo: .*AdamW"),
        ({"model": nn.Flatten(), "x": torch.zeros(2, 2)}, "requires a gradient"),
        pytest.param(
            {"sequence": 8, "device": "cuda"},
            "this build of torch is for the CPU",
            marks=pytest.mark.skipif(
                torch.backends.cuda.is_built(), reason="torch has CUDA"
            ),
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
    assert shown.plot()._repr_png_().startswith(b"\x89PNG")
    _, says = forecast(model, **{**given, "device_bytes": 3 * total})  # type: ignore[arg-type]
    assert "single, ddp" in says
    assert "cannot fit" in says


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
    assert "As it is, zero1, zero2, zero3, fsdp and hsdp cannot train it: logit" in says


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
    assert [axes.get_title() for axes in figure.axes] == ["2 ranks", "8 ranks"]
    assert figure._repr_png_().startswith(b"\x89PNG")
