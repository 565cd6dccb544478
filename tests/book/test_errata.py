"""The page of errata asserts that each claim is judged; here: that a claim with a number is held against it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def unasserted(claims: dict[str, dict], sources: list[str]) -> set[str]:
    """Claims with a number that no cell with an assertion reads."""
    asserting = "\n".join(source for source in sources if re.search(r"^ *assert ", source, re.MULTILINE))
    numbered = {name for name, row in claims.items() if re.fullmatch(r"-?[\d.]+", row["value"])}
    return {name for name in numbered if f'"{name}"' not in asserting}


def test_every_claim_with_a_number_is_held_against_it():
    with (ROOT / "chapters/data/claims.csv").open(encoding="utf-8", newline="") as file:
        claims = {row["id"]: row for row in csv.DictReader(file)}
    page = json.loads((ROOT / "chapters/errata.ipynb").read_text("utf-8"))
    assert unasserted(claims, ["".join(cell["source"]) for cell in page["cells"]]) == set()


def test_a_number_that_nobody_reads_is_found():
    claims = {"e-01": {"value": "3"}, "e-02": {"value": "4"}, "e-03": {"value": ""}, "e-04": {"value": "15-25"}}
    assert unasserted(claims, ['assert value["e-01"] == 3', 'shown = value["e-02"]']) == {"e-02"}
