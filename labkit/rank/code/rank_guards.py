"""Finds what a cell has one rank do alone with what `prepare` gave to all."""

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from labkit.rank.code.trees import line_of
from labkit.rank.code.trees import name_of
from labkit.rank.code.trees import tree_of

RANK_NAMES = {"rank", "local_rank", "global_rank", "RANK", "LOCAL_RANK", "is_main"}
RANK_CALLS = {"get_rank", "is_main_process", "is_rank_0"}
RANK_ATTRIBUTES = {
    *("local_rank", "global_rank", "is_main", "is_main_process"),
    *("is_local_main_process", "is_global_zero", "is_world_process_zero"),
}
NUMBERS = {"int", "bool", "str", "float"}
MAKERS = {"SimpleNamespace", "Namespace", "dict", "replace", "update"}
"""Functions whose keywords are attributes, or keys, of what they make."""
HARMLESS = {
    *("print", "type", "repr", "str", "id", "isinstance", "len", "hasattr"),
    *("train", "eval", "modules", "named_modules", "children", "named_children"),
}
"""Functions, and methods of a model, that need no parameter's values."""
TAKING = {"next", "list", "tuple", "set", "dict", "sum", "max", "min", "sorted"}
"""Functions that take items of what they are given."""
LEAVING = ast.Return | ast.Continue | ast.Break

Key = tuple[str, Any, str]
"""Of a name, with its function; of an attribute, with its class; of what a function
returns."""

UNKNOWN: Key = ("", 0, "")


def lonely_use(
    code: str, *, gradients_alone: bool = False, of_loader: bool = False
) -> str | None:
    """The first line within `if rank == 0:` or the like that uses a model which
    `prepare` gave, as "line 12: evaluate(model)"; None if there is none. With
    `of_loader` the first that takes batches from its loader.

    Functions of the cell that use such a model are followed, and names and attributes
    that stand for it, or for the condition. With `gradients_alone` only what mentions
    `grad` or `backward` counts: the strategy has parameters whole.
    """
    if not any(word in code for word in RANK_NAMES | RANK_CALLS | RANK_ATTRIBUTES):
        return None  # as in most cells: to read one takes 10 ms for 70 lines
    cell = Cell(tree_of(code), of_loader=of_loader)
    for node in cell.nodes:
        for part in cell.parts_of_some_ranks(node):
            if gradients_alone and not mentions_gradients(part):
                continue
            if cell.is_never_called(part):
                continue
            if cell.uses(part) and not cell.is_before_prepare(part):
                return line_of(part)
    return None


