"""How a class is dealt in shares: fair by recorded cost, and by nobody's name."""

from __future__ import annotations

import pytest

from dtlib.grading.classroom import shards
from dtlib.grading.classroom.intake import find
from dtlib.grading.classroom.shards import Shard, deal
from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.sandbox.costs import recorded

from .answers import ROOT

CLASS = [f"learner {number}" for number in range(40)]
STEMS = ("collectives", "memory", "zero")
COUNTED = [each for each in all_exercises().values() if each.id.partition(".")[0] in STEMS]


def loads(dealt):
    """What each share costs by the recorded costs, and what starts."""
    return [sum(60 + recorded()[one.id] for each in part.values() for one in each) for part in dealt]


def by_name(found, exercises, shard):
    """Not fair: an exercise is of the share that its place in the course gives."""
    return {each.learner: exercises[shard.number - 1 :: shard.of] for each in found}


@pytest.fixture(scope="module")
def handed_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    for stem in STEMS:
        (folder / f"{stem}.ipynb").write_bytes((ROOT / "exercises" / f"{stem}.ipynb").read_bytes())
    (one,) = find(folder, one_learner=True)
    with (folder / "spool").open("w+b") as spool:
        one.read(spool)
        many = [type(one)(name, one.folder, one.paths, digest=one.digest, _places=one._places) for name in CLASS]
        yield many


@pytest.mark.parametrize("of", [1, 3, 8, 16])
def test_shares_are_fair_by_recorded_cost_and_cover_everything_once(handed_in, of):
    dealt = [deal(handed_in, COUNTED, Shard(number, of)) for number in range(1, of + 1)]
    pairs = [(name, one.id) for part in dealt for name, each in part.items() for one in each]
    assert sorted(pairs) == sorted((name, one.id) for name in CLASS for one in COUNTED)
    found = loads(dealt)
    assert max(found) / min(found) < 1.02
    unfair = loads([by_name(handed_in, COUNTED, Shard(number, of)) for number in range(1, of + 1)])
    assert of == 1 or max(unfair) / min(unfair) > 1.2


def test_what_nobody_can_run_weighs_next_to_nothing(handed_in):
    absent = [type(each)(f"absent {each.learner}", each.folder, []) for each in handed_in]
    dealt = [deal([*absent, *handed_in], COUNTED, Shard(number, 4)) for number in range(1, 5)]
    found = loads([{name: each for name, each in part.items() if "absent" not in name} for part in dealt])
    assert max(found) / min(found) < 1.02


def test_dealing_takes_no_name_into_account(handed_in):
    renamed = [
        type(each)(f"x{index}", each.folder, each.paths, _places=each._places) for index, each in enumerate(handed_in)
    ]
    one, other = (deal(each, COUNTED, Shard(2, 5)) for each in (handed_in, renamed))
    assert [[each.id for each in mine] for mine in one.values()] == [
        [each.id for each in mine] for mine in other.values()
    ]
    assert shards.held(handed_in[0].folder) is None
