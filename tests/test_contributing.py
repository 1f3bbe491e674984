"""CONTRIBUTING.md names what there is."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
NAMES = sorted({name for name in re.findall(r"`(labkit(?:\.\w+)+)`", TEXT)})


def resolve(name: str) -> object:
    """The module, or the attribute of one, that has this name."""
    module, rest = name, []
    while True:
        try:
            found: object = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if not error.name or not error.name.startswith("labkit"):
                raise
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for attribute in rest:
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_of_labkit(name: str) -> None:
    resolve(name)


def test_there_are_names() -> None:
    assert len(NAMES) > 20
    with pytest.raises(AttributeError):
        resolve("labkit.records.NoSuchThing")


def test_every_room_is_in_the_picture() -> None:
    picture = TEXT.split("```")[1]
    rooms = [
        path.parent.relative_to(ROOT).parts for path in ROOT.glob("labkit/**/*.py")
    ]
    for room in {parts[1:] for parts in rooms if len(parts) > 1}:
        name = f".{room[-1]}"
        assert re.search(rf"{re.escape(name)}\b", picture), ".".join(room)


def test_its_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([\w-]+)`", TEXT)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_its_files_are_there() -> None:
    for path in re.findall(r"`((?:docs|tests|benchmarks|labkit)/[\w./]*)`", TEXT):
        is_made = path.startswith("docs/_build")
        assert is_made or (ROOT / path).exists(), path
