"""A run that goes on in fresh processes is the run that was never stopped; and why each piece is saved."""

from __future__ import annotations

import copy
import functools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import dp, reliability, zero
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from dtlib.ranks.reliability.state import random_state, set_random_state

SIZES = GPTConfig(num_layers=1, hidden=16, num_heads=2, seq=10, vocab=32, dropout=0.2)
STEPS, STOPPED, NUM_SAMPLES, BATCH, SEED = 7, 3, 30, 12, 5
KINDS = ("dp", 1, 2, 3)
make_adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64, and sums in another order, as in zero's judge


def text():
    return torch.randint(SIZES.vocab, (NUM_SAMPLES, 9), generator=torch.Generator().manual_seed(1))


class Run:
    """One training with all that can be forgotten: dropout, noise of numpy's, offsets of Python's, a schedule, a decay
    that grows with the step, and with dp a scale that first overflows."""

    def __init__(self, kind, seed, config=SIZES):
        for each in (torch.manual_seed, np.random.seed, random.seed):
            each(seed + dist.get_rank())
        self.kind, self.throws_dice, self.step = kind, config.dropout > 0, 0
        model = GPT(config, seed=seed)
        if kind == "dp":
            self.model = dp.BucketedDataParallel(model)
            self.optimizer = make_adamw(model.parameters())
        else:
            self.model = zero.Zero(model, make_adamw, stage=kind)
            self.optimizer = self.model.optimizer
        self.parts = {
            "scheduler": torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7),
            "sampler": reliability.Sampler(NUM_SAMPLES, BATCH, seed=SEED),
        }
        if kind == "dp" and self.throws_dice:
            self.parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-20)

    def train(self, until):
        """The losses of this rank, and the samples that it saw."""
        losses, samples = [], []
        scaler = self.parts.get("scaler", torch.amp.GradScaler("cpu", enabled=False))
        while self.step < until:
            mine = next(self.parts["sampler"])
            x, y = text()[mine, :-1], text()[mine, 1:]
            where = 0
            if self.throws_dice:
                x = torch.where(torch.from_numpy(np.random.random(x.shape) < 0.2), 0, x)  # noqa: NPY002
                where = random.randrange(3)
            self.optimizer.param_groups[0]["weight_decay"] = 0.5 * self.step
            self.optimizer.zero_grad()
            loss = next_token_loss(self.model(x, offset=where), y)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            self.parts["scheduler"].step()
            losses.append(loss.item())
            samples += mine.tolist()
            self.step += 1
        return losses, samples

    def save(self, folder):
        extra = reliability.capture(step=self.step, **self.parts)
        if self.kind == "dp":
            dp.save(self.model, self.optimizer, folder / "dp", extra=extra)
        else:
            zero.save(self.model, folder / str(self.kind), extra=extra)

    def load(self, folder, kind=None):
        """Go on from what a run of `kind` saved; returns what `capture` had."""
        at = folder / str(kind or self.kind)
        extra = dp.load(self.model, self.optimizer, at) if self.kind == "dp" else zero.load(self.model, at)
        self.step = reliability.restore(extra, **self.parts)["step"]
        return extra


def undisturbed():
    found = []
    for kind in KINDS:
        run = Run(kind, seed=0)
        losses, samples = run.train(STEPS)
        found.append((losses, samples, run.model.state_dict()))
    return found


def stopped(folder, kinds=KINDS, config=SIZES):
    for kind in kinds:
        run = Run(kind, seed=0, config=config)
        run.train(STOPPED)
        run.save(folder)


def resumed(folder):
    found = []
    for kind in KINDS:
        run = Run(kind, seed=40)
        run.train(1)  # all of it to be forgotten
        run.load(folder)
        losses, samples = run.train(STEPS)
        found.append((losses, samples, run.model.state_dict()))
    return found


