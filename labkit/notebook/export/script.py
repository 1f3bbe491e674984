"""A run as a script: what it needs of earlier cells, and its own cell as `main`."""

import ast
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
from typing import Any

from labkit.notebook.export.cells import Before
from labkit.notebook.export.cells import Statement
from labkit.notebook.export.cells import in_notebook
from labkit.notebook.export.cells import indented
from labkit.notebook.export.cells import literal
from labkit.notebook.export.cells import on_ranks
from labkit.notebook.export.cells import python_of
from labkit.notebook.export.cells import span_of
from labkit.notebook.export.cells import statements_of
from labkit.notebook.export.names import ALWAYS_THERE
from labkit.notebook.export.names import names_of
from labkit.notebook.export.needed import needed
from labkit.records import RANK_NAMES
from labkit.train_options import TrainOptions

CALLS = (
    *("prepare", "fit", "log", "stop_early"),
    *("save_checkpoint", "load_checkpoint"),
)
"""What a script imports from labkit.train."""
PLACES = ("rank", "local_rank", "world_size", "device")
"""What a script takes from it in `main`."""
_LIBRARIES = {"torch": "import torch", "dist": "import torch.distributed as dist"}
_OF_NAMESPACES = {"__name__", "__doc__", "__builtins__", "__annotations__"}
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


@dataclass(frozen=True)
class Script:
    """A script's text, and what there is to say of it."""

    text: str
    notes: Sequence[str]


def script_of(run: RunFacts, file_name: str) -> Script:
    """The script of a run; ValueError, in words, for one that cannot be written."""
    earlier, body, call = _parts(run)
    notes = list(_notes(earlier))
    if run.resumed_from is not None:
        notes.append(
            f"The run resumed from step {run.resumed_from}; without --checkpoint DIR "
            "--resume the script begins at step 0"
        )
    elif run.checkpoints is not None:
        notes.append(
            f"The run kept its state: --checkpoint {shlex.quote(run.checkpoints)} "
            "--resume goes on from there"
        )
    layout = _Layout(earlier, body, call)
    text = _text(run, layout, file_name, notes)
    _check(text)
    return Script(text, notes)


# ---- what it is made of ----


def _parts(run: RunFacts) -> tuple[list[Statement], str, str]:
    """Statements of earlier cells; the run's own cell; what is called after it."""
    before = run.before
    if run.command is not None:
        raise ValueError(
            f"{run.name} is a run of a script: launch that by itself, with torchrun "
            f"--nproc-per-node {run.world_size} {run.command}"
        )
    if before is None:
        alone = statements_of(run.code, "the run")
        if len(alone) == 1 and isinstance(alone[0].node, ast.FunctionDef):
            arguments = [each.arg for each in alone[0].node.args.args]
            call = _call(alone[0].node.name, arguments[:1] == ["rank"])
            found: list[Statement] = alone
            _check_missing(alone[0].names.all_needs - {alone[0].node.name}, run)
            return found, "", call
    elif before.function is not None:
        return _of_function(run, before, before.function)
    if line := _RUN.search(run.code):
        raise ValueError(
            f"{run.name} is a run of a script, {line[0].strip()!r}: launch that by "
            f"itself, with torchrun --nproc-per-node {run.world_size}"
        )
    body = python_of(run.code, f"the cell of {run.name}")
    names = _needs_of(body)
    own = names_of(body).binds - names
    earlier, missing = _earlier(before, names - {*RANK_NAMES}, own)
    has_star = _has_star([*earlier, *statements_of(body, "")])
    _check_missing(missing, run, has_star=has_star)
    return earlier, body, ""


def _of_function(
    run: RunFacts, before: Before, function: str
) -> tuple[list[Statement], str, str]:
    call = _call(function, before.takes_rank)
    if before.module != "__main__":
        made = statements_of(f"from {before.module} import {function}", "the run")
        return made, "", call
    found, missing = needed(in_notebook(before.number), frozenset({function}))
    if function in missing:
        raise ValueError(
            f"{run.name} ran {function}, of which no cell of the notebook has the "
            "source; define it by def in a cell, and train with it again"
        )
    of_ranks, missing = _earlier(before, missing - {*RANK_NAMES})
    _check_missing(missing, run, has_star=_has_star([*found, *of_ranks]))
    return _together(found, of_ranks), "", call


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
    return frozenset(found | (later - bound)) - ALWAYS_THERE - _OF_NAMESPACES


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
    known = {*RANK_NAMES, *CALLS, *ALWAYS_THERE, *_OF_NAMESPACES}
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


def _notes(earlier: Sequence[Statement]) -> Iterable[str]:
    made = [each for each in earlier if not each.is_constant and each.names.binds]
    if made:
        names = sorted(frozenset().union(*(each.names.binds for each in made)))
        yield (
            f"{', '.join(names)}: made again, as an earlier cell made it; the losses "
            "are those of the notebook if that cell seeds what it draws, and no run "
            "before this one has trained it"
        )


