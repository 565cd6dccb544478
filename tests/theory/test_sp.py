"""Closed forms of sequence parallelism against those of tensor parallelism, of activations, and published times."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlib.theory import activations, collectives, sp, tp
from dtlib.theory.memory.flops import RECOMPUTE
from dtlib.theory.units import GB, TB, TFLOP

TABLE = Path(__file__).parents[2] / "chapters" / "data" / "korthikanti_table4_22B_layer_ms.csv"
sizes, ranks = st.integers(1, 10**4), st.integers(1, 64)


@given(b=sizes, s=sizes, h=sizes, t=ranks)
def test_split_tokens_send_as_much_as_four_all_reduces(b, s, h, t):
    rings = collectives.ring_all_reduce_bytes(tp.layer_elements(b, s, h), t)
    assert sp.sent_elements(b, s, h, t) == sp.sent_elements(b, s, h, t, "keep") == pytest.approx(rings)
    assert sp.sent_elements(b, s, h, t, "again") == pytest.approx(1.25 * rings)


@given(b=sizes, s=sizes, h=sizes, a=sizes, t=ranks)
def test_the_first_and_the_last_plan_are_the_papers_layers(b, s, h, a, t):
    for plan, split in (("none", False), ("again", True)):
        paper = activations.layer_bytes(s, b, h, a, tp=t, sequence_parallel=split)
        assert sp.kept_bytes(s, b, h, a, t, plan) == pytest.approx(paper)
    # in the middle two whole inputs, of 2 bytes an element, stay on each rank
    more = sp.kept_bytes(s, b, h, a, t, "keep", core=False) - sp.kept_bytes(s, b, h, a, t, "again", core=False)
    assert more == pytest.approx(4 * s * b * h * (1 - 1 / t), abs=1e-6 * s * b * h)


@given(b=sizes, s=sizes, h=sizes, a=sizes)
def test_on_one_rank_all_plans_are_one(b, s, h, a):
    assert len({sp.kept_bytes(s, b, h, a, 1, plan) for plan in sp.PLANS}) == 1
    assert {sp.sent_elements(b, s, h, 1, plan) for plan in sp.PLANS} == {0}


def test_a_norm_over_the_width_would_send_little():
    assert sp.norm_elements(3, 5, 4) == 4 * 2 * collectives.ring_all_reduce_bytes(3 * 5, 4)


def published():
    with TABLE.open(encoding="utf-8") as file:
        rows = {row["experiment"]: row for row in csv.DictReader(file)}
    return {name: (float(row["fwd_ms"]) / 1000, float(row["bwd_ms"]) / 1000) for name, row in rows.items()}


def test_the_published_layers_take_what_their_traffic_says():
    """22B: 4 sequences of 2048, width 6144, 64 heads, 8 ranks of A100s; published to a tenth of a millisecond."""
    whole, split = (published()[name] for name in ("baseline no recompute", "sequence parallelism"))
    saved = [sp.saved_seconds(4, 2048, 6144, 8, 2.0 * TB, backward=way) for way in (False, True)]
    assert saved[0] == pytest.approx(whole[0] - split[0], abs=0.05e-3)
    # two phases more in the backward pass, where the inputs are gathered again, at the data sheet's 300 GB/s
    again = 2 * (sp.sent_elements(4, 2048, 6144, 8, "again") - sp.sent_elements(4, 2048, 6144, 8)) / (300 * GB)
    assert saved[1] - again == pytest.approx(whole[1] - split[1], abs=0.1e-3)
    # a selective recompute: the data sheet's memory and the measured rate of a product; it took a quarter longer
    core = sp.core_seconds(4, 2048, 6144, 64, 8, 271.2 * TFLOP, 2.0 * TB)
    assert core == pytest.approx(published()["selective recompute"][1] - whole[1], rel=0.25)
    assert sp.saved_seconds(4, 2048, 6144, 1, 1.0) == 0


@given(b=sizes, s=sizes, h=sizes, t=st.integers(2, 64), early_stop=st.booleans())
def test_at_the_even_link_a_byte_costs_the_same_gathered_or_computed(b, s, h, t, early_stop):
    flop_per_s = 1e14
    link = sp.even_link(h, flop_per_s, t, early_stop=early_stop)

    def price(plan, seconds=0.0, **recompute):
        """Bytes sent more than by inputs that are kept, for each byte that is kept less, over the link; and seconds."""
        kept = sp.kept_bytes(s, b, h, 1, t, "keep", core=False)
        freed = kept - sp.kept_bytes(s, b, h, 1, t, plan, core=False, **recompute)
        freed -= 2 * s * b * h / t if early_stop and recompute else 0  # no dropout, no masks: the input alone has none
        stop = {"early_stop": early_stop} if recompute else {}
        more = sp.sent_elements(b, s, h, t, plan, **recompute, **stop) - sp.sent_elements(b, s, h, t, "keep")
        return (seconds + (2 * more / link if link else 0)) / freed, 2 * more / freed

    products = 16 if early_stop else 24  # without the layer's last matrix
    again, computed = price("again"), price("keep", products * b * s * h * h / t / flop_per_s, recompute="full")
    if link:
        assert again[0] == pytest.approx(1 / link)
        assert again[0] == pytest.approx(computed[0])
    else:  # over no link is it cheaper to compute: that sends as much for a byte, or more
        assert again[1] <= computed[1] * (1 + 1e-9)


@given(b=sizes, s=sizes, h=sizes, a=sizes, t=ranks)
def test_what_a_recompute_keeps_is_the_papers(b, s, h, a, t):
    for plan, split in (("none", False), ("again", True)):
        for recompute in RECOMPUTE:
            paper = activations.layer_bytes(s, b, h, a, tp=t, sequence_parallel=split, recompute=recompute)
            assert sp.kept_bytes(s, b, h, a, t, plan, recompute=recompute) == pytest.approx(paper)


def test_a_full_recompute_frees_and_sends_what_it_says():
    for t, freed in ((1, 32), (2, 18), (8, 7.5)):
        kept = [sp.kept_bytes(1, 1, 1, 1, t, "keep", core=False, recompute=each) for each in ("none", "full")]
        assert kept[0] - kept[1] == freed
    for plan, once in (("none", 8), ("keep", 8), ("again", 10)):
        assert sp.phases(plan, recompute="selective") == once
        assert sp.phases(plan, recompute="full") == once + 4
        assert sp.phases(plan, recompute="full", early_stop=True) == once + (4 if plan == "none" else 3)
    for t in (2, 3, 8):
        again = tp.layer_elements(2, 3, 5, recompute="full")
        assert sp.sent_elements(2, 3, 5, t, recompute="full") == pytest.approx(2 * (t - 1) / t * again)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sp.phases("all"), "plan must be one of none, keep, again, not 'all'"),
        (lambda: sp.sent_elements(0, 1, 1, 1), "micro_batch must be"),
        (lambda: sp.sent_elements(1, 1, 1, 1, "all"), "plan must be"),
        (lambda: sp.kept_bytes(1, 1, 1, 0, 1), "num_heads must be"),
        (lambda: sp.kept_bytes(1, 1, 1, 1, 1, "all"), "plan must be"),
        (lambda: sp.norm_elements(1, 1, 0), "tp must be"),
        (lambda: sp.saved_seconds(1, 1, 1, 1, 0), "memory_bytes_per_s must be"),
        (lambda: sp.core_seconds(1, 1, 1, 1, 1, 0, 1), "flop_per_s must be"),
        (lambda: sp.even_link(1, 0, 8), "flop_per_s must be"),
        (lambda: sp.even_link(1, 1, 8, early_stop=1), "early_stop must be True or False"),
        (lambda: sp.phases("keep", recompute="some"), "recompute must be one of none, selective, full"),
        (lambda: sp.kept_bytes(1, 1, 1, 1, 1, recompute="some"), "recompute must be one of none, selective, full"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
