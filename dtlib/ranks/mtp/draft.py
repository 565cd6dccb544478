"""Greedy decoding, plain and with a draft that the heads make and the model checks in one pass.

One sequence at a time. `tokens` are all that is known, t of them; the model has read all but the last of these.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtlib.ranks.model import GPT
from dtlib.theory.valid import whole

from .cache import Cache
from .heads import Heads, IndependentHeads


@dataclass(frozen=True)
class Drafted:
    """What decoding gave: all `tokens`, the prompt among them, and for each pass how many were drafted and how many of
    these were right, up to the first wrong one. A pass gives one token more than were right: the model's own."""

    tokens: Tensor
    passes: tuple[tuple[int, int], ...]

    def tokens_per_pass(self, drafted: int) -> float:
        """The mean of the passes that checked so many drafted tokens, the model's own token counted."""
        right = [each for many, each in self.passes if many == drafted]
        return 1 + sum(right) / len(right)

    def acceptance(self, drafted: int) -> list[float]:
        """Of the passes that checked so many: how often the j-th was right where all before it were."""
        right = [each for many, each in self.passes if many == drafted]
        reached = [sum(each >= j for each in right) for j in range(drafted + 1)]
        return [reached[j + 1] / reached[j] for j in range(drafted) if reached[j]]


@torch.no_grad()
def greedy(model: GPT, prompt: Tensor, new_tokens: int) -> Tensor:
    """`prompt` (s,) and the `new_tokens` that the model finds likeliest, one pass of one token each.

    ``ValueError`` for an empty prompt, or where all of it does not fit the model.
    """
    tokens = _begin(model, prompt, new_tokens)
    with Cache(model.blocks) as cache:
        while len(tokens) < len(prompt) + new_tokens:
            new = torch.tensor(tokens[cache.length :], device=prompt.device)
            start = cache.length
            logits_bsv = model(new[None], offset=start)
            tokens.append(int(logits_bsv[0, -1].argmax()))
    return torch.tensor(tokens, device=prompt.device)


@torch.no_grad()
def draft_and_check(heads: Heads, prompt: Tensor, new_tokens: int, *, drafted: int | None = None) -> Drafted:
    """What `greedy` gives, token for token, in fewer passes: the further heads draft, and one pass of the model over
    the draft tells what it would have said itself behind each token.

    The draft counts up to its first wrong token, where the model's own takes its place. What was read of wrong tokens
    is rolled back. `drafted` tokens at most, by default all n − 1. Equal where two scores that rounding could exchange
    do not meet: a pass over several tokens adds up in another order. ``ValueError`` as `greedy`, for more than the
    heads can draft, and for experts with a capacity, who may turn a token away because of those read beside it.
    """
    if heads.model.config.num_experts and heads.model.config.capacity_factor is not None:
        raise ValueError("heads must have experts without a capacity_factor: what they answer hangs on the pass")
    most = heads.predicted - 1 if drafted is None else whole("drafted", drafted, 0)
    if most > heads.predicted - 1:
        raise ValueError(f"drafted must be at most {heads.predicted - 1}, the further heads, not {most}")
    tokens, passes = _begin(heads.model, prompt, new_tokens), []
    end, drafts = len(prompt) + new_tokens, list[int]()
    with ExitStack() as stack:
        kind = _BesideEachOther if isinstance(heads, IndependentHeads) else _BehindEachOther
        reader = kind(heads, stack)
        while len(tokens) < end:
            is_prompt = not reader.length
            fed = torch.tensor([*tokens[reader.length :], *drafts], device=prompt.device)
            says = reader.read(fed)[-1 - len(drafts) :].argmax(-1).tolist()
            right = next((j for j, each in enumerate(drafts) if each != says[j]), len(drafts))
            if not is_prompt:
                passes.append((len(drafts), right))
            tokens += [*drafts[:right], says[right]]
            reader.keep(len(tokens) - 1)
            drafts = reader.draft(tokens, max(0, min(most, end - len(tokens) - 1)))
    return Drafted(torch.tensor(tokens, device=prompt.device), tuple(passes))


