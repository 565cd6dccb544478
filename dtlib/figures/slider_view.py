"""How a slider is shown: the fragment of a static page, and the widget of a live notebook."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from . import chart, control
from .slider import Slider, Step
from .style import looks


def page(slider: Slider) -> str:
    """HTML of `slider` with every position inside: range input, chart, readings, table, and the script."""
    steps = [slider.step(index) for index in range(len(slider.values))]
    now = steps[slider.first]
    identity = control.identity_of("slider", f"{slider.name}{slider.grid!r}")
    text = escape(now.text)
    moved = (
        f'<div class="control"><label for="{identity}-input">{escape(slider.name)}</label>'
        f'<input type="range" id="{identity}-input" min="0" max="{len(steps) - 1}" step="1" '
        f'value="{slider.first}" aria-valuetext="{escape(spoken(slider.name, now.text))}" autocomplete="off" disabled>'
        f'<output for="{identity}-input">{text}</output></div>'
    )
    body = f"{_chart(slider, now)}{moved}{_readings(slider, now)}{_table(slider, steps)}"
    return control.figure("slider", body, _data(slider, steps), caption=slider.caption, identity=identity)


def widget(slider: Slider) -> Any:
    """The ipywidgets version, which calls the function at each move; None without ipywidgets or a kernel."""
    try:
        import ipywidgets
        from IPython import get_ipython
    except ImportError:
        return None
    if getattr(get_ipython(), "kernel", None) is None:
        return None
    options = [(slider.format_value(value), index) for index, value in enumerate(slider.values)]
    moved = ipywidgets.SelectionSlider(
        options=options, value=slider.first, description=slider.name, continuous_update=True,
        style={"description_width": "initial"}, layout={"width": "100%", "max_width": "40em"},
    )  # fmt: skip
    picture = ipywidgets.HTML()

    def redraw(change: Any = None) -> None:
        step = slider.step(moved.value, slider.ask(moved.value))
        body = f"{_chart(slider, step)}{_readings(slider, step)}{_caption(slider)}"
        picture.value = f'<figure class="dtlib-slider"><style>{control.asset("slider.css")}</style>{body}</figure>'

    moved.observe(redraw, names="value")
    redraw()
    return ipywidgets.VBox([picture, moved])


def spoken(name: str, text: str) -> str:
    """A position as it is read aloud, with its unit: "8 ranks" where the slider is called "ranks N" and shows "8"."""
    if re.search(r"[^\W\d]{2}|%", text):
        return text  # has a unit
    unit = re.search(r"\(([^)]+)\)$", name) or re.search(r", in (.+)$", name)
    noun = unit[1] if unit else re.sub(r"(,.*| \w)$", "", name)
    if text == "1" and unit is None:
        return f"1 {one}" if (one := re.sub(r"(ch)es\b|s\b", r"\1", noun, count=1)) != noun else f"{noun} 1"
    return f"{text} {noun}" if unit or re.search(r"s\b", noun) else f"{noun} {text}"


def _alt(slider: Slider, step: Step) -> str:
    """What the chart shows, and the readings of this position."""
    what = slider.alt or f"{slider.y_label or ', '.join(slider.labels)} against {slider.x_label}"
    where = spoken(slider.name, step.text) + ("" if slider.x is None else f" and {slider.format_x(step.probe)}")
    read = ", ".join(f"{label} {reading}" for label, reading in zip(slider.labels, step.readings, strict=True))
    return f"{what}; at {where}: {read}"


def _chart(slider: Slider, step: Step) -> str:
    x, y = slider.axes
    curves = dict(zip(slider.labels, step.curves, strict=True))
    known = looks([*slider.labels, *slider.marks])
    return chart.draw(x, y, slider.xs, curves, known, slider.marks, step.probe, step.at, _alt(slider, step))


def _readings(slider: Slider, step: Step) -> str:
    known = looks([*slider.labels, *slider.marks])
    rows = [
        f"<li>{chart.swatch(known[label], measured=False)}<span>{escape(label)}</span> <b>{escape(reading)}</b></li>"
        for label, reading in zip(slider.labels, step.readings, strict=True)
    ] + [
        f"<li>{chart.swatch(known[label], measured=True)}<span>{escape(label)}, measured</span></li>"
        for label in slider.marks
    ]  # fmt: skip
    where = "" if slider.x is None else f"<p>At {escape(slider.format_x(step.probe))} (dotted line):</p>"
    note = "" if slider.note is None else f'<p class="note" aria-live="polite">{escape(step.note)}</p>'
    return f"{where}<ul>{''.join(rows)}</ul>{note}"


def _table(slider: Slider, steps: list[Step]) -> str:
    titles = [slider.name, *slider.labels, *(["note"] if slider.note else [])]
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = ""
    for step in steps:
        row = "".join(f"<td>{escape(cell)}</td>" for cell in [step.text, *step.readings])
        row += f'<td class="note">{escape(step.note)}</td>' if slider.note else ""
        body += f"<tr>{row}</tr>"
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<details open><summary>The same numbers as a table</summary>{table}</details>"


def _caption(slider: Slider) -> str:
    return f"<figcaption><p>{escape(slider.caption)}</p></figcaption>" if slider.caption else ""


def _data(slider: Slider, steps: list[Step]) -> dict[str, Any]:
    x, y = slider.axes
    moving = slider.x is not None
    return {
        "x": {"scale": x.scale, "limits": [x.low, x.high], "from": x.start, "to": x.end},
        "y": {"scale": y.scale, "limits": [y.low, y.high], "from": y.start, "to": y.end},
        "xs": slider.xs,
        "steps": [
            vars(step)
            | {
                "curves": step.curves if moving else None,
                "spoken": spoken(slider.name, step.text),
                "alt": _alt(slider, step),
            }
            for step in steps
        ],
    }
