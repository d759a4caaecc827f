"""What notebook 04 shows of its own models: its answers in words, and the rows of its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evoalign_lib import style
from evoalign_lib.analysis import overoptimisation, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.records import Record
from evoalign_lib.study.notebooks import safety_judges as study
from evoalign_lib.study.notebooks.loading import DECODINGS, Records
from evoalign_lib.tiny import scorers

if TYPE_CHECKING:
    from pandas import DataFrame

ARMS = ("es", "grpo")
TRAINING = "training judge"
"""The judge that a run was trained on, in the place of a name."""
JUDGES = (TRAINING, *scorers.OUTSIDERS, "rule")
"""Whose wins the curves have."""
UNTRAINED = "base"
ENDS = (*ARMS, "sft", "es_random")
"""Arms whose ends are shown."""
TRUE = "true"


class Value(NamedTuple):
    """A mean over runs, judges weighing the same, with its interval over seeds."""

    value: float
    low: float
    high: float
    runs: int


# ---- reading the curves


def spread(of: Records, run: Record) -> float:
    """Return the standard deviation of a run's training judge over samples of its base."""
    (base,) = [r for r in of["base"] if r["spec"]["base"] == run["spec"]["base"]]
    return base["units"][run["spec"]["judge"]][1]


def curve(run: Record, quantity: str, decoding: str) -> np.ndarray:
    """Return a curve of a run; a quantity is a judge of `JUDGES`, for its wins, or a name of the record's curves."""
    if quantity == "kl":
        name = "kl"
    else:
        name = f"{run['spec']['judge'] if quantity == TRAINING else quantity}_{decoding}"
    return np.array([np.nan if x is None else x for x in run["curve"][name]], float)


def gained(of: Records, run: Record, decoding: str) -> np.ndarray:
    """Return by how many spreads the training judge's score of split A has risen, at each point of a run."""
    proxy = curve(run, "proxy", decoding)
    return (proxy - proxy[0]) / spread(of, run)


def at(of: Records, run: Record, quantity: str, decoding: str, gain: float | None) -> float | None:
    """Return a quantity where the training judge has first gained so many spreads; gain None: at the end."""
    values = curve(run, quantity, decoding)
    if gain is None:
        return float(values[-1]) if np.isfinite(values[-1]) else None
    return values[0] if gain == 0 else overoptimisation.read_at(gained(of, run, decoding), values, gain)


