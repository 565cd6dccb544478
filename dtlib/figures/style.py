"""One look for every picture of the book: one colour for one thing, on light and dark pages and in grey.

Call :func:`use` once at the top of a chapter, then draw with matplotlib as usual. Figures become inline SVG
whose text and axes take the colour of the page's text, so that one picture serves light and dark pages. Where
a notebook viewer shows only PNG, a middle grey takes that part. Say what a picture shows to those who do not
see it with ``figure.set_label("...")``.

Rules of the book: theory is a line (:func:`line`), a measurement is markers (:func:`markers`), in the same
axes; no title inside the picture (the caption says it); axis labels in lower case with units, ``"buffer size
(bytes)"``.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

from .inline import INK as INK
from .inline import svg as svg


@dataclass(frozen=True)
class Look:
    """How one thing is drawn: its colour, and what tells it apart for a reader who sees no colour."""

    color: str
    hatch: str = ""
    dash: tuple[float, ...] = ()
    marker: str = "o"


_INTERVALS = {  # bars of a timeline: what computes is plain, what travels is hatched, waiting is an outline
    "forward": Look("#2a66ad"),
    "backward": Look("#b56900", dash=(6, 2), marker="s"),
    "weight gradient": Look("#72a321", dash=(2, 2), marker="^"),
    "all-reduce": Look("#c8324a", hatch="///", dash=(8, 2, 2, 2), marker="D"),
    "all-gather": Look("#8a5cc4", hatch="\\\\\\", dash=(4, 1, 1, 1, 1, 1), marker="v"),
    "reduce-scatter": Look("#d062a8", hatch="xxx", dash=(1, 1.5), marker="P"),
    "optimizer": Look("#7d7468", hatch="---", dash=(10, 3), marker="X"),
    "idle": Look("#8c9096", hatch="", dash=(1, 4), marker="."),
}
_ALGORITHMS = {  # curves: each has its own dash and its own marker
    "naive": Look("#8d6e63", dash=(1, 1.5), marker="X"),
    "ring": Look("#008f88", dash=(), marker="o"),
    "tree": Look("#b07a2a", dash=(6, 2), marker="^"),
    "recursive doubling": Look("#3f9bd6", dash=(2, 2), marker="s"),
    "halving-doubling": Look("#4f8a3c", dash=(8, 2, 2, 2), marker="D"),
    "two-level": Look("#e5623f", dash=(4, 1, 1, 1, 1, 1), marker="P"),
    "broadcast": Look("#a98b00", hatch="|||", dash=(10, 3), marker="v"),
    "all-to-all": Look("#5b6f8f", hatch="+++", dash=(3, 1), marker="*"),
}
_SPARE = [  # things without a fixed colour, in the order in which a picture meets them
    Look("#5f7fa8", dash=(), marker="o"),
    Look("#b56576", dash=(6, 2), marker="s"),
    Look("#5e8c6a", dash=(2, 2), marker="^"),
    Look("#9a7b4f", dash=(8, 2, 2, 2), marker="D"),
    Look("#84709b", dash=(4, 1, 1, 1, 1, 1), marker="v"),
    Look("#6d7a80", dash=(1, 1.5), marker="P"),
]
LOOKS: dict[str, Look] = {**_INTERVALS, **_ALGORITHMS}
"""Every thing that has one look in the whole book, by the word that the text uses for it."""

_ALIASES = {"input gradient": "backward", "compute": "forward", "wait": "idle", "bubble": "idle"}


def look(name: str, *, spare: int | None = None) -> Look:
    """The look of the thing called `name`: ``look("all-reduce").color``.

    Case does not matter, nor whether words are joined by spaces, hyphens or underscores. A longer label such
    as ``"ring, 64 ranks"`` is looked up by what stands before the first comma. An unknown name gets the
    `spare`-th look without a meaning where `spare` is passed; otherwise ``ValueError`` lists the names.
    """
    key = _key(str(name).split(",")[0])
    known = _BY_KEY.get(key)
    if known is not None:
        return known
    if spare is not None:
        return _SPARE[spare % len(_SPARE)]
    raise ValueError(f"name must be one of {', '.join(sorted(LOOKS))}, not {name!r}")


def color(name: str) -> str:
    """The colour of the thing called `name`, as ``"#rrggbb"``. Unknown names raise ``ValueError``."""
    return look(name).color


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A look for each of `names` of one picture: its own where it has one, else the next spare look."""
    unknown = [name for name in names if _key(name.split(",")[0]) not in _BY_KEY]
    return {name: look(name, spare=unknown.index(name) if name in unknown else None) for name in names}


