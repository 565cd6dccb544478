"""The laws of not waiting, against simulations and enumerations that do not know them."""

from __future__ import annotations

import csv
import heapq
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from dtlib.theory import asynchrony as laws

DATA = Path(__file__).parents[2] / "chapters" / "data"


def history(draw, workers, updates, bound=None):
    """(worker, age, clock) of each update: a worker's next gradient takes draw(worker, k); a `bound` makes it wait."""
    clocks, fetched, waiting = [0] * workers, [0] * workers, set()
    under_way = [(draw(worker, 0), worker) for worker in range(workers)]
    heapq.heapify(under_way)
    version, found = 0, []
    while len(found) < updates:
        now, worker = heapq.heappop(under_way)
        found.append((worker, version - fetched[worker], clocks[worker]))
        version += 1
        clocks[worker] += 1
        waiting.add(worker)
        for each in sorted(waiting):
            if bound is None or clocks[each] - min(clocks) <= bound:
                waiting.discard(each)
                fetched[each] = version
                heapq.heappush(under_way, (now + draw(each, clocks[each]), each))
    ages = sum(version - fetched[worker] for worker in range(workers) if worker not in waiting)
    return found, ages


def busy(gap, travel, hidden, updates=1000):
    """Share of the time computing: a fragment leaves every `gap` of computing and is needed `hidden` of it later."""
    events = sorted((k * gap + late, kind, k) for k in range(updates) for kind, late in ((0, 0.0), (1, hidden)))
    computed = seconds = free = 0.0
    there, half = {}, (0.0, 0.0)
    for at, kind, k in events:
        seconds, computed = seconds + at - computed, at
        if kind == 0:
            free = there[k] = max(free, seconds) + travel
        else:
            seconds = max(seconds, there[k])
            half = (computed, seconds) if k == updates // 2 else half
    return (computed - half[0]) / (seconds - half[1])


def radius(a, tau):
    """The factor by which |w| shrinks or grows an update in the long run."""
    return abs(np.roots([1.0, -1.0, *[0.0] * (tau - 1), a] if tau else [1.0, a - 1])).max()


def taken(n, *behind):
    """What each of `n` ranks takes of each: equal parts of itself and of those so far behind."""
    return sum(np.roll(np.eye(n), far, axis=0) for far in (0, *behind)) / (1 + len(behind))


class TestStragglers:
    @pytest.mark.parametrize("n", [1, 2, 3, 16, 100])
    def test_the_slowest_is_as_drawn(self, n):
        rng = np.random.default_rng(n)
        drawn = rng.exponential(3.0, (40_000, n)).max(1)
        assert laws.expected_slowest(3.0, n) == pytest.approx(drawn.mean(), abs=4 * drawn.std() / 200)
        drawn = rng.normal(10, 2, (40_000, n)).max(1)
        law = laws.expected_slowest_normal(10, 2, n)
        assert law == pytest.approx(drawn.mean(), abs=4 * drawn.std() / 200)
        assert law <= 10 + 2 * math.sqrt(2 * math.log(n)) + 1e-9
        samples = rng.gamma(2.0, 1.0, 37)
        drawn = rng.choice(samples, (40_000, n)).max(1)
        assert laws.expected_slowest_of(samples, n) == pytest.approx(drawn.mean(), abs=4 * drawn.std() / 200 + 1e-9)

    def test_known_maxima_of_normals(self):
        """1/√π for two, 3/(2√π) for three; 2.508 for a hundred (tables of order statistics)."""
        assert laws.expected_slowest_normal(0, 1, 2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-9)
        assert laws.expected_slowest_normal(0, 1, 3) == pytest.approx(1.5 / math.sqrt(math.pi), rel=1e-9)
        assert laws.expected_slowest_normal(0, 1, 100) == pytest.approx(2.50759, rel=1e-5)
        assert laws.expected_slowest_normal(5, 0, 10**6) == 5

    def test_the_kth_is_as_drawn(self):
        rng = np.random.default_rng(0)
        drawn = np.sort(rng.exponential(1.0, (20_000, 9)), axis=1)
        for k in range(1, 10):
            assert laws.expected_kth(1.0, 9, k) == pytest.approx(drawn[:, k - 1].mean(), abs=0.04)
        assert laws.expected_kth(1, 9, 9) == laws.expected_slowest(1, 9)

    def test_rates_are_those_of_the_clock(self):
        times = (0.7, 1.0, 3.1)
        free, _ = history(lambda worker, _: times[worker], 3, 5000)
        counts = np.bincount([worker for worker, *_ in free])
        assert laws.async_rate(times) == pytest.approx(5000 / (counts[0] * 0.7), rel=2e-3)
        assert laws.sync_rate(times) == pytest.approx(3 / 3.1)


