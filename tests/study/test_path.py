"""Lines between models: their ends are the models themselves, and every point answers the same questions."""

import numpy as np
import pytest
from evoalign_study import sweep, weight_cache
from evoalign_study.kinds.weights import path_spec
from evoalign_study.records import unpack_bits

SIZES = {"max_completion_length": 16, "validation_problems": 40, "path_points": 3}
SETTINGS = {
    "max_completion_length": 16, "validation_problems": 40, "test_problems": 10, "steps": 2, "prompts_per_step": 4,
    "curve_points": 2, "population_size": 3, "sigma": 0.03, "alpha": 0.03,
}  # fmt: skip
RUNS = [("es", 2)]


@pytest.fixture(scope="module")
def runs(es_runs):
    (found,) = es_runs
    return found


@pytest.fixture(scope="module")
def line(runs):
    return sweep.run(path_spec("A0", None, weight_cache.end(runs[:1]), SIZES, "tiny"), "nb", "commit")


def test_the_ends_are_the_base_and_the_run(runs, line):
    points = line["points"]
    assert all(len(values) == 3 for values in points.values())
    assert points["kl"][0] == 0 < points["kl"][1] < points["kl"][2]
    assert line["distance"] == pytest.approx(runs[0]["update_norm"], rel=1e-6)
    ends = [float(unpack_bits(points["greedy_bits"][i], 40).mean()) for i in (0, -1)]
    assert ends == pytest.approx([runs[0]["curve"]["validation_greedy"][i] for i in (0, -1)], abs=1e-5)
    assert all(0 < value < 60 for value in points["nll"])
    assert all(0 <= value <= 1.1 for name in points if name.startswith("reward") for value in points[name])


def test_a_line_run_the_other_way_is_its_mirror_image(runs, line):
    mirrored = sweep.run(path_spec("A0", weight_cache.end(runs[:1]), None, SIZES, "tiny"), "nb", "commit")
    assert mirrored["points"] == {name: values[::-1] for name, values in line["points"].items()}


def test_the_middle_of_two_runs_is_their_mean(runs):
    ends = [weight_cache.end([run]) for run in runs]
    between = sweep.run(path_spec("A0", *ends, SIZES, "tiny"), "nb", "commit")["points"]
    mean = sweep.run(path_spec("A0", None, weight_cache.end(runs), SIZES, "tiny"), "nb", "commit")["points"]
    assert {name: values[1] for name, values in between.items()} == {name: v[2] for name, v in mean.items()}
    assert np.ptp(between["nll"]) > 0


def test_bad_lines_are_refused(runs):
    end = weight_cache.end(runs[:1])
    for ends, sizes, message in (
        ((end, end), SIZES, "both ends of the path are the same model"),
        ((None, None), SIZES, "both ends of the path are the same model"),
        ((None, end), SIZES | {"path_points": 2}, "path_points=2: a path has 3 to 50"),
        ((None, end), {"path_points": 3}, "a path needs the setting"),
        ((None, end), SIZES | {"path_points": 50, "validation_problems": 256}, "12800 answers, too many for a record"),
    ):
        with pytest.raises(ValueError, match=message):
            path_spec("A0", *ends, sizes, "tiny")
    with pytest.raises(ValueError, match="an end of the path started from base 'A0', the path from 'A1'"):
        path_spec("A1", None, end, SIZES, "tiny")
