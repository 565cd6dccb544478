"""Who hears the book, reads it without a mouse, or asks for less motion: axe in both themes; all pages in `soak`."""

from __future__ import annotations

from importlib.resources import files

import pytest

from .test_browser import PAGES

SAMPLE = {"chapters/intro.html", "chapters/grading.html", "chapters/bibliography.html", "search.html"}
EACH = [page if page in SAMPLE else pytest.param(page, marks=pytest.mark.soak) for page in PAGES]
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
OPENED = "() => document.querySelectorAll('main details').forEach((fold) => { fold.open = true; })"
FOUND = """async (options) => {
  const all = await axe.run(document, { ...options, resultTypes: ["violations"] });
  return all.violations.filter((each) => ["serious", "critical"].includes(each.impact))
    .flatMap((each) => each.nodes.map((node) => `${each.id}: ${node.html.slice(0, 120)}`));
}"""
WITHOUT_FORMULAS = "() => document.querySelectorAll('.katex').forEach((each) => each.replaceWith('x'))"
"""Their ink is that of the text around them, and looking at each of their parts takes most of the time."""
CONTRAST = "color-contrast"
NAMES = "label-content-name-mismatch"  # not among axe's usual rules


def findings(page, *, contrast: bool) -> list[str]:
    """What axe finds serious or critical on the open page, its folds open too: contrast, or all other rules."""
    page.emulate_media(reduced_motion="reduce")  # a fold that is still fading in has the contrast of its moment
    page.evaluate(OPENED)
    page.wait_for_timeout(100)
    page.evaluate(AXE)
    if not contrast:
        rules = {CONTRAST: {"enabled": False}, NAMES: {"enabled": True}}
        return page.evaluate(FOUND, {"rules": rules})
    page.evaluate(WITHOUT_FORMULAS)
    return page.evaluate(FOUND, {"runOnly": [CONTRAST]})


@pytest.mark.parametrize("name", EACH)
def test_axe_finds_nothing_serious(visit, html, name):
    with visit() as tab:
        assert findings(tab.open(html / name), contrast=False) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", EACH)
def test_all_text_stands_out(visit, html, name, scheme):
    with visit(scheme=scheme) as tab:
        assert findings(tab.open(html / name), contrast=True) == []


FAULTS = """() => { document.querySelector("main").insertAdjacentHTML("beforeend", `
  <details open><summary aria-label="Toggle">Show the code</summary><p>x</p></details>
  <p style="color: #999; background: #fff">pale</p>
  <ul><p>no item</p></ul>
  <div style="width: 9em; overflow-x: auto"><div style="width: 99em">wide</div></div>`); }"""


def test_each_fault_is_found(visit, html):
    with visit() as tab:
        page = tab.open(html / "search.html")
        page.evaluate(FAULTS)
        rules = sorted({each.split(":")[0] for each in findings(page, contrast=False)})
        assert rules == [NAMES, "list", "scrollable-region-focusable"]
        assert [each.split(":")[0] for each in findings(page, contrast=True)] == [CONTRAST]


MOVING = """() => [...document.querySelectorAll("*")].filter((each) => {
  const style = getComputedStyle(each);
  const lasts = (times) => times.split(",").some((time) => parseFloat(time) > 0);
  return (style.animationName !== "none" && lasts(style.animationDuration)) || lasts(style.transitionDuration)
    || style.scrollBehavior === "smooth";
}).length"""


def test_who_asks_for_less_motion_gets_none(visit, html):
    with visit() as tab:
        page = tab.open(html / "chapters" / "intro.html")
        page.evaluate(OPENED)
        assert page.evaluate(MOVING)
        page.emulate_media(reduced_motion="reduce")
        assert page.evaluate(MOVING) == 0


def test_what_scrolls_is_reached_by_the_keyboard_and_what_fits_is_not(visit, html):
    """On a phone figures and code scroll: the tab key stops there, and the arrows pull them aside."""
    with visit(width=390) as tab:
        page = tab.open(html / "chapters" / "intro.html")
        box = page.locator("main [data-scrolls]").first
        box.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("each => each.scrollLeft > 0", arg=box.element_handle())
        page.set_viewport_size({"width": 1280, "height": 900})
        page.wait_for_function("() => !document.querySelector('main .output[data-scrolls]')")
