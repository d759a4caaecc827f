"""Parameters of a notebook: every mistake is named before any work, however the notebook is executed."""

import importlib
import os
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
from evoalign_study import parameters, paths
from evoalign_study.parameters import PARAMETERS, check_parameters
from helpers import python, refused

GIVEN = {"scale": "tiny", "model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": False}
LISTS = {"rates": [0.1, 0.3], "factors": {"sigma": 0.1}, "own_seeds": [32], "n_seeds": 8, "ends": [], "weights": [0.0]}
PRESETS = {
    "smoke": {"steps": 2, "sigma": 0.1, "bases": ["A0"], "curve": True, "limit": None, "some": 8} | LISTS,
    "tiny": {"steps": 100, "sigma": 0.01, "bases": ["A0", "A1"], "curve": True, "limit": None, "some": None} | LISTS,
}


def test_settings_of_the_scale_with_overrides():
    overrides = {"steps": 7, "sigma": 1, "bases": ("A2",), "limit": 3, "ends": ["a"], "weights": [0.0, 1]}
    overrides |= {"own_seeds": [0, 1], "rates": (1,), "factors": {"alpha": 2}, "some": None}
    run = check_parameters(GIVEN | overrides, PRESETS)
    assert {name: getattr(run, name) for name in overrides} == overrides and run.curve and run.aside
    assert vars(check_parameters(GIVEN | {"scale": "smoke"}, PRESETS)).items() >= PRESETS["smoke"].items()
    assert PRESETS["tiny"]["steps"] == 100 and not check_parameters(dict(GIVEN), PRESETS).aside
    assert type(run.sigma) is int  # as it was given: it is hashed
    for name in PARAMETERS:
        with pytest.raises(ValueError, match=f"'{name}'"):
            check_parameters({k: v for k, v in GIVEN.items() if k != name}, PRESETS)


