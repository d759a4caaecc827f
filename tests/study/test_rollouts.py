"""Rollouts of one kind with updates of the other: ratios, the gradient that weights follow, budgets, composed runs."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evoalign_study import measures, rollouts, sweep, training, weight_cache
from evoalign_study.kinds import train
from evoalign_study.kinds.train import composed_specs, train_specs
from helpers import SMALL_RUN, ran, refused, short_run
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib import grpo, ledger, models, noise, tiny
from evoalign_lib.analysis import gradient, kl
from evoalign_lib.engines.base import as_given
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.es import ESConfig

SETTINGS = SMALL_RUN | {"curve_points": 2, "sigma": 0.01, "alpha": 0.03, "prompts": 64, "batch_size": 16, "epochs": 1}
RUNS = [("es", 2)]


@given(st.lists(st.floats(-200, 200), min_size=1, max_size=30))
def test_ratios_are_clipped_and_counted(log_ratios):
    found, told = rollouts.clipped(np.array(log_ratios))
    assert found == pytest.approx(np.minimum(np.exp(np.minimum(log_ratios, 1)), rollouts.CLIP))
    assert told["clipped_share"] == np.mean(np.array(log_ratios) > np.log(rollouts.CLIP))
    assert 0 < told["effective_share"] <= 1 + 1e-12 or not found.any()


def test_as_likely_completions_count_in_full_and_those_of_a_diverged_model_for_nothing():
    diverged = ([np.nan, 0.0, -np.inf, np.inf], [0.0, 1.0, 0.0, 0.0], 0.25)
    for log_ratios, expected, share in (([0.0] * 7, [1.0] * 7, 1.0), diverged):
        ratios, told = rollouts.clipped(np.array(log_ratios))
        assert ratios.tolist() == expected and told["clipped_share"] == 0.0
        assert [told["effective_share"], told["mean_ratio"]] == pytest.approx([share, np.mean(expected)])


# ---- what perturbed members write


@pytest.fixture(scope="module")
def engine():
    model, tokenizer = tiny.load("A0")
    rows = measures.get("countdown").rows({}, tokenizer, tiny.problems("train", 8))
    found = LocalEngine(model, tokenizer, None, {"few": Prompts(rows, tokenizer)}, max_completion_length=16)
    yield found
    found.close()


def test_each_place_of_a_group_is_another_members(engine):
    """Members answer every prompt once; the ratio is that of the unperturbed weights to the member that wrote."""
    prompts, before = engine.prompts["few"], engine.master.copy()
    writer = rollouts.PerturbedRollouts(engine, "grpo_perturbed", 3, 0.01, 5, lambda: None)
    asked = [prompt for prompt in prompts.prompts for _ in range(5)]
    told = writer(asked, SimpleNamespace(state=SimpleNamespace(global_step=7)))
    assert np.array_equal(engine.master, before) and len(told["completion_ids"]) == 40
    assert all(not p.isnan().any() for p in engine.model.parameters())
    key = noise.run_key("grpo_perturbed", 3)
    for member in range(5):
        own = told["completion_ids"][member::5]
        written = kl.samples(prompts.ids, prompts.mask, own, engine.eos_ids)
        with engine.perturbed(noise.member_key(key, 7, member), 0.01):
            row = engine.generate_rows("few", np.arange(8), seed=noise.sampling_key(key, 7), draw=member)
            engine.write_model()
            theirs = kl.log_probabilities(engine.model, written)[0]
        engine.write_model()
        base = kl.log_probabilities(engine.model, written)[0]
        assert [ids for _, ids in row] == own
        ratio = np.minimum(np.exp((base - theirs).numpy()), rollouts.CLIP)
        assert told["importance_ratio"][member::5] == pytest.approx(ratio)
    assert 0 < writer.summary()["effective_share"] < 1 and writer.state()["attributes"]["batches"] == 1
    with pytest.raises(RuntimeError, match="num_generations"):
        writer(prompts.prompts[:5], SimpleNamespace(state=SimpleNamespace(global_step=0)))


def test_greedy_answers_are_those_of_the_copies(engine):
    found = rollouts.greedy_answers(engine, ["few"], 5, 0.03, 3)["few"]
    with engine.perturbed(noise.member_key(5, 0, 2), 0.03):
        assert found[2] == engine.generate("few")[0]
    assert len(found) == 3 and len({str(row) for row in found}) == 3


# ---- members that are weighed


def weighted(folder, steps=3, **changed):
    """A trainer of ES whose members are weighed, on eight prompts with a reward that differs between completions."""
    model, tokenizer = tiny.load("A0")
    rows = measures.get("countdown").rows({}, tokenizer, tiny.problems("train", 8))
    settings = {"population_size": 4, "sigma": 0.01, "alpha": 0.01, "num_generations": 3, "prompts_per_step": 4}
    settings |= {"sampling": "common", "max_steps": steps, "arm": "es_weighted", "seed": 1}
    args = short_run(folder, ESConfig, max_completion_length=16, **settings | changed)
    reward = lambda prompts, completions, **columns: [hash_of(c) for c in completions]  # noqa: E731
    return rollouts.WeightedTrainer(model, reward, args, rows, None, tokenizer)


def hash_of(completion) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return hashlib.sha256(str(completion).encode()).digest()[0] / 256


def test_to_first_order_the_fitness_is_the_noise_along_the_policy_gradient(tmp_path):
    """sigma eps . g, with g the policy gradient of the same completions, a group's mean reward being the baseline."""
    sigma = 1e-4
    es = weighted(tmp_path, population_size=12, sigma=sigma, num_generations=6)
    members = es.ask(0)
    fitness = es._evaluate_members(0, members).rewards
    engine, prompts, key = es.engine, es.engine.prompts["train"], noise.sampling_key(es.run_key, 0)
    indices = es._indices(0)
    written = [pair for i in range(6) for pair in engine.generate_rows("train", indices, seed=key, draw=i)]
    texts = as_given(prompts, written)
    rewards = np.array([hash_of(text) for text in texts]).reshape(6, 4)
    advantages = (rewards - rewards.mean(0)) / rewards.size
    engine.model.zero_grad()
    for row, (_, ids) in enumerate(written):
        i = indices[row % 4]
        known = torch.tensor([*prompts.ids[i][prompts.mask[i] == 1].tolist(), *ids])[None]
        logps = engine.model(known).logits[0, :-1].log_softmax(-1).gather(1, known[0, 1:, None])[-len(ids) :]
        (float(advantages.flat[row]) * logps.sum()).backward()
    slopes = {name: p.grad.numpy() for name, p in engine.model.named_parameters()}
    along = gradient.flat(engine.layout, slopes).astype(np.float64)
    expected = []
    for member in members:
        with engine.weights.member(member.key, sigma, member.sign) as perturbed:
            expected.append(float((np.asarray(perturbed, np.float64) - engine.master) @ along))
    assert np.corrcoef(fitness, expected)[0, 1] > 0.999
    assert np.polyfit(expected, fitness, 1)[0] == pytest.approx(1, abs=0.02)


