"""Routing and what it sends, against every routing there is, drawn ones, and published payloads."""

from __future__ import annotations

import csv
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from dtlib.theory import ep
from dtlib.theory.units import GB, us

DATA = Path(__file__).parents[2] / "chapters" / "data"
SIZES = [(1, 1, 1), (4, 1, 2), (4, 2, 4), (6, 3, 1), (6, 2, 3), (6, 6, 3), (8, 3, 8), (5, 2, 3), (7, 3, 4), (3, 2, 5)]
V3 = {"groups": 8, "top_groups": 4}


def close(law: float, seen: float, rel: float = 1e-9) -> None:
    """Both agree, and so closely that a law 3 % off would not."""
    assert seen == pytest.approx(law, rel=rel)
    assert all(seen != pytest.approx(off * law, rel=rel) for off in (1.03, 1 / 1.03))


@cache
def owners(e: int, n: int) -> list[int]:
    """Whose each expert is: they lie in order, one more on the first ranks where N does not divide E."""
    return [r for r, own in enumerate(np.array_split(np.arange(e), n)) for _ in own]


def rank_of(expert: int, e: int, n: int) -> int:
    return owners(e, n)[expert]


def visited(experts, e: int, n: int) -> set[int]:
    return {rank_of(int(each), e, n) for each in experts}


# --- routing ---------------------------------------------------------------------------------------------------


def test_scores_are_finite_for_any_logits():
    logits = np.array([[0.0, 1.0, -1.0], [800.0, 0.0, -800.0]])
    soft, gate = ep.scores(logits), ep.scores(logits, "sigmoid")
    np.testing.assert_allclose(soft[0], np.exp([0, 1, -1]) / np.exp([0, 1, -1]).sum(), rtol=1e-12)
    np.testing.assert_allclose(soft.sum(axis=1), 1)
    np.testing.assert_allclose(gate[0], 1 / (1 + np.exp([0, -1, 1])), rtol=1e-12)
    np.testing.assert_array_equal(gate[1], [1, 0.5, 0])


def test_a_tie_goes_to_the_lower_index_and_weights_add_up_to_the_scale():
    routed = ep.route([[0.2, 0.4, 0.4, 0.4], [0.1, 0.1, 0.1, 0.1]], 2, scale=2.5)
    np.testing.assert_array_equal(routed.experts_tk, [[1, 2], [0, 1]])
    np.testing.assert_allclose(routed.weights_tk, 1.25)
    np.testing.assert_allclose(ep.route([[0.2, 0.4, 0.1, 0.3]], 2, normalised=False).weights_tk, [[0.4, 0.3]])
    assert not ep.route(np.zeros((1, 3)), 2).weights_tk.any()  # no score at all: no weight, and no nan


def test_a_bias_decides_who_is_chosen_and_not_the_weight():
    s = [[0.5, 0.3, 0.2]]
    biased = ep.route(s, 2, bias_e=[-1.0, 0.0, 0.0])
    np.testing.assert_array_equal(biased.experts_tk, [[1, 2]])
    np.testing.assert_allclose(biased.weights_tk, [[0.6, 0.4]])


def test_groups_are_judged_by_their_best_scores():
    s = [[0.9, 0.0, 0.5, 0.5, 0.3, 0.2]]
    np.testing.assert_array_equal(ep.route(s, 2, groups=3, top_groups=1).experts_tk, [[2, 3]])
    np.testing.assert_array_equal(ep.route(s, 2, groups=3, top_groups=1, group_score=1).experts_tk, [[0, 1]])
    np.testing.assert_array_equal(ep.route(s, 2, groups=3, top_groups=2).experts_tk, [[0, 2]])
    np.testing.assert_array_equal(ep.route(s, 2, groups=3).experts_tk, ep.route(s, 2).experts_tk)


def test_every_choice_is_counted():
    assert ep.loads([[0, 2], [2, 3]], 5).tolist() == [1, 0, 2, 1, 0]
    s = np.random.default_rng(1).random((50, 8))
    assert ep.loads(ep.route(s, 8).experts_tk, 8).tolist() == [50] * 8


# --- what is visited and sent ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("e", "k", "n"), SIZES)
def test_visits_are_those_of_all_routings_also_where_ranks_do_not_divide_experts(e, k, n):
    sets = list(combinations(range(e), k))
    close(ep.expected_visits(e, k, n), sum(len(visited(each, e, n)) for each in sets) / len(sets))


@pytest.mark.parametrize(
    ("e", "k", "g", "m", "parts"), [(8, 2, 4, 2, 4), (8, 3, 4, 2, 8), (8, 3, 4, 3, 2), (12, 2, 6, 3, 2)]
)
def test_limited_visits_are_those_of_all_allowed_routings(e, k, g, m, parts):
    seen = [
        len(visited(each, e, parts))
        for allowed in combinations(range(g), m)
        for each in combinations([i for i in range(e) if rank_of(i, e, g) in allowed], k)
    ]
    close(ep.expected_visits_limited(e, k, g, m, parts), sum(seen) / len(seen))


