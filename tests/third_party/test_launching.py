"""Libraries that start processes of their own."""

from collections.abc import Callable
from typing import Any

import pytest

from labkit import Lab
from labkit import RankError

pytestmark = pytest.mark.timeout(400)

Captured = pytest.CaptureFixture[str]

NOTEBOOK_LAUNCHER = """
from accelerate import Accelerator
from accelerate import notebook_launcher

def training_loop(mixed_precision="no", seed=42):
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        loss = model(torch.randn(8, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(f"process {accelerator.process_index} of {accelerator.num_processes}")

notebook_launcher(training_loop, ("no", 7), num_processes=NUM)
"""
RESET = """
from accelerate.state import AcceleratorState
AcceleratorState._reset_state(reset_partial_state=True)
"""


@pytest.mark.parametrize("num", [2, 8])
def test_notebook_launcher_calls_its_function_on_the_ranks(
    num: int, lab: Lab, capsys: Captured
) -> None:
    lab.run(RESET)  # accelerate refuses to launch where it has been used before
    code = NOTEBOOK_LAUNCHER.replace("NUM", str(num))
    for _ in range(2):  # what one launch leaves is not to stop the next
        run = lab.train("raw", code, live=False)
        assert run.num_steps == 3
        printed = capsys.readouterr().out
        assert printed.count("process 0 of 2") == printed.count("process 1 of 2") == 1
        assert len(run.notes) == 1
        assert "each calls it, once" in run.notes[0]


def test_lightnings_strategies_for_notebooks_name_the_one_that_works(
    on_ranks: Callable[..., Any],
) -> None:
    with pytest.raises(RankError, match=r'Trainer\(strategy="ddp", devices=world_size'):
        on_ranks(
            "lightning_fit.py", "--strategy", "ddp_notebook", "--output", "{output}"
        )


def test_lightning_on_one_device_of_two_ranks_is_refused(
    on_ranks: Callable[..., Any],
) -> None:
    with pytest.raises(RankError, match=r"does not match the world size \(2\)"):
        on_ranks("lightning_fit.py", "--devices", "1", "--output", "{output}")
