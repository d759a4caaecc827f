"""What notebook 07 says and tabulates: pass@k, crossings, problems won and lost, variety, noise and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evoalign_lib.analysis import coverage, stats
from evoalign_lib.analysis.coverage import SOLVED_WITHIN, Support
from evoalign_lib.analysis.stats import Interval
from evoalign_study import nb07_solution_coverage as study
from evoalign_study import style
from evoalign_study.kinds.weights import VALIDATED_BY
from evoalign_study.loading import Records
from evoalign_study.measures.base import label
from evoalign_study.records import Record, unpack_bits, unpack_integers, unpack_probabilities

if TYPE_CHECKING:
    from pandas import DataFrame

KS = (1, 16, 256, 1024)
"""Samples at which tables say what is solved."""
CURVE = np.unique(np.geomspace(1, 1024, 41).round()).astype(int)
"""Samples at which curves are drawn and crossings are looked for."""
OWN = "own"
"""In the place of a temperature: that of the model, chosen on the validation set."""
PUBLISHED = (
    ("ProRL-1.5B v1", "1", 2400, 36, 163, 805),
    ("ProRL-1.5B v2", "1", 2388, 48, 175, 793),
    ("Skywork-OR1-7B", "1", 2685, 26, 86, 607),
    ("OLMo-2-1B", "1", 761, 83, 104, 599),
    ("Minerva, SFT", "3", 154, 28, 18, 72),
    ("Minerva, DAPO", "3", 138, 12, 34, 88),
    ("Olympiad, SFT", "3", 503, 49, 25, 98),
    ("Olympiad, DAPO", "3", 467, 25, 61, 122),
)
"""Model or test, table of arXiv 2507.14843 (version 4), and its numbers of problems kept, won, lost and out."""
_RESAMPLES = 2000


def models() -> tuple[str, ...]:
    """Return the models that are shown: base, arms, and the mean of ES runs."""
    return (study.BASE, *study.TRAINED, study.MEAN)


def records(run: SimpleNamespace, of: Records, model: str) -> Sequence[Record]:
    """Return what was measured of a model: one record of the base, one for each run of an arm, or for each mean."""
    return of[study.reach_name(model)]


def name(run: SimpleNamespace, model: str) -> str:
    """Return what a model is called in tables and legends."""
    return f"mean of {run.mean} ES runs" if model == study.MEAN else style.ARMS[model].label


def own_temperature(record: Record) -> str:
    """Return at which temperature a model solves most validation problems within 64 samples, as records have it."""
    return coverage.own_temperature(record["validation"])


def chances(run: SimpleNamespace, of: Records, model: str, temperature: str) -> np.ndarray:
    """Return the chance that one sample solves a problem, (runs, problems).

    temperature: "t1" and the like, or `OWN`.
    """
    found = records(run, of, model)
    ats = [own_temperature(record) if temperature == OWN else temperature for record in found]
    return np.array([unpack_probabilities(record["reach"][at]) for record, at in zip(found, ats, strict=True)])


def solved(run: SimpleNamespace, of: Records, model: str, temperature: str, k: int) -> Interval:
    """Return pass@k, the mean over runs and problems, with its interval."""
    return stats.crossed_bootstrap(coverage.pass_at(chances(run, of, model, temperature), k), n_resamples=_RESAMPLES)


def temperatures_in_words(found: Sequence[Record]) -> str:
    """Return the temperatures that validation chose for some models, the most frequent first."""
    own = [own_temperature(record).removeprefix("t") for record in found]
    counted = sorted(dict.fromkeys(own), key=lambda t: (-own.count(t), t))
    return ", ".join(t if len(counted) == 1 else f"{t} ({own.count(t)})" for t in counted)


# ---- within k samples


def pass_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per model: pass@k at temperature 1, its own temperature, and pass@256 there."""
    from pandas import DataFrame

    rows = []
    for model in models():
        found = records(run, of, model)
        row: dict[str, Any] = {"model": name(run, model), "n": len(found)}
        row |= {f"pass@{k}": solved(run, of, model, "t1", k).format() for k in KS}
        row["own temperature"] = temperatures_in_words(found)
        row[f"pass@{SOLVED_WITHIN} there"] = solved(run, of, model, OWN, SOLVED_WITHIN).format()
        rows.append(row)
    return DataFrame(rows)


