"""What notebook 06 says and tabulates: ends of training, what they cost, ranks and populations of the search."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib import arms
from evoalign_lib.analysis import curves, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study import nb06_low_rank_and_cost as study
from evoalign_study import paths, style
from evoalign_study.kinds import memory as storage
from evoalign_study.loading import DECODINGS, Records
from evoalign_study.measures.base import label
from evoalign_study.records import Record, accuracy_matrix
from evoalign_study.views import memory_cost, scaling

if TYPE_CHECKING:
    from pandas import DataFrame

AXES = {"completions": 1e3, "forward_flops": 1e12, "core_seconds": 1.0}
HEADS = {
    "completions": "completions, thousands",
    "forward_flops": "forward FLOPs, 1e12",
    "core_seconds": "core-seconds",
}
_AFTER = {
    "completions": "after {} thousand completions",
    "forward_flops": "after {}e12 forward FLOPs",
    "core_seconds": "after {} core-seconds",
}
_RESAMPLES = 2000


def name(of: Records, group: str) -> str:
    """Return what a group of runs is called in tables and legends."""
    spec = of[group][0]["spec"]
    words = style.ARMS[spec["arm"]].label.split(", ")
    own = [word for word in words[1:] if word not in ("low rank", "LoRA")]
    if "rank" in spec:
        own.insert(0, f"rank {spec['rank']}")
    elif "lora_rank" in spec:
        start = [] if words[0] == "ESSA" else ["warm" if "warm_rows" in spec else "cold"]
        own[:0] = [f"adapter of rank {spec['lora_rank']}", *start]
    elif words == ["ES"]:
        own = ["full rank"]
    if "as full rank" in group:
        own.append("full rank's settings")
    return ", ".join([words[0], *own])


def gains(of: Records, group: str, decoding: str) -> Interval:
    """Return test accuracy of a group - that of the base, over seeds and problems."""
    after, before = (accuracy_matrix(of[each], decoding) for each in (group, "base"))
    return stats.crossed_bootstrap(after, before[0], n_resamples=_RESAMPLES)


def ends_table(of: Records, groups: Sequence[str]) -> DataFrame:
    """Return test accuracy of each group and its gain over the base, under two decodings, as text."""
    from pandas import DataFrame

    rows = [{"arm": "base"} | {f"{label_of(d)}, %": _percent(of["base"], d) for d in DECODINGS}]
    for group in groups:
        row: dict[str, Any] = {"arm": name(of, group)}
        for decoding in DECODINGS:
            row[f"{label_of(decoding)}, %"] = _percent(of[group], decoding)
            row[f"gain, {label_of(decoding)} [95 %]"] = gains(of, group, decoding).format()
        rows.append(row | {"seeds": str(len(of[group]))})
    return DataFrame(rows).fillna("")


def label_of(decoding: str) -> str:
    """Return a decoding in words."""
    return style.DECODINGS[decoding].label


def _percent(found: Sequence[Record], decoding: str) -> str:
    return f"{100 * accuracy_matrix(found, decoding).mean():.1f}"


def costs_table(of: Records, groups: Sequence[str]) -> DataFrame:
    """Return what a run of each group spends on training, the warm start included, mean over runs, as text."""
    from pandas import DataFrame

    rows = []
    for group in groups:
        budgets = [record["budget"] for record in of[group]]
        row = {"arm": name(of, group), "parameters moved": f"{_moved(of, group):,d}"}
        for axis, head in HEADS.items():
            row[head] = _figure(np.mean([budget[axis] for budget in budgets]) / AXES[axis])
        tokens = np.mean([budget.get("sft_tokens", 0) for budget in budgets])
        rows.append(row | {"tokens of the warm start": f"{tokens:,.0f}", "runs": len(budgets)})
    return DataFrame(rows)


def _moved(of: Records, group: str) -> int:
    """Return the parameters that a group moves; of an adapter that TRL trains `d` is the size of the merged model."""
    record = of[group][0]
    rank, family = record["spec"].get("lora_rank"), arms.get(record["spec"]["arm"]).family
    if rank is None or family != "gradient":
        return record["d"]
    return next(
        run["d"]
        for run, *_ in of.values()
        if run["spec"].get("lora_rank") == rank and run["spec"].get("arm") in ("essa", "es_lora")
    )


def _figure(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def equal_table(of: Records, groups: Sequence[str]) -> DataFrame:
    """Return greedy validation accuracy of each group after what the cheapest run of all spent, a column per axis.

    As text. Curves are read over the logarithm of the budget, of which a warm start is part.
    """
    from pandas import DataFrame

    found = [record["curve"] for group in groups for record in of[group]]
    equal = {axis: min(curve[axis][-1] for curve in found) for axis in AXES}
    rows = []
    for group in groups:
        row: dict[str, Any] = {"arm": name(of, group)}
        for axis, budget in equal.items():
            lines = [r["curve"] for r in of[group]]
            head = f"{_AFTER[axis].format(_figure(budget / AXES[axis]))}, % [95 %]"
            # a warm start alone costs more, or what was done up to the first measurement
            if any(next(spent for spent in line[axis] if spent) > budget for line in lines):
                row[head] = "no score yet"
                continue
            reached = [curves.score_at(line[axis], line["validation_greedy"], budget) for line in lines]
            row[head] = stats.bootstrap_mean(np.array(reached), n_resamples=_RESAMPLES).format()
        rows.append(row | {"seeds": len(of[group])})
    return DataFrame(rows)


def differences_table(of: Records, pairs: Sequence[tuple[str, str]]) -> DataFrame:
    """Return test accuracy of groups - that of others, under two decodings, over seeds and problems, as text."""
    from pandas import DataFrame

    rows = []
    for one, other in pairs:
        row = {"arms": f"{name(of, one)} - {name(of, other)}"}
        for decoding in DECODINGS:
            matrices = (accuracy_matrix(of[each], decoding) for each in (one, other))
            found = stats.crossed_bootstrap(*matrices, n_resamples=_RESAMPLES)
            row[f"{label_of(decoding)}, points [95 %]"] = found.format()
        rows.append(row | {"seeds": f"{len(of[one])}, {len(of[other])}"})
    return DataFrame(rows)


def storage_table(records: Sequence[Record]) -> DataFrame:
    """Return what a run of each arm leaves on disk and sends around, in kB of 1000 bytes, as text.

    The last checkpoint's model and all that a killed run goes on from; and the ledger with gzip, from which with the
    base, and an adapter that it began from, the run can be replayed.
    """
    from pandas import DataFrame

    rows = []
    for record in records:
        spec, stored = record["spec"], record["bytes"]
        whole = sum(size for what, size in stored.items() if what != "ledger")
        row = {"arm": style.ARMS[spec["arm"]].label, "parameters": f"{record['d']:,d}"}
        row |= {"model, kB": _kilo(stored["model"]), "checkpoint, kB": _kilo(whole)}
        if "packed" in record:
            row["run as ledger, kB"] = _kilo(record["packed"] + record["start"])
            row["of which the start, kB"] = _kilo(record["start"])
        if (sent := storage.sent(spec, record["d"])) is not None:
            row["sent a step, kB"] = _kilo(sent)
        rows.append(row)
    return DataFrame(rows).fillna("none")


def _kilo(size: float) -> str:
    return f"{size / 1000:,.0f}" if size >= 10_000 else f"{size / 1000:.2g}"


def settings_table(of: Records, groups: Sequence[str]) -> DataFrame:
    """Return the tuned settings of each group, and how many its sweep tried."""
    from pandas import DataFrame

    rows = []
    for group in groups:
        spec = of[group][0]["spec"]
        tuned = {key: spec[key] for key in ("sigma", "alpha", "leading_share", "learning_rate", "beta") if key in spec}
        rows.append({"arm": name(of, group), "setting": ", ".join(f"{key} {value:g}" for key, value in tuned.items())})
    return DataFrame(rows)


def speed_table() -> DataFrame:
    """Return how many times the completions a second of full rank each rank gives, of the committed benchmarks."""
    from pandas import DataFrame

    rows = []
    for device, sections in json.loads((paths.RESULTS / "bench.json").read_text()).items():
        for cell, found in sections["cpu"]["low_rank"]["cells"].items():
            size, members, *_, prompts, _ = cell.replace(",", "").split()
            row = {"device": device, "parameters": size, "members": members, "prompts a member": prompts}
            row |= {k.removeprefix("ratio, "): f"{x:.2f}" for k, x in found.items() if k.startswith("ratio, ")}
            rows.append(row | {"equal completions": f"{100 * found['same_tokens']:.0f} %"})
    return DataFrame(rows)


def warm_table(of: Records, run: SimpleNamespace) -> DataFrame:
    """Return what the warm start gives each rank of the adapter and what the search adds, by reward and by chance."""
    from pandas import DataFrame

    rows = [{"adapter": "none (the base)", "start, %": f"{100 * of['base'][0]['validation']['greedy']:.1f}"}]
    for rank in run.adapter_ranks:
        found, null = of[f"adapter {rank}"], of[f"random adapter {rank}"]
        start = np.array([record["curve"]["validation_greedy"][0] for record in found])
        row = {"adapter": f"rank {rank}", "start, %": f"{100 * start.mean():.1f}"}
        rows.append(row | _added(found, null) | {"seeds": f"{len(found)}, {len(null)}"})
    return DataFrame(rows).fillna("")


def shares_table(of: Records, run: SimpleNamespace) -> DataFrame:
    """Return what more right answers in ESSA's warm start give, before the search and after it, as text."""
    from pandas import DataFrame

    most, rows = max(run.warm_shares), []
    for count in run.warm_shares:
        found, null = of[f"warm start {count}"], of[f"random warm start {count}"]
        spent = np.array([[r["curve"]["forward_flops"][0], r["curve"]["forward_flops"][-1]] for r in found])
        row: dict[str, Any] = {"right answers": f"{count:,d}", "of the most": f"{100 * count / most:.0f} %"}
        row["of a run's FLOPs"] = f"{100 * (spent[:, 0] / spent[:, 1]).mean():.1f} %"
        row["start, %"] = f"{100 * np.mean([r['curve']['validation_greedy'][0] for r in found]):.1f}"
        row |= _added(found, null)
        for decoding in DECODINGS:
            matrix = accuracy_matrix(found, decoding)
            row[f"test, {label_of(decoding)}, %"] = stats.crossed_bootstrap(matrix, n_resamples=_RESAMPLES).format()
        rows.append(row | {"seeds": f"{len(found)}, {len(null)}"})
    return DataFrame(rows)


