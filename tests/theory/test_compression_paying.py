"""Who sends what, when that pays, and what PowerSGD, 1-bit Adam and Deep Gradient Compression printed."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtlib.theory import cluster, collectives, compression
from dtlib.theory.units import GB, MiB

with (Path(__file__).parents[2] / "chapters/data/compression.csv").open(encoding="utf-8", newline="") as file:
    PUBLISHED = list(csv.DictReader(file))
LSTM = [(28869, 650), *[(2600, 650)] * 6, *[(2600,)] * 6, (28869,)]
"""The language model of PowerSGD's Table 11: an encoder that is the decoder too, three layers, biases."""


# --- what was printed ----------------------------------------------------------------------------------------------


def test_resnet_18_for_cifar_to_the_printed_digit():
    shapes = compression.resnet18_cifar_shapes()
    assert (sum(map(math.prod, shapes)), len(shapes)) == (11_173_962, 62)
    rows = [row for row in PUBLISHED if row["method"] == "PowerSGD"]
    assert len(rows) == 4
    for row in rows:
        rank = row["setting"].removeprefix("rank ")
        elements = 11_173_962 if rank == "none" else compression.low_rank_elements(shapes, int(rank))
        sent = 24 * 4 * elements / MiB
        assert f"{sent:.0f}" == row["data_MB"] if rank == "none" else f"{sent:.2f}" == row["data_MB"]
        if rank != "none":
            ratio = compression.low_rank_ratio(shapes, int(rank))
            assert f"{ratio:.0f}" == row["compression_ratio_printed"]
            assert ratio == pytest.approx(float(row["compression_ratio_computed"]), abs=0.01)


@pytest.mark.parametrize(("rank", "printed"), [(1, 310), (2, 203), (4, 120)])
def test_the_lstm_of_the_same_paper(rank, printed):
    assert sum(map(math.prod, LSTM)) == 28_949_319
    assert round(compression.low_rank_ratio(LSTM, rank)) == printed


def test_vectors_and_first_dimensions_decide_the_printed_digits():
    """Mutants: vectors left out, and the last dimension as columns."""
    shapes = compression.resnet18_cifar_shapes()
    matrices = [shape for shape in shapes if len(shape) > 1]
    assert round(11_173_962 / compression.low_rank_elements(matrices, 1)) != 243
    turned = [shape[::-1] for shape in matrices]
    assert compression.low_rank_elements(turned, 1) != compression.low_rank_elements(matrices, 1)


def test_one_bit_adam():
    n = 340_000_000  # BERT-Large
    ratio = 2 * n / compression.quantised_bytes(n, 1, n)
    assert round(ratio, 3) == 16
    printed = {row["metric"]: float(row["value"]) for row in PUBLISHED if row["method"] == "1-bit Adam"}
    assert printed["volume in the compressed stage"] == round(ratio)
    ends = compression.end_to_end_speedup(0.25, 6.2)
    assert ends == pytest.approx(2.6957, abs=1e-4)
    assert printed["end-to-end, 25 % warmup, Ethernet"] == round(ends, 1)


