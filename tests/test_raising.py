"""Whatever a cell raises, wherever: it ends, and the next one works, also under every
strategy."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from marks import in_suites
from marks import release_but

from labkit import Lab
from labkit import RankError
from labkit.notebook.execution.errors import CellTimeoutError

pytestmark = pytest.mark.timeout(120)

STRATEGIES = (
    *("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"),
    "tensor",
)

SET_UP = """
import os
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from labkit.data import digits
from labkit.models import mlp

kept = 100 + rank
full = TensorDataset(*digits()[:96])

class Picky(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        if index >= 32:
            on_item()
        return full[index]

class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        fail()
        return gradient

class Untellable(Exception):
    def __str__(self):
        raise RuntimeError("no words")
    __repr__ = __str__

class OwnBaseException(BaseException):
    pass

def fail(*args):
    if rank == 1 or world_size == 1:
        raise ValueError("on purpose")

def hook(state, bucket):
    fail()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / world_size)

def recurse(n):
    return recurse(n + 1)
"""

TRAIN = """
torch.manual_seed(3)
plain = mlp()
sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
model, optimizer, loader = prepare(plain, sgd, full, batch_size=32, shuffle=False)
for step, (x, y) in enumerate(loader):
    {before}
    output = {model}(x)
    loss = F.cross_entropy(output, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {after}
"""
"""Fails in its second step: what the first one made is there."""


def training(*, before: str = "pass", model: str = "model", after: str = "pass") -> str:
    return TRAIN.format(before=before, model=model, after=after)


# What a training cell does on rank 1, and what is shown of it.
FAILURES = {
    "before everything": ("fail()\n" + training(), "ValueError: on purpose"),
    "between two steps": (training(before="step and fail()"), "on purpose"),
    "in forward": (
        training(before="if step: plain.register_forward_hook(lambda *args: fail())"),
        "on purpose",
    ),
    "in backward": (
        training(
            model="(lambda x: RaisesInBackward.apply(model(x)) if step else model(x))"
        ),
        "on purpose",
    ),
}
# Those that do not depend on the strategy.
MORE_FAILURES = {
    "in a worker": (
        "def on_item(): fail()\n"
        + training().replace(
            "full, batch_size=32, shuffle=False",
            "DataLoader(Picky(), batch_size=32, num_workers=1)",
        ),
        "Caught ValueError in DataLoader worker",
    ),
    "a worker is killed": (
        "def on_item(): rank == 1 and os.kill(os.getpid(), 9)\n"
        + training().replace(
            "full, batch_size=32, shuffle=False",
            "DataLoader(Picky(), batch_size=32, num_workers=1)",
        ),
        "DataLoader worker (pid",
    ),
    "a gradient's hook": (
        training(after="next(plain.parameters()).register_hook(fail)"),
        "on purpose",
    ),
    "a communication hook": (
        training(before="if not step: model.register_comm_hook(None, hook)"),
        "on purpose",
    ),
    "a scheduler": (
        training(
            before="if not step: schedule = torch.optim.lr_scheduler.LambdaLR("
            "sgd, lambda epoch: fail() if epoch and rank else 1.0)",
            after="schedule.step()",
        ),
        "on purpose",
    ),
    "a loss function": (
        "def wrong(output, y):\n    fail()\n    return F.cross_entropy(output, y)\n"
        "model = mlp()\nsgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "fit(model, full, F.cross_entropy, optimizer=sgd, batch_size=32, "
        "validate=full, metrics={'wrong': wrong})",
        "on purpose",
    ),
    "after an await": (
        "import asyncio\nawait asyncio.sleep(0)\n" + training(after="fail()"),
        "on purpose",
    ),
}
EXCEPTIONS = {
    "SystemExit(3)": "SystemExit: 3",
    "StopIteration": "StopIteration",
    "GeneratorExit": "GeneratorExit",
    "OwnBaseException('on purpose')": "OwnBaseException: on purpose",
    "ExceptionGroup('two', [ValueError('a'), TypeError('b')])": "ExceptionGroup: two",
    "Untellable": "Untellable: (its str() raised RuntimeError)",
    "KeyboardInterrupt": "rank 1: stopped",
}


def assert_the_next_cell_works(lab: Lab) -> None:
    everyone = range(lab.world_size)
    lab.run("total = torch.tensor([rank])\ndist.all_reduce(total)\ntotal = int(total)")
    assert lab.pull("total", "all") == [sum(everyone)] * len(everyone)
    assert lab.pull("kept", "all") == [100 + rank for rank in everyone]


def fails(lab: Lab, text: str, strategy: str | None, code: str) -> RankError:
    """Run `code`, which fails on rank 1 first, and says `text`."""
    runs = lab.run if strategy is None else partial(lab.train, strategy, live=False)
    with pytest.raises(RankError) as caught:
        runs(code, timeout=60)
    error = caught.value
    assert error.rank == (0 if strategy == "single" else 1), error
    assert text in str(error)
    return error


def weights(lab: Lab) -> dict[str, Any]:
    value = lab.pull("plain", full=True)
    return value if isinstance(value, dict) else dict(value.state_dict())


ONE_MORE_STEP = "F.cross_entropy(model(x), y).backward()\noptimizer.step()"


@pytest.fixture(scope="module")
def references(shared_lab: Lab) -> list[dict[str, Any]]:
    """One process's weights after the steps of `TRAIN`, and after one more."""
    shared_lab.restart()
    shared_lab.run(SET_UP)
    shared_lab.train("single", training(), live=False)
    after_run = weights(shared_lab)
    shared_lab.run(ONE_MORE_STEP, ranks=0)
    return [after_run, weights(shared_lab)]


@pytest.mark.parametrize("strategy", in_suites(STRATEGIES, test=["fsdp"]))
def test_every_failure_leaves_the_strategy_right(
    lab: Lab, strategy: str, references: list[dict[str, Any]]
) -> None:
    lab.run(SET_UP)
    for code, text in FAILURES.values():
        error = fails(lab, text, strategy, code)
        if strategy != "single":
            assert "because rank 1 failed" in str(error)
    assert_the_next_cell_works(lab)
    lab.train(strategy, training(), live=False)
    torch.testing.assert_close(weights(lab), references[0])


# The gradients of the last layer are there when the backward pass fails.
BREAK_INSIDE = """
def breaks(module, args, output):
    if is_to_break:
        output = RaisesInBackward.apply(output)
    return output

is_to_break = False
"""
TAKE_STEP = "F.cross_entropy(model(x), y).backward()\noptimizer.step()\n"


@pytest.mark.parametrize("who", ["rank == 1 or world_size == 1", "True"])
@pytest.mark.parametrize(  # a layer that is split takes no hook
    "strategy",
    in_suites(STRATEGIES[:-1], test=["zero3"]),
)
def test_a_model_whose_backward_pass_failed_is_trained_on(
    lab: Lab, strategy: str, who: str, references: list[dict[str, Any]]
) -> None:
    fail = f"def fail(): assert not ({who}), 'on purpose'\n"
    lab.run(SET_UP + BREAK_INSIDE + fail)
    code = training(
        before="step or plain[1].register_forward_hook(breaks)\n"
        "    is_to_break = step == 2"
    )
    with pytest.raises(RankError, match="on purpose"):
        lab.train(strategy, code, live=False, timeout=60)
    ranks = "0" if strategy == "single" else "all"
    lab.run("is_to_break = False\noptimizer.zero_grad()", ranks=ranks)
    lab.run(TAKE_STEP + "optimizer.zero_grad()", ranks=ranks)
    torch.testing.assert_close(weights(lab), references[0])
    lab.run(TAKE_STEP, ranks=ranks)
    torch.testing.assert_close(weights(lab), references[1])


@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("strategy", release_but(["zero2", "zero3", "fsdp"], "zero2"))
def test_a_loop_that_catches_what_a_backward_pass_raises_continues(
    lab: Lab, strategy: str, zeroes: bool, references: list[dict[str, Any]]
) -> None:
    lab.run(SET_UP + BREAK_INSIDE + "def fail(): raise ValueError('on purpose')\n")
    code = training(
        before="step or plain[1].register_forward_hook(breaks)\n"
        "    is_to_break = True\n"
        "    try:\n        F.cross_entropy(model(x), y).backward()\n"
        f"    except ValueError:\n        {zeroes} and optimizer.zero_grad()\n"
        "    is_to_break = False"
    )
    run = lab.train(strategy, code, live=False, timeout=60)
    torch.testing.assert_close(weights(lab), references[0])
    dropped = "a backward pass failed half-way"
    assert any(dropped in note for note in run.notes) is not zeroes


@pytest.mark.parametrize("strategy", release_but(["zero2", "zero3"], "zero2"))
def test_what_a_loop_writes_to_weights_after_a_failed_backward_pass_stays(
    lab: Lab, strategy: str
) -> None:
    """The pass fails within the module whose own weight is written."""
    code = """
class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(64, 64) * 0.1)

    def forward(self, x):
        hidden = (x @ self.w).tanh()
        if is_to_break:
            hidden.register_hook(raises)
        return hidden * 1.0

def raises(gradient):
    raise ValueError("on purpose")

plain = torch.nn.Sequential(torch.nn.Linear(64, 64), Inner(), torch.nn.Linear(64, 10))
sgd = torch.optim.SGD(plain.parameters(), lr=0.0)
model, optimizer, loader = prepare(plain, sgd, full, batch_size=32, shuffle=False)
for step, (x, y) in enumerate(loader):
    is_to_break = step == 1
    try:
        F.cross_entropy(model(x.flatten(1)), y).backward()
    except ValueError:
        with torch.no_grad():
            plain[1].w.fill_(0.5)
    optimizer.step()
    optimizer.zero_grad()
"""
    lab.run(SET_UP)
    lab.train(strategy, code, live=False, timeout=60)
    written = weights(lab)["1.w"]
    torch.testing.assert_close(written, torch.full_like(written, 0.5))


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_gradients_of_a_failed_backward_pass_are_freed_before_the_next_forward_pass(
    lab: Lab, strategy: str
) -> None:
    held = """
def held(*args):
    gradients = map(torch.Tensor.grad.__get__, plain.parameters())
    counts.append(sum(gradient is not None for gradient in gradients))

counts = []
def fail(): raise ValueError('on purpose')
"""
    lab.run(SET_UP + BREAK_INSIDE + held)
    code = training(
        before="step or plain[1].register_forward_hook(breaks)\n"
        "    is_to_break = True\n"
        "    try:\n        F.cross_entropy(model(x), y).backward()\n"
        "    except ValueError:\n        held()\n"
        "    is_to_break = False\n"
        "    handle = plain[0].register_forward_pre_hook(held)",
        after="handle.remove()",
    )
    lab.train(strategy, code, live=False, timeout=60)
    first, second = lab.pull("counts", 0)[:2]
    assert first
    assert not second


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_what_a_failed_pass_has_offloaded_is_not_added_to_the_next(
    lab: Lab, strategy: str, references: list[dict[str, Any]]
) -> None:
    lab.run(SET_UP + BREAK_INSIDE + "def fail(): raise ValueError('on purpose')\n")
    code = training(
        before="step or plain[1].register_forward_hook(breaks)\n"
        "    F.cross_entropy(model(x), y).backward()\n"
        "    optimizer.zero_grad()\n"
        "    is_to_break = True\n"
        "    try:\n        F.cross_entropy(model(x), y).backward()\n"
        "    except ValueError:\n        optimizer.zero_grad()\n"
        "    is_to_break = False"
    )
    offload = {"offload_optimizer": {"device": "cpu"}}
    config = {"zero_optimization": offload}
    lab.train(strategy, code, config=config, live=False, timeout=60)
    torch.testing.assert_close(weights(lab), references[0])


HALF = """
from torch import nn
torch.manual_seed(0)
layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)]
model = nn.Sequential(*layers)
data = torch.utils.data.TensorDataset(torch.randn(48, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
for step, (x,) in enumerate(loader):
    optimizer.zero_grad()
    {passes}
    optimizer.step()
"""


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    "passes",
    [
        "(model(x) if step % 2 else model[:2](x)).square().mean().backward()",
        "[f(x).square().mean().backward() for f in (model[:2], model)]",
    ],
)
def test_what_a_step_has_offloaded_is_not_taken_for_the_next_one(
    lab: Lab, strategy: str, passes: str
) -> None:
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    found = []
    for config in (None, offload):
        code = HALF.format(passes=passes)
        lab.train(strategy, code, config=config, live=False, timeout=60)
        found.append(lab.pull("model", full=True))
    torch.testing.assert_close(found[1], found[0])


