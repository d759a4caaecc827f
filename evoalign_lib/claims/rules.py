"""What a claim's verdict rests on: the runs that it selects, and the findings that each kind of rule makes of them.

`claims` declares, judges and words; here the records become findings. A rule that compares arms ("compare", "regret",
"interaction", and "interval_above", the first form of "compare") takes a difference of accuracies over seeds and
problems, or of one score a run over seeds; "gaps" compares ends of training, hacked or clean, of runs of several
settings, and "collapse" asks of a map of settings which of them collapse; "estimator_bounds", "ledger_bounds" and
"kl_bounds" hold numbers of the records against given values; "open" is a claim without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import collapse, curves, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.arms import SWEEP, SWEEP_SEED, ranked
from evoalign_lib.records import accuracy_matrix

_Record = dict[str, Any]
_Claim = dict[str, Any]
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Finding:
    """One comparison that a claim rests on: a quantity that should lie beyond a bound, or within a margin of it."""

    label: str
    """The cell, quantity or comparison, such as "A0"."""
    n: int
    """Units in the smaller arm; 0 where an arm has no run."""
    have: str
    """The runs found, in words."""
    interval: Interval | None
    """The quantity; None without runs, and where it is not defined on them, of which `context` says why."""
    bound: float = 0.0
    """The value that the quantity is compared with."""
    side: str = "above"
    """Where the claim says that the quantity lies: "above" or "below" the bound, or "within" the margin of it."""
    test: float | None = None
    """The two-sided p-value of a test that the rule names (for "within" that of two one-sided tests); None: the
    interval's own."""
    value: str = ""
    """The quantity with its interval, in words."""
    context: str = ""
    """What the words of a verdict say of it besides: base accuracy, n, smallest detectable effect."""
    decisive: bool = True
    """Whether the verdict rests on it; otherwise it is only reported."""
    lacks: str = ""
    """The sweep that is to say which runs count, where it is not finished."""

    @property
    def text(self) -> str:
        """The quantity in words, with its context; empty without runs."""
        return f"{self.label.replace('_', ' ')} {self.value} {self.context}".strip() if self.value else ""

    def excess(self) -> tuple[float, float, float]:
        """Return how far value, low and high lie beyond the bound in the claimed direction, smallest end second."""
        value, low, high = (x - self.bound for x in (self.interval.value, self.interval.low, self.interval.high))
        return (-value, -high, -low) if self.side == "below" else (value, low, high)

    def p(self, margin: float) -> float:
        """Return the p-value that the quantity does not lie where the claim says; 1 where it points the other way.

        Two-sided, from the interval as if the estimate were normal with the spread that its end on the side of the
        bound shows: below 0.05 exactly where the 95 % interval lies beyond the margin. Or that of the rule's own test.
        """
        if self.side == "within":
            return self.test
        value, low, _ = self.excess()
        if value <= margin:
            return 1.0
        if self.test is not None:
            return self.test
        if low >= value:  # all units agree
            return 0.0
        return 2 * NormalDist().cdf(-_Z * (value - margin) / (value - low))


class _Runs(NamedTuple):
    """The runs of one arm in one cell, sorted by unit, their number in words, and what their sweep lacks."""

    records: list[_Record]
    have: str
    lacks: str = ""


# ---- selection of runs


def cells(claim: _Claim) -> list[tuple[str, dict[str, Any]]]:
    """Return the label and the spec field of every cell; one cell without field where none are declared."""
    declared = claim.get("cells", {})
    return [(str(value), {field: value}) for field, values in declared.items() for value in values] or [("", {})]


def matches(record: _Record, wanted: Mapping[str, Any]) -> bool:
    """Return whether a record's spec has these fields; None asks for a field that is absent."""
    return all(record["spec"].get(field) == value for field, value in wanted.items())


def has_runs(claim: _Claim, records: Iterable[_Record]) -> bool:
    """Return whether there is any replicate of any arm that a claim compares, whatever its setting."""
    arms = [{k: v for k, v in arm.items() if k != "setting"} for arm in claim.get("arms", {}).values()]
    wanted = [arm | where for arm in arms for _, where in cells(claim)]
    return any(claim["unit"] in r["spec"] and any(matches(r, fields) for fields in wanted) for r in records)


