"""ESSA: decompositions of an adapter, the search of its singular values, what is refused, and runs that end alike."""

import copy
import json
import logging
import math
import os
import random
import re
import signal
from typing import Any

import es_runs
import numpy as np
import pytest
import torch
from helpers import ROWS, SFT_ROWS, chained, in_child, ran, random_model, refused, short_run, token_sum, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from trl import SFTConfig

from evoalign_lib import _adapters, _singular, ledger, precision
from evoalign_lib._singular import DISTANCE, SIGMA, SingularWeights, decompose
from evoalign_lib.es import ESConfig
from evoalign_lib.essa import ESSAConfig, ESSATrainer, lora_config

peft = pytest.importorskip("peft")
pytest.importorskip("cma")


def drawn(rank: int = 2, **changed) -> peft.LoraConfig:
    """The adapter of the paper, with a B that is not zero."""
    config = lora_config(rank)
    vars(config).update({"init_lora_weights": False} | changed)
    return config


def attached(seed: int = 0, config=None) -> Any:
    """A model with an adapter that is drawn from the seed."""
    return _adapters.attach(random_model(), config or drawn(), seed)


def trainer(folder, score=token_sum, model=None, adapter="drawn", sft=None, kind=ESSATrainer, **changed):
    args = short_run(folder, ESSAConfig, **{"population_size": 6, "prompts_per_step": 3} | changed)
    adapted = {"peft_config": drawn() if adapter == "drawn" else adapter, "sft_dataset": sft}
    return kind(model or random_model(), score, args, ROWS, ROWS, tokenizer(), **adapted)


# ---- decompositions


