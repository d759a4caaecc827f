"""Pairwise games: the strength of players by a judge's verdicts, and what else would predict the verdicts.

A game is a prompt, the answers of two players in slots A and B, and an outcome. The games of one prompt share its
difficulty and its answers, so intervals come from resampling whole *prompts*, with all games of a prompt together.

Strengths follow Bradley and Terry: i beats j with probability 1 / (1 + 10^((s_j - s_i) / 400)), on the scale of Elo
ratings, relative to a named anchor at 0; a tie is half a win for each. They do not depend on the order of the games.
Sequential Elo ratings do; they are included to reproduce published ones, and to show how much the order alone matters.

Sources: Bradley and Terry, Biometrika 1952; Elo, The Rating of Chessplayers, 1978; the length covariate is that of the
style control of Chatbot Arena and arena-hard-auto.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, log, log2
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis.arrays import array
from evoalign_lib.analysis.stats import Interval, interval_of, resample_counts
from evoalign_lib.checks import require

SCALE = 400 / log(10)
"""Elo points per unit of log-odds."""
A_WINS, TIE, B_WINS = 1.0, 0.5, 0.0
"""Outcomes: the score of slot A."""

_INFINITE = "some players won, or lost, every game against the others, so strengths are infinite: add more prompts"
_RESAMPLES = 2_000
_MOST_LOG_ODDS = 50  # a larger coefficient is diverging
_MOST_UNDEFINED = 0.05  # with a larger share of resamples without strengths, the interval would not be valid


@dataclass(frozen=True)
class Games:
    """Games between several players, with one entry of each array per game."""

    players: tuple[str, ...]
    """Names, each once; at least two."""
    prompts: NDArray[np.int64]
    """(games,) number of the prompt that was answered: 0, 1, ... without gaps."""
    a: NDArray[np.int64]
    """(games,) index in `players` of the player in slot A."""
    b: NDArray[np.int64]
    """(games,) the same for slot B; a different player."""
    outcome: NDArray[np.float64]
    """(games,) score of slot A: `A_WINS`, `TIE` or `B_WINS`."""

    def __post_init__(self) -> None:
        n, lengths = len(self.players), [len(x) for x in (self.prompts, self.a, self.b, self.outcome)]
        require(len(set(self.players)) == n > 1, f"players are {self.players}: pass at least two, each once")
        one = len(set(lengths)) == 1 and lengths[0] > 0
        require(one, f"prompts, a, b and outcome have lengths {lengths}: pass one entry per game, at least one game")
        for name, values in (("a", self.a), ("b", self.b)):
            array(name, values, low=0, high=n - 1, why="positions in the list of players")
        alone = np.flatnonzero(self.a == self.b)
        require(not len(alone), f"games {alone[:3]} have the same player in both slots: leave them out")
        bad = self.outcome[~np.isin(self.outcome, (A_WINS, TIE, B_WINS))]
        require(not len(bad), f"outcomes {bad[:3]} are not 1 (A wins), 0.5 (tie) or 0 (B wins): leave these games out")

    @classmethod
    def of(
        cls,
        prompts: Sequence[Any],
        a: Sequence[str],
        b: Sequence[str],
        outcome: ArrayLike,
        players: Sequence[str] | None = None,
    ) -> Games:
        """Make games from names.

        Args:
            prompts: (games,) prompts, as text or any other key.
            a, b: (games,) the players in slots A and B.
            outcome: (games,) score of slot A.
            players: all names in the desired order; sorted by default.

        Raises:
            ValueError: a name that is not among the players, or arguments that `Games` rejects.

        >>> Games.of(["q", "q"], ["x", "y"], ["y", "z"], [1, 0.5]).players
        ('x', 'y', 'z')
        """
        names = tuple(sorted({*a, *b}) if players is None else players)
        strange = sorted({*a, *b} - set(names))
        require(not strange, f"{strange} are not among the players: use the names {', '.join(names)}")
        columns = (dict.fromkeys(prompts), prompts), (names, a), (names, b)
        places = [({key: i for i, key in enumerate(known)}, keys) for known, keys in columns]
        codes = (np.array([place[key] for key in keys], np.int64) for place, keys in places)
        return cls(names, *codes, np.asarray(outcome, np.float64))

    def __len__(self) -> int:
        return len(self.outcome)

    def take(self, chosen: ArrayLike) -> Games:
        """Return the chosen games (a mask or indices), in that order, with renumbered prompts."""
        rows = np.asarray(chosen)
        _, prompts = np.unique(self.prompts[rows], return_inverse=True)
        return Games(self.players, prompts.astype(np.int64), self.a[rows], self.b[rows], self.outcome[rows])

    @property
    def decided(self) -> NDArray[np.bool_]:
        """(games,) whether a game has a winner."""
        return self.outcome != TIE

    @property
    def design(self) -> NDArray[np.float64]:
        """(games, players) 1 for the player in slot A, -1 for the player in slot B."""
        one = np.eye(len(self.players))
        return one[self.a] - one[self.b]


# ----------------------------------------------------------------------------------------------------------- strengths


class Strengths(NamedTuple):
    """Bradley-Terry strengths, with resamples over prompts, in Elo points above the anchor."""

    players: tuple[str, ...]
    """Names, in the order of the columns."""
    anchor: str
    """The player whose strength is 0 in every resample."""
    values: NDArray[np.float64]
    """(players,) the estimates."""
    draws: NDArray[np.float64]
    """(resamples with finite strengths, players)."""
    prompts: int
    """Number of prompts that were resampled."""
    undefined: int
    """Number of resamples left out because a player, or a group of players, won or lost every game in them."""

    def interval(self, player: str, level: float = 0.95) -> Interval:
        """Return a player's strength with its percentile interval. Raises ValueError for an unknown player."""
        return self.difference(player, self.anchor, level)

    def difference(self, player: str, other: str, level: float = 0.95) -> Interval:
        """Return a player's strength minus another's, with the percentile interval of the difference.

        Use this to judge a difference: it may be established even if the two players' intervals overlap.
        """
        i, j = (_index(self.players, name) for name in (player, other))
        draws = self.draws[:, i] - self.draws[:, j]
        return _interval(self.values[i] - self.values[j], draws, self.prompts, level)

    def first(self) -> dict[str, float]:
        """Return player -> share of resamples in which the player is the strongest."""
        best = np.bincount(self.draws.argmax(1), minlength=len(self.players)) / len(self.draws)
        return dict(zip(self.players, best.tolist(), strict=True))


