"""ESSA: decompositions of an adapter, the search of its singular values, what is refused, and the toy of the paper."""

import copy
import json
import logging
import random
import re

import numpy as np
import pytest
import torch
from helpers import PROMPTS, chained, random_model, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib import _singular, ledger
from evoalign_lib._singular import DISTANCE, SIGMA, SearchSettings, decompose, leading
from evoalign_lib.es import ESConfig
from evoalign_lib.essa import ESSAConfig, ESSATrainer, lora_config

peft = pytest.importorskip("peft")
pytest.importorskip("cma")

ROWS = [{"prompt": p, "number": i} for i, p in enumerate(PROMPTS)]
SFT = [{"prompt": p, "completion": str(i)} for i, p in enumerate(PROMPTS)]


def token_sum(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


def drawn(rank: int = 2, **changed) -> peft.LoraConfig:
    """The adapter of the paper, with a B that is not zero."""
    config = lora_config(rank)
    config.init_lora_weights = False
    for name, value in changed.items():
        setattr(config, name, value)
    return config


def trainer(folder, score=token_sum, model=None, adapter="drawn", sft=None, rows=ROWS, callbacks=None, **changed):
    settings = {
        "output_dir": str(folder), "population_size": 6, "max_steps": 3, "prompts_per_step": 3, "workers": 1,
        "max_completion_length": 3, "disable_tqdm": True, "save_strategy": "no", "report_to": "none",
    } | changed  # fmt: skip
    adapter = drawn() if adapter == "drawn" else adapter
    return ESSATrainer(
        random_model() if model is None else model, score, ESSAConfig(**settings), rows, rows, tokenizer(), callbacks,
        peft_config=adapter, sft_dataset=sft,
    )  # fmt: skip


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


shapes = st.tuples(st.integers(0, 99), st.integers(4, 9), st.integers(4, 9), st.integers(1, 4), st.integers(1, 4))


@given(shapes)
def test_separate_changes_the_singular_values_of_a_and_of_b(case):
    seed, inputs, outputs, rank, k = case
    rng = np.random.default_rng(seed)
    tensors, k = adapter_of(rng, inputs, outputs, rank), min(k, rank)
    found = decompose(tensors, k / rank, "separate")
    assert len(found.values) == 2 * k and found.undetermined is None
    delta = rng.standard_normal(2 * k)
    moved = changed_by(tensors, found, delta)
    for (name, tensor), mine in zip(tensors.items(), (delta[:k], delta[k:]), strict=True):
        np.testing.assert_allclose(moved[name], by_svd(tensor, mine), atol=1e-9)


@given(shapes)
def test_product_changes_the_singular_values_of_b_a(case):
    seed, inputs, outputs, rank, k = case
    rng = np.random.default_rng(seed)
    tensors, k = adapter_of(rng, inputs, outputs, rank), min(k, rank)
    found = decompose(tensors, k / rank, "product")
    delta = rng.standard_normal(k)
    a, b = changed_by(tensors, found, delta).values()
    before = tensors["layer.lora_B.default.weight"].astype(np.float64) @ tensors["layer.lora_A.default.weight"]
    np.testing.assert_allclose(found.values, np.linalg.svd(before)[1][:k], atol=1e-9)
    np.testing.assert_allclose(b @ a, by_svd(before, delta), atol=1e-7)
    assert (a == tensors["layer.lora_A.default.weight"]).all()


@pytest.mark.parametrize(("rank", "share", "k"), [(2, 1.0, 2), (4, 0.5, 2), (3, 0.67, 2)])
@pytest.mark.parametrize(("decomposition", "matrices"), [("separate", 2), ("product", 1)])
def test_the_dimension(tmp_path, rank, share, k, decomposition, matrices):
    settings = {"leading_share": share, "decomposition": decomposition}
    tested = trainer(tmp_path, adapter=drawn(rank), **settings)
    assert tested.engine.weights.dimension == 2 * 4 * matrices * k  # layers * (q, k, v, o) * ...
    patterned = trainer(tmp_path, adapter=drawn(rank, rank_pattern={"q_proj": 2 * rank}), **settings)
    assert patterned.engine.weights.dimension == matrices * 2 * (3 * k + leading(2 * rank, share))


def test_arbitrary_directions_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"lora_B.*is zero, so that its singular vectors are arbitrary: warm-start"):
        trainer(tmp_path, adapter=None)
    model = peft.get_peft_model(random_model(), drawn())
    for name, p in model.named_parameters():
        if "lora_A" in name:
            p.data[1] = p.data[0]
    for decomposition in _singular.DECOMPOSITIONS:
        with pytest.raises(ValueError, match="has fewer than 2 singular values that are not zero"):
            trainer(tmp_path, model=copy.deepcopy(model), adapter=None, decomposition=decomposition)
    assert trainer(tmp_path, model=model, adapter=None, leading_share=0.5).engine.weights.dimension == 16


