"""The roofline: whether arithmetic or memory is the limit of an operation."""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, whole


@formula(
    "memory.matmul_intensity",
    source="williams2009",
    label="eq-memory-roofline",
    equation=r"I = \frac{2\,m k n}{w\,(m k + k n + m n)}",
)
def matmul_intensity(rows: int, inner: int, columns: int, element_bytes: float = 2) -> float:
    """Operations for each byte of a matrix product.

    2 m k n / ((m k + k n + m n) w), with w bytes an entry: every factor is read once and the product written once. For
    square matrices of size n that is n/3 in bf16; for one row, hardly 1. ``ValueError`` for sizes below 1 or an element
    without bytes. Source: Williams et al. 2009, doi 10.1145/1498765.1498785.
    """
    m, k, n = whole("rows", rows, 1), whole("inner", inner, 1), whole("columns", columns, 1)
    element_bytes = amount("element_bytes", element_bytes, positive=True)
    return 2 * m * k * n / ((m * k + k * n + m * n) * element_bytes)


def ridge_intensity(peak_flop_per_s: float, memory_bytes_per_s: float) -> float:
    """The intensity from which arithmetic is the limit.

    Peak over bandwidth, operations for each byte. ``ValueError`` unless both are positive. Source as
    `matmul_intensity`.
    """
    peak_flop_per_s = amount("peak_flop_per_s", peak_flop_per_s, positive=True)
    memory_bytes_per_s = amount("memory_bytes_per_s", memory_bytes_per_s, positive=True)
    return peak_flop_per_s / memory_bytes_per_s


@formula(
    "memory.roofline_flop_per_s",
    source="williams2009",
    label="eq-memory-roofline",
    equation=r"\min(F,\; I \cdot B_{\text{mem}})",
    use=r"Below the intensity $F/B_{\text{mem}}$ memory is the limit, above it arithmetic.",
)
def roofline_flop_per_s(intensity: float, peak_flop_per_s: float, memory_bytes_per_s: float) -> float:
    """The rate that an operation can reach.

    min(peak, intensity · bandwidth), operations a second. ``ValueError`` for a negative intensity or rates that are not
    positive. Source as `matmul_intensity`.
    """
    intensity = amount("intensity", intensity)
    ridge_intensity(peak_flop_per_s, memory_bytes_per_s)
    return min(peak_flop_per_s, intensity * memory_bytes_per_s)
