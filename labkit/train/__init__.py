"""Train in a script, under torchrun or DeepSpeed's launcher, as a training cell does.

No notebook is needed: no IPython, ipyparallel or matplotlib. What a cell of
`%%dist_train` finds ready a script imports, and `run` does what the magic line says::

    import torch
    from torch.nn.functional import cross_entropy

    from labkit import train
    from labkit.data import digits
    from labkit.models import mlp
    from labkit.train import fit


    def main():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        fit(model, digits(), cross_entropy, optimizer=optimizer, batch_size=64)


    if __name__ == "__main__":
        train.run(main, **vars(train.parser("ddp", clip=1.0).parse_args()))

Any of these starts it. The launcher itself does not change the losses::

    torchrun --nproc-per-node 2 train.py --losses losses.csv
    torchrun --nproc-per-node 2 train.py --strategy fsdp --precision bf16
    deepspeed --num_gpus 2 train.py --strategy zero3
    python train.py --strategy single

While `run` calls `main`, `train.rank`, `train.local_rank`, `train.world_size` and
`train.device` are what a cell has under these names: under `parameter_server` the
world is that of the ranks that train. The same seed gives the same model and the same
order of samples as in a cell, so losses are the same at the same number of ranks.
"""

import argparse
import contextlib
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import fields
from functools import wraps
from os import PathLike
from typing import Any

from labkit.checks import check_choice
from labkit.compat import c10d
from labkit.compat import data_parallel
from labkit.compat import torch as torch_compat
from labkit.notebook.execution.options import RunOptions
from labkit.notebook.execution.options import check_options
from labkit.notebook.execution.options import plan_checkpoints
from labkit.options import Option
from labkit.options import flag_of
from labkit.options import option_of
from labkit.rank.engine.replays import replay_of
from labkit.rank.group.process_group import RankProcessGroup
from labkit.rank.measuring.serving import server_of
from labkit.rank.steps.observers import slowing_of
from labkit.rank.telemetry.emitter import Emitter
from labkit.rank.training.cell_checkpoints import Checkpoints
from labkit.rank.training.compiling import announce
from labkit.rank.training.resume import seed_everything
from labkit.rank.training.session import Session
from labkit.rank.training.whole_text import is_own_file
from labkit.rank.training.whole_text import with_functions
from labkit.records import Note
from labkit.strategies import STRATEGIES
from labkit.strategies import Strategy
from labkit.strategies import find_strategy
from labkit.strategies.mesh.roles import Roles
from labkit.train.agreement import agree
from labkit.train.losses import Losses
from labkit.train.losses import check_file
from labkit.train.place import find_place
from labkit.train.place import join
from labkit.train_options import TrainOptions

__all__ = [
    "fit",
    "load_checkpoint",
    "log",
    "parser",
    "prepare",
    "reseed",
    "run",
    "save_checkpoint",
    "stop_early",
]

OF_SCRIPTS = (
    *(each.name for each in fields(TrainOptions) if each.name != "profile"),
    *("seed", "checkpoint", "every", "keep", "resume"),
)
"""The options of a training run that are not about a notebook."""
_NAMES = ("rank", "local_rank", "world_size", "device")
_now: "dict[str, Any]" = {}
"""What `main` has, by name, while it runs."""


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'labkit.train' has no attribute {name!r}")
    return _of_the_run(name)


def _of_the_run(name: str) -> Any:
    if name not in _now:
        raise RuntimeError(
            f"{name} is known while labkit.train.run(main) calls main, and not before; "
            f"use train.{name} there, after `from labkit import train`. In a cell of a "
            f"notebook {name} is there by itself: leave out the import"
        )
    return _now[name]


def _from_the_run(like: Callable[..., Any]) -> Any:
    """A function that calls the run's own of the same name."""

    @wraps(like)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _of_the_run(like.__name__)(*args, **kwargs)

    parameters = list(inspect.signature(like).parameters.values())
    signature = inspect.signature(like).replace(parameters=parameters[1:])  # no self
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__module__ = __name__
    return call


