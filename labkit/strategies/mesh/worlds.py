"""The worlds that this process has been a rank of: where the lab has another number of
ranks, what was made for the former ones is of no use any more."""

from labkit.checks import UnsupportedLoopError

ALONE = -1
"""The world of what needs no other rank: it is never over."""

_over: list[str] = []
"""Of each world that is, why: in the order of their numbers."""


def current_world() -> int:
    """The number of the world of today."""
    return len(_over)


def begin_world(why_over: str) -> None:
    """There is another world from now on; what is of the former says `why_over`."""
    _over.append(why_over)


def check_world(world: int) -> None:
    """UnsupportedLoopError unless the world of this number is that of today."""
    if world != ALONE and world < len(_over):
        raise UnsupportedLoopError(_over[world])
