"""Small ES runs that several test files share: a trainer, rewards, and the results to compare."""

from pathlib import Path

import numpy as np
import pytest
from helpers import ROWS, random_model, token_sum, tokenizer
from transformers import TrainerCallback

from evoalign_lib import ledger, precision
from evoalign_lib.es import ESConfig, ESTrainer

SETTINGS = {
    "population_size": 6, "sigma": 0.05, "alpha": 0.05, "max_steps": 4, "prompts_per_step": 3, "seed": 5,
    "max_completion_length": 4, "workers": 1, "disable_tqdm": True, "report_to": "none", "save_strategy": "no",
}  # fmt: skip
TIMING = {"step_time", "members_per_second", "core_seconds"}


def constant(completions, **columns):
    return [0.1 + 0.2] * len(completions)


ETA = 0.4
KEY = "reward_state/Lagrangian/log_lambda"


class Lagrangian:
    """reward - lambda * cost; after a step ln lambda += eta * lambda * mean cost, sign included (Safe-RLHF)."""

    def __init__(self, log_lambda: float = 0.0):
        self.log_lambda = log_lambda
        self.seen = []

    def __call__(self, completion_ids, log_metric, **columns):
        costs = [(sum(ids) % 7 - 2.5) / 4 for ids in completion_ids]
        log_metric("cost", float(np.mean(costs)))
        return [ids[0] % 5 - np.exp(self.log_lambda) * cost for ids, cost in zip(completion_ids, costs, strict=True)]

    def state(self):
        return {"log_lambda": self.log_lambda}

    def load_state(self, state):
        if state["log_lambda"] > 9:
            raise ValueError("too large")
        self.log_lambda = state["log_lambda"]

    def end_of_step(self, metrics):
        self.seen.append(metrics)
        self.log_lambda = moved(self.log_lambda, metrics["cost"])


def moved(log_lambda: float, costs) -> float:
    return log_lambda + ETA * float(np.exp(log_lambda)) * float(np.mean(costs))


def config(folder: Path, **changed) -> ESConfig:
    return ESConfig(output_dir=str(folder), **SETTINGS | changed)


def trainer(
    folder: Path, reward=token_sum, model=None, callbacks=None, rows=ROWS, eval_dataset=None, kind=ESTrainer, rest=None,
    **changed,
) -> ESTrainer:  # fmt: skip
    model = random_model() if model is None else model
    args = config(folder, **changed)
    return kind(model, reward, args, rows, eval_dataset, tokenizer(), callbacks, **rest or {})


def trained(*arguments, resume=None, **settings) -> ESTrainer:
    """Return a trainer after train(), with its workers ended."""
    made = trainer(*arguments, **settings)
    made.train(resume)
    made.engine.close()
    return made


def digest(made: ESTrainer) -> str:
    return precision.digest(made.engine.layout, *made.engine.weights.planes)


def outcome(made: ESTrainer) -> dict:
    """Return everything that must be the same for a resumed run as for an uninterrupted one."""
    state = made.state
    return {
        "weights": digest(made),
        "budget": {k: v for k, v in made.budget.items() if k != "core_seconds"},
        "counts": made.counts,
        "log": [{k: v for k, v in log.items() if k not in TIMING} for log in state.log_history],
        "state": [state.global_step, state.epoch, state.best_metric, state.best_global_step],
    }


def model_bytes(model) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def read(folder: Path) -> ledger.Ledger:
    return ledger.read(folder / ledger.NAME)


def never(**columns):
    """Fail: the reward of a run that must not score anything."""
    raise AssertionError("nothing is left to score")


class Stop(Exception):
    """The error that `stopping` raises in a step."""


def stopping(step: int, score=token_sum):
    """Return a reward that raises `Stop` in a given step."""

    def stops(trainer_state, **columns):
        if trainer_state.global_step == step:
            raise Stop
        return score(**columns)

    stops.__name__ = score.__name__  # the logs have the reward's name
    return stops


def cut(folder: Path, step: int, score=token_sum, **settings) -> None:
    """Start a run and let an error end it in a given step."""
    with pytest.raises(Exception, match="Stop"):
        trainer(folder, stopping(step, score), **settings).train()


class Ending(TrainerCallback):
    """Stops the run after a number of steps."""

    def __init__(self, step: int):
        self.last = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.last
