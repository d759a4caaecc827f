"""What notebook 07 says and tabulates: the answers, pass@k, crossings, support, variety, and exact against counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib import style
from evoalign_lib.analysis import coverage, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.records import Record, unpack_bits, unpack_integers, unpack_probabilities
from evoalign_lib.study.measures.base import label as label_of
from evoalign_lib.study.notebooks import solution_coverage as study
from evoalign_lib.study.notebooks.loading import Records

if TYPE_CHECKING:
    from pandas import DataFrame

Array = NDArray[np.float64]

OWN = "own"
"""In the place of a temperature: each model's own, chosen on validation."""
WITHIN = coverage.SOLVED_WITHIN
MOST = 1024
"""Samples up to which pass@k is shown."""
KS = tuple(dict.fromkeys(round(2 ** (i / 4)) for i in range(41)))
"""Numbers of samples at which curves are drawn and compared, 1 to `MOST`."""
COMPARED = ("t0.6", "t1", OWN)
"""Temperatures at which models are compared with their base."""
_FROM_START, _NEVER = 0.0, np.inf
"""Where a curve is overtaken that starts below, and one that stays above."""
_RESAMPLES = 2_000
_ROUNDED = 0.0025
"""Relative error of a chance in a record (`records.pack_probabilities`)."""


def models(run: SimpleNamespace) -> dict[str, str]:
    """Return name -> label of everything whose reach is compared: the base, the arms, and the mean of ES runs."""
    mean = {study.mean_name(run): f"{style.ARMS['es'].label}, mean of {run.mean}"}
    found = {name: style.ARMS[name].label for name in (study.BASE, *study.TRAINED)}
    return {study.BASE: found.pop(study.BASE), "es": found.pop("es")} | mean | found


def reach(of: Records, name: str) -> Sequence[Record]:
    """Return the records of what the models of a name can solve."""
    return of[study.reach_name(name)]


def chances(record: Record, temperature_label: str) -> Array:
    """Return (problems,), how likely one sample of each test problem is right.

    temperature_label: such as "t0.6", or `OWN`.
    """
    at = own_temperature(record) if temperature_label == OWN else temperature_label
    return unpack_probabilities(record["reach"][at])


def own_temperature(record: Record) -> str:
    """Return the label of the temperature at which a model solves most validation problems within 64 samples."""
    return max(record["validation"], key=record["validation"].get)


def all_chances(of: Records, name: str, at: str) -> Array:
    """Return (runs, problems), the `chances` of all models of a name."""
    return np.array([chances(record, at) for record in reach(of, name)])


def base_chances(of: Records, at: str) -> Array:
    """Return (problems,), the chances of the base."""
    return chances(reach(of, study.BASE)[0], at)


def temperatures(run: SimpleNamespace) -> list[str]:
    """Return the labels of the temperatures at which everything is exact, coldest first."""
    return [label_of(temperature) for temperature in sorted(run.coverage_temperatures)]


def in_words(at: str) -> str:
    """Return what a temperature is called in tables and figures."""
    return "each at its own" if at == OWN else f"temperature {at.removeprefix('t')}"


def own_in_words(of: Records, name: str) -> str:
    """Return the own temperatures of the models of a name, with how many have each where they differ."""
    found = Counter(own_temperature(record).removeprefix("t") for record in reach(of, name))
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{at} ({found[at]})" for at in sorted(found, key=float))


# ---- pass@k


def passed(of: Records, name: str, at: str, k: int) -> Interval:
    """Return pass@k of the models of a name, a fraction, over runs and problems."""
    return stats.crossed_bootstrap(coverage.pass_at(all_chances(of, name, at), k))


