"""Under torchrun: train, save after each step, and be killed in the middle of a step by SIGKILL in each life but the
last; ``torchrun --max-restarts 1 --nproc-per-node 2 -m ranks.reliability.elastic FOLDER STEPS DROPOUT KILLS KIND ...``.

KILLS is a list in JSON, a life each: the rank, the step, and the share of the step after which it dies, counted in
calls of Python functions: anywhere in a forward or backward pass, a collective, an optimizer's step, or a save.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from dtlib import lab

from .runs import trained


class Killer:
    """Kills this process in the middle of a step: counts the calls of the step before, and dies after a share of them.

    The first step of a life is another than the later ones: what it would do once is done by a step before.
    """

    def __init__(self, rank, step, share):
        self.rank, self.step, self.share = rank, step, share
        self.calls, self.usual = 0, None

    def __call__(self, number):
        if dist.get_rank() != self.rank or number < self.step - 1:
            return
        self.usual, self.calls = self.calls or None, 0
        sys.setprofile(self.count)

    def count(self, frame, event, argument):
        if event == "call":
            self.calls += 1
            if self.usual is not None and self.calls >= self.share * self.usual:
                os.kill(os.getpid(), signal.SIGKILL)


def main(folder, steps, dropout, kills, kinds):
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    at = Killer(*kills[life]) if life < len(kills) else lambda number: None
    return trained(kinds, steps, folder, dropout, at)


if __name__ == "__main__":
    at, steps, dropout, kills, *kinds = sys.argv[1:]
    curves = lab.run(main, args=(at, int(steps), float(dropout), json.loads(kills), kinds), timeout_s=100)
    Path(at, f"curves of {os.environ['RANK']}.json").write_text(
        json.dumps([os.environ["TORCHELASTIC_RESTART_COUNT"], curves[int(os.environ["RANK"])]])
    )
