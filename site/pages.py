"""Write the site's sources into a folder: its own pages, the notebooks, and pages generated from committed files.

`python site/pages.py FOLDER`. Nothing is computed or executed here: notebooks keep their committed outputs, claims and
figures are those in paper/ and figures/. In the pages beside this file, comments such as
`<!-- include readme: make quickstart -->` are replaced by content; `_INCLUDES` lists them all.
"""

import ast
import csv
import importlib.util
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import unquote

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGE = "evoalign_lib"
# Committed texts -> their pages; README.md is spread over several pages.
TEXTS = {
    "CONTRIBUTING.md": "contributing.md",
    "LOG.md": "log.md",
    "README.md": "index.md",
    "paper/generated/claims_real.md": "predictions.md",
}
# The PDF that `make paper` compiles; the site includes it if it exists when the site is built.
PAPER = "runs/paper/main.pdf"
# Notebook -> Markdown below its title that links to a page with more of its records.
BESIDE = {
    "07_solution_coverage": "The [solve explorer](../explorer.md) shows every test problem, which model solves it, and "
    "what the models wrote.",
}
# Groups of the reference -> first parts of their modules' names; "Library" holds all that is in no other group.
GROUPS = {"Library": (), "Analysis": ("analysis",)}


class Figure(NamedTuple):
    """A committed figure."""

    name: str
    caption: str
    """plain text"""


class Notebook(NamedTuple):
    """A committed notebook."""

    name: str
    """file name without suffix"""
    number: str
    """as claims refer to it, such as "01" """
    title: str
    figures: tuple[Figure, ...]
    """in the order in which the notebook draws them"""


def write(folder: Path) -> None:
    """Write all sources into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "notebooks").mkdir(parents=True)
    shutil.copytree(ROOT / "figures", folder / "figures")
    for page in sorted(HERE.glob("*.md")):
        _write_text(folder, page.name, _included(page.read_text(encoding="utf-8")), "")
    for source, page in TEXTS.items():
        if not (folder / page).exists():
            text = (ROOT / source).read_text(encoding="utf-8")
            _write_text(folder, page, _indexed(text) if source == "LOG.md" else text, "")
    (folder / "committed").mkdir()  # conf.py keeps it out of the pages
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copy(path, folder / "committed")
        content = json.loads(path.read_text(encoding="utf-8"))
        first = content["cells"][0]
        title, _, rest = "".join(first["source"]).partition("\n")
        first["source"] = f"{title}\n\n{_ways(path.name, content['cells'])}\n\n{BESIDE.get(path.stem, '')}\n{rest}"
        for cell in content["cells"]:
            if cell["metadata"].get("jupyter", {}).get("source_hidden"):
                cell["metadata"]["tags"] = [*cell["metadata"].get("tags", ()), "hide-input"]
            if cell["cell_type"] == "markdown":
                cell["source"] = _localised(folder, "".join(cell["source"]), "notebooks")
        (folder / "notebooks" / path.name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "api").mkdir()
    for name in modules():
        (folder / "api" / f"{name}.md").write_text(_module_page(name), encoding="utf-8")


def _ways(name: str, cells: Iterable[Mapping[str, Any]]) -> str:
    """Return how to run a notebook: its file, JupyterLab, and the parameters that papermill sets."""
    (parameters,) = ["".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", ())]
    blocks = (
        f"```\npapermill notebooks/{name} out.ipynb --cwd notebooks -p scale smoke\n```\n\n```python\n{parameters}\n```"
    )
    return (
        f"[Download](path:../committed/{name}) · open it: `.venv/bin/jupyter lab notebooks/{name}`\n\n"
        f"<details><summary>Parameters for papermill</summary>\n\n{blocks}\n\n</details>"
    )


# ---- what is committed


@cache
def notebooks() -> tuple[Notebook, ...]:
    """Return the committed notebooks, sorted by number. Raises ValueError if one does not begin with a title."""
    manifest = json.loads((ROOT / "paper/generated/manifest.json").read_text(encoding="utf-8"))["artefacts"]
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
        title = cells[0].partition("\n")[0]
        if not title.startswith("# "):
            raise ValueError(f"{path.name} begins with {title[:60]!r}: begin it with its title, '# ...'")
        drawn = [n for n, entry in manifest.items() if entry["kind"] == "figure" and entry["notebook"] == path.stem]
        text = "\n".join(cells)
        drawn.sort(key=lambda name: (text.find(f'"{name}"') % (len(text) + 1), name))
        number = path.stem.partition("_")[0]
        title = re.sub(rf"^# {number}\W+", "", title)
        figures = tuple(Figure(name, _caption(name)) for name in drawn)
        found.append(Notebook(path.stem, number, title.removeprefix("# "), figures))
    return tuple(found)


@cache
def claims() -> tuple[dict[str, Any], ...]:
    """Return the declared claims in order, each with its row of claims.csv, under the names of the columns.

    Raises ValueError if claims.yaml and the generated verdicts do not have the same claims.
    """
    import yaml

    declared = yaml.safe_load((ROOT / "paper/claims.yaml").read_text(encoding="utf-8"))
    with open(ROOT / "paper/generated/claims.csv", encoding="utf-8", newline="") as file:
        verdicts = {row["claim"]: row for row in csv.DictReader(file)}
    if sorted(claim["id"] for claim in declared) != sorted(verdicts):
        raise ValueError("paper/claims.yaml and paper/generated/claims.csv differ: run `evoalign_study verify --write`")
    judged = {name: row | {"n": int(row["n"]), "hash": row["rule"]} for name, row in verdicts.items()}
    return tuple(judged[claim["id"]] | claim for claim in declared)


@cache
def modules() -> tuple[str, ...]:
    """Return the full names of the library's public modules, packages before their modules."""
    found = []
    for path in (ROOT / PACKAGE).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            found.append(".".join(parts))
    return tuple(sorted(found))


