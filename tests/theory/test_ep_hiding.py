"""Memory and time of a layer with experts: against parts counted one by one, published totals, and both sides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtlib.theory import cluster, ep, hardware, memory, zero

from .test_ep import close

H100 = hardware.accelerator("H100")
F, MEMORY = H100.half_flop_per_s, H100.memory_bytes_per_s
INSIDE, ACROSS = cluster.cluster("H100", 1), cluster.cluster("H100", 8)
PORT_A_NODE = cluster.cluster("H100", 8, ports_per_node=1)
ANY = [
    INSIDE,
    ACROSS,
    PORT_A_NODE,
    cluster.cluster("H100", 3, ranks_per_node=2),
    cluster.cluster("H100", 4, ranks_per_node=1),
]
V3 = ep.Layer(
    hidden=7168,
    expert_hidden=2048,
    num_experts=256,
    top_k=8,
    num_shared=1,
    groups=8,
    top_groups=4,
    dispatch_bytes_per_element=ep.fp8_bytes_per_element(),
)
COARSE = ep.Layer(hidden=4096, expert_hidden=14336, num_experts=192, top_k=2)


# --- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "sizes", "total", "active"),
    [  # as published, in billions: Mixtral 8x7B, DBRX, DeepSeek-V3
        (32, (4096, 14336, 8, 2), 46.7, 12.9),
        (40, (6144, 10752, 16, 4), 132, 36),
        (58, (7168, 2048, 256, 8), 671, 37),
    ],
)
def test_what_a_token_does_not_meet_is_what_published_totals_differ_by(layers, sizes, total, active):
    """Attention and embeddings, which are in both, cancel; both are rounded."""
    hidden, width, experts, k = sizes
    all_of_it = ep.layer_parameters(hidden, width, experts, num_shared=1)
    met = ep.layer_parameters(hidden, width, experts, top_k=k, num_shared=1)
    rounded = 0.1 if total < 100 else 1
    assert layers * (all_of_it.total - met.total) / 1e9 == pytest.approx(total - active, abs=rounded)
    assert (all_of_it.router, all_of_it.shared) == (met.router, met.shared) == (hidden * experts, 3 * hidden * width)


def test_a_layer_counted_by_its_matrices():
    assert ep.layer_parameters(8, 16, 4, num_shared=2, gated=False).parts == {
        "router": 32,
        "routed": 1024,
        "shared": 512,
    }
    assert ep.layer_parameters(8, 16, 4, top_k=4).total == ep.layer_parameters(8, 16, 4).total
    assert V3.expert_params == ep.layer_parameters(7168, 2048, 1).routed


@pytest.mark.parametrize("stage", zero.STAGES)
@pytest.mark.parametrize(("dp", "n"), [(8, 1), (8, 2), (8, 8), (6, 3), (1, 1)])
def test_states_are_those_of_parameters_dealt_out_one_by_one(dp, n, stage):
    """E experts and E others of one element each: rank r holds what its index says."""
    held, recipe = 24, memory.recipe("16-byte").per_param
    split = zero.split_parts(stage)

    def of_rank(count: int, copies: int) -> float:
        whole = sum(size for name, size in recipe.parts.items() if name not in split)
        return count * whole + (count / copies) * (recipe.total - whole)

    kept = ep.state_bytes(held, held, dp=dp, ep=n, stage=stage)
    close(kept.experts, of_rank(held // n, dp // n))
    close(kept.others, of_rank(held, dp))


def test_what_zero_splits_of_experts_does_not_depend_on_ep():
    whole = [ep.state_bytes(1e9, 0, dp=64, ep=n, stage=3).total for n in (1, 8, 64)]
    assert whole == pytest.approx([16e9 / 64] * 3)
    first = [ep.state_bytes(1e9, 0, dp=64, ep=n, stage=1).total for n in (1, 8, 64)]
    assert first == pytest.approx([4e9 / n + 12e9 / 64 for n in (1, 8, 64)])


# --- the all-to-all --------------------------------------------------------------------------------------------


def test_seconds_of_an_all_to_all_inside_a_node_counted_by_messages():
    t, n = 1000, 8
    for copies, many in (("expert", 8), ("rank", ep.expected_visits(256, 8, 8))):
        layer = replace(V3, groups=1, top_groups=None)
        message = t * 7168 * many / n
        seconds = 2 * 7 * INSIDE.inside_alpha_seconds + 7 * message * (1 + 4 / 128 + 2) / INSIDE.inside_bytes_per_s
        close(ep.all_to_all_seconds(INSIDE, layer, t, copies=copies), seconds)


@pytest.mark.parametrize("of", ANY, ids=lambda of: of.name)
def test_one_copy_a_node_by_its_two_steps_and_best_is_the_fastest(of):
    layer, t = COARSE, 500
    n, m, g = of.world_size, of.num_nodes, of.ranks_per_node
    inside = t * 4096 * ep.expected_visits(192, 2, n) * (g - 1) / g * 4 / of.inside_bytes_per_s
    across = t * 4096 * ep.expected_visits(192, 2, m) * (m - 1) / m * 4 / (of.across_bytes_per_s * of.num_ports / g)
    waits = 2 * (g - 1) * of.inside_alpha_seconds + 2 * (m - 1) * of.across_alpha_seconds
    close(ep.all_to_all_seconds(of, layer, t, copies="node"), inside + across + waits)
    each = [ep.all_to_all_seconds(of, layer, t, copies=copies) for copies in ep.COPIES]
    assert ep.all_to_all_seconds(of, layer, t) == min(each)
    assert each[1] <= each[0] * (1 + 1e-12)


def test_alone_nothing_travels():
    alone = cluster.cluster("H100", 1, ranks_per_node=1)
    assert ep.all_to_all_seconds(alone, COARSE, 100) == 0
    assert ep.hiding_width(alone, COARSE, F) == ep.hiding_tokens(alone, COARSE, F) == 0


# --- thresholds ------------------------------------------------------------------------------------------------


def test_the_width_of_one_node_is_the_equation():
    layer = replace(V3, num_shared=0, groups=1, top_groups=None)
    close(
        ep.hiding_width(INSIDE, layer, F, copies="expert"),
        7 / 8 * (1 + 4 / 128 + 2) * F / (6 * INSIDE.inside_bytes_per_s),
    )
    visits = ep.expected_visits(256, 8, 8)
    close(
        ep.hiding_width(INSIDE, replace(layer, num_shared=1, gated=False), F, copies="rank"),
        7 / 8 * visits / 9 * (1 + 4 / 128 + 2) * F / (4 * INSIDE.inside_bytes_per_s),
    )


@pytest.mark.parametrize("copies", [*ep.COPIES, "best"])
@pytest.mark.parametrize("of", ANY, ids=lambda of: of.name)
def test_at_the_width_bytes_and_products_take_as_long_whatever_tokens_and_hidden(of, copies):
    free = replace(of, inside_alpha_seconds=0.0, across_alpha_seconds=0.0)
    width = ep.hiding_width(of, COARSE, F, copies=copies)
    for hidden, tokens in ((512, 10), (4096, 10**4)):
        layer = replace(COARSE, hidden=hidden, expert_hidden=round(1000 * width), num_shared=3)
        products = 6 * hidden * width * 2 * tokens / F
        close(products, ep.all_to_all_seconds(free, layer, tokens, copies=copies), rel=1e-5)
    assert ep.hiding_width(of, replace(COARSE, expert_hidden=7), F, copies=copies) == pytest.approx(width)


@pytest.mark.parametrize("of", ANY, ids=lambda of: of.name)
def test_with_twice_as_many_choices_narrower_experts_hide_unless_each_has_a_copy(of):
    twice = replace(COARSE, top_k=4)
    few, more = ([ep.hiding_width(of, each, F, copies=c) for c in ep.COPIES] for each in (COARSE, twice))
    close(few[0], more[0])
    assert all(after < before for before, after in zip(few[1:], more[1:], strict=True))


@pytest.mark.parametrize("copies", [*ep.COPIES, "best"])
@pytest.mark.parametrize("of", ANY, ids=lambda of: of.name)
def test_from_so_many_tokens_on_nothing_is_exposed_and_with_fewer_something(of, copies):
    layer = replace(COARSE, expert_hidden=math.ceil(1.5 * ep.hiding_width(of, COARSE, F, copies=copies)))
    tokens = ep.hiding_tokens(of, layer, F, copies=copies)
    fast = 1e30  # of memory: products alone
    for factor in (1.01, 1.5, 10, 1000):
        assert ep.layer_seconds(of, layer, math.ceil(factor * tokens) + 1, F, fast, copies=copies).exposed == 0
    assert ep.layer_seconds(of, layer, math.floor(0.99 * tokens), F, fast, copies=copies).exposed > 0
    narrow = replace(COARSE, expert_hidden=math.floor(0.9 * ep.hiding_width(of, COARSE, F, copies=copies)))
    assert ep.hiding_tokens(of, narrow, F, MEMORY, copies=copies) == math.inf
    assert ep.layer_seconds(of, narrow, 10**7, F, MEMORY, copies=copies).exposed > 0


def test_tokens_of_one_node_are_the_equation():
    compute, sent = 6 * 7168 * 2048 * 9 / F, 7 / 8 * ep.expected_visits_limited(256, 8, 8, 4) * 7168 * 3.03125 / 450e9
    close(ep.hiding_tokens(INSIDE, V3, F, copies="rank"), 14 * INSIDE.inside_alpha_seconds / (compute - sent))


@settings(max_examples=40)
@given(tokens=st.integers(1, 10**5), memory_bytes_per_s=st.floats(1e11, 1e14))
def test_where_the_threshold_is_none_reading_the_weights_hides_few_tokens_as_well(tokens, memory_bytes_per_s):
    hides = ep.hiding_tokens(INSIDE, V3, F, memory_bytes_per_s)
    assert hides in (0, ep.hiding_tokens(INSIDE, V3, F))
    if hides == 0:
        assert ep.layer_seconds(INSIDE, V3, tokens, F, memory_bytes_per_s).exposed == 0


def test_a_card_that_reads_in_no_time_hides_few_tokens_no_more():
    assert ep.hiding_tokens(INSIDE, V3, F, MEMORY) == 0 < ep.hiding_tokens(INSIDE, V3, F, 30 * MEMORY)
    assert ep.layer_seconds(INSIDE, V3, 60, F, 30 * MEMORY).exposed > 0


def test_experts_wait_for_their_weights_below_the_reading_tokens():
    layer, n = replace(V3, num_shared=0), 64
    tokens = ep.reading_tokens(layer, n, F, MEMORY)
    close(tokens, 256 / n / 8 * F / MEMORY)  # two bytes a weight: F/M tokens an expert
    close(tokens * 8 * 6 * 7168 * 2048 / F, 256 / n * 3 * 7168 * 2048 * 2 / MEMORY)
    few, more = (ep.layer_seconds(ACROSS, layer, t, F, MEMORY).experts for t in (1, math.floor(tokens)))
    assert few == more < ep.layer_seconds(ACROSS, layer, math.ceil(tokens) + 1, F, MEMORY).experts


def test_what_the_module_says_of_a_large_model():
    """On H100 experts 2,048 wide hide their all-to-all inside a node and not across, where 4,300 are asked for."""
    assert ep.hiding_width(INSIDE, V3, F) < 2048 < ep.hiding_width(ACROSS, V3, F) < ep.hiding_width(PORT_A_NODE, V3, F)
    assert round(ep.hiding_width(ACROSS, V3, F), -2) == 4300
    assert round(ep.hiding_width(ACROSS, V3, F, copies="rank"), -2) == 7200


def test_beside_a_dense_model_of_equal_compute():
    """Many tokens inside a node cost what the dense one costs; across it is the travel; one token reads more."""
    assert ep.layer_seconds(INSIDE, V3, 10**5, F, MEMORY).over_dense == pytest.approx(1)
    far = ep.layer_seconds(ACROSS, V3, 10**5, F, MEMORY)
    close(far.over_dense, far.travel / far.dense)
    close(far.over_dense, ep.hiding_width(ACROSS, V3, F) / 2048, rel=0.01)
    one = ep.layer_seconds(INSIDE, replace(V3, num_shared=0), 1, F, MEMORY)
    close(one.experts / one.dense, 256 / 8 / 8)


@pytest.mark.parametrize("of", [INSIDE, ACROSS, PORT_A_NODE], ids=lambda of: of.name)
@pytest.mark.parametrize("t", [1, 100, 10**4])
def test_two_halves_in_turn_take_what_the_experts_and_the_exposed_travel_say(of, t):
    """A half's combine and next dispatch are on the links while the experts compute the other half, layer by layer."""
    layer, layers = ep.layer_seconds(of, V3, t, F, MEMORY), 10**4
    experts_free, links_free, arrived = 0.0, 0.0, [0.0, 0.0]
    for number in range(2 * layers):
        experts_free = max(experts_free, arrived[number % 2]) + layer.experts
        links_free = max(links_free, experts_free) + layer.travel
        arrived[number % 2] = links_free
    close(layer.experts + layer.exposed, experts_free / (2 * layers), rel=0.001)


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ep.layer_parameters(0, 1, 1), "hidden must be at least 1"),
        (lambda: ep.layer_parameters(1, 1, 1, gated=1), "gated must be True or False"),
        (lambda: ep.layer_parameters(1, 1, 2, top_k=3), "top_k must be at most num_experts"),
        (lambda: ep.state_bytes(1, 1, dp=8, ep=3), "ep must divide dp, 8; 3 does not"),
        (lambda: ep.state_bytes(1, 1, dp=8, ep=2, stage=4), "stage must be"),
        (lambda: replace(V3, hidden=0), "hidden must be at least 1"),
        (lambda: replace(V3, top_k=300), "top_k must be at most"),
        (lambda: replace(V3, groups=7), "groups must divide"),
        (lambda: replace(V3, weight_bytes=0), "weight_bytes must be"),
        (lambda: ep.all_to_all_seconds(INSIDE, V3, 1, copies="all"), "copies must be one of"),
        (lambda: ep.hiding_width(INSIDE, V3, 0), "flops_per_s must be"),
        (lambda: ep.hiding_tokens(INSIDE, V3, F, 0), "memory_bytes_per_s must be"),
        (lambda: ep.reading_tokens(V3, 0, F, MEMORY), "ep must be at least 1"),
        (lambda: ep.layer_seconds(INSIDE, V3, 0, F, MEMORY), "tokens must be at least 1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
