"""Pairwise games: strengths are the most likely ones, whatever order and sides; intervals resample whole prompts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from evoalign_lib.analysis import tournaments
from evoalign_lib.analysis.tournaments import SCALE, Games

PLAYERS = ("w", "x", "y", "z")


def drawn(n_prompts: int, seed: int, strengths=(0.0, 0.6, -0.4, 1.0), ties: float = 0.1) -> Games:
    """Every pair of four players on every prompt once, slots at random; strengths in log-odds."""
    rng, rows = np.random.default_rng(seed), []
    for prompt in range(n_prompts):
        for i in range(4):
            for j in range(i):
                a, b = rng.permutation([i, j])
                wins = rng.random() < 1 / (1 + np.exp(strengths[b] - strengths[a]))
                rows.append((prompt, a, b, 0.5 if rng.random() < ties else float(wins)))
    prompts, a, b, outcome = map(np.array, zip(*rows, strict=True))
    return Games(PLAYERS, prompts, a, b, outcome)


def most_likely(games: Games, covariate=None) -> np.ndarray:
    """Strengths, above the first player's, by direct maximisation of the likelihood; last the coefficient, if any."""
    extra = np.zeros(len(games)) if covariate is None else np.asarray(covariate)

    def loss(free):
        s = np.concatenate([[0.0], free[:3]])
        logit = s[games.a] - s[games.b] + (free[3] if covariate is not None else 0) * extra
        return (games.outcome * np.logaddexp(0, -logit) + (1 - games.outcome) * np.logaddexp(0, logit)).sum()

    return SCALE * minimize(loss, np.zeros(3 + (covariate is not None)), tol=1e-12).x


# ------------------------------------------------------------------------------------------------------------ strengths


def test_two_players_are_log_odds_apart_and_a_tie_is_half_a_win_for_each():
    games = Games.of(range(8), ["x"] * 8, ["y"] * 8, [1, 1, 1, 1, 1, 0.5, 0.5, 0])
    found = tournaments.bradley_terry(games, "y", n_resamples=0)
    assert found.values == pytest.approx([400 * np.log10(6 / 2), 0], abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_strengths_are_the_optimum_of_the_likelihood(seed):
    games = drawn(25, seed)
    found = tournaments.bradley_terry(games, "w", n_resamples=0)
    assert found.values[1:] == pytest.approx(most_likely(games), abs=1e-2)
    # the regression without covariates is the same model
    assert tournaments.adjusted(games, "w", {}).values == pytest.approx(found.values, abs=1e-4)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(4, 12))
def test_strengths_know_neither_order_nor_sides_and_move_with_the_anchor(seed, prompts):
    games = drawn(prompts, seed, strengths=(0, 0.1, 0.2, 0.3), ties=0.4)
    found = tournaments.bradley_terry(games, "w", n_resamples=0).values
    order = np.random.default_rng(seed).permutation(len(games))
    for same in (games.swapped(), games.take(order)):
        assert tournaments.bradley_terry(same, "w", n_resamples=0).values == pytest.approx(found, abs=1e-4)
    other = tournaments.bradley_terry(games, "z", n_resamples=0).values
    assert other == pytest.approx(found - found[3], abs=1e-4) and other[3] == 0


def test_draws_are_the_same_for_the_same_seed_and_hold_the_anchor_at_zero():
    games = drawn(12, 3)
    one, same, other = (tournaments.bradley_terry(games, "x", n_resamples=50, seed=s) for s in (5, 5, 6))
    assert (one.draws == same.draws).all() and not (one.draws == other.draws).all()
    assert (one.draws[:, 1] == 0).all() and len(one.draws) + one.undefined == 50
    assert one.interval("x").low == one.interval("x").high == 0
    assert sum(one.first().values()) == pytest.approx(1)
    lead, back = one.difference("z", "y"), one.difference("y", "z")
    assert (lead.value, lead.low, lead.high) == pytest.approx((-back.value, -back.high, -back.low))