def _indexed(log: str) -> str:
    """Return the log with an index of its entries by notebook and by claim below its introduction."""
    known = {claim["id"]: claim["notebooks"] for claim in claims()}
    start, *entries = re.split(r"^(?=## )", log, flags=re.M)
    found: dict[str, list[str]] = {}
    for i, entry in enumerate(entries):
        date, _, title = entry.partition("\n")[0].removeprefix("## ").partition(" · ")
        entries[i] = f"(log-{i})=\n{entry}"
        plain = re.sub(r"[^\w .,:;%()/-]", "", title)
        judged = [name for name in re.findall(r"\b[CER]\d+[a-h]?\b", entry) if name in known]
        numbers = [*re.findall(r"\bnotebooks?[ /](0[1-9])", entry), *sum((known[name] for name in judged), [])]
        names = {f"notebook {number}" for number in numbers} | {name.rstrip("abcdefgh") for name in judged}
        for name in names:
            found.setdefault(name, []).append(f'[{date}](#log-{i} "{plain}")')
    order = sorted(found, key=lambda name: (name[0] != "n", name[0], int(re.sub(r"\D", "", name))))
    index = "".join(f"- {name}: {', '.join(found[name])}\n" for name in order)
    about = "Entries by notebook and by claim, with its later versions; hold the pointer on a date to read its title."
    return f"{start}## Index\n\n{about}\n\n{index}\n" + "".join(entries)


def _caption(name: str) -> str:
    """Return a figure's caption from its TeX file, as plain text."""
    from evoalign_study.rendering import tex_plain

    text = (ROOT / "paper/generated" / f"{name}.tex").read_text(encoding="utf-8")
    (caption,) = re.findall(r"^\\caption\{(.*)\}$", text, re.M)
    return tex_plain(caption)


# ---- includes


