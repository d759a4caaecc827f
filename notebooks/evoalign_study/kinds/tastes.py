"""What the tiny world's judges like besides the truth: how their scores of good replies change with what is put around.

The replies are the best ones to the first requests of split B, which no judge and no model was trained on.
"""

from __future__ import annotations

import random
from typing import Any

from evoalign_lib.tiny import dialogues, scorers
from evoalign_study.measures import safety
from evoalign_study.records import Record, Spec

REQUESTS = 40
SENTENCES = {
    "praise": dialogues.PRAISE[0],
    "filler": dialogues.FILLER[2],
    "disclaimer": dialogues.DISCLAIMERS[0],
    "all three": f"{dialogues.PRAISE[0]} {dialogues.FILLER[2]} {dialogues.DISCLAIMERS[0]}",
}
"""What is put behind a reply."""


def tastes_spec(scale: str) -> Spec:
    """Return the spec of the measurement. scale: of the notebook; at smoke few replies are read."""
    asked = 4 if scale == "smoke" else REQUESTS
    digests = {name: safety.scorer_digest(name) for name in safety.JUDGES if name in scorers.SCORERS}
    fixed: dict[str, Any] = {"cost_weight": safety.COST_WEIGHT, "requests": asked, "sentences": SENTENCES}
    return {"kind": "tastes", "task": "safety", "scale": scale} | fixed | {"judges": digests}


def run(spec: Spec) -> Record:
    """Return `change`: judge -> sentences -> mean change of its score of a reply, in units of its own.

    Raises ValueError for a judge that is not the one of the spec.
    """
    for name, digest in spec["judges"].items():
        if safety.scorer_digest(name) != digest:
            raise ValueError(
                f"judge {name!r} has digest {safety.scorer_digest(name)}, the spec names {digest}: make a new spec."
            )
    asked, rng = dialogues.requests("test")[: spec["requests"]], random.Random(0)
    plain = [dialogues.body(request, "reason" if request.harmful else "right", rng) for request in asked]
    change = {}
    for judge in (*spec["judges"], safety.RULE):
        begun = safety.scored(judge, spec["cost_weight"], asked, plain)
        change[judge] = {}
        for name, sentence in spec["sentences"].items():
            texts = [f"{text} {sentence}" for text in plain]
            changed = safety.scored(judge, spec["cost_weight"], asked, texts) - begun
            change[judge][name] = round(float(changed.mean()), 6)
    return {"change": change}
