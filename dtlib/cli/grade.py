"""`dtlib grade` on the command line."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from dtlib.grading.classroom.report.record import Record
    from dtlib.grading.classroom.roster import Event
    from dtlib.grading.sandbox.walls.limits import Limits

# Everything else is imported by the command: --help answers at once.

_INTERRUPTED = "interrupted: run the same command again to grade the rest"


@click.command()
@click.argument("submissions", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder for the results.")
@click.option(
    "--seed", type=int, help="Draw the cases of this seed. Default: a new one each time, for those who are graded now."
)
@click.option("--jobs", type=int, metavar="N", help="How many exercises run at once. Default: one a core.")
@click.option("--chapter", "chapters", multiple=True, metavar="STEM", help="Only this chapter; may be repeated.")
@click.option("--exercise", "exercises", multiple=True, metavar="ID", help="Only this exercise; may be repeated.")
@click.option("--one-learner", is_flag=True, help="All of SUBMISSIONS is of one learner, named after the folder.")
@click.option("--fail-under", type=float, metavar="PERCENT", help="Exit with code 1 if anybody has less.")
@click.option("--timeout", type=float, metavar="SECONDS", help="What a rank may compute in a case. Default: 10.")
@click.option("--shard", metavar="K/N", help="Grade share K of N alone, for dtlib report; needs --seed.")
@click.option("--since", type=click.Path(path_type=Path), help="Earlier results, to be believed: keep who is as then.")
@click.option("--regrade", multiple=True, metavar="ID", help="Grade this exercise again, and keep all else as it is.")
@click.option("--fresh", is_flag=True, help="Grade again who is already graded.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def grade(
    submissions: Path,
    out: Path,
    fail_under: float | None,
    timeout: float | None,
    quiet: bool,
    shard: str | None,
    **options: Any,
) -> None:
    """Grade the notebooks in SUBMISSIONS: one notebook, or a folder with one file or one sub-folder a learner.

    Submissions run behind walls (see dtlib doctor) on cases drawn from the seed. What counts is the same for everybody:
    the chapters of which anybody handed in a notebook, or those that --chapter and --exercise name. A learner whom this
    machine graded is skipped by the next run, unless the notebook, the seed, what counts, the limits or dtlib itself
    changed. --timeout counts processor seconds, not waiting; the reference's own cost may raise it.

    With --shard a machine grades its share, fair by recorded cost, into a folder of its own; dtlib report joins them.

    \b
    The results folder holds
      report.html, report.md, scores.csv, results.json, junit.xml   for the instructor
      learners/NAME.json    all that is known of a learner, hidden checks included
      reports/NAME.md, feedback/NAME.html  for the learner
      gradescope/NAME.json  what Gradescope takes as its results.json

    \b
    Exit codes
      0    everybody is graded, and nobody is under --fail-under
      1    somebody is under --fail-under
      2    wrong usage; nothing was written
      3    the grader itself failed on something: the report says on what
      4    something was ended before anybody could tell what it earns: run it again
      130  interrupted; who is graded stays graded
    """
    from rich.console import Console

    from dtlib.grading.classroom.grader import GradeError
    from dtlib.grading.classroom.grader import grade as grade_all
    from dtlib.grading.classroom.shards import Shard

    checked(fail_under)
    if shard is not None:
        try:
            options["shard"] = Shard.parse(shard)
        except ValueError as error:
            raise click.UsageError(f"--{error}") from error
        if fail_under is not None:
            raise click.UsageError("--fail-under is for the whole class: give it to dtlib report, not with --shard")
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise click.UsageError(f"--timeout must be a positive number of seconds, not {timeout:g}")
    console = Console()
    try:
        with shown(console, quiet=quiet) as show:
            results = grade_all(submissions, out, limits=limits_of(timeout), progress=show, **options)
    except GradeError as error:
        raise click.UsageError(logged(str(error))) from error
    except KeyboardInterrupt:
        click.echo(_INTERRUPTED, err=True)
        raise SystemExit(130) from None
    except Exception as error:
        raise failed(error) from error
    if not quiet:
        tell(console, results, out)
    raise SystemExit(exit_code(results, fail_under))


def checked(fail_under: float | None) -> None:
    """Refuse a --fail-under that is no percentage."""
    if fail_under is not None and not 0 <= fail_under <= 100:
        raise click.UsageError(f"--fail-under must be from 0 to 100, not {fail_under:g}")


def failed(error: Exception) -> SystemExit:
    """Tell that the grader itself failed; what to raise. A package that is not installed is for `main` to tell."""
    if isinstance(error, ModuleNotFoundError) and not (error.name or "dtlib").startswith("dtlib"):
        raise error
    if not isinstance(error, OSError):
        click.echo(logged(traceback.format_exc()), err=True)
    click.echo(logged(f"Error: the grader itself failed: {type(error).__name__}: {error}"), err=True)
    return SystemExit(3)


def tell(console: Console, results: Record, out: Path) -> None:
    """The class, or a share of it, in a few lines."""
    from dtlib.grading.classroom.report.pages import summary_lines

    where = "a share, for dtlib report" if "shard" in results else "the report of the class"
    for line in [*summary_lines(results), f"{where}: {out if 'shard' in results else out / 'report.html'}"]:
        _print(console, line)


def limits_of(timeout: float | None) -> Limits:
    """The limits in which a rank may compute `timeout` seconds in a case; what bounds waiting grows in proportion."""
    from dtlib.grading.sandbox.walls.limits import Limits

    usual = Limits()
    if timeout is None:
        return usual
    more = max(1.0, timeout / usual.cpu_seconds)
    return Limits(
        timeout,
        wall_seconds=more * usual.wall_seconds,
        exercise_seconds=more * usual.exercise_seconds,
        idle_seconds=more * usual.idle_seconds,
    )


@contextmanager
def shown(console: Console, *, quiet: bool = False) -> Iterator[Callable[[Event], None]]:
    """Show events of `grade` on `console`: a bar on a terminal, a line a learner elsewhere; with `quiet`, nothing."""
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    if quiet:
        yield lambda event: None
    elif console.is_terminal and not console.is_dumb_terminal:
        columns = BarColumn(), TaskProgressColumn(), TimeRemainingColumn(compact=True)
        with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda event: bar.update(
                task, description=escape(event.words), completed=event.done, total=event.total
            )
    else:
        yield lambda event: _print(console, event.words) if event.is_line else None


def _print(console: Console, line: str) -> None:
    console.print(logged(line), markup=False, highlight=False, emoji=False, soft_wrap=True)


def logged(text: str) -> str:
    """`text` as a log may hold it: no line of it is a command to the system that keeps the log."""
    from dtlib.grading.classroom.report.text import log_lines

    return log_lines(text)


def exit_code(results: Record, fail_under: float | None, again: str = "Run the same command again") -> int:
    """Print what went wrong, and the exit code for the worst; `again` is what to do about what is not known."""
    faults, unknown = results["faults"], [f"{each['learner']} {each['exercise']}" for each in results["not_known"]]
    least = fail_under or 0
    here = [each for each in results["learners"] if each["status"] != "absent"]
    under = [f"{each['learner']} ({each['percent']:g} %)" for each in here if each["percent"] < least]
    if results["state"] == "interrupted":
        code, told = 130, _INTERRUPTED
    elif faults:
        first = "; ".join(" ".join(each.values()).strip() for each in faults[:3])
        code, told = 3, f"Error: the grader itself failed on {len(faults)}: {first}"
    elif unknown:
        code, told = 4, f"not known: {_some(unknown)}. {again}"
    elif under:
        code, told = 1, f"under {least:g} %: {_some(under)}"
    else:
        return 0
    click.echo(logged(told), err=True)
    return code


def _some(texts: list[str]) -> str:
    return ", ".join(texts[:10]) + (f" and {len(texts) - 10} more" if len(texts) > 10 else "")
