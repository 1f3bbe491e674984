"""A run as a script: what it holds, and that it has the losses of the run."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kernels import Kernel
from test_train_module import BODY
from test_train_module import FIT
from test_train_module import IMPORTS
from test_train_module import launch
from test_train_module import losses_of

from labkit import Lab
from labkit.notebook.export.cells import Before
from labkit.notebook.export.cells import Ran
from labkit.notebook.export.cells import pushed
from labkit.notebook.export.script import RunFacts
from labkit.notebook.export.script import script_of
from labkit.train_options import TrainOptions

pytestmark = pytest.mark.timeout(300)

SETUP = """
from torch.nn.functional import cross_entropy
from labkit.data import digits
rate = 0.1

# Of one layer.
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x.flatten(1))

def unused():
    return rank
"""
TRAIN = """%%dist_train ddp --accumulate 2 --seed 3 --no-live
%cd .
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=rate)  # as pushed
model, optimizer, loader = prepare(model, optimizer, digits(), batch_size=512)
for x, y in loader:
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print("done")
"""


def facts(code: str, *ran: Any, function: str | None = None) -> RunFacts:
    before = Before(ran, len(ran), 1, function)
    return RunFacts("run-1", "ddp", code, 2, TrainOptions(), 0, {}, before)


def exported(code: str, *ran: Any) -> str:
    return script_of(facts(code, *ran), "train.py").text


def test_a_run_of_the_notebook_is_a_script(kernel: Kernel, tmp_path: Path) -> None:
    for code in ("%%dist\n" + SETUP, "rate = 0.5", "%dist_push rate", TRAIN):
        assert kernel.run(code).status == "ok"
    script = tmp_path / "train.py"
    assert kernel.run(f"%dist_export {script}").status == "ok"
    again = kernel.run(f"%dist_export {script}")
    assert "is there already; name another file" in again.stderr
    kernel.run(
        "__import__('labkit').current_lab().runs[-1].mean_loss()"
        f".to_csv({str(tmp_path / 'cell.csv')!r})"
    )
    text = script.read_text()
    assert "# left out: %cd ." in text
    assert "rate = 0.5" in text
    assert "rate = 0.1" not in text
    assert "# Of one layer.\nclass Net(" in text
    assert "unused" not in text
    assert 'parser("ddp", accumulate=2, seed=3)' in text
    done = launch(script, "--losses", "losses.csv")
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "cell.csv")
    expected = dict(zip(table["step"], table["loss"], strict=True))
    assert losses_of(tmp_path / "losses.csv") == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("single", {}),
        ("zero1", {"clip": 0.5}),
        ("zero2", {"precision": "bf16"}),
        ("zero3", {"accumulate": 2}),
        ("fsdp", {"precision": "bf16", "accumulate": 2}),
        ("hsdp", {"mesh": "dp_replicate=2,dp_shard=1"}),
        ("tensor", {}),
        ("pipeline", {"microbatches": 4}),
        ("parameter_server", {}),
    ],
)
def test_the_script_has_the_losses_of_the_run(
    lab: Lab, tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    body = FIT if strategy in ("tensor", "pipeline") else BODY
    run = lab.train(strategy, IMPORTS + body, live=False, **options)
    script = tmp_path / "train.py"
    run.export(script)
    done = launch(script, "--losses", "losses.csv")
    assert done.returncode == 0, done.stderr
    expected = run.mean_loss().set_index("step")["loss"].to_dict()
    assert losses_of(tmp_path / "losses.csv") == expected


def test_functions_that_use_the_cells_variables_find_them() -> None:
    helper = Ran("def score():\n    return model(batch), device", 1)
    text = exported("model = torch.nn.Linear(2, 2)\nbatch = 3\nscore()", helper)
    assert "    global batch, device, model\n" in text
    assert "    device = labkit.train.device\n" in text


def test_what_only_a_notebook_has_is_left_out() -> None:
    code = "%matplotlib inline\nimport matplotlib.pyplot as plt\nx = 1\nplt.plot(x)\nx"
    text = exported(code)
    assert "    # left out: %matplotlib inline" in text
    assert "    # left out: plt.plot(x)" in text
    assert "\nimport matplotlib" not in text


def test_strings_of_several_lines_stay_as_they_are() -> None:
    text = exported('x = """a\nb"""\nprint(x)')
    assert '    x = """a\nb"""\n' in text


def test_what_is_made_on_ranks_is_made_in_main_and_seeded_again() -> None:
    earlier = Ran("torch.manual_seed(5)\nx = torch.rand(3, device=device)", 1)
    found = script_of(facts("print(x)", earlier), "train.py")
    assert "    x = torch.rand(3, device=device)\n" in found.text
    assert "    labkit.train.reseed()" in found.text
    assert "x: made again" in found.notes[0]


@pytest.mark.parametrize(
    ("code", "ran", "words"),
    [
        ("print(nothing)", [], "uses nothing, and no cell is known"),
        ("%run train.py --epochs 2", [], "launch that by itself"),
        ("x = !ls", [], "no Python that a script could have"),
        ("print(y)", [Ran("y = 1", 4, ranks=(0,))], "cell 4, which ran on rank 0"),
        (
            "print(model)",
            [Ran("model, o, l = prepare(a, b, c)", 4, "ddp")],
            "made by a training run, in cell 4",
        ),
        ("print(d)", [pushed("d", object(), 2)], "came from the notebook"),
        ("await x", [Ran("x = 1", 1)], "cannot be the function that a script calls"),
    ],
)
def test_what_cannot_be_a_script_is_said_in_words(
    code: str, ran: list[Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        exported(code, *ran)


def test_a_file_that_cannot_be_is_said_before(lab: Lab, tmp_path: Path) -> None:
    run = lab.train("single", "x = 1", live=False)
    with pytest.raises(ValueError, match="it is a folder"):
        run.export(tmp_path)
    file = tmp_path / "train.py"
    file.write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        lab.export(file)
    assert file.read_text() == "mine"
    assert lab.export(file, run.name, force=True) == []
    assert "x = 1" in file.read_text()
