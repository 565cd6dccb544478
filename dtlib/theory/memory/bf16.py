"""bf16 to the bit, in numpy: what a number becomes, what is lost, and which updates are lost whole.

A bf16 number is the upper half of an fp32 number: sign, eight bits of exponent, seven of fraction. Between 2ᵉ and
2ᵉ⁺¹ lie 128 of them, 2ᵉ⁻⁷ apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, whole

SIGNIFICAND_BITS = 8
"""Significant bits of bf16: seven that are stored, and the leading one that is not."""

_QUIET = np.uint16(0x0040)


def encode(values: ArrayLike) -> NDArray[np.uint16]:
    """The bits of each of `values` (fp32) as bf16: rounded to nearest, a tie to the neighbour whose last bit is 0.

    Half of what is cut off is added before the cut; one less where the last bit that stays is 0, so that a tie goes to
    the even neighbour. What exceeds the largest number becomes infinite, and what is not a number stays none.
    """
    x = np.asarray(values, dtype=np.float32)
    bits = x.view(np.uint32)
    kept = (bits >> np.uint32(16)).astype(np.uint16)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x7FFF) + (kept & np.uint16(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), kept | _QUIET, rounded)


def decode(bits: ArrayLike) -> NDArray[np.float32]:
    """The numbers (fp32, exact) whose bf16 `bits` are given, as uint16: 16 zeros are appended."""
    half = np.asarray(bits, dtype=np.uint16)
    return (half.astype(np.uint32) << np.uint32(16)).view(np.float32)


def rounded(values: ArrayLike) -> NDArray[np.float32]:
    """Each of `values` (fp32) as the nearest bf16 number, in fp32."""
    return decode(encode(values))


def stored_bytes(values: ArrayLike) -> bytes:
    """The bytes of `values` in bf16 as they lie in memory, row after row, the lower byte of each number first."""
    return encode(values).astype("<u2").tobytes()


def spacing(value: Any) -> float:
    """The distance from |`value`| to the next larger bf16 number: 2^(e−7), where 2^e is the largest power of two in it.

    ``ValueError`` unless `value` is a finite number that is not 0; numbers below 2⁻¹²⁶ (subnormal) lie 2⁻¹³³ apart.
    """
    amount("value", abs(value), positive=True)
    exponent = max(int(np.floor(np.log2(float(abs(value))))), -126)
    return float(2.0 ** (exponent - (SIGNIFICAND_BITS - 1)))


@formula(
    "memory.rounding_error",
    source="derived here",
    label="thm-memory-rounding",
    equation=r"\max_x \frac{|\mathrm{round}(x) - x|}{|x|} = \frac{1}{2^{p} + 1}",
)
def rounding_error(significand_bits: int = SIGNIFICAND_BITS) -> float:
    """The largest relative error of rounding to p significant bits.

    1/(2^p + 1), just below 2^−p: for bf16 (p = 8) 1/257. It is reached half-way between a power of two and the next
    number. For numbers that are neither too large nor too small for the format. ``ValueError`` for p below 1.
    """
    return 1 / (2 ** whole("significand_bits", significand_bits, 1) + 1)


@formula(
    "memory.lost_update",
    source="derived here",
    label="prop-memory-lost",
    equation=r"\tfrac12\, 2^{\lfloor \log_2 |w| \rfloor - 7}",
    use="A smaller update leaves the weight as it is.",
)
def lost_update(weight: float) -> float:
    """The largest update that a bf16 weight does not feel.

    Half the distance to the next number: w + δ rounds back to w for 0 ≤ δ below it. That is between 2⁻⁹ and 2⁻⁸ of
    the weight, 2⁻⁸ where the weight is a power of two. A weight that shrinks is alike, but for powers of two, below
    which numbers lie twice as dense. ``ValueError`` for 0 or a number that is not finite.
    """
    return spacing(weight) / 2
