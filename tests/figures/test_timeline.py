import pytest
from matplotlib.figure import Figure

from dtlib import figures
from dtlib.figures import Bar, style
from dtlib.lab.timeline.classify import Interval
from dtlib.lab.timeline.recorded import Timeline


def bars_of(axes):
    """(left, width, top, height) of everything drawn."""
    return [
        tuple(
            round(v, 6) for v in (p.get_extents().x0, p.get_extents().width, p.get_extents().y0, p.get_extents().height)
        )
        for collection in axes.collections
        for p in collection.get_paths()
    ]


def recorded(rank, *intervals, start=100.0, end=101.0):
    return Timeline(rank, start, end, tuple(Interval(*each) for each in intervals))


def test_timelines_under_labels_of_their_own_begin_at_their_own_zero():
    first = recorded(0, ("compute", "forward", 100.1, 100.3))
    second = recorded(0, ("compute", "forward", 200.1, 200.3), start=200.0, end=201.0)
    figure = figures.timeline({"one": first, "two": second})
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["one", "two"]
    assert [bar[:2] for bar in bars_of(figure.axes[0])] == [(100, 200)] * 2  # milliseconds


def test_measured_timelines_start_at_zero_and_computing_lies_above():
    first = recorded(0, ("communication", "all-reduce", 100.2, 100.4), ("compute", "backward", 100.1, 100.3))
    second = recorded(1, ("compute", "forward", 100.5, 101.0), start=100.1)
    figure = figures.timeline([second, first])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_xlabel() == "time (s)"
    backward, reduce, forward = bars_of(axes)
    assert backward[:2] == (0.1, 0.2)
    assert reduce[:2] == (0.2, 0.2)
    assert forward[:2] == (0.5, 0.5)
    assert backward[2] < reduce[2] < forward[2]  # the axis points down
    low, high = axes.get_ylim()
    assert low > high


def test_colours_are_the_books():
    figure = figures.timeline({"stage 0": [Bar("forward", 0, 1), Bar("backward", 1, 3)]})
    from matplotlib.colors import to_hex

    drawn = [to_hex(collection.get_facecolor()[0]) for collection in figure.axes[0].collections]
    assert drawn == [style.color("forward"), style.color("backward")]


def test_overlapping_bars_of_a_lane_get_strips():
    figure = figures.timeline({"a": [("send", 0, 2), ("send", 1, 3), ("recv", 2, 4)]})
    tops = [top for _, _, top, _ in sorted(bars_of(figure.axes[0]))]
    assert tops[0] == tops[2] != tops[1]


def test_bars_that_touch_are_drawn_as_one_unless_they_are_numbered():
    touching = [Bar("forward", 0, 1), Bar("forward", 1, 2), Bar("forward", 2.5, 4)]
    assert len(bars_of(figures.timeline({"a": touching}).axes[0])) == 2
    numbered = [Bar("forward", 0, 1, text="1"), Bar("forward", 1, 2, text="2")]
    axes = figures.timeline({"a": numbered}).axes[0]
    assert len(bars_of(axes)) == 2
    assert [text.get_text() for text in axes.texts] == ["1", "2"]


@pytest.mark.parametrize(
    ("last", "unit", "label", "width"),
    [
        (2.0, None, "time (s)", 2.0),
        (0.02, None, "time (ms)", 20.0),
        (2e-5, None, "time (µs)", 20.0),
        (2.0, "ms", "time (ms)", 2000.0),
        (12, "forward passes", "time (forward passes)", 12),
    ],
)
def test_units(last, unit, label, width):
    axes = figures.timeline({"a": [("forward", 0, last)]}, unit=unit).axes[0]
    assert axes.get_xlabel() == label
    assert bars_of(axes)[0][1] == pytest.approx(width)


def test_rows_without_bars_keep_their_place():
    figure = figures.timeline({"a": [], "b": [("forward", 0, 1)]})
    assert len(figure.axes[0].get_yticks()) == 2


def test_legend_names_each_look_once():
    figure = figures.timeline(
        {"a": [("all-reduce, bucket 1", 0, 1), ("all-reduce, bucket 2", 1, 2), ("forward", 2, 3)]}
    )
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["forward", "all-reduce"]
    assert figures.timeline({"a": [("forward", 0, 1)]}, legend=False).axes[0].get_legend() is None


def test_it_draws_into_given_axes_and_says_what_it_shows():
    axes = Figure().subplots(2)
    figure = figures.timeline({"a": [("forward", 0, 1)]}, axes=axes[1])
    assert figure is axes[1].figure
    assert not axes[0].collections
    assert figure.get_label() == "timeline of 1 row over 1 s: forward"


@pytest.mark.parametrize(
    "rows", [{}, [], {"a": []}, {"a": [("forward", 2, 1)]}, [1, 2], {"a": [("forward", 0, float("nan"))]}]
)
def test_rows_that_cannot_be_drawn(rows):
    with pytest.raises(ValueError, match="rows must"):
        figures.timeline(rows)
