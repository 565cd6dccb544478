"""Torch's DDP, FSDP2, `parallelize_module` and pipelining: right steps, and mistakes that are put in from outside."""

from __future__ import annotations

import functools
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from dtlib.lab.parity.pieces import flattened

LAYERS = ("emb", "up", "down", "norm", "head")


class Net(nn.Module):
    """Small, with a norm, a bias, and a head that may share its weight with the embedding."""

    dtype = torch.float64

    def __init__(self, seed=0, p=0.0, tied=False):
        super().__init__()
        torch.manual_seed(seed)
        self.emb, self.up, self.down = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.head, self.p = nn.LayerNorm(8), nn.Linear(8, 12, bias=False), p
        if tied:
            self.head.weight = self.emb.weight
        self.to(Net.dtype)

    def forward(self, x):
        x = self.emb(x)
        return self.head(self.norm(x + F.dropout(self.down(F.gelu(self.up(x))), self.p)))


def data(uneven=False):
    x, y = torch.randint(12, (2, 8, 6), generator=torch.Generator().manual_seed(3))
    if uneven:
        y = y.clone()
        y[0, :4] = y[1, :5] = -100
    return x, y


def loss_of(logits, y):
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def reference(net, x, y, steps=1):
    model, found = net(), []
    torch.manual_seed(0)
    sgd = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(steps):
        said = {f"start/{n}": p.detach().clone() for n, p in model.named_parameters()}
        sgd.zero_grad()
        said["loss"] = loss = loss_of(model(x), y)
        loss.backward()
        said |= after(model, sgd, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        found.append(said)
    return found[0] if steps == 1 else found


def after(model, sgd, norm):
    """Gradients, the last first, their norm, and the weights after a step."""
    found = {f"grad/{n}": p.grad.detach().clone() for n, p in reversed(list(model.named_parameters()))}
    sgd.step()
    return found | {"norm": norm} | {f"weight/{n}": p.detach().clone() for n, p in model.named_parameters()}


def mean(loss):
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


# --- DDP --------------------------------------------------------------------------------------------------------------


def hook_that_sums(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda future: future.value()[0])


def hook_in_fp8(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda future: (future.value()[0] / 2).to(torch.float8_e5m2).to(Net.dtype))


class Again(torch.autograd.Function):
    """A module that keeps one input and is computed again from it, as an activation checkpoint is."""

    @staticmethod
    def forward(ctx, x, kept, forward):
        ctx.kept, ctx.forward = kept, forward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            kept = ctx.kept.detach().requires_grad_()
            ctx.forward(kept).backward(gradient)
        return kept.grad, None, None


def checkpointed(net, wrong):
    """The norm, computed again from its input, or by mistake from what came before the sum that it reads."""
    seen, forward = {}, net.norm.forward
    net.emb.register_forward_hook(lambda module, given, output: seen.update(kept=output.detach()))
    net.norm.forward = lambda x: Again.apply(x, seen["kept"] if wrong else x, forward)


def ddp(x, y, *, wrap=DDP, hook=None, reads=None, late=False, m=1, forgets=False, scale=True,
        idle=None, copies=False, steps=1, zero=True, p=0.0, seed=0, untied=False, again=None):  # fmt: skip
    rank, n = dist.get_rank(), dist.get_world_size()
    net = Net(rank if seed is None else seed, p, tied=untied)
    if again is not None:
        checkpointed(net, wrong=again)
    if untied:
        net.head.weight = nn.Parameter(net.emb.weight.detach().clone())
    net.up.bias.requires_grad_(not late)
    model = wrap(net)
    net.up.bias.requires_grad_(True)
    if hook:
        model.register_comm_hook(None, hook)
    start = {f"start/{n}": p.detach().clone() for n, p in net.named_parameters()}
    sgd, found = torch.optim.SGD(net.parameters(), 0.5), []
    part = rank if reads is None else reads
    torch.manual_seed(rank + 5)
    for number in range(steps):
        said = {f"start/{n}": p.detach().clone() for n, p in net.named_parameters()} if number else start
        if zero:
            sgd.zero_grad()
        losses = []
        for mx, my in zip(x.chunk(n)[part].chunk(m), y.chunk(n)[part].chunk(m), strict=True):
            if forgets:
                sgd.zero_grad()
            loss = loss_of(model(mx), my)
            (loss / m if scale else loss).backward()
            losses.append(loss.detach() / m)
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
        if copies:
            dist.all_reduce(square := norm**2)
            norm = square.sqrt()
        said["loss"] = mean(sum(losses))
        if idle == rank:
            sgd = mock.Mock()
        said |= after(net, sgd, norm)
        found.append({name: each for name, each in said.items() if not (untied and "head" in name)})
    return found[0] if steps == 1 else found


class Silent(DDP):
    def __init__(self, net):
        super().__init__(net)
        self.require_backward_grad_sync = False

    def forward(self, *args):
        with self.no_sync():
            return super().forward(*args)


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def fsdp(x, y, *, factor=None, own_norm=False, divided=False, swapped=False, m=1, scale=True, forgets=False):
    from torch.distributed.fsdp import fully_shard

    rank, n = dist.get_rank(), dist.get_world_size()
    net = Net()
    for name in LAYERS:
        fully_shard(getattr(net, name))
    fully_shard(net)
    if factor:
        for each in (net, *(getattr(net, name) for name in LAYERS)):
            each.set_force_sum_reduction_for_comms(Net.dtype != torch.float64)  # gloo scales no sums
            each.set_gradient_divide_factor(factor)
    if swapped:
        with torch.no_grad():
            for p in net.parameters():
                local, parts = p.to_local(), [torch.empty_like(p.to_local()) for _ in range(n)]
                dist.all_gather(parts, local.clone())
                local.copy_(parts[(rank + 1) % n])
    found = {f"start/{name}": p.detach().clone() for name, p in net.named_parameters()}
    sgd = torch.optim.SGD(net.parameters(), 0.5)
    losses = []
    for mx, my in zip(x.chunk(n)[rank].chunk(m), y.chunk(n)[rank].chunk(m), strict=True):
        if forgets:
            sgd.zero_grad()
        loss = loss_of(net(mx), my)
        ((loss / m if scale else loss) / (n if divided else 1)).backward()
        losses.append(loss.detach() / m)
    grads = [p.grad for p in net.parameters()]
    norm = torch.nn.utils.get_total_norm([g.to_local() for g in grads] if own_norm else grads)
    return found | {"loss": mean(sum(losses))} | after(net, sgd, norm if own_norm else norm.full_tensor())


# --- parallelize_module -----------------------------------------------------------------------------------------------


def unmasked(weight, x):
    """An embedding cut by rows, whose ranks look up something for the tokens of others too."""
    rows = weight.tensor_split(dist.get_world_size())[dist.get_rank()]
    found = rows[(x - dist.get_rank() * len(rows)).clamp(0, len(rows) - 1)]
    other = found.detach().clone()
    dist.all_reduce(other)
    return found + (other - found).detach()


def in_backward(real, given):
    """Sums are made in the forward pass alone."""
    return real if torch._C._current_graph_task_id() == -1 else given


def tensor(x, y, *, reduce=None, interleaved=False, mask=True):
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.tensor import placement_types
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    net = Net()
    if interleaved:
        with torch.no_grad():
            net.up.weight.copy_(net.up.weight.view(2, 8, 8).transpose(0, 1).reshape(16, 8))
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    found = {f"start/{name}": p.detach().clone() for name, p in net.named_parameters()}
    sgd = torch.optim.SGD(net.parameters(), 0.5)
    change = reduce or (lambda real, given: real)
    wrong = lambda given, *rest, **options: change(all_reduce(given, *rest, **options), given)  # noqa: E731
    if not mask:
        net.emb.forward = functools.partial(unmasked, net.emb.weight)
    seen = watching(net)
    with mock.patch.object(placement_types.funcol, "all_reduce", wrong):
        loss = loss_of(net(x), y)
        loss.backward()
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()]
    return found | seen | {"loss": loss} | after(net, sgd, torch.nn.utils.get_total_norm(whole))


