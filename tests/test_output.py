"""What is written is read back from the streams; time stands still unless moved."""

import random
import re
from dataclasses import dataclass
from itertools import permutations
from itertools import product
from typing import Any

import IPython.display
import pytest

from labkit.notebook.kernel.output import OutputMerger
from labkit.rank_spec import format_ranks
from labkit.timeouts import FOLD_S

Captured = pytest.CaptureFixture[str]
Message = tuple[str, dict[str, Any]]


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The merger's clock, which only the test moves."""
    clock = Clock()
    monkeypatch.setattr("labkit.notebook.kernel.output.time", clock)
    return clock


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict, bool]]:
    """(data, transient, update) of every rich output, as it is published."""
    calls: list[tuple[Any, dict, bool]] = []

    def publish(data: Any, *, transient: dict, update: bool) -> None:
        calls.append((data, transient, update))

    monkeypatch.setattr(IPython.display, "publish_display_data", publish)
    return calls


def out(text: str) -> Message:
    return "stream", {"name": "stdout", "text": text}


def err(text: str) -> Message:
    return "stream", {"name": "stderr", "text": text}


def rich(value: str, display_id: str = "", kind: str = "display_data") -> Message:
    transient = {"display_id": display_id} if display_id else {}
    data = {"text/plain": value, "text/html": f"<b>{value}</b>"}
    return kind, {"data": data, "transient": transient}


def merge(*said: list[Message]) -> None:
    """Write what rank 0, rank 1, ... said, one rank's whole output after another's."""
    merger = OutputMerger(range(len(said)))
    for rank, messages in enumerate(said):
        for kind, content in messages:
            merger.add_message(rank, kind, content)
            merger.write_ready()
    merger.finish()


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """`wait` of every clear_output of the notebook."""
    calls: list[bool] = []
    monkeypatch.setattr(IPython.display, "clear_output", calls.append)
    return calls


def clear(*, wait: bool = False) -> Message:
    return "clear_output", {"wait": wait}


# ---- rank lists ----


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([0, 1], "ranks 0-1"),
        ([3, 1, 0, 2], "ranks 0-3"),
        ([0, 2, 3], "ranks 0,2-3"),
        ([0, 2], "ranks 0,2"),
        ([9, 10, 11, 12, 7], "ranks 7,9-12"),
    ],
)
def test_ranks_are_written_as_a_user_writes_them(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


# ---- merging ----


def test_lines_that_all_ranks_print_are_written_once(capsys: Captured) -> None:
    merge(*[[out("hello\n")]] * 4)
    assert capsys.readouterr().out == "[ranks 0-3] hello\n"


def test_lines_that_differ_come_in_rank_order(capsys: Captured) -> None:
    merger = OutputMerger([0, 1, 2])
    for rank in (2, 0, 1):
        merger.add_message(rank, *out(f"I am {rank}\n"))
    merger.finish()
    lines = ["[rank 0] I am 0\n", "[rank 1] I am 1\n", "[rank 2] I am 2\n"]
    assert capsys.readouterr().out == "".join(lines)


def test_a_line_that_some_ranks_print_names_them(capsys: Captured) -> None:
    merge([out("even\n")], [out("odd\n")], [out("even\n")], [])
    assert capsys.readouterr().out == "[ranks 0,2] even\n[rank 1] odd\n"


def test_common_lines_stand_between_the_lines_that_differ(capsys: Captured) -> None:
    merge(*[[out(f"begin\nmine {rank}\nend\n")] for rank in (0, 1)])
    assert capsys.readouterr().out == (
        "[ranks 0-1] begin\n[rank 0] mine 0\n[rank 1] mine 1\n[ranks 0-1] end\n"
    )


def test_further_lines_of_a_speaker_are_indented_to_the_first(
    capsys: Captured,
) -> None:
    merge(*[[out("one\ntwo\n\nfour\n")]] * 2)
    assert capsys.readouterr().out == (
        "[ranks 0-1] one\n            two\n            \n            four\n"
    )


def test_the_speaker_is_named_again_when_the_stream_changes(capsys: Captured) -> None:
    merge([out("result\n"), err("warning\n"), out("more\n")])
    captured = capsys.readouterr()
    assert captured.out == "[rank 0] result\n[rank 0] more\n"
    assert captured.err == "[rank 0] warning\n"


def test_the_same_words_on_another_stream_are_not_the_same(capsys: Captured) -> None:
    merge([out("hello\n")], [err("hello\n")])
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("[rank 0] hello\n", "[rank 1] hello\n")


def test_a_last_line_without_newline_is_written_at_the_end(capsys: Captured) -> None:
    merger = OutputMerger([0, 1])
    for rank in (0, 1):
        merger.add_message(rank, *out("no newline"))
    merger.write_ready()
    assert capsys.readouterr().out == ""
    merger.finish()
    assert capsys.readouterr().out == "[ranks 0-1] no newline\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_state_of_a_progress_bar_is_seen_with_its_label(
    ranks: int, capsys: Captured
) -> None:
    bar = [err("\r  0%"), err("\r 50%"), err("\r100%"), err("\n"), err("done\n")]
    merge(*[bar] * ranks)
    label = f"[{format_ranks(range(ranks))}] "
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert first == f"{label}100%"
    assert second == " " * len(label) + "done"


