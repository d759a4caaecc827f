"""A model under the noise law where it lies has the bits of the reference: by Triton's kernels, on a GPU and in the
interpreter on any machine, and by numba on a CPU."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import python, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from noise_by_numpy import bits, by_numpy, filled, reference_perturb, reference_update, window
from noise_by_numpy import keys_and_coefficients as members

from evoalign_lib import _anchor, _noise_cpu, noise
from evoalign_lib.noise import DISTRIBUTIONS, Layout, Piece, device_weights, member_key, normals, parameter_id, run_key

triton = pytest.importorskip("triton", reason="Triton is not installed; its wheels exist for Linux only")

from evoalign_lib import _noise_triton  # noqa: E402

# On a CPU `device_weights` takes the kernels in the interpreter, and numba outside it: tests without the mark `kernels`
# run with both.
DEVICE = "cuda" if torch.cuda.is_available() and not _noise_triton.INTERPRETED else "cpu"
has_gpu = torch.cuda.is_available()
gpu = pytest.mark.skipif(_noise_triton.INTERPRETED or not has_gpu, reason="needs a GPU that torch sees")
elsewhere = "no GPU here: test_all_of_this_in_the_interpreter runs it"
kernels = pytest.mark.skipif(not _noise_triton.INTERPRETED and not has_gpu, reason=elsewhere)
VECTORS = json.loads(Path(noise.__file__).with_name("noise_vectors.json").read_text())
KEY = member_key(run_key("test", 0), step=3, pair=1)
# One row, many rows, columns that are no multiple of four, one element, three dimensions, more than one tile. Smaller
# tensors and tiles in the interpreter, which takes long for every element of a tile, also of one that is hardly filled.
FEW = _noise_triton.INTERPRETED
if FEW:
    _noise_triton.TILE = 1 << 10
SHAPES = {"embed": (70 if FEW else 300, 64), "norm": (64,), "odd": (33, 171), "long": (20003 if FEW else 70003,)}
SHAPES |= {"scale": (), "column": (37, 1), "conv": (6, 3, 5), "wide": (9 if FEW else 40, 2052)}
LAYOUT = Layout.from_shapes(SHAPES.items())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit."""
    assert a.dtype == b.dtype
    return torch.equal(a.cpu().reshape(-1).view(torch.uint8), b.cpu().reshape(-1).view(torch.uint8))


def model(dtype: torch.dtype, seed: int = 0) -> list[Piece]:
    """Tensors of their own, as a Hugging Face model has them; a third of the weights are zeros of either sign."""
    generator, pieces = np.random.default_rng(seed), []
    for name, shape in SHAPES.items():
        weights = generator.normal(0, 0.02, shape).astype(np.float32)
        weights.reshape(-1)[::7], weights.reshape(-1)[3::7] = 0.0, -0.0
        pieces.append(Piece(torch.from_numpy(weights).to(DEVICE, dtype), name))
    return pieces


FAST = "known_answers or each_member or (members_and_updates and gaussian-0-torch.bfloat16)"


