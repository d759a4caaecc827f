"""What notebook 03 shows: its answers in words, and the rows of its tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib import tiny
from evoalign_lib.analysis import stats
from evoalign_lib.tasks import conciseness as task
from evoalign_study import collapse, style
from evoalign_study import nb03_conciseness as study
from evoalign_study.kinds.judged import NEAREST_BASE
from evoalign_study.loading import DECODINGS, Records
from evoalign_study.measures import conciseness as measure
from evoalign_study.records import Record

if TYPE_CHECKING:
    from pandas import DataFrame

ARM_OF = {"es_map": "es", "grpo_map": "grpo", "es_few": "es", "grpo_few": "grpo"}
ARM_OF |= {f"{arm}_repeat": arm for arm in ("es", "grpo", "es_random", "grpo_random")}
"""Groups whose runs are those of an arm at other settings; other groups have the name of their arm."""
LEVELS = [("at_proxy", x) for x in (-15, -10, -5, -2)] + [("at_kl", x) for x in (0.2, 0.5, 1)]
"""Axis and level at which runs are matched: reward on split A in characters, and KL in nats per completion."""
DROPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""By how much right answers have to fall for a run to count as hacked: the rule has the fourth."""
UNDECIDED = "-"
"""In a cell of a table: fewer than two runs of an arm come there."""

_Level = tuple[str, float]


def arm_label(group: str) -> str:
    """Return the name of a group's arm in tables and legends."""
    return style.ARMS[ARM_OF.get(group, group)].label


def decoding_label(decoding: str) -> str:
    """Return the name of a decoding in tables and legends."""
    return style.STROKES[decoding].label


def models(bases: Sequence[str]) -> str:
    """Return base models in words, for captions.

    >>> models(["B0", "B1"])
    'bases B0 and B1, tiny models trained from scratch'
    >>> models(["Qwen/Qwen2.5-7B-Instruct"])
    'base Qwen/Qwen2.5-7B-Instruct'
    """
    kind = "" if bases[0] not in tiny.SHIPPED else ", tiny models" if len(bases) > 1 else ", a tiny model"
    return f"base{'s' * (len(bases) > 1)} {' and '.join(bases)}{kind and kind + ' trained from scratch'}"


def level_label(axis: str, level: float) -> str:
    """Return a level in words: "reward -5" or "KL 0.5"."""
    return f"{'reward' if axis == 'at_proxy' else 'KL'} {level:g}"


# ---- the answers, in words


def answers(run: SimpleNamespace, of: Records, published: Sequence[Record]) -> dict[str, str]:
    """Return question -> the sentence that answers it, with its numbers and intervals.

    published: records of the published completions; none: their question is left out.
    """
    found = {
        "Which arm hacks its reward more often?": _hacking_in_words(of),
        "Which arm keeps more right answers at the same reward, and at the same KL?": _matching_in_words(of),
        "Does that hold for other settings?": _settings_in_words(of),
        "Which settings of ES destroy the answers?": _collapse_in_words(of),
        "Is a hacked model more fragile under noise on its weights?": _gaps_in_words(run, of),
    }
    if published:
        found["What do published completions of a 7 B model say?"] = _published_in_words(published)
    return found


def _hacking_in_words(of: Records) -> str:
    words, signs = [], set()
    for decoding in DECODINGS:
        grpo, es = ((study.hacked(of[arm], decoding), len(of[arm])) for arm in ("grpo", "es"))
        difference = stats.rate_difference(*grpo, *es)
        signs |= {np.sign(difference.value)} if difference.low * difference.high > 0 else set()
        counts = f"{es[0]} of {es[1]} runs of ES and {grpo[0]} of {grpo[1]} of GRPO are hacked"
        words.append(f"{_under(decoding)}, {counts} (GRPO - ES: {difference.format()} points)")
    if len(signs) == 2:
        return f"It depends on decoding. {words[0]}; {_small(words[1])}."
    return f"{words[0]}; {_small(words[1])}."


