"""Weights are read as they are stored, a part at a time; adapters and ledgers give the weights that they stand for."""

import gzip
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from evoalign_study import paths
from helpers import chained, lora, python, random_model, refused
from safetensors.torch import save_file

from evoalign_lib import _adapters, ledger, models, weight_files
from evoalign_lib.weight_files import weights

LEDGER = paths.RESULTS / "01_es_countdown" / "ledgers" / "13b03edbed2bb30e.jsonl.gz"
EMBEDDING, HEAD, QUERY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def folder(path: Path, tensors: dict, shards: int = 1, **configuration) -> str:
    """A Hugging Face folder of these tensors, dealt to shards."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(configuration))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return str(path)
    places = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return str(path)


def untied() -> dict:
    return {EMBEDDING: draw(10, 6), QUERY: draw(6, 6, seed=1), HEAD: draw(10, 6, seed=2)}


def adapter(path: Path, tensors: dict, base: str | None, **settings) -> str:
    """A PEFT adapter's two files, as PEFT 0.19 writes them."""
    path.mkdir()
    named = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 2, "lora_alpha": 6, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(named | settings))
    save_file({f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()},
              path / "adapter_model.safetensors")  # fmt: skip
    return str(path)


def query(rank: int = 2, columns: int = 6) -> dict:
    module = QUERY.removesuffix(".weight")
    return {f"{module}.lora_A.weight": draw(rank, columns, seed=3), f"{module}.lora_B.weight": draw(6, rank, seed=4)}


@pytest.mark.parametrize(("shards", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (2, torch.float16)])
def test_a_folder_is_read_as_float32_tensor_by_tensor(tmp_path, shards, dtype):
    stored = {name: tensor.to(dtype) for name, tensor in untied().items()}
    found = weights(folder(tmp_path / "model", stored, shards))
    assert dict(found.shapes) == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    assert found.dtypes == {str(dtype).removeprefix("torch.")} and len(found) == 3 and set(found) == set(stored)
    for name, tensor in stored.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], tensor.float())
        assert torch.equal(found.part(name, 7, 20), tensor.float().reshape(-1)[7:20])
    found[QUERY].zero_()  # a copy: nothing else may see it
    assert torch.equal(found[QUERY], stored[QUERY].float())
    with pytest.raises(KeyError):
        found["model.norm.weight"]


TIED = [
    (True, {}, {EMBEDDING, QUERY}),
    (True, {"tie_word_embeddings": True}, {EMBEDDING, QUERY}),
    (True, {"tie_word_embeddings": False}, {EMBEDDING, QUERY, HEAD}),
    (False, {"tie_word_embeddings": True}, {EMBEDDING, QUERY, HEAD}),
]


@pytest.mark.parametrize(("same", "configuration", "names"), TIED)
def test_a_tied_head_appears_once(tmp_path, same, configuration, names):
    tensors = untied()
    tensors[HEAD] = tensors[EMBEDDING].clone() if same else tensors[EMBEDDING] + (torch.arange(60).view(10, 6) == 59)
    assert set(weights(folder(tmp_path / "model", tensors, **configuration))) == names


def indexed(path: Path, index: dict) -> None:
    """Let a folder have an index of its weights instead of them."""
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def spoilt(spoil, tmp_path):
    path = folder(tmp_path / "model", untied())
    spoil(Path(path))
    weights(path)


test_what_cannot_be_read_is_refused_by_name = refused(
    (lambda f: (f / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}'), "'gptq'"),
    *(
        (lambda f, text=text: (f / "config.json").write_text(text), r"config\.json cannot be read")
        for text in ("{", "3", "[" * 10**5)
    ),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "may hold code"),
    (lambda f: (f / "model.safetensors").rename(f / "ledger.jsonl"), "but a ledger: give"),
    (lambda f: os.truncate(f / "model.safetensors", 300), r"model\.safetensors cannot be read"),
    (lambda f: save_file({"w": torch.ones(2, dtype=torch.int8)}, f / "model.safetensors"), "'w' of .*I8"),
    (lambda f: indexed(f, {}), "no weight_map"),
    (lambda f: indexed(f, {"weight_map": {"w": "../w.safetensors"}}), r"'w' in '\.\./w\.safetensors'"),
    (lambda f: indexed(f, {"weight_map": {"w": "w.safetensors"}}), r"'w' in 'w\.safetensors'"),
    (lambda f: f.rename(f.with_name("elsewhere")), "model' does not exist, here or in the Hub"),
    call=spoilt,
)


