"""Every pair of axes, three at once, every stage of ZeRO: losses, gradients, norms and weights are one process's."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks import pp, sp, tp
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT
from dtlib.ranks.shared import clipping
from dtlib.ranks.shared.held import Held
from dtlib.ranks.threed import training
from dtlib.theory import pp as theory

from .judge import GPT as TIED
from .judge import LLAMA, ONE_KEY, built, case, check, compare, make_adamw, train

FIRST, LAST = ("token", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "norm", "head")  # a whole rank's
CHOSEN = [
    case("dp 2, tp 2", m=1, zero=3), case("dp 2, pp 2", "ZB-H1", m=4, zero=1),
    case("pp 2, dp 2", "interleaved", zero=2, config=LLAMA), case("cp 2, dp 2", zero=1),
    case("dp 2, pp 2", "ZB-H1", m=4, zero=2, config=LLAMA),
    case("tp 2, pp 2", sequence_parallel=True, gather_again=True, recompute="full"),
    case("pp 2, cp 2", config=LLAMA, recompute="selective"),
    case("cp 2, tp 2", sequence_parallel=True, config=ONE_KEY, recompute="full"),
    case("tp 2, pp 2", "ZB-H1", m=4, sequence_parallel=True, recompute="full"),
    case("dp 2, pp 2", config=LLAMA, frozen=FIRST), case("dp 2, pp 2", "ZB-H1", config=LLAMA, zero=2, frozen=LAST),
    case("pp 2, tp 2", "ZB-H1", zero=1, config=LLAMA, frozen=FIRST),
    case("pp 2, dp 2", "interleaved", zero=3, config=LLAMA, frozen=("blocks.1", "blocks.3", "norm", "head")),
]  # fmt: skip
PAIRS = [
    *(case(axes, m=m, zero=zero) for axes in ("dp 2, tp 2", "dp 2, cp 2") for zero in range(4) for m in (1, 4)),
    *(case("dp 2, pp 2", zero=zero, config=LLAMA) for zero in range(4)), case("tp 2, pp 2", "ZB-V", config=LLAMA),
    case("pp 2, dp 2", "ZB-H2", m=4), case("pp 2, tp 2", "ZB-H1", zero=1, sequence_parallel=True),
    case("cp 2, pp 2", "ZB-H1"), case("tp 2, cp 2", zero=1, config=LLAMA, way="ulysses"),
    case("dp 4", zero=3), case("pp 2, cp 2", "DualPipeV", m=4), case("tp 4", config=ONE_KEY),
    case("cp 4", order="contiguous"), case("pp 4", m=4),
    case("pp 2, dp 2", "ZB-V", m=4, zero=2, config=LLAMA), case("pp 2, cp 2", "DualPipeV", m=4, zero=2, config=LLAMA),
    case("dp 2, pp 2", "ZB-H2", m=4, zero=2, config=LLAMA, recompute=True), case("tp 2, pp 2", sequence_parallel=True),
    case("pp 2, cp 2", config=LLAMA), case("dp 2, pp 2", zero=3, config=LLAMA, recompute=True),
]  # fmt: skip
CUBES = [
    case("dp 2, pp 2, tp 2"), case("dp 2, pp 2, tp 2", "ZB-H1", zero=1, sequence_parallel=True),
    case("pp 2, dp 2, tp 2", zero=3, config=LLAMA, sequence_parallel=True),
    case("tp 2, dp 2, pp 2", zero=2, config=LLAMA, recompute=True),
    case("dp 2, cp 2, tp 2", zero=3, sequence_parallel=True), case("cp 2, tp 2, pp 2", "ZB-H1", config=ONE_KEY),
    case("pp 2, tp 2, dp 2", "ZB-H1", m=4, zero=1), case("tp 2, pp 2, dp 2", zero=1), case("dp 2, tp 2, pp 2", zero=1),
]  # fmt: skip
UNEVEN = [  # 8 rows, 4 heads, 4 layers and 23 words on three ranks
    case("dp 3", m=1, zero=3), case("tp 3", m=1), case("pp 3", "ZB-H1", m=4), case("cp 3", m=2, zero=1),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "cases"), [(4, CHOSEN), (3, UNEVEN), (1, [case("dp 1"), case("tp 1", zero=3)])])
def test_axes_together_train_like_one_process(world_size, cases):
    check(world_size, cases)


@pytest.mark.soak
@pytest.mark.parametrize(("world_size", "cases"), [(4, PAIRS), (8, CUBES)])
def test_every_pair_and_three_axes_train_like_one_process(world_size, cases):
    check(world_size, cases)


# --- what the table of the class leaves out: each entry, and the elements that a norm counts ------------------------


def along_dp_alone(mesh, *axes):
    return group_of(mesh, *(axis for axis in axes if axis != "cp" or len(axes) == 1))


def everything_counts(self, tensor):
    yield tensor, self.start, True


def own_tokens(self, targets_bs):
    return int((targets_bs != training.IGNORED).sum())


def of_a_stage(mine, *options, copies, **where):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return clipping.clip_grad_norm(mine, *options, copies=copies, group=groups[dist.get_rank() % 2], **where)


def norm_alone(self, x_bsh):
    return self.norm(x_bsh)


def no_positions(self, parameter):
    return parameter if parameter.dim() == 2 else share(self, parameter)


def nothing(self, parameter):
    return parameter


group_of, share = Mesh.group, sp.SplitTokens.share
no_row = property(lambda self: 0, lambda self, rows: None)
MUTANTS = {
    "tied embedding, not added up": ("pp 2, tp 2", pp.Pipeline, "_add_up_tied", mock.Mock(return_value=None)),
    "weights, not summed over cp": ("dp 2, cp 2", Mesh, "group", along_dp_alone),
    "weights, not summed over dp": ("dp 2, tp 2", training.dp.BucketedDataParallel, "sync", mock.Mock()),
    "key heads that ranks share, not summed over tp": ("dp 2, tp 2", tp.ColumnParallelLinear, "shared_rows", no_row),
    "split tokens: norms, not summed over tp": ("dp 2, tp 2", sp.SplitNorm, "forward", norm_alone),
    "split tokens: positions, not summed over tp": ("pp 2, tp 2", sp.SplitTokens, "share", no_positions),
    "split tokens: nothing summed over tp": ("cp 2, tp 2", sp.SplitTokens, "share", nothing),
    "a mean of the ranks' means": ("dp 2, cp 2", training.Training, "_tokens", own_tokens),
    "a norm that counts copies": ("dp 2, tp 2", Held, "slices", everything_counts),
    "a norm of one stage": ("dp 2, pp 2", training, "clip_grad_norm", of_a_stage),
}


def with_mutants(cases):
    results = []
    for mutated, (_, *where) in zip(cases, MUTANTS.values(), strict=True):
        with mock.patch.object(*where, create=where[1] == "shared_rows"):  # an attribute of instances
            results.append(train(mutated))
    return results


def test_each_sum_that_is_left_out_is_refused():
    cases = [
        case(axes, config=ONE_KEY, sequence_parallel=name.startswith("split")) for name, (axes, *_) in MUTANTS.items()
    ]
    by_rank = lab.run(with_mutants, 4, args=(cases,), timeout_s=200)
    for number, name in enumerate(MUTANTS):
        assert is_refused(cases[number], [found[number] for found in by_rank]), name


def is_refused(case, by_rank):
    try:
        compare(case, by_rank)
    except AssertionError:
        return True
    return False


# --- bad arguments --------------------------------------------------------------------------------------------------


def build(axes, schedule, config=TIED, **options):
    return training.Training(GPT(config), Mesh(axes), make_adamw, schedule=schedule, **options)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: build({"dp": 1, "ep": 2}, theory.one_f_one_b(1, 2)), "axes among pp, dp, cp, tp, and has 'ep'"),
        (lambda: build({"pp": 2}, theory.one_f_one_b(4, 2)), "schedule must be for 2 ranks"),
        (lambda: built(case("dp 2", frozen=("",))), "model must have a parameter that requires a gradient"),
        (lambda: build({"dp": 2}, theory.one_f_one_b(1, 2), zero=4), "zero must be 0, 1, 2 or 3, not 4"),
        (lambda: build({"pp": 2}, theory.zb_h1(2, 2), LLAMA, zero=3), "zero must be 0, 1 or 2 where the schedule"),
        (lambda: build({"pp": 2}, theory.one_f_one_b(2, 2), zero=3), "zero must be 0 or 1 where two stages share"),
        (lambda: build({"dp": 2}, theory.one_f_one_b(1, 2), recompute="some"), "recompute must be one of none, sel"),
        (lambda: build({"tp": 2}, theory.one_f_one_b(1, 2), gather_again=True), "gather_again must be False without"),
        (lambda: build({"dp": 2}, theory.one_f_one_b(1, 2), sequence_parallel=2), "sequence_parallel must be True or"),
        (lambda: build({"tp": 2}, theory.one_f_one_b(1, 2), sequence_parallel=True).step(*rows(7)), "that 2 ranks of"),
        (lambda: build({"pp": 2}, theory.one_f_one_b(2, 2)).step(*rows(9)), "tokens_bs must have at most seq=8 col"),
        (lambda: build({"cp": 2}, theory.one_f_one_b(1, 2)).step(*rows(9)), "tokens_bs must have at most seq=8 col"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(make, said):
    for text in lab.run(refused, 2, args=(make,)):
        assert said in text


def refused(make):
    with pytest.raises(ValueError) as error:
        make()
    return str(error.value)


@pytest.mark.parametrize("zero", [0, 2])
def test_weights_that_are_trained_later_are_refused(zero):
    def unfrozen():
        apart = built(case("dp 2, pp 2", config=LLAMA, frozen=FIRST, zero=zero))
        for each in apart.stages.values():
            each.requires_grad_(True)
        if apart.mesh.coordinates()["pp"] == 0:
            with pytest.raises(RuntimeError, match="changed after the module was wrapped"):
                apart.backward(*rows(8))

    lab.run(unfrozen, 4)


def rows(s):
    tokens = torch.zeros(4, s, dtype=torch.long)
    return tokens, tokens
