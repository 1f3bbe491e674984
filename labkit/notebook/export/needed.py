"""What a run needs of earlier cells, its own cell, and what is called after it."""

import ast
import re
import shlex
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.notebook.export.cells import Before
from labkit.notebook.export.cells import Statement
from labkit.notebook.export.cells import in_notebook
from labkit.notebook.export.cells import on_ranks
from labkit.notebook.export.cells import python_of
from labkit.notebook.export.cells import statements_of
from labkit.notebook.export.names import ALWAYS_THERE
from labkit.notebook.export.names import changes_of
from labkit.notebook.export.names import names_of
from labkit.notebook.export.names import root_of
from labkit.records import RANK_NAMES
from labkit.train_options import TrainOptions

CALLS = (
    *("prepare", "fit", "log", "stop_early"),
    *("save_checkpoint", "load_checkpoint"),
)
"""What a training cell has from labkit."""
OF_NAMESPACES = {"__name__", "__doc__", "__builtins__", "__annotations__"}
_GENERATOR = re.compile(r"Generator|default_rng|RandomState|\bRandom\(")
_RUN = re.compile(r"^\s*%(run|load|loadpy)\b.*$", re.MULTILINE)


@dataclass(frozen=True)
class RunFacts:
    """What is known of the run that becomes a script."""

    name: str
    strategy: str
    code: str
    world_size: int
    options: TrainOptions
    seed: int
    config: Mapping[str, Any]
    before: Before | None
    """None for a run of another kernel."""
    checkpoints: str | None = None
    """The folder in which it kept them."""
    resumed_from: int | None = None
    command: str | None = None
    """Of a script that the run was: its file and arguments."""
    samples: frozenset[tuple[int, ...]] = frozenset()
    """How many samples its ranks had in a step, in order of rank."""
    ranks_per_host: Sequence[int] = ()
    """In order; none for one host."""

    @property
    def torchrun(self) -> Sequence[str]:
        """What launches its ranks: a line, or one for each kind of its hosts."""
        hosts = self.ranks_per_host
        if len(hosts) < 2:
            return [f"torchrun --nproc-per-node {self.world_size}"]
        # Hosts of one script meet at the first; ranks are in the order of its choice.
        meet = "--rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29400"
        return [
            f"torchrun --nnodes {len(hosts)} --nproc-per-node {number} {meet}"
            for number in dict.fromkeys(hosts)
        ]


@dataclass(frozen=True)
class Parts:
    """What a script is made of."""

    earlier: Sequence[Statement]
    """Of earlier cells, in order."""
    body: str
    """The run's own cell."""
    call: str = ""
    """What is called in its place, where the run was one of a function."""


def parts_of(run: RunFacts) -> Parts:
    """What a run needs; ValueError, in words, where that is not known."""
    before = run.before
    if run.command is not None:
        raise ValueError(
            f"{run.name} is a run of a script: launch that by itself, with "
            f"{run.torchrun[0]} {run.command}; --run NAME exports another run"
        )
    if before is None:
        alone = statements_of(run.code, "the run")
        if len(alone) == 1 and isinstance(alone[0].node, ast.FunctionDef):
            arguments = [each.arg for each in alone[0].node.args.args]
            call = _call(alone[0].node.name, arguments[:1] == ["rank"])
            found: list[Statement] = alone
            _check_missing(alone[0].names.all_needs - {alone[0].node.name}, run)
            return Parts(found, "", call)
    elif before.function is not None:
        return _of_function(run, before, before.function)
    if line := _RUN.search(run.code):
        raise ValueError(
            f"{run.name} is a run of a script, {line[0].strip()!r}: launch that by "
            f"itself, with {run.torchrun[0]}"
        )
    body = python_of(run.code, f"the cell of {run.name}")
    names = _needs_of(body)
    own = names_of(body).binds - names
    earlier, missing = _earlier(before, names - {*RANK_NAMES}, own)
    has_star = _has_star([*earlier, *statements_of(body, "")])
    _check_missing(missing, run, has_star=has_star)
    return Parts(earlier, body)


def _of_function(run: RunFacts, before: Before, function: str) -> Parts:
    call = _call(function, before.takes_rank)
    if before.module != "__main__":
        made = statements_of(f"from {before.module} import {function}", "the run")
        return Parts(made, "", call)
    found, missing = needed(in_notebook(before.number), frozenset({function}))
    if function in missing:
        raise ValueError(
            f"{run.name} ran {function}, of which no cell of the notebook has the "
            "source; define it by def in a cell, and train with it again"
        )
    of_ranks, missing = _earlier(before, missing - {*RANK_NAMES})
    _check_missing(missing, run, has_star=_has_star([*found, *of_ranks]))
    return Parts(_together(found, of_ranks), "", call)


