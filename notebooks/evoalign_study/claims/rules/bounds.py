"""Rules "estimator_bounds", "ledger_bounds" and "kl_bounds": numbers of the records against given values."""

from __future__ import annotations

from collections.abc import Callable

from evoalign_lib.analysis import stats
from evoalign_study.claims.checks import check_keys
from evoalign_study.claims.findings import Finding
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


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find, in each cell, the means of record quantities that should lie below or above given values."""
    rule = claim["rule"]
    bounds = [(name, value, "below") for name, value in rule["below"].items()]
    bounds += [(name, value, "above") for name, value in rule.get("above", {}).items()]
    findings = []
    for cell, where in cells(claim):
        selected, number, lacks = evidence.select(claim, "treatment", where)
        for name, bound, side in bounds:
            label = f"{cell} {name}".strip()
            have = f"{label.replace('_', ' ')}: {number}"
            if not selected:
                findings.append(Finding(label, 0, have, None, lacks=lacks))
                continue
            try:
                values = [QUANTITIES[name](record) for record in selected]
            except KeyError as error:
                raise ValueError(f"a record has no {error}, from which {name!r} is computed") from error
            interval = stats.bootstrap_mean(values, n_resamples=evidence.resamples)
            low, high = (f"{end:.3g}" for end in (interval.low, interval.high))
            value, context = f"{interval.value:.3g} [{low}, {high}]", f"(n = {interval.n})"
            findings.append(
                Finding(label, interval.n, have, interval, float(bound), side, value=value, context=context)
            )
    return findings


def _check(claim: Claim) -> None:
    for side in ("below", "above"):
        check_keys(f"claim {claim['id']}, {side}", claim["rule"].get(side, {}), (), tuple(QUANTITIES))


ESTIMATOR = Rule(_find, ("below", "above"), arms=("treatment",), check=_check)
LEDGER = Rule(_find, ("below",), arms=("treatment",), check=_check)
KL = Rule(_find, ("below", "above"), arms=("treatment",), check=_check)
