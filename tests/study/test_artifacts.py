"""Artefacts: their exact text, where they go, what the manifest says, what `execute` writes and what `verify` finds."""

import json
import os
import shutil
import signal
import threading
import time
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_lowercase
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
from evoalign_study import artifacts, claims, cli, execution, paths, provenance, style
from evoalign_study.artifacts import Store
from evoalign_study.records import append_record, spec_hash
from evoalign_study.rendering import tex_escape
from helpers import typed
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image
from test_records import contents, git
from test_style import colourful

from evoalign_lib.engines import processes
from tests.benchmarks.shared import merge

HERE = paths.ROOT
ENVIRONMENT = {"python": "3.12.1", "torch": "2.13.0", "numpy": "2.3.5", "evoalign": "0.1.0", "device": "cpu"}
RECORDS = [
    {"spec": {"seed": seed}, "spec_hash": f"{9 - seed}f", "commit": "c0ffee", "environment": ENVIRONMENT}
    for seed in range(2)
]
TABLE = pd.DataFrame({"arm": ["ES", "base_A0 & co"], "gain": [-1.25, 0.5], "n": [8, 1], "range": ["-3.0 to 1.0", ""]})
COPIED = {"paper/claims.yaml", "paper/claims.lock", "LOG.md"}
GENERATED = "paper/generated"


@pytest.fixture
def repository(repository: Path) -> Path:
    """A repository of claims and nothing else, its paths in the place of the real ones."""
    for name in COPIED:
        shutil.copy(HERE / name, repository / name)
    return repository


def store(notebook: str = "01", scale: str = "tiny", records: list = RECORDS, fresh: bool = False) -> Store:
    return Store(notebook, scale, records, fresh)


def figure() -> Figure:
    drawn = Figure(figsize=(2, 1))
    drawn.add_subplot().plot([0, 1], [0, 1], label="a")
    return drawn


def manifest(repository: Path) -> dict:
    return json.loads((repository / GENERATED / "manifest.json").read_text())


# ---- text


def test_a_table_is_tex_csv_html_and_plain_text(repository: Path) -> None:
    shown = store().save_table(TABLE, "gain", "Gain, 95 % range.", {"gain": "+.1f"})
    assert (repository / GENERATED / "gain.tex").read_text().splitlines() == [
        *(r"\centering", r"\caption{Gain, 95 \% range. (notebook 01, scale tiny)}", r"\label{tab:gain}"),
        *(r"\begin{tabular}{lrrr}", r"\toprule", r"arm & gain & n & range \\", r"\midrule"),
        *(r"ES & $-$1.2 & 8 & $-$3.0 to 1.0 \\", r"base\_A0 \& co & +0.5 & 1 &  \\", r"\bottomrule", r"\end{tabular}"),
    ]
    csv = (repository / GENERATED / "gain.csv").read_bytes()
    assert csv == b"arm,gain,n,range\nES,-1.25,8,-3.0 to 1.0\nbase_A0 & co,0.5,1,\n"
    ((contents, about),) = shown.outputs
    left, right = "<td style=text-align:left>", "</td><td align=right>"
    assert about == {"evoalign": {"artefact": "gain"}}
    for said in (">Gain, 95 % range. (notebook 01, scale tiny)</caption>", f"{left}base_A0 &amp; co{right}+0.5"):
        assert said in contents["text/html"]
    assert repr(shown).splitlines()[2:4] == ["         arm gain n       range", "          ES -1.2 8 -3.0 to 1.0"]
    store().save_table(TABLE[["arm", "n"]], "literature", "Published.", published=True)
    assert "(published, other models; notebook 01)" in (repository / GENERATED / "literature.tex").read_text()
    assert manifest(repository)["artefacts"]["literature"]["records"] is None


def test_tex_escape() -> None:
    texts = {
        r"1% $x_1 \ {a}~#^|": r"1\% \$x\_1 \textbackslash{} \{a\}\textasciitilde{}\#\textasciicircum{}\textbar{}",
        "[-3.0, -1] -.5": "[$-$3.0, $-$1] -.5",
        "Qwen2.5-7B, 1e-3, 2-3, x -y": "Qwen2.5-7B, 1e-3, 2-3, x -y",
        "σ ≤ 1 ± 2 × 3 < 4": r"$\sigma$ $\le$ 1 $\pm$ 2 $\times$ 3 $<$ 4",
    }
    assert {text: tex_escape(text) for text in texts} == texts


