"""`dtlib doctor` on the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from dtlib.doctor import Examination


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can measure, by trying it.

    Exit code 0 if what is installed works here, 1 if something that it requires is missing. Extras that are not
    installed, and things that only some measurements need (a private network, a GPU, Chromium), do not change it.
    """
    from rich.console import Console

    from dtlib.doctor import examine

    if as_json:
        examination = examine()
        click.echo(json.dumps(examination.as_dict(), indent=2, ensure_ascii=False))
    else:
        console = Console()
        with console.status("trying things out"):
            examination = examine()
        _print_findings(console, examination)
    raise SystemExit(0 if examination.healthy else 1)


def _print_findings(console: Console, examination: Examination) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in examination.findings:
        mark = "[green]✓[/]" if finding.ok else "[red]✗[/]" if finding.required else "[yellow]–[/]"
        note = f"\n[dim]{escape(finding.note)}[/]" if finding.note else ""
        table.add_row(mark, finding.name, escape(finding.value) + note)
    console.print(table)
    console.print(escape(examination.verdict), style="green" if examination.healthy else "red", highlight=False)
