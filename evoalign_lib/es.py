"""Evolution Strategies for language models: `ESConfig` and `ESTrainer`, with the interface of TRL's trainers.

One step (Qiu et al., arXiv 2509.24372, Algorithm 1): draw a key for each of the N members; decode the step's prompts
greedily with the weights master + sigma * eps_n and take the mean reward r_n; standardise the rewards over the
population, which gives z_n; move the master by (alpha / N) * sum_n z_n * eps_n.

Numbered differences from the released code of that study:

1. The master is float32 and does not move during evaluation: members are written from it, never restored by
   subtraction. (For audits, `precision` also offers what released codes do, and a low-memory mode.)
2. eps follows the project's noise law, version 1 (`evoalign_lib.noise`): independent across tensors, regenerated from a
   key. (`noise` also offers other distributions, and the tied noise of released codes.)
3. A population whose rewards are all tied moves nothing. Otherwise z is divided by the standard deviation alone; the
   released code adds 1e-8, which matters only for ties.
4. Only the completion is scored, never the prompt.
5. Members are evaluated from a queue, by single-thread worker processes or by engines on GPUs (`engine`). Results are
   ordered by member index, so they do not depend on the number of workers.

Variants, each off by default and described at its field of `ESConfig`: antithetic pairs, centred ranks, schedules of
sigma and alpha, sampled decoding with common random numbers, anchored weight decay. Their formulas are in
`evoalign_lib.update_rules`; that of the decay is in `ESConfig.anchor_decay`.

alpha is "digested" as in the study's table and code: it already contains 1/sigma (the gradient step in the study's text
would be alpha_text = sigma * alpha).

`requires_grad` decides what moves: all weights, those of an adapter alone (PEFT; its base may be quantised), or those
that the user left unfrozen (`perturb="linear"` freezes all but the matrices of linear layers). Frozen weights do not
change by a single bit, and the master holds only the weights that move.

Metrics logged at each step:

- `reward`, `reward_std` (population standard deviation over members), `reward_max`, `tied` (1 if the population was
  tied), `rewards/<function>/mean`, and what reward functions log themselves, such as `accuracy`;
- `completions/mean_length` (tokens) and `completions/clipped_ratio` (share); totals since the start of the run:
  `completions`, `num_tokens` (prompt and new), `core_seconds` (CPU time); and `members_per_second`, `step_time`
  (seconds);
- where not zero, the number of single rewards in the step that were `rewards/nan`, `rewards/exception` or
  `rewards/timeout`, which score the floor (in an evaluation, too), or `rewards/none`, which are left out;
- with a schedule, `sigma` and `alpha` of the step;
- for a reward function with a state (`evoalign_lib.rewards`), `reward_state/<function>/<key>` after the step;
- with precision "kahan" and "inplace", which restore weights by subtraction, the error that the step's members left
  behind, on a sample of some 65,000 weights: `restore_changed` (share of weights whose bits changed; with "kahan" the
  last bit of nearly every pair) and `restore_drift` (root mean square, weight units);
- with engine="ray", where not zero, the number of actors so far that were `actors/restarted` or `actors/rebuilt`
  (`evoalign_lib.engines.ray`).

`train()` writes `output_dir/ledger.jsonl` (`evoalign_lib.ledger`): settings and rewards. From it the weights of any
step can be computed again, and a run killed at any moment resumes with the same bits. Checkpoints only save time: each
names the line of the ledger that it belongs to, which also holds the state of the reward functions.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers import TrainerControl, TrainerState
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState, TrainerCallback
from transformers.trainer_utils import TrainOutput, speed_metrics

from evoalign_lib import _adapters, _checkpoints, ledger, models, noise, precision, update_rules
from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib.checks import plain, require
from evoalign_lib.config import _DEFAULTS, SURFACE, ESConfig, absent, joined
from evoalign_lib.engines import completions, open_engine
from evoalign_lib.engines.base import Evaluation, Options, Prompts
from evoalign_lib.engines.processes import gpus_here, world_size
from evoalign_lib.rewards import KINDS, RewardFunction, Rewards, States, state_metrics
from evoalign_lib.surface import ESProgress, TrainerSurface, sets_of
from evoalign_lib.update_rules import Member, generator, mean_reward

logger = transformers.utils.logging.get_logger(__name__)


# ---- pure functions of the step


def step_indices(n: int, per_step: int, seed: int, step: int) -> np.ndarray:
    """Return the rows of the training set for one step, from a permutation that is drawn anew each epoch.

    Args:
        n: rows of the training set.
        per_step: prompts per step; at most n.
        seed: seed of the run.
        step: 0, 1, ...

    Returns:
        (per_step,) int64. A step that reaches the end of an epoch continues in the next permutation.
    """
    if per_step == n:
        return np.arange(n)  # another order would change floating-point results and nothing else
    first, out = step * per_step, []
    while len(out) < per_step:
        epoch, offset = divmod(first + len(out), n)
        order = generator(seed, epoch, "order").permutation(n)
        out.extend(order[offset : offset + per_step - len(out)].tolist())
    return np.array(out)


# ---- the trainer


class ESTrainer(TrainerSurface):
    """Train a language model by an Evolution Strategy, with the interface of TRL's `GRPOTrainer`.

    Args:
        model: a Hugging Face decoder-only model, a folder, a name on the Hub, or the name of a shipped base. Or a model
            with an adapter (`peft.get_peft_model`), or the folder of one. Only parameters with requires_grad move: in a
            partly frozen model those that are not frozen, in a model with an adapter the adapter (engine="local" or
            "cuda", or one engine of vLLM).
        reward_funcs: reward function(s) with TRL's signature (see `evoalign_lib.rewards`), plain or asynchronous; or
            reward models: sequence classifiers with one label, as objects, folders or names on the Hub
            (`evoalign_lib.reward_models.ModelReward`).
        args: an `ESConfig`.
        train_dataset: rows with "prompt" (a string or messages) and further columns for the reward functions: a
            `datasets.Dataset`, or any finite sequence of mappings.
        eval_dataset: the same, for `evaluate()`; or a mapping of names to several such data sets.
        processing_class: the tokenizer (default: the one saved with the model).
        callbacks: `transformers.TrainerCallback`s.
        reward_processing_classes: the tokenizers of reward models, one or a list as long as reward_funcs (default:
            those saved with them); None for a function.
        quantization_config: how to quantise a model given by name as it is loaded; needs an adapter (peft_config). To
            quantise a model object, use `evoalign_lib.quantisation.quantise`, which the ledger's header then records.
        peft_config: a `peft.PeftConfig`, such as LoraConfig: freezes the model, which may be quantised, and adds a new
            adapter drawn from args.seed. save_model() writes the adapter, for PEFT. The initial adapter is kept in
            output_dir/start, from where a resumed run and a replay take it.

    Raises:
        ValueError: an empty data set, more prompts per step than there are, prompts that leave no room for a completion
            in the model's context, a model that cannot be found or is not supported (quantised without an adapter, an
            encoder, an adapter that is merged or that PEFT would not save completely, nothing to train), or a launch of
            several processes.
        TypeError: args that are not an ESConfig, a peft_config that is not a PeftConfig, or an unknown argument, such
            as one that only `GRPOTrainer` has.
        ImportError: PEFT is not installed.

    Ctrl-C is safe at any time: train() raises KeyboardInterrupt, and another call resumes with the same bits. Recording
    a step, moving the weights and counting it are one unit that an interrupt waits for; so are a log entry and the
    callbacks that receive it. Whatever else follows a step (callbacks, evaluation, checkpoint) and was cut off is made
    up for by the next call. With precision "kahan" and "inplace" evaluation itself changes the weights, so an
    interrupted evaluation cannot be undone: train() refuses to go on, and a new trainer must resume.
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
            takes = SURFACE["arguments"]
            raise TypeError(joined([absent("ESTrainer takes no", "arguments", name, takes) for name in others]))
        if (n := world_size()) > 1:
            raise ValueError(f"WORLD_SIZE={n}: start one process and spread its work by workers, gpus or engine='ray'.")
        if not isinstance(args, ESConfig | None):
            raise TypeError(f"args is a {type(args).__name__}: pass an ESConfig (help(ESConfig) lists its settings).")
        self.args = args = ESConfig() if args is None else args
        if args.log_completions:
            completions.check_rich()
        from evoalign_lib import reward_models

        functions = reward_models.as_functions(reward_funcs, reward_processing_classes, args.chat_template_kwargs)
        self.rewards = Rewards(
            functions, args.reward_weights, args.reward_floor, args.reward_timeout, args.log_completions
        )
        # belongs to the run and advances with the weights; loaded into the functions before each call
        self._reward_state = self._first_reward_state = self.rewards.state()
        require(train_dataset is not None, "train_dataset is missing: pass rows with a 'prompt' column.")
        load = dict(args.model_init_kwargs or {})
        if quantization_config is not None:
            load = dict(**load, quantization_config=quantization_config)  # raises if both give one
        self.model, self.processing_class = models.load(
            model, processing_class, load, adapters=True, quantised=peft_config is not None
        )
        self._attach(peft_config)
        _adapters.check_movable(self.model)
        if args.perturb == "linear":
            _adapters.keep_linear(self.model)
        _adapters.check_something_moves(self.model)
        self._frozen = _adapters.frozen_digest(self.model, _adapters.moved(self.model))
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        prompts = {"train": Prompts(train_dataset, self.processing_class, args.chat_template_kwargs)}
        self.rewards.check_columns(prompts["train"].columns)
        self._eval_sets: dict[str, str] = {}  # name ("" for a single set) -> name of its prompts in the engine
        for name, suffix, rows in sets_of(eval_dataset) if eval_dataset is not None else ():
            self._eval_sets[name] = f"eval{suffix}"
            prompts[f"eval{suffix}"] = self._tokenised(rows, f" {name!r}" if name else "")
        if args.eval_strategy != "no" and not self._eval_sets:
            raise ValueError(f"eval_strategy={args.eval_strategy.value!r} needs an eval_dataset: pass one.")
        self._check_best_metric()
        self.train_prompts = prompts["train"]
        if date := self.train_prompts.date:
            logger.warning_once(f"The chat template states today's date, which is {date} in every run, on any day.")
        n = len(self.train_prompts)
        self.prompts_per_step = args.prompts_per_step or n
        if self.prompts_per_step > n:
            raise ValueError(f"prompts_per_step={self.prompts_per_step} exceeds the {n} prompts: lower it.")
        self.run_key = noise.run_key(args.arm, args.seed)
        names = ("max_completion_length", "precision", "anchor_decay", "chunk_rows", "decoder", "workers", "gpus")
        stops = tuple(args.stop_strings or ())
        self.engine = open_engine(
            args.engine,
            self.model,
            self.processing_class,
            self.rewards,
            prompts,
            options=Options(args.temperature, args.top_k, args.top_p, stops, args.generation_kwargs),
            distribution=args.noise,
            rank=args.rank if args.perturbation == "low_rank" else 0,
            folder=models.place(_adapters.base_if_adapter(model)) if isinstance(model, (str, os.PathLike)) else None,
            load=load,
            weights=self._weights(),
            device="cpu" if args.use_cpu else "cuda",
            population=args.population_size,
            step_rows=self.prompts_per_step * args.num_generations,
            **{name: getattr(args, name) for name in (*names, "tensor_parallel", "engine_kwargs")},
        )
        if args.engine == "local" and not args.use_cpu and (gpus := gpus_here()):
            remedy = "set engine='cuda' or 'vllm', or use_cpu=True to keep to the CPU"
            logger.warning_once(f"{gpus} GPU(s) stay idle: {remedy}.")
        self.budget = {"completions": 0, "generated_tokens": 0, "prompt_tokens": 0, "core_seconds": 0.0}
        self.counts = {"tied": 0} | dict.fromkeys(KINDS, 0)
        self.ledger: ledger.Ledger | None = None
        self._replayed = 0  # steps that come from the ledger, not from evaluation
        self._parted = False  # whether weights and ledger may disagree
        self._due: list[Callable[[], object]] = []  # what remains to be done after the last step
        self._completions: completions.Table | None = None  # of the last evaluated step, if completions are shown
        self._tied_steps, self._tied_said = 0, False  # tied steps in a row; whether the warning was given
        self._evaluations: list[Evaluation] = []  # of the last evaluated step
        self._check_reward_models()
        self._best: _checkpoints.Best | None = None  # weights of the best evaluation, if kept
        self._last_weights: Mapping[str, Any] | None = None  # the run's own, while the model holds the best ones
        self.state = TrainerState(is_local_process_zero=True, is_world_process_zero=True)
        self.control = TrainerControl()
        every = [DefaultFlowCallback, *get_reporting_integration_callbacks(args.report_to), *(callbacks or [])]
        self.callback_handler = CallbackHandler(every, self.model, self.processing_class, None, None)
        if not args.disable_tqdm:
            self.callback_handler.add_callback(ESProgress)
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)

    # ---- hooks that a derived method (ESSA) overrides

    def _attach(self, peft_config: Any) -> None:
        """Add the new adapter to the model, if one is asked for, before anything depends on the model's weights."""
        if peft_config is not None:
            self.model = _adapters.attach(self.model, peft_config, self.args.seed).eval()

    def _weights(self) -> precision.Weights | None:
        """Return the weights of the run; None: the engine opens them according to the settings."""
        return None

    def _begin(self) -> None:
        """Prepare a new run, just before its first step."""

    def _header(self, digest: str) -> dict[str, Any]:
        """Return the ledger's header; digest: the digest of the starting weights."""
        return ledger.header(self._settings(), self.run_key, self.model, self.engine.layout, digest)

    def _catch_up(self, run: ledger.Ledger) -> None:
        """Bring everything but the weights to the step of the checkpoint just loaded; run: its ledger."""
        self.engine.follow(ledger.updates(run, self.state.global_step))

    # ---- checks

    def _check_best_metric(self) -> None:
        """Raise ValueError if, with several evaluation sets, metric_for_best_model belongs to none of them."""
        names = [name for name in self._eval_sets if name]
        given = self.args.metric_for_best_model or ""
        if names and given and not given.removeprefix("eval_").startswith(tuple(f"{name}_" for name in names)):
            raise ValueError(f"metric_for_best_model={given!r} names no set of eval_dataset: use '{names[0]}_reward'.")

    def _check_reward_models(self) -> None:
        """Raise ValueError for a reward model on a GPU that other processes would have to share."""
        for function in self.rewards.functions:
            device = getattr(getattr(function, "model", None), "device", None)
            if (self.engine.workers != 1 or self.rewards.timeout) and getattr(device, "type", "cpu") != "cpu":
                what = f"the reward model {function.__name__!r} is on {device}, which several processes cannot share"
                limit = "reward_timeout=None (a task's own REWARD_TIMEOUT counts, too)"
                raise ValueError(f"{what}: set workers=1 and {limit}, or move it to the CPU.")

    # ---- a step

    def step(self) -> dict[str, float]:
        """Run one ES step (ask, evaluate, tell) without a ledger; return its metrics (see the module's docstring)."""
        return self._step(recording=False)

    def _step(self, recording: bool) -> dict[str, float]:
        started, step = time.perf_counter(), self.state.global_step
        members, weights = self.ask(step), self.engine.weights
        known = recording and step < self._replayed
        # taken before members are evaluated, which changes weights without a master
        due = recording and not known and (self.ledger is None or step and step % ledger.DIGEST_EVERY == 0)
        if due:
            self.engine.check()
        digest = self.engine.begin_digest() if due else None
        self._parted |= recording and weights.drifts
        if known:
            record = self.ledger.steps[step]
            ledger.check_weights(self.ledger, step, weights)
            weights.retrace(members, self._at_step("sigma", step))
        else:
            record = self._evaluate_members(step, members)
        with interrupts_wait():  # all or nothing: record the step, move the weights, count it
            if recording and not known:
                self._record(record, digest and digest())
            self._parted |= recording or self.ledger is not None
            self._count(record)
            cpu = time.process_time()
            tied = self.tell(members, record.rewards)
            self.budget["core_seconds"] += time.process_time() - cpu
            self._reward_state = record.reward_state
            if self.ledger is None:  # a ledger that begins later starts from here
                self._first_reward_state = record.reward_state
            if known:  # for callbacks, which read it from the functions
                self.rewards.load_state(record.reward_state)
            if recording:  # otherwise the ledger, if any, has no line for this step
                self.state.global_step += 1
                self._parted = False
            metrics = self._metrics(record, tied, record.seconds if known else time.perf_counter() - started)
            if not known:
                self._watch_ties(tied, record)
            if recording:
                table, self._completions = self._completions, None
                self._due = [
                    self._end_step,
                    lambda: table and self.control.should_log and self._show_completions(table, "step"),
                    lambda: self.control.should_log and self.log(metrics),
                    lambda: self.control.should_evaluate and self.evaluate(),
                    lambda: self.control.should_save and self._save_checkpoint(),
                ]
        return metrics

    def ask(self, step: int) -> list[Member]:
        """Return a step's members, all distinct: N keys with sign +1, or antithetic pairs (key, +1), (key, -1)."""
        return update_rules.population(self.run_key, step, self.args.population_size, self.args.antithetic)

    def _evaluate_members(self, step: int, members: Sequence[Member]) -> ledger.Step:
        """Evaluate the population; return the step's record, as it is before the weights move."""
        started, n = time.perf_counter(), self.args.population_size
        core, state = self.budget["core_seconds"], self._reward_state
        tokens, counts, log = 0, {}, {}
        weights, sigma = self.engine.weights, self._at_step("sigma", step)
        before = weights.sample() if weights.drifts else None
        if self.args.fitness == "random":
            weights.retrace(members, sigma)  # the same arithmetic as in the arm it is compared with
            fitness = generator(self.args.seed, step, "random").standard_normal(n)
        else:
            indices = self._indices(step)
            common = noise.sampling_key(self.run_key, step), self.args.num_generations
            sampling = common if self.args.sampling == "common" else None
            evaluations = self.engine.evaluate(members, sigma, "train", indices, self._light_state(), sampling)
            self.rewards.check_failures([e.scored for e in evaluations])
            self._evaluations = evaluations
            fitness = np.array([mean_reward(e.scored.rewards) for e in evaluations])
            for member in np.flatnonzero(np.isnan(fitness)):
                raise ValueError(f"member {member} of step {step} has no reward: pass one that applies to some prompt.")
            if self.args.fitness == "shuffled":
                fitness = generator(self.args.seed, step, "shuffled").permutation(fitness)
            tokens = int(sum(e.lengths.sum() for e in evaluations))
            core += sum(e.core_seconds for e in evaluations)
            counts = {name: sum(e.scored.counts[name] for e in evaluations) for name in KINDS}
            if self.args.log_completions:
                self._completions = completions.of_step(evaluations, fitness, step)
            log = self._logged(evaluations) | {name: n for name, n in self.engine.repairs.items() if n}
            state = self._next_reward_state([e.scored.metrics for e in evaluations])
        log |= weights.metrics()
        if before is not None:
            log["restore_changed"], log["restore_drift"] = precision.drift(before, weights.sample())
        self._coefficients(fitness)  # raises for unusable rewards before they are recorded
        seconds = float(f"{time.perf_counter() - started:.4g}")
        return ledger.Step(step, fitness, tokens, seconds, round(core, 3), counts, log, state)

    def _next_reward_state(self, metrics: Sequence[Mapping[str, Sequence[float]]]) -> States:
        """Return the state of the reward functions after a step, given what they logged in each scored batch.

        The run takes it over once the step is recorded; a step interrupted before that changes nothing.
        """
        self.rewards.load_state(self._reward_state)
        self.rewards.end_of_step(metrics)
        return self.rewards.state()

    def _record(self, record: ledger.Step, digest: str | None) -> None:
        """Append a step to the ledger, which the first one creates; digest: of the weights before the step, if due."""
        if self.ledger is None:
            run = ledger.Ledger.create(self._ledger_path, self._header(digest))
            if _adapters.is_adapted(self.model):  # perhaps drawn at random, and saved nowhere else
                folder, base = Path(self.args.output_dir), run.header["model"]["name"]
                _checkpoints.write_start(folder, self.engine.weights, self.save_model, base)
            self.ledger, digest = run, None
        self.ledger.append(record, digest)

    def tell(self, members: Sequence[Member], fitness: np.ndarray) -> bool:
        """Move the weights by (alpha / N) sum_n z_n eps_n with the step's alpha; decay them if anchor_decay is set.

        Args:
            members: the members that `ask` returned.
            fitness: (N,) reward units.

        Returns:
            Whether the rewards moved nothing: the population was tied (or each antithetic pair was).
        """
        c = self._coefficients(fitness)
        self.counts["tied"] += int(c is None)
        if c is not None or self.args.anchor_decay:  # a tied population still decays
            self.engine.update(*update_rules.update_of(members, c))
        return c is None

    def _coefficients(self, fitness: np.ndarray) -> np.ndarray | None:
        alpha = update_rules.step_size(vars(self.args) | {"max_steps": self.max_steps}, self.state.global_step)
        return update_rules.coefficients(fitness, alpha, self.args.fitness_shaping, self.args.antithetic)

    def _indices(self, step: int) -> np.ndarray:
        """Return a step's rows of the training set: (prompts,), or (members, prompts) if each has its own."""
        return step_indices(len(self.train_prompts), self.prompts_per_step, self.args.seed, step)

    def _at_step(self, name: str, step: int) -> float:
        """Return sigma or alpha at a step."""
        return update_rules.at_step(vars(self.args) | {"max_steps": self.max_steps}, name, step)

    # ---- the loop

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to `max_steps` (or `num_train_epochs`), recording each step in `output_dir/ledger.jsonl`.

        Args:
            resume_from_checkpoint: True: resume the run in output_dir from its newest checkpoint (from the starting
                model if there is none); or a checkpoint's folder; or one of the texts "True", "last" and "False", as
                command lines give them. Steps that the ledger holds after the checkpoint are
                repeated from their recorded rewards: no member is evaluated again, but evaluate(), logs and callbacks
                run as they did the first time. The run ends with the same bits as an uninterrupted one.

        Returns:
            `transformers.trainer_utils.TrainOutput`: global_step, training_loss (NaN: ES has no loss), and metrics: the
            cost of this call (`train_runtime`, seconds; `train_steps_per_second`), `train_reward` of the last logged
            step, and what the run has spent so far. The metrics of all steps are in `trainer.state.log_history`. The
            model holds the final weights; with load_best_model_at_end it holds those of the best evaluation, after
            `state.best_global_step` steps. (The run itself is unaffected: its ledger closes with its last weights, and
            another train() continues from those.)

        Raises:
            ValueError: a run that is already complete (the message says how to go on, and how to start anew); nothing
                to resume from; a run with other settings, prompts or starting weights, or whose reward functions had
                another state at the start; an output_dir in which another run is training, or whose ledger another run
                has continued; without resume_from_checkpoint, an output_dir that holds the ledger of another run, or
                another file of that name.
            RuntimeError: weights that are not those of the ledger's last step, or a callback that called sys.exit()
                before the last step.
            OSError: output_dir, a step or a checkpoint cannot be written (a full disk). Nothing recorded is lost.
            KeyboardInterrupt: Ctrl-C; another call resumes.
        """
        started, first = time.time(), self.state.global_step
        try:
            with _checkpoints.folder_lock(self.args.output_dir):
                self._train(resume_from_checkpoint)
        except SystemExit as error:
            if error.code or self.state.global_step >= self.max_steps:  # an exit status, or the run is complete
                raise
            what = f"sys.exit() was called after step {self.state.global_step} of {self.max_steps}"
            raise RuntimeError(f"{what}: to end early, set control.should_training_stop in a callback.") from error
        steps = self.state.global_step
        metrics = speed_metrics("train", started, num_steps=steps - first)
        rewards = [entry["reward"] for entry in self.state.log_history if "reward" in entry]
        metrics |= {"train_reward": rewards[-1]} if rewards else {}
        return TrainOutput(steps, math.nan, metrics | self.budget | {"epoch": round(self.state.epoch or 0.0, 4)})

    def _train(self, resume_from_checkpoint: bool | str | None) -> None:
        resume_from_checkpoint = _checkpoints.asked(resume_from_checkpoint)
        if self.ledger is None:
            models.check_saving(self.model, self.processing_class, self._stateful_callbacks())
        self._load_last()
        max_steps = self.max_steps
        if isinstance(resume_from_checkpoint, (str, os.PathLike)) or (resume_from_checkpoint and self.ledger is None):
            self._resume(resume_from_checkpoint)
        elif self.ledger is None:
            ledger.refuse_existing(self._ledger_path)
        else:
            _checkpoints.check_settings(self.ledger, self._settings())
            self.ledger.check_file()  # another run may have continued it
        if self.ledger is None:
            self._begin()
        self._check_continuity()
        self.rewards.load_state(self._reward_state)  # discards what an interrupted step left
        self.state.max_steps, self.state.num_train_epochs = max_steps, math.ceil(self._epochs(max_steps))
        self.state.compute_steps(self.args, max_steps)
        stopping = bool(self._due) and self.control.should_training_stop
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        self.control.should_training_stop |= stopping
        if self.ledger is not None and self.ledger.ended and len(self.ledger.steps) >= max_steps:
            logger.warning(f"The run in {self.args.output_dir} is complete: raise max_steps to continue it.")
        self._follow_step()  # finish what an interrupt cut off
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
        """Do what follows a step, in order; the next call repeats whatever an interrupt cut off."""
        while self._due:
            self._due[0]()
            self._due = self._due[1:]

    def _end_step(self) -> None:
        self.engine.write_model()  # so that callbacks see the current weights
        self.state.epoch = self._epochs(self.state.global_step)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if self._epoch_ended(self.state.global_step):
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)

    @property
    def max_steps(self) -> int:
        """Steps of the run: max_steps if it is set, else those of num_train_epochs passes over the prompts."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(self.args.num_train_epochs * len(self.train_prompts) / self.prompts_per_step)

    def _epochs(self, steps: int) -> float:
        """Convert steps to passes over the training set; an epoch need not be a whole number of steps."""
        return steps * self.prompts_per_step / len(self.train_prompts)

    def _epoch_ended(self, steps: int) -> bool:
        """Return whether the last of this many steps finished an epoch; true for 0 steps."""
        n, k = len(self.train_prompts), self.prompts_per_step
        return steps * k // n > (steps - 1) * k // n

    def _check_continuity(self) -> None:
        """Raise RuntimeError if weights and ledger may disagree: an interrupted update, or a step() in between."""
        step, parted, weights = self.state.global_step, self._parted, self.engine.weights
        if self.ledger is None and weights.start is not None:  # else a replay would decay towards other weights
            parted |= not np.array_equal(weights.flat.view(np.uint32), weights.start.view(np.uint32))
        if self.ledger is not None:
            recorded = len(self.ledger.steps)
            parted |= recorded != step and step >= self._replayed
            if self.ledger.ended and recorded == step:
                parted |= weights.digest() != self.ledger.weights[step]
        if parted:
            again = "train()" if self.ledger is None else "train(resume_from_checkpoint=True)"
            what = f"the weights are not those after step {step} of {self._ledger_path}"
            raise RuntimeError(f"{what}: make a new trainer from the starting model and call {again}.")

    # ---- checkpoints (`evoalign_lib._checkpoints`)

    def _save_checkpoint(self) -> None:
        self.state.stateful_callbacks = {type(c).__name__: plain(c.state()) for c in self._stateful_callbacks()}
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        spent = {"settings": self._settings(), "budget": self.budget, "counts": self.counts}
        spent["line"] = self.ledger.tips[self.state.global_step]
        _checkpoints.write(folder, self.state, self.engine.weights, self._best, spent, self._write_folder)
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
        ledger.check_start(run, self.engine.weights)  # a checkpoint lacks the starting weights
        if folder is None:
            ledger.check_model(run, self.engine.weights)
        else:
            wants_best = self.args.load_best_model_at_end
            self.state, self._best, spent = _checkpoints.read(folder, run, self.engine.weights, wants_best)
            for callback in self._stateful_callbacks():
                attributes = self.state.stateful_callbacks.get(type(callback).__name__, {}).get("attributes", {})
                for name in callback.state()["attributes"].keys() & attributes.keys():
                    setattr(callback, name, attributes[name])
            self.budget, self.counts = spent["budget"], self.counts | spent["counts"]
            self._catch_up(run)
        self._reward_state = states[self.state.global_step]
        self.ledger, self._replayed, self._parted, self._due = run, len(run.steps), False, []

    def _stateful_callbacks(self) -> list[TrainerCallback]:
        """Return the callbacks with a state to be saved, such as the patience of EarlyStoppingCallback."""
        return [c for c in self.callback_handler.callbacks if isinstance(c, ExportableState)]

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the run it continues."""
        names = ["population_size", "sigma", "alpha", "max_completion_length", "fitness", "arm", "seed"]
        names += ["precision", "noise", "antithetic", "fitness_shaping", "sampling", "num_generations"]
        names += ["sigma_schedule", "alpha_schedule", *(f"{name}_final_fraction" for name in self._scheduled)]
        settings = {name: getattr(self.args, name) for name in names} | self.engine.plan
        settings |= {"prompts_per_step": self.prompts_per_step, "prompts": len(self.train_prompts)}
        settings |= {"max_steps": self.max_steps} if self._scheduled else {}  # a longer run would take different steps
        options = ["stop_strings", "generation_kwargs", "perturb"]
        options += ["temperature", "top_p", "top_k"] if self.args.sampling == "common" else []
        for name in options:
            if (value := getattr(self.args, name)) != _DEFAULTS[name]:
                settings[name] = json.loads(json.dumps(value))  # as the ledger returns it
        # listed only if set: a ledger without them stays byte for byte what it was before they existed
        rank, state = self.engine.weights.rank, self._first_reward_state
        named = {"anchor_decay": self.args.anchor_decay, "rank": rank, "frozen": self._frozen, "reward_state": state}
        named["template_date"] = self.train_prompts.date
        settings |= {name: value for name, value in named.items() if value}
        return settings | {"prompts_digest": self.train_prompts.digest, "noise_version": noise.NOISE_VERSION}

    @property
    def _scheduled(self) -> list[str]:
        """Return which of sigma and alpha have a schedule."""
        return [name for name in ("sigma", "alpha") if getattr(self.args, f"{name}_schedule") != "constant"]

    @property
    def _ledger_path(self) -> Path:
        return Path(self.args.output_dir) / ledger.NAME

    # ---- bookkeeping

    def _count(self, record: ledger.Step) -> None:
        if self.args.fitness != "random":
            rows = np.broadcast_to(self._indices(record.step), (self.args.population_size, self.prompts_per_step))
            self.budget["completions"] += self.args.num_generations * rows.size
            self.budget["prompt_tokens"] += self.args.num_generations * int(self.train_prompts.lengths[rows].sum())
        self.budget["generated_tokens"] += record.tokens
        self.budget["core_seconds"] = record.core
        for name, count in record.counts.items():
            self.counts[name] += count

    def _logged(self, evaluations: list[Evaluation]) -> dict[str, float]:
        """Return the metrics of a step that cannot be computed from its rewards."""
        # metrics of the reward functions themselves: the mean over the members that logged each
        logged = [e.scored.metrics for e in evaluations]
        names = sorted(set().union(*logged))
        log = {name: float(np.mean([np.mean(each[name]) for each in logged if name in each])) for name in names}
        log["completions/clipped_ratio"] = float(np.mean([e.clipped.mean() for e in evaluations]))
        for name in self.rewards.names:
            if means := [e.scored.functions[name][0] for e in evaluations if name in e.scored.functions]:
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
        return record.log | metrics  # a reward function's metric never overrides one of these
