"""The nine notebooks on their committed records: what they find is what claims, paper and figures have."""

import json
from functools import cache, partial

import numpy as np
import pytest
from evoalign_study import claims, paths, published_judgments, real_panels, real_results, results, series, style
from evoalign_study import coverage_factors as factors
from evoalign_study.rendering import csv_text
from evoalign_study.results import answered, macros
from matplotlib import colors
from test_notebooks import MODULES, loaded

from evoalign_lib import arms
from evoalign_lib.analysis.stats import Interval

pytestmark = pytest.mark.usefixtures("drawn")
nb01, nb02, nb03, nb04, nb05, nb06, nb07, nb08, nb09 = MODULES
MORE = {nb01: ("", ", exactly"), nb03: ("", ", published"), nb04: ("", ", published")}
"""Notebook -> its parts in answers.yaml and numbers.yaml."""


@pytest.fixture(scope="module")
def verdicts(committed_verdicts):
    return {verdict.id: verdict for verdict in committed_verdicts}


@pytest.fixture(scope="module")
def found(verdicts, committed_records):
    """Notebook -> its results."""
    decided = {claim: verdicts[claim].intervals for claim in nb02.CLAIMS}
    of_06 = {claim: verdicts[claim] for claim in nb06.CLAIMS}
    make = {
        nb02: lambda run, records: nb02.results(run, records, nb02.pilot(committed_records), decided),
        nb03: lambda run, records: nb03.results(run, records, records["published"]),
        nb04: lambda run, records: nb04.results(records) | published_judgments.results(records["judgments"]),
        nb06: lambda run, records: nb06.results(run, records, of_06),
    }
    return cache(lambda study: (make[study] if study in make else study.results)(*loaded(study)))


@pytest.mark.parametrize("study", MODULES, ids=lambda study: study.NOTEBOOK)
def test_the_papers_numbers_come_from_the_results(study, found):
    committed = json.loads((paths.GENERATED / f"numbers_{study.NOTEBOOK}.json").read_text(encoding="utf-8"))
    parts = [f"{study.NOTEBOOK}{more}" for more in MORE.get(study, ("",))]
    made = {macro: text for part in parts for macro, (text, _) in macros(part, found(study)).items()}
    assert made == committed
    assert macros(parts[0], {}) == {}


@pytest.mark.parametrize("study", MODULES, ids=lambda study: study.NOTEBOOK)
def test_every_question_has_its_answer(study, found):
    known = results._file("answers.yaml")
    parts = [part for more in MORE.get(study, ("",)) if (part := f"{study.NOTEBOOK}{more}") in known]
    answers = [answer for part in parts for answer in answered(part, found(study)).values()]
    assert len(answers) == sum(len(known[part]) for part in parts)
    assert not [answer for answer in answers if "{" in answer or "unknown" in answer]


def test_an_answer_without_its_numbers_is_left_out_or_says_less(found):
    for study, dropped, fewer in ((nb01, "gain of es_shuffled", 1), (nb02, "C", 1), (nb05, "slope", 1)):
        rest = {name: x for name, x in found(study).items() if not name.startswith(dropped)}
        assert len(answered(study.NOTEBOOK, rest)) == len(answered(study.NOTEBOOK, found(study))) - fewer
    _, way, *_ = answered(nb09.NOTEBOOK, found(nb09) | {"half es": None}).values()
    assert "unknown" in way


def between(one, other):
    return lambda values: values[one].value - values[other].value


