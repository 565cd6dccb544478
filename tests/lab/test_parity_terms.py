"""`lab.parity` on mistakes that are no sum over parts of the batch, on a small net:
a term counted otherwise, what is reduced too late, copies that come apart, a coarser dtype."""

import functools

import pytest
import torch

from dtlib.lab.parity import Axes
from dtlib.lab.parity.judge import judge
from dtlib.lab.parity.pieces import flattened

from .known import known

MESH = {"dp": 2, "tp": 2}
RATE, DECAY, LARGEST = 0.1, 0.05, 0.3
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def net(x, *, clip=False, decay=DECAY, rate=RATE, biases=1, scale=1.0, grads=None):
    """A step of gradient descent with weight decay on a net with a hidden layer; the keywords are mistakes."""
    draw = torch.Generator().manual_seed(3)
    start = {n: torch.randn(s, generator=draw).to(x.dtype) / 2 for n, s in (("up", (6, 16)), ("b", (16,)),
                                                                           ("down", (16, 8)))}  # fmt: skip
    up, b, down = (each.clone().requires_grad_() for each in start.values())
    hidden = x @ up + b * biases
    loss = (hidden.tanh() @ down).square().mean()
    loss.backward()
    found = {n: scale * p.grad for n, p in zip(start, (up, b, down), strict=True)} if grads is None else grads
    if clip:
        found = {n: g * min(1.0, LARGEST / g.norm().item()) for n, g in found.items()}
    after = {n: w - rate * (found[n] + decay * w) for n, w in start.items()}
    return (
        {f"start/{n}": w for n, w in start.items()}
        | {"hidden": hidden.detach(), "loss": loss.detach()}
        | {f"grad/{n}": g for n, g in reversed(found.items())}
        | {f"weight/{n}": w for n, w in after.items()}
    )


def batch(dtype):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


@functools.cache
def measured(dtype, clip=False):
    return known(functools.partial(net, clip=clip), (batch(dtype),), MESH, torch.finfo(dtype).eps, {"dp": 0})


def said(found, dtype=torch.float64, clip=False):
    """What is said of what four ranks found: of the same on each, or of a list."""
    each = found if isinstance(found, list) else [found] * 4
    return judge(measured(dtype, clip), [flattened(one) for one in each], Axes(MESH), 1)


def mean_of_parts(dtype, **options):
    parts = [net(part, **options) for part in batch(dtype).chunk(2)]
    return {n: (parts[0][n] + parts[1][n]) / 2 for n in parts[0] if n != "hidden"} | {
        "hidden": net(batch(dtype))["hidden"]
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_step_is_not_accused_and_says_what_it_cannot_see(dtype):
    report = said(mean_of_parts(dtype), dtype)
    assert report.agrees, str(report)
    assert ("% off unseen" in report.summary()) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("options", "first", "words"),
    [
        ({"decay": 2 * DECAY}, "weight/up", "-0.005 × its start"),
        ({"decay": 0}, "weight/up", "+0.005 × its start"),
        ({"rate": 2 * RATE}, "weight/up", "-0.005 × its start -0.1 × its grad"),
        ({"biases": 2}, "hidden", "+1 × 'start/b'"),
    ],
)
def test_a_term_counted_otherwise_is_named_with_how_often(dtype, options, first, words):
    report = said(net(batch(dtype), **options), dtype)
    assert (report.first.name, report.kind) == (first, "another term"), str(report)
    assert words in str(report.first.kind)


def test_a_vector_in_each_row_is_named_without_its_name():
    wrong = net(batch(torch.float64))
    wrong["hidden"] = wrong["hidden"] + torch.linspace(1, 2, 16)
    assert "the same vector in each row" in str(said(wrong).first.kind)
    wrong["hidden"] = net(batch(torch.float64))["hidden"] + torch.randn(
        8, 16, generator=torch.Generator().manual_seed(9)
    )
    assert said(wrong).kind == "unknown"


def normalised(x, biases=1):
    """A batch norm, a convolution with a bias, and a loss."""
    torch.manual_seed(0)
    first, second = torch.nn.BatchNorm1d(3).double(), torch.nn.Conv1d(3, 5, 2).double()
    hidden = first(x)
    found = second(hidden) + (biases - 1) * second.bias[:, None]
    return {"bias": second.bias, "forward/norm": hidden, "forward/conv": found, "loss": found.square().mean()}


