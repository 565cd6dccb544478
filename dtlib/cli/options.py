"""What ``dtlib memory`` and ``dtlib plan`` share: a model, a card and a network of one's own, errors about options."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dtlib.theory.hardware import Accelerator, Link
    from dtlib.theory.models import Adapters, Architecture

# numpy and dtlib.theory are imported by the functions that need them: --help answers at once.


class InGroups(click.Command):
    """A command whose help lists options under `headings`: by the option that each begins with."""

    def __init__(self, *args: Any, headings: Mapping[str, str], **given: Any) -> None:
        super().__init__(*args, **given)
        self.headings = headings

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write them, ``--help`` before the first heading."""
        groups, heading = defaultdict[str, list[tuple[str, str]]](list), "Options"
        *params, own = self.get_params(ctx)
        for each in (own, *params):
            heading = self.headings.get(each.name or "", heading)
            if isinstance(each, click.Option) and (row := each.get_help_record(ctx)) is not None:
                groups[heading].append(row)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


_SIZES = {
    "layers": ("num_layers", "Layers."),
    "hidden": ("hidden", "Width of a token's vector."),
    "heads": ("num_heads", "Heads of attention."),
    "kv_heads": ("num_kv_heads", "Heads of keys and values."),
    "head_dim": ("head_dim", "Width of a head."),
    "ffn": ("ffn_hidden", "Width of the feed-forward part."),
    "vocab": ("vocab", "Tokens that there are."),
}
"""The flags that change a model, what `Architecture` calls these sizes, and what help does."""


MOST_LAYERS, MOST = 1000, 10**9


def size_options(command: Any) -> Any:
    """The flags of a model's sizes, the last first, since decorators are applied from the inside out."""
    for name, (_, said) in reversed(_SIZES.items()):
        command = click.option(f"--{name.replace('_', '-')}", type=int, help=said)(command)
    return command


CARDS = (
    "V100-32GB-SXM", "A100-40GB-SXM", "A100-80GB-SXM", "H100-80GB-PCIe", "H100-80GB-SXM", "H200-141GB-SXM",
    "B200-180GB", "GB200-186GB", "MI300X-192GB", "TPU-v5p-95GB", "TPU-v6e-32GB", "RTX-4090-24GB", "RTX-5090-32GB",
)  # fmt: skip
RECIPES = ("12-byte", "16-byte", "18-byte", "20-byte", "fp32", "adam-8bit")
SCHEDULES = ("1F1B", "interleaved", "ZB-H1")
FRAMEWORKS = ("megatron", "nanotron", "fsdp", "deepspeed")
LINKS = ("InfiniBand EDR, HDR, NDR or XDR", "Ethernet 1G to 800G")
"""What help says that there is; a test holds the names to those of the theory, which takes too long to load."""


def recipe_option(default: str) -> Any:
    """``--recipe``: how many bytes of states a parameter has."""
    said = f"States of a parameter: {', '.join(RECIPES[:-1])} or {RECIPES[-1]}."
    return click.option("--recipe", default=default, show_default=True, help=said)


precision_option = click.option(
    "--precision", default="bf16", show_default=True, help="bf16, or fp8: products of layers, a scale for each tensor."
)
ADAPTED = ("qkv", "out", "up", "down")


def training_options(command: Any) -> Any:
    """Flags of how is trained, the last first."""
    for flag, kind, said in (
        ("--lora-modules", str, f"Matrices with adapters: {','.join(ADAPTED)}.  [default: all]"),
        ("--lora", int, "Train adapters of this rank alone, the model stays as it is."),
    ):
        command = click.option(flag, type=kind, help=said)(command)
    said = "Keep the optimizer's states in the host's memory, and update the weights there."
    return precision_option(click.option("--offload", is_flag=True, help=said)(command))


