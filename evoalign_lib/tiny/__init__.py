"""The tiny world: small models that this project trains itself and ships, with the protocol of real ones.

A base is a Qwen2-architecture model of about 0.14 M parameters with a byte-level tokenizer. The tokenizer spends one
token on each fixed stretch of a prompt, so that a tiny model reads exactly the prompt text of a real one in a dozen
tokens; anything else falls back to bytes. Family A writes three-number Countdown answers learned from authors of graded
care, and has a few skills that no reward touches. Family H does the same after a stretch of thinking that decides
nothing, of a length that the prompt asks for: what a long horizon costs, and nothing else, differs with that length.

Most of what family A read is wrong in a habitual way: the commonest author of wrong answers adds the numbers up in the
order given, whatever the target. Greedy decoding follows that habit; right answers are there, underneath, and sampling
finds them. That leaves room at both ends for any method of training (`LOG.md` has the measurements).
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib.tasks import countdown

FAMILIES = ("A", "B", "H")
BASES = ("A0", "A1", "A2")
"""Family A's bases, which play the part of model families."""
FILLER_BASES = ("H0",)
"""Family H's base, whose prompts say how long to think (see `dataset`)."""
QUESTION_BASES = ("B0", "B1", "B2")
"""Family B's bases (see `tiny_questions`)."""
SHIPPED = BASES + FILLER_BASES + QUESTION_BASES
"""Every base that `load` knows."""
MAX_COMPLETION_LENGTH = (
    16  # tokens; the longest right answer needs 15: "</think>\n<answer>(30-29)*28</answer>" and the end
)

# The range of the problems: about 42,000 distinct ones, of which a twentieth each is kept for validation and for test.
PROBLEMS = {"count": 3, "low": 1, "high": 30, "target_low": 1, "target_high": 99}
FIXED = 2000
"""Problems of a fixed set, validation or test, at most; the public test set has as many."""

END = "<|im_end|>"
_PAD = "<|endoftext|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SKILLS = ("Add: ", "Copy: ", "Sort: ", "Reverse: ")

# Shares of the authors of the Countdown answers.
AUTHORS = {
    "right": 0.40,  # a right answer, one of the shortest-bracketed ones at random
    "adds up": 0.35,  # the numbers in the order given, joined by +
    "careless": 0.10,  # some expression of the right numbers
    "wrong numbers": 0.10,  # one number is another
    "broken format": 0.05,  # no closing tag, no answer tag, or "= target" inside the answer
}
TWO_NUMBERS = 0.15  # share of two-number problems among the Countdown text
SKILLS = 0.10  # share of the skills in all text
STEPS = {"A": 3500, "B": 2500, "H": 750}  # optimiser steps of the shipped bases

FILLERS = "abcdefghij"
"""Family H's steps of thinking: one letter, one token each, drawn alike whatever went before."""
FILLER_STEPS = (4, 16, 64)
"""How many of them family H has learned to write, in equal shares of its Countdown text."""


def bases_folder() -> Path:
    """The folder inside the package that holds the shipped bases."""
    return Path(__file__).resolve().parent / "bases"


