"""What notebook 03 shows: answers in words, rows of tables, and figures, from the committed records."""

import re

import nbformat
import numpy as np
import pytest
from evoalign_study import collapse, paths
from evoalign_study import nb03_conciseness as study
from evoalign_study.views import conciseness as view
from evoalign_study.views import conciseness_figures as figures

from evoalign_lib.analysis import hacking


def function(name):
    """A function that a cell of the notebook writes out."""
    cells = nbformat.read(paths.NOTEBOOKS / "03_conciseness.ipynb", as_version=4).cells
    (source,) = [cell.source for cell in cells if cell.cell_type == "code" and f"def {name}(" in cell.source]
    (body,) = re.findall(rf"^def {name}\(.*?(?=^\S)", source, re.MULTILINE | re.DOTALL)
    namespace = {}
    exec(body, namespace)  # our own notebook, as Jupyter would
    return namespace[name]


# ---- what the notebook writes out


def test_repetition_as_the_notebook_writes_it_is_the_librarys():
    repeats = function("repeats")
    texts = [" ".join(["no"] * n) for n in range(20)]
    texts += ["0." + "0" * 40, "The capital of France is Paris.", "abcd" * 7, ""]
    assert [repeats(text) for text in texts] == [hacking.repetitive(text) for text in texts]
    assert {repeats(text) for text in texts} == {True, False}


@pytest.mark.parametrize("decoding", ["greedy", "t1"])
def test_the_first_point_at_a_level_as_the_notebook_writes_it_is_the_librarys(records, decoding):
    first_reached, found = function("first_reached"), set()
    for record in [*records["es"], *records["grpo"]]:
        for level in (-20, -10, -5, -1):
            library = collapse.right_at(record, decoding, at_proxy=level)
            here = first_reached(record, decoding, level)
            found.add(here is None)
            assert (here is None) if library is None else here == pytest.approx(library.mean(), abs=1e-4)
    assert False in found


# ---- answers and tables


def test_answers_hold_the_intervals_of_the_claims(run, records, committed_verdicts):
    """The sentences are made from the notebook's records alone; the verdicts find the same numbers."""
    said = " ".join(view.answers(run, records, records["published"]).values())
    found = {v.id: v.intervals for v in committed_verdicts}
    for label, interval in found["C3"].items():
        if re.search(r"hacked runs|greedy at proxy -5|temperature 1 at proxy -15|KL 0.5", label):
            assert interval.format() in said, label
    share = found["C4"]["settings without collapse"]
    assert share.format(digits=0) in said
    gap = found["C34"]["hacked GRPO map - clean GRPO map, gap at 0.01"]
    assert f"by {gap.value:.2f} [" in said
    assert len(view.answers(run, records, [])) == len(view.answers(run, records, records["published"])) - 1


def test_the_answer_says_whether_the_order_depends_on_decoding(records):
    assert view._hacking_in_words(records).startswith("It depends on decoding. Greedily,")
    greedily = {arm: [r | {"curve": same_decoding(r["curve"])} for r in records[arm]] for arm in study.ARMS}
    assert view._hacking_in_words(greedily).startswith("Greedily,")


def same_decoding(curve):
    """A curve whose samples are as good as its greedy answers."""
    return curve | {f"{name}_t1": curve[f"{name}_greedy"] for name in ("proxy", "right")}


def test_ends_count_hacked_runs(records):
    rows = view.end_rows(records, "es", "grpo").set_index("arm")
    assert rows.loc["ES", "hacked"] == study.hacked(records["es"]) and rows.loc["ES", "seeds"] == len(records["es"])
    assert rows.loc["GRPO", "hacked, t1"] == study.hacked(records["grpo"], "t1")
    right = np.mean([study.end(r, "right_greedy") for r in records["grpo"]])
    assert rows.loc["GRPO", "right, %"] == f"{100 * right:.0f}"


def test_the_bound_of_the_rule_gives_the_hacked_runs_of_the_rule(records):
    rows = view.bound_rows(records, study.untrained(records)["B0"]).set_index("right answers fall by more than")
    for arm in study.ARMS:
        counts = rows[f"{view.arm_label(arm)}, greedy"]
        assert counts[f"{100 * hacking.DROP:.0f} points"] == study.hacked(records[arm])
        assert list(counts) == sorted(counts, reverse=True)


