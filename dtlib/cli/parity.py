"""``dtlib parity``: a parallel step beside one process, from a file that has both."""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path

import click

# torch and dtlib.lab are imported by the function that needs them: --help answers at once.

_OPTIONS = ("batch", "split", "micro_batches", "places", "dtype", "seed", "memory_bytes", "timeout_s")


@click.command()
@click.argument("file", metavar="CHECK.py", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON: its keys are in `Report.json`.")
def parity(file: Path, as_json: bool) -> None:
    """Compare a parallel step with one process: what kind of mistake parts them, and over which axis.

    CHECK.py defines what `lab.parity` takes, by the same names: `reference`, `step` and `mesh`, and where there is need
    of them `batch`, `split`, `micro_batches`, `places`, `dtype`, `seed`, `memory_bytes` and `timeout_s`. With `meshes`,
    a list, in the place of `mesh` it compares on each, `step` takes the mesh before the batch, and the axes that are to
    blame are named.

    Exit code 0 where all agrees, 1 where something differs, 2 where nothing can be compared, as where a step raises.
    """
    from dtlib import lab

    try:
        names = runpy.run_path(str(file))
    except Exception as error:
        raise _no_report() from error
    lacking = [name for name in ("reference", "step") if name not in names]
    if lacking or ("mesh" in names) == ("meshes" in names):
        raise click.UsageError(f"{file} must define reference, step, and either mesh or meshes")
    functions, options = (names["reference"], names["step"]), {name: names[name] for name in _OPTIONS if name in names}
    try:
        report = (
            lab.parity(*functions, names["mesh"], **options)
            if "mesh" in names
            else lab.over_meshes(names["meshes"], *functions, **options)
        )
    except ValueError as error:
        raise click.UsageError(f"{file}: {error}") from error
    except Exception as error:
        raise _no_report() from error
    click.echo(report.json() if as_json else str(report))
    raise SystemExit(not report.agrees)


def _no_report() -> SystemExit:
    """What the file raised, shown; its exit code is not that of a difference."""
    traceback.print_exc()
    return SystemExit(2)
