"""One executor for every schedule: it does what stands in the data, in that order, and knows nothing else.

Shapes: a batch of B sequences in m micro-batches of b = B/m, s positions, h hidden.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtlib.ranks.dp.base import DataParallel
from dtlib.ranks.mesh import Group
from dtlib.ranks.model import IGNORED, next_token_loss
from dtlib.ranks.shared.alike import described, refuse_unlike, refuse_unlike_calls
from dtlib.ranks.shared.clipping import clip_grad_norm
from dtlib.ranks.shared.parts import Piece, on_one_stage
from dtlib.ranks.shared.replicas import raw_grad, refuse_torchs, set_raw_grad, split_modules
from dtlib.theory.pp import Action, Schedule, with_messages

from .split import Saved, SplitBackward

sum_of_losses = partial(next_token_loss, reduction="sum")


def counted_tokens(targets: Tensor) -> int:
    """The targets that count: all but ``IGNORED``."""
    return int((targets != IGNORED).sum())


class Pipeline:
    """This rank's part of a pipeline: `stages` maps the numbers of its stages to modules, `schedule` says what to do.

    | what travels | shape | from, to |
    |---|---|---|
    | activations | (b, s, h) | stage k to k + 1 |
    | their gradients | (b, s, h) | stage k + 1 to k |

    `width` is h, `dtype` that of what travels; where tokens are split over ranks of another group, `parts` are these,
    and (b, s/parts, h) travels. `loss` gives the *sum* over the targets that count of a micro-batch, and
    `count` how many these are: their quotient over the whole batch is what is trained, however tokens fall on
    micro-batches. With `recompute` a stage keeps its input alone and goes forward once more before it goes backward.
    `tied` is the parameter that the first stage and the last one share, on the ranks that have them: where they are two
    copies, their gradients are added up. `around` is called with each action that computes, for a context to do it in.
    A stage may be wrapped for data parallelism: the weights' half of a split backward pass is one pass to it. A norm of
    this rank's gradients alone, as torch's own clipping takes it, is refused: clip by `clip_grad_norm_`; so are torch's
    own wrappers where they take one backward pass for several.

    ``ValueError`` before anything is sent for a schedule that `theory.pp.validate` refuses or that is not for this
    group, a group without this rank, stages that are not this rank's or are averaged with other ones, and `tied` on a
    rank between the ends, or whose weights are away; in the first step where the two copies of `tied` differ; by a rank
    whose stage gives another shape or dtype than travels, changes its input in place, or leads no gradient back to it,
    before it sends that on.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        *,
        width: int,
        dtype: torch.dtype = torch.float32,
        parts: int = 1,
        group: Group = None,
        loss: Callable[[Tensor, Tensor], Tensor] = sum_of_losses,
        count: Callable[[Tensor], float] = counted_tokens,
        tied: nn.Parameter | None = None,
        recompute: bool = False,
        around: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext(),
    ) -> None:
        self.rank, n = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"group must contain this rank ({dist.get_rank()}), and does not")
        if schedule.num_ranks != n:
            raise ValueError(f"schedule must be for {n} ranks, as many as the group has, not {schedule.num_ranks}")
        own = {stage for stage, rank in enumerate(schedule.placed) if rank == self.rank}
        if set(stages) != own:
            raise ValueError(
                f"stages must be {sorted(own)} on rank {self.rank}, as schedule places them, not {sorted(stages)}"
            )
        splits = any(action.kind == "W" for action in schedule.actions[self.rank])
        for stage in stages.values():
            refuse_torchs(stage, is_split=splits, is_one=schedule.micro_batches == 1)
        talks = any(action.of for each in schedule.actions for action in each)
        self.schedule = schedule if talks else with_messages(schedule)
        self.stages, self.width, self.dtype, self.parts, self.group = dict(stages), width, dtype, parts, group
        self.loss, self.count, self.tied, self.recompute, self.around = loss, count, tied, recompute, around
        self.global_ranks, self._are_alike = dist.get_process_group_ranks(group), False
        ends = schedule.placed[0], schedule.placed[-1]
        if tied is not None and ends[0] != ends[1] and self.rank not in ends:
            raise ValueError(f"tied must be None on a rank with neither the first stage nor the last, as {self.rank}")
        if tied is not None and n > 1 and any(m in split_modules for each in stages.values() for m in each.modules()):
            raise ValueError("tied must have its weights, and a stage 3 of ZeRO has split them: shard by stage 1 or 2")
        for each in stages.values() if n > 1 else ():
            on_one_stage(each)
            if not isinstance(each, DataParallel | DistributedDataParallel):
                continue
            over = each.group if isinstance(each, DataParallel) else each.process_group
            if others := {*dist.get_process_group_ranks(over)}.intersection(self.global_ranks) - {dist.get_rank()}:
                raise ValueError(f"stages must be wrapped over ranks that have the same one, and {sorted(others)} have "
                                 "others of this pipeline")  # fmt: skip

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Go forward and backward with the whole batch, tokens (B, s) or what is (B, s, h), and targets.

        All ranks call it with the same, and get the mean loss. Gradients are added to ``.grad``, as ``backward`` does;
        that of `inputs`, if they need one, on the rank of the first stage. ``ValueError`` before anything is sent where
        shapes, dtypes or schedules of the ranks differ, if m does not divide B, if no target counts, and where
        gradients are switched off.
        """
        if not torch.is_grad_enabled():
            raise ValueError("step needs gradients, and must not be called under no_grad: evaluate does without")
        batch = _Batch(self, inputs, targets)
        kept = None
        if self.tied is not None:
            self._refuse_unlike_ends()
            kept = raw_grad(self.tied)
            set_raw_grad(self.tied, None)
        batch.carry_out(self.schedule.actions[self.rank])
        batch.go_back_to_inputs()
        self._add_up_tied(kept)
        return batch.mean_loss()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients of all stages so that their norm is at most `max_norm`; returns it. As
        ``torch.nn.utils.clip_grad_norm_`` in one process; `tied` counts once. All ranks must call it.

        It is for stages whose ranks have their parameters whole; `threed.Training` has one for all others.
        """
        own = dict.fromkeys(each for stage in self.stages.values() for each in stage.parameters())
        twice = self.tied is not None and self.schedule.placed[0] != self.rank
        here = [each.grad for each in own if each.grad is not None and not (twice and each is self.tied)]
        copies = [self.tied.grad] if twice and self.tied is not None and self.tied.grad is not None else []
        if any(type(each) is Piece for each in here + copies):
            raise ValueError("stages must have their parameters whole here: threed.Training clips where they are split")
        device = next(iter(own)).device if own else None
        return clip_grad_norm(
            here, max_norm, norm_type, error_if_nonfinite, copies=copies, group=self.group, device=device
        )

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the whole batch, without gradients: the forward passes of the schedule."""
        batch = _Batch(self, inputs, targets)
        batch.carry_out([action for action in self.schedule.actions[self.rank] if "F" in (action.kind, action.of)])
        return batch.mean_loss()

    def _refuse_unlike_ends(self) -> None:
        """Two copies of one parameter must begin alike: at the first step their ranks tell each other a checksum."""
        ends = self.schedule.placed[0], self.schedule.placed[-1]
        apart = ends[0] != ends[1] and dist.get_backend(self.group) != "fake"
        if self.tied is not None and apart and not self._are_alike:
            bits = self.tied.detach().cpu().contiguous().view(torch.uint8).numpy()
            refuse_unlike("tied", f"a copy of checksum {zlib.crc32(bits)}", [self.global_ranks[end] for end in ends])
        self._are_alike = True

    def _add_up_tied(self, kept: Tensor | None) -> None:
        """Exchange the shared parameter's gradients between the first stage's rank and the last one's."""
        if self.tied is None or not self.tied.requires_grad:
            return
        first, last = self.schedule.placed[0], self.schedule.placed[-1]
        if first != last:
            own = raw_grad(self.tied)
            own = torch.zeros_like(self.tied) if own is None else own
            other, theirs = last if self.rank == first else first, torch.empty_like(own)
            _wait(self._batched([("send", own, other), ("receive", theirs, other)]))
            set_raw_grad(self.tied, own + theirs)  # two numbers add up to the same in either order
        if kept is not None:
            own = raw_grad(self.tied)
            set_raw_grad(self.tied, kept if own is None else kept + own)

    def _batched(self, messages: list[tuple[str, Tensor, int]]) -> list[Any]:
        """Start (``"send"`` or ``"receive"``, tensor, other rank) as one batch."""
        does = {"send": dist.isend, "receive": dist.irecv}
        if messages[0][1].device.type == "cpu":  # where a batch is a loop, with checks that take longer
            return [does[kind](tensor, self.global_ranks[to], self.group) for kind, tensor, to in messages]
        return dist.batch_isend_irecv(
            [dist.P2POp(does[kind], tensor, self.global_ranks[to], self.group) for kind, tensor, to in messages]
        )


