"""What moves is what requires_grad says: an adapter over a frozen base, quantised or not, or a part of the weights."""

import json
import os
import signal
import warnings

import pytest
import torch
from helpers import PROMPTS, greedy, random_model, tokenizer
from transformers import AutoModelForCausalLM

from evoalign_lib import ledger, models, weight_files
from evoalign_lib.es import ESConfig, ESTrainer

peft = pytest.importorskip("peft")

ROWS = [{"prompt": p, "number": i} for i, p in enumerate(PROMPTS)]
LORA = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "up_proj"]}


def reward(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


def lora(**changed) -> peft.LoraConfig:
    return peft.LoraConfig(**LORA | changed)


def adapted(base=None, seed: int = 0, **changed):
    """A base with an adapter whose product is not zero, drawn from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = peft.get_peft_model(base or random_model(), lora(init_lora_weights=False, **changed))
    return model


def trainer(folder, model, score=reward, peft_config=None, **changed) -> ESTrainer:
    settings = {
        "output_dir": str(folder), "population_size": 4, "sigma": 0.05, "alpha": 0.05, "max_steps": 3, "workers": 1,
        "max_completion_length": 6, "disable_tqdm": True, "save_strategy": "no", "report_to": "none",
    } | changed  # fmt: skip
    return ESTrainer(model, score, ESConfig(**settings), ROWS, ROWS, tokenizer(), peft_config=peft_config)


def named(model) -> dict[str, bytes]:
    """Every parameter's bits."""
    return {name: p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, p in model.named_parameters()}  # fmt: skip


def moved(before: dict[str, bytes], model) -> set[str]:
    return {name for name, bits in named(model).items() if bits != before[name]}


def trainable(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def own(tested: ESTrainer) -> list[list[int]]:
    return [ids for _, ids in tested.engine.generate("train")[0]]


# ---- adapters


@pytest.mark.parametrize("decoder", ["loop", "generate"])
def test_an_adapter_moves_and_its_base_does_not(tmp_path, decoder):
    random_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    tested = trainer(tmp_path / "run", adapted(base), decoder=decoder)
    names, before = trainable(tested.model), named(tested.model)
    assert all(".lora_" in name for name in names)
    assert {e.name for e in tested.engine.layout.entries} == names
    assert tested.engine.master.size < 4000  # of the adapter alone
    assert own(tested) == greedy(tested.model)
    tested.train()
    assert moved(before, tested.model) == names
    assert own(tested) == greedy(tested.model)
    tested.save_model()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    untrained = greedy(plain)
    plain = peft.PeftModel.from_pretrained(plain, tmp_path / "run")
    assert named(plain) == named(tested.model)
    assert greedy(plain) == greedy(tested.model) != untrained


@pytest.mark.parametrize(
    "changed",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"up_proj": 2}},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"use_dora": True},
        {"modules_to_save": ["norm"]},
        {"bias": "lora_only"},
        {"lora_dropout": 0.5},
    ],
    ids=lambda changed: next(iter(changed)),
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*tie_word_embeddings")
def test_greedy_tokens_are_those_of_peft(tmp_path, changed):
    base = random_model(tie_word_embeddings="embed_tokens" not in changed.get("target_modules", ()))
    changed.pop("ensure_weight_tying", None)
    tested = trainer(tmp_path, adapted(base, **changed), max_steps=1)
    before = named(tested.model)
    assert own(tested) == greedy(tested.model)
    tested.train()
    assert moved(before, tested.model) == trainable(tested.model)
    assert own(tested) == greedy(tested.model)
    merged = changed.keys() & {"use_rslora", "rank_pattern", "bias", "lora_dropout"}
    assert tested.engine.decoder == ("loop" if merged else "generate")


