"""The style: one look for one thing, readable on both papers and without colour, and SVG fit for a page."""

from __future__ import annotations

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from dtlib.figures import inline, style

LIGHT, DARK = "#ffffff", "#14181e"  # the papers of the theme
ALL_COLORS = [look.color for look in [*style.LOOKS.values(), *style._SPARE]]


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("color", ALL_COLORS)
@pytest.mark.parametrize("paper", [LIGHT, DARK])
def test_each_colour_stands_out_from_both_papers(color, paper):
    assert contrast(color, paper) >= 3  # WCAG 2.2, 1.4.11: graphical objects


def test_the_contrast_measure_can_fail():
    assert contrast("#ffff00", LIGHT) < 3
    assert contrast("#202060", DARK) < 3


def test_no_two_things_share_a_colour():
    assert len(ALL_COLORS) == len(set(ALL_COLORS))


def test_without_colour_dash_and_marker_still_tell_curves_apart():
    for group in (style._INTERVALS, style._ALGORITHMS):
        for (_, one), (_, other) in itertools.combinations(group.items(), 2):
            assert (one.dash, one.marker) != (other.dash, other.marker)


def test_without_colour_bars_still_tell_intervals_apart():
    plain = [name for name in style._INTERVALS if "hatch" not in style.bar(name) or not style.bar(name)["hatch"]]
    assert plain == ["forward", "backward", "weight gradient", "idle"]
    greys = [luminance(style.color(name)) ** (1 / 3) * 116 - 16 for name in plain[:3]]
    assert min(b - a for a, b in itertools.pairwise(greys)) >= 8, "lightness must climb by a visible step"
    hatched = [style.bar(name)["hatch"] for name in style._INTERVALS if name not in plain]
    assert len(hatched) == len(set(hatched)) == 4
    assert style.bar("idle")["facecolor"] == "none"


def test_names_are_forgiving_and_unknown_ones_are_listed():
    assert style.look("All_Reduce") is style.look("all-reduce") is style.look("all reduce, 4 ranks")
    with pytest.raises(ValueError, match=r"name must be one of .*reduce-scatter.*, not 'sideways'"):
        style.look("sideways")


def test_unknown_curves_of_one_picture_get_different_looks():
    found = style.looks(["ring", "mine", "yours"])
    assert found["ring"] is style.look("ring")
    assert found["mine"] != found["yours"]


@pytest.fixture
def figure():
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with style.context():
        made, axes = plt.subplots()
        style.line(axes, [1, 2, 3], [1, 4, 9], "ring")
        style.markers(axes, [1, 2, 3], [1, 4.2, 8.8], "ring")
        axes.broken_barh([(0, 1)], (0, 1), **style.bar("all-reduce"))
        axes.set_xlabel("buffer size (bytes)")
        axes.legend()
        yield made
        plt.close(made)


def test_theory_is_a_line_and_a_measurement_is_markers(figure):
    theory, measured = figure.axes[0].lines
    assert (theory.get_linestyle(), theory.get_marker()) == ("-", "None")
    assert (measured.get_linestyle(), measured.get_marker()) == ("None", "o")
    assert measured.get_label() == "ring, measured"


def test_svg_follows_the_page_and_fetches_nothing(figure):
    svg = style.svg(figure, alt='time < "size"')
    root = ET.fromstring(svg)
    assert root.get("aria-label") == 'time < "size"'
    assert style.INK not in svg
    assert "currentColor" in svg
    assert "buffer size (bytes)" in "".join(root.itertext())
    assert "<style" not in svg, "a style element inside an inline SVG would restyle the whole page"
    assert root.get("width") is None
    assert not [tag for tag in ("<image", "url(http", "@import") if tag in svg]


def test_two_pictures_on_one_page_share_no_id(figure):
    ids = [
        {element.get("id") for element in ET.fromstring(style.svg(figure)).iter() if element.get("id")}
        for _ in range(2)
    ]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_what_is_inside_the_axes_is_not_clipped_and_what_leaves_them_is():
    from matplotlib import pyplot as plt

    made, axes = plt.subplots()
    axes.broken_barh([(0, 1), (1, 2), (4, 2)], (0, 1), facecolor="#112233")
    axes.set_xlim(0, 5)
    bars = [path for path in style.svg(made).split("<path")[1:] if "112233" in path]
    plt.close(made)
    assert ["clip-path" in bar for bar in bars] == [False, True]
    assert bars[0].count("z") == 2, "bars that look alike are one path"


def test_paths_are_short_and_the_same_to_a_tenth_of_a_point():
    bar = "M 72.239 29.59 L 72.239 50.083 L 85.76 50.083 L 85.76 29.59 z"
    assert inline.short_path(bar) == "M72.2 29.6V50.1H85.8V29.6z"
    lying = "M 72.239 29.59 L 85.76 29.59 L 85.76 50.083 L 72.239 50.083 z"
    assert inline.short_path(lying) == "M72.2 29.6H85.8V50.1H72.2z"
    curve = "M 0 3.5 L -1.254 2 C 1.5 2 3 4 100.00 6.25 L 101 6.25 z"
    assert inline.short_path(curve) == "M0 3.5L-1.25 2C1.5 2 3 4 100 6.25H101z"


def test_importing_figures_is_cheap():
    """Neither torch nor pyplot is loaded before something is drawn."""
    code = (
        "import sys; from dtlib import figures; print([m for m in ('torch', 'matplotlib.pyplot') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_figures_are_shown_in_a_notebook_whose_first_picture_is_the_librarys():
    import nbclient
    from nbformat import v4

    cells = (
        "from dtlib import figures; figures.owners({'a': [[0]]})",
        "import matplotlib.pyplot as plt; plt.subplots();",
    )
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    assert [[out.output_type for out in cell.outputs] for cell in notebook.cells] == [
        ["execute_result"],
        ["display_data"],
    ]
