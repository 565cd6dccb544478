"""The picture of who knows what shows a bar for each contribution, and a mistake as one."""

import numpy as np
import pytest

from dtlib import figures
from dtlib.theory.collectives import contributions


def bars(figure):
    return [patch for axes in figure.axes for patch in axes.patches if patch.get_fill()]


def test_every_contribution_is_a_bar():
    history = contributions("ring_all_reduce", 3)
    names = ["idle", *["reduce-scatter"] * 2, *["all-gather"] * 2]
    figure = figures.knowledge(history, names=names)
    assert len(bars(figure)) == history.sum()
    assert len({patch.get_facecolor() for patch in bars(figure)}) == 3
    assert "9 of 9 are complete" in figure.get_label()


def test_what_was_added_twice_is_hatched():
    history = contributions("ring_all_reduce", 2)
    history[-1, 0, 0, 1] = 2
    figure = figures.knowledge(history, names=["all-gather"] * len(history))
    assert [patch.get_hatch() for patch in bars(figure)].count("xx") == 1
    assert "3 of 4 are complete" in figure.get_label()


@pytest.mark.parametrize(("history", "names"), [(np.zeros((2, 3)), ["ring"] * 2), (np.zeros((2, 3, 3, 3)), ["ring"])])
def test_bad_input_is_named(history, names):
    with pytest.raises(ValueError, match=r"history must be|names and labels"):
        figures.knowledge(history, names=names)
