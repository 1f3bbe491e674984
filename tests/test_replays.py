"""What a cell that resumes runs until it is where the run was."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from labkit.rank.engine.replays import NO_BATCHES
from labkit.rank.engine.replays import REPLAY_NAME
from labkit.rank.engine.replays import Replay

PREPARE = "model, optimizer, loader = prepare()\n"
EPOCHS = PREPARE + (
    "best = 9.0\n"
    "for epoch in range(3):\n"
    "    stages.append(epoch)\n"
    "    total = seen = 0\n"
    "    for batch in loader:\n"
    "        loss = batch\n"
    "        total += loss\n"
    "        seen += 1\n"
    "    print(epoch, total / seen)\n"
    "    mean = total / seen\n"
    "    rates.append(0.9 ** epoch)\n"
    "    with torch.no_grad():\n"
    "        evaluations.append(epoch)\n"
    "    if mean < best:\n"
    "        best = mean\n"
    "print('last', loss)\n"
)


class Backward(float):
    """A loss."""

    def backward(self) -> None:
        pass


class Loop:
    """Runs a cell whose loader has batches in its last passes alone."""

    def __init__(
        self, batches: list[list[float]], *, num_former: int = 2, **variables: Any
    ) -> None:
        """The run was past `num_former` passes."""
        self.batches = iter(batches)
        self.num_former = num_former
        self.num_passes = self.num_batches = 0
        self.printed: list[tuple[Any, ...]] = []
        self.notes: list[str] = []
        self.names: dict[str, Any] = {
            "prepare": lambda: (None, None, self),
            "print": lambda *values: self.printed.append(values),
            "torch": __import__("torch"),
            **{name: [] for name in ("stages", "rates", "evaluations")},
            **variables,
        }
        self.replay = self.names[REPLAY_NAME] = Replay(
            is_before=lambda: self.num_passes <= self.num_former,
            has_batches=lambda: self.num_batches > 0,
            num_passes=lambda: self.num_passes,
            note=lambda text: self.notes.append(text),
        )

    def __iter__(self) -> Any:
        self.num_passes += 1
        for each in next(self.batches):
            self.num_batches += 1
            yield each

    def run(self, code: str) -> dict[str, Any]:
        tree = self.replay.visit(ast.parse(code))
        exec(compile(tree, "<cell>", "exec"), self.names)
        return self.names


def test_a_loop_without_batches_shows_and_evaluates_nothing() -> None:
    loop = Loop([[], [], [1.0, 3.0]])
    names = loop.run(EPOCHS)
    assert loop.printed == [(2, 2.0), ("last", 3.0)]
    assert names["best"] == 2.0
    assert names["stages"] == [0, 1, 2]
    assert names["rates"] == pytest.approx([1.0, 0.9, 0.81])
    assert names["evaluations"] == [2]


def test_a_loop_with_batches_is_as_it_was() -> None:
    loop = Loop([[4.0], [2.0], [1.0, 3.0]], num_former=0)
    exec(EPOCHS, as_it_was := Loop([[4.0], [2.0], [1.0, 3.0]]).names)
    names = loop.run(EPOCHS)
    for name in ("best", "stages", "rates", "evaluations", "loss", "mean"):
        assert names[name] == as_it_was[name]
    assert len(loop.printed) == 4


def test_what_follows_the_pass_of_the_checkpoint_is_not_skipped_but_lacks_batches() -> (
    None
):
    loop = Loop([[], [], [1.0, 3.0]], num_former=1)
    names = loop.run(EPOCHS)
    assert loop.printed == [(2, 2.0), ("last", 3.0)]
    assert names["evaluations"] == [1, 2]


def test_a_loop_that_has_nothing_left_to_do_ends_well() -> None:
    loop = Loop([[], [], []])
    assert loop.run(EPOCHS)["best"] == 9.0
    assert loop.printed == []


def test_an_error_after_the_first_batch_ends_the_cell() -> None:
    loop = Loop([[], [1.0], [2.0]])
    with pytest.raises(ZeroDivisionError):
        loop.run(EPOCHS.replace("rates.append", "if epoch: 1 / 0\n    rates.append"))


def test_an_error_that_no_batch_would_mend_ends_the_cell() -> None:
    loop = Loop([[], [], [1.0]])
    with pytest.raises(NameError, match="stages_of_all"):
        loop.run(EPOCHS.replace("stages.", "stages_of_all."))


FUNCTION = """
def train(loader):
    {first}
    total = seen = 0
    for batch in loader:
        total += batch
        seen += 1
    return total / seen
