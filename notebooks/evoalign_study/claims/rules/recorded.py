"""Rules on numbers found in the records: "estimator_bounds", "ledger_bounds", "kl_bounds" and "memory".

The first three compare means of such numbers with given values. "memory" estimates how many times less memory one
method needs than others, by a formula that is checked against real steps. A record of kind "memory" has the bytes of
each step, counted while it ran, next to those given by the formula, and what the formula gives for published models.
The claim is about the published models. None of these numbers is random: there is no seed, and an interval shows how
far the formula missed a step, in either direction on either side of the ratio. The rule favours no arm, since nothing
is learned: a null arm needs as many bytes as the arm that it replaces.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from numbers import Real

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.checks import require
from evoalign_study.claims import checks
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, Undecided, hold, significant
from evoalign_study.claims.rules.rule import Asks, Rule
from evoalign_study.claims.selection import Case, Claim, Record, Runs, cells

QUANTITIES: dict[str, Callable[[Record], float]] = {
    "absolute_cosine": lambda r: abs(r["estimator"]["cosine"]),
    "aligned_over_orthogonal_gain": lambda r: r["estimator"]["gain_aligned"] - abs(r["estimator"]["gain_orthogonal"]),
    "replay_error": lambda r: r["ledger"]["replay_error"],
    "ledger_bytes_a_step": lambda r: r["ledger"]["bytes"] / r["spec"]["steps"],
    "gzipped_bytes_a_step": lambda r: r["ledger"]["gzip_bytes"] / r["spec"]["steps"],
    "k2_relative_bias": lambda r: r["kl"]["k2_token_bias"] / r["kl"]["exact_token_mean"],
    "k1_over_k3_std": lambda r: r["kl"]["k1_token_std"] / r["kl"]["k3_token_std"],
    "k3_gradient_cosine": lambda r: r["kl"]["k3_gradient_token_cosine"],
    "largest_in_vectors": lambda r: r["audit"]["largest_in_vectors"],
    "mean_over_none": lambda r: r["estimator"]["mean_over_none"],
    "mean_over_pairs": lambda r: r["estimator"]["mean_over_pairs"],
    "rank_excess_over_formula": lambda r: r["estimator"]["excess_over_formula"],
}
"""Numbers that a rule may read from a record, computed from its `audit`, `estimator`, `ledger` or `kl` block."""


def _find_means(case: Case) -> list[Finding]:
    """Compare, in each cell, the means of recorded quantities with the values they should lie below or above."""
    return [
        hold(f"{cell} {name}".strip(), arms, partial(_mean, case, name), bound=float(bound), side=side)
        for cell, where in cells(case.claim)
        for arms in [[*case.select(["treatment"], where).values()]]
        for side in ("below", "above")
        for name, bound in case.rule.get(side, {}).items()
    ]


def _mean(case: Case, name: str, arms: Sequence[Runs]) -> Measured:
    values = [QUANTITIES[name](record) for record in arms[0].records]
    interval = stats.bootstrap_mean(values, n_resamples=case.evidence.resamples)
    return interval, significant(interval), f"(n = {interval.n})"


_BOUNDS = checks.some(QUANTITIES, Real)
BOUNDS = Rule(_find_means, lambda arm: {"below?": _BOUNDS, "above?": _BOUNDS}, arms=("treatment",))


# ---- memory


def _find_memory(case: Case) -> Iterator[Finding]:
    """Estimate, for each size, the ratio of every method's bytes to those of the method that should need less."""
    rule, (low, high) = case.rule, case.rule["between"]
    chosen = case.select([rule["of"], *rule["against"]])
    error = max((_error(record) for runs in chosen.values() for record in runs.records), default=0.0)
    for more, size in product(rule["against"], rule["sizes"]):
        pair, label = [chosen[more], chosen[rule["of"]]], f"{more} over {rule['of']} at {size}".replace("_", " ")
        n = min(sum(len(record["cells"]) for record in runs.records) for runs in pair)
        for bound, side in ((low, "above"), (high, "below")):
            measure, have = partial(_ratio, size, error, rule["error"], n), f"{label}: {n} measured steps"
            yield hold(f"{label}, {side} {bound:g}", pair, measure, n=n, have=have, bound=bound, side=side)


def _ratio(size: str, error: float, most: float, n: int, pair: Sequence[Runs]) -> Measured:
    """Return the ratio by the formula. Raises Undecided if the formula misses a step by more than `most`."""
    more, less = (_published(runs, size) for runs in pair)
    ratio, spread = more / less, (1 + error) / (1 - error)
    if error > most:
        missed = f"the formula misses a step by {100 * error:.1f} %, at most {100 * most:g} % is asked"
        raise Undecided(f"{ratio:.3g} by the formula; not decided: {missed}")
    interval = Interval(ratio, ratio / spread, ratio * spread, n)
    return interval, significant(interval), f"(formula within {100 * error:.1f} % of every step, n = {n})"


def _published(runs: Runs, size: str) -> float:
    """Return the bytes that the formula gives. Raises ValueError if records of one method disagree."""
    given = {sum(record["published"][size]["bytes"].values()) for record in runs.records}
    why = f"records of one method give {sorted(given)} bytes for {size}: make them again with one formula"
    require(len(given) == 1, why)
    return given.pop()


def _error(record: Record) -> float:
    """Return the largest error of the formula over a record's steps, as a share of the measured bytes."""
    totals = [[sum(cell[part].values()) for part in ("predicted", "measured")] for cell in record["cells"].values()]
    return max(abs(predicted / measured - 1) for predicted, measured in totals)


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    return {"of": arm, "against": [arm], "between": [Real], "sizes": [str], "error": Real}


def _asks(claim: Claim) -> Asks:
    rule = claim["rule"]
    between, error = rule["between"], rule["error"]
    rising = len(between) == 2 and 0 < between[0] < between[1]
    yield rising, f"between {between}: declare two ratios above 0, the lower ratio first"
    yield 0 < error < 1, f"error {error}: declare a share between 0 and 1"
    yield rule["against"] and rule["sizes"], "declare at least one method in 'against' and one model in 'sizes'"


MEMORY = Rule(_find_memory, _schema, asks=_asks)
