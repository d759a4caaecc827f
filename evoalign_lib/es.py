"""Evolution Strategies for language models: `ESConfig` and `ESTrainer`, with the surface of TRL's trainers.

One step (Qiu et al., arXiv 2509.24372, Algorithm 1): draw a key for each of the N members; evaluate the mean reward r_n
of the model with weights master + sigma * eps_n on the step's prompts, decoding greedily; standardise the rewards over
the population to z_n; move the master by (alpha / N) * sum_n z_n * eps_n.

Numbered differences from the released code of that study:

1. The master is float32 and does not move during evaluation: members are written from it, never restored by
   subtraction. (`precision` offers what released codes do, and a low-memory mode, for audits.)
2. eps follows the project's noise law, version 1 (`evoalign_lib.noise`): independent over tensors, regenerated from a
   key. (`noise` offers other distributions, and the tied noise of released codes.)
3. A population whose rewards are all tied moves nothing. Elsewhere z is divided by the standard deviation alone; the
   released code adds 1e-8, which matters for ties only.
4. Only the completion is scored, never the prompt.
5. Members are evaluated from a queue, by single-thread worker processes or by engines on GPUs (`engine`). Results are
   ordered by member index, so the number of workers changes nothing.

Variants, each off by default and described at its field of `ESConfig`: antithetic pairs, centred ranks, schedules of
sigma and alpha, sampled decoding with common random numbers, anchored weight decay. Their formulas are in
`evoalign_lib.update_rules`, that of the decay in `ESConfig.anchor_decay`.

alpha is "digested" as in the study's table and code: 1/sigma is part of it (the text's gradient step would be
alpha_text = sigma * alpha).

What moves is what `requires_grad` says: all weights, an adapter's alone (PEFT; its base may be quantised), or those
that the user left unfrozen. Whatever is frozen does not change by a bit, and the master holds what moves alone.

Metrics logged at each step:

- `reward`, `reward_std` (population standard deviation over members), `reward_max`, `tied` (1 if the population was),
  `rewards/<function>/mean`, and what reward functions log themselves, such as `accuracy`;
- `completions/mean_length` (tokens), `completions/clipped_ratio` (share), and so far: `completions`, `num_tokens`
  (prompt and new), `core_seconds` (CPU time); `members_per_second`, `step_time` (seconds);
- where not zero, the number of single rewards of the step that were `rewards/nan`, `rewards/exception` and
  `rewards/timeout`, which score the floor, and `rewards/none`, which are left out;
- with a schedule, `sigma` and `alpha` of the step;
- where a reward function has a state (`evoalign_lib.rewards`), `reward_state/<function>/<key>` after the step;
- with precision "kahan" and "inplace", which restore weights by subtraction, what the members of the step left behind
  on a sample of some 65,000 weights: `restore_changed` (share of weights whose bits changed; with "kahan" the last bit
  of nearly every pair) and `restore_drift` (root mean square, weight units);
- with engine="ray", where it happened, the number of actors so far that were `actors/restarted`, `actors/behind` and
  `actors/rebuilt` (`evoalign_lib.engines.ray`).

`train()` writes `output_dir/ledger.jsonl` (`evoalign_lib.ledger`): settings and rewards, from which the weights of any
step can be computed again, and from which a run that was killed at any instant goes on with the same bits. Checkpoints
only save time: each names the line of the ledger that it belongs to, where the state of reward functions is, too.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import logging
import math
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import GenerationConfig, TrainerControl, TrainerState, TrainingArguments, trainer_pt_utils
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, PredictionOutput, SaveStrategy, TrainOutput

from evoalign_lib import _adapters, _checkpoints, ledger, models, noise, precision
from evoalign_lib._anchor import check_decay
from evoalign_lib._checkpoints import BestWeights
from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib.checks import choose, nearest, whole_number
from evoalign_lib.engines import ENGINES, check_gpus, completions, open_engine
from evoalign_lib.engines.base import Evaluation, Options, Prompts, as_given, score
from evoalign_lib.engines.local import DECODERS
from evoalign_lib.engines.processes import gpus_here, world_size
from evoalign_lib.files import replace_text
from evoalign_lib.rewards import KINDS, RewardFunction, Rewards, Scored, States, state_metrics
from evoalign_lib.update_rules import (
    SCALINGS,
    SCHEDULES,
    SHAPINGS,
    Member,
    at_step,
    coefficients,
    population,
    step_size,
    update_of,
)

logger = logging.getLogger(__name__)

FITNESS = ("reward", "shuffled", "random")
PERTURBATIONS = ("full_rank", "low_rank")
SAMPLINGS = ("greedy", "common")
TIED_STEPS = 3
"""steps in a row with a tied population after which the trainer warns, once"""

SURFACE: dict[str, dict[str, tuple[str, str]]] = json.loads(
    (Path(__file__).parent / "trl_surface.json").read_text(encoding="utf-8")
)
"""What becomes here of the arguments and methods of TRL's `GRPOTrainer`, and of the settings of its `GRPOConfig`:
section -> name -> (same, refused or missing; in which respect it differs, or why and what to do instead)"""


@dataclass
class ESConfig(TrainingArguments):
    """Settings of an ES run: those below, and the general ones of `transformers.TrainingArguments`.

    Defaults are those of Qiu et al. (arXiv 2509.24372: "population size N = 30, sigma = 0.001, alpha = 5e-4", greedy
    decoding, z-scored rewards). `max_steps`, `num_train_epochs`, `seed`, `output_dir`, `save_steps`, `eval_steps`,
    `logging_steps`, `report_to` and `disable_tqdm` mean what they mean for any trainer. A setting that has no effect on
    ES, such as learning_rate, is an error.

    Raises:
        ValueError: values out of range, unknown choices, or settings without effect; the message names all of them.
        TypeError: unknown settings, such as those of `GRPOConfig` alone; the message says what to do instead.
    """

    population_size: int = field(default=30, metadata={"help": "N, members per step; at least 2"})
    """N, members per step; at least 2 (Qiu et al.: 30)"""
    sigma: float = field(default=1e-3, metadata={"help": "standard deviation of the perturbation"})
    """standard deviation of the perturbation, in weight units"""
    alpha: float = field(default=5e-4, metadata={"help": "step size, 1/sigma digested"})
    """step size with 1/sigma digested: theta += alpha / N * sum z eps"""
    antithetic: bool = field(default=False, metadata={"help": "members in pairs, with +noise and -noise"})
    """members in pairs that add and subtract the same noise (mirrored sampling: Brockhoff et al. 2010; Salimans et al.,
    arXiv 1703.03864); population_size must be even and counts members, not pairs"""
    fitness_shaping: str = field(default="zscore", metadata={"help": "zscore or centred_ranks"})
    """"zscore" (Qiu et al.); "centred_ranks" (Salimans et al., arXiv 1703.03864, after Wierstra et al. 2014): ranks
    from -0.5 to 0.5, ties sharing their mean rank, so that no outlier among the rewards outweighs the rest. Their root
    mean square is 0.29 instead of 1: a step of equal length needs an alpha about 3.5 times as large"""
    sigma_schedule: str = field(default="constant", metadata={"help": "constant, linear or cosine"})
    """"constant"; or "linear" or "cosine" (half a period, Loshchilov and Hutter, arXiv 1608.03983), which fall to
    sigma_final_fraction of sigma over `max_steps`. max_steps is then part of the run, which cannot be prolonged"""
    sigma_final_fraction: float = field(default=0.1, metadata={"help": "sigma's last value over its first"})
    """share of sigma that is left at the last step of a schedule; above 0, at most 1"""
    alpha_schedule: str = field(default="constant", metadata={"help": "constant, linear or cosine"})
    """the same for alpha; there is no warm-up"""
    alpha_final_fraction: float = field(default=0.1, metadata={"help": "alpha's last value over its first"})
    """the same for alpha (Hoffmann et al., arXiv 2203.15556, end cosine schedules at a tenth)"""
    perturbation: str = field(default="full_rank", metadata={"help": "full_rank or low_rank"})
    """noise of matrices: "full_rank" (Qiu et al.); or "low_rank" (EGGROLL, arXiv 2511.16652), E = A B^T / sqrt(rank)
    with two thin factors of noise, which has the same mean and variance, and lets members whose prompts are few decode
    as one batch (on the local engine). Norms and biases get full-rank noise (`evoalign_lib.low_rank`)"""
    update_scaling: str = field(default="mean", metadata={"help": "mean or hyperscale"})
    """what multiplies the sum of z E in the update: "mean", alpha / N (Qiu et al.; the paper of EGGROLL); or, for
    audits, "hyperscale", alpha sigma / sqrt(N), as in EGGROLL's code (HyperscaleES), whose alpha is that much larger"""
    rank: int = field(default=1, metadata={"help": "of low-rank perturbations"})
    """r of low-rank perturbations, at least 1 (EGGROLL: 1)"""
    anchor_decay: float = field(default=0.0, metadata={"help": "share of the drift that a step takes back; 0: off"})
    """lambda of anchored weight decay (Schweighofer et al., arXiv 2605.30148): each update first takes back this share
    of the way from the starting weights, theta -= lambda (theta - theta_0), that of a tied population too; 0: off, and
    below 1. Steps drift in random directions, which costs skill off the task: without a decay the drift's squared norm
    grows as alpha^2 d T / N, with it it stops at alpha^2 d / (N (1 - (1 - lambda)^2)). lambda is not multiplied by
    alpha, nor follows its schedule; the paper's code multiplies its lambda by alpha (10 * 0.0005, so 0.005 a step) and
    decays after the step, which only makes the last step shorter by that share. Needs precision="master", and a copy of
    the starting weights: 4 bytes per parameter where the master is, and on GPUs as many as the model's dtype has"""
    prompts_per_step: int | None = field(default=None, metadata={"help": "prompts per step; None: all"})
    """prompts per step, the same for every member; None: the whole training set, as Qiu et al. A member is perturbed
    once per step and decodes all of them under that one perturbation, `chunk_rows` at a time"""
    sampling: str = field(default="greedy", metadata={"help": "greedy or common"})
    """how members decode in training: "greedy" (Qiu et al.); or "common", which samples, at `temperature`, with common
    random numbers: they differ from prompt to prompt and from step to step, but not from member to member, so that
    members differ by their weights alone (Glasserman and Yao 1992). For evaluate() see num_generations_eval"""
    num_generations: int = field(default=1, metadata={"help": "completions per prompt, with sampling"})
    """completions per prompt and member, whose mean is the reward; more than 1 with sampling="common" only"""
    num_generations_eval: int | None = field(default=None, metadata={"help": "samples per prompt in evaluate()"})
    """samples per prompt in evaluate(), whose mean is the reward; their random numbers, from seed, are the same in
    every evaluation. None: evaluate() and predict() decode greedily, one completion per prompt"""
    temperature: float = field(default=1.0, metadata={"help": "of samples"})
    """of the samples, in training and in evaluate(); the logits are divided by it"""
    top_p: float = field(default=1.0, metadata={"help": "share of the probability that is drawn from"})
    """of the samples: only the tokens that have this share of the probability, the largest first; 1: all"""
    top_k: int = field(default=0, metadata={"help": "tokens that are drawn from; 0: all"})
    """of the samples: only so many tokens of the largest probability; 0: all"""
    stop_strings: list[str] | None = field(default=None, metadata={"help": "texts that end a completion"})
    """texts that end a completion, which includes the text, as the end token does (vLLM decodes on, and what follows is
    cut off)"""
    generation_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "for GenerationConfig"})
    """further settings of transformers' GenerationConfig, such as repetition_penalty, with which transformers decodes;
    with vLLM of SamplingParams (on a command line, as JSON)"""
    chat_template_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "for the chat template"})
    """further arguments of the chat template of prompts that are messages, such as enable_thinking; reward models get
    them, too (on a command line, as JSON)"""
    max_completion_length: int = field(default=1024, metadata={"help": "new tokens per completion at most"})
    """new tokens per completion, at most (Qiu et al.: 1024)"""
    fitness: str = field(default="reward", metadata={"help": "reward, shuffled or random"})
    """"reward"; or a null arm: "shuffled" permutes the rewards over the members, "random" draws them and generates no
    text"""
    arm: str = field(default="es", metadata={"help": "name that enters the run key"})
    """name of the arm, part of the run key: arms never share noise by accident"""
    reward_weights: list[float] | None = field(default=None, metadata={"help": "one weight per reward function"})
    """one weight per reward function (default: all 1)"""
    reward_floor: float | None = field(default=None, metadata={"help": "score of a failed reward"})
    """score of a NaN, an exception or a time-out of a reward function; None: the floor that its module declares"""
    reward_timeout: float | None = field(default=None, metadata={"help": "seconds per call of a reward function"})
    """seconds that a call of a reward function may take on the completions of a member; after that each is scored
    alone, with the same limit, and those that exceed it again are failures. None: no limit"""
    engine: str = field(default="local", metadata={"help": "local, vllm or ray"})
    """who generates (`evoalign_lib.engines`): "local", worker processes on this machine's cores; "vllm", one engine for
    every `tensor_parallel` of the GPUs; "ray", actors on any cluster (RAY_ADDRESS), with vLLM if there are GPUs"""
    gpus: int = field(default=0, metadata={"help": "GPUs to use"})
    """GPUs to use; 0: with engine="vllm" as many as tensor_parallel, with "ray" none"""
    tensor_parallel: int = field(default=1, metadata={"help": "GPUs that share a copy of the model"})
    """GPUs that share a copy of the model; needs vLLM"""
    engine_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "for vllm.LLM"})
    """further arguments of `vllm.LLM`, such as gpu_memory_utilization (on a command line, as JSON). Over an adapter
    max_loras is how many members decode in one batch (default: 16)"""
    workers: int | None = field(default=None, metadata={"help": "worker processes; None: one per core"})
    """worker processes, or actors without GPUs; None: one per core (without a master: 1); 1: this process"""
    chunk_rows: int = field(default=256, metadata={"help": "rows decoded at once"})
    """rows decoded at once; part of the batch plan, on which floating-point results depend"""
    decoder: str = field(default="auto", metadata={"help": "auto, loop or generate"})
    """"loop" (own decoding loop), "generate" (transformers), "auto": the loop where it covers the model"""
    precision: str = field(default="master", metadata={"help": "master, kahan or inplace"})
    """how weights are held (`evoalign_lib.precision`). "master": in float32, exact. Two modes lose bits, evaluate with
    one worker and log the loss: "kahan", compensated pairs of bfloat16 or float16, 4 bytes per parameter, with restores
    that are exact to the last bit of the pair only; "inplace", for audits: perturbed, restored by subtraction and
    updated in the model's dtype, as released codes do"""
    noise: str = field(default="gaussian", metadata={"help": "gaussian, byte_sum, rademacher or tied"})
    """distribution of the noise (`evoalign_lib.noise`); "tied": tensors of equal shape share it, as in released codes,
    for audits"""
    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "for from_pretrained"})
    """arguments of from_pretrained when the model is given by name or path (on a command line, as JSON)"""
    log_completions: bool = field(default=False, metadata={"help": "show and keep completions of logged steps"})
    """whether a step that is logged, and every evaluation, shows completions with their rewards and the columns that
    reward functions give `log_extra`: some in the terminal (with rich); those of the best and of the worst member in
    output_dir/completions/*.jsonl, and in wandb and trackio"""
    num_completions_to_print: int | None = field(default=4, metadata={"help": "of these in the terminal; None: all"})
    """how many of them are printed, drawn at random; None: all"""
    log_unique_prompts: bool = field(default=False, metadata={"help": "completions of the best member alone"})
    """whether of each prompt only what the best member wrote is shown and kept"""
    overwrite_output_dir: bool = field(default=False, metadata={"help": "delete the run in output_dir, begin anew"})
    """delete the run that output_dir holds, its ledger, checkpoints and completions, when train() begins another"""
    logging_steps: float = field(default=1, metadata={"help": "steps between logs"})
    """steps between logs"""
    remove_unused_columns: bool | None = field(default=False, metadata={"help": "keep all columns"})
    """False: every column reaches the reward function"""

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "engine_kwargs"]
    _VALID_DICT_FIELDS += ["generation_kwargs", "chat_template_kwargs"]

    def __new__(cls, *arguments, **settings):
        # before the generated __init__, whose error would name one setting and no remedy
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = [name for name in settings if name not in known]
        if unknown:
            problems = [_no_setting(cls.__name__, name, known) for name in unknown]
            problems += [why for name in settings if (why := _without_effect(name, settings[name]))]
            raise TypeError(_joined(problems))
        return super().__new__(cls)

    def __post_init__(self):
        problems = [why for name in _DEFAULTS if (why := _without_effect(name, getattr(self, name)))]
        for check in (
            self._check_population,
            self._check_schedules,
            self._check_decoding,
            self._check_choices,
            self._check_completions,
            self._check_best,
            self._check_method,
        ):
            problems += check()
        if problems:
            raise ValueError(_joined(problems))
        if self.fitness != "reward" and self.arm == (arm := type(self).__dataclass_fields__["arm"].default):
            # a null arm draws other noise than the arm it is compared with
            self.arm = f"{arm}_{self.fitness}"
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"
        # the parent would demand a checkpoint at each evaluation; here the best weights are kept in memory
        load_best, self.load_best_model_at_end = self.load_best_model_at_end, False
        super().__post_init__()
        self.load_best_model_at_end = load_best

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as trackers write them down: without tokens, keys and passwords."""
        return models.masked(super().to_dict())

    def __str__(self) -> str:
        lines = [f"{name}={value},\n" for name, value in sorted(models.masked(dataclasses.asdict(self)).items())]
        return f"{type(self).__name__}(\n{''.join(lines)})"

    __repr__ = __str__

    # ---- checks: each returns what is wrong, so that all of it is said at once

    def _check_population(self) -> list[str]:
        checks = [
            partial(whole_number, "population_size", self.population_size, 2, why="z-scores need two members"),
            partial(
                whole_number, "max_completion_length", self.max_completion_length, 1, why="new tokens per completion"
            ),
            partial(whole_number, "chunk_rows", self.chunk_rows, 1, why="rows decoded at once"),
            partial(whole_number, "num_generations", self.num_generations, 1, why="completions per prompt"),
            partial(whole_number, "rank", self.rank, 1, 2**16 - 1, why="of low-rank perturbations"),
        ]
        optional = {"prompts_per_step": "or None for the whole training set", "workers": "or None for one per core"}
        optional |= {"num_completions_to_print": "or None for all"}
        for name, why in optional.items():
            if getattr(self, name) is not None:
                checks.append(partial(whole_number, name, getattr(self, name), 1, why=why))
        found = failures(checks)
        for name in ("sigma", "alpha"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value > 0):
                found.append(f"{name}={value!r} must be a positive number, for example {_DEFAULTS[name]}.")
        if self.perturbation == "full_rank" and self.rank != _DEFAULTS["rank"]:
            found.append(
                f"rank={self.rank!r} has no effect on full-rank noise: set perturbation='low_rank', or remove it."
            )
        if not found and self.antithetic and self.population_size % 2:
            found.append(f"antithetic pairs need an even population_size, got {self.population_size}.")
        return found

    def _check_schedules(self) -> list[str]:
        found = []
        for name in ("sigma", "alpha"):
            schedule, fraction = getattr(self, f"{name}_schedule"), getattr(self, f"{name}_final_fraction")
            found += failures([partial(choose, f"{name}_schedule", schedule, SCHEDULES)])
            if not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
                found.append(f"{name}_final_fraction={fraction!r} must be above 0 and at most 1.")
            elif schedule == "constant" and fraction != _DEFAULTS[f"{name}_final_fraction"]:
                found.append(
                    f"{name}_final_fraction={fraction!r} has no effect while {name} is constant: set "
                    f"{name}_schedule='linear' or 'cosine', or remove it."
                )
        return found

    def _check_decoding(self) -> list[str]:
        found = failures([partial(choose, "sampling", self.sampling, SAMPLINGS)])
        several = isinstance(self.num_generations, int) and self.num_generations > 1
        if several and self.sampling == "greedy":
            found.append(
                f"num_generations={self.num_generations}: greedy completions of a prompt are all alike. Set "
                "sampling='common', or num_generations=1."
            )
        if self.num_generations_eval is not None:
            known = partial(
                whole_number, "num_generations_eval", self.num_generations_eval, 1, why="or None for greedy"
            )
            found += failures([known])
        for name, least, most, bounds in (
            ("temperature", 0, math.inf, "above 0"),
            ("top_p", 0, 1, "above 0 and at most 1"),
        ):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and least < value <= most and math.isfinite(value)):
                found.append(f"{name}={value!r} must be a number {bounds}.")
        found += failures([partial(whole_number, "top_k", self.top_k, 0, why="0 draws from all tokens")])
        for name in ("temperature", "top_p", "top_k"):
            if (
                self.sampling == "greedy"
                and self.num_generations_eval is None
                and getattr(self, name) != _DEFAULTS[name]
            ):
                found.append(
                    f"{name}={getattr(self, name)!r} has no effect on greedy decoding: set sampling='common' for "
                    "members or num_generations_eval for evaluations, or remove it."
                )
        if self.stop_strings is not None:
            texts = isinstance(self.stop_strings, (list, tuple)) and len(self.stop_strings) > 0
            if not texts or not all(isinstance(stop, str) and stop for stop in self.stop_strings):
                found.append(f"stop_strings={self.stop_strings!r} must be a list of texts, none of them empty.")
        return found + self._check_generation_kwargs()

    def _check_generation_kwargs(self) -> list[str]:
        """Return settings of generation that the engine states itself, or that nothing would read."""
        given = self.generation_kwargs
        if isinstance(given, str):  # from a command line; the parent refuses what is no JSON
            with suppress(ValueError):
                given = json.loads(given)
        if not isinstance(given, Mapping):
            return [] if given is None or isinstance(given, str) else [f"generation_kwargs={given!r} must be a dict."]
        found = [
            f"generation_kwargs: {name!r} is set elsewhere: {_ELSEWHERE[name]}." for name in given if name in _ELSEWHERE
        ]
        try:
            json.dumps(dict(given))
        except (TypeError, ValueError):
            found.append(f"generation_kwargs={given!r} cannot be written down: give numbers, texts, lists and dicts.")
        if self.engine == "local" or not self.gpus and self.engine == "ray":
            known = vars(GenerationConfig())
            for name in (name for name in given if name not in _ELSEWHERE):
                if name in _DRAWN_ONLY:
                    found.append(
                        f"generation_kwargs: {name!r} has no effect, since samples are drawn here: use temperature, "
                        "top_p and top_k, or engine='vllm'."
                    )
                elif name not in known:
                    found.append(f"generation_kwargs: GenerationConfig has no {name!r}.{nearest(name, known)}")
        return found

    def _check_choices(self) -> list[str]:
        choices = {"fitness": FITNESS, "fitness_shaping": SHAPINGS, "engine": ENGINES, "decoder": DECODERS}
        choices |= {"precision": precision.PRECISIONS, "noise": noise.DISTRIBUTIONS}
        choices |= {"perturbation": PERTURBATIONS, "update_scaling": SCALINGS}
        found = failures([partial(choose, name, getattr(self, name), known) for name, known in choices.items()])
        if self.engine in ENGINES:
            found += self._check_engine()
        return found + failures([lambda: check_decay(self.anchor_decay, self.precision)])

    def _check_engine(self) -> list[str]:
        """Return settings of one engine that have no effect on another."""
        found = []
        generates = "vLLM" if self.engine == "vllm" or self.gpus else "transformers"
        for name, where, has in (
            ("precision", "engine='local'", self.engine == "local"),
            ("decoder", "without GPUs", generates == "transformers"),
            ("chunk_rows", "without GPUs", generates == "transformers"),
            ("workers", "without GPUs", generates == "transformers"),
            ("gpus", "engine='vllm' or 'ray'", self.engine != "local"),
            ("tensor_parallel", "vLLM, on GPUs", generates == "vLLM"),
            ("engine_kwargs", "vLLM", generates == "vLLM"),
        ):
            if not has and getattr(self, name) != _DEFAULTS[name]:
                found.append(
                    f"{name}={getattr(self, name)!r} has no effect with engine={self.engine!r} and gpus={self.gpus}: "
                    f"it is for {where}. Remove it."
                )
        if found:
            return found
        found = failures(
            [
                partial(whole_number, "gpus", self.gpus, 0, why="0 takes what the engine needs at least"),
                partial(
                    whole_number, "tensor_parallel", self.tensor_parallel, 1, why="GPUs that share a copy of the model"
                ),
            ]
        )
        return found or failures([lambda: check_gpus(self.gpus, self.tensor_parallel)])

    def _check_completions(self) -> list[str]:
        if self.log_completions:
            return []
        return [
            f"{name}={getattr(self, name)!r} has no effect without log_completions=True: set it, or remove this."
            for name in ("num_completions_to_print", "log_unique_prompts")
            if getattr(self, name) != _DEFAULTS[name]
        ]

    def _check_best(self) -> list[str]:
        if self.load_best_model_at_end and self.engine != "local":
            return [
                f"load_best_model_at_end needs engine='local': engine={self.engine!r} cannot go back to them. "
                "Write the best step afterwards: evoalign replay --step, with state.best_global_step."
            ]
        if self.load_best_model_at_end and self.eval_strategy == IntervalStrategy.NO:
            return ["load_best_model_at_end needs evaluations: set eval_strategy='steps' and eval_steps."]
        best = self.save_strategy == SaveStrategy.BEST and not self.load_best_model_at_end
        if best and self.metric_for_best_model is None:
            return ["save_strategy='best' needs metric_for_best_model, such as 'reward'."]
        return []

    def _check_method(self) -> list[str]:
        """Return what is wrong with the settings of a method that derives from this one."""
        return []


# settings of generation that an engine states -> how to set them
_ELSEWHERE = dict.fromkeys(("temperature", "top_p", "top_k"), "it is a setting of its own")
_ELSEWHERE |= dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_completion_length")
_ELSEWHERE |= dict.fromkeys(("stop_strings", "stop"), "stop_strings of ESConfig")
_ELSEWHERE |= dict.fromkeys(("eos_token_id", "pad_token_id", "stop_token_ids", "ignore_eos"), "the model and tokenizer")
_ELSEWHERE |= dict.fromkeys(("do_sample", "num_beams", "seed"), "sampling")
_ELSEWHERE |= dict.fromkeys(("num_return_sequences", "n"), "num_generations")
_ELSEWHERE |= dict.fromkeys(("return_dict_in_generate", "detokenize"), "the engine")
# those that transformers reads only where it draws samples itself
_DRAWN_ONLY = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")

_DEFAULTS = {
    f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    for f in dataclasses.fields(ESConfig)
}


def with_settings(config: type) -> None:
    """Add to a config's docstring its own settings, of which the source says more under each field."""
    lines, inherited = ["    Args:"], config.__mro__[1].__dataclass_fields__
    for name, known in config.__dataclass_fields__.items():
        if name not in inherited or known.default != inherited[name].default and "help" in known.metadata:
            text = f"{name}: {known.metadata['help']}. Default: {known.default!r}"
            lines += textwrap.wrap(text, 120, initial_indent=" " * 8, subsequent_indent=" " * 12)
    if config.__doc__:  # python -OO has none
        config.__doc__ = config.__doc__.replace("    Raises:", "\n".join([*lines, "", "    Raises:"]), 1)


