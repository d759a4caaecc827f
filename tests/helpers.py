"""Small models and trainers that several test files use."""

import ast
import hashlib
import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForSequenceClassification
from typer import Typer
from typer.testing import CliRunner

from evoalign_lib import noise, tiny
from evoalign_lib._forks import own_progress_bars

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
PROMPTS = ["a", "bc d", "Using the numbers", "12", "x" * 9, "<|im_start|>user\nhello", "é", "0 1 2 3"]


# the published Qwen2.5 sizes: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied, parameters
QWEN = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True, 494_032_768),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True, 1_543_714_304),
    "3B": (2048, 11008, 36, 16, 2, 151936, True, 3_085_938_688),
    "7B": (3584, 18944, 28, 28, 4, 152064, False, 7_615_616_512),
    "14B": (5120, 13824, 48, 40, 8, 152064, False, 14_770_033_664),
    "32B": (5120, 27648, 64, 40, 8, 152064, False, 32_763_876_352),
    "72B": (8192, 29568, 80, 64, 8, 152064, False, 72_706_203_648),
}
CONFIG_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
CONFIG_NAMES = (*CONFIG_NAMES, "vocab_size", "tie_word_embeddings")


STATE_SHAPES = {"embed.weight": (7, 5), "norm.bias": (6,), "scale": ()}


def state(seed: int, spread: float = 1.0, shapes: Mapping = STATE_SHAPES) -> dict[str, torch.Tensor]:
    """Return a state dict of Gaussian float32 entries."""
    rng = np.random.default_rng(seed)
    drawn = {name: spread * rng.standard_normal(shape) for name, shape in shapes.items()}
    return {name: torch.tensor(entries, dtype=torch.float32) for name, entries in drawn.items()}