def curve(run: SimpleNamespace, of: Records, model: str, temperature: str) -> list[Interval]:
    """Return pass@k at every k of `CURVE`."""
    solved_at = coverage.pass_at(chances(run, of, model, temperature), CURVE.tolist())
    return [stats.crossed_bootstrap(solved_at[..., i], n_resamples=500) for i in range(len(CURVE))]


def crossing(run: SimpleNamespace, of: Records, model: str, temperature: str) -> tuple[float, float, float]:
    """Return from how many samples on the base solves more than a model, and the ends of its 95 % interval.

    Infinite: not up to 1,024 samples; minus infinite: the base solves more from the first sample on. Runs are
    resampled, and problems in common for base and runs; of one run the ends are NaN.
    """
    own, base = chances(run, of, model, temperature), chances(run, of, study.BASE, temperature)[0]
    found = coverage.overtaken(base, own, CURVE.tolist(), n_resamples=_RESAMPLES)
    return found.value, found.low, found.high


def crossing_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per trained model: where the base overtakes it, and the net change of support on either side."""
    from pandas import DataFrame

    columns = {"temperature 0.6": "t0.6", "temperature 1": "t1", "each at its own": OWN}
    rows = []
    for model in models()[1:]:
        row: dict[str, Any] = {"model": name(run, model), "n": len(records(run, of, model))}
        row |= {words: crossing_in_words(*crossing(run, of, model, at)) for words, at in columns.items()}
        for k in (64, 1024):
            row[f"NSCR within {k:,}"] = change(run, of, model, "t1", k).format(percent=False, digits=3)
        rows.append(row)
    return DataFrame(rows)


def crossing_in_words(value: float, low: float, high: float) -> str:
    """Return a crossing with its interval in words."""

    def word(k: float) -> str:
        if np.isinf(k):
            return f"over {CURVE[-1]:,}" if k > 0 else "1"
        return f"{k:.0f}"

    told = {np.inf: f"not up to {CURVE[-1]:,}", -np.inf: "from the first"}.get(value, word(value))
    return told if np.isnan(low) else f"{told} [{word(low)}, {word(high)}]"


class Equal(NamedTuple):
    """ES against GRPO where one sample of each is equally often right."""

    level: float
    """How often that is, a fraction."""
    more: Interval
    """By how much more ES solves there within 256 samples, a fraction; over the resamples in which both get there."""
    without: float
    """The share of resamples in which one of them does not."""


def at_equal_accuracy(run: SimpleNamespace, of: Records) -> tuple[Equal, Equal]:
    """Compare ES with GRPO at both ends of the accuracies of one sample that both have at some temperature.

    These are that of GRPO at its hottest temperature, and the best one of ES. The other arm is taken on the line
    between the temperatures that were asked. Intervals are over runs and problems, the problems in common.
    """
    ats = [label(t) for t in sorted(run.coverage_temperatures)]
    solved_at = {
        arm: [coverage.pass_at(np.stack([chances(run, of, arm, at) for at in ats]), k) for k in (1, SOLVED_WITHIN)]
        for arm in ("es", "grpo")
    }

    def compare(draw: Any) -> tuple[tuple[float, float], tuple[float, float]]:
        problems, curves = draw(solved_at["es"][0].shape[2]), {}
        for arm, found in solved_at.items():
            runs = draw(found[0].shape[1])
            one, many = (np.tensordot(runs, each, (0, 1)) @ problems for each in found)
            best = int(one.argmax())  # hotter samples are right less often from there on
            curves[arm] = one[best:][::-1], many[best:][::-1]
        (es, es_many), (grpo, grpo_many) = curves["es"], curves["grpo"]
        low, high = float(grpo[0]), float(es[-1])
        if not es[0] <= low <= high <= grpo[-1]:
            return (low, np.nan), (high, np.nan)
        coldest = es_many[-1] - np.interp(high, grpo, grpo_many)
        return (low, float(np.interp(low, es, es_many) - grpo_many[0])), (high, float(coldest))

    ends = compare(lambda n: np.full(n, 1 / n))
    rng = np.random.default_rng(0)
    drawn = [compare(lambda n: rng.multinomial(n, np.full(n, 1 / n)) / n) for _ in range(_RESAMPLES)]
    n = min(found[0].shape[1] for found in solved_at.values())
    made = []
    for end, (level, more) in enumerate(ends):
        values = np.array([each[end][1] for each in drawn])
        without = float(np.isnan(values).mean())
        low, high = (np.nan, np.nan) if without == 1 or np.isnan(more) else np.nanpercentile(values, [2.5, 97.5])
        made.append(Equal(level, Interval(more, float(low), float(high), n), without))
    return made[0], made[1]


# ---- problems won and lost


def supports(run: SimpleNamespace, of: Records, model: str, temperature: str) -> list[Support]:
    """Return the expected numbers of problems kept, won, lost and out within 256 samples, of each run."""
    before = coverage.pass_at(chances(run, of, study.BASE, temperature)[0], SOLVED_WITHIN)
    after = coverage.pass_at(chances(run, of, model, temperature), SOLVED_WITHIN)
    return [coverage.support(before, each) for each in after]


def change(run: SimpleNamespace, of: Records, model: str, temperature: str, k: int = SOLVED_WITHIN) -> Interval:
    """Return the net change of support within k samples, as the claims have it within 256."""
    base = chances(run, of, study.BASE, temperature)[0]
    return coverage.support_change(base, chances(run, of, model, temperature), k)


def null(run: SimpleNamespace, of: Records, temperature: str) -> coverage.Null:
    """Return what two sets of 256 samples of the base itself win and lose."""
    return coverage.null_nscr(chances(run, of, study.BASE, temperature)[0], SOLVED_WITHIN)


def support_table(run: SimpleNamespace, of: Records, temperature: str = "t1") -> DataFrame:
    """Return a row per model: problems kept, won, lost and out, the ratios, and the range of the null."""
    from pandas import DataFrame

    chance = null(run, of, temperature)
    rows = []
    for model in models():
        found = supports(run, of, model, temperature)
        row: dict[str, Any] = {"model": name(run, model), "n": len(found)}
        row |= {part: f"{np.mean([getattr(s, part) for s in found]):.1f}" for part in ("kept", "won", "lost", "out")}
        for part in ("srr", "ndr"):
            mean = np.mean([getattr(each, part) for each in found])
            row[part.upper()] = "not defined" if np.isnan(mean) else f"{mean:.3f}"
        if model == study.BASE:
            row["NSCR [95 %]"] = "0 (the null)"
        else:
            row["NSCR [95 %]"] = change(run, of, model, temperature).format(percent=False, digits=3)
        row["null of counts"] = f"{chance.low:.3f} to {chance.high:.3f}"
        rows.append(row)
    return DataFrame(rows)


def own_support_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return `support_table` with base and models at their own temperatures."""
    found = support_table(run, of, OWN)
    found.insert(2, "own temperature", [temperatures_in_words(records(run, of, model)) for model in models()])
    return found


