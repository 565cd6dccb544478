"""Attention over tokens on several ranks against torch's own over all of them: values, and every gradient."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from dtlib import lab
from dtlib.ranks import activations, cp
from dtlib.theory import cp as theory

WAYS = {"ring": cp.ring_attention, "ulysses": cp.ulysses_attention}
# float64: sums over keys come in another order, a few 2⁻⁵³ of the largest term; any wrong term is of order 0.1
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
A, D, B = 12, 4, 2


def case(s, g, documents):
    """Queries, keys, values, a gradient, documents: the same on every rank."""
    generator = torch.Generator().manual_seed(s)
    q, k, v, do = (torch.randn(B, heads, s, D, dtype=torch.float64, generator=generator) for heads in (A, g, g, A))
    ids = torch.randint(3, (B, s), generator=generator).sort(1).values if documents else None
    return q, k, v, do, ids


def by_torch(q, k, v, do, causal, ids):
    allowed = torch.ones(B, 1, q.shape[2], q.shape[2], dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    if ids is not None:
        allowed = allowed & (ids[:, :, None] == ids[:, None])[:, None]
    inputs = [each.clone().requires_grad_() for each in (q, k, v)]
    out = F.scaled_dot_product_attention(*inputs, attn_mask=allowed, enable_gqa=k.shape[1] < A)
    return out.detach(), *torch.autograd.grad(out, inputs, do)


def on_a_rank(way, s, g, order, causal, documents):
    q, k, v, do, ids = case(s, g, documents)
    layout = cp.Layout(s, order=order)
    own = [layout.take(each, 2).requires_grad_() for each in (q, k, v)]
    out = WAYS[way](*own, layout, cp.Mask(causal, ids))
    return out.detach(), *torch.autograd.grad(out, own, layout.take(do, 2))


def check(n, cases):
    by_rank = lab.run(lambda: [on_a_rank(*each) for each in cases], n, timeout_s=200)
    for number, (_, s, g, order, causal, documents) in enumerate(cases):
        q, k, v, do, ids = case(s, g, documents)
        layouts = theory.pieces(s, n, order)
        for whole, *parts in zip(by_torch(q, k, v, do, causal, ids), *(rank[number] for rank in by_rank), strict=True):
            for own, part in zip(layouts, parts, strict=True):
                assert_close(part, whole[:, :, [p for each in own for p in each]], **CLOSE, msg=str(cases[number]))


def fits(way, n, g):
    return way == "ring" or (A % n == 0 and (g % n == 0 or n % g == 0))


def grid(n, lengths, heads):
    every = product(WAYS, lengths, heads, theory.ORDERS, (True, False), (False, True))
    return [each for each in every if fits(each[0], n, each[2])]


# 22 and 25 are no multiples of what 3, 4 and 5 ranks have as parts, or are of some
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_equals_attention_over_all_tokens(n):
    more = ("ring", 22, 1, "zigzag", True, True), ("ring", 10, 12, "contiguous", True, False)
    check(n, [*grid(n, (25,), (3,)), *more])


@pytest.mark.soak
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_equals_attention_over_all_tokens_for_many_lengths_and_heads(n):
    check(n, grid(n, (10, 16, 17, 22, 40, 61), (1, 2, 4, 12)))


def test_half_precision_is_merged_in_float32():
    """Each tile's products, and a gradient at each of two hops, are rounded to bfloat16, where torch rounds once: at
    most three times torch's own error."""
    q, k, v, do, _ = case(48, 3, False)

    def job():
        layout = cp.Layout(48)
        own = [layout.take(each, 2).bfloat16().requires_grad_() for each in (q, k, v)]
        out = cp.ring_attention(*own, layout)
        return out.detach(), *torch.autograd.grad(out, own, layout.take(do, 2).bfloat16())

    half = [each.bfloat16() for each in (q, k, v, do)]
    by_rank, torchs = lab.run(job, 3), by_torch(*half, True, None)
    for number, exact in enumerate(by_torch(*(each.double() for each in half), True, None)):
        ours = _together([rank[number] for rank in by_rank], 48)
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).abs().max() <= 3 * (torchs[number] - exact).abs().max()


def _together(parts, s):
    order = [p for own in theory.pieces(s, len(parts)) for each in own for p in each]
    return torch.cat(parts, 2)[:, :, torch.tensor(order).argsort()]


def test_layouts_come_apart_and_together():
    def job():
        layout, whole = cp.Layout(23), torch.arange(46).view(2, 23)
        parts = [None] * 3
        dist.all_gather_object(parts, layout.take(whole))
        return torch.equal(layout.put_together(parts), whole)

    assert lab.run(job, 3) == [True] * 3


# --- what it costs ----------------------------------------------------------------------------------------------------


def passes(way, s, g, again=False):
    """In a rank: bytes on the wire of all ranks, forward and then backward."""
    layout, (q, k, v, do, _) = cp.Layout(s), case(s, g, False)
    own = [layout.take(each, 2).requires_grad_() for each in (q, k, v)]
    run = partial(activations.checkpoint, WAYS[way]) if again else WAYS[way]
    with lab.wire() as forward:
        out = run(*own, layout)
    with lab.wire() as backward:
        out.backward(layout.take(do, 2))
    return forward.total_bytes, backward.total_bytes


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_bytes_on_the_wire_are_those_of_theory(n):
    s, g = 1023, 3  # uneven parts: what all ranks together send is the same
    forward, backward = lab.run(passes, n, args=("ring", s, g))[0]
    once, all_ = (8 * n * theory.ring_elements(B, s, g, D, n, backward=each) for each in (False, True))
    # headers of messages of 50 kB and more
    assert forward == pytest.approx(once, rel=0.01, abs=100)
    assert backward == pytest.approx(all_ - once, rel=0.01, abs=100)


