"""What every exercise and its bank hold: cells, checks, mistakes with programs and feedback; and how a bank is read."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dtlib.grading.exercises import bank, plain
from dtlib.grading.exercises.bank import BankError, patched, read
from dtlib.grading.exercises.catalogue import STEMS, all_exercises, bare
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.sandbox.harness import resolve

from .answers import cells, of_the_bank, programs

EXERCISES = list(all_exercises().values())
ids = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)


def test_every_chapter_has_exercises():
    of_stem = Counter(each.id.partition(".")[0] for each in EXERCISES)
    assert tuple(of_stem) == STEMS
    assert min(of_stem.values()) >= 3
    assert len({each.function for each in EXERCISES}) == len(EXERCISES)


@ids
class TestExercise:
    def test_three_cells_and_a_harness(self, exercise: Exercise):
        stem, own = exercise.id.partition(".")[0], exercise.id.replace(".", "-")
        assert {own, f"{own}-check"} <= cells(stem).keys()
        assert callable(resolve(exercise.harness))

    def test_every_check_has_cases_for_every_seed_and_they_are_plain_data_that_repeat_with_it(self, exercise: Exercise):
        assert len({check.name for check in exercise.checks}) == len(exercise.checks)
        drawn = [exercise.cases(seed) for seed in range(5)]  # `make soak` refuses every wrong program on fifty
        for seed, cases in enumerate(drawn):
            for check in exercise.checks:
                assert any(check.applies(case) for case in cases), f"{check.name}, seed {seed}"
        assert repr(exercise.cases(1)) == repr(drawn[1]) != repr(drawn[2])
        assert repr(plain.unpack(plain.pack(drawn[1]))) == repr(drawn[1])

    def test_what_is_told_by_the_submission_earns_nothing(self, exercise: Exercise):
        """It can be cleared from inside, so it guards and no more."""
        told = [check for check in exercise.checks if check.is_told]
        assert [check.name for check in told if check.points or not check.gate] == []

    def test_mistakes_have_programs_of_their_own(self, exercise: Exercise):
        own = read(bare()[exercise.id][0].with_suffix(".md"))
        for section in own.wrong:
            assert section.programs, f"{section.heading} is made by no program"
        twice = Counter((each.check, each.source) for each in programs(exercise.id)[1:])
        assert [check for (check, _), count in twice.items() if count > 1] == []
        for each in programs(exercise.id):
            functions = {node.name for node in ast.walk(ast.parse(each.source)) if isinstance(node, ast.FunctionDef)}
            assert exercise.function in functions

    def test_feedback_asks(self, exercise: Exercise):
        for check in exercise.checks:
            names = [mistake.name for mistake in check.mistakes]
            assert len(set(names)) == len(names), check.name
            for mistake in check.mistakes:
                assert mistake.feedback.rstrip(")")[-1] in ".?", (check.name, mistake.name)
                assert len(mistake.feedback.split()) >= 6, (check.name, mistake.name)
                assert "{" not in mistake.feedback, (check.name, mistake.name)


@ids
def test_what_is_shipped_holds_no_right_answer(exercise: Exercise):
    shipped = bank.shipped()[exercise.id]
    assert shipped.right == ()
    found = [text for section in shipped.wrong for *_, text in section.programs]
    wrong = [each.source for each in of_the_bank(exercise.id) if each.check]
    assert sorted(found) == (sorted(wrong) if bank.is_on_paper(exercise) else [])


@pytest.mark.parametrize("name", ["paper", "paper.nothing", "nothing.call", "", "os.system", "..exercise.Exercise"])
def test_unknown_harness_is_refused(name: str):
    with pytest.raises(ValueError, match="name must be that of a harness"):
        resolve(name)


def test_a_shard_with_a_gradient_is_refused_as_the_task_says():
    split, desk = resolve("zero.split"), SimpleNamespace(next=lambda: {"shapes": [[2, 3]], "weights_seed": 1})
    with pytest.raises(ValueError, match="the shard must require no gradient"):
        split(lambda parameters: (torch.nn.Parameter(parameters[0].detach().flatten()), list), desk)


REFERENCE = "def f(x):\n    y = 2 * x\n    return y\n"
SECTION = "## value: doubled\nWhy twice?\n\n```diff\n def f(x):\n-    y = 2 * x\n+    y = 4 * x\n```\n"


class TestReading:
    def read(self, folder: Path, text: str) -> bank.Bank:
        path = folder / f"{len(text)}.md"
        path.write_text(text, encoding="utf-8")
        return read(path)

    def test_sections_differences_and_right_answers(self, tmp_path: Path):
        own = self.read(tmp_path, f"{SECTION}\n# Right in another way\n## By addition\n```python\n{REFERENCE}```\n")
        (wrong, right) = own.programs(REFERENCE)
        assert (wrong.check, wrong.mistake, wrong.source) == ("value", "doubled", REFERENCE.replace("2", "4"))
        assert (right.check, right.mistake, right.source) == ("", "", REFERENCE)
        assert own.wrong[0].feedback == "Why twice?"

    def test_differences_to_another_section(self, tmp_path: Path):
        more = "## value: more\nAnd now?\n\n```diff value: doubled\n-    y = 4 * x\n+    y = 8 * x\n```\n"
        assert self.read(tmp_path, SECTION + more).programs(REFERENCE)[1].source == REFERENCE.replace("2", "8")

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("## no check here\nText.\n", "does not say which check"),
            (SECTION + SECTION, "stands there twice"),
            (f"{SECTION}# Right in another way\nBy addition:\n```python\n{REFERENCE}```\n", "before the first heading"),
            ("## value: open\n```python\ndef f(x): ...\n", "does not end"),
        ],
    )
    def test_what_cannot_be_read_is_told(self, tmp_path: Path, text: str, told: str):
        with pytest.raises(BankError, match=told):
            self.read(tmp_path, text)

    @pytest.mark.parametrize("diff", ["-    y = 3 * x\n+    y = 1\n", "-    return z\n"])
    def test_a_difference_to_something_else_is_refused(self, diff: str):
        with pytest.raises(BankError, match="stands in 0 places"):
            patched(REFERENCE, diff, "value: doubled")

    def test_a_mistake_that_nothing_recognises_is_refused(self, tmp_path: Path):
        exercise = next(each for each in EXERCISES if not each.harness.startswith("paper."))
        text = f"## {exercise.checks[-1].name}: never heard of\nWhat is this?\n\n```python\ndef f(): ...\n```\n"
        with pytest.raises(BankError, match="nothing recognises"):
            bank.equipped(exercise, self.read(tmp_path, text), bank.Bank(()))
