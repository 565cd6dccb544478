"""Bytes by axis and states of a rank on a mesh, against the laws of the chapters they are put together from."""

from dataclasses import replace

import pytest

from dtlib.theory import activations, ep, models, pp, sp, threed, tp, zero
from dtlib.theory.footprint import Setup

GPT = models.gpt("small", num_layers=8, hidden=64, num_heads=8, vocab=1000, seq=128, tied=False)
EXPERTS = replace(GPT, experts=models.Experts(num_experts=8, top_k=2, hidden=32))
CUBE = Setup(dp=2, pp=4, tp=2, micro_batch=3, micro_batches=8)


def sent(setup, model=GPT, **options):
    return threed.sent_bytes(model, setup, **options)


def test_an_axis_of_one_rank_sends_nothing():
    assert sent(Setup()).total == 0
    for axis in ("dp", "tp"):
        assert {name for name, size in sent(Setup(**{axis: 2})).parts.items() if size} == {axis}
    assert {name for name, size in sent(Setup(pp=2)).parts.items() if size} == {"pp"}
    assert {name for name, size in sent(Setup(cp=2)).parts.items() if size} == {"cp", "dp"}


@pytest.mark.parametrize(("p", "v"), [(2, 1), (4, 1), (4, 2), (8, 1)])
def test_all_stages_together_send_what_crosses_the_cuts(p, v):
    setup = Setup(pp=p, chunks=v, micro_batch=3, micro_batches=8)
    elements = pp.boundary_elements(p, 8, 3, 128, 64, v)
    assert sum(sent(setup, stage=stage).pp for stage in range(p)) == 2 * elements


def test_tied_ends_exchange_their_table_and_others_do_not():
    tied = replace(GPT, tied=True)
    for stage, more in enumerate((1, 0, 0, 1)):
        found = sent(CUBE, tied, stage=stage).pp - sent(CUBE, stage=stage).pp
        assert found == more * 2 * 64 * 500


@pytest.mark.parametrize("t", [2, 4, 8])
def test_an_inner_layer_sends_the_four_all_reduces_of_tensor_parallelism(t):
    setup = Setup(pp=4, tp=t, micro_batch=3, micro_batches=8)
    a_layer = 2 * (t - 1) / t * tp.layer_elements(3, 128, 64)
    assert sent(setup, stage=1).tp == 2 * 8 * 2 * a_layer  # bytes, micro-batches, layers
    first, last = (sent(setup, stage=stage).tp - sent(setup, stage=1).tp for stage in (0, 3))
    outside = tp.outside_elements(3, 128, 64)
    assert first == pytest.approx(2 * 8 * 2 * (t - 1) / t * outside.embedding)
    assert last == pytest.approx(2 * 8 * 2 * (t - 1) / t * (outside.head + outside.loss))


def test_split_tokens_send_as_much_between_layers_and_a_share_between_stages():
    plain, split = sent(CUBE, stage=1), sent(replace(CUBE, sequence_parallel=True), stage=1)
    assert split.pp == plain.pp / 2
    shared = 2 * (2 * 128 + 2 * 64)  # of two layers: two norms with biases, and the biases behind the sums
    assert split.tp - plain.tp == 2 * 8 * shared
    assert plain.tp == 2 * 8 * 2 * sp.sent_elements(3, 128, 64, 2)


@pytest.mark.parametrize("stage", range(4))
def test_micro_batches_cost_what_the_stage_of_zero_says(stage):
    one, many = (sent(replace(CUBE, zero=stage, micro_batches=m), stage=1).dp for m in (4, 8))
    mine = threed.state_bytes(GPT, replace(CUBE, recipe="fp32"), stage=1).weights / 4
    parts = zero.traffic(2 * mine, 2, stage)
    assert one == {2: 4 * parts.reduce_scatter + parts.gather_updated, 3: 4 * parts.total}.get(stage, parts.total)
    assert many - one == {2: 4 * parts.reduce_scatter, 3: 4 * parts.total}.get(stage, 0)