"""
CALLS = PREPARE + (
    "for epoch in range(3):\n    mean = train(loader)\n    print(epoch, mean)\n"
)


def define(loop: Loop, path: Path, text: str) -> None:
    path.write_text(text)
    exec(compile(text, str(path), "exec"), loop.names)


def test_a_function_of_an_earlier_cell_may_lack_batches(tmp_path: Path) -> None:
    loop = Loop([[], [], [1.0, 3.0]])
    define(loop, tmp_path / "cell.py", FUNCTION.format(first="pass"))
    loop.run(CALLS)
    assert loop.printed == [(2, 2.0)]


@pytest.mark.parametrize(
    "text",
    [
        FUNCTION.format(first="pass").replace(
            "    return total / seen",
            "    mean = total / seen\n    scheduler.step()\n    return mean",
        ),
        "def train(loader):\n    for epoch in range(3):\n        seen = 0\n"
        "        for batch in loader:\n            batch.backward()\n"
        "        print(1 / seen)\n",
        FUNCTION.format(first="pass").replace("train", "an_epoch")
        + "def train(loader):\n    for epoch in range(3):\n        an_epoch(loader)\n",
    ],
    ids=["a step of a scheduler", "its further epochs", "those of a function"],
)
def test_an_error_that_would_leave_out_training_ends_the_cell(
    tmp_path: Path, text: str
) -> None:
    loop = Loop([[], [], [1.0, 3.0]])
    define(loop, tmp_path / "cell.py", text)
    with pytest.raises(ZeroDivisionError) as caught:
        loop.run(CALLS)
    assert NO_BATCHES in caught.value.__notes__


AFTER_PASS = PREPARE + (
    "for epoch in range(3):\n"
    "    for batch in loader:\n"
    "        loss = batch\n"
    "        loss.backward()\n"
    "    {line}\n"
    "    print(epoch)\n"
)


@pytest.mark.parametrize(
    ("line", "is_noted"),
    [
        ("scheduler.step(loss)", True),
        ("if loss < 0.1: break", True),
        ("optimizer.param_groups[0]['lr'] = loss", True),
        ("history['loss'].append(loss)", False),
        ("print(loss)", False),
        ("mean = loss / 2; print(mean)", False),
    ],
)
@pytest.mark.parametrize("num_former", [1, 2])
def test_what_is_left_out_where_the_run_was_is_noted(
    line: str, num_former: int, *, is_noted: bool
) -> None:
    loop = Loop([[], [], []], num_former=num_former)
    loop.run(AFTER_PASS.format(line=line))
    assert bool(loop.notes) == is_noted
    assert all("line 6: " in each for each in loop.notes)


def test_what_a_function_returns_is_not_noted() -> None:
    loop = Loop([[], [], [Backward(1.0), Backward(3.0)]], num_former=1)
    text = FUNCTION.format(first="pass")
    text = text.replace("+= 1\n", "+= 1\n        batch.backward()\n")
    loop.run(text + CALLS)
    assert loop.notes == []


def test_a_name_that_is_set_again_after_a_pass_needs_no_batch() -> None:
    loop = Loop([[], [], []])
    loop.run(AFTER_PASS.format(line="loss = 0.1 ** epoch\n    rates.append(loss)"))
    assert loop.names["rates"] == pytest.approx([1.0, 0.1, 0.01])


def test_names_that_expressions_and_patterns_set_may_be_lacking() -> None:
    more = (
        "if (double := 2 * loss) > 9: pass\n    match loss:\n"
        "        case [first, *rest]: pass\n        case last: pass\n"
        "    rates.append((double, last))"
    )
    loop = Loop([[], [], [Backward(3.0)]])
    loop.run(AFTER_PASS.format(line=more))
    assert loop.names["rates"] == [(6.0, 3.0)]


@pytest.mark.parametrize(
    "head", ["match 1:\n  case 1:\n", "try:\n  1 / 0\nexcept Exception:\n"]
)
def test_passes_within_a_pattern_or_a_handler_are_seen(head: str) -> None:
    loop = Loop([[], [], [1.0, 3.0]])
    lines = EPOCHS.removeprefix(PREPARE).splitlines()
    loop.run(PREPARE + head + "\n".join(f"    {line}" for line in lines))
    assert loop.printed == [(2, 2.0), ("last", 3.0)]


@pytest.mark.parametrize("line", ["data.update(epoch)", "stage = timetable(epoch)"])
def test_what_may_be_no_output_is_done_after_each_pass(line: str) -> None:
    done: list[int] = []
    data = SimpleNamespace(update=done.append)
    loop = Loop([[], [], []], data=data, timetable=done.append)
    loop.run(AFTER_PASS.format(line=line))
    assert done == [0, 1, 2]


def test_a_function_that_fails_before_its_pass_ends_the_cell() -> None:
    loop = Loop([[], [], [1.0, 3.0]])
    exec(FUNCTION.format(first="missing"), loop.names)
    with pytest.raises(NameError, match="missing"):
        loop.run(CALLS)


def test_a_function_of_the_cell_itself_is_rewritten() -> None:
    loop = Loop([[], [], [1.0, 3.0]])
    body = "\n".join(f"    {line}" for line in EPOCHS.splitlines())
    loop.run(f"def main():\n{body}\nmain()")
    assert loop.printed == [(2, 2.0), ("last", 3.0)]


def test_a_function_is_rewritten_with_the_lines_of_its_file(tmp_path: Path) -> None:
    loop = Loop([[], [], [1.0, 3.0]])
    body = "\n".join(f"    {line}" for line in EPOCHS.splitlines())
    text = f"# A file.\n\ndef main():\n{body}\n    1 / 0\n"
    path = tmp_path / "file.py"
    path.write_text(text)
    exec(compile(text, str(path), "exec"), loop.names)
    with loop.replay.of_function(loop.names["main"]) as main:
        with pytest.raises(ZeroDivisionError) as caught:
            main()
        assert REPLAY_NAME in loop.names
    assert loop.printed == [(2, 2.0), ("last", 3.0)]
    assert caught.traceback[-1].lineno + 1 == text.count("\n")
    assert REPLAY_NAME not in loop.names
    with loop.replay.of_function(print) as same:
        assert same is print
    path.write_text(text.replace("range(3)", "range(4)").replace("best", "worst"))
    with loop.replay.of_function(loop.names["main"]) as same:
        assert same is loop.names["main"]  # its file has changed


def test_a_function_that_is_rewritten_keeps_its_defaults(tmp_path: Path) -> None:
    loop = Loop([[], [], [1.0, 3.0]], rate=0.1)
    body = "\n".join(f"    {line}" for line in EPOCHS.splitlines())
    text = (
        "from __future__ import annotations\n"
        f"def main(rate=rate, *, more=[]):\n{body}\n    more.append(rate)\n"
        "    def inner(x: rate): pass\n"
    )
    define(loop, tmp_path / "file.py", text)
    loop.names["rate"] = 0.5
    with loop.replay.of_function(loop.names["main"]) as main:
        main()
    assert loop.names["main"].__kwdefaults__ == {"more": [0.1]}
    assert loop.printed == [(2, 2.0), ("last", 3.0)]


def test_what_follows_a_call_that_trains_and_sets_nothing_shows_nothing(
    tmp_path: Path,
) -> None:
    loop = Loop([[], [], [1.0, 3.0]])
    code = (
        "@torch.no_grad()\ndef test():\n    print('test')\n"
        "for epoch in range(3):\n    train(loader)\n    test()\n"
    )
    define(loop, tmp_path / "cell.py", FUNCTION.format(first="pass"))
    loop.run(PREPARE + code)
    assert loop.printed == [("test",)]


TRAINER = """
class Trainer:
    def __init__(self, loader):
        self.loader, self.losses = loader, []
    def train_epoch(self):
        total = seen = 0
        for batch in self.loader:
            self.backward()
            total += batch
            seen += 1
        return total / seen
    def backward(self):
        loss.backward()
    @torch.no_grad()
    def validate(self):
        print('validate')
        return 1.0
    def fit(self):
        for epoch in range(3):
            mean = self.train_epoch()
            found = self.validate()
            self.losses.append(mean)
            print(f'{epoch} {mean:.1f} {found:.1f}')
