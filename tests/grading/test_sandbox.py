"""The sandbox runs answers as a notebook does, sees from outside, bounds time and space, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtlib.grading import Result, all_exercises
from dtlib.grading.exercises import plain
from dtlib.grading.sandbox.reports import Start, _late, _told, _written
from dtlib.grading.sandbox.runner import Answer, Cell, Limits, Outcome, Sandbox
from dtlib.grading.sandbox.walls import WALLS

from .answers import FEW, ROOT, answer, cells, open_sandbox, programs
from .engine import on_paper, run

SEED = 20263
SETUP = "import numpy as np\nimport torch\nimport torch.distributed as dist\nfrom dtlib import lab\n"
BUILT_IN = "def tree_broadcast(tensor, src):\n    dist.broadcast(tensor, src)\n"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Limits(patience_seconds=1.0)) as one:
        yield one


def judged(sandbox: Sandbox, exercise: str, source: str) -> tuple[Result, Outcome]:
    """The verdict on a notebook that holds nothing but an answer."""
    found = all_exercises()[exercise]
    own = Answer([Cell("setup", SETUP), Cell(exercise.replace(".", "-"), source)])
    outcome = sandbox.run(found, own, found.cases(SEED))
    return found.judge(outcome.observed), outcome


@pytest.mark.parametrize("exercise", FEW)
def test_reference_passes_blank_is_not_attempted_and_a_mistake_is_named(sandbox: Sandbox, exercise: str):
    found, own = all_exercises()[exercise], exercise.replace(".", "-")
    stem = exercise.partition(".")[0]
    wrong = next(each for each in programs(exercise) if each.check)
    for source, status in ((programs(exercise)[0].source, "pass"), (cells(stem, "exercises")[own], "not attempted")):
        outcome = sandbox.run(found, answer(exercise, source), found.cases(SEED))
        result = found.judge(outcome.observed)
        assert result.status == status, str(result)
        assert result.points == (found.points if status == "pass" else 0)
    outcome = sandbox.run(found, answer(exercise, wrong.source), found.cases(SEED))
    told = {check.name: check for check in found.judge(outcome.observed).checks}[wrong.check]
    assert (told.verdict, told.mistake) == ("fail", wrong.mistake)


def test_what_judges_an_exercise_is_seen_to_be_called_where_no_wall_hides_it():
    source = "from dtlib.grading.exercises.collectives.all_reduce import is_sum\n\n\n"
    source += "def ring_on_paper(full_bytes, n, link_bytes_per_s):\n    is_sum({'op': 'sum'})\n    return 1.0, 1.0\n"
    with open_sandbox() as without_walls:
        result, _ = judged(without_walls, "collectives.2", source)
    assert "a call of dtlib.grading.exercises.collectives.all_reduce.is_sum" in str(result)
    assert result.mistakes == ("library called",)


def test_traffic_and_memory_are_seen_from_outside(sandbox: Sandbox):
    keeps = f"{BUILT_IN}    tree_broadcast.kept = torch.ones(16 * 2**20)\n"
    found = all_exercises()["collectives.4"]
    case = {**found.cases(SEED)[1], "weighed": True}
    own = Answer([Cell("setup", SETUP), Cell("collectives-4", keeps)])
    (observed,) = sandbox.run(found, own, [case]).observed
    assert observed.seen.is_proved
    theory = (observed.case["world_size"] - 1) * 4 * observed.case["num_elements"]
    assert observed.seen.total_bytes == pytest.approx(theory, rel=0.01, abs=4096)
    assert min(observed.seen.peak_at_end) >= 64 * 2**20


def test_a_hang_names_the_line_and_what_was_printed_is_kept(sandbox: Sandbox):
    source = "def tree_broadcast(tensor, src):\n    print('waiting')\n    dist.recv(tensor)\n"
    result, outcome = judged(sandbox, "collectives.4", source)
    assert result.points == 0
    assert "nothing moved any more, and ranks 0, 1 had not returned" in result.message
    assert "line 3: `dist.recv(tensor)`" in result.message
    assert "[rank 0] waiting" in outcome.printed
    kinds = [each.trouble.kind for each in outcome.observed if each.trouble]
    assert kinds.count("hung") == 2
    assert kinds.count("skipped") == len(kinds) - 2


def test_who_does_not_end_hangs_unless_the_machine_let_it_wait():
    source = "import time\ndef tree_broadcast(tensor, src):\n    until = time.monotonic() + 2\n"
    source += "    while time.monotonic() < until:\n        time.sleep(0.01)\n        sum(range(30_000))\n"
    with Sandbox(Limits(wall_seconds=1.0, exercise_seconds=2.0)) as sandbox:
        result, outcome = judged(sandbox, "collectives.4", source)
    assert result.points == 0
    told = [each.trouble for each in outcome.observed if each.trouble]
    for trouble in told:  # which of the two it was, only this machine knows
        assert {"hung": "waited for nobody", "not known": "", "skipped": "earlier cases hung"}[trouble.kind] in str(
            trouble
        )
    assert result.status == ("not known" if told[0].kind == "not known" else "fail")


def test_a_function_that_hangs_in_every_case_is_ended_after_the_second():
    source = "def ring_on_paper(full_bytes, n, link_bytes_per_s):\n    while True:\n        pass\n"
    with Sandbox(Limits(cpu_seconds=0.3)) as sandbox:
        outcome = judged(sandbox, "collectives.2", source)[1]
    kinds = [each.trouble.kind for each in outcome.observed if each.trouble]
    assert kinds == ["hung"] * 2 + ["skipped"] * (len(outcome.observed) - 2)


@pytest.mark.parametrize(
    ("how", "kind", "told"), [("long", "hung", "waited for nobody"), ("stopped", "not known", "7 s for")]
)
def test_who_waited_for_a_processor_is_not_known(how: str, kind: str, told: str):
    start = SimpleNamespace(stacks=[""], facts={"states": ["running"]})
    job = {"seconds": 120.0, "starved_seconds": [7.0], "cpu_seconds": [3.0]}
    trouble = _late(start, how, job, all_exercises()["collectives.2"], [])
    assert trouble.kind == kind
    assert told in trouble.text


def test_threads_may_share_a_sandbox(sandbox: Sandbox):
    source = "def ring_on_paper(full_bytes, n, link_bytes_per_s):\n    print(n)\n    return 0.0, 0.0\n"
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: judged(sandbox, "collectives.2", source)[1], range(12)))
    assert len({outcome.printed for outcome in outcomes}) == 1


def test_walls_that_do_not_exist_and_limits_that_are_none_are_refused():
    with pytest.raises(ValueError, match=f"without must name walls .*{WALLS[0]}"):
        Sandbox(without=["moat"])
    with pytest.raises(ValueError, match="memory_bytes must be positive"):
        Limits(memory_bytes=0)


def test_every_wall_says_whether_it_stands(sandbox: Sandbox):
    assert tuple(sandbox.walls) == WALLS
    with Sandbox(without=["network"]) as other:
        assert other.walls["network"] == "left out"
        assert "network" not in other.standing
        _, outcome = judged(other, "collectives.4", BUILT_IN)
        assert outcome.observed[0].seen.total_bytes
        assert not outcome.observed[0].seen.is_proved


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=400) | st.builds(plain.pack, st.dictionaries(st.text(max_size=14), st.integers() | st.text()))
)
def test_whatever_comes_back_never_raises(packed: bytes):
    for written in (packed, len(packed).to_bytes(8, "big") + packed):
        (said,) = _written(written, ["collectives.ranks"])
        assert said is None or isinstance(said, dict)


@pytest.mark.parametrize("report", [5, None, {}, [], {"kind": [], "type": {}}, {"type": "x", "number": "many"}])
def test_whatever_is_told_of_an_error_never_raises(report: object):
    assert _told({"dtlib-grading-trouble": report}, "rank 0").kind in ("died", "raised")


def test_what_was_printed_shows_its_rank():
    assert Start(outputs=["a\nb\n", ""]).printed() == ["[rank 0] a\n", "[rank 0] b\n"]


def test_a_sandbox_that_is_closed_leaves_no_process_and_loads_no_torch():
    code = (
        "import os, sys\n"
        "from dtlib.grading import all_exercises\n"
        "from dtlib.grading.sandbox.runner import Answer, Cell, Sandbox\n"
        "one = all_exercises()['dp.4']\n"
        "with Sandbox() as sandbox:\n"
        "    own = Answer([Cell('dp-4', 'def token_weighted_mean(g, n): return 1')])\n"
        "    outcome = sandbox.run(one, own, one.cases(1))\n"
        "assert len(outcome.observed) == len(one.cases(1))\n"
        "assert 'torch' not in sys.modules\n"
        "children = open(f'/proc/self/task/{os.getpid()}/children').read()\n"
        "assert children == '', children\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_answer_may_be_as_long_as_it_likes(sandbox: Sandbox):
    long = "# " + "é" * 100_000 + "\n" + BUILT_IN
    result, _ = judged(sandbox, "collectives.4", long)
    assert "torch's broadcast called" in result.message


def test_a_rank_is_told_its_own_numbers_alone(sandbox: Sandbox):
    source = (
        "import gc, sys\n"
        "def tree_broadcast(tensor, src):\n"
        "    frame, seen = sys._getframe(), []\n"
        "    while frame:\n"
        "        seen += [name for name in frame.f_locals if name == 'seed']\n"
        "        frame = frame.f_back\n"
        "    seen += [held for held in gc.get_objects() if isinstance(held, dict) and {'seed', 'src'} <= set(held)]\n"
        "    print(seen)\n"
    )
    _, outcome = judged(sandbox, "collectives.4", source)
    assert outcome.printed.splitlines()[0] == "[rank 0] []"


IN_A_TEMPORARY_FOLDER = """
import dtlib, sys
from dtlib.grading import all_exercises
from dtlib.grading.sandbox.runner import Answer, Cell, Sandbox
source = '''
def ring_on_paper(full_bytes, n, link_bytes_per_s):
    import encodings.idna, os, tempfile, dtlib, dtlib.figures
    course = os.path.dirname(os.path.dirname(dtlib.__file__))
    for folder in (None, "/tmp"):
        with tempfile.NamedTemporaryFile("w", dir=folder) as file:
            file.write("x")
    try:
        open(course + "/dtlib/new.py", "w")
    except OSError as error:
        assert "Read-only" in str(error)
    else:
        raise AssertionError("the library can be written to")
    checks = os.listdir(course + "/dtlib/grading/exercises/dp")
    print(os.listdir(course), checks, os.path.exists(course + "/solutions"))
'''
assert dtlib.__file__.startswith(sys.argv[1])
one = all_exercises()["collectives.2"]
with Sandbox() as sandbox:
    print(*sandbox.standing)
    outcome = sandbox.run(one, Answer([Cell("collectives-2", source)]), one.cases(1)[:1])
print(outcome.printed.strip(), outcome.observed[0].trouble or "")
"""


def test_the_walls_stand_around_a_course_in_the_temporary_folder_too(sandbox: Sandbox, tmp_path: Path):
    shutil.copytree(ROOT / "dtlib", tmp_path / "dtlib", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "solutions").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    arguments = [sys.executable, "-c", IN_A_TEMPORARY_FOLDER, str(tmp_path)]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    standing, seen = done.stdout.splitlines()
    assert standing.split() == sandbox.standing
    if "files" in sandbox.standing:
        assert seen.strip() == "['dtlib'] [] False"


def test_a_harness_that_cannot_be_loaded_is_no_fault_of_a_submission(sandbox: Sandbox):
    exercise, cases = on_paper(1)
    (observed,) = run(sandbox, (replace(exercise, harness="paper.gone"), cases), "def f(x):\n    return 1\n").observed
    assert observed.trouble.kind == "not known"
    assert "'paper.gone'" in observed.trouble.text
