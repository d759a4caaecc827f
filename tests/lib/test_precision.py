"""What half precision does to an ES trajectory, against the same trajectory in float64."""

import tracemalloc

import numpy as np
import pytest
import torch

from evoalign_lib import _anchor, noise, precision

LAYOUT = noise.Layout.from_shapes([("weight", (128, 64))])
N, SIGMA, ALPHA = 30, 1e-3, 5e-4
RESTORES = 10  # members a step that one of three engines evaluates
STEPS = 100


def start_weights(kind: str) -> np.ndarray:
    """Weights that bfloat16 holds exactly, so that all modes start from the same."""
    rng = np.random.default_rng(0)
    if kind == "gains":
        weights = rng.uniform(0.5, 3, LAYOUT.size)
    else:
        weights = rng.normal(0, float(kind), LAYOUT.size)
    return torch.from_numpy(weights).to(torch.bfloat16).float().numpy()


def eps(key: int) -> torch.Tensor:
    return torch.from_numpy(noise.noise_vector(LAYOUT, int(key)))


def step_members(step: int) -> tuple[np.ndarray, np.ndarray]:
    root = noise.run_key("precision", 0)
    z = np.random.default_rng(step).standard_normal(N)
    z = (z - z.mean()) / z.std()
    keys = np.array([noise.member_key(root, step, i) for i in range(N)], np.uint64)
    return keys, (ALPHA * z / N).astype(np.float32)


class Exact:
    """The trajectory in float64."""

    def __init__(self, start):
        self.weights = torch.from_numpy(start).double()

    def evaluate(self, key):
        pass

    def update(self, keys, coefficients):
        for key, c in zip(keys, coefficients, strict=True):
            self.weights += float(c) * eps(key).double()


class Master:
    """The default: members are written beside the master."""

    def __init__(self, start):
        self.master, self.working = start.copy(), np.empty_like(start)

    def evaluate(self, key):
        noise.perturb(self.working, self.master, LAYOUT, int(key), SIGMA)

    def update(self, keys, coefficients):
        noise.update(self.master, LAYOUT, keys, coefficients)

    @property
    def weights(self):
        return torch.from_numpy(self.master).double()


class Inplace:
    """Released codes: add, subtract, and one rounded addition a member."""

    def __init__(self, start, dtype=torch.bfloat16):
        self.held = torch.from_numpy(start).to(dtype)

    def evaluate(self, key):
        precision.inplace_add(self.held, eps(key), SIGMA)
        precision.inplace_add(self.held, eps(key), -SIGMA)

    def update(self, keys, coefficients):
        for key, c in zip(keys, coefficients, strict=True):
            precision.inplace_add(self.held, eps(key), float(c))

    @property
    def weights(self):
        return self.held.double()


class InplaceFloat16(Inplace):
    def __init__(self, start):
        super().__init__(start, torch.float16)


class Kahan:
    """A pair of bfloat16, perturbed and restored in place."""

    def __init__(self, start):
        self.value, self.compensation = precision.split(torch.from_numpy(start))

    def evaluate(self, key):
        change = np.float32(SIGMA) * eps(key)
        precision.kahan_add(self.value, self.compensation, change)
        precision.kahan_add(self.value, self.compensation, -change)

    def update(self, keys, coefficients):
        total = torch.zeros(LAYOUT.size)
        for key, c in zip(keys, coefficients, strict=True):
            total += c * eps(key)
        precision.kahan_add(self.value, self.compensation, total)

    @property
    def weights(self):
        return precision.join(self.value, self.compensation).double()


MODES = {
    "master": Master,
    "kahan": Kahan,
    "inplace, float16": InplaceFloat16,
    "inplace, bfloat16": Inplace,
}
# Lowest and highest cosine that each mode may have with the trajectory in float64.
BOUNDS = {
    "0.02": {
        "master": (0.99999, 1),
        "kahan": (0.999, 1),
        "inplace, float16": (0.95, 0.99),
        "inplace, bfloat16": (0.5, 0.7),
    },
    "0.05": {
        "master": (0.99999, 1),
        "kahan": (0.999, 1),
        "inplace, float16": (0.8, 0.95),
        "inplace, bfloat16": (0.25, 0.45),
    },
    "gains": {
        "master": (0.99999, 1),
        "kahan": (0.9, 1),
        "inplace, float16": (-0.1, 0.1),
        "inplace, bfloat16": (-0.1, 0.1),
    },
}


