"""The notebooks' drawings say what their data say."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from labkit import Lab
from labkit.course import check
from labkit.course.drawings.grids import draw_exchanges
from labkit.course.drawings.grids import numbers_of
from labkit.course.drawings.grids import ring_turns
from labkit.course.drawings.grids import who_is_in
from labkit.course.drawings.schematics import draw_meshes
from labkit.course.drawings.schematics import draw_two_hosts
from labkit.course.drawings.schematics import held_by
from labkit.course.drawings.timelines import draw_order
from labkit.course.drawings.timelines import draw_pipelines
from labkit.course.drawings.timelines import draw_writing
from labkit.course.drawings.timelines import fit_alpha_beta
from labkit.theory import bubble

SOLUTIONS = Path(__file__).parent / "solutions"
Pass = tuple[str, int]
Order = Callable[[int, int, int], list[Pass]]
FOUR_RANKS = [100 * 2**rank + np.arange(8.0) for rank in range(4)]


@pytest.mark.parametrize("ranks", [(0,), (3,), (1, 2), (0, 1, 3), (0, 1, 2, 3)])
def test_a_cell_has_the_colours_of_the_ranks_whose_numbers_are_in_it(
    ranks: tuple[int, ...],
) -> None:
    for number in sum(FOUR_RANKS[rank] for rank in ranks):
        assert who_is_in(number, FOUR_RANKS) == ranks


def test_a_cell_that_is_no_sum_has_no_colour() -> None:
    assert who_is_in(7, FOUR_RANKS) == ()


def test_a_row_of_cells_is_a_tensor_a_list_of_tensors_or_nothing() -> None:
    assert numbers_of(None).tolist() == []
    assert numbers_of(np.ones((2, 2))).tolist() == [1, 1, 1, 1]
    assert numbers_of([np.zeros(1), np.ones(2)]).tolist() == [0, 1, 1]


def test_an_exchange_shows_every_number_before_and_after() -> None:
    x, total = np.array([1.0, 2.0]), np.array([41.0, 42.0])
    figure = draw_exchanges([{"reduce": (x, total)}, {"reduce": (x + 39, None)}])
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert {"reduce", "rank 0", "rank 1", "nothing"} <= {*shown}
    assert {"1", "2", "40", "41", "42"} <= {*shown}


def test_a_ring_adds_up_one_part_a_rank_and_then_passes_it_on() -> None:
    turns = ring_turns(4)
    complete = [sum(len(whose) == 4 for whose in held.values()) for held in turns]
    assert complete == [0, 0, 0, 4, 8, 12, 16]
    assert len({rank for (rank, _), whose in turns[3].items() if len(whose) == 4}) == 4


@pytest.mark.parametrize(
    ("sizes", "copies"),
    [
        ({"dp_replicate": 4}, 4),
        ({"dp_shard": 4}, 1),
        ({"dp_shard": 2, "tp": 2}, 1),
        ({"pp": 2, "dp_replicate": 2}, 2),
    ],
)
def test_the_ranks_of_a_mesh_hold_the_model_as_often_as_it_is_replicated(
    sizes: dict[str, int], copies: int
) -> None:
    found = [held_by(sizes, rank) for rank in range(4)]
    assert (sum(held.astype(int) for held, _, _ in found) == copies).all()
    seen = [part for _, part, num_parts in found for _ in range(4 // num_parts)]
    assert sorted({*seen}) == list(range(found[0][2]))
    told = [text.get_text() for text in draw_meshes({"a grid": sizes}).axes[0].texts]
    assert {"a grid", f"samples 1/{found[0][2]}"} <= {*told}


def test_what_crosses_between_two_hosts_is_told_of_each_arrow() -> None:
    told = [text.get_text() for text in draw_two_hosts(4).axes[0].texts]
    assert told.count("1.75") == 2
    assert told.count("0.25") == 4
    assert told.count("7") == 2


def test_what_a_model_wrote_stands_beside_its_loss() -> None:
    losses = pd.Series([5.5, 4.25], index=[1, 2])
    figure = draw_writing(losses, {1: "\n\x00é$x$", 2: "The end"})
    told = [text.get_text() for text in figure.axes[1].texts]
    assert {"1", "5.50", "···$x$", "2", "4.25", "The end"} <= {*told}


def test_the_fitted_line_has_the_latency_and_bandwidth_of_the_times() -> None:
    sizes = [4**power for power in range(5, 13)]
    alpha, beta = fit_alpha_beta(sizes, [3e-4 + size / 2e9 for size in sizes])
    assert alpha == pytest.approx(3e-4)
    assert beta == pytest.approx(2e9)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_ranks_of_a_drawn_pipeline_wait_as_long_as_the_formula_says(
    num_ranks: int,
) -> None:
    titles = [each.get_title(loc="left") for each in draw_pipelines(num_ranks, 8).axes]
    shares = [bubble(num_ranks, number) for number in (1, 8)]
    assert titles == [
        f"the whole batch: ranks wait {shares[0]:.0%} of the time",
        f"8 microbatches: ranks wait {shares[1]:.0%} of the time",
    ]


def by_microbatch(rank: int, num_ranks: int, num_microbatches: int) -> list[Pass]:
    numbers = range(num_microbatches)
    return [(kind, number) for number in numbers for kind in ("forward", "backward")]


def all_forward(rank: int, num_ranks: int, num_microbatches: int) -> list[Pass]:
    numbers = range(num_microbatches)
    return [(kind, number) for kind in ("forward", "backward") for number in numbers]


def in_reverse(rank: int, num_ranks: int, num_microbatches: int) -> list[Pass]:
    return all_forward(rank, num_ranks, num_microbatches)[::-1]


@pytest.mark.parametrize(
    ("order", "verdict"),
    [
        (by_microbatch, "valid, but not solved yet: with 2 ranks and 4 microbatches "),
        (all_forward, "by formula 20%, and one keeps 4 of the microbatches; the num"),
        (in_reverse, "not right: with 2 ranks and 4 microbatches ranks wait forever"),
        (lambda *_: [("forward", 0)], "rank 0 does not do each forward and each back"),
    ],
)
def test_an_order_of_passes_that_waits_or_keeps_too_much_solves_nothing(
    order: Order, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check("fill_the_bubble", order)
    assert verdict in capsys.readouterr().out


def test_an_order_that_never_ends_is_not_drawn() -> None:
    with pytest.raises(ValueError, match="ranks wait forever: rank 0 for backward 3"):
        draw_order(in_reverse, 2, 4)


@pytest.mark.long
def test_on_four_ranks_only_a_ring_sends_little(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exchange = """
def exchange(tensor):
    tensors = [tensor if each == rank else torch.empty_like(tensor)
               for each in range(world_size)]
    others = [each for each in range(world_size) if each != rank]
    works = [dist.isend(tensor, other) for other in others]
    works += [dist.irecv(tensors[other], other) for other in others]
    for work in works:
        work.wait()
    return sum(tensors)

check("ring_all_reduce", exchange)
check("ring_all_reduce", lambda tensor: tensor)
check("ring_all_reduce", lambda tensor: dist.all_reduce(tensor) or tensor)
"""
    with Lab(num_ranks=4) as lab:
        for name in ("swap_two_ranks", "ring_all_reduce"):
            lab.run((SOLUTIONS / f"{name}.py").read_text(), timeout=60)
        lab.run(exchange, timeout=60)
    told = capsys.readouterr().out
    assert "swap_two_ranks: solved: " in told
    assert "ring_all_reduce: solved: a rank sends 1.50 times" in told
    assert "valid, but not solved yet: a rank sends 3.00 times" in told
    assert "not right: rank 0 does not return the sum of 12000 elements" in told
    assert "not right: it calls allreduce" in told
