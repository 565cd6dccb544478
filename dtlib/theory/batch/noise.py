"""How noisy a gradient is: by samples and ranks, against the gradient itself, and what it leaves of the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, row

from .given import counted, paired, share


@formula(
    "batch.averaged_variance",
    source="derived here",
    label="thm-batch-variance",
    equation=r"\frac{\sigma^2}{bN}",
)
def averaged_variance(variance: ArrayLike, batch: ArrayLike, n: ArrayLike = 1) -> Any:
    """Variance of a gradient averaged over the samples of all ranks.

    `variance` is σ² = E|g_i − G|² of one sample's gradient, `batch` the samples of each of `n` ranks. Of a mean of B
    independent vectors E|ḡ − G|² = 1/B² Σ_ij E(g_i − G)·(g_j − G), and the terms with i ≠ j are zero. Samples drawn
    without replacement from M have less: σ²/B · (M − B)/(M − 1), which is `correlated_variance` of σ²(M − b)/(M − 1)
    (σ² itself if b = 1) with ρ = −b/(M − b).
    """
    samples = amount("batch", batch, positive=True) * counted("n", n)
    return amount("variance", variance) / samples


@formula(
    "batch.mean_of_means_variance",
    source="derived here",
    label="eq-batch-unequal",
    equation=r"\frac{\sigma^2}{N^2} \sum_r \frac{1}{n_r}",
)
def mean_of_means_variance(variance: float, counts: ArrayLike) -> float:
    """Variance of the unweighted mean of the ranks' means where ranks hold `counts` samples.

    Rank r's mean has σ²/n_r and counts 1/N. Weighted by n_r instead it is σ²/Σ n_r, which is never more (the harmonic
    mean is at most the arithmetic one) and equal only for equal counts. Counts that do not depend on the samples.
    """
    held = row("counts", counted("counts", counts))
    return float(amount("variance", variance) * (1 / held).sum() / held.size**2)


@formula(
    "batch.correlated_variance",
    source="derived here",
    label="eq-batch-correlated",
    equation=r"\frac{\sigma^2}{b} \cdot \frac{1 + (N - 1)\rho}{N}",
)
def correlated_variance(variance: float, batch: float, n: ArrayLike, correlation: float) -> Any:
    """Variance of the mean of ranks whose means are correlated.

    `variance`/`batch` is that of one rank's mean; ρ (`correlation`) = E(ḡ_r − G)·(ḡ_q − G) over it, the same for each
    pair of ranks. ρ = 0 is `averaged_variance`; at ρ = 1, ranks that see the same samples, n ranks are worth one; at
    any ρ > 0 not more than 1/ρ. ``ValueError`` for a ρ that no ranks have: outside of −1/(n − 1) to 1.
    """
    world = counted("n", n)
    most = int(np.max(world))
    rho = share("correlation", correlation, -1 / (most - 1) if most > 1 else -1.0, 1.0)
    of_one = amount("variance", variance) / amount("batch", batch, positive=True)
    return np.maximum(of_one * (1 + (world - 1) * rho) / world, 0.0)


@formula(
    "batch.noise_scale",
    source="mccandlish2018",
    label="eq-batch-noise-scale",
    equation=r"\frac{\operatorname{tr}\Sigma}{|G|^2}",
    use="At this batch the noise of the averaged gradient is as large as the gradient.",
)
def noise_scale(variance: ArrayLike, square: ArrayLike) -> Any:
    """The noise scale 𝓑, in samples.

    tr Σ = σ² (`variance`) of one sample's gradient over |G|² (`square`). It grows as |G| falls, so in most runs
    that get on, and need not be near the critical batch of whole runs. Source: McCandlish et al. 2018, arXiv
    1812.06162, section 2.
    """
    return amount("variance", variance) / amount("square", square, positive=True)


@formula(
    "batch.expected_square",
    source="mccandlish2018",
    label="eq-batch-expected-square",
    equation=r"|G|^2 + \frac{\operatorname{tr}\Sigma}{B}",
)
def expected_square(square: ArrayLike, variance: ArrayLike, global_batch: ArrayLike) -> Any:
    """Expected square norm of a gradient averaged over `global_batch` independent samples.

    ḡ = G + e with E e = 0 and E|e|² = tr Σ/B: the norm of a noisy gradient is too large. Source: McCandlish et al.
    2018, appendix A.1.
    """
    return amount("square", square) + amount("variance", variance) / amount("global_batch", global_batch, positive=True)


def split_squares(
    square_small: ArrayLike, square_large: ArrayLike, batch_small: ArrayLike, batch_large: ArrayLike
) -> tuple[Any, Any]:
    """Estimates of |G|² and of tr Σ from square norms of gradients over two batches: `expected_square`, solved.

    Unbiased, also where the large batch holds the small one. Either may come out below zero: average both over steps
    *before* `noise_scale` divides. Of n ranks' gradients g_r of b samples and their mean (batches b and bn, the small
    square averaged over ranks), |G|² is the mean of g_r·g_q over pairs r ≠ q, and tr Σ is b times the ranks' sample
    variance, Σ|g_r − ḡ|²/(n − 1).
    """
    small, large = (
        amount(name, value) for name, value in (("square_small", square_small), ("square_large", square_large))
    )
    few, many = amount("batch_small", batch_small, positive=True), amount("batch_large", batch_large, positive=True)
    if np.any(np.asarray(many) <= np.asarray(few)):
        raise ValueError(f"batch_large must be above batch_small, {batch_small!r}, not {batch_large!r}")
    return (many * large - few * small) / (many - few), (small - large) / (1 / few - 1 / many)


@formula(
    "batch.square_error",
    source="derived here",
    label="eq-batch-estimate-error",
    equation=r"\sqrt{\frac{1}{T}\left(\frac{4\, G^\top \Sigma G}{bN}"
    r" + \frac{2 \operatorname{tr} \Sigma^2}{(bN)^2} \cdot \frac{N}{N - 1}\right)}",
)
def square_error(along: float, trace_square: float, batch: float, n: ArrayLike, steps: ArrayLike = 1) -> Any:
    """Standard error of the estimate of |G|² from n ranks, averaged over steps.

    `along` is GᵀΣG, `trace_square` tr Σ²; n ≥ 2 ranks of `batch` samples; `steps` T independent steps at one G. For
    normal gradients, which a mean over many samples nearly is: the estimate is |ḡ|² − (estimate of tr Σ)/B, the two are
    independent, and |ḡ|² has the variance 4GᵀΣG/B + 2 tr Σ²/B².
    """
    world, samples = counted("n", n, 2), amount("batch", batch, positive=True)
    q, a = amount("trace_square", trace_square), amount("along", along)
    total = samples * world
    return np.sqrt((4 * a / total + 2 * q / total**2 * world / (world - 1)) / counted("steps", steps))


@formula(
    "batch.variance_error",
    source="derived here",
    label="eq-batch-variance-error",
    equation=r"\sqrt{\frac{2 \operatorname{tr} \Sigma^2}{(N - 1)\, T}}",
)
def variance_error(trace_square: float, n: ArrayLike, steps: ArrayLike = 1) -> Any:
    """Standard error of the estimate of tr Σ from n ranks, averaged over steps.

    `trace_square` is tr Σ², `n` ≥ 2 ranks, `steps` T. The estimate is a sample variance with n − 1 degrees of freedom
    in each direction, so that for normal gradients a rank's batch does not matter. Relative to tr Σ it is
    √(2/((n − 1) T d)) with d = (tr Σ)²/tr Σ², the directions that the noise fills: small for a large model.
    """
    return np.sqrt(2 * amount("trace_square", trace_square) / ((counted("n", n, 2) - 1) * counted("steps", steps)))


@formula(
    "batch.stationary_loss",
    source="derived here",
    label="thm-batch-stationary",
    equation=r"\sum_i \frac{\eta\, \sigma_i^2}{2B} \cdot \frac{1 + \mu}{(1 - \mu)(2(1 + \mu) - \eta \lambda_i)}",
)
def stationary_loss(
    rate: ArrayLike, global_batch: ArrayLike, curvatures: ArrayLike, variances: ArrayLike, momentum: float = 0.0
) -> Any:
    """Loss above its minimum at which stochastic gradient descent comes to rest on a quadratic.

    f = ½ Σ λ_i x_i², gradients with independent noise of variance σ_i²/B (`variances` over `global_batch`), a constant
    `rate` η. Without momentum x' = (1 − ηλ)x − ηe, at rest E x² = η²σ²/B / (1 − (1 − ηλ)²). With `momentum` μ as torch
    has it (v' = μv + g, x' = x − ηv') x is autoregressive of order two, of coefficients 1 + μ − ηλ and −μ. For small
    ηλ it is η/(1 − μ) · Σσ_i²/(4B): what keeps η/B keeps the loss. Near ηλ = 2(1 + μ), where descent diverges, it does
    not: ``ValueError`` for a rate at or above that. Broadcasts over `rate` and `global_batch`.
    """
    bends, noises = paired(("curvatures", "variances"), curvatures, variances)
    eta, samples = amount("rate", rate), amount("global_batch", global_batch, positive=True)
    mu = share("momentum", momentum, 0.0, 1.0)
    if mu == 1:
        raise ValueError(f"momentum must be below 1, not {momentum!r}")
    most = 2 * (1 + mu) / bends.max()
    if np.any(np.asarray(eta) >= most):
        raise ValueError(f"rate must be below 2(1 + momentum)/curvature, {most:g}, not {rate!r}")
    left = 2 * (1 + mu) - np.asarray(eta, dtype=np.float64)[..., None] * bends
    return eta / (2 * samples) * (noises * (1 + mu) / ((1 - mu) * left)).sum(axis=-1)
