"""Runs in the background: they leave the notebook free, and stop at a step."""

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from interrupts import interrupt_when
from kernels import Kernel
from kernels import running_kernel
from kernels import wait_until

from labkit import Lab
from labkit import RankError
from labkit import Run
from labkit.notebook.kernel.background import Job

# Trains until the file is there.
LOOP = """
from pathlib import Path
import torch.nn.functional as F
from labkit.data import digits
from labkit.models import mlp
model = mlp()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, sgd, digits(), batch_size=64)
num_steps = 0

def is_over():  # on all ranks alike, whenever the file comes
    seen = torch.tensor(float(Path({path!r}).exists()))
    dist.all_reduce(seen)
    return seen.item() > 0

while not is_over():
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        num_steps += 1
        optimizer.step()
        optimizer.zero_grad()
print("the end")
"""

RAW_LOOP = """
from pathlib import Path
layer = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
num_steps = 0
while not Path({path!r}).exists():
    layer(torch.ones(2, 4) * (rank + 1)).sum().backward()
    num_steps += 1
    optimizer.step()
"""


@pytest.fixture
def end(tmp_path: Path) -> Path:
    return tmp_path / "end"


def begin(
    lab: Lab, end: Path, strategy: str = "ddp", loop: str = LOOP, steps: int = 3
) -> Run:
    """A run in the background that has taken some steps."""
    code = loop.format(path=str(end))
    run = lab.train(strategy, code, background=True, live=False)
    wait_until(lambda: run.num_steps >= steps or run.state != "running", 60, "steps")
    return run


@pytest.mark.long
def test_a_run_in_the_background_continues_beside_the_notebook(
    lab: Lab, end: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(lab, end)
    assert run.state == "running"
    assert repr(run) == f"<Run {run.name!r}: ddp on 2 ranks, running>"
    assert list(lab.status()["state"]) == ["busy", "busy"]
    found = rf"{run.name} is running in the background.*current_lab\(\).runs\[-1\].stop"
    with pytest.raises(RuntimeError, match=found):
        lab.run("print(1)")
    with pytest.raises(TimeoutError, match="still runs"):
        run.wait(timeout=0.01)
    end.touch()
    assert run.wait(timeout=60) is run
    assert run.state == "finished"
    assert "[ranks 0-1] the end" in capsys.readouterr().out
    assert run.history["step"].max() == lab.pull("num_steps")
    assert list(lab.status()["state"]) == ["idle", "idle"]


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "fsdp"])
def test_stop_ends_it_on_all_ranks_after_the_same_step(
    lab: Lab, end: Path, strategy: str
) -> None:
    run = begin(lab, end, strategy)
    run.stop()
    assert run.state == "interrupted"
    ranks = [0] if strategy == "single" else "all"
    steps = lab.pull("num_steps", ranks)
    assert len(set(steps if isinstance(steps, list) else [steps])) == 1
    assert run.wait() is run  # no error: it was asked for
    run.stop()  # it has ended: nothing to do
    lab.run("dist.all_reduce(torch.ones(1))")


def test_ranks_that_are_far_apart_stop_after_the_same_step(lab: Lab, end: Path) -> None:
    slow = RAW_LOOP.replace(
        "    num_steps", "    rank or time.sleep(0.002)\n    num_steps"
    )
    run = begin(lab, end, "raw", "import time" + slow)
    run.stop()
    steps = lab.pull("num_steps", "all")
    assert steps[0] == steps[1]
    assert list(run.summary()["steps"]) == steps