trainer = Trainer(loader)
trainer.fit()
"""


@pytest.mark.parametrize("called", ["self.backward()", "loss.backward()"])
def test_a_method_of_the_cell_that_trains_is_as_a_pass(called: str) -> None:
    loop = Loop([[], [], [1.0, 3.0]], loss=torch.zeros(1, requires_grad=True).sum())
    loop.run(PREPARE + TRAINER.replace("self.backward()\n    ", f"{called}\n    "))
    assert loop.printed == [("validate",), ("2 2.0 1.0",)]
    assert loop.names["trainer"].losses == [2.0]


ASKING = """
batches = iter(loader)
for step in range(2):
    try:
        batch = next(batches)
    except StopIteration:
        stages.append(step)
        batches = iter(loader)
        batch = next(batches)
    print(step, batch)
"""


def test_a_loader_that_keeps_its_name_is_no_pass() -> None:
    loop = Loop([[], [], [1.0, 3.0]], model=None, sgd=None, loader=None)
    loop.names["prepare"] = lambda model, sgd, loader: (None, None, loop)
    loop.run("model, sgd, loader = prepare(model, sgd, loader)\nof = [loader]\nof[0]")
    assert loop.names["of"] == [loop]


@pytest.mark.parametrize("left", [[], [7.0]])
def test_a_loop_that_asks_for_the_next_pass_has_that_of_the_checkpoint(
    left: list[float],
) -> None:
    loop = Loop([[], [], left, [1.0, 3.0]])
    loop.run(PREPARE + ASKING)
    assert loop.printed == [*enumerate([*left, 1.0, 3.0][:2])]


def test_a_loader_that_has_no_batches_at_all_is_not_asked_forever() -> None:
    loop = Loop([[], [], [], []])
    with pytest.raises(StopIteration):
        loop.run(PREPARE + ASKING)
