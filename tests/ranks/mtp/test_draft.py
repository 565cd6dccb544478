"""A checked draft gives what plain greedy decoding gives, token for token, whatever the heads have learnt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from dtlib import theory
from dtlib.ranks import mtp
from dtlib.ranks.model import GPT

from .test_heads import CONFIG, KINDS, LLAMA, MIXED

LONG = {
    "gpt": replace(CONFIG, seq=44),
    "llama": replace(LLAMA, seq=44),
    "experts": replace(MIXED, seq=44),
    "one layer": replace(CONFIG, seq=44, num_layers=1),
}
ONE_LAYER = [("one layer", 2), ("one layer", 4)]
PROMPT = torch.tensor([3, 1, 4, 1, 5])


def trained(kind: str, config: str, n: int) -> mtp.Heads:
    """Heads that have learnt a text that repeats itself, so that some guesses are right and some are not."""
    torch.manual_seed(0)
    heads = KINDS[kind](GPT(LONG[config]), n)
    text = torch.randint(23, (17,)).repeat(4)
    adam = torch.optim.Adam(heads.parameters(), lr=3e-3)
    for start in torch.randint(17, (12,)).tolist():
        heads.backward(text[None, start : start + 44], text[None, start + 1 : start + 45])
        adam.step()
        adam.zero_grad()
    return heads


def without_a_cache(model: GPT, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    tokens = prompt
    for _ in range(new_tokens):
        tokens = torch.cat([tokens, model(tokens[None])[0, -1:].argmax(-1)])
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("config", "n"), [("gpt", 2), ("gpt", 4), ("llama", 4), ("experts", 4), *ONE_LAYER])
def test_a_checked_draft_is_greedy_decoding(kind, config, n):
    heads = trained(kind, config, n)
    with torch.no_grad():
        wanted = without_a_cache(heads.model, PROMPT, 35)
    assert_close(mtp.greedy(heads.model, PROMPT, 35), wanted)
    for k in range(n):
        found = mtp.draft_and_check(heads, PROMPT, 35, drafted=k)
        assert_close(found.tokens, wanted)
        assert 1 + sum(1 + right for _, right in found.passes) == 35
        assert all(right <= many <= k for many, right in found.passes)
    if n == 4:
        assert {right for many, right in found.passes if many == 3} != {0}, "no guess was right: nothing was tried"
        assert len(found.passes) < 34


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [1, 2, 20])
def test_drafts_are_what_the_heads_say_without_a_cache(kind, prompt):
    """Each guess, from all tokens so far at once."""
    heads = trained(kind, "gpt", 4)
    text = torch.randint(23, (prompt,), generator=torch.Generator().manual_seed(1))
    seen = []

    found = mtp.draft_and_check(heads, text, 24)
    tokens = found.tokens
    at = prompt + 1
    for many, right in found.passes:
        known, guesses = tokens[:at].tolist(), []
        for k in range(1, many + 1):
            with torch.no_grad():
                padded = torch.tensor([[*known, *guesses]])
                states = list(heads.states(padded[:, : at - 1], padded[:, 1:at]))
                if kind == "sequential":
                    state = states[0]
                    for j in range(1, k + 1):
                        state = heads.module(j, state, padded[:, j : at - 1 + j])
                else:
                    state = states[k]
                guesses.append(int(heads.logits(k, state)[0, -1].argmax()))
        agree = next((j for j, each in enumerate(guesses) if at + j >= len(tokens) or each != tokens[at + j]), many)
        assert agree == right, (known, guesses)
        seen.append(right)
        at += right + 1
    assert len(set(seen)) > 1


def test_a_cache_that_is_not_rolled_back_is_told(monkeypatch):
    heads = trained("independent", "gpt", 4)
    wanted = mtp.greedy(heads.model, PROMPT, 35)
    monkeypatch.setattr(mtp.Cache, "roll_back", lambda self, length: None)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        assert_close(mtp.draft_and_check(heads, PROMPT, 35).tokens, wanted)


def test_a_cache_ends_with_its_block():
    model = GPT(LONG["gpt"])
    core = model.blocks[0].attention.core
    with mtp.Cache(model.blocks) as cache:
        model(PROMPT[None])
        assert cache.length == 5
        cache.roll_back(2)
        assert cache.length == 2
        with pytest.raises(ValueError, match="length must be at most the 2 positions that are known, not 3"):
            cache.roll_back(3)
    assert model.blocks[0].attention.core is core


def test_experts_with_a_capacity_are_refused():
    """One may turn a token of the draft away because of the others, and would take it alone."""
    heads = mtp.IndependentHeads(GPT(replace(LONG["experts"], capacity_factor=1.0)), 2)
    with pytest.raises(ValueError, match="heads must have experts without a capacity_factor"):
        mtp.draft_and_check(heads, PROMPT, 3)


def test_what_is_counted_of_passes():
    found = mtp.Drafted(PROMPT, ((2, 0), (2, 2), (2, 1), (2, 2), (1, 1)))
    assert found.tokens_per_pass(2) == 1 + 5 / 4
    assert found.acceptance(2) == [3 / 4, 2 / 3]
    q = 0.5
    assert theory.mtp.accepted_tokens(q, 2) == 1.75


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda heads: mtp.greedy(heads.model, PROMPT[:0], 3), "prompt must be tokens"),
        (lambda heads: mtp.greedy(heads.model, PROMPT[None], 3), "prompt must be tokens"),
        (lambda heads: mtp.greedy(heads.model, PROMPT, 40), "new_tokens must fit into seq=44 behind 5, not 40"),
        (lambda heads: mtp.draft_and_check(heads, PROMPT, -1), "new_tokens must be"),
        (lambda heads: mtp.draft_and_check(heads, PROMPT, 3, drafted=2), "drafted must be at most 1"),
    ],
)
def test_bad_input_is_named(call, message):
    heads = mtp.IndependentHeads(GPT(LONG["gpt"]), 2)
    with pytest.raises(ValueError, match=message):
        call(heads)
