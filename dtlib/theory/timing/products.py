"""What a product of matrices reaches of a card's rate, and how far it may be cut.

Letters: a product of (x, y) and (y, z), F operations and B bytes a second.
"""

from __future__ import annotations

from typing import Any

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount


@formula(
    "planner.product_share",
    source="derived here",
    label="thm-planner-share",
    equation=r"\eta = \frac{1}{1 + I^*\left(\frac1x + \frac1y + \frac1z\right)},\quad I^* = \frac{F w}{2 B_\text{mem}}",
)
def product_share(x: Any, y: Any, z: Any, flop_per_s: float, bytes_per_s: float, element_bytes: float = 2) -> Any:
    """The share of a rate that a product of matrices reaches.

    2xyz operations take 2xyz/F seconds, w(xy + yz + xz) bytes of operands take w(xy + yz + xz)/B more where nothing
    hides them; η is the first over the sum. Divide by 2xyz, and what is left is I* = Fw/(2B) times the sum of the
    reciprocals: the smallest side decides. `x`, `y` and `z` may be arrays. ``ValueError`` for what is not positive.
    """
    x, y, z = (amount(name, value, positive=True) for name, value in (("x", x), ("y", y), ("z", z)))
    flop_per_s = amount("flop_per_s", flop_per_s, positive=True)
    bytes_per_s = amount("bytes_per_s", bytes_per_s, positive=True)
    return 1 / (
        1 + flop_per_s * amount("element_bytes", element_bytes, positive=True) / 2 / bytes_per_s * _sides(x, y, z)
    )


@formula(
    "planner.cuts_for",
    source="derived here",
    label="thm-planner-share",
    equation=r"t^* = z\left(\frac{1/\eta - 1}{I^*} - \frac1x - \frac1y\right)",
    use="Cut into more slices, a matrix product falls below a share of the card's rate.",
)
def cuts_for(
    share: float, x: float, y: float, z: float, flop_per_s: float, bytes_per_s: float, element_bytes: float = 2
) -> float:
    """The slices of z at which a product falls to a share of the card's rate.

    `product_share` of (x, y) and (y, z/t), solved for t; 0 where the whole product does not reach the share.
    ``ValueError`` for a `share` that is not between 0 and 1, and for what is not positive.
    """
    if not 0 < amount("share", share) < 1:
        raise ValueError(f"share must be between 0 and 1, not {share}")
    whole = product_share(x, y, z, flop_per_s, bytes_per_s, element_bytes)
    intensity = (1 / whole - 1) / _sides(x, y, z)
    return max(0.0, float(z * ((1 / share - 1) / intensity - 1 / x - 1 / y)))


FP8_BYTES = 4 / 3
"""Bytes of an entry in the mean of the three products of a layer in fp8. Forward, for the gradient of the input and for
that of the weights two operands have one byte, and what comes out two; each of the three matrices (input or its
gradient, weights or theirs, output or its) comes out once and is an operand twice: (2·1 + 2)/3."""

CAST_BYTES = 4
"""Bytes that a cast to fp8 moves of an entry: it reads two and writes two copies of one byte, the second transposed,
since fp8 products take both operands along the sum. Inputs, weights and output gradients are cast once a micro-batch:
as many entries as the three products have matrices."""


def product_seconds(x: Any, y: Any, z: Any, flop_per_s: float, bytes_per_s: float, element_bytes: float = 2) -> Any:
    """Seconds of a product: 2xyz/F + w(xy + yz + xz)/B. Nothing is checked: it is asked a million times."""
    return 2 * x * y * z / flop_per_s + element_bytes * (x * y + y * z + x * z) / bytes_per_s


def _sides(x: Any, y: Any, z: Any) -> Any:
    return 1 / x + 1 / y + 1 / z
