"""What notebook 08 says and tabulates: the answers, displacements, cosines, and models merged from several runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib.analysis import attenuation, curves, geometry, gram_matrix, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study import nb08_weight_geometry as study
from evoalign_study import style, trainers
from evoalign_study.loading import Records
from evoalign_study.records import Record, accuracy_matrix

if TYPE_CHECKING:
    from pandas import DataFrame

DECODINGS = tuple(style.STROKES)
"""Under which merged models are measured."""
PAIRS = (
    ("es", "grpo"),
    ("es", "dr_grpo"),
    ("es", "sft"),
    ("es", "es_sampled"),
    ("es_sampled", "grpo"),
    ("es", "grpo_sgd"),
    ("es_sampled", "grpo_sgd"),
    ("grpo", "dr_grpo"),
    ("grpo", "grpo_sgd"),
    ("grpo", "grpo_rounded"),
    ("grpo_sgd", "grpo_sgd_rounded"),
    ("grpo", "sft"),
    *((arm, study.FIRST_STEP) for arm in ("grpo", "grpo_sgd", "es", "es_sampled")),
    ("es_random", "grpo"),
    ("grpo_random", "grpo"),
)
"""Arms whose cosine is shown."""


def label(arm: str) -> str:
    """Return the name of a group of training runs in tables and legends."""
    return "GRPO's first step" if arm == study.FIRST_STEP else style.ARMS[arm].label


# ---- displacements


def displacements(of: Records, *arms: str) -> geometry.Displacements:
    """Return the products of all runs of some arms, by layer, in their order."""
    return gram_matrix.gram(of["products"], [run for arm in arms for run in of[arm]])


def rows_of(of: Records, *arms: str) -> list[list[int]]:
    """Return the rows of each arm in `displacements(of, *arms)`."""
    ends = np.cumsum([0, *(len(of[arm]) for arm in arms)]).tolist()
    return [list(range(first, last)) for first, last in zip(ends, ends[1:], strict=False)]


def norms(of: Records, arm: str) -> np.ndarray:
    """Return the norm of the displacement of each run, weight units."""
    return np.sqrt(np.diagonal(displacements(of, arm).total))


def over_walk(of: Records, arm: str) -> np.ndarray:
    """Return the norm of each run of an ES arm that moved over alpha sqrt(d T / N), T without its tied steps."""
    d, walks = displacements(of, arm).d, []
    for record in of[arm]:
        spec = record["spec"]
        steps = spec["steps"] - record["counts"]["tied"]
        walks.append(geometry.es_norm(spec["alpha"], d, steps, spec["population_size"]))
    moved = np.array(walks) > 0
    return norms(of, arm)[moved] / np.array(walks)[moved]


def is_es(arm: str) -> bool:
    """Return whether an arm's runs have a population."""
    return trainers.of(arm).has_members


def displacement_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per arm: norm, norm over the walk's, evenness over layers, the head, and weights that stay."""
    from pandas import DataFrame

    rows = []
    for arm in study.TRAINED:
        found = displacements(of, arm)
        uneven = [geometry.total_variation(shares, found.size_shares) for shares in found.shares.T]
        row = {"arm": label(arm), "runs": len(of[arm]), "norm": _mean_and_std(norms(of, arm), ".2f")}
        row["over a walk's"] = _mean_and_std(over_walk(of, arm), ".4f") if is_es(arm) else ""
        row["distance from even"] = _mean_and_std(uneven, ".3f")
        row["head over its size"] = _mean_and_std(head_shares(of, arm), ".2f")
        row |= {f"stay, {d}, %": _mean_and_std(100 * stay(of, arm, d), ".1f") for d in ("float32", "bfloat16")}
        if style.ARMS[arm].weights != "float32":  # rounding the base moves nearly every weight of it
            row["stay, float32, %"] = ""
        rows.append(row)
    null = geometry.size_null(displacements(of, "es").entries)
    random = {"arm": "a random direction", "runs": "", "norm": "any", "over a walk's": "", "head over its size": "1.00"}
    rows.append(random | {"distance from even": f"< {null.distance:.3f}"} | dict.fromkeys(list(rows[0])[-2:], ""))
    return DataFrame(rows)


