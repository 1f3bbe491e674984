"""Hosts for the tests here: four of them, for as long as tests run."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
from kernels import wait_until
from namespaces import LIMIT_S
from namespaces import Namespace


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="session")
def four(folder: Path) -> Iterator[list[Namespace]]:
    if reason := namespaces.why_not():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
        patch.setenv("LABKIT_RUNS", str(folder / "runs"))
        (folder / "tmp").mkdir()
        patch.setenv("TMPDIR", str(folder / "tmp"))
        with namespaces.hosts(folder, 4) as found:
            yield found


@pytest.fixture(scope="session")
def three(four: list[Namespace]) -> list[Namespace]:
    return four[:3]


@pytest.fixture
def nothing_left(four: list[Namespace]) -> Iterator[None]:
    """After the test there is what was there before it."""
    before, temporary = what_is_on(four), leftovers()
    yield
    with contextlib.suppress(AssertionError):
        wait_until(lambda: what_is_on(four) == before, LIMIT_S, "left")
    assert what_is_on(four) == before, "processes or ports are left on a host"
    wait_until(lambda: leftovers() == temporary, LIMIT_S, "a folder is left")


def what_is_on(hosts: list[Namespace]) -> dict[str, tuple[list[str], list[str]]]:
    """The programs that run on each host, and its ports."""
    return {each.name: (each.programs(), each.listening()) for each in hosts}


def leftovers() -> set[Path]:
    """Folders of labs, here and on the hosts, which share /tmp."""
    return {*Path("/tmp").glob("labkit-" + "?" * 32)}
