"""Which runs a claim is judged by: of each arm and cell, of the setting that won a sweep, under each decoding.

`Evidence` holds the records. It can also put a null arm, which learned nothing, in the place of an arm that a rule
favours; `placebos` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evoalign_lib import arms
from evoalign_lib.analysis.arrays import require
from evoalign_study.records import canonical_json, read_records, record_files

Record = dict[str, Any]
Claim = dict[str, Any]

BUDGETS = ("completions", "generated_tokens", "forward_flops", "core_seconds")
"""Axes of a budget that a curve may have."""
DECODINGS = ("greedy", "t0.6", "t1")
"""Under which arms are compared: greedily, and sampled at these temperatures."""
BASE = "base"
"""The null that is the untrained model itself."""
NULLS = (*(name for name, arm in arms.ARMS.items() if arm.null), BASE)
"""Arms that learn nothing."""
JUDGED_SEEDS = 16
"""Runs with a seed below this judge a claim, unless an arm of it declares more `seeds`: what a later notebook runs
besides, for a purpose of its own, changes no earlier verdict."""

_OF_DECODING = ("kind", "digest", "temperatures", "samples", "at_step", "curve_temperature")
"""What the spec of a record of kind "decoding" has besides that of the run whose model it measures."""
_SAMPLES = 16


class Runs(NamedTuple):
    """The runs of one arm in one cell, sorted by unit, their number in words, and what their sweep lacks."""

    records: list[Record]
    have: str
    lacks: str = ""


@dataclass(frozen=True)
class Evidence:
    """The records that claims are judged by, and how. Make it with `Evidence.of`."""

    records: Sequence[Record]
    """Finished records of one scale; each trained or untrained model's with its `decoded` block, if it has one."""
    resamples: int = 10_000
    """Of every bootstrap interval; permutation tests draw twice as many."""
    null: str | None = None
    """One of `NULLS`, to be put in the place of the arm that a rule favours."""
    _selected: dict[str, Runs] = field(default_factory=dict, repr=False, compare=False)
    """Selections made before: nulls ask for those of the claim itself again."""
    _with: dict[str, dict[Any, list[Record]]] = field(default_factory=dict, repr=False, compare=False)
    """Records by the value of a field of their specs, made when first asked for."""
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What rules have made of the records, see `once`."""

    @classmethod
    def of(cls, records: Iterable[Record], scale: str, resamples: int = 10_000) -> Evidence:
        """Take the finished records of one scale, each joined with the decoding records of its model.

        Raises ValueError as `join_decodings`.
        """
        used = [r for r in records if r["status"] == "finished" and r["spec"]["scale"] == scale]
        return cls(join_decodings(used), resamples)

    def name(self, claim: Claim, arm: str, favoured: bool) -> str:
        """Return what an arm of a claim is called in words, or the null that stands in its place."""
        if favoured and self.null:
            return arm_words(self.null)
        if claim["arms"][arm]["kind"] == "composed":
            return " then ".join(map(arm_words, arm.split("_then_")))
        return arm_words(arm, claim["arms"][arm].get("arm"))

    def having(self, name: str, value: str) -> list[Record]:
        """Return the records whose specs have this value of a field, in their order."""
        if name not in self._with:
            self._with[name] = {}
            for record in self.records:
                if name in record["spec"]:
                    self._with[name].setdefault(record["spec"][name], []).append(record)
        return self._with[name].get(value, [])

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made of the records under a key, made when first asked for."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def select(self, claim: Claim, arm: str, where: Mapping[str, Any]) -> Runs:
        """Return the runs of one arm of a claim in one cell; they differ in nothing but the unit.

        where: further fields of their specs. Raises ValueError for runs that differ otherwise, and for a sweep that is
        not the declared one.
        """
        wanted = claim["arms"][arm] | where
        key = canonical_json([wanted, claim["unit"]])
        if key not in self._selected:
            self._selected[key] = self._select(claim, arm, wanted)
        return self._selected[key]

    def _select(self, claim: Claim, arm: str, wanted: dict[str, Any]) -> Runs:
        setting, seeds = wanted.pop("setting", None), wanted.pop("seeds", JUDGED_SEEDS)
        field, value = ("arm", wanted["arm"]) if wanted.get("arm") else ("kind", wanted["kind"])
        chosen = [r for r in self.having(field, value) if judges(r, seeds) and matches(r, wanted)]
        name = arm_words(wanted.get("arm", wanted["kind"]))
        if setting and chosen:
            of_sweep = self.having("arm", arms.get(chosen[0]["spec"]["arm"]).sweep)
            tuned = _tuned(of_sweep, chosen[0]["spec"], setting)
            if isinstance(tuned, str):
                return Runs([], f"0 of {name} ({tuned})", tuned)
            chosen = [r for r in chosen if matches(r, tuned)]
        return Runs(_replicates(chosen, claim["unit"], f"{arm} {wanted}"), f"{len(chosen)} of {name}")

    def select_pair(
        self,
        claim: Claim,
        pair: Sequence[str],
        where: Mapping[str, Any],
        favoured: str | None,
        apart: Sequence[str] = (),
    ) -> list[Runs]:
        """Return the runs of two arms in one cell, the null in the place of the favoured one where there is a null.

        apart: settings in which the null's runs may differ, see `stand_in`.
        """
        found = {arm: self.select(claim, arm, where) for arm in pair}
        if favoured is not None and self.null is not None:
            beside = [found[arm].records for arm in (favoured, *pair)]
            found[favoured] = self.stand_in(beside, claim["unit"], apart=apart)
        return [found[arm] for arm in pair]

    def stand_in(
        self, beside: Sequence[Sequence[Record]], unit: str, seeds: int = JUDGED_SEEDS, apart: Sequence[str] = ()
    ) -> Runs:
        """Return the runs of the null that take the place of a favoured arm's.

        A null arm's runs must have the spec of an arm of its own family, but for the hyper-parameters, which nobody
        tunes for a null; of several settings that with most runs stands in. The untrained base stands in for as many
        runs as the favoured arm has: with the results of its own record, and a curve that stays at its first point.

        beside: the runs of the favoured arm, then those of the arms that it is compared with.
        seeds: those of the favoured arm.
        apart: further settings in which the null's runs may differ, as a rule may do with a curve of fewer points.
        """
        if not beside[0]:
            return Runs([], f"0 of {arm_words(self.null)}")
        if self.null == BASE:
            base = self.base_of(beside[0][0])
            frozen = [] if base is None else [_frozen(run, base) for run in beside[0]]
            return Runs(frozen, f"{len(frozen)} of {BASE}")
        family = arms.get(self.null).family
        alike = [runs[0] for runs in beside if runs and _family(runs[0]) == family]
        varied = ("arm", unit, *arms.swept(self.null), *apart)
        blocks = ({"test", "curve", "jensen"} & beside[0][0].keys()) if alike else set()
        by_setting: dict[tuple, list[Record]] = {}
        for record in self.having("arm", self.null) if alike else ():
            if not judges(record, seeds):
                continue
            if blocks <= record.keys() and any(_same(record["spec"], run["spec"], varied) for run in alike):
                setting = tuple(record["spec"][name] for name in arms.swept(self.null))
                by_setting.setdefault(setting, []).append(record)
        chosen = max((by_setting[setting] for setting in sorted(by_setting)), key=len, default=[])
        return Runs(_replicates(chosen, unit, self.null), f"{len(chosen)} of {self.null}")

    def base_of(self, run: Record) -> Record | None:
        """Return the record of the untrained model that a run started from; None where there is none."""
        for record in self.having("kind", "base"):
            if all(run["spec"].get(name) == value for name, value in record["spec"].items() if name != "kind"):
                return record
        return None


def arm_words(name: str, arm: str | None = None) -> str:
    """Return what an arm is called in words.

    name: a key of `arms.ARMS`, or what a claim calls runs of `arm`.

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
    """Return the label and the spec field of every cell; one cell without field where none are declared."""
    declared = claim.get("cells", {})
    return [(str(value), {field: value}) for field, values in declared.items() for value in values] or [("", {})]