@pytest.mark.timeout(600)  # by an interpreter
@pytest.mark.parametrize("which", [FAST, pytest.param("not interpreter", marks=pytest.mark.slow, id="all")])
def test_all_of_this_in_the_interpreter(which):
    if _noise_triton.INTERPRETED:
        pytest.skip("this is the interpreter")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip(f"the interpreter of Triton {triton.__version__} converts arrays in a way that NumPy deprecates")
    command = "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "-k", which, __file__
    done = python(*command, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= (3 if which == FAST else 30)


def drawn(kind, key, param_id, rows, cols, stream) -> np.ndarray:
    """A window of a tensor's noise, drawn by Triton."""
    out = torch.empty((rows[1] - rows[0], cols[1] - cols[0]), device=DEVICE)
    weights = _noise_triton.DeviceWeights([out], [(param_id, rows[0], cols[0])], [0], kind, 1, None, stream)
    weights.master.fill_(float(_noise_cpu.NOTHING))
    weights.perturb(key, 1.0)
    return out.cpu().numpy()


@kernels
@pytest.mark.parametrize("case", VECTORS["normals"] + VECTORS["alternatives"], ids=lambda case: case["about"])
def test_known_answers(case):
    given = {name: case[name] for name in ("rows", "cols", "stream", "distribution") if name in case}
    z = by_numpy(int(case["key"], 16), int(case["param_id"], 16), case["shape"], draw=drawn, **given)
    assert z.dtype == np.float32
    assert [f"{word:08x}" for word in bits(z).ravel()] == case["normals"].split()


@kernels
@given(
    shape=st.lists(st.integers(1, 23), min_size=0, max_size=3).map(tuple) | st.tuples(st.just(3), st.integers(1, 1200)),
    distribution=st.sampled_from(DISTRIBUTIONS),
    tile=st.sampled_from([16, 64, _noise_triton.TILE]),
    data=st.data(),
)
@settings(max_examples=40)
def test_a_window_is_a_slice_of_the_whole_in_tiles_of_any_size(shape, distribution, tile, data):
    rows, cols, sizes = window(data, shape)
    whole = by_numpy(KEY, 9, shape, distribution=distribution).reshape(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_noise_triton, "TILE", tile)
        found = by_numpy(KEY, 9, shape, rows=rows, cols=cols, distribution=distribution, draw=drawn)
    assert (bits(found) == bits(whole[slice(*rows), slice(*cols)])).all()


# full rank and low rank, each distribution, and each dtype
LAWS = [("gaussian", 0, dtype) for dtype in DTYPES] + [(law, 0, torch.bfloat16) for law in ("byte_sum", "tied")]
LAWS += [("tied", 1, torch.float32), ("byte_sum", 3, torch.bfloat16)]


@pytest.mark.parametrize("apart", [64, 67])
def test_each_members_own_tensors_have_the_bits_of_the_member_alone(apart):
    """Vectors and factors, which lie in wider rows, at distances that are multiples of four numbers or not."""
    keys, scales = members(3)
    scales *= np.float32(1e4)
    for shape, stream in (((64,), 0), ((2, 33), 1), ((2, 60), 2)):
        held = torch.full((3, 2, apart), 7.0, dtype=torch.bfloat16, device=DEVICE)
        stack = held[:, 0, : shape[0]] if len(shape) == 1 else held[:, :, : shape[1]]
        weights = device_weights([(stack, "name")], stream=stream, stacked=True)
        weights.master.fill_(0.5)
        weights.perturb_each(keys, scales)
        for own, key, scale in zip(stack, keys, scales, strict=True):
            eps = normals(int(key), parameter_id("name"), shape, stream=stream)
            assert same(own, torch.from_numpy(np.float32(0.5) + scale * eps).to(torch.bfloat16))
        assert int((held == 7).sum()) >= held.numel() - stack.numel()


@pytest.mark.parametrize(("distribution", "rank", "dtype"), LAWS, ids=str)
def test_members_and_updates_have_the_references_bits(distribution, rank, dtype):
    pieces, (keys, coefficients) = model(dtype), members(4)
    start = [piece.tensor.clone() for piece in pieces]
    weights = device_weights(pieces, distribution, most_members=4, rank=rank)
    master = weights.master.cpu().numpy().copy()
    assert master.shape == (LAYOUT.size,)
    for sign in (1, -1):
        weights.perturb(KEY, 1e-2, sign)
        expected = reference_perturb(master, LAYOUT, KEY, 1e-2, sign, distribution, rank)
        for piece, view in zip(pieces, LAYOUT.views(expected).values(), strict=True):
            assert same(piece.tensor, torch.from_numpy(view).to(dtype)), piece.name
    assert (bits(weights.master.cpu().numpy()) == bits(master)).all()
    weights.restore()
    assert all(same(piece.tensor, before) for piece, before in zip(pieces, start, strict=True))
    coefficients[3:] = 0.0
    for n in (4, 1, 0):  # a smaller population after a larger one takes nothing from it
        master = reference_update(master, LAYOUT, keys[:n], coefficients[:n], distribution, rank)
        weights.update(keys[:n], coefficients[:n])
        assert (bits(weights.master.cpu().numpy()) == bits(master)).all()
    assert all(same(piece.tensor, before) for piece, before in zip(pieces, start, strict=True))


@pytest.mark.parametrize(("row0", "col0"), [(3, 5), (61, 254)])
def test_low_rank_noise_of_a_window(row0, col0):
    """A shard that begins anywhere, with columns of a fused tensor, in tiles of which none begins where it does."""
    whole = by_numpy(KEY, parameter_id("shard"), (row0 + 70, col0 + 261), 2)
    fused = torch.zeros(70, 300, device=DEVICE)
    weights = device_weights([Piece(fused[:, 20:281], "shard", row0, col0)], rank=2)
    weights.perturb(KEY, 1.0)
    assert (bits(fused[:, 20:281].cpu().numpy()) == bits(whole[row0:, col0:] + np.float32(0))).all()
    assert not fused[:, :20].any() and not fused[:, 281:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decay_toward_the_start_has_the_bits_of_numpy(dtype, monkeypatch):
    monkeypatch.setattr(_anchor, "_BLOCK", 1000)
    weights, rate = device_weights(model(dtype), anchor_decay=0.3), np.float32(0.3)
    start = weights.master.cpu().numpy().copy()
    expected = start
    for n in (3, 0, 2):  # with no member at all it decays, too
        keys, coefficients = members(n)
        expected = expected - rate * (expected - start)
        expected = reference_update(expected, LAYOUT, keys, coefficients)
        if n == 3:
            weights.perturb(KEY, 1e-3)  # the working tensors are another's: the start is not in them
        weights.update(keys, coefficients)
        assert (bits(weights.master.cpu().numpy()) == bits(expected)).all()
    assert (bits(expected) != bits(start)).mean() > 0.9


def test_rounding_to_bfloat16_at_ties_and_ends():
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x3FFF8000, 0x00008000, 0x00018000], np.uint32)
    edges = np.array([0x7F7FFFFF, 0x7F7F7FFF, 0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x00000001, 0x80000000], np.uint32)
    values = np.concatenate([ties, ties ^ 0x80000000, edges, edges ^ 0x80000000]).view(np.float32)
    out = torch.zeros(len(values), dtype=torch.bfloat16, device=DEVICE)
    weights = device_weights([(out, "weight")])
    weights.master[: len(values)] = torch.from_numpy(values)
    weights.perturb(KEY, 1e-44)  # less than half a unit of every value here but the subnormal ones
    expected = torch.from_numpy(values + np.float32(1e-44) * normals(KEY, parameter_id("weight"), out.shape))
    nan = expected.isnan()
    assert same(out[~nan], expected[~nan].bfloat16())
    assert out[nan].isnan().all()


