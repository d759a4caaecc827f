"""What stands behind the notebooks: presets, groups of runs, their loader, and the numbers that the paper quotes."""

import json
import re
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from evoalign_study import loading, parameters, paths, sweep
from evoalign_study import nb01_es_countdown as es_countdown
from evoalign_study import nb02_grpo_countdown as grpo_countdown
from evoalign_study import nb03_conciseness as conciseness
from evoalign_study import nb04_safety_judges as safety_judges
from evoalign_study import nb05_stability as stability
from evoalign_study import nb07_solution_coverage as solution_coverage
from evoalign_study import nb08_weight_geometry as weight_geometry
from evoalign_study import nb09_lmc_analysis as lmc_analysis
from evoalign_study.kinds.base import base_specs
from evoalign_study.loading import Group, Loader
from evoalign_study.records import pack_probabilities, read_records, record_files, spec_hash
from evoalign_study.rendering import csv_text
from evoalign_study.views import lmc_analysis as lmc_view
from evoalign_study.views import (
    lmc_analysis_figures,
    solution_coverage_figures,
    stability_figures,
    weight_geometry_figures,
)
from evoalign_study.views import solution_coverage as coverage_view
from evoalign_study.views import solution_coverage_factors as factors
from evoalign_study.views import stability as stability_view
from evoalign_study.views import weight_geometry as geometry_view
from matplotlib import pyplot as plt

from evoalign_lib import tiny
from evoalign_lib.analysis import stats
from tests.helpers import random_model, tokenizer

FILES = sorted((paths.ROOT / "evoalign_lib/study/notebooks").glob("*.py"))
MODULES = [import_module(f"evoalign_study.{f.stem}") for f in FILES if f.stem not in ("__init__", "loading")]
MODULES.sort(key=lambda module: module.NOTEBOOK)
AHEAD = [module for module in MODULES if not (paths.NOTEBOOKS / f"{module.NOTEBOOK}.ipynb").is_file()]
"""Whose runs come before their notebook."""
MODULES = [module for module in MODULES if module not in AHEAD]
PARAMETERS = {"scale": "tiny", "model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": False}
pytestmark = pytest.mark.skipif(
    not all((tiny.bases_folder() / base).is_dir() for base in tiny.BASES), reason="the bases have not been trained yet"
)


def run_of(module, **given):
    """The parameters and settings of a notebook."""
    namespace = PARAMETERS | given
    return parameters.check_parameters(namespace, module.presets(namespace["model"]))


def loader_of(module, **given):
    return Loader(module.NOTEBOOK, run_of(module, **given), module.groups)


def hashes(specs):
    return {name: [spec_hash(spec) for spec in own] for name, own in specs.items()}


@lru_cache
def loaded(module):
    """The loader of a notebook at scale tiny, with the committed records of every group."""
    load = loader_of(module, dry_run=True)
    load(*load.names)
    return load


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model that is none of the tiny world's."""
    folder = tmp_path_factory.mktemp("model")
    random_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


# ---- presets and groups


def test_there_is_a_module_for_every_notebook():
    assert [module.NOTEBOOK for module in MODULES] == sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))
    assert [module.NOTEBOOK for module in AHEAD] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NOTEBOOK)
def test_scales_have_the_same_settings(module):
    scales = module.presets("my/model")
    assert list(scales) == ["tiny", "smoke", "full"] and scales["full"]["bases"] == ["my/model"]
    assert list(scales["tiny"]) == list(scales["smoke"])
    assert not (scales["tiny"].keys() | scales["full"].keys()) & PARAMETERS.keys()
    assert scales["tiny"]["retrain"] == []
    own = module.presets()["full"]["bases"][0]
    if module is safety_judges:  # at scale full other models judge, with settings of their own
        assert own == "PKU-Alignment/alpaca-7b-reproduced"
        return
    assert scales["full"].keys() - scales["tiny"].keys() <= {"micro_batch", "tensor_parallel"}
    assert own.startswith("Qwen/")


