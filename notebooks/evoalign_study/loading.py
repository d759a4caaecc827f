"""Load a notebook's runs by the names of their groups, and make the missing ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from evoalign_lib import arms, tiny
from evoalign_lib.checks import choose, nearest, require
from evoalign_study import preflight
from evoalign_study.kinds.decode import decoding_specs
from evoalign_study.kinds.train import train_specs
from evoalign_study.records import Record, Spec, spec_hash
from evoalign_study.specs import settings_of_runs
from evoalign_study.sweep import load_or_run

if TYPE_CHECKING:
    from pandas import DataFrame

DECODINGS = ("greedy", "t1")
"""The decodings under which every run is measured, by their key in the records."""
Records = Mapping[str, Sequence[Record]]
"""Group -> its records."""


class Group(NamedTuple):
    """Training runs under one name: one arm, on each base, with each change of the settings and each seed."""

    arm: str
    bases: Sequence[str]
    seeds: int | Sequence[int]
    """Number of seeds (0, 1, 2, ...), which the parameter `seeds` overrides; or the seeds themselves."""
    settings: Mapping[str, Any]
    """As for `train_specs`."""
    changes: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]] = ({},)
    """Changes to the settings, one entry per variant of the group; or base -> its own list of changes."""
    after: tuple[str, ...] = ()
    """Groups whose records determine the settings: they are loaded first."""
    ledgers: Sequence[str] = ()
    """Bases whose runs keep their ledgers."""
    scale: str = ""
    """Scale of the runs; empty: the notebook's (`of_tiny_world` may give another)."""


class After(NamedTuple):
    """Specs of another kind of run, built from the records of other groups; none before those are loaded."""

    specs: Sequence[Spec]
    after: tuple[str, ...]


Groups = Mapping[str, Group | After | Sequence[Spec]]
"""Name -> training runs, or the specs of runs of another kind."""


