"""When ranks are asked to stop and when they are killed, without any rank."""

import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from labkit.notebook.execution.cell_execution import Tally
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.execution.errors import Interrupted
from labkit.notebook.execution.errors import RankError
from labkit.notebook.execution.stop_policy import NUM_ASKED
from labkit.notebook.execution.stop_policy import NUM_ASKED_ALONE
from labkit.notebook.execution.stop_policy import Actions
from labkit.notebook.execution.stop_policy import StopPolicy
from labkit.records import Outcome
from labkit.timeouts import AGAIN_S
from labkit.timeouts import ASK_AGAIN_S
from labkit.timeouts import GRACE_S
from labkit.timeouts import KILL_AFTER_S
from labkit.timeouts import OUTCOME_AFTER_S
from labkit.timeouts import REPEAT_S
from labkit.timeouts import SECOND_AFTER_S
from labkit.timeouts import STILL_RUNS_S

NOTHING = Actions()
RANKS = (0, 1)
TICK_S = 0.05

Event = Callable[[StopPolicy, float], None]

FAILED = Outcome(
    rank=0, status="error", ename="ValueError", evalue="no", where="line 2"
)


def play(
    policy: StopPolicy, until: float, *, answering: bool = False
) -> dict[str, list[tuple[float, int]]]:
    """What is done to ranks that do not stop, from 0 to `until`: when, and to whom."""
    done: dict[str, list[tuple[float, int]]] = {
        name: [] for name in ("ask", "signal", "kill", "report")
    }
    for tick in range(round(until / TICK_S) + 1):
        now = tick * TICK_S
        actions = policy.due(RANKS, now)
        for name, found in done.items():
            found += [(now, rank) for rank in getattr(actions, name)]
        for rank in actions.ask if answering else ():
            policy.answered(rank)
    return done


def times(done: list[tuple[float, int]], rank: int = 1) -> list[float]:
    return [when for when, whom in done if whom == rank]


def test_nothing_is_done_to_a_cell_that_runs() -> None:
    policy = StopPolicy()
    assert policy.due(RANKS, 1e6) == NOTHING
    assert not policy.is_stopping
    assert not policy.should_end(1e6)


def test_a_failure_leaves_the_others_a_grace() -> None:
    policy = StopPolicy()
    policy.fail(10.0)
    assert policy.is_stopping
    assert not policy.should_end(10.0)  # that is for the user to want
    assert policy.due([1], 10.0 + 0.9 * GRACE_S) == NOTHING
    assert policy.due([1], 10.0 + 1.1 * GRACE_S) == Actions(ask=[1])


def test_a_later_failure_does_not_prolong_the_grace() -> None:
    policy = StopPolicy()
    policy.fail(10.0)
    policy.fail(10.0 + 0.9 * GRACE_S)
    assert policy.due([1], 10.0 + 1.1 * GRACE_S) == Actions(ask=[1])


def interrupt(policy: StopPolicy, now: float) -> None:
    policy.interrupt(now)


def stop(policy: StopPolicy, now: float) -> None:
    policy.stop(now)


def time_out(policy: StopPolicy, now: float) -> None:
    policy.deadline = now - 0.001


@pytest.mark.parametrize("event", [interrupt, stop, time_out])
@pytest.mark.parametrize("is_in_grace", [False, True])
def test_these_leave_none(event: Event, is_in_grace: bool) -> None:
    policy = StopPolicy()
    if is_in_grace:
        policy.fail(10.0)
    event(policy, 10.0)
    assert policy.due(RANKS, 10.0) == Actions(ask=[0, 1])


@pytest.mark.parametrize("event", [interrupt, time_out])
def test_a_run_may_end_by_itself_for_a_while(event: Event) -> None:
    policy = StopPolicy(patience_s=1.0)
    event(policy, 10.0)
    assert policy.due(RANKS, 10.0) == NOTHING
    assert policy.is_patient(10.9)
    policy.fail(10.5)  # as of a rank that has ended
    assert policy.due(RANKS, 10.9) == NOTHING
    assert not policy.is_patient(11.0)
    assert policy.due(RANKS, 11.0) == Actions(ask=[0, 1])


def test_a_second_interrupt_leaves_no_more_patience() -> None:
    policy = StopPolicy(patience_s=1.0)
    policy.interrupt(10.0)
    assert policy.due(RANKS, 10.0) == NOTHING
    policy.interrupt(10.1)
    assert policy.due(RANKS, 10.1) == Actions(ask=[0, 1])


def test_a_deadline_is_no_interrupt() -> None:
    policy = StopPolicy()
    policy.deadline = 10.0
    assert not policy.should_end(10.0)
    assert policy.should_end(10.1)
    assert (policy.timed_out, policy.was_interrupted) == (True, False)


def test_a_rank_that_answers_is_asked_again_soon_and_gets_no_signal() -> None:
    policy = StopPolicy()
    policy.interrupt(0.0)
    done = play(policy, 20.0, answering=True)
    asked = times(done["ask"])
    assert asked[0] == 0.0
    gaps = [b - a for a, b in pairwise(asked)]
    assert gaps == pytest.approx([REPEAT_S] * len(gaps), abs=1.5 * TICK_S)
    assert done["signal"] == done["kill"] == []


def test_a_rank_that_answers_and_runs_on_is_killed_at_last() -> None:
    policy = StopPolicy()
    policy.interrupt(0.0)
    done = play(policy, 2 * KILL_AFTER_S, answering=True)
    assert times(done["kill"]) == pytest.approx([KILL_AFTER_S], abs=1.5 * TICK_S)


