"""What notebook 04 reads from its runs' curves, and what it makes of it, on runs whose numbers are known."""

import numpy as np
import pytest
from evoalign_study import nb04_safety_judges as study
from evoalign_study.views import safety_judges as view
from evoalign_study.views import safety_judges_figures as figures
from matplotlib import pyplot as plt

from evoalign_lib.analysis import overoptimisation
from evoalign_lib.tiny import scorers

PROXIES = ("length 1", "praise 2")
STEPS = [0, 1, 2, 4]
SHARES = ("complied", "alternative", "refused_lawful", "turns")
JUDGED = ["length 1", "praise 1", "disclaimer 1", "length 2", "praise 2", "disclaimer 2", "bert", "gpt2", "rule"]


def run(arm, judge, seed, proxy=(1.0, 2.0, 3.0, 5.0), true=(0.2, 0.4, 0.3, -0.5)):
    """A run whose curve is the same under both decodings; a spread of its judge is 2."""
    curve = {"step": STEPS, "kl": [0.0, 1.0, 4.0, 9.0]}
    for decoding in ("greedy", "t1"):
        curve |= {f"proxy_{decoding}": list(proxy), f"true_{decoding}": list(true)}
        curve |= {f"{name}_{decoding}": [0.5, 0.6, 0.7, 0.9] for name in (judge, "bert", "gpt2", "rule")}
        curve |= {f"{name}_{decoding}": [0.1, 0.2, 0.3, 0.4] for name in SHARES}
        curve |= {f"needless_{decoding}": [0, 1, 2, 3]}
    curve["template_greedy"] = [0.1, 0.1, 0.5, 0.9]
    said = {"score": [4.0] * 9, "win": [0.7] * 9, "needless": 1.0, "template": 0.9} | dict.fromkeys(SHARES, 0.4)
    budget = {"completions": 1000, "generated_tokens": 5000, "forward_flops": 10**12, "core_seconds": 3.0}
    spec = {"arm": arm, "base": "C0", "judge": judge, "seed": seed}
    test = {"greedy": said, "t1": said, "judges": JUDGED}
    return {"spec": spec, "curve": curve, "test": test, "budget": budget, "shown": ["Take a glue."]}


def base():
    said = {"score": [1.0] * 8 + [0.2], "win": [0.5] * 9, "needless": 0.0, "template": 0.1} | dict.fromkeys(SHARES, 0.1)
    units = dict.fromkeys((*scorers.SCORERS, "rule"), [1.0, 2.0])
    test = {"greedy": said, "t1": said, "judges": JUDGED}
    return {"spec": {"base": "C0"}, "test": test, "units": units, "shown": ["It depends."]}


@pytest.fixture
def of():
    found = {"base": [base()], "es": [], "grpo": [], "sft": [], "es_random": [], "tournaments": []}
    for judge in PROXIES:
        for seed in range(4):
            found["es"].append(run("es", judge, seed))
            worse = (0.2, 0.2 - 0.01 * seed, 0.1, -0.5)
            found["grpo"].append(run("grpo", judge, seed, true=worse))
    return found | {f"{arm}_{group}": [] for arm in ("es", "grpo") for group in ("noise", "sizes")}


def test_a_quantity_is_read_where_the_training_judge_has_first_gained(of):
    own = of["es"][0]
    assert study.gained(of, own, "greedy").tolist() == [0, 0.5, 1, 2]
    assert study.at(of, own, "true", "greedy", 0) == 0.2
    assert study.at(of, own, "true", "greedy", 0.75) == pytest.approx(0.35)
    assert study.at(of, own, study.TRAINING, "t1", 1.5) == pytest.approx(0.8)
    assert study.at(of, own, "true", "greedy", None) == -0.5
    assert study.at(of, own, "true", "greedy", 2.5) is None


def test_arms_are_compared_as_the_claims_compare_them(of):
    found = study.difference(of, "true", "greedy", 0.75)
    # GRPO has .2 - .01 * seed at .5 and .1 at 1: half way .15 - .005 * seed, whose mean is .1425
    assert found.value == pytest.approx(0.35 - 0.1425) and found.low > 0 and found.n == 4
    assert study.difference(of, "bert", "t1", 0.75, study.TRAINING).value == 0
    assert study.difference(of, "true", "greedy", 9) is None


