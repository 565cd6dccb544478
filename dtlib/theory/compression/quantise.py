"""Fewer bits for each element: casts, whole numbers with a scale, QSGD's dice, and signs.

How far a block of whole numbers is off is `theory.zero.quantised_error`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dtlib.theory.formula import formula
from dtlib.theory.valid import ranks, whole

from .vectors import Array, finite, unit


@formula(
    "compression.cast_error",
    source="derived here",
    label="thm-compression-rounding",
    equation=r"2^{-(\text{bits} + 1)}",
)
def cast_error(mantissa_bits: int) -> float:
    """A cast to fewer bits, what the relative error of an element is at most.

    Half the distance of two neighbours over the lower of them: 2⁻¹¹ for fp16 (10 bits of mantissa), 2⁻⁸ for bf16 (7).
    For numbers that the format holds as normal ones: fp16 ends at 65,504 and loses bits below 6.1 · 10⁻⁵.
    """
    return 2.0 ** -(whole("mantissa_bits", mantissa_bits, 0) + 1)


@formula(
    "compression.quantised_bytes",
    source="derived here",
    label="eq-compression-payloads",
    equation=r"\lceil b\,n/8 \rceil + 4 \lceil n/c \rceil",
)
def quantised_bytes(elements: int, bits: int, block: int, scale_bytes: int = 4) -> int:
    """Whole numbers with a scale a block, bytes of n elements.

    Codes of b `bits` without gaps, rounded up to a byte, and a scale of `scale_bytes` for each `block` of c elements,
    the last one shorter where c does not divide n.
    """
    n, c = whole("elements", elements, 0), whole("block", block, 1)
    return -(-n * whole("bits", bits, 1) // 8) + whole("scale_bytes", scale_bytes, 0) * -(-n // c)


@formula(
    "compression.sum_bits",
    source="derived here",
    label="thm-compression-rides",
    equation=r"\lceil \log_2(2 N (2^{b-1} - 1) + 1) \rceil",
)
def sum_bits(bits: int, n: int) -> int:
    """Bits that hold the sum of N ranks' codes, whatever they are.

    A code of b `bits` is one of −(2^(b−1) − 1) … 2^(b−1) − 1, and the sum of N one of N times as many on either side: 8
    bits hold no sum of two full codes. Codes add up at all only where the ranks share one scale.
    """
    return (2 * ranks(n) * (2 ** (whole("bits", bits, 2) - 1) - 1)).bit_length()


def qsgd(x: Any, levels: int, uniforms: Any) -> Array:
    """QSGD of a vector: ‖x‖₂ sign(xᵢ) lᵢ/s, where lᵢ is s|xᵢ|/‖x‖₂ rounded up with the chance of its fraction.

    s is `levels`; `uniforms` are n draws from [0, 1): lᵢ is rounded up where the draw is below the fraction. Source:
    Alistarh et al. 2017, arXiv 1610.02132, section 3.1.
    """
    x, s = finite("x", x), whole("levels", levels, 1)
    draws = finite("uniforms", uniforms)
    if draws.shape != x.shape or (draws < 0).any() or (draws >= 1).any():
        raise ValueError(f"uniforms must be {x.size} numbers from 0 to below 1, one for each element of x")
    part, largest = unit(x)
    if not largest:
        return np.zeros_like(x)
    norm = math.sqrt(float(part @ part))
    scaled = s * np.abs(part) / norm
    low = np.floor(scaled)
    return np.sign(x) * (low + (draws < scaled - low)) / s * norm * largest


@formula(
    "compression.qsgd_variance",
    source="derived here",
    label="thm-compression-qsgd",
    equation=r"\frac{1}{s^2} \sum_i p_i (1 - p_i), \quad p_i = \text{fraction of } s |x_i| / \|x\|",
)
def qsgd_variance(x: Any, levels: int) -> float:
    """QSGD, the variance of this vector: E‖Q(x) − x‖² over ‖x‖², exactly.

    Each element is rounded up with chance p_i, the fraction that it lost: a die of variance p_i (1 − p_i), in steps of
    ‖x‖/s. 0 for a vector of zeros.
    """
    part, largest = unit(finite("x", x))
    s = whole("levels", levels, 1)
    if not largest:
        return 0.0
    chance = np.modf(s * np.abs(part) / math.sqrt(float(part @ part)))[0]
    return math.fsum(chance * (1 - chance)) / s**2


@formula(
    "compression.qsgd_variance_bound",
    source="alistarh2017",
    label="thm-compression-qsgd",
    equation=r"\min\left(\frac{n}{s^2}, \frac{\sqrt n}{s}\right)",
)
def qsgd_variance_bound(elements: int, levels: int) -> float:
    """QSGD, what the variance of a vector of n elements is at most: E‖Q(x) − x‖² over ‖x‖².

    The second is approached, for n far above s², by elements of one magnitude; the first is four times what can happen,
    since p (1 − p) is at most ¼. Source: Alistarh et al. 2017, arXiv 1610.02132, Lemma 3.1.
    """
    n, s = whole("elements", elements, 1), whole("levels", levels, 1)
    return min(n / s**2, math.sqrt(n) / s)


@formula(
    "compression.qsgd_bytes",
    source="derived here",
    label="eq-compression-payloads",
    equation=r"\left\lceil \tfrac{n}{8} \lceil \log_2(2s + 1) \rceil \right\rceil + 4",
)
def qsgd_bytes(elements: int, levels: int) -> int:
    """QSGD, bytes of n elements in codes of fixed width.

    A code is one of −s … s, and the norm takes 4 bytes. The paper's codes of varying width (Elias) are shorter where
    most codes are 0.
    """
    return quantised_bytes(whole("elements", elements, 1), (2 * whole("levels", levels, 1)).bit_length(), elements)


def sign(x: Any) -> Array:
    """A bit for each element and one scale: ‖x‖₁/n with the sign of xᵢ, + for a zero (a bit has no third state)."""
    x = finite("x", x)
    if not x.size:
        return x
    return np.where(x < 0, -1.0, 1.0) * np.abs(x / x.size).sum()


@formula(
    "compression.sign_contraction",
    source="karimireddy2019",
    label="thm-compression-sign",
    equation=r"\delta = \frac{\|x\|_1^2}{n\,\|x\|_2^2}",
)
def sign_contraction(x: Any) -> float:
    """Signs with the scale ‖x‖₁/n, the contraction of this vector: ‖x − C(x)‖² is (1 − δ) ‖x‖², exactly.

    1 for elements of one magnitude, 1/n for one element alone, about 2/π for many normal ones. No other scale is nearer
    to x. 1 for a vector of zeros, which loses nothing. Source: Karimireddy et al. 2019, arXiv 1901.09847, Lemma 8.
    """
    part, largest = unit(finite("x", x))
    return float(np.abs(part).sum() ** 2 / (part.size * (part @ part))) if largest else 1.0
