"""Closed forms of multi-token prediction against counts, simulated pipelines, drawn coins and published rows."""

import csv
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlib.theory import memory, models, mtp, pp

DATA = Path(__file__).parents[2] / "chapters" / "data" / "mtp_speculative.csv"
shares = st.floats(0, 0.99)
costs = st.floats(0.005, 2)
MIXED = [name for name, each in models.MODELS.items() if each.experts]
FIRST_DENSE = replace(models.model("deepseek-v3"), mtp_modules=0)


# --- what heads weigh ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-124m"])
def test_one_token_is_a_plain_model_and_each_further_one_costs_the_same(name):
    for kind in mtp.KINDS:
        assert mtp.extra_parameters(name, 1, kind) == mtp.extra_flops_per_token(name, 1, kind) == 0
        assert mtp.extra_parameters(name, 4, kind) == 3 * mtp.extra_parameters(name, 2, kind)
        assert mtp.extra_flops_per_token(name, 4, kind) == pytest.approx(3 * mtp.extra_flops_per_token(name, 2, kind))


def test_a_module_has_a_projection_and_two_norms_more_than_a_head():
    h = models.model("llama3-8b").hidden
    alone, behind = (mtp.extra_parameters("llama3-8b", 2, kind) for kind in mtp.KINDS)
    assert behind - alone == 2 * h * h + 2 * h
    alone, behind = (mtp.extra_flops_per_token("llama3-8b", 2, kind) for kind in mtp.KINDS)
    assert behind - alone == 4 * h * h


def test_deepseek_v3s_module_is_what_its_weights_file_says_to_one_percent():
    """11.5 B unique parameters, the shared embedding and head left out (README_WEIGHTS.md); counted: 11.6 B."""
    counted = mtp.extra_parameters("deepseek-v3", 2, "sequential")
    attention = 7168 * (1536 + 576 + 128 * 128) + 1536 * 128 * 192 + 512 * 128 * 256
    experts = 257 * 3 * 7168 * 2048 + 256 * 7168
    assert (
        counted == attention + experts + 2 * 7168**2 + 5 * 7168 + 1536 + 512
    )  # norms of the layer, of ranks, of joins
    assert counted == pytest.approx(11.5e9, rel=0.01)


@pytest.mark.parametrize("name", MIXED)
def test_a_module_of_a_model_with_experts_is_what_that_model_has(name):
    """The whole model's count and its products, with modules and without."""
    for n in (2, 3):
        plain, longer = (replace(models.model(name), mtp_modules=each) for each in (0, n - 1))
        assert mtp.extra_parameters(name, n, "sequential") == models.model_parameters(longer).mtp
        more = memory.forward_flops_per_token(longer).total - memory.forward_flops_per_token(plain).total
        assert mtp.extra_flops_per_token(name, n, "sequential") == pytest.approx(more)
        alone = mtp.extra_parameters(name, n) + (n - 1) * (2 * plain.hidden**2 + 2 * models.norm_parameters(plain))
        assert alone == models.model_parameters(longer).mtp


def test_a_head_is_of_the_kind_of_the_last_layer():
    experts = models.Experts(num_experts=8, top_k=2, hidden=64, every=2)
    sizes = {"num_layers": 4, "hidden": 32, "num_heads": 4, "ffn_hidden": 96, "vocab": 50, "seq": 16}
    dense = replace(models.llama("", **sizes), experts=experts)  # layers 0 and 2 have experts
    sparse = replace(dense, experts=replace(experts, first_dense=1))  # 1 and 3
    assert mtp.extra_parameters(dense, 2) == 4 * 32**2 + 3 * 32 * 96 + 3 * 32
    assert mtp.extra_parameters(sparse, 2) == 4 * 32**2 + 8 * 3 * 32 * 64 + 8 * 32 + 3 * 32
    products = 4 * 32**2 + 2 * 32 * 16
    assert mtp.extra_flops_per_token(dense, 2) == 2 * (products + 3 * 32 * 96 + 50 * 32)
    assert mtp.extra_flops_per_token(sparse, 2) == 2 * (products + 2 * 3 * 32 * 64 + 8 * 32 + 50 * 32)