def _select(claim: _Claim, records: list[_Record], arm: str, where: Mapping[str, Any]) -> _Runs:
    """Return the runs of one arm in one cell; they differ in nothing but the unit."""
    wanted = claim["arms"][arm] | where
    setting = wanted.pop("setting", None)
    chosen = [r for r in records if matches(r, wanted)]
    name = wanted.get("arm", wanted.get("kind"))
    if setting and chosen:
        tuned = _tuned(records, chosen[0]["spec"], setting)
        if isinstance(tuned, str):
            return _Runs([], f"0 of {name} ({tuned})", tuned)
        chosen = [r for r in chosen if matches(r, tuned)]
    unit, context = claim["unit"], f"{arm} {wanted}"
    have = f"{len(chosen)} of {name}"
    if chosen and all(unit not in record["spec"] for record in chosen):
        if len(chosen) > 1:
            raise ValueError(f"{context}: {len(chosen)} records without {unit!r}: select one by its spec")
        return _Runs(chosen, have)
    units = [record["spec"].get(unit) for record in chosen]
    if len(set(units)) < len(units):
        raise ValueError(f"{context}: two records of one {unit} among {sorted(map(str, units))}: select by their specs")
    for record in chosen:
        differing = sorted(
            field
            for field in record["spec"].keys() | chosen[0]["spec"].keys()
            if field != unit and record["spec"].get(field) != chosen[0]["spec"].get(field)
        )
        if differing:
            raise ValueError(f"{context}: runs differ in {', '.join(differing)}: name its value in the claim's arms")
    return _Runs(sorted(chosen, key=lambda record: record["spec"][unit]), have)


def _tuned(records: list[_Record], run: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, float] | str:
    """Return the setting that won the sweep from which a run's was to be taken, or, in words, what the sweep lacks.

    The sweep: runs of ES or GRPO with the seed of sweeps and without test set, which otherwise differ from the run in
    the setting, in their length and in how often they were evaluated.
    """
    arm = "es" if run["arm"].startswith("es") else "grpo"
    base = run["base"] if setting["base"] == "own" else setting["base"]
    names = tuple(SWEEP[arm][0])
    apart = ("base_digest", "steps", "curve_points", "curve_spacing", "validation_problems", *names)
    of_sweep = {field: value for field, value in run.items() if field not in apart}
    of_sweep |= {"arm": arm, "base": base, "seed": SWEEP_SEED, "test_problems": 0}
    of_sweep |= {"unique_prompts": None, "scale_rewards": None}
    made = [record for record in records if matches(record, of_sweep)]
    found = {tuple(record["spec"][name] for name in names): record for record in made}
    sweep, best_of = f"the sweep of {arm} on {base}", setting["best_of"]
    if not len(made) == len(found) <= best_of:
        raise ValueError(
            f"{sweep} has {len(made)} runs of {len(found)} settings where {best_of} were "
            "declared, one run each: the best of more is another rule"
        )
    declared = [tuple(choice[name] for name in names) for choice in setting.get("among", {}).get(arm, ())]
    others = sorted(found.keys() - set(declared)) if declared else []
    if others:
        raise ValueError(
            f"{sweep} has {' and '.join(names)} {', '.join(map(str, others))}, which the claim "
            "does not declare among its settings: take these runs out, or declare them"
        )
    if len(made) < best_of:
        return f"{sweep} has {len(made)} of {best_of} settings"
    # in the order of the settings: of equal scores the first wins
    return ranked([found[values] for values in sorted(found)])[0][1]


def _lacking(selected: Iterable[_Runs]) -> str:
    return "; ".join(dict.fromkeys(found.lacks for found in selected if found.lacks))


def _one_base(label: str, records: Iterable[_Record]) -> None:
    digests = sorted({record["spec"]["base_digest"] for record in records})
    if len(digests) > 1:
        raise ValueError(f"{label}: runs start from different bases ({', '.join(digests)})")


# ---- scores of runs


def _scores(claim: _Claim, measure: Mapping[str, Any], arms: Sequence[Sequence[_Record]]) -> list[NDArray[np.float64]]:
    """Return one score a run of each arm, (seeds,) fractions. Raises _Undecided where the measure has no value."""
    if (matrices := _matrices(claim, measure, arms)) is not None:
        return [matrix.mean(axis=1) for matrix in matrices]
    if "hacked" in measure:
        return [np.array([collapse.end(r, measure["hacked"]) == "hacked" for r in arm], np.float64) for arm in arms]
    decoding = measure.get("validation", measure.get("drawdown"))
    validation = [_curves(arm, f"validation_{decoding}") for arm in arms]
    if "drawdown" in measure:
        return [np.array([curves.largest_drawdown(curve) for curve in arm]) for arm in validation]
    if "at_mean" in measure:
        reached = [np.mean(arm, axis=0).max() for arm in validation]
        if min(reached) < measure["at_mean"]:
            raise _Undecided(
                "an arm's mean stays below it, at most " + " and ".join(f"{100 * r:.1f} %" for r in reached)
            )
        return [curves.scores_at_mean(arm, measure["at_mean"])[1] for arm in validation]
    spent = [_curves(arm, measure["at_equal"]) for arm in arms]
    budget = min(axis[-1] for arm in spent for axis in arm)
    return [
        np.array([curves.score_at(*curve, budget) for curve in zip(axes, scores, strict=True)])
        for axes, scores in zip(spent, validation, strict=True)
    ]


