"""The walls of the house, which CONTRIBUTING.md draws.

What is here is read from the source; two subprocesses see that it holds.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "labkit"

GROUND_FLOOR = {
    *(
        "answers",
        "call_by_name",
        "checks",
        "control_groups",
        "data",
        "json_files",
        "key_server",
        "messages",
    ),
    *("models", "options", "rank_spec", "records", "serialization"),
    *("step_folders", "theory", "timeouts", "train_options", "unsent"),
}
# What each part may import of labkit, besides itself. A part that is not named here
# belongs to the ground floor: it may import nothing but that.
MAY_IMPORT = {
    "": {"lab", "magics", "notebook", "selftest"},
    "__main__": {"notebook", "selftest", *GROUND_FLOOR},
    "magics": {"compat", "lab", "notebook", "selftest", "strategies", *GROUND_FLOOR},
    "selftest": {"host", "lab", "notebook", "strategies", *GROUND_FLOOR},
    "lab": {"notebook", "estimate", "strategies", *GROUND_FLOOR},
    "notebook": {"compat", "host", "strategies", *GROUND_FLOOR},
    "rank": {"checkpoint", "compat", "estimate", "strategies", *GROUND_FLOOR},
    "estimate": {"compat", "strategies", *GROUND_FLOOR},
    "checkpoint": {"compat", *GROUND_FLOOR},
    "strategies": {"compat", *GROUND_FLOOR},
    "compat": {"checks", "timeouts"},
    # A script's own way in: what runs a cell on a rank, without lab and engine.
    "train": {"checkpoint", "compat", "notebook", "rank", "strategies", *GROUND_FLOOR},
    # Its checks run on ranks, its drawings in the notebook's kernel.
    "course": {
        *("compat", "data", "estimate", "models", "notebook", "records"),
        *("strategies", "theory"),
    },
}
# What each wing may import of `compat`, one module of which is one library's.
OF_NOTEBOOKS = {"labkit.compat.ipyparallel", "labkit.compat.ipython"}
OF_RANKS = {
    f"labkit.compat.{name}"
    for name in (
        *("accelerate", "c10d", "data_parallel", "deepspeed", "ipython", "torch"),
    )
}
# A room may import those before it in its line.
ROOMS = [
    [
        *(
            "notebook",
            "notebook.kernel",
            "notebook.hosts",
            "notebook.hosts.profiles",
            "notebook.cluster",
            "notebook.keeper",
            "notebook.diagnostics",
        ),
        *("notebook.history", "notebook.plots", "notebook.profile", "notebook.export"),
        *("notebook.runs", "notebook.live", "notebook.execution", "notebook.trials"),
        "notebook.tuning",
    ],
    [
        *("rank", "rank.telemetry", "rank.measuring", "rank.group", "rank.data"),
        *(
            "rank.loss",
            "rank.code",
            "rank.loop",
            "rank.steps",
            "rank.training",
            "rank.profiling",
        ),
        *("rank.scripts", "rank.terminal", "rank.engine"),
    ],
    [
        *("strategies.mesh", "strategies.autograd", "strategies.model"),
        *("strategies.communication", "strategies.relay", "strategies"),
        "strategies.optimizers",
        *("strategies.fsdp", "strategies.zero", "strategies.tensor"),
        *("strategies.pipeline", "strategies.parameter_server"),
    ],
]
FRONT_END = {
    "IPython",
    "anywidget",
    "ipykernel",
    "ipyparallel",
    "ipywidgets",
    "matplotlib",
    "traitlets",
}


@dataclass(frozen=True)
class Import:
    """One import statement of a module of labkit."""

    importer: str
    """As "labkit.rank.engine.cell_runner"."""
    target: str
    """What is imported, as "labkit.records" or "torch.utils.data"."""
    in_function: bool
    is_for_types: bool = False
    """Under `if TYPE_CHECKING`: never at run time."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports_of(importer: str, path: Path) -> Iterator[Import]:
    """Every import statement of a module."""

    def visit(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(importer, alias.name, in_function, for_types)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{importer} has a relative import"
                for alias in child.names:
                    # `from labkit import theory` imports the module of that name.
                    whole = f"{child.module}.{alias.name}"
                    target = whole if whole in MODULES else str(child.module)
                    yield Import(importer, target, in_function, for_types)
            else:
                is_function = isinstance(
                    child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
                )
                is_guard = isinstance(child, ast.If) and (
                    "TYPE_CHECKING" in ast.dump(child.test)
                )
                yield from visit(
                    child, in_function or is_function, for_types or is_guard
                )

    yield from visit(ast.parse(path.read_text()), False, False)


MODULES = modules()


@functools.cache
def all_imports() -> list[Import]:
    return [each for name, path in MODULES.items() for each in imports_of(name, path)]


@functools.cache
def imports() -> list[Import]:
    """Those that can happen when the module runs."""
    return [each for each in all_imports() if not each.is_for_types]


def part(module: str) -> str:
    """The part of the house that a module of labkit belongs to; "" is its door."""
    return module.removeprefix("labkit").removeprefix(".").split(".")[0]


def room(module: str) -> str:
    """The folder that a module of labkit is in, as "notebook.runs"; "" at the top."""
    return ".".join(MODULES[module].relative_to(PACKAGE).parts[:-1])


def is_package(module: str) -> bool:
    return MODULES[module].name == "__init__.py"


def short_repr(imports: list[Import]) -> list[str]:
    return [f"{each.importer} imports {each.target}" for each in imports]


def test_the_walk_sees_imports() -> None:
    assert Import("labkit.rank.engine.rpc", "labkit.serialization", False) in imports()
    assert Import("labkit", "labkit.magics.lab_magics", True) in imports()
    assert {"notebook", "rank", "strategies"} <= {part(name) for name in MODULES}


def test_arrows_point_down() -> None:
    wrong = [
        each
        for each in all_imports()
        if each.target.split(".")[0] == "labkit"
        and part(each.target) != part(each.importer)
        and part(each.target) not in MAY_IMPORT.get(part(each.importer), GROUND_FLOOR)
    ]
    assert short_repr(wrong) == []


def test_a_wing_takes_of_a_library_what_is_its_own() -> None:
    allowed = {"notebook": OF_NOTEBOOKS, "magics": OF_NOTEBOOKS}
    wrong = [
        each
        for each in all_imports()
        if part(each.target) == "compat" != part(each.importer)
        and each.target not in allowed.get(part(each.importer), OF_RANKS)
    ]
    assert short_repr(wrong) == []


def test_rooms_are_in_one_line() -> None:
    listed = [name for line in ROOMS for name in line]
    wings = {part(name) for name in listed}
    assert set(listed) == {room(name) for name in MODULES if part(name) in wings}
    wrong = [
        each
        for each in all_imports()
        for line in ROOMS
        if each.target in MODULES
        and room(each.importer) in line
        and room(each.target) in line[line.index(room(each.importer)) + 1 :]
    ]
    assert short_repr(wrong) == []


def test_a_room_has_few_files() -> None:
    names = [room(name) for name in MODULES if not is_package(name)]
    sizes = {name: names.count(name) for name in names if name}
    assert {name: size for name, size in sizes.items() if size > 8} == {}


def test_the_two_wings_do_not_know_each_other() -> None:
    wings = {"notebook", "rank"}
    wrong = [
        each
        for each in all_imports()
        if {part(each.importer), part(each.target)} == wings
        and each.target.startswith("labkit.")
    ]
    assert short_repr(wrong) == []


def test_the_notebook_reads_the_table_of_strategies_and_no_technique() -> None:
    wrong = [
        each
        for each in imports()
        if each.target.startswith("labkit.strategies.")
        and part(each.importer) not in {"strategies", "rank", "estimate", "train"}
    ]
    assert short_repr(wrong) == []


def test_techniques_do_not_import_each_other() -> None:
    techniques = {f"labkit.strategies.{name}" for name in ("ddp", "fsdp", "zero")}
    assert techniques <= set(modules())
    wrong = [
        each
        for each in imports()
        if part(each.importer) == "strategies" and each.target in techniques
    ]
    assert short_repr(wrong) == []


def test_ranks_and_strategies_do_not_need_a_notebook() -> None:
    wrong = [
        each
        for each in imports()
        if part(each.importer)
        in {"rank", "strategies", "estimate", "checkpoint", "host"}
        and each.target.split(".")[0] in FRONT_END
        and not (
            each.importer in ("labkit.rank.engine.rpc", "labkit.host.agent")
            and each.in_function
        )
    ]
    assert short_repr(wrong) == []


def test_the_notebook_wing_does_not_import_torch() -> None:
    wrong = [
        each
        for each in imports()
        if part(each.importer) in {"", "magics", "lab", "notebook", "host", "records"}
        and each.target.split(".")[0] in {"torch", "deepspeed"}
    ]
    assert short_repr(wrong) == []


# A strategy loads its technique by name, and names the type of what it gets.
BY_NAME = ("labkit.strategies", "labkit.strategies.prepared")


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for each in all_imports():
        if each.target in MODULES and (each.importer, each.target) != BY_NAME:
            graph.setdefault(each.importer, set()).add(each.target)
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_every_module_says_its_purpose_in_its_first_line() -> None:
    silent = [
        name
        for name, path in MODULES.items()
        if (source := path.read_text()).strip()
        and not ast.get_docstring(ast.parse(source))
    ]
    assert silent == []


# ---- private names of libraries ----

DOCUMENTED = {
    # IPython's display protocol and the names that it gives a user.
    *("_render_traceback_", "_repr_html_", "_repr_mimebundle_", "_repr_png_", "_oh"),
    *("_esm", "_css"),  # of anywidget
    *("_exit", "_getframe", "_current_frames"),  # of os and sys
    "_replace",  # of named tuples
    "_thread",
}
"""Names that begin with an underscore, and are public all the same."""
TEXT = {
    ("notebook/diagnostics/stacks.py", "_try_get_data"),
    ("notebook/diagnostics/stacks.py", "_get_data"),
    ("rank/engine/hints.py", "_cuda_setDevice"),
    ("rank/measuring/step_profiler.py", "_dynamo"),
}
"""What is looked for in a stack or in a message, where it may be absent as well."""
LIBRARIES = "torch|deepspeed|IPython|ipykernel|ipyparallel|matplotlib|pandas|accelerate"
PATH = re.compile(rf"({LIBRARIES})(\.\w+)*\._(?!_)\w+")
PARTS_OF_WORDS = {"removeprefix", "removesuffix", "replace", "startswith", "endswith"}


def is_private(name: str) -> bool:
    return (
        name.isidentifier()
        and name.startswith("_")
        and not name.startswith("__")
        and name.strip("_") != ""
        and name not in DOCUMENTED
    )


def own_names(tree: ast.Module) -> set[str]:
    """The private names that a module gives to what is its own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            found.add(node.attr)
    return {name for name in found if name.startswith("_")}


def is_our_own(owner: ast.expr) -> bool:
    """Whether an attribute is one of `self`, `cls` or `super()`."""
    if isinstance(owner, ast.Call):
        owner = owner.func
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls", "super")


def private_names(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each private name in a module that is not one of `own`."""
    exempt: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            exempt |= set(node.values)
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else ""
            exempt |= set(node.args) if name in PARTS_OF_WORDS else set()
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute):
            is_ours = is_our_own(node.value) or node.attr in own
            found = [] if is_ours else [node.attr]
        elif isinstance(node, ast.Import):
            found = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            found = [alias.name for alias in node.names]
            found += str(node.module).split(".")
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value not in own
            and node not in exempt
        ):
            is_path = PATH.fullmatch(node.value) is not None
            found = [node.value.split(".")[-1] if is_path else node.value]
        yield from ((node.lineno, name) for name in found if is_private(name))


