"""Takes a run's checkpoints between its steps, and resumes from one."""

import contextlib
import functools
import random
import struct
import sys
from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from labkit import timeouts
from labkit.checkpoint import Checkpoint
from labkit.checkpoint import Pending
from labkit.checkpoint import SaveError
from labkit.checkpoint import Section
from labkit.checkpoint import begin_save
from labkit.checkpoint import prune
from labkit.json_files import parse
from labkit.rank.data.dealing import GlobalBatches
from labkit.rank.data.loader import LoaderPosition
from labkit.rank.data.loader import RankLoader
from labkit.rank.steps.former_runs import settings_left
from labkit.rank.steps.observers import Observer
from labkit.rank.steps.optimizer import PreparedOptimizer
from labkit.rank.steps.optimizer import watching_schedulers
from labkit.rank.training.cell_checkpoints import Checkpoints
from labkit.rank.training.cell_checkpoints import prefix
from labkit.rank.training.unsaved import NOT_SAVED
from labkit.rank.training.unsaved import OTHER_LOADER
from labkit.rank.training.unsaved import OTHER_VARIABLES
from labkit.rank.training.unsaved import Unsaved
from labkit.records import CheckpointPlan
from labkit.step_folders import last_in
from labkit.step_folders import step_folder
from labkit.strategies.autograd.agreement import plain as plain_setting
from labkit.strategies.autograd.agreement import settings_of
from labkit.strategies.model.states import IMPLEMENTATION

SEED_STRIDE = 1_000_003

OTHER_SETTINGS = (
    "the cell gives its optimizer other settings than the cell before, {settings}, and "
    "a run that resumes goes on with those of its checkpoint. To train with the new "
    "ones, leave out --resume, call load_checkpoint after prepare, and set them in "
    "optimizer.param_groups after that"
)

_GAUSS = struct.Struct("<?d")
"""The spare normal number of a generator: whether it has one, and which."""


@dataclass(frozen=True)
class SavedLoader:
    """What a checkpoint says of one loader."""

    position: LoaderPosition
    data: dict[str, Any]


@dataclass(frozen=True)
class SavedLoop:
    """What a checkpoint says of the loop that it was taken in."""

    step: int
    seed: int
    loaders: list[SavedLoader]
    active: int | None
    """The loader that was asked for a batch last."""
    schedulers: list[Any]
    """Class and state of each."""
    scalers: list[dict[str, int | float]] = field(default_factory=list)
    """The state of each of the loop's own."""
    unsaved: list[str] = field(default_factory=list)
    """Modules that the loop has changed, and that are not in the checkpoint."""
    variables: dict[str, str] = field(default_factory=dict)
    """What others had by which the loop goes on, in words."""
    given: list[list[dict[str, Any]]] = field(default_factory=list)
    """The settings that each optimizer came to `prepare` with, by group."""


