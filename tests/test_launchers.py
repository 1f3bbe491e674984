"""Scripts that start processes of their own: on a rank those are there already."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from marks import long_but

from labkit import Lab
from labkit import RankError
from labkit.checks import UnsupportedLoopError
from labkit.rank.group.launchers import forms_group
from labkit.rank.group.launchers import with_world_size

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.timeout(120)

TUTORIAL = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

def train(rank, world_size, steps):
    setup(rank, world_size)
    model = DDP(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
    print(f"trained {rank} of {world_size}")
    dist.destroy_process_group()

def main(world_size):
    mp.spawn(train, args=(world_size, 3), nprocs=world_size, join=True)
"""
WHOLE = """
import os
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
whole = [total.item(), os.environ["RANK"], os.environ["WORLD_SIZE"]]
whole.append(os.environ["MASTER_PORT"] != "12355")
"""


def code(text: str) -> str:
    return textwrap.dedent(text)


def check_whole(lab: Lab) -> None:
    """Group and environment are there for the next cell, and nothing was left."""
    lab.run(WHOLE)
    for rank, whole in enumerate(lab.pull("whole", "all")):
        assert whole == [3.0, str(rank), "2", True]
    lab.run("import multiprocessing\nleft = multiprocessing.active_children()")
    assert lab.pull("left", "all") == [[], []]


# ---- torch.multiprocessing.spawn ----


@pytest.mark.parametrize("num", ["2", "torch.cuda.device_count()", "4"])
def test_spawn_calls_the_function_once_on_each_rank(
    num: str, lab: Lab, capsys: Captured
) -> None:
    run = lab.train("raw", TUTORIAL + f"main({num})", live=False)
    assert run.num_steps == 3
    printed = capsys.readouterr().out
    assert [printed.count(f"trained {rank} of 2") for rank in range(2)] == [1, 1]
    assert len(run.notes) == 1
    assert "the processes are this lab's 2 ranks; each calls train(" in run.notes[0]
    check_whole(lab)


def test_spawn_in_a_plain_cell_says_so_on_stderr(lab: Lab, capsys: Captured) -> None:
    lab.run(TUTORIAL + "main(2)")
    printed = capsys.readouterr()
    assert "trained 1 of 2" in printed.out
    said = "labkit: torch.multiprocessing.spawn(train, nprocs=2): the processes are"
    assert printed.err.count(said) == 1
    check_whole(lab)


def test_a_script_that_spawns_runs_on_the_ranks(
    lab: Lab, tmp_path: Path, capsys: Captured
) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text(TUTORIAL + 'if __name__ == "__main__":\n    main(2)\n')
    assert lab.train("raw", f"%run {script}", live=False).num_steps == 3
    assert "trained 1 of 2" in capsys.readouterr().out
    check_whole(lab)


def test_an_exception_in_the_spawned_function_is_the_ranks(lab: Lab) -> None:
    with pytest.raises(RankError, match="KeyError: 'lost'"):
        lab.run(
            code(
                """
                import torch.multiprocessing as mp
                def train(rank):
                    if rank == 1:
                        raise KeyError("lost")
                    dist.barrier()
                mp.spawn(train, nprocs=2)
                """
            )
        )
    check_whole(lab)


def test_spawn_that_continues_beside_is_refused(lab: Lab) -> None:
    with pytest.raises(RankError, match="leave join out"):
        lab.run(TUTORIAL + "mp.spawn(train, args=(2, 3), nprocs=2, join=False)")


def test_under_single_the_one_rank_is_meant(lab: Lab, capsys: Captured) -> None:
    run = lab.train(
        "single",
        code(
            """
            import torch.multiprocessing as mp
            def train(rank, world_size):
                print(f"trained {rank} of {world_size}")
            mp.spawn(train, args=(2,), nprocs=2)
            """
        ),
        live=False,
    )
    assert capsys.readouterr().out.count("trained 0 of 1") == 1
    assert "the processes are this lab's one rank" in run.notes[0]


def test_the_number_of_processes_is_found_by_its_name() -> None:
    def worker(gpu: int, ngpus_per_node: int, seed: int) -> None: ...

    args, changed = with_world_size(worker, (0, 0), 0, 2, "spawn(...)")
    assert args == [2, 0]
    assert changed == ["ngpus_per_node"]
    assert with_world_size(worker, (2, 0), 2, 2, "spawn(...)") == ([2, 0], [])
    assert with_world_size(worker, (2.0, 0), 4, 2, "spawn(...)") == ([2.0, 0], [])


@pytest.mark.parametrize("function", [lambda rank, what: None, print])
def test_another_number_under_another_name_is_refused(function: Any) -> None:
    with pytest.raises(UnsupportedLoopError, match=r"args\[0\] is 4 too; write nprocs"):
        with_world_size(function, (4,), 4, 2, "spawn(...)")


# ---- torchrun and its like ----


def test_torchrun_within_a_rank_names_the_way_that_works(lab: Lab) -> None:
    with pytest.raises(RankError, match=r"%run train.py --epochs 2"):
        lab.run(
            "from torch.distributed.run import main\n"
            "main(['--nproc-per-node', '2', 'train.py', '--epochs', '2'])"
        )
    check_whole(lab)