def _call(function: str, takes_rank: bool) -> str:
    return f"{function}({'rank, world_size' if takes_rank else ''})"


def _needs_of(body: str) -> frozenset[str]:
    """What a cell reads and has not bound by then."""
    found: set[str] = set()
    bound: set[str] = set()
    later: set[str] = set()
    for each in statements_of(body, ""):
        found |= each.reads - bound
        bound |= each.names.binds
        later |= each.names.needs_later
    return frozenset(found | (later - bound)) - ALWAYS_THERE - OF_NAMESPACES


def _earlier(
    before: Before | None, names: frozenset[str], own: frozenset[str] = frozenset()
) -> tuple[list[Statement], frozenset[str]]:
    """The statements of earlier cells that make what ranks have by these names."""
    if before is None:
        return [], names
    found, missing = needed(on_ranks(before.on_ranks), names, own)
    missing -= {*RANK_NAMES}
    for each in found:
        _check_earlier(each)
    pushed = [each for each in found if each.is_pushed]
    of_notebook: list[Statement] = []
    if pushed:
        names = frozenset().union(*(each.names.binds for each in pushed))
        of_notebook, unmade = needed(in_notebook(before.number), names)
        if unpushed := sorted(names & unmade):
            raise ValueError(
                f"{', '.join(unpushed)} came from the notebook by %dist_push, and no "
                "cell there has a statement that makes it, nor is it a small plain "
                "value; make it in a %%dist cell, or in the run's own"
            )
        missing |= unmade - {*RANK_NAMES}
    of_ranks = [each for each in found if not each.is_pushed]
    return _together(of_notebook, of_ranks), missing


def _check_earlier(each: Statement) -> None:
    """ValueError for what a script cannot have from an earlier cell."""
    what = ", ".join(sorted(each.names.binds)) or each.source.splitlines()[-1]
    if each.where:
        raise ValueError(
            f"{what} is of {each.cell}, which ran on {each.where} alone; make it in a "
            "cell that runs on all ranks, and train again"
        )
    if each.is_training and each.names.needs & {"prepare", "fit", "load_checkpoint"}:
        raise ValueError(
            f"{what} was made by a training run, in {each.cell}: {each.source!r}. A "
            "script has one run; make it in the cell that trains, and train again"
        )


def _together(first: list[Statement], second: list[Statement]) -> list[Statement]:
    """Those of the notebook before those of the ranks; ValueError where both make
    different things of one name."""
    made: dict[str, str] = {}
    for each in first:
        made |= dict.fromkeys(each.names.binds, each.source.strip())
    known = {each.source.strip() for each in first}
    for each in second:
        for name in each.names.binds & made.keys():
            if each.source.strip() not in known:
                raise ValueError(
                    f"{name} is one thing in the notebook and another on the ranks "
                    f"({each.cell}), and the run uses both; give one of them another "
                    "name, and train again"
                )
    return [*first, *(each for each in second if each.source.strip() not in known)]


def _has_star(statements: Iterable[Statement]) -> bool:
    return any(
        isinstance(each.node, ast.ImportFrom) and each.node.names[0].name == "*"
        for each in statements
    )


def _check_missing(
    missing: Iterable[str], run: RunFacts, *, has_star: bool = False
) -> None:
    known = {*RANK_NAMES, *CALLS, *ALWAYS_THERE, *OF_NAMESPACES}
    unknown = sorted({*missing} - known)
    if not unknown or has_star:
        return
    where = (
        "no cell is known that makes it, on the ranks or in the notebook"
        if run.before is not None
        else "the cells of another kernel are not known"
    )
    raise ValueError(
        f"{run.name} uses {', '.join(unknown)}, and {where}; make it in the run's own "
        "cell, and train again"
    )


def notes_of(run: RunFacts, earlier: Sequence[Statement]) -> Iterable[str]:
    """What there is to know of a script, whatever its style."""
    made = [each for each in earlier if not each.is_constant and each.names.binds]
    if made:
        names = sorted(frozenset().union(*(each.names.binds for each in made)))
        yield (
            f"{', '.join(names)}: made again, as in an earlier cell; the losses are "
            "those of the notebook only if that cell seeds its random numbers, and no "
            "earlier run has trained what it makes"
        )
    if run.resumed_from is not None:
        yield (
            f"The run resumed from step {run.resumed_from}; without --checkpoint DIR "
            "--resume the script begins at step 0"
        )
    elif run.checkpoints is not None:
        yield (
            f"The run kept its state: --checkpoint {shlex.quote(run.checkpoints)} "
            "--resume goes on from there"
        )


