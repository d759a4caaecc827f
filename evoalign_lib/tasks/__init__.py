"""Registry of the tasks. Each task is one module with its data, prompts and graders.

Every task module provides `reward(prompts, completions, **columns) -> list[float | None]` (the signature of TRL's
reward functions), `REWARD_FLOOR` (the lowest reward, given to a completion that cannot be scored) and
`dataset(problems, tokenizer, chat_template=True) -> list[dict]` (rows with `prompt` and the columns `reward` takes).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from evoalign_lib import chats
from evoalign_lib.checks import choose, nearest, require

Row = TypeVar("Row")

TASKS: dict[str, str] = {
    "countdown": "evoalign_lib.tasks.countdown",
    "conciseness": "evoalign_lib.tasks.conciseness",
    "safety": "evoalign_lib.tasks.safety",
    "arithmetic": "evoalign_lib.tasks.arithmetic",
    "facts": "evoalign_lib.tasks.facts",
    "sequence": "evoalign_lib.tiny.sequence",  # four tasks, of the tiny world alone
    "mathematics": "evoalign_lib.tasks.mathematics",
    "reasoning": "evoalign_lib.tasks.reasoning",
}
"""Task name -> module, imported on first use. A new task needs a module and a line here."""

TURN = re.compile(
    r"(?:^|\n)[ \t]*(?:USER|ASSISTANT|HUMAN|SYSTEM|User|Assistant|Human|System):|\b(?:USER|ASSISTANT):"
    r"|\n(?:user|assistant)\n|<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|### ?Instruction"
)
"""Matches where a completion starts another turn of the conversation."""

PUBLIC_REPOSITORY = (
    "https://raw.githubusercontent.com/jbejjani2022/evolutionary-alignment/bfdaf87faff62380c213b3bf91ae2d3f92c8919b/"
)
"""Source of the tasks' public data (MIT licence), pinned to one commit."""


def get(name: str) -> ModuleType:
    """Import and return the module of a task. Raises ValueError for an unknown name and suggests the nearest one.

    >>> get("countdown").__name__
    'evoalign_lib.tasks.countdown'
    """
    require(name in TASKS, f"unknown task {name!r}; known: {', '.join(sorted(TASKS))}.{nearest(name, TASKS)}")
    return import_module(TASKS[name])


def named(name: str) -> tuple[ModuleType, tuple[str, ...]]:
    """Return the module of a task, and its set of problems in a tuple: ("gsm8k",) for "mathematics:gsm8k".

    The tuple is empty for tasks that have one set only, such as "countdown". Raises ValueError for an unknown task or
    set, and for a task with several sets of which none is named.
    """
    task, colon, part = name.partition(":")
    module = get(task)
    if not hasattr(module, "names"):
        require(not colon, f"task {name!r}: {task} has one set of problems. Say {task!r}.")
        return module, ()
    known = module.names()
    require(part, f"task {name!r} has several sets of problems: say {task}:NAME, with one of {', '.join(known)}.")
    choose(task, part, known)
    return module, (part,)


def public_file(name: str, path: str, sha256: str) -> Path:
    """Return a file of public data, fetched into the user's cache if necessary, and check its SHA-256.

    Args:
        name: path of the file in the user's data folder, such as "conciseness/train.jsonl".
        path: path of the file in `PUBLIC_REPOSITORY`.
        sha256: SHA-256 of the file.

    Returns:
        The file in the folder that the environment variable EVOALIGN_DATA names, if it exists there; otherwise the
        cached download.

    Raises:
        FileNotFoundError: the file is in neither place and cannot be fetched.
        ValueError: the file is not the published one.
    """
    url = PUBLIC_REPOSITORY + path
    found = local_file(name) or fetched(name, url, sha256)
    check_digest(found, found.read_bytes(), url, sha256)
    return found


def local_file(*names: str) -> Path | None:
    """Return the first of these files that exists in the folder EVOALIGN_DATA names; None if none does."""
    folder = os.environ.get("EVOALIGN_DATA")
    return next((place for name in names if folder and (place := Path(folder, name)).is_file()), None)


def check_digest(found: Path, data: bytes, url: str, sha256: str) -> None:
    """Raise ValueError if the data of a public file do not have the expected SHA-256."""
    digest = hashlib.sha256(data).hexdigest()
    require(digest == sha256, f"{found} has SHA-256 {digest}, expected {sha256}: delete it and fetch {url}")


def fetched(name: str, url: str, sha256: str) -> Path:
    """Return the cached copy of a public file, fetching it if there is none. Raises as `public_file` does."""
    import pooch

    # (connect, read) in seconds: fail soon without a network
    downloader = pooch.HTTPDownloader(timeout=(5, 30))
    cached = Path(pooch.os_cache("evoalign"), name)
    try:
        pooch.retrieve(url, known_hash=f"sha256:{sha256}", fname=cached.name, path=cached.parent, downloader=downloader)
    except OSError as error:
        told = f"cannot fetch {url} ({type(error).__name__}); set EVOALIGN_DATA to a folder that holds {name}"
        raise FileNotFoundError(told) from error
    return cached


def json_lines(data: bytes, where: str | Path, make: Callable[[dict[str, Any]], Row]) -> list[Row]:
    """Parse a UTF-8 file with a JSON object per line and return the rows that `make` builds; blank lines are skipped.

    Args:
        data: content of the file.
        where: its name, for errors.
        make: object -> row; a KeyError or ValueError that it raises is reported as an error of the line.

    Raises:
        ValueError: a line that is not such an object, or no lines; the message names the line and what is wrong.
    """
    rows = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            if not isinstance(row, dict):
                raise ValueError(f"expected an object, got {row!r:.200}")
            rows.append(make(row))
        except KeyError as error:
            raise ValueError(f"{where}, line {number}: no {error} among {', '.join(map(repr, row))}") from None
        except (ValueError, RecursionError) as error:  # invalid UTF-8 or JSON raises a ValueError, too
            raise ValueError(f"{where}, line {number}: {error or type(error).__name__}") from None
    require(rows, f"{where} holds no rows: write one JSON object per line.")
    return rows


def completion_text(completion: Any) -> str:
    """Return the text of a completion: the string itself, or the assistant's messages of a conversation, joined.

    Args:
        completion: a string, or a list of messages {"role", "content"}, as in TRL for conversational prompts.

    Raises:
        TypeError: a completion in another form.

    >>> completion_text([{"role": "assistant", "content": "Paris"}])
    'Paris'
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(message, Mapping) for message in completion):
        parts = [message.get("content") for message in completion if message.get("role") == "assistant"]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
    raise TypeError(f"a completion must be a string or a list of text messages, got {completion!r:.200}")


def chat_prompt(messages: str | Sequence[Mapping[str, str]], tokenizer: Any) -> str:
    """Render messages with a tokenizer's chat template, up to the start of the assistant's turn.

    messages: a string is taken as a single user message. Raises ValueError without a tokenizer.
    """
    require(tokenizer is not None, "the chat variant needs a tokenizer: pass tokenizer=..., or chat_template=False")
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return chats.opened(tokenizer, messages)


def check_lengths(**columns: Sequence[Any]) -> None:
    """Raise ValueError, naming all lengths, unless all columns passed to a reward have one entry per completion."""
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"one entry per completion is needed, got lengths {found}")
