"""Makes every formula of the course 3 % too large, in each Python process that finds this folder on its path.

Python itself loads a module of this name. It waits for the registry, whose decorator then registers and returns
functions that are off. Of formulas that call each other only the outermost is: the page asked for that one.
"""

import dataclasses
import functools
import sys
import threading
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

OFF = 1.03
_inside = threading.local()


def off(value):
    """`value`, or all numbers in it, 3 % larger; whole numbers stay whole, and change by one at least."""
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int):
        return max(round(value * OFF), value + 1) if value else value
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value) if each.init]
        return dataclasses.replace(value, **{name: off(getattr(value, name)) for name in names})
    if isinstance(value, dict):
        return {key: off(each) for key, each in value.items()}
    if isinstance(value, list):
        return [off(each) for each in value]
    if isinstance(value, tuple):
        return tuple(off(each) for each in value)
    return value * OFF  # a float, an array


def register_off(register):
    """The decorator `theory.formula`, registering functions that are off."""

    def formula(name, **fields):
        def decorate(function):
            @functools.wraps(function)
            def wrong(*args, **kwargs):
                if getattr(_inside, "formula", None):
                    return function(*args, **kwargs)
                _inside.formula = name
                try:
                    return off(function(*args, **kwargs))
                finally:
                    _inside.formula = None

            return register(name, **fields)(wrong)

        return decorate

    return formula


class Finder(MetaPathFinder):
    """Finds the registry's module alone, and exchanges its decorator when it has run."""

    def find_spec(self, name, path, target=None):
        """The module as Python finds it, with one step more."""
        if name != "dtlib.theory.formula":
            return None
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def run_and_exchange(module):
            run(module)
            module.formula = register_off(module.formula)

        spec.loader.exec_module = run_and_exchange
        return spec


sys.meta_path.insert(0, Finder())
