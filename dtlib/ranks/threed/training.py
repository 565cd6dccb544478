"""A training step on a mesh, put together from the parts of the other chapters; nothing is parallelised here.

Shapes: b sequences of this place on dp, s positions, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dtlib.ranks import activations, cp, dp, ep, pp, sp, tp
from dtlib.ranks.experts import Routed, Router
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT, IGNORED
from dtlib.ranks.shared.alike import described, refuse_unlike
from dtlib.ranks.shared.clipping import clip_grad_norm
from dtlib.ranks.shared.held import Held, Place, places
from dtlib.ranks.shared.parts import on_one_stage
from dtlib.ranks.shared.replicas import begin_alike, refuse_changes, signature
from dtlib.ranks.zero import Zero, held
from dtlib.theory.footprint import AXES
from dtlib.theory.memory import checked_recompute
from dtlib.theory.pp import Action, Schedule
from dtlib.theory.valid import amount, flag, whole


class Training:
    """`model`, which is changed, on the ranks of a `mesh` with axes among dp, pp, cp and tp, in any order.

    | axis | what its ranks share out | what each gradient does along it |
    |---|---|---|
    | tp | matrices, heads, vocabulary; with `sequence_parallel` the tokens between them | `tp`, `sp`: summed where a \
weight meets a part of the tokens, in the backward pass |
    | cp | tokens | summed, with dp |
    | pp | layers, as `schedule` places them | the tied embedding's: added up at both ends |
    | dp | sequences | summed, by `zero` |
    | `ep` ranks of dp | experts | an expert's: summed over the other ranks of dp that hold it, and cp |

    The loss is the mean over all tokens that count, of all ranks, so the ranks of dp and cp differ in one thing alone,
    their tokens: `zero` spreads states over both. 0 all-reduces gradients and keeps everything; 1 to 3 are the stages
    of `Zero`. 0 and 1 send gradients once, after the last micro-batch; 2 and 3 after each, as they keep none whole.

    `make_optimizer` gets parameters; there is one of `optimizers` for each of this rank's `parts`: its `stages` as
    wrapped, with `zero` 0 and 1 all together. All ranks begin with the weights of rank 0.

    ``ValueError`` before anything is sent for another axis, a `schedule` for another number of ranks, for stages 2 and
    3 where two pipeline stages share the embedding, whose sum is of whole gradients, and for stage 3 where `schedule`
    splits backward passes: the later half would gather the weights a third time. Other errors are those of the parts.

    Experts lie on `ep` neighbours of dp, and dp / ep hold the same; an expert's gradient is divided by all tokens, as
    any other. tp splits the width of each, and has routers whole. `balance` is the weight of
    `ep.sequence_balance_loss` in what is trained, its mean over the sequences and sum over the layers; the loss that is
    returned is without it.

    `recompute` is a word of `activations.recompute`, of each layer (True: ``"full"``). Where `schedule` splits backward
    passes a full one takes a whole stage at a time, as its later half needs what was computed: there the sums of
    embedding and loss are sent again, too. `gather_again` is `sp`'s.
    """

    def __init__(
        self,
        model: GPT,
        mesh: Mesh,
        make_optimizer: Callable[[Any], Optimizer],
        *,
        schedule: Schedule,
        zero: int = 0,
        sequence_parallel: bool = False,
        order: str = "zigzag",
        way: str = "ring",
        recompute: str | bool = "none",
        gather_again: bool = False,
        ep: int = 1,
        balance: float = 0.0,
    ) -> None:
        _refuse(model, mesh, schedule, zero)
        _refuse_experts(model, mesh, ep, amount("balance", balance))
        flag("sequence_parallel", sequence_parallel)
        if flag("gather_again", gather_again) and not sequence_parallel:
            raise ValueError("gather_again must be False without sequence_parallel, which splits the tokens")
        if isinstance(recompute, bool):
            recompute = "full" if recompute else "none"
        by_stage = checked_recompute(recompute) == "full" and _splits_backward(schedule)
        mesh = Mesh(mesh.axes | {axis: 1 for axis in AXES if axis not in mesh.axes})  # in the order that was asked for
        self.mesh, self.config = mesh, model.config
        self.batch_group, tensor_group = mesh.group("dp", "cp"), mesh.group("tp")
        tied = model.head.weight is model.token_embedding.weight
        begin_alike(model, None)

        self.balance, self.columns, self.share = balance, 1, 0.0
        for each in model.modules() if balance else ():
            if isinstance(each, Router):
                each.register_forward_hook(self._balanced)
        if sequence_parallel:
            sp.parallelize(model, tensor_group, gather_again=gather_again)
        else:
            tp.parallelize(model, tensor_group)
        self.context: cp.Context | None = None
        if mesh.size("cp") > 1:
            cp.parallelize(model, mesh.group("cp"), order=order, way=way, sum_gradients=False)
            self.context = cp.Context(mesh.group("cp"), order, way)
        if ep > 1:
            _spread_experts(model, mesh, ep)
        place, stages = mesh.coordinates()["pp"], pp.cut(model, schedule.num_stages)
        own = {number: stages[number] for number, where in enumerate(schedule.placed) if where == place}
        self.stages = own
        for each in own.values():
            activations.recompute(each, "none" if by_stage else recompute)
            if mesh.size("pp") > 1:
                on_one_stage(each)
        self.where: dict[str, Any] = {}
        for stage in own.values():
            stage.register_forward_pre_hook(lambda _, x, where: (x, self.where), with_kwargs=True)
        ends = schedule.placed[0], schedule.placed[-1]
        self.tied = model.token_embedding.weight if tied and place in ends else None
        self.alike = mesh.ranks("pp", "cp", "tp")  # called with the same sequences
        self.biases = dict[str, Tensor]()
        self.places = dict[int, Place]()  # now, as a stage 3 will take the shapes away
        for number, stage in own.items():
            before = sum(len(each.blocks) for each in stages[:number])
            for name, buffer in stage.named_buffers():
                self.biases[_in_the_model(Place(name, ()), before).name] = buffer
            for key, each in places(stage, is_first=mesh.coordinates()["tp"] == 0).items():
                self.places.setdefault(key, _in_the_model(each, before))
        if self.tied is not None and place == ends[1] != ends[0]:  # it counts at the other end
            tied_to = self.places[id(self.tied)]
            self.places[id(self.tied)] = replace(tied_to, name="token_embedding.weight", counts=NOWHERE)
        self.sends_once = zero < 2
        together = [nn.ModuleList(own.values())] if self.sends_once else own.values()
        self.optimizers: list[Optimizer] = []
        self.parts = [self._part(each, make_optimizer, zero) for each in together]
        self._as_built = {number: signature(stage) for number, stage in own.items()}
        self.pipeline = pp.Pipeline(
            own if self.sends_once else dict(zip(own, self.parts, strict=True)), schedule,
            width=model.config.hidden, dtype=model.config.dtype, group=mesh.group("pp"),
            parts=dist.get_world_size(tensor_group) if sequence_parallel else 1,
            loss=partial(tp.next_token_loss, vocab=model.config.vocab, group=tensor_group, reduction="sum"),
            count=self._tokens, tied=self.tied, recompute=by_stage, around=self._around,
        )  # fmt: skip

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        """The weights' half of a backward pass is many passes to autograd, and one to stage 2: it reduces after all."""
        if action.kind != "W" or self.sends_once:
            yield
            return
        part = self.parts[list(self.stages).index(action.stage)]
        with part.no_sync():
            yield
        part.sync()

    def _part(
        self, module: nn.Module, make_optimizer: Callable[[Any], Optimizer], stage: int
    ) -> dp.DataParallel | Rests:
        """`module` with gradients that are summed over dp and cp, and its optimizer."""
        trained = [each for each in module.parameters() if each.requires_grad]
        if not trained:
            self.optimizers.append(make_optimizer([{"params": []}]))  # for its settings
            return Rests(module)
        if stage:
            part = Zero(module, make_optimizer, stage=stage, group=self.batch_group)
            self.optimizers.append(part.optimizer)
            return part
        self.optimizers.append(make_optimizer(trained))
        return dp.BucketedDataParallel(module, group=self.batch_group)

    def step(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        """Forward, backward, optimizer: the mean loss over all tokens of all ranks.

        All ranks with one place on dp call it with the same sequences. ``ValueError`` for more positions than the model
        has, or a number that cp or `sequence_parallel` cannot share out, before anything is sent.
        """
        loss = self.backward(tokens_bs, targets_bs)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def backward(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        """As `step`, up to the gradients: each rank's are summed and wait for the optimizer. ``RuntimeError`` where a
        parameter was frozen, unfrozen, replaced or cast since."""
        for number, stage in self.stages.items():
            refuse_changes(self._as_built[number], signature(stage))
        if self.balance:
            rows = tokens_bs.new_tensor(len(tokens_bs))
            dist.all_reduce(rows, group=self.batch_group)
            self.share = self.balance * dist.get_world_size(self.batch_group) * self.mesh.size("cp") / rows.item()
        with ExitStack() as stack:
            if self.sends_once:
                for part in self.parts:
                    stack.enter_context(part.no_sync())
            loss = self.pipeline.step(*self._own(tokens_bs, targets_bs))
        if self.sends_once:
            for part in self.parts:
                part.sync()
        return self._mean(loss)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`, between `backward` and the optimizers; returns
        it. As ``torch.nn.utils.clip_grad_norm_`` in one process: each element counts once. All ranks must call it."""
        mine: list[Tensor] = []
        copies: list[Tensor] = []
        for each in self.held():
            gradient = None if each.stepped is None else each.stepped.grad
            for view, _, counts in () if gradient is None else each.slices(gradient):
                (mine if counts else copies).append(view)
        device = next(self.parts[0].parameters()).device
        return clip_grad_norm(mine, max_norm, norm_type, error_if_nonfinite, copies=copies, device=device)

    def held(self) -> Iterator[Held]:
        """What this rank has of the parameters and their states, and of the routers' biases."""
        is_first = dist.get_rank(self.batch_group) == 0 and self.mesh.coordinates()["tp"] == 0
        for name, buffer in self.biases.items():
            yield Held(Place(name, tuple(buffer.shape)), buffer, is_first=is_first)
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            yield from held(part, self.places, optimizer, self.batch_group)

    def evaluate(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        """The mean loss over all tokens of all ranks, without gradients."""
        return self._mean(self.pipeline.evaluate(*self._own(tokens_bs, targets_bs)))

    def _own(self, tokens_bs: Tensor, targets_bs: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's tokens, and where they stand."""
        s, n = tokens_bs.shape[1], self.pipeline.parts
        if targets_bs.shape != tokens_bs.shape:
            shape = tuple(tokens_bs.shape)
            raise ValueError(f"targets_bs must be of shape {shape}, as tokens_bs, not {tuple(targets_bs.shape)}")
        refuse_unlike("tokens_bs and targets_bs", f"{described(tokens_bs)}, {targets_bs.dtype}", self.alike)
        if s > self.config.seq:
            raise ValueError(f"tokens_bs must have at most seq={self.config.seq} columns, not {s}")
        if self.context is not None:
            tokens_bs, self.where = self.context.enter(tokens_bs)
            targets_bs = self.where["layout"].take(targets_bs)
        self.columns = tokens_bs.shape[1]
        if tokens_bs.shape[1] % n:
            raise ValueError(f"tokens_bs must have positions that {n} ranks of tp can share out, not {s}")
        return tokens_bs, targets_bs

    def _tokens(self, targets_bs: Tensor) -> float:
        """The targets that count, over the ranks of dp and cp: as many as each has on average."""
        counted = (targets_bs != IGNORED).sum()
        dist.all_reduce(counted, group=self.batch_group)
        return counted.item() / dist.get_world_size(self.batch_group)

    def _balanced(self, router: Router, x: Any, routed: Routed) -> Routed:
        """`routed`, in whose backward pass the experts' balance counts: divided by the sequences of all ranks, and
        times these, as data parallelism divides by them."""
        if not (torch.is_grad_enabled() and routed.scores_te.requires_grad):
            return routed
        loss = self.share * ep.sequence_balance_loss(routed, self.columns, self.mesh.group("cp"))
        return routed._replace(weights_tk=ep.with_loss(routed.weights_tk, loss))

    def _mean(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss, group=self.batch_group)
        return loss / dist.get_world_size(self.batch_group)


NOWHERE = ((slice(None), False),)
"""What of a parameter counts on this rank where another one has it too."""


class Rests(nn.Module):
    """A frozen `module` in the place of a wrapper: nothing of it is reduced, split or stepped."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.state_dict(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """There is nothing to put off."""
        return nullcontext()

    def sync(self) -> None:
        """There is nothing to reduce."""


def _spread_experts(model: GPT, mesh: Mesh, num: int) -> None:
    """Lay the experts of `model` on `num` neighbours of dp; those on dp and cp that hold the same sum its gradient."""
    axes: dict[str, int] = {}
    for axis, size in mesh.axes.items():
        axes |= {"same": size // num, "ep": num} if axis == "dp" else {axis: size}
    finer = Mesh(axes)
    ep.parallelize(model, finer.group("ep"), holders=finer.group("same", "cp"))


def _in_the_model(place: Place, before: int) -> Place:
    """`place`, with the name that a layer has where others come `before` it."""
    if not place.name.startswith("blocks."):
        return place
    _, layer, rest = place.name.split(".", 2)
    return replace(place, name=f"blocks.{int(layer) + before}.{rest}")


def _splits_backward(schedule: Schedule) -> bool:
    return any(action.kind == "W" for actions in schedule.actions for action in actions)


def _refuse_experts(model: GPT, mesh: Mesh, num: Any, balance: float) -> None:
    experts, d = model.config.num_experts, mesh.axes.get("dp", 1)
    if d % whole("ep", num, 1):
        raise ValueError(f"ep must divide the dp of mesh, which has its ranks, and {num} does not divide {d}")
    if num > max(1, experts):
        raise ValueError(f"ep must be at most the number of experts of model, {experts}, not {num}")
    if balance and not experts:
        raise ValueError(f"balance must be 0 for a model without experts, not {balance!r}")


def _refuse(model: Any, mesh: Any, schedule: Schedule, zero: Any) -> None:
    if not isinstance(model, GPT):
        raise ValueError(f"model must be a GPT of ranks.model, not {type(model).__name__}")
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a Mesh of ranks.mesh, not {type(mesh).__name__}")
    if not any(each.requires_grad for each in model.parameters()):
        raise ValueError("model must have a parameter that requires a gradient, and all are frozen")
    for axis in mesh.axes:
        if axis not in AXES:
            raise ValueError(f"mesh must have axes among {', '.join(AXES)}, and has {axis!r}")
    p = mesh.axes.get("pp", 1)
    if schedule.num_ranks != p:
        raise ValueError(f"schedule must be for {p} ranks, as many as mesh has on pp, not {schedule.num_ranks}")
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        raise ValueError(f"zero must be 0, 1, 2 or 3, not {zero!r}")
    if zero == 3 and _splits_backward(schedule):
        raise ValueError(f"zero must be 0, 1 or 2 where the schedule splits backward passes, as {schedule.name} does")
    if zero > 1 and model.config.tied and schedule.num_stages > 1:
        raise ValueError("zero must be 0 or 1 where two stages share the embedding, or the model be untied")
