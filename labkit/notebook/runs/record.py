"""What was recorded of a training run, and the tables that follow from it."""

import math
import time
from dataclasses import KW_ONLY
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.json_files import parse
from labkit.notebook.history.collector import Collector
from labkit.notebook.history.collector import of_peak_rank
from labkit.notebook.history.consistency import find_inconsistencies
from labkit.notebook.history.pace import steps_per_s
from labkit.notebook.history.stragglers import lag_by_rank
from labkit.rank_spec import format_ranks
from labkit.records import COMPONENTS
from labkit.records import LOSS_WEIGHT
from labkit.records import NO_STEPS
from labkit.records import PARTS
from labkit.records import PHASES
from labkit.records import Collective
from labkit.records import ModelFacts
from labkit.records import Outcome
from labkit.records import Pass
from labkit.strategies import recorded_strategy
from labkit.train_options import TrainOptions

RUN_STATES = ("running", "finished", "failed", "interrupted", "lost")


@dataclass(frozen=True)
class Restart:
    """A restart of dead ranks in a run with `--elastic`."""

    step: int
    """Of the checkpoint that the run resumed from; 0 where there was none."""
    died_at: int
    """The optimizer steps taken before the death."""
    ranks: list[int]
    """The ranks that were restarted."""
    cause: str
    """Of the first death."""
    seconds: float
    """From the start of the run to its restart."""
    time: float
    """Of the restart, in seconds since the epoch."""

    def __str__(self) -> str:
        return f"{format_ranks(self.ranks)} died; resumed from step {self.step:,}"


