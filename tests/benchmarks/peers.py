"""Compare our dense ES engine with other people's code, on one core of this machine.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.peers --qiu FOLDER --torcheggroll FOLDER --out peers.json

A step evaluates 30 members on 128 Countdown prompts with 16 greedy tokens each, and moves the weights. All arms use the
same float32 model (random weights, `tests.benchmarks.cpu`), prompts, tokenizer, sigma and number of members. No arm has
an end token, so every completion has 16 tokens; any other number is an error. The arms take turns within a round, in
reversed order in every second round. The first round is discarded; a ratio compares two steps of the same round, by
wall time and by core time, which other work on the cores disturbs less. Median and range of the ratios are printed;
there are no targets.

This file contains none of the peers' code. The folders are checkouts, or copies of the files named here:

- `--qiu`: https://github.com/VsonicV/es-fine-tuning-paper, `countdown/es_fine-tuning_countdown.py` and
  `countdown/countdown_task.py`; tried at commit 04d40759bbe9fff10b5d7b436a094ccc30c3d14f, whose second file is that of
  1b24dd408e4f74bb168d0af69bebca80b9927cf0. Later commits keep old scripts under `archive`: pass that folder. Called are
  `main()` for one iteration with one thread, timed where it reads the clock itself, and `evaluate_model()` for the
  greedy tokens. Replaced in its namespace are the numbers of iterations, members and tokens, sigma and alpha, the two
  loaders of transformers (its `device_map` asks for a GPU), the clock, and the path of its data file.
- `--torcheggroll`: https://github.com/ai4flab/torcheggroll, also the source archive of PyPI, `src/torcheggroll/`; tried
  at version 0.2.0. Called are `TorchEggrollES` with its own rank (4) and antithetic pairs, `prepare_population()` and
  `apply_fitness_scores()`. It cannot generate: transformers' `generate` decodes each member through
  `torch.func.functional_call`, and our Countdown reward scores the completions.

Two things favour the peers. Objects that exist before the first step are excluded from Python's garbage collection,
which Qiu's script runs after each member and which would otherwise go through all imported libraries every time. And
the peers do not look for an end token, as our loop does. What they were written for, GPUs and larger models, is not
measured.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from evoalign_lib.tasks import countdown
from tests.benchmarks import cpu
from tests.benchmarks.shared import ALPHA, now, run_sections

TIMES = ("wall", "core")


class Ours(cpu.Ours):
    """LocalEngine with one worker, its default decoder and full-rank members."""

    def __init__(self, model: str, plan: cpu.Plan):
        super().__init__(cpu.build(model), plan.rows[0], plan)
        self.engine.eos_ids = [-1]  # no token

    def greedy(self) -> list[list[int]]:
        """Return the new tokens of the unperturbed model, one list per prompt."""
        return [raw for _, raw in self.engine.generate("train")[0]]

    def step(self) -> np.ndarray:
        """Return the seconds of one step, (2,) as TIMES."""
        start = now()
        self()
        seconds, most = now() - start, self.engine.max_completion_length
        if not all((evaluation.lengths == most).all() for evaluation in self.evaluations):
            raise RuntimeError(f"one of our completions does not have {most} tokens: the arms' work differs.")
        return seconds


class Peer(cpu.Plain):
    """A model that transformers decodes and whose generated tokens are kept."""

    def __init__(self, model: str, plan: cpu.Plan):
        super().__init__(cpu.build(model), plan.rows[0], plan)
        self.model.generation_config.eos_token_id = None
        self.made, generate = [], self.model.generate

        def kept(*inputs: Any, **settings: Any) -> torch.Tensor:
            self.made.append(generate(*inputs, **settings))
            return self.made[-1]

        self.model.generate = kept

    def greedy(self) -> list[list[int]]:
        """As `Ours.greedy`."""
        self.generate()
        return self._taken(1)[0].tolist()

    def _taken(self, members: int) -> list[torch.Tensor]:
        """Return the new tokens of all members since the last call, (prompts, new) each, and check their number.

        Raises:
            RuntimeError: other prompts, or another number of members, prompts or tokens.
        """
        made, self.made = self.made, []
        rows, width = self.ids.shape
        shapes, expected = [tuple(ids.shape) for ids in made], (rows, width + self.plan.new)
        if shapes != [expected] * members:
            raise RuntimeError(f"generated {shapes}, not {members} times {expected}.")
        if not all(torch.equal(ids[:, :width], self.ids) for ids in made):
            raise RuntimeError("its tokenised prompts are not ours: the arms' work differs.")
        return [ids[:, width:] for ids in made]


class Qiu(Peer):
    """The script by Qiu et al., which decodes with transformers."""

    files = ("countdown/es_fine-tuning_countdown.py", "countdown/countdown_task.py")

    def __init__(self, folder: Path, model: str, plan: cpu.Plan):
        super().__init__(model, plan)
        self.model.save_pretrained = lambda *_, **__: None  # its last act, after the step
        self.dataset = [(p, str(t)) for p, t in zip(self.prompts.prompts, self.prompts.columns["target"], strict=True)]
        self.scratch = tempfile.TemporaryDirectory()
        data = Path(self.scratch.name) / "data" / "countdown.json"
        data.parent.mkdir()
        data.write_text(json.dumps([{"context": prompt, "target": target} for prompt, target in self.dataset]))
        script = folder / self.files[0]
        given = ["--precision", "fp32", "--gpu_threads", "1", "--model_name", f"{self.scratch.name}/model"]
        with (
            mock.patch.object(sys, "argv", [script.name, *given, "--data_sample", str(len(self.dataset))]),
            mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            self.script = load("qiu_countdown", script)
        changed = {"NUM_ITERATIONS": 1, "POPULATION_SIZE": plan.members, "MAX_NEW_TOKENS": plan.new}
        changed |= {"SIGMA": cpu.SIGMA, "ALPHA": ALPHA, "time": SimpleNamespace(time=self._look)}
        changed |= {"__file__": str(data.parent.with_name(script.name))}
        for loader, held in (("AutoModelForCausalLM", self.model), ("AutoTokenizer", self.tokenizer)):
            changed[loader] = SimpleNamespace(from_pretrained=lambda *_, held=held, **__: held)
        if missing := [name for name in (*changed, "main", "evaluate_model") if not hasattr(self.script, name)]:
            raise AttributeError(f"{script} has no {missing}: check out the commit that the docstring names.")
        vars(self.script).update(changed)

    def greedy(self) -> list[list[int]]:
        """As `Ours.greedy`."""
        texts, targets = map(list, zip(*self.dataset, strict=True))
        on_cpu = SimpleNamespace(device=torch.device("cpu"))
        self.script.evaluate_model(self.model, self.tokenizer, texts, targets, on_cpu)
        return self._taken(1)[0].tolist()

    def step(self) -> np.ndarray:
        """As `Ours.step`."""
        self.looks: list[np.ndarray] = []
        with contextlib.redirect_stdout(io.StringIO()):
            self.script.main()
        self._taken(self.plan.members)
        _, start, end, _ = self.looks  # before the first iteration, around it, after the last
        return end - start

    def _look(self) -> float:
        self.looks.append(now())
        return time.time()


class TorchEggroll(Peer):
    """torcheggroll's low-rank members, whose weights are all written out before any is evaluated."""

    files = ("src/torcheggroll/__init__.py", "src/torcheggroll/es.py")

    def __init__(self, folder: Path, model: str, plan: cpu.Plan):
        super().__init__(model, plan)
        library = load("torcheggroll", folder / self.files[0])
        if not hasattr(library.TorchEggrollES, "prepare_population"):
            raise AttributeError(f"{folder} has no prepare_population: check out version 0.2.0.")
        self.whole = torch.nn.Module()  # its forward is a generation, so that functional_call can replace the weights
        self.whole.model, self.whole.forward = self.model, self.generate
        self.es = library.TorchEggrollES(self.whole, pop_size=plan.members, sigma=cpu.SIGMA, lr=ALPHA)

    def step(self) -> np.ndarray:
        """As `Ours.step`."""
        start, rewards = now(), []
        for weights in self.es.prepare_population():
            new = torch.func.functional_call(self.whole, weights, ())
            texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
            rewards.append(np.mean(countdown.reward(self.prompts.prompts, texts, **self.prompts.columns)))
        self.es.apply_fitness_scores(torch.tensor(np.array(rewards, np.float32)))
        seconds = now() - start
        self._taken(self.plan.members)
        return seconds


