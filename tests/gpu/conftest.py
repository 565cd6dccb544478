"""Tests that need a card: `pytest -m gpu`; without one they are skipped."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _one_card():
    if not torch.cuda.is_available():
        pytest.skip("there is no card that CUDA knows")
    yield
    gc.collect()
    torch.cuda.empty_cache()
