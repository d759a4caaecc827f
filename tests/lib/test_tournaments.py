"""Pairwise games: strengths are the most likely ones, whatever order and sides; intervals resample whole prompts."""

from itertools import combinations

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
    rng, pairs, s = np.random.default_rng(seed), list(combinations(range(4), 2)), np.array(strengths)
    a, b = rng.permuted(np.tile(pairs, (n_prompts, 1)), axis=1).T
    wins = rng.random(len(a)) < 1 / (1 + np.exp(s[b] - s[a]))
    outcome = np.where(rng.random(len(a)) < ties, 0.5, wins)
    return Games(PLAYERS, np.repeat(np.arange(n_prompts), len(pairs)), a, b, outcome)


def most_likely(games: Games, covariate=None) -> np.ndarray:
    """Strengths, above the first player's, by direct maximisation of the likelihood; last the coefficient, if any."""
    extra = np.zeros(len(games)) if covariate is None else np.asarray(covariate)

    def loss(free):
        s = np.concatenate([[0.0], free[:3]])
        logit = s[games.a] - s[games.b] + (free[3] if covariate is not None else 0) * extra
        return (games.outcome * np.logaddexp(0, -logit) + (1 - games.outcome) * np.logaddexp(0, logit)).sum()

    return SCALE * minimize(loss, np.zeros(3 + (covariate is not None)), tol=1e-12).x


# ------------------------------------------------------------------------------------------------------------ strengths


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
    swapped = Games(PLAYERS, games.prompts, games.b, games.a, 1 - games.outcome)
    for same in (swapped, games.take(order)):
        assert tournaments.bradley_terry(same, "w", n_resamples=0).values == pytest.approx(found, abs=1e-4)
    other = tournaments.bradley_terry(games, "z", n_resamples=0).values
    assert other == pytest.approx(found - found[3], abs=1e-4) and other[3] == 0


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


def test_players_without_finite_strengths_are_refused():
    always = Games.of(range(3), ["x", "x", "y"], ["y", "z", "z"], [1, 1, 0.5])
    for strengths in (lambda: tournaments.adjusted(always, "y", {}), lambda: tournaments.bradley_terry(always, "y")):
        with pytest.raises(ValueError, match="won, or lost, every game"):
            strengths()
    # one lost game makes them finite; but most resamples lack it
    rare = Games.of(range(8), ["x"] * 8, ["y"] * 8, [1, 1, 1, 1, 1, 1, 1, 0])
    assert tournaments.bradley_terry(rare, "y", n_resamples=0).values[0] == pytest.approx(400 * np.log10(7), abs=1e-6)
    with pytest.raises(ValueError, match="of 200 resamples have no finite strengths"):
        tournaments.bradley_terry(rare, "y", n_resamples=200)


# ----------------------------------------------------------------------------------------------------------- covariates


def test_a_covariate_is_part_of_the_likelihood_and_prompts_are_its_clusters():
    games = drawn(30, 9, ties=0.4)
    longer = np.random.default_rng(9).normal(size=len(games))
    found = tournaments.adjusted(games, "w", {"length": longer})
    assert found.values[1:] == pytest.approx(most_likely(games, longer), abs=5e-2)
    copies = tournaments.adjusted(games.take(np.tile(np.arange(len(games)), 4)), "w", {"length": np.tile(longer, 4)})
    assert copies.covariance[1:, 1:] == pytest.approx(found.covariance[1:, 1:], rel=0.05)
    assert not found.covariance[0].any()
    assert found.difference("z", "y").value == pytest.approx(found.values[3] - found.values[2])


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
