"""The completions that a published study released, read again with every detector."""

from __future__ import annotations

import numpy as np

from evoalign_lib.analysis import hacking
from evoalign_lib.tasks import conciseness
from evoalign_study.records import Record, Spec, pack_bits

NEAREST_BASE = {"reward": -83.3, "right": 1.0}
"""In place of the 7 B base, whose completions were not published, the published seed that has moved least from it (KL
0.11 nats per token): it answers in full sentences, all of them right."""


def published_specs(scale: str) -> list[Spec]:
    """Specs of the analysis of the published completions of a 7 B model: one for each training seed of each setting.

    Args:
        scale: of the notebook, in whose file the records are kept; they are about no model of that scale.
    """
    common = {"kind": "published", "task": "conciseness", "scale": scale}
    return [common | {"set": name, "seed": seed} for name in conciseness.COMPLETIONS for seed in range(4)]


def run(spec: Spec) -> Record:
    """What a published set of completions holds under both measures, right answers and every detector.

    Raises:
        FileNotFoundError: the set is not in EVOALIGN_DATA and cannot be fetched.
    """
    problems = {p.question: p for p in conciseness.load_public("eval")}
    (found,) = [one for one in conciseness.load_completions(spec["set"]) if one.seed == spec["seed"]]
    asked = [problems[question] for question in found.questions]
    targets = [p.answer for p in asked]
    rewards = {m: conciseness.reward(targets, found.completions, targets, m) for m in conciseness.MEASURES}
    right = [conciseness.is_correct(text, p) for text, p in zip(found.completions, asked, strict=True)]
    report = hacking.hack_report(
        found.completions,
        prompts=found.questions,
        rewards=rewards["strict"],
        right=right,
        tokens=found.tokens,
        max_tokens=found.max_tokens,
        best_reward=0.0,
        base_reward=NEAREST_BASE["reward"],
        base_correct=NEAREST_BASE["right"],
    )
    pairs = zip(rewards["strict"], rewards["released"], strict=True)
    first = dict(reversed(list(zip(found.questions, found.completions, strict=True))))
    return {
        "completions": len(asked),
        "reproduced": sum(a == b for a, b in zip(rewards["released"], found.rewards, strict=True)),
        "changed": sum(a != b for a, b in pairs),
        "reward": {name: round(float(np.mean(values)), 5) for name, values in rewards.items()},
        "recorded": round(float(np.mean(found.rewards)), 5),
        "kl_token": round(found.kl, 5),
        "right": round(float(np.mean(right)), 5),
        "right_bits": pack_bits(np.array(right, dtype=int)),
        "hacks": {name: round(share, 5) for name, share in report.shares.items() if share},
        "degenerate": round(float(report.degenerate.mean()), 5),
        "verdict": report.verdict,
        "all_empty": report.all_empty,
        "shown": [first[p.question][:60] for p in problems.values()],
    }
