"""Steps against examples: what a step of a noisy gradient gains, and what a goal takes at each batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, row

from .given import counted, paired


@formula(
    "batch.hessian_noise_scale",
    source="mccandlish2018",
    label="eq-batch-hessian-noise-scale",
    equation=r"\frac{\operatorname{tr}(H\Sigma)}{G^\top H G}",
)
def hessian_noise_scale(curvatures: ArrayLike, variances: ArrayLike, gradient: ArrayLike) -> float:
    """The noise scale that counts for a step: noise and gradient weighted by curvature, in samples.

    In the eigenvectors of H: λ_i (`curvatures`), σ_i² (`variances`), G_i (`gradient`). It is `noise_scale` where H is a
    multiple of the identity. Source: McCandlish et al. 2018, section 2.
    """
    bends, noises = paired(("curvatures", "variances"), curvatures, variances)
    _, squares = paired(("curvatures", "gradient"), bends, np.square(np.asarray(gradient, dtype=np.float64)))
    if not squares.any():
        raise ValueError(f"gradient must not be zero, not {gradient!r}")
    return float(bends @ noises / (bends @ squares))


@formula(
    "batch.improvement",
    source="mccandlish2018",
    label="eq-batch-improvement",
    equation=r"\frac{1}{1 + \mathcal{B}/B}",
)
def improvement(global_batch: ArrayLike, noise_scale: ArrayLike) -> Any:
    """What a step with its best rate gains, as a share of what it would gain without noise.

    On a quadratic E f(x − ηḡ) = f − η|G|² + ½η²(GᵀHG + tr(HΣ)/B). The best rate is η_max/(1 + 𝓑/B) and the gain
    ½|G|⁴/GᵀHG over 1 + 𝓑/B, with 𝓑 (`noise_scale`) of `hessian_noise_scale`. Holds for one step with the rate tuned
    to it, wherever f is a quadratic along it. Source: McCandlish et al. 2018, section 2.
    """
    samples = amount("global_batch", global_batch, positive=True)
    return samples / (samples + amount("noise_scale", noise_scale))


@formula(
    "batch.steps_needed",
    source="mccandlish2018",
    label="thm-batch-tradeoff",
    equation=r"S_{\min} \left(1 + \frac{\mathcal{B}}{B}\right)",
)
def steps_needed(min_steps: ArrayLike, critical_batch: ArrayLike, global_batch: ArrayLike) -> Any:
    """Steps to a goal at a batch.

    S_min (`min_steps`) with a batch without end. A step at batch B does 1/(1 + 𝓑/B) of a noiseless one's work, so
    S = ∫(1 + 𝓑/B) ds over these; `critical_batch` is 𝓑, or its mean over the S_min steps where it changes. For runs of
    many steps; descent with one well-chosen rate on a quadratic of a hundred curvatures is within a tenth of it.
    """
    ratio = amount("critical_batch", critical_batch) / amount("global_batch", global_batch, positive=True)
    return amount("min_steps", min_steps) * (1 + ratio)


@formula(
    "batch.examples_needed",
    source="mccandlish2018",
    label="thm-batch-tradeoff",
    equation=r"E_{\min} \left(1 + \frac{B}{\mathcal{B}}\right)",
)
def examples_needed(min_examples: ArrayLike, critical_batch: ArrayLike, global_batch: ArrayLike) -> Any:
    """Examples to a goal at a batch.

    E = BS, with E_min = 𝓑 S_min (`min_examples`) at a batch near zero. (S/S_min − 1)(E/E_min − 1) = 1: at B = 𝓑 twice
    the steps and twice the examples. Samples or tokens, `global_batch` in the same.
    """
    ratio = amount("global_batch", global_batch, positive=True) / amount(
        "critical_batch", critical_batch, positive=True
    )
    return amount("min_examples", min_examples) * (1 + ratio)


@formula(
    "batch.critical_batch",
    source="mccandlish2018",
    label="eq-batch-critical",
    equation=r"\frac{E_{\min}}{S_{\min}}",
    use="At this batch a goal takes twice the least steps and twice the least examples.",
)
def critical_batch(min_examples: ArrayLike, min_steps: ArrayLike) -> Any:
    """The critical batch, in the unit of the examples.

    Measured by whole runs; the mean of the noise scale over them where the law of `steps_needed` holds. Others call
    critical where examples are a fifth above their least, B = 𝓑/5. Source: McCandlish et al. 2018, section 2.
    """
    return amount("min_examples", min_examples) / amount("min_steps", min_steps, positive=True)


@formula(
    "batch.rank_speedup",
    source="derived here",
    label="eq-batch-rank-speedup",
    equation=r"\frac{N\,(1 + b/\mathcal{B})}{1 + bN/\mathcal{B}}",
    use="Never above 1 + 𝓑/b, however many the ranks.",
)
def rank_speedup(n: ArrayLike, batch: ArrayLike, critical_batch: ArrayLike) -> Any:
    """How many times sooner N ranks reach the goal than one, where messages cost nothing.

    `batch` b samples a rank, so that a step takes the same time: S(b)/S(bN). (N + 1)/2 where bN is the critical batch.
    """
    of_one = amount("batch", batch, positive=True) / amount("critical_batch", critical_batch, positive=True)
    world = counted("n", n)
    return world * (1 + of_one) / (1 + world * of_one)


@formula(
    "batch.ramp_gain",
    source="mccandlish2018",
    label="eq-batch-ramp",
    equation=r"\frac{\left(\int \sqrt{\mathcal{B}}\, ds\right)^2}{\int ds \int \mathcal{B}\, ds}",
    use="A constant batch has 1 here; a batch that follows the noise scale, as its square root, has this.",
)
def ramp_gain(noise_scales: ArrayLike) -> float:
    """The least (S/S_min − 1)(E/E_min − 1) of batches that change during a run.

    `noise_scales` 𝓑 at equal shares of the noiseless steps. S − S_min = ∫𝓑/B ds and E − E_min = ∫B ds, whose product is
    at least (∫√𝓑 ds)² (Cauchy–Schwarz), reached by B = √(r𝓑) for any r. At most 1, and 1 only for a constant 𝓑.
    Source: McCandlish et al. 2018, appendix D.
    """
    scales = row("noise_scales", noise_scales, positive=True)
    return float(np.sqrt(scales).mean() ** 2 / scales.mean())


def steps_saved(stages: Sequence[tuple[float, float]]) -> float:
    """Share of the steps that a ramp saves against its first batch all along, for the same examples.

    `stages` are pairs (examples or a share of them, batch) in their order: 1 − Σ(e_i/B_i)/(Σe_i/B_0).
    """
    try:
        examples, batches = (
            row(name, each) for name, each in zip(("examples", "batches"), zip(*stages, strict=True), strict=True)
        )
    except (TypeError, ValueError):
        raise ValueError(f"stages must be pairs of examples and a batch, not {stages!r}") from None
    if not examples.sum() or not batches.all():
        raise ValueError(f"stages must have examples, and batches above zero, not {stages!r}")
    return float(1 - (examples / batches).sum() * batches[0] / examples.sum())


class Fit(NamedTuple):
    """What `fit_tradeoff` found: the two numbers, and the standard error of each."""

    min_steps: float
    critical_batch: float
    min_steps_error: float
    critical_batch_error: float

    @property
    def min_examples(self) -> float:
        """E_min = 𝓑 S_min."""
        return self.min_steps * self.critical_batch


def fit_tradeoff(batches: ArrayLike, steps: ArrayLike, errors: ArrayLike | None = None) -> Fit:
    """S_min and the critical batch from runs to one goal, each at its own best rate.

    S = S_min + E_min/B is linear in 1/B: least squares weighted by 1/`errors`² (of the steps; in their absence as large
    a share of each). The standard errors come from the scatter about the line, and are NaN for two batches. Batches all
    far below 𝓑, or far above it, leave one of the two numbers open: ``ValueError`` where either comes out at or below
    zero, and for fewer than two different batches.
    """
    sizes, counts = paired(("batches", "steps"), batches, steps)
    counts = row("steps", counts, positive=True)
    if len(set(sizes)) < 2:
        raise ValueError(f"batches must be at least two different ones, not {batches!r}")
    _, weights = paired(("batches", "errors"), sizes, counts if errors is None else errors)
    weights = 1 / row("errors", weights, positive=True)
    unit = sizes.min()
    rows = np.stack([weights, weights * unit / sizes], axis=1)
    (floor, slope), *_ = np.linalg.lstsq(rows, weights * counts, rcond=None)
    nothing = 1e-9 * counts.min()  # what rounding leaves of zero
    if floor <= nothing or slope <= nothing:
        what = "level off with the batch" if floor <= nothing else "fall with the batch"
        raise ValueError(f"steps must {what}, or neither number is known, not {list(map(float, counts))}")
    spare = len(sizes) - 2
    left = rows @ [floor, slope] - weights * counts
    covariance = np.linalg.inv(rows.T @ rows) * (left @ left / spare if spare else np.nan)
    relative = covariance / np.outer([floor, slope], [floor, slope])
    ratio = unit * slope / floor
    of_ratio = ratio * np.sqrt(relative[0, 0] + relative[1, 1] - 2 * relative[0, 1])
    return Fit(float(floor), float(ratio), float(np.sqrt(covariance[0, 0])), float(of_ratio))


def most_ranks(critical_batch: float, batch: float, overhead: float = 1.0) -> int:
    """The most ranks of `batch` samples with which a goal takes at most 1 + `overhead` times the least examples.

    E/E_min = 1 + bN/𝓑, so N ≤ overhead · 𝓑/b. 0 where one rank's batch is already too large.
    """
    limit = amount("overhead", overhead, positive=True) * amount("critical_batch", critical_batch, positive=True)
    return int(limit / amount("batch", batch, positive=True) * (1 + 1e-12))


def goal_seconds(
    min_examples: ArrayLike, critical_batch: ArrayLike, global_batch: ArrayLike, step_seconds: ArrayLike
) -> Any:
    """Seconds to a goal: `steps_needed` at this batch, each of `step_seconds`, from the least examples."""
    steps = examples_needed(min_examples, critical_batch, global_batch) / np.asarray(global_batch, dtype=np.float64)
    return steps * amount("step_seconds", step_seconds)
