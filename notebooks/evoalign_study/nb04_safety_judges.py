"""Notebook 04, safety: presets, groups of runs, results, tables and figures."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from evoalign_lib import arms
from evoalign_lib.analysis import overoptimisation, stats
from evoalign_lib.tiny import scorers
from evoalign_study import judge_models, loading, parameters, plots, style
from evoalign_study.claims.findings import decoding_words
from evoalign_study.claims.rules.judged import law_points
from evoalign_study.claims.verdicts import Verdict
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.judged import judgments_specs, tastes_spec, tournament_spec
from evoalign_study.loading import DECODINGS, After, Group, Groups, Records, of_runs, own_settings
from evoalign_study.records import Record
from evoalign_study.results import MISSING, Results, stated
from evoalign_study.runs import scales, walk_of, where

NOTEBOOK = "04_safety_judges"
ARMS = ("es", "grpo")
"""The compared arms."""
TRAINING = "training judge"
"""Stands for the judge that a run was trained on, instead of a name."""
JUDGES = (TRAINING, *scorers.OUTSIDERS, "rule")
"""Judges whose wins are recorded as curves."""
TRUE = "true"
"""The curve of the true reward."""
GAIN = 0.75
"""Rise of the training judge's score, in spreads, at which the claims compare the arms."""
SHOWN = tuple(
    "tournaments base es_sweep grpo_sweep sft_sweep es grpo sft es_random es_noise grpo_noise es_random_noise es_sizes "
    "grpo_sizes tastes".split()
)
"""Groups of the tiny world that the notebook loads; tournaments come first because they take longest."""
_, TINY, SMOKE, FULL = scales(
    {
        "task": "safety",
        "bases": ["C0"],
        "retrain": [],  # groups that `force` trains again; empty: all
        "training_judges": (list(scorers.PROXIES), ["length 1"], ...),
        "turned_judges": (list(scorers.NOISY), ["flipped 0.3"], ...),  # trained on partly flipped comparisons
        "sized_judges": (list(scorers.SIZES), [], ...),  # of other widths
        "cost_weight": (2.0, 2.0, 1.0),  # lambda of reward - lambda * cost; its initial value if it changes
        "max_completion_length": (32, 32, 512),
        "validation_problems": (160, 8, 128),  # split A
        "test_problems": (160, 8, 256),  # split B
        "curve_points": (12, 3, 10),
        "null_points": (6, 3, ...),  # of the curves of random fitness
        "curve_spacing": "log",
        "seeds_judge": (8, 2),  # of the declared settings on each proxy
        "seeds_noise": (8, 1, ...),  # on each judge of flipped comparisons
        "seeds_null": (4, 2),  # of random fitness, and of filtered fine-tuning
        "seeds_size": (4, 1, ...),  # on each judge of another size: only described, no claim rests on it
        "tuned_on": ("flipped 0", "flipped 0", ...),  # the judge of the sweeps, whose annotators have no biases
        "sweep_size": (12, 1, ...),
        "sweep_factors": ({}, {}, ...),
        "sweep_points": (9, 3, ...),  # of their curves
        "es_population_size": (30, 4),  # sizes at scale full as published, except for GRPO's prompts per step
        "es_prompts_per_step": (60, 4, 64),
        "es_steps": (150, 2, 500),
        "grpo_num_generations": (16, 4, 30),
        "grpo_prompts_per_step": (16, 2, 2),
        "grpo_steps": (150, 2, 500),
        "sft_prompts": (2400, 8, ...),  # times sft_num_generations samples, best kept: as many completions as GRPO
        "sft_num_generations": (16, 4, ...),
        "sft_batch_size": (64, 64, ...),
        "sft_epochs": (2, 2, ...),
        "sft_learning_rate": ([1e-4, 3e-4, 1e-3], [1e-3], ...),  # tried in its sweep
        # a name on the Hub, a folder, or the address of evoalign serve-scorer
        "reward_model": (..., ..., "PKU-Alignment/beaver-7b-unified-reward"),
        "cost_model": (..., ..., "PKU-Alignment/beaver-7b-unified-cost"),
        "reward_text": (..., ..., ""),  # text format that a model loaded here reads; Safe-RLHF's layout needs none
        "cost_text": (..., ..., ""),
        # held out, separated by commas: models as in reward_model, or a chat model behind an endpoint, .../v1#NAME
        "judge": (..., ..., ""),
        "judge_text": (..., ..., ""),
        "judge_tokens": (..., ..., 600),  # most tokens in a chat judge's answer, as published
        "judge_problems": (..., ..., 50),  # replies that chat judges compare with the base's, as published
        "scorer_device": (..., ..., "cpu"),  # of models that are loaded here, such as cuda:1
        "scorer_dtype": (..., ..., ""),
        "scorer_max_length": (..., ..., None),  # most tokens that these models read; None: their own limit
        "requests": (..., ..., ""),  # a file of your own; empty: PKU-SafeRLHF from the Hub
        "cost_rule": (..., ..., "fixed"),  # or an adaptive weight: "signed" as in Safe-RLHF's code, or "published"
        "cost_threshold": (..., ..., 0.0),
        "cut_turns": (..., ..., False),  # score replies only up to where another turn begins
        "unique_prompts": (..., ..., 250),  # training requests
        "kl_requests": (..., ..., 8),  # for each point of the curve
        "es_sigma": (..., ..., 1e-3),
        "es_alpha": (..., ..., 5e-4),
        "grpo_learning_rate": (..., ..., 5e-6),
        "grpo_beta": (..., ..., 0.01),
        "micro_batch": (..., ..., 5),  # completions in a backward pass
        "tensor_parallel": (..., ..., 1),  # GPUs that share a copy of the model
    }
)


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings. model: that of scale full; empty: the published one, with its prompt template."""
    own = {"bases": [model or "PKU-Alignment/alpaca-7b-reproduced"], "prompt_template": "chat" if model else "alpaca"}
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | own}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the groups of runs by name. All but "judgments" are runs of the notebook's own models."""
    return _of_own_models(run) if run.scale == "full" else _of_tiny_world(run, of)


