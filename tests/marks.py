"""Which cases of a test are in `make test`; the others are in `make test-long`."""

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """`values` for parametrize, all but `kept` marked long."""
    values = list(values)
    assert set(kept) <= set(values)
    return [
        value if value in kept else _long(*(value if _is_row(value) else [value]))
        for value in values
    ]


def _is_row(value: Any) -> bool:
    return isinstance(value, tuple)


def _long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)
