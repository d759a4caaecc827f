"""Where a record comes from: versions, device and the commit of the code."""

import json
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import numpy as np

from evoalign_lib import __version__
from evoalign_study import paths
from evoalign_study.history import git


def environment(engine: str = "local", gpus: int = 1) -> dict[str, str]:
    """Return the versions and the device's name for a record; on another engine than the local one, the GPUs' name."""
    import torch

    on_gpus = engine != "local" and torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "transformers": metadata.version("transformers"),  # one second less than its import takes
        "numpy": np.__version__,
        "evoalign": __version__,
        "device": f"{gpus} x {torch.cuda.get_device_name()}" if on_gpus else _device(),
    }


def _device() -> str:
    told = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:(.*)", told.read_text() if told.is_file() else "", re.MULTILINE)
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name} (CPU, one thread a run)"


# what runs and notebooks write themselves: a change there says nothing about the code
_DRAWN = tuple(f":!{name}" for name in ("paper/results", "paper/generated", "figures", "README.md", "LOG.md"))


def commit() -> str:
    """Return the commit of the checkout, with "+" if its code has uncommitted changes; "unknown" outside git.

    The code of a notebook is its code cells: its text and outputs may change.
    """
    try:
        changed = git("diff", "HEAD", "--name-only", "--no-renames", "--", ".", *_DRAWN).splitlines()
        same = all(n.endswith(".ipynb") and _code(git("show", f"HEAD:{n}")) == _code_now(n) for n in changed)
        return git("rev-parse", "--short=12", "HEAD").strip() + ("" if same else "+")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _code(notebook: str) -> list[str]:
    """The sources of the code cells of a notebook's JSON."""
    cells = json.loads(notebook)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def _code_now(name: str) -> list[str] | None:
    try:
        return _code((paths.ROOT / name).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # removed, or a conflict that is not resolved
        return None
