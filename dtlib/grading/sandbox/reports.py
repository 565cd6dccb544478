"""What comes back from a start of ranks: the warden's report, and what the ranks wrote, read and never trusted."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtlib.grading.exercises import plain
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.seen import Ask, Case, Header, Observed, Seen, Trouble
from dtlib.processes.channel import recv_frame

from .harness import PAPER, TROUBLE_MARK

_MAX_RESULT_BYTES = 32 * 2**20
_MAX_STACK_BYTES, _MAX_OUTPUT_BYTES = 2**18, 2**14
_SLACK_BYTES = 4096  # what may cross beside gloo's messages
_FRAME = re.compile(r'^  File "([^"\n]{1,200})", line (\d{1,6}) in (\S{1,200})$', re.MULTILINE)

Cells = Sequence[tuple[str, str]]


@dataclass
class Start:
    """What a start of ranks brought back: the warden's facts, and each rank's files. `lost` says why there is none."""

    facts: dict[str, Any] = field(default_factory=dict)
    results: list[bytes] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)
    lost: str = ""

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """What the warden saw of each job that was begun; all but the last are done."""
        return list(self.facts.get("jobs", ()))

    def printed(self) -> list[str]:
        """What the ranks printed, each line with the number of its rank where there are several."""
        if len(self.outputs) == 1:
            return list(self.outputs)
        texts = ((rank, text) for rank, text in enumerate(self.outputs) if text)
        return [f"[rank {rank}] {line}\n" for rank, text in texts for line in text.removesuffix("\n").split("\n")]


def receive(control: socket.socket, world_size: int) -> Start:
    """Read what a warden reports; ``OSError``, ``EOFError`` or ``ValueError`` if it does not."""
    start = Start(json.loads(recv_frame(control)[0]))
    if "no_wall" in start.facts or "broken" in start.facts:
        return start
    for _ in range(world_size):
        _, fds = recv_frame(control, max_fds=3)
        try:
            result, output, stack = fds
            start.results.append(os.pread(result, _MAX_RESULT_BYTES, 0))
            start.outputs.append(os.pread(output, _MAX_OUTPUT_BYTES, 0).decode("utf-8", "replace"))
            start.stacks.append(os.pread(stack, _MAX_STACK_BYTES, 0).decode("utf-8", "replace"))
        finally:
            for fd in fds:
                os.close(fd)
    return start


def read_start(start: Start, jobs: Sequence[tuple[Exercise, Cells, Case]]) -> list[Observed]:
    """What was observed of the first of `jobs`: of as many as were begun, and of one at least."""
    if start.lost or not start.jobs:
        facts = start.facts
        why = start.lost or f"the ranks could not be started ({facts.get('broken') or facts.get('why')})"
        return [Observed(jobs[0][2], trouble=Trouble("not known", why))]
    harnesses = [exercise.harness for (exercise, _, _), _ in zip(jobs, start.jobs, strict=False)]
    written = [_written(result, harnesses) for result in start.results]
    observed = []
    for number, ((exercise, cells, case), job) in enumerate(zip(jobs, start.jobs, strict=False)):
        said = tuple(each[number] for each in written)
        seen = _seen(exercise, case, job, said, is_tapped=start.facts["tapped"])
        trouble = _trouble(start, job, exercise, said, cells)
        observed.append(Observed(case, () if trouble else said, seen, trouble))
    return observed


def _written(result: bytes, harnesses: Sequence[str]) -> list[Any]:
    """What a rank wrote of each job; None where that is not what the harness writes, or more than it ever does."""
    said: list[Any] = []
    for harness in harnesses:
        length = int.from_bytes(result[:8], "big")
        most, most_text = _MAX_RESULT_BYTES, plain.MAX_TEXT_BYTES
        if harness.startswith(PAPER):
            most, most_text = plain.MAX_ANSWER_BYTES, plain.MAX_ANSWER_TEXT_BYTES
        try:
            data = plain.unpack(result[8 : 8 + length], most_text) if length <= most else None
        except ValueError:
            data = None
        said.append(data if isinstance(data, dict) else None)
        result = result[8 + length :]
    return said


def _seen(exercise: Exercise, case: Case, job: Mapping[str, Any], said: Sequence[Any], *, is_tapped: bool) -> Seen:
    traffic = job.get("traffic")
    labels = [[label for label, _ in exercise.handed_out(case, rank)] for rank in range(case.get("world_size", 1))]
    asks = [
        Ask(rank, number, position, why, held, peak, label or labels[rank][number], shown)
        for rank, number, label, position, why, held, peak, shown in job["asks"]
    ]
    return Seen(
        log=[Header(*each) for each in (traffic["log"] if traffic else [] if is_tapped else _told_log(said))],
        asks=asks,
        peak_at_end=[peak for _, peak in job["at_end"]],
        is_proved=traffic is not None,
        seconds=job["seconds"],
        cpu_seconds=max(job["cpu_seconds"], default=0.0),
        starved_seconds=max(job["starved_seconds"], default=0.0),
    )


def _told_log(said: Sequence[Any]) -> list[Any]:
    """What the ranks tell of their traffic, where nobody could look: in a learner's own notebook, say."""
    logs = [data.get("traffic") for data in said if isinstance(data, dict)]
    return [each for log in logs if isinstance(log, list) for each in log if isinstance(each, list) and len(each) == 6]


