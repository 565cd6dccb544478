"""The built book in Chromium, opened from the disk: every page, light and dark, wide and on a phone."""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from dtlib.figures.inline import LEGIBLE_PX
from dtlib.theory.collectives import naive_all_reduce_bytes, ring_all_reduce_bytes
from dtlib.theory.units import GiB, format_bytes

from .conftest import built_pages
from .test_pattern import LESSONS

PAGES = [page for page in built_pages() if page != "index.html"]  # index.html only leads on to the first page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_a_request_or_a_complaint(visit, html, name):
    with visit() as tab:
        page = tab.open(html / name)
        page.wait_for_timeout(300)  # scripts that start late have their chance to misbehave
        assert tab.left == []
        assert tab.complaints == []
        assert page.locator(".katex-error").count() == 0
        formulas = page.locator(".math.inline, .math.block > .tex").count()
        assert page.locator(".math .katex").count() >= formulas
        if formulas:
            assert page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px KaTeX_Main'))")


CUT_CELLS = """() => [...document.querySelectorAll("main td, main th")].filter((each) =>
  each.scrollWidth > each.clientWidth + 1 || each.getBoundingClientRect().right > innerWidth
).map((each) => each.textContent.slice(0, 60))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_its_window(visit, html, width, scheme):
    """On a laptop no cell of a table is cut either, or sticks out; a long formula may have a bar of its own."""
    wide, cut = {}, {}
    with visit(width=width, scheme=scheme) as tab:
        for name in PAGES:
            page = tab.open(html / name)
            excess = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            if excess > 0:
                wide[name] = excess
            if width > 390 and (cells := page.evaluate(CUT_CELLS)):
                cut[name] = cells
    assert (wide, cut) == ({}, {})


SMALLEST_TYPE = """() => [...document.querySelectorAll("svg")].map(svg => {
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const said = [...svg.querySelectorAll("text, tspan")].filter(each => each.textContent.trim());
  return Math.min(...said.map(each => parseFloat(getComputedStyle(each).fontSize) * scale));
}).filter(Number.isFinite)"""


@pytest.mark.parametrize("stem", LESSONS)
def test_figures_are_legible_on_a_phone(visit, html, stem):
    """All type that they hold, exponents too; a figure too wide for it is pulled aside, and the page stays."""
    with visit(width=390) as tab:
        sizes = tab.open(html / "chapters" / f"{stem}.html").evaluate(SMALLEST_TYPE)
        assert len(sizes) >= 8
        assert min(sizes) >= LEGIBLE_PX - 0.05


CUT_OFF = """() => [...document.querySelectorAll("main .math")].filter((each) => {
  const inner = each.querySelector(".katex-html").getBoundingClientRect();
  if (!inner.width || each.classList.contains("inline")) return inner.width && inner.right > innerWidth;
  const box = each.querySelector(".tex"), style = getComputedStyle(box);
  const told = style.overflowX === "auto" && (each.closest("table") || style.backgroundImage !== "none");
  return box.scrollWidth > box.clientWidth + 1 && !told;
}).map((each) => each.textContent.slice(0, 60))"""


def test_no_formula_loses_its_right_end_on_a_phone(visit, html):
    """It fits, is set smaller, or can be pulled aside and a shadow says so; names of functions stay whole."""
    with visit(width=390) as tab:
        for name in PAGES:
            assert tab.open(html / name).evaluate(CUT_OFF) == [], name
        broken = tab.open(html / "chapters" / "cheatsheet.html").evaluate(
            "() => [...document.querySelectorAll('table.cheatsheet code')].filter("
            "(each) => each.getClientRects().length > 1 || each.getBoundingClientRect().right > innerWidth).length"
        )
        assert broken == 0


def luminance(color: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_in_figures_and_outputs_stands_out(visit, html, scheme):
    """The paper is dark in dark mode, and what our cells draw on it is legible."""
    with visit(scheme=scheme) as tab:
        page = tab.open(html / "chapters" / "intro.html")
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        paper = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert (paper < 0.1) == (scheme == "dark")
        for selector in ("svg.dtlib-figure text", ".dtlib-slider svg[role=img] text", "table.dtlib-check td"):
            style = "e => { const s = getComputedStyle(e); return e.namespaceURI.endsWith('svg') ? s.fill : s.color; }"
            ink = luminance(page.locator(selector).first.evaluate(style))
            high, low = max(ink, paper), min(ink, paper)
            assert (high + 0.05) / (low + 0.05) >= 4.5, selector  # WCAG 2.2, 1.4.3
        backdrop = page.locator(".dtlib-slider").first.evaluate(
            "e => getComputedStyle(e.closest('.text_html') || e).backgroundColor"
        )
        assert backdrop == "rgba(0, 0, 0, 0)", "the theme's light box would hide the figure's text in dark mode"


def test_the_reader_can_choose_light_or_dark(visit, html):
    with visit() as tab:
        page = tab.open(html / "chapters" / "intro.html")
        themes = []
        for _ in range(3):
            page.locator(".theme-switch-button:visible").first.click()
            themes.append(page.evaluate("document.documentElement.dataset.theme"))
        assert {"light", "dark"} <= set(themes)


def test_search_finds_a_page_and_leaves_the_disk_alone(visit, html):
    with visit() as tab:
        page = tab.open(html / "search.html", "?q=all-reduce")
        page.wait_for_selector("#search-results li a[href*='glossary.html']")  # results come one by one
        page.locator("#search-results li a").first.click()
        page.wait_for_load_state()
        assert "/chapters/" in page.url
        assert tab.left == []
        assert tab.complaints == []


def test_a_search_leads_to_the_words_that_it_found(visit, html):
    """Not to the top of their page: the first of them is in the window, out of its fold if it was in one."""
    with visit() as tab:
        page = tab.open(html / "search.html", "?q=Ulysses")
        for name in ("cp", "glossary"):
            page.wait_for_selector(f"#search-results li a[href^='chapters/{name}.html']")
        page.locator("#search-results li a[href^='chapters/cp.html']").first.click()
        page.wait_for_load_state()
        page.wait_for_timeout(300)
        top = page.locator("main .highlighted").first.evaluate("each => each.getBoundingClientRect().top")
        assert 0 < top < 900
        assert page.evaluate("scrollY") > 0
        assert tab.complaints == []


def test_the_search_field_of_a_page_leads_to_the_results(visit, html):
    with visit() as tab:
        page = tab.open(html / "chapters" / "notation.html")
        page.keyboard.press("Control+k")
        page.locator("#pst-search-dialog input[type=search]").fill("bandwidth")
        page.keyboard.press("Enter")
        page.wait_for_url("**/search.html?q=bandwidth*")
        page.wait_for_selector("#search-results li a")


def test_code_can_be_copied(visit, html):
    with visit() as tab:
        page = tab.open(html / "chapters" / "intro.html")
        assert page.locator("button.copybtn").count() >= 1


def test_the_first_page_is_reached_from_the_index(visit, html):
    with visit() as tab:
        page = tab.open(html / "index.html")
        page.wait_for_url("**/chapters/intro.html")


# --- sliders ---------------------------------------------------------------------------------------------------


def shown(figure) -> dict:
    """What a reader sees: the position's text, and the readings by label."""
    labels = figure.locator("li:has(b) span").all_inner_texts()
    values = figure.locator("li b").all_inner_texts()
    return {"position": figure.locator("output").inner_text(), **dict(zip(labels, values, strict=True))}


