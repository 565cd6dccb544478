"""What sphinx-proof leaves undone: all proofs of a page carry one id, and the word that opens a proof is plain text."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx_proof.nodes import proof_node

OPENING = "Proof. "


def mend(app: Sphinx, doctree: nodes.document) -> None:
    """Number the ids of proofs and of theorems' bodies, and set the opening word of a proof in italics."""
    for number, proof in enumerate(doctree.findall(proof_node), start=1):
        body = proof.next_node(nodes.admonition)
        body["ids"] = [f"proof-{number}"]
        body["classes"] = [*body["classes"], "proof-body"]
        text = body.next_node(nodes.Text)
        if text is not None and text.startswith(OPENING):
            rest = nodes.Text(text[len(OPENING) :])
            text.parent.replace(text, [nodes.emphasis("", OPENING.strip()), nodes.Text(" "), rest])
    bodies = [section for section in doctree.findall(nodes.section) if section["ids"] == ["proof-content"]]
    for number, section in enumerate(bodies, start=1):
        section["ids"] = [f"theorem-body-{number}"]


def setup(app: Sphinx) -> dict[str, bool]:
    """Mend each page as it is read."""
    app.connect("doctree-read", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
