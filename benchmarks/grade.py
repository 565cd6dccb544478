"""How long `dtlib grade` takes for a class of a hundred, how much memory it holds, and what a kill half-way costs.

Each learner hands in the notebook of one chapter. Of a learner's six exercises most are right, some are wrong in a way
that stands in the bank of wrong answers (deadlocks among them, which cost their whole time limit), some are blank.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._report import console, print_table, save
from tests.grading.answers import programs
from tests.grading.classroom import hand_in, reference

ROOT = Path(__file__).parents[1]
STEM, NUM_LEARNERS, JOBS, SEED = "collectives", 100, 2, 1
EARLY = 10  # learners after whom the memory is looked at for the first time
TARGET_SECONDS, TARGET_GROWTH = 600, 1.1

# The grader in a process of its own, which tells its peak memory after `EARLY` learners and at the end.
GRADER = """
import json, sys
from pathlib import Path
from dtlib.grading.classroom.grader import grade

def peak():  # getrusage includes the memory of the parent
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

early, learners = [], []

def look(event):
    if event.learner:
        learners.append(event.learner)
        if len(learners) == int(sys.argv[3]):
            early.append(peak())

results = grade(Path(sys.argv[1]), Path(sys.argv[2]), seed=int(sys.argv[4]), jobs=int(sys.argv[5]), progress=look)
measured = results["measured"]
print(json.dumps({"early": early, "end": peak(), "seconds": measured["seconds"], "kept": measured["kept"],
                  "faults": results["faults"], "torch": "torch" in sys.modules}))
"""


def make_class(folder: Path) -> None:
    """A class in which no two notebooks are alike in all six exercises more often than chance has it."""
    names = sorted(name for name in reference_names())
    wrong = {name: [program.source for program in programs(name) if program.check] for name in names}
    for learner in range(NUM_LEARNERS):
        answers = reference(*names)
        for place, name in enumerate(names):
            lot = (7 * learner + 3 * place) % 20  # 13 of 20 right, 5 wrong, 2 blank
            if lot >= 18:
                del answers[name.replace(".", "-")]
            elif lot >= 13:
                answers[name.replace(".", "-")] = wrong[name][learner % len(wrong[name])]
        hand_in(folder, f"learner-{learner:03}", answers, STEM)


def reference_names() -> list[str]:
    """The exercises of the chapter."""
    from dtlib.grading import all_exercises

    return [name for name in all_exercises() if name.startswith(f"{STEM}.")]


def start(handed_in: Path, out: Path) -> subprocess.Popen[str]:
    """A grader in a process of its own."""
    command = [sys.executable, "-c", GRADER, *map(str, (handed_in, out, EARLY, SEED, JOBS))]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the grader told at its end."""
    output, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the grader ended with code {process.returncode}")
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    if told["faults"] or told["torch"]:
        raise RuntimeError(f"the grader failed: {told}")
    return told


def kill_half_way(handed_in: Path, out: Path) -> int:
    """Kill a grader when half of the class is graded; how many learners were recorded by then."""
    process = start(handed_in, out)
    while (done := len(list((out / "learners").glob("*.json")))) < NUM_LEARNERS // 2:
        if process.poll() is not None:
            raise RuntimeError("the grader ended before it could be killed")
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return done


def scores(out: Path) -> list[list[str]]:
    """Everybody's points."""
    with (out / "scores.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def main() -> None:
    """Measure, print, save."""
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        make_class(base / "submissions")
        whole = finish(start(base / "submissions", base / "whole"))
        recorded = kill_half_way(base / "submissions", base / "killed")
        resumed = finish(start(base / "submissions", base / "killed"))
        again = finish(start(base / "submissions", base / "killed"))
        first, second = scores(base / "whole"), scores(base / "killed")
    early = whole["early"][0]
    rows = [
        [
            "whole class",
            f"{whole['seconds']:.0f} s",
            "0",
            f"{early / 2**20:.1f} MiB",
            f"{whole['end'] / 2**20:.1f} MiB",
        ],
        [
            "resumed after a kill",
            f"{resumed['seconds']:.0f} s",
            f"{resumed['kept']}",
            "",
            f"{resumed['end'] / 2**20:.1f} MiB",
        ],
        ["nothing changed", f"{again['seconds']:.1f} s", f"{again['kept']}", "", f"{again['end'] / 2**20:.1f} MiB"],
    ]
    columns = ["run", "time", "kept", f"peak after {EARLY}", "peak at the end"]
    print_table(f"{NUM_LEARNERS} submissions of {STEM}, --jobs {JOBS}; memory of the grader alone", columns, rows)
    growth = whole["end"] / early
    differing = [one[0] for one, two in zip(first, second, strict=True) if one != two]
    for what, met in (
        (f"{whole['seconds']:.0f} s, target under {TARGET_SECONDS} s", whole["seconds"] < TARGET_SECONDS),
        (f"memory grew by a factor {growth:.3f}, target at most {TARGET_GROWTH}", growth <= TARGET_GROWTH),
        (f"{resumed['kept']} of {recorded} learners kept after the kill", resumed["kept"] >= recorded),
        ("the same scores after a kill half-way" + "".join(f", but not {name}" for name in differing), not differing),
    ):
        console.print(f"{'✓' if met else '✗ missed:'} {what}")
    measured = {
        "learners": NUM_LEARNERS,
        "jobs": JOBS,
        "seconds": whole["seconds"],
        "resumed_seconds": resumed["seconds"],
        "unchanged_seconds": again["seconds"],
        "kept_after_kill": resumed["kept"],
        "peak_bytes_early": early,
        "peak_bytes_end": whole["end"],
        "same_scores_after_kill": not differing,
    }
    path = save("grade", measured)
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
