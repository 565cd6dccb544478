"""Experts on a mesh: on ranks of dp, beside tp, pp, cp and every stage of ZeRO, a model trains like one process's."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import dp, ep, threed, tp
from dtlib.ranks.experts import Router
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT as Model
from dtlib.ranks.model import next_token_loss
from dtlib.ranks.shared import held
from dtlib.ranks.shared.held import Held
from dtlib.ranks.threed import training

from .judge import GPT, LLAMA, ROWS, built, case, check, data, make_adamw, train
from .test_checkpoint import CLOSE, from_there, steps
from .test_training import is_refused

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
    case("tp 2, cp 2", config=MOE, balance=B), case("tp 2, pp 2", "ZB-H1", m=4, config=DEEPSEEK),
    case("tp 2, dp 2", config=DEEPSEEK, ep=2, sequence_parallel=True, balance=B),
    case("tp 4", config=MOE, sequence_parallel=True, gather_again=True, recompute="full", balance=B),
    case("dp 2, tp 2", config=MOE, ep=2, zero=1, sequence_parallel=True, balance=B),
    case("tp 2, pp 2", "ZB-H1", m=4, config=MOE, zero=1, sequence_parallel=True, recompute="selective", balance=B),
    case("cp 2, tp 2", config=DEEPSEEK, zero=3, sequence_parallel=True, balance=B),
    case("dp 4", config=MOE, ep=2, frozen=("blocks.1.mlp.experts",), zero=3),
]  # fmt: skip


def test_experts_on_a_mesh_train_like_one_process():
    check(4, CASES)


def test_experts_whose_width_three_ranks_do_not_divide_train_like_one_process():
    three = replace(UNEVEN, expert_ratio=1.25, num_shared=1)
    odd = replace(DEEPSEEK, num_kv_heads=4, expert_ratio=0.8125)
    check(3, [case("tp 3", config=three, balance=B), case("tp 3", config=odd, zero=1, recompute="full", balance=B)])


@pytest.mark.soak
def test_experts_train_like_one_process_on_three_axes():
    check(8, [
        case("dp 4, tp 2", config=MOE, ep=2, zero=2, balance=B), case("dp 2, pp 2, tp 2", config=MOE, ep=2, balance=B),
        case("dp 4, cp 2", config=DEEPSEEK, ep=2, zero=3, balance=B),
        case("dp 2, cp 2, pp 2", "ZB-H1", m=4, config=MOE, ep=2, zero=1, balance=B),
    ])  # fmt: skip


# --- which gradient is summed over what, and what counts once: each line left out ------------------------------------


def axes_without(axis):
    def group(mesh, *axes):
        return whole_group(mesh, *(each for each in axes if axes != ("same", "cp") or each != axis))

    return group


def routers_apart(model, mesh, num):
    spread(model, mesh, num)
    for each in model.modules():
        if isinstance(each, Router):
            training.dp.belongs_to(each.weight, mesh.group("tp"))  # which has one rank here


def divided_by_its_own(self, index):
    self._params[index].grad.mul_(self.world_size / dist.get_world_size(self._groups[index]))
    pack(self, index)


def everything_counts(self, tensor):
    yield tensor, self.start, True


def of_own_tokens(routed, columns, group):
    return of_sequences(routed, columns, alone_group())


def of_a_call(routed, columns, group):
    return ep.balance_loss(routed, group) * len(routed.scores_te) / columns


def once_a_rank(x, loss):
    return attached(x, 2 * loss)


def the_first_part(model, is_first):
    found = all_places(model, is_first=is_first)
    return {key: replace(each, counts=((slice(None), is_first),)) if len(each.splits) > 1 else each
            for key, each in found.items()}  # fmt: skip


def as_one(x, n):
    return x


def without_experts(self, tensor):
    return ((view, start, counts and tensor.dim() < 3) for view, start, counts in slices(self, tensor))


def alone_group():
    return Mesh({"all": dist.get_world_size(), "one": 1}).group("one")


whole_group, spread, pack, slices = Mesh.group, training._spread_experts, dp.BucketedDataParallel._pack, Held.slices
all_places = training.places
of_sequences, attached = ep.sequence_balance_loss, ep.with_loss
MUTANTS = {
    "experts, not summed over dp": ("dp 4", Mesh, "group", axes_without("same")),
    "experts, not summed over cp": ("dp 2, cp 2", Mesh, "group", axes_without("cp")),
    "experts, times ep": ("dp 4", dp.BucketedDataParallel, "_pack", divided_by_its_own),
    "routers, not summed over dp": ("dp 4", training, "_spread_experts", routers_apart),
    "a norm without some ranks' experts": ("dp 4", held, "group_of", lambda parameter, others: others),
    "a norm without experts": ("dp 4", Held, "slices", without_experts),
    "a norm with replicas": ("dp 4", Held, "slices", everything_counts),
    "a norm of the parts of one rank of tp": ("dp 2, tp 2", training, "places", the_first_part),
    "tokens of a router, once a rank of tp": ("dp 2, tp 2", tp.experts._Share, "apply", as_one),
    "weights, not summed over tp": ("dp 2, tp 2", tp.AroundExperts, "weigh", lambda self, routed: routed),
    "balance, of the tokens of one rank of cp": ("dp 2, cp 2", ep, "sequence_balance_loss", of_own_tokens),
    "balance, of a micro-batch": ("dp 2, tp 2", ep, "sequence_balance_loss", of_a_call),
    "balance, once a rank of tp": ("dp 2, tp 2", ep, "with_loss", once_a_rank),
}


def mutants(cases):
    results = []
    for mutated, (_, *where) in zip(cases, MUTANTS.values(), strict=True):
        with mock.patch.object(*where):
            results.append(train(mutated))
    return results


def test_each_line_that_is_left_out_is_refused():
    cases = [case(axes, config=MOE, ep=2, balance=B) for axes, *_ in MUTANTS.values()]
    by_rank = lab.run(mutants, 4, args=(cases,), timeout_s=200)
    for number, name in enumerate(MUTANTS):
        assert is_refused(cases[number], [found[number] for found in by_rank]), name


# --- the bias that moves without a loss term -------------------------------------------------------------------------

RATE = 0.01
BIASED = [
    case("dp 2", config=MOE, ep=2), case("dp 4", config=MOE, ep=2, zero=3), case("dp 4", m=1, config=UNEVEN, ep=2),
    case("dp 2, tp 2", config=MOE, ep=2), case("dp 2, cp 2", config=MOE, ep=2, recompute="full"),
    case("dp 2, pp 2", m=4, config=DEEPSEEK, ep=2, zero=1),
    case("dp 2, pp 2", "ZB-H1", m=4, config=MOE, ep=2, recompute="full"),
]  # fmt: skip


def moved(model, visits_le):
    """Of each layer with experts: the visits since the last step, and the bias now."""
    routers = [each for each in model.modules() if isinstance(each, Router)]
    return [(each.tolist(), router.bias_e.tolist()) for each, router in zip(visits_le, routers, strict=True)]


def biased_alone(config, rate=RATE):
    """Of three steps of one process, without `move_bias`: visits and biases by their definition."""
    model, found = Model(config), []
    adam = make_adamw(model.parameters())
    routers = [each for each in model.modules() if isinstance(each, Router)]
    for x, y in zip(*data(3), strict=True):
        with ep.routing(model) as routed:
            next_token_loss(model(x), y).backward()
        adam.step()
        adam.zero_grad()
        visits_le = torch.stack([each.experts_tk.flatten().bincount(minlength=config.num_experts) for each in routed])
        for router, visits_e in zip(routers, visits_le.double(), strict=True):
            router.bias_e += rate * torch.sign(visits_e.mean() - visits_e)
        found.append(moved(model, visits_le))
    return found


def biased(case, group_of=lambda training: training.batch_group):
    """The same of this rank's layers, in order, and which of pp it is."""
    training, found = built(case), []
    mesh, n = training.mesh, training.mesh.size("dp")
    mine = slice((at := mesh.coordinates()["dp"]) * ROWS // n, (at + 1) * ROWS // n)
    for x, y in zip(*data(3), strict=True):
        training.step(x[mine], y[mine])
        stages = training.stages.values()
        found.append([layer for each in stages for layer in moved(each, ep.move_bias(each, RATE, group_of(training)))])
    return mesh.coordinates()["pp"], found


def like_one_process(case, by_rank):
    """Every rank has the visits of all and the biases of its layers, step by step; together they have all layers."""
    by_stage = dict(by_rank)
    for place, found in by_rank:
        assert found == by_stage[place]
    stages = [by_stage[place] for place in sorted(by_stage)]
    for step, (*parts, alone) in enumerate(zip(*stages, biased_alone(case.config), strict=True)):
        layers = [layer for part in parts for layer in part]
        for (visits, bias), (visits_alone, bias_alone) in zip(layers, alone, strict=True):
            assert visits == visits_alone, (case, step)
            assert_close(bias, bias_alone, **CLOSE)


def test_a_bias_on_a_mesh_moves_as_in_one_process():
    for world_size, cases in ((2, BIASED[:1]), (4, BIASED[1:])):
        by_rank = lab.run(lambda cases: [biased(each) for each in cases], world_size, args=(cases,), timeout_s=200)
        for number, of in enumerate(cases):
            like_one_process(of, [found[number] for found in by_rank])


def test_a_bias_changes_where_tokens_go():
    for config in (MOE, UNEVEN, DEEPSEEK):
        moved, still = biased_alone(config), biased_alone(config, 0.0)
        assert [visits for visits, _ in moved[0]] == [visits for visits, _ in still[0]]
        assert [visits for visits, _ in moved[2]] != [visits for visits, _ in still[2]]


@pytest.mark.parametrize(
    ("axes", "over"), [("dp 4", ()), ("dp 2, cp 2", ("dp",)), ("dp 2, cp 2", ("cp",)), ("dp 2, tp 2", ("dp", "tp"))]
)
def test_loads_of_other_ranks_than_the_batch_s_are_refused(axes, over):
    """Summed over no others, over a part of them, and once a rank of tp, which has the same tokens."""
    of = case(axes, config=MOE, ep=2)
    group = (lambda training: training.mesh.group(*over)) if over else (lambda training: alone_group())
    by_rank = lab.run(lambda: biased(of, group), 4, timeout_s=100)
    with pytest.raises(AssertionError):
        like_one_process(of, by_rank)


# --- checkpoints, bad arguments ---------------------------------------------------------------------------------------


def saved(case, folder):
    """Save after a step that has moved the routers' biases, too; the losses of the next two."""
    training = built(case)
    steps(training, [0])
    for stage in training.stages.values():
        ep.move_bias(stage, 0.05, training.batch_group)
    threed.save(training, folder)
    return steps(training, [1, 2])


def test_a_checkpoint_goes_from_one_ep_to_another(tmp_path):
    first = case("dp 4", config=MOE, ep=4, zero=3)
    others = [
        case("dp 4", config=MOE, ep=2, zero=1), case("dp 2, tp 2", config=MOE, ep=2), case("tp 2, cp 2", config=MOE),
        case("tp 2, dp 2", config=MOE, ep=2, zero=2, sequence_parallel=True),
        case("dp 2, pp 2", config=MOE, ep=1, zero=1), first,
    ]  # fmt: skip
    losses, *_ = lab.run(saved, 4, args=(first, tmp_path))
    for found in lab.run(from_there, 4, args=(others, tmp_path))[0]:
        assert_close(found, losses, **CLOSE)


@pytest.mark.parametrize(
    ("axes", "options", "said"),
    [
        ("dp 4", {"ep": 3}, "ep must divide the dp of mesh, which has its ranks, and 3 does not divide 4"),
        ("tp 4", {"ep": 2}, "ep must divide the dp of mesh, which has its ranks, and 2 does not divide 1"),
        ("dp 4", {"ep": 0}, "ep must be at least 1, not 0"),
        ("dp 4", {"ep": 4, "config": UNEVEN}, "ep must be at most the number of experts of model, 3, not 4"),
        ("dp 4", {"ep": 2, "config": GPT}, "ep must be at most the number of experts of model, 0, not 2"),
        ("dp 4", {"balance": 0.1, "config": GPT}, "balance must be 0 for a model without experts, not 0.1"),
        ("dp 4", {"balance": -0.1}, "balance must be"),
        ("tp 4", {"config": replace(MOE, hidden=4, expert_ratio=0.75)}, "expert_hidden must be at least .* 4, not 3"),
    ],
)
def test_what_cannot_be_is_named(axes, options, said):
    def refused():
        with pytest.raises(ValueError, match=said):
            built(case(axes, **{"config": MOE, **options}))

    lab.run(refused, 4)
