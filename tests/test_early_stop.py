"""Early stopping: all ranks leave the loop at the step at which one process does."""

import copy
import math
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit.data import digits
from labkit.rank.loop.early_stop import EarlyStop
from labkit.rank.loop.early_stop import StopRule
from labkit.records import significant
from labkit.strategies import STRATEGIES

Captured = pytest.CaptureFixture[str]

# So few samples are learned by heart: soon the test's loss rises.
SET_UP = """
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from labkit.data import digits

data = TensorDataset(*(each[:64] for each in digits().tensors))
test = TensorDataset(*(each[:96] for each in digits("test").tensors))
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
"""
BY_FIT = """
fit(
    model, data, F.cross_entropy, optimizer=optimizer, batch_size=32, epochs=30,
    shuffle=False, validate=test, patience=2, restore_best=True,
)
"""
OWN_LOOP = """
model, optimizer, loader = prepare(
    model, optimizer, data, batch_size=32, shuffle=False
)
images, labels = (each.to(device) for each in test.tensors)
for epoch in range(30):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = F.cross_entropy(model(images), labels)
    # Ranks that judged by a value of their own would part here.
    if stop_early(loss + 0.1 * rank, patience=2, restore_best=True):
        break
"""
PREPARING = [name for name in STRATEGIES if not STRATEGIES[name].is_by_hand]
LOOPS = {"fit": BY_FIT, "loop": OWN_LOOP}
QUICK = ["ddp-fit", "fsdp-loop", "zero2-fit", "parameter_server-loop"]


def train(lab: Lab, strategy: str, code: str, **options: Any) -> Any:
    return lab.train(strategy, textwrap.dedent(code), live=False, **options)


