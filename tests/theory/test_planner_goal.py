"""A plan's batch and a goal: tokens, steps and days by counting, and from how many cards on tokens are wasted."""

from __future__ import annotations

from functools import lru_cache

import pytest

from dtlib.cli import told
from dtlib.theory import hardware, planner


@lru_cache
def answer(sequences: int = 64) -> planner.Answer:
    machine = planner.Machine(accelerator=hardware.accelerator("H100"), gpus=16)
    return planner.search("llama3-8b", machine, sequences=sequences, degrees={"tp": 2}, keep=2)


def tokens_of_a_goal(batch: float, critical: float, least: float) -> float:
    """Steps are counted: each does 1/(1 + 𝓑/B) of the work of one without noise, of which least/𝓑 are needed."""
    done, steps = 0.0, 0
    while done < least / critical:
        done += batch / (batch + critical)
        steps += 1
    return steps * batch


@pytest.mark.parametrize("critical", [1e5, 2**19, 1e7])
def test_a_goal_s_tokens_and_seconds_are_those_of_its_steps(critical):
    least = 1000 * critical
    for found in answer().plans:
        goal = planner.toward_goal(answer(), found, critical, least)
        assert goal.batch_share == 2**19 / critical
        assert goal.tokens == pytest.approx(tokens_of_a_goal(2**19, critical, least), rel=2e-3)
        assert goal.seconds == pytest.approx(goal.tokens / 2**19 * found.time.total)
        assert goal.least_seconds == pytest.approx(1000 * found.time.total)
        assert goal.seconds > goal.least_seconds


@pytest.mark.parametrize("critical", [1e4, 1e6, 3.3e6])
def test_beyond_so_many_cards_a_goal_takes_over_twice_its_least_tokens(critical):
    best = answer().best
    per_rank, cards = 2**19 / best.plan.dp, 16 // best.plan.dp
    goal = planner.toward_goal(answer(), best, critical)
    assert (goal.tokens, goal.seconds, goal.least_seconds) == (None, None, None)
    dp = goal.most_cards // cards
    assert goal.most_cards == dp * cards
    if dp:
        assert tokens_of_a_goal(dp * per_rank, critical, 1000 * critical) <= 2.01 * 1000 * critical
    assert tokens_of_a_goal((dp + 1) * per_rank, critical, 1000 * critical) > 2 * 1000 * critical


def test_the_sentences_say_these_numbers():
    goals = [planner.toward_goal(answer(), each, 2**18, 1e12) for each in answer().plans]
    batch, days = told.of_goal(answer(), goals)
    assert "A step of 524,288 tokens is 2 of the critical batch: a goal takes 3 times its least tokens and 1.5" in batch
    assert "would take 83% of these steps and 167% of these tokens" in batch  # 5/4 over 3/2, and 5 over 3
    assert f"beyond {goals[0].most_cards} cards of the first plan" in batch
    by_plan = ", ".join(f"{each.seconds / 86400:,.1f}" for each in goals)
    assert f"takes 3e+12 tokens, days by plan: {by_plan}." in days
    alone = told.of_goal(answer(), [planner.toward_goal(answer(), answer().best, 10.0)])
    assert len(alone) == 1
    assert "even with one rank of dp in the first plan a goal takes over twice" in alone[0]


@pytest.mark.parametrize(
    ("given", "names"), [((0,), "critical_batch"), ((float("nan"),), "critical_batch"), ((1e6, -1), "min_tokens")]
)
def test_bad_input_is_named(given, names):
    with pytest.raises(ValueError, match=rf"^{names} must be finite and positive"):
        planner.toward_goal(answer(), answer().best, *given)
