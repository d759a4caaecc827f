"""evoalign compare: it measures folders, adapters and ledgers, and says what a random direction would show as well."""

import gzip
from functools import partial
from pathlib import Path

import es_runs
import numpy as np
import pandas as pd
import pytest
import test_weights
import torch
from evoalign_study import paths
from helpers import state, typed

from evoalign_lib import cli, comparison, ledger
from evoalign_lib.es import ESTrainer
from evoalign_lib.weight_files import untied, weights

LEDGERS = sorted((paths.RESULTS / "01_es_countdown" / "ledgers").glob("*.gz"), key=lambda path: path.stat().st_size)
SHAPES = {
    "model.embed_tokens.weight": (50, 16),
    **{f"model.layers.{i}.mlp.up_proj.weight": (64, 16) for i in range(14)},
    "model.norm.weight": (16,),
    "lm_head.weight": (50, 16),
}


draw = partial(state, shapes=SHAPES)
folder = partial(test_weights.folder, tie_word_embeddings=False)


def plus(start: dict, *displacements: dict) -> dict:
    return {name: start[name] + sum(d[name] for d in displacements) for name in start}


@pytest.fixture
def base(tmp_path) -> str:
    return folder(tmp_path / "base", draw(0, 0.02))


def run(*arguments: str, fails: bool = False) -> str:
    code, output = typed(cli.app, "compare", *arguments)
    assert code == fails or code == 2 * fails, output
    return output


@pytest.fixture
def begun(tmp_path) -> list[Path]:
    """The first 10 steps of two committed runs, as killed runs leave them."""
    paths_ = [tmp_path / f"{i}.jsonl" for i in range(2)]
    for path, packed in zip(paths_, LEDGERS, strict=False):
        path.write_bytes(b"".join(gzip.decompress(packed.read_bytes()).splitlines(keepends=True)[:11]))
    return paths_


def test_two_ledgers_of_a_shipped_base(begun, tmp_path):
    a, b = begun
    said = run("A0", a, b, "--out", tmp_path / "out")
    starts = weights("A0")
    displacements = [
        np.concatenate([(end[name].double() - starts[name].double()).numpy().ravel() for name in starts])
        for end in (weights(a), weights(b))
    ]
    for end, d, path in zip("AB", displacements, (a, b), strict=True):
        run_ = ledger.read(path)
        t = len(ledger.updates(run_, len(run_.steps)))
        ratio = np.linalg.norm(d) / (run_.settings["alpha"] * np.sqrt(d.size * t / run_.settings["population_size"]))
        assert abs(ratio - 1) < 0.01
        assert f"The norm of {end}, {np.linalg.norm(d):.3g}, is {ratio:.4f} times alpha sqrt(d T_eff / N) = " in said
        assert f"(alpha 0.01, T_eff {t}, N 30)" in said and f"layers of {end} are those of its sizes" in said
    cosine = displacements[0] @ displacements[1] / np.prod([np.linalg.norm(d) for d in displacements])
    assert f"cosine of A and B: {cosine:.4f}, random directions ±0.0052 (95 %), z " in said
    assert "tied embedding: share of |D|^2 over share of d" in said and "140,928" in said
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["compare.csv", "compare.pdf", "compare.png", "tensors.csv"]
    rows = pd.read_csv(tmp_path / "out" / "compare.csv")
    assert list(rows["layer"]) == ["embedding (tied)", "layer 0", "layer 1", "final norm"]
    np.testing.assert_allclose(rows[["size_share", "share_a", "share_b"]].sum(), 1, rtol=1e-4)
    assert len(pd.read_csv(tmp_path / "out" / "tensors.csv")) == len(starts)


def test_the_norm_of_a_run_that_decays_toward_its_start(tmp_path):
    """Each update leaves a share of what came before; a tied one does, too, and adds nothing itself."""

    def tied_at_the_end(completions, trainer_state, **columns):
        return [1.0 if trainer_state.global_step == 4 else float(len(text)) for text in completions]

    settings = {"population_size": 4, "sigma": 0.1, "alpha": 0.02, "anchor_decay": 0.3, "max_completion_length": 4}
    prompts = [{"prompt": text} for text in ("Using the numbers", "1 2 3")]
    args = es_runs.config(tmp_path, **settings | {"max_steps": 5, "prompts_per_step": None})
    ESTrainer("A0", tied_at_the_end, args, prompts).train()
    end, start, run_ = weights(tmp_path / ledger.NAME), weights("A0"), es_runs.read(tmp_path)
    moving = [t for t, step in enumerate(run_.steps) if np.ptp(step.rewards)]
    assert 0 < len(moving) < 5 and 4 not in moving
    expected = comparison._expected(end)
    moved = sum(float((end[name].double() - start[name].double()).square().sum()) for name in start) ** 0.5
    by_hand = 0.02 * np.sqrt(expected.d / 4 * sum(0.7 ** (2 * (4 - t)) for t in moving))
    assert expected.norm == pytest.approx(by_hand) and moved == pytest.approx(by_hand, rel=0.01)
    assert f"T_eff {len(moving)}" in expected.settings and "lambda 0.3" in expected.settings


