"""`ESConfig`: the settings of an ES run, what each of them means, and which values are refused."""

import dataclasses
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from evoalign_lib import models, noise, precision
from evoalign_lib._anchor import check_decay
from evoalign_lib.checks import choose, nearest, positive, whole_number
from evoalign_lib.engines import ENGINES, check_gpus
from evoalign_lib.engines.local import DECODERS
from evoalign_lib.update_rules import SCHEDULES, SHAPINGS

_COUNTS = ("max_completion_length", "chunk_rows", "num_generations", "num_generations_eval", "prompts_per_step")
_CHECKS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*_COUNTS, "workers", "tensor_parallel"), (whole_number, 1)),
    **dict.fromkeys(("top_k", "gpus"), (whole_number, 0)),
    **dict.fromkeys(("sigma", "alpha", "temperature"), (positive,)),
    **dict.fromkeys(("top_p", "sigma_final_fraction", "alpha_final_fraction"), (positive, 1)),
    **dict.fromkeys(("sigma_schedule", "alpha_schedule"), (choose, SCHEDULES)),
    "population_size": (whole_number, 2, None, "z-scores need two members"),
    "rank": (whole_number, 1, 2**16 - 1),
    "fitness": (choose, ("reward", "shuffled", "random")),
    "fitness_shaping": (choose, SHAPINGS),
    "perturbation": (choose, ("full_rank", "low_rank")),
    "sampling": (choose, ("greedy", "common")),
    "engine": (choose, ENGINES),
    "decoder": (choose, DECODERS),
    "precision": (choose, precision.PRECISIONS),
    "noise": (choose, noise.DISTRIBUTIONS),
}
"""setting -> what checks it, a function of name, value and further arguments; None passes where it is the default"""
# settings of generation that an engine states -> how to set them
_ELSEWHERE = {
    **dict.fromkeys(("temperature", "top_p", "top_k"), "it is a setting of its own"),
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_completion_length"),
    **dict.fromkeys(("stop_strings", "stop"), "stop_strings of ESConfig"),
    **dict.fromkeys(("eos_token_id", "pad_token_id", "stop_token_ids", "ignore_eos"), "the model and tokenizer"),
    **dict.fromkeys(("do_sample", "num_beams", "seed"), "sampling"),
    **dict.fromkeys(("num_return_sequences", "n"), "num_generations"),
    **dict.fromkeys(("return_dict_in_generate", "detokenize"), "the engine"),
}
# those that transformers reads only where it draws samples itself
_DRAWN_ONLY = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")

SURFACE: dict[str, Any] = json.loads(Path(__file__).with_name("trl_surface.json").read_text(encoding="utf-8"))
"""What becomes here of the arguments and methods of TRL's `GRPOTrainer`, and of the settings of its `GRPOConfig`:
section -> name -> (same, refused or missing; in which respect it differs, or why and what to do instead)"""