def test_the_groups_are_the_committed_records():
    """Every committed record is one of a declared group, and every declared run has its record."""
    committed = {r["spec_hash"]: r for file in record_files("tiny") for r in read_records(file)}
    declared = set()
    for module in MODULES:
        load = loaded(module)
        specs = hashes(load.specs())  # the records of the sweeps are there: nothing is a stand-in
        assert specs == {name: [r["spec_hash"] for r in load.records[name]] for name in specs}
        own = {h for h, record in committed.items() if record["notebook"] == module.NOTEBOOK}
        declared |= {h for each in specs.values() for h in each}
        assert own <= declared, module.NOTEBOOK
    for module in AHEAD:  # not all of their runs are there yet
        load = loader_of(module, dry_run=True)
        for name in load.names:
            with suppress(sweep.DryRun):
                load(name)
        specs = {h for each in hashes(load.specs()).values() for h in each}
        declared |= {h for h, record in committed.items() if record["notebook"] == module.NOTEBOOK and h in specs}
    assert declared == committed.keys()


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NOTEBOOK)
def test_the_groups_have_the_same_names_at_every_scale(module, model_folder, request):
    """At scale full, too, where settings and sizes differ; what is measured on small models alone stays tiny."""
    if module is conciseness:  # at scale full it trains on published questions
        request.getfixturevalue("external_data")
    names, of_tiny_world = {}, module in (lmc_analysis, solution_coverage, weight_geometry)
    for scale, model in (("tiny", ""), ("smoke", ""), ("full", model_folder)):
        if module is safety_judges and model:  # whose scorers have a test of their own
            names[scale] = names["tiny"]
            continue
        load = loader_of(module, scale=scale, model=model, dry_run=True)
        names[scale] = {re.sub(r"=.*| \d+$", "", name) for name in load.names}  # of one for each rank or size
        for name, own in load.specs().items():
            exact = name in ("estimator", "audit", "audit base", "kl", "memory", "processes", "scaling", "storage") or (
                of_tiny_world and name != "sampled"
            )
            assert {spec["scale"] for spec in own} <= {"tiny" if exact and model else scale}, name
    assert names["tiny"] == names["smoke"] == names["full"] | {n for n in names["tiny"] if "filler" in n}


def test_where_a_larger_model_is_the_tiny_worlds_records_are_shown(model_folder):
    load = loader_of(es_countdown, scale="full", model=model_folder, dry_run=True)
    steps = load("estimator")["estimator"]
    assert len(steps) == 160 and {r["spec"]["base"] for r in steps} == {"A0"}
    with pytest.raises(sweep.DryRun, match="0 of 1 runs have records"):
        load("ledger")


@pytest.mark.parametrize(
    ("module", "given", "message"),
    [
        (grpo_countdown, {"seeds": 1}, "seeds=1: arms are compared by their spread"),
        (stability, {"seeds": 1}, "one seed per arm has no spread"),
        (stability, {"seeds_match": 1}, "one seed per arm has no spread"),
        (stability, {"populations": [8, 30]}, r"populations=\[8, 30\]: take three in rising order, the tuned 30"),
        (stability, {"populations": [128, 30, 8]}, "take three in rising order"),
        (stability, {"populations": [30, 4000, 5000]}, r"evaluate \[6240, 8000, 5000\] members: take sizes at which"),
        (stability, {"prompt_counts": [50]}, r"prompt_counts=\[50\]: one value makes no comparison"),
        (stability, {"horizons": [4]}, r"horizons=\[4\]: one value makes no comparison"),
        (stability, {"bases": ["A0", "A1", "A2", "A0"]}, "take at most three"),
        (stability, {"scale": "full", "horizons": [4, 16]}, r"horizons=\[4, 16\] are for tiny bases"),
        (conciseness, {"unique_prompts": 7}, "unique_prompts=7"),
        (es_countdown, {"curve_points": 1}, "curve_points=1 leaves out the last step"),
        (es_countdown, {"n_seeds": 10**9}, "n_seeds=1000000000 must be at most 10000"),
        (es_countdown, {"temperatures": [float("nan")]}, "temperatures=nan must be a finite number"),
        (grpo_countdown, {"sweep_factors": {"alpha": -1.0}}, r"sweep_factors=-1\.0 must not be negative"),
        (stability, {"force": True, "retrain": ["grop"]}, "there is no group 'grop'. Did you mean 'grpo'"),
    ],
)
def test_what_no_run_can_have_is_refused_before_any_work(module, given, message):
    with pytest.raises(ValueError, match=message):
        loader_of(module, **given)


def test_stand_ins_say_how_much_work_there_is_at_most():
    """Before the sweeps have run nobody knows the settings, but the number of runs is known."""
    at_most = stability.work(loader_of(stability).specs())
    done = stability.work(loaded(stability).specs())
    assert at_most == {"es": (176, 91_086_848), "grpo": (148, 6_272_000)}
    assert done["es"] == at_most["es"] and done["grpo"] == (140, 6_272_000 - 8 * 64_000)  # one winner was the tuned one


def test_an_arms_own_settings():
    run = run_of(grpo_countdown, es_steps=7, grpo_steps=9, sft_epochs=3)
    assert loading.own_settings(run, "es_random")["steps"] == 7
    assert loading.own_settings(run, "rloo")["steps"] == 9
    assert loading.own_settings(run, "sft")["epochs"] == 3 and "steps" not in loading.own_settings(run, "sft")


