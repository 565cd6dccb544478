"""Turn the stack that faulthandler wrote in a stuck rank into lines a reader can use, or into its place in words."""

from __future__ import annotations

import linecache
import os
import re
from typing import Any

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_READABLE = re.compile(r'^ *File "(?P<file>.*)", line \d+, in (?P<function>\S+)(?:\n +(?P<code>\S.*))?', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_OURS = tuple(os.path.join(os.path.dirname(os.path.abspath(__file__)), each) for each in ("worker.py", "lasting.py"))
_WRAPPERS = ("c10d_logger.py",)  # torch's own decorators say nothing


def readable(dump: str, sources: dict[str, Any]) -> str:
    """The frames of `dump` from the reader's function inwards, outermost first, each with its line of code.

    Of several threads, the one that called the reader's function.
    `sources` holds the lines of files that exist nowhere, as in `linecache.cache`.
    """
    threads = [
        [match for line in thread.splitlines() if (match := _FRAME.match(line))] for thread in _THREAD.split(dump)
    ]
    main = [frames for frames in threads if any(frame["file"] in _OURS for frame in frames)]
    frames = (main or [frames for frames in threads if frames] or [[]])[-1]
    frames.reverse()
    start = 0
    for number, frame in enumerate(frames):
        if frame["file"] in _OURS:
            start = number + 1
    lines = []
    for frame in frames[start:] or frames:
        if frame["file"].endswith(_WRAPPERS):
            continue
        lines.append(f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}')
        code = _line(frame["file"], int(frame["line"]), sources)
        if code:
            lines.append(f"    {code}")
    return "\n".join(lines)


def place(stack: str) -> str:
    """Where a Python stack was: in which call of torch.distributed, or else at which line, and in which function where
    that line waits for a call that was begun before; "" for no stack."""
    frames = list(_READABLE.finditer(stack))
    for frame in frames:
        if frame["file"].endswith("distributed_c10d.py"):
            return f"in {frame['function']}"
    line = (frames[-1]["code"] or frames[-1]["function"]).strip() if frames else ""
    begun = [each["function"] for each in frames if not each["function"].startswith("wait")]
    return f"at {line}{f', in {begun[-1]}' if 'wait(' in line and begun else ''}" if frames else ""


def _line(file: str, number: int, sources: dict[str, Any]) -> str:
    entry = sources.get(file)
    if entry is not None and len(entry) > 2:
        lines = entry[2]
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return linecache.getline(file, number).strip()
