"""What a loop does for every batch, read from its text."""

import pytest

from labkit.rank.loop.loop_body import extra_work

PREPARE = "model, optimizer, loader = prepare(model, optimizer, data)\n"
STEP = """
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cpu"):
        loss = loss_fn(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    total += loss.item()
"""


def test_a_plain_loop_does_nothing_else() -> None:
    assert extra_work(PREPARE + STEP) is None
    assert extra_work("this is no Python") is None


@pytest.mark.parametrize(
    ("work", "found"),
    [
        ("ema.update_parameters(model)", "line 12: ema.update_parameters(model)"),
        ("if total > 3:\n        break", "line 13: break"),
        (
            "with torch.no_grad():\n        w.mul_(0.9)",
            "line 12: with torch.no_grad():",
        ),
        ("losses.append(loss)", "line 12: losses.append(loss)"),
        ("p.data = q", "line 12: p.data = q"),
    ],
)
def test_other_work_is_found(work: str, found: str) -> None:
    assert extra_work(PREPARE + STEP + "    " + work) == found


def test_a_number_of_rounds_is_found() -> None:
    loop = "for step in range(9):\n    x, y = next(batches)\n    optimizer.step()"
    assert extra_work(PREPARE + loop) == "line 2: for step in range(9):"


@pytest.mark.parametrize(
    "work",
    [
        "for output in outputs:\n        loss = loss + loss_fn(output, y)",
        "for t in range(9):\n        if t > 3:\n            break\n        h = cell(h)",
        "while error > 1:\n        error = error / 2",
    ],
)
def test_a_loop_that_only_computes_is_no_other_work(work: str) -> None:
    assert extra_work(PREPARE + STEP + "    " + work) is None


@pytest.mark.parametrize(
    ("work", "found"),
    [
        ("for p in params:\n        p.data = q", "line 13: p.data = q"),
        ("for e in es:\n        e.mul_(0.9)", "line 13: e.mul_(0.9)"),
        ("for _ in range(2):\n        sgd.step()", "line 12: for _ in range(2):"),
    ],
)
def test_other_work_within_a_loop_is_found(work: str, found: str) -> None:
    assert extra_work(PREPARE + STEP + "    " + work) == found
