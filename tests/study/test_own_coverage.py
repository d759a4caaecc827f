"""What samples of own models say: tables and curves from counts against numbers by hand, and the null of two halves."""

from itertools import combinations

import numpy as np
import pytest
from evoalign_study import style
from evoalign_study.records import pack_integers
from evoalign_study.views import own_coverage as view
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib.analysis import coverage

N = 64
RNG = np.random.default_rng(0)
CHANCES = {"model": RNG.beta(0.2, 1, 40), "an end": RNG.beta(0.4, 1, 40)}
RIGHT = {name: RNG.binomial(N, p) for name, p in CHANCES.items()}


def records(right, temperature=1.0, size=16, samples=N, **changed):
    """Records of a model, in blocks, the last one first."""
    spec = {"kind": "sampled", "test_problems": len(right), "samples": samples, "temperature": temperature} | changed
    made = []
    for first in range(0, len(right), size):
        own = np.asarray(right[first : first + size])
        block = {"block": [first, first + len(own)]}
        found = {"right": pack_integers(own), "n_problems": len(own), "clipped": len(own)}
        made.append({"spec": spec | block, "generated_tokens": 10 * samples * len(own)} | found)
    return made[::-1]


MODELS = {name: records(right, 0.6) + records(right[::-1]) for name, right in RIGHT.items()}


def test_counts_come_in_the_order_of_the_problems():
    assert view.counts(MODELS["model"], 0.6).tolist() == RIGHT["model"].tolist()
    assert view.counts(MODELS["model"], 1.0).tolist() == RIGHT["model"][::-1].tolist()
    assert view.temperatures(MODELS) == [0.6, 1.0] and view.samples(MODELS) == N
    assert view.ks(N) == [1, 4, 16, 64] and view.ks(512) == [1, 4, 16, 64, 256, 512]


def test_pass_at_k_is_the_unbiased_estimate_with_the_error_of_sampling():
    table = view.pass_table(MODELS, 0.6)
    assert list(table["k"]) == [1, 4, 16, 64] * 2 and set(table["problems"]) == {40}
    for name, right in RIGHT.items():
        own = table[table["model"] == name]
        for k, said, error in zip(own["k"], own.iloc[:, 3], own.iloc[:, 4], strict=True):
            value = 100 * coverage.estimate_pass_at(right, N, k).mean()
            assert said.startswith(f"{value:.1f} [")
            if 2 * k > N:
                assert error == "not known"
                continue
            again = [100 * coverage.estimate_pass_at(RNG.binomial(N, CHANCES[name]), N, k).mean() for _ in range(300)]
            assert float(error) == pytest.approx(np.std(again), rel=0.35)


def test_support_is_read_against_two_halves_of_the_models_own_samples():
    table = view.support_table(MODELS, 0.6)
    assert list(table["model"]) == ["model, two halves", "an end"] and set(table["k"]) == {N // 2}
    before, after = (coverage.estimate_pass_at(right, N, N // 2) for right in RIGHT.values())
    won = (after * (1 - before)).sum()
    assert table["won E"][1] == f"{won:.1f}" and table["won E"][0] == table["lost S"][0]
    for row in range(2):
        assert sum(float(table[part][row]) for part in ("kept P", "won E", "lost S", "out")) == pytest.approx(40, abs=1)
    change = view.change(RIGHT["model"], RIGHT["an end"], N, N // 2)
    assert change.value == pytest.approx(coverage.support(before, after).nscr)
    assert change.low < change.value < change.high
    assert table["NSCR [95 %]"][1] == change.format(percent=False, digits=3)
    low, high = map(float, table["null, 95 %"][0].split(" to "))
    assert low < 0 < high and change.value > high  # the end solves more, by far
    same = view.support_table({"model": MODELS["model"], "itself": MODELS["model"]}, 0.6)
    assert same["NSCR [95 %]"][1].startswith("0.000")


def test_cover_and_what_samples_would_have_shown():
    table = view.cover_table(MODELS, 0.6, [0.1, 0.5])
    for row, right in enumerate(RIGHT.values()):
        assert table["cover@0.1, %"][row] == f"{100 * (right / N >= 0.1).mean():.1f}"
        assert table["none right"][row] == (right == 0).sum() > 0
        assert table["then below, %"][row] == f"{100 * -np.log(0.05) / N:.2f}"


def test_tokens_of_each_model_and_temperature():
    table = view.token_table(MODELS)
    assert len(table) == 4 and set(table["tokens"]) == {f"{10 * N * 40:,}"} and set(table["mean length"]) == {"10.0"}
    assert set(table["cut off, %"]) == {f"{100 / N:.2f}"}


def test_the_figure_plots_what_is_estimated():
    from matplotlib import pyplot as plt

    models = MODELS | {f"end {i}": MODELS["an end"] for i in range(2)}
    fig, data = view.pass_at_k(models)
    assert len(fig.axes) == 2 and [len(ax.lines) for ax in fig.axes] == [4, 4]
    looks = {(line.get_color(), line.get_linestyle()) for line in fig.axes[0].lines}
    assert len(looks) == 4 and (style.ARMS["base"].color, "-") in looks
    own = data[(data["panel"] == "temperature 0.6") & (data["model"] == "model")]
    expected = 100 * coverage.estimate_pass_at(RIGHT["model"], N, own["k"].tolist()).mean(0)
    assert own["value"].to_numpy() == pytest.approx(expected) and own["k"].iloc[-1] == N
    assert (own["low"] <= own["value"]).all() and (own["value"] <= own["high"]).all()
    plt.close(fig)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"a": records(RIGHT["model"])[1:]}, "32 of 40 problems at t1 are there: load every block"),
        ({"a": records(RIGHT["model"])[:-1]}, "problems from 0 to 15 at t1 are missing"),
        ({"a": records(RIGHT["model"]) * 2}, "problems from 0 to 15 at t1 are there twice"),
        ({"a": []}, "0 of all problems"),
        ({"a": records(RIGHT["model"]) + records(RIGHT["model"], end="x")}, "differ in more than their blocks"),
    ],
)
def test_blocks_that_make_no_model_are_refused(models, message):
    with pytest.raises(ValueError, match=message):
        view.counts(models["a"], 1.0)


