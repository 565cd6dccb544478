"""`train` takes three AdamW steps with a GPT, whole or split, and `compare` holds what the ranks found to one process.

All cases of one number of ranks share one start. Wrong implementations are blocks that put something wrong in place of
something right while the same training runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import tp
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT, IGNORED, GPTConfig, next_token_loss

# float64 throughout: sums over ranks come in another order, an error of a few 2⁻⁵³ relative to the largest term, and
# AdamW divides by its own estimate of the gradient, so that small gradients inherit the relative error of the large
# ones. 1e-9 leaves room for that and is far below any wrong factor: AdamW's steps are 1e-2.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
STEPS, BATCH, SEQ, MAX_NORM = 3, 2, 8, 0.5

GPT_CONFIG = GPTConfig(num_layers=2, hidden=48, num_heads=6, seq=SEQ, vocab=19, mlp_ratio=2, dtype=torch.float64)
LLAMA = replace(GPT_CONFIG, num_kv_heads=3, rms_norm=True, swiglu=True, rotary=True, biases=False, tied=False)


@dataclass(frozen=True)
class Case:
    """A model, what of it is frozen, and how it is trained."""

    config: GPTConfig
    frozen: tuple[str, ...] = ()
    micro_batches: int = 1
    chunks: int = 1
    offset: int = 0
    seq: int = SEQ


CASES = {
    "gpt": Case(GPT_CONFIG, micro_batches=2),
    "llama": Case(LLAMA, chunks=3, offset=3),
    "one key": Case(replace(GPT_CONFIG, num_kv_heads=1, written_out=True), micro_batches=2),
    "two keys": Case(replace(LLAMA, num_heads=8, num_kv_heads=2, biases=True, tied=True)),
    "frozen": Case(
        replace(GPT_CONFIG, num_kv_heads=2, tied=False, swiglu=True, vocab=4),
        frozen=("token_embedding.weight", "blocks.0.attention.qkv.weight", "blocks.0.attention.out.bias",
                "blocks.1.attention.qkv.bias", "blocks.1.mlp.down.weight", "blocks.1.mlp_norm.weight"),
        chunks=50,
    ),
}  # fmt: skip


def fits(case: Case, t: int) -> bool:
    """Whether `t` ranks can split the heads of `case`."""
    return t <= case.config.kv_heads or t % case.config.kv_heads == 0


def data(case: Case, step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of all micro-batches of a step; some targets count for nothing."""
    generator = torch.Generator().manual_seed(100 * replica + step)
    seq = case.seq - case.offset
    tokens, targets = torch.randint(case.config.vocab, (2, case.micro_batches, BATCH, seq), generator=generator)
    return tokens, targets.masked_fill(torch.rand(targets.shape, generator=generator) < 0.2, IGNORED)


Found = dict[str, Any]