def test_a_step_in_inference_mode_is_refused(lab: Lab) -> None:
    """It would leave torch in a state in which no next step works."""
    code = HALF.format(passes="model(x).square().mean().backward()")
    code = code.replace("    optimizer.step", "    with nn_mode(): optimizer.step")
    code = "import torch\nnn_mode = torch.inference_mode\n" + code
    with pytest.raises(
        RankError, match=r"step\(\) is called under torch.inference_mode"
    ):
        lab.train("zero3", code, live=False, timeout=60)
    lab.train("zero3", code.replace("torch.inf", "torch.no_grad #"), live=False)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_parameters_that_are_to_be_swapped_are_converted(
    lab: Lab, strategy: str
) -> None:
    code = HALF.format(passes="model(x).square().mean().backward()")
    switch = "torch.__future__.set_swap_module_params_on_conversion({})\n"
    code = f"import torch\n{switch.format(True)}{code}{switch.format(False)}"
    lab.train(strategy, code, live=False, timeout=60)


@pytest.mark.parametrize("strategy", release_but(["zero1", "zero3"], "zero1"))
def test_a_model_whose_backward_pass_was_interrupted_is_trained_on(
    lab: Lab, strategy: str, references: list[dict[str, Any]]
) -> None:
    fail = (
        "import signal\ndef fail(): rank == 1 and signal.raise_signal(signal.SIGINT)\n"
    )
    lab.run(SET_UP + BREAK_INSIDE + fail)
    code = training(
        before="step or plain[1].register_forward_hook(breaks)\n"
        "    is_to_break = step == 2"
    )
    with pytest.raises(RankError, match="rank 1: stopped"):
        lab.train(strategy, code, live=False, timeout=60)
    lab.run("is_to_break = False\noptimizer.zero_grad()")
    lab.run(TAKE_STEP + "optimizer.zero_grad()")
    torch.testing.assert_close(weights(lab), references[0])
    lab.run(TAKE_STEP)
    torch.testing.assert_close(weights(lab), references[1])


