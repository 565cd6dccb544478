"""The pipeline to play with: the page carries the generators' orders, their reasons, and says what it needs."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
from bs4 import BeautifulSoup

from dtlib import figures
from dtlib.theory import pp

CHOICES = {
    "1F1B": {1: pp.one_f_one_b},
    "ZB-H1": {1: pp.zb_h1},
    "interleaved": {v: partial(pp.interleaved, v=v) for v in (2, 3)},
    "ZB-V": {2: pp.zb_v},
}


def page_and_data(**options):
    page = BeautifulSoup(figures.pipeline(CHOICES, **options).html(), "html.parser")
    return page, json.loads(page.find("script", type="application/json").string)["schedules"]


def test_the_page_carries_every_order_of_actions():
    _, data = page_and_data(ranks=(2, 3), micro_batches=(4, 6, 12))
    for name, by_v in CHOICES.items():
        for v, generate in by_v.items():
            for p in (2, 3):
                for m in (4, 6, 12):
                    found = data[name][str(v)][f"{p} {m}"]
                    if isinstance(found, str):
                        with pytest.raises(ValueError, match=re.escape(found)):
                            generate(p, m)
                        continue
                    schedule = generate(p, m)
                    assert found["placed"] == list(schedule.placed)
                    actions = [
                        [(text[k], int(text[k + 1], 36), int(text[k + 2], 36)) for k in range(0, len(text), 3)]
                        for text in found["ranks"]
                    ]
                    assert actions == [[tuple(action)[:3] for action in own] for own in schedule.actions]


def test_what_a_generator_refuses_is_told_with_its_reason():
    _, data = page_and_data(ranks=(4,), micro_batches=(6,))
    assert "multiple" in data["interleaved"]["2"]["4 6"]


def test_it_opens_in_the_middle_and_each_figure_has_a_name_of_its_own():
    page, _ = page_and_data()
    assert [each.text for each in page.find_all("option", selected=True)] == ["1F1B", "4", "8", "1"]
    again, _ = page_and_data()
    assert page.figure["id"] != again.figure["id"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ranks": ()}, "ranks"),
        ({"ranks": (0, 2)}, "ranks"),
        ({"micro_batches": (4, 37)}, "micro_batches must be numbers"),
    ],
)
def test_bad_choices_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        figures.pipeline(CHOICES, **options)


@pytest.mark.parametrize("schedules", [{}, {"1F1B": {}}])
def test_no_schedule_is_refused(schedules):
    with pytest.raises(ValueError, match="schedules"):
        figures.pipeline(schedules)
