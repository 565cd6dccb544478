"""What one mesh saves another reads: the next losses are equal, by one process too; what is unfinished is not there."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import threed
from dtlib.ranks.model import GPT as Model
from dtlib.ranks.model import next_token_loss

from .judge import CLOSE, GPT, LLAMA, ONE_KEY, ROWS, built, case, data


def steps(training, numbers):
    """The losses of these batches."""
    place, n, losses = training.mesh.coordinates()["dp"], training.mesh.size("dp"), []
    mine = slice(place * ROWS // n, (place + 1) * ROWS // n)
    for number in numbers:
        x, y = (each[number] for each in data(3))
        losses.append(training.step(x[mine], y[mine]).item())
    return losses


def before_and_after(case, folder):
    """Save after a step; the losses of the next two, and of the same two once more from what was saved."""
    training = built(case)
    steps(training, [0])
    threed.save(training, folder)
    losses = steps(training, [1, 2])
    threed.load(training, folder)
    return losses, steps(training, [1, 2])


def test_a_rank_whose_layers_are_all_frozen_is_saved_and_read(tmp_path):
    frozen = ("token", "blocks.0", "blocks.1")
    apart, together = (case(axes, zero=1, config=LLAMA, frozen=frozen) for axes in ("pp 2", "dp 2"))
    (losses, again), *_ = lab.run(before_and_after, 2, args=(apart, tmp_path))
    assert again == losses
    (found,), *_ = lab.run(from_there, 2, args=([together], tmp_path))
    assert_close(found, losses, **CLOSE)


def from_there(cases, folder):
    results = []
    for each in cases:
        training = built(each)
        for optimizer in training.optimizers:
            optimizer.param_groups[0]["lr"] = 1.0  # the saved settings come back
        threed.load(training, folder)
        results.append(steps(training, [1, 2]))
    return results


MESHES = {
    GPT: ["dp 2, tp 2 zero 1", "pp 2, cp 2 zero 1", "dp 4 zero 3", "tp 2, pp 2 zero 0"],
    LLAMA: ["dp 2, pp 2 zero 3", "tp 2, dp 2 zero 1", "tp 4 zero 0"],
    ONE_KEY: ["tp 4 zero 1", "dp 2, tp 2 zero 3"],
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process, as it says
@pytest.mark.parametrize(
    "config",
    [GPT, *(pytest.param(each, marks=pytest.mark.soak) for each in (LLAMA, ONE_KEY))],
    ids=["tied", "llama", "one key"],
)
def test_what_a_mesh_saves_every_other_reads(config, tmp_path):
    first, *others = (
        case(axes, config=config, zero=int(zero)) for axes, zero in (each.split(" zero ") for each in MESHES[config])
    )
    (losses, again), *_ = lab.run(before_and_after, 4, args=(first, tmp_path))
    assert again == losses  # the same ranks, to the bit
    for found in lab.run(from_there, 4, args=(others, tmp_path))[0]:
        assert_close(found, losses, **CLOSE)
    whole = Model(config, seed=5)
    (folder,) = tmp_path.iterdir()
    dcp.load(dict(whole.named_parameters()), checkpoint_id=folder, no_dist=True)
    x, y = (each[1] for each in data(3))
    assert next_token_loss(whole(x), y).item() == pytest.approx(losses[0], rel=1e-12)


def killed_between_two_writes(case, folder):
    """Rank 1 dies in the second save, after rank 0 has written."""
    training = built(case)
    steps(training, [0])
    threed.save(training, folder)
    steps(training, [1])
    if dist.get_rank() == 1:
        dcp.FileSystemWriter.write_data = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    threed.save(training, folder)


def test_a_rank_killed_between_two_writes_leaves_the_older_checkpoint_whole(tmp_path):
    killed, alone = case("dp 2", zero=1), case("tp 2")
    with pytest.raises(lab.RankError, match="SIGKILL"):
        lab.run(killed_between_two_writes, 2, args=(killed, tmp_path))
    (losses, _), *_ = lab.run(before_and_after, 2, args=(killed, tmp_path / "whole"))
    assert len(list(tmp_path.glob("0*"))) == 2  # one of them is not finished
    ((found,), _) = lab.run(from_there, 2, args=([alone], tmp_path))
    assert_close(found, losses, **CLOSE)
    lab.run(lambda: threed.save(built(alone), tmp_path), 2)  # and the next one takes its place
    assert len(list(tmp_path.glob("0*"))) == 1


def test_a_folder_without_a_finished_checkpoint_and_another_model_are_refused(tmp_path):
    small, large = case("tp 2"), case("tp 2", config=LLAMA)

    def save_and_load():
        with pytest.raises(ValueError, match="must hold a finished checkpoint"):
            threed.load(built(small), tmp_path / "nothing")
        threed.save(built(small), tmp_path)
        training = built(large)
        before = [each.clone() for part in training.parts for each in part.parameters()]
        with pytest.raises(ValueError, match=r"must hold the same tensors as model; .* is "):
            threed.load(training, tmp_path)
        after = [each for part in training.parts for each in part.parameters()]
        return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    assert lab.run(save_and_load, 2) == [True, True]
