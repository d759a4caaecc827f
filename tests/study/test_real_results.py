"""A real model beside the tiny world: numbers are those of records and of claims, and seeds may be missing."""

from dataclasses import replace

import numpy as np
import pytest
from evoalign_study import artifacts, claims, paths, real_panels, real_results
from evoalign_study.records import accuracy_matrix, unpack_counts
from evoalign_study.results import answered

KNOWN = claims.committed_records("real")
REAL, FACTS = (real_results.groups(KNOWN, task) for task in ("arithmetic", "facts"))
NOTEBOOKS = tuple(real_panels._POINTS)


@pytest.fixture(scope="module")
def verdicts():
    asked = [claim["id"] for claim in claims.load_claims() if claim["scales"] == ["real"]]
    return claims.evaluate_named(asked, KNOWN, "real")


@pytest.fixture(scope="module")
def found(verdicts):
    return real_results.results(REAL, FACTS, verdicts)


def test_results_are_those_of_the_records_and_of_the_claims(found):
    for arm, decoding in (("es", "t1"), ("grpo", "t0.6"), ("base", "t1")):
        counts = np.array([unpack_counts(run["test"][f"{decoding}_counts"]) for run in REAL[arm]])
        assert found[f"{arm} {decoding}"].value == pytest.approx(counts.mean() / 16)
        assert found[f"within 16, {arm} {decoding}"].value == pytest.approx((counts > 0).mean())
    for decoding, words in {"greedy": "greedy", "t0.6": "temperature 0.6", "t1": "temperature 1"}.items():
        assert found[f"es - base {decoding}"] == found[f"R11: ES - base, test {words}"]
    apart = accuracy_matrix(REAL["grpo"], "greedy").mean() - accuracy_matrix(REAL["es"], "greedy").mean()
    assert found["grpo - es greedy"].value == pytest.approx(apart)
    cosines = next(part for part in real_panels._cosines(REAL) if part["at"][0] == "ES\nand GRPO")
    assert cosines["y"].mean() == pytest.approx(found["cosine"].value)
    barrier, declared = found["barrier es to grpo"], found["R8: ES to GRPO, barrier of the error greedy"]
    assert (barrier.value, barrier.low, barrier.high) == (declared.value, declared.low, declared.high)
    assert found["facts grpo change greedy"] == pytest.approx(
        np.mean([run["test"]["greedy"] for run in FACTS["grpo"]]) - FACTS["base"][0]["test"]["greedy"], abs=1e-6
    )


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_missing_seed_leaves_a_panel_with_fewer(notebook):
    of = FACTS if notebook == "03_conciseness" else REAL
    whole = real_panels.figure(notebook, {}, of)[1]
    fewer = {name: some if name in ("products", "base") else some[:1] for name, some in of.items()}
    less = real_panels.figure(notebook, {}, {name: some for name, some in fewer.items() if name != "es_random"})[1]
    assert set(less["world"]) == {real_panels.MODEL} and 0 < len(less) <= len(whole)


def test_misses_are_bold_and_every_prediction_has_its_row(found, verdicts, tmp_path):
    table = real_results.predictions(verdicts, found, artifacts._numbers())
    assert list(table["claim"]) == [v.id for v in verdicts] and (table.map(len) > 0).all(axis=None)
    assert not table["predicted in the tiny world"].isin([v.title for v in verdicts]).any()
    judged = [replace(v, verdict="contradicted" if v.id == "R3" else "supported") for v in verdicts]
    artifacts._save_predictions(real_results.predictions(judged, found, {}), tmp_path)
    for name, bold in (("claims_real.md", "**miss**"), ("claims_real.tex", r"\textbf{miss}")):
        rows = [line for line in (tmp_path / name).read_text().splitlines() if "miss" in line]
        assert len(rows) == 1 and "R3" in rows[0] and bold in rows[0]


def test_the_readme_says_what_the_records_have(found):
    readme = " ".join((paths.ROOT / "README.md").read_text(encoding="utf-8").split())
    (sentence,) = answered("README", found).values()
    assert sentence in readme