def head_shares(of: Records, arm: str) -> np.ndarray:
    """Return the head's share of the squared displacement of each run over its share of the weights.

    The head of these models is their embedding.
    """
    found = displacements(of, arm)
    row = next(i for i, name in enumerate(found.names) if name in ("head", "embedding (tied)"))
    return found.shares[row] / found.size_shares[row]


def _mean_and_std(values: Sequence[float] | np.ndarray, fmt: str) -> str:
    values = np.asarray(values, np.float64)
    if not len(values):
        return ""
    spread = f" ± {values.std(ddof=1):{fmt}}" if len(values) > 1 else ""
    return f"{values.mean():{fmt}}{spread}"


VARIATIONS = ("grpo", "grpo_rounded", "grpo_sgd", "grpo_sgd_rounded")
"""GRPO with either optimiser, and with weights stored as either dtype."""


def stay(of: Records, arm: str, dtype: str = "bfloat16") -> np.ndarray:
    """Return the share of the weights of each run that stay where the base has them, both ends rounded to dtype."""
    found = displacements(of, arm)
    return (found.unmoved(dtype) * found.entries[:, None]).sum(0) / found.d


def factorial_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per optimiser and dtype of GRPO: rate, weights that stay, norm, head, and what the runs can do."""
    from pandas import DataFrame

    rows = []
    for arm in VARIATIONS:
        entry = style.ARMS[arm]
        row = {"optimiser": "SGD" if entry.options.get("optim") == "sgd" else "AdamW", "weights": entry.weights}
        row |= {"learning rate": f"{of[arm][0]['spec']['learning_rate']:g}", "runs": len(of[arm])}
        row["stay, bfloat16, % [95 %]"] = stats.bootstrap_mean(stay(of, arm)).format()
        row["norm"] = _mean_and_std(norms(of, arm), ".2f")
        row["head over its size"] = _mean_and_std(head_shares(of, arm), ".2f")
        for decoding in style.DECODINGS:
            right = stats.crossed_bootstrap(accuracy_matrix(of[arm], decoding))
            row[f"{style.STROKES[decoding].label}, % [95 %]"] = right.format()
        rows.append(row)
    return DataFrame(rows)


# ---- cosines


def corrected(of: Records, a: str, b: str) -> attenuation.Corrected:
    """Return the cosine of what the runs of two arms have in common."""
    return attenuation.corrected_cosine(displacements(of, a, b).total, *rows_of(of, a, b))


def signal(of: Records, arm: str) -> attenuation.Signal:
    """Return what the runs of an arm have in common."""
    return attenuation.signal(displacements(of, arm).total)


def signal_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per arm: how much of a run is common to all of them."""
    from pandas import DataFrame

    rows = []
    for arm in [arm for arm in (*study.TRAINED, study.FIRST_STEP) if len(of[arm]) > 1]:
        found = signal(of, arm)
        row = {"arm": label(arm), "runs": len(of[arm]), "common share of |D|^2 [95 %]": interval(found.share, 4)}
        row["norm of the common part"] = f"{np.sqrt(found.square.value):.2f}" if found.square.value > 0 else "none"
        row |= {"norm of the mean": f"{found.mean_norm:.2f}", "cosine of two runs": f"{found.run_cosine:.4f}"}
        rows.append(row)
    return DataFrame(rows)


