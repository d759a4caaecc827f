"""Notebook 04, safety: its presets and its groups of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from evoalign_lib import arms
from evoalign_lib.analysis import overoptimisation, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.tiny import scorers
from evoalign_study import loading, parameters
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.judged import judgments_specs, tastes_spec, tournament_spec
from evoalign_study.loading import After, Group, Groups, Records, of_runs, own_settings
from evoalign_study.records import Record

NOTEBOOK = "04_safety_judges"
ARMS = ("es", "grpo")
"""The arms that are compared."""
TRAINING = "training judge"
"""The judge that a run was trained on, in the place of a name."""
JUDGES = (TRAINING, *scorers.OUTSIDERS, "rule")
"""Whose wins the curves have."""
TRUE = "true"
"""The curve of the true reward."""
GAIN = 0.75
"""Spreads by which the training judge's score has risen where the claims compare the arms."""
SHOWN = ("tournaments", "base", "es_sweep", "grpo_sweep", "sft_sweep", "es", "grpo", "sft", "es_random", "es_noise")
SHOWN += ("grpo_noise", "es_random_noise", "es_sizes", "grpo_sizes", "tastes")
"""Groups that the notebook loads for sections 2 to 11; a tournament takes longest, so that it begins first."""
TINY = {
    "task": "safety",
    "bases": ["C0"],
    "retrain": [],  # groups that `force` makes anew; none: all
    "training_judges": list(scorers.PROXIES),
    "turned_judges": list(scorers.NOISY),  # of turned comparisons
    "sized_judges": list(scorers.SIZES),  # of another width
    "cost_weight": 2.0,  # lambda of reward - lambda * cost
    "max_completion_length": 32,
    "validation_problems": 160,  # split A
    "test_problems": 160,  # split B
    "curve_points": 12,
    "null_points": 6,  # of the curves of random fitness
    "curve_spacing": "log",
    "seeds_judge": 8,  # of the declared settings on each proxy
    "seeds_noise": 8,  # on each judge of turned comparisons
    "seeds_null": 4,  # of random fitness, and of filtered fine-tuning
    "seeds_size": 4,  # on each judge of another size: a map that describes
    "tuned_on": "flipped 0",  # the judge of the sweeps: its annotators like nothing besides the truth
    "sweep_size": 12,
    "sweep_factors": {},
    "sweep_points": 9,  # of their curves
    "es_population_size": 30,
    "es_prompts_per_step": 60,
    "es_steps": 150,
    "grpo_num_generations": 16,
    "grpo_prompts_per_step": 16,
    "grpo_steps": 150,
    "sft_prompts": 2400,  # of each the best of sft_num_generations samples: as many completions as GRPO
    "sft_num_generations": 16,
    "sft_batch_size": 64,
    "sft_epochs": 2,
    "sft_learning_rate": [1e-4, 3e-4, 1e-3],  # that its sweep tries
}
SMOKE = TINY | {
    "training_judges": ["length 1"],
    "turned_judges": ["flipped 0.3"],
    "sized_judges": [],
    "validation_problems": 8,
    "test_problems": 8,
    "curve_points": 3,
    "null_points": 3,
    "seeds_judge": 2,
    "seeds_noise": 1,
    "seeds_null": 2,
    "seeds_size": 1,
    "sweep_size": 1,
    "sweep_points": 3,
    "es_population_size": 4,
    "es_prompts_per_step": 4,
    "es_steps": 2,
    "grpo_num_generations": 4,
    "grpo_prompts_per_step": 2,
    "grpo_steps": 2,
    "sft_prompts": 8,
    "sft_num_generations": 4,
    "sft_learning_rate": [1e-3],
}
FULL = {
    "task": "safety",
    "retrain": [],
    "reward_model": "PKU-Alignment/beaver-7b-unified-reward",  # or a folder, or the address of evoalign serve-scorer
    "cost_model": "PKU-Alignment/beaver-7b-unified-cost",
    "reward_text": "",  # how a model that is loaded here reads a reply; one in Safe-RLHF's layout needs none
    "cost_text": "",
    "judge": "",  # held out, with commas between several: as reward_model, or a chat model: folder, Hub, .../v1#NAME
    "judge_text": "",
    "judge_tokens": 600,  # of an answer of a chat judge, at most: as published
    "judge_problems": 50,  # replies that chat judges compare with the base's: as published
    "scorer_device": "cpu",  # of models that are loaded here: such as cuda:1
    "scorer_dtype": "",
    "scorer_max_length": None,  # tokens that these read; None: what they can
    "requests": "",  # a file of your own; else PKU-SafeRLHF from the Hub
    "cost_rule": "fixed",  # or a weight that moves: "signed" as in Safe-RLHF's code, "published"
    "cost_weight": 1.0,  # lambda; the first one where it moves
    "cost_threshold": 0.0,
    "cut_turns": False,  # score replies up to where they go on to another turn
    "unique_prompts": 250,  # training requests
    "max_completion_length": 512,
    "validation_problems": 128,  # split A
    "test_problems": 256,  # split B
    "kl_requests": 8,  # of a point of the curve
    "curve_points": 10,
    "curve_spacing": "log",
    "seeds_judge": 8,
    "seeds_null": 4,
    "es_population_size": 30,  # from here as published, but for GRPO's prompts in a step, of which nothing is
    "es_prompts_per_step": 64,
    "es_steps": 500,
    "es_sigma": 1e-3,
    "es_alpha": 5e-4,
    "grpo_num_generations": 30,
    "grpo_prompts_per_step": 2,
    "grpo_steps": 500,
    "grpo_learning_rate": 5e-6,
    "grpo_beta": 0.01,
    "micro_batch": 5,  # completions in a backward pass
    "tensor_parallel": 1,  # GPUs that share a copy of the model
}


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the published one, with its text as template."""
    own = {"bases": [model or "PKU-Alignment/alpaca-7b-reproduced"], "prompt_template": "chat" if model else "alpaca"}
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | own}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name. All but "judgments" are of the notebook's own models."""
    return _of_own_models(run) if run.scale == "full" else _of_tiny_world(run, of)


