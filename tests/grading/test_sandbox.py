"""The sandbox runs answers as a notebook does, counts from outside, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtlib.grading import Result, all_exercises, evidence, plain
from dtlib.grading.returned import Returned, _observations, _trouble
from dtlib.grading.sandbox import Limits, Outcome, Sandbox
from dtlib.grading.submissions import Cell
from dtlib.grading.walls import WALLS

from .answers import HANGING
from .bank import ROOT, WrongAnswer, cells, wrong_answers

SEED = 20263
EXERCISES = list(all_exercises())
SETUP = "import numpy as np\nimport torch\nimport torch.distributed as dist\nfrom dtlib import lab\n"
BUILT_IN = "def tree_broadcast(tensor, src):\n    dist.broadcast(tensor, src)\n"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as one:
        yield one


def judged(sandbox: Sandbox, exercise: str, source: str, timeout_s: float | None = None) -> tuple[Result, Outcome]:
    """The verdict on a notebook that holds nothing but an answer."""
    found = all_exercises()[exercise]
    found = replace(found, timeout_s=timeout_s or found.timeout_s)
    own = [Cell("setup", SETUP), Cell(exercise.replace(".", "-"), source)]
    outcome = sandbox.run(found, own, found.cases(SEED))
    return found.judge(outcome.runs), outcome


@pytest.mark.parametrize("exercise", EXERCISES)
def test_reference_passes_and_blank_is_not_attempted(sandbox: Sandbox, exercise: str):
    stem = exercise.partition(".")[0]
    for folder, status in (("solutions", "pass"), ("exercises", "not attempted")):
        found = all_exercises()[exercise]
        own = [Cell(name, source) for name, source in cells(stem, folder).items() if not name.endswith("-task")]
        outcome = sandbox.run(found, own, found.cases(SEED))
        result = found.judge(outcome.runs)
        assert result.status == status, str(result)
        assert result.points == (found.points if status == "pass" else 0)


def test_traffic_and_memory_are_measured_from_outside(sandbox: Sandbox):
    keeps = f"{BUILT_IN}    tree_broadcast.kept = torch.ones(16 * 2**20)\n"
    result, outcome = judged(sandbox, "collectives.4", keeps)
    assert result.points == 0
    assert "private loopback" in outcome.metered
    run = outcome.runs[1]
    theory = (run.case["world_size"] - 1) * 4 * run.case["num_elements"]
    assert run.wire_bytes == pytest.approx(theory, rel=0.01, abs=4096)
    assert run.wire_bytes == sum(data["sent_bytes"] for data in run.ranks)
    assert run.peak_resident_bytes is not None
    kept = run.case["world_size"] * 64 * 2**20
    assert kept <= run.peak_resident_bytes <= 3 * kept
    assert outcome.peak_resident_bytes >= run.peak_resident_bytes
    own_and_kept = 4 * run.case["num_elements"] + 64 * 2**20
    assert [data["peak_tensor_bytes"] for data in run.ranks] == [own_and_kept] * run.case["world_size"]


def test_counts_that_a_submission_makes_up_are_not_believed(sandbox: Sandbox):
    forged = (
        "import gc\n"
        "def tree_broadcast(tensor, src):\n"
        "    record = next(each for each in gc.get_objects() if type(each).__name__ == 'Recorder')\n"
        "    dist.group.WORLD._get_backend(torch.device('cpu')).broadcast(tensor, src).wait()\n"
        "    record.events.clear()\n"
        "    if dist.get_rank() == src:\n"
        "        record.mark('send', bytes=4 * tensor.numel(), peer=1 - src)\n"
    )
    result, outcome = judged(sandbox, "collectives.4", forged)
    assert result.points == 0
    assert outcome.runs[0].trouble is not None
    assert outcome.runs[0].trouble.kind == "tampered"


def test_a_hang_names_the_line_and_what_was_printed_is_kept(sandbox: Sandbox):
    source = "def tree_broadcast(tensor, src):\n    print('waiting')\n    dist.recv(tensor, 1 - dist.get_rank())\n"
    result, outcome = judged(sandbox, "collectives.4", source, timeout_s=2)
    assert result.points == 0
    assert "still in the function" in result.message
    assert "line 3: `dist.recv(tensor, 1 - dist.get_rank())`" in result.message
    assert "[rank 0] waiting" in outcome.printed
    assert [run.trouble.kind for run in outcome.runs if run.trouble][1:] == ["skipped"] * (len(outcome.runs) - 1)


def test_the_time_of_an_exercise_is_bounded_as_a_whole():
    with Sandbox(Limits(exercise_seconds=0.5)) as sandbox:
        source = "import time\ndef tree_broadcast(tensor, src):\n    time.sleep(0.4)\n"
        result, outcome = judged(sandbox, "collectives.4", source)
    assert result.points == 0
    assert {run.trouble.kind for run in outcome.runs if run.trouble} <= {"hung", "skipped", "limit"}
    assert outcome.runs[-1].trouble is not None


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
        _, outcome = judged(
            other, "collectives.4", "def tree_broadcast(tensor, src):\n    dist.broadcast(tensor, src)\n"
        )
    assert outcome.runs[0].wire_bytes is not None
    assert "own processes" in outcome.metered


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=400) | st.builds(plain.pack, st.dictionaries(st.text(max_size=14), st.integers() | st.text()))
)
def test_whatever_comes_back_never_raises(packed: bytes):
    (seen,) = _observations(packed, 1)
    assert set(seen) == {evidence.FORGED}


def test_a_sandbox_that_is_closed_leaves_no_process_and_loads_no_torch():
    code = (
        "import os, sys\n"
        "from dtlib.grading import all_exercises\n"
        "from dtlib.grading.sandbox import Sandbox\n"
        "from dtlib.grading.submissions import Cell\n"
        "one = all_exercises()['dp.4']\n"
        "with Sandbox() as sandbox:\n"
        "    outcome = sandbox.run(one, [Cell('dp-4', 'def token_weighted_mean(g, n): pass')], one.cases(1))\n"
        "assert len(outcome.runs) == len(one.cases(1))\n"
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


@pytest.mark.parametrize("wrong", wrong_answers(), ids=lambda wrong: f"{wrong.exercise}: {wrong.title}")
def test_mistakes_are_named_behind_walls_too(sandbox: Sandbox, wrong: WrongAnswer):
    if wrong.mistake in HANGING:
        pytest.skip("hangs for seconds, and is tried in a notebook's way")
    result, outcome = judged(sandbox, wrong.exercise, wrong.source)
    if wrong.mistake == "around the record" and any(run.trouble for run in outcome.runs):
        assert {run.trouble.kind for run in outcome.runs if run.trouble} == {"tampered"}
        assert "called around the functions of torch.distributed" in result.message
    else:
        told = {check.name: check for check in result.checks}[wrong.check]
        assert not told.passed
        assert told.mistake == wrong.mistake, str(result)


def test_a_rank_is_told_its_own_numbers_alone(sandbox: Sandbox):
    source = (
        "import gc, sys\n"
        "def tree_broadcast(tensor, src):\n"
        "    frame, seen = sys._getframe(), []\n"
        "    while frame:\n"
        "        seen += [name for name in frame.f_locals if name == 'seed']\n"
        "        frame = frame.f_back\n"
        "    seen += [held for held in gc.get_objects() if isinstance(held, dict) and {'seed', 'src'} <= set(held)]\n"
        "    packed = [held['cases'] for held in gc.get_objects() if isinstance(held, dict) and 'num_cases' in held]\n"
        "    print(seen, [bool(each.any()) for cases in packed for each in cases if hasattr(each, 'any')])\n"
    )
    _, outcome = judged(sandbox, "collectives.4", source)
    assert outcome.printed.splitlines()[0] == "[rank 0] [] [False, False]"


IN_A_TEMPORARY_FOLDER = """
import dtlib, sys
from dtlib.grading import all_exercises
from dtlib.grading.sandbox import Sandbox
from dtlib.grading.submissions import Cell
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
    print(os.listdir(course), os.listdir(course + "/dtlib/grading/checks"), os.path.exists(course + "/solutions"))
'''
assert dtlib.__file__.startswith(sys.argv[1])
one = all_exercises()["collectives.2"]
with Sandbox() as sandbox:
    print(*sandbox.standing)
    outcome = sandbox.run(one, [Cell("collectives-2", source)], one.cases(1)[:1])
print(outcome.printed.strip(), outcome.runs[0].trouble or "")
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


@pytest.mark.parametrize("tampered", [5, {"a": 1}, None, ["x" * 10**5] * 9])
def test_whatever_stands_for_what_was_replaced_never_raises(tampered: object):
    (seen,) = _observations(plain.pack({"observations": [{}], "tampered": tampered}), 1)
    assert set(seen) == {evidence.FORGED}
    assert len(seen[evidence.FORGED]) < 2000


@pytest.mark.parametrize("report", [b"[" * 200_000, b"5", b"{", b'{"kind": [], "type": {}}', b"\xff"])
def test_whatever_is_told_of_an_error_never_raises(report: bytes):
    facts = {"limit": "", "timed_out": False, "first": 0, "exits": ["told"]}
    trouble = _trouble({"world_size": 1}, Returned(facts, results=[report]))
    assert trouble is not None
    assert trouble.kind in ("died", "raised")
