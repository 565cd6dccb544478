"""Which gradient the ranks agree on, from how many samples, for how many bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtlib.theory.collectives.ring import ring_all_reduce_bytes
from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, ranks, whole


@formula("dp.effective_batch", source="goyal2017", label="eq-dp-batch", equation=r"b \cdot N \cdot a")
def effective_batch(micro_batch: int, n: int, accumulation: int = 1) -> int:
    """Effective batch.

    Samples behind one update: `micro_batch` b samples go through each of the `n` ranks `accumulation` times
    before the weights move.
    """
    return ranks(n) * whole("micro_batch", micro_batch, 1) * whole("accumulation", accumulation, 1)


@formula("dp.averaged_gradient", source="derived here", label="thm-dp-equality", equation=r"\frac{1}{N}\sum_r g_r")
def averaged_gradient(gradients: ArrayLike) -> NDArray[np.float64]:
    """Averaged gradient.

    What every rank holds after the sync. `gradients` has one row a rank, shape (N, ...); the result has shape
    (...). It is the gradient of the mean loss over all samples if and only if each rank's loss is a mean over
    equally many of them.
    """
    return _rows(gradients).mean(axis=0)


@formula(
    "dp.token_weighted_gradient",
    source="derived here",
    label="eq-dp-tokens",
    equation=r"\sum_r t_r\,g_r \Big/ \sum_r t_r",
)
def token_weighted_gradient(gradients: ArrayLike, num_tokens: ArrayLike) -> NDArray[np.float64]:
    """Token-weighted gradient.

    The full-batch gradient when ranks hold different numbers of tokens. `gradients` (N, ...) are those of
    each rank's own mean loss, `num_tokens` (N,) the tokens t_r in it. A rank without tokens counts for
    nothing, even where its gradient is NaN (a mean over nothing).
    """
    rows, tokens = _rows(gradients), np.asarray(num_tokens, dtype=np.float64)
    if tokens.shape != rows.shape[:1]:
        raise ValueError(f"num_tokens must hold one number for each of {len(rows)} ranks, not {num_tokens!r}")
    tokens = amount("num_tokens", tokens)
    counted = tokens > 0
    if not counted.any():
        raise ValueError("num_tokens must be above 0 on some rank, not 0 on all")
    return np.tensordot(tokens[counted] / tokens.sum(), rows[counted], axes=1)


@formula("dp.sent_bytes_per_step", source="patarasuk2009", equation=r"y\cdot 2\,\frac{N-1}{N}\,D")
def sent_bytes_per_step(grad_bytes: float, n: int, syncs: int = 1) -> float:
    """Gradient bytes sent by a rank, an update.

    There are `syncs` y all-reduces of the whole gradient. With accumulation under ``no_sync`` there is one
    sync however many micro-batches there are; without it, one for each.
    """
    grad_bytes = amount("grad_bytes", grad_bytes)
    return whole("syncs", syncs, 0) * ring_all_reduce_bytes(grad_bytes, n)


@formula(
    "dp.sent_bytes_per_sample",
    source="derived here",
    equation=r"2\,\frac{N-1}{N}\,\frac{D}{b\,a}",
)
def sent_bytes_per_sample(grad_bytes: float, n: int, micro_batch: int, accumulation: int = 1) -> float:
    """Gradient bytes sent by a rank, a sample.

    Of its own samples, with one sync an update.
    """
    samples = effective_batch(micro_batch, 1, accumulation)
    return sent_bytes_per_step(grad_bytes, n) / samples


def _rows(gradients: ArrayLike) -> NDArray[np.float64]:
    rows = np.asarray(gradients, dtype=np.float64)
    if rows.ndim == 0 or len(rows) == 0:
        raise ValueError(f"gradients must hold one row for each rank, not {gradients!r}")
    return rows