def test_replay_of_an_adapters_ledger(tmp_path):
    random_model().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    tested = trainer(tmp_path / "run", str(tmp_path / "base"), peft_config=lora())
    tested.train()
    path = tmp_path / "run" / ledger.NAME
    header = json.loads(path.read_bytes().splitlines()[0])
    assert header["evoalign_ledger"] == 4
    assert {name for name, _ in ledger.unpack_shapes(header["model"]["parameters"])} == trainable(tested.model)
    start = models.load(tmp_path / "run" / "start", adapters=True)[0]
    assert trainable(start) == trainable(tested.model)
    assert (ledger.replay(path, start) == tested.engine.master).all()
    assert ledger.verify(path, tmp_path / "run" / "start").weights == tested.engine.weights.digest()
    # the start lies beside the ledger, where a replay without a model finds it
    assert ledger.write_model(path, tmp_path / "again") == tested.engine.weights.digest()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert named(peft.PeftModel.from_pretrained(plain, tmp_path / "again")) == named(tested.model)
    with pytest.raises(ledger.LedgerError, match="has no parameter 'base_model.*lora_A.*: give the adapter .*start"):
        ledger.replay(path, tmp_path / "base")
    with pytest.raises(ValueError, match="moves a part of its model only.*evoalign replay --out"):
        weight_files.weights(path)


@pytest.mark.parametrize("settings", [{}, {"anchor_decay": 0.1}, {"save_strategy": "steps", "save_steps": 2}])
def test_killed_and_resumed_with_another_random_adapter(tmp_path, settings):
    """A process that starts anew draws another adapter: the one that the run began with lies beside the ledger."""
    settings = {"max_steps": 4} | settings
    whole = trainer(tmp_path / "whole", adapted(seed=1), **settings)
    whole.train()
    folder = tmp_path / "killed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads
        pid = os.fork()
    if pid == 0:
        calls = []

        def fatal(completion_ids, **columns):
            calls.append(1)
            if len(calls) == 4 * 3 + 2:  # in the last step
                os.kill(os.getpid(), signal.SIGKILL)
            return reward(completion_ids)

        fatal.__name__ = "reward"
        trainer(folder, adapted(seed=1), fatal, **settings).train()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    again = trainer(folder, adapted(seed=2), **settings)
    again.train(resume_from_checkpoint=True)
    assert again.engine.weights.digest() == whole.engine.weights.digest()
    assert named(again.model) == named(whole.model)


def test_what_an_adapter_would_not_save_is_refused(tmp_path):
    model = adapted()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="'base_model.model.model.norm.weight' .*PEFT would not save.*modules_to_save"):
        trainer(tmp_path, model)


def test_an_adapter_that_is_not_trainable_is_refused(tmp_path):
    model = adapted()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing of the model is to be trained.*is_trainable=True"):
        trainer(tmp_path, model)
    with pytest.raises(ValueError, match="nothing of the model is to be trained"):
        trainer(tmp_path, random_model().requires_grad_(False))


@pytest.mark.parametrize("settings", [{"engine": "vllm"}, {"engine": "vllm", "gpus": 2}, {"engine": "ray"}])
def test_engines_that_move_all_weights_refuse_a_part(tmp_path, settings):
    model = random_model()
    model.model.embed_tokens.requires_grad_(False)
    cases = [(model, 26)] if settings == {"engine": "vllm"} else [(model, 26), (adapted(), 38)]
    for given, of in cases:  # one engine of vLLM takes adapters
        with pytest.raises(ValueError, match=f"of {of} parameters are frozen.*engine='local'"):
            trainer(tmp_path, given, workers=None, **settings)


# ---- a part of the weights, without PEFT


