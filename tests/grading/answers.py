"""What the two modules that try the bank have in common."""

from __future__ import annotations

from dtlib.grading import Result, all_exercises, check

from .bank import RightAnswer, WrongAnswer, cells, namespace, reference_namespace, right_answers, wrong_answers

SEED = 20261
HANGING = ("everybody waits", "right for powers of two only")
HANG_S = 6  # for answers that hang: the cases before the one that hangs need a fraction of that


def of_stem(stem: str) -> list[str]:
    return [name for name in all_exercises() if name.startswith(f"{stem}.")]


def wrong_of_stem(stem: str) -> list[WrongAnswer]:
    return [wrong for wrong in wrong_answers() if wrong.exercise.startswith(f"{stem}.")]


def tried_in_a_notebook(wrong: list[WrongAnswer]) -> list[WrongAnswer]:
    """Every third, and those that hang: `test_sandbox` tries all the others in the grader's way, and not these."""
    return [each for number, each in enumerate(wrong) if number % 3 == 0 or each.mistake in HANGING]


def right_of_stem(stem: str) -> list[RightAnswer]:
    return [right for right in right_answers() if right.exercise.startswith(f"{stem}.")]


def check_right(right: RightAnswer) -> None:
    setup = cells(right.exercise.partition(".")[0])["setup"]
    result = check(right.exercise, seed=SEED, namespace=namespace(setup, right.source))
    assert result.status == "pass", str(result)


def check_reference(exercise: str) -> None:
    stem = exercise.partition(".")[0]
    result = check(exercise, seed=SEED, namespace=reference_namespace(stem))
    assert result.status == "pass", str(result)
    assert result.points == result.max_points == all_exercises()[exercise].points
    assert result.mistakes == ()


def check_blank(exercise: str) -> None:
    stem = exercise.partition(".")[0]
    blank = cells(stem, "exercises")
    result = check(exercise, namespace=namespace(blank["setup"], blank[exercise.replace(".", "-")]))
    assert result.status == "not attempted", str(result)
    assert result.points == 0
    assert "still raises NotImplementedError" in result.message


def check_wrong(wrong: WrongAnswer) -> Result:
    setup = cells(wrong.exercise.partition(".")[0])["setup"]
    timeout_s = HANG_S if wrong.mistake in HANGING else None
    result = check(wrong.exercise, seed=SEED, namespace=namespace(setup, wrong.source), timeout_s=timeout_s)
    assert result.status == "fail", str(result)
    assert result.points < result.max_points
    checks = {each.name: each for each in result.checks}
    assert wrong.check in checks, f"{wrong.exercise} has no check {wrong.check!r}"
    told = checks[wrong.check]
    assert not told.passed, f"{wrong.check} accepts it: {result}"
    assert told.mistake == wrong.mistake, f"took it for {told.mistake!r}: {result}"
    (definition,) = [each for each in all_exercises()[wrong.exercise].checks if each.name == wrong.check]
    (feedback,) = [mistake.feedback for mistake in definition.mistakes if mistake.name == wrong.mistake]
    assert told.message.startswith(("Saw ", "No result: ")), told.message
    assert told.message.endswith(feedback), told.message
    assert feedback in str(result)
    return result
