"""Data parallelism against one process on the whole batch and against torch's DDP: values, gradients, bytes.

`assert_correct` is the judge: it trains a module with everything awkward in it, on ranks that were seeded differently.
The last tests hand it wrong implementations and demand that it refuses each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from dtlib import lab, theory
from dtlib.ranks import dp
from dtlib.ranks.shared import replicas

# float64 throughout: sums over ranks and over rows come in another order, an error of a few 2⁻⁵³ relative to the
# largest term, and AdamW divides by its own estimate of the gradient, so that small gradients inherit the relative
# error of the large ones. 1e-9 leaves room for that and is far below any wrong factor.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
BATCH, STEPS, MICRO_BATCHES = 12, 3, 2


class Awkward(nn.Module):
    """Tied, frozen and 0-dimensional parameters, buffers that move; registered in another order than used."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand((), dtype=torch.float64))
        self.late = nn.Linear(width, width, dtype=torch.float64)
        self.embedding = nn.Embedding(11, width, dtype=torch.float64)
        self.frozen = nn.Linear(width, width, dtype=torch.float64).requires_grad_(False)
        self.early = nn.Linear(width, width, dtype=torch.float64)
        self.head = nn.Linear(width, 11, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.rand(3, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.seen += tokens.double().mean()  # another value on each rank; it shifts all logits alike, so no matter
        x = torch.tanh(self.frozen(self.early(self.embedding(tokens))))
        return self.head(self.late(x)) * self.scale + 0.01 * self.seen.sum()


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return (
        torch.randint(11, (MICRO_BATCHES, BATCH, 5), generator=generator),
        torch.randint(11, (MICRO_BATCHES, BATCH, 5), generator=generator),
    )


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def bare(model: nn.Module) -> nn.Module:
    return getattr(model, "module", model)


def train(model: nn.Module, rank: int, world_size: int, *, accumulate: bool) -> dict[str, Any]:
    """Three steps on this rank's rows; gradients of each step, the last weights, what was sent."""
    optimizer = torch.optim.AdamW([p for p in bare(model).parameters() if p.requires_grad], lr=1e-2)
    result: dict[str, Any] = {"grads": [], "local": [], "quiet_bytes": 0, "sent_bytes": []}
    rows = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    for step in range(STEPS):
        optimizer.zero_grad()
        all_tokens, all_targets = whole_batch(step)
        micro = range(MICRO_BATCHES) if accumulate else range(1)
        for i in micro:
            last = i == micro[-1]
            quiet = nullcontext() if last or world_size == 1 else model.no_sync()
            with lab.wire() if world_size > 1 else nullcontext() as wire, quiet:
                (loss_of(model, all_tokens[i, rows], all_targets[i, rows]) / len(micro)).backward()
            if world_size > 1 and not last:
                result["quiet_bytes"] += wire.total_bytes
                result["local"].append(bare(model).late.weight.grad.clone())
            elif world_size > 1:
                result["sent_bytes"].append(wire.total_bytes)
        grads = {name: p.grad for name, p in bare(model).named_parameters() if p.grad is not None}
        result["grads"].append({name: grad.clone() for name, grad in grads.items()})
        optimizer.step()
    result["weights"] = {name: p.detach().clone() for name, p in bare(model).named_parameters()}
    result["calls"] = bare(model).calls.item()
    return result


def on_a_rank(wrap: Callable[[nn.Module], nn.Module], accumulate: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # every rank draws other weights: only a broadcast makes them equal
    model = Awkward()
    before = model.late.weight.detach().clone()
    wrapped = wrap(model)
    return train(wrapped, rank, dist.get_world_size(), accumulate=accumulate) | {"before": before}


@functools.cache
def single_process(accumulate: bool) -> dict[str, Any]:
    torch.manual_seed(0)  # the weights that rank 0 draws
    return train(Awkward(), 0, 1, accumulate=accumulate)


def trainable_bytes() -> int:
    parameters = dict(Awkward().named_parameters())  # tied ones once
    return sum(p.numel() * p.element_size() for p in parameters.values() if p.requires_grad)


def assert_correct(wrap: Callable[[nn.Module], nn.Module], world_size: int, *, accumulate: bool = False) -> None:
    """Raise AssertionError unless `wrap` trains as one process would, sending exactly what it must."""
    ranks = lab.run(on_a_rank, world_size, args=(wrap, accumulate))
    oracle = single_process(accumulate)
    for rank, result in enumerate(ranks):
        if rank:
            assert (result["before"] != ranks[0]["before"]).any(), "the ranks must start apart, or this shows nothing"
            if accumulate:
                assert (result["local"][0] != ranks[0]["local"][0]).any(), "gradients must differ before the sync"
        for step in range(STEPS):
            assert result["grads"][step].keys() == oracle["grads"][step].keys()
            for name, grad in result["grads"][step].items():
                assert_close(grad, oracle["grads"][step][name], **CLOSE, msg=lambda m, n=name: f"gradient of {n}: {m}")
        for name, weight in result["weights"].items():
            assert_close(weight, oracle["weights"][name], **CLOSE, msg=lambda m, n=name: f"weight {n}: {m}")
            assert_close(weight, ranks[0]["weights"][name], rtol=0, atol=0)  # ranks agree to the bit
        assert result["quiet_bytes"] == 0, f"{result['quiet_bytes']} bytes were sent inside no_sync"
    if world_size > 1:
        expected = world_size * theory.dp.sent_bytes_per_step(trainable_bytes(), world_size)
        for sent in ranks[0]["sent_bytes"]:
            # buffers (32 bytes a rank) and the message headers of gloo: well below one percent of a megabyte
            assert_close(float(sent), expected, rtol=0.01, atol=0, msg=lambda m: f"bytes sent: {m}")


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "naive": dp.NaiveDataParallel,
    "flat": dp.FlatDataParallel,
    "bucketed": dp.BucketedDataParallel,
    "many buckets": lambda m: dp.BucketedDataParallel(m, bucket_bytes=1, first_bucket_bytes=1),
    "a few buckets": lambda m: dp.BucketedDataParallel(m, bucket_bytes=150_000, first_bucket_bytes=1000),
    "one bucket": lambda m: dp.BucketedDataParallel(m, first_bucket_bytes=None),
    "blocking": lambda m: dp.BucketedDataParallel(m, bucket_bytes=150_000, overlap=False),
    "own gradients": lambda m: dp.BucketedDataParallel(m, bucket_bytes=150_000, gradient_as_bucket_view=False),
    "unused allowed": lambda m: dp.BucketedDataParallel(m, bucket_bytes=150_000, find_unused_parameters=True),
    "torch's": DistributedDataParallel,  # the judge must accept what is known to be right
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_one_process(name, world_size):
    assert_correct(WRAPPERS[name], world_size, accumulate=False)


@pytest.mark.parametrize("name", sorted(WRAPPERS.keys() - {"torch's"}))  # which sends a few bytes inside no_sync
def test_equals_one_process_with_accumulation_and_one_sync(name):
    assert_correct(WRAPPERS[name], 3, accumulate=True)


# --- wrong implementations, each of which the judge must refuse ------------------------------------------------


def sum_for_mean(model: nn.Module) -> nn.Module:
    wrapped = dp.BucketedDataParallel(model)
    wrapped.world_size = 1  # the factor 1/N becomes 1
    return wrapped


def no_broadcast(model: nn.Module) -> nn.Module:
    replicas.broadcast = lambda tensors, group: None
    return dp.BucketedDataParallel(model)


class FrozenIsSent(dp.FlatDataParallel):
    def _average(self, unused):
        super()._average(unused)
        frozen = torch.cat([p.detach().flatten() for p in self.module.parameters() if not p.requires_grad])
        dist.all_reduce(torch.zeros_like(frozen))


class LastBucketDropped(dp.BucketedDataParallel):
    def _start_full_buckets(self):
        last = self._buckets.pop()
        super()._start_full_buckets()
        self._buckets.append(last)


class HookOnTheWrongTensor(dp.BucketedDataParallel):
    def _pack(self, index):  # what a hook is handed is the parameter, and this takes it for the gradient
        self._params[index].grad = self._params[index].detach().clone()
        super()._pack(index)


class SyncInsideNoSync(dp.BucketedDataParallel):
    def no_sync(self):
        return nullcontext()


class LastMicroBatchOnly(dp.BucketedDataParallel):
    def _pack(self, index):
        if self._params[index].grad is not None:
            self._params[index].grad.div_(MICRO_BATCHES)
        super()._pack(index)


class LocalOnly(dp.BucketedDataParallel):
    def _start_full_buckets(self):
        pass


MUTANTS = {
    "sum for mean": (sum_for_mean, "gradient of"),
    "no broadcast": (no_broadcast, "gradient of"),
    "frozen parameter all-reduced": (FrozenIsSent, "bytes sent"),
    "last bucket dropped": (LastBucketDropped, "gradient of"),
    "hook on the wrong tensor": (HookOnTheWrongTensor, "gradient of"),
    "sync inside no_sync": (SyncInsideNoSync, "bytes were sent inside no_sync"),
    "divided once more": (LastMicroBatchOnly, "gradient of"),
    "nothing sent": (LocalOnly, "gradient of"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_judge_refuses(name):
    mutant, words = MUTANTS[name]
    with pytest.raises(AssertionError, match=words):
        assert_correct(mutant, 3, accumulate=True)
