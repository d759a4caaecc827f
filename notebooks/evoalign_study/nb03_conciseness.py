"""Notebook 03, conciseness: its presets and groups of runs, what it finds, its tables and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from evoalign_lib import arms, tiny
from evoalign_lib.analysis import hacking, stats
from evoalign_study import collapse, loading, marks, style
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.judged import published_specs
from evoalign_study.loading import DECODINGS, After, Group, Groups, Records, of_runs, own_settings
from evoalign_study.measures import conciseness as measure
from evoalign_study.records import Record
from evoalign_study.results import UNDER, Results, excludes_zero, listed, sentence, stated
from evoalign_study.runs import CONCISENESS
from evoalign_study.tables import MISSING, cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

NOTEBOOK = "03_conciseness"
ARMS = ("es", "grpo")
TINY = {
    "bases": ["B0", "B1"],
    "retrain": [],  # groups that `force` makes anew; none: all
    "questions": "",  # at scale full: a file of your own
    "fewer_prompts": 2,  # of section 10; none: no such runs
    **CONCISENESS["tiny"],
    "curve_points": 16,
    "seeds_judge": 16,  # of the declared settings
    "seeds_repeat": 16,  # further seeds of the declared settings, under all decodings
    "seeds_map": 4,  # of the other settings
    "seeds_elsewhere": 2,  # on the other bases
    "sigma": [0.003, 0.01, 0.03],  # from here: the axes of the maps
    "alpha": [0.0015, 0.005, 0.015],
    "learning_rate": [1e-4, 3e-4, 1e-3],
    "beta": [0.0, 0.04, 0.4],
    "repeat_points": 10,  # of the curves of the repeated runs: a record has no room for more
    "shown": 3,  # published completions of each set that are printed
    "questions_shown": 4,
}
SMOKE = TINY | {
    **CONCISENESS["smoke"],
    "curve_points": 3,
    "seeds_judge": 2,
    "seeds_repeat": 2,
    "repeat_points": 3,
    "seeds_map": 1,
    "seeds_elsewhere": 1,
    "sigma": [0.01, 0.03],
    "alpha": [0.005, 0.015],
    "learning_rate": [3e-4],
    "beta": [0.0],
}
FULL = TINY | {
    **CONCISENESS["full"],
    "seeds_repeat": 0,
    "fewer_prompts": None,
    "sigma": [3e-4, 1e-3, 3e-3],
    "alpha": [1.5e-4, 5e-4, 1.5e-3],
    "learning_rate": [1e-6, 3e-6, 1e-5],
}
FEW = ("es_few", "grpo_few")
"""The groups of section 10, which are empty without `fewer_prompts`."""


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-7B-Instruct"]}}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name. All but "published" are of the notebook's own models."""
    here, elsewhere = run.bases[:1], run.bases[1:]
    judge, some = run.seeds_judge, run.seeds_map

    def train(arm: str, bases: Sequence[str], seeds: int | Sequence[int], changes: Sequence[Any] = ({},)) -> Group:
        return Group(arm, bases, seeds, own_settings(run, arm), changes)

    def on_map(arm: str) -> list[dict[str, float]]:
        names = arms.swept(arm)
        return [dict(zip(names, pair, strict=True)) for pair in product(*(vars(run)[name] for name in names))]

    again = [{"sampled_at": run.temperatures, "curve_points": run.repeat_points}]
    further = range(judge, judge + run.seeds_repeat)  # no seed that was looked at before
    nulls = range(min(some, run.seeds_repeat))
    few = {
        name: [{"unique_prompts": run.fewer_prompts, name: value} for value in vars(run)[name] if run.fewer_prompts]
        for name in ("alpha", "beta")
    }
    first = {"base": [r for r in of["base"] if r["spec"]["base"] == run.bases[0]]} if "base" in of else {}
    return {
        "base": base_specs(run.bases, of_runs(vars(run)), run.scale),
        "es": train("es", here, judge),
        "grpo": train("grpo", here, judge),
        "es_repeat": train("es", here, further, again),
        "grpo_repeat": train("grpo", here, further, again),
        "es_random_repeat": train("es_random", here, nulls, again),
        "grpo_random_repeat": train("grpo_random", here, nulls, again),
        "es_map": train("es", here, some, on_map("es")),
        "grpo_map": train("grpo", here, some, on_map("grpo")),
        "es_map_elsewhere": train("es", elsewhere, run.seeds_elsewhere, on_map("es")),
        "es_few": train("es", here, some, few["alpha"]),
        "grpo_few": train("grpo", here, some, few["beta"]),
        "es_sampled": train("es_sampled", here, some),
        "es_random": train("es_random", here, some),
        "grpo_random": train("grpo_random", here, some),
        "published": published_specs(run.scale),
        # the first base at the temperatures of the repeated runs
        "decodings": loading.decodings(run, first, ["base"]) if run.seeds_repeat else After([], ()),
    }


