"""The paper's sources: no literal results, nothing undefined, a sound bibliography, and a document that compiles."""

import csv
import os
import re
import shutil
import subprocess
from pathlib import Path
from statistics import mean, stdev

import pytest
from evoalign_study import claims, paths

SOURCES = [paths.PAPER / "main.tex", *sorted((paths.PAPER / "sections").glob("*.tex"))]
TEXT = {path.name: re.sub(r"(?<!\\)%.*", "", path.read_text(encoding="utf-8")) for path in SOURCES}
ALL = "\n".join(TEXT.values())
MAIN = "\n".join(text for name, text in TEXT.items() if not name.startswith("appendix"))
BIBLIOGRAPHY = (paths.PAPER / "references.bib").read_text(encoding="utf-8")

# A number before a percent sign or a word for it, unless it is the level of an interval, which is declared and not
# measured; and a decimal that is no length, no temperature of samples, and no part of a word (Qwen2.5).
_UNIT = r"\s*(?:in|pt|em|ex|cm|mm|\\(?:line|text|column)width)"
_LEVEL = r"9[05]\\,\\%\s(?:CI|intervals?)\b"
LITERAL = re.compile(
    rf"(?<!\d)(?!{_LEVEL})\d+(?:\s|~|\\,|\{{\}})*(?:\\%|per\s?cent|percentage|points?\b)"
    rf"|(?<!temperature~)(?<![\w.])\d*\.\d+(?!\d|{_UNIT})"
)
# Number macros are in CamelCase, as hardly any command of LaTeX is.
NUMBERS = set(re.findall(r"\\([A-Z][a-z]+[A-Z][A-Za-z]*)", ALL)) - {"FloatBarrier"}
INPUTS = re.findall(r"\\input\{generated/([^}]+)\}", ALL)
SHOWN = [name for name in INPUTS if not name.startswith("numbers_")]


@pytest.mark.parametrize("name", TEXT)
def test_no_literal_results(name: str) -> None:
    found = [TEXT[name][max(0, m.start() - 30) : m.end()] for m in LITERAL.finditer(TEXT[name])]
    assert not found, f"{name} holds a number that belongs into a macro of a notebook: {found}"


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
    "not evidence": "E1 C9 C18 C20 C22 C23b C24b C26 C33 C37",
    "supported": "E1b E5 E6b E7 E8 E9 E10 E11 E14 C2c C10 C16b C21b C29 C33b C37b C38",
    "contradicted": "E6 E12 E13 C1 C15c C19b C28b C36",
    "superseded": "C2b C3b",
    "depends on decoding": "C3 C31",
    "within margin": "C30",
    "undecided": "C7",
    "underpowered": "C3d C4 C5b C5c C6b C8c C11 C12b C13b C14b C18c C25 C27b C32b C34 C35b",
    "open": "C9c",
}


def verdicts_of_now() -> dict[str, str]:
    """Claim -> its verdict on tiny models."""
    with (paths.GENERATED / "claims.csv").open(encoding="utf-8", newline="") as file:
        return {row["claim"]: row["verdict"] for row in csv.DictReader(file) if row["scale"] == "tiny"}


@pytest.mark.parametrize("verdict", SAID)
def test_the_text_says_the_verdicts_of_now(verdict: str) -> None:
    for claim in SAID[verdict].split():
        assert re.search(rf"[cC]laims?[^.;:]*~{claim}\b", ALL), f"the text no longer names {claim}: take it from SAID"
        assert verdicts_of_now()[claim] == verdict, f"rewrite what the paper and the README say of {claim}, and SAID"


def test_what_the_readme_says_of_claims_is_in_the_main_text() -> None:
    readme = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    claimed = re.findall(r"^\| ([EC]\d+\w?) ", readme, re.MULTILINE)
    assert claimed and not [claim for claim in claimed if not re.search(rf"[cC]laims?[^.;:]*~{claim}\b", MAIN)]


def test_the_short_table_of_claims_has_the_verdicts_of_now() -> None:
    table = re.search(r"\\label\{tab:claims_short\}(.*?)\\end\{tabular\}", MAIN, re.DOTALL)
    assert table, "the paper shows no table of claims in its text"
    rows = re.findall(r"^([EC]\d+\w?) & [^&]+ & ([^&]+) & ([^&]+) & .*\\\\$", table[1], re.MULTILINE)
    assert 1 < len(rows) == table[1].count("\\\\") - 1 <= 12, "more rows than a reader takes in before the results"
    verdicts = verdicts_of_now()
    for claim, source, verdict in rows:
        assert verdict == verdicts[claim], claim
        assert "\\cite" in source or source == "this paper", f"{claim} has no source"


