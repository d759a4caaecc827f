"""Fixtures that several test files share."""

import os
import pickle
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def committed_records():
    """The committed records of scale tiny; tests must not change them."""
    from evoalign_study import claims

    return claims.committed_records("tiny")


@pytest.fixture(scope="session")
def committed_verdicts(tmp_path_factory):
    """The verdicts of all claims from the committed records, computed once even if several processes run the tests."""
    from evoalign_study import claims

    folder = tmp_path_factory.getbasetemp()  # a new folder for each run of the tests
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    file = folder / "committed_verdicts.pickle"
    with FileLock(f"{file}.lock"):
        if not file.is_file():
            file.write_bytes(pickle.dumps(claims.evaluate_all()))
        return pickle.loads(file.read_bytes())


@pytest.fixture(scope="module")
def es_runs(request, tmp_path_factory):
    """Records of the (arm, seeds) pairs in the test file's `RUNS`, trained with its `SETTINGS`.

    Runs start from its `BASE`, by default "A0". Their weights are kept in a folder for that test file.
    """
    from evoalign_study import paths, sweep
    from evoalign_study.kinds.train import train_specs

    base = getattr(request.module, "BASE", "A0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        groups = (train_specs(arm, [base], range(n), request.module.SETTINGS, "tiny") for arm, n in request.module.RUNS)
        yield [[sweep.run(spec, "nb", "commit") for spec in specs] for specs in groups]


@pytest.fixture
def drawn():
    """Draw figures without a screen and in the project's style; both settings are undone."""
    import matplotlib as mpl
    from evoalign_study import style
    from matplotlib import pyplot as plt

    mpl.use("agg")
    with mpl.rc_context():
        style.use()
        yield
    plt.close("all")


HERE = Path(__file__).parents[2]
PLACES = {"ROOT": ".", "NOTEBOOKS": "notebooks", "FIGURES": "figures", "PAPER": "paper", "RUNS": "runs"}
PLACES |= {"RESULTS": "paper/results", "GENERATED": "paper/generated"}


def _enter(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    from evoalign_study import paths

    patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{HERE / 'notebooks'}")
    for variable in ("EVOALIGN_ARTIFACTS", "EVOALIGN_RUN_DIR"):
        patch.delenv(variable, raising=False)
    for name, place in PLACES.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        patch.setattr(paths, name, folder / place)
    return folder


@pytest.fixture(scope="session")
def enter():
    """A function that makes the study use a folder as its repository."""
    return _enter


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """An empty repository that replaces the real one."""
    return _enter(tmp_path, monkeypatch)
