"""Every formula of the book on one page, made from the registry and from the page on notation.

The directive ``{cheatsheet}`` becomes a first page of the formulas that decide something, each with what it decides,
and then for each chapter a table of its other formulas (what each one is, its equation, its function and where it is
derived) and a line with the letters of both, as ``chapters/notation.md`` explains them. A title leads to the
measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import book_ledger
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dtlib import theory

CHAPTERS = {
    "memory": "memory", "collectives": "collectives", "dp": "data parallelism", "zero": "ZeRO",
    "activations": "activations", "tp": "tensor parallelism", "sp": "sequence parallelism",
    "cp": "context parallelism", "pp": "pipeline parallelism", "threed": "three dimensions", "planner": "the planner",
}  # fmt: skip
"""What the page on notation calls the chapters, by stem, in the order of the book."""
DERIVED = {
    "eq-memory-gpt": "models.gpt_num_params",
    "eq-memory-llama": "models.llama_num_params",
    "eq-memory-states": "memory.model_state_bytes memory.largest_num_params",
    "eq-memory-flops": "memory.forward_flops_per_token memory.training_flops_per_token memory.paper_flops_per_step",
    "eq-memory-mfu": "memory.mfu memory.hfu",
    "eq-memory-roofline": "memory.matmul_intensity memory.roofline_flop_per_s",
    "thm-memory-rounding": "memory.rounding_error",
    "prop-memory-lost": "memory.lost_update",
    "thm-col-bound": "collectives.all_reduce_lower_bound_bytes",
    "cor-col-half": "collectives.half_lower_bound_bytes",
    "prop-col-steps": "collectives.lower_bound_steps",
    "thm-col-ring": "collectives.ring_all_reduce_bytes collectives.ring_all_reduce_seconds "
    "collectives.ring_all_reduce_steps collectives.ring_all_gather_bytes collectives.ring_all_gather_seconds "
    "collectives.ring_all_gather_steps collectives.ring_reduce_scatter_bytes "
    "collectives.ring_reduce_scatter_seconds collectives.ring_reduce_scatter_steps",
    "eq-col-crossover": "collectives.ring_tree_crossover_bytes",
    "eq-col-busbw": "collectives.algbw_bytes_per_s collectives.busbw_bytes_per_s",
    "thm-dp-equality": "dp.averaged_gradient",
    "eq-dp-tokens": "dp.token_weighted_gradient",
    "eq-dp-batch": "dp.effective_batch",
    "eq-dp-blocking": "dp.blocking_step_seconds",
    "thm-dp-exposed": "dp.exposed_seconds dp.overlapped_step_seconds dp.hidden_share dp.ready_seconds",
    "eq-dp-even": "dp.even_exposed_seconds",
    "prop-dp-buckets": "dp.optimal_num_buckets",
    "eq-dp-tokens-even": "dp.break_even_tokens",
    "eq-dp-best": "dp.best_world_size dp.strong_step_seconds dp.efficiency",
    "eq-zero-bytes": "zero.bytes_per_param zero.limit_bytes_per_param zero.states_of_rank zero.shard_elements",
    "thm-zero-traffic": "zero.sent_bytes zero.traffic",
    "eq-zero-gathered": "zero.gathered_bytes",
    "eq-zero-peak": "zero.peak_bytes",
    "eq-zero-wrap": "zero.exchange_messages zero.exchange_seconds",
    "eq-zero-hybrid": "zero.hybrid_traffic",
    "eq-zero-plus-plus": "zero.zero_plus_plus_volume zero.quantised_error zero.quantised_gather_bytes",
    "thm-activations-layer": "activations.layer_bytes activations.layer_activations",
    "prop-activations-flops": "activations.recompute_factor",
    "thm-activations-peak": "activations.checkpointed_bytes activations.optimal_every",
    "eq-activations-pipeline": "activations.first_stage_layers",
    "eq-tp-layer": "tp.layer_elements",
    "eq-tp-loss": "tp.outside_elements",
    "eq-tp-chunks": "tp.chunked_seconds tp.exposed_seconds",
    "thm-tp-break-even": "tp.break_even_ranks tp.efficiency",
    "thm-sp-conjugate": "sp.sent_elements sp.kept_bytes",
    "eq-sp-saved": "sp.saved_seconds",
    "eq-cp-ring": "cp.ring_elements",
    "thm-cp-zigzag": "cp.scores",
    "eq-cp-step": "cp.ring_step_seconds",
    "eq-cp-ulysses": "cp.ulysses_elements",
    "thm-cp-hiding": "cp.hiding_tokens",
    "eq-pp-enough": "pp.micro_batches_for",
    "eq-pp-interleaved": "pp.bubble_fraction pp.bubble_overhead",
    "thm-pp-memory": "pp.most_in_flight",
    "eq-pp-zero": "pp.idle_seconds",
    "eq-pp-sent": "pp.boundary_elements",
    "eq-pp-hide": "pp.hiding_width",
    "thm-threed-crossing": "threed.tp_over_dp_tokens threed.pp_over_dp_tokens",
    "thm-planner-least": "planner.least_cards",
    "thm-planner-share": "planner.product_share planner.cuts_for",
    "eq-planner-step": "planner.step_time",
    "eq-planner-memory": "planner.plan_memory",
}
"""What is derived in or at each theorem and equation, by label."""
SECTIONS = {
    "cp.kept_bytes": "bytes-kept",
    "pp.weight_versions": "without-a-flush-pipedream",
    "sp.core_seconds": "held-to-the-paper",
    "threed.activation_bytes": "the-measurement",
}
"""Sections with formulas in their text; what is named nowhere stands in its chapter's derivation."""
LABELS = {name: label for label, names in DERIVED.items() for name in names.split()}
TABLE = [":::::{list-table}", ":class: cheatsheet", ":widths: 40 60", ""]
Letters = list[tuple[str, str]]
_ROW = re.compile(r"^\* - (.+?)(?=^\* - |^```|\Z)", re.MULTILINE | re.DOTALL)


