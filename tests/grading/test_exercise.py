"""The engine: checks as data, gates, hidden checks, plain data, rounds."""

from __future__ import annotations

import io
import zipfile
from collections import Counter

import numpy as np
import pytest
import torch

from dtlib.grading import Check, Exercise, Finding, Mistake, Run, Trouble, all_exercises, plain
from dtlib.grading.checks import STEMS
from dtlib.grading.compare import close, compare, right_only_if
from dtlib.grading.harness import resolve
from dtlib.grading.rounds import count_rounds


def is_seven(run: Run) -> Finding | None:
    value = run.ranks[0]["answer"]
    return None if value == 7 else Finding(str(value), "7", run.case["words"])


def seven(**options) -> Check:
    return Check(
        **{"name": "seven", "kind": "value", "points": 2, "description": "it is 7", "inspect": is_seven} | options
    )


def exercise(*checks: Check) -> Exercise:
    return Exercise("toy.1", "toy", "A toy", "paper.call", lambda rng: [], checks)


def run(answer: object = 7, words: str = "case a", trouble: Trouble | None = None) -> Run:
    return Run({"words": words}, () if trouble else ({"answer": answer},), trouble=trouble)


class TestJudge:
    def test_pass_and_fail(self):
        assert exercise(seven()).judge([run(), run()]).status == "pass"
        failed = exercise(seven()).judge([run(), run(8, "case b")])
        assert (failed.status, failed.points, failed.max_points) == ("fail", 0, 2)
        assert failed.message == "Saw 8; expected 7 (case b)."

    def test_no_runs_pass_nothing(self):
        assert exercise(seven()).judge([]).status == "fail"

    def test_first_mistake_that_fits_is_told(self):
        never = Mistake("never", lambda failing, passing: False, "no")
        crash = Mistake("crash", lambda failing, passing: 1 / 0, "no")
        eight = Mistake("eight", lambda failing, passing: failing[0].ranks[0]["answer"] == 8, "One too many?")
        (check,) = exercise(seven(mistakes=(never, crash, eight))).judge([run(8)]).checks
        assert check.mistake == "eight"
        assert check.message == "Saw 8; expected 7 (case a). One too many?"

    def test_trouble_fails_and_says_why(self):
        trouble = Trouble("raised", "rank 1 raised ValueError: x", "line 3 of `f`: `boom()`")
        (check,) = exercise(seven()).judge([run(trouble=trouble)]).checks
        assert check.message == "No result: rank 1 raised ValueError: x, in line 3 of `f`: `boom()` (case a)."

    def test_wrong_value_is_told_before_trouble(self):
        (check,) = exercise(seven()).judge([run(trouble=Trouble("hung", "late")), run(9), run(10)]).checks
        assert "Saw 9" in check.message

    def test_data_of_another_form_fail_the_check_only(self):
        (check,) = exercise(seven()).judge([Run({"words": ""}, ({},))]).checks
        assert not check.passed
        assert "another form (KeyError: 'answer')" in check.message

    def test_blank_is_not_attempted(self):
        result = exercise(seven()).judge([run(trouble=Trouble("blank", ""))])
        assert result.status == "not attempted"
        assert result.max_points == 2

    def test_check_looks_only_where_it_applies(self):
        check = seven(applies=lambda case: case["words"] == "case a")
        assert exercise(check).judge([run(), run(8, "case b")]).status == "pass"

    def test_hidden_checks_are_withheld_in_the_notebook_and_judged_by_the_grader(self):
        both = exercise(seven(), seven(name="hidden", points=3, visible=False))
        shown = both.judge([run()], hidden=False)
        assert (shown.status, shown.points, shown.max_points, shown.withheld_points) == ("pass", 2, 2, 3)
        assert "3 more points are decided when the exercise is graded" in str(shown)
        assert both.judge([run()]).points == 5

    def test_gate_that_fails_voids_the_other_points(self):
        def closed(run: Run) -> Finding | None:
            return Finding("a shortcut", "your own work") if run.ranks[0]["answer"] == 7 else None

        gated = exercise(seven(), seven(name="gate", points=1, inspect=closed, gate=True))
        result = gated.judge([run()])
        assert (result.status, result.points) == ("fail", 0)
        assert [check.sign for check in result.checks] == ["–", "✗"]

    def test_gate_does_not_judge_what_did_not_come_back(self):
        gated = exercise(seven(), seven(name="gate", points=1, gate=True))
        result = gated.judge([run(trouble=Trouble("hung", "late"))])
        assert result.points == 0
        assert "late" in result.checks[0].message
        assert result.checks[0].counted

    @pytest.mark.parametrize(("field", "value"), [("kind", "speed"), ("kind", ""), ("points", 0), ("points", -1)])
    def test_bad_checks_are_refused(self, field, value):
        with pytest.raises(ValueError, match=f"{field} must be"):
            seven(**{field: value})