def test_sweeps_are_scaled_and_cut():
    run = run_of(grpo_countdown, sweep_size=2, sweep_factors={"alpha": 0.5})
    assert loading.swept_choices(run, "es") == [{"sigma": 3e-3, "alpha": 1.25e-3}, {"sigma": 3e-3, "alpha": 2.5e-3}]
    assert loading.ranked_choices(run, "es", None) == loading.swept_choices(run, "es")


def test_contenders_are_the_best_at_each_step_size():
    load = loaded(stability)
    run = run_of(stability)
    for arm, step in stability.STEP.items():
        found = stability.contenders(run, load.records, arm)
        assert len({setting[step] for setting in found}) == len(found) == run.transfer_size
        assert stability.tuned(run, load.records, arm) in found
        assert found == sorted(found, key=lambda setting: tuple(setting.values()))


# ---- the paper's numbers


def quoted(numbers):
    return {macro: format(value, form) for macro, (value, form) in numbers.items()}


def generated(notebook):
    return json.loads((paths.GENERATED / f"numbers_{notebook}.json").read_text(encoding="utf-8"))


def test_numbers_of_notebook_03():
    of = loaded(conciseness).records
    numbers = conciseness.numbers(run_of(conciseness), of) | conciseness.published_numbers(of["published"])
    assert quoted(numbers) == generated("03_conciseness")


def test_numbers_of_notebook_05():
    run, of = run_of(stability), loaded(stability).records
    by_arm = {arm: stability.scores(run, of, arm) for arm in stability.ARMS}
    thinned = {arm: stability.thinned(of, arm) for arm in stability.ARMS}
    fell = {arm: stability.drawdowns(of, arm, "greedy") for arm in stability.ARMS}
    regrets = {arm: stability.regret(run, of, arm, run.bases[1:]) for arm in stability.ARMS}
    kept = {arm: stability.regret_if_ties_keep(run, of, arm) for arm in stability.ARMS}
    slopes = stability.contrast(of, "prompts", run.prompt_counts, stability.slope_weights(run.prompt_counts))
    between, last = (stability.change_of_gain(of, run.horizons[0], to) for to in run.horizons[1:])
    stated = {
        "SpreadEnd": stability.log_ratio(by_arm, ("test", "greedy")),
        "SpreadMatched": stability.log_ratio(by_arm, ("at mean", run.matched_mean)),
        "Drawdown": stats.stratified_bootstrap([fell["grpo"]], [fell["es"]]),
        "DrawdownThinned": stats.stratified_bootstrap([thinned["grpo"]], [thinned["es"]]),
        "Regret": stability.compared(regrets, "grpo", "es"),
        "RegretTies": stability.compared(kept, "grpo", "es")["difference"],
        "PromptSlope": stability.compared(slopes, "grpo", "es"),
        "HorizonChange": stability.compared(last, "es", "grpo"),
        "HorizonBetween": stability.compared(between, "es", "grpo"),
    }
    assert quoted(stability.numbers(run, of, stated)) == generated("05_stability")


@pytest.mark.parametrize(
    ("module", "views"),
    [(solution_coverage, (coverage_view, factors)), (weight_geometry, (geometry_view,)), (lmc_analysis, (lmc_view,))],
    ids=["07", "08", "09"],
)
def test_numbers_of_the_notebooks_with_views(module, views):
    run, of = run_of(module), loaded(module).records
    found = [quoted(view.numbers(run, of)) for view in views]
    assert dict(pair for each in found for pair in each.items()) == generated(module.NOTEBOOK)


def test_what_the_weights_say_is_what_the_claims_are_judged_by(committed_verdicts):
    """The tables and the rules reach the same numbers by ways of their own."""
    of, found = loaded(weight_geometry).records, {v.id: v.intervals for v in committed_verdicts}
    both = geometry_view.corrected(of, "es", "grpo").value
    assert found["E8"]["ES to GRPO, cosine of what runs have in common"] == both
    assert geometry_view.signal(of, "grpo").share in found["E5"].values()
    walk = geometry_view.over_walk(of, "es")[:16].mean()
    assert any(interval.value == pytest.approx(walk) for interval in found["E7"].values())
    norms = [np.log(geometry_view.norms(of, arm)[:16]).mean() for arm in ("es", "grpo")]
    assert found["C20"]["ES over GRPO, norm of the displacement"].value == pytest.approx(norms[0] - norms[1])
    drift = [np.mean([geometry_view.skill(r, "kl") for r in of[f"{arm} mean=1"]]) for arm in ("es", "grpo")]
    assert found["C23"]["ES - GRPO, KL on other skills"].value == pytest.approx(drift[0] - drift[1])
    for claim, group, what in (
        ("E9", "es_anchored=0.005", "ES with anchored decay over"),
        ("E10", "es N=8", "ES n8 over"),
    ):
        ratio = np.log(geometry_view.drift_ratio(of, f"{group} mean=1", "es mean=1").value)
        judged = [i.value for words, i in found[claim].items() if words.startswith(what) and "KL" in words]
        assert judged and judged == pytest.approx([ratio] * len(judged)), found[claim].keys()
    height = lmc_view.barrier(loaded(lmc_analysis).records, "es", "grpo", "greedy").interval.value
    assert found["C25"]["ES to GRPO, barrier of the error greedy"].value == height


