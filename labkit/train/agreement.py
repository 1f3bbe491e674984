"""What the processes of a script have to agree on before it begins."""

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from labkit.checkpoint.exchange import all_gather_json
from labkit.options import flag_of
from labkit.rank_spec import format_ranks
from labkit.records import CheckpointPlan

_WHAT = "what a rank was launched with"


def agree(
    plan: CheckpointPlan | None, options: Mapping[str, Any], *, is_shared: bool
) -> CheckpointPlan | None:
    """The plan of rank 0, which finds the checkpoints for all. Collective.

    ValueError, on every rank, where one was launched with other options, or does not
    share the folder of the plan with rank 0; unless `is_shared` is False and rank 0
    alone writes there. Nothing has been changed.
    """
    # 1. Rank 0 leaves a mark in the folder. 2. All say what they have. 3. All look for
    # the mark, and say whether it is there.
    with contextlib.ExitStack() as stack:
        mark = problem = ""
        if plan is not None and is_shared and dist.get_rank() == 0:
            try:
                mark = stack.enter_context(_mark(Path(plan.directory)))
            except OSError as error:
                problem = f"--checkpoint {plan.directory}: {error}"
        given = {name: str(value) for name, value in options.items()}
        own = [given, plan and asdict(plan), mark, problem]
        said = all_gather_json(own, _WHAT)
        first, its_plan, mark, problem = said[0]
        for rank, (other, *_) in enumerate(said):
            _check_same(rank, other, first)
        if problem:
            raise ValueError(problem)
        has_mark = not mark or Path(mark).exists()
        places = all_gather_json([has_mark, socket.gethostname()], _WHAT)
    if without := [rank for rank, (has, _) in enumerate(places) if not has]:
        hosts = ", ".join(dict.fromkeys(places[rank][1] for rank in without))
        raise ValueError(
            f"--checkpoint: {Path(mark).parent} is not the same folder for "
            f"{format_ranks(without)} on {hosts} as for rank 0 on {places[0][1]}, and "
            "all ranks write into it; name one on a file system that all share"
        )
    return None if its_plan is None else CheckpointPlan(**its_plan)


@contextlib.contextmanager
def _mark(folder: Path) -> Iterator[str]:
    """A file that is in a folder, or in what is there of its path, for a while."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    with tempfile.NamedTemporaryFile(prefix=".labkit-", dir=there) as file:
        yield file.name


def _check_same(rank: int, given: Mapping[str, str], first: Mapping[str, str]) -> None:
    for name, value in first.items():
        if given[name] != value:
            flag = flag_of(name)
            raise ValueError(
                f"rank {rank} was launched with {flag} {given[name]}, and rank 0 with "
                f"{flag} {value}; launch the same script, with the same options, on "
                "all hosts"
            )
