"""Precision modes: their arithmetic against the released statements and the noise law, and runs in each of them."""

import tracemalloc

import numpy as np
import pytest
import torch
from es_runs import ROWS, Stop, constant, digest, read, stopping, token_sum, trained, trainer
from helpers import ran, random_model, refused, saved
from noise_by_numpy import by_numpy

from evoalign_lib import ledger, noise, precision
from evoalign_lib.es import ESTrainer

N, SIGMA, ALPHA = 30, 1e-3, 5e-4


def step_members(step: int) -> tuple[np.ndarray, np.ndarray]:
    root = noise.run_key("precision", 0)
    z = np.random.default_rng(step).standard_normal(N)
    z = (z - z.mean()) / z.std()
    keys = np.array([noise.member_key(root, step, i) for i in range(N)], np.uint64)
    return keys, (ALPHA * z / N).astype(np.float32)


def test_a_pair_holds_what_bfloat16_cannot():
    weights = torch.tensor([1.0 + 3 * 2**-10, -(2.0**-3) * (1 + 2**-12), 0.0, 5.0])
    value, compensation = precision.split(weights)
    assert value.tolist() == [1.0, -(2.0**-3), 0.0, 5.0]
    assert compensation.tolist() == [3 * 2**-10, -(2.0**-15), 0.0, 0.0]
    assert (precision.join(value, compensation) == weights).all()
    precision.kahan_add(value, compensation, torch.tensor([3 * 2**-10, 0.0, 2.0**-20, -5.0]))
    assert value.tolist() == [1.0078125, -(2.0**-3), 2.0**-20, 0.0]
    assert compensation.tolist() == [6 * 2**-10 - 2**-7, -(2.0**-15), 0.0, 0.0]


# ---- the state of a run


SHAPES = {"matrix": (37, 20), "same": (37, 20), "cube": (5, 3, 4), "gains": (50,), "one": ()}


class Model(torch.nn.Module):
    """Parameters of all kinds of shapes; two share one."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        rng = np.random.default_rng(0)
        for name, shape in SHAPES.items():
            values = torch.from_numpy(rng.normal(0, 0.3, shape).astype(np.float32)).reshape(shape)
            self.register_parameter(name, torch.nn.Parameter(values.to(dtype)))

    dtype = property(lambda self: self.matrix.dtype)


def tensor_eps(name: str, key: int, distribution: str) -> torch.Tensor:
    """A tensor's noise as a whole, from the reference."""
    number = noise.parameter_id(name)
    made = by_numpy(int(key), number, SHAPES[name], distribution=distribution)
    return torch.from_numpy(made.reshape(-1)).reshape(SHAPES[name])


def released_step(parameters: dict, keys, coefficients, distribution: str) -> None:
    """Released codes' statements, with the noise law for randn."""
    for key in keys:
        for name, p in parameters.items():
            p.add_(tensor_eps(name, key, distribution).to(p.dtype) * SIGMA)
        for name, p in parameters.items():
            p.sub_(tensor_eps(name, key, distribution).to(p.dtype) * SIGMA)
    for key, c in zip(keys, coefficients, strict=True):
        for name, p in parameters.items():
            p.add_(tensor_eps(name, key, distribution).to(p.dtype) * float(c))


LAWS = [(torch.bfloat16, law) for law in noise.DISTRIBUTIONS]
LAWS += [(torch.float16, "gaussian"), (torch.float32, "tied")]


@pytest.mark.parametrize("block", [64, 2**18])
@pytest.mark.parametrize(("dtype", "distribution"), LAWS, ids=str)
def test_inplace_is_released_arithmetic_whatever_the_blocks(monkeypatch, block, dtype, distribution):
    monkeypatch.setattr(precision, "_BLOCK", block)
    weights = precision.open_weights(Model(dtype), None, "inplace", distribution)
    expected = {name: p.detach().clone() for name, p in Model(dtype).named_parameters()}
    for step in range(2):
        keys, coefficients = (a[:5] for a in step_members(step))
        weights.retrace([(key, 1) for key in keys], SIGMA)
        weights.update(keys, coefficients)
        released_step(expected, keys, coefficients, distribution)
    found = weights.tensors()
    assert found.keys() == expected.keys()
    for name, p in expected.items():
        assert found[name].shape == p.shape and (bits(found[name]) == bits(p)).all(), name