@dataclass(eq=False, repr=False)
class RunRecord:
    """The records of one training run on all its ranks; `Run` describes the fields."""

    name: str
    strategy: str
    code: str
    collector: Collector
    options: TrainOptions = TrainOptions()  # noqa: RUF009
    _: KW_ONLY
    log_scale: bool = False
    """Whether `plot` has the loss on one by default."""
    folder: Path | None = None
    state: str = field(default="running", init=False)
    seconds: float = field(default=0.0, init=False)
    info: dict[str, Any] = field(default_factory=dict, init=False)
    _started: float = field(default_factory=time.monotonic, init=False)
    _mismatches: list[str] | None = field(default=None, init=False)
    """As they were written, of a run from disk."""

    def __repr__(self) -> str:
        # Nothing here may differ from one run of the notebook to the next.
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        steps = f", {self.num_steps:,} step{'s' * (self.num_steps != 1)}"
        return (
            f"<Run {self.name!r}: {self.strategy} on {ranks}, {self.state}"
            f"{steps if self.state != 'running' else ''}>"
        )

    @property
    def world_size(self) -> int:
        """The number of ranks, with those that serve others."""
        return len(self.collector.ranks) + len(self.collector.servers)

    @property
    def resumed_from(self) -> int | None:
        """The step of the checkpoint that it resumed from, if it did."""
        found: int | None = self.info.get("resumed_from")
        return found

    @property
    def restarts(self) -> list[Restart]:
        """Restarts after ranks had died, oldest first."""
        return parse(list[Restart], self.info.get("restarts", []))

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, by the rank that took most, with those before the
        checkpoint that it resumed from."""
        return max(self.collector.steps.values())

    @property
    def history(self) -> pd.DataFrame:
        """One row per rank and step: step, rank, seconds since the start, loss,
        memory_bytes, and a column for each metric."""
        return self.collector.history()

    def mean_loss(self) -> pd.DataFrame:
        """Compute the loss of each global batch, as the mean over the ranks.

        Ranks count with the number of their samples, where that is known, or by what
        `prepare(..., weigh=...)` gives. Unless the run has finished, steps that not
        every rank has reached are left out.

        Returns
        -------
        DataFrame
            One row per step: step, seconds since the start, loss.
        """
        history = self.history.dropna(subset=["loss"])
        return _mean_by_step(history[history["step"] <= self._last_whole_step()])

    def _last_whole_step(self) -> float:
        """The last step that every rank which has losses has reached."""
        if self.state == "finished":
            return math.inf
        collector = self.collector
        last = {rank: collector.last_step(rank, "loss") for rank in collector.ranks}
        reached = [
            max(step, collector.steps[rank])
            for rank, step in last.items()
            if step is not None
        ]
        return min(reached, default=0)

    @property
    def last_loss(self) -> float:
        """The loss of the last global batch; NaN where none was noticed."""
        # Without the history of all steps, which takes several times what they do.
        through = self._last_whole_step()
        found = [
            self.collector.last_step(rank, "loss", through)
            for rank in self.collector.ranks
        ]
        steps = [step for step in found if step is not None]
        if not steps:
            return math.nan
        history = self.collector.history(max(steps)).dropna(subset=["loss"])
        return float(_mean_by_step(history)["loss"].iloc[-1])

    @property
    def memory(self) -> pd.DataFrame:
        """Bytes by rank and component, each at its greatest in the measured steps.

        The first step, in which states are only made, counts for the total alone where
        others were measured. Empty where none was: in a run without optimizer steps.
        """
        rows = {}
        for rank, measured in self.collector.measurements.items():
            later = measured[1:] or measured
            if measured:
                rows[rank] = {
                    component: max(
                        found.memory[component]
                        for found in (measured if component == "total_peak" else later)
                    )
                    for component in COMPONENTS
                }
        table = pd.DataFrame.from_dict(rows, orient="index", columns=list(COMPONENTS))
        return table.rename_axis("rank")

    @property
    def step_memory(self) -> pd.DataFrame:
        """Bytes that tensors hold over the moments of one step, the last measured one.

        One row per rank and moment: rank, step, seconds since the step's first
        operator, phase ("forward", "backward" or "step", which is the optimizer's),
        and a column for each of parameters, gradients, optimizer_state,
        master_parameters, communication_buffers, activations (with all else that the
        step makes) and other (tensors that are older than the step, as its batch).
        Empty where operators are not seen, as those of compiled code.
        """
        frames = [
            pd.DataFrame(
                {
                    "rank": rank,
                    "step": measured[-1].step,
                    "seconds": measured[-1].moments.seconds,
                    "phase": [PHASES[each] for each in measured[-1].moments.phases],
                    **measured[-1].moments.held,
                }
            )
            for rank, measured in self.collector.measurements.items()
            if measured and measured[-1].moments.seconds
        ]
        names = ["rank", "step", "seconds", "phase", *PARTS]
        return pd.concat(frames or [pd.DataFrame(columns=names)], ignore_index=True)

    @property
    def comm(self) -> pd.DataFrame:
        """Collectives of one optimizer step by rank and kind, as last measured.

        The columns are count, payload_bytes, wire_bytes (what the rank sends in a ring)
        and seconds, for which each collective is waited for where it begins; NaN in a
        loop that does all by itself, where none is waited for. With
        `--average-every` the averages are in it as their mean over all steps of the
        run (of those after `--average-after`), so a count may be a fraction.
        """
        rows = [
            {"rank": rank, **vars(collective)}
            for rank, measured in self.collector.measurements.items()
            for collective in (measured[-1].collectives if measured else [])
        ]
        names = ["rank", *(each.name for each in fields(Collective))]
        for rank, sent in self.collector.averages.items():
            means = {
                name: value / max(1, sent.num_steps)
                for name, value in vars(sent).items()
                if name != "num_steps"
            }
            rows.append({"rank": rank, "kind": "all_reduce", **means})
        table = pd.DataFrame(rows, columns=names).set_index(["rank", "kind"])
        table = table.astype({"seconds": float})
        if self.collector.averages:
            return table.groupby(["rank", "kind"]).sum()
        return table

    @property
    def sent_bytes(self) -> pd.DataFrame:
        """Bytes in collectives up to each step, of the rank that sends most.

        One row per step of this run: step and num_bytes, which it has sent so far. A
        step that was not measured counts as the one that was measured before it, and
        with `--average-every` every step for its share. Empty where none was measured.
        """
        steps = np.arange(self.resumed_from or 0, self.num_steps) + 1
        greatest = np.zeros(len(steps))
        for rank, measured in self.collector.measurements.items():
            if not measured:
                continue
            rates = [sum(c.wire_bytes for c in m.collectives) for m in measured]
            places = np.searchsorted([m.step for m in measured], steps, "right") - 1
            sent = np.array(rates, float)[places.clip(min=0)]
            if averages := self.collector.averages.get(rank):
                is_alone = steps > (self.options.average_after or 0)
                sent += is_alone * averages.wire_bytes / max(1, averages.num_steps)
            greatest = np.maximum(greatest, sent.cumsum())
        is_known = any(self.collector.measurements.values())
        table = pd.DataFrame({"step": steps, "num_bytes": greatest})
        return table if is_known else table.iloc[:0]

    @property
    def buckets(self) -> pd.DataFrame:
        """The gradients that DDP sends together, as in the last measured step.

        One row for each parameter, in the order of sending: bucket, parameter and
        num_bytes, of its gradient. Empty under a strategy that has none.
        """
        rows = [
            {"bucket": number, "parameter": name, "num_bytes": size}
            for model in self.models
            for number, bucket in enumerate(model.buckets)
            for name, size in zip(bucket.names, bucket.sizes, strict=True)
        ]
        return pd.DataFrame(rows, columns=["bucket", "parameter", "num_bytes"])

    @property
    def schedule(self) -> pd.DataFrame:
        """When each microbatch passed through each stage, in the batch before the last
        measured step; of runs of `fit` under `pipeline`.

        One row for each pass: rank, kind ("forward" or "backward"), stage, microbatch,
        began and ended, in seconds from the first of them.
        """
        rows = [
            {"rank": rank, **asdict(each)}
            for rank, measured in self.collector.measurements.items()
            for model in (measured[-1].models if measured else [])
            for each in model.passes
        ]
        columns = ["rank", *(each.name for each in fields(Pass))]
        table = pd.DataFrame(rows, columns=columns)
        began = table["began"].min()
        table["began"] -= began
        table["ended"] -= began
        return table.sort_values(["rank", "began"], ignore_index=True)

    @property
    def theory(self) -> dict[str, float]:
        """Bytes of the model states of a rank by component, and `wire_bytes`, by the
        formulas of `labkit.theory`; empty where nothing was measured."""
        theory = recorded_strategy(self.strategy).theory
        total: dict[str, float] = {}
        for model in self.models:
            states = theory.model_states(model, self.options)
            states["wire_bytes"] = theory.wire_bytes(
                model, self.options, self.world_size
            )
            for component, value in states.items():
                total[component] = total.get(component, 0.0) + value
        return total

    @property
    def models(self) -> list[ModelFacts]:
        """The models that `prepare` was called with, in numbers."""
        measured = self.collector.measurements[self.collector.ranks[0]]
        return measured[-1].models if measured else []

    @property
    def mismatches(self) -> list[str]:
        """Sentences about ranks that differ where they should agree."""
        if self._mismatches is not None:
            return self._mismatches
        is_by_hand = recorded_strategy(self.strategy).is_by_hand
        return find_inconsistencies(self.collector.replica_notes, is_by_hand=is_by_hand)

    @property
    def notes(self) -> list[str]:
        """Sentences about the cell's loop: where its result differs from that of one
        process, and where labkit did something else than the code says."""
        # One rank may say that it has no steps while another has.
        has_records = any(self.collector.num_records.values())
        return [n for n in self.collector.notes if n != NO_STEPS or not has_records]

    @property
    def not_on_disk(self) -> int:
        """The number of records that ranks could not write as the disk was full."""
        outcomes = parse(list[Outcome], self.info.get("outcomes", []))
        return sum(outcome.num_not_on_disk for outcome in outcomes)

    def end(self, state: str, *, seconds: float | None = None) -> None:
        """Note that the run has ended.

        Parameters
        ----------
        state : str
            One of `RUN_STATES`.
        seconds : float, optional
            After so long; by default now.
        """
        now = time.monotonic() - self._started
        self.seconds = now if seconds is None else seconds
        self.state = state

    def elapsed(self) -> float:
        """Measure how long the cell has run.

        Returns
        -------
        float
            Seconds since the run began; of one that has ended, until its end.
        """
        if self.state == "running":
            return time.monotonic() - self._started
        return self.seconds

    def steps_per_s(self) -> float | None:
        """Compute the optimizer steps a second, by the median step of the slowest rank.

        Returns
        -------
        float or None
            None before the second step. While the run continues, of its newest steps.
        """
        return steps_per_s(self.collector)

    def summary(self) -> pd.DataFrame:
        """Summarize the run by rank.

        Returns
        -------
        DataFrame
            One row per rank: steps, first_loss, last_loss, seconds (how long the cell
            ran, the same for all), steps_per_s (by the rank's median step),
            peak_memory_mib (of what tensors hold), and behind (by what share the rank's
            own step takes longer than the median of the others; NaN where that is not
            known).
        """
        rows = []
        seconds = self.elapsed()
        lags = lag_by_rank(self.collector)
        for rank in self.collector.ranks:
            first_loss, last_loss = self.collector.ends(rank, "loss")
            rows.append(
                {
                    "rank": rank,
                    "steps": self.collector.steps[rank],
                    "first_loss": first_loss,
                    "last_loss": last_loss,
                    "seconds": seconds,
                    "steps_per_s": steps_per_s(self.collector, [rank]) or math.nan,
                    "peak_memory_mib": self._peak_bytes(rank) / 2**20,
                    "behind": lags.get(rank, float("nan")),
                }
            )
        return pd.DataFrame(rows).set_index("rank")

    def _peak_bytes(self, rank: int) -> float:
        """What tensors held at most, as far as it was seen; NaN where it was not."""
        seen = [each.memory["total_peak"] for each in self.collector.measurements[rank]]
        seen.append(int(self.collector.records(rank)["memory_bytes"].max(initial=0)))
        return max(seen) or math.nan

    def memory_beside_theory(self) -> pd.DataFrame | None:
        """Put the measured memory and that of theory in one table.

        Returns
        -------
        DataFrame or None
            Bytes by component of each rank, with theory, where there is one, in the
            last row; None where nothing was measured.
        """
        if not any(self.collector.measurements.values()):
            return None
        parts = [name for name in COMPONENTS if name in self.theory]
        if not parts:
            return self.memory
        theory = pd.DataFrame([self.theory], index=["theory"], columns=parts)
        return pd.concat([self.memory, theory])

    def peak_moments(self) -> pd.DataFrame:
        """Look up the moments of the step in which a rank holds most.

        Returns
        -------
        DataFrame
            The rows of `step_memory` of the rank whose peak is highest; none where
            none was measured.
        """
        return of_peak_rank(self.step_memory)


def _mean_by_step(history: pd.DataFrame) -> pd.DataFrame:
    """One row per step of a history in which every row has a loss: step, seconds and
    the mean loss over the ranks, weighted."""
    weights = pd.Series(1.0, history.index)
    for metric in ("samples", LOSS_WEIGHT):
        weights = history.get(metric, weights).fillna(weights)
    sums = history.assign(loss=history["loss"] * weights, weight=weights).groupby(
        "step", as_index=False
    )
    table = sums.agg({"seconds": "max", "loss": "sum", "weight": "sum"})
    return table.assign(loss=table["loss"] / table["weight"]).drop(columns="weight")
