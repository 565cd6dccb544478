"""What `dtlib doctor` says about grading: which walls around a submission this machine grants."""

from __future__ import annotations

from dtlib.lab.doctor import Finding

from .walls import MEANING, WALLS


def examine_walls() -> tuple[Finding, ...]:
    """Raise each wall once and say which stand. Grading works without some, and then promises less."""
    from .sandbox import Sandbox

    try:
        with Sandbox() as sandbox:
            walls = sandbox.walls
    except Exception as error:
        return (Finding("grading", False, "submissions cannot be run here", f"{type(error).__name__}: {error}"),)
    return tuple(
        Finding(f"wall: {wall}", not walls[wall], MEANING[wall] if not walls[wall] else "does not stand", walls[wall])
        for wall in WALLS
    )