def _matrices(
    claim: _Claim, measure: Mapping[str, Any], arms: Sequence[Sequence[_Record]]
) -> list[NDArray[np.float64]] | None:
    """Return right answers of each arm, (seeds, problems), or None where a measure has no results on each problem."""
    if "test" in measure:
        return [accuracy_matrix(arm, measure["test"]) for arm in arms]
    return [_right_at(claim, measure, arm) for arm in arms] if "right" in measure else None


def _right_at(claim: _Claim, measure: Mapping[str, Any], arm: Sequence[_Record]) -> NDArray[np.float64]:
    """Return the right answers on split B of each run's first point whose proxy reward, or KL, is at the level.

    Runs that never get there are censored; raises _Undecided where fewer than the claim's seeds do.
    """
    level = {name: measure[name] for name in _AT["right"] if name in measure}
    found = [collapse.right_at(record, measure["right"], **level) for record in arm]
    rows = [row for row in found if row is not None]
    if len(rows) < claim["min_seeds"]:
        raise _Undecided(f"{len(rows)} of {len(arm)} runs of an arm get there")
    return np.array(rows, np.float64)


def _curves(arm: Sequence[_Record], name: str) -> list[NDArray[np.float64]]:
    try:
        return [np.array(record["curve"][name], np.float64) for record in arm]
    except KeyError as error:
        raise ValueError(f"a record's curve has no {name!r}") from error


def _words(measure: Mapping[str, Any]) -> str:
    (kind,) = measure.keys() & _MEASURES.keys()
    text = f"{_MEASURES[kind]} {'temperature 1' if measure[kind] == 't1' else measure[kind]}"
    if "at_equal" in measure:
        text += f" at equal {measure['at_equal'].replace('_', ' ')}"
    if "right" in measure:
        text += f" at proxy {measure['at_proxy']:g}" if "at_proxy" in measure else f" at KL {measure['at_kl']:g}"
    return text + (f" at mean {100 * measure['at_mean']:g} %" if "at_mean" in measure else "")


_MEASURES = {"test": "test", "validation": "validation", "drawdown": "largest drawdown of validation"}
_MEASURES |= {"right": "right answers", "hacked": "hacked runs"}
_AT = {"validation": ("at_equal", "at_mean"), "right": ("at_proxy", "at_kl")}
"""Where a measure is taken, for those that need to say it: one of these."""
_BUDGETS = ("completions", "generated_tokens", "forward_flops", "core_seconds")


class _Undecided(Exception):
    """The runs are there, but the quantity is not defined on them; says why."""


# ---- comparisons of two arms


def _interval_above(claim: _Claim, records: list[_Record]) -> list[Finding]:
    """Find, in each cell, the mean difference of test accuracy between treatment and comparison."""
    comparison = {"measure": {"test": claim["rule"]["decoding"]}, "of": "treatment", "to": "comparison", "above": 0}
    return [_compare_arms(claim, records, comparison, where, label) for label, where in cells(claim)]


def _compare(claim: _Claim, records: list[_Record]) -> list[Finding]:
    """Find, in each cell, every declared comparison, and those that are only reported."""
    rule, findings = claim["rule"], []
    declared = _comparisons(rule)
    for cell, where in cells(claim):
        for comparison, decisive in declared:
            joint = "over" if comparison.get("by") == "spread" else "less"
            arms = f"{comparison['of']} {joint} {comparison['to']}".replace("_", " ")
            label = f"{cell} {arms}, {_words(comparison['measure'])}".strip()
            findings.append(_compare_arms(claim, records, comparison, where, label, decisive))
        if "trend" in rule:
            findings += _trend(claim, records, where)
    return findings


def _comparisons(rule: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], bool]]:
    """Return the comparisons of a rule and whether each is decisive; those only reported are held against 0."""
    reported = [(comparison | {"above": 0}, False) for comparison in rule.get("also", ())]
    return [(comparison, True) for comparison in rule.get("comparisons", ())] + reported


