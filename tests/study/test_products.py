"""Products of displacements: blocks that add up to the Gram matrix of all runs, whatever the grouping."""

import numpy as np
import pytest
from evoalign_study import sweep, weight_cache
from evoalign_study.kinds import weights as products

SETTINGS = {
    "max_completion_length": 16, "validation_problems": 4, "test_problems": 4, "steps": 2, "prompts_per_step": 2,
    "curve_points": 2, "population_size": 3, "sigma": 0.03, "alpha": 0.01,
}  # fmt: skip
RUNS = [("es_random", 3), ("es_shuffled", 2)]


def test_blocks_are_the_products_of_the_weights(es_runs, monkeypatch):
    monkeypatch.setattr(products, "MOST", 2)  # the first group makes two blocks
    specs = products.products_specs(es_runs, "tiny")
    assert [(len(s["a"]["seeds"]), len(s["b"]["seeds"])) for s in specs] == [
        (2, 2), (2, 1), (2, 2), (1, 1), (1, 2), (2, 2)
    ]  # fmt: skip
    found = [sweep.run(spec, "nb", "commit") for spec in specs]
    start = weight_cache.of_base("A0")
    for record in found:
        a, b = ([m.astype(np.float64) - start for m in weight_cache.of_group(record["spec"][side])] for side in "ab")
        total = np.sum([layer["products"] for layer in record["layers"].values()], axis=0)
        assert total == pytest.approx(np.array([[x @ y for y in b] for x in a]), rel=1e-5, abs=1e-7)
    own = found[0]["layers"]
    assert sum(layer["entries"] for layer in own.values()) == found[0]["d"] == es_runs[0][0]["d"]
    assert sum(layer["start"] for layer in own.values()) == pytest.approx(start @ start, rel=1e-5)
    norms = np.sqrt(np.diag(np.sum([layer["products"] for layer in own.values()], axis=0)))
    assert norms == pytest.approx([run["update_norm"] for run in es_runs[0][:2]], rel=1e-5)
    for layer in own.values():
        unrounded, rounded = (layer["moved"][dtype] for dtype in ("float32", "bfloat16"))
        assert all(0 < r < f <= layer["entries"] for r, f in zip(rounded, unrounded, strict=True))
    assert "moved" not in found[1]["layers"]["layer 0"]


def test_groups_must_start_from_one_base(es_runs):
    elsewhere = [r | {"spec": r["spec"] | {"base": "A1"}} for r in es_runs[1]]
    with pytest.raises(ValueError, match="displacements from A0, A1 have no products"):
        products.products_specs([es_runs[0], elsewhere], "tiny")
    with pytest.raises(ValueError, match="displacements from no base"):
        products.products_specs([], "tiny")
