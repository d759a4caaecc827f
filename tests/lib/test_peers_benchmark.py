"""The comparison with peers refuses what it could not run, and its arms do the same work. Needs no peer's code."""

import numpy as np
import pytest

from tests.benchmarks import cpu, peers


def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch, capsys):
    def refusal(*argv):
        with pytest.raises(SystemExit, match="2"):
            peers.arguments([str(a) for a in argv])
        return capsys.readouterr().err

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for peer, kind in peers.PEERS.items():
        for file in reversed(kind.files):  # a checkout lacks this file, and those before
            assert f"--{peer} {tmp_path}" in (said := refusal(f"--{peer}", tmp_path)) and kind.files[0] in said
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
    given = "--qiu", tmp_path
    assert peers.arguments(list(map(str, given))).folders == {"qiu": tmp_path}
    assert "--qiu FOLDER or --torcheggroll FOLDER" in refusal()
    assert "even" in refusal(*given, "--members", 3) and "--repeats" in refusal(*given, "--repeats", 0)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "OMP_NUM_THREADS=1" in refusal(*given)


def test_both_decoders_make_the_same_tokens_and_none_ends_early():
    # A0 ends its own completions, unlike random models: the end token has to be taken from both
    plan = cpu.Plan(members=2, rows=(12,), new=20)
    with cpu.threads(1):
        ours, theirs = peers.Ours("0.14M", plan), peers.Peer("0.14M", plan)
        ended = cpu.engine_of(cpu.build("0.14M"), 12, plan).generate("train")[0]
        tokens = ours.greedy()
        assert min(len(raw) for _, raw in ended) < 20
        assert tokens == theirs.greedy() and {len(raw) for raw in tokens} == {20}
        assert (ours.step() > 0).all()
        theirs.generate()
    with pytest.raises(RuntimeError, match="not 2 times"):
        theirs._taken(2)


def test_ratios_are_those_within_a_round():
    seconds = {"ours": np.array([[1.0, 1.0], [2.0, 1.0], [4.0, 2.0]])}
    seconds["qiu"] = seconds["ours"] * np.array([[3.0, 2.0], [5.0, 2.0], [4.0, 2.0]])
    found = peers.summary(seconds, {"ours": [[1], [2]], "qiu": [[1], [3]]}, 8)
    for kind, expected in (("wall", [4, 3, 5]), ("core", [2, 2, 2])):
        assert [found["qiu"][f"{what} ours/theirs, {kind} time"] for what in ("median", "least", "most")] == expected
    assert found["qiu"]["same_tokens"] == 0.5 and found["ours"]["completions_a_second, wall time"] == 4
