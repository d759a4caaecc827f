"""Notebook 03, conciseness: presets, groups of runs, results, tables and figures."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from evoalign_lib import arms, tiny
from evoalign_lib.analysis import hacking, overoptimisation, stats
from evoalign_study import collapse, loading, plots, style
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.judged import published_specs
from evoalign_study.loading import DECODINGS, After, Group, Groups, Records, of_runs, own_settings
from evoalign_study.measures import conciseness as measure
from evoalign_study.records import Record, accuracy_matrix
from evoalign_study.results import MISSING, Results, cells, excludes_zero, stated
from evoalign_study.runs import CONCISENESS, scales, where

NOTEBOOK = "03_conciseness"
ARMS = ("es", "grpo")
presets, TINY, SMOKE, FULL = scales(
    {
        "bases": ["B0", "B1"],
        "retrain": [],  # groups that `force` trains again; empty: all
        "questions": "",  # at scale full: a file of your own
        "fewer_prompts": (2, 2, None),  # of section 10; None: no such runs
        **CONCISENESS,
        "curve_points": (16, 3),
        "seeds_judge": (16, 2),  # of the declared settings
        "seeds_repeat": (16, 2, 0),  # further seeds of the declared settings, measured under all decodings
        "seeds_walk": (16, 1, 0),  # of random fitness, measured so: the walk whose loss is taken off that of ES
        "seeds_map": (4, 1),  # of the other settings
        "seeds_elsewhere": (2, 1),  # on the other bases
        "sigma": ([0.003, 0.01, 0.03], [0.01, 0.03], [3e-4, 1e-3, 3e-3]),  # from here: the axes of the maps
        "alpha": ([0.0015, 0.005, 0.015], [0.005, 0.015], [1.5e-4, 5e-4, 1.5e-3]),
        "learning_rate": ([1e-4, 3e-4, 1e-3], [3e-4], [1e-6, 3e-6, 1e-5]),
        "beta": ([0.0, 0.04, 0.4], [0.0]),
        "repeat_points": (10, 3),  # of the curves of the repeated runs: more do not fit into a record
        "shown": 3,  # published completions printed from each set
        "questions_shown": 4,
    },
    "Qwen/Qwen2.5-7B-Instruct",
)
FEW = ("es_few", "grpo_few")
"""The groups of section 10, which are empty without `fewer_prompts`."""


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the groups of runs by name. All but "published" are runs of the notebook's own models."""
    here, elsewhere = run.bases[:1], run.bases[1:]
    judge, some = run.seeds_judge, run.seeds_map

    def train(arm: str, bases: Sequence[str], seeds: int | Sequence[int], changes: Sequence[Any] = ({},)) -> Group:
        return Group(arm, bases, seeds, own_settings(run, arm), changes)

    def on_map(arm: str) -> list[dict[str, float]]:
        names = arms.swept(arm)
        return [dict(zip(names, pair, strict=True)) for pair in product(*(vars(run)[name] for name in names))]

    def few(name: str) -> list[dict[str, float]]:
        return [{"unique_prompts": run.fewer_prompts, name: x} for x in vars(run)[name] if run.fewer_prompts]

    again = [{"sampled_at": run.temperatures, "curve_points": run.repeat_points}]
    further = range(judge, judge + run.seeds_repeat)  # only seeds that were not used before
    nulls = min(some, run.seeds_repeat)
    first = {"base": where(of["base"], base=run.bases[0])} if "base" in of else {}
    return {
        "base": base_specs(run.bases, of_runs(vars(run)), run.scale),
        **{arm: train(arm, here, judge) for arm in ARMS},
        **{f"{arm}_repeat": train(arm, here, further, again) for arm in ARMS},
        "es_random_repeat": train("es_random", here, run.seeds_walk, again),
        "grpo_random_repeat": train("grpo_random", here, nulls, again),
        **{f"{arm}_map": train(arm, here, some, on_map(arm)) for arm in ARMS},
        "es_map_elsewhere": train("es", elsewhere, run.seeds_elsewhere, on_map("es")),
        **{f"{arm}_few": train(arm, here, some, few(name)) for arm, name in (("es", "alpha"), ("grpo", "beta"))},
        **{arm: train(arm, here, some) for arm in ("es_sampled", "es_random", "grpo_random")},
        "published": published_specs(run.scale),
        # the first base, decoded at the temperatures of the repeated runs
        "decodings": loading.decodings(run, first, ["base"]) if run.seeds_repeat else After([], ()),
    }


