"""reliability.3: a save that may be stopped anywhere: an older or a newer whole checkpoint is there, always."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import order, own_work
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Sign, Wrong, every

SLACK_BYTES = 2000  # of a checkpoint, for names and checksums
#: Blobs of a checkpoint, bytes of each about, how many checkpoints are kept, how many saves.
KINDS = ((1, 400, 1, 3), (3, 900, 2, 4), (2, 4000, 3, 5), (4, 50, 2, 4))
Row = list[Any]


def drawn(rng: inputs.Rng, blobs: int, size: int, keep: int, saves: int) -> dict[str, Any]:
    steps = [int(each) for each in np.cumsum(rng.integers(1, 60, saves))]
    sizes = [int(size * each) for each in rng.uniform(0.8, 1.2, blobs)]
    words = f"{blobs} blob(s) of about {size} B, saved after steps {', '.join(map(str, steps))}, the last {keep} kept"
    return {"keep": keep, "steps": steps, "sizes": sizes, "seed": int(rng.integers(2**31)), "words": words, "is": {}}


def blobs(case: Case, step: int) -> dict[str, inputs.Array]:
    rng = np.random.default_rng([case["seed"], step])
    return {f"rank {i}": rng.integers(0, 256, size, np.uint8) for i, size in enumerate(case["sizes"])}


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    told = {"keep": case["keep"], "steps": case["steps"]}
    return [("start", told | {f"blobs {step}": blobs(case, step) for step in case["steps"]})]


def holds(case: Case, step: Any, checksum: Any) -> bool:
    """Whether what was loaded is what had been saved after that step."""
    if step not in case["steps"]:
        return False
    told = blobs(case, step)
    whole = b"".join(name.encode() + b"\0" + told[name].tobytes() + b"\0" for name in sorted(told))
    return checksum == zlib.crc32(whole)


def is_right(case: Case, row: Row) -> bool:
    """Whether, after a stop, the newer checkpoint is read or, before its save has returned, the one before it."""
    _, _, is_done, step, checksum, damaged, error = row
    allowed = case["steps"][-1:] if is_done else case["steps"][-2:]
    return not error and not damaged and step in allowed and holds(case, step, checksum)


def wrong_rows(each: Observed, how: str) -> list[Row]:
    return [row for row in each.said[0]["rows"] if row[0] == how and not is_right(each.case, row)]


def find_torn(how: str) -> Callable[[Observed], Finding | None]:
    def find(each: Observed) -> Finding | None:
        for _, stop, is_done, step, _, damaged, error in wrong_rows(each, how):
            told = error or (f"step {step}" if step is not None else "no checkpoint")
            told += f", files called damaged: {damaged[:3]}" * bool(damaged)
            if step in each.case["steps"][-2:] and not damaged:
                told = f"step {step}, not as it was saved" if not is_done else f"step {step}, which is the older one"
            where = "after the save" if is_done is True else f"stopped at operation {stop + 1} of the last save"
            where += ", which is then done once more" * (is_done == "again")
            older, newer = each.case["steps"][-2:]
            due = f"step {newer}" if is_done else f"step {older} or {newer}, whole"
            return Finding(f"{told} {where}", due, each.words)
        return None

    return find


def find_damage(each: Observed) -> Finding | None:
    """That a damaged file is not named, or that something else than a whole checkpoint is read."""
    steps, keep = each.case["steps"][:-1], each.case["keep"]
    kept = steps[-keep:]
    for name, step, checksum, damaged, error in each.said[0]["damaged"]:
        whole = holds(each.case, step, checksum) and step in kept
        if error or (step is not None and not whole) or (damaged not in ([], [name])):
            told = error or f"step {step}, files called damaged: {damaged[:3]}"
            return Finding(f"{told}, when `{name}` was", f"a whole one of the {keep} kept, and ['{name}']", each.words)
        if (step != steps[-1] and damaged != [name]) or (step is None and keep > 1):
            return Finding(f"step {step} and {damaged}, when `{name}` was damaged", f"it named: ['{name}']", each.words)
    return None


def find_room(each: Observed) -> Finding | None:
    """That more checkpoints stay than are kept, or fewer."""
    size, keep = sum(each.case["sizes"]), each.case["keep"]
    for number, seen in enumerate(each.said[0]["sizes"], 1):
        due, told = min(number, keep), f"{seen} B on the disk after {number} save(s)"
        if not due * size <= seen <= due * (size + SLACK_BYTES):
            return Finding(told, f"{due} checkpoint(s) of {size} B", each.words)
    return None


def rows(how: str, is_so: Callable[[Case, Row], bool]) -> Sign:
    return every(lambda each: any(is_so(each.case, row) for row in wrong_rows(each, how)))


TORN: Wrong = {
    "the next save fails": every(lambda each: all(row[2] == "again" for row in wrong_rows(each, "kill"))),
    "load raises": rows("kill", lambda case, row: row[6].startswith("load")),
    "a torn checkpoint is read": rows("kill", lambda case, row: row[3] in case["steps"] and not holds(case, *row[3:5])),
    "a stop is called damage": rows("kill", lambda case, row: bool(row[5])),
    "nothing is left": rows("kill", lambda case, row: row[3] is None),
    "an old one": rows("kill", lambda case, row: row[3] not in case["steps"][-2:] or row[2]),
}
SURE: Wrong = {"not synced before it counts": every(lambda each: not wrong_rows(each, "kill"))}
NAMED: Wrong = {
    "damage is not named": every(lambda each: not wrong_rows(each, "kill") and not any(
        row[1] in each.case["steps"][: -1 - each.case["keep"]] for row in each.said[0]["damaged"]
    ))
}  # fmt: skip
ROOM: Wrong = {
    "older ones stay": every(
        lambda each: each.said[0]["sizes"][-1] >= (each.case["keep"] + 1) * sum(each.case["sizes"])
    ),
    "too few stay": every(lambda each: each.said[0]["sizes"][-1] < each.case["keep"] * sum(each.case["sizes"])),
}

EXERCISE = Exercise(
    id="reliability.3", function="atomic_saves", title="A save that may be stopped anywhere",
    harness="reliability.atomic", draw=inputs.in_order(KINDS, drawn), handed_out=handed_out,
    checks=(
        own_work("atomic_saves"),
        order(3, "whole", "a whole checkpoint, wherever it is killed", find_torn("kill"), wrong=TORN, kind="value"),
        order(2, "sure", "and wherever the power fails", find_torn("power"), wrong=SURE, kind="value"),
        order(2, "damage", "a damaged file is named, and an older one read", find_damage, wrong=NAMED, kind="value"),
        order(1, "room", "as many checkpoints as are kept", find_room, wrong=ROOM, kind="value"),
    ),
)  # fmt: skip