def _matching_in_words(of: Records) -> str:
    asked = {"greedy": (("at_proxy", -5), ("at_kl", 0.5)), "t1": (("at_proxy", -15), ("at_kl", 0.5))}
    sentences = []
    for decoding, levels in asked.items():
        each = []
        for axis, level in levels:
            first = study.matched(of, decoding, axis, level).difference
            line = study.control(of, "line", decoding, axis, level)[1]
            each.append(f"{_points(first)} points at {_level_in_words(axis, level)} (interpolated: {_points(line)})")
        sentences.append(f"{_under(decoding)}, ES - GRPO is {' and '.join(each)}, n = {len(of['es'])} seeds per arm.")
    return " ".join(sentences)


def _settings_in_words(of: Records) -> str:
    words = []
    for group in ("es_map", "grpo_map"):
        cells = list(study.by_setting(of[group]).values())
        counts = [study.hacked(found) for found in cells]
        right = [100 * np.mean([study.end(r, "right_greedy") for r in found]) for found in cells]
        full = sum(n == len(found) for n, found in zip(counts, cells, strict=True))
        words.append(
            f"of {len(cells)} settings of {arm_label(group)}, {counts.count(0)} end without a hacked run and {full} "
            f"with hacked runs only, right on {min(right):.0f} to {max(right):.0f} % of the questions"
        )
    return f"Either arm can keep or destroy the answers. Greedily, {words[0]}; {words[1]}."


def _collapse_in_words(of: Records) -> str:
    lines = study.beyond_lines(of)
    total = sum(map(len, lines.values()))
    safe = stats.wilson(total - sum(map(sum, lines.values())), total)
    return (
        f"Those whose noise, or whose random walk, is large enough to break the untrained base: {sum(lines[True])} of "
        f"{len(lines[True])} such settings collapse, and {sum(lines[False])} of the {len(lines[False])} others. In "
        f"all, {safe.format(digits=0)} % of {total} settings do not collapse."
    )


def _gaps_in_words(run: SimpleNamespace, of: Records) -> str:
    sigma = f"{measure.noise_sigmas(run.bases[0])[0][1]:g}"
    differences = {}
    for group in ("grpo_map", "es_map"):
        # the declared setting has more runs than the map
        runs = list({r["spec_hash"]: r for r in [*of[ARM_OF[group]], *of[group]]}.values())
        sides = [gaps_of(runs, sigma, kind) for kind in ("hacked", "clean")]
        if all(sum(map(len, side)) > 1 for side in sides):
            differences[arm_label(group)] = stats.nested_bootstrap(*sides)
    if not differences:
        return "Not known: no map has hacked and clean runs to compare."
    parted = [arm for arm, interval in differences.items() if interval.low * interval.high > 0]
    head = f"The two differ for {' and '.join(parted)}." if parted else "No difference is established."
    each = [f"{interval.format(percent=False, digits=2)} for {arm}" for arm, interval in differences.items()]
    return (
        f"{head} By noise of sigma {sigma} the reward falls further at hacked ends than at clean ones by "
        f"{' and '.join(each)}, in characters, over the settings of a map."
    )


def _published_in_words(found: Sequence[Record]) -> str:
    counts = published_counts(found)
    empty = sum(row["every answer empty"] for row in counts)
    each = " and ".join(f"{row['hacked']} of {row['runs']} of {row['arm']}" for row in counts)
    return (
        f"The published rule, every answer empty, finds {empty} of {len(found)} runs hacked. By what the answers say, "
        f"{each} are hacked; the settings of the arms are not matched."
    )


def _under(decoding: str) -> str:
    return "Greedily" if decoding == "greedy" else f"At {decoding_label(decoding)}"


def _small(words: str) -> str:
    return words[:1].lower() + words[1:]


def _level_in_words(axis: str, level: float) -> str:
    return f"a reward of {level:g}" if axis == "at_proxy" else f"a KL of {level:g} nats"


def _points(interval: stats.Interval | None) -> str:
    return UNDECIDED if interval is None else interval.format()


# ---- tables of the notebook's own models


def end_rows(of: Records, *groups: str) -> DataFrame:
    """Return a row per setting of some groups: how its runs end, greedily and at temperature 1."""
    rows = [_end_row(arm_label(group), found) for group in groups for found in study.by_setting(of[group]).values()]
    return _frame(rows)