# ---- how it is laid out ----


class _Layout:
    """The parts of a script: imports, what is at the top, what is in `main`."""

    def __init__(self, earlier: Sequence[Statement], body: str, call: str) -> None:
        own = statements_of(body, "the run")
        self.imports = [each for each in (*earlier, *own) if each.is_import]
        hoisted = self._hoisted(own)
        self.in_main = self._of_ranks(earlier)
        self.at_top = [
            each for each in earlier if not each.is_import and each not in self.in_main
        ]
        self.at_top += hoisted
        self.body = self._body(body, own, hoisted) or call
        self._find_names(own, hoisted, call)

    def _hoisted(self, own: list[Statement]) -> list[Statement]:
        """The cell's functions and classes that use nothing of its variables."""
        binds = [name for each in own for name in each.names.binds]
        found = [
            each
            for each in own
            if each.is_definition and all(binds.count(n) == 1 for n in each.names.binds)
        ]
        while True:
            top = frozenset().union(*(each.names.binds for each in found))
            imported = frozenset().union(
                *(each.names.binds for each in own if each.is_import)
            )
            local = {*binds, *PLACES} - top - imported
            kept = [
                each
                for each in found
                if not each.names.all_needs & local and not each.names.sets
            ]
            if kept == found:
                return kept
            found = kept

    def _of_ranks(self, earlier: Sequence[Statement]) -> list[Statement]:
        """What can be made only where the process is a rank."""
        definitions = {
            name: each.names.all_needs
            for each in earlier
            if each.is_definition
            for name in each.names.binds
        }
        local = {*PLACES, "dist"}
        found = []
        for each in earlier:
            if each.is_import or each.is_definition:
                continue
            reached, new = set(each.names.needs), set(each.names.needs)
            while new:
                used = {n for name in new for n in definitions.get(name, ())}
                new = used - reached
                reached |= new
            if reached & local:
                found.append(each)
                local |= each.names.binds
        return found

    def _body(self, body: str, own: list[Statement], hoisted: list[Statement]) -> str:
        """The cell without what stands at the top of the script."""
        lines = body.splitlines()
        for each in reversed(own):
            if each.is_import or each in hoisted:
                begin, end = span_of(each.node, lines)
                lines[begin - 1 : end] = []
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
        has_code = bool(ast.parse(text).body)
        return text if has_code or not text else f"{text}\npass"

    def _find_names(
        self, own: list[Statement], hoisted: list[Statement], call: str
    ) -> None:
        """Which names `main` takes from labkit.train, and which it shares."""
        main = [each for each in own if not each.is_import and each not in hoisted]
        called = statements_of(call, "the run")
        inner = [*self.in_main, *main, *called]
        everything = [*self.at_top, *inner]
        needs = frozenset().union(*(each.names.all_needs for each in everything))
        binds_top = frozenset().union(
            *(each.names.binds for each in (*self.at_top, *self.imports))
        )
        binds = frozenset().union(*(each.names.binds for each in inner))
        first: set[str] = set()  # read before the cell binds it
        bound: set[str] = set()
        for each in inner:
            first |= each.reads - bound
            bound |= each.names.binds
        later = frozenset().union(*(each.names.needs_later for each in inner))
        self.places = [
            name
            for name in PLACES
            if name in needs
            and name not in binds_top
            and (name not in binds or name in first)
        ]
        self.calls = sorted({*CALLS} & needs - binds_top - binds)
        self.libraries = [
            line
            for name, line in _LIBRARIES.items()
            if name in needs and name not in binds_top
        ]
        of_top = [each.names for each in self.at_top]
        shared = frozenset().union(
            *(each.needs_later | each.sets for each in of_top),
            *(each.names.sets for each in inner),
        )
        inner_names = binds | {*self.places}
        carried = {n for n in first & binds if n in binds_top}
        self.globals = sorted((shared & inner_names) | carried)
        taken = needs | binds | binds_top | later
        self.main = next(n for n in ("main", "train_main", "main_") if n not in taken)


def _text(run: RunFacts, layout: _Layout, file_name: str, notes: list[str]) -> str:
    inside = []
    if layout.globals:
        inside.append("global " + ", ".join(layout.globals))
    inside += [f"{name} = labkit.train.{name}" for name in layout.places]
    inside += [each.source for each in layout.in_main]
    if any(not each.is_constant for each in layout.in_main):
        inside.append("labkit.train.reseed()  # a run begins with its seed")
    if inside and layout.body:
        inside.append("")
    inside.append(layout.body or "pass")
    config = ""
    if run.config:
        text = literal(dict(run.config))
        if text is None:
            raise ValueError(
                f"the config of {run.name} holds more than plain values, which a "
                "script cannot have; train without --config, and change the model or "
                "the strategy's arguments in the cell"
            )
        config = f"CONFIG = {text}"
    top = [each.source.strip("\n") for each in layout.at_top]
    sections = [
        _docstring(run, file_name, notes),
        _imports(layout),
        config,
        *_spaced(layout.at_top, top),
        f"def {layout.main}():\n" + indented("\n".join(inside)),
        _launch(run, layout.main, has_config=bool(config)),
    ]
    text = ""
    for each in sections:
        if not each:
            continue
        is_block = each.startswith(
            ("def ", "class ", "@", "#", "if __name__", "async ")
        )
        was_block = text.rstrip("\n").rpartition("\n")[2].startswith((" ", "\t"))
        text += "\n\n" if text and (is_block or was_block) else "\n" if text else ""
        text += each + "\n"
    return text


