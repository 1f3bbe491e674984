"""Judges the exercises on failures."""

import math
from collections.abc import Callable

from labkit.course.exercise import Verdict

HOUR = 3600.0
# Seconds of a checkpoint, and hours from one failure to the next.
CASES = ((1.0, HOUR), (30.0, 3 * HOUR), (300.0, 24 * HOUR))
RESTART_S = 120.0


def best_every(answer: Callable[[float, float], float]) -> Verdict:
    """`answer(checkpoint_s, between_failures_s)` gives the seconds from one checkpoint
    to the next; judged by the time that is lost with them, against the least."""
    worst = 1.0
    for checkpoint_s, between_failures_s in CASES:
        every_s = float(answer(checkpoint_s, between_failures_s))
        if not 0 < every_s < math.inf:
            return Verdict(complaint=f"{every_s:g} s is no time between checkpoints")
        shares = [1.01**power for power in range(-700, 700)]
        middle = math.sqrt(checkpoint_s * between_failures_s)
        least = min(
            lost_share(share * middle, checkpoint_s, between_failures_s)
            for share in shares
        )
        lost = lost_share(every_s, checkpoint_s, between_failures_s)
        worst = max(worst, lost / least)
    return Verdict(
        measured=f"at worst it loses {worst:.2f} times what the best interval loses",
        to_beat="1.02 times or less",
        is_beaten=worst <= 1.02,
    )


def lost_share(every_s: float, checkpoint_s: float, between_failures_s: float) -> float:
    """The seconds that checkpoints, failures and what is done again take, for each
    second of training.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", 2006, equation 20: failures come at random, at a constant rate.
    """
    mean = between_failures_s
    try:
        grown = math.expm1((every_s + checkpoint_s) / mean)
    except OverflowError:
        return math.inf
    return mean * math.exp(RESTART_S / mean) * grown / every_s - 1.0