@pytest.mark.parametrize(
    "changed",
    [
        *({name: value} for name in ("stpes", "zzzz", "In", "exit", "Force") for value in (5, None)),
        *({"scale": value} for value in ("tinny", "", None, "full", "real", [])),
        *({"steps": value} for value in ("5", 5.0, True, 0, -1, 10**9, 10**400, None)),
        *({"sigma": value} for value in ("1e-2", 0.0, float("nan"), float("-inf"), float("inf"), 1e30)),
        *({"bases": value} for value in ("A0", "[A0", [], ["A0", 5], [None], [""])),
        *({"seeds": value} for value in (-1, "2", True, [0, 1], 10**9)),
        *({"gpus": value} for value in (-1, 10**9, 1)),
        *({"n_seeds": value} for value in (10**5, 0)),
        *({name: value} for name in ("force", "dry_run", "curve") for value in ("yes", 1)),
        *({"model": value} for value in (7, "a/b")),
        *({"rates": [0.1, value]} for value in (float("inf"), 0)),
        *({"factors": {"sigma": value}} for value in (-1.0, "1")),
        *({"engine": value} for value in ("vlm", "vllm", "cuda")),
        *({name: value} for name, value in (("some", [5]), ("own_seeds", [10**9]))),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_are_named(changed):
    ((name, value),) = changed.items()
    namespace = GIVEN | changed
    for _ in range(2):  # refused again, too
        with pytest.raises(ValueError, match=name) as refused:
            check_parameters(namespace, PRESETS)
        if not isinstance(value, (list, dict)) and name in {*PARAMETERS, *PRESETS["tiny"]}:
            assert f"{value!r:.30}" in str(refused.value)


def test_one_gpu_without_vllm(monkeypatch):
    asked = GIVEN | {"scale": "full", "engine": "cuda", "model": "org/model"}
    presets = PRESETS | {"full": PRESETS["tiny"]}
    monkeypatch.setattr(parameters, "gpus_here", lambda: 1)
    assert check_parameters(asked | {"gpus": 1}, presets).engine == "cuda"
    with pytest.raises(ValueError, match="gpus=2"):
        check_parameters(asked | {"gpus": 2}, presets)


AT_REAL = GIVEN | {"scale": "real", "study": SimpleNamespace(NOTEBOOK="01_es_countdown")}
MADE = {"seeds": 2, "force": True, "engine": "vllm", "model": "a/b", "steps": 7}
test_scale_real_takes_nothing_else = refused(
    *(({name: value}, f"no {name}={value!r}.*evoalign_study.real run") for name, value in MADE.items()),
    call=lambda given: check_parameters(AT_REAL | given, PRESETS),
)


READ = [("rates", "[1e-3, 3]", [1e-3, 3]), ("rates", "[.5]", [0.5]), ("bases", "[A2, A1]", ["A2", "A1"])]
READ += [("factors", "{alpha: .2}", {"alpha": 0.2}), ("steps", np.int64(3), 3), ("rates", np.float32([0.5]), [0.5])]
# `papermill -p force false` gives the text, which Python would take for true
READ += [(name, text, text == "true") for name in ("force", "curve") for text in ("true", "false")]


@pytest.mark.parametrize(("name", "given", "value"), READ)
def test_values_as_papermill_gives_them_and_numbers_of_numpy(name, given, value):
    run = check_parameters(namespace := GIVEN | {name: given}, PRESETS)
    assert repr(getattr(run, name)) == repr(namespace[name]) == repr(value)  # of the same types: it is hashed


def test_the_cell_may_run_again_after_later_cells():
    """As in JupyterLab: what later cells and kernels define is no parameter, but what the cell sets now is."""
    kernel = {"In": ["..."], "Out": {}, "_": 3, "_i1": "x", "exit": object(), "__name__": "__main__", "Path": Path}
    check_parameters(GIVEN | kernel | {"helper": lambda: 0, "presets": PRESETS}, PRESETS)
    cells = ["", "import numpy as np", "scale: str = 'tiny'\nmodel: str = ''", "run = check_parameters(globals())"]
    namespace = GIVEN | {"In": list(cells)}
    check_parameters(namespace, PRESETS)
    namespace |= {"rows": [1, 2], "total": 0.5, "stpes": 3}
    assert check_parameters(namespace | {"scale": "smoke"}, PRESETS).steps == 2
    namespace["In"] += ["rows = [1, 2]\ntotal = sum(rows)", "%matplotlib inline", f"{cells[2]}\nstpes = 3", cells[3]]
    with pytest.raises(ValueError, match="unknown parameter 'stpes'.*'del stpes'"):
        check_parameters(namespace, PRESETS)
    del namespace["stpes"]
    check_parameters(namespace, PRESETS)
    with pytest.raises(ValueError, match="seeds=-3"):
        check_parameters(namespace | {"seeds": -3}, PRESETS)


def test_the_settings_of_every_notebook_pass_their_own_check():
    for module in (paths.NOTEBOOKS / "evoalign_study").glob("nb*.py"):
        presets = importlib.import_module(f"evoalign_study.{module.stem}").presets()
        for scale, preset in presets.items():
            run = check_parameters(GIVEN | {"scale": scale} | preset, presets)
            assert vars(run).items() >= preset.items()


CELLS = """from evoalign_study import parameters, sweep
from evoalign_study import nb03_conciseness as study
run = parameters.check_parameters(globals(), study.presets(model))
parameters.announce(run, "01_toy")
sweep.load_or_run([{"kind": "base", "scale": scale}], "01_toy", scale, dry_run=run.dry_run)
"""


@pytest.mark.slow
def test_papermill_ends_a_dry_run_without_failure(tmp_path):
    """It names what is missing, from any folder, and nothing after it runs."""
    literals = "scale, model, engine = 'tiny', '', 'local'\ngpus = seeds = 0\nforce = dry_run = False"
    cells = [nbformat.v4.new_code_cell(literals, metadata={"tags": ["parameters"]})]
    cells += map(nbformat.v4.new_code_cell, (CELLS, "raise KeyError('nothing after may run')"))
    notebook, out = tmp_path / "01_toy.ipynb", tmp_path / "out.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}}), notebook)
    environment = os.environ | {"PYTHONPATH": f"{paths.ROOT}{os.pathsep}{paths.NOTEBOOKS}"}
    how = "-k python3 --log-output -p dry_run true".split()
    done = python("-m", "papermill", notebook, out, *how, folder=tmp_path, env=environment)
    assert "0 of 1 runs have records; to be run: base." in done.stderr, done.stderr
    assert not nbformat.read(out, as_version=4).cells[-1].execution_count
