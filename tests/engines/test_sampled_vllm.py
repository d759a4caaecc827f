"""Samples of own models through vLLM: counts are those of its own texts, of a model and of its ends."""

import shutil
from contextlib import closing

import numpy as np
import pytest
from evoalign_study import base_models, measures, sweep, training
from evoalign_study.kinds.decode import read_texts, sampled_specs
from evoalign_study.records import record_line, unpack_integers
from helpers import tokenizer
from small_models import model

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")

SETTINGS = {
    "max_completion_length": 8, "sampled_problems": 5, "sampled_block": 5, "sampled_samples": 6,
    "sampled_temperatures": [1.0], "engine": "vllm",
}  # fmt: skip
ANY_LETTER = "e"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, external_data):
    """A run folder of the test's own; a completion with a certain letter is right, since random models know no sums."""
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(type(measures.get("countdown")), "right", lambda self, problem, text: ANY_LETTER in text)
    return tmp_path


@pytest.fixture(scope="module")
def end(tmp_path_factory):
    """Another model of the same kind, in float32, without a tokenizer."""
    made = tmp_path_factory.mktemp("end")
    model(seed=3).save_pretrained(made)
    return made


def run_all(folder, end=None, **changed):
    return [sweep.run(spec, "nb", "commit") for spec in sampled_specs(folder, end, SETTINGS | changed, "full")]


def texts(records):
    return [entry["texts"] for record in records for entry in read_texts(record)]


def test_counts_are_those_of_the_texts_whatever_the_blocks(folder):
    (spec,) = sampled_specs(folder, None, SETTINGS, "full")
    (one,) = run_all(folder)
    assert one["plan"]["decoder"] == "vllm" and one["plan"]["dtype"] == "bfloat16" and spec["engine"] == "vllm"
    loaded, tok = base_models.model_of(spec)
    rows = {"test": training.rows(spec, tok, measures.get("countdown").sets(spec)["test"])}
    with closing(base_models.evaluation_engine(spec, loaded, tok, rows)) as engine:
        drawn = list(zip(*engine.generate("test", samples=6, seed=0), strict=True))
        # the prompts are in the cache after the first sample
        assert engine.generator.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    assert texts([one]) == [[text for text, _ in row] for row in drawn]
    expected = [sum(ANY_LETTER in text for text, _ in row) for row in drawn]
    assert unpack_integers(one["right"]).tolist() == expected and 0 < sum(expected) < 30
    assert one["generated_tokens"] == sum(len(ids) for row in drawn for _, ids in row)
    assert one["prompt_tokens"] == 6 * engine.prompts["test"].lengths.sum()
    blocks = run_all(folder, sampled_block=3)
    assert [r["spec"]["block"] for r in blocks] == [[0, 3], [3, 5]]
    counts = np.concatenate([unpack_integers(r["right"]) for r in blocks]).tolist()
    # in bfloat16 a near-tie may go another way in another batch
    same = np.mean([a == b for a, b in zip(sum(texts(blocks), []), sum(texts([one]), []), strict=True)])
    assert same > 0.9 and np.abs(np.subtract(counts, expected)).sum() <= 3
    assert not any(text in record_line(one) for row in texts([one]) for text in row if len(text) > 6)


def test_the_end_of_a_training_is_sampled_with_its_weights(folder, end, place):
    own, of_end = (texts(run_all(folder, which)) for which in (None, end))
    # the same weights in a folder of their own, given as a model, write the same
    shutil.copytree(end, place / "copy")
    tokenizer().save_pretrained(place / "copy")
    assert texts(run_all(str(place / "copy"))) == of_end != own
