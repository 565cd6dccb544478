"""The calculator of the chapter on memory, in Chromium: its numbers are those that `dtlib memory` prints."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dtlib.cli import main
from dtlib.theory import footprint, hardware
from dtlib.theory.units import format_bytes


@pytest.fixture
def calculator(visit, html):
    with visit(width=390) as tab:
        figure = tab.open(html / "chapters" / "memory.html").locator(".dtlib-calculator")
        figure.scroll_into_view_if_needed()
        yield figure
        assert tab.complaints == []


def choose(figure, **values):
    for name, value in values.items():
        figure.locator(f"select[name={name}]").select_option(str(value))


def told(model, dp, zero, tp, recompute, device):
    options = {"model": model, "dp": dp, "zero": zero, "tp": tp, "recompute": recompute, "gpu": device, "recipe": "16"}
    arguments = [each for name, value in options.items() for each in (f"--{name}", str(value))]
    return json.loads(CliRunner().invoke(main, ["memory", *arguments, "--json"]).stdout)


GRID = [
    ("llama3-8b", 8, 1, 1, "none", "H100-80GB-SXM"),
    ("llama3-8b", 1, 0, 1, "full", "A100-80GB-SXM"),
    ("llama2-13b", 512, 3, 2, "selective", "A100-40GB-SXM"),
    ("llama3-70b", 64, 3, 8, "full", "H200-141GB-SXM"),
    ("gpt3-175b", 64, 2, 8, "none", "B200-180GB"),
    ("llama3-405b", 512, 3, 4, "full", "B200-180GB"),
]


def test_its_numbers_are_those_of_the_command(calculator):
    for choice in GRID:
        choose(calculator, **dict(zip(("model", "dp", "zero", "tp", "recompute", "device"), choice, strict=True)))
        expected = told(*choice)
        shown = dict(
            zip(
                calculator.locator("tbody th").all_inner_texts(),
                calculator.locator("tbody td:nth-child(2)").all_inner_texts(),
                strict=True,
            )
        )
        for part, num_bytes in expected["bytes"].items():
            assert shown.get(part.replace("_", " "), "0 B") == format_bytes(num_bytes), (choice, part)
        assert calculator.locator("tfoot td").first.inner_text() == format_bytes(expected["total_bytes"])
        verdict = calculator.locator(".verdict").inner_text()
        left = 0.9 * expected["device"]["memory_bytes"] - expected["total_bytes"]
        assert verdict.startswith("It fits: " if left >= 0 else "It does not fit: ")
        assert f"kept free, {format_bytes(abs(left), digits=3)} are" in verdict


EVERY = """(figure) => {
  const selects = [...figure.querySelectorAll("select")], found = [];
  const read = (selector) => [...figure.querySelectorAll(selector)].map((each) => each.textContent);
  const turn = (k) => {
    if (k < selects.length) {
      for (const option of selects[k].options) { option.selected = true; turn(k + 1); }
      return;
    }
    selects[0].dispatchEvent(new Event("input"));
    const chosen = selects.map((each) => each.value);
    const numbers = read("tbody td:nth-child(2), tfoot td:nth-child(2)");
    found.push([chosen, read("tbody th, tfoot th"), numbers, read(".verdict")[0]]);
  };
  turn(0);
  return found;
}"""


def test_every_choice_shows_the_numbers_of_the_library(calculator):
    """Ties of rounding and numbers from 1000 to 1023 among them, which JavaScript would write otherwise."""
    known, texts = {}, set()
    for chosen, names, numbers, verdict in calculator.evaluate(EVERY):
        model, dp, zero, tp, recompute, device = chosen
        setup = footprint.Setup(dp=int(dp), zero=int(zero), tp=int(tp), recompute=recompute)
        if (model, setup) not in known:
            memory = footprint.rank_memory(model, setup)
            parts = {part.name: format_bytes(part.value) for part in memory.table(zeros=True)}
            known[model, setup] = memory.total, parts | {"in all": format_bytes(memory.total)}
        total, expected = known[model, setup]
        shown = dict(zip(names, numbers, strict=True))
        assert shown == {name: expected[name] for name in shown}, chosen
        assert all(text == "0 B" for name, text in expected.items() if name not in shown), chosen
        left = 0.9 * hardware.accelerator(device).memory_bytes - total
        fits, are = ("It fits", "are left") if left >= 0 else ("It does not fit", "are missing")
        assert verdict.startswith(f"{fits}: "), chosen
        assert verdict.endswith(f" kept free, {format_bytes(abs(left), digits=3)} {are}."), chosen
        texts.add(verdict)
    assert len(known) > 1000
    assert len(texts) > 1000


def test_keys_choose(calculator):
    before = calculator.locator("tfoot td").first.inner_text()
    calculator.locator("select[name=tp]").focus()
    calculator.page.keyboard.press("ArrowDown")
    assert calculator.locator("tfoot td").first.inner_text() != before