@pytest.mark.parametrize("block", [1, 64, 2**18])
def test_kahan_adds_one_accumulated_update(monkeypatch, block):
    monkeypatch.setattr(precision, "_BLOCK", block)
    weights = precision.open_weights(Model(), None, "kahan")
    keys, coefficients = (a[:5] for a in step_members(0))
    weights.retrace([(key, -1) for key in keys], SIGMA)
    weights.update(keys, coefficients)
    for name, p in Model().named_parameters():
        value, compensation = precision.split(p.detach().float())
        for key in keys:
            change = np.float32(SIGMA) * tensor_eps(name, key, "gaussian").numpy()
            for sign in (-1, 1):
                precision.kahan_add(value, compensation, torch.as_tensor(np.float32(sign) * change))
        total = np.zeros(p.shape, np.float32)
        for key, c in zip(keys, coefficients, strict=True):
            total = total + c * tensor_eps(name, key, "gaussian").numpy()
        precision.kahan_add(value, compensation, torch.as_tensor(total))
        found = weights.tensors()
        assert (bits(found[name]) == bits(value)).all()
        assert (bits(found[f"{name}#compensation"]) == bits(compensation)).all()
    assert (weights.float32() == precision.join(*weights.planes).numpy()).all()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


@pytest.mark.parametrize("mode", precision.PRECISIONS)
def test_a_member_is_there_only_while_the_context_lasts(mode):
    weights = precision.open_weights(Model(), None, mode)
    before = weights.float32().copy()
    eps = noise.noise_vector(weights.layout, 3)
    with pytest.raises(KeyError), weights.member(3, 0.25, -1) as flat:
        moved = torch.as_tensor(flat).float().numpy() - before
        assert np.abs(moved + 0.25 * eps).max() < 2.0**-8 + 2.0**-9  # half a unit in the last place near 1 to 2
        raise KeyError  # an evaluation that fails restores as well
    share, rms = precision.drift(before, weights.float32())
    bound = {"master": 0, "kahan": 2.0**-16, "inplace": 2.0**-8}[mode]
    assert rms <= bound and (share > 0) == (mode != "master")


@pytest.mark.parametrize(("mode", "cost"), [("inplace", 2), ("kahan", 4)])
def test_no_second_copy_of_the_weights(mode, cost):
    model = torch.nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
    weights = precision.open_weights(model, None, mode, bind=True)
    assert sum(plane.nbytes for plane in weights.planes) == cost * weights.layout.d
    assert model.weight.data_ptr() == weights.flat.data_ptr()
    keys, coefficients = (a[:2] for a in step_members(0))
    weights.update(keys, coefficients)  # compiles the noise
    tracemalloc.start()
    try:
        weights.retrace([(key, 1) for key in keys], SIGMA)
        weights.update(keys, coefficients)
        weights.sample()
        noise_bytes = tracemalloc.get_traced_memory()[1]  # NumPy's memory, which the noise is made in
    finally:
        tracemalloc.stop()
    assert noise_bytes < weights.layout.d


MIXED = Model()
MIXED.gains.data = MIXED.gains.data.float()


test_what_a_mode_does_not_take = refused(
    (Model(torch.float32), {"precision": "kahan"}, "precision='kahan' is for .*torch.float32"),
    (Model(torch.float64), {"precision": "inplace"}, "'matrix' is torch.float64"),
    (MIXED, {"precision": "inplace"}, "'gains' is torch.float32"),
    (Model(), {"precision": "kahan", "anchor_decay": 0.1}, "anchor_decay=0.1 .*precision='kahan'"),
    (Model(), {"precision": "inplace", "anchor_decay": 0.1}, "anchor_decay=0.1 .*precision='inplace'"),
    (Model(), {"precision": "exact"}, "precision='exact'"),
    (Model(), {"precision": "inplace", "distribution": "normal"}, "distribution='normal'"),
    call=lambda model, how: precision.open_weights(model, **how),
)


HALF = torch.zeros(3, 4, dtype=torch.bfloat16)
test_shapes_that_would_broadcast_and_updates_without_length_are_refused = refused(
    (lambda: precision.inplace_add(HALF, torch.zeros(4), 1.0), r"\(3, 4\) and \(4,\)"),
    (lambda: precision.kahan_add(HALF, HALF.clone(), torch.zeros(1, 4)), r"\(3, 4\) and \(1, 4\)"),
    (lambda: precision.agreement(np.zeros(3), np.ones(3)), "the intended update is zero"),
    (lambda: precision.agreement(np.ones(3), np.ones(2)), r"got \(3,\) and \(2,\)"),
)


# ---- what the loss is


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_drift_by_hand(dtype):
    before = torch.tensor([1.0, -2.0, 0.0, 4.0, 0.5], dtype=dtype)
    after = torch.tensor([1.0, -2.5, -0.0, 4.0, 1.5], dtype=dtype)
    share, rms = precision.drift(before, after)
    assert share == 3 / 5  # the sign of a zero is a bit as well
    assert rms == pytest.approx(np.sqrt((0.25 + 1) / 5), rel=1e-12)
    assert precision.drift(before, before) == (0, 0)


