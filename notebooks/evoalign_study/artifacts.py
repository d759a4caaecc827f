"""Figures, tables and numbers with their provenance, and the check that they agree with the committed records.

A `Store` writes every artefact from records, and lists it in manifest.json with the records behind it, the versions of
the packages and the commits at which the runs were started. Text artefacts (csv, tex, md, json) drawn from the same
records have the same bytes; `verify` draws them again and compares. The bytes of pictures and of a notebook's outputs
depend on the machine, so the manifest keeps the SHA-256 that they had when drawn or executed. A notebook displays what
its store saves; `show` and `answers` display what is not saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoalign_lib.checks import choose, require
from evoalign_lib.files import canonical_json, locked, replace_text
from evoalign_study import claims, execution, history, paths, real_results, rendering, style
from evoalign_study.claims import Verdict
from evoalign_study.records import SCALES, index_problems, record_files, run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

VERSIONS = ("python", "torch", "transformers", "numpy", "evoalign")
"""Packages whose versions, as stored in the records, go into the manifest."""

_PICTURES = (".pdf", ".png")
_REPLACED = "is not the picture that was drawn: restore it from git, or execute its notebook"
_PRINT_DPI = 200
_SHOWN_WIDTH = 120  # screen pixels per inch of a figure: its letters match the size of the text around it
_SMOKE = "smoke run: numbers mean nothing"


class Shown:
    """Outputs that a notebook displays, as the value of a cell or by `display`; their texts are the same each time."""

    def __init__(self, *outputs: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Store the outputs, which are displayed in this order.

        Args:
            *outputs: pairs of MIME type -> content, including "text/plain", and MIME type -> metadata.
        """
        self.outputs = outputs

    def _ipython_display_(self) -> None:
        from IPython import get_ipython
        from IPython.display import display

        for contents, metadata in self.outputs:
            if "text/html" in contents and hasattr(get_ipython(), "kernel"):
                # a notebook shows the HTML; repeating it as text would make the file a tenth larger
                contents = contents | {"text/plain": contents["text/plain"].partition("\n")[0]}
            display(contents, raw=True, metadata=metadata)

    def __repr__(self) -> str:
        """Return what a terminal shows."""
        return "\n".join(contents["text/plain"] for contents, _ in self.outputs)


def show(frame: DataFrame, caption: str, formats: dict[str, str] | None = None) -> Shown:
    """Return a table that a notebook shows but does not save, such as settings, verdicts or checks.

    Arguments and errors are those of `Store.save_table`.
    """
    return _shown_table(rendering.cell_text(frame, formats or {}), caption)


def answers(sentences: Mapping[str, str]) -> Shown:
    """Return questions and answers for a notebook to display.

    Args:
        sentences: question -> answer, with number, interval and n.

    Raises:
        ValueError: there are no sentences.
    """
    require(sentences, "no answers: pass question -> sentence, such as the study's answers(run, records)")
    plain = "\n".join(f"{question}\n    {answer}" for question, answer in sentences.items())
    return Shown(({"text/html": rendering.html_answers(sentences), "text/plain": plain}, {}))


def _shown_table(cells: DataFrame, caption: str, name: str = "") -> Shown:
    plain = f"{caption}\n\n{cells.to_string(index=False)}"
    contents = {"text/html": rendering.html_table(cells, caption), "text/plain": plain}
    return Shown((contents, {"evoalign": {"artefact": name}} if name else {}))


