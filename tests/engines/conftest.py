"""What several tests of engines are given."""

import pytest
from helpers import tokenizer
from small_models import model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model in a Hugging Face folder, as a user has one."""
    place = tmp_path_factory.mktemp("model")
    model().save_pretrained(place)
    tokenizer().save_pretrained(place)
    return str(place)
