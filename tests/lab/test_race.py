"""Contenders take turns: who is called when, what counts, and that all ranks hear the same. No clock is asserted."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from dtlib import lab


def run_of(rounds, warm_up, calls):
    """In a rank: who was called in what order, what the wire carried, and the result."""
    order = []
    with lab.wire() as wire:
        race = lab.race(
            {name: lambda name=name: order.append(name) for name in "abc"},
            rounds=rounds, warm_up=warm_up, calls_per_turn=calls,
        )  # fmt: skip
    return order, wire.total_bytes, race


def test_all_have_a_turn_a_round_in_an_order_that_changes_and_is_the_same_on_all_ranks():
    ranks = lab.run(run_of, 3, args=(6, 2, 2))
    order, _, race = ranks[0]
    rounds = [order[at : at + 6] for at in range(0, len(order), 6)]
    assert len(rounds) == 8
    assert all(sorted(each) == [*"aabbcc"] and each[::2] == each[1::2] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert all(other == order and quiet == 0 and found == race for other, quiet, found in ranks)
    assert {name: len(times) for name, times in race.seconds.items()} == dict.fromkeys("abc", 6)
    assert race.cpu_seconds.keys() == race.seconds.keys()


def test_a_turn_is_as_long_as_its_slowest_rank_and_a_ratio_is_taken_round_by_round():
    def on_a_rank():
        pause = 0.03 * dist.get_rank()
        return lab.race({"still": lambda: None, "slow": lambda: time.sleep(pause)}, rounds=3, warm_up=0)

    for race in lab.run(on_a_rank, 2):
        assert min(race.seconds["slow"]) >= 0.03  # rank 0 does not sleep, and counts nothing
        expected = sorted(a / b for a, b in zip(race.seconds["slow"], race.seconds["still"], strict=True))
        assert race.ratio("slow", "still").median == pytest.approx(expected[1])
        assert race.ratio("still", "still") == (1, 1, 1)


def test_it_runs_without_ranks_and_reads_well():
    race = lab.race({"one": lambda: sum(range(1000)), "other": lambda: None}, rounds=2)
    assert race.table.splitlines()[0].split() == ["contender", "median", "turn", "/", "one", "middle", "half"]
    assert race.table.splitlines()[1].split()[-4:] == ["1.000", "1.000", "–", "1.000"]
    assert str(race.ratio("one", "one")) == "1.000 (1.000 – 1.000)"
    assert "<td" in race._repr_html_()
    assert race.median("one") > 0
    assert race.cpu_ratio("one", "one").high == 1


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: lab.race({}), ValueError, "contenders must be at least one function"),
        (lambda: lab.race({"a": 3}), TypeError, "contenders must be functions by their names, and 'a' is 3"),
        (lambda: lab.race({"a": id}, rounds=0), ValueError, "rounds must be at least 1, not 0"),
        (lambda: lab.race({"a": id}, warm_up=-1), ValueError, "warm_up must be at least 0, not -1"),
        (lambda: lab.race({"a": id}, calls_per_turn=0), ValueError, "calls_per_turn must be at least 1, not 0"),
        (lambda: lab.Race({"a": (1.0,)}, {}).ratio("b", "a"), ValueError, "name must be one of the contenders a, not"),
    ],
)
def test_bad_input_is_named(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_the_fastest_call_counts_and_all_ranks_begin_together():
    def job():
        now, takes = [0.0], iter((5.0, 2.0, 9.0))
        sys.modules["dtlib.lab.race"].time = SimpleNamespace(perf_counter=lambda: now[0], process_time=float)
        return lab.fastest(lambda: now.append(now.pop() + next(takes)), repeats=3)

    assert lab.run(job, 2) == [2.0, 2.0]
    with pytest.raises(ValueError, match="repeats must be"):
        lab.fastest(lambda: None, repeats=0)
