"""A judge in vLLM answers as the same model does in transformers."""

import pytest

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")

from small_models import SETTINGS, chat_tokenizer  # noqa: E402

from evoalign_lib.judges import ARENA, ChatJudge, LocalChat, Pair, Rubric, VLLMChat, judge_pairs  # noqa: E402

SHORT = Rubric("short", "Judge.", "End with [[score of A, score of B]].", "scores")


def test_a_judge_in_vllm_answers_as_transformers_do(folder, tmp_path):
    chat_tokenizer().save_pretrained(folder)
    local = LocalChat(folder, max_tokens=8, batch_size=3)
    backend = VLLMChat(folder, max_tokens=8, dtype="float32", max_model_len=1024, **SETTINGS)
    pairs = [Pair("What is 1 + 1?", "2", "two"), Pair("Why?", "[[10, 1]]", "I can not say.")]
    expected = judge_pairs(ChatJudge(local, SHORT), pairs)
    judged = judge_pairs(ChatJudge(backend, SHORT), pairs, tmp_path / "cache")
    assert judged.judgements == expected.judgements
    again = judge_pairs(ChatJudge(backend, SHORT), pairs, tmp_path / "cache")
    assert again.judgements == judged.judgements and again.spent.cached == 4
    assert ChatJudge(backend, ARENA).backend.identity()["backend"] == "vllm"