class CheatSheet(SphinxDirective):
    """``{cheatsheet}``: the formulas of all chapters, a section each."""

    def run(self) -> list[nodes.Node]:
        """Write the tables as MyST."""
        notation = Path(self.env.doc2path("chapters/notation"))
        self.env.note_dependency(str(notation))
        book_ledger.note(self.env)
        common, own = letters(notation.read_text("utf-8"))
        known = [each for stem in CHAPTERS for each in theory.formulas(stem).values()]
        lines = ["## What decides", "", *TABLE]
        for each in filter(lambda each: each.use, known):
            lines += [*row(each), "", f"    {each.use}"]
        lines += [":::::", ""]
        for stem, title in CHAPTERS.items():
            here = [each for each in known if each.chapter == stem]
            lines += [f"## [{title[0].upper()}{title[1:]}]({stem}.ipynb)", "", *TABLE]
            lines += [line for each in here if not each.use for line in row(each)]
            lines += [":::::", "", f"*Letters*: {legend(here, title, common, own)}", ""]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, "cheatsheet"), self.content_offset, container, match_titles=True)
        return container.children


def row(each: theory.Formula) -> list[str]:
    """A formula as a row of MyST's list-table: title, function and derivation beside the equation."""
    named = [f"* - {{ledger-title}}`{each.name}`", "", f"    `{each.name}` · {derivation(each.name, each.chapter)}"]
    return [*named, f"  - $${each.equation}$$"]


def legend(known: Iterable[theory.Formula], title: str, common: Letters, own: dict[str, Letters]) -> str:
    """The letters of some formulas of one chapter with their meanings, its own first."""
    used = letters_of(" ".join(each.equation for each in known))
    here = [(letter, meaning) for letter, meaning in own.get(title, ()) if letters_of(letter) & used]
    taken = {each for letter, _ in own.get(title, ()) for each in letters_of(letter)}
    here += [(letter, meaning) for letter, meaning in common if letters_of(letter) & used - taken]
    return "; ".join(f"{letter} {meaning}" for letter, meaning in here) + "."


def derivation(name: str, stem: str) -> str:
    """A link to where the formula is derived, as MyST: a theorem, an equation, or the section of its chapter."""
    label = LABELS.get(name)
    if label is None:
        return f"[]({stem}.ipynb#{SECTIONS.get(name, 'the-derivation')})"
    return f"eq. {{eq}}`{label}`" if label.startswith("eq-") else f"{{prf:ref}}`{label}`"


def letters(page: str) -> tuple[list[tuple[str, str]], dict[str, list[tuple[str, str]]]]:
    """The letters of the whole book, and those of single chapters by the chapter's name, each with its meaning."""
    general, chapters = page.split("## Letters of one chapter")
    common = [(cells[0], cells[1]) for cells in rows(general) if cells[0].startswith("$")]
    own: dict[str, list[tuple[str, str]]] = {}
    for chapter, letter, meaning in (cells for cells in rows(chapters.split("\n## ")[0]) if len(cells) == 3):
        own.setdefault(chapter, []).append((letter, meaning))
    return common, own


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the list-tables in a text, without line breaks."""
    for row in _ROW.findall(text):
        yield [" ".join(cell.split()) for cell in re.split(r"^  - ", row, flags=re.MULTILINE)]


def letters_of(formula: str) -> set[str]:
    """The letters in LaTeX, commands for Greek ones among them; words and names of functions are none."""
    bare = re.sub(r"\\(?:text|mathrm|operatorname)\{[^}]*\}|\\(?:begin|end)\{[^}]*\}", " ", formula)
    greek = re.findall(r"\\(?:alpha|beta|Psi|Phi|rho|delta|varphi|nu|Omega)(?![a-z])", bare)
    return {*greek, *re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", bare))}


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the directive known."""
    app.add_directive("cheatsheet", CheatSheet)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
