"""The straggler is named, and why it is slow: in drawn seconds, and on ranks that were slowed on purpose."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks.reliability.slow import Straggler, straggler

SIZES = [2, 3, 4, 8, 257]
CAUSES = ["card", "input", "link"]


def drawn(rng, n, cause=None, slow=0, steps=20, by=0.04, noise=0.05):
    """Compute, waiting, transfer and input seconds of a step of 0.1 s; one step in ten has a hiccup somewhere."""
    compute, transfer, loading = (mean * rng.lognormal(0, noise, (steps, n)) for mean in (0.07, 0.02, 0.01))
    for step in range(0, steps, 10):
        compute[step, rng.integers(n)] += 0.5
    if cause is not None:
        {"card": compute, "input": loading, "link": transfer}[cause][:, slow] += by
    arrival = compute + loading
    return compute, arrival.max(1, keepdims=True) - arrival, transfer, loading


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("cause", CAUSES)
def test_the_slow_rank_is_named_and_why(n, cause):
    rng = np.random.default_rng(n)
    for _ in range(20):
        slow = int(rng.integers(n))
        found = straggler(*drawn(rng, n, cause, slow))
        assert (found.rank, found.cause) == (slow, cause)
        assert found.lost_seconds == pytest.approx(0.04, rel=0.5)


@pytest.mark.parametrize("n", [1, *SIZES])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_nobody_is_named_where_nobody_is_slow(n, noise):
    rng = np.random.default_rng(n)
    assert all(straggler(*drawn(rng, n, noise=noise)) == Straggler() for _ in range(20))


def test_who_is_unlucky_with_turns_of_a_busy_core_has_no_slow_link():
    """A message takes 0.4 ms, or 4 ms where its rank had to wait for the core; in 15 steps of 12 ms, on 4 ranks."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        transfer = np.where(rng.random((15, 4)) < 0.5, 0.0004, 0.004) * rng.lognormal(0, 0.1, (15, 4))
        transfer[:, 0] = 0.0
        compute = np.full((15, 4), 0.01)
        assert straggler(compute, 0 * compute, transfer, 0 * compute) == Straggler()


def test_a_link_is_compared_with_links():
    """Rank 0 has none; with two the slower one is slow, one alone is not."""
    even, transfer = np.full((5, 3), 0.1), np.tile([0.0, 0.02, 0.08], (5, 1))
    assert straggler(even, 0 * even, transfer, 0 * even) == Straggler(2, "link", pytest.approx(0.06))
    transfer[:, 1] = 0
    assert straggler(even, 0 * even, transfer, 0 * even) == Straggler()


def test_what_is_slow_in_half_of_the_steps_is_not_named():
    compute = np.full((20, 4), 0.1)
    compute[::2, 1] = 0.2
    compute[1, 1] = 0.2  # the median of an even number lies between two
    waiting = compute.max(1, keepdims=True) - compute
    assert straggler(compute, waiting, 0 * compute, 0 * compute) == Straggler()
    compute[:17, 1] = 0.2
    waiting = compute.max(1, keepdims=True) - compute
    assert straggler(compute, waiting, 0 * compute, 0 * compute).rank == 1


def test_what_is_slow_in_every_step_is_named_however_unlike_its_steps_are():
    """A share of a busy core: 0.1 s more in half of the steps, and any time from there to 2 s in the others."""
    rng, compute = np.random.default_rng(3), np.full((12, 4), 0.1)
    for _ in range(200):
        slow = compute.copy()
        slow[:, 1] += np.where(np.arange(12) < 6, 0.1, rng.uniform(0.1, 2, 12))
        waiting = slow.max(1, keepdims=True) - slow
        assert straggler(slow, waiting, 0 * slow, 0 * slow).rank == 1


def test_what_nobody_waits_for_is_not_slow():
    compute, waiting, transfer, loading = drawn(np.random.default_rng(0), 4)
    loading[:, 2] += 0.04
    compute[:, 2] -= 0.04  # the same in all: its input is late and its card early
    assert straggler(compute, waiting, transfer, loading) == Straggler()


def test_the_others_are_compared_with_and_not_all():
    """With two ranks the median of all is between them, and hides half of what is lost."""
    compute = np.tile([0.1, 0.112], (5, 1))
    waiting = compute.max(1, keepdims=True) - compute
    found = straggler(compute, waiting, np.zeros((5, 2)), np.zeros((5, 2)), least_share=0.1)
    assert found.rank == 1
    assert found.lost_seconds == pytest.approx(0.012)


def of_mean(compute, waiting, transfer, loading):
    rank = int(np.argmax(compute.mean(0)))
    return Straggler(rank, "card", 0.0)


def of_most_waiting(compute, waiting, transfer, loading):
    """The one that waits most is the fastest."""
    return Straggler(int(np.argmax(np.median(waiting, 0))), "card", 0.0)


