"""A server that holds the weights: its bytes, its limit, and how old the gradients are that it gets."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, row, whole


@formula(
    "asynchrony.server_bytes",
    source="derived here",
    label="eq-asynchrony-server-bytes",
    equation=r"\frac{N D}{S}",
)
def server_bytes(full_bytes: float, n: int, servers: int = 1) -> Any:
    """Bytes that one of S `servers` receives, and as many that it sends, when each of `n` workers has had an update.

    A gradient comes in, weights go out; each server holds an S-th of both. A rank of a ring sends 2(N−1)/N · D.
    """
    return amount("full_bytes", full_bytes) * whole("n", n, 1) / whole("servers", servers, 1)


@formula(
    "asynchrony.server_limit",
    source="derived here",
    label="eq-asynchrony-server-limit",
    equation=r"S\left(\frac{T B}{D} + 2\right)",
    use="More workers queue for the servers' links.",
)
def server_limit(full_bytes: float, compute_seconds: float, link_bytes_per_s: float, servers: int = 1) -> Any:
    """Workers up to which S `servers` serve without a queue, evenly spread in time.

    A worker computes for T seconds and moves D bytes each way over a link of its own, so it wants an update every
    T + 2D/B seconds; each server's link lets S B/D gradients a second in, if all links carry B in each direction.
    """
    once = amount("full_bytes", full_bytes, positive=True) / amount("link_bytes_per_s", link_bytes_per_s, positive=True)
    return whole("servers", servers, 1) * (amount("compute_seconds", compute_seconds) / once + 2)


@formula(
    "asynchrony.mean_staleness",
    source="derived here",
    label="thm-asynchrony-staleness",
    equation=r"N - 1",
)
def mean_staleness(n: int) -> int:
    """Updates of others between the fetch and the use of a gradient, in the mean over many updates.

    Whatever the speeds: an update ages each of the N − 1 other gradients under way by one, and what is applied ages no
    more. Less the ages under way over the number of updates. Each worker has one gradient under way
    at all times, as none waits, and each is an update of its own.
    """
    return whole("n", n, 1) - 1


@formula(
    "asynchrony.staleness_of",
    source="derived here",
    label="eq-asynchrony-staleness-of",
    equation=r"\sum_{q \ne r} \frac{t_r}{t_q}",
)
def staleness_of(times: Any) -> NDArray[np.float64]:
    """Mean staleness of each worker's gradients, over many of them, where workers take `times` in the mean.

    Worker r fetches where it hands in, so its gradients tile the time: in U t_r seconds it has U of them, and worker q
    hands in U t_r/t_q, each met by one of the U. So phases and the spread of the times do not matter to the mean. Up to
    the ends; weighted by the rates 1/t_r the mean is N − 1.
    """
    each = row("times", times, positive=True)
    return np.asarray(each * (1 / each).sum() - 1)


@formula(
    "asynchrony.staleness_distribution",
    source="derived here",
    label="eq-asynchrony-geometric",
    equation=r"\frac1N \left(1 - \frac1N\right)^k",
)
def staleness_distribution(n: int, k: Any) -> Any:
    """The chance that a gradient is `k` updates old, where all workers' times are exponential with one mean.

    The next to hand in is any of the N, equally likely, whatever was before. Its mean is N − 1.
    """
    workers, ages = whole("n", n, 1), amount("k", k)
    if np.any(np.asarray(ages) % 1):
        raise ValueError(f"k must be whole numbers, not {k!r}")
    return (1 - 1 / workers) ** ages / workers


@formula(
    "asynchrony.staleness_bound",
    source="derived here",
    label="eq-asynchrony-bound",
    equation=r"(N - 1)(2s + 1)",
)
def staleness_bound(n: int, bound: int) -> int:
    """The most updates of others that a gradient can miss, where a worker starts at most `bound` ahead of the slowest.

    When it fetches at clock c, the others' clocks are c − s at least; until it hands in, the slowest is at most at c,
    so others start at c + s at most and end at c + s + 1. At s = 0 the others' gradients of the same round: in step,
    but one after another.
    """
    return (whole("n", n, 1) - 1) * (2 * whole("bound", bound, 0) + 1)
