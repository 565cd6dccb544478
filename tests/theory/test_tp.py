"""Closed forms of tensor parallelism against products counted one by one, a simulated pipeline, and published rows."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlib.theory import collectives, memory, models, tp
from dtlib.theory.units import GB, TB, TFLOP

DATA = Path(__file__).parents[2] / "chapters" / "data"
sizes = st.integers(1, 10**4)
rates = st.floats(1e9, 1e16)
V100_SUSTAINED, V100_LINK, V100_MEMORY = 71.9 * TFLOP, 150 * GB, 0.9 * TB  # the table's own first row; data sheet


def a_gpt(hidden: int, seq: int, num_heads: int = 1, num_layers: int = 1):
    return models.gpt("any", num_layers=num_layers, hidden=hidden, num_heads=num_heads, vocab=100, seq=seq)


# --- what is sent ----------------------------------------------------------------------------------------------


def test_what_a_layer_sums_is_neither_of_the_weights_nor_of_the_ranks():
    assert tp.layer_elements(1, 2048, 4096) == 4 * 2048 * 4096
    assert tp.layer_elements(3, 10, 7, recompute="full") == 6 * 3 * 10 * 7
    assert tp.layer_elements(3, 10, 7, recompute="selective") == tp.layer_elements(3, 10, 7)


def test_outside_the_layers_no_logit_travels():
    outside = tp.outside_elements(2, 10, 8)
    assert outside.parts == {"embedding": 160, "head": 160, "loss": 60}
    assert outside.total == 2 * 160 + 60


# --- when it stops paying --------------------------------------------------------------------------------------


@given(h=sizes, s=sizes, flops=rates, link=rates, layers=st.integers(1, 5))
def test_of_a_gpt_batch_and_layers_cancel(h, s, flops, link, layers):
    expected = 1 + (9 * h + 1.5 * s) / 2 * link / flops
    assert tp.break_even_ranks(a_gpt(h, s, num_layers=layers), flops, link) == pytest.approx(expected, rel=1e-12)
    recomputed = 1 + (8 * h + 4 * s / 3) / 2 * link / flops
    assert tp.break_even_ranks(a_gpt(h, s), flops, link, recompute="full") == pytest.approx(recomputed, rel=1e-12)


@given(t=st.integers(2, 64), flops=rates, link=rates, seq=st.integers(1, 4096))
def test_at_the_break_even_a_layer_sends_for_as_long_as_it_computes(t, flops, link, seq):
    """Counted from the parts: a layer's products, and four rings."""
    model, b = models.model("llama3-8b"), 3
    forward = memory.forward_flops_per_token(model, seq=seq)
    compute = 3 * b * seq * (forward.total - forward.head) / model.num_layers / t / flops
    sent = collectives.ring_all_reduce_bytes(2 * tp.layer_elements(b, seq, model.hidden), t) / link
    assert tp.efficiency(t, tp.break_even_ranks(model, flops, link, seq=seq)) == pytest.approx(
        compute / (compute + sent), rel=1e-9
    )


@given(at=st.floats(1.01, 1e4), share=st.floats(0, 1))
def test_one_rank_loses_nothing_and_the_break_even_is_a_half(at, share):
    assert tp.efficiency(1, at, share) == 1
    assert tp.efficiency(7, 7.0) == 0.5
    lost = [1 / tp.efficiency(t, at, share) for t in (1, 2, 3, 5)]
    assert lost[1] - lost[0] == pytest.approx(lost[2] - lost[1])  # each rank costs as much as the one before
    assert lost[3] - lost[2] == pytest.approx(2 * (lost[2] - lost[1]))


def table() -> list[dict[str, float]]:
    with (DATA / "megatron_2020_tp_scaling.csv").open(encoding="utf-8") as file:
        return [{k: float(v) for k, v in row.items() if k not in ("hw", "case")} for row in csv.DictReader(file)]


def predicted(row: dict[str, float], link: float) -> float:
    h, t = int(row["hidden"]), int(row["tp"])
    model = a_gpt(h, 1024, int(row["heads"]), int(row["layers"]))
    at = tp.break_even_ranks(model, V100_SUSTAINED, link, recompute="full")
    return tp.efficiency(t, at, tp.replicated_share(h, 1024, V100_SUSTAINED, V100_MEMORY, recompute="full"))


@pytest.mark.parametrize("row", table(), ids=lambda row: f"t={row['tp']:.0f}")
def test_published_scaling_lies_between_a_whole_link_and_half_of_it(row):
    """A library reaches half of a link's rate with messages of 32 to 64 MiB (`nccl_allreduce_measured.csv`)."""
    published, best = row["scaling_pct"] / 100, predicted(row, V100_LINK)
    assert predicted(row, V100_LINK / 2) - 0.001 <= published <= best
    assert best - published < 0.04


def test_half_of_a_link_is_what_messages_of_that_size_reach():
    with (DATA / "nccl_allreduce_measured.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["system"].startswith("8xA100 NVLink3 1 node")]
    reached = {int(row["bytes"]): float(row["busbw_GBps"]) / 300 for row in rows}
    assert 0.4 < reached[2**25] < 0.5 < reached[2**26] < 0.6


# --- what hides ------------------------------------------------------------------------------------------------


def test_exposed_is_what_outlasts_the_weights_gradient():
    assert tp.exposed_seconds(3.0, 2.0) == 1.0
    assert tp.exposed_seconds(2.0, 3.0) == 0.0


@given(product=st.floats(0, 10), travel=st.floats(0, 10), chunks=st.integers(1, 20))
def test_chunks_are_a_pipeline_of_two_stations(product, travel, chunks):
    ready = sent = 0.0
    for _ in range(chunks):
        ready += product / chunks
        sent = max(ready, sent) + travel / chunks
    assert tp.chunked_seconds(product, travel, chunks) == pytest.approx(sent, abs=1e-9)


@given(t=st.integers(2, 64), flops=rates, link=rates, columns=st.sampled_from([3, 4]))
def test_at_the_hiding_width_both_take_as_long(t, flops, link, columns):
    h, tokens = tp.hiding_width(t, flops, link, columns=columns), 100
    gradient = 2 * tokens * h * columns * h / t / flops
    all_reduce = collectives.ring_all_reduce_bytes(2 * tokens * h, t) / link
    assert tp.exposed_seconds(all_reduce, gradient) == pytest.approx(0, abs=1e-9 * gradient)
    assert gradient == pytest.approx(all_reduce, rel=1e-9)


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tp.layer_elements(0, 1, 1), "micro_batch must be"),
        (lambda: tp.layer_elements(1, 1, 1, recompute="all"), "recompute must be one of"),
        (lambda: tp.outside_elements(1, 1.5, 1), "seq must be"),
        (lambda: tp.break_even_ranks("llama3-8b", 0, 1), "flops_per_s must be"),
        (lambda: tp.break_even_ranks("llama3-8b", 1, -1), "link_bytes_per_s must be"),
        (lambda: tp.efficiency(2, 1.0), "break_even must be above 1"),
        (lambda: tp.efficiency(2, float("nan")), "break_even must be"),
        (lambda: tp.efficiency(2, 2.0, 1.5), "replicated must be a share"),
        (lambda: tp.replicated_share(1, 1, 1, 0), "memory_bytes_per_s must be"),
        (lambda: tp.exposed_seconds(-1, 1), "all_reduce_seconds must be"),
        (lambda: tp.chunked_seconds(1, 1, 0), "chunks must be"),
        (lambda: tp.hiding_width(2, 1, 1, columns=0), "columns must be"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