def test_the_long_tables_have_a_row_for_each_claim() -> None:
    with (paths.GENERATED / "claims.csv").open(encoding="utf-8", newline="") as file:
        declared = [(row["claim"], row["scale"]) for row in csv.DictReader(file)]
    for scale, name in (("tiny", "claims"), ("real", "claims_real")):
        shown = re.findall(r"^([ECR]\d+\w?) & ", (paths.GENERATED / f"{name}.tex").read_text(encoding="utf-8"), re.M)
        assert shown and shown == [claim for claim, where in declared if where == scale]


def test_the_table_of_the_real_model_is_that_of_its_runs() -> None:
    table = (paths.GENERATED / "real_model.tex").read_text(encoding="utf-8")
    asked, known = {"kind": "train", "arm": "grpo", "task": "arithmetic"}, claims.committed_records("real")
    ends = [100 * r["test"]["t1"] for r in known if asked.items() <= r["spec"].items() and "test" in r]
    row = re.search(r"^GRPO & (\d+) & .* & ([\d.]+) \(([\d.]+)\) \\\\$", table, re.MULTILINE)
    assert row and row.groups() == (str(len(ends)), f"{mean(ends):.1f}", f"{stdev(ends):.1f}")


# ---- generated files


def test_what_the_paper_reads_exists() -> None:
    assert NUMBERS and "claims" in SHOWN and len(SHOWN) == len(set(SHOWN))
    read = {name: (paths.GENERATED / f"{name}.tex").read_text(encoding="utf-8") for name in INPUTS}
    files = {file.stem for folder in (paths.GENERATED, paths.FIGURES) for file in folder.glob("*.csv")}
    assert (named := set(re.findall(r"\\data\{(\w+)\}", ALL))) and named <= files, f"no CSV: {sorted(named - files)}"
    pictures = {p for name in SHOWN for p in re.findall(r"\\includegraphics\{([^}]+)\}", read[name])}
    assert pictures and not [picture for picture in pictures if not (paths.FIGURES / picture).is_file()]
    numbers = "".join(text for name, text in read.items() if name.startswith("numbers_"))
    defined = set(re.findall(r"\\newcommand\{\\(\w+)\}", numbers))
    assert defined >= NUMBERS, f"no notebook saves the numbers {sorted(NUMBERS - defined)}"


def test_citations_and_entries_agree() -> None:
    groups = re.findall(r"\\cite[a-z]*\*?(?:\[[^]]*\])*\{([^}]+)\}", ALL)
    keys = re.findall(r"^@\w+\{([^,\s]+),", BIBLIOGRAPHY, re.MULTILINE)
    assert len(keys) == len({key.lower() for key in keys})
    assert {key.strip() for group in groups for key in group.split(",")} == set(keys)


# ---- the document


@pytest.mark.slow  # the tests above find what is undefined, in a moment
@pytest.mark.skipif(not shutil.which("latexmk"), reason="latexmk is not installed")
def test_the_paper_compiles(tmp_path: Path) -> None:
    command = ["latexmk", "-pdf", "-interaction=nonstopmode", "-halt-on-error", f"-outdir={tmp_path}", "main.tex"]
    environment = {**os.environ, "max_print_line": "1000"}  # unbroken lines in the log
    done = subprocess.run(command, cwd=paths.PAPER, env=environment, capture_output=True, timeout=300)
    log = (tmp_path / "main.log").read_text(encoding="latin-1")
    assert done.returncode == 0, "\n".join(re.findall(r"^!.*|^l\.\d+.*", log, re.MULTILINE)) or log[-2000:]
    assert not re.findall(r"Warning: .*(?:undefined|multiply.defined).*", log)
    wide = [line for line, points in re.findall(r"^(Overfull \\hbox \(([\d.]+)pt.*)", log, re.M) if float(points) > 5]
    assert not wide, f"wider than its column (a figure of page width in a float of one column?): {wide}"
    aux = (tmp_path / "main.aux").read_text(encoding="utf-8")
    pages = dict(re.findall(r"\\newlabel\{([^}@]+)\}\{\{[^}]*\}\{(\d+)\}", aux))
    assert int(pages["main:end"]) <= 8, "the text before the impact statement is longer than eight pages"
    assert any(page == "1" for label, page in pages.items() if label.startswith("fig:")), "no figure on page 1"
