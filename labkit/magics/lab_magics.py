"""The magics: each parses its line, delegates to the Lab and shows the result."""

import argparse
import sys
from dataclasses import fields
from typing import TYPE_CHECKING
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics
from IPython.core.magic import cell_magic
from IPython.core.magic import line_cell_magic
from IPython.core.magic import line_magic
from IPython.core.magic import magics_class
from IPython.core.magic_arguments import argument
from IPython.core.magic_arguments import magic_arguments
from IPython.display import display

from labkit.checks import short_repr
from labkit.lab import Lab
from labkit.magics.current import attach_lab
from labkit.magics.current import current_lab
from labkit.magics.current import own_runs
from labkit.magics.current import running_lab
from labkit.magics.current import set_current_lab
from labkit.magics.current import start_lab
from labkit.magics.line import Args
from labkit.magics.line import given
from labkit.magics.line import names_in
from labkit.magics.line import options
from labkit.magics.line import parsed
from labkit.magics.line import whole_numbers
from labkit.notebook.cluster.placement import StartOptions
from labkit.notebook.execution.options import OF_SCRIPT_RUNS
from labkit.notebook.execution.options import RunOptions
from labkit.notebook.export.script import STYLES
from labkit.notebook.keeper.kept_labs import waiting_labs
from labkit.notebook.tuning.options import NOT_OF_TRIALS
from labkit.notebook.tuning.options import TuneOptions
from labkit.rank_spec import format_ranks
from labkit.records import COMPONENTS
from labkit.records import format_bytes
from labkit.records import memory_unit
from labkit.records import significant
from labkit.selftest import ONLY_HELP
from labkit.selftest import OUTPUT
from labkit.selftest import OUTPUT_HELP
from labkit.selftest import check
from labkit.strategies import STRATEGIES
from labkit.strategies import find_strategy
from labkit.train_options import TrainOptions

if TYPE_CHECKING:
    import pandas as pd

    from labkit.notebook.runs.run import Run

OF_EVERY_TRIAL = (
    *(each.name for each in fields(TrainOptions) if each.name not in NOT_OF_TRIALS),
    *("checkpoint", "every", "keep", "timeout", "hang_after"),
)
"""The options of a training run that a study takes for its trials."""

# pandas, and what imports it, is imported by the magics that show a table or a run:
# `%load_ext` would take twice as long.


class ProgressLine:
    """One line that is rewritten while something starts."""

    def __init__(self) -> None:
        self._width = 0

    def __call__(self, text: str) -> None:
        sys.stdout.write("\r" + text.ljust(self._width))
        sys.stdout.flush()
        self._width = len(text)

    def end(self, text: str) -> None:
        """Write its last state; the only one where nothing had to start."""
        if self._width:
            self(text + "\n")
        else:
            print(text)


