"""Writes a run's records as event files for TensorBoard."""

from pathlib import Path
from typing import Any

import numpy as np

from labkit.checks import UserError
from labkit.notebook.history.collector import Collector


def write_events(collector: Collector, folder: Path, *, began: float) -> None:
    """One sub-folder a rank; a scalar a metric, and `memory_bytes` once a step.

    By TensorBoard's own writer, as `torch.utils.tensorboard` does, but without torch.
    `began` is when the run did, in seconds since 1970.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UserError(
            "event files are written by TensorBoard, which is not installed here: "
            'pip install "labkit[tensorboard]"'
        ) from error

    def scalar(tag: str, record: Any, value: float) -> Any:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        wall_time = began + float(record["seconds"])
        return Event(wall_time=wall_time, step=int(record["step"]), summary=summary)

    for rank in collector.ranks:
        writer = EventFileWriter(str(folder / f"rank-{rank}"))
        names = collector.metrics(rank)
        records = collector.records(rank)
        # TensorBoard has one value a step: of the memory, the last.
        is_last = np.append(np.diff(records["step"]) != 0, True)[: len(records)]
        for record, closes_step in zip(records, is_last, strict=True):
            writer.add_event(scalar(names[record["metric"]], record, record["value"]))
            if closes_step:
                memory = float(record["memory_bytes"])
                writer.add_event(scalar("memory_bytes", record, memory))
        writer.close()
