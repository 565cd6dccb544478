"""Notebooks of the book are executed side by side, as many as there are cores.

myst-nb executes a notebook when Sphinx reads it, and Sphinx reads one after another. So those that will be read are run
before, and what they gave lies in a cache of this build, which ``execute_notebooks: cache`` tells myst-nb to look into.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from myst_nb.core.read import create_nb_reader
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from sphinx.application import Sphinx

MOST_AT_ONCE = 4  # each starts some four ranks of its own


def execute(app: Sphinx, env: Any, docnames: list[str]) -> None:
    """Run the notebooks among the pages that will be read, and keep what they gave."""
    config = env.mystnb_config
    if config.execution_mode != "cache":
        return
    cache = get_cache(config.execution_cache_path)
    cache.clear_cache()
    gate = asyncio.Semaphore(min(os.cpu_count() or 1, MOST_AT_ONCE))

    async def run(docname: str) -> None:
        file = Path(env.doc2path(docname))
        text = file.read_text("utf-8")
        reader = create_nb_reader(str(file), env.myst_config, config, text)
        if reader is None:
            return
        notebook, folder = reader.read(text), {"metadata": {"path": str(file.parent)}}
        async with gate:
            start = time.monotonic()
            # What fails is not kept: myst-nb runs it once more, and reports it as ever.
            with suppress(CellExecutionError, CellTimeoutError, DeadKernelError):
                # Times would stand in the cells' metadata, by which the cache knows a notebook again.
                options = {"timeout": config.execution_timeout, "record_timing": False, "resources": folder}
                await NotebookClient(notebook, **options).async_execute(env=os.environ | {"DTLIB_WHERE": docname})
                kept = CacheBundleIn(notebook, str(file), data={"execution_seconds": time.monotonic() - start})
                cache.cache_notebook_bundle(kept, check_validity=False, overwrite=True)

    async def run_all() -> None:
        await asyncio.gather(*map(run, docnames))

    asyncio.run(run_all())


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the step above; the environment of the kernels is `book_ledger`'s."""
    app.connect("env-before-read-docs", execute)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
