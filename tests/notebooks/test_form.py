"""The notebooks: parameters, cells that run again, and prose that says what outputs hold.

That code which they write out is the library's, they show themselves, in outputs that are compared.
Each rule on numbers and links is a function that returns what breaks it, and is itself tested on what does.
"""

import ast
import re
from html import unescape
from importlib import import_module

import nbformat
import pytest
from evoalign_study import execution, parameters, paths, real_panels
from evoalign_study.records import read_records, record_files
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
UNITS = (
    r"%|per ?cent\b|points?\b|nats?\b|bits\b|completions?\b|characters?\b|tokens?\b|bytes\b|kilobytes\b|kB\b|MB\b|GB\b"
    r"|minutes\b|parameters\b|seeds?\b|runs?\b|steps?\b|problems?\b|prompts\b|samples\b|members\b|times\b|FLOPs\b|core-seconds\b"
)
WORDS = "two three four five six seven eight nine ten eleven twelve fifteen sixteen twenty thirty fifty hundred".split()
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
VALUES = dict(zip(WORDS, [*range(2, 13), 15, 16, 20, 30, 50, 100], strict=True))
OF_RESULTS = r"%|per ?cent\b|points?\b|nats?\b|kilobytes\b|characters?\b|minutes\b"


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(params=NOTEBOOKS, ids=lambda p: p.stem)
def notebook(request):
    return read(request.param)


def code_of(notebook):
    """The code cells' sources."""
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def study_of(notebook):
    """The module that the notebook's derived-values cell calls `study`."""
    (name,) = re.findall(r"^from evoalign_study import (\w+) as study$", "\n".join(code_of(notebook)), re.M)
    return import_module(f"evoalign_study.{name}")


def test_parameters_cell_has_the_common_names_and_literals_only(notebook):
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    statements = ast.parse(tagged[0].source).body
    names = [s.target.id for s in statements if isinstance(s, ast.AnnAssign)]
    assert names == list(parameters.PARAMETERS)
    assert all(isinstance(s.value, ast.Constant) for s in statements)


def test_committed_as_executed_top_to_bottom(notebook):
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    outputs = [o for c in code for o in c.outputs]
    assert not any(o.output_type == "error" or o.get("name") == "stderr" for o in outputs)
    # no times of execution, which differ each time; "jupyter" collapses a cell
    assert all(c.metadata.keys() <= {"tags", "jupyter"} for c in notebook.cells)


