"""Beside torch's own: the same gradients from the same bytes, in one call less."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.testing import assert_close

from dtlib import lab
from dtlib.lab.recorder import Recorder
from dtlib.ranks import tp
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig(num_layers=2, hidden=64, num_heads=4, seq=128, vocab=64, tied=False, dtype=torch.float64)
TOKENS = torch.randint(64, (4, 128), generator=torch.Generator().manual_seed(1))


def by_torch(model):
    """`parallelize_module` on the same matrices; a DTensor's heads must be counted by hand."""
    t = dist.get_world_size()
    plan = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(use_local_output=False),
    }
    for i, block in enumerate(model.blocks):
        plan |= dict.fromkeys((f"blocks.{i}.attention.qkv", f"blocks.{i}.mlp.up"), ColwiseParallel())
        plan |= dict.fromkeys((f"blocks.{i}.attention.out", f"blocks.{i}.mlp.down"), RowwiseParallel())
        block.attention.num_heads, block.attention.num_kv_heads = 4 // t, 4 // t
    return parallelize_module(model, dist.init_device_mesh("cpu", (t,)), plan)


def step(whose):
    """In a rank: whole gradients of one step, its collectives, its bytes."""
    model = tp.parallelize(GPT(CONFIG)) if whose == "ours" else by_torch(GPT(CONFIG))
    with Recorder() as recorder, lab.wire() as wire:
        if whose == "ours":
            tp.next_token_loss(model(TOKENS), TOKENS, vocab=CONFIG.vocab).backward()
        else:
            with loss_parallel():
                next_token_loss(model(TOKENS), TOKENS).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if whose == "ours":
        gradients = tp.unsplit(model, gradients)
    else:
        gradients = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}
    return gradients, [(call.name, call.full_bytes) for call in recorder.log], wire.total_bytes


def test_the_same_gradients_from_the_same_bytes():
    for t in (2, 4):
        ours, torchs = (lab.run(step, t, args=(whose,))[0] for whose in ("ours", "torch's"))
        assert_close(ours[0], torchs[0], rtol=1e-9, atol=1e-9)  # float64, sums in other orders
        tokens, layers = 8 * 512, [("all_reduce", 8 * 512 * 64)] * 8
        ends = [("all_reduce", 8 * 512 * 64)] * 2
        assert sorted(ours[1]) == sorted([*layers, *ends, ("all_reduce", tokens), ("all_reduce", 2 * tokens)])
        assert sorted(torchs[1]) == sorted([*layers, *ends, *[("all_reduce", tokens)] * 3])
        full_bytes = sum(num_bytes for _, num_bytes in ours[1])
        for _, _, wire in (ours, torchs):
            assert_close(float(wire), 2.0 * (t - 1) * full_bytes, rtol=0.01, atol=0)  # the headers of gloo's messages