@magics_class
class LabMagics(Magics):
    """The magics of labkit."""

    @magic_arguments()
    @options(
        StartOptions,
        *("num_ranks", "backend", "device", "threads"),
        *("launcher", "profile", "hosts", "nodes", "launcher_options", "interface"),
        "keep",
    )
    @line_magic
    @parsed
    def dist_start(self, args: Args) -> None:
        """Start a lab: one process per rank, all in one process group."""
        progress = ProgressLine()
        lab = start_lab(StartOptions(**given(StartOptions, args)), on_progress=progress)
        progress.end(ready_line(lab))
        for each in waiting_labs():
            how = "to use it, %dist_stop this one, then %dist_attach that name"
            print(f"labkit: another lab is kept; {each}; {how}", file=sys.stderr)

    @magic_arguments()
    @argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="name of the lab, such as lab-4711; needed where several are kept",
    )
    @line_magic
    @parsed
    def dist_attach(self, args: Args) -> None:
        """Find the ranks that %dist_start --keep in another kernel left running."""
        progress = ProgressLine()
        lab = attach_lab(args.name, on_progress=progress)
        table = lab.status()
        progress.end(ready_line(lab) if "cause" not in table else kept_line(lab))
        print_causes(table)

    @magic_arguments("%dist")  # its help is that of a cell magic: %%dist
    @argument(
        "ranks",
        nargs="?",
        default="all",
        metavar="RANKS",
        help="0, or 0,2, or 1-3; all ranks by default",
    )
    @options(RunOptions, "timeout", "hang_after")
    @cell_magic
    @parsed
    def dist(self, args: Args) -> None:
        """Run the cell on ranks; they keep their variables from cell to cell."""
        current_lab().run(
            args.cell, args.ranks, timeout=args.timeout, hang_after=args.hang_after
        )

    @magic_arguments()
    @argument("strategy", metavar="STRATEGY", help="one of: " + ", ".join(STRATEGIES))
    @argument(
        "function",
        nargs="?",
        metavar="FUNCTION",
        help="with %%dist_train: a function of the notebook, called as f() or "
        "f(rank, world_size)",
    )
    @options(RunOptions)
    @argument("--no-live", action="store_true", help="do not plot while it runs")
    @line_cell_magic
    @parsed
    def dist_train(self, args: Args) -> Any:
        """Train under a strategy, plotted live: with the cell below (%%dist_train), or
        with a function (%dist_train). Returns the Run."""
        find_strategy(args.strategy)  # first of all: the two words may be swapped
        chosen = given(RunOptions, args)
        chosen["live"] = self._view(args)
        if args.config is not None:
            chosen["config"] = self._variable(args.config)
        work = self._work_of(args, "dist_train")
        return current_lab().train(args.strategy, work, **chosen)

    def _view(self, args: Args) -> bool | str:
        """How a run is plotted while it runs."""
        if args.no_live and args.live is not True:
            raise ValueError("--live and --no-live: choose one of them")
        view: bool | str = args.live
        return not args.no_live and view

    def _work_of(self, args: Args, magic: str) -> Any:
        """The cell to run, or the notebook's function."""
        if args.cell is not None:
            if args.function is not None:
                raise ValueError(
                    f"%%{magic} runs the cell below it, so {args.function!r} is "
                    f"one word too many; a function goes with %{magic}"
                )
            return args.cell
        if args.function is None:
            raise ValueError(
                f"%{magic} takes a strategy and a function, for example %{magic} ddp "
                f"f; to train with a cell begin it with %%{magic} STRATEGY"
            )
        return self._variable(args.function, callable, "function")

    @magic_arguments()
    @argument(
        "strategy",
        metavar="STRATEGY",
        help="as for %%dist_train; a study whose space has a strategy tries those",
    )
    @argument(
        "function",
        nargs="?",
        metavar="FUNCTION",
        help="with %%dist_tune: a function of the notebook, which takes the "
        "parameters by name",
    )
    @argument(
        "--space",
        metavar="NAME",
        required=True,
        help="a dict of the notebook: each parameter's (low, high), (low, high, "
        '"log"), (low, high, step) or list of choices',
    )
    @options(TuneOptions)
    @argument(
        "--fits",
        metavar="FUNCTION",
        help="a function of the notebook that takes parameters by name and returns the "
        "model, or (model, x): what is forecast not to fit is skipped",
    )
    @options(RunOptions, *OF_EVERY_TRIAL)
    @argument("--no-live", action="store_true", help="do not plot while it runs")
    @line_cell_magic
    @parsed
    def dist_tune(self, args: Args) -> Any:
        """Find the best parameters: a study of training runs on the warm ranks, with
        the cell below (%%dist_tune), or with a function (%dist_tune). Returns the
        Study."""
        chosen = {name: getattr(args, name) for name in OF_EVERY_TRIAL}
        if args.config is not None:
            chosen["config"] = self._variable(args.config)
        return current_lab().tune(
            self._work_of(args, "dist_tune"),
            self._variable(args.space),
            strategy=args.strategy,
            fits=args.fits and self._variable(args.fits, callable, "function"),
            live=not args.no_live,
            **given(TuneOptions, args),
            **{name: value for name, value in chosen.items() if value is not None},
        )

    @magic_arguments()
    @argument("names", nargs="+", metavar="NAME", help="variables of the notebook")
    @argument("--ranks", default="all", help="0, or 0,2, or 1-3; all by default")
    @line_magic
    @parsed
    def dist_push(self, args: Args) -> None:
        """Copy variables from the notebook to ranks."""
        values = {name: self._variable(name) for name in names_in(args.names)}
        current_lab().push(args.ranks, **values)

    @magic_arguments()
    @argument("names", nargs="+", metavar="NAME", help="variables that ranks have")
    @argument("--rank", type=int, metavar="R", help="from this rank (default: 0)")
    @argument("--all", action="store_true", help="from every rank, as a list by rank")
    @argument(
        "--full",
        action="store_true",
        help="gather what is sharded; a model gives its whole state dict",
    )
    @line_magic
    @parsed
    def dist_pull(self, args: Args) -> None:
        """Copy variables from a rank to the notebook, under the same names."""
        if args.all and args.rank is not None:
            raise ValueError("--all and --rank: choose one of them")
        ranks = "all" if args.all else args.rank or 0
        lab = current_lab()
        pulled = {
            name: lab.pull(name, ranks, full=args.full) for name in names_in(args.names)
        }
        if args.all and lab.world_size == 1:
            pulled = {name: [value] for name, value in pulled.items()}
        self.shell.user_ns.update(pulled)

    @magic_arguments()
    @argument(
        "model",
        metavar="MODEL",
        help="a plain model: a variable of the notebook, or else of rank 0",
    )
    @argument(
        "--input",
        metavar="NAME",
        help="a batch of its input, kept beside it: a tensor, or a tuple or dict of "
        "them (default: token ids or rows of numbers, as the model begins)",
    )
    @argument(
        "--batch-size",
        type=int,
        metavar="B",
        help="samples of all ranks together (default: those of --input; without "
        "either, the model states only)",
    )
    @argument("--sequence", type=int, metavar="T", help="tokens in a sample")
    @argument(
        "--optimizer",
        metavar="NAME",
        help="one kept beside the model, or a class of torch.optim (default: AdamW)",
    )
    @argument(
        "--ranks",
        metavar="N,N",
        help="world sizes to predict, such as 8,64,512 (default: this lab's)",
    )
    @options(TrainOptions, "precision", "accumulate", "activation_checkpointing")
    @argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="what a rank's device has (default: that of this lab's)",
    )
    @line_magic
    @parsed
    def dist_estimate(self, args: Args) -> Any:
        """Predict memory per rank under every strategy, before anything runs."""
        if args.memory is not None and not args.memory > 0:
            raise ValueError(f"--memory {args.memory}: it must be more than 0")
        model, x, optimizer = args.model, args.input, args.optimizer
        if model in self.shell.user_ns:
            model = self._variable(model)
            x = None if x is None else self._variable(x)
            optimizer = self.shell.user_ns.get(optimizer, optimizer)
        return current_lab().estimate(
            model,
            x,
            batch_size=args.batch_size,
            sequence=args.sequence,
            optimizer=optimizer,
            world_sizes=None if args.ranks is None else whole_numbers(args.ranks),
            precision=args.precision,
            accumulate=args.accumulate,
            activation_checkpointing=args.activation_checkpointing,
            device_bytes=None if args.memory is None else args.memory * 2**30,
        )

    @magic_arguments()
    @line_magic
    @parsed
    def dist_status(self, args: Args) -> Any:
        """Show a table by rank: process, device, state, memory, last run and step."""
        import pandas as pd

        table = current_lab().status()
        print_causes(table)
        # A dead rank does not say where it is.
        table = table.fillna({"host": "", "model": "", "bus": ""})
        for column in ("memory_used", "memory_total"):
            table[column] = [
                "" if value is pd.NA else format_bytes(value) for value in table[column]
            ]
        return table

    @magic_arguments()
    @argument("--full", action="store_true", help="show the libraries' frames as well")
    @line_magic
    @parsed
    def dist_stack(self, args: Args) -> Any:
        """Show where every rank is: its Python stack, and the collective it is in."""
        return current_lab().stack(full=args.full)

    @magic_arguments()
    @argument("names", nargs="*", metavar="NAME", help="runs to compare")
    @argument("--strategy", metavar="STRATEGY", help="list those under this strategy")
    @argument(
        "--state", metavar="STATE", help="list those in this state, such as finished"
    )
    @argument("--last", type=int, metavar="N", help="list the newest N")
    @argument(
        "--delete",
        nargs="+",
        metavar="NAME",
        help="delete these runs from disk, by name or folder, without asking",
    )
    @line_magic
    @parsed
    def dist_runs(self, args: Args) -> Any:
        """List the runs, also those on disk; with names, compare them in one picture
        and one table."""
        from labkit.notebook.runs.catalog import delete_runs
        from labkit.notebook.runs.catalog import find_runs
        from labkit.notebook.runs.catalog import list_runs

        filters = {key: getattr(args, key) for key in ("strategy", "state", "last")}
        filters = {key: value for key, value in filters.items() if value is not None}
        if bool(args.names) + bool(args.delete) + bool(filters) > 1:
            raise UsageError(
                "%dist_runs lists runs, compares those that are named, or "
                "deletes some: give names, or --delete, or what to list"
            )
        own = own_runs()
        if args.delete:
            deleted = delete_runs(*args.delete)
            # What is gone from disk is gone from the list.
            own[:] = [run for run in own if run.folder not in deleted]
            print("deleted " + ", ".join(path.name for path in deleted))
            return None
        if args.names:
            named = [*dict.fromkeys(names_in(args.names))]
            return self._compare(find_runs(named, own))
        return to_read(list_runs(own=own, **filters).drop(columns="folder"))

    def _compare(self, runs: "list[Run]") -> "pd.DataFrame":
        from labkit.notebook.runs.comparison import compare_runs
        from labkit.notebook.runs.comparison import plot_comparison

        display(plot_comparison(runs))
        return to_read(compare_runs(runs)).T  # a page is wide enough for some runs

    @magic_arguments()
    @argument("file", metavar="FILE", help="the script to write, such as train.py")
    @argument("--run", metavar="NAME", help="a run's name; the newest by default")
    @argument(
        "--style",
        choices=STYLES,
        help="plain PyTorch, or a script that imports labkit.train; by default plain "
        "where it is certain to have the same losses",
    )
    @argument("--force", action="store_true", help="replace a file that is there")
    @line_magic
    @parsed
    def dist_export(self, args: Args) -> None:
        """Write a run, with the cells that it needs, as a script for torchrun."""
        notes = current_lab().export(
            args.file, args.run, style=args.style, force=args.force
        )
        for note in notes:
            print(f"labkit: {note}", file=sys.stderr)
        print(f"wrote {args.file}; its first lines say how to launch it")

    @magic_arguments()
    @argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    @argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="for a script that sets no seed: each rank begins with S plus its rank "
        "(default: 0)",
    )
    @options(RunOptions, *(name for name in OF_SCRIPT_RUNS if name != "seed"))
    @argument("--no-live", action="store_true", help="do not plot while it runs")
    @argument(
        "script", metavar="SCRIPT", help="a script for torchrun, such as train.py"
    )
    @argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENTS",
        help="the script's own: all that follows it",
    )
    @line_magic
    @parsed
    def dist_import(self, args: Args) -> Any:
        """Run a script for torchrun on the ranks, unchanged, plotted live. Options come
        before the script. Returns the Run."""
        chosen = {name: getattr(args, name) for name in OF_SCRIPT_RUNS}
        chosen["live"] = self._view(args)
        return current_lab().import_script(
            args.script, args.arguments, module=args.module, **chosen
        )

    @magic_arguments()
    @argument(
        "name", nargs="?", metavar="NAME", help="a run's name; the newest by default"
    )
    @line_magic
    @parsed
    def dist_show(self, args: Args) -> None:
        """Show a run's picture in this cell, live while it runs."""
        from labkit.notebook.live.live_view import show
        from labkit.notebook.runs.catalog import find_runs

        if args.name is None:
            runs = current_lab().runs
        else:
            runs = find_runs([args.name], own_runs())
        if not runs:
            raise ValueError("there is no run; %%dist_train STRATEGY makes one")
        show(runs[-1])

    @magic_arguments()
    @argument(
        "--all",
        action="store_true",
        help="restart every rank; all variables on the ranks are lost",
    )
    @argument(
        "-n",
        "--num-ranks",
        type=int,
        metavar="N",
        help="have N ranks, more or fewer than now; those that stay keep their "
        "variables",
    )
    @argument(
        "--hosts",
        metavar="HOST:N,HOST:N",
        help="with --launcher ssh or mpi: have the ranks on these hosts; those whose "
        "number and host stay the same keep their variables",
    )
    @line_magic
    @parsed
    def dist_restart(self, args: Args) -> None:
        """Bring dead ranks back, or change the number of ranks or their hosts; the
        other ranks keep their variables."""
        lab = current_lab()
        before = lab.world_size
        started = lab.restart(
            everyone=args.all, num_ranks=args.num_ranks, hosts=args.hosts
        )
        what = []
        if lab.world_size < before:
            what.append(f"{format_ranks(range(lab.world_size, before))} ended")
        if back := [rank for rank in started if rank < before]:
            whose = "its" if len(back) == 1 else "their"
            what.append(f"{format_ranks(back)} restarted: {whose} variables are gone")
        if new := [rank for rank in started if rank >= before]:
            what.append(f"{format_ranks(new)} started")
        print("; ".join([*(what or ["no rank was dead"]), ready_line(lab)]))

    @magic_arguments()
    @options(StartOptions, "num_ranks", "backend", "device")
    @argument("--only", metavar="NAME,NAME", help=ONLY_HELP)
    @argument(
        "--output",
        metavar="FILE",
        default=OUTPUT,
        help=f"{OUTPUT_HELP} (default: {OUTPUT})",
    )
    @line_magic
    @parsed
    def dist_check(self, args: Args) -> Any:
        """Check that labkit works on this machine; some 20 s on two CPU ranks."""
        return check(
            args.num_ranks,
            backend=args.backend,
            device=args.device,
            only=args.only,
            output=args.output,
        )

    @magic_arguments()
    @line_magic
    @parsed
    def dist_stop(self, args: Args) -> None:
        """Stop everything that %dist_start started."""
        if (lab := running_lab()) is not None:
            lab.stop()
        set_current_lab(None)

    def _variable(
        self, name: str, check: Any = lambda value: True, what: str = "variable"
    ) -> Any:
        """A variable of the notebook; NameError where there is none such."""
        if name not in self.shell.user_ns or not check(self.shell.user_ns[name]):
            there = f"the notebook has no {what} {short_repr(name)}; "
            if (bare := name.removesuffix("()")) != name:
                raise NameError(f"{there}write its name alone: {bare}")
            if not name.isidentifier():
                raise NameError(
                    f"{there}assign the value to one in a cell without a magic, and "
                    "give its name here"
                )
            raise NameError(f"{there}define it in a cell without a magic")
        return self.shell.user_ns[name]