def test_a_progress_bar_never_covers_a_label(capsys: Captured) -> None:
    merge([err("10%\r20%\r"), err("done\n")])
    states = re.split("[\r\n]", capsys.readouterr().err.replace("\r\n", "\n"))
    assert states == ["[rank 0] 10%", "[rank 0] 20%", "[rank 0] done", ""]


def test_a_line_in_place_of_a_longer_one_covers_all_of_it(capsys: Captured) -> None:
    merge([out("\r100 of 300\r"), out("done\nnext\n")])
    assert capsys.readouterr().out.split("\r")[-1] == (
        "[rank 0] done      \n         next\n"
    )


def test_an_empty_line_ends_one_that_was_to_be_replaced(
    clock: Clock, capsys: Captured
) -> None:
    merger = OutputMerger([0, 1])
    say_and_wait(clock, merger, "step 9\r", "step 9\r")
    say_and_wait(clock, merger, "\n", "\n")
    say_and_wait(clock, merger, "done\n", "done\n")
    merger.finish()
    line, after, _ = capsys.readouterr().out.split("\n")
    assert line == "[ranks 0-1] step 9\r"
    assert after == "            done"


def test_other_messages_than_output_are_ignored(capsys: Captured) -> None:
    merge([("status", {"execution_state": "idle"}), ("execute_input", {"code": "1"})])
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


# ---- when things arrive must not matter ----


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_where_a_stream_is_cut_into_messages_does_not_matter(
    end: str, capsys: Captured
) -> None:
    text = f"one{end}two\rthree{end}{end}four"
    merge([out(text)], [out(text)])
    expected = capsys.readouterr().out
    for cut in range(1, len(text)):
        merge([out(text)], [out(text[:cut]), out(text[cut:])])
        assert capsys.readouterr().out == expected, f"cut after {text[:cut]!r}"


