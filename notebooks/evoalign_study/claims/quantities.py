"""What a comparison of weights may take: of displacements, of merged models, of lines, of coverage.

A side of a comparison is made of the training runs of an arm: where each run ended, the means of several runs, a run
shrunk to the length of such a mean, or a random direction of a run's norms. Each model so named has a record of its own
(kinds "products", "merge", "path", "noise" and "coverage"), found by the digests of the runs' weights. A new quantity
is an entry in `QUANTITIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import attenuation, connectivity, coverage, geometry, gram_matrix, stats
from evoalign_lib.analysis.arrays import require
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.files import canonical_json
from evoalign_study import path_points
from evoalign_study.claims.checks import check
from evoalign_study.claims.findings import Undecided, decoding_words, defined
from evoalign_study.claims.selection import Evidence, Record
from evoalign_study.path_points import Model, model_of
from evoalign_study.records import accuracy_matrix, unpack_bits, unpack_probabilities

Array = NDArray[np.float64]


class Side(NamedTuple):
    """One side of a comparison."""

    arm: str
    """Of the claim."""
    mean: int = 1
    """Runs whose mean a model is: those of the arm in the order of their seeds, each in one mean."""
    shrunk: int = 0
    """Runs as short as whose mean each run is made; 0: it keeps its length."""
    random: bool = False
    """A random direction with the run's norm in each tensor instead of the run."""

    @property
    def words(self) -> str:
        """What is made of the arm's runs; empty where they are taken as they are."""
        if self.random:
            return "as a random direction"
        if self.shrunk:
            return f"shrunk to the mean of {self.shrunk}"
        return f"mean of {self.mean}" if self.mean > 1 else ""


class Chosen(NamedTuple):
    """A side with the runs that it is made of, sorted by seed."""

    side: Side
    runs: Sequence[Record]

    def models(self) -> list[Model | None]:
        """Return the models of the side, in the order of the seeds; None: the untrained base, in the place of runs."""
        digests = [run["digest"] for run in self.runs]
        if None in digests:
            return [None] * len(digests)
        each, size = self.side, max(self.side.mean, self.side.shrunk)
        means = [tuple(digests[i : i + size]) for i in range(0, len(digests) - size + 1, size)]
        if each.shrunk:
            return [Model((digest,), mean) for digest, mean in zip(digests, means, strict=False)]
        if each.random:
            seeds = [run["spec"]["seed"] for run in self.runs]
            return [Model((digest,), draw=seed) for digest, seed in zip(digests, seeds, strict=True)]
        return [Model(mean) for mean in means]


def side_of(declared: str | Mapping[str, Any]) -> Side:
    """Return a side as a claim declares it: the name of an arm, or a mapping of the fields of `Side`."""
    return Side(declared) if isinstance(declared, str) else Side(**declared)


def check_side(arm: tuple[str, ...], where: str, declared: str | Mapping[str, Any]) -> None:
    """Raise ValueError where a side is not well declared."""
    if isinstance(declared, str):
        check(where, declared, arm)
        return
    check(where, declared, {"arm": arm, "mean?": int, "shrunk?": int, "random?": bool})
    side = side_of(declared)
    one = side.mean >= 1 and side.shrunk >= 0 and (side.mean > 1) + bool(side.shrunk) + side.random <= 1
    require(one, f"{where}: side {dict(declared)}: take a mean of runs, or shrink each, or draw a direction")


_Read = Callable[[Evidence, Chosen, str], Array]
"""Reads one number per model of a side, under a decoding."""
_Find = Callable[[Evidence, Sequence[Chosen], str], Interval]
_Units = Callable[[Evidence, Sequence[Chosen]], list[int]]


def _records(kind: str) -> Callable[[Evidence, Chosen], list[Record]]:
    """Read the records of a kind of those models of a side that have one."""

    def by_model(evidence: Evidence) -> dict[Model | None, Record]:
        specs = [(record["spec"], record) for record in _measured_alike(evidence, kind)]
        return {model_of(spec if kind == "merge" else spec.get("end")): record for spec, record in specs}

    def read(evidence: Evidence, side: Chosen) -> list[Record]:
        found = evidence.once(kind, partial(by_model, evidence))
        return [found[model] for model in side.models() if model in found]

    return read


def _measured_alike(evidence: Evidence, kind: str) -> list[Record]:
    """Return the records of a kind; those of coverage with the settings that most of them have."""
    records = evidence.having("kind", kind)
    if kind != "coverage":
        return records
    groups: dict[str, list[Record]] = {}
    for record in records:
        settings = {name: value for name, value in record["spec"].items() if name != "end"}
        groups.setdefault(canonical_json(settings), []).append(record)
    return max(groups.values(), key=len, default=[])


