"""A run goes on from a checkpoint: what follows is what an uninterrupted run gives."""

import itertools
import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from kernels import running_kernel
from kernels import wait_until
from marks import in_suites

from labkit import Lab
from labkit import RankError
from labkit import Run
from labkit.host import watchdog
from labkit.notebook.execution.options import RunOptions
from labkit.notebook.execution.options import check_options
from labkit.notebook.execution.options import plan_checkpoints
from labkit.rank.training.resume import random_state
from labkit.rank.training.resume import set_random_state
from labkit.step_folders import all_in
from labkit.step_folders import alone_in
from labkit.step_folders import step_folder
from labkit.strategies import find_strategy

pytestmark = pytest.mark.timeout(120)

# 4 steps an epoch, the last batch smaller; schedulers made before and after prepare,
# one a step and one an epoch, the second of them without a step when it is made.
LOOP = """
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

class Drawn(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + {noise} * torch.randn(8), y

x = torch.randn(46, 8)
data = Drawn(x, x.sum(1).long() % 3)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout({dropout}),
                      nn.Linear(16, 3))
adam = torch.optim.AdamW(model.parameters(), lr=0.02)
by_step = LambdaLR(adam, lambda step: 0.9 ** step)
loader = DataLoader(data, 12, shuffle=True, num_workers={workers})
model, optimizer, loader = prepare(model, adam, loader)
by_epoch = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
for epoch in range({epochs}):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        by_step.step()
        log(rate=optimizer.param_groups[0]["lr"])
    by_epoch.step(1.0)
    log(epochs_done=epoch + 1)
"""


def loop(
    *, epochs: int = 3, dropout: float = 0.3, noise: float = 0.1, workers: int = 0
) -> str:
    return LOOP.format(epochs=epochs, dropout=dropout, noise=noise, workers=workers)


@pytest.fixture
def train(lab: Lab, tmp_path: Path) -> Callable[..., Run]:
    """Trains without pictures, with checkpoints in `tmp_path / "kept"`."""

    def run(strategy: str, code: str, **options: Any) -> Run:
        options = {"checkpoint": tmp_path / "kept", "keep": 20} | options
        return lab.train(strategy, code, live=False, **options)

    return run


def forget_after(folder: Path, step: int) -> None:
    """Leave no checkpoints but those until `step`."""
    for each in all_in(folder):
        if each > step_folder(folder, step):
            shutil.rmtree(each)


def have_had(folder: Path, num_batches: int) -> None:
    """Write into checkpoints that their loops had so many batches of an epoch."""
    for each in all_in(folder):
        path = each / "checkpoint.json"
        content = json.loads(path.read_text())
        for loader in content["values"]["loop"]["loaders"]:
            loader["position"]["batch"] = num_batches
        path.write_text(json.dumps(content))


def rows(run: Run) -> pd.DataFrame:
    """What a run has logged, by rank, without what a clock or the system says."""
    table = run.history.drop(columns=["seconds", "memory_bytes"])
    return table.set_index(["rank", "step"]).sort_index()


def assert_goes_on(resumed: Run, whole: Run, *, after: int) -> pd.DataFrame:
    """Bit by bit what the uninterrupted run has after that step; returns what was
    logged before the next step, but after the checkpoint."""
    there, here = rows(whole), rows(resumed)
    ended = there.index.get_level_values("step").max()
    again = here[here.index.get_level_values("step") == after]
    pd.testing.assert_frame_equal(
        here.drop(again.index),
        there[there.index.get_level_values("step") > after],
        check_exact=True,
        check_like=True,
    )
    assert resumed.resumed_from == after
    assert set(resumed.collector.steps.values()) == {ended}
    return again


