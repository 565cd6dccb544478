"""Who hears the book, reads it without a mouse, or asks for less motion: axe in both themes; all pages in `soak`."""

from __future__ import annotations

from importlib.resources import files

import pytest

from .test_browser import PAGES

SAMPLE = {f"chapters/{stem}.html" for stem in ("intro", "pp", "planner", "cheatsheet", "ledger")} | {"search.html"}
EACH = [page if page in SAMPLE else pytest.param(page, marks=pytest.mark.soak) for page in PAGES]
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
OPENED = "() => document.querySelectorAll('main details').forEach((fold) => { fold.open = true; })"
FOUND = """async () => {
  const all = await axe.run(document, { resultTypes: ["violations"] });
  const named = await axe.run("main", { runOnly: ["label-content-name-mismatch"] });  // not among axe's usual ones
  return [...all.violations, ...named.violations]
    .filter((each) => ["serious", "critical"].includes(each.impact))
    .flatMap((each) => each.nodes.map((node) => `${each.id}: ${node.html.slice(0, 120)}`));
}"""


def findings(page) -> list[str]:
    """What axe finds serious or critical on the open page, its folds open too."""
    page.emulate_media(reduced_motion="reduce")  # a fold that is still fading in has the contrast of its moment
    page.evaluate(OPENED)
    page.wait_for_timeout(100)
    page.evaluate(AXE)
    return page.evaluate(FOUND)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", EACH)
def test_axe_finds_nothing_serious(visit, html, name, scheme):
    with visit(scheme=scheme) as tab:
        assert findings(tab.open(html / name)) == []


FAULTS = """() => { document.querySelector("main article").insertAdjacentHTML("beforeend", `
  <details open><summary aria-label="Toggle">Show the code</summary><p>x</p></details>
  <p style="color: #999; background: #fff">pale</p>
  <ul><p>no item</p></ul>
  <div style="width: 9em; overflow-x: auto"><div style="width: 99em">wide</div></div>`); }"""


def test_each_fault_is_found(visit, html):
    with visit() as tab:
        page = tab.open(html / "search.html")
        page.evaluate(FAULTS)
        rules = sorted(each.split(":")[0] for each in findings(page))
        assert rules == ["color-contrast", "label-content-name-mismatch", "list", "scrollable-region-focusable"]


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
    """On a phone equations scroll: the tab key stops there, and the arrows pull them aside."""
    scrolls = "() => document.querySelectorAll('main .tex[tabindex=\"0\"]').length"
    with visit(width=390) as tab:
        page = tab.open(html / "chapters" / "pp.html")
        assert page.evaluate(scrolls)
        box = page.locator("main .tex[tabindex='0']").first
        box.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(300)
        assert box.evaluate("each => each.scrollLeft") > 0
        page.set_viewport_size({"width": 1280, "height": 900})
        page.wait_for_timeout(100)
        assert page.evaluate(scrolls) == 0
