"""What samples of own models say: tables and curves from counts against numbers by hand, and the null of two halves."""

from itertools import combinations

import numpy as np
import pytest
from evoalign_study import own_coverage, style
from evoalign_study.records import pack_integers
from helpers import refused
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt

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
        counted = {"right": pack_integers(own), "n_problems": len(own), "clipped": len(own)}
        counted["generated_tokens"] = 10 * samples * len(own)
        made.append({"spec": spec | {"block": [first, first + len(own)]}} | counted)
    return made[::-1]


MODELS = {name: records(right, 0.6) + records(right[::-1]) for name, right in RIGHT.items()}


def test_counts_come_in_the_order_of_the_problems():
    assert own_coverage.counts(MODELS["model"], 0.6).tolist() == RIGHT["model"].tolist()
    assert own_coverage.counts(MODELS["model"], 1.0).tolist() == RIGHT["model"][::-1].tolist()
    assert own_coverage.ks(512) == [1, 4, 16, 64, 256, 512]


def test_pass_at_k_is_the_unbiased_estimate_with_the_error_of_sampling():
    table = own_coverage.pass_table(MODELS, 0.6)
    assert list(table["k"]) == [1, 4, 16, 64] * 2
    for name, k, said, error in zip(table["model"], table["k"], table.iloc[:, 3], table.iloc[:, 4], strict=True):
        assert said.startswith(f"{100 * coverage.estimate_pass_at(RIGHT[name], N, k).mean():.1f} [")
        drawn = [100 * coverage.estimate_pass_at(RNG.binomial(N, CHANCES[name]), N, k).mean() for _ in range(300)]
        assert error == "not known" if 2 * k > N else float(error) == pytest.approx(np.std(drawn), rel=0.35)


def test_support_is_read_against_two_halves_of_the_models_own_samples():
    table = own_coverage.support_table(MODELS, 0.6)
    assert list(table["model"]) == ["model, two halves", "an end"] and set(table["k"]) == {N // 2}
    before, after = (coverage.estimate_pass_at(right, N, N // 2) for right in RIGHT.values())
    assert table["won E"][1] == f"{(after * (1 - before)).sum():.1f}" and table["won E"][0] == table["lost S"][0]
    change = own_coverage.change(RIGHT["model"], RIGHT["an end"], N, N // 2)
    assert change.value == pytest.approx(coverage.support(before, after).nscr)
    assert table["NSCR [95 %]"][1] == change.format(percent=False, digits=3)
    low, high = map(float, table["null, 95 %"][0].split(" to "))
    assert low < 0 < high < change.value  # the end solves more, by far
    same = own_coverage.support_table({"model": MODELS["model"], "itself": MODELS["model"]}, 0.6)
    assert same["NSCR [95 %]"][1].startswith("0.000")


def test_the_figure_plots_what_is_estimated():
    fig, data = own_coverage.figure_pass_at_k(MODELS | {f"end {i}": MODELS["an end"] for i in range(2)})
    looks = {(line.get_color(), line.get_linestyle()) for line in fig.axes[0].lines}
    assert len(fig.axes) == 2 and len(looks) == 4 and (style.ARMS["base"].color, "-") in looks
    own = data[(data["panel"] == "temperature 0.6") & (data["model"] == "model")]
    expected = 100 * coverage.estimate_pass_at(RIGHT["model"], N, own["k"].tolist()).mean(0)
    assert own["value"].to_numpy() == pytest.approx(expected) and own["k"].iloc[-1] == N
    assert own["value"].between(own["low"], own["high"]).all()
    plt.close(fig)


WHOLE = records(RIGHT["model"])


test_samples_that_cannot_be_compared_are_refused = refused(
    ({"a": WHOLE[1:]}, own_coverage.pass_table, "32 of 40"),
    ({"a": WHOLE * 2}, own_coverage.pass_table, "twice"),
    ({"a": WHOLE + records(RIGHT["model"], end="x")}, own_coverage.pass_table, "6 records"),
    ({"a": WHOLE, "b": records(RIGHT["model"] // 2, samples=32)}, own_coverage.pass_table, r"\[32, 64\]"),
    ({"a": WHOLE, "b": records(RIGHT["model"][:10])}, own_coverage.support_table, "'b' has 10 problems"),
    ({"a": WHOLE, "b": records(RIGHT["model"], 0.6)}, lambda m, _: own_coverage.figure_pass_at_k(m), r"\[0.6\]"),
    call=lambda models, table: table(models, 1.0),
)


# ---- the null of two halves


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.sampled_from([6, 7]))
def test_expected_counts_are_those_of_all_deals(right, n):
    found = coverage.null_of_halves(right, n, n_resamples=64).support
    halves = list(combinations(range(n), 3))
    deals = [(first, second) for first in halves for second in halves if not set(first) & set(second)]
    kept = won = 0.0
    for c in right:  # the first c answers are right
        solved = np.array([[min(half) < c for half in deal] for deal in deals])
        kept += (solved[:, 0] & solved[:, 1]).mean()
        won += (~solved[:, 0] & solved[:, 1]).mean()
    assert found.kept == pytest.approx(kept) and found.won == pytest.approx(won) == pytest.approx(found.lost)
    assert found.total == pytest.approx(len(right))


CASES = ([1], 1, "samples=1"), ([[1, 2]], 4, r"\(1, 2\)"), ([5], 4, "right <= samples")
test_counts_without_halves_are_refused = refused(*CASES, call=lambda right, n: coverage.null_of_halves(right, n))
