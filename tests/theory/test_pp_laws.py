"""The laws of pipelines against the simulator, for all small sizes; published bubble rates; the best partition."""

import csv
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlib.theory import footprint, pp
from dtlib.theory.pp.simulate import most_held

TABLE = Path(__file__).parents[2] / "chapters" / "data" / "zerobubble_schedules.csv"
ROWS = list(csv.DictReader(TABLE.open(encoding="utf-8")))
SMALL = [(p, m) for p in range(1, 6) for m in range(1, 13)]


@pytest.mark.parametrize("make", [pp.gpipe, pp.one_f_one_b])
def test_whole_backward_passes_idle_as_the_law_says(make):
    for p, m in SMALL:
        table = pp.simulate(make(p, m), 2, 3, 1)
        assert table.bubble == pytest.approx(pp.bubble_fraction(p, m))
        assert table.span == pytest.approx(6 * m * (1 + pp.bubble_overhead(p, m)))
        assert table.longest_idle == pytest.approx(pp.idle_seconds("1F1B", p, 2, 3, 1))


def test_interleaved_chunks_idle_as_the_law_says():
    for p, m in SMALL:
        for v in (1, 2, 3) if m % p == 0 else ():
            table = pp.simulate(pp.interleaved(p, m, v), 1, 1, 1)
            assert table.bubble == pytest.approx(pp.bubble_fraction(p, m, v))
            assert table.longest_idle == pytest.approx(pp.idle_seconds("interleaved", p, v=v))


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1), (3, 2, 1), (1, 2, 1), (3, 2, 2)])
def test_split_backward_passes_idle_as_the_law_says(times):
    for p, m in SMALL:
        for name, enough in (("ZB-H1", p), ("ZB-H2", 2 * p - 1)):
            table = pp.simulate(pp.SCHEDULES[name](p, m), *times)
            law = pp.idle_seconds(name, p, *times)
            assert (table.longest_idle == pytest.approx(law)) if m >= enough else (table.longest_idle > law)


def test_a_schedule_down_and_up_again_idles_at_its_ends_alone():
    for p in range(1, 7):
        for m in range(2 * p - 1, 3 * p):
            assert pp.simulate(pp.zb_v(p, m)).longest_idle == pytest.approx(pp.idle_seconds("ZB-V", p), abs=1e-9)
        for m in range(2 * p, 4 * p):
            assert pp.simulate(pp.dualpipe_v(p, m)).longest_idle == pytest.approx(pp.idle_seconds("DualPipeV", p))


def test_naive_utilisation_is_one_over_p():
    for p, m in SMALL:
        assert pp.simulate(pp.sequential(p, m)).bubble == pytest.approx(1 - 1 / p)


def test_no_schedule_with_whole_backward_passes_is_faster_than_1f1b():
    """All orders of two ranks with two and three micro-batches, in both ranks."""
    for m in (2, 3):
        orders = []
        for forward in combinations(range(2 * m), m):
            kinds = ["F" if place in forward else "B" for place in range(2 * m)]
            if all(kinds[: k + 1].count("F") >= kinds[: k + 1].count("B") for k in range(2 * m)):
                orders.append(kinds)
        spans = []
        for first in orders:
            for last in orders:
                actions = tuple(
                    tuple(pp.Action(kind, rank, kinds[:k].count(kind)) for k, kind in enumerate(kinds))
                    for rank, kinds in enumerate((first, last))
                )
                try:
                    spans.append(pp.simulate(pp.Schedule("any", (0, 1), m, actions)).span)
                except ValueError:  # a deadlock
                    continue
        assert len(spans) > 1
        assert min(spans) == pp.simulate(pp.one_f_one_b(2, m)).span


@pytest.mark.parametrize("name", [*pp.SCHEDULES, "PipeDream"])
def test_ranks_hold_as_many_activations_as_the_law_says(name):
    for p, m in SMALL:
        if (name == "interleaved" and m % p) or (name == "DualPipeV" and m < 2 * p):
            continue
        held = pp.simulate((pp.SCHEDULES | {"PipeDream": pp.pipedream})[name](p, m)).most_in_flight
        v = 2 if name == "interleaved" else 1
        assert held == [pp.most_in_flight(name, p, m, rank, v) for rank in range(p)]


