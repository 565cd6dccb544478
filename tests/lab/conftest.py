"""A ledger of a test's own, with formulas that are nobody else's."""

import importlib

import pytest

from dtlib import theory

registry = importlib.import_module("dtlib.theory.formula")  # the module: the package's name is the decorator


@pytest.fixture
def own_ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("DTLIB_LEDGER", str(tmp_path / "deep" / "ledger.jsonl"))
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))

    @theory.formula("testing.sent_bytes", source="derived here", chapter="testing", equation="2D")
    def sent_bytes(full_bytes):
        """Bytes that `somebody` sends.

        More words.
        """
        return 2 * full_bytes

    @theory.formula("testing.step_seconds", source="derived here", chapter="testing")
    def step_seconds():
        """Time of a step."""

    @theory.formula("testing.num_steps", source="derived here", chapter="testing")
    def num_steps():
        """Messages one after another."""
