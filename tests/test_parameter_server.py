"""The parameter server: what one process gives, with servers that know their place."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from marks import LONG
from test_strategies import OPTIMIZERS
from test_strategies import SETUPS

from labkit import Lab
from labkit import RankError
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.runs.run import Run
from labkit.theory import replica_states
from labkit.train_options import TrainOptions

pytestmark = pytest.mark.timeout(90)

LOOP = """
model, optimizer, loader = prepare(model, optimizer, data, batch_size=batch_size)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
for _ in range(epochs):
    for x, y in loader:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not optimizer.held_back:
            scheduler.step()
weights = {name: p.detach().clone() for name, p in model.named_parameters()}
"""


@pytest.fixture(scope="module")
def shared_lab_of_3() -> Iterator[Lab]:
    with Lab(num_ranks=3, group_timeout_s=30) as lab:
        yield lab


@pytest.fixture
def lab_of_3(shared_lab_of_3: Lab) -> Lab:
    """A lab whose ranks are alive and whose group works, whatever ran before."""
    shared_lab_of_3.restart()
    return shared_lab_of_3


def cell(setup: str, optimizer: str = "sgd", loop: str = LOOP) -> str:
    return (
        f"{textwrap.dedent(SETUPS[setup])}\noptimizer = {OPTIMIZERS[optimizer]}{loop}"
    )


def training(here: str = "pass", *, epochs: int = 2, optimizer: str = "") -> str:
    """A loop of six batches an epoch on the mlp, with a line of its own in it."""
    optimizer = optimizer or "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
    lines = textwrap.indent(textwrap.dedent(here), " " * 8).strip()
    return textwrap.dedent(SETUPS["mlp"]) + textwrap.dedent(f"""
import os, time
optimizer = {optimizer}
model, optimizer, loader = prepare(model, optimizer, data, batch_size=4)
n = 0
for _ in range({epochs}):
    for x, y in loader:
        loss = loss_fn(model(x), y)
        n += 1
        {lines}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
