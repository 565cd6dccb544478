"""The slider: what its grid holds, what its page contains, what it refuses, and its live twin."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from bs4 import BeautifulSoup

from dtlib import figures
from dtlib.figures import slider_view
from dtlib.figures.slider_view import spoken

SIZES = np.geomspace(1e3, 1e9, 13)


def seconds(n):
    return {
        "ring": 2 * (n - 1) * 1e-5 + 2 * (n - 1) / n * SIZES / 1e9,
        "tree": 2 * np.log2(n) * (1e-5 + SIZES / 1e9),
    }


def curves(**options):
    given = {"name": "ranks", "values": [2, 4, 8, 16], "start": 4, "x": SIZES, "x_scale": "log", "y_scale": "log"}
    return figures.slider(seconds, **(given | options))


def data_of(slider):
    page = BeautifulSoup(slider.html(), "html.parser")
    return page, json.loads(page.find("script", type="application/json").string)


def test_the_grid_is_what_numpy_says():
    slider = curves()
    expected = np.array([[seconds(n)["ring"], seconds(n)["tree"]] for n in (2, 4, 8, 16)])
    np.testing.assert_array_equal(slider.grid, expected)
    assert slider.labels == ["ring", "tree"]


def test_the_page_carries_the_grid_and_opens_at_the_start():
    page, data = data_of(curves(format_value=lambda n: f"{n} ranks", format_y=lambda y: f"{y:.3e} s"))
    for index, n in enumerate((2, 4, 8, 16)):
        step = data["steps"][index]
        np.testing.assert_allclose(step["curves"], list(seconds(n).values()), rtol=1e-6)  # 7 digits are kept
        assert step["text"] == f"{n} ranks"
        assert step["readings"] == [f"{seconds(n)[label][6]:.3e} s" for label in ("ring", "tree")]
    control = page.find("input", type="range")
    assert (control["min"], control["max"], control["value"]) == ("0", "3", "1")
    assert control["aria-valuetext"] == "4 ranks"
    assert page.find("label", attrs={"for": control["id"]}).text == "ranks"
    assert page.find("output", attrs={"for": control["id"]}).text == "4 ranks"


def test_the_drawn_curve_lies_where_the_numbers_are():
    slider = curves()
    page, _ = data_of(slider)
    x, y = slider.axes
    drawn = re.findall(r"[ML]([\d.]+) ([\d.]+)", page.find("path", class_="curve")["d"])
    pixels = np.array(drawn, dtype=float)
    back_x = x.low * (x.high / x.low) ** ((pixels[:, 0] - x.start) / (x.end - x.start))
    back_y = y.low * (y.high / y.low) ** ((pixels[:, 1] - y.start) / (y.end - y.start))
    np.testing.assert_allclose(back_x, SIZES, rtol=0.01)  # a tenth of a pixel on six decades
    np.testing.assert_allclose(back_y, seconds(4)["ring"], rtol=0.01)


def test_a_table_holds_the_readings_for_readers_without_javascript():
    page, data = data_of(curves(note=lambda n: f"{n} of them"))
    rows = [[cell.text for cell in row.find_all(["th", "td"])] for row in page.find("table").find_all("tr")]
    assert rows[0] == ["ranks", "ring", "tree", "note"]
    expected = [[step["text"], *step["readings"], step["note"]] for step in data["steps"]]
    assert rows[1:] == expected
    assert page.find("details").has_attr("open")


def test_without_x_the_curves_run_over_the_variable():
    slider = figures.slider(lambda m: {"bubble": 3 / (m + 3)}, name="micro-batches", values=[1, 2, 4, 8], start=2)
    _, data = data_of(slider)
    assert data["xs"] == [1, 2, 4, 8]
    assert [step["probe"] for step in data["steps"]] == [1, 2, 4, 8]
    np.testing.assert_allclose([step["at"][0] for step in data["steps"]], 3 / (np.array([1, 2, 4, 8]) + 3), rtol=1e-6)
    assert data["steps"][0]["curves"] is None


def test_the_probe_is_the_nearest_abscissa():
    _, data = data_of(curves(probe=9e5))
    assert data["steps"][0]["probe"] == pytest.approx(1e6)


def test_what_cannot_be_drawn_becomes_a_gap():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    slider = figures.slider(
        lambda a: {"y": np.array([a, np.nan, 0.0, np.inf])}, name="a", values=[1, 2], x=x, y_scale="log", probe=2
    )
    page, data = data_of(slider)
    assert data["steps"][0]["curves"] == [[1.0, None, None, None]]
    assert data["steps"][0]["readings"] == ["–"]
    assert page.find("circle", class_="dot")["style"] == "display:none"


def test_measured_points_are_markers_in_the_colour_of_their_curve():
    page, _ = data_of(curves(points={"ring": ([1e4, 1e6], [1e-4, 1e-3])}))
    points = page.select("svg[role=img] .point")
    assert len(points) == 2
    assert {point["stroke"] for point in points} == {figures.style.color("ring")}
    assert page.find("path", class_="curve")["stroke"] == figures.style.color("ring")


def test_two_sliders_never_share_an_id_even_when_they_are_equal():
    page = BeautifulSoup(curves().html() + curves().html(), "html.parser")
    ids = [tag["id"] for tag in page.find_all(id=True)]
    assert len(ids) == len(set(ids)) == 4


def test_nothing_is_fetched_and_text_is_escaped():
    html = curves(caption="a < b & </figure>", note=lambda n: "</script><b>").html()
    assert not re.search(r"(?:src|href)=|https?:|@import|url\(", html)
    page = BeautifulSoup(html, "html.parser")
    assert page.find("figcaption").text == "a < b & </figure>"
    assert json.loads(page.find("script", type="application/json").string)["steps"][0]["note"] == "</script><b>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "name must be a non-empty string"),
        ({"values": [2]}, "values must hold at least two"),
        ({"start": 3}, "start must be one of values, not 3"),
        ({"x_scale": "cubic"}, "x_scale must be"),
        ({"y_scale": "ln"}, "y_scale must be"),
        ({"x": SIZES[:5]}, "as long as x"),
        ({"x": SIZES - 1e3}, "x must be positive on a log scale"),
        ({"x": [1.0]}, "x must be at least two"),
        ({"probe": -1}, "probe must be positive"),
        ({"x": None}, "fn must return a number"),
        (
            {"values": ["a", "b"], "start": "a", "x": None, "x_scale": "linear"},
            "values must be numbers where x is not given",
        ),
        ({"points": {"ring": ([1, 2], [1])}}, "two arrays of one length"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        curves(**options)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda n: {f"curve {n}": SIZES}, "same labels at every position"),
        (lambda n: {"y": np.full(13, np.nan)}, "some finite numbers"),
        (lambda n: {}, "at least one curve"),
        (lambda n: SIZES[:3], "as long as x"),
    ],
)
def test_bad_functions_are_refused_when_the_slider_is_made(fn, message):
    with pytest.raises(ValueError, match=message):
        figures.slider(fn, name="n", values=[1, 2], x=SIZES)


def test_a_grid_too_large_for_a_page_is_refused():
    with pytest.raises(ValueError, match="at most 20000 numbers, not 20020"):
        figures.slider(lambda n: np.ones(1001), name="n", values=range(20), x=np.arange(1001))


def test_in_the_book_there_is_no_widget(monkeypatch):
    monkeypatch.setenv("DTLIB_STATIC", "1")
    monkeypatch.setattr(slider_view, "widget", lambda slider: pytest.fail("a widget was made for a static page"))
    assert set(curves()._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_in_a_live_notebook_the_same_call_recomputes():
    """In a real kernel: the bundle holds a widget, and moving it calls the function again."""
    import nbclient
    import nbformat

    code = (
        "import numpy as np\nfrom dtlib import figures\ncalls = []\n"
        "def fn(n):\n    calls.append(n)\n    return {'ring': n * np.arange(1.0, 4.0)}\n"
        "slider = figures.slider(fn, name='n', values=[2, 4, 8], start=2, x=[1, 2, 3])\nslider"
    )
    move = (
        "from dtlib.figures.slider_view import widget\nbox = widget(slider)\ncalls.clear()\n"
        "box.children[1].value = 2\nprint(calls, '<b>16</b>' in box.children[0].value)"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code), nbformat.v4.new_code_cell(move)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(env=_live_environment())
    bundle = notebook.cells[0].outputs[0]["data"]
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "<input" in bundle["text/html"]
    assert notebook.cells[1].outputs[0]["text"].strip() == "[8] True"


def _live_environment():
    import os

    return {name: value for name, value in os.environ.items() if name != "DTLIB_STATIC"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ranks N", "8", "8 ranks"), ("ranks N", "1", "1 rank"), ("ranks of tp", "1", "1 rank of tp"),
        ("micro-batches m", "1", "1 micro-batch"), ("width", "1", "width 1"), ("memory (GB)", "1", "1 GB"),
        ("cards", "1,024", "1,024 cards"), ("device memory (GB)", "80", "80 GB"),
        ("batch, in noise scales", "0.5", "0.5 noise scales"), ("steps alone, H", "16", "16 steps alone"),
        ("size", "4 MiB", "4 MiB"), ("numbers that are sent", "1%", "1%"), ("width", "4096", "width 4096"),
    ],
)  # fmt: skip
def test_a_position_is_read_aloud_with_its_unit(name, text, said):
    assert spoken(name, text) == said


def test_the_picture_says_the_readings_of_the_position():
    page, data = data_of(curves(format_y=lambda y: f"{y:.3e} s"))
    ring, tree = data["steps"][1]["readings"]
    assert page.find("svg", role="img")["aria-label"] == data["steps"][1]["alt"]
    assert data["steps"][1]["alt"].endswith(f": ring {ring}, tree {tree}")
    assert data["steps"][2]["spoken"] == "8 ranks"
