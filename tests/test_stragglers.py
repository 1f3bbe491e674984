"""Who is slow, found on real ranks that are; a sleep stands for the work."""

import textwrap

import pytest

from labkit import Lab
from labkit.notebook.history.collector import Collector
from labkit.notebook.history.stragglers import find_straggler
from labkit.notebook.runs.persistence import open_run
from labkit.notebook.runs.progress import remarks
from labkit.notebook.runs.run import Run
from labkit.records import COMPONENTS
from labkit.records import Collective
from labkit.records import Measurement

# Every rank sleeps in its forward pass: what the machine adds is then little.
CELL = """
import time
import torch.nn.functional as F
from torch.utils.data import Dataset

class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep({forward})
        return super().forward(x)

class Samples(Dataset):
    def __len__(self):
        return 12 * 2 * world_size

    def __getitem__(self, index):
        time.sleep({sample})
        return torch.ones(4), torch.ones(1)

model = torch.nn.Sequential(Slow(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = prepare(
    model, optimizer, Samples(), batch_size=2 * world_size
)
for x, y in loader:
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ALONE = """
import time
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(40):
    time.sleep(0.03 if rank == 1 else 0.01)
    (weight**2).sum().backward()
    optimizer.step()
"""


def train(lab: Lab, strategy: str, code: str) -> Run:
    return lab.train(strategy, textwrap.dedent(code), live=False)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_with_more_to_compute_is_named(lab: Lab, strategy: str) -> None:
    slow = "0.15 if rank == 1 else 0.05"
    run = train(lab, strategy, CELL.format(forward=slow, sample=0))
    assert set(run.collector.steps.values()) == {12}, "they keep step all the same"
    found = find_straggler(run.collector)
    assert found is not None
    assert found[0] == 1
    assert found[1] > 0.5
    assert "rank 1 is slowest: " in run.status_line()
    much = "times as long as" if found[1] >= 1 else "longer than"
    assert f"{much} rank 0" in run.status_line()
    behind = run.summary()["behind"]
    assert behind[1] == pytest.approx(found[1])
    assert behind[0] < 0


def test_a_run_from_disk_knows_who_was_slow(lab: Lab) -> None:
    slow = "0.1 if rank == 1 else 0.02"
    run = train(lab, "ddp", CELL.format(forward=slow, sample=0))
    assert run.folder is not None
    again = open_run(run.folder)
    assert find_straggler(again.collector) == find_straggler(run.collector)
    assert again.status_line() == run.status_line()


def test_a_rank_whose_data_are_late_is_named(lab: Lab) -> None:
    late = "0.08 if rank == 0 else 0"
    run = train(lab, "ddp", CELL.format(forward=0.05, sample=late))
    found = find_straggler(run.collector)
    assert found is not None
    assert found[0] == 0


def test_ranks_with_equal_work_have_no_straggler(lab: Lab) -> None:
    run = train(lab, "ddp", CELL.format(forward=0.2, sample=0))
    assert find_straggler(run.collector) is None
    assert "slowest" not in run.status_line()
    assert run.summary()["behind"].abs().max() < 0.2


def test_ranks_that_do_not_wait_for_each_other_are_distinguished_by_their_rate(
    lab: Lab,
) -> None:
    run = train(lab, "raw", ALONE)
    found = find_straggler(run.collector)
    assert found is not None
    assert found[0] == 1


def test_one_rank_has_nobody_to_wait_for(lab: Lab) -> None:
    run = train(lab, "single", CELL.format(forward=0, sample=0))
    assert find_straggler(run.collector) is None
    assert run.summary()["behind"].isna().all()


@pytest.mark.long
def test_of_three_ranks_the_slow_one_is_behind_the_median() -> None:
    with Lab(3, group_timeout_s=60) as lab:
        slow = "0.2 if rank == 2 else 0.1"
        run = train(lab, "ddp", CELL.format(forward=slow, sample=0))
    assert "rank 2 is slowest: " in run.status_line()
    ends = (" longer than the median", " as long as the median")
    assert run.status_line().endswith(ends)


# ---- the rule ----


def measured(*own_by_rank: list[float]) -> Collector:
    """Steps in which every rank took these seconds of its own, and waited then."""
    collector = Collector(range(len(own_by_rank)))
    for step in zip(*own_by_rank, strict=True):
        for rank, own in enumerate(step):
            wait = Collective("all_reduce", 1, 8, 8, seconds=max(step) - own + 0.1)
            report = Measurement(
                dict.fromkeys(COMPONENTS, 0), [wait], [], max(step) + 0.1
            )
            collector.add_report(rank, report)
    return collector


def test_the_first_step_does_not_count() -> None:
    assert find_straggler(measured([1, 1, 1], [9, 1, 1])) is None


def test_one_slow_step_is_no_proof() -> None:
    assert find_straggler(measured([1, 1, 1, 1], [1, 2, 1, 2])) is None
    assert find_straggler(measured([1, 1], [1, 2])) is None


def test_a_fifth_behind_is_not_yet_slow() -> None:
    assert find_straggler(measured([1, 1, 1], [1, 1.19, 1.19])) is None
    found = find_straggler(measured([1, 1, 1], [1, 1.3, 1.5]))
    assert found == (1, pytest.approx(0.4))


def test_only_the_newest_steps_count() -> None:
    became_slow = [1, 1, 1, 3, 3, 3]
    found = find_straggler(measured([1] * 6, [1] * 6, became_slow))
    assert found == (2, pytest.approx(2.0))


def test_a_measurement_on_its_way_is_not_waited_for() -> None:
    collector = measured([1, 1, 1], [1, 2, 2])
    collector.measurements[0].append(collector.measurements[0][-1])
    found = find_straggler(collector)
    assert found is not None
    assert found[0] == 1


def test_three_ranks_that_wait_for_one_name_that_one() -> None:
    found = find_straggler(measured([1] * 3, [1.1] * 3, [1.1] * 3, [1.6] * 3))
    assert found == (3, pytest.approx(0.5 / 1.1))


def test_a_run_of_less_than_a_second_blames_no_rank() -> None:
    run = Run("short", "ddp", "", measured([1, 1, 1], [1, 2, 2]))
    run.end("finished")
    for seconds, blamed in ((0.9, []), (1.1, ["rank 1"])):
        run.seconds = seconds
        assert [remark[:6] for remark in remarks(run)] == blamed
