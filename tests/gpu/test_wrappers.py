"""One rank on NCCL: each wrapper of the course trains on the card as the plain model does; a run resumes to the bit."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from benchmarks import _gpu_compression
from benchmarks._gpu_clock import Clock
from dtlib import lab
from dtlib.ranks import dp, reliability, tp, zero
from dtlib.ranks.model import GPT, GPTConfig, batches, load_text, next_token_loss

SIZES = GPTConfig(num_layers=2, hidden=64, num_heads=4, seq=32, dropout=0.2)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


def plain(model):
    return model, adamw(model.parameters())


def bucketed(model):
    return dp.BucketedDataParallel(model), adamw(model.parameters())


def sharded(stage, model):
    wrapped = zero.Zero(model, adamw, stage=stage)
    return wrapped, wrapped.optimizer


def split(model):
    model = tp.parallelize(model)
    return model, adamw(model.parameters())


WRAPS = {"dp": bucketed, "tp": split, **{f"ZeRO {stage}": functools.partial(sharded, stage) for stage in (1, 2, 3)}}


def train(model, optimizer, steps, data):
    losses = []
    for _ in range(steps):
        tokens, targets = (each.cuda() for each in next(data))
        optimizer.zero_grad()
        logits = model(tokens)
        loss = next_token_loss(logits, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def data_from(step):
    data = batches(load_text(), batch=4, seq=SIZES.seq)
    for _ in range(step):
        next(data)
    return data


def all_wrappers():
    config = GPTConfig(**{**vars(SIZES), "dropout": 0.0})
    found = {}
    for name, wrap in {"plain": plain, **WRAPS}.items():
        found[name] = train(*wrap(GPT(config).cuda()), 4, data_from(0))
    return found, dist.get_backend(), torch.cuda.current_device()


def test_each_wrapper_alone_on_the_card_trains_as_the_plain_model():
    found, backend, device = lab.run(all_wrappers, 1, timeout_s=120)[0]
    assert (backend, device) == ("cpu:gloo,cuda:nccl", 0)
    assert found["plain"][-1] < found["plain"][0]
    for name in WRAPS:  # the same operations in fp32, up to their order
        assert found[name] == pytest.approx(found["plain"], rel=1e-4), name


def to_the_bit():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else a product may split its sums anew
    torch.use_deterministic_algorithms(True)


def run(kind, seed):
    torch.manual_seed(seed)
    return WRAPS[kind](GPT(SIZES, seed=seed).cuda())


def whole(kinds):
    to_the_bit()
    return {kind: train(*run(kind, 0), 6, data_from(0)) for kind in kinds}


def stopped(kinds, folder):
    to_the_bit()
    found = {}
    for kind in kinds:
        model, optimizer = run(kind, 0)
        found[kind] = train(model, optimizer, 3, data_from(0))
        extra = reliability.capture(step=3)
        if kind == "dp":
            dp.save(model, optimizer, folder / kind, extra=extra)
        else:
            zero.save(model, folder / kind, extra=extra)
    return found


def resumed(kinds, folder, forgets_the_card):
    to_the_bit()
    found = {}
    for kind in kinds:
        model, optimizer = run(kind, 40)
        train(model, optimizer, 1, data_from(9))  # all of it to be forgotten
        at = folder / kind
        extra = dp.load(model, optimizer, at) if kind == "dp" else zero.load(model, at)
        if forgets_the_card:
            for state in extra["random"]:
                del state["cuda"]
        step = reliability.restore(extra)["step"]
        found[kind] = train(model, optimizer, 3, data_from(step))
    return found


def test_a_run_with_dropout_goes_on_to_the_bit_in_a_fresh_process_with_the_cards_dice(tmp_path):
    kinds = ["dp", "ZeRO 2", "ZeRO 3"]
    expected = lab.run(whole, 1, args=(kinds,), timeout_s=120)[0]
    first = lab.run(stopped, 1, args=(kinds, tmp_path), timeout_s=120)[0]
    rest = lab.run(resumed, 1, args=(kinds, tmp_path, False), timeout_s=120)[0]
    for kind in kinds:
        assert first[kind] + rest[kind] == expected[kind], kind
    wrong = lab.run(resumed, 1, args=(kinds, tmp_path, True), timeout_s=120)[0]  # the mutant
    for kind in kinds:
        assert wrong[kind] != rest[kind], kind


def computes_and_sends():
    x = torch.randn(2048, 2048, device="cuda")
    (x @ x).sum().item()
    with lab.timeline() as timeline:
        y = x @ x
        dist.all_reduce(y)
        torch.cuda.synchronize()
    return timeline.compute_seconds, timeline.communication_seconds, len(timeline.intervals)


def test_a_timeline_sees_kernels():
    compute, communication, _ = lab.run(computes_and_sends, 1, timeout_s=120)[0]
    assert compute > 0
    assert communication >= 0  # NCCL with one rank may start no kernel


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", [name for name in _gpu_compression.SCHEMES if "QSGD" not in name])
def test_an_exchange_on_the_card_leaves_what_it_leaves_on_the_host(name, n):
    """QSGD's dice are the device's own."""
    of = _gpu_compression.bucket(Clock("cpu"), {"a": (64, 48), "b": (32, 16)}, torch.float32)
    found = []
    for device in ("cpu", "cuda"):
        flat = of.flat.to(device, copy=True)
        views = zip(of.views.items(), flat.split([view.numel() for view in of.views.values()]), strict=True)
        there = dp.Bucket(flat, {key: part.view(view.shape) for (key, view), part in views})
        with _gpu_compression.among(n):
            _gpu_compression.SCHEMES[name]()(there, None).wait()
        found.append(flat.cpu())
    # int8: a tie between two codes may fall either way; the others differ in the order of sums.
    assert_close(*found, rtol=1e-4, atol=0.05 if name == "int8" else 1e-4)
