"""What the notebooks share: their drawings, and the checks of their exercises."""

from labkit.course.exercise import check

__all__ = ["check"]