def test_fused_and_sharded_tensors_get_the_noise_of_the_whole():
    dtype = torch.bfloat16
    shapes = {"q": (48, 64), "k": (16, 64), "v": (16, 64), "down": (32, 70)}
    generator = np.random.default_rng(0)
    whole = {name: generator.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}
    # The second of two ranks: half the heads in one fused tensor, columns from 35 (and from 36) of a row-parallel one,
    # in a buffer with longer rows.
    fused = torch.zeros(40, 64, dtype=dtype, device=DEVICE)
    buffers = {first: torch.zeros(32, 40, dtype=dtype, device=DEVICE) for first in (35, 36)}
    pieces = [Piece(fused[:24], "q", 24), Piece(fused[24:32], "k", 8), Piece(fused[32:], "v", 8)]
    pieces += [Piece(buffer[:, : 70 - first], "down", 0, first) for first, buffer in buffers.items()]
    for tensor, name, row0, col0, _ in pieces:
        part = whole[name][row0 : row0 + tensor.shape[0], col0 : col0 + tensor.shape[1]]
        tensor.copy_(torch.from_numpy(part))
    weights, (keys, coefficients) = device_weights(pieces), members(3)
    layout, master = filled({name: torch.from_numpy(values).to(dtype).float() for name, values in whole.items()})

    def holds(buffer: np.ndarray, tensors: list[torch.Tensor]) -> None:
        views = layout.views(buffer)
        for (tensor, name, row0, col0, _), found in zip(pieces, tensors, strict=True):
            part = views[name][row0 : row0 + tensor.shape[0], col0 : col0 + tensor.shape[1]]
            assert same(found, torch.from_numpy(part).to(found.dtype)), (name, col0)

    holds(master, weights.views())
    weights.perturb(KEY, 1e-2)
    holds(reference_perturb(master, layout, KEY, 1e-2), [piece.tensor for piece in pieces])
    assert all((buffer[:, 70 - first :] == 0).all() for first, buffer in buffers.items()), "wrote beyond the columns"
    weights.update(keys, coefficients)
    holds(reference_update(master, layout, keys, coefficients), weights.views())


