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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import attenuation, connectivity, coverage, geometry, gram_matrix, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.files import canonical_json
from evoalign_study import path_points
from evoalign_study.claims.checks import check_keys
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


def check_side(name: str, declared: str | Mapping[str, Any]) -> None:
    """Raise ValueError, naming the claim, where a side is not well declared."""
    if isinstance(declared, str):
        return
    check_keys(f"{name}, side", declared, ("arm",), ("mean", "shrunk", "random"))
    side = side_of(declared)
    if side.mean < 1 or side.shrunk < 0 or (side.mean > 1) + bool(side.shrunk) + side.random > 1:
        raise ValueError(f"{name}: side {dict(declared)}: take a mean of runs, or shrink each, or draw a direction")


# ---- displacements


def _displacements(evidence: Evidence, *sides: Chosen) -> geometry.Displacements:
    """Return the products of all runs of the sides, by layer, in their order."""
    runs = [run for side in sides for run in side.runs]
    return defined(gram_matrix.gram, evidence.having("kind", "products"), runs)


def _log_norms(evidence: Evidence, side: Chosen, decoding: str) -> Array:
    return np.log(np.diagonal(_displacements(evidence, side).total)) / 2


def _norms_over_walk(evidence: Evidence, side: Chosen, decoding: str) -> Array:
    found, walks = _displacements(evidence, side), []
    for run in side.runs:
        spec = run["spec"]
        steps = spec["steps"] - run["counts"]["tied"]
        walks.append(geometry.es_norm(spec["alpha"], found.d, steps, spec["population_size"]))
    with np.errstate(invalid="ignore"):  # a run that stood still: 0 / 0
        return np.sqrt(np.diagonal(found.total)) / walks


def _unevenness(evidence: Evidence, side: Chosen, decoding: str) -> Array:
    found = _displacements(evidence, side)
    return np.array([geometry.total_variation(shares, found.size_shares) for shares in found.shares.T])


def _head(evidence: Evidence, side: Chosen, decoding: str) -> Array:
    found = _displacements(evidence, side)
    names = [name for name in found.names if name in ("head", "embedding (tied)")]
    if not names:
        raise Undecided("there is no head")
    row = found.names.index(names[0])
    return found.shares[row] / found.size_shares[row]


def _unmoved(dtype: str) -> Callable[[Evidence, Chosen, str], Array]:
    def read(evidence: Evidence, side: Chosen, decoding: str) -> Array:
        found = _displacements(evidence, side)
        return (found.unmoved(dtype) * found.entries[:, None]).sum(0) / found.d

    return read


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


def _merged(evidence: Evidence, side: Chosen) -> list[Record]:
    """Return the records of those models of a side that were measured."""
    found = {model_of(record["spec"]): record for record in evidence.having("kind", "merge")}
    return [found[model] for model in side.models() if model in found]


def _of_merged(read: Callable[[Record], float]) -> Callable[[Evidence, Chosen, str], Array]:
    return lambda evidence, side, decoding: np.array([read(record) for record in _merged(evidence, side)])


def _skills(name: str) -> Callable[[Record], float]:
    return lambda record: float(np.mean([skill[name] for skill in record["skills"].values()]))