def _added(found: Sequence[Record], null: Sequence[Record]) -> dict[str, str]:
    """Return the greedy validation accuracy that a search added to its start, by reward and by chance."""
    row = {}
    for head, runs in (("search adds [95 %]", found), ("random fitness adds [95 %]", null)):
        added = _final(runs) - [record["curve"]["validation_greedy"][0] for record in runs]
        row[head] = stats.bootstrap_mean(added, n_resamples=_RESAMPLES).format()
    return row


def adapters_table(of: Records, run: SimpleNamespace) -> DataFrame:
    """Return accuracy after ESSA by rank of the adapter, under three decodings, beside where the search began."""
    from pandas import DataFrame

    rows = []
    for rank in run.adapter_ranks:
        found = of[f"adapter {rank}"]
        row: dict[str, Any] = {
            "rank": rank,
            "dimension": study.dimension(found[0]),
            "parameters": f"{found[0]['d']:,d}",
        }
        row["validation at the start, %"] = f"{100 * np.mean([r['curve']['validation_greedy'][0] for r in found]):.1f}"
        for decoding in ("greedy", *(label(t) for t in run.temperatures), "t1"):
            matrix = accuracy_matrix(found, decoding)
            interval = stats.crossed_bootstrap(matrix, n_resamples=_RESAMPLES)
            row[f"test, {decoding}, %"] = interval.format()
        rows.append(row | {"seeds": len(found)})
    return DataFrame(rows)


