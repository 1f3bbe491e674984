"""Lists of ranks as a user writes them: "0,2", "1-3"."""

import operator
import re
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from labkit.checks import short_repr

Ranks = str | int | Sequence[int] | None


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as a user writes them: "rank 2", "ranks 0-3", "ranks 0,2-3"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def parse_ranks(ranks: Ranks, world_size: int) -> list[int]:
    """Ranks from "0", "0,2", "1-3", "all", a number, numbers or None (all), in order.

    Raises ValueError for what is not there.
    """
    everyone = range(world_size)
    if ranks is None or (isinstance(ranks, str) and ranks == "all"):
        return list(everyone)
    found: set[int] = set()
    try:
        for first, last in _rank_ranges(ranks):
            found |= {first, last, *range(first, min(last, world_size))}
            if last >= world_size:
                break  # of what is wrong there may be much
    except TypeError:
        raise ValueError(
            f"cannot read the ranks {short_repr(ranks)}; write 0, or 0,2, or 1-3, or "
            "all"
        ) from None
    if not found or not found <= set(everyone):
        raise ValueError(
            f"ranks {short_repr(ranks)}: this lab has the ranks "
            + ", ".join(map(str, everyone))
        )
    return sorted(found)


def _rank_ranges(ranks: Any) -> Iterator[tuple[int, int]]:
    """(first, last) of each part of `ranks`. TypeError for what is no ranks."""
    if not isinstance(ranks, str):
        for rank in ranks if isinstance(ranks, Iterable) else [ranks]:
            if isinstance(rank, bool):
                raise TypeError
            number = operator.index(rank)
            yield number, number
        return
    for part in ranks.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise TypeError
        yield int(match[1]), int(match[2] or match[1])