def test_drift_at_equal_gain_is_read_from_the_means():
    """Held against plain interpolation; and GRPO in the place of ES drifts once as far, at each of its lengths."""
    run, of = run_of(weight_geometry), loaded(weight_geometry).records
    means = {
        arm: [
            (geometry_view.accuracies(models, "greedy").mean(), np.mean([geometry_view.skill(r, "kl") for r in models]))
            for _, models in geometry_view.by_steps(run, of, arm)
        ]
        for arm in ("es", "grpo")
    }
    base = (float(np.mean(of["base"][0]["test"]["greedy"])), 0.0)
    right, drift = zip(base, *means["grpo"], strict=True)
    for (x, y), (steps, found, ratio) in zip(means["es"], geometry_view.equal_gain(run, of), strict=True):
        assert found == pytest.approx(x) and steps in (26, 52, 104, 208)
        assert ratio.value == pytest.approx(np.interp(x, right, drift) / y) and ratio.low < ratio.value < ratio.high
    same = {f"es T={a} mean=1": of[f"grpo T={b} mean=1"] for a, b in ((26, 31), (52, 62), (104, 125))}
    ratios = geometry_view.equal_gain(run, of | same | {"es mean=1": of["grpo mean=1"]})
    assert [ratio.value for _, _, ratio in ratios] == pytest.approx([1, 1, 1, 1])


def test_the_share_that_stays_is_that_of_all_weights():
    """Of a layer's counts as the records have them, summed by hand; what stays in float32 stays rounded, too."""
    of = loaded(weight_geometry).records
    digests = [run["digest"] for run in of["grpo_sgd"]]
    (record,) = (r for r in of["products"] if r["spec"]["a"] == r["spec"]["b"] and r["spec"]["a"]["digests"] == digests)
    for dtype in ("float32", "bfloat16"):
        moved = sum(np.array(layer["moved"][dtype]) for layer in record["layers"].values())
        assert geometry_view.stay(of, "grpo_sgd", dtype) == pytest.approx(1 - moved / record["d"])
    assert (geometry_view.stay(of, "grpo_sgd", "float32") <= geometry_view.stay(of, "grpo_sgd")).all()


def test_what_sampling_solves_is_what_the_claims_are_judged_by(committed_verdicts):
    of, run = loaded(solution_coverage).records, run_of(solution_coverage)
    (found,) = (v.intervals for v in committed_verdicts if v.id == "C18b")
    for arm, words in (("es", "ES"), ("grpo", "GRPO")):
        for at in ("t0.6", "t1"):
            name = f"{words}, net change of support temperature {at.removeprefix('t')}"
            judged = [interval for label, interval in found.items() if label.startswith(name)]
            assert judged == [coverage_view.change(run, of, arm, at)]


def test_pass_at_k_of_a_few_problems_by_hand():
    """Of two problems, one solved in half of the samples and one never, against two solved in a tenth."""
    of, run = loaded(solution_coverage).records, run_of(solution_coverage)
    for model, each in {"grpo": [0.5, 0.0], solution_coverage.BASE: [0.1, 0.1]}.items():
        name = solution_coverage.reach_name(model)
        record = of[name][0]
        of = of | {name: [record | {"reach": dict.fromkeys(record["reach"], pack_probabilities(each)), "n": 2}]}
    # (1 - .5^k) / 2 against 1 - .9^k: the base is ahead from k = 7 on
    assert 6 < coverage_view.crossing(run, of, "grpo", "t1")[0] < 7
    (found,) = coverage_view.supports(run, of, "grpo", "t1")
    assert (found.kept, found.won, found.lost, found.out) == pytest.approx((1, 0, 1, 0), abs=1e-9)
    assert coverage_view.solved(run, of, "grpo", "t1", 1).value == pytest.approx(0.25, rel=0.003)


def test_effects_of_rollouts_and_updates_are_those_that_claims_are_judged_by(committed_verdicts):
    of = loaded(solution_coverage).records
    (found,) = (v.intervals for v in committed_verdicts if v.id == "C19")
    for at, asked in (("0.6", factors.ASKED[4]), ("1", factors.ASKED[5])):
        judged = {label: each for label, each in found.items() if label.endswith(f"support temperature {at}")}
        effects = factors.effects(of, asked)
        assert judged[f"effect of the rollouts, net change of support temperature {at}"] == effects.rows
        assert judged[f"effect of the update, net change of support temperature {at}"] == effects.columns