class Store:
    """Writes the artefacts of one notebook at one scale; several notebooks may run in parallel.

    Artefacts of committed records at their own scale go into the repository (figures/, paper/generated/); those of
    fresh records and smoke runs go into the folder EVOALIGN_RUN_DIR, by default runs/<notebook>-<scale>/.
    EVOALIGN_ARTIFACTS redirects everything. Artefacts of scale "full" get the suffix _full (numbers: Full) and are
    stored next to the tiny ones.
    """

    figures: Path
    """Folder for pictures and the plotted data."""
    generated: Path
    """Folder for tables, captions, number macros and the manifest."""

    def __init__(self, notebook: str, scale: str, records: list[dict[str, Any]], fresh: bool) -> None:
        """Prepare to write; nothing is written yet.

        Args:
            notebook: its name without suffix, such as "01_es_countdown".
            scale: "smoke", "tiny" or "full".
            records: all run records that the artefacts are drawn from.
            fresh: whether any of them was run just now.

        Raises:
            ValueError: an unknown scale, or no records.
            KeyError: a record without provenance.
        """
        choose("scale", scale, SCALES)
        require(records, f"no records for {notebook} at scale {scale}: pass those that its artefacts are drawn from")
        self.notebook, self.scale = notebook, scale
        redirect = os.environ.get("EVOALIGN_ARTIFACTS")
        if not redirect and not fresh and scale != "smoke":
            self.figures, self.generated = paths.FIGURES, paths.GENERATED
        else:
            folder = Path(redirect or run_folder(notebook, scale))
            self.figures, self.generated = folder / "figures", folder / "generated"
        self._record_hash, self._provenance = _provenance(records)

    def save_figure(self, fig: Figure, name: str, data: DataFrame, caption: str, of: str = "") -> Shown:
        """Write figures/NAME.pdf, .png and .csv (the plotted data), and generated/NAME.tex to include in the paper.

        Args:
            fig: the figure; it is closed.
            name: stem of the file names: lower-case letters, digits and _.
            data: one row per plotted point; floats are written with 4 significant digits.
            caption: plain text.
            of: as for `save_table`.

        Returns:
            The picture with its caption below, for the last line of a cell to display.
        """
        from matplotlib import pyplot as plt
        from matplotlib.backends.backend_pdf import FigureCanvasPdf

        name, optimize = self._name(name), self.scale != "smoke"
        if self.scale == "smoke":
            fig.text(0.5, 0.5, _SMOKE, ha="center", va="center", rotation=20, color="red", alpha=0.6, fontsize=11)
        files = [f"figures/{name}.{suffix}" for suffix in ("csv", "pdf", "png")] + [f"generated/{name}.tex"]
        self._register([name], "figure", files)
        self.figures.mkdir(parents=True, exist_ok=True)
        # as fig.savefig does it, but in one pass; without dates the same records give the same bytes
        fig.dpi = _PRINT_DPI  # of images in the PDF, such as maps
        FigureCanvasPdf(fig).print_pdf(self.figures / f"{name}.pdf", metadata={"CreationDate": None, "ModDate": None})
        (self.figures / f"{name}.png").write_bytes(style.png(fig, _PRINT_DPI, optimize))
        replace_text(self.figures / f"{name}.csv", rendering.csv_text(data))
        head = rf"\centering\includegraphics{{{name}.pdf}}"
        text = self._caption(caption, of=of)
        tex = [head, rf"\caption{{{rendering.tex_escape(text)}}}", rf"\label{{fig:{name}}}"]
        replace_text(self.generated / f"{name}.tex", "\n".join(tex) + "\n")
        picture = {"image/png": b64encode(style.embedded(fig, optimize)).decode(), "text/plain": f"<figure {name}>"}
        how = {"width": round(_SHOWN_WIDTH * fig.get_figwidth()), "alt": text.split(". ")[0]}
        plt.close(fig)  # or the notebook would show it again at the end of the cell
        below = {"text/html": f"<p><i>{escape(text)}</i></p>", "text/plain": text}
        return Shown((picture, {"image/png": how, "evoalign": {"artefact": name}}), (below, {}))

    def save_table(
        self,
        frame: DataFrame,
        name: str,
        caption: str,
        formats: dict[str, str] | None = None,
        published: bool = False,
        of: str = "",
    ) -> Shown:
        """Write generated/NAME.tex (caption, label and booktabs tabular, for a table environment) and .csv.

        Args:
            frame: column names become headers; cells are text, integers, or floats of a column named in `formats`.
            name: stem of the file names: lower-case letters, digits and _.
            caption: plain text; notebook and scale are appended.
            formats: column -> format specification, such as ".1f".
            published: whether the table quotes the literature; the caption then says so, and no records are named.
            of: what the records are about, if not the scale's own models; the caption names it instead of the scale.

        Returns:
            The table with its caption above, for the last line of a cell to display.

        Raises:
            ValueError: a float column without a format, a format without a column, or a name that is taken.
        """
        name, cells = self._name(name), rendering.cell_text(frame, formats or {})
        text = self._caption(caption, published, of)
        self._register([name], "table", [f"generated/{name}.{suffix}" for suffix in ("csv", "tex")], published)
        replace_text(self.generated / f"{name}.tex", rendering.tex_table(cells, name, text))
        replace_text(self.generated / f"{name}.csv", rendering.csv_text(frame))
        return _shown_table(cells, text, name)

    def save_numbers(self, numbers: Mapping[str, tuple[float | str, str]]) -> None:
        r"""Define TeX macros \NAME in generated/numbers_<notebook>.tex, and write their texts to the .json beside it.

        Existing macros with these names are replaced; the others are kept.

        Args:
            numbers: name -> (number or text, format specification), such as {"GainGreedy": (12.3, ".1f")}.

        Raises:
            ValueError: a name that is not letters only, which TeX requires; nothing is written then.
        """
        for name in numbers:
            letters = re.fullmatch("[A-Za-z]+", name)
            require(letters, f"number {name!r}: a TeX macro has a name of letters only, such as GainGreedy")
        suffix = "Full" if self.scale == "full" else ""
        texts = {name + suffix: format(value, fmt) for name, (value, fmt) in numbers.items()}
        stem = f"numbers_{self.notebook}" + ("_full" if self.scale == "full" else "")
        self._register(texts, "number", [f"generated/{stem}.json", f"generated/{stem}.tex"])
        texts = _read_json(self.generated / f"{stem}.json") | texts
        replace_text(self.generated / f"{stem}.json", rendering.pretty_json(texts))
        replace_text(self.generated / f"{stem}.tex", rendering.tex_numbers(texts))

    def _name(self, name: str) -> str:
        plain, what = re.fullmatch("[a-z0-9_]+", name), f"artefact name {name!r}"
        require(plain, f"{what} becomes a file name: use lower-case letters, digits and _")
        free = name not in ("claims", "manifest") and not name.startswith("numbers_")
        require(free, f"{what} is reserved for a generated file: use another")
        return name + ("_full" if self.scale == "full" else "")

    def _caption(self, caption: str, published: bool = False, of: str = "") -> str:
        number = self.notebook.split("_")[0]
        if published:
            return f"{caption} (published, other models; notebook {number})"
        warning = f" {_SMOKE.upper()}." if self.scale == "smoke" else ""
        return f"{caption}{warning} (notebook {number}, {of or f'scale {self.scale}'})"

    def _register(self, names: Iterable[str], kind: str, files: Sequence[str], published: bool = False) -> None:
        """Enter in the manifest artefacts that share their files, with the records behind them."""
        path = self.generated / "manifest.json"
        entry = {"kind": kind, "notebook": self.notebook, "scale": self.scale, "files": sorted(files)}
        with locked(path):
            manifest = _read_manifest(path)
            for name in names:
                owner = manifest["artefacts"].get(name, entry)
                said = f"{name!r} is already a {owner['kind']} of {owner['notebook']} at {owner['scale']}"
                own = all(owner[key] == entry[key] for key in ("notebook", "scale", "kind"))
                require(own, f"{said}: use another name")
                manifest["artefacts"][name] = entry | {"records": None if published else self._record_hash}
            manifest["records"][self._record_hash] = self._provenance
            _write_manifest(path, manifest)


