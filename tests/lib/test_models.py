"""Models are found by name, folder or shipped base, and are told apart by digests."""

import hashlib

import pytest
import torch
from helpers import random_model

from evoalign_lib import models, noise, precision, tiny


def test_a_shipped_base_is_loaded_by_name(capfd):
    model, tokenizer = models.load("A0")
    expected, _ = tiny.load("A0")
    assert models.base_digest(model) == models.base_digest(expected)
    assert (model.dtype, tokenizer.pad_token_id) == (torch.float32, tiny.tokenizer().pad_token_id)
    assert not model.training and capfd.readouterr().err == ""  # no bar
    half, _ = models.load("A0", None, {"dtype": torch.bfloat16})
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, dict(expected.named_parameters())[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("base", tiny.SHIPPED)
def test_what_is_shipped_has_its_digest_without_a_model(base):
    file = tiny.bases_folder() / base / "model.safetensors"
    assert models.stored_digest(file) == models.base_digest(tiny.load(base)[0])


def test_names_and_places(tmp_path, monkeypatch):
    assert models.name_of(tiny.load("A0")[0]) == models.name_of(models.load("A0")[0]) == "A0"
    assert models.name_of(random_model()) is None
    random_model().save_pretrained(tmp_path / "own")
    loaded, _ = models.load(str(tmp_path / "own"), tiny.tokenizer())
    assert models.name_of(loaded) == str(tmp_path / "own")
    assert models.place("A0") == str(tiny.bases_folder() / "A0")
    assert models.place("someone/model") == "someone/model"
    monkeypatch.chdir(tmp_path)
    assert models.place("own") == str(tmp_path / "own")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_has_the_digest_of_its_float32_weights(dtype):
    model = random_model().to(dtype)
    by_hand = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        by_hand.update(name.encode() + b"\0" + parameter.detach().float().numpy().tobytes())
    assert models.base_digest(model) == by_hand.hexdigest()[:16]
    weights = precision.open_weights(model)
    assert precision.digest(weights.layout, weights.flat) == by_hand.hexdigest()


def test_a_folder_has_the_digest_of_its_files(tmp_path):
    random_model().save_pretrained(tmp_path)
    found = models.origin_digest(str(tmp_path))
    assert len(found) == 16 and models.origin_digest(str(tmp_path)) == found
    (tmp_path / "notes.txt").write_text("not part of the model")
    assert models.origin_digest(str(tmp_path)) == found
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert models.origin_digest(str(tmp_path)) != found
    path.unlink()
    with pytest.raises(ValueError, match=r"has no \*.safetensors: weights of other formats are not loaded"):
        models.origin_digest(str(tmp_path))


def test_weights_in_other_orders_have_one_digest():
    """Names and values count, not where a layout puts them."""
    layouts = [
        noise.Layout.from_shapes(order) for order in ([("a", (3,)), ("b", (2, 2))], [("b", (2, 2)), ("a", (3,))])
    ]
    found = []
    for layout in layouts:
        flat = noise.noise_vector(layout, 5)
        found.append((precision.digest(layout, flat), flat.tobytes()))
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]