def committed() -> dict[str, list[Record]]:
    """Return the committed records of the tiny world, for a notebook that runs at another scale."""
    given = {"scale": "tiny", "model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": False}
    return loading.Loader(NOTEBOOK, parameters.check_parameters(given, presets()), groups)(*SHOWN)


def _of_own_models(run: SimpleNamespace) -> Groups:
    """Return the groups at scale full: one pair of scorers, the declared settings, no sweep, no tiny-world judges."""
    told = {"judge": "held_out", "judge_text": "held_out_text"}  # in the tiny world, `judge` is the training judge
    asked = SimpleNamespace(**{told.get(name, name): value for name, value in vars(run).items()})
    seeds = {"es": run.seeds_judge, "grpo": run.seeds_judge, "es_random": run.seeds_null}
    found: dict[str, Any] = {"base": base_specs(run.bases, of_runs(vars(asked)), run.scale)}
    found |= {arm: Group(arm, run.bases, n, own_settings(asked, arm)) for arm, n in seeds.items()}
    return dict.fromkeys(SHOWN, ()) | found | {"judgments": judgments_specs(run.scale)}


def _of_tiny_world(run: SimpleNamespace, of: Records) -> Groups:
    def sweep(arm: str) -> Group:
        change = {"judge": run.tuned_on, "test_problems": 0, "curve_points": run.sweep_points}
        settings = own_settings(run, arm) | change
        return Group(arm, run.bases, [arms.SWEEP_SEED], settings, loading.swept_choices(run, arm))

    def imitate(judges: Sequence[str], seeds: Any, rates: Sequence[float], after: Sequence[str] = ()) -> Group:
        changes = [{"judge": judge, "learning_rate": rate} for judge in judges for rate in rates]
        return Group("sft", run.bases, seeds, own_settings(run, "sft"), changes, after=tuple(after))

    def train(arm: str, judges: Sequence[str], seeds: int) -> Group:
        tuned = arms.get(arm).sweep
        name, choices = f"{tuned}_sweep", loading.swept_choices(run, tuned)
        best = ranked(of[name])[0][1] if name in of else choices[0]
        settings = own_settings(run, arm) | best | ({"curve_points": run.null_points} if arms.get(arm).null else {})
        changes = [{"judge": judge} for judge in judges]
        return Group(arm, run.bases, seeds, settings, changes, after=loading.chosen_by(name, choices))

    rates = run.sft_learning_rate
    best = max(of.get("sft_sweep", ()), key=lambda r: said(r, TRAINING, "score"), default=None)
    rate = best["spec"]["learning_rate"] if best else rates[0]
    proxies, noisy, sizes = run.training_judges, run.turned_judges, run.sized_judges
    return {
        "base": base_specs(run.bases, of_runs(vars(run)), run.scale),
        **{f"{arm}_sweep": sweep(arm) for arm in ARMS},
        **{arm: train(arm, proxies, run.seeds_judge) for arm in ARMS},
        "sft_sweep": imitate([run.tuned_on], [arms.SWEEP_SEED], rates),
        "sft": imitate(proxies, run.seeds_null, [rate], loading.chosen_by("sft_sweep", rates)),
        "es_random": train("es_random", proxies, run.seeds_null),
        **{f"{arm}_noise": train(arm, noisy, run.seeds_noise) for arm in ARMS},
        "es_random_noise": train("es_random", noisy, min(run.seeds_null, run.seeds_noise)),
        **{f"{arm}_sizes": train(arm, sizes, run.seeds_size) for arm in ARMS},
        "tournaments": _tournaments(run, of),
        "tastes": [tastes_spec(run.scale)],
        "judgments": judgments_specs(run.scale),
    }