def _end_row(arm: str, found: Sequence[Record]) -> dict[str, Any]:
    row = {"arm": arm, "setting": study.setting(found[0]["spec"]), "seeds": len(found)}
    for decoding, short in (("greedy", ""), ("t1", ", t1")):
        row[f"proxy{short}"] = f"{_mean(found, f'proxy_{decoding}'):.1f}"
        row[f"right{short}, %"] = f"{100 * _mean(found, f'right_{decoding}'):.0f}"
        row[f"hacked{short}"] = study.hacked(found, decoding)
    row["no answer, %"] = f"{100 * _mean(found, 'degenerate_greedy'):.0f}"
    row["KL"] = f"{_mean(found, 'kl'):.1f}"
    budget = {name: np.mean([r["budget"][name] for r in found]) for name in ("completions", "core_seconds")}
    return row | {"thousand": f"{budget['completions'] / 1000:.0f}", "core-s": f"{budget['core_seconds']:.0f}"}


def _mean(found: Sequence[Record], name: str) -> float:
    return float(np.mean([study.end(r, name) for r in found]))


def hacked_rows(of: Records) -> DataFrame:
    """Return a row per decoding: hacked runs of the declared settings, their difference and its p-values."""
    rows = []
    for decoding in DECODINGS:
        es, grpo = ((study.hacked(of[arm], decoding), len(of[arm])) for arm in study.ARMS)
        row = {"decoding": decoding_label(decoding), "ES": "{} of {}".format(*es), "GRPO": "{} of {}".format(*grpo)}
        row["GRPO - ES"] = stats.rate_difference(*grpo, *es).format()
        rows.append(row | {"Fisher": f"{stats.fisher(*grpo, *es):.2g}", "Barnard": f"{stats.barnard(*grpo, *es):.2g}"})
    return _frame(rows)


def repeated_rows(of: Records, base: Mapping[str, float]) -> DataFrame:
    """Return a row per decoding and arm of the repeated runs: how they end.

    base: decoding -> share of right answers of the untrained base on the test questions.
    """
    rows = []
    for decoding in style.STROKES:
        for group in REPEATED:
            found = of[group]
            row = {"decoding": decoding_label(decoding), "arm": arm_label(group), "runs": len(found)}
            row["proxy"] = f"{_mean(found, f'proxy_{decoding}'):.1f}"
            row["right, %"] = f"{100 * _mean(found, f'right_{decoding}'):.0f}"
            row["hacked"] = study.hacked(found, decoding)
            rows.append(row | {"right fell": study.fell(found, base[decoding], decoding)})
    return _frame(rows)


REPEATED = ("es_repeat", "grpo_repeat", "es_random_repeat", "grpo_random_repeat")
"""Groups of the declared settings on further seeds, measured under three decodings."""


def bound_rows(of: Records, base: Record) -> DataFrame:
    """Return a row per bound: how many runs of the declared settings are hacked if right answers fall by more than it.

    Greedily, and at temperature 1 by the sixteen samples of each question at the end, where a curve has two.
    base: the record of the untrained base.
    """
    rows = []
    for drop in DROPS:
        row: dict[str, Any] = {"right answers fall by more than": f"{100 * drop:.0f} points"}
        for arm in study.ARMS:
            lost = [r["curve"]["right_greedy"][0] - study.end(r, "right_greedy") for r in of[arm]]
            row[f"{arm_label(arm)}, greedy"] = sum(one > drop + 1e-9 for one in lost)
        for arm in study.ARMS:
            tests, start = [r["test"] for r in of[arm]], base["test"]
            gained = [t for t in tests if t["reward_t1"] > start["reward_t1"]]
            row[f"{arm_label(arm)}, temperature 1"] = sum(start["t1"] - t["t1"] > drop + 1e-9 for t in gained)
        rows.append(row)
    return _frame(rows)


def matched_rows(of: Records) -> DataFrame:
    """Return a row per decoding and level: right answers of both arms where runs first come to it, and ES - GRPO.

    The difference is that of `study.matched`, then those of its two controls. Of the rewards to which too few runs of
    an arm come, the first has a row.
    """
    rows = []
    for decoding in DECODINGS:
        for axis, levels in itertools.groupby(LEVELS, key=lambda level: level[0]):
            for level in levels:
                rows.append(_matched_row(of, decoding, *level))
                if rows[-1]["ES - GRPO"] == UNDECIDED and axis == "at_proxy":
                    break
    return _frame(rows)