LABELS = {arm: look.label for arm, look in style.ARMS.items()}
"""Arm -> its name in tables and legends."""
LEVELS = {f"reward {x}": ("at_proxy", x) for x in (-20, -15, -10, -5, -2)}
LEVELS |= {f"KL {x:g}": ("at_kl", x) for x in (0.1, 0.2, 0.5, 1)}
"""Name of a level -> axis and level at which runs are compared: reward on split A in characters, KL in nats."""
DROPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""By how much right answers have to fall for a run to count as hacked: the rule has the fourth."""
REPEATED = ("es_repeat", "grpo_repeat", "es_random_repeat", "grpo_random_repeat")
"""Groups of the declared settings on further seeds, measured under three decodings."""


def models(bases: Sequence[str]) -> str:
    """Return base models in words, for captions.

    >>> models(["B0", "B1"])
    'bases B0 and B1, tiny models trained from scratch'
    >>> models(["Qwen/Qwen2.5-7B-Instruct"])
    'base Qwen/Qwen2.5-7B-Instruct'
    """
    kind = "" if bases[0] not in tiny.SHIPPED else ", tiny models" if len(bases) > 1 else ", a tiny model"
    return f"base{'s' * (len(bases) > 1)} {' and '.join(bases)}{kind and kind + ' trained from scratch'}"


# ---- runs as rows


def setting(spec: Mapping[str, Any]) -> str:
    """Return the two settings of a run that its arm's map varies, in words."""
    return ", ".join(f"{name.replace('_', ' ')} {spec[name]:g}" for name in arms.swept(spec["arm"]))


def untrained(of: Records) -> dict[str, Record]:
    """Return base -> the record of the untrained base."""
    return {r["spec"]["base"]: r for r in of["base"]}


def rights_of_base(of: Records) -> dict[str, float]:
    """Return decoding -> share of right answers of the first untrained base on the test questions."""
    known = [of["base"][0]["test"], *(r["test"] for r in of["decodings"])]
    return {name: test[name] for test in known for name in style.STROKES if name in test}


