"""Training runs: their specs, those of the sweep that chooses their hyper-parameters, and where they are trained.

With another engine than the local one the arms that TRL trains run in processes of their own, one for each GPU. This
module is the program of each of them (see `grpo` for what they share).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from evoalign_lib import arms, checks, files, grpo, quantisation, tiny
from evoalign_lib._anchor import check_decay
from evoalign_lib.arms import SWEEP, SWEEP_SEED
from evoalign_lib.engines.processes import end_with
from evoalign_study import base_models, measures, specs, trainers, training, warm_starts
from evoalign_study.measures.base import temperatures
from evoalign_study.records import MAX_CURVE, Record, Spec
from evoalign_study.weight_cache import keep as keep_weights


def train_specs(
    arm: str, bases: Sequence[str], seeds: Iterable[int], settings: Mapping[str, Any], scale: str
) -> list[Spec]:
    """Return specs of training runs: those of the bases, with arm, seed and hyper-parameters.

    Args:
        arm: a key of `arms.ARMS`.
        settings: as for `base_specs`, and those that the arm needs (`arms.Arm.settings`); those of other arms are left
            out. Optional are:
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

    Raises:
        ValueError: an unknown arm, a setting that is missing or that no run reads, a lora_rank below 1, a
            base_precision with another engine than the local one, fewer curve points than hold the first step and the
            last or more than a record holds, an unknown curve_spacing, an anchor_decay out of range, temperatures that
            are none, a reach_at where no answers are listed, no prompts or more than there are, a step that does not
            fall into parts for GPUs and micro batches, or what `base_specs` refuses.
        FileNotFoundError: as `base_specs`.
    """
    entry = arms.get(arm)
    specs.check_names(settings)
    for base in bases:
        measures.get(settings.get("task", "countdown")).check(arm, base, settings)
    wanted = specs.sizes(settings) | specs.take(settings, entry.settings, f"arm {arm!r}")
    wanted |= {name: settings[name] for name in entry.optional if settings.get(name) is not None}
    if not check_decay(decay := wanted.get("anchor_decay", 0.0)):
        if "anchor_decay" in entry.settings:
            raise ValueError(f"anchor_decay={decay}: arm {arm!r} needs one above 0; without it, take arm 'es'.")
        wanted.pop("anchor_decay", None)
    if "sampled_at" in wanted:
        wanted["sampled_at"] = temperatures("sampled_at", wanted["sampled_at"], without=(1.0,))
    if "reach_at" in wanted:
        wanted["reach_at"] = temperatures("reach_at", wanted["reach_at"])
        _check_listed(wanted["reach_at"], settings.get("task", "countdown"), bases)
    if entry.rollouts != "own" and not base_models.is_local(settings):
        raise ValueError(
            f"engine={settings['engine']!r}: the rollouts of arm {arm!r} are drawn by the local engine alone."
        )
    if "lora_rank" in wanted and (not isinstance(wanted["lora_rank"], int) or wanted["lora_rank"] < 1):
        raise ValueError(
            f"lora_rank={wanted['lora_rank']!r}: an adapter has a whole rank of at least 1, for example 8."
        )
    wanted |= specs.engine_fields(bases, settings, trainers.of(arm), adapter="lora_rank" in wanted)
    if "micro_batch" in entry.optional:
        rollouts = wanted["prompts_per_step"] * wanted["num_generations"]
        grpo.shared(rollouts, wanted.get("micro_batch"), wanted.get("gpus", 1))
    if lacking := [name for name in warm_starts.SETTINGS if name not in wanted]:
        if given := [name for name in warm_starts.SETTINGS if name in wanted]:
            raise ValueError(
                f"{given[0]}={wanted[given[0]]} without {', '.join(lacking)}: a warm start needs them all."
            )
    for name in ("rank", "warm_rows"):
        if wanted.get(name, 1) < 1:
            raise ValueError(f"{name}={wanted[name]}: arm {arm!r} takes at least 1.")
    if "base_precision" in wanted:
        checks.choose("base_precision", wanted["base_precision"], quantisation.MODES)
        if not base_models.is_local(settings):
            raise ValueError(f"engine={settings['engine']!r}: only the local engine has bases of another precision.")
    if "scale_rewards" in wanted:
        grpo.check_scale(arm, wanted["scale_rewards"])
    _check_curve(wanted)
    if wanted.get("unique_prompts", 1) < 1:
        raise ValueError(f"unique_prompts={wanted['unique_prompts']}: give at least 1, or leave it out for new ones.")
    return [
        specs.begin("train", base, scale, settings) | {"arm": arm, "seed": seed} | wanted
        for base in bases
        for seed in seeds
    ]


def _check_listed(given: Sequence[float], task: str, bases: Sequence[str]) -> None:
    """Raise ValueError for a reach_at where no right answers are listed."""
    for base in bases:
        if not measures.get(task).lists_answers(base):
            raise ValueError(
                f"reach_at={list(given)}: the right answers of base {base!r} to task {task!r} are not listed, so that "
                "they are sampled: use sampled_at."
            )


def _check_curve(wanted: Mapping[str, Any]) -> None:
    if wanted.get("curve_spacing", "log") != "log":
        raise ValueError(f"curve_spacing={wanted['curve_spacing']!r}: use 'log', or leave it out for even spacing.")
    points, least = wanted.get("curve_points", MAX_CURVE), 3 if "curve_spacing" in wanted else 2
    if points > MAX_CURVE:
        raise ValueError(f"curve_points={points} is more than a record holds: at most {MAX_CURVE}.")
    if points < least:
        raise ValueError(f"curve_points={points} leaves out the last step: at least {least} are needed.")


def sweep_specs(
    arm: str, base: str, settings: Mapping[str, Any], scale: str, choices: Sequence[Mapping[str, float]] | None = None
) -> list[Spec]:
    """Return specs of a sweep: each setting once, at half length, on the validation set only, with a seed of its own.

    Args:
        arm: a key of `arms.SWEEP`.
        settings: as for `train_specs`, at full length.
        choices: the settings compared; None: those of `arms.SWEEP`.

    Raises:
        ValueError: a task whose validation says nothing of right answers, by which `arms.ranked` ranks.
    """
    task = settings.get("task", "countdown")
    if measures.get(task).validated_by is None:
        raise ValueError(f"a sweep ranks by right answers, and {task} validates by a proxy: train a map instead.")
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
    measure = measures.get(spec["task"])
    with training.workplace(folder) as place:
        with measure.beside(spec):
            if base_models.is_local(spec) or trainers.of(spec["arm"]).has_members:  # it drives its engine from here
                result = _measured(spec, place, folder is not None, keep)
            else:
                result = _launched(spec, place, folder is not None)
        return measure.finished(spec, result)


def trained(
    spec: Spec, place: Path, lasting: bool = False, keep: Path | None = None
) -> AbstractContextManager[training.Trained]:
    """Train as a spec says; the model is there as long as the context lasts. Arguments as `evolution.train`."""
    return import_module(trainers.of(spec["arm"]).trainer).train(spec, place, lasting, keep)


def _measured(spec: Spec, place: Path, lasting: bool, keep: Path | None = None) -> Record:
    with trained(spec, place, lasting, keep) as found:
        result = found.result | training.outcome(spec, found)
        if spec["scale"] == "tiny" and spec["base"] in tiny.SHIPPED and spec.get("test_problems", 1):
            with suppress(OSError):  # a full disk takes no record with it: whoever measures the model trains it again
                keep_weights(found.engine.master)
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
    if seen and len(devices) < gpus:
        raise ValueError(f"gpus={gpus}, but CUDA_VISIBLE_DEVICES={seen!r} names {len(devices)}: take that many.")
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


if __name__ == "__main__":
    _main(*sys.argv[1:])
