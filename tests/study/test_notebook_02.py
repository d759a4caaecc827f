"""What notebook 02 says, tabulates and draws: from the committed records, and from records that are wrong."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from evoalign_study import claims, paths, style
from evoalign_study import nb02_grpo_countdown as study
from evoalign_study.records import pack_bits, pack_counts
from evoalign_study.rendering import csv_text
from evoalign_study.views import grpo_countdown as view
from evoalign_study.views import grpo_countdown_figures as figures
from matplotlib import colors
from matplotlib.text import Text

pytestmark = pytest.mark.usefixtures("drawn")


@pytest.fixture(scope="module")
def pilot(committed_records):
    return study.pilot(committed_records)


# ---- answers


def test_the_answers_hold_the_numbers_that_the_paper_quotes(run, records, pilot):
    judged = claims.evaluate_named(("C2b", "C29", "C30", "C31"), study.judged(run, records))
    told = view.answers(run, records, pilot, {verdict.id: verdict.intervals for verdict in judged})
    quoted = json.loads((paths.GENERATED / "numbers_02_grpo_countdown.json").read_text(encoding="utf-8"))
    macros = {
        "Does the answer depend on the budget?": [f"Match{axis}Greedy" for axis in ("Completions", "ForwardFlops")],
        "Do the details of GRPO matter?": ["DrGrpoEffect"],
        "Should ES be rewarded for greedy or for sampled answers?": ["GreedyFitnessEffect", "GreedyFitnessSampled"],
    }
    macros["Does the answer depend on the budget?"] += ["LargerAlphaLead", "MatchCoreSecondsGreedy"]
    for question, names in macros.items():
        for name in names:
            value, low, high = (quoted[name + end] for end in ("Value", "Low", "High"))
            assert f"{value} [{low}, {high}]" in told[question], name
    filtered = told["Would something simpler do?"]
    assert f"{quoted['FilteredGreedy']} % greedily" in filtered and f"{quoted['FilteredRatio']} times" in filtered
    assert "It is ahead. " in told["Does tuned GRPO match it?"] and len(told) == 7


def test_answers_say_what_the_intervals_say(run, records, pilot, monkeypatch):
    def ends(low, high):
        found = SimpleNamespace(low=low, high=high, n=3, format=lambda: f"[{low}, {high}]")
        labels = [f"GRPO - ES, validation problems {d} at equal forward flops" for d in ("greedy", "temperature 1")]
        return dict.fromkeys(labels, found)

    question = "Does tuned GRPO match it?"
    monkeypatch.setattr(view, "_gains", lambda run, of, decoding: "")  # bootstraps that are not asked for here
    for intervals, said in ((ends(1, 2), "It is ahead."), (ends(-2, -1), "It is behind."), (ends(-1, 1), "Neither")):
        told = view.answers(run, records, pilot, {"C2b": intervals})
        assert told[question].startswith(said) and "greedily" in told[question]
        assert not [q for q in told if "details" in q or "KL" in q]  # claims that nothing was said of


# ---- tables


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("grpo_es_match", view.match_table),
        ("grpo_es_to_target", view.target_table),
        ("grpo_costs", view.costs_table),
        ("grpo_es_hindsight", lambda run, of: view.hindsight_table(of)),
        ("kl_estimators", lambda run, of: view.kl_table(view.kl_frame(of["kl"]))),
    ],
)
def test_tables_are_those_of_the_paper(name, table, run, records):
    drawn = csv_text(table(run, records))
    assert drawn == (paths.GENERATED / f"{name}.csv").read_text(encoding="utf-8")


def test_a_setting_at_the_end_of_its_grid_is_found(run, records):
    found = view.sweep_table(run, records).set_index("setting")["the tuned value is"]
    assert found["noise sigma"] == "inside" and found["KL weight beta"] == "at its natural end"
    best = max(records["sweep es"], key=lambda r: np.mean(r["curve"]["validation_greedy"][-3:]))
    swapped = copy.deepcopy(best)
    swapped["spec"]["sigma"] = 0.03
    changed = dict(records) | {"sweep es": [swapped]}
    assert view.sweep_table(run, changed).set_index("setting").loc["noise sigma", "the tuned value is"] == "at an end"


def test_wrong_runs_are_found(run, records):
    assert view.faults(run, records) == []
    cheap = copy.deepcopy(records["grpo"][0])
    cheap["budget"]["completions"] -= 16
    cheap["budget"]["forward_flops"] += 1
    cheap["counts"]["timeout"] = 3
    found = view.faults(run, dict(records) | {"grpo": [cheap, *records["grpo"][1:], records["grpo"][1]]})
    assert found[0] == "1 runs occur twice" and "declared 64000" in found[1] and "FLOPs of grpo" in found[2]
    assert found[3:] == ["3 rewards or populations counted as timeout"]


def test_a_loss_that_is_not_trls_is_found(tmp_path):
    def nearly(logp, old_logp, ref_logp, rewards, mask, **_):
        ratio = (logp - old_logp).exp()
        return -((ratio * (rewards - rewards.mean(1, keepdim=True))[..., None] * mask).sum(-1) / mask.sum(-1)).mean()

    found = view.losses_agree("grpo", nearly, tmp_path)
    assert found == {"loss of": "GRPO", "same value": "no", "same gradient": "no"}
    assert torch.is_grad_enabled()


# ---- figures


def colours_of(axes):
    return {colors.to_hex(line.get_color()).upper() for line in axes.lines}


def test_the_curves_name_their_lines_and_draw_every_point(records):
    fig, points = figures.draw_curves(records)
    large = fig.axes[:2]
    for ax, decoding in zip(large, ("greedy", "t1"), strict=True):
        drawn = points[points["decoding"] == decoding]
        assert colours_of(ax) == {style.ARMS[arm].color.upper() for arm in ("es", "grpo", "base")}
        (es,) = [line for line in ax.lines if colors.to_hex(line.get_color()).upper() == style.ARMS["es"].color]
        assert np.allclose(es.get_ydata(), drawn[drawn["group"] == "es"]["mean"])
        words = {text.get_text().split("\n")[0].split(" (")[0] for text in ax.texts}
        assert words == {"ES", "GRPO", "base", "single runs,"}
        assert ax.get_xlabel() == "forward FLOPs spent on training"
    assert large[0].get_ylabel() == "validation accuracy, %"
    without = dict(records) | {"grpo_long": []}
    assert len(figures.draw_curves(without)[0].axes[0].lines) == len(large[0].lines) - len(records["grpo_long"])


def test_the_maps_of_the_sweeps_have_one_orientation_and_frame_the_tuned_setting(run, records):
    fig, tried = figures.draw_sweep(run, records)
    es, grpo, right = fig.axes
    assert (es.get_xlabel(), grpo.get_xlabel()) == ("step alpha", "learning rate")
    assert (es.get_ylabel(), grpo.get_ylabel()) == ("noise sigma", "KL weight beta")
    for ax, arm in ((es, "es"), (grpo, "grpo")):
        (tuned,) = [text for text in ax.texts if "tuned" in text.get_text()]
        (frame,) = ax.patches
        x, y = frame.get_xy()
        assert (tuned.get_position()[0] - x, tuned.get_position()[1] - y) == pytest.approx((0.47, 0.46))
        assert colors.to_hex(frame.get_edgecolor()).upper() == style.ARMS[arm].color
        assert len(ax.texts) == 12 and ax.images[0].get_clim() == es.images[0].get_clim()
    assert len(tried) == 24 and [t.get_text() for t in right.texts] == ["ES", "GRPO"]


def test_every_arm_that_was_measured_again_is_drawn_and_named():
    ends = {"base": 11.5, "es": 12.5, "grpo": 29.2, "es_random": 10.8, "grpo_random": 0.1, "rloo": 29.5, "dapo": 29.0}
    again = {"grpo_unscaled": 29.9}  # GRPO once more, with another setting: in the table alone
    rows = [
        {"group": group, "base": base, "temperature": t, "accuracy": end, "low": end - 1, "high": end + 1, "n": 4}
        for group, end in (ends | again).items()
        for base in ("A0", "A1")
        for t in (0.0, 0.6, 1.0)
    ]
    fig = figures.draw_temperatures(pd.DataFrame(rows), "A0")
    (ax,) = fig.axes
    assert len(ax.lines) == len(ends) and len(ax.collections) == 2  # bands of ES and GRPO
    widths = {colors.to_hex(line.get_color()).upper(): line.get_linewidth() for line in ax.lines}
    assert widths[style.ARMS["es"].color] == widths[style.ARMS["grpo"].color] > 2 * widths[style.ARMS["rloo"].color]
    assert {text.get_text() for text in ax.texts} == {style.ARMS[group].label for group in ends}
    fig.canvas.draw()
    boxes = [Text.get_window_extent(text) for text in ax.texts]  # an annotation's own has its arrow, too
    boxes = sorted((box.y0, box.y1) for box in boxes)
    assert all(below[1] <= above[0] + 1 for below, above in zip(boxes, boxes[1:], strict=False))
    of = {group: [{"spec": {"kind": group} if group == "base" else {"kind": "train", "arm": group}}] for group in ends}
    of["grpo_unscaled"] = [{"spec": {"kind": "train", "arm": "grpo", "scale_rewards": "none"}}]
    labels = [style.ARMS[group].label for group in ends] + ["GRPO, not scaled"]
    assert view.measured(of, pd.DataFrame(rows), "A0") == dict.fromkeys(labels, 4)
    table = view.temperature_table(of, pd.DataFrame(rows), "A0")
    assert list(table) == ["arm", "greedy", "temperature 0.6", "temperature 1"] and list(table["arm"]) == labels


def test_labels_are_moved_apart_and_no_farther():
    assert figures._apart([5.0, 1.0], 2.0).tolist() == [5.0, 1.0]
    assert figures._apart([3.0, 3.0], 2.0).tolist() == pytest.approx([2.0, 4.0])
    places = figures._apart([10.0, 10.5, 0.0, 10.2], 1.0)
    assert places[2] == 0.0 and np.diff(sorted(places)[1:]) == pytest.approx([1.0, 1.0])
    assert np.argsort(places).tolist() == [2, 0, 3, 1]


def test_the_estimators_have_looks_of_their_own(records):
    frame = view.kl_frame(records["kl"])
    fig, plotted = figures.draw_estimators(frame)
    of_arms = {look.color.upper() for look in style.ARMS.values()}
    for ax in fig.axes:
        assert not colours_of(ax) & of_arms - {"#000000"}
    cosines = fig.axes[2]
    assert sum(np.isfinite(line.get_ydata()).all() for line in cosines.lines) == 4  # k1 has no gradient on average
    assert list(plotted["bias / KL"]) == [interval.value for interval in frame["bias / KL"]]


def test_models_that_are_not_measured_again_have_their_own_two_decodings():
    """As those from outside the tiny world: the figure and the table have greedy decoding and temperature 1."""

    def run(arm: str, seed: int) -> dict:
        spec = (
            {"kind": "train", "arm": arm, "base": "/mine", "seed": seed} if arm else {"kind": "base", "base": "/mine"}
        )
        test = {"n": 4, "greedy_bits": pack_bits([1, 1, 0, 0]), "t1_counts": pack_counts([16, 0, 0, 0])}
        return {"spec": spec, "spec_hash": f"{arm} {seed}", "test": test}

    of = {"base": [run("", 0)], "es": [run("es", 0), run("es", 1)], "grpo_long": [run("grpo", 9)], "decodings": []}
    rows = pd.DataFrame(study.by_temperature(of))
    assert rows[["group", "temperature", "accuracy", "n"]].values.tolist() == [
        ["base", 0.0, 0.5, 1],
        ["base", 1.0, 0.25, 1],
        ["es", 0.0, 0.5, 2],
        ["es", 1.0, 0.25, 2],
    ]
    assert list(view.temperature_table(of, rows, "/mine")) == ["arm", "greedy", "temperature 1"]
    (ax,) = figures.draw_temperatures(rows, "/mine").axes
    assert len(ax.lines) == 2