def _trouble(
    start: Start, job: Mapping[str, Any], exercise: Exercise, said: Sequence[Any], cells: Cells
) -> Trouble | None:
    """Why a case brought no result; None if it did."""
    how, facts = job["how"], start.facts
    n = len(said)
    if how == "limit":
        kind, _, text = facts["limit"].partition(": ")
        return Trouble("tampered" if kind == "tampered" else "limit", f"the submission {text}")
    if how in ("hung", "idle", "busy", "long", "stopped"):
        return _late(start, how, job, exercise, cells)
    if how in ("raised", "died"):
        first = facts["first"] or 0
        who = f"rank {first}" if n > 1 else "the function"
        if facts["exits"][first] != "told":
            return Trouble("died", f"{who} {facts['exits'][first]}")
        return _told(said[first], who)
    if None in said:
        return Trouble("tampered", "what came back is not what the harness writes: somebody else wrote the result")
    for rank, data in enumerate(said):
        if TROUBLE_MARK in data:
            return _told(data, f"rank {rank}" if n > 1 else "the function")
    if not job["whole"]:
        return Trouble("tampered", "the case was ended before the harness was through: somebody else said that it was")
    traffic = job.get("traffic")
    if traffic and traffic["lost"]:
        return Trouble("not known", "the machine was too busy to read all packets")
    if traffic and (not traffic["complete"] or traffic["other_bytes"] > _SLACK_BYTES):
        why = "beside the messages of torch.distributed, or on connections that were closed"
        return Trouble("tampered", f"data crossed the network {why}")
    return None


def _late(start: Start, how: str, job: Mapping[str, Any], exercise: Exercise, cells: Cells) -> Trouble:
    alone = len(start.stacks) == 1
    late = [rank for rank, state in enumerate(start.facts["states"]) if state == "running"]
    sources = {file: source.splitlines() for name, source in cells for file in (f"<cell {name}>", name)}
    lines = {rank: _own_line(start.stacks[rank], f"<cell {exercise.id.replace('.', '-')}>", sources) for rank in late}
    where = "; ".join(line if alone else f"rank {rank} at {line}" for rank, line in lines.items() if line)
    stuck = ", ".join(str(rank) for rank in late if lines[rank]) or ", ".join(map(str, late))
    who = "the function" if alone else f"rank {stuck}" if "," not in stuck else f"ranks {stuck}"
    if how == "hung":
        return Trouble("hung", f"nothing moved any more, and {who} had not returned", where)
    if how == "busy":
        seconds = max(job["cpu_seconds"], default=0.0)
        return Trouble("hung", f"after {seconds:.0f} s of its own computing time {who} had not returned", where)
    if how == "idle":
        return Trouble("hung", f"time went by in which no rank computed, and {who} had not returned", where)
    if how == "long":
        return Trouble("hung", f"after {job['seconds']:.0f} s {who} had not returned, and it waited for nobody", where)
    starved = max(job["starved_seconds"], default=0.0)
    told = f", of which it waited {starved:.0f} s for a processor" if starved > 1 else ""
    return Trouble("not known", f"it was ended after {job['seconds']:.0f} s{told}")


def _own_line(stack: str, file: str, sources: Mapping[str, Sequence[str]]) -> str:
    """The innermost line of the learner's in what faulthandler wrote of a rank, innermost first."""
    frames = _FRAME.findall(stack)
    own = [each for each in frames if each[0] == file] or [each for each in frames if each[0] in sources]
    if not own:
        return ""
    name, number, _ = own[0]
    code = sources.get(name, ())[int(number) - 1 : int(number)]
    source = code[0].strip() if code else ""
    return f"line {number}: `{source}`" if source else f"line {number}"


def _told(data: Any, who: str) -> Trouble:
    """The trouble that a rank tells of itself, as short texts."""
    report = data.get(TROUBLE_MARK) if isinstance(data, dict) else None
    if not isinstance(report, dict):
        return Trouble("died", f"{who} ended in a way that nobody can read")
    names = ("kind", "type", "text", "where", "function", "source")
    kind, error, text, where, function, source = (str(report.get(name) or "")[:600] for name in names)
    if not error:
        return Trouble(kind if kind in ("missing", "syntax", "blank") else "raised", text, where)
    told = f"{who} raised {error}" + (f": {text}" if text else "")
    number = report.get("number")
    line = f"line {number} of `{function}`" if isinstance(number, int) else ""
    line += f": `{source}`" if line and source else ""
    return Trouble("blank" if kind == "blank" else "raised", told[:600], line[:300])