def _begin(model: GPT, prompt: Tensor, new_tokens: int) -> list[int]:
    if prompt.dim() != 1 or not len(prompt):
        raise ValueError(f"prompt must be tokens (s,), at least one, not of shape {tuple(prompt.shape)}")
    if len(prompt) + whole("new_tokens", new_tokens, 0) > model.config.seq:
        raise ValueError(f"new_tokens must fit into seq={model.config.seq} behind {len(prompt)}, not {new_tokens}")
    return [int(each) for each in prompt]


class _BesideEachOther:
    """Heads that all read the trunk: they guess from the last position that was kept."""

    def __init__(self, heads: Any, stack: ExitStack) -> None:
        self.heads, self.model = heads, heads.model
        self.tops = [self.model.blocks[-1], *heads.blocks]
        self.caches = [stack.enter_context(Cache([block])) for block in [*self.tops, *self.model.blocks[:-1]]]
        self.start, self.last, self.states = 0, -1, list[Tensor]()

    @property
    def length(self) -> int:
        """Positions that were read and kept."""
        return self.caches[0].length

    def read(self, tokens_s: Tensor) -> Tensor:
        """The model's scores behind each of these tokens, (s, v)."""
        self.start = self.length
        where = {"offset": self.start} if self.model.config.rotary else {}
        x_bsh = self.model.embed(tokens_s[None], self.start)
        for block in self.model.blocks[:-1]:
            x_bsh = block(x_bsh, **where)
        self.states = [block(x_bsh, **where) for block in self.tops]
        return self.heads.logits(0, self.states[0])[0]

    def keep(self, length: int) -> None:
        """Forget what was read from position `length` on."""
        for cache in self.caches:
            cache.roll_back(length)
        self.last = length - 1 - self.start

    def draft(self, tokens: list[int], k: int) -> list[int]:
        """What the first k further heads say."""
        ends = [state[:, self.last, None] for state in self.states[1 : k + 1]]
        return [int(self.heads.logits(j, end).argmax()) for j, end in enumerate(ends, 1)]


class _BehindEachOther:
    """Modules that each read the one before and a token. What module k reads at its last positions are guesses, so it
    knows k positions fewer than the model does."""

    def __init__(self, heads: Any, stack: ExitStack) -> None:
        self.heads, self.model = heads, heads.model
        self.cache = stack.enter_context(Cache(self.model.blocks))
        self.caches = [stack.enter_context(Cache([block])) for block in heads.blocks]
        weight = heads.model.norm.weight
        self.states = [torch.empty(1, 0, len(weight), dtype=weight.dtype, device=weight.device)] * heads.predicted

    @property
    def length(self) -> int:
        """Positions that were read and kept."""
        return self.cache.length

    def read(self, tokens_s: Tensor) -> Tensor:
        """The model's scores behind each of these tokens, (s, v)."""
        start = self.length
        state_bsh = self.model.run_blocks(self.model.embed(tokens_s[None], start), **self._where(start))
        self.states[0] = torch.cat([self.states[0], state_bsh], 1)
        return self.heads.logits(0, state_bsh)[0]

    def keep(self, length: int) -> None:
        """Forget what was read from position `length` on, and of module k what hangs on a token that was a guess."""
        self.cache.roll_back(length)
        self.states[0] = self.states[0][:, :length]
        for k, cache in enumerate(self.caches, 1):
            cache.roll_back(min(cache.length, max(0, length - k)))
            self.states[k] = self.states[k][:, : cache.length]

    def draft(self, tokens: list[int], k: int) -> list[int]:
        """What the first k modules say, each from the guess of the one before."""
        known, stop = list(tokens), self.length
        for j, cache in enumerate(self.caches[:k], 1):
            start = cache.length
            new = torch.tensor([known[start + j : stop + j]], device=self.states[0].device)
            state_bsh = self.heads.module(j, self.states[j - 1][:, start:stop], new, **self._where(start))
            self.states[j] = torch.cat([self.states[j], state_bsh], 1)
            known.append(int(self.heads.logits(j, state_bsh[:, -1:]).argmax()))
        return known[len(tokens) :]

    def _where(self, start: int) -> dict[str, int]:
        return {"offset": start} if self.model.config.rotary else {}
