"""Gradients in fewer bytes, and parameters averaged seldom: what arrives, what is kept,
what is sent."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from marks import long_but

from labkit import Lab
from labkit import RankError
from labkit import Run
from labkit import load_run
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.runs.comparison import plot_comparison

pytestmark = pytest.mark.timeout(120)

METHODS = ("fp16", "bf16", "powersgd", "topk")
WITH_RESIDUALS = ("powersgd", "topk")

SET_UP = """
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from labkit.data import digits
from labkit.models import mlp

torch.manual_seed(5)
rows = torch.randn(192, 24)
random = TensorDataset(rows, rows.flip(1).contiguous())

class Layers(torch.nn.Module):
    \"\"\"Its gradients do not depend on its weights, and so add up.\"\"\"
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, n) for n in (40, 8, 40))

    def forward(self, x, target, scales=(1.0, 1.0, 1.0)):
        outputs = [layer(x) for layer in self.layers]
        parts = [(y * target[:, :1] ** 2).sum(1) * s for y, s in zip(outputs, scales)]
        return sum(parts).mean()

class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("on purpose")

def fail():
    \"\"\"After the gradients of the last layers are there.\"\"\"
    y = FailsInBackward.apply(plain.layers[0](x)).sum()
    try:
        (y + model(x, target, (0.0, 1.0, 1.0))).backward()
    except ValueError:
        optimizer.zero_grad()

def scale():
    \"\"\"As under --precision fp16, which a CPU has not.\"\"\"
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer.prepared.scaler = scaler

torch.manual_seed(7)
plain = Layers()
sgd = torch.optim.SGD(plain.parameters(), lr=1.0)
"""
LINEAR = (
    SET_UP
    + """
model, optimizer, loader = prepare(plain, sgd, random, batch_size=32, shuffle=False)
for step, (x, target) in enumerate(loader):
    {loop}
    optimizer.step()
    optimizer.zero_grad()
left = optimizer.prepared._hook and optimizer.prepared._hook.residuals.named()
"""
)
LOOPS = {
    "plain": "model(x, target).backward()",
    "two backward passes": (
        "model(x, target).backward(); model(x[::2], target[::2]).backward()"
    ),
    "a layer is frozen for some steps": (
        "model.layers[1].requires_grad_(step not in (3, 4)); "
        "model(x, target).backward()"
    ),
    "a pass fails": ("step == 3 and fail(); model(x, target).backward()"),
    "a gradient is zero": (
        "model(x, target, (1.0, 1.0, float(step not in (3, 4)))).backward()"
    ),
    "layers are unused in some steps": (
        "y = model.layers[0](x) * target[:, :1] ** 2; "
        "(y.sum(1).mean() if step in (2, 3) else model(x, target)).backward()"
    ),
    "a scaled loss overflows": (
        "step or scale(); (model(x, target) * (1e38 if step == 3 else 1.0)).backward()"
    ),
}


def mean_left(lab: Lab) -> dict[str, torch.Tensor]:
    """What ranks have not sent, as it would be in the mean gradient."""
    of_ranks = lab.pull("left", "all")
    return {
        name: sum(each[name] for each in of_ranks) / len(of_ranks)
        for name in of_ranks[0]
    }


def weights(lab: Lab, name: str = "plain") -> dict[str, torch.Tensor]:
    of_ranks = [each.state_dict() for each in lab.pull(name, "all")]
    for other in of_ranks[1:]:
        torch.testing.assert_close(other, of_ranks[0], rtol=0, atol=0)
    found: dict[str, torch.Tensor] = of_ranks[0]
    return found


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("method", long_but(WITH_RESIDUALS, "powersgd"))
def test_what_is_not_sent_is_kept_and_nothing_is_lost(
    lab: Lab, method: str, loop: str
) -> None:
    """With gradients that do not depend on weights: those of ddp are those of the
    compressed run with all that its ranks still keep."""
    code = LINEAR.format(loop=LOOPS[loop])
    has_unused = "unused" in loop
    config = {"bucket_cap_mb": 0.001, "find_unused_parameters": has_unused}
    lab.train("ddp", code, config=config, live=False)
    wanted = weights(lab)
    run = lab.train("ddp", code, comm=method, config=config, live=False)
    found = weights(lab)
    left = mean_left(lab)
    assert any(part.any() for part in left.values())
    for name, weight in found.items():
        whole = weight - left[name].view_as(weight)
        torch.testing.assert_close(whole, wanted[name], rtol=1e-4, atol=1e-4)
    assert not run.mismatches


def test_a_last_microbatch_that_fails_leaves_the_next_step_right(lab: Lab) -> None:
    """It leaves a reducer that would take the gradients of the next microbatch, which
    are not to be reduced, for those that it still waits for."""
    code = (
        SET_UP
        + """
