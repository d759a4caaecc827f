"""Build the solve explorer, one block of HTML: which model solves which test problem, and what it writes.

All numbers come from records of kinds "coverage" and "answers", the problems from the fixed test set; no model is run.
`explorer.html` has the page's markup, style and script; the data are inserted as JSON. The script displays texts as
plain text, and their JSON contains no character that HTML or Markdown would interpret.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
MOST = 600_000
"""Largest size of the block in bytes."""
CATEGORIES = ("kept", "won", "lost", "out")
"""Fields of `coverage.Support` in the order of the columns; a problem's category is the initial of one of them."""
SOLVED = 0.5
"""Chance of a right answer within `coverage.SOLVED_WITHIN` samples from which a problem counts as solved."""
TEMPERATURES = ("t1", "t0.6")
DECODINGS = ("greedy", "t1")
_RIGHT, _WRONG, _NO_ANSWER = "+", "-", "!"
# Characters that could be markup in HTML, end a fence in Markdown, or end a line in JavaScript.
_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&'`\u2028\u2029"}


class Model(NamedTuple):
    """The base, or all runs of one setting, which differ only in their seeds."""

    label: str
    coverage: Sequence[Mapping[str, Any]]
    """each run's record of kind "coverage" """
    answers: Sequence[Mapping[str, Any] | None]
    """each run's record of kind "answers", None where there is none"""


def block(results: str) -> str:
    """Return the page's HTML from the records of a file below paper/results, such as "notebook/tiny.jsonl"."""
    from evoalign_study import paths, records

    return html(data(records.read_records(paths.RESULTS / results)))


def html(found: Mapping[str, Any]) -> str:
    """Return the page's HTML with the result of `data` inserted. Raises ValueError for a page over 600 kB."""
    made = filled("explorer.html", found)
    if len(made) > MOST:
        raise ValueError(f"the explorer has {len(made)} bytes, but at most {MOST} are allowed: show fewer runs.")
    return made


def filled(name: str, value: Any) -> str:
    """Return a page beside this file with its data inserted."""
    head, marker, tail = (HERE / name).read_text(encoding="utf-8").partition("__DATA__")
    if not marker or "__DATA__" in tail:
        raise ValueError(f"{name} must contain __DATA__ exactly once, where the data go.")
    return head + embedded(value) + tail


def embedded(value: Any) -> str:
    """Return a value as ASCII JSON that is safe inside an HTML element and a Markdown fence."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_ESCAPED)


def data(found: Sequence[Mapping[str, Any]], base: str = "A0") -> dict[str, Any]:
    """Return the data that the page shows.

    Args:
        found: records; those of other kinds or bases, or with another number of problems than the base's, are left out.
        base: the model that training started from.

    Returns:
        `problems`, the numbers and target of each; `listed`, the right answers listed for each; `models`, the results
        of `_shown`, the base first; and `texts`, what the models wrote for each problem, each text preceded by a sign:
        + right, - wrong, ! without an answer.

    Raises:
        ValueError: there is no record of what the base can solve.
    """
    from evoalign_lib import tiny
    from evoalign_lib.tasks import countdown

    shown = models(found, base)
    n = shown[0].coverage[0]["n"]
    problems = tiny.problems("test", n)
    texts: list[dict[str, int]] = [{} for _ in problems]
    return {
        "problems": [[", ".join(map(str, problem.numbers)), problem.target] for problem in problems],
        "listed": [[countdown.last_answer(text) for text in tiny.right_answers(problem)] for problem in problems],
        "models": [_shown(model, shown[0], texts) for model in shown],
        "texts": [list(of_problem) for of_problem in texts],
    }


# ---- which models there are


def models(found: Sequence[Mapping[str, Any]], base: str = "A0") -> list[Model]:
    """Return the models that have records of kind "coverage", the base first, arms in the order of `arms.ARMS`.

    Raises ValueError if the base has none.
    """
    from evoalign_lib.files import canonical_json

    def mine(kind: str) -> list[Mapping[str, Any]]:
        asked = (r for r in found if r["spec"]["kind"] == kind and r["spec"]["base"] == base)
        return [record for record in asked if record["status"] == "finished"]

    solved: dict[str, Mapping[str, Any]] = {}
    # if a model has two records with different numbers of samples, the notebook tabulates the one with fewer
    for record in sorted(mine("coverage"), key=lambda r: r["spec"]["coverage_samples"]):
        solved.setdefault(canonical_json(record["spec"].get("end")), record)
    if "null" not in solved:
        raise ValueError(f"no record says what base {base!r} can solve: run the notebook of these records.")
    n = solved["null"]["n"]
    answered = {canonical_json(r["spec"].get("end")): r for r in mine("answers") if r["n"] == n}
    groups: dict[str, list[str]] = {}
    for end, record in solved.items():
        if record["n"] == n:
            groups.setdefault(canonical_json(_setting(record["spec"].get("end"))), []).append(end)
    ends = {key: solved[of[0]]["spec"].get("end") for key, of in groups.items()}
    labels = _labels(ends)
    return [
        Model(labels[key], [solved[end] for end in groups[key]], [answered.get(end) for end in groups[key]])
        for key in sorted(groups, key=lambda key: _place(ends[key]))
    ]


def _setting(end: Mapping[str, Any] | None) -> Any:
    """Return the part of an end's spec that runs share if they differ only in their seeds."""
    if end is None:
        return None
    run = dict(end["of"]["run"])
    if "start" in run:
        run["start"] = run["start"]["run"]
    return {name: value for name, value in end.items() if name != "of"} | {"run": run, "size": len(end["of"]["seeds"])}