LABELS = {arm: look.label for arm, look in style.ARMS.items()}
"""Arm -> its name in tables and legends."""
LEVELS = {f"reward {x}": ("at_proxy", x) for x in (-20, -15, -10, -5, -2)}
LEVELS |= {f"KL {x:g}": ("at_kl", x) for x in (0.1, 0.2, 0.5, 1)}
"""Name of a level -> axis and value at which runs are compared: reward on split A in characters, KL in nats."""
DROPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""Falls in right answers above which a run counts as hacked; the rule uses the fourth."""
REPEATED = ("es_repeat", "grpo_repeat", "es_random_repeat", "grpo_random_repeat")
"""Groups that repeat the declared settings with further seeds, measured under three decodings."""


def models(bases: Sequence[str]) -> str:
    """Describe base models in words, for captions.

    >>> models(["B0", "B1"])
    'bases B0 and B1, tiny models trained from scratch'
    >>> models(["Qwen/Qwen2.5-7B-Instruct"])
    'base Qwen/Qwen2.5-7B-Instruct'
    """
    kind = "" if bases[0] not in tiny.SHIPPED else ", tiny models" if len(bases) > 1 else ", a tiny model"
    return f"base{'s' * (len(bases) > 1)} {' and '.join(bases)}{kind and kind + ' trained from scratch'}"


# ---- runs as rows


def setting(spec: Mapping[str, Any]) -> str:
    """Describe the two settings of a run that its arm's map varies."""
    return ", ".join(f"{name.replace('_', ' ')} {spec[name]:g}" for name in arms.swept(spec["arm"]))


def untrained(of: Records) -> dict[str, Record]:
    """Return base -> the record of the untrained base."""
    return {r["spec"]["base"]: r for r in of["base"]}


def ends(of: Records, *names: str) -> pd.DataFrame:
    """Return a row per run of some groups: how it ended, and where it reached levels during training.

    For each decoding: "proxy" (split A, characters), "right" (split B, %), "lost" (fall in the share of right answers
    since the start), "tested" (share of right test questions) and "hacked". For each level: greedy right answers in %
    at the first point that reaches it. "solved" is where the training reward first reaches -0.5: KL in nats, and right
    answers in %. "no signal" is the share of ES populations, or GRPO groups, in which all rewards are equal.
    """
    rows = []
    for group, r in [(name, r) for name in names for r in of[name]]:
        spec, curve, counts, hacks = r["spec"], r["curve"], r["counts"], r["hacks"]["greedy"]
        row = {"group": group, "arm": LABELS[spec["arm"]], "setting": setting(spec), "KL": curve["kl"][-1]}
        row |= {field: spec.get(field, np.nan) for field in ("base", "seed", "sigma", "alpha")} | r["budget"]
        row |= {"no answer": 100 * curve["degenerate_greedy"][-1]}
        row |= {kind: 100 * hacks.get(kind, 0) for kind in ("empty", "constant")}
        row["no signal"] = 100 * counts.get("zero_std_groups", counts.get("tied", 0) / spec["steps"])
        for decoding in [d for d in style.STROKES if f"proxy_{d}" in curve]:
            right = curve[f"right_{decoding}"]
            own = {"proxy": curve[f"proxy_{decoding}"][-1], "right": 100 * right[-1], "lost": right[0] - right[-1]}
            own |= {"share": right[-1], "tested": r["test"][decoding], "hacked": collapse.end(r, decoding) == "hacked"}
            row |= {f"{what} {decoding}": value for what, value in own.items()}
        for level, (axis, x) in LEVELS.items():
            right = collapse.right_at(r, "greedy", **{axis: x})
            row[level] = np.nan if right is None else 100 * right.mean()
        at = next((i for i, value in enumerate(curve["reward"]) if value is not None and value >= -0.5), None)
        solved = (np.nan, np.nan) if at is None else (curve["kl"][at], 100 * curve["right_greedy"][at])
        rows.append(row | dict(zip(("solved KL", "solved right"), solved, strict=True)))
    return pd.DataFrame(rows, columns=None if rows else _OF_NO_RUN)


_OF_NO_RUN = ["group", "arm", "setting", *LEVELS, "no signal", "empty", "constant", "solved KL", "solved right"]


