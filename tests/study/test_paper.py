"""The paper's sources: no literal results, nothing undefined, a sound bibliography, and a document that compiles."""

import csv
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from evoalign_study import claims, paths

SOURCES = [paths.PAPER / "main.tex", *sorted((paths.PAPER / "sections").glob("*.tex"))]
TEXT = {path.name: re.sub(r"(?<!\\)%.*", "", path.read_text(encoding="utf-8")) for path in SOURCES}
ALL = "\n".join(TEXT.values())
BIBLIOGRAPHY = (paths.PAPER / "references.bib").read_text(encoding="utf-8")

# A number before a percent sign or a word for it, unless it is the level of an interval, which is declared and not
# measured; and a decimal that is no length, no share of a page (\topfraction), and no part of a word (Qwen2.5).
_UNIT = r"\s*(?:in|pt|em|ex|cm|mm|\\(?:line|text|column)width)"
_LEVEL = r"9[05]\\,\\%\s(?:CI|intervals?)\b"
LITERAL = re.compile(
    rf"(?<!\d)(?!{_LEVEL})\d+(?:\s|~|\\,|\{{\}})*(?:\\%|per\s?cent|percentage|points?\b)"
    rf"|(?<!fraction\}}\{{)(?<![\w.])\d*\.\d+(?!\d|{_UNIT})"
)
# Number macros are in CamelCase, as hardly any command of LaTeX is.
NUMBERS = set(re.findall(r"\\([A-Z][a-z]+[A-Z][A-Za-z]*)", ALL)) - {"FloatBarrier"}
INPUTS = re.findall(r"\\input\{generated/([^}]+)\}", ALL)
SHOWN = [name for name in INPUTS if not name.startswith("numbers_")]


def _entries() -> list[tuple[str, str, dict[str, str]]]:
    """The bibliography: type, key and fields of each entry, a field being a balanced group in braces."""
    entries = []
    for found in re.finditer(r"^@(\w+)\{([^,\s]+),\n(.*?)^\}$", BIBLIOGRAPHY, re.MULTILINE | re.DOTALL):
        kind, key, body = found.groups()
        fields = {}
        for name, value in re.findall(r"^ *(\w+) *= *\{(.*)\},$", body, re.MULTILINE):
            assert value.count("{") == value.count("}"), f"{key}: unbalanced braces in {name}"
            fields[name] = value
        assert len(fields) == len(body.splitlines()), f"{key}: one field a line, in braces and with a comma"
        entries.append((kind, key, fields))
    return entries


ENTRIES = _entries()


@pytest.fixture
def generated() -> Path:
    """The folder of generated tables and numbers; skips before the first notebook has written it."""
    if not paths.GENERATED.is_dir():
        pytest.skip("paper/generated does not exist yet: notebook 01 writes it")
    return paths.GENERATED


# ---- text


@pytest.mark.parametrize(
    "text",
    [
        r"solves 41\% of them",
        r"41.2~\% of",
        r"41\,\%",
        r"95\,\% of the runs",
        r"195\,\% CI",
        "41 percent",
        "by 9 points",
        "a cosine of 0.0098",
        "about .7",
    ],
)
def test_a_literal_result_is_recognised(text: str) -> None:
    assert LITERAL.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "Qwen2.5 and TRL",
        r"\setlength{\columnsep}{0.25in}",
        r"\renewcommand{\topfraction}{0.9}",
        "$N=30$",
        r"(90\,\% CI \Low{} to \High)",
        r"nominal 95\,\% intervals",
        r"\EsGainMean{} points",
        "Section 3. Next",
    ],
)
def test_what_is_no_result_passes(text: str) -> None:
    assert not LITERAL.search(text)


@pytest.mark.parametrize("name", TEXT)
def test_no_literal_results(name: str) -> None:
    found = [TEXT[name][max(0, m.start() - 30) : m.end()] for m in LITERAL.finditer(TEXT[name])]
    assert not found, f"{name} holds a number that belongs into a macro of a notebook: {found}"


def test_every_section_is_part_of_the_paper() -> None:
    read = re.findall(r"\\input\{sections/([^}]+)\}", TEXT["main.tex"])
    assert sorted(read) == sorted(path.stem for path in SOURCES[1:])


def test_every_reference_has_its_label() -> None:
    labels = re.findall(r"\\label\{([^}]+)\}", ALL)
    assert len(set(labels)) == len(labels)
    # a generated file labels itself fig:NAME or tab:NAME, whichever it is
    known = {*labels, *(f"{kind}:{name}" for kind in ("fig", "tab") for name in SHOWN)}
    used = {label for group in re.findall(r"\\[cC]?ref\{([^}]+)\}", ALL) for label in group.split(",")}
    assert used <= known, f"no label for {sorted(used - known)}"
    assert {name for name in SHOWN if not {f"fig:{name}", f"tab:{name}"} & used} == set(), "a float nobody refers to"


def test_claims_named_in_the_text_are_declared() -> None:
    named = set(re.findall(r"[cC]laims?~(\w+)", ALL))
    assert named and named <= {claim["id"] for claim in claims.load_claims()}


