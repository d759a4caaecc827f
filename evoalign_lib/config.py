"""`ESConfig`: the settings of an ES run, their meaning, and the checks of their values."""

import dataclasses
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from evoalign_lib import models, noise, precision
from evoalign_lib._adapters import PERTURBED
from evoalign_lib._anchor import check_decay
from evoalign_lib._ledger_lines import MOST_MEMBERS
from evoalign_lib.checks import choose, nearest, plain, positive, single, whole_number
from evoalign_lib.engines import ENGINES, check_gpus
from evoalign_lib.engines.local import DECODERS
from evoalign_lib.update_rules import SCHEDULES, SHAPINGS

_COUNTS = ("max_completion_length", "chunk_rows", "num_generations", "num_generations_eval", "prompts_per_step")
_CHECKS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*_COUNTS, "workers", "tensor_parallel"), (whole_number, 1)),
    **dict.fromkeys(("top_k", "gpus"), (whole_number, 0)),
    **dict.fromkeys(("sigma", "alpha"), (single,)),
    "temperature": (positive,),
    **dict.fromkeys(("top_p", "sigma_final_fraction", "alpha_final_fraction"), (positive, 1)),
    **dict.fromkeys(("sigma_schedule", "alpha_schedule"), (choose, SCHEDULES)),
    "population_size": (whole_number, 2, MOST_MEMBERS, "z-scores need two members"),
    "rank": (whole_number, 1, 2**16 - 1),
    "fitness": (choose, ("reward", "shuffled", "random")),
    "fitness_shaping": (choose, SHAPINGS),
    "perturbation": (choose, ("full_rank", "low_rank")),
    "perturb": (choose, PERTURBED),
    "sampling": (choose, ("greedy", "common")),
    "engine": (choose, ENGINES),
    "decoder": (choose, DECODERS),
    "precision": (choose, precision.PRECISIONS),
    "noise": (choose, noise.DISTRIBUTIONS),
}
"""setting -> its check, a function of name, value and the arguments that follow it; None passes if it is the default"""
# settings of generation that an engine sets itself -> where to set them
_ELSEWHERE = {
    **dict.fromkeys(("temperature", "top_p", "top_k"), "it is a setting of ESConfig"),
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_completion_length"),
    **dict.fromkeys(("stop_strings", "stop"), "stop_strings of ESConfig"),
    **dict.fromkeys(("eos_token_id", "pad_token_id", "stop_token_ids", "ignore_eos"), "the model and tokenizer"),
    **dict.fromkeys(("do_sample", "num_beams", "seed"), "sampling"),
    **dict.fromkeys(("num_return_sequences", "n"), "num_generations"),
    **dict.fromkeys(("return_dict_in_generate", "detokenize"), "the engine"),
}
_DICTS = ("model_init_kwargs", "engine_kwargs", "generation_kwargs", "chat_template_kwargs")
# those that transformers reads only if it draws the samples itself
_DRAWN_ONLY = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")

SURFACE: dict[str, Any] = json.loads(Path(__file__).with_name("trl_surface.json").read_text(encoding="utf-8"))
"""How the arguments and methods of TRL's `GRPOTrainer` and the settings of its `GRPOConfig` fare here: section -> name
-> (same, refused or missing; how it differs, or why and what to do instead)"""