@pytest.mark.parametrize("kind", BOUNDS)
def test_cosine_with_the_trajectory_in_float64(kind):
    start = start_weights(kind)
    runs = {"float64": Exact(start)} | {name: mode(start) for name, mode in MODES.items()}
    for step in range(STEPS):
        keys, coefficients = step_members(step)
        for run in runs.values():
            for key in keys[:RESTORES]:
                run.evaluate(key)
            run.update(keys, coefficients)
    moves = {name: run.weights - torch.from_numpy(start).double() for name, run in runs.items()}
    exact = moves.pop("float64")
    cosines = {name: float(torch.cosine_similarity(move, exact, dim=0)) for name, move in moves.items()}
    print(f"weights {kind}: " + ", ".join(f"{name} {cosine:.4f}" for name, cosine in cosines.items()))
    for name, (lowest, highest) in BOUNDS[kind].items():
        assert lowest <= cosines[name] <= highest, (name, cosines[name])


@pytest.mark.parametrize(
    ("spread", "dtype", "changed", "drift"),
    [
        # shares of weights changed after 1, 10 and 300 restores; root mean square drift after 10 and 300
        (0.02, torch.bfloat16, (0.076, 0.32, 0.65), (4.7e-5, 1.65e-4)),
        (0.05, torch.bfloat16, (0.040, 0.19, 0.56), (7.4e-5, 2.8e-4)),
        (0.02, torch.float16, (0.075, 0.32, 0.64), (5.9e-6, 2.1e-5)),
    ],
    ids=str,
)
def test_restoring_by_subtraction_drifts(spread, dtype, changed, drift):
    layout = noise.Layout.from_shapes([("weight", (256, 128))])
    start = torch.from_numpy(np.random.default_rng(1).normal(0, spread, layout.size).astype(np.float32)).to(dtype)
    weights, seen = start.clone(), {}
    for cycle in range(1, 301):
        z = torch.from_numpy(noise.noise_vector(layout, cycle))
        precision.inplace_add(weights, z, SIGMA)
        precision.inplace_add(weights, z, -SIGMA)
        moved = weights.double() - start.double()
        seen[cycle] = float((moved != 0).double().mean()), float(moved.square().mean().sqrt())
    print(f"N(0, {spread}) in {dtype}: " + ", ".join(f"{n}: {seen[n][0]:.3f} {seen[n][1]:.2g}" for n in (1, 10, 300)))
    assert [seen[n][0] for n in (1, 10, 300)] == pytest.approx(changed, rel=0.15)
    assert [seen[n][1] for n in (10, 300)] == pytest.approx(drift, rel=0.25)


@pytest.mark.parametrize(
    ("weight", "cosine", "moved"), [(0.02, 0.999, 0.98), (0.05, 0.997, 0.95), (1.0, None, 0.025)], ids=str
)
def test_realised_perturbation(weight, cosine, moved):
    # What is evaluated is bfloat16(w + sigma z) - w, with a master as well.
    z = torch.from_numpy(noise.normals(5, 1, (2**18,)))
    spread = torch.from_numpy(np.random.default_rng(2).standard_normal(2**18).astype(np.float32)) * weight
    start = (torch.ones(2**18) if weight == 1.0 else spread).bfloat16().float()
    realised = (start + np.float32(SIGMA) * z).bfloat16().float() - start
    print(
        f"weights {weight}: cosine {float(torch.cosine_similarity(realised, z, dim=0)):.4f}, "
        f"moved {float((realised != 0).float().mean()):.3f}"
    )
    if cosine is not None:
        assert float(torch.cosine_similarity(realised, z, dim=0)) == pytest.approx(cosine, abs=1e-3)
    assert float((realised != 0).float().mean()) == pytest.approx(moved, rel=0.1)