ALL = ["single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]


@pytest.mark.parametrize(
    "strategy", in_suites(ALL, test=["zero3"], long=["ddp", "fsdp"])
)
def test_resumed_equals_uninterrupted_under_every_strategy(
    train: Callable[..., Run],
    tmp_path: Path,
    strategy: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = train(strategy, loop(), every=1, accumulate=2)
    assert len(all_in(tmp_path / "kept")) == 12
    forget_after(tmp_path / "kept", 6)
    resumed = train(strategy, loop(), resume=True, accumulate=2)
    assert f"{resumed.name}: resumed from step 6" in capsys.readouterr().out
    assert "resumed from step 6, epoch 3" in resumed.status_line()
    assert_goes_on(resumed, whole, after=6)
    assert resumed.mismatches == []


@pytest.mark.parametrize(
    "source",
    [
        "DataLoader(data, 12, shuffle=True, generator=torch.Generator())",
        "DataLoader(data, 12, sampler=WeightedRandomSampler([1.0] * 46, 46))",
        "DataLoader(Stream(), 12)",
        pytest.param("DataLoader(Stream(), 12, num_workers=1)", marks=pytest.mark.long),
    ],
)
def test_samplers_and_streams_go_on_where_they_were(
    train: Callable[..., Run], tmp_path: Path, source: str
) -> None:
    stream = """
from torch.utils.data import IterableDataset, WeightedRandomSampler

class Stream(IterableDataset):
    def __iter__(self):
        return (data[i] for i in torch.randperm(46).tolist())

loader = """
    code = loop(epochs=2).replace(
        "loader = DataLoader(data, 12, shuffle=True, num_workers=0)", stream + source
    )
    whole = train("ddp", code, every=1)
    forget_after(tmp_path / "kept", 6)
    resumed = train("ddp", code, resume=True)
    assert_goes_on(resumed, whole, after=6)
    if "Stream" in source:
        forget_after(tmp_path / "kept", 6)
        other = code.replace("torch.randperm(46)", "torch.arange(46)")
        with pytest.raises(RankError, match="epoch 2 does not begin with the samples"):
            train("ddp", other, resume=True)
        have_had(tmp_path / "kept", 10**12)
        with pytest.raises(RankError, match="epoch 2 does not begin with the samples"):
            train("ddp", code, resume=True)


@pytest.mark.long
def test_where_an_epoch_ends_and_with_workers_and_after_a_finished_run(
    lab: Lab,
    train: Callable[..., Run],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = tmp_path / "kept"
    alone = train("ddp", loop(), checkpoint=None, keep=None)
    whole = train("ddp", loop(), every=1)
    pd.testing.assert_frame_equal(
        rows(whole), rows(alone), check_exact=True, check_like=True
    )
    # The end of the epoch comes after the checkpoint, and so comes again.
    forget_after(kept, 8)
    again = train("ddp", loop(), resume=True)
    assert list(assert_goes_on(again, whole, after=8)["epochs_done"]) == [2, 2]
    # Of a run that finished nothing is left to do, and a longer one goes on.
    capsys.readouterr()
    assert train("ddp", loop(), resume=True).num_steps == 12
    assert "there was nothing to do" in capsys.readouterr().err
    # The next cell goes on from there, with the schedules as well.
    lab.run("at = by_step.last_epoch, by_epoch.last_epoch")
    assert lab.pull("at", "all") == [(12, 3)] * 2
    longer = train("ddp", loop(epochs=4), checkpoint=None, keep=None)
    again = train("ddp", loop(epochs=4), resume=True)
    assert_goes_on(again, longer, after=12)
    # Workers draw random numbers of their own: those of an epoch that has begun cannot
    # be had again, but the order of samples and this process's numbers can.
    shutil.rmtree(kept)
    whole = train("ddp", loop(noise=0.0, workers=1), every=1)
    forget_after(kept, 6)
    again = train("ddp", loop(noise=0.0, workers=1), resume=True)
    assert_goes_on(again, whole, after=6)


def test_on_another_number_of_ranks_the_batches_are_the_same(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    code = loop(dropout=0.0, noise=0.0)
    whole = train("zero3", code, every=6).mean_loss().set_index("step")["loss"]
    forget_after(tmp_path / "kept", 6)
    resumed = train("single", code, resume=True, every=6)
    losses = resumed.mean_loss().set_index("step")["loss"]
    assert list(losses.index) == [7, 8, 9, 10, 11, 12]
    pd.testing.assert_series_equal(losses, whole[6:], rtol=1e-4)
    forget_after(tmp_path / "kept", 6)
    losses = train("fsdp", code, resume=True).mean_loss().set_index("step")["loss"]
    pd.testing.assert_series_equal(losses, whole[6:], rtol=1e-4)


FIT = """
import torch.nn.functional as F
from torch.utils.data import TensorDataset
x = torch.randn(40, 8)
data = TensorDataset(x, x.sum(1).long() % 3)
model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Dropout(0.2))
adam = torch.optim.Adam(model.parameters(), lr=0.05)
fit(model, data, F.cross_entropy, optimizer=adam, batch_size=10, epochs=3,
    validate=data)
weights = {name: value.tolist() for name, value in model.state_dict().items()}
"""


def test_fit_resumes_and_validates_what_was_not(
    lab: Lab, train: Callable[..., Run], tmp_path: Path
) -> None:
    whole = train("ddp", FIT, every=2)
    weights = lab.pull("weights")
    for step, num_validations in ((4, 3), (6, 2)):
        forget_after(tmp_path / "kept", step)
        resumed = train("ddp", FIT, resume=True, every=2)
        assert lab.pull("weights") == weights
        there = rows(whole).loc[0, "val_loss"].dropna()
        here = rows(resumed).loc[0, "val_loss"].dropna()
        pd.testing.assert_series_equal(here, there[-num_validations:])


def test_a_stopped_run_resumes_where_it_stopped(
    lab: Lab, train: Callable[..., Run], tmp_path: Path
) -> None:
    code = loop(epochs=40)
    whole = train("ddp", code, checkpoint=None, keep=None)
    slow = code.replace(
        "    by_epoch", f"    wait_for({str(tmp_path / 'go')!r})\n    by_epoch"
    )
    lab.run(
        "import pathlib, time\n"
        "def wait_for(path):\n"
        "    while epoch == 9 and not pathlib.Path(path).exists(): time.sleep(0.01)"
    )
    run = train("ddp", slow, background=True)
    while run.num_steps < 40:
        run.has_ended.wait(0.05)
        assert run.state == "running"
    run.execution.stop_at_a_step()  # type: ignore[union-attr]
    (tmp_path / "go").touch()
    run.wait()
    [kept] = all_in(tmp_path / "kept")
    step = run.num_steps
    # In another cell the loader of a run that was stopped has all of its batches.
    lab.run("num_batches = sum(1 for _ in loader)")
    assert lab.pull("num_batches", "all") == [4, 4]
    assert kept == step_folder(tmp_path / "kept", step)
    assert step < 160
    assert_goes_on(train("ddp", code, resume=True), whole, after=step)


def test_the_newest_are_kept_and_a_save_that_fails_does_not_end_the_run(
    lab: Lab,
    train: Callable[..., Run],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = tmp_path / "kept"
    # No file may grow from step 8 on: as if the disk were full.
    lab.run("""
import pathlib, resource, time
sizes = resource.getrlimit(resource.RLIMIT_FSIZE)
def fill_disk(epoch, path):
    while epoch == 1 and not pathlib.Path(path).exists():
        time.sleep(0.01)
    soft = 100 if epoch == 1 else sizes[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, sizes[1]))
""")
    fill = f"    if epoch == 1: fill_disk(1, {str(step_folder(kept, 8))!r})\n"
    full = loop().replace("    by_epoch", fill + "    by_epoch")
    run = train("ddp", full, every=2, keep=2)
    lab.run("fill_disk(0, None)")
    assert run.state == "finished"
    said = capsys.readouterr().err
    for step in (10, 12):
        assert f"no checkpoint of step {step}: " in said
    assert "File too large" in said
    assert said.count(f"the last one is {step_folder(kept, 8)}") == 2
    assert all_in(kept) == [step_folder(kept, 6), step_folder(kept, 8)]


def test_a_loop_over_data_of_its_own_keeps_its_states_and_its_count(
    lab: Lab,
    train: Callable[..., Run],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = """
from torch.optim.lr_scheduler import StepLR
model = torch.nn.Linear(4, 1)
adam = torch.optim.Adam(model.parameters(), lr=0.1)
model, optimizer, _ = prepare(model, adam, torch.zeros(8, 4), batch_size=4)
rate = StepLR(optimizer, 3)
for step in range({num_steps}):
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    rate.step()
weight = model.module.weight.tolist()
learning_rate = optimizer.param_groups[0]["lr"]
"""
    train("ddp", code.format(num_steps=7), checkpoint=None, keep=None)
    expected = lab.pull("weight")
    train("ddp", code.format(num_steps=5), every=2)
    # The body of the loop had not ended when the fourth step was taken.
    forget_after(tmp_path / "kept", 5)
    resumed = train("ddp", code.format(num_steps=2), resume=True)
    said = "the loop of step 5 did not take its data from the loader"
    assert capsys.readouterr().err.count(said) == 1
    assert lab.pull("weight") == expected
    assert lab.pull("learning_rate") == pytest.approx(0.001)
    assert sorted(set(resumed.history["step"])) == [6, 7]


@pytest.mark.long
def test_what_a_killed_kernel_left_is_resumed_by_another(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    whole = train("fsdp", loop(epochs=6), checkpoint=None, keep=None)
    kept, hold = tmp_path / "kept", tmp_path / "hold"
    hold.touch()
    wait = f"import os, time\nhold = {str(hold)!r}\n"
    slow = loop(epochs=6).replace(
        "    by_epoch",
        "    while epoch == 2 and os.path.exists(hold): time.sleep(0.01)\n    by_epoch",
    )
    magic = f"%%dist_train fsdp --no-live --checkpoint {kept} --every 3"
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit\n%dist_start -n 2")
        kernel.client.execute(f"{magic}\n{wait}{slow}")
        wait_until(lambda: step_folder(kept, 12).is_dir(), 60, "no checkpoint")
        [token] = kernel.lab_tokens()
        kernel.process.send_signal(signal.SIGKILL)
        wait_until(lambda: not watchdog.find_processes(token), 20, "ranks are left")
    hold.unlink()
    options = {"checkpoint": kept, "every": 3, "resume": True}
    resumed = train("fsdp", wait + slow, **options)
    assert resumed.resumed_from == 12
    assert resumed.last_loss.hex() == whole.last_loss.hex()


def test_what_does_not_fit_is_refused_before_the_loop(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    train("ddp", loop(), every=6)
    other = [
        (loop().replace("16", "32"), {}, r"0\.weight .*\(16, 8\).*\(32, 8\)"),
        (loop().replace("data, 12", "data, 23"), {}, "batch_size=12 .*batch_size=23"),
        (loop().replace("AdamW", "SGD"), {}, "AdamW.*SGD"),
        (loop(), {"seed": 7}, "--seed 0, .* resume with --seed 0"),
        (loop().replace("LambdaLR", "MultiplicativeLR"), {}, "LambdaLR .*Multiplica"),
    ]
    for code, options, found in other:
        with pytest.raises(RankError, match=found):
            train("ddp", code, resume=True, **options)
    have_had(tmp_path / "kept", 10**12)
    with pytest.raises(RankError, match="batch 1000000000000 of an epoch of 4"):
        train("ddp", loop(), resume=True)
    assert len(all_in(tmp_path / "kept")) == 2


def refused(tmp_path: Path, **options: Any) -> str:
    strategy = find_strategy(options.pop("strategy", "ddp"))
    asked = RunOptions(**{"checkpoint": tmp_path / "kept", **options})

    def plan() -> None:
        check_options(strategy, asked, device="cpu", world_size=2)
        plan_checkpoints(asked)

    with pytest.raises(ValueError, match=r"\S") as raised:
        plan()
    assert not (tmp_path / "kept").exists()
    return str(raised.value)


def test_wrong_options_are_refused_and_nothing_is_made(tmp_path: Path) -> None:
    for name, given in {"every": 2, "keep": 2, "resume": True, "elastic": True}.items():
        said = refused(tmp_path, checkpoint=None, **{name: given})
        assert said.startswith(f"--{name} needs --checkpoint DIR")
    assert "save_checkpoint" in refused(tmp_path, strategy="raw")
    for name, value in itertools.product(("every", "keep"), (0, -1, 1.5, True, "2")):
        assert refused(tmp_path, **{name: value}).startswith(f"{name} is {value!r}; ")
    assert "must name a folder" in refused(tmp_path, checkpoint=3)
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "under"):
        assert "is not a folder" in refused(tmp_path, checkpoint=path)
    assert "File name too long" in refused(tmp_path, checkpoint="a" * 300)


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_runs(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # as a disk that is full
    try:
        with pytest.raises(ValueError, match=r"File too large; .* name another folder"):
            train("ddp", "1 / 0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not kept.exists()


def test_checkpoints_that_are_there_are_not_trained_over(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    empty = train("ddp", loop(), resume=True)
    assert empty.resumed_from is None
    with pytest.raises(ValueError, match=r"of step 12; add --resume .* another folder"):
        train("ddp", loop())


def test_random_numbers_go_on_where_they_were() -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [
            *(random.gauss(0, 1), random.random()),
            *(np.random.normal(), np.random.rand()),
            float(torch.randn(1)),
        ]

    draw()  # so that a second normal number is in hand
    before = random_state(torch.device("cpu"))
    drawn = draw()
    draw()
    set_random_state(before, torch.device("cpu"))
    assert draw() == drawn


BESIDE = """
import torch.nn.functional as F
from torch import nn

def net():
    torch.manual_seed(1)
    return nn.Linear(8, 3)

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = net()
        self.average = net().requires_grad_(False)

    def forward(self, x):
        return self.student(x)

x = torch.randn(24, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1).long() % 3)
class Graded(nn.Module):  # has the model in it, and changes nothing else
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("weights", torch.ones(3))

model = {model}
average = {average}
graded = Graded(model)
frozen = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=2)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8, shuffle=False)
for epoch in range({epochs}):
    for x, y in loader:
        pull = F.mse_loss(model(x), average(x)) + F.mse_loss(model(x), frozen(x))
        scaler.scale(F.cross_entropy(model(x), y) + pull).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for a, b in zip(average.parameters(), {source}.parameters()):
                a.data.mul_(0.9).add_(b.detach(), alpha=0.1)
        log(scale=scaler.get_scale())
"""


def beside(*, epochs: int, is_part: bool) -> str:
    return BESIDE.format(
        epochs=epochs,
        model="Both()" if is_part else "net()",
        average="model.average" if is_part else "net()",
        source="model.student" if is_part else "model",
    )


def test_a_grad_scaler_goes_on_and_an_average_beside_the_model_is_noted(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    whole = train("ddp", beside(epochs=3, is_part=True), checkpoint=None, keep=None)
    assert rows(whole)["scale"].nunique() > 3
    first = train("ddp", beside(epochs=1, is_part=True))
    assert first.notes == []
    resumed = train("ddp", beside(epochs=3, is_part=True), resume=True)
    assert_goes_on(resumed, whole, after=3)
    assert not any("a checkpoint has parameters and" in each for each in resumed.notes)

    other = {"checkpoint": tmp_path / "other"}
    train("ddp", beside(epochs=1, is_part=False), **other)
    for epochs in (2, 3):  # what was changed before the first checkpoint is missing yet
        run = train("ddp", beside(epochs=epochs, is_part=False), resume=True, **other)
        [note] = [each for each in run.notes if "what prepare got" in each]
        assert "has changed in average: this run begins" in note


ORDINARY = """
import torch.nn.functional as F

x = torch.arange(64.0).reshape(16, 4) / 64
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, sgd, data, batch_size=4)
for epoch in range(3):
    sum_of_losses = num_losses = 0
    for x, y in loader:
        last_loss = F.mse_loss(model(x), y)
        last_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sum_of_losses += last_loss.item()
        num_losses += 1
    average = sum_of_losses / num_losses
    if rank == 0:
        print(f"epoch {epoch}: {last_loss.item():.6f}")
    log(average=average)
print("all right" if last_loss < 1 else "all wrong")
"""


def test_a_loop_that_prints_after_each_epoch_goes_on_in_new_ranks(
    train: Callable[..., Run],
    lab: Lab,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = train("ddp", ORDINARY, every=1)
    shown = capsys.readouterr().out
    assert shown.count("epoch ") == 3
    forget_after(tmp_path / "kept", 4)  # of 4 an epoch: at the end of the first
    lab.restart(everyone=True)
    resumed = train("ddp", ORDINARY, resume=True)
    assert resumed.resumed_from == 4
    assert resumed.notes == []
    said = capsys.readouterr().out
    assert said.count("epoch ") == 2
    assert said.partition("epoch 1")[2] == shown.partition("epoch 1")[2]
    assert_goes_on(resumed, whole, after=4)

    lab.restart(everyone=True)
    again = train("ddp", ORDINARY, resume=True)
    assert again.num_steps == 12
    assert "there was nothing to do" in capsys.readouterr().err
    assert again.notes == []


BY_LOSS = ORDINARY.replace(
    "    if rank == 0:", "    optimizer.param_groups[0]['lr'] = 0.05 / (1 + average)\n"
    "    if rank == 0:"
)  # fmt: skip


def test_what_needs_a_batch_and_is_left_out_where_the_run_was_is_noted(
    train: Callable[..., Run], lab: Lab, tmp_path: Path
) -> None:
    train("ddp", BY_LOSS, every=1)
    for step, count in ((6, 0), (4, 1)):  # of 4 an epoch
        forget_after(tmp_path / "kept", step)
        lab.restart(everyone=True)
        notes = train("ddp", BY_LOSS, resume=True).notes
        found = [each for each in notes if "was left out" in each]
        assert len(found) == count
    assert found[0].startswith("line 17: average = ")


FAILS = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if {fails}:
            raise FileNotFoundError(index)
        return torch.randn(4)

def an_epoch(loader):
    total = 0
    for x in loader:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    return total

model = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, sgd, Data(), batch_size=4)
for epoch in range(3):
    print(an_epoch(loader))
"""


def test_data_that_fails_before_the_first_batch_ends_a_run_that_resumes(
    train: Callable[..., Run],
) -> None:
    train("ddp", FAILS.format(fails=False).replace("range(3)", "range(1)"))
    with pytest.raises(RankError, match="FileNotFoundError"):
        train("ddp", FAILS.format(fails=True), resume=True)


def test_a_cell_that_empties_the_transformers_of_the_shell_resumes(
    train: Callable[..., Run],
) -> None:
    train("ddp", ORDINARY.replace("range(3)", "range(1)"))
    clears = "get_ipython().ast_transformers.pop()\n"
    assert train("ddp", clears + ORDINARY, resume=True).state == "finished"


COUNTED = """
x = torch.arange(64.0).reshape(16, 4) / 64
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
model, optimizer, loader = prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=4
)
step = {step}
for epoch in range(3):
    for number, (x, y) in enumerate({batches}):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step) + 0.01 * number
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
"""
COUNTED_IN_A_CLASS = """
class Trainer:
    step = 0

    def train(self, epochs):
        for epoch in range(epochs):
            for x, y in self.loader:
                if self.step == 6:
                    return
                torch.nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
"""


def test_variables_by_which_a_resumed_loop_goes_on_are_noted(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    whole = train("ddp", COUNTED.format(step=0, batches="loader"), every=1)
    assert whole.notes == []
    forget_after(tmp_path / "kept", 6)  # of 4 an epoch
    resumed = train("ddp", COUNTED.format(step=0, batches="loader"), resume=True)
    [note] = resumed.notes
    assert "after step 6: " in note
    assert "number is 0 (was 1)" in note
    assert "step is 0 (was 6)" in note

    forget_after(tmp_path / "kept", 6)
    batches = "loader, loader.position.batch"
    mended = COUNTED.format(step="loader.steps_taken", batches=batches)
    resumed = train("ddp", mended, resume=True)
    assert resumed.notes == []
    assert_goes_on(resumed, whole, after=6)


def test_a_count_of_steps_in_an_attribute_is_noted(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    before = COUNTED.partition("step =")[0] + COUNTED_IN_A_CLASS
    begin = "t = Trainer()\nt.model, t.optimizer, t.loader = model, optimizer, loader\n"
    train("fsdp", before + begin + "t.train(1)")
    resumed = train("fsdp", before + begin + "t.train(3)", resume=True)
    assert resumed.num_steps > 6
    [note] = resumed.notes
    assert "self.step is 0 (was 4)" in note


COUNTS = """
class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.calls, self.width, self._hidden = 0, 4, 0
        for name, is_kept in [("seen", False), ("cache", False), ("kept", True)]:
            self.register_buffer(name, torch.zeros(1), persistent=is_kept)
    def forward(self, x):
        self.calls += 1
        self._hidden += 1
        self.seen += 1
        self.kept += 1
        self.cache = torch.cat([self.cache, self.cache])[:8]
        return self.layer(x)
model = Counts()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, torch.ones(16, 4), batch_size=4)
for epoch in range({epochs}):
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("strategy", in_suites(["ddp", "fsdp", "zero3"], test=["ddp"]))
def test_what_a_model_has_beside_its_state_is_noted(
    strategy: str, train: Callable[..., Run]
) -> None:
    assert train(strategy, COUNTS.format(epochs=1)).notes == []
    [note] = train(strategy, COUNTS.format(epochs=2), resume=True).notes
    assert "changed in the model's calls, the model's seen: this run begins" in note


SETTINGS = """
model = torch.nn.Linear(4, 4)
{maker}
{after}
model, optimizer, loader = prepare(model, optimizer, torch.ones(16, 4), batch_size=4)
for epoch in range({epochs}):
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    log(rate=optimizer.param_groups[0]["lr"])
"""


def test_a_run_that_resumes_with_other_settings_has_a_note(
    train: Callable[..., Run],
) -> None:
    adam = "optimizer = torch.optim.AdamW(model.parameters(), lr={}, betas=(0.9, {}))"
    decay = "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)"

    def notes_of(epochs: int, rate: float, beta: float, *, resume: bool) -> list[str]:
        maker = adam.format(rate, beta)
        code = SETTINGS.format(maker=maker, after=decay, epochs=epochs)
        run = train("ddp", code, resume=resume)
        assert set(run.history["rate"].dropna()) == {0.1}
        return [each for each in run.notes if "other settings" in each]

    assert notes_of(1, 0.1, 0.99, resume=False) == []
    assert notes_of(2, 0.1, 0.99, resume=True) == []
    for epochs in (3, 4):  # and again, as the optimizer's are those of the first
        [note] = notes_of(epochs, 0.01, 0.95, resume=True)
        assert "lr=0.01 (before: 0.1)" in note
        assert "betas=(0.9, 0.95) (before: (0.9, 0.99))" in note


def test_an_optimizer_of_an_earlier_cell_comes_as_the_run_has_left_it(
    lab: Lab, train: Callable[..., Run]
) -> None:
    lab.run(
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    )
    code = SETTINGS.format(maker="", after="", epochs=2).replace("model = torch", "#")
    decay = "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)"
    code = code.replace("for epoch", f"scheduler = {decay}\nfor epoch")
    code += "    scheduler.step()\n"
    train("ddp", code, every=3)
    resumed = train("ddp", code.replace("range(2)", "range(3)"), resume=True, every=3)
    assert not any("other settings" in each for each in resumed.notes)
    lab.run("optimizer.param_groups[0]['lr'] = 0.7")
    resumed = train("ddp", code.replace("range(2)", "range(4)"), resume=True)
    assert any("lr=0.7 (before: 0.1)" in each for each in resumed.notes)


def test_what_a_strategy_sets_of_an_optimizer_is_no_other_setting(
    train: Callable[..., Run],
) -> None:
    adam = "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)"
    code = SETTINGS.format(maker=adam, after="", epochs="{}")
    code = code.replace("Linear(4, 4)", "Sequential(torch.nn.Linear(4, 4))")
    code = code.replace("model(x)", "model(x.clone())")
    plan = {"plan": {"0": "colwise_rep"}}
    train("ddp", code.format(1))
    resumed = train("tensor", code.format(2), resume=True, config=plan)
    assert not any("other settings" in each for each in resumed.notes)


def test_what_another_run_has_left_on_one_rank_alone_holds_nobody_up(
    lab: Lab, tmp_path: Path
) -> None:
    code = """
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, torch.ones(16, 4), batch_size=4)
for x in loader:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    lab.train("fsdp", code, live=False)
    lab.run("left = model", 0)  # in shards: to look at it is collective
    kept = {"checkpoint": tmp_path / "kept", "every": 2}
    run = lab.train("ddp", code, live=False, timeout=60, **kept)
    assert run.state == "finished"
    lab.run("del left", 0)


def test_two_runs_at_a_time_do_not_write_into_one_folder(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    with (
        alone_in(kept),  # as another kernel's run
        pytest.raises(ValueError, match="another run is writing its checkpoints there"),
    ):
        train("ddp", loop(epochs=1))
    assert not kept.exists()
    with pytest.raises(RankError):
        train("ddp", "1 / 0")
    assert not kept.exists()
    train("ddp", loop(epochs=1))
    with (
        alone_in(kept),
        pytest.raises(ValueError, match="another run is writing its checkpoints there"),
    ):
        train("ddp", loop(epochs=1), resume=True)
    assert all_in(kept)


PREFETCHING = """
batches = iter(loader)
x, y = next(batches)
step = {first}
while step < 10:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + step)
    loss = F.cross_entropy(model(x), y)
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        x, y = next(batches)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
"""


@pytest.mark.parametrize(
    ("first", "says"), [("0", True), ("loader.steps_taken", False)]
)
def test_a_batch_that_a_loop_has_in_hand_is_noted(
    train: Callable[..., Run], tmp_path: Path, first: str, says: bool
) -> None:
    begin, _, _ = loop().partition("for epoch")
    code = begin + PREFETCHING.format(first=first)
    stream = (
        "class Endless(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return (data[i % 46] for i in range(10**6))\n"
        "loader = DataLoader(Endless(), 12)\n"
        "model, optimizer, loader = prepare("
    )
    endless = code.replace("model, optimizer, loader = prepare(", stream)
    whole = train("ddp", endless, every=1)
    forget_after(tmp_path / "kept", 6)
    resumed = train("ddp", endless, resume=True)
    [note] = [each for each in resumed.notes if each not in whole.notes]
    assert "x is tensor" in note
    assert ("step is 0 (was 6)" in note) == says
    # Passes that end have none for what takes one before the loop.
    train("ddp", code, every=1, checkpoint=tmp_path / "passes")
    forget_after(tmp_path / "passes", 6)
    with pytest.raises(RankError, match=r"so next\(\) has none"):
        train("ddp", code, resume=True, checkpoint=tmp_path / "passes")


NUMBERED = """
others = DataLoader(data, 12)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if i % 1 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_numbers_of_batches_are_noted_only_within_a_pass(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    begin, _, _ = loop().partition("for epoch")
    train("ddp", begin + NUMBERED, every=1)
    forget_after(tmp_path / "kept", 8)
    assert train("ddp", begin + NUMBERED, resume=True).notes == []
    forget_after(tmp_path / "kept", 6)
    [note] = train("ddp", begin + NUMBERED, resume=True).notes
    assert "i is 0 (was 1)" in note
    zipped = NUMBERED.replace(
        "i, (x, y) in enumerate(loader)", "(x, y), z in zip(loader, others)"
    )
    zipped = zipped.replace("if i % 1 == 0", "if True")
    forget_after(tmp_path / "kept", 6)
    [note] = train("ddp", begin + zipped, resume=True).notes
    assert "another DataLoader" in note


def test_a_loop_that_asks_for_each_pass_resumes_in_any_of_them(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    begin, _, _ = loop().partition("for epoch")
    asking = PREFETCHING.replace("x, y = next(batches)\nstep", "step")
    asking = asking.replace("    loss = F.cross_entropy(model(x), y)\n", "")
    code = begin + asking.replace(
        "    loss.backward",
        "    loss = F.cross_entropy(model(x), y)\n    loss.backward",
    ).format(first="loader.steps_taken")
    whole = train("ddp", code, every=1)
    for step in (8, 9):
        shutil.copytree(tmp_path / "kept", tmp_path / str(step))
        forget_after(tmp_path / str(step), step)
        resumed = train("ddp", code, resume=True, checkpoint=tmp_path / str(step))
        assert_goes_on(resumed, whole, after=step)
