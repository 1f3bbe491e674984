"""The options of a study."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields
from functools import partial
from typing import Any

from labkit.checks import MAX_METRIC_BYTES
from labkit.checks import check_choice
from labkit.checks import check_count
from labkit.checks import check_run_name
from labkit.checks import check_seed
from labkit.checks import check_timeout
from labkit.checks import is_metric
from labkit.checks import short_repr
from labkit.notebook.execution.options import RunOptions
from labkit.options import option

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("hyperband", "halving", "median", "none")
MODES = ("min", "max")
RATES = ("steps_per_s", "samples_per_s")
"""Metrics that are no curve: how fast a run was at its end. More is better."""
NUM_TRIALS = 20


def check_name(what: str, value: Any) -> None:
    """ValueError unless a metric can be called `value`."""
    if not is_metric(value):
        raise ValueError(
            f"{what} is {short_repr(value)}; it must be a string of 1 to "
            f"{MAX_METRIC_BYTES} bytes in UTF-8"
        )


def check_part(what: str, value: Any, names: tuple[str, ...]) -> None:
    """ValueError unless `value` is one of `names`, or an object of Optuna's."""
    if isinstance(value, str):
        check_choice(what, value, names)
    elif not type(value).__module__.startswith("optuna."):
        raise ValueError(
            f"{what} is {short_repr(value)}; give one of {', '.join(names)}, or a "
            f"{what} of Optuna's"
        )


NOT_OF_TRIALS = frozenset(
    ("name", "seed", "resume", "live", "background", "log_scale", "profile")
)
"""The options of a run that are those of the study, or make no sense in one."""


@dataclass(frozen=True)
class TuneOptions:
    """What the magic line says about a study, besides what its runs take."""

    trials: int | None = option(
        None,
        "stop after this many trials, including those before a resume",
        check_count,
        metavar="N",
        default_text=f"{NUM_TRIALS}; no limit with seconds or a grid",
    )
    seconds: float | None = option(
        None,
        "start no trial after this many seconds, and stop those that are running",
        check_timeout,
        metavar="SECONDS",
    )
    metric: str = option(
        "loss",
        "what makes a trial better than another: loss, which is the mean over the "
        "last tenth of the steps; the last value of a metric that is logged, such as "
        "val_loss; or steps_per_s or samples_per_s",
        check_name,
        metavar="NAME",
    )
    mode: str | None = option(
        None,
        "whether a lower (min) or a higher (max) value is better",
        partial(check_choice, choices=MODES),
        choices=MODES,
        default_text="min; max for steps_per_s and samples_per_s",
    )
    sampler: Any = option(  # noqa: RUF009
        "tpe",
        "what proposes parameters: tpe, from those that did well so far; random; or "
        "grid, all combinations of choices once",
        partial(check_part, names=SAMPLERS),
        metavar="NAME",
    )
    pruner: Any = option(  # noqa: RUF009
        "hyperband",
        "what stops trials that fall behind, once a first one has finished: "
        "hyperband, halving, median or none",
        partial(check_part, names=PRUNERS),
        metavar="NAME",
    )
    ranks_per_trial: int | None = option(
        None,
        "run several trials at once, each on its own group of K ranks; K has to divide "
        "the number of ranks",
        partial(check_count, meaning="the ranks of a group"),
        metavar="K",
        default_text="all ranks, one trial after the other",
    )
    name: str | None = option(
        None,
        "what to call the study",
        check_run_name,
        metavar="NAME",
        default_text="study-1, study-2, ...",
    )
    seed: int = option(
        0, "seed of the sampler and of every run", check_seed, metavar="S"
    )
    resume: bool = option(
        False,
        "continue the study of this name; unfinished trials run again",
    )

    def group_size(self, num_ranks: int) -> int:
        """The ranks of a trial, of so many. ValueError where they cannot be divided."""
        size = self.ranks_per_trial
        if size is None:
            return num_ranks
        if num_ranks % size:
            sizes = [str(k) for k in range(1, num_ranks + 1) if num_ranks % k == 0]
            raise ValueError(
                f"ranks_per_trial is {size}, and {num_ranks} ranks cannot be divided "
                f"into groups of {size}; choose one of {', '.join(sizes)}, or start "
                "the lab with another number of ranks (%dist_start -n N)"
            )
        return size

    @property
    def is_max(self) -> bool:
        """Whether more is better."""
        return (self.mode or ("max" if self.metric in RATES else "min")) == "max"


def check_run_options(run_options: Mapping[str, Any]) -> None:
    """ValueError for what is no option of a trial's run, or that of the study."""
    known = {each.name for each in fields(RunOptions)} - NOT_OF_TRIALS
    for name in run_options:
        if name not in known:
            raise ValueError(
                f"tune does not take {name}; for its runs it takes "
                f"{', '.join(sorted(known))}"
            )