def precisions_table(of: Records, run: SimpleNamespace) -> DataFrame:
    """Return accuracy after ESSA by the precision of the frozen base, over that base and over the one as it is loaded.

    The matrices are crossed with seeds and problems; random fitness is in the last column, greedily over its own base.
    """
    from pandas import DataFrame

    if not study.precisions(run):
        return DataFrame({"base in": run.precisions, "runs": f"none: {_ONLY_LOCAL}"})
    rows = []
    for precision in study.precisions(run):
        found = of[f"precision={precision}"]
        row: dict[str, Any] = {"base in": precision}
        for decoding in ("greedy", *(label(t) for t in run.temperatures), "t1"):
            matrix = accuracy_matrix(found, decoding)
            row[f"test, {decoding}, %"] = stats.crossed_bootstrap(matrix, n_resamples=_RESAMPLES).format()
        loaded = [record | {"test": record["over_loaded"]} for record in found]
        row["greedy, over float32, %"] = _percent(loaded, "greedy")
        null = of[f"random precision={precision}"]
        rows.append(
            row | {"random fitness, greedy, %": _percent(null, "greedy"), "seeds": f"{len(found)}, {len(null)}"}
        )
    return DataFrame(rows)


def target(of: Records, run: SimpleNamespace, share: float = 0.95) -> float:
    """Return a share of the best mean greedy validation accuracy at the end, over populations."""
    return share * max(_final(of[f"population {N}"]).mean() for N in run.populations)