@pytest.mark.parametrize("changed", [{"bias": "lora_only"}, {"modules_to_save": ["norm"]}, {"use_dora": True}], ids=str)
def test_more_than_lora_is_refused(tmp_path, changed):
    with pytest.raises(ValueError, match="only singular values of the two matrices A and B"):
        trainer(tmp_path, adapter=drawn(**changed))


# ---- settings


REFUSED = {
    "alpha": [0.1], "antithetic": [True], "fitness_shaping": ["centred_ranks"], "sigma_schedule": ["linear"],
    "perturbation": ["low_rank"], "anchor_decay": [0.1], "noise": ["byte_sum"], "precision": ["kahan"],
    "engine": ["ray"], "population_size": [3], "leading_share": [0, 1.5, "all"], "decomposition": ["seperate"],
    "shared_batch": ["yes"], "learning_rate": [1e-6],
}  # fmt: skip
OPTIONS = [{"maxiter": 3}, {"CMA_activ": True}, {"CMA_active": "__import__('os')"}, {"CMA_mu": 60}, {"CMA_cmean": 0}]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_settings_that_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={re.escape(repr(value))}"):
        ESSAConfig(**{name: value})


@pytest.mark.parametrize("options", [*OPTIONS, '{"seed": 3}'], ids=str)
def test_options_of_cma_that_are_refused(options):
    with pytest.raises(
        ValueError, match=f"cma_options: .*{next(iter(options)) if isinstance(options, dict) else 'seed'}"
    ):
        ESSAConfig(cma_options=options)


def test_arguments_that_are_refused(tmp_path):
    with pytest.raises(TypeError, match="args is a ESConfig: give an ESSAConfig"):
        ESSATrainer(random_model(), token_sum, ESConfig(output_dir=str(tmp_path)), ROWS)
    with pytest.raises(ValueError, match="sft_dataset is empty"):
        trainer(tmp_path, sft=[])
    with pytest.raises(TypeError, match="row 0 of sft_dataset is 'a'"):
        trainer(tmp_path, sft=["a"])
    with pytest.raises(TypeError, match="sft_dataset is a mapping"):
        trainer(tmp_path, sft={"train": SFT})
    with pytest.raises(TypeError, match="sft_args is a dict: give a trl.SFTConfig"):
        ESSATrainer(random_model(), token_sum, train_dataset=ROWS, sft_dataset=SFT, sft_args={})
    with pytest.raises(ValueError, match="needs rows to fine-tune on"):
        trainer(tmp_path).warm_start()


# ---- the search


def random_states() -> list:
    """The global random states of Python, NumPy and torch."""
    return [random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()]  # noqa: NPY002


def search(dimension: int = 5, **changed) -> _singular.Search:
    settings = {"population_size": 8, "sigma": 0.3, "cma_options": {}} | changed
    return _singular.Search(dimension, SearchSettings(leading_share=1.0, decomposition="separate", **settings))


def run(tested: _singular.Search, steps: int, reward=lambda x: -np.square(x - 1).sum(1), first: int = 0) -> np.ndarray:
    for step in range(first, first + steps):
        tested.tell(reward(tested.ask(range(100 * step, 100 * step + 8))))
    return tested.mean