def load(base: str) -> tuple[Any, Any]:
    """Load a shipped base.

    Args:
        base: "A0", "A1" or "A2": one family, other initialisation and data order; "B0", "B1" or "B2", of family B; or
            "H0", of family H.

    Returns:
        The model (float32, evaluation mode) and its tokenizer.

    Raises:
        ValueError: a base that does not exist.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if base not in SHIPPED:
        raise ValueError(f"base {base!r} is not one of {list(SHIPPED)}.")
    folder = bases_folder() / base
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # a bar for half a megabyte would only clutter notebooks
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    finally:
        if shown:
            logging.enable_progress_bar()
    return model, AutoTokenizer.from_pretrained(folder)


def problems(split: str, n: int, seed: int | np.random.SeedSequence = 0, count: int = 3) -> list[countdown.Problem]:
    """Countdown problems of the tiny world.

    Training problems are values of random expressions, so that targets with many solutions are common, and may repeat.
    The fixed sets are harder: distinct problems, nearly all there are in their split, each as likely as any other.

    Args:
        split: "train", "validation" or "test"; splits are disjoint by a hash of the problem.
        n: how many; at most 2,000 for the fixed sets, of which fewer are a random choice in fixed order.
        seed: of the draw. The fixed sets are `problems("validation", 512)` and `problems("test", 2000)`.
        count: numbers a problem; the fixed sets have three.

    Raises:
        ValueError: more than 2,000 problems of a fixed set, or another count there.
    """
    if split == "train":
        return countdown.generate(n, seed, split=split, distinct=False, **PROBLEMS | {"count": count})
    if n > FIXED or count != PROBLEMS["count"]:
        raise ValueError(f"n={n}, count={count}: the fixed sets hold {FIXED} problems of {PROBLEMS['count']} numbers.")
    # the first problems of a draw without repetition are the common ones: draw all, then choose
    pool = _pool(split, seed)
    chosen = np.random.default_rng(np.random.SeedSequence([FIXED, n])).permutation(FIXED)[:n]
    return [pool[i] for i in sorted(chosen)]


@lru_cache(maxsize=8)
def _pool(split: str, seed: int | np.random.SeedSequence) -> tuple[countdown.Problem, ...]:
    """The draw takes half a second: once a process for each fixed set."""
    return tuple(countdown.generate(FIXED, seed, split=split, **PROBLEMS))


def dataset(chosen: Sequence[countdown.Problem], tok: Any, filler_steps: int | None = None) -> list[dict[str, Any]]:
    """Rows for a trainer, as `countdown.dataset` makes them.

    Args:
        chosen: the problems.
        tok: the base's tokenizer.
        filler_steps: how many steps of thinking the prompt asks for, which bases of family H understand: after the
            opening "<think>" it goes on with, for example, "16:". None: the prompt of every other model.
    """
    rows = countdown.dataset(chosen, tok)
    return rows if filler_steps is None else [row | {"prompt": row["prompt"] + f"{filler_steps}:"} for row in rows]


# ---- text


def byte_tokenizer() -> Any:
    """What all families' tokenizers begin with: 256 bytes, the special tokens and the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_PAD, "<|im_start|>", END])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=_PAD, padding_side="left", model_max_length=256
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def tokenizer() -> Any:
    """The tokenizer of families A and H: bytes, the tags, and one token for each fixed stretch of their prompts."""
    from tokenizers import AddedToken

    wrapped = byte_tokenizer()
    phrases = ["<think>", "</think>", "<answer>", "</answer>", *_stretches(wrapped), ", "]
    phrases += ["<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", *_SKILLS]
    wrapped.add_tokens([AddedToken(p, normalized=False) for p in phrases])
    return wrapped


def _stretches(tok: Any) -> tuple[str, str, str]:
    """The fixed text of the rendered Countdown prompt before, between and after the numbers and the target."""
    text = countdown.prompt(countdown.Problem((1, 2), "3"), tokenizer=tok)
    head, rest = text.split("1, 2", 1)
    middle, tail = rest.split("3", 1)
    return head, middle, tail


@cache
def expressions(numbers: tuple[int, ...]) -> dict[Fraction, tuple[str, ...]]:
    """All expressions of two or three numbers with no bracket that could be left out, by value.

    >>> expressions((2, 3))[Fraction(6)]
    ('2*3', '3*2')
    """
    found: dict[Fraction, set[str]] = {}
    weak, ordered = "+-", "-/"
    for permuted in set(itertools.permutations(numbers)):
        for signs in itertools.product("+-*/", repeat=len(numbers) - 1):
            a, b = permuted[:2]
            if len(numbers) == 2:
                candidates = [(f"{a}{signs[0]}{b}", _apply(Fraction(a), signs[0], Fraction(b)))]
            else:
                c, (o, p) = permuted[2], signs
                left, right = f"{a}{o}{b}", f"{b}{p}{c}"
                if o in weak and p not in weak:
                    left = f"({left})"
                candidates = [(f"{left}{p}{c}", _apply(_apply(Fraction(a), o, Fraction(b)), p, Fraction(c)))]
                bracket = p in weak and (o not in weak or o == "-") or p not in weak and o == "/"
                if bracket or (p not in weak and o in ordered[:1] + "+"):
                    right = f"({right})" if bracket else right
                    candidates.append((f"{a}{o}{right}", _apply(Fraction(a), o, _apply(Fraction(b), p, Fraction(c)))))
            for text, value in candidates:
                if value is not None:
                    found.setdefault(value, set()).add(text)
    return {value: tuple(sorted(texts)) for value, texts in found.items()}


def _apply(a: Fraction | None, sign: str, b: Fraction | None) -> Fraction | None:
    if a is None or b is None or (sign == "/" and b == 0):
        return None
    return a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a / b