@dataclass
class ESConfig(TrainingArguments):
    """Settings of an ES run: those below, and the general ones of `transformers.TrainingArguments`.

    Defaults are those of Qiu et al. (arXiv 2509.24372: "population size N = 30, sigma = 0.001, alpha = 5e-4", greedy
    decoding, z-scored rewards). `max_steps`, `num_train_epochs`, `seed`, `output_dir`, `save_steps`, `eval_steps`,
    `logging_steps`, `report_to` and `disable_tqdm` mean what they mean for any trainer. A setting that has no effect on
    ES, such as learning_rate, is an error.

    Raises:
        ValueError: values out of range, unknown choices, or settings without effect; the message names all of them.
        TypeError: unknown settings, such as those of `GRPOConfig` alone; the message says what to do instead.
    """

    population_size: int = field(default=30, metadata={"help": "N, members per step; at least 2"})
    """N, members per step; at least 2 (Qiu et al.: 30)"""
    sigma: float = field(default=1e-3, metadata={"help": "standard deviation of the perturbation"})
    """standard deviation of the perturbation, in weight units"""
    alpha: float = field(default=5e-4, metadata={"help": "step size, 1/sigma digested"})
    """step size with 1/sigma digested: theta += alpha / N * sum z eps"""
    antithetic: bool = field(default=False, metadata={"help": "members in pairs, with +noise and -noise"})
    """members in pairs that add and subtract the same noise (mirrored sampling: Brockhoff et al. 2010; Salimans et al.,
    arXiv 1703.03864); population_size must be even and counts members, not pairs"""
    fitness_shaping: str = field(default="zscore", metadata={"help": "zscore or centred_ranks"})
    """"zscore" (Qiu et al.); "centred_ranks" (Salimans et al., arXiv 1703.03864, after Wierstra et al. 2014): ranks
    from -0.5 to 0.5, ties sharing their mean rank, so that no outlier among the rewards outweighs the rest. Their root
    mean square is 0.29 instead of 1: a step of equal length needs an alpha about 3.5 times as large"""
    sigma_schedule: str = field(default="constant", metadata={"help": "constant, linear or cosine"})
    """"constant"; or "linear" or "cosine" (half a period, Loshchilov and Hutter, arXiv 1608.03983), which fall to
    sigma_final_fraction of sigma over `max_steps`. max_steps is then part of the run, which cannot be prolonged"""
    sigma_final_fraction: float = field(default=0.1, metadata={"help": "sigma's last value over its first"})
    """share of sigma that is left at the last step of a schedule; above 0, at most 1"""
    alpha_schedule: str = field(default="constant", metadata={"help": "constant, linear or cosine"})
    """the same for alpha; there is no warm-up"""
    alpha_final_fraction: float = field(default=0.1, metadata={"help": "alpha's last value over its first"})
    """the same for alpha (Hoffmann et al., arXiv 2203.15556, end cosine schedules at a tenth)"""
    perturbation: str = field(default="full_rank", metadata={"help": "full_rank or low_rank"})
    """noise of matrices: "full_rank" (Qiu et al.); or "low_rank" (EGGROLL, arXiv 2511.16652), E = A B^T / sqrt(rank)
    with two thin factors of noise, which has the same mean and variance, and lets members whose prompts are few decode
    as one batch (on the local engine). Norms and biases get full-rank noise (`evoalign_lib.low_rank`)"""
    rank: int = field(default=1, metadata={"help": "of low-rank perturbations"})
    """r of low-rank perturbations, at least 1 (EGGROLL: 1)"""
    anchor_decay: float = field(default=0.0, metadata={"help": "share of the drift that a step takes back; 0: off"})
    """lambda of anchored weight decay (Schweighofer et al., arXiv 2605.30148): each update first takes back this share
    of the way from the starting weights, theta -= lambda (theta - theta_0), that of a tied population too; 0: off, and
    below 1. Steps drift in random directions, which costs skill off the task: without a decay the drift's squared norm
    grows as alpha^2 d T / N, with it it stops at alpha^2 d / (N (1 - (1 - lambda)^2)). lambda is not multiplied by
    alpha, nor follows its schedule; the paper's code multiplies its lambda by alpha (10 * 0.0005, so 0.005 a step) and
    decays after the step, which only makes the last step shorter by that share. Needs precision="master", and a copy of
    the starting weights: 4 bytes per parameter where the master is, and on GPUs as many as the model's dtype has"""
    prompts_per_step: int | None = field(default=None, metadata={"help": "prompts per step; None: all"})
    """prompts per step, the same for every member; None: the whole training set, as Qiu et al. A member is perturbed
    once per step and decodes all of them under that one perturbation, `chunk_rows` at a time"""
    sampling: str = field(default="greedy", metadata={"help": "greedy or common"})
    """how members decode in training: "greedy" (Qiu et al.); or "common", which samples, at `temperature`, with common
    random numbers: they differ from prompt to prompt and from step to step, but not from member to member, so that
    members differ by their weights alone (Glasserman and Yao 1992). For evaluate() see num_generations_eval"""
    num_generations: int = field(default=1, metadata={"help": "completions per prompt, with sampling"})
    """completions per prompt and member, whose mean is the reward; more than 1 with sampling="common" only"""
    num_generations_eval: int | None = field(default=None, metadata={"help": "samples per prompt in evaluate()"})
    """samples per prompt in evaluate(), whose mean is the reward; their random numbers, from seed, are the same in
    every evaluation. None: evaluate() and predict() decode greedily, one completion per prompt"""
    temperature: float = field(default=1.0, metadata={"help": "of samples"})
    """of the samples, in training and in evaluate(); the logits are divided by it"""
    top_p: float = field(default=1.0, metadata={"help": "share of the probability that is drawn from"})
    """of the samples: only the tokens that have this share of the probability, the largest first; 1: all"""
    top_k: int = field(default=0, metadata={"help": "tokens that are drawn from; 0: all"})
    """of the samples: only so many tokens of the largest probability; 0: all"""
    stop_strings: list[str] | None = field(default=None, metadata={"help": "texts that end a completion"})
    """texts that end a completion, which includes the text, as the end token does (vLLM decodes on, and what follows is
    cut off)"""
    generation_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "for GenerationConfig"})
    """further settings of transformers' GenerationConfig, such as repetition_penalty, with which transformers decodes;
    with vLLM of SamplingParams (on a command line, as JSON)"""
    chat_template_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "for the chat template"})
    """further arguments of the chat template of prompts that are messages, such as enable_thinking; reward models get
    them, too (on a command line, as JSON)"""
    max_completion_length: int = field(default=1024, metadata={"help": "new tokens per completion at most"})
    """new tokens per completion, at most (Qiu et al.: 1024)"""
    fitness: str = field(default="reward", metadata={"help": "reward, shuffled or random"})
    """"reward"; or a null arm: "shuffled" permutes the rewards over the members, "random" draws them and generates no
    text"""
    arm: str = field(default="es", metadata={"help": "name that enters the run key"})
    """name of the arm, part of the run key: arms never share noise by accident"""
    reward_weights: list[float] | None = field(default=None, metadata={"help": "one weight per reward function"})
    """one weight per reward function (default: all 1)"""
    reward_floor: float | None = field(default=None, metadata={"help": "score of a failed reward"})
    """score of a NaN, an exception or a time-out of a reward function; None: the floor that its module declares"""
    reward_timeout: float | None = field(default=None, metadata={"help": "seconds per call of a reward function"})
    """seconds that a call of a reward function may take on the completions of a member; after that each is scored
    alone, with the same limit, and those that exceed it again are failures. None: no limit"""
    engine: str = field(default="local", metadata={"help": "local, vllm or ray"})
    """who generates (`evoalign_lib.engines`): "local", worker processes on this machine's cores; "vllm", one engine for
    every `tensor_parallel` of the GPUs; "ray", actors on any cluster (RAY_ADDRESS), with vLLM if there are GPUs"""
    gpus: int = field(default=0, metadata={"help": "GPUs to use"})
    """GPUs to use; 0: with engine="vllm" as many as tensor_parallel, with "ray" none"""
    tensor_parallel: int = field(default=1, metadata={"help": "GPUs that share a copy of the model"})
    """GPUs that share a copy of the model; needs vLLM"""
    engine_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "for vllm.LLM"})
    """further arguments of `vllm.LLM`, such as gpu_memory_utilization (on a command line, as JSON). Over an adapter
    max_loras is how many members decode in one batch (default: 16)"""
    workers: int | None = field(default=None, metadata={"help": "worker processes; None: one per core"})
    """worker processes, or actors without GPUs; None: one per core (without a master: 1); 1: this process"""
    chunk_rows: int = field(default=256, metadata={"help": "rows decoded at once"})
    """rows decoded at once; part of the batch plan, on which floating-point results depend"""
    decoder: str = field(default="auto", metadata={"help": "auto, loop or generate"})
    """"loop" (own decoding loop), "generate" (transformers), "auto": the loop where it covers the model"""
    precision: str = field(default="master", metadata={"help": "master, kahan or inplace"})
    """how weights are held (`evoalign_lib.precision`). "master": in float32, exact. Two modes lose bits, evaluate with
    one worker and log the loss: "kahan", compensated pairs of bfloat16 or float16, 4 bytes per parameter, with restores
    that are exact to the last bit of the pair only; "inplace", for audits: perturbed, restored by subtraction and
    updated in the model's dtype, as released codes do"""
    noise: str = field(default="gaussian", metadata={"help": "gaussian, byte_sum or tied"})
    """distribution of the noise (`evoalign_lib.noise`); "tied": tensors of equal shape share it, as in released codes,
    for audits"""
    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "for from_pretrained"})
    """arguments of from_pretrained when the model is given by name or path (on a command line, as JSON)"""
    log_completions: bool = field(default=False, metadata={"help": "show and keep completions of logged steps"})
    """whether a step that is logged, and every evaluation, shows completions with their rewards and the columns that
    reward functions give `log_extra`: some in the terminal (with rich); those of the best and of the worst member in
    output_dir/completions/*.jsonl, and in wandb and trackio"""
    overwrite_output_dir: bool = field(default=False, metadata={"help": "delete the run in output_dir, begin anew"})
    """delete the run that output_dir holds, its ledger, checkpoints and completions, when train() begins another"""
    logging_steps: float = field(default=1, metadata={"help": "steps between logs"})
    """steps between logs"""
    remove_unused_columns: bool | None = field(default=False, metadata={"help": "keep all columns"})
    """False: every column reaches the reward function"""

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "engine_kwargs"]
    _VALID_DICT_FIELDS += ["generation_kwargs", "chat_template_kwargs"]

    def __new__(cls, *arguments, **settings):
        # before the generated __init__, whose error would name one setting and no remedy
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := [name for name in settings if name not in known]:
            problems = [absent(f"{cls.__name__} has no setting", "settings", name, known) for name in unknown]
            raise TypeError(joined(problems + [why for _, why in _without_effect(settings)]))
        return super().__new__(cls)

    def __post_init__(self):
        problems: dict[str, str] = {}
        for name, why in self._problems():  # of each setting what comes first
            problems.setdefault(name, why)
        if problems:
            raise ValueError(joined(list(problems.values())))
        if self.fitness != "reward" and self.arm == (arm := type(self).__dataclass_fields__["arm"].default):
            # a null arm draws other noise than the arm it is compared with
            self.arm = f"{arm}_{self.fitness}"
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"
        # the parent would demand a checkpoint at each evaluation; here the best weights are kept in memory
        load_best, self.load_best_model_at_end = self.load_best_model_at_end, False
        super().__post_init__()
        self.load_best_model_at_end = load_best

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as trackers write them down: without tokens, keys and passwords."""
        return models.masked(super().to_dict())

    def __str__(self) -> str:
        lines = [f"{name}={value},\n" for name, value in sorted(models.masked(dataclasses.asdict(self)).items())]
        return f"{type(self).__name__}(\n{''.join(lines)})"

    __repr__ = __str__

    # ---- checks: each yields settings with what is wrong, so that all of it is said at once

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
            yield "stop_strings", f"stop_strings={stops!r} must be a list of texts, none of them empty."
        yield from (("generation_kwargs", f"generation_kwargs{why}") for why in self._check_generation_kwargs())
        yield from (("load_best_model_at_end", why) for why in self._check_best())

    def _unread(self) -> Iterator[tuple[str, str]]:
        """Yield settings that nothing reads as long as others are as they are."""
        vllm = self.engine == "vllm" or bool(self.gpus)
        samples = self.sampling != "greedy" or self.num_generations_eval is not None
        falling = "set {}_schedule='linear' or 'cosine'"
        for read, remedy, names in (
            (self.perturbation != "full_rank", "set perturbation='low_rank'", ["rank"]),
            (self.sigma_schedule != "constant", falling.format("sigma"), ["sigma_final_fraction"]),
            (self.alpha_schedule != "constant", falling.format("alpha"), ["alpha_final_fraction"]),
            (self.sampling != "greedy", "greedy completions are all alike, set sampling='common'", ["num_generations"]),
            (samples, "set sampling='common' or num_generations_eval", ["temperature", "top_p", "top_k"]),
            (self.engine == "local", "set engine='local'", ["precision"]),
            (self.engine != "local", "set engine='vllm' or 'ray'", ["gpus"]),
            (not vllm, "it is for engines without GPUs", ["decoder", "chunk_rows", "workers"]),
            (vllm, "set engine='vllm', or 'ray' with gpus", ["tensor_parallel", "engine_kwargs"]),
        ):
            for name in names:
                if not read and getattr(self, name) != _DEFAULTS[name]:
                    yield name, f"{name}={getattr(self, name)!r} has no effect here: {remedy}, or remove it."

    def _check_generation_kwargs(self) -> Iterator[str]:
        """Yield settings of generation that the engine states itself, or that nothing would read."""
        given = self.generation_kwargs
        with suppress(ValueError):  # a text is JSON, as on a command line; any other text the parent refuses
            given = json.loads(given) if isinstance(given, str) else given
        if not isinstance(given, Mapping):
            if not (given is None or isinstance(given, str)):
                yield f"={given!r} must be a dict."
            return
        try:
            json.dumps(dict(given))
        except (TypeError, ValueError):
            yield f"={given!r} cannot be written down: give numbers, texts, lists and dicts."
        known = vars(GenerationConfig())
        transformers = self.engine == "local" or not self.gpus and self.engine == "ray"
        for name in given:
            if name in _ELSEWHERE:
                yield f": {name!r} is set elsewhere: {_ELSEWHERE[name]}."
            elif transformers and name in _DRAWN_ONLY:
                yield f": {name!r} has no effect on samples drawn here: use temperature, top_p, top_k or engine='vllm'."
            elif transformers and name not in known:
                yield f": GenerationConfig has no {name!r}.{nearest(name, known)}"

    def _check_best(self) -> Iterator[str]:
        if self.load_best_model_at_end and self.engine != "local":
            remedy = "write the best step by evoalign replay --step with state.best_global_step"
            yield f"load_best_model_at_end needs engine='local', not {self.engine!r}: {remedy}."
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
    """Add to a config's docstring its own settings, of which the source says more under each field."""
    lines, inherited = ["    Args:"], config.__mro__[1].__dataclass_fields__
    for name, known in config.__dataclass_fields__.items():
        if name not in inherited or known.default != inherited[name].default and "help" in known.metadata:
            text = f"{name}: {known.metadata['help']}. Default: {known.default!r}"
            lines += textwrap.wrap(text, 120, initial_indent=" " * 8, subsequent_indent=" " * 12)
    if config.__doc__:  # python -OO has none
        config.__doc__ = config.__doc__.replace("    Raises:", "\n".join([*lines, "", "    Raises:"]), 1)


