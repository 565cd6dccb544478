"""The page's own loop carries out every schedule that the library knows, and such as nobody would write: its gradients
are those of one process. Without tags it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import model as gpt
from dtlib.ranks import pp
from dtlib.theory import pp as theory

from .cases import CLOSE, GPT, Case, fits

PAGE = Path(__file__).parents[3] / "chapters" / "pp.ipynb"
CONFIG = replace(GPT, tied=False)


def loop():
    cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads(PAGE.read_text("utf-8"))["cells"]}
    return cells["pp-mail"] + "\n\n" + cells["pp-mechanism"]


def batch(m):
    tokens = torch.randint(23, (2 * m, 6), generator=torch.Generator().manual_seed(m))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(source, schedules):
    names = {"torch": torch, "dist": dist, "SHAPE": (2, 5, 8)}
    exec(source, names)
    found = []
    for schedule in schedules:
        model, (x, y) = gpt.GPT(CONFIG), batch(schedule.micro_batches)
        losses = [
            lambda out, t=t, m=schedule.micro_batches: gpt.next_token_loss(out, t) / m
            for t in y.chunk(schedule.micro_batches)
        ]
        stages = dict(enumerate(pp.cut(model, schedule.num_stages)))
        names["carry_out"](schedule, stages, x.chunk(schedule.micro_batches), losses)
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    return found


def compare(schedules, by_rank):
    for schedule, *found in zip(schedules, *by_rank, strict=True):
        model, (x, y) = gpt.GPT(CONFIG), batch(schedule.micro_batches)
        gpt.next_token_loss(model(x), y).backward()
        together = {name: each for own in found for name, each in own.items()}
        assert_close(together, {name: each.grad for name, each in model.named_parameters()}, **CLOSE)


def swapped(p, m):
    """GPipe in which every other rank takes the micro-batches from the last to the first."""
    made = theory.gpipe(p, m)
    turned = [
        tuple(sorted(own, key=lambda action: (action.kind == "B", -action.micro_batch))) if rank % 2 else own
        for rank, own in enumerate(made.actions)
    ]
    return replace(made, name="swapped", actions=tuple(turned))


def known(p):
    cases = [Case(name, 8) for name in (*theory.SCHEDULES, "automatic")] + [Case("interleaved", 6, 3), Case("ZB-V", 3)]
    return [case.made(p) for case in cases if fits(case, p)] + [theory.pipedream(p, 5), swapped(p, 3)]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_the_loop_of_the_page_carries_out_every_schedule(p):
    schedules = [schedule for schedule in known(p) if schedule.num_stages <= CONFIG.num_layers]
    assert {schedule.name for schedule in schedules} >= {"PipeDream", "ZB-auto", "swapped", "1F1B", "ZB-V"}
    compare(schedules, lab.run(gradients, p, args=(loop(), schedules)))


def test_without_tags_it_does_not():
    schedules = [swapped(2, 3)]
    untagged = loop().replace("tag=self.tag(a, b, i)", "tag=0")
    assert untagged != loop()
    with pytest.raises(AssertionError):
        compare(schedules, lab.run(gradients, 2, args=(untagged, schedules)))
