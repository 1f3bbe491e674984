import traceback
from typing import Any

import pytest

from labkit import RankError
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.execution.errors import Interrupted
from labkit.notebook.execution.errors import first_failure
from labkit.notebook.execution.errors import is_same_failure
from labkit.rank.telemetry.exceptions import SHOWN_FRAMES
from labkit.rank.telemetry.exceptions import shortened
from labkit.records import Outcome
from labkit.records import shorten

TRACEBACK = ["--- Traceback ---", "line 3, in <cell>", "ValueError: no such thing"]


def ok(rank: int) -> Outcome:
    return Outcome(rank, "ok")


def error(rank: int, evalue: str = "no such thing", **more: Any) -> Outcome:
    more = {"where": "line 3: f(x)", "traceback": TRACEBACK, **more}
    return Outcome(rank, "error", "ValueError", evalue, **more)


def stopped(rank: int, where: str = "line 5: dist.barrier()") -> Outcome:
    return Outcome(rank, "interrupted", "KeyboardInterrupt", where=where)


def died(rank: int) -> Outcome:
    return Outcome(
        rank,
        "died",
        "the process died",
        f"pid {1000 + rank}, killed by SIGKILL; %dist_restart brings it back",
        group_in_place=False,
    )


# ---- one line a rank ----


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (ok(1), "rank 1: finished"),
        (error(2), "rank 2: failed at line 3: f(x); ValueError: no such thing"),
        (error(2, "", where=""), "rank 2: ValueError"),
        (error(2, "first\nsecond", where=""), "rank 2: ValueError: first"),
        (error(2, "\n  first\nsecond", where=""), "rank 2: ValueError: first"),
        (stopped(3), "rank 3: stopped at line 5: dist.barrier()"),
        (stopped(3, where=""), "rank 3: stopped"),
        (
            died(0),
            "rank 0: the process died: pid 1000, killed by SIGKILL; %dist_restart "
            "brings it back",
        ),
    ],
)
def test_every_ending_has_one_line(outcome: Outcome, line: str) -> None:
    assert outcome.summary() == line


def test_a_long_message_is_shortened() -> None:
    line = error(0, "x" * 1000, where="line 1: f()").summary()
    assert line == f"rank 0: failed at line 1: f(); ValueError: {'x' * 157}..."


def test_a_message_in_full_is_as_long_as_it_is_and_below_its_line() -> None:
    line = error(0, "x" * 1000, where="line 1: f()").in_full()
    assert line == f"rank 0: failed at line 1: f()\nValueError: {'x' * 1000}"
    lines = error(0, "\n  first\nsecond", where="line 1: f()").in_full()
    assert lines == "rank 0: failed at line 1: f()\nValueError: first\nsecond"
    assert error(0, "", where="").in_full() == "rank 0: ValueError"


@pytest.mark.parametrize(
    ("text", "expected"), [("", ""), ("12345", "12345"), ("123456", "12...")]
)
def test_text_is_shortened_to_the_length_asked_for(text: str, expected: str) -> None:
    assert shorten(text, 5) == expected


# ---- which failure is the first ----


def test_there_is_no_first_failure_where_none_failed() -> None:
    assert first_failure([]) is None
    assert first_failure([ok(1), ok(0)]) is None
    assert first_failure([stopped(1), ok(0)]) is None


def test_the_failure_that_came_first_is_shown() -> None:
    first = first_failure([ok(3), error(2, "cause"), error(0, "effect"), stopped(1)])
    assert first is not None
    assert (first.rank, first.evalue) == (2, "cause")


def test_of_equal_failures_the_lowest_ranks_is_shown() -> None:
    in_order = [error(3), error(1, "another"), error(2), error(0)]
    first = first_failure(in_order)
    assert first is not None
    assert first.rank == 0


def test_failures_at_different_lines_are_not_equal() -> None:
    first = first_failure([error(2), error(0, where="line 9: g(x)")])
    assert first is not None
    assert first.rank == 2


def test_a_death_comes_before_all_errors() -> None:
    first = first_failure([error(0, "connection closed by peer"), died(1), ok(2)])
    assert first is not None
    assert (first.rank, first.status) == (1, "died")


def test_of_several_deaths_the_first_to_be_noticed_is_shown() -> None:
    first = first_failure([error(3), died(2), died(1)])
    assert first is not None
    assert first.rank == 2


def test_the_same_error_at_the_same_line_is_the_same_failure() -> None:
    assert is_same_failure(error(0), error(1, traceback=["another file"]))
    assert not is_same_failure(error(0), error(1, "other"))
    assert not is_same_failure(error(0), error(1, where="line 4: f(x)"))
    assert not is_same_failure(error(0), stopped(1, where="line 3: f(x)"))


# ---- RankError ----


def test_a_lost_connection_names_the_rank_that_died() -> None:
    reset = (
        "[/a/build/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:62169: "
        "Connection reset by peer. This is typically caused by a remote worker hanging"
    )
    dead = Outcome(1, "died", "the process died", "pid 7, killed by SIGKILL")
    lost = Outcome(0, "error", "RuntimeError", reset, where="line 5: f(x)")
    text = str(RankError(dead, [lost, dead]))
    assert text.splitlines() == [
        "rank 1: the process died: pid 7, killed by SIGKILL",
        "rank 0: failed at line 5: f(x); RuntimeError: lost its connection to rank 1",
    ]
    assert "Connection reset by peer" in str(RankError(lost, [lost]))