def test_no_private_name_of_a_library_is_used_elsewhere() -> None:
    """Own private names are those of the modules of one folder."""
    paths = [p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE / "compat"]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    own: dict[Path, set[str]] = {}
    for path, tree in trees.items():
        own.setdefault(path.parent, set()).update(own_names(tree))
    wrong = [
        f"{place}:{line} uses {name}, which belongs into labkit/compat"
        for path, tree in trees.items()
        for line, name in private_names(tree, own[path.parent])
        if ((place := path.relative_to(PACKAGE).as_posix()), name) not in TEXT
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch._dynamo", ["_dynamo"]),
        ("from torch.utils._pytree import tree_map", ["_pytree"]),
        ("from torch.a import _b as b", ["_b"]),
        ("torch._C._will(node)", ["_C", "_will"]),
        ("getattr(model, '_hooks', None)", ["_hooks"]),
        ("vars(model)['_hooks']", ["_hooks"]),
        ("import_module('torch._dynamo')", ["_dynamo"]),
        ("self._a = cls._b + super()._c()", []),
        ("_known = 1\nother._known", []),
        ("name.removesuffix('_bytes') + '__main__' + f'{x}_y'", []),
    ],
)
def test_the_search_finds_private_names(code: str, found: list[str]) -> None:
    tree = ast.parse(code)
    names = [name for _, name in private_names(tree, own_names(tree))]
    assert sorted(names) == sorted(found)