class Cell:
    """What the names of a cell stand for, as far as its text says."""

    def __init__(self, tree: ast.Module, *, of_loader: bool) -> None:
        """Of what `prepare` gives, its models are followed, or its loaders."""
        self._of_loader = of_loader
        self._tree = tree
        self.nodes = [*ast.walk(tree)]
        self._function: dict[int, Any] = {}
        """The function that a node is in, by the node's id."""
        self._class: dict[int, ast.ClassDef] = {}
        self._note_places(tree, None, None)
        self._functions = [n for n in self.nodes if isinstance(n, ast.FunctionDef)]
        self._classes = {n.name: n for n in self.nodes if isinstance(n, ast.ClassDef)}
        self._members = {
            id(member): each.name
            for each in self._classes.values()
            for member in each.body
        }
        """The classes' names, by the ids of methods and fields."""
        self._locals: dict[int, set[str]] = defaultdict(set)
        for node in self.nodes:
            where = id(self._function.get(id(node)))
            if isinstance(node, ast.arg):
                self._locals[where].add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._locals[where].add(node.id)
        self._instances: dict[str, str] = {}
        """The class of what is made in the cell, by the text of what holds it."""
        for target, value in itertools.chain.from_iterable(map(given, self.nodes)):
            if isinstance(value, ast.Call) and name_of(value.func) in self._classes:
                self._instances[ast.unparse(target)] = name_of(value.func)
        self._values: dict[Key, list[ast.expr]] = defaultdict(list)
        for node in self.nodes:
            for key, value in self._values_given(node):
                if key != UNKNOWN:
                    self._values[key].append(value)
        self._words = {
            word
            for node in self.nodes
            for word in (getattr(node, name, None) for name in ("attr", "id", "value"))
            if isinstance(word, str)
        }
        """What the cell says in any place: names, attributes and texts."""
        self._constants: set[Key] = set()
        self._flags: set[Key] = set()
        """What differs from rank to rank, as `is_first = rank == 0`."""
        self._prepared = {
            self._key(target)
            for node in self.nodes
            for target in prepared_ones(node, -1 if of_loader else 0)
        } - {UNKNOWN}
        self._arguments: set[Key] = set()
        """The names that functions have for one that they are given."""
        self._users: list[ast.FunctionDef] = []
        """Functions that use one which they are not given."""
        self._find_constants()
        self._find_flags()
        self._find_prepared()
        self._find_users()

    def _note_places(self, node: ast.AST, function: Any, owner: Any) -> None:
        for child in ast.iter_child_nodes(node):
            self._function[id(child)] = function
            if owner is not None:
                self._class[id(child)] = owner
            is_function = isinstance(child, ast.FunctionDef | ast.Lambda)
            is_class = isinstance(child, ast.ClassDef)
            self._note_places(
                child, child if is_function else function, child if is_class else owner
            )

    # ---- what gets its value where ----

    def _key(self, node: ast.AST) -> Key:
        """Of a name, an attribute, or an item whose name is written out."""
        if isinstance(node, ast.Name):
            where = self._function.get(id(node))
            while where is not None and node.id not in self._locals[id(where)]:
                where = self._function.get(id(where))
            return "name", id(where), node.id
        if isinstance(node, ast.Attribute):
            return "attribute", self._owner(node), node.attr
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return "attribute", ast.unparse(node.value), str(node.slice.value)
        return UNKNOWN

    def _owner(self, node: ast.Attribute) -> str:
        """The name of the class whose attribute it is; else the text of what has it."""
        text, around = ast.unparse(node.value), self._class.get(id(node))
        function = self._function.get(id(node))
        while around is not None and function is not None:
            if [each.arg for each in function.args.args[:1]] == [text]:
                return around.name
            function = self._function.get(id(function))
        return self._instances.get(text, text)

    def _values_given(self, node: ast.AST) -> Iterator[tuple[Key, ast.expr]]:
        """What a statement or expression gives to names, attributes and functions."""
        owner = self._members.get(id(node))
        for target, value in given(node):
            if owner is not None and isinstance(target, ast.Name):
                yield ("attribute", owner, target.id), value
            yield self._key(target), value
            if isinstance(value, ast.Lambda):
                yield ("call", "", name_of(target)), value.body
        function = self._function.get(id(node))
        if isinstance(node, ast.Dict):
            for name, value in zip(node.keys, node.values, strict=True):
                yield ("attribute", "", str(getattr(name, "value", ""))), value
        elif isinstance(node, ast.FunctionDef):
            named = zip(node.args.args[::-1], node.args.defaults[::-1], strict=False)
            for argument, value in named:
                yield ("name", id(node), argument.arg), value
        elif isinstance(node, ast.Return) and node.value is not None and function:
            is_property = "property" in map(name_of, function.decorator_list)
            kind = "attribute" if is_property else "call"
            yield (kind, self._members.get(id(function), ""), function.name), node.value
        elif isinstance(node, ast.Call):
            yield from self._values_passed(node)

    def _values_passed(self, node: ast.Call) -> Iterator[tuple[Key, ast.expr]]:
        name, functions = name_of(node.func), self._called(node, loosely=True)
        if name in MAKERS or (name in self._classes and not functions):
            for named in node.keywords:
                yield ("attribute", name, named.arg or ""), named.value
        for function in functions:
            names = [each.arg for each in function.args.args]
            is_method = id(function) in self._members and not any(
                name_of(each) == "staticmethod" for each in function.decorator_list
            )
            for argument, value in zip(names[is_method:], node.args, strict=False):
                yield ("name", id(function), argument), value
            for named in node.keywords:
                yield ("name", id(function), named.arg or ""), named.value

    def _called(
        self, node: ast.Call, *, loosely: bool = False
    ) -> list[ast.FunctionDef]:
        """The functions of the cell that a call runs; `loosely`, also all methods of
        that name where the object is not known."""
        name, owner = name_of(node.func), ""
        if isinstance(node.func, ast.Attribute):
            owner = self._owner(node.func)
        elif name in self._classes:
            name, owner = "__init__", name
        elif name in self._instances:
            name, owner = "__call__", self._instances[name]
        is_any = loosely and owner != "" and owner not in self._classes
        return [
            each
            for each in self._functions
            if each.name == name
            and (
                (is_any and id(each) in self._members)
                or self._members.get(id(each), "") == owner
            )
        ]

    # ---- what follows from it ----

    def _find_constants(self) -> None:
        def is_constant(value: ast.expr) -> bool:
            return isinstance(value, ast.Constant) or self._key(value) in found

        found, before = self._constants, -1
        while before != (before := len(found)):
            for key, values in self._values.items():
                if all(map(is_constant, values)):
                    found.add(key)

    def _find_flags(self) -> None:
        found, before = self._flags, -1
        while before != (before := len(found)):
            for (kind, owner, name), values in self._values.items():
                rest = [each for each in values if not isinstance(each, ast.Constant)]
                if rest and all(map(self._is_flag, rest)):
                    found.add((kind, owner if kind == "name" else "", name))

    def _find_prepared(self) -> None:
        before = -1
        while before != (before := len(self._prepared) + len(self._arguments)):
            for key, values in self._values.items():
                keys = {self._key(each) for each in values}
                is_given = not keys.isdisjoint(self._arguments)
                if is_given or not keys.isdisjoint(self._prepared):
                    kind, function, _ = key
                    is_argument = kind == "name" and function != id(None)
                    into = self._arguments if is_argument else self._prepared
                    if key not in self._prepared:
                        into.add(key)

    def _find_users(self) -> None:
        before = -1
        arguments, self._arguments = self._arguments, set()
        while before != (before := len(self._users)):
            self._users = [
                each for each in self._functions if any(map(self.uses, each.body))
            ]
        self._arguments = arguments

    def _is_flag(self, node: ast.expr) -> bool:
        """Whether a value is a rank's number, or computed from it alone."""
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            return self._names_rank(node)
        if isinstance(node, ast.Call):
            first = [*node.args[:1]]
            is_number = name_of(node.func) in NUMBERS and bool(first)
            return self._names_rank(node) or (is_number and self._is_flag(first[0]))
        if isinstance(node, ast.Compare):
            return any(map(self._is_flag, [node.left, *node.comparators]))
        if isinstance(node, ast.BoolOp):
            return any(map(self._is_flag, node.values))
        if isinstance(node, ast.BinOp):
            return self._is_flag(node.left) or self._is_flag(node.right)
        return (isinstance(node, ast.UnaryOp) and self._is_flag(node.operand)) or (
            isinstance(node, ast.IfExp) and self._is_flag(node.test)
        )

    def _names_rank(self, node: ast.AST) -> bool:
        """Whether this, without what it is made of, differs from rank to rank."""
        kind, _, name = key = self._key(node)
        if isinstance(node, ast.Name):
            is_other = key in self._constants  # as the rank of a LoRA
            return key in self._flags or (name in RANK_NAMES and not is_other)
        if isinstance(node, ast.Attribute) and name in RANK_ATTRIBUTES:
            return True
        if isinstance(node, ast.Subscript) and name in ("RANK", "LOCAL_RANK"):
            return True
        if isinstance(node, ast.Call):
            called = name_of(node.func)
            named = [getattr(each, "value", None) for each in node.args[:1]]
            return (
                called in RANK_CALLS
                or ("call", "", called) in self._flags
                or (called in ("get", "getenv") and named in (["RANK"], ["LOCAL_RANK"]))
            )
        return (kind, "", name) in self._flags

    def is_about_rank(self, test: ast.expr) -> bool:
        """Whether a condition may hold on some ranks alone."""
        return any(map(self._names_rank, ast.walk(test)))

    def parts_of_some_ranks(self, node: ast.AST) -> Iterator[ast.stmt | ast.expr]:
        """What of a statement or expression runs on some ranks alone."""
        if isinstance(node, ast.If) and self.is_about_rank(node.test):
            yield from node.body
            yield from node.orelse
        elif isinstance(node, ast.IfExp) and self.is_about_rank(node.test):
            yield node.body
            yield node.orelse
        elif isinstance(node, ast.BoolOp) and self.is_about_rank(node.values[0]):
            yield from node.values[1:]
        for block in (getattr(node, "body", ()), getattr(node, "orelse", ())):
            statements = block if isinstance(block, list) else []
            for number, each in enumerate(statements, 1):
                is_left = isinstance(each, ast.If) and isinstance(
                    each.body[-1], LEAVING
                )
                if is_left and self.is_about_rank(each.test):
                    yield from statements[number:]

    def is_never_called(self, part: ast.stmt | ast.expr) -> bool:
        """Whether it is of a method that nothing in the text mentions, of a class that
        has no base which may call it."""
        function = self._function.get(id(part))
        while function is not None:
            owner = self._classes.get(self._members.get(id(function), ""))
            if owner is not None and isinstance(function, ast.FunctionDef):
                bases = {name_of(each) for each in owner.bases}
                name = function.name
                is_mentioned = name in self._words or name == "forward"
                is_others = function.decorator_list or name.startswith("__")
                if not (is_mentioned or is_others) and bases <= {
                    *("object", "Module"),
                    *self._classes,
                }:
                    return True
            function = self._function.get(id(function))
        return False

    def is_before_prepare(self, part: ast.stmt | ast.expr) -> bool:
        """Whether its function, or the cell, calls `prepare` only after it, so that a
        name stands for what `prepare` will be given."""
        scope = self._function.get(id(part)) or self._tree
        inside: list[Any] = [*ast.iter_child_nodes(scope)]
        first = next(
            (
                statement.lineno
                for statement in inside
                if any(any(prepared_ones(each, 0)) for each in ast.walk(statement))
            ),
            0,
        )
        return part.lineno < first

    def uses(self, node: ast.AST) -> bool:
        """Whether something in it needs the values of a model: calls it, is given it,
        or reads what it is made of; or takes a loader's batches; or calls a function
        that does."""
        if isinstance(node, ast.Call) and any(
            each in self._users for each in self._called(node)
        ):
            return True
        if self._of_loader:
            return any(
                self._is_prepared(name)
                for each in taken_from(node)
                for name in names_in(each)
            ) or any(map(self.uses, ast.iter_child_nodes(node)))
        if isinstance(node, ast.Call) and name_of(node.func) in HARMLESS:
            return any(
                self.uses(each) for each in node.args if not self._is_prepared(each)
            )
        return self._is_prepared(node) or any(
            map(self.uses, ast.iter_child_nodes(node))
        )

    def _is_prepared(self, node: ast.AST) -> bool:
        key = self._key(node)
        return key in self._prepared or key in self._arguments


def given(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is assigned, each with its value."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value


def taken_from(node: ast.AST) -> list[ast.expr]:
    """What has its items taken by this: not what is only wrapped, as in a bar."""
    if isinstance(node, ast.For | ast.comprehension):
        return [node.iter]
    if isinstance(node, ast.Call) and name_of(node.func) in TAKING:
        return list(node.args)
    return []


def names_in(node: ast.AST) -> Iterator[ast.AST]:
    """Names and attributes that stand for a thing itself, and not for one of it, and
    are not set here."""
    if isinstance(node, ast.Attribute | ast.Name):
        if isinstance(node.ctx, ast.Load):
            yield node
    elif not (isinstance(node, ast.Call) and name_of(node.func) in HARMLESS):
        for child in ast.iter_child_nodes(node):
            yield from names_in(child)


def mentions_gradients(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Attribute) and each.attr in ("grad", "backward")
        for each in ast.walk(node)
    )


def prepared_ones(node: ast.AST, place: int) -> Iterator[ast.expr]:
    """What is at this place in `model, optimizer, loader = prepare(...)`."""
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and name_of(node.value.func) == "prepare"
        and isinstance(node.targets[0], ast.Tuple)
    ):
        yield node.targets[0].elts[place]
