"""The report of `make bench`: from figures to a table, without any peer."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from peers import report
from peers.rows import BY_KEY
from peers.rows import PEERS
from peers.rows import ROWS

COMMITTED = sorted((Path(__file__).parents[1] / "benchmarks/peers").glob("*.json"))
NOT_INSTALLED = "not installed: pip could not install it"


@pytest.fixture
def figures() -> dict[str, Any]:
    """Three tools: labkit, one that is slower and hangs, and one that is missing."""
    return {
        "machine": {
            **{"date": "2026-11-25", "seconds": 120, "cores": 2, "cpu": "a CPU"},
            **{"memory_gib": 23.4, "system": "Linux 6", "python": "3.11.2"},
            **{"load_before": [0.1, 0.2, 0.3], "load_after": [1.5, 0.7, 0.4]},
            "versions": {
                "labkit": "labkit 0.1.0",
                "ipyparallel": "ipyparallel 9.2.0",
                "monarch": NOT_INSTALLED,
            },
        },
        "limits": {"loopback": 0.00002, "matmul_2": 1500.0},
        "rows": {
            "cell_2": {
                "labkit": {"values": [0.008, 0.009, 0.012]},
                "ipyparallel": {"values": [0.016, 0.02]},
            },
            "start_2": {
                "labkit": {"values": [3.0]},
                "ipyparallel": {"values": [2.0]},
                "monarch": {"none": NOT_INSTALLED},
            },
            "steps_2": {
                "labkit": {"values": [500.0]},
                "ipyparallel": {"values": [400.0]},
            },
            "raise_prompt": {
                "labkit": {"values": [0.5]},
                "ipyparallel": {"hangs": 20.0},
            },
            "raise_state": {
                "labkit": {"text": "kept"},
                "ipyparallel": {"text": "lost, all started again"},
            },
        },
    }


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of Markdown tables by their first cell."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[each.strip() for each in line.strip("|").split("|")] for line in lines]
    return {first: others for first, *others in cells}


def test_a_row_has_medians_their_spread_and_the_limit(figures: dict[str, Any]) -> None:
    row = rows_of(report.page(figures))["a trivial cell, 2 ranks"]
    assert row == ["**9 ms (8 ms to 12 ms)**", "18 ms (16 ms to 20 ms)", "-", "20 µs"]


def test_the_first_is_bold_where_more_is_better(figures: dict[str, Any]) -> None:
    row = rows_of(report.page(figures))[BY_KEY["steps_2"].title]
    assert row[:2] == ["**500 /s**", "400 /s"]


def test_who_hangs_says_so_and_is_never_first(figures: dict[str, Any]) -> None:
    rows = rows_of(report.page(figures))
    row = rows[BY_KEY["raise_prompt"].title]
    assert row[:2] == ["**0.5 s**", "no prompt in 20 s"]
    assert rows["variables"][:2] == ["kept", "lost, all started again"]


def test_a_row_where_labkit_is_not_first_says_why(figures: dict[str, Any]) -> None:
    _, _, behind = report.page(figures).partition("## Where labkit is not first")
    assert f"- {BY_KEY['start_2'].title} (ipyparallel is first). " in behind
    assert BY_KEY["start_2"].why in behind
    assert BY_KEY["cell_2"].why not in behind


def test_every_row_in_which_one_can_be_first_has_a_reason() -> None:
    assert [row.key for row in ROWS if row.is_compared and not row.why] == []


def test_a_peer_that_is_missing_has_no_number_and_a_reason(
    figures: dict[str, Any],
) -> None:
    page = report.page(figures)
    assert rows_of(page)[BY_KEY["start_2"].title][2] == "-"
    assert f"- monarch, {BY_KEY['start_2'].title}: {NOT_INSTALLED}" in page


def test_nothing_has_fallen_against_the_same_figures(figures: dict[str, Any]) -> None:
    assert report.fallen(figures, figures) == []


@pytest.mark.parametrize(("key", "by"), [("cell_2", 1.2), ("steps_2", 0.85)])
def test_a_ratio_that_fell_by_a_tenth_is_named(
    figures: dict[str, Any], key: str, by: float
) -> None:
    now = copy.deepcopy(figures)
    ours = now["rows"][key]["labkit"]
    ours["values"] = [value * by for value in ours["values"]]
    [line] = report.fallen(now, figures)
    assert BY_KEY[key].title in line
    assert "ipyparallel" in line


def test_a_ratio_that_fell_by_less_is_not(figures: dict[str, Any]) -> None:
    now = copy.deepcopy(figures)
    ours = now["rows"]["cell_2"]["labkit"]
    ours["values"] = [value * 1.05 for value in ours["values"]]
    assert report.fallen(now, figures) == []


def test_a_slower_machine_has_the_same_ratios(figures: dict[str, Any]) -> None:
    now = copy.deepcopy(figures)
    for found in now["rows"]["cell_2"].values():
        found["values"] = [value * 3 for value in found["values"]]
    assert report.fallen(now, figures) == []


def test_a_figure_that_labkit_has_no_more_is_named(figures: dict[str, Any]) -> None:
    now = copy.deepcopy(figures)
    now["rows"]["raise_prompt"]["labkit"] = {"hangs": 20.0}
    assert report.fallen(now, figures) == [
        f"{BY_KEY['raise_prompt'].title}: labkit has no figure any more"
    ]


def test_rows_below_another_have_a_title_of_their_own() -> None:
    titles = [report.full_title(row) for row in ROWS]
    assert len(set(titles)) == len(titles)
    assert report.full_title(BY_KEY["cell_16"]) == "a trivial cell, 16 ranks"


def test_figures_page_and_picture_are_written(
    figures: dict[str, Any], tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("a.json", "a.md", "a.png")]
    report.write(figures, *paths)
    assert json.loads(paths[0].read_text()) == figures
    assert paths[1].read_text() == report.page(figures)
    assert paths[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_figures_are_of_rows_and_peers_that_exist(path: Path) -> None:
    figures = json.loads(path.read_text())
    assert set(figures["rows"]) <= set(BY_KEY)
    assert set(figures["machine"]["versions"]) <= set(PEERS)
    assert report.fallen(figures, figures) == []