def published_table() -> DataFrame:
    """Return the published counts, and the ratios that follow from them."""
    from pandas import DataFrame

    rows = []
    for what, table, *counts in PUBLISHED:
        found = Support(*counts)
        row = {"model or test": what, "table": table}
        row |= dict(zip(("kept", "won", "lost", "out"), map(str, counts), strict=True))
        rows.append(row | {part.upper(): f"{getattr(found, part):.3f}" for part in ("srr", "ndr", "sds", "nscr")})
    return DataFrame(rows)


# ---- samples


def checked_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per checked model: exact and counted pass@k, how far counts stray, and right samples listed."""
    from pandas import DataFrame

    rows = []
    for model, record in zip((study.BASE, *study.TRAINED), of["checked"], strict=True):
        samples, drawn = record["spec"]["coverage_samples"], record["drawn"]["t1"]
        exact, right = unpack_probabilities(record["reach"]["t1"]), unpack_integers(drawn["right"])
        row: dict[str, Any] = {"model": name(run, model), "samples": f"{samples:,}"}
        for k in (k for k in KS if k <= samples and k != KS[1]):
            counted = coverage.estimate_pass_at(right, samples, k).mean()
            row[f"pass@{k}"] = f"{100 * coverage.pass_at(exact, k).mean():.2f}, {100 * counted:.2f}"
        # where a normal deviate is a fair description
        often = samples * exact * (1 - exact) > 1
        deviates = (right - samples * exact)[often] / np.sqrt(samples * exact * (1 - exact))[often]
        row["spread over chance's"] = f"{np.sqrt(np.mean(deviates**2)):.2f}" if often.any() else ""
        row["listed, %"] = f"{100 * drawn['listed'] / drawn['right_samples']:.2f}" if drawn["right_samples"] else ""
        row["entropy"] = f"{drawn['entropy_corrected']:.2f}"
        rows.append(row)
    return DataFrame(rows)


def voted(run: SimpleNamespace, of: Records, model: str, temperature: str) -> np.ndarray:
    """Return whether the most frequent answer to a problem is right, (runs, problems)."""
    found = records(run, of, model)
    return np.array([unpack_bits(r["drawn"][temperature]["vote_bits"], r["n"]) for r in found], float)


def variety_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per model: greedy accuracy, that of the vote, and the entropy of answers, at two temperatures."""
    from pandas import DataFrame

    rows = []
    for model in models():
        found = records(run, of, model)
        greedy = np.array([unpack_bits(r["greedy_bits"], r["n"]) for r in found], float)
        row: dict[str, Any] = {"model": name(run, model), "n": len(found)}
        row["greedy"] = stats.crossed_bootstrap(greedy, n_resamples=_RESAMPLES).format()
        for at in map(label, run.coverage_sampled_at):
            words = f"at {at.removeprefix('t')}"
            row[f"vote {words}"] = stats.crossed_bootstrap(voted(run, of, model, at), n_resamples=_RESAMPLES).format()
            for key, what in (("entropy", "entropy"), ("entropy_corrected", "corrected")):
                row[f"{what} {words}"] = f"{np.mean([r['drawn'][at][key] for r in found]):.2f}"
        rows.append(row)
    return DataFrame(rows)