def matches(record: Record, wanted: Mapping[str, Any]) -> bool:
    """Return whether a record's spec has these fields; None asks for a field that is absent.

    A field of a block of the spec is named with a point: "start.run.steps".
    """
    return all(_field(record["spec"], field) == value for field, value in wanted.items())


def _field(spec: Any, name: str) -> Any:
    if "." not in name:  # nearly all are
        return spec.get(name)
    for part in name.split("."):
        spec = spec.get(part) if isinstance(spec, Mapping) else None
    return spec


def has_runs(claim: Claim, records: Iterable[Record]) -> bool:
    """Return whether there is any replicate of any arm that a claim compares, whatever its setting."""
    declared = claim.get("arms", {}).values()
    compared = [{k: v for k, v in arm.items() if k not in ("setting", "seeds")} for arm in declared]
    wanted = [arm | where for arm in compared for _, where in cells(claim)]
    return any(claim["unit"] in r["spec"] and any(matches(r, fields) for fields in wanted) for r in records)


def judges(record: Record, seeds: int = JUDGED_SEEDS) -> bool:
    """Return whether a run is one of the first `seeds`; a model without seed is."""
    return record["spec"].get("seed", 0) < seeds


def check_one_base(label: str, records: Iterable[Record]) -> None:
    """Raise ValueError, naming the digests, where runs start from different bases."""
    digests = sorted({record["spec"]["base_digest"] for record in records})
    require(len(digests) < 2, f"{label}: runs start from different bases ({', '.join(digests)})")


