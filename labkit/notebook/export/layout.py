"""How a script is laid out: imports, what is at its top, and the cell as `main`."""

import ast
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable
from collections.abc import Sequence

from labkit.notebook.export.cells import Statement
from labkit.notebook.export.cells import span_of
from labkit.notebook.export.cells import statements_of
from labkit.notebook.export.names import ALWAYS_THERE
from labkit.notebook.export.names import names_of
from labkit.notebook.export.needed import CALLS
from labkit.notebook.export.needed import OF_NAMESPACES
from labkit.notebook.export.needed import Parts
from labkit.notebook.export.needed import RunFacts

PLACES = ("rank", "local_rank", "world_size", "device")
"""What a cell knows of its place, and a script finds out in `main`."""
_LIBRARIES = {"torch": "import torch", "dist": "import torch.distributed as dist"}


class Layout:
    """The parts of a script: imports, what is at the top, what is in `main`."""

    def __init__(self, parts: Parts) -> None:
        earlier, body, call = parts.earlier, parts.body, parts.call
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


def text_of(sections: Iterable[str]) -> str:
    """The parts of a script, with the space between them that readers know."""
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


def top_of(layout: Layout) -> list[str]:
    """What is at the top: definitions by themselves, others of one kind together."""
    found: list[str] = []
    for each in layout.at_top:
        source = each.source.strip("\n")
        is_alone = each.is_definition or "\n" in source
        if found and not is_alone and not found[-1].endswith("\0"):
            found[-1] += "\n" + source
        else:
            found.append(source + ("\0" if is_alone else ""))
    return [each.rstrip("\0") for each in found]


def docstring_of(run: RunFacts, file_name: str, notes: Sequence[str]) -> str:
    """What a script says of itself, and how to launch it."""
    number = run.world_size
    noun = "rank" if number == 1 else "ranks"
    file = shlex.quote(file_name)
    launches = [f"{each} {file} --losses losses.csv" for each in run.torchrun]
    is_on_hosts = len(run.ranks_per_host) > 1
    where = " on every host" if is_on_hosts else ""
    if len(launches) > 1:
        where += ", by the number of ranks that it is to have"
    if run.strategy.startswith("zero") and not is_on_hosts:
        launches.append(f"deepspeed --num_gpus {number} {file} --losses losses.csv")
    if run.strategy == "single":
        number, noun = 1, "rank"
        launches = [f"python {file} --losses losses.csv"]
    lines = [
        f"{run.name}: {run.strategy} on {number} {noun}, as it ran in a notebook.",
        "",
        f"Launch it{where}; at each step it has the loss that the notebook had:",
        "",
        *(f"    {each}" for each in launches),
        "",
        "--help lists the options, whose defaults are those of the run.",
    ]
    wrapper = textwrap.TextWrapper(88, break_long_words=False, break_on_hyphens=False)
    for note in notes:
        lines += ["", *wrapper.wrap(note + ".")]
    text = "\n".join(lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{text}\n"""'


def imports_of(layout: Layout, own: Iterable[str]) -> str:
    """All imports, in the order that readers know, with a script's `own`."""
    lines = set(layout.libraries)
    from_modules: dict[str, set[str]] = {}
    made = statements_of("\n".join(own), "")
    for each in (*made, *layout.imports):
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


def check(text: str) -> None:
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
    known = {*names.binds, *names.sets, *ALWAYS_THERE, *OF_NAMESPACES}
    if unknown := sorted(names.all_needs - known):
        raise ValueError(
            f"a script has no {', '.join(unknown)}, which the notebook has; train "
            "with a cell that does without, or makes it itself"
        )
