"""The memory of one rank: every parameter somewhere, the published stack of layers, and what fits."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtlib.theory import activations, footprint, memory, models, zero
from dtlib.theory.footprint import Setup
from dtlib.theory.units import GB, GiB

counts = st.integers(1, 40)


# --- stages ----------------------------------------------------------------------------------------------------


@given(l=st.integers(1, 200), data=st.data())
def test_layers_of_the_stages_are_all_layers_and_even(l, data):
    p = data.draw(st.integers(1, l))
    layers = footprint.stage_layers(l, p)
    assert sum(layers) == l
    assert len(layers) == p
    assert max(layers) - min(layers) <= 1
    assert layers[-1] == min(layers)  # the last stage is among the short ones


@given(p=st.integers(2, 20), v=st.integers(1, 12), data=st.data())
def test_pieces_of_the_stages_are_all_layers_and_only_the_ends_may_be_empty(p, v, data):
    l = data.draw(st.integers(max(p, p * v - 2), 200 + p * v))
    stages = footprint.piece_layers(l, p, v)
    in_order = [stages[place % p][place // p] for place in range(p * v)]
    assert sum(in_order) == l
    assert max(in_order) - min(in_order) <= 1
    assert all(in_order[1:-1])
    if l % (p * v) == 0:
        assert set(in_order) == {l // (p * v)}


def test_llama_3_405b_interleaved_keeps_the_ends_for_embedding_and_head():
    first, *middle, last = footprint.piece_layers(126, 16, 8)
    assert (first[0], last[-1]) == (0, 0)
    assert all(pieces == [1] * 8 for pieces in middle)
    m = models.model("llama3-405b")
    stages = [footprint.stage_parameters(m, 8, 16, stage, 8) for stage in range(16)]
    layer = models.layer_of_rank(m, 8).total
    assert stages[0].total == 7 * layer + m.vocab * m.hidden // 8
    assert stages[5].total == 8 * layer
    found = footprint.memory_by_stage(m, Setup(dp=8, tp=8, pp=16, chunks=8, micro_batches=32))
    one = activations.layer_activations(m, 1, tp=8, attention="flash", dropout=False).total
    assert [each.layer_activations for each in found] == [one * (7 * 16 + 2 * (15 - i) + 1) for i in range(16)]


def test_what_norms_of_heads_and_of_the_embedding_add():
    m = models.model("qwen3-8b")
    bare = dataclasses.replace(m, qk_norms=False)
    added = activations.layer_activations(m, 1, tp=2).total - activations.layer_activations(bare, 1, tp=2).total
    assert added == 2 * m.seq * (m.query_width + m.kv_width) / 2  # the inputs of both norms, in two bytes
    bloom = models.model("bloom-7.1b")
    stages = [footprint.stage_parameters(bloom, 1, 2, stage).norms for stage in range(2)]
    assert stages[0] == stages[1]  # a norm behind the embedding here, one before the head there
    assert footprint.stage_parameters(bloom, 1, 1, 0) == models.model_parameters(bloom)


def test_llama_3_405b_has_one_layer_less_at_both_ends():
    assert footprint.stage_layers(126, 16) == [7, *[8] * 14, 7]
    assert footprint.stage_layers(7, 3) == [2, 3, 2]
    assert footprint.stage_layers(8, 3) == [3, 3, 2]


@pytest.mark.parametrize("name", ["tiny", "gpt2-1.5b", "llama3-70b", "llama3-405b", "megatron-h100-7.1b"])
@pytest.mark.parametrize("pp", [1, 2])
def test_without_tensor_parallelism_the_stages_hold_every_parameter_once(name, pp):
    m = models.model(name)
    parts = [footprint.stage_parameters(m, 1, pp, stage) for stage in range(pp)]
    twice = m.vocab * m.hidden if m.tied and pp > 1 else 0  # the last stage has its own copy of a tied embedding
    assert sum(part.total for part in parts) == models.model_parameters(m).total + twice
    if pp == 1:
        assert parts == [models.model_parameters(m)]


@pytest.mark.parametrize(("name", "tp"), [("llama3-70b", 8), ("korthikanti-22b", 8), ("tiny", 2), ("llama2-13b", 4)])
def test_tensor_parallel_ranks_share_matrices_and_repeat_the_rest(name, tp):
    m = models.model(name)
    whole, mine = models.model_parameters(m), footprint.stage_parameters(m, tp, 1, 0)
    repeated = mine.norms + mine.positions
    if m.biases:
        repeated += 2 * m.hidden * m.num_layers  # biases behind the second matrix of each pair
    assert tp * mine.total - (tp - 1) * repeated == whole.total


def test_key_heads_are_repeated_where_there_are_more_ranks():
    m = models.model("llama3-8b")
    on_8, on_32 = (footprint.stage_parameters(m, tp, 1, 0).attention for tp in (8, 32))
    h, d = m.hidden, m.head_dim
    assert on_8 == m.num_layers * (2 * h * 4 * d + 2 * h * d)
    assert on_32 == m.num_layers * (2 * h * d + 2 * h * d)


def test_a_vocabulary_that_does_not_divide_is_rounded_up():
    m = models.model("gpt2-124m")
    assert footprint.stage_parameters(m, 2, 1, 0).embedding == 25129 * 768


# --- micro-batches in flight -----------------------------------------------------------------------------------


def most_in_flight(orders):
    """Run each rank's list of forward (+1) and backward (-1) and say how many were open at once."""
    peaks = []
    for order in orders:
        alive = peak = 0
        for step in order:
            alive += step
            peak = max(peak, alive)
        assert alive == 0
        peaks.append(peak)
    return peaks