# adapters


ADAPTERS = {
    "plain": {"target_modules": ["q_proj", "down_proj"]},
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True, "modules_to_save": ["lm_head"]},
    "patterns": {
        "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 3},
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", ADAPTERS.values(), ids=ADAPTERS)
def test_an_adapter_equals_what_peft_merges(tmp_path, settings):
    peft = pytest.importorskip("peft")
    base = random_model("llama", tie_word_embeddings=False)
    base.save_pretrained(tmp_path / "base")
    wrapped = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    wrapped.save_pretrained(tmp_path / "lora")
    found = weights(tmp_path / "lora", tmp_path / "base")
    merged = dict(wrapped.merge_and_unload().named_parameters())
    assert set(found) == set(merged)
    for name, parameter in merged.items():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*tie_word_embeddings")
def test_an_adapter_on_a_tied_head_leaves_the_embedding_as_it_is(tmp_path):
    (base := random_model()).save_pretrained(tmp_path / "base")
    wrapped = _adapters.attach(base, lora(target_modules=["q_proj", "lm_head"], init_lora_weights=False), 0)
    wrapped.save_pretrained(tmp_path / "lora")
    found = dict(weights(tmp_path / "lora", tmp_path / "base"))
    torch.testing.assert_close(found, _adapters.dense(wrapped), rtol=1e-5, atol=1e-5)


OTHERS = [
    (query(), {"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    (query(), {"use_dora": True}, "use_dora is True"),
    (query(), {"bias": "all"}, "bias is 'all'"),
    (query(), {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
    (query(), {"rank_pattern": {"(": 3}}, "no pattern"),
    (query(), {"rank_pattern": {r"(\w|\w\w|.)+m": 3}}, "no pattern.*TimeoutError"),  # would take for ever
    *((query(), {"alpha_pattern": value}, "no pattern") for value in (True, ["q_proj"], {"q_proj": -1})),
    *((query(), {"lora_alpha": value}, f"lora_alpha={value}") for value in (-1, 0, True, math.nan, math.inf)),
    *((query(), {"r": value}, f"r={value}") for value in (0, True)),
    (query(), {"use_rslora": "no"}, "use_rslora is 'no'"),
    ({name: tensor.double() for name, tensor in query().items()}, {}, "lora_A.weight' is stored as F64"),
    (query(rank=3), {}, r"rank 2"),
    (query(columns=5), {}, r"its base has the shape \(6, 6\)"),
    (dict(list(query().items())[:1]), {}, "only one of its two matrices"),
    ({"model.embed_tokens.lora_embedding_A": torch.ones(2, 10)}, {}, "lora_embedding_A', which its base does not"),
    ({"model.norm.weight": torch.ones(6)}, {}, "'model.norm.weight', which its base does not have"),
    ({HEAD: torch.ones(9, 6)}, {}, r"the shape \(9, 6\), but in its base \(10, 6\)"),
]


@pytest.mark.parametrize(("tensors", "settings", "message"), OTHERS)
def test_other_adapters_are_refused_by_name(tmp_path, monkeypatch, tensors, settings, message):
    monkeypatch.setattr(weight_files, "_MATCHING", 0.1)
    base = folder(tmp_path / "base", untied(), tie_word_embeddings=False)
    with pytest.raises(ValueError, match=f"{message}.*merge_and_unload"):
        weights(adapter(tmp_path / "lora", tensors, base, **settings))


@pytest.mark.parametrize("base", ["a" * 10_000, "\0", "\ud800", "\x1b[2J", {"A0": 1}], ids=repr)
def test_a_base_without_a_proper_name_is_refused_briefly(tmp_path, base):
    with pytest.raises(ValueError, match="lora|exist") as error:
        weights(adapter(tmp_path / "lora", query(), base))
    assert len(str(error.value)) < 1000 and str(error.value).isprintable()


def test_an_adapter_goes_with_its_own_base_alone(tmp_path):
    base = folder(tmp_path / "Qwen2.5-tiny", untied(), tie_word_embeddings=False)
    other = folder(tmp_path / "other", untied(), tie_word_embeddings=False)
    over = adapter(tmp_path / "lora", query(), base)
    assert torch.equal(weights(over, base)[QUERY], weights(over)[QUERY])
    with pytest.raises(ValueError, match=f"trained over '{base}', not over '{other}'"):
        weights(over, other)
    # the Hub's name of a model, and a copy of it in a folder
    copied = adapter(tmp_path / "copied", query(), "Qwen/Qwen2.5-tiny")
    assert torch.equal(weights(copied, base)[QUERY], weights(over)[QUERY])
    with pytest.raises(ValueError, match="does not name its base"):
        weights(adapter(tmp_path / "nameless", query(), None))
    with pytest.raises(ValueError, match="is an adapter itself"):
        weights(adapter(tmp_path / "second", query(), over))
    (Path(over) / "adapter_model.safetensors").rename(Path(over) / "adapter_model.bin")
    with pytest.raises(ValueError, match="may hold code"):
        weights(over)


# ledgers


def test_a_ledger_gives_the_weights_of_its_replay():
    found = weights(LEDGER)
    assert set(found) == set(weights("A0")) and found.run.settings["alpha"] == 0.01
    assert "_tensors" not in vars(found)  # shapes come from the header: nothing was replayed for them
    model, _ = models.load("A0")
    flat = ledger.replay(LEDGER, model)
    from evoalign_lib import noise

    layout = noise.Layout.from_shapes((name, tuple(p.shape)) for name, p in model.named_parameters())
    for name, view in layout.views(flat).items():
        assert torch.equal(found[name], torch.from_numpy(view))
    with pytest.raises(ValueError, match="not weights"):
        weights(LEDGER, weights("A0"))
    with pytest.raises(ledger.LedgerError, match="not the weights that the run started from"):
        weights(LEDGER, "A1")[QUERY]


def test_a_ledger_does_not_decide_which_model_is_loaded(tmp_path):
    header = json.loads(gzip.decompress(Path(LEDGER).read_bytes()).splitlines()[0])
    header["model"]["name"] = "someone/model"
    (tmp_path / "x.jsonl").write_bytes(chained([header]))
    with pytest.raises(ledger.LedgerError, match="names 'someone/model'.*pass the model"):
        weights(tmp_path / "x.jsonl")
    assert torch.equal(weights(tmp_path / "x.jsonl", "A0")[QUERY], weights("A0")[QUERY])


# memory

COMPARE = """
import resource, sys
import numpy, scipy.stats, torch
from evoalign_lib.analysis import geometry
from evoalign_lib.weight_files import weights

model, (base, a, b) = int(sys.argv[1]), map(weights, sys.argv[2:])
with open("/proc/self/status") as file:
    held = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (held + model, -1))
geometry.measure(base, [a, b], ("float32", "bfloat16"))
resource.setrlimit(resource.RLIMIT_DATA, (held + int(1.9 * model), -1))
try:  # all of one model in float32
    {name: base[name] for name in base}
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")
def test_two_models_are_compared_in_the_memory_of_a_part_of_one(tmp_path):
    drawn = draw(2048, 2048).bfloat16()  # 8 MB
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(24)]
    base, end = (
        folder(tmp_path / str(k), {name: drawn + i for i, name in enumerate(names, k)}, shards=6) for k in range(2)
    )
    done = python("-c", COMPARE, 24 * 8 * 2**20, base, end, end, env=os.environ | {"PYTHONPATH": str(paths.ROOT)})
    assert "can't allocate memory" in done.stdout