def test_cp_shares_the_batch_with_dp_and_leaves_each_rank_fewer_tokens():
    four, both = sent(Setup(dp=4, tp=2)), sent(Setup(dp=2, tp=2, cp=2))
    assert (four.dp, four.tp / 2) == (both.dp, both.tp)
    assert both.cp == sent(Setup(dp=2, cp=2)).cp / 2  # tp shares the heads of keys


def test_experts_are_summed_over_those_that_hold_them_and_sent_tokens_for_each_layer():
    plain = Setup(dp=8, pp=4, micro_batch=3, micro_batches=8)
    one, four = (sent(replace(plain, ep=n), EXPERTS, stage=1) for n in (1, 4))
    layers, routed = 2, 2 * 8 * 2 * 64 * 32  # of two layers, eight experts of two matrices
    assert one.ep == 0
    assert one.dp - four.dp == pytest.approx(2 * 2 * (7 / 8 * routed - 1 / 2 * routed / 4))
    tokens, visit = 3 * 128, 8 + 4 + 4
    step = ep.step_bytes(tokens, 64, 8, 2, 4, visit_bytes=visit).total
    counts = 3 * (1 + 8 // 4) * 8
    assert four.ep == pytest.approx(8 * layers * (step + counts))
    again = sent(replace(plain, ep=4, recompute="full"), EXPERTS, stage=1).ep
    assert again - four.ep == pytest.approx(8 * layers * (step / 2 + counts + tokens * 2 * 3 / 4 * visit / 4))


def test_split_experts_send_as_an_mlp_and_their_weights_gradients():
    """A layer of experts is 8 phases over tp, 10 where a dense one gathers again 2 of them, and k numbers a token."""
    two = Setup(tp=2, micro_batch=3, micro_batches=4)
    weights = 2 * (1 / 2) * 4 * 8 * (3 * 128) * 2 * 4  # micro-batches, layers, tokens, choices, bytes
    for options in ({}, {"recompute": "full"}, {"recompute": "selective"}):
        setup = replace(two, **options)
        assert sent(setup, EXPERTS).tp - sent(setup).tp == pytest.approx(weights)
    split, phase = replace(two, sequence_parallel=True), 1 / 2 * 4 * 8 * (3 * 128) * 64 * 2
    behind = 4 * 8 * 64 * 2  # biases behind MLPs, which experts lack
    assert sent(split, EXPERTS).tp - sent(split).tp == pytest.approx(weights - behind)
    again = {"gather_again": True}
    assert sent(split, EXPERTS, **again).tp - sent(split, **again).tp == pytest.approx(weights - behind - phase)
    assert sent(replace(two, dp=4, ep=4), EXPERTS).ep == sent(replace(two, tp=1, dp=4, ep=4), EXPERTS).ep


def test_the_crossings_are_where_a_layer_sends_as_much():
    deeper = replace(GPT, num_layers=16)
    for dp, t, tokens in ((2, 2, 96), (8, 4, 56), (3, 8, 128 / 7)):
        assert threed.tp_over_dp_tokens(64, dp, t) == pytest.approx(tokens)
        setup = Setup(dp=dp, tp=t, micro_batch=1, micro_batches=2)
        more = {axis: sent(setup, deeper).parts[axis] - sent(setup).parts[axis] for axis in ("dp", "tp")}
        matrices = 8 * 2 * 2 * (dp - 1) / dp * 12 * 64**2 / t  # of eight layers, norms and biases left out
        assert more["dp"] == pytest.approx(matrices, rel=0.1)
        assert more["tp"] / matrices == pytest.approx(256 / tokens)
    at = threed.pp_over_dp_tokens(64, 8, 2, tp=2)
    inner = sent(Setup(dp=8, pp=4, tp=2, micro_batch=1, micro_batches=8), stage=1)
    matrices = 2 * 2 * 2 * 7 / 8 * 12 * 64**2 / 2
    assert inner.pp / matrices == pytest.approx(8 * 128 / at)


def test_states_are_cut_by_layers_and_matrices_and_spread_by_zero():
    inner = threed.state_bytes(GPT, CUBE, stage=1)
    layer = models.layer_of_rank(GPT, 2).total
    assert inner.weights == 2 * 2 * layer
    spread = threed.state_bytes(GPT, replace(CUBE, zero=1, cp=4), stage=1)
    assert spread.weights == inner.weights
    assert spread.optimizer == inner.optimizer / 8
    whole = sum(threed.state_bytes(GPT, Setup(pp=4), stage=stage).total for stage in range(4))
    assert whole == 16 * models.model_parameters(GPT).total


def kept(setup, **options):
    return threed.activation_bytes(GPT, setup, **options)


def test_chunks_that_are_not_alike_are_in_flight_each_by_itself():
    """By hand: the last of two ranks has two micro-batches of its first chunk in flight, and one of its second."""
    model = replace(EXPERTS, experts=replace(EXPERTS.experts, first_dense=4))
    setup = Setup(pp=2, chunks=2, micro_batches=4, micro_batch=3)
    dense, sparse = (threed.layer_bytes(model, setup, kind) for kind in (False, True))
    assert sparse != dense
    alike = pp.most_in_flight("interleaved", 2, 4, 1, 2) * (2 * dense + 2 * sparse)
    fullest = max(2 * 2 * dense + 2 * sparse, 3 * 2 * dense)
    assert threed.activation_bytes(model, setup, stage=1) == fullest != alike


def test_activations_are_a_layers_by_axis():
    """Layers by pp, tokens by cp, the split part by tp, all of it with split tokens; dp has its own sequences."""
    one = activations.layer_activations(GPT, 3, attention="flash", dropout=False).total
    assert kept(Setup(micro_batch=3)) == kept(Setup(micro_batch=3, dp=4, zero=3)) == 8 * one
    assert kept(Setup(micro_batch=3, cp=4)) == 8 * one / 4
    halves = replace(CUBE, dp=1, pp=1)
    everywhere, split = sp.PLANS["none"][1:]
    dropped = 2  # bytes of masks, all of them outside of the matrices
    assert kept(halves) == 8 * 3 * 128 * 64 * (everywhere - dropped + split / 2)
    assert kept(replace(halves, sequence_parallel=True)) == 8 * one / 2
    gathered = kept(replace(halves, sequence_parallel=True), gather_again=False)
    assert gathered - 8 * one / 2 == 8 * 3 * 128 * 64 * 4 / 2  # two inputs of two bytes, instead of a half of each


@pytest.mark.parametrize(("schedule", "held"), [("1F1B", [4, 3, 2, 1]), ("GPipe", [8] * 4), ("ZB-H1", [4] * 4)])
def test_a_stage_keeps_the_micro_batches_in_flight(schedule, held):
    one = kept(replace(CUBE, pp=1, micro_batches=1)) / 4
    assert [kept(CUBE, stage=stage, schedule=schedule) / one for stage in range(4)] == held
    inner = kept(replace(CUBE, chunks=2), stage=1) / one
    assert inner == (4 + 2 * 2 + 1) / 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sent(replace(CUBE, cp=3)), r"seq must be a multiple of 2·cp=6 \(zig-zag\), not 128"),
        (lambda: replace(CUBE, cp=0), "cp must be at least 1, not 0"),
        (lambda: sent(CUBE, stage=4), "stage must be"),
        (
            lambda: sent(Setup(tp=8), replace(EXPERTS, experts=models.Experts(num_experts=8, top_k=2, hidden=12))),
            "tp of small must be one of 1, 2, 4",
        ),
        (lambda: sent(Setup(dp=3, ep=3), EXPERTS), "ep of small must divide its 8 experts; 3 does not"),
        (lambda: sent(Setup(tp=3)), "tp of small must be"),
        (lambda: sent(CUBE, element_bytes=0), "element_bytes must be finite and positive, not 0"),
        (lambda: threed.tp_over_dp_tokens(64, 2, 1), "tp must be at least 2, not 1"),
        (lambda: kept(replace(CUBE, cp=3)), r"seq must be a multiple of 2·cp=6 \(zig-zag\), not 128"),
        (lambda: kept(replace(CUBE, sequence_parallel=True, cp=32, tp=8)), "seq must be a multiple of cp·tp=256"),
        (lambda: kept(CUBE, stage=4), "stage must be"),
        (lambda: kept(CUBE, stage=-1), "stage must be"),
        (lambda: kept(CUBE, schedule="2F2B"), "schedule must be one of"),
    ],
)
def test_bad_arguments_are_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()