@pytest.fixture(scope="module")
def whole_run():
    return lab.run(undisturbed, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("saved")
    lab.run(stopped, 2, args=(made,))
    return made


def test_in_fresh_processes_the_run_goes_on_to_the_bit(whole_run, folder):
    for wanted, found in zip(whole_run, lab.run(resumed, 2, args=(folder,)), strict=True):
        for kind, (losses, samples, weights), (rest, seen, after) in zip(KINDS, wanted, found, strict=True):
            assert rest == losses[STOPPED:], kind
            assert seen == samples[STOPPED * BATCH // 2 :], kind
            assert all(torch.equal(weights[name], after[name]) for name in weights), kind


def without(piece, folder):
    """The losses from there on, if one piece had not been saved, or not been given back."""
    run = Run("dp", seed=40)
    fresh = copy.deepcopy({name: part.state_dict() for name, part in run.parts.items()})
    weights, dice = copy.deepcopy(run.model.state_dict()), random_state()
    extra = run.load(folder)
    if piece == "weights":
        run.model.load_state_dict(weights)
    elif piece == "moments":
        run.optimizer.state.clear()
    elif piece == "rate":
        run.optimizer.param_groups[0]["lr"] = 1e-2
    elif piece == "step":
        run.step = 0
    elif piece in run.parts:
        run.parts[piece].load_state_dict(fresh[piece])
    elif piece in dice:
        set_random_state(extra["random"][dist.get_rank()] | {piece: dice[piece]})
    elif piece == "whose dice":
        set_random_state(extra["random"][1 - dist.get_rank()])
    else:
        assert piece == "nothing"
    return run.train(run.step + STEPS - STOPPED)[0]


PIECES = [
    "weights", "moments", "rate", "step", "scheduler", "sampler", "scaler", "torch", "numpy", "python", "whose dice",
]  # fmt: skip


def test_without_any_of_the_pieces_it_is_another_run(whole_run, folder):
    everyone = lab.run(lambda: [without(piece, folder) for piece in ("nothing", *PIECES)], 2)
    for (curves, *_), (nothing, *found) in zip(whole_run, everyone, strict=True):
        assert nothing == curves[0][STOPPED:]
        for piece, losses in zip(PIECES, found, strict=True):
            assert losses != nothing, piece


QUIET = GPTConfig(**{**vars(SIZES), "dropout": 0.0, "dtype": torch.float64})


def order():
    """The samples of the whole run, epoch after epoch."""
    epochs = [np.random.default_rng((SEED, epoch)).permutation(NUM_SAMPLES) for epoch in range(4)]
    return np.concatenate(epochs)[: STEPS * BATCH].tolist()


def alone():
    """The losses of one process that nobody stopped, on all samples of each step."""
    model, losses = GPT(QUIET, seed=0), []
    optimizer = make_adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    for step in range(STEPS):
        batch = text()[order()[step * BATCH : (step + 1) * BATCH]]
        optimizer.param_groups[0]["weight_decay"] = 0.5 * step
        optimizer.zero_grad()
        loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def with_others(folder, pairs):
    found = []
    for saver, loader in pairs:
        run = Run(loader, seed=40, config=QUIET)
        run.load(folder, saver)
        found.append(run.train(STEPS))
    return found


@pytest.fixture(scope="module")
def quiet_folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("quiet")
    lab.run(stopped, 2, args=(made, ("dp", 3), QUIET))
    return made


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_other_ranks_go_on_with_the_same_samples_in_the_same_order(ranks, quiet_folder):
    pairs = [("dp", "dp"), (3, 3)] + ([] if ranks == 4 else [(3, 1)])
    everyone = lab.run(with_others, ranks, args=(quiet_folder, pairs))
    share = BATCH // ranks
    for of_ranks in zip(*everyone, strict=True):
        losses = torch.tensor([losses for losses, _ in of_ranks], dtype=torch.float64).mean(0)
        assert_close(losses, torch.tensor(alone()[STOPPED:], dtype=torch.float64), **CLOSE)
        steps = range(0, (STEPS - STOPPED) * share, share)
        seen = [i for at in steps for _, samples in of_ranks for i in samples[at : at + share]]
        assert seen == order()[STOPPED * BATCH :]


def test_a_sampler_says_all_samples_once_an_epoch_in_an_order_of_its_own():
    def epochs():
        sampler = reliability.Sampler(7, 7, seed=2)
        return [next(sampler).tolist() for _ in range(3)]

    (found,) = lab.run(epochs, 1)
    assert [sorted(each) for each in found] == [list(range(7))] * 3
    assert len({tuple(each) for each in found}) == 3


def test_what_does_not_fit_is_refused():
    def job():
        for arguments, words in (
            ((0, 2), "num_samples must be at least 1, not 0"),
            ((4, 3), "batch must be a multiple of the number of ranks, 2, and 3 is not"),
        ):
            with pytest.raises(ValueError, match=words):
                reliability.Sampler(*arguments)
        sampler = reliability.Sampler(4, 2, seed=1)
        state = reliability.capture(sampler=sampler, step=3)
        with pytest.raises(ValueError, match=r"parts must be those that were captured, \['sampler'\], not \[\]"):
            reliability.restore(state)
        with pytest.raises(ValueError, match="seed must be as it was saved, 1, not 0"):
            reliability.restore(state, sampler=reliability.Sampler(4, 2))
        with pytest.raises(ValueError, match="num_samples must be as it was saved, 4, not 6"):
            reliability.restore(state, sampler=reliability.Sampler(6, 2, seed=1))

    lab.run(job, 2)


def test_with_another_number_of_ranks_dice_stay_as_they_were_seeded():
    (state, _) = lab.run(lambda: reliability.capture(step=3), 2)

    def job():
        torch.manual_seed(9)
        assert reliability.restore(state) == {"step": 3}
        return torch.rand(3).tolist()

    torch.manual_seed(9)
    wanted = torch.rand(3).tolist()
    assert lab.run(job, 3) == [wanted] * 3
    assert wanted not in lab.run(job, 2)
