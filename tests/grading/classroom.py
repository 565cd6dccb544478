"""Submissions for tests of the grader, and a sandbox without walls for answers that the tests themselves wrote."""

from __future__ import annotations

import copy
import json
import threading
from functools import cache
from pathlib import Path

from dtlib.grading.classroom.grader import grade
from dtlib.grading.exercises.plain import simplify
from dtlib.grading.exercises.seen import Observed, Seen, Trouble
from dtlib.grading.sandbox.runner import Outcome
from dtlib.grading.sandbox.walls import WALLS

from .answers import ROOT, cells

SEED = 20261
PAPER = ("collectives.1", "collectives.2", "collectives.3")
HALF = "def ring_on_paper(full_bytes, n, link_bytes_per_s):\n    return 2 * (n - 1) / n * full_bytes, 0.0\n"
NONE = "def ring_on_paper(full_bytes, n, link_bytes_per_s):\n    return None\n"


@cache
def _blank(stem):
    return json.loads((ROOT / "exercises" / f"{stem}.ipynb").read_text(encoding="utf-8"))


def notebook(answers=None, stem="collectives"):
    """A learner's notebook as JSON: the one that was handed out, cells replaced by `answers` (cell id: source)."""
    handed_in = copy.deepcopy(_blank(stem))
    for cell in handed_in["cells"]:
        if cell["id"] in (answers or {}):
            cell["source"] = answers[cell["id"]]
    return json.dumps(handed_in)


def hand_in(folder, learner, answers=None, stem="collectives"):
    path = Path(folder) / learner / f"{stem}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(notebook(answers, stem), encoding="utf-8")
    return path


def reference(*exercises):
    """Answers out of the solutions, by cell id."""
    names = [each.replace(".", "-") for each in exercises]
    return {name: cells(name.partition("-")[0])[name] for name in names}


def troubled(exercise, kind, text="what happened"):
    """An answer that makes the fake sandbox report a trouble in every case."""
    return {exercise.replace(".", "-"): f"# {kind}: {text}"}


def five(folder):
    """A class in `folder`: all right, half of one, a limit, blank, and a notebook that cannot be read.

    All cells are touched, so that everything that can be read is run.
    """
    blank = {name.replace(".", "-"): "raise NotImplementedError  # later" for name in PAPER}
    hand_in(folder, "anna", reference(*PAPER))
    hand_in(folder, "bob", {**blank, **reference("collectives.1"), "collectives-2": HALF})
    hand_in(folder, "cleo", {**blank, **reference("collectives.1"), **troubled("collectives.2", "limit")})
    hand_in(folder, "dan", blank)
    hand_in(folder, "eve").write_text("{not json")
    return folder


class FakeSandbox:
    """Runs answers on paper in this very process. A first line ``# kind: text`` makes trouble of that kind instead.

    ``# fault: text`` makes the sandbox itself raise, ``# print: text`` prints. `began` lists what was run.
    """

    def __init__(self, walls=None):
        self.walls = dict.fromkeys(WALLS, "") if walls is None else walls
        self.began = []
        self.closed = False
        self._lock = threading.Lock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def run(self, exercise, answer, cases, tell=lambda done, words: None):
        with self._lock:
            self.began.append(exercise.id)
        tell(0, "one process")
        source = dict(answer.cells).get(exercise.id.replace(".", "-"), "")
        first = source.partition("\n")[0]
        kind, _, text = first.removeprefix("# ").partition(": ")
        if first.startswith("# ") and kind == "fault":
            raise RuntimeError(text)
        if first.startswith("# ") and kind != "print":
            return outcome(Observed(case, trouble=Trouble(kind, text)) for case in cases)
        if "raise NotImplementedError" in source:
            return outcome(Observed(case, trouble=Trouble("blank", "nothing yet")) for case in cases)
        if exercise.function not in source:
            return outcome(Observed(case, trouble=Trouble("missing", "there is no function")) for case in cases)
        return outcome((self._observe(source, exercise, case) for case in cases), text if kind == "print" else "")

    def _observe(self, source, exercise, case):
        import numpy as np

        space = {"np": np}
        exec(source, space)
        answer = space[exercise.function](*copy.deepcopy(case["arguments"]))
        return Observed(
            case,
            ({"answer": simplify(answer), "library": [], "escaped": [], "built_in": []},),
            Seen(peak_at_end=[2**20]),
        )


def outcome(observed, printed=""):
    return Outcome(list(observed), printed, seconds=0.25, cpu_seconds=0.125, starved_seconds=0.0625)


_LEFT_OUT = ("measured", "seal", "fingerprint")


def without_measured(value):
    """JSON data without anything under a key ``"measured"``, and without checksums, which cover it or the sources."""
    if isinstance(value, dict):
        return {key: without_measured(each) for key, each in value.items() if key not in _LEFT_OUT}
    if isinstance(value, list):
        return [without_measured(each) for each in value]
    return value


def load(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def verdicts(out):
    """Everything in a results folder that must be the same in two runs with one seed."""
    found = {"results": without_measured(load(out / "results.json"))}
    for path in sorted((out / "learners").glob("*.json")):
        found[path.name] = without_measured(load(path))
    found["scores.csv"] = (out / "scores.csv").read_text(encoding="utf-8")
    return found


NAMES = ["anna", "bob", "cleo", "dan", "eve"]


def run(group, out, **options):
    """Grade `group` with a fake sandbox, the exercises on paper and a fixed seed, unless told otherwise."""
    sandbox = options.pop("sandbox", None) or FakeSandbox()
    options.setdefault("exercises", PAPER)
    options.setdefault("seed", SEED)
    return grade(group, out, sandbox=sandbox, **options)


def points(results):
    return {each["learner"]: each["points"] for each in results["learners"]}
