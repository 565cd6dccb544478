"""A GPT whose experts lie on several ranks against one process, and wrong ones, which are refused."""

from __future__ import annotations

import pytest

from .judge import CASES, judge, right


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_equals_one_process(n):
    for compare in judge(n, [(name, right) for name in CASES]):
        compare()