def _place(end: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Return a sort key: base, arms, means of runs, runs in two parts; within an arm the longest run first."""
    from evoalign_lib import arms

    if end is None:
        return (0,)
    run, size = end["of"]["run"], len(end["of"]["seeds"])
    chain = [run["start"]["run"], run] if "start" in run else [run]
    order = list(arms.ARMS)
    return (
        len(chain),
        size > 1,
        *(order.index(part["arm"]) for part in chain),
        -sum(p.get("steps", 0) * p.get("population_size", 1) for p in chain),
    )


def _labels(ends: Mapping[str, Mapping[str, Any] | None]) -> dict[str, str]:
    """Return each model's label: its arm and, if several models share the arm, the settings in which they differ."""
    from evoalign_study import style

    from evoalign_lib import arms

    labels: dict[str, str] = {}
    first: dict[str, Mapping[str, Any]] = {}
    for key in sorted(ends, key=lambda key: _place(ends[key])):
        end = ends[key]
        if end is None:
            labels[key] = style.ARMS["base"].label
            continue
        run, size = end["of"]["run"], len(end["of"]["seeds"])
        name = style.ARMS[run["arm"]].label
        if "start" in run:
            begun = run["start"]["run"]
            steps = [f" ({part['steps']})" if "steps" in part else "" for part in (begun, run)]
            name = f"{style.ARMS[begun['arm']].label}{steps[0]}, then {name}{steps[1]}"
        if size > 1:
            name = f"mean of {size} {name} runs"
        if end["factor"] != 1 or "draw" in end or "as_long_as" in end:
            name += f", moved by {end['factor']:g}"
        other = first.setdefault(name, run)
        apart = {k: run[k] for k in arms.get(run["arm"]).settings if k != "curve_points" and run.get(k) != other.get(k)}
        if "steps" in apart and f"{name}, {run['steps']} steps" not in labels.values():
            apart = {}
            name += f", {run['steps']} steps"
        name += "".join(f", {setting.replace('_', ' ')} {value:g}" for setting, value in apart.items())
        if name in labels.values():
            name += f" ({len(labels)})"
        labels[key] = name
    return labels


# ---- what is shown of one


def _shown(model: Model, base: Model, texts: Sequence[dict[str, int]]) -> dict[str, Any]:
    """Return the page's data for a model, and add what it wrote to the texts of each problem.

    The result has `label` and `runs`; for each temperature `p`, the chance that one sample is right, and `k`, that one
    of 256 is, both means over runs (`records.pack_probabilities`); `greedy`, the number of runs that are right
    (`pack_integers`); `categories`, an initial per problem, where solved means a chance of at least a half; `expected`,
    the expected counts, means over runs; and `wrote`, decoding -> for each run with a record of its answers a row of
    indices into the texts; None if no run has one.
    """
    from evoalign_study.records import pack_integers, pack_probabilities, unpack_bits, unpack_probabilities

    from evoalign_lib.analysis import coverage

    result: dict[str, Any] = {"label": model.label, "runs": len(model.coverage)}
    within, before = {}, {}
    for at in TEMPERATURES:
        chances = np.array([unpack_probabilities(record["reach"][at]) for record in model.coverage])
        within[at] = coverage.pass_at(chances, coverage.SOLVED_WITHIN)
        before[at] = coverage.pass_at(unpack_probabilities(base.coverage[0]["reach"][at]), coverage.SOLVED_WITHIN)
        result[at] = {"p": pack_probabilities(chances.mean(0)), "k": pack_probabilities(within[at].mean(0))}
    greedy = [unpack_bits(record["greedy_bits"], record["n"]) for record in model.coverage]
    result["greedy"] = pack_integers(np.sum(greedy, axis=0, dtype=np.int64))
    solved = [pass_at >= SOLVED for pass_at in (before["t1"], within["t1"].mean(0))]
    result["categories"] = "".join(_category(*pair)[0] for pair in zip(*solved, strict=True))
    supports = [coverage.support(before["t1"], run) for run in within["t1"]]
    result["expected"] = [round(float(np.mean([getattr(s, name) for s in supports])), 1) for name in CATEGORIES]
    result["wrote"] = _wrote(model, texts)
    return result


def _category(before: bool, after: bool) -> str:
    return ("kept" if after else "lost") if before else ("won" if after else "out")


def _wrote(model: Model, texts: Sequence[dict[str, int]]) -> dict[str, list[str]] | None:
    from evoalign_study.kinds.weights import unpack_texts
    from evoalign_study.records import pack_integers, unpack_bits

    known = [record for record in model.answers if record is not None]
    if not known:
        return None
    found: dict[str, list[str]] = {}
    for decoding in DECODINGS:
        rows = found[decoding] = []
        for record in known:
            places = []
            right = unpack_bits(record[f"{decoding}_bits"], record["n"])
            for of_problem, one, is_right in zip(
                texts, unpack_texts(record[decoding], record["n"]), right, strict=True
            ):
                sign = _RIGHT if is_right else _WRONG if one.answered else _NO_ANSWER
                text = sign + one.text + ("\u2026" if one.cut else "")
                places.append(of_problem.setdefault(text, len(of_problem)))
            rows.append(pack_integers(np.array(places)))
    return found
