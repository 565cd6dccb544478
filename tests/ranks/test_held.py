"""What a rank holds as boxes of whole tensors: each element once, in its place."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from dtlib.ranks.shared.held import Held, Place, boxes
from dtlib.ranks.shared.split import Split

SHAPES = [(), (5,), (3, 4), (2, 3, 2), (2, 1, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_of_a_flat_piece(shape):
    whole = torch.arange(prod(shape)).view(shape)
    for start in range(whole.numel()):
        for stop in range(start + 1, whole.numel() + 1):
            flat = whole.reshape(-1)[start:stop]
            found = list(boxes(flat, start, Place("a", shape)))
            assert len(found) <= max(1, 2 * len(shape) - 1)
            for (offsets, sizes), view in found:
                assert torch.equal(whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))], view)
            assert sum(view.numel() for _, view in found) == stop - start


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (2, 0), (1, 0)])
@pytest.mark.parametrize("flat", [True, False])
def test_boxes_of_a_part_whose_ranges_lie_apart(dims, flat):
    whole = torch.arange(4 * 5 * 6).view(4, 5, 6)
    splits = [Split(dim, ((range(2),), (range(3, whole.shape[dim]), range(2, 3)))) for dim in dims]
    for ranks in product(range(2), repeat=len(dims)):
        part, cuts = whole, tuple(zip(splits, ranks, strict=True))
        for split, rank in cuts:
            part = split.part(part, rank)
        place = Place("a", tuple(part.shape), cuts)
        assert place.whole_shape == whole.shape
        lengths = range(1, part.numel(), 7) if flat else [part.numel()]
        for length in lengths:
            tensor, filled = (part.reshape(-1)[:length] if flat else part), torch.full_like(whole, -1)
            for (offsets, sizes), view in boxes(tensor, 0, place):
                filled[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = view
            assert sorted(filled[filled >= 0].tolist()) == sorted(tensor.flatten().tolist())
            assert torch.equal(filled[filled >= 0], whole[filled >= 0])


def test_boxes_are_views():
    matrix = torch.zeros(3, 4)
    for _, view in boxes(matrix.view(-1)[2:11], 2, Place("a", (3, 4))):
        view += 1
    assert matrix.flatten().tolist() == [0, 0, *[1] * 9, 0]


def test_slices_count_once():
    place = Place("a", (3, 2), counts=((slice(0, 4), True), (slice(4, 6), False)))
    held = Held(place, torch.arange(1, 6), start=1)
    assert [(view.tolist(), start, counts) for view, start, counts in held.slices(held.weight)] == [
        ([1, 2, 3], 1, True), ([4, 5], 4, False)
    ]  # fmt: skip
    other = Held(place, torch.arange(1, 6), start=1, is_first=False)
    assert not any(counts for *_, counts in other.slices(other.weight))