def expected(n: int) -> dict:
    """The same, computed here."""
    return {
        "position": str(n),
        "naive": format_bytes(naive_all_reduce_bytes(GiB, n)),
        "ring": format_bytes(ring_all_reduce_bytes(GiB, n)),
    }


def test_keys_move_the_slider_and_it_shows_what_theory_says(visit, html):
    with visit() as tab:
        page = tab.open(html / "chapters" / "intro.html")
        figure = page.locator(".dtlib-slider").first
        control = figure.locator("input[type=range]")
        assert shown(figure) == expected(8)
        control.focus()
        for key, n in [("ArrowRight", 16), ("ArrowRight", 32), ("End", 1024), ("ArrowLeft", 512), ("Home", 2)]:
            page.keyboard.press(key)
            assert shown(figure) == expected(n), key
            assert control.get_attribute("aria-valuetext") == f"{n} ranks"
        assert tab.complaints == []


def test_dragging_moves_the_slider_and_it_shows_what_theory_says(visit, html):
    positions = [2**k for k in range(1, 11)]
    with visit() as tab:
        page = tab.open(html / "chapters" / "intro.html")
        figure = page.locator(".dtlib-slider").first
        control = figure.locator("input[type=range]")
        control.scroll_into_view_if_needed()
        box = control.bounding_box()
        thumb = 16  # pixels: Chromium's thumb, whose centre travels between half a thumb from either end
        where = [box["x"] + thumb / 2 + (box["width"] - thumb) * k / 9 for k in range(10)]
        middle = box["y"] + box["height"] / 2
        page.mouse.move(where[2], middle)
        page.mouse.down()
        seen = []
        for target in (5, 9, 0, 7):
            page.mouse.move(where[target], middle, steps=8)
            seen.append((shown(figure), positions[target]))
        page.mouse.up()
    for found, n in seen:
        assert found == expected(n)


