"""Answers of judges, kept by the hash of what was asked: a file of JSON lines.

A line has the answer (`text`, `prompt_tokens`, `completion_tokens`, `cut`) and the `key`, the SHA-256 of the judge's
identity and the messages. Questions are not in the file. Failures are not kept: they are asked again.

Lines are appended under a lock and synced to disk. A line counts once its newline is there; what a killed process left
of its last line is dropped. Anything else that is wrong is an error that names the line.
"""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evoalign_lib.files import canonical_json, locked
from evoalign_lib.judges.answers import Answer

_FIELDS = ("text", "prompt_tokens", "completion_tokens", "cut")


class CacheError(ValueError):
    """A cache that is damaged; the message names the line."""


def key_of(identity: Mapping[str, Any], messages: list[dict[str, str]]) -> str:
    """Return the key of a question: 64 hexadecimal digits, another one for any change of model, decoding or text."""
    return hashlib.sha256(canonical_json({"judge": identity, "messages": messages}).encode()).hexdigest()


class Cache:
    """Answers in memory and, with a path, in a file, which several processes and threads may use at once.

    Two processes that ask the same at the same time pay twice; the answer that comes first is the one that stays, for
    both of them.

    Args:
        path: the file; it need not exist. None: no file.

    Raises:
        CacheError: a damaged line.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self.path = None if path is None else Path(path)
        self._answers: dict[str, Answer] = {}
        self._size = self._lines = 0
        self._one = threading.RLock()
        self.refresh()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> Answer | None:
        """Return the answer of a key, None where there is none."""
        return self._answers.get(key)

    def put(self, key: str, answer: Answer) -> Answer:
        """Keep an answer, synced to disk, and return the one that the cache holds: the first of this key.

        Raises:
            ValueError: the answer is a failure.
            CacheError: another process has damaged or removed the file.
            OSError: it cannot be written.
        """
        if answer.text is None:
            raise ValueError(f"a failure ({answer.error}) is not kept: ask again.")
        with self._one:
            if self.path is None:
                return self._answers.setdefault(key, answer)
            with locked(self.path):
                self.refresh()
                if key not in self._answers:
                    fields = {"key": key} | {name: getattr(answer, name) for name in _FIELDS}
                    with open(self.path, "ab") as file:
                        file.truncate(self._size)  # what a killed process, or a full disk, left of a line
                        file.write(canonical_json(fields).encode() + b"\n")
                        file.flush()
                        os.fsync(file.fileno())
                    self.refresh()
            return self._answers[key]

    def refresh(self) -> None:
        """Read the lines that were added since the last time, by whatever process.

        Raises:
            CacheError: as the class does.
        """
        with self._one:
            size = self.path.stat().st_size if self.path is not None and self.path.exists() else 0
            if size < self._size:
                raise CacheError(f"{self.path} is shorter than it was: another program cut it. Start this one anew.")
            if size > self._size:
                with open(self.path, "rb") as file:
                    file.seek(self._size)
                    *whole, _ = file.read().split(b"\n")
                for line in whole:
                    self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
            key, answer = fields["key"], Answer(**{name: fields[name] for name in _FIELDS})
            if not (isinstance(key, str) and isinstance(answer.text, str)):
                raise TypeError("its key or its text is no string")
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            told = f"{self.path}, line {self._lines + 1} is damaged ({error})"
            raise CacheError(f"{told}: take that line out, and its question is asked again.") from None
        self._answers.setdefault(key, answer)  # the first one, where files were put together
        self._size += len(line) + 1
        self._lines += 1