# ---- noise on the weights against temperature


def of_sigma(of: Records, sigma: float) -> list[Record]:
    """Return the records of perturbed copies of the base with noise of one sigma, a record for each repeat."""
    return [record for record in of["perturbed"] if record["spec"]["sigma"] == sigma]


def solved_by_copies(found: Sequence[Record], k: int) -> np.ndarray:
    """Return pass@k of copies in the place of samples, (repeats, problems); NaN for more copies than there are."""
    (members,) = {record["spec"]["members"] for record in found}
    right = np.array([unpack_integers(record["drawn"]["right"]) for record in found])
    return coverage.estimate_pass_at(right, members, k) if k <= members else np.full(right.shape, np.nan)


def by_noise(of: Records, sigma: float) -> Interval:
    """Return what copies with noise of one sigma solve within 256 of them, or within all if there are fewer."""
    found = of_sigma(of, sigma)
    within = min(SOLVED_WITHIN, found[0]["spec"]["members"])
    return stats.crossed_bootstrap(solved_by_copies(found, within), n_resamples=_RESAMPLES)


def best_sigma(run: SimpleNamespace, of: Records) -> float:
    """Return the sigma whose copies solve most validation problems within `VALIDATED_BY` of them, or within all."""

    def within(sigma: float) -> float:
        found = of_sigma(of, sigma)
        (members,) = {record["spec"]["members"] for record in found}
        right = np.array([unpack_integers(record["validation"]) for record in found])
        return float(coverage.estimate_pass_at(right, members, min(VALIDATED_BY, members)).mean())

    return max(run.perturbed_sigmas, key=within)


