"""Quantities that compare weights: of displacements, merged models, lines between models, and coverage.

A side of a comparison is built from the training runs of an arm: the end of each run, means of several runs, or runs
shrunk to the length of such a mean. Each of these models has its own record (kinds "products", "merge", "path",
"noise" and "coverage"), found by the digests of the runs' weights. A new quantity is an entry in `QUANTITIES`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import attenuation, connectivity, coverage, geometry, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.checks import require
from evoalign_lib.files import canonical_json
from evoalign_study import displacements, forgetting, path_points
from evoalign_study.claims.checks import check
from evoalign_study.claims.findings import Undecided, decoding_words, defined, mean_interval
from evoalign_study.claims.selection import Evidence, Record
from evoalign_study.path_points import Model, model_of
from evoalign_study.records import accuracy_matrix, unpack_bits, unpack_probabilities

Array = NDArray[np.float64]


class Side(NamedTuple):
    """One side of a comparison, with the runs that it is built from."""

    arm: str
    """An arm of the claim."""
    mean: int = 1
    """Runs averaged into each model: those of the arm in the order of their seeds, each used once."""
    shrunk: int = 0
    """Each run is shrunk to the length of the mean of this many runs; 0: it keeps its length."""
    runs: Sequence[Record] = ()
    """The runs, sorted by seed."""
    evidence: Evidence | None = None
    """The evidence that holds the runs' measurements."""
    decoding: str = ""
    """The decoding under which they are compared."""

    @property
    def words(self) -> str:
        """How the models are made from the arm's runs; empty if the runs are used as they are."""
        if self.shrunk:
            return f"shrunk to the mean of {self.shrunk}"
        return f"mean of {self.mean}" if self.mean > 1 else ""

    def models(self) -> list[Model | None]:
        """Return the models of the side, in the order of the seeds; None: the untrained base, as a null."""
        digests, size = [run["digest"] for run in self.runs], max(self.mean, self.shrunk)
        if None in digests:
            return [None] * len(digests)
        means = [tuple(digests[i : i + size]) for i in range(0, len(digests) - size + 1, size)]
        if self.shrunk:
            return [Model((digest,), mean) for digest, mean in zip(digests, means, strict=False)]
        return [Model(mean) for mean in means]


def side_of(declared: str | Mapping[str, Any]) -> Side:
    """Return a side from its declaration: the name of an arm, or a mapping that also has `mean` or `shrunk`."""
    return Side(declared) if isinstance(declared, str) else Side(**declared)


def check_side(arm: tuple[str, ...], where: str, declared: str | Mapping[str, Any]) -> None:
    """Raise ValueError if the declaration of a side is malformed."""
    if isinstance(declared, str):
        check(where, declared, arm)
        return
    check(where, declared, {"arm": arm, "mean?": int, "shrunk?": int})
    side = side_of(declared)
    one = side.mean >= 1 and side.shrunk >= 0 and not (side.mean > 1 and side.shrunk)
    require(one, f"{where}: side {dict(declared)}: declare either a mean of runs or by how many to shrink each")


_Read = Callable[[Sequence[Record], str], Any]
"""Reads one number per model from the records, (models,), or right answers, (models, problems), under a decoding."""
_Find = Callable[[Sequence[Side]], Interval]
_Count = Callable[[Side], Sequence[Any]]


def _measured_alike(evidence: Evidence, kind: str) -> list[Record]:
    """Return the records of a kind; for coverage, only those with the most common settings."""
    records = evidence.having("kind", kind)
    if kind != "coverage":
        return records
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[canonical_json(record["spec"] | {"end": None})].append(record)
    return max(groups.values(), key=len, default=[])


def _records(kind: str, side: Side) -> list[Record]:
    """Return the records of a kind for the models of a side; models without a record are left out."""

    def by_model() -> dict[Model | None, Record]:
        specs = [(record["spec"], record) for record in _measured_alike(side.evidence, kind)]
        return {model_of(spec if kind == "merge" else spec.get("end")): record for spec, record in specs}

    known = side.evidence.once(kind, by_model)
    return [known[model] for model in side.models() if model in known]


_merged, noisy, covered = (partial(_records, kind) for kind in ("merge", "noise", "coverage"))


# ---- displacements


def _displaced(side: Side) -> list[Record]:
    """Return the runs of a side with recorded inner products."""
    blocks = [r["spec"][block]["digests"] for r in side.evidence.having("kind", "products") for block in ("a", "b")]
    known = {digest for digests in blocks for digest in digests}
    return [run for run in side.runs if run.get("digest") in known]


