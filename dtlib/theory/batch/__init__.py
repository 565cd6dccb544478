"""What a larger batch buys: less noise, fewer steps up to a point, another learning rate.

Letters: b samples of a rank (`batch`), N ranks (`n`), B = bN samples of a step (`global_batch`); G the gradient of the
expected loss and Σ the covariance of one sample's gradient, |G|² (`square`) and σ² = tr Σ (`variance`); 𝓑 noise scale,
in samples; η rate, λ curvature, L smoothness; T steps, S and E steps and examples to a goal.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .noise import (
    averaged_variance,
    correlated_variance,
    expected_square,
    mean_of_means_variance,
    noise_scale,
    split_squares,
    square_error,
    stationary_loss,
    variance_error,
)
from .scaling import adam_rate, linear_rate, sgd_rate, sqrt_rate, warmup
from .speedup import best_rate, linear_batch, linear_until, nonconvex_bound, steps_for
from .tradeoff import (
    Fit,
    critical_batch,
    examples_needed,
    fit_tradeoff,
    goal_seconds,
    hessian_noise_scale,
    improvement,
    most_ranks,
    ramp_gain,
    rank_speedup,
    steps_needed,
    steps_saved,
)

__all__ = [
    "Fit",
    "adam_rate",
    "averaged_variance",
    "best_rate",
    "correlated_variance",
    "critical_batch",
    "examples_needed",
    "expected_square",
    "fit_tradeoff",
    "goal_seconds",
    "hessian_noise_scale",
    "improvement",
    "linear_batch",
    "linear_rate",
    "linear_until",
    "mean_of_means_variance",
    "most_ranks",
    "noise_scale",
    "nonconvex_bound",
    "ramp_gain",
    "rank_speedup",
    "sgd_rate",
    "split_squares",
    "sqrt_rate",
    "square_error",
    "stationary_loss",
    "steps_for",
    "steps_needed",
    "steps_saved",
    "variance_error",
    "warmup",
]