def test_a_rank_that_still_runs_is_reported_once() -> None:
    policy = StopPolicy()
    policy.interrupt(0.0)
    done = play(policy, KILL_AFTER_S, answering=True)
    assert times(done["report"]) == pytest.approx([STILL_RUNS_S], abs=1.5 * TICK_S)


def test_a_rank_that_does_not_answer_gets_a_signal_and_then_is_killed() -> None:
    policy = StopPolicy()
    policy.interrupt(0.0)
    done = play(policy, KILL_AFTER_S)
    asked, signalled = times(done["ask"]), times(done["signal"])
    assert len(asked) == NUM_ASKED
    assert min(b - a for a, b in pairwise(asked)) > ASK_AGAIN_S
    assert signalled == asked[NUM_ASKED_ALONE:]
    [killed] = times(done["kill"])
    assert asked[-1] + ASK_AGAIN_S < killed < asked[-1] + ASK_AGAIN_S + 2 * TICK_S
    assert policy.killed == set(RANKS)


def test_an_answer_starts_the_count_over() -> None:
    policy = StopPolicy()
    policy.interrupt(0.0)
    play(policy, NUM_ASKED_ALONE * (ASK_AGAIN_S + REPEAT_S))
    policy.answered(0)
    now = NUM_ASKED * (ASK_AGAIN_S + REPEAT_S) + ASK_AGAIN_S
    assert policy.due(RANKS, now).signal == [1]


def test_a_machine_that_slept_kills_nothing_for_not_answering() -> None:
    policy = StopPolicy()
    policy.interrupt(0.0)
    policy.due(RANKS, 0.0)
    actions = policy.due(RANKS, 0.9 * KILL_AFTER_S)  # one look, long after
    assert actions == Actions(ask=[0, 1], report=[0, 1])


@pytest.mark.parametrize(
    ("second", "killed"),
    [(0.2, SECOND_AFTER_S), (10.0, 10.0 + AGAIN_S)],
    ids=["a key pressed twice", "someone who waited"],
)
def test_a_second_interrupt_kills(second: float, killed: float) -> None:
    policy = StopPolicy()
    policy.interrupt(0.0)
    policy.interrupt(second)
    policy.interrupt(second + 0.1)  # a third changes nothing
    assert policy.due(RANKS, killed - 0.01).kill == []
    assert policy.due(RANKS, killed + 0.01).kill == [0, 1]
    assert policy.due(RANKS, killed + 0.02).kill == []  # once


def test_who_is_killed_is_not_asked_any_more() -> None:
    policy = StopPolicy()
    policy.interrupt(0.0)
    policy.interrupt(0.0)
    policy.due(RANKS, SECOND_AFTER_S + 0.1)
    assert policy.due(RANKS, SECOND_AFTER_S + 10.0) == NOTHING


def test_only_ranks_that_run_still_are_asked() -> None:
    policy = StopPolicy()
    policy.interrupt(0.0)
    assert policy.due([1], 0.0) == Actions(ask=[1])


def test_a_rank_that_is_done_owes_its_outcome() -> None:
    policy = StopPolicy()
    assert not policy.is_silent(0, 1e6)  # it runs
    policy.done(0, 10.0)
    policy.heard(0, 15.0)
    policy.heard(0, 12.0)  # found out later
    policy.heard(1, 15.0)
    assert not policy.is_silent(0, 15.0 + 0.9 * OUTCOME_AFTER_S)
    assert policy.is_silent(0, 15.0 + 1.1 * OUTCOME_AFTER_S)
    assert not policy.is_silent(1, 1e6)


def test_a_rank_that_is_done_is_neither_asked_nor_killed() -> None:
    """Its outcome may come late, behind all that it has printed."""
    policy = StopPolicy()
    policy.done(0, 0.0)
    policy.interrupt(0.0)
    policy.interrupt(1.0)
    done = play(policy, 2 * KILL_AFTER_S)
    assert {rank for times in done.values() for _, rank in times} == {1}


def test_a_cell_that_is_run_again_still_ends_for_who_wants_it_to() -> None:
    policy = StopPolicy()
    policy.deadline = 100.0
    policy.fail(10.0)
    policy.due(RANKS, 11.0)
    policy.start_over()
    assert policy.due(RANKS, 20.0) == NOTHING
    assert policy.due(RANKS, 100.1) == Actions(ask=[0, 1])
    assert policy.timed_out


def test_outcomes_are_in_the_order_of_failing() -> None:
    tally = Tally(range(3))
    tally.add_traceback(2, ["ValueError"])
    tally.fail(2)  # its outcome comes later than others'
    assert tally.end(0, Outcome(0, "interrupted"))
    assert tally.end(2, Outcome(2, "error"))
    assert not tally.end(2, Outcome(2, "ok"))  # the first word counts
    assert tally.running == {1}
    assert [each.rank for each in tally.outcomes] == [2, 0]
    assert tally.outcomes[0].traceback == ["ValueError"]
    assert tally.outcomes[0].status == "error"


@pytest.mark.parametrize(
    "error",
    [
        RankError(FAILED, [FAILED]),
        Interrupted([FAILED], "Interrupted"),
        CellTimeoutError([FAILED], 3.0),
    ],
)
def test_how_a_cell_has_failed_can_be_sent(error: Any) -> None:
    """As a pool of processes, and joblib, send what a task raises."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.outcomes == [FAILED]
    assert again._render_traceback_() == error._render_traceback_()
