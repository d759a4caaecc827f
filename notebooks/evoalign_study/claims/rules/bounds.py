"""Rules "estimator_bounds", "ledger_bounds" and "kl_bounds": numbers of the records against given values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Real

from evoalign_lib.analysis import stats
from evoalign_study.claims import checks
from evoalign_study.claims.findings import Finding, Measured, hold
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import Claim, Evidence, Record, cells

QUANTITIES: dict[str, Callable[[Record], float]] = {
    "absolute_cosine": lambda r: abs(r["estimator"]["cosine"]),
    "aligned_over_orthogonal_gain": lambda r: r["estimator"]["gain_aligned"] - abs(r["estimator"]["gain_orthogonal"]),
    "replay_error": lambda r: r["ledger"]["replay_error"],
    "ledger_bytes_a_step": lambda r: r["ledger"]["bytes"] / r["spec"]["steps"],
    "gzipped_bytes_a_step": lambda r: r["ledger"]["gzip_bytes"] / r["spec"]["steps"],
    "k2_relative_bias": lambda r: r["kl"]["k2_token_bias"] / r["kl"]["exact_token_mean"],
    "k1_over_k3_std": lambda r: r["kl"]["k1_token_std"] / r["kl"]["k3_token_std"],
    "k3_gradient_cosine": lambda r: r["kl"]["k3_gradient_token_cosine"],
}
"""What a rule may ask of a record: numbers computed from its `estimator`, `ledger` or `kl` block."""
_SIDES = ("below", "above")


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find, in each cell, the means of record quantities that should lie below or above given values."""
    findings = []
    for cell, where in cells(claim):
        selected, number, lacks = evidence.select(claim, "treatment", where)
        for side in _SIDES:
            for name, bound in claim["rule"].get(side, {}).items():
                label = f"{cell} {name}".strip()
                have, measure = f"{label.replace('_', ' ')}: {number}", partial(_mean, selected, name, evidence)
                kept = {"bound": float(bound), "side": side, "lacks": lacks}
                findings.append(hold(label, len(selected), have, measure, **kept))
    return findings


def _mean(records: list[Record], name: str, evidence: Evidence) -> Measured:
    try:
        values = [QUANTITIES[name](record) for record in records]
    except KeyError as error:
        raise ValueError(f"a record has no {error}, from which {name!r} is computed") from error
    interval = stats.bootstrap_mean(values, n_resamples=evidence.resamples)
    value, low, high = (f"{end:.3g}" for end in (interval.value, interval.low, interval.high))
    return interval, f"{value} [{low}, {high}]", f"(n = {interval.n})"


_BOUNDS = checks.some(QUANTITIES, Real)
BOUNDS = Rule(_find, lambda arm: {"below": _BOUNDS, "above?": _BOUNDS}, arms=("treatment",))