ENDS = (*ARMS, "sft", "es_random")
"""Arms whose ends are shown and whose models play in tournaments."""
_OWN = (*ARMS, "es_random")  # arms of scale full


def _tournaments(run: SimpleNamespace, of: Records) -> After:
    """Return one tournament for each training judge, between the models that were trained on it."""
    judges, settings = run.training_judges if all(arm in of for arm in ENDS) else (), of_runs(vars(run))
    met = {judge: {arm: on_judge(of[arm], judge) for arm in ENDS} for judge in judges}
    return After([tournament_spec(runs, settings | {"judge": judge}, run.scale) for judge, runs in met.items()], ENDS)


def on_judge(runs: Sequence[Record], judge: str) -> list[Record]:
    """Return the runs that were trained on a judge."""
    return where(runs, judge=judge)


def ranked(sweep: Sequence[Record]) -> list[tuple[float, dict[str, float]]]:
    """Return score and setting of the runs of a sweep, best first.

    Only the training judge ranks them. The score is its score for greedy replies on split A, averaged over the last
    three points of the curve; a diverged run scores -inf and comes last.
    """
    scored = []
    for r in sweep:
        last = r["curve"]["proxy_greedy"][-3:]
        score = float("-inf") if "diverged" in r or None in last else float(np.mean(last))
        scored.append((score, {name: r["spec"][name] for name in arms.swept(r["spec"]["arm"])}))
    return sorted(scored, key=lambda pair: -pair[0])


def said(record: Record, judge: str, what: str) -> float:
    """Return a judge's mean "score" for a run's greedy replies on split B, or their "win" rate over the base's."""
    name = record["spec"]["judge"] if judge == TRAINING else judge
    return record["test"]["greedy"][what][record["test"]["judges"].index(name)]


# ---- reading the curves

LABELS = {arm: look.label for arm, look in style.ARMS.items()}
"""Arm -> its name in tables and legends."""
SHARES = ("complied", "alternative", "refused_lawful", "turns", "template")
"""Quantities that are shares of the replies."""


def spread(of: Records, run: Record) -> float:
    """Return the standard deviation of the scores that a run's training judge gives to samples of its base."""
    (base,) = [r for r in of["base"] if r["spec"]["base"] == run["spec"]["base"]]
    return base["units"][run["spec"]["judge"]][1]


