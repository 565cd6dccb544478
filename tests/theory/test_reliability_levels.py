"""Saves in the background and on two levels, spares, checks, writers: against runs that know no law."""

from __future__ import annotations

import heapq
import itertools
import math

import numpy as np
import pytest

from dtlib.theory import reliability as laws


def two_levels(intervals, tau, near, far, every, share, mean, back, far_back, unseen, rng):
    """Seconds until so many intervals are done and, each `every`, in storage; failures of either kind as they come."""
    now, done, strike = 0.0, 0, rng.exponential(mean)
    stored = 0
    while done < intervals:
        needs = tau + near + (far if (done + 1) % every == 0 else 0)
        if now + needs <= strike:
            now, done = now + needs, done + 1
            stored = done if done % every == 0 else stored
            continue
        now, kept = strike, True
        while True:
            kept = kept and rng.random() < share
            now += unseen
            strike = now + rng.exponential(mean)  # what strikes while nothing runs changes nothing
            needs = back if kept else far_back
            if now + needs <= strike:
                now += needs
                break
            now = strike
        done = done if kept else stored
    return now


class TestBackground:
    @pytest.mark.parametrize("case", [(10.0, 1.0, 8.0, 30.0, 2.0, 1.0), (10.0, 0.0, 10.0, 12.0, 0.0, 0.0)])
    def test_a_simulated_run_takes_as_long(self, case):
        tau, stall, write, mean, restart, detect = case
        given = {"interval": tau, "save": stall, "mtbf": mean, "restart": restart, "detect": detect, "write": write}
        short, long = (
            np.array([laws.simulate(n * tau, seed=seed, **given).seconds for seed in range(400)]) for n in (20, 120)
        )
        seconds = long.mean() - short.mean()  # without the first write and the last
        error = math.hypot(long.std(), short.std()) / 20
        law = laws.background_goodput(tau, stall, write, mean, restart, detect)
        assert 100 * tau / law == pytest.approx(seconds, abs=4 * error)
        assert error < 0.025 * seconds
        blocked = laws.goodput(tau, stall, mean, restart, detect)  # mutant: a save is whole at once
        assert abs(100 * tau / blocked - seconds) > 5 * error

    def test_the_best_interval_is_that_of_the_stall_unless_writes_pile_up(self):
        for stall, write in ((2.0, 10.0), (2.0, 90.0)):
            best = laws.background_interval(stall, write, 500.0)
            taus = np.linspace(max(1.0, write - stall), 400, 20_000)
            found = taus[laws.background_goodput(taus, stall, write, 500.0, 30).argmax()]
            assert found == pytest.approx(best, abs=0.05)
        assert laws.background_interval(2.0, 90.0, 500.0) == 88

    def test_it_wins_over_a_save_that_stops_the_run_as_long_as_it_is_written(self):
        for mean, write in itertools.product((1e3, 1e4, 1e6), (1.0, 30.0, 200.0)):
            behind = laws.background_goodput(laws.background_interval(0, write, mean), 0, write, mean)
            assert behind > laws.goodput(laws.best_interval(write, mean), write, mean)


class TestTwoLevels:
    @pytest.mark.parametrize(
        "case",
        [
            (5.0, 0.5, 4.0, 6, 0.8, 40.0, 1.0, 6.0, 0.5),
            (4.0, 1.0, 2.0, 3, 0.3, 10.0, 3.0, 3.0, 0.0),
            (4.0, 0.0, 1.0, 1, 0.5, 12.0, 0.0, 5.0, 2.0),
        ],
    )
    def test_a_simulated_run_takes_as_long(self, case):
        tau, near, far, every, share, mean, back, far_back, unseen = case
        rng = np.random.default_rng(1)
        runs = np.array([
            two_levels(20 * every, tau, near, far, every, share, mean, back, far_back, unseen, rng) for _ in range(1200)
        ])  # fmt: skip
        assert 20 * every * tau / laws.two_level_goodput(*case) == pytest.approx(
            runs.mean(), abs=4 * runs.std() / math.sqrt(1200)
        )
        assert runs.std() / math.sqrt(1200) < 0.015 * runs.mean()

    def test_with_one_kind_of_failure_it_is_one_level(self):
        one = laws.goodput(50.0, 3.0, 400.0, 20, 5)
        assert laws.two_level_goodput(50, 3, 0, 7, 1.0, 400, 20, 99, 5) == pytest.approx(one, rel=1e-12)
        assert laws.two_level_goodput(50, 1, 2, 1, 0.0, 400, 99, 20, 5) == pytest.approx(one, rel=1e-12)
        whole = laws.goodput(200.0, 6.0, 400.0, 20, 5)  # near saves that nothing survives on
        assert laws.two_level_goodput(50, 1, 2, 4, 0.0, 400, 7, 20, 5) == pytest.approx(whole, rel=1e-12)

    def test_the_intervals_are_near_the_best(self):
        near, far, share, mean = 0.5, 60.0, 0.9, 10_000.0
        one, two = laws.two_level_intervals(near, far, share, mean)
        law = laws.two_level_goodput(one, near, far, round(two / one), share, mean)
        found = max(
            laws.two_level_goodput(tau, near, far, every, share, mean)
            for tau in np.geomspace(one / 4, 4 * one, 33) for every in range(5, 200)
        )  # fmt: skip
        assert law > found - 1e-3
        assert law > laws.goodput(laws.best_interval(far, mean), far, mean) + 0.05
        swapped = laws.two_level_intervals(near, far, 1 - share, mean)  # mutant: each has the other's failures
        assert laws.two_level_goodput(swapped[0], near, far, round(swapped[1] / swapped[0]), share, mean) < found - 0.01