def pass_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per model: its own temperature, pass@k at temperature 1, and pass@256 at its own."""
    from pandas import DataFrame

    rows = []
    for name, what in models(run).items():
        row = {"model": what, "n": len(reach(of, name))}
        row |= {f"pass@{k}, % [95 %]": passed(of, name, "t1", k).format() for k in (1, 16, WITHIN, MOST)}
        row["own temperature"] = own_in_words(of, name)
        rows.append(row | {f"pass@{WITHIN} at its own": passed(of, name, OWN, WITHIN).format()})
    return DataFrame(rows)


def crossing(of: Records, name: str, at: str, *, seed: int = 0) -> Interval:
    """Return the k at which the base overtakes the models of a name: that of the mean curves, with an interval.

    Runs and problems are resampled independently of one another, the problems in common for models and base. 0 stands
    for a curve that starts below the base's, infinity for one that is not overtaken. One run has no interval.
    """
    base, own = (coverage.pass_at(each, KS) for each in (base_chances(of, at), all_chances(of, name, at)))
    value, n = float(_overtaken(own.mean((0, 1)), base.mean(0))), len(own)
    if n == 1:
        return Interval(value, np.nan, np.nan, n)
    rng, problems = np.random.default_rng(seed), len(base)
    drawn = rng.multinomial(problems, np.full(problems, 1 / problems), size=_RESAMPLES) / problems
    each = np.stack([drawn @ curves for curves in own])  # (runs, resamples, ks)
    counts = rng.multinomial(n, np.full(n, 1 / n), size=_RESAMPLES) / n
    draws = _overtaken(np.einsum("rn,nrk->rk", counts, each), drawn @ base)
    low, high = np.quantile(draws, (0.025, 0.975), method="inverted_cdf")  # which takes no mean with infinity
    return Interval(value, float(low), float(high), n)


def _overtaken(curves: Array, base: Array) -> Array:
    """Return (...), where the base overtakes curves (..., ks)."""
    gap, at = curves - base, coverage.crossing(KS, curves, base)
    leads = np.take_along_axis(gap, (gap != 0).argmax(-1)[..., None], -1)[..., 0]
    return np.where(np.isnan(at), np.where(leads < 0, _FROM_START, _NEVER), at)


def crossing_in_words(found: Interval) -> str:
    """Return a crossing with its interval, if it has one."""
    words = {_FROM_START: "below from the start", _NEVER: f"never up to {MOST:,}"}
    value = words.get(found.value) or _samples(found.value)
    if np.isnan(found.low) or found.low == found.high:
        return value
    short = {_FROM_START: "the start", _NEVER: "never"}
    return f"{value} [{', '.join(short.get(end) or _samples(end) for end in (found.low, found.high))}]"


def _samples(k: float) -> str:
    return f"{k:,.0f}" if k >= 9.95 else f"{k:.1f}"


def crossing_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per trained model: the number of samples from which on the base solves more, by temperature."""
    from pandas import DataFrame

    rows = []
    for name, what in _trained(run).items():
        row = {"model": what, "n": len(reach(of, name))}
        rows.append(row | {f"{in_words(at)} [95 %]": crossing_in_words(crossing(of, name, at)) for at in COMPARED})
    return DataFrame(rows)


def _trained(run: SimpleNamespace) -> dict[str, str]:
    return {name: what for name, what in models(run).items() if name != study.BASE}


# ---- support


def changes(of: Records, name: str, at: str) -> list[coverage.Support]:
    """Return what each model of a name keeps, wins and loses against the base: expected numbers of problems."""
    return _changes(base_chances(of, at), all_chances(of, name, at))


def _changes(base: Array, runs: Array) -> list[coverage.Support]:
    before, after = coverage.pass_at(base, WITHIN), coverage.pass_at(runs, WITHIN)
    return [coverage.support(before, row) for row in after]


def net_change(of: Records, name: str, at: str) -> Interval:
    """Return the net change of support (NSCR) of the models of a name against the base."""
    return coverage.support_change(base_chances(of, at), all_chances(of, name, at), WITHIN)


def net_difference(of: Records, a: str, b: str, at: str) -> Interval:
    """Return the net change of support of the models of one name less that of another."""
    runs = [all_chances(of, name, at) for name in (a, b)]
    return coverage.support_change_difference(base_chances(of, at), *runs, WITHIN)


def null(of: Records, at: str) -> coverage.Null:
    """Return what two draws of the base, each of 256 samples of every problem, show as a change of support."""
    return coverage.null_nscr(base_chances(of, at), WITHIN)