def _counted(read: Callable[[Evidence, Chosen], Sequence[Any]]) -> _Units:
    """Count how many models of each side were measured."""
    return lambda evidence, sides: [len(read(evidence, side)) for side in sides]


_merged, _noisy, _covered = map(_records, ("merge", "noise", "coverage"))
with_coverage = _counted(_covered)
"""How many models of each side have a record of what they can solve."""


# ---- displacements


def _displaced(evidence: Evidence, side: Chosen) -> list[Record]:
    """Return the runs of a side that have products."""
    blocks = [r["spec"][block]["digests"] for r in evidence.having("kind", "products") for block in ("a", "b")]
    known = {digest for digests in blocks for digest in digests}
    return [run for run in side.runs if run.get("digest") in known]


def _displacements(evidence: Evidence, *sides: Chosen) -> geometry.Displacements:
    """Return the products of all runs of the sides, by layer, in their order."""
    runs = [run for side in sides for run in side.runs]
    return defined(gram_matrix.gram, evidence.having("kind", "products"), runs)


_Displaced = Callable[[geometry.Displacements, Sequence[Record]], Any]
"""Reads one number per run from the products of a side."""


def _log_norms(found: geometry.Displacements, runs: Sequence[Record]) -> Array:
    return np.log(np.diagonal(found.total)) / 2


def _norms_over_walk(found: geometry.Displacements, runs: Sequence[Record]) -> Array:
    walks = []
    for run in runs:
        spec = run["spec"]
        steps = spec["steps"] - run["counts"]["tied"]
        walks.append(geometry.es_norm(spec["alpha"], found.d, steps, spec["population_size"]))
    with np.errstate(invalid="ignore"):  # a run that stood still: 0 / 0
        return np.sqrt(np.diagonal(found.total)) / walks


def _unevenness(found: geometry.Displacements, runs: Sequence[Record]) -> list[float]:
    return [geometry.total_variation(shares, found.size_shares) for shares in found.shares.T]


def _head(found: geometry.Displacements, runs: Sequence[Record]) -> Array:
    rows = [row for row, name in enumerate(found.names) if name in ("head", "embedding (tied)")]
    if not rows:
        raise Undecided("there is no head")
    return found.shares[rows[0]] / found.size_shares[rows[0]]


def _unmoved(dtype: str) -> _Displaced:
    return lambda found, runs: (found.unmoved(dtype) * found.entries[:, None]).sum(0) / found.d


def _rows(*sides: Chosen) -> list[list[int]]:
    ends = np.cumsum([0, *(len(side.runs) for side in sides)]).tolist()
    return [list(range(first, last)) for first, last in zip(ends, ends[1:], strict=False)]


