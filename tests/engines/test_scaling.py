"""The scaling benchmark runs, with a cluster that the engine itself starts and ends."""

import json

import pytest

ray = pytest.importorskip("ray")

from tests.benchmarks import cpu, scaling  # noqa: E402

QUICK = "--models 1M --workers 2 --members 3 --prompts 4 --new 4 --steps 1 --repeats 1".split()


@pytest.mark.slow
def test_it_runs(tmp_path, capsys):
    assert not ray.is_initialized()
    assert scaling.main([*QUICK, "--out", str(tmp_path / "scaling.json")]) == 0
    assert not ray.is_initialized()
    results = json.loads((tmp_path / "scaling.json").read_text())[cpu.device_name()]["scaling over CPU actors"]
    cells = results["1M"]["cells"]
    assert list(cells) == ["1 actors", "2 actors"] and cells["1 actors"]["speed_up"] == 1
    for row in cells.values():
        assert row["seconds"] > 0 and row["idle"] < 1
        assert row["weights"] > 3e6 and 0 < row["sent"] < 3000 and 0 < row["received"] < 3000
    assert "speed_up" in capsys.readouterr().out


def test_gpus_are_a_multiple_of_what_an_engine_takes():
    with pytest.raises(ValueError, match="gpus=3 is not a multiple of tensor_parallel=2"):
        scaling.main(["--gpus", "3", "--tensor-parallel", "2"])