with_settings(ESConfig)


@cache
def _unset() -> list[dict[str, Any]]:
    """Return what settings of TrainingArguments are when nobody has set them: in an object, and written down."""
    plain = TrainingArguments()
    return [vars(plain), plain.to_dict()]


def _without_effect(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings that were set and have no effect on ES, with the reason."""
    for name, (status, why) in SURFACE["settings"].items():
        if status == "same" or name not in _DEFAULTS or name not in settings:
            continue
        value, default = settings[name], _DEFAULTS[name]
        off = not value and default in (None, False, 0, "", "no", [])  # as a command line says it
        # a config that is copied, or read from a file, has what its parent makes of a default
        inherited = TrainingArguments.__dataclass_fields__[name].default == default
        if value != default and not off and not (inherited and any(value == unset[name] for unset in _unset())):
            yield name, f"{name}={value!r} has no effect on ES: {why}. Remove it."


def absent(what: str, section: str, name: str, known: Iterable[str]) -> str:
    """Return the error for a name that there is not here, with the reason where TRL's trainer has it.

    Args:
        what: begins the error.
        section: of `SURFACE`.
        name: as it was given.
        known: names that there are.
    """
    why = SURFACE[section].get(name, ("", ""))[1]
    return f"{what} {name!r}" + (f": {why}." if why else f".{nearest(name, known, cutoff=0.8)}")


def refused(check: Callable[..., object], name: str, *arguments: Any) -> Iterator[tuple[str, str]]:
    """Yield the setting of this name with the text of the ValueError that a check of it raises, if it raises one."""
    try:
        check(name, *arguments)
    except ValueError as error:
        yield name, str(error)


def joined(problems: Sequence[str]) -> str:
    """Return problems as the text of one error."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} settings cannot stay as they are:", *(f"- {problem}" for problem in problems)])