@pytest.mark.parametrize(("n", "g"), [(2, 4), (3, 12), (4, 2)])
def test_all_to_alls_send_what_theory_says(n, g):
    s = 768  # of which 2, 3 and 4 ranks have equal parts: an all-to-all keeps an N-th
    forward, backward = lab.run(passes, n, args=("ulysses", s, g))[0]
    expected = 8 * n * theory.ulysses_elements(B, s, A, g, D, n, backward=False)
    assert forward == pytest.approx(expected, rel=0.01)
    assert backward == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_computes_attention_again_sends_its_forward_pass_again(recompute):
    n, s, g = 3, 768, 3
    by_way = lab.run(lambda: [passes(way, s, g, again=True) for way in WAYS], n)[0]
    for (_, backward), elements in zip(by_way, (theory.ring_elements, theory.ulysses_elements), strict=True):
        sizes = (B, s, g, D, n) if elements is theory.ring_elements else (B, s, A, g, D, n)
        step, once, forgetful = (8 * n * elements(*sizes, **each) for each in
                                 ({"recompute": recompute}, {"backward": False}, {}))  # fmt: skip
        assert backward == pytest.approx(step - once, rel=0.01)
        assert backward != pytest.approx(forgetful - once, rel=0.1)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_kept_are_the_own_tokens_and_a_number_for_each_query(n):
    widths = {torch.bfloat16: (2, 4), torch.float32: (4, 4), torch.float64: (8, 8)}

    def kept(dtype):
        layout = cp.Layout(96)
        own = [torch.randn(B, heads, layout.length(dist.get_rank()), 8, dtype=dtype, requires_grad=True)
               for heads in (6, 3, 3)]  # fmt: skip
        return lab.saved_bytes(lambda *each: cp.ring_attention(*each, layout), *own).total

    expected = [theory.kept_bytes(B, 96, 6, 3, 8, n, element_bytes=w, total_bytes=l) for w, l in widths.values()]
    assert lab.run(lambda: [kept(dtype) for dtype in widths], n) == [expected] * n


def test_no_rank_holds_all_keys_or_a_matrix_of_scores():
    """Of 32 ranks; a real run of four halves the peak of two."""
    s, d = 4096, 64

    def peak():
        layout = cp.Layout(s)
        own = [torch.zeros(1, 1, layout.length(dist.get_rank()), d, requires_grad=True) for _ in range(3)]
        with lab.memory() as memory:
            cp.ring_attention(*own, layout).sum().backward()
        return memory.peak

    two, four = (max(lab.run(peak, n)) for n in (2, 4))
    assert four < 0.6 * two
    assert four < 4 * s * s / 4
    assert lab.at_scale(peak, 32).result < 4 * 2 * s * d


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", theory.ORDERS)
def test_each_round_computes_as_many_scores_as_theory_counts(order, causal):
    """Operations that torch counts, noted where each round asks for its tiles."""

    def job():
        layout, (q, k, v, _, _) = cp.Layout(50, order=order), case(50, 3, False)
        marks, tiles = [], cp.Mask.tiles
        with FlopCounterMode(display=False) as counter:
            cp.Mask.tiles = lambda *each: (marks.append(counter.get_total_flops()), tiles(*each))[1]
            cp.ring_attention(*(layout.take(each, 2) for each in (q, k, v)), layout, cp.Mask(causal))
        return [after - before for before, after in pairwise([*marks, counter.get_total_flops()])]

    scores = theory.scores(50, 4, order, causal=causal)
    expected = [[theory.forward_flops(B, each, A, D) for each in rank] for rank in scores]
    assert lab.run(job, 4) == expected


def test_bad_input_is_named_before_anything_is_sent():
    def errors():
        layout, said = cp.Layout(12), []
        t = torch.zeros
        calls = (
            lambda: cp.Layout(3),
            lambda: cp.Layout(12, order="snake"),
            lambda: cp.ring_attention(t(1, 2, 5, 4), t(1, 2, 6, 4), t(1, 2, 6, 4), layout),
            lambda: cp.ring_attention(t(1, 3, 6, 4), t(1, 2, 6, 4), t(1, 2, 6, 4), layout),
            lambda: cp.ring_attention(t(1, 2, 6, 4), t(1, 2, 6, 4), t(1, 1, 6, 4), layout),
            lambda: cp.ulysses_attention(t(1, 3, 6, 4), t(1, 3, 6, 4), t(1, 3, 6, 4), layout),
        )
        for call in calls:
            with lab.wire() as wire, pytest.raises(ValueError) as error:
                call()
            said.append((str(error.value), wire.total_bytes))
        return said

    words = [
        "seq must be at least 4", "order must be one of", "q_basd must be of shape (batch, heads, 6, head_dim)",
        "k_bgsd must have batch 1, head_dim 4 and a divisor of 3 heads", "v_bgsd must have the shape of k_bgsd",
        "cp must divide num_heads=3, and 2 does not",
    ]  # fmt: skip
    for rank in lab.run(errors, 2):
        for (said, sent), expected in zip(rank, words, strict=True):
            assert said.startswith(expected)
            assert sent == 0
