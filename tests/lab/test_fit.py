import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlib import lab
from dtlib.lab.fit import LinkFit, Point, _fit, fit_alpha_beta, fit_link

KiB, MiB = 2**10, 2**20

positive = st.floats(-7, 0).map(lambda power: 10.0**power)


def ring_steps(n):
    return 2 * (n - 1)


def ring_bytes(full_bytes, n):
    return 2 * (n - 1) / n * full_bytes


# --- the pure fit


@given(alpha=positive, rate=positive.map(lambda x: 1e4 / x))
def test_planted_parameters_come_back(alpha, rate):
    sizes = np.array([1e3, 1e5, 1e7, 1e9])
    for n in (2, 8):
        seconds = alpha * ring_steps(n) + ring_bytes(sizes, n) / rate
        fit = fit_alpha_beta(ring_steps(n), ring_bytes(sizes, n), seconds)
        assert fit.alpha_seconds * ring_steps(n) + ring_bytes(sizes, n) / fit.link_bytes_per_s == pytest.approx(seconds)
        # A parameter is known as well as the points that show it: each must matter in one point.
        if alpha * ring_steps(n) > 1e-3 * ring_bytes(sizes[0], n) / rate:
            assert fit.alpha_seconds == pytest.approx(alpha, rel=1e-6)
        if alpha * ring_steps(n) * 1e-3 < ring_bytes(sizes[-1], n) / rate:
            assert fit.link_bytes_per_s == pytest.approx(rate, rel=1e-6)


def test_several_rank_counts_are_fitted_together():
    n = np.array([2, 3, 4, 8])[:, None]
    size = np.array([1e4, 1e6, 1e8])[None, :]
    seconds = 5e-5 * ring_steps(n) + ring_bytes(size, n) / 2e9
    fit = fit_alpha_beta(ring_steps(n), ring_bytes(size, n), seconds)
    assert fit.alpha_seconds == pytest.approx(5e-5)
    assert fit.link_bytes_per_s == pytest.approx(2e9)


def test_relative_errors_are_balanced_over_sizes():
    # One slow point among small buffers must not be drowned by seconds spent on large ones.
    size = np.array([1e3, 1e3, 1e9, 1e9])
    seconds = np.array([1e-4, 2e-4, 1.0, 1.0])
    fit = fit_alpha_beta(1, size, seconds)
    assert 1e-4 < fit.alpha_seconds < 2e-4
    assert fit.link_bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_costs_are_never_negative():
    free_bytes = fit_alpha_beta(1, [1e3, 1e9], [2e-3, 1e-3])
    assert free_bytes.link_bytes_per_s == math.inf
    assert 1e-3 < free_bytes.alpha_seconds < 2e-3
    free_steps = fit_alpha_beta([1, 100], [1e6, 1e6], [2e-3, 1e-3])
    assert free_steps.alpha_seconds == 0
    assert 5e8 < free_steps.link_bytes_per_s < 1e9


@pytest.mark.parametrize(
    ("steps", "sent_bytes", "seconds", "why"),
    [
        (1, [1.0, 2.0], [1.0, 0.0], "seconds must be"),
        (1, [1.0, 2.0], [1.0, -1.0], "seconds must be"),
        (1, [1.0, 2.0], [1.0, math.nan], "seconds must be"),
        (1, [], [], "seconds must be"),
        (-1, [1.0, 2.0], [1.0, 1.0], "steps must be"),
        (1, [1.0, -2.0], [1.0, 1.0], "sent_bytes must be"),
        (1, [1.0, math.inf], [1.0, 1.0], "sent_bytes must be"),
        (1, [5.0], [1.0], "cannot tell α from B"),
        (1, [5.0, 5.0, 5.0], [1.0, 2.0, 3.0], "cannot tell α from B"),
        ([1, 2], [5.0, 10.0], [1.0, 2.0], "cannot tell α from B"),
        (0, [1.0, 2.0], [1.0, 1.0], "cannot tell α from B"),
        (1, [0.0, 0.0], [1.0, 1.0], "cannot tell α from B"),
    ],
)
def test_points_that_cannot_be_fitted(steps, sent_bytes, seconds, why):
    with pytest.raises(ValueError, match=why):
        fit_alpha_beta(steps, sent_bytes, seconds)


# The first and the last two rows of a nccl-tests sweep on 8 A100 (stas00/ml-engineering), and one from between.
A100 = {32768: 43.83e-6, 65536: 46.80e-6, 16777216: 276.6e-6, 8589934592: 64074e-6, 17179869184: 127997e-6}


def test_a_published_sweep_is_met_at_its_ends_and_missed_between():
    size, seconds = np.array(list(A100)), np.array(list(A100.values()))
    ends = [0, 1, 3, 4]
    fit = fit_alpha_beta(14, 1.75 * size[ends], seconds[ends])
    predicted = fit.alpha_seconds * 14 + 1.75 * size / fit.link_bytes_per_s
    error = predicted / seconds - 1
    assert np.max(np.abs(error[ends])) < 0.05
    assert error[2] < -0.3  # two parameters promise what the link does not hold in the middle


# --- what is measured