def test_new_cells_have_the_setting_that_is_best_at_full_length():
    """By the curves of the finals: the mean of their last three points, without the helper that the groups use."""
    of = loaded(solution_coverage).records
    for name in ("es_weighted", "es_members", "grpo_perturbed"):
        finals = {r["spec_hash"]: np.mean(r["curve"]["validation_greedy"][-3:]) for r in of[f"finals {name}"]}
        (best,) = [r["spec"] for r in of[f"finals {name}"] if finals[r["spec_hash"]] == max(finals.values())][:1]
        for run in of[name]:
            names = ("steps", "sigma", "alpha", "learning_rate", "prompts_per_step", "population_size")
            assert all(run["spec"].get(field) == best.get(field) for field in names), name


def test_a_run_in_two_parts_goes_on_where_it_was_and_is_charged_for_both():
    of = loaded(solution_coverage).records
    for group in solution_coverage.COMPOSED:
        for first, second in factors.parts(of, group):
            assert second["spec"]["start"]["digests"] == [first["digest"]]
            assert first["spec"]["seed"] == second["spec"]["seed"]
    flops = [factors.total(of, group, "forward_flops") for group in factors.ORDERS.values()]
    assert max(flops) / min(flops) < 1.02
    first, second = factors.along(of, "grpo then es", "validation_greedy")
    assert second[0][0] == first[0][-1] and second[1][0] == pytest.approx(first[1][-1])


@pytest.mark.parametrize(
    "draw",
    ["pass_at_k", "matched", "support", "training", "accuracies", "cells", "composed"],
)
def test_the_figures_of_notebook_07_draw_their_data(draw):
    of, run = loaded(solution_coverage).records, run_of(solution_coverage)
    check_drawn(*getattr(solution_coverage_figures, draw)(run, of))


@pytest.mark.parametrize("draw", ["signal", "norms", "layers", "cosines", "drift"])
def test_the_figures_of_notebook_08_draw_their_data(draw):
    of, run = loaded(weight_geometry).records, run_of(weight_geometry)
    check_drawn(*getattr(weight_geometry_figures, draw)(run, of))


@pytest.mark.parametrize("draw", ["barriers", "from_base", "plane", "noise", "likelihood"])
def test_the_figures_of_notebook_09_draw_their_data(draw):
    check_drawn(*getattr(lmc_analysis_figures, draw)(run_of(lmc_analysis), loaded(lmc_analysis).records))


def check_drawn(fig, plotted):
    """Every value of the data stands in the figure, as it is drawn."""
    values = plotted[next(name for name in ("value", "y", "across") if name in plotted)].to_numpy(float)
    lines = [line.get_xydata() for ax in fig.axes for line in ax.get_lines()]
    dots = [dot.get_offsets() for ax in fig.axes for dot in ax.collections]
    drawn = np.concatenate([np.ravel(np.asarray(each, float)) for each in [*lines, *dots]])
    assert [value for value in values if not np.isclose(drawn, value, rtol=1e-9, atol=1e-12).any()] == []
    plt.close(fig)


def test_ends_to_compare_are_two():
    of = loaded(weight_geometry).records
    base, first, second = weight_geometry.ends(run_of(weight_geometry), of)
    assert base == "A0" and first != second
    with pytest.raises(ValueError, match="give two models that started from"):
        weight_geometry.ends(SimpleNamespace(ends=["one"], bases=["B"]), of)


def test_numbers_leave_out_what_has_no_interval():
    run, of = run_of(stability), loaded(stability).records
    found = stability.numbers(run, of, {"SpreadMatched": None, "Regret": {}})
    assert not [macro for macro in found if "Spread" in macro or "Regret" in macro] and "StabSeeds" in found


# ---- what notebooks say and draw


# ---- what is measured


def test_where_a_run_crosses_a_level():
    curve = {"proxy_greedy": [-9.0, -4.0, -1.0, -2.0], "right_greedy": [1.0, 0.8, 0.6, 0.7], "kl": [0.0, 0.5, 1.0, 2.0]}
    record = {"curve": curve}
    assert conciseness.crossing(record, "greedy", "at_proxy", -4) == (-9.0, -4.0, 1.0, 0.8)
    assert conciseness.crossing(record, "greedy", "at_kl", 0.75) == (0.5, 1.0, 0.8, 0.6)
    assert conciseness.crossing(record, "greedy", "at_proxy", -0.5) is None  # it never gets there
    assert conciseness.crossing(record, "greedy", "at_proxy", -10) is None  # it began beyond
    assert conciseness.interpolated(record, "greedy", "at_kl", 0.75) == pytest.approx(0.7)
    assert conciseness.best_past(record, "greedy", "at_proxy", -3) == 0.7  # at the end, though it was at -1 before
    with pytest.raises(ValueError, match="axis='at_kl': the best point past a level"):
        conciseness.best_past(record, "greedy", "at_kl", 0.5)


