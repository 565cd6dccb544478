"""The pipeline that a reader plays with, in Chromium: what the page computes is what `theory.pp.simulate` says."""

from __future__ import annotations

import pytest

from dtlib.theory import pp

MAKE = {**pp.SCHEDULES, "interleaved": pp.interleaved}


def choose(figure, **values):
    for name, value in values.items():
        control = figure.locator(f"[name={name}]")
        control.evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", str(value))


def readings(figure) -> tuple[str, ...]:
    return tuple(figure.locator(f"b.{name}").inner_text() for name in ("bubble", "span", "own", "waits", "held"))


def simulated(schedule, gradient, weight, message) -> tuple[str, ...]:
    table = pp.simulate(schedule, 1.0, gradient, weight, message_seconds=message)
    held = ", ".join(f"{each:.2f}".rstrip("0").rstrip(".") for each in table.most_in_flight)
    longest = max(table.rank_spans)
    own = f"{longest:.2f}", f"{100 * table.longest_idle / longest:.1f} %"
    return f"{100 * table.bubble:.1f} %", f"{table.span:.2f}", *own, held


@pytest.fixture
def played(visit, html):
    with visit(width=390) as tab:
        page = tab.open(html / "chapters" / "pp.html")
        figure = page.locator(".dtlib-pipeline")
        figure.scroll_into_view_if_needed()
        yield figure
        assert tab.complaints == []


def test_it_opens_on_one_f_one_b(played):
    assert readings(played) == simulated(pp.one_f_one_b(4, 8), 1, 1, 0)


def test_who_hears_it_is_told_the_numbers(played):
    choose(played, p=2, m=4, input=0.5)
    bubble, span, *_ = readings(played)
    said = played.locator("svg[role=img]").get_attribute("aria-label")
    assert said == f"time grid of 1F1B: 2 ranks, 4 micro-batches, {span} forward passes, bubble {bubble}"
    assert played.locator("[name=input]").get_attribute("aria-valuetext") == "0.50 forward passes"


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "sequential", "ZB-H1", "ZB-H2", "ZB-V", "DualPipeV", "interleaved"])
def test_grid_bubble_and_memory_are_those_of_the_simulator(played, name):
    """For prices at which no two times are equal, with and without messages."""
    choose(played, schedule=name)
    for p, m in ((2, 4), (4, 8), (8, 16)):
        choose(played, p=p, m=m)
        schedule = MAKE[name](p, m)
        for gradient, weight, message in ((1, 1, 0), (1.3, 0.75, 0), (0.85, 1.15, 0.2)):
            choose(played, input=gradient, weight=weight, message=message)
            assert readings(played) == simulated(schedule, gradient, weight, message), (p, m, gradient)
            boxes = sum(len(own) for own in schedule.actions)
            assert played.locator("svg[role=img] rect").count() == boxes
            assert played.locator("svg[role=img] text.on").count() == boxes  # each with its number
    kinds = {action.kind for own in schedule.actions for action in own}
    for kind in "FBIW":
        assert played.locator(f".key [data-kind={kind}]").is_visible() == (kind in kinds)
    assert played.locator(".key [data-kind=chunk]").is_visible() == (schedule.chunks > 1)


def test_without_a_barrier_h2_idles_less_than_h1(played):
    found = {}
    for name in ("ZB-H1", "ZB-H2"):
        choose(played, schedule=name, p=4, m=8, input=1, weight=1, message=0)
        found[name] = readings(played)
    assert found["ZB-H1"][:2] == found["ZB-H2"][:2]
    assert found["ZB-H2"][3] == "0.0 %" != found["ZB-H1"][3]


def test_what_there_is_not_says_why_and_the_next_choice_is_drawn_again(played):
    choose(played, schedule="interleaved", p=8, m=12)
    assert "multiple" in played.locator(".refused").inner_text()
    assert not played.locator("svg[role=img]").is_visible()
    choose(played, m=8)
    assert played.locator(".refused").inner_text() == ""
    assert readings(played) == simulated(pp.interleaved(8, 8), 1, 1, 0)
    choose(played, schedule="1F1B")
    assert played.locator("[name=v]").is_disabled()