_README_BLOCK = re.compile(r"(<!-- claims -->\n)(.*?)(<!-- /claims -->)", re.DOTALL)


def render_readme_block(markdown: str) -> None:
    """Replace the text between <!-- claims --> and <!-- /claims --> in README.md, if it has that block."""
    path = paths.ROOT / "README.md"
    with locked(path):
        old = _text(path)
        if (new := _README_BLOCK.sub(lambda found: found[1] + markdown + found[3], old)) != old:
            replace_text(path, new)


_CLAIMS = [
    *(f"generated/{name}" for name in ("claims.csv", "claims.md", "claims.tex")),
    *(f"generated/{name}" for name in ("claims_real.md", "claims_real.tex", "real_model.tex")),
]
_CLAIM = {"claim": "id", "statement": "statement", "verdict": "verdict", "key": "key", "result": "text"}
_CLAIM |= {name: name for name in ("placebo", "control", "decodings", "n", "units", "scale")} | {"rule": "rule_hash"}
"""Column of the table of claims -> field of a verdict."""


def save_claims(verdicts: Iterable[Verdict], generated: Path) -> str:
    """Write the claims with their verdicts into a folder.

    All go into claims.csv, those of tiny models into claims.tex, the README's into claims.md, what was predicted of a
    real model and found into claims_real.tex and claims_real.md, and what its runs solve into real_model.tex.

    Returns:
        The README's table.
    """
    from pandas import DataFrame

    verdicts = list(verdicts)
    table = DataFrame([{column: getattr(v, field) for column, field in _CLAIM.items()} for v in verdicts])
    replace_text(generated / "claims.csv", rendering.csv_text(table))
    how = (
        "Declared claims, with the verdicts that code computed from the committed records of scale tiny (tiny models, "
        "trained from scratch): the finding that is strongest against the claim, with the units in its smallest cell, "
        "and arms that learn nothing and pass its rule. Statements, all comparisons and checks: "
        "paper/generated/claims.csv."
    )
    ragged = r">{\raggedright\arraybackslash}"  # columns too narrow to be justified
    columns = "l" + "".join(rf"{ragged}p{{{width}\linewidth}}" for width in (0.32, 0.18, 0.39))
    rows = [[v.id, v.title, v.verdict + _passed(v.placebo), v.key] for v in verdicts]
    cells = DataFrame(rows, columns=["claim", "in short", "verdict", "deciding finding"])
    text = rendering.tex_long_table(cells[table["scale"] == "tiny"], "claims", how, columns)
    replace_text(generated / "claims.tex", text)
    records = claims.committed_records("real")
    real, facts = (real_results.groups(records, task) for task in ("arithmetic", "facts"))
    found = real_results.results(real, facts, [v for v in verdicts if v.scale == "real"])
    replace_text(generated / "real_model.tex", _real_model(real, found))
    _save_predictions(real_results.predictions(verdicts, found, _numbers()), generated)
    markdown = _claims_of_the_field(verdicts)
    replace_text(generated / "claims.md", markdown)
    return markdown


