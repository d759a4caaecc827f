"""The simulation of GPUs keeps the laws of queues; the fitted laws of scaling find what was planted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evoalign_lib.analysis import scaling
from evoalign_lib.analysis.scaling import Machine, evolution_step, fit, policy_step

ONE_TOKEN = Machine(slots=1, step=1.0, sequence=0.0)
GPUS = [2**i for i in range(9)]


LENGTHS = arrays(np.int64, st.tuples(st.integers(1, 9), st.integers(1, 6)), elements=st.integers(1, 50))
MACHINES = st.builds(
    Machine,
    slots=st.integers(1, 8),
    step=st.floats(0.1, 5),
    sequence=st.floats(0, 2),
    prefill=st.floats(0, 3),
    member=st.floats(0, 10),
)


@given(LENGTHS, st.booleans())
def test_one_slot_of_one_gpu_takes_the_sum_of_lengths(matrix, shared):
    for step in (evolution_step(ONE_TOKEN, matrix, 1, shared), policy_step(ONE_TOKEN, matrix, 1)):
        assert (step.generation, step.idle, step.total) == (matrix.sum(), 0, matrix.sum())


@given(MACHINES, LENGTHS, st.integers(1, 12))
def test_the_time_lies_between_the_bounds_of_list_scheduling(machine, matrix, gpus):
    each = [evolution_step(machine, row[None], 1).generation for row in matrix]
    work, longest = sum(each), max(each)
    step = evolution_step(machine, matrix, gpus)
    assert max(work / gpus, longest) <= step.generation * (1 + 1e-9)
    assert step.generation <= (work / gpus + (1 - 1 / gpus) * longest) * (1 + 1e-9)  # Graham 1966
    assert step.idle == pytest.approx(1 - work / (gpus * step.generation), abs=1e-9)


def test_a_small_batch_as_a_reader_counts_it():
    machine = Machine(slots=2, step=10, sequence=1, prefill=100, member=1000)
    # 2 and 5 begin; 2 steps of two, then 3 takes the place of 2: 3 steps of two end both; 1 has a step alone
    member = 1000 + 200 + 2 * 12 + 100 + 3 * 12 + 100 + 1 * 11
    step = evolution_step(machine, [[2, 5, 3, 1]], 1)
    assert (step.generation, step.total) == (member, member)
    # requests 2 and 3 go to one GPU, 5 and 1 to the other
    shared = evolution_step(machine, [[2, 5, 3, 1]], 2, shared=True)
    first, second = 200 + 2 * 12 + 1 * 11, 200 + 1 * 12 + 4 * 11
    assert shared.generation == second
    assert shared.idle == pytest.approx(1 - (first + second) / (2 * second))


def test_updates_and_messages_as_a_reader_counts_them():
    machine = Machine(1, 1, 0, update=3, train_token=2, optimizer=7, parameters=100, latency=0.5, bandwidth=10)
    es = evolution_step(machine, [[1], [1], [1]], 4)
    assert es.update == 3 * 3
    assert es.communication == pytest.approx(2 * 0.5 + 3 * 8 * 3 / 4 / 10)
    grpo = policy_step(machine, [[4, 3], [2, 1], [5, 6]], 4, prompt_tokens=10)
    assert grpo.update == (4 + 10 + 5 + 10) * 2 + 7  # the first GPU has the first and the fifth completion
    assert grpo.communication == pytest.approx(6 * (0.5 + 200 / 4 / 10) + 2 * 0.5 + 200 / 10)
    alone = policy_step(machine, [[4, 3]], 1)
    assert (alone.communication, evolution_step(machine, [[1]], 1).communication) == (0, 0)


@settings(max_examples=25)
@given(st.floats(0, 1), st.floats(0, 0.1), st.floats(0.01, 1e4), st.sampled_from([GPUS, GPUS[4:], [3, 5, 128]]))
def test_fits_recover_planted_parameters(serial, kappa, one, gpus):
    found = fit("amdahl", gpus, one / scaling.usl(gpus, serial))
    assert found.parameters["serial"].value == pytest.approx(serial, abs=1e-6)
    assert found.one == pytest.approx(one, rel=1e-6) and found.error < 1e-6
    found = fit("usl", gpus, one / scaling.usl(gpus, serial, kappa))
    assert found.parameters["sigma"].value == pytest.approx(serial, abs=1e-5)
    assert found.parameters["kappa"].value == pytest.approx(kappa, abs=1e-5)


def test_published_times_are_a_simulated_step_and_one_thing_that_it_lacks():
    gpus, simulated = np.array([16, 64, 128]), np.array([40.0, 12.0, 7.0])

    def found(times):
        fitted = scaling.fit_published(gpus, simulated, times)
        assert fitted.times(gpus, simulated) == pytest.approx(times, rel=3 * fitted.error + 1e-9)
        return fitted.scale, fitted.overhead, fitted.work, fitted.error

    assert found(0.5 * simulated + 3) == pytest.approx((0.5, 3, 0, 0), abs=1e-9)  # scales worse
    assert found(0.5 * simulated + 300 / gpus) == pytest.approx((0.5, 0, 300, 0), abs=1e-9)  # scales better
    scale, _, work, error = found(1000 / gpus**1.2)  # better than work that divides evenly
    assert scale == 0 and work > 0 and error > 0.05


@given(st.integers(2, 256), st.floats(0.1, 10), st.floats(1, 1e3), st.floats(0, 1))
def test_at_break_even_both_arms_spend_equally_long(gpus, update, bandwidth, latency):
    machine = Machine(1, 1, 0, update=update, optimizer=2, parameters=10**6, bandwidth=bandwidth, latency=latency)
    n = scaling.break_even_members(machine, gpus)
    ours = n * update + machine.rewards(0, gpus) + n * (machine.rewards(1, gpus) - machine.rewards(0, gpus))
    assert ours == pytest.approx(machine.gradients(gpus) + machine.optimizer + machine.weights(gpus))
    assert scaling.break_even_members(Machine(1, 1, 0, latency=1.0, update=1.0), 2) == pytest.approx(2)
    assert scaling.break_even_members(Machine(1, 1, 0), 2) == np.inf
