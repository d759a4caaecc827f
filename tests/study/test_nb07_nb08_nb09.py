"""Notebooks 07, 08 and 09: what they find is what claims are judged by, and what the paper and the figures have."""

import json
import re
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from evoalign_study import coverage_factors as factors
from evoalign_study import nb07_solution_coverage as nb07
from evoalign_study import nb08_weight_geometry as nb08
from evoalign_study import nb09_lmc_analysis as nb09
from evoalign_study import parameters, paths
from evoalign_study.loading import Loader
from evoalign_study.records import pack_probabilities
from evoalign_study.rendering import csv_text
from evoalign_study.sentences import macros_told
from matplotlib import pyplot as plt

from evoalign_lib import tiny

pytestmark = pytest.mark.skipif(
    not all((tiny.bases_folder() / base).is_dir() for base in tiny.BASES), reason="the bases have not been trained yet"
)
TINY = {"scale": "tiny", "model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": True}


@cache
def loaded(study):
    """Settings and committed records of a notebook."""
    run = parameters.check_parameters(TINY.copy(), study.presets())
    load = Loader(study.NOTEBOOK, run, study.groups)
    return run, load(*load.names)


@cache
def results(study):
    return study.results(*loaded(study))


@pytest.fixture
def judged(committed_verdicts):
    """Claim -> its comparisons."""
    return {verdict.id: verdict.intervals for verdict in committed_verdicts}


@pytest.mark.parametrize("study", [nb07, nb08, nb09], ids=lambda study: study.NOTEBOOK)
def test_the_papers_numbers_come_from_the_results(study):
    committed = json.loads((paths.GENERATED / f"numbers_{study.NOTEBOOK}.json").read_text(encoding="utf-8"))
    made = {macro: text for macro, (text, _) in macros_told(results(study), study.MACROS).items()}
    assert made.items() <= committed.items()
    files = [*(paths.PAPER / "sections").glob("*.tex"), *paths.GENERATED.glob("[!n]*.tex"), paths.PAPER / "main.tex"]
    used = {macro for file in files for macro in re.findall(r"\\([A-Za-z]+)", file.read_text(encoding="utf-8"))}
    assert made.keys() <= used


def test_results_are_what_the_claims_are_judged_by(judged):
    """The results and the rules reach the same numbers by ways of their own."""
    cover, weights, lines = (results(study) for study in (nb07, nb08, nb09))
    for arm, words in (("es", "ES"), ("grpo", "GRPO")):
        for key, at in ((f"{arm} cold", "0.6"), (f"{arm} change", "1")):
            name = f"{words}, net change of support temperature {at}"
            assert [i for label, i in judged["C18b"].items() if label.startswith(name)] == [cover[key]]
    for factor in ("rollouts", "update"):
        name = f"effect of the {factor}, net change of support temperature 1"
        assert judged["C19"][name] == cover[f"{factor} change judged"]
    assert judged["E8"]["ES to GRPO, cosine of what runs have in common"] == weights["es grpo cosine"]
    assert weights["grpo common"] in judged["E5"].values()
    drift = weights["single drift"].value - weights["grpo drift"].value
    assert judged["C23"]["ES - GRPO, KL on other skills"].value == pytest.approx(drift)
    for claim, key, what in (("E9", "remedy 0", "ES with anchored decay over"), ("E10", "remedy 2", "ES n8 over")):
        ratios = [i.value for label, i in judged[claim].items() if label.startswith(what) and "KL" in label]
        assert ratios and ratios == pytest.approx([np.log(weights[key].value)] * len(ratios))
    assert judged["C25"]["ES to GRPO, barrier of the error greedy"].value == lines["barrier greedy"].value
    _, records = loaded(nb08)
    assert any(i.value == pytest.approx(nb08.over_walk(records, "es")[:16].mean()) for i in judged["E7"].values())
    norms = [np.log(nb08.norms(records, arm)[:16]).mean() for arm in ("es", "grpo")]
    assert judged["C20"]["ES over GRPO, norm of the displacement"].value == pytest.approx(norms[0] - norms[1])


