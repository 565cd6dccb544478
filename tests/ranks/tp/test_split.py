"""Who has what: heads, rows and slices of any size, without a rank; and the split cross-entropy, on ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import tp
from dtlib.ranks.model import IGNORED
from dtlib.ranks.model import next_token_loss as whole_loss
from dtlib.ranks.shared.split import Split, evenly
from dtlib.ranks.tp.blocks import queries_of, rows_of


@st.composite
def heads(draw):
    """Heads of queries, heads of keys, entries of a head, and ranks that can split them."""
    g, shared = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    degrees = [t for t in range(1, g * shared + 1) if t <= g or t % g == 0]
    return g * shared, g, draw(st.integers(1, 4)), draw(st.sampled_from(degrees))


@given(heads())
def test_each_head_of_queries_is_on_one_rank_with_its_key_and_value(sizes):
    a, g, d, t = sizes
    shared = a // g
    queries, rows = queries_of(a, g, t), rows_of(a, g, d, t)
    assert [head for mine in queries for head in mine] == list(range(a))
    assert max(map(len, queries)) - min(map(len, queries)) <= (shared if t <= g else 1)
    kinds = torch.arange(a + 2 * g).view(g, shared + 2)  # of each block of d rows: whose it is
    for mine, ranges in zip(queries, rows, strict=True):
        blocks = torch.cat([torch.arange(each.start, each.stop) for each in ranges]).view(-1, d) // d
        assert (blocks == blocks[:, :1]).all()
        expected = []
        for group in sorted({head // shared for head in mine}):
            own = [head % shared for head in mine if head // shared == group]
            expected += kinds[group, [*own, shared, shared + 1]].tolist()
        assert blocks[:, 0].tolist() == expected


@given(heads(), st.integers(0, 1))
def test_slices_make_up_the_whole_and_what_several_have_counts_once(sizes, dim):
    a, g, d, t = sizes
    split = Split(dim, rows_of(a, g, d, t))
    assert split.size == (a + 2 * g) * d
    whole = torch.arange(2.0 * split.size).view((split.size, 2) if dim == 0 else (2, split.size))
    again, counted = torch.zeros_like(whole), 0.0
    for rank in range(t):
        pieces = split.part(whole, rank).split(split.lengths(rank), dim)
        for place, piece, is_copy in zip(split.ranges[rank], pieces, split.is_copy(rank), strict=True):
            again.narrow(dim, place.start, len(place)).copy_(piece)
            counted += 0.0 if is_copy else piece.sum().item()
    assert_close(again, whole, rtol=0, atol=0)
    assert counted == whole.sum().item()


@given(st.integers(1, 50), st.integers(1, 12))
def test_even_slices_are_those_of_torch(size, t):
    if size < t:
        with pytest.raises(ValueError, match=f"rows must be at least the number of ranks in group, {t}, not {size}"):
            evenly("rows", size, t)
    else:
        slices = torch.arange(size).tensor_split(t)
        assert [list(each) for (each,) in evenly("rows", size, t)] == [each.tolist() for each in slices]


@st.composite
def scores(draw):
    """Logits of any scale, in any dtype, targets of which some or all count for nothing, and a reduction."""
    b, s, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(4, 13))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    scale = draw(st.sampled_from([0.0, 1.0, 1e4]))  # e^10000 is no number in any of them
    logits = (scale * torch.randn(b, s, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(vocab, (b, s), generator=generator)
    ignored = torch.rand(b, s, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return logits, targets.masked_fill(ignored, IGNORED), draw(st.sampled_from(["mean", "sum"]))


@pytest.mark.parametrize("t", [1, 3, 4])
def test_the_split_loss_is_the_whole_one(t):
    cases = []

    @settings(max_examples=40, database=None)
    @given(scores())
    def draw(case):
        cases.append(case)

    draw()

    def on_a_rank():
        found = []
        for logits, targets, reduction in cases:
            mine = tp.vocabulary_of(logits.shape[2])
            slice_bsv = logits[..., mine.start : mine.stop].clone().requires_grad_()
            loss = tp.next_token_loss(slice_bsv, targets, vocab=logits.shape[2], reduction=reduction)
            loss.backward()
            found.append((loss.detach(), slice_bsv.grad))
        return found

    by_rank = lab.run(on_a_rank, t)
    for number, (logits, targets, reduction) in enumerate(cases):
        logits.requires_grad_()
        expected = whole_loss(logits, targets, reduction=reduction)
        expected.backward()
        gradient = torch.cat([found[number][1] for found in by_rank], -1)
        # Sums over ranks come in another order: a few units of the last place, on losses up to 10⁵ in float32, and
        # on probabilities, which bfloat16 then rounds to 8 bits.
        for found in by_rank:
            assert_close(found[number][0], expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
        rtol = 1e-2 if logits.dtype == torch.bfloat16 else 1e-4
        assert_close(gradient, logits.grad, rtol=rtol, atol=1e-5, equal_nan=True)
