"""The set-up files agree with each other, with the code's imports and with what is installed."""

import ast
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from evoalign_study import paths
from helpers import python
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import evoalign_lib

PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
DIRECT = BASE + [Requirement(line) for lines in EXTRAS.values() for line in lines]
# Modules whose distribution has another name.
DISTRIBUTION_OF = {"PIL": "pillow", "yaml": "pyyaml", "IPython": "ipython"}
# What extras name and the base requirements bring as well.
BROUGHT = {"pandas", "pillow", "httpx", "packaging", "pydantic", "triton"}
LINES = [line for line in (paths.ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
PINS = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in LINES}
NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))


@functools.cache
def _requirements_of(*extras: str) -> list[Requirement]:
    """The base requirements and those of the extras, without what other platforms need."""
    chosen = BASE + [Requirement(line) for extra in extras for line in EXTRAS[extra]]
    return [requirement for requirement in chosen if requirement.marker is None or requirement.marker.evaluate()]


def test_the_conda_environment_installs_what_pyproject_says() -> None:
    environment = yaml.safe_load((paths.ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    (python,) = [d.removeprefix("python=") for d in conda if d.startswith("python=")]
    assert python in SpecifierSet(PROJECT["requires-python"]) and "pip" in conda
    constraint, package, study = pip["pip"]
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", package)
    assert study == "-e notebooks"
    assert constraint == "-c constraints.txt" and extras and set(extras[1].split(",")) == set(EXTRAS)
    assert yaml.safe_load((paths.ROOT / "CITATION.cff").read_text())["version"] == evoalign_lib.__version__


def test_constraints_hold_one_version_of_each_package_that_is_required() -> None:
    # no address, no marker, no local version such as +cpu: one set serves the CPU and the GPU machines
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line) for line in LINES) and len(PINS) == len(LINES)
    for requirement in DIRECT:
        assert PINS[canonicalize_name(requirement.name)] in requirement.specifier, requirement
        # an upper bound: a new major version is tried on purpose, not met by surprise
        assert {s.operator for s in requirement.specifier} & {"<", "=="}, requirement