def ends(of: Records, *names: str) -> DataFrame:
    """Return a row per run of some groups: how it ended, and where it came to levels on the way.

    Of each decoding "proxy" (split A, characters), "right" (split B, %), "lost" (share of right answers since the
    start), "tested" (share of right test questions) and "hacked". Of each level the greedy right answers
    in % at the first point that reaches it. "solved" is where the reward in training first comes to -0.5: KL in nats,
    and right answers in %. "no signal": the share of ES's populations, or GRPO's groups, whose rewards are all alike.
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


def gaps(of: Records) -> DataFrame:
    """Return a row per run of the declared settings and the maps: how it ended, and its Jensen gaps by sigma."""
    runs = {r["spec_hash"]: r for group in ("es", "grpo", "es_map", "grpo_map") for r in of[group]}.values()
    rows = []
    for r in runs:
        row = {"arm": r["spec"]["arm"], "setting": setting(r["spec"]), "seed": r["spec"]["seed"]}
        rows.append(row | {"end": collapse.end(r), "centre": r["jensen"]["centre"]} | r["jensen"]["gaps"])
    return pd.DataFrame(rows)


def es_cells(of: Records) -> DataFrame:
    """Return a row per base and setting of the map of ES: means over seeds at the end of training, greedily."""
    runs = ends(of, "es_map", "es_map_elsewhere")
    runs = runs.assign(away=-runs["proxy greedy"], right=runs["share greedy"])
    runs["collapsed"] = [float(hacking.fell(-lost, 0)) for lost in runs["lost greedy"]]
    columns = {"seeds": ("seed", "size")} | {name: (name, _mean) for name in ("away", "KL", "right", "collapsed")}
    found = cells(runs, ["base", "sigma", "alpha"], columns)
    return found.assign(right=100 * found["right"])


def _mean(values: pd.Series) -> float:
    return float(np.mean(values.to_numpy()))  # what pandas makes of it differs in the last bit


def published_runs(records: Sequence[Record]) -> DataFrame:
    """Return a row per published run: what it earned, what detectors and grader find, and the verdict."""
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
    return points.assign(
        shortfall=-points["strict"], **{v: points["verdict"] == v for v in ("hacked", "worse", "clean")}
    )


# ---- where a run first comes to a level


def reach(record: Record, decoding: str, axis: str, level: float) -> dict[str, Any]:
    """Return right answers where a run first comes to a level of proxy reward ("at_proxy") or of KL ("at_kl").

    Returns:
        "first": those of each problem at the first point that reaches the level. Where that is not the run's start:
        "at", where the run is then on the axis; "line", right answers on the line between this point and the one
        before; and "best", those at the best of all points at or past a level of the proxy. Past a level of KL the
        best point would be the one that has gone least far. Nothing, where the run never gets there.
    """
    values, right = (
        record["curve"]["kl" if axis == "at_kl" else f"proxy_{decoding}"],
        record["curve"][f"right_{decoding}"],
    )
    i = next((i for i, value in enumerate(values) if value >= level), None)
    if i is None:
        return {}
    found = {"first": collapse.right_at(record, decoding, **{axis: level})}
    if i > 0:
        part = (level - values[i - 1]) / (values[i] - values[i - 1])
        found |= {"at": values[i], "line": right[i - 1] + (right[i] - right[i - 1]) * part}
        if axis == "at_proxy":
            found["best"] = max(y for x, y in zip(values, right, strict=True) if x >= level)
    return found


def matched(of: Records, decoding: str, level: str) -> Results:
    """Compare the right answers of the declared settings where each run first comes to a level, a key of LEVELS.

    Returns:
        For each arm its "runs" that come there, their "right" answers in %, and where they are "at" then. ES - GRPO at
        the "first" point, over seeds and problems; and by the controls "line" and "best" of `reach`, over seeds. None
        where fewer than two runs of an arm get there.
    """
    sides = {arm: [reach(r, decoding, *LEVELS[level]) for r in of[arm]] for arm in ARMS}
    scores = {
        how: [[run[how] for run in sides[arm] if how in run] for arm in ARMS] for how in ("first", "at", "line", "best")
    }
    found: Results = {}
    for arm, first, at in zip(ARMS, scores["first"], scores["at"], strict=True):
        found |= {f"{arm} runs": len(first), f"{arm} right": 100 * np.mean(first) if first else None}
        found[f"{arm} at"] = float(np.mean(at)) if at else None
    for how in ("first", "line", "best"):
        es, grpo = scores[how]
        if min(len(es), len(grpo)) < 2:
            found[how] = None
        else:
            found[how] = (
                stats.crossed_bootstrap(es, grpo) if how == "first" else stats.stratified_bootstrap([es], [grpo])
            )
    return found


# ---- what the notebook finds


def results(run: SimpleNamespace, of: Records, published: Sequence[Record] = ()) -> Results:
    """Return what the answers, the tables and the paper quote, by name.

    Right answers are in %, "away" (the distance from the target length) and gaps in characters; intervals of right
    answers and of hacked runs are shares.

    Args:
        run: parameters and settings.
        of: records by group.
        published: records of the published completions; without them their results are missing.
    """
    sigma = f"{measure.noise_sigmas(run.bases[0])[0][1]:g}"
    found: Results = {"gap sigma": float(sigma)}
    for arm, part in ends(of, *ARMS).groupby("group", sort=False):
        found |= {f"{arm} runs": len(part), f"{arm} gap": np.mean([r["jensen"]["gaps"][sigma] for r in of[arm]])}
        for d in DECODINGS:
            found |= {
                f"{arm} {d} hacked": int(part[f"hacked {d}"].sum()),
                f"{arm} {d} right": part[f"right {d}"].mean(),
            }
            found[f"{arm} {d} away"] = -part[f"proxy {d}"].mean()
    for d in DECODINGS:
        counts = [found[name] for arm in ("grpo", "es") for name in (f"{arm} {d} hacked", f"{arm} runs")]
        found |= {f"{d} hacked, GRPO - ES": stats.rate_difference(*counts)}
        found |= {f"{d} Fisher": stats.fisher(*counts), f"{d} Barnard": stats.barnard(*counts)}
        for level in LEVELS:
            found |= {f"{d} {level}: {what}": value for what, value in matched(of, d, level).items()}
    base = rights_of_base(of)
    for group, part in ends(of, *REPEATED, *FEW).groupby("group", sort=False):
        found |= {f"{group} runs": len(part), f"{group} hacked": int(part["hacked greedy"].sum())}
        found[f"{group} no signal"] = part["no signal"].mean()
        for d in base if group in REPEATED else ():  # whatever the reward
            found[f"{group} {d} fell"] = sum(bool(hacking.fell(right, base[d])) for right in part[f"tested {d}"])
    return found | _of_maps(run, of, sigma) | _of_published(published)


def _of_maps(run: SimpleNamespace, of: Records, sigma: str) -> Results:
    found: Results = {"breaking sigma": collapse.breaking_sigma(of["base"][0])}
    for arm, runs in ends(of, "es_map", "grpo_map").groupby("group", sort=False):
        hacked, right = (runs.groupby("setting")[f"{what} greedy"].mean() for what in ("hacked", "right"))
        found |= {f"{arm} settings": len(hacked), f"{arm} least right": right.min(), f"{arm} most right": right.max()}
        found |= {f"{arm} never hacked": int((hacked == 0).sum()), f"{arm} always hacked": int((hacked == 1).sum())}
    settings = es_cells(of)
    walk = settings["alpha"] * (run.es_steps / run.es_population_size) ** 0.5
    broken = settings["base"].map({base: collapse.breaking_sigma(r) for base, r in untrained(of).items()})
    beyond = np.maximum(settings["sigma"], walk) > broken  # one of the two lines
    collapsed = settings["collapsed"] >= 0.5
    for where, chosen in (("within", ~beyond), ("beyond", beyond)):
        found |= {f"settings {where}": int(chosen.sum()), f"collapsed {where}": int(collapsed[chosen].sum())}
    found |= {"settings": len(settings), "safe": int((~collapsed).sum())}
    found["settings without collapse"] = stats.wilson(found["safe"], found["settings"])
    for arm, part in gaps(of).groupby("arm"):
        sides = [
            [own[sigma].to_numpy() for _, own in part[part["end"] == end].groupby("setting", sort=False)]
            for end in ENDS
        ]
        if all(sum(map(len, side)) > 1 for side in sides):
            found[f"{arm} gap, hacked - clean"] = stats.nested_bootstrap(*sides)
    return found


ENDS = ("hacked", "clean")
"""Ends whose Jensen gaps are compared."""


def _of_published(records: Sequence[Record]) -> Results:
    if not records:
        return {}
    points = published_runs(records)
    names = ("completions", "reproduced", "changed", "all_empty")
    found: Results = {"published runs": len(points)} | {f"published {name}": int(points[name].sum()) for name in names}
    for arm, part in points.groupby("arm"):
        found |= {f"published {arm} runs": len(part), f"published {arm} hacked": int(part["hacked"].sum())}
    return found


MACROS = {"TinyHackSeeds": ("es runs", "d"), "TinyHackedFisher": ("greedy Fisher", ".2g")}
MACROS |= {"TinyAgainEsRuns": ("es_repeat runs", "d"), "TinyFewTied": ("es_few no signal", ".0f")}
MACROS |= {"TinySafe": ("safe", "d"), "TinyMapped": ("settings", "d"), "TinyBreaking": ("breaking sigma", ".3f")}
for _where in ("within", "beyond"):
    MACROS |= {f"Tiny{_where.title()}": (f"settings {_where}", "d")}
    MACROS |= {f"Tiny{_where.title()}Collapsed": (f"collapsed {_where}", "d")}
for _arm in ARMS:
    MACROS |= {f"Tiny{_arm.title()}Gap": (f"{_arm} gap", ".2f")}
    MACROS |= {f"TinyFew{_arm.title()}{what.title()}": (f"{_arm}_few {what}", "d") for what in ("runs", "hacked")}
    MACROS |= {f"TinyAgain{_arm.title()}FellWarm": (f"{_arm}_repeat t0.6 fell", "d")}
    for _decoding, _word in (("greedy", "Greedy"), ("t1", "Sampled")):
        MACROS |= {f"TinyAgain{_arm.title()}Fell{_word}": (f"{_arm}_repeat {_decoding} fell", "d")}
        for _macro, _name, _form in (("Hacked", "hacked", "d"), ("Right", "right", ".1f"), ("Proxy", "away", ".1f")):
            MACROS |= {f"Tiny{_arm.title()}{_macro}{_word}": (f"{_arm} {_decoding} {_name}", _form)}
for _macro, _level, _how in (
    ("RightAtFive", "reward -5", "first"),
    ("RightAtTwo", "reward -2", "first"),
    ("RightAtHalf", "KL 0.5", "first"),
    ("LineHalf", "KL 0.5", "line"),
    ("LineFive", "reward -5", "line"),
    ("BestFive", "reward -5", "best"),
):
    MACROS |= {f"Tiny{_macro}": (f"greedy {_level}: {_how}", ".1%")}
"""The paper's numbers about the notebook's own models: macro -> name of a result, and format."""

PUBLISHED_MACROS = {
    "ConcisePublished": ("published completions", ",d"),
    "ConciseAllEmpty": ("published all_empty", "d"),
}
PUBLISHED_MACROS |= {f"Concise{x.title()}": (f"published {x}", ",d") for x in ("reproduced", "changed")}
PUBLISHED_MACROS |= {
    f"Concise{arm.title()}{what.title()}": (f"published {arm} {what}", "d")
    for arm, what in product(("ES", "GRPO"), ("runs", "hacked"))
}
"""Those about the published completions."""


# ---- the answers, in words


def answers(found: Results) -> dict[str, str]:
    """Return question -> the sentence that answers it, with its numbers and intervals.

    found: of `results`; without published completions their question is left out.
    """
    said = {
        "Which arm hacks its reward more often?": _hacking_in_words(found),
        "Which arm keeps more right answers at the same reward, and at the same KL?": _matching_in_words(found),
        "Does that hold for other settings?": _settings_in_words(found),
        "Which settings of ES destroy the answers?": (
            "Those whose noise, or whose random walk, is large enough to break the untrained base: "
            f"{found['collapsed beyond']} of {found['settings beyond']} such settings collapse, and "
            f"{found['collapsed within']} of the {found['settings within']} others. In all, "
            f"{stated(found['settings without collapse'], '.0%')} % of {found['settings']} settings do not collapse."
        ),
        "Is a hacked model more fragile under noise on its weights?": _gaps_in_words(found),
    }
    if "published runs" in found:
        each = [f"{found[f'published {x} hacked']} of {found[f'published {x} runs']} of {x}" for x in ("ES", "GRPO")]
        said["What do published completions of a 7 B model say?"] = (
            f"The published rule, every answer empty, finds {found['published all_empty']} of "
            f"{found['published runs']} runs hacked. By what the answers say, {listed(each)} are hacked; the settings "
            "of the arms are not matched."
        )
    return said


def _hacking_in_words(found: Results) -> str:
    words, signs = [], set()
    for d in DECODINGS:
        apart = found[f"{d} hacked, GRPO - ES"]
        signs |= {np.sign(apart.value)} if excludes_zero(apart) else set()
        es, grpo = (f"{found[f'{arm} {d} hacked']} of {found[f'{arm} runs']}" for arm in ARMS)
        words.append(f"{UNDER[d]}, {es} runs of ES and {grpo} of GRPO are hacked (GRPO - ES: {stated(apart)} points)")
    return f"{'It depends on decoding. ' * (len(signs) == 2)}{sentence(words)}."


def _matching_in_words(found: Results) -> str:
    sentences = []
    for d, reward in {"greedy": "-5", "t1": "-15"}.items():
        each = []
        for level, words in ((f"reward {reward}", f"a reward of {reward}"), ("KL 0.5", "a KL of 0.5 nats")):
            first, line = (stated(found[f"{d} {level}: {how}"], missing=MISSING) for how in ("first", "line"))
            each.append(f"{first} points at {words} (interpolated: {line})")
        said = f"{UNDER[d]}, ES - GRPO is {listed(each)}, n = {found['es runs']} seeds per arm."
        sentences.append(sentence([said]))
    return " ".join(sentences)


def _settings_in_words(found: Results) -> str:
    words = []
    for arm in ARMS:
        own = {name: found[f"{arm}_map {name}"] for name in ("settings", "never hacked", "always hacked")}
        low, high = (f"{found[f'{arm}_map {end} right']:.0f}" for end in ("least", "most"))
        words.append(
            f"of {own['settings']} settings of {LABELS[arm]}, {own['never hacked']} end without a hacked run and "
            f"{own['always hacked']} with hacked runs only, right on {low} to {high} % of the questions"
        )
    return f"Either arm can keep or destroy the answers. Greedily, {'; '.join(words)}."


def _gaps_in_words(found: Results) -> str:
    apart = {LABELS[arm]: found.get(f"{arm} gap, hacked - clean") for arm in ("grpo", "es")}
    apart = {label: interval for label, interval in apart.items() if interval}
    if not apart:
        return "Not known: no map has hacked and clean runs to compare."
    parted = [label for label, interval in apart.items() if excludes_zero(interval)]
    head = f"The two differ for {' and '.join(parted)}." if parted else "No difference is established."
    each = [f"{stated(interval, '.2f')} for {label}" for label, interval in apart.items()]
    return (
        f"{head} By noise of sigma {found['gap sigma']:g} the reward falls further at hacked ends than at clean ones "
        f"by {' and '.join(each)}, in characters, over the settings of a map."
    )


# ---- tables


def end_rows(of: Records, *names: str) -> DataFrame:
    """Return a row per setting of some groups: how its runs end, greedily and at temperature 1."""
    columns: dict[str, Any] = {"seeds": ("seed", "size")}
    for d, short in (("greedy", ""), ("t1", ", t1")):
        columns |= {f"proxy{short}": (f"proxy {d}", ".1f"), f"right{short}, %": (f"right {d}", ".0f")}
        columns[f"hacked{short}"] = (f"hacked {d}", "sum")
    columns |= {"no answer, %": ("no answer", ".0f"), "KL": ("KL", ".1f"), "core-s": ("core_seconds", ".0f")}
    columns |= {"thousand": ("completions", lambda spent: f"{spent.mean() / 1000:.0f}")}
    rows = cells(ends(of, *names), ["group", "arm", "setting"], columns).drop(columns="group")
    return rows[[*rows.columns[:-2], "thousand", "core-s"]]


def matched_rows(found: Results) -> DataFrame:
    """Return a row per decoding and level: right answers of both arms where runs first come to it, and ES - GRPO.

    The difference is that of `matched`, then those of its two controls. Of the rewards to which too few runs of an arm
    come, the first has a row.
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