def test_prompts_are_resampled_whole_not_games():
    games = drawn(30, 4)
    again = np.tile(np.arange(len(games)), 4)
    # four copies of each game in the same prompts say nothing new: the interval stays
    copies, plain = games.take(again), tournaments.bradley_terry(games, "w", n_resamples=300)
    found = tournaments.bradley_terry(copies, "w", n_resamples=300)
    for end in ("value", "low", "high"):
        assert getattr(found.interval("z"), end) == pytest.approx(getattr(plain.interval("z"), end), abs=1e-4)
    # as games on prompts of their own they would halve it
    apart = Games(PLAYERS, np.arange(len(copies)), copies.a, copies.b, copies.outcome)
    narrow = tournaments.bradley_terry(apart, "w", n_resamples=300).interval("z")
    assert narrow.high - narrow.low < 0.65 * (plain.interval("z").high - plain.interval("z").low)


def test_resampled_and_robust_intervals_agree_and_shrink_with_prompts():
    small, large = drawn(40, 6), drawn(160, 6)
    widths = {}
    for n, games in ((40, small), (160, large)):
        resampled = tournaments.bradley_terry(games, "w", n_resamples=400).interval("z")
        robust = tournaments.adjusted(games, "w", {}).interval("z")
        widths[n] = resampled.high - resampled.low
        assert robust.high - robust.low == pytest.approx(widths[n], rel=0.25) and robust.n == resampled.n == n
    assert widths[160] == pytest.approx(widths[40] / 2, rel=0.25)


def test_players_without_finite_strengths_are_refused():
    always = Games.of(range(3), ["x", "x", "y"], ["y", "z", "z"], [1, 1, 0.5])
    for rate in (tournaments.bradley_terry, lambda games, anchor: tournaments.adjusted(games, anchor, {})):
        with pytest.raises(ValueError, match="won, or lost, every game"):
            rate(always, "y")
    # one lost game makes them finite; but most resamples lack it
    rare = Games.of(range(8), ["x"] * 8, ["y"] * 8, [1, 1, 1, 1, 1, 1, 1, 0])
    assert tournaments.bradley_terry(rare, "y", n_resamples=0).values[0] == pytest.approx(400 * np.log10(7), abs=1e-6)
    with pytest.raises(ValueError, match="of 200 resamples have no finite strengths"):
        tournaments.bradley_terry(rare, "y", n_resamples=200)
    with pytest.raises(ValueError, match="unknown player 'q'"):
        tournaments.bradley_terry(drawn(5, 0), "q")
    with pytest.raises(ValueError, match="no resamples"):
        tournaments.bradley_terry(drawn(5, 0), "w", n_resamples=0).interval("x")


# ----------------------------------------------------------------------------------------------------------- covariates


def test_a_length_effect_is_told_apart_from_strength():
    rng = np.random.default_rng(8)
    base, lengths = drawn(300, 8, ties=0), np.array([100, 120, 140, 300])
    la, lb = (rng.integers(50, 150, len(base)) * lengths[side] / 100 for side in (base.a, base.b))
    longer = tournaments.length_difference(la, lb)
    # all are equally strong, and the longer answer wins: 2 in log-odds per unit
    outcome = (rng.random(len(base)) < 1 / (1 + np.exp(-2 * longer))).astype(float)
    games = Games(PLAYERS, base.prompts, base.a, base.b, outcome)
    fooled = tournaments.bradley_terry(games, "w", n_resamples=100).interval("z")
    equal = tournaments.adjusted(games, "w", {"length": longer})
    assert fooled.low > 50
    assert equal.interval("z").low < 0 < equal.interval("z").high
    assert equal.interval("length").low < 2 * SCALE < equal.interval("length").high
    assert equal.values[[1, 2, 3, 4]] == pytest.approx(most_likely(games, longer), abs=1e-2)
    # a slot that wins by itself is a column of ones
    slot = tournaments.adjusted(games, "w", {"slot A": np.ones(len(games))}).interval("slot A")
    assert slot.low < 0 < slot.high


