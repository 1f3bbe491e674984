"""A run as a script: what it holds, and that it has the losses of the run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from kernels import Kernel
from marks import in_suites
from test_train_module import BODY
from test_train_module import FIT
from test_train_module import IMPORTS
from test_train_module import largest_difference
from test_train_module import launch
from test_train_module import losses_of

from labkit import Lab
from labkit import RankError
from labkit.notebook.export import templates
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
    log(part=0.5)
if rank == 0:
    print("done")
"""


RAW = """
model = torch.nn.parallel.DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = digits()[:256]
for step in range(8):
    part = slice(rank, None, dist.get_world_size())
    loss = cross_entropy(model(x[part]), y[part])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def facts(code: str, *ran: Any, function: str | None = None) -> RunFacts:
    before = Before(ran, len(ran), 1, function)
    return RunFacts("run-1", "ddp", code, 2, TrainOptions(), 0, {}, before)


def exported(code: str, *ran: Any) -> str:
    return script_of(facts(code, *ran), "train.py").text


@pytest.mark.parametrize(
    ("ranks_per_host", "commands"),
    [
        ((2,), ["--nproc-per-node 2"]),
        ((1, 1), ["--nnodes 2 --nproc-per-node 1"]),
        ((1, 2), ["--nnodes 2 --nproc-per-node 1", "--nnodes 2 --nproc-per-node 2"]),
    ],
)
def test_a_script_says_how_it_is_launched_on_the_hosts_of_the_run(
    ranks_per_host: tuple[int, ...], commands: list[str]
) -> None:
    run = replace(facts("pass"), ranks_per_host=ranks_per_host)
    lines = script_of(run, "train.py").text.splitlines()
    found = [line.strip() for line in lines if "torchrun" in line]
    meet = " --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29400"
    meet *= len(ranks_per_host) > 1
    end = f"{meet} train.py --losses losses.csv"
    assert found == [f"torchrun {each}{end}" for each in commands]


@pytest.mark.long
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
    assert 'parser.add_argument("--seed", type=int, default=3)' in text
    assert style_of(text) == "plain"
    done = launch(script, "--losses", "losses.csv")
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "cell.csv")
    expected = dict(zip(table["step"], table["loss"], strict=True))
    assert losses_of(tmp_path / "losses.csv") == expected


CASES = [
    ("single", BODY, "labkit", {}),
    ("ddp", FIT, "plain", {"accumulate": 2, "clip": 0.5}),
    ("ddp", BODY, "labkit", {"precision": "bf16", "comm": "powersgd"}),
    ("zero1", BODY, "plain", {"clip": 0.5}),
    ("zero2", BODY, "plain", {"accumulate": 2}),
    ("zero2", BODY, "labkit", {"precision": "bf16"}),
    ("zero3", FIT, "plain", {"seed": 3}),
    ("fsdp", BODY, "plain", {"accumulate": 2, "clip": 0.5}),
    ("fsdp", BODY, "labkit", {"precision": "bf16"}),
    ("hsdp", BODY, "labkit", {"mesh": "dp_replicate=2,dp_shard=1"}),
    ("tensor", FIT, "labkit", {}),
    ("pipeline", FIT, "labkit", {"microbatches": 4, "schedule": "gpipe"}),
    ("parameter_server", BODY, "labkit", {"clip": 0.5}),
    ("raw", RAW, "labkit", {}),
]


@pytest.mark.parametrize(
    ("strategy", "body", "style", "options"),
    in_suites(CASES, test=[], long=[CASES[1], CASES[7]]),
)
def test_the_script_has_the_losses_of_the_run(
    lab: Lab, tmp_path: Path, strategy: str, body: str, style: str, options: Any
) -> None:
    run = lab.train(strategy, IMPORTS + body, live=False, **options)
    script = tmp_path / "train.py"
    notes = run.export(script)
    assert style_of(script.read_text()) == style
    assert any("not plain PyTorch" in each for each in notes) == (style == "labkit")
    done = launch(script, "--losses", "losses.csv")
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr  # threads that nobody has ended
    found = largest_difference(tmp_path / "losses.csv", run)
    print(f"{strategy}, {style}, {options}: largest difference {found:g}")
    assert found == 0.0


def style_of(script: str) -> str:
    return "labkit" if "import labkit.train" in script else "plain"


@pytest.mark.release
def test_a_script_goes_on_where_a_cell_or_itself_has_stopped(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the losses of a run that did not stop."""
    stops = "        if loader.position.batch == int(os.environ.get('STOP_AT', 0)):\n"
    code = (
        IMPORTS + "import os\n" + BODY + stops + "            raise InterruptedError\n"
    )
    whole = lab.train("fsdp", code, live=False).mean_loss().set_index("step")["loss"]
    lab.run("import os; os.environ['STOP_AT'] = '5'")
    kept = tmp_path / "kept"
    with pytest.raises(RankError, match="InterruptedError"):
        lab.train("fsdp", code, live=False, checkpoint=kept, every=2)
    lab.run("del os.environ['STOP_AT']")
    script = tmp_path / "train.py"
    notes = lab.export(script)
    assert f"--checkpoint {kept} --resume goes on from there" in notes[0]
    assert "not plain PyTorch: a run with checkpoints" in notes[1]

    def go_on(folder: str) -> None:
        given = ["--checkpoint", folder, "--resume", "--losses", "losses.csv"]
        done = launch(script, *given)
        assert done.returncode == 0, done.stderr
        found = losses_of(tmp_path / "losses.csv")
        assert 2 < min(found) <= 5
        assert max(found) == 12
        assert found == {step: whole[step] for step in found}

    go_on("kept")
    monkeypatch.setenv("STOP_AT", "5")
    stopped = launch(script, "--checkpoint", "own", "--every", "2")
    assert "InterruptedError" in stopped.stderr
    monkeypatch.delenv("STOP_AT")
    go_on("own")


