"""memory.4, the bits: what a case draws, what its bytes are, and what they would be by known mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercise import Case

Array = np.ndarray[Any, Any]
_SPECIAL_BITS = (
    0x7F800000, 0xFF800000,  # the infinities
    0x7F800001, 0xFF812345, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FBFFFFF,  # NaNs, quiet and signalling
    0x80000000, 0x00000000,  # the zeros
    0x00000001, 0x807FFFFF, 0x0000FFFF,  # numbers below the smallest normal one
    0x7F7FFFFF, 0xFF7F8000, 0x7F7F7FFF,  # the largest: some of them round to infinity
)  # fmt: skip


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """The cases: ordinary numbers, numbers midway, special ones, and rows that are shared in several ways."""
    bits = [_ordinary(rng, 4 * 6), _ties(rng, 4 * 8), _specials(rng)]
    cases = [
        _case("ordinary", bits[0].reshape(4, 6), 0, 1, "ordinary numbers"),
        _case("ties", bits[1].reshape(4, 8), 0, 1, "numbers midway between two of bf16"),
        _case("specials", bits[2].reshape(8, -1), 0, 1, "infinities, NaNs, zeros, tiny and huge numbers"),
    ]
    n = int(rng.integers(3, 6))
    uneven = n * int(rng.integers(2, 4)) + int(rng.integers(1, n - 1))
    for num_rows, of, rank in ((uneven, n, 0), (uneven, n, 1), (uneven, n, n - 1), (2 * n, n, 1), (n - 2, n, n - 1)):
        columns = int(rng.integers(3, 7))
        values = _ordinary(rng, num_rows * columns).reshape(num_rows, columns)
        cases.append(_case("rows", values, rank, of, f"{num_rows} rows of {columns} over {of} ranks, rank {rank}"))
    return cases


def _case(what: str, bits: Array, rank: int, n: int, words: str) -> dict[str, Any]:
    return {"what": what, "values": bits.astype(np.uint32).view(np.float32), "rank": rank, "n": n, "words": words}


def _ordinary(rng: np.random.Generator, size: int) -> Array:
    """Bits of moderate numbers of both signs, none midway, half of them in the upper half of their interval."""
    values = (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)).astype(np.float32).view(np.uint32)
    lower = np.where(np.arange(size) % 2, rng.integers(0x8001, 0x10000, size), rng.integers(1, 0x8000, size))
    return (values & 0xFFFF0000) | lower


def _ties(rng: np.random.Generator, size: int) -> Array:
    """Bits of numbers exactly midway: half of them above an even last bit, half above an odd one."""
    upper = (rng.standard_normal(size).astype(np.float32).view(np.uint32) >> 16 & 0xFFFE) | np.arange(size) % 2
    return (upper << 16) | 0x8000


def _specials(rng: np.random.Generator) -> Array:
    return rng.permutation(np.array(_SPECIAL_BITS, np.uint32))


def _bits(case: Case) -> Array:
    return np.asarray(case["values"]).view(np.uint32).astype(np.uint64)


def rounded(bits: Array) -> Array:
    """The upper half of fp32 `bits`, rounded to nearest, ties to even; a NaN keeps its upper half and is made quiet."""
    upper, lower = bits >> 16, bits & 0xFFFF
    up = (lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))
    return np.where(_is_nan(bits), upper | 0x40, upper + up)


def _is_nan(bits: Array) -> Array:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def own_rows(case: Case) -> tuple[int, int]:
    """The first row of the case's rank, and the first that is not its own any more."""
    base, rest = divmod(len(case["values"]), case["n"])
    start = case["rank"] * base + min(case["rank"], rest)
    return start, start + base + (case["rank"] < rest)


def _as_bytes(upper: Array, order: str = "<") -> Array:
    return np.frombuffer(upper.astype(f"{order}u2").tobytes(), np.uint8)


def encoded(case: Case, how: Callable[[Array], Array] = rounded, order: str = "<", rows: Any = own_rows) -> Array:
    """The bytes of the case's rows; the arguments bring in mistakes."""
    start, end = rows(case)
    return _as_bytes(how(_bits(case)[start:end]), order)


def truncated(bits: Array) -> Array:
    """Mistake: the lower half is cut off."""
    return bits >> 16


def ties_up(bits: Array) -> Array:
    """Mistake: numbers midway go up."""
    return (bits + 0x8000) >> 16


def ties_to_zero(bits: Array) -> Array:
    """Mistake: numbers midway go down."""
    return (bits + 0x7FFF) >> 16


def nearest_even_of_anything(bits: Array) -> Array:
    """Mistake: a NaN is rounded as well."""
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFFFFFF) >> 16) & 0xFFFF


def one_nan(bits: Array) -> Array:
    """Mistake: all NaNs become one."""
    return np.where(_is_nan(bits), 0x7FC0, rounded(bits))


def nan_as_it_is(bits: Array) -> Array:
    """Mistake: a NaN's upper half alone, whatever is left of it."""
    return np.where(_is_nan(bits), bits >> 16, rounded(bits))


def saturated(bits: Array) -> Array:
    """Mistake: what is too large stops at the largest number."""
    return np.where(
        (bits & 0x7FFFFFFF) < 0x7F800000,
        np.minimum(rounded(bits) & 0x7FFF, 0x7F7F) | (bits >> 16 & 0x8000),
        rounded(bits),
    )


def flushed(bits: Array) -> Array:
    """Mistake: what is tiny becomes zero."""
    return np.where((bits & 0x7F800000) == 0, bits >> 16 & 0x8000, rounded(bits))


def without_minus_zero(bits: Array) -> Array:
    """Mistake: the zero loses its sign."""
    return np.where(bits == 0x80000000, 0, rounded(bits))


def fp16(case: Case) -> Array:
    """Mistake: the bytes of fp16."""
    start, end = own_rows(case)
    with np.errstate(all="ignore"):
        return np.frombuffer(np.asarray(case["values"])[start:end].astype("<f2").tobytes(), np.uint8)


def rest_dropped(case: Case) -> tuple[int, int]:
    """Mistake: equally many rows for everybody, and the rest for nobody."""
    base = len(case["values"]) // case["n"]
    return case["rank"] * base, (case["rank"] + 1) * base


def rest_to_the_last(case: Case) -> tuple[int, int]:
    """Mistake: the last rank takes the rest."""
    start, end = rest_dropped(case)
    return start, len(case["values"]) if case["rank"] == case["n"] - 1 else end


def rounded_up(case: Case) -> tuple[int, int]:
    """Mistake: shares rounded up, as `torch.chunk` cuts."""
    rows = len(case["values"])
    base = -(-rows // case["n"])
    return min(case["rank"] * base, rows), min((case["rank"] + 1) * base, rows)


def all_rows(case: Case) -> tuple[int, int]:
    """Mistake: all rows on every rank."""
    return 0, len(case["values"])


def start_without_rest(case: Case) -> tuple[int, int]:
    """Mistake: the right number of rows from the wrong one on."""
    base, rest = divmod(len(case["values"]), case["n"])
    return case["rank"] * base, case["rank"] * base + base + (case["rank"] < rest)


def dealt(case: Case) -> Array:
    """Mistake: rows dealt out one by one."""
    return _as_bytes(rounded(_bits(case)[case["rank"] :: case["n"]]))


def columns(case: Case) -> Array:
    """Mistake: columns instead of rows."""
    base, rest = divmod(_bits(case).shape[1], case["n"])
    start = case["rank"] * base + min(case["rank"], rest)
    return _as_bytes(rounded(_bits(case)[:, start : start + base + (case["rank"] < rest)]))