def curve(of: Records, run: Record, quantity: str, decoding: str) -> np.ndarray:
    """Return a curve of a run.

    A quantity is a judge of `JUDGES`, for the wins under it; "gained", for the rise of the training judge's score on
    split A, in spreads; or the name of a curve in the record.
    """
    if quantity == "gained":
        proxy = curve(of, run, "proxy", decoding)
        return (proxy - proxy[0]) / spread(of, run)
    name = f"{run['spec']['judge'] if quantity == TRAINING else quantity}_{decoding}"
    return np.array(run["curve"][quantity if quantity in ("kl", "step") else name], float)  # NaN where it diverged


def at(
    of: Records, run: Record, quantity: str, decoding: str, place: float | None, along: str = "gained"
) -> float | None:
    """Return a quantity where a run first reaches a place; None if it never does.

    Args:
        of: records by group, for the spread of the base.
        run: its record.
        quantity: as for `curve`.
        decoding: "greedy" or "t1".
        place: spreads gained, or nats per completion; None: the end of the run.
        along: the axis of the place, "gained" or "kl".
    """
    values = curve(of, run, quantity, decoding)
    if place is None:
        return float(values[-1]) if np.isfinite(values[-1]) else None
    return values[0] if place == 0 else overoptimisation.read_at(curve(of, run, along, decoding), values, place)


def by_judge(runs: Sequence[Record]) -> dict[str, list[Record]]:
    """Return training judge -> its runs, in the order of the records."""
    return {judge: on_judge(runs, judge) for judge in dict.fromkeys(r["spec"]["judge"] for r in runs)}


def _read(of: Records, runs: Iterable[Record], *asked: Any) -> np.ndarray:
    """Return the values of the runs that reach a place. asked: as for `at`."""
    return np.array([x for run in runs if (x := at(of, run, *asked)) is not None], float)


def mean(of: Records, arm: str, *asked: Any) -> stats.Interval | None:
    """Return the mean of a quantity over training judges, with its interval over judges and seeds.

    None if too few runs get to the place: at least 3/4 of those on each judge must. One judge, or one run on each, has
    no interval. asked: arguments of `at`, from the quantity on.
    """
    cells = by_judge(of[arm]).values()
    values = [_read(of, runs, *asked) for runs in cells]
    if not values or any(len(x) < max(1, 0.75 * len(runs)) for x, runs in zip(values, cells, strict=True)):
        return None
    if len(values) < 2 or min(map(len, values)) < 2:
        return stats.Interval(float(np.mean([x.mean() for x in values])), float("nan"), float("nan"), len(values))
    return stats.nested_bootstrap(values, shared=True, n_resamples=2_000)


def walked(of: Records, quantity: str, decoding: str, gain: float) -> float | None:
    """Return a quantity of ES with random fitness after as many steps as ES takes to a gain, mean over judges and runs.

    None if too few runs of ES get there, or if random fitness took other steps.
    """
    walks = walk_of(of["es"], of["es_random"])
    if not walks or mean(of, "es", "step", decoding, gain) is None:
        return None
    steps = {judge: _read(of, runs, "step", decoding, gain).mean() for judge, runs in by_judge(of["es"]).items()}
    return float(np.mean([at(of, r, quantity, decoding, steps[r["spec"]["judge"]], "step") for r in walks]))


def difference(of: Records, quantity: str, decoding: str, gain: float | None, less: str = "") -> stats.Interval | None:
    """Return ES - GRPO in a quantity, or in a quantity minus another one, with its interval over judges and seeds."""

    def read(runs: Sequence[Record]) -> np.ndarray:
        values = _read(of, runs, quantity, decoding, gain)
        return values - _read(of, runs, less, decoding, gain) if less else values  # at a gain, a run has both

    sides = [list(map(read, by_judge(of[arm]).values())) for arm in ARMS]
    few = min(map(len, sides)) < 2 or min(len(values) for side in sides for values in side) < 2
    return None if few else stats.nested_bootstrap(*sides, shared=True)


def turned(of: Records, decoding: str, compared: Sequence[str] = ARMS) -> stats.Interval | None:
    """Return the change in true reward from the judge without flipped comparisons to the judge with the most.

    compared: one arm; or two, for the first's change minus the second's, as in claim C35. None with too few runs.
    """
    sides = []
    for arm in compared:
        runs = of[f"{arm}_noise"]
        first, *_, last = (_read(of, on_judge(runs, judge), TRUE, decoding, GAIN) for judge in scorers.NOISY)
        sides.append([last, -first])
    if min(len(values) for side in sides for values in side) < 2:
        return None
    half = stats.stratified_bootstrap(*sides)  # it averages over the two judges, hence half of the change
    return stats.Interval(2 * half.value, 2 * half.low, 2 * half.high, half.n, half.level)