def test_limits_at_their_ends():
    assert ep.expected_visits(8, 8, 4) == 4  # k = E: everywhere
    assert ep.expected_visits(8, 1, 4) == pytest.approx(1)
    assert ep.expected_visits(8, 3, 8) == pytest.approx(3)  # N = E: each choice is a rank of its own
    assert ep.expected_visits(8, 5, 1) == 1
    for parts in (2, 4, 8):
        close(ep.expected_visits_limited(16, 3, 4, 4, parts), ep.expected_visits(16, 3, parts))
    assert ep.expected_visits_limited(16, 3, 4, 1) == 1


def test_a_token_visits_no_more_than_its_choices_and_the_places_there_are():
    """And twice as many choices visit less than twice as many places, where a place has several experts."""
    for e in range(1, 25):
        for n in (each for each in range(1, e + 1) if e % each == 0):
            visits = [ep.expected_visits(e, k, n) for k in range(1, e + 1)]
            assert all(v <= min(k, n) * (1 + 1e-12) for k, v in enumerate(visits, 1))
            more = [visits[2 * k - 1] / visits[k - 1] for k in range(1, e // 2 + 1)]
            assert all(each < 2 - 1e-9 if n < e else each == pytest.approx(2) for each in more)
    for m in range(1, 5):
        for k in range(1, 4 * m + 1):
            assert ep.expected_visits_limited(16, k, 4, m) <= min(k, m) * (1 + 1e-12)


def test_a_router_that_picks_the_best_groups_visits_more_of_them_than_drawn_ones():
    s = np.random.default_rng(0).random((4000, 256))
    chosen = ep.route(s, 8, **V3).experts_tk
    seen = np.mean([len(set(row)) for row in chosen // 32])
    drawn = ep.expected_visits_limited(256, 8, 8, 4)
    assert (round(drawn, 2), round(seen, 2)) == (3.63, 3.95)
    free = np.mean([len(set(row)) for row in ep.route(s, 8).experts_tk // 32])
    close(ep.expected_visits(256, 8, 8), free, rel=0.005)


def sent_by_all(experts_rtk, e: int, n: int, g: int, copies: str) -> tuple[float, float]:
    """Copies that all ranks send inside and across, one token at a time, by what a token is sent for."""
    inside = across = 0
    for r, tokens in enumerate(experts_rtk):
        for chosen in tokens:
            where = [rank_of(int(each), e, n) for each in chosen]
            if copies == "node":
                across += len({at // g for at in where} - {r // g})
                inside += len({at for at in where if at % g != r % g})  # it is on the rank of r's place in that node
                continue
            for at in set(where) if copies == "rank" else where:
                inside += at != r and at // g == r // g
                across += at // g != r // g
    return inside, across


@pytest.mark.parametrize("copies", ep.COPIES)
@pytest.mark.parametrize(
    ("e", "k", "n", "g"), [(8, 2, 4, 2), (8, 3, 8, 4), (10, 3, 4, 2), (6, 1, 3, 1), (6, 6, 6, 3), (4, 2, 1, 1)]
)
def test_what_ranks_send_is_what_all_routings_send(e, k, n, g, copies):
    sets = list(combinations(range(e), k))
    if copies == "node" and e % n:
        with pytest.raises(ValueError, match="ep must divide num_experts"):
            ep.link_elements(5, 7, e, k, n, copies=copies, ranks_per_node=g)
        return
    inside, across = sent_by_all([sets] * n, e, n, g, copies)
    law = ep.link_elements(5, 7, e, k, n, copies=copies, ranks_per_node=g)
    scale = 5 * 7 / len(sets) / n
    for each, counted in ((law.inside, inside), (law.across, across), (law.total, inside + across)):
        close(each, counted * scale) if counted else np.testing.assert_allclose(each, 0, atol=1e-12)
    assert ep.dispatch_elements(5, 7, e, k, n, copies, ranks_per_node=g) == law.total


def test_a_limit_of_nodes_bounds_what_crosses_between_them():
    free = ep.link_elements(1, 1, 256, 8, 64, copies="node", ranks_per_node=8)
    limited = ep.link_elements(1, 1, 256, 8, 64, copies="node", ranks_per_node=8, **V3)
    close(limited.across, ep.expected_visits_limited(256, 8, 8, 4) * 7 / 8)
    assert limited.across < free.across < ep.link_elements(1, 1, 256, 8, 64, ranks_per_node=8).across
    assert limited.across < 4
    s = np.random.default_rng(2).random((1000, 256))
    drawn = sent_by_all([ep.route(s, 8).experts_tk], 256, 64, 8, "node")
    for law, seen in zip((free.inside, free.across), drawn, strict=True):
        close(law, seen / 1000, rel=0.012)


def test_a_step_sends_four_times_each_way_in_its_own_bytes():
    step = ep.step_bytes(10, 128, 8, 2, 4, dispatch_bytes_per_element=ep.fp8_bytes_per_element())
    elements = 10 * 128 * ep.expected_visits(8, 2, 4) * 3 / 4
    close(step.dispatch_forward, elements * (1 + 4 / 128))
    assert step.combine_forward == step.combine_backward == pytest.approx(2 * elements)
    assert step.dispatch_backward == step.dispatch_forward
    assert ep.step_bytes(10, 128, 8, 2, 1).total == 0
    close(ep.step_bytes(3, 5, 8, 2, 4, "expert").total, 4 * 3 * 5 * 2 * 0.75 * 2)
    beside = ep.step_bytes(3, 5, 8, 2, 4, visit_bytes=16)
    close(beside.visits, 3 * 2 * 0.75 * 16)
    assert beside.total - beside.visits == pytest.approx(ep.step_bytes(3, 5, 8, 2, 4).total)


# --- published -------------------------------------------------------------------------------------------------


def deepep(kind: str) -> list[dict[str, str]]:
    with (DATA / "alltoall_deepep.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["kind"] == kind and row["version"] in ("V1", "model")]


def test_published_payload_over_latency_is_the_published_bandwidth():
    """They count what stays on the rank: N/(N − 1) of what is sent to others. Both numbers are printed cut to whole."""
    rows = [row for row in deepep("low latency") if row["version"] == "V1"]
    assert len(rows) == 6

    def meets(row: dict[str, str], off: float) -> bool:
        n, t, h, k = (int(row[name]) for name in ("ep", "tokens_per_rank", "hidden", "top_k"))
        step = ep.step_bytes(t, h, 256, k, n, "expert", dispatch_bytes_per_element=ep.fp8_bytes_per_element())
        payload, latency = off * step.dispatch_forward * n / (n - 1), float(row["latency_us"])
        close(payload / off, float(row["payload_MB"]) * 1e6, rel=0.001)
        slowest, fastest = payload / (latency + 1) / us / GB, payload / latency / us / GB
        return fastest >= float(row["bandwidth_GBps"]) and slowest < float(row["bandwidth_GBps"]) + 1

    assert all(meets(row, 1) for row in rows)
    assert not any(all(meets(row, off) for row in rows) for off in (1.03, 1 / 1.03))


def test_published_time_of_an_all_to_all():
    """One shared expert beside eight, one byte out, two back, 7,000 for 7,168."""
    (row,) = (each for each in deepep("low latency") if each["version"] == "model")
    copies = 9 * int(row["tokens_per_rank"]) * 7000
    one = ep.step_bytes(32, 7000, 256, 8, 256, "expert", dispatch_bytes_per_element=1)
    close((one.dispatch_forward + one.combine_forward) * 256 / 255 * 9 / 8, 3 * copies)
    close(3 * copies / (50 * GB) / us, float(row["latency_us"]))


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ep.scores([1.0]), "logits_te must have two dimensions"),
        (lambda: ep.scores([[np.nan]]), "logits_te must be finite"),
        (lambda: ep.scores([[1.0]], "relu"), "scoring must be one of softmax, sigmoid"),
        (lambda: ep.route([[-1.0]], 1), "scores_te must be finite and zero or more"),
        (lambda: ep.route([[1.0]], 2), "top_k must be at most"),
        (lambda: ep.route([[1.0, 1, 1]], 1, groups=2), "groups must divide num_experts=3"),
        (lambda: ep.route(np.ones((1, 4)), 3, groups=2, top_groups=1), "top_k must be at most the 2 experts of 1"),
        (lambda: ep.route(np.ones((1, 4)), 1, groups=2, top_groups=3), "top_groups must be at most groups"),
        (lambda: ep.route(np.ones((1, 4)), 1, bias_e=[0.0]), "bias_e must be 4 finite numbers"),
        (lambda: ep.loads([[4]], 4), "experts_tk must be whole numbers from 0 to 3"),
        (lambda: ep.expected_visits(4, 5, 2), "top_k must be at most num_experts=4, not 5"),
        (lambda: ep.expected_visits(4, 1, 0), "groups must be at least 1"),
        (lambda: ep.expected_visits_limited(8, 2, 4, 2, 3), "parts must divide num_experts"),
        (lambda: ep.expected_visits_limited(12, 2, 4, 2, 6), "parts must divide groups, 4, or be a multiple"),
        (lambda: ep.dispatch_elements(1, 1, 4, 1, 2, "token"), "copies must be one of expert, rank, node"),
        (lambda: ep.link_elements(1, 1, 4, 1, 4, ranks_per_node=3), "ranks_per_node must divide"),
        (lambda: ep.step_bytes(1, 1, 4, 1, 2, dispatch_bytes_per_element=0), "dispatch_bytes_per_element must be"),
        (lambda: ep.fp8_bytes_per_element(0), "block must be at least 1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
