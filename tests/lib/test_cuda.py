"""The engine on one GPU, run here on a CPU device: members, completions and weights are those of the local engine."""

import itertools
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from es_runs import cut, digest, model_bytes, outcome, read, trained, trainer
from helpers import PROMPTS, ROWS, greedy, lora, random_model, refused, token_sum, tokenizer, with_another_head
from test_engine import BESIDES, members

from evoalign_lib import _adapters, grpo, ledger
from evoalign_lib.engines import cuda
from evoalign_lib.engines.base import Options, Prompts, until_end
from evoalign_lib.engines.cuda import CudaEngine
from evoalign_lib.engines.decode import Decoder, inversion
from evoalign_lib.engines.local import LocalEngine
from evoalign_lib.engines.population import PopulationDecoder
from evoalign_lib.es import ESConfig
from evoalign_lib.rewards import Rewards

ALL = np.arange(len(ROWS))
CPU = {"engine": "cuda", "use_cpu": True, "workers": None}
SHARED = [{"prompt": "Using the numbers" + p} for p in PROMPTS]
SAMPLED = {"sampling": "common", "num_generations": 2, "temperature": 0.8, "top_k": 40, "top_p": 0.9}


def engine(kind=CudaEngine, model=None, rows=ROWS, **settings):
    settings = {"max_completion_length": 12} | settings | ({"device": "cpu"} if kind is CudaEngine else {})
    model = random_model() if model is None else model
    return kind(model, tokenizer(), Rewards(token_sum), {"train": Prompts(rows, tokenizer())}, **settings)


def ended_early(**config):
    """Return a model with so many end tokens that rows end at different steps."""
    model = random_model(**config)
    model.generation_config.eos_token_id = list(range(0, 273, 5))
    return model


def fill(decoder, member):
    """Give a member other weights, or others of those that are its own."""
    generator, shares = torch.Generator().manual_seed(member), decoder.rank or decoder.apart
    own = [t for name, t in decoder._places.items() if not shares or t.ndim == 2 or ".lora_" in name]
    for tensor in (*own, *itertools.chain(*decoder.factors.values())):
        tensor[member].normal_(0, 0.2, generator=generator)


# ---- decoding


ROPE = {"kind": "llama", "tie_word_embeddings": False, "rope_parameters": {"rope_theta": 77.0}}
HEADS = {"kind": "llama", "attention_bias": True, "head_dim": 12, "num_key_value_heads": 4}


@pytest.mark.parametrize("rows", [ROWS, SHARED])
@pytest.mark.parametrize("options", [Options(), Options(top_k=30, top_p=0.8), Options(stop_strings=("a", "0"))])
@pytest.mark.parametrize(("config", "last"), [({}, id), (ROPE, id), (HEADS, id), (ROPE, with_another_head)])
def test_greedy_and_drawn_completions_are_those_of_the_local_engine(rows, options, config, last):
    """In chunks of three rows, rows that end early among them."""
    settings = {"rows": rows, "chunk_rows": 3, "options": options}
    model = ended_early(**config)
    last(model)
    ours, local = (engine(kind, model, **settings) for kind in (CudaEngine, LocalEngine))
    assert ours.generate("train") == local.generate("train")
    samples = ours.generate("train", samples=2, seed=1, temperature=0.7)
    assert samples == local.generate("train", samples=2, seed=1, temperature=0.7) != ours.generate("train", samples=2)
    with ours.perturbed(5, 0.05), local.perturbed(5, 0.05):
        assert ours.generate("train") == local.generate("train") != engine(model=model).generate("train")


@pytest.mark.parametrize("stop", ["<|im_start|>", "<|im_st", "{}<|im_start|>"])
@pytest.mark.parametrize("decoder", [None, "loop", "generate"])
def test_a_special_token_in_a_stop_string_ends_a_completion_where_transformers_ends_it(decoder, stop):
    model, tok = random_model(), tokenizer()
    whole, how = greedy(model, 12)[0], {"decoder": decoder} if decoder else {}
    swap, stop = [whole[3], tok.convert_tokens_to_ids("<|im_start|>")], stop.format(tok.decode(whole[2:3]))
    embedding = model.model.embed_tokens.weight.data  # tied: the model writes one token in the place of the other
    embedding[swap] = embedding[swap[::-1]]
    e = engine(LocalEngine if decoder else CudaEngine, model, ROWS[:1], options=Options(stop_strings=(stop,)), **how)
    asked = torch.from_numpy(e.prompts["train"].ids)
    expected = model.generate(asked, max_new_tokens=12, stop_strings=[stop], tokenizer=tok)[:, asked.shape[1] :]
    [evaluation] = e.evaluate(members(1), 1e-30, "train", ALL[:1])
    assert [ids for _, ids in e.generate("train")[0]] == expected.tolist()
    assert evaluation.lengths.tolist() == [4] and not evaluation.clipped.any()


