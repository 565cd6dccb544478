"""What every benchmark does around its measurements: say where it ran, show a table, keep the numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dtlib import lab
from dtlib.lab import here

RESULTS = Path(__file__).parent / "results"
console = Console(width=max(Console().width, 110))


def device() -> str:
    """The machine as part of a file name: ``"cpu-2-cores"``, ``"nvidia-h200"``."""
    words = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"cpu {here.cores()} cores"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def print_header() -> None:
    """Where and with what the following numbers are measured."""
    versions = ", ".join(f"{name} {version}" for name, version in here.versions().items())
    console.print(f"[bold]{here.machine()}[/] ({device()}); {versions}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table with the first column to the left and numbers to the right."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def ratio_cells(ratio: lab.Ratio) -> list[str]:
    """The median of a ratio and its middle half, as two cells of a table."""
    return [f"{ratio.median:.3f}", f"{ratio.low:.3f} – {ratio.high:.3f}"]


def save(name: str, measured: dict[str, Any]) -> Path:
    """Write `measured` with the machine, the versions and the time to ``results/<name>-<device>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{device()}.json"
    about = {"machine": here.machine(), "versions": here.versions(), "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}"}
    path.write_text(json.dumps({**about, **measured}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