def test_models_that_cannot_be_compared_are_refused():
    own = records(RIGHT["model"])
    with pytest.raises(ValueError, match=r"records with \[32, 64\] samples"):
        view.pass_table({"a": own, "b": records(RIGHT["model"] // 2, samples=32)}, 1.0)
    with pytest.raises(ValueError, match="sampled at other temperatures"):
        view.pass_at_k({"a": own, "b": records(RIGHT["model"], 0.6)})
    with pytest.raises(ValueError, match="'b' has 10 problems, 'a' 40"):
        view.support_table({"a": own, "b": records(RIGHT["model"][:10])}, 1.0)


# ---- the null of two halves


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.sampled_from([6, 7]))
def test_expected_counts_are_those_of_all_deals(right, n):
    found = coverage.null_of_halves(right, n, n_resamples=64).support
    kept = won = 0.0
    for c in right:
        answers = [1] * c + [0] * (n - c)
        deals = [
            (set(first), set(second))
            for first in combinations(range(n), 3)
            for second in combinations(sorted(set(range(n)) - set(first)), 3)
        ]
        solved = np.array([[any(answers[i] for i in half) for half in deal] for deal in deals])
        kept += (solved[:, 0] & solved[:, 1]).mean()
        won += (~solved[:, 0] & solved[:, 1]).mean()
    assert found.kept == pytest.approx(kept) and found.won == pytest.approx(won) == pytest.approx(found.lost)
    assert found.total == pytest.approx(len(right))


def test_the_null_is_that_of_two_sets_of_samples_where_right_answers_are_rare():
    p = np.full(200, 0.01)  # most counts of 64 samples are 0 or 1
    pairs = RNG.binomial(32, p, size=(2, 4000, 200)) > 0
    won, lost, kept = pairs[1] & ~pairs[0], pairs[0] & ~pairs[1], pairs[0] & pairs[1]
    spread = ((won.sum(1) - lost.sum(1)) / (pairs[0] | pairs[1]).sum(1)).std()
    drawn = [RNG.binomial(64, p) for _ in range(60)]
    halves = [coverage.null_of_halves(right, 64, n_resamples=400) for right in drawn]
    assert np.mean([null.support.kept for null in halves]) == pytest.approx(kept.sum(1).mean(), rel=0.05)
    assert np.mean([null.support.won for null in halves]) == pytest.approx(won.sum(1).mean(), rel=0.03)
    assert np.mean([null.sd for null in halves]) == pytest.approx(spread, rel=0.05)
    assert np.mean([null.low for null in halves]) == pytest.approx(-1.96 * spread, rel=0.1)
    # shares taken for probabilities keep far too much
    assert np.mean([coverage.null_nscr(right / 64, 32).support.kept for right in drawn[:5]]) > 1.3 * kept.sum(1).mean()
    nothing = coverage.null_of_halves([0, 0], 8)
    assert np.isnan([nothing.sd, nothing.low, nothing.high]).all() and nothing.support.out == 2


@pytest.mark.parametrize(
    ("right", "samples", "message"),
    [
        ([1], 1, "samples=1 must be a whole number of at least 2: halves are compared"),
        ([[1, 2]], 4, r"right has shape \(1, 2\)"),
        ([5], 4, "right <= samples"),
    ],
)
def test_counts_without_halves_are_refused(right, samples, message):
    with pytest.raises(ValueError, match=message):
        coverage.null_of_halves(right, samples)
