"""Three axes at once against torch's own parts on the same mesh: dp 2 × pp 2 × tp 2, eight processes, in one run.

Both train the same model on the same data: `dtlib.ranks.threed`, at each stage of ZeRO; and FSDP2 over dp,
`parallelize_module` over tp and `torch.distributed.pipelining` over pp, with weights that stay for the backward pass
and with weights that are freed. All run 1F1B. They take turns, see `lab.race`. At the end all must have the same
weights; then the bytes of one step are counted on the wire.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks._report import console, print_table, ratio_cells, save
from dtlib import lab
from dtlib.ranks import pp, threed, tp
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT, GPTConfig, batches, load_text, next_token_loss
from dtlib.theory import pp as theory
from dtlib.theory.units import format_bytes, format_seconds

AXES = {"dp": 2, "pp": 2, "tp": 2}
ROWS, M, ROUNDS = 8, 4, 7
CONFIG = GPTConfig(num_layers=4, hidden=256, num_heads=8, seq=64, tied=False)
TORCHS = {"torch's, weights stay": False, "torch's, weights freed": True}
OURS = {f"ours, ZeRO {zero}": zero for zero in range(4)}
SAME = 1e-3
"""How far weights may lie apart, relative to the way that training has taken them: sums come in other orders."""

adamw = functools.partial(torch.optim.AdamW, lr=1e-4)


class Ours:
    """A composed step with its data, ready to be taken again and again."""

    def __init__(self, zero: int) -> None:
        mesh = Mesh(AXES)
        self.training = threed.Training(GPT(CONFIG), mesh, adamw, schedule=theory.one_f_one_b(2, M), zero=zero)
        self.data = own_batches(mesh.coordinates()["dp"])

    def step(self) -> None:
        """One training step."""
        self.training.step(*next(self.data))

    def weights(self) -> Tensor:
        """This stage's weights, whole, end to end; every rank must ask."""
        (part,), (stage,) = self.training.parts, self.training.stages.values()
        state = part.state_dict()
        names = {id(each): name for name, each in part.module.named_parameters()}
        whole = tp.unsplit(stage, {name: state[names[id(each)]] for name, each in stage.named_parameters()})
        return torch.cat([each.flatten() for each in whole.values()])


class Torchs:
    """The same of torch's own parts."""

    def __init__(self, freed: bool) -> None:
        mesh = init_device_mesh("cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES))
        place, t = mesh["pp"].get_local_rank(), mesh["tp"].size()
        self.is_first, self.is_last = place == 0, place == 1
        stage = pp.cut(GPT(CONFIG), 2)[place]
        plan: dict[str, Any] = {
            "token_embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(use_local_output=False),
            "blocks.*.attention.qkv": ColwiseParallel(), "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(), "blocks.*.mlp.down": RowwiseParallel(),
        }  # fmt: skip
        first, last = {"token_embedding": self.is_first}, {"head": self.is_last}
        parallelize_module(
            stage, mesh["tp"], {name: how for name, how in plan.items() if (first | last).get(name, True)}
        )
        for block in stage.blocks:
            block.attention.num_heads //= t
            block.attention.num_kv_heads //= t
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=freed)
        self.stage = fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=freed)
        self.optimizer = adamw(self.stage.parameters())
        own = pipelining.PipelineStage(self.stage, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        self.schedule = pipelining.Schedule1F1B(own, M, next_token_loss)
        self.data = own_batches(mesh["dp"].get_local_rank())

    def step(self) -> None:
        """One training step."""
        tokens, targets = next(self.data)
        inputs = (tokens,) if self.is_first else ()
        with loss_parallel():
            self.schedule.step(*inputs, target=targets if self.is_last else None, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Tensor:
        """As ours."""
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # that two gathers are slower than one
        whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in self.stage.parameters())
        return torch.cat([each.detach().flatten() for each in whole])


def own_batches(place: int) -> Any:
    """The batches of a place on dp."""
    return batches(load_text(), batch=2 * ROWS, seq=CONFIG.seq, rank=place, world_size=2)


def measured() -> tuple[lab.Race, dict[str, float], dict[str, int]]:
    """In a rank: the race, how far each one's weights are off, and the bytes of a step on the wire."""
    contenders: dict[str, Any] = {name: Torchs(freed) for name, freed in TORCHS.items()}
    contenders |= {name: Ours(zero) for name, zero in OURS.items()}
    start = torch.cat(
        [
            each.detach().flatten()
            for each in pp.cut(GPT(CONFIG), 2)[contenders[next(iter(TORCHS))].is_last].parameters()
        ]
    )
    race = lab.race({name: each.step for name, each in contenders.items()}, rounds=ROUNDS)
    weights = {name: each.weights() for name, each in contenders.items()}
    reference = weights[next(iter(TORCHS))]
    off = {name: float((each - reference).norm() / (reference - start).norm()) for name, each in weights.items()}
    sent = {}
    for name, each in contenders.items():
        with lab.wire() as wire:
            each.step()
        sent[name] = wire.total_bytes
    return race, off, sent


def main() -> None:
    """Measure, print, save."""
    load, reference = os.getloadavg()[0], next(iter(TORCHS))
    races, offs, sent = zip(*lab.run(measured, 8, timeout_s=300), strict=True)
    rows, records = [], []
    for name in (*TORCHS, *OURS):
        off = max(each[name] for each in offs)
        if not off <= SAME:
            raise AssertionError(f"{name}: weights are off by {off:.1e} of the way that they went")
        ratio = races[0].ratio(name, reference)
        record = {"name": name, "ratio": ratio.median, "middle_half": ratio[1:], "bytes": sent[0][name], "off": off}
        records.append(record | {"seconds": races[0].seconds[name]})
        step = format_seconds(sorted(races[0].seconds[name])[ROUNDS // 2])
        rows.append([name, step, *ratio_cells(ratio), format_bytes(sent[0][name]), f"{off:.0e}"])
    title = f"A step on dp 2 × pp 2 × tp 2: {CONFIG.num_layers} layers of width {CONFIG.hidden}, {M} micro-batches"
    print_table(title, ["", "step", "over torch's", "middle half", "on the wire", "weights off"], rows)
    console.print(f"load of the machine before: {load:.1f}")
    path = save("threed", {"race": records, "load_before": load})
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
