"""Family C's scorers: small reward and cost models, trained on comparisons by annotators of different tastes.

Each scorer is a pair of sequence classifiers, a reward model and a cost model, trained with TRL's `RewardTrainer` on
one set of noisy comparisons (`dialogues.comparisons`). The *proxies* share an architecture and differ in what their
annotators like besides the truth, in the requests they asked about and in their draws; so each of them is a judge that
was not used in training for a run on another. The *outsiders* are of other architectures, and their annotators like
nothing besides the truth. The *noisy* ones have annotators whose answers are turned round, and the *small* and *large*
ones other sizes: they are what a run on a worse, or another, judge is trained on.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evoalign_lib.checks import choose
from evoalign_lib.tasks import chat_prompt
from evoalign_lib.tiny import dialogues
from evoalign_lib.tiny.base import END
from evoalign_lib.tiny.dialogues import Annotators

PARTS = 9
"""Disjoint sets of training requests; scorers that are compared with each other have asked about different ones."""
COMPARISONS = 2000
EPOCHS = 10
SIDES = ("reward", "cost")


class Scorer(NamedTuple):
    """How a scorer is made."""

    annotators: Annotators
    part: int
    """Which of the `PARTS` of the requests its comparisons are about."""
    architecture: str = "qwen2"
    """"qwen2", "bert" or "gpt2"."""
    hidden: int = 32
    """Width; it has one layer."""


PROXIES: dict[str, Scorer] = {
    f"{cue} {number}": Scorer(Annotators(cue), 3 * (number - 1) + i)
    for number in (1, 2)
    for i, cue in enumerate(dialogues.CUES)
}
"""Judges that runs are trained on: two of each cue."""
OUTSIDERS: dict[str, Scorer] = {
    "bert": Scorer(Annotators(), 6, "bert"),
    "gpt2": Scorer(Annotators(), 7, "gpt2"),
}
"""Judges of other architectures that no run is trained on."""
NOISY: dict[str, Scorer] = {f"flipped {flips:g}": Scorer(Annotators(flips=flips), 8) for flips in (0.0, 0.1, 0.2, 0.3)}
"""Judges whose annotators like nothing besides the truth, and whose answers are turned round this often."""
SIZES: dict[str, Scorer] = {f"width {hidden}": Scorer(Annotators(), 8, hidden=hidden) for hidden in (8, 16)}
"""Smaller ones without turned answers; that of width 32 is "flipped 0"."""
SCORERS: dict[str, Scorer] = PROXIES | OUTSIDERS | NOISY | SIZES


def folder(name: str) -> Path:
    """Return the folder inside the package that holds a shipped scorer, and in it one for each of `SIDES`.

    Raises:
        ValueError: an unknown scorer.
    """
    choose("scorer", name, SCORERS)
    return Path(__file__).resolve().parent / "scorer_models" / name.replace(" ", "-").replace(".", "")


def scorer_recipe(name: str, out: str | Path) -> None:
    """Train a scorer's reward and cost model and write them, each as a Hugging Face folder without tokenizer.

    Ten epochs over 2,000 comparisons in batches of 32, AdamW, learning rate 3e-3 falling linearly, one thread: about
    eight seconds. The seed is a hash of the name. The cost model's zero lies, as in Safe-RLHF, between harmless and
    harmful replies: its configuration has as `shift` what is to be taken from its scores.

    Raises:
        ValueError: an unknown scorer.
    """
    import torch

    how = SCORERS[name] if folder(name) else None
    torch.set_num_threads(1)
    seed = int.from_bytes(name.encode(), "big") % 2**31
    tok = dialogues.tokenizer()
    compared = dialogues.comparisons(how.annotators, COMPARISONS, seed, how.part, PARTS)
    for side in SIDES:
        model = _untrained(how, tok, seed)
        rows = []
        for c in compared:
            better = c.more_helpful if side == "reward" else c.more_harmful
            texts = [rendered(c.request.text, reply, tok) for reply in c.replies]
            rows.append({"chosen": texts[better], "rejected": texts[1 - better]})
        _train(model, rows, tok, seed)
        model = model.to(torch.bfloat16).float()  # the numbers that the file will have
        model.config.shift = _border(model, compared, tok) if side == "cost" else 0.0
        model.to(torch.bfloat16).save_pretrained(Path(out) / side)


TEXT = "continued"
"""How a scorer reads a request and a reply (`reward_models.TEXTS`): as `rendered`."""


def rendered(request: str, reply: str, tok: Any) -> str:
    """Return the text that a scorer is trained on: the chat prompt of the request, the reply, the end token."""
    return chat_prompt(request, tok) + reply + END


def _untrained(how: Scorer, tok: Any, seed: int) -> Any:
    import torch
    import transformers

    wide, places = how.hidden, tok.model_max_length
    common = {"vocab_size": len(tok), "num_labels": 1, "pad_token_id": tok.pad_token_id}
    ends = {"eos_token_id": tok.eos_token_id, "bos_token_id": None}
    sizes = {"hidden_size": wide, "intermediate_size": 2 * wide, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes["max_position_embeddings"] = places
    gpt2 = {"n_embd": wide, "n_inner": 2 * wide, "n_layer": 1, "n_head": 2, "n_positions": places}
    name, own = {
        "bert": ("Bert", sizes),
        "gpt2": ("GPT2", gpt2 | ends),
        "qwen2": ("Qwen2", sizes | {"num_key_value_heads": 1} | ends),
    }[how.architecture]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(transformers, f"{name}Config")(**common, **own)
        return getattr(transformers, f"{name}ForSequenceClassification")(config)


def _train(model: Any, rows: list[dict[str, str]], tok: Any, seed: int) -> None:
    """Train a classifier on comparisons, quietly."""
    import tempfile

    import datasets
    from transformers import PrinterCallback
    from trl import RewardConfig, RewardTrainer

    with tempfile.TemporaryDirectory() as place:
        told = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        told |= {"num_train_epochs": EPOCHS, "per_device_train_batch_size": 32, "learning_rate": 3e-3}
        told |= {"weight_decay": 0.01, "warmup_steps": 10, "seed": seed, "use_cpu": True, "bf16": False}
        args = RewardConfig(place, gradient_checkpointing=False, max_length=tok.model_max_length, **told)
        compared = datasets.Dataset.from_list(rows)
        trainer = RewardTrainer(model=model, args=args, train_dataset=compared, processing_class=tok)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.eval()


def _border(model: Any, compared: list[dialogues.Comparison], tok: Any) -> float:
    """Return the cost that tells harmful replies best from harmless ones, of those that were compared."""
    from transformers import pipeline

    asked = [(c.request, text) for c in compared for text in c.replies]
    harmful = np.array([dialogues.truth(*pair).harm > 0 for pair in asked])
    read = [rendered(request.text, text, tok) for request, text in asked]
    ask = pipeline("text-classification", model=model, tokenizer=tok, function_to_apply="none", device="cpu")
    costs = np.array([answer["score"] for answer in ask(read, batch_size=64)])
    order = np.argsort(costs)
    # between each two neighbours: harmful ones below the cut and harmless ones above it are wrong
    wrong = np.cumsum(harmful[order])[:-1] + np.cumsum(~harmful[order][::-1])[::-1][1:]
    cut = int(wrong.argmin())
    return round(float(costs[order][cut : cut + 2].mean()), 4)