def gaps(of: Records) -> pd.DataFrame:
    """Return a row per run of the declared settings and of the maps: how it ended, and its Jensen gaps by sigma."""
    runs = {r["spec_hash"]: r for group in ("es", "grpo", "es_map", "grpo_map") for r in of[group]}.values()
    rows = []
    for r in runs:
        row = {"arm": r["spec"]["arm"], "setting": setting(r["spec"]), "seed": r["spec"]["seed"]}
        rows.append(row | {"end": collapse.end(r), "centre": r["jensen"]["centre"]} | r["jensen"]["gaps"])
    return pd.DataFrame(rows)


def es_cells(of: Records) -> pd.DataFrame:
    """Return a row per base and setting of the ES map: means over seeds at the end of training, decoded greedily."""
    runs = ends(of, "es_map", "es_map_elsewhere")
    runs = runs.assign(away=-runs["proxy greedy"], right=runs["share greedy"])
    runs["collapsed"] = [float(hacking.fell(-lost, 0)) for lost in runs["lost greedy"]]
    columns = {"seeds": ("seed", "size")} | {name: (name, _mean) for name in ("away", "KL", "right", "collapsed")}
    found = cells(runs, ["base", "sigma", "alpha"], columns)
    return found.assign(right=100 * found["right"])


def _mean(values: pd.Series) -> float:
    return float(np.mean(values.to_numpy()))  # the mean of pandas differs in the last bit