@pytest.mark.parametrize(
    ("line", "ended"),
    [([0.1, 0.3, 0.25], "kept"), ([0.1, 0.3, 0.19], "fell back"), ([0.1, 0.3, 0.1], "failed"), ([0.1, 0.1], "failed")],
)
def test_how_a_run_ended(line, ended):
    record = {"curve": {"validation_greedy": line}}
    assert stability.outcome(record) == ended and stability.failed([record]) == (ended == "failed")


def test_slope_weights_give_the_least_squares_slope():
    counts, accuracy = [2, 50, 200, 1000], np.array([0.1, 0.2, 0.4, 0.3])
    slope = stability.slope_weights(counts) @ accuracy
    assert slope == pytest.approx(np.polyfit(np.log10(counts), accuracy, 1)[0])


# ---- notebook 05: answers, tables and figures


def test_the_answers_of_notebook_05_have_the_papers_numbers():
    run, of = run_of(stability), loaded(stability).records
    stated = stability.stated(run, of)
    macros = quoted(stability.numbers(run, of, stated))
    assert macros == generated("05_stability")
    seeds, curves, settings, population, bases, problems, horizon, replay = stability_view.answers(
        run, of, stated
    ).values()

    def interval(stem):
        value, low, high = (macros[f"Stab{stem}{end}"] for end in ("Value", "Low", "High"))
        return f"{value} [{low}, {high}]"

    assert interval("SpreadEnd") in seeds and interval("SpreadMatched") in seeds and "(n = 16 seeds per arm)" in seeds
    assert interval("Drawdown") in curves and "ES gains" in curves
    for arm in ("Es", "Grpo"):
        assert f"{macros[f'StabMapNear{arm}']} of {macros[f'StabMapSettings{arm}']} settings" in settings
        assert f"{macros[f'StabMapFailed{arm}']} of {macros[f'StabMapRuns{arm}']} runs" in settings
    assert "N = 30 minus N = 8 is" in population and "N = 30 minus N = 128 is" in population
    for stem, answer in (("Regret", bases), ("PromptSlope", problems), ("HorizonChange", horizon)):
        for side in ("Es", "Grpo", "Difference"):
            assert interval(f"{stem}{side}") in answer
    assert replay.startswith("16 of 16 ")
    without = stability_view.answers(run, of, stated | {"Regret": {}, "PromptSlope": {}, "HorizonChange": {}})
    assert len(without) == 5  # at scales that have no such runs


def test_the_tables_of_notebook_05_are_those_of_the_paper():
    load = loaded(stability)
    run, of = run_of(stability), {name: load.records[name] for name in load.names}
    tables = {
        "spread": stability_view.spread_table(run, of),
        "drawdown": stability_view.drawdown_table(of, stability.drawdown_gaps(of)),
        "sensitivity": stability_view.sensitivity_table(of),
        "population": stability_view.population_table(run, of),
        "transfer": stability_view.transfer_table(run, of),
        "prompts": stability_view.prompts_table(run, of),
        "horizon": stability_view.horizon_table(run, of),
        "budgets": stability_view.budgets(of),
    }
    for name, table in tables.items():
        committed = (paths.GENERATED / f"stability_{name}.csv").read_text(encoding="utf-8")
        assert csv_text(table) == committed, name