@pytest.mark.parametrize("dimension", [1, 5])
def test_the_search_maximises_and_leaves_random_states_alone(dimension):
    states = random_states()
    mean = run(search(dimension), 40)
    assert np.abs(mean - 1).max() < 0.05
    assert (mean == run(search(dimension), 40)).all()
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

    tested = trainer(tmp_path, spying, shared_batch=shared)
    tested.train()
    steps = [set(seen[i : i + 6]) for i in range(0, 18, 6)]
    assert all(len(step) == 1 if shared else len(step) > 3 for step in steps) and steps[0] != steps[1]
    assert all(len(set(batch)) == 3 for batch in seen)
    assert tested.ledger.header["settings"]["shared_batch"] is shared
    lengths = tested.train_prompts.lengths
    assert tested.budget["prompt_tokens"] == sum(lengths[list(batch)].sum() for batch in seen)


# ---- the warm start


def test_the_warm_start(tmp_path):
    tested = trainer(tmp_path, adapter=lora_config(2), sft=SFT)
    with pytest.raises(RuntimeError, match=r"not fine-tuned on sft_dataset yet: call warm_start\(\)"):
        tested.step()
    states = random_states()
    base = {name: p.detach().clone() for name, p in tested.model.named_parameters() if not p.requires_grad}
    cost = tested.warm_start()
    assert random_states() == states and not tested.model.training
    assert all(torch.equal(p, base[name]) for name, p in tested.model.named_parameters() if name in base)
    tok = tested.processing_class
    tokens = sum(len(tok(row["prompt"] + row["completion"])["input_ids"]) + 1 for row in SFT)  # and the end
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
    path = tmp_path / ledger.NAME
    assert ledger.read(path).header["warm_start"] == cost and ledger.read(path).steps[0].core > cost["core_seconds"]
    start = peft.PeftModel.from_pretrained(random_model(), tmp_path / "start", is_trainable=True)
    assert ledger.verify(path, start).weights == tested.engine.weights.digest()
    # a resumed run takes the adapter from there and trains nothing again
    again = trainer(tmp_path, adapter=lora_config(2), sft=SFT)
    again._fine_tune = None
    again.train(resume_from_checkpoint=True)
    assert again.engine.weights.digest() == tested.engine.weights.digest() and again.warm_start_cost == cost
    assert {k: v for k, v in again.budget.items() if k != "core_seconds"} == {
        k: v for k, v in tested.budget.items() if k != "core_seconds"
    }
    with pytest.raises(ValueError, match="is of a run with sft='[0-9a-f]{16}', this one has"):
        trainer(tmp_path, adapter=lora_config(2), sft=SFT[1:]).train(resume_from_checkpoint=True)


def test_a_warm_start_that_fails_changes_nothing(tmp_path, monkeypatch):
    tested = trainer(tmp_path, sft=[{"neither": 1}])
    before = moved_by(tested)
    with pytest.raises(Exception):  # noqa: B017, TRL's own
        tested.warm_start()
    assert all((p == before[name]).all() for name, p in moved_by(tested).items()) and tested.warm_start_cost is None


# ---- the ledger


def edited(path, change) -> None:
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    change(lines)
    path.write_bytes(chained(lines))


def test_a_replay_on_another_machine(tmp_path, caplog):
    model = peft.get_peft_model(random_model(), drawn())
    tested = trainer(tmp_path, model=copy.deepcopy(model), adapter=None)
    tested.train()
    path = tmp_path / ledger.NAME
    assert json.loads(path.read_bytes().splitlines()[0])["evoalign_ledger"] == 6
    assert ledger.verify(path, model).recomputed
    edited(path, lambda lines: lines[0]["settings"].update(machine="another, numpy 1"))
    with caplog.at_level(logging.WARNING):
        report = ledger.verify(path, model)
    assert report.within == 1e-6 and not report.recomputed and "of another machine" in report.text()
    assert "was made on another machine (another, numpy 1): its bits are not promised here" in caplog.text
    with pytest.raises(ValueError, match="is of a run with machine='another, numpy 1', this one has"):
        trainer(tmp_path, model=copy.deepcopy(model), adapter=None).train(resume_from_checkpoint=True)

    def wrong(lines):
        lines[3]["log"][lines[1]["names"].index(SIGMA)] *= 1.001

    edited(path, wrong)
    with pytest.raises(ledger.LedgerError, match="after 2 steps search/sigma is .*: the run was made on another"):
        ledger.verify(path, model)
