"""Notebook 02 on its committed records: its results, and the answers, macros and figures made of them."""

import json

import numpy as np
import pytest
from evoalign_study import claims, paths, style, tidy
from evoalign_study import nb02_grpo_countdown as study
from evoalign_study.records import pack_bits, pack_counts
from evoalign_study.rendering import csv_text
from evoalign_study.trl_loss import losses_agree
from matplotlib import colors

from evoalign_lib.analysis.stats import Interval

pytestmark = pytest.mark.usefixtures("drawn")


@pytest.fixture(scope="module")
def decided(run, records):
    verdicts = claims.evaluate_named(("C2", "C2b", "C29", "C30", "C31"), study.judged(run, records))
    return {verdict.id: verdict.intervals for verdict in verdicts}


@pytest.fixture(scope="module")
def values(run, records, committed_records, decided):
    return study.results(run, records, study.pilot(committed_records), decided)


def test_the_paper_quotes_the_results(values, decided):
    quoted = {macro: format(x, form) for macro, (x, form) in tidy.macros(values, study.MACROS).items()}
    committed = json.loads((paths.GENERATED / f"numbers_{study.NOTEBOOK}.json").read_text(encoding="utf-8"))
    leads = {macro: quoted.pop(macro) for macro in list(quoted) if macro.startswith("Lead")}
    assert quoted.items() <= committed.items() and len(quoted) == 82
    ends = [leads[f"Lead{decoding}{end}"] for decoding in ("Greedy", "Sampled") for end in ("Value", "Low", "High")]
    assert ends == ["4.0", "1.1", "6.9", "15.6", "13.3", "17.9"]
    with pytest.raises(TypeError):
        values["best of"] = 4


def test_the_results_are_what_the_claims_are_judged_by(values, decided, records):
    """The results are computed without the rules: both come to the same numbers."""
    for one, other, decoding, judged in (
        ("dr_grpo", "grpo", "greedy", decided["C30"]["Dr.GRPO - GRPO, test greedy"]),
        ("es", "es_sampled", "greedy", decided["C31"]["ES - ES with sampled fitness, test greedy"]),
        ("es", "es_sampled", "t1", decided["C31"]["ES - ES with sampled fitness, test temperature 1"]),
    ):
        difference = values[f"{one}, {decoding}"].value - values[f"{other}, {decoding}"].value
        assert difference == pytest.approx(judged.value)
    judged = decided["C2"]["GRPO - ES, validation greedy at equal forward flops"]
    assert values["lead at equal forward_flops, greedy"] == judged
    row = study.kl_frame(records["kl"]).set_index(["sigma", "estimator"])
    assert row.loc[(0.01, "k2"), "bias / KL"].value == pytest.approx(decided["C29"]["k2_relative_bias"].value)
    assert row.loc[(0.01, "k3"), "cosine, token"] == pytest.approx(decided["C29"]["k3_gradient_cosine"].value)


def test_answers_are_read_from_the_results(run, values):
    told = study.answers(run, values)
    assert len(told) == 7 and "It is ahead. " in told["Does tuned GRPO match it?"]
    for key, question in (
        ("gain of es, greedy", "learn"),
        ("lead at equal core_seconds, greedy", "budget"),
        ("sft - es, greedy", "simpler"),
        ("C30: Dr.GRPO - GRPO, test greedy", "details"),
    ):
        (answer,) = [answer for words, answer in told.items() if question in words]
        assert values[key].format() in answer
    without = {key: value for key, value in values.items() if not key.startswith("C")}
    assert len(study.answers(run, without)) == 3  # claims that were not judged have no answer


@pytest.mark.parametrize(
    ("low", "high", "said"), [(1, 2, "It is ahead."), (-2, -1, "It is behind."), (-1, 1, "Neither is ahead")]
)
def test_answers_say_where_the_intervals_lie(low, high, said, run, values):
    leads = {key: Interval((low + high) / 2, low, high, 3) for key in values if key.startswith("C2b")}
    assert study.answers(run, values | leads)["Does tuned GRPO match it?"].startswith(said)