with_settings(ESConfig)


@cache
def _unset() -> list[dict[str, Any]]:
    """Return what settings of TrainingArguments are when nobody has set them: in an object, and written down."""
    plain = TrainingArguments()
    return [vars(plain), plain.to_dict()]


def _without_effect(name: str, value: Any) -> str | None:
    """Return why a setting that was set has no effect on ES; None if it has one, or was not set."""
    status, why = SURFACE["settings"].get(name, ("same", ""))
    if status == "same" or name not in _DEFAULTS or value == _DEFAULTS[name]:
        return None
    if not value and _DEFAULTS[name] in (None, False, 0, "", "no", []):  # off, as a command line says it
        return None
    # a config that is copied, or read from a file, has what its parent makes of a default
    if TrainingArguments.__dataclass_fields__[name].default == _DEFAULTS[name]:
        if any(value == unset[name] for unset in _unset()):
            return None
    return f"{name}={value!r} has no effect on ES: {why}. Remove it."


def _no_setting(config: str, name: str, known: Iterable[str]) -> str:
    """Return the error for a setting that there is not."""
    _, why = SURFACE["settings"].get(name, ("", ""))
    if why:
        return f"{config} has no setting {name!r}: {why}."
    return f"{config} has no setting {name!r}.{nearest(name, known, cutoff=0.8) or ' Remove it.'}"