def test_a_step_costs_one_set_of_completions_and_a_pass_per_member_and_its_run_goes_on(tmp_path):
    es = ran(weighted(tmp_path / "whole"))
    assert es.budget["completions"] == 3 * 4 * 3 and es.passes == 2 + 4
    lengths = es.train_prompts.lengths
    assert es.budget["prompt_tokens"] == sum(int(lengths[es._indices(step)].sum()) for step in range(3)) * 3
    assert es.budget["generated_tokens"] == sum(step.tokens for step in es.ledger.steps)
    logged = [entry["completions/mean_length"] for entry in es.state.log_history]
    assert logged == pytest.approx([step.tokens / 12 for step in es.ledger.steps])
    assert set(es.summary()) == set(rollouts.TOLD) and 0 < es.summary()["effective_share"] <= 1
    weighted(tmp_path / "parts", steps=2).train()
    again = ran(weighted(tmp_path / "parts"), True)
    assert models.flat_digest(again.engine.master) == models.flat_digest(es.engine.master)
    assert again.summary() == es.summary() and again.budget["completions"] == es.budget["completions"]
    assert np.array_equal(ledger.replay(tmp_path / "whole" / ledger.NAME, "A0"), es.engine.master)


@pytest.mark.parametrize("rewards", [[[1.0, np.nan], [0.0, np.nan]], [[1.0, 0.5], [0.0, np.nan]]])
def test_what_has_no_reward_is_left_out(rewards):
    ratios = np.array([[1.0, 2.0], [0.5, 0.1]])
    first = 1.0 / 1.5
    expected = first if np.isnan(rewards[0][1]) else (first + 0.5) / 2
    assert rollouts._weighted_mean(np.array(rewards), ratios) == pytest.approx(expected)
    assert rollouts._weighted_mean(np.array(rewards), 0 * ratios) == 0.0  # of a model that diverged
    with pytest.raises(ValueError, match="None"):
        rollouts._weighted_mean(np.full((2, 2), np.nan), ratios)