def _compare_arms(
    claim: _Claim,
    records: list[_Record],
    comparison: Mapping[str, Any],
    where: Mapping[str, Any],
    label: str,
    decisive: bool = True,
) -> Finding:
    """Find one comparison in one cell."""
    selected = [_select(claim, records, comparison[side], where) for side in ("of", "to")]
    arms = [found.records for found in selected]
    have = f"{label}: {', '.join(found.have for found in selected)}"
    side = next((side for side in ("above", "below") if side in comparison), "within")
    kept = {"bound": float(comparison.get(side, 0)), "side": side, "decisive": decisive}
    if not all(arms):
        return Finding(label, 0, have, None, lacks=_lacking(selected), **kept)
    _one_base(label, arms[0] + arms[1])
    fixed = _is_fixed(claim, arms[1])
    n = len(arms[0]) if fixed else min(map(len, arms))
    counts = f"n = {n}" if fixed or len(arms[0]) == len(arms[1]) else f"n = {len(arms[0])} v {len(arms[1])}"
    try:
        interval, test, value, context = _COMPARED[comparison.get("by", "difference")](claim, comparison, arms)
    except _Undecided as error:
        return Finding(label, n, have, None, value="not defined", context=f"({error})", **kept)
    return Finding(label, n, have, interval, test=test, value=value, context=context.format(n=counts), **kept)


_Compared = tuple[Interval, float | None, str, str]
"""The interval, the p-value of the rule's own test or None, and value and context in words, {n} for the counts."""


def _is_fixed(claim: _Claim, arm: list[_Record]) -> bool:
    """Return whether an arm is one model without seed, which moves with the problems alone and needs no replicates."""
    return claim["unit"] not in arm[0]["spec"]


def _difference(claim: _Claim, comparison: Mapping[str, Any], arms: list[list[_Record]]) -> _Compared:
    """Compare means: over seeds and problems where there are results on each problem, otherwise over seeds."""
    measure = comparison["measure"]
    scores = _scores(claim, measure, arms)
    if (matrices := _matrices(claim, measure, arms)) is not None:
        matrix, baseline = matrices
        interval = stats.crossed_bootstrap(matrix, baseline[0] if _is_fixed(claim, arms[1]) else baseline)
    else:
        interval = _defined(stats.stratified_bootstrap, [scores[0]], [scores[1]])
    test = _defined(stats.mann_whitney, *scores) if comparison.get("p") == "mann_whitney" else None
    context = _context(interval, scores[1], measure)
    if "right" in measure:
        context = f"{context[:-1]}, {len(scores[0])} v {len(scores[1])} get there)"
    return interval, test, f"{interval.format()} points", context


def _rate(claim: _Claim, comparison: Mapping[str, Any], arms: list[list[_Record]]) -> _Compared:
    """Compare shares of runs: their difference with Newcombe's interval, and Fisher's test."""
    counts = [(int(values.sum()), len(values)) for values in _scores(claim, comparison["measure"], arms)]
    interval = stats.rate_difference(*counts[0], *counts[1])
    of, to = (f"{hits} of {n}" for hits, n in counts)
    context = f"from {to} to {of} ({{n}}, detectable {100 * interval.detectable():.0f})"
    return interval, stats.fisher(*counts[0], *counts[1]), f"{interval.format()} points", context


def _equivalence(claim: _Claim, comparison: Mapping[str, Any], arms: list[list[_Record]]) -> _Compared:
    """Compare means by two one-sided tests, within the margin of the claim; seeds and problems as in `_difference`."""
    measure = comparison["measure"]
    scores = _scores(claim, measure, arms)
    if (matrices := _matrices(claim, measure, arms)) is not None:
        found = _defined(stats.equivalence, *matrices, claim["margin"])
    else:
        found = _defined(stats.welch_equivalence, *scores, claim["margin"])
    value = f"{found.interval.format()} points (90 % interval)"
    if abs(found.interval.value) >= claim["margin"]:
        value += f", {comparison['of' if found.interval.value > 0 else 'to']} ahead"
    return found.interval, found.p, value, _context(found.interval, scores[1], measure)


def _spread(claim: _Claim, comparison: Mapping[str, Any], arms: list[list[_Record]]) -> _Compared:
    """Compare standard deviations over seeds: the logarithm of their ratio."""
    scores = _scores(claim, comparison["measure"], arms)
    interval = _defined(stats.log_std_ratio, *scores)
    ratio, low, high = (f"{exp(x):.2f}" for x in (interval.value, interval.low, interval.high))
    of, to = (f"{100 * values.std(ddof=1):.2f}" for values in scores)
    context = f"from {to} to {of} points ({{n}}, detectable {exp(-interval.detectable()):.2f})"
    return interval, None, f"{ratio} [{low}, {high}]", context


_COMPARED = {"difference": _difference, "equivalence": _equivalence, "spread": _spread, "rate": _rate}


def _context(interval: Interval, other: NDArray[np.float64], measure: Mapping[str, Any]) -> str:
    unit = "" if "drawdown" in measure else " %"
    return f"from {100 * other.mean():.1f}{unit} ({{n}}, detectable {100 * interval.detectable():.1f})"


