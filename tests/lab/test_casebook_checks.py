"""The cheapest checks of the casebook, as functions of what ranks hold: each refuses its cases, and no right step."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from dtlib import lab

from .test_parity_casebook import CASES, norm_of


def size(case):
    return math.prod(CASES[case][2].values())


@functools.cache
def held(n, alone=False):
    """What each of `n` ranks has of the cases that take so many; or of all that are looked at, on one rank."""
    names = [case for case in CASES if size(case) == n or alone]
    return lab.run(lambda: {case: CASES[case][1](*CASES[case][3].get("batch", ())) for case in names}, n)


def joined(found, name):
    """A tensor of which ranks have pieces, or all the same."""
    every = [each[name] for each in found if name in each]
    if isinstance(every[0], lab.Piece):
        return torch.cat([each.tensor for each in every], every[0].place[1][0][1])
    return every[0]


def names(found):
    return list(dict.fromkeys(name for each in found for name in each))


def copies_agree(found, alone):
    both = [(each[name], found[0][name]) for each in found for name in each if name in found[0]]
    return all(torch.equal(a, b) for a, b in both if not isinstance(a, lab.Piece))


def norm_is_of_distinct_elements(found, alone):
    due = norm_of(*(joined(found, name) for name in names(found) if name != "norm"))
    return all(torch.isclose(each["norm"], due) for each in found)


def one_rank_has_the_same(found, alone):
    return all(torch.allclose(joined(found, name), joined(alone, name)) for name in names(alone))


def clipped_to_the_threshold(found, alone):
    after, before = found[0]["clipped"].norm(), found[0]["grad"].norm()
    return torch.isclose(after, torch.minimum(before, torch.full_like(before, 1e-3)))


def gradient_of_logits_adds_up_to_zero(found, alone):
    return joined(found, "grad").sum().abs() < 1e-9


def router_has_a_gradient(found, alone):
    return joined(found, "grad").any()


def parts_differ(name, of=lambda x: x):
    def check(found, alone):
        return len({tuple(part.flatten().tolist()) for part in of(joined(found, name)).chunk(4)}) == 4

    return check


CHECKS = {
    copies_agree: ["stages", "shard", "smoothing", "norms-apart", "mixed-halves", "unfrozen", "replicas", "idle"],
    norm_is_of_distinct_elements: ["copies", "tied", "experts-out", "shard"],
    one_rank_has_the_same: ["copies", "cp-scale", "log-t", "gather", "ep-times", "aux", "twice", "bias", "fused",
                            "same-data", "shift", "schedule"],
    clipped_to_the_threshold: ["scaled-clip"],
    gradient_of_logits_adds_up_to_zero: ["no-gradient"],
    router_has_a_gradient: ["router"],
    parts_differ("experts"): ["overwritten"],
    parts_differ("output", lambda x: x == 0): ["and"],
}  # fmt: skip


@pytest.mark.parametrize(("check", "case"), [(check, case) for check, cases in CHECKS.items() for case in cases])
def test_a_check_refuses_the_mistake_and_not_the_right_step(check, case):
    reference, _, _, more = CASES[case]
    n, right = size(case), reference(*more.get("batch", ()))
    assert check([right] * n, [right])
    assert not check([each[case] for each in held(n)], [each[case] for each in held(1, alone=True)])