def cosine_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per pair of arms: the cosine of two runs, of the means of all, and of what each has in common."""
    from pandas import DataFrame

    rows = []
    for a, b in PAIRS:
        if min(len(of[a]), len(of[b])) < 2:
            continue
        found = corrected(of, a, b)
        row = {"arms": f"{label(a)} and {label(b)}", "runs": f"{len(of[a])} and {len(of[b])}"}
        row |= {"two runs": f"{found.run_cosine:.4f}", "means": f"{found.mean_cosine:.3f}"}
        rows.append(row | {"in common [95 %]": in_words(found.value, 2)})
    return DataFrame(rows)


def interval(found: Interval, digits: int) -> str:
    """Return an interval in words, in its own unit."""
    return found.format(percent=False, digits=digits)


def in_words(found: Interval, digits: int) -> str:
    """Return an interval in words, in its own unit, where there is one."""
    return "not to be told" if np.isnan(found.low) else interval(found, digits)


# ---- models merged from several runs


def accuracies(found: Sequence[Record], decoding: str) -> np.ndarray:
    """Return the test accuracy of each merged model, fractions."""
    return accuracy_matrix(found, decoding).mean(axis=1)


def skill(record: Record, what: str) -> float:
    """Return the mean over skills that no reward touches: "greedy" accuracy, or "kl" from the base, nats per token."""
    return float(np.mean([each[what] for each in record["skills"].values()]))


def merged_rows(run: SimpleNamespace, of: Records) -> list[tuple[str, list[Record]]]:
    """Return what each kind of merged model is called, with its records."""
    found = [(label("base"), of["es times 0"])] if 0 in run.multiples else []
    for arm, sizes in run.means.items():
        for size in sizes:
            what = f"{label(arm)}, one run" if size == 1 else f"{label(arm)}, mean of {size}"
            found.append((what, of[f"{arm} mean={size}"]))
    for arm, size in run.shrunk.items():
        found.append((f"{label(arm)}, one run as short as the mean of {size}", of[f"{arm} shrunk={size}"]))
    found.append((f"{label('es')}, one run as short as the mean of {run.shrunk_far}", of["es shrunk far"]))
    found.append((f"random directions with the norms of {label('es')}", of["random"]))
    for factor in filter(None, run.multiples):
        found.append((f"{label('es')}, {factor:g} times the mean of all", of[f"es times {factor:g}"]))
    for arm in study.SHORTER:
        found += [(f"{label(arm)}, {steps} steps", shorter) for steps, shorter in by_steps(run, of, arm)[:-1]]
    return [(what, records) for what, records in found if records]


def remedies(run: SimpleNamespace) -> dict[str, str]:
    """Return group -> name of the runs that may drift less."""
    found = {study.anchored_name(decay): f"{label('es_anchored')}, {decay:g} a step" for decay in run.anchor_decays}
    return found | {study.sized_name(N): f"{label('es')}, N = {N}" for N in run.populations}


def drift_ratio(of: Records, a: str, b: str) -> Interval:
    """Return the geometric mean of the KL on other skills of models of one group over that of another."""
    return _ratio(*([skill(record, "kl") for record in of[group]] for group in (a, b)))


def _ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return the geometric mean of a over that of b; NaN where one of them is 0."""
    if min(*a, *b) <= 0:
        return Interval(np.nan, np.nan, np.nan, min(len(a), len(b)))
    found = stats.stratified_bootstrap([np.log(a)], [np.log(b)])
    return Interval(*np.exp([found.value, found.low, found.high]).tolist(), found.n, found.level)


def by_steps(run: SimpleNamespace, of: Records, arm: str) -> list[tuple[int, list[Record]]]:
    """Return steps and measured models of an arm's shorter runs and of its full ones.

    A shorter run is no part of a longer one, since its prompts are others; it is drawn as one that stops there.
    """
    full = of[arm][0]["spec"]["steps"]
    found = [(steps, of[f"{name} mean=1"]) for name, steps in study.shorter_names(run, arm, full).items()]
    return [*found, (full, of[f"{arm} mean=1"])]


def equal_gain(run: SimpleNamespace, of: Records) -> list[tuple[int, float, Interval]]:
    """Return how far GRPO drifts over how far ES does, where GRPO solves greedily what ES does.

    An entry per number of steps of ES: the steps, its mean accuracy (a fraction), and the ratio
    (`curves.cost_at_equal_score`, from the base on, whose KL is 0).
    """
    base = float(np.mean(of["base"][0]["test"]["greedy"]))
    sides = {
        arm: [
            (accuracies(models, "greedy"), np.array([skill(record, "kl") for record in models]))
            for _, models in by_steps(run, of, arm)
        ]
        for arm in study.SHORTER
    }
    lengths = [steps for steps, _ in by_steps(run, of, "es")]
    return [
        (steps, float(own[0].mean()), curves.cost_at_equal_score(sides["grpo"], own, start=base))
        for steps, own in zip(lengths, sides["es"], strict=True)
    ]


def equal_gain_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per number of steps of ES: its accuracy and drift, and GRPO's drift where it solves as much."""
    from pandas import DataFrame

    rows = []
    for (steps, right, ratio), (_, models) in zip(equal_gain(run, of), by_steps(run, of, "es"), strict=True):
        row = {"steps of ES": steps, "runs": len(models), "greedy, %": f"{100 * right:.1f}"}
        row["KL off the task"] = f"{np.mean([skill(r, 'kl') for r in models]):.3f}"
        rows.append(row | {"GRPO's there, times [95 %]": in_words(ratio, 2)})
    return DataFrame(rows)


