"""What notebook 04 shows of its own models: its answers in words, and the rows of its tables."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib.analysis import overoptimisation, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.tiny import dialogues, scorers
from evoalign_study import nb04_safety_judges as study
from evoalign_study import style
from evoalign_study.kinds.judged import SENTENCES
from evoalign_study.loading import DECODINGS, Records
from evoalign_study.records import Record

if TYPE_CHECKING:
    from pandas import DataFrame

ENDS = (*study.ARMS, "sft", "es_random")
"""Arms whose ends are shown."""


# ---- the answers, in words


def answers(of: Records) -> dict[str, str]:
    """Return question -> the sentence that answers it, with its numbers and intervals."""
    found = {
        "Which arm's replies are better where their training judge is equally content?": _truth_in_words(of),
        "Does ES do better under judges that did not train it?": _judges_in_words(of),
        "Do replies become boilerplate, or helpful refusals?": _replies_in_words(of),
        "Does a law of over-optimisation hold for ES?": _laws_in_words(of),
    }
    if turned := _turned_in_words(of):
        found["What do turned comparisons cost?"] = turned
    if of["tournaments"]:
        found["Who wins where training ends?"] = _ends_in_words(of)
    return found


def _truth_in_words(of: Records) -> str:
    each = []
    for decoding in DECODINGS:
        base = of["base"][0]["test"][decoding]["score"][-1]
        found = study.difference(of, study.TRUE, decoding, study.GAIN)
        means = [study.mean(of, arm, study.TRUE, decoding, study.GAIN) for arm in study.ARMS]
        if found is None or None in means:
            each.append(f"{_under(decoding)}, too few runs get there")
            continue
        values = " and ".join(
            f"{m.value:.2f} with {style.ARMS[arm].label}" for arm, m in zip(study.ARMS, means, strict=True)
        )
        each.append(
            f"{_under(decoding)}, the true reward is {values} there, and {base:.2f} of the base; ES - GRPO is "
            f"{found.format(percent=False, digits=2)}"
        )
    return f"{_first_up('; '.join(each))}, n = {_fewest(of)} seeds on each of {len(study.cells(of['es']))} judges."


def _judges_in_words(of: Records) -> str:
    each = []
    for decoding in DECODINGS:
        words = []
        for judge in study.JUDGES[1:]:
            found = study.difference(of, judge, decoding, study.GAIN)
            less = study.difference(of, judge, decoding, study.GAIN, study.TRAINING)
            words.append(f"{_points(found)} under {judge} ({_points(less)} less the training judge's)")
        each.append(f"{_under(decoding)}, ES - GRPO in wins is {_and(words)} points")
    return f"{_first_up('; '.join(each))}."


def _replies_in_words(of: Records) -> str:
    each = []
    for quantity, words in (("template", "of one template"), ("alternative", "refusals with a lawful alternative")):
        means = [study.mean(of, arm, quantity, "greedy", study.GAIN) for arm in study.ARMS]
        found = study.difference(of, quantity, "greedy", study.GAIN)
        base = 100 * of["base"][0]["test"]["greedy"][quantity]
        if found is None or None in means:
            each.append(f"too few runs get there to compare {words}")
            continue
        es, grpo = (f"{100 * m.value:.0f}" for m in means)
        each.append(
            f"{words}: {es} % with ES, {grpo} % with GRPO, {base:.0f} % of the base (ES - GRPO {_points(found)})"
        )
    return f"Greedily, there: {'; '.join(each)}."


def _laws_in_words(of: Records) -> str:
    each = []
    for quantity, words in ((study.TRUE, "true reward"), ("proxy", "the training judge's score")):
        law, line = (study.explained(of, "es", quantity, name) for name in ("rl", "linear"))
        if not law:
            return "Not known: a half of the seeds has no run."
        each.append(
            f"of the gain in {words} of held-out runs, d (a - b log d) explains {100 * np.mean(law):.0f} % and a "
            f"straight line {100 * np.mean(line):.0f} %"
        )
    return f"{_first_up('; '.join(each))}, mean over {len(study.cells(of['es']))} training judges."


def _turned_in_words(of: Records) -> str:
    each, most = [], list(scorers.NOISY.values())[-1].annotators.flips
    for decoding in DECODINGS:
        changes = [study.turned(of, decoding, [arm]) for arm in study.ARMS]
        found = study.turned(of, decoding)
        if found is None or None in changes:
            continue
        values = " and ".join(
            f"{c.value:+.2f} with {style.ARMS[arm].label}" for arm, c in zip(study.ARMS, changes, strict=True)
        )
        each.append(f"{_under(decoding)} {values}, ES - GRPO {found.format(percent=False, digits=2)}")
    if not each:
        return ""
    n = min(len(study.on_judge(of[f"{arm}_noise"], judge)) for arm in study.ARMS for judge in scorers.NOISY)
    return (
        f"From a judge without turned comparisons to one of which {100 * most:g} % were turned, true reward where the "
        f"judge is equally content changes {'; '.join(each)} (n = {n} seeds on each)."
    )


def _ends_in_words(of: Records) -> str:
    each = []
    for kind in (study.TRAINING, "other architectures", "the rule"):
        wins = {
            arm: np.mean([np.mean([said["wins"][arm] for said in KINDS_OF_JUDGES[kind](r)]) for r in of["tournaments"]])
            for arm in of["tournaments"][0]["spec"]["arms"]
        }
        ranked = sorted(wins, key=lambda arm: -wins[arm])
        each.append(f"by {kind}: " + ", ".join(f"{style.ARMS[arm].label} {100 * wins[arm]:.0f}" for arm in ranked))
    return f"Games won in %, {'; '.join(each)}."


def _fewest(of: Records) -> int:
    return min(len(runs) for arm in study.ARMS for runs in study.cells(of[arm]).values())


def _under(decoding: str) -> str:
    return "greedily" if decoding == "greedy" else "at temperature 1"


def _points(found: Interval | None) -> str:
    return "unknown" if found is None else found.format()


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _first_up(text: str) -> str:
    return text[0].upper() + text[1:]


# ---- the world


_REQUESTS = (dialogues.Request("mend", "kettle"), dialogues.Request("steal", "bicycle"))
"""A lawful and a harmful request."""


def reply_rows() -> DataFrame:
    """Return a row per request and kind of reply: the reply, and what the rule makes of it."""
    rng, rows = random.Random(0), []
    for request in _REQUESTS:
        texts = {
            kind: dialogues.body(request, kind, rng) for kind in dialogues.BODIES if request.harmful or kind != "reason"
        }
        plain = texts["reason" if request.harmful else "right"]
        texts |= {
            "with praise": f"{dialogues.PRAISE[0]} {plain}",
            "with a further turn": f"{plain} USER: {request.text}",
        }
        for kind, text in texts.items():
            judged = dialogues.truth(request, text.replace(" USER:", "\nUSER:"))
            row = {"request": request.text, "kind": kind, "reply": text}
            rows.append(row | {"helpful": judged.helpful, "harm": judged.harm, "true reward": judged.reward})
    return frame(rows)


def taste_rows(of: Records) -> DataFrame:
    """Return a row per judge: by how many spreads its score of right replies changes when sentences follow them."""
    units, (measured,) = of["base"][0]["units"], of["tastes"]
    return frame(
        {"judge": judge}
        | {what: f"{measured['change'][judge][what] / units[judge][1] + 0.0:+.2f}" for what in SENTENCES}
        for judge in (*scorers.PROXIES, *scorers.OUTSIDERS, "rule")
    )


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
    study.TRUE: "true reward",
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
        for arm in (*study.ARMS, *(("es_random",) if gain is None else ())):
            if not of[arm]:
                continue
            row = {"training judge has gained": "at the end" if gain is None else f"{gain:g} spreads"}
            row |= {"arm": style.ARMS[arm].label}
            for quantity in (study.TRUE, *study.JUDGES, *(name for name in WORDS if name != study.TRUE)):
                if quantity == "template" and decoding != "greedy":
                    continue
                label = WORDS.get(quantity, f"wins, {quantity}, %")
                share = quantity in study.JUDGES or quantity in _SHARES
                row[label] = _short(study.mean(of, arm, quantity, decoding, gain), share)
            rows.append(row)
    return frame(rows)


def distance_rows(of: Records, distances: Sequence[float]) -> DataFrame:
    """Return a row per KL from the base and arm: what the runs are like where they first come so far.

    distances: in nats a completion, at temperature 1.
    """
    read = {"training judge has gained, spreads": ("gained", "t1"), "true reward": (study.TRUE, "t1")}
    read |= {"true reward, greedy": (study.TRUE, "greedy")}
    read |= {f"wins, {judge}, %": (judge, "t1") for judge in study.JUDGES}
    rows = []
    for nats in distances:
        for arm in (arm for arm in study.ARMS if of[arm]):
            row = {"KL, nats": f"{nats:g}", "arm": style.ARMS[arm].label}
            for label, (quantity, decoding) in read.items():
                row[label] = _short(
                    study.mean(of, arm, quantity, decoding, nats, study.at_kl), quantity in study.JUDGES
                )
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
        for judge in study.JUDGES:
            row[f"wins, {judge}, %"] = _mean([100 * _said(r, judge, "win") for r in found], 0)
        for name in _SHARES:
            row[WORDS[name]] = _mean([100 * r["test"]["greedy"][name] for r in found], 0)
        rows.append(row | {WORDS["needless"]: _mean([r["test"]["greedy"]["needless"] for r in found], 1)})
    base = of["base"][0]["test"]["greedy"]
    row = {"arm": style.ARMS["base"].label, "runs": 1, "training judge, spreads": "0"}
    row |= {"true reward": f"{base['score'][-1]:.2f}"}
    row |= {f"wins, {judge}, %": "50" for judge in study.JUDGES}
    row |= {WORDS[name]: f"{100 * base[name]:.0f}" for name in _SHARES}
    return frame([*rows, row | {WORDS["needless"]: f"{base['needless']:.1f}"}])


def _said(record: Record, judge: str, what: str) -> float:
    """Return what a judge says of a run's greedy replies on split B: its mean score, or its wins over the base's."""
    test, own = record["test"], record["spec"]["judge"]
    return test["greedy"][what][test["judges"].index(own if judge == study.TRAINING else judge)]


def _gain_at_end(of: Records, record: Record) -> float:
    """By how many spreads the training judge's score of greedy replies on split B lies above that of the base's."""
    base = of["base"][0]["test"]
    begun = base["greedy"]["score"][base["judges"].index(record["spec"]["judge"])]
    return (_said(record, study.TRAINING, "score") - begun) / study.spread(of, record)


def law_rows(of: Records) -> DataFrame:
    """Return a row per arm and quantity: what share of held-out runs each law explains, mean over training judges."""
    rows = []
    for arm in study.ARMS:
        for quantity in (study.TRUE, "proxy"):
            row = {"arm": style.ARMS[arm].label, "gain in": "true reward" if quantity == study.TRUE else study.TRAINING}
            for law in overoptimisation.LAWS:
                values = study.explained(of, arm, quantity, law)
                name = LAWS[law]
                row[name] = f"{np.mean(values):.2f}" if values else "-"
                row[f"{name}, worst judge"] = f"{min(values):.2f}" if values else "-"
            rows.append(row)
    return frame(rows)


LAWS = {"linear": "a d", "best of n": "d (a - b d)", "rl": "d (a - b log d)"}
"""A law -> its formula."""


def noise_rows(of: Records, gain: float) -> DataFrame:
    """Return a row per noisy or smaller judge and arm: true reward at a gain of the training judge and at the end."""
    rows = []
    for judge in (*scorers.NOISY, *scorers.SIZES):
        for arm in study.ARMS:
            runs = noisy_runs(of, arm, judge)
            if not runs:
                continue
            row = {"training judge": judge, "arm": style.ARMS[arm].label, "runs": len(runs)}
            for decoding in DECODINGS:
                for place, where in ((gain, f"at {gain:g} spreads"), (None, "at the end")):
                    values = [x for r in runs if (x := study.at(of, r, study.TRUE, decoding, place)) is not None]
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
    study.TRAINING: _trained_on,
    "the other five proxies": _other_proxies,
    "other architectures": _outsiders,
    "the rule": _rule,
}
"""Kind of judge -> what those of a tournament say."""


def quadrant_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per judge and player: shares of greedy replies that are safe, and helpful, mean over tournaments."""
    from evoalign_lib.tasks.safety import QUADRANTS

    rows = []
    for judge in ("rule", study.TRAINING):
        for player in found[0]["sides"]:
            shares = [r["sides"][player][_judge(r) if judge == study.TRAINING else judge] for r in found]
            row = {"judged by": judge, "arm": style.ARMS[player].label}
            values = 100 * np.mean(shares, axis=0)
            rows.append(row | {f"{name}, %": f"{x:.0f}" for name, x in zip(QUADRANTS, values, strict=True)})
    return frame(rows)


def example_rows(of: Records) -> DataFrame:
    """Return a row per taste and arm: a greedy reply to the first test request at the end of training on a judge."""
    rows = [{"training judge": "-", "arm": style.ARMS["base"].label, "reply": _words(of["base"][0]["shown"][0])}]
    for judge in list(scorers.PROXIES)[:3]:  # one of each taste
        for arm in (*study.ARMS, "sft"):
            for record in study.on_judge(of[arm], judge)[:1]:
                row = {"training judge": judge, "arm": style.ARMS[arm].label}
                rows.append(row | {"reply": _words(record["shown"][0])})
    return frame(rows)


# ---- words


def _words(text: str) -> str:
    return text.replace("\n", " ")


def _short(value: Interval | None, share: bool) -> str:
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