model, optimizer, loader = prepare(plain, sgd, random, batch_size=32, shuffle=False)
for number, (x, target) in enumerate(loader):
    if number == 3:
        y = FailsInBackward.apply(plain.layers[0](x)).sum()
        try:
            (y + model(x, target, (0.0, 1.0, 1.0))).backward()
        except ValueError:
            for parameter in plain.parameters():
                parameter.grad = None
            continue
    model(x, target).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    lab.train("single", code, accumulate=2, live=False)
    wanted = lab.pull("plain", 0).state_dict()
    lab.train("ddp", code, accumulate=2, live=False)
    torch.testing.assert_close(weights(lab), wanted)


def test_a_gradient_that_was_zero_is_sent_later(lab: Lab) -> None:
    """Torch's PowerSGD would make a factor of zeros of it, and all later ones too."""
    loop = "model(x, target, (1.0, 1.0, float(step > 3))).backward()"
    code = LINEAR.format(loop=f"before = plain.layers[2].weight.clone()\n    {loop}")
    lab.train("ddp", code, comm="powersgd", live=False)
    lab.run("moved = (plain.layers[2].weight - before).abs().max().item()")
    assert min(lab.pull("moved", "all")) > 0.01


TRAIN = (
    SET_UP
    + """
plain = mlp()
sgd = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = prepare(plain, sgd, digits(), batch_size=64)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {after}
"""
)


def sent(run: Run) -> pd.Series:
    return run.comm["wire_bytes"].groupby("rank").sum()


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_the_formula_and_the_loop_still_learns(
    lab: Lab, method: str
) -> None:
    code = TRAIN.format(after="if loader.position.batch == 12: break")
    options: dict[str, Any] = {"accumulate": 2, "clip": 1.0, "precision": "bf16"}
    for more in ({}, options):
        run = lab.train("ddp", code, comm=method, live=False, **more)
        weights(lab)
        assert sent(run).max() == pytest.approx(run.theory["wire_bytes"], rel=0.05)
        losses = run.mean_loss()["loss"]
        assert losses.iloc[-1] < 0.99 * losses.iloc[0]
        [note] = [each for each in run.notes if method in each]
        assert "differ from those of one process" in note
        assert not run.mismatches


def test_buckets_are_those_that_are_sent(lab: Lab) -> None:
    code = TRAIN.format(after="if loader.position.batch == 4: break")
    run = lab.train("ddp", code, config={"bucket_cap_mb": 0.001}, live=False)
    named = dict(lab.pull("plain", 0).named_parameters())
    table = run.buckets
    assert sorted(table["parameter"]) == sorted(named)
    assert list(table["bucket"]) == sorted(table["bucket"])
    assert table["bucket"].nunique() == run.comm["count"].max() > 1
    for row in table.itertuples():
        assert row.num_bytes == named[str(row.parameter)].nbytes
    assert str(table["parameter"].iloc[0]) in list(named)[-2:]
    bars = run.plot_buckets().axes[0].patches
    assert len(bars) == len(table)
    sharded = lab.train("fsdp", code, live=False)
    assert sharded.buckets.empty
    with pytest.raises(ValueError, match="a run under ddp has them"):
        sharded.plot_buckets()


def test_runs_are_compared_by_the_bytes_that_they_have_sent(lab: Lab) -> None:
    code = TRAIN.format(after=STOP)
    options: list[dict[str, Any]] = [
        {},
        {"comm": "powersgd"},
        {"average_every": 4, "average_after": 2},
    ]
    runs = [lab.train("ddp", code, live=False, **each) for each in options]
    whole, factors, averaged = (run.sent_bytes["num_bytes"].to_numpy() for run in runs)
    one = runs[0].theory["wire_bytes"]
    assert whole.tolist() == pytest.approx([one * n for n in range(1, 13)])
    few = runs[1].theory["wire_bytes"]
    assert factors[-1] == pytest.approx(2 * one + 10 * few, rel=0.01)
    assert averaged[-1] == pytest.approx(2 * one + 3 * one, rel=0.01)
    single = lab.train("single", code, live=False)
    by_bytes = plot_comparison([single, *runs]).axes[2]
    assert by_bytes.get_title("left") == "loss by bytes"
    ends = [line.get_xdata()[-1] * 1024 for line in by_bytes.lines]
    assert ends == pytest.approx([whole[-1], factors[-1], averaged[-1]])
    alone = plot_comparison([single]).axes[2]
    assert alone.texts[0].get_text() == "no run sends anything"


