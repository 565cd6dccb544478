"""The engine: checks as data, gates, hidden checks, what is not known, comparisons, rounds."""

from __future__ import annotations

import numpy as np
import pytest

from dtlib.grading import Check, Exercise, Finding, Mistake, Observed, Trouble
from dtlib.grading.exercises import choice
from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.exercises.compare import close, compare
from dtlib.grading.exercises.seen import Ask, Header, Seen, rounds
from dtlib.grading.exercises.signs import ABANDONED, DEADLOCK, only_if


def is_seven(observed: Observed) -> Finding | None:
    value = observed.said[0]["answer"]
    return None if value == 7 else Finding(str(value), "7", observed.case["words"])


def seven(**options) -> Check:
    return Check(
        **{"name": "seven", "kind": "value", "points": 2, "description": "it is 7", "inspect": is_seven} | options
    )


def exercise(*checks: Check) -> Exercise:
    return Exercise("toy.1", "toy", "A toy", "paper.call", lambda rng: [], checks)


def case(answer: object = 7, words: str = "case a", trouble: Trouble | None = None) -> Observed:
    return Observed({"words": words}, () if trouble else ({"answer": answer},), trouble=trouble)


class TestJudge:
    def test_pass_and_fail(self):
        assert exercise(seven()).judge([case(), case()]).status == "pass"
        failed = exercise(seven()).judge([case(), case(8, "case b")])
        assert (failed.status, failed.points, failed.max_points) == ("fail", 0, 2)
        assert failed.message == "Saw 8; expected 7 (case b)."

    def test_some_of_the_points_is_partly_right(self):
        other = seven(name="other", applies=lambda case: case["words"] == "case b")
        result = exercise(seven(applies=lambda case: case["words"] == "case a"), other).judge(
            [case(), case(8, "case b")]
        )
        assert (result.status, result.points) == ("partly right", 2)

    def test_no_cases_pass_nothing(self):
        assert exercise(seven()).judge([]).points == 0
        assert exercise(seven()).judge([]).status == "fail"

    def test_first_mistake_that_fits_is_told(self):
        never = Mistake("never", lambda failing, passing: False, "no")
        crash = Mistake("crash", lambda failing, passing: 1 / 0, "no")
        eight = Mistake("eight", lambda failing, passing: failing[0].said[0]["answer"] == 8, "One too many?")
        (check,) = exercise(seven(mistakes=(never, crash, eight))).judge([case(8)]).checks
        assert check.mistake == "eight"
        assert check.message == "Saw 8; expected 7 (case a). One too many?"

    def test_trouble_fails_and_says_why(self):
        trouble = Trouble("raised", "rank 1 raised ValueError: x", "line 3 of `f`: `boom()`")
        (check,) = exercise(seven()).judge([case(trouble=trouble)]).checks
        assert check.message == "No result: rank 1 raised ValueError: x, in line 3 of `f`: `boom()` (case a)."

    def test_wrong_value_is_told_before_trouble(self):
        (check,) = exercise(seven()).judge([case(trouble=Trouble("hung", "late")), case(9), case(10)]).checks
        assert "Saw 9" in check.message

    def test_what_nobody_knows_is_no_mistake(self):
        always = Mistake("always", lambda failing, passing: True, "no")
        result = exercise(seven(mistakes=(always,))).judge([case(), case(trouble=Trouble("not known", "too busy"))])
        assert (result.status, result.points, result.mistakes) == ("not known", 0, ())
        wrong_anyway = exercise(seven()).judge([case(8), case(trouble=Trouble("not known", "too busy"))])
        assert wrong_anyway.status == "fail"

    def test_data_of_another_form_fail_the_check_only(self):
        (check,) = exercise(seven()).judge([Observed({"words": ""}, ({},))]).checks
        assert check.verdict == "fail"
        assert "another form (KeyError: 'answer')" in check.message

    def test_blank_is_not_attempted(self):
        result = exercise(seven()).judge([case(trouble=Trouble("blank", ""))])
        assert result.status == "not attempted"
        assert result.max_points == 2

    def test_hidden_checks_are_withheld_in_the_notebook_and_judged_by_the_grader(self):
        both = exercise(seven(), seven(name="hidden", points=3, visible=False))
        shown = both.judge([case()], hidden=False)
        assert (shown.status, shown.points, shown.max_points, shown.withheld_points) == ("pass", 2, 2, 3)
        assert "3 more points are decided when the exercise is graded" in str(shown)
        assert both.judge([case()]).points == 5

    def test_gate_that_fails_voids_the_other_points_and_accuses_nobody_else(self):
        def closed(observed: Observed) -> Finding | None:
            return Finding("a shortcut", "your own work") if observed.said[0]["answer"] == 7 else None

        gated = exercise(seven(), seven(name="gate", points=1, inspect=closed, gate=True))
        result = gated.judge([case()])
        assert (result.status, result.points) == ("fail", 0)
        assert [check.sign for check in result.checks] == ["–", "✗"]

    def test_gate_does_not_judge_what_did_not_come_back(self):
        gated = exercise(seven(), seven(name="gate", points=1, gate=True))
        result = gated.judge([case(trouble=Trouble("hung", "late"))])
        assert result.points == 0
        assert [check.verdict for check in result.checks] == ["fail", "not looked at"]

    def test_little_memory_is_praised_once_the_values_are_right(self):
        little = seven(name="memory", kind="memory", inspect=lambda observed: None)
        assert exercise(seven(), little).judge([case()]).points == 4
        result = exercise(seven(), little).judge([case(8)])
        assert (result.points, result.checks[1].verdict) == (0, "not counted")

    @pytest.mark.parametrize(("field", "value"), [("kind", "speed"), ("kind", ""), ("points", 0), ("points", -1)])
    def test_bad_checks_are_refused(self, field, value):
        with pytest.raises(ValueError, match=f"{field} must be"):
            seven(**{field: value})