def test_a_random_direction_and_a_concentrated_one_are_told_apart(base, tmp_path):
    shared = draw(3, 2e-5)
    head = {name: torch.zeros(s) if name != "lm_head.weight" else torch.full(s, 2e-4) for name, s in SHAPES.items()}
    a = folder(tmp_path / "a", plus(draw(0, 0.02), draw(1, 1e-3), shared))
    b = folder(tmp_path / "b", plus(draw(0, 0.02), shared, head))
    found = comparison.compare(base, a, b)
    shares_a, shares_b, rounding, cosine = found.sentences()
    assert "layers of A are those of its sizes" in shares_a
    assert "layers of B are not those of its sizes" in shares_b and "head has " in shares_b
    assert "rounding, not sparse training" in rounding and "the band of a random direction" in cosine
    table = found.table().set_index("quantity")
    assert float(table.loc["head: share of |D|^2 over share of d", "B"]) > 10
    left, right = comparison.figure(found).axes
    np.testing.assert_allclose(left.lines[1].get_ydata(), found.tensors.by("layer").shares[:, 1])
    np.testing.assert_allclose(right.lines[0].get_ydata(), found.frame("layer")["cosine"])
    bars = [patch.get_height() for patch in right.patches]
    np.testing.assert_allclose(bars, 2 * 1.959964 * found.frame("layer")["cosine_std"])
    texts = [label.get_text() for label in right.get_xticklabels()]
    assert texts == ["embedding", "0", "2", "4", "6", "8", "10", "12", "final norm", "head"]


def test_a_tied_base_and_an_end_with_a_head_of_its_own(begun, tmp_path):
    """Those that are tied have a head with the embedding's entries, which count twice."""
    start, moved, own = draw(0, 0.02), plus(draw(0, 0.02), draw(1, 1e-3)), plus(draw(0, 0.02), draw(2, 1e-3))
    for tied in (start, moved):
        tied["lm_head.weight"] = tied["model.embed_tokens.weight"].clone()
    stored = [folder(tmp_path / str(i), each) for i, each in enumerate((start, moved, own))]
    whole = comparison.compare(*stored).table()
    for path in stored[:2]:
        (Path(path) / "config.json").write_text('{"tie_word_embeddings": true}')
    assert comparison.compare(*stored).table().equals(whole)
    end, base = (untied(weights(source), ["lm_head.weight"]) for source in (begun[0], "A0"))
    moves = [float((end[name] - base[name]).square().sum()) for name in end]
    assert sum(moves) ** 0.5 == pytest.approx(comparison._expected(end).norm, rel=0.01)


def test_what_did_not_move_and_what_was_rounded(base, tmp_path):
    halved = {name: tensor.bfloat16() for name, tensor in draw(0, 0.02).items()}
    b = folder(tmp_path / "b", halved)
    said = comparison.compare(base, base, b).text()
    assert "A has the weights of the base: nothing moved." in said
    assert "it is stored as bfloat16" in said
    assert "The cosine is not defined, since one of the two did not move." in said


def test_what_cannot_be_compared_is_said_before_anything_is_read(base, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison.geometry, "measure", lambda *_: pytest.fail("measured"))
    smaller = draw(0)
    smaller["lm_head.weight"] = smaller["lm_head.weight"][:49]
    other = folder(tmp_path / "smaller", smaller)
    quantised = folder(tmp_path / "quantised", draw(0))
    (Path(quantised) / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    for arguments, named in (
        ((base, base, tmp_path / "nothing"), "nothing"),
        ((base, base, other), "(49, 16)"),
        ((base, quantised, base), "awq"),
        ((base, LEDGERS[0], base), "not weights of one model"),
        ((base, base, base, "--out", Path(base) / "config.json"), "is a file"),
    ):
        assert named in run(*arguments, fails=True).replace("\n", " "), named


def test_runs_that_drew_the_same_noise_have_no_null_of_the_cosine(begun):
    said = comparison.compare("A0", begun[0], begun[0]).sentences()[-1]
    assert said.startswith("The cosine is 1.0000. A and B drew the same noise (one run key)")
