"""Notebook 03: where its runs come to a level, and what its sentences, tables and figures make of that."""

import numpy as np
import pytest
from evoalign_study import collapse, paths
from evoalign_study import nb03_conciseness as study
from evoalign_study.rendering import csv_text
from helpers import written_out
from test_notebooks import loaded


@pytest.fixture(scope="module")
def world():
    """The notebook's settings, its records by group, and what it finds."""
    run, records = loaded(study)
    return run, records, study.results(run, records, records["published"])


def test_what_the_notebook_writes_out_is_the_librarys(world):
    hacked, first_reached = written_out(study.NOTEBOOK, "hacked", "first_reached")
    runs = [(r, d) for arm in study.ARMS for r in world[1][arm] for d in ("greedy", "t1")]
    found = [hacked(r["curve"][f"proxy_{d}"], r["curve"][f"right_{d}"]) for r, d in runs]
    assert found == [collapse.end(r, d) == "hacked" for r, d in runs] and set(found) == {True, False}
    for record, decoding, level in [(r, d, x) for r, d in runs[:8] for x in (-20, -5)]:
        library, here = collapse.right_at(record, decoding, at_proxy=level), first_reached(record, decoding, level)
        assert (here is None) if library is None else here == pytest.approx(library.mean(), abs=1e-4)


def test_where_a_run_first_comes_to_a_level():
    curve = {"proxy_greedy": [-9.0, -4.0, -1.0, -2.0], "right_greedy": [1.0, 0.8, 0.6, 0.7], "kl": [0.0, 0.5, 1.0, 2.0]}
    record = {"curve": curve | {"right_bits_greedy": ["80"] * 4}, "test": {"n": 1}}
    assert study.reach(record, "greedy", "at_proxy", -4)["at"] == -4.0
    assert "best" not in study.reach(record, "greedy", "at_kl", 0.5)
    assert study.reach(record, "greedy", "at_proxy", -0.5) == {}  # it never gets there
    assert study.reach(record, "greedy", "at_proxy", -10).keys() == {"first"}  # it began beyond


def test_what_a_walk_has_lost_by_the_same_step_is_given_back():
    curve = {"step": [0, 1, 4], "proxy_greedy": [-9.0, -4.0, -1.0], "right_bits_greedy": ["c0", "80", "00"]}
    run = {"curve": curve, "test": {"n": 2}}
    walk = {"curve": curve | {"right_bits_greedy": ["c0", "40", "00"]}, "test": {"n": 2}}
    assert collapse.right_at(run, "greedy", at_proxy=-4).tolist() == [1, 0]
    assert collapse.right_at(run, "greedy", at_proxy=-4, walk=walk).tolist() == [2, 0]
    with pytest.raises(ValueError, match="make it again"):
        collapse.right_at(run, "greedy", at_proxy=-4, walk=walk | {"curve": curve | {"step": [0, 2, 4]}})


def test_figures_name_what_stands_out(world, drawn):
    run, records, found = world
    fig, plotted = study.levels(found)
    assert csv_text(plotted) == (paths.FIGURES / "conciseness_levels.csv").read_text(encoding="utf-8")
    assert [text.get_text() for text in fig.axes[0].texts] == ["ES does not get there"]  # at temperature 1, at -5
    fig, _ = study.es_map(run, records)
    walk, noise = fig.axes[0].lines
    critical = found["breaking sigma"]
    walked = critical * (run.es_population_size / run.es_steps) ** 0.5
    for place, value, grid in ((noise.get_ydata()[0], critical, run.sigma), (walk.get_xdata()[0], walked, run.alpha)):
        assert place == pytest.approx(np.interp(np.log(value), np.log(grid), range(len(grid))), abs=0.1)