def _defined(statistic: Callable[..., Any], *scores: Any) -> Any:
    """Return a statistic of scores; where they are too few or do not vary, its refusal is the finding."""
    try:
        return statistic(*scores)
    except ValueError as error:
        raise _Undecided(str(error)) from error


def _trend(claim: _Claim, records: list[_Record], where: Mapping[str, Any]) -> list[Finding]:
    """Report the trend of greedy test accuracy over arms in their declared order; nothing where one has no runs."""
    names = claim["rule"]["trend"]
    arms = [_select(claim, records, arm, where).records for arm in names]
    if min(map(len, arms)) < 2:
        return []
    scores = _scores(claim, {"test": "greedy"}, arms)
    rise, fall = stats.jonckheere(scores), stats.jonckheere(scores[::-1])
    means = ", ".join(f"{name} {100 * values.mean():.1f} %" for name, values in zip(names, scores, strict=True))
    value = f"{means}; Jonckheere's p {rise:.2g} of a rise, {fall:.2g} of a fall"
    return [Finding("trend", min(map(len, arms)), "", None, value=value, decisive=False)]


# ---- comparisons over cells


def _regret(claim: _Claim, records: list[_Record]) -> list[Finding]:
    """Find the difference of two arms' regret: accuracy of the best setting less that of the shared one, mean of cells.

    Runs of one seed belong together, and where the best setting is the shared one, they are the same runs.
    """
    rule, found = claim["rule"], cells(claim)
    terms = [
        (f"{label} {name}", where | {"setting": rule[name]}, sign / len(found))
        for label, where in found
        for name, sign in (("best", 1), ("shared", -1))
    ]
    return [_weighted(claim, records, terms, "regret")]


def _interaction(claim: _Claim, records: list[_Record]) -> list[Finding]:
    """Find the difference of two arms' contrast of accuracy over the cells."""
    found = cells(claim)
    contrast = claim["rule"]["contrast"]
    weights = CONTRASTS[contrast]([value for _, where in found for value in where.values()])
    terms = [(label, where, weight) for (label, where), weight in zip(found, weights, strict=True)]
    return [_weighted(claim, records, terms, contrast)]


def _slope(levels: Sequence[float]) -> list[float]:
    """Return the weights of accuracies at these levels in the least-squares slope over their decimal logarithm."""
    x = np.log10(levels) - np.mean(np.log10(levels))
    return list(x / (x @ x))


CONTRASTS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "slope over log10": _slope,
    "last less first": lambda levels: [-1.0, *[0.0] * (len(levels) - 2), 1.0],
}
"""What a rule "interaction" may take of each arm over the cells: the weight of each cell's accuracy."""


def _weighted(
    claim: _Claim, records: list[_Record], terms: list[tuple[str, dict[str, Any], float]], quantity: str
) -> Finding:
    """Find the difference between two arms of a weighted sum of accuracies over cells, each seed's in one row.

    terms: of each cell the label, the fields of its spec and its weight.
    """
    rule = claim["rule"]
    label = f"{quantity}, {rule['of']} less {rule['to']}"
    selected = {arm: [_select(claim, records, arm, where) for _, where, _ in terms] for arm in (rule["of"], rule["to"])}
    have = "; ".join(
        f"{name}: {', '.join(found[i].have for found in selected.values())}" for i, (name, *_) in enumerate(terms)
    )
    matrices, words = [], []
    for arm, found in selected.items():
        by_seed = [{record["spec"][claim["unit"]]: record for record in cell.records} for cell in found]
        seeds = sorted(set.intersection(*map(set, by_seed)))
        if not seeds:
            return Finding(label, 0, have, None, float(rule["above"]), lacks=_lacking(sum(selected.values(), [])))
        right = accuracy_matrix([cell[seed] for cell in by_seed for seed in seeds], rule["decoding"])
        right = right.reshape(len(terms), len(seeds), -1)
        matrices.append(np.tensordot([weight for *_, weight in terms], right, axes=1))
        accuracies = zip(terms, right.mean(axis=(1, 2)), strict=True)
        words.append(f"{arm} " + ", ".join(f"{name} {100 * accuracy:.1f} %" for (name, *_), accuracy in accuracies))
    for i, (name, *_) in enumerate(terms):
        _one_base(name, [record for found in selected.values() for record in found[i].records])
    interval = stats.crossed_bootstrap(*matrices)
    context = f"(n = {interval.n}, detectable {100 * interval.detectable():.1f}); {'; '.join(words)}"
    value = f"{interval.format()} points"
    return Finding(label, interval.n, have, interval, float(rule["above"]), value=value, context=context)