def test_in_turn_the_number_of_heads_drops_out_of_the_logits():
    assert mtp.logits_bytes(2, 8, 100, 4) == 4 * 2 * 8 * 100 * 4
    assert {mtp.logits_bytes(2, 8, 100, n, in_turn=True) for n in (1, 2, 4, 100)} == {2 * 8 * 100 * 4}


# --- pipelines -------------------------------------------------------------------------------------------------


def test_weight_of_the_last_stage_in_layers():
    forward = memory.forward_flops_per_token("llama3-8b")
    layer = (forward.total - forward.head) / 32
    weight = partial(mtp.last_stage_layers, "llama3-8b")
    assert weight(1, "sequential") == pytest.approx(forward.head / layer)
    assert weight(1) == pytest.approx(forward.head / layer + 1)  # its layer stays, too
    assert weight(3) == pytest.approx(3 * forward.head / layer + 3)
    assert weight(3, "sequential") == pytest.approx(weight(3) - 1 + 2 * 4 * 4096**2 / layer)
    for kind in mtp.KINDS:  # a fourth product with the head beside three
        assert weight(3, kind, again=True) == pytest.approx(weight(3, kind) + forward.head / layer)


@pytest.mark.parametrize("kind", mtp.KINDS)
@pytest.mark.parametrize("name", ["llama3-8b", *MIXED])
def test_the_trunk_and_what_stays_are_all_of_the_model(name, kind):
    costs = mtp.trunk_costs(name, 3, kind)
    model = replace(models.model(name), mtp_modules=0)
    assert len(costs) == model.num_layers + (kind == "sequential")
    whole = memory.forward_flops_per_token(model).total + mtp.extra_flops_per_token(name, 3, kind)
    unit = mtp.extra_flops_per_token(name, 2) - memory.forward_flops_per_token(model).head
    assert sum(costs) == pytest.approx(whole / unit)


def every_cut(layers: int, stages: int):
    for ends in combinations_with_replacement(range(layers + 1), stages - 1):
        yield np.diff([0, *ends, layers]).tolist()


