"""Reports where the ranks of a run differ but should agree."""

from collections.abc import Mapping

import numpy as np

from labkit.checks import several
from labkit.rank_spec import format_ranks
from labkit.records import BUFFER
from labkit.records import GRADIENTS
from labkit.records import WEIGHTS
from labkit.records import ReplicaNotes
from labkit.records import StepsTaken

MAX_NAMES = 3
_WRAP = 2**64
NO_LONGER_ONE = (
    ", so they no longer hold one model. To train on, load a checkpoint, or build "
    "model and optimizer again and prepare them"
)
SET_ALIKE = (
    ". Set it to the same on all ranks: to what rank 0 has, by "
    "torch.distributed.broadcast, or to the mean over the ranks, by "
    "torch.distributed.all_reduce"
)
BUFFER_DIFFERS = (
    "{} is not the same on all ranks: each rank updates it from its own samples, where "
    "one process updates it from the whole batch. In forward, average the update over "
    "the ranks with torch.distributed.all_reduce; where it holds samples themselves, "
    "like a queue of keys, gather those of all ranks first, with "
    "torch.distributed.all_gather"
)
WEIGHTS_DIFFER = (
    "a parameter was not the same on all ranks before a step, which then takes a part "
    "of it from each rank: the model's forward or the loop has set it from a rank's "
    "own samples, where one process sets it from the whole batch. Set it from the mean "
    "over the ranks, by torch.distributed.all_reduce, or before prepare"
)

GRADIENTS_DIFFER = (
    "a gradient that the loop has set was not the same on all ranks before a step, "
    "which then takes a part of it from each rank: it was computed from a rank's own "
    "samples or random numbers, where one process has those of the whole batch. Set it "
    "from means over the ranks, by torch.distributed.all_reduce, or use single"
)
WITH_SAMPLER = "with a DistributedSampler each would draw its share of them"
WITH_LOADER = (
    "the loop draws them from a DataLoader of its own, and none from the loader that "
    "prepare returned, from which each would draw its share. As it is, every rank does "
    "all of the work"
)
LEFT_EARLY = (
    "ranks were in different passes over the data at the same time, as where each "
    "leaves a pass by `break` on its own loss, so a step is of batches that one "
    "process does not have together. Make the same decision on all ranks: call "
    "dist.all_reduce on the value that the condition tests, before it"
)
LOADED_OTHERS = (
    "ranks have loaded other states into the model: of other steps, or at other steps. "
    "Each has decided by what it computes of its own samples, such as its loss, so the "
    "model is now a mixture of these states, where one process has one of them. Decide "
    "on all ranks together: if stop_early(loss, patience=3, restore_best=True): break; "
    "or take the mean over the ranks first, by dist.all_reduce of the value"
)
COPIED_OTHERS = (
    "ranks have made different numbers of copies of the model, by copy.deepcopy, after "
    "their last step. Copies of a model in parts are in parts as well, so that these "
    "are mixtures of several steps. Make the same decision on all ranks: call "
    "dist.all_reduce on the value that the condition tests, before it"
)
OF_COPIES = {WEIGHTS: WEIGHTS_DIFFER, GRADIENTS: GRADIENTS_DIFFER}


def find_inconsistencies(
    notes: Mapping[int, ReplicaNotes], *, is_by_hand: bool
) -> list[str]:
    """One sentence for each thing that should be the same on all ranks and is not;
    `is_by_hand` where the cell shares out model and data itself."""
    if len(notes) < 2:
        return []
    notes = dict(sorted(notes.items()))
    return [
        *parameter_mismatches(notes),
        *data_mismatches(notes, is_by_hand=is_by_hand),
        *seed_mismatches(notes, is_by_hand=is_by_hand),
        *state_mismatches(notes),
    ]


def parameter_mismatches(notes: Mapping[int, ReplicaNotes]) -> list[str]:
    """Parameters that differ between ranks that hold replicas of each other."""
    found: list[str] = []
    other_steps = step_mismatches({rank: note.taken for rank, note in notes.items()})
    groups: dict[int, list[int]] = {}
    for rank, note in notes.items():
        groups.setdefault(note.group, []).append(rank)
    for ranks in groups.values():
        first = notes[ranks[0]]
        for rank in ranks[1:]:
            other = notes[rank]
            if rank in other_steps:
                found.append(other_steps[rank])
                continue
            if (first.steps, first.names) != (other.steps, other.names):
                continue  # one of them has failed before it had a model
            differs = first.values != other.values  # (steps, names)
            columns = [int(c) for c in np.flatnonzero(differs.any(axis=0))]
            # Those that parted first come first: the others follow from them.
            columns.sort(key=lambda c: int(differs[:, c].argmax()))
            buffers = [first.names[c] for c in columns if is_buffer(first.names[c])]
            found += [
                OF_COPIES[name]
                for name in (first.names[c] for c in columns)
                if name in OF_COPIES
            ]
            columns = [c for c in columns if is_parameter(first.names[c])]
            if buffers:
                found.append(BUFFER_DIFFERS.format(several(buffers)))
            for column in columns[:MAX_NAMES]:
                row = int(differs[:, column].argmax())
                found.append(
                    f"rank {rank}'s copy of {first.names[column]} differs from that "
                    f"of rank {ranks[0]} {_since(first.steps, row)}"
                )
            if len(columns) > MAX_NAMES:
                found[-1] += f"; the same goes for {len(columns) - MAX_NAMES} more"
            if columns:
                found[-1] += SET_ALIKE
    return list(dict.fromkeys(found))


