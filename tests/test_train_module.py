"""Scripts that import labkit.train, under torchrun: the same losses as in a cell."""

import csv
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from marks import long_but

from labkit import Lab
from labkit import train
from labkit.records import NOTICED_LOSS
from labkit.train.losses import Weighted
from labkit.train.losses import mean_by_step
from labkit.train.losses import of_one_kind
from labkit.train.place import find_place

pytestmark = pytest.mark.timeout(300)

BODY = """
model = torch.nn.Sequential(
    torch.nn.Flatten(),
    torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2),
    torch.nn.Linear(32, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = prepare(model, optimizer, digits(), batch_size=256)
for _ in range(2):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
FIT = """
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
fit(model, digits(), cross_entropy, optimizer=optimizer, batch_size=256, epochs=2)
"""
IMPORTS = """
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from labkit.data import digits
from labkit.models import mlp
"""
SCRIPT = """
{imports}
from labkit import train
from labkit.train import fit, log, prepare

def main():
{body}

if __name__ == "__main__":
    train.run(main, **vars(train.parser("ddp").parse_args()))
"""

CASES = {
    "ddp": ("ddp", BODY, {"accumulate": 2, "clip": 0.5, "seed": 3}),
    "parameter_server": ("parameter_server", BODY, {"clip": 0.5}),
}


def script_of(body: str) -> str:
    return SCRIPT.format(imports=IMPORTS, body=textwrap.indent(body, "    "))


def words(options: dict[str, object]) -> list[str]:
    """Options as the command line has them."""
    return [
        word
        for name, value in options.items()
        for word in (f"--{name}", *([] if value is True else [str(value)]))
    ]


def launch(
    script: Path, *arguments: str, num_ranks: int = 2, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun."""
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"),
        str(num_ranks),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
    ]
    command = [*(launcher or torchrun), script.name, *arguments]
    # As on a machine without a kernel: a cell of the lab has set none of these.
    environment = {k: v for k, v in os.environ.items() if "RANK" not in k}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        command,
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )


def losses_of(path: Path) -> dict[int, float]:
    with path.open() as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


def largest_difference(path: Path, run: object) -> float:
    """Between the losses in a file and those of a run, of the same steps."""
    found = losses_of(path)
    table = run.mean_loss()  # type: ignore[attr-defined]
    of_cell = dict(zip(table["step"].tolist(), table["loss"].tolist(), strict=True))
    assert found
    assert found.keys() == of_cell.keys()
    return max(abs(found[step] - of_cell[step]) for step in found)


def compare(lab: Lab, folder: Path, case: str) -> float:
    strategy, body, options = CASES[case]
    run = lab.train(strategy, IMPORTS + body, live=False, **options)
    script = folder / "train.py"
    script.write_text(script_of(body))
    given = ["--strategy", strategy, *words(options), "--losses", "losses.csv"]
    done = launch(script, *given)
    assert done.returncode == 0, done.stderr
    return largest_difference(folder / "losses.csv", run)


@pytest.mark.parametrize("case", long_but(CASES, "ddp"))
def test_a_script_has_the_losses_of_the_cell(
    lab: Lab, tmp_path: Path, case: str
) -> None:
    assert compare(lab, tmp_path, case) == 0.0


def launch_by_hand(script: Path, *rank_0: str, **rank_1: Any) -> list[tuple[int, str]]:
    """Run a script as rank 0 with these arguments, and as rank 1 with `arguments`,
    from `cwd`, by the command `within`: as on another host. How each ended, and what
    it said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"arguments": rank_0, "cwd": script.parent, "within": ()}
    processes = []
    for rank, each in enumerate([given, {**given, **rank_1}]):
        environment = {k: v for k, v in os.environ.items() if "RANK" not in k}
        environment |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"RANK": f"{rank}", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        environment |= {"LOCAL_WORLD_SIZE": "1", "MASTER_PORT": f"{port}"}
        processes.append(
            subprocess.Popen(
                [*each["within"], sys.executable, str(script), *each["arguments"]],
                cwd=each["cwd"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
        )
    try:
        said = [each.communicate(timeout=100)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
    return [(each.returncode, t) for each, t in zip(processes, said, strict=True)]


@pytest.mark.long
def test_all_ranks_resume_where_rank_0_does(tmp_path: Path) -> None:
    script, elsewhere = tmp_path / "train.py", tmp_path / "elsewhere"
    elsewhere.mkdir()
    # Of the second epoch alone where it resumes: the first has no batch, and no loss.
    body = BODY + "    print('the last loss is', loss.item())\n"
    script.write_text(script_of(body))
    done = launch(script, "--losses", "whole.csv")
    assert done.returncode == 0, done.stderr
    script.write_text(script_of(body.replace("range(2)", "range(1)")))
    begun = launch_by_hand(script, "--checkpoint", "kept", cwd=elsewhere)
    assert [code for code, _ in begun] == [0, 0], begun
    assert not list(elsewhere.iterdir())
    script.write_text(script_of(body))
    options = ["--checkpoint", "kept", "--resume", "--losses", "rest.csv"]
    resumed = launch_by_hand(script, *options, cwd=elsewhere)
    assert [code for code, _ in resumed] == [0, 0], resumed
    assert [said.count("the last loss is") for _, said in resumed] == [1, 1]
    whole = losses_of(tmp_path / "whole.csv")
    rest = losses_of(tmp_path / "rest.csv")
    assert rest == {step: loss for step, loss in whole.items() if step > 6}


def test_ranks_that_are_refused_leave_no_thread(tmp_path: Path) -> None:
    """Of gloo's, which could abort the process as Python ends."""
    script = tmp_path / "train.py"
    script.write_text(
        "from pathlib import Path\n"
        "from labkit import train\n"
        "try:\n"
        "    train.run(lambda: None, 'ddp', checkpoint='/proc/labkit')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "    tasks = Path('/proc/self/task').iterdir()\n"
        "    print({(each / 'comm').read_text().strip() for each in tasks})\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100
    )
    error, threads = done.stdout.splitlines()
    assert "/proc/labkit" in error, done.stderr
    assert "python" in threads
    assert "gloo" not in threads


