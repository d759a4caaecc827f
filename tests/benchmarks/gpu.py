"""What the noise law costs on a GPU: `python -m tests.benchmarks.gpu`.

Models have the shapes of Qwen2.5 and random weights, so that nothing is downloaded; torch, Triton and numba are all
that is needed. Every cell is measured interleaved with what it is compared with, the first round discarded; minimum and
median are kept. A section that fails records its error and the others go on. Results are printed and merged into a JSON
file under the device's name.

Sections: `device`; `equality` of the GPU's bits with the CPU's; `perturb`, a member's weights from the master; `update`
of the master by N members; `iteration`, the share of pure inference that an ES iteration keeps; `memory`, bytes a
parameter. "public" are statements that released codes share: randn in the parameter's dtype, a multiplication, an
addition, for one tensor after the other.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from evoalign_study import paths

from evoalign_lib import noise
from tests.benchmarks import shared
from tests.benchmarks.shared import merge, public_perturb, run_sections

SIGMA, ALPHA = 1e-3, 5e-4
KERNELS = ("gaussian", "byte_sum")


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2.5 model (its public config.json)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool


MODELS = {
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064, False),
    "toy": Shape(32, 48, 1, 4, 2, 96, True),
}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    device: str
    models: tuple[str, ...]
    repeats: int
    members: int  # of a measured iteration and update: the cost is linear in them
    rows: int  # prompts a member
    width: int  # tokens a prompt
    lengths: tuple[int, ...]  # new tokens
    equality: int  # elements of the largest tensor compared with the CPU


# Models


class Model:
    """A decoder of Qwen2's architecture with fused projections, a static cache and, on a GPU, a graphed step."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
        self.shape, self.device, self.dtype = shape, device, dtype
        self.head = shape.hidden // shape.heads
        generator = torch.Generator(device).manual_seed(seed)

        def matrix(rows: int, cols: int) -> torch.Tensor:
            return torch.empty(rows, cols, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)

        h, kv = shape.hidden, shape.kv_heads * self.head
        self.embedding = matrix(shape.vocabulary, h)
        self.output = self.embedding if shape.tied else matrix(shape.vocabulary, h)
        self.norm = torch.ones(h, device=device, dtype=dtype)
        self.pieces = [noise.Piece(self.embedding, "model.embed_tokens.weight")]
        self.pieces.append(noise.Piece(self.norm, "model.norm.weight"))
        if not shape.tied:
            self.pieces.append(noise.Piece(self.output, "lm_head.weight"))
        self.layers = []
        for i in range(shape.layers):
            layer = {
                "qkv": matrix(h + 2 * kv, h),
                "qkv_bias": matrix(1, h + 2 * kv)[0],
                "o": matrix(h, h),
                "gate_up": matrix(2 * shape.intermediate, h),
                "down": matrix(h, shape.intermediate),
                "norm1": torch.ones(h, device=device, dtype=dtype),
                "norm2": torch.ones(h, device=device, dtype=dtype),
            }
            self.layers.append(layer)
            parts = [("q", 0, h), ("k", h, h + kv), ("v", h + kv, h + 2 * kv)]
            named = {f"self_attn.{n}_proj.weight": layer["qkv"][a:b] for n, a, b in parts}
            named |= {f"self_attn.{n}_proj.bias": layer["qkv_bias"][a:b] for n, a, b in parts}
            named |= {"self_attn.o_proj.weight": layer["o"], "mlp.down_proj.weight": layer["down"]}
            named["mlp.gate_proj.weight"] = layer["gate_up"][: shape.intermediate]
            named["mlp.up_proj.weight"] = layer["gate_up"][shape.intermediate :]
            named |= {"input_layernorm.weight": layer["norm1"], "post_attention_layernorm.weight": layer["norm2"]}
            self.pieces += [noise.Piece(tensor, f"model.layers.{i}.{name}") for name, tensor in named.items()]
        self.d = sum(tensor.numel() for tensor in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        return [piece.tensor for piece in self.pieces]

    def prepare(self, rows: int, width: int, new: int) -> None:
        """Allocate cache and inputs for a batch, and capture the decoding step."""
        shape, device, dtype = self.shape, self.device, self.dtype
        self.rows, self.width, self.new = rows, width, new
        length = -(-(width + new) // 16) * 16
        size = (shape.layers, rows, shape.kv_heads, length, self.head)
        self.keys, self.values = (torch.zeros(size, device=device, dtype=dtype) for _ in range(2))
        angles = torch.arange(length, device=device)[:, None] / 1e6 ** (
            torch.arange(0, self.head, 2, device=device) / self.head
        )
        self.cos, self.sin = (f(torch.cat([angles, angles], 1)).to(dtype) for f in (torch.cos, torch.sin))
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.mask = torch.full((1, 1, 1, length), -math.inf, dtype=dtype, device=device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self.graph = None
        if device == "cuda":
            self._reset()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self.graph = graph

    def free(self) -> None:
        self.keys = self.values = self.graph = None

    def _reset(self) -> None:
        self.position.fill_(self.width)
        self.mask.fill_(-math.inf)
        self.mask[..., : self.width] = 0

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        """Greedy tokens (rows, new) on the host, for prompts (rows, width)."""
        self._reset()
        x = self._blocks(F.embedding(prompts, self.embedding), self._attend_to_prompt)
        self._choose(x[:, -1])
        for _ in range(self.new - 1):
            if self.graph is None:
                self._step()
            else:
                self.graph.replay()
        return self.tokens[:, self.width : self.width + self.new].cpu()

    @torch.no_grad()
    def _step(self) -> None:
        x = self._blocks(F.embedding(self.token, self.embedding)[:, None], self._attend_to_cache)
        self.position.add_(1)
        self._choose(x[:, -1])

    def _choose(self, x: torch.Tensor) -> None:
        """The next token, written at `position`, which the next step reads."""
        torch.argmax(F.linear(F.rms_norm(x, x.shape[-1:], self.norm, 1e-6), self.output), dim=-1, out=self.token)
        self.tokens.index_copy_(1, self.position, self.token[:, None])

    def _blocks(self, x: torch.Tensor, attend: Callable) -> torch.Tensor:
        shape = self.shape
        kv = shape.kv_heads * self.head
        for i, layer in enumerate(self.layers):
            qkv = F.linear(F.rms_norm(x, x.shape[-1:], layer["norm1"], 1e-6), layer["qkv"], layer["qkv_bias"])
            q, k, v = (
                part.view(*x.shape[:2], -1, self.head).transpose(1, 2)
                for part in qkv.split([shape.hidden, kv, kv], dim=-1)
            )
            x = x + F.linear(attend(i, q, k, v).transpose(1, 2).reshape(x.shape), layer["o"])
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:], layer["norm2"], 1e-6), layer["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return x

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def _attend_to_prompt(self, i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[: self.width], self.sin[: self.width]
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        self.keys[i, :, :, : self.width], self.values[i, :, :, : self.width] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def _attend_to_cache(self, i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos.index_select(0, self.position), self.sin.index_select(0, self.position)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        self.keys[i].index_copy_(2, self.position, k)
        self.values[i].index_copy_(2, self.position, v)
        self.mask.index_fill_(3, self.position, 0)
        # The heads that share keys stand where a longer query would have its positions: no key is copied.
        grouped = q.reshape(self.rows, self.shape.kv_heads, -1, self.head)
        mask = self.mask.expand(-1, -1, grouped.shape[2], -1)
        return F.scaled_dot_product_attention(grouped, self.keys[i], self.values[i], mask).reshape(q.shape)


def public_update(model: Model, seeds: list[int], coefficients: list[float]) -> None:
    for seed, coefficient in zip(seeds, coefficients, strict=True):
        public_perturb(model.tensors(), seed, coefficient)


# Measuring


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(device: str, repeats: int, **cases: Callable[[], Any]) -> dict[str, dict[str, float]]:
    return shared.measure(repeats, cases, lambda: synchronise(device))


def use(weights: Any, distribution: str) -> None:
    """Change the distribution; users make other weights for it, here they shall share one master's memory."""
    weights._kind = noise._LAWS[distribution][0]


def population(n: int) -> tuple[np.ndarray, np.ndarray]:
    root = noise.run_key("benchmark", 0)
    z = np.random.default_rng(0).standard_normal(n)
    return np.array([noise.member_key(root, 0, i) for i in range(n)], np.uint64), (ALPHA / n * z).astype(np.float32)


# Sections


def device_section(plan: Plan) -> dict:
    import numba
    import triton

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"triton": triton.__version__, "numba": numba.__version__, "numpy": np.__version__}
    if plan.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"multiprocessors": properties.multi_processor_count, "memory_bytes": properties.total_memory}
        found["cuda"] = torch.version.cuda
        query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,driver_version", "--format=csv,noheader"]
        found["clocks"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return found


def equality_section(plan: Plan) -> dict:
    """Bits of the GPU against numba's, which the unit tests hold equal to the reference's."""
    found: dict[str, Any] = {}
    vectors = json.loads(Path(noise.__file__).with_name("noise_vectors.json").read_text())
    wrong = []
    for case in vectors["normals"] + vectors["alternatives"]:
        z = noise.normals(
            int(case["key"], 16),
            int(case["param_id"], 16),
            case["shape"],
            rows=case["rows"],
            cols=case["cols"],
            stream=case["stream"],
            distribution=case.get("distribution", "gaussian"),
            backend="triton",
        )
        if [f"{word:08x}" for word in z.ravel().view(np.uint32)] != case["normals"].split():
            wrong.append(case["about"])
    found["known_answers"] = {"cases": len(vectors["normals"] + vectors["alternatives"]), "wrong": wrong}
    part = plan.equality // 64
    side = math.isqrt(plan.equality)
    mixed = [(part // 1024 + 1, 1024), (part // 2050 + 1, 2050), (part + 3,), (7, 3, 5, 11), (part // 5 + 1, 5)]
    for distribution in noise.DISTRIBUTIONS:
        compared = differing = 0
        for i, shape in enumerate([*mixed, (side, side)] if distribution == "gaussian" else mixed):
            here, there = (
                noise.normals(7, i, shape, distribution=distribution, backend=b) for b in ("triton", "numba")
            )
            compared += here.size
            differing += int((here.view(np.uint32) != there.view(np.uint32)).sum())
        found[distribution] = {"compared": compared, "differing": differing}
    model = Model(MODELS[plan.models[0]], plan.device)
    weights = noise.device_weights(model.pieces)
    layout = noise.Layout.from_shapes((piece.name, tuple(piece.tensor.shape)) for piece in model.pieces)
    master, (keys, coefficients) = weights.master.cpu().numpy().copy(), population(3)
    weights.update(keys, coefficients)
    noise.update(master, layout, keys, coefficients)
    weights.perturb(int(keys[0]), SIGMA)
    working = np.empty_like(master)
    noise.perturb(working, master, layout, int(keys[0]), SIGMA)
    expected = [torch.from_numpy(view).to(model.dtype) for view in layout.views(working).values()]
    found["model"] = {
        "name": plan.models[0],
        "master_differing": int((weights.master.cpu().numpy().view(np.uint32) != master.view(np.uint32)).sum()),
        "working_differing": sum(
            int((piece.tensor.cpu().view(torch.int16) != there.view(torch.int16)).sum())
            for piece, there in zip(model.pieces, expected, strict=True)
        ),
    }
    return found


def copy_bandwidth(plan: Plan) -> float:
    """Bytes read and written a second by a copy on the device."""
    n = 1 << 20 if plan.device == "cpu" else 1 << 31
    source, target = (torch.empty(n, dtype=torch.uint8, device=plan.device) for _ in range(2))
    return 2 * n / measure(plan.device, 10, copy=lambda: target.copy_(source))["copy"]["seconds_min"]


def perturb_section(plan: Plan) -> dict:
    found: dict[str, Any] = {"copy_bytes_per_second": copy_bandwidth(plan)}
    for name in plan.models:
        model = Model(MODELS[name], plan.device)
        cases: dict[str, Callable] = {"public": lambda model=model: public_perturb(model.tensors(), 1, SIGMA)}
        weights = noise.device_weights(model.pieces)

        def perturb(distribution: str, weights=weights) -> None:
            use(weights, distribution)
            weights.perturb(12345, SIGMA)

        cases |= {d: lambda d=d, perturb=perturb: perturb(d) for d in KERNELS}
        times = measure(plan.device, plan.repeats, **cases)
        moved = 6 * model.d  # a float32 read, a bfloat16 written
        for distribution in KERNELS:
            seconds = times[distribution]["seconds_min"]
            times[distribution] |= {
                "parameters_per_second": model.d / seconds,
                "fraction_of_copy_bandwidth": moved / seconds / found["copy_bytes_per_second"],
                # released codes also restore, by a second pass
                "times_faster_than_public_perturb_and_restore": 2 * times["public"]["seconds_min"] / seconds,
            }
        found[name] = {"parameters": model.d, "tensors": len(model.pieces)} | times
        del model, weights, cases, perturb
        release(plan.device)
    return found


def update_section(plan: Plan) -> dict:
    found: dict[str, Any] = {"members": plan.members}
    keys, coefficients = population(plan.members)
    for name in plan.models:
        model = Model(MODELS[name], plan.device)
        weights = noise.device_weights(model.pieces)

        def update(distribution: str, weights=weights) -> None:
            use(weights, distribution)
            weights.update(keys, coefficients)

        cases: dict[str, Callable] = {d: lambda d=d, update=update: update(d) for d in KERNELS}
        cases["public"] = lambda model=model: public_update(model, list(range(plan.members)), coefficients.tolist())
        times = measure(plan.device, plan.repeats, **cases)
        for distribution in KERNELS:
            seconds = times[distribution]["seconds_min"]
            times[distribution] |= {
                "normals_per_second": plan.members * model.d / seconds,
                "times_faster_than_public": times["public"]["seconds_min"] / seconds,
            }
        found[name] = {"parameters": model.d} | times
        del model, weights, cases, update
        release(plan.device)
    return found


def iteration_section(plan: Plan) -> dict:
    """The same members decoded with and without everything that makes it an ES iteration."""
    found: dict[str, Any] = {"members": plan.members, "prompts": plan.rows, "prompt_tokens": plan.width}
    keys, coefficients = population(plan.members)
    for name in plan.models:
        model = Model(MODELS[name], plan.device)
        prompts = torch.randint(0, model.shape.vocabulary, (plan.rows, plan.width), device=plan.device)
        found[name] = {}
        weights = noise.device_weights(model.pieces)
        for new in plan.lengths:
            model.prepare(plan.rows, plan.width, new)

            def pure(model=model, prompts=prompts) -> None:
                for _ in keys:
                    model.generate(prompts)

            def iteration(distribution: str, model=model, prompts=prompts, weights=weights) -> None:
                use(weights, distribution)
                for key in keys:
                    weights.perturb(int(key), SIGMA)
                    model.generate(prompts)
                weights.update(keys, coefficients)

            cases: dict[str, Callable] = {d: lambda d=d, f=iteration: f(d) for d in ("gaussian", "byte_sum")}
            times = measure(plan.device, min(3, plan.repeats), pure=pure, **cases)
            seconds = times["pure"]["seconds_min"]
            for distribution in cases:
                times[distribution]["fraction_of_inference"] = seconds / times[distribution]["seconds_min"]
            times["pure"]["tokens_per_second"] = plan.members * plan.rows * new / seconds
            found[name][f"{new} new tokens"] = times
            model.free()
            del pure, iteration, cases
            release(plan.device)
        del model, weights
        release(plan.device)
    return found


def memory_section(plan: Plan) -> dict:
    """Bytes a parameter: at rest, and at the peak of perturb and update."""
    if plan.device != "cuda":
        return {"skipped": "only a GPU counts its allocations"}
    found = {}
    keys, coefficients = population(plan.members)
    for name in plan.models:
        release(plan.device)
        start = torch.cuda.memory_allocated()
        model = Model(MODELS[name], plan.device)

        def peak(call: Callable, start=start, model=model) -> float:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            call()
            torch.cuda.synchronize()
            return (torch.cuda.max_memory_allocated() - start) / model.d

        cell = {"working": (torch.cuda.memory_allocated() - start) / model.d}
        cell["public_inplace_peak"] = peak(lambda model=model: public_perturb(model.tensors(), 1, SIGMA))
        weights = noise.device_weights(model.pieces)
        cell["master"] = (torch.cuda.memory_allocated() - start) / model.d

        def step(weights=weights) -> None:
            weights.perturb(1, SIGMA)
            weights.update(keys, coefficients)

        cell["master_peak"] = peak(step)
        found[name] = cell
        del model, weights, step, peak
    return found


SECTIONS: dict[str, Callable[[Plan], dict]] = {
    "device": device_section,
    "equality": equality_section,
    "perturb": perturb_section,
    "update": update_section,
    "iteration": iteration_section,
    "memory": memory_section,
}


def release(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__.split("\n")[0])
    known = [name for name in MODELS if name != "toy"]
    parser.add_argument("--models", nargs="+", choices=known, default=known)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds; iterations take 3 at most")
    parser.add_argument("--members", type=int, default=6, help="of an iteration and an update; the cost is linear")
    parser.add_argument("--prompts", type=int, default=200, help="a member")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[20, 256])
    parser.add_argument("--out", type=Path, help="JSON file to merge into (default: paper/results/bench.json)")
    parser.add_argument("--toy", action="store_true", help="a toy on the CPU, interpreted: proves that sections run")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    out = options.out or (None if options.toy else paths.ROOT / "paper" / "results" / "bench.json")
    if options.toy:
        plan = Plan("cpu", ("toy",), repeats=1, members=1, rows=3, width=5, lengths=(2,), equality=1 << 12)
        name = "toy (CPU, Triton's interpreter)"
    elif torch.cuda.is_available():
        sizes = options.repeats, options.members, options.prompts, options.prompt_tokens, tuple(options.new_tokens)
        plan = Plan("cuda", tuple(options.models), *sizes, equality=1 << 28)
        name = torch.cuda.get_device_name(0)
    else:
        print("This benchmark needs a GPU that torch sees; --toy shows on a CPU that it runs.", file=sys.stderr)
        return 2

    def measured(section: str) -> dict:
        try:
            return SECTIONS[section](plan)
        finally:
            release(plan.device)

    def store(results: dict) -> None:
        if out is not None:
            merge(out, name, "gpu", results)

    results = run_sections(
        {section: partial(measured, section) for section in options.sections},
        lambda section, found: print(json.dumps({section: found}, indent=1)),
        store,
    )
    return int(any("error" in found for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
