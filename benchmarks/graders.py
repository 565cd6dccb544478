"""How long `dtlib grade` takes beside nbgrader and otter-grader, on the same answers, one submission after the other.

Each of the two starts a kernel for each notebook, in which `grading.check` judges, without the walls that ours has
around each exercise. They live in an environment of their own, ``DTLIB_RIVALS`` (default ``.rivals``), made by
``python -m venv .rivals && .rivals/bin/pip install -e '.[rivals]'``. A large class over many machines is computed from
recorded costs, not run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks._report import console, print_table, save
from dtlib.grading import all_exercises
from dtlib.grading.classroom.shards import Shard, _cost, deal
from tests.grading.answers import programs
from tests.grading.classroom import hand_in, reference

ROOT = Path(__file__).parents[1]
STEM, NUM_LEARNERS, SEED = "tp", 100, 1
CLASS, SHARDS = 1000, 8
NAMES = [name for name in all_exercises() if name.startswith(f"{STEM}.")]
RIVALS = Path(os.environ.get("DTLIB_RIVALS", ROOT / ".rivals")).resolve()
_OTTER_TEST = """OK_FORMAT = True
test = {{"name": "{0}", "points": {1}, "suites": [{{"cases": [{{"code": ">>> grading.check('{0}').status\\n'pass'\\n",
    "hidden": False, "locked": False}}], "scored": True, "setup": "", "teardown": "", "type": "doctest"}}]}}
"""


def make_class(folder: Path) -> None:
    """Of three learners one is right in everything, one wrong in one exercise, and one has not begun half of them."""
    for number in range(NUM_LEARNERS):
        answers = reference(*NAMES) if number % 3 < 2 else reference(*NAMES[::2])
        if number % 3 == 1:
            name = NAMES[number % len(NAMES)]
            answers[name.replace(".", "-")] = next(each.source for each in programs(name) if each.check)
        hand_in(folder, f"learner-{number}", answers, STEM)


def timed(command: list[str], where: Path) -> float:
    """Seconds that a command takes; ``RuntimeError`` with what it printed where it fails."""
    path = f"{RIVALS / 'bin'}{os.pathsep}{os.environ['PATH']}"  # a kernel is looked for beside the command
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, env={**os.environ, "PATH": path})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - begun


def ours(base: Path) -> float:
    """Seconds of `dtlib grade`, its start included."""
    command = [sys.executable, "-m", "dtlib.cli", "grade", "submissions", "--out", "results", "--jobs", "1"]
    return timed([*command, "--seed", str(SEED), "--quiet"], base)


def nbgrader(base: Path) -> float:
    """Seconds of ``nbgrader autograde``; what it needs before is not counted."""
    course = base / "nbgrader"
    (course / "source" / STEM).mkdir(parents=True)
    shutil.copy(ROOT / "solutions" / f"{STEM}.ipynb", course / "source" / STEM)
    timed([str(RIVALS / "bin" / "nbgrader"), "generate_assignment", STEM], course)
    for folder in sorted((base / "submissions").iterdir()):
        shutil.copytree(folder, course / "submitted" / folder.name / STEM)
    seconds = timed([str(RIVALS / "bin" / "nbgrader"), "autograde", STEM], course)
    if (graded := len(list((course / "autograded").glob(f"*/{STEM}/{STEM}.ipynb")))) != NUM_LEARNERS:
        raise RuntimeError(f"nbgrader graded {graded} of {NUM_LEARNERS}")
    return seconds


def otter(base: Path) -> float:
    """Seconds of ``otter run``, once a submission; the checks stand in its tests instead of in the notebook."""
    place = base / "otter"
    (place / "tests").mkdir(parents=True)
    for name in NAMES:
        test = _OTTER_TEST.format(name, all_exercises()[name].points)
        (place / "tests" / f"{name.replace('.', '_')}.py").write_text(test)
    timed([str(RIVALS / "bin" / "otter"), "generate", "-t", "tests", "-o", "autograder.zip", "--no-config"], place)
    seconds = 0.0
    for folder in sorted((base / "submissions").iterdir()):
        notebook = json.loads((folder / f"{STEM}.ipynb").read_text())
        notebook["cells"] = [cell for cell in notebook["cells"] if not cell["id"].endswith("-check")]
        notebook["metadata"]["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        (place / folder.name).mkdir()
        (place / folder.name / f"{STEM}.ipynb").write_text(json.dumps(notebook))
        command = [str(RIVALS / "bin" / "otter"), "run", "--no-logo", "-a", "../autograder.zip", "-o", "."]
        seconds += timed([*command, f"{STEM}.ipynb"], place / folder.name)
        results = json.loads((place / folder.name / "results.json").read_text())
        if len(results["tests"]) < len(NAMES):
            raise RuntimeError(f"otter ran {len(results['tests'])} of {len(NAMES)} tests")
    return seconds


def spread() -> dict[str, Any]:
    """What `CLASS` complete submissions of the chapter cost in shares: by how much the dearest is over the mean."""
    exercises = [all_exercises()[name] for name in NAMES]
    found: Any = [SimpleNamespace(learner=str(number), is_run=lambda exercise: True) for number in range(CLASS)]
    shares = [deal(found, exercises, Shard(number, SHARDS)) for number in range(1, SHARDS + 1)]
    costs = [sum(_cost(found[0], each) for mine in share.values() for each in mine) for share in shares]
    return {"class": CLASS, "shards": SHARDS, "excess": max(0.0, max(costs) * SHARDS / sum(costs) - 1)}


def main() -> None:
    """Measure, print, save."""
    if not (RIVALS / "bin" / "nbgrader").exists():
        raise RuntimeError(f"nbgrader and otter-grader are not in {RIVALS}: see the head of benchmarks/graders.py")
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        make_class(base / "submissions")
        seconds = {"dtlib": ours(base), "nbgrader": nbgrader(base), "otter-grader": otter(base)}
    best = min(seconds["nbgrader"], seconds["otter-grader"])
    rows = [[name, f"{each:.1f} s", f"{each / best:.2f}"] for name, each in seconds.items()]
    print_table(f"{NUM_LEARNERS} submissions of {STEM}, one at a time", ["grader", "time", "of the better one's"], rows)
    told = spread()
    console.print(
        f"{CLASS} submissions dealt to {SHARDS} machines by recorded cost: "
        f"the dearest share is {told['excess']:.2%} over the mean"
    )
    versions = {name: _version(name) for name in ("nbgrader", "otter-grader")}
    measured = {"stem": STEM, "learners": NUM_LEARNERS, "seconds": seconds, "graders": versions, "spread": told}
    path = save("graders", measured)
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


def _version(name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([RIVALS / "bin" / "python", "-c", code], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