class TestServer:
    @pytest.mark.parametrize("n", [1, 2, 3, 8])
    def test_ages_are_conserved_whatever_the_times(self, n):
        rng = np.random.default_rng(n)
        for draw in (lambda *_: rng.exponential(), lambda worker, _: 1 + worker**2, lambda *_: rng.pareto(1.1) + 0.1):
            found, rest = history(draw, n, 3000)
            assert sum(age for _, age, _ in found) + rest == laws.mean_staleness(n) * 3000

    def test_a_worker_is_as_stale_as_it_is_slow(self):
        times = np.array([1.0, math.sqrt(2), math.pi, 7.1])
        found, _ = history(lambda worker, _: times[worker], 4, 60_000)
        seen = [np.mean([age for who, age, _ in found if who == worker]) for worker in range(4)]
        assert laws.staleness_of(times) == pytest.approx(seen, rel=0.01)
        shares = (1 / times) / (1 / times).sum()
        assert shares @ laws.staleness_of(times) == pytest.approx(laws.mean_staleness(4))

    @pytest.mark.parametrize("times", [(1, 1, 1), (1, 1, 3), (2, 3, 4), (1, 2, 2, 8)])
    def test_ties_and_chance_do_not_matter_to_the_mean(self, times):
        rng = np.random.default_rng(0)
        for draw in (lambda worker, _: times[worker], lambda worker, _: rng.gamma(4, times[worker] / 4)):
            found, _ = history(draw, len(times), 40_000)
            seen = [np.mean([age for who, age, _ in found if who == worker]) for worker in range(len(times))]
            assert laws.staleness_of(times) == pytest.approx(seen, rel=0.025)

    def test_exponential_times_give_a_geometric_law(self):
        rng = np.random.default_rng(0)
        found, _ = history(lambda *_: rng.exponential(), 5, 60_000)
        seen = np.bincount([age for _, age, _ in found], minlength=40)[:12] / 60_000
        assert laws.staleness_distribution(5, np.arange(12)) == pytest.approx(seen, abs=0.005)
        every = laws.staleness_distribution(5, np.arange(2000))
        assert every.sum() == pytest.approx(1)
        assert (every * np.arange(2000)).sum() == pytest.approx(laws.mean_staleness(5))

    @pytest.mark.parametrize(("n", "bound"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 1), (2, 3)])
    def test_the_bound_is_met_and_never_passed(self, n, bound):
        """All orders in which workers that may run hand in, by the worst that each state can still bring."""
        worst, seen = 0, set()
        start = ((0,) * n, (0,) * n, frozenset())
        states = [start]
        while states:
            clocks, ages, waiting = states.pop()
            key = (tuple(c - min(clocks) for c in clocks), ages, waiting)
            if key in seen:
                continue
            seen.add(key)
            for worker in range(n):
                if worker in waiting:
                    continue
                worst = max(worst, ages[worker])
                ticked = tuple(c + (each == worker) for each, c in enumerate(clocks))
                aged = [age + (each != worker and each not in waiting) for each, age in enumerate(ages)]
                may_run = {each for each in {*waiting, worker} if ticked[each] - min(ticked) <= bound}
                for each in may_run:
                    aged[each] = 0
                still = frozenset({*waiting, worker} - may_run)
                for each in still:
                    aged[each] = 0
                states.append((ticked, tuple(aged), still))
        assert worst == laws.staleness_bound(n, bound)

    @pytest.mark.parametrize("servers", [1, 3])
    def test_more_workers_than_the_limit_queue(self, servers):
        """A link that takes one gradient at a time, D/(S B) each; workers begin evenly spread and keep their turns."""
        full, compute, rate = 6e6, 0.05, 1e9
        limit = laws.server_limit(full, compute, rate, servers)
        for n in (math.floor(limit), math.ceil(limit * 1.05) + 1):
            cycle, busy = compute + 2 * full / rate, full / rate / servers
            free, starts = 0.0, [worker * cycle / n for worker in range(n)]
            queued = 0.0
            for _ in range(40 * n):
                worker = int(np.argmin(starts))
                queued = max(queued, free - starts[worker])
                begin = max(free, starts[worker])
                free, starts[worker] = begin + busy, begin + cycle
            assert (queued < 1e-9) == (n <= limit)

    def test_bytes(self):
        assert laws.server_bytes(100, 7) == 700
        assert laws.server_bytes(100, 8, 4) == 200


