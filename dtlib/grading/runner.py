"""Runs the cases of an exercise through `lab.run` and turns whatever happens into plain `Run` records."""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import plain
from .drawn import for_rank
from .exercise import Exercise, Run, Trouble
from .harness import TROUBLE_MARK, observe, observe_all

_PRINTED_CHARS = 4000


def run_cases(
    function: Callable[..., Any], exercise: Exercise, cases: Sequence[Mapping[str, Any]], timeout_s: float | None = None
) -> tuple[list[Run], str]:
    """Run `function` on each case in fresh processes: the `Run` of each case, and what was printed (cut).

    Cases without a ``"world_size"`` share one process. After a case that hangs, and once a function turns out to be
    blank, the remaining cases are skipped.
    """
    printed = io.StringIO()
    limit = timeout_s or exercise.timeout_s
    with contextlib.redirect_stdout(printed):
        if any("world_size" in case for case in cases):
            runs = list(_one_by_one(function, exercise, cases, limit))
        else:
            runs = _together(function, exercise, cases, limit)
    return runs, cut(printed.getvalue())


def cut(text: str) -> str:
    """What was printed, its end cut off where it is long."""
    return text if len(text) <= _PRINTED_CHARS else text[:_PRINTED_CHARS] + "\n… (the rest is not shown)"


def _one_by_one(
    function: Callable[..., Any], exercise: Exercise, cases: Sequence[Mapping[str, Any]], timeout_s: float
) -> Iterator[Run]:
    ended_by: Trouble | None = None
    for case in cases:
        if ended_by is None:
            arguments = (function, exercise.harness, [for_rank(case, rank) for rank in range(case["world_size"])])
            packed = _launch(observe, case["world_size"], arguments, timeout_s)
            run = Run(case, trouble=packed) if isinstance(packed, Trouble) else _unpack(case, packed)
            if run.trouble is not None and run.trouble.kind in ("hung", "blank", "not sent"):
                ended_by = run.trouble
            yield run
        elif ended_by.kind == "hung":
            yield Run(case, trouble=Trouble("skipped", "not run, because an earlier case hung"))
        else:
            yield Run(case, trouble=ended_by)


def _together(
    function: Callable[..., Any], exercise: Exercise, cases: Sequence[Mapping[str, Any]], timeout_s: float
) -> list[Run]:
    packed = _launch(observe_all, 1, (function, exercise.harness, [dict(case) for case in cases]), timeout_s)
    if isinstance(packed, Trouble):
        return [Run(case, trouble=packed) for case in cases]
    return [_unpack(case, [each]) for case, each in zip(cases, packed[0], strict=True)]


def _launch(
    target: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float
) -> list[Any] | Trouble:
    from dtlib import lab

    try:
        return lab.run(target, world_size, args=args, timeout_s=timeout_s)
    except lab.RankTimeout as error:
        file = getattr(getattr(args[0], "__code__", None), "co_filename", "")
        return hung(error.stacks, file, timeout_s)
    except lab.RankError as error:
        return _raised(error, world_size)
    except Exception as error:
        text = f"the function could not be run in a process of its own: {type(error).__name__}: {error}"
        return Trouble("not sent", text[:500])


def _unpack(case: Mapping[str, Any], packed: Sequence[bytes]) -> Run:
    ranks = [plain.unpack(each) for each in packed]
    if TROUBLE_MARK in ranks[0]:
        return Run(case, trouble=told(ranks[0][TROUBLE_MARK], "the function"))
    metered = [data.pop("wire_bytes") for data in ranks if "wire_bytes" in data]
    return Run(case, tuple(ranks), wire_bytes=metered[0] if metered else None)


def _raised(error: Any, world_size: int) -> Trouble:
    found = re.search(re.escape(TROUBLE_MARK) + r"(\{.*\})", str(error))
    if found is None:  # exited, killed, or ended in a way that no exception shows
        return Trouble("died", str(error).splitlines()[0][:300])
    return told(json.loads(found.group(1)), f"rank {error.rank}" if world_size > 1 else "the function")


def told(report: Mapping[str, Any], who: str) -> Trouble:
    """The trouble that `harness.describe_error` reported of `who`."""
    text = f"{who} raised {report['type']}" + (f": {report['text']}" if report["text"] else "")
    return Trouble("blank" if report["kind"] == "blank" else "raised", text[:600], _line(report)[:300])


def _line(report: Mapping[str, Any]) -> str:
    if report.get("number") is None:
        return ""
    source = report["source"] or linecache.getline(report["file"] or "", report["number"]).strip()
    return f"line {report['number']} of `{report['function']}`" + (f": `{source}`" if source else "")


def hung(stacks: Mapping[int, str], file: str, timeout_s: float) -> Trouble:
    """The trouble of ranks that did not return in time: each one's Python stack tells the line of `file` it was in."""
    lines = {rank: _own_line(stack, file) for rank, stack in sorted(stacks.items())}
    where = "; ".join(f"rank {rank} at {line}" for rank, line in lines.items() if line)
    stuck = [rank for rank, line in lines.items() if line] or sorted(stacks)
    name = f"rank {stuck[0]} was" if len(stuck) == 1 else f"ranks {', '.join(map(str, stuck))} were"
    return Trouble("hung", f"after {timeout_s:g} s {name} still in the function", where)


def _own_line(stack: str, file: str) -> str:
    """The innermost line of the learner's `file` in a stack as `lab.RankTimeout` shows it."""
    lines = stack.splitlines()
    own = [index for index, line in enumerate(lines) if line.strip().startswith(f'File "{file}"')]
    if not own:
        return ""
    source = lines[own[-1] + 1].strip() if own[-1] + 1 < len(lines) else ""
    number = re.search(r"line (\d+)", lines[own[-1]])
    said = f"line {number[1]}" if number else "an unknown line"
    return f"{said}: `{source}`" if source and not source.startswith("File ") else said
