"""What notebook 05 shows: its answers in words, and the rows of its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib import arms
from evoalign_lib.analysis import power, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study import nb05_stability as study
from evoalign_study import style
from evoalign_study.loading import DECODINGS, Records, own_settings
from evoalign_study.records import Record, accuracy_matrix

if TYPE_CHECKING:
    from pandas import DataFrame

_QIU, _ALIGNMENT = "Qiu et al.", "Evolutionary Alignment"

PUBLISHED_SPREAD = (
    (_QIU, "GRPO", "beta 0, without hacked runs", "0.867", "0.054"),
    (_QIU, "GRPO", "beta 0.01, without hacked runs", "0.871", "0.060"),
    (_QIU, "GRPO", "beta 0.0167", "0.911", "0.038"),
    (_QIU, "GRPO", "beta 0.0464", "0.881", "0.062"),
    (_QIU, "ES", "sigma 0.001, alpha 0.0005", "0.889", "0.004"),
    (_QIU, "ES", "sigma 0.0015, alpha 0.00075", "0.919", "0.008"),
    (_ALIGNMENT, "GRPO", "beta 0", "0.9989", "0.0005"),
    (_ALIGNMENT, "GRPO", "beta 0.0464", "0.9988", "0.0005"),
    (_ALIGNMENT, "GRPO", "beta 0.1", "0.9834", "0.0268"),
    (_ALIGNMENT, "ES", "sigma 0.001, alpha 0.0005", "0.9700", "0.0112"),
    (_ALIGNMENT, "ES", "sigma 0.001, alpha 0.0015", "0.9903", "0.0105"),
    (_ALIGNMENT, "ES", "sigma 0.005, alpha 0.001", "0.9972", "0.0008"),
    (_ALIGNMENT, "ES", "sigma 0.01, alpha 0.0005", "0.9826", "0.0098"),
    (_ALIGNMENT, "ES", "sigma 0.01, alpha 0.0015", "0.9944", "0.0000"),
)
"""Study, arm, setting, mean and standard deviation over four seeds (fewer without hacked runs) of the scaled reward.

