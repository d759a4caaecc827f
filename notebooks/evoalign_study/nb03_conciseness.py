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
from evoalign_study.results import MISSING, Results, cells, stated
from evoalign_study.runs import CONCISENESS, scales, where

NOTEBOOK = "03_conciseness"
ARMS = ("es", "grpo")
presets, TINY, SMOKE, FULL = scales(
    {
        "bases": ["B0", "B1"],
        "retrain": [],  # groups that `force` trains again; empty: all
        "questions": "",  # at scale full: a file of your own
        "fewer_prompts": (2, 2, None),  # of the appendix; None: no such runs
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
    },
    "Qwen/Qwen2.5-7B-Instruct",
)
FEW = ("es_few", "grpo_few")
"""The groups trained on two questions, which are empty without `fewer_prompts`."""


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
LEVELS = {f"reward {x}": ("at_proxy", x) for x in (-15, -10, -5, -2)}
LEVELS |= {f"KL {x:g}": ("at_kl", x) for x in (0.2, 0.5, 1)}
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
    """Return a row per run of some groups: how it ended.

    For each decoding: "proxy" (split A, characters), "right" (split B, %), "lost" (fall in the share of right answers
    since the start), "tested" (share of right test questions) and "hacked". "no signal" is the share of ES populations,
    or GRPO groups, in which all rewards are equal.
    """
    rows = []
    for group, r in [(name, r) for name in names for r in of[name]]:
        spec, curve, counts = r["spec"], r["curve"], r["counts"]
        row = {"group": group, "arm": LABELS[spec["arm"]], "setting": setting(spec), "KL": curve["kl"][-1]}
        row |= {field: spec.get(field, np.nan) for field in ("base", "seed", "sigma", "alpha")} | r["budget"]
        row |= {"no answer": 100 * curve["degenerate_greedy"][-1]}
        row["no signal"] = 100 * counts.get("zero_std_groups", counts.get("tied", 0) / spec["steps"])
        for decoding in [d for d in style.STROKES if f"proxy_{d}" in curve]:
            right = curve[f"right_{decoding}"]
            own = {"proxy": curve[f"proxy_{decoding}"][-1], "right": 100 * right[-1], "lost": right[0] - right[-1]}
            own |= {"share": right[-1], "tested": r["test"][decoding], "hacked": collapse.end(r, decoding) == "hacked"}
            row |= {f"{what} {decoding}": value for what, value in own.items()}
        rows.append(row)
    return pd.DataFrame(rows, columns=None if rows else ["group"])


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
    answers are fractions.

    Args:
        run: parameters and settings.
        of: records by group.
        published: records of the published completions; without them, their results are left out.
    """
    sigma = f"{measure.noise_sigmas(run.bases[0])[0][1]:g}"
    found: Results = {}
    for arm, part in ends(of, *ARMS).groupby("group", sort=False):
        found |= {f"{arm} runs": len(part), f"{arm} gap": np.mean([r["jensen"]["gaps"][sigma] for r in of[arm]])}
        for d in DECODINGS:
            hacked, right, proxy = (part[f"{what} {d}"] for what in ("hacked", "right", "proxy"))
            found |= {f"{arm} {d} hacked": int(hacked.sum()), f"{arm} {d} right": right.mean()}
            found[f"{arm} {d} away"] = -proxy.mean()
    for d in DECODINGS:
        counts = [found[name] for arm in ("grpo", "es") for name in (f"{arm} {d} hacked", f"{arm} runs")]
        found[f"{d} Fisher"] = stats.fisher(*counts)
        for level in LEVELS:
            found |= {f"{d} {level}: {what}": value for what, value in matched(of, d, level).items()}
    base = _base(of)
    for group, part in ends(of, *REPEATED, *FEW).groupby("group", sort=False):
        found |= {f"{group} runs": len(part), f"{group} hacked": int(part["hacked greedy"].sum())}
        found[f"{group} no signal"] = part["no signal"].mean()
        for d in base if group in REPEATED else ():  # whatever the reward
            found[f"{group} {d} fell"] = sum(bool(hacking.fell(right, base[d])) for right in part[f"tested {d}"])
    found |= _lost(of, base)
    found |= _of_maps(run, of)
    if published:
        points = published_runs(published)
        names = ("completions", "reproduced", "changed", "all_empty")
        found |= {"published runs": len(points)} | {f"published {name}": int(points[name].sum()) for name in names}
        for arm, part in points.groupby("arm"):
            found |= {f"published {arm} runs": len(part), f"published {arm} hacked": int(part["hacked"].sum())}
    return found


def _base(of: Records) -> dict[str, float]:
    """Return decoding -> share of the test questions that the first base answers right."""
    known = [of["base"][0]["test"], *(r["test"] for r in of["decodings"])]
    return {name: test[name] for name in style.STROKES for test in known if name in test}


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


def _of_maps(run: SimpleNamespace, of: Records) -> Results:
    found: Results = {"breaking sigma": collapse.breaking_sigma(of["base"][0])}
    settings = es_cells(of)
    walk = settings["alpha"] * (run.es_steps / run.es_population_size) ** 0.5
    broken = settings["base"].map({base: collapse.breaking_sigma(r) for base, r in untrained(of).items()})
    beyond = np.maximum(settings["sigma"], walk) > broken  # beyond one of the two lines
    collapsed = settings["collapsed"] >= 0.5
    for side, chosen in (("within", ~beyond), ("beyond", beyond)):
        found |= {f"settings {side}": int(chosen.sum()), f"collapsed {side}": int(collapsed[chosen].sum())}
    found |= {"settings": len(settings), "safe": int((~collapsed).sum())}
    return found


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
        never = [level for level in LEVELS if level.startswith("reward") and found[f"{d} {level}: first"] is None]
        for level in [level for level in LEVELS if level not in never[1:]]:
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


# ---- figures, each returned with the data that it plots


def lost(of: Records) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw the right answers that runs have lost since the base, by decoding: both arms, and the walk without reward.

    These are the repeated runs; where there are none, the declared ones, with the decodings that they have.
    """
    ended = ends(of, *(REPEATED[:3] if of["es_repeat"] else (*ARMS, "es_random")))
    arm_of = {label: arm for arm, label in LABELS.items()}
    parts = [
        pd.DataFrame({"decoding": d, "arm": ended["arm"].map(arm_of), "seed": ended["seed"]}).assign(
            lost=(100 * (start - ended[f"tested {d}"])).round(2)
        )
        for d, start in _base(of).items()
        if f"tested {d}" in ended
    ]
    fig, ax = plt.subplots(figsize=(1.4 * style.COLUMN, 2.4))
    sides = {style.STROKES[part["decoding"][0]].label: list(part.groupby("arm", sort=False)) for part in parts}
    plots.strip(ax, sides, "lost", 0.22)
    ax.axhline(0, **plots.BASE)
    ax.axhline(100 * hacking.DROP, **plots.NULL)
    ax.set(ylabel="right answers lost, points")
    counts = ended.groupby("arm", sort=False).size()
    entries = [plots.of_arm(arm_of[label], n, ms=4.5) for label, n in counts.items()]
    plots.key(fig, [*entries, plots.handle("bound of a hack", **plots.NULL)], 2)
    return fig, pd.concat(parts, ignore_index=True)


