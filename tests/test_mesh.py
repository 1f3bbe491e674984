"""The device mesh of a run: what `--mesh` says of its axes."""

import pytest

from labkit import Lab
from labkit import RankError
from labkit.strategies import STRATEGIES


@pytest.mark.parametrize(
    ("strategy", "mesh", "world_size", "expected"),
    [
        ("single", None, 1, {}),
        ("ddp", None, 4, {"dp_replicate": 4}),
        ("ddp", "dp=4", 4, {"dp_replicate": 4}),
        ("fsdp", "dp_shard=3", 3, {"dp_shard": 3}),
        ("hsdp", None, 4, {"dp_replicate": 2, "dp_shard": 2}),
        ("hsdp", None, 3, {"dp_replicate": 1, "dp_shard": 3}),
        ("hsdp", "dp_replicate=4", 8, {"dp_replicate": 4, "dp_shard": 2}),
        ("hsdp", "dp=8", 8, {"dp_replicate": 1, "dp_shard": 8}),
        ("tensor", None, 4, {"tp": 4}),
        ("tensor", "dp=2,tp=2", 4, {"dp_shard": 2, "tp": 2}),
        # Shards of one rank: replicas are not taken for shards.
        ("tensor", "dp_replicate=2", 4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}),
    ],
)
def test_ranks_are_laid_out_along_axes(
    strategy: str, mesh: str | None, world_size: int, expected: dict[str, int]
) -> None:
    found = STRATEGIES[strategy].mesh_sizes(mesh, world_size)
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize(
    ("strategy", "ranks_per_host", "expected"),
    [
        ("hsdp", [4], {"dp_replicate": 2, "dp_shard": 2}),
        ("hsdp", [4, 4], {"dp_replicate": 2, "dp_shard": 4}),
        ("hsdp", [2, 2, 2, 2], {"dp_replicate": 4, "dp_shard": 2}),
        ("hsdp", [2, 4], {"dp_replicate": 3, "dp_shard": 2}),
        ("hsdp", [1, 1, 1, 1], {"dp_replicate": 2, "dp_shard": 2}),
        ("tensor", [2, 2], {"dp_shard": 2, "tp": 2}),
        ("tensor", [4, 8], {"dp_shard": 3, "tp": 4}),
        ("tensor", [1, 1], {"tp": 2}),
        ("tensor", [1, 2], {"tp": 3}),
        ("fsdp", [2, 2], {"dp_shard": 4}),
        ("pipeline", [2, 2], {"pp": 4}),
        ("raw", [2, 2], {}),
    ],
)
def test_a_host_has_the_whole_model_where_the_mesh_has_two_axes(
    strategy: str, ranks_per_host: list[int], expected: dict[str, int]
) -> None:
    table = STRATEGIES[strategy]
    mesh = table.mesh_on_hosts(ranks_per_host)
    found = table.mesh_sizes(mesh, sum(ranks_per_host))
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize(
    ("strategy", "mesh", "message"),
    [
        ("ddp", "dp=3", "has 3 places for 2 ranks; choose sizes whose product is 2"),
        ("hsdp", "dp_replicate=3", "dp_replicate=3, dp_shard=1 has 3 places"),
        ("fsdp", "tp=2", "no axis 'tp' under fsdp, which has: dp_shard"),
        ("fsdp", "dp=2,dp_shard=1", "dp, which is the last of these"),
        ("ddp", "dp", "write axes and their sizes, 1 or more"),
        ("ddp", "dp=0", "write axes and their sizes, 1 or more, with commas"),
        ("ddp", "dp=1,dp=2", "each axis once"),
        ("ddp", 2, "mesh is 2; it must be text with the sizes of axes"),
        ("single", "dp=1", "--mesh is for ddp, .* and does nothing under single"),
        ("raw", "dp=2", "--mesh is for the cell to do"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(
    lab: Lab, strategy: str, mesh: str, message: str
) -> None:
    num_runs = len(lab.runs)
    with pytest.raises(ValueError, match=message):
        lab.train(strategy, "1 / 0", mesh=mesh, live=False)
    assert len(lab.runs) == num_runs


@pytest.mark.parametrize(
    ("mesh", "expected"), [(None, (2, 1)), ("dp_replicate=1", (1, 2))]
)
def test_a_mesh_reaches_the_library(
    lab: Lab, mesh: str | None, expected: tuple[int, int]
) -> None:
    lab.train(
        "hsdp",
        """
from labkit.data import digits
from labkit.models import mlp

model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, digits(), batch_size=64)
found = tuple(model[1].weight.device_mesh.shape)
""",
        mesh=mesh,
        live=False,
    )
    assert lab.pull("found", "all") == [expected, expected]


MESH = """
import time
from labkit.strategies.mesh.device_mesh import build_mesh
from labkit.strategies.mesh.peers import peers_on
mesh = build_mesh({"dp_replicate": 1, "dp_shard": 2, "tp": 2}, device)
of_batches = peers_on(mesh, device)
"""


@pytest.mark.long
def test_the_timeout_of_the_lab_is_that_of_a_part_of_its_ranks() -> None:
    with Lab(num_ranks=4, group_timeout_s=6) as lab:
        for code, group in {
            MESH: "mesh['tp'].get_group()",
            f"{MESH}# both axes": "of_batches.group",
            "# the groups of before, which were made again": "mesh.get_group('tp')",
        }.items():
            lab.run(code)
            wait = f"dist.barrier({group}) if rank == 0 else time.sleep(60)"
            with pytest.raises(RankError, match=r"rank 0.*Timed out waiting 6000ms"):
                lab.run(wait, timeout=30)


OF_ANOTHER_RANK = """
from labkit.strategies.mesh.device_mesh import build_mesh
mesh = build_mesh({"dp_replicate": 2, "dp_shard": 1}, device)
received = [mesh]
dist.broadcast_object_list(received)
if rank == 1:
    raise ValueError(f"at {received[0].get_coordinate()}")
dist.barrier()
"""


def test_a_mesh_that_another_rank_has_pickled_is_in_no_ones_way(lab: Lab) -> None:
    """It has the names of groups that this rank is not in."""
    with pytest.raises(RankError, match=r"at \(0, 0\)"):
        lab.run(OF_ANOTHER_RANK)
    lab.run(
        "t = torch.ones(1)\ndist.all_reduce(t, group=mesh.get_group('dp_replicate'))"
    )
    assert [t.item() for t in lab.pull("t", "all")] == [2.0, 2.0]
