"""Notebook 02, GRPO and ES: settings, groups of runs, results, and the answers, tables and figures from them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from evoalign_lib import arms
from evoalign_lib.analysis import curves, kl, stats
from evoalign_study import loading, plots, style
from evoalign_study import runs as shared
from evoalign_study.kinds.decode import base_specs, best_of_n_specs, label, measured_spec
from evoalign_study.kinds.exact import kl_specs
from evoalign_study.loading import DECODINGS, After, Group, Groups, Records
from evoalign_study.records import Record, accuracy_matrix, spec_hash, unpack_bits
from evoalign_study.results import Results

NOTEBOOK = "02_grpo_countdown"
CLAIMS = ("C1", "C2", "C2b", "C2c", "C29", "C30", "C31")
ARMS = shared.TUNED
presets, TINY, SMOKE, FULL = shared.scales(
    {
        "bases": (["A0", "A1", "A2"], ["A0"]),  # the sweeps tune on the first
        "retrain": [],  # groups that `force` runs again; empty: all of them
        **shared.COUNTDOWN,
        "grpo_long_steps": (3125, 6),  # length of the runs with as many completions as ES
        "best_of": (64, 4),  # samples of best-of-n
        "seeds_long": (2, 1),
        "finalists": (3, 1, 0),  # settings of each sweep that are tried again at full length
        "fewer_prompts": ([32, 16], [8], []),  # per step of ES, also tried there
        "finals_seeds": ([101, 102], [101]),  # which no other run uses
        "margin": 0.02,  # within which accuracies match
        "temperatures": [0.4, 0.6],  # besides greedy decoding and 1: temperatures at which models are measured again
        # groups measured at those temperatures, besides base, ES and GRPO
        "decoded": ("dapo dr_grpo dr_grpo_scaled es_random es_sampled grpo_random grpo_unscaled rloo sft".split(), []),
        "curve_temperature": 0.6,  # at which whole curves are measured again
        "decoded_curves": (["es", "es_elsewhere", "grpo", "grpo_elsewhere"], ["grpo"]),  # groups measured so
        "kl_sigmas": (
            [0.003, 0.01, 0.03],
            [0.01],
        ),  # of the noise that moves the base, for the KL
        "kl_problems": (128, 4),
        "kl_samples": (16, 2),
        "kl_repeats": (16, 2),
    }
)


def groups(run: SimpleNamespace, records: Records) -> Groups:
    """Return the groups of runs by name. All arms wait for the sweeps, which choose their settings on the first base.

    Raises:
        ValueError: seeds=1, which leaves no spread to compare arms by.
    """
    if run.seeds == 1:
        raise ValueError("seeds=1 has no spread over seeds to compare arms by. Pass 2 or more.")
    here, elsewhere, settings = run.bases[:1], run.bases[1:], loading.of_runs(vars(run))
    many, some, few = run.seeds_match, run.seeds_compare, run.seeds_describe
    scale, exact = of_tiny_world(run)
    train, best_of_n = partial(shared.tuned, run, records), range(loading.seed_count(run, "best_of_n", few))
    return {
        "base": base_specs(run.bases, settings, run.scale),
        **shared.sweep(run, *ARMS),
        **finals(run, records),
        **tuned_again(run, records),
        "kl": [s for sigma in exact["kl_sigmas"] for s in kl_specs("A0", sigma, exact["kl_repeats"], exact, scale)],
        "es": train("es", here, many, ledgers=here),  # later notebooks replay them
        "grpo": train("grpo", here, many),
        **{arm: train(arm, here, some) for arm in ("dr_grpo", "es_random", "grpo_random")},
        **{f"{arm}_elsewhere": train(arm, elsewhere, some) for arm in ARMS},
        "es_sampled": train("es_sampled", here, some),
        "grpo_unscaled": train("grpo", here, some, scale_rewards="none"),
        "dr_grpo_scaled": train("dr_grpo", here, some, scale_rewards="group"),
        **{arm: train(arm, here, few) for arm in ("dapo", "rloo", "sft")},
        "grpo_long": train("grpo", here, run.seeds_long, steps=run.grpo_long_steps),
        "best_of_n": best_of_n_specs(here[0], best_of_n, run.best_of, settings, run.scale),
        "decodings": _decodings(run, records),
    }


def finals(run: SimpleNamespace, records: Records) -> Groups:
    """Return runs that tune both arms where they are compared: at full length, on the validation set only.

    They are the best settings of each sweep, and from the best one GRPO with the sweep's other learning rates, and ES
    with fewer prompts per step and as many completions, hence more steps: with alpha such that the walk is as long, and
    with alpha as it is. `final_scores` chooses among them. ES with sampled fitness has such runs, too.
    """
    made: dict[str, Any] = {}
    for arm in ARMS:
        own = loading.own_settings(run, arm) | {"test_problems": 0}
        ranked = loading.ranked_choices(run, arm, records.get(f"sweep {arm}"))
        group = Group(arm, run.bases[:1], run.finals_seeds, own | ranked[0], after=(f"sweep {arm}",))
        made[f"finals {arm}"] = group._replace(changes=ranked[: run.finalists])
        if arm == "grpo":
            rates = sorted({one["learning_rate"] for one in ranked if run.finalists} - {ranked[0]["learning_rate"]})
            made["rates grpo"] = group._replace(changes=[{"learning_rate": rate} for rate in rates])
        else:
            size, steps, alpha = own["prompts_per_step"], own["steps"], ranked[0]["alpha"]
            fewer = [{"prompts_per_step": few, "steps": max(1, steps * size // few)} for few in run.fewer_prompts]
            kept = [one | {"alpha": float(f"{alpha * (steps / one['steps']) ** 0.5:.3g}")} for one in fewer]
            made["prompts es"] = group._replace(changes=kept + fewer)
            made["prompts es_sampled"] = group._replace(arm="es_sampled", changes=[{}, *kept] if kept else [])
    return made


def tuned_again(run: SimpleNamespace, records: Records) -> Groups:
    """Return both arms with the settings that `final_scores` ranks first at equal FLOPs, for claim C2c.

    ES takes as many steps as it needs to spend what the costliest trial of GRPO's winner did. Until the trials are
    loaded the sweep's best settings stand for the winners; without trials there are no such runs. Prompts per step
    that were tried after C2c was locked, all but the first of `fewer_prompts`, do not count.
    """
    names = {arm: ("grpo", *FINALS[arm]) for arm in ARMS}
    tried, changes = [name for arm in ARMS for name in names[arm]], {arm: {} for arm in ARMS}
    if run.finalists and all(name in records for name in tried):
        before = [r for r in records["prompts es"] if r["spec"]["prompts_per_step"] >= run.fewer_prompts[0]]
        won = {arm: winners(records | {"prompts es": before}, arm, "equal FLOPs") for arm in ARMS}
        changes = {
            arm: {name: own[0]["spec"][name] for name in TRIED if name in own[0]["spec"]} for arm, own in won.items()
        }
        spent = {arm: [r["budget"]["forward_flops"] for r in own] for arm, own in won.items()}
        changes["es"]["steps"] = math.ceil(changes["es"]["steps"] * max(spent["grpo"]) / min(spent["es"]))
    at = {"sampled_at": [run.curve_temperature]}
    seeds = run.seeds_match if run.finalists else []
    made = {arm: shared.tuned(run, records, arm, run.bases[:1], seeds, **changes[arm], **at) for arm in ARMS}
    return {f"{arm}_again": own._replace(after=tuple(dict.fromkeys([*own.after, *tried]))) for arm, own in made.items()}


def _decodings(run: SimpleNamespace, records: Records) -> After:
    """Return runs that measure models again: ES also at GRPO's FLOPs, for claim C2b, and some groups along curves."""
    es: dict[str, Any] = {"groups": ["es"], "temperatures": run.temperatures}
    if "es" in records and "grpo" in records:
        es["at_step"] = equal_flops_step(records["es"], records["grpo"])
    at = run.curve_temperature
    along = [
        {"groups": [group], "temperatures": [at] if group in DECODED else run.temperatures, "curve_temperature": at}
        for group in run.decoded_curves
    ]
    return loading.decodings(run, records, ["base", "grpo", *run.decoded], es, *along)