def average(steps: int, **more: Any) -> dict[str, Any]:
    return {"average_every": steps, "live": False, **more}


STOP = "if loader.position.batch == 12: break"


def test_averages_in_every_step_are_those_of_ddp(lab: Lab) -> None:
    """With SGD, whose steps are linear in the gradients."""
    code = TRAIN.format(after="pass").replace(
        "digits()", "TensorDataset(*digits()[:90])"
    )
    lab.train("ddp", code, live=False)
    wanted = weights(lab)
    run = lab.train("ddp", code, **average(1, accumulate=2))
    torch.testing.assert_close(weights(lab), wanted)
    assert sent(run).max() == pytest.approx(run.theory["wire_bytes"], rel=0.01)


@pytest.mark.parametrize("after", [None, 4])
def test_parameters_are_averaged_every_few_steps_and_at_the_end(
    lab: Lab, after: int | None, tmp_path: Path
) -> None:
    look = """w = plain[1].weight.detach().flatten()
    both = [torch.empty_like(w) for _ in range(world_size)]
    dist.all_gather(both, w.clone())
    are_equal = are_equal if loader.position.batch > 1 else []
    are_equal.append(bool((both[0] == both[1]).all()))
    """
    code = TRAIN.format(after=look + "if loader.position.batch == 14: break")
    run = lab.train("ddp", "are_equal = []\n" + code, **average(4, average_after=after))
    weights(lab)
    equal = [
        step for step, is_equal in enumerate(lab.pull("are_equal", 0), 1) if is_equal
    ]
    assert equal == ([4, 8, 12] if after is None else [1, 2, 3, 4, 8, 12])
    states = lab.run(
        "state = list(sgd.state.values())[0]['momentum_buffer'].sum().item()"
    )
    assert lab.pull("state", 0) == lab.pull("state", 1), states
    [note] = [each for each in run.notes if "--average-every 4" in each]
    assert "differ from those of one process" in note
    assert not run.mismatches
    num_averages = 4 if after is None else 3  # with that at the end
    whole = 4 * run.theory["wire_bytes"]
    num_steps = 14 - (after or 0)
    wanted = num_averages / num_steps * whole
    assert sent(run).max() == pytest.approx(wanted, rel=0.01)


def test_what_the_loop_makes_of_the_parameters_is_averaged_too(lab: Lab) -> None:
    code = TRAIN.format(
        after="with torch.no_grad():\n"
        "        for ours, theirs in zip(teacher.parameters(), net.parameters()):\n"
        "            ours.data.lerp_(theirs, 0.5)"
    ).replace(
        "plain = mlp()",
        "net = mlp()\n"
        "teacher = mlp().requires_grad_(False)\n"
        "frozen = torch.nn.Linear(64, 64).requires_grad_(False)\n"
        "plain = torch.nn.ModuleDict({'net': net, 'teacher': teacher, 'a': frozen})\n"
        "plain.forward = lambda x: net(x) + teacher(x)",
    )
    run = lab.train("ddp", code, **average(4))
    weights(lab)
    assert not run.mismatches
    # What is the same on all ranks is not sent.
    assert sent(run).max() == pytest.approx(2 * run.theory["wire_bytes"], rel=0.1)


def test_bytes_of_averages_are_those_of_the_formula(lab: Lab) -> None:
    run = lab.train("ddp", TRAIN.format(after=STOP), **average(4, clip=1.0))
    assert sent(run).max() == pytest.approx(run.theory["wire_bytes"], rel=0.01)
    assert load_run(run.name).comm.equals(run.comm)


EVALUATIONS = {
    "between two averages": (
        "model.eval(); model(x); model.train()",
        "each rank has its own",
    ),
    "on a share": (
        "for a, b in loader.share(digits(), batch_size=512):\n"
        "        with torch.no_grad(): model(a)",
        "",
    ),
}


