"""Runs of ES and ESSA: one trainer for all of their arms, its budget, and the ledger that may be kept.

Arms with `lora_rank` optimise an adapter over the frozen base, which may first be fine-tuned on right answers
(`training.adapted`). The `d`, digest and distance in their records are those of the adapter's parameters.
"""

import copy
import hashlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib import _adapters, arms, ledger, models, quantisation
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.essa import ESSAConfig, ESSATrainer, lora_config
from evoalign_study import base_models, measures, training
from evoalign_study.records import Spec
from evoalign_study.rollouts import WeightedTrainer


class InOrder(ESTrainer):
    """ES that takes its prompts in the order of the data set, as TRL's trainers do here, and notes tied steps."""

    tied_steps: tuple[int, ...] = ()
    """The steps, from 0, whose populations were tied: they moved nothing."""

    def tell(self, members: Any, fitness: Any) -> bool:
        tied = super().tell(members, fitness)
        self.tied_steps += (self.state.global_step,) if tied else ()
        return tied

    def _indices(self, step: int) -> np.ndarray:
        return np.arange(step * self.prompts_per_step, (step + 1) * self.prompts_per_step)


@contextmanager
def train(spec: Spec, place: Path, lasting: bool, keep: Path | None = None) -> Iterator[training.Trained]:
    """Train with an arm of ES or ESSA, and yield the model. Arguments as for `trainers.train`."""
    world, arm = training.world(spec), arms.get(spec["arm"])
    told, weighted = dict(arm.options) | training.reports(spec, lasting), arm.rollouts == "unperturbed"
    told |= {"num_generations": spec["num_generations"]} if weighted else {}
    plain = InOrder if measures.of(spec).in_order else ESTrainer
    kind = ESSATrainer if arm.family == "cma" else WeightedTrainer if weighted else plain
    es, progress = trainer(spec, world, place, kind, **told)
    with closing(es.engine) as engine:
        # with anchor_decay the weights keep a copy of their start, which is never written to
        start = engine.master.copy() if engine.weights.start is None else engine.weights.start
        training.watch_divergence(es, progress)
        es.train(resume_from_checkpoint=(place / ledger.NAME).is_file())
        kept = {} if keep is None else {"ledger": _keep_ledger(es, spec["base"], keep)}
        budget = spent(es)
        budget["core_seconds"] = round(budget["core_seconds"], 2)
        result = {"budget": budget, "counts": dict(es.counts), "plan": engine.plan, "curve": progress.curve}
        result |= {"rollouts": es.summary()} if weighted else {}
        result |= {"tied_steps": list(es.tied_steps)} if kind is InOrder else {}
        if "base_precision" in spec and spec.get("test_problems", 1):
            result["over_loaded"] = _over_loaded_base(spec, es.model)
        yield training.Trained(engine, start, world[2], result | kept, progress.diverged)


def spent(es: Any) -> dict[str, Any]:
    """Return the budget of a run so far, including the fine-tuning of its adapter beforehand."""
    budget = dict(es.budget)
    if isinstance(es, ESSATrainer):  # it counts its FLOPs itself, including those of the warm start
        return budget
    # a forward pass costs 2 floating-point operations per parameter and token; attention products are left out
    tokens = budget["prompt_tokens"] + budget["generated_tokens"]
    tokens *= es.passes if isinstance(es, WeightedTrainer) else 1
    # a model with an adapter also computes its frozen base
    d = sum(p.numel() for p in es.model.parameters()) if _adapters.is_adapted(es.model) else es.engine.layout.d
    return training.with_warm_start(budget | {"forward_flops": 2 * d * tokens}, es.warm_start_cost)


