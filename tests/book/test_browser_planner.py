"""The planner of its chapter, in Chromium: its numbers and its words are those of `dtlib plan`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dtlib.cli import main
from dtlib.theory.units import GiB, format_bytes, format_seconds


@pytest.fixture
def planner(visit, html):
    with visit(width=390) as tab:
        figure = tab.open(html / "chapters" / "planner.html").locator(".dtlib-planner")
        figure.scroll_into_view_if_needed()
        yield figure
        assert tab.complaints == []


def choose(figure, **values):
    for name, value in values.items():
        figure.locator(f"select[name={name}]").select_option(str(value))


def asked(model, card, gpus, *more):
    return CliRunner().invoke(main, ["plan", model, "--card", card, "--gpus", str(gpus), *more], env={"COLUMNS": "800"})


@pytest.mark.parametrize(
    ("model", "card", "gpus"),
    [("llama3-70b", "H100", 512), ("llama3-8b", "A100", 8), ("gpt3-175b", "B200", 4096), ("llama3-405b", "H100", 4096)],
)
def test_its_numbers_are_those_of_the_command(planner, model, card, gpus):
    choose(planner, model=model, card=card, cards=gpus)
    found = json.loads(asked(model, card, gpus, "--json").stdout)
    best = found["plans"][0]
    rows = planner.locator(".plans tbody tr")
    for row, plan in zip(rows.all(), found["plans"], strict=False):
        cells = row.locator("td").all_inner_texts()
        degrees = [str(plan["plan"][axis]) for axis in ("dp", "tp", "pp", "cp", "zero")]
        kept = "+sp*" if plan["plan"]["keep_gathered"] else "+sp"
        degrees[1] += kept if plan["plan"]["sequence_parallel"] else ""
        assert cells[:5] == degrees
        assert cells[5] == f"{plan['plan']['micro_batch']}×{plan['plan']['micro_batches']}"
        assert cells[8] == f"{plan['bytes']['total'] / GiB:.0f}±{plan['fit']['margin_bytes'] / GiB:.0f}"
        assert cells[9:11] == [format_seconds(plan["seconds"]["total"]), f"{plan['mfu']:.1%}"]
        assert cells[11] in (("≟",) if plan["unknown"] else ("", "≈" * plan["ties"]))
    shown = dict(
        zip(
            planner.locator(".terms th").all_inner_texts(),
            planner.locator(".terms td:nth-child(2)").all_inner_texts(),
            strict=True,
        )
    )
    for terms, form in ((best["seconds"], format_seconds), (best["bytes"], format_bytes)):
        for name, value in terms.items():
            if name != "total" and value:
                assert shown.pop(name.replace("_", " ")) == form(value)
    assert not shown
    printed = asked(model, card, gpus).stdout
    for sentence in planner.locator("li").all_inner_texts():
        assert sentence in printed


def test_what_does_not_fit_is_told_as_the_command_tells_it(planner):
    choose(planner, model="llama3-405b", card="A100", cards=8)
    said = planner.locator(".none").inner_text()
    result = asked("llama3-405b", "A100", 8)
    assert result.exit_code == 2
    assert said in result.output.replace("--gpus", "gpus")
    assert "do (dp" in said


WIDER = """(figure) => {
  const selects = [...figure.querySelectorAll("select")], found = [];
  const turn = (k) => {
    if (k < selects.length) {
      for (const option of selects[k].options) { option.selected = true; turn(k + 1); }
      return;
    }
    selects[0].dispatchEvent(new Event("input"));
    const boxes = [figure, ...figure.querySelectorAll(".plans, .terms")];
    const wide = boxes.some((each) => each.scrollWidth > each.clientWidth + 1);
    found.push([selects.map((each) => each.value).join(" "), wide]);
  };
  turn(0);
  return found;
}"""


def test_no_choice_is_wider_than_a_phone(planner):
    found = planner.evaluate(WIDER)
    assert len({choice for choice, _ in found}) == len(found) >= 40
    assert [choice for choice, wide in found if wide] == []


def test_keys_choose(planner):
    before = planner.locator(".step").inner_text()
    planner.locator("select[name=cards]").focus()
    planner.page.keyboard.press("ArrowDown")
    assert planner.locator(".step").inner_text() != before
