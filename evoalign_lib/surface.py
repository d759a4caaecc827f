"""What `ESTrainer` shares with TRL's trainers besides training: evaluation, prediction, logs, files, the Hub."""

import copy
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerState, trainer_pt_utils
from transformers.trainer_callback import ProgressCallback, TrainerCallback
from transformers.trainer_utils import PredictionOutput, SaveStrategy

from evoalign_lib import _adapters, ledger, models, tiny
from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib.checks import choose, plain, require
from evoalign_lib.config import absent
from evoalign_lib.engines import completions
from evoalign_lib.engines.base import Prompts, as_given, score
from evoalign_lib.files import replace_text
from evoalign_lib.rewards import RewardFunction
from evoalign_lib.update_rules import generator, mean_reward

logger = logging.getLogger(__name__)

TIED_STEPS = 3
"""tied populations in a row after which the trainer warns, once"""
_SHOWN = 4  # completions shown in the terminal; TRL's default maximum
Rows = Iterable[Mapping[str, Any]]


class TrainerSurface:
    """The methods and attributes of `ESTrainer` that do not change the weights."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(absent(f"{type(self).__name__} has no", "methods", name, ()), name=name, obj=self)

    # ---- evaluation

    def evaluate(
        self, eval_dataset: Rows | Mapping[str, Rows] | str | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the mean reward, logged metrics and failures of the current weights on the evaluation set.

        Completions are decoded greedily, or num_generations_eval samples are drawn for each prompt.

        Args:
            eval_dataset: rows as for the trainer, or a mapping of names to rows; or the name of one of the trainer's
                sets; None: the trainer's own. Rows that differ from those of the previous call restart the engine's
                processes.
            metric_key_prefix: prefix of the metrics' names; with several sets it is followed by the name of the set.

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
        finally:  # the callbacks are not called again
            if eval_dataset is None and metric_key_prefix == "eval":
                self._keep_best(found)
        return found

    def predict(self, test_dataset: Rows, metric_key_prefix: str = "test") -> PredictionOutput:
        """Return the completions of the current weights, as in `evaluate()`, and their rewards; nothing is logged.

        Args:
            test_dataset: rows as for the trainer.
            metric_key_prefix: prefix of the metrics' names.

        Returns:
            `transformers.trainer_utils.PredictionOutput`: predictions, the completion of each row (or its samples in
            turn) as a text, or as messages where its prompt is messages; label_ids, None; metrics as in `evaluate()`.
        """
        known = self._given(test_dataset)
        completed = self._decoded(known)
        metrics = self._scores(known, completed, metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(as_given(self.engine.prompts[known], completed), None, metrics)

    def _to_evaluate(self, dataset: Any) -> dict[str, str]:
        """Return the sets to evaluate on: name ("" for a single set) -> name of its prompts in the engine."""
        if isinstance(dataset, str):
            choose("eval_dataset", dataset, self._eval_sets)
            return {dataset: self._eval_sets[dataset]}
        if dataset is not None:
            return {name: self._given(rows, suffix) for name, suffix, rows in sets_of(dataset)}
        require(self._eval_sets, "evaluate() needs an eval_dataset: pass one to ESTrainer, or to evaluate().")
        return self._eval_sets

    def _given(self, rows: Rows, which: str = "") -> str:
        """Register rows that the engine does not know yet; return the name of their prompts there."""
        name, prompts = f"given{which}", self._tokenised(rows)
        if prompts != self.engine.prompts.get(name):  # a repeated set needs no new processes
            self.engine.put_prompts(name, prompts)
        return name

    def _decoded(self, name: str) -> list[tuple[str, list[int]]]:
        """Return completions of all prompts of a set: greedy ones, or the samples of each prompt in turn."""
        samples = self.args.num_generations_eval or 0
        drawn = {"seed": self.args.seed, "temperature": self.args.temperature} if samples else {}
        found = self.engine.generate(name, samples=samples, **drawn)
        return [draw[row] for row in range(len(found[0])) for draw in found]

    def _scores(self, name: str, completed: list[tuple[str, list[int]]], prefix: str) -> dict[str, float]:
        """Return the metrics of the completions of all prompts in a set."""
        prompts = self.engine.prompts[name]
        rows = np.repeat(np.arange(len(prompts)), len(completed) // len(prompts))
        scored = score(self.rewards, prompts, rows, completed, self._light_state())
        metrics = {f"{prefix}_{metric}": float(np.mean(values)) for metric, values in scored.metrics.items()}
        metrics |= {f"{prefix}_rewards/{kind}": n for kind, n in scored.failures.items() if n}
        metrics[f"{prefix}_reward"] = mean_reward(scored.rewards)  # overrides one that a reward function logs
        if scored.table:
            step = {"step": [self.state.global_step] * len(completed)}
            self._show_completions(step | scored.table, prefix)
        return metrics

    def _tokenised(self, rows: Rows, which: str = "") -> Prompts:
        """Tokenise a data set for evaluation; which: its name, for errors, if there are several."""
        try:
            prompts = Prompts(rows, self.processing_class, self.args.chat_template_kwargs)
            self.rewards.check_columns(prompts.columns)
        except (TypeError, ValueError) as error:
            raise type(error)(f"eval_dataset{which}: {error}") from error
        return prompts

    def _show_completions(self, table: completions.Table, what: str) -> None:
        """Print completions, send them to trackers and write them; what: "step", or the prefix of an evaluation."""
        step = self.state.global_step
        drawn = generator(self.args.seed, step, "shown")
        shown = completions.sample(table, _SHOWN, drawn)
        completions.show(shown, self.rewards.names, str(step) if what == "step" else f"{step}, {what}")
        completions.send(table, self.callback_handler.callbacks, step)
        completions.write(table, self.args.output_dir, step, what)

    def _keep_best(self, metrics: dict[str, float]) -> None:
        """Note the best evaluation so far in the state (for EarlyStoppingCallback), and keep its weights."""
        if self.args.metric_for_best_model is None or self._last_weights is not None:
            return
        name = "eval_" + self.args.metric_for_best_model.removeprefix("eval_")
        require(name in metrics, f"metric_for_best_model: {name!r} is not one of the evaluation's {sorted(metrics)}.")
        value, best = metrics[name], self.state.best_metric
        if best is None:
            best = -math.inf if self.args.greater_is_better else math.inf
        # among equals the first is kept; NaN (no reward applied) is never best
        if value > best if self.args.greater_is_better else value < best:
            with interrupts_wait():
                if self.args.load_best_model_at_end:
                    self._best = self.engine.weights.digest(), self.engine.weights.copy()
                self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = True

    def _load_best(self) -> None:
        """Load the weights of the best evaluation in place of the run's last ones, until `_load_last`."""
        if self._best is None:
            logger.warning("load_best_model_at_end: there was no evaluation; the model holds the last weights.")
        elif self.state.best_global_step != self.state.global_step:
            self._last_weights = self.engine.weights.copy()
            self.engine.weights.load(self._best[1])

    def _load_last(self) -> None:
        if self._last_weights is not None:
            self.engine.weights.load(self._last_weights)
            self._last_weights = None

    # ---- logs and callbacks

    def _watch_ties(self, tied: bool, record: ledger.Step) -> None:
        """Warn once, with the cause, when several populations in a row were tied."""
        self._tied_steps = self._tied_steps + 1 if tied else 0
        if self._tied_steps < TIED_STEPS or self._tied_said:
            return
        self._tied_said = True
        what = f"The last {self._tied_steps} populations were tied, and the weights did not move"
        logger.warning(f"{what}. In the last one, {self._why_tied(self._at_step('sigma', record.step))}.")

    def _why_tied(self, sigma: float) -> str:
        """Return why the last evaluated population was tied."""
        if len({e.written for e in self._evaluations}) == 1:
            return f"all members wrote the same completions, so {sigma=:g} is too small to change them"
        rewards = np.concatenate([e.scored.rewards for e in self._evaluations])
        rewards = rewards[~np.isnan(rewards)]
        causes = [f"the reward was {rewards.mean():.4g} for every completion"]
        if rewards.min() < rewards.max():
            causes = [f"the mean rewards of {'pairs' if self.args.antithetic else 'members'} were equal"]
        causes[0] += f", though their completions were not ({sigma=:g})"
        if failed := sum(sum(e.scored.failures.values()) for e in self._evaluations):
            causes.append(f"{failed} rewards of {len(rewards)} completions failed and scored the floor")
        if clipped := np.mean([e.clipped.mean() for e in self._evaluations]):
            most = f"max_completion_length={self.args.max_completion_length}"
            causes.append(f"{100 * clipped:.0f} % of the completions were cut at {most}")
        return "; ".join(causes)

    def log(self, logs: dict[str, float]) -> None:
        """Record metrics in the state and hand them to the callbacks (tensorboard, wandb, ...)."""
        logs = plain({**logs, "epoch": round(self.state.epoch or 0.0, 4)})
        entry = json.loads(json.dumps({**logs, "step": self.state.global_step}, default=str))  # a checkpoint holds it
        with interrupts_wait():  # no entry is lost or repeated
            self.state.log_history.append(entry)
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
        """The list of reward functions."""
        return self.rewards.functions

    def is_world_process_zero(self) -> bool:
        """Return True: a single process trains."""
        return True

    is_local_process_zero = is_world_process_zero

    def get_num_trainable_parameters(self) -> int:
        """Return the number of weights that move."""
        return self.engine.layout.d

    # ---- files

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print a split's metrics in a column, as transformers' `Trainer` does."""
        trainer_pt_utils.log_metrics(self, split, plain(dict(metrics)))

    metrics_format = staticmethod(trainer_pt_utils.metrics_format)

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write metrics to output_dir/<split>_results.json, and to all_results.json unless combined is False."""
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        trainer_pt_utils.save_metrics(self, split, plain(dict(metrics)), combined)

    def save_state(self) -> None:
        """Write the trainer's state, with the metrics of all steps, to output_dir/trainer_state.json."""
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        trainer_pt_utils.save_state(self)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write output_dir/README.md: transformers' model card with the settings of the run.

        Args:
            model_name: None: the last part of hub_model_id, or of output_dir.
            dataset_name: name of the training set on the Hub.
            tags: further tags of the card.
        """
        from transformers.modelcard import TrainingSummary

        folder, base = Path(self.args.output_dir), models.name_of(self.model)
        on_hub = base is not None and not os.path.isdir(base) and base not in tiny.SHIPPED
        tags = [tags] if isinstance(tags, str) else list(tags or ())
        card = TrainingSummary(
            model_name or (self.args.hub_model_id or folder.absolute().name).split("/")[-1],
            tags=["evoalign", "evolution-strategies", *tags],
            finetuned_from=base if on_hub else None,
            dataset=dataset_name,
            dataset_tags=dataset_name,
            hyperparameters=self._settings() | {"weights": self.engine.weights.digest()},
        )
        replace_text(folder / "README.md", card.to_model_card())

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> Any:
        """Upload model, tokenizer, card, ledger and metrics from output_dir to the Hub, but no checkpoints.

        Args:
            commit_message: message of the upload's commit.
            blocking: wait until the upload has finished.
            token: token for the Hub; None: hub_token of the settings, or the one that huggingface_hub has stored.
            revision: branch; None: hub_revision of the settings, or the main branch.
            **card: arguments of `create_model_card`.

        Returns:
            `huggingface_hub.CommitInfo`; if not blocking, a future of it.
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
        """Write a Hugging Face folder: weights in the model's dtype (or the adapter), configuration, tokenizer.

        Raises:
            OSError: it cannot be written; the message has the command that writes it from the run's ledger.
        """
        output_dir = self.args.output_dir if output_dir is None else output_dir
        if self.ledger is None:
            return self._write_folder(output_dir)
        name = Path(models.name_of(self.model) or "START", (self.args.model_init_kwargs or {}).get("gguf_file", ""))
        start = "" if _adapters.is_adapted(self.model) else f" --model {name}"
        with models.saving(output_dir, f"`evoalign replay {self._ledger_path} --out FOLDER{start}` writes it, too"):
            self._write_folder(output_dir)

    def _write_folder(self, folder: str | os.PathLike) -> None:
        self.engine.write_model()
        models.save(self.model, folder, self.processing_class)

    def _light_state(self) -> TrainerState:
        """Return the state without its log, which grows and would travel to the workers with every member.

        If any reward function has a state, it holds those states as `reward_state`.
        """
        light = copy.copy(self.state)
        light.log_history = []
        if self._reward_state:
            light.reward_state = copy.deepcopy(self._reward_state)
        return light


def sets_of(dataset: Rows | Mapping[str, Rows]) -> list[tuple[str, str, Rows]]:
    """Return (name, suffix of its name in the engine, rows) of each evaluation set; a single set has no name."""
    if isinstance(dataset, Mapping):
        return [(name, f"_{name}", rows) for name, rows in dataset.items()]
    return [("", "", dataset)]


class ESProgress(ProgressCallback):
    """A progress bar over steps: reward, accuracy (if the reward logs it), ties, members per second and time left."""

    def on_train_begin(self, args, state, control, **kwargs):
        if self.training_bar is not None:  # left by an interrupted run
            self.training_bar.close()
        super().on_train_begin(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is None or not logs or "reward" not in logs:
            return
        shown = {"reward": f"{logs['reward']:.3f}", "members/s": f"{logs['members_per_second']:.1f}"}
        if "accuracy" in logs:
            shown["accuracy"] = f"{logs['accuracy']:.3f}"
        if logs["tied"]:  # all members had the same reward: nothing moved
            shown["tied"] = "yes"
        self.training_bar.set_postfix(shown, refresh=False)