# Verdicts that the prose of the paper and of the README states: written by hand, so a new verdict needs new prose.
SAID = {
    "E1": "not evidence",
    "E1b": "supported",
    "E5": "supported",
    "E6": "contradicted",
    "E6b": "supported",
    "E7": "supported",
    "E8": "supported",
    "E9": "supported",
    "E10": "supported",
    "E11": "supported",
    "C2": "superseded",
    "C3": "depends on decoding",
    "C3b": "superseded",
    "C3c": "depends on decoding",
    "C5": "depends on decoding",
    "C6": "contradicted",
    "C7": "underpowered",
    "C8": "supported",
    "C9": "not evidence",
    "C9b": "contradicted",
    "C18b": "supported",
    "C20": "not evidence",
    "C22": "not evidence",
    "C23": "contradicted",
    "C25": "underpowered",
    "C26": "not evidence",
    "C27": "contradicted",
    "C28": "contradicted",
    "C33": "not evidence",
    "C33b": "supported",
    "C35": "depends on decoding",
    "C37": "not evidence",
    "C37b": "supported",
}


@pytest.mark.parametrize("claim", SAID)
def test_the_text_says_the_verdicts_of_now(generated: Path, claim: str) -> None:
    with (generated / "claims.csv").open(encoding="utf-8", newline="") as file:
        verdicts = {row["claim"]: row["verdict"] for row in csv.DictReader(file)}
    assert re.search(rf"[cC]laims?[^.;:]*~{claim}\b", ALL), f"the text no longer names {claim}: leave it out of SAID"
    assert verdicts[claim] == SAID[claim], f"rewrite what the paper and the README say of {claim}, and SAID"


def test_every_verdict_is_defined() -> None:
    for verdict in claims.VERDICTS:
        assert rf"\emph{{{verdict}}}:" in TEXT["appendix_method.tex"], f"the appendix does not define {verdict!r}"


# ---- form


def test_the_abstract_is_short() -> None:
    # one word a number, none for what only sets type
    text = re.sub(
        r"\\(?:begin|end)\{[^}]*\}(?:\{[^}]*\})*|\\item\\relax|\\large|\\bfseries|\\\w+=[\d.]+(?:em|pt)",
        " ",
        TEXT["abstract.tex"],
    )
    words = re.sub(r"\\([A-Za-z]+)(?:\{\})?", r"\1 ", text).split()
    assert 100 < len(words) < 200, f"{len(words)} words"


def test_related_work_holds_none_of_our_results() -> None:
    assert not set(re.findall(r"\\(\w+)", TEXT["related_work.tex"])) & NUMBERS
    assert not re.search(r"[cC]laims?~|\\[cC]ref", TEXT["related_work.tex"])


