"""What half precision does to an ES trajectory, against the same trajectory in float64."""

import numpy as np
import pytest
import torch

from evoalign_lib import noise, precision

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