def failures(checks: Iterable[Callable[[], object]]) -> list[str]:
    """Return the texts of the ValueErrors that checks raise."""
    found = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            found.append(str(error))
    return found


def _joined(problems: Sequence[str]) -> str:
    """Return problems as the text of one error."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} settings cannot stay as they are:", *(f"- {problem}" for problem in problems)])


# ---- pure parts of the step


def member_fitness(scored: Scored) -> float:
    """Return the mean reward over the prompts to which a reward function applied; NaN if there is none."""
    applied = scored.rewards[~np.isnan(scored.rewards)]
    return float(applied.mean()) if len(applied) else math.nan


def step_indices(n: int, per_step: int, seed: int, step: int) -> np.ndarray:
    """Return the rows of the training set that a step uses: the next stretch of a permutation that is new each epoch.

    Args:
        n: rows of the training set.
        per_step: prompts per step; n or fewer.
        seed: of the run.
        step: 0, 1, ...

    Returns:
        (per_step,) int64. A stretch that crosses the end of an epoch goes on in the next permutation.
    """
    if per_step == n:
        return np.arange(n)  # another order would change floating-point results and nothing else
    first, out = step * per_step, []
    while len(out) < per_step:
        epoch, offset = divmod(first + len(out), n)
        order = generator(seed, epoch, "order").permutation(n)
        out.extend(order[offset : offset + per_step - len(out)].tolist())
    return np.array(out)


_PURPOSES = {"order": 0, "shuffled": 1, "random": 2, "shown": 3, "batches": 4}


def generator(seed: int, index: int, purpose: str) -> np.random.Generator:
    """Return a branch of the run's one tree of seeds; member noise has a law of its own and is not part of it."""
    return np.random.default_rng(np.random.SeedSequence([seed, _PURPOSES[purpose], index]))