class TestStability:
    @pytest.mark.parametrize("tau", [0, 1, 2, 3, 7, 30])
    def test_the_largest_rate_is_where_iterations_stop_vanishing(self, tau):
        def grows(a):
            past = [1.0] * (tau + 1)
            for _ in range(400 * (tau + 1)):
                past.append(past[-1] - a * past[-1 - tau])
                if abs(past[-1]) > 1e6:
                    return True
            return max(map(abs, past[-50 - 4 * tau :])) > 1

        low, high = 0.0, 2.5
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (low, middle) if grows(middle) else (middle, high)
        assert laws.stable_rate(1.0, tau) == pytest.approx(low, rel=0.01)
        assert radius(laws.stable_rate(1, tau), tau) == pytest.approx(1, abs=1e-9)
        assert laws.stable_rate(5.0, tau) == pytest.approx(laws.stable_rate(1, tau) / 5)

    @pytest.mark.parametrize("tau", [0, 1, 2, 5, 12])
    def test_no_rate_is_faster(self, tau):
        best = laws.fastest_rate(1, tau)
        least = radius(best, tau)
        assert least == pytest.approx(tau / (tau + 1), abs=2e-4)  # a double root loses half of the digits
        for a in np.linspace(0.01, laws.stable_rate(1, tau), 80):
            assert radius(a, tau) >= least - 1e-4

    def test_rates_of_long_delays(self):
        assert laws.stable_rate(1, 10_000) == pytest.approx(math.pi / 20_001, rel=1e-6)
        assert laws.fastest_rate(1, 10_000) == pytest.approx(1 / (math.e * 10_000.5), rel=1e-6)

    @pytest.mark.parametrize("n", [1, 2, 5])
    def test_mean_weights_of_geometric_ages_have_momentum(self, n):
        """The exact mean over the ages, by the whole sum, and the recursion that the law names."""
        a, momentum = 0.3, laws.implicit_momentum(n)
        w = [1.0] * 3001  # since long ago
        for _ in range(60):
            ages = laws.staleness_distribution(n, np.arange(3000))
            w.append(w[-1] - a * float(ages @ np.array(w[-1:-3001:-1])))
        for t in range(3001, 3060):
            step = momentum * (w[t] - w[t - 1]) - a / n * w[t]
            assert w[t + 1] - w[t] == pytest.approx(step, abs=1e-12)


