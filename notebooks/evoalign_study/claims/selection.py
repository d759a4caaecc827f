"""Select the runs that judge a claim, by arm and cell, by the setting that won a sweep, and by decoding.

`Evidence` holds the records. It can also replace the arm that a rule favours by a null arm, which learned nothing;
`placebos` says why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from evoalign_lib import arms
from evoalign_lib.checks import require
from evoalign_study.records import canonical_json, read_records, record_files

Record = dict[str, Any]
Claim = dict[str, Any]
Fields = Mapping[str, Any]
_Names = Collection[str | None]

BUDGETS = ("completions", "generated_tokens", "forward_flops", "core_seconds")
"""Budget axes that a curve may have."""
DECODINGS = ("greedy", "t0.6", "t1")
"""Decodings under which arms are compared: greedy, and sampled at these temperatures."""
BASE = "base"
"""The null that is the untrained model itself."""
NULLS = (*(name for name, arm in arms.ARMS.items() if arm.null), BASE)
"""Arms that learn nothing."""
JUDGED_SEEDS = 16
"""A claim is judged by runs with seeds below this, unless one of its arms declares other `seeds`: additional runs that
a later notebook makes for another purpose change no earlier verdict."""

_OF_DECODING = ("kind", "digest", "temperatures", "samples", "at_step", "curve_temperature")
"""Fields by which the spec of a "decoding" record differs from that of the run whose model it measures."""
_SAMPLES = 16


class Runs(NamedTuple):
    """The runs of one arm in one cell, sorted by unit."""

    records: list[Record]
    have: str
    """Their number in words."""
    lacks: str = ""
    """What is missing from their sweep."""
    fixed: bool = False
    """Whether this is one model without a unit, which needs no replicates: it varies over the problems alone."""


@dataclass(frozen=True)
class Evidence:
    """The records that judge claims, and how they are used. Create it with `Evidence.of`."""

    records: Sequence[Record]
    """Finished records of one scale; those of trained and untrained models with their `decoded` block, if any."""
    resamples: int = 10_000
    """Resamples of every bootstrap interval; permutation tests draw twice as many."""
    null: str | None = None
    """One of `NULLS`, which replaces the arm that a rule favours, or that wins if it is contradicted."""
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """Cached results computed from the records, see `once`."""

    @classmethod
    def of(cls, records: Iterable[Record], scale: str, resamples: int = 10_000) -> Evidence:
        """Collect the finished records of one scale, each joined with the decoding records of its model.

        Raises ValueError as `join_decodings` does.
        """
        used = [r for r in records if r["status"] == "finished" and r["spec"]["scale"] == scale]
        return cls(join_decodings(used), resamples)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the cached result of a key, computed on first use."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def having(self, name: str, value: str) -> list[Record]:
        """Return the records whose specs have this value in a field, in their original order."""

        def by_value() -> dict[Any, list[Record]]:
            grouped = defaultdict(list)
            for record in self.records:
                grouped[record["spec"].get(name)].append(record)
            return grouped

        return self.once(("having", name), by_value).get(value, [])

    def base_of(self, run: Record) -> Record | None:
        """Return the record of the untrained model that a run started from; None if there is none."""
        for record in self.having("kind", "base"):
            if all(run["spec"].get(name) == value for name, value in record["spec"].items() if name != "kind"):
                return record
        return None


@dataclass(frozen=True)
class Case:
    """A claim with the evidence that judges it."""

    claim: Claim
    evidence: Evidence

    @property
    def rule(self) -> Mapping[str, Any]:
        """The claim's rule."""
        return self.claim["rule"]

    @property
    def null(self) -> str | None:
        """The null that replaces the arms that the rule favours, if there is one."""
        return self.evidence.null

    def name(self, arm: str, favoured: bool = False) -> str:
        """Return the name of an arm in words, or that of the null that replaces a favoured one."""
        if favoured and self.null:
            return arm_words(self.null)
        declared = self.claim["arms"][arm]
        if declared["kind"] == "composed":
            return " then ".join(map(arm_words, arm.split("_then_")))
        return arm_words(arm, declared.get("arm"))

    def select(
        self, names: Iterable[str], where: Fields | None = None, favoured: _Names = (), apart: Sequence[str] = ()
    ) -> dict[str, Runs]:
        """Return the runs of arms in one cell; if there is a null, its runs replace those of the favoured arms.

        The runs of one arm differ only in the unit.

        where: further fields of their specs. apart: settings in which the null's runs may differ, see `stand_in`.
        Raises ValueError for runs that differ in anything else, and for a sweep that is not the declared one.
        """
        own = {name: self._runs(name, self.claim["arms"][name] | (where or {})) for name in names}
        beside = {name: runs.records for name, runs in own.items()}
        instead = [name for name in own if self.null and name in favoured]
        return own | {name: self.stand_in(name, beside, apart) for name in instead}

    def in_cells(
        self, names: Sequence[str], cells: Iterable[tuple[str, Fields]], favoured: _Names, *apart: str
    ) -> dict[str, list[Runs]]:
        """Return the runs of arms in each of several cells, as `select` does for one."""
        by_cell = [self.select(names, where, favoured, apart) for _, where in cells]
        return {name: [runs[name] for runs in by_cell] for name in names}

    def stand_in(self, favoured: str, beside: Mapping[str, Sequence[Record]], apart: Sequence[str] = ()) -> Runs:
        """Return the runs of the null that replace those of a favoured arm.

        A null arm's runs must have the spec of a compared arm of the same family, except for the hyper-parameters,
        which are not tuned for nulls; of several settings, the one with the most runs is used. The untrained base
        replaces as many runs as the favoured arm has, with the results of its own record and a curve that stays at its
        first point.

        beside: the runs of the arms that are compared.
        apart: further settings in which the null's runs may differ; some rules accept a curve of fewer points.
        """
        runs, unit, evidence = beside[favoured], self.claim["unit"], self.evidence
        if not runs:
            return Runs([], f"0 of {arm_words(self.null)}")
        if self.null == BASE:
            base = evidence.base_of(runs[0])
            frozen = [] if base is None else [_frozen(run, base) for run in runs]
            return Runs(frozen, f"{len(frozen)} of {BASE}")
        family, tuned = arms.get(self.null).family, arms.swept(self.null)
        seeds = self.claim["arms"][favoured].get("seeds", JUDGED_SEEDS)
        alike = [each[0] for each in (runs, *beside.values()) if each and _family(each[0]) == family]
        varied, blocks = {"arm", unit, *tuned, *apart}, {"test", "curve", "jensen"} & runs[0].keys()
        by_setting: dict[tuple, list[Record]] = defaultdict(list)
        for record in evidence.having("arm", self.null):
            if not (judges(record, seeds) and blocks <= record.keys()):
                continue
            if any(not any(_differing(record["spec"], run["spec"], varied)) for run in alike):
                by_setting[tuple(record["spec"][name] for name in tuned)].append(record)
        chosen = max((by_setting[setting] for setting in sorted(by_setting)), key=len, default=[])
        # of two arms of one family, such as runs of two lengths, the null stands in for the favoured one
        like_favoured = [run for run in chosen if not any(_differing(run["spec"], runs[0]["spec"], varied))]
        chosen = like_favoured or chosen
        return _replicates(chosen, unit, self.null, self.null)

    def _runs(self, arm: str, wanted: dict[str, Any]) -> Runs:
        unit = self.claim["unit"]
        return self.evidence.once(canonical_json([wanted, unit]), lambda: _select(self.evidence, arm, wanted, unit))