def _passed(placebo: str) -> str:
    """Return which null arms passed a claim's rule, to stand behind its verdict."""
    found = re.match("(passed by .*?)(;|$)", placebo)
    return "; " + re.sub(r" \(n = \d+\)", "", found[1]) if found else ""


def _numbers() -> dict[str, str]:
    """Return all numbers that the paper quotes, macro -> text."""
    files = sorted(paths.GENERATED.glob("numbers_*.json"))
    return {name: text for file in files for name, text in _read_json(file).items()}


def _save_predictions(cells: DataFrame, generated: Path) -> None:
    """Write the table of predictions, in which misses are bold; empty files without claims of scale real."""
    caption = (
        "What the tiny world predicted of SmolLM2-135M-Instruct (4-bit, dequantised), and what its runs found, judged "
        "by rules declared before them. Intervals: 95 %; six seeds decide. Statements: paper/generated/claims.csv."
    )
    ragged = "".join(rf">{{\raggedright\arraybackslash}}p{{{width}\linewidth}}" for width in (0.34, 0.42, 0.13))
    tex = rendering.tex_long_table(cells, "claims_real", f"{caption} (scales tiny and real)", f"l{ragged}")
    text = f"# What the tiny world predicted of a real model\n\n{rendering.markdown_table(cells, caption)}"
    replace_text(generated / "claims_real.tex", tex.replace("& miss", r"& \textbf{miss}") if len(cells) else "")
    replace_text(generated / "claims_real.md", text.replace("| miss", "| **miss**") if len(cells) else "")


def _real_model(of: Mapping[str, Sequence[Any]], found: Mapping[str, Any]) -> str:
    """Return the table of what the real model's runs solve, a row an arm; empty without records."""
    from pandas import DataFrame

    rows = []
    for arm in (arm for arm in ("base", *real_results.ARMS) if f"{arm} greedy" in found):
        row = {"arm": style.ARMS[arm].label, "n": str(len(of[arm]))}
        for head, name in {"greedy": f"{arm} greedy", "at 0.6": f"{arm} t0.6", "at 1": f"{arm} t1"}.items():
            spread = f" ({100 * found[f'std {name}']:.1f})" if f"std {name}" in found else ""
            row[head] = f"{100 * found[name].value:.1f}{spread}"
        rows.append(row)
    caption = "SmolLM2-135M-Instruct: test products solved, %, greedily and sampled (standard deviation over runs)"
    return rendering.tex_table(DataFrame(rows), "real_model", f"{caption}. (scale real)") if rows else ""