DECODED = ("base", "es", "grpo")
"""Groups that are always measured at all temperatures."""


def equal_flops_step(es: Sequence[Record], grpo: Sequence[Record]) -> int:
    """Return the last step by which no ES run has spent more forward FLOPs than the cheapest GRPO run in total."""
    least = min(r["budget"]["forward_flops"] for r in grpo)
    return int(min(np.interp(least, r["curve"]["forward_flops"], r["curve"]["step"]) for r in es))


def of_tiny_world(run: SimpleNamespace) -> tuple[str, dict[str, Any]]:
    """Return scale and settings of the KL's estimators, for small models only (`loading.of_tiny_world`)."""
    return loading.of_tiny_world(run, TINY)


# ---- groups of records


def pilot(committed: Sequence[Record]) -> list[Record]:
    """Return the ES runs of notebook 01 on base A0 from the committed records."""
    wanted = {"kind": "train", "arm": "es", "base": "A0", "steps": 100}
    return [r for r in committed if r["notebook"] == "01_es_countdown" and wanted.items() <= r["spec"].items()]


def trained(records: Records) -> list[Record]:
    """Return the records of all bases, of all training runs with a test set, and of best-of-n."""
    return [r for group in ["base", *designed(records), "best_of_n"] for r in records[group]]


def judged(run: SimpleNamespace, records: Records) -> list[Record]:
    """Return all records on which the claims of this notebook are judged."""
    measured = records["kl"] if of_tiny_world(run)[0] == run.scale else []
    return [*trained(records), *swept(records), *measured, *records["decodings"]]