@pytest.mark.release
def test_failures_in_all_that_a_cell_calls(
    lab: Lab, references: list[dict[str, Any]]
) -> None:
    lab.run(SET_UP)
    for code, text in MORE_FAILURES.values():
        fails(lab, text, "ddp", code)
        assert_the_next_cell_works(lab)
    lab.train("ddp", training(), live=False)
    torch.testing.assert_close(weights(lab), references[0])


@pytest.mark.release
def test_any_exception_ends_the_cell_and_no_more(lab: Lab) -> None:
    lab.run(SET_UP)
    for raised, text in EXCEPTIONS.items():
        code = f"if rank == 1: raise {raised}\ndist.barrier()"
        fails(lab, text, None, code)
    fails(lab, "SystemExit", None, "if rank == 1: exit()\ndist.barrier()")
    error = fails(lab, "RecursionError", None, "recurse(0) if rank else dist.barrier()")
    shown = "\n".join(error._render_traceback_())
    assert re.search(r"\(\d of \d{3,} frames\)", shown), shown
    lab.run("import sys, collections\nsys.modules['gone.part'] = collections")
    fails(lab, "on purpose", None, "fail()\ndist.barrier()")
    lab.run("forgotten = 'gone.part' not in sys.modules")
    assert lab.pull("forgotten", "all") == [True, True]
    lab.run("class D:\n    def __del__(self): raise ValueError\nd = D()\ndel d")
    assert_the_next_cell_works(lab)


