"""Stages as people write them: what works has the gradients of one process, and what cannot is refused by its name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import dp, pp
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT, GPTConfig
from dtlib.theory import pp as theory

B, S, H, M = 4, 3, 6, 2
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Layer(nn.Module):
    """A product, and `after` of it."""

    def __init__(self, seed, after=torch.tanh, dtype=torch.float64):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(H, H, generator=draw, dtype=torch.float64).to(dtype))
        self.after = after

    def forward(self, x):
        return self.after(x @ self.weight)


def squares(y, target):
    return ((y - target) ** 2).sum()


def batch(dtype=torch.float64):
    draw = torch.Generator().manual_seed(7)
    x, y = torch.randn(2, B, S, H, generator=draw, dtype=torch.float64).to(dtype)
    return x.clone(), y.clone()


def pipeline(stages, schedule, **options):
    own = {k: stage for k, stage in enumerate(stages) if schedule.placed[k] == dist.get_rank(options.get("group"))}
    rules = {"width": H, "dtype": torch.float64, "loss": squares, "count": torch.numel} | options
    return pp.Pipeline(own, schedule, **rules)


AFTER = {
    "turned": lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),  # neither it nor its gradient is contiguous
    "spread": lambda y: y.mean(-1, keepdim=True).expand_as(y),
    "itself": lambda y: y,
    "written into": lambda y: y.mul_(2),
}
SCHEDULES = [theory.one_f_one_b, theory.zb_h1, theory.zb_v, theory.gpipe]


def gradients(after, schedule):
    """Of a batch that needs one itself, through a layer before the pipeline."""
    stages = [Layer(k, AFTER[after]) for k in range(schedule.num_stages)]
    before, (x, y) = Layer(99), batch()
    x.requires_grad_()
    pipeline(stages, schedule).step(before(x), y)
    own = [stages[k].weight.grad for k, place in enumerate(schedule.placed) if place == dist.get_rank()]
    return own, x.grad, before.weight.grad


def all_of_them():
    p = dist.get_world_size()
    return [gradients(after, make(p, M)) for after in AFTER for make in SCHEDULES]


@pytest.mark.parametrize("p", [1, 2])
def test_outputs_and_gradients_of_any_layout_travel_and_the_inputs_have_theirs(p):
    by_rank = zip(*lab.run(all_of_them, p), strict=True)
    for (after, make), found in zip(((after, make) for after in AFTER for make in SCHEDULES), by_rank, strict=True):
        schedule = make(p, M)
        stages = [Layer(k, AFTER[after]) for k in range(schedule.num_stages)]
        before, (x, y) = Layer(99), batch()
        out = before(x.requires_grad_())
        for stage in stages:
            out = stage(out)
        (squares(out, y) / y.numel()).backward()
        for rank, (own, of_x, of_before) in enumerate(found):
            expected = [stages[k].weight.grad for k, place in enumerate(schedule.placed) if place == rank]
            assert_close(own, expected, **CLOSE)
            first = rank == schedule.placed[0]
            assert_close((of_x, of_before), (x.grad, before.weight.grad) if first else (None, None), **CLOSE)


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2)


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def step(first, second, **options):
    """Both stages on one rank, so that no other waits."""
    return pipeline([first, second], theory.interleaved(1, M, 2), **options).step(*batch())


def narrow(dtype):
    return pipeline([Layer(0, dtype=dtype), Layer(1, dtype=dtype)], theory.zb_v(1, M), dtype=torch.float32)


def without_gradients():
    with torch.no_grad():
        step(Layer(0), Layer(1))


def under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        x, y = batch(torch.float32)
        stages = [Layer(k, after=lambda y: y, dtype=torch.float32) for k in (0, 1)]
        pipeline(stages, theory.zb_v(1, M), dtype=torch.float32).step(x, y)


def evaluated_in_place():
    pipeline([Layer(0), InPlace()], theory.interleaved(1, M, 2)).evaluate(*batch())


def torchs_own():
    stages = [nn.parallel.DistributedDataParallel(Layer(k)) for k in (0, 1)]
    pipeline(stages, theory.zb_v(1, M))


def torchs_own_in_micro_batches():
    stages = [nn.parallel.DistributedDataParallel(Layer(k)) for k in (0, 1)]
    pipeline(stages, theory.interleaved(1, M, 2))


def sharded():
    pipeline([fully_shard(Layer(k)) for k in (0, 1)], theory.zb_v(1, M))


REFUSED = {
    "stages must leave their input as it is": lambda: step(Layer(0), InPlace()),
    "as it is, and stage 1 changes it in place": lambda: step(Layer(0), InPlace(), recompute=True),
    "and stage 1 changes it in place": evaluated_in_place,
    "stage 1 does not: its output does not depend on it": lambda: step(Layer(0), Of(lambda x: Layer(1)(x.detach()))),
    "lead a gradient back to their input, and stage 1": lambda: pipeline(
        [Layer(0), Of(lambda x: torch.ones(B // M, S, H, dtype=torch.float64))], theory.zb_v(1, M)
    ).step(*batch()),
    "must not be called under no_grad": without_gradients,
    "stage 0 gives (2, 3, 6) of torch.bfloat16": lambda: narrow(torch.bfloat16).step(*batch(torch.bfloat16)),
    "torch.float32, as inputs, width, parts and dtype say, and stage 0 gives (2, 3, 6) of torch.bf": under_autocast,
    "stage 0 gives (2, 3, 3)": lambda: step(Of(lambda x: x[..., :3]), Layer(1)),
    "stage 0 gives tuple": lambda: step(Of(lambda x: (x, x)), Layer(1)),
    "loss must give one number, and gives (2, 3, 6)": lambda: step(Layer(0), Layer(1), loss=lambda y, t: y - t),
    "inputs must be (B, s) or (B, s, h), with s a multiple of 1": lambda: pipeline([Layer(0)], theory.gpipe(1, M)).step(
        torch.ones(4), torch.ones(4)
    ),
    "with s a multiple of 2 (parts)": lambda: step(Layer(0), Layer(1), parts=2),
    "must not be in torch's DistributedDataParallel": torchs_own,
    "DistributedDataParallel where a step has several backward passes": torchs_own_in_micro_batches,
    "must not be in torch's FSDP where the schedule splits": sharded,
}


def said():
    found = []
    for call in REFUSED.values():
        with pytest.raises(ValueError) as error:
            call()
        found.append(str(error.value))
    return found


def test_what_a_stage_cannot_do_is_refused_by_its_name():
    for text, found in zip(REFUSED, *lab.run(said, 1), strict=True):
        assert text in found, found


def test_a_group_without_this_rank_is_refused():
    def outside():
        group = dist.new_group([1])
        if dist.get_rank() == 1:
            return ""
        with pytest.raises(ValueError) as error:
            pp.Pipeline({0: Layer(0)}, theory.gpipe(1, M), width=H, group=group)
        return str(error.value)

    assert lab.run(outside, 2)[0] == "group must contain this rank (0), and does not"


UNLIKE = {
    "(4, 3, 6) of float64 and (4, 3, 6) of float64, 6 wide": lambda rank, x: (x[:, : 3 - rank], {}),
    "6 wide in torch.float32": lambda rank, x: (x, {"dtype": (torch.float64, torch.float32)[rank]}),
    "rank 1 (4, 3, 6) of float64 and (4, 3, 6) of float64, 6 wide in torch.float64, GPipe": lambda rank, x: (
        x, {"make": (theory.one_f_one_b, theory.gpipe)[rank]}
    ),
}  # fmt: skip


def unlike():
    rank, found = dist.get_rank(), []
    for case in UNLIKE.values():
        x, options = case(rank, batch()[0])
        make = options.pop("make", theory.one_f_one_b)
        own = pipeline([Layer(0), Layer(1)], make(2, M), **options)
        with lab.SendCounter() as counter, pytest.raises(ValueError) as error:
            own.step(x, x)
        found.append((str(error.value), counter.num_sends))
    return found


def test_ranks_that_are_called_with_different_things_are_refused_before_anything_is_sent():
    for found in lab.run(unlike, 2):
        for text, (message, sends) in zip(UNLIKE, found, strict=True):
            assert text in message, message
            assert "inputs and targets must be alike on all ranks" in message
            assert sends == 0


WRAPPERS = (dp.NaiveDataParallel, dp.FlatDataParallel, dp.BucketedDataParallel)


def wrapped():
    """Two replicas of two stages, each with its half of every micro-batch's rows."""
    mesh, found = Mesh({"dp": 2, "pp": 2}), []
    along, across = mesh.group("pp"), mesh.group("dp")
    for wrapper in WRAPPERS:
        for make in (theory.one_f_one_b, theory.zb_h1, theory.zb_h2):
            stage, (x, y) = Layer(dist.get_rank(along)), batch()
            half = dist.get_rank(across)
            own = {dist.get_rank(along): wrapper(stage, group=across)}
            rules = {"width": H, "dtype": torch.float64, "loss": squares, "count": torch.numel, "group": along}
            pp.Pipeline(own, make(2, 2), **rules).step(x[half::2], y[half::2])
            found.append(stage.weight.grad)
    return dist.get_rank(along), found


def test_stages_in_data_parallel_wrappers_have_the_mean_gradient_under_every_schedule():
    stages, (x, y) = [Layer(0), Layer(1)], batch()
    (squares(stages[1](stages[0](x)), y) / y.numel()).backward()
    for place, found in lab.run(wrapped, 4):
        for gradient in found:
            assert_close(gradient, stages[place].weight.grad, **CLOSE)


@pytest.mark.parametrize("rotary", [False, True])
def test_more_tokens_than_the_model_has_positions_for_are_refused(rotary):
    first = pp.cut(GPT(GPTConfig(hidden=8, num_heads=2, vocab=16, seq=8, rotary=rotary)), 2)[0]
    first(torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="at most seq=8 columns, not 9"):
        first(torch.zeros(1, 9, dtype=torch.int64))
