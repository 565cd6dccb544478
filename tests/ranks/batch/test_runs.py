"""Long runs that the benchmark recorded, made again with seeds that it has not seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import batch as benchmark
from dtlib.theory.batch import steps_needed

ROOT = Path(__file__).parents[3]


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_the_law_of_steps_foretells_batches_and_seeds_that_it_was_not_fitted_to(optimizer):
    kept = json.loads((ROOT / "benchmarks/results/batch-cpu-2-cores.json").read_text(encoding="utf-8"))
    found = kept["optimizers"][optimizer]
    rates = {each["batch"]: each["rate"] for each in found["batches"]}
    for batch in kept["held_out"]:
        steps = np.mean([benchmark.train(optimizer, batch, rates[batch], seed) for seed in range(2, 8)])
        law = steps_needed(found["fit"]["min_steps"], found["fit"]["critical_batch"], batch)
        assert abs(steps / law - 1) < 0.25
