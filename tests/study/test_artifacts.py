"""Artefacts: their exact text, where they go, what the manifest says, and what `verify` finds."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
from evoalign_study import artifacts, cli, execution, paths, style
from evoalign_study.artifacts import Store
from evoalign_study.claims import evaluate_together, load_claims, rule_hash
from evoalign_study.records import append_record, spec_hash
from evoalign_study.rendering import tex_escape
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image
from test_style import colourful
from typer.testing import CliRunner

from evoalign_lib.engines import processes
from tests.benchmarks.shared import merge

REPOSITORY = paths.ROOT
ENVIRONMENT = {"python": "3.12.1", "torch": "2.13.0", "numpy": "2.3.5", "evoalign": "0.1.0", "device": "cpu"}
RECORDS = [
    {"spec": {"seed": seed}, "spec_hash": f"{9 - seed}f", "commit": "c0ffee", "environment": ENVIRONMENT}
    for seed in range(2)
]
TABLE = pd.DataFrame({"arm": ["ES", "base_A0 & co"], "gain": [-1.25, 0.5], "n": [8, 1], "range": ["-3.0 to 1.0", ""]})


COPIED = {"paper/claims.yaml", "paper/claims.lock", "LOG.md"}
NO_GIT = "no history of git here: records and paper/claims.lock were not compared with it"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of claims and nothing else, its paths in the place of the real ones."""
    return _repository(tmp_path, monkeypatch)


def _repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folders = {
        "ROOT": ".",
        "NOTEBOOKS": "notebooks",
        "FIGURES": "figures",
        "PAPER": "paper",
        "RESULTS": "paper/results",
        "GENERATED": "paper/generated",
        "RUNS": "runs",
    }
    for name, folder in folders.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(paths, name, tmp_path / folder)
    for name in COPIED:
        shutil.copy(REPOSITORY / name, tmp_path / name)
    monkeypatch.delenv("EVOALIGN_ARTIFACTS", raising=False)
    monkeypatch.delenv("EVOALIGN_RUN_DIR", raising=False)
    return tmp_path


def _figure() -> Figure:
    figure = Figure(figsize=(2, 1))
    figure.add_subplot().plot([0, 1], [0, 1], label="a")
    return figure


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("[!.]*") if path.is_file()}


def _manifest(repository: Path) -> dict:
    return json.loads((repository / "paper" / "generated" / "manifest.json").read_text())


