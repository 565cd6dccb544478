"""The harness of the exercises on paper sees which of the library's functions an answer calls."""

from __future__ import annotations

import _thread
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from dtlib import theory
from dtlib.grading import Check, all_exercises
from dtlib.grading.harness.paper import call
from dtlib.theory import hardware, units

CASE = {"arguments": [2**20, 4, 1e9]}
RING = "theory.collectives.ring.ring_all_reduce_bytes"


def library(function) -> list[str]:
    seen = call(function, CASE)
    assert seen["escaped"] == []
    return seen["library"]


def in_a_thread(full_bytes, n, rate):
    thread = threading.Thread(target=theory.collectives.ring_all_reduce_bytes, args=(full_bytes, n))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "function",
    [
        lambda full_bytes, n, rate: theory.collectives.ring_all_reduce_bytes(full_bytes, n),
        lambda full_bytes, n, rate: [theory.collectives.ring_all_reduce_bytes(each, n) for each in (full_bytes,)],
        lambda full_bytes, n, rate: list(map(theory.collectives.ring_all_reduce_bytes, [full_bytes], [n])),
        in_a_thread,
    ],
)
def test_calls_of_the_library_are_seen(function):
    assert RING in library(function)


def test_the_library_itself_as_the_answer_is_seen():
    assert call(theory.collectives.ring_all_reduce_seconds, {"arguments": [2**20, 4, 0.0, 1e9]})["library"]


def test_the_answers_of_the_checks_are_seen():
    from dtlib.grading.checks.collectives.vocabulary import VOCABULARY

    seen = call(VOCABULARY["all_gather"], {"arguments": [np.ones((2, 2))]})
    assert seen["library"] == ["grading.checks.collectives.vocabulary.<lambda>"]


def test_an_import_is_no_call():
    """In a fresh process, where it is the first one: decorators and the like then run inside of the library."""
    source = (
        "from dtlib.grading.harness.paper import call\n"
        "def answer():\n"
        "    from dtlib import ranks, theory\n"
        "    return str((theory.collectives, theory.dp, ranks.collectives, ranks.dp))\n"
        "print(call(answer, {'arguments': []}))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert "'library': [], 'escaped': []" in done.stdout


def test_tools_and_own_helpers_are_not():
    def own(full_bytes, n, rate):
        from dtlib.theory.collectives import ring_all_reduce_bytes as compared_with_later  # noqa: F401

        return units.format_bytes(full_bytes), hardware.Link("own", rate, "here"), np.sum([full_bytes, n])

    assert library(own) == []


def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def raw_thread():
    done = _thread.allocate_lock()
    done.acquire()
    _thread.start_new_thread(done.release, ())
    done.acquire()


def away_and_back():
    profiler = sys.getprofile()
    sys.setprofile(None)
    sys.setprofile(profiler)


@pytest.mark.parametrize(
    ("way", "told"),
    [
        (lambda: sys.setprofile(None), "sys.setprofile"),
        (away_and_back, "sys.setprofile"),
        (lambda: threading.setprofile(None), "sys.setprofile"),
        (lambda: sys.getprofile(), "sys.getprofile"),
        (lambda: len(gc.get_objects()), "gc.get_objects"),
        (raw_thread, "a thread that is not of threading"),
        (fork, "another process"),
        (lambda: subprocess.run(["true"], check=True), "another process"),
    ],
)
def test_ways_out_of_sight_are_told_and_nothing_stays_behind(way, told):
    seen = call(lambda *_: way(), CASE)["escaped"]
    assert told in seen
    assert sys.getprofile() is None


def test_an_answer_that_raises_leaves_no_watch_behind():
    with pytest.raises(ZeroDivisionError):
        call(lambda *_: 1 / 0, CASE)
    assert sys.getprofile() is None
    assert threading.getprofile() is None


def test_a_gate_may_be_worth_nothing_and_is_told_only_where_it_fails():
    exercise = all_exercises()["collectives.2"]
    gate = exercise.checks[0]
    assert (gate.name, gate.gate, gate.points) == ("own formula", True, 0)
    with pytest.raises(ValueError, match="points must be at least 0"):
        Check("x", "value", -1, "", lambda run: None, gate=True)
    with pytest.raises(ValueError, match="points must be at least 1"):
        Check("x", "value", 0, "", lambda run: None)