def bradley_terry(games: Games, anchor: str, *, n_resamples: int = _RESAMPLES, seed: int = 0) -> Strengths:
    """Return the strengths of all players by maximum likelihood (evalica), with a bootstrap over prompts.

    Args:
        games: all games; a tie is half a win for each player.
        anchor: the player whose strength is 0.
        n_resamples: resamples of the prompts.
        seed: seed of the resamples; the same seed draws the same prompts for all games on the same prompts.

    Raises:
        ValueError: an unknown anchor; players of whom some won or lost every game against the others, so that the
            likelihood has no maximum at finite strengths; or more than 5 % of such resamples.

    >>> games = Games.of(range(4), ["x"] * 4, ["y"] * 4, [1, 1, 1, 0])
    >>> round(float(bradley_terry(games, "y", n_resamples=0).values[0]), 1)  # 400 log10(3)
    190.8
    """
    at = _index(games.players, anchor)
    rows, counted = np.unique(np.column_stack([games.a, games.b, games.outcome]), axis=0, return_inverse=True)
    a, b = rows[:, :2].T.astype(int)
    kinds = Games(games.players, np.arange(len(rows)), a, b, rows[:, 2])
    # how often each kind of game occurs in each prompt: a resample of prompts then gives a weight to each kind
    table = np.zeros((games.prompts.max() + 1, len(kinds)))
    np.add.at(table, (games.prompts, counted.ravel()), 1)
    weights = np.vstack([table.sum(0), _prompt_counts(games, n_resamples, seed) @ table])
    defined = _connected(kinds, weights)
    require(defined[0], _INFINITE)
    undefined = int((~defined[1:]).sum())
    many = f"{undefined} of {n_resamples} resamples have no finite strengths: add more prompts, or report win rates"
    require(undefined <= _MOST_UNDEFINED * n_resamples, many)
    # with few prompts many resamples are the same
    distinct, which = np.unique(weights[defined], axis=0, return_inverse=True)
    found = np.array([_strengths(kinds, row) for row in distinct])[which.ravel()]
    found -= found[:, [at]]
    return Strengths(games.players, anchor, found[0], found[1:], len(table), undefined)


