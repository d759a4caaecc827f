"""Set-up shared by all tests: one thread, AVX2, no network, the folder of public data."""

import os

# Set before torch, transformers and numba are imported, which read these only once; torch then takes one thread.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["MPLBACKEND"] = "agg"

import faulthandler
import gc
import sys
from pathlib import Path

# The settings that `sweep` gives its runs, with which tests compare their own.
if Path("/proc/cpuinfo").is_file() and " avx2 " in Path("/proc/cpuinfo").read_text():
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    os.environ |= {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"}

import hypothesis
import pytest

# jsonschema, which nbformat imports, would spend seconds in every process on building a grammar for addresses.
sys.modules["rfc3987_syntax"] = None
# The same examples in every run; no deadline, since the first call of a numba function compiles it.
hypothesis.settings.register_profile("evoalign", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("evoalign")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Respect a test's own time limit: otherwise the fault handler could end its process earlier."""
    own = item.get_closest_marker("timeout")
    if own and own.args:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module", autouse=True)
def what_is_loaded_is_no_garbage() -> None:
    """Exclude what was imported or cached so far from later garbage collections, of which trainers trigger many."""
    gc.freeze()


@pytest.fixture(scope="session")
def external_data() -> Path:
    """The folder of public data files named by EVOALIGN_DATA; skips the test if that is not set."""
    folder = os.environ.get("EVOALIGN_DATA")
    if not folder:
        pytest.skip("EVOALIGN_DATA is not set: set it to the folder with the public data files (countdown.json, ...)")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"EVOALIGN_DATA={folder} is not a folder: correct it or unset it.")
    return path
