"""evoalign probe: its estimates are right on a planted fitness, and what it foretells is what short runs of ES do."""

import json
from contextlib import closing

import numpy as np
import pytest
import torch
from es_runs import constant, digest, trainer
from helpers import refused, saved
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from evoalign_lib import cli, tiny
from evoalign_lib.probe import RECOMMENDATIONS, effects, probe, run_gain, text

ROWS = [{"prompt": f"{i} {i * i}"} for i in range(64)]
LEARNS, LITTLE, NONE, SATURATED = RECOMMENDATIONS


def dense(completion_ids, **columns):
    return [float(np.mean([i % 7 for i in ids])) / 6 for ids in completion_ids]


def made(folder, **changed):
    usual = {"reward": dense, "rows": ROWS, "eval_dataset": ROWS, "population_size": 12, "prompts_per_step": 32}
    return trainer(folder, **usual | {"max_steps": 12, "sigma": 0.02, "alpha": 0.02} | changed)


def test_a_planted_fitness_is_measured_without_bias_and_a_step_gains_what_the_law_says():
    rng, d, m, steps, pairs, sigma, walk, alpha, error = np.random.default_rng(0), 40, 16, 3, 10, 0.1, 0.2, 0.05, 0.4
    gradient, curvature = np.full(d, d**-0.5), rng.uniform(0, 1, d)

    def fitness(weights):
        return weights @ gradient - np.square(weights) @ curvature / 2

    found = []
    for _ in range(300):
        noise = rng.standard_normal((pairs, 1, d)) * np.array([[1], [-1]])
        true = [fitness(scale * noise).reshape(-1, 1, 1) for scale in (sigma, walk)]
        answers = [each + error * rng.standard_normal((2 * pairs, steps, m)) for each in true]
        found.append([np.mean(part) for part in effects(*answers)])
    odd, walked, even, spread, single = np.mean(found, 0)
    true_even, few = sigma**4 * np.square(curvature).sum() / 2, error**2 / m
    assert (odd, walked, even) == pytest.approx((sigma**2, sigma * walk, true_even), rel=0.05)
    assert (spread, single) == pytest.approx((odd + even + few, odd + even + error**2), rel=0.02)
    gains, N = [], 2 * pairs
    for _ in range(4000):
        noise = rng.standard_normal((N, d))
        f = fitness(sigma * noise) + rng.standard_normal(N) * error / m**0.5
        gains.append(fitness(alpha / N * ((f - f.mean()) / f.std()) @ noise))
    gain, loss = alpha / walk * walked / spread**0.5, (alpha / sigma) ** 2 * sigma**2 * curvature.sum() / 2 / N
    assert np.mean(gains) == pytest.approx(gain - loss, rel=0.06)
    assert run_gain(gain, loss, 10, 1) == pytest.approx(gain - loss, rel=0.01)  # to first order
    assert run_gain(1, 0.1, 2, np.array([5, 50])) == pytest.approx([1.336, -3], rel=1e-3)  # there are 2 to gain


SAMPLED = {"sampling": "common", "num_generations": 2, "sigma": 0.1, "alpha": 0.1}


@pytest.mark.parametrize("changed", [{}, {"antithetic": True}, SAMPLED])
def test_what_it_foretells_happens(changed, tmp_path):
    run = made(tmp_path, **changed)
    with closing(run.engine):
        before, found = digest(run), probe(run, 24_000 if changed is SAMPLED else 12_000, right=None)
        assert digest(run) == before and found["recommendation"] == LEARNS, text(found)
        assert 0 < found["run"]["low"] < found["run"]["gain"] and 0 < found["reliability"] < 1 and found["rho"] > 0.3
        start = run.evaluate()["eval_reward"]
        run.train()
        assert found["run"]["gain"] / 3 < run.evaluate()["eval_reward"] - start < 3 * found["run"]["gain"]


def half(completion_ids, **columns):
    return [None if sum(ids) % 2 else score for ids, score in zip(completion_ids, dense(completion_ids), strict=True)]


SAID = [(constant, 1.0, NONE), (constant, None, NONE), (constant, 0.1, SATURATED), (half, None, LITTLE)]


@pytest.mark.parametrize(("reward", "right", "said"), SAID)
def test_without_signal_it_says_so(reward, right, said, tmp_path):
    run = made(tmp_path, reward=reward, sigma=0.0002 if reward is half else 0.02, alpha=0.0002)
    with closing(run.engine):
        assert probe(run, 5_000, right)["recommendation"] == said


test_what_it_cannot_foretell_is_refused = refused(
    ({"fitness": "random"}, "fitness='random'"),
    ({"alpha_schedule": "linear"}, "alpha_schedule='linear'"),
    ({"anchor_decay": 0.1}, "anchor_decay=0.1"),
    ({"population_size": 400}, "completions=9000 .* at least 26688"),
    ({"reward": lambda completions, **columns: [None] * len(completions)}, "apply to 0 prompt"),
    call=lambda changed, tmp_path: probe(made(tmp_path, **changed), 9_000),
)


def test_the_command_calls_an_untrained_base_one_without_signal(tmp_path, external_data):
    torch.manual_seed(0)
    place = saved(tmp_path / "untrained", AutoModelForCausalLM.from_config(tiny.load("A0")[0].config))
    out, settings = tmp_path / "out.json", "--prompts 8 --population 4 --completions 900 --max-completion-length 8"
    arguments = ["probe", place, "countdown", *settings.split(), "--out", str(out)]
    result = CliRunner().invoke(cli.app, arguments)
    record = json.loads(out.read_text())
    assert result.exit_code == 0 and NONE in result.output and record["recommendation"] == NONE
    assert record["setting"]["alpha"] == record["setting"]["sigma"] / 2 == 0.0005 and record["completions"] <= 900
    assert CliRunner().invoke(cli.app, arguments).exit_code == 1  # the file exists
    assert CliRunner().invoke(cli.app, ["probe", place, "safety"]).exit_code == 1  # has no reward of its own