class TestLocal:
    def test_bytes(self):
        assert laws.local_bytes(100, 4, 8) == 8 * 150
        assert [laws.local_bytes(100, 4, 8, h) / 150 for h in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 0]
        assert laws.local_bytes(100, 1, 8) == 0

    @pytest.mark.parametrize(("rate", "curvature", "n"), [(0.2, 0.5, 4), (0.2, 9.0, 3), (0.1, 0.0, 2), (1.0, 2.0, 2)])
    def test_drift_is_as_drawn(self, rate, curvature, n):
        rng = np.random.default_rng(0)
        x = np.ones((40_000, n))
        for k in range(1, 13):
            x = x - rate * (curvature * x + rng.normal(0, 1.5, x.shape))
            apart = (x - x.mean(1, keepdims=True)) ** 2
            assert laws.drift_noise(rate, curvature, 2.25, k, n) == pytest.approx(apart.mean(), rel=0.03)

    def test_drift_of_flat_directions_grows_by_a_step_at_a_time(self):
        for curvature in (0.0, 1e-17, 1e-14):
            assert laws.drift_noise(0.1, curvature, 1, 7, 2) == pytest.approx(0.01 / 2 * 7, rel=1e-12)
        assert laws.drift_noise(0.1, 10, 1, 7, 2) == pytest.approx(0.01 / 2)  # each step forgets all before
        assert laws.drift_noise(0.1, 10, 1, 0, 2) == 0

    @pytest.mark.parametrize("h", [1, 2, 5, 40])
    def test_the_fixed_point_is_where_averages_stay(self, h):
        curvatures, optima, weights = np.array([0.5, 3.0, 9.0]), np.array([-2.0, 0.0, 7.0]), np.array([1.0, 2.0, 3.0])
        x = 0.0
        for _ in range(4000):
            ranks = np.full(3, x)
            for _ in range(h):
                ranks = ranks - 0.15 * curvatures * (ranks - optima)
            x = float(np.average(ranks, weights=weights))
        found = laws.local_fixed_point(curvatures, optima, weights, 0.15, h)
        assert found == pytest.approx(x, abs=1e-9)
        if h == 1:
            assert found == pytest.approx(np.average(optima, weights=weights * curvatures))

    def test_long_walks_end_at_the_mean_of_the_optima(self):
        assert laws.local_fixed_point([1, 5], [0, 8], [1, 3], 0.1, 10_000) == pytest.approx(6)


class TestBandwidth:
    @pytest.mark.parametrize(("h", "hidden", "pieces"), [(1, 0.0, 1), (100, 0.3, 1), (7, 0.01, 8)])
    def test_one_is_the_inverse_of_the_other(self, h, hidden, pieces):
        for share in (0.3, 0.9, 0.99):
            needed = laws.bandwidth_for(share, 2e9, 0.5, 4, h, hidden, pieces)
            assert laws.utilisation(2e9, 0.5, 4, needed, h, hidden, pieces) == pytest.approx(share)
            assert laws.utilisation(2e9, 0.5, 4, needed / 2, h, hidden, pieces) < share

    def test_a_link_that_sends_one_fragment_at_a_time_agrees(self):
        """Fragments leave evenly; computing stops where one is not there in time. Long overlaps keep the link busy."""
        rng = np.random.default_rng(0)
        for _ in range(150):
            h, pieces, n = (int(rng.choice(each)) for each in ((1, 2, 7, 30), (1, 2, 5), (2, 3, 8)))
            step, full, rate = rng.uniform(0.1, 1), rng.uniform(0.1, 4), rng.uniform(0.1, 8)
            gap = h * step / pieces
            hidden = float(rng.choice([0, rng.uniform(0, 2 * gap)]))
            law = laws.utilisation(full, step, n, rate, h, hidden, pieces)
            assert busy(gap, 2 * (n - 1) / n * full / rate / pieces, hidden) == pytest.approx(law, rel=0.01)
            if law < 0.999:
                assert laws.bandwidth_for(law, full, step, n, h, hidden, pieces) == pytest.approx(rate)

    def test_others_simulation_is_met_to_one_step_of_its_grid_and_in_two_cells_by_layers_alone(self):
        with open(DATA / "diloco_bandwidth_table4.csv", encoding="utf-8") as file:
            table = list(csv.DictReader(file))
        missed = []
        for row, share in itertools.product(table, (50, 80, 90, 95, 99)):
            method, step, layers = row["method"], float(row["step_s"]), int(row["layers"])
            whole, late = "Parallel" in method or "Vanilla" in method, int("overlapped" in method)
            full = float(row["model"][:-1]) * 1e9 * (0.5 if "FP4" in method else 2)
            pieces, h = 1 if whole else layers // 3, 1 if "Parallel" in method else 100
            ours = 8e-9 * laws.bandwidth_for(share / 100, full, step, 2, h, (2 / 3 + late) * step, pieces)
            printed = float(row[f"Gbit_s_for_{share}pct"])
            if abs(math.log(ours / printed)) > math.log(1.207):
                missed.append((row["model"], method.split()[0], share))
            busy = [
                h * step / (h * step + laws.wait_by_layer(8e-9 * full / rate, step, layers, pieces, late))
                for rate in (printed / 1.207, printed * 1.207)
            ]
            assert busy[0] < share / 100 <= busy[1]
        assert missed == [("1B", "Data-Parallel", 99), ("100B", "Streaming", 99)]

    def test_the_wait_of_two_layers_by_hand(self):
        # Backward passes of 2 s a layer, forward of 1 s: layer 1 leaves at −2, layer 0 at 0 or when the link is free.
        assert laws.wait_by_layer(6, 6, 2) == 4  # layer 1 is there at 1, as it must be; layer 0 leaves then
        assert laws.wait_by_layer(6, 6, 2, fragments=2) == 3  # layer 0, a fragment of its own, leaves at 0
        assert laws.wait_by_layer(12, 6, 2) == 10
        assert laws.wait_by_layer(12, 6, 2, fragments=2) == 6 + 3
        assert laws.wait_by_layer(12, 6, 2, steps_late=1) == 4
        assert laws.wait_by_layer(0, 6, 2) == 0
        with pytest.raises(ValueError, match="layers must be at least 1"):
            laws.wait_by_layer(1, 1, 0)