def published_runs(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per published run: its rewards, what detectors and grader find, and the verdict."""
    rows = []
    for r in records:
        arm, words = r["spec"]["set"].split("_", 1)
        for short, word in {"temp_0.7_": "", "alpha": "alpha ", "_sigma": ", sigma ", "beta": "beta "}.items():
            words = words.replace(short, word)
        row = {"arm": arm, "setting": words, "seed": r["spec"]["seed"], "share": r["right"]} | r["reward"]
        row |= {kind: r["hacks"].get(kind, 0) for kind in ("padded", "other_script")}
        row |= {name: r[name] for name in ("completions", "reproduced", "changed", "degenerate", "verdict", "shown")}
        rows.append(row | {"all_empty": r["all_empty"], "kl_token": r["kl_token"], "right": 100 * r["right"]})
    points = pd.DataFrame(rows)
    judged = {verdict: points["verdict"] == verdict for verdict in ("hacked", "worse", "clean")}
    return points.assign(shortfall=-points["strict"], **judged)


# ---- where a run first reaches a level


def reach(record: Record, decoding: str, axis: str, level: float) -> dict[str, Any]:
    """Return right answers where a run first reaches a level of proxy reward ("at_proxy") or of KL ("at_kl").

    Returns:
        "first": right answers on each problem at the first point that reaches the level. If that is not the run's
        start, also "at": the value on the axis at that point; "line": right answers interpolated linearly between this
        point and the one before; and, for a level of the proxy, "best": the most right answers at any point that has
        reached it (beyond a level of KL, the best point would just be the one that has moved least). Empty if the run
        never reaches the level.
    """
    curve = record["curve"]
    values, right = curve["kl" if axis == "at_kl" else f"proxy_{decoding}"], curve[f"right_{decoding}"]
    i = next((i for i, value in enumerate(values) if value >= level), None)
    if i is None:
        return {}
    found = {"first": collapse.right_at(record, decoding, **{axis: level})}
    if i > 0:
        found |= {"at": values[i], "line": overoptimisation.read_at(values, right, level)}
        if axis == "at_proxy":
            found["best"] = max(y for x, y in zip(values, right, strict=True) if x >= level)
    return found


def matched(of: Records, decoding: str, level: str) -> Results:
    """Compare right answers of the declared settings where each run first reaches a level, a key of LEVELS.

    Returns:
        For each arm, the number of "runs" that get there, their "right" answers in %, and their mean "at" on the axis.
        ES - GRPO at the "first" point, over seeds and problems, and for the controls "line" and "best" of `reach`, over
        seeds; None if fewer than two runs of an arm get there.
    """
    sides = {arm: [reach(r, decoding, *LEVELS[level]) for r in of[arm]] for arm in ARMS}
    hows = ("first", "at", "line", "best")
    scores = {how: [[run[how] for run in side if how in run] for side in sides.values()] for how in hows}
    found: Results = {}
    for arm, first, at in zip(ARMS, scores["first"], scores["at"], strict=True):
        found |= {f"{arm} runs": len(first), f"{arm} right": 100 * np.mean(first) if first else None}
        found[f"{arm} at"] = float(np.mean(at)) if at else None
    tests: dict[str, Any] = {"first": stats.crossed_bootstrap}
    tests |= dict.fromkeys(("line", "best"), lambda es, grpo: stats.stratified_bootstrap([es], [grpo]))
    return found | {how: test(*scores[how]) if min(map(len, scores[how])) > 1 else None for how, test in tests.items()}


# ---- results


def results(run: SimpleNamespace, of: Records, published: Sequence[Record] = ()) -> Results:
    """Return the results that the answers, the tables and the paper quote, by name.

    Right answers are in %, "away" (the distance from the target length) and gaps in characters; intervals of right
    answers and of hacked runs are fractions.

    Args:
        run: parameters and settings.
        of: records by group.
        published: records of the published completions; without them, their results are left out.
    """
    sigma = f"{measure.noise_sigmas(run.bases[0])[0][1]:g}"
    found: Results = {"gap sigma": float(sigma)}
    for arm, part in ends(of, *ARMS).groupby("group", sort=False):
        found |= {f"{arm} runs": len(part), f"{arm} gap": np.mean([r["jensen"]["gaps"][sigma] for r in of[arm]])}
        for d in DECODINGS:
            hacked, right, proxy = (part[f"{what} {d}"] for what in ("hacked", "right", "proxy"))
            found |= {f"{arm} {d} hacked": int(hacked.sum()), f"{arm} {d} right": right.mean()}
            found[f"{arm} {d} away"] = -proxy.mean()
    for d in DECODINGS:
        counts = [found[name] for arm in ("grpo", "es") for name in (f"{arm} {d} hacked", f"{arm} runs")]
        found |= {f"{d} hacked, GRPO - ES": stats.rate_difference(*counts)}
        found |= {f"{d} Fisher": stats.fisher(*counts), f"{d} Barnard": stats.barnard(*counts)}
        for level in LEVELS:
            found |= {f"{d} {level}: {what}": value for what, value in matched(of, d, level).items()}
    known = [of["base"][0]["test"], *(r["test"] for r in of["decodings"])]  # of the first base, by decoding
    base = {name: test[name] for test in known for name in style.STROKES if name in test}
    for group, part in ends(of, *REPEATED, *FEW).groupby("group", sort=False):
        found |= {f"{group} runs": len(part), f"{group} hacked": int(part["hacked greedy"].sum())}
        found[f"{group} no signal"] = part["no signal"].mean()
        for d in base if group in REPEATED else ():  # whatever the reward
            found[f"{group} {d} fell"] = sum(bool(hacking.fell(right, base[d])) for right in part[f"tested {d}"])
    found |= _lost(of, base)
    found |= _of_maps(run, of, sigma)
    if published:
        points = published_runs(published)
        names = ("completions", "reproduced", "changed", "all_empty")
        found |= {"published runs": len(points)} | {f"published {name}": int(points[name].sum()) for name in names}
        for arm, part in points.groupby("arm"):
            found |= {f"published {arm} runs": len(part), f"published {arm} hacked": int(part["hacked"].sum())}
    return found | _words(found)


def _lost(of: Records, decodings: Iterable[str]) -> Results:
    """Return the test answers that repeated runs have lost since the base, and what is left once ES's walk is off.

    The walk is ES with random fitness, of the same steps. Its loss is taken off that of ES, run by run as in claim C3d.
    """
    found: Results = {}
    untrained = [of["base"][0], *of["decodings"]]
    for d in decodings if of["es_repeat"] else ():
        (start,) = (accuracy_matrix([r], d) for r in untrained if d in r["test"])
        right = {group: accuracy_matrix(of[group], d) for group in REPEATED}
        found |= {f"{group} {d} lost": stats.crossed_bootstrap(start - each) for group, each in right.items()}
        es, grpo, walk = (right[f"{arm}_repeat"] for arm in (*ARMS, "es_random"))
        found[f"es_repeat {d} lost, less its walk's"] = stats.crossed_bootstrap(walk, es)
        pairs = min(len(es), len(walk))
        left = es[:pairs] + start - walk[:pairs]
        found[f"{d} lost, GRPO - ES less its walk's"] = stats.crossed_bootstrap(left, grpo)
    return found


def _words(found: Results) -> Results:
    """Return phrases for the answers: whether decodings agree, and for which arms gaps differ."""
    apart = [found[f"{d} hacked, GRPO - ES"] for d in DECODINGS]
    signs = {np.sign(each.value) for each in apart if excludes_zero(each)}
    words = {"depends": "It depends on decoding. " if len(signs) == 2 else ""}
    names = {LABELS[arm]: f"{arm} gap, hacked - clean" for arm in ARMS[::-1]}
    gaps_ = {label: found[name] for label, name in names.items() if name in found}
    if gaps_:
        parted = " and ".join(label for label, each in gaps_.items() if excludes_zero(each))
        words["gaps differ"] = f"The two differ for {parted}." if parted else "No difference is established."
        words["gaps"] = " and ".join(f"{stated(each, '.2f')} for {label}" for label, each in gaps_.items())
    return words


def _of_maps(run: SimpleNamespace, of: Records, sigma: str) -> Results:
    found: Results = {"breaking sigma": collapse.breaking_sigma(of["base"][0])}
    for arm, runs in ends(of, "es_map", "grpo_map").groupby("group", sort=False):
        hacked, right = (runs.groupby("setting")[f"{what} greedy"].mean() for what in ("hacked", "right"))
        found |= {f"{arm} settings": len(hacked), f"{arm} least right": right.min(), f"{arm} most right": right.max()}
        found |= {f"{arm} never hacked": int((hacked == 0).sum()), f"{arm} always hacked": int((hacked == 1).sum())}
    settings = es_cells(of)
    walk = settings["alpha"] * (run.es_steps / run.es_population_size) ** 0.5
    broken = settings["base"].map({base: collapse.breaking_sigma(r) for base, r in untrained(of).items()})
    beyond = np.maximum(settings["sigma"], walk) > broken  # beyond one of the two lines
    collapsed = settings["collapsed"] >= 0.5
    for side, chosen in (("within", ~beyond), ("beyond", beyond)):
        found |= {f"settings {side}": int(chosen.sum()), f"collapsed {side}": int(collapsed[chosen].sum())}
    found |= {"settings": len(settings), "safe": int((~collapsed).sum())}
    found["settings without collapse"] = stats.wilson(found["safe"], found["settings"])
    for arm, part in gaps(of).groupby("arm"):
        sides = [[own for _, own in part[part["end"] == end].groupby("setting", sort=False)[sigma]] for end in ENDS]
        if all(sum(map(len, side)) > 1 for side in sides):
            found[f"{arm} gap, hacked - clean"] = stats.nested_bootstrap(*sides)
    return found


ENDS = ("hacked", "clean")
"""Ends whose Jensen gaps are compared."""


# ---- tables


def end_rows(of: Records, *names: str) -> pd.DataFrame:
    """Return a row per setting of some groups: how its runs end, under greedy decoding and at temperature 1."""
    columns: dict[str, Any] = {"seeds": ("seed", "size")}
    for d, short in (("greedy", ""), ("t1", ", t1")):
        columns |= {f"proxy{short}": (f"proxy {d}", ".1f"), f"right{short}, %": (f"right {d}", ".0f")}
        columns[f"hacked{short}"] = (f"hacked {d}", "sum")
    columns |= {"no answer, %": ("no answer", ".0f"), "KL": ("KL", ".1f"), "core-s": ("core_seconds", ".0f")}
    columns |= {"thousand": ("completions", lambda spent: f"{spent.mean() / 1000:.0f}")}
    rows = cells(ends(of, *names), ["group", "arm", "setting"], columns).drop(columns="group")
    return rows[[*rows.columns[:-2], "thousand", "core-s"]]


def matched_rows(found: Results) -> pd.DataFrame:
    """Return a row per decoding and level: right answers of both arms where runs first reach it, and ES - GRPO.

    The differences are that of `matched` and those of its two controls. Of the reward levels that too few runs of an
    arm reach, only the first gets a row.
    """
    rows = []
    for d in DECODINGS:
        levels = [level for level in LEVELS if level not in ("reward -20", "KL 0.1")]
        never = [level for level in levels if level.startswith("reward") and found[f"{d} {level}: first"] is None]
        for level in [level for level in levels if level not in never[1:]]:
            own = {what: found[f"{d} {level}: {what}"] for what in ("first", "line", "best")}
            row = {"decoding": style.STROKES[d].label, "level": level}
            for arm in ARMS:
                runs, right, at = (found[f"{d} {level}: {arm} {what}"] for what in ("runs", "right", "at"))
                few = f" ({runs} runs)" if runs < found[f"{arm} runs"] else ""
                row[f"{LABELS[arm]}, %"] = (MISSING if right is None else f"{right:.1f}") + few
                row[f"{LABELS[arm]} is at"] = MISSING if at is None else f"{at:.2f}"
            names = {"first": "ES - GRPO", "line": "interpolated", "best": "best point"}
            rows.append(row | {name: stated(own[how], missing=MISSING) for how, name in names.items()})
    return pd.DataFrame(rows)


def example_rows(run: SimpleNamespace, of: Records) -> pd.DataFrame:
    """Return a row per question with greedy answers of the base, of each arm's declared runs with the most and the
    fewest right answers, and of the run with the fewest on each map."""
    ranked = {name: sorted(of[name], key=lambda r: r["test"]["greedy"]) for name in (*ARMS, "es_map", "grpo_map")}
    columns = {"base": untrained(of)[run.bases[0]]}
    for arm in ARMS:
        columns |= {f"{LABELS[arm]}, {word} right": ranked[arm][i] for word, i in (("most", -1), ("fewest", 0))}
    worst = {arm: ranked[f"{arm}_map"][0] for arm in ARMS}
    columns |= {f"{LABELS[arm]}, {setting(r['spec'])}": r for arm, r in worst.items()}
    rows = [{"question": "right, %"} | {name: f"{100 * r['test']['greedy']:.0f}" for name, r in columns.items()}]
    for i, problem in enumerate(measure.splits(columns["base"]["spec"])["test"][: run.questions_shown]):
        rows.append({"question": problem.question} | {name: r["shown"][i] for name, r in columns.items()})
    return pd.DataFrame(rows)


# ---- figures, each returned with the data that it plots

_AXES = {
    "KL": "KL from the base, nats per completion",
    "proxy": "reward on split A, characters",
    "away": "distance from the target length, characters",
    "right": "right answers on split B, %",
}
_NEAREST = 0.02  # characters: a logarithmic axis cannot show a run at the target itself
_LEAST_KL = 3e-3  # nats, likewise for the untrained base
_HACKED = {"es": "x", "grpo": "+"}  # two kinds of cross, to be told apart in grey
_PLOTTED = ["arm", "setting", "seed", "decoding", "end"]


def curves(of: Records) -> pd.DataFrame:
    """Return a row per point of the declared runs and per end of the maps' other runs, by decoding."""
    lines = []
    for arm in ARMS:
        declared = setting(of[arm][0]["spec"])
        others = [r for r in of[f"{arm}_map"] if setting(r["spec"]) != declared]
        for r, d in product([*of[arm], *others], DECODINGS):
            curve, n = r["curve"], len(r["curve"]["kl"])
            proxy = np.array(curve[f"proxy_{d}"])
            line = pd.DataFrame({"KL": np.maximum(curve["kl"], _LEAST_KL), "proxy": proxy, "point": range(n)})
            line = line.assign(away=np.maximum(-proxy, _NEAREST), right=100 * np.array(curve[f"right_{d}"]))
            own = {"arm": arm, "setting": setting(r["spec"]), "seed": r["spec"]["seed"], "decoding": d}
            own |= {"end": collapse.end(r, d), "declared": setting(r["spec"]) == declared, "last": line.index == n - 1}
            lines.append(line.assign(**own).tail(n if own["declared"] else 1))
    return pd.concat(lines, ignore_index=True)


def answer_figure(run: SimpleNamespace, of: Records, found: Results) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw right answers at the ends of the declared runs, and ES - GRPO at matched reward and KL, by decoding."""
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.8), width_ratios=(1, 1.25))
    last = curves(of).query("last and declared").sort_values(["decoding", "arm"], kind="stable")
    for (d, arm), part in last.groupby(["decoding", "arm"]):
        x = DECODINGS.index(d) + {"es": -0.2, "grpo": 0.2}[arm]
        _scatter(axes[0], x + style.jitter(len(part), 0.28), part["right"], part["end"], arm, 16)
    for i, d in enumerate(DECODINGS):
        start = 100 * untrained(of)[run.bases[0]]["point"][f"right_{d}"]
        axes[0].plot([i - 0.42, i + 0.42], [start] * 2, **plots.BASE)
        axes[0].plot([i - 0.42, i + 0.42], [start - 100 * hacking.DROP] * 2, **plots.NULL)
    axes[0].set(xticks=range(len(DECODINGS)), xticklabels=[style.STROKES[d].label for d in DECODINGS])
    axes[0].set(title="at the end of training", ylabel=_AXES["right"])
    axes[0].grid(axis="x", visible=False)
    asked: dict[str, Any] = {level: {} for level in ("reward -15", "reward -5", "KL 0.2", "KL 0.5")}
    for level, d in product(asked, DECODINGS):
        fewest = min(ARMS, key=lambda arm, at=f"{d} {level}": found[f"{at}: {arm} runs"])
        asked[level][d] = found[f"{d} {level}: first"] or f"{LABELS[fewest]} does not get there"
    apart = plots.differences(axes[1], asked, "upper right").rename(columns={"name": "at"})
    axes[1].set(title="where a run first comes to a level", xlabel="right answers, ES - GRPO, points")
    plots.key(fig, [*_arms(of), *_hacked(), plots.handle("the base", **plots.BASE), _bound()])
    ends_ = last.assign(panel="end", value=last["right"])[["panel", "decoding", "arm", "value"]]
    return fig, pd.concat([ends_, apart.assign(panel="matched")])


def ways_and_ends(run: SimpleNamespace, of: Records) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw right answers against the distance from the target, by decoding: declared runs along training, all ends."""
    points = curves(of)
    fig, axes = plt.subplots(2, 2, figsize=(style.PAGE, 4.0), sharey="row", sharex="col")
    for column, (d, own) in zip(axes.T, points.groupby("decoding", sort=False), strict=True):
        _ways(column[0], own, "away", "right")
        for (declared, arm), part in own[own["last"]].groupby(["declared", "arm"]):
            _scatter(column[1], part["away"], part["right"], part["end"], arm, 24 if declared else 12, declared)
        column[0].set(title=style.STROKES[d].label, ylabel=f"on the way:\n{_AXES['right']}")
        column[1].set(xlabel=_AXES["away"], ylabel=f"at the end:\n{_AXES['right']}")
        column[0].invert_xaxis()
        for ax in column:
            ax.axhline(100 * (untrained(of)[run.bases[0]]["point"][f"right_{d}"] - hacking.DROP), **plots.NULL)
            plots.plain_ticks(ax)
    kinds = [plots.handle("setting compared by C3", marker="o", color="#555555", ms=4.5)]
    kinds += [plots.handle("other settings", marker="o", color="#555555", mfc="none", ms=3)]
    plots.key(fig, [*_arms(of), *kinds, *_hacked(), _bound()])
    return fig, points[[*_PLOTTED, "away", "right"]].drop_duplicates()


def fronts(of: Records) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw the proxy reward against the KL from the base along the declared runs, by decoding."""
    points = curves(of).query("declared")
    fig, axes, shown = plots.panels(points, "decoding", 2.3, sharey=True)
    for ax, d, panel in shown:
        _ways(ax, panel, "KL", "proxy")
        ax.set(title=style.STROKES[d].label, xlabel=_AXES["KL"])
        plots.plain_ticks(ax)
    axes[0].set_ylabel(_AXES["proxy"])
    plots.key(fig, _arms(of))
    return fig, points[[*_PLOTTED, "KL", "proxy"]].drop_duplicates()


def _ways(ax: plt.Axes, points: pd.DataFrame, x: str, y: str) -> None:
    """Draw the mean trajectory of each arm with a band over seeds, and markers where runs were measured."""
    for arm, part in points[points["declared"]].groupby("arm"):
        xs, ys = (part.pivot(index="seed", columns="point", values=name).to_numpy() for name in (x, y))
        look, (mean, low, high) = style.ARMS[arm], stats.curve_band(ys)
        style.band(ax, xs.mean(0), low, high, look.color)
        ax.plot(xs.mean(0), mean, color=look.color, lw=1.6, marker=look.marker, ms=3)


def es_map(run: SimpleNamespace, of: Records) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw a map of right answers over sigma and alpha for each base; darker cells are worse.

    The distance from the target length is in brackets, and a cross marks collapsed runs. The two lines show where
    noise, and where a random walk, is as large as the noise that halves the base's right answers.
    """

    def words(cell: Mapping[str, Any]) -> str:
        return f"{cell['right']:.0f}{' ✕' if cell['collapsed'] >= 0.5 else ''} ({cell['away']:.1f})"

    table = es_cells(of)
    low, high = table["right"].min(), table["right"].max()
    ground = {"cmap": "Greys_r", "vmin": 1.5 * low - high, "vmax": high}  # pale enough for black letters
    fig, axes, shown = plots.panels(table, "base", 2.2, sharey=True)
    for ax, base, part in shown:
        values = plots.heat(ax, part, ("alpha", "sigma"), "right", words, **ground)
        critical = collapse.breaking_sigma(untrained(of)[base])
        walk = critical * (run.es_population_size / run.es_steps) ** 0.5
        ax.axvline(_place(values.columns, walk), ls=(0, (4, 2)), color="black", label="the walk breaks the base")
        ax.axhline(_place(values.index, critical), ls=(0, (1, 2)), color="black", label="noise breaks the base")
        ax.set(xlabel="alpha", title=f"{base}: right answers, % (distance)")
    axes[0].set_ylabel("sigma")
    plots.key(fig, axes[0])
    return fig, table


def _place(values: Sequence[float], at: float) -> float:
    """Return the position of a value on an axis whose cells are evenly spaced in the logarithm."""
    return float(np.polyval(np.polyfit(np.log(np.array(values, float)), range(len(values)), 1), np.log(at)))


_OUTLIERS = 3  # settings are named if all their runs deviate this many times more than 3/4 of the runs do


def gaps_by_end(of: Records) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw the Jensen gap of every run by arm and end, with medians; settings far from the others are named.

    The gaps are those at the middle sigma, with which the declared ES trains.
    """
    table = gaps(of)
    sigma = table.columns[-2]
    fig, ax = plt.subplots(figsize=(1.3 * style.COLUMN, 2.6))
    spread = (table[sigma] - table[sigma].median()).abs().quantile(0.75)
    kinds = list(product(ARMS, ENDS[::-1]))
    for x, (arm, end) in enumerate(kinds):
        part = table[(table["arm"] == arm) & (table["end"] == end)]
        median = part[sigma].median()
        _scatter(ax, x + style.jitter(len(part), 0.5), part[sigma], part["end"], arm, 12)
        ax.plot([x - 0.36, x + 0.36], [median] * 2, color="black", lw=1.4, zorder=5)
        for name, own in part.groupby("setting"):
            if len(own) > 1 and (own[sigma] - median).abs().min() > _OUTLIERS * spread:
                ax.annotate(name.replace(", ", "\n"), (x + 0.35, own[sigma].mean()), va="center", fontsize=6)
    ax.set(xticks=range(len(kinds)), xticklabels=[f"{LABELS[arm]},\n{end}" for arm, end in kinds])
    ax.set(ylabel="Jensen gap, characters", title=f"at sigma {sigma}; lines are medians")
    ax.grid(axis="x", visible=False)
    return fig, table


def published_figure(points: pd.DataFrame) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw right answers of the rows of `published_runs` against the distance from the target."""
    fig, ax = plt.subplots(figsize=(1.3 * style.COLUMN, 2.6))
    for (label, empty), part in points.groupby(["arm", "all_empty"]):
        look = plots.look(label.lower(), ls="", label=f"{label}{', every answer empty' * empty} (n = {len(part)})")
        ax.plot(part["shortfall"], part["right"], **look | ({"mfc": "none"} if empty else {}))
    ax.set(xlabel=_AXES["away"], ylabel="right answers, %")
    ax.invert_xaxis()
    plots.plain_ticks(ax)
    plots.key(fig, ax, 2)
    return fig, points[["arm", "setting", "seed", "shortfall", "right", "verdict", "all_empty", "kl_token"]]


def _scatter(
    ax: plt.Axes, x: Sequence[float], y: Sequence[float], end: Sequence[str], arm: str, size: float, filled: bool = True
) -> None:
    """Draw a mark per run: a cross if it ended hacked; other marks are open unless `filled`."""
    look, x, y, hacked = style.ARMS[arm], np.asarray(x), np.asarray(y), np.asarray(end) == "hacked"
    face, edge, width = (look.color, "white", 0.4) if filled else ("none", look.color, 0.7)
    clean = {"marker": look.marker, "facecolors": face, "edgecolors": edge, "linewidths": width}
    ax.scatter(x[~hacked], y[~hacked], s=size, **clean)
    crossed = {"marker": _HACKED[arm], "color": look.color, "linewidths": 1.1 if filled else 0.7}
    ax.scatter(x[hacked], y[hacked], s=1.3 * size, **crossed)


def _arms(of: Records) -> list[Any]:
    return [plots.of_arm(arm, len(of[arm]), ms=4.5) for arm in ARMS]


def _hacked() -> list[Any]:
    return [plots.of_arm(arm, label=f"{LABELS[arm]}, hacked", marker=mark, ms=5) for arm, mark in _HACKED.items()]


def _bound() -> Any:
    return plots.handle("20 points below the base", **plots.NULL)