CLAIMED = [
    (nb01, "gain of es on A1, greedy", "E1", "A1"),
    (nb02, "lead at equal forward_flops, greedy", "C2", "GRPO - ES, validation greedy at equal forward flops"),
    (nb02, between("dr_grpo, greedy", "grpo, greedy"), "C30", "Dr.GRPO - GRPO, test greedy"),
    (nb03, "greedy KL 0.5: first", "C3", "greedy at KL 0.5"),
    (nb03, "t1 lost, GRPO - ES less its walk's", "C3d", "less its walk's loss, test temperature 1"),
    (nb04, lambda values: -values["true greedy, ES - GRPO"].value, "C5c", "GRPO - ES, true reward"),
    (nb04, "bert t1 less, ES - GRPO", "C5b", "under bert - under"),
    (nb04, "es true rl", "C7", "ES, true reward, share explained by rl"),
    (nb04, "turned t1, ES - GRPO", "C35", "temperature 1"),
    (nb05, lambda values: np.log(values["spread end"].value), "C8", ""),
    (nb05, "drawdown greedy", "C33", ""),
    (nb05, "regret difference", "C9", ""),
    (nb05, "slope difference", "C37", ""),
    (nb06, "rank 1 - es, greedy", "C32b", "ES with low rank - ES full, test greedy"),
    (nb06, "gain of precision=int4, greedy", "C14b", "ESSA int4 - base, test greedy"),
    (nb06, "grpo_adam8bit over es_inplace, 72B", "C16b", "grpo adam8bit over es inplace at 72B"),
    (nb07, "grpo change", "C18c", "GRPO, net change of support temperature 1"),
    (nb07, "rollouts change judged", "C19", "effect of the rollouts, net change of support temperature 1"),
    (nb08, "es grpo cosine", "E8", "ES to GRPO, cosine of what runs have in common"),
    (nb08, "grpo common", "E5", ""),
    (nb08, "grpo_sgd head", "C21b", "GRPO with SGD, the head's share"),
    (nb08, "own t0.6", "E14", "temperature 0.6"),
    (nb08, between("single drift", "grpo drift"), "C23", "ES - GRPO, KL on other skills"),
    (nb08, lambda values: np.log(values["remedy 0"].value), "E9", "ES with anchored decay over"),
    (nb09, "barrier greedy", "C25", "ES to GRPO, barrier of the error greedy"),
]


@pytest.mark.parametrize(("study", "read", "claim", "label"), CLAIMED)
def test_results_are_what_the_claims_are_judged_by(study, read, claim, label, found, verdicts):
    """The results and the rules reach the same numbers by ways of their own."""
    values = found(study)
    value = read(values) if callable(read) else getattr(values[read], "value", values[read])
    judged = [interval.value for name, interval in verdicts[claim].intervals.items() if label in name]
    assert any(value == pytest.approx(each) for each in judged)


def of(points, draw, *more):
    return draw(points, *more), points


def low_rank_curves(run, records):
    return of(nb06.curve_points(records, nb06.shown(run), "completions"), nb06.draw_curves, records)


def beside(study, _, records):
    known, task = claims.committed_records("real"), "facts" if study is nb03 else "arithmetic"
    return real_panels.figure(study.NOTEBOOK, records, real_results.groups(known, task))


def published(run, records):
    return nb03.published_figure(nb03.published_runs(records["published"]))