Conciseness with Qwen2.5-7B-Instruct. Qiu et al.: arXiv 2509.24372 v2, Table 2. Evolutionary Alignment: the evaluation
reports of the repository.
"""

WORDS = {name: style.DECODINGS[name].label for name in DECODINGS}
"""Decoding -> its name in tables and titles."""

LABELS = {arm: style.ARMS[arm].label for arm in study.ARMS}
"""Arm -> its name in tables and legends."""

_FIELDS = ("arm", "base", "seed", "sigma", "alpha", "learning_rate", "beta")
_FIELDS += ("population_size", "unique_prompts", "filler_steps")


# ---- the answers, in words


def answers(
    run: SimpleNamespace, of: Records, stated: Mapping[str, Interval | Mapping[str, Interval] | None]
) -> dict[str, str]:
    """Return question -> the answer of the records, with its interval and the number of seeds; stated: of `stated`."""
    std = {arm: f"{100 * study.scores(run, of, arm)[study.AT_END].std(ddof=1):.2f}" for arm in study.ARMS}
    fall = {arm: _points(study.drawdowns(of, arm, "greedy")) for arm in study.ARMS}
    gain = {arm: _points(accuracy_matrix(of[arm]) - accuracy_matrix(of["base"])) for arm in study.ARMS}
    cells = {arm: study.map_cells(of, arm) for arm in study.ARMS}
    near = [f"{study.near_the_best(cells[arm])} of {len(cells[arm])} settings of {LABELS[arm]}" for arm in study.ARMS]
    bad = [f"{cells[arm]['failed'].sum()} of {cells[arm]['runs'].sum()} runs of {LABELS[arm]}" for arm in study.ARMS]
    sizes = {N: accuracy_matrix(of[group]) for N, group in study.of_sizes(run).items()}
    own, n = run.es_population_size, len(of["es"])
    apart = [
        f"N = {own} minus N = {N} is {stats.crossed_bootstrap(sizes[own], right).format()} points"
        for N, right in sizes.items()
        if N != own
    ]
    level, ratios = f"{100 * run.matched_mean:g} %", [_stated_ratio(stated[f"Spread{at}"]) for at in ("End", "Matched")]
    found = {
        "Do results differ less from seed to seed?": (
            f"Over seeds, greedy test accuracy has a standard deviation of {std['es']} points for ES and {std['grpo']} "
            f"for GRPO: a ratio of {ratios[0]} at the end, and of {ratios[1]} on validation problems, where the mean "
            f"of the arm reaches {level} (n = {n} seeds per arm)."
        ),
        "Do curves rise more steadily?": (
            f"The largest fall of greedy accuracy below its earlier best averages {fall['es']} points over the runs of "
            f"ES and {fall['grpo']} over those of GRPO: GRPO - ES {stated['Drawdown'].format()} points (n = {n}). Over "
            f"the base, ES gains {gain['es']} points and GRPO {gain['grpo']}."
        ),
        "How exactly must the settings be right?": (
            f"{' and '.join(near)} come within two points of the arm's best; {' and '.join(bad)} failed "
            f"({len(study.map_seeds(run))} seeds per setting)."
        ),
        f"Does a population of {own} suffice?": (
            f"In greedy test accuracy, at equally many evaluated members in all, {' and '.join(apart)} (n = {n} and "
            f"{run.seeds_compare})."
        ),
    }
    if sides := stated["Regret"]:
        found["Does one setting serve other bases?"] = (
            f"Keeping the setting tuned on {run.bases[0]}, instead of the best of {run.transfer_size} there, costs "
            f"{_stated_sides(sides, 'GRPO - ES')}. A negative cost means that the kept setting was the better one."
        )
    if sides := stated["PromptSlope"]:
        found["Does ES need fewer problems?"] = (
            f"Ten times as many unique problems are worth {_stated_sides(sides, 'GRPO - ES')}."
        )
    if sides := stated["HorizonChange"]:
        first, *_, last = run.horizons
        found["Does ES tolerate a long way to the answer?"] = (
            f"From {first} to {last} steps of thinking the gain changes by {_stated_sides(sides, 'ES - GRPO')}."
        )
    exact = sum(r["ledger"]["replay_error"] == 0 for r in of["es"])
    found["Can a run be had again?"] = (
        f"{exact} of {n} tuned runs of ES replay from their ledgers to their very weights."
    )
    return found


def _stated_ratio(interval: Interval | None) -> str:
    return "without interval" if interval is None else _ratio(interval)


def _stated_sides(sides: Mapping[str, Interval], difference: str) -> str:
    """Return the intervals of `compared` in words, in points."""
    of_arms = " and ".join(f"{LABELS[arm]} {sides[arm].format()}" for arm in study.ARMS)
    return f"{of_arms} points: {difference} {sides['difference'].format()} (n = {sides['difference'].n})"


# ---- runs as rows, and what tables have in common


def frame(of: Records, groups: Iterable[str], **labels: Any) -> DataFrame:
    """Return one row per run: the fields of its spec, how it ended and, in %, its accuracy on the test set."""
    from pandas import DataFrame

    rows = []
    for r in (r for group in groups for r in of[group]):
        tested = {decoding: 100 * r["test"][decoding] for decoding in DECODINGS} if "test" in r else {}
        measured = {"outcome": study.outcome(r), "score": study.score(r), "reward": r["curve"]["reward"][-1]}
        rows.append({name: r["spec"].get(name) for name in _FIELDS} | measured | tested | labels)
    return DataFrame(rows)


def _tested(found: Sequence[Record], start: Record | None = None) -> dict[str, Any]:
    """Return cells of a table: test accuracy of runs, or their gain over one model, failures and seeds."""
    row: dict[str, Any] = {}
    for decoding, words in WORDS.items():
        baseline = None if start is None else accuracy_matrix([start], decoding)[0]
        interval = stats.crossed_bootstrap(accuracy_matrix(found, decoding), baseline)
        row[f"{words}, {'%' if start is None else 'gain'} [95 %]"] = interval.format()
    return row | {"failed": study.failed(found), "seeds": len(found)}


def _setting(setting: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in setting.items())


def _ratio(interval: Interval) -> str:
    """Return the interval of ln of a ratio as that of the ratio."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*np.exp([interval.value, interval.low, interval.high]))


# ---- tables: a row each, cells in words