def _displacements(*sides: Side) -> geometry.Displacements:
    """Return the inner products of all runs of the sides, by layer, in the order of the runs."""
    runs = [run for side in sides for run in side.runs]
    return defined(displacements.recorded, sides[0].evidence.having("kind", "products"), runs)


def norms_over_walk(moved: geometry.Displacements, runs: Sequence[Record]) -> Array:
    """Return each ES run's norm over alpha sqrt(d T / N), T without tied steps; NaN if the run never moved."""
    walks = []
    for run in runs:
        spec, tied = run["spec"], run["counts"]["tied"]
        walks.append(geometry.es_norm(spec["alpha"], moved.d, spec["steps"] - tied, spec["population_size"]))
    with np.errstate(invalid="ignore"):  # a run that never moved: 0 / 0
        return np.sqrt(np.diagonal(moved.total)) / walks


def head_shares(moved: geometry.Displacements) -> Array:
    """Return the head's share of each run's squared displacement, divided by its share of the weights.

    If head and embedding are tied, the embedding is used. Raises Undecided if there is no head.
    """
    rows = [row for row, name in enumerate(moved.names) if name in ("head", "embedding (tied)")]
    if not rows:
        raise Undecided("there is no head")
    return moved.shares[rows[0]] / moved.size_shares[rows[0]]


def unevenness(moved: geometry.Displacements) -> list[float]:
    """Return the total variation between the layers' shares of each run's squared displacement and of the weights."""
    return [geometry.total_variation(shares, moved.size_shares) for shares in moved.shares.T]


def unmoved(moved: geometry.Displacements, dtype: str) -> Array:
    """Return the share of each run's weights that equal the base's, both rounded to dtype."""
    return (moved.unmoved(dtype) * moved.entries[:, None]).sum(0) / moved.d


def _joint(sides: Sequence[Side]) -> tuple[Array, Array, Array]:
    """Return the inner products of the runs of two sides, and the rows of each side."""
    gram = _displacements(*sides).total
    return gram, *np.split(np.arange(len(gram)), [len(sides[0].runs)])


def _cosine(sides: Sequence[Side]) -> Interval:
    gram, a, b = _joint(sides)
    norms = np.sqrt(np.diagonal(gram))
    return stats.crossed_bootstrap((gram / np.outer(norms, norms))[np.ix_(a, b)], **_resampled(sides))


def _corrected_cosine(sides: Sequence[Side]) -> Interval:
    cosine = attenuation.corrected_cosine(*_joint(sides)).value
    return _unless_nan(cosine, "an arm's runs have nothing in common that can be told from 0")


def _common_share(sides: Sequence[Side]) -> Interval:
    return attenuation.signal(_displacements(*sides).total).share


# ---- lines


def _lines(first: Side | None, last: Side) -> list[tuple[Record, bool]]:
    """Return the path records between paired models, as far as there are any, and whether they run backwards.

    first: the side where the lines begin; None: they begin at the base.
    """
    records, ends = last.evidence.having("kind", "path"), last.models()
    known = last.evidence.once("path", lambda: path_points.by_ends(records))
    begins = first.models() if first else [None] * len(ends)
    pairs = [pair for pair in zip(begins, ends, strict=False) if pair[0] != pair[1]]
    return [(known[key], key != pair) for pair in pairs for key in (pair, pair[::-1]) if key in known]


def _errors(lines: Iterable[tuple[Record, bool]], decoding: str) -> Array:
    """Return the errors (pairs, problems, points) along lines, all in the same direction."""
    every = [path_points.errors([record], decoding)[:, :, :: -1 if backwards else 1] for record, backwards in lines]
    return np.concatenate(every)


def _barrier(sides: Sequence[Side]) -> Interval:
    """Return the barrier of the mean curve over the line between its ends; its interval reaches to `upper_bound`."""
    errors = _errors(_lines(*sides), sides[0].decoding)
    barrier = path_points.mean_barrier(errors, **_resampled(sides, 1000))
    return replace(barrier.interval, high=max(barrier.interval.high, connectivity.upper_bound(barrier)), n=len(errors))


