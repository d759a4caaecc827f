"""Decide the verdict on one claim from its findings."""

from collections.abc import Sequence
from itertools import product

from evoalign_lib.analysis import stats
from evoalign_study.claims.findings import Finding


def decide(
    findings: Sequence[Finding],
    margin: float,
    min_seeds: int,
    correction: tuple[float, int] | None = None,
    elsewhere: Sequence[Finding] = (),
) -> tuple[str, str]:
    """Return the verdict and, if it needs one, the reason.

    Each finding has an excess: how far its quantity lies beyond the bound in the claimed direction. The 95 % interval
    of the excess decides: entirely above the margin, the finding is supported; entirely within +-margin (if there is
    a margin), it is within margin; entirely below the margin, it is contradicted; otherwise it is underpowered. If the
    claim says that two arms match, the 90 % interval (two one-sided tests at 5 %) decides: entirely inside +-margin is
    supported, entirely outside contradicted, anything else underpowered. A finding is also underpowered if it has too
    few units, or only one, or if its quantity is not defined on its runs.

    One contradicted finding contradicts the claim, if its p-value is below 0.05 after Holm's correction over all
    findings that decide. The claim is supported only if all findings are, which needs no correction. It is open if no
    cell has runs of all arms. It depends on decoding if a comparison has opposite signs under two decodings and both
    intervals exclude 0.

    elsewhere: the same comparisons under decodings that the claim does not declare; used only for that last check.
    correction: a primary claim's p-value after Holm's correction, and the number of claims in its family; a claim that
    would be supported is underpowered unless that p-value is below 0.05.
    """
    findings = [finding for finding in findings if finding.decisive]
    if all(finding.n == 0 for finding in findings):
        lacking = dict.fromkeys(finding.lacks for finding in findings if finding.lacks)
        return "open", "; ".join(["nothing to compare yet", *lacking])
    few = [finding for finding in findings if finding.n < min_seeds]
    if few:
        return "underpowered", f"needs {min_seeds} a cell, has " + "; ".join(finding.have for finding in few)
    turned = dict.fromkeys(
        one.compared
        for one, other in product(findings, (*findings, *elsewhere))
        if one.compared and one.compared == other.compared and one.sign() * other.sign() < 0
    )
    if turned:
        return "depends on decoding", f"the order of the arms changes with the decoding: {'; '.join(turned)}"
    outcomes = {finding.label: outcome(finding, margin) for finding in findings}
    by_chance = {label for label, each in outcomes.items() if each == "contradicted"}
    by_chance -= {finding.label for finding in contradicting(findings, margin)}
    outcomes |= dict.fromkeys(by_chance, "underpowered")
    for name in ("contradicted", "underpowered", "within margin"):
        labels = [label for label, each in outcomes.items() if each == name]
        if labels:
            reason = "the interval does not decide" if name == "underpowered" else name
            if name == "underpowered" and by_chance:
                labels[-1] += f"; Holm's correction over {len(findings)} comparisons leaves none contradicted"
            return name, f"{reason} on {', '.join(labels)}" if len(findings) > 1 else ""
    if correction and correction[0] >= 0.05:
        p, claims = correction
        return "underpowered", f"supported by itself, but p = {p:.2g} after Holm's correction, family of {claims}"
    return "supported", ""


def outcome(finding: Finding, margin: float) -> str:
    """Return the verdict that one finding would give on its own."""
    if finding.interval is None:
        return "underpowered"
    _, low, high = finding.excess()
    if finding.side == "within":
        if -margin < low and high < margin:
            return "supported"
        return "contradicted" if high <= -margin or margin <= low else "underpowered"
    if low > margin:
        return "supported"
    if margin > 0 and -margin <= low and high <= margin:
        return "within margin"
    return "contradicted" if high < margin else "underpowered"


def contradicting(findings: Sequence[Finding], margin: float) -> list[Finding]:
    """Return the decisive findings that contradict their claim, after Holm's correction over all decisive ones."""
    decisive = [finding for finding in findings if finding.decisive]
    p = stats.holm({str(i): finding.p_against(margin) for i, finding in enumerate(decisive)}).values()
    against = [finding for finding, each in zip(decisive, p, strict=True) if len(decisive) == 1 or each < 0.05]
    return [finding for finding in against if outcome(finding, margin) == "contradicted"]


def p_value(findings: Sequence[Finding], margin: float, min_seeds: int) -> float | None:
    """Return the p-value of a claim, the largest among its findings; None unless all of them can be judged."""
    decisive = [finding for finding in findings if finding.decisive]
    if not decisive or any(f.interval is None or f.n < min_seeds for f in decisive):
        return None
    return max(finding.p(margin) for finding in decisive)


def nearness(finding: Finding, margin: float) -> tuple[int, float, float]:
    """Return a sort key that puts the finding with the strongest evidence against a claim first."""
    order = ("contradicted", "underpowered", "within margin", "supported").index(outcome(finding, margin))
    return (order, -1.0, 0.0) if finding.interval is None else (order, -finding.p(margin), finding.excess()[1])
