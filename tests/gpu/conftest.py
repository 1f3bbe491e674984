"""Labs on GPUs. Where there is one, two ranks share it, over NCCL as well."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from labkit import Lab
from labkit.host.devices import count_gpus
from labkit.notebook.cluster import placement
from labkit.records import Placement

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def num_gpus() -> int:
    found = count_gpus()
    if not found:
        pytest.skip("torch sees no GPU here")
    return found


@pytest.fixture(scope="session", autouse=True)
def gpus(num_gpus: int) -> Iterator[None]:
    """Two GPUs as far as labs are concerned, in this process and in those it starts."""
    with pytest.MonkeyPatch.context() as patch:
        if num_gpus == 1:
            patch.setattr(placement, "_place_on_host", on_one_gpu)
            patch.setenv("PYTHONPATH", str(FOLDER / "one_gpu"), prepend=os.pathsep)
        yield


_place_on_host = placement._place_on_host


def on_one_gpu(
    options: placement.StartOptions, num_gpus: int | None, *more: object
) -> list[Placement]:
    """The ranks' places as if there were enough GPUs; each is this one."""
    if options.device != "cpu" and options.backend != "gloo":
        num_gpus = options.num_ranks or 1
    placements = _place_on_host(options, num_gpus, *more)
    return [
        replace(each, device="cuda:0") if each.device.startswith("cuda") else each
        for each in placements
    ]


@pytest.fixture(scope="session")
def nccl() -> Iterator[Lab]:
    with Lab(num_ranks=2, backend="nccl", group_timeout_s=60) as lab:
        yield lab


@pytest.fixture(scope="session")
def gloo() -> Iterator[Lab]:
    with Lab(num_ranks=2, backend="gloo", device="cuda", group_timeout_s=60) as lab:
        yield lab


@pytest.fixture(params=["nccl", "gloo"])
def lab(request: pytest.FixtureRequest) -> Lab:
    """Of two ranks, over each backend."""
    found: Lab = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> None:
    """The labs of a test have all their ranks, whatever ran before."""
    for name in ("nccl", "gloo"):
        if name in request.fixturenames:
            lab: Lab = request.getfixturevalue(name)
            try:
                lab.restart()
            except RuntimeError:
                lab.restart(everyone=True)
