"""What comes back from a case that ran behind walls, read as plain data of bounded size and never trusted."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dtlib.processes.channel import recv_frame

from . import evidence, plain
from .exercise import Case, Run, Trouble
from .runner import hung, told

_MAX_RESULT_BYTES, _MAX_REPORT_BYTES = 32 * 2**20, 2 * 2**20
_MAX_TEXT_BYTES = 2**18
_FRAME = re.compile(r'^  File "(<cell [^"]{0,200}>)", line (\d{1,6}) in (\S{1,200})$', re.MULTILINE)


@dataclass
class Returned:
    """What a case brought back: the warden's facts, and each rank's files as bytes."""

    facts: dict[str, Any]
    results: list[bytes] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)


def receive(control: socket.socket, world_size: int) -> Returned:
    """Read what a warden reports of one case; ``OSError``, ``EOFError`` or ``ValueError`` if it does not."""
    facts = json.loads(recv_frame(control)[0])
    back = Returned(facts)
    if "no_wall" in facts:
        return back
    for _ in range(world_size):
        _, fds = recv_frame(control, max_fds=3)
        try:
            result, output, stack = fds
            back.results.append(_bounded(result, _MAX_RESULT_BYTES))
            back.outputs.append(_bounded(output, _MAX_TEXT_BYTES, cut_it=True).decode("utf-8", "replace"))
            back.stacks.append(_bounded(stack, _MAX_TEXT_BYTES, cut_it=True).decode("utf-8", "replace"))
        finally:
            for fd in fds:
                os.close(fd)
    return back


def _bounded(fd: int, limit: int, *, cut_it: bool = False) -> bytes:
    """What the file holds; nothing, or its beginning, where that is more than `limit` bytes."""
    size = os.fstat(fd).st_size
    if size > limit and not cut_it:
        return b""
    return os.pread(fd, min(size, limit), 0)


def runs_of(group: Sequence[Case], task: Mapping[str, Any], back: Returned) -> list[Run]:
    """A `Run` for each case of `task`: what was observed, or the trouble that there was."""
    trouble = _trouble(task, back)
    if trouble is not None:
        return [Run(case, trouble=trouble) for case in group]
    observed = [_observations(result, len(group)) for result in back.results]
    seen = [
        evidence.run_from(case, [rank[index] for rank in observed], back.facts.get("traffic"))
        for index, case in enumerate(group)
    ]
    return [replace(run, peak_resident_bytes=int(back.facts["peak_bytes"])) for run in seen]


def _observations(packed: bytes, num_cases: int) -> list[Any]:
    """What one rank observed in each case; where what it wrote is of another form, a trouble that says so."""
    try:
        data = plain.unpack(packed, _MAX_RESULT_BYTES, _MAX_REPORT_BYTES)
        observations, tampered = data["observations"], data["tampered"]
        if len(observations) != num_cases or not all(isinstance(each, dict) for each in observations):
            raise ValueError("not one observation for each case")
        names = ", ".join(str(each)[:200] for each in tampered[:5])
    except (ValueError, KeyError, TypeError, AttributeError):
        forged = "what came back is not what the harness writes: the result was written by somebody else"
        return [{evidence.FORGED: forged}] * num_cases
    if names:
        return [{evidence.FORGED: f"the submission replaced the course's instruments: {names}"}] * num_cases
    return list(observations)


def _trouble(task: Mapping[str, Any], back: Returned) -> Trouble | None:
    """Why a case brought no result, in the words of `runner`; None if it did."""
    facts = back.facts
    if "lost" in facts:
        return Trouble("died", str(facts["lost"]))
    if facts["limit"]:
        kind, _, text = facts["limit"].partition(": ")
        return Trouble("tampered" if kind == "tampered" else "limit", f"the submission {text}")
    if facts["timed_out"]:
        late = [rank for rank, state in enumerate(facts["states"]) if state == "running"]
        stacks = {rank: _own_frames(back.stacks[rank], json.loads(task["cells"].tobytes())) for rank in late}
        return hung(stacks, f"<cell {task['cell_id']}>", task["timeout_s"])
    first = facts["first"]
    if first is None:
        return None
    who = f"rank {first}" if task["world_size"] > 1 else "the function"
    if facts["exits"][first] != "told":
        return Trouble("died", f"{who} {facts['exits'][first]}")
    try:
        report = json.loads(back.results[first][:_MAX_TEXT_BYTES])
        kind, text, where = (str(report.get(key) or "")[:600] for key in ("kind", "text", "where"))
        if kind in ("missing", "syntax", "blank") and not report.get("type"):
            return Trouble(kind, text, where)
        if not report.get("type"):
            return Trouble("raised", text, where)
        return told(evidence.cleaned(report), who)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Trouble("died", f"{who} ended in a way that nobody can read")


def _own_frames(stack: str, cells: Sequence[Sequence[str]]) -> str:
    """The frames of the learner's cells in what faulthandler wrote, outermost first, each with its line of code."""
    lines = {f"<cell {name}>": source.splitlines() for name, source in cells}
    shown: list[str] = []
    for file, number, function in _FRAME.findall(stack):
        code = lines.get(file, [])[int(number) - 1 : int(number)]
        shown[:0] = [f'  File "{file}", line {number}, in {function}', *(f"    {line.strip()}" for line in code)]
    return "\n".join(shown)


def marked(outputs: Sequence[str]) -> list[str]:
    """What the ranks printed, each line with the number of its rank where there are several."""
    if len(outputs) == 1:
        return list(outputs)
    lines = []
    for rank, text in enumerate(outputs):
        if text:
            lines += [f"[rank {rank}] {line}\n" for line in text.removesuffix("\n").split("\n")]
    return lines