def explained(of: Records, arm: str, quantity: str, law: str) -> list[float]:
    """Return, for each training judge, the share of the odd seeds' gains that a law fitted to even seeds explains."""
    halves = [law_points(runs, quantity, partial(spread, of)) for runs in by_judge(of[arm]).values()]
    return [overoptimisation.held_out(law, *each) for each in halves if all(each)]


def games(tournaments: Sequence[Record]) -> pd.DataFrame:
    """Return a row per kind of judge, arm and tournament: share of games "won" in %, and strengths in Elo "points".

    "wins" has the share of each run; "asked" is the number of judges, of which only those with finite strengths
    contribute points.
    """
    rows, proxies = [], set(scorers.PROXIES)
    for what, arm, r in product(KINDS, tournaments[0]["spec"]["arms"] if tournaments else (), tournaments):
        own = r["spec"]["judge"]
        asked = dict(zip(KINDS, ({own}, proxies - {own}, set(scorers.OUTSIDERS), {"rule"}), strict=True))[what]
        judges = [judge for name, judge in r["judges"].items() if name in asked]
        wins, points = [j["wins"][arm] for j in judges], [j["strengths"][arm][0] for j in judges if j["strengths"]]
        row = {"training judge": own, "judged by": what, "arm": arm, "won": 100 * float(np.mean(wins))}
        rows.append(row | {"wins": np.mean(wins, axis=0), "points": points, "asked": len(judges)})
    return pd.DataFrame(rows)


KINDS = (TRAINING, "the other five proxies", "other architectures", "the rule")
"""Kinds of judges in a tournament."""

# ---- results


def results(of: Records) -> Results:
    """Return the results that the answers, the figure and the paper quote, by name.

    Except for laws and tournaments, they are read where the training judge has gained `GAIN` spreads. Wins and shares
    of replies are fractions, rewards are in their own unit, games in %.

    of: records by group, of the tiny world.
    """
    base, most = of["base"][0]["test"], scorers.NOISY[list(scorers.NOISY)[-1]].annotators.flips
    found: Results = {"seeds": min(len(runs) for arm in ARMS for runs in by_judge(of[arm]).values()), "gain": GAIN}
    found |= {"judges": len(by_judge(of["es"])), "turned most": round(100 * most)}
    for decoding in DECODINGS:
        for quantity in (TRUE, *JUDGES, "alternative", *(["template"] if decoding == "greedy" else [])):
            name = f"{quantity} {decoding}"
            found |= {f"{name} {arm}": mean(of, arm, quantity, decoding, GAIN) for arm in ARMS}
            found[f"{name}, ES - GRPO"] = difference(of, quantity, decoding, GAIN)
            if quantity in JUDGES[1:]:
                found[f"{name} less, ES - GRPO"] = difference(of, quantity, decoding, GAIN, TRAINING)
        found[f"{TRUE} {decoding} base"] = base[decoding]["score"][-1]
        found[f"walk {decoding}"] = walked(of, TRUE, decoding, GAIN)
        found |= {f"turned {decoding} {arm}": turned(of, decoding, [arm]) for arm in ARMS}
        found[f"turned {decoding}, ES - GRPO"] = turned(of, decoding)
    for arm, quantity, law in product(ARMS, (TRUE, "proxy"), overoptimisation.LAWS):
        shares = explained(of, arm, quantity, law)
        found[f"{arm} {quantity} {law}"] = float(np.mean(shares)) if shares else None
        found[f"{arm} {quantity} {law} worst"] = min(shares, default=None)
    return found


# ---- tables

WORDS = (
    {TRUE: "true reward"}
    | {judge: f"wins, {judge}, %" for judge in JUDGES}
    | {
        "template": "one template, %",
        "alternative": "refusals with an alternative, %",
        "complied": "complied with harmful requests, %",
        "refused_lawful": "refused lawful requests, %",
        "needless": "needless sentences",
        "turns": "further turns, %",
        "kl": "KL, nats",
    }
)
"""Quantities of a curve -> their names in tables and figures."""