def test_pins_cover_everything_that_the_requirements_install() -> None:
    waiting, seen = list(_requirements_of("analysis", "notebooks", "dev", "judges", "adapters", "tasks", "site")), set()
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        assert key[0] in PINS, f"{requirement} is installed but not in constraints.txt"
        try:
            needs = importlib.metadata.requires(requirement.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for need in map(Requirement, needs):
            extras = requirement.extras or {""}
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                # a CUDA build of torch brings NVIDIA's packages, which the CPU set does not name
                if not need.name.startswith(("nvidia-", "cuda-")):
                    waiting.append(need)


def test_installed_versions_are_the_pinned_ones() -> None:
    installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    wrong = [n for n in PINS.keys() & installed.keys() if installed[n] not in SpecifierSet(f"=={PINS[n]}")]
    assert wrong == [] and "torch" in installed


# ---- the code's imports


def _imports(file: Path) -> Iterator[tuple[str, bool]]:
    """The modules from outside that a file imports, and whether inside a function or a condition."""
    for node in ast.walk(ast.parse(file.read_text())):
        named = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in named + ([alias.name for alias in node.names] if isinstance(node, ast.Import) else []):
            if (root := name.split(".")[0]) not in sys.stdlib_module_names | {"evoalign_lib", "evoalign_study"}:
                yield root, node.col_offset > 0


@pytest.mark.parametrize(
    ("room", "extras"), [("evoalign_lib", ()), ("notebooks/evoalign_study", ("analysis", "notebooks", "judges"))]
)
def test_the_code_imports_only_declared_requirements(room, extras) -> None:
    """At the top level those of the base and of the extras that the room has, elsewhere those of any extra."""
    at_top, anywhere = ({canonicalize_name(r.name) for r in known} for known in (_requirements_of(*extras), DIRECT))
    found = {each for path in (paths.ROOT / room).rglob("*.py") for each in _imports(path)}
    names = {(canonicalize_name(DISTRIBUTION_OF.get(module, module)), inside) for module, inside in found}
    assert len(names) > 5
    assert [name for name, inside in names if name not in (anywhere if inside else at_top)] == []


HEAVY = {"torch", "transformers", "trl", "datasets", "pooch", "papermill", "pandas", "matplotlib"}
STEPS = [  # and what none of them may load
    ("import evoalign_study.paths, evoalign_lib; dir(evoalign_lib)", HEAVY | {"numpy", "numba"}),
    ("import evoalign_lib.tasks as tasks", HEAVY | {"numpy"}),
    ("tasks.get('countdown')", HEAVY),
    ("import evoalign_study.artifacts", {"torch"}),  # which draws
]


@pytest.mark.parametrize("chosen", [NOTEBOOKS[:1], pytest.param(NOTEBOOKS[1:], marks=pytest.mark.slow)])
def test_packages_are_loaded_where_they_are_needed(chosen) -> None:
    """The first cells of a notebook import what its specs need: seconds for everyone who opens it.

    One process for all: what one step imports is there for those after it.
    """
    names = [re.findall(r"from evoalign_study import (\w+) as study", path.read_text())[0] for path in chosen]
    steps = STEPS + [(f"import evoalign_study.parameters, evoalign_study.{n}", {"transformers"}) for n in names]
    script = "".join(f"{step}\nprint(*sys.modules)\n" for step, _ in steps)
    said = python("-c", f"import sys\n{script}", folder=paths.ROOT).stdout
    loaded = [set(line.split()) for line in said.splitlines()]
    assert [forbidden & there for (_, forbidden), there in zip(steps, loaded, strict=True)] == [set()] * len(steps)
    assert "evoalign_lib" in loaded[0] and "numpy" in loaded[2]


# ---- the contract of layers, which `make lint` checks

FORBIDDEN = [
    ("evoalign_lib.es", "evoalign_study.sweep"),  # the library knows no study
    ("evoalign_lib.noise", "evoalign_lib.es"),  # es imports noise: a circle
    ("evoalign_lib.analysis.stats", "evoalign_lib.engines.local"),
    ("evoalign_study.claims.verdicts", "evoalign_study.training"),
    ("evoalign_lib.tasks.countdown", "evoalign_lib.grpo"),
]


def test_forbidden_imports_inside_functions_break_it(tmp_path):
    """All at once, in a copy of the code: each is named."""
    for package in (paths.ROOT / "evoalign_lib", paths.NOTEBOOKS / "evoalign_study"):
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__", "bases"))
    for module, imported in FORBIDDEN:
        parent, _, name = imported.rpartition(".")
        with (tmp_path / f"{module.replace('.', '/')}.py").open("a", encoding="utf-8") as text:
            text.write(f"\n\ndef forbidden():\n    from {parent} import {name}\n")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", paths.ROOT / "pyproject.toml"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    missed = [f"{one} -> {other}" for one, other in FORBIDDEN if one != "evoalign_lib.noise"]
    missed = [pair for pair in missed if pair not in done.stdout]
    assert done.returncode and not missed and "cycles of any length BROKEN" in done.stdout, done.stdout + done.stderr


# ---- the library alone: trains and replays without what an extra brings, and outside of a checkout
ALONE = """
import json, sys

for name in sys.argv[2:]:
    sys.modules[name] = None  # as if it were not installed
from evoalign_lib import ESConfig, ESTrainer, ledger
from evoalign_lib.cli import app

settings = {"max_steps": 2, "population_size": 4, "sigma": 0.01, "alpha": 0.01, "max_completion_length": 4}
settings |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "workers": 1}
args = ESConfig(f"{sys.argv[1]}/run", **settings)
rows = [{"prompt": "12"}, {"prompt": "bc d"}]
trainer = ESTrainer("A0", lambda completion_ids, **columns: [float(sum(c)) for c in completion_ids], args, rows)
trainer.train()
trainer.save_model()
again = f"{sys.argv[1]}/again"
app(["replay", f"{sys.argv[1]}/run/ledger.jsonl", "--out", again, "--verify"], standalone_mode=False)
from pathlib import Path
assert Path(again, "model.safetensors").read_bytes() == Path(args.output_dir, "model.safetensors").read_bytes()
print("replayed")
"""


@pytest.mark.slow
def test_the_wheel_has_no_study_in_it_and_trains_outside_of_a_checkout(tmp_path: Path) -> None:
    copy = tmp_path / "copy"  # a build leaves files beside what it builds
    for name in ("evoalign_lib", "notebooks/evoalign_study"):
        shutil.copytree(paths.ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "notebooks/pyproject.toml"):
        shutil.copy(paths.ROOT / name, copy / name)
    python("-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path / "dist", copy, folder=copy)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "evoalign_lib/es.py" in names and "evoalign_lib/tiny/bases/A0/model.safetensors" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"evoalign_lib", "evoalign"}
    extras = {canonicalize_name(r.name) for lines in EXTRAS.values() for r in map(Requirement, lines)}
    modules = {distribution: module for module, distribution in DISTRIBUTION_OF.items()}
    # PyTorch, transformers and datasets bring some of what extras name, too
    absent = {modules.get(name, name.replace("-", "_")) for name in extras - BROUGHT} | {"evoalign_study"}
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n" + ALONE
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert python("-c", code, tmp_path, *sorted(absent), folder=tmp_path, env=environment).stdout.endswith("replayed\n")


# ---- the repository's files


# Split so that this file does not name them itself.
MACHINE_PATHS = ["/wor" + "k/", "/hom" + "e/", "/roo" + "t/", "/User" + "s/", "file:" + "///"]
REGISTRIES = ["pypi" + ".org", "python" + "hosted.org", "extra-index" + "-url", "download.py" + "torch.org"]


def test_no_file_names_a_machine_or_a_package_registry_and_all_stay_small() -> None:
    sizes = {r".*\.safetensors": 6_000_000, r".*/ledgers/.*": 6_000_000, r"paper/results/[^/]+/\w+\.jsonl": 24_000_000}
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if not (paths.ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of tracked files")
    listed = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    tracked = [file for name in listed if name and (file := paths.ROOT / name).is_file()]
    for pattern, limit in (sizes | {r"figures/.*": 6_000_000}).items():
        kept = [path for path in tracked if re.fullmatch(pattern, path.relative_to(paths.ROOT).as_posix())]
        assert 0 < sum(path.stat().st_size for path in kept) <= limit
    for path in tracked:
        if path.suffix not in (".gz", ".pdf", ".png", ".safetensors", ".woff2"):
            # the README names PyTorch's public index of CPU wheels: without it an install draws gigabytes of CUDA
            forbidden = MACHINE_PATHS + REGISTRIES[: 2 if path == paths.ROOT / "README.md" else None]
            text = path.read_text(encoding="utf-8")
            assert not [word for word in forbidden if word in text], path