def support_table(run: SimpleNamespace, of: Records, decoding: str = "t1") -> DataFrame:
    """Return a row per model: problems kept, won, lost and out against the base, and the rates made of them.

    The first row is the base drawn twice. A second one is the base at its own temperature, where that is not the one
    compared at.

    decoding: a temperature, such as "t0.6"; or `OWN`.
    """
    from pandas import DataFrame

    by_chance = null(of, decoding)
    beside = Interval(by_chance.support.nscr, by_chance.low, by_chance.high, 1).format(percent=False, digits=3)
    words = "; ".join([style.ARMS["base"].label, "two draws"])
    rows = [{"model": words, "n": 1} | _counts([by_chance.support]) | {"NSCR [95 %]": "0", "null NSCR [95 %]": beside}]
    base = base_chances(of, decoding)
    found = {what: all_chances(of, name, decoding) for name, what in _trained(run).items()}
    if decoding != OWN and (own := own_in_words(of, study.BASE)) != decoding.removeprefix("t"):
        found = {f"{style.ARMS['base'].label} at {own}": all_chances(of, study.BASE, OWN)} | found
    for what, runs in found.items():
        row = {"model": what, "n": len(runs)} | _counts(_changes(base, runs))
        row["NSCR [95 %]"] = coverage.support_change(base, runs, WITHIN).format(percent=False, digits=3)
        rows.append(row | {"null NSCR [95 %]": beside})
    return DataFrame(rows)


def own_support_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return `support_table` with every model, and the base, at its own temperature."""
    table = support_table(run, of, OWN)
    table.insert(2, "temperature", [own_in_words(of, name) for name in models(run)])
    return table


def _counts(found: Sequence[coverage.Support]) -> dict[str, str]:
    """Return the cells of expected numbers, means over runs, and of the rates of retention and discovery."""
    row = {what: f"{np.mean([getattr(each, what) for each in found]):.1f}" for what in ("kept", "won", "lost", "out")}
    return row | {rate.upper(): f"{np.mean([getattr(each, rate) for each in found]):.3f}" for rate in ("srr", "ndr")}


# ---- variety


def variety_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per model and temperature: right greedily, by one sample and by a vote, and entropy of answers.

    Shares have intervals over runs and problems, entropies over runs: records have their mean over problems only.
    """
    from pandas import DataFrame

    rows = []
    for name, what in models(run).items():
        records = reach(of, name)
        for at in map(label_of, run.coverage_sampled_at):
            row = {"model": what, "n": len(records), "temperature": at.removeprefix("t")}
            greedy = np.array([unpack_bits(r["greedy_bits"], r["n"]) for r in records])
            voted = np.array([unpack_bits(r["drawn"][at]["vote_bits"], r["n"]) for r in records])
            row["greedy, % [95 %]"] = stats.crossed_bootstrap(greedy).format()
            row["pass@1, % [95 %]"] = passed(of, name, at, 1).format()
            row[f"vote of {run.coverage_samples}, % [95 %]"] = stats.crossed_bootstrap(voted).format()
            for key, words in {"entropy": "entropy", "entropy_corrected": "entropy, corrected"}.items():
                row[f"{words} [95 %]"] = _over_runs([r["drawn"][at][key] for r in records])
            rows.append(row)
    return DataFrame(rows)


def _over_runs(values: Sequence[float]) -> str:
    found = stats.bootstrap_mean(values)
    return f"{found.value:.2f}" if np.isnan(found.low) else found.format(percent=False, digits=2)


# ---- exact against counted