def standing(nodes, spares, mean, repair, draw, seconds, rng):
    """The share of time that a job stands: failures only while it runs, repairs side by side."""
    now, stood, back = 0.0, 0.0, []
    while now < seconds:
        if len(back) > spares:
            ready = heapq.heappop(back)
            stood, now = stood + ready - now, ready
            continue
        strike = now + rng.exponential(mean / nodes)
        while back and back[0] <= strike:
            heapq.heappop(back)
        now = strike
        heapq.heappush(back, now + draw(rng) * repair)
    return stood / now


class TestSpares:
    @pytest.mark.parametrize(("nodes", "mean", "repair"), [(50, 400.0, 20.0), (8, 10.0, 1.0), (1000, 900.0, 30.0)])
    def test_how_many_are_in_repair(self, nodes, mean, repair):
        rng = np.random.default_rng(nodes)
        times = rng.exponential(mean / nodes, 300_000).cumsum()
        ends = times + repair * rng.uniform(0, 2, len(times))
        at = np.linspace(times[-1] / 10, times[-1] * 0.9, 20_000)
        in_repair = np.searchsorted(times, at) - np.searchsorted(np.sort(ends), at)
        for k in range(0, 60, 4):
            law = laws.spares_suffice(k, nodes, mean, repair)
            assert law == pytest.approx((in_repair <= k).mean(), abs=0.025)
        few = laws.spares_needed(nodes, mean, repair, 0.99)
        suffices = [laws.spares_suffice(k, nodes, mean, repair) for k in (few - 1, few)]
        assert suffices[0] < 0.99 <= suffices[1]

    @pytest.mark.parametrize("spares", [0, 1, 3])
    @pytest.mark.parametrize("law", ["fixed", "exponential"])
    def test_how_long_a_job_stands(self, spares, law):
        rng = np.random.default_rng(spares)
        draw = (lambda r: 1.0) if law == "fixed" else (lambda r: r.exponential())
        seen = standing(20, spares, 100.0, 8.0, draw, 400_000, rng)
        assert laws.standing_share(spares, 20, 100.0, 8.0) == pytest.approx(seen, abs=0.01)
        assert laws.standing_share(0, 20, 100.0, 8.0) == pytest.approx(8 / (8 + 5))

    @pytest.mark.parametrize("ratio", [100.0, 10_000.0, 90_000.0])
    def test_from_how_many_nodes_a_spare_pays(self, ratio):
        bound = laws.spare_pays_from(ratio, 1.0)
        for n in range(1, int(2 * bound)):
            with_one, without = n / (n + 1), 1 / (1 + n / ratio)
            assert (with_one > without) == (n > bound * (1 + 1e-12))

    def test_large_loads(self):
        assert laws.spares_suffice(2000, 10_000, 1e5, 2e4) == pytest.approx(0.506, abs=0.002)
        assert (laws.spares_suffice(0, 1, 1e5, 0), laws.spares_needed(1, 1e5, 0)) == (1, 0)
        assert laws.spares_needed(10_000, 1e5, 1e5, 1 - 1e-9) == pytest.approx(10_600, abs=5)
        assert laws.standing_share(9_999, 10_000, 1e5, 2e4) == pytest.approx(0, abs=1e-12)


