"""Weights that travel in 8 bits: how far they are off, what they cost, and what stays exact."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import zero
from dtlib.ranks.model import GPT, GPTConfig, batches, load_text, next_token_loss
from dtlib.ranks.shared.quantise import coded, coded_bytes, decoded

CONFIG = GPTConfig(num_layers=2, hidden=96)
make_adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


@pytest.mark.parametrize("num", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("block", [1, 64, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_block_is_off_by_half_a_step_of_its_own(num, block, dtype):
    chunk = torch.randn(num, generator=torch.Generator().manual_seed(num)).mul(3).to(dtype)
    packed = coded(chunk, 8, block)
    assert packed.numel() == coded_bytes(num, 8, block) <= num * (1 + 4 / block) + 4
    back = decoded(packed, num, 8, block)
    for some, original in zip(back.split(block), chunk.float().split(block), strict=True):
        step = original.abs().max() / 127 if num else 0
        assert ((some - original).abs() <= step / 2 * 1.001).all()  # and float32's own rounding
        assert not num or some.abs().max() == pytest.approx(original.abs().max().item(), rel=1e-6)


def test_zeros_and_tiny_numbers_stay_finite():
    chunk = torch.cat([torch.zeros(64), torch.full((64,), 1e-40), torch.tensor([1e30, -1e30])])
    back = decoded(coded(chunk, 8, 64), 130, 8, 64)
    assert torch.equal(back[:64], torch.zeros(64))
    assert back.isfinite().all()
    assert_close(back[128:], chunk[128:])


def train(steps, **options):
    rank, n = dist.get_rank(), dist.get_world_size()
    wrapped = zero.Zero(GPT(CONFIG, seed=5 + rank), make_adamw, **options, stage=3)
    start = wrapped.state_dict()
    data, losses, sent, used = batches(load_text(), batch=12, seq=16, rank=rank, world_size=n), [], [], {}
    block = wrapped.module.blocks[0]
    block.mlp.register_forward_hook(lambda m, *_: used.update(weight=m.up.weight.detach().clone()))
    for _ in range(steps):
        tokens, targets = next(data)
        with lab.wire() as wire:
            loss = next_token_loss(wrapped(tokens), targets)
            loss.backward()
            wrapped.optimizer.step()
            wrapped.optimizer.zero_grad()
        losses.append(loss.item())
        sent.append(wire.sent_bytes)
    return {"start": start, "weights": wrapped.state_dict(), "losses": losses, "sent": sent, "used": used["weight"]}


@pytest.mark.parametrize("n", [1, 3, 4])
def test_all_ranks_use_the_same_rounded_weights_and_keep_exact_ones(n):
    exact = lab.run(train, n, args=(1,))[0]["start"]
    results = lab.run(lambda: train(1, quantised_block=64), n)
    for result in results:
        for name, weight in exact.items():
            assert torch.equal(result["start"][name], weight)  # what is kept is not rounded
        off = (result["used"] - exact["blocks.0.mlp.up.weight"]).abs()
        assert 0 < off.max() <= exact["blocks.0.mlp.up.weight"].abs().max() / 254 * 1.001
        assert torch.equal(result["used"], results[0]["used"])
        for name, weight in result["weights"].items():
            assert torch.equal(weight, results[0]["weights"][name])


@pytest.mark.parametrize(("block", "n"), [(256, 2), (64, 4)])
def test_bytes_and_losses_of_twenty_steps(block, n):
    plain = lab.run(train, n, args=(20,))[0]
    rounded = lab.run(lambda: train(20, quantised_block=block), n)[0]
    share = (n - 1) / n * CONFIG.num_params
    assert plain["sent"][-1] == pytest.approx(share * 3 * 4, rel=0.01)
    assert rounded["sent"][-1] == pytest.approx(share * (4 + 2 * (1 + 4 / block)), rel=0.01)
    assert plain["losses"][-1] < 0.7 * plain["losses"][0]
    # the weights are off by 1/254 of the largest in their block, so the losses part, by less than a percent here
    assert rounded["losses"] != plain["losses"]
    assert rounded["losses"] == pytest.approx(plain["losses"], rel=0.01)


def test_rounding_belongs_to_the_pass_alone():
    """Gathered to be looked at or changed, or saved: exact, also when rounded weights were there before."""

    def job():
        wrapped = zero.Zero(
            GPT(CONFIG, seed=1), make_adamw, quantised_block=32, reshard_after_forward=False, prefetch=3, stage=3
        )
        tokens, _ = next(batches(load_text(), batch=2, seq=8))
        wrapped(tokens)  # and no backward pass: the rounded weights stay
        with wrapped.gathered() as module:
            seen = {name: p.detach().clone() for name, p in module.named_parameters()}
        for name, p in GPT(CONFIG, seed=1).named_parameters():
            assert torch.equal(seen[name], p), name
            assert torch.equal(wrapped.state_dict()[name], p), name

    lab.run(job, 2)


@pytest.mark.parametrize("block", [0, -1, 2.5, "64"])
def test_blocks_that_cannot_be(block):
    def job():
        with pytest.raises(ValueError, match=r"quantised_block must be .*at least 1, not"):
            zero.Zero(torch.nn.Linear(2, 2), make_adamw, quantised_block=block, stage=3)

    lab.run(job, 1)