@pytest.mark.parametrize("decoder", ["loop", "generate"])
@pytest.mark.parametrize("precision", ["master", "inplace"])
def test_frozen_weights_stay_where_they_are(tmp_path, decoder, precision):
    def part():
        model = random_model()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        return model

    tested = trainer(tmp_path / "run", part(), decoder=decoder, precision=precision)
    before = named(tested.model)
    tested.train()
    assert moved(before, tested.model) == trainable(tested.model) != set(before)
    assert own(tested) == greedy(tested.model)
    tested.save_model(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert named(saved) == named(tested.model)
    path = tmp_path / "run" / ledger.NAME
    # a folder has no requires_grad: the header says what moved
    random_model().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    assert (ledger.replay(path, tmp_path / "base") == tested.engine.weights.float32()).all()
    assert ledger.write_model(path, tmp_path / "again", str(tmp_path / "base")) == tested.engine.weights.digest()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert named(again) == named(tested.model)
    other = random_model()
    with torch.no_grad():
        other.model.embed_tokens.weight[0, 0] += 1
    with pytest.raises(ledger.LedgerError, match="frozen weights are not those of the run"):
        ledger.replay(path, other)
    with pytest.raises(ValueError, match="with frozen='[0-9a-f]+', this one has None"):
        trainer(tmp_path / "run", random_model(), decoder=decoder, precision=precision, max_steps=4).train(True)
    longer = trainer(tmp_path / "run", part(), decoder=decoder, precision=precision, max_steps=4)
    longer.train(resume_from_checkpoint=True)
    assert moved(named(tested.model), longer.model) == trainable(longer.model)


# ---- quantised bases


def bitsandbytes(bits: int):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    settings = {4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}, 8: {"load_in_8bit": True}}[bits]
    return BitsAndBytesConfig(**settings)


def quanto(bits: int):
    pytest.importorskip("optimum.quanto")
    from transformers import QuantoConfig

    return QuantoConfig(weights=f"int{bits}")


def torchao(bits: int):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def quantised(folder, how, bits: int):
    """A quantised model, from its own folder as a user loads it."""
    if not (folder / "base").exists():
        random_model(hidden_size=64, intermediate_size=128).save_pretrained(folder / "base")
        tokenizer().save_pretrained(folder / "base")
    settings = {"quantization_config": how(bits), "dtype": torch.float32, "device_map": "cpu"}
    return AutoModelForCausalLM.from_pretrained(folder / "base", **settings)


def state_bits(model) -> dict[str, bytes]:
    from evoalign_lib._adapters import raw_bytes

    state = {name: b"".join(raw_bytes(value)) for name, value in model.state_dict().items() if "lora_" not in name}
    return {name: bits for name, bits in state.items() if bits}


# quanto's 4 bits are left out: on a CPU it compiles C++ for minutes when they are first multiplied
@pytest.mark.parametrize(
    ("how", "bits"),
    [(bitsandbytes, 4), (bitsandbytes, 8), (quanto, 8), (torchao, 8)],
    ids=lambda v: getattr(v, "__name__", v),
)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_over_a_quantised_base(tmp_path, how, bits):
    tested = trainer(tmp_path / "run", quantised(tmp_path, how, bits), peft_config=lora(), sigma=0.2, alpha=0.2)
    before, frozen = named_trainable(tested.model), state_bits(tested.model)
    tested.train()
    assert named_trainable(tested.model).keys() == before.keys() == trainable(tested.model)
    assert all(bits != before[name] for name, bits in named_trainable(tested.model).items())
    assert state_bits(tested.model) == frozen
    tested.save_model()
    plain = peft.PeftModel.from_pretrained(quantised(tmp_path, how, bits), tmp_path / "run").eval()
    saved = {name: p for name, p in plain.named_parameters() if "lora_" in name}
    for name, bits_of in named_trainable(tested.model).items():
        assert saved[name].detach().numpy().tobytes() == bits_of
    assert greedy(plain) == greedy(tested.model)
    # resumed with a base that is quantised anew, by its name
    again = trainer(
        tmp_path / "run", str(tmp_path / "base"), peft_config=lora(), sigma=0.2, alpha=0.2, max_steps=4,
        model_init_kwargs={"quantization_config": how(bits), "device_map": "cpu"},
    )  # fmt: skip
    again.train(resume_from_checkpoint=True)
    whole = trainer(
        tmp_path / "whole", quantised(tmp_path, how, bits), peft_config=lora(), sigma=0.2, alpha=0.2, max_steps=4
    )
    whole.train()
    assert again.engine.weights.digest() == whole.engine.weights.digest()


def named_trainable(model) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in model.named_parameters() if p.requires_grad}
