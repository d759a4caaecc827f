"""Members of low rank: updates, and batches of members against what each writes with matrices of its own."""

import json
import math

import numpy as np
import pytest
import torch
from es_runs import token_sum, trainer
from helpers import PROMPTS, chained, random_model, tokenizer, with_another_head

from evoalign_lib import ledger, noise
from evoalign_lib.engines import local
from evoalign_lib.engines.base import Options, Prompts
from evoalign_lib.rewards import Rewards
from evoalign_lib.update_rules import population

# ---- batches of members


WITH_PREFIX = [f"add {p}" for p in PROMPTS]


def engine(prompts=WITH_PREFIX, model=None, **changed) -> local.LocalEngine:
    rows = {"train": Prompts([{"prompt": p} for p in prompts], tokenizer())}
    common = {"max_completion_length": 6, "rank": 2, "chunk_rows": 40} | changed
    return local.LocalEngine(model or random_model(), tokenizer(), Rewards([token_sum]), rows, **common)


def apart(tested: local.LocalEngine, *arguments):
    """What members do with matrices of their own."""
    tested._joins = False
    return tested.evaluate(*arguments)


MEMBERS = population(noise.run_key("es", 0), 0, 14, antithetic=True)


@pytest.mark.parametrize("rank", [1, 2, 8])
@pytest.mark.parametrize(("tied", "last"), [(True, id), (False, id), (True, with_another_head)])
def test_joined_members_write_what_their_own_matrices_write(rank, tied, last):
    """Greedily, with a prefix that all prompts share, in batches of which the last is filled up."""
    last(model := random_model(tie_word_embeddings=tied))
    decoders = "loop", "loop" if last is id else "generate"
    together, one = (engine(model=model, rank=rank, decoder=decoder) for decoder in decoders)
    assert together._joins and len(together.prompts["train"].prefix) > 0
    indices = np.array([4, 0, 7])
    found = together.evaluate(MEMBERS, 0.1, "train", indices)
    expected = apart(one, MEMBERS, 0.1, "train", indices)
    assert [e.scored.rewards.tolist() for e in found] == [e.scored.rewards.tolist() for e in expected]
    assert len({tuple(e.scored.rewards) for e in found}) > 5, "members must differ, or nothing was compared"
    assert all(e.core_seconds > 0 for e in found)


@pytest.mark.parametrize("workers", [1, 2])
def test_samples_and_stop_strings(workers):
    options = Options(temperature=0.8, top_k=20, stop_strings=("1",))
    sampling = (noise.sampling_key(1, 2), 2)
    arguments = MEMBERS, 0.1, "train", np.array([1, 2]), None, sampling
    found = engine(options=options, workers=workers).evaluate(*arguments)
    expected = apart(engine(options=options), *arguments)
    for one, other in zip(found, expected, strict=True):
        assert one.scored.rewards.tolist() == other.scored.rewards.tolist()
        assert (one.lengths == other.lengths).all() and (one.clipped == other.clipped).all()


def test_what_is_decoded_member_by_member():
    """Too few members in a chunk, a model that rounds, another decoder: the plan says which."""
    assert engine().plan["least_members"] == local.LEAST_MEMBERS
    for other in (
        engine(rank=0), engine(model=random_model().to(torch.bfloat16)), engine(decoder="generate"),
    ):  # fmt: skip
        assert "least_members" not in other.plan
    tested, calls = engine(chunk_rows=11), []
    tested.evaluate_member, own = lambda *a: calls.append(a) or own(*a), tested.evaluate_member
    tested.evaluate(MEMBERS, 0.1, "train", np.arange(3))
    assert len(calls) == len(MEMBERS)
    tested.evaluate(MEMBERS, 0.1, "train", np.arange(2))  # room for five
    assert len(calls) == len(MEMBERS)


# ---- a step of a run


def test_a_ledger_that_says_how_updates_were_scaled(tmp_path):
    """By alpha sigma / sqrt(N), as older ledgers say and no new run does, and not by alpha / N."""
    tested = trainer(tmp_path, max_steps=1, sigma=0.1, alpha=0.2, perturbation="low_rank", rank=3)
    start = tested.engine.master.copy()
    tested.train()
    path = tmp_path / ledger.NAME
    header, line, _ = map(json.loads, path.read_bytes().splitlines())
    header["settings"]["update_scaling"] = "hyperscale"
    path.write_bytes(chained([header, line]))
    moved, expected = ledger.replay(path, random_model()) - start, 0.1 * math.sqrt(6) * (tested.engine.master - start)
    np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-6)
    assert np.abs(expected).max() > 1e-3