populations = nb06.population_points
FIGURES = {
    "es_countdown_gain": (lambda run, r: of(nb01.test_points(run, r), nb01.figure_gain), nb01, "accuracy"),
    "es_arithmetic_paths": (lambda _, r: of(nb01.audits(r)[nb01.AUDITED], nb01.figure_arithmetic), nb01, "path"),
    "grpo_es_curves": (lambda _, r: of(nb02.curve_points(r), nb02.draw_curves, {"greedy": 14, "t1": 13}), nb02, "mean"),
    "conciseness_right": (lambda _, r: nb03.lost(r), nb03, "lost"),
    "conciseness_published_runs": (published, nb03, "right"),
    "safety_noise": (lambda _, r: nb04.noise(r), nb04, "true"),
    "safety_published_lead": (lambda _, r: published_judgments.leads(r["judgments"]), nb04, "value"),
    "stability_drawdown_runs": (lambda _, r: nb05.figure_drawdowns(r), nb05, "greedy"),
    "low_rank_curves": (low_rank_curves, nb06, "mean"),
    "essa_population_size": (lambda run, r: of(populations(r, run), nb06.draw_populations), nb06, "at the end"),
    "coverage_factors": (factors.figure_cells, nb07, "value"),
    "stability_prompts_runs": (nb05.figure_prompts, nb05, "reward"),
    "stability_predictions": (lambda _, r: of(series.predictions(r), series.figure_predictions), nb05, "value"),
    "stability_sparsity": (
        lambda _, r: of((p := series.sparsity(r))[0], series.figure_sparsity, p[1]),
        nb05,
        "completions",
    ),
}
FIGURES |= {
    f"{stem}_{name}{ending}": (getattr(study, f"figure_{name}"), study, column)
    for study, stem, names, ending, column in (
        (nb05, "stability", "seeds", "", "greedy"),
        (nb07, "coverage", "pass_at_k matched support accuracies", "", "value"),
        (nb08, "geometry", "signal cosines theory", "", "value"),
        (nb08, "geometry", "drift", "", "y"),
        (nb09, "lmc", "barriers from_base noise", "", "value"),
    )
    for name in names.split()
}
FIGURES |= {
    f"real_{study.NOTEBOOK[:2]}": (partial(beside, study), study, "y") for study in MODULES if study not in (nb04, nb06)
}
"""Figure -> what draws it, its notebook, and the column of its data of which every value has to stand in it."""


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_draws_its_data(name):
    """Its data are the committed ones, and every value stands in the figure, in sight."""
    draw, study, column = FIGURES[name]
    fig, plotted = draw(*loaded(study))
    assert csv_text(plotted) == (paths.FIGURES / f"{name}.csv").read_text(encoding="utf-8")
    marks = [line.get_xydata() for ax in fig.axes for line in ax.get_lines()]
    marks += [dots.get_offsets() for ax in fig.axes for dots in ax.collections]
    drawn = np.concatenate([np.ravel(np.asarray(each, float)) for each in marks if len(each)], dtype=float)
    values = plotted[column].dropna().to_numpy(float)
    assert [value for value in values if not np.isclose(drawn, value, rtol=1e-9, atol=1e-4).any()] == []
    for ax in fig.axes:
        low, high = sorted(ax.get_ylim())
        heights = [line.get_ydata(orig=False) for line in ax.get_lines() if line.get_transform() == ax.transData]
        assert all(low <= y <= high for each in heights for y in np.asarray(each, float) if np.isfinite(y))


def test_maps_frame_the_tuned_setting():
    _, records = loaded(nb02)
    fig = nb02.draw_sweep(nb02.sweep_points(records))
    sweeps = {arm: arms.ranked(records[f"sweep {arm}"])[0][1] for arm in ("es", "grpo")}
    for ax, (arm, tuned) in zip(fig.axes, sweeps.items(), strict=False):
        box, (x, y) = ax.patches[-1].get_bbox(), (ax.get_xticklabels(), ax.get_yticklabels())
        framed = {x[round(box.x0 + 0.46)].get_text(), y[round(box.y0 + 0.46)].get_text()}
        assert framed == {f"{value:g}" for value in tuned.values()}
        assert colors.to_hex(ax.patches[-1].get_edgecolor()).upper() == style.ARMS[arm].color
        steps = [float(label.get_text()) for label in x]
        assert steps == sorted(steps) and tuned[nb05.STEP[arm]] in steps  # to the right in both


HEADS = [(1, 2, "It is ahead"), (-2, -1, "It is behind"), (-1, 1, "Neither is ahead")]


@pytest.mark.parametrize(("low", "high", "head"), HEADS)
def test_answers_say_where_the_intervals_lie(low, high, head, found):
    interval = Interval((low + high) / 2, low, high, 3)
    leads = {key: interval for key in found(nb02) if key.startswith("C2c")}
    assert nb02._words(found(nb02) | leads)["ahead, declared"].startswith(head)
