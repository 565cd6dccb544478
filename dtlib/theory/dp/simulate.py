"""Data-parallel SGD on numpy arrays, ranks as rows: small enough to print, exact enough to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtlib.theory.valid import amount, whole

from .batch import averaged_gradient, sent_bytes_per_step, token_weighted_gradient

Combine = Literal["mean", "weighted", "sum", "none"]
COMBINE: tuple[Combine, ...] = ("mean", "weighted", "sum", "none")


@dataclass(frozen=True)
class Trajectory:
    """What `data_parallel_sgd` returns.

    `weights` (steps + 1, N, p) are every rank's weights before the first and after each step, `losses`
    (steps + 1, N) the loss of these weights on the whole data, `sent_bytes_per_rank` what a ring would send.
    """

    weights: NDArray[np.float64]
    losses: NDArray[np.float64]
    sent_bytes_per_rank: float

    @property
    def spread(self) -> NDArray[np.float64]:
        """The largest distance of any rank's weights from rank 0's, before the first and after each step."""
        away = self.weights - self.weights[:, :1]
        return np.linalg.norm(away, axis=-1).max(axis=1)


def data_parallel_sgd(
    x: ArrayLike,
    y: ArrayLike,
    *,
    shares: Sequence[int],
    learning_rate: float,
    steps: int,
    combine: Combine | Callable[[int], Combine] = "mean",
    start: ArrayLike | None = None,
) -> Trajectory:
    """Fit y ≈ x w by least squares, the loss being half the mean squared error, on N ranks.

    Rank r holds the next `shares[r]` rows of `x` (S, p) and `y` (S,), and its own copy of w. `combine` says
    what is done with the ranks' gradients: ``"mean"``, ``"weighted"`` by the number of rows, ``"sum"``, or
    ``"none"`` (each goes its own way); a function of the step chooses anew for each. `start` is one vector
    (p,) or one row a rank (N, p): ranks that were never told to start alike.
    """
    x, y = _data(x, y)
    counts = [whole("shares", share, 1) for share in shares]
    if sum(counts) != len(x):
        raise ValueError(f"shares must add up to the {len(x)} rows of x, not {sum(counts)}")
    learning_rate = amount("learning_rate", learning_rate)
    n, p = len(counts), x.shape[1]
    first = np.zeros(p) if start is None else np.asarray(start, dtype=np.float64)
    if first.shape not in ((p,), (n, p)):
        raise ValueError(f"start must have shape {(p,)} or {(n, p)}, not {first.shape}")
    rows = np.split(np.arange(len(x)), np.cumsum(counts)[:-1])
    weights, syncs = [np.broadcast_to(first, (n, p)).copy()], 0
    for step in range(whole("steps", steps, 0)):
        how = combine(step) if callable(combine) else combine
        local = np.stack([_gradient(x[i], y[i], w) for i, w in zip(rows, weights[-1], strict=True)])
        weights.append(weights[-1] - learning_rate * _combined(local, counts, how))
        syncs += how != "none"
    path = np.stack(weights)
    losses = 0.5 * ((path @ x.T - y) ** 2).mean(axis=-1)
    return Trajectory(path, losses, sent_bytes_per_step(8 * p, n, syncs))


def _combined(local: NDArray[np.float64], counts: list[int], how: str) -> NDArray[np.float64]:
    if how == "mean":
        return averaged_gradient(local)
    if how == "weighted":
        return token_weighted_gradient(local, counts)
    if how == "sum":
        return np.asarray(local.sum(axis=0))
    if how == "none":
        return local
    raise ValueError(f"combine must be one of {', '.join(COMBINE)}, not {how!r}")


def _gradient(x: NDArray[np.float64], y: NDArray[np.float64], w: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(x.T @ (x @ w - y) / len(x))


def _data(x: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    samples, targets = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if samples.ndim != 2 or targets.shape != samples.shape[:1]:
        raise ValueError(f"x must have shape (S, p) and y (S,), not {samples.shape} and {targets.shape}")
    return samples, targets