def _select(evidence: Evidence, arm: str, wanted: dict[str, Any], unit: str) -> Runs:
    """Return the runs of an arm with the wanted spec fields and, if declared so, the setting that won its sweep."""
    fields = {name: value for name, value in wanted.items() if name not in ("setting", "seeds", "half")}
    seeds, name = wanted.get("seeds", JUDGED_SEEDS), arm_words(wanted.get("arm", wanted["kind"]))
    of_kind = evidence.having("arm", wanted["arm"]) if wanted.get("arm") else evidence.having("kind", wanted["kind"])
    chosen = [record for record in of_kind if judges(record, seeds) and matches(record, fields)]
    if wanted.get("setting") and chosen:
        of_sweep = evidence.having("arm", arms.get(chosen[0]["spec"]["arm"]).sweep)
        tuned = _tuned(of_sweep, chosen[0]["spec"], wanted["setting"])
        if isinstance(tuned, str):
            return Runs([], f"0 of {name} ({tuned})", tuned)
        chosen = [record for record in chosen if matches(record, tuned)]
    runs = _replicates(chosen, unit, name, f"{arm} {fields}")
    if "half" not in wanted:
        return runs
    middle = len(runs.records) // 2
    return runs._replace(records=runs.records[middle:] if wanted["half"] else runs.records[:middle])


