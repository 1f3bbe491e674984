"""The options of a training run, and whether a run can have them all together."""

import os
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit import timeouts
from labkit.checks import absolute
from labkit.checks import check_count
from labkit.checks import check_folder
from labkit.checks import check_hang_after
from labkit.checks import check_run_name
from labkit.checks import check_seed
from labkit.checks import check_timeout
from labkit.checks import slow_rank
from labkit.notebook.live import VIEWS
from labkit.options import check_values
from labkit.options import flag_of
from labkit.options import option
from labkit.records import CheckpointPlan
from labkit.step_folders import last_in
from labkit.step_folders import refused
from labkit.step_folders import step_of
from labkit.strategies import SPECIAL_OPTIONS
from labkit.strategies import STRATEGIES
from labkit.strategies import Strategy
from labkit.train_options import TrainOptions


def check_view(what: str, value: Any) -> None:
    """ValueError unless `value` is a way to plot a run while it runs."""
    if isinstance(value, bool):
        return  # of a script too, which plots nothing: the import takes a second
    from labkit.notebook.live.widget_view import find_view

    find_view(value)


@dataclass(frozen=True)
class RunOptions(TrainOptions):
    """What the magic line says about a training run: all that `Lab.train` takes."""

    name: str | None = option(
        None,
        "what to call the run; a name that this lab has used gets a number",
        check_run_name,
        metavar="NAME",
        default_text="run-1, run-2, ...",
    )
    seed: int = option(0, "every rank begins with this seed", check_seed, metavar="S")
    checkpoint: str | os.PathLike[str] | None = option(  # noqa: RUF009
        None,
        "keep the run's state in this folder, to resume from",
        check_folder,
        metavar="DIR",
    )
    every: int | None = option(
        None,
        "optimizer steps from one checkpoint to the next",
        check_count,
        metavar="N",
        default_text=f"{CheckpointPlan.every}",
    )
    keep: int | None = option(
        None,
        "how many of the newest checkpoints are kept",
        check_count,
        metavar="K",
        default_text=f"{CheckpointPlan.keep}",
    )
    resume: bool = option(
        False,
        "resume from the last checkpoint in the checkpoint folder; start at step 0 if "
        "it has none",
    )
    elastic: bool = option(
        False,
        "when a rank dies, restart it and continue from the last checkpoint; needs a "
        "checkpoint folder, and the cell has to make or import all that it uses",
    )
    timeout: float | None = option(
        None, "stop the cell after this many seconds", check_timeout, metavar="SECONDS"
    )
    hang_after: float = option(
        timeouts.HANG_AFTER_S,
        "say where every rank stands when nothing has happened for this many seconds; "
        "0 for never",
        check_hang_after,
        metavar="SECONDS",
        default_text=f"{timeouts.HANG_AFTER_S:g}",
    )
    live: bool | str = option(
        True,
        "plot the run while it goes on: as a picture, or as a widget, with values "
        "under the mouse, zoom, and ranks to switch on and off, which the picture "
        "replaces at the end",
        check_view,
        choices=VIEWS,
        default_text="image",
    )
    log_scale: bool = option(False, "plot the loss on a log scale")
    background: bool = option(
        False, "return at once; see the Run's wait() and stop(), and %dist_show"
    )

    @property
    def of_the_step(self) -> TrainOptions:
        """What is kept with the run: without the config, which may hold anything."""
        return TrainOptions(**self.for_message())


OF_SCRIPT_RUNS = (
    *("name", "seed", "slow", "profile", "timeout", "hang_after"),
    *("live", "log_scale", "background"),
)
"""The options of a run of a script, which does all else itself."""


def check_options(
    strategy: Strategy, options: RunOptions, *, device: str, world_size: int
) -> None:
    """ValueError unless `options` can be with this strategy, device and ranks.

    `device` is "cpu" or "cuda".
    """
    check_values(options)
    if options.precision == "fp16" and device == "cpu":
        raise ValueError(
            "fp16 needs a GPU, because CPUs have no fast fp16 arithmetic; choose bf16, "
            "which has fp32's range and needs no loss scaling"
        )
    if options.checkpoint is None:
        for name in ("every", "keep", "resume", "elastic"):
            if getattr(options, name):
                raise ValueError(
                    f"{flag_of(name)} needs --checkpoint DIR, the folder in which the "
                    "run's state is kept"
                )
    if strategy.technique is None:
        check_plain(strategy.name, options)
    check_special(strategy, options)
    check_comm(options)
    servers = strategy.server_ranks(options.servers, world_size)
    strategy.mesh_sizes(options.mesh, world_size - len(servers))
    check_asynchronous(options)
    if options.slow is not None:
        rank, _ = slow_rank(options.slow)
        num_workers = 1 if strategy.is_single else world_size - len(servers)
        if rank >= num_workers:
            last = num_workers - 1
            those = f"ranks 0 to {last} do" if last else "rank 0 alone does"
            raise ValueError(
                f"--slow {options.slow}: there is no rank {rank} that trains; {those}"
            )