def ready_line(lab: Lab) -> str:
    """One line that says what works."""
    works = "every rank answered, and one all-reduce was right."
    return f"Ready: {lab.describe()}; {works} {kept_line(lab)}".rstrip()


def kept_line(lab: Lab) -> str:
    """How long the ranks are kept without a kernel; "" where they are not."""
    if lab.kept is None:
        return ""
    name, minutes = lab.kept
    return (
        f"Kept as {name}: without a kernel it ends after {minutes:g} min; %dist_attach "
        "in the next kernel finds it."
    )


def print_causes(table: "pd.DataFrame") -> None:
    """Say why ranks are dead or cannot be reached: that is too long for a column, which
    is taken out."""
    if "cause" in table:
        for cause, rows in table.groupby(table.pop("cause"), sort=False):
            if cause:
                print(f"{format_ranks(rows.index)}: {cause}")


def to_read(table: "pd.DataFrame") -> "pd.DataFrame":
    """A table of runs as words: numbers of three digits, all memory in one unit and
    all that is sent in one, what is optional (parts of a rank's memory, theory) only
    where it is there."""
    in_bytes = [
        name
        for name in (*COMPONENTS, "wire_bytes", "wire_bytes_theory")
        if name in table and table[name].fillna(0.0).any()
    ]
    optional = {*COMPONENTS, "wire_bytes_theory"}.intersection(table.columns)
    shown = table.drop(columns=optional.difference(in_bytes)).astype(object)
    for name in in_bytes:
        alike = [
            each for each in in_bytes if (each in COMPONENTS) == (name in COMPONENTS)
        ]
        unit, called = memory_unit(float(table[alike].max().max()))
        shown[name] = [three_digits(value / unit) for value in table[name]]
        shown = shown.rename(
            columns={name: name.replace("wire_bytes", "sent") + f" ({called})"}
        )
    for name in ("last_loss", "steps_per_s", "seconds", "comm_seconds"):
        if name in shown:
            shown[name] = [three_digits(value) for value in table[name]]
    shown["steps"] = [f"{num_steps:,}" for num_steps in table["steps"]]
    return shown


def three_digits(value: float) -> str:
    """A number to read; "-" for one that is not known."""
    import pandas as pd

    return "-" if pd.isna(value) else significant(float(value))
