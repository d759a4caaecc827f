"""Scale "real": the plan that is declared, the choice of settings and lengths, and the whole command in miniature."""

import json
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from evoalign_study import claims, collapse, paths, real, real_runs, weight_cache
from evoalign_study.claims import run_scores
from evoalign_study.records import pack_bits, read_records, spec_hash

from evoalign_lib import ledger, smollm2, tiny
from evoalign_lib.analysis import geometry
from evoalign_lib.tasks import arithmetic


def test_the_plan_declares_a_sweep_of_equal_size_and_three_arms_from_one_base() -> None:
    plan = real.Plan()
    es, grpo = zip(*plan.sweep, strict=True)
    assert len(es) == len(grpo) == 4 and {spec["test_problems"] for spec in (*es, *grpo)} == {0}
    runs = [plan.run(arm, 3, {"sigma": 0.002, "alpha": 0.001}, 60) for arm in ("es", "es_random")]
    runs += [plan.run("grpo", 3, {"learning_rate": 1e-5}, 110)]
    base = plan.of_base
    assert base["base_digest"] == smollm2.DIGEST and base["scale"] == "real"
    for spec in runs:  # so that claims find the base of a run, and a null that stands in
        assert base.items() - {("kind", "base")} <= spec.items()
    assert {k for k in runs[0] if runs[0][k] != runs[1][k]} == {"arm"}
    declared = [claim for claim in claims.load_claims() if claim["id"].startswith("R")]
    assert {claim["scales"][0] for claim in declared} == {"real"}
    for arm, spec in {"es": runs[0], "grpo": runs[2], "base": base}.items():
        assert next(c["arms"][arm] for c in declared if arm in c.get("arms", {})).items() <= spec.items()


def test_settings_are_ranked_by_both_decodings_at_the_end() -> None:
    def made(rate: float, greedy: list[float], t1: list[float]) -> dict:
        return {"spec": {"learning_rate": rate}, "curve": {"validation_greedy": greedy, "validation_t1": t1}}

    best = made(3.0, [0.9, 0.1, 0.4], [0.9, 0.3, 0.4])
    assert real.chosen([made(1.0, [0.0, 0.1, 0.5], [0.0, 0.1, 0.2]), best]) == {"learning_rate": 3.0}


def test_lengths_fit_all_seeds_before_they_are_long(capsys) -> None:
    wanted = {0.1: (100, 200), 0.27: (60, 120), 0.4: (60, 60), 0.45: (50, 50), 9.0: (40, 40)}  # seconds of a step
    for seconds, pair in wanted.items():
        assert tuple(real.length(real.Plan(), 300.0, lambda es, grpo, s=seconds: s * (es + grpo), 2.0)) == pair
    assert capsys.readouterr().out.count("which do not fit") == 1


def test_gram_is_that_of_the_library() -> None:
    layout, start = weight_cache.layout_of("A0"), torch.tensor(weight_cache.of_base("A0"))
    generator = torch.Generator().manual_seed(0)
    kept = (torch.arange(layout.size) % k > 0 for k in (2, 3))
    ends = [start + 1e-3 * torch.randn(layout.size, generator=generator) * each for each in kept]
    found = real_runs.gram(layout, start, ends, "cpu")
    known = geometry.measure(layout.views(start), [layout.views(end) for end in ends], ("float32", "bfloat16"))
    np.testing.assert_allclose(found.gram, known.gram, rtol=1e-12)
    np.testing.assert_allclose(found.start, known.start, rtol=1e-12)
    assert found.names == known.names and found.tied == known.tied
    for dtype, counts in known.moved.items():
        np.testing.assert_array_equal(found.moved[dtype], counts)


SPENT = [((9, 10), ""), ((104, 100), ""), ((12, 10), "1.20 times"), ((0, 0), "second arm spent nothing")]