def example_rows(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per question: what the base answers greedily, the declared runs with most and fewest right answers,
    and of each map the run with fewest."""
    columns = {"base": untrained(of)[run.bases[0]]}
    for arm in ARMS:
        ranked = sorted(of[arm], key=lambda r: r["test"]["greedy"])
        columns |= {f"{LABELS[arm]}, most right": ranked[-1], f"{LABELS[arm]}, fewest right": ranked[0]}
    for arm in ARMS:
        worst = min(of[f"{arm}_map"], key=lambda r: r["test"]["greedy"])
        columns[f"{LABELS[arm]}, {setting(worst['spec'])}"] = worst
    rows = [{"question": "right, %"} | {name: f"{100 * r['test']['greedy']:.0f}" for name, r in columns.items()}]
    for i, problem in enumerate(measure.splits(columns["base"]["spec"])["test"][: run.questions_shown]):
        rows.append({"question": problem.question} | {name: r["shown"][i] for name, r in columns.items()})
    return pd.DataFrame(rows)


# ---- figures: each with what it plots

_AXES = {
    "KL": "KL from the base, nats per completion",
    "proxy": "reward on split A, characters",
    "away": "distance from the target length, characters",
    "right": "right answers on split B, %",
}
_NEAREST = 0.02  # characters: on a logarithmic axis a run at the target itself has no place
_LEAST_KL = 3e-3  # nats, likewise for the untrained base
_BOUND = {"color": "black", "lw": 1.2, "ls": (0, (1, 2))}
_HACKED = {"es": "x", "grpo": "+"}  # two crosses, for a grey print
_PLOTTED = ["arm", "setting", "seed", "decoding", "end"]


def curves(of: Records) -> DataFrame:
    """Return a row per point of the declared runs, and the last points of the maps' other runs, by decoding."""
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


def answer_figure(run: SimpleNamespace, of: Records, found: Results) -> tuple[Figure, DataFrame]:
    """Draw right answers at the ends of the declared runs, and ES - GRPO at matched reward and KL, by decoding."""
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.8), width_ratios=(1, 1.25))
    last, rows = curves(of).query("last and declared").assign(panel="end"), []
    for i, d in enumerate(DECODINGS):
        start = 100 * untrained(of)[run.bases[0]]["point"][f"right_{d}"]
        axes[0].plot([i - 0.42, i + 0.42], [start] * 2, color=style.ARMS["base"].color, lw=1.4)
        axes[0].plot([i - 0.42, i + 0.42], [start - 100 * hacking.DROP] * 2, **_BOUND)
        for arm, offset in zip(ARMS, (-0.2, 0.2), strict=True):
            part = last[(last["arm"] == arm) & (last["decoding"] == d)]
            _scatter(axes[0], i + offset + style.jitter(len(part), 0.28), part["right"], part["end"], arm, 16)
            rows.append(part[["panel", "decoding", "arm", "right"]].rename(columns={"right": "value"}))
    axes[0].set(xticks=range(len(DECODINGS)), xticklabels=[style.STROKES[d].label for d in DECODINGS])
    axes[0].set(xlim=(-0.5, len(DECODINGS) - 0.5), title="at the end of training", ylabel=_AXES["right"])
    axes[0].grid(axis="x", visible=False)
    asked: dict[str, Any] = {}
    for level in ("reward -15", "reward -5", "KL 0.2", "KL 0.5"):
        fewest = {d: min(ARMS, key=lambda arm: found[f"{d} {level}: {arm} runs"]) for d in DECODINGS}
        words = {d: f"{LABELS[arm]} does not get there" for d, arm in fewest.items()}
        asked[level] = {d: found[f"{d} {level}: first"] or words[d] for d in DECODINGS}
    rows.append(pd.DataFrame(marks.differences(axes[1], asked, "upper right")).rename(columns={"name": "at"}))
    axes[1].set(title="where a run first comes to a level", xlabel="right answers, ES - GRPO, points")
    base = marks.handle("the base", ls="-", lw=1.4, color=style.ARMS["base"].color)
    marks.key(fig, [*_arms(of), *_hacked(), base, marks.handle("20 points below the base", **_BOUND)])
    return fig, pd.concat(rows).fillna({"panel": "matched"})


