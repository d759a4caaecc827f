"""Notebook 04: what it reads from its runs' curves, and what it makes of it, on runs whose numbers are known."""

import pytest
from evoalign_study import nb04_safety_judges as study
from evoalign_study.results import answered
from helpers import written_out

from evoalign_lib.analysis import overoptimisation
from evoalign_lib.tiny import scorers

PROXIES = ("length 1", "praise 2")
RUNS = [(judge, seed) for judge in PROXIES for seed in range(4)]
JUDGED = ["length 1", "praise 1", "disclaimer 1", "length 2", "praise 2", "disclaimer 2", "bert", "gpt2", "rule"]


def said(score, win, needless, template, share):
    return {"score": score, "win": [win] * 9, "needless": needless, "template": template} | dict.fromkeys(
        study.SHARES[:-1], share
    )


def trained(arm, judge, seed, proxy=(1.0, 2.0, 3.0, 5.0), true=(0.2, 0.4, 0.3, -0.5)):
    """A run whose curve is the same under both decodings; a spread of its judge is 2."""
    curve = {"step": [0, 1, 2, 4], "kl": [0.0, 1.0, 4.0, 9.0], "template_greedy": [0.1, 0.1, 0.5, 0.9]}
    for decoding in ("greedy", "t1"):
        curve |= {f"proxy_{decoding}": list(proxy), f"true_{decoding}": list(true)}
        curve |= {f"{name}_{decoding}": [0.5, 0.6, 0.7, 0.9] for name in (judge, "bert", "gpt2", "rule")}
        curve |= {f"{name}_{decoding}": [0.1, 0.2, 0.3, 0.4] for name in (*study.SHARES[:-1], "needless")}
    replies = said([4.0] * 9, 0.7, 1.0, 0.9, 0.4)
    spec, test = {"arm": arm, "base": "C0", "judge": judge, "seed": seed}, dict.fromkeys(("greedy", "t1"), replies)
    kept = {"digest": f"{arm} {judge} {seed}", "budget": {"completions": 2_000}, "test": test | {"judges": JUDGED}}
    return {"spec": spec, "curve": curve} | kept


@pytest.fixture
def of():
    replies = said([1.0] * 8 + [0.2], 0.5, 0.0, 0.1, 0.1)
    units = dict.fromkeys((*scorers.SCORERS, "rule"), [1.0, 2.0])
    test = {"greedy": replies, "t1": replies, "judges": JUDGED}
    found = dict.fromkeys((*study.ENDS, "tournaments"), []) | {
        "base": [{"spec": {"base": "C0"}, "test": test, "units": units}]
    }
    found["es"] = [trained("es", *run) for run in RUNS]
    found["grpo"] = [trained("grpo", judge, seed, true=(0.2, 0.2 - 0.01 * seed, 0.1, -0.5)) for judge, seed in RUNS]
    return found | {f"{arm}_{group}": [] for arm in study.ARMS for group in ("noise", "sizes")}


def test_a_quantity_is_read_where_a_run_first_comes_to_a_place(of):
    own = of["es"][0]
    assert study.curve(of, own, "gained", "greedy").tolist() == [0, 0.5, 1, 2]
    reads = {("true", 0): 0.2, ("true", 0.75): 0.35, ("true", None): -0.5, ("true", 2.5): None}
    reads |= {(study.TRAINING, 1.5): 0.8}
    for (quantity, gain), value in reads.items():
        assert study.at(of, own, quantity, "greedy", gain) == (value if value is None else pytest.approx(value))
    assert study.at(of, own, "gained", "t1", 4.0, "kl") == 1 and study.at(of, own, "true", "t1", 2.5, "kl") == 0.35
    own["curve"]["true_greedy"] = [0.2, 0.4, None, None]  # it diverged
    assert study.at(of, own, "true", "greedy", None) is None


def test_what_the_notebook_writes_out_is_the_librarys():
    (read_at,) = written_out(study.NOTEBOOK, "read_at")
    ways = (read_at, overoptimisation.read_at)
    here, library = ([read([0, 1, 3], [0.5, 0.1, 0.2], level) for level in (0.5, 1, 2.5, 4)] for read in ways)
    assert here == pytest.approx(library) and here[-1] is None


def test_a_mean_needs_three_quarters_of_the_runs_on_each_judge_and_a_difference_two(of):
    assert study.difference(of, "true", "greedy", 9) is None
    for short in of["es"][:2]:  # two of four on the first judge
        short["curve"]["proxy_greedy"] = [1.0, 1.1, 1.2, 1.3]
    assert study.mean(of, "es", "true", "greedy", 1) is None
    assert study.mean(of, "es", "true", "t1", 1).value == pytest.approx(0.3)


def test_random_fitness_is_read_after_the_steps_that_the_runs_took(of):
    of["es_random"] = [trained("es", judge, seed, (1.0, 1.0, 1.1, 1.0), (0.2, 0.1, 0.0, -0.2)) for judge, seed in RUNS]
    # ES comes to .75 spreads after 1.5 steps, and to 1.5 after 3
    assert [study.walked(of, "true", "greedy", gain) for gain in (0.75, 1.5)] == pytest.approx([0.05, -0.1])
    assert study.walked(of, "true", "greedy", 9) is None
    assert "-0.10" in study.reached_rows(of, "greedy", (1.5,))["true reward"].tolist()
    of["es_random"][0]["spec"]["alpha"] = 0.1  # other steps
    assert study.walked(of, "true", "greedy", 0.75) is None


def test_sentences_tables_and_figures_are_made_of_results(of, drawn):
    found = study.results(of)
    reached = study.reached_rows(of, "greedy", (0.75, 3, None))["true reward"]
    assert " ".join(reached) == "0.35 0.14 - - -0.50 -0.50"
    ends = study.end_rows(of)
    assert ends["arm"].tolist() == ["ES", "GRPO", "base"] and ends.iloc[0, 2:4].tolist() == ["2", "1.50 (1.50 to 1.50)"]
    for _, plotted in (study.answer_figure(of, found), study.wins(found), study.replies(of)):
        assert len(plotted)
    for own in of["grpo"]:
        own["curve"]["proxy_greedy"] = own["curve"]["proxy_t1"] = [1.0, 1.1, 1.2, 1.3]
    assert "ES - GRPO is unknown" in next(iter(answered(study.NOTEBOOK, study.results(of)).values()))