PEERS: dict[str, type[Qiu] | type[TorchEggroll]] = {"qiu": Qiu, "torcheggroll": TorchEggroll}


def load(name: str, file: Path) -> ModuleType:
    """Load the module or package at a path, whatever is installed under its name."""
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section(model: str, folders: Mapping[str, Path], plan: cpu.Plan) -> dict[str, Any]:
    """Measure all arms in turn with one model."""
    arms: dict[str, Any] = {"ours": Ours(model, plan)}
    arms |= {peer: PEERS[peer](folder, model, plan) for peer, folder in folders.items()}
    tokens = {name: arm.greedy() for name, arm in arms.items()}
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[np.ndarray]] = {name: [] for name in arms}
    for i in range(plan.repeats + 1):
        for name in list(arms)[:: -1 if i % 2 else 1]:
            seconds[name].append(arms[name].step())
    gc.unfreeze()
    measured = {name: np.array(seen[1:]) for name, seen in seconds.items()}
    return {"cells": summary(measured, tokens, plan.members * plan.rows[0])}


def summary(seconds: Mapping[str, np.ndarray], tokens: Mapping[str, list[list[int]]], completions: int) -> dict:
    """Compute rates and ratios for each arm.

    Args:
        seconds: arm -> (rounds, 2) as TIMES; "ours" is among the arms.
        tokens: arm -> greedy tokens of the unperturbed model, one list per prompt.
        completions: number per step.

    Returns:
        arm -> for each of TIMES the median completions per second, and median and range of the ratios ours/theirs of
        completions per second within a round; the share of prompts with the same greedy tokens as ours.
    """
    found: dict[str, dict[str, float]] = {}
    for name, both in seconds.items():
        same = [a == b for a, b in zip(tokens[name], tokens["ours"], strict=True)]
        found[name] = {"same_tokens": float(np.mean(same))}
        for kind, seen, ours in zip(TIMES, both.T, seconds["ours"].T, strict=True):
            ratios = seen / ours
            found[name][f"completions_a_second, {kind} time"] = float(completions / np.median(seen))
            for what, ratio in (("median", np.median(ratios)), ("least", ratios.min()), ("most", ratios.max())):
                found[name][f"{what} ours/theirs, {kind} time"] = float(ratio)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=__doc__.split("\n")[0])
    for peer, kind in PEERS.items():
        parser.add_argument(f"--{peer}", type=Path, metavar="FOLDER", help=f"a checkout with {kind.files[0]}")
    parser.add_argument("--models", nargs="+", choices=cpu.memory.SIZES, default=["1M", "4M"])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    folders = {peer: getattr(options, peer) for peer in PEERS if getattr(options, peer)}
    if not folders:
        parser.error("pass a peer's checkout: " + " or ".join(f"--{peer} FOLDER" for peer in PEERS))
    if missing := [file for peer in folders for file in PEERS[peer].files if not (folders[peer] / file).is_file()]:
        parser.error(f"no file {missing[0]}: pass a checkout that has it")
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("set OMP_NUM_THREADS=1: Qiu's script starts its own threads, which read it from there")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise Qiu's script would move its inputs to a GPU
    plan = cpu.Plan(members=30, rows=(128,), new=16, repeats=3)
    sections = {"device": partial(cpu.device_section, plan)}
    sections |= {model: partial(section, model, folders, plan) for model in options.models}
    sizes = {"members": plan.members, "prompts": plan.rows[0], "tokens": plan.new}

    def store(results: dict) -> None:
        if options.out is not None:
            options.out.write_text(json.dumps(sizes | results, indent=1) + "\n")

    with cpu.threads(1):
        return run_sections(sections, store)


if __name__ == "__main__":
    sys.exit(main())