def test_an_error_in_a_measured_step_is_shown_without_what_measures_it(
    lab: Lab,
) -> None:
    cell = (
        "model = torch.nn.Linear(2, 1)\n"
        "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = torch.utils.data.TensorDataset(torch.ones(8, 3))\n"
        "model, sgd, loader = prepare(model, sgd, data, batch_size=4)\n"
        "for (x,) in loader:\n"
        "    model(x)"
    )
    with pytest.raises(RankError, match="shapes cannot be multiplied") as caught:
        lab.train("ddp", cell, live=False)
    shown = "\n".join(caught.value._render_traceback_())
    assert "linear.py" in shown
    assert "labkit/" not in shown


@pytest.mark.release
def test_a_refusal_is_shown_at_the_users_line(lab: Lab) -> None:
    """Without labkit's code that holds the message, which would be there twice."""
    cell = (
        "model = torch.nn.Linear(2, 1)\n"
        "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(4, 2)).mean().backward()\n"
        "sgd.step()"
    )
    with pytest.raises(RankError) as caught:
        lab.train("ddp", cell, live=False)
    text = "\n".join(caught.value._render_traceback_())
    shown = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "----> 4 sgd.step()" in shown
    assert shown.count("the cell trains without prepare") == 1
    assert "File " not in shown
    assert "frames)" not in shown


