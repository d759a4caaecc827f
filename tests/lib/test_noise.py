"""The noise law: its known answers and its text, and the same bits on every backend, window and share."""

import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import python, refused
from hypothesis import given
from hypothesis import strategies as st
from noise_by_numpy import bits, by_numpy, reference_perturb, reference_update, window
from noise_by_numpy import keys_and_coefficients as members
from numba import njit

from evoalign_lib import _noise_cpu, _noise_host, noise
from evoalign_lib.noise import DISTRIBUTIONS, Layout, member_key, normals, parameter_id, run_key

VECTORS = json.loads(Path(noise.__file__).with_name("noise_vectors.json").read_text())
BACKENDS = {"numpy": by_numpy, "numba": noise.eps}
KEY = member_key(run_key("test", 0), step=3, pair=1)
# Rows of one vector, many vectors and broken vectors; more and fewer quads than one block of the kernel.
SHAPES = {"embed": (300, 64), "norm": (64,), "odd": (33, 171), "long": (5003,), "scale": (), "one": (1,)}
SHAPES |= {"column": (37, 1), "conv": (6, 3, 5), "block": (16, 64), "wide": (3, 2052)}
LAYOUT = Layout.from_shapes(SHAPES.items())


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


def master_weights(seed: int = 0) -> np.ndarray:
    """Weights of the usual size, zeros of both signs among them, and something recognisable in the padding."""
    master = np.random.default_rng(seed).normal(0, 0.02, LAYOUT.size).astype(np.float32)
    master[::7], master[3::7] = 0.0, -0.0
    master[LAYOUT.padding] = 5.0
    return master


# Known answers


def test_known_answers_of_words_keys_and_ids():
    for case in VECTORS["philox"]:
        assert (_noise_cpu.philox(words(case["counter"]), words(case["key"])) == words(case["words"])).all()
    for case in VECTORS["keys"]:
        run = run_key(case["arm"], case["seed"])
        member = member_key(run, case["step"], case["pair"])
        assert (f"{run:016x}", f"{member:016x}") == (case["run_key"], case["member_key"])
    ids = noise.parameter_ids(VECTORS["parameter_ids"])
    assert {name: f"{number:08x}" for name, number in ids.items()} == VECTORS["parameter_ids"]