@pytest.mark.parametrize("where", EVALUATIONS)
def test_an_evaluation_is_of_one_model_or_noted(lab: Lab, where: str) -> None:
    after, text = EVALUATIONS[where]
    code = TRAIN.format(after=f"{STOP}\n    {after}")
    run = lab.train("ddp", code, **average(8))
    assert [each for each in run.notes if "evaluates" in each and text] == [
        each for each in run.notes if "evaluates" in each
    ]
    assert any("each rank has its own" in each for each in run.notes) == bool(text)


def test_a_resumed_run_averages_on(lab: Lab, tmp_path: Path) -> None:
    def train(after: str, **options: Any) -> Run:
        code = TRAIN.format(after=after)
        return lab.train("ddp", code, **average(3, **options))

    kept: dict[str, Any] = {"every": 4}
    whole = train(STOP, checkpoint=tmp_path / "whole", **kept)
    kept["checkpoint"] = tmp_path / "kept"
    with pytest.raises(RankError):
        train("assert loader.position.batch < 9", **kept)
    run = train(STOP, resume=True, **kept)
    assert run.resumed_from == 8
    resumed = run.mean_loss().set_index("step")["loss"]
    wanted = whole.mean_loss().set_index("step")["loss"].loc[resumed.index]
    pd.testing.assert_series_equal(resumed, wanted)