def test_the_figures_of_notebook_05_draw_their_data():
    run, of = run_of(stability), loaded(stability).records
    drawn = {
        "seeds": stability_figures.figure_seeds(run, of),
        "drawdown_runs": stability_figures.figure_drawdowns(of),
        "maps": stability_figures.figure_maps(run, of),
        "population_curves": stability_figures.figure_populations(run, of),
        "transfer_runs": stability_figures.figure_transfer(run, of),
        "prompts_runs": stability_figures.figure_prompts(run, of),
        "horizon_runs": stability_figures.figure_horizon(run, of),
    }
    for name, (_, data) in drawn.items():
        assert csv_text(data) == (paths.FIGURES / f"stability_{name}.csv").read_text(encoding="utf-8"), name

    def dots(ax):
        """Heights of all runs that are drawn."""
        return sorted(float(y) for found in ax.collections for y in found.get_offsets()[:, 1])

    figure, data = drawn["seeds"]
    curves = [data[(data["panel"] == "curves") & (data["arm"] == arm)] for arm in stability.ARMS]
    for line, band, part in zip(figure.axes[0].lines, figure.axes[0].collections, curves, strict=True):
        points = part[part["completions"] > 0].groupby("completions")["accuracy"]
        assert line.get_ydata() == pytest.approx(points.mean())  # every run is in its band
        heights = band.get_paths()[0].vertices[:, 1]
        assert (heights.min(), heights.max()) == pytest.approx((points.min().min(), points.max().max()))
    figure, data = drawn["horizon_runs"]
    assert dots(figure.axes[0]) == pytest.approx(sorted(data["greedy"]))
    figure, data = drawn["prompts_runs"]
    for ax, column in zip(figure.axes, ("greedy", "reward"), strict=True):
        assert dots(ax) == pytest.approx(sorted(data[column]))
    figure, data = drawn["population_curves"]
    assert dots(figure.axes[1]) == pytest.approx(sorted(data[data["panel"] == "test"]["greedy"]))
    figure, data = drawn["maps"]
    es, grpo, runs = figure.axes
    # the step size is to the right in both, and grows; so does the other setting, upwards
    assert [ax.get_xlabel().split(" (")[0] for ax in (es, grpo)] == ["alpha", "learning rate"]
    for ax in (es, grpo):
        for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            values = [float(label.get_text()) for label in axis.get_ticklabels()]
            assert values == sorted(values) and low < high
    for ax, arm in ((es, "es"), (grpo, "grpo")):
        frame = ax.patches[-1].get_bbox()
        setting = stability.tuned(run, of, arm)
        x, y = (int(round((low + high) / 2)) for low, high in (frame.intervalx, frame.intervaly))
        framed = {ax.get_xticklabels()[x].get_text(), ax.get_yticklabels()[y].get_text()}
        assert framed == {f"{value:g}" for value in setting.values()}
    assert dots(runs) == pytest.approx(sorted(data["score"]))


def test_the_kinds_of_runs_are_those_that_were_loaded():
    load = loaded(stability)
    of = {name: load.records[name] for name in load.names}
    table = stability_view.runs_table(of).set_index("runs")
    assert table["ES runs"].sum() == sum(len(found) for name, found in of.items() if name.split()[0] == "es")
    assert table["GRPO runs"].sum() == sum(len(found) for name, found in of.items() if name.split()[0] == "grpo")
    tuned = table.loc["tuned"]
    spec, budget = of["es"][0]["spec"], of["es"][0]["budget"]
    said = f"sigma {spec['sigma']:g}, alpha {spec['alpha']:g}, N {spec['population_size']}, steps {spec['steps']}"
    assert tuned["ES"] == said and tuned["ES completions"] == f"{budget['completions']:,}"
    assert tuned["seeds"] == "0 to 15" and tuned["bases"] == "A0"
    assert table.loc["map", "seeds"] == "0, 1, 2, 100" and "alpha 0.0025 to 0.01" in table.loc["map", "ES"]
    assert "N 8 to 128" in table.loc["N=8, 128", "ES"] and table.loc["N=8, 128", "GRPO"] == ""


def test_failed_runs_are_named():
    load = loaded(stability)
    found = stability_view.failures(load.records).set_index("group")
    assert {"es", "grpo"} <= set(found.index)  # the tuned ones in any case
    for group, row in found.iterrows():
        assert row["runs"] == len(load.records[group]) and row["failed"] == stability.failed(load.records[group])
        named = [
            seed
            for part in row["failed runs"].split("; ")
            if "seeds" in part
            for seed in part.split(": seeds ")[1].split(", ")
        ]
        assert len(named) == row["failed"]


# ---- the loader

SMALL = {"task": "countdown", "max_completion_length": 8, "validation_problems": 4, "test_problems": 4}
SMALL |= {"population_size": 2, "steps": 1, "prompts_per_step": 2, "curve_points": 2, "sigma": 0.1, "alpha": 0.1}


def small_groups(run, of):
    """Two seeds of one arm, one of which another group has, too, and a group that comes after them."""
    alpha = of["both"][0]["spec"]["alpha"] / 2 if "both" in of else 1.0
    return {
        "base": base_specs(["A0"], SMALL, run.scale),
        "both": Group("es", ["A0"], 2, SMALL, ledgers=["A0"]),
        "shared": Group("es", ["A0"], [1], SMALL),
        "after": Group("es", ["A0"], 1, SMALL, [{"alpha": alpha}], after=("both",)),
    }


def small_run(**given):
    return SimpleNamespace(**PARAMETERS | {"retrain": [], "aside": False} | given)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Empty folders of committed records and of runs beside them."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path / "beside"))
    return tmp_path / "results"