_README_CLAIMS = ("C1", "C2", "C10", "C16", "C19", "C22", "C31", "C36")
"""Claims of the field that the README shows; the others are a link away."""


def _claims_of_the_field(verdicts: Sequence[Verdict]) -> str:
    """Return the README's table of some claims of the field, each by its latest verdict, and how many there are."""
    from pandas import DataFrame

    latest: dict[str, Any] = {}  # C2b is another rule for C2; E: checks of this project's own engine
    for v in verdicts:
        name = v.id.rstrip("abcdefgh")
        if name.startswith("C") and (v.rule != "open" or name not in latest):
            latest[name] = v
    found = [v.verdict for v in latest.values()]
    underpowered, waiting = found.count("underpowered"), sum(map(found.count, ("open", "not testable at this scale")))
    shown = [latest[name] for name in _README_CLAIMS if name in latest]
    rows = [{"claim": f"{v.id} {v.title}", "verdict": v.verdict} for v in shown]
    caption = (
        f"Of {len(latest)} claims of the field code judges {len(latest) - underpowered - waiting}; {underpowered} are "
        f"underpowered, {waiting} wait for their notebook or larger models "
        "([all, with intervals](paper/generated/claims.csv)). A letter marks a rule declared after the data of the "
        "first were seen. `not evidence`: an arm that learned nothing passes, too."
    )
    return rendering.markdown_table(DataFrame(rows), caption)


def verify(notebooks: list[str] | None = None, write: bool = False, drawn: Path | None = None) -> Iterator[str]:
    """Compare the committed records with their index, and redraw and compare the committed artefacts.

    The quick checks come first: the indices (`record_problems`) and the lock of the claims (`claims.lock_problems`). If
    they find a problem, nothing is drawn. Then each notebook is executed as committed, by this interpreter, into a
    temporary folder; runs without a record are named, not made. The csv, tex and json files, the notebook's part of the
    manifest, and the table of claims, also in the README, are compared byte for byte. Pictures and the outputs of
    notebooks must have the SHA-256 that the manifest keeps; a picture may also be the one just drawn.

    Args:
        notebooks: names without suffix; None for all that have committed records (then stray files are reported, too).
        write: replace the committed artefacts, pictures included, by those just drawn, instead of comparing.
        drawn: a folder into which the notebooks have already been drawn, as by nbval with EVOALIGN_ARTIFACTS: nothing
            is executed, and changes to notebooks or records since then go unnoticed.

    Yields:
        A line per problem as soon as it is found; none if everything agrees (or, with write, was drawn).

    Raises:
        FileNotFoundError: a named notebook has no committed records.
        ValueError: claims or their lock cannot be read, or the records cannot decide the claims.
    """
    committed = [path.parent.name for path in record_files("tiny")]
    if missing := sorted(set(notebooks or []) - set(committed)):
        raise FileNotFoundError(f"no paper/results/{missing[0]}/tiny.jsonl. Use one of: {', '.join(committed)}")
    unlike = [*record_problems(), *claims.lock_problems()]
    yield from unlike
    if unlike:
        return
    chosen = notebooks or committed
    with tempfile.TemporaryDirectory() as folder:
        folders = {notebook: drawn or Path(folder) / notebook for notebook in chosen}
        failures = execution.execute_all(folders) if drawn is None else [None] * len(folders)
        for (notebook, place), failure in zip(folders.items(), failures, strict=True):
            if failure:
                yield failure
            elif write:
                _adopt(notebook, place)
            else:
                yield from _compare(notebook, place)
    verdicts = claims.evaluate_all("tiny")
    if write:
        render_readme_block(save_claims(verdicts, paths.GENERATED))
        return
    with tempfile.TemporaryDirectory() as folder:
        markdown = save_claims(verdicts, Path(folder) / "generated")
        yield from _compare_files(Path(folder), _CLAIMS)
    blocks = "".join(found[1] for found in _README_BLOCK.findall(_text(paths.ROOT / "README.md")))
    if difference := rendering.first_difference(blocks, markdown):
        yield f"README.md: the block <!-- claims --> differs: {difference}"
    if notebooks is None:
        yield from _unaccounted(chosen)
        yield from _changed_outputs()


