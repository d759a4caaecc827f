"""Notebooks executed in place, and whether their outputs come from their sources."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from evoalign_study import cli, execution, paths, provenance
from evoalign_study.records import append_record, spec_hash
from typer.testing import CliRunner

REPOSITORY = paths.ROOT
PRINTS = """import sys, time
for number in range(3):
    print(number, flush=True)
    time.sleep(0.3)
"""
DRAWS = """import json, pathlib
import pandas as pd
from evoalign_study.artifacts import Store
records = [json.loads(line) for line in pathlib.Path("../paper/results/01_toy/tiny.jsonl").read_text().splitlines()]
Store("01_toy", "tiny", records, fresh=False).save_table(pd.DataFrame({"n": [len(records)]}), "runs", "Runs.")
"""


def git(repository: Path, *arguments: str) -> None:
    user = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *user, *arguments], cwd=repository, check=True, capture_output=True)


PLACES = {
    "ROOT": ".", "NOTEBOOKS": "notebooks", "FIGURES": "figures", "PAPER": "paper", "RUNS": "runs",
    "RESULTS": "paper/results", "GENERATED": "paper/generated",
}  # fmt: skip


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Take a folder for the repository."""
    for name, place in PLACES.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        patch.setattr(paths, name, folder / place)
    patch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'notebooks'}")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a record, a module, and a notebook that was never executed; all committed."""
    return committed(tmp_path, monkeypatch)


def committed(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    enter(folder, patch)
    spec = {"scale": "tiny", "seed": 0, "kind": "toy"}
    record = {"status": "finished", "spec": spec, "spec_hash": spec_hash(spec), "commit": "c0ffee", "environment": {}}
    append_record(folder / "paper/results/01_toy/tiny.jsonl", record)
    write(folder, PRINTS, DRAWS)
    (folder / "module.py").write_text("a = 1\n")
    git(folder, "init", "-q"), git(folder, "add", "."), git(folder, "commit", "-qm", "A notebook")
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[Path, tuple[int, str]]:
    """A repository whose notebook was executed once, and what `execute` said of it. Not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        folder = committed(tmp_path_factory.mktemp("executed"), patch)
        return folder, run("01_toy")


@pytest.fixture
def executed_once(first: tuple[Path, tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that repository, which is taken for the repository."""
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    enter(tmp_path, monkeypatch)
    return tmp_path


def write(repository: Path, *sources: str) -> None:
    cells = [nbformat.v4.new_markdown_cell("# Toy"), *map(nbformat.v4.new_code_cell, sources)]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
        cell.metadata["collapsed"] = False
    nbformat.write(nbformat.v4.new_notebook(cells=cells), repository / "notebooks/01_toy.ipynb")


def read(repository: Path) -> nbformat.NotebookNode:
    return nbformat.read(repository / "notebooks/01_toy.ipynb", as_version=4)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["execute", *arguments])
    return done.exit_code, done.output


def test_execute_in_place(executed_once: Path, first: tuple[Path, tuple[int, str]]) -> None:
    repository, head = executed_once, provenance.commit()
    assert len(head) == 12
    assert first[1] == (0, f"01_toy: executed at commit {head}\n")
    notebook = read(repository)
    nbformat.validate(notebook)
    prints, draws = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert [output.text for output in prints.outputs] == ["0\n1\n2\n"]  # one piece, however it came
    assert (prints.execution_count, draws.execution_count) == (1, 2)
    (table,) = draws.outputs
    assert "<caption" in table.data["text/html"] and table.metadata["evoalign"] == {"artefact": "runs"}
    assert not any(cell.metadata for cell in notebook.cells)
    assert notebook.metadata["evoalign"]["commit"] == head
    assert (repository / "paper/generated/runs.csv").read_text() == "n\n1\n"
    text = (repository / "notebooks/01_toy.ipynb").read_text()
    assert run("01_toy")[0] == 0
    assert (repository / "notebooks/01_toy.ipynb").read_text() == text  # outputs that changed are no change of code


def test_a_table_that_a_notebook_no_longer_draws_goes(executed_once: Path) -> None:
    repository = executed_once
    write(repository, DRAWS.replace('"runs"', '"other"'))
    status, said = run("01_toy")
    assert status == 0 and "The code has changes that are not committed. Commit them, and execute once more." in said
    assert read(repository).metadata["evoalign"]["commit"].endswith("+")
    assert sorted(p.name for p in (repository / "paper/generated").glob("*.csv")) == ["other.csv"]
    assert list(json.loads((repository / "paper/generated/manifest.json").read_text())["artefacts"]) == ["other"]


def test_a_notebook_that_fails_changes_nothing(executed_once: Path) -> None:
    repository = executed_once
    write(repository, DRAWS, "raise KeyError('seed')")
    before = {path: path.read_bytes() for path in repository.rglob("*.*") if path.is_file()}
    assert run("01_toy") == (1, "notebooks/01_toy.ipynb failed: KeyError: 'seed'\n")
    assert {path: path.read_bytes() for path in before} == before
    status, said = run("02_toy")
    assert status == 2 and "no notebook '02_toy'. Did you mean '01_toy'?" in " ".join(said.split())


def test_what_is_stale_is_named(executed_once: Path) -> None:
    repository = executed_once
    notebook = read(repository)
    assert execution.stale(notebook) == []
    notebook.cells[0].source = "# Another title"
    assert execution.stale(notebook) == []  # prose is no code
    notebook.cells[2].source += "# a comment"
    assert execution.stale(notebook) == ["code cell 2 was edited since"]
    del notebook.cells[2]
    assert execution.stale(notebook) == ["1 code cells, 2 when it was executed"]
    del notebook.metadata["evoalign"]
    with pytest.raises(KeyError):
        execution.stale(notebook)


def test_the_commit_has_a_mark_where_code_was_changed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = provenance.commit()
    for drawn in ("README.md", "figures/a.csv", "paper/generated/a.csv"):
        (repository / drawn).write_text("")
    git(repository, "add", ".")
    notebook = read(repository)
    notebook.cells[0].source = "# Another title"
    nbformat.write(notebook, repository / "notebooks/01_toy.ipynb")
    assert provenance.commit() == head
    notebook.cells[1].source += "1"
    nbformat.write(notebook, repository / "notebooks/01_toy.ipynb")
    assert provenance.commit() == head + "+"
    (repository / "notebooks/01_toy.ipynb").write_text("<<<<<<<")
    assert provenance.commit() == head + "+"
    (repository / "notebooks/01_toy.ipynb").unlink()
    assert provenance.commit() == head + "+"
    git(repository, "reset", "-q", "--hard")
    assert provenance.commit() == head
    (repository / "module.py").write_text("a = 2\n")
    assert provenance.commit() == head + "+"
    monkeypatch.setenv("PATH", os.devnull)
    assert provenance.commit() == "unknown"
