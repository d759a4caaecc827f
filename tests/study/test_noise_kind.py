"""Noise on the weights of models: the same for all, of the declared size, and gone from one draw to the next."""

import numpy as np
import pytest
from evoalign_study import sweep, weight_cache
from evoalign_study.kinds.weights import PARTS, noise_spec
from evoalign_study.records import record_line

from evoalign_lib import noise
from evoalign_lib.analysis import robustness

SIZES = {"max_completion_length": 16, "validation_problems": 40, "noise_sigmas": [1e-9, 0.03], "noise_trials": 2}
SETTINGS = {
    "max_completion_length": 16, "validation_problems": 40, "test_problems": 10, "steps": 2, "prompts_per_step": 4,
    "curve_points": 2, "population_size": 3, "sigma": 0.03, "alpha": 0.03,
}  # fmt: skip
RUNS = [("es", 1)]


@pytest.fixture(scope="module")
def runs(es_runs):
    (found,) = es_runs
    return found


@pytest.fixture(scope="module")
def shaken(runs):
    return sweep.run(noise_spec("A0", weight_cache.end(runs), SIZES, "tiny"), "nb", "commit")


def test_without_noise_and_with_next_to_none_a_model_answers_as_it_did(runs, shaken):
    assert shaken["clean"]["greedy"] == pytest.approx(runs[0]["curve"]["validation_greedy"][-1], abs=1e-5)
    for part in PARTS:
        for decoding, clean in shaken["clean"].items():
            still, loud = shaken[part][decoding]
            # each draw begins from the model's own weights: what the loud noise of the part before left would show
            assert still == [clean, clean]
            assert len(loud) == 2
    assert any(shaken[part]["t1"][1] != [shaken["clean"]["t1"]] * 2 for part in PARTS)
    assert any(len(set(shaken[part][name][1])) == 2 for part in PARTS for name in shaken["clean"])  # draws differ
    assert len(record_line(shaken)) < 8_000


def test_a_record_is_the_same_when_it_is_made_again(runs, shaken):
    again = sweep.run(noise_spec("A0", weight_cache.end(runs), SIZES, "tiny"), "nb", "commit")
    assert all(again[name] == shaken[name] for name in ("clean", *PARTS))


def test_the_draws_are_those_of_no_run_and_the_same_for_all(monkeypatch, runs):
    seen: dict[str, list] = {"base": [], "run": []}
    now: list[str] = []

    def noted(weights, sigma, key, **how):
        moved = perturb(weights, sigma, key, **how)
        seen[now[-1]].append({name: (moved[name] - weights[name]).numpy() for name in weights})
        return moved

    perturb = robustness.perturb
    monkeypatch.setattr(robustness, "perturb", noted)
    few = SIZES | {"noise_sigmas": [0.5], "noise_trials": 1, "validation_problems": 2}
    for whose, end in (("base", None), ("run", weight_cache.end(runs))):
        now.append(whose)
        sweep.run(noise_spec("A0", end, few, "tiny"), "nb", "commit")
    isotropic, relative, head, body = seen["base"]
    for name, eps in isotropic.items():
        # float32 sums round at the size of the weights
        assert np.allclose(eps, seen["run"][0][name], atol=1e-6)
        assert np.array_equal(eps, head[name] + body[name])
    lengths = [
        sum(float(np.square(e, dtype=np.float64).sum()) for e in each.values()) for each in (isotropic, relative)
    ]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.02)  # as long in all, but for the draw
    assert lengths[0] == pytest.approx(0.25 * sum(e.size for e in isotropic.values()), rel=0.02)
    own = noise.member_key(noise.run_key("es", 0), 0, 0)
    assert own != noise.member_key(noise.run_key("robustness", 0), 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_sigmas": []}, "take 1 to 8 finite standard deviations"),
        ({"noise_sigmas": [0.01, -1.0]}, "take 1 to 8 finite standard deviations"),
        ({"noise_sigmas": [0.0, 0.01]}, "take 1 to 8 finite standard deviations above 0"),
        ({"noise_sigmas": [float("nan")]}, "take 1 to 8 finite standard deviations"),
        ({"noise_trials": 0}, "noise_trials=0: take 1 to 8"),
    ],
)
def test_noise_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        noise_spec("A0", None, SIZES | change, "tiny")


def test_a_model_of_another_base_is_refused(runs):
    with pytest.raises(ValueError, match="started from base 'A0', the spec is of 'A1'"):
        noise_spec("A1", weight_cache.end(runs), SIZES, "tiny")