class Loader:
    """Loads the runs of a notebook by the names of their groups.

    With `force`, a group is *made anew*, unless `retrain` names only other groups: its runs are then stored beside the
    committed records.

    Attributes:
        names: names of all groups, in the order in which the notebook declares them.
        records: group -> records, for all groups loaded so far.
    """

    def __init__(self, notebook: str, run: SimpleNamespace, groups: Callable[[SimpleNamespace, Records], Groups]):
        """Build the specs of all groups, so that invalid settings are refused before any work.

        Args:
            notebook: name without suffix.
            run: the notebook's parameters and settings, from `parameters.check_parameters`.
            groups: builds the groups from `run` and the records loaded so far. A group that comes `after` another has
                its name, with placeholder settings, before the other is loaded.

        Raises:
            ValueError: `retrain` without `force`; a group in `retrain` that does not exist (suggests the nearest name);
                or whatever building the specs refuses.
        """
        self._notebook, self._run, self._groups = notebook, run, groups
        self.records: dict[str, list[Record]] = {}
        known = {name for choices in arms.SWEEP.values() for choice in choices for name in choice}
        for name in vars(run).get("sweep_factors") or ():
            choose("a name in sweep_factors", name, sorted(known))
        alone = run.retrain and not run.force
        require(not alone, f"retrain={run.retrain!r} does nothing by itself: set force=True, too.")
        self.names = tuple(specs := self.specs())
        if run.aside:  # the settings of a plain scale have run
            preflight.check_settings([spec for group in specs.values() for spec in group])
        for name in run.retrain:
            _check_name(f"retrain={run.retrain!r}", name, self.names)

    def specs(self) -> dict[str, list[Spec]]:
        """Return the specs of all groups; a group whose `after` is not loaded yet has placeholder settings."""
        return {name: self._specs_of(name, group) for name, group in self._groups(self._run, self.records).items()}

    def table(self) -> DataFrame:
        """Return the groups as a table: arm or kind of run, bases, seeds, what is changed, and number of runs."""
        from pandas import DataFrame

        rows = []
        for name, group in self._groups(self._run, self.records).items():
            if specs := self._specs_of(name, group):  # none if they are built from records that are not loaded yet
                row = {"group": name, "runs": len(specs), "arm or kind": _all("arm", specs) or _all("kind", specs)}
                row |= {"bases": _all("base", specs), "seeds": _seeds_in_words(specs)}
                rows.append(row | {"changed": _changes_in_words(group)})
        return DataFrame(rows).set_index("group")

    def __call__(self, *names: str) -> dict[str, list[Record]]:
        """Return the records of groups: load what exists and run what is missing, their `after` groups first.

        A spec that two groups share is run once; it is made anew if either group is. All runs made anew share a pool of
        processes and a progress bar, and so do all others. A group that is already loaded is returned as it is.

        Raises:
            ValueError: a group does not exist; suggests the nearest name.
            Exception: whatever `sweep.load_or_run` raises, such as `DryRun`.
        """
        for name in names:
            _check_name("load", name, self.names)
        groups = self._groups(self._run, self.records)
        if before := [n for name in names for n in getattr(groups[name], "after", ()) if n not in self.records]:
            self(*dict.fromkeys(before))
            groups = self._groups(self._run, self.records)
        specs = {name: self._specs_of(name, groups[name]) for name in names if name not in self.records}
        found = self._load_or_run(specs, groups)
        self.records |= {name: [found[spec_hash(spec)] for spec in own] for name, own in specs.items()}
        return {name: self.records[name] for name in names}

    def _load_or_run(self, specs: Mapping[str, list[Spec]], groups: Groups) -> dict[str, Record]:
        """Return spec hash -> record; runs to be made anew come after the others, scale by scale."""
        run, found = self._run, {}
        wanted = {spec_hash(spec): spec for own in specs.values() for spec in own}
        anew = {spec_hash(spec) for name, own in specs.items() if made_anew(run, name) for spec in own}
        bases = {name: getattr(groups[name], "ledgers", ()) for name in specs}
        kept = {spec_hash(spec) for name, own in specs.items() for spec in own if spec.get("base") in bases[name]}
        parts: dict[tuple[bool, str], dict[str, Spec]] = {}
        for h, spec in sorted(wanted.items(), key=lambda each: each[0] in anew):
            parts.setdefault((h in anew, spec["scale"]), {})[h] = spec
        for (again, scale), own in parts.items():
            how = {"force": again, "aside": run.aside, "dry_run": run.dry_run}
            ledgers = [spec for h, spec in own.items() if h in kept]
            records = load_or_run(list(own.values()), self._notebook, scale, keep_ledgers=ledgers, **how)
            found |= zip(own, records, strict=True)
        return found

    def _specs_of(self, name: str, group: Group | After | Sequence[Spec]) -> list[Spec]:
        if not isinstance(group, Group):
            return list(group.specs if isinstance(group, After) else group)
        scale = group.scale or self._run.scale
        seeds = range(seed_count(self._run, name, group.seeds)) if isinstance(group.seeds, int) else group.seeds
        return [
            spec
            for base in group.bases
            for change in (group.changes.get(base, ()) if isinstance(group.changes, Mapping) else group.changes)
            for spec in train_specs(group.arm, [base], seeds, dict(group.settings) | dict(change), scale)
        ]


def decodings(run: SimpleNamespace, of: Records, names: Sequence[str], *also: Mapping[str, Any]) -> After:
    """Return the runs that measure the models of groups again, at more temperatures than their records have.

    Only models of the tiny world are measured again. A run that several groups have is measured once.

    Args:
        names: groups to measure at `run.temperatures`.
        *also: further measurements: `groups`, and arguments of `decoding_specs` instead of these temperatures.
    """
    wanted = [{"groups": names, "temperatures": run.temperatures}, *map(dict, also)]
    asked = tuple(dict.fromkeys(name for one in wanted for name in one["groups"]))
    if run.bases[0] not in tiny.SHIPPED or any(name not in of for name in asked):
        return After([], asked)
    own = [([record for name in one.pop("groups") for record in of[name]], one) for one in wanted]
    specs = [spec for records, how in own for spec in decoding_specs(records, **how)]
    return After(list({spec_hash(spec): spec for spec in specs}.values()), asked)


def made_anew(run: SimpleNamespace, group: str) -> bool:
    """Return whether a group is made anew: with `force`, all groups are, or those that `retrain` names."""
    return run.force and (not run.retrain or group in run.retrain)