# ---- maps of settings


def _gaps(claim: _Claim, records: list[_Record]) -> list[Finding]:
    """Find how much further reward falls under noise on the weights at some ends of training than at others.

    A side is an arm, whose runs may be of several settings, and an end, hacked or clean (`conciseness_runs.end`). With
    fewer runs of an end than the claim asks for, the comparison is not defined.
    """
    findings = []
    for comparison, decisive in _comparisons(claim["rule"]):
        sides = [comparison["of"], comparison["to"]]
        maps = [_map(claim, arm, [r for r in records if matches(r, claim["arms"][arm])]) for arm, _ in sides]
        ends = [_gaps_at(found, end, comparison["sigma"]) for found, (_, end) in zip(maps, sides, strict=True)]
        runs_of, ended = ([sum(map(len, side)) for side in part] for part in (maps, ends))
        counts = [
            f"{n} of {total} runs, of {len(end)} setting{'s' if len(end) != 1 else ''}"
            for n, total, end in zip(ended, runs_of, ends, strict=True)
        ]
        (of, to), n = (" ".join(reversed(side)) for side in sides), min(runs_of)
        label = f"{of} less {to}, gap at {comparison['sigma']}"
        kept = {"bound": float(comparison["above"]), "decisive": decisive}
        have = f"{label}: {' v '.join(counts)}"
        if min(ended) < claim["min_seeds"]:
            words = {"value": "not defined", "context": f"({' v '.join(counts)} end so)"} if n else {}
            findings.append(Finding(label, n, have, None, **words, **kept))
            continue
        interval = stats.nested_bootstrap(*ends)
        context = f"characters ({' v '.join(counts)}, detectable {interval.detectable():.2g})"
        value = interval.format(percent=False, digits=2)
        findings.append(Finding(label, interval.n, have, interval, value=value, context=context, **kept))
    return findings


_VARIED = ("sigma", "alpha", "learning_rate", "beta")


def _map(claim: _Claim, label: str, records: list[_Record]) -> list[list[_Record]]:
    """Return runs by setting and unit, in their order; they differ in nothing but these."""
    _one_base(label, records)
    of_setting: dict[tuple, dict[Any, _Record]] = {}
    for record in records:
        spec, unit = record["spec"], record["spec"][claim["unit"]]
        first = records[0]["spec"]
        names = spec.keys() | first.keys()
        differing = sorted(k for k in names if spec.get(k) != first.get(k) and k not in (*_VARIED, claim["unit"]))
        if differing:
            raise ValueError(f"{label}: runs of a map differ in {', '.join(differing)}")
        runs_of = of_setting.setdefault(tuple(spec[name] for name in _VARIED if name in spec), {})
        if unit in runs_of:
            raise ValueError(f"{label}: two records of one setting have {claim['unit']} {unit}")
        runs_of[unit] = record
    return [[runs_of[unit] for unit in sorted(runs_of)] for _, runs_of in sorted(of_setting.items())]


def _gaps_at(found: list[list[_Record]], end: str, sigma: str) -> list[list[float]]:
    """Return the Jensen gaps of the runs of a map that end so, a list for each setting that has any."""
    gaps = [[r["jensen"]["gaps"][sigma] for r in runs_of if collapse.end(r) == end] for runs_of in found]
    return [of_setting for of_setting in gaps if of_setting]


def _collapse(claim: _Claim, records: list[_Record]) -> list[Finding]:
    """Find how many settings of a map are safe, and whether sigma and alpha say which runs collapse, on another base.

    A run has collapsed when its right answers fell (`hacking.fell`), whatever its reward. Both predictors are
    logarithms, over the sigma that halves the right answers of the base under noise alone: of sigma itself, and of the
    displacement, root mean square, to which ES with random fitness walks: alpha sqrt(steps / population).
    """
    labels = ("settings without collapse", "AUC on the base left out", "slope of sigma", "slope of displacement")
    bounds = {"settings without collapse": (0.5, "below"), "AUC on the base left out": (0.5, "above")}
    predictors, shares, have, sizes = [], [], [], []
    for label, where in cells(claim):
        runs_of = _map(claim, label, [r for r in records if matches(r, claim["arms"]["treatment"] | where)])
        base, number, _ = _select(claim, records, "base", where)
        sizes.append([len(each) for each in runs_of])
        have.append(f"{label}: {sum(sizes[-1])} runs of {len(runs_of)} settings, {number}")
        if runs_of and base:
            _one_base(label, runs_of[0] + base)
            found = collapse.collapse_map(sum(runs_of, []), base[0])
            predictors.append(np.log([[cell.relative_sigma, cell.displacement] for cell in found]))
            shares.append(np.array([cell.collapsed for cell in found]))
    n = min(map(len, shares)) if len(shares) == len(have) else 0
    if not n:
        return [Finding(name, 0, "; ".join(have), None, 0.0, "above") for name in labels]
    safe, least, most = np.concatenate(shares) < 0.5, min(map(min, sizes)), max(map(max, sizes))
    quantities: list[Interval | None] = [stats.wilson(int(safe.sum()), len(safe)), None, None, None]
    why = ""
    try:
        area, slopes = stats.logistic_over_groups(predictors, shares)
        quantities[1:] = [area, *slopes]
    except ValueError as error:
        why = f"({error})"
    findings = []
    for name, interval in zip(labels, quantities, strict=True):
        bound, side = bounds.get(name, (0.0, "above"))
        value = "not defined" if interval is None else interval.format(percent=False, digits=2)
        context = why if interval is None else f"({len(safe)} settings of {least} to {most} runs)"
        findings.append(Finding(name, n, "; ".join(have), interval, bound, side, value=value, context=context))
    return findings