def test_agreement_by_hand():
    intended = np.float32([1, 2, -2])
    assert precision.agreement(intended, -0.5 * intended) == pytest.approx((-1, 0.5))
    assert precision.agreement(intended, np.zeros(3, np.float32)) == (0, 0)
    # in float32 the small entries of a long update would be lost
    long = np.full(2**22, 1e-4, np.float32)
    long[0] = 1e2
    rest = np.where(long == 1e2, np.float32(0), long)
    ratio = np.sqrt((2**22 - 1) * float(long[1]) ** 2 / ((2**22 - 1) * float(long[1]) ** 2 + 1e4))
    assert precision.agreement(long, rest) == pytest.approx((ratio, ratio), rel=1e-9)


# ---- runs in every mode: the step, what it leaves behind and logs, and what is refused

SETTINGS = {"sigma": 0.02, "rows": ROWS[:4], "prompts_per_step": None, "max_steps": 3}


def modal(folder, mode="inplace", dtype=torch.bfloat16, reward=token_sum, **changed):
    return trainer(folder, reward, random_model().to(dtype), precision=mode, **SETTINGS | changed)


@pytest.mark.parametrize("fitness", ["reward", "random"])  # the null arm goes through the same arithmetic
@pytest.mark.parametrize("mode", precision.PRECISIONS)
def test_each_step_logs_what_it_lost(tmp_path, mode, fitness):
    marks = []

    class Noted(ESTrainer):
        def _evaluate_members(self, step, members):
            before = self.engine.weights.float32().copy()
            record = super()._evaluate_members(step, members)
            views = [self.engine.layout.views(w) for w in (before, self.engine.weights.float32())]
            marks.append(precision.drift(*(np.concatenate([v.reshape(-1) for v in vs.values()]) for vs in views)))
            return record

    tested = ran(modal(tmp_path, mode, kind=Noted, fitness=fitness))
    logs = tested.state.log_history
    if mode == "master":
        assert marks == [(0, 0)] * 3 and not any("restore_changed" in log for log in logs)
        return
    # the model is small: the sample is all of it
    logged = [(log["restore_changed"], log["restore_drift"]) for log in logs]
    assert np.array(logged) == pytest.approx(np.array(marks), rel=1e-12) and all(share > 0 for share, _ in marks)
    steps = read(tmp_path).steps
    assert [step.log["restore_changed"] for step in steps] == [log["restore_changed"] for log in logs]


@pytest.mark.parametrize("mode", precision.PRECISIONS)
def test_a_replay_writes_the_folder_that_the_run_saves(tmp_path, mode):
    start = saved(tmp_path / "start", random_model().to(torch.bfloat16))
    settings = SETTINGS | {"precision": mode, "model_init_kwargs": {"dtype": "bfloat16"}}
    tested = trained(tmp_path / "run", model=start, **settings)
    tested.save_model(tmp_path / "saved")
    found = ledger.write_model(tmp_path / "run" / ledger.NAME, tmp_path / "written", start)
    assert found == digest(tested)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("written", "saved"))
    assert one == other


def test_a_tied_population_moves_nothing_but_leaves_its_marks(tmp_path):
    tested = modal(tmp_path, reward=constant, max_steps=1)
    expected = precision.open_weights(random_model().to(torch.bfloat16), precision="inplace")
    expected.retrace(tested.ask(0), 0.02)
    tested.train()
    assert tested.counts["tied"] == 1 and (tested.engine.weights.float32() == expected.float32()).all()
    assert ledger.verify(tmp_path / ledger.NAME, random_model().to(torch.bfloat16)).weights == digest(tested)


@pytest.mark.parametrize("mode", precision.PRECISIONS)
@pytest.mark.parametrize("step", [0, 1])  # before and after there is a ledger
def test_an_evaluation_that_broke_off_has_moved_the_weights(tmp_path, mode, step):
    tested = modal(tmp_path, mode, reward=stopping(step))
    with pytest.raises(Exception, match=Stop.__name__):
        tested.train()
    tested.rewards.functions[0] = token_sum
    if mode == "master":
        assert tested.train().global_step == 3
        return
    again = r"train\(resume_from_checkpoint=True\)" if step else r"train\(\)"
    with pytest.raises(RuntimeError, match=f"not those after step {step}.*call {again}"):
        tested.train()


@pytest.mark.parametrize("mode", ["inplace", "kahan"])
def test_modes_with_one_replica_take_one_worker(tmp_path, mode):
    tested = modal(tmp_path, mode, workers=None)
    assert tested.engine.workers == 1
    with pytest.raises(AttributeError, match=f"precision='{mode}'"):
        _ = tested.engine.master
    with pytest.raises(ValueError, match=f"workers=2 needs precision='master'.*'{mode}'"):
        modal(tmp_path, mode, workers=2)