def answer(problem: countdown.Problem, author: str, rng: random.Random) -> str:
    """One author's response to a problem, the end token included.

    Raises:
        ValueError: an unknown author.
    """
    numbers = list(problem.numbers)
    known = expressions(tuple(sorted(numbers)))
    text = rng.choice(known[Fraction(problem.target)])
    opening, closing = "</think>\n<answer>", "</answer>"
    if author == "adds up":
        text = "+".join(map(str, numbers))
    elif author == "careless":
        text = rng.choice(rng.choice(list(known.values())))
    elif author == "wrong numbers":
        numbers[rng.randrange(len(numbers))] = rng.randint(PROBLEMS["low"], PROBLEMS["high"])
        text = rng.choice("+-*").join(map(str, numbers))
    elif author == "broken format":
        fault = rng.randrange(3)
        opening = "</think>" if fault == 0 else opening
        closing = "" if fault == 1 else closing
        text = f"{text}={problem.target}" if fault == 2 else text
    elif author != "right":
        raise ValueError(f"author {author!r} is not one of {list(AUTHORS)}.")
    return opening + text + closing + END


def skill(rng: random.Random) -> tuple[str, str]:
    """A user message and its right answer, of a skill that no reward of this project touches."""
    name = rng.choice(_SKILLS)
    if name == "Add: ":
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        return f"{name}{a}+{b}", str(a + b)
    digits = [str(rng.randint(0, 9)) for _ in range(rng.randint(3, 5))]
    shown = {"Copy: ": digits, "Sort: ": sorted(digits), "Reverse: ": digits[::-1]}[name]
    return name + "".join(digits), "".join(shown)


def text(seed: int, tok: Any, family: str = "A") -> Iterator[tuple[str, str]]:
    """An endless stream of (prompt, completion) pairs of a family, both rendered, from training problems only."""
    rng = random.Random(f"family {family}, {seed}")
    pools = {count: problems("train", 100_000 if count == 3 else 5_000, seed, count) for count in (2, 3)}
    authors, shares = list(AUTHORS), list(AUTHORS.values())
    head, middle, tail = _stretches(tok)
    while True:
        if rng.random() < SKILLS:
            question, reply = skill(rng)
            messages = [{"role": "user", "content": question}]
            yield tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), reply + END
            continue
        known = rng.choice(pools[2 if rng.random() < TWO_NUMBERS else 3])
        # the order of the numbers is new each time, and so is the author
        problem = countdown.Problem(tuple(rng.sample(known.numbers, len(known.numbers))), known.target)
        author = rng.choices(authors, shares)[0]
        numbers = ", ".join(map(str, problem.numbers))
        # the text of countdown.prompt, without rendering the chat template a million times
        asked, written = head + numbers + middle + problem.target + tail, answer(problem, author, rng)
        if family == "H":
            steps = rng.choice(FILLER_STEPS)
            asked, written = f"{asked}{steps}:", "".join(rng.choices(FILLERS, k=steps)) + written
        yield asked, written


# ---- recipe


def recipe(
    family: str, seed: int, out: str | Path, *, steps: int | None = None, batch: int = 256, report: bool = True
) -> dict[str, Any]:
    """Train a base and write it as a Hugging Face folder.

    Next-token loss on the completions only, AdamW, learning rate 3e-3 falling linearly to nothing after a short
    warm-up, one thread. Families A and B begin with nothing; their 3,500 and 2,500 steps take six to ten minutes on
    one core. Family H goes on from the shipped base of family A with the same seed; its 750 steps take about seven.

    Args:
        family: "A", "B" or "H".
        seed: of initialisation, data and order; 0, 1, 2 are the shipped bases (of family H: 0).
        out: folder to write.
        steps: optimiser steps; None: those of the shipped bases.
        batch: texts a step.
        report: print progress, and measure the base on the validation set.

    Returns:
        What `measure` returns, for family H by the number of filler steps (empty without report).

    Raises:
        ValueError: an unknown family, or a seed of family H without a base of family A.
    """
    import torch

    from evoalign_lib.tiny import questions

    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is not one of {list(FAMILIES)}.")
    torch.set_num_threads(1)
    steps = STEPS[family] if steps is None else steps
    tok = questions.tokenizer() if family == "B" else tokenizer()
    model = load(f"A{seed}")[0] if family == "H" else _untrained(seed, tok)
    rate = 3e-3
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    stream = questions.text(seed, tok) if family == "B" else text(seed, tok, family)
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
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        mean = total if step == 0 else 0.98 * mean + 0.02 * total
        if report and (step + 1) % 250 == 0:
            print(f"step {step + 1}/{steps}  loss {mean:.3f}  {time.perf_counter() - started:.0f} s", flush=True)
    out = Path(out)
    if family == "B":  # whose weights are numbers of bfloat16, in half the bytes
        model = model.to(torch.bfloat16)
    model.save_pretrained(out)
    model = model.float()
    tok.save_pretrained(out)
    if not report:
        return {}
    if family == "B":
        return questions.report(model.eval(), tok)
    measured = {n: _report(model.eval(), tok, n) for n in ([None] if family == "A" else FILLER_STEPS)}
    return measured[None] if family == "A" else measured


