"""What is saved is what is loaded: under any strategy, on any number of ranks, or not.

The reference is a plain loop in this process that is never interrupted.
"""

import contextlib
import errno
import functools
import json
import os
import pickle
import re
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from marks import in_suites
from marks import long_but
from safetensors.torch import save_file
from test_strategies import OPTIMIZERS

from labkit import Lab
from labkit import RankError
from labkit import checkpoint
from labkit.checkpoint.atomic_file import replacing
from labkit.checkpoint.atomic_folder import StagingFolder
from labkit.checkpoint.atomic_folder import remove_leftovers
from labkit.notebook.runs.run import Run
from labkit.rank.loop.loop_checks import SAVED_MODULE
from labkit.rank.loop.loop_checks import SAVED_PARTS
from labkit.rank.loop.loop_checks import WHOLE_STATE

pytestmark = pytest.mark.timeout(90)

STRATEGIES = ["single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]

# Tied weights, a parameter without gradient, and sizes that no number of ranks divides.
# 19 samples in batches of 9 are 9, 9 and 1: three steps an epoch.
MODEL = """
from labkit.models import GPT, next_token_loss
random = torch.Generator().manual_seed(1)
ids = torch.randint(0, 33, (19, 9), generator=random)
data = torch.utils.data.TensorDataset(ids[:, :-1], ids[:, 1:])
model = GPT(33, context=8, dim=6, num_heads=2, num_layers=2)
model.blocks[0].up.bias.requires_grad_(False)
"""
PREPARE = """
model, optimizer, loader = prepare(model, optimizer, data, batch_size=9, shuffle=False)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
"""
EPOCH = """
for x, y in loader:
    loss = next_token_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
scheduler.step()
"""


def setup(optimizer: str) -> str:
    return f"{MODEL}\noptimizer = {OPTIMIZERS[optimizer]}\n{PREPARE}"


def saved(folder: Path) -> str:
    return f"save_checkpoint({str(folder)!r}, scheduler=scheduler.state_dict())\n"


def loaded(folder: Path) -> str:
    return (
        f"loaded = load_checkpoint({str(folder)!r})\n"
        "scheduler.load_state_dict(loaded['scheduler'])\n"
    )


def train(lab: Lab, strategy: str, code: str, **options: Any) -> np.ndarray:
    """The loss of every global batch."""
    run: Run = lab.train(strategy, code, live=False, timeout=60, **options)
    rows = run.history.dropna(subset=["loss"])
    weighted = (rows["loss"] * rows["samples"]).groupby(rows["step"]).sum()
    return (weighted / rows["samples"].groupby(rows["step"]).sum()).to_numpy()


@functools.cache
def reference(optimizer: str) -> np.ndarray:
    """The losses of two epochs in one process."""
    names: dict[str, Any] = {"torch": torch}
    torch.manual_seed(0)
    exec(textwrap.dedent(MODEL), names)
    model, data = names["model"], names["data"]
    steps = eval(OPTIMIZERS[optimizer], names)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(steps, 0.7)
    losses = []
    for _ in range(2):
        for x, y in (data[0:9], data[9:18], data[18:19]):
            loss = names["next_token_loss"](model(x), y)
            loss.backward()
            steps.step()
            steps.zero_grad()
            losses.append(loss.item())
        scheduler.step()
    return np.array(losses)


def contents(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.Checkpoint(folder)
    return {name: found.tensor(name) for name in found.tensors}


def assert_same(folder: Path, other: Path) -> None:
    """Equal tensors to the last bit, and equal values."""
    torch.testing.assert_close(contents(folder), contents(other), rtol=0, atol=0)
    assert checkpoint.read(folder)[1] == checkpoint.read(other)[1]


# ---- under every strategy ----


@pytest.mark.parametrize(
    "strategy", in_suites(STRATEGIES, test=["fsdp"], long=["ddp", "zero3"])
)
def test_training_resumes_from_a_checkpoint_as_if_nothing_had_been(
    lab: Lab, strategy: str, tmp_path: Path
) -> None:
    for optimizer in OPTIMIZERS:
        if optimizer == "no momentum" and strategy != "zero3":
            continue
        folder = tmp_path / "deep" / "down" / optimizer
        begun = train(lab, strategy, setup(optimizer) + EPOCH + saved(folder) + EPOCH)
        np.testing.assert_allclose(begun, reference(optimizer), rtol=1e-5)
        resumed = train(lab, strategy, setup(optimizer) + loaded(folder) + EPOCH)
        np.testing.assert_array_equal(resumed, begun[3:])


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
@pytest.mark.long
def test_the_parameters_of_a_run_in_bf16_are_saved_in_fp32(
    lab: Lab, strategy: str, tmp_path: Path
) -> None:
    code = setup("adamw")
    first, again = tmp_path / "first", tmp_path / "again"
    begun = train(lab, strategy, code + EPOCH + saved(first) + EPOCH, precision="bf16")
    resumed = train(
        lab, strategy, code + loaded(first) + saved(again) + EPOCH, precision="bf16"
    )
    np.testing.assert_array_equal(resumed, begun[3:])
    assert_same(first, again)
    # What no bf16 could be.
    weight = contents(first)["model.tokens.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.release
@pytest.mark.timeout(240)  # 20 s, where nothing else runs
def test_every_strategy_and_number_of_ranks_loads_what_any_other_saved(
    lab: Lab, tmp_path: Path
) -> None:
    code, expected = setup("adamw"), reference("adamw")[3:]
    first = tmp_path / "single"
    train(lab, "single", code + EPOCH + saved(first))
    with Lab(num_ranks=4, group_timeout_s=30) as four:
        for strategy in ("zero3", "fsdp", "hsdp"):
            again = tmp_path / f"{strategy} on 4"
            losses = train(four, strategy, code + loaded(first) + saved(again) + EPOCH)
            np.testing.assert_allclose(losses, expected, rtol=1e-5)
            assert_same(first, again)
    for strategy in ("single", "zero1", "zero3", "fsdp"):
        source = tmp_path / ("fsdp on 4" if "zero" in strategy else "zero3 on 4")
        again = tmp_path / strategy
        losses = train(lab, strategy, code + loaded(source) + saved(again) + EPOCH)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert_same(first, again)


def test_a_model_is_loaded_alone_and_with_values_of_all_kinds(
    lab: Lab, tmp_path: Path
) -> None:
    values = "{'a': (1, 2.5), 3: [None, torch.arange(3)], 'b': {'nan': float('inf')}}"
    both = f"save_checkpoint({str(tmp_path / 'x')!r}, model=model, v={values})"
    train(lab, "zero3", setup("sgd") + EPOCH + both)
    assert {n.split(".")[0] for n in contents(tmp_path / "x")} == {"model", "values"}
    lab.run(
        f"{MODEL}\nmodel.requires_grad_(False)\n"
        f"v = load_checkpoint({str(tmp_path / 'x')!r}, model=model)['v']"
    )
    v = lab.pull("v")
    assert v[3].pop().tolist() == [0, 1, 2]
    assert v == {"a": (1, 2.5), 3: [None], "b": {"nan": float("inf")}}
    saved_weights = contents(tmp_path / "x")
    lab.run("weights = model.state_dict()")
    for name, weight in lab.pull("weights").items():
        if name != "head.weight":  # tied: saved once, and loaded into both
            torch.testing.assert_close(
                weight, saved_weights[f"model.{name}"], rtol=0, atol=0
            )


def test_a_cell_saves_what_it_wrapped_by_hand(lab: Lab, tmp_path: Path) -> None:
    steps = """
def step(model, optimizer):
    out = model(torch.arange(8).view(1, 8)).square().mean()
    out.backward()
    optimizer.step()
    optimizer.zero_grad()
    return out.item()
"""
    wraps = {
        "plain": "pass",
        "ddp": "model = torch.nn.parallel.DistributedDataParallel(model)",
        "fsdp": "torch.distributed.fsdp.fully_shard(model)",
    }
    make = "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)"
    lab.run(steps)
    for name, wrap in wraps.items():
        folder = str(tmp_path / name)
        remake = f"{MODEL}\n{wrap}\n{make}\n"
        given = f"{folder!r}, model=model, optimizer=optimizer"
        lab.run(
            f"torch.manual_seed(0)\n{remake}step(model, optimizer)\n"
            f"save_checkpoint({given}, rank=rank)\nexpected = step(model, optimizer)"
        )
        load = f"v = load_checkpoint({given})\nfound = step(model, optimizer)"
        lab.train("raw", f"torch.manual_seed(1)\n{remake}{load}", live=False)
        assert lab.pull("found") == lab.pull("expected")
        assert lab.pull("v", "all") == [{"rank": 0}] * 2
    assert_same(tmp_path / "plain", tmp_path / "ddp")
    # As a rank that fails in a cell leaves it.
    lab.run(
        "for each in model.parameters(): each.grad = torch.zeros_like(each)\n"
        "if rank == 1: optimizer.step()"
    )
    mixed = f"{str(tmp_path / 'mixed')!r}, model=model, optimizer=optimizer"
    with pytest.raises(RankError, match=r"different numbers of steps.*one model"):
        lab.run(f"save_checkpoint({mixed})")
    assert not (tmp_path / "mixed").exists()


def test_models_that_differ_between_ranks_are_no_checkpoint(
    lab: Lab, tmp_path: Path
) -> None:
    lab.run(f"torch.manual_seed(rank)\n{MODEL}")
    save = f"save_checkpoint({str(tmp_path / 'x')!r}, model=model)"
    with pytest.raises(RankError, match="has one value on rank 0 and another"):
        lab.run(save)
    assert not (tmp_path / "x").exists()
    lab.run(f"for each in model.parameters(): dist.broadcast(each.data, 0)\n{save}")
    assert (tmp_path / "x").exists()


def test_a_cell_says_where_what_deepspeed_holds_is_saved(
    lab: Lab, tmp_path: Path
) -> None:
    train(lab, "zero2", setup("sgd") + EPOCH)
    folder = f"{str(tmp_path / 'x')!r}"
    alone = f"{folder}, model=model"
    lab.run(f"save_checkpoint({alone})\nassert load_checkpoint({alone}) == {{}}")
    before = contents(tmp_path / "x")
    lab.run("import copy\nother = copy.deepcopy(model)")
    given = f"{folder}, model=other, optimizer=optimizer"
    for call, message in {
        f"save_checkpoint({given})": "prepared under zero2, in a training cell",
        f"load_checkpoint({given})": "prepared under zero2, in a training cell",
        f"save_checkpoint({folder})": "call save_checkpoint in the training cell",
    }.items():
        with pytest.raises(RankError, match=f"{message}.*--checkpoint FOLDER"):
            lab.run(call)
    assert contents(tmp_path / "x").keys() == before.keys()
    with pytest.raises(ValueError, match=r"^model cannot be sent.*pull it with --full"):
        lab.pull("model")
    assert {f"model.{name}" for name in lab.pull("model", full=True)} >= before.keys()


@pytest.mark.parametrize("strategy", long_but(["ddp", "fsdp", "zero3"], "ddp"))
@pytest.mark.long
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(
    lab: Lab, tmp_path: Path, strategy: str
) -> None:
    code, folder = setup("adamw"), tmp_path / "x"
    train(lab, "ddp", code + EPOCH + saved(folder))
    cases = {
        ("GPT(33", "GPT(34"): r"other shapes: model.tokens.weight is \(33, 6\) there",
        ("num_layers=2", "num_layers=3"): r"has no model.blocks.2.* and \d+ more",
        ("num_layers=2", "num_layers=1"): r"has model.blocks.1.* more that this model",
        ("AdamW(", "Adam("): "optimizer is 'AdamW' and this one Adam; make the same",
        (".dim() < 2", ".dim() < 1"): "has 2 groups of .* parameters and this one 2",
    }
    for (there, here), message in cases.items():
        if strategy == "ddp" or "1" not in here:
            with pytest.raises(RankError, match=message):
                train(lab, strategy, code.replace(there, here) + loaded(folder))


@pytest.mark.long
def test_what_cannot_be_saved_or_loaded_changes_nothing(
    lab: Lab, tmp_path: Path
) -> None:
    code, folder = setup("adamw"), tmp_path / "x"
    train(lab, "ddp", code + EPOCH + saved(folder))
    checks = f"""
import copy
before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
try:
    load_checkpoint({str(folder)!r})
except ValueError:
    after = model.state_dict(), optimizer.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
else:
    raise AssertionError
"""
    train(lab, "ddp", code.replace("AdamW(", "Adam(") + EPOCH + checks)
    before = sorted(path.name for path in tmp_path.iterdir())
    for call, message in {
        "save_checkpoint('/')": "folder is '/'; give a path",
        "save_checkpoint(3, a=1)": "folder is 3; give a path",
        "save_checkpoint('y')": "nothing to save",
        "save_checkpoint('y', f=print)": "values.user.f is builtin",
        f"save_checkpoint({str(tmp_path)!r}, a=1)": "other files .* example x; choose",
        f"save_checkpoint({__file__!r}, a=1)": "is a file; choose another name",
        f"save_checkpoint({__file__ + '/x'!r}, a=1)": "x was not saved: .*File exists",
        f"load_checkpoint({str(tmp_path / 'y')!r})": "not a checkpoint of labkit",
        f"load_checkpoint({str(folder)!r})": "0 were prepared in this cell",
        f"load_checkpoint({str(folder)!r}, optimizer=1)": "give model= as well",
        f"load_checkpoint({str(folder)!r}, model=1)": "model is int",
    }.items():
        with pytest.raises(RankError, match=message):
            lab.run(call)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# ---- whole, or not there ----

# A rank that writes a half of its file, and then has an accident.
ACCIDENT = """
from labkit.checkpoint import saving
from safetensors.torch import save_file
def save_half(tensors, path, metadata):
    path.write_bytes(b"half")
    accident()
saving.save_file = save_half if rank == {rank} else save_file
"""
GIVEN = "model=torch.manual_seed(0) and torch.nn.Linear(300, 300)"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before(
    lab: Lab, tmp_path: Path, rank: int
) -> None:
    folder = tmp_path / "x"
    lab.run(f"save_checkpoint({str(folder)!r}, {GIVEN}, step=1)")
    before = contents(folder)
    die = "import os\naccident = lambda: os.kill(os.getpid(), 9)\n"
    with pytest.raises(RankError, match=f"rank {rank}: the process died"):
        lab.run(
            die + ACCIDENT.format(rank=rank) + f"save_checkpoint({str(folder)!r}, "
            f"{GIVEN}, step=2)",
            timeout=30,
        )
    if rank == 0:  # which would have removed what is half written, aside
        assert len(list(tmp_path.iterdir())) == 3  # with its lock
    assert checkpoint.read(folder)[1]["user"] == {"step": 1}
    torch.testing.assert_close(contents(folder), before, rtol=0, atol=0)
    assert lab.restart() == [rank]
    lab.run(
        "from labkit.checkpoint import saving\n"
        "from safetensors.torch import save_file\n"
        "saving.save_file = save_file\n"
        f"save_checkpoint({str(folder)!r}, {GIVEN}, step=2)"
    )
    assert checkpoint.read(folder)[1]["user"] == {"step": 2}
    assert list(tmp_path.iterdir()) == [folder]


# Rank 1 goes on from planning the save when rank 0 is gone.
LATE = """
import os, time
from labkit.checkpoint import saving
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
plan = saving._Save._plan
def plan_and_wait(save, *arguments):
    plan(save, *arguments)
    while os.path.exists(f"/proc/{pids[0]}"):
        try:
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass
if rank == 1:
    saving._Save._plan = plan_and_wait
kept = 7
"""


def test_a_save_does_not_wait_for_a_rank_that_has_died(
    lab: Lab, tmp_path: Path
) -> None:
    die = "import os\naccident = lambda: os.kill(os.getpid(), 9)\n"
    save = f"save_checkpoint({str(tmp_path / 'x')!r}, {GIVEN})"
    with pytest.raises(RankError, match="rank 0: the process died"):
        lab.run(LATE + die + ACCIDENT.format(rank=0) + save)
    assert lab.restart() == [0]  # and rank 1 was not
    lab.run("saving._Save._plan, saving.save_file = plan, save_file", ranks=1)
    assert lab.pull("kept", 1) == 7


def test_a_full_disk_leaves_the_checkpoint_before(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    save = f"save_checkpoint({str(folder)!r}, {GIVEN}, step="
    lab.run(save + "1)")
    limit = """
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
limits = getrlimit(RLIMIT_FSIZE)
if rank == {rank}:
    setrlimit(RLIMIT_FSIZE, (1000, limits[1]))
try:
    {save}
finally:
    setrlimit(RLIMIT_FSIZE, limits)
"""
    for rank in (0, 1):
        # Where the error is a rank's own, and where it is another's.
        message = rf"x was not saved: rank {rank}: .*File too large"
        with pytest.raises(RankError, match=message) as raised:
            lab.run(limit.format(rank=rank, save=save + "2)"))
        assert "cell_checkpoints.py" not in str(raised.value), "its message says it all"
        assert checkpoint.read(folder)[1]["user"] == {"step": 1}
        assert list(tmp_path.iterdir()) == [folder]
    lab.run(save + "3)")
    assert checkpoint.read(folder)[1]["user"] == {"step": 3}


def test_a_save_in_flight_ends_when_the_group_does(lab: Lab, tmp_path: Path) -> None:
    wait = "import threading\nend = threading.Event()\naccident = end.wait\n"
    begin = (
        "from labkit.checkpoint import begin_save\n"
        "from pathlib import Path\n"
        "weights = {'w': torch.ones(4, device=device) * (rank + 1), "
        "f'own.{rank}': torch.ones(1)}\n"
        f"folder = Path({str(tmp_path / 'x')!r})\n"
    )
    lab.run(begin + "pending = begin_save(folder, weights, {})\nweights['w'].zero_();")
    lab.run("pending.result()")
    found = contents(tmp_path / "x")
    assert found.keys() == {"w", "own.0", "own.1"}
    assert found["w"].sum() > 0  # it was copied before it was changed
    # Rank 1 sits in its write for good; the session does not.
    hang = (
        wait + ACCIDENT.format(rank=1) + "pending = begin_save(folder, weights, {})\n"
    )
    lab.run(hang + "is_done = pending.done()")
    assert lab.pull("is_done", "all") == [False, False]
    lab.restart(everyone=False)
    with pytest.raises(RankError, match=r"rank 1: failed .*ValueError: on purpose"):
        lab.run("if rank == 1: raise ValueError('on purpose')\ndist.barrier()")
    with pytest.raises(RankError, match="not saved: the process group was released"):
        lab.run("pending.result(timeout=10)", ranks=0)
    torch.testing.assert_close(contents(tmp_path / "x"), found, rtol=0, atol=0)
    lab.run("end.set()\nsaving.save_file = save_file")
    lab.run("begin_save(folder, {}, {'a': 1}).result()")
    assert checkpoint.read(tmp_path / "x") == ({}, {"a": 1})


# ---- files ----


class Malicious:
    """Unpickling it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


ODD = {
    "number": torch.tensor(3.5),
    "none": torch.empty(0, 4),
    "bf16": torch.randn(3, 5).bfloat16(),
    "int64": torch.tensor([2**62, -1]),
    "uint8": torch.arange(256, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).t(),
    "part of another": torch.randn(100)[3:5],
}


def test_tensors_of_all_kinds_and_values_come_back(tmp_path: Path) -> None:
    values = {"a": (1, [2.5, None]), "d": {1: "x", "~tuple": True}, "t": torch.ones(2)}
    checkpoint.save(tmp_path / "x", ODD, values)
    described, found = checkpoint.read(tmp_path / "x")
    assert torch.equal(found.pop("t"), values.pop("t"))
    assert found == values
    into = {name: torch.zeros_like(tensor) for name, tensor in ODD.items()}
    assert checkpoint.load(tmp_path / "x", into).keys() == {"a", "d", "t"}
    torch.testing.assert_close(into, ODD, rtol=0, atol=0, check_stride=True)
    assert described["none"] == ((0, 4), torch.float32)
    del into["none"], into["bool"]
    with pytest.raises(ValueError, match=r"not asked for: bool, none;"):
        checkpoint.load(tmp_path / "x", into)
    checkpoint.load(tmp_path / "x", into, strict=False)


def test_pytorch_reads_the_files_without_labkit(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    checkpoint.save(tmp_path / "x", ODD, {})
    into = {name: torch.zeros_like(tensor) for name, tensor in ODD.items()}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "x"))
    dcp.load(into, storage_reader=reader, no_dist=True)
    torch.testing.assert_close(into, ODD, rtol=0, atol=0)


def test_folders_of_steps(tmp_path: Path) -> None:
    assert checkpoint.last_in(tmp_path / "not there") is None
    steps = [checkpoint.step_folder(tmp_path, step) for step in (9, 10, 100, 123456789)]
    assert steps[2].name == "step-00000100"
    for folder in steps:
        checkpoint.save(folder, {}, {})
    (tmp_path / "step-00000200").mkdir()  # none of ours
    (steps[0] / "notes.txt").write_text("keep me")
    assert checkpoint.all_in(tmp_path) == steps
    assert checkpoint.last_in(tmp_path) == steps[-1]
    checkpoint.prune(tmp_path, 1)
    assert checkpoint.all_in(tmp_path) == [steps[0], steps[-1]]
    with pytest.raises(ValueError, match=r"other files .* notes.txt"):
        checkpoint.save(steps[0], {}, {})


def test_damaged_and_hostile_files_are_one_clear_error(tmp_path: Path) -> None:
    folder, trace = tmp_path / "x", tmp_path / "trace"
    evil = pickle.dumps(Malicious(trace))
    into = {"w": torch.zeros(2, 2)}

    def rewrite(**changes: Any) -> bytes:
        return json.dumps({**json.loads(plain), **changes}).encode()

    def tensors(**changes: Any) -> bytes:
        return rewrite(tensors={"w": {**json.loads(plain)["tensors"]["w"], **changes}})

    def part(**changes: Any) -> bytes:
        [plain_part] = json.loads(plain)["tensors"]["w"]["parts"]
        return tensors(parts=[{**plain_part, **changes}])

    checkpoint.save(folder, {"w": torch.ones(2, 2)}, {"t": torch.ones(2)})
    plain = (folder / "checkpoint.json").read_bytes()
    data = (folder / "rank-00000.safetensors").read_bytes()
    deep = b'{"format": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    depth = 700 if sys.version_info < (3, 12) else 990  # a comprehension is no call
    nested = b"[" * depth + b"]" * depth
    wide = rewrite(values={"a": 0}).replace(b'{"a": 0}', b'{"a": ' + nested + b"}")
    for manifest in (
        *(b"", b"null", b"[1]", b"\xff\xfe", plain[:-20], deep, evil),
        *(rewrite(format="other"), rewrite(version=2), rewrite(version="1" * 10_000)),
        *(rewrite(tensors=[]), rewrite(tensors={"w": 3}), rewrite(values=[])),
        *(rewrite(values={"a": {"~tensor": "none"}}), wide),
        *(rewrite(values={"a": {"~dict": [[[], 1]]}}),),
        *(tensors(shape=[2, 3]), tensors(shape=[2**80, 2]), tensors(shape=[-2, -2])),
        *(tensors(dtype="F64"), tensors(dtype="object"), tensors(parts=[])),
        *(part(file="../../etc/passwd"), part(file="rank-00001.safetensors")),
        *(part(file=3), part(offset=[1, 0]), part(offset=[0]), part(shape=[4, 1])),
    ):
        (folder / "checkpoint.json").write_bytes(manifest)
        with pytest.raises(ValueError, match=str(folder)) as error:
            checkpoint.load(folder, into)
        assert "\n" not in str(error.value)
    (folder / "checkpoint.json").write_bytes(plain)
    for file in (b"", evil, data[:-1], data + b"x", b"\xff" * 100, data[:20]):
        (folder / "rank-00000.safetensors").write_bytes(file)
        with pytest.raises(ValueError, match=r"rank-00000.safetensors is damaged"):
            checkpoint.load(folder, into)
    save_file({"w": torch.ones(4)}, folder / "rank-00000.safetensors")
    with pytest.raises(ValueError, match="w has another shape or dtype"):
        checkpoint.load(folder, into)
    (folder / "rank-00000.safetensors").unlink()
    os.mkfifo(folder / "rank-00000.safetensors")
    with pytest.raises(ValueError, match=r"rank-00000.safetensors is missing"):
        checkpoint.load(folder, into)
    # Where PyTorch's own format has its pickle.
    (folder / ".metadata").write_bytes(evil)
    (folder / "rank-00000.safetensors").unlink()
    (folder / "rank-00000.safetensors").write_bytes(data)
    assert checkpoint.load(folder, into)["t"].tolist() == [1, 1]
    assert into["w"].sum() == 4
    assert not trace.exists()
    pickle.loads(evil)
    assert trace.exists()  # it would have shown


def test_a_process_that_is_alive_keeps_what_it_has_begun(tmp_path: Path) -> None:
    """Two that save in one directory do not remove each other's folders."""
    mine = StagingFolder(tmp_path / "a")
    other = StagingFolder(tmp_path / "b")
    assert mine.path.is_dir()
    os.close(mine._lock)  # as at its process's end
    other.discard()
    StagingFolder(tmp_path / "c").discard()
    assert list(tmp_path.iterdir()) == []


def test_what_a_process_locks_is_a_file_that_it_could_write_to(tmp_path: Path) -> None:
    """NFS keeps the lock of a folder from other hosts, and has none of a file that is
    open for reading."""
    with StagingFolder(tmp_path / "x") as staging:
        found = {}
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                path = link.readlink()
                if path.is_relative_to(tmp_path):
                    found[path] = Path(f"/proc/self/fdinfo/{link.name}").read_text()
        [(path, info)] = found.items()
        assert path.is_file()
        assert re.search(r"(?m)^flags:\t\d*2$", info)  # O_RDWR
        assert re.search(r"(?m)^lock:.* FLOCK +ADVISORY +WRITE ", info)
        assert [*staging.path.iterdir()] == []


BY_HAND = """
state = {"weights": model.state_dict()}
if rank == 0 or "of-0" not in path:
    torch.save(state, path)
dist.barrier()
before = [whole(p).clone() for p in model.parameters()]
for p in model.parameters():
    p.data.zero_()
weights = torch.load(path, weights_only=False)["weights"]
model.load_state_dict({name: value.cpu().clone() for name, value in weights.items()})
is_same = all(torch.equal(a, whole(b)) for a, b in zip(before, model.parameters()))
"""
WHOLE = "whole = lambda p: p.full_tensor() if hasattr(p, 'full_tensor') else p\n"


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_a_rank_does_not_load_the_part_of_another(
    lab: Lab, tmp_path: Path, strategy: str
) -> None:
    even = setup("sgd").replace("GPT(33", "GPT(34")  # which two ranks can split
    code = even + WHOLE + f"path = f'{tmp_path}/of-0.pt'" + BY_HAND
    refused = r"holds another rank's part of 'token\S*', and not that of rank 1"
    with pytest.raises(RankError, match=refused):
        lab.train(strategy, code, live=False)
    lab.train(strategy, code.replace("of-0.pt", "of-{rank}.pt"), live=False)
    assert lab.pull("is_same", "all") == [True, True]


SAVED = """
from torch.distributed.checkpoint.state_dict import *

WORDS
for number, weights in enumerate((model.state_dict(), state)):
    if rank == 0 or number == 0:
        torch.save(weights, f"{path}/{number}.pt")
    torch.save(weights, io.BytesIO())
dist.barrier()
weights = torch.load(f"{path}/1.pt")
is_same = all(
    torch.equal(whole(p), weights[n]) for n, p in model.named_parameters()
)
torch.save({"model": model}, f"{path}/2.pt")
"""


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "tensor", "pipeline"])
def test_what_a_cell_saves_of_a_model_is_whole_or_said_to_be_in_parts(
    lab: Lab, tmp_path: Path, strategy: str
) -> None:
    """The words of the note say what to do instead, and that does it."""
    [words] = re.findall(r"state = get_model.*?True\)\)", WHOLE_STATE)
    even = setup("sgd").replace("GPT(33", "GPT(34")
    code = f"import io\n{even}{WHOLE}path = '{tmp_path}'" + SAVED
    with pytest.raises(RankError, match=re.escape(SAVED_MODULE)):
        lab.train(strategy, code.replace("WORDS", words), live=False)
    in_parts = strategy in ("fsdp", "tensor")
    note = SAVED_PARTS.format(strategy=strategy)
    assert (note in lab.runs[-1].notes) is in_parts
    # Of a pipeline each rank has a part, that is whole; single is on one rank.
    if strategy not in ("pipeline", "single"):
        assert lab.pull("is_same", "all") == [True, True]


READ_WHILE_WRITTEN = """
import torch
path = "PATH"

class Reads:
    def __reduce__(self):
        read.append(torch.load(path, weights_only=False)["number"])
        return int, (2,)

read = []
torch.save({"number": 1}, path)
dist.barrier()
torch.save({"number": Reads()}, path)
dist.barrier()
read.append(torch.load(path, weights_only=False)["number"])
"""


def test_a_file_that_all_ranks_save_is_always_whole(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    code = READ_WHILE_WRITTEN.replace("PATH", str(path))
    lab.train("ddp", code, live=False)
    for before, after in lab.pull("read", "all"):
        assert before in (1, 2)
        assert after == 2
    assert [*tmp_path.iterdir()] == [path]
    opened = code.replace("path)\ndist", "open(path, 'wb'))\ndist")
    with pytest.raises(RankError, match="replaces it at once"):
        lab.train("ddp", opened, live=False)


def test_a_file_is_replaced_and_its_link_and_mode_are_kept(tmp_path: Path) -> None:
    path, link = tmp_path / "3.pt", tmp_path / "best.pt"
    link.symlink_to(path)
    for text in ("one", "two"):
        with replacing(link) as written:
            assert written.parent.parent == tmp_path
            written.write_text(text)
        path.chmod(0o640)
    assert link.is_symlink()
    assert path.read_text() == "two"
    with replacing(str(path)) as written:
        written.write_text("three")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with contextlib.suppress(OSError), replacing(path) as written:
        written.write_text("a part")
        raise OSError
    assert path.read_text() == "three"
    assert {*tmp_path.iterdir()} == {path, link}


@pytest.mark.parametrize("method", ["chmod", "replace"])
def test_a_mount_that_replaces_no_files_has_them_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*args: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    path = tmp_path / "best.pt"
    path.write_text("one")
    monkeypatch.setattr(Path, method, fail)
    with replacing(path) as written:
        written.write_text("two")
    assert path.read_text() == "two"
    assert [*tmp_path.iterdir()] == [path]


def test_what_is_no_file_of_its_own_is_written_in_place(tmp_path: Path) -> None:
    path, other = tmp_path / "one.pt", tmp_path / "other.pt"
    path.write_text("")
    other.hardlink_to(path)
    for each in (Path("/dev/null"), path, tmp_path / "none" / "one.pt"):
        with replacing(each) as written:
            assert written == each


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_all_ranks_load_what_one_has_a_copy_of(
    lab: Lab, tmp_path: Path, strategy: str
) -> None:
    code = setup("sgd") + WHOLE + f"path = '{tmp_path}/of-0.pt'" + BY_HAND
    lab.train(strategy, code, live=False)  # hsdp: two copies, on a host of two ranks
    assert lab.pull("is_same", "all") == [True, True]


def test_zero3_loads_weights_that_are_in_parts(lab: Lab) -> None:
    loops = Path(__file__).parent / "conformance" / "loops"
    code = (loops / "load_state_dict_after_prepare.py").read_text()
    head = "expected = pretrained['0.weight'].clone()\n"
    check = (
        "whole = model.state_dict()['0.weight'].cpu()\nassert whole.equal(expected)\n"
    )
    begin, load, _ = code.partition("model.load_state_dict(pretrained)\n")
    lab.train("zero3", begin + head + load + check, live=False)


# All that it starts have no `flock`, as files have none on Lustre by default.
WITHOUT_LOCKS = """
import ctypes, errno, fcntl, pathlib, platform, struct, sys
number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
rules = b"".join(struct.pack("HBBI", *rule) for rule in [
    (0x20, 0, 0, 0),  # load the number of the call
    (0x15, 0, 1, number),
    (0x06, 0, 0, 0x50000 | errno.ENOSYS),
    (0x06, 0, 0, 0x7FFF0000),  # allow
])
held = ctypes.create_string_buffer(rules)
program = ctypes.create_string_buffer(struct.pack("HL", 4, ctypes.addressof(held)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
from labkit import checkpoint
from labkit.checkpoint.atomic_folder import StagingFolder
where = pathlib.Path(sys.argv[1])
other = StagingFolder(where / "b")
for step in range(2):
    checkpoint.save(where / "a", {}, {"step": step})
assert checkpoint.read(where / "a")[1] == {"step": 1}
assert other.path.is_dir()
other.discard()
try:
    fcntl.flock(sys.stdout, fcntl.LOCK_EX)
except OSError as error:
    print(sorted(path.name for path in where.iterdir()), error.strerror)
"""


@pytest.mark.long
def test_a_file_system_without_locks_has_checkpoints(tmp_path: Path) -> None:
    code = [sys.executable, "-c", WITHOUT_LOCKS, str(tmp_path)]
    ran = subprocess.run(code, capture_output=True, text=True, check=False)
    assert ran.stdout == "['a'] Function not implemented\n", ran.stderr


def test_a_save_waits_for_nobody_to_end(tmp_path: Path) -> None:
    threads = threading.active_count()
    pending = [
        checkpoint.begin_save(tmp_path / str(number), ODD, {}) for number in range(5)
    ]
    for each in pending:
        each.result(timeout=30)
        assert each.done()
    for thread in threading.enumerate():
        if thread.name == "labkit-save":
            thread.join(timeout=30)
    assert threading.active_count() == threads


def test_a_folder_in_the_making_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    # As a save and the removal of old checkpoints do at the same time.
    has_ended = threading.Event()

    def clean() -> None:
        while not has_ended.is_set():
            remove_leftovers(tmp_path)

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        for number in range(500):
            with StagingFolder(tmp_path / f"step-{number}") as staging:
                (staging.path / "file").touch()
    finally:
        has_ended.set()
        cleaner.join()


@pytest.mark.long
def test_second_copies_of_parameters_follow_what_is_loaded(
    lab: Lab, tmp_path: Path
) -> None:
    """hpZeRO's: a forward pass gathers these where there are any; and a second run
    has them too."""
    options = {"config": {"zero_optimization": {"zero_hpz_partition_size": 2}}}
    expected = reference("sgd")
    first = train(lab, "zero3", setup("sgd") + EPOCH + saved(tmp_path / "a"), **options)
    second = train(
        lab, "zero3", setup("sgd") + loaded(tmp_path / "a") + EPOCH, **options
    )
    np.testing.assert_allclose([*first, *second], expected, rtol=1e-5)
