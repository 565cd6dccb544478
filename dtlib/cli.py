"""The command line: ``dtlib doctor | grade | ledger | memory | plan | release``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtlib.cli_memory import memory
from dtlib.cli_plan import plan
from dtlib.grading.command import grade

if TYPE_CHECKING:
    from rich.console import Console

    from dtlib.doctor import Examination
    from dtlib.lab.ledger import Coverage

# torch, rich and the rest of dtlib are imported by the command that needs them: --help answers at once.


class _Commands(click.Group):
    """Commands of which some need packages that `pip install .` leaves out."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except ModuleNotFoundError as error:
            if (error.name or "dtlib").startswith("dtlib"):
                raise  # a fault of ours
            from dtlib.doctor import INSTALL

            raise click.ClickException(f"this command needs {error.name}, which is not installed: {INSTALL}") from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dtlib-course", prog_name="dtlib")
def main() -> None:
    """The mathematics of distributed training: derived, run on real processes, and measured."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can measure, by trying it.

    Exit code 0 if the course runs here, 1 if something that it requires is missing. Things that only some
    measurements need (a private network, a GPU, Chromium) do not change it.
    """
    from dtlib.doctor import examine

    if as_json:
        examination = examine()
        click.echo(json.dumps(examination.as_dict(), indent=2, ensure_ascii=False))
    else:
        console = _console()
        with console.status("trying things out"):
            examination = examine()
        _print_findings(console, examination)
    raise SystemExit(0 if examination.healthy else 1)


@main.command()
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
        _print_coverage(_console(), coverage, file)
    if require_all and coverage.missing:
        raise SystemExit(1)


@main.command()
@click.argument("solutions", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path("solutions"))
@click.argument("exercises", type=click.Path(path_type=Path, file_okay=False), default=Path("exercises"))
@click.option("--check", is_flag=True, help="Write nothing; fail if EXERCISES are not what SOLUTIONS give.")
def release(solutions: Path, exercises: Path, check: bool) -> None:
    """Make the learners' notebooks: SOLUTIONS without what stands between the solution markers.

    From the course's own solutions, the programs by which mistakes on paper are recognised are made too.

    SOLUTIONS and EXERCISES are folders, "solutions" and "exercises" where they are not given. Exit code 0, or 1 for a
    notebook that cannot be released and, with --check, for exercises that have drifted.
    """
    from dtlib.grading.release import ReleaseError
    from dtlib.grading.release import release as make

    try:
        changed = make(solutions, exercises, check=check)
    except ReleaseError as error:
        raise click.ClickException(str(error)) from error
    if check:
        click.echo(f"{exercises} is what {solutions} gives")
    for path in changed:
        click.echo(f"wrote {path}")
    if not changed and not check:
        click.echo(f"{exercises} is up to date")


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


def _console() -> Console:
    from rich.console import Console

    return Console()


main.add_command(memory)
main.add_command(plan)
main.add_command(grade)

if __name__ == "__main__":
    main()