def chosen_adapters(given: Mapping[str, Any]) -> Adapters | None:
    """The adapters that are trained, or None; ``ValueError`` for what they cannot be."""
    from dtlib.theory.models import Adapters
    from dtlib.theory.valid import whole

    modules = some_of("lora_modules", given["lora_modules"], ADAPTED).get("lora_modules", ADAPTED)
    if given["lora"] is None:
        if given["lora_modules"] is not None:
            raise ValueError("lora must be given where --lora-modules is")
        return None
    return Adapters(whole("lora", given["lora"], 1), modules)


card_memory_option = click.option(
    "--card-memory", type=float, metavar="GiB", help="What programs see of a card's memory."
)


def read_json(path: Path, what: str) -> Any:
    """What a file holds, in any encoding that JSON may have; ``ValueError`` about `what` where it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be read as JSON: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Why a file cannot be read, without what names it again."""
    return str(getattr(error, "strerror", None) or error)


def _file(name: str) -> Path | None:
    """The file that `name` is the path of, or None where it names a published model; ``ValueError`` for a folder."""
    path = Path(name)
    named = path.suffix.lower() == ".json"
    try:
        there = (named or path.parent != Path()) and path.exists()
        if there and path.is_dir():
            raise ValueError(f"MODEL must be a file, such as {path / 'config.json'}, not a folder")
    except OSError:  # reading it says why
        return path
    return path if named or there else None


def chosen_model(name: str, given: Mapping[str, Any]) -> Architecture:
    """The model by its name or its file, with the sizes that flags change; ``ValueError`` where there is none."""
    from dtlib.theory import hub, models
    from dtlib.theory.valid import at_most, whole

    path = _file(name)
    if path is not None:
        config = read_json(path, f"MODEL {name}")
        try:
            found = hub.from_config(config, path.stem)
        except ValueError as error:
            raise ValueError(f"MODEL {name}: {error}") from error
    else:
        found = models.model(name)
    changes = {ours: given[size] for size, (ours, _) in _SIZES.items() if given[size] is not None}
    if "ffn_hidden" in changes and found.num_expert_layers == found.num_layers:
        raise ValueError(f"ffn must be absent, since all layers of {found.name} have experts in place of it")
    if given.get("mtp") is not None:
        changes["mtp_modules"] = given["mtp"]
    at_most("layers" if "num_layers" in changes else f"MODEL {name}: layers",
            changes.get("num_layers", found.num_layers), MOST_LAYERS)  # fmt: skip
    if not changes:
        return found
    heads = whole("heads", changes.get("num_heads", found.num_heads), 1)
    hidden = whole("hidden", changes.get("hidden", found.hidden), 1)
    if "num_heads" in changes and found.num_kv_heads == found.num_heads:
        changes.setdefault("num_kv_heads", heads)
    follows = found.head_dim * found.num_heads == found.hidden  # else heads have a width of their own, and keep it
    if {"num_heads", "hidden"} & set(changes) and follows and "head_dim" not in changes:
        if hidden % heads:
            raise ValueError(f"hidden must be a multiple of heads={heads}, not {hidden}")
        changes["head_dim"] = hidden // heads
    if "hidden" in changes and not found.gated and found.ffn_hidden == 4 * found.hidden:
        changes.setdefault("ffn_hidden", 4 * hidden)
    changed = replace(found, **changes)
    same = replace(found, mtp_modules=changed.mtp_modules)
    return changed if changed == same else replace(changed, name=f"{found.name}, changed")