def test_stop_interrupts_what_takes_no_step(
    lab: Lab, end: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = LOOP.replace("        num_steps += 1", "        while True: pass")
    run = begin(lab, end, loop=code, steps=0)
    wait_until(lambda: list(lab.status()["state"]) == ["busy", "busy"], 30, "busy")
    run.stop(timeout=0.5)
    assert run.state == "interrupted"
    assert "took no step for 0.5 s" in capsys.readouterr().out
    lab.run("dist.all_reduce(torch.ones(1))")


def test_a_failure_in_the_background_is_shown_and_raised_by_wait(
    lab: Lab, end: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = LOOP + "\nif rank == 1: raise ValueError('no more')"
    run = begin(lab, end, loop=code)
    end.touch()
    with pytest.raises(RankError, match=r"rank 1: failed .*ValueError: no more"):
        run.wait(timeout=60)
    assert run.state == "failed"
    assert "no more" in capsys.readouterr().err
    lab.run("dist.all_reduce(torch.ones(1))")


@pytest.mark.long
def test_a_lab_that_stops_ends_its_run_in_the_background(end: Path) -> None:
    with Lab(num_ranks=2, device="cpu") as lab:
        run = begin(lab, end)
        pids = list(lab.status()["pid"])
    assert run.state == "interrupted"
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not [t for t in threading.enumerate() if t.name == f"labkit {run.name}"]


@pytest.mark.long
def test_the_picture_stays_under_the_cell_that_began_the_run(
    kernel: Kernel, end: Path
) -> None:
    code = "%%dist_train ddp --background\n" + LOOP.format(path=str(end))
    began = kernel.run(code)
    assert began.status == "ok"
    assert "running>" in began.result["text/plain"]
    request = kernel.last_request
    messages: list[dict[str, Any]] = []

    def take(message: dict[str, Any]) -> None:
        if message["header"]["msg_type"] in ("display_data", "update_display_data"):
            messages.append(message)

    def pictures_of(request: str) -> int:
        return sum(m["parent_header"]["msg_id"] == request for m in messages)

    # Other cells are run meanwhile, and show nothing of it.
    def is_drawn() -> bool:
        kernel.take_waiting(take)
        assert kernel.run("1 + 1", on_message=take).result["text/plain"] == "2"
        return pictures_of(request) >= 3

    wait_until(is_drawn, 60, "pictures")
    assert len(messages) == pictures_of(request)
    assert kernel.run("%dist_show").status == "ok"
    shown_again = kernel.last_request
    wait_until(
        lambda: kernel.take_waiting(take) or pictures_of(shown_again) >= 2,
        60,
        "pictures in another cell",
    )
    end.touch()
    ended = kernel.run("import labkit\nlabkit.current_lab().runs[-1].wait()")
    assert "finished" in ended.result["text/plain"], ended.error


def test_an_interrupt_of_the_wait_for_a_job_does_not_end_it() -> None:
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        over.wait(60)

    job = Job(work, name="a job")
    with pytest.raises(KeyboardInterrupt), interrupt_when(begun.is_set):
        job.wait()
    assert not job.join(0)
    over.set()
    assert job.wait(60)


@pytest.mark.long
def test_an_interrupt_of_another_cell_is_not_one_of_the_run(
    kernel: Kernel, end: Path
) -> None:
    code = LOOP.format(path=str(end))
    kernel.run("%%dist_train ddp --background --no-live\n" + code)
    begun = end.with_name("begun")
    threading.Thread(
        target=lambda: (
            wait_until(begun.exists, 60, "the cell"),
            kernel.manager.interrupt_kernel(),
        )
    ).start()
    wait = f"import time; open({str(begun)!r}, 'w').close()\ntime.sleep(60)"
    assert kernel.run(wait).error["ename"] == "KeyboardInterrupt"
    end.touch()
    kernel.run("import labkit; run = labkit.current_lab().runs[-1].wait(60)")
    assert "finished" in kernel.run("run").result["text/plain"]


@pytest.mark.long
def test_a_second_notebook_follows_a_run_of_the_first(
    kernel: Kernel, end: Path
) -> None:
    code = LOOP.format(path=str(end))
    began = kernel.run(
        "%%dist_train ddp --name followed --background --no-live\n" + code
    )
    assert began.status == "ok", began.stderr
    with running_kernel() as second:
        shown = second.run("%load_ext labkit\n%dist_show followed")
        assert shown.status == "ok", shown.stderr
        pictures: list[Any] = []

        def take(message: dict[str, Any]) -> None:
            if message["header"]["msg_type"] in ("display_data", "update_display_data"):
                pictures.append(message["content"]["data"]["image/png"])

        def are_there(number: int) -> bool:
            second.take_waiting(take)
            return len(set(pictures)) >= number

        wait_until(lambda: are_there(3), 60, "three pictures")
        end.touch()
        kernel.run("import labkit; run = labkit.current_lab().runs[-1].wait()")
        followed = "import labkit; print(labkit.load_run('followed'))"
        assert second.run(followed).stdout.startswith(
            "<Run 'followed': ddp on 2 ranks, finished, "
        )
        number = len(set(pictures))
        wait_until(lambda: are_there(number + 1), 60, "the last picture")


def test_dist_show_of_an_unknown_run_names_those_there_are(kernel: Kernel) -> None:
    reply = kernel.run("%dist_show nothing")
    assert reply.status == "error"
    assert "there is no run 'nothing'" in reply.stderr