def test_a_tie_scores_as_two_games_of_half_weight_and_the_covariance_is_the_sandwich_over_prompts():
    import statsmodels.api as sm

    games = drawn(30, 9, ties=0.4)
    longer = np.random.default_rng(9).normal(size=len(games))
    found = tournaments.adjusted(games, "w", {"length": longer})
    design = np.zeros((len(games), 5))
    design[np.arange(len(games)), games.a] += 1
    design[np.arange(len(games)), games.b] -= 1
    design[:, 4] = longer
    design, twice = design[:, 1:], np.repeat(np.arange(len(games)), 2)
    won = np.where(games.outcome[twice] == 0.5, np.arange(len(twice)) % 2, games.outcome[twice])
    halves = sm.GLM(won, design[twice], family=sm.families.Binomial(), freq_weights=np.full(len(twice), 0.5)).fit()
    assert found.values[1:] == pytest.approx(SCALE * halves.params, abs=1e-4)

    p = 1 / (1 + np.exp(-design @ found.values[1:] / SCALE))
    scores = np.array([((games.outcome - p)[:, None] * design)[games.prompts == q].sum(0) for q in range(30)])
    bread = np.linalg.inv((design * (p * (1 - p))[:, None]).T @ design)
    sandwich = SCALE**2 * bread @ scores.T @ scores @ bread
    # statsmodels' correction for few clusters and many coefficients
    factor = 30 / 29 * (len(games) - 1) / (len(games) - 4)
    assert found.covariance[1:, 1:] == pytest.approx(sandwich * factor, rel=1e-5)
    assert not found.covariance[0].any()
    gap = found.difference("z", "y")
    assert gap.value == pytest.approx(found.values[3] - found.values[2])


def test_covariates_that_say_nothing_of_their_own_are_refused():
    games = drawn(10, 0)
    with pytest.raises(ValueError, match="not told apart from the players"):
        tournaments.adjusted(games, "w", {"z again": (games.a == 3) * 1.0 - (games.b == 3)})
    with pytest.raises(ValueError, match="'length' has shape \\(3,\\): give 60 finite numbers"):
        tournaments.adjusted(games, "w", {"length": [1, 2, 3]})
    with pytest.raises(ValueError, match="the name of a player"):
        tournaments.adjusted(games, "w", {"x": np.arange(60.0)})
    with pytest.raises(ValueError, match="unknown name 'size'"):
        tournaments.adjusted(games, "w", {}).interval("size")


def test_a_covariate_that_tells_every_winner_is_refused():
    games = drawn(30, 0, ties=0)
    with pytest.raises(ValueError, match="may tell every winner"):
        tournaments.adjusted(games, "w", {"verdict": games.outcome - 0.5})


def test_length_difference_is_bounded_and_odd():
    assert tournaments.length_difference([10, 0, 5, 0], [5, 7, 5, 0]).tolist() == pytest.approx([1 / 3, -1, 0, 0])
    with pytest.raises(ValueError, match="lengths have shapes"):
        tournaments.length_difference([1], [1, 2])


# --------------------------------------------------------------------------------------------------------------- shares


GAMES = Games.of("ppqqr", "xyxzx", "yzzxy", [1, 0.5, 0, 1, 0])


def test_shares_are_those_of_a_hand_count():
    rates = {player: rate.value for player, rate in tournaments.win_rates(GAMES, n_resamples=50).items()}
    assert rates == pytest.approx({"x": 1 / 4, "y": (0 + 0.5 + 1) / 3, "z": (0.5 + 1 + 1) / 3})
    against = tournaments.head_to_head(GAMES, "y", "x", n_resamples=50)
    assert against.value == 0.5 and against.n == 2
    slot = tournaments.position_effect(GAMES, n_resamples=50)
    assert slot.value == 0.5 and slot.n == 3  # of four decided games slot A won two
    agrees = tournaments.agreement(GAMES, [3, 9, -1, 0, 2], n_resamples=50)
    assert agrees.value == pytest.approx(2 / 3)  # the tie and the game that favours nobody are left out
    swapped = tournaments.agreement(GAMES.swapped(), [-3, -9, 1, 0, -2], n_resamples=50)
    assert (swapped.value, swapped.low, swapped.high) == (agrees.value, agrees.low, agrees.high)


def test_an_interval_of_a_share_covers_over_prompts():
    truth, inside = 1 / (1 + np.exp(-0.6)), 0
    for seed in range(60):
        rate = tournaments.head_to_head(drawn(60, seed, ties=0), "x", "w", n_resamples=200)
        inside += rate.low <= truth <= rate.high
    assert 51 <= inside <= 60