def test_what_has_no_spread_or_no_point_yet_is_left_out():
    curve = {"completions": [0, 50, 100], "validation_greedy": [0.1, 0.2, 0.3], "validation_t1": [0.1, 0.1, 0.1]}
    run = {"curve": curve, "budget": {"completions": 100}, "spec": {"sigma": 0.1, "alpha": 0.1}}
    equal = study.match({"es": [run] * 2, "grpo": [run] * 2}, "completions", 0.02)
    assert equal["es at equal completions, greedy"] == 0.3 and not [key for key in equal if "lead" in key]
    late = {"curve": curve | {"completions": [0, 200, 300]}}
    assert study.larger_alpha({"grpo": [run]}, [late]) == {}
    both = {"base": [{"validation": {"greedy": 0.1}}], "es": [run] * 2, "grpo": [run] * 2}
    found = study.to_target(both, 0.5, "completions")
    assert found["es reached +50"] == 0 and "es over grpo to +50, completions" not in found


FRAMES = {
    "grpo_es_curves": (study.curve_points, list),
    "grpo_sweep": (study.sweep_points, lambda frame: ["arm", "settings tried", "expected maximum"]),
    "grpo_temperature": (study.by_temperature, list),
}


@pytest.mark.parametrize("name", FRAMES)
def test_figures_have_the_committed_data(name, records):
    make, columns = FRAMES[name]
    frame = make(records)
    assert csv_text(frame[columns(frame)]) == (paths.FIGURES / f"{name}.csv").read_text(encoding="utf-8")


def test_curves_draw_every_point_in_the_arms_colour(records):
    points = study.curve_points(records)
    fig = study.draw_curves(points, {"greedy": 14.0, "t1": 13.0})
    for ax, decoding in zip(fig.axes[:2], ("greedy", "t1"), strict=True):
        for arm in study.ARMS:
            own = [line for line in ax.lines if colors.to_hex(line.get_color()).upper() == style.ARMS[arm].color]
            drawn = points[(points["decoding"] == decoding) & points["group"].isin([arm, f"{arm}_long"])]
            assert sorted(np.concatenate([line.get_ydata() for line in own])) == pytest.approx(sorted(drawn["mean"]))


def test_maps_frame_the_tuned_setting(records):
    fig = study.draw_sweep(study.sweep_points(records))
    for ax, arm in zip(fig.axes, study.ARMS, strict=False):
        (tuned,), (frame,) = [text for text in ax.texts if "tuned" in text.get_text()], ax.patches
        assert frame.get_bbox().contains(*tuned.get_position()) and len(ax.texts) == 12
        assert colors.to_hex(frame.get_edgecolor()).upper() == style.ARMS[arm].color
        assert [float(label.get_text()) for label in ax.get_xticklabels()] == sorted(
            float(label.get_text()) for label in ax.get_xticklabels()
        )


def test_models_that_are_not_measured_again_have_their_own_two_decodings():
    """As those from outside the tiny world: the figure and the table have greedy decoding and temperature 1."""

    def run(arm: str, seed: int) -> dict:
        spec = {"kind": "train", "arm": arm, "seed": seed} if arm else {"kind": "base"}
        test = {"n": 4, "greedy_bits": pack_bits([1, 1, 0, 0]), "t1_counts": pack_counts([16, 0, 0, 0])}
        return {"spec": spec | {"base": "/mine"}, "spec_hash": f"{arm} {seed}", "test": test}

    records = {"base": [run("", 0)], "es": [run("es", 0), run("es", 1)], "grpo_long": [run("grpo", 9)], "decodings": []}
    points = study.by_temperature(records)
    assert points[["group", "temperature", "accuracy", "n"]].values.tolist() == [
        ["base", 0.0, 50, 1],
        ["base", 1.0, 25, 1],
        ["es", 0.0, 50, 2],
        ["es", 1.0, 25, 2],
    ]
    (ax,) = study.draw_temperatures(points).axes
    assert len(ax.lines) == 2


def test_a_loss_that_is_not_trls_is_found(tmp_path):
    def nearly(logp, old_logp, ref_logp, rewards, mask, **_):
        ratio = (logp - old_logp).exp()
        return -((ratio * (rewards - rewards.mean(1, keepdim=True))[..., None] * mask).sum(-1) / mask.sum(-1)).mean()

    found = losses_agree("grpo", nearly, tmp_path)
    assert found == {"loss of": "GRPO", "same value": "no", "same gradient": "no"}