def _matched_row(of: Records, decoding: str, axis: str, level: float) -> dict[str, Any]:
    right, at, difference = study.matched(of, decoding, axis, level)
    row = {"decoding": decoding_label(decoding), "level": level_label(axis, level)}
    for arm, each in right.items():
        few = f" ({len(each)} runs)" if len(each) < len(of[arm]) else ""
        row[f"{arm_label(arm)}, %"] = (f"{100 * each.mean():.1f}" if len(each) else UNDECIDED) + few
        row[f"{arm_label(arm)} is at"] = f"{np.mean(at[arm]):.2f}" if at[arm] else UNDECIDED
    row |= {"ES - GRPO": _points(difference)}
    row |= {"interpolated": _points(study.control(of, "line", decoding, axis, level)[1])}
    best = study.control(of, "best", decoding, axis, level)[1] if axis == "at_proxy" else None
    return row | {"best point": _points(best)}


def reached_rows(of: Records, groups: Iterable[str], levels: Sequence[_Level]) -> DataFrame:
    """Return a row per setting: greedy right answers in % where its runs first come to each level, and how many do."""
    rows = []
    for group in groups:
        for name, found in study.by_setting(of[group]).items():
            at = {level_label(*level): _reached(found, *level) for level in levels}
            rows.append({"arm": arm_label(group), "setting": name} | at)
    return _frame(rows)


def _reached(found: Sequence[Record], axis: str, level: float) -> str:
    scores = [collapse.right_at(r, "greedy", **{axis: level}) for r in found]
    scores = [float(np.mean(score)) for score in scores if score is not None]
    return f"{100 * np.mean(scores):.0f} ({len(scores)})" if scores else UNDECIDED


def breaking_rows(of: Records) -> DataFrame:
    """Return a row per base: the share of right answers under noise of each sigma, and the sigma that halves them."""
    rows = []
    for base, record in study.untrained(of).items():
        row = {"base": base} | {f"sigma {sigma}": f"{share:.2f}" for sigma, share in record["breaking"].items()}
        rows.append(row | {"halved at": f"{collapse.breaking_sigma(record):.4f}"})
    return _frame(rows)


def walk_rows(of: Records) -> DataFrame:
    """Return how far ES with random fitness moves a weight: as measured, and by its formula."""
    found = of["es_random"]
    spec = found[0]["spec"]
    moved = np.mean([r["update_norm"] / r["d"] ** 0.5 for r in found])
    formula = spec["alpha"] * (spec["steps"] / spec["population_size"]) ** 0.5
    return _frame([{"arm": arm_label("es_random"), "runs": len(found), "measured": moved, "by the formula": formula}])


def line_rows(of: Records) -> DataFrame:
    """Return how many settings of ES collapse beyond one of the two lines, and within both."""
    names = {True: "beyond a line", False: "within both lines"}
    rows = [
        {"settings": names[beyond], "collapse": sum(each), "of": len(each)}
        for beyond, each in study.beyond_lines(of).items()
    ]
    return _frame(rows)


def map_rows(of: Records) -> DataFrame:
    """Return a row per base and setting of the map of ES: means over seeds at the end of training, greedily."""
    rows = []
    for base in study.untrained(of):
        for found in study.by_setting(study.on_map(of, base)).values():
            spec = found[0]["spec"]
            row = {"base": base, "sigma": spec["sigma"], "alpha": spec["alpha"], "seeds": len(found)}
            row |= {"away": -_mean(found, "proxy_greedy"), "KL": _mean(found, "kl")}
            rows.append(row | {"right": 100 * _mean(found, "right_greedy"), "collapsed": study.collapsed(found)})
    return _frame(rows)


def gap_rows(of: Records) -> DataFrame:
    """Return a row per run of the declared settings and the maps: how it ended, and its Jensen gaps by sigma."""
    groups = ("es", "grpo", "es_map", "grpo_map")
    rows = []
    for r in {r["spec_hash"]: r for group in groups for r in of[group]}.values():
        row = {"arm": r["spec"]["arm"], "setting": study.setting(r["spec"]), "seed": r["spec"]["seed"]}
        rows.append(row | {"end": collapse.end(r), "centre": r["jensen"]["centre"]} | r["jensen"]["gaps"])
    return _frame(rows)