def committed() -> dict[str, list[Record]]:
    """Return the committed records of the tiny world, for a notebook that runs at another scale."""
    given = {"scale": "tiny", "model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": False}
    return loading.Loader(NOTEBOOK, parameters.check_parameters(given, presets()), groups)(*SHOWN)


def _of_own_models(run: SimpleNamespace) -> Groups:
    """At scale full: one pair of scorers, the declared settings, no sweep."""
    told = {"judge": "held_out", "judge_text": "held_out_text"}  # in the tiny world a judge is what trains
    asked = SimpleNamespace(**{told.get(name, name): value for name, value in vars(run).items()})

    def train(arm: str, seeds: int) -> Group:
        return Group(arm, run.bases, seeds, own_settings(asked, arm))

    return {
        "base": base_specs(run.bases, of_runs(vars(asked)), run.scale),
        "es": train("es", run.seeds_judge),
        "grpo": train("grpo", run.seeds_judge),
        "es_random": train("es_random", run.seeds_null),
        "judgments": judgments_specs(run.scale),
    } | dict.fromkeys(_OF_SMALL_JUDGES, ())


_OF_SMALL_JUDGES = (
    "es_sweep",
    "grpo_sweep",
    "sft_sweep",
    "sft",
    "es_noise",
    "grpo_noise",
    "es_random_noise",
    "es_sizes",
)
_OF_SMALL_JUDGES += ("grpo_sizes", "tournaments", "tastes")
"""Groups that the tiny world's judges alone have."""


