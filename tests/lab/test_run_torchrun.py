"""The same script alone and under torchrun: same results."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from dtlib import lab

def main(scale):
    generator = torch.Generator().manual_seed(dist.get_rank())
    value = torch.rand(5, generator=generator, dtype=torch.float64) * scale
    dist.all_reduce(value)
    lab.barrier()
    with lab.wire() as wire:
        dist.all_reduce(torch.ones(2**18))
    return value.tolist(), dist.get_rank(), dist.get_world_size(), round(wire.total_bytes / 2**20)

first = lab.run(main, int(sys.argv[1]), args=(2.0,))
second = lab.run(lambda: dist.get_rank() ** 2, int(sys.argv[1]))
if "RANK" in os.environ:
    assert set(lab.run(dist.get_world_size, 7)) == {int(sys.argv[1])}, "torchrun decides how many ranks there are"
with open(f"{sys.argv[2]}/{os.environ.get('RANK', 'alone')}", "w") as file:
    json.dump([first, second], file)
"""


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def start(command, script, *arguments):
    environment = dict(os.environ, TMPDIR=str(script.parent))  # torchrun leaves a folder of logs
    command = [*command, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_results_are_identical(world_size, tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(sys, "argv", [str(script), str(world_size), str(out)])
    runpy.run_path(str(script))
    done = start([*TORCHRUN, str(world_size)], script, world_size, out)
    assert done.returncode == 0, done.stderr
    results = {file.name: json.loads(file.read_text()) for file in out.iterdir()}
    assert set(results) == {"alone", *map(str, range(world_size))}
    first, second = results["alone"]
    assert [rank for _, rank, _, _ in first] == list(range(world_size))
    assert second == [r**2 for r in range(world_size)]
    assert first[0][3] == 2 * (world_size - 1)
    for result in results.values():
        assert result == results["alone"]


def test_a_rank_that_raises_under_torchrun_ends_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from dtlib import lab\nimport torch.distributed as dist\n"
        "def main():\n    if dist.get_rank() == 1:\n        raise ValueError('under torchrun')\n    dist.barrier()\n"
        "lab.run(main, 2)\n"
    )
    done = start([*TORCHRUN, "2"], script)
    assert done.returncode != 0
    assert "ValueError: under torchrun" in done.stderr


def test_a_thread_that_raises_under_torchrun_ends_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import threading\nfrom dtlib import lab\n"
        "def load(): raise ValueError('the batch is bad')\n"
        "def main():\n    thread = threading.Thread(target=load)\n    thread.start()\n    thread.join()\n"
        "lab.run(main)\nprint('done')\n"
    )
    done = start([*TORCHRUN, "1"], script)
    assert done.returncode != 0
    assert "done" not in done.stdout
    assert "ThreadRaised" in done.stderr


def test_a_life_after_a_restart_does_not_meet_the_one_before(tmp_path):
    """The agent's store keeps the addresses of ranks that were killed: a rank that comes first must not read them."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\nfrom dtlib import lab\nimport torch.distributed as dist\n"
        "life = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "def main():\n"
        "    dist.barrier()\n"
        "    if life == '0' and dist.get_rank() == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    dist.barrier()\n    return life\n"
        "time.sleep(2 * (life == '1') * (os.environ['RANK'] == '1'))\n"
        "print(lab.run(main))\n"
    )
    done = start([*TORCHRUN, "2", "--max-restarts", "1"], script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['1', '1']") == 2


def test_dtlib_parity_says_the_same_under_torchrun(tmp_path):
    """The README's script, by the README's command."""
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    assert "`dtlib parity check.py`, alone or under `torchrun --no-python`" in text
    (script,) = (part.split("```")[0] for part in text.split("```python\n")[1:] if "def reference" in part)
    (tmp_path / "check.py").write_text(script)
    command = [sys.executable, "-m", "dtlib.cli", "parity"]
    alone, done = (start(each, tmp_path / "check.py") for each in (command, [*TORCHRUN, "2", "--no-python", *command]))
    assert (alone.returncode, done.returncode) == (1, 1), done.stderr
    assert "2 times too much, as by a sum over dp for a mean" in alone.stdout
    assert set(done.stdout.splitlines()) == set(alone.stdout.splitlines())
