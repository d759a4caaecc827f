"""What no analysis can be made of is refused by a ValueError that names the value."""

import numpy as np
import pytest
import torch

from evoalign_lib.analysis import (
    attenuation,
    connectivity,
    coverage,
    curves,
    geometry,
    hacking,
    kl,
    power,
    refusals,
    regimes,
    robustness,
    stats,
    tournaments,
)

NAN, EYE, PATHS, ONES = float("nan"), np.eye(6), np.zeros((2, 2, 5, 11)), np.ones((5, 5))
W = {"w": torch.ones(4)}
GAMES = tournaments.Games.of("ppqqr", "xyxzx", "yzzxy", [1, 0.5, 0, 1, 0])
PAIR = {"players": ("x", "y"), "prompts": np.array([0, 1]), "a": np.array([0, 0]), "b": np.array([1, 1])}
PAIR |= {"outcome": np.array([1.0, 0.0])}
GRID, FELL = np.array([[a, b] for a in (-1.0, 0.0, 1.0) for b in (-1.0, 0.0, 1.0)]), np.arange(9) / 8

REFUSED = [
    (lambda: attenuation.corrected_cosine(EYE, [0], [1, 2]), r"\[0\]"),
    (lambda: attenuation.corrected_cosine(EYE, [0, 1], [1, 2]), r"runs \[1\] are in both"),
    (lambda: attenuation.signal(np.ones((2, 3))), r"\(2, 3\)"),
    (lambda: connectivity.barrier_line([0, 1]), r"\(2,\)"),
    (lambda: connectivity.estimate_barrier(PATHS[:, :, :1]), r"\(2, 2, 1, 11\)"),
    (lambda: connectivity.estimate_barrier(PATHS * NAN), "no pair"),
    (lambda: connectivity.estimate_barrier(PATHS + np.array([NAN] + [0] * 10)), "not finite"),
    (lambda: connectivity.estimate_barrier(PATHS[:1], within=True), "1 x 2 pairs"),
    (lambda: connectivity.half_gain([1.0]), r"\(1,\)"),
    (lambda: connectivity.half_gain_interval(PATHS[0, 0]), r"\(5, 11\)"),
    (lambda: coverage.estimate_pass_at([1, 2], [8, 3], [1, 4]), "k=4 is more than the 3"),
    (lambda: coverage.estimate_pass_at([1], 4, 1.5), "k=1.5"),
    (lambda: coverage.pass_at([3, 4], 1), "has the value 3"),
    (lambda: coverage.cover_at([0.5], 1.1), "tau has the value 1.1"),
    (lambda: coverage.support([0.1], [0.1, 0.2]), r"\(2,\)"),
    (lambda: coverage.threshold(8, 1.0), "zeta=1.0"),
    (lambda: coverage.crossing([1, 1], [1, 0], [0, 0]), "must be positive and rise"),
    (lambda: coverage.overtaken([0.1, 0.1], [[0.1, 0.1, 0.1]], [1, 2]), "3 problems and the base 2"),
    (lambda: coverage.support_change([0.5, 0.5], [[0.5]], 1), r"\(1, 1\)"),
    (lambda: coverage.effects([[[[0.5]], [[0.5]]]]), "two rows of two"),
    (lambda: coverage.answer_entropy([-1]), "counts has the value -1"),
    (lambda: coverage.vote([]), "no answers"),
    (lambda: coverage.effective_samples([-1.0, 1.0]), "weights has the value -1"),
    (lambda: curves.completions_to_target([([1, 2], [0.1, 0.2]), ([2, 2], [0.1, 0.2])], 0.3), "curve 1"),
    (lambda: curves.score_at([0], [0.1], 1), "no score at 1"),
    (lambda: curves.scores_at_mean([[0.1, 0.6]], 0.7), "its largest is 0.6"),
    (lambda: curves.cost_at_equal_score([([], [])], ([1.0], [1.0]), start=0.0), "1 or more entries"),
    (lambda: geometry.measure(W, [W, {}]), "'w' has the shape .* is missing in number"),
    (lambda: geometry.measure(W, [{"w": torch.tensor([1.0, NAN, 1.0, 1.0])}]), "'w' has weights"),
    (lambda: geometry.measure(W, [W], dtypes=("int8",)), "dtype='int8'"),
    (lambda: geometry.gini([1.0], [0.5, 0.5]), "same groups"),
    (lambda: geometry.es_norm(1.0, 5, 3, 1), "N 1"),
    (lambda: geometry.random_like({"w": -1.0}, {"w": (2,)}, 0), "norm -1.0"),
    (lambda: hacking.hack_report([]), "no completions"),
    (lambda: hacking.hack_report(["a", "b"], right=[True]), "right has 1 entries"),
    (lambda: hacking.hack_report(["a"], tokens=[1]), "max_tokens"),
    (lambda: hacking.hack_report(["a"], base_correct=90), "base_correct=90"),
    (lambda: kl.check_sampling(0), "temperature=0"),
    (lambda: kl.exact_kl_policy_ref_tokens(torch.zeros(2), torch.zeros(3)), r"\(2,\) and \(3,\)"),
    (lambda: kl.samples([[2, 3]], [[1, 0]], [[4]], [0]), "padded on the left"),
    (lambda: kl.samples([[2, 3]], [[1, 1]], [[4], [5]], [0]), "2 completions do not fit 1 prompts"),
    (lambda: kl.parameter_gradients(None, None, kl.samples([[2]], [[1]], [[]], [0])), "none of the 1 completions"),
    (lambda: kl.estimator_errors(kl.Comparison(*[torch.zeros(1, 2)] * 3, torch.ones(1, 2))), "1 completions of 2"),
    (lambda: power.report([power.Plan("accuracy", "anova", 16, 0.02, 0.01)]), "'anova'"),
    (lambda: power.report([power.Plan("accuracy", "difference", 1, 0.02, 0.01)]), "accuracy: n=1"),
    (lambda: power.report([power.Plan("accuracy", "equivalence", 8, 0.0, 0.01)]), "margin=0.0"),
    (lambda: power.difference(16, 0.02, 0.01, alpha=5), "alpha is 5"),
    (lambda: refusals.opening_share([]), "no responses"),
    (lambda: regimes.adjusted_rand([0, 1, 1], [0, 1]), "3 labels against 2"),
    (lambda: regimes.silhouette(ONES, [0] * 5), "two kinds"),
    (lambda: regimes.two_clusters(ONES[:2, :2]), r"\(2, 2\)"),
    (lambda: regimes.basin(ONES, ONES[None], [True] * 5), "5 of 5 runs inside"),
    (lambda: regimes.within_between(ONES, [0, 0, 1, 1, 1], only="hacked"), "'hacked' names none"),
    (lambda: robustness.perturb(W, -1, 0), "sigma=-1"),
    (lambda: robustness.perturb(W, 0.1, 0, mode="relative"), "'relative'"),
    (lambda: stats.crossed_bootstrap(np.ones((2, 3)), np.ones(4)), r"\(4,\)"),
    (lambda: stats.equivalence(np.ones((2, 3)), np.ones((1, 3)), 0.02), r"baseline has shape \(1, 3\): pass 2"),
    (lambda: stats.welch_equivalence([1, 1], [1, 1], 0.1), "without spread"),
    (lambda: stats.stratified_bootstrap([[1, 2], [1, 2]], [[1, 2], [1]]), "base 1 of the baseline has the shape"),
    (lambda: stats.nested_bootstrap([]), "no groups"),
    (lambda: stats.log_std_ratio([1, 2, 3], [1, 1, 1, 0.2]), "baseline: all values, or all but one, equal 1.0"),
    (lambda: stats.mann_whitney([1, 2], [1]), r"baseline has the shape \(1,\)"),
    (lambda: stats.jonckheere([[1, 2], [3, 4]]), "2 groups"),
    (lambda: stats.wilson(9, 8), "9 hits of 8 runs"),
    (lambda: stats.holm({"C1": NAN}), "'C1'"),
    (lambda: stats.two_way([[[1.0, 1.0]] * 2] * 2), "no variance"),
    (lambda: stats.logistic_over_groups([GRID, GRID], [FELL, 2 * FELL]), "shares has the value 1.25"),
    (lambda: stats.logistic_over_groups([GRID, GRID], [FELL, 0 * FELL]), "no runs of group 1"),
    (lambda: tournaments.Games(**PAIR | {"b": np.array([0, 0])}), r"games \[0"),
    (lambda: tournaments.Games(**PAIR | {"outcome": np.array([1, 0.4])}), r"outcomes \[0.4\]"),
    (lambda: tournaments.Games.of("p", "x", "z", [1], ["x", "y"]), "'z'"),
    (lambda: tournaments.adjusted(GAMES, "x", {"length": [1, 2, 3]}), "'length' has 3 numbers"),
    (lambda: tournaments.agreement(GAMES, [0] * 5), "no game counts"),
    (lambda: tournaments.head_to_head(tournaments.Games.of("ab", "xy", "zz", [1, 0]), "x", "y"), "x and y"),
]


@pytest.mark.parametrize(("call", "names"), REFUSED)
def test_an_error_names_the_value(call, names) -> None:
    with pytest.raises(ValueError, match=names):
        call()