class TestCompare:
    def test_nan_equals_nothing(self):
        assert not close(float("nan"), float("nan"))
        assert not close(np.array([np.nan]), np.array([np.nan]))
        assert not close(np.array([np.nan]), np.array([1.0]), atol=1e9)

    def test_infinity_equals_itself_alone(self):
        wanted = np.array([-np.inf, 1.0])
        assert close(wanted.copy(), wanted)
        assert close(wanted.tolist(), wanted)
        assert not close([np.nan, 1.0], wanted)
        assert not any(close(np.array([each, 1.0]), wanted) for each in (np.inf, np.nan, -1e300, 0.0))
        assert not close(np.array([-np.inf, np.inf]), wanted, atol=1e9)

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
        assert str(compare([7, None], [7, 1], "here")) == "Saw None; expected a finite number (here; part 1)."
        assert "Saw 10 entries, [0, " in str(compare([*range(10)], [*range(12)], ""))
        assert "; expected 12 entries." in str(compare([*range(10)], [*range(12)], ""))

    @pytest.mark.parametrize("expected", [[5, 7], np.array([5.0, 7.0])])
    def test_a_row_of_numbers_may_be_a_list_or_an_array(self, expected):
        for form in (list, tuple, np.array):
            assert close(form([5, 7]), expected)
            assert not close(form([5, 8]), expected)
            assert not close(form([5, 7, 7]), expected)
        assert not any(close(other, expected) for other in ([5, "7"], [[5, 7]], np.array([[5, 7]]), 5))
        assert not any(close([True, 7], form([1, 7])) for form in (list, np.array))

    @pytest.mark.parametrize("form", [np.array, lambda table: [*map(np.array, table)], tuple, list])
    def test_a_table_of_numbers_may_be_an_array_or_rows_in_a_list(self, form):
        for expected in (np.array([[5, 7], [2, 0]]), [[5.0, 7.0], [2.0, 0.0]]):
            assert close(form([[5, 7], [2, 0]]), expected)
            assert not close(form([[5, 7], [2, 1]]), expected)
            assert not any(
                close(other, expected) for other in ([[5, 7]], [[5, 7], [2]], [["5", "7"], [2, 0]], [5, 7, 2, 0])
            )
        assert close(form([[True, False]]), np.array([[True, False]]))
        assert "shape (1, 2); expected shape (2, 2)" in str(compare(form([[5, 7]]), np.zeros((2, 2)), ""))

    def test_a_dictionary_is_close_entry_by_entry(self):
        wanted = {"a": 0.3, "b": [1, 2.0]}
        assert close({"b": [1, 2], "a": 0.1 + 0.2}, wanted)
        assert not any(
            close(each, wanted) for each in ({"a": 0.3}, {**wanted, "c": 1}, {**wanted, "a": 0.4}, [0.3], None)
        )

    def test_right_only_if_needs_both_kinds(self):
        fits = only_if(lambda case: case["words"] == "even").fits
        even, odd = case(words="even"), case(words="odd")
        assert fits([odd], [even])
        assert not fits([odd], [])
        assert not fits([], [even])
        assert not fits([odd, even], [even])


def messages(*pairs: tuple[int, int]) -> Seen:
    return Seen([Header("send", rank, peer, "send", 0, 8) for rank, peer in pairs])


def test_memory_given_back_is_none_held():
    seen = Seen(asks=[Ask(0, 0, 0, "", -107_136, -107_136, "between")], peak_at_end=[-107_136])
    assert (seen.held(0, "between"), seen.peak(0)) == (0, 0)


