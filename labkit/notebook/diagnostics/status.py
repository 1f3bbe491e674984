"""What every rank is and does, in a table."""

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from concurrent.futures import wait

import pandas as pd

from labkit import timeouts
from labkit.checks import UserError
from labkit.notebook.cluster.rank_group import RankGroup
from labkit.notebook.cluster.reach import CallError


def status_table(
    group: RankGroup, run: str | None, steps: Mapping[int, int]
) -> pd.DataFrame:
    """One row a rank, as `Lab.status` says; `run` is the last one's name, `steps` what
    its ranks have taken: not all of the lab, where it has grown since."""
    cluster = group.cluster
    answers = [cluster.ask(rank, "describe") for rank in group.everyone]
    facts, failures = {}, {}
    deadline = time.monotonic() + timeouts.ANSWER_S
    for rank, answer in enumerate(answers):
        # A rank may be dead, die while it is asked, or be deep in native code.
        while (
            not answer.done() and cluster.is_alive(rank) and time.monotonic() < deadline
        ):
            wait([answer], timeouts.POLL_S)
        try:
            facts[rank] = answer.result(0)
        except CallError as error:  # as one that can open no file
            failures[rank] = str(error)
        except (CancelledError, TimeoutError):
            pass
    rows = []
    for placement in group.placements:
        rank = placement.rank
        state, cause = group.state(rank)
        row = {
            "rank": rank,
            "device": placement.device,
            "pid": cluster.pids[rank],
            "state": state,
            **facts.get(rank, {}),
            "cause": cause or failures.get(rank, ""),
        }
        if placement.host:  # as the user calls it
            row["host"] = placement.host
        if run is not None:
            row.update(run=run if rank in steps else "", step=steps.get(rank))
        rows.append(row)
    columns = ["host", "pid", "device"]
    columns += ["model", "bus"] if any("model" in row for row in rows) else []
    columns += ["state", "memory_used", "memory_total"]
    columns += ["run", "step"] if run is not None else []
    columns += ["cause"] if any(row["cause"] for row in rows) else []
    table = pd.DataFrame(rows).set_index("rank").reindex(columns=columns)
    whole = [name for name in ("memory_used", "memory_total", "step") if name in table]
    return table.astype(dict.fromkeys(whole, "Int64"))


def device_bytes_of(group: RankGroup) -> float:
    """The least memory that a rank's device has, as they say; a part of the host's for
    ranks on the CPU. UserError where none answers."""
    asked = [group.cluster.ask(rank, "describe") for rank in group.everyone]
    deadline = time.monotonic() + timeouts.ANSWER_S
    found: list[float] = []
    for place, answer in zip(group.placements, asked, strict=True):
        with contextlib.suppress(CancelledError, TimeoutError, CallError):
            told = answer.result(max(deadline - time.monotonic(), 0))
            shares = place.num_local if place.device == "cpu" else 1
            found.append(told["memory_total"] / shares)
    if found:
        return min(found)
    raise UserError(
        f"no rank answers (rank 0: {' '.join(group.state(0))}) to say how much "
        "memory its device has; give device_bytes (%dist_estimate --memory GIB), "
        "or bring the ranks back with %dist_restart"
    )