def swept(records: Records) -> list[Record]:
    """Return the records of both sweeps."""
    return [r for arm in ARMS for r in records[f"sweep {arm}"]]


def designed(records: Records, base: str = "") -> list[str]:
    """Return the groups of training runs with a test set; with `base`, only those that have runs on it."""
    others = ("base", "best_of_n", "decodings")
    tested = [g for g, own in records.items() if g not in others and own and own[0]["spec"].get("test_problems")]
    return [group for group in tested if not base or on(records[group], base)]


def on(runs: Sequence[Record], base: str) -> list[Record]:
    """Return the runs on a base."""
    return shared.where(runs, base=base)


def accuracies(records: Records, group: str, decoding: str, base: str) -> np.ndarray:
    """Return the share of right answers of a group's runs on a base: (seeds, problems)."""
    return accuracy_matrix(on(records[group], base), decoding)


def cells(run: SimpleNamespace, records: Records) -> list[tuple[str, str, str]]:
    """Return (name in `results`, group, base) of all tested models: base by base, the untrained model first."""
    tested = [(group, base) for base in run.bases for group in ["base", *designed(records, base)]]
    return [(group if base == run.bases[0] else f"{group} on {base}", group, base) for group, base in tested]


def label_of(records: Records, group: str) -> str:
    """Return the name of a group of runs in tables."""
    spec = records[group][0]["spec"]
    words = {"none": ", not scaled", "group": ", scaled"}.get(spec.get("scale_rewards"), "")
    words += f", {spec['steps']:,d} steps" if group == "grpo_long" else ""
    words += ", tuned again" if group.endswith("_again") else ""
    return style.ARMS[spec.get("arm", spec["kind"])].label + words


# ---- tidy frames


AXES = {
    "completions": SimpleNamespace(unit=1e3, words="completions", head="completions, thousands"),
    "generated_tokens": SimpleNamespace(unit=1e6, words="generated tokens", head="tokens, millions"),
    "forward_flops": SimpleNamespace(unit=1e12, words="forward FLOPs", head="FLOPs, 1e12"),
    "core_seconds": SimpleNamespace(unit=1, words="core-seconds", head="core-seconds"),
}
"""Budget axes by their key in the records: the unit in tables, and the names in sentences and in tables."""
SETTINGS = {"sigma": "noise sigma", "alpha": "step alpha", "learning_rate": "learning rate", "beta": "KL weight beta"}
"""Setting -> its name on the axes of maps and in tables."""


def runs(run: SimpleNamespace, records: Records) -> pd.DataFrame:
    """Return a row per training run and best-of-n run on the first base, in the order of the groups.

    Columns: group; arm, its label; the budget's fields; distance from the base, NaN for a run that diverged; walk, the
    distance that the steps of ES would cover as a random walk, whatever the reward, NaN for other arms; KL, in nats per
    sequence; greedy and t1, test accuracy; untied, the share of groups whose completions all have the same reward.
    """
    rows = []
    for group in [*designed(records, run.bases[0]), "best_of_n"]:
        for r in records[group]:
            spec, row = r["spec"], {"group": group, "arm": label_of(records, group), **r["budget"]}
            if "sigma" in spec:
                row["walk"] = spec["alpha"] * np.sqrt(r["d"] * spec["steps"] / spec["population_size"])
            row |= {"distance": r.get("update_norm"), "untied": r.get("counts", {}).get("zero_std_groups")}
            row |= {decoding: r.get("test", {}).get(decoding) for decoding in DECODINGS}
            rows.append(row | {"KL": r.get("kl_policy_base", {}).get("exact_nats_per_sequence")})
    return pd.DataFrame(rows).astype(dict.fromkeys(("walk", "distance", "KL", "untied"), float))


def sweep_points(records: Records) -> pd.DataFrame:
    """Return a row per setting of both sweeps, best first.

    Columns: arm; settings tried, k = 1, 2, ...; score; expected maximum, the expected best score of k settings drawn
    from the sweep, a fraction; and the settings' values.
    """
    sweeps = []
    for arm in ARMS:
        scores, settings = zip(*arms.ranked(records[f"sweep {arm}"]), strict=True)
        sweep = pd.DataFrame(settings).assign(arm=arm, score=scores)
        sweep["settings tried"] = range(1, len(sweep) + 1)
        sweeps.append(sweep.assign(**{"expected maximum": curves.expected_maximum(scores)}))
    return pd.concat(sweeps, ignore_index=True)