def tuned_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the tuned setting of each arm, its score in the sweep, and how many settings were tried."""
    from pandas import DataFrame

    rows = []
    for arm in study.ARMS:
        (best, setting), *others = arms.ranked(of[f"{arm} sweep"])
        row = {"arm": LABELS[arm], "tuned setting": _setting(setting), "score, %": f"{100 * best:.1f}"}
        rows.append(row | {"settings tried": 1 + len(others)})
    return DataFrame(rows)


def plans(committed: Sequence[Record]) -> DataFrame:
    """Return what so many runs could show of each claim, with spreads from runs that were there before its own.

    committed: records of all notebooks, among them the full runs of notebook 02 on base A0, at scale tiny.
    """
    from pandas import concat

    pilots: dict[str, list[Record]] = {}
    for arm in study.ARMS:
        like = {"kind": "train", "arm": arm, "base": "A0", "steps": study.TINY[f"{arm}_steps"], "test_problems": 2000}
        found = [r for r in committed if r["notebook"] == "02_grpo_countdown" and like.items() <= r["spec"].items()]
        pilots[arm] = [r for r in found if "scale_rewards" not in r["spec"]]
    at_end = {arm: accuracy_matrix(pilots[arm]).mean(axis=1).std(ddof=1) for arm in study.ARMS}
    fall = max(study.drawdowns(pilots, arm, "greedy").std(ddof=1) for arm in study.ARMS)
    many, few, worst = study.TINY["seeds_match"], study.TINY["seeds_compare"], max(at_end.values())
    slope = np.linalg.norm(study.slope_weights(study.TINY["prompt_counts"]))
    primary = [
        power.Plan("C8: std of ES / std of GRPO", "std ratio", many, 0.5),
        power.Plan("C33: drawdown, GRPO - ES", "difference", many, 0.02, fall),
        power.Plan("C10: accuracy, N = 30 - another N", "difference", few, 0.02, at_end["es"]),
        power.Plan("C9: regret, GRPO - ES", "difference", few, 0.02, worst),
    ]
    others = [
        power.Plan("C37: slope over a decade, GRPO - ES", "difference", few, 0.02, worst * slope),
        power.Plan("C11: change from 4 to 64, ES - GRPO", "difference", few, 0.02, worst * np.sqrt(2)),
    ]
    asked = {0.05 / len(primary): primary, 0.05: others}
    reports = [power.report(of_level, alpha=level).assign(level=level) for level, of_level in asked.items()]
    return concat(reports, ignore_index=True)


def runs_table(of: Records) -> DataFrame:
    """Return a row per kind of run: bases and seeds; and for each arm, settings, runs, and completions of a run.

    Groups whose names differ in a number alone, such as "es prompts=2" and "es prompts=50", are of one kind. Where the
    runs of a kind differ in a setting, its least and its largest value stand.
    """
    from pandas import DataFrame

    kinds: dict[str, dict[str, list[str]]] = {}  # kind -> arm -> groups
    for group in (group for group in of if group.split()[0] in study.ARMS and of[group]):
        arm, _, what = group.partition(" ")
        kinds.setdefault(what.partition("=")[0] or "tuned", {}).setdefault(arm, []).append(group)
    rows = []
    for kind, groups_of in kinds.items():
        found = {arm: [r for group in groups_of.get(arm, ()) for r in of[group]] for arm in study.ARMS}
        levels = ", ".join(group.partition("=")[2] for group in next(iter(groups_of.values())))
        specs = [r["spec"] for arm in study.ARMS for r in found[arm]]
        row: dict[str, Any] = {"runs": f"{kind}={levels}" if levels else kind}
        row |= {"bases": ", ".join(sorted({spec["base"] for spec in specs}))}
        row |= {"seeds": _seeds([spec["seed"] for spec in specs])}
        for arm, own in found.items():
            label = LABELS[arm]
            row |= {label: _given(arm, own), f"{label} runs": len(own)}
            row |= {f"{label} completions": _span([r["budget"]["completions"] for r in own])}
        rows.append(row)
    return DataFrame(rows)


def _given(arm: str, found: Sequence[Record]) -> str:
    """Return the settings of runs in words."""
    names = [*arms.swept(arm), *(("population_size",) if arm == "es" else ()), "steps"]
    short = {"population_size": "N", "learning_rate": "learning rate"}
    return ", ".join(f"{short.get(name, name)} {_span([r['spec'][name] for r in found])}" for name in names if found)


def _span(values: Sequence[float]) -> str:
    """Return numbers as the least and the largest of them, or the one that all are."""
    ends = [f"{value:,}" if isinstance(value, int) else f"{value:.3g}" for value in sorted({*values})]
    return " to ".join(dict.fromkeys(ends[:1] + ends[-1:]))


def _seeds(values: Sequence[int]) -> str:
    each = sorted({*values})
    return _span(each) if len(each) > 2 and each == list(range(len(each))) else ", ".join(map(str, each))


def budgets(of: Records) -> DataFrame:
    """Return what a run of each group cost, the mean over its runs, on every axis."""
    from pandas import DataFrame

    rows = []
    for group in [group for arm in study.ARMS for group in of if group.split()[0] == arm and of[group]]:
        spent = DataFrame([r["budget"] for r in of[group]]).mean()
        arm, _, varied = group.partition(" ")
        row = {"arm": LABELS[arm], "runs": varied or "tuned", "n": len(of[group])}
        row |= {"completions": f"{spent['completions']:,.0f}", "generated tokens": f"{spent['generated_tokens']:,.0f}"}
        row |= {"FLOPs, 1e12": f"{spent['forward_flops'] / 1e12:.1f}", "core-seconds": f"{spent['core_seconds']:.0f}"}
        rows.append(row)
    return DataFrame(rows)


def spread_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the spread of both arms over seeds wherever `scores` measures it, and their ratio."""
    from pandas import DataFrame

    by_arm = {arm: study.scores(run, of, arm) for arm in study.ARMS}
    places = [*(("test", d) for d in DECODINGS), ("validation", "greedy")]
    rows = []
    for kind, at in [*places, *(("at mean", mean) for mean in sorted({*run.other_means, run.matched_mean}))]:
        words = (
            f"validation, greedy, at mean {100 * at:g} %" if kind == "at mean" else f"{kind}, {WORDS[at]}, at the end"
        )
        row: dict[str, Any] = {"accuracy": words}
        for arm in study.ARMS:
            values = 100 * by_arm[arm].get((kind, at), np.array([np.nan, np.nan]))
            row |= {
                f"{LABELS[arm]}, mean %": f"{values.mean():.1f}",
                f"{LABELS[arm]}, std": f"{values.std(ddof=1):.2f}",
            }
        ratio, p = _ratio_in_words(by_arm, (kind, at))
        row |= {"std of ES / std of GRPO [95 %]": ratio, "Brown-Forsythe p": p}
        rows.append(row | {"seeds": min(len(of[arm]) for arm in study.ARMS)})
    return DataFrame(rows)


