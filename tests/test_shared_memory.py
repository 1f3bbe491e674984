"""What workers send through /dev/shm, and what happens where that is full."""

import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from labkit import Lab
from labkit.rank.data.workers import Sendable

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import sys
from labkit import Lab, RankError
from labkit.notebook.execution.errors import CellTimeoutError

BATCHES = '''
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones({num_values})
loader = torch.utils.data.DataLoader(
    Rows(), 8, num_workers=1, collate_fn=lambda rows: {{"x": [torch.stack(rows)]}}
)
'''
PREPARE = '''
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, _, loader = prepare(model, optimizer, loader)
'''
DRAW = '''
for batch in loader:
    pass
'''
small, large = BATCHES.format(num_values=1000), BATCHES.format(num_values=2**20)
with Lab(num_ranks=2) as lab:
    print(lab.train("ddp", small + PREPARE + DRAW, live=False).state)
    try:
        lab.train("ddp", large + PREPARE + DRAW, live=False)
    except RankError as error:
        print("raised:", str(error).replace("\\n", " "))
    print(lab.train("ddp", small + PREPARE + DRAW, live=False).state)
    try:
        lab.train("raw", large + DRAW, live=False, hang_after=1, timeout=4)
    except CellTimeoutError:
        print("hung")
    except RankError:
        print("died")
"""
IN_4_MIB = 'mount -t tmpfs -o size=4m none /dev/shm && exec "$@"'


@pytest.fixture
def in_4_mib() -> list[str]:
    """What has the command after it run with a /dev/shm of 4 MiB."""
    command = ["unshare", "-m", "sh", "-c", IN_4_MIB, "sh"]
    try:
        done = subprocess.run([*command, "true"], capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if done.returncode:
        pytest.skip(f"a mount namespace is not allowed here: {done.stderr!r}")
    return command


@pytest.mark.long
def test_a_full_shared_memory_is_an_error_of_the_cell(in_4_mib: list[str]) -> None:
    done = subprocess.run(
        [*in_4_mib, sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    first, raised, again, hung = done.stdout.splitlines()
    assert (first, again) == ("finished", "finished")
    assert "or use fewer workers, a smaller prefetch_factor" in raised
    if torch.__version__ < "2.10":  # its workers are killed by SIGBUS
        assert "DataLoader worker" in raised
        return
    assert "unable to allocate shared memory" in raised
    assert hung == "hung"
    assert "waits for a worker of its DataLoader" in done.stderr
    assert "/dev/shm, through which workers send their batches, has" in done.stderr


class Odd:
    """An object that holds tensors."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def stack(rows: list[torch.Tensor]) -> Odd:
    return Odd(torch.stack(rows))


def see(rows: list[torch.Tensor]) -> tuple[Odd, bool]:
    batch = Sendable(stack)(rows)
    return batch, batch.x.is_shared()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_tensors_of_any_batch_are_shared_by_a_worker_alone(num_workers: int) -> None:
    rows: Any = [torch.ones(2), torch.zeros(2)]
    loader = torch.utils.data.DataLoader(
        rows, 2, num_workers=num_workers, collate_fn=see
    )
    [(batch, is_shared)] = loader
    assert batch.x.tolist() == [[1, 1], [0, 0]]
    assert is_shared == bool(num_workers)


@pytest.mark.parametrize("kind", ["a function", "a graph"])
def test_what_a_worker_cannot_send_is_an_error(kind: str) -> None:
    def collate(rows: list[torch.Tensor]) -> object:
        x = torch.ones(1, requires_grad=True)
        return (lambda: x) if kind == "a function" else x * 2

    rows: Any = [1, 2]
    loader = torch.utils.data.DataLoader(
        rows, num_workers=1, collate_fn=Sendable(collate)
    )
    with pytest.raises(
        (AttributeError, ValueError), match=r"local object|a tensor with a graph"
    ):
        next(iter(loader))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they have no sockets")
def test_workers_send_though_the_folder_of_their_lab_was_tidied_up() -> None:
    """As of /tmp: by whom, and after how many days, the system's settings say."""
    with Lab(num_ranks=1) as lab:
        shutil.rmtree(lab._ranks.cluster.folder)
        lab.run(
            "from torch.utils.data import DataLoader\n"
            "for batch in DataLoader(torch.ones(9, 9), num_workers=1): pass",
            timeout=60,
        )
