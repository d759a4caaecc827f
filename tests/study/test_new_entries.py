"""A new task, arm, kind of run and rule: files of their own and a line in a registry each, and no other change.

They are added to a copy of the two packages. What they get there: specs, records and a verdict.
"""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

from evoalign_study import paths
from helpers import in_child

TASK = """
from evoalign_lib.tasks.countdown import REWARD_FLOOR, dataset
def reward(prompts, completions, **columns):
    return [float("-" in str(completion)) for completion in completions]
"""
MEASURES = """
from evoalign_lib import tiny
from evoalign_study.measures.base import Measures
class _Plus(Measures):
    task = "plus"
    settings = ("sign",)
    def spec_fields(self, base, settings):
        return {"sign": settings.get("sign", "-")}
    def sets(self, spec):
        return {name: tiny.problems("train", spec[f"{name}_problems"], len(name)) for name in ("validation", "test")}
    def right(self, problem, completion):
        return "-" in completion
MEASURES = _Plus()
"""
KIND = """
from evoalign_study import specs, training
def length_specs(base, repeats, settings, scale):
    begun = specs.begin("lengths", base, scale, settings) | specs.sizes(settings)
    return [begun | {"repeat": repeat} for repeat in range(repeats)]
def run(spec):
    with training.opened(spec) as (engine, _):
        (row,) = engine.generate("validation", samples=1, seed=spec["repeat"])
    return {"tokens": sum(len(ids) for _, ids in row) / len(row)}
"""
RULE = """
from evoalign_lib.analysis import stats
from evoalign_study.claims.findings import Finding
from evoalign_study.claims.rules.rule import Rule
def _find(case):
    found, number, *_ = case.select(["treatment"])["treatment"]
    interval = stats.bootstrap_mean([record["tokens"] for record in found])
    bound, value = float(case.rule["above"]), f"{interval.value:.1f} tokens"
    return [Finding("length", interval.n, number, interval, bound, "above", value=value)]
LONGER = Rule(_find, lambda arm: {"above": int}, arms=("treatment",))
"""
STUDY = "notebooks/evoalign_study"
FILES = {
    "evoalign_lib/tasks/plus.py": TASK,
    f"{STUDY}/measures/plus.py": MEASURES,
    f"{STUDY}/kinds/lengths.py": KIND,
    f"{STUDY}/claims/rules/longer.py": RULE,
}
RULES, KNOWN = f"{STUDY}/claims/rules/__init__.py", "from evoalign_study.claims.rules.rule import Rule\n"
PAIRS = '    "es_pairs": _es("#000000", "d", "ES, pairs", fitness="reward", antithetic=True),\n'
LINES = [  # file, the line that stands there, and the new one below it
    ("evoalign_lib/tasks/__init__.py", "TASKS: dict[str, str] = {\n", '    "plus": "evoalign_lib.tasks.plus",\n'),
    ("evoalign_lib/arms.py", "ARMS: dict[str, Arm] = {\n", PAIRS),
    (f"{STUDY}/kinds/__init__.py", "KINDS: dict[str, tuple[str, ...]] = {\n", '    "lengths": ("lengths",),\n'),
    (RULES, "RULES: dict[str, Rule] = {\n", '    "longer": longer.LONGER,\n'),
    (RULES, KNOWN, "from evoalign_study.claims.rules import longer\n"),
]
CLAIM = {
    "id": "T1", "title": "Answers are longer than a token", "notebooks": ["01"], "scales": ["tiny"], "unit": "repeat",
    "statement": "Answers of the base are longer than one token.", "quantity": "tokens", "test": "bootstrap",
    "arms": {"treatment": {"kind": "lengths", "task": "plus"}}, "margin": 0, "min_seeds": 8,
    "rule": {"kind": "longer", "above": 1}, "source": "a test",
}  # fmt: skip


def enter(root: Path) -> None:
    """Make a folder a checkout whose packages have the new entries."""
    for package in ("evoalign_lib", STUDY):  # with what numba has compiled
        shutil.copytree(paths.ROOT / package, root / package)
    for name, text in FILES.items():
        (root / name).write_text(text.lstrip(), encoding="utf-8")
    for name, line, added in LINES:
        text = (root / name).read_text(encoding="utf-8")
        assert text.count(line) == 1, name
        (root / name).write_text(text.replace(line, line + added), encoding="utf-8")
    (root / "paper/generated").mkdir(parents=True)
    (root / "paper/claims.yaml").write_text(json.dumps([CLAIM]))  # JSON is YAML


def judge(checkout: Path) -> None:
    """Import the packages of the checkout in the place of ours, and use the entries; never to be called twice."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("evoalign_lib", "evoalign_study")]:
        del sys.modules[name]
    sys.path[:0] = [str(checkout), str(checkout / "notebooks")]
    from evoalign_study import claims, kinds
    from evoalign_study.kinds import lengths, train

    from evoalign_lib import tiny

    settings = {"task": "plus", "max_completion_length": 16, "validation_problems": 4, "test_problems": 6, "steps": 4}
    settings |= {"prompts_per_step": 4, "curve_points": 5, "population_size": 4, "sigma": 0.03, "alpha": 0.01}
    base = str(tiny.bases_folder() / "A0")
    (spec,) = train.train_specs("es_pairs", [base], [0], settings, "tiny")
    assert (spec["sign"], spec["arm"]) == ("-", "es_pairs")
    specs = lengths.length_specs(base, 8, settings, "tiny")
    records = [{"spec": spec, "status": "finished"} | kinds.get("lengths")(spec) for spec in specs]
    assert claims.evaluate_named(["T1"], records)[0].verdict == "supported"


def test_files_and_registry_lines_are_all_that_new_entries_need(tmp_path):
    """In a child of this process, which has imported all other packages."""
    import trl.trainer.grpo_trainer  # noqa: F401

    enter(tmp_path)
    assert in_child(partial(judge, tmp_path)) == 0
