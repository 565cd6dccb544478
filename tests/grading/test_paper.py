"""The harness of the exercises on paper sees which of the library's functions an answer calls."""

from __future__ import annotations

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
    assert seen["watched"]
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


def test_tools_and_own_helpers_are_not():
    def own(full_bytes, n, rate):
        from dtlib.theory.collectives import ring_all_reduce_bytes as compared_with_later  # noqa: F401

        return units.format_bytes(full_bytes), hardware.Link("own", rate, "here"), np.sum([full_bytes, n])

    assert library(own) == []


def test_a_watch_that_is_ended_is_told_and_nothing_stays_behind():
    assert call(lambda *_: sys.setprofile(None), CASE)["watched"] is False
    assert sys.getprofile() is None
    with pytest.raises(ZeroDivisionError):
        call(lambda *_: 1 / 0, CASE)
    assert sys.getprofile() is None


def test_a_gate_may_be_worth_nothing_and_is_told_only_where_it_fails():
    exercise = all_exercises()["collectives.2"]
    gate = exercise.checks[0]
    assert (gate.name, gate.gate, gate.points) == ("own formula", True, 0)
    with pytest.raises(ValueError, match="points must be at least 0"):
        Check("x", "value", -1, "", lambda run: None, gate=True)
    with pytest.raises(ValueError, match="points must be at least 1"):
        Check("x", "value", 0, "", lambda run: None)
