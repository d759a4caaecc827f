"""What all training runs share: working folder, starting model, learning curve and final measurements.

A run whose weights become non-finite continues to its end like any other, with a model that answers nothing right: its
record has the first step after which that was so, `diverged`, and null for every number that is not finite. Evaluation
counts towards no budget.
"""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evoalign_lib import _adapters, files, models, tiny
from evoalign_lib.precision import copy_to
from evoalign_study import base_models, measures, progress_bar, weight_cache
from evoalign_study.records import Record, Spec

_SETTLED = "settled"
_CHECKPOINTS = 10
"""checkpoints that a lasting run writes over its steps; only the latest stays"""


def world(spec: Spec) -> tuple[Any, Any, dict[str, list]]:
    """Return a spec's model and tokenizer, and the problems of each split of its task.

    The model is the base; for a run that continues another (kind "composed"), it has that run's final weights.
    """
    model, tokenizer = base_models.model_of(spec)
    if "start" in spec:
        (master,) = weight_cache.of_group(spec["start"])
        copy_to(model, weight_cache.layout_of(spec["base"]), master)
    return model, tokenizer, measures.of(spec).sets(spec)


@contextmanager
def opened(spec: Spec) -> Iterator[tuple[Any, dict[str, list]]]:
    """Yield an engine that decodes a spec's problems with its model, and the problems of each split."""
    model, tokenizer, sets = world(spec)
    with closing(evaluation_engine(spec, model, tokenizer, sets)) as engine:
        yield engine, sets


def rows(spec: Spec, tokenizer: Any, problems: Sequence[Any]) -> list[dict[str, Any]]:
    """Return problems as rows for a trainer or an engine."""
    return measures.of(spec).rows(spec, tokenizer, problems)


def evaluation_engine(spec: Spec, model: Any, tokenizer: Any, sets: Mapping[str, list]) -> Any:
    """Return an engine that decodes the validation and test problems with weights that are trained elsewhere."""
    asked = {name: rows(spec, tokenizer, sets[name]) for name in sets if name != "train"}
    return base_models.evaluation_engine(spec, model, tokenizer, asked)


def take_weights(engine: Any, model: Any) -> None:
    """Copy a model's weights into an engine; an adapter is merged first, W + scaling * B A.

    So an adapter is measured as a full model: its digest and its distance from the base are those of the merged
    float32 weights.
    """
    merged = _adapters.dense(model)
    for name, tensor in engine.weights.tensors().items():
        tensor.copy_(merged[name])


class Trained(NamedTuple):
    """A model that was just trained; its engine is open while the context that yields it lasts."""

    engine: Any
    """has the trained weights, and decodes the problems of the sets"""
    start: np.ndarray
    """flat float32 weights that training started from, in the engine's layout"""
    sets: Mapping[str, list]
    """problems of each split"""
    result: Record
    """fields of its record so far"""
    diverged: Sequence[int]
    """steps after which a weight was not finite"""


def outcome(spec: Spec, ended: Trained) -> Record:
    """Return the measurements of a trained model, and the first step after which a weight was not finite."""
    engine, start, sets, _, diverged = ended
    # in blocks: all at once it would take 12 bytes per weight
    blocks = (slice(i, i + (1 << 24)) for i in range(0, start.size, 1 << 24))
    moved = np.linalg.norm([np.linalg.norm((engine.master[b] - start[b]).astype(np.float64)) for b in blocks])
    told = {"d": engine.layout.d, "update_norm": round(float(moved), 6), "digest": models.flat_digest(engine.master)}
    measure = measures.of(spec)
    told |= ({"diverged": diverged[0]} if diverged else {}) | measure.outcome(spec, engine, sets)
    if "test" in told and "sampled_at" in spec:
        told["test"] |= measure.sampled(spec, engine, sets, "test", spec["sampled_at"], 16)
    return told


# ---- where a run works


