"""evoalign compare: it measures folders, adapters and ledgers, and says what a random direction would show as well."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from evoalign_study import paths
from safetensors.torch import save_file
from typer.testing import CliRunner

from evoalign_lib import cli, comparison, ledger
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.weight_files import weights

LEDGERS = sorted((paths.RESULTS / "01_es_countdown" / "ledgers").glob("*.gz"), key=lambda path: path.stat().st_size)
SHAPES = {
    "model.embed_tokens.weight": (50, 16),
    **{f"model.layers.{i}.mlp.up_proj.weight": (64, 16) for i in range(14)},
    "model.norm.weight": (16,),
    "lm_head.weight": (50, 16),
}


def draw(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {n: torch.from_numpy((scale * rng.standard_normal(s)).astype(np.float32)) for n, s in SHAPES.items()}


def folder(path: Path, tensors: dict) -> str:
    path.mkdir()
    (path / "config.json").write_text('{"tie_word_embeddings": false}')
    save_file(tensors, path / "model.safetensors")
    return str(path)


def plus(start: dict, *displacements: dict) -> dict:
    return {name: start[name] + sum(d[name] for d in displacements) for name in start}


@pytest.fixture
def base(tmp_path) -> str:
    return folder(tmp_path / "base", draw(0, 0.02))


def run(*arguments: str, fails: bool = False) -> str:
    result = CliRunner().invoke(cli.app, ["compare", *map(str, arguments)], env={"COLUMNS": "300"})
    assert result.exit_code == fails or result.exit_code == 2 * fails, result.output
    return result.output


@pytest.fixture
def begun(tmp_path) -> Path:
    """The first 10 steps of a committed run, as a killed run leaves them."""
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(gzip.decompress(LEDGERS[1].read_bytes()).splitlines(keepends=True)[:11]))
    return path


def test_two_ledgers_of_a_shipped_base(begun, tmp_path):
    a, b = LEDGERS[0], begun
    said = run("A0", a, b, "--out", tmp_path / "out")
    starts = weights("A0")
    displacements = [
        np.concatenate([(end[name].double() - starts[name].double()).numpy().ravel() for name in starts])
        for end in (weights(a), weights(b))
    ]
    for end, d, path in zip("AB", displacements, (a, b), strict=True):
        run_ = ledger.read(path)
        t = len(ledger.updates(run_, len(run_.steps)))
        formula = run_.settings["alpha"] * np.sqrt(d.size * t / run_.settings["population_size"])
        ratio = np.linalg.norm(d) / formula
        assert abs(ratio - 1) < 0.01
        assert f"The norm of {end}, {np.linalg.norm(d):.3g}, is {ratio:.4f} times alpha sqrt(d T_eff / N) = " in said
        assert f"(alpha 0.01, T_eff {t}, N 30)" in said
        assert f"The shares of layers of {end} are those of its sizes" in said
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
    settings |= {"max_steps": 5, "workers": 1, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"}
    prompts = [{"prompt": text} for text in ("Using the numbers", "1 2 3")]
    ESTrainer("A0", tied_at_the_end, ESConfig(output_dir=str(tmp_path), **settings), prompts).train()
    end, start = weights(tmp_path / ledger.NAME), weights("A0")
    run_ = ledger.read(tmp_path / ledger.NAME)
    moving = [t for t, step in enumerate(run_.steps) if np.ptp(step.rewards)]
    assert 0 < len(moving) < 5 and 4 not in moving
    expected = comparison._expected(end)
    moved = sum(float((end[name].double() - start[name].double()).square().sum()) for name in start) ** 0.5
    by_hand = 0.02 * np.sqrt(expected.d / 4 * sum(0.7 ** (2 * (4 - t)) for t in moving))
    assert expected.norm == pytest.approx(by_hand) and moved == pytest.approx(by_hand, rel=0.01)
    assert expected.formula == "sqrt(d sum_t c_t^2 (1 - lambda)^(2 (T - t)))"
    assert expected.settings == f"alpha 0.02, T_eff {len(moving)}, N 4, lambda 0.3"


def test_a_random_direction_and_a_concentrated_one_are_told_apart(base, tmp_path):
    shared = draw(3, 2e-5)
    head = {name: torch.zeros(s) if name != "lm_head.weight" else torch.full(s, 2e-4) for name, s in SHAPES.items()}
    a = folder(tmp_path / "a", plus(draw(0, 0.02), draw(1, 1e-3), shared))
    b = folder(tmp_path / "b", plus(draw(0, 0.02), shared, head))
    found = comparison.compare(base, a, b, alpha=1e-3, steps=30, population=30)
    said = found.sentences()
    assert len(said) == 5
    assert "times alpha sqrt(d T_eff / N)" in said[0] and "any ES with these settings moves as far" in said[0]
    assert said[1].startswith("The shares of layers of A are those of its sizes (distance 0.0")
    assert said[2].startswith("The shares of layers of B are not those of its sizes") and "head has " in said[2]
    assert said[3].startswith("Of B 0.") and said[3].endswith("the difference is rounding, not sparse training.")
    assert "lies outside the band" in said[4] or "lies within the band" in said[4]
    table = found.table().set_index("quantity")
    assert float(table.loc["head: share of |D|^2 over share of d", "B"]) > 10
    fig = comparison.figure(found)
    left, right = fig.axes
    np.testing.assert_allclose(left.lines[1].get_ydata(), found.tensors.by("layer").shares[:, 1])
    np.testing.assert_allclose(right.lines[0].get_ydata(), found.frame("layer")["cosine"])
    bars = [patch.get_height() for patch in right.patches]
    np.testing.assert_allclose(bars, 2 * 1.959964 * found.frame("layer")["cosine_std"])
    texts = [label.get_text() for label in right.get_xticklabels()]
    assert texts == ["embedding", "0", "2", "4", "6", "8", "10", "12", "final norm", "head"]


def test_what_did_not_move_and_what_was_rounded(base, tmp_path):
    halved = {name: tensor.bfloat16() for name, tensor in draw(0, 0.02).items()}
    b = folder(tmp_path / "b", halved)
    said = run(base, base, b, "--out", tmp_path / "out")
    assert "A has the weights of the base: nothing moved." in said
    assert "B is stored as bfloat16: what moved by less than its rounding was lost" in said
    assert "The cosine is not defined, since one of the two did not move." in said
    assert (tmp_path / "out" / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_be_compared_is_said_before_anything_is_read(base, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison.geometry, "measure", lambda *_: pytest.fail("measured"))
    smaller = draw(0)
    smaller["lm_head.weight"] = smaller["lm_head.weight"][:49]
    other = folder(tmp_path / "smaller", smaller)
    quantised = folder(tmp_path / "quantised", draw(0))
    (Path(quantised) / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    for arguments, message in (
        ((base, base, tmp_path / "nothing"), "does not exist"),
        (
            (base, base, other),
            f"'lm_head.weight' has the shape (50, 16) in {base} and has the shape (49, 16) in {other}",
        ),
        ((base, quantised, base), "is quantised (quant_method='awq')"),
        ((base, LEDGERS[0], base), "not weights of one model"),
        ((base, base, base, "--alpha", "0.1"), "steps and population missing"),
        (("A0", LEDGERS[0], "A1", "--alpha", "1", "--steps", "1", "--population", "2"), "leave the options out"),
        ((base, base, base, "--out", Path(base) / "config.json"), "is a file"),
    ):
        assert message in run(*arguments, fails=True).replace("\n", " "), message


def test_runs_that_drew_the_same_noise_have_no_null_of_the_cosine(begun):
    said = comparison.compare("A0", begun, begun).sentences()[-1]
    assert said.startswith("The cosine is 1.0000. A and B drew the same noise (one run key)")