def points(alpha, rate, link, world_sizes=(2, 4, 8)):
    own = link == "own"
    return tuple(
        Point(n, size, ring_steps(n), ring_bytes(size, n), seconds, seconds, seconds)
        for n in world_sizes
        for size in (4 * KiB, MiB, 64 * MiB)
        for seconds in [alpha * ring_steps(n) + ring_bytes(size, n) * (1 if own else n) / rate]
    )


@pytest.mark.parametrize("link", ["own", "shared"])
def test_a_link_of_its_own_and_a_shared_one_are_told_apart(link):
    measured = points(1e-4, 3e9, link)
    right = _fit(measured, link, ring_steps, ring_bytes)
    assert right.alpha_seconds == pytest.approx(1e-4)
    assert right.link_bytes_per_s == pytest.approx(3e9)
    assert np.max(np.abs(right.errors)) < 1e-9
    wrong = right.refit(link="own" if link == "shared" else "shared")
    assert np.max(np.abs(wrong.errors)) > 0.2


def test_points_left_out_are_predicted_not_fitted():
    measured = points(1e-4, 3e9, "own")
    spoilt = tuple(replace(p, seconds=3 * p.seconds) if p.world_size == 8 else p for p in measured)
    fit = _fit(spoilt, "own", ring_steps, ring_bytes).refit(leave_out=lambda point: point.world_size == 8)
    assert fit.alpha_seconds == pytest.approx(1e-4)
    assert [point.world_size for point in fit.points if not point.fitted] == [8, 8, 8]
    assert fit.left_out_errors == pytest.approx([1 / 3 - 1] * 3)
    assert fit.predict(MiB, 8) == pytest.approx(14e-4 + 1.75 * MiB / 3e9)
    again = fit.refit()
    assert all(point.fitted for point in again.points)
    assert again.left_out_errors.size == 0
    with pytest.raises(ValueError, match="leave_out must leave points"):
        fit.refit(leave_out=lambda point: True)
    with pytest.raises(ValueError, match="link must be one of own, shared"):
        fit.refit(link="wireless")


def test_the_table_says_how_far_off_it_is():
    fit = _fit(points(1e-4, 3e9, "own"), "own", ring_steps, ring_bytes).refit(leave_out=lambda p: p.world_size == 2)
    text = repr(fit)
    assert text.startswith("α = 100 µs a step, B = 3 GB/s, a link of its own for each rank: off by ")
    assert "where it was not fitted" in text
    assert text.count("left out") == 3
    page = fit._repr_html_()
    assert page.count("<tr>") == 10
    assert "64 MiB" in page


def test_it_measures_this_machine():
    fit = fit_link(sizes=(4 * KiB, 256 * KiB), world_sizes=(2, 3), repeats=2)
    assert isinstance(fit, LinkFit)
    assert [(p.world_size, p.full_bytes) for p in fit.points] == [
        (2, 4 * KiB),
        (2, 256 * KiB),
        (3, 4 * KiB),
        (3, 256 * KiB),
    ]
    for point in fit.points:
        assert 0 < point.low_seconds <= point.seconds <= point.high_seconds
        assert (point.steps, point.sent_bytes) == (1, point.full_bytes)
    carried = MiB * 5 / fit.link_bytes_per_s
    assert fit.predict(MiB, 5) == pytest.approx(fit.alpha_seconds + carried)


def test_a_collective_of_the_callers_own_is_timed_until_its_last_rank():
    def slow_on_rank_one(tensor):
        import time

        import torch
        import torch.distributed as dist

        assert tensor.dtype == torch.float32
        assert not tensor.any()
        dist.all_reduce(tensor)
        if dist.get_rank() == 1:
            time.sleep(tensor.numel() / 1e5)

    fit = fit_link(
        slow_on_rank_one,
        steps=ring_steps,
        sent_bytes=ring_bytes,
        sizes=(4000, 8000),
        world_sizes=(2,),
        repeats=3,
        link="own",
    )
    assert [point.steps for point in fit.points] == [2, 2]
    assert [point.sent_bytes for point in fit.points] == [4000, 8000]
    for point, slept in zip(fit.points, (0.01, 0.02), strict=True):
        assert point.low_seconds >= slept


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sizes": ()}, "sizes must not be empty"),
        ({"sizes": (6,)}, "multiples of 4"),
        ({"sizes": (0,)}, "sizes must be whole numbers, at least 4"),
        ({"sizes": (4.0,)}, "sizes must be whole numbers"),
        ({"world_sizes": (1,)}, "world_sizes must be whole numbers, at least 2"),
        ({"world_sizes": ()}, "world_sizes must not be empty"),
        ({"repeats": 0}, "repeats must be"),
        ({"link": "cable"}, "link must be one of"),
    ],
)
def test_bad_arguments_start_nothing(monkeypatch, options, why):
    monkeypatch.setattr("dtlib.lab.fit.run", lambda *args, **kwargs: pytest.fail("ranks were started"))
    with pytest.raises(ValueError, match=why):
        fit_link(**options)


def test_an_error_in_the_collective_is_the_ranks_error():
    def broken(tensor):
        raise KeyError("no link")

    with pytest.raises(lab.RankError, match="no link"):
        fit_link(broken, sizes=(4, 8), world_sizes=(2,))