def adapted(**changed):
    return _adapters.attach(ended_early(), lora(init_lora_weights=False, **changed), 0)


PATTERN = {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"up_proj": 2}, "use_rslora": True, "bias": "lora_only"}
THIN = [
    ended_early,
    partial(ended_early, **ROPE),
    partial(ended_early, **HEADS),
    adapted,
    partial(adapted, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"], **PATTERN),
]


@pytest.mark.parametrize("make", THIN)
@pytest.mark.parametrize("sampling", [None, (7, 2)])
def test_members_that_share_matrices_write_what_they_write_on_the_local_engine(make, sampling):
    """However many decode at once; those of a whole model have low rank, those of an adapter any."""
    for rank in (1, 3) if make in THIN[:3] else (0, 2):
        found = []
        for kind, how in ((LocalEngine, {}), *((CudaEngine, {"members": n}) for n in (1, 3, 9))):
            e = engine(kind, make(), rank=rank, **how)
            e.evaluate(members(7)[::-1], 0.3, "train", ALL)  # leaves noise behind
            evaluations = e.evaluate(members(7), 0.05, "train", ALL, None, sampling)
            found.append([[each.written for each in evaluations], e.generate("train")])
        assert found[0] == found[1] == found[2] == found[3] and len(set(found[0][0])) == 7
        assert len(e.decoder.working("model.layers.0.mlp.up_proj.weight", slice(None))) == 1


@pytest.mark.parametrize("how", [{}, {"rank": 2}, {"apart": True}])
def test_a_members_logits_do_not_depend_on_the_others(how):
    logits, prompts = [], Prompts(SHARED, tokenizer())
    for n in (1, 3):
        decoder = PopulationDecoder(adapted() if "apart" in how else random_model(), n, "cpu", **how)
        for j in range(n):
            fill(decoder, j)
        decoder.decode(prompts.ids, prompts.mask, 4, [0], prefix=len(prompts.prefix), members=n)
        (batch,) = decoder._batches.values()
        with torch.inference_mode():
            logits.append([batch.prefill()[0].numpy().tobytes(), batch.step()[0].numpy().tobytes()])
    assert logits[0] == logits[1]
    with pytest.raises(ValueError, match="do not all begin with the same 3 tokens"):
        decoder.decode(prompts.ids[:, ::-1], prompts.mask[:, ::-1] * 0 + 1, 4, [0], prefix=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_decodes_nearly_as_the_model_does(dtype):
    e = engine(model=random_model().to(dtype))
    assert all(0 < len(ids) <= 12 for _, ids in e.generate("train")[0]) and e.decoder.dtype == dtype


# ---- the weights


DECAYED = {"antithetic": True, "anchor_decay": 0.1, "noise": "byte_sum"}


LOW_RANK = {"perturbation": "low_rank", "rank": 2}
FEW = {"population_size": 5}
RUNS = [(ended_early, each) for each in (FEW, SAMPLED, DECAYED, {"fitness": "random"}, LOW_RANK | FEW)]
RUNS += [(ended_early, LOW_RANK | DECAYED | SAMPLED), (adapted, DECAYED | SAMPLED), (adapted, LOW_RANK | FEW)]


@pytest.mark.parametrize(("make", "changed"), RUNS)
def test_a_run_has_the_rewards_and_weights_of_the_local_engine(tmp_path, make, changed):
    local = trained(tmp_path / "local", model=make(), **changed)
    few = "population_size" in changed  # at once: two, two and one
    kwargs = {"engine_kwargs": {"members": 2}} if few else {}
    ours = trained(tmp_path / "ours", model=make(), **changed, **CPU, **kwargs)
    one, other = read(tmp_path / "ours"), read(tmp_path / "local")
    assert [s.rewards.tolist() for s in one.steps] == [s.rewards.tolist() for s in other.steps]
    assert digest(ours) == digest(local) == one.weights[4] and model_bytes(ours.model) == model_bytes(local.model)
    assert ours.engine.generate("train") == local.engine.generate("train")
    with pytest.raises(ValueError, match="read-only"):
        ours.engine.master[:] = 0
    assert ledger.replay(one, make()).tobytes() == ours.engine.master.tobytes()
    plan = {"decoder": "population", "device": "cpu", "chunk_rows": 256, "width": 17, "prefix": 0}
    assert one.settings | plan | {"members": 2 if few else 6} == one.settings


SAVING = {"save_strategy": "steps", "save_steps": 2}
RESUMED = [(random_model, {}), (random_model, SAVING), (random_model, LOW_RANK), (adapted, SAVING | LOW_RANK)]


@pytest.mark.parametrize(("make", "changed"), [*RESUMED, (partial(random_model, "gpt2"), {})])
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path, make, changed):
    best = {"eval_dataset": ROWS[:3], "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    settings = SAMPLED | CPU | best | changed
    cut(tmp_path / "cut", 3, model=make(), **settings)
    resumed = trained(tmp_path / "cut", resume=True, model=make(), **settings)
    whole = trained(tmp_path / "whole", model=make(), **settings)
    assert outcome(resumed) == outcome(whole) and model_bytes(resumed.model) == model_bytes(whole.model)


def test_weights_that_other_code_trains():
    model, found = random_model(), {"validation": Prompts(ROWS, tokenizer())}
    e = cuda.PushedEngine(model, tokenizer(), None, found, max_completion_length=12, device="cpu", population=1)
    assert e.plan == {"decoder": "population", "device": "cpu", "chunk_rows": 256, "members": 1}
    for change in (1.5, -0.7):
        e.master[:] *= change
        own = engine(LocalEngine, random_model(seed=3))
        own.master[:] = e.master
        with e.perturbed(4, 0.05), own.perturbed(4, 0.05):
            assert e.generate("validation", samples=2) == own.generate("train", samples=2)
        assert e.generate("validation") == own.generate("train")
        own.write_model(), e.write_model()
        assert model_bytes(e.model) == model_bytes(own.model)


# ---- GRPO


def test_rollouts_of_a_gradient_arm():
    """From the policy's present weights, by inversion of torch's random numbers."""
    model, tok, writer = random_model(), tokenizer(), grpo.PopulationRollouts()
    accelerator = SimpleNamespace(unwrap_model=lambda m: m, device=torch.device("cpu"))
    rest = {"processing_class": tok, "eos_token_ids": list(range(0, 273, 9)), "max_completion_length": 12}
    given = SimpleNamespace(model=model, accelerator=accelerator, train_dataset={"prompt": PROMPTS}, **rest)
    for prompts in (PROMPTS[:3], PROMPTS[2:4]):
        found = Prompts([{"prompt": p} for p in prompts], tok)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            told = writer(prompts, given)
            torch.manual_seed(4)
            draw = inversion(torch.rand(len(prompts), 12))
        decoder = Decoder(model.config, _adapters.dense(model), given.eos_token_ids, tok.pad_token_id)
        expected = decoder.generate(torch.from_numpy(found.ids), torch.from_numpy(found.mask), 12, draw)
        assert told["completion_ids"] == until_end(expected.numpy(), given.eos_token_ids)
        assert told["prompt_ids"] == [tok(p)["input_ids"] for p in prompts] and told["logprobs"] is None
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)


# ---- what is refused


OTHERS = [
    (lambda: random_model("gpt2"), {"rank": 2}, "model_type 'gpt2'"),
    (partial(adapted, use_dora=True), {}, "more than a product"),
    (random_model, {"options": Options(generation_kwargs={"repetition_penalty": 2.0})}, "repetition_penalty"),
    *((make, {}, "parameter|logits differ") for make in BESIDES),
]


@pytest.mark.parametrize(("make", "how", "reason"), OTHERS)
def test_what_it_does_not_cover_transformers_decodes(make, how, reason, caplog):
    e, local = engine(model=make(), rows=SHARED, **how), engine(LocalEngine, make(), SHARED, decoder="generate", **how)
    assert re.search(f"transformers decodes.*({reason})", caplog.text) and e.plan["decoder"] == "generate"
    found = [[each.written for each in k.evaluate(members(3), 0.05, "train", ALL, None, (7, 2))] for k in (e, local)]
    assert found[0] == found[1] and e.generate("train") == local.generate("train")
    with pytest.raises(ValueError, match=f"members=2: transformers .*({reason})"):
        engine(model=make(), members=2, **how)


test_what_it_cannot_do_is_refused = refused(
    (random_model, {"chunk_rows": 0}, "chunk_rows=0"),
    (random_model, {"members": 0}, "members=0"),
    (partial(random_model, "rwkv", attention_hidden_size=32, context_length=64), {}, "'rwkv'.*one length"),
    call=lambda make, settings: engine(model=make(), **settings),
)


def test_too_little_memory(monkeypatch):
    monkeypatch.setattr(cuda.memory, "USABLE", 0.0)
    with pytest.raises(ValueError, match="GiB are free on cpu: lower chunk_rows"):
        engine()


def test_settings_without_effect_and_a_machine_without_a_gpu(tmp_path):
    refused = {"workers": 2, "decoder": "loop", "gpus": 1, "tensor_parallel": 2, "precision": "kahan"}
    for name, value in refused.items():
        with pytest.raises(ValueError, match=f"{name}={value!r}.* has no effect here"):
            ESConfig(engine="cuda", **{name: value})
    with pytest.raises(ValueError, match="max_loras"):
        trainer(tmp_path, **CPU, engine_kwargs={"max_loras": 2})
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="engine='cuda' cannot run this: torch sees no GPU"):
            trainer(tmp_path, engine="cuda", workers=None)