def test_a_pair_holds_what_bfloat16_cannot():
    weights = torch.tensor([1.0 + 3 * 2**-10, -(2.0**-3) * (1 + 2**-12), 0.0, 5.0])
    value, compensation = precision.split(weights)
    assert value.tolist() == [1.0, -(2.0**-3), 0.0, 5.0]
    assert compensation.tolist() == [3 * 2**-10, -(2.0**-15), 0.0, 0.0]
    assert (precision.join(value, compensation) == weights).all()
    precision.kahan_add(value, compensation, torch.tensor([3 * 2**-10, 0.0, 2.0**-20, -5.0]))
    assert value.tolist() == [1.0078125, -(2.0**-3), 2.0**-20, 0.0]
    assert compensation.tolist() == [6 * 2**-10 - 2**-7, -(2.0**-15), 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pair_holds_sixteen_bits(dtype):
    weights = torch.from_numpy(np.random.default_rng(0).uniform(0.01, 4, 2**16).astype(np.float32))
    error = (precision.join(*precision.split(weights, dtype)) - weights).abs() / weights
    assert float(error.max()) <= 2.0**-17


def test_shapes_that_would_broadcast_are_refused():
    weights = torch.zeros(3, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"\(3, 4\) and \(4,\)"):
        precision.inplace_add(weights, torch.zeros(4), 1.0)
    with pytest.raises(ValueError, match=r"\(3, 4\) and \(1, 4\)"):
        precision.kahan_add(weights, weights.clone(), torch.zeros(1, 4))


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
    made = noise.normals(int(key), number, SHAPES[name], distribution=distribution, backend="numpy")
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


@pytest.mark.parametrize("block", [1, 64, 2**18])
@pytest.mark.parametrize(
    ("dtype", "distribution"),
    [(torch.bfloat16, d) for d in noise.DISTRIBUTIONS] + [(torch.float16, "gaussian"), (torch.float32, "tied")],
    ids=str,
)
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


def test_master_is_the_noise_law():
    model = Model(torch.float32)
    weights = precision.open_weights(model, distribution="byte_sum")
    start = weights.float32().copy()
    keys, coefficients = step_members(0)
    with weights.member(int(keys[0]), SIGMA, -1) as flat:
        expected = noise.reference_perturb(start, weights.layout, int(keys[0]), SIGMA, -1, "byte_sum")
        assert flat.tobytes() == expected.tobytes()
    weights.retrace([(key, 1) for key in keys], SIGMA)
    assert weights.float32().tobytes() == start.tobytes()
    weights.update(keys, coefficients)
    expected = noise.reference_update(start, weights.layout, keys, coefficients, "byte_sum")
    assert weights.float32().tobytes() == expected.tobytes()
    assert (weights.tensors()["gains"].numpy() == weights.layout.views(expected)["gains"]).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_master_decays_toward_its_start(threads, monkeypatch):
    monkeypatch.setattr(_anchor, "_BLOCK", 50)
    weights = precision.open_weights(Model(torch.float32), threads=threads, anchor_decay=0.2)
    start = weights.float32().copy()
    expected = start
    for step in range(2):
        keys, coefficients = (array[:3] for array in step_members(step))
        expected = expected - np.float32(0.2) * (expected - start)
        expected = noise.reference_update(expected, weights.layout, keys, coefficients)
        weights.update(keys, coefficients)
        assert weights.float32().tobytes() == expected.tobytes()
    assert weights.start.tobytes() == start.tobytes() and not weights.start.flags.writeable
    # a state that is loaded, such as that of a checkpoint, has the same start
    weights.load(precision.open_weights(Model(torch.float32)).copy())
    weights.update(np.zeros(0, np.uint64), np.zeros(0, np.float32))
    assert weights.float32().tobytes() == weights.start.tobytes()
    assert precision.open_weights(Model(torch.float32)).start is None


def test_weights_that_overflowed_decay_without_a_warning():
    weights = precision.open_weights(Model(torch.float32), anchor_decay=0.2)
    weights.flat[:3] = np.inf, np.nan, 3e38
    weights.start.flags.writeable = True
    weights.start[2] = -3e38
    weights.update(np.zeros(0, np.uint64), np.zeros(0, np.float32))
    assert not np.isfinite(weights.flat[:3]).any() and np.isfinite(weights.flat[3:]).all()


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


def test_tied_noise_moves_equal_shapes_alike():
    keys, coefficients = step_members(0)
    for mode in precision.PRECISIONS:
        for distribution in noise.DISTRIBUTIONS:
            model = Model()
            for p in model.parameters():
                p.data.fill_(0.25)
            weights = precision.open_weights(model, None, mode, distribution)
            weights.retrace([(key, 1) for key in keys], SIGMA)
            weights.update(keys, 100 * coefficients)
            tensors = weights.tensors()
            same = (tensors["matrix"] == tensors["same"]).double().mean()
            assert same == 1 if distribution == "tied" else same < 0.5, (mode, distribution)


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
    print(f"{mode}: noise takes {noise_bytes / weights.layout.d:.2f} bytes a parameter of {weights.layout.d:,}")
    assert noise_bytes < weights.layout.d


def test_a_bound_model_computes_with_the_replica():
    model, other = Model(), Model()
    weights = precision.open_weights(model, None, "inplace", bind=True)
    with weights.member(1, SIGMA) as flat:
        precision.copy_to(other, weights.layout, flat)
        for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (one == two).all(), name
        assert (model.matrix != Model().matrix).any()
    free = Model()
    precision.open_weights(free, None, "inplace").update(*step_members(0))
    assert (free.matrix == Model().matrix).all()


def test_what_a_mode_does_not_take():
    with pytest.raises(
        ValueError, match=r"'kahan' is for torch.bfloat16, torch.float16, the model is torch.float32: load"
    ):
        precision.open_weights(Model(torch.float32), None, "kahan")
    with pytest.raises(ValueError, match="'matrix' is torch.float64: noise on anything but plain float32"):
        precision.open_weights(Model(torch.float64), None, "inplace")
    mixed = Model()
    mixed.gains.data = mixed.gains.data.float()
    with pytest.raises(ValueError, match="needs one dtype, but 'gains' is torch.float32 and others are torch.bfloat16"):
        precision.open_weights(mixed, None, "inplace")
    for mode in ("kahan", "inplace"):
        with pytest.raises(ValueError, match=f"anchor_decay=0.1 needs precision='master': precision='{mode}' keeps no"):
            precision.open_weights(Model(), None, mode, anchor_decay=0.1)
    with pytest.raises(ValueError, match="precision='exact' is not one of"):
        precision.open_weights(Model(), None, "exact")
    with pytest.raises(ValueError, match="distribution='normal' is not one of"):
        precision.open_weights(Model(), None, "inplace", "normal")


# ---- what the loss is


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_drift_by_hand(dtype):
    before = torch.tensor([1.0, -2.0, 0.0, 4.0, 0.5], dtype=dtype)
    after = torch.tensor([1.0, -2.5, -0.0, 4.0, 1.5], dtype=dtype)
    share, rms = precision.drift(before, after)
    assert share == 3 / 5  # the sign of a zero is a bit as well
    assert rms == pytest.approx(np.sqrt((0.25 + 1) / 5), rel=1e-12)
    assert precision.drift(before, before) == (0, 0)


def test_drift_of_what_cannot_be_compared():
    with pytest.raises(ValueError, match=r"the shapes must agree, got \(3,\) and \(1,\)"):
        precision.drift(torch.zeros(3), torch.zeros(1))
    with pytest.raises(ValueError, match="the dtypes must agree, got torch.float32 and torch.bfloat16"):
        precision.drift(torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16))


