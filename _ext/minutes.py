"""What `make test` took, part by part, and what it would take with all chapters.

``minutes.py run STEP COMMAND…`` runs a step and notes its seconds; ``minutes.py show`` prints what was noted. A step of
pytest has parts, its files and classes, from pytest's own ``--junitxml``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from dtlib import course

ROOT = Path(__file__).parents[1]
NOTES = ROOT / "_build" / "minutes"
STEMS = frozenset(course.stems())
CHAPTERS = len(course.CHAPTERS + course.TO_COME)
"""How many chapters the course will have."""


def run(step: str, command: list[str]) -> int:
    """Run `command`, note how long it took, and return its exit code."""
    NOTES.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    done = subprocess.run(command)
    (NOTES / f"{step}.json").write_text(json.dumps({"seconds": time.monotonic() - start}))
    return done.returncode


def parts_of(report: Path, seconds: float) -> dict[tuple[str, str | None], float]:
    """Seconds of each part of a step, and the chapter that it belongs to.

    Tests run side by side, so what each says of itself is scaled to what the step took.
    """
    found: dict[tuple[str, str | None], float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        where = case.get("classname", "")
        found[where, chapter_of(f"{where} {case.get('name', '')}")] += float(case.get("time", 0))
    total = sum(found.values()) or 1.0
    return {part: seconds * each / total for part, each in found.items()}


def chapter_of(name: str) -> str | None:
    """The chapter that a file, a class or a test is about: the one whose stem is among its words."""
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}
    return next(iter(sorted(words & STEMS)), None)


def measured() -> dict[tuple[str, str, str | None], float]:
    """Seconds of each part: its step, its name, its chapter. The book is of its chapters, one as much as another."""
    found: dict[tuple[str, str, str | None], float] = {}
    for note in sorted(NOTES.glob("*.json")):
        step, seconds, report = note.stem, json.loads(note.read_text())["seconds"], note.with_suffix(".xml")
        if report.is_file():
            found |= {(step, *part): each for part, each in parts_of(report, seconds).items()}
        elif step == "book":
            found |= {(step, stem, stem): seconds / len(STEMS) for stem in STEMS}
        else:
            found[step, step, None] = seconds
    return found


def show() -> None:
    """Print the steps, the ten slowest parts, and the minutes with all chapters."""
    found = measured()
    steps: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for (step, name, _), seconds in found.items():
        steps[step] += seconds
        names[name if name == step else f"{step}: {name}"] += seconds
    total, chapters = sum(steps.values()), sum(each for (*_, stem), each in found.items() if stem)
    print("\nMinutes:", ", ".join(f"{step} {seconds / 60:.1f}" for step, seconds in steps.items()))
    print("The ten slowest parts:")
    for name, seconds in sorted(names.items(), key=lambda each: -each[1])[:10]:
        print(f"  {seconds:6.1f} s  {name}")
    each = chapters / len(STEMS)
    print(
        f"{total / 60:.1f} min with {len(STEMS)} chapters of {each:.0f} s each; "
        f"with {CHAPTERS} it would be {(total - chapters + CHAPTERS * each) / 60:.1f} min."
    )


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(sys.argv[2], sys.argv[3:]))
    show()
