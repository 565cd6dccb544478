"""Experts on a mesh: on ranks of dp, beside tp, pp, cp and every stage of ZeRO, a model trains like one process's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .judge import GPT, LLAMA, case, check

MOE = replace(GPT, num_experts=4, top_k=2, num_shared=1, first_dense=1, expert_ratio=1.5)
DEEPSEEK = replace(LLAMA, num_experts=6, top_k=3, scoring="sigmoid", expert_groups=3, top_groups=2, expert_scale=2.5)
UNEVEN = replace(MOE, num_experts=3, num_shared=0)
B = 0.5  # the weight of the balance loss: as large as the other, so that a wrong factor is seen
CASES = [
    case("dp 4", config=MOE, ep=4, zero=3, balance=B), case("dp 4", m=1, config=MOE, ep=2, zero=1, balance=B),
    case("dp 4", config=UNEVEN, ep=2, zero=2), case("dp 4", config=MOE, ep=1, balance=B),
    case("dp 2, tp 2", config=MOE, ep=2, balance=B), case("tp 2, dp 2", config=DEEPSEEK, ep=2, zero=3, balance=B),
    case("dp 2, pp 2", config=DEEPSEEK, ep=2, zero=2, balance=B),
    case("dp 2, pp 2", "ZB-H1", m=4, config=MOE, ep=2, zero=1, balance=B),
    case("pp 2, dp 2", "interleaved", config=DEEPSEEK, ep=2, recompute="full", balance=B),
    case("cp 2, dp 2", config=MOE, ep=2, zero=3, balance=B), case("dp 2, cp 2", config=MOE, ep=2, balance=B),
    case("tp 2, cp 2", config=MOE, balance=B), case("dp 4", config=MOE, ep=2, frozen=("blocks.1.mlp.experts",), zero=3),
]  # fmt: skip


def test_experts_on_a_mesh_train_like_one_process():
    check(4, CASES)


@pytest.mark.soak
def test_experts_train_like_one_process_on_three_axes():
    check(8, [
        case("dp 4, tp 2", config=MOE, ep=2, zero=2, balance=B), case("dp 2, pp 2, tp 2", config=MOE, ep=2, balance=B),
        case("dp 4, cp 2", config=DEEPSEEK, ep=2, zero=3, balance=B),
        case("dp 2, cp 2, pp 2", "ZB-H1", m=4, config=MOE, ep=2, zero=1, balance=B),
    ])  # fmt: skip
