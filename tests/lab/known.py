"""What one process knows before ranks are judged: as `lab.parity` finds it, for tests that bring the ranks' tensors."""

from __future__ import annotations

from dtlib.lab.parity import Axes
from dtlib.lab.parity.expected import Reference


def known(reference, batch, mesh, unit, cuts=None, m=1):
    """The tensors of `reference`, how far roundings of `unit` move them and, with `cuts`, what each part adds."""
    source = Reference(reference, batch, 0)
    expected = source.whole()
    source.measure(expected, unit)
    if cuts is not None:
        source.split(expected, Axes(mesh), cuts, m)
    return expected