def test_a_spec_of_two_groups_runs_once_and_only_what_retrain_names_is_made_anew(results, capsys):
    load = Loader("01_small", small_run(), small_groups)
    assert load.names == ("base", "both", "shared", "after") and load.specs()["after"][0]["alpha"] == 1.0

    found = load("shared", "both")
    assert capsys.readouterr().out == "loaded 0 records, ran 2\n"
    assert list(found) == ["shared", "both"] and found["shared"] == [found["both"][1]]
    assert [r["spec"]["seed"] for r in found["both"]] == [0, 1] and all("ledger" in r for r in found["both"])
    assert len(list((results / "01_small/ledgers").iterdir())) == 2
    assert load("both") == {"both": found["both"]} and capsys.readouterr().out == ""  # it was loaded before

    # a group that comes after others loads them first, and takes its settings from them
    again = Loader("01_small", small_run(), small_groups)
    (last,) = again("after")["after"]
    assert capsys.readouterr().out == "loaded 2 records, ran 0\nloaded 0 records, ran 1\n"
    assert last["spec"]["alpha"] == 0.05 and again.records.keys() == {"both", "after"}

    # made anew is the group that was named, and with it the run that it shares; the other one is loaded
    forced = Loader("01_small", small_run(force=True, aside=True, retrain=["shared"]), small_groups)
    remade = forced("both", "shared")
    out = capsys.readouterr().out
    assert out.startswith("loaded 1 records, ran 0\nloaded 0 records, ran 1\nbeside committed records: 1 of 1 have the")
    assert remade["both"][0] == found["both"][0] and remade["both"][1] == remade["shared"][0]
    assert remade["shared"][0]["digest"] == found["shared"][0]["digest"]  # the same bits
    assert remade["shared"][0]["budget"]["wall_seconds"] != found["shared"][0]["budget"]["wall_seconds"]
    beside = read_records(results.parent / "beside/results/tiny.jsonl")
    assert [r["spec"]["seed"] for r in beside] == [1]


def test_a_dry_run_names_what_is_missing_and_runs_nothing(results):
    load = Loader("01_small", small_run(dry_run=True), small_groups)
    with pytest.raises(sweep.DryRun, match="0 of 3 runs have records; to be run: base A0, es A0 0, es A0 1"):
        load("base", "both")
    with pytest.raises(sweep.DryRun, match="0 of 2 runs have records; to be run: es A0 0, es A0 1"):
        load("after")
    assert not load.records and not results.exists()


def test_seeds_replace_the_number_that_a_group_has():
    def seeds(**given):
        specs = Loader("01_small", small_run(**given), small_groups).specs()
        return {name: [spec["seed"] for spec in own] for name, own in specs.items() if name != "base"}

    assert seeds(seeds=3) == {"both": [0, 1, 2], "shared": [1], "after": [0, 1, 2]}
    # with force they count for what is made anew
    assert seeds(seeds=3, force=True) == {"both": [0, 1, 2], "shared": [1], "after": [0, 1, 2]}
    assert seeds(seeds=3, force=True, retrain=["after"]) == {"both": [0, 1], "shared": [1], "after": [0, 1, 2]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"retrain": ["both"]}, r"retrain=\['both'\] does nothing by itself: set force=True"),
        ({"retrain": ["boht"], "force": True}, r"there is no group 'boht'. Did you mean 'both'\? Known: base, both"),
    ],
)
def test_a_mistaken_retrain_is_refused_before_any_work(given, message):
    with pytest.raises(ValueError, match=message):
        Loader("01_small", small_run(**given), small_groups)


def test_an_unknown_group_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"load: there is no group 'shard'. Did you mean 'shared'\?"):
        Loader("01_small", small_run(), small_groups)("base", "shard")


# ---- tables of what there is


def test_the_table_of_groups():
    table = Loader("01_small", small_run(), small_groups).table()
    assert list(table.index) == ["base", "both", "shared", "after"] and list(table["runs"]) == [1, 2, 1, 1]
    assert list(table["arm or kind"]) == ["base", "es", "es", "es"] and list(table["seeds"]) == ["", "0 to 1", "1", "0"]
    assert list(table["changed"]) == ["", "", "", "alpha 1"] and set(table["bases"]) == {"A0"}


def test_the_table_of_groups_with_many_settings():
    table = loaded(stability).table()
    assert table.loc["es map", "changed"] == "9 settings" and table.loc["es map", "seeds"] == "0, 1, 2, 100"
    assert table.loc["es N=8", "changed"] == "population_size 8, steps 780, alpha 0.00133333"
    assert table.loc["grpo best", "changed"] == "a setting per base" and table.loc["grpo best", "runs"] == 8


def test_the_table_of_settings_says_what_differs():
    table = parameters.table(
        {"tiny": {"steps": 9, "bases": ["A0"], "few": None}, "full": {"steps": 9, "few": 2, "new": 1}}
    )
    assert table.to_dict("index") == {
        "steps": {"tiny": 9, "full": ""},
        "bases": {"tiny": ["A0"], "full": ""},
        "few": {"tiny": None, "full": 2},
        "new": {"tiny": "", "full": 1},
    }