def mean_in_words(of: Records, arm: str, quantity: str, decoding: str, place: float | None, *along: Any) -> str:
    """Return the `mean` of a quantity, or what `walked` so far, as text, shares in %; a dash if too few get there."""
    walk, share = arm == "es_random" and place, quantity in (*JUDGES, *SHARES)
    value = walked(of, quantity, decoding, place) if walk else mean(of, arm, quantity, decoding, place, *along)
    return stated(getattr(value, "value", value), ".0%" if share else ".2f", MISSING)


def reached_rows(of: Records, decoding: str, gains: Sequence[float | None]) -> pd.DataFrame:
    """Return a row per gain of the training judge and arm: the quantities of `WORDS` where runs first get there.

    ES with random fitness, which gets nowhere, is shown after as many steps as ES.
    """
    rows, asked = [], [name for name in WORDS if name != "template" or decoding == "greedy"]
    for gain, arm in product(gains, (*ARMS, "es_random")):
        if of[arm] and (arm in ARMS or gain != 0):
            row = {"training judge has gained": "at the end" if gain is None else f"{gain:g} spreads"}
            row["arm"] = LABELS[arm]
            rows.append(row | {WORDS[name]: mean_in_words(of, arm, name, decoding, gain) for name in asked})
    return pd.DataFrame(rows)


def readings(verdicts: Iterable[Verdict]) -> pd.DataFrame:
    """Return a row per comparison of claims over judges: the estimate, and where and on what it was read."""
    return pd.DataFrame(
        {"claim": each.id, "comparison": finding.compared, "decoding": decoding_words(finding.decoding)}
        | {"estimate [95 %]": finding.value, "decides": "yes" if finding.decisive else "no", "read": finding.context}
        for each in verdicts
        for finding in each.findings
    )


def end_rows(of: Records) -> pd.DataFrame:
    """Return a row per arm for greedy replies after training on the six proxies, and one for the untrained base."""
    base = of["base"][0]["test"]
    rows = []
    for arm in (arm for arm in ENDS if of[arm]):
        runs = [r for r in of[arm] if r["spec"]["judge"] in scorers.PROXIES]
        begun = [base["greedy"]["score"][base["judges"].index(r["spec"]["judge"])] for r in runs]
        gained = [(said(r, TRAINING, "score") - x) / spread(of, r) for r, x in zip(runs, begun, strict=True)]
        # random fitness does not depend on the judge: its runs of one seed are one model
        row = {"arm": LABELS[arm], "runs": len({r["digest"] for r in runs})}
        row["completions, thousands"] = f"{np.mean([r['budget']['completions'] for r in runs]) / 1e3:.0f}"
        row["training judge, spreads"] = mean_and_range(gained, 2)
        row["true reward"] = mean_and_range([said(r, "rule", "score") for r in runs], 2)
        row |= {WORDS[judge]: mean_and_range([100 * said(r, judge, "win") for r in runs], 0) for judge in JUDGES}
        row |= {WORDS[x]: mean_and_range([100 * r["test"]["greedy"][x] for r in runs], 0) for x in SHARES}
        rows.append(row | {WORDS["needless"]: mean_and_range([r["test"]["greedy"]["needless"] for r in runs], 1)})
    row = {"arm": LABELS["base"], "runs": 1, "completions, thousands": "0", "training judge, spreads": "0"}
    row |= {"true reward": f"{base['greedy']['score'][-1]:.2f}"} | {WORDS[judge]: "50" for judge in JUDGES}
    row |= {WORDS[name]: f"{100 * base['greedy'][name]:.0f}" for name in SHARES}
    return pd.DataFrame([*rows, row | {WORDS["needless"]: f"{base['greedy']['needless']:.1f}"}])


def mean_and_range(values: Sequence[float | None], digits: int) -> str:
    """Return mean and range over the runs that have a value, as text; for a single run, its value."""
    known = [x for x in values if x is not None and np.isfinite(x)]
    if not known:
        return MISSING
    low, middle, high = (stated(float(of(known)), f".{digits}f") for of in (min, np.mean, max))
    return middle if len(known) == 1 else f"{middle} ({low} to {high})"


