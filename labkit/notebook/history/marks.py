"""A step of a run that all panels of its picture mark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """A thin line at a step; the legend says what it is."""

    step: int
    text: str
    is_death: bool = False