class TestGossip:
    @pytest.mark.parametrize("n", [3, 4, 5, 16, 41])
    def test_the_gap_is_that_of_the_matrix(self, n):
        matrix = taken(n, 1, -1)
        sizes = np.sort(abs(np.linalg.eigvalsh(matrix)))[::-1]
        assert laws.spectral_gap_ring(n) == pytest.approx(1 - sizes[1])
        x = np.random.default_rng(0).normal(size=n)
        apart = [np.linalg.norm(each - each.mean()) for each in (x, matrix @ x)]
        assert apart[1] <= (1 - laws.spectral_gap_ring(n)) * apart[0] + 1e-12

    @pytest.mark.parametrize("n", [1, 2, 4, 8, 32])
    def test_a_power_of_two_has_the_mean_after_its_rounds_and_not_before(self, n):
        product = np.eye(n)
        for i in range(laws.exponential_rounds(n)):
            assert not np.allclose(product, 1 / n)
            product = taken(n, 2**i) @ product
        assert product == pytest.approx(np.full((n, n), 1 / n))

    def test_other_numbers_only_come_near(self):
        product = np.eye(6)
        for i in range(12):
            product = taken(6, 2 ** (i % 3)) @ product
            assert product.sum(0) == pytest.approx(1)
            assert not np.allclose(product, 1 / 6, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: laws.expected_slowest(-1, 2), "mean must be finite and zero or more"),
        (lambda: laws.expected_kth(1, 3, 4), "kth must be at most n=3, not 4"),
        (lambda: laws.expected_slowest_of([], 2), "samples must be a row"),
        (lambda: laws.expected_slowest_normal(1, float("nan"), 2), "deviation must be finite"),
        (lambda: laws.async_rate([1, 0]), "times must be finite and positive"),
        (lambda: laws.sync_rate(3.0), "times must be a row"),
        (lambda: laws.staleness_distribution(3, 1.5), "k must be whole numbers"),
        (lambda: laws.staleness_bound(3, -1), "bound must be at least 0"),
        (lambda: laws.server_limit(0, 1, 1), "full_bytes must be finite and positive"),
        (lambda: laws.stable_rate(0, 1), "curvature must be finite and positive"),
        (lambda: laws.stable_rate(1, 0.5), "delay must be a whole number"),
        (lambda: laws.local_bytes(1, 2, 3, 0), "local_steps must be at least 1"),
        (lambda: laws.local_fixed_point([1], [1, 2], [1], 0.1, 1), "must be of one length, not 1, 2 and 1"),
        (lambda: laws.local_fixed_point([1, 30], [1, 2], [1, 1], 0.1, 1), "rate must be below 2 over the largest"),
        (lambda: laws.local_fixed_point([1], [math.inf], [1], 0.1, 1), "optima must be finite"),
        (lambda: laws.bandwidth_for(1.0, 1, 1, 2), "share must be below 1"),
        (lambda: laws.bandwidth_for(1.5, 1, 1, 2, 1, 9.0), "share must be below 1"),
        (lambda: laws.spectral_gap_ring(2), "n must be at least 3"),
        (lambda: laws.exponential_rounds(6), "n must be a power of two, not 6"),
    ],
)
def test_bad_input_is_told_by_name(call, told):
    with pytest.raises(ValueError, match=told):
        call()
