"""`dtlib report` on the command line."""

from __future__ import annotations

from pathlib import Path

import click

from .grade import checked, exit_code, failed, logged, tell

# Everything else is imported by the command: --help answers at once.

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("shards", nargs=-1, required=True, type=_FILE)
@click.option("--out", required=True, type=_FILE, help="The folder for the results.")
@click.option("--roster", type=_FILE, metavar="CSV", help="Who is in the class: id, and name, email, deadline, ….")
@click.option("--by-hand", type=_FILE, metavar="CSV", help="Points and comments: learner, exercise, points, comment.")
@click.option("--deadline", default="", metavar="TIME", help="Such as 2026-11-27T18:00Z; the roster may have others.")
@click.option("--late-penalty", default=0.0, metavar="PERCENT", help="What a day late costs of the points. Default: 0.")
@click.option("--title", default="dtlib", metavar="TEXT", help="The assignment, for canvas.csv and moodle.csv.")
@click.option("--anonymous", type=_FILE, metavar="FOLDER", help="Name nobody; the secret salt and who is who go there.")
@click.option("--since", type=_FILE, metavar="FOLDER", help="The earlier results that the shares were graded with.")
@click.option("--fail-under", type=float, metavar="PERCENT", help="Exit with code 1 if anybody has less.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def report(
    shards: tuple[Path, ...],
    out: Path,
    roster: Path | None,
    by_hand: Path | None,
    deadline: str,
    late_penalty: float,
    title: str,
    anonymous: Path | None,
    since: Path | None,
    fail_under: float | None,
    quiet: bool,
) -> None:
    """Join the folders SHARDS, which dtlib grade wrote, into one report of the class: all its shares, or a whole class.

    All shards of one class have to be there, each once and complete; with another seed, other submissions or another
    version nothing is joined. The scores are those of one machine with that seed. The folders are believed as they
    stand: take them from where learners cannot write. Exit codes are those of dtlib grade.

    With a roster, who handed in no notebook is absent, who is not in it is told; canvas.csv and moodle.csv are written.
    """
    from rich.console import Console

    from dtlib.grading.classroom.anonymous import Pseudonyms
    from dtlib.grading.classroom.gradebook import Gradebook, read_by_hand, read_roster
    from dtlib.grading.classroom.shards import join

    checked(fail_under)
    if not title.strip():
        raise click.UsageError("--title must not be empty")
    if since is not None and not since.is_dir():
        raise click.UsageError(f"--since must be a folder that is there, not {since}")
    try:
        book = Gradebook(
            read_roster(roster) if roster else None,
            read_by_hand(by_hand) if by_hand else {},
            deadline,
            late_penalty,
            Pseudonyms(anonymous, out) if anonymous else None,
        )
        results = join(shards, out, book, title, since)
    except ValueError as error:
        raise click.UsageError(logged(str(error))) from error
    except Exception as error:
        raise failed(error) from error
    if not quiet:
        tell(Console(), results, out)
    raise SystemExit(exit_code(results, fail_under, "Run the shards that had them again, and join again"))