@pytest.mark.release
def test_failures_of_half_the_ranks(lab: Lab) -> None:
    code = (
        "ones = torch.ones(1)\ndist.all_reduce(ones)\n"
        "if rank in (1, 3): raise ValueError(f'on purpose {rank}')\n"
        "dist.all_reduce(ones)"
    )
    with Lab(num_ranks=4, group_timeout_s=30) as four:
        four.run("kept = 100 + rank\npair = dist.new_group([0, 2])")
        with pytest.raises(RankError, match=r"ValueError: on purpose [13]") as caught:
            four.run(code, timeout=30)
        ended = {each.rank: each.status for each in caught.value.outcomes}
        assert ended == {0: "interrupted", 1: "error", 2: "interrupted", 3: "error"}
        assert_the_next_cell_works(four)
        # A group that a cell made is re-created with the others.
        four.run(
            "ones = torch.ones(1)\n"
            "if rank in (0, 2): dist.all_reduce(ones, group=pair)\nones = ones.item()"
        )
        assert four.pull("ones", "all") == [2.0, 1.0, 2.0, 1.0]


# ---- models of before ----

STEP = """
def take_steps(num_steps, fails_in=None):
    for step in range(num_steps):
        x = torch.ones(4, 64) * (rank + 1 + step)
        output = wrapped(x)
        if step == fails_in:
            output = RaisesInBackward.apply(output)
        F.cross_entropy(output, torch.arange(4)).backward()
        optimizer.step()
        optimizer.zero_grad()

def wrap(kind):
    torch.manual_seed(5)
    plain = mlp()
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.001)
    shape = (1, 2) if kind == "hsdp" else (2,)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape):])
    for block in plain[1:]:
        if any(True for _ in block.parameters()):
            dist.fsdp.fully_shard(block, mesh=mesh)
    return dist.fsdp.fully_shard(plain, mesh=mesh)

def begin(kind):
    global wrapped, optimizer
    wrapped = wrap(kind)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
"""


STEP_ON = """
for step in (1, 2):
    x = torch.ones(4, 64) * (rank + 1 + step)
    F.cross_entropy(wrapped(x), torch.arange(4)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("kind", release_but(["ddp", "fsdp", "hsdp"], "fsdp"))
def test_a_model_of_before_is_trained_on(lab: Lab, kind: str) -> None:
    """A failed backward pass of one rank, or of all; the step is taken again."""
    import_fsdp = "import torch.distributed.fsdp\n"
    lab.run(SET_UP + import_fsdp + STEP + f"begin('{kind}')\ntake_steps(3)")
    expected = lab.pull("wrapped", full=True)
    for who in ("rank == 1", "True"):
        lab.run(
            f"begin('{kind}')\ntake_steps(1)\n"
            f"def fail(*args):\n    if {who}: raise ValueError('on purpose')"
        )
        with pytest.raises(RankError, match="on purpose"):
            lab.run("take_steps(1, fails_in=0)", timeout=30)
        lab.run("wrapped.zero_grad()\n" + STEP_ON)
        torch.testing.assert_close(lab.pull("wrapped", full=True), expected)


@pytest.mark.parametrize("strategy", release_but(["zero1", "zero3"], "zero3"))
def test_a_run_of_before_can_be_pulled_and_trained_on(
    lab: Lab, strategy: str, references: list[dict[str, Any]]
) -> None:
    lab.run(SET_UP)
    lab.train(strategy, training(), live=False)
    with pytest.raises(RankError):
        lab.run("if rank: raise ValueError\ndist.barrier()", timeout=30)
    torch.testing.assert_close(weights(lab), references[0])
    lab.run(ONE_MORE_STEP)
    torch.testing.assert_close(weights(lab), references[1])


# ---- memory ----

HOLD = """
import gc

