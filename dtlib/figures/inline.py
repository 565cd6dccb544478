"""A matplotlib figure as SVG inside the page: light, in the colour of the page's text, with ids of its own."""

from __future__ import annotations

import hashlib
import html
import io
import itertools
import re
from typing import Any

from .told import alternative

INK = "#767676"
"""Text, axes, outlines: a grey that reads on white and on dark; here it becomes the colour of the page's text."""

LEGIBLE_PX = 9
"""The smallest type on a phone: where a page is too narrow for it, a figure keeps its width and is pulled aside."""

_CLIP = re.compile(r'<clipPath id="([^"]+)">\s*<rect x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"/>\s*</clipPath>')
_BARS = re.compile(r'<path d="M[^MLCQ"]*z"( style="[^"]*")/>(?:\s*<path d="M[^MLCQ"]*z"\1/>)+')


def svg(figure: Any, *, alt: str = "") -> str:
    """The matplotlib `figure` as an inline ``<svg>`` element that follows the page's text colour and width.

    `alt` is what a screen reader says; where it is empty, the figure's own label (``fig.set_label``) and the numbers
    that it shows.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dtlib"}):
        figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for noise in (
        r"<metadata>.*?</metadata>",
        r"<style.*?</style>",
        r"font-family: [^;\"]*(?:; )?",
        r"<!--.*?-->",
    ):
        text = re.sub(noise, "", text, flags=re.DOTALL)
    text = _without_idle_clips(text)
    text = re.sub(r' d="([^"]*)"', lambda found: f' d="{short_path(found[1])}"', text)
    text = re.sub(r' (x|y)="([^"]*)"', lambda at: f' {at[1]}="{_tenth(at[2])}"', text)
    text = re.sub(r' (points|transform|x1|x2|y1|y2)="[^"]*"', _shorter, text)
    text = text.replace("xlink:href=", "href=").replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    text = re.sub(r' transform="rotate\(-?0 [^"]*"|<defs>\s*</defs>|fill-opacity: 1;? ?', "", text)
    text = _BARS.sub(_one_path, _without_bare_groups(text))
    text = _unique_ids(text.replace(INK, "currentColor"))
    width = float(text.split('width="')[1].split("pt")[0])
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    said = html.escape(alt or alternative(figure) or "figure")
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\w+ )*([\d.]+)px", text)]
    natural = width * 4 / 3
    legible = min(natural, width * LEGIBLE_PX / min(sizes)) if sizes else 0  # narrower pages pull it aside
    look = f"width:100%;min-width:{legible:.0f}px;max-width:{natural:.0f}px;height:auto"
    look += ";font-family:inherit;stroke-linejoin:round"
    head = f'<svg class="dtlib-figure" role="img" aria-label="{said}" style="{look}"'
    return re.sub(r"\n\s*", "\n", text.replace("<svg", head, 1)).strip()


def _without_idle_clips(text: str) -> str:
    """Paths that lie inside their clip rectangle need not be clipped by it: most of a picture's bars."""
    clips = {name: (float(x), float(y), float(w), float(h)) for name, x, y, w, h in _CLIP.findall(text)}

    def bare(path: re.Match[str]) -> str:
        if path[2] not in clips:
            return path[0]
        x, y, width, height = clips[path[2]]
        numbers = [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", path[1])]
        slack = 0.05
        inside = all(x - slack <= at <= x + width + slack for at in numbers[::2])
        inside &= all(y - slack <= at <= y + height + slack for at in numbers[1::2])
        return f'<path d="{path[1]}"' if inside else path[0]

    text = re.sub(r'<path d="([^"]*)" clip-path="url\(#([^)]+)\)"', bare, text)
    return _CLIP.sub(lambda clip: clip[0] if f"url(#{clip[1]})" in text else "", text)


def short_path(path: str) -> str:
    """The path of matplotlib to a tenth of a point, its lines along the axes as ``H`` and ``V``."""
    short, last = [], ("", "")
    for command, rest in re.findall(r"([A-Za-z])([^A-Za-z]*)", path):
        numbers = [_tenth(number) for number in rest.split()]
        if not numbers:
            short.append(command)
            continue
        x, y = numbers[-2:]
        if command == "L" and x == last[0]:
            short.append(f"V{y}")
        elif command == "L" and y == last[1]:
            short.append(f"H{x}")
        else:
            short.append(command + " ".join(numbers))
        last = x, y
    return "".join(short)


def _one_path(bars: re.Match[str]) -> str:
    """Rectangles that look alike and follow each other, as one path."""
    joined = "".join(re.findall(r' d="([^"]*)"', bars[0]))
    return f'<path d="{joined}"{bars[1]}/>'


def _tenth(number: str) -> str:
    """A tenth of a point is plenty in a picture, a hundredth in a marker, whose coordinates are small."""
    places = 1 if abs(float(number)) >= 10 else 2
    return f"{float(number):.{places}f}".rstrip("0").rstrip(".") if "." in number else number


def _shorter(attribute: re.Match[str]) -> str:
    """Two decimals of a point are plenty; line breaks are none."""
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0].replace("\n", ""))


def _without_bare_groups(text: str) -> str:
    """Drop ``<g>`` elements that say nothing; matplotlib wraps each artist in several."""
    open_groups: list[bool] = []

    def keep(tag: re.Match[str]) -> str:
        if tag[0] != "</g>":
            open_groups.append(not tag[1] or re.fullmatch(r' id="[^"]*"', tag[1]) is not None)
            return "" if open_groups[-1] else tag[0]
        return "" if open_groups.pop() else "</g>"

    return re.sub(r"<g( [^>]*)?>|</g>", keep, text)


_pictures = itertools.count(1)


def _unique_ids(text: str) -> str:
    """Give ids that are referred to short names of their own, so that two pictures of a page never share one."""
    prefix = f"f{hashlib.sha1(text.encode()).hexdigest()[:4]}{next(_pictures)}"
    used = sorted(set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text)))
    short = {name: f"{prefix}-{number}" for number, name in enumerate(used)}
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{short[m[1]]}"' if m[1] in short else "", text)
    return re.sub(r"(url\(#|href=\"#)([^)\"]+)", lambda m: m[1] + short[m[2]], text)