def test_agreement_by_hand():
    intended = np.float32([1, 2, -2])
    assert precision.agreement(intended, 0.5 * intended) == pytest.approx((1, 0.5))
    assert precision.agreement(intended, -intended) == pytest.approx((-1, 1))
    assert precision.agreement(intended, np.float32([2, 1, 2])) == pytest.approx((0, 1))
    assert precision.agreement(intended, np.zeros(3, np.float32)) == (0, 0)
    # in float32 the small entries of a long update would be lost
    long = np.full(2**22, 1e-4, np.float32)
    long[0] = 1e2
    rest = np.where(long == 1e2, np.float32(0), long)
    ratio = np.sqrt((2**22 - 1) * float(long[1]) ** 2 / ((2**22 - 1) * float(long[1]) ** 2 + 1e4))
    assert precision.agreement(long, rest) == pytest.approx((ratio, ratio), rel=1e-9)
    with pytest.raises(ValueError, match="the intended update is zero"):
        precision.agreement(np.zeros(3), np.ones(3))
    with pytest.raises(ValueError, match=r"got \(3,\) and \(2,\)"):
        precision.agreement(np.ones(3), np.ones(2))


@pytest.mark.parametrize(("spread", "cosine", "share"), [(0.02, 0.70, 0.62), (0.05, 0.48, 0.30), (None, 0, 0)], ids=str)
def test_one_update_in_bfloat16(spread, cosine, share):
    """How much of one update at N = 30 arrives, when its members are added one after the other and nothing restored."""
    model = torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    start = np.ones(2**16) if spread is None else np.random.default_rng(3).normal(0, spread, 2**16)
    model.weight.data.copy_(torch.from_numpy(start).view(256, 256))
    weights = precision.open_weights(model, None, "inplace")
    before, intended = weights.float32(), np.zeros(weights.layout.size, np.float32)
    keys, coefficients = step_members(0)
    weights.update(keys, coefficients)
    noise.update(intended, weights.layout, keys, coefficients)
    found, gain = precision.agreement(intended, weights.float32() - before)
    print(f"weights {spread}: cosine {found:.3f}, gain {gain:.3f}")
    assert (found, found * gain) == pytest.approx((cosine, share), abs=0.03)


def test_a_sample_is_spread_over_the_parameters():
    model = torch.nn.Linear(512, 1024, bias=True, dtype=torch.bfloat16)
    weights = precision.open_weights(model, None, "kahan")
    weights.retrace([(1, 1)], SIGMA)
    sample, whole = weights.sample(), weights.layout.views(weights.float32())
    k = 9  # 525,312 weights by 65,536 is just above 8, and the next odd number
    assert (sample.numpy() == np.concatenate([view.reshape(-1)[::k] for view in whole.values()])).all()
    small = precision.open_weights(Model(), None, "inplace")
    before = small.sample()
    assert len(before) == small.layout.d
    small.retrace([(1, 1)], SIGMA)
    assert (before != small.sample()).any()  # a copy