def test_table_text(repository: Path) -> None:
    Store("01_toy", "tiny", RECORDS, fresh=False).save_table(TABLE, "gain", "Gain, 95 % range.", {"gain": "+.1f"})
    assert (repository / "paper/generated/gain.tex").read_text().splitlines() == [
        r"\centering",
        r"\caption{Gain, 95 \% range. (notebook 01, scale tiny)}",
        r"\label{tab:gain}",
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"arm & gain & n & range \\",
        r"\midrule",
        r"ES & $-$1.2 & 8 & $-$3.0 to 1.0 \\",
        r"base\_A0 \& co & +0.5 & 1 &  \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    csv = (repository / "paper/generated/gain.csv").read_bytes()
    assert csv == b"arm,gain,n,range\nES,-1.25,8,-3.0 to 1.0\nbase_A0 & co,0.5,1,\n"


def test_floats_need_a_format_and_formats_a_column(repository: Path) -> None:
    store = Store("01_toy", "tiny", RECORDS, fresh=False)
    with pytest.raises(ValueError, match="'gain' holds floats"):
        store.save_table(TABLE, "gain", "Gain.")
    with pytest.raises(ValueError, match="'gian', which is no column"):
        store.save_table(TABLE, "gain", "Gain.", {"gian": ".1f"})
    assert _files(repository) == COPIED


@pytest.mark.parametrize(
    ("text", "tex"),
    [
        (
            r"100% of $x_1 \ {a}~#^|",
            r"100\% of \$x\_1 \textbackslash{} \{a\}\textasciitilde{}\#\textasciicircum{}\textbar{}",
        ),
        ("[-3.0, -1] -.5", "[$-$3.0, $-$1] -.5"),
        ("Qwen2.5-7B, 1e-3, 2-3, x -y", "Qwen2.5-7B, 1e-3, 2-3, x -y"),
        ("σ ≤ 1 ± 2 × 3 < 4", r"$\sigma$ $\le$ 1 $\pm$ 2 $\times$ 3 $<$ 4"),
    ],
)
def test_tex_escape(text: str, tex: str) -> None:
    assert tex_escape(text) == tex


def test_plotted_data_has_four_significant_digits(repository: Path) -> None:
    data = pd.DataFrame({"x": [0, 800_000], "y": [-0.0, 0.123456], "z": [1234567.0, None], "arm": ["es", "base"]})
    Store("01_toy", "tiny", RECORDS, fresh=False).save_figure(_figure(), "curves", data, "Curves.")
    text = (repository / "figures/curves.csv").read_text()
    assert text == "x,y,z,arm\n0,0,1.235e+06,es\n800000,0.1235,,base\n"
    assert (repository / "paper/generated/curves.tex").read_text().splitlines() == [
        r"\centering\includegraphics{curves.pdf}",
        r"\caption{Curves. (notebook 01, scale tiny)}",
        r"\label{fig:curves}",
    ]


def test_numbers(repository: Path) -> None:
    store = Store("01_toy", "tiny", RECORDS, fresh=False)
    store.save_number("Loss", -0.0512, ".3f")
    store.save_number("Gain", 1.0, ".1f")
    store.save_number("Gain", 0.0512, ".1%")
    generated = repository / "paper" / "generated"
    expected = "\\newcommand{\\Gain}{5.1\\%}\n\\newcommand{\\Loss}{$-$0.051}\n"
    assert (generated / "numbers_01_toy.tex").read_text() == expected
    assert json.loads((generated / "numbers_01_toy.json").read_text()) == {"Gain": "5.1%", "Loss": "-0.051"}
    written = {path.name: path.read_bytes() for path in generated.iterdir()}
    with pytest.raises(ValueError, match="'gain_2'.*letters only"):
        store.save_numbers({"Other": (1.0, ".1f"), "gain_2": (1.0, ".1f")})
    with pytest.raises(ValueError, match="Unknown format code 'd'"):
        store.save_numbers({"Other": (1.0, ".1f"), "Third": (1.0, "d")})
    assert {path.name: path.read_bytes() for path in generated.iterdir()} == written


def test_numbers_of_full_scale_have_names_of_their_own(repository: Path) -> None:
    Store("01_toy", "full", RECORDS, fresh=False).save_numbers({"Gain": (0.0512, ".1%"), "Arm": ("ES", "")})
    texts = json.loads((repository / "paper/generated/numbers_01_toy_full.json").read_text())
    assert texts == {"GainFull": "5.1%", "ArmFull": "ES"} and set(_manifest(repository)["artefacts"]) == set(texts)


def _draw(store: Store) -> None:
    store.save_figure(_figure(), "curves", TABLE, "Curves.")
    store.save_table(TABLE, "gain", "Gain.", {"gain": ".1f"})
    store.save_number("Gain", 0.0512, ".1%")


DRAWN = {f"figures/curves.{suffix}" for suffix in ("csv", "pdf", "png")} | {
    f"generated/{name}"
    for name in ("curves.tex", "gain.csv", "gain.tex", "manifest.json", "numbers_01.json", "numbers_01.tex")
}


@pytest.mark.parametrize(
    ("scale", "fresh", "variable", "folder"),
    [
        ("tiny", False, None, "paper"),
        ("tiny", True, None, "runs/01-tiny"),
        ("smoke", False, None, "runs/01-smoke"),
        ("smoke", True, "EVOALIGN_RUN_DIR", "elsewhere"),
        ("tiny", False, "EVOALIGN_RUN_DIR", "paper"),
        ("tiny", False, "EVOALIGN_ARTIFACTS", "elsewhere"),
        ("smoke", True, "EVOALIGN_ARTIFACTS", "elsewhere"),
    ],
)
def test_where_artefacts_go(
    repository: Path, monkeypatch: pytest.MonkeyPatch, scale: str, fresh: bool, variable: str | None, folder: str
) -> None:
    if variable:
        monkeypatch.setenv(variable, str(repository / "elsewhere"))
    before = _files(repository)
    _draw(Store("01", scale, RECORDS, fresh))
    drawn = _files(repository) - before
    place = {"figures": "figures", "generated": "paper/generated"}
    if folder == "paper":
        assert drawn == {file.replace(file.split("/")[0], place[file.split("/")[0]]) for file in DRAWN}
    else:
        assert drawn == {f"{folder}/{file}" for file in DRAWN}
    table = (repository / folder / "generated/gain.tex").read_text()
    assert ("SMOKE RUN: NUMBERS MEAN NOTHING" in table) == (scale == "smoke")
    assert f"(notebook 01, scale {scale})}}" in table


def test_full_scale_stands_beside_tiny(repository: Path) -> None:
    _draw(Store("01", "tiny", RECORDS, fresh=False))
    tiny = {file: (repository / file).read_bytes() for file in _files(repository) if "manifest" not in file}
    _draw(Store("01", "full", RECORDS, fresh=False))
    assert {file: (repository / file).read_bytes() for file in tiny} == tiny
    assert "\\newcommand{\\GainFull}" in (repository / "paper/generated/numbers_01_full.tex").read_text()
    assert {"gain", "gain_full", "Gain", "GainFull"} <= set(_manifest(repository)["artefacts"])


def test_bytes_depend_on_the_records_alone(repository: Path) -> None:
    contents = []
    for records in (RECORDS, RECORDS[::-1]):
        _draw(Store("01", "tiny", records, fresh=False))
        contents.append({file: (repository / file).read_bytes() for file in _files(repository)})
    assert contents[0] == contents[1]


def test_manifest(repository: Path) -> None:
    _draw(Store("01", "tiny", RECORDS, fresh=False))
    manifest = _manifest(repository)
    assert set(manifest["artefacts"]) == {"curves", "gain", "Gain"}
    entry = manifest["artefacts"]["gain"]
    assert entry["files"] == ["generated/gain.csv", "generated/gain.tex"]
    assert (entry["kind"], entry["notebook"], entry["scale"]) == ("table", "01", "tiny")
    assert manifest["records"] == {
        entry["records"]: {
            "specs": ["8f", "9f"],
            "commits": ["c0ffee"],
            "versions": {"evoalign": ["0.1.0"], "numpy": ["2.3.5"], "python": ["3.12.1"], "torch": ["2.13.0"]},
        }
    }
    changed = [RECORDS[0] | {"budget": {"completions": 1}}, RECORDS[1] | {"commit": "beef"}]
    _draw(Store("01", "tiny", changed, fresh=False))
    # the new description takes the place of the old one, which nothing is drawn from any more
    (description,) = _manifest(repository)["records"].values()
    assert description["commits"] == ["beef", "c0ffee"]


DRAWER = """import json, sys
from evoalign_study.artifacts import Store
store = Store(sys.argv[1], "tiny", json.loads(sys.argv[2]), fresh=False)
print("ready", flush=True)
sys.stdin.read()
for first in "abcdefghij":
    for second in "abcdefghij":
        store.save_number(sys.argv[1] + first + second, 1, "d")
"""


def test_notebooks_drawn_at_once_lose_nothing_of_each_other(tmp_path: Path) -> None:
    """Unlocked, one finds the manifest empty, which the other is writing, or puts it back without the other's entry."""
    environment = os.environ | {"EVOALIGN_ARTIFACTS": str(tmp_path)}
    commands = [[sys.executable, "-c", DRAWER, name, json.dumps(RECORDS)] for name in ("one", "two")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    drawers = (subprocess.Popen(command, env=environment, cwd=REPOSITORY, **pipes) for command in commands)
    with next(drawers) as one, next(drawers) as other:
        assert one.stdout.readline() == other.stdout.readline() == b"ready\n"
        one.stdin.close(), other.stdin.close()  # begin
    assert one.returncode == other.returncode == 0
    names = json.loads((tmp_path / "generated/manifest.json").read_text())["artefacts"]
    assert len(names) == 200
    assert _files(tmp_path) == {"generated/manifest.json"} | {
        f"generated/numbers_{name}.{suffix}" for name in ("one", "two") for suffix in ("json", "tex")
    }


def test_published_tables_name_no_records(repository: Path) -> None:
    store = Store("01", "tiny", RECORDS, fresh=False)
    store.save_table(TABLE[["arm", "n"]], "literature", "Published.", published=True)
    text = (repository / "paper/generated/literature.tex").read_text()
    assert r"\caption{Published. (published, other models; notebook 01)}" in text
    manifest = _manifest(repository)
    assert (manifest["artefacts"]["literature"]["records"], manifest["records"]) == (None, {})


def test_store_refuses(repository: Path) -> None:
    with pytest.raises(ValueError, match="scale='tny' is not one of .* Did you mean 'tiny'"):
        Store("01", "tny", RECORDS, fresh=False)
    with pytest.raises(ValueError, match="no records for 01"):
        Store("01", "tiny", [], fresh=False)
    with pytest.raises(KeyError, match="lacks commit, environment"):
        Store("01", "tiny", [{"spec": {}, "spec_hash": "00"}], fresh=False)
    store = Store("01", "tiny", RECORDS, fresh=False)
    for name in ("../gain", "Gain", "claims", "numbers_01"):
        with pytest.raises(ValueError, match="artefact name"):
            store.save_table(TABLE[["arm"]], name, "Gain.")
    store.save_table(TABLE[["arm"]], "gain", "Gain.")
    kept = (repository / "paper/generated/gain.csv").read_bytes()
    with pytest.raises(ValueError, match="'gain' is already a table of 01 at tiny"):
        Store("02", "tiny", RECORDS, fresh=False).save_table(TABLE[["n"]], "gain", "Gain.")
    with pytest.raises(ValueError, match="'gain' is already a table"):
        store.save_figure(_figure(), "gain", TABLE, "Gain.")
    assert (repository / "paper/generated/gain.csv").read_bytes() == kept


NOTEBOOK = """
import json, pathlib
import pandas as pd
from matplotlib.figure import Figure
from evoalign_study.artifacts import Store
lines = pathlib.Path("../paper/results/01_toy/tiny.jsonl").read_text().splitlines()
records = [json.loads(line) for line in lines]
store = Store("01_toy", "tiny", records, fresh=False)
frame = pd.DataFrame({"seed": [r["spec"]["seed"] for r in records]})
store.save_figure(Figure(), "curves", frame, "Curves.")
store.save_table(frame, "gain", "Gain.")
store.save_number("Runs", len(records), "d")
"""


def test_claims_are_all_in_the_paper_and_those_with_a_rule_in_the_readme(repository: Path) -> None:
    declared = load_claims()
    markdown = artifacts.save_claims(evaluate_together(declared, []), repository / "paper/generated")
    assert (repository / "paper/generated/claims.md").read_text() == markdown
    rows = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("| ")][2:]
    with_rule = [c["id"] for c in declared if c["rule"]["kind"] != "open" and c["id"].startswith("C")]
    last = [
        name for name in with_rule if name == max(each for each in with_rule if each.rstrip("bc") == name.rstrip("bc"))
    ]
    assert [row[0].split()[0] for row in rows] == last and "C2b" in last and "C1" in last
    assert rows[0] == ["C1 ES improves Countdown on every base and beats RL", "open"]
    assert "Of 39 claims of the field 38 wait for their notebook or for larger models. A letter" in markdown
    tex = (repository / "paper/generated/claims.tex").read_text().splitlines()
    assert tex[0].startswith(r"\begin{longtable}{lp{") and tex[-1] == r"\end{longtable}"
    assert tex.count(r"claim & statement & verdict & result & checks \\") == 2  # on the first page, and on the others
    assert sum(line.startswith(tuple(f"{c['id']} & " for c in declared)) for line in tex) == len(declared)
    table = pd.read_csv(repository / "paper/generated/claims.csv", index_col="claim")
    assert list(table.index) == [c["id"] for c in declared]
    assert table.loc["C17", "verdict"] == "not testable at this scale" and len(table.loc["C2", "rule"]) == 64


def _store_toy_records(repository: Path) -> Path:
    """Two sealed records of a notebook 01_toy."""
    file = repository / "paper/results/01_toy/tiny.jsonl"
    for repeat, made in enumerate(RECORDS):
        spec = {"scale": "tiny", "seed": 0, "kind": "toy", "repeat": repeat}
        append_record(file, made | {"status": "finished", "spec": spec, "spec_hash": spec_hash(spec)})
    return file


def _write_notebook(repository: Path, *cells: nbformat.NotebookNode | str) -> None:
    made = [nbformat.v4.new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made), repository / "notebooks" / "01_toy.ipynb")