def _of_tiny_world(run: SimpleNamespace, of: Records) -> Groups:
    def sweep(arm: str) -> Group:
        settings = own_settings(run, arm) | {"judge": run.tuned_on, "test_problems": 0}
        settings |= {"curve_points": run.sweep_points}
        return Group(arm, run.bases, [arms.SWEEP_SEED], settings, loading.swept_choices(run, arm))

    def imitate(
        judges: Sequence[str], seeds: int | Sequence[int], rates: Sequence[float], after: Sequence[str]
    ) -> Group:
        changes = [{"judge": judge, "learning_rate": rate} for judge in judges for rate in rates]
        return Group("sft", run.bases, seeds, own_settings(run, "sft"), changes, after=tuple(after))

    def train(arm: str, judges: Sequence[str], seeds: int) -> Group:
        tuned = arms.get(arm).sweep
        name, choices = f"{tuned}_sweep", loading.swept_choices(run, tuned)
        best = ranked(of[name])[0][1] if name in of else choices[0]
        settings = own_settings(run, arm) | best | ({"curve_points": run.null_points} if arms.get(arm).null else {})
        changes = [{"judge": judge} for judge in judges]
        return Group(arm, run.bases, seeds, settings, changes, after=loading.chosen_by(name, choices))

    rate = max(of["sft_sweep"], key=_liked)["spec"]["learning_rate"] if "sft_sweep" in of else run.sft_learning_rate[0]
    proxies, noisy, sizes = run.training_judges, run.turned_judges, run.sized_judges
    return {
        "base": base_specs(run.bases, of_runs(vars(run)), run.scale),
        "es_sweep": sweep("es"),
        "grpo_sweep": sweep("grpo"),
        "es": train("es", proxies, run.seeds_judge),
        "grpo": train("grpo", proxies, run.seeds_judge),
        "sft_sweep": imitate([run.tuned_on], [arms.SWEEP_SEED], run.sft_learning_rate, ()),
        "sft": imitate(proxies, run.seeds_null, [rate], loading.chosen_by("sft_sweep", run.sft_learning_rate)),
        "es_random": train("es_random", proxies, run.seeds_null),
        "es_noise": train("es", noisy, run.seeds_noise),
        "grpo_noise": train("grpo", noisy, run.seeds_noise),
        "es_random_noise": train("es_random", noisy, min(run.seeds_null, run.seeds_noise)),
        "es_sizes": train("es", sizes, run.seeds_size),
        "grpo_sizes": train("grpo", sizes, run.seeds_size),
        "tournaments": _tournaments(run, of, proxies),
        "tastes": [tastes_spec(run.scale)],
        "judgments": judgments_specs(run.scale),
    }


def _tournaments(run: SimpleNamespace, of: Records, judges: Sequence[str]) -> After:
    """One tournament on each training judge, of the models that were trained on it."""
    after = ("es", "grpo", "sft", "es_random")
    if not all(arm in of for arm in after):
        return After([], after)
    settings = of_runs(vars(run))
    return After(
        [
            tournament_spec({arm: on_judge(of[arm], judge) for arm in after}, settings | {"judge": judge}, run.scale)
            for judge in judges
        ],
        after,
    )


def on_judge(found: Sequence[Record], judge: str) -> list[Record]:
    """Return the runs that were trained on a judge."""
    return [r for r in found if r["spec"]["judge"] == judge]


def ranked(sweep: Sequence[Record]) -> list[tuple[float, dict[str, float]]]:
    """Return score and setting of the runs of a sweep, best first.

    Nothing here says what is right but the training judge. The score is what it gives greedy replies on split A, the
    mean of the last three points of the curve; a run that diverged has none and comes last.
    """

    def score(record: Record) -> float:
        last = record["curve"]["proxy_greedy"][-3:]
        return float("-inf") if "diverged" in record or None in last else float(np.mean(last))

    scored = [(score(r), _setting(r["spec"])) for r in sweep]
    return sorted(scored, key=lambda pair: -pair[0])


def _liked(record: Record) -> float:
    """What the training judge gives greedy replies of a trained model on split B."""
    test = record["test"]
    return test["greedy"]["score"][test["judges"].index(record["spec"]["judge"])]


def _setting(spec: Mapping[str, Any]) -> dict[str, float]:
    return {name: spec[name] for name in arms.swept(spec["arm"])}


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


def at_kl(of: Records, run: Record, quantity: str, decoding: str, nats: float) -> float | None:
    """Return a quantity, or "gained", where the KL from the base first comes to so many nats a completion."""
    values = gained(of, run, decoding) if quantity == "gained" else curve(run, quantity, decoding)
    return overoptimisation.read_at(curve(run, "kl", decoding), values, nats)


