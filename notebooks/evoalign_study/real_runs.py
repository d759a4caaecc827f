"""The runs of scale "real", on one GPU, all in one process: training, evaluation, and what needs the weights of ends.

Every run starts from the same bfloat16 model, whose weights both arms hold in float32 while they train. ES decodes a
population with `engine="cuda"`, in bfloat16. GRPO is TRL's, with float32 weights and rollouts; a GPU computes the
matrix products of its loss and gradient in TF32. Both are measured alike, in bfloat16, by one decoder (`Judge`). Ends
are kept in memory as flat float32 weights, so that products, lines and merges need no file. Sums over weights are
float64.
"""

import copy
import gc
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from evoalign_lib import _adapters, arms, grpo, ledger, models, noise, smollm2
from evoalign_lib.analysis import geometry
from evoalign_lib.checks import require
from evoalign_lib.engines.base import Decoding, Prompts, _eos_ids, check_temperature
from evoalign_lib.engines.population import PopulationDecoder
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.noise import Layout
from evoalign_lib.precision import layout_of
from evoalign_study import evolution, gradients, measures, training, weight_cache
from evoalign_study.measures.base import decodings, significant, tallied
from evoalign_study.real_plan import ADAPTED
from evoalign_study.records import Record, Spec, pack_bits, pack_integers, spec_hash

_ROWS = 512
"""Rows that are decoded at once in a measurement; on a GPU fewer are filled up, so that one graph serves all."""
_PART = 1 << 22
"""Weights of each model in memory at once, in float64."""
_DTYPES = ("float32", "bfloat16")


class Judge(Decoding):
    """Decodes sets of prompts with any weights, one copy on the device; its `generate` is that of an `Engine`.

    Args:
        model, tokenizer: the base, whose dtype is that of all measurements.
        sets: name -> rows of the prompts.
        longest: maximum number of new tokens.
        device: "cuda" or "cpu".
    """

    def __init__(self, model: Any, tokenizer: Any, sets: Mapping[str, list], longest: int, device: str):
        prompts = {name: Prompts(rows, tokenizer) for name, rows in sets.items()}
        super().__init__(tokenizer, None, prompts, _eos_ids(model, tokenizer), longest)
        self.decoder = PopulationDecoder(model, 1, device, chunk_rows=_ROWS, apart=_adapters.is_adapted(model))
        self.plan = {"chunk_rows": _ROWS, "dtype": str(model.dtype).removeprefix("torch."), "decoder": "population"}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights, by name; of a model with an adapter those that move."""
        for name, tensor in weights.items():
            self.decoder.working(_adapters.plain_name(name)).copy_(tensor)

    def generate(
        self, name: str, indices: np.ndarray | None = None, *, samples: int = 0, seed: int = 0, temperature: float = 1.0
    ) -> list[list[tuple[str, list[int]]]]:
        """Generate completions, as `engines.base.Engine.generate` does and with the same random numbers."""
        check_temperature(temperature)
        asked, new = self.prompts[name], self.max_completion_length
        rows = np.arange(len(asked)) if indices is None else np.asarray(indices)
        every, numbers = np.tile(rows, samples or 1), None
        full = np.arange(len(every))
        if self.decoder.device.type == "cuda":
            full = np.resize(full, -(-len(every) // _ROWS) * _ROWS)
        if samples:
            seeds = [np.random.default_rng(np.random.SeedSequence([seed, draw])) for draw in range(samples)]
            drawn = np.concatenate([rng.random((len(asked), new), dtype=np.float32)[rows] for rng in seeds])
            numbers = drawn[full]
        ids, mask = asked.ids[every[full]], asked.mask[every[full]]
        how = {"temperature": temperature, "prefix": len(asked.prefix)}
        found = self.decoder.decode(ids, mask, new, self.eos_ids, numbers, **how)[0][: len(every)]
        pairs = self.completions(self.until_end(found))
        return [pairs[first : first + len(rows)] for first in range(0, len(pairs), len(rows))]


class Stopwatch(TrainerCallback):
    """Times the steps of a trainer, seconds each, without evaluation and logging."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self._started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Stop the clock, once the device has done what it was asked."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._started)

    @property
    def a_step(self) -> float:
        """Mean of the steps after the first two, which compile; some also take a digest."""
        return float(np.mean(self.seconds[2:] or self.seconds))