def _run_verify(*arguments: str) -> tuple[int, list[str]]:
    """`python -m evoalign_study verify` as it is typed: exit status, and lines."""
    result = CliRunner(env={"COLUMNS": "400"}).invoke(cli.app, ["verify", *arguments])  # or errors are broken in a box
    return result.exit_code, result.output.splitlines()


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which all agrees: notebook, records, figures, README and benchmark; `drawn` has it once more."""
    with pytest.MonkeyPatch.context() as patch:
        repository = _repository(tmp_path_factory.mktemp("agreed"), patch)
        patch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'notebooks'}")
        (repository / "README.md").write_text("<!-- claims -->\n<!-- /claims -->\n")
        merge(repository / "paper/results/bench.json", "a device", "cpu", {"step": {"ratio": 3.5}})
        _write_notebook(repository, "import json", NOTEBOOK + "print('untagged')")
        _store_toy_records(repository)
        assert artifacts.redraw("01_toy") is None and _run_verify("--write")[0] == 0
        for folder, place in (("figures", paths.FIGURES), ("generated", paths.GENERATED)):
            shutil.copytree(place, repository / "drawn" / folder)
        assert _forged(repository) == []
    return repository


@pytest.fixture
def agreeing(agreed: Path, repository: Path) -> Path:
    """A copy of it, to be forged."""
    return shutil.copytree(agreed, repository, dirs_exist_ok=True)


AGREE = "all tables, numbers and plotted data agree with the committed records"


def _forged(repository: Path) -> list[str]:
    """What `verify` reports, in the order of its lines; it fails if there is anything to report."""
    status, lines = _run_verify("--drawn", str(repository / "drawn"))
    problems = [line for line in lines if line not in (NO_GIT, AGREE)]
    assert status == bool(problems) and (AGREE in lines) == (not problems)
    return problems


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def _edited_manifest(repository: Path, change) -> None:
    manifest = _manifest(repository)
    change(manifest["artefacts"])
    (repository / "paper/generated/manifest.json").write_text(json.dumps(manifest))


STRAY = {"kind": "table", "notebook": "99_other", "scale": "tiny", "files": ["generated/best.csv"], "records": None}
PICTURE = "figures/curves.png is not the picture that was drawn"
BENCH = "bench.json does not have the SHA-256"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda r: (r / "figures/curves.csv").write_text("seed\n0\n1\n"),
            ["curves.csv differs: line 3"],
        ),
        (lambda r: (r / "figures/curves.png").unlink(), ["figures/curves.png is missing"]),
        (lambda r: (r / "figures/curves.png").write_bytes(b"another"), [PICTURE]),
        (lambda r: (r / "figures/old.csv").write_text("seed\n"), ["figures/old.csv is extra"]),
        (lambda r: (r / "paper/generated/gain.tex").unlink(), ["generated/gain.tex is missing"]),
        (
            lambda r: _edit(r / "paper/generated/claims.csv", "E1,", "E9,"),
            ["claims.csv differs: line 2"],
        ),
        (lambda r: _edit(r / "README.md", "| claim |", "| claims |"), ["README.md, block claims, differs: line 1"]),
        (lambda r: (r / "README.md").write_text(2 * (r / "README.md").read_text()), ["more than one block"]),
        (
            lambda r: _edited_manifest(r, lambda entries: entries.update(gone=entries.pop("Runs") | {"files": []})),
            ["json is extra", "tex is extra", "Runs of 01_toy is missing", "gone is extra"],
        ),
        (
            lambda r: _edited_manifest(r, lambda entries: entries.update(best=STRAY)),
            ["99_other at tiny, which has no records", "best names generated/best.csv, which is missing"],
        ),
        (lambda r: _edit(r / "paper/results/bench.json", "3.5", "5.5"), [BENCH]),
        (lambda r: (r / "paper/results/bench.sha256").unlink(), [BENCH]),
        (lambda r: _edit(r / "notebooks/01_toy.ipynb", "import json", "import json, os"), []),  # `stale` finds this
        (lambda r: _edit(r / "notebooks/01_toy.ipynb", '"untagged\\n"', '"forged\\n"'), ["displays what"]),
        (lambda r: _edit(r / "paper/results/01_toy/tiny.jsonl", '"cpu"', '"gpu"'), ["line 1 (toy", "differs in"]),
    ],
)
def test_verify_names_what_was_changed(agreeing: Path, change, found: list[str]) -> None:
    change(agreeing)
    before = {file: (agreeing / file).read_bytes() for file in _files(agreeing)}
    problems = _forged(agreeing)
    assert len(problems) == len(found) if "line 1 (toy" not in found else problems
    assert all(any(part in problem for problem in problems) for part in found[:1] + found[1:2] * (len(found) != 2))
    assert {file: (agreeing / file).read_bytes() for file in _files(agreeing)} == before


def test_verify_draws_anew(agreeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that a machine with other libraries has drawn is no forgery; what nobody has drawn is."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'notebooks'}")
    assert _run_verify() == (0, [NO_GIT, AGREE])
    _edit(agreeing / "paper/generated/gain.csv", "0", "7")
    assert _run_verify() == (1, ["generated/gain.csv differs: line 2: committed '7', drawn '0'", NO_GIT])
    assert _run_verify("--write") == (0, [NO_GIT, "written"]) and _forged(agreeing) == []
    for name in ("curves.png", "curves.pdf"):
        for folder in (agreeing, agreeing / "drawn"):
            (folder / "figures" / name).write_bytes(b"another picture")
    assert _forged(agreeing) == []
    for wrong in ([str(agreeing / "drawn"), "--write"], ["nowhere"]):
        assert _run_verify("--drawn", *wrong)[0] == 2


def test_verify_reports_a_forged_lock(agreeing: Path) -> None:
    """Rule and line changed together: found by the history of git. And lines that were deleted, or written by hand."""
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "Locked"]):
        subprocess.run([*git, *arguments], cwd=agreeing, check=True, capture_output=True)
    assert _forged(agreeing) == []
    lock, declared = agreeing / "paper/claims.lock", agreeing / "paper/claims.yaml"
    whole, rules = lock.read_text(), declared.read_text()
    old = next(line for line in whole.splitlines() if line.startswith("C1 "))
    _edit(lock, old + "\n", "")
    assert _forged(agreeing)[0].startswith("claim C1 has a rule and no line")
    lock.write_text(whole)
    _edit(lock, old, "C1 by hand")
    assert _forged(agreeing)[0].startswith("claims.lock, line 7 is not 'id date hash'")
    lock.write_text(whole)
    before, _, after = rules.partition("- id: C1\n")
    declared.write_text(f"{before}- id: C1\n{after.replace('min_seeds: 8', 'min_seeds: 9', 1)}")
    changed = next(rule_hash(each) for each in load_claims() if each["id"] == "C1")
    _edit(lock, old.split()[2], changed)
    lost = f"claims.lock has lost the rule {old.split()[2][:12]} of claim C1, which its history has"
    assert any(problem.startswith(lost) for problem in _forged(agreeing))


def test_the_pictures_and_outputs_of_the_repository_are_those_of_the_manifest() -> None:
    manifest = json.loads((REPOSITORY / "paper/generated/manifest.json").read_text())
    pictures = {f for entry in manifest["artefacts"].values() for f in entry["files"] if f.endswith((".pdf", ".png"))}
    assert manifest["pictures"].keys() == pictures and len(pictures) > 60
    assert {file: artifacts._sha256(REPOSITORY / file) for file in pictures} == manifest["pictures"]
    assert artifacts._changed_outputs() == [] == artifacts._unaccounted(())
    assert len(manifest["outputs"]) == len(list((REPOSITORY / "notebooks").glob("*.ipynb")))


def test_verify_reports_edited_records_first_and_draws_nothing_from_them(repository: Path) -> None:
    file = _store_toy_records(repository)
    lines = file.read_text()
    file.write_text(lines.replace('"device":"cpu"', '"device":"gpu"', 1))
    drawing = artifacts.verify(["01_toy"])  # finds one problem after the other
    edited = next(drawing)
    assert edited.startswith(f"{file}, line 1 (toy 0 0, spec ") and "was edited" in edited
    assert next(drawing) == "notebooks/01_toy.ipynb is missing, though it has committed records"
    drawing.close()
    _write_notebook(repository, "raise AssertionError('executed')")
    assert list(artifacts.verify(write=True)) == [edited] and not list((repository / "paper/generated").iterdir())
    # one whose spec was edited cannot be judged either: said, and not raised
    file.write_text(lines.replace('"repeat":1', '"repeat":7'))
    (repository / "notebooks/01_toy.ipynb").unlink()
    *_, last = artifacts.verify(["01_toy"])
    assert "line 2 was edited: its spec" in last


def test_the_command_seals_what_a_killed_writer_or_a_merge_left(repository: Path) -> None:
    file = _store_toy_records(repository)
    file.with_suffix(".index").unlink()
    sealed = CliRunner().invoke(cli.app, ["seal"])
    assert (sealed.exit_code, sealed.output) == (0, f"{file}: 2 records sealed\nevery record is in its index\n")
    file.write_text(file.read_text().replace('"device":"cpu"', '"device":"gpu"', 1))
    sealed = CliRunner().invoke(cli.app, ["seal"])
    assert sealed.exit_code == 1 and f"{file}, line 1 " in sealed.output and "2 records" not in sealed.output


def test_verify_reports_a_notebook_that_fails(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'notebooks'}")
    (repository / "paper/results/01_toy").mkdir()
    (repository / "paper/results/01_toy/tiny.jsonl").write_text("")
    missing = "notebooks/01_toy.ipynb is missing, though it has committed records"
    assert missing in artifacts.verify(["01_toy"])
    parameters = nbformat.v4.new_code_cell("dry_run: bool = False", metadata={"tags": ["parameters"]})
    _write_notebook(repository, parameters, "if dry_run: raise KeyError('seed')")
    assert "notebooks/01_toy.ipynb failed: KeyError: 'seed'" in artifacts.verify(["01_toy"])
    with pytest.raises(FileNotFoundError, match="no paper/results/02_toy/tiny.jsonl; there are: 01_toy"):
        next(artifacts.verify(["02_toy"]))
    status, lines = _run_verify("--notebook", "02_toy")
    assert status == 2 and "There are: 01_toy" in " ".join(lines)


ENDLESS = """import os, pathlib, time
pathlib.Path(os.environ["EVOALIGN_ARTIFACTS"] + ".pid").write_text(str(os.getpid()))
time.sleep(600)
"""


def test_an_interrupt_ends_all_notebooks_that_are_executed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "default_workers", lambda: 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started this in the background
    folders = {name: repository / name for name in ("01_a", "02_b", "03_never_begun")}
    for name in folders:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(ENDLESS)])
        nbformat.write(notebook, repository / "notebooks" / f"{name}.ipynb")
    told: list[Path] = []

    def interrupt() -> None:
        end = time.monotonic() + 100
        while len(told) < 2 and time.monotonic() < end:
            time.sleep(0.1)
            told[:] = [path for path in repository.glob("*.pid") if path.read_text()]
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        list(execution.execute_all(folders))
    thread.join()
    assert sorted(path.name for path in told) == ["01_a.pid", "02_b.pid"]
    assert not any(Path("/proc", path.read_text()).exists() for path in told)
    assert not (repository / "03_never_begun.pid").exists()


def test_records_may_come_before_their_notebook_but_artefacts_need_it(repository: Path) -> None:
    (repository / "paper/results/01_toy").mkdir()
    (repository / "paper/results/01_toy/tiny.jsonl").write_text("")
    missing = "notebooks/01_toy.ipynb is missing, though it has committed records"
    assert artifacts.undrawn() == ["01_toy"] and missing not in artifacts.verify()
    entry = {"notebook": "01_toy", "scale": "tiny", "kind": "number", "files": [], "records": "none"}
    manifest = {"artefacts": {"Gain of 01_toy": entry}, "records": {"none": {}}}
    (repository / "paper/generated").mkdir(parents=True, exist_ok=True)
    (repository / "paper/generated/manifest.json").write_text(json.dumps(manifest))
    assert artifacts.undrawn() == [] and missing in artifacts.verify()


def test_verify_does_not_agree_with_nothing(repository: Path) -> None:
    problems = list(artifacts.verify())
    assert "paper/results holds no records of scale tiny: nothing to compare with" in problems
    assert "generated/claims.csv is missing" in problems


def test_what_a_store_saves_is_what_a_notebook_shows(repository: Path) -> None:
    store = Store("01_toy", "tiny", RECORDS, fresh=False)
    figure = colourful(("es", "grpo"))
    expected = style.embedded(figure)
    shown = store.save_figure(figure, "curves", TABLE, "Curves of <two> arms.")
    (picture, about), (below, _) = shown.outputs
    assert b64decode(picture["image/png"]) == expected
    assert about == {"image/png": {"width": 810}, "evoalign": {"artefact": "curves"}}
    assert below["text/html"] == "<p><i>Curves of &lt;two&gt; arms. (notebook 01, scale tiny)</i></p>"
    assert repr(shown) == "<figure curves>\nCurves of <two> arms. (notebook 01, scale tiny)"
    assert not plt.fignum_exists(figure.number)  # or the notebook would show it a second time
    with Image.open(repository / "figures/curves.png") as saved:
        assert saved.mode == "RGB" and saved.size == (1350, 480)


def test_a_notebook_shows_tables_as_tables(repository: Path) -> None:
    saved = Store("01_toy", "tiny", RECORDS, fresh=False).save_table(TABLE, "gain", "Gain.", {"gain": "+.1f"})
    ((contents, about),) = saved.outputs
    assert about == {"evoalign": {"artefact": "gain"}}
    left, right = "style=text-align:left", "align=right"
    assert contents["text/html"].splitlines() == [
        "<table>",
        '<caption style="text-align: left; min-width: 36em">Gain. (notebook 01, scale tiny)</caption>',
        f"<thead><tr><th {left}>arm</th><th {right}>gain</th><th {right}>n</th><th {right}>range</th></tr></thead>",
        "<tbody>",
        f"<tr><td {left}>ES</td><td {right}>-1.2</td><td {right}>8</td><td {right}>-3.0 to 1.0</td></tr>",
        f"<tr><td {left}>base_A0 &amp; co</td><td {right}>+0.5</td><td {right}>1</td><td {right}></td></tr>",
        "</tbody>",
        "</table>",
    ]
    assert contents["text/plain"].splitlines() == [
        "Gain. (notebook 01, scale tiny)",
        "",
        "         arm gain n       range",
        "          ES -1.2 8 -3.0 to 1.0",
        "base_A0 & co +0.5 1            ",
    ]


def test_a_table_that_is_not_saved_and_an_interval_on_one_line(repository: Path) -> None:
    frame = pd.DataFrame({"gain": ["1.0 [0.5, 1.5] points"], "list": [[1, 2]]})
    ((contents, about),) = artifacts.show(frame, "Gain.").outputs
    assert (
        "1.0 [0.5,\N{NO-BREAK SPACE}1.5] points" in contents["text/html"]
        and "[1,\N{NO-BREAK SPACE}2]" in contents["text/html"]
    )
    assert about == {} and _files(repository) == COPIED
    with pytest.raises(ValueError, match="'gain' holds floats"):
        artifacts.show(TABLE, "Gain.")


def test_answers_are_questions_with_sentences() -> None:
    shown = artifacts.answers({"Does it learn?": "By 3 [2, 4] points & more (n = 8)."})
    ((contents, _),) = shown.outputs
    assert "<p><b>Does it learn?</b><br>By 3 [2, 4] points &amp; more (n = 8).</p>" in contents["text/html"]
    assert contents["text/plain"] == repr(shown) == "Does it learn?\n    By 3 [2, 4] points & more (n = 8)."
    with pytest.raises(ValueError, match="no answers"):
        artifacts.answers({})


def test_a_notebook_holds_a_table_once_and_a_terminal_shows_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, displayed = artifacts.show(TABLE, "Gain.", {"gain": ".1f"}), []
    monkeypatch.setattr("IPython.display.display", lambda contents, **_: displayed.append(contents))
    for shell in (SimpleNamespace(kernel="a kernel"), SimpleNamespace(), None):
        monkeypatch.setattr("IPython.get_ipython", lambda shell=shell: shell)
        shown._ipython_display_()
    texts = [contents["text/plain"] for contents in displayed]
    assert texts == ["Gain.", repr(shown), repr(shown)] and "ES" in repr(shown)
    assert all("<td" in contents["text/html"] for contents in displayed)


def test_a_kernel_displays_each_output_and_figures_that_are_not_saved_in_the_same_quality() -> None:
    code = """
from base64 import b64decode
import matplotlib.pyplot as plt
from IPython.utils.capture import capture_output
from evoalign_study import artifacts, style
style.use()
fig, ax = plt.subplots()
ax.plot([0, 1, 2], [0, 1, 0.5], **style.line("es"))
formatter = get_ipython().display_formatter
formatter.active_types = ["image/png", "text/plain"]  # a terminal's are text alone
print(formatter.format(fig)[0]["image/png"] == style.embedded(fig))
plt.close(fig)
with capture_output() as captured:
    get_ipython().displayhook(artifacts.Shown(({"text/plain": "one"}, {}), ({"text/plain": "two"}, {"a": 1})))
print([(output.data, output.metadata) for output in captured.outputs])
"""
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    shell = [sys.executable, "-m", "IPython", "--quick", "--no-banner", "--HistoryManager.enabled=False", "-c", code]
    printed = subprocess.run(shell, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == ["True", "[({'text/plain': 'one'}, {}), ({'text/plain': 'two'}, {'a': 1})]"]