def test_a_figure_is_pictures_data_and_what_a_notebook_shows(repository: Path) -> None:
    data = pd.DataFrame({"x": [0, 800_000], "y": [-0.0, 0.123456], "z": [1234567.0, None], "arm": ["es", "base"]})
    drawn = colourful(("es", "grpo"))
    expected = style.embedded(drawn)
    shown = store().save_figure(drawn, "curves", data, "Curves of <two> arms.")
    text = (repository / "figures/curves.csv").read_text()
    assert text == "x,y,z,arm\n0,0,1.235e+06,es\n800000,0.1235,,base\n"
    tex = (repository / GENERATED / "curves.tex").read_text()
    assert r"\includegraphics{curves.pdf}" in tex and r"\label{fig:curves}" in tex
    (picture, about), (below, _) = shown.outputs
    assert b64decode(picture["image/png"]) == expected
    assert about == {"image/png": {"width": 810, "alt": "Curves of <two> arms"}, "evoalign": {"artefact": "curves"}}
    assert below["text/html"] == "<p><i>Curves of &lt;two&gt; arms. (notebook 01, scale tiny)</i></p>"
    assert not plt.fignum_exists(drawn.number)  # or the notebook would show it a second time
    with Image.open(repository / "figures/curves.png") as saved:
        assert saved.mode == "RGB" and saved.size == (1350, 480)


def test_numbers_are_macros(repository: Path) -> None:
    for name, value, form in (("Loss", -0.0512, ".3f"), ("Gain", 1.0, ".1f"), ("Gain", 0.0512, ".1%")):
        store().save_numbers({name: (value, form)})
    expected = "\\newcommand{\\Gain}{5.1\\%}\n\\newcommand{\\Loss}{$-$0.051}\n"
    assert (repository / GENERATED / "numbers_01.tex").read_text() == expected
    written = contents(repository)
    for refused in ({"Other": (1.0, ".1f"), "gain_2": (1.0, ".1f")}, {"Other": (1.0, ".1f"), "Third": (1.0, "d")}):
        with pytest.raises(ValueError, match="gain_2|'d'"):
            store().save_numbers(refused)
    assert contents(repository) == written