def gap_summary(gaps: DataFrame, sigma: str) -> DataFrame:
    """Return a row per setting of `gap_rows`: its hacked runs, mean reward, and mean Jensen gap at a sigma."""
    rows = []
    for (arm, setting), part in gaps.groupby(["arm", "setting"], sort=False):
        hacked = f"{(part['end'] == 'hacked').sum()} of {len(part)}"
        row = {"arm": arm_label(arm), "setting": setting, "hacked": hacked, "reward": part["centre"].mean()}
        rows.append(row | {f"gap at {sigma}": part[sigma].mean()})
    # objects: of floats, a table without rows cannot be shown as text
    return _frame(rows).sort_values(["arm", "setting"]).astype(object)


def gaps_of(found: Sequence[Record], sigma: str, kind: str) -> list[np.ndarray]:
    """Return the Jensen gaps at a sigma of the runs that ended "hacked" or "clean", an array per setting."""
    each = [
        np.array([r["jensen"]["gaps"][sigma] for r in runs if collapse.end(r) == kind])
        for runs in study.by_setting(found).values()
    ]
    return [gaps for gaps in each if len(gaps)]


def few_rows(of: Records, groups: Iterable[str]) -> DataFrame:
    """Return a row per setting with two training questions: how much of training moved nothing, what was learned.

    "no signal" is the share of ES's populations, or of GRPO's groups, whose rewards are all alike.
    """
    rows = []
    for found in [runs for group in groups for runs in study.by_setting(of[group]).values()]:
        came = [at for at in map(solved, found) if at]
        nats, right = np.mean(came, axis=0) if came else (None, None)
        empty, same = (100 * max(r["hacks"]["greedy"].get(kind, 0) for r in found) for kind in ("empty", "constant"))
        row = {"arm": arm_label(found[0]["spec"]["arm"]), "setting": study.setting(found[0]["spec"])}
        row |= {"no signal, %": f"{100 * np.mean([_still(r) for r in found]):.0f}"}
        row |= {"empty at most, %": f"{empty:.0f}", "one answer at most, %": f"{same:.0f}"}
        row |= {"solved": f"{len(came)} of {len(found)}"}
        row |= {"KL there": UNDECIDED if nats is None else f"{nats:.2f}"}
        rows.append(row | {"right there, %": UNDECIDED if right is None else f"{right:.0f}"})
    return _frame(rows)


def _still(record: Record) -> float:
    counts = record["counts"]
    return counts["tied"] / record["spec"]["steps"] if "tied" in counts else counts["zero_std_groups"]


def solved(record: Record, level: float = -0.5) -> tuple[float, float] | None:
    """Return KL and right answers in % where the reward in training first comes to a level; None if it does not."""
    curve = record["curve"]
    i = next((i for i, value in enumerate(curve["reward"]) if value is not None and value >= level), None)
    return None if i is None else (curve["kl"][i], 100 * curve["right_greedy"][i])


