"""The site: its pages name what is committed, its links are checked, its formulas and docstrings are set, offline."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager

import nbformat
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from evoalign_study import claims, paths
from evoalign_study.kinds.weights import pack_texts
from evoalign_study.records import pack_bits, read_records, unpack_bits, unpack_integers, unpack_probabilities
from helpers import python

from evoalign_lib import ledger, update_rules
from evoalign_lib.analysis import coverage

sys.path.append(str(paths.ROOT / "site"))  # no package
import check
import explorer
import pages
import release
import replay

SITE = paths.ROOT / "site"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The sources of the whole site, written into a folder."""
    folder = tmp_path_factory.mktemp("site") / "source"
    pages.write(folder)
    return folder


def text_of(folder, page):
    return (folder / page).read_text(encoding="utf-8")


def shown(text):
    """Markdown without the backslashes that keep its signs from meaning anything."""
    return re.sub(r"\\([\\`*_{}\[\]<>|$~#])", r"\1", text)


# what is committed is on the pages


def test_every_notebook_is_a_page_with_its_committed_outputs(sources):
    index, outputs = text_of(sources, "index.md"), 0
    for path in paths.NOTEBOOKS.glob("*.ipynb"):
        assert f"\nnotebooks/{path.stem}\n" in index  # the menu
        assert f"](notebooks/{path.name})" in index
        read = (nbformat.read(p, as_version=4) for p in (path, sources / "notebooks" / path.name))
        committed, page = ([(c.source, c.outputs) for c in n.cells if c.cell_type == "code"] for n in read)
        assert committed == page and (sources / "committed" / path.name).read_bytes() == path.read_bytes()
        outputs += sum(len(shown) for _, shown in page)
    assert outputs > 50


def test_every_claim_has_its_line_and_its_entry_with_the_generated_verdict(sources):
    page = shown(text_of(sources, "claims.md"))
    tables, entries = page.split("## Every claim in full")
    declared = yaml.safe_load((paths.PAPER / "claims.yaml").read_text(encoding="utf-8"))
    assert len(declared) == len(pages.claims()) > 40
    for claim in declared:
        (row,) = [c for c in pages.claims() if c["id"] == claim["id"]]
        anchor = f"claim-{claim['id'].lower()}"
        line = f"| [{claim['id']}](#{anchor}) | {claim['title']} | [{row['verdict']}]{{.verdict"
        assert tables.count(line) == 1
        (entry,) = re.findall(rf"\({anchor}\)=\n(.*?)(?=\n\(claim-|\Z)", entries, re.S)
        said = " ".join(entry.split())
        for key in ("statement", "note", "caveat", "quantity", "source"):
            assert " ".join(claim.get(key, "").split()) in said
        assert f"[{row['verdict']}]{{" in entry and claims.rule_hash(claim)[:12] in entry
        (rule,) = re.findall(r"```yaml\n(.*?)```", entry, re.S)
        declares = {key: value for key, value in claim.items() if key in pages._DECIDING}
        assert yaml.safe_load(rule) == declares


def test_the_words_of_a_claim_are_no_markup(monkeypatch):
    hostile = "x | <script>y</script> [z](javascript:y) ```"
    own = dict.fromkeys(("title", "verdict", "key", "statement", "result", "placebo"), hostile) | {"notebooks": ["<b>"]}
    kinds = [{"rule": {"kind": kind, "favours": hostile}} for kind in ("compare", "open")]
    claim = yaml.safe_load((paths.PAPER / "claims.yaml").read_text(encoding="utf-8"))[0] | {"hash": "0" * 64, "n": 8}
    monkeypatch.setattr(pages, "claims", lambda: tuple(claim | own | kind for kind in kinds))
    for page in (pages._claim_table(""), pages._open_claims(""), pages._claim_entries("")):
        fenced = re.sub(r"(?ms)^(`{3,})yaml\n.*?^\1$", "", page)
        assert not re.search(r"(?<!\\)(<[a-z/]|\]\(javascript|```)", fenced)


def test_every_figure_and_public_module_is_on_a_page(sources):
    page = shown(text_of(sources, "figures.md"))
    pictures = sorted(path.stem for path in paths.FIGURES.glob("*.png"))
    assert sorted(re.findall(r"```\{figure\} figures/(\w+)\.png", page)) == pictures
    assert all((sources / "figures" / f"{name}.csv").is_file() for name in pictures)
    assert all(figure.caption in page for notebook in pages.notebooks() for figure in notebook.figures)
    index = text_of(sources, "api.md")
    for path in (paths.ROOT / "evoalign_lib").rglob("*.py"):
        name = ".".join(path.relative_to(paths.ROOT).with_suffix("").parts).removesuffix(".__init__")
        public = not any(part.startswith("_") for part in name.split("."))
        assert (sources / "api" / f"{name}.md").is_file() == public
        assert index.count(f"(api/{name}.md)") == index.count(f"<api/{name}>") == public