def merged_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per kind of merged model: norm, accuracy under each decoding, KL on the task and off it, skills."""
    from pandas import DataFrame

    rows = []
    for what, found in merged_rows(run, of):
        row = {"model": what, "models": len(found), "norm": f"{np.mean([r['norm'] for r in found]):.2f}"}
        row |= {f"{style.STROKES[d].label}, %": f"{100 * accuracies(found, d).mean():.1f}" for d in DECODINGS}
        row["KL on the task"] = f"{np.mean([r['kl_policy_base']['exact_nats_per_token'] for r in found]):.4f}"
        row["KL off the task"] = f"{np.mean([skill(r, 'kl') for r in found]):.4f}"
        row["other skills, %"] = f"{100 * np.mean([skill(r, 'greedy') for r in found]):.1f}"
        rows.append(row)
    return DataFrame(rows)


def remedy_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per way of drifting less: norm, and drift and accuracies against those of a run of ES."""
    from pandas import DataFrame

    size, rows = run.shrunk["es"], []
    kinds = {f"{name} mean=1": what for name, what in remedies(run).items()}
    for group, what in (kinds | {f"es mean={size}": f"{label('es')}, mean of {size}"}).items():
        row = {"model": what, "models": len(of[group]), "norm": f"{np.mean([r['norm'] for r in of[group]]):.2f}"}
        row["drift, times [95 %]"] = interval(drift_ratio(of, group, "es mean=1"), 2)
        for decoding in DECODINGS:
            gain = accuracy_difference(of, group, "es mean=1", decoding)
            row[f"{style.STROKES[decoding].label}, points [95 %]"] = gain.format()
        rows.append(row)
    return DataFrame(rows)