def check_asynchronous(options: RunOptions) -> None:
    """ValueError for what goes with `--asynchronous` alone, or not with it."""
    if options.staleness is not None and not options.asynchronous:
        raise ValueError(
            "--staleness needs --asynchronous: without it all workers take a step "
            "together, and none is ahead"
        )
    if options.asynchronous and options.sync_batchnorm:
        raise ValueError(
            "--sync-batchnorm makes every forward pass wait for all workers, which "
            "--asynchronous is there to avoid; leave out one of the two"
        )


def check_special(strategy: Strategy, options: RunOptions) -> None:
    """ValueError for an option that is for other strategies alone."""
    plain = TrainOptions()
    for name in sorted(SPECIAL_OPTIONS.difference(strategy.options)):
        if getattr(options, name) != getattr(plain, name):
            takers = [each.name for each in STRATEGIES.values() if name in each.options]
            raise ValueError(
                f"{flag_of(name)} is for {', '.join(takers)} and does nothing under "
                f"{strategy.name}; leave it out"
            )


def check_comm(options: RunOptions) -> None:
    """ValueError for ways of sending less that do not go with other options."""
    if options.average_after is not None and options.average_every is None:
        raise ValueError(
            "--average-after STEP says when --average-every K begins; give both"
        )
    if options.comm is not None and options.average_every is not None:
        raise ValueError(
            f"--comm {options.comm} compresses gradients, and with --average-every "
            "parameters are sent in their place; leave out one of the two"
        )
    if options.comm in ("powersgd", "topk") and options.precision == "fp16":
        raise ValueError(
            f"--comm {options.comm} keeps gradients that it has not sent for the next "
            "step, and --precision fp16 scales those of each step differently; choose "
            "--precision bf16, or --comm fp16"
        )


def check_plain(strategy: str, options: RunOptions) -> None:
    """ValueError for an option of the step, which a cell under `raw` does itself."""
    if options.config:
        raise ValueError(
            f"{strategy} has nothing that --config could set; leave it out"
        )
    if options.checkpoint is not None:
        raise ValueError(
            f"{strategy} leaves everything to the cell, so --checkpoint is for "
            "the cell to do: call save_checkpoint and load_checkpoint in it"
        )
    plain = TrainOptions().for_message()
    for name, value in options.for_message().items():
        if value != plain[name] and name not in ("slow", "profile"):
            raise ValueError(
                f"{strategy} leaves everything to the cell, so {flag_of(name)} is for "
                "the cell to do"
            )


def plan_checkpoints(options: RunOptions) -> CheckpointPlan | None:
    """Where a run that may have `options` keeps its state, and resumes from.

    Raises ValueError for a folder that cannot be used.
    """
    if options.checkpoint is None:
        return None
    path = absolute(options.checkpoint)
    plan = CheckpointPlan(str(path))
    with refused(path):
        there = next(each for each in (path, *path.parents) if each.exists())
        if not there.is_dir():
            raise ValueError(
                f"--checkpoint {path}: {there} is not a folder; name another one"
            )
        if not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(
                f"--checkpoint {path}: {there} cannot be written to; change that, or "
                "name another folder"
            )
        last = last_in(path)
    if last is not None and not options.resume:
        raise ValueError(
            f"{path} holds checkpoints, the last of step {step_of(last)}; add --resume "
            "to resume from there, or name another folder"
        )
    return replace(
        plan,
        every=options.every or plan.every,
        keep=options.keep or plan.keep,
        resume_from=None if last is None else str(last),
    )


def first_step_of(plan: CheckpointPlan | None) -> int | None:
    """The step of the checkpoint that a run resumes from, if it does."""
    if plan is None or plan.resume_from is None:
        return None
    return step_of(Path(plan.resume_from))
