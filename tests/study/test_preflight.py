"""Plans of runs at full scale: counts are those of the models, memory is that of a sum by hand, and what cannot fit is
refused with its numbers and a remedy."""

import json
import re
import shutil

import pytest
import torch
from evoalign_study import measures, paths, preflight, sweep
from evoalign_study.kinds.train import train_specs
from evoalign_study.preflight import GIB, DoesNotFit, plan
from evoalign_study.records import append_record, spec_hash
from helpers import QWEN, qwen, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from evoalign_lib import arms, tiny
from evoalign_lib.engines.memory import shape, tensor_parallel_sizes

SETS = {"task": "countdown", "validation_problems": 512, "test_problems": 2000, "curve_points": 21}
RUN = SETS | {"kind": "train", "base": "a model", "seed": 0, "max_completion_length": 1024}
ES = RUN | {"arm": "es", "population_size": 30, "sigma": 1e-3, "alpha": 5e-4, "steps": 500, "prompts_per_step": 200}
GRPO = RUN | {"arm": "grpo", "learning_rate": 1e-6, "beta": 0.0, "num_generations": 16, "steps": 250}
GRPO |= {"prompts_per_step": 16, "micro_batch": 1}
LENGTH = 1024 + measures.get("countdown").prompt_tokens


@pytest.mark.parametrize("base", tiny.SHIPPED)
def test_shipped_models(base):
    config = json.loads((tiny.bases_folder() / base / "config.json").read_text())
    planned = plan(config, ES | {"base": base}, engine="local", gpus=0, host_gib=8)
    assert planned.fits and "no GPU is used" in planned.text() and planned.placement.gpu_memory == ()


