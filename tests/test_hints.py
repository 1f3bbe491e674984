"""What is added to errors of libraries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from labkit.rank.engine.hints import add_hint
from labkit.rank.engine.hints import notes_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("accumulates", "hint"),
    [
        (True, "and comes with the last one"),
        (False, "which under ZeRO the step itself does"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda gradients: gradients[0].norm(),
        lambda gradients: gradients[0] * 0.5,
        lambda gradients: torch.stack([g for g in gradients if g is not None]),
        lambda gradients: torch._foreach_mul_([g for g in gradients if g], 0.5),
    ],
)
def test_a_gradient_that_is_none_is_explained(
    use: Callable[[list[Any]], Any], accumulates: bool, hint: str
) -> None:
    with pytest.raises((AttributeError, TypeError, RuntimeError)) as found:
        use([None, None])
    add_hint(found.value, CPU, accumulates=accumulates)
    assert hint in "".join(notes_of(found.value))
