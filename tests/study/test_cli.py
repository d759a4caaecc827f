"""The command `evoalign`: spellings, errors without traceback, nothing overwritten."""

import shutil
import subprocess
import sys

import pytest
from evoalign_study import artifacts, paths
from evoalign_study.cli import app as study
from helpers import typed
from typer import Typer

from evoalign_lib import __version__, comparison, tiny
from evoalign_lib.cli import app as library


def call(*arguments: object, app: Typer | None = None) -> tuple[int, str]:
    """Exit code, and what is printed, in one line."""
    app = app or (study if arguments[0] in ("verify", "execute", "seal", "claims") else library)
    code, output = typed(app, *arguments)
    return code, " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize(("package", "named"), [("evoalign_lib", "evoalign "), ("evoalign_study", "evoalign_study ")])
def test_each_package_is_a_command(package, named):
    done = subprocess.run([sys.executable, "-m", package, "nothing"], capture_output=True, text=True, cwd=paths.ROOT)
    assert done.returncode == 2 and named in done.stderr
    if package == "evoalign_lib":
        assert call("--version", app=library) == (0, f"evoalign {__version__}")


# ---- names in any spelling


@pytest.mark.parametrize("given", ["01_es_countdown", "01", "1", "ES_Countdown", "notebooks/01_es_countdown.IPYNB"])
def test_notebooks_are_found_in_any_spelling(given, monkeypatch):
    executed, verified = [], []
    monkeypatch.setattr(artifacts, "redraw", executed.append)
    monkeypatch.setattr(artifacts, "verify", lambda names, write, drawn: verified.extend(names) or [])
    assert call("execute", given)[0] == call("verify", "--notebook", given)[0] == 0
    assert executed == verified == ["01_es_countdown"]


@pytest.mark.parametrize("given", ["99", "", "01_es_cuntdown"])
def test_unknown_notebooks(given):
    for arguments in (["execute", given], ["verify", "--notebook", given]):
        code, said = call(*arguments)
        assert code == 2 and f"no notebook {given!r}." in said and "There are: 01_es_countdown, 02_" in said
    assert "Did you mean '01_es_countdown'" in call("execute", "01_es_cuntdown")[1]


# ---- what users do wrong


def test_a_package_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "nbformat", None)
    code, said = call("execute", "01")
    assert code == 1 and "nbformat" in said and "pip install 'evoalign[analysis" in said
    monkeypatch.setitem(sys.modules, "seaborn", None)
    monkeypatch.setattr(comparison, "compare", lambda *arguments: pytest.fail("it would end without a figure"))
    code, said = call("compare", "A0", "A1", "A2", "--out", tmp_path)
    assert code == 1 and "seaborn" in said and "evoalign[analysis" in said


@pytest.mark.parametrize("options", [("--steps", -1), ("--seed", -1), ("--family", "Z")])
def test_a_base_that_cannot_be_trained(options, tmp_path):
    code, said = call("tiny", "--out", tmp_path / "base", *options)
    assert code == 1 and str(options[1]) in said and not (tmp_path / "base").exists()


def test_nothing_is_overwritten(tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "compare.png").write_text("mine")
    ledger = next((paths.RESULTS / "01_es_countdown/ledgers").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "compare", lambda *arguments: pytest.fail("nothing may run"))
        for arguments in (("tiny", kept), ("replay", ledger, kept), ("tiny", kept / "compare.png")):
            code, said = call(*arguments[:-1], "--out", arguments[-1])
            assert code == 1 and f"{str(arguments[-1])!r} exists" in said
        code, said = call("compare", "A0", "A1", "A2", "--out", kept)
        assert code == 2 and "compare.png exists" in said and (kept / "compare.png").read_text() == "mine"
    assert call("compare", "A0", "A1", "A2", "--out", kept, "--overwrite")[0] == 0
    assert {path.name for path in kept.iterdir()} == set(comparison.WRITTEN)
    assert (kept / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_damaged_files_are_no_tracebacks(tmp_path):
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(next((paths.RESULTS / "01_es_countdown/ledgers").iterdir()).read_bytes()[:5000])
    model = shutil.copytree(tiny.bases_folder() / "A0", tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"broken")
    commands = [["replay", path, "--verify"] for path in (packed, tmp_path)]
    for arguments in [*commands, *(["compare", "A0", end, "A1", "--out", tmp_path / "x"] for end in (model, tmp_path))]:
        code, said = call(*arguments)
        assert code == 1 and said, arguments
