"""Rounding to bf16, as the chapter's exercises define it."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def upper_half(bits: Array) -> Array:
    """The upper half of fp32 `bits` (uint64), rounded to nearest, ties to even; a NaN keeps its own, made quiet."""
    upper, lower = bits >> 16, bits & 0xFFFF
    is_up = (lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, upper | 0x40, upper + is_up)


def rounded(values: Array) -> Array:
    """`values` rounded to bf16, by way of fp32, in double precision."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return (upper_half(bits) << 16).astype(np.uint32).view(np.float32).astype(np.float64)