def test_every_section_shows_or_says_something() -> None:
    for name, text in TEXT.items():
        headings = [
            (len(m[1]) // 3, m[2], m.start(), m.end()) for m in re.finditer(r"\\((?:sub)*)section\{([^}]*)\}", text)
        ]
        for i, (depth, title, _, start) in enumerate(headings):
            # up to the next heading that is no part of this one
            end = next((begin for other, _, begin, _ in headings[i + 1 :] if other <= depth), len(text))
            assert len(re.sub(r"\\label\{[^}]*\}|\s", "", text[start:end])) > 40, f"{name}: {title!r} is empty"


def test_the_short_table_of_claims_has_the_verdicts_of_now(generated: Path) -> None:
    table = re.search(r"\\label\{tab:claims_short\}(.*?)\\end\{tabular\}", ALL, re.DOTALL)
    assert table, "the paper shows no table of claims in its text"
    rows = dict(re.findall(r"^([EC]\d+\w?) & .*? & (.*?) & .*\\\\$", table[1], re.MULTILINE))
    with (generated / "claims.csv").open(encoding="utf-8", newline="") as file:
        verdicts = {row["claim"]: row["verdict"] for row in csv.DictReader(file)}
    assert rows == {claim: verdicts[claim] for claim in rows}
    left_out = ("open", "not testable at this scale", "superseded")
    judged = {claim for claim, verdict in verdicts.items() if verdict not in left_out}
    assert judged - set(rows) <= {"E4"}, "C38 says the same of tuned runs as E4"


# ---- generated files


def test_the_paper_reads_numbers_and_claims() -> None:
    assert NUMBERS and "claims" in SHOWN and len(SHOWN) == len(set(SHOWN))
    assert [name for name in INPUTS if name.startswith("numbers_")]


def test_generated_inputs_exist(generated: Path) -> None:
    missing = [name for name in INPUTS if not (generated / f"{name}.tex").is_file()]
    assert not missing, f"the paper reads generated/{missing[0]}.tex, which no notebook has written"


def test_generated_figures_exist(generated: Path) -> None:
    for name in SHOWN:
        text = (generated / f"{name}.tex").read_text(encoding="utf-8")
        pictures = re.findall(r"\\includegraphics\{([^}]+)\}", text)
        missing = [picture for picture in pictures if not (paths.FIGURES / picture).is_file()]
        assert not missing, f"generated/{name}.tex shows figures/{missing[0]}, which is not there"


def test_number_macros_are_defined(generated: Path) -> None:
    read = [(generated / f"{name}.tex").read_text(encoding="utf-8") for name in INPUTS if name.startswith("numbers_")]
    defined = set(re.findall(r"\\newcommand\{\\(\w+)\}", "".join(read)))
    assert defined >= NUMBERS, f"no notebook saves the numbers {sorted(NUMBERS - defined)}"


# ---- bibliography

_REQUIRED = {
    "article": {"author", "title", "journal", "year"},
    "inproceedings": {"author", "title", "booktitle", "year"},
    "misc": {"author", "title", "howpublished", "year"},
}


def test_the_whole_bibliography_was_read() -> None:
    assert len(ENTRIES) == len(re.findall(r"^@", BIBLIOGRAPHY, re.MULTILINE)) > 0


def test_citations_and_entries_agree() -> None:
    groups = re.findall(r"\\cite[a-z]*\*?(?:\[[^]]*\])*\{([^}]+)\}", ALL)
    cited = {key.strip() for group in groups for key in group.split(",")}
    keys = {key for _, key, _ in ENTRIES}
    assert cited <= keys, f"not in references.bib: {sorted(cited - keys)}"
    assert keys <= cited, f"cited nowhere: {sorted(keys - cited)}"


def test_no_entry_is_there_twice() -> None:
    keys = [key.lower() for _, key, _ in ENTRIES]
    titles = [re.sub("[^a-z0-9]", "", fields["title"].lower()) for *_, fields in ENTRIES]
    arxiv = re.findall(r"arXiv:(\d{4}\.\d{5})", BIBLIOGRAPHY)
    for values in (keys, titles, arxiv):
        assert sorted(set(values)) == sorted(values)


@pytest.mark.parametrize(("kind", "key", "fields"), ENTRIES, ids=[key for _, key, _ in ENTRIES])
def test_entries_are_complete(kind: str, key: str, fields: dict[str, str]) -> None:
    assert kind in _REQUIRED, f"{key}: entry type {kind}"
    assert fields.keys() >= _REQUIRED[kind] and all(fields.values())
    assert re.fullmatch("(19|20)[0-9]{2}", fields["year"])
    if "arXiv" in fields.get("journal", ""):
        number = re.fullmatch(r"arXiv preprint arXiv:(\d\d)(\d\d)\.\d{5}(v\d+)?", fields["journal"])
        assert number and fields["year"] == f"20{number[1]}" and 1 <= int(number[2]) <= 12


# ---- the document


def _latexmk(paper: Path, out: Path) -> tuple[int, str]:
    """Compile a copy of paper/ as the Makefile does; return the exit status and the log."""
    command = ["latexmk", "-pdf", "-interaction=nonstopmode", "-halt-on-error", f"-outdir={out}", "main.tex"]
    # unbroken lines in the log
    environment = {**os.environ, "max_print_line": "1000"}
    done = subprocess.run(command, cwd=paper, env=environment, capture_output=True, timeout=300)
    return done.returncode, (out / "main.log").read_text(encoding="latin-1")


needs_latex = pytest.mark.skipif(
    not shutil.which("latexmk"),
    reason="latexmk is not installed (apt-get install latexmk texlive-latex-extra texlive-fonts-recommended)",
)


@needs_latex
def test_the_paper_compiles(generated: Path, tmp_path: Path) -> None:
    status, log = _latexmk(paths.PAPER, tmp_path)
    assert status == 0, "\n".join(re.findall(r"^!.*|^l\.\d+.*", log, re.MULTILINE)) or log[-2000:]
    undefined = re.findall(r"Warning: .*(?:undefined|multiply.defined).*", log)
    assert not undefined, "\n".join(undefined)
    wide = [line for line, points in re.findall(r"^(Overfull \\hbox \(([\d.]+)pt.*)", log, re.M) if float(points) > 5]
    assert not wide, f"wider than its column (a figure of page width in a float of one column?): {wide}"
    assert (tmp_path / "main.pdf").stat().st_size > 0
    pages = dict(
        re.findall(r"\\newlabel\{([^}@]+)\}\{\{[^}]*\}\{(\d+)\}", (tmp_path / "main.aux").read_text(encoding="utf-8"))
    )
    assert int(pages["main:end"]) <= 8, "the text before the references is longer than eight pages"
    assert any(page == "1" for label, page in pages.items() if label.startswith("fig:")), "no figure on page 1"


@needs_latex
def test_a_missing_generated_file_stops_the_build(tmp_path: Path) -> None:
    shutil.copytree(paths.PAPER, tmp_path / "paper", ignore=shutil.ignore_patterns("generated", "results"))
    status, log = _latexmk(tmp_path / "paper", tmp_path / "out")
    assert status != 0 and re.search(rf"File `generated/{INPUTS[0]}.*' not found", log)
