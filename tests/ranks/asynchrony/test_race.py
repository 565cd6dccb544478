"""Local steps and torch's averagers: the same weights to the bit, the same bytes; and the benchmark at a toy's size."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from dtlib import lab
from dtlib.ranks.model import GPTConfig

ROOT = Path(__file__).parents[3]
TOY = GPTConfig(num_layers=1, hidden=16, num_heads=2, seq=8)


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.asynchrony")


@pytest.mark.parametrize(("n", "on_two_levels"), [(2, False), (3, False), (4, False), (4, True)])
def test_torchs_averagers_end_with_the_same_weights_and_bytes(benchmark, n, on_two_levels):
    race, sent, same = lab.run(benchmark.measured, n, args=(TOY, on_two_levels, 1))[0]
    assert same
    assert sent["ours"] == sent["torch's"] > 0
    assert race.ratio("ours", "torch's").median > 0


def test_a_slow_rank_holds_up_whom_it_must(benchmark, monkeypatch):
    """Counts alone: how many gradients each worker gave until the same number of updates."""
    found = {mode: lab.run(benchmark.with_slow_rank, 5, args=(mode, 0.1, 0, 1.5))[0] for mode in benchmark.MODES}
    assert len(set(found["synchronous"]["pushes"])) == 1
    assert found["synchronous"]["max_staleness"] == found["one backup worker"]["max_staleness"] == 0
    assert found["one backup worker"]["dropped"] > 0
    pushes = found["asynchronous"]["pushes"]
    assert pushes[-1] < min(pushes[:-1])
    assert max(found["staleness bounded by 4"]["pushes"]) - min(found["staleness bounded by 4"]["pushes"]) <= 5


@pytest.mark.parametrize("way", ["data parallelism", "local SGD", "DiLoCo"])
def test_ways_over_a_slow_link_train(benchmark, way):
    found = lab.run(benchmark.on_slow_link, 2, args=(way, 8, 0, 32))[0]
    assert found["steps"] == [8, 16, 24, 32]
    assert found["losses"][-1] < 5.0  # ln 256 = 5.55 at the start