@pytest.mark.long
def test_what_the_ranks_do_not_have_in_common_is_refused(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "kept"
    folder.mkdir()
    script.write_text(script_of("raise AssertionError('it was called')"))
    private = ["sh", "-c", f'mount -t tmpfs none {folder} && exec "$@"', "sh"]
    within = ["unshare", "--user", "--map-root-user", "--mount", *private]
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"arguments": ["--checkpoint", str(folder), "--seed", "1"]},
            "rank 1 was launched with --seed 1, and rank 0 with --seed 0; launch",
        )
    ]
    if subprocess.run([*within, "true"], capture_output=True).returncode == 0:
        words = f"--checkpoint: {folder} is not the same folder for rank 1 on "
        cases.append(({"within": within}, words))
    for of_rank_1, words in cases:
        ends = launch_by_hand(script, "--checkpoint", str(folder), **of_rank_1)
        for code, text in ends:
            assert code == 1, text
            assert f"ValueError: {words}" in text
        assert not list(folder.iterdir())


@pytest.mark.release
def test_a_rank_that_fails_ends_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    body = BODY + "if train.rank == 1:\n    raise KeyError('at the end')\n"
    script.write_text(script_of(body))
    done = launch(script, "--losses", "losses.csv")
    assert done.returncode == 1
    assert "KeyError: 'at the end'" in done.stderr
    assert "in main" in done.stderr
    assert not (tmp_path / "losses.csv").exists()


def test_what_cannot_be_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main() -> None:
        raise AssertionError("it was called")

    with pytest.raises(ValueError, match=r"unknown strategy 'dpp'; .*mean ddp"):
        train.run(main, "dpp")
    with pytest.raises(ValueError, match="unknown option 'live'"):
        train.run(main, "single", live=False)
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        train.run(main, "single", precision="fp16")
    with pytest.raises(ValueError, match=r"there is no .*name a file in a folder"):
        train.run(main, "single", losses=tmp_path / "no" / "losses.csv")
    with pytest.raises(RuntimeError, match="world_size is known while"):
        train.world_size  # noqa: B018
    with pytest.raises(RuntimeError, match="prepare is known while"):
        train.prepare()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK=2 and WORLD_SIZE=2"):
        train.run(main, "ddp")
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ValueError, match="RANK=two: it is a whole number"):
        train.run(main, "ddp")


def test_a_parser_has_the_options_of_the_magic_line() -> None:
    parser = train.parser("zero3", accumulate=2, resume=True, config={"a": 1})
    given = vars(parser.parse_args(["--clip", "0.5", "--local_rank=1", "--no-resume"]))
    assert given["strategy"] == "zero3"
    assert (given["accumulate"], given["clip"], given["resume"]) == (2, 0.5, False)
    assert given["config"] == {"a": 1}
    taken = {"strategy", "losses", "local_rank", *train.OF_SCRIPTS}
    assert given.keys() == taken
    assert "fp16 needs a GPU" in parser.format_help()
    with pytest.raises(ValueError, match="unknown option 'accumulation'"):
        train.parser("ddp", accumulation=2)


def test_the_mean_counts_samples() -> None:
    ranks = [{1: (1.0, 3.0), 2: (4.0, 1.0)}, {1: (5.0, 1.0), 2: (float("nan"), 0.0)}]
    assert mean_by_step(ranks) == {1: 2.0, 2: 4.0}


def test_a_loss_that_one_rank_alone_logs_is_not_mixed_with_others() -> None:
    noticed: list[Weighted] = [{1: (1.0, 1.0)}, {1: (3.0, 1.0)}]
    logged: Weighted = {1: (7.0, 1.0)}
    none: Weighted = {}
    ranks = [{NOTICED_LOSS: each, "loss": none} for each in noticed]
    assert of_one_kind([*ranks, {NOTICED_LOSS: none, "loss": none}]) == noticed
    assert of_one_kind([{**ranks[0], "loss": logged}, ranks[1]]) == noticed
    assert of_one_kind([{**each, "loss": logged} for each in ranks]) == [logged] * 2
    alone = {NOTICED_LOSS: none, "loss": logged}
    assert of_one_kind([alone, {NOTICED_LOSS: none, "loss": none}]) == [logged]


@pytest.mark.parametrize("variable", ["LOCAL_SIZE", "LOCAL_WORLD_SIZE", None])
def test_a_script_on_several_hosts_knows_how_many_ranks_this_one_has(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 16}.items():
        monkeypatch.setenv(name, str(value))
    if variable is not None:  # DeepSpeed's launcher sets one, torchrun the other
        monkeypatch.setenv(variable, "8")
    assert find_place().local_world_size == (8 if variable else 0)