KNOWN = VECTORS["normals"] + VECTORS["alternatives"] + VECTORS["low_rank"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", KNOWN, ids=lambda case: case.get("about"))
def test_known_answers_of_noise(case, backend):
    given = {name: case[name] for name in ("rows", "cols", "stream", "distribution", "rank") if name in case}
    z = BACKENDS[backend](int(case["key"], 16), int(case["param_id"], 16), case["shape"], **given)
    assert z.dtype == np.float32 and (z.shape == tuple(case["shape"]) or z.ndim == 2)
    assert (bits(z).ravel() == words(case.get("normals") or case["noise"])).all()


def test_edge_words_are_accurate_finite_and_equal_on_both_backends():
    """Words at the ends of their range, at ties of the rounding, and where the logarithm changes its branch."""
    ends = [0, 255, 256, 511, 2**32 - 1, 2**32 - 256, 2**32 - 257, 2**32 - 512]
    ends += [(i << 29) + delta for i in range(8) for delta in (-256, 0, 256) if i or delta >= 0]
    branches = [((int(2.0**24 * math.sqrt(0.5) / 2**i) + delta) << 8) for i in range(4) for delta in range(-2, 3)]
    w, v = (n.ravel() for n in np.meshgrid(np.array(ends + branches, np.uint32), np.array(ends, np.uint32)))
    normal_pair = _noise_cpu._normal_pair

    @njit(error_model="numpy")
    def pairs(w, v):
        out = np.empty((2, len(w)), np.float32)
        for i in range(len(w)):
            out[0, i], out[1, i] = normal_pair(w[i], v[i])
        return out

    reference = np.stack(_noise_cpu._box_muller(w, v))
    u = ((w >> 8) * 2.0**-24 + 2.0**-25).astype(np.float32).astype(np.float64)
    r, angle = np.sqrt(-2 * np.log(u)), np.pi * (v >> 8) * 2.0**-23
    assert np.abs(reference - [r * np.cos(angle), r * np.sin(angle)]).max() < 2e-6
    assert np.abs(reference).max() < 5.89
    assert (bits(pairs(w, v)) == bits(reference)).all()


@given(
    shape=st.lists(st.integers(1, 23), min_size=0, max_size=3).map(tuple) | st.tuples(st.just(3), st.integers(1, 1200)),
    key=st.integers(0, 2**64 - 1),
    backend=st.sampled_from([*BACKENDS]),
    distribution=st.sampled_from(DISTRIBUTIONS),
    rank=st.sampled_from([0, 0, 1, 6]),
    data=st.data(),
)
def test_a_window_is_a_slice_of_the_whole(shape, key, backend, distribution, rank, data):
    rows, cols, sizes = window(data, shape)
    whole = by_numpy(key, 9, shape, rank, distribution=distribution).reshape(sizes)
    for r, c in ((rows, cols), (rows, None), (None, cols)):
        expected = whole[slice(*r or (None,)), slice(*c or (None,))]
        found = BACKENDS[backend](key, 9, shape, rank, rows=r, cols=c, distribution=distribution)
        assert found.shape == expected.shape and (bits(found) == bits(expected)).all()


# ---- numbers for sampling


def test_uniforms_by_hand():
    key, rows = noise.sampling_key(run_key("es", 1), 7), np.array([3, 0, 2**32 - 1])
    found, halves = noise.uniforms(key, rows, 10, sample=5), np.array([key & 0xFFFFFFFF, key >> 32], np.uint32)
    assert found.dtype == np.float32 and found.shape == (3, 10)
    for row, numbers in zip(rows.tolist(), found.tolist(), strict=True):
        counters = np.array([[quad, row, 5, 4] for quad in range(3)], np.uint32)
        words = [w for counter in counters for w in _noise_cpu.philox(counter, halves).tolist()]
        assert numbers == [(w >> 8) / 2**24 for w in words[:10]]


def test_layout_places_tensors_on_multiples_of_16_and_a_vector_holds_their_noise():
    layout = Layout.from_shapes([("a", (3, 5)), ("b", ()), ("c", (2, 4, 2)), ("d", (17,))])
    expected = [("a", (3, 5), 3, 5, 0), ("b", (), 1, 1, 16), ("c", (2, 4, 2), 2, 8, 32), ("d", (17,), 1, 17, 48)]
    assert [e[:5] for e in layout.entries] == expected
    assert [e.id for e in layout.entries] == [*map(parameter_id, "abcd")]
    assert (layout.size, layout.d) == (80, 15 + 1 + 16 + 17)
    assert layout.padding.tolist() == [15, *range(17, 32), *range(65, 80)]
    vector = noise.noise_vector(LAYOUT, KEY)
    assert (bits(vector[LAYOUT.padding]) == 0).all()
    for name, view in LAYOUT.views(vector).items():
        assert (bits(view) == bits(by_numpy(KEY, parameter_id(name), view.shape))).all()


# Perturbation and update


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rank", [0, 1, 3, 16])
def test_members_and_updates_equal_the_reference(rank, distribution, monkeypatch):
    """Whole, and shared among threads; the reference adds members of coefficient 0, too, of either sign."""
    law, before, out = (distribution, rank), master_weights(), np.full(LAYOUT.size, np.nan, np.float32)
    master, vector = before.copy(), noise.noise_vector(LAYOUT, KEY, *law)
    for sign in (1, -1):
        noise.perturb(out, master, LAYOUT, KEY, 1e-3, sign, *law)
        assert (bits(out) == bits(reference_perturb(master, LAYOUT, KEY, 1e-3, sign, *law))).all()
        by_hand = master + np.float32(sign * 1e-3) * vector
        by_hand[LAYOUT.padding] = master[LAYOUT.padding]
        assert (bits(out) == bits(by_hand)).all() and (bits(master) == bits(before)).all()
    for n, zeros in ((0, []), (1, [0]), (2, []), (9, [0, 4, 8])):
        keys, coefficients = members(n)
        coefficients[zeros] = [-0.0, 0.0, 0.0][: len(zeros)]
        expected = reference_update(before, LAYOUT, keys, coefficients, *law)
        noise.update(whole := before.copy(), LAYOUT, keys, coefficients, (0, 1), *law)
        assert (bits(whole) == bits(expected)).all()
        assert (bits(whole[LAYOUT.padding]) == bits(before[LAYOUT.padding])).all()
        assert (n < 2) == (whole == before).all()
    # the order is part of the law: another one gives other bits
    noise.update(whole := before.copy(), LAYOUT, keys[::-1].copy(), coefficients[::-1].copy(), (0, 1), *law)
    assert (bits(whole) != bits(expected)).any()
    monkeypatch.setattr(_noise_host, "_FACTORS", 1)  # the smallest tiles
    monkeypatch.setattr(_noise_host, "_LEAST_TILE", 32)
    for count in (2, 3, 50):
        shared = before.copy()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda i: noise.update(shared, LAYOUT, keys, coefficients, (i, count), *law), range(count)))  # noqa: B023
        assert (bits(shared) == bits(expected)).all()


