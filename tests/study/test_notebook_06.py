"""Notebook 06 on its committed records: its results, and the answers, macros and figures made of them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from evoalign_study import nb06_low_rank_and_cost as study
from evoalign_study import paths, tidy
from evoalign_study.kinds import memory
from evoalign_study.rendering import csv_text

from evoalign_lib import footprint
from evoalign_lib.engines.memory import shape

pytestmark = pytest.mark.usefixtures("drawn")


@pytest.fixture(scope="module")
def verdicts(committed_verdicts):
    return {verdict.id: verdict for verdict in committed_verdicts if verdict.id in study.CLAIMS}


@pytest.fixture(scope="module")
def values(run, records, verdicts):
    return study.results(run, records, verdicts, "released")


def test_the_paper_quotes_the_results(values):
    quoted = {macro: format(x, form) for macro, (x, form) in tidy.macros(values, study.MACROS).items()}
    committed = json.loads((paths.GENERATED / f"numbers_{study.NOTEBOOK}.json").read_text(encoding="utf-8"))
    assert quoted.items() <= committed.items() and len(quoted) == 16
    assert tidy.macros({}, study.MACROS) == {}  # of claims that were not judged
    with pytest.raises(TypeError):
        values["target"] = 4


def test_the_results_are_what_the_claims_are_judged_by(values):
    for key, judged in (
        ("rank 1 - es, greedy", "C32: ES with low rank - ES full, test greedy"),
        ("gain of rank 1, t1", "C32: ES with low rank - base, test temperature 1"),
        ("gain of precision=int4, greedy", "C14: ESSA int4 - base, test greedy"),
    ):
        assert values[key].value == pytest.approx(values[judged].value)
    assert values["grpo_adam8bit over es, 72B"] == pytest.approx(
        values["C16: grpo adam8bit over es at 72B, above 5"].value
    )


def test_answers_are_read_from_the_results(run, records, values, verdicts):
    told = study.answers(run, records, values, verdicts)
    assert len(told) == 9 and all(
        f"{claim} {verdicts[claim].verdict}." in told[q] for q, claim in study.QUESTIONS.items()
    )
    text = " ".join(told.values())
    for number in (
        f"from {study.percent(values, 'base')} %",
        f"{100 * values['target']:.1f} % with the fewest completions; {values['missed']} of 48 runs",
        f"ES, in place: {values['grpo over es_inplace, 7B']:.2g} (GRPO)",
        f"ES, weights of their own: {values['es, speed-up']:.1f} times",
    ):
        assert number in text
    elsewhere = SimpleNamespace(**vars(run) | {"engine": "vllm"})
    assert "Not run: only the local engine" in " ".join(study.answers(elsewhere, records, values, verdicts).values())


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"arm": "es"}, "ES, full rank"),
        ({"arm": "es_random"}, "ES, random fitness"),
        ({"arm": "es_low_rank_random", "rank": 4}, "ES, rank 4, random fitness"),
        ({"arm": "es_lora_random", "lora_rank": 8, "warm_rows": 64}, "ES, adapter of rank 8, warm, random fitness"),
        ({"arm": "es_lora", "lora_rank": 8}, "ES, adapter of rank 8, cold"),
        ({"arm": "essa", "lora_rank": 8, "warm_rows": 64}, "ESSA, adapter of rank 8"),
        ({"arm": "grpo"}, "GRPO"),
    ],
)
def test_a_name_says_what_is_searched_from_where_and_by_what(spec, name):
    assert study.name({"runs": [{"spec": spec}]}, "runs") == name


def test_arms_are_compared_after_what_the_cheapest_run_spent():
    def searched(start, end, *flops):
        curve = {"completions": [0, 100, 10_000], "core_seconds": [1.0, 2.0, 8.0], "forward_flops": flops}
        return [{"curve": curve | {"validation_greedy": [start, start, end]}}] * 2

    records = {"essa": searched(0.1, 0.3, 2e12, 3e12, 8e12), "grpo": searched(0.2, 0.4, 1e12, 8e12, 80e12)}
    records["dear"] = searched(0.2, 0.4, 0, 9e12, 100e12)  # by its first measured point
    equal = study._at_equal_budgets(records, list(records))
    assert equal["equal forward_flops"] == 8e12 and "dear at equal forward_flops" not in equal
    assert equal["essa at equal forward_flops"].value == 0.3 and equal["grpo at equal forward_flops"].value == 0.2
    assert equal["grpo at equal completions"].value == pytest.approx(0.4)


def test_grpo_over_an_adapter_moves_the_adapter():
    groups = {"essa": ("essa", 7168), "grpo_lora": ("grpo_lora", 140_928)}
    records = {group: [{"spec": {"arm": arm, "lora_rank": 8}, "d": d}] for group, (arm, d) in groups.items()}
    assert study.moved(records, "grpo_lora") == study.moved(records, "essa") == 7168


def test_memory_is_that_of_the_formula(records, values):
    frame, model = study.memory_bytes(records["memory"]), shape(memory.PUBLISHED["7B"])
    at = study.bytes_a_parameter(frame, "7B")
    whole = footprint.bytes_of("grpo", model, memory.PUBLISHED_WORK, gpus=True)
    assert at.loc["GRPO"].sum() == pytest.approx(sum(whole.values()) / model.d)
    assert values["grpo over es, 7B"] == pytest.approx(at.loc["GRPO"].sum() / at.loc["ES, float32 master"].sum())
    (ax,) = study.draw_bars(at).axes
    assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(at.to_numpy().sum())
    assert set(study._LOOKS) == set(footprint.COMPONENTS)


def test_figures_draw_the_committed_data(run, records, values):
    speeds = study.speed_points(records["scaling"], "released")
    curves = study.curve_points(records, study.shown(run), "completions")
    searches = study.population_points(records, run)
    for name, frame, figure, column in (
        ("scaling_simulated", speeds[study.SPEEDS], study.draw_speed_ups(speeds, "released"), "speed-up"),
        ("low_rank_curves", curves, study.draw_curves(curves, records), "mean"),
        ("essa_population_size", searches, study.draw_populations(searches, values["target"]), "at the end"),
    ):
        assert csv_text(frame) == (paths.FIGURES / f"{name}.csv").read_text(encoding="utf-8")
        lines = [line.get_xydata() for ax in figure.axes for line in ax.lines]
        dots = [dots.get_offsets() for ax in figure.axes for dots in ax.collections]
        drawn = np.concatenate([np.ravel(np.asarray(each, float)) for each in (*lines, *dots)])
        assert all(np.isclose(drawn, value).any() for value in frame[column]), name
