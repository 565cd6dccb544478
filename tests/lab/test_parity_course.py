"""`lab.parity` on the course's parallelisms: right steps are not accused, and each mistake is named with its axis."""

from __future__ import annotations

import functools
import json
import os
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtlib.ranks import pp, sp, tp
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.pp import executor
from dtlib.ranks.shared import replicas
from dtlib.ranks.shared.held import Held
from dtlib.ranks.threed import training
from tests.ranks.cp.test_gpt import gradients_of_keys_stay_where_they_were_found as keys_stay
from tests.ranks.pp.test_executor import forgetting, unscaled
from tests.ranks.threed.judge import GPT, LLAMA, ONE_KEY, case
from tests.ranks.threed.test_training import (
    along_dp_alone,
    everything_counts,
    no_positions,
    no_row,
    norm_alone,
    nothing,
    of_a_stage,
    own_tokens,
)

from .course_runs import reports

TIED = replace(GPT, num_layers=2)
UNTIED = replace(LLAMA, num_layers=2)
ONE = replace(ONE_KEY, num_layers=2)


def patched(*where, **options):
    return functools.partial(mock.patch.object, *where, **options)


@contextmanager
def reduced(axes, change, least=2):
    """All-reduces over `axes` of more than `least` elements are changed: ``change(real, tensor, group)``."""
    real, ranks = dist.all_reduce, {}

    def wrong(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        mesh = ranks.setdefault("mesh", Mesh(axes))
        along = [name for name, size in axes.items() if size > 1]
        if tensor.numel() < least or members != tuple(mesh.ranks(*along[:1])) or op != dist.ReduceOp.SUM:
            return real(tensor, op, group, async_op)
        work = change(lambda: real(tensor, op, group, False), tensor, members)
        return mock.Mock(wait=lambda *a: work) if async_op else None

    with mock.patch.object(dist, "all_reduce", wrong):
        yield


def times(factor):
    def change(real, tensor, members):
        real()
        tensor.mul_(factor)

    return change


def contributes(place, factor):
    def change(real, tensor, members):
        if members.index(dist.get_rank()) == place:
            tensor.mul_(factor)
        real()

    return change


def kept_by(place):
    """One rank goes on with what it had."""

    def change(real, tensor, members):
        own = tensor.clone()
        real()
        if members.index(dist.get_rank()) == place:
            tensor.copy_(own)

    return change


DP4 = case("dp 4", m=1, config=TIED)
DP4Z = case("dp 4", m=1, config=TIED, zero=2)
DP2M = case("dp 2, pp 2", m=2, config=UNTIED)


def over(axes, change):
    return functools.partial(reduced, axes, change)


FOUR = {"dp": 4}
MUTANTS = {
    "dp: sum for mean": (DP4, over(FOUR, times(4)), {}, "sum for mean", ("dp",)),
    "dp: divided twice": (DP4, over(FOUR, times(1 / 4)), {}, "mean for sum", ("dp",)),
    "dp: nothing sent": (DP4, patched(training.dp.BucketedDataParallel, "sync"), {}, "never reduced", ("dp",)),
    "dp: no broadcast": (DP4, patched(replicas, "broadcast"), {}, "not broadcast", ("dp",)),
    "dp: what rank 1 found is lost": (DP4, over(FOUR, contributes(1, 0.0)), {}, "part missing", ("dp",)),
    "dp: rank 2 counted twice": (DP4, over(FOUR, contributes(2, 2.0)), {}, "counted twice", ("dp",)),
    "dp: rank 3 keeps its own": (DP4, over(FOUR, kept_by(3)), {}, "rank alone", ("dp",)),
    "dp: a mean of the ranks' means": (DP4, patched(training.Training, "_tokens", own_tokens), {}, "mean of means",
                                       ("dp",)),
    "dp: all read rank 0's rows": (DP4, nullcontext, {"reads": lambda place: 0}, "same samples", ("dp",)),
    "dp: rank 2 reads rank 1's rows": (DP4, nullcontext, {"reads": lambda p: 1 if p == 2 else p}, "same samples",
                                       ("dp",)),
    "pp: the last micro-batch alone": (
        case("pp 2", m=4, config=UNTIED),
        lambda: mock.patch.object(executor._Batch, "_forward", forgetting(executor._Batch._forward)), {},
        "micro-batch missing", ("micro-batches",)),
    "pp: each micro-batch as a batch": (
        case("pp 2", m=4, config=UNTIED),
        lambda: mock.patch.object(executor._Batch, "_through", unscaled(executor._Batch._through)), {},
        "mean of means", ("micro-batches",)),
    "pp: tied ends, not added up": (case("pp 2, tp 2", config=TIED), patched(pp.Pipeline, "_add_up_tied"), {},
                                    "never reduced", ("pp",)),
    "pp: a norm of one stage": (case("dp 2, pp 2", config=UNTIED), patched(training, "clip_grad_norm", of_a_stage), {},
                                "norm", ("pp",)),
    "cp: gradients of keys, not sent home": (case("cp 2", m=1, config=TIED), keys_stay, {}, "never reduced", ("cp",)),
    "threed: not summed over cp": (case("dp 2, cp 2", config=TIED), patched(Mesh, "group", along_dp_alone), {},
                                   "never reduced", ("cp",)),
    "threed: not summed over dp": (case("dp 2, tp 2", config=TIED), patched(training.dp.BucketedDataParallel, "sync"),
                                   {}, "never reduced", ("dp",)),
    "threed: a mean of the ranks' means": (case("dp 2, cp 2", config=TIED),
                                           patched(training.Training, "_tokens", own_tokens), {}, "mean of means",
                                           ("dp", "cp")),
    "threed: a norm that counts copies": (case("dp 2, tp 2", config=TIED), patched(Held, "slices", everything_counts),
                                          {}, "norm", ("dp", "tp")),
    "tp: shared key heads, not summed": (case("dp 2, tp 2", config=ONE),
                                         patched(tp.ColumnParallelLinear, "shared_rows", no_row, create=True), {},
                                         "never reduced", ("tp",)),
    "tp: forward, not summed": (case("tp 4", config=TIED), over({"tp": 4}, lambda real, tensor, members: None), {},
                                "never reduced", ("tp",)),
    "tp: forward, a mean": (case("tp 4", config=TIED), over({"tp": 4}, times(1 / 4)), {}, "mean for sum", ("tp",)),
    "tp: forward, twice": (case("tp 4", config=TIED), over({"tp": 4}, times(4)), {}, "once per rank", ("tp",)),
    "sp: norms, not summed over tp": (case("dp 2, tp 2", config=TIED, sequence_parallel=True),
                                      patched(sp.SplitNorm, "forward", norm_alone), {}, "never reduced", ("tp",)),
    "sp: positions, not summed over tp": (case("pp 2, tp 2", config=TIED, sequence_parallel=True),
                                          patched(sp.SplitTokens, "share", no_positions), {}, "never reduced",
                                          ("tp",)),
    "sp: nothing summed over tp": (case("cp 2, tp 2", config=TIED, sequence_parallel=True),
                                   patched(sp.SplitTokens, "share", nothing), {}, "never reduced", ("tp",)),
}  # fmt: skip
RIGHT = [
    DP4, DP4Z, DP2M, case("dp 4", m=1, config=TIED, zero=1), case("dp 4", m=1, config=UNTIED, zero=3),
    case("tp 4", config=TIED), case("tp 2, cp 2", config=TIED), case("pp 2, tp 2", config=TIED, sequence_parallel=True),
    case("dp 2, cp 2", config=TIED), case("cp 2", m=1, config=TIED), case("dp 2, tp 2", config=UNTIED),
    case("dp 2, pp 2", "ZB-H1", m=4, config=TIED),
]  # fmt: skip

DTYPES = [torch.float64, *(pytest.param(each, marks=pytest.mark.soak) for each in (torch.float32, torch.bfloat16))]


def is_quick(each):
    return each.axes in (DP4.axes, (("tp", 4),))


@functools.cache
def found(quick, dtype):
    """What is said of every mutant, by the ranks they take."""
    said = {}
    for n in (4,) if quick else (2, 4):
        some = {name: each for name, each in MUTANTS.items() if size(each[0]) == n and is_quick(each[0]) == quick}
        runs = [(in_dtype(each, dtype), mutant, change) for each, mutant, change, *_ in some.values()]
        said |= dict(zip(some, reports(n, runs), strict=True))
    if where := os.environ.get("DTLIB_PARITY_TABLE"):
        rows = {name: [*MUTANTS[name][3:], r.kind, r.axes, str(r)] for name, r in said.items()}
        Path(f"{where}.{quick}.{dtype}").write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    return said


def size(each):
    return functools.reduce(lambda a, b: a * b[1], each.axes, 1)


def in_dtype(each, dtype):
    return replace(each, config=replace(each.config, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_right_steps_are_not_accused(quick, dtype):
    for n in {size(each) for each in RIGHT if is_quick(each) == quick}:
        runs = [
            (in_dtype(each, dtype), nullcontext, {}) for each in RIGHT if size(each) == n and is_quick(each) == quick
        ]
        for (each, *_), report in zip(runs, reports(n, runs), strict=True):
            assert report.agrees, f"{each}: {report}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", [n if is_quick(each[0]) else pytest.param(n, marks=pytest.mark.soak) for n, each in MUTANTS.items()]
)
def test_a_mistake_is_named_with_its_axis(name, dtype):
    report, (*_, kind, axes) = found(is_quick(MUTANTS[name][0]), dtype)[name], MUTANTS[name]
    assert (report.kind, report.axes) == (kind, axes), str(report)
