"""What the pages say of clusters and switches with *any*, *never* or *best*, for few ranks and many."""

from __future__ import annotations

import numpy as np
import pytest

from dtlib.theory import cluster, collectives, hardware, zero

ORDER = ["flat_tree", "pipelined_tree", "two_level", "parallel_rings"]


@pytest.mark.parametrize("nodes", [2, 3, 8, 16, 128, 1000])
def test_plans_win_in_one_order_and_a_flat_ring_never_with_a_port_a_card(nodes):
    of = cluster.cluster("H100", nodes)
    won = [ORDER.index(cluster.best("all_reduce", of, size).plan) for size in np.geomspace(1, 1e13, 200)]
    assert won == sorted(won)
    assert (won[0], won[-1]) == (0, 3)


def test_with_one_port_a_node_a_flat_ring_is_best_from_ten_nodes_on():
    for nodes in (2, 3, 9, 10, 16, 17, 64, 1000):
        plans = cluster.plans("all_reduce", cluster.cluster("H100", nodes, ports_per_node=1), 1e13)
        assert (plans["flat_ring"] <= min(plans.values()) * (1 + 1e-9)) == (nodes >= 10)  # others tie with it


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 64])
def test_a_switch_that_adds_lets_a_rank_send_less_from_four_ranks_on(n):
    nvls, sharp, ring = (n + 1) / n, 1.0, collectives.ring_all_reduce_bytes(1.0, n)
    assert (nvls < ring * (1 - 1e-12)) == (n > 3)
    assert (sharp < ring * (1 - 1e-12)) == (n > 2)
    if n == 3:
        assert nvls == pytest.approx(ring)


def test_what_the_gradient_of_the_question_adds():
    card, params, of = hardware.accelerator("H100"), 7e9, cluster.cluster("H100", 8)
    adds = cluster.best("all_reduce", of, 2 * params).seconds * card.half_flop_per_s / (6 * params * 4096)
    reached = card.measured_half_flop_per_s / card.half_flop_per_s
    assert [round(reached, 1), round(adds * reached, 2), round(adds * 0.45, 2)] == [0.8, 0.32, 0.18]
    assert 16 * params > card.memory_bytes
    assert zero.sent_bytes(2 * params, 64, 1) == zero.sent_bytes(2 * params, 64, 0)


def crossing(n: int) -> float:
    """Bytes up to which two trees, cut in pieces, beat a ring of n ranks, as multiples of D*."""
    of = cluster.cluster("H100", n, ranks_per_node=1)  # 10 µs a message, 50 GB/s
    sizes = np.geomspace(1e4, 1e10, 2000)
    won = [size for size in sizes if cluster.pipelined_tree(of, size) < cluster.flat_ring(of, size)]
    return won[-1] / collectives.ring_tree_crossover_bytes(n, of.across_alpha_seconds, of.across_bytes_per_s)


def test_trees_in_pieces_lose_to_a_ring_later_than_whole_ones_among_many_ranks_alone():
    assert round(crossing(64)) == 12
    assert all(crossing(n) < 1 for n in (4, 5, 8))
    assert all(crossing(n) > 1 for n in (16, 100, 1000))
