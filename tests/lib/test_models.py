"""Models are found by name, folder or shipped base, and are told apart by digests."""

import hashlib
import re
import sys
import time

import pytest
import torch
from helpers import random_model, saved, with_another_head
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen2ForCausalLM

from evoalign_lib import _adapters, _singular, models, precision, tiny
from evoalign_lib.quantisation import quantise


def test_a_shipped_base_is_loaded_by_name(capfd):
    model, tokenizer = models.load("A0")
    expected, _ = tiny.load("A0")
    file = tiny.bases_folder() / "A0" / "model.safetensors"
    assert models.base_digest(model) == models.base_digest(expected) == models.stored_digest(file)
    assert (model.dtype, tokenizer.pad_token_id) == (torch.float32, tiny.tokenizer().pad_token_id)
    assert not model.training and capfd.readouterr().err == ""  # no bar
    half, _ = models.load("A0", None, {"dtype": torch.bfloat16})
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, dict(expected.named_parameters())[name].to(torch.bfloat16)), name


def test_names_and_places(tmp_path, monkeypatch):
    assert models.name_of(tiny.load("A0")[0]) == models.name_of(models.load("A0")[0]) == "A0"
    assert models.name_of(random_model()) is None
    random_model().save_pretrained(tmp_path / "own")
    loaded, _ = models.load(str(tmp_path / "own"), tiny.tokenizer())
    assert models.name_of(loaded) == str(tmp_path / "own")
    assert models.place("A0") == str(tiny.bases_folder() / "A0")
    assert models.place("someone/model") == "someone/model"
    monkeypatch.chdir(tmp_path)
    assert models.place("own") == str(tmp_path / "own")


def test_what_the_arguments_of_from_pretrained_mean(tmp_path, monkeypatch):
    folder = saved(tmp_path / "own")
    for given in ({"torch_dtype": "bfloat16"}, {"torch_dtype": "bfloat16", "dtype": torch.bfloat16}):
        assert models.load(folder, None, given)[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="torch_dtype=float16.* dtype=bfloat16"):
        models.load(folder, None, {"torch_dtype": torch.float16, "dtype": "bfloat16"})
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(16))
    for model, given in ((str(tmp_path), {"gguf_file": "m.gguf"}), (tmp_path / "m.gguf", {})):
        with pytest.raises((ValueError, ImportError), match="(?i)m.gguf|install.*gguf"):
            models.load(model, None, given)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"'./other'.* in '{tmp_path}'"):
        models.load("./other")


def test_secrets_in_long_words_are_masked_in_no_time():
    words, started = [20_000 * part for part in ("a:", "//", "a-", "://", "token=//")], time.process_time()
    found = models.masked([word + end for word in words for end in ("", "b:secret@host", " a:secret@host")])
    assert time.process_time() - started < 4 and "secret" not in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_has_the_digest_of_its_float32_weights(dtype):
    model = random_model().to(dtype)
    by_hand = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        by_hand.update(name.encode() + b"\0" + parameter.detach().float().numpy().tobytes())
    assert models.base_digest(model) == by_hand.hexdigest()[:16]
    weights = precision.open_weights(model)
    assert precision.digest(weights.layout, weights.flat) == by_hand.hexdigest()


def test_a_folder_has_the_digest_of_its_files(tmp_path):
    random_model().save_pretrained(tmp_path)
    found = models.origin_digest(str(tmp_path))
    assert len(found) == 16 and models.origin_digest(str(tmp_path)) == found
    (tmp_path / "notes.txt").write_text("not part of the model")
    assert models.origin_digest(str(tmp_path)) == found
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert models.origin_digest(str(tmp_path)) != found


CHANGES = {
    "lm_head.bias": lambda model: setattr(model.lm_head, "bias", nn.Parameter(torch.zeros(len(model.lm_head.weight)))),
    "model.layers.1.": lambda model: setattr(model.model, "layers", model.model.layers[:1]),
    "tied to 'model.layers.0.mlp.": lambda model: setattr(model.model.layers[1], "mlp", model.model.layers[0].mlp),
    "(9, 32)": lambda model: setattr(model.model, "embed_tokens", nn.Embedding(9, 32)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_parameters_that_a_saved_model_would_lose_are_named(name):
    CHANGES[name](model := random_model("llama"))
    with pytest.raises(ValueError, match=re.escape(name)):
        models.check_saving(model, tiny.tokenizer())


class Valued(Qwen2ForCausalLM):
    """A user's model with a head of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.value = nn.Linear(config.hidden_size, 1)


def test_models_that_load_as_they_are_saved_are_accepted():
    resized, adapted = random_model(), get_peft_model(random_model(), LoraConfig(lora_bias=True))
    resized.resize_token_embeddings(300)
    given = with_another_head(random_model()), resized, Valued(resized.config), adapted
    state = torch.get_rng_state()
    for model in given:
        models.check_saving(model, tiny.tokenizer())
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize(
    ("package", "call"),
    [("peft", _adapters.open_peft), ("cma", _singular._cma), ("torchao", lambda: quantise(random_model(), "int8"))],
)
def test_packages_that_are_not_installed_are_named(monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"evoalign\[adapters\]"):
        call()
