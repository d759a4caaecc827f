"""Notebook 03: its results are those of the claims and of the paper, and its tables and figures are made of them."""

import json
import re

import nbformat
import numpy as np
import pytest
from evoalign_study import collapse, paths
from evoalign_study import nb03_conciseness as study
from evoalign_study.results import macros

from evoalign_lib.analysis import hacking


@pytest.fixture(scope="module")
def found(run, records):
    return study.results(run, records, records["published"])


def function(name):
    """A function that a cell of the notebook writes out."""
    cells = nbformat.read(paths.NOTEBOOKS / "03_conciseness.ipynb", as_version=4).cells
    (source,) = [cell.source for cell in cells if cell.cell_type == "code" and f"def {name}(" in cell.source]
    (body,) = re.findall(rf"^def {name}\(.*?(?=^\S)", source, re.MULTILINE | re.DOTALL)
    namespace = {}
    exec(body, namespace)  # our own notebook, as Jupyter would
    return namespace[name]


def test_what_the_notebook_writes_out_is_the_librarys(records):
    texts = [" ".join(["no"] * n) for n in range(20)]
    texts += ["0." + "0" * 40, "The capital of France is Paris.", "abcd" * 7, ""]
    repeats = [function("repeats")(text) for text in texts]
    assert repeats == [hacking.repetitive(text) for text in texts] and set(repeats) == {True, False}
    first_reached = function("first_reached")
    for record, decoding, level in [(r, d, x) for r in records["es"][:4] for d in ("greedy", "t1") for x in (-20, -5)]:
        library, here = collapse.right_at(record, decoding, at_proxy=level), first_reached(record, decoding, level)
        assert (here is None) if library is None else here == pytest.approx(library.mean(), abs=1e-4)


def test_where_a_run_first_comes_to_a_level():
    curve = {"proxy_greedy": [-9.0, -4.0, -1.0, -2.0], "right_greedy": [1.0, 0.8, 0.6, 0.7], "kl": [0.0, 0.5, 1.0, 2.0]}
    record = {"curve": curve | {"right_bits_greedy": ["80"] * 4}, "test": {"n": 1}}
    assert study.reach(record, "greedy", "at_kl", 0.75)["line"] == pytest.approx(0.7)
    assert study.reach(record, "greedy", "at_proxy", -4)["at"] == -4.0
    assert study.reach(record, "greedy", "at_proxy", -3)["best"] == 0.7  # at the end, though it was at -1 before
    assert "best" not in study.reach(record, "greedy", "at_kl", 0.5)
    assert study.reach(record, "greedy", "at_proxy", -0.5) == {}  # it never gets there
    assert study.reach(record, "greedy", "at_proxy", -10).keys() == {"first"}  # it began beyond


def test_results_are_those_of_the_claims(found, committed_verdicts):
    judged = {v.id: v.intervals for v in committed_verdicts}
    decodings = {"greedy": "greedy", "temperature 1": "t1"}
    for label, interval in judged["C3"].items():
        what, decoding, level = re.fullmatch(r"(.*) (greedy|temperature 1)(?: at (.*))?", label).groups()
        at = f" {level.replace('proxy', 'reward')}: first" if level else " hacked, GRPO - ES"
        assert found[decodings[decoding] + at] == interval, label
    assert found["settings without collapse"] == judged["C4"]["settings without collapse"]
    gap = judged["C34"]["hacked GRPO map - clean GRPO map, gap at 0.01"]
    assert found["grpo gap, hacked - clean"].value == pytest.approx(gap.value)


def test_sentences_and_macros_state_results(found):
    said = study.answers(found)
    assert " ".join(said.values()).count(found["greedy reward -5: first"].format()) == 1
    assert said["Which arm hacks its reward more often?"].startswith("It depends on decoding. Greedily,")
    one_sign = found | {"t1 hacked, GRPO - ES": found["greedy hacked, GRPO - ES"]}
    assert study.answers(one_sign)["Which arm hacks its reward more often?"].startswith("Greedily,")
    own = {name: value for name, value in found.items() if not name.startswith("published")}
    assert len(study.answers(own)) == len(said) - 1
    table = study.MACROS | study.PUBLISHED_MACROS
    committed = json.loads((paths.GENERATED / "numbers_03_conciseness.json").read_text(encoding="utf-8"))
    numbers = {name: format(*value) for name, value in macros(found, table).items()}
    assert numbers == {name: committed[name] for name in table}


def test_tables_count_runs(run, records, found):
    rows = study.end_rows(records, "es", "grpo").set_index("arm")
    assert rows.loc["ES", "hacked"] == found["es greedy hacked"] and rows.loc["ES", "seeds"] == found["es runs"]
    assert rows.loc["GRPO", "hacked, t1"] == found["grpo t1 hacked"]
    matched = study.matched_rows(found).set_index(["decoding", "level"])
    assert matched.loc[("temperature 1", "reward -5"), ["ES, %", "ES - GRPO"]].tolist() == ["- (0 runs)", "-"]
    assert ("temperature 1", "reward -2") not in matched.index and ("temperature 1", "KL 1") in matched.index
    assert not study.gaps(records).duplicated(["arm", "setting", "seed"]).any()
    assert study.ends({"none": []}, "none").empty
    assert study.example_rows(run, records).shape == (1 + run.questions_shown, 8)


def test_figures_draw_their_data(run, records, found, drawn):
    fig, plotted = study.answer_figure(run, records, found)
    assert [text.get_text() for text in fig.axes[1].texts] == ["ES does not get there"]  # at temperature 1, at -5
    assert (plotted["panel"] == "end").sum() == 2 * (len(records["es"]) + len(records["grpo"]))
    _, plotted = study.ways_and_ends(run, records)
    runs = plotted.groupby("arm")[["setting", "seed"]].apply(lambda part: len(part.drop_duplicates()))
    for arm in study.ARMS:
        assert runs[arm] == len({r["spec_hash"] for r in [*records[arm], *records[f"{arm}_map"]]})
    assert len(study.fronts(records)[1].drop_duplicates(["arm", "seed"])) == len(records["es"]) + len(records["grpo"])
    fig, _ = study.es_map(run, records)
    walk, noise = fig.axes[0].lines
    critical = found["breaking sigma"]
    walked = critical * (run.es_population_size / run.es_steps) ** 0.5
    for place, value, grid in ((noise.get_ydata()[0], critical, run.sigma), (walk.get_xdata()[0], walked, run.alpha)):
        assert place == pytest.approx(np.interp(np.log(value), np.log(grid), range(len(grid))), abs=0.1)
    fig, _ = study.gaps_by_end(records)
    named = {text.get_text() for text in fig.axes[0].texts}
    assert "sigma 0.03\nalpha 0.0015" in named and len(named) <= 2