def _half_gain(sides: Sequence[Side]) -> Interval:
    """Return where on the line from the base half of the gain is reached; for two sides, the difference."""
    rewards, *baseline = [1 - _errors(_lines(None, side), side.decoding) for side in sides]
    other = baseline[0] if baseline else None
    place = connectivity.half_gain_interval(rewards, baseline=other, monotone=True, **_resampled(sides, 1000))
    return _unless_nan(place, "an arm has no gain along its lines")


# ---- numbers of merged models, and of models under noise


def skills(models: Sequence[Record], what: str) -> Array:
    """Return each model's mean over unrewarded skills: "greedy" accuracy, or "kl" from the base in nats."""
    return np.array([np.mean([skill[what] for skill in model["skills"].values()]) for model in models])


def _pairs(side: Side) -> list[tuple[Record, Record]]:
    """Return the runs of a side, each with the model of the other runs' mean and a fresh walk that is as long."""

    def by_run() -> dict[str, Record]:
        merged = [record for record in side.evidence.having("kind", "merge") if "walk" in record["spec"]]
        merged.sort(key=lambda record: len(record["spec"]["of"]["digests"]))  # of most others, if seeds were added
        return {record["spec"]["as_long_as"]["digests"][0]: record for record in merged}

    known, greedy = side.evidence.once("walk", by_run), side.decoding == "greedy"
    runs = [run for run in side.runs if greedy or f"{side.decoding}_counts" in run["test"]]
    return [(run, known[run["digest"]]) for run in runs if run["digest"] in known]


def _own_part(sides: Sequence[Side]) -> Interval:
    """Return how much more often runs are right than these models; each run is resampled with its own."""
    pairs, decoding = _pairs(sides[0]), sides[0].decoding
    runs, models = (accuracy_matrix(each, decoding) for each in zip(*pairs, strict=True))
    return stats.crossed_bootstrap(runs - models, **_resampled(sides))


def _pruned(side: Side) -> list[Record]:
    """Return the records of the runs of a side without parts of what they moved."""
    known = {record["spec"]["of"]["digests"][0]: record for record in side.evidence.having("kind", "pruned")}
    return [known[run["digest"]] for run in side.runs if run["digest"] in known]


def _lost(name: str, sides: Sequence[Side]) -> Interval:
    """Return how much less often runs are right without a part; each is resampled with itself."""
    side = sides[0]
    whole, left = ([record["models"][each] for record in _pruned(side)] for each in ("whole", name))
    apart = accuracy_matrix(whole, side.decoding) - accuracy_matrix(left, side.decoding)
    return stats.crossed_bootstrap(apart, **_resampled(sides))


def _forgotten(sides: Sequence[Side]) -> Interval:
    """Return what runs lost of earlier tasks; of ES, less what a walk of the same steps lost (`forgetting`)."""

    def lost(side: Side) -> list[float]:
        spec = side.runs[0]["spec"]  # GRPO has no alpha, and so no walk
        names = ("base", "order", "steps", "population_size", "alpha", "sigma")
        walks = [
            r for r in side.evidence.having("arm", "es_random") if all(r["spec"].get(n) == spec.get(n) for n in names)
        ]
        walks.sort(key=lambda run: run["spec"]["seed"])
        own, of_walk = ([forgetting.forgotten(run, side.decoding) for run in each] for each in (side.runs, walks))
        return [a - b for a, b in zip(own, of_walk, strict=False)] if walks else own

    return mean_interval([np.array(lost(side)) for side in sides], sides[0].evidence.resamples)


def _kept(part: str, records: Sequence[Record], decoding: str) -> Array:
    """Return the share of its accuracy that each model keeps under noise, as the mean over draws and sigmas."""
    clean, left = ([np.mean(record[block][decoding]) for record in records] for block in ("clean", part))
    if 0 in clean:
        raise Undecided("a model has no accuracy to keep")
    return np.divide(left, clean)


# ---- problems that a model solves within several samples


def _reached(record: Record, decoding: str) -> Array:
    """Return the chance that one sample for each problem is right, at the temperature of a decoding.

    If no decoding is given, the record's own temperature is used: the one with the highest validation pass@64.
    """
    at = decoding or coverage.own_temperature(record["validation"])
    if at not in record["reach"]:
        raise Undecided(f"a sampled temperature is needed, and {decoding_words(at)} is none of them")
    return unpack_probabilities(record["reach"][at])


def _greedy(records: Iterable[Record]) -> Array:
    return np.array([unpack_bits(record["greedy_bits"], record["n"]) for record in records], np.float64)