def test_a_function_that_torchruns_api_launches_is_called_once(
    lab: Lab, capsys: Captured
) -> None:
    """What `accelerate.notebook_launcher` does."""
    run = lab.train(
        "raw",
        code(
            """
            from torch.distributed.launcher.api import LaunchConfig
            from torch.distributed.launcher.api import elastic_launch
            def train(epochs):
                print(f"trained {epochs} epochs of {os.environ['WORLD_SIZE']}")
                return 10 * rank
            import os
            config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=8)
            returned = elastic_launch(config, train)(5)
            """
        ),
        live=False,
    )
    assert capsys.readouterr().out.count("trained 5 epochs of 2") == 1
    assert lab.pull("returned", "all") == [{0: 0}, {1: 10}]
    assert run.notes == [
        "train was to be launched in 8 processes; those are this lab's 2 ranks, and "
        "each calls it, once"
    ]
    check_whole(lab)


def test_a_shell_command_that_launches_gets_a_note(lab: Lab, capsys: Captured) -> None:
    lab.run("!true torchrun", 0)
    assert "labkit" not in capsys.readouterr().err
    lab.run("!OMP_NUM_THREADS=1 torchrun --version > /dev/null 2>&1", 0)
    assert "torchrun starts processes of its own" in capsys.readouterr().err


# ---- processes of the cells' own ----


def test_a_spawn_pool_finds_what_the_cell_defined(lab: Lab, tmp_path: Path) -> None:
    # Neither a script that ran in the namespace, nor an emptied one, is in the way.
    (tmp_path / "script.py").write_text("ran = True\n")
    lab.run(f"%run -i {tmp_path / 'script.py'}")
    lab.run("get_ipython().user_ns.clear()")
    lab.run(
        code(
            """
            import multiprocessing
            FACTOR = 10
            class Result:
                def __init__(self, value):
                    self.value = value
            def compute(x):
                return Result(FACTOR * x)
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                results = pool.map(compute, range(4))
            values = [each.value for each in results]
            same_class = all(type(each) is Result for each in results)
            """
        )
    )
    assert lab.pull("values", "all") == [[0, 10, 20, 30]] * 2
    assert lab.pull("same_class", "all") == [True, True]
    check_whole(lab)


def test_what_cannot_go_to_a_pool_is_one_error(lab: Lab, capsys: Captured) -> None:
    with pytest.raises(RankError) as caught:
        lab.run(
            code(
                """
                import multiprocessing
                import threading
                lock = threading.Lock()
                def compute(x):
                    with lock:
                        return x
                with multiprocessing.get_context("spawn").Pool(2) as pool:
                    dist.barrier()
                    pool.map(compute, range(4))
                """
            )
        )
    assert "PicklingError: compute: this cannot be sent to another process" in str(
        caught.value
    )
    # One may be stopped, because the other has failed, before it fails alike.
    assert re.search("rank [01]: (the same|stopped)", str(caught.value))
    assert "AttributeError" not in capsys.readouterr().err


@pytest.mark.parametrize("method", long_but(["spawn", "forkserver"], "spawn"))
@pytest.mark.long
def test_workers_find_a_dataset_of_the_cell(method: str, lab: Lab) -> None:
    lab.run(
        code(
            f"""
            from torch.utils.data import DataLoader
            from torch.utils.data import Dataset
            class Squares(Dataset):
                def __init__(self):
                    self.x = torch.arange(8.0)
                def __len__(self):
                    return len(self.x)
                def __getitem__(self, i):
                    return self.x[i] ** 2
            def doubled(samples):
                return 2 * torch.stack(samples)
            loader = DataLoader(
                Squares(), batch_size=4, num_workers=2, collate_fn=doubled,
                multiprocessing_context="{method}",
            )
            seen = torch.cat(list(loader)).tolist()
            """
        )
    )
    assert lab.pull("seen", "all") == [[2.0 * i**2 for i in range(8)]] * 2


def test_a_script_can_set_the_start_method_whatever_ran_before(lab: Lab) -> None:
    for method in ["fork", "spawn", "fork"]:
        lab.run(f"import torch.multiprocessing as mp\nmp.set_start_method('{method}')")


def test_processes_that_would_form_a_group_are_refused(lab: Lab) -> None:
    with pytest.raises(RankError, match=r"call it on them, once: train\(rank, world"):
        lab.run(
            TUTORIAL
            + "for r in range(2):\n    mp.Process(target=train, args=(r, 2, 3)).start()"
        )
    check_whole(lab)


def test_a_function_forms_a_group_if_one_that_it_calls_does() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "def setup(): dist.init_process_group()\n"
        "def train(): again(); setup()\n"
        "def again(): train()\n"
        "def other(): again_later\n",
        namespace,
    )
    assert forms_group(namespace["train"])
    assert forms_group(namespace["again"])
    assert not forms_group(namespace["other"])
    assert not forms_group(print)