@pytest.mark.parametrize(("spent", "why"), SPENT)
def test_an_arm_that_spent_more_is_not_read_at_its_end(spent: tuple[int, int], why: str) -> None:
    taken = run_scores.Taken.of({"tested": "greedy", "at_most": "forward_flops"})
    right = {"n": 2, "greedy_bits": pack_bits([1, 0])}
    arms = [[{"curve": {"forward_flops": [0, flops]}, "test": right}] for flops in spent]
    with pytest.raises(run_scores.Undecided, match=why) if why else nullcontext():
        assert [arm.tolist() for arm in taken.measure.read(None, taken, arms)] == [[[1, 0]]] * 2


RULED = ["R0", "R3", "R4", "R8", "R9", "R11"]
CHANGES = {"seeds": 3, "population_size": 4, "grpo_prompts": 2, "num_generations": 8, "test_problems": 6}
CHANGES |= {"max_completion_length": 8, "es_sweep": ((0.2, 0.05), (0.1, 0.05))}
ONE_PAIR = {"es_sweep": [[0.2, 0.05]], "grpo_sweep": [1e-5]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command makes of a model that knows no chat, in a few steps on the CPU, graded by what it can do."""
    place = tmp_path_factory.mktemp("real")
    model, tokenizer = tiny.load("A0")
    for part in (model.to(torch.bfloat16), tokenizer):
        part.save_pretrained(place / "model")
    asked = ["run", "--out", str(place / "out"), "--minutes", "9", "--trial", "--blocks", "A", "--plan"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(arithmetic, "grade", lambda completion, right: sum(completion.encode()) % 2)
        # sweep; two seeds; a third one, for which ends come back and no second sweep is made; nothing is left
        for changed in (ONE_PAIR | {"seeds": 0}, ONE_PAIR | {"seeds": 2}, {}, {}):
            real.main([*asked, json.dumps(CHANGES | {"base": str(place / "model")} | changed)])
    return place / "out"


def test_the_command_makes_every_kind_of_record_once(folder: Path) -> None:
    records = read_records(folder / "records.jsonl")
    counts = {"base": 1, "train": 11, "products": 12, "path": 6, "merge": 3}
    assert Counter(record["spec"]["kind"] for record in records) == counts
    trained = [record for record in records if record["spec"]["kind"] == "train" and "test" in record]
    made = {(record["spec"]["arm"], record["spec"]["seed"]) for record in trained}
    assert made == {(arm, seed) for arm in ("es", "grpo", "es_random") for seed in range(3)}
    judged = {v.id: v for v in claims.evaluate_named(RULED, records_at_real(records), "real", resamples=50)}
    (law, _, walk, _) = judged["R0"].findings
    assert law.n == walk.n == 3 and abs(walk.interval.value - 1) < 0.01  # 0.14 M weights
    assert judged.pop("R4").verdict == "open"  # fewer runs than it needs were decoded under each decoding
    assert {verdict.verdict for verdict in judged.values()} == {"underpowered"}
    assert judged["R3"].n == judged["R8"].n == judged["R9"].n == 3
    assert {record["decoder"] for record in trained if record["spec"]["arm"] == "grpo"} == {"population"}
    assert [command["left_out"] for command in json.loads((folder / "device.json").read_text())] == [[]] * 4


def test_facts_are_run_on_the_cpu_in_parts_and_a_killed_run_goes_on(folder: Path, tmp_path: Path, monkeypatch) -> None:
    plan = {"task": "facts", "steps": (2, 2), "es_sweep": ((0.2, 0.05),), "grpo_sweep": (1e-5,), "seeds": 1}
    plan = CHANGES | plan | {"base": str(folder.parent / "model")}
    command = ["run", "--out", str(tmp_path), "--trial", "--blocks", "facts on a CPU", "--plan", json.dumps(plan)]
    command.append("--arms")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(real_runs.Stopwatch, "on_step_end", interrupted)
        real.main([*command, "es"])
    assert [len(ledger.read(path).steps) for path in tmp_path.glob("unfinished/*/ledger.jsonl")] == [1]
    real.main([*command, "es"])
    real.main([*command, "base", "grpo", "es_random"])
    monkeypatch.setattr(real, "BLOCKS", (made := replace(real.small(real.FACTS), **plan),))
    monkeypatch.setattr(real.paths, "RESULTS", tmp_path / "results")
    real.main(["import", str(tmp_path)])
    base, es, grpo, walk = sorted(real.committed(made), key=lambda r: ["", *made.arms].index(r["spec"].get("arm", "")))
    assert {r["notebook"] for r in (base, es, grpo, walk)} == {"03_conciseness"} and not list(tmp_path.glob("unf*/*"))
    assert es["spec"]["device"] == "cpu" and grpo["spec"]["products"] == "float32" and base["test"]["n"] == 6
    assert es["curve"]["proxy_greedy"][0] == grpo["curve"]["proxy_greedy"][0] == walk["curve"]["proxy_greedy"][0] < 0
    for decoding, level in ((d, r["curve"][f"proxy_{d}"][-1]) for d in ("greedy", "t1", "t0.6") for r in (es, grpo)):
        assert collapse.right_at(es, decoding, at_proxy=min(level, es["curve"][f"proxy_{decoding}"][0])).shape == (6,)


def interrupted(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def records_at_real(records: list[dict]) -> list[dict]:
    """The same records as if they had been made at scale real."""
    return json.loads(json.dumps(records).replace('"scale": "smoke"', '"scale": "real"'))


def test_the_name_of_the_base_stands_for_its_weights_alone(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EVOALIGN_MODELS", str(tmp_path))
    (tmp_path / smollm2.NAME).symlink_to(folder.parent / "model")
    with pytest.raises(SystemExit, match=f"not {smollm2.DIGEST}"):
        real.main(["run", "--out", str(tmp_path / "out"), "--trial", "--plan", json.dumps({"base": smollm2.NAME})])


def test_committed_runs_are_declared_and_the_list_goes_on_where_they_end(capsys) -> None:
    plans, known = (*real.BLOCKS, real.FACTS), real.Known(real.committed(real.Plan()))
    declared = [s for plan in plans for s in (plan.of_base, *plan.rounds(known.settled(plan) or plan.first))]
    declared += [spec for plan in plans if plan.swept for pair in plan.sweep for spec in pair]
    ran = {name: r for name, r in known.records.items() if r["spec"]["kind"] in ("base", "train")}
    assert ran.keys() <= set(map(spec_hash, declared))
    for run in ran.values():  # seconds are those of records alike
        if run["spec"]["kind"] == "train" and "device" not in run["spec"]:
            assert known.expected(run["spec"]) == pytest.approx(run["budget"]["wall_seconds"], rel=0.5)
    real.main(["plan", "--minutes", "9"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line[0] != " "][1:]
    assert [row[:14].strip() for row in rows] == [plan.name for plan in real.BLOCKS]
    known.records = {name: r for name, r in known.records.items() if "device" in r["spec"]}
    assert not any(map(known.expected, known.missing(real.BLOCKS[1])))  # a CPU says nothing of a GPU


OTHERS = {"es_sampled", "es_lora", "es_lora_sampled", "grpo_lora", "grpo_sgd", "sft"}


def test_the_other_blocks_follow_and_are_imported(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out = shutil.copytree(folder, tmp_path / "out")
    changes = CHANGES | ONE_PAIR | {"base": str(folder.parent / "model"), "seeds": 1, "sft": (4, 16)}
    names = ["ES sampled", "LoRA-B", "GRPO by SGD", "filtered SFT", "pass@64"]
    monkeypatch.setattr(arithmetic, "grade", lambda completion, right: sum(completion.encode()) % 2)
    asked = ["--out", str(out), "--trial", "--plan", json.dumps(changes), "--blocks", *names]
    real.main(["run", *asked])
    new = read_records(out / "records.jsonl")[len(read_records(folder / "records.jsonl")) :]
    made = {record["spec"]["arm"]: record for record in new if record["spec"]["kind"] == "train"}
    assert made.keys() == OTHERS and made["sft"]["counts"]["kept"] > 0 and made["es_lora"]["d"] == 768
    counts = {"train": 6, "sampled": 10, "products": 11}  # of the base and nine ends; of three and three arms
    assert Counter(record["spec"]["kind"] for record in new) == counts
    layers = {name for r in new for name in r.get("layers", {}) if "es_lora" in str(r["spec"]["a"])}
    assert layers == {"attention q", "attention v"}
    real.main(["plan", *asked])
    assert capsys.readouterr().out.count("missing: nothing") == len(names)
    blocks = [replace(real.small(plan), **changes) for plan in real.BLOCKS if plan.name in names]
    a = replace(real.small(real.Plan()), **CHANGES | {"base": changes["base"]})
    monkeypatch.setattr(real, "BLOCKS", (a, *blocks))
    monkeypatch.setattr(real.paths, "RESULTS", tmp_path / "results")
    real.main(["import", str(out)])
    assert {r["notebook"] for r in real.committed(a) if r["spec"]["kind"] == "sampled"} == {"07_solution_coverage"}


def test_trials_cannot_be_imported(folder: Path) -> None:
    with pytest.raises(SystemExit, match="is not what the blocks and their sweeps declare"):
        real.main(["import", str(folder)])
    asked = ["run", "--out", str(folder), "--plan", '{"seeds": 9}']
    no_field = [*asked[:-1], '{"seed": 9}', "--trial"]
    wrong = {"--trial alone": asked, "has .'seed'.": no_field, "scale {'smoke'}, not real": asked[:3]}
    for why, given in wrong.items():
        with pytest.raises(SystemExit, match=why):
            real.main(given)


def test_import_takes_declared_runs_with_their_ledgers(folder: Path, tmp_path: Path, monkeypatch) -> None:
    records = read_records(folder / "records.jsonl")
    plan = replace(real.small(real.Plan()), **CHANGES | {"base": records[0]["spec"]["base"]})
    monkeypatch.setattr(real, "BLOCKS", (plan,))
    results = tmp_path / "results"
    monkeypatch.setattr(real.paths, "RESULTS", results)
    for name in ("ledgers.zip", "device.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())

    def holds(*records: dict) -> None:
        (tmp_path / "records.jsonl").write_text("".join(map(real.record_line, records)))

    first = next(i for i, record in enumerate(records) if record["spec"].get("seed") == 2)  # of the third command
    for part in (records[:first], records[first:]):  # the runs and the sweep of the second part are committed ones
        holds(*part)
        real.main(["import", str(tmp_path)])
    assert {r["spec_hash"] for r in real.committed(plan)} == {spec_hash(record["spec"]) for record in records}
    assert len(list(results.glob("*/ledgers/*"))) == 7
    assert len(real.read_commands(results / "02_grpo_countdown" / "smoke.device.json")) == 4
    monkeypatch.setattr(real.paths, "RESULTS", tmp_path / "nothing")
    longer = records[3] | {"spec": (spec := records[3]["spec"] | {"steps": 3}), "spec_hash": spec_hash(spec)}
    refused = {"lack the sweep of es": records[first:], "is not what the blocks": [*records[:3], records[-1]]}
    refused["is filed under 01"] = [records[0] | {"notebook": "01"}]
    refused["names no ledger"] = [{k: v for k, v in record.items() if k != "ledger"} for record in records[:3]]
    refused["was made on 1 x GPU"] = [records[0] | {"environment": {"device": "1 x GPU"}}]
    for why, part in (refused | {r"have \[2, 3\] steps": [*records[:4], longer]}).items():
        holds(*part)
        with pytest.raises(SystemExit, match=why):
            real.main(["import", str(tmp_path)])
    real.put_in_archive(tmp_path / "ledgers.zip", f"{records[1]['spec_hash']}.jsonl.gz", b"another")
    holds(*records[:3])
    with pytest.raises(SystemExit, match="is not the ledger that was recorded"):
        real.main(["import", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not smollm2.folder().exists(), reason="make real-model fetches the base")
def test_a_ledger_that_a_gpu_wrote_replays_on_a_cpu_to_the_digest_that_it_recorded() -> None:
    run = ledger.read(paths.RESULTS / "02_grpo_countdown/ledgers/f70aafab2e3d4608.jsonl.gz")
    weights = next(ledger._replayed(run, smollm2.NAME, [10]))
    assert weights.digest() == run.weights[10]