def adapter_of(rng, inputs: int, outputs: int, rank: int) -> dict[str, np.ndarray]:
    shapes = {"layer.lora_A.default.weight": (rank, inputs), "layer.lora_B.default.weight": (outputs, rank)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def changed_by(tensors, found: _singular.Decomposition, delta) -> dict[str, np.ndarray]:
    """The adapter with its singular values changed, by the formula."""
    moved = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    for part in found.parts:
        moved[part.name] += (part.u.T * delta[part.first : part.first + len(part.u)]) @ part.w
    return moved


def by_svd(matrix, delta) -> np.ndarray:
    """U (S + delta) V^T by NumPy; delta may be shorter than S."""
    u, s, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    s[: len(delta)] += delta
    return (u * s) @ v


@given(st.integers(0, 99), st.integers(4, 9), st.integers(4, 9), st.integers(1, 4), st.integers(1, 4))
def test_a_decomposition_changes_the_singular_values(seed, inputs, outputs, rank, k):
    rng = np.random.default_rng(seed)
    tensors, k = adapter_of(rng, inputs, outputs, rank), min(k, rank)
    found = decompose(tensors, k / rank)
    delta = rng.standard_normal(len(found.values))
    moved = changed_by(tensors, found, delta)
    assert found.undetermined is None and len(delta) == 2 * k
    for (name, tensor), mine in zip(tensors.items(), (delta[:k], delta[k:]), strict=True):
        np.testing.assert_allclose(moved[name], by_svd(tensor, mine), atol=1e-9)


@pytest.mark.parametrize(("rank", "share", "k", "wider"), [(2, 1.0, 2, 4), (4, 0.5, 2, 4), (3, 0.67, 2, 4)])
def test_the_dimension(tmp_path, rank, share, k, wider):
    tested = trainer(tmp_path, adapter=drawn(rank, rank_pattern={"q_proj": 2 * rank}), leading_share=share)
    assert tested.engine.weights.dimension == 2 * 2 * (3 * k + wider)  # layers * (A and B) * (k, v, o and q)


# ---- what is refused


def flat() -> Any:
    """A model with an adapter of which one row of each A is another's."""
    model = attached()
    for name, p in model.named_parameters():
        if "lora_A" in name:
            p.data[1] = p.data[0]
    return model


SETTINGS = {
    "alpha": [0.1], "antithetic": [True], "fitness_shaping": ["centred_ranks"], "sigma_schedule": ["linear"],
    "perturbation": ["low_rank"], "anchor_decay": [0.1], "noise": ["byte_sum"], "precision": ["kahan"],
    "engine": ["ray"], "population_size": [3], "sigma": [0.0, math.inf], "leading_share": [0, 1.5, "all"],
    "shared_batch": ["yes"], "learning_rate": [1e-6],
}  # fmt: skip


test_what_is_refused = refused(
        *(
            (lambda _, given={name: value}: ESSAConfig(**given), ValueError, f"{name}={re.escape(repr(value))}")
            for name, values in SETTINGS.items()
            for value in values
        ),
        (lambda _: lora_trainer(args=ESConfig(report_to="none")), TypeError, "ESConfig"),
        (lambda folder: trainer(folder, sft=[]), ValueError, "sft_dataset is empty"),
        (lambda folder: trainer(folder, sft=["a"]), TypeError, "row 0 .* 'a'"),
        (lambda folder: trainer(folder, sft={"train": SFT_ROWS}), TypeError, "'train'"),
        (lambda _: lora_trainer(sft_dataset=SFT_ROWS, sft_args={}), TypeError, "sft_args is a dict"),
        (lambda folder: lora_trainer(sft_args=SFTConfig(str(folder), bf16=False)), ValueError, "without sft_dataset"),
        (lambda folder: trainer(folder).warm_start(), ValueError, "sft_dataset"),
        (lambda folder: trainer(folder, adapter=lora_config(2), sft=SFT_ROWS).step(), RuntimeError, "warm_start"),
        # directions that are arbitrary, or none
        (lambda folder: trainer(folder, adapter=None), ValueError, "lora_B.*is zero.*warm-start"),
        (lambda folder: trainer(folder, model=flat(), adapter=None), ValueError, "fewer than 2"),
        (lambda folder: trainer(folder, leading_share=0.4), ValueError, "leading_share=0.4 of the 2"),
        (lambda folder: trainer(folder, adapter=drawn(bias="lora_only")), ValueError, "bias' is to be trained"),
        (lambda folder: trainer(folder, adapter=drawn(modules_to_save=["norm"])), ValueError, "norm.*to be trained"),
        (lambda folder: trainer(folder, adapter=drawn(use_dora=True)), ValueError, "lora_magnitude.*to be trained"),
        (lambda _: decompose({"a.lora_A.w": np.ones((2, 2, 2)), "a.lora_B.w": np.ones((2, 2))}, 1),
         ValueError, r"\(2, 2, 2\)"),
    call=lambda make, tmp_path: make(tmp_path),
)  # fmt: skip


def lora_trainer(**given):
    return ESSATrainer(random_model(), token_sum, train_dataset=ROWS, **given)


# ---- the search


def random_states() -> list:
    """The global random states of Python, NumPy and torch."""
    return [random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()]  # noqa: NPY002


@pytest.mark.parametrize(("layers", "dimension"), [([0], 2), ([0, 1], 4)])
def test_the_search_maximises_and_leaves_random_states_alone(layers, dimension):
    settings = {"population_size": 8, "sigma": 0.3, "leading_share": 1.0}
    model = peft.get_peft_model(random_model(), drawn(1, target_modules=["q_proj"], layers_to_transform=layers))

    def mean():
        weights = SingularWeights(model, precision.layout_of(model), 7, settings)
        for step in range(40):
            weights.ask(step)
            weights.tell(-np.square(weights._candidates - 1).sum(1))
        assert weights.dimension == dimension
        return weights.es.mean

    states = random_states()
    assert np.abs(mean() - 1).max() < 0.05 and (mean() == mean()).all()
    assert random_states() == states


# ---- a run


def moved_by(tested) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in tested.model.named_parameters() if p.requires_grad}


