"""The process that draws live pictures, through a real kernel."""

import os
import sys
from collections.abc import Iterator

import psutil
import pytest
from kernels import Kernel
from kernels import running_kernel

from labkit.notebook.live.render_process import NICENESS

LOOP = """%%dist_train raw
import os, time
layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.001)
for step in range(300):
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    if step == 100 and rank == 0:
        {at_step_100}
"""
PID = (
    "from labkit.notebook.live.render_process import painter; "
    "print(painter()._process.pid)"
)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        assert kernel.run("%load_ext labkit\n%dist_start -n 2").status == "ok"
        yield kernel


def test_pictures_are_drawn_elsewhere_and_give_way(kernel: Kernel) -> None:
    reply = kernel.run(LOOP.format(at_step_100="pass"))
    assert reply.status == "ok"
    pictures = [each["image/png"] for each in [*reply.displays, *reply.updates]]
    assert len(set(pictures)) >= 3
    painter = int(kernel.run(PID).stdout)
    if sys.platform == "linux":
        assert os.sched_getscheduler(painter) == os.SCHED_IDLE
    else:
        assert psutil.Process(painter).nice() == NICENESS
    loaded = kernel.run("import sys; print('matplotlib.figure' in sys.modules)")
    assert loaded.stdout == "False\n"


def test_a_painter_that_dies_is_replaced(kernel: Kernel) -> None:
    pid = int(kernel.run(PID).stdout)
    reply = kernel.run(LOOP.format(at_step_100=f"os.kill({pid}, 9)"))
    assert (reply.status, reply.stderr) == ("ok", "")
    assert int(kernel.run(PID).stdout) != pid
    kernel.run("import labkit, base64; figure = labkit.current_lab().runs[-1].plot()")
    drawn_here = kernel.run("print(base64.b64encode(figure._repr_png_()).decode())")
    assert reply.updates[-1]["image/png"].strip() == drawn_here.stdout.strip()


def test_it_ends_with_the_lab(kernel: Kernel) -> None:
    process = psutil.Process(int(kernel.run(PID).stdout))
    assert kernel.run("%dist_stop").status == "ok"
    assert not process.is_running()
