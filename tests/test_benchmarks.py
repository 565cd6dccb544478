import ast
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_benchmark_has_a_main_that_the_runner_can_call(path):
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    (main,) = [function for function in functions if function.name == "main"]
    needed = len(main.args.posonlyargs + main.args.args) - len(main.args.defaults)
    assert needed == 0


def test_the_runner_names_what_there_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "alchemy"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("benchmarks", run_name="__main__")
    said = capsys.readouterr().out
    assert "no benchmark is called alchemy" in said
    for path in MODULES:
        assert path.stem in said
