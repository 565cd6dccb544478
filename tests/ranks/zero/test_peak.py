"""The closed form of the peak, against ours and FSDP2's: above it by no more than a unit and its work."""

from __future__ import annotations

from typing import Any

import pytest

from dtlib import lab, theory
from dtlib.ranks.model import GPT, GPTConfig

from .small import STAGES
from .test_timeline import fsdp2
from .timelines import Case, buckets_of, params_of, peak, predicted, trained, work

CONFIGS = [
    GPTConfig(num_layers=6, hidden=64, seq=32),
    GPTConfig(num_layers=4, hidden=96, seq=64),
    GPTConfig(num_layers=8, hidden=48, seq=16),
]


def case_of(config: GPTConfig, stage: int, batch: int) -> Case:
    """Buckets as large as a block, where blocks are not the units themselves."""
    sizes = params_of(GPT(config))
    block = 4 * sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
    return Case(config, batch, options={} if stage == 3 else {"bucket_bytes": block, "first_bucket_bytes": None})


def work_of(case: Case) -> float:
    """What the passes of one process hold at their fullest, beside weights and gradients."""
    passes = [each.fullest for each in work(case.config, case.batch)]
    return max(each.activations + each.buffers + each.temporary for each in passes)


def closed_form(case: Case, stage: int, n: int, **options: Any) -> tuple[float, float]:
    """The formula's peak, and how far the real one may lie below: a unit's weights and gradient, and its work."""
    sizes, layers = params_of(GPT(case.config)), case.config.num_layers
    units = [sum(each.params.values()) for each in buckets_of(case, stage) if each.unit or stage < 3]
    held = work_of(case)
    outer = sum(size for name, size in sizes.items() if not name.startswith("blocks.")) if stage == 3 else 0
    formula = theory.zero.peak_bytes(
        sum(sizes.values()), n, stage, max(units), work_bytes=held, outer_params=outer, **options
    )
    return formula, 4 * max(units) + held / layers


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.num_layers}x{config.hidden}")
def test_the_peak_of_each_stage_is_within_a_units_gradient_and_work(config, stage, batch):
    case = case_of(config, stage, batch)
    for n in (2, 3, 8, 1024):
        formula, room = closed_form(case, stage, n)
        held = peak(predicted(case, stage, n, 0)).total  # `test_timeline` holds what is played to what is measured
        assert formula - room <= held <= 1.02 * formula


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_rank_of_many_holds(stage):
    case = case_of(CONFIGS[0], stage, 2)
    formula, room = closed_form(case, stage, 64)
    held = peak(lab.at_scale(trained, 64, args=(case, STAGES[stage])).result).total
    assert formula - room <= held <= formula


@pytest.mark.parametrize(
    ("config", "n"), [pytest.param(CONFIGS[0], 2, marks=pytest.mark.soak), (CONFIGS[0], 64), (CONFIGS[1], 4)]
)
def test_the_peak_of_fsdp2_is_within_a_unit_too(config, n):
    case = case_of(config, 3, 2)
    formula, room = closed_form(case, 3, n, copies=2 + 1 / n)
    spans, _ = lab.at_scale(fsdp2, n, args=(config,)).result
    assert formula - room <= peak(spans).total <= formula
