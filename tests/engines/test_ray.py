"""Runs on a Ray cluster of this machine: the bits of the local engine, whatever dies meanwhile."""

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import es_runs
import numpy as np
import pytest
from es_runs import ROWS, Lagrangian, digest
from evoalign_study import paths
from helpers import python, random_model, saved, tokenizer
from transformers import TrainerCallback

from evoalign_lib import _adapters, ledger
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.es import ESTrainer
from evoalign_lib.rewards import RewardError, Rewards
from evoalign_lib.update_rules import Member

ray = pytest.importorskip("ray")

from evoalign_lib.engines import ray as engines_ray  # noqa: E402
from evoalign_lib.engines.ray import RayEngine  # noqa: E402

# Actors get the functions of tests by value: as modules they would have to be found there.
for module in (sys.modules[__name__], es_runs):
    ray.cloudpickle.register_pickle_by_value(module)


def reward(completion_ids, number, **columns):
    return [None if n == 3 else sum(ids) / 7 for n, ids in zip(number, completion_ids, strict=True)]


def ordered(completion_ids, number, trainer_state=None, **columns):
    """The reward, after what the trainer's state says: with ("raise",), ("end",), ("meet", folder, n)."""
    order = trainer_state if isinstance(trainer_state, tuple) else ("",)
    if order[0] == "raise" and sum(completion_ids[0]) == order[1]:
        raise ValueError("no such number")
    if order[0] == "end":
        os.kill(os.getpid(), signal.SIGKILL)
    if order[0] == "meet":  # whoever comes first waits until all others have been here
        folder, end = Path(order[1]), time.monotonic() + 60
        try:
            (folder / "first").touch(exist_ok=False)
        except FileExistsError:
            (folder / f"{time.monotonic_ns()}-{os.getpid()}").touch()
        else:
            while len(list(folder.iterdir())) < order[2] and time.monotonic() < end:
                time.sleep(0.01)
    return reward(completion_ids, number)


class TiedOnce(Lagrangian):
    """The rewards of one step are tied."""

    def __call__(self, completion_ids, log_metric, trainer_state=None, **columns):
        rewards = super().__call__(completion_ids, log_metric)
        return [1.0] * len(rewards) if trainer_state and trainer_state.global_step == 2 else rewards

    def end_of_step(self, metrics):
        self.log_lambda = float(np.mean(metrics["cost"]))  # stays small, however long the run


def trainer(folder: Path, score=None, **changed) -> ESTrainer:
    """A run whose members are of low rank, whose weights go back toward the start, and whose reward has a state."""
    settings = {"max_steps": 12, "anchor_decay": 0.2, "perturbation": "low_rank", "rank": 2} | changed
    return es_runs.trainer(folder, score or TiedOnce(), eval_dataset=ROWS[:2], **settings)


def on_ray(folder: Path, score=None, **changed) -> ESTrainer:
    return trainer(folder, score, **{"engine": "ray", "workers": 2} | changed)


def same_run(one: ESTrainer, other: ESTrainer) -> bool:
    """Whether two runs have the same rewards, states of these, budget and weights."""

    def found(tested):
        spent = {k: v for k, v in tested.budget.items() if k != "core_seconds"}
        return [(step.rewards.tobytes(), step.reward_state) for step in tested.ledger.steps], spent, digest(tested)

    return found(one) == found(other)


def rewards_of(engine, members: list[Member], *how) -> list:
    """What evaluating members on all prompts gives, to compare."""
    evaluations = engine.evaluate(members, 0.05, "train", np.arange(len(ROWS)), *how)
    return [(e.scored.rewards.tobytes(), e.lengths.tolist()) for e in evaluations]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A cluster that exists before the engines, which join it and leave it as it is. Its GPU is one by name only."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    yield ray.init("local", num_cpus=2, num_gpus=1, object_store_memory=100 << 20, **quiet).address_info["address"]
    assert ray.is_initialized(), "an engine ended a cluster that is not its own"
    ray.shutdown()


def room() -> float:
    """CPUs of the cluster that no engine holds, once actors that were ended are gone."""
    end = time.monotonic() + 30
    while (free := ray.available_resources().get("CPU", 0)) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    return free


def all_ready(engine: RayEngine) -> None:
    """Wait until every actor has proved its weights: one alone does all the work while another starts."""
    engine._start()
    while not all(place.proved for place in engine.places):
        engine._next_answer()