def test_runs_that_do_not_get_to_a_level_are_a_dash(records):
    rows = view.matched_rows(records).set_index(["decoding", "level"])
    never = rows.loc[("temperature 1", "reward -5")]
    assert never["ES, %"] == f"{view.UNDECIDED} (0 runs)" and never["ES is at"] == view.UNDECIDED
    assert never["ES - GRPO"] == never["interpolated"] == view.UNDECIDED
    assert ("temperature 1", "reward -2") not in rows.index and ("temperature 1", "KL 1") in rows.index
    assert "(7 runs)" in rows.loc[("temperature 1", "reward -10"), "ES, %"]
    assert (
        rows.loc[("greedy", "KL 1"), "best point"] == view.UNDECIDED != rows.loc[("greedy", "reward -5"), "best point"]
    )
    few = view.reached_rows(records, ["es_few"], [("at_kl", 2)])
    assert view.UNDECIDED in set(few["KL 2"])


def test_where_two_questions_are_solved():
    curve = {"reward": [None, -9.0, -0.25, 0.0], "kl": [0.0, 0.1, 0.2, 0.3], "right_greedy": [1.0, 0.9, 0.8, 0.7]}
    assert view.solved({"curve": curve}) == (0.2, 80.0)
    assert view.solved({"curve": curve | {"reward": [None, -9.0, -4.0, -3.0]}}) is None


def test_a_run_is_counted_once_among_the_gaps(records):
    gaps = view.gap_rows(records)
    assert not gaps.duplicated(["arm", "setting", "seed"]).any()
    summary = view.gap_summary(gaps, "0.01")
    hacked, runs = zip(*(map(int, cell.split(" of ")) for cell in summary["hacked"]), strict=True)
    assert sum(runs) == len(gaps) and sum(hacked) == (gaps["end"] == "hacked").sum()


def test_published_counts_are_of_all_runs(records):
    es, grpo = view.published_counts(records["published"])
    assert es["runs"] + grpo["runs"] == len(records["published"])
    assert grpo["hacked"] == grpo["by 20 points"] >= grpo["by 30 points"]
    assert view.published_label("GRPO_temp_0.7_beta0.0464") == ("GRPO", "beta 0.0464")


# ---- figures


def test_the_answers_figure_says_where_an_arm_does_not_get(run, records, drawn):
    fig, plotted = figures.answer(run, records)
    said = [text.get_text() for text in fig.axes[1].texts]
    assert said == ["ES does not get there"]  # at temperature 1, at a reward of -5
    ends = plotted[plotted["panel"] == "end"]
    assert len(ends) == 2 * (len(records["es"]) + len(records["grpo"]))


def test_the_ways_and_ends_have_every_run_once(run, records, drawn):
    fig, plotted = figures.ways_and_ends(run, records)
    runs = plotted.groupby("arm")[["setting", "seed"]].apply(lambda part: len(part.drop_duplicates()))
    for arm in study.ARMS:
        assert runs[arm] == len({r["spec_hash"] for r in [*records[arm], *records[f"{arm}_map"]]})
    labels = [text.get_text() for text in fig.legends[0].get_texts()]
    assert {"ES, hacked", "GRPO, hacked"} <= set(labels)
    assert plotted["away"].min() == pytest.approx(0.02)
    _, along = figures.fronts(records)
    assert len(along.drop_duplicates(["arm", "seed"])) == len(records["es"]) + len(records["grpo"])


def test_the_lines_of_the_map_lie_where_the_base_breaks(run, records, drawn):
    fig, _ = figures.es_map(run, records)
    critical = collapse.breaking_sigma(study.untrained(records)["B0"])
    walk, noise = fig.axes[0].lines
    sigmas, alphas = np.log(run.sigma), np.log(run.alpha)
    expected = (np.log(critical) - sigmas[0]) / (sigmas[-1] - sigmas[0]) * (len(sigmas) - 1)
    assert noise.get_ydata()[0] == pytest.approx(expected, abs=0.1)  # the steps of the grid are nearly even
    walked = critical * (run.es_population_size / run.es_steps) ** 0.5
    expected = (np.log(walked) - alphas[0]) / (alphas[-1] - alphas[0]) * (len(alphas) - 1)
    assert walk.get_xdata()[0] == pytest.approx(expected, abs=0.1)


def test_the_settings_far_from_the_others_are_named(records, drawn):
    fig, _ = figures.gaps(records)
    named = {text.get_text() for ax in fig.axes for text in ax.texts}
    assert "sigma 0.03\nalpha 0.0015" in named and len(named) <= 2
