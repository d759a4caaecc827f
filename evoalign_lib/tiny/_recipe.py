"""Train and describe the bases of the tiny world."""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib.checks import choose, whole_number
from evoalign_lib.tiny import countdown, dialogues, questions, sequence
from evoalign_lib.tiny.base import FAMILIES, load

STEPS = {"A": 3500, "B": 2500, "C": 1800, "D": 2500, "H": 750}  # optimiser steps of the shipped bases
_BATCH = {"D": 64}  # texts per step; other families: 256
_TOLD = {"B": questions, "C": dialogues, "D": sequence}


def recipe(
    family: str,
    seed: int,
    out: str | Path,
    *,
    steps: int | None = None,
    batch: int | None = None,
    progress: bool = True,
    start: str | None = None,
    authors: Mapping[str, float] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Train a base and write it as a Hugging Face folder.

    Training uses next-token loss on the completions only, AdamW, a learning rate that falls linearly from 3e-3 to zero
    after a short warm-up, and one thread. Families A to D start from random weights; their 3,500, 2,500, 1,800
    and 2,500 steps take two to ten minutes on one core. Family H starts from the shipped base of family A with the same
    seed; its 750 steps take about seven minutes.

    Args:
        family: "A", "B", "C", "D" or "H".
        seed: seed of initialisation, data and order; 0, 1, 2 are the shipped bases (of families C, D and H: 0).
        out: folder to write.
        steps: optimiser steps; None: as many as for the shipped bases.
        batch: texts per step; None: as many as for the shipped bases.
        progress: whether to print the loss every 250 steps.
        start: shipped base of family A from which to go on; None: as described above.
        authors: of family A: as for `countdown.text`.
        sizes: of a model with random weights: fields of its configuration that differ from the shipped bases'.

    Raises:
        ValueError: an unknown family, a seed or steps below 0, or a seed of family H without a base of family A.
    """
    import torch

    choose("family", family, FAMILIES)
    whole_number("seed", seed, 0)
    steps = STEPS[family] if steps is None else whole_number("steps", steps, 0)
    batch = _BATCH.get(family, 256) if batch is None else batch
    torch.set_num_threads(1)
    told = _TOLD.get(family)  # the module of family B, C or D
    tok = (told or countdown).tokenizer()
    start = f"A{seed}" if family == "H" else start
    model = load(start)[0] if start else _untrained(seed, tok, sizes or {})
    rate, parameters = 3e-3, list(model.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    stream = told.text(seed, tok) if told else countdown.text(seed, tok, family, authors)
    started, mean = time.perf_counter(), 0.0
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * (1 - step / steps)
        parts = [_batch(part, tok) for part in _parts(itertools.islice(stream, batch), family)]
        tokens = sum(int((labels >= 0).sum()) for _, labels in parts)
        optimiser.zero_grad()
        total = 0.0
        for ids, labels in parts:
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            scored = labels[:, 1:] >= 0
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[scored]), labels[:, 1:][scored])
            loss = loss * (int(scored.sum()) / tokens)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        mean = total if step == 0 else 0.98 * mean + 0.02 * total
        if progress and (step + 1) % 250 == 0:
            print(f"step {step + 1}/{steps}  loss {mean:.3f}  {time.perf_counter() - started:.0f} s", flush=True)
    # families B, C and D are stored in bfloat16, in half the bytes
    (model.to(torch.bfloat16) if told else model).save_pretrained(out)
    tok.save_pretrained(out)


def _untrained(seed: int, tok: Any, changed: Mapping[str, int]) -> Any:
    """Return a model of the tiny world with random weights and changed sizes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 256, "tie_word_embeddings": True}
    ends = {"eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id, "bos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tok), **sizes | dict(changed), **ends))


def _parts(pairs: Iterable[tuple[str, str]], family: str) -> list[list[tuple[str, str]]]:
    """Return a step's texts; for families B, C, D and H in parts of similar length, which need little padding."""
    if family == "A":
        return [list(pairs)]
    if family in _TOLD:
        pairs = sorted(pairs, key=lambda pair: len(pair[1]))
        quarter = -(-len(pairs) // 4)
        return [pairs[i : i + quarter] for i in range(0, len(pairs), quarter)]
    parts: dict[int, list[tuple[str, str]]] = {}
    for pair in pairs:
        parts.setdefault(pair[1].find("</think>"), []).append(pair)
    return list(parts.values())


def _batch(pairs: Sequence[tuple[str, str]], tok: Any) -> tuple[Any, Any]:
    """Return token ids and labels, (texts, longest) each; labels are -100 on prompts and padding."""
    import torch

    prompts, completions = (
        [e.ids for e in tok.backend_tokenizer.encode_batch(list(side), add_special_tokens=False)]
        for side in zip(*pairs, strict=True)
    )
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    ids, labels = np.full((len(pairs), width), tok.pad_token_id), np.full((len(pairs), width), -100)
    for row, scored, p, c in zip(ids, labels, prompts, completions, strict=True):
        row[: len(p) + len(c)] = p + c
        scored[len(p) : len(p) + len(c)] = c
    return torch.from_numpy(ids), torch.from_numpy(labels)


def describe(engine_of: Callable[..., Any], tokenizer: Any, family: str) -> dict[Any, Any]:
    """Return how well a base does its family's task: shares of right answers or mean rewards, greedy and sampled.

    engine_of: (rows with prompts, maximum completion length in tokens) -> an engine whose prompts are named "asked".
    """
    return _TOLD.get(family, countdown).describe(engine_of, tokenizer, family)
