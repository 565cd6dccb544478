"""Make a function ready to travel: by value, unless it lives in an installed package."""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import site
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

_lock = threading.Lock()  # what travels by value is a setting of the whole process
_DTLIB = str(Path(__file__).absolute().parents[2])


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle ``(fn, args)`` so that a process that has imported none of the reader's own modules can call it.

    Functions and classes of the reader's modules (a notebook, a script, a test file) travel by value; those of
    installed packages by name. ``ValueError`` when something in them cannot travel at all.
    """
    try:
        return _dump_by_value((fn, args))
    except Exception as by_value:
        try:
            return bytes(cloudpickle.dumps((fn, args)))
        except Exception:
            what = "args" if not _travels(args) else "fn"
            raise ValueError(
                f"{what} cannot be sent to the ranks: {type(by_value).__name__}: {by_value}. Create what cannot travel "
                "(open files, locks, sockets, generators) inside the function."
            ) from by_value


def _dump_by_value(call: object) -> bytes:
    modules = [module for module in list(sys.modules.values()) if _is_the_readers(module)]
    registered = []
    buffer = io.BytesIO()
    with _lock:
        try:
            for module in modules:
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
            _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(call)
        finally:
            for module in registered:
                cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, and what it leaves out: functions that `functools` caches go without their results."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)  # torch.ops, which any name "ops" beside torch pulls in
        if isinstance(obj, functools._lru_cache_wrapper):
            module = sys.modules.get(obj.__module__)
            if module is None or obj.__module__ == "__main__" or _is_the_readers(module):
                return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, functools.cached_property):  # it holds a lock, up to Python 3.11
            return _cached_property, (obj.func, obj.attrname)
        return super().reducer_override(obj)


def _cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    return functools.lru_cache(**parameters)(fn)


def _cached_property(fn: Callable[..., Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(fn)
    made.attrname = name
    return made


def _travels(value: object) -> bool:
    try:
        _dump_by_value(value)
    except Exception:
        return False
    return True


def _is_the_readers(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    name = getattr(module, "__name__", "__main__")
    if not isinstance(file, str) or name == "__main__" or sys.modules.get(name) is not module:
        return False
    return _is_own_file(file)


@functools.cache
def _is_own_file(file: str) -> bool:
    return not os.path.abspath(file).startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths.update(site.getsitepackages())
    paths.add(site.getusersitepackages())
    return (*(os.path.join(os.path.abspath(path), "") for path in paths if path), os.path.join(_DTLIB, ""))