def _ratio_in_words(
    by_arm: Mapping[str, Mapping[study.Measure, np.ndarray]], measure: study.Measure
) -> tuple[str, str]:
    """Return the ratio of the standard deviations and the p-value beside it; or why there is none."""
    if any(measure not in of_arm for of_arm in by_arm.values()):
        return "an arm never gets there", "none"
    if (interval := study.log_ratio(by_arm, measure)) is None:
        return "no interval: too few runs, or no spread", "none"
    return _ratio(interval), f"{stats.brown_forsythe(*(by_arm[arm][measure] for arm in study.ARMS)):.2g}"


def chance_table(of: Records) -> DataFrame:
    """Return the spread over seeds beside that of runs that solve problems independently of one another."""
    from pandas import DataFrame

    rows = []
    for decoding, words in WORDS.items():
        for arm in study.ARMS:
            solved = accuracy_matrix(of[arm], decoding)
            seen, chance = solved.mean(axis=1).std(ddof=1), np.sqrt(solved.var(axis=0, ddof=1).mean() / solved.shape[1])
            row = {"decoding": words, "arm": LABELS[arm], "spread, points": f"{100 * seen:.2f}"}
            row |= {"by chance, points": f"{100 * chance:.2f}", "ratio": f"{seen / chance:.1f}" if chance else "none"}
            rows.append(row | {"seeds": len(solved)})
    return DataFrame(rows)