def checked_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per model and temperature: exact pass@k beside that of counted samples, and tests of both.

    "p, together" is of the number of right samples that are listed, "p, one by one" of the problem whose right samples
    are the least likely, times the number of problems. Both allow for the rounding of chances in records.
    """
    from pandas import DataFrame

    ks, samples = (1, min(WITHIN, run.checked_samples)), run.checked_samples
    rows = []
    for record in of["checked"]:
        arm = record["spec"]["end"]["of"]["run"]["arm"] if "end" in record["spec"] else study.BASE
        for at in map(label_of, run.coverage_sampled_at):
            p, drawn = chances(record, at), record["drawn"][at]
            right = unpack_integers(drawn["right"])
            row = {"model": style.ARMS[arm].label, "temperature": at.removeprefix("t")}
            for k in ks:
                row[f"pass@{k}, exact, %"] = f"{100 * coverage.pass_at(p, k).mean():.2f}"
                row[f"pass@{k}, counted, %"] = f"{100 * coverage.estimate_pass_at(right, samples, k).mean():.2f}"
            row["p, together"] = _p_in_words(_p_together(p, drawn["listed"], samples))
            row["p, one by one"] = _p_in_words(_p_one_by_one(p, right, samples))
            listed = drawn["listed"] / drawn["right_samples"] if drawn["right_samples"] else np.nan
            rows.append(row | {"right samples listed, %": "" if np.isnan(listed) else f"{100 * listed:.2f}"})
    return DataFrame(rows)


def _within_rounding(p: Array, shares: Array) -> Array:
    """Return, of the chances that a record would round to p, those next to some shares."""
    return np.clip(shares, p * (1 - _ROUNDED), np.minimum(p * (1 + _ROUNDED), 1.0))


def _p_together(p: Array, listed: int, samples: int) -> float:
    """Return the p-value of the number of listed samples, over all problems, by the normal law."""
    from scipy.stats import norm

    # all chances may be rounded the same way, as those near 1 are
    nearest = _within_rounding(p.mean()[None], np.array([listed / (samples * len(p))]))[0]
    error = np.sqrt((p * (1 - p)).sum() * samples) / (samples * len(p))
    away = abs(listed / (samples * len(p)) - nearest)
    return float(2 * norm.sf(away / error)) if error else float(away == 0)


def _p_one_by_one(p: Array, right: NDArray[np.int64], samples: int) -> float:
    """Return the smallest exact p-value of the right samples of a problem, by Bonferroni's rule over all."""
    from scipy.stats import binom

    near = _within_rounding(p, right / samples)
    tails = np.minimum(binom.cdf(right, samples, near), binom.sf(right - 1, samples, near))
    return float(min(1.0, 2 * tails.min() * len(p)))