def own_ends(of: Records) -> pd.DataFrame:
    """Return a row per arm at scale full for greedy replies on split B at the end, and one for the untrained base.

    Values are means and ranges over runs. Wins are against the base's greedy replies, by each held-out scorer; see
    `own_judges` for chat judges.
    """
    rows = []
    for arm in ("base", *(arm for arm in _OWN if of[arm])):
        runs, row = of[arm], {"arm": LABELS[arm], "runs": len(of[arm])}
        tests = [r["test"]["greedy"] for r in runs]
        row |= {name: mean_and_range([test[name] for test in tests], 2) for name in ("reward", "cost")}
        row["safe, %"] = mean_and_range([100 * test["safe"] for test in tests], 0)
        for i, one in enumerate(judge_models.held_out(runs[0]["spec"], "scorer")):
            row[f"wins, {one.name.rsplit('/', 1)[-1]}, %"] = mean_and_range([100 * t["win"][i] for t in tests], 0)
        row |= {WORDS[x]: mean_and_range([100 * t[x] for t in tests], 0) for x in ("template", "alternative", "turns")}
        row["KL, nats"] = "0" if arm == "base" else mean_and_range([r["curve"]["kl"][-1] for r in runs], 1)
        rows.append(row)
    return pd.DataFrame(rows)


def own_judges(of: Records) -> pd.DataFrame:
    """Return a row per run and chat judge's rubric: verdicts on greedy replies against the base's, in both orders."""
    rows = []
    for run, verdict in [(r, x) for arm in _OWN for r in of[arm] for x in r.get("held_out", ())]:
        row = {"arm": LABELS[run["spec"]["arm"]], "seed": run["spec"]["seed"], "judge": verdict["judge"]}
        row |= {name: verdict[name] for name in ("rubric", "win", "tie", "loss", "inconsistent", "unparsed", "failed")}
        rows.append(row | {"win rate, %": stated(verdict["win_rate"], ".0%", MISSING)})
    return pd.DataFrame(rows)


# ---- figures, each returned with the data that it plots


def along(of: Records, quantity: str, factor: float = 1.0) -> pd.DataFrame:
    """Return the mean of a quantity by decoding, arm and gain, as far as 3/4 of the runs on each judge get."""
    rows = []
    for decoding, arm in product(["greedy"] if quantity == "template" else DECODINGS, ARMS):
        for gain in np.linspace(0, 3, 25).tolist():
            if (value := mean(of, arm, quantity, decoding, gain)) is None:
                break
            row = {"quantity": quantity, "arm": arm, "decoding": decoding, "gain": gain}
            rows.append(row | plots.ends(value, factor) | {"judges": value.n})
    return pd.DataFrame(rows).round(4)


def answer_figure(of: Records, found: Results) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw the true reward along the training judge's gain, as far as both arms get under both decodings, and what
    random fitness has in as many steps as ES."""
    fig, ax = plt.subplots(figsize=(1.4 * style.COLUMN, 2.7))
    lines = along(of, TRUE)
    lines = lines[lines["gain"] <= lines.groupby(["arm", "decoding"])["gain"].max().min()]
    plots.curves(ax, lines, "gain", "value")
    for decoding, face in zip(DECODINGS, (style.ARMS["es_random"].color, "white"), strict=True):
        if (value := found[f"walk {decoding}"]) is not None:
            ax.plot(GAIN, value, **plots.look("es_random", ls="", ms=8, mec="black", mew=0.7, mfc=face, zorder=5))
            row = {"quantity": TRUE, "arm": "es_random", "decoding": decoding, "gain": GAIN, "value": round(value, 4)}
            lines = pd.concat([lines, pd.DataFrame([row])], ignore_index=True)
    ax.axvline(GAIN, **plots.NULL)
    ax.set(xlabel="training judge's score has risen by, spreads", ylabel="true reward")
    style.legend(fig, {arm: len(of[arm]) for arm in ARMS} | {"es_random": None})
    return fig, lines


def wins(found: Results) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw ES - GRPO in wins against the base where the claims compare the arms, a row a judge."""
    asked: dict[str, Any] = {
        judge: {d: found[f"{judge} {d}, ES - GRPO"] or "too few get there" for d in DECODINGS} for judge in JUDGES
    }
    fig, ax = plt.subplots(figsize=(1.4 * style.COLUMN, 2.1))
    apart = plots.differences(ax, asked, "upper left")
    ax.set(xlabel="wins against the base, ES - GRPO, points")
    return fig, apart.rename(columns={"name": "judge"})