# ---- the trainer


def _no_argument(name: str) -> str:
    """Return the error for an argument that ESTrainer does not take."""
    why = SURFACE["arguments"].get(name, ("", ""))[1]
    return f"ESTrainer takes no {name!r}" + (f": {why}." if why else f".{nearest(name, SURFACE['arguments'])}")


class ESTrainer:
    """Train a language model by an Evolution Strategy, where TRL's `GRPOTrainer` stood.

    Args:
        model: a Hugging Face decoder-only model, a folder, a name on the Hub, or the name of a shipped base. Or a model
            with an adapter (`peft.get_peft_model`), or the folder of one. Only parameters with requires_grad move: of a
            model that is partly frozen the others, of one with an adapter the adapter, which engine="vllm" takes, too.
            (Else engine="local" only.)
        reward_funcs: reward function(s) with TRL's signature (see `evoalign_lib.rewards`), plain or asynchronous; or
            reward models: sequence classifiers with one label, as objects, folders or names on the Hub
            (`evoalign_lib.reward_models.ModelReward`).
        args: an `ESConfig`.
        train_dataset: rows with "prompt" (a string or messages) and further columns for the reward functions: a
            `datasets.Dataset`, or any finite sequence of mappings.
        eval_dataset: the same, for `evaluate()`; or a mapping of names to several of them.
        processing_class: the tokenizer (default: the one saved with the model).
        callbacks: `transformers.TrainerCallback`s.
        reward_processing_classes: the tokenizers of reward models, one or a list as long as reward_funcs (default:
            those saved with them); None for a function.
        quantization_config: how a model given by name is quantised as it is loaded; needs an adapter (peft_config). A
            model object is quantised by `evoalign_lib.quantisation.quantise`, which the ledger's header then says.
        peft_config: a `peft.PeftConfig`, such as LoraConfig: the model, which may be quantised, is frozen and gets a
            new adapter, drawn from args.seed. save_model() writes the adapter, for PEFT; the one that the run began
            with lies in output_dir/start, from where a resumed run and a replay take it.

    Raises:
        ValueError: an empty data set, more prompts per step than there are, prompts that leave no room for a completion
            in the model's context, a model that cannot be found or is not supported (quantised without adapter, an
            encoder, an adapter that is merged or that PEFT would not save in whole, nothing to be trained), or one of
            several processes of a launch.
        TypeError: args that are no ESConfig, a peft_config that is none, or an argument that there is not, such as one
            of `GRPOTrainer` alone.
        ImportError: PEFT is not installed.

    Ctrl-C may come at any time: train() raises KeyboardInterrupt, and another call goes on with the same bits. To
    record a step, move the weights and count it is one act that an interrupt waits for; so is a log entry, with the
    callbacks that get it. What else follows a step, callbacks, evaluation and checkpoint, comes in the next call where
    an interrupt cut it off. With precision "kahan" and "inplace" evaluation itself changes the weights, so that an
    interrupted one cannot be taken back: train() refuses to go on, and a new trainer resumes.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        args: ESConfig | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        reward_processing_classes: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        **others: Any,
    ):
        if others:
            raise TypeError(_joined([_no_argument(name) for name in others]))
        if (n := world_size()) > 1:
            raise ValueError(
                f"WORLD_SIZE={n}: each of the {n} processes of this launch would train a run of its own. Start one "
                "process; workers, gpus and engine='ray' of ESConfig spread it over cores, GPUs and machines."
            )
        if not isinstance(args, ESConfig | None):
            raise TypeError(
                f"args is a {type(args).__name__}: give an ESConfig, whose settings help(ESConfig) lists; those of "
                "transformers.TrainingArguments keep their names."
            )
        self.args = args = ESConfig() if args is None else args
        if args.log_completions:
            completions.check_rich()
        functions = _functions(reward_funcs, reward_processing_classes, args.chat_template_kwargs)
        self.rewards = Rewards(
            functions, args.reward_weights, args.reward_floor, args.reward_timeout, args.log_completions
        )
        # the run's own, which moves with the weights: functions take it over whenever they are called
        self._reward_state = self._first_reward_state = self.rewards.state()
        if train_dataset is None:
            raise ValueError("train_dataset is missing: give rows with a 'prompt' column.")
        load = _loading(model, args.model_init_kwargs, quantization_config)
        self.model, self.processing_class = models.load(
            model, processing_class, load, adapters=True, quantised=peft_config is not None
        )
        self._attach(peft_config)
        _adapters.check_movable(self.model)
        _adapters.check_something_moves(self.model)
        self._frozen = _adapters.frozen_digest(self.model, _adapters.moved(self.model))
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        prompts = {"train": Prompts(train_dataset, self.processing_class, args.chat_template_kwargs)}
        if isinstance(eval_dataset, Mapping):
            prompts |= {f"eval_{name}": self._tokenised(rows, f" {name!r}") for name, rows in eval_dataset.items()}
        elif eval_dataset is not None:
            prompts["eval"] = self._tokenised(eval_dataset)
        self._eval_sets = [name for name in prompts if name != "train"]
        if args.eval_strategy != "no" and not self._eval_sets:
            raise ValueError(f"eval_strategy={args.eval_strategy.value!r} needs an eval_dataset: give one.")
        self._check_best_metric()
        self.train_prompts = prompts["train"]
        self.prompts_per_step = args.prompts_per_step or len(self.train_prompts)
        if self.prompts_per_step > len(self.train_prompts):
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} but the training set has {len(self.train_prompts)} prompts: "
                "lower it, or set None for all."
            )
        self.run_key = noise.run_key(args.arm, args.seed)
        self.engine = open_engine(
            args.engine,
            self.model,
            self.processing_class,
            self.rewards,
            prompts,
            max_completion_length=args.max_completion_length,
            options=Options(
                args.temperature, args.top_k, args.top_p, tuple(args.stop_strings or ()), args.generation_kwargs
            ),
            distribution=args.noise,
            precision=args.precision,
            anchor_decay=args.anchor_decay,
            rank=args.rank if args.perturbation == "low_rank" else 0,
            chunk_rows=args.chunk_rows,
            decoder=args.decoder,
            workers=args.workers,
            gpus=args.gpus,
            tensor_parallel=args.tensor_parallel,
            engine_kwargs=args.engine_kwargs,
            folder=models.place(_adapters.base_if_adapter(model)) if isinstance(model, (str, os.PathLike)) else None,
            load=load,
            weights=self._weights(),
        )
        if args.engine == "local" and not args.use_cpu and (gpus := gpus_here()):
            _say_idle(gpus)
        self.budget = {"completions": 0, "generated_tokens": 0, "prompt_tokens": 0, "core_seconds": 0.0}
        self.counts = {"tied": 0} | dict.fromkeys(KINDS, 0)
        self.ledger: ledger.Ledger | None = None
        self._replayed = 0  # steps that are taken from the ledger
        self._parted = False  # whether weights and ledger may have parted
        self._lock = _checkpoints.FolderLock(args.output_dir)
        self._due: list[Callable[[], None]] = []  # what still follows the last step
        self._completions: completions.Table | None = None  # of the last step that was evaluated, if they are shown
        self._tied_steps, self._tied_said = 0, False  # one after the other; whether it was said
        self._check_reward_models()
        self._best = BestWeights(self.engine.weights)
        self.state = TrainerState(is_local_process_zero=True, is_world_process_zero=True)
        self.control = TrainerControl()
        own = [DefaultFlowCallback, *get_reporting_integration_callbacks(args.report_to)]
        given = list(callbacks or [])
        self.callback_handler = CallbackHandler(own + given, self.model, self.processing_class, None, None)
        if not args.disable_tqdm:
            self.callback_handler.add_callback(ESProgress)
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)

    def __getattr__(self, name: str) -> Any:
        status, why = SURFACE["methods"].get(name, ("", ""))
        raise AttributeError(f"{type(self).__name__} has no {name!r}{f': {why}' if why else ''}.", name=name, obj=self)

    # ---- what a method that derives from this one does otherwise

    def _attach(self, peft_config: Any) -> None:
        """Give the model the adapter that it is to have, before anything rests on its weights."""
        if peft_config is not None:
            self.model = _adapters.attach(self.model, peft_config, self.args.seed).eval()

    def _weights(self) -> precision.Weights | None:
        """Return the weights of the run; None: the engine opens them by the settings."""
        return None

    def _begin(self) -> None:
        """Do what a run that starts anew does before its first step."""

    def _header(self, digest: str) -> dict[str, Any]:
        """Return the ledger's header; digest: of the starting weights."""
        return ledger.header(self._settings(), self.run_key, self.model, self.engine.layout, digest)

    def _catch_up(self, run: ledger.Ledger) -> None:
        """Bring all else to the step of the checkpoint whose weights were loaded; run: its ledger."""
        self.engine.follow(ledger.updates(run, self.state.global_step))

    # ---- checks

    def _check_best_metric(self) -> None:
        """Raise ValueError where the metric that says which step is best is of none of several evaluation sets."""
        names = [name.removeprefix("eval_") for name in self._eval_sets if name != "eval"]
        metric = (self.args.metric_for_best_model or "").removeprefix("eval_")
        if names and metric and not metric.startswith(tuple(f"{name}_" for name in names)):
            raise ValueError(
                f"metric_for_best_model={self.args.metric_for_best_model!r} is of none of the sets {names} of "
                f"eval_dataset: begin it with the name of one, such as '{names[0]}_reward'."
            )

    def _check_reward_models(self) -> None:
        """Raise ValueError for a reward model on a GPU that several worker processes would have to share."""
        for function in self.rewards.functions:
            device = getattr(getattr(function, "model", None), "device", None)
            if self.engine.workers != 1 and device is not None and device.type != "cpu":
                raise ValueError(
                    f"the reward model {function.__name__!r} is on {device}, where worker processes cannot use it: set "
                    "workers=1, or move it to the CPU."
                )

    def _tokenised(self, rows: Iterable[Mapping[str, Any]], which: str = "") -> Prompts:
        """Return a data set for evaluation as prompts; which: of several, for errors."""
        try:
            return Prompts(rows, self.processing_class, self.args.chat_template_kwargs)
        except (TypeError, ValueError) as error:
            raise type(error)(f"eval_dataset{which}: {error}") from error

    # ---- a step

    def step(self) -> dict[str, float]:
        """Run one ES step (ask, evaluate, tell) that no ledger records; return its metrics (listed at the top)."""
        return self._step(recording=False)

    def _step(self, recording: bool) -> dict[str, float]:
        started, step = time.perf_counter(), self.state.global_step
        members, weights = self.ask(step), self.engine.weights
        known = recording and step < self._replayed
        # before the members are evaluated: that moves weights without a master
        due = recording and not known and (self.ledger is None or step and step % ledger.DIGEST_EVERY == 0)
        if due:
            self.engine.check()
        digest = weights.digest() if due else None
        self._parted |= recording and weights.drifts
        if known:
            record = self.ledger.steps[step]
            ledger.check_weights(self.ledger, step, weights)
            weights.retrace(members, self._at_step("sigma", step))
        else:
            record = self._evaluate_members(step, members)
        with interrupts_wait():  # one act: the step is recorded, moves the weights and is counted, or nothing happens
            if recording and not known:
                self._record(record, digest)
            self._parted |= recording or self.ledger is not None
            self._count(record)
            cpu = time.process_time()
            tied = self.tell(members, record.rewards)
            self.budget["core_seconds"] += time.process_time() - cpu
            self._reward_state = record.reward_state
            if self.ledger is None:  # one that begins later begins here
                self._first_reward_state = record.reward_state
            if known:  # callbacks find it in the functions
                self.rewards.load_state(record.reward_state)
            if recording:  # else no line of the ledger, if there is one, explains the step
                self.state.global_step += 1
                self._parted = False
            metrics = self._metrics(record, tied, record.seconds if known else time.perf_counter() - started)
            if not known:
                self._watch_ties(tied, record)
            if recording:
                logged = partial(self._log_step, metrics)
                self._due = [self._end_step, self._show_step, logged, self._evaluate_step, self._save_step]
        return metrics

    def ask(self, step: int) -> list[Member]:
        """Return the members of a step: N keys with sign +1, or antithetic pairs (key, +1), (key, -1); no two alike."""
        return population(self.run_key, step, self.args.population_size, self.args.antithetic)

    def _evaluate_members(self, step: int, members: Sequence[Member]) -> ledger.Step:
        """Evaluate the population; return all that the step adds to the run before the weights move."""
        started, n = time.perf_counter(), self.args.population_size
        core, tokens, counts, log, state = self.budget["core_seconds"], 0, {}, {}, self._reward_state
        weights, sigma = self.engine.weights, self._at_step("sigma", step)
        before = weights.sample() if weights.drifts else None
        if self.args.fitness == "random":
            weights.retrace(members, sigma)  # the arithmetic of the arm that it is compared with
            fitness = generator(self.args.seed, step, "random").standard_normal(n)
        else:
            indices = self._indices(step)
            sampling = None
            if self.args.sampling == "common":
                sampling = noise.sampling_key(self.run_key, step), self.args.num_generations
            evaluations = self.engine.evaluate(members, sigma, "train", indices, self._light_state(), sampling)
            fitness = np.array([member_fitness(e.scored) for e in evaluations])
            missing = np.flatnonzero(np.isnan(fitness))
            if len(missing):
                raise ValueError(
                    f"member {missing[0]} of step {step} has no reward: every reward function returned None on all of "
                    f"its {indices.shape[-1]} prompts. Give one that applies to at least one prompt of each step."
                )
            if self.args.fitness == "shuffled":
                fitness = generator(self.args.seed, step, "shuffled").permutation(fitness)
            tokens = int(sum(e.lengths.sum() for e in evaluations))
            core += sum(e.core_seconds for e in evaluations)
            counts = {name: sum(e.scored.counts[name] for e in evaluations) for name in KINDS}
            if self.args.log_completions:
                self._completions = completions.of_step(evaluations, fitness, step, self.args.log_unique_prompts)
            log = self._logged(evaluations) | {name: n for name, n in self.engine.repairs.items() if n}
        log |= weights.metrics()
        if before is not None:
            log["restore_changed"], log["restore_drift"] = precision.drift(before, weights.sample())
        self._coefficients(fitness)  # rewards that give no coefficients are an error before they are recorded
        if self.args.fitness != "random":  # which scores nothing
            state = self._next_reward_state([e.scored.metrics for e in evaluations])
        seconds = float(f"{time.perf_counter() - started:.4g}")
        return ledger.Step(step, fitness, tokens, seconds, round(core, 3), counts, log, state)

    def _next_reward_state(self, metrics: Sequence[Mapping[str, Sequence[float]]]) -> States:
        """Return the state of reward functions after a step, given what they logged in each batch that was scored.

        The run has it once the step is recorded; one that is interrupted before that changes nothing.
        """
        self.rewards.load_state(self._reward_state)
        self.rewards.end_of_step(metrics)
        return self.rewards.state()

    def _record(self, record: ledger.Step, digest: str | None) -> None:
        """Add a step to the ledger, which the first one begins; digest: of the weights before the step, where due."""
        if self.ledger is None:
            run = ledger.Ledger.create(self._ledger_path, self._header(digest))
            if _adapters.is_adapted(self.model):  # drawn at random, perhaps: no other file has it
                _checkpoints.write_start(Path(self.args.output_dir), self.engine.weights, self.save_model)
            self.ledger, digest = run, None
        self.ledger.append(record, digest)

    def tell(self, members: Sequence[Member], fitness: np.ndarray) -> bool:
        """Move the weights by (alpha / N) sum_n z_n eps_n, with alpha of the current step, and let them decay if set.

        Args:
            members: of `ask`.
            fitness: (N,) reward units.

        Returns:
            Whether the rewards moved nothing: the population was tied (or each antithetic pair was).
        """
        c = self._coefficients(fitness)
        self.counts["tied"] += int(c is None)
        if c is not None or self.args.anchor_decay:  # a tied population decays all the same
            self.engine.update(*update_of(members, c))
        return c is None

    def _coefficients(self, fitness: np.ndarray) -> np.ndarray | None:
        alpha = step_size(vars(self.args) | {"max_steps": self.max_steps}, self.state.global_step)
        return coefficients(fitness, alpha, self.args.fitness_shaping, self.args.antithetic)

    def _indices(self, step: int) -> np.ndarray:
        """Return the rows of the training set that a step uses, (prompts,), or (members, prompts), each its own."""
        return step_indices(len(self.train_prompts), self.prompts_per_step, self.args.seed, step)

    def _at_step(self, name: str, step: int) -> float:
        """Return sigma or alpha of a step."""
        return at_step(vars(self.args) | {"max_steps": self.max_steps}, name, step)

    def _light_state(self) -> TrainerState:
        """Return the state without its log, which would grow and travel to the workers with every member.

        It has that of the reward functions as `reward_state`, where one has any.
        """
        light = copy.copy(self.state)
        light.log_history = []
        if self._reward_state:
            light.reward_state = copy.deepcopy(self._reward_state)
        return light

    # ---- the loop

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Run to `max_steps` (or `num_train_epochs`), recording each step in `output_dir/ledger.jsonl`.

        Args:
            resume_from_checkpoint: True: go on with the run in output_dir, from its newest checkpoint (from the
                starting model if there is none); or a checkpoint's folder. Steps after the checkpoint that the ledger
                holds are repeated from its rewards: no member is evaluated again, but evaluate(), logs and callbacks
                come as in the run itself. The run ends with the same bits as an uninterrupted one.

        Returns:
            `transformers.trainer_utils.TrainOutput`: global_step, training_loss (NaN: ES has no loss), and metrics:
            what this call took (`train_runtime`, seconds; `train_steps_per_second`), `train_reward` of the last step
            that was logged, and what the run has spent so far. All metrics of all steps are in
            `trainer.state.log_history`. The model holds the final weights; with load_best_model_at_end those of the
            best evaluation, after `state.best_global_step` steps. (The run itself stays where it was: its ledger closes
            with its last weights, from which another train() goes on.)

        Raises:
            ValueError: a run that is complete already (the message says how to go on, and how to begin anew); nothing
                to resume from, or a run with other settings, prompts or starting weights, or whose
                reward functions had another state at the start; an output_dir in which another run trains, or whose
                ledger another run has gone on with; without resume_from_checkpoint, an output_dir that holds the ledger
                of another run, or another file of that name.
            RuntimeError: weights that are not those of the ledger's last step, a reward_timeout outside the main
                thread, or a callback that called sys.exit() before the last step.
            OSError: an output_dir that cannot be written to, or a step or checkpoint that cannot be (a full disk).
                Nothing recorded is lost.
            KeyboardInterrupt: Ctrl-C; another call goes on.
        """
        if self.engine.workers == 1 or self._eval_sets:
            self.rewards.check_timeout()
        started, first = time.perf_counter(), self.state.global_step
        try:
            self._lock.take()
            self._train(resume_from_checkpoint)
        except SystemExit as error:
            if error.code or self.state.global_step >= self.max_steps:  # a status of its own, or the run has finished
                raise
            raise RuntimeError(
                f"sys.exit() was called after step {self.state.global_step} of {self.max_steps}, and would have ended "
                "the process as if the run had finished. To end a run early set control.should_training_stop in a "
                "callback."
            ) from error
        finally:
            self._lock.give_back()
        seconds, steps = time.perf_counter() - started, self.state.global_step
        metrics = {"train_runtime": round(seconds, 4), "train_steps_per_second": round((steps - first) / seconds, 3)}
        rewards = [entry["reward"] for entry in self.state.log_history if "reward" in entry]
        metrics |= {"train_reward": rewards[-1]} if rewards else {}
        return TrainOutput(steps, math.nan, metrics | self.budget | {"epoch": round(self.state.epoch or 0.0, 4)})

    def _train(self, resume_from_checkpoint: bool | str | None) -> None:
        if resume_from_checkpoint and self.args.overwrite_output_dir and self.ledger is None:
            raise ValueError(
                "overwrite_output_dir=True deletes the run that resume_from_checkpoint would go on with: leave out one."
            )
        self._best.put_back()
        max_steps = self.max_steps
        if isinstance(resume_from_checkpoint, (str, os.PathLike)) or (resume_from_checkpoint and self.ledger is None):
            self._resume(resume_from_checkpoint)
        elif self.ledger is None:
            if self.args.overwrite_output_dir:
                _checkpoints.delete_run(self.args.output_dir)
            _checkpoints.refuse_complete(self._ledger_path, max_steps)
            ledger.refuse_existing(self._ledger_path)
        else:
            _checkpoints.check_settings(self.ledger, self._settings())
            self.ledger.check_file()  # another run may have gone on with it
        if self.ledger is None:
            self._begin()
        self._check_continuity()
        self.rewards.load_state(self._reward_state)  # not what an interrupted step left
        self.state.max_steps, self.state.num_train_epochs = max_steps, math.ceil(self._epochs(max_steps))
        self.state.compute_steps(self.args, max_steps)
        stopping = bool(self._due) and self.control.should_training_stop
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        self.control.should_training_stop |= stopping
        if self.ledger is not None and self.ledger.ended and len(self.ledger.steps) >= max_steps:
            logger.warning(
                "The run in %s is complete, with %d steps: nothing is trained. Raise max_steps to go on with it; set "
                "overwrite_output_dir=True, or use another output_dir, to begin anew.",
                self.args.output_dir,
                len(self.ledger.steps),
            )
        self._follow_step()  # what an interrupt cut off
        while self.state.global_step < max_steps and not self.control.should_training_stop:
            if self._epoch_ended(self.state.global_step):
                self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            self._step(recording=True)
            self._follow_step()
        if self.ledger is not None and len(self.ledger.steps) == self.state.global_step and not self.ledger.ended:
            self.engine.check()
            self.ledger.end(self.engine.weights.digest())
        if self.args.load_best_model_at_end:
            self._load_best()
        self.engine.write_model()
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)

    def _follow_step(self) -> None:
        """Do what follows a step, in order; what an interrupt cuts off is done again by the next call."""
        while self._due:
            self._due[0]()
            self._due = self._due[1:]

    def _end_step(self) -> None:
        self.engine.write_model()  # callbacks find the current weights in the model
        self.state.epoch = self._epochs(self.state.global_step)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if self._epoch_ended(self.state.global_step):
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)

    def _watch_ties(self, tied: bool, record: ledger.Step) -> None:
        """Say once when several populations in a row were tied, and why that may be."""
        self._tied_steps = self._tied_steps + 1 if tied else 0
        if self._tied_steps < TIED_STEPS or self._tied_said:
            return
        self._tied_said = True
        clipped = record.log.get("completions/clipped_ratio", 0.0)
        logger.warning(
            "The last %d populations were tied (the last one with a reward of %.4g), and the weights did not move. "
            "Likely causes: sigma=%g is too small to change what the members write; the reward does not tell their "
            "completions apart (log_completions=True shows them); %.0f %% of them were cut at "
            "max_completion_length=%d; or no member, or every one, solves the %d prompts of a step.",
            self._tied_steps,
            float(np.mean(record.rewards)),
            self._at_step("sigma", record.step),
            100 * clipped,
            self.args.max_completion_length,
            self.prompts_per_step,
        )

    def _log_step(self, metrics: dict[str, float]) -> None:
        if self.control.should_log:
            self.log(metrics)

    def _show_step(self) -> None:
        if self._completions is not None and self.control.should_log:
            self._show_completions(self._completions, "step")
        self._completions = None

    def _show_completions(self, table: completions.Table, what: str) -> None:
        """Print, send and write completions; what: "step", or the prefix of an evaluation."""
        step = self.state.global_step
        drawn = generator(self.args.seed, step, "shown")
        shown = completions.sample(table, self.args.num_completions_to_print, drawn)
        completions.show(shown, self.rewards.names, str(step) if what == "step" else f"{step}, {what}")
        completions.send(table, self.callback_handler.callbacks, step)
        completions.write(table, self.args.output_dir, step, what)

    def _evaluate_step(self) -> None:
        if self.control.should_evaluate:
            self.evaluate()

    def _save_step(self) -> None:
        if self.control.should_save:
            self._save_checkpoint()

    @property
    def max_steps(self) -> int:
        """Steps of the run: max_steps if it is set, else those of num_train_epochs passes over the prompts."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(self.args.num_train_epochs * len(self.train_prompts) / self.prompts_per_step)

    def _epochs(self, steps: int) -> float:
        """Return the passes over the training set in this many steps; an epoch need not be a whole number of steps."""
        return steps * self.prompts_per_step / len(self.train_prompts)

    def _epoch_ended(self, steps: int) -> bool:
        """Return whether the last of this many steps used the last prompt of an epoch; true for 0 steps."""
        n, k = len(self.train_prompts), self.prompts_per_step
        return steps * k // n > (steps - 1) * k // n

    def _check_continuity(self) -> None:
        """Raise RuntimeError if weights and ledger may have parted: an interrupted update, or a step() in between."""
        step, parted, weights = self.state.global_step, self._parted, self.engine.weights
        if self.ledger is None and weights.start is not None:  # a replay would decay toward other weights
            parted |= not np.array_equal(weights.flat.view(np.uint32), weights.start.view(np.uint32))
        if self.ledger is not None:
            recorded = len(self.ledger.steps)
            parted |= recorded != step and step >= self._replayed
            if self.ledger.ended and recorded == step:
                parted |= weights.digest() != self.ledger.weights[step]
        if parted:
            again = "train()" if self.ledger is None else "train(resume_from_checkpoint=True)"
            raise RuntimeError(
                f"the weights are not those after step {step} of {self._ledger_path}: the run was interrupted while "
                "they moved, or they were changed outside train(). Make a new trainer from the starting model and call "
                f"{again}."
            )

    # ---- evaluation and logs

    def evaluate(
        self,
        eval_dataset: Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]] | str | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return mean reward and logged metrics of the current weights on the evaluation set.

        They decode greedily, or draw num_generations_eval samples of each prompt.

        Args:
            eval_dataset: rows as for the trainer, or a mapping of names to rows; the name of one of the trainer's sets;
                None: the trainer's own. Other rows than those of the call before end the engine's processes, and
                others start.
            metric_key_prefix: what the metrics' names begin with; of one of several sets it is followed by its name.

        Raises:
            ValueError: there is nothing to evaluate on, or no set of this name.
        """
        found = {}
        for name, known in self._to_evaluate(eval_dataset).items():
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            found |= self._scores(known, self._decoded(known), prefix)
        self.log(found)
        try:
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        finally:  # the callbacks do not come again
            if eval_dataset is None and metric_key_prefix == "eval":
                self._keep_best(found)
        return found

    def predict(self, test_dataset: Iterable[Mapping[str, Any]], metric_key_prefix: str = "test") -> PredictionOutput:
        """Return what the current weights complete, as in `evaluate()`, with its rewards; nothing is logged.

        Args:
            test_dataset: rows as for the trainer.
            metric_key_prefix: what the metrics' names begin with.

        Returns:
            `transformers.trainer_utils.PredictionOutput`: predictions, the completion of each row, or its
            samples in turn, a text, or messages where its prompt is messages; label_ids, None; metrics as of
            `evaluate()`.
        """
        known = self._given(test_dataset)
        completed = self._decoded(known)
        metrics = self._scores(known, completed, metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(as_given(self.engine.prompts[known], completed), None, metrics)

    def _to_evaluate(self, dataset: Any) -> dict[str, str]:
        """Return the sets to evaluate on: name, "" for one alone -> that of its prompts in the engine."""
        if isinstance(dataset, str):
            if f"eval_{dataset}" not in self._eval_sets:
                names = [name.removeprefix("eval_") for name in self._eval_sets]
                raise ValueError(f"no eval_dataset is called {dataset!r}; there are {names}.{nearest(dataset, names)}")
            return {dataset: f"eval_{dataset}"}
        if isinstance(dataset, Mapping):
            return {name: self._given(rows, f"_{name}") for name, rows in dataset.items()}
        if dataset is not None:
            return {"": self._given(dataset)}
        if not self._eval_sets:
            raise ValueError("evaluate() needs an eval_dataset: give one to ESTrainer, or to evaluate().")
        return {name.removeprefix("eval").removeprefix("_"): name for name in self._eval_sets}

    def _given(self, rows: Iterable[Mapping[str, Any]], which: str = "") -> str:
        """Let the engine know rows that the trainer did not begin with; return the name of their prompts there."""
        name, prompts = f"given{which}", self._tokenised(rows)
        if prompts != self.engine.prompts.get(name):  # a set that comes again costs no new processes
            self.engine.put_prompts(name, prompts)
        return name

    def _decoded(self, name: str) -> list[tuple[str, list[int]]]:
        """Return completions of all prompts of a set, greedy ones, or the samples of each in turn."""
        samples = self.args.num_generations_eval or 0
        drawn = {"seed": self.args.seed, "temperature": self.args.temperature} if samples else {}
        found = self.engine.generate(name, samples=samples, **drawn)
        return [draw[row] for row in range(len(found[0])) for draw in found]

    def _scores(self, name: str, completed: list[tuple[str, list[int]]], prefix: str) -> dict[str, float]:
        """Return the metrics of completions of all prompts of a set."""
        prompts = self.engine.prompts[name]
        rows = np.repeat(np.arange(len(prompts)), len(completed) // len(prompts))
        scored = score(self.rewards, prompts, rows, completed, self._light_state())
        metrics = {f"{prefix}_{metric}": float(np.mean(values)) for metric, values in scored.metrics.items()}
        metrics[f"{prefix}_reward"] = member_fitness(scored)  # whatever a reward function logs by that name
        if scored.table:
            step = {"step": [self.state.global_step] * len(completed)}
            self._show_completions(step | scored.table, prefix)
        return metrics

    def _keep_best(self, metrics: dict[str, float]) -> None:
        """Note the best evaluation so far in the state, where EarlyStoppingCallback reads it, and keep its weights."""
        if self.args.metric_for_best_model is None or self._best.stand_in:
            return
        name = "eval_" + self.args.metric_for_best_model.removeprefix("eval_")
        if name not in metrics:
            raise ValueError(f"metric_for_best_model: {name!r} is not one of the evaluation's {sorted(metrics)}.")
        value, best = metrics[name], self.state.best_metric
        if best is None:
            best = -math.inf if self.args.greater_is_better else math.inf
        # the first of equals stays; NaN (no reward applied) is never best
        if value > best if self.args.greater_is_better else value < best:
            with interrupts_wait():
                if self.args.load_best_model_at_end:
                    self._best.keep()
                self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = True

    def _load_best(self) -> None:
        if self._best.best is None:
            logger.warning("load_best_model_at_end: there was no evaluation; the model holds the last weights.")
        elif self.state.best_global_step != self.state.global_step:
            self._best.put_in_place()

    def log(self, logs: dict[str, float]) -> None:
        """Record metrics in the state and hand them to the callbacks (tensorboard, wandb, ...)."""
        logs = {**logs, "epoch": round(self.state.epoch or 0.0, 4)}
        with interrupts_wait():  # no entry is lost, and none comes twice
            self.state.log_history.append({**logs, "step": self.state.global_step})
            self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback, an object or a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> TrainerCallback | None:
        """Remove the callback, or the first of a class, and return it; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Remove the callback, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """The reward functions, a list."""
        return self.rewards.functions

    def is_world_process_zero(self) -> bool:
        """Return True: one process trains."""
        return True

    is_local_process_zero = is_world_process_zero

    def get_num_trainable_parameters(self) -> int:
        """Return the number of weights that move."""
        return self.engine.layout.d

    # ---- files (`evoalign_lib._checkpoints`)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics, in a column, under the name of their split, as transformers' `Trainer` does."""
        trainer_pt_utils.log_metrics(self, split, dict(metrics))

    metrics_format = staticmethod(trainer_pt_utils.metrics_format)

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write metrics into output_dir/<split>_results.json, and into all_results.json unless combined is False."""
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        trainer_pt_utils.save_metrics(self, split, dict(metrics), combined)

    def save_state(self) -> None:
        """Write the trainer's state, with the metrics of all steps, into output_dir/trainer_state.json."""
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        trainer_pt_utils.save_state(self)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write output_dir/README.md: what was trained, by which settings, and how to get its weights from the ledger.

        Args:
            model_name: None: the last part of hub_model_id, or of output_dir.
            dataset_name: on the Hub, of the training set.
            tags: further tags of the card.
        """
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = _checkpoints.card(
            model_name or (self.args.hub_model_id or folder.absolute().name).split("/")[-1],
            models.name_of(self.model),
            dataset_name,
            [tags] if isinstance(tags, str) else list(tags or ()),
            self._settings(),
            self.ledger,
            self.engine.weights.digest(),
            self.rewards.names,
        )
        replace_text(folder / "README.md", text)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> Any:
        """Upload model, tokenizer, card, ledger and metrics from output_dir to the Hub; checkpoints stay here.

        Args:
            commit_message: of the upload.
            blocking: wait for its end.
            token: of the Hub; None: hub_token of the settings, or the one that huggingface_hub has.
            revision: branch; None: hub_revision of the settings, or the main one.
            **card: of `create_model_card`.

        Returns:
            `huggingface_hub.CommitInfo`; a future of it if not blocking.
        """
        from huggingface_hub import HfApi

        args, folder = self.args, Path(self.args.output_dir)
        self.save_model()
        self.create_model_card(**card)
        api = HfApi(token=token or args.hub_token)
        name = args.hub_model_id or folder.absolute().name
        repository = api.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
        revision = revision or args.hub_revision
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=commit_message,
            revision=revision,
            run_as_future=not blocking,
            ignore_patterns=["_*", ".*", "checkpoint-*", "partial-*"],
        )

    def save_model(self, output_dir: str | os.PathLike | None = None) -> None:
        """Write a Hugging Face folder: weights in the model's dtype (or the adapter), configuration, tokenizer."""
        output_dir = self.args.output_dir if output_dir is None else output_dir
        self.engine.write_model()
        self.model.save_pretrained(output_dir)
        self.processing_class.save_pretrained(output_dir)

    def _save_checkpoint(self) -> None:
        self.state.stateful_callbacks = {type(c).__name__: c.state() for c in self._stateful_callbacks()}
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        weights = self.engine.weights
        checkpoint = _checkpoints.Checkpoint(
            state=self.state,
            weights=weights.tensors(),
            digest=weights.digest(),
            best=self._best.best,
            budget=self.budget,
            counts=self.counts,
            line=self.ledger.tips[self.state.global_step],
            settings=self._settings(),
        )
        _checkpoints.write(checkpoint, folder, self.args.precision, self.save_model)
        _checkpoints.rotate(folder, self.args.save_total_limit)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _resume(self, resume_from: bool | str | os.PathLike) -> None:
        """Open the ledger, and start from a checkpoint's weights or from the model."""
        run, folder = _checkpoints.find_run(resume_from, self.args.output_dir)
        if run is None:
            return
        ledger.check_quantisation(run, self.model)
        _checkpoints.check_settings(run, self._settings())
        states = [self._first_reward_state, *(step.reward_state for step in run.steps)]
        try:
            self.rewards.load_state(states[-1])
        except ValueError as error:
            raise ledger.LedgerError(f"{str(run.path)!r}, step {len(run.steps) - 1}: {error}") from error
        if _adapters.is_adapted(self.model):
            _checkpoints.read_start(run, self.engine.weights)
        ledger.check_start(run, self.engine.weights)  # a checkpoint has the weights, not where they started
        if folder is None:
            ledger.check_model(run, self.engine.weights)
        else:
            found = _checkpoints.read(folder, run, self.engine.weights, self.args.load_best_model_at_end)
            self._best.best = found.best
            for callback in self._stateful_callbacks():
                attributes = found.state.stateful_callbacks.get(type(callback).__name__, {}).get("attributes", {})
                for name in callback.state()["attributes"].keys() & attributes.keys():
                    setattr(callback, name, attributes[name])
            self.state, self.budget, self.counts = found.state, found.budget, self.counts | found.counts
            self._catch_up(run)
        self._reward_state = states[self.state.global_step]
        self.ledger, self._replayed, self._parted, self._due = run, len(run.steps), False, []

    def _stateful_callbacks(self) -> list[TrainerCallback]:
        """Callbacks with a state to be saved, such as the patience of EarlyStoppingCallback."""
        return [c for c in self.callback_handler.callbacks if isinstance(c, ExportableState)]

    def _settings(self) -> dict[str, Any]:
        """Return what a resumed run must share with the run it continues."""
        names = ("population_size", "sigma", "alpha", "max_completion_length", "fitness", "arm", "seed")
        names += ("precision", "noise", "antithetic", "fitness_shaping", "sampling", "num_generations")
        falling = self._scheduled
        names += ("sigma_schedule", "alpha_schedule", *(f"{name}_final_fraction" for name in falling))
        settings = {name: getattr(self.args, name) for name in names} | self.engine.plan
        settings |= {"prompts_per_step": self.prompts_per_step, "prompts": len(self.train_prompts)}
        settings |= {"max_steps": self.max_steps} if falling else {}  # a longer run would have taken other steps
        for name in ("stop_strings", "generation_kwargs", "temperature", "top_p", "top_k"):
            of_samples = name in ("temperature", "top_p", "top_k")
            if getattr(self.args, name) != _DEFAULTS[name] and (self.args.sampling == "common" or not of_samples):
                settings[name] = json.loads(json.dumps(getattr(self.args, name)))  # as it comes back from the ledger
        # named where it is on: a ledger without it is, to the byte, what it was before there was a decay
        settings |= {"anchor_decay": self.args.anchor_decay} if self.args.anchor_decay else {}
        settings |= {"rank": self.engine.weights.rank} if self.engine.weights.rank else {}
        scaling = self.args.update_scaling
        settings |= {"update_scaling": scaling} if scaling != _DEFAULTS["update_scaling"] else {}
        settings |= {"frozen": self._frozen} if self._frozen else {}
        settings |= {"reward_state": self._first_reward_state} if self._first_reward_state else {}
        return settings | {"prompts_digest": self.train_prompts.digest, "noise_version": noise.NOISE_VERSION}

    @property
    def _scheduled(self) -> list[str]:
        """Which of sigma and alpha have a schedule."""
        return [name for name in ("sigma", "alpha") if getattr(self.args, f"{name}_schedule") != "constant"]

    @property
    def _ledger_path(self) -> Path:
        return Path(self.args.output_dir) / ledger.NAME

    # ---- bookkeeping

    def _count(self, record: ledger.Step) -> None:
        if self.args.fitness != "random":
            shape = self.args.population_size, self.prompts_per_step
            rows = np.broadcast_to(self._indices(record.step), shape)
            self.budget["completions"] += self.args.num_generations * rows.size
            self.budget["prompt_tokens"] += self.args.num_generations * int(self.train_prompts.lengths[rows].sum())
        self.budget["generated_tokens"] += record.tokens
        self.budget["core_seconds"] = record.core
        for name, count in record.counts.items():
            self.counts[name] += count

    def _logged(self, evaluations: list[Evaluation]) -> dict[str, float]:
        """Return the metrics of a step that do not follow from its rewards."""
        log = {}
        # what reward functions log themselves: the mean over the members that logged it
        for name in sorted({name for e in evaluations for name in e.scored.metrics}):
            log[name] = float(
                np.mean([np.mean(e.scored.metrics[name]) for e in evaluations if name in e.scored.metrics])
            )
        log["completions/clipped_ratio"] = float(np.mean([e.clipped.mean() for e in evaluations]))
        for name in self.rewards.names:
            means = [e.scored.functions[name][0] for e in evaluations if name in e.scored.functions]
            if means:
                log[f"rewards/{name}/mean"] = float(np.mean(means))
        return log

    def _metrics(self, record: ledger.Step, tied: bool, seconds: float) -> dict[str, float]:
        n, fitness = self.args.population_size, record.rewards
        metrics = {
            "reward": float(np.mean(fitness)),
            "reward_std": float(np.std(fitness)),
            "reward_max": float(np.max(fitness)),
            "tied": float(tied),
            "completions": self.budget["completions"],
            "num_tokens": self.budget["generated_tokens"] + self.budget["prompt_tokens"],
            "members_per_second": n / seconds,
            "step_time": seconds,
            "core_seconds": self.budget["core_seconds"],
        }
        if self.args.fitness != "random":
            metrics["completions/mean_length"] = record.tokens / (n * self.prompts_per_step * self.args.num_generations)
        metrics |= {name: self._at_step(name, record.step) for name in self._scheduled}
        metrics |= {f"rewards/{kind}": count for kind, count in record.counts.items() if count}
        metrics |= state_metrics(record.reward_state)
        return record.log | metrics  # a reward function's metric never replaces one of these