def completions_to(record: Record, aim: float) -> float:
    """Return the completions that a run drew until its greedy validation accuracy came to a target, or all of them."""
    return curves.spent_until(record["curve"]["completions"], record["curve"]["validation_greedy"], aim)


def _final(found: Sequence[Record]) -> np.ndarray:
    return np.array([record["curve"]["validation_greedy"][-1] for record in found])


def populations_table(of: Records, run: SimpleNamespace) -> DataFrame:
    """Return, by population, accuracy at the end and completions to the target, and how many runs get there."""
    from pandas import DataFrame

    aim, rows = target(of, run), []
    for N in run.populations:
        found = of[f"population {N}"]
        reached = sum(max(record["curve"]["validation_greedy"]) >= aim for record in found)
        needed = np.array([completions_to(record, aim) for record in found])
        row = {"population": N, "generations": found[0]["spec"]["steps"]}
        row["validation at the end, %"] = stats.bootstrap_mean(_final(found), n_resamples=_RESAMPLES).format()
        row["thousand completions to the target, median"] = f"{np.median(needed) / 1e3:.3g}"
        rows.append(row | {"runs that get there": f"{reached} of {len(found)}"})
    return DataFrame(rows)


def null_table(of: Records, run: SimpleNamespace) -> DataFrame:
    """Return what random fitness makes of the same searches: greedy validation accuracy at their start and end."""
    from pandas import DataFrame

    rows = []
    for N in run.populations:
        found = of[f"random population {N}"]
        start = 100 * np.mean([record["curve"]["validation_greedy"][0] for record in found])
        row = {"population": N, "at the start, %": f"{start:.1f}", "at the end, %": f"{100 * _final(found).mean():.1f}"}
        rows.append(row | {"seeds": len(found)})
    return DataFrame(rows)


QUESTIONS = {
    "Does noise of rank 1 reach what noise of full rank reaches?": "C32",
    "Which population does ESSA need?": "C12",
    "Are moderate ranks of the adapter best?": "C13",
    "Does ESSA lose by a base in 8 or 4 bits?": "C14",
    "Does ESSA get further than GRPO over the same adapter from the same start?": "C15c",
    "Does ES need 5 to 8 times less memory?": "C16",
}
"""Question of the notebook -> the claim whose verdict answers it."""


def answers(run: SimpleNamespace, of: Records, verdicts: Mapping[str, Any], lengths: str) -> dict[str, str]:
    """Return the questions of the notebook with their answers, from records and verdicts.

    lengths: whose are simulated, a key of `views.scaling.WHOSE`.
    """
    said = {"C13": _ranks_in_words(of, run), "C16": memory_cost.in_words(of["memory"])}
    said["C12"] = _optimum_in_words(of, run, verdicts["C12"])
    said["C15c"] = _adapters_in_words(of, run)
    said["C14"] = _precisions_in_words(of, run)
    said["C32"] = _low_rank_in_words(of, f"rank {run.ranks[0]}")
    found = {question: f"{claim} {verdicts[claim].verdict}. {said[claim]}" for question, claim in QUESTIONS.items()}
    return found | scaling.answers(of["scaling"], lengths)


