"""The notebooks' exercises have solutions, and their scripts run under torchrun."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import LONG
from marks import RELEASE
from marks import in_suites

from labkit import Lab
from labkit.course import check
from labkit.course.exercise import EXERCISES

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOLUTIONS = ROOT / "tests" / "solutions"
DIFF = re.compile(r"^```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)


def cells_of(notebook: Path, kind: str) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def diff_of(notebook: Path) -> str:
    """What its last section changes to make a script of it; "" where there is none."""
    found = DIFF.findall("\n".join(cells_of(notebook, "markdown")))
    return found[-1] if found else ""


def script_of(notebook: Path) -> str:
    """What those changes make of it."""
    lines = diff_of(notebook).splitlines()
    return "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))


def outputs_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join("".join(output.get("text", [])) for output in outputs)


LONG_ONES = ("fewest_gpus", "lower_loss", "two_launchers")
"""Exercises whose solutions train, or forecast, for half a minute or more."""
WITH_SCRIPT = [each for each in NOTEBOOKS if diff_of(each)]


@pytest.mark.parametrize("notebook", WITH_SCRIPT, ids=lambda path: path.stem)
def test_the_diff_takes_its_lines_from_the_notebook(notebook: Path) -> None:
    known = {line.strip() for line in "\n".join(cells_of(notebook, "code")).split("\n")}
    lines = diff_of(notebook).splitlines()
    theirs = {line[1:].strip() for line in lines if not line.startswith("+")}
    assert theirs - known - {""} == set()


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "notebook",
    [
        # DeepSpeed compiles an operator, once on a machine: a minute or two.
        path
        if number == 0 and "import deepspeed" not in diff_of(path)
        else pytest.param(path, marks=LONG if number % 8 == 0 else RELEASE)
        for number, path in enumerate(WITH_SCRIPT)
    ],
    ids=lambda path: path.stem,
)
@pytest.mark.long
def test_the_script_gives_what_the_notebook_shows(
    notebook: Path, tmp_path: Path
) -> None:
    """The last line that the script prints is among the notebook's saved outputs."""
    lines = diff_of(notebook).splitlines()
    if " import deepspeed" in lines and shutil.which("c++") is None:
        pytest.skip("in a script DeepSpeed compiles an operator; there is no compiler")
    script = tmp_path / "train.py"
    script.write_text(script_of(notebook))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=270,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] in outputs_of(notebook)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_an_exercise_is_in_a_notebook_without_its_solution(exercise: str) -> None:
    code = "\n".join("\n".join(cells_of(each, "code")) for each in NOTEBOOKS)
    assert f'check("{exercise}"' in code
    solution = (SOLUTIONS / f"{exercise}.py").read_text().strip()
    assert solution not in code


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "exercise", in_suites(EXERCISES, test={*EXERCISES} - {*LONG_ONES})
)
def test_a_solution_solves_its_exercise(
    exercise: str, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run((SOLUTIONS / f"{exercise}.py").read_text())
    assert f"{exercise}: solved: " in capsys.readouterr().out


def test_an_unknown_exercise_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="there is no exercise 'nothing'; there are "):
        check("nothing", lambda: 0)


def told_of(capsys: pytest.CaptureFixture[str], exercise: str, *answer: Any) -> str:
    check(exercise, *answer)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("exercise", "answer", "told"),
    [
        ("fewest_gpus", [("zero3", 8), (32, "zero3")], 'such as (8, "zero2")'),
        ("fewest_gpus", [(0, "zero3"), (32, "zero3")], "give a number of GPUs and"),
        ("fewest_gpus", [8, 32], "for 7 B it is 8; give a number of GPUs and"),
        ("name_rank_and_cause", [{"first": 0}], "for 'first' it has 0; give a rank"),
        ("name_rank_and_cause", [{"first": ("data", 0)}], 'such as (0, "data")'),
        ("name_rank_and_cause", [{}], 'one of "data", "compute", "asleep"'),
        ("best_in_a_minute", [{"lr": "0.1", "width": 64}], "lr is '0.1' and width 64"),
        ("best_in_a_minute", [{"lr": 0.1, "width": 64.0}], "a whole width of 512 or"),
        ("best_bucket", ["2"], "bucket_cap_mb is '2'; choose a number of MiB"),
        ("best_bucket", [0], "bucket_cap_mb is 0; choose a number of MiB"),
        ("lower_loss", [64, 1e-3], "rate is 0.001; give a function of the progress"),
        ("fill_the_bubble", [lambda rank, p, m: None], "order returns nothing"),
        (
            "fill_the_bubble",
            [lambda rank, p, m: [("forward", n) for n in range(m)]],
            "it has ('backward', 0) 0 times",
        ),
        (
            "fill_the_bubble",
            [
                lambda rank, p, m: [
                    (kind, n) for kind in ("forward", "backward") for n in range(m + 1)
                ]
            ],
            "there is no pass ('forward', 4)",
        ),
    ],
)
def test_an_answer_of_the_wrong_kind_hears_what_to_give(
    exercise: str, answer: list[Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told_of(capsys, exercise, *answer)
    assert said.startswith(f"{exercise}: not right: ")
    assert told in said


def test_a_mean_of_another_shape_is_refused_with_the_one_expected(lab: Lab) -> None:
    for returned in ("None", "gradient[:10]"):
        with pytest.raises(Exception, match=r"has to return the mean of the gradients"):
            lab.run(
                "from labkit.course import check\n"
                'check("ninety_at_five_percent", '
                f"lambda gradient, memory: {returned})"
            )


def test_a_batch_that_leaves_a_rank_without_a_sample_is_not_right(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
from labkit.course import check
for size in (1, 0, 10_000):
    check("lower_loss", batch_size=size, rate=lambda progress: 1e-3)
"""
    lab.run(code)
    told = capsys.readouterr().out
    for size in (1, 0, 10_000):
        assert f"lower_loss: not right: a batch has {size} samples; choose" in told


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda hosts, ranks, size, strategy: size, "not right: ddp on 1 x 8 ranks"),
        (lambda hosts, ranks, size, strategy: 0, "not right: ddp on 2 x 2 ranks"),
        (
            lambda hosts, ranks, size, strategy: 1.5 * size * (hosts > 1),
            "not solved yet: at worst it is 1.98 times off, for fsdp on 16 x 8 ranks",
        ),
    ],
)
def test_what_hosts_send_is_counted(
    answer: Callable[[int, int, float, str], float],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check("bytes_between_hosts", answer)
    assert told in capsys.readouterr().out
