"""``%%ranks``: a cell of a notebook that runs on ranks which stay."""

from __future__ import annotations

import re
import sys
from typing import Any

from dtlib.theory.units import format_count

from .launcher import show
from .session import Session

_NEW = "These are new: they know nothing of earlier cells."
_session: Session | None = None


def ranks(line: str, cell: str) -> None:
    """``%%ranks 4`` runs the cell on four ranks, which keep their names for the next one.

    Without a number it runs on the ranks that are there, or on four new ones; with another number than theirs these
    end, and new ones start. ``%%ranks 4 timeout_s=5`` gives the cell so many seconds. See `lab.session`.
    """
    match = re.fullmatch(r"\s*(\d+)?\s*(?:timeout_s\s*=\s*(\d+(?:\.\d*)?))?\s*", line)
    if not match:
        raise ValueError(f"%%ranks must be followed by a number, timeout_s=…, or nothing, not by {line.strip()!r}")
    number, seconds = match.groups()
    session = _ready(None if number is None else int(number))
    session.timeout_s = float(seconds or 60)
    written = session.cell(cell)
    if any(text is not None for text in written):
        if len(set(written)) == 1 and len(written) > 1:
            _say(f"[all {len(written)} ranks] {written[0]}")
        else:
            show(["" if text is None else text for text in written])


def _ready(number: int | None) -> Session:
    """The ranks that are there, or as many new ones as are wanted; it is said what becomes of the old ones."""
    global _session
    before = _session
    if before is not None and before.is_open and number in (None, before.world_size):
        return before
    if number is None:
        number = 4 if before is None else before.world_size
    _session = Session(number)
    if before is not None:
        who = format_count(before.world_size, "rank")
        one, all_ = ("ends here", "end here") if before.is_open else ("has ended", "have ended")
        _say(f"The {who} of before {one if before.world_size == 1 else all_}. {_NEW}")
        before.close()
    return _session


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def register() -> None:
    """Make ``%%ranks`` known, if this is a notebook."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        shell.register_magic_function(ranks, "cell", "ranks")
