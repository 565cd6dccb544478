"""Units: the only place that knows 1000 from 1024, and a byte from a bit.

Inside the library every quantity is in base units (bytes, seconds, bytes a second); these names convert at the edge.
"""

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
Gbit = 10**9 / 8  # bytes: what "100 Gb/s" counts
us, ms = 1e-6, 1e-3

TFLOP = 10**12

_BINARY = (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB))
_DECIMAL = (("TB", TB), ("GB", GB), ("MB", MB), ("kB", KB))
_TIME = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def format_bytes(num_bytes: float, *, decimal: bool = False, digits: int = 4) -> str:
    """`num_bytes` for a reader: ``"14.06 MiB"``, or in powers of 1000 with `decimal`: ``"14.74 MB"``."""
    for name, size in _DECIMAL if decimal else _BINARY:
        if abs(num_bytes) >= size:
            return f"{_significant(num_bytes / size, digits)} {name}"
    return f"{_significant(num_bytes, digits)} B"


def format_seconds(seconds: float, *, digits: int = 3) -> str:
    """`seconds` for a reader: ``"3.89 ms"``."""
    for name, size in _TIME:
        if abs(seconds) >= size:
            return f"{_significant(seconds / size, digits)} {name}"
    return f"{_significant(seconds / 1e-9, digits)} ns" if seconds else "0 s"


def format_rate(bytes_per_s: float) -> str:
    """A rate for a reader, in the powers of 1000 that links are sold in: ``"2.1 GB/s"``."""
    return f"{format_bytes(bytes_per_s, decimal=True, digits=3)}/s"


def format_count(number: int, noun: str) -> str:
    """``1 rank``, and ``2 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _significant(value: float, digits: int) -> str:
    if value == int(value) and abs(value) < 10**digits:
        return str(int(value))
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in text else text