def _accuracy(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    matrices = [accuracy_matrix(_merged(evidence, side), decoding) for side in sides]
    return stats.crossed_bootstrap(*matrices, n_resamples=evidence.resamples)


# ---- lines


def _lines(evidence: Evidence, first: Sequence[Model | None], last: Sequence[Model]) -> list[tuple[Record, bool]]:
    """Return the path records between models, pair by pair, where there are any, and whether they run backwards."""
    found = path_points.by_ends(evidence.having("kind", "path"))
    pairs = list(zip(first, last, strict=False))
    return [
        (found[key], key != pair) for pair in pairs for key in (pair, pair[::-1]) if key in found and pair[0] != pair[1]
    ]


def _errors(lines: Iterable[tuple[Record, bool]], decoding: str) -> Array:
    """Return the errors (pairs, problems, points) along lines, all in one direction."""
    every = [path_points.errors([record], decoding)[:, :, :: -1 if backwards else 1] for record, backwards in lines]
    return np.concatenate(every)


def _barrier(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    """Return the height of the mean curve over the line between its ends, its upper end that of `below_margin`."""
    errors = _errors(_lines(evidence, *(side.models() for side in sides)), decoding)
    outcomes = np.full((len(errors), len(errors), *errors.shape[1:]), np.nan)
    outcomes[np.arange(len(errors)), np.arange(len(errors))] = errors
    resamples = min(1000, evidence.resamples)
    found = connectivity.estimate_barrier(outcomes, kind="line", across="curve", n_resamples=resamples)
    high = max(found.interval.high, connectivity.below_margin(found).high)
    return Interval(found.interval.value, found.interval.low, high, len(errors))


def _half_gain(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    """Return where on the line from the base half of the gain lies, or the difference of two sides."""
    rewards = []
    for side in sides:
        models = side.models()
        rewards.append(1 - _errors(_lines(evidence, [None] * len(models), models), decoding))
    baseline = rewards[1] if len(rewards) > 1 else None
    resamples = min(1000, evidence.resamples)
    found = connectivity.half_gain_interval(rewards[0], baseline=baseline, monotone=True, n_resamples=resamples)
    if math.isnan(found.low):
        raise Undecided("an arm has no gain along its lines")
    return found


# ---- noise on the weights


def _noisy(evidence: Evidence, side: Chosen) -> list[Record]:
    """Return the records under noise of those models of a side that have one."""
    found = {model_of(record["spec"].get("end")): record for record in evidence.having("kind", "noise")}
    return [found[model] for model in side.models() if model in found]


def _clean(evidence: Evidence, side: Chosen, decoding: str) -> Array:
    return np.array([record["clean"][decoding] for record in _noisy(evidence, side)])


def _kept(part: str) -> Callable[[Evidence, Chosen, str], Array]:
    """Read the share of a model's accuracy that it keeps under noise, the mean over draws and sigmas."""

    def read(evidence: Evidence, side: Chosen, decoding: str) -> Array:
        found = _noisy(evidence, side)
        clean, left = ([np.mean(r[block][decoding]) for r in found] for block in ("clean", part))
        if 0 in clean:
            raise Undecided("a model has no accuracy to keep")
        return np.divide(left, clean)

    return read


# ---- what a model can solve within some samples


def _measured_alike(evidence: Evidence) -> list[Record]:
    """Return the coverage records that were made with the same settings: with those that most records have."""
    groups: dict[str, list[Record]] = {}
    for record in evidence.having("kind", "coverage"):
        settings = {name: value for name, value in record["spec"].items() if name != "end"}
        groups.setdefault(canonical_json(settings), []).append(record)
    return max(groups.values(), key=len, default=[])


def _covered(evidence: Evidence, side: Chosen) -> list[Record]:
    """Return the records of what those models of a side can solve that have one."""
    found = {model_of(record["spec"].get("end")): record for record in _measured_alike(evidence)}
    return [found[model] for model in side.models() if model in found]


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
    find = coverage.support_change if len(runs) == 1 else coverage.support_change_difference
    found = find(base, *runs, coverage.SOLVED_WITHIN, n_resamples=evidence.resamples)
    if math.isnan(found.low):
        raise Undecided("neither the base nor a run solves a problem")
    return found


def _support_change_own(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
    return _support_change(evidence, sides, "")


def _base_of(evidence: Evidence) -> Record:
    """Return what the base can solve."""
    for record in _measured_alike(evidence):
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


def _solved(within: int) -> Callable[[Evidence, Sequence[Chosen], str], Interval]:
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


def with_coverage(evidence: Evidence, sides: Sequence[Chosen]) -> list[int]:
    """Return how many models of each side have a record of what they can solve."""
    return [len(_covered(evidence, side)) for side in sides]


# ---- the registry


def _between(read: Callable[[Evidence, Chosen, str], Array]) -> Callable[[Evidence, Sequence[Chosen], str], Interval]:
    """Make a quantity of one number per model: its mean, or the difference of the means of two sides."""

    def find(evidence: Evidence, sides: Sequence[Chosen], decoding: str) -> Interval:
        values = [read(evidence, side, decoding) for side in sides]
        if len(values) == 1:
            return defined(stats.bootstrap_mean, values[0], n_resamples=evidence.resamples)
        return defined(stats.stratified_bootstrap, [values[0]], [values[1]], n_resamples=evidence.resamples)

    return find


def _displaced(evidence: Evidence, sides: Sequence[Chosen]) -> list[int]:
    """Return how many runs of each side have products."""
    known = {
        d for r in evidence.having("kind", "products") for block in ("a", "b") for d in r["spec"][block]["digests"]
    }
    return [sum(run.get("digest") in known for run in side.runs) for side in sides]


def _counted(evidence: Evidence, sides: Sequence[Chosen]) -> list[int]:
    return [len(_merged(evidence, side)) for side in sides]


def _shaken(evidence: Evidence, sides: Sequence[Chosen]) -> list[int]:
    return [len(_noisy(evidence, side)) for side in sides]


def _drawn(evidence: Evidence, sides: Sequence[Chosen]) -> list[int]:
    return [len(_lines(evidence, *(side.models() for side in sides)))]


def _drawn_from_base(evidence: Evidence, sides: Sequence[Chosen]) -> list[int]:
    every = [side.models() for side in sides]
    return [len(_lines(evidence, [None] * len(models), models)) for models in every]


@dataclass(frozen=True)
class Quantity:
    """A quantity of one side, or a difference of two."""

    words: str
    """What it is called in labels."""
    find: Callable[[Evidence, Sequence[Chosen], str], Interval]
    """Its value with its 95 % interval. Raises Undecided where it is not defined."""
    units: Callable[[Evidence, Sequence[Chosen]], list[int]]
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


QUANTITIES: dict[str, Quantity] = {
    "norm": Quantity("norm of the displacement", _between(_log_norms), _displaced, (2,), unit="ratio"),
    "norm_over_walk": Quantity("norm over that of a walk", _between(_norms_over_walk), _displaced),
    "unevenness": Quantity("distance of the layers' shares from their sizes'", _between(_unevenness), _displaced),
    "head": Quantity("the head's share over its size's", _between(_head), _displaced),
    "unmoved_float32": Quantity("weights that stay, float32", _between(_unmoved("float32")), _displaced, unit="points"),
    "unmoved_bfloat16": Quantity(
        "weights that stay, rounded to bfloat16", _between(_unmoved("bfloat16")), _displaced, unit="points"
    ),
    "cosine": Quantity("cosine of two runs", _cosine, _displaced, (2,)),
    "corrected_cosine": Quantity("cosine of what runs have in common", _corrected_cosine, _displaced, (2,)),
    "common_share": Quantity("share of a run's squared norm that all have", _common_share, _displaced, (1,)),
    "accuracy": Quantity("test", _accuracy, _counted, decoded=True, unit="points"),
    "skills_accuracy": Quantity(
        "accuracy on other skills", _between(_of_merged(_skills("greedy"))), _counted, unit="points"
    ),
    "skills_kl": Quantity("KL on other skills", _between(_of_merged(_skills("kl"))), _counted),
    "skills_kl_ratio": Quantity(
        "KL on other skills",
        _between(_of_merged(lambda record: math.log(_skills("kl")(record)))),
        _counted,
        (2,),
        unit="ratio",
    ),
    "barrier": Quantity("barrier of the error", _barrier, _drawn, (2,), decoded=True, unit="points"),
    "clean": Quantity("accuracy without noise", _between(_clean), _shaken, decoded=True, unit="points"),
    "kept_isotropic": Quantity(
        "accuracy kept under isotropic noise", _between(_kept("isotropic")), _shaken, decoded=True, unit="points"
    ),
    "kept_relative": Quantity(
        "accuracy kept under relative noise", _between(_kept("relative")), _shaken, decoded=True, unit="points"
    ),
    "support_change": Quantity("net change of support", _support_change, with_coverage, decoded=True, of_base=True),
    "support_change_own": Quantity(
        "net change of support, each at its own temperature", _support_change_own, with_coverage, of_base=True
    ),
    "gain": Quantity("gain of greedy accuracy", _gain, with_coverage, (1,), unit="points", of_base=True),
    "right": Quantity("right answers", _solved(1), with_coverage, decoded=True, unit="points", of_base=True),
    "solved": Quantity(
        f"solved within {coverage.SOLVED_WITHIN} samples",
        _solved(coverage.SOLVED_WITHIN),
        with_coverage,
        decoded=True,
        sampled=True,
        unit="points",
        of_base=True,
    ),
    "half_gain": Quantity("place of half the gain", _half_gain, _drawn_from_base, decoded=True),
}
"""What a rule of kind "weights" may ask, by the name that declares it."""
