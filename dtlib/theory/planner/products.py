"""What a product of matrices reaches of a card's rate, and how far it may be cut.

Letters: a product of (m, k) and (k, n), F operations and B bytes a second.
"""

from __future__ import annotations

from typing import Any

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount


@formula(
    "planner.product_share",
    source="derived here",
    chapter="planner",
    equation=r"\eta = \frac{1}{1 + I^*\left(\frac1m + \frac1k + \frac1n\right)},\quad I^* = \frac{F w}{2 B_\text{mem}}",
)
def product_share(m: Any, k: Any, n: Any, flop_per_s: float, bytes_per_s: float, element_bytes: float = 2) -> Any:
    """The share of a rate that a product of matrices reaches.

    2mkn operations take 2mkn/F seconds, w(mk + kn + mn) bytes of operands take w(mk + kn + mn)/B more where nothing
    hides them; η is the first over the sum. Divide by 2mkn, and what is left is I* = Fw/(2B) times the sum of the
    reciprocals: the smallest side decides. `m`, `k` and `n` may be arrays. ``ValueError`` for what is not positive.
    """
    m, k, n = (amount(name, value, positive=True) for name, value in (("m", m), ("k", k), ("n", n)))
    flop_per_s = amount("flop_per_s", flop_per_s, positive=True)
    bytes_per_s = amount("bytes_per_s", bytes_per_s, positive=True)
    return 1 / (
        1 + flop_per_s * amount("element_bytes", element_bytes, positive=True) / 2 / bytes_per_s * _sides(m, k, n)
    )


@formula(
    "planner.cuts_for",
    source="derived here",
    chapter="planner",
    equation=r"t^* = n\left(\frac{1/\eta - 1}{I^*} - \frac1m - \frac1k\right)",
    use="Cut into more slices, a matrix product falls below a share of the card's rate.",
)
def cuts_for(
    share: float, m: float, k: float, n: float, flop_per_s: float, bytes_per_s: float, element_bytes: float = 2
) -> float:
    """The slices of n at which a product falls to a share of the card's rate.

    `product_share` of (m, k) and (k, n/t), solved for t; 0 where the whole product does not reach the share.
    ``ValueError`` for a `share` that is not between 0 and 1, and for what is not positive.
    """
    if not 0 < amount("share", share) < 1:
        raise ValueError(f"share must be between 0 and 1, not {share}")
    whole = product_share(m, k, n, flop_per_s, bytes_per_s, element_bytes)
    intensity = (1 / whole - 1) / _sides(m, k, n)
    return max(0.0, float(n * ((1 / share - 1) / intensity - 1 / m - 1 / k)))


def product_seconds(m: Any, k: Any, n: Any, flop_per_s: float, bytes_per_s: float) -> Any:
    """Seconds of a product in 16 bits: 2mkn/F + 2(mk + kn + mn)/B. Nothing is checked: it is asked a million times."""
    return 2 * m * k * n / flop_per_s + 2 * (m * k + k * n + m * n) / bytes_per_s


def _sides(m: Any, k: Any, n: Any) -> Any:
    return 1 / m + 1 / k + 1 / n
