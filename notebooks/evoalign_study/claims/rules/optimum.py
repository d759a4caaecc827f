"""Rule "optimum": at which level of a setting, such as the population, the fewest completions get to a target.

Levels are the cells of the claim. The target is a share of the best mean greedy validation accuracy over the ends of
all levels. Each run's completions to it are read from its curve, between points linearly in the logarithm of
completions; a run that never gets there counts with all that it drew, which flatters its level. A quadratic is fitted
to their logarithm over the logarithm of the level, both to base 2; its minimum within the levels tried is the optimum
(at an edge, where the parabola has none inside). The interval is that of a bootstrap over the seeds of each level.

The claim says between which levels the optimum lies. It must have been learned, too: all runs together gain more than
`gain` in greedy validation accuracy from their first point.
"""

from __future__ import annotations

from numbers import Real

import numpy as np

from evoalign_lib.analysis import curves, stats
from evoalign_lib.analysis.arrays import require
from evoalign_study.claims.findings import Finding
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.run_scores import curve
from evoalign_study.claims.selection import Claim, Evidence, cells, check_one_base


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find the optimum, and what was learned."""
    rule = claim["rule"]
    selected = [(where, evidence.select(claim, "searched", where)) for _, where in cells(claim)]
    groups = [found.records for _, found in selected]
    if evidence.null:
        groups = [evidence.stand_in([records], claim["unit"], apart=("curve_points",)).records for records in groups]
        groups = [records for records in groups if records]
    sizes = list(map(len, groups))
    n, have = min(sizes, default=0), ", ".join(found.have for _, found in selected)
    if not n:
        return [] if evidence.null else [Finding("optimum", 0, have, None)]
    check_one_base("all levels", [record for records in groups for record in records])
    scores = [[curve(record, "validation_greedy") for record in records] for records in groups]
    gains = [np.array([score[-1] - score[0] for score in level]) for level in scores]
    gain = stats.stratified_bootstrap(gains, n_resamples=evidence.resamples)
    learned = Finding(
        "gain", n, have, gain, float(rule["gain"]), value=f"{gain.format()} points", context=f"(n = {n} a level)"
    )
    if evidence.null:
        return [learned]
    levels = np.array([next(iter(where.values())) for where, _ in selected], float)
    target = rule["share"] * max(np.mean([score[-1] for score in level]) for level in scores)
    spent = [[record["curve"]["completions"] for record in records] for records in groups]
    needed = [
        np.array([curves.spent_until(*each, target) for each in zip(*level, strict=True)])
        for level in zip(spent, scores, strict=True)
    ]
    interval = curves.minimum_interval(levels, needed, evidence.resamples)
    never = sum(score.max() < target for level in scores for score in level)
    context = f"(target {100 * target:.1f} %, n = {n} a level, {never} of {sum(sizes)} runs never get there)"
    value = f"{interval.value:.0f} [{interval.low:.0f}, {interval.high:.0f}]"
    least, most = rule["between"]
    return [
        Finding(f"optimum above {least:g}", n, have, interval, float(least), value=value, context=context),
        Finding(f"optimum below {most:g}", n, have, interval, float(most), "below", value=value, context=f"(n = {n})"),
        learned,
    ]


def _check(claim: Claim) -> None:
    name, rule = f"claim {claim['id']}", claim["rule"]
    levels = [value for values in claim.get("cells", {}).values() for value in values]
    require(len(levels) > 2, f"{name}: cells {levels}: a quadratic needs three levels at least.")
    share, (least, most) = rule["share"], rule["between"]
    well = 0 < share <= 1 and least < most
    require(well, f"{name}: share={share} must lie in (0, 1], and between={[least, most]} must rise.")


_SCHEMA = {"share": Real, "between": [Real], "gain": Real}
OPTIMUM = Rule(_find, lambda arm: _SCHEMA, arms=("searched",), check=_check, favours=lambda claim: ("searched",))
