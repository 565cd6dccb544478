"""The benchmark against torch's hooks, at the size of a toy."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks.model import preset

from .oracle import Given, gradients, means

ROOT = Path(__file__).parents[3]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.compression")


def test_the_race_is_between_equals(benchmark):
    race, sent, losses = lab.run(benchmark.measured, 2, args=(preset("tiny"), 8, 2))[0]
    for name in benchmark.OURS:
        ours, theirs = f"ours, {name}", f"torch's, {name}"
        assert sent[ours] == pytest.approx(sent[theirs], rel=0.05)  # headers of as many messages as there are buckets
        assert losses[ours] == pytest.approx(losses[theirs], rel=0.02)
        assert race.ratio(ours, theirs).median > 0


def test_casts_are_torchs_to_the_bit_where_a_division_is_exact(benchmark):
    def train(table):
        given = gradients(dist.get_world_size())
        found = {name: means(table[name](Given(dtype=torch.float32)), given) for name in ("float16", "bfloat16")}
        return {name: [{k: v.tolist() for k, v in step.items()} for step in each] for name, each in found.items()}

    assert lab.run(train, 2, args=(benchmark.OURS,)) == lab.run(train, 2, args=(benchmark.TORCHS,))


def test_what_a_hook_says_as_it_fails_is_told(benchmark):
    assert benchmark.how_it_ends("batched_powerSGD_hook", preset("tiny")).startswith("AssertionError")
    assert set(benchmark.FAILING) > {"batched_powerSGD_hook", "bf16_compress_hook"}
