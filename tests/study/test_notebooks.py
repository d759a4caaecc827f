"""What stands behind the notebooks: presets, groups of runs, their loader, and the numbers that the paper quotes."""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from evoalign_study import parameters, paths, sweep
from evoalign_study.kinds.decode import base_specs
from evoalign_study.loading import Group, Loader
from evoalign_study.records import read_records, record_files, spec_hash
from test_sweep import at, run_here

from tests.helpers import refused, saved

MODULES = [import_module(f"evoalign_study.{file.stem}") for file in sorted(Path(sweep.__file__).parent.glob("nb*.py"))]
es_countdown, grpo_countdown, conciseness, safety_judges, stability, low_rank_and_cost, _, _, lines = MODULES
PARAMETERS = {"scale": "tiny", "model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": False}


def loader_of(module, **given):
    namespace = PARAMETERS | given
    run = parameters.check_parameters(namespace, module.presets(namespace["model"]))
    return Loader(module.NOTEBOOK, run, module.groups)


def hashes(specs):
    return {name: [spec_hash(spec) for spec in own] for name, own in specs.items()}


@cache
def loaded(module):
    """Settings at scale tiny and committed records of a notebook."""
    load = loader_of(module, dry_run=True)
    return load._run, load(*load.names)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model that is none of the tiny world's."""
    return saved(tmp_path_factory.mktemp("model"))


# ---- presets and groups


def test_there_is_a_module_for_every_notebook():
    """And all of them are in the contract by which none imports another."""
    assert [module.NOTEBOOK for module in MODULES] == sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))
    contract = (paths.ROOT / "pyproject.toml").read_text(encoding="utf-8").split('"independence"')[1].split("[[")[0]
    assert re.findall(r'"(\S+)"', contract) == [module.__name__ for module in MODULES]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NOTEBOOK)
def test_scales_have_the_same_settings(module):
    scales = module.presets("my/model")
    assert list(scales) == ["tiny", "smoke", "full"] and scales["full"]["bases"] == ["my/model"]
    assert list(scales["tiny"]) == list(scales["smoke"])
    assert not (scales["tiny"].keys() | scales["full"].keys()) & PARAMETERS.keys()
    assert scales["tiny"]["retrain"] == []
    own = module.presets()["full"]["bases"][0]
    if module is safety_judges:  # at scale full other models judge, with settings of their own
        assert own == "PKU-Alignment/alpaca-7b-reproduced"
        return
    assert scales["full"].keys() - scales["tiny"].keys() <= {"micro_batch", "tensor_parallel"}
    assert own.startswith("Qwen/")


def test_the_groups_are_the_committed_records():
    """Every committed record is one of a declared group, and every declared run has its record."""
    every = [record for file in record_files("tiny") for record in read_records(file)]
    # simulated steps on many GPUs, which no notebook shows any more: what is recorded stays
    committed = {r["spec_hash"]: r for r in every if r["spec"].get("sort") != "simulated"}
    declared = set()
    for module in MODULES:
        load, (_, records) = loader_of(module, dry_run=True), loaded(module)
        load.records |= records  # those of the sweeps are there: nothing is a stand-in
        specs = hashes(load.specs())
        assert specs == {name: [r["spec_hash"] for r in records[name]] for name in specs}
        own = {h for h, record in committed.items() if record["notebook"] == module.NOTEBOOK}
        declared |= {h for each in specs.values() for h in each}
        assert own <= declared, module.NOTEBOOK
    assert declared == committed.keys()


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NOTEBOOK)
def test_the_groups_have_the_same_names_at_every_scale(module, model_folder, request):
    """At scale full, too, where settings and sizes differ; what is measured on small models alone stays tiny."""
    if module is conciseness:  # at scale full it trains on published questions
        request.getfixturevalue("external_data")
    names, exact = {}, {"estimator", "audit", "audit base", "kl", "memory", "processes", "storage"}
    for scale, model in (("tiny", ""), ("smoke", ""), ("full", model_folder)):
        if module is safety_judges and model:  # whose scorers have a test of their own
            names[scale] = names["tiny"]
            continue
        specs = loader_of(module, scale=scale, model=model, dry_run=True).specs()
        names[scale] = {re.sub(r"=.*| \d+$", "", name) for name in specs}  # of one for each rank or size
        for name, own in specs.items():
            small = name in exact or (module.NOTEBOOK[:2] in ("07", "08", "09") and name != "sampled")
            assert {spec["scale"] for spec in own} <= {"tiny" if small and model else scale}, name
    assert names["tiny"] == names["smoke"] == names["full"] | {n for n in names["tiny"] if "filler" in n}


