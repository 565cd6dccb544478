"""memory.4: the bytes of some rows in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import NOT_YOUR_OWN, called_library, mistake
from dtlib.grading.compare import gives, right_only_if, show, some_rank
from dtlib.grading.exercise import Case, Check, Exercise, Finding, FormError, Run, describe_case

Array = np.ndarray[Any, Any]
_SPECIAL_BITS = (
    0x7F800000, 0xFF800000,  # the infinities
    0x7F800001, 0xFF812345, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FBFFFFF,  # NaNs, quiet and signalling
    0x80000000, 0x00000000,  # the zeros
    0x00000001, 0x807FFFFF, 0x0000FFFF,  # numbers below the smallest normal one
    0x7F7FFFFF, 0xFF7F8000, 0x7F7F7FFF,  # the largest: some of them round to infinity
)  # fmt: skip


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
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


def _encoded(case: Case, how: Callable[[Array], Array] = rounded, order: str = "<", rows: Any = own_rows) -> Array:
    start, end = rows(case)
    return _as_bytes(how(_bits(case)[start:end]), order)


def _answer(run: Run) -> Any:
    data = run.ranks[0]
    if data["form"] != "bytes":
        raise FormError(show(data["answer"]), "bytes")
    return data["answer"]


def _inspect(run: Run) -> Finding | None:
    seen, wanted = _answer(run), _encoded(run.case)
    where = describe_case(run.case)
    if seen.size != wanted.size:
        return Finding(f"{seen.size} bytes", f"{wanted.size}", where)
    off = np.flatnonzero(seen != wanted)
    if not off.size:
        return None
    at = int(off[0]) // 2 * 2
    start, end = own_rows(run.case)
    number = np.asarray(run.case["values"])[start:end].ravel()[at // 2]
    bits = int(number.view(np.uint32))
    return Finding(
        f"bytes {_hex(seen[at : at + 2])} for the number {number:.9g} (0x{bits:08x})", _hex(wanted[at : at + 2]), where
    )


def _hex(some: Array) -> str:
    return " ".join(f"{each:02x}" for each in some.tolist())


def _like(how: Callable[[Array], Array] = rounded, order: str = "<", rows: Any = own_rows) -> Any:
    return gives(_answer, lambda case: _encoded(case, how, order, rows), rtol=0.0, always=True)


def _truncated(bits: Array) -> Array:
    return bits >> 16


def _ties_up(bits: Array) -> Array:
    return (bits + 0x8000) >> 16


def _ties_to_zero(bits: Array) -> Array:
    return (bits + 0x7FFF) >> 16


def _nearest_even_of_anything(bits: Array) -> Array:
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFFFFFF) >> 16) & 0xFFFF


def _one_nan(bits: Array) -> Array:
    return np.where(_is_nan(bits), 0x7FC0, rounded(bits))


def _nan_as_it_is(bits: Array) -> Array:
    return np.where(_is_nan(bits), bits >> 16, rounded(bits))


def _saturated(bits: Array) -> Array:
    return np.where(
        (bits & 0x7FFFFFFF) < 0x7F800000,
        np.minimum(rounded(bits) & 0x7FFF, 0x7F7F) | (bits >> 16 & 0x8000),
        rounded(bits),
    )


def _flushed(bits: Array) -> Array:
    return np.where((bits & 0x7F800000) == 0, bits >> 16 & 0x8000, rounded(bits))


def _without_minus_zero(bits: Array) -> Array:
    return np.where(bits == 0x80000000, 0, rounded(bits))


def _fp16(case: Case) -> Array:
    start, end = own_rows(case)
    with np.errstate(all="ignore"):
        return np.frombuffer(np.asarray(case["values"])[start:end].astype("<f2").tobytes(), np.uint8)


def _rest_dropped(case: Case) -> tuple[int, int]:
    base = len(case["values"]) // case["n"]
    return case["rank"] * base, (case["rank"] + 1) * base


def _rest_to_the_last(case: Case) -> tuple[int, int]:
    start, end = _rest_dropped(case)
    return start, len(case["values"]) if case["rank"] == case["n"] - 1 else end


def _rounded_up(case: Case) -> tuple[int, int]:
    rows = len(case["values"])
    base = -(-rows // case["n"])
    return min(case["rank"] * base, rows), min((case["rank"] + 1) * base, rows)


def _all_rows(case: Case) -> tuple[int, int]:
    return 0, len(case["values"])


def _start_without_rest(case: Case) -> tuple[int, int]:
    base, rest = divmod(len(case["values"]), case["n"])
    return case["rank"] * base, case["rank"] * base + base + (case["rank"] < rest)


def _dealt(case: Case) -> Array:
    return _as_bytes(rounded(_bits(case)[case["rank"] :: case["n"]]))


def _columns(case: Case) -> Array:
    base, rest = divmod(_bits(case).shape[1], case["n"])
    start = case["rank"] * base + min(case["rank"], rest)
    return _as_bytes(rounded(_bits(case)[:, start : start + base + (case["rank"] < rest)]))


def _of(what: str) -> Callable[[Case], bool]:
    return lambda case: bool(case["what"] == what)


def _inspect_own(run: Run) -> Finding | None:
    data = run.ranks[0]
    finding = called_library(data, "your own work on the bits")
    if finding is None and data["shortcut"]:
        return Finding(f"torch's `{data['shortcut'][0]}`, which made a bfloat16 tensor", "your own work on the bits")
    return finding


ENCODE = Exercise(
    id="memory.4",
    function="bf16_rows",
    title="bf16 to the byte",
    harness="memory.encode",
    draw=_draw,
    checks=(
        Check(
            "own bits",
            "value",
            0,
            "`bf16_rows` makes the bytes itself",
            _inspect_own,
            gate=True,
            mistakes=(
                *NOT_YOUR_OWN,
                mistake(
                    "torch's bfloat16",
                    some_rank(lambda data, case: bool(data["shortcut"])),
                    "The conversion is torch's. The task is to do what it does: which bits stay, and what "
                    "becomes of the others? Compare with torch afterwards.",
                ),
            ),
        ),
        Check(
            "numbers",
            "value",
            2,
            "ordinary numbers",
            _inspect,
            applies=_of("ordinary"),
            mistakes=(
                mistake(
                    "cut off",
                    _like(_truncated),
                    "The lower half of the bits was cut off: every number moves towards zero. Which of its two "
                    "neighbours is the nearest?",
                ),
                mistake(
                    "big end first",
                    _like(order=">"),
                    "The two bytes of every number are the wrong way round. Which one does little-endian put first?",
                ),
                mistake(
                    "fp16",
                    gives(_answer, _fp16, rtol=0.0),
                    "This is fp16, which has other bits: 5 for the exponent and 10 behind it. How many has bf16, and "
                    "where do they stand in an fp32 number?",
                ),
                mistake(
                    "the lower half",
                    _like(lambda bits: bits & 0xFFFF),
                    "These are the lower 16 bits. Which half of an fp32 number has its sign and its exponent?",
                ),
                mistake(
                    "always up",
                    _like(lambda bits: (bits + 0xFFFF) >> 16),
                    "Every number moves away from zero. Which of its two neighbours is the nearest?",
                ),
                mistake(
                    "not converted",
                    gives(
                        _answer,
                        lambda case: np.frombuffer(np.asarray(case["values"]).astype("<f4").tobytes(), np.uint8),
                        rtol=0.0,
                    ),
                    "Four bytes for each number: this is still fp32. How many has bf16?",
                ),
            ),
        ),
        Check(
            "ties",
            "value",
            1,
            "numbers midway between two neighbours",
            _inspect,
            applies=_of("ties"),
            mistakes=(
                mistake(
                    "ties up",
                    _like(_ties_up),
                    "Numbers midway always go up here, away from zero. What would a long sum of them drift to, and "
                    "which neighbour does the rule prefer?",
                ),
                mistake(
                    "ties down",
                    _like(_ties_to_zero),
                    "Numbers midway always go down here, towards zero. Which of the two neighbours does the rule "
                    "prefer?",
                ),
                mistake(
                    "ties to odd",
                    _like(lambda bits: (bits + 0x8000 - ((bits >> 16) & 1)) >> 16),
                    "A number midway goes to the odd neighbour here. What is the last bit of the one that the rule "
                    "prefers?",
                ),
            ),
        ),
        Check(
            "specials",
            "value",
            2,
            "infinities, NaNs, zeros, tiny and huge numbers",
            _inspect,
            applies=_of("specials"),
            mistakes=(
                mistake(
                    "a NaN rounded",
                    _like(_nearest_even_of_anything),
                    "Some NaN came out as another thing: rounding carried into its exponent or its sign, or cut away "
                    "what made it one. What would the next rank do with it?",
                ),
                mistake(
                    "one NaN for all",
                    _like(_one_nan),
                    "All NaNs became the same one. Which of its bits should a NaN keep?",
                ),
                mistake(
                    "NaN without its quiet bit",
                    _like(_nan_as_it_is),
                    "A NaN that differs from infinity in the lower half only is infinity now. Which bit makes sure "
                    "that something is left?",
                ),
                mistake(
                    "never infinite",
                    _like(_saturated),
                    "Huge numbers stop at the largest of bf16. Which of its neighbours is a number nearer to that lies "
                    "above, when the next one is infinity?",
                ),
                mistake(
                    "tiny numbers lost",
                    _like(_flushed),
                    "Numbers below the smallest normal one became zero. Do their bits need another rule at all?",
                ),
                mistake("minus zero", _like(_without_minus_zero), "The zero lost its sign. Which bit is that?"),
                mistake(
                    "cut off",
                    _like(_truncated),
                    "The lower half was cut off, also of a NaN that had nothing else. Which number is it now?",
                ),
            ),
        ),
        Check(
            "rows",
            "value",
            2,
            "the rows of each rank",
            _inspect,
            applies=_of("rows"),
            mistakes=(
                mistake(
                    "all rows",
                    _like(rows=_all_rows),
                    "Every rank encodes all rows. Which of them are its own?",
                ),
                mistake(
                    "rest dropped",
                    _like(rows=_rest_dropped),
                    "Every rank has equally many rows here, and some rows nobody has. Who takes the rest?",
                ),
                mistake(
                    "rest to the last",
                    _like(rows=_rest_to_the_last),
                    "The last rank takes all of the rest here, and the others wait for it. How does the task share it?",
                ),
                mistake(
                    "rounded up",
                    _like(rows=_rounded_up),
                    "The share is rounded up for everybody here, and the last rank makes do with what is left. That is "
                    "how `torch.chunk` cuts. How does the task?",
                ),
                mistake(
                    "start without the rest",
                    _like(rows=_start_without_rest),
                    "The number of rows is right, and the first one is not. How many rows do all ranks before this one "
                    "have, together?",
                ),
                mistake(
                    "dealt out",
                    gives(_answer, _dealt, rtol=0.0),
                    "The rows are dealt out one by one like cards. The task wants rows that lie side by side.",
                ),
                mistake(
                    "columns",
                    gives(_answer, _columns, rtol=0.0),
                    "The columns were shared. Which side of the table is cut?",
                ),
                mistake(
                    "right for even shares only",
                    right_only_if(lambda case: len(case["values"]) % case["n"] == 0),
                    "It is right where the ranks divide the rows, and only there. Who has how many rows otherwise?",
                ),
            ),
        ),
    ),
)