test_members_that_cannot_be_weighed_are_refused = refused(
    *(({"num_generations": 1} | more, "num_generations=1") for more in ({}, {"sampling": "greedy"})),
    call=lambda changed, tmp_path: weighted(tmp_path, **changed),
)


def test_ratios_multiply_the_advantages_in_the_order_of_the_completions():
    """Of TRL's own advantages, whatever it makes of the rewards; each row has the ratio of its completion."""

    class Trainer:
        def _generate_and_score_completions(self, inputs):
            for row, ratio in zip(inputs, [1.0, 0.5, 0.0, 2.0], strict=True):  # as TRL hands on what rollouts return
                row["importance_ratio"] = ratio
            return {"advantages": torch.tensor([1.0, -2.0, 0.5, 3.0])}

    made = grpo._extended(Trainer, None, False, True)()._generate_and_score_completions([{}, {}, {}, {}])
    assert made["advantages"].tolist() == [1.0, -1.0, 0.0, 6.0]


def test_completions_without_weight_move_nothing(monkeypatch):
    """Ratios of 0 leave no gradient, so that the weights stay: the ratios reach the update of a real run."""
    monkeypatch.setattr(rollouts, "CLIP", 0.0)
    (spec,) = train_specs("grpo_perturbed", ["A0"], [0], SETTINGS, "tiny")
    assert train.run(spec)["update_norm"] == 0.0


# ---- arms and runs


def test_fine_tuning_on_what_copies_wrote_learns_from_their_right_answers(monkeypatch):
    drawn, greedy = [], rollouts.greedy_answers
    monkeypatch.setattr(
        rollouts, "greedy_answers", lambda *given: drawn.append(greedy(*given)["train"]) or {"train": drawn[0]}
    )
    (spec,) = train_specs("sft_perturbed", ["A0"], [0], SETTINGS, "tiny")
    record = train.run(spec)
    measure = measures.get("countdown")
    problems = measure.sets(spec)["train"]
    right = sum(measure.right(p, text) for row in drawn[0] for p, (text, _) in zip(problems, row, strict=True))
    assert record["counts"]["kept"] == right > 0 and len(drawn[0]) == spec["num_generations"]


# ---- runs in two parts


def test_the_second_part_begins_where_the_first_one_ended(es_runs):
    (first,) = es_runs
    specs = composed_specs("grpo", first, SETTINGS, "tiny")
    assert [spec["seed"] for spec in specs] == [0, 1] and {spec["kind"] for spec in specs} == {"composed"}
    record = sweep.run(specs[0], "nb", "commit")
    assert record["curve"]["validation_greedy"][0] == first[0]["curve"]["validation_greedy"][-1]
    ends = [weight_cache.of_group(weight_cache.group([r]))[0] for r in (first[0], record)]
    assert np.linalg.norm(ends[1] - ends[0]) == pytest.approx(record["update_norm"], rel=1e-5)
    assert models.flat_digest(ends[1]) == record["digest"]
    model, _, _ = training.world(specs[0])
    begun = LocalEngine(model, tiny.tokenizer(), None, {}, max_completion_length=1)
    assert models.flat_digest(begun.master) == first[0]["digest"]


def composed(changed, es_runs):
    first = es_runs[0][0]
    composed_specs("grpo", [first | {"spec": first["spec"] | changed}], SETTINGS, "tiny")


OTHERS = ({"kind": "coverage"}, "1 runs"), ({"base": "some/model"}, "'some/")
test_a_second_part_after_what_is_no_training_run_is_refused = refused(*OTHERS, call=composed)
