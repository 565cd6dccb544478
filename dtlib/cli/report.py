"""`dtlib report` on the command line."""

from __future__ import annotations

from pathlib import Path

import click

from .grade import checked, exit_code, failed, logged, tell

# Everything else is imported by the command: --help answers at once.


@click.command()
@click.argument("shards", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder for the results.")
@click.option("--fail-under", type=float, metavar="PERCENT", help="Exit with code 1 if anybody has less.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def report(shards: tuple[Path, ...], out: Path, fail_under: float | None, quiet: bool) -> None:
    """Join the folders SHARDS, which dtlib grade --shard wrote, into one report of the class.

    All shards of one class have to be there, each once and complete; with another seed, other submissions or another
    version nothing is joined. The scores are those of one machine with that seed. The folders are believed as they
    stand: take them from where learners cannot write. Exit codes are those of dtlib grade.
    """
    from rich.console import Console

    from dtlib.grading.classroom.shards import JoinError, join

    checked(fail_under)
    try:
        results = join(shards, out)
    except JoinError as error:
        raise click.UsageError(logged(str(error))) from error
    except Exception as error:
        raise failed(error) from error
    if not quiet:
        tell(Console(), results, out)
    raise SystemExit(exit_code(results, fail_under, "Run the shards that had them again, and join again"))