def lacking(selected: Iterable[Runs]) -> str:
    """Return in words what the sweeps of these runs lack."""
    return "; ".join(dict.fromkeys(found.lacks for found in selected if found.lacks))


def join_decodings(records: Iterable[Record]) -> list[Record]:
    """Return the records without those of kind "decoding", whose results join the record of the model they measure.

    A decoding record belongs to the run whose spec is its own without `kind`, `digest`, `temperatures`, `samples`,
    `at_step` and `curve_temperature`. Its `test` block joins the run's, and so does its `curve`; `decoded` gets its
    `validation` block, and as `validation_at` that of each earlier step.

    Raises ValueError where a decoding record measured other weights than the run's, other points of its curve, or other
    than 16 samples.
    """
    records = list(records)
    by_run: dict[str, list[Record]] = {}
    for record in records:
        if record["spec"]["kind"] == "decoding":
            by_run.setdefault(_run_of(record), []).append(record)
    if not by_run:
        return records
    joined = []
    for record in records:
        if record["spec"]["kind"] in ("train", "base"):
            for found in sorted(by_run.get(_run_of(record), ()), key=lambda r: r["spec_hash"]):
                record = _joined(record, found)
        if record["spec"]["kind"] != "decoding":
            joined.append(record)
    return joined


def _same(one: Mapping[str, Any], other: Mapping[str, Any], apart: Iterable[str]) -> bool:
    """Return whether two specs are the same but for some settings."""
    return all(one.get(name) == other.get(name) for name in (one.keys() | other.keys()) - set(apart))


def _family(record: Record) -> str:
    """Return the family of a run's arm; that of an untrained model is "none"."""
    return arms.get(record["spec"]["arm"]).family if "arm" in record["spec"] else "none"


def _run_of(record: Record) -> str:
    return canonical_json({name: value for name, value in record["spec"].items() if name not in _OF_DECODING})


def _joined(record: Record, found: Record) -> Record:
    spec, digest = found["spec"], record.get("digest", record["spec"]["base_digest"])
    made = f"the decoding record {found['spec_hash']} has"
    own = spec["digest"] == digest and spec["samples"] == _SAMPLES
    wanted = f"its run ended with {digest}: it needs {_SAMPLES} samples of the run's own weights, make it again"
    require(own, f"{made} {spec['samples']} samples of weights {spec['digest']}, {wanted}")
    known = record.get("decoded", {})
    at = known.get("validation_at", {})
    if "at_step" in spec:
        at = at | {spec["at_step"]: found["validation_at_step"]}
    decoded = {"validation": known.get("validation", {}) | found.get("validation", {}), "validation_at": at}
    joined = {"test": record["test"] | found["test"], "decoded": decoded}
    if "curve" in found:
        same = found["curve"]["step"] == record["curve"]["step"]
        require(same, f"{made} a curve at other steps than its run: make it again")
        joined["curve"] = record["curve"] | found["curve"]
    return record | joined


