"""`dtlib release` on the command line."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("solutions", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path("solutions"))
@click.argument("exercises", type=click.Path(path_type=Path, file_okay=False), default=Path("exercises"))
@click.option("--check", is_flag=True, help="Write nothing; fail if EXERCISES are not what SOLUTIONS give.")
@click.option("--repository", default="", metavar="URL", help="Where GitHub has the course: adds links that open it.")
@click.option("--ref", default="", metavar="NAME", help="The branch or tag that the links open. Default: launch.")
def release(solutions: Path, exercises: Path, check: bool, repository: str, ref: str) -> None:
    """Make the learners' notebooks: SOLUTIONS without what stands between the solution markers.

    From the course's own solutions, the programs by which mistakes on paper are recognised are made too.

    SOLUTIONS and EXERCISES are folders, "solutions" and "exercises" where they are not given. Exit code 0, or 1 for a
    notebook that cannot be released and, with --check, for exercises that have drifted.
    """
    from dtlib.grading.exercises.release import release as make

    try:
        changed = make(solutions, exercises, check=check, repository=repository, ref=ref)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if check:
        click.echo(f"{exercises} is what {solutions} gives")
    for path in changed:
        click.echo(f"wrote {path}")
    if not changed and not check:
        click.echo(f"{exercises} is up to date")