def _included(text: str) -> str:
    def replace(found: re.Match[str]) -> str:
        name, argument = found[1], (found[2] or "").strip()
        if name not in _INCLUDES:
            raise ValueError(f"{found[0]}: there is no such include. Use one of {', '.join(_INCLUDES)}.")
        return _INCLUDES[name](argument)

    return re.sub(r"<!-- include (\w+)(?:: (.*?))? -->", replace, text)


def _answer(_: str) -> str:
    """Return the README's question and answer: the text between its title and its first picture."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n")[2]
    return text.partition("\n![")[0].strip()


def _readme(marker: str) -> str:
    return _section("README.md", marker)


def _paper(_: str) -> str:
    """Return a link to the paper's PDF, or the command that builds it."""
    return f"[the paper]({PAPER}) (PDF)" if (ROOT / PAPER).is_file() else "the paper (`make paper` compiles its PDF)"


def _contributing(marker: str) -> str:
    return _section("CONTRIBUTING.md", marker)


def _section(file: str, marker: str) -> str:
    """Return the section of a committed text that contains a marker, without its heading."""
    sections = re.split(r"^## .*\n", (ROOT / file).read_text(encoding="utf-8"), flags=re.M)[1:]
    found = [section for section in sections if marker in section]
    if len(found) != 1:
        raise ValueError(f"{len(found)} sections of {file} contain {marker!r}: exactly one must, for a page of site/.")
    return found[0].strip()