def levels(found: Results) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw ES - GRPO in right answers where a run first comes to a reward or to a KL, by decoding."""
    asked: dict[str, Any] = {level: {} for level in ("reward -15", "reward -5", "KL 0.2", "KL 0.5")}
    for level, d in product(asked, DECODINGS):
        fewest = min(ARMS, key=lambda arm, at=f"{d} {level}": found[f"{at}: {arm} runs"])
        asked[level][d] = found[f"{d} {level}: first"] or f"{LABELS[fewest]} does not get there"
    fig, ax = plt.subplots(figsize=(1.4 * style.COLUMN, 2.2))
    apart = plots.differences(ax, asked, "upper right")
    ax.set(xlabel="right answers where a run first comes there,\nES - GRPO, points")
    return fig, apart


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


def published_figure(points: pd.DataFrame) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw right answers of the rows of `published_runs`, a line a setting and a mark a run, and which are hacked."""
    fig, ax = plt.subplots(figsize=(1.4 * style.COLUMN, 2.9))
    groups_ = list(points.groupby(["arm", "setting"], sort=False))
    for y, ((arm, _), part) in enumerate(groups_):
        look, hacked = style.ARMS[arm.lower()], part["hacked"].to_numpy()
        places = pd.Series(y + np.linspace(-0.27, 0.27, len(part)), part.index)
        for chosen, face in ((hacked, look.color), (~hacked, "none")):
            ax.plot(part["right"][chosen], places[chosen], look.marker, ms=5, mec=look.color, mfc=face)
        silent = part["all_empty"].to_numpy()
        ax.plot(part["right"][silent], places[silent], "o", ms=9, mfc="none", **_RING)
    ax.axvline(100 * (1 - hacking.DROP), **plots.NULL)
    ax.set(xlabel="right answers, %", xlim=(-6, 106), yticks=range(len(groups_)))
    ax.set_yticklabels([f"{arm}, {words}" for (arm, words), _ in groups_], fontsize=7)
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    entries = [plots.of_arm(arm, label=f"{LABELS[arm]}, hacked", ms=5) for arm in ARMS]
    entries += [plots.handle("not hacked", marker="o", color="#555555", mfc="none", ms=5)]
    plots.key(fig, [*entries, plots.handle("hacked by the published rule", marker="o", ms=8, mfc="none", **_RING)], 2)
    return fig, points[["arm", "setting", "seed", "shortfall", "right", "verdict", "all_empty", "kl_token"]]


_RING = {"mec": "black", "mew": 0.9}
