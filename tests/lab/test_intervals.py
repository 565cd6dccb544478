"""Arithmetic of intervals, held to sets of unit cells."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlib.lab.timeline.intervals import difference, intersection, length, pack, union

pieces = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


def cells(those):
    return {cell for start, end in those for cell in range(start, end)}


def is_canonical(those):
    return all(a < b for a, b in those) and all(first[1] < second[0] for first, second in pairwise(those))


@given(pieces, pieces)
def test_interval_arithmetic_is_that_of_sets(first, second):
    for result, expected in (
        (union(first), cells(first)),
        (union(first + second), cells(first) | cells(second)),
        (intersection(first, second), cells(first) & cells(second)),
        (difference(first, second), cells(first) - cells(second)),
    ):
        assert cells(result) == expected
        assert is_canonical(result)
        assert length(result) == len(expected)


@given(pieces, st.integers(0, 5))
def test_union_joins_over_small_gaps(those, gap):
    joined = union(those, gap=gap)
    assert cells(those) <= cells(joined)
    assert all(second[0] - first[1] > gap for first, second in pairwise(joined))


@given(pieces)
def test_packed_lanes_never_overlap_and_are_few(those):
    lanes = pack(those)
    for lane in set(lanes):
        own = sorted(piece for piece, where in zip(those, lanes, strict=True) if where == lane)
        assert all(first[1] <= second[0] for first, second in pairwise(own))
    crowd = max((sum(a <= cell < b for a, b in those) for cell in range(40)), default=0)
    assert len({lane for (a, b), lane in zip(those, lanes, strict=True) if a < b}) <= max(crowd, 1)


@pytest.mark.parametrize("bad", [(2.0, 1.0), (math.nan, 1.0), (0.0, math.inf)])
def test_bad_pieces(bad):
    with pytest.raises(ValueError, match="must start before it ends"):
        union([bad])