@pytest.mark.parametrize("padding", [0, 5])
def test_activations_are_the_tensors_that_pytorch_keeps(padding):
    rows, length = 4, 96

    def kept(layers):
        torch.manual_seed(0)
        sizes = qwen("0.5B", num_hidden_layers=layers, hidden_size=64, intermediate_size=256, vocab_size=50)
        config = AutoConfig.for_model(**sizes | {"num_attention_heads": 4, "dtype": "float32"})
        model, storages = AutoModelForCausalLM.from_config(config).train(), {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage  # held, so that no address is used again
            return tensor

        ids, mask = torch.zeros(rows, length, dtype=torch.long), torch.ones(rows, length, dtype=torch.long)
        mask[:, :padding] = 0
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model.model(input_ids=ids, attention_mask=mask, use_cache=False)
        assert output.last_hidden_state.requires_grad
        return sum(storage.nbytes() for storage in storages.values()), shape(config)

    (few, counted), (more, _) = kept(2), kept(4)
    assert 0.85 < (more - few) / preflight.activation_bytes(counted, rows * length) < 1.05


# ---- plans, against sums by hand

GPUS = (1, 2, 4, 8)


def es_by_hand(size: str, gpus: int) -> tuple[int, int] | None:
    """Smallest tensor parallel size, powers of two, and rows: 6 bytes a parameter, 4 GiB, 90 % of 80 GiB."""
    _, _, layers, heads, kv_heads, _, _, d = QWEN[size]
    best = None
    for t in (1, 2, 4, 8):
        if t > gpus or heads % t:
            continue
        head_dim = 64 if size == "0.5B" else 128
        row = 1174 * 2 * layers * max(1, kv_heads // t) * head_dim * 2
        rows = min(200, int((72 - 4 - 6 * d / t / 2**30) * 2**30 // row))
        if rows == 200:
            return t, rows
        if rows > 0 and (best is None or rows > best[1]):
            best = t, rows
    return best


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("size", QWEN)
def test_es_plans(size, gpus):
    planned, by_hand = plan(qwen(size), ES, gpus=gpus), es_by_hand(size, gpus)
    assert planned.fits is (by_hand is not None), planned.text()
    if by_hand is None:
        assert "DOES NOT FIT" in planned.text()
        return
    at = planned.placement
    # replicated norms, and key and value heads on more GPUs than there are heads: a few rows less where few fit
    assert at.tensor_parallel == by_hand[0] and by_hand[1] - 5 <= at.rows <= by_hand[1]
    assert at.engines == gpus // at.tensor_parallel
    assert sum(part.size for part in at.gpu_memory) <= 72 * GIB


def test_which_es_runs_fit():
    least = {size: next((g for g in GPUS if plan(qwen(size), ES, gpus=g).fits), None) for size in QWEN}
    assert least == {"0.5B": 1, "1.5B": 1, "3B": 1, "7B": 1, "14B": 2, "32B": 4, "72B": 8}
    sizes = {size: plan(qwen(size), ES, gpus=8).placement.tensor_parallel for size in QWEN}
    assert sizes == {"0.5B": 1, "1.5B": 1, "3B": 1, "7B": 1, "14B": 2, "32B": 4, "72B": 8}


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("size", QWEN)
def test_grpo_plans(size, gpus):
    """Weights, gradients and two moments of 4 bytes, buckets with several GPUs, vLLM's 2, and one completion."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, _, d = QWEN[size]
    head_dim = 64 if size == "0.5B" else 128
    kept = 1174 * layers * 4 * (6 * hidden + 5 * heads * head_dim + 4 * intermediate)
    kept += 4 * (2 * 1174 * 32768 + vocabulary * hidden)
    row = 1174 * 2 * layers * kv_heads * head_dim * 2
    need = (16 + 2 + 4 * (gpus > 1)) * d + max(kept, 4 * d) + 4 * 2**30 + row
    planned = plan(qwen(size), GRPO, gpus=gpus)
    assert planned.fits is (need <= 72 * 2**30), planned.text()
    rows = planned.placement.rows
    total = sum(part.size for part in planned.placement.gpu_memory)
    assert total == need + (rows - 1) * row and 1 <= rows <= 256 // gpus
    assert planned.placement.engines == gpus and planned.placement.tensor_parallel == 1


def test_which_grpo_runs_fit():
    fitting = {size: [g for g in GPUS if plan(qwen(size), GRPO, gpus=g).fits] for size in QWEN}
    assert fitting == {"0.5B": [1, 2, 4, 8], "1.5B": [1, 2, 4, 8], "3B": [1]} | {s: [] for s in list(QWEN)[3:]}


def test_es_refusals_have_numbers_and_a_remedy():
    problem = plan(qwen("72B"), ES, gpus=4).problem
    assert "72.71 B parameters need 436 GB for the float32 master and the bfloat16 copy" in problem
    assert "at tensor parallel 4" in problem and "72.0 (90 % of 80)" in problem and "Take 8 GPUs" in problem
    assert plan(qwen("72B"), ES, gpus=8).fits
    # heads that cannot be split further: no number of GPUs helps
    problem = plan(qwen("7B"), ES, gpus=8, gpu_gib=8).problem
    assert "Take larger GPUs or a smaller model" in problem
    # one completion too long for the cache, and the longest that is not
    problem = plan(qwen("7B"), ES | {"max_completion_length": 10**6}, gpus=1).problem
    most = int(re.search(r"max_completion_length=(\d+) or less", problem)[1])
    assert plan(qwen("7B"), ES | {"max_completion_length": most}, gpus=1).placement.rows == 1
    assert not plan(qwen("7B"), ES | {"max_completion_length": most + 1}, gpus=1).fits
    assert "Take 2 GPUs, max_completion_length=" in problem


def test_grpo_refusals_have_numbers_and_a_remedy():
    problem = plan(qwen("7B"), GRPO, gpus=8).problem
    assert "7.62 B parameters need 122 GB for weights, gradients and AdamW's moments" in problem
    assert "Nothing is sharded" in problem and "a smaller model, or ES" in problem
    assert "max_completion_length" not in problem  # the weights alone are too many
    assert "Take 1 GPU" in plan(qwen("3B"), GRPO, gpus=2).problem
    problem = plan(qwen("3B"), GRPO | {"max_completion_length": 8192}, gpus=1).problem
    assert "a smaller max_completion_length" in problem and "Take 1 GPU" not in problem
    whole = {name: value for name, value in GRPO.items() if name != "micro_batch"}
    problem = plan(qwen("0.5B"), whole, gpus=1).problem
    best = int(re.search(r"micro_batch=256: .*\. Set micro_batch=(\d+)\.$", problem)[1])
    assert plan(qwen("0.5B"), whole | {"micro_batch": best}, gpus=1).placement.rows == 256
    assert not plan(qwen("0.5B"), whole | {"micro_batch": 2 * best}, gpus=1).fits


def test_gradient_arms():
    def memory(**changed):
        return {part.name for part in plan(qwen("0.5B"), GRPO | changed, gpus=1).placement.gpu_memory}

    assert memory(beta=0.04) - memory() == {"reference model, float32"}
    settings = {"arm": "sft", "prompts": 4096, "num_generations": 16, "batch_size": 64, "epochs": 2}
    sft = plan(qwen("0.5B"), RUN | settings, gpus=1)
    assert sft.work.completions == 65536
    best = int(re.search(r"Set batch_size=(\d+)\.$", sft.problem)[1])
    assert plan(qwen("0.5B"), RUN | settings | {"batch_size": best}, gpus=1).fits


def test_work_of_a_run():
    planned = plan(qwen("7B"), ES, gpus=4)
    assert planned.work.completions == 500 * 30 * 200
    drawn = plan(qwen("7B"), ES | {"arm": "es_random"}, gpus=4)
    assert drawn.work.completions == 0
    asked = {name: value for name, value in ES.items() if not name.endswith("_problems")} | {"task": "conciseness"}
    assert "(50 each, assumed)" in plan(qwen("7B"), asked, gpus=4).text()
    with pytest.raises(ValueError, match="unknown task 'cuntdown'; .* Did you mean 'countdown'"):
        plan(qwen("7B"), ES | {"task": "cuntdown"})


def test_the_share_of_vllm_is_what_it_allocates_whatever_its_parts_are_called(monkeypatch):
    """Captions are for readers: the memory that vLLM is told of does not depend on them."""
    monkeypatch.setattr(preflight, "_config", lambda base: qwen("0.5B"))
    share = preflight.colocated_share(GRPO | {"gpus": 1})
    parts = plan(qwen("0.5B"), GRPO, gpus=1).placement.gpu_memory
    assert share == round(sum(part.size for part in parts if part.of_vllm) / (80 * GIB), 3) and 0 < share < 1
    assert {part.name.split(",")[0] for part in parts if part.of_vllm} == {
        "vLLM's copy",
        "reserve (assumed)",
        "KV cache",
    }
    reworded = preflight.gradient_memory
    monkeypatch.setattr(preflight, "gradient_memory", lambda *a: tuple(p._replace(name="x") for p in reworded(*a)))
    assert preflight.colocated_share(GRPO | {"gpus": 1}) == share


def test_a_plan_says_what_is_assumed():
    text = plan(qwen("7B"), ES, gpus=3, gpu_gib=30).text("runs 3")
    assert "es of a model, runs 3" in text and "3 GPUs of 30 GiB: engines 1, tensor parallel 2, idle 1" in text
    assert "of 27.0 (90 % of 30)" in text and "3,000,000 = 500 steps x 30 population_size x 200" in text
    assert re.search(r"rows +\d+ at once on an engine, of 200: the others wait", text)
    for word in ("reserve (assumed)", "each, assumed)", "at most"):
        assert word in text
    assert "what the machine has is not known here" in text


def test_anchored_decay_keeps_the_start_on_every_gpu():
    anchored = ES | {"anchor_decay": 0.01}
    plain, found = (plan(qwen("3B"), spec, gpus=1) for spec in (ES, anchored))
    (start,) = set(found.placement.gpu_memory) - set(plain.placement.gpu_memory)
    assert start == ("starting weights, bfloat16", 2 * 3_085_938_688, False, False)
    # the process that drives the run has them already, to measure how far the weights have come
    assert found.placement.host_memory == plain.placement.host_memory
    # 8 instead of 6 bytes per parameter
    assert plan(qwen("72B"), ES, gpus=8, gpu_gib=70).fits and plan(qwen("72B"), anchored, gpus=16, gpu_gib=70).fits
    problem = plan(qwen("72B"), anchored, gpus=8, gpu_gib=70).problem
    assert "need 582 GB for the float32 master and the bfloat16 copies of weights and start" in problem
    assert "Take 16 GPUs, no anchor_decay, larger GPUs or a smaller model" in problem
    # on cores it costs nothing more: members are written beside the master
    both = [plan(qwen("0.5B"), spec, engine="local", gpus=0).placement.host_memory for spec in (ES, anchored)]
    assert both[0] == both[1]


def test_memory_of_the_host():
    planned = plan(qwen("7B"), ES, gpus=1, host_gib=70)
    assert not planned.fits
    # the model, the master and its first state
    assert sum(part.size for part in planned.placement.host_memory) == (2 + 4 + 4) * 7_615_616_512
    assert "70.9 GiB of the host's memory" in planned.problem and "this machine has 70.0 GiB" in planned.problem
    assert plan(qwen("7B"), ES, gpus=1, host_gib=71).fits
    # of a gradient arm in every process, with the model in which it is measured
    each = plan(qwen("0.5B"), GRPO | {"micro_batch": 8}, gpus=8, host_gib=36)
    assert not each.fits and "4.6 GiB of the host's memory in each of 8 processes" in each.problem
    assert sum(part.size for part in each.placement.host_memory) == (2 + 4 + 4) * 494_032_768
    both = plan(qwen("0.5B"), ES, engine="local", gpus=0, host_gib=20, runs=2)
    assert "Take workers=1" in both.problem and plan(qwen("0.5B"), ES, engine="local", gpus=0, host_gib=20).fits
    whole = plan(qwen("0.5B"), GRPO | {"micro_batch": 256}, engine="local", gpus=0, host_gib=64)
    assert "a smaller micro_batch" in whole.problem and "no GPU is used" in whole.text()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engine": "ray"}, "engine 'ray' cannot be planned"),
        ({"engine": "local", "gpus": 2}, "gpus=2: engine 'local' runs on CPU cores only"),
        ({"gpus": 0}, "gpus=0: engine 'vllm' needs at least 1"),
        ({"spec": ES | {"arm": "ppo"}}, "arm 'ppo' is not one of es, "),
    ],
)
def test_settings_that_cannot_be(changed, message):
    with pytest.raises(ValueError, match=message):
        plan(qwen("7B"), changed.pop("spec", ES), **changed)


# ---- laws

SIZES = st.sampled_from(list(QWEN))


@given(size=SIZES, rows=st.integers(0, 256), length=st.integers(1, 8192))
def test_more_tensor_parallel_takes_no_more_memory_a_gpu(size, rows, length):
    model = shape(qwen(size))
    sizes = tensor_parallel_sizes(model, 64)
    totals = [sum(part.size for part in preflight.es_memory(model, t, rows, length)) for t in sizes]
    assert totals == sorted(totals, reverse=True)


@given(
    size=SIZES,
    gib=st.floats(5, 200),
    prompts=st.integers(1, 300),
    length=st.integers(1, 65536),
    gpus=st.integers(1, 16),
)
def test_more_gpus_never_make_es_impossible(size, gib, prompts, length, gpus):
    settings = ES | {"prompts_per_step": prompts, "max_completion_length": length}
    few, more = (plan(qwen(size), settings, gpus=g, gpu_gib=gib) for g in (gpus, gpus + 1))
    assert more.fits or not few.fits
    assert few.placement.rows <= more.placement.rows or few.placement.tensor_parallel > more.placement.tensor_parallel
    assert few.fits is (sum(part.size for part in few.placement.gpu_memory) <= 0.9 * gib * GIB)


@given(factors=st.tuples(*[st.integers(1, 10**4)] * 3))
def test_completions_are_the_product_of_their_factors(factors):
    names = ("steps", "population_size", "prompts_per_step")
    es = preflight.work(ES | dict(zip(names, factors, strict=True)))
    names = ("steps", "prompts_per_step", "num_generations")
    grpo = preflight.work(GRPO | dict(zip(names, factors, strict=True)))
    assert es.completions == grpo.completions == factors[0] * factors[1] * factors[2]


@given(size=SIZES, gpus=st.integers(1, 16), beta=st.sampled_from([0.0, 0.04]))
def test_data_parallel_makes_no_model_fit(size, gpus, beta):
    one, many = (plan(qwen(size), GRPO | {"beta": beta}, gpus=g) for g in (1, gpus))
    assert one.fits or not many.fits


# ---- as load_or_run asks


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """No GPU, 64 GiB, no records; returns a function that makes specs of a model of which there is the config alone."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(preflight, "_visible_gpus", lambda: (0, 0.0))
    monkeypatch.setattr(preflight, "_host_gib", lambda: 64.0)

    def specs(size, settings, seeds=(0, 1), **changed):
        folder = tmp_path / size
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(qwen(size, **changed)))
        return [settings | {"base": str(folder), "seed": seed, "scale": "full"} for seed in seeds]

    return specs


def test_a_dry_run_prints_each_plan_once(elsewhere, capsys):
    on = {"engine": "vllm", "gpus": 4}
    specs = elsewhere("7B", ES | on) + elsewhere("7B", ES | on | {"sigma": 3e-3}) + elsewhere("0.5B", GRPO | on)
    measured = {"kind": "base", "base": specs[0]["base"], "scale": "full"}
    with pytest.raises(sweep.DryRun, match="0 of 7 runs have records; to be run: base .*, es .* 0, "):
        sweep.load_or_run([measured, *specs], "nb", "full", dry_run=True)
    out = capsys.readouterr().out
    assert "no GPU is visible here: plans assume GPUs of 80 GiB" in out and out.count("4 GPUs of 80 GiB") == 2
    assert re.findall("^run +(es|grpo) of .*(runs .*)$", out, re.M) == [
        ("es", "runs 4: settings 2, seeds 0, 1"),
        ("grpo", "runs 2: settings 1, seeds 0, 1"),
    ]
    assert re.search(r"^6 training runs, 1 at once$", out, re.M)


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_cannot_fit_is_refused_before_anything_runs(elsewhere, capsys, monkeypatch, dry_run):
    monkeypatch.setattr(sweep, "_run_all", lambda *arguments: pytest.fail("a run began"))
    on = {"engine": "vllm", "gpus": 4}
    specs = [spec | on for spec in elsewhere("0.5B", ES) + elsewhere("72B", ES) + elsewhere("72B", GRPO)]
    with pytest.raises(DoesNotFit, match=r"436 GB .* Take 8 GPUs.*\(1 more of the plans printed do not fit\.\)"):
        sweep.load_or_run(specs, "nb", "full", dry_run=dry_run)
    out = capsys.readouterr().out
    assert out.count("DOES NOT FIT") == 2 and out.count("\nrun ") == 3


def test_a_chosen_tensor_parallel_size_is_kept_and_another_is_proposed():
    chosen = ES | {"tensor_parallel": 1}
    assert plan(qwen("7B"), chosen, gpus=8).placement.engines == 8
    problem = plan(qwen("32B"), chosen, gpus=8).problem
    assert re.search(r"Take tensor_parallel=\d, larger GPUs", problem), problem
    better = int(re.search(r"tensor_parallel=(\d)", problem)[1])
    assert plan(qwen("32B"), ES | {"tensor_parallel": better}, gpus=8).fits
    with pytest.raises(ValueError, match="tensor_parallel=3 does not suit 8 GPUs"):
        plan(qwen("7B"), ES | {"tensor_parallel": 3}, gpus=8)


def test_without_a_gpu_the_plan_is_about_the_host(elsewhere, capsys, monkeypatch):
    ran = []

    def run_all(missing, *arguments):
        ran.extend(missing)
        yield from ()

    monkeypatch.setattr(sweep, "_run_all", run_all)
    with pytest.raises(DoesNotFit, match=r"in each of 2 processes, .*this machine has 64.0 GiB"):
        sweep.load_or_run(elsewhere("7B", ES), "nb", "full", workers=2)
    assert not ran and "CPU cores: no GPU is used" in capsys.readouterr().out
    small = elsewhere("0.5B", ES)
    tokenizer().save_pretrained(small[0]["base"])  # without one it is not run
    with pytest.raises(KeyError):  # nothing came back, since nothing really ran
        sweep.load_or_run(small, "nb", "full", workers=2)
    assert ran == small and "2 training runs, 2 at once" in capsys.readouterr().out


def test_a_model_that_cannot_be_counted_is_run_without_a_plan(elsewhere, capsys):
    specs = elsewhere("0.5B", ES, model_type="gpt2")
    with pytest.raises(sweep.DryRun):
        sweep.load_or_run(specs, "nb", "full", dry_run=True)
    out = capsys.readouterr().out
    assert "no plan of " in out and "model type 'gpt2' cannot be counted" in out


def test_other_scales_and_finished_runs_have_no_plan(elsewhere, monkeypatch):
    monkeypatch.setattr(preflight, "check", lambda *arguments, **options: pytest.fail("a plan was asked for"))
    for scale in ("smoke", "tiny"):
        with pytest.raises(sweep.DryRun):
            sweep.load_or_run([ES | {"scale": scale}], "nb", scale, dry_run=True)
    (spec,) = elsewhere("7B", ES, seeds=[0])
    done = {"spec": spec, "spec_hash": spec_hash(spec), "status": "finished"}
    append_record(paths.RESULTS / "nb" / "full.jsonl", done)
    assert sweep.load_or_run([spec], "nb", "full", dry_run=True) == [done]


def test_members_that_are_adapters_leave_no_master_on_a_gpu():
    all_weights = {part.name: part.size for part in plan(qwen("7B"), ES, gpus=1).placement.gpu_memory}
    found = plan(qwen("7B"), ES | {"arm": "es_lora", "lora_rank": 8}, gpus=1)
    adapter = preflight.adapter_parameters(preflight.shape(qwen("7B")), 8)
    assert plan(qwen("7B"), ES | {"arm": "es_lora", "lora_rank": 4}, gpus=1).placement.gpu_memory == (
        found.placement.gpu_memory  # vLLM has no room between ranks 1 and 8
    )
    memory = {part.name: part.size for part in found.placement.gpu_memory}
    assert memory["16 adapters, bfloat16"] == 16 * 2 * adapter and "master, float32" not in memory
    assert memory["working copy, bfloat16"] == all_weights["working copy, bfloat16"]
    assert {part.name: part.size for part in found.placement.host_memory}["master, float32"] == 4 * adapter


@pytest.mark.parametrize("arm", ["es_lora", "essa", "grpo_lora"])
def test_where_an_arm_over_an_adapter_runs(tmp_path, arm):
    """Members share one engine of vLLM, gradients have one GPU; a cluster without GPUs has neither."""
    shutil.copytree(tiny.bases_folder() / "A0", tmp_path / "A0")
    wanted = SETS | {"max_completion_length": 24, "steps": 4, "prompts_per_step": 8, "population_size": 4}
    wanted |= {"sigma": 0.01, "alpha": 0.01, "learning_rate": 1e-4, "beta": 0.0, "num_generations": 4}
    wanted |= {"leading_share": 1.0, "lora_rank": 2, "warm_rows": 8, "warm_epochs": 1, "warm_learning_rate": 1e-3}

    def engine(**given):
        (spec,) = train_specs(arm, [str(tmp_path / "A0")], [0], wanted | given, "full")
        return {name: spec[name] for name in ("engine", "gpus", "tensor_parallel") if name in spec}

    one = {"engine": "vllm", "gpus": 1} if arm == "grpo_lora" else {"engine": "vllm", "tensor_parallel": 2}
    assert engine(engine="vllm", gpus=4, tensor_parallel=2) == engine(engine="ray", gpus=4, tensor_parallel=2) == one
    assert engine(engine="ray") == engine() == {}
    if arm == "essa":
        with pytest.raises(ValueError, match="engine='vllm': only the local engine has bases of another precision"):
            engine(engine="vllm", base_precision="int8")


def test_specs_of_runs_are_what_a_plan_reads(tmp_path):
    """Settings keep their names on the way from a notebook into a plan."""
    shutil.copytree(tiny.bases_folder() / "A0", tmp_path / "A0")
    wanted = SETS | {"max_completion_length": 24, "steps": 4, "prompts_per_step": 8, "population_size": 4}
    wanted |= {"sigma": 0.01, "alpha": 0.01, "learning_rate": 1e-4, "beta": 0.0, "num_generations": 4}
    wanted |= {"prompts": 16, "batch_size": 8, "epochs": 2, "rank": 1, "leading_share": 1.0, "lora_rank": 2}
    wanted |= {"warm_rows": 8, "warm_epochs": 1, "warm_learning_rate": 1e-3}
    config = AutoConfig.from_pretrained(tmp_path / "A0")
    for arm in arms.ARMS:
        anchored = {"anchor_decay": 0.1} if "anchor_decay" in arms.get(arm).settings else {}
        (spec,) = train_specs(arm, [str(tmp_path / "A0")], [0], wanted | anchored, "full")
        assert plan(config, spec, engine="local", gpus=0, host_gib=8).fits
        assert plan(config, spec, gpus=2).fits