test_what_no_run_can_have_is_refused_before_any_work = refused(
    (grpo_countdown, {"seeds": 1}, "seeds=1"),
    (stability, {"seeds": 1}, "one seed"),
    (stability, {"populations": [8, 30]}, r"populations=\[8, 30\]"),
    (stability, {"populations": [30, 4000, 5000]}, "5000"),
    (stability, {"prompt_counts": [50]}, r"prompt_counts=\[50\]"),
    (stability, {"horizons": [4]}, r"horizons=\[4\]"),
    (stability, {"scale": "full", "horizons": [4, 16]}, r"horizons=\[4, 16\]"),
    (conciseness, {"unique_prompts": 7}, "unique_prompts=7"),
    (stability, {"force": True, "retrain": ["grop"]}, "'grop'.*'grpo'"),
    # settings that only a trainer, the model or the record would refuse, or with which a run would never end
    *((es_countdown, {name: 10**6}, f"{name}.*1000000") for name in ("prompts_per_step", "population_size", "steps")),
    *((es_countdown, {name: 10**6}, f"{name}=1000000") for name in ("validation_problems", "max_completion_length")),
    (lines, {"validation_problems": 500}, "path_points=21 on 500 problems"),
    (low_rank_and_cost, {"adapter_ranks": [4, 10**6]}, "lora_rank=1000000 .* 64 at most"),
    (low_rank_and_cost, {"ranks": [65]}, "rank=65 "),
    *(
        (grpo_countdown, {name: 1}, f"{name.split('_', 1)[1]}=1 ")
        for name in ("es_population_size", "grpo_num_generations")
    ),
    (stability, {"populations": [7, 7]}, r"populations=\[7, 7\]"),
    (es_countdown, {"temperatures": [i / 1000 for i in range(1, 1001)]}, "temperatures.*100"),
    (low_rank_and_cost, {"temperatures": [0.2, 0.4, 0.6, 0.8]}, "test_problems=2000 at 6 decodings"),
    (stability, {"sweep_factors": {"a": 1}}, "'a'"),
    call=lambda module, given: loader_of(module, **given),
)


# ---- the loader

SMALL = {"task": "countdown", "max_completion_length": 8, "validation_problems": 4, "test_problems": 4}
SMALL |= {"population_size": 2, "steps": 1, "prompts_per_step": 2, "curve_points": 2, "sigma": 0.1, "alpha": 0.1}


def small_groups(run, of):
    """Two seeds of one arm, one of which another group has, too, and a group that comes after them."""
    alpha = of["both"][0]["spec"]["alpha"] / 2 if "both" in of else 1.0
    return {
        "base": base_specs(["A0"], SMALL, run.scale),
        "both": Group("es", ["A0"], 2, SMALL, ledgers=["A0"]),
        "shared": Group("es", ["A0"], [1], SMALL),
        "after": Group("es", ["A0"], 1, SMALL, [{"alpha": alpha}], after=("both",)),
    }


