"""Storages are counted from their first tensor to their last, and each by its component."""

import numpy as np
import pytest
import torch
from evoalign_study.memory_profile import Allocations

KIB = 1024


def kib(*numbers: int) -> torch.Tensor:
    return torch.zeros(*numbers, 256)


def test_the_peak_is_what_was_alive_at_once():
    with Allocations() as seen:
        first = kib(3)
        del first  # gone before the others come
        second = kib(2)
        third = second + 1
        view = third[0]
        del second, third
    assert seen.at_peak == {"temporaries": 4 * KIB} and sum(seen.now.values()) == 2 * KIB and view.shape == (256,)


def test_the_peak_is_forgotten_when_a_step_begins():
    with Allocations() as seen:
        kib(8)
        kept = kib(1)
        seen.begin()
        kept + kept
    assert seen.at_peak == {"temporaries": 2 * KIB}


def test_what_autograd_keeps_and_gradients_have_their_components():
    layer = torch.nn.Linear(256, 256, bias=False)
    with Allocations() as seen:
        seen.name("weights", layer.parameters())
        seen.follow(layer)
        loss = layer(kib(4)).square().sum()
        assert seen.now["saved activations"] == 8 * KIB  # the input, and the output of which the square is taken
        loss.backward()
    assert seen.now["weights"] == seen.now["gradients"] == 256 * KIB and not seen.now["saved activations"]


def test_arrays_of_numpy_are_counted_while_they_are_read_or_held():
    held, passing = np.zeros(512, np.float32), np.zeros(1024, np.float32)
    with Allocations() as seen:
        seen.hold("master", held)
        torch.from_numpy(held) * 2
        assert seen.at_peak == {"master": 2 * KIB, "temporaries": 2 * KIB}
        torch.from_numpy(passing) * 2
    assert seen.at_peak == {"master": 2 * KIB, "noise or factors": 4 * KIB, "temporaries": 4 * KIB}


def test_a_component_by_operation_and_shape():
    with Allocations(lambda operation, tensor: "logits" if tensor.shape[-1] == 256 else None) as seen:
        held = kib(1), torch.zeros(512, 2)
    assert seen.at_peak == {"logits": KIB, "temporaries": 4 * KIB} and len(held) == 2


def test_parameters_that_became_views_are_counted_once():
    flat = torch.zeros(512)
    with Allocations() as seen:
        seen.name("weights", [flat[:256], flat[256:], flat])
    assert seen.now["weights"] == sum(seen.now.values()) == 2 * KIB


def test_a_status_without_the_field_is_refused():
    from evoalign_study.memory_profile import resident

    assert resident("VmRSS") > 10 * KIB * KIB
    with pytest.raises(RuntimeError, match="has no VmNone"):
        resident("VmNone")