EVEN = frozenset({(32, 32)})
LOOP = """model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=64)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    log(step=step, accuracy=0.5)
"""
GIVEN = Ran(
    "from torch.utils.data import DataLoader\nNet, data, cross_entropy, f = 1, 2, 3, 4",
    1,
)
LOG = "log(step=step, accuracy=0.5)"


def plain(code: str, strategy: str = "ddp", **more: Any) -> str:
    more = {"strategy": strategy, "samples": EVEN} | more
    return script_of(replace(facts(code, GIVEN), **more), "train.py", "plain").text


def test_a_plain_script_is_one_that_readers_of_the_tutorials_know() -> None:
    text = plain(LOOP)
    assert "import labkit" not in text
    assert "model = DistributedDataParallel(model.to(device), " in text
    assert "    loader = DataLoader(data, batch_sampler=sampler)\n" in text
    assert "    for step, (x, y) in enumerate(loader):\n        x, y = x.to(" in text
    assert "(loss / args.accumulate).backward()\n" in text
    assert "        # left out: log(step=step, accuracy=0.5)" in text.replace(
        "pass  ", ""
    )
    assert text.count("zero_grad(") == 1
    assert "sampler.weight" not in text
    assert "dist.destroy_process_group()" in text
    uneven = plain(LOOP, samples=EVEN | {(16, 15)})
    assert "(loss * weight / args.accumulate).backward()\n" in uneven
    sharded = plain(LOOP, "fsdp")
    assert sharded.index("fully_shard(model)") < sharded.index(
        "optimizer = torch.optim"
    )
    partitioned = plain(LOOP, "zero2")
    assert '"stage": 2,' in partitioned
    assert "model.backward(loss)" in partitioned
    assert "zero_grad()" not in partitioned


