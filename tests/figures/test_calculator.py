"""A calculator's parts are those of its function, and what a page holds of them is small."""

from __future__ import annotations

import json
import re

import pytest

from dtlib import figures

CHOICES = {"a": [1, 2, 3], "b": ["x", "yy"]}


def parts(a, b):
    return {"both": a * 2**30 * len(b), "of b": 2**20 * len(b), "fixed": 5, "nothing": 0}


def made(fn=parts, **changes):
    given = {"start": {"a": 2, "b": "x"}, "limits": {"small": 2**30, "large": 2**33}, "limit": "large"} | changes
    return figures.calculator(fn, CHOICES, **given)


def test_every_choice_has_the_parts_of_the_function():
    given = made()
    for a in CHOICES["a"]:
        for b in CHOICES["b"]:
            assert given.parts(a=a, b=b) == {name: value for name, value in parts(a, b).items() if value}


def test_a_part_travels_along_the_choices_it_depends_on():
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', made().html())[1])
    assert [shape for shape, _ in data["parts"]] == [[3, 2], [1, 2], [1, 1]]


def test_the_page_shows_the_first_choice_without_a_script():
    page = made().html()
    for text in ("2 GiB", "1 MiB", "5 B", "2.001 GiB", "It fits: 10% of 8 GiB kept free, 5.2 GiB are left."):
        assert text in page
    assert "It does not fit: 10% of 1 GiB kept free, 1.1 GiB are missing." in made(limit="small").html()


def test_a_control_is_called_what_it_chooses_and_each_part_has_a_colour_of_its_own():
    def weighed(zero):
        return dict.fromkeys(("weights", "gradients", "first moment", "second moment", "logits", "unknown"), zero)

    page = figures.calculator(weighed, {"zero": [1, 2]}, start={"zero": 1}, limits={"A": 9}, limit="A").html()
    assert re.findall(r"<label>([^<]+) <", page) == ["ZeRO stage", "card"]
    colors = re.findall(r'<i style="background:(#\w+)"', page)
    assert len(set(colors)) == len(colors) == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"start": {"a": 4, "b": "x"}}, r"start must have one of \[1, 2, 3\] for a, not 4"),
        ({"limit": "huge"}, "limit must be one of small, large, not 'huge'"),
        ({"fn": lambda a, b: {str(a): 1}}, "fn must return the same parts everywhere"),
    ],
)
def test_bad_arguments_are_named(changes, said):
    with pytest.raises(ValueError, match=said):
        made(**changes)


def test_too_many_numbers_are_refused():
    many = {"a": list(range(150)), "b": list(range(150))}
    with pytest.raises(ValueError, match="choices must give at most 20000 numbers, not 22500"):
        figures.calculator(lambda a, b: {"c": a * b}, many, start={"a": 0, "b": 0}, limits={"d": 1}, limit="d")