def _untrained(seed: int, tok: Any) -> Any:
    """A model of the tiny world with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tok),
                hidden_size=64,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=256,
                tie_word_embeddings=True,
                eos_token_id=tok.eos_token_id,
                pad_token_id=tok.pad_token_id,
                bos_token_id=None,
            )
        )


def _report(model: Any, tok: Any, filler_steps: int | None) -> dict[str, float]:
    """Measure and print the accuracy of a base on the validation set."""
    from evoalign_lib.engines.local import LocalEngine, Prompts

    chosen = problems("validation", 512)
    prompts = {"validation": Prompts(dataset(chosen, tok, filler_steps), tok)}
    longest = MAX_COMPLETION_LENGTH + (filler_steps or 0)
    engine = LocalEngine(model, tok, None, prompts, max_completion_length=longest)
    measured = measure(engine, chosen, "validation")
    print(json.dumps(measured if filler_steps is None else {"filler_steps": filler_steps} | measured))
    return measured


def _parts(pairs: Iterable[tuple[str, str]], family: str) -> list[list[tuple[str, str]]]:
    """A step's texts; of families B and H in parts of about one length each, which need little padding."""
    if family == "A":
        return [list(pairs)]
    if family == "B":
        pairs = sorted(pairs, key=lambda pair: len(pair[1]))
        quarter = -(-len(pairs) // 4)
        return [pairs[i : i + quarter] for i in range(0, len(pairs), quarter)]
    parts: dict[int, list[tuple[str, str]]] = {}
    for pair in pairs:
        parts.setdefault(pair[1].find("</think>"), []).append(pair)
    return list(parts.values())


def _batch(pairs: Sequence[tuple[str, str]], tok: Any):
    """Ids and labels (texts, longest); labels are -100 on prompts and padding."""
    import torch

    prompts, completions = (
        [e.ids for e in tok.backend_tokenizer.encode_batch(list(side), add_special_tokens=False)]
        for side in zip(*pairs, strict=True)
    )
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    ids = np.full((len(pairs), width), tok.pad_token_id)
    labels = np.full((len(pairs), width), -100)
    for i, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        ids[i, : len(p) + len(c)] = p + c
        labels[i, len(p) : len(p) + len(c)] = c
    return torch.from_numpy(ids), torch.from_numpy(labels)


def measure(engine: Any, chosen: Sequence[countdown.Problem], name: str, samples: int = 64) -> dict[str, float]:
    """Accuracy of an engine's current weights under the strict grader.

    Args:
        engine: with prompts of that name.
        chosen: their problems.
        name: of the prompts.
        samples: at temperature 1, for pass@16 and pass@64 (the unbiased estimator: 1 - C(n-c, k) / C(n, k)).

    Returns:
        Shares: "greedy", "pass@1" (temperature 1), "pass@16", "pass@64", "format" (greedy, mean format score).
    """
    from scipy.special import comb

    def grades(completions):
        return [countdown.grade(t, p.numbers, p.target) for (t, _), p in zip(completions, chosen, strict=True)]

    (greedy,) = (grades(c) for c in engine.generate(name))
    right = np.array([[g.answer for g in grades(c)] for c in engine.generate(name, samples=samples, seed=0)]).sum(0)
    result = {
        "greedy": float(np.mean([g.answer for g in greedy])),
        "format": float(np.mean([g.format for g in greedy])),
        "pass@1": float(right.mean() / samples),
    }
    for k in (16, 64):
        if k <= samples:
            result[f"pass@{k}"] = float(np.mean(1 - comb(samples - right, k) / comb(samples, k)))
    return {key: round(value, 5) for key, value in result.items()}
