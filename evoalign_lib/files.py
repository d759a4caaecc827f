"""Files that several processes share: locks, atomic writes, compression, and canonical JSON."""

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
    """Lock a file or folder for the block: one holder at a time among all processes and threads of the machine.

    The lock is a file `.<name>.lock` beside the path; missing folders are created. The file may stay after the block
    (deleting it would let two holders in), and git ignores it. A killed process releases its lock. Works on Linux,
    macOS and Windows.

    Args:
        path: file or folder to lock; it need not exist.
        wait: seconds to wait for another holder to finish; below 0: without limit.

    Raises:
        BlockingIOError: another holder still has the lock after that time.
        OSError: the file system does not support locks.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # filelock's fall-back, a lock that consists in a file's existence, would outlive a killed process
    lock = FileLock(path.with_name(f".{path.name}.lock"), fallback_to_soft=False)
    try:
        lock.acquire(timeout=wait, poll_interval=0.002)
    except Timeout as error:
        raise BlockingIOError(f"{path} is locked by another process: wait for it to end, or stop it.") from error
    try:
        yield
    finally:
        lock.release()


def replace_text(path: str | os.PathLike[str], text: str, sync: bool = False) -> None:
    """Write a text file atomically, as `replace_bytes` does, in UTF-8 with line ends \\n."""
    replace_bytes(path, text.encode(), sync)


def replace_bytes(path: str | os.PathLike[str], data: bytes, sync: bool = False) -> None:
    """Write a file atomically: readers find all of the old file or all of the new one, even if the writer is killed.

    Args:
        path: of the file; missing folders are created. The data are written to `.<name>.<process>.part` beside it
            (which git ignores), which is then renamed.
        data: the whole content.
        sync: force the file and its name to disk before returning, so that they survive a power cut.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:  # a full disk, say, which it would fill
        part.unlink(missing_ok=True)
        raise
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
    """Raise ValueError if a path exists and is not an empty folder, so that nothing gets overwritten."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{str(path)!r} exists: pass a new folder.")


def compressed(data: bytes) -> bytes:
    """Return data compressed with gzip; the bytes depend on the data alone, not on a file name or time."""
    out = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, out, mtime=0) as file:
        file.write(data)
    return out.getvalue()


def decompressed(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the unpacked data of a gzip file.

    Args:
        path: of the file.
        most: largest number of bytes it may unpack to; a few kB can unpack to gigabytes.

    Raises:
        ValueError: the file is damaged, its end is missing, or it unpacks to more than `most` bytes.
    """
    try:
        with gzip.open(path) as file:
            data = file.read(most + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it from a copy.") from error
    if len(data) > most:
        raise ValueError(f"{path} unpacks to more than {most // 10**6} MB: if you trust it, unpack it with gunzip.")
    return data


def canonical_json(value: Any) -> str:
    """Return a value as canonical JSON, the text that is hashed: sorted keys, no spaces, ASCII only.

    Raises:
        ValueError: the value contains NaN or an infinity.

    >>> canonical_json({"b": 1, "a": [0.5, None, "σ"]})
    '{"a":[0.5,null,"\\\\u03c3"],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
