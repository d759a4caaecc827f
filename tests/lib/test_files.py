"""Locks and files written in one piece, across real processes."""

import os
import signal
import time

import pytest
from helpers import fork, wait

from evoalign_lib.files import locked, replace_bytes


def hold(path, said) -> None:
    with locked(path):
        os.write(said, b"held")
        time.sleep(60)


def test_a_lock_has_one_holder_and_a_killed_one_gives_it_back(tmp_path):
    path, (heard, said) = tmp_path / "new" / "records.jsonl", os.pipe()
    holder = fork(hold, path, said)
    assert os.read(heard, 4) == b"held"
    with pytest.raises(BlockingIOError, match=r"records\.jsonl is locked by another process: wait"):
        with locked(path, wait=0):
            pass
    with locked(path.with_name("other.jsonl"), wait=0):  # another file has another lock
        pass
    os.kill(holder, signal.SIGKILL)
    wait(holder)
    with pytest.raises(KeyError), locked(path, wait=0):
        raise KeyError
    with locked(path, wait=0):  # a block that fails gives it back, too
        assert not path.exists()
    assert {file.name for file in path.parent.iterdir()} <= {".records.jsonl.lock", ".other.jsonl.lock"}


def test_a_file_is_whole_for_readers_and_after_a_kill(tmp_path):
    path, versions = tmp_path / "file", [byte * 2_000_000 for byte in (b"a", b"b")]
    replace_bytes(path, versions[0])

    def write() -> None:
        while True:
            for data in versions:
                replace_bytes(path, data)

    writer, read = fork(write), []
    while len(read) < 200 or len(set(read)) < 2:
        read.append(versions.index(path.read_bytes()))  # a torn file is neither of the two
    os.kill(writer, signal.SIGKILL)
    wait(writer)
    assert path.read_bytes() in versions
    assert {file.name for file in tmp_path.iterdir()} <= {"file", f".file.{writer}.part"}


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    replace_bytes(tmp_path / "file", b"old")
    monkeypatch.setattr(type(tmp_path), "replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        replace_bytes(tmp_path / "file", b"new")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]