def test_the_text_names_every_rank_in_one_line_each() -> None:
    outcomes = [stopped(0), error(1), ok(2)]
    assert str(RankError(outcomes[1], outcomes)).splitlines() == [
        "rank 1: failed at line 3: f(x); ValueError: no such thing",
        "rank 0: stopped at line 5: dist.barrier(), because rank 1 failed",
        "rank 2: finished",
    ]


def test_only_the_others_messages_are_cut() -> None:
    outcomes = [error(0, "x" * 1000), error(1, "y" * 1000)]
    assert str(RankError(outcomes[1], outcomes)).splitlines() == [
        "rank 1: failed at line 3: f(x)",
        f"ValueError: {'y' * 1000}",
        f"rank 0: failed at line 3: f(x); ValueError: {'x' * 157}...",
    ]


def test_equal_failures_are_folded() -> None:
    outcomes = [error(0), error(1), stopped(2), error(3), error(4, "another")]
    assert str(RankError(outcomes[0], outcomes)).splitlines() == [
        "rank 0: failed at line 3: f(x); ValueError: no such thing",
        "ranks 1,3: the same",
        "rank 2: stopped at line 5: dist.barrier(), because rank 0 failed",
        "rank 4: failed at line 3: f(x); ValueError: another",
    ]


def test_a_failure_of_one_rank_alone_is_one_line() -> None:
    assert str(RankError(error(0), [error(0)])).count("\n") == 0


def test_the_error_carries_rank_and_outcomes() -> None:
    outcomes = [ok(0), error(1)]
    failure = RankError(outcomes[1], outcomes)
    assert isinstance(failure, RuntimeError)
    assert failure.rank == 1
    assert failure.outcomes == outcomes


def test_the_notebook_shows_the_first_traceback_in_full_and_no_other() -> None:
    others = [stopped(0), error(2, "another", traceback=["not this one"])]
    failure = RankError(error(1), [others[0], error(1), others[1]])
    assert failure._render_traceback_() == [
        "On rank 1:",
        *TRACEBACK,
        "rank 0: stopped at line 5: dist.barrier(), because rank 1 failed",
        "rank 2: failed at line 3: f(x); ValueError: another",
    ]


def test_the_notebook_shows_the_cause_of_a_death_in_place_of_a_traceback() -> None:
    outcomes = [stopped(0), died(1)]
    assert RankError(outcomes[1], outcomes)._render_traceback_() == [
        died(1).summary(),
        "rank 0: stopped at line 5: dist.barrier(), because rank 1 died",
    ]


# ---- stopped cells ----


def test_an_interrupt_says_where_every_rank_stood() -> None:
    interrupt = Interrupted([stopped(0), ok(1)], "Interrupted; all is kept.")
    lines = [
        "Interrupted; all is kept.",
        "rank 0: stopped at line 5: dist.barrier()",
        "rank 1: finished",
    ]
    assert isinstance(interrupt, KeyboardInterrupt)
    assert str(interrupt).splitlines() == lines
    assert interrupt._render_traceback_() == lines


def test_a_timeout_says_how_long_and_where_every_rank_stood() -> None:
    timeout = CellTimeoutError([stopped(0), ok(1)], 2.5)
    assert isinstance(timeout, TimeoutError)
    assert str(timeout).splitlines() == [
        "the cell ran longer than 2.5 seconds (--timeout)",
        "rank 0: stopped at line 5: dist.barrier()",
        "rank 1: finished",
    ]
    assert timeout._render_traceback_() == [f"CellTimeoutError: {timeout}"]


def test_a_traceback_through_code_without_a_hash_is_shortened() -> None:
    # As of the functions that torch.compile makes, whose constants may be dicts.
    def descend(depth: int) -> None:
        if not depth:
            raise ValueError("at the bottom")
        descend(depth - 1)

    constants = (*descend.__code__.co_consts, {"a": 1})
    descend.__code__ = descend.__code__.replace(co_consts=constants)
    with pytest.raises(TypeError, match="unhashable"):
        hash(descend.__code__)
    with pytest.raises(ValueError, match="at the bottom") as found:
        descend(3 * SHOWN_FRAMES)
    frames = shortened(found.value.__traceback__)
    assert frames is not None
    assert len(list(traceback.walk_tb(frames))) <= 2 * SHOWN_FRAMES


@pytest.mark.parametrize(
    ("through", "shown"),
    [
        (
            ["__main__", "labkit.rank", "torch.nn", "labkit.strategies", "mine.model"],
            ["__main__", "torch.nn", "mine.model"],
        ),
        (["__main__", "labkit.rank", "json.decoder"], None),
        (["__main__", "labkit.rank", "numpy.linalg"], None),
        (["__main__", "labkit.rank"], None),
        (["labkit.rank", "pathlib"], None),
        (["__main__", "labkit.rank", "__main__", "json.decoder"], [0, 2, 3]),
    ],
)
def test_a_traceback_has_labkit_where_it_may_be_at_fault(
    through: list[str], shown: list[Any] | None
) -> None:
    call: Any = int
    for name in reversed(through):
        names: dict[str, Any] = {"__name__": name, "call": call}
        exec("def run(*none):\n    call(*none or ['none'])", names)
        call = names["run"]
    with pytest.raises(ValueError, match="none") as found:
        call()
    assert found.value.__traceback__ is not None
    frames = shortened(found.value.__traceback__.tb_next)  # without that of this test
    found_in = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(frames)]
    wanted = through if shown is None else shown
    assert found_in == [
        through[each] if isinstance(each, int) else each for each in wanted
    ]
