"""Claims as they are declared, locked and judged; verdicts of E1 to E4 from hand-built records."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from claim_worlds import DECLARED, base_record, evaluate, runs_of, trained
from evoalign_study import claims, cli
from evoalign_study.claims.findings import Finding
from evoalign_study.records import index, spec_hash
from helpers import typed
from test_records import git

from evoalign_lib.analysis.stats import Interval


def _run(base: str, right: int, seed: int = 0, arm: str = "es", **spec: object) -> dict:
    return trained(arm, right, base, seed, **{"steps": 100} | spec)


def _world(*bases: str, seeds: int = 8) -> list[dict]:
    """Bases and shuffled runs that solve a quarter of the problems, ES runs that solve more, by seed."""
    records = []
    for base in bases:
        records += [base_record(base, 50), *runs_of("es", 110, base, seeds, jitter=5, steps=100)]
        records += runs_of("es_shuffled", 50, base, seeds, jitter=0, steps=100)
    return records


def test_a_missing_cell_is_underpowered_and_no_cell_at_all_is_open() -> None:
    verdict = evaluate(DECLARED["E1"], _world("A0"))
    assert (verdict.verdict, verdict.n) == ("underpowered", 0)
    assert "A1: 0 of ES, 0 of base" in verdict.text
    assert evaluate(DECLARED["E1"], []).verdict == "open"
    incomplete = [record | {"status": "incomplete"} for record in _world("A0")]
    assert evaluate(DECLARED["E1"], incomplete).verdict == "open"


ONE = [
    (-0.01, 0.01, 0.0, "above", "underpowered"),
    (-0.01, 0.01, 0.02, "above", "within margin"),
    (0.01, 0.05, 0.02, "above", "underpowered"),
    (0.03, 0.05, 0.02, "above", "supported"),
    (-0.05, 0.01, 0.02, "above", "contradicted"),  # surely not above the margin
    (-0.05, -0.03, 0.02, "below", "supported"),
    (0.03, 0.05, 0.02, "below", "contradicted"),
    (-0.01, 0.019, 0.02, "within", "supported"),
    (0.02, 0.05, 0.02, "within", "contradicted"),
    (-0.05, -0.02, 0.02, "within", "contradicted"),
    (0.01, 0.03, 0.02, "within", "underpowered"),
]


@pytest.mark.parametrize(("low", "high", "margin", "side", "expected"), ONE)
def test_decide_one_finding(low: float, high: float, margin: float, side: str, expected: str) -> None:
    for bound in (0.0, 1.0):
        interval = Interval(bound + (low + high) / 2, bound + low, bound + high, 8)
        finding = Finding("x", 8, "x: 8", interval, bound=bound, side=side, test=0.01)
        assert claims.decide([finding], margin, min_seeds=8)[0] == expected


def test_cells_refuse_records_that_do_not_belong_together() -> None:
    world = _world("A0", "A1", "A2")
    for more, names in (
        (_run("A0", 20, seed=3), "two records of one seed"),
        (_run("A0", 20, seed=9, sigma=0.1), "runs differ in sigma"),
        (base_record("A0", 51), "2 records without 'seed'"),
    ):
        with pytest.raises(ValueError, match=names):
            evaluate(DECLARED["E1"], [*world, more])
    with pytest.raises(ValueError, match="different bases"):
        evaluate(DECLARED["E1"], [*world[1:], base_record("A0", 50, base_digest="another")])


GOOD, TIED, UNSURE, BAD = (
    Finding(label, 8, label, Interval((low + high) / 2, low, high, 8))
    for label, low, high in (("g", 3, 4), ("t", -1, 1), ("u", -1, 4), ("b", -4, -3))
)
MANY = [replace(GOOD, label=f"g{i}") for i in range(11)]
LUCK = Finding("l", 8, "l: 8", Interval(-2, -3.9, -0.1, 8))
BY_LUCK = "the interval does not decide on l; Holm's correction over 12 comparisons leaves none contradicted"
UNDEFINED = Finding("u", 8, "u: 8", None, value="not defined")
HOLM = "supported by itself, but p = 0.05 after Holm's correction, family of 4"


SEVERAL = [
    ([GOOD, GOOD], 2, None, ("supported", "")),
    # the worst finding speaks
    ([GOOD, TIED], 2, None, ("within margin", "within margin on t")),
    ([GOOD, TIED, UNSURE], 2, None, ("underpowered", "the interval does not decide on u")),
    ([GOOD, TIED, UNSURE, BAD], 2, None, ("contradicted", "contradicted on b")),
    ([GOOD, UNDEFINED], 0, None, ("underpowered", "the interval does not decide on u")),
    # one of twelve intervals that just excludes 0 is what chance gives; one far away is not
    ([LUCK], 0, None, ("contradicted", "")),
    ([*MANY, LUCK], 0, None, ("underpowered", BY_LUCK)),
    ([*MANY, BAD], 0, None, ("contradicted", "contradicted on b")),
    ([*MANY[1:], LUCK, BAD], 0, None, ("contradicted", "contradicted on b")),
    ([GOOD, replace(BAD, decisive=False, n=2)], 0, None, ("supported", "")),
    ([GOOD], 0, (0.049, 4), ("supported", "")),
    ([GOOD], 0, (0.05, 4), ("underpowered", HOLM)),
    # Holm's correction changes nothing else
    ([BAD], 0, (1.0, 4), ("contradicted", "")),
    ([GOOD], 5, (1.0, 4), ("within margin", "")),
]


@pytest.mark.parametrize(("findings", "margin", "correction", "expected"), SEVERAL)
def test_decide_several_findings(findings: list, margin: float, correction: tuple | None, expected: tuple) -> None:
    assert claims.decide(findings, margin, 8, correction) == expected


# ---- the lock


def test_rules_are_the_locked_ones() -> None:
    assert claims.lock_problems() == []


@pytest.fixture
def repository(repository: Path) -> Path:
    """A repository of the claims C1 (open here), C10 and E1, locked before any record."""
    _declare(repository)
    assert [line.split()[:2] for line in claims.lock("2026-01-01")] == [["C10", "2026-01-01"], ["E1", "2026-01-01"]]
    return repository


def _declare(repository: Path, **changes: dict) -> None:
    """Write claims.yaml with changes by claim."""
    declared = [DECLARED["C1"] | {"rule": {"kind": "open"}}, DECLARED["C10"], DECLARED["E1"]]
    changed = [claim | changes.get(claim["id"], {}) for claim in declared]
    (repository / "paper/claims.yaml").write_text(yaml.safe_dump(changed))


def _record(repository: Path, *records: dict) -> None:
    (repository / "paper/results/01_toy").mkdir(exist_ok=True)
    lines = "".join(json.dumps(record | {"spec_hash": spec_hash(record["spec"])}) + "\n" for record in records)
    file = repository / "paper/results/01_toy/tiny.jsonl"
    file.write_text(lines)
    file.with_suffix(".index").unlink(missing_ok=True)
    index(file)


def _log(repository: Path, name: str) -> None:
    (claim,) = (claim for claim in claims.load_claims() if claim["id"] == name)
    (repository / "LOG.md").write_text(f"## Why\n\n{name} is {claims.rule_hash(claim)[:12]} now.\n")


def test_a_changed_rule_needs_the_log(repository: Path) -> None:
    lock = repository / "paper/claims.lock"
    _record(repository, _run("A0", 10))
    before = lock.read_text()
    _declare(repository, E1={"margin": 0.01})
    problem = "claim E1 is not what claims.lock holds: it was changed, or the lock was"
    assert claims.lock_problems() == [problem]
    with pytest.raises(ValueError, match="claim E1 was locked with another rule: say in LOG.md why .* and quote"):
        claims.lock("2026-01-02")
    assert lock.read_text() == before

    _log(repository, "E1")
    (line,) = claims.lock("2026-01-02")
    assert lock.read_text() == f"{before}{line}\n" and claims.lock_problems() == []
    (repository / "LOG.md").write_text("")
    changed = f"claim E1 was changed: LOG.md must say why and quote {line.split()[2][:12]}"
    assert claims.lock_problems() == [changed]
    # and back: the lock's last line counts, not any
    _declare(repository)
    assert claims.lock_problems() == [problem, changed]
    # each line but the first is quoted, not the last alone
    lock.write_text(f"{lock.read_text()}E1 2026-01-03 {before.split()[5]}\n")
    _log(repository, "E1")
    assert claims.lock_problems() == [changed]


def test_a_line_of_the_lock_that_was_replaced_is_found_by_the_history_of_git(repository: Path) -> None:
    lock = repository / "paper/claims.lock"
    assert claims.once_locked() == []
    git("init", "-q"), git("add", "."), git("commit", "-qm", "Locked")
    assert [name for name, _ in claims.once_locked()] == ["C10", "E1"]
    old = lock.read_text().split()[5]
    _declare(repository, E1={"margin": 0.01})
    (changed,) = (claims.rule_hash(claim) for claim in claims.load_claims() if claim["id"] == "E1")
    lock.write_text(lock.read_text().replace(old, changed))
    lost = f"claims.lock has lost the rule {old[:12]} of claim E1, which its history has: restore the line from git, "
    lost += f"or say in LOG.md why it went, and quote {old[:12]}"
    assert claims.lock_problems() == [lost]
    git("commit", "-qam", "Locked otherwise")
    assert claims.lock_problems() == [lost]
    (repository / "LOG.md").write_text(f"{old[:12]} was a mistake.\n")
    assert claims.lock_problems() == []


def test_a_rule_is_declared_before_its_runs_or_the_log_says_why(repository: Path) -> None:
    lock = repository / "paper/claims.lock"
    before, run = lock.read_text(), _run("A1", 10, steps=208)
    _declare(repository, C1={"rule": DECLARED["C1"]["rule"]})
    (problem,) = claims.lock_problems()
    assert "claim C1 has a rule and no line in claims.lock" in problem
    _record(repository, run)
    with pytest.raises(ValueError, match="claim C1 has runs already: say in LOG.md why"):
        claims.lock("2026-01-02")
    # a measured base is no run of the claim, and neither is a run of another length
    _record(repository, base_record("A0", 50), _run("A0", 10))
    assert [line.split()[0] for line in claims.lock("2026-01-02")] == ["C1"]
    lock.write_text(before)
    _record(repository, run)
    _log(repository, "C1")
    assert [line.split()[0] for line in claims.lock("2026-01-02")] == ["C1"]


# ---- the command


said = partial(typed, cli.app, "claims")


def test_the_command_prints_verdicts_and_locks(repository: Path) -> None:
    _record(repository, *_world("A0", "A1", "A2"))
    code, output = said()
    assert code == 0 and "E1   supported                   ES learns Countdown on every tiny base" in output
    assert said("--id", " e1 ")[1].count("points from 25.0 % (n = 8, detectable") == 3
    code, output = said("--id", "C99")
    assert code == 2 and "no claim 'C99'." in output and "There are: C1, C10, E1" in output
    assert said("--lock") == (0, "every rule is locked\n")
    _declare(repository, E1={"margin": 0.01})
    code, output = said("--lock")
    assert code == 1 and "claim E1 was locked with another rule" in output


def test_the_command_prints_json_that_every_parser_reads(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _record(repository, *_world("A0", "A1", "A2"))
    open_ended = Interval(0.5, math.nan, math.inf, 1)
    verdicts = [replace(verdict, title="é", intervals={"a": open_ended}) for verdict in claims.evaluate_all()]
    monkeypatch.setattr(claims, "evaluate_all", lambda scale: verdicts)
    code, output = said("--json")
    found = json.loads(output, parse_constant=pytest.fail)
    assert code == 0 and [claim["id"] for claim in found] == ["C1", "C10", "E1"] and found[0]["title"] == "é"
    assert found[0]["intervals"]["a"] == {"value": 0.5, "low": None, "high": None, "n": 1, "level": 0.95}
    assert [claim["id"] for claim in json.loads(said("--json", "--id", "c10")[1])] == ["C10"]
    assert said("--json", "--lock")[0] == 2


@pytest.mark.parametrize("arguments", [[], ["--lock"]])
def test_the_command_names_damaged_records_and_judges_nothing(repository: Path, arguments: list[str]) -> None:
    _record(repository, *_world("A0"))
    file = repository / "paper/results/01_toy/tiny.jsonl"
    whole = file.read_bytes()
    for old, new in ((b'"finished"', b'"incomplete"'), (b'"greedy_bits"', b'"bits"'), (b'{"', b'{"\xff'), (b"}", b"")):
        file.write_bytes(whole.replace(old, new, 1))
        code, output = said(*arguments)
        assert code == 1 and output.startswith(f"{file}, line 1 ") and "restore it from git" in output


def test_claims_are_judged_by_name_with_their_families() -> None:
    records = _world("A0", "A1", "A2")
    named = claims.evaluate_named(["E2", "E1"], records)
    assert [verdict.id for verdict in named] == ["E2", "E1"]
    assert named == [*claims.evaluate_named(["E2"], records), *claims.evaluate_named(["E1"], records)]
    with pytest.raises(ValueError, match=r"no claim 'E1c' in claims.yaml. Did you mean 'E1"):
        claims.evaluate_named(["E1", "E1c"], records)
