"""Training runs: their specs, those of the sweep that chooses their hyper-parameters, and where they are trained.

A *composed* run goes on from where another run ended: a gradient arm after ES, or ES after a gradient arm. An *audit*
is an ES run of a bfloat16 model, of which the arithmetic is looked at.

With another engine than the local one the arms that TRL trains run in processes of their own, one for each GPU. This
module is the program of each of them (see `grpo` for what they share).
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
from evoalign_lib.arms import SWEEP, SWEEP_SEED
from evoalign_lib.checks import choose, require, whole_number
from evoalign_lib.engines.processes import end_with
from evoalign_study import base_models, measures, specs, trainers, training, weight_cache
from evoalign_study.measures.base import temperatures
from evoalign_study.records import MAX_CURVE, Record, Settings, Spec


def train_specs(arm: str, bases: Sequence[str], seeds: Iterable[int], settings: Settings, scale: str) -> list[Spec]:
    """Return specs of training runs: those of the bases, with arm, seed and hyper-parameters.

    Args:
        arm: a key of `arms.ARMS`.
        bases: as for `decode.base_specs`.
        seeds: of the runs.
        settings: as for `decode.base_specs`, and those that the arm needs (`arms.Arm.settings`); those of other arms
            are left out. Optional are:
            curve_spacing "log": points evenly spaced in the logarithm of the steps; else evenly in steps.
            unique_prompts: the run sees this many problems, again and again, each equally often in the whole run, a
            gradient arm in turn and ES in random order. Without it every step has new ones in the tiny world, and other
            models train on all public problems; conciseness needs it in the tiny world, 2 or 200.
            sampled_at: temperatures besides 1 at which every point of the curve samples, and the test set at the end.
            reach_at: temperatures at which every point of the curve says what the run reaches, without sampling
            (`Measures.reach`); of a task and base whose right answers are listed.
            anchor_decay, of ES: as `ESConfig` has it; 0 is left out of the spec, since it is the run without.
            scale_rewards, of GRPO and its relatives: instead of the arm's own.
            micro_batch, of the same: completions in a backward pass of one GPU; else all of its share of
            a step, too many for a large model.
            warm_rows, warm_epochs, warm_learning_rate, of arms over an adapter: right answers that it is fine-tuned on
            before, and how; all three, or none, which ESSA cannot do without.
            base_precision, of ES and ESSA over an adapter: how the frozen base is held (`quantisation.MODES`); else as
            it is loaded. The record then has the test over the base as it is loaded, too, `over_loaded`.
            engine ("local", "vllm", "ray"), gpus, tensor_parallel: as `ESConfig` has them; the arms that TRL trains
            have vLLM beside the model (see `specs.engine_fields`).
        scale: of the notebook.

    Raises:
        ValueError: an unknown arm, a setting that is missing or that no run reads, a lora_rank below 1, a
            base_precision with another engine than the local one, fewer curve points than hold the first step and the
            last or more than a record holds, an unknown curve_spacing, an anchor_decay out of range, temperatures that
            are none, a reach_at where no answers are listed, no prompts or more than there are, a step that does not
            fall into parts for GPUs and micro batches, or what `base_specs` refuses.
        FileNotFoundError: as `base_specs`.
    """
    entry, task = arms.get(arm), settings.get("task", "countdown")
    specs.check_names(settings)
    for base in bases:
        measures.get(task).for_base(base).check(arm, base, settings)
    wanted = specs.sizes(settings) | specs.take(settings, entry.settings, f"arm {arm!r}")
    wanted |= {name: settings[name] for name in entry.optional if settings.get(name) is not None}
    if not check_decay(decay := wanted.get("anchor_decay", 0.0)):
        if "anchor_decay" in entry.settings:
            raise ValueError(f"anchor_decay={decay}: arm {arm!r} needs one above 0; without it, take arm 'es'.")
        wanted.pop("anchor_decay", None)
    for name, besides in (("sampled_at", (1.0,)), ("reach_at", ())):
        if name in wanted:
            wanted[name] = temperatures(name, wanted[name], without=besides)
    if "reach_at" in wanted and (unlisted := [b for b in bases if not measures.get(task).lists_answers(b)]):
        raise ValueError(f"reach_at={wanted['reach_at']}: base {unlisted[0]!r} lists no right answers: use sampled_at.")
    if not base_models.is_local(settings):
        engine = f"engine={settings['engine']!r}"
        local = f"{engine}: the rollouts of arm {arm!r} are drawn by the local engine alone."
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
    least, why = 3 if "curve_spacing" in wanted else 2, "the first step and the last are in it, and a record holds 50"
    whole_number("curve_points", wanted.get("curve_points", MAX_CURVE), least, MAX_CURVE, why)
    begun = [specs.begin("train", base, scale, settings) | {"arm": arm} for base in bases]
    return [common | {"seed": seed} | wanted for common, seed in itertools.product(begun, seeds)]


def sweep_specs(
    arm: str, base: str, settings: Settings, scale: str, choices: Sequence[Mapping[str, float]] | None = None
) -> list[Spec]:
    """Return specs of a sweep: each setting once, at half length, on the validation set only, with a seed of its own.

    Args:
        arm: a key of `arms.SWEEP`.
        base: one of those of `train_specs`.
        settings: as for `train_specs`, at full length.
        scale: of the notebook.
        choices: the settings compared; None: those of `arms.SWEEP`.

    Raises:
        ValueError: a task whose validation says nothing of right answers, by which `arms.ranked` ranks.
    """
    measures.get(settings.get("task", "countdown")).check_validates("a sweep ranks by right answers")
    half = dict(settings) | {"steps": settings["steps"] // 2, "test_problems": 0}
    choices = SWEEP[arm] if choices is None else choices
    return [spec for c in choices for spec in train_specs(arm, [base], [SWEEP_SEED], half | dict(c), scale)]


def run(spec: Spec, keep: Path | None = None, folder: Path | None = None) -> Record:
    """Return the record of a training run: its curve, and the test set once, at the end.

    Args:
        spec: of `train_specs`.
        keep: where the ledger of an ES run goes, compressed; None: it is not kept.
        folder: where the run keeps checkpoints, logs for TensorBoard and the points of its curve, and from where it
            goes on if it was killed ("sft" starts anew), until `training.settle` is told that its record is stored. Of
            a gradient arm the trained model stays there (an ES run's ledger stands for it). None: nothing is kept.

    Raises:
        RuntimeError: another process works in the folder; or the processes of a gradient arm failed, saying how.
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
        if spec["scale"] == "tiny" and spec["base"] in tiny.SHIPPED and spec.get("test_problems", 1):
            with suppress(OSError):  # a full disk takes no record with it: whoever measures the model trains it again
                weight_cache.keep(ended.engine.master)
        return result


def _launched(spec: Spec, place: Path, lasting: bool) -> Record:
    """Train in processes of their own, one for each GPU, which see no other GPUs.

    Raises:
        RuntimeError: they failed; the message has the end of what they wrote, and says where all of it is.
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
    require(not seen or len(devices) == gpus, f"gpus={gpus}, but {named}: take that many.")
    log = place / "log.txt"
    with open(log, "ab") as file:
        begun = file.tell()
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code or not result.is_file():
        lines = log.read_bytes()[begun:].decode(errors="replace").splitlines()
        # of several processes what one that failed said, and not what their launcher says of it
        failed = next((line.partition(":")[0] for line in lines if re.match(r"\[rank\d+\]: Traceback", line)), None)
        end = [line for line in lines if failed is None or line.startswith(failed)][-30:]
        where = f"all of it is in {log}" if lasting else "run it with a folder to keep all of it"
        raise RuntimeError("\n".join([f"the processes of {spec['arm']} ended with code {code}; {where}:", *end]))
    return json.loads(result.read_text())


def _main(place: str, driver: str, *lasting: str) -> None:
    """One process of a launched run: read the spec, train, and write the result if it is the first process."""
    end_with(int(driver))
    folder = Path(place)
    asked = json.loads((folder / "spec.json").read_text())
    base_models.know_files(asked["files"])
    result = _measured(asked["spec"], folder, bool(lasting))
    if os.environ.get("RANK", "0") == "0":
        files.replace_text(folder / "result.json", json.dumps(result))


# ---- runs that go on from the end of another one


def composed_specs(arm: str, records: Sequence[Record], settings: Settings, scale: str) -> list[Spec]:
    """Return specs of runs of an arm, one from the end of each of some training runs of the tiny world, with its seed.

    The second part has a spec, a seed and a budget of its own, and optimiser moments that begin at zero; what the first
    part spent is in the first part's record. KL and coverage are measured against the base of the first part.

    Args:
        arm: a key of `arms.ARMS`, of the second part.
        records: of the first parts.
        settings: of the second part, as for `train_specs`.
        scale: of the notebook.

    Raises:
        ValueError: a first part that is no training run of a plain base of the tiny world, and what `train_specs`
            refuses.
    """
    wanted = []
    for record in records:
        start = weight_cache.group([record])
        base = specs.begin_tiny("composed", start["run"]["base"], scale, {})["base"]
        (spec,) = train_specs(arm, [base], start["seeds"], settings, scale)
        wanted.append(spec | {"kind": "composed", "start": start})
    return wanted


def run_composed(spec: Spec) -> Record:
    """Return the record of the second part, as that of a training run; `update_norm` is the way from its own start."""
    with tempfile.TemporaryDirectory() as place:
        return _measured(spec, Path(place))


# ---- the audit of arithmetic


def audit_specs(
    base: str, precision: str, noise: str, fitness: str, seeds: Iterable[int], settings: Settings, scale: str
) -> list[Spec]:
    """Return specs of ES runs of a bfloat16 model that differ in arithmetic or noise alone.

    Args:
        base: one of those of `train_specs`.
        precision: "master", "kahan" or "inplace" (see `precision`).
        noise: "gaussian" or "tied".
        fitness: "reward", or "random", which generates nothing in training: arithmetic alone.
        seeds: of the runs.
        settings: as for `train_specs`, without those that are optional there.
        scale: of the notebook.

    Raises:
        ValueError: a task whose answers are not right or wrong, another engine than the local one, a setting that is
            optional for training, or what `train_specs` refuses of settings and bases.
    """
    specs.check_names(settings)
    measures.get(settings.get("task", "countdown")).check_validates("an audit measures right answers")
    engine = f"engine={settings.get('engine')!r}"
    require(base_models.is_local(settings), f"{engine}: an audit moves weights in place, which only 'local' does.")
    es = arms.get("es")
    for name in es.optional:
        given = settings.get(name)
        require(given is None, f"{name}={given!r}: an audit has no such setting, leave it out.")
    wanted = specs.sizes(settings) | specs.take(settings, es.settings, "an audit")
    arithmetic = {"dtype": "bfloat16", "precision": precision, "noise": noise, "fitness": fitness}
    return [specs.begin("audit", base, scale, settings) | arithmetic | wanted | {"seed": seed} for seed in seeds]


def run_audit(spec: Spec) -> Record:
    """Return what became of the updates of an ES run of a bfloat16 model, with the arithmetic and noise of the spec.

    Of each step: the share of weights that restoring the members changed, and how far (rms); cosine and gain of the
    applied update against the intended one. Of the whole path: the same two, restores included; and the cosine of the
    displacements of two layers' tensors of equal name, which independent noise leaves near 0.
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
                # nothing is intended as long as all populations were tied
                pair = (None, None)
                if self.intended.any():
                    applied = weights.float32() - self.start
                    pair = (round(value, 5) for value in precision.agreement(self.intended, applied))
                for name, value in zip(path, (done, *pair), strict=True):
                    path[name].append(value)
            return tied

    with tempfile.TemporaryDirectory() as folder:
        changed = {k: spec[k] for k in ("fitness", "precision", "noise")}
        # the noise of the arm "es" whatever the fitness: the very run of section 4, as far as arithmetic lets it be
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
    if updates:  # else all populations were tied
        audit |= {"layers_cosine": np.mean(alike)} if alike else {}
        audit |= dict(zip(("update_cosine", "update_gain"), np.mean(updates, axis=0), strict=True))
    result = {"audit": {k: float(f"{v:.6g}") for k, v in audit.items()}, "path": path, "counts": dict(trainer.counts)}
    result |= {"plan": engine.plan, "d": engine.layout.d, "curve": progress.curve}
    if spec["fitness"] == "reward":
        result["test"] = measures.get(spec["task"]).tested(engine, sets["test"])
    return result


if __name__ == "__main__":
    _main(*sys.argv[1:])
