"""Execute notebooks in place, or into a folder to check what they draw; detect outputs that do not match sources.

`execute` stores the commit and the digests of the code cells (`digests`) in a notebook's metadata; a test compares the
digests with the current cells. If a change to a module changes texts or numbers, `verify` finds out by drawing them
again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from evoalign_lib.files import canonical_json, replace_text
from evoalign_study import paths, provenance

if TYPE_CHECKING:
    from nbclient import NotebookClient
    from nbformat import NotebookNode


def execute_all(folders: dict[str, Path]) -> Iterator[str | None]:
    """Execute committed notebooks in parallel, without making the runs that have no record.

    Args:
        folders: notebook -> folder for its artefacts.

    Yields:
        For each notebook, in order, what failed, such as a missing record, or None.
    """
    from evoalign_lib.engines.processes import default_workers

    started: list[NotebookClient] = []
    with ThreadPoolExecutor(default_workers()) as pool:
        try:
            yield from pool.map(partial(_dry, started=started), folders, folders.values())
        except BaseException:  # Ctrl-C does not reach kernels: end them, or the pool would wait for their notebooks
            pool.shutdown(wait=False, cancel_futures=True)
            for client in started:
                if client.km is not None and client.km.has_kernel:
                    with suppress(ProcessLookupError):
                        os.kill(client.km.provisioner.pid, signal.SIGTERM)
            raise


def execute(notebook: str, folder: Path) -> None:
    """Execute a notebook in place, and put its artefacts into a folder; runs without a record are made.

    The notebook is rewritten only if all cells ran: without execution times, with the pieces of a cell's stream joined,
    and with the commit and the digests of its cells.

    Raises:
        FileNotFoundError: there is no such notebook.
        ValueError: a cell failed.
    """
    import nbformat

    path = paths.NOTEBOOKS / f"{notebook}.ipynb"
    content = nbformat.read(path, as_version=4)
    if failure := _run(notebook, content, folder, [], timeout=None):
        raise ValueError(failure)
    for cell in content.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name in ("tags", "jupyter")}
    content.metadata["evoalign"] = {"commit": provenance.commit(), "cells": digests(content)}
    replace_text(path, nbformat.writes(content) + "\n")


def outputs_digest(path: Path) -> str | None:
    """Return the SHA-256 of everything that a notebook's code cells display; None if they display nothing."""
    import nbformat

    content = nbformat.read(path, as_version=4)
    shown = [cell.outputs for cell in content.cells if cell.cell_type == "code"]
    return hashlib.sha256(canonical_json(shown).encode()).hexdigest() if any(shown) else None


def digests(content: NotebookNode) -> list[str]:
    """Return the digest of each code cell of a notebook."""
    return [hashlib.sha256(c.source.encode()).hexdigest()[:16] for c in content.cells if c.cell_type == "code"]


def _dry(notebook: str, folder: Path, started: list[NotebookClient]) -> str | None:
    """Execute a notebook as a dry run; return what failed. The client, which owns the kernel, is added to `started`."""
    import nbformat

    path = paths.NOTEBOOKS / f"{notebook}.ipynb"
    if not path.exists():
        return f"notebooks/{notebook}.ipynb is missing, though it has committed records"
    content = nbformat.read(path, as_version=4)
    # after the parameters cell, as papermill does: runs without a record are named, not trained for hours
    after = next((i + 1 for i, cell in enumerate(content.cells) if "parameters" in cell.metadata.get("tags", ())), 0)
    content.cells.insert(after, nbformat.v4.new_code_cell("dry_run = True"))
    return _run(notebook, content, folder, started, timeout=600)


def _run(
    notebook: str, content: NotebookNode, folder: Path, started: list[NotebookClient], timeout: int | None
) -> str | None:
    """Execute the cells with artefacts redirected into a folder; return what failed. timeout: seconds per cell."""
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    class ThisInterpreter(AsyncKernelManager):
        # an installed kernel called python3 may belong to another environment
        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(**get_kernel_dict())

    how = {"kernel_manager_class": ThisInterpreter, "timeout": timeout, "record_timing": False}
    how["coalesce_streams"] = True  # where a stream is split depends only on timing
    client = NotebookClient(content, resources={"metadata": {"path": str(paths.NOTEBOOKS)}}, **how)
    started.append(client)
    try:
        # closes the event loop of this thread
        asyncio.run(client.async_execute(env={**os.environ, "EVOALIGN_ARTIFACTS": str(folder)}))
    except CellExecutionError as error:
        return f"notebooks/{notebook}.ipynb failed: {error.ename}: {error.evalue}"
    except (CellTimeoutError, DeadKernelError) as error:
        return f"notebooks/{notebook}.ipynb did not finish: {error}"
    return None