def perturbed_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per temperature and per sigma: what as many completions of the base solve, and their vote."""
    from pandas import DataFrame

    (base,) = records(run, of, study.BASE)
    rows: list[dict[str, Any]] = []
    for at in map(label, run.coverage_temperatures):
        drawn = base["drawn"].get(at)
        row = {"completions differ by": f"temperature {at.removeprefix('t')}"}
        row |= {f"pass@{k}": solved(run, of, study.BASE, at, k).format() for k in KS[:3]}
        row["vote"] = f"{100 * voted(run, of, study.BASE, at).mean():.1f}" if drawn else ""
        rows.append(
            row | dict.fromkeys(("best copy", "best 16", "their vote", "found here alone", "found there alone"), "")
        )
    (there,) = coverage.pass_at(chances(run, of, study.BASE, OWN), SOLVED_WITHIN)
    for sigma in run.perturbed_sigmas:
        found = of_sigma(of, sigma)
        row = {"completions differ by": f"noise, sigma {sigma:g}"}
        for k in KS[:3]:
            values = solved_by_copies(found, k)
            known = not np.isnan(values).any()
            row[f"pass@{k}"] = stats.crossed_bootstrap(values, n_resamples=_RESAMPLES).format() if known else ""
        votes = [unpack_bits(record["drawn"]["vote_bits"], record["n"]).mean() for record in found]
        row["vote"] = f"{100 * np.mean(votes):.1f}"
        for words, size, what in (("best copy", "1", "mean"), ("best 16", "16", "mean"), ("their vote", "16", "vote")):
            row[words] = f"{100 * np.mean([record['best'][size][what] for record in found]):.1f}"
        here = solved_by_copies(found, SOLVED_WITHIN)
        overlap = [] if np.isnan(here).any() else [coverage.support(there, each) for each in here]
        for words, part in (("found here alone", "won"), ("found there alone", "lost")):
            row[words] = f"{np.mean([getattr(each, part) for each in overlap]):.1f}" if overlap else ""
        rows.append(row)
    return DataFrame(rows)


# ---- the answers


def _changes(run: SimpleNamespace, of: Records, model: str) -> str:
    """The net change of support of a model at both temperatures, in words."""
    parts = []
    for at in ("t1", "t0.6"):
        found = change(run, of, model, at)
        told = "a gain" if found.low > 0 else "a loss" if found.high < 0 else "not told from none"
        parts.append(f"{found.format(percent=False, digits=3)} at {style.STROKES[at].label} ({told})")
    return " and ".join(parts)


def answers(run: SimpleNamespace, of: Records) -> dict[str, str]:
    """Return question -> one sentence with its number, interval and n."""
    found = {}
    for model, question in (("es", "Does ES keep what the base can solve?"), ("grpo", "Does GRPO?")):
        found[question] = (
            f"The net change of support within {SOLVED_WITHIN} samples is {_changes(run, of, model)} (n = "
            f"{len(records(run, of, model))} runs)."
        )
    parts = []
    for model in (study.BASE, "es", "es_sampled", "grpo"):
        here = solved(run, of, model, "t1", SOLVED_WITHIN).format()
        there = solved(run, of, model, OWN, SOLVED_WITHIN).format()
        parts.append(f"{name(run, model)} {here} and {there}")
    found["Is it a matter of temperature?"] = (
        f"Within {SOLVED_WITHIN} samples these are solved at temperature 1, and at the temperature that validation "
        f"chose for each, in percent: {'; '.join(parts)} (n = {len(records(run, of, 'es'))} runs of each arm)."
    )
    hot, cold = at_equal_accuracy(run, of)
    found["And where one sample is equally often right?"] = (
        f"Both arms are right in {100 * hot.level:.1f} to {100 * cold.level:.1f} % of single samples at some "
        f"temperature. There ES solves within {SOLVED_WITHIN} samples {hot.more.format()} points more than GRPO at the "
        f"lower end, and {cold.more.format()} at the upper one (n = {hot.more.n} runs of each; "
        f"{100 * hot.without:.0f} % of resamples, in which they have no accuracy in common, are left out)."
    )
    walk, mean = (change(run, of, model, "t1").format(percent=False, digits=3) for model in ("es_random", study.MEAN))
    chance = null(run, of, "t1")
    found["What do chance and the random walk give?"] = (
        f"At temperature 1 the change is {walk} after ES with random fitness (n = {len(records(run, of, 'es_random'))} "
        f"runs) and {mean} for the {name(run, study.MEAN)} (n = {len(records(run, of, study.MEAN))}); counts from two "
        f"sets of samples of the base itself lie between {chance.low:.3f} and {chance.high:.3f} in 95 % of draws."
    )
    sigma = best_sigma(run, of)
    copies, sampled = by_noise(of, sigma), solved(run, of, study.BASE, OWN, SOLVED_WITHIN)
    found["Does noise on the weights find more than temperature?"] = (
        f"{SOLVED_WITHIN} completions of the base solve {copies.format()} % of the problems if each is of a perturbed "
        f"copy (sigma {sigma:g}, n = {copies.n} repeats), and {sampled.format()} % if they are sampled at temperature "
        f"{temperatures_in_words(records(run, of, study.BASE))}."
    )
    return found


_MACROS = {study.BASE: "Base", "es": "Es", "grpo": "Grpo"}


def numbers(run: SimpleNamespace, of: Records) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, for the paper."""
    found: dict[str, tuple[Any, str]] = {
        "CovProblems": (records(run, of, study.BASE)[0]["n"], "d"),
        "CovWithin": (SOLVED_WITHIN, "d"),
    }
    for model, macro in _MACROS.items():
        found[f"Cov{macro}Share"] = (100 * solved(run, of, model, "t1", SOLVED_WITHIN).value, ".1f")
    for model, macro in {"es": "Es", "grpo": "Grpo", "es_sampled": "Rewarded"}.items():
        found[f"Cov{macro}Change"] = (change(run, of, model, "t1").format(percent=False, digits=3), "")
    for macro, end in zip(("Hot", "Cold"), at_equal_accuracy(run, of), strict=True):
        found |= {f"Cov{macro}Level": (100 * end.level, ".1f"), f"Cov{macro}More": (end.more.format(), "")}
    return found