def test_activations_in_flight_are_those_of_the_footprint():
    for p, m in SMALL:
        for rank in range(p):
            assert pp.most_in_flight("1F1B", p, m, rank) == footprint.chunks_in_flight(p, rank, m)


@given(p=st.integers(1, 64), x=st.floats(0.01, 0.9), v=st.integers(1, 4))
def test_enough_micro_batches_are_the_fewest(p, x, v):
    m = pp.micro_batches_for(p, x, v)
    assert pp.bubble_fraction(p, m, v) <= x + 1e-9
    step = 1 if v == 1 else p
    assert m <= step or pp.bubble_fraction(p, m - step, v) > x - 1e-9


def test_eight_stages_need_133_micro_batches_for_a_twentieth():
    assert pp.micro_batches_for(8, 0.05) == 133


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['m']}")
@pytest.mark.parametrize(("name", "column"), [("1F1B", "bub_1F1B"), ("ZB-H1", "bub_ZBH1"), ("ZB-H2", "bub_ZBH2")])
def test_published_bubble_rates_come_out_to_all_digits(row, name, column):
    p, m = int(row["p"]), int(row["m"])
    times = [float(row[key]) for key in ("TF", "TB", "TW")]
    table = pp.simulate(pp.SCHEDULES[name](p, m), *times, message_seconds=float(row["Tcomm"]))
    cost = max(table.rank_spans)
    assert round((cost - m * sum(times)) / cost, 4) == float(row[column])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['m']}")
@pytest.mark.parametrize(("times", "column", "share"), [(1, "bub_ZBH1", 1), (2, "bub_ZBH2", 0.5)])
def test_the_automatic_schedule_is_no_longer_than_published_ones_of_as_much_memory(row, times, column, share):
    """With p in flight it idles no longer than ZB-H1, with 2p at most half as long as ZB-H2, which holds 2p − 1.

    Held is what the paper holds: 34bsh + 5abs² until I, 32bsh of it until W (its Table 1).
    """
    p, m = int(row["p"]), int(row["m"])
    a, s, h = (int(row[key]) for key in ("heads", "seq", "hidden"))
    each, message = [float(row[key]) for key in ("TF", "TB", "TW")], float(row["Tcomm"])
    waiting = 32 / (34 + 5 * a * s / h)
    schedule = pp.zb_auto(p, m, times * p, *each, message_seconds=message, waiting=waiting)
    assert max(most_held(own, waiting) for own in schedule.actions) <= times * p + 1e-6
    cost = max(pp.simulate(schedule, *each, message_seconds=message).rank_spans)
    assert (cost - m * sum(each)) / cost <= share * float(row[column]) + 5e-5  # printed to four digits


def test_a_barrier_before_the_step_makes_h2_no_faster_than_h1():
    """Between the first start of any rank and the last end of any, H2 gains nothing over H1 with equal times."""
    for p in range(2, 7):
        m = 2 * p
        h1, h2 = (pp.simulate(make(p, m)) for make in (pp.zb_h1, pp.zb_h2))
        assert h2.span == h1.span
        assert max(h2.rank_spans) == max(h1.rank_spans) - (p - 1)


@pytest.mark.parametrize("times", [(1, 1, 1), (3, 2, 1), (2, 3, 1.5), (1, 1, 3)])
def test_no_split_schedule_waits_less_than_its_memory_allows(times):
    """On rank 0, (p − 1)(T_F + T_B) − (L − 1)T_W; H1 and H2 wait no longer where T_W is no longer than the others."""
    for p in range(2, 7):
        for held in range(1, 2 * p + 1):
            for m in (held, held + p):
                table = pp.simulate(pp.zb_auto(p, m, held, *times), *times)
                least = (p - 1) * (times[0] + times[1]) - (held - 1) * times[2]
                assert table.rank_spans[0] - table.busy[0] >= least - 1e-9
                if held in (p, 2 * p - 1) and times[2] <= min(times[:2]):
                    assert table.longest_idle == pytest.approx(max(0, least), abs=1e-9)


def test_1f1b_shows_nearly_two_messages_a_micro_batch_and_gpipe_hides_all_but_a_step_s():
    for p in range(1, 9):
        spans = [pp.simulate(pp.one_f_one_b(p, m), message_seconds=0.3).span for m in (5 * p, 6 * p)]
        assert (spans[1] - spans[0]) / p == pytest.approx(3 + 2 * (p - 1) / p * 0.3)
        once = pp.simulate(pp.gpipe(p, 5 * p), message_seconds=0.3).span - (6 * p - 1) * 3
        assert once == pytest.approx(2 * (p - 1) * 0.3)


