"""The form of the notebooks: parameters, cells that run again, and code they write out equal to the library's."""

import ast
import re
from importlib import import_module

import nbformat
import numpy as np
import pytest
import torch
from evoalign_study import execution, parameters, paths
from helpers import written_out

from evoalign_lib import noise
from evoalign_lib.analysis import kl, stats
from evoalign_lib.update_rules import Member, standardise

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(params=NOTEBOOKS, ids=lambda p: p.stem)
def notebook(request):
    return read(request.param)


def code_of(notebook):
    """The code cells' sources."""
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def study_of(notebook):
    """The module that the notebook's derived-values cell calls `study`."""
    (name,) = re.findall(r"^from evoalign_study import (\w+) as study$", code_of(notebook)[1], re.M)
    return import_module(f"evoalign_study.{name}")


def test_parameters_cell_has_the_common_names_and_literals_only(notebook):
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    statements = ast.parse(tagged[0].source).body
    names = [s.target.id for s in statements if isinstance(s, ast.AnnAssign)]
    assert names == list(parameters.PARAMETERS)
    assert all(isinstance(s.value, ast.Constant) for s in statements)


def test_committed_as_executed_top_to_bottom(notebook):
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    outputs = [o for c in code for o in c.outputs]
    assert not any(o.output_type == "error" or o.get("name") == "stderr" for o in outputs)
    assert all(c.metadata.keys() <= {"tags"} for c in notebook.cells)  # no times of execution, which differ each time


def bound(statement):
    """The names that a statement binds in the notebook."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(name.asname or name.name).partition(".")[0] for name in statement.names}
    inside = [n.target for n in ast.walk(statement) if isinstance(n, ast.comprehension)]
    return used(statement, ast.Store) - {name for target in inside for name in used(target, ast.Store)}


def used(node, how):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, how)}


def read_from_others(statements):
    """The names that a cell reads before it binds them."""
    found, own = set(), set()
    for s in statements:
        local = used(s, ast.Store) | {n.arg for n in ast.walk(s) if isinstance(n, ast.arg)}
        if isinstance(s, (ast.Assign, ast.AnnAssign)):  # the right side comes first
            local -= bound(s)
        found |= (used(s, ast.Load) | (bound(s) if isinstance(s, ast.AugAssign) else set())) - own - local
        own |= bound(s)
    return found


def test_a_cell_that_runs_again_finds_the_names_it_reads_as_they_were(notebook):
    cells = [ast.parse(source).body for source in code_of(notebook)]
    reads = list(map(read_from_others, cells))
    reads[1] |= {*parameters.PARAMETERS, *study_of(notebook).presets()["tiny"]}  # from globals()
    for i, read_here in enumerate(reads):
        bound_later = {name for cell in cells[max(i, 1) :] for statement in cell for name in bound(statement)}
        assert not read_here & bound_later, code_of(notebook)[i]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_every_cell_runs_twice(name, tmp_path):
    """As it does where a reader changes a cell: what it reads was not changed in place either."""
    content = read(paths.NOTEBOOKS / f"{name}.ipynb")
    first, *others = code_of(content)
    content.cells = [nbformat.v4.new_code_cell(source) for source in [first, "dry_run = True", *others] * 2]
    assert execution._run(name, content, tmp_path, [], timeout=300) is None


def test_the_step_written_out_in_notebook_01_is_the_librarys():
    (es_step,) = written_out("01_es_countdown", "es_step")
    rng = np.random.default_rng(0)
    theta = {"a.weight": rng.standard_normal((7, 13)).astype(np.float32), "b.bias": np.ones(5, np.float32)}
    layout = noise.Layout.from_shapes((name, w.shape) for name, w in theta.items())
    master = np.zeros(layout.size, np.float32)
    for name, view in layout.views(master).items():
        view[...] = theta[name]

    def reward(weights):
        return float(sum(np.square(w - 0.5).sum(dtype=np.float64) for w in weights.values()))

    moved = es_step(theta, reward, noise.run_key("es", 3), step=2, N=6, sigma=0.1, alpha=0.3)

    members = [Member(noise.member_key(noise.run_key("es", 3), 2, n)) for n in range(6)]
    fitness = []
    for member in members:
        working = np.empty_like(master)
        noise.perturb(working, master, layout, member.key, 0.1)
        fitness.append(reward(layout.views(working)))
    coefficients = (0.3 * standardise(np.array(fitness)) / 6).astype(np.float32)
    noise.update(master, layout, np.array([m.key for m in members], np.uint64), coefficients)
    for name, view in layout.views(master).items():
        assert np.array_equal(moved[name], view)
        assert not np.array_equal(moved[name], theta[name])


def test_the_kl_estimators_written_out_in_notebook_02_are_the_librarys():
    (kl_estimates,) = written_out("02_grpo_countdown", "kl_estimates")
    log_policy, log_ref = -np.random.default_rng(0).exponential(size=(2, 50))
    library = kl.kl_policy_ref_tokens(log_policy, log_ref)
    for name, values in kl_estimates(log_policy, log_ref).items():
        torch.testing.assert_close(torch.from_numpy(values), getattr(library, name), rtol=1e-12, atol=1e-12)


def test_the_jackknife_written_out_in_notebook_05_is_the_librarys():
    (log_std_ratio,) = written_out("05_stability", "log_std_ratio")
    rng = np.random.default_rng(0)
    values, baseline = rng.exponential(size=16), rng.standard_normal(8)
    library = stats.log_std_ratio(values, baseline)
    assert log_std_ratio(values, baseline) == pytest.approx((library.value, library.low, library.high), rel=1e-12)
    assert library.low < library.value < library.high