prepare = _from_the_run(Session.prepare)
fit = _from_the_run(Session.fit)
log = _from_the_run(Session.log)
stop_early = _from_the_run(Session.stop_early)
save_checkpoint = _from_the_run(Checkpoints.save_checkpoint)
load_checkpoint = _from_the_run(Checkpoints.load_checkpoint)


def parser(strategy: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of the options of the magic line, and of `--losses FILE`.

    A script may add arguments of its own to it.

    Parameters
    ----------
    strategy : str
        The default of `--strategy`.
    **defaults
        Defaults of other options, by their names in `Lab.train`.

    Returns
    -------
    argparse.ArgumentParser
        The values that it gives are arguments of `run`.

    Raises
    ------
    ValueError
        For an unknown option.

    Examples
    --------
    >>> parser("zero3", accumulate=2).parse_args(["--clip", "1.0"]).clip
    1.0
    """
    find_strategy(strategy)
    _check_names(defaults)
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument(
        "--strategy", default=strategy, metavar="STRATEGY", help=", ".join(STRATEGIES)
    )
    for each in fields(RunOptions):
        if each.name in OF_SCRIPTS and each.name != "config":
            default = defaults.get(each.name, each.default)
            _add_option(made, each.name, each.type, option_of(each), default)
    made.add_argument(
        "--losses",
        metavar="FILE",
        help="write the loss of each step, the mean over the ranks, as CSV",
    )
    # DeepSpeed's launcher gives it to each process, which knows it already.
    made.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    made.set_defaults(config=dict(defaults.get("config") or {}))
    return made


def _add_option(
    made: argparse.ArgumentParser, name: str, kind: Any, found: Option, default: Any
) -> None:
    help = found.help.replace("%", "%%")
    if isinstance(default, bool):
        made.add_argument(
            flag_of(name),
            action=argparse.BooleanOptionalAction,
            default=default,
            help=help,
        )
        return
    said = found.default_text if default is None else f"{default}"
    kinds = str(kind)
    made.add_argument(
        flag_of(name),
        type=int if "int" in kinds else float if "float" in kinds else str,
        default=default,
        choices=found.choices,
        metavar=found.metavar,
        help=help + (f" (default: {said})".replace("%", "%%") if said else ""),
    )


def run(
    main: Callable[[], Any],
    strategy: str,
    *,
    losses: str | PathLike[str] | None = None,
    local_rank: int | None = None,
    **options: Any,
) -> None:
    """Call `main` as a training run, on each of the processes that a launcher started.

    The process joins the group that RANK, WORLD_SIZE and LOCAL_RANK speak of, over NCCL
    with a GPU of its own and over gloo without; without them it is alone. Rank 0 prints
    how far the run is. A server of `parameter_server` serves in place of `main`, and
    under `single` ranks other than 0 do nothing.

    Parameters
    ----------
    main : callable
        Called without arguments; in it are `prepare`, `fit`, `log` and what else this
        module has.
    strategy : str
        As "ddp" or "fsdp".
    losses : str or path, optional
        Where rank 0 writes the loss of each step, the mean over the ranks, as CSV; once
        the run has ended.
    local_rank : int, optional
        What DeepSpeed's launcher passes; LOCAL_RANK says the same.
    **options
        As the arguments of `Lab.train` by these names: those of the step, `seed`,
        `checkpoint`, `every`, `keep` and `resume`.

    Raises
    ------
    ValueError
        For arguments that are not valid, or not the same on all ranks, and for a
        `checkpoint` folder that they do not share; `main` was not called.
    RuntimeError
        If a run is under way.
    """
    if _now:
        raise RuntimeError("labkit.train.run is running; let it end before another one")
    technique = find_strategy(strategy)
    _check_names(options)
    options["config"] = options.get("config") or {}
    chosen = RunOptions(**options)
    place = find_place()
    check_options(
        technique,
        chosen,
        device=place.device.split(":")[0],
        world_size=place.world_size,
    )
    path = check_file(losses)
    for gate in (torch_compat.GATE, c10d.GATE, data_parallel.GATE):
        gate.check()
    announce()
    # Before any rank can save.
    plan = plan_checkpoints(chosen)
    given = {name: getattr(chosen, name) for name in OF_SCRIPTS if name != "config"}
    given["strategy"] = technique.name
    refusal: ValueError | None = None
    with join(place) as group:
        try:
            plan = agree(plan, given, is_shared=not technique.is_single)
        except ValueError as error:
            # On all ranks, which leave the group together: a thread of gloo's that
            # frees a tensor while Python ends would abort the process.
            refusal = error
        else:
            _Training(technique, chosen, group).run(
                main, plan, Losses(path, technique.name)
            )
    if refusal is not None:
        raise refusal


def reseed() -> None:
    """Begin again with the seed of the run, as `main` began: for a script that first
    makes what in the notebook a cell before the run had made."""
    seed_everything(_of_the_run("seed"))


def _check_names(options: Mapping[str, Any]) -> None:
    for name in options:
        check_choice("option", name, choices=OF_SCRIPTS)


class _Training:
    """One run on this process."""

    def __init__(
        self, strategy: Strategy, options: RunOptions, group: RankProcessGroup
    ) -> None:
        self._strategy = strategy
        self._options = options
        self._group = group
        self._rank = group.rank

    def run(self, main: Callable[[], Any], plan: Any, losses: Losses) -> None:
        """`main`, or what this process does in its place."""
        step = TrainOptions(**self._options.for_message(), config=self._options.config)
        group, world_size = self._group, self._group.world_size
        servers = self._strategy.server_ranks(step.servers, world_size)
        if self._strategy.is_single and self._rank > 0:
            return
        with contextlib.ExitStack() as world:
            roles: Roles | None = None
            if self._strategy.is_single:
                world.enter_context(group.alone())
                world_size = 1
            elif servers:
                roles = world.enter_context(group.divided(servers))
                if self._rank in servers:
                    server_of(self._strategy, roles, group.device, step, self._show)()
                    return
                world_size = len(roles.workers)
            # Before the hooks of the run, which would see it as a part of it.
            losses.begin(self._rank, world_size)
            emitter = Emitter(losses.take)
            try:
                self._train(main, emitter, step, world_size, plan, roles)
            finally:
                emitter.close()
            losses.finish()

    def _train(
        self,
        main: Callable[[], Any],
        emitter: Emitter,
        step: TrainOptions,
        world_size: int,
        plan: Any,
        roles: Roles | None,
    ) -> None:
        group = self._group
        session = Session(
            self._strategy,
            emitter,
            rank=self._rank,
            world_size=world_size,
            device=group.device,
            seed=self._options.seed,
            options=step,
            checkpoints=plan,
            roles=roles,
            report=self._show,
            observers=slowing_of(step.slow, self._rank, group.device),
        )
        session.read_code = functools.partial(_source_of, main)
        with (
            session.running(),
            _names(
                rank=self._rank,
                local_rank=group.placement.local_rank,
                world_size=world_size,
                device=group.device,
                seed=self._options.seed,
                **session.names,
            ),
        ):
            try:
                if plan is None or plan.resume_from is None:
                    main()
                else:
                    with replay_of(session).of_function(main) as resuming:
                        resuming()
            except KeyboardInterrupt:
                if session.refusal is None:
                    raise
                # Of what a thread of the script does.
                raise session.refusal from None
            session.finish()

    def _show(self, report: Any) -> None:
        """What the run has to say of the loop; on one rank, as all would say it."""
        is_first = self._rank == 0 or self._group.world_size == 1
        if isinstance(report, Note) and is_first:
            print(f"labkit: {report.text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _names(**names: Any) -> Iterator[None]:
    """What this module has for `main`, while it runs."""
    _now.update(names)
    try:
        yield
    finally:
        _now.clear()


def _source_of(main: Callable[[], Any]) -> str:
    """The source of `main`, with that of the functions of its file, and of modules of
    the user's, that it uses, by which some loops are refused or noted; "" without."""
    try:
        main = inspect.unwrap(main)
        code, file = textwrap.dedent(inspect.getsource(main)), inspect.getfile(main)
    except (OSError, TypeError):
        return ""
    return with_functions(
        code,
        getattr(main, "__globals__", {}),
        is_ours=lambda each: each == file or is_own_file(each),
    )