def curve_points(records: Records) -> pd.DataFrame:
    """Return the mean learning curve of both arms and that of each long GRPO run: a row per point and decoding.

    Columns: the four axes (means over seeds); mean, low and high of validation accuracy, %; decoding; n; group; run.
    """
    named = [({"group": arm, "run": "mean"}, records[arm]) for arm in ARMS]
    named += [({"group": "grpo_long", "run": str(r["spec"]["seed"])}, [r]) for r in records["grpo_long"]]
    return shared.curve_bands(named, list(AXES), first=1)


def by_temperature(records: Records) -> pd.DataFrame:
    """Return test accuracy in % by sampling temperature, with 0 for greedy decoding.

    A row per group, base and temperature at which models were measured again: accuracy with its interval over seeds and
    problems (over problems alone for a single model), and n, the number of runs. If no model was measured again
    (`loading.decodings`), the arms and the base have rows for greedy decoding and temperature 1.
    """
    measured: dict[str, dict[str, Any]] = {}
    for r in records["decodings"]:
        counts = {f"{label(t)}_counts": r["test"][f"{label(t)}_counts"] for t in r["spec"]["temperatures"]}
        measured.setdefault(spec_hash(measured_spec(r["spec"])), {}).update(counts)
    temperatures = sorted({t for r in records["decodings"] for t in r["spec"]["temperatures"]})
    decodings = {0.0: "greedy"} | {t: label(t) for t in (*temperatures, 1.0)}
    rows = []
    for group, base in [(g, base) for g in records for base in dict.fromkeys(r["spec"]["base"] for r in records[g])]:
        again = [
            {"test": r["test"] | measured.get(r["spec_hash"], {})}
            for r in on(records[group], base)
            if (r["spec_hash"] in measured if measured else group in (*arms.ARMS, "base"))
        ]
        for t, key in decodings.items() if again and group != "decodings" else ():
            if key in DECODINGS or all(f"{key}_counts" in r["test"] for r in again):
                share = stats.crossed_bootstrap(accuracy_matrix(again, key))
                row = {"group": group, "base": base, "temperature": t, "accuracy": 100 * share.value}
                rows.append(row | {"low": 100 * share.low, "high": 100 * share.high, "n": share.n})
    return pd.DataFrame(rows)


_LEVELS = ("token", "sequence")