@pytest.mark.parametrize("kind", mtp.KINDS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_no_other_cut_has_a_faster_slowest_stage(kind, n):
    """Layers with experts and without; each stage but the last has a layer."""
    model = replace(FIRST_DENSE, num_layers=6, ffn_hidden=40_000)
    costs = mtp.trunk_costs(model, n, kind)
    assert len(set(costs)) == 3
    for stages in range(1, len(costs) + 1):
        cuts = [cut for cut in every_cut(len(costs) - 1, stages) if all(cut[:-1])]
        best = mtp.best_stages(costs, stages)
        assert best in cuts
        assert max(mtp.stage_costs(costs, best)) == pytest.approx(min(max(mtp.stage_costs(costs, cut)) for cut in cuts))


@given(layers=st.integers(1, 60), last=st.floats(0.1, 20), stages=st.integers(1, 40))
def test_beyond_the_threshold_the_last_stage_sets_the_pace_without_a_layer(layers, last, stages):
    stages, costs = min(stages, layers + 1), [*[1.0] * layers, last]
    counts = mtp.best_stages(costs, stages)
    assert sum(counts) == layers
    each = mtp.stage_costs(costs, counts)
    assert each == pytest.approx([*counts[:-1], counts[-1] + last])
    slowest = max(each)
    if stages >= mtp.most_stages(layers, last) + 1e-9:
        assert (layers + last) / stages <= last + 1e-9 <= slowest + 2e-9
    else:
        assert (layers + last) / stages > last - 1e-9
    if stages * np.ceil(last) >= layers + stages * last and last == np.ceil(last):
        assert slowest == last


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@given(
    costs=st.lists(st.tuples(*[st.floats(0.1, 3)] * 3), min_size=1, max_size=5), more=st.floats(0, 3),
    m=st.integers(1, 9),
)  # fmt: skip
def test_the_bubble_of_unlike_stages_is_the_simulated_one(schedule, costs, more, m):
    """GPipe with one stage that is the slowest in both directions; 1F1B where it is the last. No one proportion."""
    parts = [*costs, tuple(max(each) + more for each in zip(*costs, strict=True))]
    if schedule == "GPipe":
        parts = parts[::-1]
    p = len(parts)
    played = pp.simulate(pp.SCHEDULES[schedule](p, m), *([each[way] for each in parts] for way in range(3)))
    assert mtp.bubble_of_stages([sum(each) for each in parts], m) == pytest.approx(played.bubble, abs=1e-9)


def test_a_slow_middle_is_another_law_under_1f1b():
    each = [1.0, 3.0, 1.0, 1.0]
    played = pp.simulate(pp.one_f_one_b(4, 8), each, each, each)
    assert played.bubble != pytest.approx(mtp.bubble_of_stages(each, 8), abs=1e-3)


@given(p=st.integers(1, 16), m=st.integers(1, 64))
def test_equal_stages_have_the_plain_bubble(p, m):
    assert mtp.bubble_of_stages([1.5] * p, m) == pytest.approx(pp.bubble_fraction(p, m))


def test_no_number_of_micro_batches_hides_a_heavy_stage():
    each = [4.0, 4.0, 4.0, 6.0]
    assert mtp.bubble_of_stages(each, 10**7) == pytest.approx(1 - 4.5 / 6, abs=1e-5)
    assert all(mtp.bubble_of_stages(each, m) > 1 - 4.5 / 6 for m in (1, 2, 3, 64))


# --- drafts ----------------------------------------------------------------------------------------------------


@given(q=shares, k=st.integers(0, 60))
def test_accepted_tokens_are_one_and_the_chances_of_each(q, k):
    assert mtp.accepted_tokens(q, k) == pytest.approx(sum(q**i for i in range(k + 1)))
    assert mtp.accepted_tokens(1, k) == k + 1
    assert mtp.accepted_tokens(0, k) == 1


@pytest.mark.parametrize(("q", "k"), [(0.85, 1), (0.6, 4), (0.95, 3)])
def test_coins_accept_as_many(q, k):
    """Something that does not know the law: a coin for each drafted token, up to the first that falls wrong."""
    coins = np.random.default_rng(0).random((200_000, k)) < q
    tokens = 1 + coins.cumprod(axis=1).sum(axis=1)
    assert tokens.mean() == pytest.approx(mtp.accepted_tokens(q, k), rel=0.01)
    assert tokens.mean() != pytest.approx(1.03 * mtp.accepted_tokens(q, k), rel=0.01)


@pytest.mark.parametrize(("q", "k", "rho"), [(0.85, 1, 0.5), (0.6, 4, 0.3), (0.5, 6, 0.05), (0.9, 3, 0.8)])
def test_coins_of_easy_and_hard_passes_accept_more(q, k, rho):
    """Each pass draws its own coin; the law of independent coins is too low but for the first guess."""
    draw, spread = np.random.default_rng(0), 1 / rho - 1
    coins = draw.random((400_000, k)) < draw.beta(q * spread, (1 - q) * spread, (400_000, 1))
    tokens = 1 + coins.cumprod(axis=1).sum(axis=1)
    assert tokens.mean() == pytest.approx(mtp.accepted_tokens(q, k, correlation=rho), rel=0.005)
    assert (k == 1) == (tokens.mean() < 1.01 * mtp.accepted_tokens(q, k))
    if k > 1:
        assert np.corrcoef(coins[:, 0], coins[:, 1])[0, 1] == pytest.approx(rho, abs=0.01)


@given(q=shares, k=st.integers(0, 60), rho=shares)
def test_a_correlation_never_earns_less(q, k, rho):
    found = mtp.accepted_tokens(q, k, correlation=rho)
    assert mtp.accepted_tokens(q, k) * (1 - 1e-9) <= found <= (1 + k * q) * (1 + 1e-9)
    assert mtp.accepted_tokens(q, k, correlation=1) == pytest.approx(1 + k * q)


@given(q=shares, cost=costs, check=st.sampled_from([1.0, 1.1, 1.7]))
def test_no_other_length_is_faster_than_the_best(q, cost, check):
    best = mtp.best_draft(q, cost, check_cost=check)
    rates = [mtp.speedup(q, k, cost, check_cost=check) for k in range(400)]
    assert rates[best] == pytest.approx(max(rates), rel=1e-9)
    assert all(rate < rates[best] for rate in rates[:best])


@given(q=shares, cost=costs, k=st.integers(1, 50))
def test_below_the_break_even_no_length_pays(q, cost, k):
    if q <= mtp.break_even_acceptance(cost):
        assert mtp.best_draft(q, cost) == 0
        assert mtp.speedup(q, k, cost) <= 1 + 1e-12
    elif q > mtp.break_even_acceptance(cost) + 1e-6:
        assert mtp.best_draft(q, cost) >= 1
        assert mtp.speedup(q, 1, cost) > 1


def test_with_a_dear_check_a_longer_draft_may_pay_where_one_token_does_not():
    assert mtp.break_even_acceptance(0.01, check_cost=1.95) > 0.95
    assert mtp.speedup(0.95, 1, 0.01, check_cost=1.95) < 1 < mtp.speedup(0.95, 5, 0.01, check_cost=1.95)


# --- published -------------------------------------------------------------------------------------------------


def rows() -> list[dict[str, str]]:
    with DATA.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", [row for row in rows() if row["acceptance_p_printed"]], ids=lambda row: row["source"])
def test_published_chains_are_no_faster_than_the_law_allows(row):
    q, k = float(row["acceptance_p_printed"]), int(row["draft_tokens_k"])
    free = mtp.speedup(q, k, 0)
    assert float(row["tokens_per_step_predicted"]) == pytest.approx(free, abs=0.005)
    assert 0.97 * free <= float(row["speedup_printed"]) <= free * (1 + 1e-12)


def test_trees_have_printed_no_acceptance_that_the_law_could_use():
    assert all(not row["acceptance_p_printed"] for row in rows() if row["draft_tokens_k"] == "tree")


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mtp.extra_parameters("gpt2-124m", 0), "predicted must be at least 1, not 0"),
        (
            lambda: mtp.extra_parameters("gpt2-124m", 2, "tree"),
            "kind must be one of independent, sequential, not 'tree'",
        ),
        (lambda: mtp.extra_flops_per_token("gpt2-124m", 2, "tree"), "kind must be one of"),
        (lambda: mtp.last_stage_layers("gpt2-124m", 2, "tree"), "kind must be one of"),
        (lambda: mtp.last_stage_layers("gpt2-124m", 2, again=1), "again must be True or False"),
        (lambda: mtp.logits_bytes(1, 1, 0, 1), "vocab must be"),
        (lambda: mtp.logits_bytes(1, 1, 1, 0, in_turn=True), "predicted must be"),
        (lambda: mtp.logits_bytes(1, 1, 1, 1, in_turn=1), "in_turn must be True or False"),
        (lambda: mtp.most_stages(3, 0), "last_layers must be"),
        (lambda: mtp.best_stages([1, 1, 1, 1.0], 5), "stages must be at most"),
        (lambda: mtp.best_stages([1, -1], 1), "costs must be"),
        (lambda: mtp.stage_costs([1, 1, 2.0], [1, 2]), "layers must add up to the 2 of the trunk"),
        (lambda: mtp.stage_costs([1, 1, 2.0], [3, -1]), "layers must be"),
        (lambda: mtp.bubble_of_stages([], 1), "costs must have a number for each stage"),
        (lambda: mtp.bubble_of_stages([0.0], 1), "costs must be"),
        (lambda: mtp.accepted_tokens(1.1, 1), "acceptance must be from 0 to 1, not 1.1"),
        (lambda: mtp.accepted_tokens(0.5, -1), "drafted must be"),
        (lambda: mtp.accepted_tokens(0.5, 1, correlation=1.1), "correlation must be from 0 to 1, not 1.1"),
        (lambda: mtp.speedup(0.5, 1, -0.1), "draft_cost must be"),
        (lambda: mtp.speedup(0.5, 1, 0.1, check_cost=0), "check_cost must be"),
        (lambda: mtp.break_even_acceptance(0.1, check_cost=0.9), "check_cost must be at least 1"),
        (lambda: mtp.best_draft(1, 0.1), "acceptance must be below 1 and draft_cost above 0"),
        (lambda: mtp.best_draft(0.5, 0), "acceptance must be below 1 and draft_cost above 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