class TestBankOfExercises:
    def test_ids_functions_and_harnesses(self):
        known = all_exercises()
        assert len({exercise.function for exercise in known.values()}) == len(known)
        of_stem = Counter(name.partition(".")[0] for name in known)
        assert tuple(of_stem) == STEMS
        assert min(of_stem.values()) >= 5
        for name, exercise in known.items():
            assert exercise.id == name
            assert callable(resolve(exercise.harness))
            assert len({check.name for check in exercise.checks}) == len(exercise.checks)

    @pytest.mark.parametrize("name", ["paper", "paper.nothing", "nothing.call", "", "os.system", "..exercise.Exercise"])
    def test_unknown_harness_is_refused(self, name):
        with pytest.raises(ValueError, match="name must be that of a harness"):
            resolve(name)

    def test_cases_are_plain_data(self):
        for exercise in all_exercises().values():
            cases = exercise.cases(4)
            assert repr(plain.unpack(plain.pack(cases))) == repr(cases), exercise.id

    def test_every_check_has_cases_to_look_at(self):
        for exercise in all_exercises().values():
            for seed in range(20):
                cases = exercise.cases(seed)
                for check in exercise.checks:
                    assert any(check.applies(case) for case in cases), f"{exercise.id} {check.name} seed {seed}"

    def test_feedback_is_a_sentence(self):
        for exercise in all_exercises().values():
            for check in exercise.checks:
                for mistake in check.mistakes:
                    assert mistake.feedback[-1] in ".?", mistake.feedback
                    assert mistake.feedback[0].isupper() or mistake.feedback[0] in "2`", mistake.feedback