def without_lowest(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the ratio of spreads at the end without the lowest run of an arm or two; none below five seeds."""
    from pandas import DataFrame

    ends = {arm: np.sort(study.scores(run, of, arm)[study.AT_END]) for arm in study.ARMS}
    rows = []
    for arm, left_out in [(arm, k) for arm in study.ARMS for k in (1, 2) if min(map(len, ends.values())) > 4]:
        try:
            words = _ratio(stats.log_std_ratio(*(ends | {arm: ends[arm][left_out:]}).values()))
        except ValueError:
            words = "no interval: runs do not differ"
        rows.append({"left out": f"lowest {left_out} of {LABELS[arm]}", "std of ES / std of GRPO [95 %]": words})
    return DataFrame(rows)


def drawdown_table(of: Records, gaps: Mapping[str, Interval]) -> DataFrame:
    """Return the largest drawdown of both arms, how far curves end below their maximum, and the difference.

    gaps: of `drawdown_gaps`.
    """
    from pandas import DataFrame

    rows = []
    for decoding, words in WORDS.items():
        row, sides = {"validation": words}, {arm: study.drawdowns(of, arm, decoding) for arm in study.ARMS}
        for arm in study.ARMS:
            paths = np.array([r["curve"][f"validation_{decoding}"] for r in of[arm]])
            row[f"{LABELS[arm]}, points [95 %]"] = stats.bootstrap_mean(sides[arm]).format()
            row[f"{LABELS[arm]}, end"] = f"{100 * (paths.max(axis=1) - paths[:, -1]).mean():.1f}"
        row["GRPO - ES [95 %]"] = gaps[decoding].format()
        row["p"] = f"{stats.mann_whitney(sides['grpo'], sides['es']):.2g}"
        rows.append(row | {"seeds": len(sides["es"])})
    return DataFrame(rows)


def drawdown_controls(run: SimpleNamespace, of: Records, gaps: Mapping[str, Interval]) -> DataFrame:
    """Return drawdowns of as many high points of either arm, and what noise makes of curves that never fall.

    gaps: of `drawdown_gaps`.
    """
    from pandas import DataFrame

    high, rows = {arm: len(found) for arm, found in study.high_points(of).items()}, []
    for name, of_arm in (("sets", study.thinned), ("last", study.last_high)):
        if name in gaps:
            what = f"greedy, {'random sets of' if name == 'sets' else 'the last'} {min(high.values())} high points"
            row = {"curve": what} | {LABELS[arm]: f"{100 * of_arm(of, arm).mean():.1f}" for arm in study.ARMS}
            rows.append(row | {"GRPO - ES [95 %]": gaps[name].format()})
    seen = {LABELS[arm]: f"{100 * study.drawdowns(of, arm, 't1').mean():.1f}" for arm in study.ARMS}
    still = {arm: 100 * study.never_falling(run, of, arm) for arm in study.ARMS}
    noise = {LABELS[arm]: f"{draws.mean():.1f} (std of one curve {draws.std():.1f})" for arm, draws in still.items()}
    rows.append({"curve": "temperature 1, as measured"} | seen | {"GRPO - ES [95 %]": gaps["t1"].format()})
    rows.append({"curve": "temperature 1, only rising, plus noise"} | noise | {"GRPO - ES [95 %]": ""})
    return DataFrame(rows)


def sensitivity_table(of: Records) -> DataFrame:
    """Return how much the settings of each arm's map matter, and how much its seeds do."""
    from pandas import DataFrame

    rows = []
    for arm in study.ARMS:
        cells = study.map_cells(of, arm)
        row = {"arm": LABELS[arm], "settings": len(cells)}
        row |= {"best mean, %": f"{cells['mean'].max():.1f}", "worst mean, %": f"{cells['mean'].min():.1f}"}
        row |= {"within 2 points of the best": study.near_the_best(cells)}
        row |= {"std of settings": f"{cells['mean'].std(ddof=1):.2f}"}
        row |= {"std of seeds": f"{np.sqrt((cells['std'] ** 2).mean()):.2f}"}
        rows.append(row | {"failed runs": int(cells["failed"].sum()), "runs": int(cells["runs"].sum())})
    return DataFrame(rows)


def failures(of: Records) -> DataFrame:
    """Return the tuned groups and all that have a run that failed or fell back: how many, and which failed."""
    from pandas import DataFrame

    rows = []
    for group in [group for group in of if group.split()[0] in study.ARMS and of[group]]:
        ended = frame(of, [group])
        bad, back = ended[ended["outcome"] == "failed"], int((ended["outcome"] == "fell back").sum())
        names, where = list(arms.swept(group.split()[0])), []
        for values, part in bad.groupby(names):
            seeds = ", ".join(map(str, part["seed"]))
            where.append(f"{_setting(dict(zip(names, values, strict=True)))}: seeds {seeds}")
        if group in study.ARMS or len(bad) or back:
            share = f"{stats.wilson(len(bad), len(ended)).format()} %"
            row = {"group": group, "runs": len(ended), "failed": len(bad), "share [95 %]": share}
            rows.append(row | {"fell back": back, "failed runs": "; ".join(where) or "none"})
    return DataFrame(rows)


def failed_on_maps(of: Records) -> float:
    """Return the p-value of Fisher's test of as many failures on the map of either arm."""
    counts = [n for arm in study.ARMS for n in (study.failed(of[f"{arm} map"]), len(of[f"{arm} map"]))]
    return stats.fisher(*counts)


def population_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return steps, alpha, cost, distance moved and test accuracy of ES with each population."""
    from pandas import DataFrame

    rows = []
    for N, group in study.of_sizes(run).items():
        found, spec = of[group], of[group][0]["spec"]
        row = {"N": N, "steps": spec["steps"], "alpha": f"{spec['alpha']:.3g}"}
        row |= {"completions": f"{found[0]['budget']['completions']:,d}"}
        moved = np.array([r["update_norm"] for r in found], float).mean()
        rows.append(row | {"distance": f"{moved:.1f}"} | _tested(found))
    return DataFrame(rows)


def population_trend(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the p-values of Jonckheere's test, of a rise and of a fall of test accuracy with N."""
    from pandas import DataFrame

    rows = []
    for decoding, words in WORDS.items():
        cells = [accuracy_matrix(of[group], decoding).mean(axis=1) for group in study.of_sizes(run).values()]
        row = {"decoding": words, "p of a rise with N": f"{stats.jonckheere(cells):.2g}"}
        rows.append(row | {"p of a fall": f"{stats.jonckheere(cells[::-1]):.2g}"})
    return DataFrame(rows)


def transfer_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return for each arm and other base the best contender, its accuracy and the tuned one's, and the regret."""
    from pandas import DataFrame

    rows = []
    for (arm, base), won in study.winners(run, of).items():
        found = {which: study.full_runs(run, of, arm, base, which) for which in ("shared", "best")}
        row = {"base": base, "arm": LABELS[arm], "best there": _setting(won)}
        row |= {f"{which}, %": f"{100 * accuracy_matrix(runs).mean():.1f}" for which, runs in found.items()}
        lost = "0, the same"
        if won != study.tuned(run, of, arm):
            lost = stats.crossed_bootstrap(study.regret(run, of, arm, [base])).format()
        rows.append(row | {"regret, points [95 %]": lost, "seeds": len(found["shared"])})
    return DataFrame(rows)


def ties_in_words(run: SimpleNamespace, of: Records) -> str:
    """Return where the shared setting scored as much as the winner, as `ties`."""
    return "; ".join(f"{LABELS[arm]} on {base}" for arm, base in study.ties(run, of)) or "nowhere"


def sides_table(of_quantity: Mapping[str, Mapping[str, Interval]], one: str, other: str) -> DataFrame:
    """Return a row per quantity, in points: each arm's interval and that of the difference one - other (`compared`)."""
    from pandas import DataFrame

    rows = []
    for quantity, sides in of_quantity.items():
        row = {"quantity, points [95 %]": quantity} | {LABELS[arm]: sides[arm].format() for arm in study.ARMS}
        row[f"{LABELS[one]} - {LABELS[other]}"] = sides["difference"].format()
        rows.append(row | {"seeds": sides["difference"].n})
    return DataFrame(rows)


def prompts_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return training reward, share of steps or groups without a signal, and test accuracy by number of problems."""
    from pandas import DataFrame

    rows = []
    for arm, count in product(study.ARMS, run.prompt_counts):
        found = of[f"{arm} prompts={count}"]
        spec = found[0]["spec"]
        idle = [r["counts"]["tied"] / spec["steps"] if arm == "es" else r["counts"]["zero_std_groups"] for r in found]
        row = {"arm": LABELS[arm], "unique problems": count}
        row["each seen"] = f"{spec['steps'] * spec['prompts_per_step'] / count:,.0f} times"
        row |= {"training reward": f"{np.mean([r['curve']['reward'][-1] for r in found]):.2f}"}
        rows.append(row | {"no signal, %": f"{100 * np.mean(idle):.1f}"} | _tested(found))
    return DataFrame(rows)


def against_base(of: Records, found: Sequence[Record]) -> str:
    """Say how many runs are better than the base on the same problems, level and worse: exact test, 5 % each."""
    from scipy.stats import binomtest

    base, better, worse = accuracy_matrix(of["base"])[0], 0, 0
    for right in accuracy_matrix(found):
        won, lost = int((right > base).sum()), int((right < base).sum())
        decided = won + lost > 0 and binomtest(won, won + lost).pvalue < 0.05
        better, worse = better + (decided and won > lost), worse + (decided and won < lost)
    return f"{better} better, {len(found) - better - worse} level, {worse} worse"


def prompts_cells(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the arms against one another and against the base at each number of problems."""
    from pandas import DataFrame

    rows = []
    for count in run.prompt_counts:
        cell = {arm: of[f"{arm} prompts={count}"] for arm in study.ARMS}
        apart = stats.crossed_bootstrap(*(accuracy_matrix(cell[arm]) for arm in ("grpo", "es")))
        row = {"unique problems": count, "GRPO - ES, points [95 %]": apart.format()}
        for arm, found in cell.items():
            unmoved = sum(r["update_norm"] == 0 for r in found)
            row |= {
                f"{LABELS[arm]} against the base": against_base(of, found),
                f"{LABELS[arm]}, never moved": unmoved,
            }
        rows.append(row)
    return DataFrame(rows)


def nulls_table(run: SimpleNamespace, of: Records, committed: Sequence[Record]) -> DataFrame:
    """Return what random fitness and random reward did on the first base, at the end and beside few problems half way.

    committed: records of all notebooks, among them notebook 02's nulls with the tuned settings. No rows at other scales
    than tiny, which have none.
    """
    from pandas import DataFrame

    rows = []
    for arm in study.ARMS if run.scale == "tiny" and run.prompt_counts else ():
        like = {"kind": "train", "arm": f"{arm}_random", "base": run.bases[0], "steps": own_settings(run, arm)["steps"]}
        like["test_problems"] = of["base"][0]["spec"]["test_problems"]  # other notebooks have runs on fewer
        if found := [r for r in committed if (like | study.tuned(run, of, arm)).items() <= r["spec"].items()]:
            few = of[f"{arm} prompts={run.prompt_counts[0]}"]
            half = [_gain_at(group, few[0]["spec"]["steps"]) for group in (few, found)]
            change = stats.crossed_bootstrap(accuracy_matrix(found), accuracy_matrix(of["base"])[0])
            row = {"arm": arms.ARMS[f"{arm}_random"].label, "test gain, points [95 %]": change.format()}
            row |= {"against the base": against_base(of, found), "validation gain at half length": _points(half[1])}
            row |= {f"with {run.prompt_counts[0]} problems": _points(half[0])}
            rows.append(row | {"difference [95 %]": stats.stratified_bootstrap(half[:1], half[1:]).format()})
    return DataFrame(rows)


def _points(shares: np.ndarray) -> str:
    return f"{100 * shares.mean():.1f}"


def _gain_at(found: Sequence[Record], step: int) -> np.ndarray:
    """Return the greedy validation gains of runs at the last evaluated step that is no later: (seeds,)."""
    lines = [(np.searchsorted(r["curve"]["step"], step, "right") - 1, r["curve"]["validation_greedy"]) for r in found]
    return np.array([line[at] - line[0] for at, line in lines])


def horizon_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the gain over the base on the test set by steps of thinking before the answer."""
    from pandas import DataFrame

    rows = []
    for arm, length in product(study.ARMS, run.horizons):
        found, start = of[f"{arm} filler={length}"], of[f"base filler={length}"][0]
        spent = DataFrame([r["budget"] for r in found]).sum()
        row = {"arm": LABELS[arm], "thinking": length, "base, greedy %": f"{100 * start['test']['greedy']:.1f}"}
        row["tokens an answer"] = f"{spent['generated_tokens'] / spent['completions']:.1f}"
        rows.append(row | _tested(found, start))
    return DataFrame(rows)


def replay_table(of: Records) -> DataFrame:
    """Return the largest replay error of the tuned ES runs, and the bytes a step of their ledgers."""
    from pandas import DataFrame

    kept = [r["ledger"] | {"steps": r["spec"]["steps"]} for r in of["es"]]
    plain, packed = (np.mean([k[size] / k["steps"] for k in kept]) for size in ("bytes", "gzip_bytes"))
    row = {"runs": len(kept), "largest replay error": f"{max(k['replay_error'] for k in kept):g}"}
    return DataFrame([row | {"bytes a step": f"{plain:.3g}", "bytes a step, gzipped": f"{packed:.3g}"}])
