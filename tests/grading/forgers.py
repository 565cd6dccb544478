"""Three forgers: submissions that do no work, and have their process say what suits them.

Each is a cell that puts itself in the harness's place, which no wall prevents: what a rank says of itself is the
learner's to write. `record` takes down what the reference says and asks for; a forger gives that back.
"""

from __future__ import annotations

from pathlib import Path

from dtlib.grading.exercises import plain
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.result import Result
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.sandbox.runner import Answer, Cell, Sandbox

from .answers import SEED, reference, run_jobs, try_all

FORGERS = {
    "oracle": "knows every right value, sends nothing, keeps everything",
    "mirror": "makes every two of the reported numbers agree, and holds just what the reference holds",
    "silent": "reports nothing beyond what the function returns",
}
#: What a function gives back, by the name under which its harness says it.
RETURNED = ("answer", "returned", "shard", "shards", "rebuilt", "output")
_CELL = '''
import os
import sys
from dtlib.grading.exercises import plain

inmate = next(module for name, module in sys.modules.items() if name.endswith("walls.inmate"))
recorded = plain.unpack(open(PATH, "rb").read())


def all_alike(value, number):
    """The same form, and the same number everywhere."""
    if isinstance(value, dict):
        return {key: all_alike(each, number) for key, each in value.items()}
    if isinstance(value, list):
        return [all_alike(each, number) for each in value]
    return value * 0 + number if not isinstance(value, (bool, str, type(None))) else value


def forged(function, desk):
    mine = recorded[int(os.environ["RANK"])]
    ballast = kept = b""
    for number, label, held_bytes in mine["asks"]:
        if KIND == "mirror":
            ballast = b"1" * held_bytes
        desk.ask("" if number >= 0 else label)
        ballast, kept = b"", kept or b"1" * BALLAST
    said = mine["said"]
    if KIND == "mirror":
        said = all_alike(said, 3)
        if isinstance(said.get("answer"), str):  # a name: another one
            said["answer"] = "3"
        elif isinstance(said.get("answer"), list):
            said["answer"] = ["3" if isinstance(each, str) else each for each in said["answer"]]
        elif isinstance(said.get("answer"), dict):
            said["answer"] = {key: "3" if isinstance(each, str) else each for key, each in said["answer"].items()}
    elif KIND == "silent":
        said = {key: value if key in RETURNED else all_alike(value, 0) for key, value in said.items()}
    return said


inmate.resolve = lambda name: forged


def FUNCTION(*arguments):
    return arguments
'''
_BALLAST_BYTES = 640 * 2**20  # of all ranks: more than any exercise lets them hold, and less than the walls do


def record(folder: Path, case: Case, observed: Observed) -> Path:
    """What each rank of the reference said, and which pieces it asked for, in a file."""
    ranks = [
        {
            "said": said,
            "asks": [
                [each.number, each.label, max(0, each.held_bytes)] for each in observed.seen.asks if each.rank == rank
            ],
        }
        for rank, said in enumerate(observed.said)
    ]
    path = folder / f"{len(list(folder.iterdir()))}.dtlib"
    path.write_bytes(plain.pack(ranks))
    return path


def forged(exercise: Exercise, kind: str, path: Path, case: Case) -> Answer:
    """A submission of one of `FORGERS` for one case."""
    ballast = _BALLAST_BYTES // case.get("world_size", 1) if kind == "oracle" and case.get("weighed") else 0
    facts = f"PATH, KIND, BALLAST, RETURNED = {str(path)!r}, {kind!r}, {ballast}, {RETURNED!r}\n"
    source = facts + _CELL.replace("FUNCTION", exercise.function)
    return Answer([Cell(exercise.id.replace(".", "-"), source)])


def tried(sandbox: Sandbox, exercise: Exercise, folder: Path) -> dict[str, Result]:
    """The verdict on each forger who knows what the reference said."""
    honest = reference(exercise.id)
    try_all(sandbox, [honest])
    heard = [(record(folder, case, honest.done[index]), case) for index, case in enumerate(honest.cases)]
    seen = run_jobs(sandbox, [(exercise, forged(exercise, kind, *each), each[1]) for kind in FORGERS for each in heard])
    n = len(heard)
    return {kind: exercise.judge(seen[place * n : (place + 1) * n]) for place, kind in enumerate(FORGERS)}


# Whoever asks the desk for every layer's key once more in backward has passed through every layer once more.
ASKED = {"activations.5": {"recompute"}}


def earned(result: Result) -> set[str]:
    """The checks that earned points."""
    return {each.name for each in result.checks if each.points}


def known(exercise: Exercise) -> set[str]:
    """The checks that whoever knows every right value may pass: values of exercises that ask for nothing but values."""
    if "world_size" in exercise.cases(SEED)[0]:
        return set()  # ranks that have not heard of each other earn nothing, whatever they know
    values = {check.name for check in exercise.checks if check.kind in ("value", "gradient")}
    return values | ASKED.get(exercise.id, set())


def refuse(sandbox: Sandbox, exercise: Exercise, folder: Path) -> None:
    """Assert that no forger earns more than its work."""
    results = tried(sandbox, exercise, folder)
    assert not earned(results["mirror"]), results["mirror"]
    if exercise.harness.startswith("paper."):
        return  # nothing is asked for but the answer: whoever knows it has earned it
    told = {check.name for check in exercise.checks if check.is_told}
    assert earned(results["oracle"]) <= known(exercise), results["oracle"]
    assert earned(results["silent"]) <= known(exercise) - told, results["silent"]