def _optimum_in_words(of: Records, run: SimpleNamespace, verdict: Any) -> str:
    found = verdict.intervals.get("optimum above 96")
    if found is None:
        return verdict.text
    aim = target(of, run)
    best = [max(record["curve"]["validation_greedy"]) for N in run.populations for record in of[f"population {N}"]]
    fewest = f"{found.value:.0f} [{found.low:.0f}, {found.high:.0f}]"
    never = f"{sum(accuracy < aim for accuracy in best)} of {len(best)} runs never get there"
    return f"By the fitted quadratic {fewest} candidates get to {100 * aim:.1f} % with the fewest completions; {never}."


def _low_rank_in_words(of: Records, group: str) -> str:
    each = [f"{_percent(of[g], 'greedy')} % ({name(of, g)}, {len(of[g])} seeds)" for g in ("es", group)]
    own, start = of[f"as full rank, {group}"], _percent(of["base"], "greedy")
    again = f"{_percent(own, 'greedy')} % ({len(own)} seeds)"
    return f"Greedily {' and '.join(each)}, from {start} %; with the settings that full rank was tuned to {again}."


def _ranks_in_words(of: Records, run: SimpleNamespace) -> str:
    each = [
        (rank, *(_percent(of[f"adapter {rank}"], decoding) for decoding in DECODINGS)) for rank in run.adapter_ranks
    ]
    words = ", ".join(f"rank {rank}: {greedy} and {sampled} %" for rank, greedy, sampled in each)
    return f"Test accuracy after ESSA, greedily and at temperature 1: {words}."


def _adapters_in_words(of: Records, run: SimpleNamespace) -> str:
    each = [(name(of, group), *(_percent(of[group], d) for d in DECODINGS)) for group in study.adapted(run)]
    words = "; ".join(f"{arm}: {greedy} and {sampled} %" for arm, greedy, sampled in each)
    return f"Test accuracy at the end, greedily and at temperature 1: {words}."


_ONLY_LOCAL = "only the local engine has bases of another precision"


def _precisions_in_words(of: Records, run: SimpleNamespace) -> str:
    if not study.precisions(run):
        return f"Not run: {_ONLY_LOCAL}."
    each = [(p, *(_percent(of[f"precision={p}"], decoding) for decoding in DECODINGS)) for p in study.precisions(run)]
    words = ", ".join(f"{precision}: {greedy} and {sampled} %" for precision, greedy, sampled in each)
    return f"Test accuracy after ESSA, greedily and at temperature 1: {words}."


_QUOTED = {
    "CostOptimum": ("C12", "optimum above 96", 1, ".0f"),
    "CostRankFour": ("C13", "ESSA rank 4 - ESSA rank 32, test greedy", 100, ".1f"),
    "CostInteger": ("C14", "ESSA int8 - ESSA float32, test greedy", 100, ".1f"),
    "CostFour": ("C14", "ESSA int4 - ESSA float32, test greedy", 100, ".1f"),
    "CostEssaBehind": ("C15c", "ESSA - GRPO with LoRA, validation greedy at equal completions", 100, ".1f"),
    "CostMemoryFull": ("C16", "grpo over es at 7B, above 5", 1, ".1f"),
    "CostMemoryAdapter": ("C16", "grpo lora over es at 7B, above 5", 1, ".2f"),
    "CostLowRank": ("C32", "ES with low rank - ES full, test greedy", 100, ".1f"),
}
"""Stem of a macro -> claim, label of its interval in the verdict, factor and format."""


def numbers(verdicts: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """Return macro -> value and format, of the intervals that the paper quotes; none of a claim that is not judged."""
    found = {}
    for stem, (claim, of_interval, factor, form) in _QUOTED.items():
        if (interval := verdicts[claim].intervals.get(of_interval)) is not None:
            found |= {
                f"{stem}{end.title()}": (factor * getattr(interval, end), form) for end in ("value", "low", "high")
            }
    return found