def judged(steps):
    x = torch.randn(8, 3, 7, generator=torch.Generator().manual_seed(2)).double()
    expected = known(normalised, (x,), {"dp": 2}, 2.0**-52, {"dp": 0})
    return judge(expected, [flattened(step(x), {"forward/*": {"dp": 0}}) for step in steps], Axes({"dp": 2}), 1)


def test_a_statistic_of_each_ranks_own_samples_is_never_reduced():
    report = judged([lambda x, r=r: normalised(x.chunk(2)[r]) for r in range(2)])
    assert (report.first.name, report.kind, report.axes) == ("forward/norm", "never reduced", ("dp",)), str(report)
    assert "a statistic of the batch" in str(report.first.kind)


def test_a_bias_of_a_convolution_that_each_rank_adds_is_named():
    def twice(x, r):
        found = normalised(x, biases=2)
        return {n: v.chunk(2)[r] if n.startswith("forward") else v for n, v in found.items()}

    report = judged([lambda x, r=r: twice(x, r) for r in range(2)])
    assert (report.first.name, report.kind) == ("forward/conv", "another term"), str(report)
    assert "+1 × 'bias'" in str(report.first.kind)


def test_rows_that_are_another_ranks_to_look_up_are_named():
    table = torch.randn(12, 6, generator=torch.Generator().manual_seed(4)).double()
    x = torch.arange(24) * 7 % 12
    expected = known(lambda x: {"start/table": table, "rows": table[x]}, (x,), {"tp": 2}, 2.0**-52)
    both = sum(table[6 * r + (x - 6 * r).clamp(0, 5)] for r in range(2))
    report = judge(expected, [flattened({"start/table": table, "rows": both})] * 2, Axes({"tp": 2}), 1)
    assert (report.first.name, report.kind) == ("rows", "another term"), str(report)
    assert "rows are off by a row of 'start/table' too much" in str(report.first.kind)


def test_a_factor_that_weights_follow_is_the_cause_and_a_power_of_two_is_a_loss_scale():
    report = said(net(batch(torch.float32), scale=2.0**16), torch.float32)
    assert report.cause.name == "grad/down"
    assert report.kind == "factor"
    assert "2^16: a loss scale left in it?" in str(report.cause.kind)
    assert "loss scale" not in str(said(net(batch(torch.float32), scale=77.0), torch.float32).cause.kind)


def test_gradients_clipped_on_each_rank_are_reduced_too_late():
    clipped = mean_of_parts(torch.float64, clip=True)
    report = said(clipped, clip=True)
    assert (report.first.name, report.kind, report.axes) == ("grad/down", "reduced too late", ("dp",)), str(report)
    means = mean_of_parts(torch.float64)
    grads = {n: means[f"grad/{n}"] for n in ("up", "b", "down")}
    assert said(net(batch(torch.float64), clip=True, grads=grads), clip=True).agrees


@pytest.mark.parametrize("coarse", [torch.bfloat16, torch.float16])
def test_gradients_that_were_sent_in_a_coarser_dtype_are_told(coarse):
    right = net(batch(torch.float32))
    sent = {n: v.to(coarse).float() if n.startswith("grad") else v for n, v in right.items()}
    report = said(sent, torch.float32)
    assert (report.first.name, report.kind) == ("grad/down", "coarser")
    assert str(coarse) in str(report.first.kind)
    wrong = {n: (1.5 * v).to(coarse).float() if n.startswith("grad") else v for n, v in right.items()}
    assert said(wrong, torch.float32).kind != "coarser"


def test_copies_that_come_apart_are_named_with_the_axis_along_which_they_do():
    right = net(batch(torch.float64))
    wrong = []
    for rank in range(4):
        draw = torch.Generator().manual_seed(rank % 2)  # tp varies fastest: dp's ranks hold the same
        wrong.append(right | {"grad/up": right["grad/up"] + torch.randn(6, 16, generator=draw)})
    report = said(wrong)
    assert (report.first.name, report.kind, report.axes) == ("grad/up", "copies apart", ("tp",)), str(report)
    assert said([wrong[0]] * 4).kind == "unknown"