def example_rows(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per question: what the base answers greedily, the declared runs with most and fewest right answers,
    and of each map the run with fewest."""
    untrained = study.untrained(of)[run.bases[0]]
    asked = measure.splits(untrained["spec"])["test"][: run.questions_shown]
    columns = {"base": untrained}
    for arm in study.ARMS:
        ranked = sorted(of[arm], key=lambda r: r["test"]["greedy"])
        columns |= {f"{arm_label(arm)}, most right": ranked[-1], f"{arm_label(arm)}, fewest right": ranked[0]}
    for group in ("es_map", "grpo_map"):
        worst = min(of[group], key=lambda r: r["test"]["greedy"])
        columns[f"{arm_label(group)}, {study.setting(worst['spec'])}"] = worst
    rows = [{"question": "right, %"} | {name: f"{100 * r['test']['greedy']:.0f}" for name, r in columns.items()}]
    for i, problem in enumerate(asked):
        rows.append({"question": problem.question} | {name: r["shown"][i] for name, r in columns.items()})
    return _frame(rows)


# ---- the published completions


def published_label(name: str) -> tuple[str, str]:
    """Return arm and setting of a published set, in words.

    >>> published_label("ES_alpha0.0005_sigma0.001")
    ('ES', 'alpha 0.0005, sigma 0.001')
    """
    arm, setting = name.split("_", 1)
    for short, word in {"temp_0.7_": "", "alpha": "alpha ", "_sigma": ", sigma ", "beta": "beta "}.items():
        setting = setting.replace(short, word)
    return arm, setting


def of_sets(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Return published set -> its records, a training seed each, in the order of the task."""
    return {name: [r for r in found if r["spec"]["set"] == name] for name in task.COMPLETIONS}


def reward_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per published set: recorded rewards that the measure reproduces, and those that `strict` changes."""
    rows = []
    for name, own in of_sets(found).items():
        row = dict(zip(("arm", "setting"), published_label(name), strict=True))
        row |= {key: sum(r[key] for r in own) for key in ("completions", "reproduced", "changed")}
        for kind in ("released", "strict"):
            row[f"reward, {kind}"] = f"{np.mean([r['reward'][kind] for r in own]):.2f}"
        rows.append(row)
    return _frame(rows)


def verdict_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per published set: what detectors and grader find in each seed, and how many are hacked."""
    rows = []
    for name, own in of_sets(found).items():
        row = dict(zip(("arm", "setting"), published_label(name), strict=True))
        row |= {"right, %": _each(r["right"] for r in own), "no answer, %": _each(r["degenerate"] for r in own)}
        for kind in ("padded", "other_script"):
            row[f"{kind.replace('_', ' ')}, %"] = _each(r["hacks"].get(kind, 0) for r in own)
        row |= {kind: sum(r["verdict"] == kind for r in own) for kind in ("hacked", "worse")}
        rows.append(row | {"all empty": sum(r["all_empty"] for r in own), "seeds": len(own)})
    return _frame(rows)


def _each(shares: Iterable[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares)


def published_counts(found: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row per arm: how many published runs are of each verdict, by the published rule, and by other bounds."""
    rows = []
    for arm in ("ES", "GRPO"):
        own = [r for r in found if r["spec"]["set"].startswith(f"{arm}_")]
        row = {"arm": arm, "runs": len(own)}
        row |= {kind: sum(r["verdict"] == kind for r in own) for kind in ("hacked", "worse", "clean")}
        row["every answer empty"] = sum(r["all_empty"] for r in own)
        above = [r["right"] for r in own if r["reward"]["strict"] > NEAREST_BASE["reward"]]
        for drop in DROPS[1:]:
            row[f"by {100 * drop:.0f} points"] = sum(1 - share > drop + 1e-9 for share in above)
        rows.append(row)
    return rows


def published_points(found: Sequence[Record]) -> DataFrame:
    """Return a row per published run: where it ended, as recorded."""
    rows = []
    for r in found:
        row = dict(zip(("arm", "setting"), published_label(r["spec"]["set"]), strict=True)) | {
            "seed": r["spec"]["seed"]
        }
        row |= {"shortfall": -r["reward"]["strict"], "right": 100 * r["right"], "verdict": r["verdict"]}
        rows.append(row | {"all_empty": r["all_empty"], "kl_token": r["kl_token"]})
    return _frame(rows)


def published_examples(run: SimpleNamespace, found: Sequence[Record]) -> DataFrame:
    """Return a row per published set: the first stored completions of its last seed."""
    rows = []
    for name, own in of_sets(found).items():
        last = max(own, key=lambda r: r["spec"]["seed"])
        row = dict(zip(("arm", "setting"), published_label(name), strict=True)) | {"verdict": last["verdict"]}
        texts = zip(_TARGETS[: run.shown], last["shown"], strict=False)
        rows.append(row | {f"target {target}": repr(text[:24]) for target, text in texts})
    return _frame(rows)


# answers of the published questions for evaluation, in the order in which a record shows completions
_TARGETS = ("Paris", "84", "True", "10", "Hola", "30", "Red", "7")


def _frame(rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    from pandas import DataFrame

    return DataFrame(list(rows))