def _cards(_: str) -> str:
    """Return a card for each row of the README's table of findings: the question, its answer and its figure."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\d\d)\]\((\S+\.ipynb)\) \| (.+?) \| (.+?) \| \[\w+\]\((figures/\S+)\) \|$", readme, re.M)
    if len(rows) != len(notebooks()):
        raise ValueError(
            f"README.md has {len(rows)} rows of findings: write one for each of {len(notebooks())} notebooks."
        )
    captions = {figure.name: figure.caption for notebook in notebooks() for figure in notebook.figures}
    cards = []
    for number, page, question, answer, figure in rows:
        picture = f"[![{_plain(captions[Path(figure).stem])}]({figure})]({page})"
        cards.append(f":::{{container}} card\n**[{number} · {question}]({page})**\n\n{picture}\n\n{answer}\n:::")
    return "\n\n".join(cards)


def _notebook_tree(_: str) -> str:
    return _toctree((f"notebooks/{notebook.name}" for notebook in notebooks()), "Notebooks")


def _counts(_: str) -> str:
    judged = Counter(claim["verdict"] for claim in claims() if claim["rule"]["kind"] != "open")
    words = ", ".join(f"{n} {_badge(verdict)}" for verdict, n in judged.most_common())
    return f"{len(claims())} claims are declared. {judged.total()} of them have a rule: {words}."


def _claim_table(_: str) -> str:
    rows = [
        (_claim_link(c), _plain(c["title"]), _badge(c["verdict"]), _plain(_key(c)), _plain(c["placebo"]), c["n"])
        for c in claims()
        if c["rule"]["kind"] != "open"
    ]
    return _table(("claim", "in short", "verdict", "result", "placebo", "n"), rows)


def _key(claim: Mapping[str, Any]) -> str:
    """Return the comparison that speaks most against a claim, or, if there is none, its first finding."""
    return claim.get("key") or _findings(claim)[0]


def _findings(claim: Mapping[str, Any]) -> list[str]:
    return re.split(r"(?<=\)); ", claim["result"])


def _open_claims(_: str) -> str:
    rows = [
        (_claim_link(c), _plain(c["title"]), _badge(c["verdict"]), _plain(", ".join(c["notebooks"])))
        for c in claims()
        if c["rule"]["kind"] == "open"
    ]
    return _table(("claim", "in short", "verdict", "to be taken up in notebook"), rows) if rows else "None."


def _claim_entries(_: str) -> str:
    return "\n\n".join(_claim_entry(claim) for claim in claims())


def _claim_entry(claim: Mapping[str, Any]) -> str:
    import yaml

    pages = {notebook.number: notebook.name for notebook in notebooks()}
    numbers = [f"[{n}](notebooks/{pages[n]}.ipynb)" if n in pages else _plain(n) for n in claim["notebooks"]]
    facts = [_badge(claim["verdict"])]
    facts += [f"n = {claim['n']}"] if claim["n"] else []
    facts += [f"{'notebooks' if len(numbers) > 1 else 'notebook'} {', '.join(numbers)}"]
    lines = [
        f"({_anchor(claim['id'])})=",
        "",
        f"### {_plain(claim['id'])} · {_plain(claim['title'])}",
        "",
        " · ".join(facts),
    ]
    lines += ["", _plain(claim["statement"])]
    by_id = {c["id"]: c for c in claims()}
    if "superseded" in claim:
        lines += ["", f"Superseded by {_claim_link(by_id[claim['superseded']])}."]
    findings = _findings(claim)
    if len(findings) > 2:
        lines += ["", "**Result**", "", *(f"- {_plain(finding)}" for finding in findings)]
    else:
        lines += ["", f"**Result** {_plain(claim['result'])}"]
    named = ("placebo", "control", "decodings", "caveat", "note", "quantity", "test", "source")
    lines += [f"\n**{name.capitalize()}** {_plain(claim[name])}" for name in named if claim.get(name)]
    rule = {name: claim[name] for name in _DECIDING if name in claim}
    declared = yaml.safe_dump(rule, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None)
    fence = "`" * max(3, *(len(found) + 1 for found in re.findall("`+", declared)), 3)
    lines += ["", f"**Rule**, SHA-256 `{claim['hash'][:12]}`", "", f"{fence}yaml", declared.rstrip(), fence]
    return "\n".join(lines)


_DECIDING = ("scales", "not_testable", "unit", "arms", "cells", "margin", "min_seeds", "primary", "rule")


def _figures(_: str) -> str:
    lines = []
    for notebook in notebooks():
        if notebook.figures:
            lines += [f"## {notebook.number} · {notebook.title}", ""]
            lines += [f"Drawn by [notebook {notebook.number}](notebooks/{notebook.name}.ipynb).", ""]
        for name, caption in notebook.figures:
            files = " · ".join(f"[{kind.upper()}](figures/{name}.{kind})" for kind in ("pdf", "csv"))
            lines += [f"### {name}", "", f"```{{figure}} figures/{name}.png", f":alt: {caption}"]
            lines += [f":target: _images/{name}.png", "", f"{_plain(caption)} {files}", "```", ""]
    return "\n".join(lines)


def _explorer(results: str) -> str:
    """Return the solve explorer for a file of records, in a fence for raw HTML."""
    return f"```{{raw}} html\n{_beside('explorer').block(results)}\n```"


def _replay(_: str) -> str:
    """Return the page of the replay, in a fence for raw HTML."""
    return f"```{{raw}} html\n{_beside('explorer').filled('replay.html', _beside('replay').data())}\n```"


def _beside(name: str) -> ModuleType:
    """Import a module of this folder, which is not a package and may not be on the caller's path."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _api(_: str) -> str:
    lines = []
    for title in GROUPS:
        names = [name for name in modules() if _group_of(name) == title]
        rows = [(f"[{_short(name)}](api/{name}.md)", _summary(name)) for name in names]
        lines += [f"## {title}", "", _table(("module", "contents"), rows), ""]
    return "\n".join(lines)


def _group_of(name: str) -> str:
    top = _short(name).partition(".")[0]
    return next((title for title, tops in GROUPS.items() if top in tops), "Library")


def _api_tree(_: str) -> str:
    names = sorted(modules(), key=lambda name: list(GROUPS).index(_group_of(name)))
    return _toctree(f"{_short(name)} <api/{name}>" for name in names)