def seed_count(run: SimpleNamespace, group: str, n: int) -> int:
    """Return a group's number of seeds: n, or the parameter `seeds`; with `force` only if the group is made anew."""
    return run.seeds if run.seeds and (made_anew(run, group) or not run.force) else n


def of_runs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a notebook that go into specs; the functions that build specs refuse any other."""
    known = settings_of_runs()
    return {name: value for name, value in settings.items() if name in known}


def own_settings(run: SimpleNamespace, arm: str) -> dict[str, Any]:
    """Return a notebook's settings of runs (`of_runs`), with an arm's own instead of the common ones.

    An arm's own settings have names that begin with the arm's sweep: `es_steps` becomes `steps` for all ES arms,
    `grpo_steps` for GRPO and its relatives. For an arm without a sweep, they begin with its own name.
    """
    prefix = f"{arms.get(arm).sweep or arm}_"
    own = {name.removeprefix(prefix): value for name, value in vars(run).items() if name.startswith(prefix)}
    return of_runs(vars(run) | own)


def scaled(run: SimpleNamespace, choices: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return settings of the tiny models, multiplied by `sweep_factors`, the factors of the scale."""
    return [{name: value * run.sweep_factors.get(name, 1) for name, value in choice.items()} for choice in choices]


def swept_choices(run: SimpleNamespace, arm: str) -> list[dict[str, float]]:
    """Return the settings that an arm's sweep tries: the first `sweep_size` of `arms.SWEEP`, `scaled`."""
    return scaled(run, arms.SWEEP[arm][: run.sweep_size])


def ranked_choices(run: SimpleNamespace, arm: str, sweep: Sequence[Record] | None) -> list[dict[str, float]]:
    """Return the settings that an arm's sweep has tried, best first; without its records, in the order of trial."""
    return [setting for _, setting in arms.ranked(sweep)] if sweep else swept_choices(run, arm)


def chosen_by(sweep: str, choices: Sequence[Any]) -> tuple[str, ...]:
    """Return the sweep that runs must wait for (`Group.after`): none if there is one choice, as at scale smoke."""
    return (sweep,) if len(choices) > 1 else ()


def of_tiny_world(run: SimpleNamespace, preset: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return scale and settings for exact measurements, for which only the tiny world's models are small enough.

    They are the notebook's own if its first base is one of these models; otherwise those of scale tiny, whose records
    are committed, so that a notebook on another model still shows them.

    preset: the notebook's settings at scale tiny.
    """
    return (run.scale, vars(run)) if run.bases[0] in tiny.BASES else ("tiny", dict(preset))


def of_size(settings: Mapping[str, Any], N: int) -> dict[str, Any]:
    """Return the changes to an ES setting for a population of N, at the same number of evaluated members.

    alpha grows with N, so that the fewer steps go as far in total, and the walk has the same length.
    """
    size = settings["population_size"]
    return {"population_size": N, "steps": round(settings["steps"] * size / N), "alpha": settings["alpha"] * N / size}


def _changes_in_words(group: Group | After | Sequence[Spec]) -> str:
    if not isinstance(group, Group):
        return ""
    if isinstance(group.changes, Mapping):
        return "a setting per base"
    if len(group.changes) != 1:
        return f"{len(group.changes)} settings"
    short = {name: f"{x:g}" if isinstance(x, float) else str(x) for name, x in group.changes[0].items()}
    return ", ".join(f"{name} {value}" for name, value in short.items())


def _all(field: str, specs: Sequence[Spec]) -> str:
    return ", ".join(dict.fromkeys(spec[field] for spec in specs if field in spec))


def _seeds_in_words(specs: Sequence[Spec]) -> str:
    seeds = sorted({spec["seed"] for spec in specs if "seed" in spec})
    return f"0 to {seeds[-1]}" if len(seeds) > 1 and seeds == list(range(len(seeds))) else ", ".join(map(str, seeds))


def _check_name(what: str, name: str, known: Collection[str]) -> None:
    hint = f"{nearest(name, known)} Known: {', '.join(known)}."
    require(name in known, f"{what}: there is no group {name!r}.{hint}")
