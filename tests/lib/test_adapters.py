"""What moves is what requires_grad says: an adapter over a frozen base, quantised or not, or a part of the weights."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
import transformers
from es_runs import ROWS, token_sum
from helpers import base_bits, greedy, in_child, lora, ran, random_model, refused, saved, short_run, tokenizer
from transformers import AutoModelForCausalLM

from evoalign_lib import _adapters, ledger, models, tiny, weight_files
from evoalign_lib.es import ESConfig, ESTrainer

peft = pytest.importorskip("peft")


def adapted(base=None, seed: int = 0, **changed):
    """A base with an adapter whose product is not zero, drawn from the seed."""
    return _adapters.attach(base or random_model(), lora(init_lora_weights=False, **changed), seed)


def trainer(folder, model, score=token_sum, peft_config=None, **changed) -> ESTrainer:
    settings = {"population_size": 4, "sigma": 0.05, "alpha": 0.05, "max_completion_length": 6} | changed
    args = short_run(folder, ESConfig, **settings)
    return ESTrainer(model, score, args, ROWS, ROWS, tokenizer(), peft_config=peft_config)


def named(model, frozen: bool = True) -> dict[str, bytes]:
    """The bits of parameters, of frozen ones too."""
    return {name: p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, p in model.named_parameters() if frozen or p.requires_grad}  # fmt: skip


def moved(before: dict[str, bytes], model) -> set[str]:
    return {name for name, bits in named(model).items() if bits != before[name]}


def trainable(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def own(tested: ESTrainer) -> list[list[int]]:
    return [ids for _, ids in tested.engine.generate("train")[0]]


# ---- adapters

MERGED = {"use_rslora": True, "bias": "lora_only", "lora_dropout": 0.5}
MERGED |= {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"up_proj": 2}}
BESIDE = [{"target_modules": ["q_proj", "embed_tokens"]}, {"use_dora": True}, {"modules_to_save": ["norm"]}]


@pytest.mark.parametrize("changed", [{}, MERGED, *BESIDE], ids=str)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*tie_word_embeddings")
def test_an_adapter_moves_alone_and_decodes_as_peft_does(tmp_path, changed):
    tied = "embed_tokens" not in changed.get("target_modules", ())
    random_model(tie_word_embeddings=tied).save_pretrained(tmp_path / "base")

    def base():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)

    tested = trainer(tmp_path / "run", adapted(base(), **changed), max_steps=1)
    names, before, untrained = trainable(tested.model), named(tested.model), greedy(tested.model)
    assert {e.name for e in tested.engine.layout.entries} == names and own(tested) == untrained
    assert tested.engine.decoder == ("generate" if changed in BESIDE else "loop")
    tested.train()
    assert moved(before, tested.model) == names
    assert own(tested) == greedy(tested.model)
    tested.save_model()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "run").eval()
    assert named(again) == named(tested.model) and greedy(again) == greedy(tested.model)


def test_replay_of_an_adapters_ledger(tmp_path):
    targets = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    numbers = {"r": np.int64(3), "lora_alpha": np.float32(0.1), "rank_pattern": {"q_proj": np.int64(5)}}
    config = lora(target_modules=targets, **numbers)
    tested = ran(trainer(tmp_path / "run", saved(tmp_path / "base"), peft_config=config))
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
    for folder in ("run/start", "again"):  # whatever PYTHONHASHSEED is
        assert json.loads((tmp_path / folder / "adapter_config.json").read_text())["target_modules"] == targets
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert named(peft.PeftModel.from_pretrained(plain, tmp_path / "again")) == named(tested.model)
    with pytest.raises(ledger.LedgerError, match="has no parameter 'base_model.*lora_A.*: give the adapter .*start"):
        ledger.replay(path, tmp_path / "base")
    with pytest.raises(ValueError, match="moves a part of its model only.*evoalign replay --out"):
        weight_files.weights(path)


@pytest.mark.parametrize("own", [False, True])
def test_a_run_over_a_shipped_base_is_replayed_where_that_lies_elsewhere(tmp_path, monkeypatch, own):
    model, config = (peft.get_peft_model(models.load("A0")[0], lora()), None) if own else ("A0", lora())
    path = tmp_path / "run" / ledger.NAME
    ran(trainer(tmp_path / "run", model, peft_config=config, max_steps=1))
    texts = [file.read_text() for file in (path.parent / "start").glob("*.json")]
    assert texts and not any(str(tiny.bases_folder()) in text for text in texts)
    (path.parent / "start/secret").symlink_to("/etc/passwd")
    (path.parent / "checkpoint-1").mkdir(), (path.parent / "checkpoint-1/es_state.json").write_text("{}")
    with pytest.raises(ValueError, match="start/secret' is a link"):
        again = trainer(tmp_path / "mine", model, peft_config=config, max_steps=2)
        again.train(resume_from_checkpoint=str(path.parent / "checkpoint-1"))
    there = shutil.copytree(tiny.bases_folder() / "A0", tmp_path / "there/A0").parent
    monkeypatch.setattr(tiny, "bases_folder", lambda: there)
    assert ledger.verify(path, ledger.start_of(ledger.read(path))).recomputed


@pytest.mark.parametrize("settings", [{}, {"anchor_decay": 0.1}, {"save_strategy": "steps", "save_steps": 2}])
def test_killed_and_resumed_with_another_random_adapter(tmp_path, settings):
    """A process that starts anew draws another adapter: the one that the run began with lies beside the ledger."""
    settings = {"max_steps": 4} | settings
    whole = ran(trainer(tmp_path / "whole", adapted(seed=1), **settings))
    folder, calls = tmp_path / "killed", iter(range(100))

    def fatal(completion_ids, **columns):
        if next(calls) == 4 * 3 + 1:  # in the last step
            os.kill(os.getpid(), signal.SIGKILL)
        return token_sum(completion_ids)

    fatal.__name__ = "token_sum"
    assert in_child(lambda: trainer(folder, adapted(seed=1), fatal, **settings).train()) == -signal.SIGKILL
    again = ran(trainer(folder, adapted(seed=2), **settings), True)
    assert again.engine.weights.digest() == whole.engine.weights.digest()
    assert named(again.model) == named(whole.model)


@pytest.mark.parametrize("changed", [{}, {"target_modules": ["q_proj", "lm_head"]}])
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*tie_word_embeddings")
def test_an_adapter_over_a_base_with_new_tokens_is_opened_again(tmp_path, changed):
    base = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "base"), dtype=torch.float32)
    base.resize_token_embeddings(290)
    (model := adapted(base, **changed)).save_pretrained(tmp_path / "adapter")
    again = models.load(tmp_path / "adapter", tokenizer(), adapters=True)[0]
    assert named(again) == named(model) and greedy(again) == greedy(model)
    saved(tmp_path / "base", random_model(hidden_size=64))
    with pytest.raises(ValueError, match=r"base'.*32\].*64\].*resize_token_embeddings"):
        models.load(tmp_path / "adapter", tokenizer(), adapters=True)


def unsaved():
    model = adapted()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


def part():
    model = random_model()
    model.model.embed_tokens.requires_grad_(False)
    return model


def merged():
    model = adapted()
    model.merge_adapter()
    return model


def prompt_tuned():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(random_model(), config)


VLLM = {"workers": None, "engine": "vllm"}
LINEAR = {"perturb": "linear", "perturbation": "low_rank"}


test_what_is_refused = refused(
    (unsaved, {}, ValueError, "norm.weight' .*modules_to_save"),
    (lambda: adapted().requires_grad_(False), {}, ValueError, "is_trainable=True"),
    (lambda: random_model().requires_grad_(False), {}, ValueError, "requires_grad=False"),
    (merged, {}, ValueError, "q_proj.*unmerge_adapter"),
    (prompt_tuned, {}, ValueError, "PROMPT_TUNING"),
    (lambda: adapted(random_model().to(torch.float64)), {}, ValueError, "float64"),
    (adapted, {"peft_config": lora()}, ValueError, "has an adapter"),
    (random_model, {"peft_config": {"r": 3}}, TypeError, "dict"),
    *((adapted, VLLM | more, ValueError, "adapters .* actors") for more in ({"gpus": 2}, {"engine": "ray"})),
    (adapted, LINEAR, ValueError, "perturb='linear'.*has an adapter"),
    (lambda: random_model("gpt2"), LINEAR, ValueError, "GPT2.* has no linear layers"),
    (random_model, VLLM | LINEAR | {"rank": 513}, ValueError, "rank 513 is too high: .* 512"),
    (random_model, VLLM | {"engine_kwargs": {"max_loras": 2}}, ValueError, "max_loras .*perturb='linear'"),
    call=lambda make, given, tmp_path: trainer(tmp_path, make(), **given),
)  # one engine of vLLM takes adapters


def test_a_model_that_is_elsewhere_is_refused():
    with pytest.raises(ValueError, match="lora_A.* is on meta"):
        _adapters.check_movable(adapted().to("meta"))


CONFIGS = {"{": "cannot be read", "{}": "KeyError", '{"base_model_name_or_path": null}': "does not name its base"}
CONFIGS['{"base_model_name_or_path": "A0"}'] = "no adapter_model.safetensors"


@pytest.mark.parametrize(("config", "named"), CONFIGS.items())
def test_folders_of_adapters_that_are_refused(tmp_path, config, named):
    (tmp_path / "adapter_config.json").write_text(config)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=f"{tmp_path}.*{named}"):
        models.load(tmp_path, tokenizer(), adapters=True)


@pytest.mark.parametrize("opens", [lambda folder: models.load(folder, adapters=True), weight_files.weights])
def test_a_base_that_is_elsewhere_is_named_with_its_adapter(tmp_path, opens):
    peft.get_peft_model(random_model(), lora()).save_pretrained(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "./base"}))
    with pytest.raises(ValueError, match=f"'./base'.*{tmp_path}"):
        opens(tmp_path)


# ---- a part of the weights, without PEFT


@pytest.mark.parametrize("decoder", ["loop", "generate"])
@pytest.mark.parametrize("precision", ["master", "inplace"])
def test_frozen_weights_stay_where_they_are(tmp_path, decoder, precision):
    tested = trainer(tmp_path / "run", part(), decoder=decoder, precision=precision)
    before = named(tested.model)
    tested.train()
    assert moved(before, tested.model) == trainable(tested.model) != set(before)
    assert own(tested) == greedy(tested.model)
    tested.save_model(tmp_path / "saved")
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert named(kept) == named(tested.model)
    path = tmp_path / "run" / ledger.NAME
    # a folder has no requires_grad: the header says what moved
    assert (ledger.replay(path, saved(tmp_path / "base")) == tested.engine.weights.float32()).all()
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
    longer = ran(trainer(tmp_path / "run", part(), decoder=decoder, precision=precision, max_steps=4), True)
    assert moved(named(tested.model), longer.model) == trainable(longer.model)


LOW, CUDA = {"perturbation": "low_rank", "rank": 2}, {"engine": "cuda", "use_cpu": True, "workers": None}
EVERY = [{"workers": 2}, {"workers": 2} | LOW, CUDA, CUDA | LOW]


@pytest.mark.parametrize("settings", [{"decoder": "generate"}, *EVERY], ids=str)
def test_noise_reaches_linear_layers_alone_whoever_decodes(tmp_path, settings):
    """An untied head is a linear layer, too, but not one that adapters have."""
    base = saved(tmp_path / "base", random_model(tie_word_embeddings=False))
    settings = {"perturb": "linear", "max_steps": 4} | settings
    tested = trainer(tmp_path / "run", base, **settings | {"max_steps": 2})
    before = named(tested.model)
    tested.train()
    assert moved(before, tested.model) == {name for name in before if name.endswith("proj.weight")}
    path = tmp_path / "run" / ledger.NAME
    assert ledger.verify(path, base).weights == tested.engine.weights.digest()
    assert ledger.read(path).header["settings"]["perturb"] == "linear"
    with pytest.raises(ValueError, match="with (perturb='linear', this one has 'all'|frozen)"):
        trainer(tmp_path / "run", base, **settings | {"perturb": "all"}).train(True)
    again = ran(trainer(tmp_path / "run", base, **settings), True)
    for name, parameter in (frozen := random_model(tie_word_embeddings=False)).named_parameters():
        parameter.requires_grad_(name.endswith("proj.weight"))
    rank = {name: settings[name] for name in LOW if name in settings}
    whole = ran(trainer(tmp_path / "whole", frozen, decoder="generate", max_steps=4, **rank))
    assert again.engine.weights.digest() == whole.engine.weights.digest() != tested.engine.weights.digest()


def test_low_rank_on_a_gpu_where_vectors_alone_move(tmp_path):
    ends = []
    for name, settings in (("cuda", CUDA), ("local", {"workers": 2})):
        for parameter in (model := random_model()).parameters():
            parameter.requires_grad_(parameter.ndim == 1)
        ends.append(ran(trainer(tmp_path / name, model, max_steps=2, **settings | LOW)).engine.weights.digest())
    assert ends[0] == ends[1]


# ---- quantised bases


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_over_a_base_that_transformers_quantises(tmp_path):
    codes = transformers.TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())
    base = saved(tmp_path / "base", random_model(hidden_size=64, intermediate_size=128))
    loading = {"quantization_config": codes, "device_map": "cpu"}

    def run(folder, steps, resume=None):
        """Train over a base that is quantised anew, by its name."""
        given = {"model_init_kwargs": loading, "max_steps": steps, "sigma": 0.2, "alpha": 0.2}
        tested = trainer(tmp_path / folder, base, peft_config=lora(), **given)
        before, moving = base_bits(tested.model), named(tested.model, frozen=False)
        tested.train(resume_from_checkpoint=resume)
        after = named(tested.model, frozen=False)
        assert base_bits(tested.model) == before and moving and all(after[name] != moving[name] for name in moving)
        return tested

    tested = run("run", 3)
    tested.save_model()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **loading)
    assert greedy(peft.PeftModel.from_pretrained(plain, tmp_path / "run").eval()) == greedy(tested.model)
    assert run("run", 4, True).engine.weights.digest() == run("whole", 4).engine.weights.digest()
