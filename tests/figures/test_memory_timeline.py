"""The memory of a step: stacked parts add up to the line, markers stand where they were measured."""

import itertools
import math

import pytest

from dtlib import figures
from dtlib.lab.memory.spans import MemorySpan
from dtlib.lab.memory.storages import KindBytes
from dtlib.theory import zero

MODULES = [4000, 8000, 4000]


def rows(n=4):
    return {f"stage {stage}": zero.step_timeline(MODULES, n, stage) for stage in (1, 2, 3)}


def at_moments(stair, values):
    """The values of a stair at each moment: steps may be longer than one."""
    widths = [round(stop - start) for start, stop in itertools.pairwise(stair.edges)]
    return [value for value, width in zip(values, widths, strict=True) for _ in range(width)]


def test_the_stack_of_each_moment_reaches_its_total():
    given = rows()
    figure = figures.memory_timeline(given, unit="kB")
    assert len(figure.axes) == 3
    for axes, moments in zip(figure.axes, given.values(), strict=True):
        *parts, line = [patch.get_data() for patch in axes.patches]
        reached = [0.0] * len(moments)
        for part in parts:
            lows, tops = at_moments(part, part.baseline), at_moments(part, part.values)
            for i, (low, top) in enumerate(zip(lows, tops, strict=True)):
                assert low == pytest.approx(reached[i])
                reached[i] = reached[i] if math.isnan(top) else top
        totals = [moment.held.total / 1000 for moment in moments]
        assert reached == pytest.approx(totals)
        assert at_moments(line, line.values) == pytest.approx(totals)
        assert axes.get_ylim()[1] > max(max(m.held.total for m in own) for own in given.values()) / 1000


def test_measurements_are_markers_at_their_moments():
    given = rows()
    found = [moment.held.total * 1.5 for moment in given["stage 2"]]
    found[3] = math.nan
    figure = figures.memory_timeline(given, measured={"stage 2": found}, unit="kB")
    drawn = [[line for line in axes.lines if line.get_marker() == "D"] for axes in figure.axes]
    assert [len(lines) for lines in drawn] == [0, 1, 0]
    assert list(drawn[1][0].get_xdata()) == list(range(len(found)))
    assert drawn[1][0].get_ydata()[:3] == pytest.approx([value / 1000 for value in found[:3]])
    assert f"measured {max(v for v in found if v == v) / 1000:.4g}" in figure.get_label()


def test_phases_and_modules_stand_under_the_last_panel():
    figure = figures.memory_timeline(rows())
    texts = [text.get_text() for text in figure.axes[-1].texts]
    assert texts == ["rest", "forward", "backward", "step"]
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == list("012210")
    peak = zero.peak(rows()["stage 3"])
    assert f"stage 3: at most {peak.held.total / 1000:.4g} kB (backward of {peak.module})" in figure.get_label()


def spans():
    """A step of two blocks and a head, as spans of lab.memory_spans, each with 100 bytes of its own."""
    events = [
        ("begin", ""), ("forward", ""), ("forward", "blocks.0"), ("forward done", "blocks.0"), ("forward", "blocks.1"),
        ("forward done", "blocks.1"), ("forward done", ""), ("backward", ""), ("gradient", "head.weight"),
        ("backward", "blocks.1"), ("gradient", "blocks.1.weight"), ("gradient", "blocks.1.bias"),
        ("backward", "blocks.0"), ("backward done", "blocks.1"), ("gradient", "outer.weight"), ("step", ""),
        ("step done", ""), ("end", ""),
    ]  # fmt: skip
    return [
        MemorySpan(event, name, KindBytes(parameters=1), KindBytes(parameters=50, gradients=50 + i))
        for i, (event, name) in enumerate(events)
    ]


def test_spans_are_drawn_at_their_fullest_under_the_module_at_work():
    played = spans()
    figure = figures.memory_timeline({"stage 3": played}, measured={"stage 3": played}, unit="B")
    (axes,) = figure.axes
    *_, line = [patch.get_data() for patch in axes.patches]
    assert at_moments(line, line.values) == [100 + i for i in range(len(played))]
    (markers,) = [line for line in axes.lines if line.get_marker() == "D"]
    assert list(markers.get_ydata()) == at_moments(line, line.values)
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
    figure = figures.memory_timeline({"a": [zero.step_timeline(MODULES, 4, 1)[0]] * 40}, unit="B")
    assert {len(patch.get_data().values) for patch in figure.axes[0].patches} == {1}


def test_it_becomes_a_picture():
    picture = figures.style.svg(figures.memory_timeline(rows()))
    assert picture.startswith("<svg")
    assert 'aria-label="memory of a rank through a step; stage 1' in picture


@pytest.mark.parametrize(
    ("given", "measured", "message"),
    [
        ({}, None, "rows must hold one moment"),
        ({"a": []}, None, "rows must hold one moment"),
        ({"a": rows()["stage 1"], "b": rows()["stage 1"][1:]}, None, r"rows\['b'\] has others"),
        ({"a": rows()["stage 1"]}, {"b": [1.0]}, "measured must name rows"),
        ({"a": rows()["stage 1"]}, {"a": [1.0]}, "must hold one number for each of 8 moments"),
    ],
)
def test_bad_input_is_named(given, measured, message):
    with pytest.raises(ValueError, match=message):
        figures.memory_timeline(given, measured=measured)