def skills_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per kind of model and skill: greedy accuracy and KL from the base, means over models."""
    from pandas import DataFrame

    four = max(size for size in run.means["es"] if len(of[f"es mean={size}"]) > 1)
    kinds = {label("base"): of["es times 0"]} if 0 in run.multiples else {}
    kinds |= {f"{label(arm)}, one run": of[f"{arm} mean=1"] for arm in ("es", "grpo", "es_random", "grpo_random")}
    kinds[f"{label('es')}, mean of {four}"] = of[f"es mean={four}"]
    rows = []
    for what, found in kinds.items():
        row = {"model": what, "models": len(found)}
        for name in found[0]["skills"]:
            right, kl = (np.mean([r["skills"][name][key] for r in found]) for key in ("greedy", "kl"))
            row[f"{name}: right, %; KL"] = f"{100 * right:.1f}; {kl:.3f}"
        rows.append(row)
    return DataFrame(rows)


def accuracy_difference(of: Records, a: str, b: str, decoding: str) -> Interval:
    """Return by how much models of one group are more accurate than those of another, fractions."""
    return stats.crossed_bootstrap(accuracy_matrix(of[a], decoding), accuracy_matrix(of[b], decoding))


# ---- the answers


def answers(run: SimpleNamespace, of: Records) -> dict[str, str]:
    """Return question -> one sentence with its number, interval and n."""
    size, many = run.shrunk["es"], max(run.means["es"])
    es, grpo = signal(of, "es"), signal(of, "grpo")
    walk, null = (_mean_in_words(over_walk(of, arm)) for arm in ("es", "es_random"))
    found = {
        "How far does ES move, and why?": (
            f"{norms(of, 'es').mean() / norms(of, 'grpo').mean():.1f} times as far as GRPO. Its norm over that of a "
            f"random walk of as many steps is {walk}; with random fitness it is {null}."
        ),
        "How much of a run is what ES has learned?": (
            f"Of the squared length of an ES run, {_percent(es.share)} is common to all runs (n = {es.share.n}); of a "
            f"GRPO run {_percent(grpo.share)} (n = {grpo.share.n})."
        ),
    }
    parts = [
        f"{_percent(stats.bootstrap_mean(stay(of, arm)), 1)} with {optimiser} and {dtype} weights (n = {len(of[arm])})"
        for arm, (optimiser, dtype) in zip(VARIATIONS, product(("AdamW", "SGD"), ("float32", "bfloat16")), strict=True)
    ]
    found["Is GRPO sparse?"] = (
        f"Once both ends are rounded to bfloat16, so many of its weights are where they were: {', '.join(parts)}."
    )
    both = corrected(of, "es", "grpo")
    angle = f"is {in_words(both.value, 2)}"
    found["Do ES and GRPO learn the same?"] = (
        f"The cosine of a run of ES and one of GRPO is {both.run_cosine:.4f}. Of what the runs of each arm have in "
        f"common it {angle} (n = {len(of['es'])} and {len(of['grpo'])} runs)."
    )
    found["What parts them?"] = _parts(of)
    kept = {d: accuracy_difference(of, f"es mean={size}", "es mean=1", d) for d in DECODINGS}
    parts = [f"{style.STROKES[d].label} {each.format()}" for d, each in kept.items()]
    found["What is left when the walk is averaged away?"] = (
        f"The mean of {size} runs - a run, in points of accuracy: {', '.join(parts)} (n = {kept['greedy'].n} means). "
        f"That mean - a run made as short: {_shrunk(of, size)}. The mean of {many} solves "
        f"{100 * accuracies(of[f'es mean={many}'], 'greedy').mean():.1f} % greedily."
    )
    found["What does the walk cost?"] = _cost(of, size)
    parts = [f"{in_words(ratio, 2)} after {steps}" for steps, _, ratio in equal_gain(run, of)]
    found["Who drifts further at equal gain?"] = (
        "Where GRPO solves greedily what ES does, it has drifted so many times as far off the task, by the steps that "
        f"ES has made: {', '.join(parts)} (n = {len(of['es mean=1'])} runs of each length of each arm)."
    )
    found["Can one run shed it?"] = _shed(run, of)
    return found


def _parts(of: Records) -> str:
    """The cosines of both kinds of fitness with GRPO by either optimiser, and with its first step."""
    others = {"GRPO": "grpo", "GRPO by SGD": "grpo_sgd", "GRPO's first step": study.FIRST_STEP}
    told = []
    for words, arm in others.items():
        greedy, sampled = (in_words(corrected(of, each, arm).value, 2) for each in ("es", "es_sampled"))
        told.append(f"with {words} {greedy} and {sampled} (n = {len(of[arm])})")
    counts = f"{len(of['es'])} and {len(of['es_sampled'])} runs"
    return f"Cosines in common of ES, rewarded for greedy and for sampled answers ({counts}), are {', '.join(told)}."


def _mean_in_words(values: np.ndarray) -> str:
    if not len(values):
        return "not defined (no run moved)"
    return f"{interval(stats.bootstrap_mean(values), 4)} (n = {len(values)} runs)"


def _percent(share: Interval, digits: int = 2) -> str:
    return f"{share.format(digits=digits)} %"


def _shrunk(of: Records, size: int) -> str:
    better = accuracy_difference(of, f"es mean={size}", f"es shrunk={size}", "greedy")
    return f"{better.format()} points greedily"


def _cost(of: Records, size: int) -> str:
    """What models drift and forget on skills that no reward touches."""
    kinds = {"a run of ES": "es mean=1", "of random fitness": "es_random mean=1", "of GRPO": "grpo mean=1"}
    kinds[f"the mean of {size} of ES"] = f"es mean={size}"
    each = []
    for what, group in kinds.items():
        kl, right = (stats.bootstrap_mean([skill(r, key) for r in of[group]]) for key in ("kl", "greedy"))
        each.append(f"{what} {interval(kl, 3)} and {right.format()} % (n = {kl.n})")
    return (
        "On skills that no reward touches, KL from the base (nats per token) and greedy accuracy are: "
        f"{'; '.join(each)}."
    )


def _shed(run: SimpleNamespace, of: Records) -> str:
    """What anchored decay, and populations of other sizes, change in drift and in greedy accuracy."""
    each = []
    for name, what in remedies(run).items():
        group = f"{name} mean=1"
        ratio, gain = drift_ratio(of, group, "es mean=1"), accuracy_difference(of, group, "es mean=1", "greedy")
        each.append(f"{what}: {interval(ratio, 2)} times and {gain.format()} points (n = {len(of[group])})")
    return (
        "Against a run of ES, at as many evaluated members, drift off the task and greedy accuracy change by: "
        f"{'; '.join(each)}."
    )


_MACROS = {"greedy": "Greedy", "t0.6": "Warm", "t1": "Sampled"}


def numbers(run: SimpleNamespace, of: Records) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, for the paper."""
    size, many = run.shrunk["es"], max(run.means["es"])
    both = corrected(of, "es", "grpo")
    found: dict[str, tuple[Any, str]] = {
        "GeoEsRuns": (len(of["es"]), "d"),
        "GeoGrpoRuns": (len(of["grpo"]), "d"),
        "GeoEsNorm": (norms(of, "es").mean(), ".2f"),
        "GeoGrpoNorm": (norms(of, "grpo").mean(), ".2f"),
        "GeoEsOverWalk": (over_walk(of, "es").mean(), ".4f"),
        "GeoEsCommon": (signal(of, "es").share.format(digits=2), ""),
        "GeoGrpoCommon": (signal(of, "grpo").share.format(digits=0), ""),
        "GeoRawCosine": (both.run_cosine, ".4f"),
        "GeoCorrectedCosine": (in_words(both.value, 2), ""),
        "GeoSampledCosine": (in_words(corrected(of, "es_sampled", "grpo").value, 2), ""),
        "GeoSgdCosine": (in_words(corrected(of, "es_sampled", "grpo_sgd").value, 2), ""),
        "GeoFirstCosine": (in_words(corrected(of, "es_sampled", study.FIRST_STEP).value, 2), ""),
        "GeoOptimiserCosine": (in_words(corrected(of, "grpo", "grpo_sgd").value, 2), ""),
        "GeoGrpoHead": (head_shares(of, "grpo").mean(), ".2f"),
        "GeoMean": (size, "d"),
        "GeoMost": (many, "d"),
    }
    for decoding, name in _MACROS.items():
        kept = accuracy_difference(of, f"es mean={size}", "es mean=1", decoding)
        found[f"GeoKept{name}"] = (kept.format(), "")
        for what, group in {"Single": "es mean=1", "Mean": f"es mean={size}", "Most": f"es mean={many}"}.items():
            found[f"Geo{what}{name}"] = (100 * accuracies(of[group], decoding).mean(), ".1f")
    short = accuracy_difference(of, f"es mean={size}", f"es shrunk={size}", "greedy")
    found |= {"GeoShrunkGreedy": (short.format(), ""), "GeoFar": (run.shrunk_far, "d")}
    groups = {"Single": "es mean=1", "Mean": f"es mean={size}", "Most": f"es mean={many}", "Grpo": "grpo mean=1"}
    for what, group in (groups | {"Null": "es_random mean=1"}).items():
        found[f"Geo{what}Drift"] = (np.mean([skill(r, "kl") for r in of[group]]), ".3f")
        found[f"Geo{what}Skill"] = (100 * np.mean([skill(r, "greedy") for r in of[group]]), ".0f")
    weak, strong = (study.anchored_name(run.anchor_decays[place]) for place in (0, -1))
    small, large = (study.sized_name(N) for N in (min(run.populations), max(run.populations)))
    for what, name in {"Anchored": weak, "Strong": strong, "Small": small, "Large": large}.items():
        found[f"Geo{what}Ratio"] = (interval(drift_ratio(of, f"{name} mean=1", "es mean=1"), 2), "")
        for decoding, short in (("greedy", "Greedy"), ("t1", "Sampled")):
            gain = accuracy_difference(of, f"{name} mean=1", "es mean=1", decoding)
            found[f"Geo{what}{short}"] = (gain.format(), "")
    for name, arm in zip(("Adam", "AdamRounded", "Sgd", "SgdRounded"), VARIATIONS, strict=True):
        found[f"GeoStay{name}"] = (stats.bootstrap_mean(stay(of, arm)).format(), "")
    gains = equal_gain(run, of)
    for name, (steps, _, ratio) in {"First": gains[0], "Last": gains[-1]}.items():
        found |= {f"GeoEqual{name}": (in_words(ratio, 2), ""), f"GeoEqual{name}Steps": (steps, "d")}
    found["GeoAnchor"], found["GeoAnchorStrong"] = (run.anchor_decays[0], "g"), (run.anchor_decays[-1], "g")
    return found
