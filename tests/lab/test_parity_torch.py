"""`lab.parity` on torch's own wrappers: right steps are not accused, and mistakes that are put into them are named."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch

from dtlib import lab
from dtlib.lab.parity import Axes
from dtlib.lab.parity.judge import judge, refusals
from dtlib.lab.parity.rounding import eps_of

from .known import known
from .torch_runs import ALL, RIGHT, WRONG, Net, data, on_a_rank


@functools.cache
def found(dtype):
    runs = RIGHT | WRONG
    options = {name: ALL | each[2] for name, each in runs.items()}
    by_rank = lab.run(on_a_rank, 2, args=([(each[1], options[n]["uneven"]) for n, each in runs.items()], dtype))
    with mock.patch.object(Net, "dtype", dtype):
        return {name: said(runs[name][0], options[name], [each[i] for each in by_rank]) for i, name in enumerate(runs)}


def said(mesh, options, held):
    axes = Axes(mesh)
    unit = max(eps_of(told.dtype) for each in held for told, _ in each.values())
    expected = reference_of(tuple(mesh.items()), *(options[key] for key in ("reference", "net", "uneven", "m")), unit)
    assert not (words := refusals(expected.told, [{n: t for n, (t, _) in each.items()} for each in held], axes)), words
    return judge(expected, held, axes, options["m"])


@functools.cache
def reference_of(mesh, function, net, uneven, m, unit):
    """The reference runs once for all steps that it is compared with."""
    cuts = {"dp": 0} if "dp" in dict(mesh) else {}
    return known(functools.partial(function, net), data(uneven), dict(mesh), unit, cuts, m)


DTYPES = [torch.float64, *(pytest.param(each, marks=pytest.mark.soak) for each in (torch.float32, torch.bfloat16))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_not_accused(name, dtype):
    assert found(dtype)[name].agrees, str(found(dtype)[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named_with_its_axis(name, dtype):
    report, (kind, axis) = found(dtype)[name], WRONG[name][3]
    assert report.kind == kind, str(report)
    assert axis is None or report.axes == (axis,), str(report)
