"""`dtlib ledger` on the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from dtlib.lab.ledger import Coverage


@click.command()
@click.option("--file", type=click.Path(path_type=Path), help="The ledger; default: see below.")
@click.option("--chapter", help="Only the formulas of this chapter.")
@click.option("--require-all", is_flag=True, help="Exit with code 1 if a formula has no evidence.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def ledger(file: Path | None, chapter: str | None, require_all: bool, as_json: bool) -> None:
    """Show every registered formula and its evidence: measured, compared, published, derived or defined.

    The ledger is the one that $DTLIB_LEDGER names, else that of the last `make book` in this folder or above, else
    your own, in which pages write that you run yourself. Exit code 0, or 1 with --require-all when a formula has no
    evidence.
    """
    from rich.console import Console

    from dtlib import theory
    from dtlib.lab import ledger as book

    if file is not None and not file.is_file():
        raise click.ClickException(f"there is no ledger at {file}")
    chapters = sorted({known.chapter for known in theory.formulas().values()})
    if chapter is not None and chapter not in chapters:
        raise click.ClickException(f"no formula belongs to chapter {chapter!r}; there are {', '.join(chapters)}")
    if file is None:
        file = (None if os.environ.get("DTLIB_LEDGER") else book.built_path()) or book.default_path()
    coverage = book.coverage(file, chapter=chapter)
    if as_json:
        rows = [entry.as_dict() for entry in coverage.entries]
        found = {"ledger": str(file), "formulas": rows, "counts": coverage.counts, "missing": coverage.missing}
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print_coverage(Console(), coverage, file)
    if require_all and coverage.missing:
        raise SystemExit(1)


def _print_coverage(console: Console, coverage: Coverage, path: Path) -> None:
    from rich.table import Table

    from dtlib.lab.row import format_ratio

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("formula", no_wrap=True)  # without its chapter, which has a line of its own
    table.add_column("evidence")
    table.add_column("worst ratio", justify="right")
    table.add_column("where", no_wrap=True, overflow="ellipsis", max_width=14)
    chapter = ""
    for entry in coverage.entries:
        stem, _, name = entry.formula.name.partition(".")
        if stem != chapter:
            table.add_row(f"[bold]{stem}[/]")
            chapter = stem
        if entry.worst_ratio is None:
            table.add_row(f"  {name}", "[red]none[/]", "", "")
            continue
        ratio = format_ratio(entry.worst_ratio) + ("" if entry.asserted else " (shown)")
        evidence = f"{entry.evidence}: {', '.join(entry.by)}"
        table.add_row(f"  {name}", evidence, ratio, ", ".join(Path(each).stem for each in entry.where))
    console.print(table)
    console.print(f"{coverage} ({path})", highlight=False)
    if len(coverage.missing) == len(coverage.entries):
        console.print("A page measures when it runs: `make book` runs all of them, JupyterLab one.", highlight=False)
