"""Files that several processes use: locks, writing in one piece, compression, and the one JSON text of a value."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


@contextmanager
def locked(path: str | os.PathLike[str], wait: float = -1) -> Iterator[None]:
    """Hold the lock of a file or folder: one holder at a time, over all processes and threads of the machine.

    The lock is a file `.<name>.lock` beside the path, made with its folder. It may stay there after the block (deleting
    it would let two holders in), and git ignores it. The lock of a process that was killed is free again. Works on
    Linux, macOS and Windows.

    Args:
        path: of what is locked; it need not exist.
        wait: seconds to wait for another holder to finish; below 0: until it does.

    Raises:
        BlockingIOError: another holder still has it after that time.
        OSError: the file system has no locks.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # a lock by mere existence of a file, filelock's fall-back, would outlive a killed process
    lock = FileLock(path.with_name(f".{path.name}.lock"), fallback_to_soft=False)
    try:
        lock.acquire(timeout=wait, poll_interval=0.002)
    except Timeout as error:
        raise BlockingIOError(f"{path} is locked by another process: wait for it, or end it.") from error
    try:
        yield
    finally:
        lock.release()


def replace_text(path: str | os.PathLike[str], text: str, sync: bool = False) -> None:
    """Write a text file, UTF-8 with line ends \\n, in one piece: as `replace_bytes`."""
    replace_bytes(path, text.encode(), sync)


def replace_bytes(path: str | os.PathLike[str], data: bytes, sync: bool = False) -> None:
    """Write a file in one piece: whoever reads it, and after a kill, finds all of the old file or all of the new one.

    Args:
        path: of the file, made with its folder. The data are written beside it, as `.<name>.<process>.part` (which git
            ignores), and renamed.
        data: all of the file.
        sync: force the file and its name to disk before returning, so that they survive a power cut.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(part, "wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Force the names in a folder to disk; on Windows, where folders cannot be synced, do nothing."""
    if os.name != "posix":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def check_new_folder(path: str | os.PathLike[str]) -> None:
    """Raise ValueError, before any work, where something would be overwritten."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{str(path)!r} exists: give a new folder.")


def compressed(data: bytes) -> bytes:
    """Return data compressed with gzip: a function of the data alone, without name or time of a file."""
    out = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, out, mtime=0) as file:
        file.write(data)
    return out.getvalue()


def decompressed(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the data of a file that is compressed with gzip.

    Args:
        path: of the file.
        most: bytes that it may unpack to: a few kB can unpack to gigabytes.

    Raises:
        ValueError: the file is damaged, its end is missing, or it unpacks to more than `most` bytes.
    """
    try:
        with gzip.open(path) as file:
            data = file.read(most + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it from a copy.") from error
    if len(data) > most:
        raise ValueError(f"{path} unpacks to more than {most // 10**6} MB: if you trust it, unpack it (gunzip).")
    return data


def canonical_json(value: Any) -> str:
    """Return the canonical JSON of a value, the text that is hashed: sorted keys, no spaces, ASCII alone.

    Raises:
        ValueError: NaN or an infinity.

    >>> canonical_json({"b": 1, "a": [0.5, None, "σ"]})
    '{"a":[0.5,null,"\\\\u03c3"],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
