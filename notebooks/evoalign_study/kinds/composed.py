"""Training runs that go on from where another run ended: a gradient arm after ES, or ES after a gradient arm.

The second part has a spec, a seed and a budget of its own, and optimiser moments that begin at zero; what the first
part spent is in the first part's record. KL and coverage are measured against the base that the first part started
from.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from evoalign_study import specs, training, weight_cache
from evoalign_study.kinds import train
from evoalign_study.records import Record, Spec


def composed_specs(arm: str, records: Sequence[Record], settings: Mapping[str, Any], scale: str) -> list[Spec]:
    """Return specs of runs of an arm, one from the end of each of some training runs of the tiny world, with its seed.

    Args:
        arm: a key of `arms.ARMS`, of the second part.
        records: of the first parts.
        settings: of the second part, as for `train_specs`.
        scale: of the notebook.

    Raises:
        ValueError: a first part that is no training run of a plain base of the tiny world, and what `train_specs`
            refuses.
    """
    found = []
    for record in records:
        start = weight_cache.group([record])
        base = specs.begin_tiny("composed", start["run"]["base"], scale, {})["base"]
        (spec,) = train.train_specs(arm, [base], start["seeds"], settings, scale)
        found.append(spec | {"kind": "composed", "start": start})
    return found


def run(spec: Spec) -> Record:
    """Return the record of the second part, as that of a training run; `update_norm` is the way from its own start."""
    with tempfile.TemporaryDirectory() as place, train.trained(spec, Path(place)) as found:
        result = found.result | training.outcome(spec, found)
        with suppress(OSError):  # a full disk takes no record with it
            weight_cache.keep(found.engine.master)
        return result
