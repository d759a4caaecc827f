"""A run of ESSA ends with the same bits: with any number of workers, after kill -9, and in a replay."""

import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import ROWS, SFT_ROWS, in_child, random_model, short_run, token_sum, tokenizer

from evoalign_lib import ledger
from evoalign_lib.essa import ESSAConfig, ESSATrainer, lora_config

peft = pytest.importorskip("peft")
pytest.importorskip("cma")


def trainer(folder: Path, kind=ESSATrainer, adapter_seed: int = 1, sft=None, **changed) -> ESSATrainer:
    settings = {"population_size": 6, "max_steps": 5, "prompts_per_step": 3, "seed": 5} | changed
    config = lora_config(2)
    config.init_lora_weights = sft is not None
    with torch.random.fork_rng():
        torch.manual_seed(adapter_seed)
        model = peft.get_peft_model(random_model(), config)
    args = short_run(folder, ESSAConfig, **settings)
    return kind(model, token_sum, args, ROWS, ROWS[:2], tokenizer(), sft_dataset=sft)


def outcome(tested: ESSATrainer) -> dict:
    """All that runs must share that are one."""
    es = tested.engine.weights.es
    logs = [{k: v for k, v in log.items() if k not in ("step_time", "members_per_second", "core_seconds")}
            for log in tested.state.log_history]  # fmt: skip
    return {
        "weights": tested.engine.weights.digest(),
        "search": [es.mean.tobytes(), es.sm.C.tobytes(), es.sigma, es.pc.tobytes(), es.sigma_vec.scaling.tobytes()],
        "budget": {k: v for k, v in tested.budget.items() if k != "core_seconds"},
        "counts": tested.counts,
        "logs": logs,
    }


class Dying(ESSATrainer):
    """Is killed in its fourth step, once that is recorded and before the search has moved."""

    def tell(self, members, fitness):
        if self.state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().tell(members, fitness)


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 2, "shared_batch": True, "save_strategy": "steps", "save_steps": 2},
        {"decomposition": "product", "leading_share": 0.5, "fitness": "random"},
    ],
    ids=str,
)
def test_killed_resumed_and_replayed(tmp_path, settings):
    whole = trainer(tmp_path / "whole", **settings | {"workers": 1})
    whole.train()
    folder = tmp_path / "killed"
    assert in_child(lambda: trainer(folder, Dying, **settings).train()) == -signal.SIGKILL
    assert len(ledger.read(folder / ledger.NAME).steps) == 4
    again = trainer(folder, adapter_seed=2, **settings)  # a new process draws another adapter
    again.predict(ROWS[:1])  # its workers know no other
    again.train(resume_from_checkpoint=True)
    assert outcome(again) == outcome(whole)
    start = peft.PeftModel.from_pretrained(random_model(), folder / ledger.START, is_trainable=True)
    assert ledger.replay(folder / ledger.NAME, start).tobytes() == whole.engine.master.tobytes()
    assert ledger.verify(folder / ledger.NAME, start).recomputed
    shorter = ledger.replay(folder / ledger.NAME, start, step=3)
    assert shorter.tobytes() != whole.engine.master.tobytes()


@pytest.mark.slow
def test_killed_after_a_warm_start(tmp_path):
    """What goes on begins with the adapter that was fine-tuned, and knows what it cost."""
    folder = tmp_path / "run"
    assert in_child(lambda: trainer(folder, Dying, sft=SFT_ROWS, workers=2).train()) == -signal.SIGKILL
    again = trainer(folder, adapter_seed=2, sft=SFT_ROWS, workers=2)
    again.evaluate()  # workers that know the other adapter only
    again._fine_tune = None
    again.train(resume_from_checkpoint=True)
    start = peft.PeftModel.from_pretrained(random_model(), folder / ledger.START, is_trainable=True)
    run = ledger.read(folder / ledger.NAME)
    assert ledger.replay(run, start).tobytes() == again.engine.master.tobytes()
    assert again.budget["sft_tokens"] == run.header["warm_start"]["tokens"] > 0
    # serial, from the same start: the same rewards of every member
    serial = trainer(tmp_path / "serial", adapter_seed=3, sft=SFT_ROWS)
    parameters = dict(start.named_parameters())
    serial.engine.weights.begin({entry.name: parameters[entry.name].detach() for entry in serial.engine.layout.entries})
    serial._account(run.header["warm_start"])
    serial.train()
    assert [step.rewards.tobytes() for step in serial.ledger.steps] == [step.rewards.tobytes() for step in run.steps]


def test_the_same_trainer_goes_on_after_an_interrupt(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    tested = trainer(tmp_path / "run")
    calls = iter(range(100))

    def interrupted(completion_ids, **columns):
        if next(calls) == 2 * 6 + 2:
            raise KeyboardInterrupt
        return token_sum(completion_ids)

    tested.rewards.functions[0] = interrupted
    with pytest.raises(KeyboardInterrupt):
        tested.train()
    tested.train()
    assert all(outcome(tested)[what] == outcome(whole)[what] for what in ("search", "weights"))
