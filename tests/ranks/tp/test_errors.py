"""What is refused, by which words, and before anything is sent."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtlib import lab
from dtlib.lab.recorder import Recorder
from dtlib.ranks import tp, zero
from dtlib.ranks.model import GPT, GPTConfig

TOKENS = torch.zeros(1, 4, dtype=torch.int64)
LOGITS = torch.zeros(1, 4, 3)


def group_of_the_others():
    groups = [dist.new_group([rank]) for rank in range(3)]
    return groups[(dist.get_rank() + 1) % 3]


def split_already():
    model = GPT(GPTConfig(num_heads=4))
    zero.Zero(model, functools.partial(torch.optim.SGD, lr=1), stage=3)
    tp.parallelize(model)


CALLS = {  # on three ranks
    "another model": (lambda: tp.parallelize(nn.Linear(2, 2)), "model must be a GPT of ranks.model, not Linear"),
    "a stranger's group": (
        lambda: tp.parallelize(GPT(GPTConfig()), group_of_the_others()),
        "group must contain this rank",
    ),
    "too few heads": (
        lambda: tp.parallelize(GPT(GPTConfig(num_heads=2))),
        "group must have at most num_kv_heads=2 ranks, or a multiple of it up to num_heads=2, not 3",
    ),
    "keys that do not go round": (
        lambda: tp.parallelize(GPT(GPTConfig(num_heads=8, num_kv_heads=2))),
        "num_kv_heads=2 ranks, or a multiple of it up to num_heads=8, not 3",
    ),
    "a small vocabulary": (
        lambda: tp.parallelize(GPT(GPTConfig(vocab=2))),
        "vocab must be at least .* group, 3, not 2",
    ),
    "no chunks": (lambda: tp.parallelize(GPT(GPTConfig()), chunks=0), "chunks must be at least 1, not 0"),
    "fractions of a chunk": (lambda: tp.parallelize(GPT(GPTConfig()), chunks=1.5), "chunks must be a whole number"),
    "few outputs": (lambda: tp.ColumnParallelLinear(nn.Linear(4, 2)), "out_features must be at least .* 3, not 2"),
    "few inputs": (lambda: tp.RowParallelLinear(nn.Linear(2, 4)), "in_features must be at least .* 3, not 2"),
    "logits of another slice": (
        lambda: tp.next_token_loss(LOGITS, TOKENS, vocab=12),
        r"logits_bsv must be of shape \(b, s, 4\), this rank's of 12 tokens, not \(1, 4, 3\)",
    ),
    "a target outside": (
        lambda: tp.next_token_loss(LOGITS, TOKENS + 9, vocab=9),
        "targets_bs must be from 0 to vocab-1=8, not 9",
    ),
    "a negative target": (
        lambda: tp.next_token_loss(LOGITS, TOKENS - 3, vocab=9),
        "targets_bs must be from 0 to vocab-1=8, not -3",
    ),
    "another reduction": (
        lambda: tp.next_token_loss(LOGITS, TOKENS, vocab=9, reduction="none"),
        "reduction must be mean or sum, not 'none'",
    ),
    "a token outside": (
        lambda: tp.VocabularyParallelEmbedding(nn.Embedding(7, 2))(TOKENS + 7),
        "tokens_bs must be from 0 to vocab-1=6, not 7",
    ),
}
AFTER_A_WORD = {  # these speak before: to make a model to be refused, or to find the ranks unlike
    "split twice": (lambda: tp.parallelize(tp.parallelize(GPT(GPTConfig()))), "model must have its weights whole"),
    "split by ZeRO": (split_already, "model must have its weights whole"),
    "unlike": (
        lambda: tp.parallelize(GPT(GPTConfig(mlp_ratio=1 + dist.get_rank()))),
        "module must be alike on all ranks",
    ),
    "a checkpoint of another size": (
        lambda: tp.load_state_dict(tp.parallelize(GPT(GPTConfig(vocab=9))), GPT(GPTConfig(vocab=10)).state_dict()),
        r"token_embedding.weight must be whole, with 9 entries along dim 0, not \(10, 64\)",
    ),
    "a negative norm": (
        lambda: tp.clip_grad_norm(tp.parallelize(GPT(GPTConfig())), -1),
        "max_norm must be at least 0, not -1",
    ),
}


def refused():
    found = {}
    for name, (call, _) in (CALLS | AFTER_A_WORD).items():
        with Recorder() as recorder:
            try:
                call()
            except ValueError as error:
                found[name] = str(error), len(recorder.log)
    return found


@functools.cache
def errors():
    return lab.run(refused, 3)


@pytest.mark.parametrize("name", CALLS | AFTER_A_WORD)
def test_bad_input_is_named(name):
    for rank in errors():
        said, calls = rank[name]
        with pytest.raises(ValueError, match=(CALLS | AFTER_A_WORD)[name][1]):
            raise ValueError(said)
        assert name in AFTER_A_WORD or calls == 0


def test_outside_of_a_group_it_says_so():
    with pytest.raises(ValueError, match=r"group needs torch\.distributed"):
        tp.parallelize(GPT(GPTConfig()))
