"""One call that splits a GPT of `ranks.model` over the ranks of a group, in place."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtlib.ranks.mesh import Group
from dtlib.ranks.model import GPT, MLP
from dtlib.ranks.shared.alike import size_of
from dtlib.ranks.shared.replicas import begin_alike, broadcast, split_modules
from dtlib.ranks.shared.split import SplitModule, evenly
from dtlib.theory.valid import whole

from .blocks import ALL_TOKENS, Layers, refuse_degree, sharers_of, split_attention, split_mlp
from .experts import split_experts
from .vocabulary import vocabulary_of


def parallelize(model: GPT, group: Group = None, *, chunks: int = 1) -> GPT:
    """Split `model`, which is changed and returned, over the ranks of `group` (None: all ranks).

    | | whole | this rank | sent by an all-reduce of b·s·h elements |
    |---|---|---|---|
    | embedding | (v, h) | (v/t, h) | forward |
    | attention, MLP of each layer | heads, width f | heads/t, f/t | forward, backward, each |
    | norms, learned positions, biases behind the sums | all | all | never |
    | head | (v, h) | (v/t, h) | backward |
    | experts, shared ones too, in the place of an MLP | width f of each | f/t | forward, backward |
    | router | all | all | never, but its weights' gradients |

    All ranks begin with the weights of the group's rank 0, whatever they had, and throw its dice from now on, where
    they hold the same tensors; ``torch.manual_seed`` is called for that. The model is called as before. Its logits are
    this rank's slice (b, s, v/t), for `next_token_loss` of this package. All ranks must call it with the same tokens,
    and build their optimizer afterwards. What is frozen or tied stays so. Products in front of an all-reduce are cut in
    `chunks`, see `RowParallelLinear`. A model on the meta device is split there. Put `activations.recompute` on top.

    ``ValueError`` before anything is sent for another model, one that is split already, heads or a vocabulary that
    do not go round, `chunks` below 1, or a group without this rank; on all ranks where their models are not alike.
    """
    return split_all(model, group, chunks, ALL_TOKENS)


def split_all(model: GPT, group: Group, chunks: int, layers: Layers) -> GPT:
    """`parallelize`, with these layers."""
    _refuse(model, group)
    whole("chunks", chunks, 1)
    config, device = model.config, next(model.parameters()).device
    begin_alike(model, group)
    if dist.get_world_size(group) > 1 and device.type != "meta":
        _throw_the_same_dice(device, group)
    sharers, tied = sharers_of(config.kv_heads, group), model.head.weight is model.token_embedding.weight
    for block in model.blocks:
        split_attention(block.attention, group, sharers=sharers, chunks=chunks, layers=layers)
        if isinstance(block.mlp, MLP):
            split_mlp(block.mlp, group, chunks=chunks, layers=layers)
        else:
            split_experts(block.mlp, group, layers.around)
    model.token_embedding = layers.embedding(model.token_embedding, group)
    model.head = layers.column(model.head, group)
    if tied:
        model.head.weight = model.token_embedding.weight
    return model


def _refuse(model: GPT, group: Group) -> None:
    if not isinstance(model, GPT):
        raise ValueError(f"model must be a GPT of ranks.model, not {type(model).__name__}")
    if not dist.is_initialized():
        raise ValueError("group needs torch.distributed: call this in a rank of lab.run, or after init_process_group")
    t = size_of(group)
    if any(isinstance(each, SplitModule) or each in split_modules for each in model.modules()):
        raise ValueError("model must have its weights whole, and is split already")
    config = model.config
    refuse_degree(config.num_heads, config.kv_heads, t)
    vocabulary_of(config.vocab, group)
    if config.num_experts:
        evenly("expert_hidden", config.expert_hidden, t)


def _throw_the_same_dice(device: torch.device, group: Group) -> None:
    if dist.get_backend(group) != "fake":
        seed = torch.randint(2**62, (1,)).to(device)
        broadcast([seed], group)
        torch.manual_seed(int(seed))