def _spaced(statements: Sequence[Statement], sources: Sequence[str]) -> list[str]:
    """Definitions by themselves, other statements of one kind together."""
    found: list[str] = []
    for each, source in zip(statements, sources, strict=True):
        is_alone = each.is_definition or "\n" in source
        if found and not is_alone and not found[-1].endswith("\0"):
            found[-1] += "\n" + source
        else:
            found.append(source + ("\0" if is_alone else ""))
    return [each.rstrip("\0") for each in found]


def _docstring(run: RunFacts, file_name: str, notes: list[str]) -> str:
    number = run.world_size
    noun = "rank" if number == 1 else "ranks"
    file = shlex.quote(file_name)
    launches = [f"torchrun --nproc-per-node {number} {file} --losses losses.csv"]
    if run.strategy.startswith("zero"):
        launches.append(f"deepspeed --num_gpus {number} {file} --losses losses.csv")
    if run.strategy == "single":
        number, noun = 1, "rank"
        launches = [f"python {file} --losses losses.csv"]
    lines = [
        f"{run.name}: {run.strategy} on {number} {noun}, as it ran in a notebook.",
        "",
        "Launch it, with the losses of the notebook, step by step:",
        "",
        *(f"    {each}" for each in launches),
        "",
        "--help lists the options, whose defaults are those of the run.",
    ]
    for note in notes:
        lines += ["", *_wrapped(note + ".")]
    text = "\n".join(lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{text}\n"""'


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 88, break_long_words=False, break_on_hyphens=False)


def _imports(layout: _Layout) -> str:
    """All imports, in the order that readers know."""
    lines = {"import labkit.train", *layout.libraries}
    from_modules: dict[str, set[str]] = {}
    if layout.calls:
        from_modules["labkit.train"] = {*layout.calls}
    for each in layout.imports:
        node = each.node
        if isinstance(node, ast.Import):
            lines |= {f"import {ast.unparse(alias)}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = from_modules.setdefault(module, set())
            names |= {ast.unparse(alias) for alias in node.names}
    lines |= {
        f"from {module} import {', '.join(sorted(names))}"
        for module, names in from_modules.items()
    }
    groups: dict[int, list[str]] = {}
    for line in sorted(lines, key=lambda line: (line.startswith("from"), line)):
        groups.setdefault(_group_of(line.split()[1]), []).append(line)
    return "\n\n".join("\n".join(groups[number]) for number in sorted(groups))


def _group_of(module: str) -> int:
    first = module.split(".")[0]
    if first == "__future__":
        return 0
    if first in sys.stdlib_module_names:
        return 1
    return 3 if first in ("labkit", "") else 2


def _launch(run: RunFacts, main: str, *, has_config: bool) -> str:
    plain = TrainOptions()
    changed = {
        each.name: getattr(run.options, each.name)
        for each in fields(TrainOptions)
        if each.name not in ("config", "profile")
        and getattr(run.options, each.name) != getattr(plain, each.name)
    }
    if run.seed:
        changed["seed"] = run.seed
    given = [f'"{run.strategy}"', *(f"{name}={v!r}" for name, v in changed.items())]
    if has_config:
        given.append("config=CONFIG")
    return (
        'if __name__ == "__main__":\n'
        f"    options = labkit.train.parser({', '.join(given)})\n"
        f"    labkit.train.run({main}, **vars(options.parse_args()))"
    )


def _check(text: str) -> None:
    """ValueError where the script would not run as far as can be seen."""
    try:
        compile(text, "<script>", "exec")
    except SyntaxError as error:
        line = text.splitlines()[(error.lineno or 1) - 1].strip()
        raise ValueError(
            f"the run's cell cannot be the function that a script calls: {error.msg} "
            f"at {line!r}; write it otherwise, and train again"
        ) from None
    if "import *" in text:
        return
    names = names_of(text)
    known = {*names.binds, *names.sets, *ALWAYS_THERE, *_OF_NAMESPACES}
    if unknown := sorted(names.all_needs - known):
        raise ValueError(
            f"a script has no {', '.join(unknown)}, which the notebook has; train "
            "with a cell that does without, or makes it itself"
        )