class TestSilent:
    @pytest.mark.parametrize("case", [(10.0, 1.0, 30.0, 5.0), (10.0, 2.0, 8.0, 0.0)])
    def test_a_simulated_run_takes_as_long(self, case):
        tau, check, mean, restart = case
        rng = np.random.default_rng(2)
        seconds, good = 0.0, 0
        for _ in range(60_000):  # until the next corruption, counted in seconds of work from a right state
            right = int(rng.exponential(mean) // tau)
            good += right
            seconds += (right + 1) * (tau + check) + restart
        assert laws.checked_goodput(*case) == pytest.approx(good * tau / seconds, rel=0.02)
        assert laws.goodput(tau, check, mean, restart) > 1.1 * laws.checked_goodput(*case)  # mutant: noticed at once

    @pytest.mark.parametrize("check", [1e-6, 0.01, 1.0, 50.0])
    def test_the_best_is_best(self, check):
        best = laws.check_interval(check, 1.0)
        taus = best * np.linspace(0.5, 2, 30_001)
        assert taus[laws.checked_goodput(taus, check, 1.0).argmax()] == pytest.approx(best, rel=1e-3)
        assert best < math.sqrt(check)
        assert laws.check_interval(0, 1.0) == 0
        if check < 1e-5:
            assert best == pytest.approx(math.sqrt(check), rel=1e-3)


class TestSaves:
    def test_nothing_is_written_twice_and_nothing_is_left_out(self):
        for recipe, n, stage in itertools.product(("12-byte", "16-byte", "20-byte", "fp32"), (1, 2, 3, 8), range(4)):
            parts = [laws.rank_save_bytes(1e9, n, stage, rank, recipe) for rank in range(n)]
            assert sum(parts) == pytest.approx(laws.save_bytes(1e9, recipe))
        assert [laws.rank_save_bytes(100, 4, stage, 0) for stage in range(4)] == [1400, 500, 500, 350]
        assert [laws.rank_save_bytes(100, 4, stage, 3) for stage in range(4)] == [0, 300, 300, 350]

    def test_bytes_by_recipe(self):
        assert [laws.save_bytes(1, each) for each in ("12-byte", "16-byte", "18-byte", "20-byte", "fp32")] == [
            10, 14, 14, 14, 12,
        ]  # fmt: skip
        assert laws.save_bytes(1, "16-byte", weights=False) == 12
        with pytest.raises(ValueError, match="weights must be True for a recipe without a master copy, as fp32 is"):
            laws.save_bytes(1, "fp32", weights=False)

    @pytest.mark.parametrize("opens", [0, 1e-3, 0.1, 5, 1000])
    def test_the_best_number_of_writers_is_best(self, opens):
        for total, rate, storage, most in itertools.product((1, 900), (1, 7), (5, 64), (1, 6, 99)):
            found = laws.best_writers(total, rate, storage, most, opens)
            seconds = [laws.save_seconds(total, n, rate, storage, opens) for n in range(1, most + 1)]
            assert found == 1 + int(np.argmin(seconds))

    def test_seconds_are_those_of_writers_that_share_the_storage(self):
        """Small steps of time: each writer takes its rate, or its part of what the storage takes."""
        for n in (1, 3, 10):
            left, now, dt = [240.0 / n] * n, 0.0, 0.01
            while sum(left) > 1e-9:
                busy = [i for i in range(n) if left[i] > 1e-9]
                for i in busy:
                    left[i] -= min(7.0, 40.0 / len(busy)) * dt
                now += dt
            assert laws.save_seconds(240, n, 7, 40) == pytest.approx(now, abs=0.02)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: laws.background_goodput(5, 1, 7, 100), "write must be at most interval and stall together, not 7"),
        (lambda: laws.background_interval(-1, 1, 1), "stall"),
        (lambda: laws.two_level_goodput(1, 1, 1, 0, 0.5, 1), "every must be at least 1, not 0"),
        (lambda: laws.two_level_goodput(1, 1, 1, 1, 1.5, 1), "near_share must be at most 1, not 1.5"),
        (lambda: laws.two_level_goodput(1e6, 1, 1, 1, 0.5, 1), "mtbf must be at least a 700th"),
        (lambda: laws.two_level_intervals(1, 1, 1, 1), "near_share must be below 1, not 1"),
        (lambda: laws.two_level_intervals(1, 1, 0, 1), "near_share"),
        (lambda: laws.spares_suffice(-1, 1, 1, 1), "spares"),
        (lambda: laws.spares_suffice(10**9, 1, 1, 1), "spares must be at most 10,000"),
        (lambda: laws.spares_needed(5, 1, 1, 1.0), "chance must be at most 1 − 1e-9, not 1.0"),
        (lambda: laws.spares_needed(10**6, 1, 1), "repair must be so short"),
        (lambda: laws.spare_pays_from(1, 0), "repair"),
        (lambda: laws.checked_goodput(0, 1, 1), "interval"),
        (lambda: laws.check_interval(-1, 1), "check"),
        (lambda: laws.save_bytes(-1), "num_params"),
        (lambda: laws.rank_save_bytes(1, 2, 4, 0), "stage must be 0, 1, 2 or 3, not 4"),
        (lambda: laws.rank_save_bytes(1, 2, 1, 2), "rank must be below the number of ranks, 2, not 2"),
        (lambda: laws.save_seconds(1, 0, 1, 1), "writers"),
        (lambda: laws.save_seconds(1, 1, 1, 0), "storage_rate"),
        (lambda: laws.best_writers(1, 1, 1, 0), "most"),
    ],
)
def test_what_is_out_of_range_is_named(call, words):
    with pytest.raises(ValueError) as refused:
        call()
    assert words in str(refused.value)