def test_shares_of_nothing_are_refused():
    ties = Games.of("ab", "xx", "yy", [0.5, 0.5])
    with pytest.raises(ValueError, match="no game counts"):
        tournaments.position_effect(ties)
    with pytest.raises(ValueError, match="no game counts"):
        tournaments.agreement(GAMES, [0] * 5)
    with pytest.raises(ValueError, match="x and y did not meet"):
        tournaments.head_to_head(Games.of("ab", "xy", "zz", [1, 0]), "x", "y")
    with pytest.raises(ValueError, match="give 5 finite numbers"):
        tournaments.agreement(GAMES, [1, 2, 3, 4, np.nan])


def test_both_orders_become_one_game_and_a_pair_that_contradicts_itself_a_tie():
    # x beats y in both orders; the slot decides between x and z; y ties z, then beats it
    both = Games.of("pppppp", "xyxzyz", "yxzxzy", [1, 0, 1, 1, 0.5, 0])
    found = tournaments.two_orders(both, n_resamples=20)
    assert found.inconsistent.value == pytest.approx(2 / 3) and found.reversed.value == pytest.approx(1 / 3)
    assert found.games.outcome.tolist() == [1, 0.5, 0.5] and found.games.a.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="x and y on prompt 0 have 2 game\\(s\\), not one in each order"):
        tournaments.two_orders(Games.of("pp", "xx", "yy", [1, 0]))
    with pytest.raises(ValueError, match="have 1 game"):
        tournaments.two_orders(Games.of("p", "x", "y", [1]))


# ------------------------------------------------------------------------------------------------------------------ Elo


def by_hand(games: Games, k: float) -> np.ndarray:
    ratings = np.full(len(games.players), 1000.0)
    for a, b, outcome in zip(games.a, games.b, games.outcome, strict=True):
        moved = k * (outcome - 1 / (1 + 10 ** ((ratings[b] - ratings[a]) / 400)))
        ratings[a] += moved
        ratings[b] -= moved
    return ratings


def test_sequential_elo_is_that_of_a_loop_and_depends_on_the_order():
    games = drawn(20, 11)
    found = tournaments.elo(games, "w", k=20)
    expected = by_hand(games, 20)
    assert list(found.values()) == pytest.approx(expected - expected[0] + 1000)
    other = tournaments.elo(games.take(np.arange(len(games))[::-1]), "w", k=20)
    assert abs(other["z"] - found["z"]) > 1
    spread = tournaments.elo_orders(games, "w", n_orders=40, seed=2)
    assert spread.shape == (40, 4) and (spread[:, 0] == 1000).all() and spread[:, 1:].std(0).min() > 5
    assert (spread == tournaments.elo_orders(games, "w", n_orders=40, seed=2)).all()


# ---------------------------------------------------------------------------------------------------------------- games


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"players": ("x", "x")}, "each once"),
        ({"a": np.array([0, 2])}, "a reaches from 0 to 2"),
        ({"b": np.array([0, 0])}, "game 0 has one player in both slots"),
        ({"outcome": np.array([1, 0.4])}, "outcome 0.4 is none of 1"),
        ({"outcome": np.array([1, np.nan])}, "leave out unparsed"),
        ({"prompts": np.array([0])}, "lengths \\[1, 2, 2, 2\\]"),
    ],
)
def test_games_that_are_none_are_refused(change, said):
    fields = {"players": ("x", "y"), "prompts": np.array([0, 1]), "a": np.array([0, 0]), "b": np.array([1, 1])}
    with pytest.raises(ValueError, match=said):
        Games(**fields | {"outcome": np.array([1.0, 0.0])} | change)


def test_games_are_made_from_names_and_lose_a_player():
    with pytest.raises(ValueError, match="'z' is none of the players x, y"):
        Games.of("p", "x", "z", [1], ["x", "y"])
    left = GAMES.without("x")
    assert left.players == ("y", "z") and len(left) == 1 and left.outcome.tolist() == [0.5]
    assert GAMES.decided.tolist() == [True, False, True, True, True]
    assert GAMES.take([4, 0]).prompts.tolist() == [1, 0]
