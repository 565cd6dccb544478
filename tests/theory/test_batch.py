"""Batch size as algebra: published numbers."""

from __future__ import annotations

import pytest

from dtlib.theory import batch


def test_the_ramp_of_olmo_saves_the_steps_that_its_authors_print():
    """Billions of tokens at batches of 1024, 2048 and 4096 sequences; the last 50 are mid-training."""
    assert batch.steps_saved([(168, 1024), (335, 2048), (155, 4096)]) == pytest.approx(0.431, abs=5e-4)
    assert batch.steps_saved([(168, 1024), (335, 2048), (105, 4096)]) == pytest.approx(0.405, abs=5e-4)