def watching(net):
    """Fills with what two of its modules give."""
    seen = {}
    for name in ("emb", "down"):
        part = getattr(net, name)
        part.register_forward_hook(
            lambda module, given, output, name=f"forward/{name}": seen.update({name: output.detach().clone()})
        )
    return seen


def reference_tp(net, x, y):
    model = net()
    seen = watching(model)
    sgd = torch.optim.SGD(model.parameters(), 0.5)
    found = {f"start/{n}": p.detach().clone() for n, p in model.named_parameters()}
    loss = loss_of(model(x), y)
    loss.backward()
    return (
        found
        | seen
        | {"loss": loss}
        | after(model, sgd, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    )


# --- pipelining -------------------------------------------------------------------------------------------------------


class Front(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.emb, self.up, self.down = net.emb, net.up, net.down

    def forward(self, x):
        x = self.emb(x)
        return x + self.down(F.gelu(self.up(x)))


class Back(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.norm, self.head = net.norm, net.head

    def forward(self, x):
        return self.head(self.norm(x))


def pipeline(x, y, *, scale=True, tied=False, sums=True, halves=False):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, n = dist.get_rank(), dist.get_world_size()
    net = Net(tied=tied)
    part = (Front, Back)[rank](net)
    m, losses = 4, []
    schedule = ScheduleGPipe(PipelineStage(part, rank, n, torch.device("cpu")), m, loss_fn=loss_of, scale_grads=scale)
    if rank:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step(x)
    loss = torch.stack(losses).mean().detach() if rank else torch.zeros((), dtype=net.emb.weight.dtype)
    dist.broadcast(loss, 1)
    if tied and sums:
        dist.all_reduce((net.head if rank else net.emb).weight.grad)
    names = {"head.weight": "emb.weight"} if tied else {}
    found = {f"grad/{names.get(name, name)}": p.grad for name, p in part.named_parameters()}
    squares = sum(g.square().sum() for name, g in found.items() if not (tied and rank and name == "grad/emb.weight"))
    if not halves:
        dist.all_reduce(squares)
    return {"loss": loss} | found | {"norm": squares.sqrt()}


def reference_pp(net, x, y):
    model = net()
    loss = loss_of(model(x), y)
    loss.backward()
    found = {f"grad/{n}": p.grad for n, p in model.named_parameters()}
    return {"loss": loss} | found | {"norm": torch.nn.utils.get_total_norm(list(found.values()))}


UNEVEN, TIED, DICE = "uneven", functools.partial(Net, tied=True), functools.partial(Net, p=0.5)
DP, TP, PP = {"dp": 2}, {"tp": 2}, {"pp": 2}
ALL = {"net": Net, "m": 1, "reference": reference, "uneven": False}
RIGHT = {
    "DDP": (DP, ddp, {}, {}),
    "DDP, accumulated": (DP, functools.partial(ddp, m=2), {"m": 2}, {}),
    "DDP, recomputed": (DP, functools.partial(ddp, again=False), {}, {}),
    "DDP, three steps": (DP, functools.partial(ddp, steps=3), {"reference": functools.partial(reference, steps=3)}, {}),
    "FSDP2": (DP, fsdp, {}, {}),
    "FSDP2, accumulated": (DP, functools.partial(fsdp, m=2), {"m": 2}, {}),
    "parallelize_module": (TP, tensor, {"reference": reference_tp}, {}),
    "pipelining": (PP, pipeline, {"reference": reference_pp, "m": 4}, {}),
    "pipelining, tied": (PP, functools.partial(pipeline, tied=True),
                         {"reference": reference_pp, "m": 4, "net": TIED}, {}),
}  # fmt: skip
THREE = {"reference": functools.partial(reference, steps=3)}
WRONG = {
    "DDP: a hook that sums": (DP, functools.partial(ddp, hook=hook_that_sums), {}, ("sum for mean", "dp")),
    "DDP: always in no_sync": (DP, functools.partial(ddp, wrap=Silent), {}, ("never reduced", "dp")),
    "DDP: unfrozen after it was wrapped": (DP, functools.partial(ddp, late=True), {}, ("never reduced", "dp")),
    "DDP: a mean of means": (DP, ddp, {"uneven": True}, ("mean of means", "dp")),
    "DDP: no broadcast": (DP, functools.partial(ddp, wrap=functools.partial(DDP, init_sync=False), seed=None), {},
                          ("not broadcast", "dp")),
    "DDP: the same samples": (DP, functools.partial(ddp, reads=0), {}, ("same samples", "dp")),
    "DDP: last micro-batch alone": (DP, functools.partial(ddp, m=2, forgets=True), {"m": 2},
                                    ("micro-batch missing", "micro-batches")),
    "DDP: micro-batches summed": (DP, functools.partial(ddp, m=4, scale=False), {"m": 4},
                                  ("sum for mean", "micro-batches")),
    "DDP: rank 1 makes no step": (DP, functools.partial(ddp, idle=1), {}, ("stale", "dp")),
    "DDP: a norm summed over copies": (DP, functools.partial(ddp, copies=True), {}, ("norm", "dp")),
    "DDP: gradients never zeroed": (DP, functools.partial(ddp, steps=3, zero=False), THREE, ("not zeroed", None)),
    "DDP: dropout of another stream": (DP, functools.partial(ddp, p=0.5), {"net": DICE}, ("noise", None)),
    "DDP: gradients in fp8": (DP, functools.partial(ddp, hook=hook_in_fp8), {}, ("coarser", None)),
    "DDP: tied weights come apart": (DP, functools.partial(ddp, untied=True), {"net": TIED}, ("cut off", None)),
    "DDP: recomputed from another input": (DP, functools.partial(ddp, again=True), {}, ("recomputed", None)),
    "FSDP2: divided by 1": (DP, functools.partial(fsdp, factor=1.0), {}, ("sum for mean", "dp")),
    "FSDP2: divided by 4": (DP, functools.partial(fsdp, factor=4.0), {}, ("mean for sum", "dp")),
    "FSDP2: the loss divided by n too": (DP, functools.partial(fsdp, divided=True), {}, ("mean for sum", "dp")),
    "FSDP2: a norm of the shard": (DP, functools.partial(fsdp, own_norm=True), {}, ("norm", "dp")),
    "FSDP2: shards loaded by the wrong rank": (DP, functools.partial(fsdp, swapped=True), {}, ("pieces swapped", "dp")),
    "FSDP2: last micro-batch alone": (DP, functools.partial(fsdp, m=4, forgets=True), {"m": 4},
                                      ("micro-batch missing", "micro-batches")),
    "tp: rows, not summed": (TP, functools.partial(tensor, reduce=lambda real, given: given),
                             {"reference": reference_tp}, ("never reduced", "tp")),
    "tp: rows, a mean": (TP, functools.partial(tensor, reduce=lambda real, given: real / 2),
                         {"reference": reference_tp}, ("mean for sum", "tp")),
    "tp: rows, twice": (TP, functools.partial(tensor, reduce=lambda real, given: real * 2),
                        {"reference": reference_tp}, ("once per rank", "tp")),
    "tp: nothing summed in backward": (TP, functools.partial(tensor, reduce=in_backward), {"reference": reference_tp},
                                       ("copies apart", "tp")),
    "tp: an embedding without its mask": (TP, functools.partial(tensor, mask=False), {"reference": reference_tp},
                                          ("another term", None)),
    "tp: halves interleaved": (TP, functools.partial(tensor, interleaved=True), {"reference": reference_tp},
                               ("another order", None)),
    "pp: micro-batches summed": (PP, functools.partial(pipeline, scale=False), {"reference": reference_pp, "m": 4},
                                 ("sum for mean", "micro-batches")),
    "pp: tied ends, not added up": (PP, functools.partial(pipeline, tied=True, sums=False),
                                    {"reference": reference_pp, "m": 4, "net": TIED}, ("never reduced", "pp")),
    "pp: a norm of the stage": (PP, functools.partial(pipeline, halves=True), {"reference": reference_pp, "m": 4},
                                ("norm", "pp")),
}  # fmt: skip


def on_a_rank(runs, dtype):
    Net.dtype = dtype
    return [flattened(step(*data(uneven))) for step, uneven in runs]
