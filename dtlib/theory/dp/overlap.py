"""The clock of one step: all-reduce after the backward pass, or bucket by bucket during it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtlib.theory.collectives.ring import ring_all_reduce_seconds
from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, whole


@formula(
    "dp.blocking_step_seconds",
    source="derived here",
    label="eq-dp-blocking",
    equation=r"T + 2(N-1)\,\alpha + 2\,\frac{N-1}{N}\,\frac{D}{B}",
)
def blocking_step_seconds(
    compute_seconds: float, grad_bytes: float, n: int, alpha_seconds: float, link_bytes_per_s: float
) -> float:
    """Step time without overlap.

    Compute, then one all-reduce of the whole gradient.
    """
    compute_seconds = amount("compute_seconds", compute_seconds)
    grad_bytes = amount("grad_bytes", grad_bytes)
    return compute_seconds + ring_all_reduce_seconds(grad_bytes, n, alpha_seconds, link_bytes_per_s)


@formula(
    "dp.ready_seconds",
    source="derived here",
    label="thm-dp-exposed",
    equation=r"R_j = T_b \sum_{i \le j} w_i \Big/ \sum_i w_i",
)
def ready_seconds(backward_seconds: float, work: ArrayLike) -> NDArray[np.float64]:
    """When each gradient is ready.

    Seconds after the backward pass began. `work` is the cost of the layers in the order of the backward pass
    (last layer first), in any unit.
    """
    backward_seconds = amount("backward_seconds", backward_seconds)
    costs = _vector("work", work)
    if not costs.sum() > 0:
        raise ValueError(f"work must be above 0 somewhere, not {work!r}")
    return backward_seconds * np.cumsum(costs) / costs.sum()


@dataclass(frozen=True)
class BucketSchedule:
    """When each bucket was ready, began to travel and arrived: seconds after the backward pass began."""

    backward_seconds: float
    ready: NDArray[np.float64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]

    @property
    def exposed_seconds(self) -> float:
        """How long the last all-reduce outlasts the backward pass."""
        return max(0.0, float(self.end[-1]) - self.backward_seconds) if len(self.end) else 0.0

    @property
    def communication_seconds(self) -> float:
        """How long the link is busy."""
        return float((self.end - self.start).sum())

    @property
    def hidden_share(self) -> float:
        """The share of the communication that the backward pass hides."""
        return hidden_share(self.exposed_seconds, self.communication_seconds)


def overlap_schedule(backward_seconds: float, ready_seconds: ArrayLike, bucket_seconds: ArrayLike) -> BucketSchedule:
    """Simulate one backward pass: the link takes the buckets in order, each when it is ready and the link
    free.

    `ready_seconds` and `bucket_seconds` (how long each bucket travels) have one entry a bucket.
    """
    ready, duration = _paired(backward_seconds, ready_seconds, bucket_seconds)
    start, end, free = np.empty_like(ready), np.empty_like(ready), 0.0
    for j, (when, seconds) in enumerate(zip(ready, duration, strict=True)):
        start[j] = max(when, free)
        end[j] = free = start[j] + seconds
    return BucketSchedule(float(backward_seconds), ready, start, end)


@formula(
    "dp.exposed_seconds",
    source="derived here",
    label="thm-dp-exposed",
    equation=r"\max\Bigl(0,\; \max_j\bigl(R_j + \sum_{i \ge j} c_i\bigr) - T_b\Bigr)",
)
def exposed_seconds(backward_seconds: float, ready_seconds: ArrayLike, bucket_seconds: ArrayLike) -> float:
    """Exposed communication.

    What of the all-reduces sticks out of the backward pass. Bucket j is ready at R_j (`ready_seconds`) and
    travels for c_j (`bucket_seconds`); buckets go one at a time.
    """
    ready, duration = _paired(backward_seconds, ready_seconds, bucket_seconds)
    if not len(ready):
        return 0.0
    still_to_send = np.cumsum(duration[::-1])[::-1]
    return max(0.0, float((ready + still_to_send).max()) - backward_seconds)


@formula("dp.hidden_share", source="derived here", label="thm-dp-exposed", equation=r"1 - \frac{E}{C}")
def hidden_share(exposed_seconds: float, communication_seconds: float) -> float:
    """Hidden share of the communication.

    1 is all of it, 0 is none: `exposed_seconds` E sticks out of the backward pass, of `communication_seconds`
    C altogether. 1 without communication.
    """
    exposed_seconds = amount("exposed_seconds", exposed_seconds)
    communication_seconds = amount("communication_seconds", communication_seconds)
    return 1.0 - exposed_seconds / communication_seconds if communication_seconds > 0 else 1.0


@formula(
    "dp.even_exposed_seconds",
    source="derived here",
    label="eq-dp-even",
    equation=r"\max\Bigl(A + \frac{W}{k},\; kA + W - \frac{k-1}{k}T_b\Bigr),\quad "
    r"A = 2(N-1)\alpha,\; W = 2\,\frac{N-1}{N}\,\frac{D}{B}",
)
def even_exposed_seconds(
    backward_seconds: float,
    grad_bytes: float,
    n: int,
    alpha_seconds: float,
    link_bytes_per_s: float,
    num_buckets: int,
) -> float:
    """Exposed communication, equal buckets.

    The k buckets are ready at equal distances. The first term is the last bucket, which nothing can hide; the
    second is a link that is busy from the first bucket on.
    """
    backward_seconds = amount("backward_seconds", backward_seconds)
    k = whole("num_buckets", num_buckets, 1)
    latency, bandwidth = _latency_and_bandwidth(grad_bytes, n, alpha_seconds, link_bytes_per_s)
    last_bucket = latency + bandwidth / k
    busy_link = k * latency + bandwidth - backward_seconds * (k - 1) / k
    return max(last_bucket, busy_link)


@formula(
    "dp.overlapped_step_seconds",
    source="derived here",
    label="thm-dp-exposed",
    equation=r"T_f + T_b + E(k)",
)
def overlapped_step_seconds(
    forward_seconds: float,
    backward_seconds: float,
    grad_bytes: float,
    n: int,
    alpha_seconds: float,
    link_bytes_per_s: float,
    num_buckets: int,
) -> float:
    """Step time with overlap.

    Forward, backward, and what of k equal buckets sticks out.
    """
    forward_seconds = amount("forward_seconds", forward_seconds)
    exposed = even_exposed_seconds(backward_seconds, grad_bytes, n, alpha_seconds, link_bytes_per_s, num_buckets)
    return forward_seconds + backward_seconds + exposed


@formula(
    "dp.optimal_num_buckets",
    source="derived here",
    label="prop-dp-buckets",
    equation=r"k^* = \max\Bigl(\frac{T_b - W}{A},\; \sqrt{T_b / A}\Bigr)",
    use="With fewer or more buckets a longer part of the communication is exposed.",
)
def optimal_num_buckets(
    backward_seconds: float, grad_bytes: float, n: int, alpha_seconds: float, link_bytes_per_s: float
) -> int:
    """Optimal number of buckets.

    The whole number next to k* that leaves least exposed, at least 1. `alpha_seconds` must be positive:
    without latency more buckets are always better. With one rank nothing travels and 1 is returned.
    """
    alpha_seconds = amount("alpha_seconds", alpha_seconds, positive=True)
    backward_seconds = amount("backward_seconds", backward_seconds)
    latency, bandwidth = _latency_and_bandwidth(grad_bytes, n, alpha_seconds, link_bytes_per_s)
    if latency == 0:
        return 1
    best = max((backward_seconds - bandwidth) / latency, math.sqrt(backward_seconds / latency))
    around = {max(1, math.floor(best)), max(1, math.ceil(best))}
    arguments = (backward_seconds, grad_bytes, n, alpha_seconds, link_bytes_per_s)
    return min(sorted(around), key=lambda k: even_exposed_seconds(*arguments, k))


def _latency_and_bandwidth(
    grad_bytes: float, n: int, alpha_seconds: float, link_bytes_per_s: float
) -> tuple[float, float]:
    """A and W: what each all-reduce pays whatever its size, what all bytes pay however they are cut."""
    grad_bytes = amount("grad_bytes", grad_bytes)
    latency = ring_all_reduce_seconds(0.0, n, alpha_seconds, link_bytes_per_s)
    return latency, ring_all_reduce_seconds(grad_bytes, n, 0.0, link_bytes_per_s)


def _vector(name: str, values: ArrayLike) -> NDArray[np.float64]:
    amount(name, values)
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1:
        raise ValueError(f"{name} must be a list of numbers, not {values!r}")
    return vector


def _paired(
    backward_seconds: float, ready_seconds: ArrayLike, bucket_seconds: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    backward_seconds = amount("backward_seconds", backward_seconds)
    ready, duration = _vector("ready_seconds", ready_seconds), _vector("bucket_seconds", bucket_seconds)
    if len(ready) != len(duration):
        raise ValueError(f"bucket_seconds must have one entry for each of {len(ready)} buckets, not {len(duration)}")
    if (np.diff(ready) < 0).any():
        raise ValueError(f"ready_seconds must not decrease, for buckets travel in order; got {ready_seconds!r}")
    return ready, duration