def test_what_a_notebook_shows_and_does_not_save(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.DataFrame({"gain": ["1.0 [0.5, 1.5] points"], "list": [[1, 2]]})
    ((said, about),) = artifacts.show(frame, "Gain.").outputs
    for interval in ("1.0 [0.5,\N{NO-BREAK SPACE}1.5] points", "[1,\N{NO-BREAK SPACE}2]"):
        assert interval in said["text/html"]
    assert about == {} and contents(repository).keys() == COPIED
    ((said, _),) = artifacts.answers({"Does it learn?": "By 3 points & more."}).outputs
    assert "<p><b>Does it learn?</b><br>By 3 points &amp; more.</p>" in said["text/html"]
    assert said["text/plain"] == "Does it learn?\n    By 3 points & more."
    # a notebook holds a table once, and a terminal shows its text
    shown, displayed = artifacts.show(TABLE, "Gain.", {"gain": ".1f"}), []
    monkeypatch.setattr("IPython.display.display", lambda contents, **_: displayed.append(contents["text/plain"]))
    for shell in (SimpleNamespace(kernel="a kernel"), None):
        monkeypatch.setattr("IPython.get_ipython", lambda shell=shell: shell)
        shown._ipython_display_()
    assert displayed == ["Gain.", repr(shown)] and "ES" in repr(shown)


# ---- where artefacts go, and the manifest


def draw(made: Store) -> None:
    made.save_figure(figure(), "curves", TABLE, "Curves.")
    made.save_table(TABLE, "gain", "Gain.", {"gain": ".1f"})
    made.save_numbers({"Gain": (0.0512, ".1%")})


DRAWN = {f"figures/curves.{suffix}" for suffix in ("csv", "pdf", "png")} | {
    f"generated/{name}"
    for name in ("curves.tex", "gain.csv", "gain.tex", "manifest.json", "numbers_01.json", "numbers_01.tex")
}


PLACES = [
    ("tiny", True, None, "runs/01-tiny/"),
    ("smoke", False, None, "runs/01-smoke/"),
    ("smoke", True, "EVOALIGN_RUN_DIR", "elsewhere/"),
    ("tiny", False, "EVOALIGN_RUN_DIR", ""),
    ("tiny", False, "EVOALIGN_ARTIFACTS", "elsewhere/"),
]


@pytest.mark.parametrize(("scale", "fresh", "variable", "folder"), PLACES)
def test_where_artefacts_go(repository: Path, monkeypatch, scale, fresh, variable, folder) -> None:
    if variable:
        monkeypatch.setenv(variable, str(repository / "elsewhere"))
    draw(store(scale=scale, fresh=fresh))
    expected = {f"{folder}{file}" if folder else file.replace("generated/", f"{GENERATED}/") for file in DRAWN}
    assert contents(repository).keys() - COPIED == expected
    table = next(repository.rglob("generated/gain.tex")).read_text()
    assert ("SMOKE RUN" in table) == (scale == "smoke") and f"(notebook 01, scale {scale})}}" in table


def test_bytes_depend_on_the_records_alone_which_the_manifest_names(repository: Path) -> None:
    draw(store())
    first = contents(repository)
    draw(store(records=RECORDS[::-1]))
    assert contents(repository) == first
    (records,) = manifest(repository)["records"]
    assert manifest(repository)["artefacts"]["gain"] == {
        "kind": "table", "notebook": "01", "scale": "tiny", "records": records,
        "files": ["generated/gain.csv", "generated/gain.tex"],
    }  # fmt: skip
    assert manifest(repository)["records"][records] == {
        "specs": ["8f", "9f"], "commits": ["c0ffee"],
        "versions": {"evoalign": ["0.1.0"], "numpy": ["2.3.5"], "python": ["3.12.1"], "torch": ["2.13.0"]},
    }  # fmt: skip
    # those of full scale stand beside them
    draw(store(scale="full"))
    changed = {file for file, data in first.items() if data != (repository / file).read_bytes()}
    assert changed == {f"{GENERATED}/manifest.json"}
    assert json.loads((repository / GENERATED / "numbers_01_full.json").read_text()) == {"GainFull": "5.1%"}
    names = {"curves", "curves_full", "gain", "gain_full", "Gain", "GainFull"}
    assert manifest(repository)["artefacts"].keys() == names
    # a new description takes the place of the old one, which nothing is drawn from any more
    for scale in ("tiny", "full"):
        draw(store(scale=scale, records=[RECORDS[0] | {"budget": {}}, RECORDS[1] | {"commit": "beef"}]))
    (description,) = manifest(repository)["records"].values()
    assert description["commits"] == ["beef", "c0ffee"]


def test_notebooks_drawn_at_once_lose_nothing_of_each_other(repository: Path) -> None:
    """Unlocked, one finds the manifest empty, which the other is writing, or puts it back without the other's entry."""

    def draw_numbers(notebook: str) -> None:
        for letter in ascii_lowercase:
            store(notebook).save_numbers({notebook + letter: (1, "d")})

    with ThreadPoolExecutor() as pool:
        list(pool.map(draw_numbers, ("one", "two")))
    assert len(manifest(repository)["artefacts"]) == 52


REFUSED = [
    (lambda: store(scale="tny"), "'tny'.*'tiny'"),
    (lambda: store(records=[]), "01"),
    (lambda: store(records=[{"spec": {}, "spec_hash": "00"}]), "environment"),
    (lambda: store().save_table(TABLE, "gian", "Gain."), "'gain'"),
    (lambda: store().save_table(TABLE, "gian", "Gain.", {"gian": ".1f"}), "'gian'"),
    (lambda: store("02").save_table(TABLE[["n"]], "gain", "Gain."), "'gain' .*01 at tiny"),
    (lambda: store().save_figure(figure(), "gain", TABLE, "Gain."), "'gain' .*table"),
    (lambda: artifacts.answers({}), "no answers"),
    *((lambda n=n: store().save_table(TABLE[["n"]], n, "."), n) for n in ("../gain", "Gain", "claims", "numbers_01")),
]


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_what_is_refused_changes_nothing(repository: Path, make, named: str) -> None:
    store().save_table(TABLE[["arm"]], "gain", "Gain.")
    before = contents(repository)
    with pytest.raises((ValueError, KeyError), match=named):
        make()
    assert contents(repository) == before


# ---- a notebook executed in place, and what verify finds afterwards

PRINTS = """import sys, time
for number in range(3):
    print(number, flush=True)
    time.sleep(0.02)
"""
DRAWS = """
import json, pathlib
import pandas as pd
from matplotlib.figure import Figure
from evoalign_study.artifacts import Store
lines = pathlib.Path("../paper/results/01_toy/tiny.jsonl").read_text().splitlines()
records = [json.loads(line) for line in lines]
store = Store("01_toy", "tiny", records, fresh=False)
frame = pd.DataFrame({"seed": [r["spec"]["repeat"] for r in records]})
store.save_figure(Figure(), "curves", frame, "Curves.")
store.save_numbers({"Runs": (len(records), "d")})
store.save_table(frame, "gain", "Gain.")
"""
NOTEBOOK, RESULTS = "notebooks/01_toy.ipynb", "paper/results/01_toy/tiny.jsonl"


def write(repository: Path, *cells: nbformat.NotebookNode | str) -> None:
    made = [nbformat.v4.new_markdown_cell("# Toy")]
    made += [nbformat.v4.new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    for number, cell in enumerate(made):
        cell.id, cell.metadata["collapsed"] = f"cell-{number}", False
    nbformat.write(nbformat.v4.new_notebook(cells=made), repository / NOTEBOOK)


def read(repository: Path) -> nbformat.NotebookNode:
    return nbformat.read(repository / NOTEBOOK, as_version=4)


def run(*arguments: str) -> tuple[int, list[str]]:
    """`python -m evoalign_study` as it is typed: exit status, and lines."""
    status, output = typed(cli.app, *arguments)
    return status, output.splitlines()


def store_records(repository: Path) -> Path:
    """Two records of a notebook 01_toy."""
    for repeat, made in enumerate(RECORDS):
        spec = {"scale": "tiny", "seed": 0, "kind": "toy", "repeat": repeat}
        append_record(repository / RESULTS, made | {"status": "finished", "spec": spec, "spec_hash": spec_hash(spec)})
    return repository / RESULTS


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory, enter) -> Path:
    """A repository in which all agrees: notebook, records, figures, README and benchmark; `drawn` has it once more."""
    with pytest.MonkeyPatch.context() as patch:
        folder = enter(tmp_path_factory.mktemp("agreed"), patch)
        for name in COPIED:
            shutil.copy(HERE / name, folder / name)
        (folder / "README.md").write_text("<!-- claims -->\n<!-- /claims -->\n")
        (folder / "module.py").write_text("a = 1\n")
        merge(folder / "paper/results/bench.json", "a device", "cpu", {"step": {"ratio": 3.5}})
        write(folder, PRINTS, DRAWS)
        store_records(folder)
        git("init", "-q"), git("add", "."), git("commit", "-qm", "A notebook")
        assert run("execute", "01_toy") == (0, [f"01_toy: executed at commit {provenance.commit()}"])
        artifacts.render_readme_block(artifacts.save_claims(claims.evaluate_all("tiny"), paths.GENERATED))
        for place in ("figures", "generated"):
            shutil.copytree(getattr(paths, place.upper()), folder / "drawn" / place)
        assert forged(folder) == []
    return folder


@pytest.fixture
def agreeing(agreed: Path, repository: Path) -> Path:
    """A copy of it, to be forged."""
    return shutil.copytree(agreed, repository, dirs_exist_ok=True)


def forged(repository: Path) -> list[str]:
    """What `verify` reports, in the order of its lines; it fails if there is anything to report."""
    status, lines = run("verify", "--drawn", str(repository / "drawn"))
    problems = [line for line in lines if not line.startswith("all tables, numbers and plotted data agree")]
    assert status == bool(problems) == (len(problems) == len(lines))
    return problems


def test_execute_in_place(agreeing: Path) -> None:
    content, head = read(agreeing), provenance.commit()
    nbformat.validate(content)
    prints, draws = (cell for cell in content.cells if cell.cell_type == "code")
    assert [output.text for output in prints.outputs] == ["0\n1\n2\n"]  # one piece, however it came
    assert (prints.execution_count, draws.execution_count) == (1, 2)
    (table,) = draws.outputs
    assert "<caption" in table.data["text/html"] and table.metadata["evoalign"] == {"artefact": "gain"}
    assert not any(cell.metadata for cell in content.cells)
    assert len(head) == 12 and content.metadata["evoalign"]["commit"] == head  # outputs are no change of code
    # an edited cell differs from what was executed; prose is no code
    content.cells[0].source = "# Another title"
    executed = content.metadata["evoalign"]["cells"]
    assert execution.digests(content) == executed
    content.cells[2].source += "# a comment"
    assert [a == b for a, b in zip(execution.digests(content), executed, strict=True)] == [True, False]


def test_what_a_notebook_no_longer_draws_goes_and_one_that_fails_changes_nothing(agreeing: Path) -> None:
    write(agreeing, DRAWS.replace('"gain"', '"other"'))
    status, said = run("execute", "01_toy")
    assert status == 0 and len(said) == 2 and read(agreeing).metadata["evoalign"]["commit"].endswith("+")
    assert not list((agreeing / GENERATED).glob("gain.*")) and "gain" not in manifest(agreeing)["artefacts"]
    write(agreeing, "raise KeyError('seed')")
    before = contents(agreeing)
    assert run("execute", "01_toy") == (1, ["notebooks/01_toy.ipynb failed: KeyError: 'seed'"])
    assert contents(agreeing) == before


def test_the_commit_has_a_mark_where_code_was_changed(agreeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = provenance.commit()
    content = read(agreeing)
    content.cells[0].source = "# Another title"
    nbformat.write(content, agreeing / NOTEBOOK)
    assert provenance.commit() == head
    content.cells[1].source += "1"
    nbformat.write(content, agreeing / NOTEBOOK)
    assert provenance.commit() == head + "+"
    for change in (lambda file: file.write_text("<<<<<<<"), Path.unlink):
        change(agreeing / NOTEBOOK)
        assert provenance.commit() == head + "+"
    git("checkout", "-q", NOTEBOOK)
    assert provenance.commit() == head
    (agreeing / "module.py").write_text("a = 2\n")
    assert provenance.commit() == head + "+"
    monkeypatch.setenv("PATH", os.devnull)
    assert provenance.commit() == "unknown"


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def edit_manifest(repository: Path, change) -> None:
    made = manifest(repository)
    change(made["artefacts"])
    (repository / GENERATED / "manifest.json").write_text(json.dumps(made))


STRAY = {"kind": "table", "notebook": "99_other", "scale": "tiny", "files": ["generated/best.csv"], "records": None}
FORGERIES = [  # and a part of each line that is reported
    (lambda r: (r / "figures/curves.csv").write_text("seed\n0\n2\n"), ["curves.csv differs: line 3"]),
    (lambda r: (r / "figures/curves.png").unlink(), ["figures/curves.png"]),
    (lambda r: (r / "figures/curves.png").write_bytes(b"another"), ["figures/curves.png"]),
    (lambda r: (r / "figures/old.csv").write_text("seed\n"), ["figures/old.csv"]),
    (lambda r: (r / GENERATED / "gain.tex").unlink(), ["generated/gain.tex"]),
    (lambda r: edit(r / GENERATED / "claims.csv", "E1,", "E9,"), ["claims.csv differs: line 2"]),
    (lambda r: edit(r / "README.md", "code judges", "we judge"), ["<!-- claims --> differs: line 12"]),
    (lambda r: (r / "README.md").write_text(2 * (r / "README.md").read_text()), ["<!-- claims -->"]),
    (
        lambda r: edit_manifest(r, lambda entries: entries.update(gone=entries.pop("Runs") | {"files": []})),
        ["numbers_01_toy.json", "numbers_01_toy.tex", "manifest.json: the entries of 01_toy"],
    ),
    (lambda r: edit_manifest(r, lambda entries: entries.update(best=STRAY)), ["99_other at tiny", "best.csv"]),
    (lambda r: edit(r / NOTEBOOK, "import sys, time", "import time, sys"), []),  # its digest tells
    (lambda r: edit(r / NOTEBOOK, '"0\\n"', '"9\\n"'), [NOTEBOOK]),
]  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
def test_verify_names_what_was_changed(agreeing: Path, first: int) -> None:
    """Every other forgery at once: neighbours may exclude each other."""
    changes, found = zip(*FORGERIES[first::2], strict=True)
    for change in changes:
        change(agreeing)
    before, parts = contents(agreeing), [part for each in found for part in each]
    problems = forged(agreeing)
    assert len(problems) == len(parts) and all(any(part in problem for problem in problems) for part in parts)
    assert contents(agreeing) == before


def test_verify_draws_anew(agreeing: Path) -> None:
    """A picture that a machine with other libraries has drawn is no forgery; what nobody has drawn is."""
    edit(agreeing / GENERATED / "gain.csv", "0", "7")
    assert run("verify") == (1, ["generated/gain.csv differs: line 2: committed '7', drawn '0'"])
    assert run("verify", "--write") == (0, ["written"]) and forged(agreeing) == []
    for name in ("curves.png", "curves.pdf"):
        for folder in (agreeing, agreeing / "drawn"):
            (folder / "figures" / name).write_bytes(b"another picture")
    assert forged(agreeing) == []
    for wrong in ([str(agreeing / "drawn"), "--write"], ["nowhere"]):
        assert run("verify", "--drawn", *wrong)[0] == 2


(LOCKED,) = [line for line in (HERE / "paper/claims.lock").read_text().splitlines(True) if line.startswith("C1 ")]


FORGED = [
    (lambda r: edit(r / "paper/claims.lock", LOCKED, ""), "claim C1 has a rule"),
    (lambda r: edit(r / "paper/claims.lock", LOCKED, "C1 by hand\n"), "claims.lock, line 7 "),
    (lambda r: edit(r / "paper/results/bench.json", "3.5", "5.5"), "bench.json"),
    (lambda r: (r / "paper/results/bench.sha256").unlink(), "bench.json"),
    (lambda r: edit(r / RESULTS, '"device":"cpu"', '"device":"gpu"'), "tiny.jsonl, line 1 (toy 0 0, spec "),
]


@pytest.mark.parametrize(("change", "named"), FORGED)
def test_nothing_is_drawn_beside_forged_records_a_forged_lock_or_benchmark(agreeing: Path, change, named: str) -> None:
    (agreeing / "figures/curves.csv").unlink()
    change(agreeing)
    before = contents(agreeing)
    for arguments in (("--drawn", str(agreeing / "drawn")), ("--write",)):
        status, (first, *others) = run("verify", *arguments)
        assert status == 1 and named in first and not any("curves.csv" in problem for problem in others)
        assert contents(agreeing) == before


def test_the_pictures_and_outputs_of_the_repository_are_those_of_the_manifest() -> None:
    made = manifest(HERE)
    pictures = {f for entry in made["artefacts"].values() for f in entry["files"] if f.endswith((".pdf", ".png"))}
    assert made["pictures"].keys() == pictures and len(pictures) > 60
    assert artifacts._changed_outputs() == [] == artifacts._unaccounted(())
    assert len(made["outputs"]) == len(list((HERE / "notebooks").glob("*.ipynb")))


def test_the_command_indexes_what_a_killed_writer_or_a_merge_left(repository: Path) -> None:
    file = store_records(repository)
    file.with_suffix(".index").unlink()
    assert run("seal") == (0, [f"{file}: 2 records indexed", "every record is in its index"])
    edit(file, '"device":"cpu"', '"device":"gpu"')
    status, said = run("seal")
    assert status == 1 and f"{file}, line 1 " in said[0]


def test_verify_reports_notebooks_that_fail_or_are_missing(repository: Path) -> None:
    assert "generated/claims.csv is missing" in artifacts.verify()
    (repository / RESULTS).parent.mkdir()
    (repository / RESULTS).write_text("")
    assert f"{NOTEBOOK} is missing, though it has committed records" in artifacts.verify(["01_toy"])
    parameters = nbformat.v4.new_code_cell("dry_run: bool = False", metadata={"tags": ["parameters"]})
    write(repository, parameters, "if dry_run: raise KeyError('seed')")
    assert f"{NOTEBOOK} failed: KeyError: 'seed'" in artifacts.verify(["01_toy"])
    with pytest.raises(FileNotFoundError, match="02_toy.* 01_toy"):
        next(artifacts.verify(["02_toy"]))
    assert run("verify", "--notebook", "02_toy")[0] == 2 == run("execute", "02_toy")[0]


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
