"""Runs the cases of an exercise through `lab.run` and turns whatever happens into plain `Run` records."""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import plain
from .exercise import Exercise, Run, Trouble
from .harness import TROUBLE_MARK, observe

_PRINTED_CHARS = 4000


def run_cases(
    function: Callable[..., Any], exercise: Exercise, cases: Sequence[Mapping[str, Any]], timeout_s: float | None = None
) -> tuple[list[Run], str]:
    """Run `function` on each case in fresh processes: the `Run` of each case, and what was printed (cut).

    After a case that hangs, or a function that is still blank, the remaining cases are skipped.
    """
    runs: list[Run] = []
    printed = io.StringIO()
    ended_by: Trouble | None = None
    for case in cases:
        if ended_by is not None:
            text = "not run, because an earlier case hung" if ended_by.kind == "hung" else ended_by.text
            runs.append(Run(case, trouble=Trouble("skipped" if ended_by.kind == "hung" else ended_by.kind, text)))
            continue
        with contextlib.redirect_stdout(printed):
            runs.append(_run_case(function, exercise, case, timeout_s or exercise.timeout_s))
        trouble = runs[-1].trouble
        if trouble is not None and trouble.kind in ("hung", "blank", "not sent"):
            ended_by = trouble
    text = printed.getvalue()
    return runs, text if len(text) <= _PRINTED_CHARS else text[:_PRINTED_CHARS] + "\n… (the rest is not shown)"


def _run_case(function: Callable[..., Any], exercise: Exercise, case: Mapping[str, Any], timeout_s: float) -> Run:
    from dtlib import lab

    try:
        packed = lab.run(
            observe, case.get("world_size", 1), args=(function, exercise.harness, dict(case)), timeout_s=timeout_s
        )
        ranks = tuple(plain.unpack(each) for each in packed)
    except lab.RankTimeout as error:
        return Run(case, trouble=_hung(error.stacks, function, timeout_s))
    except lab.RankError as error:
        return Run(case, trouble=_raised(error, case))
    except Exception as error:
        text = f"the function could not be run in a process of its own: {type(error).__name__}: {error}"
        return Run(case, trouble=Trouble("not sent", text[:500]))
    wire_bytes = ranks[0].pop("wire_bytes", None) if isinstance(ranks[0], dict) else None
    return Run(case, ranks, wire_bytes=wire_bytes)


def _raised(error: Any, case: Mapping[str, Any]) -> Trouble:
    found = re.search(re.escape(TROUBLE_MARK) + r"(\{.*\})", str(error))
    who = f"rank {error.rank} " if case.get("world_size", 1) > 1 else "the function "
    if found is None:  # exited, killed, or ended in a way that no exception shows
        return Trouble("died", str(error).splitlines()[0][:300])
    told = json.loads(found.group(1))
    text = f"{who}raised {told['type']}: {told['text']}" if told["text"] else f"{who}raised {told['type']}"
    return Trouble("blank" if told["kind"] == "blank" else "raised", text, _line(told))


def _line(told: Mapping[str, Any]) -> str:
    if told["number"] is None:
        return ""
    source = told["source"] or linecache.getline(told["file"] or "", told["number"]).strip()
    return f"line {told['number']} of `{told['function']}`" + (f": `{source}`" if source else "")


def _hung(stacks: Mapping[int, str], function: Callable[..., Any], timeout_s: float) -> Trouble:
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
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
