"""One training step of the course's own parallelisms, as `lab.parity` takes it: many of them in one start of ranks.

What they find is compared by the parts of `lab.parity`, so that the reference runs once for each model and mesh.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.lab.parity import _cuts
from dtlib.lab.parity.judge import judge, refusals
from dtlib.lab.parity.mesh import Axes
from dtlib.lab.parity.pieces import flattened
from dtlib.lab.parity.rounding import eps_of
from dtlib.ranks import cp, tp
from dtlib.ranks import model as gpt
from dtlib.ranks.mesh import Mesh
from tests.ranks.threed.judge import MAX_NORM, built, gradients_of, made, make_adamw, weights_of

from .known import known

ROWS = 8


def data(config, seed=1):
    """A batch; some targets do not count, most of them in the first row."""
    tokens = torch.randint(config.vocab, (ROWS, config.seq + 1), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = gpt.IGNORED
    targets[3, 2:4] = gpt.IGNORED
    return tokens[:, :-1], targets


def outputs(name):
    """Of which modules the outputs are compared: those that all ranks of tp have whole."""
    return name in ("token_embedding", "norm") or (
        name.startswith("blocks") and name.split(".")[2:] in ([], ["attention"], ["mlp"])
    )


def heads(name):
    """Of which modules the outputs' gradients are compared where tokens are cut: queries, keys and values."""
    return name.endswith("attention.qkv")


def backwards(tensors):
    """Gradients are computed from the last layer to the first."""
    return dict(reversed(tensors.items()))


def reference(config, x, y):
    model = made(config, ())
    found = {f"start/{name}": p.detach().clone() for name, p in model.named_parameters()}
    with lab.watched(model, lambda name: outputs(name) or heads(name)) as seen:
        loss = gpt.next_token_loss(model(x), y)
        loss.backward()
    found |= {name: each for name, each in seen.tensors().items() if name.startswith("forward")} | {"loss": loss}
    found |= {name: each for name, each in seen.tensors().items() if name.startswith("backward") and heads(name)}
    found |= backwards({f"grad/{name}": p.grad.clone() for name, p in model.named_parameters()})
    adam = make_adamw(model.parameters())
    found["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    adam.step()
    return found | {f"weight/{name}": p.detach() for name, p in model.named_parameters()}


def pieces(training, tensors, prefix):
    """Tensors by the ``id`` of parameters, as pieces of those of the whole model."""
    found, whole = {}, made(training.config, ())
    numbers = {n: torch.arange(p.numel()).view(p.shape).double() for n, p in whole.named_parameters()}
    for stage in training.stages.values():
        own = {n: p for n, p in stage.named_parameters(remove_duplicate=False) if id(p) in tensors}
        names = {n: training.places[id(p)].name for n, p in own.items()}
        lies = tp.split(stage, {n: numbers[names[n]] for n in own})
        for n, p in own.items():
            found[prefix + names[n]] = lab.piece(tensors[id(p)].clone(), index=lies[n].long())
    return found


def step(case, change, x, y):
    """A step on the mesh of `case`. `change` may take another part of the batch, or alter what is found."""
    mesh = Mesh(dict(case.axes))
    place, n = mesh.coordinates().get("dp", 0), dict(case.axes).get("dp", 1)
    place = change.get("reads", lambda place: place)(place)
    training = built(case)
    found = pieces(training, weights_of(training), "start/") if not dict(case.options).get("zero") else {}
    stage = next(iter(training.stages.values()))
    watches = len(training.stages) == 1 and not {"pp", "cp"} & set(mesh.axes)
    in_tokens = [name for name, _ in case.axes] == ["cp"]
    mine = slice(place * ROWS // n, (place + 1) * ROWS // n)
    with lab.watched(stage, heads if in_tokens else outputs) as seen:
        loss = training.backward(x[mine], y[mine])
    if watches:
        found |= {name: each for name, each in seen.tensors().items() if name.startswith("forward")}
    if in_tokens:
        found |= own_tokens({name: each for name, each in seen.tensors().items() if name.startswith("backward")}, x)
    found |= {"loss": loss} | pieces(training, gradients_of(training), "grad/")
    found["norm"] = training.clip_grad_norm_(MAX_NORM).detach().clone()
    for optimizer in training.optimizers:
        optimizer.step()
    return found | pieces(training, weights_of(training), "weight/")


def own_tokens(tensors, x):
    """Gradients of this rank's tokens, as pieces of those of all. They are of n times the loss, as the weights'
    mean over n ranks is still to come."""
    mine = cp.Layout(x.shape[1], None, "zigzag").positions(x.device)
    lies = {n: torch.arange(x.numel() * each.shape[-1]).view(*x.shape, -1)[:, mine] for n, each in tensors.items()}
    return {n: lab.piece(each / dist.get_world_size(), index=lies[n]) for n, each in tensors.items()}


def places(case):
    return {"forward/*": {"dp": 0} | ({"tp": 1} if dict(case.options).get("sequence_parallel") else {})}


def zigzag(x, y, i, n):
    """The same tokens; the targets of other ranks of cp do not count."""
    chunks = torch.arange(x.shape[1]).tensor_split(2 * n)
    mine = torch.cat([chunks[i], chunks[2 * n - 1 - i]])
    masked = torch.full_like(y, gpt.IGNORED)
    masked[:, mine] = y[:, mine]
    return x, masked


def on_a_rank(runs, seed):
    """What each run gives on this rank, one after another."""
    results = []
    for case, mutant, change in runs:
        torch.manual_seed(seed + dist.get_rank())
        with mutant():
            cut = {a: d for a, d in places(case)["forward/*"].items() if a in dict(case.axes)}
            results.append(flattened(step(case, change, *data(case.config, seed)), {"forward/*": cut} if cut else {}))
    return results


@functools.cache
def expected(config, axes, m, seed, dtypes):
    """The reference, measured, for what ranks found in these dtypes."""
    mesh = Axes(dict(axes))
    cuts = {name: zigzag if name == "cp" else 0 for name, size in axes if name in ("dp", "cp") and size > 1}
    batch, unit = data(config, seed), max(map(eps_of, dtypes))
    return known(functools.partial(reference, config), batch, dict(axes), unit, _cuts(cuts, mesh, batch), m)


def reports(n, runs, seed=1):
    """For each run, a `Case`, a mutant and a change, what `lab.parity` says."""
    by_rank = lab.run(on_a_rank, n, args=(runs, seed), timeout_s=300)
    for number, (case, _, _) in enumerate(runs):
        held, axes = [each[number] for each in by_rank], Axes(dict(case.axes))
        names = {name for each in held for name in each}
        dtypes = tuple(sorted({told.dtype for each in held for told, _ in each.values()}))
        full = expected(case.config, case.axes, case.m, seed, dtypes)
        some = type(full)(**vars(full) | {"whole": {n: each for n, each in full.whole.items() if n in names}})
        told = [{name: told for name, (told, _) in each.items()} for each in held]
        assert not (words := refusals({n: full.told[n] for n in some.whole}, told, axes)), (case, words)
        yield judge(some, held, axes, case.m)
