"""The course's promise: every registered formula has its evidence, and what is called measured was measured."""

from __future__ import annotations

import json
import re
import sys

import pytest

from dtlib import theory
from dtlib.lab import ledger

from .test_pages import soup


def test_every_registered_formula_has_evidence_in_the_book(ledger_file, html):
    found = ledger.coverage(ledger_file)
    assert found.missing == ()
    assert found.unregistered == ()


def test_a_formula_that_is_3_percent_off_fails_every_line_that_is_called_measured(ledger_file, html):
    """Of the numbers that the book holds; that the measured side does not move along is tried in test_off."""
    measured = [line for line in ledger.read(ledger_file) if line.evidence == "measured"]
    assert measured
    for line in measured:
        for theory_off in (line.theory * (1 + ledger.OFF), line.theory / (1 + ledger.OFF)):
            assert abs(line.measured - theory_off) > line.rtol * abs(theory_off), line


def test_measured_lines_come_from_pages_of_this_book(ledger_file, html):
    pages = {line.where for line in ledger.read(ledger_file)}
    assert pages
    assert [page for page in pages if not (html / f"{page}.html").is_file()] == []


def test_no_line_of_the_book_disagrees(ledger_file, html):
    assert [line.formula for line in ledger.read(ledger_file) if not line.passed] == []


def test_the_ledger_page_shows_every_formula_and_what_the_file_says(ledger_file, html):
    page = soup(html / "chapters" / "ledger.html")
    rows = {}
    for row in page.select("table.ledger tbody tr"):
        name = next(code.text for code in row.select("td p code") if code.find_parent("p").text == code.text)
        rows[name] = [cell.get_text(" ", strip=True) for cell in row.find_all("td")]
    assert set(rows) == set(theory.formulas())
    for entry in ledger.coverage(ledger_file).entries:
        _, _, evidence, where, ratio = rows[entry.formula.name]
        assert evidence == f"{entry.evidence}: {', '.join(entry.by)}"
        assert where == " , ".join(page.rsplit("/", 1)[-1] for page in entry.where)
        shown = float(re.match(r"[\d.e+-]+", ratio)[0])
        assert shown == pytest.approx(entry.worst_ratio, rel=1e-3)
        assert ("shown" in ratio) != entry.asserted
    assert str(ledger.coverage(ledger_file)) in page.get_text(" ", strip=True)


def test_a_row_of_the_ledger_leads_to_a_comparison_of_its_formula(ledger_file, html):
    page = soup(html / "chapters" / "ledger.html")
    links = [link["href"] for link in page.select("table.ledger td:nth-child(4) a")]
    assert len(links) >= len(theory.formulas())
    for link in links:
        file, _, target = link.partition("#")
        row = soup(html / "chapters" / file).find(id=target)
        assert row["data-formula"].replace(".", "-").replace("_", "-") == target.removeprefix("measured-"), link


def test_coverage_fails_on_a_formula_without_evidence(ledger_file, html, monkeypatch):
    """Proof that the first test can fail: add a formula, or take away its lines, or let them disagree."""
    registry = sys.modules["dtlib.theory.formula"]
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))

    @theory.formula("coverage.never_measured", source="derived here", chapter="dp")
    def never_measured() -> float:
        """A number that no page looks at."""
        return 1.0

    assert "coverage.never_measured" in ledger.coverage(ledger_file).missing


@pytest.mark.parametrize("fate", ["removed", "disagrees"])
def test_coverage_fails_when_the_lines_go(fate, tmp_path):
    name = "collectives.ring_all_reduce_bytes"
    line = {
        "formula": name, "theory": 1.0, "measured": 1.0, "ratio": 1.0, "by": "wire", "rtol": 0.0, "passed": True,
        "where": "chapters/x", "machine": "m", "time": "t", "run": "r", "versions": {},
    }  # fmt: skip
    file = tmp_path / "ledger.jsonl"
    file.write_text(json.dumps(line) + "\n")
    assert name not in ledger.coverage(file).missing
    file.write_text("" if fate == "removed" else json.dumps(line | {"passed": False}) + "\n")
    assert name in ledger.coverage(file).missing