class Whole:
    """One process, with the calls that a split model has."""

    def __init__(self, case: Case, seed: int) -> None:
        self.model = GPT(case.config, seed=seed)
        for name in case.frozen:
            self.model.get_parameter(name).requires_grad_(False)

    loss = staticmethod(next_token_loss)

    def clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def local(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors


class Parted(Whole):
    """A rank of a group; it begins with weights of its own, so that only a broadcast makes them those of one model."""

    def __init__(self, case: Case, seed: int, group: Any) -> None:
        super().__init__(case, seed)
        self.group, self.vocab = group, case.config.vocab
        tp.parallelize(self.model, group, chunks=case.chunks)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return tp.next_token_loss(logits, targets, vocab=self.vocab, group=self.group)

    def clip(self) -> Tensor:
        return tp.clip_grad_norm(self.model, MAX_NORM, group=self.group)

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tp.unsplit(self.model, tensors)

    def local(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tp.split(self.model, tensors)


def train(one: Whole, case: Case, replica: int, steps: Iterable[int] = range(STEPS), saved: Any = None) -> Found:
    """Losses, gradients and norms of the steps, then the weights, the moments, and a loss without gradients; all whole.
    `saved` is such a result, to begin with."""
    model, names = one.model, [name for name, p in one.model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([model.get_parameter(name) for name in names], lr=1e-2, weight_decay=0.1)
    if saved:
        model.load_state_dict(one.local(saved["weights"]))
        for key in ("exp_avg", "exp_avg_sq"):
            for name, moment in one.local(saved[key]).items():
                parameter = model.get_parameter(name)
                optimizer.state[parameter] |= {key: moment.clone(), "step": torch.tensor(float(saved["steps"]))}
    found: Found = {"losses": [], "gradients": [], "norms": []}
    for step in steps:
        optimizer.zero_grad()
        found["losses"].append([])
        tokens, targets = data(case, step, replica)
        for each_tokens, each_targets in zip(tokens, targets, strict=True):
            loss = one.loss(model(each_tokens, offset=case.offset), each_targets) / case.micro_batches
            loss.backward()
            found["losses"][-1].append(loss.item())
        found["gradients"].append(one.whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        found["norms"].append(one.clip().item())
        optimizer.step()
    with torch.no_grad():
        loss = one.loss(model(tokens[0], offset=case.offset), targets[0])
    found |= {"without": loss.item(), "steps": step + 1, "records a graph": loss.requires_grad}
    found["weights"] = one.whole(model.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        found[key] = one.whole({name: optimizer.state[model.get_parameter(name)][key] for name in names})
    return found


@functools.cache
def one_process(case: Case, seed: int, replica: int) -> dict[str, Any]:
    return train(Whole(case, seed), case, replica)


def groups(t: int) -> tuple[Any, int, int]:
    """The group of `t` ranks that this one is in, which of these groups it is, and the first rank of it."""
    mesh = Mesh({"dp": dist.get_world_size() // t, "tp": t})
    return mesh.group("tp"), mesh.coordinates()["dp"], mesh.ranks("tp")[0]


Mutant = Callable[[], AbstractContextManager[Any]]


def on_a_rank(
    t: int, runs: Sequence[tuple[str, Mutant]], cases: Mapping[str, Case], parted: Callable[..., Whole]
) -> list[dict[str, Any]]:
    """One training after another; each rank seeds its model differently."""
    group, replica, first = groups(t)
    results = []
    for name, mutant in runs:
        with mutant():
            found = train(parted(cases[name], dist.get_rank(), group), cases[name], replica)
        results.append(found | {"replica": replica, "seed": first})
    return results


def compare(case: Case, ranks: Sequence[dict[str, Any]]) -> None:
    """Raise AssertionError unless every rank found what one process finds, and all of a group the same to the bit."""
    for found in ranks:
        oracle = one_process(case, found["seed"], found["replica"])
        for step in range(STEPS):
            for what in ("losses", "gradients", "norms"):
                assert_close(found[what][step], oracle[what][step], **CLOSE, msg=lambda m, what=what: f"{what}: {m}")
        for what in ("without", "exp_avg", "exp_avg_sq", "weights"):
            assert_close(found[what], oracle[what], **CLOSE, msg=lambda m, what=what: f"{what}: {m}")
        assert not found["records a graph"]
        peer = next(each for each in ranks if each["replica"] == found["replica"])
        assert_close(found["weights"], peer["weights"], rtol=0, atol=0, msg=lambda m: f"ranks drift apart: {m}")


def judge(
    world_size: int,
    t: int,
    runs: Sequence[tuple[str, Mutant]],
    cases: Mapping[str, Case] = CASES,
    parted: Callable[..., Whole] = Parted,
) -> list[Callable[[], None]]:
    """Train all `runs` in one start, and hand back for each the comparison that is still to be made."""
    by_rank = lab.run(on_a_rank, world_size, args=(t, runs, cases, parted), timeout_s=120)
    return [
        functools.partial(compare, cases[name], [results[number] for results in by_rank])
        for number, (name, _) in enumerate(runs)
    ]


right: Mutant = nullcontext
patched = mock.patch.object
