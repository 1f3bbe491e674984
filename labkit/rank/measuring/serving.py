"""Runs a server of a training run on this rank, in the place of the cell."""

import itertools
from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from labkit.rank.measuring.step_profiler import StepProbe
from labkit.rank.measuring.step_profiler import Trained
from labkit.rank.measuring.step_profiler import is_sampled
from labkit.records import Collective
from labkit.records import Note
from labkit.strategies import Strategy
from labkit.strategies.mesh.roles import Roles
from labkit.train_options import TrainOptions


def server_of(
    strategy: Strategy,
    roles: Roles,
    device: torch.device,
    options: TrainOptions,
    report: Callable[[Any], None],
) -> Callable[[], None]:
    """Runs one server of one run, and ends when the cell has ended on all workers.
    `report(measured)` is given what a step took."""
    server = strategy.load_server()(roles, device, options, _Watch(device, report))
    serve: Callable[[], None] = server.serve
    return serve


class _Watch:
    """Measures some of a server's steps, those that are measured of a worker."""

    def __init__(self, device: torch.device, report: Callable[[Any], None]) -> None:
        self._device = device
        self._report = report
        self._probe: StepProbe | None = None
        self._served: Trained | None = None
        """The model whose step is measured, or was last."""
        self._collectives: dict[Trained, list[Collective]] = {}
        """Of the last measured step of every model."""

    def begin(self, served: Trained, step: int) -> None:
        self._collectives.setdefault(served, [])
        if is_sampled(step):
            self._served = served
            self._probe = StepProbe(self._collectives, self._device, step=step)
            self._probe.start()
            self._probe.begin_backward()

    def have_come(self) -> None:
        if self._probe is not None:
            self._probe.end_backward()

    def end(self) -> None:
        probe, self._probe = self._probe, None
        if probe is None or not probe.stop():
            return
        if (measured := probe.measurement()) is not None:
            assert self._served is not None
            # A step of the run is one of each of its models.
            self._collectives[self._served] = measured.collectives
            of_all = itertools.chain.from_iterable(self._collectives.values())
            self._report(replace(measured, collectives=together(of_all)))

    def note(self, text: str) -> None:
        self._report(Note(text))


def together(collectives: Iterable[Collective]) -> list[Collective]:
    """Those of each kind added up."""
    found: dict[str, Collective] = {}
    for each in collectives:
        known = found.get(each.kind)
        found[each.kind] = each if known is None else known.and_those_of(each)
    return list(found.values())