def have_in_cells(labels: Iterable[str], arms: Iterable[Sequence[Runs]]) -> str:
    """Describe the runs that arms have in each cell."""
    by_cell = zip(labels, zip(*arms, strict=True), strict=True)
    return "; ".join(f"{label}: {', '.join(runs.have for runs in each)}" for label, each in by_cell)


def arm_words(name: str, arm: str | None = None) -> str:
    """Return the name of an arm in words.

    name: a key of `arms.ARMS`, or a claim's own name for runs of `arm`.

    >>> arm_words("es_sampled"), arm_words("grpo_unscaled", "grpo"), arm_words("n30", "es"), arm_words("base")
    ('ES with sampled fitness', 'GRPO unscaled', 'ES n30', 'base')
    >>> arm_words("anchored", "es_anchored")
    'ES with anchored decay'
    """
    key = arm or name
    if key not in arms.ARMS:
        return name.replace("_", " ")
    words = arms.get(key).label.replace(", ", " with ")
    rest = name.removeprefix(key).replace("_", " ").strip()
    return words if {*rest.lower().split()} <= {*words.lower().split()} else f"{words} {rest}"


def cells(claim: Claim) -> list[tuple[str, dict[str, Any]]]:
    """Return the label and the spec field of every cell; one cell without a field if none are declared."""
    declared = claim.get("cells", {})
    return [(str(value), {field: value}) for field, values in declared.items() for value in values] or [("", {})]


def matches(record: Record, wanted: Mapping[str, Any]) -> bool:
    """Return whether a record's spec has these fields; None requires that a field is absent.

    A dot names a field inside a block of the spec: "start.run.steps".
    """
    return all(_field(record["spec"], field) == value for field, value in wanted.items())


def _field(spec: Any, name: str) -> Any:
    for part in name.split("."):
        spec = spec.get(part) if isinstance(spec, dict) else None
    return spec


def has_runs(claim: Claim, records: Iterable[Record]) -> bool:
    """Return whether any arm that a claim compares has a replicate, whatever its setting."""
    declared = claim.get("arms", {}).values()
    compared = [{k: v for k, v in arm.items() if k not in ("setting", "seeds")} for arm in declared]
    wanted = [arm | where for arm in compared for _, where in cells(claim)]
    return any(claim["unit"] in r["spec"] and any(matches(r, fields) for fields in wanted) for r in records)


def judges(record: Record, seeds: int = JUDGED_SEEDS) -> bool:
    """Return whether a run's seed is below `seeds`; True for a model without a seed."""
    return record["spec"].get("seed", 0) < seeds


def check_one_base(label: str, records: Iterable[Record]) -> None:
    """Raise ValueError, naming the digests, if runs start from different bases."""
    digests = sorted({record["spec"]["base_digest"] for record in records})
    require(len(digests) < 2, f"{label}: runs start from different bases ({', '.join(digests)})")


