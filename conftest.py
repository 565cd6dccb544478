"""What nbval does not look at: the check cells of solutions pass, and those of exercises find them not attempted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Tests run side by side, one process a core. Threads of torch wait for each other in a loop: where there are more of
# them than cores, a test takes eight times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Look at what a check cell shows once nbval has run it."""
    yield
    cell: Any = getattr(item, "cell", None)
    folder = item.path.parent.name
    if cell is None or folder not in ("exercises", "solutions") or not cell.get("id", "").endswith("-check"):
        return
    from dtlib.grading import all_exercises

    shown = item.test_outputs[-1]  # type: ignore[attr-defined]
    points = all_exercises()[cell["id"].removesuffix("-check").replace("-", ".")].points
    wanted = f"pass · {points} of {points} points" if folder == "solutions" else f"not attempted · 0 of {points} points"
    text = shown["data"]["text/plain"]
    assert text.splitlines()[0].endswith(wanted), text
    assert "text/html" in shown["data"]