class TestPlainData:
    def test_there_and_back(self):
        data = {"a": [1, 2.5, None, True, "x"], "b": {"c": np.arange(6).reshape(2, 3)}, "d": []}
        back = plain.unpack(plain.pack(data))
        assert back["a"] == data["a"]
        np.testing.assert_array_equal(back["b"]["c"], data["b"]["c"])

    def test_tensors_become_arrays_and_numbers(self):
        assert plain.simplify(torch.tensor(2.5)) == 2.5
        half = plain.simplify(torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True).T)
        assert half.dtype == np.float32
        assert half.shape == (2, 2)

    def test_what_is_not_plain_is_marked(self):
        class Evil:
            def __repr__(self):
                raise RuntimeError

        assert plain.simplify(Evil()) == {"not_plain": "Evil", "text": "(its repr raises)"}
        assert plain.simplify({1}) == {"not_plain": "set", "text": "{1}"}
        assert plain.simplify(10**50)["not_plain"] == "int"
        assert plain.simplify(np.array([object()]))["not_plain"] == "ndarray"

    def test_nesting_is_cut(self):
        endless: list = []
        endless.append(endless)
        assert "not_plain" in repr(plain.simplify(endless))

    def test_too_much_is_refused(self):
        with pytest.raises(ValueError, match="at most"):
            plain.pack([np.zeros(plain.MAX_BYTES // 8)] * 2)

    @pytest.mark.parametrize("junk", [b"", b"not a zip", b"PK\x03\x04 nearly"])
    def test_junk_is_refused(self, junk):
        with pytest.raises(ValueError, match="no archive of plain data"):
            plain.unpack(junk)

    def test_pickled_arrays_are_refused(self):
        buffer = io.BytesIO()
        np.savez(buffer, json=np.frombuffer(b'{"__array__": "a"}', np.uint8), a=np.array([print], dtype=object))
        with pytest.raises(ValueError, match="allow_pickle"):
            plain.unpack(buffer.getvalue())

    def test_archive_that_swells_is_refused(self):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("json.npy", b"0" * 10_000_000)
        with pytest.raises(ValueError, match="10000000 bytes"):
            plain.unpack(buffer.getvalue(), max_bytes=10**6)


class TestCompare:
    def test_nan_equals_nothing(self):
        assert not close(float("nan"), float("nan"))
        assert not close(np.array([np.nan]), np.array([np.nan]))
        assert not close(np.array([np.nan]), np.array([1.0]), atol=1e9)

    def test_first_difference_is_shown(self):
        seen, expected = np.arange(8.0), np.arange(8.0)
        seen[5] = 9
        assert str(compare(seen, expected, "on rank 1")) == (
            "Saw […, 9, 6, 7]; expected […, 5, 6, 7] (on rank 1; 1 of 8 elements differ, the first at position 5)."
        )
        assert str(compare(seen[5:6], expected[5:6], "")) == "Saw [9]; expected [5]."

    def test_shape_and_kind_are_told(self):
        assert "shape (2,)" in str(compare(np.zeros(2), np.zeros(3), ""))
        assert "None (does the function return" in str(compare(None, np.zeros(3), ""))
        assert "Saw True; expected a finite number" in str(compare(True, 1.0, ""))

    def test_right_only_if_needs_both_kinds(self):
        fits = right_only_if(lambda case: case["words"] == "even")
        even, odd = run(words="even"), run(words="odd")
        assert fits([odd], [even])
        assert not fits([odd], [])
        assert not fits([], [even])
        assert not fits([odd, even], [even])


def message(op: str, peer: int) -> dict:
    return {"op": op, "bytes": 8, "peer": peer}


def wait(of: int) -> dict:
    return {"op": "wait", "of": of}


class TestRounds:
    def test_ring_in_step(self):
        n = 5

        def steps(rank: int) -> list[dict]:
            right, left = (rank + 1) % n, (rank - 1) % n
            step = [message("send", right), message("receive", left)]
            return [each for s in range(n - 1) for each in (*step, wait(4 * s + 1), wait(4 * s))]

        events = [steps(rank) for rank in range(n)]
        assert count_rounds(events) == n - 1

    def test_chain_and_flat_take_as_long(self):
        n = 6
        chain = [[message("send", 1), wait(0)]]
        chain += [[message("receive", r - 1), wait(0), message("send", r + 1), wait(2)] for r in range(1, n - 1)]
        chain += [[message("receive", n - 2), wait(0)]]
        flat = [[e for r in range(1, n) for e in (message("send", r), wait(2 * (r - 1)))]]
        flat += [[message("receive", 0), wait(0)] for _ in range(1, n)]
        assert count_rounds(chain) == count_rounds(flat) == n - 1

    def test_turns_take_twice_as_long(self):
        first = [message("send", 1), wait(0), message("receive", 1), wait(2)]
        second = [message("receive", 0), wait(0), message("send", 0), wait(2)]
        assert count_rounds([first, second]) == 2
        both = [[message("send", 1 - r), message("receive", 1 - r), wait(1), wait(0)] for r in range(2)]
        assert count_rounds(both) == 1

    def test_thread_that_sends_late_costs_no_round(self):
        def rank(me: int) -> list[dict]:
            other = 1 - me
            first = [message("receive", other), wait(0), message("send", other) | {"thread": 1}]
            return [*first, message("receive", other), wait(3), message("send", other) | {"thread": 2}]

        assert count_rounds([rank(0), rank(1)]) == 2

    def test_messages_that_do_not_meet(self):
        assert count_rounds([[message("receive", 1), wait(0)], []]) is None
        assert count_rounds([[message("receive", -1), wait(0)], [message("send", 0)]]) is None

    def test_nothing_takes_no_time(self):
        assert count_rounds([[], []]) == 0