def cells(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Return training judge -> its runs, in the order of the records."""
    return {judge: on_judge(found, judge) for judge in dict.fromkeys(r["spec"]["judge"] for r in found)}


def there(
    of: Records, arm: str, quantity: str, decoding: str, place: float | None, reads: Callable[..., float | None] = at
) -> list[np.ndarray] | None:
    """Return a quantity of the runs of each training judge that get to a place; None unless three of four do on each.

    reads: `at`, where the place is a gain, or `at_kl`.
    """
    read = []
    for runs in cells(of[arm]).values():
        values = [x for run in runs if (x := reads(of, run, quantity, decoding, place)) is not None]
        if not values or len(values) < 0.75 * len(runs):
            return None
        read.append(np.array(values))
    return read or None


def mean(
    of: Records, arm: str, quantity: str, decoding: str, place: float | None, reads: Callable[..., float | None] = at
) -> Interval | None:
    """Return the mean of a quantity over the training judges, over seeds; None where `there` has none."""
    read = there(of, arm, quantity, decoding, place, reads)
    if read is None:
        return None
    if (fewest := min(map(len, read))) < 2:
        return Interval(float(np.mean([x.mean() for x in read])), float("nan"), float("nan"), fewest)
    return stats.stratified_bootstrap(read, n_resamples=2_000)


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


def on_noisy(of: Records, arm: str, judge: str, decoding: str) -> np.ndarray:
    """Return the true reward of the runs on a judge of turned comparisons that gain `GAIN` spreads, there."""
    runs = on_judge(of[f"{arm}_noise"], judge)
    return np.array([x for run in runs if (x := at(of, run, TRUE, decoding, GAIN)) is not None], float)


def turned(of: Records, decoding: str, arms: Sequence[str] = ARMS) -> Interval | None:
    """Return by how much true reward changes from the judge without turned comparisons to that with the most.

    arms: of one arm; of two the first's change - the second's, as claim C35 compares them. None with too few runs.
    """
    last, first = list(scorers.NOISY)[-1], next(iter(scorers.NOISY))
    sides = [[on_noisy(of, arm, last, decoding), -on_noisy(of, arm, first, decoding)] for arm in arms]
    if min(len(values) for side in sides for values in side) < 2:
        return None
    found = stats.stratified_bootstrap(*sides)  # means over the two judges
    return Interval(2 * found.value, 2 * found.low, 2 * found.high, found.n, found.level)


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


def explained(of: Records, arm: str, quantity: str, law: str) -> list[float]:
    """Return the share of the gains of odd seeds that a law explains, fitted to even ones, of each training judge."""
    halves = [law_points(of, runs, quantity) for runs in cells(of[arm]).values()]
    return [overoptimisation.held_out(law, *each) for each in halves if all(each)]


# ---- the paper's numbers

_Numbers = dict[str, tuple[Any, str]]
_DECODINGS = {"greedy": "Greedy", "t1": "Sampled"}


def numbers(of: Records) -> _Numbers:
    """Return macro -> value and format, of the notebook's own models."""
    found: _Numbers = {"SafetySeeds": (min(map(len, cells(of["es"]).values())), "d"), "SafetyGain": (GAIN, "g")}
    found["SafetyProxies"] = (len(cells(of["es"])), "d")
    found["SafetyTurnedMost"] = (round(100 * list(scorers.NOISY.values())[-1].annotators.flips), "d")
    for decoding, name in _DECODINGS.items():
        found[f"SafetyTrue{name}Difference"] = (_stated(difference(of, TRUE, decoding, GAIN), 1, 2), "")
        for arm in ARMS:
            found[f"SafetyTrue{name}{arm.title()}"] = (_stated(mean(of, arm, TRUE, decoding, GAIN), 1, 2), "")
        for judge in JUDGES[1:]:
            words = f"Safety{judge.title().replace('2', 'Two')}{name}"
            found[words] = (_stated(difference(of, judge, decoding, GAIN), 100, 1), "")
            found[f"{words}Less"] = (_stated(difference(of, judge, decoding, GAIN, TRAINING), 100, 1), "")
        found[f"SafetyTurned{name}Difference"] = (_stated(turned(of, decoding), 1, 2), "")
        for arm in ARMS:
            found[f"SafetyTurned{name}{arm.title()}"] = (_stated(turned(of, decoding, [arm]), 1, 2), "")
    for quantity in ("template", "alternative"):
        found[f"Safety{quantity.title()}"] = (_stated(difference(of, quantity, "greedy", GAIN), 100, 1), "")
    for arm in ARMS:
        for quantity, name in ((TRUE, "True"), ("proxy", "Proxy")):
            for law, of_law in (("rl", "Law"), ("linear", "Line")):
                values = explained(of, arm, quantity, law)
                found[f"Safety{of_law}{name}{arm.title()}"] = (f"{np.mean(values):.2f}" if values else "none", "")
    return found


def _stated(found: Interval | None, factor: float, digits: int) -> str:
    return "none" if found is None else found.format(percent=factor == 100, digits=digits)