# ---- in a process of its own ----


def run_python(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("statement", "needed"),
    [
        ("import labkit", set()),
        ("import labkit.lab", {"numpy"}),  # records.py has its record type
        ("import labkit.magics.lab_magics", {"numpy", "IPython"}),  # `%load_ext`
        # Each process of a script has it.
        (
            "from labkit import train; train.run(lambda: None, 'ddp')",
            {"numpy", "torch"},
        ),
    ],
)
def test_the_first_import_is_cheap(
    statement: str, needed: set[str], tmp_path: Path
) -> None:
    code = f"{statement}; import sys; print(*sys.modules)"
    loaded = run_python(code, tmp_path).split()
    heavy = {"torch", "matplotlib", "IPython", "pandas", "numpy", "ipyparallel"}
    assert heavy & set(loaded) == needed


BLOCKED = """
import importlib
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(name + " is not installed here")

sys.meta_path.insert(0, Blocker())
for name in {names}:
    importlib.import_module(name)
print("imported")
"""


@pytest.mark.long
def test_ranks_and_strategies_import_where_no_notebook_is_installed(
    tmp_path: Path,
) -> None:
    parts = {"rank", "strategies", "estimate", "checkpoint", "train", "host"}
    names = [name for name in MODULES if part(name) in parts]
    assert {"labkit.rank.training.session", "labkit.strategies.ddp"} <= set(names)
    code = BLOCKED.format(blocked=sorted(FRONT_END), names=names)
    assert run_python(code, tmp_path) == "imported\n"