def trainer(
    spec: Spec, world: tuple[Any, ...], folder: Path, kind: type[ESTrainer] = ESTrainer, **changed: Any
) -> tuple[Any, training.Progress]:
    """Return an ES trainer for a spec, and the progress that training fills in.

    Args:
        spec: spec with the settings of an arm of ES or ESSA.
        world: model, tokenizer and problems of each split (`training.world`).
        folder: folder for checkpoints, if they are kept, and for the progress next to them.
        kind: the trainer class, or a subclass that watches its own steps.
        **changed: changes to the trainer's configuration.
    """
    measure, (model, tokenizer, sets) = measures.of(spec), world
    local, essa = base_models.is_local(spec), issubclass(kind, ESSATrainer)
    warmed = "warm_rows" in spec and not (local or essa)  # fine-tuned here, before the trainer exists
    if warmed:
        model, _ = models.load(model, tokenizer, base_models.loaded_as(spec))
    elif not local:
        changed["model_init_kwargs"] = {"dtype": "bfloat16"}
    config = configuration(spec, folder, **changed)
    progress = training.Progress(None if config.save_strategy == "no" else folder)
    curve = training.curve_callback(spec, sets, progress, lambda: (made.engine, spent(made)))
    asked = measure.rows(spec, tokenizer, sets["train"])
    if "base_precision" in spec:
        model = quantisation.quantise(model, spec["base_precision"])
    adapter, warm = {}, None
    if "lora_rank" in spec and (essa or isinstance(model, str)):
        adapter["peft_config"] = lora_config(spec["lora_rank"])
    elif "lora_rank" in spec:
        model, warm = training.adapted(spec, model, tokenizer, folder)
    if essa:  # it does the fine-tuning itself, and keeps the result
        adapter["sft_dataset"] = training.warm_rows(spec, tokenizer)
        adapter["sft_args"] = training.warm_arguments(spec, folder)
    made = kind(model, measure.reward(spec), config, asked, None, tokenizer, [curve], **adapter)
    if not essa:
        made.warm_start_cost = warm
    for name in sets.keys() - {"train"}:
        made.engine.add_prompts(name, measure.rows(spec, tokenizer, sets[name]))
    return made, progress


def configuration(spec: Spec, folder: Path = Path("run"), **changed: Any) -> Any:
    """Return the configuration of a spec's trainer. Raises ValueError for settings that it refuses; names them.

    folder, changed: as for `trainer`.
    """
    essa = arms.get(spec.get("arm", "es")).family == "cma"
    local = base_models.is_local(spec)
    where = {"workers": 1} if local else {k: spec[k] for k in base_models.ENGINE_FIELDS if k in spec}
    named = ("seed", "population_size", "sigma", "prompts_per_step", "max_completion_length")
    named += ("leading_share",) if essa else ("alpha", "rank", "anchor_decay", "alpha_schedule", "sigma_schedule")
    settings = {"max_steps": spec["steps"], "disable_tqdm": True, "report_to": "none", "save_strategy": "no"} | where
    settings |= changed | {name: spec[name] for name in named if name in spec}
    return (ESSAConfig if essa else ESConfig)(output_dir=str(folder), **settings)


def _over_loaded_base(spec: Spec, found: Any) -> dict[str, Any]:
    """Test an adapter on the base as loaded, after it was optimised over the base in another precision.

    found: the model with the adapter. Counts per problem are left out, since a record has no room for them twice.
    """
    import torch

    model, tokenizer, sets = training.world(spec)
    measured = copy.deepcopy(model)  # attaching an adapter changes the model's own layers
    model = _adapters.attach(model, lora_config(spec["lora_rank"]), spec["seed"])
    searched = _adapters.moved(found)
    with torch.no_grad():
        for name, parameter in _adapters.moved(model).items():
            parameter.copy_(searched[name])
    with closing(training.evaluation_engine(spec, measured, tokenizer, sets)) as engine:
        training.take_weights(engine, model)
        tested = measures.of(spec).outcome(spec, engine, sets)["test"]
        return {name: value for name, value in tested.items() if not name.endswith("_counts")}


def _keep_ledger(trainer: Any, base: str, path: Path) -> dict[str, Any]:
    """Replay a finished run's ledger from a freshly loaded base, write it compressed, and describe it."""
    run, source = trainer.ledger, trainer.ledger.path
    replayed, last = ledger.replay(source, base), trainer.engine.master
    differ = replayed.view(np.uint32) != last.view(np.uint32)  # compared as bits, since NaN equals nothing
    error = np.abs(replayed[differ] - last[differ]).max(initial=0)
    packed = ledger.pack(source)
    path.write_bytes(packed)
    kept = {"bytes": source.stat().st_size, "gzip_bytes": len(packed), "sha256": hashlib.sha256(packed).hexdigest()}
    return kept | {"weights": run.weights[len(run.steps)], "replay_error": float(error)}