def step_mismatches(taken: Mapping[int, StepsTaken]) -> dict[int, str]:
    """By rank, where it took another number of optimizer steps than the first one of
    those that it holds replicas of."""
    found: dict[int, str] = {}
    firsts: dict[int, int] = {}
    for rank, own in taken.items():
        number = firsts.setdefault(own.group, rank)
        first = taken[number]
        are_checked = own.has_replicas or first.has_replicas
        if are_checked and own.num_steps != first.num_steps:
            found[rank] = (
                f"rank {rank} took {own.num_steps} optimizer steps, rank {number} took "
                f"{first.num_steps}" + NO_LONGER_ONE
            )
    return found


def one_of_each_place(notes: Mapping[int, ReplicaNotes]) -> dict[int, ReplicaNotes]:
    """Those of one rank of each that have the same samples, by rank."""
    found: dict[int, tuple[int, ReplicaNotes]] = {}
    for rank, note in notes.items():
        found.setdefault(rank if note.place is None else note.place, (rank, note))
    return dict(found.values())


def is_parameter(name: str) -> bool:
    return not is_buffer(name) and name not in OF_COPIES


def is_buffer(name: str) -> bool:
    return name.startswith(BUFFER)


def data_mismatches(
    notes: Mapping[int, ReplicaNotes], *, is_by_hand: bool
) -> list[str]:
    """Epochs whose samples the ranks do not share as they should."""
    found = []
    ranks = format_ranks(notes)
    notes = one_of_each_place(notes)
    for draws in zip(*(note.own_draws for note in notes.values()), strict=False):
        first = draws[0]
        is_same = len({draw.drawn for draw in draws}) == 1 < len(draws)
        # A DistributedSampler repeats some samples to make the parts equal. What
        # cannot be meant is that every rank draws everything.
        if is_same and first.num_drawn == first.num_samples > 1:
            found.append(
                f"{ranks} each drew all {first.num_samples} samples of a dataset: "
                + (WITH_SAMPLER if is_by_hand else WITH_LOADER)
            )
    for draws in zip(*(note.draws for note in notes.values()), strict=False):
        first = draws[0]
        if len({draw.epoch for draw in draws}) > 1:
            found.append(LEFT_EARLY)
            break
        num_drawn = sum(draw.num_drawn for draw in draws)
        if num_drawn != first.num_samples:
            found.append(
                f"epoch {first.epoch}: {ranks} drew {num_drawn} samples together, the "
                f"dataset has {first.num_samples}"
            )
        elif sum(draw.drawn for draw in draws) % _WRAP != first.whole:
            found.append(
                f"epoch {first.epoch}: {ranks} drew some samples twice and others never"
            )
    return list(dict.fromkeys(found))


def seed_mismatches(
    notes: Mapping[int, ReplicaNotes], *, is_by_hand: bool
) -> list[str]:
    """Ranks that draw the same random numbers after `prepare`."""
    notes = one_of_each_place(notes)
    seeds = {note.seed for note in notes.values()}
    is_prepared = any(note.names for note in notes.values())
    if is_by_hand or not is_prepared or len(seeds) == len(notes):
        return []
    return [
        f"{format_ranks(notes)} draw the same random numbers, so dropout falls on the "
        "same units on each of them; seed before prepare, which seeds each rank "
        "differently"
    ]


def state_mismatches(notes: Mapping[int, ReplicaNotes]) -> list[str]:
    """States that ranks have loaded, or copies that they have made, of other steps.
    Those whose loop has not ended well have not come as far."""
    loaded = {note.loaded for note in notes.values()} - {None}
    copies = {note.num_copies for note in notes.values()} - {None}
    found = {LOADED_OTHERS: len(loaded) > 1, COPIED_OTHERS: len(copies) > 1}
    return [text for text, is_so in found.items() if is_so]


def _since(steps: list[int], row: int) -> str:
    if row and steps[row - 1] < steps[row] - 1:
        return f"since a step between {steps[row - 1] + 1} and {steps[row]}"
    return f"from step {steps[row]:,} on"
