"""In which suite a case of a test is: `make test`, `make test-long`, or the rest."""

from collections.abc import Iterable
from typing import Any

import pytest

LONG = pytest.mark.long
RELEASE = pytest.mark.release


def long_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """`values` for parametrize: all but `kept` in `make test-long`."""
    values = list(values)
    return in_suites(values, test=kept, long=[v for v in values if v not in kept])


def release_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """`values` for parametrize: all but `kept` in `make test-release`."""
    return in_suites(values, test=kept)


def in_suites(
    values: Iterable[Any], *, test: Iterable[Any] = (), long: Iterable[Any] = ()
) -> list[Any]:
    """`values` for parametrize: some in `make test`, some in `make test-long`, and all
    others in `make test-release`."""
    values, test, long = list(values), list(test), list(long)
    assert all(value in values for value in [*test, *long])
    return [
        value if value in test else _marked(value, LONG if value in long else RELEASE)
        for value in values
    ]


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    row = value if isinstance(value, tuple) else (value,)
    return pytest.param(*row, marks=mark)
