"""A cell that ends leaves ranks, group and run as they are to be, whatever happens
just then: in the notebook's process, and on a rank."""

import os
import signal
from typing import Any

import pytest

from labkit import Lab
from labkit import RankError
from labkit import load_run
from labkit.notebook.execution.errors import Interrupted
from labkit.notebook.history.collector import Collector
from labkit.notebook.runs import persistence

pytestmark = pytest.mark.timeout(120)

STEPS = """
m = torch.nn.Linear(1, 1)
o = torch.optim.SGD(m.parameters(), lr=0.1)
for step in range(3):
    m(torch.ones(1, 1)).sum().backward()
    o.step()
"""
RUNNER = "from labkit.rank.engine.rpc import runner\n"


def assert_group_works(lab: Lab) -> None:
    lab.run("total = torch.ones(1)\ndist.all_reduce(total)\ntotal = total.item()")
    assert lab.pull("total", "all") == [2.0, 2.0]


def test_a_stop_while_the_run_is_written_leaves_nothing_half_done(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = persistence.end

    def end_when_stopped(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        end(*args)

    monkeypatch.setattr(persistence, "end", end_when_stopped)
    with pytest.raises(RankError, match="ZeroDivisionError"):
        lab.train("raw", f"{STEPS}\nif rank == 0: 1 / 0\ndist.barrier()", live=False)
    monkeypatch.undo()
    run = lab.runs[-1]
    assert run.state == "failed"
    assert run.folder is not None
    assert load_run(run.folder.name).state == "failed"
    assert_group_works(lab)


def test_a_stop_after_the_last_line_stops_what_comes_next(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = persistence.end

    def end_and_stop(*args: Any) -> None:
        end(*args)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(persistence, "end", end_and_stop)
    with pytest.raises(Interrupted):
        lab.train("raw", STEPS, live=False)
    monkeypatch.undo()
    assert lab.runs[-1].state == "finished"
    assert_group_works(lab)


def test_ranks_do_not_run_on_when_this_process_fails(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Collector.add

    def fail_once(collector: Collector, rank: int, batch: Any) -> None:
        monkeypatch.setattr(Collector, "add", add)
        raise ZeroDivisionError("of the notebook")

    monkeypatch.setattr(Collector, "add", fail_once)
    with pytest.raises(ZeroDivisionError, match="of the notebook"):
        lab.train("raw", f"{STEPS}\nwhile True: pass", live=False, timeout=60)
    assert lab.runs[-1].state == "failed"
    assert lab.runs[-1].num_steps == 3
    assert lab.status()["state"].tolist() == ["idle", "idle"]
    assert_group_works(lab)


def test_a_rank_that_cannot_say_how_far_it_is_ends_no_cell(lab: Lab) -> None:
    lab.run(
        f"{RUNNER}asked = runner()._requests._answers\nprogress = asked.pop('progress')"
    )
    lab.run("import time\ntime.sleep(3)", hang_after=1)
    lab.run("asked['progress'] = progress")
    assert_group_works(lab)


def test_whatever_cannot_be_taken_back_the_rest_is(lab: Lab) -> None:
    fail = f"{RUNNER}runner()._contexts.callback(lambda: 1 / 0)\ndist.barrier()"
    with pytest.raises(RankError, match="ZeroDivisionError"):
        lab.train("raw", f"{STEPS}\n{fail}", live=False)
    lab.run(
        "import threading\n"
        "left = [t.name for t in threading.enumerate() if 'emitter' in t.name]"
    )
    assert lab.pull("left", "all") == [[], []]
    assert lab.runs[-1].num_steps == 3
    assert_group_works(lab)


def test_a_part_of_the_end_of_a_run_that_fails_leaves_no_other_undone(lab: Lab) -> None:
    fail = f"""
{RUNNER}
runner()._session._undo.append(lambda: 1 / 0)
runner()._session._observers[0].close = lambda: [][0]
dist.barrier()
"""
    with pytest.raises(RankError, match="IndexError"):
        lab.train("ddp", SHARDED + fail, live=False)
    # The run is over for what it has prepared: hooks are gone, steps are plain.
    lab.run(
        "from labkit.rank.steps.former_runs import take_plain_step\n"
        "hooks = len(net._forward_pre_hooks)\n"
        "is_plain = optimizer.take_step is take_plain_step"
    )
    assert lab.pull("hooks", "all") == [0, 0]
    assert lab.pull("is_plain", "all") == [True, True]
    assert_group_works(lab)


def test_an_observer_that_fails_at_the_end_leaves_the_others_theirs(lab: Lab) -> None:
    fail = f"""
{RUNNER}
ended = []
first, *others = runner()._session._observers
first.end = lambda step: 1 / 0
first.close = lambda: [][0]
for number, each in enumerate(others):
    each.end = lambda step, number=number: ended.append((number, step))
dist.barrier()
"""
    with pytest.raises(RankError, match="ZeroDivisionError"):
        lab.train("ddp", SHARDED + fail, live=False)
    lab.run("numbers = [number for number, step in ended]\nnum_others = len(others)")
    [num_others, _] = lab.pull("num_others", "all")
    assert lab.pull("numbers", "all") == [[*range(num_others)]] * 2
    assert_group_works(lab)


FAIL_NEXT = f"""
{RUNNER}
import signal

def fail_once(spec):
    del runner()._start_session
    raise ValueError("no session")

runner()._start_session = fail_once
signal.raise_signal(signal.SIGINT)
"""


def test_a_cell_that_fails_before_its_code_does_not_run_it(lab: Lab) -> None:
    with pytest.raises(RankError, match="stopped at line 10") as first:
        lab.run(FAIL_NEXT)
    assert [each.status for each in first.value.outcomes] == ["interrupted"] * 2
    with pytest.raises(RankError, match="ValueError: no session") as then:
        lab.run("has_run = True")
    assert [each.status for each in then.value.outcomes] == ["error"] * 2
    assert "ValueError" in "".join(then.value.outcomes[0].traceback)
    with pytest.raises(NameError, match="no variable 'has_run'"):
        lab.pull("has_run")
    assert_group_works(lab)


def test_cells_and_questions_leave_no_file_open(lab: Lab) -> None:
    count = "import os\nnum_open = len(os.listdir('/proc/self/fd'))"
    lab.train("raw", STEPS, live=False)
    lab.status()
    lab.run(count)
    before = lab.pull("num_open", "all")
    for _ in range(3):
        lab.train("raw", STEPS, live=False)
        lab.status()
    lab.run(count)
    after = lab.pull("num_open", "all")
    assert all(now <= then for now, then in zip(after, before, strict=True))


@pytest.mark.parametrize("step", ["np.int64(7)", "torch.tensor(7)", "7"])
def test_a_step_is_any_whole_number(lab: Lab, step: str) -> None:
    run = lab.train("raw", f"import numpy as np\nlog(step={step}, a=1.0)", live=False)
    assert run.history["step"].tolist() == [7, 7]


@pytest.mark.parametrize("step", ["1.0", "True", "2**62", "'1'", "np.float64(1)"])
def test_a_step_that_is_none_is_refused(lab: Lab, step: str) -> None:
    with pytest.raises(RankError, match="the step must be a whole number"):
        lab.train("raw", f"import numpy as np\nlog(step={step}, a=1.0)", live=False)


@pytest.mark.long
def test_an_estimate_asks_any_rank_that_lives(lab: Lab) -> None:
    import torch

    model = torch.nn.Linear(4, 4)
    expected = lab.estimate(model, batch_size=8).device_bytes
    os.kill(int(lab.status()["pid"][0]), signal.SIGKILL)
    assert lab.estimate(model, batch_size=8).device_bytes == expected
    os.kill(int(lab.status()["pid"][1]), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"no rank answers .*rank 0: dead"):
        lab.estimate(model, batch_size=8)
    assert lab.estimate(model, batch_size=8, device_bytes=2**30).device_bytes == 2**30


SHARDED = """
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = [(torch.ones(4), torch.ones(4))] * 8
model, optimizer, loader = prepare(net, optimizer, data, batch_size=4)
for x, y in loader:
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COUNT_LISTENING = """
import psutil
found = psutil.Process().net_connections("tcp")
num_listening = sum(each.status == psutil.CONN_LISTEN for each in found)
"""


def lose_group(lab: Lab) -> None:
    with pytest.raises(RankError):
        lab.run("if rank == 0:\n    raise ValueError\ndist.barrier()")


def num_listening(lab: Lab) -> list[int]:
    """By rank: every group of gloo's has a listening socket."""
    lab.run(COUNT_LISTENING)
    return list(lab.pull("num_listening", "all"))


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
@pytest.mark.long
def test_groups_that_are_re_created_close_those_before(lab: Lab, strategy: str) -> None:
    before = []
    for _ in range(5):
        lab.train(strategy, SHARDED, live=False)
        lose_group(lab)
        before.append(num_listening(lab))
    # With torch 2.9 each rank has two more from the second formation on.
    assert before[2:] == before[1:-1]


def test_a_mesh_of_a_cell_keeps_no_former_groups(lab: Lab) -> None:
    lab.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "others = [dist.new_group([0, 1]) for _ in range(2)]\n"
        "mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('a', 'b'))"
    )
    lose_group(lab)
    lab.run("del others")
    lose_group(lab)
    before = num_listening(lab)
    lose_group(lab)
    lose_group(lab)
    assert num_listening(lab) == before
    lab.run(
        "groups = [mesh.get_group(axis) for axis in ('a', 'b')]\n"
        "known = getattr(mesh, '_pg_registry', ())  # not in older versions\n"
        "kept = len(set(known) - {g.group_name for g in groups})"
    )
    assert lab.pull("kept", "all") == [0, 0]