def ways_and_ends(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw right answers against the distance from the target, by decoding: ways of the declared runs, and all ends."""
    points = curves(of)
    fig, axes = plt.subplots(2, 2, figsize=(style.PAGE, 4.0), sharey="row", sharex="col")
    for column, d in zip(axes.T, DECODINGS, strict=True):
        own = points[points["decoding"] == d]
        _ways(column[0], own, "away", "right")
        for (declared, arm), part in own[own["last"]].groupby(["declared", "arm"]):
            _scatter(column[1], part["away"], part["right"], part["end"], arm, 24 if declared else 12, declared)
        column[0].set(title=style.STROKES[d].label, xscale="log")
        column[1].set_xlabel(_AXES["away"])
        column[0].invert_xaxis()
        bound = untrained(of)[run.bases[0]]["point"][f"right_{d}"] - hacking.DROP
        for ax in column:
            ax.axhline(100 * bound, **_BOUND)
            marks.plain_ticks(ax)
    for row, what in zip(axes, ("on the way", "at the end"), strict=True):
        row[0].set_ylabel(f"{what}:\n{_AXES['right']}")
    kinds = [marks.handle("setting compared by C3", marker="o", color="#555555", ms=4.5)]
    kinds += [marks.handle("other settings", marker="o", color="#555555", mfc="none", ms=3)]
    marks.key(fig, [*_arms(of), *kinds, *_hacked(), marks.handle("20 points below the base", **_BOUND)])
    return fig, points[[*_PLOTTED, "away", "right"]].drop_duplicates()


def fronts(of: Records) -> tuple[Figure, DataFrame]:
    """Draw the proxy reward against the KL from the base along the declared runs, by decoding."""
    points = curves(of).query("declared")
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.3), sharey=True)
    for ax, d in zip(axes, DECODINGS, strict=True):
        _ways(ax, points[points["decoding"] == d], "KL", "proxy", size=2.4)
        ax.set(title=style.STROKES[d].label, xlabel=_AXES["KL"], xscale="log")
        marks.plain_ticks(ax)
    axes[0].set_ylabel(_AXES["proxy"])
    marks.key(fig, _arms(of))
    return fig, points[[*_PLOTTED, "KL", "proxy"]].drop_duplicates()


def _ways(ax: Axes, points: DataFrame, x: str, y: str, size: float = 3) -> None:
    """Mean way of each arm with a band over seeds, and marks of a size in points where runs were measured."""
    for arm, part in points[points["declared"]].groupby("arm"):
        xs, ys = (part.pivot(index="seed", columns="point", values=name).to_numpy() for name in (x, y))
        look, (mean, low, high) = style.ARMS[arm], stats.curve_band(ys)
        style.band(ax, xs.mean(0), low, high, look.color)
        ax.plot(xs.mean(0), mean, color=look.color, lw=1.6, marker=look.marker, ms=size)


def es_map(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw a map of right answers over sigma and alpha for each base, darker where it is worse.

    In brackets stands the distance from the target length; a cross says that the runs collapsed. The two lines are
    where noise, and where a random walk, is as large as the noise that halves the base's right answers.
    """
    import seaborn
    from matplotlib.colors import ListedColormap

    table, bases = es_cells(of), untrained(of)
    pale = ListedColormap(seaborn.light_palette("#98A1B0", n_colors=5, reverse=True))
    ground = {"cmap": pale, "vmin": table["right"].min(), "vmax": table["right"].max()}
    fig, axes = plt.subplots(1, len(bases), figsize=(style.PAGE, 2.2), sharey=True, squeeze=False)
    fig.get_layout_engine().set(wspace=0.06)
    for ax, (base, record) in zip(axes[0], bases.items(), strict=True):
        values = marks.heat(ax, table[table["base"] == base], ("alpha", "sigma"), "right", _cell_in_words, **ground)
        limits, critical = (ax.get_xlim(), ax.get_ylim()), collapse.breaking_sigma(record)
        walk = critical * (run.es_population_size / run.es_steps) ** 0.5
        x, y = _place(values.columns, walk), _place(values.index, critical)
        ax.axvline(x, ls=(0, (4, 2)), color="black", lw=1.2)
        ax.axhline(y, ls=(0, (1, 1.5)), color="black", lw=1.2)
        ax.set(xlim=limits[0], ylim=limits[1], xlabel="alpha")
        ax.set_title(f"{base}: right answers, % (distance)", pad=16)
        words = {"fontsize": 6.5, "annotation_clip": False, "textcoords": "offset points"}
        ax.annotate("walk breaks the base →", (x, limits[1][1]), (0, 3), ha="left", **words)
    ax.annotate("↑ noise\nbreaks\nthe base", (limits[0][1], y), (3, -2), va="bottom", **words)
    axes[0, 0].set_ylabel("sigma")
    return fig, table


def _cell_in_words(cell: Mapping[str, Any]) -> str:
    return f"{cell['right']:.0f}{' ✕' if cell['collapsed'] >= 0.5 else ''} ({cell['away']:.1f})"


def _place(values: Sequence[float], at: float) -> float:
    """Where a value lies on an axis whose cells are even steps of the logarithm."""
    return float(np.polyval(np.polyfit(np.log(np.array(values, float)), range(len(values)), 1), np.log(at)))


_OUTLIERS = 3  # a setting is named whose runs all lie so many times farther from the median than three runs of four


def gaps_by_end(of: Records) -> tuple[Figure, DataFrame]:
    """Draw the Jensen gap of every run by arm and end, with medians; settings far from the others are named.

    At the middle sigma, with which the declared ES trains.
    """
    table = gaps(of)
    sigma = table.columns[-2]
    fig, ax = plt.subplots(figsize=(1.3 * style.COLUMN, 2.6))
    spread = (table[sigma] - table[sigma].median()).abs().quantile(0.75)
    kinds = list(product(ARMS, ENDS[::-1]))
    for x, (arm, end) in enumerate(kinds):
        part = table[(table["arm"] == arm) & (table["end"] == end)]
        if part.empty:
            continue
        median = part[sigma].median()
        _scatter(ax, x + style.jitter(len(part), 0.5), part[sigma], part["end"], arm, 12)
        ax.plot([x - 0.36, x + 0.36], [median] * 2, color="black", lw=1.4, zorder=5)
        for name, own in part.groupby("setting"):
            if len(own) > 1 and (own[sigma] - median).abs().min() > _OUTLIERS * spread:
                ax.annotate(name.replace(", ", "\n"), (x + 0.35, own[sigma].mean()), va="center", fontsize=6)
    names = [f"{LABELS[arm]},\n{end}" for arm, end in kinds]
    ax.axhline(0, color="#999999", lw=0.8, zorder=0.5)
    ax.set(ylabel=f"Jensen gap at sigma {sigma}, characters", xticks=range(len(kinds)), xticklabels=names)
    ax.set_xlim(-0.6, len(kinds) - 0.4)
    ax.grid(axis="x", visible=False)
    marks.key(fig, [marks.handle("median", color="black", lw=1.4)])
    return fig, table


def published_figure(points: DataFrame) -> tuple[Figure, DataFrame]:
    """Draw right answers of the rows of `published_runs` against the distance from the target."""
    fig, ax = plt.subplots(figsize=(1.3 * style.COLUMN, 2.6))
    for (label, empty), part in points.groupby(["arm", "all_empty"]):
        look = style.ARMS[label.lower()]
        face = "none" if empty else look.color
        ax.scatter(part["shortfall"], part["right"], marker=look.marker, s=24, color=face, edgecolors=look.color)
    ax.set(xscale="log", xlabel=_AXES["away"], ylabel="right answers, %")
    ax.invert_xaxis()
    marks.plain_ticks(ax)
    handles = [marks.of_arm(label.lower(), len(part), ms=4.5) for label, part in points.groupby("arm")]
    marks.key(fig, [*handles, marks.handle("every answer empty", marker="o", color="#555555", mfc="none", ms=5)])
    return fig, points[["arm", "setting", "seed", "shortfall", "right", "verdict", "all_empty", "kl_token"]]


def _scatter(
    ax: Axes, x: Sequence[float], y: Sequence[float], end: Sequence[str], arm: str, size: float, filled: bool = True
) -> None:
    """A mark per run: open where it is not filled, a cross if it ended hacked."""
    look, x, y, hacked = style.ARMS[arm], np.asarray(x), np.asarray(y), np.asarray(end) == "hacked"
    face, edge, width = (look.color, "white", 0.4) if filled else ("none", look.color, 0.7)
    clean = {"marker": look.marker, "facecolors": face, "edgecolors": edge, "linewidths": width}
    ax.scatter(x[~hacked], y[~hacked], s=size, **clean)
    crossed = {"marker": _HACKED[arm], "color": look.color, "linewidths": 1.1 if filled else 0.7}
    ax.scatter(x[hacked], y[hacked], s=1.3 * size, **crossed)


def _arms(of: Records) -> list[Any]:
    return [marks.of_arm(arm, len(of[arm]), ms=4.5) for arm in ARMS]


def _hacked() -> list[Any]:
    return [marks.of_arm(arm, label=f"{LABELS[arm]}, hacked", marker=mark, ms=5) for arm, mark in _HACKED.items()]
