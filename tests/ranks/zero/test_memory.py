"""What a rank holds, at every event of a step: layers of which it is worked out by hand, real ranks and at scale; and
the closed form of the peak, against ours and FSDP2's, on GPTs."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import fully_shard

from dtlib import lab, theory
from dtlib.ranks import zero
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from dtlib.ranks.zero import zero as implementation

from .small import STAGES, every_stage, of_shards

make_adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
SIDES = (9, 7, 7, 5, 3)
LAYERS = [a * b for a, b in pairwise(SIDES)]  # elements: each layer is larger than the next, and no rank divides it
UNITS = [str(i) for i in range(len(LAYERS))]
EACH_LAYER = {"bucket_bytes": 1, "first_bucket_bytes": None}  # stages 1 and 2 as well


def of_layers(wrap, dtype=torch.float32, micro_batches=1, **options):
    """The spans of the second step: in the first one states are made, and the order of modules is learnt."""
    model = nn.Sequential(*(nn.Linear(a, b, bias=False, dtype=dtype) for a, b in pairwise(SIDES)))
    wrapped, x = wrap(model, make_adamw, **options), torch.ones(1, SIDES[0], dtype=dtype)
    for _ in range(2):
        wrapped.optimizer.zero_grad()
        with lab.memory_spans(model, wrapped, wrapped.optimizer, x, units=UNITS) as spans:
            for i in range(micro_batches):
                with nullcontext() if i == micro_batches - 1 else wrapped.no_sync():
                    wrapped(x).sum().backward()
            wrapped.optimizer.step()
    return spans


@functools.cache
def work(dtype):
    """Temporary bytes of the passes alone, at each event."""
    spans = lab.at_scale(of_layers, 1, args=(STAGES[1], dtype)).result
    return {(each.event, each.name): each.held.temporary for each in spans}


def whole_layers(event, layer, ahead, stays):
    """Whose weights stage 3 has: with those of the `ahead` next ones, from the beginning of a pass to its end."""
    if event == "gradient":
        return range(0 if stays else max(0, layer - ahead), layer + 1)
    return range(0 if stays else layer + (event == "forward done"), min(len(LAYERS), layer + 1 + ahead))


def assert_as_worked_out(spans, stage, n, rank, dtype=torch.float32, micro_batches=1, master_dtype=None, prefetch=1,
                         reshard_after_forward=True, **buckets):  # fmt: skip
    """Raise AssertionError unless each kind of memory is to the byte what the stage says, at every event.

    A gradient is copied into a buffer when it comes, which stays until the next layer's begins to travel (stage 1: for
    good, and until the one after that); the N - 1 chunks of the others arrive in four parts, with room for one of them,
    each by the time of another gradient. With one other rank all has come by the next.
    Inside no_sync it stays where autograd puts it. Sums of 16-bit chunks are taken in 32 bits.
    """
    width, master = dtype.itemsize, 0 if master_dtype is None else master_dtype.itemsize
    whole = [width * size for size in LAYERS]
    own = [width * theory.zero.shard_elements((size,), n, rank) for size in LAYERS]
    room = [-(-(n - 1) // 4) * each + (each * 4 // width if width < 4 and n > 1 else 0) for each in own] + [0]
    kept = whole if stage == 1 else own
    states = sum(own) // width * (2 * (master or width) + master) + 4 * sum(map(bool, own))  # Adam counts steps
    at_rest, quiet, seen = sum(own if stage == 3 else whole), micro_batches - 1, []
    for span in spans:
        event, layer, where = span.event, int(span.name.split(".")[0] or -1), f"{span.event} {span.name}"
        if event.startswith("backward") or (layer < 0 and event.startswith("forward")):
            continue  # what they lead to is told by what comes after
        here = () if layer < 0 or stage < 3 else whole_layers(event, layer, prefetch, not reshard_after_forward)
        assert span.held.parameters == at_rest + sum(whole[i] for i in here), f"weights at {where}"
        assert span.held.optimizer == states, f"states at {where}"
        if event == "gradient":
            seen.append(layer)
            is_quiet = len(seen) <= quiet * len(LAYERS)
            later = sum((whole if is_quiet else kept)[layer + 1 :])
            still = sum(whole[:layer]) if quiet and (not is_quiet or len(seen) > len(LAYERS)) else 0
            assert span.held.gradients == whole[layer] + later + still, f"gradients at {where}"
            arriving = 0 if is_quiet else room[layer] + (room[layer + 1] if stage == 1 and n > 2 else 0)
            assert span.held.temporary == work(dtype)[event, span.name] + arriving, f"room at {where}"
        elif event in ("step", "step done", "end"):
            widened = sum(own) // width * master if event == "step" else 0
            assert span.held.gradients == sum(kept) + widened, f"gradients at {where}"
    assert seen == [*reversed(range(len(LAYERS)))] * micro_batches


ON_UNITS = [{"prefetch": 0}, {"prefetch": 2}, {"reshard_after_forward": False}]
ANY = [{}, {"micro_batches": 3}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "master_dtype": torch.float32}]
CASES = {
    stage: [EACH_LAYER | each if stage < 3 else each for each in ANY + ON_UNITS * (stage == 3)] for stage in STAGES
}


@every_stage
@pytest.mark.parametrize("n", [3, pytest.param(4, marks=pytest.mark.soak)])
def test_every_event_on_real_ranks(stage, n):
    found = lab.run(lambda: [of_layers(STAGES[stage], **case) for case in CASES[stage]], n)
    for rank, spans in enumerate(found):
        for case, each in zip(CASES[stage], spans, strict=True):
            assert_as_worked_out(each, stage, n, rank, **case)
        expected = theory.zero.states_of_rank([(size,) for size in LAYERS], n, stage, rank, "16-byte")
        end = spans[len(ANY) - 1][-1].held  # bf16 with a copy in fp32
        assert (end.parameters, end.gradients) == (expected.weights, expected.gradients)
        states = expected.master_weights + expected.first_moment + expected.second_moment
        assert end.optimizer == states + 4 * len(LAYERS)  # Adam counts the steps of each piece


@every_stage
@pytest.mark.parametrize(("n", "rank"), [(1, 0), (2, 1), (64, 63), (513, 5)])
def test_every_event_as_one_of_many(stage, n, rank):
    for case in CASES[stage][:: 3 if n == 2 else 9]:
        spans = lab.at_scale(functools.partial(of_layers, STAGES[stage], **case), n, rank).result
        assert_as_worked_out(spans, stage, n, rank, **case)


@pytest.mark.parametrize(
    "name",
    ["weights stay", "gradients stay", "states are whole", "all-reduced", "reduced after backward", "two at once"],
)
def test_a_wasteful_one_is_seen(name):
    class Hoards(zero.Shard):
        def keep(self):
            self.__dict__.setdefault("hoard", []).append(self.sent)
            super().keep()

    class Views(zero.Shard):
        def keep(self):
            sent = self.sent
            super().keep()
            self.grad = sent[self.own]  # a view: the whole buffer stays

    class NeverFreed(zero.Shard):
        def free(self):
            if not hasattr(self, "weights"):  # until it has been split
                super().free()

    class Late(zero.Zero):
        def _reduce(self, *, complete=True):
            if not complete:
                super()._reduce(complete=False)

    class TwoAtOnce(zero.Zero):
        def _reduce(self, *, complete=True):
            with mock.patch.dict(implementation._IN_FLIGHT, {2: 2}):
                super()._reduce(complete=complete)

    def keeps_states(*args, **options):
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        return STAGES[1](*args, group=alone, **options)

    stage, wrap, words = {
        "weights stay": (3, of_shards(NeverFreed, 3), "weights at"),
        "gradients stay": (2, of_shards(Hoards, 2), "gradients|room at gradient 2"),
        "states are whole": (1, keeps_states, "states at begin"),
        "all-reduced": (2, of_shards(Views, 2), "gradients at"),
        "reduced after backward": (2, functools.partial(Late, stage=2), "room at gradient 3"),
        "two at once": (2, functools.partial(TwoAtOnce, stage=2), "gradients at gradient 2"),
    }[name]
    spans = lab.run(lambda: of_layers(wrap, **CASES[stage][0]), 3)[1]
    with pytest.raises(AssertionError, match=words):
        assert_as_worked_out(spans, stage, 3, 1)


# --- the closed form of the peak --------------------------------------------------------------------------------

WIDE = GPTConfig(num_layers=6, hidden=64, seq=32)
CONFIGS = [WIDE, GPTConfig(num_layers=4, hidden=96, seq=64), GPTConfig(num_layers=8, hidden=48, seq=16)]
ODD = GPTConfig(num_layers=4, hidden=36, seq=20, vocab=509, num_heads=3, tied=False)  # nothing divides by 4


def sizes_of(config):
    """Elements of a block, and of what is in none."""
    sizes = {name: p.numel() for name, p in GPT(config).named_parameters()}
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
    return block, sum(sizes.values()) - config.num_layers * block


def passes(model, tokens, optimizer=None, held=()):
    """The spans of a pass over `tokens`, and of the step after it."""
    blocks = [f"blocks.{i}" for i in range(len(model.blocks))]
    with lab.memory_spans(model, tokens, *held, units=blocks) as spans:
        next_token_loss((held[0] if held else model)(tokens), tokens).backward()
        if optimizer is not None:
            optimizer.step()
    return spans


def ours(config, batch, stage):
    """The second step's spans; elements of the shards, and pieces that Adam counts steps of."""
    block = 4 * sizes_of(config)[0]
    options = {} if stage == 3 else {"bucket_bytes": block, "first_bucket_bytes": None}
    model, tokens = GPT(config), torch.zeros(batch, config.seq, dtype=torch.int64)
    wrapped = STAGES[stage](model, make_adamw, **options)
    for _ in range(2):
        wrapped.optimizer.zero_grad()
        spans = passes(model, tokens, wrapped.optimizer, (wrapped, wrapped.optimizer))
    pieces = sum(len(group["params"]) for group in wrapped.optimizer.param_groups)
    return spans, [shard.num_elements for shard in wrapped.shards], pieces