class TestARun:
    """One run in several acts, with the same actors."""

    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("runs")
        here, there = trainer(folder / "here"), on_ray(folder / "there")
        yield here, there
        there.engine.close()
        assert room() == 2

    def go_on(self, runs, steps: int) -> None:
        for tested in runs:
            tested.args.max_steps = tested.state.global_step + steps
            tested.train()

    def test_has_the_bits_of_the_local_engine(self, runs):
        here, there = runs
        self.go_on(runs, 6)
        engine = there.engine
        all_ready(engine)
        assert same_run(here, there) and here._settings() == there._settings()
        assert sum(place.finished for place in engine.places) == 6 * 6
        assert not any(engine.repairs.values()) and here.counts["tied"] == 1
        assert len({str(step.reward_state) for step in there.ledger.steps}) == 6  # it moves
        assert engine.generate("eval") == here.engine.generate("eval") and here.evaluate() == there.evaluate()
        one, other = (t.engine.generate("train", np.array([5, 1]), samples=2, seed=3) for t in runs)
        assert one == other

    def test_messages_hold_keys_and_rewards(self, runs):
        engine = runs[1].engine
        before = engine.sent_bytes, engine.received_bytes
        self.go_on(runs, 1)
        sent, received = engine.sent_bytes - before[0], engine.received_bytes - before[1]
        assert 0 < sent < 1000 * (6 + 2) and 0 < received < 1000 * 6  # of each member, and of the update of each actor
        assert sent + received < 4 * engine.layout.d / 5

    def test_an_actor_that_begins_anew_is_replaced(self, runs, caplog):
        """It has the starting weights."""
        engine = runs[1].engine
        all_ready(engine)
        anew = engine.places[0].actor.__ray_call__
        ray.get(anew.remote(lambda actor, once: actor.__init__(once), engine._sent_once))
        said = f"{engine.places[0]} has applied 0 of {runs[1].state.global_step} updates"
        self.go_on(runs, 1)
        all_ready(engine)
        assert same_run(*runs) and said in caplog.text
        assert engine.repairs == {"actors/restarted": 0, "actors/rebuilt": 1}

    def test_an_actor_with_other_weights_is_replaced(self, runs, caplog):
        """They change after the 20th step, whose digest the ledger notes before the next one."""
        here, there = runs
        engine = there.engine
        all_ready(engine)
        process = engine.places[0].process

        def change(actor):
            actor.engine.master[7] += 1

        class Change(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 20:
                    ray.get(engine.places[0].actor.__ray_call__.remote(change))

        there.callback_handler.add_callback(Change)
        self.go_on(runs, 24 - there.state.global_step)
        assert engine.repairs["actors/rebuilt"] == 2
        message = next(r.getMessage() for r in caplog.records if "are not those of the run" in r.getMessage())
        noted = there.ledger.weights[20]
        assert f"actor 0 ({process}): after 20 updates" in message and f"the run's is {noted:.16}..." in message
        assert same_run(here, there)
        assert there.state.log_history[-1]["actors/rebuilt"] == 2
        engine.generate("train")
        assert engine.places[0].process != process

    def test_actors_that_are_killed_in_every_step_are_replaced(self, runs):
        """Also those that are still starting or replaying; what they were to do is done by others."""
        engine = runs[1].engine
        before = engine.repairs["actors/restarted"]

        class Kill(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                ray.kill(engine.places[state.global_step % 2].actor)

        runs[1].add_callback(Kill)
        self.go_on(runs, 4)
        runs[1].pop_callback(Kill)
        assert same_run(*runs) and engine.repairs["actors/restarted"] >= before + 3  # the last may not be missed
        assert ledger.verify(runs[1].ledger.path, random_model()).weights == digest(runs[0])

    @pytest.mark.slow
    def test_wrong_weights_after_a_replay_end_the_run(self, runs):
        engine = runs[1].engine
        engine.master[7] += 1  # as if this machine computed the noise differently
        try:
            with pytest.raises(engines_ray.WrongWeights, match="nothing can be repaired"):
                engine.check()
                engine.generate("train")
        finally:
            engine.master[7] -= 1


class TestTasks:
    """What members do to actors; rewards with a floor and a limit of time where the test needs them."""

    MEMBERS = [Member(11), Member(12), Member(13, -1), Member(14), Member(15)]

    @pytest.fixture(scope="class")
    @classmethod
    def engines(cls):
        prompts = {"train": Prompts(ROWS, tokenizer())}
        here, there = (
            kind(random_model(), tokenizer(), Rewards(ordered), prompts, max_completion_length=4, **more)
            for kind, more in ((LocalEngine, {}), (RayEngine, {"workers": 2}))
        )
        yield here, there
        there.close()
        assert room() == 2

    def test_prompts_that_come_later(self, engines):
        for engine in engines:
            engine.add_prompts("later", ROWS[:3])
        assert engines[0].generate("later") == engines[1].generate("later")

    @pytest.mark.parametrize("sampling", [None, (77, 3)])
    def test_members(self, engines, sampling):
        one, other = (rewards_of(e, self.MEMBERS, None, sampling) for e in engines)
        assert one == other

    def test_noise_on_the_weights_is_there_for_a_while(self, engines):
        before, noisy = [engine.generate("train") for engine in engines], []
        for engine in engines:
            with engine.perturbed(13, 0.1):
                noisy.append(engine.generate("train"))
        assert noisy[0] == noisy[1] != before[0]
        assert [engine.generate("train") for engine in engines] == before == [before[0]] * 2

    def test_a_slow_member_does_not_hold_up_the_others(self, engines, tmp_path):
        there, n = engines[1], 12
        all_ready(there)
        before = [place.finished for place in there.places]
        rewards_of(there, [Member(i) for i in range(n)], ("meet", str(tmp_path), n))
        assert sorted(p.finished - b for p, b in zip(there.places, before, strict=True)) == [1, n - 1]

    def test_an_error_of_a_reward_names_its_member(self, engines):
        here, there = engines
        sums = [e.scored.rewards[0] for e in here.evaluate(self.MEMBERS, 0.05, "train", np.arange(len(ROWS)))]
        order, messages = ("raise", round(7 * sums[3])), []
        for engine in engines:
            with pytest.raises(RewardError) as found:
                rewards_of(engine, self.MEMBERS, order)
            messages.append(str(found.value))
        assert messages[0] == messages[1] and messages[0].startswith(f"member {sums.index(sums[3])}: ")
        assert not any(there.repairs.values())
        assert rewards_of(here, self.MEMBERS) == rewards_of(there, self.MEMBERS)

    @pytest.mark.slow
    def test_a_member_that_ends_its_process_every_time(self, engines, caplog):
        class Ending(tuple):
            global_step = 8

        here, there = engines
        update = np.array([5, 6], np.uint64), np.array([0.1, -0.2], np.float32)
        for engine in engines:
            engine.update(*update)
        with pytest.raises(RuntimeError, match=r"^member 0 of step 8 ended the process that it was given to 3 times"):
            rewards_of(there, self.MEMBERS[:1], Ending(("end",)))
        assert there.repairs == {"actors/restarted": 3, "actors/rebuilt": 0}
        assert "replays 1 updates" in caplog.text
        there.follow([update])  # as from a checkpoint: the actors begin anew
        assert rewards_of(here, self.MEMBERS) == rewards_of(there, self.MEMBERS)


# ---- a driver that is killed


DRIVER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_ray import on_ray
if __name__ == "__main__":
    on_ray(Path(sys.argv[1]), max_steps=10**6).train()
"""


def test_a_killed_driver_resumes(tmp_path, cluster):
    """From its ledger, and from a checkpoint that the local engine wrote."""
    folder, path = tmp_path / "run", tmp_path / "run" / ledger.NAME
    (tmp_path / "driver.py").write_text(DRIVER)
    folders = map(str, (folder, paths.ROOT / "tests", Path(__file__).parent))
    command = [sys.executable, str(tmp_path / "driver.py"), *folders]
    environment = os.environ | {"RAY_ADDRESS": cluster}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as driver:
        end = time.monotonic() + 120
        while not (path.exists() and path.read_bytes().count(b"\n") > 4) and driver.poll() is None:
            assert time.monotonic() < end, "the run does not get on"
            time.sleep(0.01)
        driver.kill()
        output = driver.stdout.read().decode()
    assert driver.returncode == -signal.SIGKILL, output
    steps = len(ledger.read(path).steps)
    assert steps >= 3 and room() == 2
    lines = path.read_bytes()
    here = trainer(folder, max_steps=steps + 2, save_strategy="steps", save_steps=2)
    here.train(resume_from_checkpoint=True)
    there = on_ray(folder, max_steps=steps + 4)
    whole = trainer(tmp_path / "whole", max_steps=steps + 4)
    with closing(there.engine):
        there.train(resume_from_checkpoint=True)
        assert sum(place.finished for place in there.engine.places) == 2 * 6
    whole.train()
    assert path.read_bytes().startswith(lines.rpartition(b"\n")[0])
    assert same_run(whole, there)
    assert room() == 2


# ---- other clusters


def locked_reward():
    lock = threading.Lock()

    def locked(completions, **columns):
        with lock:
            return [0.0] * len(completions)

    return locked


@pytest.mark.parametrize(
    ("limits", "settings", "error", "named"),
    [
        ({"PLACEMENT_SECONDS": 0.5}, {"workers": 3}, RuntimeError, r"3 actors of .* It has 2 CPU \(2 free\)"),
        ({"START_SECONDS": 0.1}, {"workers": 1}, RuntimeError, "actor 0 .* 0.1 s"),
        ({}, {"workers": 1, "folder": "/no/where"}, RuntimeError, "(?s)actor 0 cannot start, .*/no/where"),
        ({}, {"workers": 2}, TypeError, "'_thread.lock'"),
    ],
)
def test_clusters_and_actors_that_cannot_be(monkeypatch, limits, settings, error, named):
    for name, value in limits.items():
        monkeypatch.setattr(engines_ray, name, value)
    rewards = Rewards(locked_reward() if error is TypeError else reward)
    prompts = {"train": Prompts(ROWS, tokenizer())}
    engine = RayEngine(random_model(), tokenizer(), rewards, prompts, max_completion_length=4, **settings)
    with closing(engine), pytest.raises(error, match=named):
        engine.generate("train")
    assert room() == 2


def test_actors_that_load_a_folder_know_what_moves(tmp_path):
    base, found = saved(tmp_path / "base"), []
    for one, folder in ((trainer, "here"), (on_ray, "there")):
        found.append(one(tmp_path / folder, model=base, perturb="linear", max_steps=2))
        found[-1].train()
        found[-1].engine.close()
    assert same_run(*found)


@pytest.mark.parametrize("rank", [0, 2])
def test_vllm_in_an_actor(rank):
    """On a CPU, which the cluster takes for a GPU; members of low rank decode in batches of two."""
    pytest.importorskip("vllm")
    prompts, members = {"train": Prompts(ROWS, tokenizer())}, [Member(11), Member(12), Member(12, -1)]
    # heads as large as vLLM's kernels want them
    model = random_model(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    common = {"max_completion_length": 4, "anchor_decay": 0.1, "rank": rank}
    if rank:
        _adapters.keep_linear(model)
    here = LocalEngine(model, tokenizer(), Rewards(reward), prompts, **common)
    settings = {"enforce_eager": True, "max_num_seqs": 8} | ({"max_loras": 2} if rank else {})
    there = RayEngine(model, tokenizer(), Rewards(reward), prompts, gpus=1, settings=settings, **common)
    with closing(there):
        for coefficients in ([0.1, -0.2], [0.05, 0.1]):
            assert rewards_of(here, members) == rewards_of(there, members)
            for engine in (here, there):
                engine.update(np.array([5, 6], np.uint64), np.array(coefficients, np.float32))
            there.check()
        assert here.generate("train") == there.generate("train")
        assert not any(there.repairs.values())


# ---- the page of the site


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path):
    page = (paths.ROOT / "site" / "cluster.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    (tmp_path / "example.py").write_text(block, encoding="utf-8")
    assert "'actors/restarted': 0" in python("example.py", folder=tmp_path).stdout
    assert len(ledger.read(tmp_path / "runs/on_ray" / ledger.NAME).steps) == 2


def test_actors_without_vllm_open_the_engine_of_one_gpu():
    """On the CPU device, where its rewards and weights are those of the local engine; each takes half the members."""
    common = random_model(), tokenizer(), Rewards(ordered), {"train": Prompts(ROWS, tokenizer())}
    settings = {"max_completion_length": 5, "distribution": "byte_sum"}
    here = LocalEngine(*common, **settings)
    members, coefficients = [Member(key) for key in range(1, 6)], np.linspace(-1, 1, 5, dtype=np.float32) / 30
    keys = np.array([member.key for member in members], np.uint64)
    with closing(RayEngine(*common, gpus=2, vllm=False, device="cpu", **settings)) as there:
        for engine in (here, there):
            engine.update(keys, coefficients)
        assert rewards_of(there, members) == rewards_of(here, members)
        assert there.generate("train", samples=2, seed=3) == here.generate("train", samples=2, seed=3)
        with there.perturbed(7, 0.05), here.perturbed(7, 0.05):
            assert there.generate("train") == here.generate("train")
        os.kill(int(re.search(r"process (\d+)", there.places[0].process)[1]), signal.SIGKILL)
        assert rewards_of(there, members) == rewards_of(here, members) and there.repairs["actors/restarted"] == 1
        there.check()
        assert there.plan["decoder"] == "cuda" and [place.finished > 0 for place in there.places] == [True, True]


ONLY_VLLM = [({"tensor_parallel": 2}, "tensor_parallel=2 needs vLLM"), ({"settings": {"seed": 1}}, "seed needs vLLM")]


@pytest.mark.parametrize(("settings", "named"), [*ONLY_VLLM, ({"gpus": 4}, "no room for 4 actors of .*'GPU': 1")])
def test_what_only_vllm_can_do_and_gpus_that_are_not_there(settings, named):
    common = random_model(), tokenizer(), Rewards(ordered), {"train": Prompts(ROWS, tokenizer())}
    with pytest.raises((ValueError, RuntimeError), match=named), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines_ray, "PLACEMENT_SECONDS", 0.1)
        RayEngine(*common, max_completion_length=5, vllm=False, **{"gpus": 2} | settings).generate("train")