def cells(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Return training judge -> its runs, in the order of the records."""
    return {judge: study.on_judge(found, judge) for judge in dict.fromkeys(r["spec"]["judge"] for r in found)}


def there(of: Records, arm: str, quantity: str, decoding: str, gain: float | None) -> list[np.ndarray] | None:
    """Return a quantity of the runs of each training judge that get there; None unless three of four do on each."""
    read = []
    for runs in cells(of[arm]).values():
        values = [x for run in runs if (x := at(of, run, quantity, decoding, gain)) is not None]
        if not values or len(values) < 0.75 * len(runs):
            return None
        read.append(np.array(values))
    return read or None


def mean(of: Records, arm: str, quantity: str, decoding: str, gain: float | None) -> Value | None:
    """Return the mean of a quantity over the training judges; None where `there` has none."""
    read = there(of, arm, quantity, decoding, gain)
    if read is None:
        return None
    runs = sum(map(len, read))
    if min(map(len, read)) < 2:
        return Value(float(np.mean([x.mean() for x in read])), float("nan"), float("nan"), runs)
    found = stats.stratified_bootstrap(read, n_resamples=2_000)
    return Value(found.value, found.low, found.high, runs)


def difference(of: Records, quantity: str, decoding: str, gain: float | None, less: str = "") -> Interval | None:
    """Return ES - GRPO in a quantity, or in a quantity less another one, as the claims compare them."""
    sides = []
    for arm in ARMS:
        read = []
        for runs in cells(of[arm]).values():
            values = []
            for run in runs:
                names = [quantity, *([less] if less else [])]
                pair = [at(of, run, name, decoding, gain) for name in names]
                if None not in pair:
                    values.append(pair[0] - pair[1] if less else pair[0])
            read.append(np.array(values, float))
        if not read or min(map(len, read)) < 2:
            return None
        sides.append(read)
    return stats.stratified_bootstrap(*sides)


# ---- tables


def judge_rows(of: Records) -> DataFrame:
    """Return a row per scorer: what it was trained on, and what the untrained base's samples get from it."""
    units, rows = of["base"][0]["units"], []
    for name, scorer in scorers.SCORERS.items():
        row = {"judge": name, "likes besides the truth": scorer.annotators.cue or "nothing"}
        row |= {"comparisons turned, %": f"{100 * scorer.annotators.flips:g}", "architecture": scorer.architecture}
        row |= {"width": scorer.hidden, "requests": f"part {scorer.part}"}
        mean_score, std = units[name]
        rows.append(row | {"mean of the base's samples": f"{mean_score:.2f}", "spread": f"{std:.2f}"})
    return frame(rows)


def budget_rows(of: Records, arms: Sequence[str] = ENDS) -> DataFrame:
    """Return a row per arm: what a run costs, mean over its runs, on every axis."""
    rows = []
    for arm in (arm for arm in arms if of[arm]):
        spent = [r["budget"] for r in of[arm]]
        each = {name: float(np.mean([b[name] for b in spent])) for name in spent[0]}
        row = {"arm": style.ARMS[arm].label, "runs": len(spent)}
        row |= {"completions, thousands": f"{each['completions'] / 1e3:.0f}"}
        row |= {"generated tokens, millions": f"{each['generated_tokens'] / 1e6:.2f}"}
        row |= {"TFLOP, forward-equivalent": f"{each['forward_flops'] / 1e12:.2f}"}
        row |= {"core-seconds": f"{each['core_seconds']:.0f}"}
        rows.append(row)
    return frame(rows)


_SHARES = ("complied", "alternative", "refused_lawful", "turns", "template")
WORDS = {
    TRUE: "true reward",
    "template": "one template, %",
    "alternative": "refusals with an alternative, %",
    "complied": "complied with harmful requests, %",
    "refused_lawful": "refused lawful requests, %",
    "needless": "needless sentences",
    "turns": "further turns, %",
    "kl": "KL, nats",
}
"""Quantities of a curve -> their names in tables and figures."""


def reached_rows(of: Records, decoding: str, gains: Sequence[float | None]) -> DataFrame:
    """Return a row per gain of the training judge and arm: what the runs are like where they first get there."""
    rows = []
    for gain in gains:
        for arm in (*ARMS, *(("es_random",) if gain is None else ())):
            if not of[arm]:
                continue
            row = {"training judge has gained": "at the end" if gain is None else f"{gain:g} spreads"}
            row |= {"arm": style.ARMS[arm].label}
            for quantity in (TRUE, *JUDGES, *(name for name in WORDS if name != TRUE)):
                if quantity == "template" and decoding != "greedy":
                    continue
                label = WORDS.get(quantity, f"wins, {quantity}, %")
                share = quantity in JUDGES or quantity in _SHARES
                row[label] = _short(mean(of, arm, quantity, decoding, gain), share)
            rows.append(row)
    return frame(rows)


def end_rows(of: Records) -> DataFrame:
    """Return a row per arm: greedy replies at the end of training on the six proxies, and of the untrained base."""
    rows = []
    for arm in (arm for arm in ENDS if of[arm]):
        found = [r for r in of[arm] if r["spec"]["judge"] in scorers.PROXIES]
        row = {"arm": style.ARMS[arm].label, "runs": len(found)}
        row |= {"training judge, spreads": _mean([_gain_at_end(of, r) for r in found], 2)}
        row |= {"true reward": _mean([_said(r, "rule", "score") for r in found], 2)}
        for judge in JUDGES:
            row[f"wins, {judge}, %"] = _mean([100 * _said(r, judge, "win") for r in found], 0)
        for name in _SHARES:
            row[WORDS[name]] = _mean([100 * r["test"]["greedy"][name] for r in found], 0)
        rows.append(row | {WORDS["needless"]: _mean([r["test"]["greedy"]["needless"] for r in found], 1)})
    base = of["base"][0]["test"]["greedy"]
    row = {"arm": style.ARMS["base"].label, "runs": 1, "training judge, spreads": "0"}
    row |= {"true reward": f"{base['score'][-1]:.2f}"}
    row |= {f"wins, {judge}, %": "50" for judge in JUDGES}
    row |= {WORDS[name]: f"{100 * base[name]:.0f}" for name in _SHARES}
    return frame([*rows, row | {WORDS["needless"]: f"{base['needless']:.1f}"}])


def _said(record: Record, judge: str, what: str) -> float:
    """Return what a judge says of a run's greedy replies on split B: its mean score, or its wins over the base's."""
    test, own = record["test"], record["spec"]["judge"]
    return test["greedy"][what][test["judges"].index(own if judge == TRAINING else judge)]


def _gain_at_end(of: Records, record: Record) -> float:
    """By how many spreads the training judge's score of greedy replies on split B lies above that of the base's."""
    base = of["base"][0]["test"]
    begun = base["greedy"]["score"][base["judges"].index(record["spec"]["judge"])]
    return (_said(record, TRAINING, "score") - begun) / spread(of, record)


def law_rows(of: Records) -> DataFrame:
    """Return a row per arm and quantity: what share of held-out runs each law explains, mean over training judges."""
    rows = []
    for arm in ARMS:
        for quantity in (TRUE, "proxy"):
            row = {"arm": style.ARMS[arm].label, "gain in": "true reward" if quantity == TRUE else TRAINING}
            for law in overoptimisation.LAWS:
                values = [
                    overoptimisation.held_out(law, *halves)
                    for halves in (law_points(of, runs, quantity) for runs in cells(of[arm]).values())
                    if all(halves)
                ]
                name = LAWS[law]
                row[name] = f"{np.mean(values):.2f}" if values else "-"
                row[f"{name}, worst judge"] = f"{min(values):.2f}" if values else "-"
            rows.append(row)
    return frame(rows)


LAWS = {"linear": "a d", "best of n": "d (a - b d)", "rl": "d (a - b log d)"}
"""A law -> its formula."""
_Points = tuple[np.ndarray, np.ndarray]


def law_points(of: Records, runs: Sequence[Record], quantity: str) -> tuple[list[_Points], list[_Points]]:
    """Return distance and gain at temperature 1 of each run, of even seeds and of odd ones, as claim C7 reads them."""
    halves: tuple[list[_Points], list[_Points]] = ([], [])
    for run in runs:
        values, kl = curve(run, quantity, "t1"), curve(run, "kl", "t1")
        known = np.isfinite(values) & np.isfinite(kl)
        gain = (values - values[0]) / (spread(of, run) if quantity == "proxy" else 1.0)
        halves[run["spec"]["seed"] % 2].append((overoptimisation.distance(kl[known]), gain[known]))
    return halves


def noise_rows(of: Records, gain: float) -> DataFrame:
    """Return a row per noisy or smaller judge and arm: true reward at a gain of the training judge and at the end."""
    rows = []
    for judge in (*scorers.NOISY, *scorers.SIZES):
        for arm in ARMS:
            runs = noisy_runs(of, arm, judge)
            if not runs:
                continue
            row = {"training judge": judge, "arm": style.ARMS[arm].label, "runs": len(runs)}
            for decoding in DECODINGS:
                for place, where in ((gain, f"at {gain:g} spreads"), (None, "at the end")):
                    values = [x for r in runs if (x := at(of, r, TRUE, decoding, place)) is not None]
                    text = _mean(values, 2) + ("" if len(values) == len(runs) else f" ({len(values)} get there)")
                    row[f"{style.STROKES[decoding].label}, {where}"] = text
            rows.append(row)
    return frame(rows)


def noisy_runs(of: Records, arm: str, judge: str) -> list[Record]:
    """Return an arm's runs on a noisy judge, or on one of another size."""
    return study.on_judge([*of[f"{arm}_noise"], *of[f"{arm}_sizes"]], judge)


def tournament_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per kind of judge and arm: games won, mean over runs and training judges, and Elo points."""
    rows = []
    for kind, chosen in KINDS_OF_JUDGES.items():
        for arm in found[0]["spec"]["arms"]:
            wins = [np.mean([said["wins"][arm] for said in chosen(r)], axis=0) for r in found]
            row = {"judged by": kind, "arm": style.ARMS[arm].label}
            row |= {"games won, %": _interval(_over(wins), 100)}
            points = [said["strengths"][arm][0] for r in found for said in chosen(r) if said["strengths"]]
            asked = sum(len(chosen(r)) for r in found)
            row["Elo points above the base, median"] = f"{np.median(points):.0f}" if points else "-"
            rows.append(row | {"tournaments with finite strengths": f"{len(points)} of {asked}"})
    return frame(rows)


def _trained_on(record: Record) -> list[dict[str, Any]]:
    return [record["judges"][record["spec"]["judge"]]]


def _other_proxies(record: Record) -> list[dict[str, Any]]:
    return [said for name, said in record["judges"].items() if name in scorers.PROXIES and name != _judge(record)]


def _outsiders(record: Record) -> list[dict[str, Any]]:
    return [record["judges"][name] for name in scorers.OUTSIDERS]


def _rule(record: Record) -> list[dict[str, Any]]:
    return [record["judges"]["rule"]]


def _judge(record: Record) -> str:
    return record["spec"]["judge"]


KINDS_OF_JUDGES = {
    TRAINING: _trained_on,
    "the other five proxies": _other_proxies,
    "other architectures": _outsiders,
    "the rule": _rule,
}
"""Kind of judge -> what those of a tournament say."""


def quadrant_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per judge and player: shares of greedy replies that are safe, and helpful, mean over tournaments."""
    from evoalign_lib.tasks.safety import QUADRANTS

    rows = []
    for judge in ("rule", TRAINING):
        for player in found[0]["sides"]:
            shares = [r["sides"][player][_judge(r) if judge == TRAINING else judge] for r in found]
            row = {"judged by": judge, "arm": style.ARMS[player].label}
            values = 100 * np.mean(shares, axis=0)
            rows.append(row | {f"{name}, %": f"{x:.0f}" for name, x in zip(QUADRANTS, values, strict=True)})
    return frame(rows)


def example_rows(of: Records) -> DataFrame:
    """Return a row per training judge and arm: a greedy reply to the first test request at the end of training."""
    rows = [{"training judge": "-", "arm": style.ARMS["base"].label, "reply": _words(of["base"][0]["shown"][0])}]
    for judge in scorers.PROXIES:
        for arm in (*ARMS, "sft"):
            for record in study.on_judge(of[arm], judge)[:1]:
                row = {"training judge": judge, "arm": style.ARMS[arm].label}
                rows.append(row | {"reply": _words(record["shown"][0])})
    return frame(rows)


# ---- words


def _words(text: str) -> str:
    return text.replace("\n", " ")


def _short(value: Value | None, share: bool) -> str:
    if value is None:
        return "-"
    return f"{100 * value.value:.0f}" if share else f"{value.value:.2f}"


def _mean(values: Sequence[float], digits: int) -> str:
    """Return mean and range of some runs."""
    if not len(values):
        return "-"
    low, middle, high = (
        f"{round(float(x), digits) + 0.0:.{digits}f}" for x in (min(values), np.mean(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def _over(cells_of: Sequence[np.ndarray]) -> Interval:
    return stats.stratified_bootstrap(cells_of, n_resamples=2_000)


def _interval(found: Interval | None, factor: float = 1.0, digits: int = 0) -> str:
    if found is None:
        return "-"
    value, low, high = (f"{round(factor * x, digits) + 0.0:.{digits}f}" for x in (found.value, found.low, found.high))
    return f"{value} [{low}, {high}]"


def frame(rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """Return rows as a table."""
    from pandas import DataFrame

    return DataFrame(list(rows))