TENSOR = torch.zeros(8, 8, device="cpu" if DEVICE == "cpu" or not torch.cuda.is_available() else DEVICE)


test_errors_name_the_value = kernels(
    refused(
        ([], "at least one"),
        ([(TENSOR.double(), "a")], "'a' is torch.float64"),
        ([(TENSOR.T, "a")], r"'a' has the strides \(1, 8\)"),
        ([(TENSOR, "a"), (TENSOR, "b")], "'a' and 'b' are at one address"),
        ([(TENSOR, "a"), (torch.zeros(8, device="meta"), "b")], "'b' is on meta"),
        ([(TENSOR, "a", 0, 2**34)], f"columns from {2**34}"),
        ([(TENSOR, "a")], "3 members.*2"),
        call=lambda pieces: device_weights(pieces, most_members=2).update(*members(3)),
    )
)


# What only a real GPU shows, and what its compiler shows without one.


def compiled(name: str, target: str, shape: dict, fused: bool) -> str:
    """PTX of a kernel for a Hopper GPU; the compiler needs no GPU."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = {"target": target, "master": "*fp32", "table": "*i64", "tiles": "*i32", "keys": "*i64", "coefs": "*fp32"}
    given |= {"n": "*i32"} | ({"root": "fp32", "rank": "i32"} if "rank" in name else {})
    constants = {"KIND": _noise_cpu.GAUSSIAN, "UPDATE": target == "*fp32"} | shape
    source = ASTSource(
        fn=getattr(_noise_triton, name),
        signature=given | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(given.values()) if kind.startswith("*")},
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": fused}).asm["ptx"]


LINEAR = {"FLAT": True, "BLOCK": 512}  # a tile of a launch over whole quads
TILE = {"ROWS": _noise_triton.TILE_ROWS, "COLS": _noise_triton.TILE_COLS}


COMPILED = [
    ("_add_kernel", "*bf16", LINEAR, ["sqrt.rn.f32", "ld.global.v4.b32", "st.global.v2.b32"]),
    ("_add_kernel", "*fp32", LINEAR, ["sqrt.rn.f32", "ld.global.v4.b32", "st.global.v4.b32"]),
    pytest.param("_add_low_rank_kernel", "*bf16", TILE, ["mul.rn.f32"], marks=pytest.mark.slow),
    pytest.param("_add_low_rank_kernel", "*fp32", TILE, ["mul.rn.f32"], marks=pytest.mark.slow),
]


@pytest.mark.skipif(_noise_triton.INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("name", "target", "shape", "said"), COMPILED)
def test_compiled_kernels_fuse_nothing_and_move_four_at_a_time(name, target, shape, said, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = compiled(name, target, shape, fused=False)
    assert "fma.rn" not in ptx and "sqrt.approx" not in ptx and all(instruction in ptx for instruction in said)
    # The same check finds the fusion that the launches' option forbids.
    assert "fma.rn.f32" in compiled(name, target, shape, fused=True)


@gpu
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_perturb_and_update_allocate_nothing(distribution):
    weights = device_weights(model(torch.bfloat16), distribution, anchor_decay=0.1)
    member, population = (KEY, 1e-3), members(30)
    weights.perturb(*member)
    weights.update(*population)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights.perturb(*member)
    weights.update(*population)
    assert torch.cuda.max_memory_allocated() == before