weights = {{name: p.detach().clone() for name, p in model.named_parameters()}}
""")


def differ(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one[k] - other[k]).abs().max()) for k in one)


def assert_equals_single(
    lab: Lab, code: str, *, servers: int = 1, **options: Any
) -> Run:
    lab.train("single", code, live=False, **options)
    expected = lab.pull("weights")
    run = lab.train("parameter_server", code, live=False, servers=servers, **options)
    workers = range(lab.world_size - servers)
    within = 0.06 if options.get("precision") == "bf16" else 1e-4
    for rank in workers:
        assert differ(expected, lab.pull("weights", ranks=rank)) < within
    assert not run.mismatches
    return run


@pytest.mark.parametrize(
    ("setup", "optimizer", "options"),
    [
        ("gpt, partly frozen", "sgd", {"clip": 0.2, "accumulate": 2}),
        ("resnet", "sgd", {"sync_batchnorm": True, "servers": 2}),
        pytest.param("mlp", "adamw", {}, marks=LONG),
        pytest.param("mlp", "sgd", {"precision": "bf16"}, marks=LONG),
    ],
)
def test_equals_one_process(
    lab_of_3: Lab, setup: str, optimizer: str, options: dict[str, Any]
) -> None:
    servers = {"servers": options.pop("servers")} if "servers" in options else {}
    assert_equals_single(lab_of_3, cell(setup, optimizer), **options, **servers)


@pytest.mark.release
@pytest.mark.timeout(300)
def test_equals_one_process_on_4_ranks() -> None:
    with Lab(num_ranks=4, group_timeout_s=60) as lab:
        for setup, optimizer in (
            ("mlp", "sgd"),
            ("gpt", "adamw"),
            ("gpt, partly frozen", "sgd"),
        ):
            code = cell(setup, optimizer)
            for options in ({}, {"accumulate": 2}, {"clip": 0.2}):
                for servers in (1, 2):
                    assert_equals_single(lab, code, servers=servers, **options)
        # AdamW divides by what is rounded: it has no bound as close in bf16.
        for servers in (1, 2):
            code = cell("gpt", "sgd")
            assert_equals_single(lab, code, servers=servers, precision="bf16")


def test_a_worker_alone_has_gradients_that_a_loop_may_change(lab: Lab) -> None:
    loop = LOOP.replace(
        "        optimizer.step()\n",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
        "        optimizer.step()\n",
    )
    assert_equals_single(lab, cell("mlp", loop=loop))


@pytest.mark.parametrize(
    "what", ["p.data.clamp_(-0.1, 0.1)", "p.data = p.data.flip(0)"]
)
def test_what_a_loop_changes_of_the_parameters_reaches_the_server(
    lab_of_3: Lab, what: str
) -> None:
    change = f"        for p in model.parameters():\n            {what}\n"
    loop = LOOP.replace("        if not optimizer", f"{change}        if not optimizer")
    assert_equals_single(lab_of_3, cell("mlp", loop=loop), servers=1)


def test_the_cell_is_that_of_the_workers(lab_of_3: Lab) -> None:
    code = training() + textwrap.dedent("""
        total = torch.ones(1)
        dist.all_reduce(total)
        seen = world_size, dist.get_world_size(), int(total), float(loss) > 0
        """)
    run = lab_of_3.train("parameter_server", code, live=False)
    assert lab_of_3.pull("seen", ranks="0,1") == [(2, 2, 2, True)] * 2
    assert sorted(run.history["rank"].unique()) == [0, 1]
    assert (run.world_size, run.collector.servers) == (3, [2])
    assert run.num_steps == 10
    # And afterwards the ranks are as many as ever.
    lab_of_3.run("assert dist.get_world_size() == world_size == 3")


@pytest.mark.long
def test_memory_and_bytes_are_those_of_the_formulas(lab_of_3: Lab) -> None:
    run = lab_of_3.train("parameter_server", cell("gpt", "adamw"), live=False)
    model = run.models[0]
    worker, server = run.memory.loc[0], run.memory.loc[2]
    assert worker["parameters"] == worker["gradients"] == run.theory["parameters"]
    assert worker["optimizer_state"] == 0
    for part, size in replica_states(model, TrainOptions()).items():  # all on one
        assert server[part] == pytest.approx(size, rel=0.01), part
    sent, received = (bytes_of(run.comm, kind) for kind in ("send", "recv"))
    size = 4 * model.num_parameters
    assert sent == {0: size, 1: size, 2: 2 * size}
    assert received == {0: size, 1: size, 2: 2 * size}
    assert max(sent.values()) == run.theory["wire_bytes"]


def bytes_of(comm: pd.DataFrame, kind: str) -> dict[int, int]:
    found = comm.xs(kind, level="kind")["payload_bytes"]
    return {int(rank): int(size) for rank, size in found.items()}


def test_a_checkpoint_is_of_the_whole_model(lab_of_3: Lab, tmp_path: Path) -> None:
    code = training(optimizer="torch.optim.AdamW(model.parameters(), lr=0.01)")
    more = textwrap.dedent("""
        state = optimizer.state_dict()["state"]
        moments = [state[number]["exp_avg"] for number in sorted(state)]
        """)
    at = str(tmp_path / "kept")
    options: dict[str, Any] = {"checkpoint": at, "live": False}
    lab_of_3.train("parameter_server", code + more, servers=2, every=4, **options)
    expected = lab_of_3.pull("weights"), lab_of_3.pull("moments")
    resumed = code.replace("range(2)", "range(3)") + more
    plain = lab_of_3.train("single", resumed, live=False)
    whole = lab_of_3.pull("weights"), lab_of_3.pull("moments")
    # From two servers to one process ...
    lab_of_3.train("single", code + f"load_checkpoint({last(at)!r})" + more, live=False)
    assert torch.equal(lab_of_3.pull("moments")[0], expected[1][0])
    # ... and to one server, with which the run continues.
    run = lab_of_3.train("parameter_server", resumed, resume=True, **options)
    assert run.resumed_from == 10
    assert run.num_steps == plain.num_steps == 15
    assert differ(whole[0], lab_of_3.pull("weights")) < 1e-4
    assert torch.allclose(whole[1][0], lab_of_3.pull("moments")[0], atol=1e-4)


def last(folder: str) -> str:
    return str(max(Path(folder).glob("step-*"), key=lambda each: each.name))


NAN_GUARD = textwrap.dedent("""
    class Guarded(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and not p.grad.isfinite().all():
                        raise FloatingPointError("a gradient is not finite")
            return super().step(closure)
    """)


@pytest.mark.parametrize(
    ("here", "rank", "says"),
    [
        ("if rank == 1 and n == 3: raise ValueError('of worker 1')", 1, "of worker 1"),
        ("if n == 3: loss = loss * float('nan')", 2, "a gradient is not finite"),
        ("if rank == 1 and n == 3: os.kill(os.getpid(), 9)", 1, "SIGKILL"),
        ("if rank == 1 and n == 3: continue", 2, "ranks are at different batches"),
        ("optimizer.param_groups[0]['lr'] = 0.1 + rank", 2, "lr is 0.1"),
        (
            "loss.backward(); [p.grad.mul_(2) for p in model.parameters()]",
            0,
            "--clip NORM",
        ),
    ],
    ids=["worker", "server", "death", "skipped", "rates", "gradients"],
)
def test_a_failure_frees_all_and_names_the_first(
    lab_of_3: Lab, here: str, rank: int, says: str
) -> None:
    optimizer = "Guarded(model.parameters(), lr=0.1, momentum=0.9)"
    code = NAN_GUARD + training(here, epochs=100, optimizer=optimizer)
    with pytest.raises(RankError, match=says) as failure:
        lab_of_3.train("parameter_server", code, live=False, timeout=60)
    assert failure.value.rank == rank
    lab_of_3.restart()
    assert lab_of_3.train("parameter_server", training(), live=False).num_steps == 10


def test_the_death_of_a_server_is_outlived(lab_of_3: Lab, tmp_path: Path) -> None:
    lab_of_3.train("single", training(epochs=6), live=False)
    expected = lab_of_3.pull("weights")
    pid = int(lab_of_3.status()["pid"][2])
    here = (
        f"if rank == 0 and n == 13 and os.path.exists('/proc/{pid}'): os.kill({pid}, 9)"
    )
    run = lab_of_3.train(
        "parameter_server",
        training(here, epochs=6),
        checkpoint=tmp_path / "kept",
        every=5,
        elastic=True,
        live=False,
    )
    assert [each.ranks for each in run.restarts] == [[2]]
    assert run.num_steps == 30
    assert differ(expected, lab_of_3.pull("weights")) < 1e-5


def test_an_interrupt_frees_all_from_their_waits(lab_of_3: Lab) -> None:
    code = training("if rank == 1 and n == 3: time.sleep(600)", epochs=100)
    with pytest.raises(CellTimeoutError):
        lab_of_3.train("parameter_server", code, live=False, timeout=1)
    assert lab_of_3.train("parameter_server", training(), live=False).num_steps == 10


def test_a_run_is_stopped_at_a_step(lab_of_3: Lab) -> None:
    run = lab_of_3.train(
        "parameter_server", training(epochs=10_000), live=False, background=True
    )
    while not run.num_steps:
        run.has_ended.wait(0.05)
    run.stop()
    steps = run.collector.steps
    assert (run.state, steps[0]) == ("interrupted", steps[1])
    # Nothing had to be freed: the group is the one of before.
    assert all(each["group_in_place"] for each in run.info["outcomes"])


def test_asynchronous_steps_say_how_stale_they_are(lab_of_3: Lab) -> None:
    run = lab_of_3.train(
        "parameter_server", training(epochs=4), live=False, asynchronous=True
    )
    assert run.num_steps == 20
    assert run.history["staleness"].max() >= 1
    assert "other steps on average" in " ".join(run.notes)
    # In the end all workers have what the server has.
    lab_of_3.run("weights = dict(model.named_parameters())", ranks="0,1")
    one, other = lab_of_3.pull("weights", ranks="0,1")
    assert differ(one, other) == 0


def test_a_server_that_computes_waits_for_nobody(lab_of_3: Lab, tmp_path: Path) -> None:
    """Threads of its own wait for workers, also while it takes a step."""
    slow = f"""
import time
from pathlib import Path
third, late = Path({str(tmp_path)!r}, "third"), Path({str(tmp_path)!r}, "late")

def wait_for(file):
    while not file.exists():
        time.sleep(0.01)

class Slow(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps == 3:
            third.touch()
            wait_for(late)
            time.sleep(0.5)
        return super().step(closure)
"""
    here = "if rank == 1 and n == 1: wait_for(third); late.touch()"
    code = slow + training(here, optimizer="Slow(model.parameters(), lr=0.1)")
    run = lab_of_3.train(
        "parameter_server", code, asynchronous=True, live=False, timeout=60
    )
    step = run.collector.measurements[2][1]
    [received] = [each for each in step.collectives if each.kind == "recv"]
    assert received.seconds is not None
    assert received.seconds + 0.5 < step.seconds


def test_staleness_bounds_how_far_a_worker_is_ahead(lab_of_3: Lab) -> None:
    # Worker 1 takes its first step when worker 0 can go no further.
    here = """
        if rank == 1 and n == 1:
            store.wait(["ahead"])
            store.set("first", "")
        if rank == 0 and n == 3:
            store.set("ahead", "")
        if rank == 0 and n == 4:
            assert store.check(["first"])
        """
    code = "from torch.distributed.distributed_c10d import _get_default_store\n"
    code += "store = _get_default_store()\n" + training(here)
    run = lab_of_3.train(
        "parameter_server", code, live=False, asynchronous=True, staleness=2, timeout=60
    )
    assert run.state == "finished"


def test_a_loop_that_reads_gradients_is_told_whose_they_are(lab_of_3: Lab) -> None:
    here = "norms = [] if n == 1 else [p.grad is None for p in model.parameters()]"
    run = lab_of_3.train("parameter_server", training(here), live=False)
    assert not run.notes
    here = "norms = [p.grad.norm() for p in model.parameters() if n > 100]"
    run = lab_of_3.train("parameter_server", training(here), live=False)
    assert "a worker has the gradient of its own samples" in run.notes[0]


def test_gradients_add_up_where_nothing_zeroes_them(lab_of_3: Lab) -> None:
    loop = LOOP.replace("        optimizer.zero_grad()\n", "")
    assert_equals_single(lab_of_3, cell("mlp", "no momentum", loop=loop), clip=0.2)


def test_what_is_left_after_a_run_needs_no_servers(lab_of_3: Lab) -> None:
    lab_of_3.train("parameter_server", training(), live=False)
    lab_of_3.run(
        """
held = optimizer.state_dict()["state"][0]["momentum_buffer"].abs().sum()
assert held > 0
own = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss_fn(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    own.step()
    own.zero_grad(set_to_none=False)
""",
        ranks="0,1",
        timeout=20,
    )
    with pytest.raises(RankError, match="the servers that step this optimizer ended"):
        lab_of_3.run("optimizer.step()", ranks="0,1", timeout=20)


def test_hooks_of_the_optimizer_are_called_on_the_workers(lab_of_3: Lab) -> None:
    after = "{'rank': rank, 'steps': calls.count(1)}"
    code = training().replace(
        "model, optimizer, loader",
        "calls = []\n"
        "optimizer.register_step_pre_hook(lambda *_: calls.append(0))\n"
        "optimizer.register_step_post_hook(lambda *_: calls.append(1))\n"
        "model, optimizer, loader",
        1,
    )
    lab_of_3.train("parameter_server", f"{code}\nfound = {after}", live=False)
    assert lab_of_3.pull("found", ranks=1) == {"rank": 1, "steps": 10}
    assert lab_of_3.pull("calls") == [0, 1] * 10


GAN = """
first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
one = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
two = torch.optim.Adam(second.parameters(), lr=0.01)
points = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
first, one, loader = prepare(first, one, points, batch_size=8, shuffle=False)
second, two, _ = prepare(second, two, points, batch_size=8, shuffle=False)
for _ in range(3):
    for x in loader:
        second(first(x).detach()).square().mean().backward()
        two.step()
        two.zero_grad()
        (-second(first(x))).mean().backward()
        one.step()
        one.zero_grad()
        two.zero_grad()
weights = {**dict(first.state_dict()), "second": second.weight.detach().clone()}
"""


def test_servers_keep_several_models(lab_of_3: Lab) -> None:
    run = assert_equals_single(lab_of_3, GAN)
    size = 4 * (20 + 5)
    assert bytes_of(run.comm, "send") == {0: size, 1: size, 2: 2 * size}
    assert run.theory["wire_bytes"] == 2 * size
    assert run.memory["parameters"].tolist() == [size] * 3


def test_fit_validates_on_the_workers(lab_of_3: Lab) -> None:
    code = textwrap.dedent(SETUPS["mlp"]) + textwrap.dedent("""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fit(model, data, loss_fn, optimizer=optimizer, batch_size=6, epochs=2,
            validate=unseen)
        """)
    found = {}
    for strategy in ("single", "parameter_server"):
        history = lab_of_3.train(strategy, code, live=False).history
        found[strategy] = history[history["rank"] == 0]["val_loss"].dropna().tolist()
    assert found["parameter_server"] == pytest.approx(found["single"], rel=1e-4)


# Keeps each sleep, as a multiple of what the clock showed since it was read before.
RECORD_SLEEPS = """
import time
from types import SimpleNamespace
from labkit.rank.steps import observers

slept, ticks = [], [0.0]

def thread_time():
    ticks.append(time.thread_time())
    return ticks[-1]

def sleep(seconds):
    slept.append(seconds / (ticks[-1] - ticks[-2]))

observers.time = SimpleNamespace(
    sleep=sleep, thread_time=thread_time, perf_counter=time.perf_counter
)
"""


def test_a_slow_rank_is_slow_and_says_so(lab_of_3: Lab) -> None:
    for strategy in ("ddp", "raw"):
        with pytest.raises(ValueError, match="there is no rank 3 that trains"):
            lab_of_3.train(strategy, "pass", slow="3=2")
    with pytest.raises(ValueError, match="no rank 1 that trains; rank 0 alone does"):
        lab_of_3.train("single", "pass", slow="1=2")
    with pytest.raises(ValueError, match="write the rank and by what factor"):
        lab_of_3.train("ddp", "pass", slow="1")
    lab_of_3.run(RECORD_SLEEPS)
    try:
        code = training("torch.randn(256, 256) @ torch.randn(256, 256)")
        run = lab_of_3.train("parameter_server", code, live=False, slow="1=6")
    finally:
        lab_of_3.run("observers.time = time")
    assert run.notes == ["--slow 1=6: rank 1 sleeps after each backward pass"]
    num_backwards = int(run.history["step"].max())
    shares = lab_of_3.pull("slept", "all")
    assert [len(each) for each in shares] == [0, num_backwards, 0]
    # It sleeps five times as long as it has computed.
    assert shares[1] == pytest.approx([5.0] * num_backwards)


@pytest.mark.long
def test_ranks_make_the_same_groups_after_it(lab: Lab) -> None:
    # Meshes are kept, the last four: a worker may not have more of them.
    meshes = ("hsdp", "ddp", "fsdp", "tensor")
    for strategy in (*meshes, "parameter_server", "hsdp"):
        run = lab.train(strategy, training(), live=False, timeout=30)
        assert run.state == "finished"
    lab.run("group = dist.new_group()\ndist.barrier(group)", timeout=30)


def test_options_that_cannot_be(lab: Lab) -> None:
    with pytest.raises(ValueError, match="no worker left: start more ranks"):
        lab.train("parameter_server", "pass", servers=2)
    with pytest.raises(ValueError, match="needs --asynchronous"):
        lab.train("parameter_server", "pass", staleness=1)
    with pytest.raises(ValueError, match="--servers is for parameter_server"):
        lab.train("ddp", "pass", servers=2)


def test_a_cell_without_a_model_ends(lab: Lab) -> None:
    assert lab.train("parameter_server", "x = 1", live=False).state == "finished"