@cache
def _say_idle(gpus: int) -> None:
    """Say once in this process that its GPUs are left idle."""
    logger.warning(
        "This machine has %d GPU(s), and engine='local' decodes on the CPU, which takes many times longer for all but "
        "small models. Set engine='vllm' (pip install 'evoalign[gpu]') to use them, or use_cpu=True to say that the "
        "CPU is meant.",
        gpus,
    )


def _functions(rewards: Any, tokenizers: Any, template: Any) -> Any:
    """Return reward functions, where reward models among them are functions, too."""
    several = isinstance(rewards, Sequence) and not isinstance(rewards, str)
    others = [f for f in (rewards if several else [rewards]) if not inspect.isfunction(f)]
    if not others and tokenizers is None:
        return rewards
    from evoalign_lib import reward_models

    return reward_models.as_functions(rewards, tokenizers, template)


def _loading(model: Any, keywords: Any, quantisation: Any) -> Any:
    """Return the arguments of from_pretrained; refuse a quantization_config that would not be used."""
    if quantisation is None:
        return keywords
    if not isinstance(model, (str, os.PathLike)):
        raise ValueError("quantization_config is for a model given by name; the model given is an object already.")
    if "quantization_config" in (keywords or {}):
        raise ValueError("quantization_config is given twice, as an argument and in model_init_kwargs: remove one.")
    return dict(keywords or {}) | {"quantization_config": quantisation}


class ESProgress(TrainerCallback):
    """A bar over steps with reward, accuracy (where the reward logs it), ties, members per second and time left."""

    def __init__(self):
        self._bar = None
        self._tied = 0

    def on_train_begin(self, args, state, control, **kwargs):
        if self._bar is not None:  # of a run that was interrupted
            self._bar.close()
        self._bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._bar is None or not logs or "reward" not in logs:
            return
        shown = {"reward": f"{logs['reward']:.3f}", "members/s": f"{logs['members_per_second']:.1f}"}
        if "accuracy" in logs:
            shown["accuracy"] = f"{logs['accuracy']:.3f}"
        self._tied = self._tied + 1 if logs["tied"] else 0
        if self._tied:  # logged steps in a row whose members all had the same reward: nothing moves
            shown["tied"] = self._tied
        self._bar.set_postfix(shown, refresh=False)

    def on_step_end(self, args, state, control, **kwargs):
        self._bar.update(state.global_step - self._bar.n)

    def on_train_end(self, args, state, control, **kwargs):
        self._bar.close()
        self._bar = None
