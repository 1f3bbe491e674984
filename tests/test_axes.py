"""Every collective of a run is taken along the axes of its mesh, never on all ranks."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit
from labkit import Lab

COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
}
OF_A_RUN = (
    *("strategies", "rank/data", "rank/loop", "rank/steps", "rank/training"),
    *("rank/measuring", "rank/telemetry"),
)

# Along the axis "model" are models of their own, with another number of steps: a
# collective on all ranks would meet one that belongs elsewhere.
ALONE = """
import copy
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=AXES)
which = mesh.get_local_rank("model")
torch.manual_seed(which)
x, y = torch.randn(24 + 16 * which, 6), torch.randn(24 + 16 * which, 3)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 8 + which), torch.nn.BatchNorm1d(8 + which),
    torch.nn.ReLU(), torch.nn.Linear(8 + which, 3),
)
plain = copy.deepcopy(model)
mse = torch.nn.functional.mse_loss
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for begin in range(0, len(x), 8):
    mse(plain(x[begin:begin + 8]), y[begin:begin + 8]).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
plain.eval()
expected = [p.detach() for p in plain.parameters()] + [mse(plain(x), y).detach()]
"""
TOGETHER = """
session = prepare.__self__
session.mesh = mesh
scores = {}
session.log = lambda step=None, **found: scores.update(found)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(x, y)
fit(model, data, mse, optimizer=optimizer, batch_size=8, shuffle=False, validate=data)
found = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
found.append(torch.tensor(scores["val_loss"]))
difference = max(float((a - b).abs().max()) for a, b in zip(found, expected))
place = which, session.peers.rank, session.peers.size
"""


@pytest.fixture(scope="module")
def lab_of_4() -> Iterator[Lab]:
    with Lab(num_ranks=4, group_timeout_s=30) as lab:
        yield lab


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("ddp", {"model": 2, "dp_replicate": 2}),
        ("fsdp", {"model": 2, "dp_shard": 2}),
        ("hsdp", {"model": 2, "dp_replicate": 1, "dp_shard": 2}),
    ],
)
def test_two_models_train_side_by_side(
    lab_of_4: Lab, strategy: str, sizes: dict[str, int]
) -> None:
    lab_of_4.run(f"AXES, SHAPE = {tuple(sizes)}, {tuple(sizes.values())}\n{ALONE}")
    lab_of_4.train(strategy, TOGETHER, sync_batchnorm=True, clip=0.5, live=False)
    assert lab_of_4.pull("place", "all") == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert max(lab_of_4.pull("difference", "all")) < 1e-5


def test_no_collective_of_a_run_is_on_all_ranks() -> None:
    root = Path(labkit.__file__).parent
    found = []
    for path in (each for room in OF_A_RUN for each in (root / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                on = ast.unparse(node.func.value)
                names = {keyword.arg for keyword in node.keywords}
                is_collective = node.func.attr in COLLECTIVES and "group" not in names
                if on in ("dist", "torch.distributed", "distributed") and is_collective:
                    found.append(f"{path.relative_to(root)}:{node.lineno}")
    assert found == []