@pytest.fixture(scope="module")
def reference() -> tuple[int, int, nn.Module]:
    """One process in plain PyTorch: the epoch after which it stops, the best one, and
    the model as it was then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    images, labels = (each[:64] for each in digits().tensors)
    test_images, test_labels = (each[:96] for each in digits("test").tensors)
    best, best_epoch, best_model = math.inf, 0, model
    for epoch in range(1, 31):
        for batch in (slice(0, 32), slice(32, 64)):
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss = F.cross_entropy(model(test_images), test_labels).item()
        if loss < best:
            best, best_epoch, best_model = loss, epoch, copy.deepcopy(model)
        if epoch - best_epoch == 2:
            return epoch, best_epoch, best_model
    raise AssertionError("it never stopped")


@pytest.mark.parametrize(
    ("strategy", "loop"),
    [
        pytest.param(
            strategy,
            code,
            id=f"{strategy}-{name}",
            marks=[] if f"{strategy}-{name}" in QUICK else pytest.mark.release,
        )
        for strategy in PREPARING
        for name, code in LOOPS.items()
    ],
)
def test_it_ends_where_one_process_does_with_the_best_weights(
    lab: Lab,
    strategy: str,
    loop: str,
    reference: tuple[int, int, nn.Module],
    capsys: Captured,
) -> None:
    stopped, best, model = reference
    run = train(lab, strategy, SET_UP + loop)
    assert set(run.collector.steps.values()) == {2 * stopped}
    weights = lab.pull("model", full=True)
    torch.testing.assert_close(weights, model.state_dict(), rtol=1e-3, atol=1e-5)
    [note] = [each for each in run.notes if each.startswith("stopped early")]
    assert f"at step {2 * stopped}:" in note
    assert f"at step {2 * best}); the last is" in note
    assert note.endswith("; the best state is restored")
    assert note in capsys.readouterr().err
    assert run.folder is not None
    assert not (run.folder / "best").exists()


def test_under_raw_ranks_leave_their_loop_together(lab: Lab) -> None:
    run = train(
        lab,
        "raw",
        """
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Alone rank 0 would stop after 3 steps, and rank 1 never.
        metrics = [9, 8, 8, 8, 8, 8] if rank == 0 else [9, 8, 7, 6, 6, 6]
        for metric in metrics:
            model(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
            if stop_early(metric, patience=2):
                break
        dist.barrier()
        """,
    )
    assert run.collector.steps == {0: 6, 1: 6}
    assert run.notes[-1] == (
        "stopped early at step 6: in 2 values the metric of stop_early did not get "
        "lower than its best, 7 (at step 4); the last is 7"
    )


def test_each_call_in_the_code_has_a_metric_of_its_own(lab: Lab) -> None:
    lab.run("taken = 0")
    code = """
        for falling, rising in zip([9, 8, 7, 6, 6, 6, 6], [1, 2, 3, 4, 5, 6, 7]):
            taken += 1
            if stop_early(falling, patience=2) or stop_early(
                rising, patience=2, mode="max"
            ) or stop_early(rising, patience=4, mode="max"):
                break
        """
    train(lab, "raw", code)
    assert lab.pull("taken", "all") == [6, 6]
    twice = "stop_early(1.0, restore_best=True)"
    prepare = "prepare(model, optimizer, data, batch_size=8)"
    with pytest.raises(RankError, match="another stop_early of this cell keeps it"):
        train(lab, "ddp", f"{SET_UP}{prepare}\n{twice} or {twice}")


def test_fit_monitors_a_metric_and_the_training_loss(lab: Lab) -> None:
    code = SET_UP + textwrap.dedent(
        """
        def accuracy(output, y):
            return (output.argmax(1) == y).float().mean()
        fit(
            model, data, F.cross_entropy, optimizer=optimizer, batch_size=32, epochs=40,
            validate=test, metrics={"accuracy": accuracy},
            patience=3, monitor="val_accuracy", mode="max", min_delta=0.01,
        )
        """
    )
    run = train(lab, "ddp", code)
    seen = run.history.groupby("step")["val_accuracy"].mean().dropna().tolist()
    watch = EarlyStop(StopRule(3, 0.01, "max"))
    for value in seen[:-1]:
        watch.see(value, "")
        assert not watch.is_over
    watch.see(seen[-1], "")
    assert watch.is_over
    assert f"epoch {len(seen)}/{len(seen)}" in run.status_line()
    # A loss that an optimizer without a rate never changes.
    still = SET_UP + (
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.0)\n"
        "fit(model, data, F.cross_entropy, optimizer=optimizer, batch_size=48,\n"
        "    epochs=9, shuffle=False, patience=2, min_delta=1e-4)"
    )
    run = train(lab, "ddp", still)
    assert run.num_steps == 3 * 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    images, labels = (each[:64] for each in digits().tensors)
    # The mean over the samples, also where the last batch has a third of the others.
    loss = significant(F.cross_entropy(model(images), labels).item())
    assert run.notes[-1] == (
        "stopped early after epoch 3 of 9, at step 6: in 2 values loss did not get "
        f"lower by more than 0.0001 than its best, {loss} (after epoch 1 of 9, at step "
        f"2); the last is {loss}"
    )


def test_a_run_that_ends_by_itself_restores_the_best_too(
    lab: Lab, reference: tuple[int, int, nn.Module]
) -> None:
    _, best, model = reference
    run = train(lab, "ddp", SET_UP + BY_FIT.replace("epochs=30", f"epochs={best + 1}"))
    assert run.num_steps == 2 * (best + 1)
    weights = lab.pull("model", full=True)
    torch.testing.assert_close(weights, model.state_dict(), rtol=1e-3, atol=1e-5)
    assert not any(each.startswith("stopped early") for each in run.notes)


def test_another_model_is_judged_by_itself(lab: Lab) -> None:
    code = SET_UP + textwrap.dedent(
        """
        found = []
        for fold in range(2):
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = prepare(model, optimizer, data, batch_size=32)
            found.append([stop_early(1.0 + fold, patience=2) for _ in range(2)])
        """
    )
    train(lab, "ddp", code)
    assert lab.pull("found") == [[False, False], [False, False]]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("stop_early(1.0, patience=0)", "patience is 0; it must be a whole number"),
        ("stop_early(1.0, min_delta=-1)", "min_delta is -1; it must be a number of at"),
        ("stop_early(1.0, mode='least')", "unknown mode 'least'; choose one of: min"),
        ("stop_early('low')", "takes a number or a tensor of one element; found str"),
        ("stop_early(1.0, restore_best=True)", "this cell has not called it"),
        (
            "fit(model, data, F.cross_entropy, optimizer=optimizer, batch_size=8, "
            "mode='max')",
            "give patience as well",
        ),
        (
            "fit(model, data, F.cross_entropy, optimizer=optimizer, batch_size=8, "
            "patience=2, monitor='val_loss')",
            "unknown metric to monitor 'val_loss'; choose one of: loss",
        ),
    ],
)
def test_what_cannot_be_is_said(lab: Lab, call: str, says: str) -> None:
    with pytest.raises(RankError) as error:
        train(lab, "ddp", SET_UP + call)
    assert says in str(error.value)


def test_nan_is_no_improvement_and_min_delta_counts() -> None:
    watch = EarlyStop(StopRule(2, 0.1))
    values = [math.nan, 3.0, 2.95, 2.8, math.nan, 2.75]
    assert [watch.see(each, f"{each}") for each in values] == [
        *(False, True, False, True, False, False)
    ]
    assert watch.is_over
    assert watch.why("x") == (
        "in 2 values x did not get lower by more than 0.1 than its best, 2.8 (2.8); "
        "the last is 2.75"
    )
    never = EarlyStop(StopRule(1, restore_best=True))
    never.see(math.nan, "")
    assert never.why("x") == "x was never a number in 1 value"