@pytest.mark.parametrize("name", PAGES)
def test_every_slider_of_the_book_draws_its_numbers(visit, html, name):
    """At the ends and in the middle: readings, sentence and dots are those of the grid that numpy computed."""
    with visit() as tab:
        page = tab.open(html / name)
        for figure in page.locator(".dtlib-slider").all():
            data = json.loads(figure.locator("script[type='application/json']").inner_text())
            control = figure.locator("input[type=range]")
            for index in sorted({0, len(data["steps"]) // 2, len(data["steps"]) - 1}):
                control.evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", str(index))
                step = data["steps"][index]
                assert figure.locator("output").inner_text() == step["text"]
                assert figure.locator("li b").all_inner_texts() == step["readings"]
                assert control.get_attribute("aria-valuetext") == step["spoken"]
                assert re.search(r"\d.*(%|[a-zA-Z]{2})|[a-z]{3}.*\d", step["spoken"]), "a number with its unit"
                assert figure.locator("[role=img]").get_attribute("aria-label") == step["alt"]
                _dots_are_at(figure, data, step)
        assert tab.complaints == []


def _pixel(axis: dict, value: float) -> float:
    scale = np.asarray if axis["scale"] == "linear" else np.log
    low, high = scale(axis["limits"][0]), scale(axis["limits"][1])
    return float(axis["from"] + (axis["to"] - axis["from"]) * (scale(value) - low) / (high - low))


def _dots_are_at(figure, data: dict, step: dict) -> None:
    for dot, y in zip(figure.locator(".dot").all(), step["at"], strict=True):
        if y is None:
            assert not dot.is_visible()
            continue
        place = [float(dot.get_attribute("cx")), float(dot.get_attribute("cy"))]
        np.testing.assert_allclose(place, [_pixel(data["x"], step["probe"]), _pixel(data["y"], y)], atol=0.06)
    if step["curves"]:
        for curve, ys in zip(figure.locator("[role=img] .curve").all(), step["curves"], strict=True):
            drawn = np.array(re.findall(r"[ML]([\d.-]+) ([\d.-]+)", curve.get_attribute("d")), dtype=float)
            wanted = [
                (_pixel(data["x"], x), _pixel(data["y"], y))
                for x, y in zip(data["xs"], ys, strict=True)
                if y is not None
            ]
            np.testing.assert_allclose(drawn, wanted, atol=0.06)  # a tenth of a pixel is written


def test_without_javascript_the_slider_is_a_table(visit, html):
    with visit(javascript=False) as tab:
        page = tab.open(html / "chapters" / "intro.html")
        figure = page.locator(".dtlib-slider").first
        assert figure.locator("input[type=range]").is_disabled()
        assert figure.locator("table").is_visible()
        rows = [row.split("\t") for row in figure.locator("tbody").inner_text().strip().splitlines()]
        wanted = [list(expected(2**k).values()) for k in range(1, 11)]
        assert rows == wanted
        assert figure.locator("path.curve").first.is_visible()


def test_served_over_http_nothing_is_missing_either(visit, html):
    """`make serve` and a published copy: the browser asks for an icon too."""
    handler = partial(QuietHandler, directory=str(html))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, visit() as tab:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        tab.page.goto(home + "chapters/intro.html", wait_until="networkidle")
        assert tab.complaints == []
        assert [url for url in tab.requests if not url.startswith((home, "data:"))] == []
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass
