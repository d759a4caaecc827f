"""Plans of runs at full scale: memory is that of a sum by hand, and what cannot fit is refused with a remedy."""

import json
import re
import shutil

import pytest
from evoalign_study import measures, paths, preflight, sweep
from evoalign_study.kinds.train import train_specs
from evoalign_study.preflight import GIB, DoesNotFit, plan
from evoalign_study.records import append_record, spec_hash
from helpers import QWEN, SMALL_RUN, qwen, refused, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from evoalign_lib import arms, tiny
from evoalign_lib.engines.memory import kv_bytes, shape
from evoalign_lib.footprint import activation_bytes, adapter_parameters

SETS = {"task": "countdown", "validation_problems": 512, "test_problems": 2000, "curve_points": 21}
RUN = SETS | {"kind": "train", "base": "a model", "seed": 0, "max_completion_length": 1024}
ES = RUN | {"arm": "es", "population_size": 30, "sigma": 1e-3, "alpha": 5e-4, "steps": 500, "prompts_per_step": 200}
GRPO = RUN | {"arm": "grpo", "learning_rate": 1e-6, "beta": 0.0, "num_generations": 16, "steps": 250}
GRPO |= {"prompts_per_step": 16, "micro_batch": 1}
SFT = RUN | {"arm": "sft", "prompts": 4096, "num_generations": 16, "batch_size": 64, "epochs": 2}
ANCHORED = ES | {"anchor_decay": 0.01}
LORA = ES | {"arm": "es_lora", "lora_rank": 8}
GPUS = (1, 2, 4, 8)
LENGTH = 1024 + measures.get("countdown").prompt_tokens


def test_which_runs_fit():
    es = {size: [g for g in GPUS if not plan(qwen(size), ES, gpus=g).problem] for size in QWEN}
    least = {"0.5B": 1, "1.5B": 1, "3B": 1, "7B": 1, "14B": 2, "32B": 4, "72B": 8}
    assert es == {size: [g for g in GPUS if g >= least[size]] for size in QWEN}
    assert {size: plan(qwen(size), ES, gpus=8).tensor_parallel for size in QWEN} == least
    grpo = {size: [g for g in GPUS if not plan(qwen(size), GRPO, gpus=g).problem] for size in QWEN}
    assert grpo == {"0.5B": [*GPUS], "1.5B": [*GPUS], "3B": [1]} | {size: [] for size in list(QWEN)[3:]}


def test_memory_by_hand():
    model, es = shape(qwen("7B")), plan(qwen("7B"), ES, gpus=1).gpu_memory
    assert es["working copy, bfloat16"] == 2 * model.d and es["master, float32"] == 4 * model.d
    assert es["KV cache"] % (LENGTH * kv_bytes(model)) == 0 and sum(es.values()) <= 72 * GIB
    model, grpo = shape(qwen("0.5B")), plan(qwen("0.5B"), GRPO, gpus=2).gpu_memory
    assert (grpo["rollout copy"], grpo["buckets of gradients"]) == (2 * model.d, 4 * model.d)
    assert grpo.get("saved activations", 0) in (0, activation_bytes("grpo", model, LENGTH))
    reference = plan(qwen("0.5B"), GRPO | {"beta": 0.04}, gpus=1).gpu_memory
    assert reference["reference model"] == 4 * model.d and "reference model" not in grpo
    # of the host: the model, the master and its first state; of a gradient arm in each process
    for spec, processes in ((ES, 1), (GRPO, 8)):
        planned = plan(qwen("0.5B"), spec, gpus=8)
        assert sum(planned.host_memory.values()) == (2 + 4 + 4) * model.d and planned.processes == processes
    # anchored decay keeps the start on every GPU
    plain, anchored = (plan(qwen("3B"), spec, gpus=1).gpu_memory for spec in (ES, ANCHORED))
    assert anchored.items() - plain.items() == {("starting weights, bfloat16", 2 * 3_085_938_688)}


def test_members_that_are_adapters_leave_no_master_on_a_gpu():
    model, found = shape(qwen("7B")), plan(qwen("7B"), LORA, gpus=1)
    adapter, held = adapter_parameters(model, 8), found.gpu_memory
    assert plan(qwen("7B"), LORA | {"lora_rank": 4}, gpus=1).gpu_memory == held  # vLLM has ranks 1 and 8
    assert held["adapters of 16 members"] == 16 * 2 * adapter and "master, float32" not in held
    assert found.host_memory["master, float32"] == 4 * adapter
    over, whole = (plan(qwen("0.5B"), s, gpus=1) for s in (GRPO | {"arm": "grpo_lora", "lora_rank": 8}, GRPO))
    assert over.gpu_memory["moments"] < whole.gpu_memory["moments"] / 50


def test_completions_and_tokens():
    sampled = RUN | {"kind": "sampled", "samples": 512, "block": [0, 128]}
    specs = {500 * 30 * 200: ES, 65536: SFT, 0: ES | {"arm": "es_random"}, 128 * 512: sampled}
    assert [plan(qwen("7B"), spec).completions for spec in specs.values()] == list(specs)
    text = plan(qwen("7B"), ES, gpus=3, gpu_gib=30).text("runs 3")
    for said in ("es of a model, runs 3", "3 GPUs of 30 GiB: engines 1, tensor parallel 2, idle 1", "3,000,000 a run"):
        assert said in text
    assert "at most 3,072,000,000 generated" in text and "the others wait" in text


# ---- remedies: what a refusal proposes fits


REMEDIES = [
    ("72B", ES, 4, "8 GPUs"),
    ("72B", ANCHORED, 4, "16 GPUs, no anchor_decay"),
    ("7B", ES | {"max_completion_length": 10**6}, 1, "max_completion_length="),
    ("32B", ES | {"tensor_parallel": 1}, 8, "tensor_parallel="),
    ("3B", GRPO, 2, "1 GPU,"),
    ("0.5B", GRPO | {"micro_batch": 256}, 1, "micro_batch="),
    ("0.5B", SFT, 1, "batch_size="),
]


@pytest.mark.parametrize(("size", "spec", "gpus", "remedy"), REMEDIES)
def test_what_a_refusal_proposes_fits(size, spec, gpus, remedy):
    problem = plan(qwen(size), spec, gpus=gpus, gpu_gib=70 if spec is ANCHORED else 80).problem
    assert remedy in problem and f"{shape(qwen(size)).d:,} parameters" in problem
    number = int(re.search(rf"{remedy}(\d*)", problem)[1] or remedy.split()[0])
    changed = {remedy[:-1]: number} if remedy.endswith("=") else {}
    gpus = gpus if changed else number
    assert not plan(qwen(size), spec | changed, gpus=gpus).problem
    if remedy == "max_completion_length=":
        assert plan(qwen(size), spec | {"max_completion_length": number + 1}, gpus=gpus).problem


def test_where_nothing_helps_and_memory_of_the_host():
    assert "larger GPUs" in plan(qwen("7B"), ES, gpus=8, gpu_gib=8).problem
    assert "larger GPUs" in plan(qwen("7B"), GRPO, gpus=8).problem
    assert plan(qwen("7B"), ES, host_gib=70).problem and not plan(qwen("7B"), ES, host_gib=71).problem
    assert "8 processes" in plan(qwen("0.5B"), GRPO, gpus=8, host_gib=36).problem
    both = plan(qwen("0.5B"), ES, gpus=0, host_gib=24, runs=2)
    assert "workers=1" in both.problem and not plan(qwen("0.5B"), ES, gpus=0, host_gib=24).problem


CASES = ({"arm": "ppo"}, "ppo"), ({"task": "cuntdown"}, "countdown"), ({"tensor_parallel": 3}, "=3")
test_settings_that_cannot_be = refused(*CASES, call=lambda changed: plan(qwen("7B"), ES | changed, gpus=8))


@given(st.sampled_from(list(QWEN)), st.floats(5, 200), st.integers(1, 300), st.integers(1, 65536), st.integers(1, 16))
def test_more_gpus_never_make_es_impossible(size, gib, prompts, length, gpus):
    settings = ES | {"prompts_per_step": prompts, "max_completion_length": length}
    few, more = (plan(qwen(size), settings, gpus=g, gpu_gib=gib) for g in (gpus, gpus + 1))
    assert few.problem or not more.problem
    assert few.rows <= more.rows or few.tensor_parallel > more.tensor_parallel
    assert bool(few.problem) is (sum(few.gpu_memory.values()) > 0.9 * gib * GIB)


