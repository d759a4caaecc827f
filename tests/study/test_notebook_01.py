"""Notebook 01 on its committed records: its results, and the answers, macros and figures made of them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from evoalign_study import nb01_es_countdown as study
from evoalign_study import paths, style, tidy
from evoalign_study.rendering import csv_text

pytestmark = pytest.mark.usefixtures("drawn")


@pytest.fixture(scope="module")
def values(run, records):
    return study.results(run, records)


def test_the_paper_quotes_the_results(run, values):
    quoted = {macro: format(x, form) for macro, (x, form) in tidy.macros(values, study.macros(run)).items()}
    committed = json.loads((paths.GENERATED / f"numbers_{study.NOTEBOOK}.json").read_text(encoding="utf-8"))
    assert quoted.items() <= committed.items() and len(quoted) == 31
    elsewhere = SimpleNamespace(**vars(run) | {"scale": "full", "bases": ["my/model"]})
    assert not [macro for macro in study.macros(elsewhere) if macro.startswith(("Audit", "Estimator"))]
    with pytest.raises(TypeError):
        values["bases"] = 4


def test_the_results_are_what_the_claims_are_judged_by(committed_verdicts, values):
    judged = {verdict.id: verdict.intervals.values() for verdict in committed_verdicts}
    gains = {base: values[f"gain of es on {base}, greedy"] for base in ("A0", "A1", "A2")}
    assert set(gains.values()) <= set(judged["E1"])
    assert values["gain of es, greedy"].value == pytest.approx(np.mean([gain.value for gain in gains.values()]))


def test_single_steps_and_audits_by_hand(records, values):
    chosen = [r for r in records["estimator"] if (r["spec"]["fitness"], r["spec"]["targets"]) == ("expected", "any")]
    cosine = values["cosine, expected fitness, any"]
    assert cosine.value == pytest.approx(np.mean([r["estimator"]["cosine"] for r in chosen]))
    assert cosine.low < cosine.value < cosine.high and cosine.n == len(chosen) == 16
    assert values["times longer"] == pytest.approx(np.tan(np.arccos(values[f"cosine, {study._STEP}"].value)))
    case = ("inplace", "gaussian", "random")
    paths_ = [r["path"]["cosine"][-1] for r in records["audit"] if study._arithmetic(r) == case]
    found = [values[f"{what}path, {', '.join(case)}"] for what in ("least ", "", "most ")]
    assert found == pytest.approx([min(paths_), np.mean(paths_), max(paths_)])


def test_answers_are_read_from_the_results(run, values):
    told = study.answers(run, values)
    for question, key in (("learn", "gain of es, greedy"), ("need", "gain of es_shuffled on A0, greedy")):
        (answer,) = [answer for words, answer in told.items() if question in words]
        assert values[key].format() in answer
    assert "(mean of 3 bases, n = 8 seeds of each)" in told["Does ES learn Countdown?"]
    one = SimpleNamespace(**vars(run) | {"bases": ["A0"]})  # as in the quickstart
    assert "(base A0, n = 8 seeds)" in study.answers(one, values)["Does ES learn Countdown?"]
    fewer = {key: value for key, value in values.items() if "es_shuffled" not in key}
    fewer |= {key: np.nan for key in values if key.startswith("path")}  # populations that were all tied
    assert set(told) - set(study.answers(run, fewer)) == {
        "Does the gain need the reward?",
        "What does released arithmetic do?",
    }


FRAMES = {
    "es_countdown_gain": (study.test_points, study.figure_gain, "accuracy", 1),
    "es_countdown_curves": (study.curve_points, None, "mean", 100),
    "es_estimator": (lambda run, records: study.single_steps(records["estimator"]), study.figure_estimator, None, 1),
    "es_arithmetic_paths": (lambda run, records: study.audits(records), study.figure_arithmetic, "path", 1),
}


@pytest.mark.parametrize("name", FRAMES)
def test_figures_draw_the_committed_data(name, run, records):
    make, draw, column, scale = FRAMES[name]
    frame = make(run, records)
    columns = study.AUDITED if name == "es_arithmetic_paths" else list(frame)
    assert csv_text(frame[columns]) == (paths.FIGURES / f"{name}.csv").read_text(encoding="utf-8")
    fig = draw(frame) if draw else study.figure_curves(frame, records["base"])
    lines = [line.get_xydata() for ax in fig.axes for line in ax.lines]
    dots = [dots.get_offsets() for ax in fig.axes for dots in ax.collections]
    drawn = np.concatenate([np.ravel(np.asarray(each, float)) for each in (*lines, *dots)])
    if column:
        assert all(np.isclose(drawn, scale * value).any() for value in frame[column])


def test_runs_that_never_moved_have_no_direction(records):
    still = [r | {"path": {"cosine": [1.0, None]}} for r in records["audit"]]
    runs = study.audits(dict(records) | {"audit": still})
    assert runs["path"].isna().all()
    fig = study.figure_arithmetic(runs)
    assert [text.get_text() for text in fig.axes[1].texts] == ["not defined"] * len(study.ARITHMETICS)
    looks = [style.ARITHMETICS[case[:2]].label for case in study.ARITHMETICS]
    assert [label.get_text().split(", sigma")[0] for label in fig.axes[0].get_yticklabels()] == looks
