"""`lab.parity`: a parallel step beside one process, what kind of mistake parts them, and over which axis.

**What goes in.** A *reference*: a function of the batch that one process runs, and that returns tensors by name in
the order in which they are computed. A *step*: a function of the same batch that every rank runs, and that returns
tensors under the same names: whole, as a piece with its place (`piece`), or as a DTensor; a rank of a pipeline
returns what it has. The *mesh*: axes and their sizes. Nothing else is asked of the code: `dtlib.ranks`, DDP, FSDP2,
``parallelize_module``, a pipeline, or loops by hand.

**How it is told what is a mistake.** The reference runs again with every operation off by about a rounding
(`rounding`): what that moves is what another order of additions may move.

**How a mistake is named.** A right gradient is a sum of contributions, one for each part of the batch. The reference
runs on each part alone, so they are known, and nearly every mistake of a parallel step is another linear combination
of them, or of what the ranks hold: a factor (`linear.multiples`), one part alone (never reduced), a part missing or
twice, a mean of means. What is no such sum is looked for in other places: in another order, in another rank's piece,
in an earlier step, in norms, in other names (a bias, weight decay), in a coarser dtype, in the reference's own spread
over dropout. The simplest explanation that fits within rounding is said, with those that would look the same; what
fits none is said with numbers, as unknown.

**What is sent, and when.** Ranks exchange names, shapes and dtypes first, a few bytes; where these do not fit it is a
``ValueError`` on every rank, and no tensor is sent.

Others find *where*: TTrace (arXiv 2506.09280) by comparing tensors with tolerances from perturbation, TrainVerify and
`spmd-types` by proving or typing what is summed. This says *what kind*, with what one process can run.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dtlib.lab.launch import run, torchrun
from dtlib.theory.valid import amount, flag, whole

from .case import KINDS, Kind
from .expected import Cut, Expected, Reference, enough
from .judge import judge, refusals
from .mesh import DATA_AXES, Axes
from .pieces import Held, Piece, flattened, piece
from .report import ParityError, Report, Reports, Row
from .rounding import eps_of
from .watch import Watched, watched

__all__ = ["KINDS", "Kind", "ParityError", "Piece", "Report", "Reports", "Row", "Watched", "over_meshes", "parity",
           "piece", "watched"]  # fmt: skip


def parity(
    reference: Callable[..., Any],
    step: Callable[..., Any],
    mesh: Any,
    *,
    batch: Sequence[Any] = (),
    split: Mapping[str, Cut] | None = None,
    micro_batches: int = 1,
    places: Mapping[str, Mapping[str, int]] | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    memory_bytes: float | None = None,
    timeout_s: float = 300,
    raise_on_difference: bool = False,
) -> Report:
    """Compare what ``step(*batch)`` returns on each rank of `mesh` with what ``reference(*batch)`` returns in one
    process.

    Both return tensors by name (or a list of such dicts, one for each step of training), the reference in the order of
    computation. A rank returns whole tensors, pieces with their place (`lab.piece`) or DTensors, under the names that
    it has. `mesh` maps names of axes to sizes, the last varying fastest; it may be a ``DeviceMesh``.

    `step` gets the whole batch and takes its part itself: taking the wrong one is a mistake that is found. `split` says
    which part is due, so that what each contributes is known: by axis the dimension that it cuts, or a function
    ``cut(*batch, index, n)`` that returns the part (for context parallelism: the same tokens with other targets
    ignored). Left out, the first axis whose name is one of `mesh.DATA_AXES` cuts rows. `micro_batches` cuts each part's
    rows again. `places` gives pieces to names by patterns: ``{"forward/*": {"dp": 0}}``. `dtype` is the coarsest that
    the step computes in, where what it returns does not show it: ``torch.bfloat16`` under autocast.

    The reference is called 7 times (15 in bfloat16 and float16, 49 more where these seem to hide something) and once
    for each part of the batch, and where a gradient may be cut off up to 200 times more, always with
    ``torch.manual_seed(seed)``: it must begin anew each time. Tensors are read when it returns: of a gradient that a
    later step changes, return a clone. Rank r calls `step` with a seed of its own, ``seed + 1 + r``, so that nothing is
    equal by chance.

    Outside of ranks it starts them, with `lab.run`; under torchrun it uses those that are there; in a rank, where
    ``torch.distributed`` is up, all ranks call it together, the first runs the reference, and all get the report.

    Returns a `Report`; with ``raise_on_difference=True`` it raises `ParityError` (an ``AssertionError``) where
    something differs by more than rounding. Raises ``ValueError`` for arguments, names or shapes that cannot be
    compared, before any tensor is sent, and where more than `memory_bytes` would be needed.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from dtlib import lab
    >>> x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> def reference(x):
    ...     w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    ...     loss = (x @ w).square().mean()
    ...     loss.backward()
    ...     return {"loss": loss, "grad": w.grad}
    >>> def step(x):
    ...     found = reference(x.chunk(2)[dist.get_rank()])
    ...     found["loss"] = found["loss"].detach() / 2
    ...     for each in found.values():
    ...         dist.all_reduce(each)
    ...     return found
    >>> report = lab.parity(reference, step, {"dp": 2}, batch=(x,))
    >>> report.first.name, report.kind, report.axes
    ('grad', 'sum for mean', ('dp',))
    """
    import torch.distributed as dist

    axes = Axes(mesh)
    m = whole("micro_batches", micro_batches, 1)
    flag("raise_on_difference", raise_on_difference)
    if not callable(reference) or not callable(step):
        raise ValueError(f"reference and step must be functions, not {reference!r} and {step!r}")
    if isinstance(batch, torch.Tensor) or not isinstance(batch, Sequence):
        raise ValueError(f"batch must be a tuple of what reference and step are called with, not {_short(batch)}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating dtype of torch, as torch.bfloat16, not {dtype!r}")
    seed = whole("seed", seed, 0)
    if memory_bytes is not None:
        amount("memory_bytes", memory_bytes)
    _check_places(places, axes)
    cuts = _cuts(split, axes, batch)
    source = Reference(reference, batch, seed)
    coarsest = 0.0 if dtype is None else eps_of(str(dtype).removeprefix("torch."))
    work = _Work(step, tuple(batch), axes, places, seed)

    def prepared(expected: Expected) -> int:
        parts = m * axes.size(cuts) if batch else 0
        return enough(expected, axes, parts, coarsest, memory_bytes)

    def concluded(expected: Expected, found: list[Held], needs: int) -> Report:
        dtypes = [eps_of(told.dtype) for each in found for told, _ in each.values()]
        unit = coarsest if dtype is not None else max(dtypes, default=0.0)
        source.measure(expected, unit)
        source.split(expected, axes, cuts, m)
        report = judge(expected, found, axes, m)
        report.needs_bytes = needs
        return report

    if dist.is_initialized():
        report = _together(source, work, prepared, concluded)
    elif torchrun.is_active():
        report = run(_together, axes.world_size, args=(source, work, prepared, concluded), timeout_s=timeout_s)[0]
    else:
        expected = source.whole()
        needs = prepared(expected)
        answers = run(work, axes.world_size, args=(expected.told,), timeout_s=timeout_s)
        if answers[0][0]:
            raise ValueError(answers[0][0])
        report = concluded(expected, [held for _, held in answers], needs)
    if raise_on_difference and not report.agrees:
        raise ParityError(report)
    return report


def over_meshes(
    meshes: Sequence[Any],
    reference: Callable[..., Any],
    step: Callable[..., Any],
    *,
    raise_on_difference: bool = False,
    **options: Any,
) -> Reports:
    """`parity` on one mesh after another; ``step(mesh, *batch)`` is told on which. `options` are those of `parity`.

    What comes back says which axes those that differ have in common; ``ValueError`` where there is no mesh.
    """
    if not isinstance(meshes, Sequence) or not meshes:
        raise ValueError(f"meshes must be a list of at least one mesh, not {meshes!r}")
    for mesh in meshes:
        Axes(mesh)  # all are looked at before the first one is compared
    found = Reports([parity(reference, partial(step, mesh), mesh, **options) for mesh in meshes])
    if raise_on_difference and not found.agrees:
        raise ParityError(found)
    return found


class _Work:
    """What a rank does: the step, then the exchange of names and shapes."""

    def __init__(self, step: Callable[..., Any], batch: Sequence[Any], axes: Axes, places: Any, seed: int) -> None:
        self.step, self.batch, self.axes, self.places, self.seed = step, batch, axes, places, seed

    def __call__(self, expected: Any) -> tuple[str, Held]:
        """Why the tensors cannot be compared, the same words on every rank, and the tensors where they can."""
        import torch.distributed as dist

        if dist.get_world_size() != self.axes.world_size:
            return f"mesh must have {dist.get_world_size()} ranks in all, not {self.axes.world_size}", {}
        torch.manual_seed(self.seed + 1 + dist.get_rank())
        trouble, held = "", Held()
        raised: Exception | None = None
        try:
            held = flattened(self.step(*self.batch), self.places)
        except Exception as error:  # told first: where nobody ends the other ranks, they would wait for this one
            plain = isinstance(error, ValueError)
            trouble, raised = f"rank {dist.get_rank()}: {error if plain else repr(error)}", error
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (trouble, {name: each for name, (each, _) in held.items()}, _sums(self.batch)))
        said = [words for words, *_ in told if words]
        if raised is not None:
            raise raised
        other = [rank for rank, (*_, sums) in enumerate(told) if sums != told[0][2]]
        if other:
            said.append(f"batch must be the same on each rank, and rank {other[0]} has another: seed what draws it")
        refused = said[0] if said else refusals(expected, [each for _, each, _ in told], self.axes)
        return refused, {} if refused else held


def _sums(batch: Sequence[Any]) -> list[int]:
    """Of each plain tensor its checksum."""
    plain = [x.detach().cpu().contiguous().flatten() for x in batch if isinstance(x, torch.Tensor) and x.numel()
             and not hasattr(x, "placements")]  # fmt: skip
    return [zlib.crc32(x.view(torch.uint8).numpy()) for x in plain]


def _together(source: Reference, work: _Work, prepared: Callable[..., int], concluded: Callable[..., Report]) -> Report:
    """In ranks that are there: the first runs the reference and judges, and says to all what came of it."""
    import torch.distributed as dist

    first = dist.get_rank() == 0
    expected = needs = None

    def on_the_first(act: Callable[[], Any]) -> Any:
        box: list[Any] = [None]
        if first:
            try:
                box = [("is", act())]
            except Exception as error:
                box = [("raised", _sendable(error))]
        dist.broadcast_object_list(box)
        what, value = box[0]
        if what == "raised":
            raise value
        return value

    def begin() -> Any:
        nonlocal expected, needs
        expected = source.whole()
        needs = prepared(expected)
        return expected.told

    refused, held = work(on_the_first(begin))
    if refused:
        raise ValueError(refused)
    every: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(held, every if first else None)
    report: Report = on_the_first(lambda: concluded(expected, every, needs))
    return report


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"on rank 0: {type(error).__name__}: {error}")
    return error


def _cuts(split: Mapping[str, Cut] | None, axes: Axes, batch: Sequence[Any]) -> dict[str, Cut]:
    """By axis, how it cuts the batch."""
    if split is None:
        first = next((name for name in axes.sizes if name in DATA_AXES), None)
        return {first: 0} if first is not None and batch else {}
    if not isinstance(split, Mapping):
        raise ValueError(f'split must map axes to dimensions, as {{"dp": 0}} does, not {split!r}')
    for axis, cut in split.items():
        if axis not in axes.sizes:
            raise ValueError(f"split must name axes of the mesh, {', '.join(axes.sizes)}, not {axis!r}")
        if callable(cut):
            continue
        dimension = whole(f"the dimension of split[{axis!r}]", cut, 0)
        tensors = [each for each in batch if isinstance(each, torch.Tensor)]
        if tensors and not any(each.dim() > dimension for each in tensors):
            raise ValueError(f"split[{axis!r}] must be a dimension of a tensor in the batch, not {dimension}")
    return dict(split)


def _check_places(places: Any, axes: Axes) -> None:
    if not isinstance(places, Mapping | None) or not all(isinstance(cut, Mapping) for cut in (places or {}).values()):
        raise ValueError(f'places must map patterns to places, as {{"forward/*": {{"dp": 0}}}} does, not {places!r}')
    for pattern, cut in (places or {}).items():
        for axis, dimension in cut.items():
            if axis not in axes.sizes:
                raise ValueError(f"places must name axes of the mesh, {', '.join(axes.sizes)}, not {axis!r}")
            whole(f"the dimension of places[{pattern!r}][{axis!r}]", dimension, 0)


def _short(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else f"{value!r:.60}"
