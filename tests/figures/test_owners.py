"""The picture of who holds what shows each entry once, in the look of its rank."""

import numpy as np
import pytest

from dtlib import figures


def entries(figure):
    return figure.axes[0].patches


def test_every_entry_is_a_box_of_its_rank():
    split = np.repeat([[0, 1, 2]], 2, axis=0)
    figure = figures.owners({"weights": split, "input": np.full((2, 2), figures.EVERY)})
    assert len(entries(figure)) == split.size + 4
    assert len({patch.get_facecolor() for patch in entries(figure) if patch.get_fill()}) == 4
    assert len({patch.get_hatch() for patch in entries(figure)[: split.size]}) == 3  # told apart without colour
    assert "weights: 2 of 6 entries on rank 0" in figure.get_label()
    assert "input: 4 of 4 entries on every rank" in figure.get_label()


def test_addends_are_in_the_look_of_what_adds_them():
    figure = figures.owners({"masked": np.array([[0, figures.NOBODY]])})
    assert len(figure.axes[0].patches) == 1
    assert "1 of 2 entries on nobody" in figure.get_label()
    figure = figures.owners({"products": np.full((1, 2), figures.ADDENDS)})
    assert {patch.get_hatch() for patch in entries(figure)} == {"+++"}
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["an addend on each rank"]


def test_matrices_go_on_in_the_next_row():
    one = np.zeros((2, 3), dtype=int)
    in_a_row, below = (figures.owners({"a": one, "b": one}, columns=columns) for columns in (2, 1))
    assert in_a_row.get_figwidth() > below.get_figwidth()
    assert in_a_row.get_figheight() < below.get_figheight()


@pytest.mark.parametrize("matrix", [[0, 1], [[0.5]], [[-4]]])
def test_what_is_no_matrix_of_ranks_is_refused(matrix):
    with pytest.raises(ValueError, match="matrices must have two dimensions of ranks"):
        figures.owners({"weights": matrix})