def lacking(selected: Iterable[Runs]) -> str:
    """Describe what is missing from the sweeps of these runs."""
    return "; ".join(dict.fromkeys(runs.lacks for runs in selected if runs.lacks))


def join_decodings(records: Iterable[Record]) -> list[Record]:
    """Merge the records of kind "decoding" into those of the models that they measure, and return the latter.

    A decoding record belongs to the run whose spec equals its own without `kind`, `digest`, `temperatures`, `samples`,
    `at_step` and `curve_temperature`. Its `test` block and its `curve` are merged into the run's. Its `validation`
    block goes into `decoded`; a block measured at an earlier step goes into `validation_at` there.

    Raises ValueError if a decoding record measured other weights than the run's, other points of its curve, or a number
    of samples other than 16.
    """
    by_run, models = defaultdict(list), []
    for record in records:
        if record["spec"]["kind"] == "decoding":
            by_run[_run_of(record)].append(record)
        else:
            models.append(record)
    for i, record in enumerate(models):
        if record["spec"]["kind"] in ("train", "base"):
            models[i] = reduce(_joined, sorted(by_run[_run_of(record)], key=lambda r: r["spec_hash"]), record)
    return models


def _differing(one: Fields, other: Fields, apart: Iterable[str]) -> Iterator[str]:
    """Yield the settings in which two specs differ, except for some."""
    return (name for name in (one.keys() | other.keys()) - {*apart} if one.get(name) != other.get(name))


def _family(record: Record) -> str:
    """Return the family of a run's arm; "none" for an untrained model."""
    return arms.get(record["spec"]["arm"]).family if "arm" in record["spec"] else "none"


def _run_of(record: Record) -> str:
    return canonical_json({name: value for name, value in record["spec"].items() if name not in _OF_DECODING})


def _joined(record: Record, again: Record) -> Record:
    spec, digest = again["spec"], record.get("digest", record["spec"]["base_digest"])
    made = f"the decoding record {again['spec_hash']} has"
    own = spec["digest"] == digest and spec["samples"] == _SAMPLES
    wanted = f"its run ended with {digest}: make it again with {_SAMPLES} samples of the run's own weights"
    require(own, f"{made} {spec['samples']} samples of weights {spec['digest']}, {wanted}")
    known = record.get("decoded", {"validation": {}, "validation_at": {}})
    at = {spec["at_step"]: again["validation_at_step"]} if "at_step" in spec else {}
    validation = known["validation"] | again.get("validation", {})
    decoded = {"validation": validation, "validation_at": known["validation_at"] | at}
    joined = {"test": record["test"] | again["test"], "decoded": decoded}
    if "curve" in again:
        same = again["curve"]["step"] == record["curve"]["step"]
        require(same, f"{made} a curve at other steps than its run: make it again")
        joined["curve"] = record["curve"] | again["curve"]
    return record | joined


def _frozen(run: Record, base: Record) -> Record:
    """Return a run with the budget of another one that stayed at its starting point."""
    curve = {
        name: values if name in ("step", *BUDGETS) else values[:1] * len(values)
        for name, values in run.get("curve", {}).items()
    }
    still = {"spec": run["spec"] | {"arm": BASE}, "status": "finished", "curve": curve}
    still |= {block: base[block] for block in ("test", "jensen") if block in base}
    if "decoded" in base:
        validation = base["decoded"]["validation"]
        steps = run.get("decoded", {}).get("validation_at", {})
        still["decoded"] = {"validation": validation, "validation_at": dict.fromkeys(steps, validation)}
    return still


def _replicates(chosen: list[Record], unit: str, name: str, context: str) -> Runs:
    """Return runs sorted by unit. Raises ValueError if they differ in anything else, or if a unit occurs twice."""
    n, units, have = len(chosen), [record["spec"].get(unit) for record in chosen], f"{len(chosen)} of {name}"
    if chosen and all(unit not in record["spec"] for record in chosen):
        require(n == 1, f"{context}: {n} records without {unit!r}: select one of them by its spec")
        return Runs(chosen, have, fixed=True)
    twice = f"two records of one {unit} among {sorted(map(str, units))}"
    require(len(set(units)) == n, f"{context}: {twice}: select by their specs")
    check_alike(context, chosen, [unit])
    return Runs(sorted(chosen, key=lambda record: record["spec"][unit]), have)