SAID = {
    "equal": ["abc", "abc", "abc"],
    "one differs": ["abc", "axc", "abc"],
    "one stops early": ["abcd", "abce", "a"],
    "one is silent": ["abc", "abd", ""],
    "two share more than the third": ["abx", "aby", "a"],
    "one is ahead": ["abab", "ab", "aba"],
    "in another order": ["abc", "cab", "bca"],
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_which_rank_is_first_and_when_it_is_written_does_not_matter(
    said: list[str], capsys: Captured
) -> None:
    written = set()
    for order, writes_early in product(permutations(range(3)), (True, False)):
        merger = OutputMerger(range(3))
        for rank in order:
            for word in said[rank]:
                merger.add_message(rank, *out(f"{word}\n"))
                if writes_early:
                    merger.write_ready()
        merger.finish()
        written.add(capsys.readouterr().out)
    assert len(written) == 1


@pytest.mark.parametrize("seed", range(40))
def test_how_the_output_of_ranks_interleaves_does_not_matter(
    seed: int, capsys: Captured
) -> None:
    rng = random.Random(seed)
    said = random_output(rng, num_ranks=rng.randint(1, 4))
    written = set()
    for _ in range(8):
        write_interleaved(rng, said)
        written.add(tuple(capsys.readouterr()))
    assert len(written) == 1


@pytest.mark.parametrize("seed", range(40))
def test_every_rank_is_quoted_in_full_and_in_order(seed: int, capsys: Captured) -> None:
    rng = random.Random(seed)
    said = random_output(rng, num_ranks=rng.randint(1, 4))
    write_interleaved(rng, said)
    captured = capsys.readouterr()
    for stream, text in (("stdout", captured.out), ("stderr", captured.err)):
        lines = attribute_lines(text, len(said))
        for rank, messages in enumerate(said):
            texts = [m["text"] for _, m in messages if m["name"] == stream]
            assert lines[rank] == "".join(texts).splitlines()


@pytest.mark.parametrize("seed", range(20))
def test_a_line_is_written_once_for_each_rank_however_late_it_is(
    seed: int, clock: Clock, capsys: Captured
) -> None:
    rng = random.Random(seed)
    said = random_output(rng, num_ranks=3)
    write_interleaved(rng, said, clock=clock)
    captured = capsys.readouterr()
    for stream, text in (("stdout", captured.out), ("stderr", captured.err)):
        lines = attribute_lines(text, len(said))
        for rank, messages in enumerate(said):
            texts = [m["text"] for _, m in messages if m["name"] == stream]
            assert lines[rank] == "".join(texts).splitlines()


def random_output(rng: random.Random, num_ranks: int) -> list[list[Message]]:
    """What ranks say that run nearly the same cell."""
    common = [rng.choice("abcd") for _ in range(rng.randint(0, 8))]
    said = []
    for _ in range(num_ranks):
        words = [word for word in common if rng.random() < 0.8]
        for _ in range(rng.randint(0, 2)):
            words.insert(rng.randint(0, len(words)), rng.choice("abxyz"))
        said.append([rng.choice((out, out, err))(f"{word}\n") for word in words])
    return said


def write_interleaved(
    rng: random.Random, said: list[list[Message]], clock: Clock | None = None
) -> None:
    """Write messages that come in any order among ranks, each cut anywhere."""
    merger = OutputMerger(range(len(said)))
    coming = [rank for rank, messages in enumerate(said) for _ in messages]
    rng.shuffle(coming)
    positions = [iter(messages) for messages in said]
    for rank in coming:
        kind, content = next(positions[rank])
        cut = rng.randint(0, len(content["text"]))
        for text in (content["text"][:cut], content["text"][cut:]):
            merger.add_message(rank, kind, {**content, "text": text})
        if rng.random() < 0.5:
            merger.write_ready()
        if clock is not None:
            clock.now += rng.choice((0.0, 0.3, 1.0))
    merger.finish()


def attribute_lines(text: str, num_ranks: int) -> list[list[str]]:
    """The lines of each rank, read from the labels as a user would."""
    lines: list[list[str]] = [[] for _ in range(num_ranks)]
    ranks: list[int] = []
    width = 0
    for line in text.splitlines():
        if match := re.match(r"\[ranks? ([\d,-]+)\] ", line):
            width = match.end()
            ranks = []
            for part in match[1].split(","):
                first, _, last = part.partition("-")
                ranks += range(int(first), int(last or first) + 1)
        for rank in ranks:
            lines[rank].append(line[width:])
    return lines


# ---- when things are written ----


def test_a_line_of_all_ranks_is_written_at_once(capsys: Captured) -> None:
    merger = OutputMerger([0, 1])
    for rank in (0, 1):
        assert capsys.readouterr().out == ""
        merger.add_message(rank, *out("step 1\n"))
        merger.write_ready()
    assert capsys.readouterr().out == "[ranks 0-1] step 1\n"


def test_a_line_of_some_ranks_waits_for_the_others(
    clock: Clock, capsys: Captured
) -> None:
    merger = OutputMerger([0, 1])
    merger.add_message(0, *out("only me\n"))
    clock.now += 0.9 * FOLD_S
    merger.write_ready()
    assert capsys.readouterr().out == ""
    clock.now += 0.2 * FOLD_S
    merger.write_ready()
    assert capsys.readouterr().out == "[rank 0] only me\n"


def test_a_new_line_waits_as_long_although_older_ones_were_written(
    clock: Clock, capsys: Captured
) -> None:
    merger = OutputMerger([0, 1])
    merger.add_message(0, *out("step 1\n"))
    clock.now += 0.9 * FOLD_S
    merger.add_message(1, *out("step 1\n"))
    merger.add_message(0, *out("step 2\n"))
    merger.write_ready()
    clock.now += 0.2 * FOLD_S
    merger.write_ready()
    merger.add_message(1, *out("step 2\n"))
    merger.write_ready()
    assert capsys.readouterr().out == "[ranks 0-1] step 1\n            step 2\n"


def test_a_rank_that_says_it_too_late_is_named_alone(
    clock: Clock, capsys: Captured
) -> None:
    merger = OutputMerger([0, 1])
    merger.add_message(0, *out("hello\n"))
    clock.now += 2 * FOLD_S
    merger.write_ready()
    merger.add_message(1, *out("hello\n"))
    merger.finish()
    assert capsys.readouterr().out == "[rank 0] hello\n[rank 1] hello\n"


def test_nothing_is_written_twice(clock: Clock, capsys: Captured) -> None:
    merger = OutputMerger([0, 1])
    merger.add_message(0, *out("both\nmine\n"))
    merger.add_message(1, *out("both\n"))
    for _ in range(5):
        clock.now += FOLD_S
        merger.write_ready()
    merger.finish()
    merger.finish()
    assert capsys.readouterr().out == "[ranks 0-1] both\n[rank 0] mine\n"


def say_and_wait(clock: Clock, merger: OutputMerger, *texts: str) -> None:
    """Each rank says its text, and then nothing for longer than output waits."""
    for rank, text in enumerate(texts):
        if text:
            merger.add_message(rank, *out(text))
    clock.now += 1.1 * FOLD_S
    merger.write_ready()


def test_a_line_is_seen_before_it_ends(clock: Clock, capsys: Captured) -> None:
    merger = OutputMerger([0, 1])
    for dots in (".", "..", ""):
        say_and_wait(clock, merger, dots, dots)
        expected = "[ranks 0-1] ." if dots == "." else dots
        assert capsys.readouterr().out == expected
    say_and_wait(clock, merger, " done\nnext\n", " done\nnext\n")
    merger.finish()
    assert capsys.readouterr().out == " done\n            next\n"


def test_a_line_that_one_rank_is_ahead_in_is_still_one(
    clock: Clock, capsys: Captured
) -> None:
    merger = OutputMerger([0, 1])
    say_and_wait(clock, merger, "..", "...")
    say_and_wait(clock, merger, "..\n", ".\n")
    merger.finish()
    assert capsys.readouterr().out == "[ranks 0-1] ....\n"


def test_lines_that_only_begin_differently_are_kept_apart(
    clock: Clock, capsys: Captured
) -> None:
    merger = OutputMerger([0, 1])
    say_and_wait(clock, merger, "a", "b")
    say_and_wait(clock, merger, "", "c")
    merger.finish()
    assert capsys.readouterr().out == "[rank 0] a\n[rank 1] bc\n"


def test_lines_that_differ_are_not_cut_where_they_begin_to(
    clock: Clock, capsys: Captured
) -> None:
    merger = OutputMerger([0, 1])
    say_and_wait(clock, merger, "loss 0.5", "loss 0.75")
    merger.finish()
    assert capsys.readouterr().out == "[rank 0] loss 0.5\n[rank 1] loss 0.75\n"


def test_progress_bars_that_differ_take_one_line_and_end_on_two(
    clock: Clock, capsys: Captured
) -> None:
    merger = OutputMerger([0, 1])
    say_and_wait(clock, merger, "\rr0: 10%", "\rr1: 10%")
    say_and_wait(clock, merger, "", "")
    say_and_wait(clock, merger, "\rr0: 50%\rr0: 60%", "\rr1: 20%")
    say_and_wait(clock, merger, "\rr0: 99%", "")
    merger.add_message(0, *out("\n"))
    merger.add_message(1, *out("\rr1: 99%\n"))
    merger.finish()
    shown = capsys.readouterr().out
    *states, first, second = shown.split("\r")
    assert states == [
        *("[ranks 0-1] ", "[rank 0] r0: 10%", "[rank 1] r1: 10%"),
        *("[rank 0] r0: 50%", "[rank 0] r0: 60%", "[rank 1] r1: 20%"),
    ]
    assert first == "[rank 0] r0: 99%"
    assert second == "[rank 0] r0: 99%\n[rank 1] r1: 99%\n"


def test_a_display_ends_a_line_that_only_begun(
    clock: Clock, capsys: Captured, displayed: list[tuple[Any, dict, bool]]
) -> None:
    merger = OutputMerger([0])
    say_and_wait(clock, merger, "see:")
    merger.add_message(0, *rich("picture"))
    merger.finish()
    assert capsys.readouterr().out == "[rank 0] see:\n[rank 0]\n"
    assert len(displayed) == 1


# ---- much of it ----


@pytest.mark.timeout(10)
def test_200_kb_on_stderr_are_written_whole_and_quickly(capsys: Captured) -> None:
    line = "x" * 99 + "\n"
    merge(*[[err(line * 40)] * 50] * 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [each[12:] for each in captured.err.splitlines()] == ["x" * 99] * 2000


@pytest.mark.timeout(10)
def test_200_kb_in_one_line_are_written_whole_and_quickly(capsys: Captured) -> None:
    merge([out("x" * 200_000), out("\n")])
    assert capsys.readouterr().out == "[rank 0] " + "x" * 200_000 + "\n"


# ---- rich output ----


def test_a_result_that_is_only_text_is_printed(
    displayed: list[Any], capsys: Captured
) -> None:
    merge(*[[("execute_result", {"data": {"text/plain": "42"}})]] * 2)
    assert capsys.readouterr().out == "[ranks 0-1] 42\n"
    assert displayed == []


def test_equal_displays_are_shown_once_under_their_ranks(
    displayed: list[Any], capsys: Captured
) -> None:
    merge(*[[rich("picture")]] * 2)
    assert capsys.readouterr().out == "[ranks 0-1]\n"
    [(data, transient, update)] = displayed
    assert data == {"text/plain": "picture", "text/html": "<b>picture</b>"}
    assert (transient, update) == ({}, False)


def test_displays_that_differ_come_in_rank_order(
    displayed: list[Any], capsys: Captured
) -> None:
    merge([rich("zero")], [rich("one")])
    assert capsys.readouterr().out == "[rank 0]\n[rank 1]\n"
    assert [data["text/plain"] for data, *_ in displayed] == ["zero", "one"]


def test_a_display_keeps_its_place_among_printed_lines(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        IPython.display,
        "publish_display_data",
        lambda data, **more: print(f"<{data['text/plain']}>"),
    )
    merge([out("before\nat once: "), rich("picture"), out("after\n")])
    assert capsys.readouterr().out == (
        "[rank 0] before\n         at once: \n[rank 0]\n<picture>\n[rank 0] after\n"
    )


def test_an_update_keeps_its_display_id_and_has_no_label(
    displayed: list[Any], capsys: Captured
) -> None:
    merge([rich("old", "a"), rich("new", "a", "update_display_data")])
    assert capsys.readouterr().out == "[rank 0]\n"
    assert [(t["display_id"], update) for _, t, update in displayed] == [
        ("a", False),
        ("a", True),
    ]
    assert all(set(transient) == {"display_id"} for _, transient, _ in displayed)


def test_an_update_of_an_earlier_cells_display_stays_an_update(
    displayed: list[Any], capsys: Captured
) -> None:
    merge([rich("new", "a", "update_display_data")])
    assert capsys.readouterr().out == ""
    [(_, transient, update)] = displayed
    assert (transient, update) == ({"display_id": "a"}, True)


def in_front_end(displayed: list[tuple[Any, dict, bool]]) -> list[str]:
    """What is seen in the end; the update of a display not shown before is dropped."""
    shown: dict[str, str] = {}
    for data, transient, update in displayed:
        if not update or transient["display_id"] in shown:
            shown[transient["display_id"]] = data["text/plain"]
    return sorted(shown.values())


def test_equal_updates_of_equal_displays_leave_no_old_state(
    displayed: list[Any],
) -> None:
    merge(
        [rich("old", "a"), rich("new", "a", "update_display_data")],
        [rich("old", "b"), rich("new", "b", "update_display_data")],
    )
    assert set(in_front_end(displayed)) == {"new"}


def test_no_update_is_lost_when_ranks_part_after_an_equal_display(
    displayed: list[Any],
) -> None:
    merge(
        [rich("old", "a"), rich("zero", "a", "update_display_data")],
        [rich("old", "b"), rich("one", "b", "update_display_data")],
    )
    assert in_front_end(displayed) == ["one", "zero"]


# ---- clearing ----


def test_what_all_ranks_clear_is_cleared_once(
    cleared: list[bool], capsys: Captured
) -> None:
    merge(*[[out(f"loss {rank}\n"), clear(wait=True), out("end\n")] for rank in (0, 1)])
    assert cleared == [True]
    assert capsys.readouterr().out.endswith("[ranks 0-1] end\n")


def test_a_rank_clears_what_is_its_own(cleared: list[bool], capsys: Captured) -> None:
    merge([out("0%\n"), clear(), out("50%\n"), clear(), out("100%\n")], [])
    assert cleared == [False, False]
    assert capsys.readouterr().err == ""


def test_a_rank_does_not_clear_what_others_have_said(
    cleared: list[bool], capsys: Captured
) -> None:
    merge([out("hello\n")], [out("0%\n"), clear(), out("50%\n"), clear()])
    assert cleared == []
    captured = capsys.readouterr()
    assert captured.err == (
        "labkit: clear_output of rank 1 is ignored: it would clear other ranks' "
        "output as well\n"
    )
    assert "[rank 0] hello\n" in captured.out


def test_the_picture_of_a_run_is_not_cleared(
    cleared: list[bool], capsys: Captured
) -> None:
    merger = OutputMerger([0], may_clear=False)
    merger.add_message(0, *clear())
    merger.finish()
    assert cleared == []
    assert "would clear the run's picture as well" in capsys.readouterr().err


# ---- process ids ----

ALIKE = (
    "/tmp/ipykernel_{pid}/9.py:1: UserWarning: so\n",
    "This process (pid={pid}) is multi-threaded\n",
    "Process {pid} began\n",
)


@pytest.mark.parametrize("text", ALIKE)
def test_warnings_that_differ_in_a_process_id_alone_are_one(
    capsys: Captured, text: str
) -> None:
    merger = OutputMerger([0, 1], pids={0: 41, 1: 42})
    for rank, pid in ((0, 41), (1, 42)):
        merger.add_message(rank, *err(text.format(pid=pid)))
        merger.add_message(rank, *out(f"pid {pid}\n"))
    merger.finish()
    captured = capsys.readouterr()
    assert captured.err == "[ranks 0-1] " + text.format(pid=41)
    assert captured.out == "[rank 0] pid 41\n[rank 1] pid 42\n"


def test_warnings_that_differ_in_another_number_are_not(capsys: Captured) -> None:
    merger = OutputMerger([0, 1], pids={0: 41, 1: 42})
    merger.add_message(0, *err("ipykernel_413: loss 41\n"))
    merger.add_message(1, *err("ipykernel_413: loss 42\n"))
    merger.finish()
    assert "[ranks" not in capsys.readouterr().err