def test_links_and_includes_lead_to_what_is_there(tmp_path):
    text = "[a](../LOG.md#x) [b](../CITATION.cff) [c](https://example.org#A) [d](#4-The-KL,-too) `[e](nowhere.md)`"
    expected = text.replace("../LOG.md", "../log.md").replace("#4-The-KL,-too", "#4-the-kl-too")
    assert pages._localised(tmp_path, text, "notebooks") == expected
    assert (tmp_path / "CITATION.cff").read_bytes() == (paths.ROOT / "CITATION.cff").read_bytes()
    for wrong in ("<!-- include nonsense: x -->", "<!-- include readme: no section has these words -->"):
        with pytest.raises(ValueError, match="include|README.md"):
            pages._included(wrong)
    with pytest.raises(ValueError, match=r"gone\.py"):
        pages._localised(tmp_path, "[f](gone.py)", "")


# the solve explorer

RESULTS = "07_solution_coverage/tiny.jsonl"
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=https://example.org/a.png onerror=alert(2)>",
    "<!--<script>",
    "\n```\n:::{raw} html\n`a` ]]> & ' \" \\ \u2028 \u2029 \x00",
    "<!-- include readme: make quickstart -->",
    "__DATA__",
)


@pytest.fixture(scope="module")
def coverages():
    """The committed records of kind "coverage", without those of many samples."""
    found = [record for record in read_records(paths.RESULTS / RESULTS) if record["spec"]["kind"] == "coverage"]
    fewest = min(record["spec"]["coverage_samples"] for record in found)
    return [record for record in found if record["spec"]["coverage_samples"] == fewest]


def answered(record, texts):
    """A record of kind "answers" of the model of another record, with the same few texts over and over."""
    n = record["n"]
    spec = {name: value for name, value in record["spec"].items() if "coverage" not in name} | {"kind": "answers"}
    packed = pack_texts([(texts[i % len(texts)], False) for i in range(n)], 80)
    bits = pack_bits([i % 2 for i in range(n)])
    answers = {"greedy": packed, "t1": packed, "greedy_bits": bits, "t1_bits": bits}
    return {"spec": spec, "status": "finished", "n": n} | answers


def of_arm(coverages, arm):
    """Those of an arm's runs with the setting of notebook 02, which are the longest."""
    of_runs = [(r, r["spec"]["end"]["of"]["run"]) for r in coverages if "end" in r["spec"]]
    usual = {"steps": (208, 250), "population_size": (30,), "learning_rate": (3e-4,), "kind": ("train",)}
    return [r for r, run in of_runs if run["arm"] == arm and all(run.get(k, v[0]) in v for k, v in usual.items())]


SCRIPT = re.compile(r"<script\b[^>]*>(.*?)</script>", re.S)


