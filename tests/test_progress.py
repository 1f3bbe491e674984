"""The progress line: its words, and what real ranks tell it."""

import textwrap

import numpy as np
import pytest

from labkit import Lab
from labkit.notebook.history.collector import Collector
from labkit.notebook.runs.progress import duration
from labkit.notebook.runs.progress import troubles
from labkit.notebook.runs.run import Run
from labkit.records import RECORD
from labkit.records import Batch
from labkit.records import Progress
from labkit.records import significant

NAN, INF = float("nan"), float("inf")


def collect(*values: list[float], metric: str = "loss") -> Collector:
    """A rank for each list, which logged it at steps 1, 2, ..., half a second each."""
    collector = Collector(range(len(values)))
    for rank, logged in enumerate(values):
        rows = [(0, step, step / 2, 0, v) for step, v in enumerate(logged, 1)]
        collector.add(rank, Batch(0, [metric], np.array(rows, dtype=RECORD)))
        collector.progress[rank] = Progress(1, epochs=10, steps_per_epoch=100)
    return collector


# ---- words ----


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.2, "1 s"),
        (59, "59 s"),
        (59.5, "1 min 0 s"),
        (80, "1 min 20 s"),
        (3600, "1 h 0 min"),
        (7530, "2 h 5 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_time_is_said_as_people_do(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.02, "0.02 s"), (0.2, "0.2 s"), (59.94, "59.9 s")]
)
def test_a_short_time_is_not_nothing(seconds: float, words: str) -> None:
    assert duration(seconds, digits=1) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.1234, "0.123"),
        (2.0, "2"),
        (999, "999"),
        (12_345, "12,300"),
        (2e6, "2,000,000"),
    ],
)
def test_a_rate_has_three_digits_that_count(value: float, words: str) -> None:
    assert significant(value) == words


def test_the_time_left_counts_what_lies_between_steps() -> None:
    collector = collect([1.0] * 11)
    collector.records(0)["seconds"][6:] += 5.0  # as a validation does
    line = Run("run-1", "ddp", "", collector).status_line()
    assert "step 11/1,000, 2 steps/s, 16 min 29 s left" in line


@pytest.mark.parametrize(
    ("num_steps", "epochs", "words"),
    [
        (22, (3, 3), "epoch 3, step 2/10 of the epoch,"),
        (22, (2, 3), "epoch 3, step 2/10 of the epoch,"),  # rank 0 is behind
        (8, (3, 3), "epoch 3, step 8,"),  # its loop leaves an epoch early
        (25, (2, 2), "epoch 2, step 25,"),  # or steps more than once in a batch
        (0, (0, 0), "on 2 ranks, step 0"),
    ],
)
def test_a_step_is_counted_within_its_epoch_where_it_can_be(
    num_steps: int, epochs: tuple[int, int], words: str
) -> None:
    collector = collect([1.0] * max(0, num_steps - 3), [1.0] * num_steps)
    for rank, epoch in enumerate(epochs):
        length = 10 if epoch else None
        collector.progress[rank] = Progress(epoch, steps_per_epoch=length)
    assert words in Run("run-1", "ddp", "", collector).status_line()


def test_samples_and_tokens_of_all_ranks_are_counted() -> None:
    run = Run("run-1", "ddp", "", collect([8.0] * 5, [4.0] * 5, metric="samples"))
    assert "2 steps/s, 24 samples/s" in run.status_line()
    run = Run("run-1", "ddp", "", collect([1024.0] * 5, metric="tokens"))
    assert "2 steps/s, 2,050 tokens/s" in run.status_line()


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (([1.0, 1.0], [1.0, 1.0]), []),
        (([1.0, 1.0], [1.0, NAN]), ["rank 1: loss is NaN from step 2 on"]),
        (
            ([1.0, 1.0, NAN], [1.0, NAN, NAN]),
            ["rank 1: loss is NaN from step 2 on, later 1 more rank"],
        ),
        (([1.0, INF], [1.0, -INF]), ["ranks 0-1: loss is infinite from step 2 on"]),
        (([NAN, 1.0], [1.0, 1.0]), ["rank 0: loss was NaN at step 1"]),
    ],
)
def test_nan_is_reported_with_the_rank_and_step_where_it_began(
    losses: tuple[list[float], ...], words: list[str]
) -> None:
    collector = collect(*losses)
    assert troubles(collector) == words
    line = Run("run-1", "ddp", "", collector).status_line()
    assert line.endswith(", ".join(words))


# ---- real ranks ----

TRAINING = """
import torch.nn.functional as F
from torch.utils.data import TensorDataset

tokens = torch.arange(40 * 6).reshape(40, 6) % 50
model = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 50))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(tokens, tokens), batch_size={batch_size}
)
for number, (x, y) in enumerate(loader, 1):
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    if rank == 1 and number >= {nan_from}:
        loss = loss * float("nan")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def train(lab: Lab, code: str, strategy: str = "ddp", **options: int) -> Run:
    return lab.train(strategy, textwrap.dedent(code), live=False, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_tokens_are_those_of_the_samples(lab: Lab, accumulate: int) -> None:
    # 40 samples in batches of 9: the last has 4.
    code = TRAINING.format(batch_size=9, nan_from=99)
    run = train(lab, code, accumulate=accumulate)
    history = run.history
    assert (history["tokens"] == 6 * history["samples"]).all()
    by_step = history.groupby("step")["tokens"].sum()
    assert by_step.tolist() == [54, 54, 54, 54, 24]
    assert " tokens/s" in run.status_line()
    assert "tokens" not in run.collector.curves.metrics()


def test_samples_that_are_no_tokens_have_none(lab: Lab) -> None:
    code = TRAINING.format(batch_size=8, nan_from=99)
    code = code.replace("TensorDataset(tokens, tokens)", "TensorDataset(x, tokens)")
    code = code.replace("model = ", "x = torch.ones(40, 6, 4)\nmodel = ")
    code = code.replace("torch.nn.Embedding(50, 4)", "torch.nn.Identity()")
    run = train(lab, code)
    assert "tokens" not in run.history
    assert " samples/s" in run.status_line()
    assert "tokens" not in run.status_line()


def test_the_rank_where_nan_began_is_named(lab: Lab) -> None:
    run = train(lab, TRAINING.format(batch_size=4, nan_from=7))
    # The gradients are averaged: from the next step on every rank has it.
    assert "rank 1: loss is NaN from step 7 on, later 1 more rank" in run.status_line()


@pytest.mark.parametrize("name", ["samples", "tokens"])
def test_what_labkit_counts_is_not_for_the_cell_to_log(lab: Lab, name: str) -> None:
    with pytest.raises(Exception, match=rf"log\({name}=...\): that column"):
        train(lab, f"log({name}=3)", "raw")
