"""What the notebooks make of records, held against numbers that are worked out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
from evoalign_study.kinds import memory
from evoalign_study.records import pack_bits, pack_counts, pack_probabilities
from evoalign_study.trl_loss import losses_agree
from test_notebooks import MODULES, loaded

from evoalign_lib import footprint
from evoalign_lib.engines.memory import shape

nb01, nb02, _, _, nb05, nb06, nb07, nb08, _ = MODULES
pytestmark = pytest.mark.usefixtures("drawn")


# ---- 01 and 02


def test_audits_of_populations_that_were_all_tied():
    _, records = loaded(nb01)
    still = [r | {"path": {"cosine": [1.0, None]}} for r in records["audit"]]
    runs = nb01.audits(dict(records) | {"audit": still})
    assert runs["path"].isna().all()
    texts = [text.get_text() for text in nb01.figure_arithmetic(runs).axes[1].texts]
    assert texts == ["not defined"] * len(nb01.ARITHMETICS)


def test_what_has_no_spread_or_no_point_yet_is_left_out():
    curve = {"completions": [0, 50, 100], "validation_greedy": [0.1, 0.2, 0.3], "validation_t1": [0.1, 0.1, 0.1]}
    run = {"curve": curve, "budget": {"completions": 100}, "spec": {"sigma": 0.1, "alpha": 0.1}}
    equal = nb02.match({"es": [run] * 2, "grpo": [run] * 2}, "completions", 0.02)
    assert equal["es at equal completions, greedy"] == 0.3 and not [key for key in equal if "lead" in key]
    late = {"curve": curve | {"completions": [0, 200, 300]}}
    assert nb02.larger_alpha({"grpo": [run]}, [late]) == {}


def test_the_best_setting_at_full_length_is_chosen_by_greedy_accuracy_where_arms_are_compared():
    """The second setting of ES is ahead at the FLOPs of GRPO and behind at its end; both seeds count."""

    def run(alpha: float, last: float, middle: float = 0.2) -> dict:
        curve = {
            "forward_flops": [0, 1, 64, 100, 640, 1000],
            "validation_greedy": [0.1] * 2 + [middle] * 2 + [last] * 2,
        }
        spec = {"sigma": 0.1, "alpha": alpha, "prompts_per_step": 2, "steps": 9}
        return {"spec": spec, "curve": curve | {"validation_t1": [0.1] * 6}, "budget": {"forward_flops": 100}}

    tried = [run(1, 0.4), run(1, 0.2), run(2, 0.29, 0.25), run(2, 0.29, 0.25)]
    scores = nb02.final_scores({"grpo": tried, "finals es": tried, "prompts es": []})
    assert scores["setting"].str[:18].tolist() == ["sigma 0.1, alpha 1", "sigma 0.1, alpha 2"]
    assert set(scores["n"]) == {2}
    assert scores["end, greedy"].tolist() == pytest.approx([0.3, 0.29])
    assert scores["equal FLOPs, greedy"].tolist() == pytest.approx([0.2, 0.25])
    assert nb02.final_scores({"grpo": tried}).empty


def test_each_accuracy_stands_with_its_set_of_problems_and_its_run(committed_records):
    """A mean of runs, a composed run and one of other data are no runs of the arm."""
    scores = nb02.accuracy_by_set(committed_records).set_index(["set", "arm", "notebook", "steps"])["accuracy"]
    es = [r["test"]["greedy"] for r in nb02.pilot(committed_records)]
    assert scores["test 2,000", "es", "01", 100] == pytest.approx(100 * np.mean(es))
    (base,) = (r for r in committed_records if r["spec"]["kind"] == "noise" and "end" not in r["spec"])
    assert scores["validation 256", "base", "09", 0] == 100 * base["clean"]["greedy"]
    half = scores.loc["test 256", ["es", "grpo"], "07", [33, 125]]
    assert half.iloc[0] < half.iloc[1]  # ES alone, not ES after GRPO


def test_models_that_are_not_measured_again_have_their_own_two_decodings():
    """As those from outside the tiny world: the figure and the table have greedy decoding and temperature 1."""

    def run(arm: str, seed: int) -> dict:
        spec = {"kind": "train", "arm": arm, "seed": seed} if arm else {"kind": "base"}
        test = {"n": 4, "greedy_bits": pack_bits([1, 1, 0, 0]), "t1_counts": pack_counts([16, 0, 0, 0])}
        return {"spec": spec | {"base": "/mine"}, "spec_hash": f"{arm} {seed}", "test": test}

    records = {"base": [run("", 0)], "es": [run("es", 0), run("es", 1)], "grpo_long": [run("grpo", 9)], "decodings": []}
    points = nb02.by_temperature(records)
    means = points[["group", "temperature", "accuracy", "n"]].values.tolist()
    assert means == [["base", 0.0, 50, 1], ["base", 1.0, 25, 1], ["es", 0.0, 50, 2], ["es", 1.0, 25, 2]]
    (ax,) = nb02.draw_temperatures(points).axes
    assert len(ax.lines) == 2


def test_a_loss_that_is_not_trls_is_found(tmp_path):
    def nearly(logp, old_logp, ref_logp, rewards, mask, **_):
        ratio = (logp - old_logp).exp()
        return -((ratio * (rewards - rewards.mean(1, keepdim=True))[..., None] * mask).sum(-1) / mask.sum(-1)).mean()

    found = losses_agree("grpo", nearly, tmp_path)
    assert found == {"loss of": "GRPO", "same value": "no", "same gradient": "no"}


# ---- 05


def test_a_run_that_loses_more_than_half_of_its_gain_fell_back():
    for last, ended in ((0.25, "kept"), (0.19, "fell back")):
        assert nb05.outcome({"curve": {"validation_greedy": [0.1, 0.3, last]}}) == ended


def test_spreads_and_contenders():
    run, records = loaded(nb05)
    values = nb05.scores(records, "es", "test", "greedy")
    assert nb05.spread_ratio(values, None) is None and nb05.spread_ratio(values, np.full(16, 0.5)) is None
    assert nb05.scores(records, "es", "at mean", 0.99) is None
    assert nb05.ratio_in_words(None, values)[0] == "an arm never gets there"
    assert nb05.spread_ratio(values, values).value == pytest.approx(1)
    for arm, step in nb05.STEP.items():
        tried = nb05.contenders(run, records, arm)
        assert len({setting[step] for setting in tried}) == len(tried) == run.transfer_size
        assert nb05.tuned(run, records, arm) in tried


# ---- 06


def test_an_arm_that_costs_more_by_its_first_measured_point_is_left_out():
    def searched(*flops):
        curve = {"completions": [0, 100, 10_000], "core_seconds": [1.0, 2.0, 8.0], "forward_flops": flops}
        return [{"curve": curve | {"validation_greedy": [0.1, 0.1, 0.3]}}] * 2

    equal = nb06._at_equal_budgets(records := {"essa": searched(2, 3, 8), "dear": searched(0, 9, 100)}, list(records))
    assert "essa at equal forward_flops" in equal and "dear at equal forward_flops" not in equal


def test_parameters_and_bytes_are_those_of_what_is_trained():
    groups = {"essa": ("essa", 7168), "grpo_lora": ("grpo_lora", 140_928)}
    records = {group: [{"spec": {"arm": arm, "lora_rank": 8}, "d": d}] for group, (arm, d) in groups.items()}
    assert nb06.moved(records, "grpo_lora") == nb06.moved(records, "essa") == 7168
    _, records = loaded(nb06)
    at, model = nb06.bytes_a_parameter(nb06.memory_bytes(records["memory"]), "7B"), shape(memory.PUBLISHED["7B"])
    whole = footprint.bytes_of("grpo", model, memory.PUBLISHED_WORK, gpus=True)
    assert at.loc["GRPO"].sum() == pytest.approx(sum(whole.values()) / model.d)
    (ax,) = nb06.draw_bars(at).axes
    assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(at.to_numpy().sum())
    assert sorted(part for _, parts in nb06.KINDS.values() for part in parts) == sorted(footprint.COMPONENTS)


# ---- 07


def test_where_the_base_comes_ahead():
    """Of two problems GRPO solves one in half of the samples, the base both in a tenth."""
    _, records = loaded(nb07)
    for model, each in {"grpo": [0.5, 0.0], nb07.BASE: [0.1, 0.1]}.items():
        name = nb07.reach_name(model)
        few = records[name][0] | {"reach": dict.fromkeys(records[name][0]["reach"], pack_probabilities(each)), "n": 2}
        records = records | {name: [few]}
    assert 6 < nb07.crossing(records, "grpo", "t1").value < 7  # (1 - .5^k) / 2 against 1 - .9^k


# ---- 08


def test_ends_to_compare_are_two():
    run, records = loaded(nb08)
    base, first, second = nb08.ends(run, records)
    assert base == "A0" and first != second
    with pytest.raises(ValueError, match="one"):
        nb08.ends(SimpleNamespace(ends=["one"], bases=["B"]), records)