def _key(name: str) -> str:
    return re.sub(r"[\s_\-–]+", " ", name).strip().lower()


_BY_KEY = {_key(name): known for name, known in LOOKS.items()}
_BY_KEY |= {_key(alias): LOOKS[name] for alias, name in _ALIASES.items()}

_RC: dict[str, Any] = {
    "figure.figsize": (5.6, 3.2),
    "figure.dpi": 110,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "dtlib",
    "font.size": 10.5,
    "font.family": "sans-serif",
    "mathtext.fontset": "dejavusans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.2,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2.0,
    "lines.markersize": 6.5,
    "hatch.linewidth": 0.7,
    "patch.linewidth": 0.8,
}


def use() -> None:
    """Draw every following matplotlib figure of this session in the book's style; show it as inline SVG."""
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcParams.update(_RC)
    mpl.rcParams["axes.prop_cycle"] = cycler(color=[spare.color for spare in _SPARE])
    _load_backend()
    _show_as_svg()


def context() -> AbstractContextManager[None]:
    """The same style for one ``with`` block, for library code that must not change the caller's settings."""
    import matplotlib as mpl

    _load_backend()
    return mpl.rc_context(_RC)


@cache
def _load_backend() -> None:
    """Load what draws before a block of other settings begins: a notebook's backend says when it is loaded that figures
    are shown, and the end of the block would take that back."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    plt.switch_backend(mpl.get_backend())


def line(axes: Any, x: Any, y: Any, name: str, *, label: str | None = None, **options: Any) -> Any:
    """Draw a prediction of theory: a line in the colour and dash of `name`. Returns the matplotlib line."""
    known = look(name, spare=len(axes.lines))
    style = (0, known.dash) if known.dash else "-"
    options = {"color": known.color, "linestyle": style, "label": label or name, **options}
    return axes.plot(x, y, **options)[0]


def markers(axes: Any, x: Any, y: Any, name: str, *, label: str | None = None, **options: Any) -> Any:
    """Draw measurements: markers in the colour of `name`, no line between them. Returns the matplotlib line.

    The label is ``"<name>, measured"`` unless `label` says otherwise.
    """
    known = look(name, spare=len(axes.lines))
    options = {
        "color": known.color, "linestyle": "none", "marker": known.marker, "markerfacecolor": "none",
        "markeredgewidth": 1.6, "label": label or f"{name}, measured", **options,
    }  # fmt: skip
    return axes.plot(x, y, **options)[0]


def bar(name: str, *, edge: str = INK) -> dict[str, Any]:
    """Keyword arguments that draw an interval of kind `name` in ``barh`` or ``broken_barh``."""
    known = look(name, spare=0)
    if known is LOOKS["idle"]:
        return {"facecolor": "none", "edgecolor": known.color, "linestyle": (0, (2, 2)), "linewidth": 0.6}
    return {"facecolor": known.color, "edgecolor": edge, "hatch": known.hatch, "linewidth": 0.6}


def _show_as_svg() -> None:
    """Teach the running notebook, if there is one, to show matplotlib figures as inline SVG."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None:
        return
    from matplotlib.figure import Figure

    static = bool(os.environ.get("DTLIB_STATIC"))

    def bundle(figure: Any, include: Any = None, exclude: Any = None) -> dict[str, str]:
        said = html.escape(str(figure.get_label()))
        return {"text/html": svg(figure) if static else f"{svg(figure)}<p><em>{said}</em></p>"}

    shell.display_formatter.mimebundle_formatter.for_type(Figure, bundle)
    if static:  # the book has captions of its own, and needs no second copy as PNG
        from matplotlib_inline.config import InlineBackend

        InlineBackend.instance(parent=shell).figure_formats = set()