@dataclass
class ESConfig(TrainingArguments):
    """Settings of an ES run: those below, and the general ones of `transformers.TrainingArguments`.

    Defaults are those of Qiu et al. (arXiv 2509.24372: "population size N = 30, sigma = 0.001, alpha = 5e-4", greedy
    decoding, z-scored rewards). `max_steps`, `num_train_epochs`, `seed`, `output_dir`, `save_steps`, `eval_steps`,
    `logging_steps`, `report_to` and `disable_tqdm` mean what they mean for any trainer. A setting that has no effect on
    ES, such as learning_rate, is an error.

    Raises:
        ValueError: values out of range, unknown choices, or settings without effect; the message lists all of them.
        TypeError: unknown settings, such as those that only `GRPOConfig` has; the message says what to do instead.
    """

    population_size: int = field(default=30, metadata={"help": "N, members per step; at least 2"})
    """N, members per step; at least 2 (Qiu et al.: 30)"""
    sigma: float = field(default=1e-3, metadata={"help": "standard deviation of the perturbation"})
    """standard deviation of the perturbation, in weight units"""
    alpha: float = field(default=5e-4, metadata={"help": "step size, which already contains 1/sigma"})
    """step size, which already contains 1/sigma: theta += alpha / N * sum z eps"""
    antithetic: bool = field(default=False, metadata={"help": "evaluate members in pairs, with +noise and -noise"})
    """evaluate members in pairs that add and subtract the same noise (mirrored sampling: Brockhoff et al. 2010;
    Salimans et al., arXiv 1703.03864); population_size must be even and counts members, not pairs"""
    fitness_shaping: str = field(default="zscore", metadata={"help": "zscore or centred_ranks"})
    """"zscore" (Qiu et al.); or "centred_ranks" (Salimans et al., arXiv 1703.03864, after Wierstra et al. 2014): ranks
    from -0.5 to 0.5, ties sharing their mean rank, so that no outlier among the rewards outweighs the rest. Their root
    mean square is 0.29 instead of 1, so a step of equal length needs an alpha about 3.5 times as large"""
    sigma_schedule: str = field(default="constant", metadata={"help": "constant, linear or cosine"})
    """"constant"; or "linear" or "cosine" (half a period, Loshchilov and Hutter, arXiv 1608.03983), which lower sigma
    to sigma_final_fraction of its value over `max_steps`. The run then depends on max_steps and cannot be extended"""
    sigma_final_fraction: float = field(default=0.1, metadata={"help": "final sigma divided by the initial one"})
    """fraction of sigma that remains at the last step of a schedule; above 0, at most 1"""
    alpha_schedule: str = field(default="constant", metadata={"help": "constant, linear or cosine"})
    """as sigma_schedule, for alpha; there is no warm-up"""
    alpha_final_fraction: float = field(default=0.1, metadata={"help": "final alpha divided by the initial one"})
    """as sigma_final_fraction, for alpha (Hoffmann et al., arXiv 2203.15556, end cosine schedules at a tenth)"""
    perturbation: str = field(default="full_rank", metadata={"help": "full_rank or low_rank"})
    """noise of matrices: "full_rank" (Qiu et al.); or "low_rank" (EGGROLL, arXiv 2511.16652), E = A B^T / sqrt(rank)
    with two thin noise factors. E has the same mean and variance, and lets members with few prompts decode as one
    batch (on the engines "local" and "cuda"). Norms and biases get full-rank noise (`evoalign_lib.low_rank`)"""
    rank: int = field(default=1, metadata={"help": "rank of low-rank perturbations"})
    """rank r of low-rank perturbations, at least 1 (EGGROLL: 1)"""
    perturb: str = field(default="all", metadata={"help": "all or linear"})
    """which of the weights that move get noise: "all" (Qiu et al.); or "linear", another search space: only the
    matrices of linear layers, as an adapter has them. Norms, biases, embeddings and the output head, tied or not, stay
    as they are, and are frozen in the model object. With low-rank noise vLLM then decodes many members in one batch
    (EGGROLL's code leaves out the same parameters by default)"""
    anchor_decay: float = field(default=0.0, metadata={"help": "share of the drift undone at each step; 0: off"})
    """lambda of anchored weight decay (Schweighofer et al., arXiv 2605.30148): each update first moves the weights back
    by this share of their distance from the starting weights, theta -= lambda (theta - theta_0), also when the
    population is tied; at least 0 (off) and below 1. Steps drift in random directions, which costs ability on other
    tasks. Without decay the drift's squared norm grows as alpha^2 d T / N; with it, it levels off at
    alpha^2 d / (N (1 - (1 - lambda)^2)). lambda is not multiplied by alpha and does not follow alpha's schedule. The
    paper's code multiplies its lambda by alpha (10 * 0.0005, so 0.005 a step) and decays after the step, which only
    shortens the last step by that share. Needs precision="master" and a copy of the starting weights: 4 bytes per
    parameter with the master, on GPUs as many as the model's dtype has"""
    prompts_per_step: int | None = field(default=None, metadata={"help": "prompts per step; None: all"})
    """prompts per step, the same for every member; None: the whole training set, as in Qiu et al. A member is perturbed
    once per step and decodes all of them with that one perturbation, `chunk_rows` at a time"""
    sampling: str = field(default="greedy", metadata={"help": "greedy or common"})
    """how members decode in training: "greedy" (Qiu et al.); or "common", sampling at `temperature` with common random
    numbers: they differ between prompts and between steps, but not between members, so that members differ only in
    their weights (Glasserman and Yao 1992). For evaluate() see num_generations_eval"""
    num_generations: int = field(default=1, metadata={"help": "completions per prompt when sampling"})
    """completions per prompt and member, whose mean is the reward; more than 1 only with sampling="common" """
    num_generations_eval: int | None = field(default=None, metadata={"help": "samples per prompt in evaluate()"})
    """samples per prompt in evaluate(), whose mean is the reward; their random numbers derive from seed and are the
    same in every evaluation. None: evaluate() and predict() decode greedily, one completion per prompt"""
    temperature: float = field(default=1.0, metadata={"help": "sampling temperature"})
    """sampling temperature, in training and in evaluate(); the logits are divided by it"""
    top_p: float = field(default=1.0, metadata={"help": "share of the probability that samples are drawn from"})
    """when sampling, draw only from the most probable tokens that together have this probability; 1: all"""
    top_k: int = field(default=0, metadata={"help": "most probable tokens that samples are drawn from; 0: all"})
    """when sampling, draw only from this many of the most probable tokens; 0: all"""
    stop_strings: list[str] | None = field(default=None, metadata={"help": "texts that end a completion"})
    """texts that end a completion; the completion includes the text, just as it includes the end token (vLLM decodes
    further, and what follows is cut off)"""
    generation_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "for GenerationConfig"})
    """further settings of transformers' GenerationConfig, such as repetition_penalty, with which transformers decodes
    instead of the loop; with vLLM, of SamplingParams (on a command line, as JSON)"""
    chat_template_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "for the chat template"})
    """further arguments of the chat template for prompts that are messages, such as enable_thinking; reward models get
    them, too (on a command line, as JSON). A prompt that ends in a message of the assistant is continued, unless
    add_generation_prompt is true. A template that states today's date states 26 July 2024 on any day"""
    max_completion_length: int = field(default=1024, metadata={"help": "maximum number of new tokens per completion"})
    """maximum number of new tokens per completion (Qiu et al.: 1024)"""
    fitness: str = field(default="reward", metadata={"help": "reward, shuffled or random"})
    """"reward"; or a null arm: "shuffled" permutes the rewards over the members, "random" draws rewards at random and
    generates no text"""
    arm: str = field(default="es", metadata={"help": "name of the arm, part of the run key"})
    """name of the arm, part of the run key, so that arms never share noise by accident"""
    reward_weights: list[float] | None = field(default=None, metadata={"help": "one weight per reward function"})
    """one weight per reward function (default: all 1)"""
    reward_floor: float | None = field(default=None, metadata={"help": "score of a failed reward"})
    """score when a reward function returns NaN, raises an exception or times out; None: the floor that its module
    declares"""
    reward_timeout: float | None = field(default=None, metadata={"help": "seconds per call of a reward function"})
    """seconds that one call of a reward function may take on a member's completions; after that each completion is
    scored alone, with the same limit, and those that exceed it again count as failures. The functions are then called
    in a process of their own, where they keep what they keep. None: the `REWARD_TIMEOUT` of a function or its module,
    or no limit"""
    engine: str = field(default="local", metadata={"help": "local, cuda, vllm or ray"})
    """what generates (`evoalign_lib.engines`): "local", worker processes on this machine's cores; "cuda", one GPU
    without vLLM, on which as many members as there is memory for decode at once (Llama and Qwen2; other models one by
    one, by transformers; with use_cpu=True, for tests, on the CPU); "vllm", one engine for each group of
    `tensor_parallel` GPUs; "ray", actors on any cluster (RAY_ADDRESS), on GPUs with vLLM, or if that is not installed
    with what "cuda" does"""
    gpus: int = field(default=0, metadata={"help": "GPUs to use"})
    """GPUs to use; 0: with engine="vllm" as many as tensor_parallel, with "ray" none"""
    tensor_parallel: int = field(default=1, metadata={"help": "GPUs that share one copy of the model"})
    """GPUs that share a copy of the model; needs vLLM"""
    engine_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "further arguments of vllm.LLM"})
    """further arguments of `vllm.LLM`, such as gpu_memory_utilization (on a command line, as JSON). With an adapter,
    max_loras is the number of members that decode in one batch (default: 16), and likewise with perturb="linear" and
    low-rank noise (default: 64, or all members if there are fewer). With engine="cuda", `members` is the
    number of members that decode at once (default: as many as there is memory for)"""
    workers: int | None = field(default=None, metadata={"help": "worker processes; None: one per core"})
    """worker processes, or actors without GPUs; None: one per core (1 if there is no master); 1: this process alone"""
    chunk_rows: int = field(default=256, metadata={"help": "rows decoded at once"})
    """rows decoded at once; part of the batch plan, on which floating-point results depend"""
    decoder: str = field(default="auto", metadata={"help": "auto, loop or generate"})
    """"loop" (this library's decoding loop), "generate" (transformers), or "auto": the loop for models that it
    supports. At the start its logits are held against the model's: if they differ, "loop" is refused, and "auto" takes
    transformers and says so"""
    precision: str = field(default="master", metadata={"help": "master, kahan or inplace"})
    """how weights are held (`evoalign_lib.precision`). "master": in float32, exact. The other two modes lose bits,
    evaluate with one worker and log the loss: "kahan", compensated pairs of bfloat16 or float16, 4 bytes per parameter,
    with restores that are exact only to the last bit of the pair; "inplace", for audits: weights are perturbed,
    restored by subtraction and updated in the model's dtype, as released codes do"""
    noise: str = field(default="gaussian", metadata={"help": "gaussian, byte_sum or tied"})
    """distribution of the noise (`evoalign_lib.noise`); "tied", for audits: tensors of equal shape share their noise,
    as in released codes"""
    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "for from_pretrained"})
    """arguments of from_pretrained for a model given by name or path (on a command line, as JSON)"""
    log_completions: bool = field(default=False, metadata={"help": "show and save completions of logged steps"})
    """show completions with their rewards, and with the columns that reward functions pass to `log_extra`, at each
    logged step and each evaluation: a few in the terminal (with rich); those of the best and of the worst member in
    output_dir/completions/*.jsonl, and in wandb and trackio"""
    logging_steps: float = field(default=1, metadata={"help": "number of steps between logs"})
    """number of steps between logs"""
    remove_unused_columns: bool | None = field(default=False, metadata={"help": "keep all columns"})
    """False: every column reaches the reward function"""

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, *_DICTS]

    def __new__(cls, *arguments, **settings):
        # before the generated __init__, whose error names only one setting and no remedy
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := [name for name in settings if name not in known]:
            problems = [absent(f"{cls.__name__} has no setting", "settings", name, known) for name in unknown]
            raise TypeError(joined(problems + [why for _, why in _without_effect(settings)]))
        return super().__new__(cls)

    def __post_init__(self):
        for name, known in self.__dataclass_fields__.items():
            setattr(self, name, _as_python(getattr(self, name), str(known.type)))
        problems: dict[str, str] = {}
        for name, why in self._problems():  # keep the first problem of each setting
            problems.setdefault(name, why)
        if problems:
            raise ValueError(joined(list(problems.values())))
        if self.fitness != "reward" and self.arm == (arm := type(self).__dataclass_fields__["arm"].default):
            # so that a null arm draws other noise than the arm it is compared with
            self.arm = f"{arm}_{self.fitness}"
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"
        # the parent would require a checkpoint at each evaluation; here the best weights stay in memory
        load_best, self.load_best_model_at_end = self.load_best_model_at_end, False
        super().__post_init__()
        self.load_best_model_at_end = load_best

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as trackers record them: without tokens, keys and passwords."""
        return models.masked(super().to_dict())

    def __str__(self) -> str:
        lines = [f"{name}={value},\n" for name, value in sorted(models.masked(dataclasses.asdict(self)).items())]
        return f"{type(self).__name__}(\n{''.join(lines)})"

    __repr__ = __str__

    # ---- checks: each yields (setting, problem), so that one error lists all problems

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from _without_effect(vars(self))
        for name, (check, *bounds) in _CHECKS.items():
            if (value := getattr(self, name)) is not None or _DEFAULTS[name] is not None:
                yield from refused(check, name, value, *bounds)
        yield from refused(lambda _: check_decay(self.anchor_decay, self.precision), "anchor_decay")
        yield from self._unread()
        if self.antithetic and isinstance(self.population_size, int) and self.population_size % 2:
            yield "population_size", f"population_size={self.population_size} must be even for antithetic pairs."
        if all(isinstance(n, int) and n > 0 for n in (self.gpus, self.tensor_parallel)):
            yield from refused(lambda _: check_gpus(self.gpus, self.tensor_parallel), "gpus")
        stops = self.stop_strings
        if stops is not None and not (
            isinstance(stops, list | tuple) and stops and all(isinstance(stop, str) and stop for stop in stops)
        ):
            yield "stop_strings", f"stop_strings={stops!r} must be a list of non-empty texts."
        for name in _DICTS:
            if (value := getattr(self, name)) is not None and not isinstance(_parsed(value), Mapping):
                yield name, f"{name}={value!r} must be a dict, or a text with one in JSON, such as '{{\"name\": 1}}'."
        yield from (("generation_kwargs", f"generation_kwargs{why}") for why in self._check_generation_kwargs())
        yield from (("load_best_model_at_end", why) for why in self._check_best())

    def _unread(self) -> Iterator[tuple[str, str]]:
        """Yield settings that have no effect because of the values of others."""
        vllm = self.engine == "vllm" or bool(self.gpus)
        alone = self.engine == "ray" and find_spec("vllm") is None  # actors open engine "cuda"
        samples = self.sampling != "greedy" or self.num_generations_eval is not None
        falling = "set {}_schedule='linear' or 'cosine'"
        for read, remedy, names in (
            (self.perturbation != "full_rank", "set perturbation='low_rank'", ["rank"]),
            (self.sigma_schedule != "constant", falling.format("sigma"), ["sigma_final_fraction"]),
            (self.alpha_schedule != "constant", falling.format("alpha"), ["alpha_final_fraction"]),
            (self.sampling != "greedy", "greedy completions are identical, set sampling='common'", ["num_generations"]),
            (samples, "set sampling='common' or num_generations_eval", ["temperature", "top_p", "top_k"]),
            (self.engine == "local", "set engine='local'", ["precision"]),
            (self.engine in ("vllm", "ray"), "set engine='vllm' or 'ray'", ["gpus"]),
            (not vllm and self.engine != "cuda", "use an engine without GPUs", ["decoder", "workers"]),
            (not vllm or alone, "use an engine without vLLM", ["chunk_rows"]),
            (vllm, "set engine='vllm', or 'ray' with gpus", ["tensor_parallel"]),
            (vllm or self.engine == "cuda", "set engine='cuda' or 'vllm', or 'ray' with gpus", ["engine_kwargs"]),
        ):
            for name in names:
                if not read and getattr(self, name) != _DEFAULTS[name]:
                    yield name, f"{name}={getattr(self, name)!r} has no effect here: {remedy}, or remove it."

    def _check_generation_kwargs(self) -> Iterator[str]:
        """Yield settings of generation that the engine sets itself, or that nothing would read."""
        given = _parsed(self.generation_kwargs)
        if not isinstance(given, Mapping):
            return
        try:
            json.dumps(dict(given))
        except (TypeError, ValueError):
            yield f"={given!r} cannot be recorded: pass only numbers, texts, lists and dicts."
        known = vars(GenerationConfig())
        transformers = self.engine in ("local", "cuda") or not self.gpus and self.engine == "ray"
        for name in given:
            if name in _ELSEWHERE:
                yield f": {name!r} is set elsewhere: {_ELSEWHERE[name]}."
            elif transformers and name in _DRAWN_ONLY:
                yield f": {name!r} has no effect on these samples: use temperature, top_p, top_k or engine='vllm'."
            elif transformers and name not in known:
                yield f": GenerationConfig has no {name!r}.{nearest(name, known)}"

    def _check_best(self) -> Iterator[str]:
        if self.load_best_model_at_end and self.engine not in ("local", "cuda"):
            remedy = "write the best step with evoalign replay --step and state.best_global_step"
            yield f"load_best_model_at_end needs engine='local' or 'cuda', not {self.engine!r}: {remedy}."
        elif self.load_best_model_at_end and self.eval_strategy == IntervalStrategy.NO:
            yield "load_best_model_at_end needs evaluations: set eval_strategy='steps' and eval_steps."
        elif self.save_strategy == SaveStrategy.BEST and self.metric_for_best_model is None:
            if not self.load_best_model_at_end:
                yield "save_strategy='best' needs metric_for_best_model, such as 'reward'."


_DEFAULTS = {
    f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    for f in dataclasses.fields(ESConfig)
}


def with_settings(config: type) -> None:
    """Add a config's own settings to its docstring, from their help texts; the source says more under each field."""
    lines, inherited = ["    Args:"], config.__mro__[1].__dataclass_fields__
    for name, known in config.__dataclass_fields__.items():
        if name not in inherited or known.default != inherited[name].default and "help" in known.metadata:
            text = f"{name}: {known.metadata['help']}. Default: {known.default!r}"
            lines += textwrap.wrap(text, 120, initial_indent=" " * 8, subsequent_indent=" " * 12)
    if config.__doc__:  # python -OO has none
        config.__doc__ = config.__doc__.replace("    Raises:", "\n".join([*lines, "", "    Raises:"]), 1)