@contextmanager
def workplace(folder: Path | None) -> Iterator[Path]:
    """Yield a temporary folder; or `folder`, locked for this process, and emptied first if the run in it was settled.

    Raises:
        RuntimeError: another process works in the folder.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)
        return
    with ExitStack() as held:
        try:
            held.enter_context(files.locked(folder, wait=0))
        except BlockingIOError as error:
            raise RuntimeError(f"another process is training in {folder}. Wait for it, or stop it.") from error
        if (folder / _SETTLED).exists():  # it runs again: nothing of the finished run may be reused
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def settle(folder: Path) -> None:
    """Remove what a run kept for resuming, now that its record is stored. The next run there starts from scratch."""
    (folder / _SETTLED).touch()
    for left in (*folder.glob("checkpoint-*"), *folder.glob("partial-*")):
        shutil.rmtree(left)


def reports(spec: Spec, lasting: bool) -> dict[str, Any]:
    """Return a trainer's settings for checkpoints and TensorBoard logs; it writes neither unless the run is lasting."""
    if not lasting:
        return {"report_to": "none", "save_strategy": "no"}
    every = max(1, spec.get("steps", 1) // _CHECKPOINTS)
    return {"report_to": "tensorboard", "save_strategy": "steps", "save_steps": every, "save_total_limit": 1}


# ---- the curve


class Progress:
    """What a run has measured so far, kept on disk if a killed run is to resume.

    Attributes:
        curve: the points measured.
        diverged: the steps after which the model had weights that were not finite.
    """

    def __init__(self, folder: Path | None):
        self.curve: dict[str, list] = {}
        self.diverged: list[int] = []
        self._path = None if folder is None else folder / "progress.json"
        if self._path is not None and self._path.is_file():
            kept = json.loads(self._path.read_text())
            self.curve, self.diverged = kept["curve"], kept["diverged"]

    def go_on(self, step: int) -> None:
        """Forget what came after the step at which the run starts, or resumes from a checkpoint."""
        known = sum(s <= step for s in self.curve.get("step", ())) if step else 0
        self.curve = {name: values[:known] for name, values in self.curve.items() if known}
        self.diverged = [s for s in self.diverged if s <= step]

    def add(self, point: Mapping[str, Any]) -> None:
        """Add a point to the curve."""
        for name, value in point.items():
            self.curve.setdefault(name, []).append(value)
        self._save()

    def diverge(self, step: int) -> None:
        """Record that the weights are not finite after a step."""
        self.diverged.append(step)
        self._save()

    def _save(self) -> None:
        if self._path is not None and os.environ.get("RANK", "0") == "0":
            files.replace_text(self._path, json.dumps({"curve": self.curve, "diverged": self.diverged}))


def points(spec: Spec) -> tuple[set[int], list[str]]:
    """Return the steps after which a run is evaluated, and the axes of budget in its curve."""
    steps, count = spec["steps"], spec["curve_points"]
    if spec.get("curve_spacing") == "log":
        axes = ["completions", "generated_tokens", "forward_flops", "core_seconds"]
        spaced = np.append(0, np.geomspace(1, steps, count - 1))
    else:
        axes, spaced = ["completions"], np.linspace(0, steps, count)
    return set(spaced.round().astype(int).tolist()), axes


def rounded(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measurements of a point, rounded as curves record them."""
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in measured.items()}


def curve_callback(
    spec: Spec, sets: Mapping[str, list], progress: Progress, look: Callable[[], tuple[Any, Mapping[str, Any]]]
) -> Any:
    """Return a trainer's callback that measures the model at the points of its curve and adds them to its progress.

    look: returns an engine with the current weights, and the budget that the run has spent so far.
    """
    from transformers import TrainerCallback

    steps, axes = points(spec)
    measure = measures.of(spec)

    def record(step: int, logs: Mapping[str, float]) -> None:
        engine, budget = look()
        point = {"step": step} | {axis: round(budget[axis], 2) for axis in axes}
        measured = measure.point(spec, engine, sets, step) | measure.logged(spec, logs)
        progress.add(point | rounded(measured | {"reward": logs.get("reward")}))

    class Curve(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            progress.go_on(state.global_step)
            if state.global_step == 0 and 0 in steps:  # a resumed run has this point already
                record(0, {})

        def on_log(self, args, state, control, logs=None, **kwargs):  # after each step, when its reward is known
            if logs and "train_runtime" in logs:  # the summary at the end
                return
            progress_bar.tell(spec, state.global_step)
            if state.global_step in steps:
                record(state.global_step, logs or {})

    return Curve()


def watch_divergence(trainer: Any, progress: Progress) -> None:
    """Record in a run's progress the steps after which a weight is not finite."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if not all(p.isfinite().all() for p in _adapters.moved(model).values()):
                progress.diverge(state.global_step)

    trainer.callback_handler.add_callback(Watch())


# ---- the adapter that a run starts from: a new one, or one fine-tuned on right answers to problems that no run sees
# (outside the tiny world, where problems are few, to some of the runs' own)

WARM_START = ("warm_rows", "warm_epochs", "warm_learning_rate")
"""Fields of a spec: number of right answers, and epochs and learning rate of fine-tuning the adapter on them."""
_WARM_SEEDS = 1 << 20
"""Offset between the seeds that draw training problems for warm starts and those of the runs."""


def adapted(spec: Spec, model: Any, tokenizer: Any, folder: Path) -> tuple[Any, dict[str, Any] | None]:
    """Return a model with the adapter that a spec starts from, drawn from its seed, and the cost of fine-tuning it.

    Without `warm_rows` the adapter is new, with B = 0, and the cost is None. folder: for TRL's files.
    """
    from evoalign_lib.essa import fine_tune, lora_config  # imports transformers, which no plan needs

    model = _adapters.attach(model, lora_config(spec["lora_rank"]), spec["seed"]).eval()
    if "warm_rows" not in spec:
        return model, None
    return model, fine_tune(model, tokenizer, warm_rows(spec, tokenizer), warm_arguments(spec, folder))


def with_warm_start(budget: Mapping[str, Any], cost: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a run's budget plus the cost of fine-tuning its adapter; None: it had no fine-tuning."""
    if cost is None:
        return dict(budget)
    more = {name: budget[name] + cost[name] for name in ("forward_flops", "core_seconds")}
    return dict(budget) | more | {"sft_tokens": cost["tokens"]}


def warm_rows(spec: Spec, tokenizer: Any) -> list[dict[str, Any]]:
    """Return `warm_rows` prompts with right answers that close with the end token, drawn from the spec's seed."""
    measure, rng = measures.of(spec), random.Random(f"warm start {spec['seed']}")
    drawn = {k: v for k, v in spec.items() if k not in ("steps", "prompts_per_step")} | {"prompts": spec["warm_rows"]}
    problems = measure.sets(drawn | {"seed": spec["seed"] + _WARM_SEEDS})["train"]
    answers = (measure.right_answer(problem, rng).removesuffix(tiny.END) + tokenizer.eos_token for problem in problems)
    pairs = zip(measure.rows(spec, tokenizer, problems), answers, strict=True)
    return [{"prompt": row["prompt"], "completion": answer} for row, answer in pairs]


def warm_arguments(spec: Spec, folder: Path) -> Any:
    """Return the `trl.SFTConfig` of a spec's warm start. folder: for its files."""
    import torch
    from trl import SFTConfig

    quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
    fixed = {"lr_scheduler_type": "constant", "per_device_train_batch_size": 16, "gradient_checkpointing": False}
    own = {"learning_rate": spec["warm_learning_rate"], "num_train_epochs": spec["warm_epochs"], "seed": spec["seed"]}
    on_cpu = base_models.is_local(spec) or not torch.cuda.is_available()
    return SFTConfig(output_dir=str(folder / "sft"), use_cpu=on_cpu, bf16=False, **own, **fixed, **quiet)