# ---- which statements make a value ----


def needed(
    statements: Sequence[Statement],
    names: frozenset[str],
    own: frozenset[str] = frozenset(),
) -> tuple[list[Statement], frozenset[str]]:
    """Those that make the values which `names` have at the end, in order; and the names
    that none of them makes. `own` the run binds itself, before it calls anything.

    Among them is what draws random numbers between a seed and something that is needed,
    which would be another one without it; unless a script could not have it.
    """
    drawing: frozenset[int] = frozenset()
    found, missing = _called_by(statements, names, own, drawing)
    while more := _drawn_between(statements, found) - drawing:
        drawing |= more
        again, unmade = _called_by(statements, names, own, drawing)
        new = [statements[number] for number in {*again} - {*found}]
        if unmade - missing - {*RANK_NAMES} or any(
            each.is_training or each.where for each in new
        ):
            break
        found, missing = again, unmade
    made = [statements[number] for number in found]
    return _without_idle_seeds(made), missing


def _called_by(
    statements: Sequence[Statement],
    names: frozenset[str],
    own: frozenset[str],
    drawing: frozenset[int],
) -> tuple[list[int], frozenset[str]]:
    modules = frozenset().union(
        *(each.names.binds for each in statements if each.is_import)
    )
    wanted = names
    while True:
        found, missing = _made_by(statements, wanted, modules, drawing)
        # What a function reads it finds when it is called: at the end, that is.
        later = frozenset().union(*(statements[n].names.needs_later for n in found))
        if later - own <= wanted:
            return found, missing - ALWAYS_THERE
        wanted |= later - own


def _made_by(
    statements: Sequence[Statement],
    names: frozenset[str],
    modules: frozenset[str],
    drawing: frozenset[int],
) -> tuple[list[int], frozenset[str]]:
    wanted = set(names)
    found: list[int] = []
    draws = False
    for number in range(len(statements) - 1, -1, -1):
        each = statements[number]
        binds = each.names.binds & wanted
        # What a run has changed is its own: the caller says so.
        changes = not each.is_training and (
            changes_of(each.node, modules) & wanted
            or (draws and _is_seed(each.node) and not each.where)
        )
        if binds or changes or number in drawing:
            found.append(number)
            draws = draws or not (each.is_constant or _is_seed(each.node))
            if each.binds_anew:
                wanted -= each.names.binds
            wanted |= each.reads
    return found[::-1], frozenset(wanted)


def _drawn_between(statements: Sequence[Statement], found: list[int]) -> set[int]:
    """What may draw from the numbers of a seed, or of a generator, before the last of
    what is needed does."""
    between: set[int] = set()
    since: set[int] | None = None  # the last seed; None after a run, which seeds
    of_generators: dict[str, set[int]] = {}
    of_lab: set[str] = set()
    for number, each in enumerate(statements):
        if _is_of_lab(each.node) or each.names.needs & of_lab:
            of_lab |= each.names.binds
        elif each.is_training:
            since = None
        elif _is_seed(each.node):
            since = set()
        elif each.is_constant or each.where:
            continue
        elif number in found:
            between |= since or set()
            for name in each.names.needs & of_generators.keys():
                between |= of_generators[name]
            if _GENERATOR.search(each.source):
                of_generators |= {name: set() for name in each.names.binds}
        else:
            if since is not None and not _is_builtin(each.node):
                since.add(number)
            for name in each.names.needs & of_generators.keys():
                of_generators[name].add(number)
    return between


def _is_builtin(node: ast.stmt) -> bool:
    """Whether it is a call as `print(x)`."""
    return isinstance(node, ast.Expr) and root_of(node.value) in ALWAYS_THERE


def _is_of_lab(node: ast.stmt) -> bool:
    match node:
        case ast.Import(names=names):
            return any(each.name == "labkit" for each in names)
        case ast.ImportFrom(module=module):
            return module == "labkit"
    return False


def _without_idle_seeds(found: list[Statement]) -> list[Statement]:
    """Without seeds after which nothing is drawn: a run begins with its own."""
    kept: list[Statement] = []
    draws = False
    for each in reversed(found):
        if _is_seed(each.node) and not draws:
            continue
        draws = draws or not (_is_seed(each.node) or each.is_constant)
        kept.append(each)
    return kept[::-1]


def _is_seed(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))
        ):
            return "seed" in name
    return False