def _base_of(evidence: Evidence) -> Record:
    """Return the coverage record of the base."""
    for record in evidence.once("alike", lambda: _measured_alike(evidence, "coverage")):
        if "end" not in record["spec"]:
            return record
    raise Undecided("the base was not measured in the same way")


def base_chances(evidence: Evidence, decoding: str) -> Array:
    """Return the chance that one sample of the base is right, (problems,). Raises Undecided as `chances` does."""
    return _reached(_base_of(evidence), decoding)


def chances(records: Sequence[Record], decoding: str) -> Array:
    """Return the chance that one answer of each model to each problem is right, (models, problems).

    For greedy answers it is 0 or 1. Raises Undecided if a temperature was not measured.
    """
    return _greedy(records) if decoding == "greedy" else np.array([_reached(record, decoding) for record in records])


def _support_change(sides: Sequence[Side]) -> Interval:
    """Return the net change of support from the base, averaged over runs; for two sides, the difference."""
    base = base_chances(sides[0].evidence, sides[0].decoding)
    runs, *other = [np.array([_reached(record, side.decoding) for record in covered(side)]) for side in sides]
    change = coverage.support_change(base, runs, coverage.SOLVED_WITHIN, *other, **_resampled(sides))
    return _unless_nan(change, "neither the base nor a run solves a problem")


def _gain(sides: Sequence[Side]) -> Interval:
    """Return the accuracy of runs minus that of their base on the same problems, greedily if no decoding is given."""
    decoding = sides[0].decoding or "greedy"
    runs, start = (chances(each, decoding) for each in (covered(sides[0]), [_base_of(sides[0].evidence)]))
    return stats.crossed_bootstrap(runs, np.repeat(start, len(runs), 0), **_resampled(sides))


def _solved(within: int) -> _Read:
    """Make a reader of the chance that each model solves each problem within this many samples."""
    return lambda records, decoding: coverage.pass_at(chances(records, decoding), within)


# ---- the registry


def _resampled(sides: Sequence[Side], most: int = 10**9) -> dict[str, int]:
    return {"n_resamples": min(most, sides[0].evidence.resamples)}


def _unless_nan(interval: Interval, why: str) -> Interval:
    if math.isnan(interval.low):
        raise Undecided(why)
    return interval


@dataclass(frozen=True)
class Quantity:
    """A quantity of one side, or a difference between two."""

    words: str
    """Its name in labels."""
    measured: _Count | None
    """Returns the models of a side that were measured; None: lines between the models of two sides are counted."""
    find: _Find
    """Computes its value with a 95 % interval. Raises Undecided if it is not defined."""
    sides: tuple[int, ...] = (1, 2)
    """How many sides it may have."""
    decoded: bool = False
    """Whether it depends on how completions are decoded."""
    sampled: bool = False
    """Whether it needs samples, so that it is skipped under greedy decoding."""
    unit: str = ""
    """"points", "ratio" (the value is a difference of logarithms), or empty."""
    equal_pairs: float | None = None
    """Of a quantity of pairs of runs, the value between two equal arms; None: arms are compared by their runs."""

    def units(self, sides: Sequence[Side]) -> list[int]:
        """Return how many models of each side were measured, or how many lines between both."""
        if self.measured is None:
            return [len(_lines(*sides))]
        return [len(self.measured(side)) for side in sides]


def _of_each(words: str, measured: _Count, read: _Read, **options: Any) -> Quantity:
    """Make a quantity from a reader of each model's record."""

    def find(sides: Sequence[Side]) -> Interval:
        return mean_interval([read(measured(side), side.decoding) for side in sides], sides[0].evidence.resamples)

    return Quantity(words, measured, find, **options)


def _of_runs(words: str, read: Callable[[geometry.Displacements, Sequence[Record]], Any], **options: Any) -> Quantity:
    """Make a quantity from one number per run, read from the inner products of a side."""

    def find(sides: Sequence[Side]) -> Interval:
        return mean_interval([read(_displacements(side), side.runs) for side in sides], sides[0].evidence.resamples)

    return Quantity(words, _displaced, find, **options)


_TWO, _POINTS, _RATIO = {"sides": (2,)}, {"unit": "points"}, {"unit": "ratio", "sides": (2,)}
_DECODED = {"decoded": True}
_RIGHT = _DECODED | _POINTS
_WITHIN = coverage.SOLVED_WITHIN