class RunCheckpointer(Observer):
    """One rank's side of the checkpoints of one run.

    A run that resumes from a checkpoint runs its cell from the first line. Model and
    optimizer are restored when they are prepared. Until the loop is where it was when
    the checkpoint was taken, it *replays*: loaders yield nothing, schedulers take no
    step, nothing is logged. There the schedulers and random numbers are restored too.
    """

    def __init__(
        self,
        plan: CheckpointPlan | None,
        *,
        rank: int,
        device: torch.device,
        seed: int,
        on_checkpoint: Callable[[int], None],
        note: Callable[[str], None],
        read_code: Callable[[], str] = str,
    ) -> None:
        """`on_checkpoint(step)` is called when one is taken; `note(text)` with
        a sentence about the cell's schedules or variables; `read_code()` gives the
        cell's text."""
        self._show_note = note
        self.is_replaying = plan is not None and plan.resume_from is not None
        self.first_step = 0
        """Optimizer steps that were taken before this run."""
        self._plan = plan
        self._name = (plan and plan.resume_from) or ""
        self._rank = rank
        self._device = device
        self._seed = seed
        self._checkpoint: Checkpoint | None = None
        """What the run resumes from."""
        self._saved: SavedLoop | None = None
        """What it says of the loop."""
        self._sections: list[dict[str, Any]] = []
        """What it says of each model and optimizer."""
        self._optimizers: list[PreparedOptimizer] = []
        self._loaders: list[RankLoader] = []
        self._states = Checkpoints(lambda: [each.prepared for each in self._optimizers])
        self._active: int | None = None
        """The loader that was asked for a batch last."""
        self._schedulers: list[LRScheduler] = []
        """All of the cell's, in the order in which they first appeared."""
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        """Class and state of those that are yet to be restored, in the same order."""
        self._scalers: list[torch.amp.GradScaler] = []
        """Those of the loop's own, in the order in which they were first used."""
        self._unsaved = Unsaved(read_code)
        self._num_asked = 0
        """Batches that were asked for since the loop goes on."""
        self._given: list[list[dict[str, Any]]] = []
        """The settings that each optimizer came to `prepare` with, by group; those of
        the first cell where the run has resumed."""
        self._rates: list[list[dict[str, Any]]] = []
        """What the optimizers' groups had, besides parameters."""
        self._on_checkpoint = on_checkpoint
        self._pending: Pending | None = None
        self._last_step = 0
        """Of the last checkpoint that was begun."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See the schedulers of the cell, and hold some of their steps back."""
        try:
            with (
                watching_schedulers(self._note, self._may_step),
                watching_scalers(self._note_scaler),
            ):
                yield
        finally:
            for loader in self._loaders:
                loader.resume_at = LoaderPosition(1)  # in another cell it is all there
            lists = self._optimizers, self._loaders, self._schedulers, self._scalers
            for held in lists:
                held.clear()

    def _may_step(self, scheduler: LRScheduler) -> bool:
        return not self.is_replaying and not any(
            optimizer.held_back and optimizer.is_of(scheduler)
            for optimizer in self._optimizers
        )

    @property
    def num_passes(self) -> int:
        """That the loop has begun, through all its loaders."""
        return sum(each.num_epochs for each in self._loaders)

    @property
    def num_empty(self) -> int:
        """Those that have ended without a batch."""
        return sum(each.num_empty for each in self._loaders)

    # ---- called by the session ----

    def add(self, optimizer: PreparedOptimizer, loader: RankLoader) -> None:
        """Take in what was prepared; restore it if the checkpoint has it.

        Raises ValueError if that is of another model or other data.
        """
        place = len(self._optimizers)
        self._optimizers.append(optimizer)
        self._loaders.append(loader)
        self._given.append(settings_of(optimizer))
        if self._plan is not None:
            optimizer.prepared.settings()  # raises now what the first save would raise
        if not self.is_replaying:
            return
        if self._checkpoint is None:
            self._open()
        assert self._checkpoint is not None
        assert self._saved is not None
        saved = self._saved.loaders
        if place >= len(saved):
            return  # it was not yet when the checkpoint was taken
        self._check_data(saved[place].data, facts_of(loader))
        position = saved[place].position
        batches = loader.batches  # of a stream nobody may know how many
        if isinstance(batches, GlobalBatches) and position.batch > batches.num_batches:
            raise self._damaged(
                f"batch {position.batch} of an epoch of {batches.num_batches}"
            )
        optimizer.prepared.restore(
            Section(self._checkpoint, prefix(place)), self._sections[place]
        )
        self._note_settings(place)
        self._rates.append(
            [
                {k: v for k, v in group.items() if k != "params"}
                for group in optimizer.param_groups
            ]
        )
        loader.resume_at = position
        if self._saved.active is None and place == len(saved) - 1:
            self._end_replay()
            self._say(
                f"the loop of step {self.first_step} did not take its data from the "
                "loader that prepare returned, so that data starts from its beginning"
            )

    def begin_epoch(self) -> None:
        """A loader begins a pass: maybe the one in which the checkpoint was taken."""
        if self._plan is not None:
            self._unsaved.look(each.prepared.module for each in self._optimizers)
        active = self._saved.active if self._saved else None
        if not self.is_replaying or active is None or active >= len(self._loaders):
            return
        loader = self._loaders[active]
        if loader.num_epochs >= loader.resume_at.epoch:
            self._end_replay()

    def end_epoch(self) -> None:
        """A loader ends a pass, maybe the last: see what the loop has by then."""
        if self._plan is not None and not self.is_replaying:
            self._unsaved.variables()

    def between_steps(self, step: int, loader: RankLoader | None = None) -> None:
        """Take a checkpoint if it is time to."""
        if self._plan is None:
            return
        if loader is not None:
            self._active = self._loaders.index(loader)
        if self.is_replaying:
            raise RuntimeError(
                "--resume cannot tell which steps of this cell were taken before the "
                "checkpoint, because its loop takes some without the loader that "
                "prepare gave; leave out --resume and call load_checkpoint in the cell"
            )
        if self._saved is not None and self._num_asked < 2:
            self._num_asked += 1
            if self._num_asked == 2 and self._rank == 0:
                self._note_others(self._unsaved.set_since())
        if step // self._plan.every > self._last_step // self._plan.every:
            self.save(step)

    def save(self, step: int) -> None:
        """Begin a checkpoint of what there is after `step` steps. Collective.

        Waits for the one before.
        """
        if self._plan is None or step == self._last_step or not self._optimizers:
            return
        self._wait()
        self._last_step = step
        self._on_checkpoint(step)
        # As save_checkpoint does it, so that load_checkpoint takes it too.
        tensors, sections = self._states.collect()
        numbers = random_state(self._device)
        tensors |= {f"rng.{self._rank}.{name}": each for name, each in numbers.items()}
        loop = {
            "step": step,
            "seed": self._seed,
            "loaders": [
                {"position": vars(loader.position), "data": facts_of(loader)}
                for loader in self._loaders
            ],
            "active": self._active,
            "schedulers": [
                (type(each).__name__, plain(each.state_dict())) for each in self._ours()
            ],
            "scalers": [each.state_dict() for each in self._scalers],
            "unsaved": self._all_unsaved(),
            "variables": self._unsaved.variables(),
            "given": self._given,
        }
        values = {"sections": sections, "user": {}, "loop": loop}
        folder = step_folder(Path(self._plan.directory), step)
        try:
            self._pending = begin_save(folder, tensors, values)
        except (OSError, SaveError) as error:
            self._say_failed(step, error)
        if self._rank == 0 and self._pending is not None:
            self._pending.add_done_callback(self._prune)

    def finish(
        self, step: int, is_interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        """The cell has ended, or stops, after `step` steps: keep what there is."""
        if self._plan is None:
            return
        if self.is_replaying:
            if self._checkpoint:  # the next cell goes on from there
                self._end_replay()
            self._say(
                f"there was nothing to do: the cell ends where the checkpoint of step "
                f"{self.first_step} was taken, or before"
                if self._checkpoint
                else "nothing was resumed, because the cell did not call prepare"
            )
        elif not self._optimizers:
            self._say("no checkpoint was taken, because the cell did not call prepare")
        else:
            self.save(step)
            while self._pending and not self._pending.done():
                if is_interrupted():
                    raise KeyboardInterrupt
                futures.wait([self._pending], timeouts.POLL_S)
            self._wait()

    def _wait(self) -> None:
        """Wait until no save is in flight; only report one that failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except SaveError as error:
                self._say_failed(self._last_step, error)

    # ---- the way back to where it was ----

    def _open(self) -> None:
        self._checkpoint = Checkpoint(Path(self._name))
        values = self._checkpoint.values
        if not isinstance(values.get("loop"), dict):
            raise ValueError(
                f"{self._name} was not saved by --checkpoint; call load_checkpoint "
                "in the cell for it, or name another folder"
            )
        try:
            saved = parse(SavedLoop, values["loop"])
            sections = parse(list[dict[str, Any]], values["sections"])
            states = [
                (parse(str, kind), dict(state)) for kind, state in saved.schedulers
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"{type(error).__name__}: {error}") from None
        if step_folder(Path(), saved.step).name != Path(self._name).name:
            raise self._damaged(f"step {saved.step} in a folder of another name")
        if len(sections) != len(saved.loaders) or (
            saved.active is not None and saved.active >= len(sections)
        ):
            raise self._damaged(
                f"{len(sections)} models, {len(saved.loaders)} loaders, and the one in "
                f"use is {saved.active}"
            )
        if saved.seed != self._seed:
            raise ValueError(
                f"{self._name} is of a run with --seed {saved.seed}, which orders the "
                f"samples differently than --seed {self._seed}; resume with --seed "
                f"{saved.seed}"
            )
        self._saved, self._sections, self._waiting = saved, sections, states
        self.first_step = self._last_step = saved.step

    def _damaged(self, what: str) -> ValueError:
        return ValueError(
            f"{self._name} is damaged: what it says of the loop cannot be, {what}; "
            "remove it to resume from the one before"
        )

    def _check_data(self, saved: dict[str, Any], here: dict[str, Any]) -> None:
        for name, value in here.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"{self._name} was taken with {name}={saved.get(name)} and "
                    f"this cell has {name}={value}, so it is another loop; make "
                    "them equal, or leave out --resume and call load_checkpoint"
                )

    def _end_replay(self) -> None:
        """The loop is where it was: restore what the way there may have changed."""
        self.is_replaying = False
        for scheduler in self._ours():
            self._restore(scheduler)
        self._restore_rates()
        for optimizer, values in zip(self._optimizers, self._sections, strict=False):
            optimizer.prepared.resume(values)
        assert self._checkpoint is not None
        if self._saved is not None and self._saved.unsaved:
            self._show_note(NOT_SAVED.format(names=", ".join(self._saved.unsaved)))
        self._note_variables()
        own = f"rng.{self._rank}."
        found = {
            name.removeprefix(own): self._checkpoint.tensor(name)
            for name in self._checkpoint.tensors
            if name.startswith(own)
        }
        if found:
            try:
                set_random_state(found, self._device)
            except (KeyError, RuntimeError, TypeError, ValueError, struct.error) as bad:
                raise self._damaged(f"its random numbers: {bad}") from None
        else:  # of a rank that there was not: not those that it began with
            seed_everything(self._seed + self._rank + SEED_STRIDE * self.first_step)

    def _note(self, scheduler: LRScheduler, is_new: bool) -> None:
        if any(scheduler is known for known in self._schedulers):
            return
        self._schedulers.append(scheduler)
        if not self._is_ours(scheduler):
            return
        if is_new and any(each.was_measured for each in self._loaders):
            self._note_length(type(scheduler).__name__)
        if not self.is_replaying:
            self._restore(scheduler)
            if is_new:
                self._restore_rates()

    def _note_length(self, kind: str) -> None:
        """A schedule steps with the optimizer: is its length that of the loader?"""
        accumulate = max(each.batches.dealer.accumulate for each in self._loaders)
        if accumulate > 1:
            self._show_note(
                f"len(loader) counts microbatches (--accumulate {accumulate}), but "
                f"{kind} advances once per optimizer step: a schedule of len(loader) "
                f"steps completes only 1/{accumulate} of its course, unlike in one "
                "process. Build it from loader.num_steps"
            )

    def _note_settings(self, place: int) -> None:
        """An optimizer is restored: has it come with other settings than before?"""
        if self._saved is None or place >= len(self._saved.given):
            return
        here, self._given[place] = self._given[place], self._saved.given[place]
        # What it is as a run before has left it may be of that one's scheduler.
        left = settings_left.get(self._optimizers[place].prepared.optimizer)
        groups = here, self._given[place], left or [{} for _ in here]
        others = {
            name: (value, plain_setting(before.get(name)))
            for group, before, now in zip(*groups, strict=False)
            for name, value in group.items()
            if name in before.keys() - IMPLEMENTATION
            and value != plain_setting(before[name])
            and (name, value) not in now.items()
        }
        if others:
            said = ", ".join(f"{k}={a} (before: {b})" for k, (a, b) in others.items())
            self._show_note(OTHER_SETTINGS.format(settings=said))

    def _note_variables(self) -> None:
        """The loop goes on: does it have the variables that it had?"""
        if self._saved is None or self._rank != 0:  # each may have other values
            return
        is_within = any(
            each.position.batch and not is_at_end(loader, each.position)
            for loader, each in zip(self._loaders, self._saved.loaders, strict=False)
        )
        self._note_others(
            self._unsaved.others_than(self._saved.variables, is_within=is_within)
        )
        if line := self._unsaved.taken_beside():
            self._show_note(OTHER_LOADER.format(line=line.removesuffix(":")))

    def _note_others(self, others: list[str]) -> None:
        if others and self._saved is not None:
            names = ", ".join(others)
            text = OTHER_VARIABLES.format(step=self._saved.step, names=names)
            self._show_note(text)

    def _note_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """The loop uses one: its scale goes on where it was."""
        own = [each.prepared.scaler for each in self._optimizers]
        if any(scaler is known for known in [*own, *self._scalers]):
            return
        place = len(self._scalers)
        self._scalers.append(scaler)
        saved = self._saved.scalers if self._saved else []
        if place < len(saved) and saved[place] and scaler.is_enabled():
            try:
                scaler.load_state_dict(saved[place])
            except (LookupError, TypeError, ValueError) as error:
                raise self._damaged(f"the state of its GradScaler: {error}") from None

    def _all_unsaved(self) -> list[str]:
        before = self._saved.unsaved if self._saved else []
        return [*dict.fromkeys([*before, *self._unsaved.changed()])]

    def _restore(self, scheduler: LRScheduler) -> None:
        if not self._waiting:
            return
        kind, state = self._waiting.pop(0)
        if kind != (here := type(scheduler).__name__):
            raise ValueError(
                f"{self._name} has the state of a {kind} where this cell has a {here}; "
                "make the same schedulers in the same order"
            )
        try:
            scheduler.load_state_dict(state)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._damaged(f"the state of its {kind}: {error}") from None

    def _restore_rates(self) -> None:
        """A scheduler sets the rates of its optimizer when it is made."""
        for optimizer, rates in zip(self._optimizers, self._rates, strict=False):
            for group, saved in zip(optimizer.param_groups, rates, strict=True):
                group.update(saved)

    def _ours(self) -> list[LRScheduler]:
        return [each for each in self._schedulers if self._is_ours(each)]

    def _is_ours(self, scheduler: LRScheduler) -> bool:
        return any(optimizer.is_of(scheduler) for optimizer in self._optimizers)

    def _prune(self, pending: Pending) -> None:
        assert self._plan is not None
        if pending.exception() is None:
            with contextlib.suppress(OSError):  # they stay, until the next time
                prune(Path(self._plan.directory), self._plan.keep)

    def _say_failed(self, step: int, error: Exception) -> None:
        assert self._plan is not None
        last = last_in(Path(self._plan.directory))
        self._say(
            f"no checkpoint of step {step}: {error}; "
            + (f"the last one is {last}" if last else "there is no other yet")
        )

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(f"labkit: {text}", file=sys.stderr)


@contextlib.contextmanager
def watching_scalers(note: Callable[[torch.amp.GradScaler], None]) -> Iterator[None]:
    """Call `note` with each GradScaler that scales something, before it does."""
    scale = torch.amp.GradScaler.scale

    @functools.wraps(scale)
    def noted(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        note(scaler)
        return scale(scaler, outputs)

    torch.amp.GradScaler.scale = noted  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


def seed_everything(seed: int) -> None:
    """Seed torch (every device), numpy and random."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def facts_of(loader: RankLoader) -> dict[str, Any]:
    """What a loader's order of batches depends on, besides the seed."""
    return loader.batches.facts


def is_at_end(loader: RankLoader, position: LoaderPosition) -> bool:
    """Whether nothing is left of the pass; no stream knows."""
    batches = loader.batches
    return isinstance(batches, GlobalBatches) and position.batch == batches.num_batches


def plain(value: Any) -> Any:
    """What of a scheduler's state changes as it steps: numbers, and structures of them.
    Functions and objects are as the cell makes them."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if is_plain(v)}
    if isinstance(value, list | tuple):
        return type(value)(plain(each) for each in value)
    return value


def is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    kinds = int | float | str | torch.Tensor | None
    return type(value) is dict or isinstance(value, kinds)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of this process's random numbers: uint8, (num_bytes,) each."""
    found = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    _, keys, place, has_gauss, gauss = np.random.get_state()
    numbers = np.append(keys, place).astype("<u4").tobytes()
    found["numpy"] = as_bytes(numbers + _GAUSS.pack(has_gauss, gauss))
    _, words, in_hand = random.getstate()
    numbers = np.array(words, "<u4").tobytes()
    found["python"] = as_bytes(
        numbers + _GAUSS.pack(in_hand is not None, in_hand or 0.0)
    )
    return found


def set_random_state(found: dict[str, torch.Tensor], device: torch.device) -> None:
    """Go on with the random numbers of what `random_state` returned."""
    torch.set_rng_state(found["torch"])
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)
    words, has_gauss, gauss = numbers_of(found["numpy"])
    np.random.set_state(("MT19937", words[:-1], int(words[-1]), has_gauss, gauss))
    words, has_gauss, gauss = numbers_of(found["python"])
    random.setstate((3, tuple(words.tolist()), gauss if has_gauss else None))


def as_bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def numbers_of(packed: torch.Tensor) -> tuple[np.ndarray, bool, float]:
    """The words of a generator's state, and its spare normal number."""
    content = packed.numpy().tobytes()
    words = np.frombuffer(content[: -_GAUSS.size], "<u4").astype(np.uint32)
    return words, *_GAUSS.unpack(content[-_GAUSS.size :])