FIGURES = {
    "coverage_pass_at_k": (nb07, "pass_at_k"),
    "coverage_matched": (nb07, "matched"),
    "coverage_support": (nb07, "support"),
    "coverage_training": (nb07, "training"),
    "coverage_accuracies": (nb07, "accuracies"),
    "coverage_factors": (factors, "cells"),
    "coverage_order": (factors, "composed"),
    "geometry_signal": (nb08, "signal"),
    "geometry_norms": (nb08, "norms"),
    "geometry_layers": (nb08, "layers"),
    "geometry_cosines": (nb08, "cosines"),
    "geometry_drift": (nb08, "drift"),
    "lmc_barriers": (nb09, "barriers"),
    "lmc_from_base": (nb09, "from_base"),
    "lmc_plane": (nb09, "plane"),
    "lmc_noise": (nb09, "noise"),
    "lmc_likelihood": (nb09, "likelihood"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_draws_its_data(name):
    """Every value of the committed data stands in the figure, in sight."""
    study, draw = FIGURES[name]
    fig, plotted = getattr(study, f"figure_{draw}")(*loaded(nb07 if study is factors else study))
    assert csv_text(plotted) == (paths.FIGURES / f"{name}.csv").read_text(encoding="utf-8")
    values = plotted[next(column for column in ("value", "y", "across") if column in plotted)].to_numpy(float)
    marks = [line.get_xydata() for ax in fig.axes for line in ax.get_lines()]
    marks += [dots.get_offsets() for ax in fig.axes for dots in ax.collections]
    drawn = np.concatenate([np.ravel(np.asarray(each, float)) for each in marks if len(each)], dtype=float)
    assert [value for value in values if not np.isclose(drawn, value, rtol=1e-9, atol=1e-12).any()] == []
    for ax in fig.axes:
        low, high = sorted(ax.get_ylim())
        heights = [line.get_ydata() for line in ax.get_lines() if line.get_transform() == ax.transData]
        assert all(low <= y <= high for each in heights for y in np.asarray(each, float))
    plt.close(fig)


# ---- 07


def test_pass_at_k_of_a_few_problems_by_hand():
    """Of two problems, one solved in half of the samples and one never, against two solved in a tenth."""
    _, records = loaded(nb07)
    for model, each in {"grpo": [0.5, 0.0], nb07.BASE: [0.1, 0.1]}.items():
        name = nb07.reach_name(model)
        record = records[name][0]
        records = records | {
            name: [record | {"reach": dict.fromkeys(record["reach"], pack_probabilities(each)), "n": 2}]
        }
    # (1 - .5^k) / 2 against 1 - .9^k: the base is ahead from k = 7 on
    assert 6 < nb07.crossing(records, "grpo", "t1").value < 7
    (found,) = nb07.supports(records, "grpo", "t1")
    assert (found.kept, found.won, found.lost, found.out) == pytest.approx((1, 0, 1, 0), abs=1e-9)
    assert nb07.solved(records, "grpo", "t1", 1).value == pytest.approx(0.25, rel=0.003)


def test_new_cells_have_the_setting_that_is_best_at_full_length():
    """By the curves of the finals: the mean of their last three points, without the helper that the groups use."""
    _, records = loaded(nb07)
    names = ("steps", "sigma", "alpha", "learning_rate", "prompts_per_step", "population_size")
    for name in ("es_weighted", "es_members", "grpo_perturbed"):
        best = max(records[f"finals {name}"], key=lambda r: np.mean(r["curve"]["validation_greedy"][-3:]))["spec"]
        for run in records[name]:
            assert all(run["spec"].get(field) == best.get(field) for field in names), name


def test_a_run_in_two_parts_goes_on_where_it_was_and_is_charged_for_both():
    _, records = loaded(nb07)
    for group in factors.COMPOSED:
        for first, second in factors.parts(records, group):
            assert second["spec"]["start"]["digests"] == [first["digest"]]
            assert first["spec"]["seed"] == second["spec"]["seed"]
    flops = [factors.total(records, group, "forward_flops") for group in factors.ORDERS.values()]
    assert max(flops) / min(flops) < 1.02
    first, second = factors.along(records, "grpo then es", "validation_greedy")
    assert second[0][0] == first[0][-1] and second[1][0] == pytest.approx(first[1][-1])


# ---- 08


def test_drift_at_equal_gain_is_read_from_the_means():
    """Held against plain interpolation; and GRPO in the place of ES drifts once as far, at each of its lengths."""
    run, records = loaded(nb08)
    es, grpo = (
        [
            (nb08.accuracies(models).mean(), nb08.skills(models, "kl").mean())
            for _, models in nb08.by_steps(run, records, a)
        ]
        for a in ("es", "grpo")
    )
    right, drift = zip((float(np.mean(records["base"][0]["test"]["greedy"])), 0.0), *grpo, strict=True)
    for (x, y), (steps, ratio) in zip(es, nb08.equal_gain(run, records), strict=True):
        assert steps in (26, 52, 104, 208)
        assert ratio.value == pytest.approx(np.interp(x, right, drift) / y) and ratio.low < ratio.value < ratio.high
    same = {f"es T={a} mean=1": records[f"grpo T={b} mean=1"] for a, b in ((26, 31), (52, 62), (104, 125))}
    ratios = nb08.equal_gain(run, records | same | {"es mean=1": records["grpo mean=1"]})
    assert [ratio.value for _, ratio in ratios] == pytest.approx([1, 1, 1, 1])


def test_the_share_that_stays_is_that_of_all_weights():
    """Of a layer's counts as the records have them, summed by hand; what stays in float32 stays rounded, too."""
    _, records = loaded(nb08)
    digests = [run["digest"] for run in records["grpo_sgd"]]
    (record,) = (
        r for r in records["products"] if r["spec"]["a"] == r["spec"]["b"] and r["spec"]["a"]["digests"] == digests
    )
    for dtype in ("float32", "bfloat16"):
        moved = sum(np.array(layer["moved"][dtype]) for layer in record["layers"].values())
        assert nb08.stay(records, "grpo_sgd", dtype) == pytest.approx(1 - moved / record["d"])
    assert (nb08.stay(records, "grpo_sgd", "float32") <= nb08.stay(records, "grpo_sgd")).all()


def test_ends_to_compare_are_two():
    run, records = loaded(nb08)
    base, first, second = nb08.ends(run, records)
    assert base == "A0" and first != second
    with pytest.raises(ValueError, match="one"):
        nb08.ends(SimpleNamespace(ends=["one"], bases=["B"]), records)