@pytest.mark.parametrize(("begun", "is_thrown"), [(["receive"], False), (["send"], False), (["send", "receive"], True)])
def test_thrown_away_is_what_both_ends_have_begun(begun: list[str], is_thrown: bool):
    """One message has come, of the next one end has begun, or both."""
    ends = {"send": Header("send", 0, 1, "send", 0, 8), "receive": Header("receive", 1, 0, "send", 0, 8)}
    log = [*ends.values(), Header("data", 0, 1, "send", 0, 8), *(ends[kind] for kind in begun)]
    hung = [Observed({"words": ""}, (), Seen(log), Trouble("hung", "nothing moves", "dist.recv(arriving, 0)"))]
    assert (ABANDONED.fits(hung, []), DEADLOCK.fits(hung, [])) == (is_thrown, not is_thrown)


class TestRounds:
    def test_chain_and_flat_take_as_long(self):
        n = 6
        chain = messages(*[(rank, rank + 1) for rank in range(n - 1)])
        assert rounds(chain) == rounds(messages(*[(0, rank) for rank in range(1, n)])) == n - 1

    def test_turns_take_twice_as_long(self):
        assert rounds(messages((0, 1), (1, 0))) == 2

    def test_nothing_takes_no_time(self):
        assert rounds(messages()) == 0


class TestChoice:
    """What "the fastest of what is possible" rests on."""

    def test_only_what_is_clearly_the_fastest_is_an_answer(self):
        assert choice.fastest([]) is None
        assert choice.fastest([(2.0, "slow", 4), (1.0, "quick", 2)]) == ("quick", 2)
        assert choice.fastest([(1.005, "as quick", 4), (1.0, "quick", 2)]) == choice.UNCLEAR

    def test_a_job_tells_theories_apart(self):
        def right(n):
            return [(1.0, "a", 1), (float(n), "b", 2)]

        def wrong(n):
            return [(5.0, "a", 1), (float(n), "b", 2)]

        rng = np.random.default_rng(1)
        for _ in range(20):
            assert 1 < choice.told_apart(rng, lambda rng: int(rng.integers(-9, 20)), right, wrong) < 5

    @pytest.mark.parametrize(
        ("answer", "possible", "fastest"),
        [(["b", 2], "pass", "pass"), (["a", 1], "pass", "fail"), (["b", 1], "fail", "fail"), (None, "fail", "fail")]
        + [(each, "fail", "fail") for each in ("b", ["b"], ["b", "2"], [["b"], 2], {"b": 2}, ["b", 2.5])],
    )
    def test_answers(self, answer: object, possible: str, fastest: str):
        checks = choice.checks(lambda case: [(2.0, "a", 1), (1.0, "b", 2)], ("a", "b"), "something")
        seen = Observed({"words": "", "is": {"some": True}}, ({"answer": answer},))
        assert [check.judge([seen]).verdict for check in checks] == [possible, fastest]

    @pytest.mark.parametrize(
        ("name", "arguments", "answer", "told"),
        [
            ("pp.1", [960, 1, 9, 1, 0.25], 48, "Saw 48, with 20 micro-batches each, 28.57% idle; expected whole"),
            (
                "pp.1",
                [960, 1, 9, 1, 0.25],
                106,
                "Saw 106, with 9.06 micro-batches each; expected whole micro-batches and",
            ),
            ("pp.1", [48, 4, 16, 2, 0.1], 1, "Saw 1, with 12 micro-batches each, no multiple of p = 16; expected None"),
            (
                "tp.3",
                [8192, 64, 8192, 667e12, 8, 4, 450e9, 50e9, 1, 0.8],
                16,
                "% of the speed; expected at least 1 ranks",
            ),
            ("tp.3", [8192, 64, 8192, 667e12, 8, 4, 450e9, 50e9, 1, 0.8], 12, "Saw 12, which does not divide 64 heads"),
        ],
    )
    def test_the_largest_number_says_what_a_wrong_one_comes_to(self, name, arguments, answer, told):
        allowed = next(each for each in all_exercises()[name].checks if each.name == "allowed")
        seen = Observed({"words": "", "arguments": arguments, "is": {"some": True}}, ({"answer": answer},))
        assert told in allowed.judge([seen]).message

    def test_where_nothing_is_possible_none_is_right(self):
        checks = choice.checks(lambda case: [], ("a", "b"), "something")
        for answer, verdict in ((None, "pass"), (["a", 1], "fail")):
            seen = Observed({"words": "", "is": {"some": False}}, ({"answer": answer},))
            assert [check.judge([seen]).verdict for check in checks] == [verdict, "not looked at"]
