"""What several files of tests share."""

import pytest

from evoalign_lib import tiny


@pytest.fixture(scope="session")
def committed_verdicts():
    """Every claim judged in full by the committed records, once."""
    from evoalign_lib import claims

    return claims.evaluate_all()


@pytest.fixture(scope="module")
def run(request):
    """The parameters and settings, at scale tiny, of the notebook whose module the file of tests calls `study`."""
    from evoalign_lib.study import parameters

    given = {"scale": "tiny", "model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": True}
    return parameters.check_parameters(given, request.module.study.presets())


@pytest.fixture(scope="module")
def records(request, run):
    """Group -> committed records of that notebook."""
    from evoalign_lib.study.notebooks.loading import Loader

    if not all((tiny.bases_folder() / base).is_dir() for base in tiny.BASES):
        pytest.skip("the bases have not been trained yet")
    load = Loader(request.module.study.NOTEBOOK, run, request.module.study.groups)
    return load(*load.names)


@pytest.fixture
def drawn():
    """Figures without a screen, in the project's style; both are undone."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    from evoalign_lib import style

    mpl.use("agg")
    with mpl.rc_context():
        style.use()
        yield
    plt.close("all")