@functools.cache
def work_bytes(config, batch):
    """What the passes of one process hold at their fullest, beside weights and gradients."""
    tokens = torch.zeros(batch, config.seq, dtype=torch.int64)
    spans = lab.at_scale(lambda: passes(GPT(config), tokens), 1).result
    return max(each.fullest.activations + each.fullest.buffers + each.fullest.temporary for each in spans)


def assert_within_a_unit(spans, config, n, stage, batch, largest, **options):
    """The real peak may lie below the formula's by a unit's weights and gradient, and its work."""
    (block, outer), held = sizes_of(config), work_bytes(config, batch)
    total, outer = config.num_layers * block + outer, outer if stage == 3 else 0
    formula = theory.zero.peak_bytes(total, n, stage, largest, work_bytes=held, outer_params=outer, **options)
    peak = max(each.fullest.total for each in spans)
    most = 1.001 * formula  # in which Adam's counts of steps are not
    assert formula - 4 * largest - held / config.num_layers <= peak <= most
    return peak


@every_stage
@pytest.mark.parametrize(
    ("config", "batch", "n", "rank"), [(CONFIGS[0], 4, 2, 1), (CONFIGS[1], 1, 3, 0), (CONFIGS[2], 4, 64, 63)]
)
def test_the_peak_and_the_states_at_rest(config, batch, n, rank, stage):
    spans, flats, pieces = lab.at_scale(ours, n, rank, args=(config, batch, stage)).result
    assert_within_a_unit(spans, config, n, stage, batch, sizes_of(config)[0] if stage == 3 else max(flats))
    expected, end = theory.zero.states_of_rank([(each,) for each in flats], n, stage, rank, "fp32"), spans[-1].held
    assert (end.parameters, end.gradients) == (expected.weights, expected.gradients)
    assert end.optimizer == expected.optimizer + 4 * pieces