def same_bits(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two state dicts have the same names and bits, including the sign of 0."""
    one, other = ([(name, part.numpy().tobytes()) for name, part in each.items()] for each in (first, second))
    return one == other


def flat(weights: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Return all entries of a state dict, float64."""
    return np.concatenate([tensor.double().numpy().ravel() for tensor in weights.values()])


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """Return family A's tokenizer, which has about 280 tokens."""
    return tiny.tokenizer()


def random_model(kind: str = "qwen2", seed: int = 2, spread: float = 0.2, **config: Any) -> Any:
    """Return a model of 20,000 parameters with random weights so large that greedy outputs differ between prompts.

    With seed 2, no completion of PROMPTS ends within 12 tokens.
    """
    tok = tokenizer()
    settings = {"vocab_size": len(tok), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    settings |= {"tie_word_embeddings": True, "initializer_range": spread, "bos_token_id": None}
    settings |= {"eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id} | config
    make = LlamaForSequenceClassification if kind == "scorer" else AutoModelForCausalLM.from_config
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make(AutoConfig.for_model("llama" if kind == "scorer" else kind, **settings)).eval()
        with torch.no_grad():  # biases and norms start at 0 and 1, where an error in their use would not show
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * spread)
    return model


def with_another_head(model: Any) -> Any:
    """Give a model a head that is not its embedding, whatever its configuration says, as merging an adapter does."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().roll(1))
    return model


def every_resample(n: int) -> np.ndarray:
    """Return (n**n, n): the indices of every resample of n units, each as likely as the others."""
    return np.array(list(itertools.product(range(n), repeat=n)))


def qwen(size: str, **changed) -> dict:
    """Return the configuration of a published Qwen2.5."""
    config = dict(zip(CONFIG_NAMES, QWEN[size][:-1], strict=True))
    return config | {"model_type": "qwen2", "dtype": "bfloat16"} | changed


def chained(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the bytes of a ledger of these lines with correct hashes, in the format that the header names."""
    lines = [{name: value for name, value in line.items() if name not in ("hash", "prev")} for line in lines]
    old = lines[0].get("evoalign_ledger") == 1
    texts: list[str] = []
    last = ""
    for line in lines:
        if old:
            text = json.dumps(line | ({"prev": last} if texts else {}), separators=(",", ":"))
            last = hashlib.sha256(text.encode()).hexdigest()[:32]
        else:
            text = json.dumps(line, separators=(",", ":"))[:-1]
            last = hashlib.sha256((last + text).encode()).hexdigest()[:32]
            text += f',"hash":"{last}"}}'
        texts.append(text)
    return "\n".join([*texts, ""]).encode()


def fork(function: Callable[..., object], *arguments: object) -> int:
    """Run a function in a child that inherits everything imported, and return its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking a process that has threads
        pid = os.fork()
    if pid == 0:
        status = 1
        own_progress_bars()  # an inherited lock would stay locked for ever if a child is killed while holding it
        try:
            function(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def wait(pid: int, seconds: float = 120) -> int:
    """Return the exit status of a child; if it hangs, make it print where (pytest's fault handler) and fail."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGABRT)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} did not end within {seconds} s")


def in_child(function: Callable[[], object]) -> int:
    """Run a function in a forked process and return its exit status."""
    return wait(fork(function), 190)


def python(*arguments: object, folder: Path | None = None, env: Mapping | None = None) -> subprocess.CompletedProcess:
    """Run this Python in a folder, and fail with what it said if it fails."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done


def typed(app: Typer, *arguments: object) -> tuple[int, str]:
    """Return exit code and output of a command as it is typed; no error is a traceback."""
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "400"})  # or errors are broken in a box
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def greedy(model, length: int = 6) -> list[list[int]]:
    """Return the greedy tokens of transformers' generate for `PROMPTS`, one prompt at a time."""
    tok, found = tokenizer(), []
    ends = {"eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id}
    for prompt in PROMPTS:
        ids = torch.tensor([tok(prompt)["input_ids"]])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": length}
        new = model.generate(**given, do_sample=False, **ends)
        found.append(new[0, ids.shape[1] :].tolist())
    return found


# ---- short runs of adapters

ROWS = [{"prompt": p, "number": i} for i, p in enumerate(PROMPTS)]
SFT_ROWS = [{"prompt": p, "completion": str(i)} for i, p in enumerate(PROMPTS)]


def token_sum(completion_ids, **columns) -> list[float]:
    """Reward each completion with the sum of its token ids."""
    return [float(sum(ids)) for ids in completion_ids]


def fails_later(completions, trainer_state, **columns) -> list[float]:
    """Fail on every completion of the second step."""
    return [i / (1 - trainer_state.global_step) for i, _ in enumerate(completions)]


def lora(**changed) -> Any:
    """Return the configuration of an adapter on three layers of each block, whose product is zero at the start."""
    from peft import LoraConfig

    targets = ["q_proj", "v_proj", "up_proj"]
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 12, "target_modules": targets} | changed)


def short_run(folder, config: type, **changed) -> Any:
    """Return settings of a run of three steps in one process that prints nothing and saves no checkpoints."""
    settings = {"max_steps": 3, "workers": 1, "max_completion_length": 3, "disable_tqdm": True, "report_to": "none"}
    return config(**{"output_dir": str(folder), "save_strategy": "no"} | settings | changed)


def ran(trainer, resume: bool | None = None) -> Any:
    """Return a trainer after train()."""
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def saved(folder, model=None) -> str:
    """Save a model and its tokenizer as a user would, and return the folder."""
    for part in (model or random_model(), tokenizer()):
        part.save_pretrained(folder)
    return str(folder)


def saved_base(folder) -> Any:
    """Load a plain model from a folder, which is created on the first call."""
    from evoalign_lib import models

    if not folder.exists():
        saved(folder, random_model(intermediate_size=64))
    return models.load(str(folder))[0]


def base_bits(model) -> dict[str, bytes]:
    """Return the bits of a model's whole state except the adapter, including codes and scales."""
    from evoalign_lib._adapters import raw_bytes

    state = {name: b"".join(raw_bytes(value)) for name, value in model.state_dict().items()}
    return {name: bits for name, bits in state.items() if "lora_" not in name and bits}


def each_named(*changes: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """Pair each set of refused settings with the start of its error: the name and value of its first setting."""
    return [(change, re.escape("{}={!r}".format(*next(iter(change.items()))))) for change in changes]


def refused(*cases: tuple, call: Callable = lambda make: make(), error: type | tuple = ValueError) -> Callable:
    """Return a test that has a case for each of these, which are all refused by an error that names what is wrong.

    cases: arguments of `call`, perhaps the type of the error, and what its message matches.
    call: its further parameters are names of fixtures.
    """

    def typed(case: tuple) -> tuple:
        own = isinstance(case[-2], type) and issubclass(case[-2], BaseException)
        return (case[:-2], case[-2], case[-1]) if own else (case[:-1], error, case[-1])

    @pytest.mark.parametrize(("given", "error", "named"), [typed(case) for case in cases])
    def test(request, given, error, named):
        names = list(inspect.signature(call).parameters)[len(given) :]
        fixtures = [request.getfixturevalue(name) for name in names]
        with pytest.raises(error, match=named):
            call(*given, *fixtures)

    return test


SMALL_RUN = {
    "max_completion_length": 16, "validation_problems": 6, "test_problems": 10, "steps": 2, "prompts_per_step": 4,
    "curve_points": 3, "population_size": 3, "sigma": 0.03, "alpha": 0.01, "num_generations": 4, "learning_rate": 1e-3,
    "beta": 0.0, "lora_rank": 2, "leading_share": 1.0, "warm_rows": 8, "warm_epochs": 1, "warm_learning_rate": 1e-3,
}  # fmt: skip
"""Settings of the study's runs, those of every arm but fine-tuning."""

# ---- code that notebooks write out


def written_out(notebook: str, *names: str) -> list[Callable]:
    """Return functions defined in the cells of a committed notebook."""
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    trees = [ast.parse("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    namespace = {"np": np, "noise": noise, "torch": torch}
    exec(compile(ast.Module(nodes, []), notebook, "exec"), namespace)  # our own notebook, as Jupyter would
    return [namespace[name] for name in names]
