"""memory.4: the bytes of some rows in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import NOT_YOUR_OWN, called_library, mistake
from dtlib.grading.compare import gives, right_only_if, show, some_rank
from dtlib.grading.exercise import Case, Check, Exercise, Finding, FormError, Run, describe_case

from .bits import (
    Array,
    all_rows,
    columns,
    dealt,
    draw,
    encoded,
    flushed,
    fp16,
    nan_as_it_is,
    nearest_even_of_anything,
    one_nan,
    own_rows,
    rest_dropped,
    rest_to_the_last,
    rounded,
    rounded_up,
    saturated,
    start_without_rest,
    ties_to_zero,
    ties_up,
    truncated,
    without_minus_zero,
)


def _answer(run: Run) -> Any:
    data = run.ranks[0]
    if data["form"] != "bytes":
        raise FormError(show(data["answer"]), "bytes")
    return data["answer"]


def _inspect(run: Run) -> Finding | None:
    seen, wanted = _answer(run), encoded(run.case)
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
    return gives(_answer, lambda case: encoded(case, how, order, rows), rtol=0.0, always=True)


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
    draw=draw,
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
                    _like(truncated),
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
                    gives(_answer, fp16, rtol=0.0),
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
                    _like(ties_up),
                    "Numbers midway always go up here, away from zero. What would a long sum of them drift to, and "
                    "which neighbour does the rule prefer?",
                ),
                mistake(
                    "ties down",
                    _like(ties_to_zero),
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
                    _like(nearest_even_of_anything),
                    "Some NaN came out as another thing: rounding carried into its exponent or its sign, or cut away "
                    "what made it one. What would the next rank do with it?",
                ),
                mistake(
                    "one NaN for all",
                    _like(one_nan),
                    "All NaNs became the same one. Which of its bits should a NaN keep?",
                ),
                mistake(
                    "NaN without its quiet bit",
                    _like(nan_as_it_is),
                    "A NaN that differs from infinity in the lower half only is infinity now. Which bit makes sure "
                    "that something is left?",
                ),
                mistake(
                    "never infinite",
                    _like(saturated),
                    "Huge numbers stop at the largest of bf16. Which of its neighbours is a number nearer to that lies "
                    "above, when the next one is infinity?",
                ),
                mistake(
                    "tiny numbers lost",
                    _like(flushed),
                    "Numbers below the smallest normal one became zero. Do their bits need another rule at all?",
                ),
                mistake("minus zero", _like(without_minus_zero), "The zero lost its sign. Which bit is that?"),
                mistake(
                    "cut off",
                    _like(truncated),
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
                    _like(rows=all_rows),
                    "Every rank encodes all rows. Which of them are its own?",
                ),
                mistake(
                    "rest dropped",
                    _like(rows=rest_dropped),
                    "Every rank has equally many rows here, and some rows nobody has. Who takes the rest?",
                ),
                mistake(
                    "rest to the last",
                    _like(rows=rest_to_the_last),
                    "The last rank takes all of the rest here, and the others wait for it. How does the task share it?",
                ),
                mistake(
                    "rounded up",
                    _like(rows=rounded_up),
                    "The share is rounded up for everybody here, and the last rank makes do with what is left. That is "
                    "how `torch.chunk` cuts. How does the task?",
                ),
                mistake(
                    "start without the rest",
                    _like(rows=start_without_rest),
                    "The number of rows is right, and the first one is not. How many rows do all ranks before this one "
                    "have, together?",
                ),
                mistake(
                    "dealt out",
                    gives(_answer, dealt, rtol=0.0),
                    "The rows are dealt out one by one like cards. The task wants rows that lie side by side.",
                ),
                mistake(
                    "columns",
                    gives(_answer, columns, rtol=0.0),
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
