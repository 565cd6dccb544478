"""A training of each kind that can be killed, saved and resumed: replicas, ZeRO, a mesh, and torch's FSDP2 with DCP.

A kind is "dp", "zero 3", "fsdp2", or a mesh with its stage of ZeRO, as "dp 2, pp 2 zero 1". All train the same model on
the same samples in the same order, so their losses are the same but for the order of sums.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from dtlib import lab
from dtlib.ranks import dp, reliability, threed, zero
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from dtlib.ranks.shared import files
from dtlib.theory import pp

SIZES = GPTConfig(num_layers=2, hidden=16, num_heads=4, seq=8, vocab=23, tied=False, dtype=torch.float64)
NUM_SAMPLES, BATCH = 30, 12
LATER = 3
"""The step from which on the learning rate is another one."""
make_adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


@functools.cache
def text():
    return torch.randint(SIZES.vocab, (NUM_SAMPLES, SIZES.seq + 1), generator=torch.Generator().manual_seed(1))


class Run:
    """One training; `dropout` casts dice on each rank, and is for kinds without a mesh and with as many ranks."""

    def __init__(self, kind, seed=0, dropout=0.0):
        torch.manual_seed(seed + 100 + dist.get_rank())
        self.kind, self.number, self.losses = kind, 0, []
        model, group = GPT(GPTConfig(**{**vars(SIZES), "dropout": dropout}), seed=seed), None
        if kind == "dp":
            self.model = dp.BucketedDataParallel(model)
            self.optimizers = [make_adamw(model.parameters())]
        elif kind == "fsdp2":
            for block in model.blocks:
                fully_shard(block)
            self.model = fully_shard(model)
            self.optimizers = [make_adamw(model.parameters())]
        elif kind.startswith("zero"):
            self.model = zero.Zero(model, make_adamw, stage=int(kind.removeprefix("zero")))
            self.optimizers = [self.model.optimizer]
        else:
            axes, stage = kind.split(" zero ")
            axes = {name: int(size) for name, size in (each.split() for each in axes.split(", "))}
            mesh = Mesh({"dp": 1, **axes} if "dp" not in axes else axes)
            schedule = pp.one_f_one_b(axes.get("pp", 1), 2 if "pp" in axes else 1)
            self.model = threed.Training(model, mesh, make_adamw, schedule=schedule, zero=int(stage))
            self.optimizers, group = self.model.optimizers, mesh.group("dp")
        self.sampler = reliability.Sampler(NUM_SAMPLES, BATCH, seed=5, group=group)
        self.dice = torch.get_rng_state()  # several runs take turns in a process

    def step(self):
        """The mean loss of the next step, the same on all ranks. Its dice lie where `save` finds them."""
        torch.set_rng_state(self.dice)
        mine = next(self.sampler)
        x, y = text()[mine, :-1], text()[mine, 1:]
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = 1e-2 if self.number < LATER else 3e-3
        if isinstance(self.model, threed.Training):
            loss = self.model.step(x, y)
        else:
            loss = next_token_loss(self.model(x), y)
            loss.backward()
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
            loss = loss.detach() / dist.get_world_size()
            dist.all_reduce(loss)
        self.losses.append(loss.item())
        self.dice = torch.get_rng_state()
        self.number += 1
        return self.losses[-1]

    def tensors(self):
        """What this rank keeps between steps: weights and moments."""
        if self.kind == "fsdp2":
            held = {name: each.to_local() for name, each in self.model.named_parameters()}
            states = [(str(i), state) for i, state in enumerate(self.optimizers[0].state.values())]
        else:
            parts = self.model.parts if isinstance(self.model, threed.Training) else [self.model]
            held = {f"{i} {name}": each for i, part in enumerate(parts) for name, each in part.named_parameters()}
            for i, part in enumerate(parts):
                held |= {f"{i} shard {j}": shard.chunk for j, shard in enumerate(getattr(part, "shards", []))}
            states = [
                (f"{i} {j}", state)
                for i, each in enumerate(self.optimizers)
                for j, state in enumerate(each.state.values())
            ]
        for name, state in states:
            held |= {f"{key} of {name}": each for key, each in state.items() if isinstance(each, torch.Tensor)}
        return {name: each.detach() for name, each in held.items() if each.numel()}

    def save(self, folder, keep=2, background=None):
        extra = reliability.capture(sampler=self.sampler, number=self.number, losses=self.losses)
        options = {"extra": extra, "keep": keep, "background": background}
        if self.kind == "fsdp2":
            model, optimizer = get_state_dict(self.model, self.optimizers)
            state = {"model": model, "optimizer": optimizer, "extra": files.packed(extra)}
            dcp.save(state, checkpoint_id=Path(folder, f"{self.number:06}"))
        elif self.kind == "dp":
            dp.save(self.model, self.optimizers[0], folder, **options)
        else:
            (zero if self.kind.startswith("zero") else threed).save(self.model, folder, **options)

    def resume(self, folder):
        """Go on from what was saved in `folder`, if there is something."""
        if self.kind == "fsdp2":
            finished = sorted(each.parent for each in Path(folder).glob("*/.metadata"))
            if not finished:
                return
            model, optimizer = get_state_dict(self.model, self.optimizers)
            state = {"model": model, "optimizer": optimizer, "extra": b""}
            dcp.load(state, checkpoint_id=finished[-1])
            set_state_dict(
                self.model, self.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            extra = torch.load(files.io.BytesIO(state["extra"]), weights_only=True)
        elif reliability.last_saved(folder) is None:
            return
        elif self.kind == "dp":
            extra = dp.load(self.model, self.optimizers[0], folder)
        else:
            extra = (zero if self.kind.startswith("zero") else threed).load(self.model, folder)
        values = reliability.restore(extra, sampler=self.sampler)
        self.number, self.losses, self.dice = values["number"], list(values["losses"]), torch.get_rng_state()


def trained(kinds, steps, folder=None, dropout=0.0, at=lambda number: None, saves=True):
    """The loss curves of these kinds, each of which goes on from `folder` and saves there after each step; the seed of
    a life that resumes is another one. `at` is told of each step."""
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    runs = [Run(kind, seed=life, dropout=0.0 if " zero " in kind else dropout) for kind in kinds]
    if folder:
        for run in runs:
            run.resume(Path(folder, run.kind))
    for number in range(min(run.number for run in runs), steps):
        lab.step(number)
        at(number)
        for run in runs:
            if run.number == number:
                run.step()
                if folder and saves:
                    run.save(Path(folder, run.kind))
    return {run.kind: run.losses for run in runs}