def test_the_share_of_vllm_is_what_it_allocates(monkeypatch):
    monkeypatch.setattr(preflight, "_config", lambda base: qwen("0.5B"))
    monkeypatch.setattr(preflight, "_visible_gpus", lambda: (0, 0.0))
    held = plan(qwen("0.5B"), GRPO, gpus=1).gpu_memory
    own = held["rollout copy"] + held["KV cache"] + held["reserve (assumed)"]
    assert preflight.colocated_share(GRPO | {"gpus": 1}) == round(own / (80 * GIB), 3) > 0
    with pytest.raises(DoesNotFit):
        preflight.colocated_share(GRPO | {"gpus": 1, "micro_batch": 256})


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
    specs += elsewhere("0.5B", ES | on, model_type="gpt2")[:1]  # its parameters cannot be counted
    with pytest.raises(sweep.DryRun, match="0 of 7 runs have records; to be run: es .* 0, "):
        sweep.load_or_run(specs, "nb", "full", dry_run=True)
    out = capsys.readouterr().out
    assert "plans assume GPUs of 80 GiB" in out and out.count("4 GPUs of 80 GiB") == 1 and out.count("no plan of") == 3
    assert "runs 4: settings 2, seeds 0, 1" in out and "7 runs, 1 at once: 12,000,000 completions" in out


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_cannot_fit_is_refused_before_anything_runs(elsewhere, capsys, monkeypatch, dry_run):
    monkeypatch.setattr(sweep, "_run_all", lambda *arguments: pytest.fail("a run began"))
    on = {"engine": "vllm", "gpus": 4}
    specs = [spec | on for spec in elsewhere("0.5B", ES) + elsewhere("72B", ES) + elsewhere("72B", GRPO)]
    with pytest.raises(DoesNotFit, match=r"Use 8 GPUs.*\(1 more of the printed plans do not fit\.\)"):
        sweep.load_or_run(specs, "nb", "full", dry_run=dry_run)
    assert capsys.readouterr().out.count("DOES NOT FIT") == 2
    with pytest.raises(DoesNotFit, match=r"in each of 2 processes, .*this machine has 64.0 GiB"):
        sweep.load_or_run(elsewhere("7B", ES), "nb", "full", workers=2, dry_run=dry_run)


def test_what_fits_runs_and_other_scales_and_finished_runs_have_no_plan(elsewhere, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(sweep, "_run_all", lambda missing, *arguments: ran.extend(missing) or (r for r in ()))
    small = elsewhere("0.5B", ES)
    tokenizer().save_pretrained(small[0]["base"])  # without one it is not run
    with pytest.raises(KeyError):  # nothing came back, since nothing really ran
        sweep.load_or_run(small, "nb", "full", workers=2)
    assert ran == small and "2 runs, 2 at once" in capsys.readouterr().out
    with pytest.raises(sweep.DryRun):
        sweep.load_or_run([ES | {"scale": "tiny"}], "nb", "tiny", dry_run=True)
    done = {"spec": small[0], "spec_hash": spec_hash(small[0]), "status": "finished"}
    append_record(paths.RESULTS / "nb" / "full.jsonl", done)
    assert sweep.load_or_run(small[:1], "nb", "full", dry_run=True) == [done]
    assert "GiB" not in capsys.readouterr().out


def test_specs_of_runs_are_what_a_plan_reads(tmp_path):
    """Settings keep their names on the way from a notebook into a plan; members of adapters share one engine."""
    shutil.copytree(tiny.bases_folder() / "A0", tmp_path / "A0")
    wanted = SMALL_RUN | SETS | {"max_completion_length": 24, "steps": 4, "prompts_per_step": 8, "population_size": 4}
    wanted |= {"sigma": 0.01, "learning_rate": 1e-4, "prompts": 16, "batch_size": 8, "epochs": 2, "rank": 1}
    wanted["alpha_schedule"] = "linear"
    config, bases = AutoConfig.from_pretrained(tmp_path / "A0"), [str(tmp_path / "A0")]
    for arm in arms.ARMS:
        anchored = {"anchor_decay": 0.1} if "anchor_decay" in arms.get(arm).settings else {}
        (spec,) = train_specs(arm, bases, [0], wanted | anchored, "full")
        assert not plan(config, spec, gpus=0, host_gib=8).problem and not plan(config, spec, gpus=2).problem
    on = {"engine": "vllm", "gpus": 4, "tensor_parallel": 2}
    for arm, gpus, parallel in (("es_lora", None, 2), ("essa", None, 2), ("grpo_lora", 1, None)):
        (spec,) = train_specs(arm, bases, [0], wanted | on, "full")
        assert [spec.get(name) for name in on] == ["vllm", gpus, parallel]
    for arm, engine in (("es", "cuda"), ("es_lora", "cuda"), ("grpo", "vllm")):
        (spec,) = train_specs(arm, bases, [0], wanted | {"engine": "cuda", "gpus": 1}, "full")
        assert spec["engine"] == engine and not plan(config, spec, gpus=preflight._gpus_of(spec)).problem