def of_whole_step(compute, waiting, transfer, loading):
    """With the waiting counted all ranks' steps are as long."""
    return Straggler(int(np.argmax((compute + waiting + loading).mean(0))), "card", 0.0)


@pytest.mark.parametrize("mutant", [of_mean, of_most_waiting, of_whole_step])
def test_mutants_miss(mutant):
    right = 0
    rng = np.random.default_rng(3)
    for slow in (0, 1, 2, 3) * 5:
        found = mutant(*drawn(rng, 4, "card", slow, by=0.03))
        right += found.rank == slow
    assert right < 20


@pytest.mark.parametrize("name", ["compute_seconds", "waiting_seconds", "transfer_seconds", "input_seconds"])
@pytest.mark.parametrize("bad", [np.full((5, 2), np.nan), -np.ones((5, 2)), np.ones((5, 3)), np.ones(5), "a"])
def test_bad_input_is_refused_by_name(name, bad):
    given = dict.fromkeys(("compute_seconds", "waiting_seconds", "transfer_seconds", "input_seconds"), np.ones((5, 2)))
    with pytest.raises(ValueError, match=name if name != "compute_seconds" or np.ndim(bad) != 2 else "seconds"):
        straggler(**{**given, name: bad})


def test_too_few_steps_and_a_share_of_nothing_are_refused():
    two, five = np.ones((2, 2)), np.ones((5, 2))
    with pytest.raises(ValueError, match="at least 3 steps, not 2"):
        straggler(two, two, two, two)
    with pytest.raises(ValueError, match="least_share"):
        straggler(five, five, five, five, least_share=1)


WORK_S, LATE_S, SLOWER, STEPS, MESSAGE_BYTES = 0.012, 0.12, 12, 12, 400_000


def now():
    """Seconds of a clock that stands still while this rank waits for a core: that others are busy makes no card slow,
    and who is stopped does not wait for one."""
    told = Path("/proc/self/schedstat")  # not every kernel has it
    return time.perf_counter() - (int(told.read_text().split()[1]) / 1e9 if told.exists() else 0.0)


def measured(cause, slow):
    """Seconds of a rank's steps: input, computing, waiting, and a message from the rank before it in the ring."""
    rank, n, rows = dist.get_rank(), dist.get_world_size(), []
    out, back = torch.ones(MESSAGE_BYTES, dtype=torch.uint8), torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
    for step in range(STEPS + 1):
        lab.step(step)
        marks = [now()]
        time.sleep(WORK_S / 4 + (LATE_S if (cause, slow) == ("input", rank) else 0))
        marks.append(now())
        until = time.process_time() + WORK_S
        while time.process_time() < until:  # so much work, however long it takes
            pass
        marks.append(now())
        dist.barrier()
        marks.append(now())
        request = dist.isend(out, (rank + 1) % n)
        dist.recv(back, (rank - 1) % n)
        marks.append(now())
        request.wait()
        rows.append(np.maximum(np.diff(marks), 0))  # it may wait for a core between the two looks at a clock
    return rows[1:]


def found_on_ranks(cause, slow, n):
    """Whom it names where a card has a twelfth of the time, a link a twelfth of its rate, or input comes late."""
    faults = [lab.slow(rank=slow, step=1, factor=SLOWER, of=cause)] if cause in ("card", "link") else []
    cluster = lab.cluster(1, n, inside=40e6, across=40e6)
    rows = lab.run(measured, args=(cause, slow), cluster=cluster, faults=faults)
    loading, compute, waiting, came = np.array(rows).transpose(2, 1, 0)
    # A message is as slow as the slower of two links: what comes and what goes are both slow on a link that is.
    return straggler(compute, waiting, np.minimum(came, np.roll(came, -1, axis=1)), loading)


def expected(cause, slow):
    return (slow, cause) if cause else (None, None)


CASES = [("card", 0, 4), ("input", 2, 3), ("link", 2, 4), (None, 0, 4), ("card", 1, 2), ("link", 0, 3)]
EACH_CAUSE = CASES[:4]  # `make soak` takes all, twenty times


@pytest.fixture(scope="module")
def _cables(lacking):
    try:
        lab.run(int, cluster=lab.cluster(1, 1, inside=1e6, across=1e6))
    except RuntimeError as refused:
        lacking(str(refused))


@pytest.mark.usefixtures("_cables")
@pytest.mark.parametrize(("cause", "slow", "n"), EACH_CAUSE)
def test_ranks_slowed_on_purpose(cause, slow, n):
    found = found_on_ranks(cause, slow, n)
    assert (found.rank, found.cause) == expected(cause, slow), found


@pytest.mark.soak
@pytest.mark.usefixtures("_cables")
@pytest.mark.parametrize(("cause", "slow", "n"), CASES)
def test_ranks_slowed_on_purpose_twenty_times(cause, slow, n):
    found = [found_on_ranks(cause, slow, n) for _ in range(20)]
    assert [(each.rank, each.cause) for each in found] == [expected(cause, slow)] * 20
