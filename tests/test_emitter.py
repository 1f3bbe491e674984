import threading
import time

import numpy as np
import pytest
import torch

from labkit.rank.telemetry.emitter import Emitter
from labkit.records import RECORD
from labkit.records import Batch

NEVER = 1e6


def records(batches: list[Batch]) -> np.ndarray:
    return np.concatenate([batch.records for batch in batches])


def named(batches: list[Batch]) -> list[tuple[str, int, float]]:
    """(name, step, value) of every record, each read with its own batch's names."""
    return [
        (batch.names[record["metric"]], int(record["step"]), float(record["value"]))
        for batch in batches
        for record in batch.records
    ]


def wait_for(batches: list[Batch], num_batches: int) -> None:
    deadline = time.monotonic() + 10
    while len(batches) < num_batches:
        assert time.monotonic() < deadline, f"only {len(batches)} batches came"
        time.sleep(0.001)


def test_close_sends_all_that_is_left() -> None:
    batches: list[Batch] = []
    emitter = Emitter(batches.append, interval_s=NEVER)
    emitter.put("loss", 0.5, 1, 100)
    emitter.put("accuracy", 0.9, 1, 200)
    emitter.put("loss", 0.4, 2, 300)
    assert batches == []
    emitter.close()
    assert named(batches) == [("loss", 1, 0.5), ("accuracy", 1, 0.9), ("loss", 2, 0.4)]
    assert records(batches)["memory_bytes"].tolist() == [100, 200, 300]
    assert records(batches).dtype == RECORD


def test_records_are_sent_while_the_run_continues() -> None:
    batches: list[Batch] = []
    emitter = Emitter(batches.append, interval_s=0.01)
    emitter.put("loss", 0.5, 1, 0)
    wait_for(batches, 1)
    emitter.put("loss", 0.4, 2, 0)
    wait_for(batches, 2)
    emitter.close()
    assert named(batches) == [("loss", 1, 0.5), ("loss", 2, 0.4)]


def test_no_record_of_100_000_is_lost() -> None:
    batches: list[Batch] = []
    emitter = Emitter(batches.append, interval_s=0.001)

    def log_all() -> None:
        for step in range(100_000):
            emitter.put("loss" if step % 2 else "accuracy", step / 2, step, step)

    thread = threading.Thread(target=log_all)
    thread.start()
    thread.join()
    emitter.close()
    assert len(batches) > 1, "it was sent while it was logged"
    got = records(batches)
    ends = np.cumsum([len(batch.records) for batch in batches])
    assert [batch.sequence for batch in batches] == [0, *ends[:-1]]
    assert emitter.journal.num_records == ends[-1] == 100_000
    assert got["step"].tolist() == list(range(100_000))
    assert got["value"].tolist() == [step / 2 for step in range(100_000)]
    assert (np.diff(got["seconds"]) >= 0).all()
    names = [name for name, *_ in named(batches)]
    assert names == ["accuracy", "loss"] * 50_000


def test_records_of_several_threads_are_all_sent() -> None:
    batches: list[Batch] = []
    emitter = Emitter(batches.append, interval_s=0.001)

    def log_all(start: int) -> None:
        for step in range(start, start + 5_000):
            emitter.put("loss", 0.0, step, 0)

    threads = [threading.Thread(target=log_all, args=(k * 5_000,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    emitter.close()
    assert sorted(records(batches)["step"].tolist()) == list(range(20_000))


def test_nothing_is_sent_while_nothing_changes() -> None:
    batches: list[Batch] = []
    emitter = Emitter(batches.append, interval_s=0.001)
    emitter.put("loss", 0.5, 1, 0)
    wait_for(batches, 1)
    time.sleep(0.05)
    emitter.close()
    assert sum(len(batch.records) for batch in batches) == 1
    assert len(batches) <= 2


def test_a_tensor_is_a_value_like_any() -> None:
    batches: list[Batch] = []
    emitter = Emitter(batches.append, interval_s=NEVER)
    emitter.put("loss", torch.tensor(0.5), 1, 0)
    emitter.put("loss", torch.tensor([0.25], dtype=torch.float64), 2, 0)
    emitter.put("loss", torch.tensor(3, dtype=torch.int64), 3, 0)
    emitter.put("loss", torch.tensor(1.5, dtype=torch.bfloat16), 4, 0)
    emitter.close()
    assert records(batches)["value"].tolist() == [0.5, 0.25, 3.0, 1.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_arrive(value: float) -> None:
    batches: list[Batch] = []
    emitter = Emitter(batches.append, interval_s=NEVER)
    emitter.put("loss", value, 1, 0)
    emitter.close()
    np.testing.assert_equal(records(batches)["value"], [value])


def test_seconds_count_from_the_beginning() -> None:
    batches: list[Batch] = []
    emitter = Emitter(batches.append, interval_s=NEVER)
    emitter.put("loss", 0.5, 1, 0)
    time.sleep(0.05)
    emitter.put("loss", 0.5, 2, 0)
    emitter.close()
    first, second = records(batches)["seconds"]
    assert 0 <= first < second
    assert second - first > 0.04


def test_the_thread_ends_with_the_run() -> None:
    def is_there() -> bool:
        return "labkit-emitter" in [thread.name for thread in threading.enumerate()]

    emitter = Emitter(lambda batch: None, interval_s=0.001)
    assert is_there()
    emitter.close()
    assert not is_there()
