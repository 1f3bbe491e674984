"""Says whether an answer to an exercise is valid, and whether it beats the number."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

EXERCISES: dict[str, str] = {
    "swap_two_ranks": "collectives",
    "ring_all_reduce": "collectives",
    "bytes_between_hosts": "collectives",
    "one_collective_a_step": "data_parallel",
    "each_exactly_once": "data_parallel",
    "best_every": "failures",
    "name_rank_and_cause": "failures",
    "two_launchers": "failures",
    "best_in_a_minute": "data_parallel",
    "fewest_gpus": "memory",
    "best_bucket": "data_parallel",
    "sooner_than_all_reduce": "servers",
    "ninety_at_five_percent": "data_parallel",
    "fill_the_bubble": "layers",
    "lower_loss": "data_parallel",
    "one_all_reduce_each_way": "layers",
    "halve_the_blocks": "memory",
    "half_the_peak": "step_memory",
    "partition_by_owner": "step_memory",
}
"""The name of each exercise, and the module of `labkit.course` that has the function
of that name, which judges an answer: it takes the answer and returns a `Verdict`."""


@dataclass(frozen=True)
class Verdict:
    """What there is to say about an answer, the same on every rank."""

    measured: str = ""
    """What was measured, such as "each rank sends 2.0 times the tensor's bytes"."""
    to_beat: str = ""
    """The number to beat, such as "1.5 times or less"."""
    is_beaten: bool = False
    complaint: str = ""
    """What is wrong with the result, such as "rank 1 holds 3 and not 6"; "" where it
    is right."""


def check(exercise: str, *answer: Any, **more: Any) -> None:
    """Print whether `answer` is valid, and whether it beats the exercise's number.

    Parameters
    ----------
    exercise : str
        Its name, as the notebook gives it.
    *answer, **more
        What the exercise asks for, as a rule a function. Where it communicates, this
        is called on every rank.

    Raises
    ------
    ValueError
        For an exercise that does not exist. An error in the answer is raised as it is.
    """
    if exercise not in EXERCISES:
        raise ValueError(
            f"there is no exercise {exercise!r}; there are {', '.join(EXERCISES)}"
        )
    module = import_module(f"labkit.course.{EXERCISES[exercise]}")
    judge: Callable[..., Verdict] = getattr(module, exercise)
    verdict = judge(*answer, **more)
    if verdict.complaint:
        print(f"{exercise}: not right: {verdict.complaint}")
    elif verdict.is_beaten:
        print(f"{exercise}: solved: {verdict.measured} (to beat: {verdict.to_beat})")
    else:
        print(
            f"{exercise}: valid, but not solved yet: {verdict.measured}; "
            f"the number to beat is {verdict.to_beat}"
        )


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank gives, by rank: what JSON can hold, in 4 KiB. Collective.

    `dist.all_gather_object` would unpickle what comes.
    """
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    content = json.dumps(value).encode().ljust(4096)
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [json.loads(bytes(part.tolist())) for part in parts]
