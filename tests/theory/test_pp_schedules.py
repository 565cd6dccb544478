"""Schedules of pipelines: complete and free of deadlock for all small sizes; each fault is named; times are what a
second, slower way of counting gives."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlib.theory import pp
from dtlib.theory.pp import Action, automatic
from dtlib.theory.pp.simulate import most_held

GENERATORS = {**pp.SCHEDULES, "PipeDream": pp.pipedream, "interleaved, 3": partial(pp.interleaved, v=3)}
TIMES = st.integers(1, 9).map(float)


def made(name, p, m):
    """The schedule, or None where its generator says that there is none."""
    if (name.startswith("interleaved") and m % p) or (name == "DualPipeV" and m < 2 * p):
        return None
    return GENERATORS[name](p, m)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_schedule_is_valid_with_and_without_messages(name):
    for p in range(1, 6):
        for m in range(1, 12):
            schedule = made(name, p, m)
            if schedule is None:
                continue
            pp.validate(schedule, max(pp.simulate(schedule).most_in_flight))
            talking = pp.with_messages(schedule)
            pp.validate(talking)
            computed = tuple(tuple(action for action in own if not action.of) for own in talking.actions)
            assert computed == schedule.actions
            cuts = sum(a != b for a, b in zip(schedule.placed, schedule.placed[1:], strict=False))
            assert sum(action.kind == "send" for own in talking.actions for action in own) == 2 * cuts * m


def test_a_generator_refuses_sizes_by_their_names():
    for generate in GENERATORS.values():
        with pytest.raises(ValueError, match="p must be at least 1, not 0"):
            generate(0, 4)
        with pytest.raises(ValueError, match="m must be a whole number"):
            generate(2, 2.0)
    with pytest.raises(ValueError, match="m must be a multiple of p=4"):
        pp.interleaved(4, 6)
    with pytest.raises(ValueError, match="m must be at least 2p = 8"):
        pp.dualpipe_v(4, 7)


def slowly(schedule, forward, input_gradient, weight_gradient, message):
    """Ends of all actions, found by repeating the rule until nothing changes."""
    v = schedule.chunks
    cost = {"F": forward / v, "I": input_gradient / v, "W": weight_gradient / v}
    cost["B"] = cost["I"] + cost["W"]
    ends: dict[tuple, float] = {}
    for _ in range(schedule.micro_batches * schedule.num_stages * 6):
        before = dict(ends)
        for own in schedule.actions:
            free = 0.0
            for kind, stage, i, _of in own:
                source = stage - 1 if kind == "F" else stage if kind == "W" else stage + 1
                if kind == "F":
                    came = ends.get(("F", source, i), float("inf")) if stage else 0.0
                elif kind == "W" or source < schedule.num_stages:
                    came = ends.get(("I", source, i), float("inf"))
                else:
                    source, came = stage, ends.get(("F", stage, i), float("inf"))
                if 0 <= source < schedule.num_stages and schedule.placed[source] != schedule.placed[stage]:
                    came += message
                free = max(free, came) + cost[kind]
                ends["I" if kind == "B" else kind, stage, i] = free
        if ends == before:
            return ends
    raise AssertionError("times must settle")


@pytest.mark.parametrize("name", GENERATORS)
@given(p=st.integers(1, 4), m=st.integers(1, 8), times=st.tuples(TIMES, TIMES, TIMES), message=st.integers(0, 3))
def test_times_are_those_of_a_slower_way_of_counting(name, p, m, times, message):
    schedule = made(name, p, m)
    if schedule is None:
        return
    table, expected = pp.simulate(schedule, *times, message_seconds=message), slowly(schedule, *times, message)
    for own, ends in zip(schedule.actions, table.ends, strict=True):
        for action, end in zip(own, ends, strict=True):
            kind = "I" if action.kind == "B" else action.kind
            assert end == pytest.approx(expected[kind, action.stage, action.micro_batch])


def test_messages_that_do_not_overlap_occupy_both_ends():
    schedule = pp.one_f_one_b(2, 1)
    assert pp.simulate(schedule, message_seconds=0.5).span == 2 * 3 + 2 * 0.5
    table = pp.simulate(pp.gpipe(2, 3), message_seconds=0.5, overlap=False)
    assert table.starts[0][:3] == (0.0, 1.5, 3.0)  # the sender goes on when its message is gone
    assert table.starts[1][:3] == (1.5, 3.0, 4.5)  # the receiver takes each one itself


def test_unequal_stages_have_a_time_each():
    table = pp.simulate(pp.gpipe(2, 3), [1.0, 2.0], [1.0, 2.0], [1.0, 2.0])
    assert table.span == 1 + 3 * 6 + 2
    with pytest.raises(ValueError, match="forward must be one number, or one for each of 2 stages, not 3"):
        pp.simulate(pp.gpipe(2, 3), [1.0, 2.0, 3.0])


def test_a_large_schedule_is_made_and_timed():
    schedule = pp.one_f_one_b(64, 1024)
    assert pp.simulate(schedule).bubble == pytest.approx(63 / (1024 + 63))


@given(
    p=st.integers(1, 6), m=st.integers(1, 14), limit=st.integers(1, 14), times=st.tuples(TIMES, TIMES, TIMES),
    message=st.sampled_from([0.0, 0.3]), waiting=st.sampled_from([1.0, 0.4, 0.0]),
)  # fmt: skip
def test_the_automatic_schedule_is_the_best_that_is_known_within_its_limit(p, m, limit, times, message, waiting):
    schedule = pp.zb_auto(p, m, limit, *times, message_seconds=message, waiting=waiting)
    pp.validate(schedule, limit if waiting == 1 else None)
    assert max(most_held(own, waiting) for own in schedule.actions) <= limit + 1e-6
    longest = max(pp.simulate(schedule, *times, message_seconds=message).rank_spans)
    for name in ("sequential", "GPipe", "1F1B", "ZB-H1", "ZB-H2"):
        other = pp.SCHEDULES[name](p, m)
        if max(most_held(own, waiting) for own in other.actions) <= limit:
            assert longest <= max(pp.simulate(other, *times, message_seconds=message).rank_spans) * (1 + 1e-9), name


def test_between_the_limits_of_those_made_by_hand_it_is_shorter_than_the_smaller():
    for p in (3, 4, 5):
        lengths = [max(pp.simulate(pp.zb_auto(p, 3 * p, limit)).rank_spans) for limit in (p - 1, p, p + 1, 2 * p - 1)]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] > lengths[1] > lengths[2] > lengths[3] == 9 * p


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1), (3, 3, 2)])
@pytest.mark.parametrize(("p", "m"), [(2, 9), (3, 9), (4, 16), (5, 10), (6, 24), (8, 32)])
def test_with_room_for_fewer_than_p_the_automatic_schedule_is_near_the_bound(p, m, times):
    f, i, w = times
    for limit in range(1, p):
        longest = max(pp.simulate(pp.zb_auto(p, m, limit, *times), *times).rank_spans)
        ways = math.ceil(m / limit) * (p * (f + i) + w), m * sum(times) + (p - 1) * (f + i) - (limit - 1) * w
        assert max(ways) <= longest <= 5 / 4 * max(ways)


class EachByItself(automatic._Clock):
    """Ranks with a rule each."""

    def set(self, rules):
        self.rules = rules
        return self

    def _next(self, rank, now, ahead, eager, strict):
        return super()._next(rank, now, *self.rules[rank])


def test_no_other_rule_of_each_rank_that_is_drawn_is_shorter():
    """A climb from the rules of one lead for all, a rank's rule at a time."""
    p, m, limit, random = 4, 12, 3, np.random.default_rng(0)
    rules, least = [(1, 0.0, False)] * p, math.inf
    for _ in range(400):
        tried = list(rules)
        tried[random.integers(p)] = (
            int(random.integers(1, limit + 1)),
            float(random.choice([0, 0.5, 1])),
            bool(random.integers(2)),
        )
        clock = EachByItself(p, m, limit, dict.fromkeys("FIW", 1.0), 0.0, 1.0).set(tried)
        orders, longest = clock.run((0,) * p, 0, False, math.inf)
        if sum(map(len, orders)) == 3 * p * m and longest <= least:
            rules, least = tried, longest
    found = max(pp.simulate(pp.zb_auto(p, m, limit)).rank_spans)
    assert found <= least < 3 * m + 3 * (p - 1)  # which is better than 1F1B in more memory