def check_alike(label: str, records: Sequence[Record], apart: Iterable[str]) -> None:
    """Raise ValueError, naming the settings, if the specs of runs differ in any setting but those in `apart`."""
    for record in records:
        differing = sorted(_differing(_settings_of(record), _settings_of(records[0]), apart))
        require(not differing, f"{label}: runs differ in {', '.join(differing)}: declare the value in the claim's arms")


def _settings_of(record: Record) -> Mapping[str, Any]:
    """Return the spec of a run; `start`, `of` and `end`, runs that it is made from, hold settings, not weights."""
    spec = record["spec"]
    made = {name: spec[name]["run"] for name in ("start", "of") if name in spec}
    if isinstance(end := spec.get("end"), Mapping):
        made["end"] = end | {"of": end["of"]["run"]}
    return spec | made


def _tuned(records: Sequence[Record], run: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, float] | str:
    """Return the setting that won the sweep from which a run takes its setting, or say what the sweep still lacks.

    The sweep consists of runs of the arm's sweep arm with the seed of sweeps and without a test set. Otherwise they
    differ from the run only in the setting, in their length and in how often they were evaluated.
    """
    arm, names = arms.get(run["arm"]).sweep, arms.swept(run["arm"])
    base = run["base"] if setting["base"] == "own" else setting["base"]
    apart = ("base_digest", "steps", "curve_points", "curve_spacing", "validation_problems", *names)
    of_sweep = {field: value for field, value in run.items() if field not in apart}
    of_sweep |= {"arm": arm, "base": base, "seed": arms.SWEEP_SEED, "test_problems": 0}
    own = arms.get(run["arm"])
    of_sweep |= dict.fromkeys({*own.settings, *own.optional} - {*arms.get(arm).settings, *apart})
    made = [record for record in records if matches(record, of_sweep)]
    by_setting = {tuple(record["spec"][name] for name in names): record for record in made}
    sweep, best_of = f"the sweep of {arm_words(arm)} on {base}", setting["best_of"]
    counted = f"{sweep} has {len(made)} runs of {len(by_setting)} settings where {best_of} were declared, one run each"
    require(len(made) == len(by_setting) <= best_of, f"{counted}: declare another rule for the best of more")
    declared = [tuple(choice[name] for name in names) for choice in setting.get("among", {}).get(arm, ())]
    others = sorted(by_setting.keys() - set(declared)) if declared else []
    has = f"{sweep} has {' and '.join(names)} {', '.join(map(str, others))}"
    require(not others, f"{has}, which the claim does not declare among its settings: take them out, or declare them")
    if len(made) < best_of:
        return f"{sweep} has {len(made)} of {best_of} settings"
    # in the order of the settings, so that the first wins among equal scores
    return arms.ranked([by_setting[values] for values in sorted(by_setting)])[0][1]


def committed_records(scale: str = "tiny") -> list[Record]:
    """Return the committed records of a scale, notebook by notebook, without an incomplete last line.

    Raises ValueError for a damaged or edited line (`records.read_records`), for a spec with two records, and for a spec
    without a kind or a scale.
    """
    records, files = [], {}
    for file in record_files(scale):
        for record in read_records(file):
            name, absent = record["spec_hash"], " and no ".join(sorted({"kind", "scale"} - record["spec"].keys()))
            require(not absent, f"{file}: the spec {name} has no {absent}: restore the file from git")
            both = f"in {files.get(name)} and in {file}"
            delete = "delete one of the two lines, and the ledger that it alone names"
            require(name not in files, f"the spec {name} has two records, {both}: {delete}")
            files[name] = file
            records.append(record)
    return records
