"""Where only the wheel is installed, without torch, the theory is tested by what needs no torch."""

import re
from importlib.util import find_spec
from pathlib import Path

NEEDS_TORCH = re.compile(r"^(?:import torch|from (?:torch|dtlib\.ranks|dtlib import lab)\b)", re.MULTILINE)
collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if not find_spec("torch") and NEEDS_TORCH.search(path.read_text("utf-8"))
]
