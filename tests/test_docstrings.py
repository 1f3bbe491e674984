"""The docstrings of the public face name what is there: parameters, returns, raises."""

import builtins
import doctest
import importlib
import inspect
import re
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

import labkit
import labkit.checkpoint
import labkit.estimate
from labkit import checks
from labkit.notebook.cluster.placement import StartOptions
from labkit.notebook.diagnostics.stacks import Stacks
from labkit.notebook.execution import errors
from labkit.notebook.execution.options import RunOptions
from labkit.notebook.history.collector import Collector
from labkit.notebook.plots.estimate_plot import Forecast
from labkit.notebook.tuning.options import TuneOptions
from labkit.options import option_of
from labkit.rank.data.loader import RankLoader
from labkit.rank.training.cell_checkpoints import Checkpoints
from labkit.rank.training.session import Session
from labkit.records import TRAINING_NAMES
from labkit.selftest.report import Report

SECTIONS = ("Parameters", "Returns", "Attributes", "Raises", "Examples")
HEAD = re.compile(r"^(\w+)\n-{3,}$", re.MULTILINE)
MADE_BY_LABKIT = (
    *(labkit.Run, labkit.Study, labkit.RankError),
    *(RankLoader, Forecast, Stacks, Report),
)
"""Classes whose constructors are not for users."""
ERRORS = {
    **vars(builtins),
    **vars(checks),
    **vars(errors),
    "SaveError": labkit.checkpoint.SaveError,
    "UntraceableError": labkit.estimate.UntraceableError,
}


def of_module(module: Any) -> dict[str, Any]:
    """The public functions and classes that a module defines, or says are its own."""
    named = getattr(module, "__all__", None)
    return {
        f"{module.__name__}.{name}": value
        for name, value in vars(module).items()
        if (name in named if named is not None else is_of(module, name, value))
        and (inspect.isfunction(value) or inspect.isclass(value))
    }


def is_of(module: Any, name: str, value: Any) -> bool:
    return name[0] != "_" and getattr(value, "__module__", "") == module.__name__


def methods_of(kind: type) -> dict[str, Any]:
    """Its public methods and properties, those that labkit's bases define too."""
    found = {
        name: value
        for base in reversed(kind.__mro__)
        if base.__module__.startswith("labkit")
        for name, value in vars(base).items()
        if name[0] != "_" and isinstance(value, property | Callable)
    }
    return {f"{kind.__name__}.{name}": value for name, value in found.items()}


def public() -> dict[str, Any]:
    """What users call, by name."""
    found = {name: getattr(labkit, name) for name in labkit.__all__}
    found.pop("__version__")
    for kind in (labkit.Lab, labkit.checkpoint.Checkpoint, *MADE_BY_LABKIT):
        found |= {kind.__name__: kind, **methods_of(kind)}
    found |= {name: getattr(Session, name) for name in TRAINING_NAMES}
    for name in Checkpoints().names:
        found[name] = getattr(Checkpoints, name)
    for name in ("data", "models", "checkpoint", "estimate", "train"):
        found |= of_module(importlib.import_module(f"labkit.{name}"))
    return found


PUBLIC = public()
WITH_PARAMETERS = {
    name: value
    for name, value in PUBLIC.items()
    if callable(value)
    and value not in MADE_BY_LABKIT
    and not (inspect.isclass(value) and issubclass(value, Exception))
}


def sections_of(value: Any) -> dict[str, str]:
    """The text of each section of a numpy-style docstring, by its title."""
    parts = HEAD.split(inspect.getdoc(value) or "")
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(section: str) -> Iterator[tuple[str, str]]:
    """Name and type of each entry of a section: "a, b : int" has two names."""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            names, _, kind = line.partition(" : ")
            for name in names.split(", "):
                yield name, kind


def parameters_of(value: Any) -> dict[str, inspect.Parameter]:
    """The parameters as a docstring names them, with their stars."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return {
        stars.get(each.kind, "") + each.name: each
        for each in inspect.signature(value).parameters.values()
        # `unnamed` catches what has to be passed by name.
        if each.name not in ("self", "unnamed")
    }


def test_what_is_public_is_found() -> None:
    assert {"Lab.train", "Run.wait", "Run.mean_loss", "prepare", "fit"} <= PUBLIC.keys()
    assert {"RankLoader.share", "labkit.data.digits", "list_runs"} <= PUBLIC.keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_begins_with_a_sentence(name: str) -> None:
    first = (inspect.getdoc(PUBLIC[name]) or "").partition("\n\n")[0]
    assert re.match(r"[A-Z`8].*[.:]$", first, re.DOTALL), first


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_the_parameters_are_those_of_the_signature(name: str) -> None:
    value = WITH_PARAMETERS[name]
    found = dict(entries(sections_of(value).get("Parameters", "")))
    assert found.keys() == parameters_of(value).keys()


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_a_default_is_that_of_the_signature(name: str) -> None:
    value = WITH_PARAMETERS[name]
    options = (*fields(TuneOptions), *fields(RunOptions), *fields(StartOptions))
    in_words = {each.name: option_of(each).default_text for each in options}
    parameters = parameters_of(value)
    for parameter, kind in entries(sections_of(value).get("Parameters", "")):
        default = parameters[parameter].default
        said = re.search(r"(?:, |^)(?:default (.*)|optional)$", kind)
        if not kind:  # "As for `prepare`."
            continue
        has_default = default is not inspect.Parameter.empty
        assert bool(said) == has_default, (parameter, kind)
        if isinstance(default, bool | int | float | str):
            number = f"{default:g}" if isinstance(default, float) else str(default)
            right = (number, f'"{default}"', in_words.get(parameter))
            assert said is not None
            assert said[1] in right, (parameter, kind)


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_what_is_returned_has_a_section(name: str) -> None:
    value = WITH_PARAMETERS[name]
    returned = inspect.signature(value).return_annotation
    returns = not inspect.isclass(value) and returned not in (None, "None")
    assert ("Returns" in sections_of(value)) == returns


@pytest.mark.parametrize("name", PUBLIC)
def test_sections_are_known_and_in_order(name: str) -> None:
    titles = list(sections_of(PUBLIC[name]))
    assert titles == [title for title in SECTIONS if title in titles]


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_raised_exists(name: str) -> None:
    for error, _ in entries(sections_of(PUBLIC[name]).get("Raises", "")):
        assert issubclass(ERRORS[error], BaseException)


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_are_python(name: str) -> None:
    doc = inspect.getdoc(PUBLIC[name]) or ""
    for example in doctest.DocTestParser().get_examples(doc):
        compile(example.source, name, "exec")


@pytest.mark.parametrize("name", ["labkit.data.digits", "labkit.models.GPT"])
def test_an_example_gives_what_it_says(name: str) -> None:
    value = PUBLIC[name]
    names = vars(importlib.import_module(value.__module__)).copy()
    test = doctest.DocTestParser().get_doctest(
        inspect.getdoc(value), names, name, None, None
    )
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_attributes_of_a_run_are_there() -> None:
    run = labkit.Run("run-1", "ddp", "", Collector([0]))
    names = [name for name, _ in entries(sections_of(labkit.Run)["Attributes"])]
    assert names
    for name in names:
        assert hasattr(run, name), name
