"""memory.4: the bytes of some rows in bf16."""

from dataclasses import replace
from typing import Any

import numpy as np

from dtlib.grading.exercises.compare import show
from dtlib.grading.exercises.exercise import Check, Finding, FormError
from dtlib.grading.exercises.inputs import Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, order, own_work, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import some_rank

from ._shared import Array, upper_half

FUNCTION = "bf16_rows"
SPECIAL = (
    0x7F800000, 0xFF800000,  # the infinities
    0x7FC00000, 0xFFC00001, 0x7FFFFFFF, 0xFFFFFFFF,  # quiet NaNs: rounding the last two carries out of the exponent
    0x7F812345, 0xFFA00000, 0x7FBFFFFF, 0x7F80FFFF,  # signalling NaNs
    0x7F800001, 0xFF800001, 0xFF808000, 0x7F807FFF,  # with something in the lower half alone
    0x80000000, 0x00000000,  # the zeros
    0x00000001, 0x807FFFFF, 0x0000FFFF, 0x00008000, 0x80018000, 0x00008001, 0x007F8000, 0x80300001,  # subnormal numbers
    0x00800000, 0x80807FFF,  # the smallest normal ones
    0x7F7FFFFF, 0xFF7FFFFF, 0xFF7F8000, 0x7F7F7FFF, 0x7F7F8001, 0xFF7E8000,  # the largest: some become infinite
)  # fmt: skip
ORDINARY = (0x3F7FC000, 0xC07FFFFF, 0x4B7F8001, 0x3F800000, 0xC0407FFF, 0x41018001)  # three carry into the exponent


def draw(rng: Rng) -> Cases:
    """Ordinary numbers, numbers midway, special ones, and rows that are shared in every way."""
    ties = ordinary(rng, 8, 8) >> 17 << 17 | np.arange(8) % 2 << 16 | 0x8000  # above an even last bit, above an odd one
    ties[0, :4] = 0x3F7F8000, 0xC07F8000, 0x3F808000, 0xBFFE8000  # carried into the exponent, and not
    cases = [
        case("ordinary", np.concatenate([ordinary(rng, 3, 6), [ORDINARY]]), 0, 1),
        case("midway", ties, 0, 1),
        case("special", rng.permutation(np.array(SPECIAL, np.uint32)).reshape(8, -1), 0, 1),
    ]
    n = int(rng.integers(4, 7))
    rest = int(rng.integers(2, n - 1))
    uneven = n * int(rng.integers(2, 4)) + rest
    shares = [(uneven, n, rank) for rank in (0, 1, rest - 1, rest, n - 1)]
    shares += [(2 * n, n, 1), (2 * n, n, n - 1), (n - 2, n, 1), (n - 2, n, n - 1), (1, 1, 0), (1, n, 0), (1, n, 1)]
    for number, of, rank in [*shares, (uneven, 1, 0)]:
        cases.append(case("shared", ordinary(rng, number, int(rng.integers(2, 8))), rank, of))
    return [*cases, case("shared", ordinary(rng, uneven, 1), rest, n)]


def case(what: str, bits: Array, rank: int, n: int) -> dict[str, Any]:
    words = f"{len(bits)} rows of {bits.shape[1]} over {n} ranks, rank {rank}" if what == "shared" else what
    kinds = {each: each == what for each in ("ordinary", "midway", "special", "shared")}
    return call(words, [bits.astype(np.uint32).view(np.float32), rank, n], **kinds)


def ordinary(rng: Rng, rows: int, columns: int) -> Array:
    """Bits of moderate numbers of both signs, none midway, half of them in the upper half of their interval."""
    drawn = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-3, 4, (rows, columns))
    above = np.arange(rows * columns).reshape(rows, columns) % 2
    lower = np.where(above, rng.integers(0x8001, 0x10000, above.shape), rng.integers(0, 0x8000, above.shape))
    return (drawn.astype(np.float32).view(np.uint32) >> 16 << 16) | lower


def own_rows(case: Case) -> Array:
    table, rank, n = case["arguments"]
    return np.array_split(table, n)[rank]


def right(case: Case) -> Array:
    bits = own_rows(case).view(np.uint32).astype(np.uint64)
    return np.frombuffer(upper_half(bits).astype("<u2").tobytes(), np.uint8)


def find(observed: Observed) -> Finding | None:
    """That the bytes are right; else the first number whose are not."""
    seen, wanted = observed.said[0]["answer"], right(observed.case)
    if observed.said[0]["form"] != "bytes":
        raise FormError(show(seen), "bytes")
    if seen.size != wanted.size:
        return Finding(f"{seen.size} bytes", f"{wanted.size}", observed.words)
    if np.array_equal(seen, wanted):
        return None
    at = int(np.argmax(seen != wanted)) // 2
    number = own_rows(observed.case).ravel()[at]
    pair, expected = (" ".join(f"{each:02x}" for each in some[2 * at : 2 * at + 2]) for some in (seen, wanted))
    place = f"{number:.9g} (0x{int(number.view(np.uint32)):08x})"
    return Finding(f"bytes {pair} for the number {place}", expected, observed.words)


def to_the_byte(points: int, name: str, description: str, where: str) -> Check:
    return replace(values(points, name, description, right, where=where, rtol=0.0), inspect=find)


def find_shortcut(observed: Observed) -> Finding | None:
    made = observed.said[0]["shortcut"]
    return Finding(f"torch's `{made[0]}`, which made a bfloat16 tensor", "your own work on the bits") if made else None


SHORTCUT = {"torch's bfloat16": some_rank(lambda said, case: bool(said["shortcut"]))}

EXERCISE = on_paper(
    "memory.4", FUNCTION, "bf16 to the byte", draw,
    order(0, "own bits", "no bfloat16 of torch", find_shortcut, wrong=SHORTCUT, gate=True, is_told=True),
    to_the_byte(2, "numbers", "ordinary numbers", "ordinary"),
    to_the_byte(1, "ties", "numbers midway between two neighbours", "midway"),
    to_the_byte(2, "specials", "infinities, NaNs, zeros, tiny and huge numbers", "special"),
    to_the_byte(2, "rows", "the rows of each rank", "shared"),
    own=own_work(FUNCTION, "your own work on the bits"),
    harness="paper.encode",
)  # fmt: skip