def one_f_one_b(p, m, v=1):
    """Megatron's order on each rank: forward passes to warm up, then one forward, one backward, then the rest."""
    for i in range(p):
        warm = min(m * v, p - i - 1 if v == 1 else 2 * (p - i - 1) + (v - 1) * p)
        yield [1] * warm + [1, -1] * (m * v - warm) + [-1] * warm


@given(p=st.integers(1, 12), m=st.integers(1, 30))
def test_1f1b_against_its_order_played(p, m):
    closed = [footprint.chunks_in_flight(p, i, m) for i in range(p)]
    assert closed == most_in_flight(one_f_one_b(p, m))


@given(p=st.integers(2, 8), rounds=st.integers(1, 4), v=st.integers(2, 4))
def test_interleaved_1f1b_against_its_order_played(p, rounds, v):
    m = p * rounds
    closed = [footprint.chunks_in_flight(p, i, m, v) for i in range(p)]
    assert closed == most_in_flight(one_f_one_b(p, m, v))
    if rounds > 1:
        assert closed[0] / (p * v) == pytest.approx(activations.first_stage_layers(p, v))


def embeddings_of(p, m, v):
    """Play the first rank and count open passes of its first chunk: chunks take turns, p micro-batches each."""
    forward = [(k // p) % v == 0 for k in range(m * v)] if v > 1 else [True] * m
    backward = [(k // p) % v == v - 1 for k in range(m * v)] if v > 1 else [True] * m
    order, done, back, alive, peak = next(iter(one_f_one_b(p, m, v))), 0, 0, 0, 0
    for step in order:
        if step > 0:
            alive, done = alive + forward[done], done + 1
        else:
            alive, back = alive - backward[back], back + 1
        peak = max(peak, alive)
    return peak


@given(p=st.integers(2, 8), rounds=st.integers(1, 4), v=st.integers(1, 4))
def test_embeddings_in_flight_against_the_order_played(p, rounds, v):
    assert footprint.embeddings_in_flight(p, p * rounds, v) == embeddings_of(p, p * rounds, v)


# --- a rank ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "setup", "gibibytes"),
    [
        ("22b", Setup(tp=8, micro_batch=4), 59.25),
        ("22b", Setup(tp=8, micro_batch=4, sequence_parallel=True, recompute="selective"), 9.5625),
        ("175b", Setup(tp=8, pp=8, chunks=3, micro_batches=64), 66.84375),
        (
            "175b",
            Setup(tp=8, pp=8, chunks=3, micro_batches=64, sequence_parallel=True, recompute="selective"),
            12.3515625,
        ),
    ],
)
def test_the_stack_of_layers_is_korthikantis_figure_1(name, setup, gibibytes):
    setup = dataclasses.replace(setup, attention="matrix", dropout=True)
    found = footprint.rank_memory(models.model(f"korthikanti-{name}"), setup, 0)
    assert found.layer_activations / GiB == pytest.approx(gibibytes, rel=1e-12)


@pytest.mark.parametrize("stage", zero.STAGES)
@pytest.mark.parametrize("recipe", sorted(memory.RECIPES))
def test_states_are_those_of_zero(stage, recipe):
    m = models.model("llama3-70b")
    found = footprint.rank_memory(m, Setup(dp=64, zero=stage, recipe=recipe))
    psi = models.model_parameters(m).total
    assert found.states == pytest.approx(zero.states(psi, 64, stage, recipe).total, rel=1e-12)
    assert found.total == pytest.approx(found.states + found.activations + found.transient, rel=1e-12)


def test_one_rank_alone_gathers_nothing():
    alone = footprint.rank_memory(models.model("tiny"), Setup(zero=3))
    assert alone.transient == alone.logits_gradient == alone.logits
    assert alone.states == 16 * models.model_parameters(models.model("tiny")).total
    assert all(isinstance(part, int) for part in alone.parts.values())


def test_stage_3_gathers_the_two_largest_modules():
    m = models.model("llama3-70b")
    layer, table = models.layer_parameters(m).total, m.vocab * m.hidden
    found = footprint.rank_memory(m, Setup(dp=8, zero=3))
    assert found.gathered_weights == 2 * (table + m.hidden + table)  # the head with the norm, and the embedding
    assert found.unsharded_gradients == 2 * (table + m.hidden)
    bare = footprint.rank_memory(m, Setup(dp=8, zero=3, prefetched=0))
    assert bare.gathered_weights == 2 * (table + m.hidden)
    middle = footprint.rank_memory(m, Setup(dp=8, zero=3, pp=4), 1)
    assert middle.gathered_weights == 2 * 2 * layer


def test_a_full_recompute_keeps_inputs_and_one_layer():
    m = models.model("llama3-8b")
    kept = 2 * m.seq * m.hidden
    full = footprint.rank_memory(m, Setup(recompute="full"))
    layer = activations.layer_activations(m, 1, attention="flash", dropout=False).total
    assert full.layer_activations == m.num_layers * kept
    assert full.layer_activations + full.recomputed_layer == activations.checkpointed_bytes(32, 1, layer, kept)
    none = footprint.rank_memory(m, Setup())
    assert none.layer_activations == m.num_layers * layer


def test_the_ends_of_the_model():
    m = models.model("korthikanti-22b")
    whole = footprint.rank_memory(m, Setup(tp=8, micro_batch=4, dropout=True, sequence_parallel=True))
    sbh = 4 * m.seq * m.hidden
    assert whole.embedding_activations == sbh / 8
    # the paper's 4 s b h/t (1 + V/h)
    assert whole.head_activations + whole.logits == 4 * sbh / 8 * (1 + m.vocab / m.hidden)
    first, *_, last = footprint.memory_by_stage(m, Setup(pp=4, micro_batches=8))
    assert (first.logits, first.head_activations) == (0, 0)
    assert last.logits == last.logits_gradient == 4 * m.seq * m.vocab
    assert last.total == last.states + last.activations + last.transient
    masks = footprint.rank_memory(m, Setup(pp=4, micro_batches=8, dropout=True), 0).embedding_activations
    assert masks == 4 * m.seq * m.hidden  # the paper's s b h p


def test_the_fullest_stage_is_the_default():
    m, setup = models.model("llama3-405b"), Setup(dp=64, tp=8, pp=16, zero=2, micro_batches=16)
    stages = footprint.memory_by_stage(m, setup)
    assert len(stages) == 16
    assert footprint.rank_memory(m, setup).total == max(stage.total for stage in stages)
    assert stages[1].total > stages[0].total  # 8 layers of 15 micro-batches are more than 7 of 16


# --- what fits -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(gigabytes=st.floats(1, 500), stage=st.sampled_from(zero.STAGES), dp=counts)
def test_the_largest_micro_batch_fits_and_the_next_does_not(gigabytes, stage, dp):
    m, setup, room = models.model("llama3-8b"), Setup(dp=dp, zero=stage), gigabytes * GB
    largest = footprint.largest_micro_batch(m, setup, room)
    if largest:
        assert footprint.fits(m, dataclasses.replace(setup, micro_batch=largest), room)
    assert not footprint.fits(m, dataclasses.replace(setup, micro_batch=largest + 1), room)


@pytest.mark.parametrize(
    ("name", "setup", "message"),
    [
        ("llama3-70b", {"tp": 3}, "tp of llama3-70b must be one of 1, 2, 4, 8, 16, 32, 64, .* not 3"),
        ("llama3-70b", {"pp": 81}, "pp of llama3-70b must be from 1 to 80, its layers, not 81"),
        (
            "llama3-70b",
            {"pp": 4, "chunks": 21},
            "chunks must be at most 20 with num_layers=80 on pp=4, not 21",
        ),
        ("llama3-70b", {"chunks": 2}, "chunks must be at most 1 with num_layers=80 on pp=1, not 2"),
        ("gpt3", {"seq": 4096}, "seq of gpt3-175b must be at most 2048, its learned positions, not 4096"),
        ("tiny", {"tp": 2, "seq": 63, "sequence_parallel": True}, "seq must be a multiple of tp=2 .* not 63"),
    ],
)
def test_what_a_model_cannot_do_says_what_it_can(name, setup, message):
    with pytest.raises(ValueError, match=message):
        footprint.rank_memory(models.model(name), Setup(**setup))


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ({"dp": 0}, "dp must be at least 1, not 0"),
        ({"dp": 1.5}, "dp must be a whole number of at least 1, not 1.5"),
        ({"zero": 4}, "zero must be 0, 1, 2 or 3, not 4"),
        ({"recipe": "17"}, "name '17' of recipe is unknown; there are 12-byte"),
        ({"recompute": "all"}, "recompute must be one of none, selective, full, not 'all'"),
        ({"attention": "none"}, "attention must be one of matrix, flash, not 'none'"),
        ({"pp": 4, "chunks": 2, "micro_batches": 6}, "micro_batches must be a multiple of pp=4 where chunks=2"),
        ({"prefetched": -1}, "prefetched must be at least 0, not -1"),
    ],
)
def test_setups_out_of_range_are_refused(setup, message):
    with pytest.raises(ValueError, match=message):
        Setup(**setup)


def test_stages_out_of_range_are_refused():
    with pytest.raises(ValueError, match="stages must be at most num_layers=2, not 3"):
        footprint.stage_layers(2, 3)
    with pytest.raises(ValueError, match="stage must be from 0 to 1, not 2"):
        footprint.stage_parameters(models.model("tiny"), 1, 2, 2)


def test_stages_that_are_cut_by_their_cost():
    """A model whose head weighs as much as several layers: a stage is full with its last layer, but for half a percent,
    and not before."""
    model = models.llama("by-cost", num_layers=16, hidden=64, num_heads=4, vocab=12 * 64 * 4, seq=32, ffn_hidden=170)
    layer = 4 * 64**2 + 3 * 170 * 64
    assert footprint.cost_layers(model, 1) == [16]
    for p in range(1, 17):
        cut, whole = footprint.cost_layers(model, p), 0.995 * (16 * layer + model.vocab * 64)
        assert sum(cut) == 16
        for stage, layers in enumerate(cut[:-1]):
            placed = sum(cut[: stage + 1])
            assert p * placed * layer >= (stage + 1) * whole or placed == 16
            assert layers == 0 or p * (placed - 1) * layer < (stage + 1) * whole
    by_cost = Setup(pp=4, balance="cost", recipe="18-byte", micro_batches=8)
    stages = footprint.memory_by_stage(model, by_cost)
    cut = footprint.cost_layers(model, 4)
    assert by_cost.pieces(model) == [[layers] for layers in cut]
    assert cut[0] > 4 > cut[3]
    even = footprint.memory_by_stage(model, dataclasses.replace(by_cost, balance="layers"))
    assert stages[0].layer_activations / even[0].layer_activations == pytest.approx(cut[0] / 4)
    norms = 2 * 64 * 2  # two norms a layer, two bytes a weight
    assert stages[0].weights - even[0].weights == (cut[0] - 4) * (2 * layer + norms)
    assert sum(each.weights for each in stages) == sum(each.weights for each in even)
    many = dataclasses.replace(by_cost, pp=16, zero=2, dp=2)
    assert footprint.memory_by_stage(model, many)[14].layer_activations == 0  # the head alone is left for the last


def test_what_cannot_be_cut_by_cost_is_refused():
    with pytest.raises(ValueError, match="balance must be one of layers, cost, not 'time'"):
        Setup(balance="time")
    with pytest.raises(ValueError, match="balance must be 'layers' where chunks=2 are interleaved, not 'cost'"):
        Setup(pp=2, chunks=2, balance="cost")
    with pytest.raises(ValueError, match="balance of mixtral-8x7b must be 'layers', since it has experts, not 'cost'"):
        Setup(pp=2, balance="cost").check(models.model("mixtral-8x7b"))
