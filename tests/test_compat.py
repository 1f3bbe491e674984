"""The gate: labkit/compat has every private name of a library, and they are there."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.checks import UserError
from labkit.compat.gate import Gate
from labkit.compat.gate import version_of

COMPAT = Path(__file__).parents[1] / "labkit" / "compat"
MODULES = sorted(
    path.stem for path in COMPAT.glob("*.py") if path.stem not in ("__init__", "gate")
)


def gates() -> list[Gate]:
    found = []
    for name in MODULES:
        module = importlib.import_module(f"labkit.compat.{name}")
        found += [each for each in vars(module).values() if isinstance(each, Gate)]
    return list({id(gate): gate for gate in found}.values())


@pytest.mark.parametrize("gate", gates(), ids=lambda gate: gate.library)
def test_the_installed_versions_lack_nothing(gate: Gate) -> None:
    assert gate.names
    if not version_of(gate.library):
        pytest.skip(f"{gate.library} is not installed")
    assert gate.missing(load=True) == []
    gate.check()


def test_every_need_has_its_purpose() -> None:
    assert [n for gate in gates() for n, why in gate.names.items() if not why] == []


def test_what_a_version_lacks_is_said_in_one_line() -> None:
    gate = Gate("numpy")

    @gate.needs("numpy:ndarray._strides_of_old", "numpy:ndarray.shape")
    def strides() -> None:
        """Know how far apart elements are.

        There is no public way.
        """

    with pytest.raises(UserError) as caught:
        gate.check()
    assert str(caught.value).startswith("numpy 2.")
    assert "\n" not in str(caught.value)
    assert (
        " lacks numpy.ndarray._strides_of_old (Know how far apart elements are); "
        'labkit works with: pip install "numpy>=2"' in str(caught.value)
    )


def test_a_module_that_is_not_loaded_is_not_looked_at() -> None:
    gate = Gate("labkit")
    gate.needs("labkit.no_such_module:name")(print)
    gate.check()
    assert len(gate.missing(load=True)) == 1


def test_an_attribute_of_instances_is_found_in_the_methods_of_their_class() -> None:
    gate = Gate("labkit")

    @gate.needs(f"{Gate.__module__}:Gate.names", f"{Gate.__module__}:Gate.no_names")
    def read() -> None:
        """Read."""

    assert gate.missing() == ["labkit.compat.gate.Gate.no_names (Read)"]


def test_a_name_that_cannot_be_imported_is_said_in_the_same_line() -> None:
    with (
        pytest.raises(UserError, match=r"^numpy 2\S+ lacks cannot import name"),
        Gate("numpy").imports(),
    ):
        from numpy.linalg import _no_such_name  # noqa: F401
    with pytest.raises(ImportError), Gate("numpy").imports():
        importlib.import_module("json.no_such_module")


# ---- nothing private elsewhere ----

DOCUMENTED = {
    # IPython's display protocol and the names that it gives a user.
    *("_render_traceback_", "_repr_html_", "_repr_mimebundle_", "_repr_png_", "_oh"),
    *("_esm", "_css"),  # of anywidget
    *("_getframe", "_current_frames"),  # of sys
    "_thread",
}
"""Names that begin with an underscore, and are public all the same."""
TEXT = {
    ("notebook/diagnostics/stacks.py", "_try_get_data"),
    ("notebook/diagnostics/stacks.py", "_get_data"),
    ("rank/engine/hints.py", "_cuda_setDevice"),
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
    package = COMPAT.parent
    paths = [p for p in package.rglob("*.py") if p.parent != COMPAT]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    own: dict[Path, set[str]] = {}
    for path, tree in trees.items():
        own.setdefault(path.parent, set()).update(own_names(tree))
    wrong = [
        f"{place}:{line} uses {name}: put it into labkit/compat, with its reason"
        for path, tree in trees.items()
        for line, name in private_names(tree, own[path.parent])
        if ((place := path.relative_to(package).as_posix()), name) not in TEXT
    ]
    assert wrong == []


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