@pytest.mark.parametrize(
    "code", [templates.EVEN_BATCHES, templates.UNEVEN_BATCHES], ids=["even", "uneven"]
)
def test_a_plain_script_stops_where_the_dataset_grows(code: str) -> None:
    group = SimpleNamespace(get_rank=lambda: 1, get_world_size=lambda: 2)
    names: dict[str, Any] = {"dist": group, "torch": torch, "Sampler": object}
    exec(code, names)
    data = [*range(8)]
    batches = names["RankBatches"](data, 4, shuffle=False, accumulate=1, seed=0)
    assert list(batches) == [[2, 3], [6, 7]]
    data += [8, 9, 10, 11]
    with pytest.raises(
        RuntimeError, match="12 samples, and had 8: export the run with"
    ):
        list(batches)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("batch_size=64", "batch_size=64, weigh=len", "prepare has further arguments"),
        (", batch_size=64", "", "called without batch_size"),
        ("data, ", "DataLoader(data), ", "there is 'DataLoader' in its cells"),
        ("model = Net()", "model = Net().compile()", "in its cells"),
        ("accuracy=0.5", "loss=0.5", "logs a loss of its own"),
        (LOG, "stop_early(1)", "the cell calls stop_early"),
        ("optimizer.step()", "optimizer.step(f)", r"one optimizer.step\(\)"),
        ("optimizer.step()", "optimizer.step(); print()", "are on one line"),
        (LOG, "if step: break", "leave out a part"),
        (LOG, "model.eval()", "another way than the plain loop"),
        (LOG, "model(x)", "does not call model once"),
        (LOG, "weight = 1", "has its own weight"),
        (LOG, "log = 1", "has its own log"),
        ("(x, y) in", "[x, *y] in", "does not take a batch apart"),
        ("x), y).backward()", "x), y).backward(y)", r"one backward\(\)"),
        ("for step", "for x, y in loader:\n    f(x)\nfor step", "is not one loop over"),
        (LOG, "torch.autograd.grad(f, x)", "there is 'autograd.grad' in its cells"),
        (LOG, "rank = 8", "has its own rank"),
        (LOG, "sum = x", "has its own sum"),
        (LOG, "if step:\n        f(1); log(step=1)", "a call of log shares its line"),
        (LOG, "step and log(step=step)", "a call of log is a part"),
        ("model = Net()", "from math import *\nmodel = Net()", "imports \\*"),
        ("enumerate(loader)", "enumerate(f(loader))", "over more than the loader"),
    ],
)
def test_what_is_not_certain_is_not_written_in_plain_pytorch(
    old: str, new: str, words: str
) -> None:
    code = LOOP.replace(old, new)
    assert code != LOOP
    with pytest.raises(ValueError, match=f"in plain PyTorch: .*{words}"):
        plain(code)
    script = script_of(replace(facts(code, GIVEN), samples=EVEN), "train.py")
    assert "not plain PyTorch" in script.notes[-1]
    assert "not plain PyTorch" in " ".join(script.text.split())
    assert style_of(script.text) == "labkit"


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, torch.nn as nn, json",
        "import torch.distributed as dist\nimport torch.utils.data",
        "from torch import nn, optim\nfrom torch.utils.data import DataLoader, Subset",
    ],
)
def test_a_cell_may_import_what_the_script_has_for_itself(imports: str) -> None:
    assert style_of(plain(f"{imports}\n{LOOP}")) == "plain"
    with pytest.raises(ValueError, match="has its own nn"):
        plain(f"{imports}\nimport numpy as nn\n{LOOP}")


ALIASES = """part = f(1)
model = Net(part)
given = []
for each in model.parameters():
    given.append(each)
"""


@pytest.mark.parametrize("name", ["part", "given"])
def test_a_loop_that_uses_parts_of_the_model_by_other_names_is_not_plain(
    name: str,
) -> None:
    code = LOOP.replace("model = Net()\n", ALIASES)
    plain(code)
    with pytest.raises(ValueError, match=f"{name}, which the loop uses, may share"):
        plain(code.replace(LOG, f"f({name})"))
    of_parameters = code.replace("SGD(model.parameters()", "SGD(given")
    plain(of_parameters)
    for strategy in ("fsdp", "zero2"):
        with pytest.raises(ValueError, match="is not made right before prepare"):
            plain(of_parameters, strategy)
    with pytest.raises(ValueError, match="DeepSpeed replaces Adagrad"):
        plain(code.replace("SGD(", "Adagrad("), "zero2")


def test_a_fit_is_written_out_where_its_arguments_can_be() -> None:
    code = """model = Net()
fit(
    model, data, cross_entropy,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch_size=64,
)
"""
    text = plain(code, "fsdp")
    assert "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n" in text
    assert text.index("shard(model)\n    fully") < text.index("optimizer = torch")
    with pytest.raises(ValueError, match="with a model that has no name"):
        plain(code.replace("model, data", "Net(), data"))
    with pytest.raises(ValueError, match="the loss function takes no target"):
        plain(f"def cross_entropy(out):\n    return out.mean()\n{code}")


