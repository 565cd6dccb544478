"""`lab.parity` on steps by hand: right ones agree, each mistake is named with its axis, and bad input is said before
anything is sent."""

import doctest
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from dtlib import lab
from dtlib.cli import main
from dtlib.lab.parity import KINDS, Axes, Kind, Report, Reports, Row
from dtlib.lab.parity.judge import judge
from dtlib.lab.parity.pieces import flattened

from .known import known

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(12, 4, dtype=torch.float64, generator=GENERATOR)


def reference(x):
    w = torch.linspace(1, 2, 20, dtype=torch.float64).view(4, 5).requires_grad_()
    loss = (x @ w).tanh().square().mean()
    loss.backward()
    return {"w": w.detach(), "loss": loss.detach(), "grad": w.grad, "norm": w.grad.norm()}


def right(x):
    found = reference(x.tensor_split(dist.get_world_size())[dist.get_rank()])
    for name in ("loss", "grad"):
        dist.all_reduce(found[name])
        found[name] /= dist.get_world_size()
    return found | {"norm": found["grad"].norm()}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_right_step_agrees(n):
    report = lab.parity(reference, right, {"dp": n}, batch=(X,), raise_on_difference=True)
    assert report.agrees
    assert report.kind in ("equal", "rounding")
    assert report.first is None
    assert report.bisect() == "nothing differs"


def test_the_docstring_runs():
    import dtlib.lab.parity

    module = __import__("sys").modules[dtlib.lab.parity.__module__]
    assert doctest.testmod(module).failed == 0