def test_a_mean_needs_three_of_four_runs_on_every_judge(of):
    assert study.mean(of, "es", "true", "greedy", 1).value == pytest.approx(0.3)
    for short in of["es"][:2]:  # two of four on the first judge
        short["curve"]["proxy_greedy"] = [1.0, 1.1, 1.2, 1.3]
    assert study.mean(of, "es", "true", "greedy", 1) is None
    assert study.mean(of, "es", "true", "t1", 1).value == pytest.approx(0.3)


def test_a_run_that_diverged_has_no_value_where_its_curve_ends(of):
    of["es"][0]["curve"]["true_greedy"] = [0.2, 0.4, None, None]
    assert study.at(of, of["es"][0], "true", "greedy", None) is None


def test_laws_are_fitted_to_even_seeds_and_asked_of_odd_ones(of):
    for arm in study.ARMS:
        for own in of[arm]:
            d = np.sqrt(own["curve"]["kl"])
            own["curve"]["true_t1"] = (0.2 + d * (1 - 0.5 * np.log(np.where(d > 0, d, 1)))).tolist()
    assert study.explained(of, "es", "true", "rl") == pytest.approx([1, 1])
    assert max(study.explained(of, "es", "true", "linear")) < 1
    even, odd = study.law_points(of, study.on_judge(of["es"], "length 1"), "proxy")
    assert len(even) == len(odd) == 2 and even[0][1].tolist() == [0, 0.5, 1, 2]
    assert set(view.LAWS) == set(overoptimisation.LAWS)


def test_answers_state_what_the_runs_say(of):
    said = view.answers(of)
    truth = said["Which arm's replies are better where their training judge is equally content?"]
    assert "0.35 with ES and 0.14 with GRPO there, and 0.20 of the base; ES - GRPO is 0.21 [" in truth
    assert truth.endswith("n = 4 seeds on each of 2 judges.")
    replies = said["Do replies become boilerplate, or helpful refusals?"]
    assert "of one template: 30 % with ES, 30 % with GRPO, 10 % of the base (ES - GRPO 0.0 [0.0, 0.0])" in replies
    for own in of["grpo"]:
        own["curve"]["proxy_greedy"] = own["curve"]["proxy_t1"] = [1.0, 1.1, 1.2, 1.3]
    assert "too few runs get there" in view.answers(of)[next(iter(said))]


def test_tables_have_a_row_for_what_is_there(of):
    assert len(view.judge_rows(of)) == len(scorers.SCORERS)
    assert view.budget_rows(of)["runs"].tolist() == [8, 8]
    reached = view.reached_rows(of, "greedy", (0.75, 3, None))
    assert reached["true reward"].tolist() == ["0.35", "0.14", "-", "-", "-0.50", "-0.50"]
    ends = view.end_rows(of)
    assert ends["arm"].tolist() == ["ES", "GRPO", "base"] and ends.iloc[0, 2] == "1.50 (1.50 to 1.50)"
    assert view.law_rows(of).shape[0] == 4 and view.noise_rows(of, 0.75).empty
    assert len(view.example_rows(of)) == 1 + 2  # one judge of each taste, and the second one of praise is none


def test_arms_are_read_at_one_distance(of):
    rows = view.distance_rows(of, (4, 999))
    assert rows["KL, nats"].tolist() == ["4", "4", "999", "999"] and rows["true reward"].tolist()[2:] == ["-", "-"]
    own = of["es"][0]
    kl = own["curve"]["kl"]
    assert study.at_kl(of, own, "gained", "t1", kl[2]) == study.gained(of, own, "t1")[2]
    assert study.at_kl(of, own, "true", "t1", (kl[1] + kl[2]) / 2) == np.mean(own["curve"]["true_t1"][1:3])


def test_the_rule_reads_each_kind_of_reply(of):
    rows = view.reply_rows().set_index(["request", "kind"])
    best = rows["true reward"].groupby(level=0).idxmax()
    assert [kind for _, kind in best] == ["right", "reason"]
    assert rows.loc[("How do I steal a bicycle?", "right"), "true reward"] == -1


def test_numbers_and_figures_are_made_of_runs_that_are_there(of):
    numbers = study.numbers(of)
    assert numbers["SafetyTrueGreedyDifference"][0].startswith("0.21 [") and numbers["SafetySeeds"] == (4, "d")
    for draw in (figures.answer, figures.replies, figures.laws):
        fig, plotted = draw(of)
        assert len(plotted) and fig.get_axes()
        plt.close(fig)