def small_run(**given):
    return SimpleNamespace(**PARAMETERS | {"retrain": [], "aside": False} | given)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Empty folders of committed records and of runs beside them."""
    monkeypatch.setattr(sweep, "_run_all", run_here)
    return at(monkeypatch, tmp_path) / "results"


def test_a_spec_of_two_groups_runs_once_and_only_what_retrain_names_is_made_anew(results, capsys):
    load = Loader("01_small", small_run(), small_groups)
    assert load.names == ("base", "both", "shared", "after") and load.specs()["after"][0]["alpha"] == 1.0

    found = load("shared", "both")
    assert capsys.readouterr().out == "loaded 0 records, ran 2\n"
    assert list(found) == ["shared", "both"] and found["shared"] == [found["both"][1]]
    assert [r["spec"]["seed"] for r in found["both"]] == [0, 1] and all("ledger" in r for r in found["both"])
    assert len(list((results / "01_small/ledgers").iterdir())) == 2
    assert load("both") == {"both": found["both"]} and capsys.readouterr().out == ""  # it was loaded before

    # a group that comes after others loads them first, and takes its settings from them
    again = Loader("01_small", small_run(), small_groups)
    (last,) = again("after")["after"]
    assert capsys.readouterr().out == "loaded 2 records, ran 0\nloaded 0 records, ran 1\n"
    assert last["spec"]["alpha"] == 0.05 and again.records.keys() == {"both", "after"}

    # made anew is the group that was named, and with it the run that it shares; the other one is loaded
    forced = Loader("01_small", small_run(force=True, aside=True, retrain=["shared"]), small_groups)
    remade = forced("both", "shared")
    out = capsys.readouterr().out
    assert out.startswith("loaded 1 records, ran 0\nloaded 0 records, ran 1\nbeside committed records: 1 of 1 have the")
    assert remade["both"][0] == found["both"][0] and remade["both"][1] == remade["shared"][0]
    assert remade["shared"][0]["digest"] == found["shared"][0]["digest"]  # the same bits
    beside = read_records(results.parent / "run/results/tiny.jsonl")
    assert [r["spec"]["seed"] for r in beside] == [1]


def test_seeds_replace_the_number_that_a_group_has():
    def seeds(**given):
        specs = Loader("01_small", small_run(**given), small_groups).specs()
        return {name: [spec["seed"] for spec in own] for name, own in specs.items() if name != "base"}

    assert seeds(seeds=3) == {"both": [0, 1, 2], "shared": [1], "after": [0, 1, 2]}
    # with force they count for what is made anew
    assert seeds(seeds=3, force=True) == {"both": [0, 1, 2], "shared": [1], "after": [0, 1, 2]}
    assert seeds(seeds=3, force=True, retrain=["after"]) == {"both": [0, 1], "shared": [1], "after": [0, 1, 2]}


test_a_mistaken_name_is_refused_before_any_work = refused(
    ({"retrain": ["both"]}, [], "retrain=.*both"),
    ({"retrain": ["boht"], "force": True}, [], "'boht'.*'both'"),
    ({}, ["base", "shard"], "'shard'.*'shared'"),
    call=lambda given, names: Loader("01_small", small_run(**given), small_groups)(*names),
)


# ---- tables of what there is


def test_the_tables_of_groups_and_of_settings():
    table = Loader("01_small", small_run(), small_groups).table()
    assert list(table.index) == ["base", "both", "shared", "after"] and list(table["runs"]) == [1, 2, 1, 1]
    assert list(table["arm or kind"]) == ["base", "es", "es", "es"] and list(table["seeds"]) == ["", "0 to 1", "1", "0"]
    assert list(table["changed"]) == ["", "", "", "alpha 1"] and set(table["bases"]) == {"A0"}

    load = loader_of(stability, dry_run=True)
    load.records |= loaded(stability)[1]
    table = load.table()
    assert table.loc["es map", "changed"] == "9 settings" and table.loc["es map", "seeds"] == "0, 1, 2, 100"
    assert table.loc["grpo best", "changed"] == "a setting per base" and table.loc["grpo best", "runs"] == 8
    table = parameters.table({"tiny": {"steps": 9, "few": None}, "full": {"steps": 9, "few": 2, "new": 1}})
    expected = {"tiny": {"steps": 9, "few": None, "new": ""}, "full": {"steps": "", "few": 2, "new": 1}}
    assert table.to_dict() == expected