def kl_frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per noise size and KL estimator: means over repeats, relative to each repeat's exact KL.

    Columns: sigma; estimator; KL, nats per token; bias / KL (an `Interval`, per token); std / KL, token and sequence;
    cosine, token and sequence; norm, token (NaN for k1, whose gradient is zero on average).
    """
    rows = []
    repeats = pd.DataFrame([{"sigma": r["spec"]["sigma"]} | r["kl"] for r in records])
    for (sigma, part), name in product(repeats.groupby("sigma", sort=False), kl.ESTIMATORS):
        exact = {level: part[f"exact_{level}_mean"] for level in _LEVELS}
        row = {"sigma": sigma, "estimator": name, "KL, nats per token": exact["token"].mean()}
        row["bias / KL"] = stats.bootstrap_mean((part[f"{name}_token_bias"] / exact["token"]).to_numpy())
        row |= {f"std / KL, {level}": (part[f"{name}_{level}_std"] / exact[level]).mean() for level in _LEVELS}
        gradients = {f"cosine, {level}": f"{name}_gradient_{level}_cosine" for level in _LEVELS}
        gradients["norm, token"] = f"{name}_gradient_token_norm_ratio"
        rows.append(row | {head: np.nan if name == "k1" else part[key].mean() for head, key in gradients.items()})
    return pd.DataFrame(rows)


def accuracy_by_set(committed: Sequence[Record]) -> pd.DataFrame:
    """Return greedy accuracy of models of base A0, a row per problem set, notebook, arm and length of run.

    A set has the name of its split and its size. Each is drawn anew from the 2,000 problems of its split: "validation
    256" is not a part of "validation 512", and one is easier than another, as the base shows.

    committed: the committed records of scale tiny, of all notebooks.

    Columns: set; arm, "base" for the untrained model; notebook; steps, and size of a step (alpha or the learning rate),
    0 for the base; accuracy, %, mean over seeds; n, their number.
    """
    rows = []
    for r in (r for r in committed if r["spec"]["kind"] in ("train", "base", "coverage", "noise")):
        spec = r["spec"]
        end = spec.get("end", {"of": {"run": spec, "seeds": [spec.get("seed", 0)]}, "factor": 1})
        run, seeds = end["of"]["run"], end["of"]["seeds"]
        varied = run.keys() & {"unique_prompts", "scale_rewards"} or run.get("population_size", 30) != 30
        ended = len(end) > 2 or end["factor"] != 1 or len(seeds) > 1 or run["kind"] == "composed"
        if varied or ended or run["base"] != "A0" or run.get("arm", "base") not in (*ARMS, "base"):
            continue
        found = {}
        if "greedy_bits" in r:
            found["test", r["n"]] = unpack_bits(r["greedy_bits"], r["n"]).mean()
        elif "clean" in r:
            found["validation", r["n"]] = r["clean"]["greedy"]
        elif "test" in r:
            last = r["curve"]["validation_greedy"][-1] if "curve" in r else r.get("validation", {}).get("greedy")
            found = {
                ("test", spec["test_problems"]): r["test"]["greedy"],
                ("validation", spec["validation_problems"]): last,
            }
        row = {"arm": run.get("arm", "base"), "notebook": r["notebook"][:2], "steps": run.get("steps", 0)}
        row |= {"step size": run.get("alpha", run.get("learning_rate", 0)), "seed": seeds[0]}
        rows += [
            row | {"set": f"{split} {n:,d}", "accuracy": 100 * x} for (split, n), x in found.items() if x is not None
        ]
    places = ["set", "arm", "notebook", "steps", "step size"]
    scores = pd.DataFrame(rows).drop_duplicates([*places, "seed"]).groupby(places)["accuracy"]
    return scores.agg(accuracy="mean", n="size").reset_index()


# ---- comparisons at equal budgets


def at_budget(record: Record, axis: str, budget: float, decoding: str = "greedy") -> float:
    """Return a run's validation accuracy at a budget, interpolated in the budget's logarithm."""
    return curves.score_at(record["curve"][axis], record["curve"][f"validation_{decoding}"], budget)


def match(records: Records, axis: str, margin: float) -> Results:
    """Compare tuned GRPO with tuned ES at the largest budget on an axis that all runs of both arms reached.

    Returns the budget and, under each decoding, each arm's mean validation accuracy, GRPO - ES over seeds (90 %), and
    whether that lies within the margin. The last two are left out if no runs differ, as at scale smoke.
    """
    budget = min(r["curve"][axis][-1] for arm in ARMS for r in records[arm])
    values = {f"budget, {axis}": budget}
    for decoding in DECODINGS:
        scores = {arm: [at_budget(r, axis, budget, decoding) for r in records[arm]] for arm in ARMS}
        values |= {f"{arm} at equal {axis}, {decoding}": np.mean(each) for arm, each in scores.items()}
        if max(map(np.ptp, scores.values())):
            test = stats.welch_equivalence(scores["grpo"], scores["es"], margin)
            values |= {f"lead at equal {axis}, {decoding}": test.interval}
            values |= {f"match at equal {axis}, {decoding}": test.equivalent}
    return values


def hindsight(records: Records, axis: str) -> Results:
    """Return each sweep's best setting at the largest budget that all runs of both reached, and its score there.

    If no run has a point by then, as at scale smoke, the score is NaN and the setting is the best one at the end.
    """
    budget = min(r["curve"][axis][-1] for r in swept(records))
    values = {f"hindsight budget, {axis}": budget}
    for arm in ARMS:
        sweep = records[f"sweep {arm}"]
        scored = [(at_budget(r, axis, budget), r["spec"]) for r in sweep if r["curve"][axis][1] <= budget]
        score, spec = max(scored, key=lambda pair: pair[0], default=(np.nan, arms.ranked(sweep)[0][1]))
        values[f"hindsight {arm}, {axis}"] = score
        values |= {f"hindsight {name}, {axis}": spec[name] for name in arms.swept(arm)}
    values[f"hindsight lead, {axis}"] = values[f"hindsight grpo, {axis}"] - values[f"hindsight es, {axis}"]
    return values


FINALS = {
    "es": ("finals es", "prompts es"),
    "grpo": ("finals grpo", "rates grpo"),
    "es_sampled": ("prompts es_sampled",),
}
"""Arm -> the groups of runs at full length among whose settings it is tuned."""
TRIED = (*arms.swept("es"), "prompts_per_step", "steps", *arms.swept("grpo"))
"""The settings that they change."""
_LAST = (0.64, 0.8, 1.0)
"""Shares of a budget over which validation accuracy is averaged, since single points differ more than settings do."""


def final_scores(records: Records) -> pd.DataFrame:
    """Return a row per arm and setting that was tried at full length, in the order of trial; none at scale full.

    An arm's tuned setting is the one with the highest score on the validation set, greedy, at the budget at which arms
    are compared, as a mean over seeds; of equal ones the first. There are two such budgets, and a tuned setting for
    each: the end of the arm's own runs, and the forward FLOPs that tuned GRPO ends with.

    Columns: arm; setting, in words; "end, greedy", "end, t1", "equal FLOPs, greedy" and "equal FLOPs, t1", the scores,
    NaN for runs without a point of the curve by then; n, the number of seeds.
    """
    least, rows = min(r["budget"]["forward_flops"] for r in records["grpo"]), []
    for arm, r in ((arm, r) for arm, tried in FINALS.items() for group in tried for r in records.get(group, ())):
        spent = r["curve"]["forward_flops"]
        row = {"arm": arm, "setting": _setting(r), "n": 1}
        for at, budget in (("end", spent[-1]), ("equal FLOPs", min(least, spent[-1]))):
            for decoding in DECODINGS if spent[1] <= _LAST[0] * budget else ():
                score = [at_budget(r, "forward_flops", share * budget, decoding) for share in _LAST]
                row[f"{at}, {decoding}"] = np.mean(score)
        rows.append(row)
    places = [f"{at}, {decoding}" for at, decoding in product(("end", "equal FLOPs"), DECODINGS)]
    tried = pd.DataFrame(rows, columns=["arm", "setting", *places, "n"]).groupby(["arm", "setting"], sort=False)
    return tried.agg(dict.fromkeys(places, "mean") | {"n": "sum"}).reset_index()


def _setting(record: Record) -> str:
    """Return what a trial changes, in words."""
    return ", ".join(f"{name.replace('_', ' ')} {record['spec'][name]:g}" for name in TRIED if name in record["spec"])


def winners(records: Records, arm: str, at: str) -> list[Record]:
    """Return the trials of the setting with which an arm has the highest score: at "end" or at "equal FLOPs"."""
    scores = final_scores(records).set_index("setting")
    best = scores.loc[scores["arm"] == arm, f"{at}, greedy"].idxmax()  # of equal ones the first
    return [r for group in FINALS[arm] for r in records[group] if _setting(r) == best]


def larger_alpha(records: Records, before: Sequence[Record]) -> Results:
    """Compare greedy accuracy of tuned GRPO and of notebook 01's ES runs, whose alpha is larger, at GRPO's completions.

    Empty if no run of notebook 01 (`pilot`) has a point by then, as at scale smoke.
    """
    least = min(r["budget"]["completions"] for r in records["grpo"])
    sides = [records["grpo"], [r for r in before if r["curve"]["completions"][1] <= least]]
    if not sides[1]:
        return {}
    grpo, es = (np.array([at_budget(r, "completions", least) for r in side]) for side in sides)
    values = {f"larger {name}": before[0]["spec"][name] for name in ("sigma", "alpha")}
    values |= {"larger alpha, completions": least, "larger alpha, es": es.mean(), "larger alpha, seeds": len(es)}
    return values | {"larger alpha, lead": stats.stratified_bootstrap([grpo], [es])}


# ---- results

EFFECTS = {
    "scaling off": {"grpo": -0.5, "grpo_unscaled": 0.5, "dr_grpo_scaled": -0.5, "dr_grpo": 0.5},
    "Dr.GRPO's loss": {"grpo": -0.5, "grpo_unscaled": -0.5, "dr_grpo_scaled": 0.5, "dr_grpo": 0.5},
}
"""Effects on test accuracy -> the weight of each group."""


def results(
    run: SimpleNamespace, records: Records, before: Sequence[Record], decided: Mapping[str, Results]
) -> Results:
    """Return the settings and the notebook's results by name; accuracies are shares.

    "GROUP on BASE, DECODING" is test accuracy, and with "gain of" before it the difference from the base; the
    first base goes without "on BASE". Further results: comparisons at equal budgets (`match`, `hindsight`,
    `larger_alpha`), effects, tuned settings, each group's mean budgets, distances and KL, the pilot's
    spread by kind of test, and the intervals of verdicts as "CLAIM: label".

    Args:
        before: the runs of notebook 01 (`pilot`).
        decided: claim -> the intervals of its verdict by label.
    """
    here = run.bases[0]
    values = vars(run) | {f"{claim}: {name}": x for claim, each in decided.items() for name, x in each.items()}
    for (name, group, base), decoding in product(cells(run, records), DECODINGS):
        after, untrained = (accuracies(records, each, decoding, base) for each in (group, "base"))
        values[f"{name}, {decoding}"] = stats.crossed_bootstrap(after)
        values[f"gain of {name}, {decoding}"] = stats.crossed_bootstrap(after, untrained[0])
    for axis in AXES:
        values |= match(records, axis, run.margin) | hindsight(records, axis)
    values |= larger_alpha(records, before)
    for (what, weights), d in product(EFFECTS.items(), DECODINGS):
        sides = {group: accuracies(records, group, d, here) for group in weights}
        blocks = min(map(len, sides.values()))  # seeds that all groups have; they are resampled as blocks
        weighted = sum(weight * sides[group][:blocks] for group, weight in weights.items())
        values[f"{what}, {d}"] = stats.crossed_bootstrap(weighted)
    groups_on = {base: "" if base == here else "_elsewhere" for base in run.bases}
    each = ([accuracies(records, f"{arm}{end}", "greedy", base) for base, end in groups_on.items()] for arm in ARMS)
    es, grpo = (np.mean([right[: run.seeds_compare] for right in of_arm], axis=0) for of_arm in each)
    values["GRPO - ES over bases, greedy"] = stats.crossed_bootstrap(grpo, es)
    for (one, other), d in product((("grpo", "es_sampled"), ("sft", "es")), DECODINGS):
        sides = (accuracies(records, group, d, here) for group in (one, other))
        values[f"{one} - {other}, {d}"] = stats.crossed_bootstrap(*sides)
    for arm, part in sweep_points(records).groupby("arm"):
        values |= {f"{arm}, {k} tried": part["expected maximum"].iloc[i] for k, i in (("one", 0), ("all", -1))}
        values |= {f"tuned {name}": part[name].iloc[0] for name in arms.swept(arm)}
    each_run = runs(run, records)
    for group, part in each_run.groupby("group"):
        # as arrays: pandas would leave a diverged run's NaN out of the mean
        values |= {f"{name} of {group}": part[name].to_numpy().mean() for name in (*AXES, "distance", "KL")}
        values |= {f"seeds of {group}": len(part)}
        if shared.walk_of(records[group], records["es_random"]) and group != "es_random":
            both = [[each["KL"].dropna()] for each in (part, each_run[each_run["group"] == "es_random"])]
            if min(len(sides[0]) for sides in both) > 1:  # at scale smoke a walk has one run
                values[f"KL of {group} less its walk's"] = stats.stratified_bootstrap(*both)
        values |= {f"{end} of {group}, {d}": part[d].agg(end) for end in ("min", "max") for d in DECODINGS}
    for (one, other), axis in product((("es", "sft"), ("grpo_long", "es")), AXES):
        if f"seeds of {one}" in values:
            values[f"{one} over {other}, {axis}"] = values[f"{axis} of {one}"] / values[f"{axis} of {other}"]
    values["best of most"] = pd.DataFrame([r["best_of_n"] for r in records["best_of_n"]]).mean().max()
    again = by_temperature(records).query("base == @here")
    values |= {f"{row.group}, t{row.temperature:g} again": row.accuracy / 100 for row in again.itertuples()}
    values |= {"settings tried": len(records["sweep es"]), "million weights": records["es"][0]["d"] / 1e6}
    for d in DECODINGS:
        ends = {"equivalence": [r["curve"][f"validation_{d}"][-1] for r in before]}
        ends["difference"] = accuracy_matrix(before, d).mean(axis=1)
        values |= {f"pilot {test}, {d}": float(np.std(each, ddof=1)) for test, each in ends.items()}
    return values | _words(values)


# ---- wording of the answers


def _sided(values: Results, keys: Iterable[str], above: str, below: str, neither: str) -> str:
    """Return the words for intervals that all lie above zero, all lie below it, or do neither."""
    all_of = [values[key] for key in keys]
    return above if all(i.low > 0 for i in all_of) else below if all(i.high < 0 for i in all_of) else neither


def _words(values: Results) -> Results:
    """Return the words that answers take from the results: where intervals lie."""
    words = {}
    # C2c supersedes C2b, but needs runs that are tuned again
    leads = max(
        ([key for key in values if key.startswith(f"{claim}: GRPO - ES")] for claim in ("C2c", "C2b")), key=bool
    )
    if leads:
        ahead = ("It is ahead", "It is behind", "Neither is ahead under every decoding")
        words["ahead, declared"] = _sided(values, leads, *ahead)
    axes = [f"lead at equal {axis}, greedy" for axis in AXES]
    if all(key in values for key in axes):
        ahead = ("GRPO is ahead on all four", "ES is ahead on all four", "It depends: neither is ahead on all four")
        words["ahead, axes"] = _sided(values, axes, *ahead)
    return words


# ---- figures, each drawn from a tidy frame


def draw_curves(points: pd.DataFrame, untrained: Mapping[str, float]) -> plt.Figure:
    """Draw validation accuracy against four budgets: forward FLOPs in large panels, the others in small ones below.

    Args:
        points: `curve_points`.
        untrained: decoding -> accuracy of the base, %.
    """
    small = [axis for axis in AXES if axis != "forward_flops"]
    rows = [[d for d in DECODINGS for _ in range(3)], [axis for axis in small for _ in range(2)]]
    fig, axes = plt.subplot_mosaic(rows, figsize=(style.PAGE, 4.6), height_ratios=[1.5, 1], sharey=True)
    arms_ = points[points["group"].isin(ARMS)]
    for place, ax in axes.items():
        axis, decodings, drawn = (place, DECODINGS, arms_) if place in AXES else ("forward_flops", (place,), points)
        for (group, _, _), part in drawn[drawn["decoding"].isin(decodings)].groupby(["group", "decoding", "run"]):
            thin = {"lw": 0.6, "marker": None, "alpha": 0.8} if group == "grpo_long" else {}
            plots.curves(ax, part.assign(arm=group.removesuffix("_long")), axis, "mean", **thin)
        for d in decodings:
            ax.axhline(untrained[d], ls=style.DECODINGS[d].linestyle, **plots.BASE)
        ax.set(xscale="log", xlabel=AXES[axis].words, title=style.DECODINGS[place].label if place in DECODINGS else "")
    for left in ("greedy", small[0]):
        axes[left].set_ylabel("validation accuracy, %")
    style.legend(fig, arms_.groupby("group")["n"].first().to_dict() | {"base": None})
    return fig


_STEP_SIZES = {"es": ("alpha", "sigma"), "grpo": ("learning_rate", "beta")}
"""Arm -> the settings on the axes of its map: the step size on the horizontal axis, the other on the vertical."""


def draw_sweep(sweep: pd.DataFrame) -> plt.Figure:
    """Draw the scores of both sweeps as maps with the tuned setting framed, and the expected best of k settings.

    sweep: `sweep_points`. In a map the step size grows to the right.
    """
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.15), width_ratios=[1.2, 1.2, 1.0])
    scores = sweep.assign(score=100 * sweep["score"])
    ground = {"cmap": "Greys", "vmin": scores["score"].min(), "vmax": scores["score"].max() + 1}
    for ax, (arm, places) in zip(axes, _STEP_SIZES.items(), strict=False):
        tried, look = scores[scores["arm"] == arm], style.ARMS[arm]
        white = tried["score"].quantile(0.7)
        table = plots.heat(ax, tried, places, "score", lambda cell: f"{cell['score']:.1f}", white=white, **ground)
        plots.framed(ax, table, tried.iloc[0], look.color)
        ax.set(xlabel=SETTINGS[places[0]], ylabel=SETTINGS[places[1]], title=f"{look.label}: validation accuracy, %")
        axes[2].plot(tried["settings tried"], 100 * tried["expected maximum"], **plots.look(arm))
    axes[2].set(xlabel="settings tried, k", ylabel="validation accuracy, %", title="expected best of k settings")
    axes[2].set_xticks(range(1, sweep["settings tried"].max() + 1, 2))
    axes[2].legend()
    return fig


def draw_temperatures(points: pd.DataFrame) -> plt.Figure:
    """Draw test accuracy on one base against temperature: ES and GRPO with bands, the other arms as thin lines.

    points: rows of `by_temperature`. Only groups named after their arm are drawn; the table has the others too.
    """
    fig, ax = plt.subplots(figsize=(style.COLUMN, 3.4))
    here = points[points["group"].isin(list(style.ARMS))]
    strong, thin = {"lw": 1.8, "zorder": 3}, {"lw": 0.8, "ms": 2.6, "zorder": 2}
    looks = {group: plots.look(group, **(strong if group in ARMS else thin)) for group in here["group"].unique()}
    for wide in (True, False):
        drawn = here[here["group"].isin(ARMS) == wide]
        plots.lines(ax, drawn if wide else drawn.drop(columns="low"), "temperature", "accuracy", "group", looks)
    ax.set(xlabel="temperature (0: greedy)", ylabel="test accuracy, %", ylim=(-1, None), xlim=(-0.03, 1.03))
    ax.set_xticks(sorted(here["temperature"].unique()))
    plots.key(fig, ax, 2, 6.5)
    return fig


def draw_estimators(frame: pd.DataFrame) -> plt.Figure:
    """Draw the bias of each KL estimator, and the direction of its gradient, of tokens. frame: `kl_frame`."""
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.3))
    for name, part in frame.groupby("estimator"):
        look, at = style.KL_ESTIMATORS[name].line(), part["KL, nats per token"]
        bias = pd.DataFrame([plots.ends(each, 100) for each in part["bias / KL"]])
        plots.whiskers(axes[0], bias, at, capsize=2, **look)
        if part["cosine, token"].notna().all():
            axes[1].plot(at, part["cosine, token"], **look)
    for ax, text in zip(axes, ("bias, % of the KL", "cosine with the KL's gradient"), strict=True):
        plots.plain_ticks(ax)
        ax.set(xlabel="exact KL, nats per token", ylabel=text)
        ax.legend()
    return fig