def _frozen(run: Record, base: Record) -> Record:
    """Return a run that spent what another did and stayed at its start."""
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


def _replicates(chosen: list[Record], unit: str, context: str) -> list[Record]:
    """Return runs sorted by unit. Raises ValueError where they differ in anything else, or have a unit twice."""
    n, units = len(chosen), [record["spec"].get(unit) for record in chosen]
    if chosen and all(unit not in record["spec"] for record in chosen):
        require(n == 1, f"{context}: {n} records without {unit!r}: select one by its spec")
        return chosen
    twice = f"two records of one {unit} among {sorted(map(str, units))}"
    require(len(set(units)) == n, f"{context}: {twice}: select by their specs")
    first = _settings_of(chosen[0]) if chosen else {}
    for record in chosen:
        own = _settings_of(record)
        differing = sorted(f for f in own.keys() | first.keys() if f != unit and own.get(f) != first.get(f))
        require(not differing, f"{context}: runs differ in {', '.join(differing)}: name its value in the claim's arms")
    return sorted(chosen, key=lambda record: record["spec"][unit])


def _settings_of(record: Record) -> Mapping[str, Any]:
    """Return the spec of a run; where it goes on from another run, that one's settings in the place of its weights."""
    spec = record["spec"]
    return spec | {"start": spec["start"]["run"]} if "start" in spec else spec


def _tuned(records: Sequence[Record], run: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, float] | str:
    """Return the setting that won the sweep from which a run's is taken, or say what the sweep lacks.

    The sweep: runs of the arm's sweep with the seed of sweeps and without test set, which otherwise differ from the run
    in the setting, in their length and in how often they were evaluated.
    """
    arm, names = arms.get(run["arm"]).sweep, arms.swept(run["arm"])
    base = run["base"] if setting["base"] == "own" else setting["base"]
    apart = ("base_digest", "steps", "curve_points", "curve_spacing", "validation_problems", *names)
    of_sweep = {field: value for field, value in run.items() if field not in apart}
    of_sweep |= {"arm": arm, "base": base, "seed": arms.SWEEP_SEED, "test_problems": 0}
    own = arms.get(run["arm"])
    of_sweep |= dict.fromkeys({*own.settings, *own.optional} - {*arms.get(arm).settings, *apart})
    made = [record for record in records if matches(record, of_sweep)]
    found = {tuple(record["spec"][name] for name in names): record for record in made}
    sweep, best_of = f"the sweep of {arm_words(arm)} on {base}", setting["best_of"]
    counted = f"{sweep} has {len(made)} runs of {len(found)} settings where {best_of} were declared, one run each"
    require(len(made) == len(found) <= best_of, f"{counted}: the best of more is another rule")
    declared = [tuple(choice[name] for name in names) for choice in setting.get("among", {}).get(arm, ())]
    others = sorted(found.keys() - set(declared)) if declared else []
    has = f"{sweep} has {' and '.join(names)} {', '.join(map(str, others))}"
    require(not others, f"{has}, which the claim does not declare among its settings: take them out, or declare them")
    if len(made) < best_of:
        return f"{sweep} has {len(made)} of {best_of} settings"
    # in the order of the settings: of equal scores the first wins
    return arms.ranked([found[values] for values in sorted(found)])[0][1]


def committed_records(scale: str = "tiny") -> list[Record]:
    """Return the committed records of a scale, notebook by notebook, without a torn last line.

    Raises ValueError for a damaged or edited line (`records.read_records`), for a spec that has two records, and for
    one that does not say its kind and scale.
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