def test_hostile_texts_are_nothing_but_data_of_the_explorer(coverages, tmp_path):
    (base,) = (r for r in coverages if "end" not in r["spec"])
    hostile = [answered(record, HOSTILE) for record in (base, *of_arm(coverages, "es")[:2])]
    data = explorer.data(coverages + hostile)
    page = explorer.html(data)
    # the one script that holds data is closed by its own end, and the rest of the page is that without data
    one, other = SCRIPT.findall(page)
    assert SCRIPT.sub("", page) == SCRIPT.sub("", explorer.html({})) and other == SCRIPT.findall(explorer.html({}))[1]
    assert json.loads(one) == data and {text[1:] for texts in data["texts"] for text in texts} == set(HOSTILE)
    one = one.strip()
    assert one.isascii() and not set("<>&'`\n") & set(one)
    # what shows them knows no HTML
    assert "textContent" in other
    hazards = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|Fragment|eval|Function\("
    assert not re.search(hazards, other)
    with pytest.raises(ValueError, match="no record says"):
        explorer.data([record for record in coverages if "end" in record["spec"]])
    with pytest.raises(ValueError, match="600000"):
        explorer.html({"texts": ["x" * explorer.MOST]})
    # in a page of the site it is one fence, which no line of it ends
    fence = pages._INCLUDES["explorer"](RESULTS).split("\n")
    assert fence[0] == "```{raw} html" and [line for line in fence if line.startswith("```")] == [fence[0], "```"]
    (tmp_path / "index.html").write_text(page, encoding="utf-8")
    assert list(check.problems(tmp_path)) == []


def test_categories_are_the_support_of_the_records(coverages):
    models = explorer.data(coverages)["models"]
    (base,) = (r for r in coverages if "end" not in r["spec"])
    before = coverage.pass_at(unpack_probabilities(base["reach"]["t1"]), coverage.SOLVED_WITHIN)
    named = {"ES, sampled fitness": "es_sampled", "GRPO, random reward": "grpo_random", "filtered SFT": "sft"}
    for label, arm in named.items():
        (model,) = (m for m in models if m["label"] == label)
        records = of_arm(coverages, arm)
        chances = np.array([unpack_probabilities(record["reach"]["t1"]) for record in records])
        after = coverage.pass_at(chances, coverage.SOLVED_WITHIN)
        counted = coverage.support(before >= 0.5, after.mean(0) >= 0.5)
        assert all(model["categories"].count(name[0]) == getattr(counted, name) for name in explorer.CATEGORIES)
        expected = [coverage.support(before, run) for run in after]
        means = [np.mean([getattr(each, name) for each in expected]) for name in explorer.CATEGORIES]
        assert model["expected"] == pytest.approx(means, abs=0.051) and model["runs"] == len(records)
        assert np.allclose(unpack_probabilities(model["t1"]["p"]), chances.mean(0), rtol=0.003, atol=2e-9)
        greedy = np.sum([unpack_bits(record["greedy_bits"], 256) for record in records], 0, dtype=int)
        assert np.array_equal(unpack_integers(model["greedy"]), greedy)
    assert sum(models[0]["expected"]) == pytest.approx(256, abs=0.3)


# the replay in JavaScript

CHECKS = text_of(paths.ROOT / "tests" / "study", "site_checks.js")


@contextmanager
def chromium(folder, page="about:blank"):
    """Yield a function that evaluates JavaScript on a page in Chromium, which is spoken to through a pipe."""
    found = shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("Chromium is not installed")
    (commands, to), (back, answers) = os.pipe(), os.pipe()
    options = "--headless --no-sandbox --disable-gpu --disable-quic --disable-sync --disable-background-networking "
    options += f"--no-first-run --disable-component-update --remote-debugging-pipe --user-data-dir={folder}"
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', found, *options.split()]
    with subprocess.Popen(command, pass_fds=(commands, answers), stderr=subprocess.DEVNULL):
        os.close(commands), os.close(answers)
        with open(to, "wb", 0) as sent, open(back, "rb") as received:  # Chromium ends when they are closed

            def call(method, session=(), **parameters):
                message = {"id": 1, "method": method, "params": parameters, **dict(session)}
                sent.write(json.dumps(message).encode() + b"\0")
                while "id" not in (said := json.loads(b"".join(iter(lambda: received.read(1) or b"\0", b"\0")))):
                    pass  # an event
                return said["result"]

            def value(script):
                result = call("Runtime.evaluate", session, expression=script, awaitPromise=True, returnByValue=True)
                assert "exceptionDetails" not in result, result
                return result["result"].get("value")

            target = call("Target.createTarget", url=page)["targetId"]
            session = call("Target.attachToTarget", targetId=target, flatten=True)  # its sessionId
            while value("document.readyState + location") != f"complete{page}":
                pass
            yield value


def in_javascript(expression, folder):
    """Evaluate an expression after the scripts of the noise law and the replay, in Node or else in Chromium."""
    scripts = "".join(text_of(SITE / "static", name) for name in ("noise.js", "replay.js")) + CHECKS
    if node := shutil.which("node"):
        text = f"{scripts}console.log(JSON.stringify({expression}))"
        return json.loads(subprocess.run([node, "-"], input=text, stdout=subprocess.PIPE, text=True, check=True).stdout)
    with chromium(folder) as value:
        return value(scripts + expression)


def test_javascript_gives_the_known_answers_of_the_noise_law(tmp_path):
    text = text_of(paths.ROOT / "evoalign_lib", "noise_vectors.json")
    text = re.sub(r'("seed": )(\d+)', r'\1"\2"', text)  # JavaScript's numbers have 53 bits
    given = json.loads(text)
    expected = {name: [one.get("normals") or one["noise"] for one in given[name]] for name in list(given)[-3:]}
    expected["philox"] = [one["words"] for one in given["philox"]]
    expected["keys"] = [[one["run_key"], one["member_key"]] for one in given["keys"]]
    expected["parameter_ids"] = list(given["parameter_ids"].values())
    assert in_javascript(f"knownAnswers(noiseLaw(), {text})", tmp_path) == expected


@pytest.mark.parametrize("name", [replay.RUN, "c5230deed6937ff6"])  # formats 1 and 4; the second has exact rewards
def test_javascript_reads_a_ledger_as_python_does_and_finds_an_edit(name, tmp_path):
    path = paths.RESULTS / "02_grpo_countdown" / "ledgers" / f"{name}.jsonl.gz"
    kept = ledger.read(path)
    moved = [update_rules.coefficients(step.rewards, kept.settings["alpha"]).view(np.uint32) for step in kept.steps]
    text = json.dumps(gzip.decompress(path.read_bytes()).decode())
    found = in_javascript(f"read(replayLaw(noiseLaw()), {text})", tmp_path)
    assert found["coefficients"] == [" ".join(f"{word:08x}" for word in step) for step in moved]
    assert re.findall(r"line \d+", *found["refused"])


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute on an idle core
def test_the_page_replays_its_run_to_the_recorded_digest_and_its_models_answer_as_recorded(tmp_path):
    shutil.copytree(SITE / "static", tmp_path / "_static")
    page = tmp_path / "index.html"
    filled = explorer.filled("replay.html", replay.data())
    page.write_text(f'<!doctype html><meta charset="utf-8">{filled}', encoding="utf-8")
    assert list(check.problems(tmp_path)) == []
    run, other = replay.both()
    bits = [unpack_bits(record["test"]["greedy_bits"], 2000)[:: replay.EVERY] for record in (run, other)]
    with chromium(tmp_path / "profile", page.as_uri()) as value:
        assert value(f"{CHECKS}replayed()") == [run["ledger"]["weights"], "rp-good"]
        right = np.array(value(f"asked({len(bits[0])})"))
    assert np.array_equal(right[:, 1:], np.transpose(bits).astype(bool))


# the texts of site/ are true


def test_quoted_errors_are_those_of_the_code():
    quoted = re.findall(r"```text\n(.*?)\n```", text_of(SITE, "troubleshooting.md"), re.S)
    files = [*(paths.ROOT / "evoalign_lib").rglob("*.py"), *(paths.NOTEBOOKS / "evoalign_study").rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    code += (paths.ROOT / "Makefile").read_text(encoding="utf-8").replace("$(PYTHON)", "python3")
    assert len(quoted) > 5
    assert [text for text in quoted if text not in code] == []


@pytest.mark.slow
def test_the_examples_run(tmp_path):
    blocks = [
        block
        for page in ("records.md", "own_task.md", "own_reward.md", "own_model.md")
        for block in re.findall(r"^```python\n(.*?)^```$", text_of(SITE, page), re.S | re.M)
    ]
    for number, block in enumerate(blocks):
        (tmp_path / f"{number}.py").write_text(block, encoding="utf-8")
        assert python(f"{number}.py", folder=tmp_path).stdout.strip()
    assert len(blocks) == 4


# the check of what was built

PAGE = '<html><head>{head}</head><body><h1 id="top">T</h1>{body}</body></html>'


def site(folder, head="", body="", style="", script=""):
    (folder / "static").mkdir()
    (folder / "static" / "a.css").write_text(style)
    (folder / "static" / "a.js").write_text(script)
    (folder / "static" / "a.png").write_bytes(b"")
    (folder / "other.html").write_text(PAGE.format(head="", body='<p id="x y">'))
    (folder / "index.html").write_text(PAGE.format(head=head, body=body))
    return list(check.problems(folder))


def test_a_good_site_has_no_problems(tmp_path):
    head = '<link rel="stylesheet" href="static/a.css?v=1"><script src="static/a.js"></script><style>p{}</style>'
    head += '<link rel="next" href="other.html">'
    body = '<a href="#top">a</a><a href="other.html#x%20y">b</a><a href="https://example.org">c</a>'
    body += '<img src="static/a.png" srcset="static/a.png 1x, static/a.png 2x"><img src="data:image/png;base64,AA==">'
    assert site(tmp_path, head, body, "p{background:url('a.png')}", 'f("http://www.w3.org/2000/svg")') == []


FAULTS = [
    ("body", '<a href="gone.html">a</a>', "not a file of the site"),
    ("body", '<a href="other.html#gone">a</a>', "an anchor that the page does not have"),
    ("body", '<a href="file:/tmp/a">a</a>', "another host"),
    ("head", '<link rel="next" href="gone.html">', "not a file of the site"),
    ("head", '<script src="//cdn.example.org/a.js"></script>', "another host"),
    ("head", '<style>@import "https://example.org/a.css";</style>', "another host"),
    ("head", '<meta http-equiv="refresh" content="0; url=https://example.org">', "another host"),
    ("body", '<img src="static/a.png" srcset="https://example.org/a.png 2x">', "another host"),
    ("body", "<p style=\"background: url('https://example.org/a.png')\">", "another host"),
    ("style", "p{background:url(gone.png)}", "not a file of the site"),
    ("script", 'await import("https://cdn.example.org/a.js")', "another host"),
]


@pytest.mark.parametrize(("part", "html", "problem"), FAULTS)
def test_each_fault_is_found(tmp_path, part, html, problem):
    (found,) = site(tmp_path, **{part: html})
    assert problem in found


# docstrings and formulas, where Sphinx is installed (make site)


def test_formulas_become_mathml():
    pytest.importorskip("math_core", reason="make site installs it")
    import mathml

    for latex, has in ((r"\begin{aligned} a &= \sqrt b \end{aligned}", "<mtable"), (r"\sum_{n=1}^{N} z_n", "<munder")):
        made = mathml.to_mathml(latex, display=True)
        assert made.startswith("<math") and 'display="block"' in made and has in made
        assert 'display="block"' not in mathml.to_mathml(latex, display=False)
    with pytest.raises(ValueError, match="Unknown command"):
        mathml.to_mathml(r"\nocommand{x}", display=False)


def build(folder, text):
    """Build a page of this text, a notebook and a module of the reference, with the site's own settings."""
    pytest.importorskip("myst_nb", reason="make site installs it")
    source = folder / "source"
    source.mkdir()
    (source / "index.md").write_text(f"# T\n\n{text}\n\n```{{toctree}}\nnotebook\napi\n```\n", encoding="utf-8")
    (source / "api.md").write_text("# A\n\n```{eval-rst}\n.. automodule:: evoalign_lib.files\n```\n", encoding="utf-8")
    output = nbformat.v4.new_output("stream", text="committed as it stood\n")
    cell = nbformat.v4.new_code_cell("raise RuntimeError('executed')", outputs=[output], execution_count=1)
    title = nbformat.v4.new_markdown_cell("# N")
    notebook = nbformat.v4.new_notebook(cells=[title, cell], metadata={"language_info": {"name": "python"}})
    nbformat.write(notebook, source / "notebook.ipynb")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", str(SITE), str(source)]
    return subprocess.run([*command, str(folder / "html")], capture_output=True, text=True)


def test_a_small_site_is_built_offline_and_executes_nothing(tmp_path):
    done = build(tmp_path, "$$\\theta_{t+1} = \\frac{\\alpha}{N}\\sum_n z_n\\varepsilon_n$$\n\nInline $\\sigma$.")
    assert done.returncode == 0, done.stderr
    html = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "html").glob("*.html")}
    assert html["index"].count("<math") == 2 and not re.search("<script[^>]*mathjax", html["index"], re.I)
    assert "committed as it stood" in html["notebook"] and "Traceback" not in html["notebook"]
    assert 'id="evoalign_lib.files.locked"' in html["api"]
    assert '"stood":' in (tmp_path / "html" / "searchindex.js").read_text(encoding="utf-8")
    assert list(check.problems(tmp_path / "html")) == []


def test_a_release_has_every_record_as_it_is_and_begins_nothing_that_it_would_refuse(tmp_path):
    release.data_set(tmp_path, "https://example.org/a/b")
    kept = pq.read_table(tmp_path / "data/02_grpo_countdown-tiny.parquet").to_pylist()
    committed = read_records(paths.RESULTS / "02_grpo_countdown/tiny.jsonl")
    assert [json.loads(row["record"]) for row in kept] == committed
    assert [(row["spec_hash"], row["arm"]) for row in kept] == [
        (r["spec_hash"], r["spec"].get("arm")) for r in committed
    ]
    for url, out, named in (("http://x", "new", "http://x"), ("https://example.org/a/b", ".", str(tmp_path))):
        with pytest.raises(ValueError, match=re.escape(named)):
            release.release(url, tmp_path / out)
    assert not (tmp_path / "new").exists()
