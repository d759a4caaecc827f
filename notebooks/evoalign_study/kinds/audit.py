"""The audit of arithmetic: ES runs of a bfloat16 model that differ in how weights are moved and restored."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib import arms, noise, precision
from evoalign_study import base_models, measures, specs, training
from evoalign_study.records import Record, Spec


def audit_specs(
    base: str,
    precision: str,
    noise: str,
    fitness: str,
    seeds: Iterable[int],
    settings: Mapping[str, Any],
    scale: str,
) -> list[Spec]:
    """Specs of runs of a bfloat16 model that differ in arithmetic or noise alone.

    Args:
        precision: "master", "kahan" or "inplace" (see `precision`).
        noise: "gaussian" or "tied".
        fitness: "reward", or "random", which generates nothing in training: arithmetic alone.
        settings: as for `train_specs`, without those that are optional there.

    Raises:
        ValueError: a task whose answers are not right or wrong, another engine than the local one, a setting that is
            optional for training, or what `train_specs` refuses of settings and bases.
    """
    specs.check_names(settings)
    if measures.get(settings.get("task", "countdown")).validated_by is None:
        raise ValueError(f"task={settings['task']!r}: an audit measures right answers, take 'countdown'.")
    if not base_models.is_local(settings):
        raise ValueError(f"engine={settings['engine']!r}: an audit moves weights in place, which only 'local' does.")
    es = arms.get("es")
    for name in es.optional:
        if settings.get(name) is not None:
            raise ValueError(f"{name}={settings[name]!r}: an audit has no such setting, leave it out.")
    wanted = specs.sizes(settings) | specs.take(settings, es.settings, "an audit")
    arithmetic = {"dtype": "bfloat16", "precision": precision, "noise": noise, "fitness": fitness}
    return [specs.begin("audit", base, scale, settings) | arithmetic | wanted | {"seed": seed} for seed in seeds]


def run(spec: Spec) -> Record:
    """One ES run of a bfloat16 model, with the arithmetic and the noise of the spec: what became of its updates.

    Of each step: the share of weights that restoring the members changed, and how far (rms); cosine and gain of the
    applied update against the intended one. Of the whole path: the same two, restores included; and the cosine of the
    displacements of two layers' tensors of equal name, which independent noise leaves near 0.
    """
    import torch

    from evoalign_lib.es import ESTrainer, coefficients
    from evoalign_study import evolution

    model, tokenizer, sets = training.world(spec)
    updates: list[tuple[float, float]] = []
    path: dict[str, list] = {"step": [0], "cosine": [None], "gain": [None]}

    class Audited(ESTrainer):
        def tell(self, members, fitness):
            weights, layout = self.engine.weights, self.engine.layout
            before = weights.float32().copy()
            tied = super().tell(members, fitness)
            if not tied:
                step = np.zeros(layout.size, np.float32)
                keys = np.array([m.key for m in members], np.uint64)
                noise.update(step, layout, keys, coefficients(fitness, self.args.alpha), distribution=self.args.noise)
                updates.append(precision.agreement(step, weights.float32() - before))
                self.intended += step
            if (done := self.state.global_step + 1) % max(1, spec["steps"] // 20) == 0:
                applied = weights.float32() - self.start
                # nothing is intended as long as all populations were tied
                found = precision.agreement(self.intended, applied) if self.intended.any() else (None, None)
                path["step"].append(done)
                for name, value in zip(("cosine", "gain"), found, strict=True):
                    path[name].append(value if value is None else round(value, 5))
            return tied

    with tempfile.TemporaryDirectory() as folder:
        changed = {k: spec[k] for k in ("fitness", "precision", "noise")}
        # the noise of the arm "es" whatever the fitness: the very run of section 4, as far as arithmetic lets it be
        world = model.to(torch.bfloat16), tokenizer, sets, Path(folder)
        trainer, progress = evolution.trainer(spec, *world, kind=Audited, arm="es", **changed)
        trainer.start = trainer.engine.weights.float32().copy()
        trainer.intended = np.zeros(trainer.engine.layout.size)
        trainer.train()
    engine = trainer.engine
    views = engine.layout.views(engine.weights.float32() - trainer.start)
    alike = [
        precision.agreement(view, views[twin])[0]
        for name, view in views.items()
        if view.ndim == 2 and view.any() and (twin := name.replace(".layers.0.", ".layers.1.")) != name
    ]
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    restores = {
        f"restore_{what}": float(np.mean([entry.get(f"restore_{what}", 0.0) for entry in log]))
        for what in ("changed", "drift")
    }
    audit = restores
    if updates:  # else all populations were tied
        audit |= {"layers_cosine": np.mean(alike)} if alike else {}
        audit |= dict(zip(("update_cosine", "update_gain"), np.mean(updates, axis=0), strict=True))
    result = {"audit": {k: float(f"{v:.6g}") for k, v in audit.items()}, "path": path, "counts": dict(trainer.counts)}
    result |= {"plan": engine.plan, "d": engine.layout.d, "curve": progress.curve}
    return result | (
        {"test": measures.get(spec["task"]).tested(engine, sets["test"])} if spec["fitness"] == "reward" else {}
    )