def redraw(notebook: str) -> None:
    """Execute a notebook in place, and replace its committed artefacts by what it drew.

    Raises:
        FileNotFoundError, ValueError: as for `execution.execute`; nothing is changed then.
    """
    with tempfile.TemporaryDirectory() as folder:
        execution.execute(notebook, Path(folder))
        _adopt(notebook, Path(folder), execution.outputs_digest(paths.NOTEBOOKS / f"{notebook}.ipynb"))


def record_problems() -> list[str]:
    """Return the problems of the committed records of all scales: index, git history and benchmark."""
    files = {*record_files(), *(path.with_suffix(".jsonl") for path in paths.RESULTS.glob("*/*.index"))}
    problems = [problem for path in sorted(files) for problem in index_problems(path)] + lost_from_history()
    bench, kept = paths.RESULTS / "bench.json", paths.RESULTS / "bench.sha256"
    if bench.exists() or kept.exists():
        found = _sha256(bench) if bench.exists() else "no file"
        if not kept.exists() or kept.read_text(encoding="utf-8").strip() != found:
            problems.append(f"{bench} does not have the SHA-256 in {kept}: restore both from git, or measure again")
    return problems


def lost_from_history() -> list[str]:
    """Report each index line that some commit added and that is now gone; nothing without a git history.

    A withdrawn record is not reported if LOG.md quotes the first 12 digits of the SHA-256 of its line.
    """
    once = history.added_lines("paper/results/*/*.index")
    log = _text(paths.ROOT / "LOG.md")
    now = {file: set(_text(file).splitlines()) for file, _ in once}
    return [
        f"{file} has lost the line of spec {line[:16]}, which git has: restore records and index from git, or say in "
        f"LOG.md why the record was withdrawn, and quote {line[17:29]}"
        for file, line in once
        if line not in now[file] and line[17:29] not in log
    ]


def _compare(notebook: str, folder: Path) -> list[str]:
    """Return how a notebook's artefacts, just drawn into a folder, differ from the committed ones."""
    places = paths.GENERATED, folder / "generated"
    committed, drawn = (_entries(place / "manifest.json", notebook) for place in places)
    difference = rendering.first_difference(*map(rendering.pretty_json, (committed, drawn)))
    problems = [f"manifest.json: the entries of {notebook} differ: {difference}"] if difference else []
    return problems + _compare_files(folder, sorted({file for entry in drawn.values() for file in entry["files"]}))


def _compare_files(folder: Path, files: Iterable[str]) -> list[str]:
    """Return how files just drawn, named as in the manifest, differ from the committed ones."""
    problems, pictures = [], _read_manifest(paths.GENERATED / "manifest.json")["pictures"]
    for file in files:
        drawn, committed = folder / file, _committed(file)
        if not committed.exists():
            problems.append(f"{file} is missing")
        elif file.endswith(_PICTURES):
            if _sha256(committed) not in (pictures.get(file), _sha256(drawn)):
                problems.append(f"{file} {_REPLACED}")
        elif difference := rendering.first_difference(*(p.read_text(encoding="utf-8") for p in (committed, drawn))):
            problems.append(f"{file} differs: {difference}")
    return problems


def _unaccounted(compared: Sequence[str]) -> list[str]:
    """Return manifest entries without their records or files, and files that no entry accounts for.

    Entries of the notebooks just compared are left out.
    """
    manifest, problems = _read_manifest(paths.GENERATED / "manifest.json"), []
    known = {"generated/manifest.json", *_CLAIMS}
    for name, entry in sorted(manifest["artefacts"].items()):
        notebook, scale = entry["notebook"], entry["scale"]
        known |= set(entry["files"])
        if scale == "tiny" and notebook in compared:
            continue
        if not (paths.RESULTS / notebook / f"{scale}.jsonl").exists():
            problems.append(f"manifest.json: {name} belongs to {notebook} at {scale}, which has no records: delete it")
        for file in entry["files"]:
            if not _committed(file).exists():
                problems.append(f"manifest.json: {name} names {file}, which is missing: restore it from git")
            elif file in manifest["pictures"] and manifest["pictures"][file] != _sha256(_committed(file)):
                problems.append(f"{file} {_REPLACED}")
    present = [f"{path.parent.name}/{path.name}" for f in (paths.FIGURES, paths.GENERATED) for path in f.glob("[!.]*")]
    return problems + [f"{file} is extra: no notebook makes it" for file in sorted(set(present) - known)]