TWO = pp.one_f_one_b(2, 2)
(FIRST, LAST) = TWO.actions


def wrong(*actions, of=TWO):
    return replace(of, actions=actions)


TALKING = pp.with_messages(TWO)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (wrong(FIRST[:-1], LAST), "rank 0 never does B0.1"),
        (wrong(FIRST[1:], LAST), "rank 0 never does F0.0"),
        (wrong((*(a for a in FIRST if a.kind != "B"), Action("I", 0, 0)), LAST), "rank 0 never does W0.0"),
        (wrong((*FIRST, FIRST[0]), LAST), "rank 0 does F0.0 2 times"),
        (wrong((*FIRST, Action("I", 0, 0)), LAST), "backward twice with micro-batch 0 in stage 0: F, B, I"),
        (wrong(LAST, FIRST), "rank 0 has F1.0, but stage 1 is not on this rank"),
        (wrong((*FIRST, Action("F", 0, 2)), LAST), "rank 0 has F0.2, but there are 2 stages and 2 micro-batches"),
        (wrong(FIRST, (LAST[1], LAST[0], *LAST[2:])), "rank 1 does B1.0 before F1.0, which it needs"),
        (
            wrong((FIRST[0], FIRST[2], FIRST[1], FIRST[3]), (LAST[2], LAST[0], LAST[1], LAST[3])),
            "rank 0 waits before B0.0 for rank 1, rank 1 waits before F1.1 for rank 0",
        ),
        (wrong(TALKING.actions[0][1:], TALKING.actions[1]), "rank 0 never does F0.0"),
        (
            wrong(tuple(a for a in TALKING.actions[0] if a.kind != "send"), TALKING.actions[1]),
            "message 0 from rank 0 to rank 1 is nothing where it is sent and F0.0 where it is received",
        ),
        (
            wrong(TALKING.actions[0], tuple(a for a in TALKING.actions[1] if a.kind != "receive")),
            "rank 1 does F1.0 without receive F0.0 before it",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(schedule, said):
    with pytest.raises(ValueError) as refused:
        pp.validate(schedule)
    assert said in str(refused.value)


def test_memory_above_the_limit_is_refused_with_its_place():
    pp.validate(pp.gpipe(2, 3), 3)
    with pytest.raises(ValueError, match=r"rank 0 holds 3 activations after F0\.2, above the limit of 2"):
        pp.validate(pp.gpipe(2, 3), 2)


def test_both_neighbours_sending_first_wait_for_each_other():
    """Where a send waits for its receiver, 1F1B with one message at a time is a deadlock; GPipe is none."""
    pp.validate(pp.with_messages(pp.gpipe(2, 3), ahead=0), blocking=True)
    with pytest.raises(ValueError, match=r"before send F0\.1 for rank 1, rank 1 waits before send B1\.0 for rank 0"):
        pp.validate(pp.with_messages(pp.one_f_one_b(2, 3), ahead=0), blocking=True)


def test_a_schedule_is_printed_as_a_grid():
    assert pp.text_grid(pp.one_f_one_b(2, 2)).splitlines() == [
        "rank 0 |F0 F1 ......B0    ...B1    |",
        "rank 1 |...F0 B0    F1 B1    ......|",
    ]
    assert pp.text_grid(pp.zb_v(2, 3)).splitlines()[0].startswith("rank 0 |F0 F1 F2 F0'I0'W0'F1'")


def test_a_schedule_is_read_from_text():
    rows = [" ".join(f"{each.kind}{each.micro_batch}" for each in own) for own in pp.zb_h1(3, 12).actions]
    assert pp.from_text(rows, "ZB-H1") == pp.zb_h1(3, 12)
    pp.validate(pp.from_text(["F0 F1 B0 B1", "F0 B0 F1 I1 W1"]))


@pytest.mark.parametrize("rows", [[], "F0 B0", ["F0 X0"], ["F0 B"], ["F0,B0"], ["F0.1 B0.1"]])
def test_other_words_are_refused(rows):
    with pytest.raises(ValueError, match="rows must have"):
        pp.from_text(rows)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pp.Schedule("ours", (0, 2), 1, ((), ())), "placed must be ranks from 0 to 1"),
        (lambda: pp.Schedule("ours", (0, 1, 1), 1, ((), ())), "as many stages for each rank"),
        (lambda: pp.validate("F0 B0"), "schedule must be a Schedule"),
    ],
)
def test_what_is_no_schedule_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
