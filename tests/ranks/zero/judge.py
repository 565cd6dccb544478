"""`assert_correct` trains with a wrapper on ranks that were seeded differently, and compares everything with one
process on the whole batch: weights, norms, the bytes each rank sent, and the bytes each rank keeps."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from dtlib import lab, theory

# float64 throughout: sums over ranks and over rows come in another order, an error of a few 2⁻⁵³ relative to the
# largest term, and AdamW divides by its own estimate of the gradient, so that small gradients inherit the relative
# error of the large ones. 1e-9 leaves room for that and is far below any wrong factor: AdamW's steps are 1e-2.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
WIDTH, ITEM, BATCH, STEPS, MICRO_BATCHES, MAX_NORM = 192, 8, 12, 3, 2, 0.05


class Awkward(nn.Module):
    """Tied, frozen, 0-dimensional, empty and tiny parameters, and buffers that move.

    One of its layers begins with a frozen matrix, whose weights the gradient of its input needs after the last
    gradient of a weight is there. The sizes are odd, so that no number of ranks divides them.
    """

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, dtype=torch.float64)
        self.scale = nn.Parameter(torch.rand((), dtype=torch.float64))
        self.tiny = nn.Parameter(torch.rand(3, dtype=torch.float64))
        self.empty = nn.Parameter(torch.rand(0, 4, dtype=torch.float64))
        self.embedding = nn.Embedding(11, width, dtype=torch.float64)
        frozen = linear(width, width).requires_grad_(False)
        self.layers = nn.ModuleList(
            [
                linear(width, width + 1),
                nn.Sequential(linear(width + 1, width).requires_grad_(False), nn.Tanh(), linear(width, width)),
                frozen,
                linear(width, width),
            ]
        )
        self.head = linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.rand(3, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.seen += tokens.double().mean()  # another value on each rank; it shifts all logits alike, so no matter
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        shift = self.tiny[0] * self.tiny[1:].sum() + self.empty.sum()
        return self.head(x * (1 + shift)) * self.scale + 0.01 * self.seen.sum()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices decay, the rest does not and is slower."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


make_adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return (
        torch.randint(11, (MICRO_BATCHES, BATCH, 5), generator=generator),
        torch.randint(11, (MICRO_BATCHES, BATCH, 5), generator=generator),
    )


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@functools.cache
def single_process(accumulate: bool) -> dict[str, Any]:
    """The weights, moments and norms after three AdamW steps of one process, from the weights that rank 0 draws."""
    torch.manual_seed(0)
    model = Awkward()
    optimizer = make_adamw([{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in groups(model)])
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = whole_batch(step)
        micro = range(MICRO_BATCHES if accumulate else 1)
        for i in micro:
            (loss_of(model, tokens[i], targets[i]) / len(micro)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return {"weights": {k: v.clone() for k, v in model.state_dict().items()}, "norms": norms}


Make = Callable[..., Any]


def on_a_rank(make: Make, accumulate: str, per_node: int) -> dict[str, Any]:
    """Three steps on this rank's rows. `accumulate` is "no", "quiet" (inside no_sync) or "sync" (a sync each time).

    "crossed" are the bytes that the last step sends from node to node.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # every rank draws other weights: only a broadcast makes them equal
    model = Awkward()
    before = {id(storage): storage for storage in storages(tensors())}
    wrapped = make(model, make_adamw, param_groups=groups(model))
    result: dict[str, Any] = {"norms": [], "sent": [], "quiet": 0, "held": []}
    rows = slice(rank * BATCH // n, (rank + 1) * BATCH // n)
    micro = range(1 if accumulate == "no" else MICRO_BATCHES)
    for step in range(STEPS):
        wrapped.optimizer.zero_grad()
        tokens, targets = whole_batch(step)
        sent, crossed = 0, 0
        for i in micro:
            quiet = accumulate == "quiet" and i != micro[-1]
            with lab.messages() as seen, lab.wire() as wire, wrapped.no_sync() if quiet else nullcontext():
                loss = loss_of(wrapped, tokens[i, rows], targets[i, rows]) / len(micro)
                loss.backward()
            sent += wire.sent_bytes
            own = [each for each in seen.log if each.kind == "sent" and each.peer // per_node != rank // per_node]
            crossed += sum(each.num_bytes for each in own)
        del loss, tokens, targets
        after_backward = held(wrapped, before)
        result["norms"].append(wrapped.clip_grad_norm_(MAX_NORM).item())
        with lab.wire() as wire:
            wrapped.optimizer.step()
        result["sent"].append(sent + wire.sent_bytes)
        result["held"].append((after_backward, held(wrapped, before)))
    result["weights"], result["crossed"] = wrapped.state_dict(), crossed
    result["flats"] = flats(wrapped)
    return result


def tensors() -> Iterable[Tensor]:
    """Every tensor that this process holds."""
    gc.collect()
    for each in gc.get_objects():
        if isinstance(each, Tensor):
            yield each
            if each.is_leaf and each.grad is not None:
                yield each.grad


def storages(tensors: Iterable[Tensor]) -> Iterable[Any]:
    """The blocks of memory behind tensors, each once."""
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values()


def held(wrapped: Any, before: dict[int, Any]) -> dict[str, int]:
    """Bytes that this process holds, by kind; `others` is what belongs to none and was not there before."""
    weights = [p for group in wrapped.optimizer.param_groups for p in group["params"]]
    params = [*wrapped.module.parameters(), *weights]
    states = [t for p in weights for t in wrapped.optimizer.state[p].values() if isinstance(t, Tensor)]
    kinds = {
        "weights": params,
        "gradients": [p.grad for p in params if p.grad is not None],
        "steps": [t for t in states if not t.dim()],
        "states": [t for t in states if t.dim()],
        "others": [*tensors()],
    }
    seen = {storage._cdata for storage in before.values()}
    result = {}
    for kind, members in kinds.items():
        mine = [s for s in storages(members) if kind == "weights" or s._cdata not in seen]
        seen |= {s._cdata for s in mine}
        result[kind] = sum(s.nbytes() for s in mine)
    return result


def flats(wrapped: Any) -> list[tuple[int, bool]]:
    """Elements of each shard's flat buffer, and whether it is trained."""
    return [(shard.num_elements, shard.is_trained) for shard in wrapped.all_shards]


def expected_bytes(stage: int, n: int, rank: int, flats: Iterable[tuple[int, bool]]) -> dict[str, int]:
    """What rank `rank` of `n` must hold: full or split as the stage says, each flat buffer by itself."""
    shapes = {p: p.numel() for p in Awkward().parameters()}
    full = sum(shapes.values())
    trained = sum(size for p, size in shapes.items() if p.requires_grad)
    mine = {True: 0, False: 0}
    for size, is_trained in flats:
        mine[is_trained] += theory.zero.shard_elements((size,), n, rank)
    return {
        "weights": ITEM * (full if stage < 3 else mine[True] + mine[False]),
        "gradients": ITEM * (trained if stage < 2 else mine[True]),
        "states": ITEM * 2 * mine[True],
    }


def expected_sent(stage: int, n: int, accumulate: str) -> float:
    """(N−1)/N · D times the number of exchanges in a step."""
    sizes = {kind: sum(p.numel() for p in Awkward().parameters() if p.requires_grad == kind) for kind in (True, False)}
    share = ITEM * (n - 1) / n
    passes = 1 if accumulate == "no" else MICRO_BATCHES
    scatters = 1 if accumulate == "quiet" else passes
    if stage < 3:
        return share * sizes[True] * (scatters + 1)
    return share * (sizes[True] * scatters + 2 * passes * (sizes[True] + sizes[False]))


def assert_correct(
    make: Make, stage: int, n: int, *, accumulate: str = "no", split_over: int | None = None, sent: float | None = None
) -> list[dict[str, Any]]:
    """Raise AssertionError unless `make` trains as one process would, sends (`sent` bytes) and keeps exactly what it
    must: each thing split over all ranks, or over so many neighbours. Returns what each rank found."""
    oracle, q = single_process(accumulate != "no"), split_over or n
    want = expected_sent(stage, n, accumulate) if sent is None else sent
    results = lab.run(on_a_rank, n, args=(make, accumulate, q), timeout_s=120)
    for rank, result in enumerate(results):
        for name, weight in result["weights"].items():
            if name not in ("seen", "calls"):
                assert_close(weight, oracle["weights"][name], **CLOSE, msg=lambda m, k=name: f"weight {k}: {m}")
        assert_close(result["norms"], oracle["norms"], rtol=1e-9, atol=0, msg=lambda m: f"norm: {m}")
        expected = expected_bytes(stage, q, rank % q, result["flats"])
        for moment in result["held"]:
            for now in moment:
                for kind, num_bytes in expected.items():
                    if kind == "states" and not now["states"] and moment is result["held"][0]:
                        continue  # before the first step there are none
                    assert now[kind] == num_bytes, f"bytes of {kind}: {now[kind]}, not {num_bytes} (rank {rank} of {n})"
                assert now["others"] < 4096, f"{now['others']} bytes of other tensors are left"
        for each in result["sent"][1:]:  # in the first step connections are made
            # buffers (32 bytes), and headers of about 100 bytes a message: well below one percent of a megabyte
            assert_close(float(each), want, rtol=0.01, atol=1.0, msg=lambda m: f"bytes sent: {m}")
    return results