# ---- bounds of numbers in records


def _bounds(claim: _Claim, records: list[_Record]) -> list[Finding]:
    """Find, in each cell, the means of record quantities that should lie below or above given values."""
    rule = claim["rule"]
    bounds = [(name, value, "below") for name, value in rule["below"].items()]
    bounds += [(name, value, "above") for name, value in rule.get("above", {}).items()]
    findings = []
    for cell, where in cells(claim):
        selected, number, lacks = _select(claim, records, "treatment", where)
        for name, bound, side in bounds:
            label = f"{cell} {name}".strip()
            have = f"{label.replace('_', ' ')}: {number}"
            if not selected:
                findings.append(Finding(label, 0, have, None, lacks=lacks))
                continue
            try:
                values = [QUANTITIES[name](record) for record in selected]
            except KeyError as error:
                raise ValueError(f"a record has no {error}, of which {name!r} is made") from error
            interval = stats.bootstrap_mean(values)
            low, high = (f"{end:.3g}" for end in (interval.low, interval.high))
            value = f"{interval.value:.3g} [{low}, {high}]"
            context = f"(n = {interval.n})"
            found = Finding(label, interval.n, have, interval, float(bound), side, value=value, context=context)
            findings.append(found)
    return findings


QUANTITIES: dict[str, Callable[[_Record], float]] = {
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


# ---- the kinds of rule, and what each may declare


@dataclass(frozen=True)
class Rule:
    """A kind of rule: how it finds what the verdict rests on, the keys that it must and may have, the arms it takes."""

    find: Callable[[_Claim, list[_Record]], list[Finding]]
    keys: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    arms: tuple[str, ...] | None = None
    """None: any names."""


RULES: dict[str, Rule] = {
    "interval_above": Rule(_interval_above, ("decoding",), arms=("treatment", "comparison")),
    "estimator_bounds": Rule(_bounds, ("below", "above"), arms=("treatment",)),
    "ledger_bounds": Rule(_bounds, ("below",), arms=("treatment",)),
    "kl_bounds": Rule(_bounds, ("below", "above"), arms=("treatment",)),
    "compare": Rule(_compare, ("comparisons",), ("also", "trend")),
    "regret": Rule(_regret, ("decoding", "shared", "best", "of", "to", "above")),
    "interaction": Rule(_interaction, ("decoding", "contrast", "of", "to", "above")),
    "gaps": Rule(_gaps, ("comparisons",), ("also",)),
    "collapse": Rule(_collapse, arms=("treatment", "base")),
    "open": Rule(lambda claim, records: []),
}
"""The kinds of rule that a claim may declare."""


def check_rule(claim: _Claim) -> None:
    """Raise ValueError, naming the claim and the field, where a claim's rule is not well declared."""
    name, rule = f"claim {claim['id']}", claim["rule"]
    if rule.get("kind") not in RULES:
        raise ValueError(f"{name}: unknown rule kind {rule.get('kind')!r}; known: {', '.join(RULES)}")
    known, arms = RULES[rule["kind"]], claim.get("arms", {})
    check_keys(f"{name}, rule of kind {rule['kind']}", rule, ("kind", *known.keys), known.optional)
    if known.arms:
        check_keys(f"{name}, arms of kind {rule['kind']}", arms, known.arms)
    settings = [(f"arm {arm}", spec["setting"]) for arm, spec in arms.items() if "setting" in spec]
    settings += [(key, rule[key]) for key in ("shared", "best") if key in rule]
    for where, setting in settings:
        check_keys(f"{name}, setting of {where}", setting, ("best_of", "base"), ("among",))
        for arm, choices in setting.get("among", {}).items():
            if len(choices) != setting["best_of"]:
                raise ValueError(
                    f"{name}, setting of {where}: {len(choices)} {arm} settings, of {setting['best_of']} the best"
                )
            for choice in choices:
                check_keys(f"{name}, setting of {where}, {arm}", choice, tuple(SWEEP[arm][0]))
    for side in ("below", "above"):
        if isinstance(rule.get(side), dict):
            check_keys(f"{name}, {side}", rule[side], (), tuple(QUANTITIES))
    if rule.get("contrast", "slope over log10") not in CONTRASTS:
        raise ValueError(f"{name}: unknown contrast {rule['contrast']!r}; known: {', '.join(CONTRASTS)}")
    if rule["kind"] in ("regret", "interaction") and sum(map(len, claim.get("cells", {}).values())) < 2:
        raise ValueError(f"{name}: a rule of kind {rule['kind']} is made over two cells or more")
    named = [rule[side] for side in ("of", "to") if side in rule] + list(rule.get("trend", ()))
    for comparison, _ in _comparisons(rule):
        if rule["kind"] == "gaps":
            _check_gap(name, comparison)
            named += [comparison[side][0] for side in ("of", "to")]
        else:
            _check_comparison(name, comparison, claim["margin"])
            named += [comparison[side] for side in ("of", "to")]
    for arm in named:
        if arm not in arms:
            raise ValueError(f"{name}: arm {arm!r} of the rule is not declared; declared: {', '.join(arms)}")


def _check_comparison(name: str, comparison: Mapping[str, Any], margin: float) -> None:
    check_keys(f"{name}, comparison", comparison, ("measure", "of", "to"), ("by", "above", "below", "p"))
    _check_measure(name, comparison["measure"])
    by = comparison.get("by", "difference")
    if by not in _COMPARED:
        raise ValueError(f"{name}: arms cannot be compared by {by!r}; known: {', '.join(_COMPARED)}")
    sides = sum(side in comparison for side in ("above", "below"))
    if by == "equivalence" and (sides or not margin > 0):
        raise ValueError(f"{name}: an equivalence lies within the claim's margin: declare a positive one, no bound")
    if by != "equivalence" and sides != 1:
        raise ValueError(f"{name}: a comparison lies above or below a value: declare one of the two")
    if comparison.get("p", "mann_whitney") != "mann_whitney" or ("p" in comparison and by != "difference"):
        raise ValueError(f"{name}: p must be 'mann_whitney', of a difference, or left to the interval")
    if (by == "rate") != ("hacked" in comparison["measure"]):
        raise ValueError(f"{name}: hacked runs are compared by rate, and nothing else is")


def _check_gap(name: str, comparison: Mapping[str, Any]) -> None:
    check_keys(f"{name}, comparison", comparison, ("of", "to", "sigma", "above"))
    sigmas = [f"{sigma:g}" for sigma in collapse.JENSEN_SIGMAS]
    if comparison["sigma"] not in sigmas:
        raise ValueError(
            f"{name}: no gap is measured at sigma {comparison['sigma']!r}: one of {', '.join(sigmas)}, as text"
        )
    for side in ("of", "to"):
        if len(comparison[side]) != 2 or comparison[side][1] not in ("hacked", "clean"):
            raise ValueError(f"{name}: {comparison[side]!r} is no arm and end: declare two, the end as hacked or clean")


def _check_measure(name: str, measure: Mapping[str, Any]) -> None:
    check_keys(f"{name}, measure", measure, (), (*_MEASURES, *_AT["validation"], *_AT["right"]))
    kinds = sorted(measure.keys() & _MEASURES.keys())
    if len(kinds) != 1 or measure[kinds[0]] not in ("greedy", "t1"):
        raise ValueError(f"{name}: measure {dict(measure)}: declare one of {', '.join(_MEASURES)}, as greedy or t1")
    (kind,) = kinds
    at = [key for key in measure if key != kind]
    if len(at) != (kind in _AT) or not set(at) <= set(_AT.get(kind, ())):
        raise ValueError(
            f"{name}: validation is measured at_equal or at_mean, right at_proxy or at_kl, the others without them"
        )
    if measure.get("at_equal", "completions") not in _BUDGETS:
        raise ValueError(f"{name}: unknown budget {measure['at_equal']!r}; known: {', '.join(_BUDGETS)}")


def check_keys(where: str, given: Iterable[str], wanted: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Raise ValueError where a declaration has an unknown key or lacks one."""
    given = list(given)
    unknown = [key for key in given if key not in wanted + optional]
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(wanted + optional)}")
    lacking = [key for key in wanted if key not in given]
    if lacking:
        raise ValueError(f"{where} must declare {lacking[0]!r}")
