"""Stacked bars: lengths are the parts, one look for one part, readable in grey, and no silent nonsense."""

import itertools
import math
from dataclasses import dataclass, fields

import pytest

from dtlib import figures
from dtlib.figures import breakdown, style
from dtlib.lab.memory.storages import MEMORY_KINDS, KindBytes
from dtlib.theory.breakdown import Breakdown
from dtlib.theory.footprint import RankMemory
from dtlib.theory.memory import RECIPES, ModelStates

from .test_style import DARK, LIGHT, contrast


@dataclass(frozen=True)
class Cake(Breakdown):
    flour: int
    sugar: int
    salt: int = 0


def drawn(axes):
    """(row, left, width) of every part, in the order of drawing."""
    return [(round(p.get_y() + p.get_height() / 2), round(p.get_x(), 9), round(p.get_width(), 9)) for p in axes.patches]


def legend_of(figure):
    return [text.get_text() for each in figure.legends for text in each.get_texts()]


def test_each_part_starts_where_the_one_before_ends_and_is_as_long_as_its_value():
    figure = figures.breakdown_bars({"one": Cake(3, 2), "two": {"flour": 1, "eggs": 4}}, unit="spoons")
    (axes,) = figure.axes
    assert drawn(axes) == [(0, 0, 3), (0, 3, 2), (1, 0, 1), (1, 1, 4)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
    assert axes.get_xlabel() == "spoons"
    low, high = axes.get_ylim()
    assert low > high, "the first bar lies on top"
    assert [text.get_text() for text in axes.texts] == ["5", "5"]
    assert legend_of(figure) == ["flour", "sugar", "eggs"], "a part that is 0 has no line"


@pytest.mark.parametrize(
    ("unit", "label", "width"),
    [
        (None, "memory (GB)", 80),
        ("GiB", "memory (GiB)", 80e9 / 2**30),
        ("B", "memory (B)", 80e9),
        ("TB", "memory (TB)", 0.08),
    ],
)
def test_units_scale_the_bars_and_name_the_axis(unit, label, width):
    (axes,) = figures.breakdown_bars({"states": {"weights": 80_000_000_000}}, unit=unit).axes
    assert axes.get_xlabel() == label
    assert drawn(axes)[0][2] == pytest.approx(width)


def test_a_measurement_is_a_marker_and_a_limit_a_line_in_the_same_unit():
    bars = {"a": {"weights": 4e9}, "b": {"weights": 8e9}}
    figure = figures.breakdown_bars(bars, measured={"b": 9e9}, limits={"device": 12e9})
    (axes,) = figure.axes
    marker, line = axes.lines
    assert (marker.get_linestyle(), marker.get_marker()) == ("None", "D")
    assert (list(marker.get_xdata()), list(marker.get_ydata())) == ([9.0], [1])
    assert list(line.get_xdata()) == [12.0, 12.0]
    assert axes.get_xlim()[1] > 12
    assert legend_of(figure) == ["weights", "measured"]
    assert "device" in [text.get_text() for text in axes.texts]


def test_a_limit_does_not_strike_a_total_through():
    bars = {"short": {"weights": 25e9}, "long": {"weights": 1100e9}}
    (axes,) = figures.breakdown_bars(bars, limits={"device": 80e9}).axes
    (total,) = (text for text in axes.texts if text.get_text() == "0.025")
    axes.figure.canvas.draw()
    box, (device,) = total.get_window_extent(), axes.lines
    assert axes.transData.transform((device.get_xdata()[0], 0))[0] < box.x0


def test_the_caption_says_every_number_that_is_drawn():
    figure = figures.breakdown_bars({"16-byte": RECIPES["16-byte"].per_param}, unit="bytes a parameter")
    assert figure.get_label() == (
        "stacked bars, bytes a parameter; 16-byte: 16 (weights 2, gradients 2, master weights 4, first moment 4, "
        "second moment 4)"
    )
    figure.set_label("mine")
    figures.breakdown_bars({"x": Cake(1, 1)}, axes=figure.axes[0])
    assert figure.get_label() == "mine"


def test_every_part_of_memory_has_a_look_and_the_same_one_under_every_name():
    names = {field.name for record in (ModelStates, RankMemory) for field in fields(record)} | set(MEMORY_KINDS)
    for name in names:
        assert figures.part_look(name) is figures.part_look(name.replace("_", " "))
    assert figures.part_look("parameters") == figures.part_look("weights"), "lab's word and theory's mean one thing"
    with pytest.raises(ValueError, match=r"name must be one of .*master weights.*, not 'flour'"):
        figures.part_look("flour")


@pytest.mark.parametrize("paper", [LIGHT, DARK])
def test_each_part_stands_out_from_both_papers(paper):
    for name, look in breakdown.PARTS.items():
        assert contrast(look.color, paper) >= 3, name


def test_without_colour_hatches_tell_the_parts_of_one_bar_apart():
    for record in (ModelStates, RankMemory):
        hatches = [figures.part_look(field.name).hatch for field in fields(record)]
        assert len(set(hatches)) == len(hatches)
    kinds = [figures.part_look(kind).hatch for kind in MEMORY_KINDS]
    assert len(set(kinds)) == len(kinds)


def test_parts_without_a_meaning_get_different_looks_too():
    looks = breakdown._looks(["weights", *(f"part {i}" for i in range(19))])
    assert looks["weights"] is breakdown.PARTS["weights"]
    for one, other in itertools.combinations(looks.values(), 2):
        assert (one.color, one.hatch) != (other.color, other.hatch)


def test_a_reading_of_lab_memory_is_drawn_as_it_is():
    (axes,) = figures.breakdown_bars({"now": KindBytes(parameters=8, gradients=8, optimizer=16)}, unit="B").axes
    assert drawn(axes) == [(0, 0, 8), (0, 8, 8), (0, 16, 16)]


def test_a_part_too_thin_to_see_is_left_out_and_its_place_kept():
    figure = figures.breakdown_bars({"a": {"weights": 10_000, "gradients": 1, "optimizer": 10_000}}, unit="B")
    assert drawn(figure.axes[0]) == [(0, 0, 10_000), (0, 10_001, 10_000)]
    assert legend_of(figure) == ["weights", "optimizer"]


def test_the_picture_is_an_svg_that_follows_the_page():
    text = style.svg(figures.breakdown_bars({"fp32": RECIPES["fp32"].per_param}, unit="bytes a parameter"))
    assert "bytes a parameter" in text
    assert style.INK not in text


@pytest.mark.parametrize(
    ("bars", "options", "message"),
    [
        ({}, {}, "bars must hold one part"),
        ({"a": Cake(0, 0)}, {}, "bars must hold one part"),
        ({"a": {"x": 0}}, {"measured": {"a": 0}}, "bars must hold one part"),
        ({"a": {"x": -1}}, {}, r"bars\['a'\]\['x'\] must be .* at least 0, not -1"),
        ({"a": {"x": math.nan}}, {}, "finite"),
        ({"a": 7}, {}, r"bars\['a'\] must be a Breakdown or a mapping .* not 7"),
        ({"a": Cake(1, 1)}, {"measured": {"b": 1}}, r"measured must name bars \(a\), not 'b'"),
        ({"a": Cake(1, 1)}, {"limits": {"device": math.inf}}, r"limits\['device'\] must be a finite"),
    ],
)
def test_nonsense_is_refused_by_name(bars, options, message):
    with pytest.raises(ValueError, match=message):
        figures.breakdown_bars(bars, **options)


def test_hatches_are_lines_alone_so_that_a_picture_stays_small():
    assert all(set(look.hatch) <= set("/\\|-+x") for look in breakdown.PARTS.values())
    assert all(set(hatch) <= set("/\\|-+x") for hatch in breakdown._SPARE_HATCHES)
    figure = figures.breakdown_bars({"all": {field.name: 1.0 for field in fields(RankMemory)}}, unit="parts")
    assert len(style.svg(figure)) < 40_000