def _cosine(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    gram, (a, b) = _displacements(evidence, *sides).total, _rows(*sides)
    norms = np.sqrt(np.diagonal(gram))
    return stats.crossed_bootstrap((gram / np.outer(norms, norms))[np.ix_(a, b)], n_resamples=evidence.resamples)


def _corrected_cosine(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    found = attenuation.corrected_cosine(_displacements(evidence, *sides).total, *_rows(*sides)).value
    if math.isnan(found.low):
        raise Undecided("an arm's runs have nothing in common that can be told from 0")
    return found


def _common_share(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    return attenuation.signal(_displacements(evidence, *sides).total).share


# ---- merged models


def _skills(name: str) -> Callable[[Record], float]:
    return lambda record: float(np.mean([skill[name] for skill in record["skills"].values()]))


def _accuracy(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    matrices = [accuracy_matrix(_merged(evidence, side), decoding) for side in sides]
    return stats.crossed_bootstrap(*matrices, n_resamples=evidence.resamples)


# ---- lines


def _lines(evidence: Evidence, first: Sequence[Model | None], last: Sequence[Model]) -> list[tuple[Record, bool]]:
    """Return the path records between models, pair by pair, where there are any, and whether they run backwards."""
    found = evidence.once("path", lambda: path_points.by_ends(evidence.having("kind", "path")))
    pairs = list(zip(first, last, strict=False))
    return [
        (found[key], key != pair) for pair in pairs for key in (pair, pair[::-1]) if key in found and pair[0] != pair[1]
    ]


def _errors(lines: Iterable[tuple[Record, bool]], decoding: str) -> Array:
    """Return the errors (pairs, problems, points) along lines, all in one direction."""
    every = [path_points.errors([record], decoding)[:, :, :: -1 if backwards else 1] for record, backwards in lines]
    return np.concatenate(every)


def _barrier(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    """Return the height of the mean curve over the line between its ends, its upper end that of `upper_bound`."""
    errors = _errors(_lines(evidence, *(side.models() for side in sides)), decoding)
    outcomes = np.full((len(errors), len(errors), *errors.shape[1:]), np.nan)
    outcomes[np.arange(len(errors)), np.arange(len(errors))] = errors
    resamples = min(1000, evidence.resamples)
    found = connectivity.estimate_barrier(outcomes, across="curve", n_resamples=resamples)
    high = max(found.interval.high, connectivity.upper_bound(found))
    return Interval(found.interval.value, found.interval.low, high, len(errors))


def _half_gain(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    """Return where on the line from the base half of the gain lies, or the difference of two sides."""
    rewards = [1 - _errors(_from_base(evidence, side), decoding) for side in sides]
    baseline = rewards[1] if len(rewards) > 1 else None
    resamples = min(1000, evidence.resamples)
    found = connectivity.half_gain_interval(rewards[0], baseline=baseline, monotone=True, n_resamples=resamples)
    if math.isnan(found.low):
        raise Undecided("an arm has no gain along its lines")
    return found


# ---- noise on the weights


def _clean(records: Sequence[Record], decoding: str) -> list[float]:
    return [record["clean"][decoding] for record in records]


def _kept(part: str) -> Callable[[Sequence[Record], str], Array]:
    """Read the share of a model's accuracy that it keeps under noise, the mean over draws and sigmas."""

    def read(records: Sequence[Record], decoding: str) -> Array:
        clean, left = ([np.mean(r[block][decoding]) for r in records] for block in ("clean", part))
        if 0 in clean:
            raise Undecided("a model has no accuracy to keep")
        return np.divide(left, clean)

    return read


# ---- what a model can solve within some samples


def _reached(record: Record, decoding: str) -> Array:
    """Return the chances that one sample of each problem is right, at the temperature of a decoding.

    Where none is given, at the record's own: that of the highest pass@64 on the validation set.
    """
    at = decoding or coverage.own_temperature(record["validation"])
    if at not in record["reach"]:
        raise Undecided(f"a sampled temperature is needed, and {decoding_words(at)} is none of them")
    return unpack_probabilities(record["reach"][at])


def _support_change(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    """Return the net change of support against the base, the mean over runs, or the difference of two sides."""
    records = [_covered(evidence, side) for side in sides]
    base = _reached(_base_of(evidence), decoding)
    runs = [np.array([_reached(record, decoding) for record in side]) for side in records]
    found = coverage.support_change(base, runs[0], coverage.SOLVED_WITHIN, *runs[1:], n_resamples=evidence.resamples)
    if math.isnan(found.low):
        raise Undecided("neither the base nor a run solves a problem")
    return found


def _base_of(evidence: Evidence) -> Record:
    """Return what the base can solve."""
    for record in evidence.once("alike", lambda: _measured_alike(evidence, "coverage")):
        if "end" not in record["spec"]:
            return record
    raise Undecided("the base was not measured in the same way")


def _gain(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    """Return the greedy accuracy of runs - that of their base, on the same problems."""
    (records,) = (_covered(evidence, side) for side in sides)
    runs, start = (
        np.array([unpack_bits(record["greedy_bits"], record["n"]) for record in found], np.float64)
        for found in (records, [_base_of(evidence)])
    )
    return stats.crossed_bootstrap(runs, np.repeat(start, len(runs), 0), n_resamples=evidence.resamples)


def _solved(within: int) -> _Find:
    """Make a quantity of the share of problems that runs solve within some samples, or of greedy answers."""

    def find(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
        runs = [chances(evidence, side, decoding) for side in sides]
        return stats.crossed_bootstrap(
            *(coverage.pass_at(each, within) for each in runs), n_resamples=evidence.resamples
        )

    return find


def chances(evidence: Evidence, side: Chosen, decoding: str) -> Array:
    """Return the chance that one answer of each model of a side to each problem is right, (models, problems).

    Greedy answers are right or not. Raises Undecided where a temperature was not measured.
    """
    found = _covered(evidence, side)
    if decoding == "greedy":
        return np.array([unpack_bits(record["greedy_bits"], record["n"]) for record in found], np.float64)
    return np.array([_reached(record, decoding) for record in found])


def base_chances(evidence: Evidence, decoding: str) -> Array:
    """Return the chance that one sample of the base is right, (problems,). Raises Undecided as `chances`."""
    return _reached(_base_of(evidence), decoding)


# ---- the registry


def _between(read: _Read) -> _Find:
    """Make a quantity of one number per model: its mean, or the difference of the means of two sides."""

    def find(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
        values = [read(evidence, side, decoding) for side in sides]
        if len(values) == 1:
            return defined(stats.bootstrap_mean, values[0], n_resamples=evidence.resamples)
        return defined(stats.stratified_bootstrap, [values[0]], [values[1]], n_resamples=evidence.resamples)

    return find


def _drawn(evidence: Evidence, sides: Sequence[Chosen]) -> list[int]:
    return [len(_lines(evidence, *(side.models() for side in sides)))]


def _from_base(evidence: Evidence, side: Chosen) -> list[tuple[Record, bool]]:
    models = side.models()
    return _lines(evidence, [None] * len(models), models)


@dataclass(frozen=True)
class Quantity:
    """A quantity of one side, or a difference of two."""

    words: str
    """What it is called in labels."""
    find: _Find
    """Its value with its 95 % interval. Raises Undecided where it is not defined."""
    units: _Units
    """How many models, or lines, were measured, of each side or of both together."""
    sides: tuple[int, ...] = (1, 2)
    """How many sides it may have."""
    decoded: bool = False
    """Whether it depends on how completions are decoded."""
    sampled: bool = False
    """Whether it is one of samples alone, so that it is not asked of greedy answers."""
    unit: str = ""
    """"points", "ratio" (of a difference of logarithms), or empty."""
    of_base: bool = False
    """Whether the untrained base has it, too, so that it is asked as a null."""


def _of_runs(words: str, read: _Displaced, **options: Any) -> Quantity:
    def numbers(evidence: Evidence, side: Chosen, decoding: str) -> Array:
        return np.array(read(_displacements(evidence, side), side.runs))

    return Quantity(words, _between(numbers), _counted(_displaced), **options)


def _of_merges(words: str, read: Callable[[Record], float], **options: Any) -> Quantity:
    def numbers(evidence: Evidence, side: Chosen, decoding: str) -> Array:
        return np.array([read(record) for record in _merged(evidence, side)])

    return Quantity(words, _between(numbers), _counted(_merged), **options)


def _of_noise(words: str, read: Callable[[Sequence[Record], str], Any]) -> Quantity:
    def numbers(evidence: Evidence, side: Chosen, decoding: str) -> Array:
        return np.array(read(_noisy(evidence, side), decoding))

    return Quantity(words, _between(numbers), _counted(_noisy), decoded=True, unit="points")


_TWO, _POINTS, _RATIO = {"sides": (2,)}, {"unit": "points"}, {"unit": "ratio", "sides": (2,)}
_COVERED, _DECODED = {"units": with_coverage, "of_base": True}, {"decoded": True}
_WITHIN = coverage.SOLVED_WITHIN
_run = _counted(_displaced)

QUANTITIES: dict[str, Quantity] = {
    "norm": _of_runs("norm of the displacement", _log_norms, **_RATIO),
    "norm_over_walk": _of_runs("norm over that of a walk", _norms_over_walk),
    "unevenness": _of_runs("distance of the layers' shares from their sizes'", _unevenness),
    "head": _of_runs("the head's share over its size's", _head),
    "unmoved_float32": _of_runs("weights that stay, float32", _unmoved("float32"), **_POINTS),
    "unmoved_bfloat16": _of_runs("weights that stay, rounded to bfloat16", _unmoved("bfloat16"), **_POINTS),
    "cosine": Quantity("cosine of two runs", _cosine, _run, **_TWO),
    "corrected_cosine": Quantity("cosine of what runs have in common", _corrected_cosine, _run, **_TWO),
    "common_share": Quantity("share of a run's squared norm that all have", _common_share, _run, (1,)),
    "accuracy": Quantity("test", _accuracy, _counted(_merged), **_DECODED, **_POINTS),
    "skills_accuracy": _of_merges("accuracy on other skills", _skills("greedy"), **_POINTS),
    "skills_kl": _of_merges("KL on other skills", _skills("kl")),
    "skills_kl_ratio": _of_merges("KL on other skills", lambda record: math.log(_skills("kl")(record)), **_RATIO),
    "barrier": Quantity("barrier of the error", _barrier, _drawn, **_TWO, **_DECODED, **_POINTS),
    "clean": _of_noise("accuracy without noise", _clean),
    "kept_isotropic": _of_noise("accuracy kept under isotropic noise", _kept("isotropic")),
    "kept_relative": _of_noise("accuracy kept under relative noise", _kept("relative")),
    "support_change": Quantity("net change of support", _support_change, **_DECODED, **_COVERED),
    "support_change_own": Quantity(
        "net change of support, each at its own temperature",
        lambda evidence, sides, decoding: _support_change(evidence, sides, ""),
        **_COVERED,
    ),
    "gain": Quantity("gain of greedy accuracy", _gain, sides=(1,), **_POINTS, **_COVERED),
    "right": Quantity("right answers", _solved(1), **_DECODED, **_POINTS, **_COVERED),
    "solved": Quantity(
        f"solved within {_WITHIN} samples", _solved(_WITHIN), sampled=True, **_DECODED, **_POINTS, **_COVERED
    ),
    "half_gain": Quantity("place of half the gain", _half_gain, _counted(_from_base), **_DECODED),
}
"""What a rule of kind "weights" may ask, by the name that declares it."""