# --- FSDP2 ----------------------------------------------------------------------------------------------------


def fsdp2(config):
    """The second step at scale: its spans, and the peak that torch's own tracker reports."""
    model, tokens = GPT(config), torch.zeros(2, config.seq, dtype=torch.int64)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = make_adamw(model.parameters())
    passes(model, tokens, optimizer)
    optimizer.zero_grad()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((tokens,))
    with tracker:
        spans = passes(model, tokens, optimizer, (model, optimizer))
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return spans, next(size for kind, size in snapshot.items() if str(getattr(kind, "value", kind)) == "Total")


@pytest.mark.parametrize(
    ("config", "n", "rank"), [(ODD, 8, 7), (CONFIGS[0], 64, 0), (ODD, 1024, 1023), (CONFIGS[1], 4, 0)]
)
def test_fsdp2_keeps_padded_rows_its_tracker_agrees_and_its_peak_is_within_a_unit(config, n, rank):
    spans, tracked = lab.at_scale(fsdp2, n, rank, args=(config,)).result
    shapes = [tuple(p.shape) for p in GPT(config).parameters()]
    expected, end = theory.zero.states_of_rank(shapes, n, 3, rank, "fp32", layout="padded_rows"), spans[-1].held
    assert (end.parameters, end.gradients) == (expected.weights, expected.gradients)
    assert end.optimizer == expected.optimizer + 4 * len(shapes)  # Adam counts the steps of each in a float32
    peak = max(each.fullest.total for each in spans)
    assert peak == pytest.approx(tracked, rel=0.02)
    if config is not ODD:
        assert_within_a_unit(spans, config, n, 3, 2, sizes_of(config)[0], copies=2 + 1 / n)