def _strengths(games: Games, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (players,), strengths of weighted games in Elo points, with mean 0."""
    limit = 100_000
    result = _rated("bradley_terry", games, weights=weights.tolist(), tolerance=1e-10, limit=limit)
    settled = result.iterations < limit
    require(settled, f"no strengths after {limit} iterations: some players won nearly all games, add more prompts")
    return SCALE * np.log(result.scores.sort_index().to_numpy())


def _rated(method: str, games: Games, **options: Any) -> Any:
    """Return the result of one of evalica's methods for games."""
    import evalica
    import pandas as pd

    winner = {A_WINS: evalica.Winner.X, TIE: evalica.Winner.Draw, B_WINS: evalica.Winner.Y}
    played = games.a.tolist(), games.b.tolist(), [winner[x] for x in games.outcome.tolist()]
    return getattr(evalica, method)(*played, index=pd.RangeIndex(len(games.players)), **options)


def _connected(games: Games, weights: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return (rows,), whether chains of won or tied games lead from every player to every other (Ford 1957).

    weights: (rows, games), above 0 where a game counts.
    """
    players = len(games.players)
    reach = np.tile(np.eye(players), (len(weights), 1, 1))
    for row, i, j, score in zip(weights.T, games.a, games.b, games.outcome, strict=True):
        if score > 0:
            reach[:, i, j] += row
        if score < 1:
            reach[:, j, i] += row
    for _ in range(ceil(log2(players))):
        reach = (reach @ reach > 0).astype(float)
    return (reach > 0).all((1, 2))


class Adjusted(NamedTuple):
    """Strengths with covariates held equal, in Elo points above the anchor, and the covariates' coefficients."""

    names: tuple[str, ...]
    """Players, then covariates, in the order of `values`."""
    anchor: str
    """The player whose strength is 0."""
    values: NDArray[np.float64]
    """(names,) strengths, and coefficients in Elo points per unit of their covariate."""
    covariance: NDArray[np.float64]
    """(names, names) covariance of the values, robust to correlation between the games of a prompt."""
    prompts: int
    """Number of prompts, the clusters of the covariance."""

    def interval(self, name: str, level: float = 0.95) -> Interval:
        """Return a player's strength, or the coefficient of a covariate, with its normal interval.

        Raises ValueError for an unknown name.
        """
        return self.difference(name, self.anchor, level)

    def difference(self, player: str, other: str, level: float = 0.95) -> Interval:
        """Return a player's strength minus another's, with the interval of the difference."""
        i, j = (_index(self.names, name) for name in (player, other))
        variance = self.covariance[i, i] + self.covariance[j, j] - 2 * self.covariance[i, j]
        value = float(self.values[i] - self.values[j])
        half = NormalDist().inv_cdf((1 + level) / 2) * float(np.sqrt(max(variance, 0.0)))
        return Interval(value, value - half, value + half, self.prompts, level)


def adjusted(games: Games, anchor: str, covariates: Mapping[str, ArrayLike]) -> Adjusted:
    """Return Bradley-Terry strengths by a logistic regression (statsmodels) with covariates of each game.

    The log-odds that slot A wins are s_A - s_B + the sum of coefficient x covariate. A tie enters as an outcome of one
    half, which scores like two games of half weight, one won by each side. The covariance is robust to clusters, which
    are the prompts.

    Args:
        games: all games.
        anchor: the player whose strength is 0.
        covariates: name -> (games,), positive where it favours slot A, such as `length_difference`; a row of ones is
            the advantage of slot A. Without covariates, the values are those of `bradley_terry`.

    Raises:
        ValueError: a covariate of another length, not finite, or a linear combination of the players and the other
            covariates; strengths that are not finite, as in `bradley_terry`; or a fit that does not converge.
    """
    import statsmodels.api as sm
    from statsmodels.tools.sm_exceptions import PerfectSeparationWarning

    at = _index(games.players, anchor)
    columns = [_of_games(games, f"covariate {name!r}", values) for name, values in covariates.items()]
    shared = [name for name in covariates if name in games.players]
    require(not shared, f"covariates {shared} have the names of players: rename them")
    design = np.column_stack([np.delete(games.design, at, axis=1), *columns])
    told = np.linalg.matrix_rank(design) == design.shape[1]
    require(told, f"these games cannot tell {', '.join(covariates)} from the players: leave a covariate out")
    require(_connected(games, np.ones((1, len(games))))[0], _INFINITE)
    model, settled = sm.GLM(games.outcome, design, family=sm.families.Binomial()), False
    with warnings.catch_warnings(), suppress(PerfectSeparationWarning):
        warnings.simplefilter("error", PerfectSeparationWarning)
        fit = model.fit(tol=1e-10, maxiter=200, cov_type="cluster", cov_kwds={"groups": games.prompts})
        settled = fit.converged and np.abs(fit.params).max() <= _MOST_LOG_ODDS
    require(settled, f"the fit does not converge: {', '.join(covariates)} may predict every winner. Add more games.")
    values = np.insert(SCALE * fit.params, at, 0.0)
    covariance = np.insert(np.insert(SCALE**2 * fit.cov_params(), at, 0.0, axis=0), at, 0.0, axis=1)
    return Adjusted((*games.players, *covariates), anchor, values, covariance, int(games.prompts.max()) + 1)


def length_difference(length_a: ArrayLike, length_b: ArrayLike) -> NDArray[np.float64]:
    """Return (length_a - length_b) / (length_a + length_b), -1 to 1, for each game; 0 for two empty answers.

    An answer twice as long as the other gives 1/3.

    >>> length_difference([200, 0], [100, 0]).round(3).tolist()
    [0.333, 0.0]
    """
    a, b = (array("lengths", lengths, low=0) for lengths in (length_a, length_b))
    require(a.shape == b.shape, f"lengths have shapes {a.shape} and {b.shape}: pass one of each per game")
    return (a - b) / np.maximum(a + b, 1e-300)


# ----------------------------------------------------------------------------------------------- shares with intervals


def win_rates(games: Games, *, n_resamples: int = _RESAMPLES, seed: int = 0) -> dict[str, Interval]:
    """Return player -> share of its games won, ties half, with a prompt-bootstrap interval, for all who played."""
    found = {}
    for player, side in zip(games.players, games.design.T, strict=True):
        won = (side > 0) * games.outcome + (side < 0) * (1 - games.outcome)
        if side.any():
            found[player] = _share(games, won, side != 0, n_resamples, seed)
    return found


def head_to_head(games: Games, player: str, other: str, *, n_resamples: int = _RESAMPLES, seed: int = 0) -> Interval:
    """Return the share of two players' games that the first won, ties half, with a prompt-bootstrap interval.

    Raises ValueError if they did not meet.
    """
    i, j = _index(games.players, player), _index(games.players, other)
    theirs = games.design[:, i] * games.design[:, j] < 0
    require(theirs.any(), f"{player} and {other} did not meet: compare their strengths")
    met = games.take(theirs)
    won = np.where(met.a == i, met.outcome, 1 - met.outcome)
    return _share(met, won, met.a >= 0, n_resamples, seed)


def position_effect(games: Games, *, n_resamples: int = _RESAMPLES, seed: int = 0) -> Interval:
    """Return the share of decided games that slot A won, with a prompt-bootstrap interval; 0.5 means no effect.

    Raises ValueError if all games are ties.
    """
    return _share(games, games.outcome == A_WINS, games.decided, n_resamples, seed)


def agreement(games: Games, difference: ArrayLike, *, n_resamples: int = _RESAMPLES, seed: int = 0) -> Interval:
    """Return the share of decided games won by the side that another quantity favours.

    Args:
        games: all games. The judge's ties are left out, and so are games in which the quantity favours neither side.
        difference: (games,) of the quantity, slot A minus slot B, such as the reward, minus the cost, or the length.
        n_resamples, seed: resamples and seed of the bootstrap over prompts.

    Raises:
        ValueError: another length, a number that is not finite, or nothing left to compare.

    >>> agreement(Games.of("qqr", "xxx", "yyy", [1, 0, 1]), [2.0, 1.0, 0.5], n_resamples=100).value
    0.6666666666666666
    """
    favours = _of_games(games, "difference", difference)
    counts = games.decided & (favours != 0)
    agrees = counts & ((favours > 0) == (games.outcome == A_WINS))
    return _share(games, agrees, counts, n_resamples, seed)


# ------------------------------------------------------------------------------------------------------ sequential Elo


def elo(games: Games, anchor: str, *, k: float = 32.0, initial: float = 1000.0) -> dict[str, float]:
    """Return player -> sequential Elo rating after the games in order, shifted so that the anchor has `initial`.

    The ratings depend on the order; see `elo_orders`.

    Args:
        games: games in the order in which they are played.
        anchor: the player whose rating becomes `initial`.
        k: points at stake in each game.
        initial: every player's rating at the start.

    >>> elo(Games.of([0], ["x"], ["y"], [1]), "y")
    {'x': 1032.0, 'y': 1000.0}
    """
    at = _index(games.players, anchor)
    scores = _rated("elo", games, initial=initial, k=k).scores.sort_index().to_numpy()
    return dict(zip(games.players, (scores - scores[at] + initial).tolist(), strict=True))


def elo_orders(
    games: Games, anchor: str, *, k: float = 32.0, initial: float = 1000.0, n_orders: int = 1_000, seed: int = 0
) -> NDArray[np.float64]:
    """Return (n_orders, players) Elo ratings after the same games in random orders."""
    rng = np.random.default_rng(seed)
    drawn = (games.take(rng.permutation(len(games))) for _ in range(n_orders))
    return np.array([[*elo(order, anchor, k=k, initial=initial).values()] for order in drawn])


# ------------------------------------------------------------------------------------------------------------- helpers


def _index(names: Sequence[str], name: str) -> int:
    require(name in names, f"unknown name {name!r}: use one of {', '.join(names)}")
    return names.index(name)


def _of_games(games: Games, name: str, values: ArrayLike) -> NDArray[np.float64]:
    found = array(name, values, 1)
    require(len(found) == len(games), f"{name} has {len(found)} numbers: pass {len(games)}, one per game")
    return found


def _prompt_counts(games: Games, n_resamples: int, seed: int) -> NDArray[np.float64]:
    """Return (n_resamples, prompts), how often each prompt is drawn when as many are drawn with replacement."""
    prompts = int(games.prompts.max()) + 1
    return resample_counts(np.random.default_rng(seed), n_resamples, prompts).astype(float)


def _share(games: Games, hits: NDArray, counted: NDArray[np.bool_], n_resamples: int, seed: int) -> Interval:
    """Return sum(hits) / sum(counted) over games, with the percentile interval of a bootstrap over prompts."""
    require(counted.sum(), "no game counts, since all are ties or nothing was compared: pass more games")
    sums = np.column_stack([np.bincount(games.prompts, values) for values in (hits, counted)])
    over, under = (_prompt_counts(games, n_resamples, seed) @ sums).T
    draws = over[under > 0] / under[under > 0]
    return _interval(hits.sum() / counted.sum(), draws, int((sums[:, 1] > 0).sum()), 0.95)


def _interval(value: float, draws: NDArray[np.float64], n: int, level: float) -> Interval:
    require(len(draws), "no resamples: set n_resamples to at least 1 for an interval")
    return interval_of(value, draws, n, level)