def test_deep_gradient_compression_keeps_a_thousandth_and_sends_a_five_hundredth():
    n = 138_000_000
    assert 4 * n / compression.sparse_bytes(n // 1000) == pytest.approx(500)
    assert compression.most_gathering_ranks(4 * n, compression.sparse_bytes(n // 1000)) == 1000


@pytest.mark.parametrize(("share", "speedup"), [(0, 5.0), (0.2, 4.0), (1, 9.0)])
def test_a_run_whose_first_steps_are_dense(share, speedup):
    steps = [1.0] * int(share * 100) + [1 / speedup] * (100 - int(share * 100))
    assert compression.end_to_end_speedup(share, speedup) == pytest.approx(100 / sum(steps))


# --- what a rank sends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_bytes_are_those_of_the_rings(n):
    payload = 4 * 60
    ring = collectives.traffic("ring_all_reduce", 60, 4, n).sent_bytes
    gathered = collectives.traffic("ring_all_gather", 60 * n, 4, n).sent_bytes
    assert np.mean(ring) == pytest.approx(compression.all_reduced_bytes(payload, n))
    assert set(gathered) == {compression.all_gathered_bytes(payload, n)}


@pytest.mark.parametrize(
    ("elements", "n", "bits", "block"), [(60, 3, 8, 5), (61, 3, 8, 5), (7, 4, 4, 3), (5, 1, 8, 2),
     (0, 2, 8, 2), (3, 8, 1, 9)]
)  # fmt: skip
def test_two_passes_send_each_chunk_twice(elements, n, bits, block):
    chunk = next(size for size in range(elements + 1) if size * n >= elements)
    message = np.packbits(np.zeros(chunk * bits, dtype=bool)).nbytes + 4 * len(range(0, chunk, block))
    messages = [message for sender in range(n) for to in range(n) if to != sender for _ in ("codes", "sums")]
    assert compression.two_pass_bytes(elements, n, bits, block) * n == sum(messages)


@pytest.mark.parametrize(("dense", "payload"), [(400, 8), (401, 8), (100, 33), (10, 10), (10, 21), (1000, 999)])
def test_gathering_sends_no_more_up_to_so_many_ranks(dense, payload):
    fewer = [
        n
        for n in range(2, 400)
        if n * compression.all_gathered_bytes(payload, n) <= n * compression.all_reduced_bytes(dense, n) + 1e-9
    ]
    assert compression.most_gathering_ranks(dense, payload) == max(fewer, default=1)
    assert fewer == list(range(2, max(fewer, default=1) + 1))


# --- when it pays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_below_the_break_even_and_there_alone_a_step_is_shorter(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        dense, added = 10 ** rng.uniform(3, 10), 10 ** rng.uniform(-6, 0)
        sent = dense * rng.uniform(0, 1)
        window = float(rng.choice([0.0, 10 ** rng.uniform(-6, 0)]))
        even = compression.break_even_bandwidth(dense, sent, added, window)
        for rate in even * np.array([1e-3, 0.3, 0.97, 1.03, 3, 1e3]):
            without = max(0.0, dense / rate - window)
            with_it = added + max(0.0, sent / rate - window)
            assert (with_it < without) == (rate < even)


def test_break_even_at_its_ends():
    assert compression.break_even_bandwidth(100.0, 20.0, 4.0) == 20
    assert compression.break_even_bandwidth(100.0, 20.0, 4.0, 46.0) == 2
    assert compression.break_even_bandwidth(100.0, 100.0, 1.0) == 0
    assert compression.break_even_bandwidth(100.0, 101.0, 0.0) == 0
    assert compression.break_even_bandwidth(100.0, 1.0, 0.0) == math.inf
    assert compression.break_even_bandwidth(100.0, 1.0, 0.0, 4.0) == 25


@pytest.mark.parametrize("ports", [None, 1])
@pytest.mark.parametrize("nodes", [2, 5])
def test_across_nodes_it_is_the_break_even_of_what_a_port_sends(nodes, ports):
    """Without latency and with free links inside, bytes across decide: the best plan sends 2 (m − 1)/m · D/P."""
    of = replace(
        cluster.cluster("H100", nodes, ranks_per_node=4, ports_per_node=ports),
        inside_alpha_seconds=0.0, across_alpha_seconds=0.0, inside_bytes_per_s=1e25,
    )  # fmt: skip
    per_port = 2 * (nodes - 1) / nodes / of.num_ports
    dense, payload, added = 1 * GB, 0.1 * GB, 0.01
    law = compression.break_even_bandwidth(per_port * dense, per_port * payload, added)
    assert compression.across_break_even(of, dense, payload, added) == pytest.approx(law, rel=1e-6)
    law = compression.break_even_bandwidth(per_port * dense, per_port * payload, added, 0.02)
    assert compression.across_break_even(of, dense, payload, added, 0.02) == pytest.approx(law, rel=1e-6)
    deep = compression.across_break_even(of, dense, payload / 4, added, hierarchy=True)
    law = compression.break_even_bandwidth(per_port * dense, per_port * payload, added)
    assert deep == pytest.approx(law, rel=1e-6)


def test_the_highest_bandwidth_at_which_it_pays_on_real_links():
    """Latency, links inside and every plan: it pays just below, not just above, and at none where more is sent."""
    of = cluster.cluster("H100", 3, ports_per_node=1)
    for how, hierarchy, window in [("all_reduce", False, 0.0), ("two_pass", False, 0.01), ("all_gather", True, 0.0)]:
        price = compression.hierarchy_seconds if hierarchy else compression.exchange_seconds
        args = (1 * GB, 0.02 * GB, how) if hierarchy else (0.1 * GB, how)
        even = compression.across_break_even(of, 1 * GB, args[-2], 0.02, window, how=how, hierarchy=hierarchy)
        for factor in (0.1, 0.97, 1.03, 10):
            at = replace(of, across_bytes_per_s=factor * even)
            with_it = compression.step_seconds(price(at, *args), 0.02, window)
            without = compression.step_seconds(compression.exchange_seconds(at, 1 * GB), 0.0, window)
            assert (with_it < without) == (factor < 1)
    assert compression.across_break_even(of, 1 * GB, 2 * GB, 0.0) == 0
    assert compression.across_break_even(of, 1 * GB, 0.5 * GB, 0.0) == math.inf


def test_prices_are_those_of_the_best_plans():
    of = cluster.cluster("H100", 4)
    for payload in (1e3, 1e6, 1e9):
        assert compression.exchange_seconds(of, payload) == min(cluster.plans("all_reduce", of, payload).values())
        gathered = min(cluster.plans("all_gather", of, 32 * payload).values())
        assert compression.exchange_seconds(of, payload, "all_gather") == gathered
        passes = min(cluster.plans("all_to_all", of, payload).values())
        passes += min(cluster.plans("all_gather", of, payload).values())
        assert compression.exchange_seconds(of, payload, "two_pass") == pytest.approx(passes)
    one = cluster.cluster("H100", 1, ranks_per_node=1)
    assert all(compression.exchange_seconds(one, 1e9, how) == 0 for how in compression.HOW)
    assert compression.hierarchy_seconds(one, 1e9, 1e9) == 0


def test_a_hierarchy_of_dense_payloads_is_the_two_level_ring():
    of = cluster.cluster("H100", 4)
    plain = compression.hierarchy_seconds(of, 8 * GB, 1 * GB)
    assert plain == pytest.approx(cluster.two_level(of, 8 * GB), rel=1e-9)
    assert compression.hierarchy_seconds(of, 8 * GB, 0.01 * GB) < plain


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: compression.all_reduced_bytes(-1, 2), "payload_bytes"),
        (lambda: compression.all_gathered_bytes(1, 0), "n"),
        (lambda: compression.two_pass_bytes(4, 2, block=0), "block"),
        (lambda: compression.most_gathering_ranks(4, 0), "payload_bytes"),
        (lambda: compression.most_gathering_ranks([4, 5], 1), "dense_bytes"),
        (lambda: compression.break_even_bandwidth(1, 1, -1), "seconds"),
        (lambda: compression.break_even_bandwidth([1, 2], 1, 1), "dense_bytes"),
        (lambda: compression.break_even_bandwidth(1, 1, 1, float("inf")), "window_seconds"),
        (lambda: compression.exchange_seconds(cluster.cluster("H100", 2), 1, "ring"), "how"),
        (lambda: compression.end_to_end_speedup(1.5, 2), "dense_share"),
        (lambda: compression.end_to_end_speedup(0.5, 0), "speedup"),
    ],
)
def test_bad_input_is_named(call, names):
    with pytest.raises(ValueError, match=rf"^{names} must"):
        call()
