"""The laws of runs that fail, against a simulation and drawn failures that do not know them."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from dtlib.theory import reliability as laws

HOUR = 3600.0


class TestFailures:
    @pytest.mark.parametrize("n", [1, 2, 3, 16, 1000])
    def test_rates_of_parts_add_up(self, n):
        """Each part replaced at once where it fails: all of them counted in the same time."""
        rng = np.random.default_rng(n)
        span, seen = 400 / n, 0
        for _ in range(n):  # parts whose lives are gamma, not exponential, long after they began
            lives = rng.gamma(4.0, 0.25, 200 + int(3 * span)).cumsum() - rng.uniform(20, 40)
            seen += int(((lives >= 0) & (lives < span)).sum())
        expected = laws.failures(span, laws.mtbf(n, 1.0))
        assert expected == pytest.approx(400)
        assert seen == pytest.approx(expected, abs=4 * math.sqrt(expected))

    def test_survival_is_the_share_of_days_without_failure(self):
        rng = np.random.default_rng(0)
        first = rng.exponential(8.0, (100_000, 4)).min(1)  # the first of four parts
        for t in (0.0, 0.5, 2.0, 6.0):
            assert laws.survival(t, laws.mtbf(4, 8.0)) == pytest.approx((first > t).mean(), abs=0.007)
        assert laws.survival(np.array([0.0, 2.0]), 2.0) == pytest.approx([1, math.exp(-1)])

    def test_a_thousand_nodes_for_a_day(self):
        assert laws.failures(24 * HOUR, laws.mtbf(1000, laws.node_mtbf(5.0))) == pytest.approx(5)


class TestInterval:
    @pytest.mark.parametrize("save", [1e-9, 1e-3, 0.1, 0.5, 1, 2, 5, 30])
    @pytest.mark.parametrize("mean", [1.0, 1e4])
    def test_the_best_is_best(self, save, mean):
        """Found by halving what neighbours leave, not by the equation of the derivative."""
        delta, best = save * mean, laws.best_interval(save * mean, mean)
        low, high = 0.0, 1.01 * mean
        for _ in range(200):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            ga, gb = (math.log(x / mean) - math.log(math.expm1((x + delta) / mean)) for x in (a, b))
            low, high = (a, high) if ga < gb else (low, b)
        assert best == pytest.approx((low + high) / 2, rel=1e-3 if save < 1e-3 else 1e-5)
        x = best / mean  # and to the digits that 1 − x has: (1 − x) e^x = e^{−δ/M}
        assert x + math.log1p(-x) == pytest.approx(-save, rel=1e-9, abs=1e-14 + 1e-15 * math.exp(save))

    def test_restart_and_detection_do_not_move_it(self):
        taus = np.linspace(10, 3000, 20_000)
        for restart, detect in ((0, 0), (900, 0), (60, 600)):
            best = taus[laws.goodput(taus, 30.0, 2000.0, restart, detect).argmax()]
            assert best == pytest.approx(laws.best_interval(30.0, 2000.0), abs=0.2)
        assert laws.daly_interval(30, 2000, restart=900) == laws.daly_interval(30, 2000)

    def test_youngs_and_dalys_lie_near_it_where_saves_are_short(self):
        far = {}
        for ratio in (1e-6, 1e-4, 1e-2, 0.1, 0.5):
            best = laws.best_interval(ratio, 1.0)
            young, daly = laws.young_interval(ratio, 1.0) / best - 1, laws.daly_interval(ratio, 1.0) / best - 1
            assert abs(daly) < abs(young)
            far[ratio] = (young, daly)
        assert 0 < far[1e-6][0] < 1e-3
        assert far[0.1][0] > 0.1  # Young's is longer
        assert all(abs(far[ratio][1]) < 5e-4 for ratio in (1e-6, 1e-4, 1e-2, 0.1))
        assert -0.01 < far[0.5][1] < -0.005

    @pytest.mark.parametrize("save", [1e-6, 0.01, 1, 3])
    def test_at_the_best_the_rest_is_what_the_interval_is_of_m(self, save):
        best = laws.best_interval(save, 1.0)
        assert laws.goodput(best, save, 1.0) == pytest.approx(1 - best, rel=1e-9)
        again = (1 - best) * math.exp(-0.2) / 1.1
        assert laws.goodput(best, save, 1.0, restart=0.2, detect=0.1) == pytest.approx(again, rel=1e-9)

    def test_ends(self):
        assert laws.best_interval(0, 5) == laws.young_interval(0, 5) == laws.daly_interval(0, 5) == 0
        assert laws.best_interval(1e6, 5) == pytest.approx(5)
        assert laws.daly_interval(10, 5) == 5 == laws.daly_interval(1e6, 5)

    def test_young_is_the_least_of_waste(self):
        taus = np.geomspace(1, 1e5, 100_001)
        costs = laws.waste(taus, 40.0, 20_000.0, 300, 60)
        assert taus[costs.argmin()] == pytest.approx(laws.young_interval(40.0, 20_000.0), rel=2e-4)
        assert costs.min() == pytest.approx(math.sqrt(2 * 40 / 20_000) + 360 / 20_000)


@functools.cache
def mean_split(intervals, runs, **given):
    """Parts of one interval, mean over runs, with the error of their mean."""
    seen = np.array([[*laws.simulate(seed=seed, **given).split.parts.values()] for seed in range(runs)]) / intervals
    return seen.mean(0), seen.std(0) / math.sqrt(runs)


CASES = [(10.0, 1.0, 20.0, 2.0, 0.5), (10.0, 3.0, 8.0, 4.0, 3.0), (5.0, 0.0, 30.0, 0.0, 0.0), (2.0, 1.0, 3.0, 0.0, 2.0)]


class TestGoodput:
    @pytest.mark.parametrize("case", CASES)
    def test_the_simulation_agrees_part_by_part(self, case):
        tau, save, mean, restart, detect = case
        seen, error = mean_split(
            50, 300, work=50 * tau, interval=tau, save=save, mtbf=mean, restart=restart, detect=detect
        )
        # e^{(τ+δ)/M} − 1 attempts fail in the work or the save; each took M − (τ+δ)/(e^{(τ+δ)/M} − 1).
        failed, again = math.expm1((tau + save) / mean), math.expm1(restart / mean)
        lost = mean * failed - (tau + save)
        law = laws.Split(tau, save, lost, failed * detect * (1 + again), failed * mean * again)
        assert np.all(abs(seen - [*law.parts.values()]) <= 4 * error + 1e-9)
        assert law.goodput == pytest.approx(laws.goodput(*case), rel=1e-12)

    @pytest.mark.parametrize("wrong", ["spared save", "spared restart", "half lost", "noticed again"])
    def test_wrong_laws_do_not(self, wrong):
        """Mutants: saves that no failure strikes, restarts likewise, half lost, failures while detecting."""
        tau, save, mean, restart, detect = 10.0, 3.0, 8.0, 4.0, 3.0
        grow, back = math.expm1, math.exp(restart / mean)
        seconds = {
            "spared save": grow(tau / mean) * back * (mean + detect) + save,
            "spared restart": grow((tau + save) / mean) * (mean + detect + restart),
            "half lost": tau + save + grow((tau + save) / mean) * ((tau + save) / 2 + restart + detect),
            "noticed again": grow((tau + save) / mean) * math.exp((restart + detect) / mean) * mean,
        }[wrong]
        seen, _ = mean_split(50, 300, work=500, interval=tau, save=save, mtbf=mean, restart=restart, detect=detect)
        assert abs(tau / seen.sum() - tau / seconds) > 0.03 * tau / seen.sum()
        assert laws.goodput(10.0, 3.0, 8.0, 4.0, 3.0) == pytest.approx(tau / seen.sum(), rel=0.02)

    def test_waste_is_its_first_order(self):
        for scale in (1e-3, 1e-4):
            tau, save, restart, detect = math.sqrt(scale), scale, scale, scale / 2  # in units of M
            loss = 1 / laws.goodput(tau, save, 1.0, restart, detect) - 1
            assert laws.waste(tau, save, 1.0, restart, detect) == pytest.approx(loss, abs=3 * scale)

    def test_ends(self):
        assert laws.goodput(1e6, 1, 10) == 0
        assert laws.goodput(1.0, 0, 1e12) == pytest.approx(1)
        assert laws.goodput(1.0, 0.25, 1e12) == pytest.approx(0.8)
        assert laws.waste(1e6, 1, 10) > 1


class TestSimulate:
    def test_by_hand(self):
        """Work 4, saves of 1 after each 2: one failure in the second interval, one while nothing runs, one in the
        restart."""
        run = laws.simulate(4, 2, 1, restart=2, detect=1, failures=[4.5, 5.0, 6.0])
        found = [(each.start, each.end, each.kind) for each in run.spans]
        assert found == [
            (0, 2, "work"), (2, 3, "save"), (3, 4.5, "lost"), (4.5, 5.5, "detect"), (5.5, 6, "restart"),
            (6, 7, "detect"), (7, 9, "restart"), (9, 11, "work"), (11, 12, "save"),
        ]  # fmt: skip
        assert run.failed == (4.5, 6.0)
        assert (run.seconds, run.split.total, run.goodput) == (12, 12, 4 / 12)

    def test_a_failure_in_a_save_undoes_the_work_before_it(self):
        run = laws.simulate(2, 2, 1, failures=[2.5])
        assert [(each.end, each.kind) for each in run.spans] == [(2.5, "lost"), (4.5, "work"), (5.5, "save")]

    def test_a_failure_during_a_write_goes_back_two_saves(self):
        run = laws.simulate(6, 2, 0, write=1, failures=[4.5])
        assert [(each.end, each.kind) for each in run.spans] == [
            (2, "work"), (4.5, "lost"), (6.5, "work"), (8.5, "work"), (9.5, "save"),
        ]  # fmt: skip
        late = laws.simulate(6, 2, 0, write=1, failures=[5.5])
        assert (late.split.lost, late.seconds) == (1.5, 8.5)

    def test_no_failure_and_a_shorter_last_interval(self):
        run = laws.simulate(5, 2, 1, failures=[])
        assert run.seconds == 8
        assert run.split.parts == {"work": 5, "save": 3, "lost": 0, "detect": 0, "restart": 0}
        assert len(laws.simulate(0.1 * 1000, 0.1, 0, failures=[]).spans) == 1000

    def test_spans_follow_each_other_and_a_seed_says_all(self):
        run = laws.simulate(500, 10, 1, 20, restart=2, detect=1, seed=3)
        assert run == laws.simulate(500, 10, 1, 20, restart=2, detect=1, seed=3)
        assert run != laws.simulate(500, 10, 1, 20, restart=2, detect=1, seed=4)
        assert all(one.end == two.start for one, two in zip(run.spans, run.spans[1:], strict=False))
        assert run.split.work == pytest.approx(500)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: laws.mtbf(0, 1), "units must be at least 1, not 0"),
        (lambda: laws.mtbf(2, 0), "unit_mtbf must be finite and positive, not 0"),
        (lambda: laws.node_mtbf(0), "per_1000_node_days"),
        (lambda: laws.failures(-1, 1), "seconds"),
        (lambda: laws.survival(1, 0), "mtbf"),
        (lambda: laws.young_interval(-1, 1), "save"),
        (lambda: laws.daly_interval(1, 1, -1), "restart"),
        (lambda: laws.best_interval(1, 0), "mtbf"),
        (lambda: laws.goodput(0, 1, 1), "interval"),
        (lambda: laws.waste(1, 1, 1, 1, -1), "detect"),
        (lambda: laws.simulate(1, 1, 1), "mtbf or failures must be given, and not both"),
        (lambda: laws.simulate(1, 1, 1, 5, failures=[1]), "mtbf or failures must be given, and not both"),
        (lambda: laws.simulate(1e9, 1, 0, 5), "work over interval must be at most 100,000"),
        (lambda: laws.simulate(10, 1, 0, failures=[-1]), "failures"),
        (lambda: laws.simulate(1, 1, 999, 1.0), "mtbf must be long enough for the run to end, not 1.0"),
        (lambda: laws.simulate(1, 1, 1, 1.0, restart=999), "mtbf must be long enough for the run to end, not 1.0"),
    ],
)
def test_what_is_out_of_range_is_named(call, words):
    with pytest.raises(ValueError) as refused:
        call()
    assert words in str(refused.value)
