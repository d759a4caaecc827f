"""Fixtures and settings for the engine tests."""

import os

# vLLM's own switch for its CPU tests, read once by each process: a model that is not run eagerly is traced but not
# compiled to C++, which would take longer than the tests. `test_colocated.test_a_run_and_its_record` does compile.
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")

import pytest
from helpers import saved
from small_models import model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model in a Hugging Face folder, as a user would have it."""
    return saved(tmp_path_factory.mktemp("model"), model())