def _of_sequences(words: str, read: Callable[[Record, str], float]) -> Quantity:
    return _of_each(words, lambda side: side.runs, lambda runs, d: np.array([read(r, d) for r in runs]), **_RIGHT)


QUANTITIES: dict[str, Quantity] = {
    "norm": _of_runs("norm of the displacement", lambda moved, _: np.log(np.diagonal(moved.total)) / 2, **_RATIO),
    "norm_over_walk": _of_runs("norm over that of a walk", norms_over_walk),
    "unevenness": _of_runs("distance of the layers' shares from their sizes'", lambda m, _: unevenness(m)),
    "head": _of_runs("the head's share over its size's", lambda m, _: head_shares(m)),
    "unmoved_float32": _of_runs("weights that stay, float32", lambda m, _: unmoved(m, "float32"), **_POINTS),
    "unmoved_bfloat16": _of_runs(
        "weights that stay, rounded to bfloat16", lambda m, _: unmoved(m, "bfloat16"), **_POINTS
    ),
    "cosine": Quantity("cosine of two runs", _displaced, _cosine, **_TWO, equal_pairs=1.0),
    "corrected_cosine": Quantity(
        "cosine of what runs have in common", _displaced, _corrected_cosine, **_TWO, equal_pairs=1.0
    ),
    "common_share": Quantity("share of a run's squared norm that all have", _displaced, _common_share, (1,)),
    "accuracy": _of_each("test", _merged, accuracy_matrix, **_RIGHT),
    "own_part": Quantity(
        "accuracy - that of the other runs' mean with a fresh walk as long", _pairs, _own_part, (1,), **_RIGHT
    ),
    "skills_accuracy": _of_each("accuracy on other skills", _merged, lambda r, _: skills(r, "greedy"), **_POINTS),
    "skills_kl": _of_each("KL on other skills", _merged, lambda r, _: skills(r, "kl")),
    "skills_kl_ratio": _of_each("KL on other skills", _merged, lambda r, _: np.log(skills(r, "kl")), **_RATIO),
    "forgotten": Quantity("loss of earlier tasks, less a walk's", lambda side: side.runs, _forgotten, **_RIGHT),
    "lost": _of_sequences("loss of earlier tasks", forgetting.forgotten),
    "learned": _of_sequences("accuracy on a task right after its turn", forgetting.learned),
    "last": _of_sequences("accuracy on all tasks at the end", lambda run, d: forgetting.matrix(run, d)[-1].mean()),
    "off_law": _of_each(
        "largest distance of a norm from its law, after any task",
        lambda side: [run for run in side.runs if forgetting.knows_ties(run)],
        lambda runs, _: np.array([np.abs(forgetting.norms_over_law(run) - 1).max() for run in runs]),
    ),
    "barrier": Quantity("barrier of the error", None, _barrier, **_TWO, **_RIGHT, equal_pairs=0.0),
    "clean": _of_each("accuracy without noise", noisy, lambda records, d: [r["clean"][d] for r in records], **_RIGHT),
    "kept_isotropic": _of_each("accuracy kept under isotropic noise", noisy, partial(_kept, "isotropic"), **_RIGHT),
    "kept_relative": _of_each("accuracy kept under relative noise", noisy, partial(_kept, "relative"), **_RIGHT),
    "support_change": Quantity("net change of support", covered, _support_change, **_DECODED),
    "support_change_own": Quantity("net change of support, each at its own temperature", covered, _support_change),
    "gain": Quantity("gain of greedy accuracy", covered, _gain, (1,), **_POINTS),
    "gain_decoded": Quantity("gain of right answers", covered, _gain, (1,), **_RIGHT),
    "right": _of_each("right answers", covered, _solved(1), **_RIGHT),
    "solved": _of_each(f"solved within {_WITHIN} samples", covered, _solved(_WITHIN), sampled=True, **_RIGHT),
    "half_gain": Quantity("place of half the gain", partial(_lines, None), _half_gain, **_DECODED),
}
"""Quantities that a rule of kind "weights" may compare, by the name that declares them."""

_PARTS = {"smallest": "of the smallest weights", "random": "of random weights", "mean": "replaced by other runs' mean"}
for _how, _share in product(_PARTS, (78, 93)):
    _words = f"accuracy lost with {_share} % {_PARTS[_how]}" + ("" if _how == "mean" else " set back")
    QUANTITIES[f"lost_{_how}_{_share}"] = Quantity(_words, _pruned, partial(_lost, f"{_how}_{_share}"), (1,), **_RIGHT)
