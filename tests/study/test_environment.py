"""The set-up files agree with each other, with the code's imports and with what is installed."""

import ast
import faulthandler
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from evoalign_study import paths
from evoalign_study.records import record_files, stored_files
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import evoalign_lib

PYPROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
ENVIRONMENT = yaml.safe_load((paths.ROOT / "environment.yml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
DIRECT = BASE + [Requirement(line) for lines in EXTRAS.values() for line in lines]
# Modules whose distribution has another name.
DISTRIBUTION_OF = {"PIL": "pillow", "yaml": "pyyaml", "IPython": "ipython"}

# What extras name and the base requirements bring as well.
BROUGHT = {"pandas", "pillow", "httpx", "packaging", "pydantic", "triton"}


def _constraint_lines() -> list[str]:
    lines = (paths.ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


PINS = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in _constraint_lines()}


def _requirements_of(extras: list[str]) -> list[Requirement]:
    """The base requirements and those of the extras, without what other platforms need."""
    chosen = BASE + [Requirement(line) for extra in extras for line in EXTRAS[extra]]
    return [requirement for requirement in chosen if requirement.marker is None or requirement.marker.evaluate()]


# environment.yml


def test_environment_has_conda_keys_and_channels() -> None:
    assert set(ENVIRONMENT) == {"name", "channels", "dependencies"}
    assert ENVIRONMENT["name"] == PROJECT["name"]
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]


def test_environment_pins_a_supported_python() -> None:
    (python,) = [d for d in ENVIRONMENT["dependencies"] if isinstance(d, str) and d.startswith("python")]
    name, version = python.split("=")
    assert name == "python"
    assert version in SpecifierSet(PROJECT["requires-python"])


def test_environment_lists_pip_before_its_one_pip_section() -> None:
    sections = [d for d in ENVIRONMENT["dependencies"] if isinstance(d, dict)]
    assert [set(section) for section in sections] == [{"pip"}]
    assert "pip" in ENVIRONMENT["dependencies"]
    assert ENVIRONMENT["dependencies"][-1] is sections[0]


def test_environment_pip_section_installs_this_package_with_its_pins() -> None:
    constraint, editable = ENVIRONMENT["dependencies"][-1]["pip"]
    assert constraint == "-c constraints.txt"
    option, target = editable.split(" ")
    extras = re.fullmatch(r"\.\[([a-z,]+)\]", target)
    assert option == "-e"
    assert extras is not None
    assert set(extras[1].split(",")) == set(EXTRAS)


# pyproject.toml and constraints.txt


def test_versions_agree() -> None:
    citation = yaml.safe_load((paths.ROOT / "CITATION.cff").read_text())
    assert citation["version"] == evoalign_lib.__version__
    assert citation["license"] == PROJECT["license"] == "MIT"


def test_makefile_and_pyproject_accept_the_same_pythons() -> None:
    makefile = (paths.ROOT / "Makefile").read_text()
    (bounds,) = re.findall(r"\((3, \d+)\) <= v <= \((3, \d+)\)", makefile)
    lowest, highest = (bound.replace(", ", ".") for bound in bounds)
    specifiers = SpecifierSet(PROJECT["requires-python"])
    accepted = [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in specifiers]
    assert [accepted[0], accepted[-1]] == [lowest, highest]


def test_constraints_are_plain_pins() -> None:
    # No address, no marker, no local version such as +cpu: one set serves the CPU and the GPU machines.
    plain = re.compile(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*")
    assert [line for line in _constraint_lines() if not plain.fullmatch(line)] == []


def test_constraints_name_each_package_once() -> None:
    names = [canonicalize_name(line.split("==")[0]) for line in _constraint_lines()]
    assert len(names) == len(set(names)) > 100


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda requirement: requirement.name)
def test_direct_dependency_is_a_range_with_one_pin_inside(requirement: Requirement) -> None:
    assert PINS[canonicalize_name(requirement.name)] in requirement.specifier
    # An upper bound: a new major version is tried on purpose, not met by surprise.
    assert {s.operator for s in requirement.specifier} & {"<", "=="}


def test_pins_cover_everything_that_the_requirements_install() -> None:
    waiting, seen = _requirements_of(["analysis", "notebooks", "dev", "judges", "adapters", "site"]), set()
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
                # A CUDA build of torch brings NVIDIA's packages, which the CPU set does not name.
                if not need.name.startswith(("nvidia-", "cuda-")):
                    waiting.append(need)


def test_installed_versions_are_the_pinned_ones() -> None:
    installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    present = sorted(PINS.keys() & installed.keys())
    wrong = [f"{n} {installed[n]}" for n in present if installed[n] not in SpecifierSet(f"=={PINS[n]}")]
    assert wrong == [], "not the versions of constraints.txt; `make` installs those into .venv"
    assert "torch" in present


def test_hooks_use_the_pinned_ruff() -> None:
    hooks = yaml.safe_load((paths.ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    versions = {need for hook in hooks for need in hook["additional_dependencies"] if need.startswith("ruff")}
    assert versions == {f"ruff=={PINS['ruff']}"}


# The code's imports


def _imports(source: str) -> set[tuple[str, bool]]:
    """(module, whether it is imported when the file is) for every absolute import, its first component only."""
    tree = ast.parse(source)
    inside = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.If | ast.Try)
        for node in ast.walk(outer)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [str(node.module)]
        else:
            continue
        found |= {(name.split(".")[0], id(node) not in inside) for name in names}
    return found


def _undeclared(source: str, extras: list[str]) -> set[str]:
    """The modules that neither the standard library nor the requirements provide: at the top level those of the base
    and the given extras, inside a function or a condition those of any extra."""
    at_top = {canonicalize_name(r.name) for r in _requirements_of(extras)}
    anywhere = {canonicalize_name(r.name) for r in DIRECT}
    missing = set()
    for module, top in _imports(source):
        if module in sys.stdlib_module_names or module == "evoalign_lib":
            continue
        if canonicalize_name(DISTRIBUTION_OF.get(module, module)) not in (at_top if top else anywhere):
            missing.add(module)
    return missing


def test_undeclared_imports_are_found() -> None:
    source = "import os, torch\nfrom ray.util import ActorPool\ndef f():\n    import ray\n    import flask.views\n"
    assert _undeclared(source, []) == {"ray", "flask"}
    assert _undeclared(source, ["cluster"]) == {"flask"}
    assert _undeclared("from . import paths\nimport yaml\nif True:\n    import triton\n", []) == set()


@pytest.mark.parametrize("path", sorted((paths.ROOT / "evoalign_lib").rglob("*.py")), ids=lambda p: p.name)
def test_library_imports_only_declared_requirements(path: Path) -> None:
    assert _undeclared(path.read_text(), []) == set()


NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_imports_only_declared_requirements(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    # Magics and shell lines are not Python.
    lines = [line for line in "\n".join(code).splitlines() if not line.startswith(("%", "!"))]
    assert _undeclared("\n".join(lines), ["analysis", "notebooks"]) == set()


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = "import evoalign_study.paths, sys; dir(evoalign_lib), evoalign_lib.__version__; "
    script += "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    output = subprocess.run([sys.executable, "-c", script], cwd=paths.ROOT, capture_output=True, text=True, check=True)
    loaded = set(output.stdout.split())
    assert "evoalign_lib" in loaded
    assert not loaded & {"torch", "numpy", "numba", "transformers", "trl", "pandas", "matplotlib"}


def test_notebooks_plan_without_transformers_and_draw_without_torch() -> None:
    """The first cells of each import what its specs need: seconds for everyone who opens it, or verifies artefacts."""
    names = [re.findall(r"from evoalign_study import (\w+) as study", path.read_text()) for path in NOTEBOOKS]
    assert names and all(len(found) == 1 for found in names)
    script = "import sys, evoalign_study.artifacts; print('torch' in sys.modules); import evoalign_study.parameters\n"
    for (name,) in names:  # one process for all: what one imports is there for those after it
        script += f"import evoalign_study.{name}; print('transformers' in sys.modules, {name!r})\n"
    output = subprocess.run([sys.executable, "-c", script], cwd=paths.ROOT, capture_output=True, text=True, check=True)
    assert output.stdout.splitlines() == ["False", *(f"False {name}" for (name,) in names)]


def test_the_trainer_is_an_attribute_of_the_package() -> None:
    from evoalign_lib import ESConfig, ESTrainer, es

    assert (ESConfig, ESTrainer) == (es.ESConfig, es.ESTrainer)
    assert {"ESConfig", "ESTrainer"} < set(dir(evoalign_lib))
    with pytest.raises(AttributeError, match="module 'evoalign_lib' has no attribute 'ESTriner'"):
        evoalign_lib.ESTriner  # noqa: B018


# Trains and replays without what an extra brings; the packages that are absent are named by the arguments.
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


def test_trainer_ledger_and_replay_need_no_extra(tmp_path: Path) -> None:
    # PyTorch, transformers and datasets bring some of what extras name, too
    extras = {canonicalize_name(r.name) for lines in EXTRAS.values() for r in map(Requirement, lines)}
    names = {distribution: module for module, distribution in DISTRIBUTION_OF.items()}
    absent = {names.get(name, name.replace("-", "_")) for name in extras - BROUGHT}
    command = [sys.executable, "-c", ALONE, str(tmp_path), *sorted(absent)]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("replayed\n"), done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_wheel_trains_and_replays_outside_of_a_checkout(tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # it ends every test after 5 minutes; this one's own limit is above

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    source, bin = tmp_path / "source", tmp_path / "venv" / "bin"
    shutil.copytree(paths.ROOT / "evoalign_lib", source / "evoalign_lib")  # a build leaves files beside what it builds
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(paths.ROOT / name, source)
    shutil.copy(paths.ROOT / "constraints.txt", tmp_path)
    for command in (
        [sys.executable, "-m", "venv", "venv"],
        [bin / "python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", source],
        [bin / "python", "-m", "pip", "install", "-q", "-c", "constraints.txt", "--find-links", "dist", "evoalign"],
        [bin / "python", "-c", ALONE, tmp_path],
        [bin / "evoalign", "--version"],
    ):
        done = run(*command)
        assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"evoalign {evoalign_lib.__version__}\n"
    assert "needs a checkout" in " ".join(run(bin / "evoalign", "claims").stderr.replace("│", " ").split())
    compared = run(bin / "evoalign", "compare", "A0", "A1", "A2", "--out", tmp_path / "compared")
    assert compared.returncode == 1 and "evoalign[analysis" in compared.stderr
    assert run(bin / "python", "-c", "import seaborn").returncode == 1


# The repository's files


@functools.cache
def _tracked() -> tuple[Path, ...]:
    """The files in git, and those that would be with the next `git add`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        result = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, so there is no list of tracked files")
    files = [paths.ROOT / name for name in result.stdout.split("\0") if name]
    return tuple(path for path in files if path.is_file())


BINARY = {".gz", ".pdf", ".png", ".safetensors", ".woff2"}
# Split so that this file does not name them itself.
MACHINE_PATHS = ["/wor" + "k/", "/hom" + "e/", "/roo" + "t/", "/User" + "s/", "file:" + "///"]
REGISTRIES = ["pypi" + ".org", "python" + "hosted.org", "extra-index" + "-url", "download.py" + "torch.org"]


def test_no_file_names_a_machine_or_a_package_registry() -> None:
    found = []
    for path in _tracked():
        if path.suffix in BINARY:
            continue
        # The README names PyTorch's public index of CPU wheels: without it an install draws gigabytes of CUDA.
        forbidden = MACHINE_PATHS + (REGISTRIES[:2] if path == paths.ROOT / "README.md" else REGISTRIES)
        text = path.read_text(encoding="utf-8")
        found += [f"{path.relative_to(paths.ROOT)}: {word}" for word in forbidden if word in text]
    assert found == []


RECORDS = r"paper/results/[^/]+/\w+\.jsonl(\.gz)?"  # plain and packed


@pytest.mark.parametrize(
    ("pattern", "limit"),
    [
        (r".*\.safetensors", 6_000_000),
        (rf"(?!{RECORDS}$).*\.jsonl\.gz", 2_500_000),  # ledgers
        (RECORDS, 12 * 2**20),
    ],
    ids=["weights", "ledgers", "records"],
)
def test_weights_ledgers_and_records_stay_small(pattern: str, limit: int) -> None:
    kept = [path for path in _tracked() if re.fullmatch(pattern, path.relative_to(paths.ROOT).as_posix())]
    assert 0 < sum(path.stat().st_size for path in kept) <= limit


def test_the_limits_tell_records_from_ledgers() -> None:
    found = {path for path in _tracked() if re.fullmatch(RECORDS, path.relative_to(paths.ROOT).as_posix())}
    assert found == {file for path in record_files() for file in stored_files(path)}


def test_no_single_notebook_is_large() -> None:
    sizes = {path.name: path.stat().st_size for path in NOTEBOOKS}
    assert {name: size for name, size in sizes.items() if size > 300_000} == {}


def test_the_readme_holds_no_placeholder():
    assert not re.search(r"[A-Z]+_[A-Z]+", (paths.ROOT / "README.md").read_text().replace("PIP_EXTRA_INDEX_URL", ""))
