"""Scripts as their authors wrote them, by `%run` in a raw cell, against two processes
that run the same script."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(400)

SCRIPTS = Path(__file__).parent / "scripts"

Fixture = Callable[..., Any]


def groups(values: list[float], size: int) -> list[float]:
    """The mean of each `size` values: the loss of a step of as many microbatches."""
    return np.reshape(values, (-1, size)).mean(axis=1).tolist()


def check_losses(run: Any, losses: list[list[float]], accumulate: int = 1) -> None:
    """What was plotted for each rank and step is what the script computed."""
    for rank, own in enumerate(losses):
        rows = run.history.dropna(subset=["loss"])
        noticed = rows.loc[rows["rank"] == rank, "loss"]
        np.testing.assert_allclose(noticed, groups(own, accumulate), rtol=1e-5)


def test_a_torchrun_script_with_arguments(
    on_ranks: Fixture, two_processes: Fixture
) -> None:
    arguments = ["torchrun_ddp.py", "--epochs", "2", "--output", "{output}"]
    run, outcome = on_ranks(*arguments)
    outcome.check(two_processes(*arguments))
    assert run.num_steps == 8
    check_losses(run, outcome.losses)


def test_a_script_that_spawns_its_processes(
    on_ranks: Fixture, processes: Any, tmp_path: Path
) -> None:
    run, outcome = on_ranks("spawned_ddp.py", "--output", "{output}")
    assert run.num_steps == 6
    assert any("torch.multiprocessing.spawn(main" in note for note in run.notes)
    check_losses(run, outcome.losses)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_script_like_nanogpt(
    dtype: str, on_ranks: Fixture, two_processes: Fixture
) -> None:
    arguments = ["nanogpt.py", "--out_dir={output}", f"--dtype={dtype}"]
    run, outcome = on_ranks(*arguments)
    outcome.check(two_processes(*arguments))
    assert run.num_steps == 6
    check_losses(run, outcome.losses)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_transformers_trainer(
    accumulate: int, on_ranks: Fixture, two_processes: Fixture
) -> None:
    arguments = ["hf_trainer.py", "--accumulate", str(accumulate)]
    arguments += ["--output", "{output}"]
    run, outcome = on_ranks(*arguments)
    outcome.check(two_processes(*arguments))
    assert run.num_steps == 16 // accumulate


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loop_of_accelerate(
    accumulate: int, on_ranks: Fixture, two_processes: Fixture
) -> None:
    arguments = ["accelerate_loop.py", "--accumulate", str(accumulate)]
    arguments += ["--output", "{output}"]
    run, outcome = on_ranks(*arguments)
    outcome.check(two_processes(*arguments))
    assert run.num_steps == 16 // accumulate
    check_losses(run, outcome.losses, accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_trainer(
    accumulate: int, on_ranks: Fixture, two_processes: Fixture
) -> None:
    arguments = ["lightning_fit.py", "--accumulate", str(accumulate)]
    arguments += ["--output", "{output}"]
    run, outcome = on_ranks(*arguments)
    outcome.check(two_processes(*arguments))
    assert run.num_steps == 16 // accumulate
    check_losses(run, outcome.losses, accumulate)


def test_transformers_trainer_with_fsdp(
    on_ranks: Fixture, two_processes: Fixture
) -> None:
    arguments = ["hf_trainer.py", "--fsdp", "--output", "{output}"]
    run, outcome = on_ranks(*arguments)
    outcome.check(two_processes(*arguments))
    assert run.num_steps == 16


@pytest.mark.parametrize("accumulate", [1, 2])
def test_transformers_trainer_with_deepspeed(
    accumulate: int, on_ranks: Fixture, two_processes: Fixture
) -> None:
    arguments = ["hf_trainer.py", "--accumulate", str(accumulate), "--deepspeed"]
    arguments += [str(SCRIPTS / "ds_config.json"), "--output", "{output}"]
    run, outcome = on_ranks(*arguments)
    outcome.check(two_processes(*arguments))
    assert run.num_steps == 16 // accumulate
