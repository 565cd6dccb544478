"""The memory of a step: stacked parts add up to the line, markers stand where they were measured."""

import itertools
import math

import pytest

from dtlib import figures
from dtlib.lab.memory.spans import MemorySpan
from dtlib.lab.memory.storages import KindBytes

EVENTS = [
    ("begin", ""), ("forward", ""), ("forward", "blocks.0"), ("forward done", "blocks.0"), ("forward", "blocks.1"),
    ("forward done", "blocks.1"), ("forward done", ""), ("backward", ""), ("gradient", "head.weight"),
    ("backward", "blocks.1"), ("gradient", "blocks.1.weight"), ("gradient", "blocks.1.bias"),
    ("backward", "blocks.0"), ("backward done", "blocks.1"), ("gradient", "outer.weight"), ("step", ""),
    ("step done", ""), ("end", ""),
]  # fmt: skip


def spans(more=0):
    """A step of two blocks and a head, as spans of lab.memory_spans, each with 100 bytes of its own."""
    return [
        MemorySpan(event, name, KindBytes(parameters=1), KindBytes(parameters=50 + more, gradients=50 + i))
        for i, (event, name) in enumerate(EVENTS)
    ]


def rows():
    return {f"stage {stage}": spans(stage) for stage in (1, 2, 3)}


def at_moments(stair, values):
    """The values of a stair at each moment: steps may be longer than one."""
    widths = [round(stop - start) for start, stop in itertools.pairwise(stair.edges)]
    return [value for value, width in zip(values, widths, strict=True) for _ in range(width)]


def test_the_stack_of_each_moment_reaches_its_total():
    given = rows()
    figure = figures.memory_timeline(given, unit="B")
    assert len(figure.axes) == 3
    for axes, moments in zip(figure.axes, given.values(), strict=True):
        *parts, line = [patch.get_data() for patch in axes.patches]
        reached = [0.0] * len(moments)
        for part in parts:
            lows, tops = at_moments(part, part.baseline), at_moments(part, part.values)
            for i, (low, top) in enumerate(zip(lows, tops, strict=True)):
                assert low == pytest.approx(reached[i])
                reached[i] = reached[i] if math.isnan(top) else top
        totals = [moment.fullest.total for moment in moments]
        assert reached == pytest.approx(totals)
        assert at_moments(line, line.values) == pytest.approx(totals)
        assert axes.get_ylim()[1] > max(max(m.fullest.total for m in own) for own in given.values())


def test_spans_are_drawn_at_their_fullest_under_the_module_at_work():
    played = spans()
    figure = figures.memory_timeline({"stage 3": played}, unit="B")
    (axes,) = figure.axes
    *_, line = [patch.get_data() for patch in axes.patches]
    assert at_moments(line, line.values) == [100 + i for i in range(len(played))]
    ticks = {tick: label.get_text() for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)}
    assert ticks == {2: "0", 4: "1", 10: "1", 12.5: "0"}  # the outer gradient at 14 belongs to none
    assert [text.get_text() for text in axes.texts] == ["rest", "forward", "backward", "step", "rest"]


def test_the_peak_in_theory_is_a_dashed_line_and_in_the_words():
    figure = figures.memory_timeline({"stage 3": spans()}, peaks={"stage 3": 130.0}, unit="B")
    (line,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert list(line.get_ydata()) == [130.0, 130.0]
    assert figure.axes[0].get_ylim()[1] > 130
    assert "at most 117 B (rest), in theory 130" in figure.get_label()
    assert "peak in theory" in [text.get_text() for text in figure.legends[0].get_texts()]
    with pytest.raises(ValueError, match=r"peaks must name rows \(stage 3\), not 'stage 2'"):
        figures.memory_timeline({"stage 3": spans()}, peaks={"stage 2": 1.0})


def test_equal_moments_are_one_step():
    figure = figures.memory_timeline({"a": spans()[:1] * 40}, unit="B")
    assert {len(patch.get_data().values) for patch in figure.axes[0].patches} == {1}


def test_it_becomes_a_picture():
    picture = figures.style.svg(figures.memory_timeline(rows()))
    assert picture.startswith("<svg")
    assert 'aria-label="memory of a rank through a step; stage 1' in picture


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "rows must hold one moment"),
        ({"a": []}, "rows must hold one moment"),
        ({"a": spans(), "b": spans()[1:]}, r"rows\['b'\] has others"),
    ],
)
def test_bad_input_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        figures.memory_timeline(given)
