"""What a rank sends: a ring for payloads that add up on the way, a gathering for those that do not, two passes for
codes that are opened half-way."""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, number, ranks, whole

from .quantise import quantised_bytes


@formula(
    "compression.all_reduced_bytes",
    source="patarasuk2009",
    label="eq-compression-wire",
    equation=r"2\,\frac{N-1}{N}\,P",
)
def all_reduced_bytes(payload_bytes: float, n: int) -> float:
    """A payload that adds up, bytes that a rank sends: a ring all-reduce of P bytes.

    Casts, the common places of random-k, the factors of a low rank. The mean over ranks where N does not divide.
    """
    return 2 * (ranks(n) - 1) * amount("payload_bytes", payload_bytes) / n


@formula("compression.all_gathered_bytes", source="thakur2005", label="eq-compression-wire", equation=r"(N-1)\,P")
def all_gathered_bytes(payload_bytes: float, n: int) -> float:
    """A payload that does not add up, bytes that a rank sends: P bytes of each rank go to all others.

    Top-k (each rank has other places), QSGD and signs (each has another scale).
    """
    return (ranks(n) - 1) * amount("payload_bytes", payload_bytes)


@formula(
    "compression.two_pass_bytes",
    source="wang2023zeropp",
    label="eq-compression-wire",
    equation=r"2\,(N-1)\left(\lceil b\,\lceil n/N \rceil/8 \rceil + 4 \lceil \lceil n/N \rceil/c \rceil\right)",
)
def two_pass_bytes(elements: int, n: int, bits: int = 8, block: int = 256, scale_bytes: int = 4) -> int:
    """Codes that are summed in full precision half-way, bytes that a rank sends.

    N equal chunks of ⌈n/N⌉ elements, the last one padded. Each goes to the rank that sums it, in codes, and its sum to
    all, in codes again: 2 (N − 1) payloads of `quantised_bytes`.
    """
    n = ranks(n)
    return 2 * (n - 1) * quantised_bytes(-(-whole("elements", elements, 0) // n), bits, block, scale_bytes)


@formula(
    "compression.most_gathering_ranks",
    source="derived here",
    label="thm-compression-gather",
    equation=r"\lfloor 2 D / P \rfloor",
    use="With more ranks, gathering the compressed gradients sends more than a ring of the dense ones.",
)
def most_gathering_ranks(dense_bytes: float, payload_bytes: float) -> int:
    """The most ranks on which gathering payloads of P bytes sends no more than a ring all-reduce of D dense bytes.

    (N − 1) P ≤ 2 (N − 1)/N · D exactly where N ≤ 2D/P: each rank's payload must be 2/N of the dense gradient. At
    least 1, where neither sends.
    """
    number("payload_bytes", payload_bytes, positive=True)
    return max(1, int(2 * number("dense_bytes", dense_bytes) // payload_bytes))
