"""Not waiting, as algebra: what stragglers cost, how old gradients get, which rate bears that, where ranks that step
alone end, and what all of it sends.

Letters: N workers or ranks (`n`), τ the delay or staleness of a gradient in updates (`delay`), s how far a worker's
clock may be ahead of the slowest (`bound`); λ curvature, η learning rate (`rate`), a = ηλ; H steps between two
exchanges (`local_steps`); D bytes of the weights or of a gradient (`full_bytes`), B bytes a second of a link.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .bandwidth import bandwidth_for, utilisation, wait_by_layer
from .gossip import exponential_rounds, spectral_gap_ring
from .local import drift_noise, local_bytes, local_fixed_point
from .server import mean_staleness, server_bytes, server_limit, staleness_bound, staleness_distribution, staleness_of
from .stability import fastest_rate, implicit_momentum, stable_rate
from .stragglers import (
    async_rate,
    expected_kth,
    expected_slowest,
    expected_slowest_normal,
    expected_slowest_of,
    sync_rate,
)

__all__ = [
    "async_rate",
    "bandwidth_for",
    "drift_noise",
    "expected_kth",
    "expected_slowest",
    "expected_slowest_normal",
    "expected_slowest_of",
    "exponential_rounds",
    "fastest_rate",
    "implicit_momentum",
    "local_bytes",
    "local_fixed_point",
    "mean_staleness",
    "server_bytes",
    "server_limit",
    "spectral_gap_ring",
    "stable_rate",
    "staleness_bound",
    "staleness_distribution",
    "staleness_of",
    "sync_rate",
    "utilisation",
    "wait_by_layer",
]