def test_what_crosses_the_cuts_is_counted_from_a_schedule():
    for p, v in ((1, 1), (2, 1), (4, 1), (2, 2), (3, 3)):
        schedule = pp.with_messages(pp.interleaved(p, 2 * p, v))
        sends = sum(action.kind == "send" for own in schedule.actions for action in own)
        assert pp.boundary_elements(p, 2 * p, 3, 5, 7, v) == sends * 3 * 5 * 7


def test_versions_of_weights_are_what_is_in_flight():
    for p in range(1, 6):
        held = pp.simulate(pp.pipedream(p, 10)).most_in_flight
        assert [pp.weight_versions(p, stage) for stage in range(p)] == held
        assert {pp.weight_versions(p, stage, vertical_sync=True) for stage in range(p)} == {p}


def test_a_message_hides_from_some_width_on():
    layers_times_width = pp.hiding_width(495e12, 50e9)
    b, s, h, layers = 1, 4096, 1000, layers_times_width / 1000
    assert 2 * b * s * h / 50e9 == pytest.approx(24 * b * s * h**2 * layers / 495e12)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pp.bubble_fraction(4, 6, 2), "m must be a multiple of p=4"),
        (lambda: pp.micro_batches_for(4, 1.0), "fraction must be below 1"),
        (lambda: pp.idle_seconds("2F2B", 4), "schedule must be GPipe"),
        (lambda: pp.idle_seconds("ZB-H1", 4, 1, 1, 2), "weight_gradient must be at most forward=1"),
        (lambda: pp.idle_seconds("ZB-V", 4, 1, 2, 1), "must be equal for ZB-V, not 1, 2, 1"),
        (lambda: pp.most_in_flight("1F1B", 4, 8, 4), "rank must be from 0 to 3, not 4"),
        (lambda: pp.weight_versions(4, 4), "stage must be from 0 to 3, not 4"),
        (lambda: pp.best_partition([1, 2], 3), "stages must be at most the number of layers, 2, not 3"),
        (lambda: pp.best_partition([1, 2], 1, layer_bytes=[1, 1]), "layer_bytes and most_bytes must be given together"),
        (lambda: pp.best_partition([1, 2], 1, layer_bytes=[1, 1], most_bytes=1), "most_bytes must leave room"),
        (lambda: pp.zb_auto(2, 4, 0), "limit must be at least 1, not 0"),
        (lambda: pp.zb_auto(2, 4, 2, waiting=1.5), "waiting must be at most 1, not 1.5"),
    ],
)
def test_bad_arguments_are_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=9), stages=st.integers(1, 5), data=st.data(),
)  # fmt: skip
def test_the_best_partition_is_that_of_trying_all(costs, stages, data):
    stages = min(stages, len(costs))
    weights = data.draw(st.lists(st.integers(0, 4), min_size=len(costs), max_size=len(costs)))
    limits = data.draw(st.lists(st.integers(2, 20), min_size=stages, max_size=stages))

    def parts(numbers, cuts):
        return [sum(each) for each in np.split(np.array(numbers), list(cuts))]

    possible = [
        max(parts(costs, cuts))
        for cuts in combinations(range(1, len(costs)), stages - 1)
        if all(held <= limit for held, limit in zip(parts(weights, cuts), limits, strict=True))
    ]
    if not possible:
        with pytest.raises(ValueError, match="most_bytes must leave room"):
            pp.best_partition(costs, stages, layer_bytes=weights, most_bytes=limits)
        return
    found = pp.best_partition(costs, stages, layer_bytes=weights, most_bytes=limits)
    assert sum(found) == len(costs)
    assert len(found) == stages
    assert max(parts(costs, np.cumsum(found)[:-1])) == min(possible)


def test_126_layers_with_embedding_and_head_on_16_stages():
    costs = [0.3, *[1.0] * 126, 1.5]
    found = pp.best_partition(costs, 16)
    assert sum(found) == 128
    assert max(sum(each) for each in np.split(np.array(costs), np.cumsum(found)[:-1])) == pytest.approx(8.3)
