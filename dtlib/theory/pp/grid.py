"""A schedule as a time grid: in text, and as bars for a figure."""

from __future__ import annotations

from dtlib.theory.valid import whole

from .schedule import Schedule
from .simulate import Timetable, simulate

_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def text_grid(schedule: Schedule, *, slot: int = 3) -> str:
    """The schedule as lines of text, one a rank, a column of `slot` characters for each unit of time.

    A forward pass, an input's and a weights' gradient take a unit of time each, and B two; with v chunks all of this
    is a v-th of a rank's, and a unit still a column. ``F3`` is micro-batch 3, ``F3'`` in the rank's second chunk, and
    dots are idle time.
    """
    whole("slot", slot, 2)
    v = schedule.chunks
    table = simulate(schedule, v, v, v)
    lines = []
    for rank, own in enumerate(schedule.actions):
        line = ""
        for action, start, end in zip(own, table.starts[rank], table.ends[rank], strict=True):
            if action.of:
                continue
            line = line.ljust(round(start) * slot, ".")
            mark = f"{action.kind}{action.micro_batch}" + "'" * _chunk(schedule, action.stage)
            line += mark.ljust(round(end - start) * slot)
        lines.append(f"rank {rank} |{line.ljust(round(table.span) * slot, '.')}|")
    return "\n".join(lines)


def bars(timetable: Timetable) -> dict[str, list[tuple[str, float, float, str, str]]]:
    """What each rank does, for `figures.timeline`: kind, start, end, lane, and the micro-batch's number as text.

    A second chunk's number has a prime. What takes no time is left out.
    """
    schedule = timetable.schedule
    return {
        f"rank {rank}": [
            (_NAMES[action.kind], start, end, "", f"{action.micro_batch}" + "′" * _chunk(schedule, action.stage))
            for action, start, end in zip(own, timetable.starts[rank], timetable.ends[rank], strict=True)
            if end > start
        ]
        for rank, own in enumerate(schedule.actions)
    }


def _chunk(schedule: Schedule, stage: int) -> int:
    return schedule.placed[:stage].count(schedule.placed[stage])