def hold(then):
    held = torch.ones(2**24)  # 64 MiB
    loop = [held, held + 1]
    loop.append(loop)
    try:
        then()
    except ValueError as error:
        raise RuntimeError("because of it") from error

def live_bytes():
    gc.collect()  # what an earlier test left is no part of this one
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    return sum({t.untyped_storage()._cdata: t.nbytes for t in tensors}.values())

mine = torch.ones(2**20)
before = live_bytes()
"""


def test_the_tensors_of_a_failed_cell_are_freed_and_their_size_reported(
    lab: Lab,
) -> None:
    lab.run(SET_UP + HOLD)
    code = "def then():\n    fail()\n    dist.barrier()\nhold(then)"
    error = fails(lab, "; RuntimeError: because of it", None, code)
    for outcome in error.outcomes:
        assert 2**27 <= outcome.freed_bytes < 2**28, outcome
        assert "; 128 MiB of its tensors were freed" in str(error).splitlines()[0]
    assert "rank 1: 128 MiB of its tensors were freed" in error._render_traceback_()
    # What a test before has left may be freed meanwhile.
    lab.run("more = live_bytes() - before <= 0, len(mine) == 2**20")
    assert lab.pull("more", "all") == [(True, True)] * 2


def test_the_tensors_of_an_interrupted_cell_are_freed_too(lab: Lab) -> None:
    lab.run(SET_UP + HOLD)
    with pytest.raises(CellTimeoutError, match="128 MiB of its tensors were freed"):
        lab.run("def then():\n    while True: pass\nhold(then)", timeout=1)
    lab.run("more = live_bytes() - before")
    assert lab.pull("more", "all") == [0, 0]


def test_out_of_memory_tells_what_was_held_and_what_would_fit(lab: Lab) -> None:
    lab.run(SET_UP)
    code = (
        training()
        .replace("SGD", "Adam")
        .replace(
            "    optimizer.step()",
            "    step and rank and torch.empty(2**50)\n    optimizer.step()",
        )
    )
    error = fails(lab, "can't allocate memory", "ddp", code)
    told = str(error)
    for name in ("parameters", "gradients", "optimizer state", "this process in total"):
        assert re.search(rf"^  {name} +[\d,.]+ MiB$", told, re.MULTILINE), told
    assert "Forecast for batches of 32: On 2 ranks of" in told
    assert error.outcomes[0].memory == ""
    lab.run("large = torch.ones(2**20)")
    error = fails(lab, "can't allocate memory", None, "if rank: torch.empty(2**50)")
    assert re.search(r"^  large +4\.00 MiB$", str(error), re.MULTILINE), error
    assert "Forecast" not in str(error)


@pytest.mark.parametrize("strategy", release_but(["zero1", "zero3"], "zero1"))
def test_out_of_memory_in_a_backward_pass_tells_of_its_gradients(
    lab: Lab, strategy: str
) -> None:
    fail = "def fail(): rank and torch.empty(2**50)\n"
    lab.run(SET_UP + BREAK_INSIDE + fail)
    code = training(
        before="step or plain[1].register_forward_hook(breaks)\n"
        "    is_to_break = step == 2"
    )
    error = fails(lab, "can't allocate memory", strategy, code)
    assert re.search(r"^  gradients +[\d,.]+ MiB$", str(error), re.MULTILINE), error
