"""Ranks on named axes: their places, their groups, and what is no mesh."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dtlib import lab
from dtlib.ranks.mesh import Mesh

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(SHAPES)
def test_places_are_numpys_and_every_rank_has_one(sizes):
    mesh = Mesh({f"axis{i}": size for i, size in enumerate(sizes)})
    places = list(itertools.product(*map(range, sizes)))
    assert mesh.world_size == len(places)
    for rank, place in enumerate(places):
        assert tuple(mesh.coordinates(rank).values()) == place
        assert mesh.rank_at(**mesh.coordinates(rank)) == rank


@given(SHAPES, st.data())
def test_the_groups_along_some_axes_split_the_ranks(sizes, data):
    mesh = Mesh({f"axis{i}": size for i, size in enumerate(sizes)})
    axes = data.draw(st.lists(st.sampled_from(sorted(mesh.axes)), min_size=1, unique=True))
    groups = {tuple(mesh.ranks(*axes, rank=rank)) for rank in range(mesh.world_size)}
    assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
    for group in groups:
        assert len(group) == mesh.size(*axes)
        fixed = [{k: v for k, v in mesh.coordinates(rank).items() if k not in axes} for rank in group]
        assert all(each == fixed[0] for each in fixed)


def test_neighbours_on_the_last_axis_are_neighbours():
    mesh = Mesh({"pp": 2, "dp": 2, "tp": 4})
    assert mesh.ranks("tp", rank=5) == [4, 5, 6, 7]
    assert mesh.ranks("dp", rank=5) == [1, 5]
    assert mesh.ranks("pp", rank=5) == [5, 13]
    assert mesh.ranks("tp", "dp", rank=9) == list(range(8, 16))
    assert mesh.coordinates(13) == {"pp": 1, "dp": 1, "tp": 1}
    assert mesh.rank_at(pp=1) == 8
    assert repr(mesh) == "Mesh({'pp': 2, 'dp': 2, 'tp': 4})"


def sums():
    mesh = Mesh({"dp": 2, "tp": 3})
    found = {}
    for axes in (("tp",), ("dp",), ("dp", "tp"), ("tp", "dp")):
        value = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(value, group=mesh.group(*axes))
        found[axes] = int(value)
    return found, mesh.group("tp") is mesh.group("tp"), mesh.coordinates(), mesh.rank_at(tp=0), mesh.ranks("dp")


def test_groups_reduce_among_their_ranks_alone():
    for rank, (found, is_same, place, first, column) in enumerate(lab.run(sums, 6)):
        row, at = divmod(rank, 3)
        assert found["tp",] == (111 if row == 0 else 111000)
        assert found["dp",] == 1001 * 10**at
        assert found["dp", "tp"] == found["tp", "dp"] == 111111
        assert is_same
        assert (place, first, column) == ({"dp": row, "tp": at}, 3 * row, [at, at + 3])


def refused():
    try:
        Mesh({"dp": 2, "tp": 2})
    except ValueError as error:
        return str(error)
    return ""


def test_a_mesh_of_another_size_is_refused_on_every_rank():
    assert lab.run(refused, 3) == ["axes must have 3 ranks in all, not dp 2 × tp 2 = 4"] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mesh({}), "axes must map names to sizes"),
        (lambda: Mesh([("dp", 2)]), "axes must map names to sizes"),
        (lambda: Mesh({"": 2}), "axes must have names such as dp or tp, not ''"),
        (lambda: Mesh({3: 2}), "axes must have names such as dp or tp, not 3"),
        (lambda: Mesh({"dp": 0}), "the size of axis dp must be at least 1, not 0"),
        (lambda: Mesh({"dp": 1.5}), "the size of axis dp must be a whole number"),
        (lambda: Mesh({"dp": 2}, 3), "axes must have 3 ranks in all, not dp 2 = 2"),
        (lambda: Mesh({"dp": 2}).size("tp"), "axis must be one of dp, not 'tp'"),
        (lambda: Mesh({"dp": 2}).size(), "axes must be some of dp, not none"),
        (lambda: Mesh({"dp": 2}).ranks("dp", "dp", rank=0), "axes must not name one twice"),
        (lambda: Mesh({"dp": 2}).ranks("dp", rank=2), "rank must be below the number of ranks, 2, not 2"),
        (lambda: Mesh({"dp": 2}).coordinates(), "rank must be given where"),
        (lambda: Mesh({"dp": 2}).rank_at(dp=2), "dp must be below the number of ranks, 2, not 2"),
        (lambda: Mesh({"dp": 2}).group("dp"), "a group needs torch.distributed"),
    ],
)
def test_what_is_no_mesh_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