def _p_in_words(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


# ---- the answers


def answers(run: SimpleNamespace, of: Records) -> dict[str, str]:
    """Return question -> one sentence or two with number, interval and n."""
    mean, n = study.mean_name(run), len(base_chances(of, "t1"))
    found = {
        "Does ES keep what the base can solve?": (
            f"Within {WITHIN} samples: {_change_in_words(of, 'es')} ({len(reach(of, 'es'))} runs, {n} problems). "
            f"{models(run)[mean]}: {_change_in_words(of, mean)} (n = {len(reach(of, mean))})."
        ),
        "Does GRPO shrink it?": (
            f"Within {WITHIN} samples: {_change_in_words(of, 'grpo')} ({len(reach(of, 'grpo'))} runs). "
            f"{_difference_in_words(of, 't1')} {_overtaken_in_words(of)}"
        ),
    }
    found["Is the difference one of temperature?"] = _own_in_sentences(of)
    found["What does chance alone give?"] = _null_in_sentences(of, n)
    return found


def _verb(found: Interval) -> str:
    if found.low > 0:
        return "grows"
    return "shrinks" if found.high < 0 else "cannot be told to grow or shrink"


def _nscr(found: Interval) -> str:
    return found.format(percent=False, digits=3)


def _change_in_words(of: Records, name: str) -> str:
    """At both temperatures, whether the support of the models of a name grows, by how much, and of what."""
    told = []
    for at in ("t0.6", "t1"):
        found, each = net_change(of, name, at), changes(of, name, at)
        won, lost = (np.mean([getattr(support, what) for support in each]) for what in ("won", "lost"))
        told.append(
            f"at {in_words(at)} the support {_verb(found)}, by a net change of {_nscr(found)} ({won:.1f} problems won, "
            f"{lost:.1f} lost)"
        )
    return ", and ".join(told)


def _difference_in_words(of: Records, at: str) -> str:
    found = net_difference(of, "es", "grpo", at)
    where = "with each model at its own temperature" if at == OWN else f"at {in_words(at)}"
    if found.low > 0:
        told = "higher after ES than after GRPO"
    elif found.high < 0:
        told = "lower after ES than after GRPO"
    else:
        told = "not to be told apart between ES and GRPO"
    return f"The net change is {told} {where}: the difference is {_nscr(found)}."


def _overtaken_in_words(of: Records) -> str:
    """From how many samples on the base solves more than each of the two, at temperature 1."""
    words = {style.ARMS[arm].label: crossing_in_words(crossing(of, arm, "t1")) for arm in ("grpo", "es")}
    told = "; ".join(f"for {label} {k}" for label, k in words.items())
    return f"The number of samples at which the base overtakes, at temperature 1: {told}."


def _own_in_sentences(of: Records) -> str:
    """The comparison at own temperatures, and what GRPO gains by its own."""
    own = net_change(of, "grpo", OWN)
    solved = [coverage.pass_at(all_chances(of, "grpo", at), WITHIN) for at in (OWN, "t1")]
    gain = stats.crossed_bootstrap(solved[0] - solved[1])
    behind = stats.crossed_bootstrap(solved[0], coverage.pass_at(base_chances(of, OWN), WITHIN))
    if behind.high < 0:
        told = "stays below the base at the base's own"
    else:
        told = "is above the base at the base's own" if behind.low > 0 else "cannot be told from the base at its own"
    at = own_in_words(of, "grpo")
    return (
        f"{_difference_in_words(of, OWN)} At its own temperature ({at}), chosen on validation, GRPO's support "
        f"{_verb(own)}, by {_nscr(own)}. Within {WITHIN} samples it solves {gain.format()} points more there than at 1 "
        f"(n = {gain.n}) and {told}: the difference is {behind.format()} points."
    )


def _null_in_sentences(of: Records, n: int) -> str:
    """What two draws of the base show, and what arms show that learned nothing."""
    two = null(of, "t1")
    told = []
    for arm in ("es_random", "grpo_random"):
        found = net_change(of, arm, "t1")
        told.append(f"after {style.ARMS[arm].label} the support {_verb(found)}, by {_nscr(found)} (n = {found.n})")
    return (
        f"Two draws of {WITHIN} samples of the base, at temperature 1, win and lose {two.support.won:.1f} of {n} "
        f"problems each, expected, and their net change lies from {two.low:.3f} to {two.high:.3f} in 95 % of cases. "
        f"Where nothing is learned, {', and '.join(told)}."
    )


# ---- numbers for the paper

_AT = {"t0.6": "Warm", "t1": "", OWN: "Own"}


def numbers(run: SimpleNamespace, of: Records) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, for the paper."""
    found: dict[str, tuple[Any, str]] = {
        "CovProblems": (len(base_chances(of, "t1")), "d"),
        "CovWithin": (WITHIN, "d"),
        "CovMost": (MOST, "d"),
        "CovMean": (run.mean, "d"),
    }
    for name in models(run):
        short = "Mean" if name == study.mean_name(run) else "".join(map(str.capitalize, name.split("_")))
        found[f"Cov{short}Runs"] = (len(reach(of, name)), "d")
        found[f"Cov{short}OwnTemperature"] = (own_in_words(of, name), "")
        for at, where in _AT.items():
            for k, size in {1: "One", 16: "Few", WITHIN: "Many", MOST: "Most"}.items():
                found[f"Cov{short}{size}{where}"] = (100 * coverage.pass_at(all_chances(of, name, at), k).mean(), ".1f")
            if name == study.BASE:
                continue
            found[f"Cov{short}Net{where}"] = (_nscr(net_change(of, name, at)), "")
            found[f"Cov{short}Crossing{where}"] = (crossing_in_words(crossing(of, name, at)), "")
            for what in ("won", "lost"):
                value = np.mean([getattr(each, what) for each in changes(of, name, at)])
                found[f"Cov{short}{what.capitalize()}{where}"] = (value, ".1f")
    for at, where in _AT.items():
        two = null(of, at)
        found[f"CovGap{where}"] = (_nscr(net_difference(of, "es", "grpo", at)), "")
        found |= {f"CovNullLow{where}": (two.low, ".3f"), f"CovNullHigh{where}": (two.high, ".3f")}
        found[f"CovNullWon{where}"] = (two.support.won, ".1f")
    return found