def test_a_notebook_fits_a_lecture(notebook):
    words = [len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown"]
    assert len(notebook.cells) <= 45 and sum(words) <= 2500


def bound(statement):
    """The names that a statement binds in the notebook."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(name.asname or name.name).partition(".")[0] for name in statement.names}
    inside = [n.target for n in ast.walk(statement) if isinstance(n, ast.comprehension)]
    return used(statement, ast.Store) - {name for target in inside for name in used(target, ast.Store)}


def used(node, how):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, how)}


def read_from_others(statements):
    """The names that a cell reads before it binds them."""
    found, own = set(), set()
    for s in statements:
        local = used(s, ast.Store) | {n.arg for n in ast.walk(s) if isinstance(n, ast.arg)}
        if isinstance(s, (ast.Assign, ast.AnnAssign)):  # the right side comes first
            local -= bound(s)
        found |= (used(s, ast.Load) | (bound(s) if isinstance(s, ast.AugAssign) else set())) - own - local
        own |= bound(s)
    return found


def test_a_cell_that_runs_again_finds_the_names_it_reads_as_they_were(notebook):
    cells = [ast.parse(source).body for source in code_of(notebook)]
    reads = list(map(read_from_others, cells))
    (derived,) = [i for i, source in enumerate(code_of(notebook)) if "check_parameters(globals()" in source]
    reads[derived] |= {*parameters.PARAMETERS, *study_of(notebook).presets()["tiny"]}
    for i, read_here in enumerate(reads):
        bound_later = {name for cell in cells[max(i, 1) :] for statement in cell for name in bound(statement)}
        assert not read_here & bound_later, code_of(notebook)[i]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_every_cell_runs_twice_after_the_section_that_scale_real_has(name, tmp_path):
    """As it does where a reader changes a cell: what it reads was not changed in place either."""
    content = read(paths.NOTEBOOKS / f"{name}.ipynb")
    sources = code_of(content)
    at = 1 + [source.startswith("scale: str") for source in sources].index(True)
    passes = ['scale = "real"'] * (name in real_panels.NOTEBOOKS) + ["dry_run = True"] * 2
    content.cells = [new_code_cell(source) for given in passes for source in [*sources[:at], given, *sources[at:]]]
    assert execution._run(name, content, tmp_path, [], timeout=300) is None
    for cell in content.cells[at + 2 : len(sources) + 1] if passes[2:] else ():
        assert ("image/png" if "real_panels" in cell.source else "skipped at scale real") in str(cell.outputs)


# ---- rules on numbers and links


def headings(notebook):
    """(level, text) of every heading, but those in blocks of code."""
    texts = [re.sub(r"```.*?```", "", c.source, flags=re.DOTALL) for c in notebook.cells if c.cell_type == "markdown"]
    return [(len(m[1]), m[2].strip()) for text in texts for m in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE)]


def wrong_links(notebook):
    """Links within the notebook, and to its neighbours, that lead nowhere."""
    anchors = ["#" + text.replace(" ", "-") for _, text in headings(notebook)]  # as Jupyter makes them
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match("https?:", t)]
    return [t for t in targets if not (t in anchors if t.startswith("#") else (paths.NOTEBOOKS / t).exists())]


def shown(notebook):
    """All that the outputs say, as text."""
    texts = []
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        html = unescape(re.sub("<[^>]*>", " ", data.get("text/html", "")))
        texts += [output.get("text", ""), data.get("text/plain", ""), html]
    return "\n".join(texts)


def quantities(text):
    """(number as written, its value as outputs write it, unit) of every number with a unit in a text."""
    number = rf"(?<![\w.^{{/-])([-+−]?\d[\d,]*(?:\.\d+)?|\b(?:{'|'.join(WORDS)})\b)"
    between, found = "more|fewer|different|test|training|validation|million|thousand", []
    for match in re.finditer(rf"{number}(?: (?:{between}))*[ -]?({UNITS})", text, re.I):
        word, unit = match[1].lower(), match[2]
        if word in VALUES and not re.match(OF_RESULTS, unit):
            continue  # "two runs" and "thirty members" are words
        found.append((match[0], str(VALUES.get(word, word)).replace(",", "").lstrip("+-−"), unit))
    return found


def unproven_numbers(notebook):
    """Numbers with units in prose that no output of the notebook holds, or that stand where another scale has others.

    A sentence that links its source (arXiv) quotes it. Everything else says what the committed runs gave, under a
    heading or after the words "In the committed runs".
    """
    held = {n.replace(",", "") for n in NUMBER.findall(shown(notebook))}
    problems = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "markdown":
            continue
        no_prose = r"^#[^\n]*$|^ {4}[^\n]*$|\[[^]]*\]\(#[^)]*\)|```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$"
        prose = re.sub(no_prose, " ", cell.source, flags=re.DOTALL | re.MULTILINE)
        for sentence in re.split(r"(?<=[.:;!?])\s+(?=[A-Z*\[(])|\n", prose):
            if "arxiv.org" in sentence:
                continue
            if re.search("interval|band", sentence):  # their level is no result
                sentence = re.sub(r"\b9[05] %", "", sentence)
            for written, value, _ in quantities(sentence):
                if value not in held:
                    problems.append(f"cell {number}: no output holds {written!r}")
                elif "In the committed runs" not in cell.source:
                    problems.append(f"cell {number}: {written!r} is so in the committed runs only, and does not say so")
    return problems


def unproven_in_readme(text, outputs, settings, trials):
    """Numbers with units in the README's prose that nothing committed holds.

    outputs: file of a notebook -> what it shows. A paragraph is held to the notebooks that it links, or to all if it
    links none. settings: text of the declared claims, which may hold a number instead. trials: text that holds what
    commands take, in minutes and GB.
    """
    prose = re.sub(r"```.*?```|<!-- (\w+) -->.*?<!-- /\1 -->|`[^`]*`", " ", text, flags=re.DOTALL)
    declared, measured = ({(value, unit) for _, value, unit in quantities(source)} for source in (settings, trials))
    problems = []
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", prose):
        linked = [name for name in re.findall(r"\]\(notebooks/([^)]+)\)", paragraph) if name in outputs]
        numbers = {n.replace(",", "") for name in linked or outputs for n in NUMBER.findall(outputs[name])}
        words = re.sub(r"\s+", " ", re.sub(r"\]\([^)]*\)|notebooks? \[?\d\d|\[\d\d", " ", paragraph))
        for written, value, unit in quantities(words):
            proven = (value, unit) in measured if unit in ("minutes", "GB") else (value, unit) in declared
            if not proven and (unit in ("minutes", "GB") or value not in numbers):
                problems.append(written)
    return problems


# ---- every notebook keeps them


def test_links_lead_somewhere(notebook):
    assert wrong_links(notebook) == []


def test_numbers_in_prose_are_those_of_the_outputs(notebook):
    assert unproven_numbers(notebook) == []


def test_numbers_in_the_readme_are_those_of_the_notebooks():
    sizes = {r["d"] for path in record_files("tiny") for r in read_records(path) if "d" in r}
    outputs = {path.name: shown(read(path)) for path in NOTEBOOKS}
    outputs["records"] = ", ".join(f"{size / 1e6:.2f}" for size in sizes)
    files = ("README.md", "paper/claims.yaml", "LOG.md")
    readme, claims, log = ((paths.ROOT / name).read_text(encoding="utf-8") for name in files)
    assert unproven_in_readme(readme, outputs, claims, log) == []


def test_outputs_come_from_the_committed_sources(notebook):
    assert execution.digests(notebook) == notebook.metadata["evoalign"]["cells"]
    commit = notebook.metadata["evoalign"]["commit"]
    assert re.fullmatch("[0-9a-f]{12}", commit), "executed with changes that were not committed"
    assert f"(commit {commit})" in shown(notebook)


# ---- the rules find what breaks them


PROSE = [
    ("In the committed runs ES gains 14.6 points with 8 seeds, by 2,000 problems and 12.5 %.", None),
    ("In the committed runs ES gains 14.7 points.", "no output holds '14.7 points'"),
    ("ES gains 14.6 points.", "'14.6 points' is so in the committed runs only"),
    ("Qiu et al. ([arXiv](https://arxiv.org/abs/2509.24372)) gain 99.9 points.", None),
    ("Take $N = 99$ members, `99 points` or\n\n    99 points\n", None),
]


@pytest.mark.parametrize(("prose", "said"), PROSE)
def test_numbers_in_prose_that_no_output_holds_are_found(prose, said):
    held = {"text/html": "<td>14.6 [13.1,\N{NO-BREAK SPACE}16.1] points</td>", "text/plain": "2000 8 3.2"}
    output = new_output("display_data", held)
    cells = [new_markdown_cell(prose), new_code_cell("x", outputs=[output, new_output("stream", text="12.5 %")])]
    problems = unproven_numbers(new_notebook(cells=cells))
    assert (problems == []) if said is None else (len(problems) == 1 and said in problems[0])


def test_numbers_in_the_readme_that_nothing_holds_are_found():
    prose = "ES gains 4.0 points [1.1, 6.9], with a look at five points ([notebook 02](notebooks/02.ipynb)).\n\n"
    prose += "It gains six points of 7 %.\n\nThe tests take 15 minutes, the install 4 GB."
    outputs = {"02.ipynb": "4.0 [1.1,\N{NO-BREAK SPACE}6.9] 15.6 and 15 and 4", "01.ipynb": "92"}
    said = unproven_in_readme(prose, outputs, "more than five points", "17 minutes and 3 GB")
    assert said == ["six points", "7 %", "15 minutes", "4 GB"]
