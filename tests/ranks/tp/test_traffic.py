"""What a split GPT sends: how many all-reduces of how many elements, exactly; and bytes on the wire, within 1 %."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from dtlib import lab
from dtlib.lab.recorder import Recorder
from dtlib.ranks import activations, tp
from dtlib.ranks.model import GPT, GPTConfig
from dtlib.theory import models
from dtlib.theory import tp as theory
from dtlib.theory.memory.flops import RECOMPUTE

L, B, S, H, V = 2, 4, 128, 192, 61
GPT_CONFIG = GPTConfig(num_layers=L, hidden=H, num_heads=6, seq=S, vocab=V)
LLAMA = replace(GPT_CONFIG, num_kv_heads=1, rms_norm=True, swiglu=True, rotary=True)
ELEMENTS = B * S * H


def passes(config, options, change):
    """In a rank, the parts of a step one by one: what each pass of each part sends, and the bytes on the wire."""
    model, tokens = tp.parallelize(GPT(config), **options), torch.zeros(B, S, dtype=torch.int64)
    change(model)
    x_bsh, found = torch.rand(B, S, H, requires_grad=True), {}
    long = torch.zeros(4, 8192, dtype=torch.int64)  # 3 numbers a token: many tokens, for headers to be small beside
    logits = torch.zeros(*long.shape, len(tp.vocabulary_of(V)), requires_grad=True)
    parts = {
        "embedding": lambda: model.token_embedding(tokens),
        "layers": lambda: model.run_blocks(x_bsh),
        "head": lambda: model.head(x_bsh),
        "loss": lambda: tp.next_token_loss(logits, long, vocab=V),
    }
    for name, run in parts.items():
        with Recorder() as forward, lab.wire() as forward_wire:
            y = run()
        with Recorder() as backward, lab.wire() as backward_wire:
            y.sum().backward()
        for phase, recorder, wire in (("forward", forward, forward_wire), ("backward", backward, backward_wire)):
            found[name, phase] = recorder.log, wire.total_bytes
    with Recorder() as quiet, torch.no_grad():
        model.run_blocks(x_bsh)
    return found, quiet.log


def sent(t, config=GPT_CONFIG, change=lambda model: None, **options):
    """Of each part and pass: (ranks, elements) of each all-reduce, and the bytes of all of them on the wire."""
    result = {}
    for found, quiet in lab.run(passes, t, args=(config, options, change)):
        assert {call.name for log, _ in found.values() for call in log} <= {"all_reduce"}
        result = {part: ([(c.group_size, c.full_bytes / 4) for c in log], wire) for part, (log, wire) in found.items()}
        assert [(c.group_size, c.full_bytes / 4) for c in quiet] == result["layers", "forward"][0]
    return result


def on_the_wire(calls):
    """Bytes that all ranks together send for these all-reduces, if all of them take part: 2 (N − 1) · D."""
    return sum(2 * (ranks - 1) * 4 * elements for ranks, elements in calls)


@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_two_and_two_all_reduces_a_layer_and_what_the_ends_send(t):
    one, tokens = (t, ELEMENTS), 4 * 8192
    expected = {
        ("embedding", "forward"): [one],
        ("embedding", "backward"): [],
        ("layers", "forward"): [one] * 2 * L,
        ("layers", "backward"): [one] * 2 * L,
        ("head", "forward"): [],
        ("head", "backward"): [one],
        ("loss", "forward"): [(t, tokens), (t, 2 * tokens)],
        ("loss", "backward"): [],
    }
    for part, (calls, wire) in sent(t).items():
        assert calls == (expected[part] if t > 1 else []), part
        # headers of gloo's messages, a few dozen bytes each
        assert wire == pytest.approx(on_the_wire(calls), rel=0.01), part


@pytest.mark.parametrize("t", [2, 4])
def test_keys_that_ranks_share_have_one_small_sum_more(t):
    found, d = sent(t, LLAMA), H // 6
    layer = [(t, ELEMENTS), (t, ELEMENTS), (t, 2 * d * H), (t, 2 * d)]  # the MLP's, and with attention's the keys'
    assert found["layers", "forward"][0] == [(t, ELEMENTS)] * 2 * L
    calls, wire = found["layers", "backward"]
    assert calls == layer * L
    assert wire == pytest.approx(on_the_wire(calls), rel=0.01)


def test_chunks_are_more_calls_and_no_more_bytes():
    calls, wire = sent(3, chunks=4)["layers", "forward"]
    assert calls == [(3, ELEMENTS / 4)] * 4 * 2 * L
    assert wire == pytest.approx(on_the_wire(calls), rel=0.01)


def test_what_is_computed_again_is_sent_again():
    found = sent(2, change=lambda model: activations.recompute(model, "full"))
    assert found["layers", "forward"][0] == [(2, ELEMENTS)] * 2 * L
    assert found["layers", "backward"][0] == [(2, ELEMENTS)] * 4 * L
    selective = sent(2, change=lambda model: activations.recompute(model, "selective"))
    assert selective["layers", "backward"][0] == [(2, ELEMENTS)] * 2 * L


def work(recompute):
    """In a rank: operations of the layers in a step, and the elements that they all-reduce."""
    model = activations.recompute(tp.parallelize(GPT(replace(GPT_CONFIG, written_out=True))), recompute)
    x_bsh = torch.rand(B, S, H, requires_grad=True)
    with Recorder() as recorder, FlopCounterMode(display=False) as flops:
        model.run_blocks(x_bsh).sum().backward()
    return flops.get_total_flops(), sum(call.full_bytes for call in recorder.log) / 4


def test_the_laws_of_recompute_are_those_of_what_ranks_do():
    """How many operations an element that is all-reduced stands for says at how many ranks a layer breaks even."""
    model = models.gpt("any", num_layers=L, hidden=H, num_heads=6, seq=S, vocab=V)
    found, seen = lab.run(lambda: [work(each) for each in RECOMPUTE], 2)[0], set()
    for recompute, (flops, elements) in zip(RECOMPUTE, found, strict=True):
        assert elements == L * theory.layer_elements(B, S, H, recompute=recompute)
        # at one operation and one byte a second: all operations of both ranks over 2 · 2 bytes an element
        expected = 1 + 2 * flops / (2 * 2 * elements)
        assert theory.break_even_ranks(model, 1, 1, recompute=recompute) == pytest.approx(expected, rel=1e-12)
        moved = 56 + 22 * (recompute == "full")
        share = moved * B * S * H / (2 * flops / L)
        assert theory.replicated_share(H, S, 1, 1, recompute=recompute) == pytest.approx(share, rel=1e-12)
        seen.add(expected)
    assert len(seen) == len(RECOMPUTE)  # a law that forgets one is off


def test_an_input_that_needs_no_gradient_costs_no_sum():
    def on_a_rank():
        layer = tp.ColumnParallelLinear(torch.nn.Linear(8, 8))
        with Recorder() as recorder:
            layer(torch.ones(3, 8)).sum().backward()
        return len(recorder.log), layer.weight.grad.shape[0]

    assert lab.run(on_a_rank, 2) == [(0, 4)] * 2


def test_sums_are_under_way_while_the_rank_computes():
    """No clock: whoever waits for the input's gradient has the weight's already, and a chunk starts before one ends."""

    def on_a_rank():
        events, start = [], dist.all_reduce

        class Told:
            def __init__(self, work):
                self.work = work

            def wait(self):
                events.append("wait")
                self.work.wait()

        def all_reduce(tensor, *args, **kwargs):
            events.append("start")
            return Told(start(tensor, *args, **kwargs))

        class Products(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
                    events.append("product")
                return func(*args, **(kwargs or {}))

        column, row = (
            tp.ColumnParallelLinear(torch.nn.Linear(8, 8)),
            tp.RowParallelLinear(torch.nn.Linear(8, 8), chunks=3),
        )
        x = torch.ones(6, 8, requires_grad=True)
        y = column(x).sum()
        dist.all_reduce = all_reduce
        with Products():
            y.backward()
            events.append("forward")
            row(torch.ones(6, 4))
        dist.all_reduce = start
        return events

    backward = ["product", "start", "product", "wait"]
    for events in lab.run(on_a_rank, 2):
        assert events == [*backward, "forward", *["product", "start"] * 3, *["wait"] * 3]