class Bench:
    """The base and all that its runs share on one device.

    Args:
        spec: that of the base.
        device: "cuda" or "cpu".
        folder: where a run works, so that a killed run of ES goes on from its ledger; None: nothing is kept.
        rank: of an adapter on `real_plan.ADAPTED` whose B alone moves; 0: all weights move.
    """

    def __init__(self, spec: Spec, device: str, folder: Path | None = None, rank: int = 0):
        self.device, self.folder = device, folder
        self.model, self.tokenizer = models.load(spec["base"], keywords={"dtype": getattr(torch, spec["dtype"])})
        if spec["base"] == smollm2.NAME:  # a folder's digest was taken from its files
            found, wanted = models.base_digest(self.model), spec["base_digest"]
            what = f"the weights of {spec['base']} have the digest {found}, not {wanted}"
            require(found == wanted, f"{what}: make them again with `python -m evoalign_lib.smollm2`.")
        self.d = sum(parameter.numel() for parameter in self.model.parameters())  # without an adapter
        if rank:
            peft = _adapters.open_peft()
            config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=list(ADAPTED))
            self.model = _adapters.attach(self.model, config, 0)
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(".lora_B." in name)
        self.layout: Layout = layout_of(self.model)
        self.measure = measures.of(spec)
        self.start = self.flat(dict(self.model.named_parameters()))
        sets = self.measure.sets(spec)
        rows = {name: self.measure.rows(spec, self.tokenizer, problems) for name, problems in sets.items()}
        self.judge = Judge(self.model, self.tokenizer, rows, spec["max_completion_length"], device)
        self.sets = sets
        self.ends: dict[str, Tensor] = {}
        """digest -> flat float32 weights of an end, in this machine's memory"""
        self.keeps: set[str] = set()
        """arms whose ends are remembered after training"""
        self._gram: tuple[list[str], geometry.Displacements] | None = None

    def flat(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return weights as one flat float32 tensor in the machine's memory, (layout.size,)."""
        out = torch.zeros(self.layout.size)
        for name, view in self.layout.views(out).items():
            view.copy_(weights[name].detach())
        return out

    def put(self, flat: Tensor) -> None:
        """Give the judge flat weights, which may lie anywhere."""
        self.judge.load(self.layout.views(flat.to(self.device)))

    # ---- untrained and trained models

    def untrained(self, spec: Spec) -> Record:
        """Return the record of the base: the test set under three decodings, and validation."""
        self.put(self.start)
        return {"test": self.tested(), "validation": self.tested("validation"), "measured_by": self.judge.plan}

    def tested(self, name: str = "test") -> dict[str, Any]:
        """Return the results on a set of problems, greedily and with 16 samples at temperatures 0.6 and 1."""
        problems = self.sets[name]
        told: dict[str, Any] = {"n": len(problems)}
        for decoding, how in decodings(16).items():
            told |= tallied(decoding, self.measure.accuracy(self.judge, name, problems, **how))
        return told

    def trained(self, spec: Spec, keep: Path | None = None) -> Record:
        """Train as a spec says, and return its record without provenance.

        ES's samples are described by "plan", GRPO's by "decoder" and "decoder_dtype", those of measurements, for both,
        by "measured_by". In the oldest records GRPO's decoder is called "loop", and "plan" is what measured it.

        keep: where the compressed ledger of an ES run goes. The ends of `keeps` are remembered, unless the spec has no
        test problems, as in a sweep. The budget has "train_seconds" of all steps, "step_seconds" of one, and
        "rest_seconds" of preparation and evaluation; "gpu_memory_bytes" is the most that torch held on a GPU.
        """
        began = time.perf_counter()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with self._training(spec, keep) as (end, result, watch):
            digest = models.flat_digest(end.numpy())
            result |= {"d": self.layout.d, "digest": digest, "measured_by": self.judge.plan}
            result |= {"update_norm": significant(self._distance(end), 8)}
            if not torch.isfinite(end).all():
                result["diverged"] = spec.get("steps", 0)
            if spec["test_problems"]:
                self.put(end)
                result["test"] = self.tested()
                self.ends |= {digest: end} if spec["arm"] in self.keeps else {}
        spent = {"train_seconds": sum(watch.seconds), "step_seconds": watch.a_step}
        spent["rest_seconds"] = time.perf_counter() - began - spent["train_seconds"]
        result["budget"] |= {name: round(seconds, 3) for name, seconds in spent.items()}
        if self.device == "cuda":
            result["budget"]["gpu_memory_bytes"] = torch.cuda.max_memory_allocated()
        return result

    @contextmanager
    def _training(self, spec: Spec, keep: Path | None) -> Iterator[tuple[Tensor, Record, Stopwatch]]:
        of_family = {"gradient": self._gradient, "sft": self._fine_tuned}
        train = of_family.get(arms.get(spec["arm"]).family, self._evolved)
        try:
            kept = nullcontext(self.folder / spec_hash(spec)) if self.folder else tempfile.TemporaryDirectory()
            with kept as place, train(spec, Path(place), keep) as made:
                yield made
        finally:
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()

    # ---- ends of earlier commands

    def replayed(self, record: Record, source: Path) -> None:
        """Remember the end of an ES run from its ledger. Raises ValueError unless it is the recorded one."""
        run, weights = ledger.read(source), self.start.to(self.device, copy=True)
        pieces = [noise.Piece(view, name) for name, view in self.layout.views(weights).items()]
        held = noise.device_weights(pieces, run.settings["noise"])
        for update in ledger.updates(run, len(run.steps)):
            held.update(*update)
        self._remember(record, held.master.cpu(), "replayed")

    def again(self, record: Record) -> None:
        """Train a run again for its end, without evaluation on the way. Raises ValueError unless it is the recorded."""
        with self._training(record["spec"] | {"curve_points": 1}, None) as (end, _, _):
            self._remember(record, end, "trained again")

    def _remember(self, record: Record, end: Tensor, how: str) -> None:
        weight_cache.check_digest(models.flat_digest(end.numpy()), record["digest"], how)
        self.ends[record["digest"]] = end

    def _distance(self, end: Tensor) -> float:
        total = 0.0
        for one, other in zip(end.split(_PART), self.start.split(_PART), strict=True):
            moved = one.to(self.device).double() - other.to(self.device).double()
            total += float(moved @ moved)
        return total**0.5

    def _curve(self, spec: Spec, look: Callable[[], Mapping[str, Any]]) -> tuple[Any, training.Progress]:
        """Return the callback that measures the curve; look: gives the judge the weights, and returns the budget."""
        progress = training.Progress(None)
        return training.curve_callback(spec, self.sets, progress, lambda: (self.judge, look())), progress

    @contextmanager
    def _evolved(self, spec: Spec, place: Path, keep: Path | None) -> Iterator[tuple[Tensor, Record, Stopwatch]]:
        def look() -> Mapping[str, Any]:
            self.judge.load(self.layout.views(es.engine.weights.on_device))
            return evolution.spent(es)

        curve, progress = self._curve(spec, look)
        named = ("seed", "population_size", "sigma", "alpha", "prompts_per_step", "max_completion_length")
        settings = {name: spec[name] for name in named} | dict(arms.get(spec["arm"]).options)
        settings |= {"max_steps": spec["steps"], "engine": "cuda", "use_cpu": self.device == "cpu"}
        settings |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        if self.device == "cpu":  # more at once are not faster there, and each takes memory
            settings["engine_kwargs"] = {"members": 2}
        rows = self.measure.rows(spec, self.tokenizer, self.measure.sets(spec)["train"])
        model, watch = copy.deepcopy(self.model), Stopwatch()
        config = ESConfig(output_dir=str(place), **settings)
        es = ESTrainer(model, self.measure.reward(spec), config, rows, None, self.tokenizer, [watch, curve])
        es.warm_start_cost = None  # `evolution.spent` asks
        with closing(es.engine):
            es.train(resume_from_checkpoint=(place / ledger.NAME).is_file())
            result = {"budget": _rounded(evolution.spent(es)), "counts": dict(es.counts), "plan": es.engine.plan}
            result["curve"] = progress.curve
            if keep is not None:
                packed = ledger.pack(es.ledger.path)
                keep.write_bytes(packed)
                sizes = {"bytes": es.ledger.path.stat().st_size, "gzip_bytes": len(packed)}
                result["ledger"] = sizes | {"sha256": hashlib.sha256(packed).hexdigest()}
                result["ledger"]["weights"] = es.ledger.weights[len(es.ledger.steps)]
            end = torch.from_numpy(es.engine.weights.flat.copy())
        yield end, result, watch

    @contextmanager
    def _gradient(self, spec: Spec, place: Path, keep: Path | None) -> Iterator[tuple[Tensor, Record, Stopwatch]]:
        import trl
        from transformers import PrinterCallback

        def look() -> Mapping[str, Any]:
            self.judge.load(_adapters.moved(trainer.model))
            return budget.spent(self.d)

        curve, progress = self._curve(spec, look)
        named = ("seed", "steps", "prompts_per_step", "num_generations", "max_completion_length")
        settings = {name: spec[name] for name in (*named, "learning_rate", "beta")} | {"decoder": "population"}
        settings |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
        settings |= {"use_cpu": True, "micro_batch": 16} if self.device == "cpu" else {}
        rows, watch = self.measure.rows(spec, self.tokenizer, self.measure.sets(spec)["train"]), Stopwatch()
        args, model = grpo.config(spec["arm"], output_dir=str(place), **settings), copy.deepcopy(self.model).float()
        reward = self.measure.reward(spec)
        trainer, budget = grpo.trainer(model, reward, args, rows, self.tokenizer, [watch, curve])
        trainer.remove_callback(PrinterCallback)
        # checks the logits of rollouts, and captures their graphs on a GPU, in full float32
        first = [row["prompt"] for row in rows[: spec["prompts_per_step"]] for _ in range(spec["num_generations"])]
        trainer.rollout_func(first, trainer)
        with _tf32():
            trainer.train()
        result = {"budget": _rounded(look()), "counts": dict(budget.counts), "curve": progress.curve}
        result |= {"decoder": settings["decoder"], "decoder_dtype": "float32", "trl": trl.__version__}
        end = self.flat(dict(trainer.model.named_parameters()))
        trainer.accelerator.free_memory()  # it outlives the trainer and would keep model and optimiser on the GPU
        yield end, result, watch

    @contextmanager
    def _fine_tuned(self, spec: Spec, place: Path, keep: Path | None) -> Iterator[tuple[Tensor, Record, Stopwatch]]:
        """Fine-tune on right samples of the base, which the judge draws, in its dtype; see `gradients.fine_tune`."""
        import trl

        watch, began, cpu = Stopwatch(), time.perf_counter(), time.process_time()
        problems = self.measure.sets(spec)["train"]
        self.judge.prompts["train"] = prompts = Prompts(
            self.measure.rows(spec, self.tokenizer, problems), self.tokenizer
        )
        self.put(self.start)
        samples = self.judge.generate("train", samples=spec["num_generations"], seed=spec["seed"])
        pairs = gradients.imitated(spec, problems, samples, prompts, self.judge.eos_ids)
        watch.seconds.append(time.perf_counter() - began)
        model = copy.deepcopy(self.model).float()
        if pairs:
            settings = {name: spec[name] for name in ("seed", "learning_rate", "batch_size", "epochs")}
            settings |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
            settings |= {"use_cpu": True} if self.device == "cpu" else {}
            tuned = grpo.filtered_sft(
                model, self.tokenizer, pairs, output_dir=str(place), callbacks=[watch], **settings
            )
            with _tf32():
                tuned.train()
            tuned.accelerator.free_memory()
        spent = gradients.spent(spec, samples, prompts, pairs, self.layout.d)
        result = {"budget": _rounded(spent | {"core_seconds": time.process_time() - cpu})}
        result |= {"counts": {"kept": len(pairs)}, "plan": self.judge.plan, "trl": trl.__version__}
        yield self.flat(dict(model.named_parameters())), result, watch

    # ---- what needs the weights of ends

    def _moved(self, named: Mapping[str, Any]) -> Tensor:
        """Return the mean displacement of a group's runs (`weight_cache.group`), float64, on the device."""
        total = torch.zeros(self.layout.size, dtype=torch.float64, device=self.device)
        for digest in named["digests"]:
            total += self.ends[digest].to(self.device).double() - self.start.to(self.device).double()
        return total / len(named["digests"])

    def _displacement(self, end: Mapping[str, Any]) -> Tensor:
        """Return the displacement that `weight_cache.end` names, float64, on the device; a walk has the noise law's."""
        moved = self._moved(end["of"])
        if "walk" in end:
            length = float(self._moved(end["as_long_as"]).norm())
            walk = torch.zeros(self.layout.size, device=self.device)
            law = noise.device_weights(noise.Piece(view, name) for name, view in self.layout.views(walk).items())
            law.perturb(noise.member_key(noise.run_key("walk", 0), 0, end["walk"]), 1.0)
            walk = walk.double()
            square, along, short = float(walk @ walk), float(moved @ walk), length**2 - float(moved @ moved)
            require(short >= 0, "the mean of the others is longer than the run: average more runs.")
            moved += walk * (((along**2 + square * short) ** 0.5 - along) / square)
        return end["factor"] * moved

    def products(self, spec: Spec) -> Record:
        """Return the record of a block of the Gram matrix, by kind of tensor, as `kinds.weights.run_products`."""
        names = [*self.ends]
        if self._gram is None or self._gram[0] != names:  # all at once, since reading the ends takes the time
            self._gram = names, gram(self.layout, self.start, [*self.ends.values()], self.device).by("kind")
        found, blocks = self._gram[1], {}
        a, b = ([names.index(digest) for digest in spec[side]["digests"]] for side in ("a", "b"))
        for i, name in enumerate(found.names):
            block = [[significant(x, 7) for x in row] for row in found.gram[i][np.ix_(a, b)]]
            told = {"entries": int(found.entries[i]), "start": significant(found.start[i], 7), "products": block}
            moved = {dtype: found.moved[dtype][i, a].tolist() for dtype in _DTYPES}
            blocks[name] = told | ({"moved": moved} if a == b else {})
        return {"d": self.layout.d, "layers": blocks}

    def path(self, spec: Spec) -> Record:
        """Return the record of a line between two ends: right answers on the test problems at points along it."""
        ends, points = [self._displacement(spec[name]) for name in ("first", "last")], []
        start = self.start.to(self.device).double()
        for a in np.linspace(0, 1, spec["path_points"]):
            self.put((start + (1 - float(a)) * ends[0] + float(a) * ends[1]).float())
            right = {}
            for name, how in decodings(1, (1.0,)).items():
                answers = self.measure.accuracy(self.judge, "test", self.sets["test"], **how)[0]
                right[f"{name}_bits"] = pack_bits(answers.astype(int))
            points.append(right)
        told = {name: [point[name] for point in points] for name in points[0]}
        distance = significant(float((ends[1] - ends[0]).norm()), 7)
        return {"n": len(self.sets["test"]), "distance": distance, "points": told}

    def merged(self, spec: Spec) -> Record:
        """Return the record of a merged model, as `kinds.weights.run_merge` but without other skills and KL."""
        moved = self._displacement(spec)
        self.put((self.start.to(self.device).double() + moved).float())
        return {"d": self.layout.d, "norm": significant(float(moved.norm()), 7), "test": self.tested()}

    def sampled(self, spec: Spec) -> Record:
        """Return the record of an end, or of the base: right samples of each test problem at two temperatures."""
        n, samples = spec["sampled_problems"], spec["samples"]
        self.put(self.ends[spec["end"]["of"]["digests"][0]] if "end" in spec else self.start)
        told: dict[str, Any] = {"n": n, "samples": samples, "measured_by": self.judge.plan}
        for name, how in list(decodings(samples).items())[1:]:
            right = self.measure.accuracy(self.judge, "test", self.sets["test"][:n], indices=np.arange(n), **how)
            told |= {name: significant(float(right.mean())), f"{name}_counts": pack_integers(right.sum(0).astype(int))}
        return told


@contextmanager
def _tf32() -> Iterator[None]:
    """Multiply matrices in TF32 on a GPU that has it; nothing changes on a CPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def gram(layout: Layout, start: Tensor, ends: Sequence[Tensor], device: str) -> geometry.Displacements:
    """Return what `geometry.measure` does, for flat weights, with its sums taken in float64 on a device.

    Args:
        layout: of the weights.
        start, ends: flat float32 weights, (layout.size,) each.
        device: where to compute.
    """
    names, entries = zip(*((entry.name, entry.rows * entry.cols) for entry in layout.entries), strict=True)
    square, products = np.zeros(len(names)), np.zeros((len(names), len(ends), len(ends)))
    moved = {dtype: np.zeros((len(names), len(ends)), np.int64) for dtype in _DTYPES}
    for row, entry in enumerate(layout.entries):
        for first in range(entry.offset, entry.offset + entries[row], _PART):
            part = slice(first, min(first + _PART, entry.offset + entries[row]))
            origin, each = start[part].to(device), torch.stack([end[part].to(device) for end in ends])
            exact = each.double() - origin.double()
            square[row] += float(origin.double() @ origin.double())
            products[row] += (exact @ exact.T).cpu().numpy()
            moved["float32"][row] += (exact != 0).sum(1).cpu().numpy()
            moved["bfloat16"][row] += (each.bfloat16() != origin.bfloat16()).sum(1).cpu().numpy()
    tied = not any(geometry.layer_of(name) == "head" for name in names)
    names = tuple(name.replace(".lora_B.default", "") for name in names)  # an adapter's B is of its matrix's kind
    return geometry.Displacements(names, np.array(entries, np.int64), square, products, moved, tied)


def _rounded(budget: Mapping[str, Any]) -> dict[str, Any]:
    return dict(budget) | {"core_seconds": round(budget["core_seconds"], 2)}
