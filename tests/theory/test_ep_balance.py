"""Balance under uniform routing, against every routing there is and drawn ones; the loss and the bias that mend it."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dtlib.theory import ep

from .test_ep import close


def sets_of(e: int, k: int) -> np.ndarray:
    """A row for each set of k experts: 1 where it has the expert."""
    sets = np.array(list(combinations(range(e), k)))
    rows = np.zeros((len(sets), e), dtype=int)
    np.put_along_axis(rows, sets, 1, axis=1)
    return rows


def drawn(tokens: int, by_set: np.ndarray, times: int) -> np.ndarray:
    """What so many batches of uniform routing add up to: how many tokens drew each set, times what a set has."""
    return np.random.default_rng(0).multinomial(tokens, [1 / len(by_set)] * len(by_set), size=times) @ by_set


def every(tokens: int, e: int, k: int):
    """The loads of all routings of so many tokens."""
    for routing in product(combinations(range(e), k), repeat=tokens):
        yield ep.loads(routing, e)


# --- the busiest rank ------------------------------------------------------------------------------------------


def busiest(t: int, e: int, k: int, n: int, copies: str, times: int) -> tuple[float, float]:
    """The mean of the busiest rank's copies over drawn batches, and by how much it may be off."""
    by_rank = sets_of(e, k).reshape(-1, n, e // n).sum(axis=2)
    most = drawn(t * n, np.minimum(by_rank, 1) if copies == "rank" else by_rank, times).max(axis=1)
    return float(most.mean()), float(most.std() / np.sqrt(times))


@pytest.mark.parametrize("copies", ["expert", "rank"])
@pytest.mark.parametrize(
    ("t", "e", "k", "n"),
    [(64, 16, 2, 4), (200, 16, 1, 2), (50, 10, 4, 10), (300, 12, 3, 3), (64, 12, 6, 4), (64, 32, 2, 32)],
)
def test_the_busiest_rank_is_that_of_drawn_batches(t, e, k, n, copies):
    seen, off = busiest(t, e, k, n, copies, times=2000)
    close(ep.busiest_rank_tokens(t, e, k, n, copies), seen, rel=0.006)
    assert ep.busiest_rank_tokens(t, e, k, n, copies) == pytest.approx(seen, abs=4 * off + 0.8)


@pytest.mark.parametrize(
    ("t", "e", "k", "n"), [(1, 64, 1, 64), (4, 64, 1, 64), (4, 32, 2, 8), (2, 16, 2, 16), (1, 4, 2, 2)]
)
def test_with_few_tokens_the_law_is_off_by_less_than_one(t, e, k, n):
    seen, _ = busiest(t, e, k, n, "expert", times=3000)
    assert abs(ep.busiest_rank_tokens(t, e, k, n) - seen) < 1


def test_where_nothing_can_be_uneven_nothing_is():
    assert ep.busiest_rank_tokens(7, 8, 8, 4) == pytest.approx(7 * 8)  # k = E
    assert ep.busiest_rank_tokens(7, 8, 3, 1) == pytest.approx(7 * 3)  # N = 1
    assert ep.busiest_rank_tokens(7, 1, 1, 1) == pytest.approx(7)
    assert ep.busiest_rank_tokens(7, 8, 3, 1, "rank") == pytest.approx(7)
    assert ep.busiest_rank_tokens(7, 8, 8, 4, "rank") == pytest.approx(7 * 4)
    assert ep.busiest_rank_tokens(0, 8, 2, 4) == 0


def test_distinct_choices_are_more_even_than_independent_ones():
    """A mutant that draws with replacement has no factor (E − k)/(E − 1)."""
    t, e, k, n = 400, 8, 4, 4
    seen, off = busiest(t, e, k, n, "expert", times=2000)
    independent = t * k + ep.largest_normal(n) * np.sqrt(t * k)
    assert independent - seen > 10 * off


@pytest.mark.parametrize(("n", "mean"), [(1, 0.0), (2, 1 / np.sqrt(np.pi)), (3, 1.5 / np.sqrt(np.pi)), (5, 1.162964)])
def test_the_largest_of_few_normal_numbers(n, mean):
    assert ep.largest_normal(n) == pytest.approx(mean, abs=1e-6)


# --- capacity --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.4, 0.5, 1, 1.2, 1.5, 2])
@pytest.mark.parametrize(("t", "e", "k"), [(3, 4, 2), (4, 3, 1), (5, 3, 2), (2, 3, 3), (3, 1, 1)])
def test_dropped_and_padded_are_those_of_all_routings(t, e, k, factor):
    slots = ep.capacity(t, k, e, factor)
    kept = np.mean([np.minimum(loads, slots).sum() for loads in every(t, e, k)])
    assert ep.dropped_share(t, k, e, factor) == pytest.approx(1 - kept / (t * k), abs=1e-12)
    assert ep.padded_share(t, k, e, factor) == pytest.approx(1 - kept / (e * slots), abs=1e-12)


@pytest.mark.parametrize(
    ("t", "e", "k", "factor"), [(1024, 16, 2, 1.0), (512, 24, 2, 1.0), (256, 8, 1, 0.9), (256, 12, 4, 1.0)]
)
def test_dropped_and_padded_are_those_of_drawn_batches(t, e, k, factor):
    slots = ep.capacity(t, k, e, factor)
    kept = np.minimum(drawn(t, sets_of(e, k), 10**4), slots).sum(axis=1).mean()
    close(ep.dropped_share(t, k, e, factor), 1 - kept / (t * k), rel=0.01)
    close(ep.padded_share(t, k, e, factor), 1 - kept / (e * slots), rel=0.01)


def test_slots_are_counted_in_decimals_and_never_more_than_tokens():
    assert ep.capacity(10, 1, 1, 1.1) == 10
    assert ep.capacity(100, 1, 10, 1.1) == 11  # in binary 1.1 is a little more, which would make it 12
    assert ep.capacity(1000, 2, 16, 1.25) == 157
    assert ep.capacity(8, 2, 4, 100) == 8
    assert ep.dropped_share(8, 2, 4, 2) == 0
    assert ep.dropped_share(0, 2, 4, 1) == ep.padded_share(0, 2, 4, 1) == 0


def test_many_tokens_drop_as_a_normal_number_would():
    """E[(X − C)⁺] = σ/√(2π) at C = the mean."""
    t, e, k = 10**6, 64, 4
    sigma = np.sqrt(t * k / e * (1 - k / e))
    close(ep.dropped_share(t, k, e, 1.0), sigma / np.sqrt(2 * np.pi) * e / (t * k), rel=0.001)


# --- the loss --------------------------------------------------------------------------------------------------


def loss_of(f, p) -> float:
    """E Σ f P for any two distributions, through `balance_loss`: a hundred tokens that share P, choices by f."""
    chosen = np.repeat(np.arange(len(f)), np.round(np.asarray(f) * 100).astype(int))[:, None]
    return ep.balance_loss(np.tile(p, (len(chosen), 1)), chosen)


def test_the_loss_is_one_where_either_side_is_even_and_below_where_they_are_opposite():
    even, some, other = [0.25] * 4, [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    close(1, loss_of(even, some))
    close(1, loss_of(some, even))
    close(loss_of(some, some), 4 * 0.3)
    close(loss_of(some, other), 4 * 0.2)  # 0.8: less than balance
    assert loss_of([0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]) == 0
    close(ep.balance_loss([[2.0, 2.0, 4.0, 2.0]], [[2, 1]]), 4 * (0.5 * 0.4 + 0.5 * 0.2))


@settings(max_examples=30)
@given(arrays.arrays(float, (2, 6), elements=st.floats(0.01, 1)))
def test_the_loss_is_at_least_one_where_both_rank_alike_and_at_most_where_opposite(both):
    p, counts = np.sort(both[0]), np.sort(np.ceil(both[1] * 9).astype(int))
    chosen = np.repeat(np.arange(6), counts)[:, None]
    assert ep.balance_loss(np.tile(p, (len(chosen), 1)), chosen) >= 1 - 1e-9
    assert ep.balance_loss(np.tile(p[::-1], (len(chosen), 1)), chosen) <= 1 + 1e-9
    assert ep.balance_loss(np.tile(p, (len(chosen), 1)), chosen) >= 6 * counts.min() / counts.sum() - 1e-9


def test_the_mean_of_the_ranks_losses_is_another_than_that_of_all_tokens():
    draw = np.random.default_rng(5)
    s = ep.scores(
        3 * draw.standard_normal((4, 10, 6)).reshape(40, 6) + np.repeat(draw.standard_normal((4, 6)), 10, axis=0)
    )
    chosen = ep.route(s, 2).experts_tk
    own = [ep.balance_loss(s[at : at + 10], chosen[at : at + 10]) for at in range(0, 40, 10)]
    f = np.stack([ep.loads(each, 6) / 20 for each in chosen.reshape(4, 10, 2)])
    p = s.reshape(4, 10, 6).mean(axis=1)
    apart = 6 * ((f - f.mean(axis=0)) * (p - p.mean(axis=0))).mean(axis=0).sum()
    close(np.mean(own) - ep.balance_loss(s, chosen), apart)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_gradient_is_that_of_small_differences(scoring):
    draw, step = np.random.default_rng(3), 1e-6
    z = draw.standard_normal((5, 4))
    chosen = ep.route(ep.scores(z, scoring), 2).experts_tk
    gradient = ep.balance_loss_gradient(ep.scores(z, scoring), chosen, scoring)
    for at in np.ndindex(z.shape):
        off = np.zeros_like(z)
        off[at] = step
        up, down = (ep.balance_loss(ep.scores(z + sign * off, scoring), chosen) for sign in (1, -1))
        assert gradient[at] == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-9)
        assert gradient[at] != pytest.approx(1.03 * (up - down) / (2 * step), rel=1e-6, abs=1e-9)
    if scoring == "softmax":
        np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-15)


