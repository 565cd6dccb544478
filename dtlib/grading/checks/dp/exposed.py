"""dp.3: what overlap cannot hide, on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtlib.grading import plain
from dtlib.grading.checks.on_paper import mistake, own_formula
from dtlib.grading.compare import answer, compare
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case
from dtlib.theory import units


def _draw_overlap(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for kind in ("slow link", "queue", "fast link", "hidden", "mixed"):
        buckets = int(rng.integers(3, 7))
        ready = np.cumsum(rng.integers(5, 20, buckets)) * units.ms
        backward = float(ready[-1])
        scale = {"slow link": (20, 40), "fast link": (1, 5), "hidden": (1, 5), "mixed": (1, 40), "queue": (1, 10)}[kind]
        sync = rng.integers(*scale, buckets) * units.ms
        if kind == "hidden":
            backward += float(sync[-1]) + 1 * units.ms
        if kind == "queue":  # an early bucket is still under way when the last one is ready, and would be done after it
            sync[0] = ready[-1] - ready[0] + sync[-1] + 5 * units.ms
        arguments = [ready.tolist(), sync.tolist(), backward]
        told = ", ".join(f"{1000 * r:g}+{1000 * s:g}" for r, s in zip(ready, sync, strict=True))
        cases.append(
            {
                "arguments": arguments,
                "words": f"{kind}: buckets ready+sync in ms {told}; backward {1000 * backward:g} ms",
            }
        )
    return cases


def _exposed(case: Case) -> float:
    ready, sync, backward = case["arguments"]
    free = 0.0
    for start, length in zip(ready, sync, strict=True):
        free = max(free, start) + length
    return max(0.0, free - backward)


def _is_hidden(case: Case) -> bool:
    return _exposed(case) == 0


def _inspect_exposed(run: Run) -> Finding | None:
    return compare(answer(run), _exposed(run.case), describe_case(run.case), rtol=1e-6, atol=1e-9)


def _exposed_gives(wrong: Any) -> Any:
    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            plain.is_number(answer(run)) and abs(answer(run) - wrong(*run.case["arguments"])) < 1e-9
            for run in (*back, *passing)
        )

    return fits


def _finished(ready: Any, sync: Any, backward: float) -> float:
    return _exposed({"arguments": [ready, sync, 0.0]})


_OVERLAP_MISTAKES = (
    mistake(
        "no overlap",
        _exposed_gives(lambda ready, sync, backward: sum(sync)),
        "This is all of the communication. What was the link doing while backward was still computing?",
    ),
    mistake(
        "the link never waits",
        _exposed_gives(lambda ready, sync, backward: max(0.0, ready[0] + sum(sync) - backward)),
        "From the first bucket on, your link is busy without a break. What does it do when a bucket has arrived and "
        "the next one is not ready?",
    ),
    mistake(
        "perfect overlap",
        _exposed_gives(lambda ready, sync, backward: max(0.0, sum(sync) - backward)),
        "This lets communication start with the first second of backward. When is the first bucket ready?",
    ),
    mistake(
        "a link for each bucket",
        _exposed_gives(
            lambda ready, sync, backward: max(0.0, max(r + s for r, s in zip(ready, sync, strict=True)) - backward)
        ),
        "Here every bucket leaves when it is ready, as if it had a link of its own. What if the one before is still "
        "on its way?",
    ),
    mistake(
        "last bucket only",
        _exposed_gives(lambda ready, sync, backward: sync[-1]),
        "The last bucket is always exposed when it is ready last, but it need not be alone: is the link free at that "
        "moment?",
    ),
    mistake(
        "sync starts after backward",
        _exposed_gives(lambda ready, sync, backward: backward + sum(sync)),
        "This is a whole step without overlap. The task asks for the time that the sync adds to backward when they "
        "overlap.",
    ),
    mistake(
        "step time for exposed time",
        _exposed_gives(_finished),
        "This is when the last bucket arrives, counted from the start of backward. How much of that would have "
        "passed anyway?",
    ),
    mistake(
        "negative time",
        _exposed_gives(lambda ready, sync, backward: _finished(ready, sync, backward) - backward),
        "Less than nothing is exposed. What is the step time when the link is done before backward is?",
    ),
)

EXPOSED = Exercise(
    id="dp.3",
    function="exposed_seconds",
    title="What overlap cannot hide",
    harness="paper.call",
    draw=_draw_overlap,
    checks=(
        own_formula("exposed_seconds"),
        Check(
            "exposed",
            "overlap",
            4,
            "the exposed time where the link is the last to finish",
            _inspect_exposed,
            _OVERLAP_MISTAKES,
            applies=lambda case: not _is_hidden(case),
        ),
        Check(
            "hidden",
            "overlap",
            1,
            "nothing exposed where backward is the last to finish",
            _inspect_exposed,
            _OVERLAP_MISTAKES,
            applies=_is_hidden,
        ),
    ),
)