with_settings(ESConfig)


def _as_python(value: Any, kind: str) -> Any:
    """Return a setting without NumPy's numbers, which no ledger takes; kind: its type, which may be a list."""
    found = plain(value)
    single = hasattr(value, "tolist") and isinstance(found, list) and len(found) == 1 and "list" not in kind
    return found[0] if single else found


def _parsed(value: Any) -> Any:
    """Return a dict that a command line gave as JSON, which the parent class reads later; anything else as it is."""
    with suppress(ValueError):
        return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


@cache
def _unset() -> list[dict[str, Any]]:
    """Return TrainingArguments' settings at their defaults: as attributes, and as to_dict() gives them."""
    plain = TrainingArguments()
    return [vars(plain), plain.to_dict()]


def _without_effect(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings that were given and have no effect on ES, with the reason."""
    for name, (status, why) in SURFACE["settings"].items():
        if status == "same" or name not in _DEFAULTS or name not in settings:
            continue
        value, default = settings[name], _DEFAULTS[name]
        off = not value and default in (None, False, 0, "", "no", [])  # as given on a command line
        # a config that was copied or read from a file holds what the parent class derives from a default
        inherited = TrainingArguments.__dataclass_fields__[name].default == default
        if value != default and not off and not (inherited and any(value == unset[name] for unset in _unset())):
            yield name, f"{name}={value!r} has no effect on ES: {why}. Remove it."


def absent(what: str, section: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown name, with the reason if TRL's trainer has it.

    Args:
        what: the beginning of the error.
        section: section of `SURFACE`.
        name: the name as given.
        known: the names that exist.
    """
    why = SURFACE[section].get(name, ("", ""))[1]
    return f"{what} {name!r}" + (f": {why}." if why else f".{nearest(name, known, cutoff=0.8)}")


def refused(check: Callable[..., object], name: str, *arguments: Any) -> Iterator[tuple[str, str]]:
    """Yield a setting's name and the text of the ValueError that its check raises, if it raises one."""
    try:
        check(name, *arguments)
    except ValueError as error:
        yield name, str(error)


def joined(problems: Sequence[str]) -> str:
    """Join problems into the text of one error."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} settings cannot stay as they are:", *(f"- {problem}" for problem in problems)])
