"""The warden hands out in order, tells stuck from starved from slow, and weighs from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dtlib.grading.sandbox.runner import Sandbox
from dtlib.grading.sandbox.walls.limits import Limits

from .engine import on_paper, on_ranks, run, troubles

MiB = 2**20


@pytest.fixture(scope="module")
def sandbox(lacking: Callable[[str], None]) -> Iterator[Sandbox]:
    with Sandbox(Limits(cpu_seconds=2.0, wall_seconds=20.0, patience_seconds=0.5)) as behind_walls:
        if any(behind_walls.walls.values()):
            lacking(f"walls are missing: {behind_walls.walls}")
        yield behind_walls


# Who is stuck


def test_a_rank_that_is_held_back_shows_what_the_others_have_begun(sandbox: Sandbox):
    source = """
def f(tensor):
    n, rank = dist.get_world_size(), dist.get_rank()
    arriving = torch.empty_like(tensor)
    if rank % 2:
        dist.recv(arriving, (rank - 1) % n)
        dist.send(tensor, (rank + 1) % n)
    else:
        dist.send(tensor, (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
"""
    made = on_ranks(4, holds=[(0, 0, -1, 0)])
    (observed,) = run(sandbox, made, source).observed
    (held,) = [each for each in observed.seen.asks if each.why == "quiet"]
    assert held.rank == 0
    begun = {rank: {each.kind for each in observed.seen.begun_by(rank, held.position)} for rank in (1, 2, 3)}
    assert begun == {1: {"receive"}, 2: {"send", "receive"}, 3: {"receive", "send"}}


def test_a_deadlock_is_told_with_the_line_where_each_rank_stands(sandbox: Sandbox):
    source = "def f(tensor):\n    dist.recv(tensor, 1 - dist.get_rank())\n"
    outcome = run(sandbox, on_ranks(2), source)
    assert troubles(outcome) == ["hung"]
    assert "nothing moved any more, and ranks 0, 1 had not returned" in str(outcome.observed[0].trouble)
    assert "rank 1 at line 2: `dist.recv(tensor, 1 - dist.get_rank())`" in str(outcome.observed[0].trouble)


def test_after_two_cases_that_hang_the_rest_are_skipped(sandbox: Sandbox):
    source = "def f(tensor):\n    dist.recv(tensor, (dist.get_rank() + 1) % dist.get_world_size())\n"
    assert troubles(run(sandbox, on_ranks(2, 3, 4, 2), source)) == ["hung", "skipped", "skipped", "hung"]


def test_on_paper_a_case_that_hangs_costs_that_case_alone(sandbox: Sandbox):
    source = "def f(x):\n    while x == 1:\n        pass\n    if x == 2:\n        time.sleep(100)\n    return x\n"
    outcome = run(sandbox, on_paper(0, 1, 2, 3), source)
    assert troubles(outcome) == ["", "hung", "hung", ""]
    assert "of its own computing time" in str(outcome.observed[1].trouble)
    assert [each.said[0]["answer"] for each in outcome.observed if each.has_come] == [0, 3]


def test_who_sleeps_a_little_is_not_stuck(sandbox: Sandbox):
    source = (
        "def f(x):\n    for _ in range(10):\n        time.sleep(0.1)\n        sum(range(5_000_000))\n    return x\n"
    )
    assert troubles(run(sandbox, on_paper(0), source)) == [""]


def test_what_does_not_end_in_time_hangs_or_was_kept_waiting_and_then_tried_again():
    source = "def f(x):\n    while True:\n        time.sleep(0.01)\n        sum(range(200_000))\n"
    with Sandbox(Limits(cpu_seconds=60, wall_seconds=1.0)) as sandbox:
        outcome = run(sandbox, on_paper(0, 1), source + "\n    return x")
    for kind, each in zip(troubles(outcome), outcome.observed, strict=True):  # a busy machine is not the learner's
        told = {"hung": "waited for nobody", "not known": "it was ended after", "skipped": "earlier cases hung"}
        assert told[kind] in str(each.trouble)


def test_an_error_costs_its_case_and_the_others_go_on(sandbox: Sandbox):
    source = "def f(tensor):\n    1 / (dist.get_world_size() - 3)\n    dist.all_reduce(tensor)\n    return tensor\n"
    outcome = run(sandbox, on_ranks(2, 3, 4), source)
    assert troubles(outcome) == ["", "raised", ""]
    assert "ZeroDivisionError" in str(outcome.observed[1].trouble)


# What was seen


def test_cases_of_as_many_ranks_share_a_start_and_are_counted_apart(sandbox: Sandbox):
    source = "def f(tensor):\n    dist.all_reduce(tensor)\n    return tensor\n"
    exercise, cases = on_ranks(3, 3, 3)
    for index, case in enumerate(cases):
        case["num_elements"] = 3000 * (index + 1)
    outcome = run(sandbox, (exercise, cases), source)
    assert [each.seen.total_bytes for each in outcome.observed] == [48_000, 96_000, 144_000]
    assert [each.seen.collectives() for each in outcome.observed] == [
        [("all_reduce", 48_000)],
        [("all_reduce", 96_000)],
        [("all_reduce", 144_000)],
    ]


HELD = {
    "a tensor": "torch.ones(8 * 2**20)",
    "bytes": "bytes(32 * 2**20).replace(b'\\0', b'x')",
    "numpy": "np.ones(4 * 2**20)",
    "a child": "child()",
    "a file of its home": "file('kept')",
    "a file of /dev/shm": "file('/dev/shm/kept')",
    "what it prints": "os.write(1, b'x' * 2**20 * 3)",
    "peak marks reset": "(torch.ones(8 * 2**20), open('/proc/self/clear_refs', 'w').write('5'))",
}
HOLDING = """
import ctypes

KEPT = []


def child():
    here, there = os.pipe()
    if ctypes.PyDLL(None).fork() == 0:
        kept = bytearray(os.urandom(2**20) * 32)
        os.write(there, b"x")
        time.sleep(20)
        os._exit(len(kept) % 2)
    os.read(here, 1)


def file(name):
    with open(name, "wb") as kept:
        for _ in range(32):
            kept.write(b"x" * 2**20)


def f(x):
    KEPT.append({held})
"""


@pytest.mark.parametrize("held", HELD)
def test_what_is_held_is_weighed_wherever_it_is(sandbox: Sandbox, held: str):
    (observed,) = run(sandbox, on_paper(0, weighed=True), HOLDING.replace("{held}", HELD[held])).observed
    assert observed.trouble is None, observed.trouble
    least = 3 * MiB if held == "what it prints" else 32 * MiB
    assert observed.seen.peak_at_end[0] >= least
    if held != "a child":  # which has all that its parent had, too
        assert observed.seen.peak_at_end[0] <= least + 6 * MiB


def test_what_was_let_go_is_not_held(sandbox: Sandbox):
    source = "def f(x):\n    for _ in range(5):\n        torch.ones(8 * 2**20).sum()\n        time.sleep(0.02)\n"
    (observed,) = run(sandbox, on_paper(0, weighed=True), source).observed
    assert 32 * MiB <= observed.seen.peak_at_end[0] <= 38 * MiB  # one at a time


def test_what_was_there_before_does_not_make_room(sandbox: Sandbox):
    source = (
        "ROOM = [torch.ones(32 * 2**20)]\n\ndef f(x):\n    ROOM.clear()\n    ROOM.append(torch.ones(24 * 2**20))\n"
        "    time.sleep(0.02)\n"
    )
    (observed,) = run(sandbox, on_paper(0, weighed=True), source).observed
    assert observed.seen.peak_at_end[0] >= (96 - 16) * MiB


# What is no evidence


def test_a_report_that_is_not_the_harness_s_is_none(sandbox: Sandbox):
    source = "from dtlib.grading.exercises import plain\n\ndef f(x):\n    plain.pack = lambda data: b'forged' * 100\n"
    (observed,) = run(sandbox, on_paper(0), source).observed
    assert observed.trouble is not None
    assert observed.trouble.kind == "tampered"


def test_who_asks_for_more_than_there_is_has_taken_the_harness_part(sandbox: Sandbox):
    source = """
import gc
from dtlib.grading.sandbox.harness.desk import Desk

def f(x):
    desk = next(each for each in gc.get_objects() if type(each) is Desk)
    return desk.next()
"""
    (observed,) = run(sandbox, on_paper(0), source).observed
    assert observed.trouble is not None
    assert (observed.trouble.kind, "asked for more" in str(observed.trouble)) == ("tampered", True)


def test_ranks_that_meet_are_told_nothing_of_each_other(sandbox: Sandbox):
    source = """
from dtlib.lab.launch import context

def f(tensor):
    dist.barrier()
    return np.frombuffer(b"".join(context.current("f").exchange(b"secret")) + b"!", np.uint8)
"""
    (observed,) = run(sandbox, on_ranks(2), source).observed
    assert [bytes(said["returned"].tolist()) for said in observed.said] == [b"!", b"!"]


def test_a_rank_is_told_its_own_numbers_alone(sandbox: Sandbox):
    source = """
import gc

def f(tensor):
    held = [each for each in gc.get_objects() if isinstance(each, dict) and "seed" in each and "num_elements" in each]
    blobs = [each for each in gc.get_objects() if isinstance(each, (bytes, bytearray)) and len(each) > 20_000_000]
    return torch.tensor([len(held), len(blobs)])
"""
    (observed,) = run(sandbox, on_ranks(2), source).observed
    assert [said["returned"].tolist() for said in observed.said] == [[0, 0], [0, 0]]