def test_a_difference_is_raised_shown_and_written():
    def summed(x):
        found = right(x)
        return found | {"grad": 3 * found["grad"]}

    with pytest.raises(lab.ParityError, match="3 times too much, as by a sum over dp for a mean") as caught:
        lab.parity(reference, summed, {"dp": 3}, batch=(X,), raise_on_difference=True)
    report = caught.value.report
    assert (report.first.name, report.kind, report.axes) == ("grad", "sum for mean", ("dp",))
    assert "<table" in report._repr_html_()
    told = json.loads(report.json())
    assert told["rows"][2]["kind"] == "sum for mean"
    assert told["needs_bytes"] == report.needs_bytes > 0
    assert all(row["kind"] in KINDS for row in told["rows"])
    assert "loss: right" in report.bisect()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.pop("grad"), "no rank returned grad"),
        (lambda found: found.update(extra=torch.ones(2)), "rank 0 returned extra"),
        (lambda found: found.update(grad=torch.ones(4, 4)), r"'grad' on rank 0 \(dp 0\) has the shape \(4, 4\)"),
        (lambda found: found.update(grad=lab.piece(torch.ones(4, 5), tp=0)), "cut over tp, and the mesh has dp"),
        (lambda found: found.update(grad=lab.piece(torch.ones(4, 5), dp=0)), "does not fit into"),
        (lambda found: found.update(grad="text"), "must return tensors, numbers or pieces"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_said_before_it_is_sent(change, words):
    def step(x):
        found = right(x)
        change(found)
        return found

    with pytest.raises((ValueError, lab.RankError), match=words):
        lab.parity(reference, step, {"dp": 2}, batch=(X,))


def test_bad_arguments_are_refused():
    for words, arguments in (
        ("mesh must map names", {"mesh": {}}),
        ("size of axis dp", {"mesh": {"dp": 0}}),
        ("split must name axes", {"mesh": {"dp": 2}, "split": {"tp": 0}}),
        ("micro_batches", {"mesh": {"dp": 2}, "micro_batches": 0}),
        ("memory_bytes must be at least", {"mesh": {"dp": 2}, "memory_bytes": 10}),
        ("batch must be a tuple", {"mesh": {"dp": 2}, "batch": X}),
        ("must be a dimension of a tensor", {"mesh": {"dp": 2}, "split": {"dp": 5}}),
        ("dtype must be a floating dtype", {"mesh": {"dp": 2}, "dtype": "bf16"}),
        ("seed must be a whole number", {"mesh": {"dp": 2}, "seed": 1.5}),
        ("memory_bytes must be", {"mesh": {"dp": 2}, "memory_bytes": -1}),
        ("places must map patterns", {"mesh": {"dp": 2}, "places": {"grad": 0}}),
        ("places must name axes", {"mesh": {"dp": 2}, "places": {"grad": {"tp": 0}}}),
    ):
        with pytest.raises(ValueError, match=words):
            lab.parity(reference, right, **({"batch": (X,)} | arguments))
    grown = torch.zeros(2)
    with pytest.raises(ValueError, match="reference must begin anew at each call"):
        lab.parity(lambda: {"grown": grown.add_(1)}, right, {"dp": 2})
    with pytest.raises(ValueError, match="in one way"):
        lab.piece(X)
    with pytest.raises(ValueError, match="at must have an offset"):
        lab.piece(X, at=(1,))


def command(path, *options):
    done = CliRunner().invoke(main, ["parity", str(path), *options])
    return done.exit_code, done.stdout


def test_the_readme_says_what_it_says(tmp_path):
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    (script,) = (part for part in text.split("```python\n")[1:] if "def reference" in part)
    code, said = script.split("```")[0], " ".join(script.split("```")[1].split())
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 12
    path = tmp_path / "check.py"
    path.write_text(code)
    status, printed = command(path)
    assert status == 1
    assert said.split("prints *")[1].split("*")[0] in printed
    names = runpy.run_path(str(path))
    with pytest.raises(lab.ParityError, match="2 times too much, as by a sum over dp for a mean"):
        eval(said.split("In a test, `")[1].split("`")[0], {"lab": lab, **names})
    status, printed = command(path, "--json")
    told = json.loads(printed)
    assert (status, told["kind"], told["axes"], told["first"]) == (1, "sum for mean", ["dp"], "weight")
    assert set(told) == {"agrees", "kind", "axes", "first", "mesh", "needs_bytes", "rows"}
    path.write_text(code.replace("dist.all_reduce(grad)", "dist.all_reduce(grad); grad /= 2"))
    assert command(path)[0] == 0
    mistakes = [("mesh, batch", "mush"), ("return found", "return {}"), ("x.chunk(2)", "x.lump(2)"), ("def", "df")]
    for broken in (code.replace(*each) for each in mistakes):
        path.write_text(broken)
        assert command(path)[0] == 2
    (tmp_path / "beside.py").write_text(code)
    path.write_text("from beside import *\nprint('not JSON')")
    assert json.loads(command(path, "--json")[1]) == told
    path.write_text("raise SystemExit(0)")
    assert command(path)[0] == 2


def of_mesh(mesh, x):
    """Right but where the tokens are cut over cp: then a rank's part counts as if it were all."""
    found = reference(x.tensor_split(dist.get_world_size())[dist.get_rank()])
    for name in ("loss", "grad"):
        dist.all_reduce(found[name])
        found[name] /= mesh["dp"]
    return found | {"norm": found["grad"].norm()}


def test_over_several_meshes_the_axis_is_named():
    meshes = [{"dp": 2, "cp": 1}, {"dp": 1, "cp": 2}, {"dp": 2, "cp": 2}, {"dp": 3, "cp": 1}]
    options = {"batch": (X,), "split": {"dp": 0, "cp": 0}}
    found = lab.over_meshes(meshes, reference, of_mesh, **options)
    assert [report.agrees for report in found.reports] == [True, False, False, True]
    assert found.axes == ("cp",)
    assert "where it differs: wherever cp has several ranks, and nowhere else" in str(found)
    assert json.loads(found.json())["axes"] == ["cp"]
    assert [each["mesh"] for each in json.loads(found.json())["reports"]] == meshes
    with pytest.raises(lab.ParityError, match="wherever cp"):
        lab.over_meshes(meshes[1:2], reference, of_mesh, raise_on_difference=True, **options)
    assert Reports(found.reports[::3]).agrees
    with pytest.raises(ValueError, match="at least one mesh"):
        lab.over_meshes([], reference, of_mesh)


@pytest.mark.parametrize(
    ("meshes", "agrees", "axes"),
    [
        ([{"dp": 2, "tp": 2}, {"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}], [False, True, True], ("dp", "tp")),
        ([{"dp": 2, "tp": 2}, {"dp": 1, "tp": 1}], [False, False], ()),
        ([{"dp": 2}, {"dp": 3}], [False, True], ()),
        ([{"dp": 1, "tp": 1}, {"dp": 2, "tp": 2}], [True, False], ()),
    ],
)
def test_the_fewest_axes_that_part_wrong_from_right_are_to_blame(meshes, agrees, axes):
    bad = Kind("unknown")
    rows = [Row("w", (1,), Kind("equal") if right else bad, 0.0, ()) for right in agrees]
    found = Reports([Report([row], mesh) for row, mesh in zip(rows, meshes, strict=True)])
    assert found.axes == axes
    undecided = "wherever dp or tp has several ranks, and nowhere else (these meshes do not tell which)"
    assert (undecided in str(found)) == (agrees == [True, False])


def test_ranks_that_drew_other_batches_are_told_so():
    def script():
        torch.manual_seed(dist.get_rank())
        with pytest.raises(ValueError, match="batch must be the same on each rank, and rank 1 has another"):
            lab.parity(reference, right, {"dp": 2}, batch=(torch.randn(12, 4).double(),))

    lab.run(script, 2)


def test_it_works_in_ranks_that_are_up():
    def script():
        report = lab.parity(reference, lambda x: right(x) | {"loss": torch.tensor(0.5).double()}, {"dp": 2}, batch=(X,))
        with pytest.raises(ValueError, match="no rank returned w, loss and norm"):
            lab.parity(reference, lambda x: {"grad": right(x)["grad"]}, {"dp": 2}, batch=(X,))
        with pytest.raises(ValueError, match="finite numbers"):
            lab.parity(lambda x: {"loss": torch.tensor(torch.nan)}, right, {"dp": 2}, batch=(X,))
        return [row.name for row in report.differing]

    assert lab.run(script, 2) == [["loss"], ["loss"]]


def run_of(dtype, seed):
    """A layer with a sum over tokens, in a dtype, drawn by a seed."""
    generator = torch.Generator().manual_seed(seed)
    x, w, v = (torch.randn(size, generator=generator).to(dtype) for size in ((24, 16), (16, 32), (32, 8)))

    def one(x):
        a, b = w.clone().requires_grad_(), v.clone().requires_grad_()
        loss = ((x @ a).tanh() @ b).square().mean()
        loss.backward()
        return {"loss": loss.detach(), "b": b.grad, "a": a.grad}

    return one, x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seeds", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_rounding_is_not_accused_and_a_factor_is(dtype, seeds):
    """The mean over 3 ranks of what each finds, in their order: right in each seed, and wrong with a third of it."""

    for seed in range(seeds):
        one, x = run_of(dtype, seed)
        found = [one(part) for part in x.chunk(3)]
        mean = {name: sum(each[name] for each in found) / 3 for name in found[0]}
        expected = known(one, (x,), {"dp": 3}, torch.finfo(dtype).eps, {"dp": 0})
        for factor, kind in ((1, None), (3, "sum for mean")):
            held = [flattened({name: each * factor for name, each in mean.items()})] * 3
            report = judge(expected, held, Axes({"dp": 3}), 1)
            assert report.agrees == (factor == 1), f"seed {seed}: {report}"
            assert kind is None or (report.kind, report.axes) == (kind, ("dp",)), f"seed {seed}: {report}"


@pytest.mark.soak
def test_it_works_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\nfrom dtlib import lab\n\n"
        "def reference(x):\n    w = torch.ones(3, requires_grad=True)\n    (x @ w).square().mean().backward()\n"
        "    return {'grad': w.grad}\n\n"
        "def step(x):\n    found = reference(x.chunk(2)[dist.get_rank()])\n    dist.all_reduce(found['grad'])\n"
        "    return found\n\n"
        "print(lab.parity(reference, step, {'dp': 2}, batch=(torch.arange(12.0).view(4, 3),)).json())\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(each["kind"], each["axes"]) for each in told] == [("sum for mean", ["dp"])] * 2, done.stderr


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_what_is_smaller_than_its_own_rounding_is_called_not_checked(off):
    """A difference of large numbers: of this size is the rounding of float32."""

    def difference(x):
        return {"large": 1e6 + x, "small": (1e6 + x).square().sum() - (1e6 * torch.ones_like(x)).square().sum()}

    x = torch.ones(4)
    report = lab.parity(difference, lambda x: difference(x + off), {"dp": 1}, batch=(x,))
    assert report.agrees
    assert [row.is_checked for row in report.rows] == [True, False]
    assert "1 of 2 names agree, 1 are not checked" in str(report)
    assert "? small" in str(report)
    assert "not checked: its rounding is" in report._repr_html_()


def test_unknown_rows_are_shown_as_one():
    def noisy(x):
        torch.manual_seed(dist.get_rank())
        return {f"weight {n}": torch.randn(5, 5) for n in range(9)}

    def zeros(x):
        return {f"weight {n}": torch.arange(25.0).view(5, 5) for n in range(9)}

    said = str(lab.parity(zeros, noisy, {"dp": 1}, batch=(torch.zeros(2),)))
    assert said.count("unknown: ") == 2  # the summary's, and one row's
    assert "(and 8 more)" in said


def test_what_one_rank_raises_is_said_on_all_where_they_stand_together():
    def step(x):
        if dist.get_rank() == 1:
            raise KeyError("no such layer")
        return reference(x)

    def together():
        try:
            lab.parity(reference, step, {"dp": 2}, batch=(X,), timeout_s=30)
        except Exception as error:
            return type(error).__name__, str(error)

    (first, said), (second, _) = lab.run(together, 2)
    assert (first, second) == ("ValueError", "KeyError")
    assert said == "rank 1: KeyError('no such layer')"


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 3, 2), (2, 3, 0, 1)])
def test_what_a_few_elements_may_do_by_chance_is_no_explanation(order):
    """Stages in another order: no kind has that name, and in bfloat16 some element is near to half of what is due."""
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 4, generator=drawn).bfloat16(), torch.randn(16, 4, generator=drawn).bfloat16()

    def gradients(x, y, order, parts):
        torch.manual_seed(0)
        stages = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).bfloat16() for _ in range(4)]
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            for number in order:
                x_part = stages[number](x_part)
            (torch.nn.functional.cross_entropy(x_part, y_part.argmax(1)) / parts).backward()
        return [{f"grad/{k}.{n}": p.grad for n, p in stages[k].named_parameters()} for k in (3, 2, 1, 0)]

    def step(x, y):
        place = dist.get_rank()
        return {name: grad for each in gradients(x, y, order, 2)[1 - place :: 2] for name, grad in each.items()}

    def whole(x, y):
        return {name: grad for each in gradients(x, y, range(4), 1) for name, grad in each.items()}

    report = lab.parity(whole, step, {"pp": 2}, batch=(x, y), micro_batches=2)
    assert {row.kind.code for row in report.rows} <= {"unknown", "rounding", "factor", "some ranks", "rank alone"}