def test_a_loop_that_goes_back_shares_gradients_again(lab: Lab, tmp_path: Path) -> None:
    """To a step before the first that ranks take alone."""
    after = f"""
    if loader.position.batch == 2: save_checkpoint({str(tmp_path)!r})
    if loader.position.batch == 6: load_checkpoint({str(tmp_path)!r})
    if loader.position.batch == 8: break
    """
    lab.train("ddp", TRAIN.format(after=after), live=False)
    wanted = weights(lab)
    lab.train("ddp", TRAIN.format(after=after), **average(3, average_after=4))
    torch.testing.assert_close(weights(lab), wanted)


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a loss that is scaled": (
        "ddp",
        {"comm": "topk", "precision": "fp16"},
        "pass",
        "fp16 needs a GPU",
    ),
    "a strategy": ("fsdp", {"comm": "topk"}, "pass", "--comm is for ddp"),
    "a share": (
        "ddp",
        {"comm": "topk", "config": {"topk": 2}},
        "pass",
        "above 0 and at most 1",
    ),
    "a key": (
        "ddp",
        {"comm": "topk", "config": {"matrix_approximation_rank": 2}},
        "pass",
        "has no 'matrix_approximation_rank'",
    ),
    "a setting": (
        "ddp",
        {"comm": "powersgd", "config": {"start_powerSGD_iter": 1}},
        "pass",
        "PowerSGDState refuses it",
    ),
    "averages of nothing": (
        "ddp",
        {"average_after": 4},
        "pass",
        "give both",
    ),
    "both": (
        "ddp",
        {"average_every": 4, "comm": "topk"},
        "pass",
        "leave out one of the two",
    ),
    "uneven steps": (
        "ddp",
        {"average_every": 2},
        "if rank == 0 and loader.position.batch == 3: optimizer.step()",
        "same number of optimizer steps",
    ),
    "a hook": (
        "ddp",
        {"comm": "bf16"},
        "model.register_comm_hook(None, lambda state, bucket: None)",
        "Leave out --comm, or the hook",
    ),
    "a hook of parameters": (
        "ddp",
        {"average_every": 2},
        "model.register_comm_hook(None, lambda state, bucket: None)",
        "Leave out --average-every, or the hook",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_words(lab: Lab, case: str) -> None:
    strategy, options, after, text = REFUSED[case]
    with pytest.raises((RankError, ValueError), match=text):
        lab.train(strategy, TRAIN.format(after=after), live=False, **options)


MODELS = {
    "sparse=True": "torch.nn.EmbeddingBag(10, 4, sparse=True)",
    "a complex parameter": "torch.nn.Linear(4, 4, dtype=torch.complex64)",
    "not contiguous": "torch.nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last)",
    "without a dimension": "torch.nn.ParameterList([torch.tensor(1.0)])",
}


def test_models_that_cannot_be_compressed_are_refused_in_words(lab: Lab) -> None:
    for text, model in MODELS.items():
        code = (
            f"model = {model}\nsgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "prepare(model, sgd, torch.utils.data.TensorDataset(torch.randn(8, 4)), "
            "batch_size=4)"
        )
        with pytest.raises(RankError, match=text):
            lab.train("ddp", code, comm="powersgd", live=False)


FAILURES = {
    "raises in the hook": (
        "if rank == 1: optimizer.prepared._hook.peers = None",
        "AttributeError",
    ),
    "never comes": (
        "import threading\n    if rank == 1: threading.Event().wait()",
        r"ran longer than 2 seconds \(--timeout\)",
    ),
    "raises between two steps": ("assert rank == 0, 'on purpose'", "on purpose"),
    "is killed": (
        "import os, signal\n    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
        "SIGKILL",
    ),
}


@pytest.mark.parametrize("method", WITH_RESIDUALS)
@pytest.mark.long
def test_a_rank_that_fails_in_a_compressed_step_leaves_the_next_cell_as_new(
    lab: Lab, method: str
) -> None:
    whole = lab.train("ddp", TRAIN.format(after="pass"), comm=method, live=False)
    for after, text in FAILURES.values():
        with pytest.raises((RankError, CellTimeoutError), match=text):
            lab.train(
                "ddp",
                TRAIN.format(after=after),
                comm=method,
                live=False,
                timeout=2 if "timeout" in text else None,
                hang_after=0,
            )
        lab.restart()
        lab.run("total = torch.tensor([rank])\ndist.all_reduce(total)")
        assert lab.pull("total", 0).item() == 1
    again = lab.train("ddp", TRAIN.format(after="pass"), comm=method, live=False)
    assert list(again.mean_loss()["loss"]) == list(whole.mean_loss()["loss"])


@pytest.mark.parametrize("method", WITH_RESIDUALS)
@pytest.mark.long
def test_a_run_that_resumes_has_what_was_not_sent(
    lab: Lab, method: str, tmp_path: Path
) -> None:
    def train(after: str, **options: Any) -> Run:
        code = TRAIN.format(after=after)
        return lab.train("ddp", code, comm=method, live=False, **options)

    kept: dict[str, Any] = {"checkpoint": tmp_path / "kept", "every": 4}
    with pytest.raises(RankError):
        train("assert loader.position.batch < 8", **kept)
    run = train("if loader.position.batch == 12: break", resume=True, **kept)
    assert run.resumed_from == 4
    whole = train("if loader.position.batch == 12: break")
    resumed = run.mean_loss().set_index("step")["loss"]
    wanted = whole.mean_loss().set_index("step")["loss"].loc[resumed.index]
    # P and Q are random again; what was not sent is kept.
    tolerance = 0.0 if method == "topk" else 0.05
    pd.testing.assert_series_equal(resumed, wanted, rtol=tolerance, atol=tolerance)
    others = train(
        "break", checkpoint=tmp_path / "kept", resume=True, config=_OTHER[method]
    )
    assert not [note for note in others.notes if "not taken over" in note]
    plain = lab.train(
        "ddp",
        TRAIN.format(after="if loader.position.batch == 14: break"),
        checkpoint=tmp_path / "kept",
        resume=True,
        live=False,
    )
    assert [note for note in plain.notes if "not taken over" in note]


_OTHER: Mapping[str, dict[str, Any]] = {
    "topk": {"topk": 0.1},
    "powersgd": {"matrix_approximation_rank": 2},
}


@pytest.mark.parametrize("how", ["topk", "average"])
@pytest.mark.long
def test_an_elastic_run_goes_on_after_the_death_of_a_rank(
    lab: Lab, how: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "topk": {"comm": "topk"},
        "average": {"average_every": 3},
    }
    die = f"""import os, signal, time
    from pathlib import Path
    flag = Path({str(tmp_path)!r}, "flag")
    if rank == 1 and loader.position.batch == 9 and not flag.exists():
        while not list(Path({str(tmp_path)!r}).glob("kept/*8")): time.sleep(0.01)
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    {STOP}"""
    given = {"every": 4, "live": False, **options[how]}
    whole = lab.train(
        "ddp", TRAIN.format(after=STOP), checkpoint=tmp_path / "whole", **given
    )
    run = lab.train(
        "ddp",
        TRAIN.format(after=die),
        checkpoint=tmp_path / "kept",
        elastic=True,
        **given,
    )
    assert [each.step for each in run.restarts] == [8]
    assert list(run.mean_loss()["loss"]) == list(whole.mean_loss()["loss"])