def test_a_run_moves_singular_values_alone(tmp_path):
    tested = trainer(tmp_path)
    before = moved_by(tested)
    tested.train()
    for name, after in moved_by(tested).items():
        u, s, v = np.linalg.svd(before[name].astype(np.float64), full_matrices=False)
        turned = u.T @ after @ v.T
        assert np.abs(turned - np.diag(turned.diagonal())).max() < 1e-6 < np.abs(turned.diagonal() - s).max()
    log = tested.state.log_history
    assert log[0][SIGMA] == 0.32 and log[0][DISTANCE] == 0 < log[1][DISTANCE]
    assert log[-1]["completions"] == 3 * 6 * 3 and log[-1]["forward_flops"] > 0 == log[-1]["sft_tokens"]


def test_a_tied_run_keeps_the_bits_of_its_start(tmp_path):
    tested = trainer(tmp_path, lambda completions, **columns: [0.5] * len(completions))
    start = tested.engine.master.tobytes()
    tested.train()
    assert tested.engine.master.tobytes() == start and tested.counts["tied"] == 3
    assert [log[SIGMA] for log in tested.state.log_history] == [0.32] * 3


@pytest.mark.parametrize("shared", [False, True])
def test_mini_batches(tmp_path, shared):
    seen = []

    def spying(completion_ids, number, **columns):
        seen.append(tuple(number))
        return token_sum(completion_ids)

    tested = ran(trainer(tmp_path, spying, shared_batch=shared))
    steps = [set(seen[i : i + 6]) for i in range(0, 18, 6)]
    assert all(len(step) == 1 if shared else len(step) > 3 for step in steps) and steps[0] != steps[1]
    assert all(len(set(batch)) == 3 for batch in seen)
    assert tested.ledger.header["settings"]["shared_batch"] is shared
    lengths = tested.train_prompts.lengths
    assert tested.budget["prompt_tokens"] == sum(lengths[list(batch)].sum() for batch in seen)


# ---- the warm start


def test_the_warm_start(tmp_path):
    tested = trainer(tmp_path, adapter=lora_config(2), sft=SFT_ROWS)
    states = random_states()
    base = {name: p.detach().clone() for name, p in tested.model.named_parameters() if not p.requires_grad}
    cost = tested.warm_start()
    assert random_states() == states and not tested.model.training
    assert all(torch.equal(p, base[name]) for name, p in tested.model.named_parameters() if name in base)
    tok = tested.processing_class
    tokens = sum(len(tok(row["prompt"] + row["completion"])["input_ids"]) + 1 for row in SFT_ROWS)  # and the end
    assert cost["tokens"] == 3 * tokens and cost["completions"] == 0 < cost["core_seconds"] and cost["steps"] == 3
    parameters = sum(p.numel() for p in tested.model.parameters())
    assert cost["forward_flops"] == 3 * 2 * parameters * cost["tokens"]
    with pytest.raises(RuntimeError, match="fine-tuned already"):
        tested.warm_start()
    found = tested.train()
    spent = tested.budget["prompt_tokens"] + tested.budget["generated_tokens"]
    assert found.metrics["forward_flops"] == cost["forward_flops"] + 2 * parameters * spent
    assert found.metrics["core_seconds"] > cost["core_seconds"] and found.metrics["completions"] == 54
    assert tested.state.log_history[-1]["num_tokens"] == cost["tokens"] + spent
    assert ledger.read(tmp_path / ledger.NAME).header["warm_start"] == cost
    # a resumed run takes the adapter from there and trains nothing again
    again = trainer(tmp_path, adapter=lora_config(2), sft=SFT_ROWS)
    again._fine_tune = None
    again.train(resume_from_checkpoint=True)
    assert again.engine.weights.digest() == tested.engine.weights.digest() and again.warm_start_cost == cost
    assert again.budget | {"core_seconds": 0} == tested.budget | {"core_seconds": 0}
    with pytest.raises(ValueError, match="sft='[0-9a-f]{16}'"):
        trainer(tmp_path, adapter=lora_config(2), sft=SFT_ROWS[1:]).train(resume_from_checkpoint=True)


def test_a_warm_start_that_fails_changes_nothing(tmp_path, monkeypatch):
    tested = trainer(tmp_path, sft=[{"neither": 1}])
    before = moved_by(tested)
    with pytest.raises(Exception):  # noqa: B017, TRL's own
        tested.warm_start()
    assert all((p == before[name]).all() for name, p in moved_by(tested).items()) and tested.warm_start_cost is None