def test_what_a_loop_makes_of_a_batch_does_not_change_what_it_counts_for() -> None:
    text = plain(
        LOOP.replace("    optimizer.zero_grad()", "    x = x.T", 1)
        + "    optimizer.zero_grad()\n"
    )
    assert "        num_samples = len(x)\n        is_last" in text
    assert "step_losses.append((loss.detach(), num_samples))" in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"strategy": "hsdp"}, "strategy hsdp needs labkit.train"),
        ({"samples": frozenset()}, "not known how many samples"),
        ({"samples": frozenset({(1, 0)})}, "a batch has 1 samples for 2 parts"),
        ({"samples": frozenset({(3, 1)})}, "a batch has 4 samples for 2 parts"),
        ({"options": TrainOptions(precision="bf16")}, "--precision needs labkit"),
        ({"config": {"static_graph": True}}, "--config needs labkit.train"),
        ({"checkpoints": "kept"}, "a run with checkpoints needs"),
    ],
)
def test_options_of_labkits_own_need_labkit(more: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plain(LOOP, **more)


def test_a_profiled_block_is_left_as_it_is() -> None:
    blocks = "with profile():\n    x = 1\nwith open('a') as f, profile():\n    y = 2"
    text = exported(blocks)
    left_out = ":  # left out: profile()\n        "
    assert f"    with contextlib.nullcontext(){left_out}x = 1" in text
    assert f"    with open('a') as f{left_out}y = 2" in text
    own = "from torch.profiler import profile\nwith profile():\n    x = 1"
    assert "    with profile():\n" in exported(own)


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


def test_a_counter_that_a_loop_begins_is_the_cells_own() -> None:
    code = "for epoch in range(2):\n    right = 0\n    right += epoch\nprint(right)"
    assert "right = 5" not in exported(code, Ran("right = 5", 1))
    goes_on = "for epoch in range(2):\n    right += epoch\n    right = 0"
    assert "right = 5" in exported(goes_on, Ran("right = 5", 1))


def test_what_draws_between_a_seed_and_data_is_in_the_script() -> None:
    """Or the data would be other data."""
    draws = "test = torch.randn(5)\nshow(3)\ndata = torch.randn(5)"
    own = Ran(
        "def show(x):\n    print(x)\ndef set_seed(x):\n    torch.manual_seed(x)", 1
    )
    for seed in ("torch.manual_seed(5)", "set_seed(5)"):
        text = exported("print(data)", own, Ran(f"{seed}\n{draws}\nlast = f(data)", 2))
        assert f"{seed}\ntest = torch.randn(5)\nshow(3)\ndata = torch" in text
        assert "last" not in text
    generator = "g = torch.Generator().manual_seed(5)"
    of_it = draws.replace("(5)", "(5, generator=g)")
    text = exported("print(data)", own, Ran(f"{generator}\n{of_it}", 2))
    assert "test = torch.randn(5, generator=g)\ndata = torch" in text
    unseeded = exported("print(data)", own, Ran(draws, 2))
    assert "test" not in unseeded
    unknown = Ran("torch.manual_seed(5)\nf(nothing)\ndata = torch.randn(5)", 2)
    assert "nothing" not in exported("print(data)", unknown)
    run = Ran("model, o, l = prepare(a, b, c)", 3, "ddp")
    seeded = Ran("torch.manual_seed(5)\ndata = torch.randn(5)", 2)
    score = Ran("score = f(model)", 4)
    again = Ran("torch.manual_seed(6)\nmore = torch.randn(5)", 5)
    text = exported("print(data, more)", seeded, run, score, again)
    assert "score" not in text
    assert "torch.manual_seed(6)\nmore = torch.randn(5)" in text


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
        ("x = !ls", [], "not Python that a script could have"),
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


@pytest.mark.long
def test_a_file_that_cannot_be_is_said_before(lab: Lab, tmp_path: Path) -> None:
    run = lab.train("single", "x = 1", live=False)
    with pytest.raises(ValueError, match="it is a folder"):
        run.export(tmp_path)
    with pytest.raises(ValueError, match="a script cannot be a notebook"):
        run.export(tmp_path / "train.ipynb")
    file = tmp_path / "train.py"
    file.write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        lab.export(file)
    assert file.read_text() == "mine"
    with pytest.raises(ValueError, match="unknown style 'simple'; choose one of"):
        lab.export(file, force=True, style="simple")
    with pytest.raises(ValueError, match="PyTorch: strategy single needs"):
        lab.export(file, force=True, style="plain")
    assert file.read_text() == "mine"
    [note] = lab.export(file, run.name, force=True)
    assert "imports labkit.train and is not plain PyTorch: strategy single" in note
    assert lab.export(file, run.name, force=True, style="labkit") == []
    assert "x = 1" in file.read_text()