def chosen_card(name: str, given: Mapping[str, Any]) -> Accelerator:
    """The card by its name, with what flags change; ``ValueError`` where there is none, or for an amount below 0."""
    from dtlib.theory import hardware
    from dtlib.theory.units import GB, TB, TFLOP, GiB

    card = hardware.accelerator(name)
    fields = {
        "card_memory": ("memory_bytes", GiB),
        "card_memory_rate": ("memory_bytes_per_s", TB),
    }
    changes: dict[str, Any] = {}
    for flag, (field, unit) in fields.items():
        if given.get(flag) is not None:
            changes[field] = in_unit(flag, given[flag]) * unit
    if given.get("card_rate") is not None:
        card = card.at_rate(in_unit("card_rate", given["card_rate"]) * TFLOP, None)
        changes["fp8_flop_per_s"] = card.fp8_flop_per_s
    if given.get("card_link") is not None:
        rate = in_unit("card_link", given["card_link"]) * GB
        changes["link"] = replace(card.link, link_bytes_per_s=rate)
    if given.get("host_link") is not None:
        link = card.host_link or hardware.Link("link to the host", 0, "given")
        changes["host_link"] = replace(link, link_bytes_per_s=in_unit("host_link", given["host_link"]) * GB)
    return replace(card, name=f"{card.name}, changed", **changes) if changes else card


def chosen_network(given: Mapping[str, Any]) -> Link:
    """The network by its name, with the rate that a flag changes; ``ValueError`` as `chosen_card`."""
    from dtlib.theory import hardware
    from dtlib.theory.units import GB

    found = hardware.link(given["network"])
    if given["network_rate"] is None:
        return found
    rate = in_unit("network_rate", given["network_rate"]) * GB
    return replace(found, name=f"{found.name}, changed", link_bytes_per_s=rate)


def some_of(flag: str, text: str | None, known: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """Of a flag that lists some of `known`, as in ``1,3``, its choices by its name; nothing where it is not given."""
    from dtlib.theory.lookup import find

    if text is None:
        return {}
    names = {str(each): each for each in known}
    found = tuple(find(flag, each, names) for each in text.split(","))
    if len(set(found)) < len(found):
        raise ValueError(f"{flag} must name each once, not {text}")
    return {flag: found}


def in_unit(flag: str, value: float) -> float:
    """An amount in the unit of its flag, within what arithmetic is safe with."""
    from dtlib.theory.valid import amount

    if amount(flag, value, positive=True) > MOST:
        raise ValueError(f"{flag} must be at most {MOST:,}, not {value:g}")
    return value


def with_flags(message: str, command: click.Command, *, card: str = "card", model: str = "MODEL") -> str:
    """What the theory says about its arguments, said about the options of `command`; `card` and `model` are what names
    these."""
    message = re.sub(r"^name (.+?) of accelerator\b", rf"--{card} \1", message)
    message = re.sub(r"^accelerator\b", card, message)
    message = re.sub(r"^name (.+?) of link\b", r"--network \1", message)
    message = re.sub(r"^name (.+?) of model\b", rf"{model} \1", message)
    choices = "framework|recipe|zero|shard|schedule|recompute|sequence_parallel|lora_modules"
    message = re.sub(rf"^name (.+?) of ({choices})\b", lambda found: f"--{_dashed(found[2])} {found[1]}", message)
    message = re.sub(r"^model must\b", f"{model} must", message)
    message = re.sub(r"^(rank|adapters) must\b", "lora must", message)
    message = re.sub(r"^sequences\b", "batch", message)
    message = re.sub(r"^price_per_card_hour\b", "price", message)
    message = re.sub(r"^mtp_modules\b", "mtp", message)
    message = re.sub(r"^num_kv_heads must divide num_heads\b", "kv_heads must divide heads", message)
    for size, (ours, _) in _SIZES.items():
        message = re.sub(rf"^{ours}\b", size, message)
    options = {name for each in command.params for name in [each.name] if name and f"--{_dashed(name)}" in each.opts}
    words = "|".join(sorted(options, key=len, reverse=True))
    before = "|".join(
        rf"(?<={each} )"
        for each in ("multiple of", "where", "with", "without", "fits", "divide", "1 to", " on", " and")
    )
    flag = re.compile(rf"(?:^|{before})({words})\b(?=[ =,]|$)(?! or more)")
    return flag.sub(lambda found: f"--{_dashed(found[1])}", message)


def _dashed(name: str) -> str:
    return name.replace("_", "-")
