"""What the ranks of the restart benchmark do, under `lab.run` and under torchrun: train, be killed, go on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks import dp, reliability

STEPS, KILLED, RESUMED = 6, "killed", "resumed"


def train(folder: Path) -> int:
    """Save after each step; note when the last rank dies in the middle, and when the next life has made a step."""
    model = dp.BucketedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    begins = dp.load(model, optimizer, folder) if reliability.last_saved(folder) else 0
    for step in range(begins, STEPS):
        if begins == 0 and step == STEPS // 2 and dist.get_rank() == dist.get_world_size() - 1:
            (folder / KILLED).write_text(str(time.time()))
            lab.step(step)  # under lab.run it dies here,
            os.kill(os.getpid(), signal.SIGKILL)  # and under torchrun by itself
        lab.step(step)
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == begins > 0 and dist.get_rank() == 0:
            (folder / RESUMED).write_text(str(time.time()))
        dp.save(model, optimizer, folder, extra=step + 1)
    return begins


if __name__ == "__main__":
    lab.run(train, args=(Path(sys.argv[1]),))