class _Batch:
    """What a rank has of one batch while it is on its way."""

    def __init__(self, pipeline: Pipeline, inputs: Tensor, targets: Tensor) -> None:
        m = pipeline.schedule.micro_batches
        travels = f"{pipeline.width} wide in {pipeline.dtype}, {pipeline.schedule.name} with {m} micro-batches"
        what = f"{described(inputs)} and {described(targets)}, {travels}"
        refuse_unlike_calls("inputs and targets", what, pipeline.group)
        if inputs.dim() < 2 or inputs.shape[1] % pipeline.parts:
            raise ValueError(
                f"inputs must be (B, s) or (B, s, h), with s a multiple of {pipeline.parts} (parts), not "
                f"{tuple(inputs.shape)}"
            )
        if len(inputs) != len(targets) or len(inputs) % m or not len(inputs):
            raise ValueError(
                f"inputs must have a positive multiple of {m} rows, and as many as targets, not {len(inputs)}"
            )
        self.tokens = pipeline.count(targets)
        if not self.tokens:
            raise ValueError("targets must have one that counts, and all are ignored")
        self.pipeline, self.last = pipeline, pipeline.schedule.num_stages - 1
        self.whole, self.targets = inputs, targets.chunk(m)
        self.inputs = inputs.detach().chunk(m)
        self.travels = (len(inputs) // m, inputs.shape[1] // pipeline.parts, pipeline.width)
        self.back: dict[int, Tensor] = {}  # gradients of the inputs, if they need one
        self.total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        self.splits = any(action.kind == "W" for action in pipeline.schedule.actions[pipeline.rank])
        self.passes: dict[tuple[int, int], Any] = {}  # by stage and micro-batch, from F to B, I or W
        self.here: dict[tuple[str, int, int], Tensor] = {}  # what another stage has made: "F" or "B", whose, of what
        self.coming: dict[tuple[str, int, int], Any] = {}
        self.leaving: list[tuple[Any, Tensor]] = []

    def carry_out(self, actions: Any) -> None:
        for is_message, some in groupby(actions, lambda action: bool(action.of)):
            if is_message:
                self._talk(list(some))
                continue
            for action in some:
                self._wait_for(action)
                with self.pipeline.around(action):
                    getattr(self, _DOES[action.kind])(action.stage, action.micro_batch)
        _wait(message for message, _ in self.leaving)

    def mean_loss(self) -> Tensor:
        """The loss of the last stage's rank, on all ranks."""
        of = self.pipeline
        dist.broadcast(self.total, of.global_ranks[of.schedule.placed[self.last]], group=of.group)
        return self.total / self.tokens

    def _talk(self, actions: list[Action]) -> None:
        """Start all messages that stand together as one batch; what has left is forgotten."""
        self.leaving = [each for each in self.leaving if not each[0].is_completed()]
        of = self.pipeline
        messages: list[tuple[str, Tensor, int]] = []
        for kind, stage, i, what in actions:
            if kind == "send":
                to = of.schedule.placed[stage + 1 if what == "F" else stage - 1]
                messages.append((kind, self.here.pop((what, stage, i)), to))
            else:
                arriving = torch.empty(self.travels, dtype=of.dtype, device=self.inputs[i].device)
                self.here[what, stage, i] = arriving
                messages.append((kind, arriving, of.schedule.placed[stage]))
        under_way = of._batched(messages)
        if len(under_way) != len(messages):  # one for all, on a GPU
            under_way *= len(messages)
        for action, message, (_, tensor, _) in zip(actions, under_way, messages, strict=True):
            if action.kind == "send":
                self.leaving.append((message, tensor))
            else:
                self.coming[action.of, action.stage, action.micro_batch] = message

    def _wait_for(self, action: Action) -> None:
        """Until what `action` needs of another rank has come, if it needs any."""
        what, by = ("F", -1) if action.kind == "F" else ("B", 1)
        if action.kind != "W":
            message = self.coming.pop((what, action.stage + by, action.micro_batch), None)
            if message is not None:
                message.wait()

    def _forward(self, stage: int, i: int) -> None:
        trains = torch.is_grad_enabled()
        x = self.here.pop(("F", stage - 1, i)) if stage else self.inputs[i]
        if trains and (stage or self.whole.requires_grad):
            x = x.detach().requires_grad_()  # a leaf of its own, also where it is a part of the inputs
        if self.pipeline.recompute and trains:
            dice = torch.get_rng_state()
            with torch.no_grad():
                y = self._through(stage, x, i)
            self.passes[stage, i] = x, None, dice
        else:
            saved = Saved() if trains and self.splits else None
            y = self._through(stage, x, i, saved)
            if trains:
                self.passes[stage, i] = x, y, saved
        if stage == self.last:
            self.total += y.detach() * self.tokens
        else:
            self.here["F", stage, i] = y.detach().contiguous()

    def _through(self, stage: int, x: Tensor, i: int, saved: Saved | None = None) -> Tensor:
        """The output of a stage, which is what travels, or the micro-batch's part of the loss."""
        of, before = self.pipeline, _version(x)
        with saved.noting() if saved else nullcontext():
            try:
                y = of.stages[stage](x)
            except RuntimeError as error:
                if "leaf Variable that requires grad" in str(error):
                    raise ValueError(_IN_PLACE.format(stage)) from error
                raise
            if _version(x) != before:
                raise ValueError(_IN_PLACE.format(stage))
            if stage == self.last:
                loss = of.loss(y, self.targets[i])
                if loss.dim():
                    raise ValueError(f"loss must give one number, and gives {tuple(loss.shape)}")
                return loss / self.tokens
        if not isinstance(y, Tensor) or y.shape != self.travels or y.dtype != of.dtype:
            gives = f"{tuple(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"stages must give {self.travels} of {of.dtype}, as inputs, width, parts and dtype say, and stage "
                f"{stage} gives {gives}"
            )
        return y

    def _backward(self, stage: int, i: int) -> None:
        self._input_gradient(stage, i, at_once=True)

    def _input_gradient(self, stage: int, i: int, *, at_once: bool = False) -> None:
        x, y, kept = self.passes.pop((stage, i))
        gradient = None if stage == self.last else self.here.pop(("B", stage + 1, i))
        if y is None:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(kept)
                kept = None if at_once else Saved()
                y = self._through(stage, x, i, kept)
        if at_once:
            if y.requires_grad:
                y.backward(gradient)
            found = x.grad
        else:
            later = self.passes[stage, i] = SplitBackward(x, y, saved=kept)
            found = later.input_gradient(gradient)
        if stage and found is None:
            raise ValueError(
                f"stages must lead a gradient back to their input, and stage {stage} does not: its output does not "
                "depend on it, or was detached"
            )
        if stage:
            self.here["B", stage, i] = found.contiguous()
        elif found is not None:
            self.back[i] = found

    def _weight_gradient(self, stage: int, i: int) -> None:
        module, later = self.pipeline.stages[stage], self.passes.pop((stage, i))
        with module.one_pass() if isinstance(module, DataParallel) else nullcontext():
            later.weight_gradients()

    def go_back_to_inputs(self) -> None:
        """From the gradients of the micro-batches' inputs to that of the batch, and on to what it was made of."""
        if self.back:
            each = [self.back.get(i, torch.zeros_like(x)) for i, x in enumerate(self.inputs)]
            self.whole.backward(torch.cat(each))


_IN_PLACE = "stages must leave their input as it is, and stage {} changes it in place"
_DOES = {"F": "_forward", "B": "_backward", "I": "_input_gradient", "W": "_weight_gradient"}


def _version(x: Tensor) -> int:
    """How often `x` was written into."""
    return 0 if x.is_inference() else x._version


def _wait(messages: Any) -> None:
    for message in messages:
        message.wait()