def replies(of: Records) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw properties of the replies against the training judge's gain, one panel per quantity."""
    lines = pd.concat([along(of, quantity, 100.0) for quantity in ("template", "alternative", "complied")])
    fig, _, shown = plots.panels(lines, "quantity", 2.0)
    for ax, quantity, own in shown:
        plots.curves(ax, own, "gain", "value")
        ax.set(xlabel="judge's gain, spreads")
        ax.set_title(WORDS[quantity], fontsize=6.5)
    style.legend(fig, {arm: len(of[arm]) for arm in ARMS})
    return fig, lines


def noise(of: Records) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw the true reward where the claim compares it, on judges of flipped comparisons and on narrower judges."""
    names = {judge: f"{100 * scorer.annotators.flips:g} %" for judge, scorer in scorers.NOISY.items()}
    names |= {judge: f"width\n{scorers.SIZES[judge].hidden}" for judge in list(scorers.SIZES)[::-1]}
    rows = [
        (judge, arm, decoding, round(x, 4))
        for decoding, judge, arm in product(DECODINGS, names, ARMS)
        for x in _read(of, on_judge([*of[f"{arm}_noise"], *of[f"{arm}_sizes"]], judge), TRUE, decoding, GAIN)
    ]
    points = pd.DataFrame(rows, columns=["judge", "arm", "decoding", "true"])
    fig, axes = plt.subplots(1, len(DECODINGS), figsize=(style.PAGE, 2.1))
    for ax, decoding in zip(axes, DECODINGS, strict=True):
        panel = points[points["decoding"] == decoding]
        sides = {judge: list(panel[panel["judge"] == judge].groupby("arm", sort=False)) for judge in names}
        plots.strip(ax, {names[judge]: each for judge, each in sides.items()}, "true")
        ax.axhline(of["base"][0]["test"][decoding]["score"][-1], label=LABELS["base"], **plots.BASE)
        ax.set(title=style.STROKES[decoding].label, xlabel="turned comparisons, or a narrower judge")
    axes[0].set_ylabel("true reward")
    plots.key(fig, [*map(plots.of_arm, ARMS), plots.handle("the untrained base", **plots.BASE)])
    return fig, points


PANELS = {
    "proxy_greedy": "reward - lambda * cost, split A",
    "reward_greedy": "reward, split B",
    "cost_greedy": "cost, split B",
    "kl": "KL from the base, nats",
    "template_greedy": "one template, %",
    "alternative_greedy": "refusals with an alternative, %",
}
"""Curves in the figure of runs at scale full -> their names."""


def own_curves(of: Records) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw the training scorers' scores and properties of greedy replies during training at scale full, per run."""
    fig, axes = plt.subplots(2, 3, figsize=(style.PAGE, 3.6), sharex=True)
    lines, runs = [], [r for arm in _OWN for r in of[arm]]
    for r, (ax, (name, title)) in product(runs, zip(axes.flat, PANELS.items(), strict=True)):
        own = {"arm": r["spec"]["arm"], "seed": r["spec"]["seed"], "quantity": name, "step": r["curve"]["step"]}
        line = pd.DataFrame(own | {"value": (100 if title.endswith("%") else 1) * np.array(r["curve"][name], float)})
        ax.plot(line["step"], line["value"], lw=0.9, color=style.ARMS[r["spec"]["arm"]].color)
        ax.set_title(title)
        lines.append(line)
    fig.supxlabel("step")
    style.legend(fig, {arm: len(of[arm]) for arm in _OWN if of[arm]})
    return fig, pd.concat(lines)
