"""Claims as they are declared: what is refused, what is hashed, and the committed verdicts to the byte."""

import copy
import functools
import random
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from claim_worlds import DECLARED
from evoalign_study import artifacts, claims, paths
from evoalign_study.claims.rules import RULES


def test_the_committed_verdicts_are_those_of_the_committed_records(committed_verdicts, tmp_path: Path) -> None:
    artifacts.save_claims(committed_verdicts, tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (paths.GENERATED / file.name).read_bytes(), file.name
    assert {verdict.verdict for verdict in committed_verdicts} <= set(claims.VERDICTS)


def test_every_claim_of_the_field_is_judged_or_undecided_or_waits(committed_verdicts, tmp_path: Path) -> None:
    text = artifacts.save_claims(committed_verdicts, tmp_path)
    counts = [int(n) for n in re.findall(r"\d+(?= claims| are| wait|;)", text)]
    assert len(counts) == 4 and counts[0] == sum(counts[1:]) and text.count("\n| C") == 8


def test_the_order_of_the_committed_records_does_not_matter(committed_records: list[dict]) -> None:
    """Of one claim of each kind of rule that is quickly judged."""
    names = ("E2", "E3", "E4", "C8", "C9b", "C11", "C16", "C20", "C29", "C33")
    declared = [DECLARED[name] for name in names]
    shuffled = [committed_records[i] for i in np.random.default_rng(0).permutation(len(committed_records))]
    both = (committed_records, shuffled)
    first, other = (claims.evaluate_named(names, records, declared=declared, resamples=20) for records in both)
    assert first == other


def test_no_committed_verdict_rests_on_a_rule_that_a_null_passes(committed_verdicts: list[claims.Verdict]) -> None:
    for verdict in committed_verdicts:
        assert not (verdict.verdict == "supported" and "passed" in verdict.placebo), verdict.id
        favours = RULES[verdict.rule].favours(DECLARED[verdict.id])
        if verdict.verdict in ("supported", "within margin", "not evidence"):
            assert (verdict.placebo == "favours no arm") == (not favours), verdict.id


def test_without_records_nothing_is_judged() -> None:
    for verdict in claims.evaluate_named(list(DECLARED), []):
        at = {name: "not testable at this scale" for name, claim in DECLARED.items() if "tiny" not in claim["scales"]}
        at |= dict.fromkeys((name for name, claim in DECLARED.items() if "superseded" in claim), "superseded")
        assert verdict.verdict == at.get(verdict.id, "open")
        assert (verdict.n, verdict.intervals, verdict.p, verdict.key, verdict.placebo) == (0, {}, None, "", "")
    full = claims.evaluate_named(["E1", "C17"], [], "full")
    assert [verdict.verdict for verdict in full] == ["not testable at this scale", "open"]
    real = [name for name, claim in DECLARED.items() if claim["scales"] == ["real"]]
    assert real and {verdict.verdict for verdict in claims.evaluate_named(real, [], "real")} == {"open"}


def ruled(name: str, **change: object) -> dict:
    """The rule, changed; a key that is None is left out."""
    return {"rule": {key: value for key, value in (DECLARED[name]["rule"] | change).items() if value is not None}}


def compared(name: str, **change: object) -> dict:
    """The rule with its first comparison alone, changed; a key that is None is left out."""
    kept = DECLARED[name]["rule"]["comparisons"][0] | change
    return ruled(name, comparisons=[{key: value for key, value in kept.items() if value is not None}])


def armed(change: dict) -> dict:
    return {"arms": DECLARED["C1"]["arms"] | {"es": {"kind": "train"} | change}}


@pytest.mark.parametrize(
    ("name", "change", "names"),
    [
        ("E1", {"margn": 1}, "'margn'"),
        ("E1", {"margin": -1}, "margin -1"),
        ("E1", {"min_seeds": 4}, "min_seeds 4"),
        ("E1", {"cells": {"base": ["A0"], "task": ["countdown"]}}, "base, task"),
        ("E1", {"arms": {"treatment": {"kind": "train"}}}, "'comparison'"),
        ("E1", {"rule": {"kind": "eyeball"}}, "'eyeball'"),
        ("C1", {"primary": "03"}, "primary of 03"),
        ("C1", armed({"arm": "ees"}), "'ees'"),
        ("C1", armed({"seeds": True}), "seeds True"),
        ("C1", armed({"sigma": {}}), "arms, es, sigma {}"),
        ("C1", armed({None: 1}), "es, names of fields None"),
        ("C1", {"arms": dict.fromkeys(("es", "base"), {"kind": "train"})}, "'grpo'"),
        ("C12", {"cells": {"population_size": [8, 16, "x"]}}, "'x'"),
        ("C2", {"margin": 0}, "equivalence"),
        ("C9", {"cells": {}}, "kind regret"),
        ("C9", ruled("C9", best={"best_of": 4, "base": "own", "among": {"es": [{}]}}), "1 es settings"),
        ("C9b", ruled("C9b", bounds={"es": {}}), "regret of es"),
        ("C15", {"rule": {"kind": "regret"}}, "'unit'"),
        ("C31", compared("C31", below=0), "above or below"),
        ("C31", compared("C31", p="fisher"), "'fisher'"),
        ("C31", compared("C31", measure={"train": "greedy"}), "'train'"),
        ("C31", compared("C31", measure={"test": "greedy", "drawdown": "greedy"}), "'drawdown'"),
        ("C31", compared("C31", measure={"validation": "greedy"}), "got none"),
        ("C31", compared("C31", measure={"hacked": "greedy"}), "by rate"),
        ("C31", ruled("C31", decodings=["greedy", "t2"]), "t2"),
        ("C34", compared("C34", to=["es", "odd"]), "'odd'"),
        ("C21", compared("C21", quantity="norm", to=None), "1 sides"),
        ("C21", compared("C21", above=None), "above or below"),
        ("C21", compared("C21", quantity="accuracy"), "declare decodings"),
        ("C21", compared("C21", of={"arm": "es", "mean": 0}), "mean of runs"),
        ("C19", ruled("C19", cells=[["grpo", "es_members"]]), "two rows of two"),
        ("C19", ruled("C19", larger="noise"), "larger and smaller"),
        ("C5", compared("C5", judge=None), "under a judge"),
        ("C35", ruled("C35", favours=None), "favours"),
        ("C16", ruled("C16", between=[8, 5]), r"\[8, 5\]"),
        ("C16", ruled("C16", error=0), "error 0"),
        ("C12", ruled("C12", share=1.5), "share=1.5"),
        ("C12", ruled("C12", between=[384, 96]), r"\[384, 96\]"),
    ],
)
def test_what_is_badly_declared_is_refused_by_its_name(name: str, change: dict, names: str) -> None:
    with pytest.raises(ValueError, match=f"claim {name}.*{names}"):
        claims.check_claim(DECLARED[name] | change)


def test_the_ledger_is_data(tmp_path: Path) -> None:
    path, declared = tmp_path / "claims.yaml", list(DECLARED.values())
    fifth = [claim | {"primary": "02"} if claim["id"] == "C29" else claim for claim in declared]
    for text, names in (
        (yaml.safe_dump([DECLARED["E1"], DECLARED["E1"]]), "'E1' is used 2 times"),
        (yaml.safe_dump([DECLARED["E1"] | {"superseded": "E9"}]), "'E9'"),
        (yaml.safe_dump(fifth), "notebook 02 has 5 primary claims"),
        ("id: E1", "dict"),
        ("- id: E1\n\trule: {}", r"(?s)claims\.yaml.*line 2"),
        ("- x", "'x' in the place of a claim"),
        ("- !!python/object/apply:os.getcwd []", "getcwd"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=names):
            claims.load_claims(path)


VALUES = [None, True, -1, 10**30, np.inf, np.nan, "x", "", b"x"]
VALUES += [[], {}, ["x"], {"a": 1}, [None], {None: 1}, {1: 2}, [[1]]]


def places(declared, own: tuple = ()):
    """The path of every value in a declaration."""
    yield own
    plain = declared if isinstance(declared, list) else ()
    inside = declared.items() if isinstance(declared, dict) else enumerate(plain)
    for key, value in list(inside):
        yield from places(value, (*own, key))


def test_any_edit_of_a_declaration_is_judged_or_refused_by_its_name(committed_records: list[dict]) -> None:
    kinds = {tuple(r["spec"].get(name) for name in ("kind", "arm", "task")): r for r in committed_records}
    rng, refused = random.Random(0), 0
    for name, claim in [*DECLARED.items()] * 12:
        edited = copy.deepcopy(claim)
        *path, last = rng.choice([place for place in places(edited) if place])
        holder = functools.reduce(lambda value, key: value[key], path, edited)
        if rng.random() < 0.8:
            holder[last] = copy.deepcopy(rng.choice(VALUES))
        else:
            del holder[last]
        try:
            claims.check_claim(edited)
            claims.evaluate_named([edited["id"]], kinds.values(), declared=[edited], resamples=20)
        except ValueError as error:
            refused += 1
            assert str(error).startswith("claim ") and (name in str(error) or [*path, last] == ["id"]), (path, last)
    assert 0.2 < refused / (12 * len(DECLARED)) < 0.9


def test_rule_hash_follows_the_rule_and_not_the_remarks() -> None:
    claim = DECLARED["E1"]
    original = claims.rule_hash(claim)
    remarks = {"note": "seen", "title": "Shorter", "notebooks": ["02"], "caveat": "One machine.", "superseded": "E1b"}
    assert claims.rule_hash(dict(reversed(claim.items())) | remarks) == original
    for change in ({"margin": 0.01}, {"min_seeds": 16}, {"rule": {"kind": "interval_above", "decoding": "t1"}}):
        assert claims.rule_hash(claim | change) != original
