"""Notebook 05: its results are those of the claims and of the paper, and its figures draw their data."""

import json

import numpy as np
import pytest
from evoalign_study import nb05_stability as study
from evoalign_study import paths
from evoalign_study.rendering import csv_text
from evoalign_study.results import macros, stated

from evoalign_lib import arms


@pytest.fixture(scope="module")
def found(run, records):
    return study.results(run, records)


@pytest.mark.parametrize(
    ("line", "ended"),
    [([0.1, 0.3, 0.25], "kept"), ([0.1, 0.3, 0.19], "fell back"), ([0.1, 0.3, 0.1], "failed"), ([0.1, 0.1], "failed")],
)
def test_how_a_run_ended(line, ended):
    record = {"curve": {"validation_greedy": line}}
    assert study.outcome(record) == ended and study.failed([record]) == (ended == "failed")


def test_slope_weights_give_the_least_squares_slope():
    counts, accuracy = [2, 50, 200, 1000], np.array([0.1, 0.2, 0.4, 0.3])
    assert study.slope_weights(counts) @ accuracy == pytest.approx(np.polyfit(np.log10(counts), accuracy, 1)[0])


def test_spreads_without_interval_are_said_to_be(records):
    values = study.scores(records, "es", "test", "greedy")
    assert study.spread_ratio(values, None) is None and study.spread_ratio(values, np.full(16, 0.5)) is None
    assert study.scores(records, "es", "at mean", 0.99) is None
    assert study.ratio_in_words(None, values)[0] == "an arm never gets there"
    assert study.spread_ratio(values, values).value == pytest.approx(1)


def test_contenders_are_the_best_at_each_step_size(run, records):
    for arm, step in study.STEP.items():
        tried = study.contenders(run, records, arm)
        assert len({setting[step] for setting in tried}) == len(tried) == run.transfer_size
        assert study.tuned(run, records, arm) in tried
        assert tried == sorted(tried, key=lambda setting: tuple(setting.values()))


def test_results_are_those_of_the_claims(found, committed_verdicts):
    judged = {v.id: next(iter(v.intervals.values())) for v in committed_verdicts if v.id in study.CLAIMS}
    names = {"C33": "drawdown greedy", "C9": "regret difference", "C37": "slope difference"}
    for claim, name in (names | {"C11": "change to 64 difference"}).items():
        assert stated(found[name], ".6%") == stated(judged[claim], ".6%"), claim
    assert found["spread end"].value == pytest.approx(np.exp(judged["C8"].value))


def test_sentences_and_macros_state_results(run, found):
    committed = json.loads((paths.GENERATED / "numbers_05_stability.json").read_text(encoding="utf-8"))
    numbers = {name: format(*value) for name, value in macros(found, study.MACROS).items()}
    assert numbers == {name: committed[name] for name in study.MACROS}
    said = study.answers(run, found)
    seeds, falls, settings, population, bases, problems, horizon, replay = said.values()
    assert stated(found["spread end"], ".2f") in seeds and stated(found["drawdown greedy"]) in falls
    assert f"{found['es map near']} of {found['es map settings']} settings of ES" in settings
    assert "N = 30 minus N = 8 is" in population and "N = 30 minus N = 128 is" in population
    for name, answer in (("regret", bases), ("slope", problems), ("change to 64", horizon)):
        assert all(stated(found[f"{name} {side}"]) in answer for side in ("es", "grpo", "difference"))
    fewer = {
        name: x for name, x in found.items() if not name.startswith(("regret", "slope")) and name != "spread matched"
    }
    assert len(study.answers(run, fewer | {"spread matched": None})) == len(said) - 2
    assert not [name for name in macros(fewer, study.MACROS) if "Regret" in name or "SpreadMatched" in name]


def test_figures_draw_their_data(run, records, drawn):
    made = {
        "seeds": study.figure_seeds(run, records),
        "drawdown_runs": study.figure_drawdowns(records),
        "maps": study.figure_maps(run, records),
        "population_curves": study.figure_populations(run, records),
        "transfer_runs": study.figure_transfer(run, records),
        "prompts_runs": study.figure_prompts(run, records),
        "horizon_runs": study.figure_horizon(run, records),
    }
    for name, (_, data) in made.items():
        assert csv_text(data) == (paths.FIGURES / f"stability_{name}.csv").read_text(encoding="utf-8"), name

    def dots(ax):
        """Heights of all runs that are drawn."""
        return sorted(float(y) for dot in ax.collections for y in dot.get_offsets()[:, 1])

    for name, panel, column in (("horizon_runs", 0, "greedy"), ("prompts_runs", 1, "reward"), ("maps", 2, "score")):
        figure, data = made[name]
        assert dots(figure.axes[panel]) == pytest.approx(sorted(data[column]))
    figure, _ = made["maps"]
    for ax, arm in zip(figure.axes, study.ARMS, strict=False):
        assert ax.get_xlabel().startswith(study.STEP[arm].replace("_", " "))  # to the right in both
        box, (x_ticks, y_ticks) = ax.patches[-1].get_bbox(), (ax.get_xticklabels(), ax.get_yticklabels())
        framed = {x_ticks[round(box.x0 + 0.46)].get_text(), y_ticks[round(box.y0 + 0.46)].get_text()}
        assert framed == {f"{value:g}" for _, value in study.tuned(run, records, arm).items()}
        assert set(arms.swept(arm)) == set(study.tuned(run, records, arm))