# Errors


COLLIDING = "layers.69912.weight", "layers.83063.weight"
BUFFER, OTHER, FROZEN = (np.zeros(LAYOUT.size, np.float32) for _ in range(3))
FROZEN.setflags(write=False)
ONE_KEY, ONE = np.ones(1, np.uint64), np.ones(1, np.float32)
perturb, update = partial(noise.perturb, BUFFER, OTHER, LAYOUT), partial(noise.update, BUFFER, LAYOUT)


test_errors_name_the_value = refused(
    (partial(run_key, "", 0), "arm"),
    (partial(run_key, "es", 2**64), f"seed.*{2**64}"),
    (partial(member_key, 0, 2**32, 0), f"step.*{2**32}"),
    (partial(member_key, 0, 0, -1), "pair.*-1"),
    (partial(normals, -5, 0, (4,)), "key.*-5"),
    (partial(normals, 0, 2**32, (4,)), f"param_id.*{2**32}"),
    (partial(normals, 0, 0, (4,), stream=-2), "stream.*-2"),
    (partial(normals, 0, 0, (4, 6), rows=(0, 5)), r"rows=\(0, 5\).*\(4, 6\)"),
    (partial(normals, 0, 0, (4, 6), cols=(3, 2)), r"cols=\(3, 2\)"),
    (partial(normals, 0, 0, (4,), distribution="rademacher"), "distribution='rademacher'"),
    (partial(normals, 0, 0, (2**33, 1), rows=(0, 1)), f"{2**33}"),
    (partial(noise.factors, ONE_KEY, 1, (2, 2), 0), "rank=0"),
    (partial(noise.eps, 1, 1, (2, 2), -1), "rank.*-1"),
    (partial(Layout.from_shapes, []), "at least one"),
    (partial(Layout.from_shapes, [(name, (2,)) for name in COLLIDING]), "69912.weight.*83063.weight"),
    (partial(Layout.from_shapes, [("a", (2,)), ("a", (3,))]), "'a'.*tied"),
    (partial(LAYOUT.views, BUFFER[:-1]), f"{LAYOUT.size - 1}"),
    (partial(noise.perturb, BUFFER, OTHER.astype(float), LAYOUT, 0, 1.0), "master.*float64"),
    (partial(noise.perturb, np.zeros(2 * LAYOUT.size, "f4")[::2], OTHER, LAYOUT, 0, 1.0), "contiguous"),
    (partial(noise.perturb, FROZEN, OTHER, LAYOUT, 0, 1.0), "out is read-only"),
    (partial(noise.perturb, BUFFER, BUFFER, LAYOUT, 0, 1.0), "overlap"),
    *((partial(perturb, 0, sigma), f"sigma.*{re.escape(str(sigma))}") for sigma in (0.0, -0.1, math.nan, 1e39)),
    (partial(perturb, 0, 1.0, 2), "sign.*2"),
    (partial(update, ONE_KEY.astype(np.int64), ONE), "keys.*int64"),
    (partial(update, ONE_KEY, np.ones(2, np.float32)), r"\(1,\) and \(2,\)"),
    (partial(update, ONE_KEY, ONE * np.float32(np.nan)), "nan for member 0"),
    (partial(update, ONE_KEY, ONE, part=(2, 2)), r"part.*\(2, 2\)"),
    error=(ValueError, TypeError),
)


# The compiled code's cache


@pytest.mark.parametrize("user_cache_is_writable", [True, False])
def test_a_read_only_package_folder_is_no_hindrance(tmp_path, user_cache_is_writable):
    # A file where the cache folder should be keeps everyone out, the super-user of a container included.
    (tmp_path / "noise_copy.py").write_text(Path(_noise_cpu.__file__).read_text())
    (tmp_path / "__pycache__").write_text("")
    user_cache = tmp_path / "cache"
    if not user_cache_is_writable:
        user_cache.write_text("")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(user_cache), "PYTHONDONTWRITEBYTECODE": "1"}
    code = "import noise_copy; print(noise_copy.add_noise.stats.cache_path)"
    found = python("-c", code, env=environment).stdout.strip()
    assert Path(found).is_relative_to(user_cache) if user_cache_is_writable else found == "None"