def _changed_outputs() -> list[str]:
    """Report the notebooks whose outputs differ from those of their last execution."""
    kept = _read_manifest(paths.GENERATED / "manifest.json")["outputs"]
    return [
        f"notebooks/{path.name} has outputs that `python -m evoalign_study execute` did not write: restore it from git "
        "or execute it"
        for path in sorted(paths.NOTEBOOKS.glob("*.ipynb"))
        if execution.outputs_digest(path) != kept.get(path.stem)
    ]


def _adopt(notebook: str, folder: Path, outputs: str | None = None) -> None:
    """Replace a notebook's committed artefacts by those just drawn into a folder.

    outputs: the digest of what it displayed, if it was executed in place.
    """
    path = paths.GENERATED / "manifest.json"
    drawn = _read_manifest(folder / "generated" / "manifest.json")
    with locked(path):
        manifest = _read_manifest(path)
        own = _entries(path, notebook).keys()
        if taken := (manifest["artefacts"].keys() - own) & drawn["artefacts"].keys():
            raise ValueError(f"{min(taken)!r} of {notebook} is already an artefact of another notebook: rename it")
        for name in own:
            for file in manifest["artefacts"].pop(name)["files"]:
                _committed(file).unlink(missing_ok=True)
        manifest["artefacts"] |= drawn["artefacts"]
        manifest["records"] |= drawn["records"]
        files = [file for entry in drawn["artefacts"].values() for file in entry["files"]]
        manifest["pictures"] |= {file: _sha256(folder / file) for file in files if file.endswith(_PICTURES)}
        if outputs is not None:
            manifest["outputs"][notebook] = outputs
        _write_manifest(path, manifest)
    for file in files:
        _committed(file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / file, _committed(file))


def _committed(file: str) -> Path:
    """Return the path in the repository of a file named as in the manifest ("figures/...", "generated/...")."""
    folder, name = file.split("/")
    return {"figures": paths.FIGURES, "generated": paths.GENERATED}[folder] / name


def _entries(path: Path, notebook: str) -> dict[str, dict[str, Any]]:
    """Return the manifest's entries of a notebook at scale tiny, each with the provenance of its records."""
    manifest = _read_manifest(path)
    return {
        name: entry | {"provenance": manifest["records"].get(entry["records"])}
        for name, entry in manifest["artefacts"].items()
        if (entry["notebook"], entry["scale"]) == (notebook, "tiny")
    }


def _provenance(records: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return a hash of the records that ignores their order, and their specs, versions and commits."""
    lines = sorted(canonical_json(record) for record in records)
    environments = [record["environment"] for record in records]
    named = {package: {e[package] for e in environments if package in e} for package in VERSIONS}
    return hashlib.sha256("\n".join(lines).encode()).hexdigest(), {
        "specs": sorted({record["spec_hash"] for record in records}),
        "versions": {package: sorted(versions) for package, versions in named.items() if versions},
        "commits": sorted({record["commit"] for record in records}),
    }


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    return {"artefacts": {}, "records": {}, "pictures": {}, "outputs": {}} | _read_json(path)


def _write_manifest(path: Path, manifest: dict[str, dict[str, Any]]) -> None:
    """Write a manifest, leaving out records and pictures that belong to none of its artefacts."""
    entries = manifest["artefacts"].values()
    used = {"records": {entry["records"] for entry in entries}, "pictures": {f for e in entries for f in e["files"]}}
    kept = {part: {n: manifest[part][n] for n in manifest[part].keys() & names} for part, names in used.items()}
    replace_text(path, rendering.pretty_json(manifest | kept))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
