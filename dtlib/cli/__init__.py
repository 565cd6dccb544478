"""``dtlib doctor | explain | grade | ledger | memory | parity | plan | release | report``, a module each."""

from __future__ import annotations

from typing import Any

import click

from .doctor import doctor
from .explain import explain
from .grade import grade
from .ledger import ledger
from .memory import memory
from .parity import parity
from .plan import plan
from .release import release
from .report import report

# torch, numpy, rich and the rest of dtlib are imported by the command that needs them: --help answers at once.


class _Commands(click.Group):
    """Commands of which some need packages that `pip install .` leaves out."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except ModuleNotFoundError as error:
            if (error.name or "dtlib").startswith("dtlib"):
                raise  # a fault of ours
            from dtlib.doctor import install

            raise click.ClickException(
                f"this command needs {error.name}, which is not installed: {install()}"
            ) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dtlib-course", prog_name="dtlib")
def main() -> None:
    """The mathematics of distributed training: derived, run on real processes, and measured."""


for command in (doctor, explain, grade, ledger, memory, parity, plan, release, report):
    main.add_command(command)