def test_the_gradient_vanishes_where_loads_are_even_and_not_where_scores_are():
    z = np.random.default_rng(4).standard_normal((4, 4))
    assert np.abs(ep.balance_loss_gradient(ep.scores(z), [[0], [1], [2], [3]])).max() < 1e-15
    pull = ep.balance_loss_gradient(np.full((4, 4), 0.25), [[0], [0], [0], [1]])
    assert (np.sign(pull) == [1, 0, -1, -1]).all()  # 3/4 of the load down, 1/4 stays, none up


# --- the bias --------------------------------------------------------------------------------------------------


def test_a_bias_moves_by_the_sign_of_the_load_alone():
    np.testing.assert_allclose(ep.bias_step([0.5, 0, 0, 0], [9, 1, 1, 1], 0.01), [0.49, 0.01, 0.01, 0.01])
    np.testing.assert_allclose(ep.bias_step([0, 0], [3, 3], 0.01), 0)
    assert (ep.max_violation([9, 1, 1, 1]), ep.max_violation([3, 3]), ep.max_violation([0, 0])) == (2, 0, 0)


def steer(favour, *, tokens: int, top_k: int, rate: float, steps: int, noise: float = 0.1):
    """A router whose scores are `favour` and noise, steered by the bias: MaxVio of each step's batch, and the bias
    before the first and after each step."""
    draw, path, violation = np.random.default_rng(0), [np.zeros(len(favour))], []
    for _ in range(steps):
        s = favour + noise * draw.standard_normal((tokens, len(favour)))
        n = ep.loads(ep.route(s - min(0.0, s.min()), top_k, bias_e=path[-1]).experts_tk, len(favour))
        violation.append(ep.max_violation(n))
        path.append(ep.bias_step(path[-1], n, rate))
    return np.array(violation), np.stack(path)


