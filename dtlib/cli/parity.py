"""``dtlib parity``: a parallel step beside one process, from a file that has both."""

from __future__ import annotations

import runpy
import sys
import traceback
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

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

    Exit code 0 where no name differs (the report says which could not be checked), 1 where one does, 2 where nothing
    can be compared, as where a step raises.
    """
    import dtlib.lab  # noqa: F401 - where the extra is missing, the command says so

    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():  # what the file prints is no JSON
            report = _compared(file)
    except click.UsageError:
        raise
    except ValueError as error:
        raise click.UsageError(f"{file}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the file does, it is no report that something differs
        traceback.print_exc()
        raise click.UsageError(f"{file} ended before there was anything to compare: {error!r:.200}") from error
    click.echo(report.json() if as_json else str(report))
    raise SystemExit(not report.agrees)


def _compared(file: Path) -> Any:
    from dtlib import lab

    sys.path.insert(0, str(file.resolve().parent))  # as where it runs alone
    names = runpy.run_path(str(file))
    lacking = [name for name in ("reference", "step") if name not in names]
    if lacking or ("mesh" in names) == ("meshes" in names):
        raise click.UsageError(f"{file} must define reference, step, and either mesh or meshes")
    functions, options = (names["reference"], names["step"]), {name: names[name] for name in _OPTIONS if name in names}
    if "mesh" in names:
        return lab.parity(*functions, names["mesh"], **options)
    return lab.over_meshes(names["meshes"], *functions, **options)