_INCLUDES: dict[str, Callable[[str], str]] = {
    "answer": _answer,
    "readme": _readme,
    "paper": _paper,
    "contributing": _contributing,
    "notebook_cards": _cards,
    "notebook_tree": _notebook_tree,
    "verdict_counts": _counts,
    "claim_table": _claim_table,
    "open_claims": _open_claims,
    "claim_entries": _claim_entries,
    "figures": _figures,
    "explorer": _explorer,
    "replay": _replay,
    "api": _api,
    "api_tree": _api_tree,
}


# ---- the reference


def _module_page(name: str) -> str:
    below = [m for m in modules() if m.rpartition(".")[0] == name]
    lines = [f"# {name}", "", "```{eval-rst}", f".. automodule:: {name}", "```", ""]
    if below:
        rows = [(f"[{_short(module)}]({module}.md)", _summary(module)) for module in below]
        lines += ["## Modules", "", _table(("module", "contents"), rows), ""]
    return "\n".join(lines)


@cache
def _summary(name: str) -> str:
    """Return the first paragraph of a module's docstring as Markdown."""
    first = (ast.get_docstring(_tree(name)) or "").split("\n\n")[0].replace("\n", " ")
    parts = re.split(r"(`[^`]+`)", first)
    return "".join(part if number % 2 else _plain(part) for number, part in enumerate(parts))


def _tree(name: str) -> ast.Module:
    path = ROOT.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _short(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}.")


# ---- Markdown


def _plain(text: Any) -> str:
    """Escape plain text as Markdown that shows it unchanged, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|$~#])", r"\\\1", " ".join(str(text).split()))


def _badge(verdict: str) -> str:
    return f"[{_plain(verdict)}]{{.verdict .{re.sub(r'[^a-z]+', '-', verdict)}}}"


def _anchor(claim: str) -> str:
    return "claim-" + re.sub(r"\W", "-", claim.lower())


def _claim_link(claim: Mapping[str, Any]) -> str:
    return f"[{_plain(claim['id'])}](#{_anchor(claim['id'])})"


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *(map(str, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _toctree(entries: Iterable[str], caption: str = "") -> str:
    lines = ["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "", *entries, "```"]
    return "\n".join(lines)


# ---- links to files of the repository

_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def _write_text(folder: Path, page: str, text: str, place: str) -> None:
    (folder / page).write_text(_localised(folder, text, place), encoding="utf-8")


def _localised(folder: Path, text: str, place: str) -> str:
    """Return a text of the repository with links to files redirected to pages or to copies beside them.

    place: the folder of the text. Raises ValueError for a link to a file that does not exist.
    """

    def replace(found: re.Match[str]) -> str:
        link, _, fragment = found[2].partition("#")
        if re.match(r"[a-z]+:", link):
            return found[0]
        # Jupyter's anchors keep a heading's capitals and commas, Sphinx's do not
        fragment = re.sub(r"[^\w-]", "", unquote(fragment).lower())
        if not link:
            return f"{found[1]}#{fragment}{found[3]}"
        target = os.path.normpath(os.path.join(place, link))
        made = (folder / target).exists() or target in made_later
        if target in TEXTS:
            target = TEXTS[target]
        elif not made:
            if not (ROOT / target).is_file():
                raise ValueError(f"{found[0]}: the repository has no file {target}. Correct the link.")
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / target, folder / target)
        link = os.path.relpath(target, place or ".") + ("#" + fragment if fragment else "")
        return f"{found[1]}{link}{found[3]}"

    own = {page.name for page in HERE.glob("*.md")} | set(TEXTS.values())
    own |= {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    made_later = own | {f"api/{name}.md" for name in modules()}
    fences = re.split(r"(^```.*?^```$|^    .*?$|`[^`\n]+`)", text, flags=re.M | re.S)
    for number in range(0, len(fences), 2):  # code is left alone
        fences[number] = _LINK.sub(replace, fences[number])
    return "".join(fences)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python site/pages.py FOLDER")
    sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]
    write(Path(sys.argv[1]))
