"""What a picture shows, in words: every number that was drawn, and none that was not."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from dtlib import figures
from dtlib.figures import style
from dtlib.figures.told import alternative


@pytest.fixture
def axes():
    return Figure().subplots()


def test_bars_are_told_by_the_words_under_them(axes):
    axes.bar(["ring", "tree"], [3.0, 4.25], label="rounds")
    axes.set_ylabel("rounds")
    axes.figure.set_label("rounds by algorithm")
    assert alternative(axes.figure) == "rounds by algorithm. rounds: ring 3, tree 4.25"


def test_lying_bars_are_told_too(axes):
    axes.barh(["ring", "tree"], [3.0, 4.25])
    assert alternative(axes.figure) == "bars ring 3, tree 4.25"


def test_bars_at_numbers_are_told_by_their_places(axes):
    axes.bar([0, 1.5], [256, 128])
    assert alternative(axes.figure) == "bars 256 at 0, 128 at 1.5"


def test_a_line_is_told_by_its_ends_and_what_lies_between(axes):
    axes.plot([1, 2, 3], [5.0, 1.5, 4.0], label=r"$\beta$")
    axes.set(xlabel="ranks", ylabel="time (s)")
    assert alternative(axes.figure) == "time (s) against ranks: beta: 5 at 1 to 4 at 3, lowest 1.5 at 2"


def test_a_few_marks_are_told_one_by_one_and_gaps_are_not(axes):
    style.markers(axes, [1, 2, 3], [2.0, np.nan, 8.0], "ring")
    assert alternative(axes.figure) == "ring, measured: 2 at 1, 8 at 3"


def test_lines_across_and_empty_axes_say_nothing(axes):
    axes.axhline(3)
    assert alternative(axes.figure) == ""


def test_many_series_are_counted(axes):
    for number in range(11):
        axes.plot([0, 1], [number, number])
    told = alternative(axes.figure)
    assert told.count("at 0 to") == 8
    assert told.endswith("; and 3 more")


def test_stairs_and_clouds_are_told(axes):
    axes.stairs([1, 4, 2], [0, 1, 2, 3], label="held")
    axes.scatter([1, 2, 3], [7, 9, 8])
    assert alternative(axes.figure) == "held: 1 at 0.5 to 2 at 2.5, highest 4 at 1.5; 3 points 7 to 9 at 1 to 3"


def test_what_the_figure_says_already_is_not_said_again():
    figure = figures.breakdown_bars({"a": {"weights": 4, "gradients": 2}}, unit="B")
    assert alternative(figure) == "stacked bars, B; a: 6 (weights 4, gradients 2)"
    figure.set_label("a rank")
    assert alternative(figure) == "a rank. stacked bars, B; a: 6 (weights 4, gradients 2)"


def grid(work: float):
    return {
        "rank 0": [("forward", 0, 1, "", "0"), ("idle", 1, 4), ("backward", 4, 4 + work, "", "0")],
        "rank 1": [("forward", 1, 2, "", "0"), ("backward", 2, 4, "", "0")],
    }


def test_a_schedule_is_told_with_its_bubble():
    """Half of twice six is idle; waiting that is drawn counts as idle, too."""
    figure = figures.timeline(grid(2), unit="forward passes")
    told = alternative(figure)
    assert "2 rows over 6 forward passes, boxes 0 to 0, idle 50.0% in all" in told
    assert told.endswith("; rank 0 and rank 1: forward 1, backward 2, idle 50.0%")
    other = alternative(figures.timeline(grid(3), unit="forward passes"))
    assert "idle 50.0% in all" in other
    assert "rank 1: forward 1, backward 2, idle 57.1%" in other


def test_rows_that_are_alike_are_told_once():
    rows = {f"rank {rank}": [("forward", 0, 1), ("backward", 1, 3)] for rank in range(4)}
    assert alternative(figures.timeline(rows, unit="passes")).endswith(
        "rank 0 to rank 3: forward 1, backward 2, idle 0.0%"
    )


def test_bars_side_by_side_in_two_lanes_are_not_counted_twice():
    rows = {"rank 0": [("forward", 0, 2, "compute"), ("all-reduce", 1, 3, "communication"), ("forward", 3, 4)]}
    assert "idle 0.0% in all; rank 0: forward 3, all-reduce 2, idle 0.0%" in alternative(figures.timeline(rows))