# ---- the ledger


def test_a_replay_on_another_machine(tmp_path, caplog):
    model = attached()
    ran(trainer(tmp_path, model=copy.deepcopy(model), adapter=None))
    path = tmp_path / ledger.NAME
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert lines[0]["evoalign_ledger"] == 6 and ledger.verify(path, model).recomputed
    lines[0]["settings"]["machine"] = "another, numpy 1"
    path.write_bytes(chained(lines))
    with caplog.at_level(logging.WARNING):
        report = ledger.verify(path, model)
    assert report.within == 1e-6 and not report.recomputed and "another, numpy 1" in caplog.text
    with pytest.raises(ValueError, match="machine='another, numpy 1'"):
        trainer(tmp_path, model=copy.deepcopy(model), adapter=None).train(resume_from_checkpoint=True)
    lines[3]["log"][lines[1]["names"].index(SIGMA)] *= 1.001
    path.write_bytes(chained(lines))
    with pytest.raises(ledger.LedgerError, match="after 2 steps search/sigma is"):
        ledger.verify(path, model)


# ---- runs that end with the same bits: with any number of workers, after kill -9, and in a replay


def begun(folder, adapter_seed: int = 1, **changed) -> ESSATrainer:
    """A run of five steps whose adapter is drawn from a seed of its own."""
    return trainer(folder, model=attached(adapter_seed), adapter=None, **{"max_steps": 5, "seed": 5} | changed)


def outcome(tested: ESSATrainer) -> dict:
    """All that runs must share that are one."""
    es = tested.engine.weights.es
    found = [es.mean.tobytes(), es.sm.C.tobytes(), es.sigma, es.pc.tobytes(), es.sigma_vec.scaling.tobytes()]
    return es_runs.outcome(tested) | {"search": found}


class Dying(ESSATrainer):
    """Is killed in its fourth step, once that is recorded and before the search has moved."""

    def tell(self, members, fitness):
        if self.state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().tell(members, fitness)


KILLED = [
    {"workers": 2, "shared_batch": True, "save_strategy": "steps", "save_steps": 2, "chunk_rows": 4},
    {"leading_share": 0.5, "fitness": "random"},
]


@pytest.mark.parametrize("settings", KILLED, ids=str)
def test_killed_resumed_and_replayed(tmp_path, settings):
    whole = ran(begun(tmp_path / "whole", **settings | {"workers": 1}))
    folder = tmp_path / "killed"
    assert in_child(lambda: begun(folder, kind=Dying, **settings).train()) == -signal.SIGKILL
    assert len(ledger.read(folder / ledger.NAME).steps) == 4
    again = begun(folder, adapter_seed=2, **settings)  # a new process draws another adapter
    again.predict(ROWS)  # its workers know no other
    again.train(resume_from_checkpoint=True)
    assert outcome(again) == outcome(whole)
    start = peft.PeftModel.from_pretrained(random_model(), folder / ledger.START, is_trainable=True)
    assert ledger.replay(folder / ledger.NAME, start).tobytes() == whole.engine.master.tobytes()
    assert ledger.verify(folder / ledger.NAME, start).recomputed
    shorter = ledger.replay(folder / ledger.NAME, start, step=3)
    assert shorter.tobytes() != whole.engine.master.tobytes()


def test_the_same_trainer_goes_on_after_an_interrupt(tmp_path):
    whole = ran(begun(tmp_path / "whole"))
    tested = begun(tmp_path / "run")
    calls = iter(range(100))

    def interrupted(completion_ids, **columns):
        if next(calls) == 2 * 6 + 2:
            raise KeyboardInterrupt
        return token_sum(completion_ids)

    tested.rewards.functions[0] = interrupted
    with pytest.raises(KeyboardInterrupt):
        tested.train()
    tested.train()
    assert all(outcome(tested)[what] == outcome(whole)[what] for what in ("search", "weights"))
