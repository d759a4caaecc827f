"""Training runs: their specs, the specs of hyper-parameter sweeps, and the processes that train them.

A *composed* run continues from where another run ended: a gradient arm after ES, or ES after a gradient arm. An *audit*
is an ES run of a bfloat16 model that examines the arithmetic of its updates.

On engines other than the local one, the arms that TRL trains run in separate processes, one for each GPU. Each of them
runs this module as its program (see `grpo` for what they share).
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from evoalign_lib import arms, files, grpo, noise, precision, quantisation, tiny
from evoalign_lib._anchor import check_decay
from evoalign_lib._forks import end_with
from evoalign_lib.arms import SWEEP, SWEEP_SEED
from evoalign_lib.checks import choose, require, whole_number
from evoalign_study import base_models, measures, specs, trainers, training, weight_cache
from evoalign_study.measures.base import temperatures
from evoalign_study.records import MAX_CURVE, Record, Settings, Spec


def train_specs(arm: str, bases: Sequence[str], seeds: Iterable[int], settings: Settings, scale: str) -> list[Spec]:
    """Return specs of training runs, for each base and seed, with the arm and its hyper-parameters.

    Args:
        arm: a key of `arms.ARMS`.
        bases: as for `decode.base_specs`.
        seeds: seeds of the runs.
        settings: as for `decode.base_specs`, and those that the arm needs (`arms.Arm.settings`); those of other arms
            are ignored. Optional settings:
            curve_spacing "log": space the points of the curve evenly in the logarithm of the steps, not in steps.
            unique_prompts: the run sees this many problems repeatedly, each equally often in the whole run, a gradient
            arm in turn and ES in random order. Without it, every step has new problems in the tiny world, and other
            models train on all public problems. Conciseness in the tiny world requires 2 or 200.
            sampled_at: temperatures besides 1 at which every point of the curve, and the final test, samples.
            reach_at: temperatures at which every point of the curve records what the run reaches, without sampling
            (`Measures.reach`); only for a task and base whose right answers are listed.
            anchor_decay, for ES: as in `ESConfig`; 0 is left out of the spec, since it means no decay.
            scale_rewards, for GRPO and its relatives: replaces the arm's own.
            micro_batch, for the same arms: completions in a backward pass on one GPU; by default the GPU's whole share
            of a step, too many for a large model.
            warm_rows, warm_epochs, warm_learning_rate, for arms over an adapter: the number of right answers that it is
            first fine-tuned on, and how; all three or none, but ESSA requires them.
            base_precision, for ES and ESSA over an adapter: how the frozen base is held (`quantisation.MODES`); by
            default as loaded. The record then also has the test over the base as loaded, `over_loaded`.
            engine ("local", "vllm", "ray"), gpus, tensor_parallel: as in `ESConfig`; the arms that TRL trains run vLLM
            next to the model (see `specs.engine_fields`).
        scale: scale of the notebook.

    Raises:
        ValueError: an unknown arm; a setting that is missing or that no run reads; a lora_rank below 1; a
            base_precision with an engine other than the local one; too few curve points for the first step and the
            last, or more than a record holds; an unknown curve_spacing; an anchor_decay out of range; invalid
            temperatures; a reach_at where no answers are listed; no prompts, or more than there are; a step that cannot
            be divided among GPUs and micro-batches; or whatever `base_specs` refuses.
        FileNotFoundError: as for `base_specs`.
    """
    entry, task = arms.get(arm), settings.get("task", "countdown")
    specs.check_names(settings)
    for base in bases:
        measures.get(task).for_base(base).check(arm, base, settings)
    wanted = specs.sizes(settings) | specs.take(settings, entry.settings, f"arm {arm!r}")
    wanted |= {name: settings[name] for name in entry.optional if settings.get(name) is not None}
    if not check_decay(decay := wanted.get("anchor_decay", 0.0)):
        if "anchor_decay" in entry.settings:
            raise ValueError(f"anchor_decay={decay}: arm {arm!r} needs a value above 0. Without a decay, use arm 'es'.")
        wanted.pop("anchor_decay", None)
    for name, besides in (("sampled_at", (1.0,)), ("reach_at", ())):
        if name in wanted:
            wanted[name] = temperatures(name, wanted[name], without=besides)
    if "reach_at" in wanted and (unlisted := [b for b in bases if not measures.get(task).lists_answers(b)]):
        raise ValueError(f"reach_at={wanted['reach_at']}: base {unlisted[0]!r} lists no right answers. Use sampled_at.")
    if not base_models.is_local(settings):
        engine = f"engine={settings['engine']!r}"
        local = f"{engine}: the rollouts of arm {arm!r} are drawn by the local engine only."
        require(entry.rollouts == "own", local)
        require("base_precision" not in wanted, f"{engine}: only the local engine has bases of another precision.")
    for name in ("lora_rank", "rank", "warm_rows", "unique_prompts"):
        if name in wanted:
            whole_number(name, wanted[name])
    wanted |= specs.engine_fields(bases, settings, trainers.of(arm), adapter="lora_rank" in wanted)
    if "micro_batch" in entry.optional:
        rollouts = wanted["prompts_per_step"] * wanted["num_generations"]
        grpo.shared(rollouts, wanted.get("micro_batch"), wanted.get("gpus", 1))
    given = [name for name in training.WARM_START if name in wanted]
    if given and len(given) < len(training.WARM_START):
        raise ValueError(f"{given[0]}={wanted[given[0]]}: a warm start needs all of {', '.join(training.WARM_START)}.")
    if "base_precision" in wanted:
        choose("base_precision", wanted["base_precision"], quantisation.MODES)
    if "scale_rewards" in wanted:
        grpo.check_scale(arm, wanted["scale_rewards"])
    choose("curve_spacing", wanted.get("curve_spacing", "log"), ("log",))
    least, why = 3 if "curve_spacing" in wanted else 2, "it includes the first and last steps, and a record holds 50"
    whole_number("curve_points", wanted.get("curve_points", MAX_CURVE), least, MAX_CURVE, why)
    begun = [specs.begin("train", base, scale, settings) | {"arm": arm} for base in bases]
    return [common | {"seed": seed} | wanted for common, seed in itertools.product(begun, seeds)]


def sweep_specs(
    arm: str, base: str, settings: Settings, scale: str, choices: Sequence[Mapping[str, float]] | None = None
) -> list[Spec]:
    """Return specs of a sweep: each setting once, at half length, on the validation set only, with the sweep's seed.

    Args:
        arm: a key of `arms.SWEEP`.
        base: a base as for `train_specs`.
        settings: as for `train_specs`, at full length.
        scale: scale of the notebook.
        choices: the settings to compare; None: those of `arms.SWEEP`.

    Raises:
        ValueError: a task whose validation does not know right answers, by which `arms.ranked` ranks.
    """
    measures.get(settings.get("task", "countdown")).check_validates("a sweep ranks by right answers")
    half = dict(settings) | {"steps": settings["steps"] // 2, "test_problems": 0}
    choices = SWEEP[arm] if choices is None else choices
    return [spec for c in choices for spec in train_specs(arm, [base], [SWEEP_SEED], half | dict(c), scale)]


def run(spec: Spec, keep: Path | None = None, folder: Path | None = None) -> Record:
    """Train, and return the record: the curve, and the test set once, at the end.

    Args:
        spec: a spec of `train_specs`.
        keep: path for the compressed ledger of an ES run; None: it is not kept.
        folder: folder for checkpoints, TensorBoard logs and the points of the curve, from which the run resumes if it
            was killed ("sft" starts again), until `training.settle` is told that its record is stored. The trained
            model of a gradient arm stays there (for an ES run, the ledger stands in for it). None: nothing is kept.

    Raises:
        RuntimeError: another process works in the folder, or the processes of a gradient arm failed; says how.
    """
    measure = measures.of(spec)
    with training.workplace(folder) as place:
        measure.prepare(spec)
        if base_models.is_local(spec) or trainers.of(spec["arm"]).has_members:  # it drives its engine from here
            result = _measured(spec, place, folder is not None, keep)
        else:
            result = _launched(spec, place, folder is not None)
        return measure.finished(spec, result)


def _measured(spec: Spec, place: Path, lasting: bool = False, keep: Path | None = None) -> Record:
    with trainers.train(spec, place, lasting, keep) as ended:
        result = ended.result | training.outcome(spec, ended)
        if spec["scale"] == "tiny" and spec["base"] in tiny.SHIPPED:
            with suppress(OSError):  # a full disk does not cost the record: measuring the model then trains it again
                weight_cache.keep(ended.engine.master)
        return result


def _launched(spec: Spec, place: Path, lasting: bool) -> Record:
    """Train in separate processes, one for each GPU, that see only the run's GPUs.

    Raises:
        RuntimeError: they failed; the message has the end of their output, and says where to find all of it.
    """
    asked, result = place / "spec.json", place / "result.json"
    asked.write_text(json.dumps({"spec": spec, "files": base_models.known_files()}))
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m"]
    if (gpus := spec["gpus"]) > 1:
        config = Path(__file__).parents[1] / "accelerate.yaml"
        command += ["accelerate.commands.launch", "--config_file", str(config), "--num_processes", str(gpus), "-m"]
    command += ["evoalign_study.kinds.train", str(place), str(os.getpid()), *(["--lasting"] if lasting else [])]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(gpus)] if seen is None else seen.split(",")[:gpus]
    named = f"CUDA_VISIBLE_DEVICES={seen!r} names {len(devices)}"
    require(not seen or len(devices) == gpus, f"gpus={gpus}, but {named}: set gpus to that many.")
    log = place / "log.txt"
    with open(log, "ab") as file:
        begun = file.tell()
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code or not result.is_file():
        lines = log.read_bytes()[begun:].decode(errors="replace").splitlines()
        # of several processes, show what a failed one wrote, not what the launcher writes about it
        failed = next((line.partition(":")[0] for line in lines if re.match(r"\[rank\d+\]: Traceback", line)), None)
        end = [line for line in lines if failed is None or line.startswith(failed)][-30:]
        where = f"the whole log is in {log}" if lasting else "run it with a folder to keep the whole log"
        raise RuntimeError("\n".join([f"the processes of {spec['arm']} ended with code {code}; {where}:", *end]))
    return json.loads(result.read_text())


def _main(place: str, driver: str, *lasting: str) -> None:
    """Run one process of a launched run: read the spec, train, and in the first process write the result."""
    end_with(int(driver))
    folder = Path(place)
    asked = json.loads((folder / "spec.json").read_text())
    base_models.know_files(asked["files"])
    result = _measured(asked["spec"], folder, bool(lasting))
    if os.environ.get("RANK", "0") == "0":
        files.replace_text(folder / "result.json", json.dumps(result))


# ---- runs that continue from the end of another


def composed_specs(arm: str, records: Sequence[Record], settings: Settings, scale: str) -> list[Spec]:
    """Return specs of runs of an arm, each from the end of a training run of the tiny world, with the same seed.

    The second part has its own spec, seed and budget, and optimiser moments that begin at zero; what the first part
    spent is in the first part's record. KL and coverage are measured against the base of the first part.

    Args:
        arm: arm of the second part, a key of `arms.ARMS`.
        records: records of the first parts.
        settings: settings of the second part, as for `train_specs`.
        scale: scale of the notebook.

    Raises:
        ValueError: a first part that is not a training run of a plain base of the tiny world, or whatever
            `train_specs` refuses.
    """
    wanted = []
    for record in records:
        start = weight_cache.group([record])
        base = specs.begin_tiny("composed", start["run"]["base"], scale, {})["base"]
        (spec,) = train_specs(arm, [base], start["seeds"], settings, scale)
        wanted.append(spec | {"kind": "composed", "start": start})
    return wanted


def run_composed(spec: Spec) -> Record:
    """Return the record of the second part, as for a training run; `update_norm` is measured from its own start."""
    with tempfile.TemporaryDirectory() as place:
        return _measured(spec, Path(place))


# ---- the audit of arithmetic


def audit_specs(
    base: str,
    precision: str,
    noise: str,
    fitness: str,
    seeds: Iterable[int],
    settings: Settings,
    scale: str,
    largest: int = 0,
) -> list[Spec]:
    """Return specs of ES runs of a bfloat16 model that differ only in arithmetic or noise.

    Args:
        base: a base as for `train_specs`.
        precision: "master", "kahan" or "inplace" (see `precision`).
        noise: "gaussian" or "tied".
        fitness: "reward", or "random", which generates nothing in training and shows arithmetic alone.
        seeds: seeds of the runs.
        settings: as for `train_specs`, without the optional ones.
        scale: scale of the notebook.
        largest: number of the largest changes whose place is recorded (`vectors_of_largest`); 0: none.

    Raises:
        ValueError: a task whose answers are not right or wrong, an engine other than the local one, a setting that is
            optional for training, or a setting or base that `train_specs` refuses.
    """
    specs.check_names(settings)
    measures.get(settings.get("task", "countdown")).check_validates("an audit measures right answers")
    engine = f"engine={settings.get('engine')!r}"
    require(base_models.is_local(settings), f"{engine}: an audit moves weights in place, which only 'local' does.")
    es = arms.get("es")
    for name in es.optional:
        given = settings.get(name)
        require(given is None, f"{name}={given!r}: an audit has no such setting. Leave it out.")
    wanted = specs.sizes(settings) | specs.take(settings, es.settings, "an audit")
    arithmetic = {"dtype": "bfloat16", "precision": precision, "noise": noise, "fitness": fitness}
    arithmetic |= {"largest": whole_number("largest", largest)} if largest else {}
    return [specs.begin("audit", base, scale, settings) | arithmetic | wanted | {"seed": seed} for seed in seeds]


def run_audit(spec: Spec) -> Record:
    """Train a bfloat16 model by ES with the spec's arithmetic and noise, and compare applied with intended updates.

    For each step, the record has the share of weights that restoring the members changed, and by how much (rms), and
    cosine and gain of the applied update against the intended one. For the whole path, it has the same cosine and gain,
    restores included, and the cosine of the displacements of equally named tensors in two layers, which independent
    noise leaves near 0.
    """
    import torch

    from evoalign_lib.es import ESTrainer
    from evoalign_lib.update_rules import coefficients
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
                # no update is intended while all populations are tied
                pair = (None, None)
                if self.intended.any():
                    applied = weights.float32() - self.start
                    pair = (round(value, 5) for value in precision.agreement(self.intended, applied))
                for name, value in zip(path, (done, *pair), strict=True):
                    path[name].append(value)
            return tied

    with tempfile.TemporaryDirectory() as folder:
        changed = {k: spec[k] for k in ("fitness", "precision", "noise")}
        # the noise of arm "es" for any fitness: the same run as in section 4, as far as arithmetic allows
        world = model.to(torch.bfloat16), tokenizer, sets
        trainer, progress = evolution.trainer(spec, world, Path(folder), Audited, arm="es", **changed)
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
    names = ("restore_changed", "restore_drift")
    audit = {name: float(np.mean([entry.get(name, 0.0) for entry in log])) for name in names}
    if updates:  # otherwise all populations were tied
        audit |= {"layers_cosine": np.mean(alike)} if alike else {}
        audit |= dict(zip(("update_cosine", "update_gain"), np.mean(updates, axis=0), strict=True))
    if "largest" in spec:
        audit |= vectors_of_largest(engine.layout.views(trainer.start), views, spec["largest"])
    result = {"audit": {k: float(f"{v:.6g}") for k, v in audit.items()}, "path": path, "counts": dict(trainer.counts)}
    result |= {"plan": engine.plan, "d": engine.layout.d, "curve": progress.curve}
    if spec["fitness"] == "reward":
        result["test"] = measures.get(spec["task"]).tested(engine, sets["test"])
    return result


def vectors_of_largest(start: Mapping[str, np.ndarray], moved: Mapping[str, np.ndarray], k: int) -> dict[str, float]:
    """Return which share of a model's k largest changes lies in vectors: norms and biases.

    Args:
        start: each tensor before.
        moved: what was added to it.
        k: how many changes, the largest first: by size, and by size over the root mean square of the tensor before.

    Returns:
        `largest_in_vectors`, `largest_relative_in_vectors`, and `vectors`, the share of all weights that lies there.

    >>> start = {"norm": np.ones(2), "matrix": np.ones((2, 3))}
    >>> vectors_of_largest(start, {"norm": np.array([0.5, 0.2]), "matrix": np.full((2, 3), 0.3)}, 2)
    {'largest_in_vectors': 0.5, 'largest_relative_in_vectors': 0.5, 'vectors': 0.25}
    """
    vector = np.concatenate([np.full(part.size, part.ndim < 2) for part in moved.values()])
    scales = {name: np.sqrt(np.mean(np.square(part, dtype=np.float64))) for name, part in start.items()}
    found = {"": dict.fromkeys(moved, 1.0), "_relative": scales}
    sizes = {
        kind: np.concatenate([np.abs(part).ravel() / scale[name] for name, part in moved.items()])
        for kind, scale in found.items()
    }
    shares = {f"largest{kind}_in_vectors": float(vector[np.argsort(-size)[:k]].mean()) for kind, size in sizes.items()}
    return shares | {"vectors": float(vector.mean())}


if __name__ == "__main__":
    _main(*sys.argv[1:])