@pytest.mark.parametrize("rate", [0.002, 0.005, 0.01])
def test_the_bias_balances_when_it_has_made_up_for_the_spread_and_not_before(rate):
    favour, tokens = np.linspace(0, 0.5, 16), 2048
    steps = ep.bias_steps(0.5, rate)
    violation, bias_se = steer(favour, tokens=tokens, top_k=2, rate=rate, steps=steps + 60)
    gap = bias_se[:, 0] - bias_se[:, -1]
    assert (gap[: steps - 1] < 0.5 - rate).all()
    assert int(np.argmax(gap > 0.5 - 3 * rate)) in range(steps - 2, steps + 1)
    chance = ep.balanced_violation(tokens, 2, 16)
    assert violation[: steps // 2].min() > 5 * chance
    jitter = violation[steps + 10 :].mean()
    assert chance < jitter < chance + 25 * rate


@pytest.mark.parametrize(("spread", "rate"), [(0.5, 0.004), (0.5, 0.03), (0.3, 0.04), (0.31, 0.1), (0.05, 0.1)])
def test_a_favourite_of_two_is_given_up_in_the_step_after_so_many(spread, rate):
    _, bias_se = steer([spread, 0.0], tokens=8, top_k=1, rate=rate, steps=200, noise=0)
    steps = int(np.argmin(bias_se[:, 0]))  # until then it went down, and then it goes up
    assert ep.bias_steps(spread, rate) == steps
    assert (ep.bias_steps(0, rate), ep.bias_steps(2 * steps * rate, rate)) == (0, steps)


def test_a_smaller_rate_jitters_less_and_without_any_the_favourites_stay():
    ends = [
        steer(np.linspace(0, 0.2, 8), tokens=1024, top_k=2, rate=rate, steps=200)[0][120:].mean()
        for rate in (0.02, 0.005, 0.001)
    ]
    assert ends[0] > 1.3 * ends[1] > 1.3 * ends[2]
    stays, _ = steer(np.linspace(0, 0.5, 8), tokens=512, top_k=1, rate=0, steps=5)
    assert stays.min() > 3.5


@pytest.mark.parametrize(("e", "k"), [(8, 2), (16, 1), (10, 3)])
def test_an_even_router_still_shows_chance(e, k):
    tokens = 10**5
    most = drawn(tokens, sets_of(e, k), 20000).max(axis=1).mean()
    close(ep.balanced_violation(tokens, k, e), most * e / (tokens * k) - 1, rel=0.01)
    close(ep.balanced_violation(4 * tokens, k, e), ep.balanced_violation(tokens, k, e) / 2)
    assert ep.balanced_violation(tokens, e, e) == 0


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ep.busiest_rank_tokens(1, 10, 2, 4), "ep must divide num_experts=10; 4 does not"),
        (lambda: ep.busiest_rank_tokens(-1, 8, 2, 4), "tokens must be at least 0"),
        (lambda: ep.busiest_rank_tokens(1, 8, 2, 4, "node"), "copies must be one of expert, rank"),
        (lambda: ep.capacity(8, 2, 4, 0), "capacity_factor must be"),
        (lambda: ep.dropped_share(8, 5, 4, 1), "top_k must be at most num_experts"),
        (lambda: ep.dropped_share(10**8, 1, 4, 1), "tokens must be at most"),
        (lambda: ep.balance_loss([[0.5, 0.5]], [[0], [1]]), "experts_tk must have a row for each of the 1 tokens"),
        (lambda: ep.balance_loss([[0.0, 0.0]], [[0]]), "scores_te must not be all 0"),
        (lambda: ep.balance_loss_gradient([[0.5, 0.5]], [[0]], "relu"), "scoring must be one of"),
        (lambda: ep.bias_step([0.0], [1, 2], 0.1), "bias_e and loads_e must have one length"),
        (lambda: ep.bias_step([0.0, 0.0], [1, 2], -0.1), "rate must be"),
        (lambda: ep.max_violation([]), "loads_e must have one number for each expert"),
        (lambda: ep.balanced_violation(0, 1, 4), "tokens must be at least 1"),
        (lambda: ep.bias_steps(0.5, 0), "rate must be"),
        (lambda: ep.largest_normal(0), "n must be at least 1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
